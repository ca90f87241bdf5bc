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
func Route(s *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head, pick uint32, t *Trace) (v Verdict) {
	t.request(r)
	if len(r.Upgrade) == 0 && string(r.Method) == "CONNECT" { // contract 4.8
		v.answer(Reply, Connect, "", 404, textConnect)
		return v
	}
	q := question{s: s, f: f, r: r, pick: pick, t: t}
	switch f.Dir {
	case model.Captured, model.Proxy:
		if string(r.Path) == PathReadyz {
			v.readiness(s, Readyz)
		} else {
			q.byAuthority(&v)
		}
	case model.Inbound:
		q.deliver(&v)
	default:
		v.refuse(NoVerdict, "", 500, textNoVerdict)
	}
	return v
}

// readiness answers a readiness probe.
func (v *Verdict) readiness(s *snapshot.Snapshot, why Reason) {
	if s.Draining() {
		v.answer(Reply, why, "", 503, "draining\n")
	} else {
		v.answer(Reply, why, "", 200, "ready\n")
	}
}

// liveness answers a liveness probe.
func (v *Verdict) liveness() { v.answer(Reply, Live, "", 200, "live\n") }

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
	backend     *snapshot.Backend
	pipe        *snapshot.FilterChain // of the rule, and of the backend once that is drawn
	prefix      int                   // the length of what the rule's prefix match matched of the path
	reason      Reason                // why the request is forwarded
	respelled   bool                  // as of Verdict
}

// byAuthority finds out which service a request is for (contract 4.3).
func (q *question) byAuthority(v *Verdict) {
	f, r := q.f, q.r
	n := snapshot.Name(q.s, r.Authority, f.Namespace)
	dialled := f.Dst.Port()
	byHost := f.Dir == model.Proxy || dialled == model.PortProxy // the port is Host's, too
	svc := n.Service
	if svc != nil && !byHost && !ownsName(svc, dialled, n.Port) {
		q.t.authorityForeign(r.Authority, &n, dialled)
		svc = nil
	}
	if !byHost && q.s.Semantics() == model.GatewayAPI {
		if owner := q.s.Address(f.Dst.Addr()); owner != nil && owner.Mesh() {
			if n.Service == nil && !n.NoCaller && string(r.Path) == PathLive {
				v.liveness()
				return
			}
			q.t.dialledOwner(owner, r.Authority)
			q.reach(v, owner, dialled, dialled, false)
			return
		}
	}
	switch {
	case n.NoCaller:
		v.refuse(CallerNamespaceUnknown, "", 421, textNoCaller)
		return
	case svc == nil:
		q.foreign(v, n, byHost)
		return
	}
	q.t.authorityOwned(r.Authority, svc)
	if byHost {
		dialled = 0
	}
	q.reach(v, svc, dialled, n.Port, byHost)
}

// reach is a request for svc. Of a dial, the port is the dialled one and the authority
// may name it, or none (contract 4.3a); byHost it is the authority's, 80 by default (4.3b).
func (q *question) reach(v *Verdict, svc *snapshot.Service, dialled, named uint16, byHost bool) {
	if svc.Broken != "" {
		v.refuse(BrokenService, svc.Rule, 500, svc.Broken)
		return
	}
	port := dialled
	if byHost {
		if port = named; port == 0 {
			port = 80
		}
	}
	if svc.Cold && !model.DialledPort(port) && !model.DialledPort(named) {
		q.t.unknownPorts(svc)
		q.empty(v, svc, svc.Rule, nil, svc.Texts)
		return
	}
	p := svc.Port(port)
	if !byHost && svc.Kind == snapshot.MeshOnly {
		p = svc.PodPort(port)
	}
	isHTTP := p != nil && p.Class == model.HTTP
	switch {
	case isHTTP && (byHost || named == 0 || named == port):
		q.route(v, svc, p)
	case isHTTP:
		q.misaddressed(v, svc, PortMismatch, svc.Texts.PortMismatch, port, named)
	case byHost && named == 0:
		q.misaddressed(v, svc, PortRequired, svc.Texts.PortRequired, port, named)
	case byHost && p != nil:
		q.misaddressed(v, svc, PortNotHTTP, svc.Texts.PortNotHTTP, port, named)
	default:
		q.misaddressed(v, svc, PortNotDeclared, svc.Texts.PortNotDeclared, port, named)
	}
}

// misaddressed refuses a request for the wrong port: a 421 (contract 4.4).
func (q *question) misaddressed(v *Verdict, svc *snapshot.Service, why Reason, text string, port, named uint16) {
	q.t.wrongPort(q.s, svc, q.f.Namespace, why, port, named)
	v.refuse(why, svc.Rule, 421, text)
}

// foreign is a request that names no service for this caller.
func (q *question) foreign(v *Verdict, n snapshot.Named, byHost bool) {
	s, f, r := q.s, q.f, q.r
	// The prober's question, under any name that is not a service's.
	if n.Service == nil && string(r.Path) == PathLive {
		v.liveness()
		return
	}
	pod := s.WorkloadOf(f)
	floor := f.Dir == model.Captured && (!byHost || pod == nil || pod.Capture.RedirectAll)
	// Nobody has these two ports: refused at once for every name that could be
	// the mesh's (contract 4.3b, 4.6), and for all names where the alternative
	// is a 404 anyway.
	if byHost && n.WellFormed && model.DialledPort(n.Port) && (n.Below || !floor) {
		v.refuse(PortNotDeclared, "", 421, textReservedPort)
		return
	}
	if n.Service == nil {
		q.t.authorityForeign(r.Authority, &n, f.Dst.Port())
	}
	if floor {
		v.set(Passthrough, NotMesh, "")
		return
	}
	q.t.similarNames(s, r.Authority, f.Namespace)
	v.refuse(NoSuchName, "", 404, textNoSuchName)
}

// route runs a port's rules in the order of contract 10.7: the rule, with the path
// policy; RBAC; then what answers by itself; then the backend.
func (q *question) route(v *Verdict, svc *snapshot.Service, p *snapshot.Port) {
	q.path, q.query = cutPath(q.r.Path)
	q.self, q.rule, q.name, q.reason, q.backend = p.Self, p.Self, svc.Rule, DeclaredHTTP, p.Backend
	if q.self.Invalid != "" { // what is in force on the whole service cannot be honoured
		v.refuse(InvalidBackend, svc.Rule, 500, q.self.Invalid)
		return
	}
	if q.prog = p.ProgramFor(q.f.Namespace); q.prog != nil {
		if q.prog != p.Program {
			q.t.consumerRoutes(q.f.Namespace)
		}
		if q.prog.Invalid != "" {
			v.refuse(InvalidBackend, svc.Rule, 500, q.prog.Invalid)
			return
		}
		if large := q.findRule(v); large != nil {
			v.refuse(TooLarge, large.Name, 431, textTooLarge)
			return
		}
	}
	if hasAliases(q.path) && q.refusedPath(v) {
		return
	}
	switch {
	case q.rule == nil:
		q.t.noRule(true)
		v.refuse(NoRule, svc.Rule, 404, textNoRule)
		return
	case q.rule.Invalid != "":
		v.refuse(InvalidBackend, q.name, 500, q.rule.Invalid)
		return
	}
	if q.pipe = q.rule.Pipe; q.pipe != nil {
		if f := q.rbac(v); f != nil {
			v.refuse(RBACDenied, f.Name, 403, textRBAC)
			return
		}
		q.t.authz(q.pipe)
		if why, status, text := ruleAnswer(q.pipe, q.r); why != 0 {
			q.reply(v, why, status, text)
			return
		}
	}
	if len(q.rule.Backends) > 0 {
		q.drawBackend(v)
		return
	}
	if q.matched != nil && q.prog.Strict {
		q.t.noBackend()
		v.refuse(InvalidBackend, q.name, 500, textNoBackend)
		return
	}
	q.forward(v)
}

// refusedPath applies the path policy to the request, and reports whether that refuses it.
func (q *question) refusedPath(v *Verdict) bool {
	switch result, bypasses := q.checkPathAliases(); result {
	case refused:
		v.refuse(PathSpelling, bypasses, 403, textSpelling)
		return true
	case tooLarge:
		v.refuse(TooLarge, bypasses, 431, textTooLarge)
		return true
	case twoReadings:
		q.respelled = q.rule != nil && q.rule.Pipe != nil && q.rule.Pipe.Authz != nil
	}
	return false
}

// findRule takes the rule that the request matches. A rule for which the request is too large to
// tell is returned.
func (q *question) findRule(v *Verdict) (large *snapshot.Rule) {
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
		v.CORS = a.Rule.Pipe.CORS
	}
	if a.PathKind == model.PathPrefix {
		q.prefix = len(a.Path)
	}
	return nil
}

// rbac is the first filter of the rule that denies the request to the caller, or nil.
func (q *question) rbac(v *Verdict) *snapshot.RBAC {
	if len(q.pipe.RBAC) == 0 {
		return nil
	}
	return v.Audited.denied(q.pipe, q.caller(), q.r.Method, q.path, q.t)
}

// reply is an answer that the rule, or its backend, gives by itself.
func (q *question) reply(v *Verdict, why Reason, status int, text string) {
	v.answer(Reply, why, q.name, status, text)
	v.Matched, v.Pipe, v.Prefix, v.Respelled = q.matched, q.pipe, q.prefix, q.respelled
}

// drawBackend draws one of the rule's backends by weight (contract 10.4).
func (q *question) drawBackend(v *Verdict) {
	rule := q.rule
	if rule.WeightSum == 0 { // nobody may have it, and nothing is wrong with the rule
		v.refuse(NoEndpoint, q.name, 503, textNoWeight)
		return
	}
	b := share(rule.Backends, rule.WeightSum, q.pick)
	if b.Invalid != "" {
		q.t.invalidBackend(b)
		v.refuse(InvalidBackend, q.name, 500, b.Invalid)
		v.Matched = q.matched
		return
	}
	q.t.drawnBackend(b, len(rule.Backends))
	q.backend, q.pipe = b.Backend, b.Pipe
	if d := q.pipe; d != nil && d.Redirect != nil { // the backend's own
		q.reply(v, Redirect, d.Redirect.Status, textRedirect)
		return
	}
	q.forward(v)
}

// forward sends the request to the backend: to those of its endpoints that the request selects (contract 5.10).
func (q *question) forward(v *Verdict) {
	if q.pipe != nil && len(q.pipe.Query) > 0 && manyParameters(q.query) {
		q.t.longEditedQuery()
		v.refuse(TooLarge, q.name, 431, textTooLarge)
		return
	}
	set := q.s.Endpoints(q.backend)
	if set.Len() == 0 {
		q.empty(v, q.s.Service(q.backend.Service), q.name, q.backend, q.backend.Texts)
		v.Matched = q.matched
		return
	}
	narrowed, pinned, ok := selects(q.s, set, q.pipe, q.r, q.t)
	switch {
	case !ok:
		v.refuse(NoEndpoint, q.name, 503, textSelected)
		v.Matched = q.matched
		return
	case pinned == nil && narrowed.Empty():
		q.empty(v, nil, q.name, q.backend, q.backend.Texts)
		v.Matched = q.matched
		return
	}
	q.t.endpoints(q.backend, narrowed)
	v.set(Forward, q.reason, q.name)
	v.Backend, v.Set, v.Pinned = q.backend, narrowed, pinned
	v.Matched, v.Pipe, v.Prefix, v.Respelled = q.matched, q.pipe, q.prefix, q.respelled
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
func ruleAnswer(p *snapshot.FilterChain, r *httpmsg.Head) (why Reason, status int, text string) {
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
func (q *question) empty(v *Verdict, svc *snapshot.Service, rule string, b *snapshot.Backend, texts *snapshot.Texts) {
	if svc != nil && svc.Await {
		q.t.awaitedRows(svc.Name)
		v.answer(Await, AwaitRows, rule, 503, textAwait)
		v.Backend, v.Awaits = b, svc
		return
	}
	if b != nil {
		q.t.noHealthyEndpoint(b, q.s.Endpoints(b))
	}
	v.refuse(NoEndpoint, rule, 503, texts.NoEndpoint)
}

// deliver is a request that came over the hop (contract 6.3, 6.4).
func (q *question) deliver(v *Verdict) {
	s, f, r := q.s, q.f, q.r
	switch string(r.Path) {
	case PathLive:
		v.liveness()
		return
	case PathReady:
		v.readiness(s, Ready)
		return
	}
	inbound(s, f, q.t, v)
	switch {
	case v.Action != Deliver:
		v.Status, v.Text = 421, textUnknownPort
		return
	case v.Deliver.Class != model.HTTP: // the pod's declaration changed under the connection
		q.reject(v, UnknownSNI, v.Rule, 421, textUnknownPort)
		return
	}
	pipe := s.WorkloadOf(f).Inbound
	if pipe == nil {
		return
	}
	q.path, _ = cutPath(r.Path)
	if pipe.Policy() && hasAliases(q.path) {
		result, bypasses := q.checkInboundAliases(pipe)
		if result == refused {
			q.reject(v, PathSpelling, bypasses, 403, textSpelling)
			return
		}
		v.Respelled = result == twoReadings && pipe.Authz != nil
	}
	if d := v.Audited.denied(pipe, f.Peer, r.Method, q.path, q.t); d != nil {
		q.reject(v, RBACDenied, d.Name, 403, textRBAC)
		return
	}
	q.t.authz(pipe)
	v.Pipe = pipe
}

// reject refuses a request that was to be delivered; what filters that only count made of it stays.
func (q *question) reject(v *Verdict, why Reason, rule string, status int, text string) {
	*v = Verdict{Audited: v.Audited}
	v.refuse(why, rule, status, text)
}

// checkInboundAliases is the path policy (decision 009) at the destination, where one pipe is in
// force whatever the path is.
func (q *question) checkInboundAliases(pipe *snapshot.FilterChain) (result reading, bypasses string) {
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
