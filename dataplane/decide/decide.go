package decide

import (
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
// Captured: with f.Sniff None it answers Sniff only where the bytes can change
// the answer. A declared raw-TCP port is forwarded without a byte read. On an
// HTTP port of the mesh, and on its port 18081, the wait has no bound of its
// own: clients open connections ahead and say nothing, and a connection to the
// mesh is never passed through for its silence. With a sniff result the answer
// is never Sniff.
//
// f.Host is the authority of the first request. For h2c that is known only
// after the first HEADERS frame: the engine reads up to it before asking with
// SniffH2C, for an empty Host means "no authority" here. For a ClientHello it
// is the server name.
//
// Passing through is decided here once for the connection: the address is no
// service's and the first authority is no mesh name (design 9).
//
// Proxy: Serve, always; the loopback listener is HTTP. Inbound: f.Dst's port is
// the one the SNI named; Deliver to a port the pod declares, else Refuse.
func Decide(s *snapshot.Snapshot, f *model.Flow, t *Trace) Verdict {
	if t != nil {
		t.add("snapshot %d: connection %s", s.Version(), f.String())
	}
	switch f.Dir {
	case model.Captured:
		return captured(s, f, t)
	case model.Proxy:
		return Verdict{Action: Serve, Reason: ProxyPort}
	case model.Inbound:
		return inbound(s, f, t)
	}
	return Verdict{Action: Refuse, Reason: NoVerdict}
}

func captured(s *snapshot.Snapshot, f *model.Flow, t *Trace) Verdict {
	addr, port := f.Dst.Addr().Unmap(), f.Dst.Port()
	pod := s.WorkloadOf(f)
	if t != nil {
		if pod == nil {
			t.add("no such pod on this node: capture is taken to be redirect-all")
		} else {
			t.add("%s: %s", pod.Rule, captureText(pod))
		}
	}
	// Design 4, step 2.
	if port == model.PortCapture && pod != nil && pod.Owns(addr) {
		return Verdict{Action: Refuse, Reason: Loop, Rule: pod.Rule}
	}

	svc := s.Address(addr)
	switch {
	case svc == nil:
		if t != nil {
			t.add("%s is the address of no service", addr)
		}
	case svc.Broken != "" && svc.Mesh():
		return Verdict{Action: Refuse, Reason: BrokenService, Rule: svc.Rule}
	case !svc.Mesh():
		if t != nil {
			t.add("%s is %s's, a user's Service that no route names: its address is not the mesh's (contract 4.9)", addr, svc.Rule)
		}
		svc = nil
	default:
		if t != nil {
			t.add("%s is %s's (%s)", addr, svc.Rule, svc.Kind)
		}
	}

	http := false // the mesh's port, and HTTP by declaration
	if svc != nil {
		switch p := svc.Port(port); {
		case p != nil && p.Class == model.TCP:
			return raw(s, svc, p.Backend, DeclaredTCP, t)
		case p != nil && p.Class == model.HTTP:
			if t != nil {
				t.add("%d is an HTTP port of it", port)
			}
			http = true
		case port == model.PortRaw && svc.Raw != nil:
			return raw(s, svc, svc.Raw, RawSpelling, t)
		case port == model.PortProxy:
			http = true
		default:
			if t != nil {
				t.add("%d is no TCP or HTTP port of it", port)
			}
		}
	}

	reason, rule := ForeignAddress, ""
	switch {
	case port == model.PortProxy:
		reason = ProxyPort
	case http:
		reason, rule = DeclaredHTTP, svc.Rule
	case svc != nil:
		reason, rule = MeshAddress, svc.Rule
	}

	switch f.Sniff {
	case model.SniffNone:
		v := Verdict{Action: Sniff, Reason: reason, Rule: rule, Race: svc == nil}
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

// raw forwards bytes.
func raw(s *snapshot.Snapshot, svc *snapshot.Service, b *snapshot.Backend, why Reason, t *Trace) Verdict {
	if t != nil {
		t.add("the port is raw TCP: no byte is looked at")
	}
	if s.Endpoints(b).Empty() {
		return Verdict{Action: Refuse, Reason: NoEndpoint, Rule: svc.Rule}
	}
	return Verdict{Action: Forward, Reason: why, Rule: svc.Rule, Backend: b}
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
			t.add("%s declares no HTTP or TCP port %d", pod.Rule, f.Dst.Port())
		}
		return Verdict{Action: Refuse, Reason: UnknownSNI, Rule: pod.Rule}
	}
	return Verdict{Action: Deliver, Reason: ServedPort, Rule: pod.Rule, Port: p.Number, Class: p.Class, App: p.App}
}

// Explain is the whole way of a connection and, with r, of a request on it:
// Decide, once more with an HTTP/1.1 sniff and r's authority if the flow has not
// been sniffed, and Route where Decide leaves it to the requests. A weighted
// split is taken at its start (pick 0). The verdict is what the data plane
// would do; the trace says why.
func Explain(s *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head) (Verdict, *Trace) {
	t := &Trace{}
	v := Decide(s, f, t)
	if r == nil {
		t.add("verdict: %s", v)
		return v, t
	}
	if v.Action == Sniff {
		t.add("verdict before the first byte: %s", v)
		g := *f
		g.Sniff, g.Host = model.SniffHTTP11, string(r.Authority)
		f = &g
		v = Decide(s, f, t)
	}
	if v.Action == Serve || v.Action == Deliver && v.Class == model.HTTP {
		t.add("verdict for the connection: %s", v)
		v = Route(s, f, r, 0, t)
	}
	t.add("verdict: %s", v)
	return v, t
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
