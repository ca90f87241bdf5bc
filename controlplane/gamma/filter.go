package gamma

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
)

// maxCORS bounds each list of a CORS filter, as the Gateway API does.
const maxCORS = 64

// defaultMaxAge is that of the Gateway API's schema, which an API server writes where nothing is.
const defaultMaxAge = 5 * time.Second

// framing are the fields that a message's shape, destination or caller hangs on; a
// filter that wrote them could make one request two, or somebody else's (RFC
// 9110 7.6.1, RFC 9112 6; contract 6.3).
var framing = []string{"connection", "content-length", "expect", "host", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
	"x-aether-outcome", "x-forwarded-client-cert"}

// The filters that may stand in a rule, and on a backendRef.
var (
	httpFilters = []gatewayv1.HTTPRouteFilterType{gatewayv1.HTTPRouteFilterRequestHeaderModifier, gatewayv1.HTTPRouteFilterResponseHeaderModifier,
		gatewayv1.HTTPRouteFilterRequestRedirect, gatewayv1.HTTPRouteFilterURLRewrite, gatewayv1.HTTPRouteFilterRequestMirror,
		gatewayv1.HTTPRouteFilterCORS, gatewayv1.HTTPRouteFilterExtensionRef}
	httpBackendFilters = []gatewayv1.HTTPRouteFilterType{gatewayv1.HTTPRouteFilterRequestHeaderModifier, gatewayv1.HTTPRouteFilterResponseHeaderModifier,
		gatewayv1.HTTPRouteFilterRequestRedirect, gatewayv1.HTTPRouteFilterURLRewrite, gatewayv1.HTTPRouteFilterRequestMirror}
	grpcFilters = []gatewayv1.HTTPRouteFilterType{gatewayv1.HTTPRouteFilterRequestHeaderModifier, gatewayv1.HTTPRouteFilterResponseHeaderModifier,
		gatewayv1.HTTPRouteFilterRequestMirror, gatewayv1.HTTPRouteFilterExtensionRef}
	grpcBackendFilters = []gatewayv1.HTTPRouteFilterType{gatewayv1.HTTPRouteFilterRequestHeaderModifier, gatewayv1.HTTPRouteFilterResponseHeaderModifier,
		gatewayv1.HTTPRouteFilterRequestMirror}
)

// filters reads the filters of the rule (backend -1) or of a backendRef. refuse
// says what is wrong with one; it is left out then.
func (c *ruleReader) filters(in []gatewayv1.HTTPRouteFilter, backend int, refuse func(j int, format string, args ...any)) (out []model.Filter) {
	allowed := httpFilters
	switch grpc := c.routeReader.in.kind == model.GRPCRoute; {
	case grpc && backend < 0:
		allowed = grpcFilters
	case grpc:
		allowed = grpcBackendFilters
	case backend >= 0:
		allowed = httpBackendFilters
	}
	have := map[model.FilterKind]bool{}
	for j := range in {
		f, why := filter(&in[j], allowed)
		switch {
		case why != "":
		case have[f.Kind] && f.Kind != model.Mirror && f.Kind != model.Extension:
			why = fmt.Sprintf("a second %s: keep one", in[j].Type)
		case f.Kind == model.Redirect && have[model.Rewrite] || f.Kind == model.Rewrite && have[model.Redirect]:
			why = "RequestRedirect and URLRewrite in one rule: keep one"
		case (f.Redirect != nil && f.Redirect.Path.Kind == model.PathPrefixPart || f.Rewrite != nil && f.Rewrite.Path.Kind == model.PathPrefixPart) && !c.prefixes():
			why = "ReplacePrefixMatch needs a prefix to replace: make every match of the rule a PathPrefix, or write ReplaceFullPath"
		}
		if why != "" {
			if !c.unread(where(backend, j)) {
				refuse(j, "%s", why)
			}
			continue
		}
		have[f.Kind] = true
		if f.Mirror != nil {
			c.mirror(&f.Mirror.Backend, &in[j].RequestMirror.BackendRef, backend, j, len(out))
		}
		out = append(out, f)
	}
	return out
}

// where is filters[j] of a rule (backend -1), or of one of its backendRefs.
func where(backend, j int) string {
	if backend < 0 {
		return fmt.Sprintf("filters[%d]", j)
	}
	return fmt.Sprintf("backendRefs[%d].filters[%d]", backend, j)
}

// prefixes: every match of the rule is by prefix; one without a path is of "/". A type that
// does not exist is refused as such.
func (c *ruleReader) prefixes() bool {
	return !slices.ContainsFunc(c.in.http, func(m gatewayv1.HTTPRouteMatch) bool {
		kind := gatewayv1.PathMatchPathPrefix
		if m.Path != nil {
			kind = value(m.Path.Type, kind)
		}
		return kind == gatewayv1.PathMatchExact || kind == gatewayv1.PathMatchRegularExpression
	})
}

// mirror reads where filters[j], which becomes the n-th, mirrors to. A
// destination that cannot be honoured costs the copies only.
func (c *ruleReader) mirror(b *model.BackendRef, in *gatewayv1.BackendObjectReference, backend, j, n int) {
	ref, why := c.destination(in)
	key, at, line := fmt.Sprintf("%d/filters/%d", c.i, j), fmt.Sprintf("rules[%d].%s", c.i, where(backend, j)), c.at("filters", strconv.Itoa(j))
	if backend >= 0 {
		key = fmt.Sprintf("%d/%d/filters/%d", c.i, backend, j)
		line = c.at("backendRefs", strconv.Itoa(backend), "filters", strconv.Itoa(j))
	}
	if mark := c.marks[key]; mark != "" {
		why = mark
	}
	ref.Invalid = why
	*b = ref
	const cost = "nothing is mirrored there"
	switch {
	case why != "" && unreadIn(c.illegible, "spec."+at):
		// a flaw already: what is missing was not read
	case why != "":
		c.reportRefusal(at, line, "%s: %s; %s", at, why, cost)
	default:
		c.permit(b, foreignRef{c.i, backend, n, line, at, cost})
	}
}

// filter reads all of a filter but the backend of a mirror; why says what is wrong.
func filter(in *gatewayv1.HTTPRouteFilter, allowed []gatewayv1.HTTPRouteFilterType) (f model.Filter, why string) {
	if !slices.Contains(allowed, in.Type) {
		names := make([]string, len(allowed))
		for i, t := range allowed {
			names[i] = string(t)
		}
		these := "the filters that may stand here: " + strings.Join(names, ", ")
		switch {
		case in.Type == "":
			return f, "no type: " + these
		case in.Type == gatewayv1.HTTPRouteFilterExternalAuth:
			return f, "filter ExternalAuth is not built: write an ExtensionRef to an HTTPFilter with extAuthz"
		case slices.Contains(httpFilters, in.Type):
			return f, fmt.Sprintf("filter %s cannot stand here: %s", in.Type, these)
		}
		return f, fmt.Sprintf("filter %.100s does not exist: %s", in.Type, these)
	}
	// Exactly the body that belongs to the type.
	lone := gatewayv1.HTTPRouteFilter{Type: in.Type}
	switch in.Type {
	case gatewayv1.HTTPRouteFilterRequestHeaderModifier:
		lone.RequestHeaderModifier = in.RequestHeaderModifier
	case gatewayv1.HTTPRouteFilterResponseHeaderModifier:
		lone.ResponseHeaderModifier = in.ResponseHeaderModifier
	case gatewayv1.HTTPRouteFilterRequestRedirect:
		lone.RequestRedirect = in.RequestRedirect
	case gatewayv1.HTTPRouteFilterURLRewrite:
		lone.URLRewrite = in.URLRewrite
	case gatewayv1.HTTPRouteFilterRequestMirror:
		lone.RequestMirror = in.RequestMirror
	case gatewayv1.HTTPRouteFilterCORS:
		lone.CORS = in.CORS
	case gatewayv1.HTTPRouteFilterExtensionRef:
		lone.ExtensionRef = in.ExtensionRef
	}
	if lone != *in || lone == (gatewayv1.HTTPRouteFilter{Type: in.Type}) {
		return f, fmt.Sprintf("a filter %s has its own field and no other: write that one only", in.Type)
	}
	switch in.Type {
	case gatewayv1.HTTPRouteFilterRequestHeaderModifier:
		f.Kind = model.RequestHeaders
		why = modifier(&f, in.RequestHeaderModifier)
	case gatewayv1.HTTPRouteFilterResponseHeaderModifier:
		f.Kind = model.ResponseHeaders
		why = modifier(&f, in.ResponseHeaderModifier)
	case gatewayv1.HTTPRouteFilterRequestRedirect:
		f.Kind = model.Redirect
		f.Redirect, why = redirect(in.RequestRedirect)
	case gatewayv1.HTTPRouteFilterURLRewrite:
		f.Kind, f.Rewrite = model.Rewrite, &model.RewriteFilter{Host: string(value(in.URLRewrite.Hostname, ""))}
		if f.Rewrite.Path, why = pathEdit(in.URLRewrite.Path); in.URLRewrite.Hostname != nil {
			if bad := badHost(f.Rewrite.Host); bad != "" {
				why = fmt.Sprintf("hostname %.100q %s", f.Rewrite.Host, bad)
			}
		}
	case gatewayv1.HTTPRouteFilterRequestMirror:
		f.Kind = model.Mirror
		f.Mirror, why = mirrorShare(in.RequestMirror)
	case gatewayv1.HTTPRouteFilterCORS:
		f.Kind = model.CORS
		f.CORS, why = cors(in.CORS)
	case gatewayv1.HTTPRouteFilterExtensionRef:
		f.Kind, f.Extension = model.Extension, string(in.ExtensionRef.Name)
		if r := in.ExtensionRef; r.Group != ConfigGroup || r.Kind != "HTTPFilter" {
			why = fmt.Sprintf("extensionRef to %.100s of group %.100q: name an HTTPFilter of group %s", An(string(r.Kind)), r.Group, ConfigGroup)
		} else if len(validation.IsDNS1123Subdomain(f.Extension)) > 0 {
			why = fmt.Sprintf("extensionRef to %.100q, which cannot be a name: name an HTTPFilter of the route's namespace", f.Extension)
		}
	}
	return f, why
}

// writable gives a field's name in lower case; why says why a filter may not touch it.
func writable(s string) (low, why string) {
	low, ok := fieldName(s)
	switch {
	case !ok:
		return low, fmt.Sprintf("header name %.100q is not a field name: letters, digits and - only", s)
	case slices.Contains(framing, low):
		return low, fmt.Sprintf("header %s is the proxy's own to write: remove it from the filter", s)
	}
	return low, ""
}

// badValue says why a filter cannot write s; space around a value is not part of it on the wire (RFC 9110 5.5).
func badValue(name, s string) string {
	if !httpmsg.ValidValue([]byte(s)) || strings.Trim(s, " \t") != s {
		return fmt.Sprintf("header %s: value %.200q holds a control character, or space at an end: remove it", name, s)
	}
	return ""
}

func modifier(f *model.Filter, in *gatewayv1.HTTPHeaderFilter) (why string) {
	name := func(s string) string {
		low, bad := writable(s)
		if why == "" {
			why = bad
		}
		return low
	}
	values := func(in []gatewayv1.HTTPHeader) (out []model.HeaderValue) {
		for _, h := range in {
			out = append(out, model.HeaderValue{Name: name(string(h.Name)), Value: h.Value})
			if why == "" {
				why = badValue(string(h.Name), h.Value)
			}
		}
		return out
	}
	f.Set, f.Add = values(in.Set), values(in.Add)
	for _, n := range in.Remove {
		f.Remove = append(f.Remove, name(n))
	}
	return why
}

func redirect(in *gatewayv1.HTTPRequestRedirectFilter) (out *model.RedirectFilter, why string) {
	out = &model.RedirectFilter{Scheme: value(in.Scheme, ""), Host: string(value(in.Hostname, "")), Status: value(in.StatusCode, 302)}
	if out.Path, why = pathEdit(in.Path); why != "" {
		return out, why
	}
	if in.Scheme != nil && out.Scheme != "http" && out.Scheme != "https" {
		return out, fmt.Sprintf("scheme %.100q: write http or https", out.Scheme)
	}
	if in.Hostname != nil {
		if bad := badHost(out.Host); bad != "" {
			return out, fmt.Sprintf("hostname %.100q %s", out.Host, bad)
		}
	}
	if in.Port != nil {
		if *in.Port < 1 || *in.Port >= 1<<16 {
			return out, fmt.Sprintf("port %d is no port: write one from 1 to 65535", *in.Port)
		}
		out.Port = uint16(*in.Port)
	}
	if !slices.Contains([]int{301, 302, 303, 307, 308}, out.Status) {
		return out, fmt.Sprintf("statusCode %d: write 301, 302, 303, 307 or 308", out.Status)
	}
	return out, ""
}

func pathEdit(in *gatewayv1.HTTPPathModifier) (out model.PathEdit, why string) {
	switch {
	case in == nil:
		return out, ""
	case in.Type == gatewayv1.FullPathHTTPPathModifier && in.ReplaceFullPath != nil && in.ReplacePrefixMatch == nil:
		out = model.PathEdit{Kind: model.PathFull, Value: *in.ReplaceFullPath}
	case in.Type == gatewayv1.PrefixMatchHTTPPathModifier && in.ReplacePrefixMatch != nil && in.ReplaceFullPath == nil:
		out = model.PathEdit{Kind: model.PathPrefixPart, Value: *in.ReplacePrefixMatch}
		if out.Value == "" {
			return out, "" // the prefix goes
		}
	default:
		return out, fmt.Sprintf("path of type %.100q: write type ReplaceFullPath with replaceFullPath, or ReplacePrefixMatch with replacePrefixMatch, and not both", in.Type)
	}
	if bad := badPath(out.Value); bad != "" {
		return out, fmt.Sprintf("path: the replacement %.200q %s", out.Value, bad)
	}
	if strings.IndexFunc(out.Value, func(c rune) bool { return c > 0x7f }) >= 0 {
		return out, fmt.Sprintf("path: the replacement %.200q holds what is not ASCII: percent-encode it", out.Value)
	}
	return out, ""
}

func mirrorShare(in *gatewayv1.HTTPRequestMirrorFilter) (*model.MirrorFilter, string) {
	out := &model.MirrorFilter{Numerator: 1, Denominator: 1}
	switch {
	case in.Percent != nil && in.Fraction != nil:
		return out, "percent and fraction: keep one"
	case in.Percent != nil:
		if *in.Percent < 0 || *in.Percent > 100 {
			return out, fmt.Sprintf("percent %d: write a number from 0 to 100", *in.Percent)
		}
		out.Numerator, out.Denominator = uint32(*in.Percent), 100
	case in.Fraction != nil:
		n, d := in.Fraction.Numerator, value(in.Fraction.Denominator, 100)
		if d < 1 || n < 0 || n > d {
			return out, fmt.Sprintf("fraction %d/%d: write a numerator from 0 to the denominator, which is at least 1", n, d)
		}
		out.Numerator, out.Denominator = uint32(n), uint32(d)
	}
	return out, ""
}

// origin is what the Gateway API allows in allowOrigins, but for "*" alone.
var origin = regexp.MustCompile(`^https?://((\*\.)?([a-zA-Z0-9-]+\.)*[a-zA-Z0-9-]+|\*)(:([0-9]{1,5}))?$`)

func cors(in *gatewayv1.HTTPCORSFilter) (*model.CORSFilter, string) {
	out := &model.CORSFilter{Credentials: value(in.AllowCredentials, false)}
	why := ""
	bad := func(format string, args ...any) {
		if why == "" {
			why = fmt.Sprintf(format, args...)
		}
	}
	list := func(field string, in []string, ok func(string) bool, want string) []string {
		if len(in) > maxCORS {
			bad("%s has %d entries, the limit is %d: remove some", field, len(in), maxCORS)
			return nil
		}
		for _, s := range in {
			if s == "*" && len(in) > 1 {
				bad("%s: * beside others: write it alone", field)
			}
			if s != "*" && !ok(s) {
				bad("%s: %.100q: write %s, or * alone", field, s, want)
			}
		}
		return in
	}
	isName := func(s string) bool { _, ok := fieldName(s); return ok }
	out.Origins = list("allowOrigins", texts(in.AllowOrigins), func(s string) bool {
		m := origin.FindStringSubmatch(s)
		if m == nil || len(s) > 253 {
			return false
		}
		port, err := strconv.ParseUint(m[5], 10, 16)
		return m[5] == "" || err == nil && port > 0
	}, "http:// or https://, a host, which may begin with *., and perhaps a port")
	out.Methods = list("allowMethods", texts(in.AllowMethods), func(s string) bool { return slices.Contains(methods, s) }, "one of "+strings.Join(methods, ", "))
	out.Headers = list("allowHeaders", texts(in.AllowHeaders), isName, "the name of a field")
	out.Expose = list("exposeHeaders", texts(in.ExposeHeaders), isName, "the name of a field")
	switch {
	case in.MaxAge < 0:
		bad("maxAge %d: write a number of seconds from 1 on", in.MaxAge)
	case in.MaxAge == 0:
		out.MaxAge = defaultMaxAge
	default:
		out.MaxAge = time.Duration(in.MaxAge) * time.Second
	}
	return out, why
}

func texts[T ~string](in []T) (out []string) {
	for _, s := range in {
		out = append(out, string(s))
	}
	return out
}
