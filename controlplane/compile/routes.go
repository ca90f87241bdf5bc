package compile

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// route is one route object, compiled as far as that goes without knowing the
// services. The rest is done for each service that it is attached to.
type route struct {
	*model.Route
	object   string // "HTTPRoute shop/cart"
	rules    []routeRule
	names    []serverName // of a TLSRoute
	unread   bool         // a server name of it cannot be read, and may be any
	problems []model.Problem

	// What it names, each once.
	parents, backends []*service
	uses              []model.ServiceName // HTTPFilters
}

// routeRule is one rule of a route.
type routeRule struct {
	name     string // "HTTPRoute shop/cart rule 1 (its own)", as requests are told
	place    string // "rules[0] (its own)", as problems of the route have it
	invalid  string // not empty: why requests that pick it get 500
	arms     []compiledMatch
	unplain  string // a path of it that policy cannot be held against
	filters  []ruleFilter
	backends []backendFilters // beside the rule's Backends
}

// backendFilters are a backend's own.
type backendFilters struct {
	filters []ruleFilter
	invalid string
}

// serverName is one of a TLSRoute.
type serverName struct {
	name  string // lower case, without the "*"
	below bool
}

// compileRoutes compiles the objects of one kind and name. Of more than one
// neither is in force, but their matches are kept and refuse: what they were
// written to govern is not left ungoverned.
func compileRoutes(objects []model.Route) []*route {
	out := make([]*route, len(objects))
	for i := range objects {
		r := &route{Route: &objects[i]}
		r.object = r.Kind.String() + " " + r.Namespace + "/" + r.Name
		twice := ""
		if len(objects) > 1 {
			twice = "there are two " + r.Kind.String() + "s of this name"
			r.warn("%s: requests that match either get 500; delete one", twice)
		}
		switch r.Kind {
		case model.HTTPRoute, model.GRPCRoute:
			r.rules = make([]routeRule, len(r.Rules))
			for j := range r.Rules {
				r.rules[j] = r.readRule(j, twice)
			}
		case model.TLSRoute, model.TCPRoute:
			r.rules = make([]routeRule, len(r.Rules))
			for j := range r.Rules {
				r.rules[j] = r.readRawRule(j, twice)
			}
			r.readNames()
		default:
			r.warn("unknown kind of route %d: it is not in force; use HTTPRoute, GRPCRoute, TLSRoute or TCPRoute", r.Kind)
		}
		out[i] = r
	}
	if len(out) > 1 {
		slices.SortFunc(out, func(a, b *route) int { return compareRouteText(a.Route, b.Route) })
	}
	return out
}

func (r *route) warn(format string, args ...any) {
	r.problems = append(r.problems, problem(r.object, format, args...))
}

// repeat makes the last problem one that the route's source has reported, if why is the source's.
func repeat(problems []model.Problem, why, sources, part string) {
	if sources != "" && why == sources {
		problems[len(problems)-1].Part = part
	}
}

// allRules is the part of a route without rules that its source has missed, too.
const allRules = "rules"

func rulePart(i int) string { return "rules[" + strconv.Itoa(i) + "]" }

func backendPart(i, j int) string { return rulePart(i) + ".backendRefs[" + strconv.Itoa(j) + "]" }

func (r *route) known() bool { return r.Kind >= model.GRPCRoute && r.Kind <= model.TCPRoute }

func (r *route) ruleName(i int) string {
	name := r.object + " rule " + strconv.Itoa(i+1)
	if own := r.Rules[i].Name; own != "" {
		name += " (" + own + ")"
	}
	return name
}

// rulePlace is where in the route a rule is.
func (r *route) rulePlace(i int) string {
	if own := r.Rules[i].Name; own != "" {
		return rulePart(i) + " (" + own + ")"
	}
	return rulePart(i)
}

// readRule compiles a rule of an HTTPRoute or GRPCRoute.
func (r *route) readRule(i int, twice string) routeRule {
	in := &r.Rules[i]
	out := routeRule{name: r.ruleName(i), place: r.rulePlace(i), invalid: twice}
	m := matchReader{kind: r.Kind}
	prefixes := true
	if len(in.Matches) == 0 {
		out.arms = []compiledMatch{m.read(&model.Match{})}
	}
	for j := range in.Matches {
		a := m.read(&in.Matches[j])
		a.Index = j + 1
		out.arms = append(out.arms, a)
		if (a.PathKind == model.PathExact || a.PathKind == model.PathPrefix) && !plainPath(a.Path, true) {
			out.unplain = cmp.Or(out.unplain, a.Path)
		}
		// A match without a path is one of "/" (Gateway API HTTPRouteMatch).
		prefixes = prefixes && (in.Matches[j].PathKind == model.PathPrefix || in.Matches[j].PathKind == model.PathAny)
	}
	at, backend := inHTTPRule, inHTTPBackend
	if r.Kind == model.GRPCRoute {
		at, backend = inGRPCRule, inGRPCBackend
	}
	refuse := func(why string) {
		if out.invalid == "" && why != "" {
			r.warn("%s: %s; requests that pick it get 500", out.place, why)
			repeat(r.problems, why, in.Invalid, rulePart(i))
			out.invalid = why
		}
	}
	refuse(in.Invalid)
	refuse(m.invalid)
	var why string
	out.filters, why = readFilters(in.Filters, at, prefixes)
	refuse(why)
	if len(in.Backends) > maxBackends {
		refuse(fmt.Sprintf("it has %d backends, and %d are the most", len(in.Backends), maxBackends))
		return out
	}
	out.backends = make([]backendFilters, len(in.Backends))
	for j := range in.Backends {
		if ref := &in.Backends[j]; len(ref.Filters) > 0 {
			b := &out.backends[j]
			b.filters, b.invalid = readFilters(ref.Filters, backend, prefixes)
		}
	}
	return out
}

// readRawRule compiles a rule of a TCPRoute or TLSRoute, which has backends only.
func (r *route) readRawRule(i int, twice string) routeRule {
	in := &r.Rules[i]
	out := routeRule{name: r.ruleName(i), place: r.rulePlace(i), invalid: twice}
	why := in.Invalid
	switch {
	case why != "":
	case len(in.Matches) > 0 || len(in.Filters) > 0:
		why = "matches and filters mean nothing to raw TCP: remove them"
	case len(in.Backends) > maxBackends:
		why = fmt.Sprintf("it has %d backends, and %d are the most", len(in.Backends), maxBackends)
	}
	if out.invalid == "" && why != "" {
		r.warn("%s: %s; connections to it are refused", out.place, why)
		repeat(r.problems, why, in.Invalid, rulePart(i))
		out.invalid = why
	}
	return out
}

func (r *route) readNames() {
	if r.Kind != model.TLSRoute {
		return
	}
	if len(r.Rules) == 0 {
		r.warn("it has no rules: what it takes is refused; write one with backendRefs")
		r.problems[len(r.problems)-1].Part = allRules
	}
	if len(r.ServerNames) == 0 {
		r.warn("it has no server name and takes no connection: name one in hostnames")
	}
	for _, n := range r.ServerNames {
		s := serverName{name: strings.ToLower(n)}
		host := s.name
		if rest, ok := strings.CutPrefix(s.name, "*"); ok {
			s.name, s.below = rest, true
			host = strings.TrimPrefix(rest, ".")
			if rest == host {
				host = "" // "*x"
			}
		}
		if !hostName(host) {
			r.unread = true
			r.warn("%q is no server name: write a host name, or *. and one; until then no connection with a server name gets through on the ports of the route", n)
			if n == model.AnyServerName {
				r.problems[len(r.problems)-1].Part = model.AllParts
			}
			continue
		}
		if !slices.Contains(r.names, s) {
			r.names = append(r.names, s)
		}
	}
}

// compareRoutes is the order of routes: the older one first, then
// "{namespace}/{name}" (Gateway API).
func compareRoutes(a, b *route) int {
	if d := a.Created.Compare(b.Created); d != 0 {
		return d
	}
	if a.Namespace != b.Namespace {
		return cmp.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name)
	}
	return cmp.Compare(a.Name, b.Name)
}

// refersTo are the services that a rule names as backends, mirrors included.
func (r *route) refersTo(each func(model.ServiceName)) {
	filters := func(list []model.Filter) {
		for i := range list {
			if m := list[i].Mirror; m != nil {
				each(m.Backend.Service)
			}
		}
	}
	for i := range r.Rules {
		filters(r.Rules[i].Filters)
		for j := range r.Rules[i].Backends {
			each(r.Rules[i].Backends[j].Service)
			filters(r.Rules[i].Backends[j].Filters)
		}
	}
}

// attachments is the routes of one service, on its ports, by who calls.
type attachments struct {
	s      *service
	routed bool
	hangs  []attachment // in the order of routes
	tls    []attachment
	// What was compiled for one set of routes serves every port that has the same:
	// most routes name no port.
	rules map[*route][]*snapshot.Rule
	progs []made[*snapshot.Program]
	split map[*route]*snapshot.Split
}

// attachment is one route on one port; port 0 of a TLSRoute: every port that is not HTTP.
type attachment struct {
	*route
	port uint16
}

type made[T any] struct {
	routes []*route
	is     T
}

// attach hangs the routes on the ports that their parentRefs name (contract 10.1).
func (x *Index) attach(s *service) *attachments {
	at := &attachments{s: s}
	if len(s.parentOf) == 0 {
		return at
	}
	slices.SortFunc(s.parentOf, func(a, b *route) int {
		return cmp.Or(compareRoutes(a, b), cmp.Compare(a.Kind, b.Kind), compareTwins(a, b))
	})
	each := func(do func(r *route, p model.ParentRef)) {
		for _, r := range s.parentOf {
			for _, p := range r.Parents {
				if p.Service == s.name && r.known() {
					do(r, p)
				}
			}
		}
	}
	own := func(r *route) bool { return at.who(r) == "" }
	// A route makes names and address of a user's Service the mesh's, for every
	// caller (contract 4.9): that is for the Service's own namespace to say.
	each(func(r *route, p model.ParentRef) {
		if s.exists && own(r) {
			at.routed = at.routed || s.broken != "" || at.fits(r, p.Port)
		}
	})
	each(func(r *route, p model.ParentRef) {
		switch {
		case !s.exists:
			at.problem(r, "parentRef Service %s: there is no such service in the mesh (NoMatchingParent); check the name, or wait for its pods", s.name)
		case s.user() && !at.routed && !own(r):
			at.problem(r, "parentRef Service %s: not attached, for no route of namespace %s names that Service: it must be named there first, which makes its names and address the mesh's for every caller", s.name, s.name.Namespace)
		case s.broken == "": // else its names are refused, the Kubernetes ones included
			at.attach(r, p.Port)
		}
	})
	return at
}

// compareTwins puts routes of one kind and name into the order that compileRoutes gave them.
func compareTwins(a, b *route) int {
	if a == b || a.Kind != b.Kind || a.Namespace != b.Namespace || a.Name != b.Name {
		return 0
	}
	return compareRouteText(a.Route, b.Route)
}

// compareRouteText compares all of two routes of one age.
func compareRouteText(a, b *model.Route) int {
	x, y := *a, *b
	x.Created, y.Created = time.Time{}, time.Time{} // JSON does not write every time
	return compareJSON(&x, &y)
}

func (at *attachments) problem(r *route, format string, args ...any) {
	at.s.problems = append(at.s.problems, problem(r.object, format, args...))
}

// carries is the class of the ports that a route of the kind is about.
func (r *route) carries() (class model.Class, what string) {
	if r.Kind == model.TCPRoute {
		return model.TCP, "TCP"
	}
	return model.HTTP, "HTTP"
}

// fits reports whether attach would attach r.
func (at *attachments) fits(r *route, port uint16) bool {
	if r.Kind == model.TLSRoute {
		p := at.s.port(port)
		return port == 0 || p != nil && p.class != model.HTTP
	}
	class, _ := r.carries()
	return slices.ContainsFunc(at.s.ports, func(p viewPort) bool { return p.class == class && (port == 0 || port == p.number) })
}

// attach attaches r to the port, or to all that fit where it is 0.
func (at *attachments) attach(r *route, port uint16) {
	class, what := r.carries()
	if r.Kind == model.TLSRoute {
		if !at.fits(r, port) {
			at.problem(r, "parentRef Service %s port %d: that is no raw port of it (NoMatchingParent); it serves %s", at.s.name, port, at.s.portList())
			return
		}
		if h := (attachment{r, port}); !slices.Contains(at.tls, h) {
			at.tls = append(at.tls, h)
		}
		return
	}
	hung := false
	for i := range at.s.ports {
		p := &at.s.ports[i]
		if p.class != class || port != 0 && port != p.number {
			continue
		}
		hung = true
		if h := (attachment{r, p.number}); !slices.Contains(at.hangs, h) {
			at.hangs = append(at.hangs, h)
		}
	}
	switch {
	case hung:
	case port == 0:
		at.problem(r, "parentRef Service %s: it has no %s port (NoMatchingParent); declare one in endpoint.aether.io/ports", at.s.name, what)
	default:
		at.problem(r, "parentRef Service %s port %d: that is no %s port of it (NoMatchingParent); it serves %s", at.s.name, port, what, at.s.portList())
	}
}

// who is the group of callers that a route of the service is for: all, "", for
// the producer's; else those of a consumer's namespace (GEP-1426).
func (at *attachments) who(r *route) string {
	if r.Namespace == at.s.name.Namespace {
		return ""
	}
	return r.Namespace
}

// groups are the routes of a port by the callers they are for.
func (at *attachments) groups(port uint16) (who []string, routes map[string][]*route) {
	for _, h := range at.hangs {
		if h.port != port {
			continue
		}
		if routes == nil {
			routes = map[string][]*route{}
		}
		w := at.who(h.route)
		if routes[w] == nil {
			who = append(who, w)
		}
		routes[w] = append(routes[w], h.route)
	}
	return who, routes
}

// programs are those of an HTTP port.
func (at *attachments) programs(x *Index, port uint16) (own *snapshot.Program, consumers map[string]*snapshot.Program) {
	if len(at.hangs) == 0 {
		return nil, nil
	}
	who, routes := at.groups(port)
	for _, w := range who {
		p := at.program(x, at.oneKind(routes[w], port))
		if w == "" {
			own = p
			continue
		}
		if consumers == nil {
			consumers = map[string]*snapshot.Program{}
		}
		consumers[w] = p
	}
	return own, consumers
}

// oneKind leaves out the HTTPRoutes of a group that has a GRPCRoute on the port (GEP-1426).
func (at *attachments) oneKind(routes []*route, port uint16) []*route {
	i := slices.IndexFunc(routes, func(r *route) bool { return r.Kind == model.GRPCRoute })
	if i < 0 {
		return routes
	}
	var out []*route
	for _, r := range routes {
		if r.Kind == model.GRPCRoute {
			out = append(out, r)
			continue
		}
		at.problem(r, "parentRef Service %s port %d: not attached (Conflicted), for %s is, and a GRPCRoute goes before an HTTPRoute on one port; attach them to different ports", at.s.name, port, routes[i].object)
	}
	return out
}

// program merges the rules of routes into one list by precedence.
func (at *attachments) program(x *Index, routes []*route) *snapshot.Program {
	for _, m := range at.progs {
		if slices.Equal(m.routes, routes) {
			return m.is
		}
	}
	p := &snapshot.Program{Strict: x.semantics == model.GatewayAPI}
	var arms []compiledMatch
	cost := 0
	for _, r := range routes {
		rules := at.rulesOf(x, r)
		for i := range r.rules {
			p.Policy = p.Policy || len(r.rules[i].arms) > 0 && hasPolicy(rules[i])
			for _, a := range r.rules[i].arms {
				a.Rule = rules[i]
				arms = append(arms, a)
				cost += a.cost
			}
		}
	}
	switch {
	case len(arms) > maxArms:
		p.Invalid = fmt.Sprintf("the routes of service %s have %d matches on one port, and %d are the most; the mesh refuses the port until they are fewer\n", at.s.name, len(arms), maxArms)
		for _, r := range routes {
			at.problem(r, "Service %s has routes with %d matches on one port, and %d are the most: every request there gets 500; attach them to different ports, or use fewer matches", at.s.name, len(arms), maxArms)
		}
	case cost > maxPrograms:
		p.Invalid = fmt.Sprintf("the regular expressions of the routes of service %s compile to %d instructions on one port, and %d are the most; the mesh refuses the port until they are fewer\n", at.s.name, cost, maxPrograms)
		for _, r := range routes {
			at.problem(r, "Service %s has routes whose regular expressions compile to %d instructions on one port, and %d are the most: every request there gets 500; attach them to different ports, or use fewer or smaller expressions", at.s.name, cost, maxPrograms)
		}
	default:
		p.MaxText = min(maxText, maxWork/max(cost, 1))
		slices.SortStableFunc(arms, func(a, b compiledMatch) int { return a.rank.compare(b.rank) })
		p.Arms = make([]snapshot.Match, len(arms))
		for i := range arms {
			p.Arms[i] = arms[i].Match
		}
	}
	at.progs = append(at.progs, made[*snapshot.Program]{routes, p})
	return p
}

func hasPolicy(r *snapshot.Rule) bool {
	if r.Invalid != "" || r.Pipe.Policy() {
		return true
	}
	for i := range r.Backends {
		if r.Backends[i].Pipe.Policy() {
			return true
		}
	}
	return false
}

// rulesOf compiles the rules of r for the service.
func (at *attachments) rulesOf(x *Index, r *route) []*snapshot.Rule {
	if out := at.rules[r]; out != nil {
		return out
	}
	out := make([]*snapshot.Rule, len(r.rules))
	for i := range out {
		out[i] = at.rule(x, r, i)
	}
	if at.rules == nil {
		at.rules = map[*route][]*snapshot.Rule{}
	}
	at.rules[r] = out
	return out
}

// rule compiles what a matching request gets. Whatever cannot be honoured
// becomes a 500 that says so, for all requests or for the share of a backend.
func (at *attachments) rule(x *Index, r *route, i int) *snapshot.Rule {
	in, static, pol := &r.Rules[i], &r.rules[i], at.s.policy
	who := producer
	if at.who(r) != "" {
		who = consumer
	}
	out := &snapshot.Rule{Name: static.name, GRPC: r.Kind == model.GRPCRoute, Timeouts: in.Timeouts, Retry: in.Retry, Persistence: in.Persistence}
	out.Timeouts.Request, out.Timeouts.Backend = max(0, in.Timeouts.Request), max(0, in.Timeouts.Backend)
	say := func(format string, args ...any) {
		at.problem(r, "%s: "+format, append([]any{static.place}, args...)...)
	}
	refuse := func(why string) string { return static.name + " cannot be honoured: " + why + "\n" }
	if pol != nil && pol.refusal != "" {
		out.Invalid, out.Pipe = pol.refusal, refusePipe
		return out
	}
	if static.invalid != "" {
		out.Invalid, out.Pipe = refuse(static.invalid), fold(nil, nil, pol, who)
		if slices.ContainsFunc(in.Filters, func(f model.Filter) bool { return f.Kind == model.Extension }) {
			out.Pipe = refusePipe
		}
		return out
	}
	own, bad, why := at.level(x, r, static.filters, who, rulePart(i), say)
	if why != "" {
		say("filters[%d]: %s; requests that pick it get 500", bad, why)
		out.Invalid, out.Pipe = refuse(why), refusePipe
		return out
	}
	out.Pipe = fold(own, nil, pol, who)
	if why := pipeTooLong(out.Pipe); why != "" {
		say("%s; requests that pick it get 500", why)
		out.Invalid, out.Pipe = refuse(why), refusePipe
		return out
	}
	if static.unplain != "" && out.Pipe.Policy() {
		why := fmt.Sprintf("the path %q of a match could be walked around: %s", static.unplain, writePlain)
		say("%s; requests that pick it get 500", why)
		out.Invalid = refuse(why)
		return out
	}
	if out.Pipe.Redirect != nil {
		return out // it answers; no backend is asked
	}
	for j := range in.Backends {
		ref, b := &in.Backends[j], &static.backends[j]
		w := snapshot.Weighted{Pipe: out.Pipe}
		why := cmp.Or(ref.Invalid, b.invalid)
		if why == "" {
			w.Backend, why = at.reference(x, r, ref, model.HTTP)
		}
		if why == "" && len(b.filters) > 0 {
			l, _, _ := at.level(x, r, b.filters, who, backendPart(i, j), say)
			w.Pipe = fold(own, l, pol, who)
			why = pipeTooLong(w.Pipe)
		}
		if why != "" {
			at.problem(r, "%s: backendRef %s port %d: %s; its share of the requests gets 500", backendPart(i, j), ref.Service, ref.Port, why)
			repeat(at.s.problems, why, ref.Invalid, backendPart(i, j))
			w.Backend, w.Pipe, w.Invalid = nil, out.Pipe, refuse(fmt.Sprintf("backendRef %s port %d: %s", ref.Service, ref.Port, why))
		}
		out.WeightSum += uint64(ref.Weight)
		w.Upto = out.WeightSum
		out.Backends = append(out.Backends, w)
	}
	if len(out.Backends) > 0 && out.WeightSum == 0 {
		say("every backend has weight 0; requests that pick it get 503")
	}
	return out
}

// level finds what the filters of part, a rule or backend, refer to; why: what filters[bad] refers to that is not there.
func (at *attachments) level(x *Index, r *route, filters []ruleFilter, who int, part string, say func(format string, args ...any)) (l *level, bad int, why string) {
	if len(filters) == 0 {
		return nil, 0, ""
	}
	l = &level{}
	for i := range filters {
		f := &filters[i]
		l.request, l.response = append(l.request, f.request...), append(l.response, f.response...)
		l.cors, l.redirect, l.rewrite = cmp.Or(l.cors, f.cors), cmp.Or(l.redirect, f.redirect), cmp.Or(l.rewrite, f.rewrite)
		if f.mirror != nil {
			m := snapshot.MirrorTo{Numerator: f.mirror.Numerator, Denominator: f.mirror.Denominator}
			ref := &f.mirror.Backend
			bad := ref.Invalid
			if bad == "" && (m.Denominator == 0 || m.Numerator > m.Denominator) {
				bad = fmt.Sprintf("%d of %d is no share", m.Numerator, m.Denominator)
			}
			if bad == "" {
				m.Backend, bad = at.reference(x, r, ref, model.HTTP)
			}
			if bad != "" { // the original is never harmed
				where := part + ".filters[" + strconv.Itoa(i) + "]"
				at.problem(r, "%s: mirror to %s port %d: %s; nothing is mirrored there", where, ref.Service, ref.Port, bad)
				repeat(at.s.problems, bad, ref.Invalid, where)
				continue
			}
			l.mirrors = append(l.mirrors, m)
		}
		if f.extension == "" {
			continue
		}
		h, why := x.extension(model.ServiceName{Namespace: r.Namespace, Name: f.extension})
		if why != "" {
			return nil, i, why
		}
		if h.disabled && who == consumer {
			say("%s switches extAuthz off, which only a route in the namespace of Service %s may: it does nothing here", h.object, at.s.name)
		}
		if slices.Contains(l.filters, h) {
			continue
		}
		l.filters = append(l.filters, h)
		l.request, l.query, l.response = append(l.request, h.request...), append(l.query, h.query...), append(l.response, h.response...)
	}
	return l, 0, ""
}

// extension is the HTTPFilter that a rule refers to.
func (x *Index) extension(n model.ServiceName) (*httpFilter, string) {
	switch list := x.filters[n]; {
	case len(list) == 0:
		return nil, fmt.Sprintf("HTTPFilter %s is not there: create it, or remove the ExtensionRef", n)
	case list[0].invalid != "":
		return nil, fmt.Sprintf("%s cannot be honoured: %s", list[0].object, list[0].invalid)
	case list[0].Scope != model.ScopeRoute:
		return nil, fmt.Sprintf("%s is not of SCOPE_ROUTE, and no rule can refer to it", list[0].object)
	default:
		return list[0], ""
	}
}

// reference resolves a backendRef of r, or of a mirror of it, as it stands on the service.
func (at *attachments) reference(x *Index, r *route, ref *model.BackendRef, class model.Class) (*snapshot.Backend, string) {
	if ref.Ungranted {
		if why := at.ungranted(x, r, ref.Service, class); why != "" {
			return nil, why
		}
	}
	return x.reference(ref, class)
}

// ungranted is why a route may not name a Service of another namespace without a
// ReferenceGrant (decision 048); "": it may. It may where the Service that it hangs on is of that
// namespace, as a consumer's route is (GEP-1294): a caller reaches by it what it reaches
// anyway. Policy that another Service has at the caller would be gone around, for the
// requests carry that of the one they were sent to (decision 008).
func (at *attachments) ungranted(x *Index, r *route, n model.ServiceName, class model.Class) string {
	mend := fmt.Sprintf("add a ReferenceGrant in namespace %s that lets %ss of namespace %s name Service %s", n.Namespace, r.Kind, r.Namespace, n.Name)
	switch s := x.services[n]; {
	case n.Namespace == r.Namespace || n == at.s.name:
		return ""
	case n.Namespace != at.s.name.Namespace:
		return "RefNotPermitted: " + mend
	case s == nil || class != model.HTTP: // policy at the caller is of requests
		return ""
	default:
		for _, f := range s.targetOf {
			if f.decides() {
				return fmt.Sprintf("RefNotPermitted: %s is policy of that Service, and this route goes around it; %s", f.object, mend)
			}
		}
		return ""
	}
}

// reference resolves a backendRef by the Service's port map (contract 10.4), to
// a port of the class that is needed.
func (x *Index) reference(ref *model.BackendRef, class model.Class) (*snapshot.Backend, string) {
	s := x.services[ref.Service]
	switch {
	case s == nil || !s.exists:
		return nil, "BackendNotFound: no such service; check the name, or wait for its pods"
	case s.broken != "":
		return nil, "BackendNotFound: the service is not served: " + s.broken
	case ref.Port == 0:
		return nil, "BackendNotFound: the reference has no port; name one of " + s.portList()
	}
	p := s.port(ref.Port)
	switch {
	case p == nil && s.open && !model.ReservedPort(ref.Port):
		// Nothing says which ports there are: not known to be wrong, and nothing
		// can be delivered. A backend without endpoints answers 503 (10.4, grace).
		return x.newBackend(s, ref.Port, class), ""
	case p == nil:
		return nil, "BackendNotFound: the service has no such port; it serves " + s.portList()
	case p.class != class && p.assumed && p.class != model.UDP:
		return x.newBackend(s, p.target, class), "" // the same: nobody says the class
	case p.class != class:
		return nil, fmt.Sprintf("UnsupportedProtocol: the port is %s; it serves %s", p.class, s.portList())
	}
	return x.backend(s, p.target, p.class), ""
}

// splits are those of a TCP port: of several TCPRoutes of a group the oldest is in force.
func (at *attachments) splits(x *Index, port uint16) (own *snapshot.Split, consumers map[string]*snapshot.Split) {
	if len(at.hangs) == 0 {
		return nil, nil
	}
	who, routes := at.groups(port)
	for _, w := range who {
		first := routes[w][0]
		for _, r := range routes[w][1:] {
			at.problem(r, "parentRef Service %s port %d: not attached (Conflicted), for %s is, and is older; attach them to different ports", at.s.name, port, first.object)
		}
		s := at.split[first]
		if s == nil {
			s = at.weigh(x, first, 0, len(first.rules))
			if at.split == nil {
				at.split = map[*route]*snapshot.Split{}
			}
			at.split[first] = s
		}
		if w == "" {
			own = s
			continue
		}
		if consumers == nil {
			consumers = map[string]*snapshot.Split{}
		}
		consumers[w] = s
	}
	return own, consumers
}

// weigh flattens rules from to to (excluded) of a TCPRoute or TLSRoute into one
// split (contract 10.6).
func (at *attachments) weigh(x *Index, r *route, from, to int) *snapshot.Split {
	out := &snapshot.Split{Name: r.object}
	refuse := func(name, why string) string { return name + " cannot be honoured: " + why + "\n" }
	for i := from; i < to; i++ {
		if rule := &r.rules[i]; rule.invalid != "" {
			return &snapshot.Split{Name: r.object, Invalid: refuse(rule.name, rule.invalid)}
		}
		for j := range r.Rules[i].Backends {
			ref := &r.Rules[i].Backends[j]
			w := snapshot.Weighted{}
			why := ref.Invalid
			if why == "" {
				w.Backend, why = at.reference(x, r, ref, model.TCP)
			}
			if why != "" {
				at.problem(r, "%s: backendRef %s port %d: %s; its share of the connections is refused", backendPart(i, j), ref.Service, ref.Port, why)
				repeat(at.s.problems, why, ref.Invalid, backendPart(i, j))
				w = snapshot.Weighted{Invalid: refuse(r.rules[i].name, fmt.Sprintf("backendRef %s port %d: %s", ref.Service, ref.Port, why))}
			}
			out.WeightSum += uint64(ref.Weight)
			w.Upto = out.WeightSum
			out.Backends = append(out.Backends, w)
		}
	}
	if out.WeightSum == 0 {
		at.problem(r, "Service %s: no backend of it has a weight; connections to it are refused", at.s.name)
		if from == to {
			at.s.problems[len(at.s.problems)-1].Part = allRules
		}
		out.Invalid = refuse(r.object, "no backend has a weight")
	}
	return out
}

// arms are the server names of the service's TLSRoutes, most specific first; what cannot be read
// stands before them all, for it may have been any of them (decision 063).
func (at *attachments) arms(x *Index) []snapshot.SNIMatch {
	var out []snapshot.SNIMatch
	for _, h := range at.tls {
		refused := func(why string) *snapshot.Split {
			return &snapshot.Split{Name: h.object, Invalid: h.object + " cannot be honoured: " + why + "\n"}
		}
		if h.unread {
			out = append(out, snapshot.SNIMatch{Port: h.port, Caller: at.who(h.route), Below: true, Split: refused("a server name of it cannot be read")})
		}
		if len(h.rules) == 0 {
			for _, n := range h.names {
				out = append(out, snapshot.SNIMatch{Port: h.port, Caller: at.who(h.route), Name: n.name, Below: n.below, Split: refused("it has no rules")})
			}
		}
		for i := range h.rules {
			split := at.weigh(x, h.route, i, i+1)
			for _, n := range h.names {
				out = append(out, snapshot.SNIMatch{Port: h.port, Caller: at.who(h.route), Name: n.name, Below: n.below, Split: split})
			}
		}
	}
	slices.SortStableFunc(out, func(a, b snapshot.SNIMatch) int {
		return cmp.Or(falseFirst(a.Name != "", b.Name != ""), falseFirst(a.Below, b.Below), cmp.Compare(len(b.Name), len(a.Name)))
	})
	// Each group of callers has its own bound on each port, so that nobody's routes
	// crowd out another's.
	type group struct {
		port   uint16
		caller string
	}
	count := map[group]int{}
	kept := out[:0]
	for _, a := range out {
		g := group{a.Port, a.Caller}
		if count[g]++; count[g] <= maxArms {
			kept = append(kept, a)
		}
	}
	if len(kept) == len(out) {
		return out
	}
	rests := map[group]bool{}
	for _, h := range at.tls {
		g := group{h.port, at.who(h.route)}
		n := count[g]
		if n <= maxArms {
			continue
		}
		at.problem(h.route, "Service %s has TLSRoutes with %d server names for the same callers and port, and %d are the most: the least specific are refused; use wildcards", at.s.name, n, maxArms)
		if rests[g] {
			continue
		}
		rests[g] = true
		// What is left out is not left to the port itself.
		rest := &snapshot.Split{Name: "TLSRoutes of " + at.s.full(), Invalid: fmt.Sprintf("the TLSRoutes of service %s have %d server names, and %d are the most\n", at.s.name, n, maxArms)}
		kept = append(kept, snapshot.SNIMatch{Port: g.port, Caller: g.caller, Below: true, Split: rest})
	}
	return kept
}

func falseFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
