package gamma

import (
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
)

// httpMatch reads matches[j]. What is wrong is left out, which widens the match, and marked:
// the rule refuses, and the match stands before those that it may have stood before when it was
// right (controlplane/compile). An expression is kept, for compile to judge by the same bounds.
func (c *ruleReader) httpMatch(j int) model.Match {
	var m model.Match
	in := &c.in.http[j]
	refuse := c.ofMatch(j)
	if p := in.Path; p != nil {
		kind, path := value(p.Type, gatewayv1.PathMatchPathPrefix), value(p.Value, "/")
		switch kind {
		case gatewayv1.PathMatchExact:
			m.PathKind, m.Path = model.PathExact, path
		case gatewayv1.PathMatchPathPrefix:
			m.PathKind, m.Path = model.PathPrefix, path
		case gatewayv1.PathMatchRegularExpression:
			if why := badPattern(path); why != "" {
				refuse("path", "path pattern %.200q %s", path, why)
			}
			m.PathKind, m.Path = model.PathRegex, path
		default:
			refuse("path", "path type %.100q does not exist: write Exact, PathPrefix or RegularExpression", kind)
			m.PathKind = model.PathUnread
		}
		if why := badPath(m.Path); (m.PathKind == model.PathExact || m.PathKind == model.PathPrefix) && why != "" {
			refuse("path", "path %.200q %s", path, why)
			m.Path = ""
		}
	}
	if in.Method != nil {
		m.Method = string(*in.Method)
		if !slices.Contains(methods, m.Method) {
			refuse("method", "method %.100q does not exist: write one of %s", m.Method, strings.Join(methods, ", "))
			m.Method, m.Unread = "", true
		}
	}
	var headers, params []condition
	for i := range in.Headers {
		h := &in.Headers[i]
		headers = append(headers, condition{string(h.Name), h.Value, string(value(h.Type, gatewayv1.HeaderMatchExact))})
	}
	for i := range in.QueryParams {
		q := &in.QueryParams[i]
		params = append(params, condition{string(q.Name), q.Value, string(value(q.Type, gatewayv1.QueryParamMatchExact))})
	}
	m.Headers = c.conditions(headers, j, "headers", "header", &m.Unread)
	m.Query = c.conditions(params, j, "queryParams", "parameter", &m.Unread)
	return m
}

// The names that the Gateway API allows in a GRPCRoute's exact matches.
var (
	grpcService = regexp.MustCompile(`^\.?[A-Za-z_][A-Za-z_0-9]*(\.[A-Za-z_][A-Za-z_0-9]*)*$`)
	grpcMethod  = regexp.MustCompile(`^[A-Za-z_][A-Za-z_0-9]*$`)
)

// grpcMatch reads matches[j] of a GRPCRoute, as httpMatch does.
func (c *ruleReader) grpcMatch(j int) model.Match {
	var m model.Match
	in := &c.in.grpc[j]
	refuse := c.ofMatch(j)
	if g := in.Method; g != nil {
		m.GRPC = &model.GRPCMatch{}
		kind := value(g.Type, gatewayv1.GRPCMethodMatchExact)
		m.GRPC.Regex = kind == gatewayv1.GRPCMethodMatchRegularExpression
		element := func(field string, in *string, exact *regexp.Regexp) string {
			switch {
			case in == nil:
				return ""
			case *in == "":
				refuse("method", "method.%s is empty: drop it for any, or write a name", field)
				m.Unread = true
				return ""
			case m.GRPC.Regex:
				if why := badPattern(*in); why != "" {
					refuse("method", "method.%s pattern %.200q %s", field, *in, why)
				}
			case !exact.MatchString(*in):
				refuse("method", "method.%s %.200q is no name of gRPC: letters, digits, _ and, in a service, dots", field, *in)
				m.Unread = true
				return ""
			}
			return *in
		}
		switch {
		case kind != gatewayv1.GRPCMethodMatchExact && !m.GRPC.Regex:
			refuse("method", "method.type %.100q does not exist: write Exact or RegularExpression", kind)
			m.Unread = true
		case g.Service == nil && g.Method == nil:
			if !c.unread(fmt.Sprintf("matches[%d].method", j)) {
				refuse("method", "method names neither service nor method: write one of them, or drop method")
			}
			m.Unread = true
		default:
			m.GRPC.Service = element("service", g.Service, grpcService)
			m.GRPC.Method = element("method", g.Method, grpcMethod)
		}
	}
	var headers []condition
	for i := range in.Headers {
		h := &in.Headers[i]
		headers = append(headers, condition{string(h.Name), h.Value, string(value(h.Type, gatewayv1.GRPCHeaderMatchExact))})
	}
	m.Headers = c.conditions(headers, j, "headers", "header", &m.Unread)
	return m
}

// ofMatch is refuse for matches[j].
func (c *ruleReader) ofMatch(j int) func(field, format string, args ...any) {
	return func(field, format string, args ...any) {
		c.refuse(c.at("matches", strconv.Itoa(j), field), "matches[%d]: %s", j, fmt.Sprintf(format, args...))
	}
}

// condition is one header or parameter of a match.
type condition struct{ name, value, kind string }

// conditions reads a list of matches[j]. Of headers whose names differ in case
// alone the first counts, as the Gateway API says. unread is set where one is left out.
func (c *ruleReader) conditions(in []condition, j int, field, what string, unread *bool) (out []model.ValueMatch) {
	if len(in) > maxConditions {
		c.ofMatch(j)(field, "%d %s, the limit is %d: remove some", len(in), field, maxConditions)
		in, *unread = in[:maxConditions], true
	}
	for i, h := range in {
		at := fmt.Sprintf("matches[%d].%s[%d]", j, field, i)
		refuse := func(format string, args ...any) {
			c.refuse(c.at("matches", strconv.Itoa(j), field, strconv.Itoa(i)), "%s: %s", at, fmt.Sprintf(format, args...))
		}
		name, ok := fieldName(h.name)
		if what != "header" {
			name, ok = h.name, h.name != ""
		}
		m := model.ValueMatch{Name: name, Value: h.value, Regex: h.kind == "RegularExpression"}
		same := func(o condition) bool { return o.name == h.name }
		folded := func(o model.ValueMatch) bool { return o.Name == name }
		switch {
		case c.unread(at):
			*unread = true // a flaw already
			continue
		case h.kind != "Exact" && !m.Regex:
			refuse("%s %.100q: match type %.100q does not exist: write Exact or RegularExpression", what, h.name, h.kind)
			*unread = true
			continue
		case !ok && what == "parameter":
			refuse("a parameter without a name: write its name")
			*unread = true
			continue
		case !ok:
			refuse("%s name %.100q is not a field name: letters, digits and - only", what, h.name)
			*unread = true
			continue
		case slices.ContainsFunc(in[:i], same):
			refuse("%s %.100s stands twice: keep one", what, h.name)
		case slices.ContainsFunc(out, folded):
			c.report(c.at("matches", strconv.Itoa(j), field, strconv.Itoa(i)), "rules[%d]: %s: %s %.100s stands twice (case does not count), and the first counts: remove this one",
				c.i, at, what, h.name)
			continue
		}
		if m.Regex {
			if why := badPattern(h.value); why != "" {
				refuse("%s %.100s: pattern %.200q %s", what, h.name, h.value, why)
			}
		} else if h.value == "" {
			refuse("%s %.100s: no value: write what it must be, or a RegularExpression", what, h.name)
			*unread = true
			continue
		} else if what == "header" && !httpmsg.ValidValue([]byte(h.value)) {
			refuse("%s %.100s: value %.200q holds a control character: remove it", what, h.name, h.value)
			*unread = true
			continue
		}
		out = append(out, m)
	}
	return out
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

// badPolicyPath says what is wrong with a path that decides about access. A request's path is
// compared with it as it came and wholly decoded, so that it has to be decoded itself:
// an escape in it would never be met.
func badPolicyPath(p string) string {
	i := strings.IndexAny(p, `%\;`)
	if i < 0 || !strings.HasPrefix(p, "/") {
		return badPath(p)
	}
	said := fmt.Sprintf("holds %q, and paths are compared decoded: write it decoded", p[i])
	if plain, err := url.PathUnescape(p); err == nil && utf8.ValidString(plain) && !strings.ContainsAny(plain, `%\;`) && badPath(plain) == "" {
		return fmt.Sprintf("%s, %.200q", said, plain)
	}
	return fmt.Sprintf("%s, like \"/café\", or only what stands before, %.200q", said, p[:i])
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
