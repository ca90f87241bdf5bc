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
// only (Sniff.HelloOnly), and with any other result is what it is without them.
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
func Decide(s *snapshot.Snapshot, f *model.Flow, pick uint32, t *Trace) (v Verdict) {
	t.connection(s, f)
	switch f.Dir {
	case model.Captured:
		d := dial{s: s, f: f, t: t, addr: f.Dst.Addr().Unmap(), port: f.Dst.Port(), pick: pick}
		d.captured(&v)
	case model.Proxy:
		v.set(Serve, ProxyPort, "")
	case model.Inbound:
		inbound(s, f, t, &v)
	default:
		v.set(Refuse, NoVerdict, "")
	}
	return v
}

// dial is a captured connection, on its way through the steps of contract 4.2.
type dial struct {
	s    *snapshot.Snapshot
	f    *model.Flow
	t    *Trace
	pod  *snapshot.Workload // who dials; looked up where it matters only, and nil where it is not known
	svc  *snapshot.Service  // whose address was dialled; nil: no service's of the mesh
	addr netip.Addr
	port uint16
	pick uint32

	http bool // the dialled port is HTTP by declaration, or the mesh's own
}

// captured runs the steps of contract 4.2 in their order. What costs nothing to know
// goes first: the dialled address and port. Bytes are asked for where they can change the answer.
func (d *dial) captured(v *Verdict) {
	reserved := model.ReservedPort(d.port)
	if d.t != nil || reserved {
		d.pod = d.s.WorkloadOf(d.f)
	}
	d.t.capture(d.pod)
	if reserved && d.comesBack() {
		v.set(Refuse, Loop, "")
		if d.pod != nil {
			v.Rule = d.pod.Rule
		}
		return
	}
	switch svc := d.s.Address(d.addr); {
	case svc == nil:
		d.t.foreignAddress(d.s, d.addr)
	case svc.Broken != "" && svc.Mesh():
		v.set(Refuse, BrokenService, svc.Rule)
		return
	case !svc.Mesh():
		d.t.unroutedAddress(d.addr, svc)
	case svc.Await && d.f.Sniff == model.SniffNone && !d.f.Waited:
		d.t.awaitedAddress(d.addr, svc)
		v.set(Await, AwaitRows, svc.Rule)
		v.Awaits = svc
		return
	default:
		d.t.serviceAddress(d.addr, svc)
		d.svc = svc
		if d.byPort(v) {
			return
		}
	}
	d.byBytes(v)
}

// comesBack reports whether a dial of a reserved port leads to a listener of ours in the pod itself (decision
// 043). Nothing but a dial of the capture port has that port: what was diverted to it keeps
// the port it was dialled with. The other listeners' ports are refused at addresses that are the
// pod's own whatever its namespace looks like; one that its status does not list, only its
// namespace knows.
func (d *dial) comesBack() bool {
	a := d.addr
	return d.port == model.PortCapture || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsUnspecified() || d.pod != nil && d.pod.Owns(a)
}

// byPort is a dial of a service's address. It is decided here for a raw-TCP port (contract 4.2
// steps 2 and 3) and for a server name that a TLSRoute has (step 1); of all else the bytes decide.
func (d *dial) byPort(v *Verdict) (decided bool) {
	p := d.svc.Port(d.port)
	if p != nil && p.Class == model.HTTP {
		d.t.httpPort(d.port)
		d.http = true
		return false
	}
	if d.port == model.PortProxy {
		d.http = true
		if slices.ContainsFunc(d.svc.Ports, func(p snapshot.Port) bool { return p.Class == model.HTTP }) {
			return false
		}
		arms := armsOn(d.svc, d.f.Namespace, d.port, 0)
		return arms.any && d.tlsRoute(v, &arms)
	}
	tcp := rawPortOf(d.svc, p, d.port)
	if tcp.backend == nil {
		d.t.noServicePort(d.port)
	}
	arms := armsOn(d.svc, d.f.Namespace, d.port, tcp.number)
	switch {
	case arms.any && d.tlsRoute(v, &arms):
		return true
	case tcp.backend == nil:
		return false
	case arms.any && d.f.Sniff == model.SniffNone: // the first bytes may be a ClientHello
		v.set(Sniff, tcp.why, d.svc.Rule)
		v.Sniff.HelloOnly, v.Sniff.Wait = true, sniffWait
		return true
	}
	d.t.rawTCPPort()
	if sp := tcp.port.SplitFor(d.f.Namespace); sp != nil {
		d.split(v, sp, TCPRoute)
	} else {
		d.forward(v, tcp.backend, tcp.why, d.svc.Rule)
	}
	return true
}

// tlsRoute is a dial whose server name is a TLSRoute's (contract 4.2 step 1), on a port where some are
// in force. false: it is none's.
func (d *dial) tlsRoute(v *Verdict, arms *tlsArms) bool {
	d.t.tlsRoutes()
	if d.f.Sniff != model.SniffTLS {
		return false
	}
	a := arms.find(d.f.Host)
	d.t.serverName(d.f.Host, a)
	if a == nil {
		return false
	}
	d.split(v, a.Split, TLSRoute)
	return true
}

// byBytes is a dial that the first bytes decide (contract 4.2 steps 4 and 5).
func (d *dial) byBytes(v *Verdict) {
	reason, rule := d.expectation()
	switch d.f.Sniff {
	case model.SniffNone:
		d.sniff(v, reason, rule)
		return
	case model.SniffHTTP10, model.SniffHTTP11, model.SniffH2C:
		if reason == ForeignAddress {
			d.byAuthority(v)
		} else {
			v.set(Serve, reason, rule)
		}
		return
	case model.SniffMalformed: // somebody behind the address may read it as a request: the codec answers (decision 042)
		if d.http {
			v.set(Serve, reason, rule)
			return
		}
	case model.SniffSilent:
		if d.http {
			v.set(Refuse, Idle, rule)
		} else {
			d.passThrough(v, ServerFirst)
		}
		return
	case model.SniffTLS:
		d.passThrough(v, TLS)
		return
	}
	d.passThrough(v, Opaque)
}

// expectation is what address and port say of a dial before a byte of it is read, and the object that says so.
func (d *dial) expectation() (why Reason, rule string) {
	switch {
	case d.port == model.PortProxy:
		return ProxyPort, ""
	case d.svc != nil && d.http:
		return DeclaredHTTP, d.svc.Rule
	case d.svc != nil:
		return MeshAddress, d.svc.Rule
	}
	return d.endpoint()
}

// endpoint is a dial of an address that is no service's: a pod of the mesh may have it, and the port be its HTTP.
func (d *dial) endpoint() (why Reason, rule string) {
	b := d.s.HTTPEndpoint(d.addr, d.port)
	if b == nil {
		return ForeignAddress, ""
	}
	d.http = true // each request is looked at, whatever its authority (decision 044)
	d.t.httpEndpoint(d.addr, b, d.port)
	return EndpointAddress, b.Name
}

// sniff asks for the first bytes of a dial, unless they cannot name anything.
func (d *dial) sniff(v *Verdict, why Reason, rule string) {
	if why == ForeignAddress && len(d.s.Services()) == 0 && !d.blackholed() {
		v.set(Passthrough, NoNames, "")
		return
	}
	v.set(Sniff, why, rule)
	v.Sniff.Race = d.svc == nil && why != EndpointAddress
	if !d.http {
		v.Sniff.Wait = sniffWait
	}
}

// byAuthority is HTTP to an address that is none of the mesh's: the first authority decides
// for the whole connection.
func (d *dial) byAuthority(v *Verdict) {
	f := d.f
	n := snapshot.Name(d.s, f.Host, f.Namespace)
	if !n.WellFormed {
		if host, _, more := strings.Cut(f.Host, ":"); more {
			// A mesh name with a port that is none is nobody else's: the codec answers.
			if n = snapshot.Name(d.s, host, f.Namespace); n.Service != nil && ownsName(n.Service, d.port, 0) {
				d.t.hostWithoutPort(f.Host, n.Service)
				v.set(Serve, MeshName, n.Service.Rule)
				return
			}
			n = snapshot.Named{}
		}
	}
	switch {
	case n.NoCaller:
		v.set(Serve, CallerNamespaceUnknown, "")
	case n.Service != nil && ownsName(n.Service, d.port, n.Port):
		d.t.hostOwned(f.Host, n.Service)
		v.set(Serve, MeshName, n.Service.Rule)
	default:
		d.t.hostForeign(f.Host, &n, d.port)
		v.set(Passthrough, NotMesh, "")
	}
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

// find is the most specific arm that a server name is in, or nil. One trailing dot
// is not legal in a server name, and seen (RFC 6066 3): it does not count.
func (x *tlsArms) find(name string) *snapshot.SNIMatch {
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
func (d *dial) split(v *Verdict, sp *snapshot.Split, why Reason) {
	if sp.Invalid != "" || sp.WeightSum == 0 {
		d.t.invalidSplit(sp)
		v.set(Refuse, InvalidBackend, sp.Name)
		return
	}
	b := share(sp.Backends, sp.WeightSum, d.pick)
	if b.Invalid != "" {
		d.t.invalidBackend(b)
		v.set(Refuse, InvalidBackend, sp.Name)
		return
	}
	d.t.splitBackend(sp, b.Backend)
	d.forward(v, b.Backend, why, sp.Name)
}

// forward sends bytes to a backend.
func (d *dial) forward(v *Verdict, b *snapshot.Backend, why Reason, rule string) {
	set := d.s.Endpoints(b)
	if !set.Empty() {
		v.set(Forward, why, rule)
		v.Backend, v.Set = b, set
		return
	}
	if svc := d.s.Service(b.Service); set.Len() == 0 && svc != nil && svc.Await {
		d.t.awaitedRows(b.Service)
		v.set(Await, AwaitRows, rule)
		v.Backend, v.Awaits = b, svc
		return
	}
	d.t.noHealthyEndpoint(b, set)
	v.set(Refuse, NoEndpoint, rule)
}

// passThrough hands bytes that are not HTTP to the dialled address (contract 4.2 step 5).
func (d *dial) passThrough(v *Verdict, why Reason) {
	if d.blackholed() {
		v.set(Refuse, Blackhole, d.pod.Rule)
		return
	}
	v.set(Passthrough, why, "")
}

// blackholed reports whether scoped capture keeps the dialled port, 18082, to itself.
func (d *dial) blackholed() bool {
	return d.port == model.PortRaw && d.pod != nil && !d.pod.Capture.RedirectAll
}

// ownsName reports whether an authority that names svc is the mesh's on a
// captured dial of port. For a user's Service without a route it is only where
// its own pods declare the dialled port HTTP and the authority names that port
// or none; everything else leaves for the dialled address (contract 4.9).
func ownsName(svc *snapshot.Service, dialled, named uint16) bool {
	if svc.Kind != snapshot.MeshOnly || dialled == model.PortProxy {
		return true
	}
	p := svc.PodPort(dialled)
	return p != nil && p.Class == model.HTTP && (named == 0 || named == dialled)
}

// inbound: contract 6.2, with a non-empty SNI that names no served port refused.
func inbound(s *snapshot.Snapshot, f *model.Flow, t *Trace, v *Verdict) {
	pod := s.WorkloadOf(f)
	if pod == nil {
		t.unknownPod()
		v.set(Refuse, UnknownSNI, "")
		return
	}
	port := f.Dst.Port()
	if port == 0 { // no server name, tolerated of Envoy-based peers (contract 6.2)
		port = pod.DefaultPort
	}
	p, ok := pod.Port(port)
	if !ok || p.Class != model.HTTP && p.Class != model.TCP {
		t.undeclaredPort(pod, f.Dst.Port())
		v.set(Refuse, UnknownSNI, pod.Rule)
		return
	}
	to := pod.SocketOf(p.Class)
	t.socket(pod, to)
	v.set(Deliver, ServedPort, pod.Rule)
	v.Deliver = Application{Port: p.Number, Class: p.Class, App: p.App, Socket: to}
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
	if v.Action == Serve || v.Action == Deliver && v.Deliver.Class == model.HTTP {
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
			t.inProcess(s, &v)
		}
	}
	t.add("verdict: %s", v)
	return v, t
}
