package decide_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

// TestFiltersOnEveryPath: with a filter on the whole of each service, nothing is
// forwarded or delivered without it, by whatever name, port, route or way in (contract 4.12).
func TestFiltersOnEveryPath(t *testing.T) {
	forwarded, delivered := 0, 0
	each(t, 7, func(t *testing.T, m *model.Mesh, _ *snapshot.Snapshot, r *rand.Rand) {
		n := *m
		n.Filters = slices.DeleteFunc(slices.Clone(m.Filters), func(f model.HTTPFilter) bool { return f.ExtAuthz != nil })
		names := map[model.ServiceName]bool{}
		for _, e := range m.Endpoints {
			names[e.Service] = true
		}
		for _, s := range m.Services {
			names[s.Name] = true
		}
		for _, w := range m.Workloads {
			names[w.Service()] = true
		}
		for name := range names {
			for scope, word := range map[model.Scope]string{model.ScopeChain: "chain", model.ScopeInbound: "inbound"} {
				n.Filters = append(n.Filters, model.HTTPFilter{
					Namespace: name.Namespace, Name: "guard-" + word + "-" + name.Name, Scope: scope,
					Targets: []model.ServiceName{name}, ExtAuthz: &model.ExtAuthz{},
				})
			}
		}
		s, _ := compile.Compile(&n)
		for range questions {
			f, h := aimed(r, m)
			v := decide.Route(s, &f, &h, r.Uint32(), nil)
			want := ""
			switch v.Action {
			case decide.Forward:
				want = "/guard-chain-"
				forwarded++
			case decide.Deliver:
				want = "/guard-inbound-"
				delivered++
			default:
				continue
			}
			if v.Pipe == nil || v.Pipe.Authz == nil || !strings.Contains(v.Pipe.Authz.Name, want) {
				t.Errorf("%s | %s: %s without the service's filter", f, model.RequestString(&h), v)
			}
		}
	})
	if forwarded < 100 || delivered < 100 {
		t.Errorf("only %d requests were forwarded and %d delivered: the test says nothing", forwarded, delivered)
	}
}

// TestRawTCPIsNoWayAroundAFilter: in any mesh, raw TCP is not delivered to a Unix socket at which
// a pod takes requests that an inbound filter judges; HTTP is, judged, and where nothing
// judges both are.
func TestRawTCPIsNoWayAroundAFilter(t *testing.T) {
	counts := map[string]int{}
	each(t, 11, func(t *testing.T, m *model.Mesh, _ *snapshot.Snapshot, r *rand.Rand) {
		n := *m
		n.Filters = slices.DeleteFunc(slices.Clone(m.Filters), func(f model.HTTPFilter) bool { return f.Scope == model.ScopeInbound })
		n.Workloads = slices.Clone(m.Workloads)
		for i := range n.Workloads {
			w := &n.Workloads[i]
			w.UID, w.UDSSocket, w.Volumes = "uid-"+w.ContainerID, "app/a.sock", nil
			w.Ports = []model.Port{{Number: 8080, Class: model.HTTP}, {Number: 9000, Class: model.TCP}}
			if i%2 == 0 {
				f := model.HTTPFilter{Namespace: w.Namespace, Name: "guard-" + w.Account, Scope: model.ScopeInbound, Targets: []model.ServiceName{w.Service()}}
				if r.IntN(2) == 0 {
					f.ExtAuthz = &model.ExtAuthz{}
				} else {
					f.Invalid = "it cannot be read" // and so lets nobody pass
				}
				n.Filters = append(n.Filters, f)
			}
		}
		s, _ := compile.Compile(&n)
		for _, w := range s.Workloads() {
			for _, port := range w.Ports {
				f := model.Flow{Namespace: w.Service.Namespace, Workload: w.Service.Name, Container: w.ContainerID, Dir: model.Inbound, Dst: model.OrigDst{AddrPort: netip.AddrPortFrom(netip.Addr{}, port.Number)}}
				v := decide.Decide(s, &f, 0, nil)
				if v.Action != decide.Deliver || w.Socket == nil {
					continue
				}
				raw, judged := port.Class == model.TCP, w.Inbound != nil
				if got, want := v.Deliver.Socket == nil, raw && judged; got != want {
					t.Errorf("%s, raw %v, judged %v: delivered over TCP %v, want %v", f, raw, judged, got, want)
				}
				counts[fmt.Sprintf("raw %v, judged %v", raw, judged)]++
			}
		}
	})
	for _, raw := range []bool{true, false} {
		for _, judged := range []bool{true, false} {
			if what := fmt.Sprintf("raw %v, judged %v", raw, judged); counts[what] < 20 {
				t.Errorf("%s: only %d", what, counts[what])
			}
		}
	}
}

// TestInvalidNeverWidens: an object that is spoiled turns answers into refusals,
// and nothing else into anything.
func TestInvalidNeverWidens(t *testing.T) {
	refused := 0
	each(t, 16, func(t *testing.T, m *model.Mesh, s *snapshot.Snapshot, r *rand.Rand) {
		n := *m
		what := spoil(&n, r)
		if what == "" {
			return
		}
		s2, _ := compile.Compile(&n)
		for range questions {
			f, h := aimed(r, m)
			p := r.Uint32()
			a, b := decide.Decide(s, &f, p, nil), decide.Decide(s2, &f, p, nil)
			if access(&a) != access(&b) && b.Action != decide.Refuse {
				t.Errorf("%s: with %s spoiled %s, and without %s", f, what, access(&b), access(&a))
			}
			a, b = decide.Route(s, &f, &h, p, nil), decide.Route(s2, &f, &h, p, nil)
			if access(&a) == access(&b) {
				continue
			}
			if b.Action != decide.Refuse {
				t.Errorf("%s | %s: with %s spoiled %s, and without %s", f, model.RequestString(&h), what, access(&b), access(&a))
			}
			refused++
		}
	})
	if refused < 100 {
		t.Errorf("only %d answers changed: the test says nothing", refused)
	}
}

// access is what of a verdict says who may go where: not why, and not what becomes of the fields.
func access(v *decide.Verdict) string {
	out := v.Action.String()
	if v.Backend != nil {
		out += " " + v.Backend.Name
	}
	if v.Action == decide.Refuse {
		return out
	}
	if v.Pipe != nil {
		for _, f := range v.Pipe.RBAC {
			out += " " + f.Name
		}
		if v.Pipe.Authz != nil {
			out += " asks " + v.Pipe.Authz.Name
		}
	}
	return fmt.Sprint(out, v.Respelled, v.Deliver.Port)
}

// spoil makes one object of n, which shares its parts with another mesh, invalid, and says which; "": there is none.
func spoil(n *model.Mesh, r *rand.Rand) string {
	if len(n.Filters) > 0 && r.IntN(2) == 0 {
		n.Filters = slices.Clone(n.Filters)
		f := &n.Filters[r.IntN(len(n.Filters))]
		if f.Scope == model.ScopeRoute && len(f.Targets) == 0 || r.IntN(2) == 0 {
			f.Invalid = "spoiled"
			return "HTTPFilter " + f.Namespace + "/" + f.Name
		}
		n.Filters = append(n.Filters, *f) // a second one of that name
		return "HTTPFilter " + f.Namespace + "/" + f.Name + " twice"
	}
	var rules []*model.Rule
	n.Routes = slices.Clone(n.Routes)
	for i := range n.Routes {
		n.Routes[i].Rules = slices.Clone(n.Routes[i].Rules)
		for j := range n.Routes[i].Rules {
			rules = append(rules, &n.Routes[i].Rules[j])
		}
	}
	if len(rules) == 0 {
		return ""
	}
	rule := rules[r.IntN(len(rules))]
	switch r.IntN(4) {
	case 0:
		rule.Filters = append(slices.Clone(rule.Filters), model.Filter{Kind: model.Extension, Extension: "not-there"})
		return "a reference to a filter"
	case 1:
		rule.Filters = append(slices.Clone(rule.Filters), model.Filter{Kind: 99})
		return "a filter of an unknown kind"
	case 2:
		if len(rule.Backends) > 0 {
			rule.Backends = slices.Clone(rule.Backends)
			rule.Backends[r.IntN(len(rule.Backends))].Invalid = "spoiled"
			return "a backend"
		}
	}
	rule.Invalid = "spoiled"
	return "a rule"
}

// spell writes a plain path in another way that an application could read as the same.
func spell(r *rand.Rand, plain string) string {
	var b strings.Builder
	escape := func(c byte) {
		out := fmt.Sprintf([]string{"%%%02x", "%%%02X"}[r.IntN(2)], c)
		for range r.IntN(3) { // escapes of escapes, never more than three deep
			out = strings.ReplaceAll(out, "%", "%25")
		}
		b.WriteString(out)
	}
	for i := range len(plain) {
		c := plain[i]
		switch {
		case c == '/' && i > 0 && r.IntN(3) == 0:
			switch r.IntN(7) {
			case 0:
				b.WriteString("//")
			case 1:
				b.WriteString("/./")
			case 2:
				b.WriteString("/x/../")
			case 3:
				b.WriteByte('\\')
			case 4:
				escape('/')
			case 5:
				escape('\\')
			case 6:
				b.WriteString(";p=1/")
			}
		case c == '/' && i == 0 && r.IntN(4) == 0:
			b.WriteString([]string{"/open/../", "/./", "//", "/open/..;/", "/%2e/", "/open/%2e%2e/", "/..//", "/open%2f..%2f"}[r.IntN(8)])
		case c != '/' && r.IntN(5) == 0:
			escape(c)
		default:
			b.WriteByte(c)
		}
	}
	return b.String()
}

// hidden writes plain with more behind it, which applications do not see that cut an
// element at its ";" before they decode, or know no backslash.
func hidden(r *rand.Rand, plain string) string {
	one := func(of ...string) string { return of[r.IntN(len(of))] }
	out := one(";", ";p=1", "%3b", "%3Bq", "%253b") + one("%2f", "%2F", "\\", "%5c", "%252f", "%25255C") + one("", "z", "open/but", "%2e")
	if i := strings.LastIndexByte(plain, '/'); i > 0 && r.IntN(2) == 0 {
		return plain[:i] + out + plain[i:]
	}
	return plain + out
}

// undone writes a way to plain that other applications read as a way past it, to
// below open: they resolve the ".." elements, or fewer or more of them, in
// spellings that others do not know.
func undone(r *rand.Rand, plain, open string) string {
	one := func(of ...string) string { return of[r.IntN(len(of))] }
	out := open + "/" + one("..", "%2e%2e", ".%2e", "..;", "%252e%252e") + plain
	for range strings.Count(plain, "/") + r.IntN(2) {
		out += one("/", "/", "%5c", "\\", "%2f", "%252f") + one("%252e%252e", "..;", "..;x=1", "%2e%2e;", "..%3b", "..")
	}
	return out + one("/", "%5c", "\\", "%2f") + open[1:] + one("", "/x")
}

// TestNoSpellingIsDelivered: what policy denies or asks about under its plain path
// is not delivered, or not unasked, under any other spelling of it (decision 009).
func TestNoSpellingIsDelivered(t *testing.T) {
	s, problems := compile.Compile(modeltest.Mesh(t, `
service shop/cart 10.96.0.1
pods shop/cart 8080,9090
service shop/all 10.96.0.2
pods shop/all 8080
filter shop/no rbac policy=p;ns:none
filter shop/ask authz
route shop/cart cart:8080
rule match=prefix:/admin use=no
rule match=exact:/secret/file use=no
rule match=regex:/v[0-9]+/keys use=no
rule match=prefix:/ask/me use=ask
rule match=prefix:/open
rule match=prefix:/open/but/not/this use=no
grpcroute shop/calls cart:9090
rule match=grpc:echo.Echo/Shut use=no
filter shop/chain scope=chain target=all authz
route shop/all all
rule match=prefix:/a
local shop/web
local shop/cart 8080 cid=in1
local shop/all 8080 cid=in2
filter shop/in1 scope=inbound target=cart rbac deny policy=p;ns:shop;path:/admin;path:/secret/file policy=q;ns:shop;path:/open/but
filter shop/in2 scope=inbound target=all rbac policy=p;ns:shop;path:/public;path:/a/b/
`))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	const peer = " peer=spiffe://td/ns/shop/sa/web"
	r := rand.New(rand.NewPCG(15, 15))
	spellings := 0
	for _, tt := range []struct{ flow, host, path, plain, open string }{
		{"shop/web > 10.96.0.1:8080 http1", "cart", "/admin", "refuse rbac-denied", "/open"},
		{"shop/web > proxy http1", "cart:8080", "/admin/users/1", "refuse rbac-denied", "/open"},
		{"shop/web > 10.96.0.1:8080 http1", "cart", "/secret/file", "refuse rbac-denied", "/open"},
		{"shop/web > 10.96.0.1:8080 http1", "cart", "/v12/keys", "refuse rbac-denied", "/open"},
		{"shop/web > 10.96.0.1:8080 http1", "cart", "/open/but/not/this/one", "refuse rbac-denied", "/open"},
		{"shop/web > 10.96.0.1:9090 http1", "cart", "/echo.Echo/Shut", "refuse rbac-denied", "/echo.Echo"},
		{"shop/web > 10.96.0.1:8080 http1", "cart", "/ask/me/this", "forward http-route", "/open"},
		{"shop/web > 10.96.0.2:8080 http1", "all", "/a/b/c", "forward http-route", "/open"},
		{"shop/web > 10.96.0.2:8080 http1", "all", "/other/b", "forward declared-http", "/open"},
		{"shop/cart@in1 < 8080" + peer, "cart", "/admin/x", "refuse rbac-denied", "/open"},
		{"shop/cart@in1 < 8080" + peer, "cart", "/secret/file", "refuse rbac-denied", "/open"},
		{"shop/cart@in1 < 8080" + peer, "cart", "/open/but", "refuse rbac-denied", "/open"},
		{"shop/all@in2 < 8080" + peer, "all", "/private/x", "refuse rbac-denied", "/public"},
		{"shop/all@in2 < 8080" + peer, "all", "/a/c", "refuse rbac-denied", "/a/b"},
	} {
		f, err := model.ParseFlow(tt.flow)
		if err != nil {
			t.Fatal(err)
		}
		ask := func(path string) (decide.Verdict, *httpmsg.Head) {
			h := httpmsg.Head{Method: []byte("GET"), Scheme: []byte("http"), Authority: []byte(tt.host), Path: []byte(path), Minor: 1}
			return decide.Route(s, &f, &h, 0, nil), &h
		}
		v, _ := ask(tt.path)
		if got := v.Action.String() + " " + v.Reason.String(); got != tt.plain {
			t.Fatalf("%s | %s: %s, want %s", tt.flow, tt.path, got, tt.plain)
		}
		for i := range 4000 {
			path := spell(r, tt.path)
			if i%4 == 0 {
				if path = undone(r, tt.path, tt.open); i%8 == 0 {
					path = hidden(r, tt.path)
				}
				if got, _ := ask(path); got.Action != decide.Refuse {
					t.Fatalf("%s | %s, which some read as %s: %s", tt.flow, path, tt.path, got)
				}
				continue
			}
			if path == tt.path {
				continue
			}
			spellings++
			got, h := ask(path)
			switch {
			case got.Action == decide.Refuse:
			case v.Action == decide.Refuse:
				t.Fatalf("%s | %s, another spelling of %s: %s", tt.flow, path, tt.path, got)
			case got.Pipe == nil || got.Pipe.Authz != v.Pipe.Authz:
				t.Fatalf("%s | %s, another spelling of %s: %s, and %s is not asked", tt.flow, path, tt.path, got, v.Pipe.Authz.Name)
			case string(got.AuthzPath(h)) != tt.path:
				t.Fatalf("%s | %s, another spelling of %s: asked about %q", tt.flow, path, tt.path, got.AuthzPath(h))
			}
		}
	}
	t.Logf("%d spellings", spellings)
}

// TestSpellingsOfRandomMeshes: whatever the mesh, a spelling of a path is forwarded
// only as the plain path is, as far as policy goes.
func TestSpellingsOfRandomMeshes(t *testing.T) {
	looked := 0
	each(t, 9, func(t *testing.T, m *model.Mesh, s *snapshot.Snapshot, r *rand.Rand) {
		for range questions {
			f, h := aimed(r, m)
			path := []string{"/a", "/a/b", "/a/b/c", "/s/m", "/ab"}[r.IntN(5)]
			p := r.Uint32()
			h.Path = []byte(path)
			plain := decide.Route(s, &f, &h, p, nil)
			h.Path = []byte(spell(r, path))
			got := decide.Route(s, &f, &h, p, nil)
			if got.Action == decide.Refuse || got.Action == decide.Passthrough {
				continue
			}
			if plain.Reason == decide.RBACDenied {
				t.Errorf("%s | %s: %s, and as %s %s", f, model.RequestString(&h), got, path, plain)
			}
			if plain.Pipe.Policy() || got.Pipe.Policy() {
				looked++
				if plain.Pipe == nil || got.Pipe == nil || plain.Pipe.Authz != got.Pipe.Authz {
					t.Errorf("%s | %s: %s, and as %s %s", f, model.RequestString(&h), got, path, plain)
				}
			}
		}
	})
	t.Logf("%d spellings that carried policy", looked)
	if looked < 50 {
		t.Errorf("only %d spellings met policy: the test says nothing", looked)
	}
}

// FuzzRoute: any head gets a whole verdict from any mesh, the same one twice, with
// a trace or without, and acting on it breaks nothing.
func FuzzRoute(f *testing.F) {
	f.Add(uint64(1), uint64(1), "GET", "cart.shop:8080", "/a/../b?x=%2", "x-aether-pod", "cart-1", uint32(7))
	f.Add(uint64(2), uint64(9), "OPTIONS", "[::1]:80", "*", "origin", "https://a.example", uint32(0))
	f.Add(uint64(3), uint64(5), "CONNECT", "", "", "host", "\xff", ^uint32(0))
	f.Fuzz(func(t *testing.T, mesh, flow uint64, method, authority, path, name, value string, pick uint32) {
		s, _ := compile.Compile(modeltest.RandomMesh(rand.New(rand.NewPCG(mesh, 1))))
		fl := modeltest.RandomFlow(rand.New(rand.NewPCG(flow, 2)))
		h := httpmsg.Head{
			Method: []byte(method), Scheme: []byte("http"), Authority: []byte(authority), Path: []byte(path), Minor: 1,
			Fields: []httpmsg.Field{{Name: []byte(name), Value: []byte(value)}, {Name: []byte("version"), Value: []byte("1")}, {Name: []byte(name), Value: []byte(value)}},
		}
		v := decide.Route(s, &fl, &h, pick, nil)
		if why := unfit(s, &fl, v, true); why != "" {
			t.Fatalf("%s: %s", v, why)
		}
		if again := decide.Route(s, &fl, &h, pick, &decide.Trace{}); again != v {
			t.Fatalf("%s, and again %s", v, again)
		}
		if string(h.Path) != path || string(h.Authority) != authority || len(h.Fields) != 3 {
			t.Fatal("the head was written to")
		}
		told(s, &fl, &h, &v)
	})
}
