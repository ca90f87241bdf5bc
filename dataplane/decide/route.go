package decide

import (
	"bytes"
	"math/bits"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Paths answered by the proxy itself (contract 4.11).
const (
	PathReadyz = "/aether/readyz"
	PathLive   = "/-/-/live"
	PathReady  = "/-/-/ready"
)

const (
	textReservedPort = "port-not-declared: 18081 and 18082 are the mesh's own ports, no service's; address a service by one of the ports it declares\n"
	textNoCaller     = "caller-namespace-unknown: a name without a namespace means one of the caller's namespace, and this connection carries none; report it, and use the full name meanwhile\n"
	textNoSuchName   = "no mesh service has this name; to reach it outside the mesh, dial it directly\n"
	textConnect      = "CONNECT is not served by the mesh; send the request itself to the service\n"
	textUnknownPort  = "this pod serves no HTTP on that port\n"
	textNoVerdict    = "the proxy asked about a connection without a direction; report it\n"
)

// Route says where one HTTP request goes, on a connection for which Decide said
// Serve (or Deliver, inbound). r is the request as the codec read it. pick
// is a random number for weighted backends: any value does, and equal values
// choose alike.
//
// Answers: Forward, Passthrough (captured only: this request, to the dialled
// address), Deliver (inbound), Refuse or Reply with Status and Text.
//
// An extended CONNECT (RFC 8441) has r.Upgrade set and is routed like any other
// request; a plain CONNECT is answered 404.
func Route(s *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head, pick uint32, t *Trace) Verdict {
	if t != nil {
		t.add("request %s", model.RequestString(r))
	}
	if len(r.Upgrade) == 0 && string(r.Method) == "CONNECT" { // contract 4.8
		return Verdict{Action: Reply, Reason: Connect, Status: 404, Text: textConnect}
	}
	switch f.Dir {
	case model.Captured, model.Proxy:
	case model.Inbound:
		return deliver(s, f, r, t)
	default:
		return Verdict{Action: Refuse, Reason: NoVerdict, Status: 500, Text: textNoVerdict}
	}
	if string(r.Path) == PathReadyz {
		if s.Draining() {
			return Verdict{Action: Reply, Reason: Readyz, Status: 503, Text: "draining\n"}
		}
		return Verdict{Action: Reply, Reason: Readyz, Status: 200, Text: "ready\n"}
	}

	n := snapshot.Name(s, r.Authority, f.Namespace)
	if n.NoCaller {
		return Verdict{Action: Refuse, Reason: CallerNamespaceUnknown, Status: 421, Text: textNoCaller}
	}
	svc, dialled := n.Service, f.Dst.Port()
	byHost := f.Dir == model.Proxy || dialled == model.PortProxy // the port is Host's, too
	if svc != nil && !byHost && !claims(svc, dialled, n.Port) {
		if t != nil {
			t.add("authority %q: %s", r.Authority, foreignText(n, dialled))
		}
		svc = nil
	}
	if svc == nil {
		return foreign(s, f, r, n, byHost, t)
	}
	if t != nil {
		t.add("authority %q names %s (%s)", r.Authority, svc.Rule, svc.Kind)
	}
	if svc.Broken != "" {
		return Verdict{Action: Refuse, Reason: BrokenService, Rule: svc.Rule, Status: 500, Text: svc.Broken}
	}
	if svc.Cold && n.Port != model.PortProxy && n.Port != model.PortRaw {
		if t != nil {
			t.add("%s has no pod, and nothing says which ports it has", svc.Rule)
		}
		return Verdict{Action: Refuse, Reason: NoEndpoint, Rule: svc.Rule, Status: 503, Text: svc.Texts.NoEndpoint}
	}
	if byHost {
		return proxyPort(s, svc, n.Port, r, pick, t)
	}
	return dialledPort(s, svc, dialled, n.Port, r, pick, t)
}

// dialledPort is contract 4.3(a): the port is the dialled one.
func dialledPort(s *snapshot.Snapshot, svc *snapshot.Service, dialled, named uint16, r *httpmsg.Head, pick uint32, t *Trace) Verdict {
	p := svc.Port(dialled)
	if svc.Kind == snapshot.MeshOnly {
		p = svc.PodPort(dialled)
	}
	switch {
	case p == nil || p.Class != model.HTTP:
		if t != nil {
			t.add("the dialled port %d is no HTTP port of it", dialled)
		}
		return refuse(svc, PortNotDeclared, svc.Texts.PortNotDeclared)
	case named != 0 && named != dialled:
		if t != nil {
			t.add("dialled %d, an HTTP port of it, and the authority names %d", dialled, named)
		}
		return refuse(svc, PortMismatch, svc.Texts.PortMismatch)
	}
	return forward(s, svc, p, r, pick, t)
}

// proxyPort is contract 4.3(b): the port is the authority's, 80 by default.
func proxyPort(s *snapshot.Snapshot, svc *snapshot.Service, named uint16, r *httpmsg.Head, pick uint32, t *Trace) Verdict {
	want := named
	if want == 0 {
		want = 80
	}
	p := svc.Port(want)
	if p != nil && p.Class == model.HTTP {
		return forward(s, svc, p, r, pick, t)
	}
	if t != nil {
		t.add("the authority asks for port %d, no HTTP port of it", want)
	}
	switch {
	case named == 0:
		return refuse(svc, PortRequired, svc.Texts.PortRequired)
	case p != nil:
		return refuse(svc, PortNotHTTP, svc.Texts.PortNotHTTP)
	}
	return refuse(svc, PortNotDeclared, svc.Texts.PortNotDeclared)
}

// foreign is a request that names no service for this caller.
func foreign(s *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head, n snapshot.Named, byHost bool, t *Trace) Verdict {
	// The prober's question, under any name that is not a service's.
	if string(r.Path) == PathLive {
		return Verdict{Action: Reply, Reason: Live, Status: 200, Text: "live\n"}
	}
	pod := s.WorkloadOf(f)
	floor := f.Dir == model.Captured && (!byHost || pod == nil || pod.Capture.RedirectAll)
	// Nobody has these two ports: refused at once for every name that could be
	// the mesh's (contract 4.3b, 4.6), and for all names where the alternative
	// is a 404 anyway.
	if byHost && n.WellFormed && (n.Port == model.PortProxy || n.Port == model.PortRaw) && (n.Below || !floor) {
		return Verdict{Action: Refuse, Reason: PortNotDeclared, Status: 421, Text: textReservedPort}
	}
	if t != nil && n.Service == nil {
		t.add("authority %q: %s", r.Authority, foreignText(n, f.Dst.Port()))
	}
	if floor {
		return Verdict{Action: Passthrough, Reason: NotMesh}
	}
	return Verdict{Action: Refuse, Reason: NoSuchName, Status: 404, Text: textNoSuchName}
}

func refuse(svc *snapshot.Service, why Reason, text string) Verdict {
	return Verdict{Action: Refuse, Reason: why, Rule: svc.Rule, Status: 421, Text: text}
}

// forward runs the port's routes and picks the backend (contract 10.2-10.4).
func forward(s *snapshot.Snapshot, svc *snapshot.Service, p *snapshot.Port, r *httpmsg.Head, pick uint32, t *Trace) Verdict {
	v := Verdict{Action: Forward, Reason: DeclaredHTTP, Rule: svc.Rule, Backend: p.Backend}
	if rule := match(p.Program, r, t); rule != nil {
		v.Reason, v.Rule = HTTPRoute, rule.Name
		if rule.Invalid != "" {
			return Verdict{Action: Refuse, Reason: InvalidBackend, Rule: rule.Name, Status: 500, Text: rule.Invalid}
		}
		v.RequestOps[0], v.ResponseOps[0] = rule.Request, rule.Response
		if len(rule.Backends) > 0 {
			b := share(rule, pick)
			if b.Invalid != "" {
				if t != nil {
					t.add("the share that was drawn has no valid backend: %s", bytes.TrimSpace([]byte(b.Invalid)))
				}
				return Verdict{Action: Refuse, Reason: InvalidBackend, Rule: rule.Name, Status: 500, Text: b.Invalid}
			}
			if t != nil && len(rule.Backends) > 1 {
				t.add("%s drawn out of %d backends by weight", b.Backend.Name, len(rule.Backends))
			}
			v.Backend, v.RequestOps[1], v.ResponseOps[1] = b.Backend, b.Request, b.Response
		}
	} else if t != nil && p.Program != nil {
		t.add("no rule matches: the port itself")
	}
	if s.Endpoints(v.Backend).Empty() {
		if t != nil {
			t.add("%s has no healthy endpoint among %d", v.Backend.Name, s.Endpoints(v.Backend).Len())
		}
		return Verdict{Action: Refuse, Reason: NoEndpoint, Rule: v.Rule, Status: 503, Text: v.Backend.Texts.NoEndpoint}
	}
	if t != nil {
		t.add("%s: %d endpoints, SNI %s", v.Backend.Name, s.Endpoints(v.Backend).Len(), v.Backend.SNI)
	}
	return v
}

// share is the backend whose share of the weights pick falls into.
func share(rule *snapshot.Rule, pick uint32) *snapshot.Weighted {
	x, _ := bits.Mul64(uint64(pick)<<32, rule.WeightSum) // pick/2^32 of the sum, below it
	for i := range rule.Backends {
		if x < rule.Backends[i].Upto {
			return &rule.Backends[i]
		}
	}
	return &rule.Backends[len(rule.Backends)-1] // not reached: compile gives no sum of 0
}

// match is the rule of the first arm that r fulfils, or nil.
func match(p *snapshot.Program, r *httpmsg.Head, t *Trace) *snapshot.Rule {
	if p == nil {
		return nil
	}
	path := r.Path
	if i := bytes.IndexByte(path, '?'); i >= 0 {
		path = path[:i]
	}
	for i := range p.Arms {
		a := &p.Arms[i]
		switch {
		case !pathMatches(a, path):
			if t != nil {
				t.add("%s: path %q is not %s %q", armText(a), path, pathKind(a), a.Path)
			}
		case a.Method != "" && a.Method != string(r.Method):
			if t != nil {
				t.add("%s: method %s is not %s", armText(a), r.Method, a.Method)
			}
		default:
			if h := unmet(a.Headers, r); h != nil {
				if t != nil {
					t.add("%s: field %s is not %q", armText(a), h.Name, h.Value)
				}
				continue
			}
			if t != nil {
				t.add("%s: matches", armText(a))
			}
			return a.Rule
		}
	}
	return nil
}

// pathMatches compares the raw path; a prefix ends at an element's end (Gateway
// API PathMatchPathPrefix).
func pathMatches(a *snapshot.Arm, path []byte) bool {
	switch a.PathKind {
	case model.PathAny:
		return true
	case model.PathExact:
		return string(path) == a.Path
	}
	n := len(a.Path)
	return len(path) >= n && string(path[:n]) == a.Path && (n == 0 || len(path) == n || path[n] == '/')
}

// unmet is the first field condition that r does not fulfil, or nil.
func unmet(want []model.HeaderMatch, r *httpmsg.Head) *model.HeaderMatch {
	for i := range want {
		if !fieldIs(r, want[i].Name, want[i].Value) {
			return &want[i]
		}
	}
	return nil
}

// fieldIs compares the whole value of a field: lines of one name count as one,
// joined by commas (RFC 9110 5.3), with or without a space.
func fieldIs(r *httpmsg.Head, name, want string) bool {
	if name == "host" { // a codec takes it out of the fields
		return string(r.Authority) == want
	}
	seen := false
	rest := want
	for i := range r.Fields {
		if string(r.Fields[i].Name) != name {
			continue
		}
		if seen {
			if len(rest) == 0 || rest[0] != ',' {
				return false
			}
			rest = rest[1:]
			if len(rest) > 0 && rest[0] == ' ' {
				rest = rest[1:]
			}
		}
		seen = true
		v := r.Fields[i].Value
		if len(rest) < len(v) || rest[:len(v)] != string(v) {
			return false
		}
		rest = rest[len(v):]
	}
	return seen && rest == ""
}

// deliver is a request that came over the hop (contract 6.4).
func deliver(s *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head, t *Trace) Verdict {
	switch string(r.Path) {
	case PathLive:
		return Verdict{Action: Reply, Reason: Live, Status: 200, Text: "live\n"}
	case PathReady:
		return Verdict{Action: Reply, Reason: Ready, Status: 200, Text: "ready\n"}
	}
	v := inbound(s, f, t)
	switch {
	case v.Action != Deliver:
		v.Status, v.Text = 421, textUnknownPort
	case v.Class != model.HTTP: // the pod's declaration changed under the connection
		return Verdict{Action: Refuse, Reason: UnknownSNI, Rule: v.Rule, Status: 421, Text: textUnknownPort}
	}
	return v
}
