package decide

import (
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
	t.request(r)
	if len(r.Upgrade) == 0 && string(r.Method) == "CONNECT" { // contract 4.8
		return Verdict{Action: Reply, Reason: Connect, Status: 404, Text: textConnect}
	}
	q := question{s: s, f: f, r: r, pick: pick, t: t}
	switch f.Dir {
	case model.Captured, model.Proxy:
		if string(r.Path) == PathReadyz {
			return readiness(s, Readyz)
		}
		return q.byAuthority()
	case model.Inbound:
		return q.deliver()
	}
	return Verdict{Action: Refuse, Reason: NoVerdict, Status: 500, Text: textNoVerdict}
}

// readiness is the answer to a readiness probe.
func readiness(s *snapshot.Snapshot, why Reason) Verdict {
	if s.Draining() {
		return Verdict{Action: Reply, Reason: why, Status: 503, Text: "draining\n"}
	}
	return Verdict{Action: Reply, Reason: why, Status: 200, Text: "ready\n"}
}

// liveness is the answer to a liveness probe.
func liveness() Verdict {
	return Verdict{Action: Reply, Reason: Live, Status: 200, Text: "live\n"}
}

// question is what Route was asked, and what its steps have found.
type question struct {
	s    *snapshot.Snapshot
	f    *model.Flow
	r    *httpmsg.Head
	pick uint32
	t    *Trace

	// A request at a port of a service, on its way through the steps of contract 10.7.

	path, query []byte
	prog        *snapshot.Program // of the port; nil: no routes are attached
	self        *snapshot.Rule    // what is in force where no rule matches; nil: such a request is refused
	rule        *snapshot.Rule    // the rule of a route that matched, else self
	matched     *snapshot.Rule    // the rule of a route that matched, or nil
	name        string            // of the object that chose
	reason      Reason
	prefix      int // the length of what the rule's prefix match matched of the path
	backend     *snapshot.Backend
	pipe        *snapshot.Pipe // of the rule, and of the backend once that is drawn
	respelled   bool           // as of Verdict
	cors        *snapshot.CORS // of the rule that the request was taken by
	audited     Audited
}

// byAuthority finds out which service a request is for (contract 4.3).
func (q *question) byAuthority() Verdict {
	f, r := q.f, q.r
	n := snapshot.Name(q.s, r.Authority, f.Namespace)
	dialled := f.Dst.Port()
	byHost := f.Dir == model.Proxy || dialled == model.PortProxy // the port is Host's, too
	svc := n.Service
	if svc != nil && !byHost && !ownsName(svc, dialled, n.Port) {
		q.t.authorityForeign(r.Authority, n, dialled)
		svc = nil
	}
	if !byHost && q.s.Semantics() == model.GatewayAPI {
		if owner := q.s.Address(f.Dst.Addr()); owner != nil && owner.Mesh() {
			if n.Service == nil && !n.NoCaller && string(r.Path) == PathLive {
				return liveness()
			}
			q.t.dialledOwner(owner, r.Authority)
			return q.reach(owner, dialled, dialled, false)
		}
	}
	switch {
	case n.NoCaller:
		return Verdict{Action: Refuse, Reason: CallerNamespaceUnknown, Status: 421, Text: textNoCaller}
	case svc == nil:
		return q.foreign(n, byHost)
	}
	q.t.authorityOwned(r.Authority, svc)
	if byHost {
		return q.reach(svc, 0, n.Port, true)
	}
	return q.reach(svc, dialled, n.Port, false)
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
		q.t.unknownPorts(svc)
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
	q.t.wrongPort(q.s, svc, q.f.Namespace, why, port, named)
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
	if n.Service == nil {
		q.t.authorityForeign(r.Authority, n, f.Dst.Port())
	}
	if floor {
		return Verdict{Action: Passthrough, Reason: NotMesh}
	}
	q.t.similarNames(s, r.Authority, f.Namespace)
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
	q.path, q.query = cutPath(q.r.Path)
	q.self, q.rule, q.name, q.reason, q.backend = p.Self, p.Self, svc.Rule, DeclaredHTTP, p.Backend
	if q.self.Invalid != "" { // what is in force on the whole service cannot be honoured
		return refusal(InvalidBackend, svc.Rule, 500, q.self.Invalid)
	}
	if q.prog = p.ProgramFor(q.f.Namespace); q.prog != nil {
		if q.prog != p.Program {
			q.t.consumerRoutes(q.f.Namespace)
		}
		if q.prog.Invalid != "" {
			return refusal(InvalidBackend, svc.Rule, 500, q.prog.Invalid)
		}
		if large := q.findRule(); large != nil {
			return refusal(TooLarge, large.Name, 431, textTooLarge)
		}
	}
	if hasAliases(q.path) {
		switch result, bypasses := q.checkPathAliases(); result {
		case refused:
			return refusal(PathSpelling, bypasses, 403, textSpelling)
		case tooLarge:
			return refusal(TooLarge, bypasses, 431, textTooLarge)
		case twoReadings:
			q.respelled = q.rule != nil && q.rule.Pipe != nil && q.rule.Pipe.Authz != nil
		}
	}
	switch {
	case q.rule == nil:
		q.t.noRule(true)
		return refusal(NoRule, svc.Rule, 404, textNoRule)
	case q.rule.Invalid != "":
		return refusal(InvalidBackend, q.name, 500, q.rule.Invalid)
	}
	if q.pipe = q.rule.Pipe; q.pipe != nil {
		if f := q.rbac(); f != nil {
			return refusal(RBACDenied, f.Name, 403, textRBAC)
		}
		q.t.authz(q.pipe)
		if why, status, text := ruleAnswer(q.pipe, q.r); why != 0 {
			return q.reply(why, status, text)
		}
	}
	if len(q.rule.Backends) > 0 {
		return q.drawBackend()
	}
	if q.matched != nil && q.prog.Strict {
		q.t.noBackend()
		return refusal(InvalidBackend, q.name, 500, textNoBackend)
	}
	return q.forward()
}

// refusal answers a request with a status and a text.
func refusal(why Reason, rule string, status int, text string) Verdict {
	return Verdict{Action: Refuse, Reason: why, Rule: rule, Status: status, Text: text}
}

// findRule takes the rule that the request matches. A rule for which the request is too large to
// tell is returned.
func (q *question) findRule() (large *snapshot.Rule) {
	strict := q.prog.Strict
	if strict {
		q.rule, q.self = nil, nil
	}
	a, tooLarge := match(q.prog, q.r, q.path, q.query, q.t)
	switch {
	case tooLarge:
		return a.Rule
	case a == nil:
		if !strict {
			q.t.noRule(false)
		}
		return nil
	}
	q.rule, q.matched, q.name, q.reason = a.Rule, a.Rule, a.Rule.Name, HTTPRoute
	if a.Rule.GRPC {
		q.reason = GRPCRoute
	}
	if answersPreflight(a) {
		q.cors = a.Rule.Pipe.CORS
	}
	if a.PathKind == model.PathPrefix {
		q.prefix = len(a.Path)
	}
	return nil
}

// rbac is the first filter of the rule that denies the request to the caller, or nil.
func (q *question) rbac() *snapshot.RBAC {
	if len(q.pipe.RBAC) == 0 {
		return nil
	}
	return q.audited.denied(q.pipe, q.caller(), q.r.Method, q.path, q.t)
}

// reply is an answer that the rule, or its backend, gives by itself.
func (q *question) reply(why Reason, status int, text string) Verdict {
	return Verdict{Action: Reply, Reason: why, Rule: q.name, Status: status, Text: text,
		Matched: q.matched, Pipe: q.pipe, Prefix: q.prefix, Respelled: q.respelled}
}

// drawBackend draws one of the rule's backends by weight (contract 10.4).
func (q *question) drawBackend() Verdict {
	rule := q.rule
	if rule.WeightSum == 0 { // nobody may have it, and nothing is wrong with the rule
		return refusal(NoEndpoint, q.name, 503, textNoWeight)
	}
	b := share(rule.Backends, rule.WeightSum, q.pick)
	if b.Invalid != "" {
		q.t.invalidBackend(b)
		return q.failed(refusal(InvalidBackend, q.name, 500, b.Invalid))
	}
	q.t.drawnBackend(b, len(rule.Backends))
	q.backend, q.pipe = b.Backend, b.Pipe
	if d := q.pipe; d != nil && d.Redirect != nil { // the backend's own
		return q.reply(Redirect, d.Redirect.Status, textRedirect)
	}
	return q.forward()
}

// forward sends the request to the backend: to those of its endpoints that the request selects (contract 5.10).
func (q *question) forward() Verdict {
	if q.pipe != nil && len(q.pipe.Query) > 0 && manyParameters(q.query) {
		q.t.longEditedQuery()
		return refusal(TooLarge, q.name, 431, textTooLarge)
	}
	set := q.s.Endpoints(q.backend)
	if set.Len() == 0 {
		return q.failed(q.empty(q.s.Service(q.backend.Service), q.name, q.backend, q.backend.Texts))
	}
	narrowed, pinned, ok := selects(q.s, set, q.pipe, q.r, q.t)
	switch {
	case !ok:
		return q.failed(refusal(NoEndpoint, q.name, 503, textSelected))
	case pinned == nil && narrowed.Empty():
		return q.failed(q.empty(nil, q.name, q.backend, q.backend.Texts))
	}
	q.t.endpoints(q.backend, narrowed)
	return Verdict{Action: Forward, Reason: q.reason, Rule: q.name, Backend: q.backend, Set: narrowed, Pinned: pinned,
		Matched: q.matched, Pipe: q.pipe, Prefix: q.prefix, Respelled: q.respelled}
}

// failed is the verdict for a backend that was drawn and cannot have the request: the rule may retry another.
func (q *question) failed(v Verdict) Verdict {
	v.Matched = q.matched
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

// ruleAnswer is what a rule answers by itself; without a reason it answers nothing.
func ruleAnswer(p *snapshot.Pipe, r *httpmsg.Head) (why Reason, status int, text string) {
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
		q.t.awaitedRows(svc.Name)
		return Verdict{Action: Await, Reason: AwaitRows, Rule: rule, Status: 503, Text: textAwait, Backend: b, Awaits: svc}
	}
	if b != nil {
		q.t.noHealthyEndpoint(b, q.s.Endpoints(b))
	}
	return Verdict{Action: Refuse, Reason: NoEndpoint, Rule: rule, Status: 503, Text: texts.NoEndpoint}
}

// deliver is a request that came over the hop (contract 6.3, 6.4).
func (q *question) deliver() Verdict {
	s, f, r := q.s, q.f, q.r
	switch string(r.Path) {
	case PathLive:
		return liveness()
	case PathReady:
		return readiness(s, Ready)
	}
	v := inbound(s, f, q.t)
	switch {
	case v.Action != Deliver:
		v.Status, v.Text = 421, textUnknownPort
		return v
	case v.Class != model.HTTP: // the pod's declaration changed under the connection
		return refusal(UnknownSNI, v.Rule, 421, textUnknownPort)
	}
	pipe := s.WorkloadOf(f).Inbound
	if pipe == nil {
		return v
	}
	q.path, _ = cutPath(r.Path)
	if pipe.Policy() && hasAliases(q.path) {
		result, bypasses := q.checkInboundAliases(pipe)
		if result == refused {
			return refusal(PathSpelling, bypasses, 403, textSpelling)
		}
		v.Respelled = result == twoReadings && pipe.Authz != nil
	}
	if d := v.Audited.denied(pipe, f.Peer, r.Method, q.path, q.t); d != nil {
		no := refusal(RBACDenied, d.Name, 403, textRBAC)
		no.Audited = v.Audited
		return no
	}
	q.t.authz(pipe)
	v.Pipe = pipe
	return v
}

// checkInboundAliases is the path policy (decision 009) at the destination, where one pipe is in
// force whatever the path is.
func (q *question) checkInboundAliases(pipe *snapshot.Pipe) (result reading, bypasses string) {
	norm, thirdReading, ok := plain(q.path)
	switch {
	case !ok:
		return refused, firstPolicy(pipe)
	case thirdReading:
		q.t.thirdReading(q.path, "pod")
		return refused, firstPolicy(pipe)
	case string(norm) == string(q.path):
		return oneReading, ""
	}
	if f := aliasVerdict(pipe.RBAC, q.f.Peer, q.r.Method, q.path, norm, q.t); f != nil {
		return refused, f.Name
	}
	return twoReadings, ""
}
