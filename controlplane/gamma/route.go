package gamma

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"aether/dataplane/model"
)

// Bounds of a route. controlplane/compile has others, of what is in force.
const (
	MaxWeight      = 1_000_000 // of a backendRef, as in the Gateway API
	maxConditions  = 64        // headers, or parameters, of a match; the Gateway API allows 16
	maxServerNames = 1024      // of a TLSRoute, as in the Gateway API
	maxReasons     = 8         // said in an object's Invalid
	MaxRefusals    = 200       // problems of a route
)

// Route is a route whose references into other namespaces are not permitted yet.
type Route struct {
	Route   model.Route
	foreign []foreignRef
}

// foreignRef is a backend, or the backend of a mirror, in another namespace.
type foreignRef struct {
	rule, backend, filter int // backend -1: the filter is the rule's own; filter -1: it is the backend itself
	line                  int
	where                 string // "rules[0].backendRefs[1]"
	cost                  string // what becomes of requests without it
}

// in finds the reference in a route.
func (f *foreignRef) in(r *model.Route) *model.BackendRef {
	rule := &r.Rules[f.rule]
	switch {
	case f.filter < 0:
		return &rule.Backends[f.backend]
	case f.backend < 0:
		return &rule.Filters[f.filter].Mirror.Backend
	}
	return &rule.Backends[f.backend].Filters[f.filter].Mirror.Backend
}

// routeIn is what the kinds of routes have in common. A field that a kind does
// not have is empty.
type routeIn struct {
	kind      model.RouteKind
	meta      *metav1.ObjectMeta
	spec      *gatewayv1.CommonRouteSpec
	hostnames []gatewayv1.Hostname
	rules     []ruleIn
}

type ruleIn struct {
	name        *gatewayv1.SectionName
	http        []gatewayv1.HTTPRouteMatch
	grpc        []gatewayv1.GRPCRouteMatch
	filters     []gatewayv1.HTTPRouteFilter
	backends    []gatewayv1.HTTPBackendRef
	timeouts    *gatewayv1.HTTPRouteTimeouts
	retry       *gatewayv1.HTTPRouteRetry
	persistence *gatewayv1.SessionPersistence
}

// Route reads a route of any kind that model.RouteKind has; nil: it is none of the mesh.
func (r *Reader) Route(o Object) *Route {
	switch o.Kind {
	case "HTTPRoute":
		return r.httpRoute(o)
	case "GRPCRoute":
		return r.grpcRoute(o)
	case "TCPRoute":
		return r.tcpRoute(o)
	case "TLSRoute":
		return r.tlsRoute(o)
	}
	return nil
}

// httpRoute reads an HTTPRoute (contract 10.1-10.4).
func (r *Reader) httpRoute(o Object) *Route {
	var h gatewayv1.HTTPRoute
	flaws := r.Strict(o, &h)
	if h.Spec.Rules == nil { // as the API's default has it
		kind, root := gatewayv1.PathMatchPathPrefix, "/"
		h.Spec.Rules = []gatewayv1.HTTPRouteRule{{Matches: []gatewayv1.HTTPRouteMatch{{Path: &gatewayv1.HTTPPathMatch{Type: &kind, Value: &root}}}}}
	}
	in := routeIn{kind: model.HTTPRoute, meta: &h.ObjectMeta, spec: &h.Spec.CommonRouteSpec, hostnames: h.Spec.Hostnames}
	for i := range h.Spec.Rules {
		rule := &h.Spec.Rules[i]
		in.rules = append(in.rules, ruleIn{
			name: rule.Name, http: rule.Matches, filters: rule.Filters, backends: rule.BackendRefs,
			timeouts: rule.Timeouts, retry: rule.Retry, persistence: rule.SessionPersistence,
		})
	}
	return r.route(o, &in, flaws)
}

// grpcRoute reads a GRPCRoute (contract 10.6).
func (r *Reader) grpcRoute(o Object) *Route {
	var g gatewayv1.GRPCRoute
	flaws := r.Strict(o, &g)
	in := routeIn{kind: model.GRPCRoute, meta: &g.ObjectMeta, spec: &g.Spec.CommonRouteSpec, hostnames: g.Spec.Hostnames}
	filters := func(in []gatewayv1.GRPCRouteFilter) (out []gatewayv1.HTTPRouteFilter) {
		for i := range in {
			f := &in[i]
			out = append(out, gatewayv1.HTTPRouteFilter{
				Type: gatewayv1.HTTPRouteFilterType(f.Type), RequestHeaderModifier: f.RequestHeaderModifier, ResponseHeaderModifier: f.ResponseHeaderModifier,
				RequestMirror: f.RequestMirror, ExtensionRef: f.ExtensionRef,
			})
		}
		return out
	}
	for i := range g.Spec.Rules {
		rule := &g.Spec.Rules[i]
		to := ruleIn{name: rule.Name, grpc: rule.Matches, filters: filters(rule.Filters), persistence: rule.SessionPersistence}
		for j := range rule.BackendRefs {
			b := &rule.BackendRefs[j]
			to.backends = append(to.backends, gatewayv1.HTTPBackendRef{BackendRef: b.BackendRef, Filters: filters(b.Filters)})
		}
		in.rules = append(in.rules, to)
	}
	return r.route(o, &in, flaws)
}

// tcpRoute reads a TCPRoute (contract 10.6); its versions differ in nothing that is here.
func (r *Reader) tcpRoute(o Object) *Route {
	var t gatewayv1.TCPRoute
	flaws := r.Strict(o, &t)
	in := routeIn{kind: model.TCPRoute, meta: &t.ObjectMeta, spec: &t.Spec.CommonRouteSpec}
	for i := range t.Spec.Rules {
		in.rules = append(in.rules, ruleIn{name: t.Spec.Rules[i].Name, backends: plainBackends(t.Spec.Rules[i].BackendRefs)})
	}
	return r.route(o, &in, flaws)
}

// tlsRoute reads a TLSRoute (contract 10.6); its versions differ in nothing that is here.
func (r *Reader) tlsRoute(o Object) *Route {
	var t gatewayv1.TLSRoute
	flaws := r.Strict(o, &t)
	in := routeIn{kind: model.TLSRoute, meta: &t.ObjectMeta, spec: &t.Spec.CommonRouteSpec, hostnames: t.Spec.Hostnames}
	for i := range t.Spec.Rules {
		in.rules = append(in.rules, ruleIn{name: t.Spec.Rules[i].Name, backends: plainBackends(t.Spec.Rules[i].BackendRefs)})
	}
	return r.route(o, &in, flaws)
}

func plainBackends(in []gatewayv1.BackendRef) (out []gatewayv1.HTTPBackendRef) {
	for _, b := range in {
		out = append(out, gatewayv1.HTTPBackendRef{BackendRef: b})
	}
	return out
}

// routeReader makes one route. A rule that cannot be honoured is kept and
// marked, with matches at least as wide as it asked for, so that its requests are
// refused and not served by another.
type routeReader struct {
	r         *Reader
	o         Object
	in        *routeIn
	f         *Route
	marks     map[string]string
	reasons   []int // said of each rule
	said      int
	illegible []Flaw // of its fields, as its type has them
}

// raw: connections are routed, not requests.
func (c *routeReader) raw() bool {
	return c.in.kind == model.TCPRoute || c.in.kind == model.TLSRoute
}

// words gives the first for routes of requests, the second for routes of connections.
func (c *routeReader) words(requests, connections string) string {
	if c.raw() {
		return connections
	}
	return requests
}

func (c *routeReader) report(line int, format string, args ...any) {
	c.reportRefusal("", line, format, args...)
}

// reportRefusal reports that a part of the route is refused.
func (c *routeReader) reportRefusal(part string, line int, format string, args ...any) {
	switch c.said++; {
	case c.said < MaxRefusals:
		c.r.refuse(part, c.o.String(), line, format, args...)
	case c.said == MaxRefusals:
		c.r.refuse(model.AllParts, c.o.String(), line, "more is wrong with this route than is said here: mend the above first")
	}
}

// route takes what a kind's own reader made of an object.
func (r *Reader) route(o Object, in *routeIn, flaws []Flaw) *Route {
	c := routeReader{r: r, o: o, in: in, f: &Route{}, illegible: slices.Clone(flaws)}
	flaws = append(flaws, r.OwnAnnotations(o, in.meta.Annotations, AnnotationInvalid)...)
	c.f.Route = model.Route{Kind: in.kind, Namespace: o.Namespace, Name: o.Name, Created: in.meta.CreationTimestamp.UTC()}
	c.readMarks(&flaws)
	c.parents(&flaws)
	if len(c.f.Route.Parents) == 0 && len(in.spec.ParentRefs) > 0 && (len(flaws) == 0 || r.API && !slices.ContainsFunc(flaws, ofParents)) {
		return nil // attached to nothing of ours; said already
	}
	flaws = r.tolerate(o, flaws)
	c.hostnames(&flaws)
	for i := range in.rules {
		c.rule(i)
	}
	if len(in.rules) == 0 && c.raw() && c.missing("rules") {
		c.reportRefusal("rules", o.At("spec", "rules"), "no rules: what the route takes is refused; write one with backendRefs")
	}
	c.widen(flaws)
	// Flaws inside a rule spoil that rule; any other spoils them all, for who
	// can say what was meant.
	each := c.words("requests that pick it get 500", "connections that pick it are refused")
	for _, f := range flaws {
		if i, ok := ruleOf(f.Path); ok && i < len(c.f.Route.Rules) {
			c.spoil(i, r.because(f))
			c.reportRefusal(rulePart(i), f.Line, "%s; rules[%d] is refused: %s", f.Reason, i, each)
			continue
		}
		r.Doubt = true
		c.reportRefusal(model.AllParts, f.Line, "%s; the whole route is refused: %s", f.Reason, each)
		if len(c.f.Route.Rules) == 0 {
			c.f.Route.Rules, c.reasons = []model.Rule{{Matches: c.unread()}}, make([]int, 1)
		}
		for i := range c.f.Route.Rules {
			c.spoil(i, r.because(f))
		}
	}
	if len(c.f.Route.Parents) == 0 {
		r.Doubt, r.Unaimed = true, len(flaws) > 0
		if !slices.ContainsFunc(flaws, ofParents) && c.missing("parentRefs") {
			c.report(o.At(spec("parentRefs")...), "no parentRef names a Service: the route is attached to nothing")
		}
		return nil
	}
	return c.f
}

// missing reports whether it is a flaw of its own that a field of spec is not there: nothing stands there that
// could not be read and may be it. What an API server's object has beside is of a newer version, and is not it.
func (c *routeReader) missing(field string) bool {
	bare, _ := c.o.find(spec())
	return !slices.ContainsFunc(c.illegible, func(f Flaw) bool {
		switch in, name, below := strings.Cut(f.Path, "."); {
		case !below:
			return f.Path == "spec" || bare == nil && f.Unknown // the whole spec, misspelt
		case in != "spec":
			return false
		default:
			return name == field || f.Unknown && !c.r.API && !strings.ContainsAny(name, ".[")
		}
	})
}

// Instead attaches f, of which no rule is in force, to what it was attached to before as well: of a
// route that is not written well it cannot be told that it left any of them.
func (f *Route) Instead(was *Route) *Route {
	out := *f
	out.Route.Parents = slices.Clone(f.Route.Parents)
	for _, p := range was.Route.Parents {
		if !slices.Contains(out.Route.Parents, p) {
			out.Route.Parents = append(out.Route.Parents, p)
		}
	}
	return &out
}

// matchField finds rule, match and field in "spec.rules[0].matches[1].headers[2].value".
var matchField = regexp.MustCompile(`^spec\.rules\[(\d+)\]\.matches\[(\d+)\]\.(\w+)`)

// ruleField finds rule and field in "spec.rules[0].matches[1]".
var ruleField = regexp.MustCompile(`^spec\.rules\[(\d+)\](?:\.(\w+))?`)

// widen takes out of the matches what the decoder could not read of them, and marks it: left
// empty it would compare with nothing, and requests meant for the rule, which
// is refused, would be served by another.
func (c *routeReader) widen(flaws []Flaw) {
	rules := c.f.Route.Rules
	if c.raw() {
		return // its rules have no matches
	}
	for _, f := range flaws {
		if f.Path == beyond { // anything may be wrong
			for i := range rules {
				rules[i].Matches = c.unread()
			}
		}
		at := ruleField.FindStringSubmatch(f.Path)
		if at == nil {
			continue
		}
		i, err := strconv.Atoi(at[1])
		if err != nil || i >= len(rules) {
			continue
		}
		rule := &rules[i]
		in := matchField.FindStringSubmatch(f.Path)
		if in == nil {
			// The rule itself, its list, an element of it; or what may be the list, misspelt.
			if at[2] == "" || at[2] == "matches" || f.Unknown && len(rule.Matches) == 0 {
				rule.Matches = c.unread()
			}
			continue
		}
		j, err := strconv.Atoi(in[2])
		if err != nil || j >= len(rule.Matches) {
			continue
		}
		m := &rule.Matches[j]
		if in[3] == "path" && c.in.kind == model.HTTPRoute {
			m.PathKind, m.Path = model.PathUnread, ""
			continue
		}
		m.Unread = true
		switch in[3] {
		case "method":
			m.Method, m.GRPC = "", nil
		case "headers":
			m.Headers = nil
		case "queryParams":
			m.Query = nil
		default: // what may be the path, misspelt
			if c.in.kind == model.HTTPRoute && m.PathKind == model.PathAny {
				m.PathKind = model.PathUnread
			}
		}
	}
}

// unread are the matches of a rule of which nothing can be read.
func (c *routeReader) unread() []model.Match {
	switch c.in.kind {
	case model.HTTPRoute:
		return []model.Match{{PathKind: model.PathUnread, Unread: true}}
	case model.GRPCRoute:
		return []model.Match{{Unread: true}}
	}
	return nil
}

// ofParents: f may hide a parent.
func ofParents(f Flaw) bool {
	return f.Path == "" || f.Path == beyond || strings.HasPrefix(f.Path, "spec.parentRefs")
}

// ruleOf finds i in "spec.rules[i]...".
func ruleOf(path string) (int, bool) {
	rest, ok := strings.CutPrefix(path, "spec.rules[")
	if !ok {
		return 0, false
	}
	n, _, ok := strings.Cut(rest, "]")
	i, err := strconv.Atoi(n)
	return i, ok && err == nil
}

// rulePart is the part of a route that a rule is.
func rulePart(i int) string { return fmt.Sprintf("rules[%d]", i) }

// spoil adds a reason to what is wrong with rule i.
func (c *routeReader) spoil(i int, why string) {
	c.f.Route.Rules[i].Invalid = addReason(c.f.Route.Rules[i].Invalid, why, &c.reasons[i])
}

// addReason joins reasons up to a bound; n counts them.
func addReason(have, why string, n *int) string {
	switch *n++; {
	case have == "":
		return why
	case *n > maxReasons+1:
		return have
	case *n > maxReasons:
		return have + "; and more"
	}
	return have + "; " + why
}

// readMarks reads AnnotationInvalid.
func (c *routeReader) readMarks(flaws *[]Flaw) {
	text, ok := c.r.own(c.in.meta.Annotations, AnnotationInvalid)
	if !ok {
		return
	}
	bad := func(format string, args ...any) {
		*flaws = append(*flaws, Flaw{Line: c.o.At("metadata", "annotations", AnnotationInvalid),
			Reason: "annotation " + AnnotationInvalid + ": " + fmt.Sprintf(format, args...)})
	}
	var marks map[string]string
	if err := json.Unmarshal([]byte(text), &marks); err != nil {
		bad("%v: write a JSON object like {\"0\":\"why\",\"1/0\":\"why\"}", err)
		return
	}
	c.marks = marks
	for _, key := range slices.Sorted(maps.Keys(marks)) {
		if !c.marked(key) || marks[key] == "" {
			bad("entry %q: write the number of a rule, <rule>/<backend>, or either with /filters/<filter> of a mirror behind it, counted from 0, and a reason", key)
			return
		}
	}
}

// marked: key names something of the route.
func (c *routeReader) marked(key string) bool {
	index := func(s string, n int) int {
		i, err := strconv.Atoi(s)
		if err != nil || i < 0 || i >= n || strconv.Itoa(i) != s {
			return -1
		}
		return i
	}
	at, filter, hasFilter := strings.Cut(key, "/filters/")
	rule, backend, hasBackend := strings.Cut(at, "/")
	i := index(rule, len(c.in.rules))
	if i < 0 {
		return false
	}
	filters := c.in.rules[i].filters
	if hasBackend {
		j := index(backend, len(c.in.rules[i].backends))
		if j < 0 {
			return false
		}
		filters = c.in.rules[i].backends[j].Filters
	}
	if !hasFilter {
		return true
	}
	k := index(filter, len(filters))
	return k >= 0 && filters[k].RequestMirror != nil
}

// parents keeps the parentRefs that are Services (contract 10.1).
func (c *routeReader) parents(flaws *[]Flaw) {
	at := func(path ...string) int { return c.o.At(append([]string{"spec"}, path...)...) }
	for i := range c.in.spec.ParentRefs {
		p := &c.in.spec.ParentRefs[i]
		kind := value(p.Kind, "Gateway")
		group := value(p.Group, "")
		if p.Kind == nil && unreadIn(c.illegible, fmt.Sprintf("spec.parentRefs[%d]", i)) {
			if !c.saysService(i) {
				continue // which kind it is could not be read, and that is reported
			}
			kind = "Service"
		}
		if c.r.API && group == GatewayGroup {
			group = "" // what the API server writes where nothing was; the group has no Service of its own (contract 10.1)
		}
		if kind != "Service" || group != "" && group != "core" {
			if c.r.API {
				continue // a gateway's affair
			}
			if nearly(string(kind), KindService) != "" && (group == "" || group == "core") {
				*flaws = append(*flaws, Flaw{Path: fmt.Sprintf("spec.parentRefs[%d]", i), Line: at("parentRefs", strconv.Itoa(i), "kind"),
					Reason: fmt.Sprintf("parentRefs[%d]: kind %.100q does not exist: write Service", i, kind)})
				kind = "Service"
			}
		}
		if kind != "Service" || group != "" && group != "core" {
			c.report(at("parentRefs", strconv.Itoa(i)), "parentRefs[%d] is a %.100s: this source attaches routes to Services (group \"\", kind Service) and leaves this parent alone", i, kind)
			continue
		}
		ref := model.ParentRef{Service: model.ServiceName{Namespace: string(value(p.Namespace, gatewayv1.Namespace(c.o.Namespace))), Name: string(p.Name)}}
		bad := func(field, format string, args ...any) {
			*flaws = append(*flaws, Flaw{Path: fmt.Sprintf("spec.parentRefs[%d]", i), Line: at("parentRefs", strconv.Itoa(i), field), Reason: fmt.Sprintf("parentRefs[%d]: ", i) + fmt.Sprintf(format, args...)})
		}
		if ref.Service.Name == "" && unread(*flaws, spec("parentRefs", strconv.Itoa(i))) {
			continue
		}
		if why := badService(ref.Service); why != "" {
			*flaws = append(*flaws, Flaw{Line: at("parentRefs", strconv.Itoa(i)), Reason: fmt.Sprintf("parentRefs[%d]: %s", i, why)})
			continue
		}
		if p.Port != nil {
			if *p.Port < 1 || *p.Port >= 1<<16 {
				bad("port", "port %d is no port: write a Service port from 1 to 65535, or drop it for all of them", *p.Port)
			} else {
				ref.Port = uint16(*p.Port)
			}
		}
		if p.SectionName != nil {
			bad("sectionName", "sectionName of a Service is not built: write port instead")
		}
		c.f.Route.Parents = append(c.f.Route.Parents, ref)
	}
	if c.in.spec.UseDefaultGateways != "" && !c.r.API {
		c.report(at("useDefaultGateways"), "useDefaultGateways is ignored: this source attaches routes to Services only; remove it")
	}
}

// saysService reports whether a field of parentRefs[i], whatever it is called, is the word Service.
func (c *routeReader) saysService(i int) bool {
	n, _ := c.o.find(spec("parentRefs", strconv.Itoa(i)))
	for j := 1; n != nil && n.Kind == yaml.MappingNode && j < len(n.Content); j += 2 {
		if n.Content[j].Value == KindService {
			return true
		}
	}
	return false
}

// hostnames are the server names of a TLSRoute. On other routes of a Service they
// mean nothing: the parent's names decide (contract 10.2).
func (c *routeReader) hostnames(flaws *[]Flaw) {
	line := c.o.At("spec", "hostnames")
	if c.in.kind != model.TLSRoute {
		if len(c.in.hostnames) > 0 && len(c.f.Route.Parents) > 0 {
			c.report(line, "hostnames mean nothing on a route of a Service and are ignored: the Service's names are the route's; remove them")
		}
		return
	}
	switch n := len(c.in.hostnames); {
	case n == 0 && !slices.ContainsFunc(*flaws, ofHostnames):
		*flaws = append(*flaws, Flaw{Path: "spec.hostnames", Line: line, Reason: "no hostnames: a TLSRoute is chosen by the server name; write them"})
	case n > maxServerNames:
		*flaws = append(*flaws, Flaw{Path: "spec.hostnames", Line: line, Reason: fmt.Sprintf("%d hostnames, the limit is %d: write several routes", n, maxServerNames)})
		c.in.hostnames = c.in.hostnames[:maxServerNames]
	}
	have := map[string]bool{}
	for i, h := range c.in.hostnames {
		if unreadIn(c.illegible, fmt.Sprintf("spec.hostnames[%d]", i)) {
			continue
		}
		name := strings.ToLower(string(h))
		if name == model.AnyServerName && len(c.marks) > 0 {
			c.f.Route.ServerNames = append(c.f.Route.ServerNames, name) // as a dump writes what could not be read
			continue
		}
		if why := badHost(strings.TrimPrefix(name, "*.")); why != "" {
			*flaws = append(*flaws, Flaw{Path: fmt.Sprintf("spec.hostnames[%d]", i), Line: c.o.At("spec", "hostnames", strconv.Itoa(i)), Reason: fmt.Sprintf("hostnames[%d]: %.100q %s, or *. and one", i, h, why)})
			continue
		}
		if !have[name] {
			have[name] = true
			c.f.Route.ServerNames = append(c.f.Route.ServerNames, name)
		}
	}
	// What cannot be read may have been any name, and must not be left to the port.
	if slices.ContainsFunc(*flaws, ofHostnames) && !slices.Contains(c.f.Route.ServerNames, model.AnyServerName) {
		c.f.Route.ServerNames = append(c.f.Route.ServerNames, model.AnyServerName)
	}
}

// ofHostnames: f may hide a server name.
func ofHostnames(f Flaw) bool {
	return f.Path == "" || f.Path == beyond || f.Path == "spec" || strings.HasPrefix(f.Path, "spec.hostnames") || f.Unknown && strings.Count(f.Path, ".") <= 1
}

// badHost says why s is no lower-case DNS name; empty: it is one.
func badHost(s string) string {
	if why := validation.IsDNS1123Subdomain(s); len(why) > 0 {
		return "is no host name: write a lower-case DNS name without a port, like cart.example"
	}
	return ""
}

func badService(n model.ServiceName) string {
	if why := validation.IsDNS1123Label(n.Namespace); len(why) > 0 {
		return fmt.Sprintf("namespace %.100q cannot be a name: %s", n.Namespace, strings.Join(why, "; "))
	}
	if why := validation.IsDNS1123Label(n.Name); len(why) > 0 {
		return fmt.Sprintf("name %.100q cannot be a Service's name: %s", n.Name, strings.Join(why, "; "))
	}
	return ""
}

func value[T any](p *T, def T) T {
	if p == nil {
		return def
	}
	return *p
}

// ruleReader makes one rule.
type ruleReader struct {
	*routeReader
	i    int
	in   *ruleIn
	mark string // not empty: whoever marked the rule said what is wrong with it
}

func (c *ruleReader) rule() *model.Rule { return &c.f.Route.Rules[c.i] }

func (c *ruleReader) at(path ...string) int {
	return c.o.At(append([]string{"spec", "rules", strconv.Itoa(c.i)}, path...)...)
}

// unread reports whether something of the rule at path, as text, could not be read: that is a flaw already.
func (c *ruleReader) unread(path string) bool {
	return unreadIn(c.illegible, fmt.Sprintf("spec.rules[%d].%s", c.i, path))
}

// refuse makes the rule invalid.
func (c *ruleReader) refuse(line int, format string, args ...any) {
	if c.mark != "" {
		return
	}
	why := fmt.Sprintf(format, args...)
	c.spoil(c.i, why)
	c.reportRefusal(rulePart(c.i), line, "rules[%d]: %s; %s", c.i, why, c.words("requests that pick this rule get 500", "connections that pick this rule are refused"))
}

func (c *routeReader) rule(i int) {
	in := &c.in.rules[i]
	c.f.Route.Rules = append(c.f.Route.Rules, model.Rule{Name: string(value(in.name, ""))})
	c.reasons = append(c.reasons, 0)
	t := ruleReader{c, i, in, c.marks[strconv.Itoa(i)]}
	rule := t.rule()
	if t.mark != "" {
		rule.Invalid = t.mark
		c.reportRefusal(rulePart(i), t.at(), "rules[%d]: marked as refused: %s; %s", i, t.mark, c.words("requests that pick this rule get 500", "connections that pick this rule are refused"))
	}
	for j := range in.http {
		rule.Matches = append(rule.Matches, t.httpMatch(j))
	}
	for j := range in.grpc {
		rule.Matches = append(rule.Matches, t.grpcMatch(j))
	}
	rule.Filters = t.filters(in.filters, -1, func(j int, format string, args ...any) {
		t.refuse(t.at("filters", strconv.Itoa(j)), "filters[%d]: %s", j, fmt.Sprintf(format, args...))
	})
	t.timeouts()
	t.retry()
	t.persistence()
	for j := range in.backends {
		rule.Backends = append(rule.Backends, t.backend(j))
	}
	for j, f := range rule.Filters {
		if f.Kind == model.Redirect && len(rule.Backends) > 0 {
			c.report(t.at("filters", strconv.Itoa(j)), "rules[%d]: the redirect answers, so backendRefs are not used: remove the one or the other", i)
		}
	}
}

// timeouts: contract 5.8, GEP-1742. Zero switches a timeout off.
func (c *ruleReader) timeouts() {
	in := c.in.timeouts
	if in == nil {
		return
	}
	t := &c.rule().Timeouts
	t.Request = c.duration(in.Request, "timeouts", "request")
	t.Backend = c.duration(in.BackendRequest, "timeouts", "backendRequest")
	if t.Request > 0 && t.Backend > t.Request {
		c.refuse(c.at("timeouts", "backendRequest"), "timeouts: backendRequest, %s, is longer than request, %s: shorten it",
			FormatDuration(t.Backend), FormatDuration(t.Request))
	}
}

func (c *ruleReader) duration(in *gatewayv1.Duration, path ...string) time.Duration {
	if in == nil {
		return 0
	}
	d, why := parseDuration(string(*in))
	if why != "" {
		c.refuse(c.at(path...), "%s: %s", strings.Join(path, "."), why)
	}
	return d
}

// retry: GEP-1731. Without attempts there is one.
func (c *ruleReader) retry() {
	in := c.in.retry
	if in == nil {
		return
	}
	out := &model.Retry{Attempts: 1, Backoff: c.duration(in.Backoff, "retry", "backoff")}
	c.rule().Retry = out
	if n := value(in.Attempts, 1); n < 0 || n > 255 {
		c.refuse(c.at("retry", "attempts"), "retry.attempts %d: write a number from 0, none, to 255", n)
	} else {
		out.Attempts = uint8(n)
	}
	have := map[gatewayv1.HTTPRouteRetryStatusCode]bool{}
	for j, code := range in.Codes {
		switch line := c.at("retry", "codes", strconv.Itoa(j)); {
		case c.unread(fmt.Sprintf("retry.codes[%d]", j)):
		case code < 400 || code > 599:
			c.refuse(line, "retry.codes[%d]: %d is no status of an error: write one from 400 to 599", j, code)
		case have[code]:
			c.refuse(line, "retry.codes[%d]: %d stands twice: keep one", j, code)
		default:
			have[code] = true
			out.Codes = append(out.Codes, uint16(code))
		}
	}
	slices.Sort(out.Codes)
}

// persistence: GEP-1619.
func (c *ruleReader) persistence() {
	in := c.in.persistence
	if in == nil {
		return
	}
	const field = "sessionPersistence"
	out := &model.Persistence{Name: value(in.SessionName, ""), Absolute: c.duration(in.AbsoluteTimeout, field, "absoluteTimeout")}
	c.rule().Persistence = out
	switch kind := value(in.Type, gatewayv1.CookieBasedSessionPersistence); kind {
	case gatewayv1.CookieBasedSessionPersistence:
	case gatewayv1.HeaderBasedSessionPersistence:
		out.Header = true
	default:
		c.refuse(c.at(field, "type"), "%s.type %.100q does not exist: write Cookie or Header", field, kind)
	}
	if out.Name != "" {
		low, ok := fieldName(out.Name)
		switch {
		case !ok || len(out.Name) > 128:
			c.refuse(c.at(field, "sessionName"), "%s.sessionName %.100q: write at most 128 letters, digits and -", field, out.Name)
		case out.Header && slices.Contains(framing, low):
			c.refuse(c.at(field, "sessionName"), "%s.sessionName: header %s is the proxy's own: choose another", field, low)
		case out.Header:
			out.Name = low
		}
	}
	if in.CookieConfig == nil {
		return
	}
	known := c.unread(field + ".absoluteTimeout") // a flaw already
	if in.AbsoluteTimeout != nil {
		_, why := parseDuration(string(*in.AbsoluteTimeout))
		known = why != ""
	}
	if out.Header {
		c.refuse(c.at(field, "cookieConfig"), "%s: cookieConfig with type Header: remove it", field)
	}
	switch kind := value(in.CookieConfig.LifetimeType, gatewayv1.SessionCookieLifetimeType); kind {
	case gatewayv1.SessionCookieLifetimeType:
	case gatewayv1.PermanentCookieLifetimeType:
		if out.Lasting = true; out.Absolute == 0 && !known {
			c.refuse(c.at(field, "cookieConfig", "lifetimeType"), "%s: a Permanent cookie needs absoluteTimeout: write it", field)
		}
	default:
		c.refuse(c.at(field, "cookieConfig", "lifetimeType"), "%s.cookieConfig.lifetimeType %.100q does not exist: write Session or Permanent", field, kind)
	}
}

// backend reads backendRefs[j]. Invalid is the reason of contract 10.4, in words.
func (c *ruleReader) backend(j int) model.BackendRef {
	in, line := &c.in.backends[j], c.at("backendRefs", strconv.Itoa(j))
	b, why := c.destination(&in.BackendObjectReference)
	bad := func(format string, args ...any) {
		if why == "" {
			why = fmt.Sprintf(format, args...)
		}
	}
	if w := value(in.Weight, 1); w < 0 || w > MaxWeight {
		bad("weight %d: write a number from 0 to %d", w, MaxWeight)
	} else {
		b.Weight = uint32(w)
	}
	b.Filters = c.filters(in.Filters, j, func(k int, format string, args ...any) {
		bad("filters[%d]: %s", k, fmt.Sprintf(format, args...))
	})
	if mark := c.marks[fmt.Sprintf("%d/%d", c.i, j)]; mark != "" {
		why = mark
	}
	b.Invalid = why
	cost := c.words("its share of requests gets 500", "its share of connections is refused")
	where := fmt.Sprintf("rules[%d].backendRefs[%d]", c.i, j)
	switch {
	case why != "" && unreadIn(c.illegible, "spec."+where):
		// a flaw already: what is missing was not read
	case why != "":
		c.reportRefusal(where, line, "%s: %s; %s", where, why, cost)
	default:
		c.permit(&b, foreignRef{c.i, j, -1, line, where, cost})
	}
	return b
}

// permit notes a reference that a ReferenceGrant has to permit (contract 10.5).
func (c *routeReader) permit(b *model.BackendRef, ref foreignRef) {
	if b.Service.Namespace != c.o.Namespace {
		c.f.foreign = append(c.f.foreign, ref)
	}
}

// destination reads what backendRefs and mirrors name; the weight is 1.
func (c *routeReader) destination(in *gatewayv1.BackendObjectReference) (b model.BackendRef, why string) {
	b = model.BackendRef{
		Service: model.ServiceName{Namespace: string(value(in.Namespace, gatewayv1.Namespace(c.o.Namespace))), Name: string(in.Name)},
		Weight:  1,
	}
	bad := func(format string, args ...any) {
		if why == "" {
			why = fmt.Sprintf(format, args...)
		}
	}
	kind, group := value(in.Kind, "Service"), value(in.Group, "")
	if kind != "Service" || group != "" && group != "core" {
		bad("InvalidKind: %.100s %.100q is not a Service: name a Service of group \"\"", kind, group)
	}
	if why := badService(b.Service); why != "" {
		bad("%s", why)
	}
	switch p := value(in.Port, 0); {
	case in.Port == nil:
		bad("no port: write the Service's port")
	case p < 1 || p >= 1<<16:
		bad("port %d is no port: write a Service port from 1 to 65535", p)
	default:
		b.Port = uint16(p)
	}
	return b, why
}
