package compile_test

import (
	"net/netip"
	"runtime"
	"strconv"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

// big is a mesh of n services, each with a generated Service, three ports and
// three pods, a tenth of them with a route of two rules.
func big(n int) *model.Mesh {
	m := &model.Mesh{Domain: model.DefaultDomain, TrustDomain: "td", Node: "n1", Region: "r1", Zone: "z1"}
	ports := []model.Port{{Number: 8080, Class: model.HTTP}, {Number: 9000, Class: model.TCP}, {Number: 9090, Class: model.HTTP}}
	for i := range n {
		name := bigName(i)
		m.Services = append(m.Services, model.Service{Name: name, Generated: true, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})}})
		m.Endpoints = append(m.Endpoints, bigRows(i, ports, model.Healthy)...)
		if i%10 == 0 {
			m.Routes = append(m.Routes, bigRoute(i, "/new"))
		}
	}
	return m
}

func bigName(i int) model.ServiceName {
	return model.ServiceName{Namespace: "ns" + strconv.Itoa(i%50), Name: "svc" + strconv.Itoa(i)}
}

func bigRows(i int, ports []model.Port, h model.Health) (rows []model.Endpoint) {
	name := bigName(i)
	id := "spiffe://td/ns/" + name.Namespace + "/sa/" + name.Name
	for k := range 3 {
		ip := netip.AddrFrom4([4]byte{10, byte(100 + k), byte(i >> 8), byte(i)})
		rows = append(rows, model.Endpoint{
			Service: name, IP: ip, Pod: name.Name + "-" + strconv.Itoa(k), Node: "n" + strconv.Itoa(i%100), Cluster: "local", Region: "r1", Zone: "z1",
			DefaultPort: 8080, Ports: ports, Weight: model.DefaultWeight, Health: h, SPIFFEID: id,
		})
	}
	return rows
}

func bigRoute(i int, path string) model.Route {
	name := bigName(i)
	return model.Route{
		Kind: model.HTTPRoute, Namespace: name.Namespace, Name: "r" + strconv.Itoa(i), Parents: []model.ParentRef{{Service: name}},
		Rules: []model.Rule{
			{Matches: []model.Match{{PathKind: model.PathPrefix, Path: path}}, Backends: []model.BackendRef{{Service: name, Port: 8080, Weight: 90}, {Service: name, Port: 9090, Weight: 10}}},
			{Matches: []model.Match{{PathKind: model.PathExact, Path: "/x"}}, Filters: []model.Filter{{Kind: model.RequestHeaders, Set: []model.HeaderValue{{Name: "x-a", Value: "1"}}}}},
		},
	}
}

var kept *snapshot.Snapshot

// BenchmarkCompile is the whole of a mesh (issue 4 item 11: 60 ms for 2,000, 400 ms for 10,000).
func BenchmarkCompile(b *testing.B) {
	for _, n := range []int{2000, 10000} {
		m := big(n)
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				kept, _ = compile.Compile(m)
			}
		})
	}
}

// BenchmarkChange is one change, known by name, in a mesh of 10,000 services
// (1 ms for an endpoint, 20 ms for a route).
func BenchmarkChange(b *testing.B) {
	m := big(10000)
	rows := [2][]model.Endpoint{bigRows(7000, m.Endpoints[0].Ports, model.Draining), bigRows(7000, m.Endpoints[0].Ports, model.Healthy)}
	routes := [2][]model.Route{{bigRoute(7000, "/a")}, {bigRoute(7000, "/b")}}
	ports := []model.Port{{Number: 8080, Class: model.HTTP}, {Number: 9000, Class: model.TCP}}
	classes := [2][]model.Endpoint{bigRows(7000, ports, model.Healthy), rows[1]}
	for _, c := range []struct {
		name string
		set  func(x *compile.Index, i int)
	}{
		{"endpoint", func(x *compile.Index, i int) { x.SetEndpoints(bigName(7000), rows[i%2]) }},
		{"route", func(x *compile.Index, i int) {
			x.SetRoutes(model.HTTPRoute, routes[0][0].Namespace, routes[0][0].Name, routes[i%2])
		}},
		{"ports", func(x *compile.Index, i int) { x.SetEndpoints(bigName(7000), classes[i%2]) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			x := compile.NewIndex(m)
			was, problems := x.Update()
			if len(problems) > 0 {
				b.Fatal(problems[0])
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				c.set(x, i)
				i++
				if kept, _ = x.Update(); kept == was {
					b.Fatal("nothing changed")
				}
				was = kept
			}
		})
	}
	b.Run("endpoints-of-all", func(b *testing.B) {
		s, _ := compile.Compile(m)
		b.ReportAllocs()
		for b.Loop() {
			t, ok := compile.Endpoints(s, m)
			if !ok {
				b.Fatal("the short way was refused")
			}
			kept = s.WithEndpoints(t)
		}
	})
}

// heap is what lives, in bytes.
func heap() uint64 {
	var s runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&s)
	return s.HeapAlloc
}

// TestMemory: what a snapshot adds to the model it shares strings with, and what
// an index adds to both (issue 4 item 11: 4 KiB a service).
func TestMemory(t *testing.T) {
	const n = 2000
	m := big(n)
	kept = nil
	before := heap()
	x := compile.NewIndex(m)
	kept, _ = x.Update()
	both := heap() - before
	runtime.KeepAlive(x)
	x = nil
	alone := heap() - before
	runtime.KeepAlive(m)
	t.Logf("%d bytes a service, %d with the index", alone/n, both/n)
	if alone/n > 4096 {
		t.Errorf("a snapshot weighs %d bytes a service, want 4096 at most", alone/n)
	}
	if both/n > 6144 {
		t.Errorf("a snapshot and its index weigh %d bytes a service, want 6144 at most", both/n)
	}
	if len(kept.Services()) != n {
		t.Error("it was not the mesh")
	}
	kept = nil
}

// TestSharing: ports with the same pods share one set, ports with the same
// routes one program, and what no filter touches has one pipe.
func TestSharing(t *testing.T) {
	s, _ := compile.Compile(modeltest.Mesh(t, `
service shop/cart 10.96.0.1
pods shop/cart*3 8080,9090,9000=tcp
pods shop/cart 7070
route shop/r cart
rule all set=x-a:1
rule match=prefix:/a to=cart:8080 to=cart:9090 bset=x-b:1
service shop/db 10.96.0.2
pods shop/db 8080
service pay/one 10.96.0.3
pods pay/one 8080,9090
filter pay/f scope=chain target=one rbac policy=p;ns:shop
route pay/r one
rule match=prefix:/a
rule match=prefix:/b rset=x:1
`))
	svc := s.Service(model.ServiceName{Namespace: "shop", Name: "cart"})
	a, b, c := svc.Port(8080), svc.Port(9090), svc.Port(7070)
	if s.Endpoints(a.Backend) != s.Endpoints(b.Backend) || s.Endpoints(a.Backend) == s.Endpoints(c.Backend) {
		t.Error("endpoint sets")
	}
	if a.Program == nil || a.Program != b.Program || a.Program != c.Program {
		t.Error("programs")
	}
	if svc.Port(9000).Program != nil || svc.Port(9000).Self != nil {
		t.Error("a route on a TCP port")
	}
	other := s.Service(model.ServiceName{Namespace: "shop", Name: "db"})
	rule := a.Program.Arms[0].Rule
	if a.Self != other.Port(8080).Self || rule.Pipe != a.Self.Pipe || rule.Backends[0].Pipe != rule.Pipe || rule.Backends[1].Pipe == rule.Pipe {
		t.Error("pipes")
	}
	if &svc.Ports[0] != &svc.PodPorts[0] {
		t.Error("the ports of a generated Service stand twice")
	}
	one := s.Service(model.ServiceName{Namespace: "pay", Name: "one"})
	for _, arm := range one.Port(8080).Program.Arms {
		same := arm.Rule.Pipe == one.Port(9090).Self.Pipe
		if same != (arm.Path == "/a") || len(arm.Rule.Pipe.RBAC) != 1 {
			t.Errorf("the service's pipe, %s: %+v", arm.Path, arm.Rule.Pipe)
		}
	}
}
