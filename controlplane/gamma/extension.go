package gamma

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/mtls/spiffeid"
)

// MetadataNamespace is where metadata selects a subset (contract 10.7).
const MetadataNamespace = "envoy.lb"

// filterReader makes one HTTPFilter.
type filterReader struct {
	r     *Reader
	o     Object
	f     model.HTTPFilter
	flaws []Flaw
}

// Filter reads an HTTPFilter (contract 10.7). One that cannot be honoured
// is kept and marked, so that what it governs is refused.
func (r *Reader) Filter(o Object) *model.HTTPFilter {
	var h HTTPFilter
	c := &filterReader{r: r, o: o, f: model.HTTPFilter{Namespace: o.Namespace, Name: o.Name}}
	c.flaws = append(r.Strict(o, &h), r.OwnAnnotations(o, h.Annotations, AnnotationInvalid)...)
	mark, marked := r.own(h.Annotations, AnnotationInvalid)
	if marked && mark == "" {
		c.bad([]string{"metadata", "annotations", AnnotationInvalid}, "annotation %s: no reason: write why the filter is refused, or remove it", AnnotationInvalid)
	}
	c.scope(&h.Spec)
	c.targets(&h.Spec)
	c.form(&h.Spec, marked)
	f := &c.f
	cost := "the filter is refused: what it governs is refused too"
	if len(f.Targets) == 0 {
		switch {
		case f.Scope != model.ScopeRoute:
			cost = "the filter is refused, and governs nothing: it names no Service that can be read, so requests pass without it"
		case len(h.Spec.TargetRefs) > 0:
			cost = "the filter is refused, and governs no more than the rules that name it: none of its targetRefs can be read"
		}
	}
	if f.Invalid = mark; mark != "" {
		r.refuse(model.AllParts, o.String(), o.Line(), "marked as refused: %s; %s", mark, cost)
	}
	if len(c.flaws) > 0 {
		bare, _ := o.find(spec())
		r.Doubt = true
		r.Unaimed = len(f.Targets) == 0 && (f.Scope != model.ScopeRoute || len(h.Spec.TargetRefs) > 0 || bare == nil || slices.ContainsFunc(c.flaws, aims))
		// Half a policy is none.
		f.RBAC, f.ExtAuthz, f.HeaderToMetadata, f.Mutation = nil, nil, nil, nil
		n := 0
		for i, w := range c.flaws {
			if i < MaxRefusals {
				r.refuse(model.AllParts, o.String(), w.Line, "%s; %s", w.Reason, cost)
			}
			if mark == "" {
				f.Invalid = addReason(f.Invalid, r.because(w), &n)
			}
		}
	}
	return f
}

// aims: the flaw may hide whom a filter is for.
func aims(f Flaw) bool {
	at, _, _ := strings.Cut(strings.TrimPrefix(f.Path, "spec."), "[")
	return f.Path == beyond || at == "spec" || at == "targetRefs" || at == "scope" || f.Unknown && !strings.Contains(at, ".")
}

// Instead makes f, which is refused, govern what was governed before as well: of a filter that is not
// written well it cannot be told that it was to govern less.
func Instead(f, was *model.HTTPFilter) *model.HTTPFilter {
	out := *f
	out.Targets, out.Scope = slices.Clone(f.Targets), was.Scope
	for _, t := range was.Targets {
		if !slices.Contains(out.Targets, t) {
			out.Targets = append(out.Targets, t)
		}
	}
	return &out
}

func (c *filterReader) bad(path []string, format string, args ...any) {
	if len(c.flaws) <= MaxRefusals {
		c.flaws = append(c.flaws, Flaw{Line: c.o.At(path...), Reason: fmt.Sprintf(format, args...)})
	}
}

// missing is bad of what is missing in path, unless something that stands there could not be read: that was it.
func (c *filterReader) missing(path []string, format string, args ...any) {
	if !unread(c.flaws, path) {
		c.bad(path, format, args...)
	}
}

// unread reports whether a field directly in path, or path itself, could not be read. An unknown field beside
// spec may be spec, misspelt.
func unread(flaws []Flaw, path []string) bool {
	at := fieldPath(path)
	return slices.ContainsFunc(flaws, func(f Flaw) bool {
		i := strings.LastIndexAny(f.Path, ".[")
		return f.Path != "" && (f.Path == at || i >= 0 && f.Path[:i] == at || i < 0 && f.Unknown && at == "spec")
	})
}

// unreadIn reports whether the field at path, or one somewhere in it, could not be read.
func unreadIn(flaws []Flaw, path string) bool {
	return slices.ContainsFunc(flaws, func(f Flaw) bool {
		rest, ok := strings.CutPrefix(f.Path, path)
		return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
	})
}

// fieldPath is a path as text: spec.rules[0].matches.
func fieldPath(path []string) (field string) {
	for _, p := range path {
		if _, err := strconv.Atoi(p); err == nil {
			field += "[" + p + "]"
		} else {
			field = join(field, p)
		}
	}
	return field
}

// spec is the path of a field below spec.
func spec(path ...string) []string { return append([]string{"spec"}, path...) }

// enum finds a value of one of protobuf's enums: by its name, with the enum's
// prefix or without; unset is the first.
func (c *filterReader) enum(path []string, prefix, s string, names ...string) int {
	if s == "" || prefix != "" && s == prefix+"UNSPECIFIED" {
		return 0
	}
	if i := slices.Index(names, strings.TrimPrefix(s, prefix)); i >= 0 {
		return i
	}
	c.bad(path, "%s %.100q does not exist: write %s", fieldPath(path), s, strings.Join(names, " or "))
	return 0
}

func (c *filterReader) scope(s *HTTPFilterSpec) {
	scopes := []string{"SCOPE_ROUTE", "SCOPE_CHAIN", "SCOPE_INBOUND"}
	switch i := slices.Index(scopes, s.Scope); {
	case i >= 0:
		c.f.Scope = model.ScopeRoute + model.Scope(i)
	case s.Scope == "" || s.Scope == "SCOPE_UNSPECIFIED":
		c.f.Scope = model.ScopeRoute
	default:
		// Which was meant cannot be told: every request of the targets is refused.
		c.f.Scope = model.ScopeChain
		c.bad(spec("scope"), "spec.scope %.100q does not exist: write %s", s.Scope, strings.Join(scopes, " or "))
	}
}

func (c *filterReader) targets(s *HTTPFilterSpec) {
	have := map[string]bool{}
	for i, t := range s.TargetRefs {
		n := strconv.Itoa(i)
		service := model.ServiceName{Namespace: c.o.Namespace, Name: t.Name}
		// The filter is refused then, and must know the Service it was likely meant for: one left
		// out would be open.
		known := unreadIn(c.flaws, fmt.Sprintf("spec.targetRefs[%d]", i)) // a flaw already
		if !known && (t.Kind != "Service" || t.Group != "" && t.Group != "core") {
			c.bad(spec("targetRefs", n), "targetRefs[%d] is a %.100q of group %.100q: name a Service of group \"\"", i, t.Kind, t.Group)
		}
		if why := badService(service); why != "" {
			if !known {
				c.bad(spec("targetRefs", n, "name"), "targetRefs[%d]: %s", i, why)
			}
		} else if !have[t.Name] {
			have[t.Name] = true
			c.f.Targets = append(c.f.Targets, service)
		}
	}
	if len(s.TargetRefs) == 0 && c.f.Scope != model.ScopeRoute {
		c.missing(spec(), "%s without targetRefs is in force nowhere: name the Services", s.Scope)
	}
}

// form reads the one authoring form. A marked filter need not have one.
func (c *filterReader) form(s *HTTPFilterSpec, marked bool) {
	var forms []string
	for _, f := range []struct {
		name string
		set  bool
	}{{"filter with typedConfig", s.Filter != "" || s.TypedConfig != nil}, {"headerToMetadata", s.HeaderToMetadata != nil}, {"extAuthz", s.ExtAuthz != nil}, {"rbac", s.RBAC != nil}} {
		if f.set {
			forms = append(forms, f.name)
		}
	}
	switch {
	case len(forms) == 0 && marked:
		return
	case len(forms) == 0:
		c.missing(spec(), "the filter does nothing: write exactly one of rbac, extAuthz, headerToMetadata, and filter with typedConfig")
	case len(forms) > 1:
		c.bad(spec(), "%s in one filter: keep one, and write an HTTPFilter for each other", strings.Join(forms, " and "))
	case s.RBAC != nil:
		c.rbac(s.RBAC)
	case s.ExtAuthz != nil:
		c.extAuthz(s.ExtAuthz)
	case s.HeaderToMetadata != nil:
		c.headerToMetadata(s.HeaderToMetadata)
	default:
		c.opaque(s)
	}
	if c.f.Scope == model.ScopeInbound && len(forms) == 1 && s.RBAC == nil && s.ExtAuthz == nil {
		c.bad(spec("scope"), "SCOPE_INBOUND is for rbac and extAuthz: write SCOPE_ROUTE or SCOPE_CHAIN")
	}
}

func (c *filterReader) rbac(in *RBAC) {
	out := &model.RBAC{
		Audit: c.enum(spec("rbac", "mode"), "MODE_", in.Mode, "ENFORCE", "AUDIT") == 1,
		Deny:  c.enum(spec("rbac", "action"), "ACTION_", in.Action, "ALLOW", "DENY") == 1,
	}
	c.f.RBAC = out
	have := map[string]bool{}
	for i := range in.Policies {
		p := &in.Policies[i]
		at := func(path ...string) []string {
			return spec(append([]string{"rbac", "policies", strconv.Itoa(i)}, path...)...)
		}
		where := fmt.Sprintf("rbac.policies[%d]", i)
		switch {
		case p.Name == "":
			c.missing(at(), "%s: no name: write one", where)
		case have[p.Name]:
			c.bad(at("name"), "%s: name %.100q stands twice: choose another", where, p.Name)
		}
		have[p.Name] = true
		to := model.Policy{Name: p.Name}
		if len(p.Principals) == 0 {
			c.missing(at(), "%s: no principals: write one at least, with spiffeId or namespace", where)
		}
		for j, who := range p.Principals {
			n := strconv.Itoa(j)
			_, err := spiffeid.Parse(who.SPIFFEID)
			switch {
			case (who.SPIFFEID == "") == (who.Namespace == ""):
				c.missing(at("principals", n), "%s.principals[%d]: write exactly one of spiffeId and namespace", where, j)
			case who.Namespace != "" && len(validation.IsDNS1123Label(who.Namespace)) > 0:
				c.bad(at("principals", n, "namespace"), "%s.principals[%d]: namespace %.100q cannot be a name: write a namespace's", where, j, who.Namespace)
			case who.SPIFFEID != "" && err != nil:
				c.bad(at("principals", n, "spiffeId"), "%s.principals[%d]: %.300s: write an ID like spiffe://example.org/ns/shop/sa/web", where, j, err)
			}
			to.Principals = append(to.Principals, model.Principal{SPIFFEID: who.SPIFFEID, Namespace: who.Namespace})
		}
		for j, what := range p.Permissions {
			n := strconv.Itoa(j)
			switch up := strings.ToUpper(what.Method); {
			case (what.PathPrefix == "") == (what.Method == ""):
				c.missing(at("permissions", n), "%s.permissions[%d]: write exactly one of pathPrefix and method", where, j)
			case what.PathPrefix != "" && badPolicyPath(what.PathPrefix) != "":
				c.bad(at("permissions", n, "pathPrefix"), "%s.permissions[%d]: pathPrefix %.200q %s", where, j, what.PathPrefix, badPolicyPath(what.PathPrefix))
			case what.Method != up && slices.Contains(methods, up):
				c.bad(at("permissions", n, "method"), "%s.permissions[%d]: no request has the method %q: write %s", where, j, what.Method, up)
			case what.Method != "" && !isToken(what.Method):
				c.bad(at("permissions", n, "method"), "%s.permissions[%d]: %.100q is no method: write one like GET", where, j, what.Method)
			}
			to.Permissions = append(to.Permissions, model.Permission{PathPrefix: what.PathPrefix, Method: what.Method})
		}
		out.Policies = append(out.Policies, to)
	}
}

func isToken(s string) bool {
	_, ok := fieldName(s)
	return ok
}

func (c *filterReader) extAuthz(in *ExtAuthz) {
	c.f.ExtAuthz = &model.ExtAuthz{Disabled: in.Disabled, NoBody: in.DisableRequestBodyBuffering}
	if len(in.ContextExtensions) > 0 {
		c.f.ExtAuthz.ContextExtensions = in.ContextExtensions
		if in.Disabled {
			c.bad(spec("extAuthz", "contextExtensions"), "extAuthz: contextExtensions where it is disabled: keep one of the two")
		}
	}
}

func (c *filterReader) headerToMetadata(in *HeaderToMetadata) {
	if len(in.Rules) == 0 {
		c.missing(spec("headerToMetadata"), "headerToMetadata without rules: write one at least")
	}
	for i, rule := range in.Rules {
		n := strconv.Itoa(i)
		low, ok := fieldName(rule.Header)
		switch {
		case ok:
		case rule.Header == "":
			c.missing(spec("headerToMetadata", "rules", n), "headerToMetadata.rules[%d]: no header: write the name of one", i)
		default:
			c.bad(spec("headerToMetadata", "rules", n, "header"), "headerToMetadata.rules[%d]: header name %.100q is not a field name: letters, digits and - only", i, rule.Header)
		}
		if rule.MetadataKey == "" {
			c.missing(spec("headerToMetadata", "rules", n), "headerToMetadata.rules[%d]: no metadataKey: write the key of the endpoints' metadata", i)
		}
		to := model.HeaderToMetadata{Header: low, Key: rule.MetadataKey, Namespace: rule.MetadataNamespace}
		if to.Namespace == "" {
			to.Namespace = MetadataNamespace
		}
		c.f.HeaderToMetadata = append(c.f.HeaderToMetadata, to)
	}
}

// The filter and the two messages that the opaque form may be of.
const (
	MutationFilter   = "envoy.filters.http.header_mutation"
	MutationType     = "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation"
	mutationPerRoute = MutationType + "PerRoute"
)

// typedForms have a form of ours, which is the only one that is read.
var typedForms = map[string]string{
	"envoy.filters.http.rbac":               "rbac",
	"envoy.filters.http.ext_authz":          "extAuthz",
	"envoy.filters.http.header_to_metadata": "headerToMetadata",
}

// opaque reads a header_mutation; there is no Envoy that anything else could be for.
func (c *filterReader) opaque(s *HTTPFilterSpec) {
	switch typed := typedForms[s.Filter]; {
	case typed != "":
		c.bad(spec("filter"), "filter %s in Envoy's form is not read: write spec.%s in its place", s.Filter, typed)
		return
	case s.Filter == "":
		c.missing(spec(), "typedConfig without filter: write filter: %s", MutationFilter)
		return
	case s.Filter != MutationFilter:
		c.bad(spec("filter"), "filter %.100q is not read, there is no Envoy here: write rbac, extAuthz or headerToMetadata, or filter %s", s.Filter, MutationFilter)
		return
	case s.TypedConfig == nil:
		c.missing(spec(), "filter %s without typedConfig: write it, with @type type.googleapis.com/%s", s.Filter, MutationType)
		return
	}
	var m headerMutation
	d := decoder{base: c.o.Base, proto: true}
	d.into(s.TypedConfig.node, &m, "spec.typedConfig")
	_, kind, found := strings.Cut(m.Type, "/")
	if !found || kind != MutationType && kind != mutationPerRoute {
		c.bad(spec("typedConfig", "@type"), "typedConfig: @type %.200q is not read: write type.googleapis.com/%s, or type.googleapis.com/%s", m.Type, MutationType, mutationPerRoute)
		return
	}
	for _, f := range d.flaws {
		f.Path = camel(f.Path) // as other paths spell it; the reason has it as it was written
		c.flaws = append(c.flaws, f)
	}
	at := func(path ...string) []string { return spec(append([]string{"typedConfig"}, path...)...) }
	if m.MostSpecific != nil && (*m.MostSpecific || kind == mutationPerRoute) {
		c.bad(at("mostSpecificHeaderMutationsWins"), "typedConfig: mostSpecificHeaderMutationsWins cannot be chosen: the route's mutations run first, then the service's; remove it")
	}
	for _, t := range []struct {
		name string
		n    int
	}{{"requestTrailersMutations", len(m.Mutations.RequestTrailers)}, {"responseTrailersMutations", len(m.Mutations.ResponseTrailers)}} {
		if t.n > 0 {
			c.bad(at("mutations", t.name), "typedConfig: %s are not built: remove them", t.name)
		}
	}
	out := &model.Mutation{}
	out.Request = c.fieldMutations(m.Mutations.Request, "requestMutations")
	out.Query = c.paramMutations(m.Mutations.Query)
	out.Response = c.fieldMutations(m.Mutations.Response, "responseMutations")
	c.f.Mutation = out
}

// AppendActions are Envoy's, in the order of model.MutationKind.
var AppendActions = []string{"APPEND_IF_EXISTS_OR_ADD", "ADD_IF_ABSENT", "OVERWRITE_IF_EXISTS_OR_ADD", "OVERWRITE_IF_EXISTS"}

func (c *filterReader) fieldMutations(in []fieldMutation, list string) (out []model.MutationOp) {
	for i := range in {
		m := &in[i]
		at := func(path ...string) []string {
			return spec(append([]string{"typedConfig", "mutations", list, strconv.Itoa(i)}, path...)...)
		}
		where := fmt.Sprintf("typedConfig.mutations.%s[%d]", list, i)
		if unreadIn(c.flaws, fieldPath(at())) {
			continue // a flaw already
		}
		var op model.MutationOp
		name := ""
		switch {
		case m.RemoveOnMatch != nil:
			c.bad(at("removeOnMatch"), "%s: removeOnMatch is not built: write a remove for each header", where)
			continue
		case (m.Remove == nil) == (m.Append == nil):
			c.missing(at(), "%s: write exactly one of remove and append", where)
			continue
		case m.Remove != nil:
			op.Kind, name = model.RemoveAll, *m.Remove
		default:
			a := m.Append
			if a.Append != nil {
				c.bad(at("append", "append"), "%s: append is not read inside append: write appendAction, which is one of %s", where, strings.Join(AppendActions, ", "))
			}
			name, op.Kind = a.Header.Key, model.MutationKind(c.enum(at("append", "appendAction"), "", a.AppendAction, AppendActions...))
			text := a.Header.Value
			if len(a.Header.RawValue) > 0 {
				if text != "" {
					c.bad(at("append", "header"), "%s: value and rawValue: keep one", where)
				}
				text = string(a.Header.RawValue)
			}
			op.Value = c.literal(at("append", "header"), where, text)
			if why := badValue(fmt.Sprintf("%.100s", name), op.Value); why != "" {
				c.bad(at("append", "header"), "%s: %s", where, why)
			}
			if op.Value == "" && !a.KeepEmptyValue {
				// As in Envoy. It is said, for few expect it.
				c.r.Report(c.o.String(), c.o.At(at("append")...), "%s: an empty value without keepEmptyValue changes nothing: write keepEmptyValue: true, or remove the mutation", where)
				continue
			}
		}
		var why string
		if op.Name, why = writable(name); why != "" {
			c.bad(at(), "%s: %s", where, why)
		}
		out = append(out, op)
	}
	return out
}

func (c *filterReader) paramMutations(in []paramMutation) (out []model.MutationOp) {
	for i := range in {
		m := &in[i]
		at := func(path ...string) []string {
			return spec(append([]string{"typedConfig", "mutations", "queryParameterMutations", strconv.Itoa(i)}, path...)...)
		}
		where := fmt.Sprintf("typedConfig.mutations.queryParameterMutations[%d]", i)
		if unreadIn(c.flaws, fieldPath(at())) {
			continue // a flaw already
		}
		var op model.MutationOp
		switch {
		case (m.Remove == nil) == (m.Append == nil):
			c.missing(at(), "%s: write exactly one of remove and append", where)
			continue
		case m.Remove != nil:
			op.Kind, op.Name = model.RemoveAll, *m.Remove
		case (m.Append.Record == nil) == (m.Append.Entry == nil):
			c.missing(at("append"), "%s: write record, with key and value", where)
			continue
		default:
			op.Kind = model.MutationKind(c.enum(at("append", "action"), "", m.Append.Action, AppendActions...))
			if r := m.Append.Record; r != nil {
				op.Name, op.Value = r.Key, c.literal(at("append", "record"), where, r.Value)
			} else {
				op.Name, op.Value = m.Append.Entry.Key, c.literal(at("append", "entry"), where, string(m.Append.Entry.Value))
			}
		}
		if op.Name == "" || !httpmsg.ValidValue([]byte(op.Name)) || !httpmsg.ValidValue([]byte(op.Value)) {
			c.bad(at(), "%s: parameter %.100q: a name that is not empty, and no control characters", where, op.Name)
		}
		out = append(out, op)
	}
	return out
}

// literal undoes Envoy's escape of a percent sign. A single one begins a
// substitution there, like %REQ(x)%, which nothing here could make.
func (c *filterReader) literal(path []string, where, s string) string {
	if strings.Contains(strings.ReplaceAll(s, "%%", ""), "%") {
		c.bad(path, "%s: value %.200q: substitutions of Envoy are not built: write text, and %%%% for a percent sign", where, s)
	}
	return strings.ReplaceAll(s, "%%", "%")
}
