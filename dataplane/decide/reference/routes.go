package reference

import (
	"regexp"
	"regexp/syntax"
	"slices"
	"sort"
	"strconv"
	"strings"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
)

// Bounds of what a route may be made of.
const (
	maxPattern  = 1024 // bytes
	maxProgram  = 4096 // instructions
	maxBackends = 64
	maxFilters  = 32
	maxArms     = 1024

	maxText       = 8192    // bytes that an expression is run on, and fewer where
	maxWork       = 1 << 18 // bytes times the instructions of all expressions of a port would be more
	maxParameters = 256     // of a query that rules look at
	maxNames      = 1024    // bytes of a preflight's list of field names
)

// wants reports whether routes of the kind are about ports of the class.
func wants(k model.RouteKind, c model.Class) bool {
	switch k {
	case model.HTTPRoute, model.GRPCRoute:
		return c == model.HTTP
	case model.TCPRoute:
		return c == model.TCP
	case model.TLSRoute:
		return c != model.HTTP
	}
	return false
}

// attached are the ports of s that the parentRef attaches the route to (10.1).
// 0 stands for every port that is not HTTP, declared or not, of a TLSRoute.
func attached(r *model.Route, ref model.ParentRef, s *service) (out []uint16) {
	if r.Kind == model.TLSRoute && ref.Port == 0 {
		return []uint16{0}
	}
	for _, p := range s.ports {
		if wants(r.Kind, p.class) && (ref.Port == 0 || ref.Port == p.number) {
			out = append(out, p.number)
		}
	}
	return out
}

// aRouteNames: some route of the service's own namespace is attached to it (4.9);
// a consumer's makes nobody's names the mesh's. Where several objects
// contradict each other nobody knows its ports: to be named is enough then, so
// that the refusal is on every way in.
func (w *world) aRouteNames(s *service, contradicted bool) bool {
	for i := range w.m.Routes {
		r := &w.m.Routes[i]
		for _, ref := range r.Parents {
			if ref.Service == s.name && r.Namespace == s.name.Namespace && (contradicted && r.Kind != 0 || len(attached(r, ref, s)) > 0) {
				return true
			}
		}
	}
	return false
}

// routesOn are the routes of one kind attached to a port, and only those of one
// group: the producer's (callers of any namespace), or one namespace's consumers'.
func (w *world) routesOn(s *service, n uint16, k model.RouteKind, group string) (out []*model.Route) {
	if s.kind == meshOnly { // a consumer's route is attached to nothing that its own namespace does not name
		return nil
	}
	for i := range w.m.Routes {
		r := &w.m.Routes[i]
		if r.Kind != k || r.Namespace != group {
			continue
		}
		for _, ref := range r.Parents {
			if ref.Service == s.name && slices.Contains(attached(r, ref, s), n) {
				out = append(out, r)
				break
			}
		}
	}
	sort.SliceStable(out, func(i, j int) bool { return older(out[i], out[j]) })
	return out
}

// older is Gateway API's tie-break: age, then name.
func older(a, b *model.Route) bool {
	if !a.Created.Equal(b.Created) {
		return a.Created.Before(b.Created)
	}
	return a.Namespace+"/"+a.Name < b.Namespace+"/"+b.Name
}

// httpRoutes are those that govern a port for a caller: a consumer's own, where it
// has any there, else the producer's (GEP-1426); GRPCRoutes before HTTPRoutes.
func (w *world) httpRoutes(s *service, n uint16, caller string) []*model.Route {
	groups := []string{s.name.Namespace}
	if caller != s.name.Namespace {
		groups = []string{caller, s.name.Namespace}
	}
	for _, g := range groups {
		for _, k := range []model.RouteKind{model.GRPCRoute, model.HTTPRoute} {
			if routes := w.routesOn(s, n, k, g); len(routes) > 0 {
				return routes
			}
		}
	}
	return nil
}

// tcpRoute is the one TCPRoute in force on a port for a caller: the oldest of the
// group.
func (w *world) tcpRoute(s *service, n uint16, caller string) *model.Route {
	groups := []string{s.name.Namespace}
	if caller != s.name.Namespace {
		groups = []string{caller, s.name.Namespace}
	}
	for _, g := range groups {
		if routes := w.routesOn(s, n, model.TCPRoute, g); len(routes) > 0 {
			return routes[0]
		}
	}
	return nil
}

// tlsArm is one server name of a TLSRoute, with the rules behind it.
type tlsArm struct {
	name  string // lower case; "*." and a suffix where it is wild
	route *model.Route
	rules []model.Rule
	// refuses: the name cannot be read and may be any, or there are no rules.
	unread, refuses bool
}

// serverName is a DNS name in lower case, or "*." and one.
var serverName = regexp.MustCompile(`^(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// tlsArms are in force for a dial to port d: not on an HTTP port, nor on 18081
// where the service serves HTTP at all (4.2 step 1).
func (w *world) tlsArms(s *service, d uint16, caller string) []tlsArm {
	p, declared := s.port(d)
	if declared && p.class == model.HTTP {
		return nil
	}
	if d == model.PortProxy && slices.ContainsFunc(s.ports, func(p port) bool { return p.class == model.HTTP }) {
		return nil
	}
	groups := []string{s.name.Namespace}
	if caller != s.name.Namespace {
		groups = []string{caller, s.name.Namespace}
	}
	for _, g := range groups {
		ports := []uint16{0, d}
		if raw, ok := s.rawPort(); ok && !declared && d == model.PortRaw && raw.number != 0 { // it spells that port (4.12)
			ports = append(ports, raw.number)
		}
		var arms []tlsArm
		for _, n := range ports {
			for _, r := range w.routesOn(s, n, model.TLSRoute, g) {
				for _, name := range r.ServerNames {
					name = strings.ToLower(name)
					unread := !serverName.MatchString(name) || len(strings.TrimPrefix(name, "*.")) > 253
					// Every rule has the route's names: the first takes all.
					arms = append(arms, tlsArm{name, r, r.Rules[:min(len(r.Rules), 1)], unread, unread || len(r.Rules) == 0})
				}
			}
		}
		if len(arms) > 0 {
			return arms
		}
	}
	return nil
}

// twice: there are two routes of this kind and name; neither is honoured.
func (w *world) twice(r *model.Route) bool {
	n := 0
	for i := range w.m.Routes {
		o := &w.m.Routes[i]
		if o.Kind == r.Kind && o.Namespace == r.Namespace && o.Name == r.Name {
			n++
		}
	}
	return n > 1
}

// arm is one match of one rule, as Gateway API orders and compares them.
type arm struct {
	route *model.Route
	rule  int
	match model.Match
	at    int // of the match in its rule
}

// arms of the routes of a port, the most specific first (10.3).
func arms(routes []*model.Route) (out []arm) {
	for _, r := range routes {
		for i, rule := range r.Rules {
			if len(rule.Matches) == 0 {
				out = append(out, arm{r, i, model.Match{}, 0})
			}
			for j, m := range rule.Matches {
				out = append(out, arm{r, i, m, j})
			}
		}
	}
	sort.SliceStable(out, func(i, j int) bool { return before(out[i], out[j]) })
	return out
}

// before is the precedence of Gateway API (HTTPRouteRule.matches,
// GRPCRouteRule.matches).
func before(a, b arm) bool {
	for _, by := range [][2]int{
		{pathRank(a.match), pathRank(b.match)},
		{pathLength(a.match), pathLength(b.match)},
		{hasUnread(a.match), hasUnread(b.match)},
		{grpcLength(a.match, false), grpcLength(b.match, false)},
		{grpcLength(a.match, true), grpcLength(b.match, true)},
		{grpcExact(a.match), grpcExact(b.match)},
		{hasMethod(a.match), hasMethod(b.match)},
		{distinct(a.match.Headers), distinct(b.match.Headers)},
		{distinct(a.match.Query), distinct(b.match.Query)},
	} {
		if by[0] != by[1] {
			return by[0] > by[1]
		}
	}
	switch {
	case a.route != b.route:
		return older(a.route, b.route)
	case a.rule != b.rule:
		return a.rule < b.rule
	}
	return a.at < b.at
}

// lost is above every length and count: where what was written cannot be honoured,
// nobody knows how long or how many it was meant to be (its rule refuses, and takes
// whatever it may have taken).
const lost = 1 << 40

// pathRank: exact above regex above prefix; no path is the prefix "/".
func pathRank(m model.Match) int {
	switch m.PathKind {
	case model.PathAny, model.PathPrefix:
		return 0
	case model.PathRegex:
		return 1
	}
	return 2
}

// pathLost: the match has a path that cannot be honoured.
func pathLost(m model.Match) bool {
	switch m.PathKind {
	case model.PathAny:
		return false
	case model.PathExact, model.PathPrefix:
		return !strings.HasPrefix(m.Path, "/")
	case model.PathRegex:
		return !patternValid(m.Path)
	}
	return true
}

// pathLength counts characters; a prefix without its trailing slash.
func pathLength(m model.Match) int {
	switch {
	case pathLost(m):
		return lost
	case m.PathKind == model.PathAny:
		return 0
	case m.PathKind == model.PathPrefix:
		return len(strings.TrimRight(m.Path, "/"))
	}
	return len(m.Path)
}

func grpcLength(m model.Match, method bool) int {
	if m.GRPC == nil {
		return 0
	}
	text := m.GRPC.Service
	if method {
		text = m.GRPC.Method
	}
	if m.GRPC.Regex && !patternValid(text) {
		return lost
	}
	return len(text)
}

func grpcExact(m model.Match) int {
	if m.GRPC != nil && m.GRPC.Regex {
		return 0
	}
	return 1
}

func hasUnread(m model.Match) int {
	if m.Unread {
		return 1
	}
	return 0
}

func hasMethod(m model.Match) int {
	if m.Method != "" {
		return 1
	}
	return 0
}

// distinct: of one name twice the first counts.
func distinct(of []model.ValueMatch) int { return len(firstOfEach(of)) }

func firstOfEach(of []model.ValueMatch) (out []model.ValueMatch) {
	for _, v := range of {
		if !slices.ContainsFunc(out, func(o model.ValueMatch) bool { return o.Name == v.Name }) {
			out = append(out, v)
		}
	}
	return out
}

// holds reports whether all parts of the match do, for a path without query. large:
// the parts before do, and the next one would have to look at more than it may.
// preflight, where not nil, is the request as one that asks what another one may (Fetch).
func (a arm) holds(r, preflight *httpmsg.Head, path, query string, limit int) (holds, large bool) {
	m := a.match
	var method, names string
	if preflight != nil {
		method, names = first(preflight, "access-control-request-method"), first(preflight, "access-control-request-headers")
	}
	if len(path) > limit && onPath(m) {
		return false, true
	}
	if !pathHolds(m, path) || !grpcHolds(m.GRPC, path) || m.Method != "" && m.Method != string(r.Method) && m.Method != method {
		return false, false
	}
	if len(fields(m)) > 0 && len(names) > maxNames {
		return false, true
	}
	for _, v := range fields(m) {
		if slices.ContainsFunc(strings.Split(names, ","), func(n string) bool { return strings.EqualFold(strings.TrimSpace(n), v.Name) }) {
			continue
		}
		if v.Regex && len(headerText(v.Name, r)) > limit {
			return false, true
		}
		if !headerHolds(v, r) {
			return false, false
		}
	}
	for _, v := range conditions(m.Query) {
		got, there := queryText(v.Name, query)
		switch {
		case crowded(query):
			return false, true
		case !there:
			return false, false
		case v.Regex && len(got) > limit:
			return false, true
		case !valueHolds(v, got):
			return false, false
		}
	}
	return true, false
}

// textLimit is how much text an expression of these arms may be run on.
func textLimit(arms []arm) int {
	work := 0
	for _, a := range arms {
		m := a.match
		if m.PathKind == model.PathRegex {
			work += patternSize(m.Path)
		}
		if g := m.GRPC; g != nil && g.Regex {
			for _, part := range []string{g.Service, g.Method} {
				if part != "" {
					work += patternSize(part)
				}
			}
		}
		for _, v := range slices.Concat(fields(m), conditions(m.Query)) {
			if v.Regex {
				work += patternSize(v.Value)
			}
		}
	}
	return min(maxText, maxWork/max(work, 1))
}

// patternSize is an expression's instructions; none if it is refused.
func patternSize(pattern string) int {
	if !patternValid(pattern) {
		return 0
	}
	parsed, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return 0
	}
	prog, err := syntax.Compile(parsed.Simplify())
	if err != nil {
		return 0
	}
	return len(prog.Inst)
}

// onPath: an expression is run on the path, or on parts of it.
func onPath(m model.Match) bool {
	if m.PathKind == model.PathRegex {
		return patternValid(m.Path)
	}
	g := m.GRPC
	return g != nil && g.Regex && (g.Service != "" && patternValid(g.Service) || g.Method != "" && patternValid(g.Method))
}

// crowded: the query has more parameters than rules look at.
func crowded(query string) bool {
	return query != "" && len(strings.Split(query, "&")) > maxParameters
}

// conditions: one with a pattern that is refused, or a name that no field has, is none (its
// rule is invalid, and takes at least what it asked for, so that nothing of it falls to another rule).
func conditions(of []model.ValueMatch) []model.ValueMatch {
	return slices.DeleteFunc(firstOfEach(of), func(v model.ValueMatch) bool { return v.Regex && !patternValid(v.Value) })
}

// fields are the conditions on fields.
func fields(m model.Match) []model.ValueMatch {
	return slices.DeleteFunc(conditions(m.Headers), func(v model.ValueMatch) bool { return !tokenForm.MatchString(v.Name) })
}

// headerText is what an expression is run on.
func headerText(name string, r *httpmsg.Head) string {
	if name == "host" {
		return string(r.Authority)
	}
	var lines []string
	for _, f := range r.Fields {
		if string(f.Name) == name {
			lines = append(lines, string(f.Value))
		}
	}
	return strings.Join(lines, ",")
}

// pathHolds is 10.2. A path that cannot be honoured matches everything (its rule
// is invalid, so that what it asked for falls to no other rule).
func pathHolds(m model.Match, path string) bool {
	if pathLost(m) {
		return true
	}
	switch m.PathKind {
	case model.PathExact:
		return path == m.Path
	case model.PathPrefix:
		p := strings.TrimRight(m.Path, "/")
		return p == "" || path == p || strings.HasPrefix(path, p+"/")
	case model.PathRegex:
		return wholeMatch(m.Path, path)
	}
	return true
}

// grpcHolds: the path is "/service/method", exactly two elements (10.6).
func grpcHolds(g *model.GRPCMatch, path string) bool {
	if g == nil {
		return true
	}
	service, method := g.Service, g.Method
	if g.Regex && !patternValid(service) {
		service = "" // as of other conditions
	}
	if g.Regex && !patternValid(method) {
		method = ""
	}
	if service == "" && method == "" {
		return true
	}
	parts := strings.Split(path, "/")
	if len(parts) != 3 || parts[0] != "" || parts[1] == "" || parts[2] == "" {
		return false
	}
	element := func(want, got string) bool {
		switch {
		case want == "":
			return true
		case g.Regex:
			return wholeMatch(want, got)
		}
		return want == got
	}
	return element(service, parts[1]) && element(method, parts[2])
}

// headerHolds: lines of one name are one value (RFC 9110 5.3), with or without a
// space after the comma; "host" is the authority.
func headerHolds(v model.ValueMatch, r *httpmsg.Head) bool {
	if v.Name == "host" {
		return valueHolds(v, string(r.Authority))
	}
	var lines []string
	for _, f := range r.Fields {
		if string(f.Name) == v.Name {
			lines = append(lines, string(f.Value))
		}
	}
	if len(lines) == 0 {
		return false
	}
	if v.Regex {
		return wholeMatch(v.Value, strings.Join(lines, ","))
	}
	// Every way to write the list, each comma with a space or without.
	ways := []string{lines[0]}
	for _, l := range lines[1:] {
		var more []string
		for _, way := range ways {
			more = append(more, way+","+l, way+", "+l)
		}
		ways = more
	}
	return slices.Contains(ways, v.Value)
}

// queryText: the first parameter of that name, decoded.
func queryText(name, query string) (value string, there bool) {
	for _, p := range parameters(query) {
		if p[0] == name {
			return p[1], true
		}
	}
	return "", false
}

func valueHolds(v model.ValueMatch, got string) bool {
	if v.Regex {
		return wholeMatch(v.Value, got)
	}
	return v.Value == got
}

// wholeMatch is RE2 on the whole of s; a refused pattern matches everything.
func wholeMatch(pattern, s string) bool {
	return !patternValid(pattern) || regexp.MustCompile(`\A(?:`+pattern+`)\z`).MatchString(s)
}

// patternValid: RE2, of bounded size.
func patternValid(pattern string) bool {
	if len(pattern) > maxPattern {
		return false
	}
	if _, err := regexp.Compile(pattern); err != nil {
		return false
	}
	parsed, err := syntax.Parse(`\A(?:`+pattern+`)\z`, syntax.Perl)
	if err != nil {
		return false
	}
	prog, err := syntax.Compile(parsed.Simplify())
	return err == nil && len(prog.Inst) <= maxProgram
}

// destination is a port of a service's pods.
type destination struct {
	svc  *service
	port port
}

func (d destination) name() string {
	return d.svc.name.String() + ":" + strconv.Itoa(int(d.port.target))
}

// weighted is a share of a rule or split.
type weighted struct {
	destination
	ref     model.BackendRef
	invalid string // its share is refused (10.4)
}

// choose falls into the share that pick, of 2^32, is in; nil: there is no weight.
func choose(of []weighted, pick uint32) *weighted {
	var sum uint64
	for _, x := range of {
		sum += uint64(x.ref.Weight)
	}
	at := uint64(pick) * sum >> 32
	for i := range of {
		if at < uint64(of[i].ref.Weight) {
			return &of[i]
		}
		at -= uint64(of[i].ref.Weight)
	}
	return nil
}

// refers is reference for a route attached to s: without a ReferenceGrant a route names
// Services of its own namespace, and a consumer's route those of the namespace that it consumes,
// but for those that have policy at the caller (10.5, decision 048).
func (w *world) refers(r *model.Route, s *service, ref model.BackendRef, class model.Class) (d destination, invalid string) {
	other := ref.Service != s.name && ref.Service.Namespace != r.Namespace
	if ref.Ungranted && other && (ref.Service.Namespace != s.name.Namespace || class == model.HTTP && w.policyAtCaller(ref.Service)) {
		return d, "RefNotPermitted"
	}
	return w.reference(ref, class)
}

// policyAtCaller: some filter that is in force at callers decides who reaches the Service.
func (w *world) policyAtCaller(n model.ServiceName) bool {
	s := &service{name: n}
	for _, f := range append(w.filtersOf(s, model.ScopeRoute), w.filtersOf(s, model.ScopeChain)...) {
		if w.filterInvalid(f) || f.ExtAuthz != nil && !f.ExtAuthz.Disabled || f.RBAC != nil && !f.RBAC.Audit {
			return true
		}
	}
	return false
}

// reference is 10.4: a Service port of a mesh service, of the class that the
// route carries. Where no node can know the ports, the reference stands.
func (w *world) reference(ref model.BackendRef, class model.Class) (d destination, invalid string) {
	if ref.Invalid != "" {
		return d, ref.Invalid
	}
	s := w.service(ref.Service)
	if s == nil {
		s = w.unseen(ref.Service)
	}
	if s == nil {
		return d, "BackendNotFound"
	}
	if s.broken {
		return d, "broken"
	}
	if s.cold && !model.ReservedPort(ref.Port) {
		return destination{s, port{number: ref.Port, target: ref.Port, class: class}}, ""
	}
	p, ok := s.port(ref.Port)
	switch {
	case !ok:
		return d, "BackendNotFound"
	case p.guess:
		p.class = class
	case p.class != class:
		return d, "UnsupportedProtocol"
	}
	return destination{s, p}, ""
}

// unseen is a user's Service that is no mesh service as far as this node sees: no
// row, no route. Nobody can know its classes, so a reference to a port that it has
// stands (10.4).
func (w *world) unseen(n model.ServiceName) *service {
	var found *service
	for _, o := range w.m.Services {
		if o.Name != n || !nameable(n) {
			continue
		}
		s := &service{name: n, kind: meshOnly, ports: userPorts(o, nil, false), ips: unmapped(o.ClusterIPs)}
		s.broken = found != nil || w.addressTaken(s)
		found = s
	}
	return found
}

// split is all backends of raw-TCP routes on s in one (10.6).
func (w *world) split(s *service, routes []*model.Route, rules []model.Rule) (out []weighted) {
	for _, r := range routes {
		if w.twice(r) {
			return nil
		}
	}
	for _, rule := range rules {
		if rule.Invalid != "" || len(rule.Backends) > maxBackends {
			return nil
		}
		for _, ref := range rule.Backends {
			d, invalid := w.refers(routes[0], s, ref, model.TCP)
			out = append(out, weighted{d, ref, invalid})
		}
	}
	return out
}
