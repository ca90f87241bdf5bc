package gamma

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"aether/dataplane/model"
)

// MaxGrant bounds the entries of a ReferenceGrant's from, and of its to; the
// Gateway API allows 16.
const MaxGrant = 64

// Grant is a ReferenceGrant: the routes in From may name the Services in To, which
// are in Namespace (contract 10.5).
type Grant struct {
	Namespace string
	From      []RoutesOf
	To        []string // "": every Service
}

// RoutesOf are the routes of a kind in a namespace.
type RoutesOf struct{ Kind, Namespace string }

// Grant reads a ReferenceGrant; nil: it is not in force.
func (r *Reader) Grant(o Object) *Grant {
	var g gatewayv1.ReferenceGrant
	flaws := append(r.Strict(o, &g), r.OwnAnnotations(o, g.Annotations)...)
	for _, l := range []struct {
		name string
		n    int
	}{{"from", len(g.Spec.From)}, {"to", len(g.Spec.To)}} {
		if l.n > MaxGrant {
			flaws = append(flaws, Flaw{Line: o.At("spec", l.name), Reason: fmt.Sprintf("spec.%s has %d entries, the limit is %d: write several grants", l.name, l.n, MaxGrant)})
		}
	}
	if r.Refuse(o, flaws, "the grant is not in force") {
		return nil
	}
	f := &Grant{Namespace: o.Namespace}
	if len(g.Spec.From) == 0 {
		r.Report(o.String(), o.At("spec", "from"), "spec.from is empty, and the grant permits nothing: write whose references it permits")
	}
	if len(g.Spec.To) == 0 {
		r.Report(o.String(), o.At("spec", "to"), "spec.to is empty, and the grant permits nothing: write to what it permits references")
	}
	// An entry that can be for nothing is left out and told; the others are in force.
	entry := func(list string, i int, why string) {
		r.Report(o.String(), o.At("spec", list, strconv.Itoa(i)), "spec.%s[%d]: %s; the entry permits nothing", list, i, why)
	}
	for i, from := range g.Spec.From {
		if why := badFrom(from); why != "" {
			entry("from", i, why)
		} else if from.Group == GatewayGroup {
			f.From = append(f.From, RoutesOf{string(from.Kind), string(from.Namespace)})
		}
	}
	for i, to := range g.Spec.To {
		name := string(value(to.Name, ""))
		switch why := badTo(to); {
		case why != "":
			entry("to", i, why)
		case to.Group != "" && to.Group != "core" || to.Kind != "Service":
		default:
			f.To = append(f.To, name)
		}
	}
	return f
}

// routeKinds are those whose references into other namespaces a ReferenceGrant permits.
var routeKinds = []string{KindHTTPRoute, KindGRPCRoute, KindTCPRoute, KindTLSRoute}

// badFrom says why an entry of from can be for no reference; empty: it can. What else than routes
// refers to something is other programs' affair.
func badFrom(from gatewayv1.ReferenceGrantFrom) string {
	kind := string(from.Kind)
	near := nearly(kind, append([]string{KindUDPRoute}, routeKinds...)...)
	switch {
	case kind == "":
		return "no kind: write one, like " + KindHTTPRoute
	case slices.Contains(routeKinds, kind) && from.Group != GatewayGroup:
		return fmt.Sprintf("group %.100q has no %s: write group %s", from.Group, kind, GatewayGroup)
	case from.Group == GatewayGroup && near != "":
		return fmt.Sprintf("kind %.100q does not exist: write %s", kind, near)
	case from.Namespace == "":
		return "no namespace: write that of the references"
	}
	if why := validation.IsDNS1123Label(string(from.Namespace)); len(why) > 0 {
		return fmt.Sprintf("namespace %.100q cannot be a name: %s", from.Namespace, strings.Join(why, "; "))
	}
	return ""
}

// badTo says why an entry of to can be for no Service, if it was meant to be; empty: it can.
func badTo(to gatewayv1.ReferenceGrantTo) string {
	kind, core := string(to.Kind), to.Group == "" || to.Group == "core"
	switch {
	case kind == "":
		return "no kind: write " + KindService
	case core && nearly(kind, KindService) != "":
		return fmt.Sprintf("kind %.100q does not exist: write %s", kind, KindService)
	case core && kind == KindService && to.Name != nil:
		if why := validation.IsDNS1123Label(string(*to.Name)); len(why) > 0 {
			return fmt.Sprintf("name %.100q cannot be a Service's name: %s", *to.Name, strings.Join(why, "; "))
		}
	}
	return ""
}

// nearly gives the one of kinds that s is with a typing error or two; empty: s is one of them, or like none.
func nearly(s string, kinds ...string) string {
	best, least := "", 3
	for _, k := range kinds {
		if s == k {
			return ""
		}
		if d := Distance(strings.ToLower(s), strings.ToLower(k)); d < least {
			best, least = k, d
		}
	}
	return best
}

// Permits reports whether one of grants lets routes name the Service.
func Permits(grants []*Grant, from RoutesOf, to model.ServiceName) bool {
	return slices.ContainsFunc(grants, func(g *Grant) bool {
		return g.Namespace == to.Namespace && slices.Contains(g.From, from) && (slices.Contains(g.To, "") || slices.Contains(g.To, to.Name))
	})
}

// Resolve is the route with the references into other namespaces marked that nothing permits, by
// permitted (contract 10.5). Those into the namespace of a parent may stand without (GEP-1294,
// decision 048), which controlplane/compile judges for each parent; the others are refused. What
// it gives shares nothing with f that it changed.
func (r *Reader) Resolve(f *Route, permitted func(from RoutesOf, to model.ServiceName) bool) model.Route {
	out := f.Route
	if len(f.foreign) > 0 {
		out.Rules = cloneRules(out.Rules)
	}
	for i := range f.foreign {
		ref := f.foreign[i].in(&out)
		if permitted(RoutesOf{out.Kind.String(), out.Namespace}, ref.Service) {
			continue
		}
		if slices.ContainsFunc(out.Parents, func(p model.ParentRef) bool { return p.Service.Namespace == ref.Service.Namespace }) {
			ref.Ungranted = true
			continue
		}
		ref.Invalid = fmt.Sprintf("RefNotPermitted: no ReferenceGrant in namespace %s lets %ss of namespace %s name Service %s: add one",
			ref.Service.Namespace, out.Kind, out.Namespace, ref.Service.Name)
		r.refuse(f.foreign[i].where, Label(out.Kind.String(), out.Namespace, out.Name), f.foreign[i].line, "%s: %s; %s", f.foreign[i].where, ref.Invalid, f.foreign[i].cost)
	}
	return out
}

// Foreign are the namespaces of the references that a ReferenceGrant has to permit,
// ascending, each once.
func (f *Route) Foreign() []string {
	var out []string
	for i := range f.foreign {
		out = append(out, f.foreign[i].in(&f.Route).Service.Namespace)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// cloneRules copies rules as deep as Resolve changes them.
func cloneRules(in []model.Rule) []model.Rule {
	filters := func(in []model.Filter) []model.Filter {
		in = slices.Clone(in)
		for i := range in {
			if m := in[i].Mirror; m != nil {
				m := *m
				in[i].Mirror = &m
			}
		}
		return in
	}
	out := slices.Clone(in)
	for i := range out {
		out[i].Filters = filters(out[i].Filters)
		out[i].Backends = slices.Clone(out[i].Backends)
		for j := range out[i].Backends {
			out[i].Backends[j].Filters = filters(out[i].Backends[j].Filters)
		}
	}
	return out
}
