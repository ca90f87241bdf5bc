package gamma

import (
	"fmt"
	"slices"

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
	for _, from := range g.Spec.From {
		if from.Group == GatewayGroup {
			f.From = append(f.From, RoutesOf{string(from.Kind), string(from.Namespace)})
		}
	}
	for _, to := range g.Spec.To {
		switch {
		case to.Group != "" && to.Group != "core" || to.Kind != "Service":
		case to.Name == nil:
			f.To = append(f.To, "")
		default:
			f.To = append(f.To, string(*to.Name))
		}
	}
	return f
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
