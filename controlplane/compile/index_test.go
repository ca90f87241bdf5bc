package compile_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
	"aether/dataplane/snapshot/snapshottest"
	"aether/e2e/testseed"
)

var (
	seed = flag.Uint64("seed", 0, "seed of the random meshes; 0: of the environment (testseed)")
	runs = flag.Int("meshes", testseed.Count(30, 100), "random meshes a property")
)

// each runs a property over random meshes of a printed seed.
func each(t *testing.T, property func(t *testing.T, r *rand.Rand, m *model.Mesh)) {
	t.Helper()
	s := *seed
	if s == 0 {
		s = testseed.Seed(t)
	}
	t.Logf("seed %d", s)
	for i := range *runs {
		r := rand.New(rand.NewPCG(s, uint64(i)))
		m := modeltest.RandomMesh(r)
		if i%3 > 0 {
			m = modeltest.LivelyMesh(r)
		}
		property(t, r, m)
		if t.Failed() {
			t.Fatalf("mesh %d of -seed %d", i, s)
		}
	}
}

// diff is the first line in which two texts differ, from the byte at which they do.
func diff(a, b string) string {
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range min(len(x), len(y)) {
		if x[i] == y[i] {
			continue
		}
		k := 0
		for k < min(len(x[i]), len(y[i])) && x[i][k] == y[i][k] {
			k++
		}
		from := max(0, k-200)
		return fmt.Sprintf("%.60s...\ngot  ...%.500s\nwant ...%.500s", x[i], x[i][from:], y[i][from:])
	}
	return fmt.Sprintf("%d lines, want %d", len(x), len(y))
}

func of[T any](list []T, is func(*T) bool) (in, out []T) {
	for i := range list {
		if is(&list[i]) {
			in = append(in, list[i])
		} else {
			out = append(out, list[i])
		}
	}
	return in, out
}

// change replaces something of m by what a random mesh has in its place, and
// tells x of it.
func change(r *rand.Rand, m *model.Mesh, x *compile.Index) string {
	n := modeltest.RandomMesh(r)
	if r.IntN(2) == 0 {
		n = modeltest.LivelyMesh(r)
	}
	name := func() model.ServiceName {
		names := []model.ServiceName{{Namespace: "shop", Name: "cart"}}
		for _, w := range [][]model.Endpoint{m.Endpoints, n.Endpoints} {
			for i := range w {
				names = append(names, w[i].Service)
			}
		}
		for _, w := range [][]model.Service{m.Services, n.Services} {
			for i := range w {
				names = append(names, w[i].Name)
			}
		}
		return names[r.IntN(len(names))]
	}()
	switch r.IntN(12) {
	case 0:
		in, _ := of(n.Endpoints, func(e *model.Endpoint) bool { return e.Service == name })
		_, rest := of(m.Endpoints, func(e *model.Endpoint) bool { return e.Service == name })
		m.Endpoints = append(rest, in...)
		x.SetEndpoints(name, in)
		return "endpoints of " + name.String()
	case 1: // the everyday change
		in, rest := of(m.Endpoints, func(e *model.Endpoint) bool { return e.Service == name })
		for i := range in {
			if r.IntN(2) == 0 {
				in[i].Health, in[i].Weight = model.Health(r.IntN(4)), uint32(r.IntN(3))
				if r.IntN(4) == 0 {
					in[i].Metadata = map[string]string{"k" + strconv.Itoa(r.IntN(3)): "v"}
				}
			}
		}
		m.Endpoints = append(rest, in...)
		x.SetEndpoints(name, slices.Clone(in))
		return "health of " + name.String()
	case 2:
		in, _ := of(n.Services, func(s *model.Service) bool { return s.Name == name })
		_, rest := of(m.Services, func(s *model.Service) bool { return s.Name == name })
		m.Services = append(rest, in...)
		x.SetServices(name, in)
		return "Services " + name.String()
	case 3:
		m.Catalog = slices.DeleteFunc(slices.Clone(m.Catalog), func(o model.ServiceName) bool { return o == name })
		in := r.IntN(2) == 0
		if in {
			m.Catalog = append(m.Catalog, name)
		}
		x.SetCatalog(name, in)
		return "catalog " + name.String()
	case 4:
		_, m.Retained = of(m.Retained, func(k *model.Retained) bool { return k.Service == name })
		var in []model.Retained
		if r.IntN(2) == 0 {
			in = []model.Retained{{Service: name, Ports: []uint16{8080}}}
		}
		m.Retained = append(m.Retained, in...)
		x.SetRetained(name, in)
		return "retained " + name.String()
	case 5:
		m.Workloads = n.Workloads
		x.SetWorkloads(n.Workloads)
		return "workloads"
	case 11:
		if len(m.Workloads) > 0 { // who else would notice
			name = m.Workloads[r.IntN(len(m.Workloads))].Service()
		}
		in, _ := of(n.Policies, func(p *model.EndpointPolicy) bool { return p.Service == name })
		_, rest := of(m.Policies, func(p *model.EndpointPolicy) bool { return p.Service == name })
		m.Policies = append(rest, in...)
		x.SetPolicies(name, in)
		return "EndpointPolicies of " + name.String()
	case 9:
		m.Semantics, m.SameNode = n.Semantics, n.SameNode
		x.SetSettings(n.Semantics, n.SameNode)
		return "settings"
	case 10:
		m.Region, m.Zone = n.Region, n.Zone
		x.SetLocality(n.Region, n.Zone)
		return "locality"
	case 6:
		list := m.Filters
		if r.IntN(2) == 0 || len(list) == 0 {
			list = n.Filters
		}
		if len(list) == 0 {
			return "nothing"
		}
		f := list[r.IntN(len(list))]
		same := func(o *model.HTTPFilter) bool { return o.Namespace == f.Namespace && o.Name == f.Name }
		in, _ := of(n.Filters, same)
		_, rest := of(m.Filters, same)
		m.Filters = append(rest, in...)
		x.SetFilters(f.Namespace, f.Name, in)
		return "HTTPFilter " + f.Namespace + "/" + f.Name
	}
	list := m.Routes
	if r.IntN(2) == 0 || len(list) == 0 {
		list = n.Routes
	}
	if len(list) == 0 {
		return "nothing"
	}
	o := list[r.IntN(len(list))]
	same := func(p *model.Route) bool {
		return p.Kind == o.Kind && p.Namespace == o.Namespace && p.Name == o.Name
	}
	in, _ := of(n.Routes, same)
	_, rest := of(m.Routes, same)
	m.Routes = append(rest, in...)
	x.SetRoutes(o.Kind, o.Namespace, o.Name, in)
	return "route " + o.Namespace + "/" + o.Name
}

// TestIndex: an index that is told of one change after the other gives what a
// compile of the whole gives, problems too, and no snapshot changes after it was given.
func TestIndex(t *testing.T) {
	each(t, func(t *testing.T, r *rand.Rand, m *model.Mesh) {
		x := compile.NewIndex(m)
		if r.IntN(2) == 0 {
			x.Update()
		}
		var last *snapshot.Snapshot
		lastText := ""
		var changes []string
		for range 12 {
			for range 1 + r.IntN(2) {
				changes = append(changes, change(r, m, x))
			}
			got, gotProblems := x.Update()
			want, wantProblems := compile.Compile(m)
			if a, b := snapshottest.Text(got), snapshottest.Text(want); a != b {
				t.Fatalf("after %s:\n%s", strings.Join(changes, ", "), diff(a, b))
			}
			if !slices.Equal(gotProblems, wantProblems) {
				t.Fatalf("after %s: problems\n%s", strings.Join(changes, ", "), diff(lines(gotProblems), lines(wantProblems)))
			}
			if last != nil && snapshottest.Text(last) != lastText {
				t.Fatalf("after %s: the snapshot before changed:\n%s", strings.Join(changes, ", "), diff(snapshottest.Text(last), lastText))
			}
			last, lastText = got, snapshottest.Text(got)
			if again, _ := x.Update(); again != got {
				t.Fatal("another snapshot where nothing changed")
			}
		}
	})
}

func lines(p []model.Problem) string {
	var b strings.Builder
	for _, x := range p {
		fmt.Fprintf(&b, "%+v\n", x)
	}
	return b.String()
}

// TestIndexForgets: names that nothing speaks of any more take no room, and the
// places of backends are used again.
func TestIndexForgets(t *testing.T) {
	x := compile.NewIndex(modeltest.Mesh(t, "pods shop/cart 8080"))
	x.Update()
	for i := range 3000 {
		name := fmt.Sprintf("pay/s%d", i)
		n := model.ServiceName{Namespace: "pay", Name: name[len("pay/"):]}
		m := modeltest.Mesh(t, "pods "+name+" 8080,9090\nservice "+name+" 10.96.0.1\nfilter pay/f target="+n.Name+" rbac\nroute pay/r "+n.Name+"\nrule to=gone:80")
		x.SetEndpoints(n, m.Endpoints)
		x.SetServices(n, m.Services)
		x.SetFilters("pay", "f", m.Filters)
		x.SetRoutes(model.HTTPRoute, "pay", "r", m.Routes)
		x.Update()
		x.SetEndpoints(n, nil)
		x.SetServices(n, nil)
		x.SetFilters("pay", "f", nil)
		x.SetRoutes(model.HTTPRoute, "pay", "r", nil)
		x.Update()
	}
	s, problems := x.Update()
	if len(problems) > 0 || len(s.Services()) != 1 || len(s.Backends()) > 10 || compile.Names(x) != 1 {
		t.Errorf("%v; %d services, %d backends, %d names", problems, len(s.Services()), len(s.Backends()), compile.Names(x))
	}
}

// TestRenumber: a mesh that shrinks gives the places of its backends back, and
// its services keep their endpoints.
func TestRenumber(t *testing.T) {
	m := modeltest.Mesh(t, "pods shop/cart*3 8080,9000=tcp")
	for i := range 3000 {
		m.Endpoints = append(m.Endpoints, modeltest.Mesh(t, fmt.Sprintf("pods pay/s%d 8080", i)).Endpoints...)
	}
	x := compile.NewIndex(m)
	x.Update()
	_, m.Endpoints = of(m.Endpoints, func(e *model.Endpoint) bool {
		if e.Service.Namespace == "pay" {
			x.SetEndpoints(e.Service, nil)
		}
		return e.Service.Namespace == "pay"
	})
	before, _ := x.Update()
	x.SetCatalog(model.ServiceName{Namespace: "pay", Name: "other"}, true)
	m.Catalog = []model.ServiceName{{Namespace: "pay", Name: "other"}}
	s, _ := x.Update()
	want, _ := compile.Compile(m)
	if len(before.Backends()) < 3000 || len(s.Backends()) != 2 || snapshottest.Text(s) != snapshottest.Text(want) {
		t.Errorf("%d backends, then %d:\n%s", len(before.Backends()), len(s.Backends()), diff(snapshottest.Text(s), snapshottest.Text(want)))
	}
}
