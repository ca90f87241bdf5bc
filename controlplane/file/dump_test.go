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

	"aether/controlplane/gamma"
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
			w.UID = oneOf(g, "", "0a1b-2c", "123", "true")
			w.UDSSocket = oneOf(g, "", "app/http.sock", "true/no", "y")
			w.Volumes = oneOf(g, nil, []model.Volume{}, []model.Volume{{Name: "app", Driver: "csi.aether.io"}, {Name: "on"}})
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
	for range g.IntN(6) {
		m.Routes = append(m.Routes, g.route())
	}
	for range g.IntN(4) {
		m.Filters = append(m.Filters, g.httpFilter())
	}
	for _, s := range []model.ServiceName{{Namespace: "shop", Name: "cart"}, {Namespace: "db", Name: "no"}} {
		if g.some(0.3) {
			m.Policies = append(m.Policies, model.EndpointPolicy{Namespace: s.Namespace, Name: g.name("policy"), Service: s, UDSSocket: oneOf(g, "app/http.sock", "true/y")})
		}
	}
	m.Semantics = oneOf(g, model.Aether, model.GatewayAPI)
	m.SameNode = oneOf(g, model.MTLS, model.InProcess)
	seen := map[model.ServiceName]bool{}
	for range g.IntN(4) {
		if s := g.service(); !seen[s] {
			seen[s] = true
			if g.some(0.7) {
				m.Catalog = append(m.Catalog, s)
			}
			if g.some(0.5) {
				m.Retained = append(m.Retained, model.Retained{Service: s, Ports: oneOf(g, nil, []uint16{80}, []uint16{80, 8080})})
			}
		}
	}
	b := builder{mesh: m}
	b.sort()
	return m
}

func (g *generator) route() model.Route {
	r := model.Route{Kind: oneOf(g, model.HTTPRoute, model.HTTPRoute, model.GRPCRoute, model.TLSRoute, model.TCPRoute), Namespace: g.service().Namespace, Name: g.name("route")}
	if g.some(0.7) {
		r.Created = time.Date(2026, 10, 1, 8, g.IntN(60), g.IntN(60), 0, time.UTC)
	}
	for range 1 + g.IntN(2) {
		r.Parents = append(r.Parents, model.ParentRef{Service: g.service(), Port: oneOf[uint16](g, 0, 80, 8080)})
	}
	if r.Kind == model.TLSRoute {
		r.ServerNames = oneOf(g, []string{"a.example"}, []string{"*.example", "true", "1"})
	}
	for range g.IntN(4) {
		r.Rules = append(r.Rules, g.rule(r.Kind))
	}
	return r
}

func (g *generator) rule(kind model.RouteKind) model.Rule {
	rule := model.Rule{Name: oneOf(g, "", "a", "no")}
	if g.some(0.2) {
		rule.Invalid = "because " + g.text()
	}
	http := kind == model.HTTPRoute
	if http || kind == model.GRPCRoute {
		for range g.IntN(3) {
			rule.Matches = append(rule.Matches, g.match(kind))
		}
		prefixes := !slices.ContainsFunc(rule.Matches, func(m model.Match) bool { return m.PathKind == model.PathExact || m.PathKind == model.PathRegex })
		rule.Filters = g.filters(http, false, prefixes)
		if g.some(0.3) {
			rule.Persistence = g.persistence()
		}
		defer func() {
			for i := range rule.Backends {
				rule.Backends[i].Filters = g.filters(http, true, prefixes)
			}
		}()
	}
	if http && g.some(0.3) {
		rule.Timeouts.Request = oneOf(g, 0, time.Minute+500*time.Millisecond, gamma.MaxDuration)
		rule.Timeouts.Backend = oneOf(g, 0, time.Millisecond, time.Minute)
	}
	if http && g.some(0.3) {
		rule.Retry = &model.Retry{Codes: oneOf(g, nil, []uint16{500, 503}), Attempts: oneOf[uint8](g, 0, 1, 255), Backoff: oneOf(g, 0, 100*time.Millisecond)}
	}
	for range g.IntN(3) {
		b := model.BackendRef{Service: g.service(), Port: oneOf[uint16](g, 80, 8080), Weight: oneOf[uint32](g, 0, 1, gamma.MaxWeight)}
		if g.some(0.2) {
			b.Invalid, b.Port = "because "+g.text(), oneOf[uint16](g, 0, 80)
		}
		rule.Backends = append(rule.Backends, b)
	}
	return rule
}

func (g *generator) match(kind model.RouteKind) model.Match {
	var mt model.Match
	if kind == model.HTTPRoute {
		switch mt.PathKind = oneOf(g, model.PathAny, model.PathExact, model.PathPrefix, model.PathRegex); mt.PathKind {
		case model.PathAny:
		case model.PathRegex:
			mt.Path = g.pattern()
		default:
			mt.Path = oneOf(g, "/", "/a", "/a/b/", "/é", "/a:b", "/1")
		}
		mt.Method = oneOf(g, "", "GET", "POST")
		mt.Query = g.values("q", "Q", "no")
	} else if g.some(0.8) {
		if mt.GRPC = (&model.GRPCMatch{Service: oneOf(g, "", "a.B", "true", "_x"), Method: oneOf(g, "Say", "", "no"), Regex: g.some(0.4)}); mt.GRPC.Service+mt.GRPC.Method == "" {
			mt.GRPC.Service = "a"
		}
		if mt.GRPC.Regex {
			mt.GRPC.Method = g.pattern()
		}
	}
	mt.Headers = g.values("x-a", "no", "host")
	return mt
}

func (g *generator) pattern() string {
	return oneOf(g, "a.*", "/[0-9]+", "(?i)true|no", `\d{3}`, ".", "^$", "é", "[#: ]")
}

func (g *generator) values(names ...string) (out []model.ValueMatch) {
	for _, name := range names {
		switch {
		case g.some(0.7):
		case g.some(0.4):
			out = append(out, model.ValueMatch{Name: name, Value: g.pattern(), Regex: true})
		default:
			out = append(out, model.ValueMatch{Name: name, Value: g.value()})
		}
	}
	return out
}

func (g *generator) persistence() *model.Persistence {
	p := &model.Persistence{Name: oneOf(g, "", "no", "sid"), Header: g.some(0.4), Absolute: oneOf(g, 0, time.Hour)}
	p.Lasting = !p.Header && p.Absolute > 0 && g.some(0.5)
	return p
}

// filters of a rule, or of a backend; prefixes: the prefix that matched may be replaced.
func (g *generator) filters(http, backend, prefixes bool) []model.Filter {
	var out []model.Filter
	edit := func() model.PathEdit {
		e := model.PathEdit{Kind: oneOf(g, model.PathKept, model.PathFull, model.PathPrefixPart)}
		if e.Kind == model.PathPrefixPart && !prefixes {
			e.Kind = model.PathFull
		}
		switch e.Kind {
		case model.PathFull:
			e.Value = oneOf(g, "/", "/no", "/a:b")
		case model.PathPrefixPart:
			e.Value = oneOf(g, "/", "", "/x/")
		}
		return e
	}
	for _, kind := range []model.FilterKind{model.Mirror, model.RequestHeaders, model.ResponseHeaders, model.Redirect, model.Rewrite, model.CORS, model.Extension, model.Mirror} {
		f := model.Filter{Kind: kind}
		switch kind {
		case model.RequestHeaders, model.ResponseHeaders:
			for range g.IntN(2) {
				f.Set = append(f.Set, model.HeaderValue{Name: "x-set", Value: g.value()})
			}
			for range g.IntN(3) {
				f.Add = append(f.Add, model.HeaderValue{Name: oneOf(g, "x-add", "null"), Value: g.value()})
			}
			for range g.IntN(2) {
				f.Remove = append(f.Remove, oneOf(g, "cookie", "y"))
			}
		case model.Redirect:
			if !http || backend {
				continue
			}
			f.Redirect = &model.RedirectFilter{Scheme: oneOf(g, "", "https"), Host: oneOf(g, "", "no", "a.example"), Port: oneOf[uint16](g, 0, 8443), Path: edit(), Status: oneOf(g, 301, 302, 308)}
		case model.Rewrite:
			if !http || slices.ContainsFunc(out, func(f model.Filter) bool { return f.Redirect != nil }) {
				continue
			}
			f.Rewrite = &model.RewriteFilter{Host: oneOf(g, "", "true", "a.example"), Path: edit()}
		case model.Mirror:
			f.Mirror = &model.MirrorFilter{Backend: model.BackendRef{Service: g.service(), Port: 80, Weight: 1}, Numerator: 1, Denominator: 1}
			if g.some(0.5) {
				f.Mirror.Numerator, f.Mirror.Denominator = oneOf[uint32](g, 0, 1, 7), oneOf[uint32](g, 7, 100, 1<<31-1)
			}
			if g.some(0.3) {
				f.Mirror.Backend.Invalid, f.Mirror.Backend.Port = "because "+g.text(), oneOf[uint16](g, 0, 80)
			}
		case model.CORS:
			if !http || backend {
				continue
			}
			f.CORS = &model.CORSFilter{
				Origins: oneOf(g, nil, []string{"*"}, []string{"https://a.example", "http://*.b.example:8080", "https://*"}), Credentials: g.some(0.5),
				Methods: oneOf(g, nil, []string{"*"}, []string{"GET", "PUT"}), Headers: oneOf(g, nil, []string{"*"}, []string{"X-A", "no"}),
				Expose: oneOf(g, nil, []string{"X-B"}), MaxAge: oneOf(g, 5*time.Second, time.Second, time.Hour),
			}
		case model.Extension:
			if backend {
				continue
			}
			f.Extension = oneOf(g, "true", "filter-1", "a.b")
		}
		if g.some(0.15) {
			out = append(out, f)
		}
	}
	return out
}

func (g *generator) httpFilter() model.HTTPFilter {
	f := model.HTTPFilter{Namespace: g.service().Namespace, Name: g.name("filter"), Scope: oneOf(g, model.ScopeRoute, model.ScopeChain, model.ScopeInbound)}
	if f.Scope != model.ScopeRoute || g.some(0.5) {
		f.Targets = []model.ServiceName{{Namespace: f.Namespace, Name: "cart"}}
		if g.some(0.5) {
			f.Targets = append(f.Targets, model.ServiceName{Namespace: f.Namespace, Name: "no"})
		}
	}
	if g.some(0.2) {
		if f.Invalid = "because " + g.text(); g.some(0.5) {
			return f
		}
	}
	kind := g.IntN(4)
	if f.Scope == model.ScopeInbound {
		kind = g.IntN(2)
	}
	ops := func(param bool) (out []model.MutationOp) {
		for range g.IntN(4) {
			op := model.MutationOp{Kind: oneOf(g, model.AppendIfExistsOrAdd, model.AddIfAbsent, model.OverwriteIfExistsOrAdd, model.OverwriteIfExists, model.RemoveAll), Name: oneOf(g, "x-a", "true")}
			if param && g.some(0.5) {
				op.Name = oneOf(g, "a b", "%", "A")
			}
			if op.Kind != model.RemoveAll {
				op.Value = oneOf(g, g.value(), "", "100%", "%REQ(x)%", "%%", "\xb6\xff", "%\xff")
			}
			out = append(out, op)
		}
		return out
	}
	switch kind {
	case 0:
		f.RBAC = &model.RBAC{Audit: g.some(0.3), Deny: g.some(0.3)}
		for range g.IntN(3) {
			p := model.Policy{Name: g.name("policy"), Principals: []model.Principal{{SPIFFEID: "spiffe://td.test/ns/a/sa/b"}}}
			if g.some(0.5) {
				p.Principals = append(p.Principals, model.Principal{Namespace: "true"})
			}
			for range g.IntN(3) {
				p.Permissions = append(p.Permissions, oneOf(g, model.Permission{PathPrefix: "/admin"}, model.Permission{Method: "GET"}, model.Permission{Method: "PROPFIND"}))
			}
			f.RBAC.Policies = append(f.RBAC.Policies, p)
		}
	case 1:
		f.ExtAuthz = &model.ExtAuthz{NoBody: g.some(0.5), Disabled: g.some(0.3)}
		for range g.IntN(3) {
			if !f.ExtAuthz.Disabled {
				if f.ExtAuthz.ContextExtensions == nil {
					f.ExtAuthz.ContextExtensions = map[string]string{}
				}
				f.ExtAuthz.ContextExtensions[oneOf(g, "a", "true", "a b", "x_y")] = g.text()
			}
		}
	case 2:
		for range 1 + g.IntN(2) {
			f.HeaderToMetadata = append(f.HeaderToMetadata, model.HeaderToMetadata{Header: oneOf(g, "x-v", "no"), Key: oneOf(g, "version", "true"), Namespace: oneOf(g, "envoy.lb", "other")})
		}
	case 3:
		f.Mutation = &model.Mutation{Request: ops(false), Query: ops(true), Response: ops(false)}
	}
	return f
}

// TestDumpLoads: for random meshes, Load(Dump(m)) is m, and the order of m's slices shows in neither.
func TestDumpLoads(t *testing.T) {
	for seed := range uint64(250) {
		g := &generator{Rand: rand.New(rand.NewPCG(seed, 1))}
		m := g.mesh()
		text := Dump(m)
		l := newLoader("", testOptions)
		l.files["mesh.yaml"] = parse("mesh.yaml", text, l.o, nil)
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
			Kind: model.HTTPRoute, Namespace: "shop", Name: "cart",
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
