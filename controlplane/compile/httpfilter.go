package compile

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// httpFilter is one HTTPFilter (contract 10.7), compiled.
type httpFilter struct {
	*model.HTTPFilter
	object   string // "HTTPFilter shop/x"
	invalid  string // not empty: why it cannot be honoured; what it governs is refused
	targets  []model.ServiceName
	problems []model.Problem

	rbac      *snapshot.RBAC
	authz     *snapshot.Authz
	disabled  bool // extAuthz, switched off
	metadata  bool // headerToMetadata
	selectors []snapshot.Selector

	request, query, response []snapshot.Op
}

// decides reports whether access to the filter's targets hangs on it at the caller.
func (f *httpFilter) decides() bool {
	return f.Scope != model.ScopeInbound && (f.invalid != "" || f.authz != nil || !(f.rbac == nil || f.rbac.Audit))
}

// compileFilters compiles the objects of one name; of more than one none is
// honoured, for nothing says which is meant.
func compileFilters(objects []model.HTTPFilter) []*httpFilter {
	out := make([]*httpFilter, len(objects))
	for i := range objects {
		f := &httpFilter{HTTPFilter: &objects[i], object: "HTTPFilter " + objects[i].Namespace + "/" + objects[i].Name}
		f.read()
		if len(objects) > 1 && f.invalid == "" {
			f.refuse("there are two HTTPFilters of this name: delete one")
		}
		for _, t := range f.Targets {
			if t.Namespace != f.Namespace {
				f.problems = append(f.problems, problem(f.object, "target Service %s is of another namespace, which is not this filter's to govern: it is left out; write the filter there", t))
			} else if !slices.Contains(f.targets, t) {
				f.targets = append(f.targets, t)
			}
		}
		if len(f.Targets) == 0 && (f.Scope == model.ScopeChain || f.Scope == model.ScopeInbound) {
			p := problem(f.object, "it names no target and governs nothing: name a Service of its namespace in targetRefs")
			if f.Invalid != "" {
				p.Part = model.AllParts
			}
			f.problems = append(f.problems, p)
		}
		out[i] = f
	}
	if len(out) > 1 {
		slices.SortFunc(out, func(a, b *httpFilter) int { return compareJSON(a.HTTPFilter, b.HTTPFilter) })
	}
	return out
}

// compareJSON is a total order of objects but for equal ones. It is slow, and
// needed only where two have one name.
func compareJSON(a, b any) int {
	x, errA := json.Marshal(a)
	y, errB := json.Marshal(b)
	if errA != nil || errB != nil { // plain values: it cannot be
		panic(fmt.Sprint("compile: a model value that is no JSON: ", errA, errB))
	}
	return cmp.Compare(string(x), string(y))
}

func (f *httpFilter) refuse(format string, args ...any) {
	if f.invalid == "" {
		f.invalid = fmt.Sprintf(format, args...)
		f.problems = append(f.problems, problem(f.object, "%s; what it governs is refused until that is mended", f.invalid))
	}
}

// read checks the filter and compiles its one form.
func (f *httpFilter) read() {
	if f.Invalid != "" {
		f.refuse("%s", f.Invalid)
		f.problems[len(f.problems)-1].Part = model.AllParts
		return
	}
	forms := 0
	for _, is := range []bool{f.RBAC != nil, f.ExtAuthz != nil, f.HeaderToMetadata != nil, f.Mutation != nil} {
		if is {
			forms++
		}
	}
	switch {
	case forms != 1:
		f.refuse("it has %d of rbac, extAuthz, headerToMetadata and header_mutation: write exactly one", forms)
	case f.Scope < model.ScopeRoute || f.Scope > model.ScopeInbound:
		f.refuse("unknown scope %d: use SCOPE_ROUTE, SCOPE_CHAIN or SCOPE_INBOUND", f.Scope)
	case f.Scope == model.ScopeInbound && f.RBAC == nil && f.ExtAuthz == nil:
		f.refuse("at SCOPE_INBOUND only rbac and extAuthz can be honoured: use another scope")
	case f.RBAC != nil:
		f.readRBAC(f.RBAC)
	case f.ExtAuthz != nil:
		f.readAuthz(f.ExtAuthz)
	case f.HeaderToMetadata != nil:
		f.readMetadata()
	default:
		m := f.Mutation
		why := tooManyOps(len(m.Request) + len(m.Query) + len(m.Response))
		if why != "" {
			f.refuse("%s", why)
			return
		}
		if f.request, why = mutationOps(f.Mutation.Request, true); why == "" {
			if f.response, why = mutationOps(f.Mutation.Response, true); why == "" {
				f.query, why = mutationOps(f.Mutation.Query, false)
			}
		}
		if why != "" {
			f.refuse("%s", why)
		}
	}
}

func (f *httpFilter) readRBAC(r *model.RBAC) {
	for i, p := range r.Policies {
		if len(p.Principals) == 0 {
			f.refuse("policy %d (%s) names no principal: name one by spiffeId or namespace", i+1, p.Name)
			return
		}
		for _, q := range p.Principals {
			if (q.SPIFFEID == "") == (q.Namespace == "") {
				f.refuse("policy %d (%s): a principal has exactly one of spiffeId and namespace", i+1, p.Name)
				return
			}
		}
		for _, q := range p.Permissions {
			if (q.PathPrefix == "") == (q.Method == "") {
				f.refuse("policy %d (%s): a permission has exactly one of pathPrefix and method", i+1, p.Name)
				return
			}
			if !plainPath(q.PathPrefix, false) {
				f.refuse("policy %d (%s): pathPrefix %q could be walked around: %s", i+1, p.Name, q.PathPrefix, writePlain)
				return
			}
		}
	}
	f.rbac = &snapshot.RBAC{Name: f.object, Audit: r.Audit, Deny: r.Deny, Policies: r.Policies}
}

// writePlain is how to mend what plainPath says no to.
const writePlain = "policy is held against paths as applications read them; write it decoded, as /café, without %, \\, ;, // and dot segments"

// plainPath reports whether policy can be held against p: whether an application
// that decodes and resolves a path could read p in it. whole: the last segment of
// p is one; else p is the beginning of a text, and its last segment of another.
func plainPath(p string, whole bool) bool {
	if strings.ContainsAny(p, `%\;`) || strings.Contains(p, "//") {
		return false
	}
	segments := strings.Split(p, "/")
	if !whole {
		segments = segments[:len(segments)-1]
	}
	return !slices.Contains(segments, ".") && !slices.Contains(segments, "..")
}

func (f *httpFilter) readAuthz(a *model.ExtAuthz) {
	switch {
	case a.Disabled && len(a.ContextExtensions) > 0:
		f.refuse("extAuthz is disabled and has contextExtensions: remove one of them")
	case a.Disabled:
		f.disabled = true
	default:
		f.authz = &snapshot.Authz{Name: f.object, ContextExtensions: a.ContextExtensions, NoBody: a.NoBody}
	}
}

func (f *httpFilter) readMetadata() {
	f.metadata = true
	for _, h := range f.HeaderToMetadata {
		name := strings.ToLower(h.Header)
		switch {
		case !token(name):
			f.refuse("%q is no field name", h.Header)
			return
		case h.Key == "":
			f.refuse("the rule for %s has no metadataKey", name)
			return
		case cmp.Or(h.Namespace, "envoy.lb") == "envoy.lb": // what else it is kept under means nothing here
			f.selectors = append(f.selectors, snapshot.Selector{Header: name, Key: h.Key})
		}
	}
}

// governs reports whether f is in force at a scope. One whose scope nobody
// knows is, as a refusal, at all of them.
func (f *httpFilter) governs(s model.Scope) bool {
	return f.Scope == s || f.Scope < model.ScopeRoute || f.Scope > model.ScopeInbound
}

// The two kinds of routes as a filter sees them.
const (
	producer = iota // of the service's own namespace, the port itself too
	consumer
)

// policy is what filters do to a service as a whole, at the source.
type policy struct {
	route, chain []*httpFilter // by name
	refusal      string        // not empty: the body of the 500 that every request gets
	base         [2]*snapshot.FilterChain
}

// policyOf gathers the filters that target s; nil: none does at the source.
func (x *Index) policyOf(s *service) *policy {
	if len(s.targetOf) == 0 {
		return nil
	}
	p := &policy{}
	for _, f := range s.targetOf {
		route, chain := f.governs(model.ScopeRoute), f.governs(model.ScopeChain)
		switch {
		case !route && !chain:
			continue
		case f.invalid != "":
			if p.refusal == "" {
				p.refusal = fmt.Sprintf("service %s is not served: %s, which governs it, cannot be honoured: %s\n", s.name, f.object, f.invalid)
			}
		case route:
			p.route = append(p.route, f)
		default:
			p.chain = append(p.chain, f)
		}
	}
	if len(p.route) == 0 && len(p.chain) == 0 && p.refusal == "" {
		return nil
	}
	p.base[producer], p.base[consumer] = fold(nil, nil, p, producer), fold(nil, nil, p, consumer)
	if why := pipeTooLong(p.base[producer]); why != "" && p.refusal == "" && s.exists {
		p.refusal = fmt.Sprintf("service %s is not served: %s\n", s.name, why)
		s.problems = append(s.problems, problem(s.rule, "%s; every request to it gets 500", why))
	}
	return p
}

// level is what one rule, or one backend of it, does of its own.
type level struct {
	filters                  []*httpFilter // its ExtensionRefs, in order
	request, query, response []snapshot.Op // its own edits and those of filters, in order
	cors                     *snapshot.CORS
	redirect                 *snapshot.Redirect
	rewrite                  *snapshot.Rewrite
	mirrors                  []snapshot.MirrorTo
}

func (l *level) empty() bool {
	return l == nil || len(l.filters) == 0 && len(l.request) == 0 && len(l.query) == 0 && len(l.response) == 0 &&
		l.cors == nil && l.redirect == nil && l.rewrite == nil && len(l.mirrors) == 0
}

// fold puts the levels of a request's way together: the rule's, the filters that
// target the service's routes, the backend's, the service's chain (contract 10.7).
//
// A policy at the route takes the place of the chain's of its type, but only on
// the producer's routes: a consumer must not switch a producer's policy off.
// There both are in force. What does nothing takes no place: an audit enforces
// nothing, and metadata of another namespace selects nothing.
func fold(own, backend *level, pol *policy, who int) *snapshot.FilterChain {
	if own.empty() && backend.empty() {
		if pol == nil {
			return emptyPipe
		}
		if done := pol.base[who]; done != nil {
			return done
		}
	}
	p := &snapshot.FilterChain{}
	var authz []*httpFilter
	var rbac, asked, off, selects bool // said at the route
	var seen []*httpFilter
	add := func(f *httpFilter, chain, edits bool) {
		if slices.Contains(seen, f) {
			return // referred to and targeted: once
		}
		seen = append(seen, f)
		instead := chain && who == producer
		switch {
		case f.rbac != nil && !(instead && rbac):
			p.RBAC = append(p.RBAC, *f.rbac)
		case f.authz != nil && !(instead && (asked || off)):
			authz = append(authz, f)
		case f.metadata && !(instead && selects):
			p.Selectors = append(p.Selectors, f.selectors...)
		}
		if edits {
			p.Request, p.Query, p.Response = append(p.Request, f.request...), append(p.Query, f.query...), append(p.Response, f.response...)
		}
	}
	if own != nil {
		p.CORS, p.Redirect, p.Rewrite, p.Mirrors = own.cors, own.redirect, own.rewrite, own.mirrors
		p.Request, p.Query, p.Response = slices.Clone(own.request), slices.Clone(own.query), slices.Clone(own.response)
		for _, f := range own.filters {
			add(f, false, false)
		}
	}
	if pol != nil {
		for _, f := range pol.route {
			add(f, false, true)
		}
	}
	for _, f := range seen {
		rbac, selects = rbac || f.rbac != nil && !f.rbac.Audit, selects || len(f.selectors) > 0
		asked, off = asked || f.authz != nil, off || f.disabled
	}
	if !backend.empty() {
		p.Request, p.Query, p.Response = append(p.Request, backend.request...), append(p.Query, backend.query...), append(p.Response, backend.response...)
		p.Mirrors = append(slices.Clip(p.Mirrors), backend.mirrors...)
		p.Rewrite = rewriteOver(p.Rewrite, backend.rewrite)
		p.Redirect = cmp.Or(backend.redirect, p.Redirect)
	}
	if pol != nil {
		for _, f := range pol.chain {
			add(f, true, true)
		}
	}
	p.Authz = askAll(authz)
	if isEmpty(p) {
		return emptyPipe
	}
	return p
}

// rewriteOver is the rule's rewrite with what the backend's says instead.
func rewriteOver(rule, backend *snapshot.Rewrite) *snapshot.Rewrite {
	if rule == nil || backend == nil {
		return cmp.Or(backend, rule)
	}
	out := *rule
	if backend.Host != nil {
		out.Host = backend.Host
	}
	if backend.Path.Kind != model.PathKept {
		out.Path = backend.Path
	}
	return &out
}

// askAll links the questions to be asked, in order; nil: none.
func askAll(filters []*httpFilter) *snapshot.Authz {
	var next *snapshot.Authz
	for i := len(filters) - 1; i >= 0; i-- {
		a := filters[i].authz
		if next != nil {
			linked := *a
			linked.Next = next
			a = &linked
		}
		next = a
	}
	return next
}

func isEmpty(p *snapshot.FilterChain) bool {
	return len(p.RBAC) == 0 && p.Authz == nil && len(p.Selectors) == 0 && p.CORS == nil && p.Redirect == nil && p.Rewrite == nil &&
		len(p.Request) == 0 && len(p.Query) == 0 && len(p.Response) == 0 && len(p.Mirrors) == 0
}

// refusePipe is that of rules and services that are refused because a filter
// cannot be honoured. Nothing is known of what the filter would have allowed, so
// spellings of a path are held against such a rule as against any policy.
var refusePipe = &snapshot.FilterChain{RBAC: []snapshot.RBAC{{Name: "a filter that cannot be honoured"}}}

// inbound is what filters do at the destination, for pods of a service; nil: nothing.
func inbound(filters []*httpFilter) *snapshot.FilterChain {
	p := &snapshot.FilterChain{}
	var authz []*httpFilter
	for _, f := range filters {
		switch {
		case !f.governs(model.ScopeInbound):
		case f.invalid != "":
			p.RBAC = append(p.RBAC, snapshot.RBAC{Name: f.object}) // nobody is allowed
		case f.rbac != nil:
			p.RBAC = append(p.RBAC, *f.rbac)
		case f.authz != nil:
			authz = append(authz, f)
		}
	}
	if p.Authz = askAll(authz); isEmpty(p) {
		return nil
	}
	return p
}

// mutationOps compiles the changes of a header_mutation. Those of fields obey
// the rules for fields; a parameter may have any name and value.
func mutationOps(in []model.MutationOp, fields bool) (out []snapshot.Op, why string) {
	for _, o := range in {
		op := snapshot.Op{Kind: o.Kind, Name: []byte(o.Name)}
		if fields {
			name, why := fieldName(o.Name)
			if why != "" {
				return nil, why
			}
			op.Name = []byte(name)
		}
		switch {
		case o.Kind > model.RemoveAll:
			return nil, fmt.Sprintf("unknown kind of change %d for %s", o.Kind, o.Name)
		case fields && !httpmsg.ValidValue([]byte(o.Value)):
			return nil, fmt.Sprintf("the value for %s holds a control character", o.Name)
		case o.Kind != model.RemoveAll:
			op.Value = []byte(o.Value)
		}
		out = append(out, op)
	}
	return out, ""
}
