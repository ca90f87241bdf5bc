package reference

import (
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
)

func reply(reason string, status int) Answer {
	return Answer{Action: "reply", Reason: reason, Status: status}
}

// refused is a refusal of a request (4.4).
func refused(reason string, status int) Answer {
	a := Answer{Action: "refuse", Reason: reason, Status: status}
	if status == 421 {
		a.Header = reason
	}
	return a
}

func passthrough() Answer { return Answer{Action: "passthrough", Reason: "not-mesh"} }

// answeredLocally is 4.11 before routing, and 4.8.
func answeredLocally(r *httpmsg.Head) (Answer, bool) {
	if string(r.Path) == "/aether/readyz" {
		return reply("readyz", 200), true
	}
	if string(r.Method) == "CONNECT" && len(r.Upgrade) == 0 {
		return reply("connect", 404), true
	}
	return Answer{}, false
}

// address is the addressing rule, 4.3: the service and the port that a request
// is for, or (svc nil) the answer to one that is for none.
func (w *world) address(f *model.Flow, r *httpmsg.Head) (svc *service, p port, a Answer) {
	n := w.name(string(r.Authority), f.Namespace)
	if f.Dir == model.Captured && f.Dst.Port() != model.PortProxy {
		if w.m.Semantics == model.GatewayAPI {
			s := w.byAddress(f.Dst.Addr())
			live := n.service == nil && !n.noCaller && string(r.Path) == "/-/-/live" // 4.11, as always
			if s != nil && !live {
				return w.dialledService(s, f.Dst.Port())
			}
		}
		return w.dialled(f, r, n)
	}
	return w.proxied(f, r, n)
}

// dialledService is routeSemantics GatewayAPI: the ClusterIP names the service.
func (w *world) dialledService(s *service, d uint16) (*service, port, Answer) {
	if s.broken {
		return nil, port{}, refused("broken-service", 500)
	}
	if a, cold := s.coldAnswer(d); cold {
		return nil, port{}, a
	}
	p, ok := s.port(d)
	if !ok || p.class != model.HTTP {
		return nil, port{}, refused("port-not-declared", 421)
	}
	return s, p, Answer{}
}

// dialled is 4.3 (a): the port comes from the dial, the service from Host.
func (w *world) dialled(f *model.Flow, r *httpmsg.Head, n meaning) (*service, port, Answer) {
	d := f.Dst.Port()
	switch {
	case n.noCaller:
		return nil, port{}, refused("caller-namespace-unknown", 421)
	case n.service == nil && string(r.Path) == "/-/-/live": // 4.11
		return nil, port{}, reply("live", 200)
	case n.service == nil:
		return nil, port{}, passthrough()
	}
	s := n.service
	if s.kind == meshOnly { // 4.9: never a refusal on a dial; the pods' own ports say what is delivered
		if !s.onDial(d, n.port) {
			return nil, port{}, passthrough()
		}
		if s.broken {
			return nil, port{}, refused("broken-service", 500)
		}
		return s, port{number: d, target: d, class: model.HTTP}, Answer{}
	}
	if s.broken {
		return nil, port{}, refused("broken-service", 500)
	}
	if s.cold && model.DialledPort(n.port) { // 4.6: refused at once, never parked
		return nil, port{}, refused("port-not-declared", 421)
	}
	if a, cold := s.coldAnswer(d); cold {
		return nil, port{}, a
	}
	p, ok := s.port(d)
	switch {
	case !ok || p.class != model.HTTP:
		return nil, port{}, refused("port-not-declared", 421)
	case n.port != 0 && n.port != d:
		return nil, port{}, refused("port-mismatch", 421)
	}
	return s, p, Answer{}
}

// onDial is 4.9: a dial with the mesh name of a user's Service that no route names is
// the mesh's only where its own pods declare the dialled port HTTP, and Host
// names that port or none.
func (s *service) onDial(d, host uint16) bool {
	p, ok := findPort(s.pods, d)
	return ok && p.class == model.HTTP && (host == 0 || host == d)
}

// coldAnswer is 4.6 for a service of which no port is known: its rows are awaited
// or nobody is there, but the mesh's own ports are nobody's.
func (s *service) coldAnswer(n uint16) (Answer, bool) {
	switch {
	case !s.cold:
		return Answer{}, false
	case model.DialledPort(n):
		return refused("port-not-declared", 421), true
	case s.await:
		return Answer{Action: "await", Reason: "await-rows", Status: 503}, true
	}
	return refused("no-endpoint", 503), true
}

// proxied is 4.3 (b): service and port both come from Host.
func (w *world) proxied(f *model.Flow, r *httpmsg.Head, n meaning) (*service, port, Answer) {
	floorRefuses := f.Dir == model.Proxy || scoped(w.workload(f))
	switch {
	case n.noCaller:
		return nil, port{}, refused("caller-namespace-unknown", 421)
	case n.service == nil && string(r.Path) == "/-/-/live": // 4.11
		return nil, port{}, reply("live", 200)
	case n.service == nil && model.DialledPort(n.port) && (n.below || floorRefuses): // unknown names too
		return nil, port{}, refused("port-not-declared", 421)
	case n.service == nil && floorRefuses:
		return nil, port{}, refused("no-such-name", 404)
	case n.service == nil:
		return nil, port{}, passthrough()
	}
	s, number := n.service, n.port
	if number == 0 {
		number = 80
	}
	if s.broken {
		return nil, port{}, refused("broken-service", 500)
	}
	if a, cold := s.coldAnswer(number); cold {
		return nil, port{}, a
	}
	p, ok := s.port(number)
	switch {
	case ok && p.class == model.HTTP:
		return s, p, Answer{}
	case n.port == 0:
		return nil, port{}, refused("port-required", 421)
	case ok:
		return nil, port{}, refused("port-not-http", 421)
	}
	return nil, port{}, refused("port-not-declared", 421)
}

// chosen is the rule that a path picks on a port: route nil is the port itself.
type chosen struct {
	route   *model.Route
	rule    int
	arm     arm
	effects effects
	none    bool // GatewayAPI: routes there are, and none of their rules matches
	large   bool // a rule would have to look at more than it may
}

func (c *chosen) rulePointer() *model.Rule {
	if c.route == nil {
		return nil
	}
	return &c.route.Rules[c.rule]
}

// choose is 10.3, and after it 10.4: the service itself.
func (w *world) choose(routes []*model.Route, f *model.Flow, r *httpmsg.Head, svc *service, path, query string) (c chosen) {
	all := arms(routes)
	limit := textLimit(all)
	for _, a := range all {
		var ahead *httpmsg.Head // what a preflight asks about, for rules that answer it
		if e := w.ruleEffects(svc, a.route, &a.route.Rules[a.rule]); e.cors != nil && e.invalid == "" && isPreflight(r) {
			ahead = r
		}
		holds, large := a.holds(r, ahead, path, query, limit)
		if large {
			return chosen{large: true}
		}
		if holds {
			c.route, c.rule, c.arm = a.route, a.rule, a
			break
		}
	}
	if c.route == nil && len(routes) > 0 && w.m.Semantics == model.GatewayAPI {
		c.none = true
		return c
	}
	c.effects = w.ruleEffects(svc, c.route, c.rulePointer())
	return c
}

// refuses: the rule answers 500 to whatever picks it.
func (c *chosen) refuses() bool { return c.effects.invalid != "" }

// guarded: there is something here to walk around: policy, or a refusal in the
// place of what cannot be honoured.
func (c *chosen) guarded() bool { return c.effects.policy() || c.refuses() }

// guards: some rule is guarded, or the port itself carries policy.
func (w *world) guards(routes []*model.Route, svc *service) bool {
	for _, a := range arms(routes) {
		c := chosen{route: a.route, rule: a.rule, effects: w.ruleEffects(svc, a.route, &a.route.Rules[a.rule])}
		if c.guarded() {
			return true
		}
	}
	if len(routes) > 0 && w.m.Semantics == model.GatewayAPI {
		return false // no request reaches the port itself
	}
	self := w.ruleEffects(svc, nil, nil)
	return self.policy()
}

// caller is who asks, at the source: the pod's own identity (decision 049).
func (w *world) caller(f *model.Flow) string {
	if p := w.workload(f); p != nil {
		return p.SPIFFEID
	}
	return ""
}

// pathPolicy is decision 009: where two spellings of a path pick different rules of
// which one carries policy, or policy judges them differently, or which climbs where
// there is policy at all, the request is denied. asked is the other spelling where the
// authorization service is asked.
func (w *world) pathPolicy(routes []*model.Route, f *model.Flow, r *httpmsg.Head, svc *service, a *chosen, path, query string) (asked, reason string) {
	plain, settled := normal(path)
	if plain == path && settled {
		return "", ""
	}
	b := w.choose(routes, f, r, svc, plain, query)
	if w.guards(routes, svc) {
		switch {
		case !settled:
			return "", "path-spelling"
		case b.large:
			return "", "too-large"
		case wanders(path):
			return "", "path-spelling"
		}
	}
	if (a.route != b.route || a.rule != b.rule || a.none != b.none) && (a.guarded() || b.guarded()) {
		return "", "path-spelling"
	}
	m := string(r.Method)
	if denied(a.effects.rbac, w.caller(f), m, path) != denied(a.effects.rbac, w.caller(f), m, plain) {
		return "", "path-spelling"
	}
	if a.effects.authz != "" && plain != path {
		asked = plain + string(r.Path)[len(path):]
	}
	return asked, ""
}

// serve runs a request through what is in force on a port, in the order of 10.7:
// rule, path policy, RBAC, authorization, preflight, redirect, edits, backend.
func (w *world) serve(f *model.Flow, r *httpmsg.Head, svc *service, p port, pick uint32) Answer {
	routes := w.httpRoutes(svc, p.number, f.Namespace)
	if len(arms(routes)) > maxArms {
		return refused("invalid-backend", 500)
	}
	if self := w.ruleEffects(svc, nil, nil); self.invalid != "" { // 10.7: a filter of the whole service
		return refused("invalid-backend", 500)
	}
	path, query := cutQuery(string(r.Path))
	c := w.choose(routes, f, r, svc, path, query)
	if c.large {
		return refused("too-large", 431)
	}
	a := w.byRule(routes, f, r, svc, p, &c, path, query, pick)
	if a.Action == "refuse" && c.effects.cors != nil && !c.refuses() { // a browser may read why (GEP-1767)
		a.Response = fieldTexts(marked(c.effects.cors, r, nil))
	}
	return a
}

// byRule is serve for a request of which the rule is known.
func (w *world) byRule(routes []*model.Route, f *model.Flow, r *httpmsg.Head, svc *service, p port, c *chosen, path, query string, pick uint32) Answer {
	asked, reason := w.pathPolicy(routes, f, r, svc, c, path, query)
	switch reason {
	case "path-spelling":
		return refused(reason, 403)
	case "too-large":
		return refused(reason, 431)
	}
	if c.none {
		return refused("no-rule", 404)
	}
	e := c.effects
	if c.refuses() {
		return refused("invalid-backend", 500)
	}
	if denied(e.rbac, w.caller(f), string(r.Method), path) {
		return refused("rbac-denied", 403)
	}
	a := Answer{Authz: e.authz, AuthzPath: asked}
	if e.cors != nil && isPreflight(r) {
		a.Action, a.Reason, a.Status = "reply", "cors-preflight", 204
		a.Reply = preflight(e.cors, r)
		return a
	}
	if e.redirect != nil {
		a.Action, a.Reason, a.Status = "reply", "redirect", e.redirect.Status
		a.Location = location(e.redirect, f, r, c.arm.match)
		a.Response = answered(r, e, effects{}, w.chainEdits(svc))
		return a
	}
	return w.forward(a, f, r, svc, p, c, pick)
}

// forward picks a backend (10.4), edits (10.2, 10.7) and selects (5.10).
func (w *world) forward(a Answer, f *model.Flow, r *httpmsg.Head, svc *service, p port, c *chosen, pick uint32) Answer {
	rule, e := c.rulePointer(), c.effects
	to := destination{svc, p}
	reason := "declared-http"
	if rule != nil {
		reason = "http-route"
		if c.route.Kind == model.GRPCRoute {
			reason = "grpc-route"
		}
		a.Timeouts, a.Retry, a.Persistence = ruleTexts(rule)
	}
	var extra effects
	if rule != nil && len(rule.Backends) == 0 && w.m.Semantics == model.GatewayAPI { // decision 058
		return refused("invalid-backend", 500)
	}
	if rule != nil && len(rule.Backends) > 0 {
		var all []weighted
		for _, ref := range rule.Backends {
			d, invalid := w.refers(c.route, svc, ref, model.HTTP)
			if be, _ := w.plain(c.route, rule, ref.Filters, true); be.invalid != "" {
				invalid = be.invalid
			}
			all = append(all, weighted{d, ref, invalid})
		}
		b := choose(all, pick)
		switch {
		case b == nil: // every weight is 0: nobody may have it (case 149)
			return refused("no-endpoint", 503)
		case b.invalid != "":
			return refused("invalid-backend", 500)
		}
		to = b.destination
		if extra, _ = w.plain(c.route, rule, b.ref.Filters, true); extra.redirect != nil { // its share is redirected (case 164)
			a = Answer{Authz: a.Authz, AuthzPath: a.AuthzPath, Action: "reply", Reason: "redirect", Status: extra.redirect.Status}
			a.Location = location(extra.redirect, f, r, c.arm.match)
			a.Response = answered(r, e, extra, w.chainEdits(svc))
			return a
		}
	}
	own := w.chainEdits(svc)
	if _, query := cutQuery(string(r.Path)); crowded(query) && len(e.query)+len(extra.query)+len(own.query) > 0 {
		return refused("too-large", 431)
	}
	if to.svc.await {
		return Answer{Action: "await", Reason: "await-rows", Status: 503}
	}
	pods := w.endpoints(to.svc, to.port)
	may := w.selection(r, e.selectors, to.svc, pods)
	if len(may) == 0 {
		return refused("no-endpoint", 503)
	}
	a.Action, a.Reason = "forward", reason
	a.Backend, a.Endpoints = to.name(), podNames(may)
	a.Authority, a.Path = rewritten(r, e, extra, c.arm.match)
	if ops := slices.Concat(e.query, extra.query, own.query); len(ops) > 0 {
		path, query := cutQuery(a.Path)
		if q, changed := editQuery(query, ops); changed {
			a.Path = path
			if q != "" {
				a.Path += "?" + q
			}
		}
	}
	a.Request = fieldTexts(edit(r.Fields, slices.Concat(e.request, extra.request, own.request)))
	a.Response = answered(r, e, extra, own)
	for _, m := range slices.Concat(e.mirrors, extra.mirrors) {
		if d, invalid := w.refers(c.route, svc, m.Backend, model.HTTP); invalid == "" {
			a.Mirrors = append(a.Mirrors, fmt.Sprintf("%s %d/%d", d.name(), m.Numerator, m.Denominator))
		}
	}
	return a
}

// answered is the sample answer with all edits of answers: the rule's, the backend's,
// the service's, then CORS.
func answered(r *httpmsg.Head, e, extra, own effects) []string {
	sample := edit(SampleResponse().Fields, slices.Concat(e.response, extra.response, own.response))
	if e.cors != nil {
		sample = marked(e.cors, r, sample)
	}
	return fieldTexts(sample)
}

func ruleTexts(rule *model.Rule) (timeouts, retry, persistence string) {
	return TimeoutsText(rule.Timeouts), RetryText(rule.Retry), PersistenceText(rule.Persistence)
}

// TimeoutsText is the text of Answer.Timeouts; "" for none.
func TimeoutsText(t model.Timeouts) string {
	if t == (model.Timeouts{}) {
		return ""
	}
	return fmt.Sprintf("request %s backend %s", t.Request, t.Backend)
}

// RetryText is the text of Answer.Retry; "" for none.
func RetryText(r *model.Retry) string {
	if r == nil {
		return ""
	}
	return fmt.Sprintf("%v %d %s", r.Codes, r.Attempts, r.Backoff)
}

// PersistenceText is the text of Answer.Persistence; "" for none.
func PersistenceText(p *model.Persistence) string {
	if p == nil {
		return ""
	}
	return fmt.Sprintf("%+v", *p)
}

// rewritten is URLRewrite of the rule, then of the backend (10.2).
func rewritten(r *httpmsg.Head, rule, backend effects, m model.Match) (authority, path string) {
	authority = string(r.Authority)
	for _, h := range []string{rule.host, backend.host} {
		if h != "" {
			authority = h
		}
	}
	e := rule.path
	if backend.path.Kind != model.PathKept {
		e = backend.path
	}
	return authority, editPath(string(r.Path), e, m)
}

// editPath replaces the path or the prefix that matched; the query is kept.
func editPath(target string, e model.PathEdit, m model.Match) string {
	path, query := cutQuery(target)
	if path == "*" && e.Kind == model.PathPrefixPart {
		return target // no path, and no prefix of one
	}
	switch e.Kind {
	case model.PathKept:
		return target
	case model.PathFull:
		path = e.Value
	case model.PathPrefixPart:
		matched := 0
		if m.PathKind == model.PathPrefix {
			matched = len(strings.TrimRight(m.Path, "/"))
		}
		path = prefixed(path, matched, e.Value)
	}
	if strings.Contains(target, "?") {
		path += "?" + query
	}
	return path
}

// edit runs changes over fields, in order.
func edit(fields []httpmsg.Field, ops []model.MutationOp) []httpmsg.Field {
	out := slices.Clone(fields)
	for _, op := range ops {
		has := slices.ContainsFunc(out, func(f httpmsg.Field) bool { return string(f.Name) == op.Name })
		line := httpmsg.Field{Name: []byte(op.Name), Value: []byte(op.Value)}
		remove := func() {
			out = slices.DeleteFunc(out, func(f httpmsg.Field) bool { return string(f.Name) == op.Name })
		}
		switch op.Kind {
		case model.RemoveAll:
			remove()
		case model.AppendIfExistsOrAdd:
			out = append(out, line)
		case model.AddIfAbsent:
			if !has {
				out = append(out, line)
			}
		case model.OverwriteIfExists:
			if has {
				remove()
				out = append(out, line)
			}
		case model.OverwriteIfExistsOrAdd:
			remove()
			out = append(out, line)
		}
	}
	return out
}

// fieldTexts are "name=value", ascending by name; lines of one name keep their order.
func fieldTexts(fields []httpmsg.Field) (out []string) {
	fields = slices.Clone(fields)
	sort.SliceStable(fields, func(i, j int) bool { return string(fields[i].Name) < string(fields[j].Name) })
	for _, f := range fields {
		out = append(out, string(f.Name)+"="+string(f.Value))
	}
	return out
}

// editQuery runs changes over the parameters of a raw query, in order. What is not
// changed keeps its spelling, and where nothing is the whole query does.
func editQuery(query string, ops []model.MutationOp) (out string, changed bool) {
	var items []string
	if query != "" {
		items = strings.Split(query, "&")
	}
	named := func(item, name string) bool { return parameters(item + "&")[0][0] == name }
	for _, op := range ops {
		at := slices.IndexFunc(items, func(i string) bool { return named(i, op.Name) })
		item := encode(op.Name) + "=" + encode(op.Value)
		before := slices.Clone(items)
		others := func() {
			items = slices.DeleteFunc(items, func(i string) bool { return named(i, op.Name) })
		}
		switch op.Kind {
		case model.RemoveAll:
			others()
		case model.AppendIfExistsOrAdd:
			items = append(items, item)
		case model.AddIfAbsent:
			if at < 0 {
				items = append(items, item)
			}
		case model.OverwriteIfExists, model.OverwriteIfExistsOrAdd:
			if at >= 0 {
				others()
				items = slices.Insert(items, at, item)
			} else if op.Kind == model.OverwriteIfExistsOrAdd {
				items = append(items, item)
			}
		}
		changed = changed || !slices.Equal(before, items)
	}
	return strings.Join(items, "&"), changed
}

// encode is RFC 3986 2.1 for all that is not unreserved.
func encode(s string) string {
	var b strings.Builder
	for _, c := range []byte(s) {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("-._~", c) >= 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// location is Gateway API's RequestRedirect (10.2).
func location(e *model.RedirectFilter, f *model.Flow, r *httpmsg.Head, m model.Match) string {
	host, number := splitHost(string(r.Authority))
	if host == "" { // GatewayAPI: the address is what names the service
		a := f.Dst.Addr().Unmap() // a socket of both families has IPv4 addresses mapped
		if host = a.WithZone("").String(); a.Is6() {
			host = "[" + host + "]"
		}
	}
	if e.Host != "" {
		host = e.Host
	}
	scheme := "http"
	if e.Scheme != "" {
		scheme = e.Scheme
	}
	switch {
	case e.Port != 0:
		number = strconv.Itoa(int(e.Port))
	case e.Scheme != "":
		number = ""
	case number == "" && f.Dir == model.Captured && f.Dst.Port() != model.PortProxy:
		number = strconv.Itoa(int(f.Dst.Port()))
	}
	if scheme == "http" && number == "80" || scheme == "https" && number == "443" {
		number = ""
	}
	out := scheme + "://" + host
	if number != "" {
		out += ":" + number
	}
	path := editPath(string(r.Path), e.Path, m)
	if path == "*" { // the server itself: an authority without a path (RFC 9112 3.2.4, 3.3)
		path = ""
	}
	return out + path
}

// splitHost takes an authority apart; an IPv6 literal keeps its brackets. What is no
// port is none.
func splitHost(authority string) (host, number string) {
	i := strings.LastIndexByte(authority, ':')
	if i < 0 || i < strings.LastIndexByte(authority, ']') { // a colon in brackets is an address's
		return authority, ""
	}
	host, number = authority[:i], authority[i+1:]
	if v, err := strconv.ParseUint(number, 10, 16); err != nil || v == 0 || strconv.FormatUint(v, 10) != number {
		number = ""
	}
	return host, number
}

// isPreflight is Fetch's CORS-preflight request.
func isPreflight(r *httpmsg.Head) bool {
	return string(r.Method) == "OPTIONS" && first(r, "origin") != "" && first(r, "access-control-request-method") != ""
}

// originText is an origin lower-cased, without the scheme's own port.
func originText(o string) string {
	o = strings.ToLower(o)
	if s, ok := strings.CutSuffix(o, ":80"); ok && strings.HasPrefix(o, "http://") {
		return s
	}
	if s, ok := strings.CutSuffix(o, ":443"); ok && strings.HasPrefix(o, "https://") {
		return s
	}
	return o
}

// allowed: the origin is one of those configured (GEP-1767).
func allowed(c *model.CORSFilter, origin string) (ok, any bool) {
	for _, o := range c.Origins {
		if o == "*" {
			return true, true
		}
	}
	got := originText(origin)
	for _, o := range c.Origins {
		want := originText(o)
		before, after, wild := strings.Cut(want, "*")
		if want == got || wild && len(got) >= len(before)+len(after) && strings.HasPrefix(got, before) && strings.HasSuffix(got, after) {
			return true, false
		}
	}
	return false, false
}

// originFields are what every answer to an allowed origin says.
func originFields(c *model.CORSFilter, origin string, any bool) (out [][2]string) {
	if any && !c.Credentials {
		return [][2]string{{"access-control-allow-origin", "*"}}
	}
	out = [][2]string{{"access-control-allow-origin", origin}, {"vary", "Origin"}}
	if c.Credentials {
		out = append(out, [2]string{"access-control-allow-credentials", "true"})
	}
	return out
}

// preflight are the fields of a preflight's answer, ascending.
func preflight(c *model.CORSFilter, r *httpmsg.Head) (out []string) {
	origin := first(r, "origin")
	ok, any := allowed(c, origin)
	if !ok {
		return nil
	}
	fields := originFields(c, origin, any)
	list := func(name string, of []string, asked string) {
		v := strings.Join(of, ",")
		if slices.Contains(of, "*") {
			v = "*"
			if c.Credentials { // "*" is no wildcard then (Fetch)
				v = asked
			}
		}
		if v != "" {
			fields = append(fields, [2]string{name, v})
		}
	}
	list("access-control-allow-methods", c.Methods, first(r, "access-control-request-method"))
	list("access-control-allow-headers", c.Headers, first(r, "access-control-request-headers"))
	if len(c.Expose) > 0 {
		fields = append(fields, [2]string{"access-control-expose-headers", strings.Join(c.Expose, ",")})
	}
	if c.MaxAge > 0 {
		fields = append(fields, [2]string{"access-control-max-age", strconv.Itoa(int(c.MaxAge.Seconds()))})
	}
	for _, f := range fields {
		out = append(out, f[0]+"="+f[1])
	}
	sort.Strings(out)
	return out
}

// marked is the answer to a request that is no preflight. What the application wrote of
// who may read it does not count, whoever asks; and an answer that depends on the
// origin says so even where the origin is none or not allowed.
func marked(c *model.CORSFilter, r *httpmsg.Head, fields []httpmsg.Field) []httpmsg.Field {
	origin := first(r, "origin")
	ok, any := allowed(c, origin)
	for _, name := range []string{"access-control-allow-origin", "access-control-allow-credentials", "access-control-expose-headers"} {
		fields = edit(fields, []model.MutationOp{{Kind: model.RemoveAll, Name: name}})
	}
	var all [][2]string
	if !slices.Contains(c.Origins, "*") || c.Credentials {
		all = append(all, [2]string{"vary", "Origin"})
	}
	if ok = ok && origin != ""; ok {
		all = append(all, originFields(c, origin, any)...)
	}
	if ok && len(c.Expose) > 0 {
		all = append(all, [2]string{"access-control-expose-headers", strings.Join(c.Expose, ",")})
	}
	for _, x := range all {
		if x[0] == "vary" { // what the application says of it holds, too (RFC 9110 12.5.5)
			if !slices.ContainsFunc(fields, func(f httpmsg.Field) bool { return string(f.Name) == "vary" && variesBy(string(f.Value)) }) {
				fields = append(fields, httpmsg.Field{Name: []byte("vary"), Value: []byte(x[1])})
			}
			continue
		}
		fields = edit(fields, []model.MutationOp{{Kind: model.OverwriteIfExistsOrAdd, Name: x[0], Value: x[1]}})
	}
	return fields
}

// variesBy: a Vary line that names Origin, or everything.
func variesBy(value string) bool {
	for _, name := range strings.Split(value, ",") {
		if name = strings.TrimSpace(name); name == "*" || strings.EqualFold(name, "origin") {
			return true
		}
	}
	return false
}

func deliverText(p model.Port) string {
	if p.Class == model.HTTP {
		return fmt.Sprintf("%d %s %s", p.Number, p.Class, p.App)
	}
	return fmt.Sprintf("%d %s", p.Number, p.Class)
}

// inboundRequest is 6.4 and 6.3: the paths answered here, then policy, then delivery.
func (w *world) inboundRequest(f *model.Flow, r *httpmsg.Head) Answer {
	a := w.inbound(f)
	if a.Action != "deliver" {
		a.Status = 421
		return a
	}
	switch string(r.Path) {
	case "/-/-/live":
		return reply("live", 200)
	case "/-/-/ready":
		return reply("ready", 200)
	}
	if string(r.Method) == "CONNECT" && len(r.Upgrade) == 0 {
		return reply("connect", 404)
	}
	pod := w.workload(f)
	filters, authz := w.inboundPolicy(pod.Service())
	path, _ := cutQuery(string(r.Path))
	plain, settled := normal(path)
	m := string(r.Method)
	carries := authz != "" || slices.ContainsFunc(filters, func(x rbac) bool { return !x.Audit })
	if (!settled || wanders(path)) && carries || denied(filters, f.Peer, m, path) != denied(filters, f.Peer, m, plain) {
		return refused("path-spelling", 403)
	}
	if denied(filters, f.Peer, m, path) {
		return refused("rbac-denied", 403)
	}
	if a.Authz = authz; authz != "" && plain != path {
		a.AuthzPath = plain + string(r.Path)[len(path):]
	}
	return a
}

// inboundPolicy are the filters of scope inbound on a service's pods (10.7). One
// that is invalid denies everything.
func (w *world) inboundPolicy(n model.ServiceName) (out []rbac, authz string) {
	s := w.service(n)
	if s == nil {
		s = &service{name: n}
	}
	for _, f := range w.filtersOf(s, model.ScopeInbound) {
		switch {
		case w.filterInvalid(f):
			out = append(out, rbac{filterName(f), model.RBAC{}})
		case f.RBAC != nil:
			out = append(out, rbac{filterName(f), *f.RBAC})
		case f.ExtAuthz != nil && !f.ExtAuthz.Disabled && authz == "":
			authz = filterName(f)
		}
	}
	return out, authz
}
