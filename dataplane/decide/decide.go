package decide

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// sniffWait is how long a silent client on an address that is not an HTTP port
// of the mesh may hold the decision (contract 4.2).
const sniffWait = time.Second

// Decide says what to do with a connection.
//
// Captured: a dial of a mesh service whose rows are not here is Await before
// anything else, for the rows say which class a port has (contract 4.6, decision
// 033); with f.Waited what else is known of the service decides.
//
// With f.Sniff None it answers Sniff only where the bytes can change
// the answer. A declared raw-TCP port is forwarded without a byte read. On an
// HTTP port of the mesh, and on its port 18081, the wait has no bound of its
// own: clients open connections ahead and say nothing, and a connection to the
// mesh is never passed through for its silence, nor for a request that nobody should
// have sent so (SniffMalformed). With a sniff result the answer is never Sniff.
//
// A raw-TCP port on which TLSRoutes are in force is sniffed for a ClientHello
// only (HelloOnly), and with any other result is what it is without them.
//
// f.Host is the authority of the first request. For h2c that is known only
// after the first HEADERS frame: the engine reads up to it before asking with
// SniffH2C, for an empty Host means "no authority" here. For a ClientHello it
// is the server name.
//
// pick is a random number for the weighted backends of TCPRoutes and TLSRoutes:
// any value does, and equal values choose alike.
//
// Passing through is decided here once for the connection: the address is no
// service's and the first authority is no mesh name (docs/architecture.md, "Rules of our own").
//
// Proxy: Serve, always; the loopback listener is HTTP. Inbound: f.Dst's port is
// the one the SNI named; Deliver to a port the pod declares, else Refuse.
func Decide(s *snapshot.Snapshot, f *model.Flow, pick uint32, t *Trace) Verdict {
	if t != nil {
		t.add("snapshot %d: connection %s", s.Version(), f.String())
	}
	switch f.Dir {
	case model.Captured:
		return captured(s, f, pick, t)
	case model.Proxy:
		return Verdict{Action: Serve, Reason: ProxyPort}
	case model.Inbound:
		return inbound(s, f, t)
	}
	return Verdict{Action: Refuse, Reason: NoVerdict}
}

func captured(s *snapshot.Snapshot, f *model.Flow, pick uint32, t *Trace) Verdict {
	addr, port := f.Dst.Addr().Unmap(), f.Dst.Port()
	var pod *snapshot.Workload // looked up where it matters only
	if t != nil || model.ReservedPort(port) {
		pod = s.WorkloadOf(f)
	}
	if t != nil {
		if pod == nil {
			t.add("no such pod on this node: capture is taken to be redirect-all")
		} else {
			t.add("%s: %s", pod.Rule, captureText(pod))
		}
	}
	if comesBack(pod, addr, port) {
		v := Verdict{Action: Refuse, Reason: Loop}
		if pod != nil {
			v.Rule = pod.Rule
		}
		return v
	}

	svc := s.Address(addr)
	switch {
	case svc == nil:
		if t != nil {
			if n, ok := s.Outside(addr); ok {
				t.add("%s is the address of Service %s, which has no pods in the mesh: none has the ServiceAccount %s (contract 1.1)", addr, n, n.Name)
			} else {
				t.add("%s is the address of no service", addr)
			}
		}
	case svc.Broken != "" && svc.Mesh():
		return Verdict{Action: Refuse, Reason: BrokenService, Rule: svc.Rule}
	case !svc.Mesh():
		if t != nil {
			t.add("%s is %s's, a user's Service that no route names: its address is not the mesh's (contract 4.9)", addr, svc.Rule)
		}
		svc = nil
	case svc.Await && f.Sniff == model.SniffNone && !f.Waited:
		if t != nil {
			t.add("%s is %s's (%s), which is in the mesh's catalog and whose rows are not here yet: nothing is read before they are (contract 4.6)", addr, svc.Rule, svc.Kind)
		}
		return Verdict{Action: Await, Reason: AwaitRows, Rule: svc.Rule, Awaits: svc}
	default:
		if t != nil {
			t.add("%s is %s's (%s)", addr, svc.Rule, svc.Kind)
		}
	}

	http := false // the mesh's port, and HTTP by declaration
	var tcp rawPort
	var arms tlsArms
	if svc != nil {
		p := svc.Port(port)
		switch {
		case p != nil && p.Class == model.HTTP:
			if t != nil {
				t.add("%d is an HTTP port of it", port)
			}
			http = true
		case port == model.PortProxy:
			http = true
			if !slices.ContainsFunc(svc.Ports, func(p snapshot.Port) bool { return p.Class == model.HTTP }) {
				arms = armsOn(svc, f.Namespace, port, 0)
			}
		default:
			tcp = rawPortOf(svc, p, port)
			arms = armsOn(svc, f.Namespace, port, tcp.number)
			if t != nil && tcp.backend == nil {
				t.add("%d is no TCP or HTTP port of it", port)
			}
		}
		if t != nil && arms.any {
			t.add("TLSRoutes are in force on the port")
		}
		switch {
		case f.Sniff == model.SniffTLS && arms.any:
			if a := arms.claim(f.Host); a != nil {
				if t != nil {
					t.add("server name %q is %s's", f.Host, a.Split.Name)
				}
				return split(s, a.Split, TLSRoute, pick, t)
			}
			if t != nil {
				t.add("server name %q is in no TLSRoute of it", f.Host)
			}
		case f.Sniff == model.SniffNone && arms.any && tcp.backend != nil:
			return Verdict{Action: Sniff, Reason: tcp.why, Rule: svc.Rule, HelloOnly: true, Wait: sniffWait}
		}
		if tcp.backend != nil {
			if t != nil {
				t.add("the port is raw TCP: what the bytes say does not matter")
			}
			if sp := tcp.port.SplitFor(f.Namespace); sp != nil {
				return split(s, sp, TCPRoute, pick, t)
			}
			return raw(s, tcp.backend, tcp.why, svc.Rule, t)
		}
	}

	reason, rule := ForeignAddress, ""
	var at *snapshot.Backend // of a pod that was dialled itself
	if svc == nil && port != model.PortProxy {
		if at = s.HTTPEndpoint(addr, port); at != nil {
			http = true
			if t != nil {
				t.add("%s is a pod of %s, which declares %d HTTP", addr, at.Service, port)
			}
		}
	}
	switch {
	case port == model.PortProxy:
		reason = ProxyPort
	case at != nil: // each request is looked at, whatever its authority (decision 044)
		reason, rule = EndpointAddress, at.Name
	case http:
		reason, rule = DeclaredHTTP, svc.Rule
	case svc != nil:
		reason, rule = MeshAddress, svc.Rule
	}

	switch f.Sniff {
	case model.SniffNone:
		v := Verdict{Action: Sniff, Reason: reason, Rule: rule, Race: svc == nil && at == nil}
		switch {
		case http:
		case reason == ForeignAddress && len(s.Services()) == 0 && !blackhole(pod, port):
			// No authority can name anything.
			return Verdict{Action: Passthrough, Reason: NoNames}
		default:
			v.Wait = sniffWait
		}
		return v
	case model.SniffHTTP10, model.SniffHTTP11, model.SniffH2C:
		if reason != ForeignAddress {
			return Verdict{Action: Serve, Reason: reason, Rule: rule}
		}
		n := snapshot.Name(s, f.Host, f.Namespace)
		if host, _, more := strings.Cut(f.Host, ":"); more && !n.WellFormed {
			// A mesh name with a port that is none is nobody else's: the codec answers.
			if n = snapshot.Name(s, host, f.Namespace); n.Service != nil && claims(n.Service, port, 0) {
				if t != nil {
					t.add("authority %q names %s, with a port that is none", f.Host, n.Service.Rule)
				}
				return Verdict{Action: Serve, Reason: MeshName, Rule: n.Service.Rule}
			}
			n = snapshot.Named{}
		}
		if n.NoCaller {
			return Verdict{Action: Serve, Reason: CallerNamespaceUnknown}
		}
		if n.Service != nil && claims(n.Service, port, n.Port) {
			if t != nil {
				t.add("authority %q names %s", f.Host, n.Service.Rule)
			}
			return Verdict{Action: Serve, Reason: MeshName, Rule: n.Service.Rule}
		}
		if t != nil {
			t.add("authority %q: %s", f.Host, foreignText(n, port))
		}
		return Verdict{Action: Passthrough, Reason: NotMesh}
	case model.SniffMalformed: // somebody behind the address may read it as a request: the codec answers (decision 042)
		if http {
			return Verdict{Action: Serve, Reason: reason, Rule: rule}
		}
	case model.SniffSilent:
		if http {
			return Verdict{Action: Refuse, Reason: Idle, Rule: rule}
		}
		return pass(pod, port, ServerFirst)
	case model.SniffTLS:
		return pass(pod, port, TLS)
	}
	return pass(pod, port, Opaque)
}

// comesBack reports whether what is dialled leads to a listener of ours in the pod itself (decision
// 043). Nothing but a dial of the capture port has that port: what was diverted to it keeps
// the port it was dialled with. The other listeners' ports are refused at addresses that are the
// pod's own whatever its namespace looks like; one that its status does not list, only its
// namespace knows.
func comesBack(pod *snapshot.Workload, addr netip.Addr, port uint16) bool {
	if !model.ReservedPort(port) {
		return false
	}
	return port == model.PortCapture || addr.IsLoopback() || addr.IsLinkLocalUnicast() || addr.IsUnspecified() || pod != nil && pod.Owns(addr)
}

// rawPort is a raw-TCP port of a service, as it was dialled.
type rawPort struct {
	backend *snapshot.Backend // nil: it is none
	port    *snapshot.Port    // what it is of the service's ports
	number  uint16            // of port
	why     Reason
}

// noPort has no routes.
var noPort snapshot.Port

// rawPortOf is the raw-TCP port that a dial of port is to. p is the service's own port of that number, or nil.
// 18082 is another spelling of the default TCP port, and with the same routes (contract 4.2 step 3, 4.12).
func rawPortOf(svc *snapshot.Service, p *snapshot.Port, port uint16) rawPort {
	switch {
	case p != nil && p.Class == model.TCP:
		return rawPort{p.Backend, p, port, DeclaredTCP}
	case port == model.PortRaw && svc.Raw != nil:
		for i := range svc.Ports {
			if q := &svc.Ports[i]; q.Backend == svc.Raw {
				return rawPort{svc.Raw, q, q.Number, RawSpelling}
			}
		}
		return rawPort{svc.Raw, &noPort, 0, RawSpelling} // a user's Service that does not map it
	}
	return rawPort{}
}

// tlsArms are the server names in force for one caller on one port of a service.
type tlsArms struct {
	any    bool
	list   []snapshot.SNIMatch
	caller string // whose arms count: a consumer's, or, empty, the producer's
	port   uint16
	number uint16 // the port that port is another spelling of; 0: none
}

// armsOn is the arms on a port that is not HTTP. Arms of the caller's own
// namespace stand in the place of the producer's (GEP-1426).
func armsOn(svc *snapshot.Service, caller string, port, number uint16) tlsArms {
	x := tlsArms{list: svc.TLS, port: port, number: number}
	for i := range x.list {
		a := &x.list[i]
		if !x.on(a) {
			continue
		}
		switch {
		case a.Caller == "":
			x.any = true
		case a.Caller == caller:
			x.any, x.caller = true, caller
		}
	}
	return x
}

func (x *tlsArms) on(a *snapshot.SNIMatch) bool {
	return a.Port == 0 || a.Port == x.port || a.Port == x.number
}

// claim is the most specific arm that a server name is in, or nil. One trailing dot
// is not legal in a server name, and seen (RFC 6066 3): it does not count.
func (x *tlsArms) claim(name string) *snapshot.SNIMatch {
	name = strings.TrimSuffix(name, ".")
	for i := range x.list {
		a := &x.list[i]
		if a.Caller != x.caller || !x.on(a) {
			continue
		}
		n := len(a.Name)
		if a.Below && len(name) > n && strings.EqualFold(name[len(name)-n:], a.Name) || !a.Below && strings.EqualFold(name, a.Name) {
			return a
		}
	}
	return nil
}

// split forwards bytes to one of weighted destinations (contract 10.6).
func split(s *snapshot.Snapshot, sp *snapshot.Split, why Reason, pick uint32, t *Trace) Verdict {
	if sp.Invalid != "" || sp.WeightSum == 0 {
		if t != nil {
			t.add("%s cannot be honoured: %s", sp.Name, sp.Invalid)
		}
		return Verdict{Action: Refuse, Reason: InvalidBackend, Rule: sp.Name}
	}
	b := share(sp.Backends, sp.WeightSum, pick)
	if b.Invalid != "" {
		if t != nil {
			t.add("the share that was drawn has no valid backend: %s", strings.TrimSpace(b.Invalid))
		}
		return Verdict{Action: Refuse, Reason: InvalidBackend, Rule: sp.Name}
	}
	if t != nil {
		t.add("%s: %s drawn out of %d backends by weight", sp.Name, b.Backend.Name, len(sp.Backends))
	}
	return raw(s, b.Backend, why, sp.Name, t)
}

// raw forwards bytes to a backend.
func raw(s *snapshot.Snapshot, b *snapshot.Backend, why Reason, rule string, t *Trace) Verdict {
	set := s.Endpoints(b)
	if !set.Empty() {
		return Verdict{Action: Forward, Reason: why, Rule: rule, Backend: b, Set: set}
	}
	if svc := s.Service(b.Service); set.Len() == 0 && svc != nil && svc.Await {
		if t != nil {
			t.add("%s is in the mesh's catalog and its rows are not here yet (contract 4.6)", b.Service)
		}
		return Verdict{Action: Await, Reason: AwaitRows, Rule: rule, Backend: b, Awaits: svc}
	}
	if t != nil {
		t.add("%s has no healthy endpoint among %d", b.Name, set.Len())
	}
	return Verdict{Action: Refuse, Reason: NoEndpoint, Rule: rule}
}

// pass hands bytes that are not HTTP to the dialled address (contract 4.2 step 5).
func pass(pod *snapshot.Workload, port uint16, why Reason) Verdict {
	if blackhole(pod, port) {
		return Verdict{Action: Refuse, Reason: Blackhole, Rule: pod.Rule}
	}
	return Verdict{Action: Passthrough, Reason: why}
}

// blackhole: scoped capture keeps 18082 to itself.
func blackhole(pod *snapshot.Workload, port uint16) bool {
	return port == model.PortRaw && pod != nil && !pod.Capture.RedirectAll
}

// claims reports whether an authority that names svc is the mesh's on a
// captured dial of port. For a user's Service without a route it is only where
// its own pods declare the dialled port HTTP and the authority names that port
// or none; everything else leaves for the dialled address (contract 4.9).
func claims(svc *snapshot.Service, dialled, named uint16) bool {
	if svc.Kind != snapshot.MeshOnly || dialled == model.PortProxy {
		return true
	}
	p := svc.PodPort(dialled)
	return p != nil && p.Class == model.HTTP && (named == 0 || named == dialled)
}

// inbound: contract 6.2, with a non-empty SNI that names no served port refused.
func inbound(s *snapshot.Snapshot, f *model.Flow, t *Trace) Verdict {
	pod := s.WorkloadOf(f)
	if pod == nil {
		if t != nil {
			t.add("no such pod on this node")
		}
		return Verdict{Action: Refuse, Reason: UnknownSNI}
	}
	port := f.Dst.Port()
	if port == 0 { // no server name, tolerated of Envoy-based peers (contract 6.2)
		port = pod.DefaultPort
	}
	p, ok := pod.Port(port)
	if !ok || p.Class != model.HTTP && p.Class != model.TCP {
		if t != nil {
			t.add("%s declares no HTTP or TCP port %d; it declares %s", pod.Rule, f.Dst.Port(), podPortsText(pod))
		}
		return Verdict{Action: Refuse, Reason: UnknownSNI, Rule: pod.Rule}
	}
	to := pod.SocketOf(p.Class)
	switch {
	case t == nil || pod.Socket == nil:
	case to == nil:
		t.add("%s takes requests at its Unix socket %s/%s/%s, where an inbound filter judges them: raw TCP goes to 127.0.0.1", pod.Rule, pod.Socket.Dir, pod.Socket.Pod, pod.Socket.File)
	default:
		t.add("%s takes all its ports at its Unix socket %s/%s/%s", pod.Rule, to.Dir, to.Pod, to.File)
	}
	return Verdict{Action: Deliver, Reason: ServedPort, Rule: pod.Rule, Port: p.Number, Class: p.Class, App: p.App, Socket: to}
}

// Explain is the whole way of a connection and, with r, of a request on it:
// Decide, once more with an HTTP/1.1 sniff and r's authority if the flow has not
// been sniffed, and Route where Decide leaves it to the requests. A weighted
// split is taken at its start (pick 0). The verdict is what the data plane
// would do; the trace says why.
func Explain(s *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head) (Verdict, *Trace) {
	t := &Trace{}
	v := Decide(s, f, 0, t)
	if r == nil {
		t.add("verdict: %s", v)
		return v, t
	}
	if v.Action == Await {
		t.add("verdict before the first byte: %s; should they not come in time:", v)
		g := *f
		g.Waited = true
		f = &g
		v = Decide(s, f, 0, t)
	}
	if v.Action == Sniff {
		t.add("verdict before the first byte: %s", v)
		g := *f
		g.Sniff, g.Host = model.SniffHTTP11, string(r.Authority)
		f = &g
		v = Decide(s, f, 0, t)
	}
	if v.Action == Serve || v.Action == Deliver && v.Class == model.HTTP {
		t.add("verdict for the connection: %s", v)
		if a, _, ok := httpmsg.Authority(r.Authority); !ok { // which the codec sees before Route is asked
			t.add("authority %q is none", r.Authority)
			v = Verdict{Action: Refuse, Reason: BadAuthority, Status: 400, Text: textBadAuthority}
		} else {
			h := *r
			h.Authority = a // without an empty port
			v = Route(s, f, &h, 0, t)
		}
		if v.Action == Forward {
			t.near(s, &v)
		}
	}
	t.add("verdict: %s", v)
	return v, t
}

// near tells which of the endpoints that a request may go to are met in process.
func (t *Trace) near(s *snapshot.Snapshot, v *Verdict) {
	all := []*snapshot.Endpoint{v.Pinned}
	if v.Pinned == nil {
		all = v.Set.All()
	}
	var here []string
	for _, e := range all {
		if w := s.Near(e); w != nil {
			here = append(here, w.Pod+" ("+e.Addr.Addr().String()+")")
		}
	}
	if len(here) > 0 {
		t.add("in process, not over mTLS (sameNode inProcess): %s of this node", strings.Join(here, ", "))
	}
}

func captureText(pod *snapshot.Workload) string {
	if pod.Capture.RedirectAll {
		return "captured with redirect-all"
	}
	return "captured scoped"
}

// foreignText says why an authority is no mesh name on a captured dial.
func foreignText(n snapshot.Named, dialled uint16) string {
	switch {
	case n.Service != nil:
		return "names " + n.Service.Rule + ", a user's Service that no route names, by another port than its pods' HTTP port dialled"
	case !n.WellFormed:
		return "no host name"
	case n.Below:
		return "below the mesh domain, and there is no such service"
	}
	return "names no service for this caller"
}
