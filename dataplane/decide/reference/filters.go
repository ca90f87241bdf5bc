package reference

import (
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"sort"
	"strings"

	"aether/dataplane/model"
)

// rbac is one filter's policies in force.
type rbac struct {
	name string
	model.RBAC
}

// effects are all that is done to the requests of one rule (contract 10.7), or,
// of a backend's filters, what it adds.
type effects struct {
	invalid   string // the rule answers 500
	rbac      []rbac
	authz     string            // the filter that asks; "": nobody is asked
	selectors []selector        // fields that select, beside x-aether-subset-*
	cors      *model.CORSFilter // the rule's
	redirect  *model.RedirectFilter
	host      string         // rewritten authority; "": kept
	path      model.PathEdit // of a rewrite
	request   []model.MutationOp
	query     []model.MutationOp
	response  []model.MutationOp
	mirrors   []model.MirrorFilter
}

type selector struct{ header, key string }

// policy: access is decided here, so that spellings matter (decision 009).
func (e *effects) policy() bool {
	return e.authz != "" || slices.ContainsFunc(e.rbac, func(r rbac) bool { return !r.Audit })
}

// filterName is the order of filters, and how they are called.
func filterName(f *model.HTTPFilter) string { return f.Namespace + "/" + f.Name }

// filterInvalid: what it governs is refused.
func (w *world) filterInvalid(f *model.HTTPFilter) bool {
	n := 0
	for i := range w.m.Filters {
		if o := &w.m.Filters[i]; o.Namespace == f.Namespace && o.Name == f.Name {
			n++
		}
	}
	if n > 1 || f.Invalid != "" {
		return true
	}
	if f.Scope == model.ScopeInbound && f.RBAC == nil && f.ExtAuthz == nil {
		return true
	}
	forms := 0
	for _, is := range []bool{f.RBAC != nil, f.ExtAuthz != nil, len(f.HeaderToMetadata) > 0, f.Mutation != nil} {
		if is {
			forms++
		}
	}
	if forms != 1 || f.RBAC != nil && slices.ContainsFunc(f.RBAC.Policies, policyInvalid) {
		return true
	}
	if f.Mutation != nil {
		for _, op := range append(slices.Clone(f.Mutation.Request), f.Mutation.Response...) {
			if untouchable(op.Name) || !valueValid(op.Value) {
				return true
			}
		}
	}
	return false
}

// policyInvalid: at least one principal; exactly one field of each principal and
// permission (10.7).
func policyInvalid(p model.Policy) bool {
	return len(p.Principals) == 0 ||
		slices.ContainsFunc(p.Principals, func(x model.Principal) bool { return (x.SPIFFEID == "") == (x.Namespace == "") }) ||
		slices.ContainsFunc(p.Permissions, func(x model.Permission) bool {
			return (x.PathPrefix == "") == (x.Method == "") || !plainPrefix(x.PathPrefix)
		})
}

// filtersOf are the filters of a scope that target s, by name; a filter has no say
// outside of its own namespace.
func (w *world) filtersOf(s *service, scope model.Scope) (out []*model.HTTPFilter) {
	for i := range w.m.Filters {
		if f := &w.m.Filters[i]; f.Scope == scope && f.Namespace == s.name.Namespace && slices.Contains(f.Targets, s.name) {
			out = append(out, f)
		}
	}
	sort.Slice(out, func(i, j int) bool { return filterName(out[i]) < filterName(out[j]) })
	return out
}

// named is the filter that an ExtensionRef means: of the route's namespace, of
// the scope that routes use.
func (w *world) named(namespace, name string) *model.HTTPFilter {
	for i := range w.m.Filters {
		if f := &w.m.Filters[i]; f.Namespace == namespace && f.Name == name && f.Scope == model.ScopeRoute {
			return f
		}
	}
	return nil
}

// untouchable fields are the message's or the mesh's own.
func untouchable(name string) bool {
	switch name {
	case "connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", // of one hop (RFC 9110 7.6.1)
		"content-length", "host", "expect", // of the message itself
		"x-forwarded-client-cert", "x-aether-outcome": // of the mesh (6.3, 5.7)
		return true
	}
	return !tokenForm.MatchString(name) // ":path", and what is no field at all
}

// tokenForm is a field name (RFC 9110 5.6.2), lower case.
var tokenForm = regexp.MustCompile("\\A[!#$%&'*+.^_`|~0-9a-z-]+\\z")

// valueValid is RFC 9110 5.5: no control but a tab.
func valueValid(v string) bool {
	return !strings.ContainsFunc(v, func(c rune) bool { return c < ' ' && c != '\t' || c == 0x7f })
}

// modifier is Gateway API's header modifier: remove, then set, then add.
func modifier(f model.Filter) (out []model.MutationOp, invalid string) {
	op := func(k model.MutationKind, n, v string) {
		if untouchable(n) {
			invalid = "a field that no filter may touch: " + n
		}
		if !valueValid(v) {
			invalid = "no value of a field"
		}
		out = append(out, model.MutationOp{Kind: k, Name: n, Value: v})
	}
	for _, n := range f.Remove {
		op(model.RemoveAll, n, "")
	}
	for _, v := range f.Set {
		op(model.OverwriteIfExistsOrAdd, v.Name, v.Value)
	}
	for _, v := range f.Add {
		op(model.AppendIfExistsOrAdd, v.Name, v.Value)
	}
	return out, invalid
}

// allPrefixes: a ReplacePrefixMatch has a prefix to replace whichever match held.
func allPrefixes(rule *model.Rule) bool {
	for _, m := range rule.Matches {
		if m.PathKind != model.PathPrefix && m.PathKind != model.PathAny {
			return false
		}
	}
	return true
}

// plain are the filters of a rule or of a backend that Gateway API defines, and, of
// a rule, the HTTPFilters it refers to, in the order written. The second result is
// those HTTPFilters, for what is not an edit.
func (w *world) plain(r *model.Route, rule *model.Rule, filters []model.Filter, backend bool) (e effects, refs []*model.HTTPFilter) {
	bad := func(format string, args ...any) {
		if e.invalid == "" {
			e.invalid = fmt.Sprintf(format, args...)
		}
	}
	if len(filters) > maxFilters {
		bad("%d filters", len(filters))
	}
	seen := map[model.FilterKind]bool{}
	for _, f := range filters {
		if seen[f.Kind] && f.Kind != model.Mirror && f.Kind != model.Extension {
			bad("two filters of a kind")
		}
		seen[f.Kind] = true
		if !filterAllowed(r.Kind, f.Kind, backend) {
			bad("a filter that is not served here")
			continue
		}
		switch f.Kind {
		case model.RequestHeaders, model.ResponseHeaders:
			ops, why := modifier(f)
			if why != "" {
				bad("%s", why)
			}
			if f.Kind == model.RequestHeaders {
				e.request = append(e.request, ops...)
			} else {
				e.response = append(e.response, ops...)
			}
		case model.Redirect:
			e.redirect = f.Redirect
			if !redirectValid(f.Redirect) || f.Redirect.Path.Kind == model.PathPrefixPart && !allPrefixes(rule) {
				bad("a bad redirect")
			}
		case model.Rewrite:
			e.host, e.path = f.Rewrite.Host, f.Rewrite.Path
			if f.Rewrite.Path.Kind == model.PathPrefixPart && !allPrefixes(rule) {
				bad("a prefix to replace and a match without one")
			}
		case model.Mirror:
			e.mirrors = append(e.mirrors, *f.Mirror)
		case model.CORS:
			e.cors = f.CORS
			if !corsValid(f.CORS) {
				bad("a bad origin")
			}
		case model.Extension:
			x := w.named(r.Namespace, f.Extension)
			if x == nil || w.filterInvalid(x) {
				bad("HTTPFilter %s", f.Extension)
				continue
			}
			if !slices.Contains(refs, x) { // named twice it is in force once
				refs = append(refs, x)
				e.mutate(x)
			}
		}
	}
	if seen[model.Redirect] && seen[model.Rewrite] {
		bad("redirect and rewrite")
	}
	return e, refs
}

// filterAllowed: which kinds a rule and a backend may have.
func filterAllowed(route model.RouteKind, f model.FilterKind, backend bool) bool {
	switch f {
	case model.RequestHeaders, model.ResponseHeaders, model.Mirror:
		return true
	case model.Rewrite, model.Redirect:
		return route == model.HTTPRoute
	case model.CORS:
		return route == model.HTTPRoute && !backend
	case model.Extension:
		return !backend
	}
	return false
}

// mutate adds a header_mutation's changes.
func (e *effects) mutate(f *model.HTTPFilter) {
	if f.Mutation == nil {
		return
	}
	e.request = append(e.request, f.Mutation.Request...)
	e.query = append(e.query, f.Mutation.Query...)
	e.response = append(e.response, f.Mutation.Response...)
}

// Types of HTTPFilter, for "of the same type" in 10.7's overriding.
func isRBAC(f *model.HTTPFilter) bool     { return f.RBAC != nil }
func isAuthz(f *model.HTTPFilter) bool    { return f.ExtAuthz != nil }
func isSelector(f *model.HTTPFilter) bool { return len(f.HeaderToMetadata) > 0 }

// ruleEffects are the effects of a rule on a port of s, or, where rule is nil, of
// the port itself: the rule's own filters, those that target every route of the
// service, then the service's own, of which a producer's route replaces what it
// has itself (10.7).
func (w *world) ruleEffects(s *service, r *model.Route, rule *model.Rule) effects {
	var e effects
	var level []*model.HTTPFilter // route level
	producer := true
	if rule != nil {
		producer = r.Namespace == s.name.Namespace
		e, level = w.plain(r, rule, rule.Filters, false)
		if rule.Invalid != "" {
			e.invalid = rule.Invalid
		}
		if w.twice(r) {
			e.invalid = "two routes of this name"
		}
		if len(rule.Backends) > maxBackends {
			e.invalid = "too many backends"
		}
		for _, m := range rule.Matches {
			if m.Unread || pathLost(m) || !patternsValid(m) || slices.ContainsFunc(m.Headers, func(v model.ValueMatch) bool { return !tokenForm.MatchString(v.Name) }) {
				e.invalid = "a match that cannot be honoured"
			}
		}
	}
	for _, f := range w.filtersOf(s, model.ScopeRoute) {
		if w.filterInvalid(f) {
			e.invalid = "HTTPFilter " + filterName(f)
			continue
		}
		if slices.Contains(level, f) {
			continue // it is there already, where the rule names it
		}
		level = append(level, f)
		e.mutate(f)
	}
	var chain []*model.HTTPFilter
	for _, f := range w.filtersOf(s, model.ScopeChain) {
		if w.filterInvalid(f) {
			e.invalid = "HTTPFilter " + filterName(f)
			continue
		}
		chain = append(chain, f)
	}
	e.rbac = w.rbacOf(level, chain, producer)
	e.authz = authzOf(level, chain, producer)
	e.selectors = selectorsOf(level, chain, producer)
	if rule != nil && e.policy() && slices.ContainsFunc(rule.Matches, func(m model.Match) bool { return !plainMatch(m) }) {
		e.invalid = "a path that policy cannot be held against"
	}
	return e
}

// chainEdits are the service's own mutations, which run last.
func (w *world) chainEdits(s *service) (e effects) {
	for _, f := range w.filtersOf(s, model.ScopeChain) {
		if !w.filterInvalid(f) {
			e.mutate(f)
		}
	}
	return e
}

// inForce are the filters of a type: the route's, and the service's unless the
// producer's route has one of its own that does something.
func inForce(level, chain []*model.HTTPFilter, producer bool, is, does func(*model.HTTPFilter) bool) (out []*model.HTTPFilter) {
	for _, f := range level {
		if is(f) {
			out = append(out, f)
		}
	}
	if producer && slices.ContainsFunc(out, does) {
		return out
	}
	for _, f := range chain {
		if is(f) {
			out = append(out, f)
		}
	}
	return out
}

func (w *world) rbacOf(level, chain []*model.HTTPFilter, producer bool) (out []rbac) {
	for _, f := range inForce(level, chain, producer, isRBAC, func(f *model.HTTPFilter) bool { return !f.RBAC.Audit }) {
		out = append(out, rbac{filterName(f), *f.RBAC})
	}
	return out
}

// authzOf is the first that asks. A disabled one asks nobody; at a producer's route
// it stands in the service's place all the same.
func authzOf(level, chain []*model.HTTPFilter, producer bool) string {
	for _, f := range inForce(level, chain, producer, isAuthz, isAuthz) {
		if !f.ExtAuthz.Disabled {
			return filterName(f)
		}
	}
	return ""
}

func selectorsOf(level, chain []*model.HTTPFilter, producer bool) (out []selector) {
	selects := func(x model.HeaderToMetadata) bool { return x.Namespace == "" || x.Namespace == "envoy.lb" }
	does := func(f *model.HTTPFilter) bool { return slices.ContainsFunc(f.HeaderToMetadata, selects) }
	for _, f := range inForce(level, chain, producer, isSelector, does) {
		for _, x := range f.HeaderToMetadata {
			if selects(x) {
				out = append(out, selector{x.Header, x.Key})
			}
		}
	}
	return out
}

func patternsValid(m model.Match) bool {
	if g := m.GRPC; g != nil && g.Regex && (!patternValid(g.Service) || !patternValid(g.Method)) {
		return false
	}
	for _, v := range slices.Concat(firstOfEach(m.Headers), firstOfEach(m.Query)) {
		if v.Regex && !patternValid(v.Value) {
			return false
		}
	}
	return true
}

func redirectValid(r *model.RedirectFilter) bool {
	switch r.Status {
	case 301, 302, 303, 307, 308:
	default:
		return false
	}
	return r.Scheme == "" || r.Scheme == "http" || r.Scheme == "https"
}

// corsValid: an origin is "*" or scheme://host[:port].
func corsValid(c *model.CORSFilter) bool {
	for _, o := range c.Origins {
		if o == "*" {
			continue
		}
		scheme, rest, ok := strings.Cut(o, "://")
		if !ok || scheme == "" || rest == "" || strings.ContainsAny(rest, "/?#@ ") {
			return false
		}
		if u, err := url.Parse(strings.ReplaceAll(o, "*", "wild")); err != nil || u.Host == "" {
			return false
		}
	}
	return true
}

// denied is RBAC (10.7): every filter must allow. peer is empty where nobody is verified.
func denied(filters []rbac, peer, method, path string) bool {
	for _, f := range filters {
		if f.Audit {
			continue
		}
		some := slices.ContainsFunc(f.Policies, func(p model.Policy) bool { return policyHolds(p, peer, f.Deny, method, path) })
		if some == f.Deny {
			return true
		}
	}
	return false
}

// policyHolds: some principal does, and some permission, if there are any. A caller whom
// nobody knows may be anybody who is denied.
func policyHolds(p model.Policy, peer string, deny bool, method, path string) bool {
	return slices.ContainsFunc(p.Principals, func(x model.Principal) bool { return principalHolds(x, peer) || deny && peer == "" }) &&
		(len(p.Permissions) == 0 || slices.ContainsFunc(p.Permissions, func(x model.Permission) bool {
			if x.Method != "" {
				return x.Method == method
			}
			return strings.HasPrefix(path, x.PathPrefix)
		}))
}

// principalHolds: the exact identity, or spiffe://<any>/ns/<namespace>/sa/<something>.
func principalHolds(p model.Principal, peer string) bool {
	if peer == "" {
		return false
	}
	if p.SPIFFEID != "" {
		return p.SPIFFEID == peer
	}
	rest, ok := strings.CutPrefix(peer, "spiffe://")
	if !ok {
		return false
	}
	td, rest, ok := strings.Cut(rest, "/")
	if !ok || td == "" {
		return false
	}
	account, ok := strings.CutPrefix("/"+rest, "/ns/"+p.Namespace+"/sa/")
	return ok && account != ""
}
