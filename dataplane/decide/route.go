package decide

import (
	"strings"

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
	textNoRule       = "routes are attached to this port and none of their rules matches the request; see the matches of the HTTPRoutes and GRPCRoutes whose parentRefs name the service\n"
	textNoBackend    = "the rule has no backendRefs: name the service, or another one, where the request is to go\n"
	textRBAC         = "RBAC: access denied\n"
	textSpelling     = "the path is spelled so that an application could read another path than policy was asked about, or leads upwards where policy is in force; send the plain path: no escapes where none are needed, no \"//\", no \".\" or \"..\" elements, no backslashes, no \";\"\n"
	textTooLarge     = "the request is too large for the rules of this port: an expression is run on at most 8192 bytes of a path, a field or a query value, and on fewer where the port's expressions are large; and conditions and changes of the query look at at most 256 parameters; send less\n"
	textRedirect     = "see the location field\n"
	textSelected     = "no healthy endpoint of the destination is what x-aether-ip, x-aether-pod, x-aether-subset-* or a service's own selecting field ask for; leave them out to be balanced over all\n"
	textAwait        = "the service is known, and where its pods are is not yet; try again shortly\n"
	textNoWeight     = "every backend of the rule has weight 0: nothing may have the request\n"
	textConnect      = "CONNECT is not served by the mesh; send the request itself to the service\n"
	textBadAuthority = "the authority is none: want host or host:port, the port of 1 to 65535 without leading zeros, without user; over HTTP/2 the stream is reset instead (PROTOCOL_ERROR)\n"
	textUnknownPort  = "this pod serves no HTTP on that port; a port is served when endpoint.aether.io/ports of the pod declares it http\n"
	textNoVerdict    = "the proxy asked about a connection without a direction; report it\n"
)

// Route says where one HTTP request goes, on a connection for which Decide said
// Serve (or Deliver, inbound). r is the request as the codec read it. pick
// is a random number for weighted backends: any value does, and equal values
// choose alike.
//
// Answers: Forward, Passthrough (captured only: this request, to the dialled
// address), Deliver (inbound), Refuse, Reply or Await with Status and Text. Of a Forward,
// Deliver or Reply whose Pipe has an Authz the authorization service is asked first.
//
// A request for an upgrade has r.Upgrade set and is routed like any other, whether it
// came as HTTP/1.1 or as extended CONNECT (RFC 8441), whose method the engine makes
// GET; a plain CONNECT is answered 404.
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

	q := question{s: s, f: f, r: r, pick: pick, t: t}
	n := snapshot.Name(s, r.Authority, f.Namespace)
	dialled := f.Dst.Port()
	byHost := f.Dir == model.Proxy || dialled == model.PortProxy // the port is Host's, too
	svc := n.Service
	if svc != nil && !byHost && !claims(svc, dialled, n.Port) {
		if t != nil {
			t.add("authority %q: %s", r.Authority, foreignText(n, dialled))
		}
		svc = nil
	}
	if !byHost && s.Semantics() == model.GatewayAPI {
		if owner := s.Address(f.Dst.Addr()); owner != nil && owner.Mesh() {
			if n.Service == nil && !n.NoCaller && string(r.Path) == PathLive {
				return Verdict{Action: Reply, Reason: Live, Status: 200, Text: "live\n"}
			}
			if t != nil {
				t.add("the dialled address is %s's (%s): it is meant, whatever the authority %q says (routeSemantics GatewayAPI)", owner.Rule, owner.Kind, r.Authority)
			}
			return q.reach(owner, dialled, dialled, false)
		}
	}
	if n.NoCaller {
		return Verdict{Action: Refuse, Reason: CallerNamespaceUnknown, Status: 421, Text: textNoCaller}
	}
	if svc == nil {
		return q.foreign(n, byHost)
	}
	if t != nil {
		t.add("authority %q names %s (%s)", r.Authority, svc.Rule, svc.Kind)
	}
	if byHost {
		return q.reach(svc, 0, n.Port, true)
	}
	return q.reach(svc, dialled, n.Port, false)
}

// question is what Route was asked.
type question struct {
	s    *snapshot.Snapshot
	f    *model.Flow
	r    *httpmsg.Head
	pick uint32
	t    *Trace
	cors *snapshot.CORS // of the rule that the request was taken by

	audited Audited
}

// reach is a request for svc. Of a dial, the port is the dialled one and the authority
// may name it, or none (contract 4.3a); byHost it is the authority's, 80 by default (4.3b).
func (q *question) reach(svc *snapshot.Service, dialled, named uint16, byHost bool) Verdict {
	if svc.Broken != "" {
		return Verdict{Action: Refuse, Reason: BrokenService, Rule: svc.Rule, Status: 500, Text: svc.Broken}
	}
	port := dialled
	if byHost {
		if port = named; port == 0 {
			port = 80
		}
	}
	if svc.Cold && !model.DialledPort(port) && !model.DialledPort(named) {
		if q.t != nil {
			q.t.add("%s has no pod here, and nothing says which ports it has", svc.Rule)
		}
		return q.empty(svc, svc.Rule, nil, svc.Texts)
	}
	p := svc.Port(port)
	if !byHost && svc.Kind == snapshot.MeshOnly {
		p = svc.PodPort(port)
	}
	isHTTP := p != nil && p.Class == model.HTTP
	switch {
	case isHTTP && (byHost || named == 0 || named == port):
		return q.route(svc, p)
	case isHTTP:
		return q.refuse(svc, PortMismatch, svc.Texts.PortMismatch, port, named)
	case byHost && named == 0:
		return q.refuse(svc, PortRequired, svc.Texts.PortRequired, port, named)
	case byHost && p != nil:
		return q.refuse(svc, PortNotHTTP, svc.Texts.PortNotHTTP, port, named)
	}
	return q.refuse(svc, PortNotDeclared, svc.Texts.PortNotDeclared, port, named)
}

// refuse is a 421 (contract 4.4).
func (q *question) refuse(svc *snapshot.Service, why Reason, text string, port, named uint16) Verdict {
	if q.t != nil {
		q.t.add("%s", refusalText(why, port, named))
		q.t.add("%s", wouldWork(q.s, svc, q.f.Namespace))
	}
	return Verdict{Action: Refuse, Reason: why, Rule: svc.Rule, Status: 421, Text: text}
}

// foreign is a request that names no service for this caller.
func (q *question) foreign(n snapshot.Named, byHost bool) Verdict {
	s, f, r := q.s, q.f, q.r
	// The prober's question, under any name that is not a service's.
	if n.Service == nil && string(r.Path) == PathLive {
		return Verdict{Action: Reply, Reason: Live, Status: 200, Text: "live\n"}
	}
	pod := s.WorkloadOf(f)
	floor := f.Dir == model.Captured && (!byHost || pod == nil || pod.Capture.RedirectAll)
	// Nobody has these two ports: refused at once for every name that could be
	// the mesh's (contract 4.3b, 4.6), and for all names where the alternative
	// is a 404 anyway.
	if byHost && n.WellFormed && model.DialledPort(n.Port) && (n.Below || !floor) {
		return Verdict{Action: Refuse, Reason: PortNotDeclared, Status: 421, Text: textReservedPort}
	}
	if q.t != nil && n.Service == nil {
		q.t.add("authority %q: %s", r.Authority, foreignText(n, f.Dst.Port()))
	}
	if floor {
		return Verdict{Action: Passthrough, Reason: NotMesh}
	}
	if q.t != nil {
		nearNames(q.t, s, string(r.Authority), f.Namespace)
	}
	return Verdict{Action: Refuse, Reason: NoSuchName, Status: 404, Text: textNoSuchName}
}

// route runs a port's rules in the order of contract 10.7: the rule, with the path
// policy; RBAC; then what answers by itself; then the backend.
func (q *question) route(svc *snapshot.Service, p *snapshot.Port) Verdict {
	v := q.byRule(svc, p)
	v.CORS, v.Audited = q.cors, q.audited
	return v
}

func (q *question) byRule(svc *snapshot.Service, p *snapshot.Port) Verdict {
	r, t := q.r, q.t
	prog := p.ProgramFor(q.f.Namespace)
	if t != nil && prog != nil && prog != p.Program {
		t.add("routes of the caller's own namespace %s are attached to the port: they stand in the place of the producer's (GEP-1426)", q.f.Namespace)
	}
	path, query := cutPath(r.Path)
	chosen, self, prefix := p.Self, p.Self, 0
	if self.Invalid != "" { // what is in force on the whole service cannot be honoured
		return Verdict{Action: Refuse, Reason: InvalidBackend, Rule: svc.Rule, Status: 500, Text: self.Invalid}
	}
	v := Verdict{Action: Forward, Reason: DeclaredHTTP, Rule: svc.Rule, Backend: p.Backend}
	if prog != nil {
		if prog.Invalid != "" {
			return Verdict{Action: Refuse, Reason: InvalidBackend, Rule: svc.Rule, Status: 500, Text: prog.Invalid}
		}
		if prog.Strict {
			chosen, self = nil, nil
		}
		a, large := match(prog, r, path, query, t)
		if large {
			return Verdict{Action: Refuse, Reason: TooLarge, Rule: a.Rule.Name, Status: 431, Text: textTooLarge}
		}
		if a != nil {
			chosen = a.Rule
			if answers(a) {
				q.cors = chosen.Pipe.CORS
			}
			v.Matched, v.Rule, v.Reason = chosen, chosen.Name, HTTPRoute
			if chosen.GRPC {
				v.Reason = GRPCRoute
			}
			if a.PathKind == model.PathPrefix {
				prefix = len(a.Path)
			}
		} else if t != nil && !prog.Strict {
			t.add("no rule matches: the port itself")
		}
	}
	if spelled(path) {
		result, walks := spelling(prog, self, chosen, q.caller(), r, path, query, t)
		switch result {
		case refused:
			return Verdict{Action: Refuse, Reason: PathSpelling, Rule: walks, Status: 403, Text: textSpelling}
		case tooLarge:
			return Verdict{Action: Refuse, Reason: TooLarge, Rule: walks, Status: 431, Text: textTooLarge}
		}
		v.Respelled = result == twoReadings && chosen != nil && chosen.Pipe != nil && chosen.Pipe.Authz != nil
	}
	switch {
	case chosen == nil:
		if t != nil {
			t.add("no rule matches, and with routes attached that is a 404 (routeSemantics GatewayAPI)")
		}
		return Verdict{Action: Refuse, Reason: NoRule, Rule: svc.Rule, Status: 404, Text: textNoRule}
	case chosen.Invalid != "":
		return Verdict{Action: Refuse, Reason: InvalidBackend, Rule: v.Rule, Status: 500, Text: chosen.Invalid}
	}
	pipe := chosen.Pipe
	if pipe != nil {
		if d := q.audited.denied(pipe, q.callerOf(pipe), r.Method, path, t); d != nil {
			return Verdict{Action: Refuse, Reason: RBACDenied, Rule: d.Name, Status: 403, Text: textRBAC}
		}
		if t != nil && pipe.Authz != nil {
			t.add("%s: the authorization service is asked", pipe.Authz.Name)
		}
		if why, status, text := answered(pipe, r); why != 0 {
			v.Action, v.Reason, v.Status, v.Text = Reply, why, status, text
			v.Backend, v.Pipe, v.Prefix = nil, pipe, prefix
			return v
		}
	}
	if v.Matched != nil && len(chosen.Backends) == 0 && prog.Strict {
		if t != nil {
			t.add("the rule has no backendRefs, and with routes attached that is a 500 (routeSemantics GatewayAPI)")
		}
		return Verdict{Action: Refuse, Reason: InvalidBackend, Rule: v.Rule, Status: 500, Text: textNoBackend}
	}
	if len(chosen.Backends) > 0 {
		if chosen.WeightSum == 0 { // nobody may have it, and nothing is wrong with the rule
			return Verdict{Action: Refuse, Reason: NoEndpoint, Rule: v.Rule, Status: 503, Text: textNoWeight}
		}
		b := share(chosen.Backends, chosen.WeightSum, q.pick)
		if b.Invalid != "" {
			if t != nil {
				t.add("the share that was drawn has no valid backend: %s", strings.TrimSpace(b.Invalid))
			}
			return Verdict{Action: Refuse, Reason: InvalidBackend, Rule: v.Rule, Status: 500, Text: b.Invalid, Matched: v.Matched}
		}
		if t != nil && len(chosen.Backends) > 1 {
			t.add("%s drawn out of %d backends by weight", b.Backend.Name, len(chosen.Backends))
		}
		v.Backend, pipe = b.Backend, b.Pipe
		if pipe != nil && pipe.Redirect != nil { // the backend's own
			v.Action, v.Reason, v.Status, v.Text = Reply, Redirect, pipe.Redirect.Status, textRedirect
			v.Backend, v.Pipe, v.Prefix = nil, pipe, prefix
			return v
		}
	}
	if pipe != nil && len(pipe.Query) > 0 && manyParameters(query) {
		if t != nil {
			t.add("the query has more than %d parameters, and filters change it", maxParameters)
		}
		return Verdict{Action: Refuse, Reason: TooLarge, Rule: v.Rule, Status: 431, Text: textTooLarge}
	}
	set := q.s.Endpoints(v.Backend)
	if set.Len() == 0 {
		none := q.empty(q.s.Service(v.Backend.Service), v.Rule, v.Backend, v.Backend.Texts)
		none.Matched = v.Matched
		return none
	}
	narrowed, pinned, ok := selects(q.s, set, pipe, r, t)
	switch {
	case !ok:
		return Verdict{Action: Refuse, Reason: NoEndpoint, Rule: v.Rule, Status: 503, Text: textSelected, Matched: v.Matched}
	case pinned == nil && narrowed.Empty():
		none := q.empty(nil, v.Rule, v.Backend, v.Backend.Texts)
		none.Matched = v.Matched
		return none
	}
	if t != nil {
		t.add("%s: %d endpoints, SNI %s", v.Backend.Name, narrowed.Len(), v.Backend.SNI)
	}
	v.Set, v.Pinned, v.Pipe, v.Prefix = narrowed, pinned, pipe, prefix
	return v
}

// caller is the identity of the pod that asks: the one whose listener took the connection, which
// is nothing that the pod says (decision 049). "": the pod is not known any more.
func (q *question) caller() string {
	if w := q.s.WorkloadOf(q.f); w != nil {
		return w.SPIFFEID
	}
	return ""
}

// callerOf is caller where the pipe asks for it.
func (q *question) callerOf(p *snapshot.FilterChain) string {
	if len(p.RBAC) == 0 {
		return ""
	}
	return q.caller()
}

// answered is what a rule answers by itself; no reason: nothing.
func answered(p *snapshot.FilterChain, r *httpmsg.Head) (why Reason, status int, text string) {
	switch {
	case p.CORS != nil && preflight(r):
		return CORSPreflight, 204, ""
	case p.Redirect != nil:
		return Redirect, p.Redirect.Status, textRedirect
	}
	return 0, 0, ""
}

// empty is a destination without a healthy endpoint: to be waited for where the
// rows of its service are on their way, else a 503. svc may be nil: known not to be awaited.
func (q *question) empty(svc *snapshot.Service, rule string, b *snapshot.Backend, texts *snapshot.Texts) Verdict {
	if svc != nil && svc.Await {
		if q.t != nil {
			q.t.add("%s is in the mesh's catalog and its rows are not here yet (contract 4.6)", svc.Name)
		}
		return Verdict{Action: Await, Reason: AwaitRows, Rule: rule, Status: 503, Text: textAwait, Backend: b, Awaits: svc}
	}
	if q.t != nil && b != nil {
		q.t.add("%s has no healthy endpoint among %d", b.Name, q.s.Endpoints(b).Len())
	}
	return Verdict{Action: Refuse, Reason: NoEndpoint, Rule: rule, Status: 503, Text: texts.NoEndpoint}
}

// deliver is a request that came over the hop (contract 6.3, 6.4).
func deliver(s *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head, t *Trace) Verdict {
	switch string(r.Path) {
	case PathLive:
		return Verdict{Action: Reply, Reason: Live, Status: 200, Text: "live\n"}
	case PathReady:
		if s.Draining() {
			return Verdict{Action: Reply, Reason: Ready, Status: 503, Text: "draining\n"}
		}
		return Verdict{Action: Reply, Reason: Ready, Status: 200, Text: "ready\n"}
	}
	v := inbound(s, f, t)
	switch {
	case v.Action != Deliver:
		v.Status, v.Text = 421, textUnknownPort
		return v
	case v.Class != model.HTTP: // the pod's declaration changed under the connection
		return Verdict{Action: Refuse, Reason: UnknownSNI, Rule: v.Rule, Status: 421, Text: textUnknownPort}
	}
	pipe := s.WorkloadOf(f).Inbound
	if pipe == nil {
		return v
	}
	path, _ := cutPath(r.Path)
	if pipe.Policy() && spelled(path) {
		norm, third, ok := plain(path)
		if third || !ok {
			if t != nil && ok {
				t.add("path %q "+textThird+", and policy is in force on the pod", path)
			}
			return Verdict{Action: Refuse, Reason: PathSpelling, Rule: firstPolicy(pipe), Status: 403, Text: textSpelling}
		}
		if string(norm) != string(path) {
			if d := spellingOf(pipe.RBAC, f.Peer, r.Method, path, norm, t); d != nil {
				return Verdict{Action: Refuse, Reason: PathSpelling, Rule: d.Name, Status: 403, Text: textSpelling}
			}
			v.Respelled = pipe.Authz != nil
		}
	}
	if d := v.Audited.denied(pipe, f.Peer, r.Method, path, t); d != nil {
		return Verdict{Action: Refuse, Reason: RBACDenied, Rule: d.Name, Status: 403, Text: textRBAC, Audited: v.Audited}
	}
	if t != nil && pipe.Authz != nil {
		t.add("%s: the authorization service is asked", pipe.Authz.Name)
	}
	v.Pipe = pipe
	return v
}
