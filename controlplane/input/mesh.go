package input

import (
	"maps"
	"reflect"

	"aether/dataplane/model"
)

// Whole is a mesh, and what of it is not in force, by key. Locality is the mesh's;
// Settings are base with what a mesh says of them, and nil if that is nothing.
func Whole(m *model.Mesh, problems []model.Problem, base Settings) Batch {
	b := Batch{
		Endpoints: map[model.ServiceName][]model.Endpoint{}, Services: map[model.ServiceName][]model.Service{},
		Routes: map[RouteKey][]model.Route{}, Filters: map[model.ServiceName][]model.HTTPFilter{},
		Policies: map[model.ServiceName][]model.EndpointPolicy{},
		Catalog:  map[model.ServiceName]bool{}, Workloads: map[string][]model.Workload{},
		Retained: map[model.ServiceName][]model.Retained{}, Problems: map[string][]model.Problem{},
		Locality: &Locality{m.Region, m.Zone},
	}
	for _, e := range m.Endpoints {
		b.Endpoints[e.Service] = append(b.Endpoints[e.Service], e)
	}
	for _, s := range m.Services {
		b.Services[s.Name] = append(b.Services[s.Name], s)
	}
	for _, r := range m.Routes {
		k := RouteKey{r.Kind, r.Namespace, r.Name}
		b.Routes[k] = append(b.Routes[k], r)
	}
	for _, f := range m.Filters {
		k := model.ServiceName{Namespace: f.Namespace, Name: f.Name}
		b.Filters[k] = append(b.Filters[k], f)
	}
	for _, p := range m.Policies {
		b.Policies[p.Service] = append(b.Policies[p.Service], p)
	}
	for _, n := range m.Catalog {
		b.Catalog[n] = true
	}
	for _, w := range m.Workloads {
		b.Workloads[w.ContainerID] = append(b.Workloads[w.ContainerID], w)
	}
	for _, r := range m.Retained {
		b.Retained[r.Service] = append(b.Retained[r.Service], r)
	}
	for _, p := range problems {
		b.Problems[p.Object] = append(b.Problems[p.Object], p)
	}
	if m.Semantics != model.Aether || m.SameNode != model.MTLS {
		base.Semantics, base.SameNode = m.Semantics, m.SameNode
		b.Settings = &base
	}
	return b
}

// Diff is what a source that said b says when its state has become next, both of them
// whole. Where b has Settings and next has none, they are base again.
func (b *Batch) Diff(next *Batch, base Settings) Batch {
	out := Batch{
		Endpoints: changes(b.Endpoints, next.Endpoints), Services: changes(b.Services, next.Services),
		Routes: changes(b.Routes, next.Routes), Filters: changes(b.Filters, next.Filters), Policies: changes(b.Policies, next.Policies),
		Catalog: changes(b.Catalog, next.Catalog), Workloads: changes(b.Workloads, next.Workloads),
		Retained: changes(b.Retained, next.Retained), Problems: changes(b.Problems, next.Problems),
		Namespaces: changes(b.Namespaces, next.Namespaces),
	}
	if !reflect.DeepEqual(b.Settings, next.Settings) {
		if out.Settings = next.Settings; out.Settings == nil {
			out.Settings = &base
		}
	}
	if next.Locality != nil && !reflect.DeepEqual(b.Locality, next.Locality) {
		out.Locality = next.Locality
	}
	return out
}

// changes are the keys whose values differ, gone ones with the zero value.
func changes[K comparable, V any](old, next map[K]V) map[K]V {
	out := map[K]V{}
	for k := range old {
		if _, ok := next[k]; !ok {
			out[k] = *new(V)
		}
	}
	for k, v := range next {
		if was, ok := old[k]; !ok || !reflect.DeepEqual(was, v) {
			out[k] = v
		}
	}
	return out
}

// Add makes b say what b says and then o says.
func (b *Batch) Add(o *Batch) {
	add(&b.Endpoints, o.Endpoints)
	add(&b.Services, o.Services)
	add(&b.Routes, o.Routes)
	add(&b.Filters, o.Filters)
	add(&b.Policies, o.Policies)
	add(&b.Catalog, o.Catalog)
	add(&b.Workloads, o.Workloads)
	add(&b.Retained, o.Retained)
	add(&b.Problems, o.Problems)
	add(&b.Namespaces, o.Namespaces)
	if o.Settings != nil {
		b.Settings = o.Settings
	}
	if o.Locality != nil {
		b.Locality = o.Locality
	}
}

func add[K comparable, V any](to *map[K]V, from map[K]V) {
	if *to == nil && len(from) > 0 {
		*to = make(map[K]V, len(from))
	}
	maps.Copy(*to, from)
}

// Problems are those that sources reported and then those of compiling what they said, without those that
// repeat a refusal which its source reports itself, with its place.
func Problems(reported, compiled []model.Problem) []model.Problem {
	type part struct{ object, part string }
	have := map[part]struct{}{}
	for i := range reported {
		if p := &reported[i]; p.Part != "" {
			have[part{p.Object, p.Part}] = struct{}{}
		}
	}
	for i := range compiled {
		p := &compiled[i]
		_, one := have[part{p.Object, p.Part}]
		_, all := have[part{p.Object, model.AllParts}]
		if p.Part == "" || !one && !all {
			reported = append(reported, *p)
		}
	}
	return reported
}
