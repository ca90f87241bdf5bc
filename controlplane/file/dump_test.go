package file

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"aether/dataplane/model"
)

// generator makes meshes that are valid and as odd as that allows.
type generator struct {
	*rand.Rand
	n int // makes names and addresses differ
}

func (g *generator) some(p float64) bool { return g.Float64() < p }

func oneOf[T any](g *generator, of ...T) T { return of[g.IntN(len(of))] }

func (g *generator) name(prefix string) string { g.n++; return fmt.Sprintf("%s-%d", prefix, g.n) }

func (g *generator) ip() netip.Addr {
	g.n++
	if g.some(0.3) {
		return netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(g.n >> 8), 15: byte(g.n)})
	}
	return netip.AddrFrom4([4]byte{10, 9, byte(g.n >> 8), byte(g.n)})
}

// text holds everything that a careless writer of YAML trips over.
func (g *generator) text() string {
	return oneOf(g, "a", "", "true", "Yes", "null", "~", "1", "0x10", "1.5e3", "2026-10-01", "a: b", "- a", "#c", "a #c", "'", `"`, `\`,
		"a\nb", " lead", "trail ", "tab\t", "---", "...", "é", "日本", "\U0001f600", "\u2028", "\u0085", "\x7f", "\u00a0", "{a", "[", "*a", "&a", "!x", "%y", "@z", "`", "=", "<<", "a,b|c>d")
}

// value is text that a header may hold and that nobody trims.
func (g *generator) value() string {
	return oneOf(g, "1", "true", "a b", "a:b", "#x", "'q'", `"q"`, "*", "no", "é", "a, b", "0x1f", "{}")
}

func (g *generator) ports() (uint16, []model.Port) {
	set := map[uint16]model.Port{}
	for range 1 + g.IntN(4) {
		p := model.Port{Number: oneOf[uint16](g, 53, 80, 443, 5432, 8080, 9090, 65535), Class: oneOf(g, model.HTTP, model.TCP, model.UDP)}
		if p.Class == model.HTTP {
			p.App = oneOf(g, model.AppHTTP1, model.AppH2C)
		}
		set[p.Number] = p
	}
	var out []model.Port
	for _, p := range set {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b model.Port) int { return int(a.Number) - int(b.Number) })
	return oneOf(g, out...).Number, out
}

func (g *generator) service() model.ServiceName {
	return model.ServiceName{Namespace: oneOf(g, "shop", "db", "n", "true"), Name: oneOf(g, "cart", "web", "pg", "default", "no")}
}

func (g *generator) id(s model.ServiceName) string {
	if g.some(0.2) {
		return "spiffe://other.test/custom/" + s.Name
	}
	return "spiffe://td.test/ns/" + s.Namespace + "/sa/" + s.Name
}

func (g *generator) mesh() *model.Mesh {
	m := &model.Mesh{Domain: "aether.internal", TrustDomain: "td.test", Node: "n1", Region: oneOf(g, "", "eu"), Zone: oneOf(g, "", "eu-a")}
	for range g.IntN(6) {
		s := g.service()
		e := model.Endpoint{
			Service: s, IP: g.ip(), Pod: g.name("pod"), Node: oneOf(g, "", "n1", "n2", "n3"), Cluster: oneOf(g, "", "", "west"),
			Weight: oneOf[uint32](g, 0, 1, 1024, 1<<32-1), Health: oneOf(g, model.HealthUnspecified, model.Healthy, model.Unhealthy, model.Draining), SPIFFEID: g.id(s),
		}
		e.Region, e.Zone = oneOf(g, "", "eu", "us"), oneOf(g, "", "z1")
		e.DefaultPort, e.Ports = g.ports()
		for range g.IntN(3) {
			if e.Metadata == nil {
				e.Metadata = map[string]string{}
			}
			e.Metadata[oneOf(g, "version", "Odd_Key", "ip", "a.b", "true")] = g.text()
		}
		m.Endpoints = append(m.Endpoints, e)
		if g.some(0.2) { // a successor of the same name, or a lingering row of the same address
			late := e
			if g.some(0.5) {
				late.IP = g.ip()
			} else {
				late.Pod = g.name("pod")
			}
			m.Endpoints = append(m.Endpoints, late)
		}
		if g.some(0.6) {
			w := model.Workload{
				Namespace: s.Namespace, Name: e.Pod, Account: s.Name, ContainerID: g.name("container"), NetNS: "/run/netns/" + g.name("x"),
				IPs: []netip.Addr{e.IP}, SPIFFEID: e.SPIFFEID, DefaultPort: e.DefaultPort, Ports: e.Ports,
			}
			if g.some(0.3) {
				w.IPs = append(w.IPs, g.ip())
			}
			if g.some(0.2) { // the registry is behind
				w.DefaultPort, w.Ports = g.ports()
			}
			w.Capture.RedirectAll = g.some(0.5)
			if g.some(0.3) {
				w.Capture.ExcludePorts = []uint16{25, 9999}
				w.Capture.ExcludeRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("fd00:1::/64")}
			}
			if g.some(0.3) {
				w.Upstreams = []model.ServiceName{{Namespace: "shop", Name: "cart"}, {Namespace: "db", Name: "pg"}}
			}
			m.Workloads = append(m.Workloads, w)
		}
	}
	for range g.IntN(4) {
		s := model.Service{Name: model.ServiceName{Namespace: g.service().Namespace, Name: g.name("svc")}, Generated: g.some(0.5)}
		for range g.IntN(3) {
			s.ClusterIPs = append(s.ClusterIPs, g.ip())
		}
		for i := range g.IntN(4) {
			p := model.ServicePort{Name: oneOf(g, "", "http", "y"), Number: uint16(80 + i), Target: oneOf[uint16](g, 80, 8080), UDP: g.some(0.2)}
			if g.some(0.3) {
				p.TargetName = oneOf(g, "http", "on")
				p.Target = oneOf[uint16](g, 0, 8080)
			}
			if s.Generated {
				p.Class = oneOf(g, model.ClassNone, model.HTTP, model.TCP)
				if p.UDP {
					p.Class = oneOf(g, model.ClassNone, model.UDP)
				}
			}
			s.Ports = append(s.Ports, p)
		}
		m.Services = append(m.Services, s)
	}
	for range g.IntN(4) {
		r := model.Route{Namespace: g.service().Namespace, Name: g.name("route")}
		if g.some(0.7) {
			r.Created = time.Date(2026, 10, 1, 8, g.IntN(60), g.IntN(60), 0, time.UTC)
		}
		for range 1 + g.IntN(2) {
			r.Parents = append(r.Parents, model.ParentRef{Service: g.service(), Port: oneOf[uint16](g, 0, 80, 8080)})
		}
		for range g.IntN(4) {
			r.Rules = append(r.Rules, g.rule())
		}
		m.Routes = append(m.Routes, r)
	}
	b := builder{mesh: m}
	b.sort()
	return m
}

func (g *generator) rule() model.Rule {
	rule := model.Rule{Name: oneOf(g, "", "a", "no"), Filters: g.filters()}
	if g.some(0.2) {
		rule.Invalid = "because " + g.text()
	}
	for range g.IntN(3) {
		var mt model.Match
		if mt.PathKind = oneOf(g, model.PathAny, model.PathExact, model.PathPrefix); mt.PathKind != model.PathAny {
			mt.Path = oneOf(g, "/", "/a", "/a/b/", "/é", "/a:b", "/1")
		}
		mt.Method = oneOf(g, "", "GET", "POST")
		for i := range g.IntN(3) {
			mt.Headers = append(mt.Headers, model.HeaderMatch{Name: []string{"x-a", "no"}[i], Value: g.value()})
		}
		rule.Matches = append(rule.Matches, mt)
	}
	for range g.IntN(3) {
		b := model.BackendRef{Service: g.service(), Port: oneOf[uint16](g, 80, 8080), Weight: oneOf[uint32](g, 0, 1, maxWeight), Filters: g.filters()}
		if g.some(0.2) {
			b.Invalid, b.Port = "because "+g.text(), oneOf[uint16](g, 0, 80)
		}
		rule.Backends = append(rule.Backends, b)
	}
	return rule
}

func (g *generator) filters() []model.Filter {
	var out []model.Filter
	for range max(0, g.IntN(5)-2) {
		f := model.Filter{Kind: oneOf(g, model.RequestHeaders, model.ResponseHeaders)}
		for range g.IntN(2) {
			f.Set = append(f.Set, model.HeaderValue{Name: "x-set", Value: g.value()})
		}
		for range g.IntN(3) {
			f.Add = append(f.Add, model.HeaderValue{Name: oneOf(g, "x-add", "null"), Value: g.value()})
		}
		for range g.IntN(2) {
			f.Remove = append(f.Remove, oneOf(g, "cookie", "y"))
		}
		out = append(out, f)
	}
	return out
}

// TestDumpLoads: for random meshes, Load(Dump(m)) is m, and the order of m's slices shows in neither.
func TestDumpLoads(t *testing.T) {
	for seed := range uint64(150) {
		g := &generator{Rand: rand.New(rand.NewPCG(seed, 1))}
		m := g.mesh()
		text := Dump(m)
		l := newLoader("", testOptions)
		l.files["mesh.yaml"] = parse("mesh.yaml", text, l.o)
		got, problems := l.build()
		if !reflect.DeepEqual(got, m) {
			t.Fatalf("seed %d:\n%s\ngot  %s\nwant %s\nproblems %v", seed, text, render(got), render(m), problems)
		}
		shuffled := *m
		shuffled.Endpoints, shuffled.Workloads = slices.Clone(m.Endpoints), slices.Clone(m.Workloads)
		g.Shuffle(len(m.Endpoints), func(i, j int) {
			shuffled.Endpoints[i], shuffled.Endpoints[j] = shuffled.Endpoints[j], shuffled.Endpoints[i]
		})
		slices.Reverse(shuffled.Workloads)
		if again := Dump(&shuffled); !bytes.Equal(again, text) {
			t.Fatalf("seed %d: order shows:\n%s\n%s", seed, text, again)
		}
	}
}

// TestDumpReads pins the form, for people read it.
func TestDumpReads(t *testing.T) {
	m := &model.Mesh{
		Domain: "aether.internal", TrustDomain: "td.test", Node: "n1", Region: "eu",
		Endpoints: []model.Endpoint{{
			Service: model.ServiceName{Namespace: "shop", Name: "cart"}, IP: netip.MustParseAddr("10.0.0.1"), Pod: "cart-1", Node: "n2",
			DefaultPort: 8080, Ports: []model.Port{{Number: 8080, Class: model.HTTP, App: model.AppH2C}}, Weight: 1024, Health: model.Healthy,
			SPIFFEID: "spiffe://td.test/ns/shop/sa/cart",
		}},
		Routes: []model.Route{{
			Namespace: "shop", Name: "cart",
			Parents: []model.ParentRef{{Service: model.ServiceName{Namespace: "shop", Name: "cart"}}},
			Rules: []model.Rule{{
				Matches:  []model.Match{{}},
				Filters:  []model.Filter{{Kind: model.RequestHeaders}},
				Backends: []model.BackendRef{{Service: model.ServiceName{Namespace: "db", Name: "pg"}, Port: 80, Weight: 1}},
			}},
		}},
	}
	const want = `# The mesh as node "n1" has it (mesh domain "aether.internal", trust domain "td.test").
# A configuration in itself: put it into a directory, and load that with those three names.
---
apiVersion: v1
kind: Node
metadata:
  name: n1
  labels:
    topology.kubernetes.io/region: eu
---
apiVersion: v1
kind: Pod
metadata:
  name: cart-1
  namespace: shop
  labels:
    aether.io/managed: "true"
  annotations:
    endpoint.aether.io/port: "8080"
    endpoint.aether.io/ports: "8080=h2"
    endpoint.aether.io/weight: "1024"
spec:
  serviceAccountName: cart
  nodeName: n2
status:
  conditions:
  - type: Ready
    status: "True"
  podIPs:
  - ip: "10.0.0.1"
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  name: cart
  namespace: shop
spec:
  parentRefs:
  - group: ""
    kind: Service
    namespace: shop
    name: cart
  rules:
  - matches:
    - {}
    filters:
    - type: RequestHeaderModifier
      requestHeaderModifier: {}
    backendRefs:
    - namespace: db
      name: pg
      port: 80
      weight: 1
---
apiVersion: gateway.networking.k8s.io/v1
kind: ReferenceGrant
metadata:
  name: from-shop
  namespace: db
spec:
  from:
  - group: gateway.networking.k8s.io
    kind: HTTPRoute
    namespace: shop
  to:
  - group: ""
    kind: Service
    name: pg
`
	if got := string(Dump(m)); got != want {
		t.Errorf("%s", firstDifference(got, want))
	}
}
