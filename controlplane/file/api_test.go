package file

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/yaml"

	"aether/controlplane/gamma"
	"aether/controlplane/input"
	"aether/dataplane/model"
)

// TestSameFromAPI: the objects of random meshes, told one by one and in any order as an
// API server tells them, with some told twice and some deleted and told again, are the
// mesh that they are as files; and what was said on the way adds up to it.
func TestSameFromAPI(t *testing.T) {
	routes, named := 0, 0
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 7))
		m := apiMesh((&generator{Rand: r}).mesh())
		routes += len(m.Routes)
		events := apiEvents(t, m, &named)
		r.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })

		s := gamma.NewState("", input.Settings{})
		sum := input.Batch{Tables: input.Tables{Services: map[model.ServiceName][]model.Service{}, Routes: map[input.RouteKey][]model.Route{}, Filters: map[model.ServiceName][]model.HTTPFilter{}, Problems: map[string][]model.Problem{}}, Settings: &input.Settings{}}
		s.SlicesUnread("")
		for _, e := range events {
			if r.IntN(4) == 0 {
				e.set(s)
				e.unset(s)
				add(&sum, s.Take())
			}
			e.set(s)
			add(&sum, s.Take())
		}
		whole := s.Whole()
		for _, b := range []input.Batch{sum, whole} {
			got := &model.Mesh{Domain: m.Domain, TrustDomain: m.TrustDomain, Semantics: b.Settings.Semantics, SameNode: b.Settings.SameNode}
			for _, list := range b.Services {
				got.Services = append(got.Services, list...)
			}
			for _, list := range b.Routes {
				got.Routes = append(got.Routes, list...)
			}
			for _, list := range b.Filters {
				got.Filters = append(got.Filters, list...)
			}
			(&builder{mesh: got}).sort()
			if have, want := render(got), render(m); have != want {
				t.Fatalf("seed %d\ngot  %s\nwant %s\nproblems %v", seed, have, want, whole.Problems)
			}
		}
		if have, want := fmt.Sprint(sum.Problems), fmt.Sprint(whole.Problems); have != want {
			t.Fatalf("seed %d: said on the way %s, and in the end %s", seed, have, want)
		}
	}
	if routes < 300 || named < 30 {
		t.Errorf("only %d routes, %d named ports", routes, named)
	}
}

// apiMesh leaves of a mesh what an API server holds, without what only the
// annotations of files say.
func apiMesh(m *model.Mesh) *model.Mesh {
	out := &model.Mesh{Domain: m.Domain, TrustDomain: m.TrustDomain, Services: m.Services, Semantics: m.Semantics, SameNode: m.SameNode}
	bad := func(b model.BackendRef) bool {
		return b.Invalid != "" || slices.ContainsFunc(b.Filters, func(f model.Filter) bool { return f.Mirror != nil && f.Mirror.Backend.Invalid != "" })
	}
	for _, r := range m.Routes {
		if !slices.ContainsFunc(r.Rules, func(rule model.Rule) bool {
			return rule.Invalid != "" || slices.ContainsFunc(rule.Backends, bad) ||
				slices.ContainsFunc(rule.Filters, func(f model.Filter) bool { return f.Mirror != nil && f.Mirror.Backend.Invalid != "" })
		}) {
			out.Routes = append(out.Routes, r)
		}
	}
	for _, f := range m.Filters {
		if f.Invalid == "" {
			out.Filters = append(out.Filters, f)
		}
	}
	for i := range out.Services {
		for j := range out.Services[i].Ports {
			out.Services[i].Ports[j].Name = fmt.Sprint("p", j) // the API server wants them to differ
		}
	}
	return out
}

// apiEvent is an object that comes, and goes.
type apiEvent struct{ set, unset func(*gamma.State) }

// apiEvents are the objects of Dump, and the EndpointSlices that the Services need.
func apiEvents(t *testing.T, m *model.Mesh, named *int) (out []apiEvent) {
	for _, text := range strings.Split(string(Dump(m)), "\n---\n")[1:] {
		b, err := yaml.YAMLToJSON([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		var u map[string]any
		if err := json.Unmarshal(b, &u); err != nil { // as the client reads it
			t.Fatal(err)
		}
		kind, name := u["kind"].(string), u["metadata"].(map[string]any)
		ns, _ := name["namespace"].(string)
		if kind != "Service" {
			if kind != "ServiceAccount" && kind != "Node" {
				out = append(out, apiEvent{func(s *gamma.State) { s.Set(kind, u) }, func(s *gamma.State) { s.Delete(kind, ns, name["name"].(string)) }})
			}
			continue
		}
		var svc corev1.Service
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u, &svc); err != nil {
			t.Fatal(err)
		}
		out = append(out, apiEvent{func(s *gamma.State) { s.SetService(&svc) }, func(s *gamma.State) { s.Delete(kind, svc.Namespace, svc.Name) }})
	}
	for _, s := range m.Services {
		for _, p := range s.Ports { // a slice for each port: case 147
			if p.TargetName == "" || p.Target == 0 {
				continue
			}
			*named++
			number, proto := int32(p.Target), corev1.ProtocolTCP
			if p.UDP {
				proto = corev1.ProtocolUDP
			}
			slice := &discoveryv1.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Namespace: s.Name.Namespace, Name: s.Name.Name + p.Name, Labels: map[string]string{discoveryv1.LabelServiceName: s.Name.Name}},
				AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{}},
				Ports: []discoveryv1.EndpointPort{{Name: &p.Name, Port: &number, Protocol: &proto}},
			}
			out = append(out, apiEvent{func(s *gamma.State) { s.SetSlice(slice) }, func(s *gamma.State) { s.Delete("EndpointSlice", slice.Namespace, slice.Name) }})
		}
	}
	return out
}

// add applies what changed to a whole state.
func add(to *input.Batch, b input.Batch) {
	merge(to.Services, b.Services)
	merge(to.Routes, b.Routes)
	merge(to.Filters, b.Filters)
	merge(to.Problems, b.Problems)
	to.Settings = cmp.Or(b.Settings, to.Settings)
}

func merge[K comparable, V any](to, from map[K][]V) {
	for k, v := range from {
		if to[k] = v; len(v) == 0 {
			delete(to, k)
		}
	}
}
