package compile

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// maxFilters and maxBackends bound one rule; the Gateway API allows 16 of either.
// maxOps bounds the changes of one filter, maxPipeOps those that one request and
// its answer can meet on all levels.
const (
	maxFilters  = 32
	maxBackends = 64
	maxOps      = 64
	maxPipeOps  = 256
)

// tooManyOps says that a filter makes n changes, if those are too many.
func tooManyOps(n int) string {
	if n <= maxOps {
		return ""
	}
	return fmt.Sprintf("it makes %d changes, and %d are the most: split it over filters", n, maxOps)
}

// pipeTooLong says why p does too much for one request, or "".
func pipeTooLong(p *snapshot.FilterChain) string {
	if n := len(p.Request) + len(p.Query) + len(p.Response); n > maxPipeOps {
		return fmt.Sprintf("its filters, with those of the service, make %d changes, and %d are the most: use fewer", n, maxPipeOps)
	}
	return ""
}

// ruleFilter is a filter of a rule or backend as far as it can be compiled
// without knowing the services.
type ruleFilter struct {
	request, response []snapshot.Op
	redirect          *snapshot.Redirect
	rewrite           *snapshot.Rewrite
	cors              *snapshot.CORS
	mirror            *model.MirrorFilter
	extension         string
}

// place is where filters stand, and so which kinds may.
type place uint8

const (
	inHTTPRule place = iota
	inGRPCRule
	inHTTPBackend
	inGRPCBackend
)

var kindNames = [...]string{"", "RequestHeaderModifier", "ResponseHeaderModifier", "RequestRedirect", "URLRewrite", "RequestMirror", "CORS", "ExtensionRef"}

func (p place) allows(k model.FilterKind) bool {
	switch k {
	case model.RequestHeaders, model.ResponseHeaders, model.Mirror:
		return true
	case model.Rewrite, model.Redirect:
		return p == inHTTPRule || p == inHTTPBackend
	case model.Extension:
		return p == inHTTPRule || p == inGRPCRule
	}
	return p == inHTTPRule
}

// readFilters compiles filters in their order. prefixes: every match of the rule
// is of a prefix, so that it can be replaced.
func readFilters(filters []model.Filter, at place, prefixes bool) (out []ruleFilter, why string) {
	if len(filters) > maxFilters {
		return nil, fmt.Sprintf("it has %d filters, and %d are the most", len(filters), maxFilters)
	}
	var have [model.Extension + 1]bool
	for i := range filters {
		f := &filters[i]
		switch {
		case f.Kind == 0 || f.Kind > model.Extension:
			return nil, fmt.Sprintf("unknown kind of filter %d", f.Kind)
		case !at.allows(f.Kind):
			return nil, kindNames[f.Kind] + " cannot stand there"
		case have[f.Kind] && f.Kind != model.Mirror && f.Kind != model.Extension:
			return nil, "two filters of one kind: put their changes into one"
		}
		have[f.Kind] = true
		r, why := readFilter(f, prefixes)
		if why != "" {
			return nil, why
		}
		out = append(out, r)
	}
	if have[model.Redirect] && have[model.Rewrite] {
		return nil, "RequestRedirect and URLRewrite: a request is either sent elsewhere or changed; remove one"
	}
	return out, ""
}

func readFilter(f *model.Filter, prefixes bool) (r ruleFilter, why string) {
	missing := kindNames[f.Kind] + " says nothing of what it is to do"
	switch f.Kind {
	case model.RequestHeaders:
		r.request, why = headerOps(f)
	case model.ResponseHeaders:
		r.response, why = headerOps(f)
	case model.Redirect:
		if f.Redirect == nil {
			return r, missing
		}
		r.redirect, why = redirect(f.Redirect, prefixes)
	case model.Rewrite:
		if f.Rewrite == nil {
			return r, missing
		}
		r.rewrite, why = rewrite(f.Rewrite, prefixes)
	case model.Mirror:
		if f.Mirror == nil {
			return r, missing
		}
		r.mirror = f.Mirror
	case model.CORS:
		if f.CORS == nil {
			return r, missing
		}
		r.cors, why = cors(f.CORS)
	case model.Extension:
		if f.Extension == "" {
			return r, missing
		}
		r.extension = f.Extension
	}
	return r, why
}

// notForRules are fields that belong to the connection, the framing, the target
// or the proxies themselves: changing one would change what the message is, not
// what it says.
var notForRules = map[string]string{
	"host":                    "host is the request's target",
	"connection":              "connection belongs to one hop",
	"keep-alive":              "keep-alive belongs to one hop",
	"proxy-connection":        "proxy-connection belongs to one hop",
	"te":                      "te belongs to one hop",
	"trailer":                 "trailer belongs to the framing",
	"transfer-encoding":       "transfer-encoding belongs to the framing",
	"content-length":          "content-length belongs to the framing",
	"upgrade":                 "upgrade belongs to one hop",
	"expect":                  "expect belongs to the message itself: the proxy has acted on it",
	"x-forwarded-client-cert": "x-forwarded-client-cert is the proxies' word on who called",
	"x-aether-outcome":        "x-aether-outcome is the proxies' word on what became of a request",
}

// fieldName is a field's name in lower case, or why a filter may not name it.
func fieldName(n string) (name, why string) {
	name = strings.ToLower(n)
	switch {
	case strings.HasPrefix(name, ":"):
		return "", fmt.Sprintf("a filter cannot change a field of the message itself: %s is no field", name)
	case !token(name):
		return "", fmt.Sprintf("%q is no field name", name)
	case notForRules[name] != "":
		return "", "a filter cannot change a field of the message itself: " + notForRules[name]
	}
	return name, ""
}

// headerOps compiles a modifier: removals, then sets, then additions.
func headerOps(f *model.Filter) (out []snapshot.Op, why string) {
	if why := tooManyOps(len(f.Remove) + len(f.Set) + len(f.Add)); why != "" {
		return nil, kindNames[f.Kind] + ": " + why
	}
	out = make([]snapshot.Op, 0, len(f.Remove)+len(f.Set)+len(f.Add))
	add := func(kind model.MutationKind, name, value string) {
		n, bad := fieldName(name)
		switch {
		case why != "":
		case bad != "":
			why = bad
		case !httpmsg.ValidValue([]byte(value)):
			why = fmt.Sprintf("the value for %s holds a control character", name)
		}
		op := snapshot.Op{Kind: kind, Name: []byte(n)}
		if kind != model.RemoveAll {
			op.Value = []byte(value)
		}
		out = append(out, op)
	}
	for _, n := range f.Remove {
		add(model.RemoveAll, n, "")
	}
	for _, h := range f.Set {
		add(model.OverwriteIfExistsOrAdd, h.Name, h.Value)
	}
	for _, h := range f.Add {
		add(model.AppendIfExistsOrAdd, h.Name, h.Value)
	}
	return out, why
}

func token(s string) bool {
	for i := range len(s) {
		if httpmsg.Lower[s[i]] == 0 {
			return false
		}
	}
	return s != ""
}

// hostName reports whether h can stand in a Location or as an authority's host:
// a name or an IPv4 address, without a port (Gateway API PreciseHostname).
func hostName(h string) bool {
	if len(h) > 253 {
		return false
	}
	for label := range strings.SplitSeq(strings.ToLower(h), ".") {
		if !dnsLabel(label) {
			return false
		}
	}
	return true
}

// pathEdit checks a new path, or a new beginning of one.
func pathEdit(e model.PathEdit, prefixes bool) string {
	switch {
	case e.Kind > model.PathPrefixPart:
		return fmt.Sprintf("unknown kind of path change %d", e.Kind)
	case e.Kind == model.PathKept:
		return ""
	case e.Kind == model.PathPrefixPart && !prefixes:
		return "replacePrefixMatch needs every match of the rule to be of a path prefix"
	case e.Kind == model.PathPrefixPart && e.Value == "":
		return ""
	case !strings.HasPrefix(e.Value, "/"):
		return fmt.Sprintf("the new path %q does not begin with /", e.Value)
	}
	for i := range len(e.Value) {
		if c := e.Value[i]; c <= ' ' || c >= 0x7f || c == '?' || c == '#' {
			return fmt.Sprintf("the new path %q holds what cannot stand in a path: percent-encode it", e.Value)
		}
	}
	return ""
}

func redirect(r *model.RedirectFilter, prefixes bool) (*snapshot.Redirect, string) {
	switch {
	case r.Scheme != "" && r.Scheme != "http" && r.Scheme != "https":
		return nil, fmt.Sprintf("a redirection to scheme %q: use http or https", r.Scheme)
	case r.Host != "" && !hostName(r.Host):
		return nil, fmt.Sprintf("a redirection to host %q, which is no host name", r.Host)
	case r.Status != 301 && r.Status != 302 && r.Status != 303 && r.Status != 307 && r.Status != 308:
		return nil, fmt.Sprintf("a redirection with status %d: use 301, 302, 303, 307 or 308", r.Status)
	}
	if why := pathEdit(r.Path, prefixes); why != "" {
		return nil, why
	}
	return &snapshot.Redirect{Scheme: r.Scheme, Host: r.Host, Port: r.Port, Path: r.Path, Status: r.Status}, ""
}

func rewrite(r *model.RewriteFilter, prefixes bool) (*snapshot.Rewrite, string) {
	if r.Host != "" && !hostName(r.Host) {
		return nil, fmt.Sprintf("the new host %q is no host name", r.Host)
	}
	if why := pathEdit(r.Path, prefixes); why != "" {
		return nil, why
	}
	out := &snapshot.Rewrite{Path: r.Path}
	if r.Host != "" {
		out.Host = []byte(r.Host)
	}
	return out, ""
}

func cors(c *model.CORSFilter) (*snapshot.CORS, string) {
	out := &snapshot.CORS{Credentials: c.Credentials}
	for _, o := range c.Origins {
		if o == "*" {
			out.AnyOrigin = true
			continue
		}
		origin, ok := readOrigin(o)
		if !ok {
			return nil, fmt.Sprintf("%q is no origin: write scheme://host, scheme://host:port, scheme://*.host or *", o)
		}
		out.Origins = append(out.Origins, origin)
	}
	var bad string
	out.Methods, out.AnyMethod, bad = tokens(c.Methods, false)
	if bad == "" {
		out.Headers, out.AnyHeader, bad = tokens(c.Headers, true)
	}
	if bad == "" {
		out.Expose, _, bad = tokens(c.Expose, true)
	}
	switch {
	case bad != "":
		return nil, bad
	case c.MaxAge < 0 || c.MaxAge%time.Second != 0:
		return nil, fmt.Sprintf("maxAge %s is no number of whole seconds", c.MaxAge)
	case c.MaxAge > 0:
		out.MaxAge = strconv.AppendInt(nil, int64(c.MaxAge/time.Second), 10)
	}
	return out, ""
}

// tokens joins a list of methods or field names; any: "*" is among them and
// stands for all.
func tokens(list []string, fields bool) (joined []byte, any bool, bad string) {
	if slices.Contains(list, "*") {
		return []byte("*"), true, ""
	}
	for i, w := range list {
		if !token(strings.ToLower(w)) {
			return nil, false, fmt.Sprintf("%q is no name that CORS could allow", w)
		}
		if fields {
			w = strings.ToLower(w)
		}
		if i > 0 {
			joined = append(joined, ',')
		}
		joined = append(joined, w...)
	}
	return joined, false, ""
}

// readOrigin reads an allowed origin: scheme, host and port, where the host may
// begin with a "*" that stands for anything (Gateway API CORSOrigin).
func readOrigin(o string) (snapshot.Origin, bool) {
	scheme, host, ok := strings.Cut(strings.ToLower(o), "://")
	host, port, has := strings.Cut(host, ":")
	if !ok || !isScheme(scheme) {
		return snapshot.Origin{}, false
	}
	if has {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 || strconv.FormatUint(n, 10) != port {
			return snapshot.Origin{}, false
		}
		if scheme == "http" && n == 80 || scheme == "https" && n == 443 {
			port = ""
		} else {
			port = ":" + port
		}
	}
	if rest, wild := strings.CutPrefix(host, "*"); wild {
		if name, dot := strings.CutPrefix(rest, "."); rest != "" && (!dot || !hostName(name)) {
			return snapshot.Origin{}, false
		}
		return snapshot.Origin{Prefix: scheme + "://", Suffix: rest + port, Wild: true}, true
	}
	if !hostName(host) {
		return snapshot.Origin{}, false
	}
	return snapshot.Origin{Prefix: scheme + "://" + host + port}, true
}

// isScheme reports whether s is a URI scheme (RFC 3986 3.1), in lower case.
func isScheme(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z':
		case i > 0 && (c >= '0' && c <= '9' || c == '+' || c == '-' || c == '.'):
		default:
			return false
		}
	}
	return s != ""
}
