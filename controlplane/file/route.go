package file

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
)

// maxWeight bounds a backendRef's weight, as the Gateway API does.
const maxWeight = 1_000_000

// routeFacts is a route whose cross-namespace backends are not permitted yet.
type routeFacts struct {
	route model.Route
	lines [][]int // of each backendRef of each rule
}

// httpRoute reads what of an HTTPRoute is built (contract 10.1-10.4). A rule
// that says anything more is kept and marked, with matches at least as wide as
// it asked for, so that its requests are refused and not served by another.
func (r *reader) httpRoute(o object) {
	var h gatewayv1.HTTPRoute
	flaws := append(r.strict(o, &h), r.ownAnnotations(o, h.Annotations, AnnotationInvalid)...)
	c := routeReader{r: r, o: o, f: &routeFacts{}}
	c.f.route = model.Route{Namespace: o.namespace, Name: o.name, Created: h.CreationTimestamp.UTC()}
	marks := c.marks(&flaws, h.Annotations, h.Spec.Rules)
	c.parents(&flaws, &h)
	if len(c.f.route.Parents) == 0 && len(h.Spec.ParentRefs) > 0 && len(flaws) == 0 {
		return // attached to nothing of ours; said already
	}
	for i := range h.Spec.Rules {
		c.rule(i, &h.Spec.Rules[i], marks)
	}
	// Flaws inside a rule spoil that rule; any other spoils them all, for who
	// can say what was meant.
	for _, f := range flaws {
		if i, ok := ruleOf(f.path); ok && i < len(c.f.route.Rules) {
			c.spoil(i, place(r.file, f.line)+": "+f.reason)
			r.report(o.String(), f.line, "%s; rules[%d] is refused: requests that pick it get 500", f.reason, i)
			continue
		}
		r.report(o.String(), f.line, "%s; the whole route is refused: requests that pick it get 500", f.reason)
		if len(c.f.route.Rules) == 0 {
			c.f.route.Rules, c.f.lines = make([]model.Rule, 1), make([][]int, 1)
		}
		for i := range c.f.route.Rules {
			c.spoil(i, place(r.file, f.line)+": "+f.reason)
		}
	}
	if len(c.f.route.Parents) == 0 {
		r.report(o.String(), o.line(), "no parentRef names a Service: the route is attached to nothing")
		return
	}
	r.add(o, item{route: c.f})
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

type routeReader struct {
	r *reader
	o object
	f *routeFacts
}

// spoil adds a reason to what is wrong with rule i.
func (c *routeReader) spoil(i int, why string) {
	rule := &c.f.route.Rules[i]
	if rule.Invalid != "" {
		why = rule.Invalid + "; " + why
	}
	rule.Invalid = why
}

// marks reads AnnotationInvalid.
func (c *routeReader) marks(flaws *[]flaw, annotations map[string]string, rules []gatewayv1.HTTPRouteRule) map[string]string {
	text, ok := annotations[AnnotationInvalid]
	if !ok {
		return nil
	}
	var marks map[string]string
	bad := func(format string, args ...any) {
		*flaws = append(*flaws, flaw{"", c.o.at("metadata", "annotations", AnnotationInvalid),
			"annotation " + AnnotationInvalid + ": " + fmt.Sprintf(format, args...)})
	}
	if err := json.Unmarshal([]byte(text), &marks); err != nil {
		bad("%v: write a JSON object like {\"0\":\"why\",\"1/0\":\"why\"}", err)
		return nil
	}
	for _, key := range slices.Sorted(maps.Keys(marks)) {
		rule, backend, hasBackend := strings.Cut(key, "/")
		i, err := strconv.Atoi(rule)
		ok := err == nil && i >= 0 && i < len(rules) && strconv.Itoa(i) == rule
		if ok && hasBackend {
			j, err := strconv.Atoi(backend)
			ok = err == nil && j >= 0 && j < len(rules[i].BackendRefs) && strconv.Itoa(j) == backend
		}
		if !ok || marks[key] == "" {
			bad("entry %q: write the number of a rule, or <rule>/<backend>, counted from 0, and a reason", key)
		}
	}
	return marks
}

// parents keeps the parentRefs that are Services (contract 10.1).
func (c *routeReader) parents(flaws *[]flaw, h *gatewayv1.HTTPRoute) {
	at := func(path ...string) int { return c.o.at(append([]string{"spec"}, path...)...) }
	for i := range h.Spec.ParentRefs {
		p := &h.Spec.ParentRefs[i]
		kind := value(p.Kind, "Gateway")
		if group := value(p.Group, ""); kind != "Service" || group != "" && group != "core" {
			c.r.report(c.o.String(), at("parentRefs", strconv.Itoa(i)), "parentRefs[%d] is a %s: this source attaches routes to Services (group \"\", kind Service) and leaves this parent alone", i, kind)
			continue
		}
		ref := model.ParentRef{Service: model.ServiceName{Namespace: string(value(p.Namespace, gatewayv1.Namespace(c.o.namespace))), Name: string(p.Name)}}
		bad := func(field, format string, args ...any) {
			*flaws = append(*flaws, flaw{fmt.Sprintf("spec.parentRefs[%d]", i), at("parentRefs", strconv.Itoa(i), field), fmt.Sprintf("parentRefs[%d]: ", i) + fmt.Sprintf(format, args...)})
		}
		if why := badService(ref.Service); why != "" {
			*flaws = append(*flaws, flaw{"", at("parentRefs", strconv.Itoa(i)), fmt.Sprintf("parentRefs[%d]: %s", i, why)})
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
		c.f.route.Parents = append(c.f.route.Parents, ref)
	}
	if len(h.Spec.Hostnames) > 0 && len(c.f.route.Parents) > 0 {
		// Contract 10.2: the parent's names decide.
		c.r.report(c.o.String(), at("hostnames"), "hostnames mean nothing on a route of a Service and are ignored: the Service's names are the route's; remove them")
	}
	if h.Spec.UseDefaultGateways != "" {
		c.r.report(c.o.String(), at("useDefaultGateways"), "useDefaultGateways is ignored: this source attaches routes to Services only; remove it")
	}
}

func badService(n model.ServiceName) string {
	if why := validation.IsDNS1123Label(n.Namespace); len(why) > 0 {
		return fmt.Sprintf("namespace %q cannot be a name: %s", n.Namespace, strings.Join(why, "; "))
	}
	if why := validation.IsDNS1123Label(n.Name); len(why) > 0 {
		return fmt.Sprintf("name %q cannot be a Service's name: %s", n.Name, strings.Join(why, "; "))
	}
	return ""
}

func value[T any](p *T, def T) T {
	if p == nil {
		return def
	}
	return *p
}

func (c *routeReader) rule(i int, in *gatewayv1.HTTPRouteRule, marks map[string]string) {
	c.f.route.Rules = append(c.f.route.Rules, model.Rule{Name: string(value(in.Name, ""))})
	c.f.lines = append(c.f.lines, nil)
	rule := &c.f.route.Rules[i]
	at := func(path ...string) int {
		return c.o.at(append([]string{"spec", "rules", strconv.Itoa(i)}, path...)...)
	}
	mark := marks[strconv.Itoa(i)]
	refuse := func(line int, format string, args ...any) {
		if mark != "" {
			return // whoever marked the rule said why
		}
		why := fmt.Sprintf(format, args...)
		c.spoil(i, why)
		c.r.report(c.o.String(), line, "rules[%d]: %s; requests that pick this rule get 500", i, why)
	}
	if mark != "" {
		rule.Invalid = mark
		c.r.report(c.o.String(), at(), "rules[%d]: marked as refused: %s; requests that pick this rule get 500", i, mark)
	}
	for j := range in.Matches {
		rule.Matches = append(rule.Matches, match(&in.Matches[j], func(field, format string, args ...any) {
			refuse(at("matches", strconv.Itoa(j), field), "matches[%d]: "+format, append([]any{j}, args...)...)
		}))
	}
	for j := range in.Filters {
		f, why := filter(&in.Filters[j])
		if why != "" {
			refuse(at("filters", strconv.Itoa(j)), "filters[%d]: %s", j, why)
			continue
		}
		rule.Filters = append(rule.Filters, f)
	}
	for _, f := range []struct {
		name string
		set  bool
	}{{"timeouts", in.Timeouts != nil}, {"retry", in.Retry != nil}, {"sessionPersistence", in.SessionPersistence != nil}} {
		if f.set {
			refuse(at(f.name), "%s is not built yet: remove it", f.name)
		}
	}
	for j := range in.BackendRefs {
		line := at("backendRefs", strconv.Itoa(j))
		c.f.lines[i] = append(c.f.lines[i], line)
		b := c.backend(&in.BackendRefs[j])
		if why := marks[fmt.Sprintf("%d/%d", i, j)]; why != "" {
			b.Invalid = why
		}
		if b.Invalid != "" {
			c.r.report(c.o.String(), line, "rules[%d].backendRefs[%d]: %s; its share of requests gets 500", i, j, b.Invalid)
		}
		rule.Backends = append(rule.Backends, b)
	}
}

// match keeps what can be compared, wrong or not: a path without a slash is one
// that no request has. What cannot be compared is left out, which only widens the match.
func match(in *gatewayv1.HTTPRouteMatch, refuse func(field, format string, args ...any)) model.Match {
	var m model.Match
	if p := in.Path; p != nil {
		kind, path := value(p.Type, gatewayv1.PathMatchPathPrefix), value(p.Value, "/")
		switch kind {
		case gatewayv1.PathMatchExact:
			m.PathKind, m.Path = model.PathExact, path
		case gatewayv1.PathMatchPathPrefix:
			m.PathKind, m.Path = model.PathPrefix, path
		default:
			refuse("path", "path type %s is not built yet: write Exact or PathPrefix", kind)
		}
		if why := badPath(m.Path); m.PathKind != model.PathAny && why != "" {
			refuse("path", "path %q %s", path, why)
		}
	}
	if in.Method != nil {
		m.Method = string(*in.Method)
		if !slices.Contains(methods, m.Method) {
			refuse("method", "method %q does not exist: write one of %s", m.Method, strings.Join(methods, ", "))
		}
	}
	for _, h := range in.Headers {
		name, ok := fieldName(string(h.Name))
		switch kind := value(h.Type, gatewayv1.HeaderMatchExact); {
		case kind != gatewayv1.HeaderMatchExact:
			refuse("headers", "header %s: match type %s is not built yet: write Exact", h.Name, kind)
			continue
		case !ok:
			refuse("headers", "header name %q is not a field name: letters, digits and - only", h.Name)
		case !httpmsg.ValidValue([]byte(h.Value)):
			refuse("headers", "header %s: value %q holds a control character: remove it", h.Name, h.Value)
		case slices.ContainsFunc(m.Headers, func(o model.HeaderMatch) bool { return o.Name == name }):
			refuse("headers", "header %s stands twice (case does not count): keep one", h.Name)
		}
		m.Headers = append(m.Headers, model.HeaderMatch{Name: name, Value: h.Value})
	}
	if len(in.QueryParams) > 0 {
		refuse("queryParams", "queryParams are not built yet: remove them")
	}
	return m
}

// methods that the Gateway API lets a match name.
var methods = []string{"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"}

// badPath says why no request could have this path (the Gateway API's own rules).
func badPath(p string) string {
	if !strings.HasPrefix(p, "/") {
		return "does not begin with /: write it absolute"
	}
	for i := range len(p) {
		if p[i] <= ' ' || p[i] == 0x7f || p[i] == '#' || p[i] == '?' {
			return fmt.Sprintf("holds %q, which no path does: remove it", p[i])
		}
	}
	low := strings.ToLower(p)
	for _, bad := range []string{"//", "/./", "/../", "%2f"} {
		if strings.Contains(low, bad) {
			return fmt.Sprintf("holds %q: write it without", bad)
		}
	}
	if strings.HasSuffix(p, "/.") || strings.HasSuffix(p, "/..") {
		return "ends with a dot segment: write it without"
	}
	return ""
}

// fieldName gives a header's name in lower case, and whether it is one (RFC 9110 5.1).
func fieldName(s string) (string, bool) {
	b := []byte(s)
	for i, c := range b {
		if b[i] = httpmsg.Lower[c]; b[i] == 0 {
			return s, false
		}
	}
	return string(b), len(b) > 0
}

// framing are the fields that a message's shape or destination hangs on; a
// filter that wrote them could make one request two (RFC 9110 7.6.1, RFC 9112 6).
var framing = []string{"connection", "content-length", "host", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}

// filter reads a header modifier; why says what is wrong with any other.
func filter(in *gatewayv1.HTTPRouteFilter) (f model.Filter, why string) {
	body := in.RequestHeaderModifier
	f.Kind = model.RequestHeaders
	switch in.Type {
	case gatewayv1.HTTPRouteFilterRequestHeaderModifier:
	case gatewayv1.HTTPRouteFilterResponseHeaderModifier:
		body, f.Kind = in.ResponseHeaderModifier, model.ResponseHeaders
	case "":
		return f, "no type: write RequestHeaderModifier or ResponseHeaderModifier"
	default:
		return f, fmt.Sprintf("filter %s is not built yet: the ones that are: RequestHeaderModifier, ResponseHeaderModifier", in.Type)
	}
	// Exactly the body that belongs to the type.
	lone := gatewayv1.HTTPRouteFilter{Type: in.Type}
	if f.Kind == model.RequestHeaders {
		lone.RequestHeaderModifier = body
	} else {
		lone.ResponseHeaderModifier = body
	}
	if body == nil || lone != *in {
		return f, fmt.Sprintf("a %s has its own field and no other: write that one only", in.Type)
	}
	name := func(s string) string {
		low, ok := fieldName(s)
		switch {
		case !ok && why == "":
			why = fmt.Sprintf("header name %q is not a field name: letters, digits and - only", s)
		case slices.Contains(framing, low) && why == "":
			why = fmt.Sprintf("header %s is the proxy's own to write: remove it from the filter", s)
		}
		return low
	}
	values := func(in []gatewayv1.HTTPHeader) (out []model.HeaderValue) {
		for _, h := range in {
			out = append(out, model.HeaderValue{Name: name(string(h.Name)), Value: h.Value})
			// Space around a value is not part of it on the wire (RFC 9110 5.5).
			if why == "" && (!httpmsg.ValidValue([]byte(h.Value)) || strings.Trim(h.Value, " \t") != h.Value) {
				why = fmt.Sprintf("header %s: value %q holds a control character, or space at an end: remove it", h.Name, h.Value)
			}
		}
		return out
	}
	f.Set, f.Add = values(body.Set), values(body.Add)
	for _, n := range body.Remove {
		f.Remove = append(f.Remove, name(n))
	}
	return f, why
}

// backend: Invalid is the reason of contract 10.4, in words.
func (c *routeReader) backend(in *gatewayv1.HTTPBackendRef) model.BackendRef {
	b := model.BackendRef{
		Service: model.ServiceName{Namespace: string(value(in.Namespace, gatewayv1.Namespace(c.o.namespace))), Name: string(in.Name)},
		Weight:  1,
	}
	bad := func(format string, args ...any) {
		if b.Invalid == "" {
			b.Invalid = fmt.Sprintf(format, args...)
		}
	}
	if w := value(in.Weight, 1); w < 0 || w > maxWeight {
		bad("weight %d: write a number from 0 to %d", w, maxWeight)
	} else {
		b.Weight = uint32(w)
	}
	kind, group := value(in.Kind, "Service"), value(in.Group, "")
	if kind != "Service" || group != "" && group != "core" {
		bad("InvalidKind: %s %q is not a Service: name a Service of group \"\"", kind, group)
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
	for i := range in.Filters {
		f, why := filter(&in.Filters[i])
		if why != "" {
			bad("filters[%d]: %s", i, why)
			continue
		}
		b.Filters = append(b.Filters, f)
	}
	return b
}
