package compile_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

// endpoints renders a backend's set: "pod@address/priority", "!" before what is not usable.
func endpoints(t *testing.T, s *snapshot.Snapshot, backend string) string {
	t.Helper()
	for _, b := range s.Backends() {
		if b.Name != backend {
			continue
		}
		var out []string
		for _, e := range s.Endpoints(b).All() {
			text := e.Pod + "/" + string('0'+e.Priority)
			if !e.Usable() {
				text = "!" + text
			}
			out = append(out, text)
		}
		return strings.Join(out, " ")
	}
	return "no such backend"
}

// TestMembership: by port and class (contract 5.5), on the majority's class
// (1.3), with the priorities of 5.5.
func TestMembership(t *testing.T) {
	s, problems := compile.Compile(modeltest.Mesh(t, `
node n1 region=r1 zone=z1
pods shop/cart 8080,9000=tcp region=r1 zone=z1
pods shop/cart 8080          region=r1 zone=z2
pods shop/cart 8080=tcp      region=r2
pods shop/cart 8080          health=unhealthy
pods shop/cart 9000=tcp,7000 health=draining region=r1 zone=z1
`))
	for backend, want := range map[string]string{
		"shop/cart:8080": "cart-1/0 cart-2/1 !cart-4/2",
		"shop/cart:9000": "cart-1/0 !cart-5/0",
		"shop/cart:7000": "!cart-5/0",
	} {
		if got := endpoints(t, s, backend); got != want {
			t.Errorf("%s: %q, want %q", backend, got, want)
		}
	}
	if len(problems) != 1 || problems[0].Object != "ServiceAccount shop/cart" {
		t.Errorf("problems %v", problems)
	}
	for _, b := range s.Backends() {
		for _, e := range s.Endpoints(b).All() {
			if e.Addr.Port() != model.PortMesh || e.SPIFFEID != "spiffe://td/ns/shop/sa/cart" {
				t.Errorf("%s: %+v", b.Name, e)
			}
		}
	}
}

// TestPriority is the table of contract 5.5.
func TestPriority(t *testing.T) {
	for _, tt := range []struct{ node, pod, want string }{
		{"region= zone=", "region=r2 zone=z9", "cart-1/0"},
		{"region=r1 zone=z1", "region=r1 zone=z1", "cart-1/0"},
		{"region=r1", "region=r1 zone=z9", "cart-1/0"},
		{"region=r1 zone=z1", "region=r1 zone=z2", "cart-1/1"},
		{"region=r1 zone=z1", "region=r1", "cart-1/1"},
		{"region=r1 zone=z1", "region=r2 zone=z1", "cart-1/2"},
		{"region=r1 zone=z1", "region= zone=z1", "cart-1/2"},
	} {
		s, _ := compile.Compile(modeltest.Mesh(t, "node n1 "+tt.node+"\npods shop/cart 8080 "+tt.pod))
		if got := endpoints(t, s, "shop/cart:8080"); got != tt.want {
			t.Errorf("node %s, pod %s: %s, want %s", tt.node, tt.pod, got, tt.want)
		}
	}
}

// TestPins: each pod is met as itself, a custom identity included.
func TestPins(t *testing.T) {
	s, _ := compile.Compile(modeltest.Mesh(t, "pods shop/cart 8080\npods shop/cart 8080 id=spiffe://td/custom/cart"))
	set := s.Endpoints(s.Backends()[0])
	if set.Len() != 2 || set.At(0).SPIFFEID != "spiffe://td/ns/shop/sa/cart" || set.At(1).SPIFFEID != "spiffe://td/custom/cart" {
		t.Errorf("%+v", set.All())
	}
}

// TestIdentities: a row without an identity that a certificate can carry is no
// endpoint (SPIFFE-ID 2).
func TestIdentities(t *testing.T) {
	for id, ok := range map[string]bool{
		"spiffe://td/ns/shop/sa/cart": true, "spiffe://td/x": true, "spiffe://td": false, "spiffe://td/": false, "spiffe://td/a/": false, "spiffe://td/a//b": false,
		"spiffe://td/../x": false, "spiffe://TD/x": false, "https://td/x": false, "spiffe:///x": false, "cart": false, "": false,
	} {
		m := modeltest.Mesh(t, "pods shop/cart 8080")
		m.Endpoints[0].SPIFFEID = id
		s, problems := compile.Compile(m)
		if (len(s.Services()) == 1) != ok || (len(problems) == 0) != ok {
			t.Errorf("%q: %d services, %v", id, len(s.Services()), problems)
		}
	}
}

// TestEndpoints: what the short way takes and what it leaves to Compile.
func TestEndpoints(t *testing.T) {
	base := "service shop/cart 10.96.0.1\npods shop/cart*2 8080,9000=tcp\npods shop/cart 8080\nservice shop/db 10.96.0.2\npods shop/db 5432=tcp,6000=tcp\n"
	for _, tt := range []struct {
		name string
		edit func(m *model.Mesh)
		ok   bool
	}{
		{"nothing", func(*model.Mesh) {}, true},
		{"health", func(m *model.Mesh) { m.Endpoints[0].Health = model.Draining }, true},
		{"one pod less", func(m *model.Mesh) { m.Endpoints = m.Endpoints[1:] }, true},
		{"one pod more", func(m *model.Mesh) {
			e := m.Endpoints[0]
			e.IP, e.Pod = netip.MustParseAddr("10.9.9.9"), "cart-9"
			m.Endpoints = append(m.Endpoints, e)
		}, true},
		{"a port goes", func(m *model.Mesh) { m.Endpoints = m.Endpoints[2:] }, false},
		{"a port comes", func(m *model.Mesh) {
			m.Endpoints[0].Ports = append(m.Endpoints[0].Ports, model.Port{Number: 81, Class: model.HTTP})
		}, false},
		{"a class changes", func(m *model.Mesh) { m.Endpoints[2].Ports = []model.Port{{Number: 8080, Class: model.TCP}} }, false},
		{"the port of :18082 changes", func(m *model.Mesh) { m.Endpoints[3].DefaultPort = 6000 }, false},
		{"the last pod goes", func(m *model.Mesh) { m.Endpoints = m.Endpoints[:3] }, false},
		{"a service comes", func(m *model.Mesh) { m.Endpoints[0].Service.Name = "other" }, false},
		{"a bad row", func(m *model.Mesh) { m.Endpoints[0].SPIFFEID = "" }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, problems := compile.Compile(modeltest.Mesh(t, base))
			if len(problems) > 0 {
				t.Fatal(problems)
			}
			m := modeltest.Mesh(t, base)
			for i := range m.Endpoints {
				m.Endpoints[i].Ports = slices.Clone(m.Endpoints[i].Ports) // rows of one line share them
			}
			tt.edit(m)
			if _, ok := compile.Endpoints(s, m); ok != tt.ok {
				t.Errorf("ok %v, want %v", ok, tt.ok)
			}
		})
	}
}

// TestWorkloads: what of a pod of this node reaches the data plane.
func TestWorkloads(t *testing.T) {
	s, problems := compile.Compile(modeltest.Mesh(t, "local shop/web 9000=tcp,8080=h2 scoped ip=::ffff:10.0.0.1 cid=b\nlocal shop/cron cid=a"))
	if len(problems) > 0 || len(s.Workloads()) != 2 || s.Workloads()[0].ContainerID != "a" {
		t.Fatal(problems, s.Workloads())
	}
	w := s.Workload("b")
	p, ok := w.Port(8080)
	if !ok || p.App != model.AppH2C || w.Ports[0].Number != 8080 || w.Capture.RedirectAll || w.Rule != "Pod shop/web-0" ||
		!w.Owns(netip.MustParseAddr("10.0.0.1")) || w.Owns(netip.MustParseAddr("10.0.0.2")) {
		t.Errorf("%+v", w)
	}
	if _, ok := w.Port(1); ok {
		t.Error("a port that is not there")
	}
}

// TestDomain: any case is one domain, and a bad one is named and replaced.
func TestDomain(t *testing.T) {
	for _, tt := range []struct {
		in, want string
		bad      bool
	}{
		{"", "aether.internal", false},
		{"Mesh.Example", "mesh.example", false},
		{"a..b", "aether.internal", true},
		{"-a.b", "aether.internal", true},
	} {
		s, problems := compile.Compile(&model.Mesh{Domain: tt.in})
		if s.Domain() != tt.want || (len(problems) > 0) != tt.bad {
			t.Errorf("%q: %q, %v", tt.in, s.Domain(), problems)
		}
	}
}

// TestInputUntouched: Compile sorts copies.
func TestInputUntouched(t *testing.T) {
	text := "pods shop/z 9000,8080\npods shop/a 8080\nservice shop/z 10.96.0.9\nservice shop/a 10.96.0.1\nroute shop/z z\nrule all match=prefix:/a&h:X=1\nroute shop/a a\nrule all"
	m, want := modeltest.Mesh(t, text), modeltest.Mesh(t, text)
	compile.Compile(m)
	if m.Endpoints[0].Service != want.Endpoints[0].Service || m.Endpoints[0].Ports[0] != want.Endpoints[0].Ports[0] ||
		m.Services[0].Name != want.Services[0].Name || m.Routes[0].Name != want.Routes[0].Name || m.Routes[0].Rules[0].Matches[0].Headers[0].Name != "X" {
		t.Error("the model was changed")
	}
}

// TestContradiction: two rows of one address that differ are not served, even with
// another row between them, and the other is.
func TestContradiction(t *testing.T) {
	m := modeltest.Mesh(t, "pods shop/cart*3 8080")
	m.Endpoints[2].IP = m.Endpoints[0].IP
	s, problems := compile.Compile(m)
	set := s.Endpoints(s.Service(model.ServiceName{Namespace: "shop", Name: "cart"}).Port(8080).Backend)
	if set.Len() != 1 || set.At(0).Pod != m.Endpoints[1].Pod {
		t.Errorf("%d endpoints are served, want %s alone", set.Len(), m.Endpoints[1].Pod)
	}
	if len(problems) != 2 {
		t.Errorf("problems %v, want one for each of the two", problems)
	}
}

// TestSamePod: a pod registered once a class is one pod, however its node speaks
// to it (contract 1.3: that is in no row).
func TestSamePod(t *testing.T) {
	m := modeltest.Mesh(t, "pods shop/cart 8080")
	again := m.Endpoints[0]
	again.Ports = []model.Port{{Number: 8080, Class: model.HTTP, App: model.AppH2C}}
	m.Endpoints = append(m.Endpoints, again)
	s, problems := compile.Compile(m)
	if got := endpoints(t, s, "shop/cart:8080"); got != "cart-1/0" || len(problems) > 0 {
		t.Error(got, problems)
	}
}
