package snapshot_test

import (
	"net/netip"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

func service(ns, name string, kubernetes bool) *snapshot.Service {
	return &snapshot.Service{Name: model.ServiceName{Namespace: ns, Name: name}, Kind: snapshot.Generated, Kubernetes: kubernetes, Rule: "Service " + ns + "/" + name}
}

func world() (*snapshot.Snapshot, *snapshot.Backend) {
	b := &snapshot.Backend{Name: "shop/cart:8080", Port: 8080}
	long := strings.Repeat("n", 63)
	s := snapshot.New(snapshot.Tables{
		Domain:   "aether.internal",
		Services: []*snapshot.Service{service(long, long, true), service("pay", "cart", true), service("shop", "cart", true), service("shop", "mine", false), service("svc", "a", true)},
		Backends: []*snapshot.Backend{b},
		Addresses: map[netip.Addr]*snapshot.Service{
			netip.MustParseAddr("10.96.0.1"): service("shop", "cart", true),
		},
		Workloads: []*snapshot.Workload{
			{ContainerID: "c2", Service: model.ServiceName{Namespace: "shop", Name: "web"}},
			{ContainerID: "c1", Service: model.ServiceName{Namespace: "shop", Name: "web"}},
		},
		Endpoints: snapshot.NewEndpointTable(make([]*snapshot.EndpointSet, 1)),
	})
	return s, b
}

// TestName walks the spellings of contract 4.5.
func TestName(t *testing.T) {
	s, _ := world()
	long := strings.Repeat("n", 63)
	for _, tt := range []struct {
		authority, caller string
		want              string // namespace/name:port, or what else there is to say
	}{
		{"cart", "shop", "shop/cart"},
		{"cart", "pay", "pay/cart"},
		{"cart", "third", "-"},
		{"cart", "", "no caller"},
		{"CART.:80", "shop", "shop/cart:80"},
		{"cart.shop", "pay", "shop/cart"},
		{"cart.shop.svc", "", "shop/cart"},
		{"cart.shop.svc:65535", "", "shop/cart:65535"},
		{"cart.shop.svc.cluster.local", "", "shop/cart"},
		{"cart.shop.svc.cluster.local.", "", "shop/cart"},
		{"cart.shop.aether.internal:1", "", "shop/cart:1 below"},
		{"Cart.Shop.Aether.Internal", "", "shop/cart below"},
		{"none.shop.aether.internal:9", "", "-:9 below"},
		{"mine.shop.aether.internal", "", "shop/mine below"},
		{"mine.shop.svc", "", "-"},
		{"mine", "shop", "-"},
		{"mine", "", "-"}, // nobody answers to it: not a fault
		{"a.svc", "", "svc/a"},
		{"a.svc.svc", "", "svc/a"},
		{long + "." + long, "", long + "/" + long},
		{long, long, long + "/" + long},
		{long + "." + long + ".aether.internal", "", long + "/" + long + " below"},
		{"x.cart.shop.aether.internal", "", "-"},
		{"shop.aether.internal", "", "-"},
		{"aether.internal", "", "-"},
		{"cart.shop.", "", "shop/cart"},
		{"cart", strings.Repeat("x", 64), "-"},
		{strings.Repeat("x", 253), "shop", "-"},
		{"", "shop", "malformed"},
		{".", "shop", "malformed"},
		{":80", "shop", "malformed"},
		{"cart:", "shop", "malformed"},
		{"cart:0", "shop", "malformed"},
		{"cart:080", "shop", "malformed"},
		{"cart:65536", "shop", "malformed"},
		{"cart:100000", "shop", "malformed"},
		{"cart:+80", "shop", "malformed"},
		{"cart:80:80", "shop", "malformed"},
		{"u@cart", "shop", "malformed"},
		{"ca rt", "shop", "malformed"},
		{"cart\x00", "shop", "malformed"},
		{"c\u00e4rt", "shop", "malformed"},
		{"[fd00::1]:80", "shop", "malformed"},
		{strings.Repeat("x", 254), "shop", "malformed"},
		{strings.Repeat("x", 4000), "shop", "malformed"},
		{"..", "shop", "-"},
		{"cart..", "shop", "-"},
		{".shop", "", "-"},
	} {
		n := snapshot.Name(s, tt.authority, tt.caller)
		if m := snapshot.Name(s, []byte(tt.authority), tt.caller); m != n {
			t.Errorf("%q: as bytes %+v, as a string %+v", tt.authority, m, n)
		}
		got := "-"
		switch {
		case !n.WellFormed:
			got = "malformed"
			if n.Service != nil || n.Below || n.NoCaller {
				t.Errorf("%q: malformed, and yet %+v", tt.authority, n)
			}
		case n.NoCaller:
			got = "no caller"
		case n.Service != nil:
			got = n.Service.Name.String()
		}
		if n.Port != 0 && n.WellFormed {
			got += ":" + netip.AddrPortFrom(netip.IPv4Unspecified(), n.Port).String()[len("0.0.0.0:"):]
		}
		if n.Below {
			got += " below"
		}
		if got != tt.want {
			t.Errorf("%q from %q: %s, want %s", tt.authority, tt.caller, got, tt.want)
		}
	}
}

// FuzzName: a service is found only for a well-formed authority, and what is
// found does not depend on letter case or on one trailing dot.
func FuzzName(f *testing.F) {
	s, _ := world()
	for _, a := range []string{"cart", "cart.shop:80", "Cart.shop.svc.cluster.local.:8080", "cart.shop.aether.internal", "[::1]:80", "a@b", "."} {
		f.Add(a, "shop")
	}
	f.Fuzz(func(t *testing.T, authority, caller string) {
		n := snapshot.Name(s, authority, caller)
		if !n.WellFormed && (n.Service != nil || n.Below || n.NoCaller) {
			t.Fatalf("%q: %+v", authority, n)
		}
		// Letters of other alphabets may not come back from upper case; not EqualFold, which would take more of them.
		lower, back := strings.ToLower(authority), strings.ToLower(strings.ToUpper(authority))
		if u := snapshot.Name(s, strings.ToUpper(authority), caller); n.WellFormed && u != n && lower == back {
			t.Fatalf("%q: %+v, in upper case %+v", authority, n, u)
		}
		host, port, has := strings.Cut(authority, ":")
		if n.WellFormed && len(host) < 253 && !strings.HasSuffix(host, ".") {
			dotted := host + "."
			if has {
				dotted += ":" + port
			}
			if d := snapshot.Name(s, dotted, caller); d != n {
				t.Fatalf("%q: %+v, with a dot %+v", authority, n, d)
			}
		}
	})
}

func TestHeaders(t *testing.T) {
	s, b := world()
	next := s.WithVersion(4).WithDraining(true).WithEndpoints(s.EndpointTable().With(0, snapshot.NewEndpointSet([]*snapshot.Endpoint{{Weight: 1}})))
	if s.Version() != 0 || s.Draining() || !s.Endpoints(b).Empty() {
		t.Error("a snapshot was changed")
	}
	if next.Version() != 4 || !next.Draining() || next.Endpoints(b).Len() != 1 || next.Address(netip.MustParseAddr("::ffff:10.96.0.1")) == nil {
		t.Error("the next one lacks something")
	}
	if !next.Endpoints(&snapshot.Backend{ID: 0}).Empty() || !next.Endpoints(nil).Empty() {
		t.Error("a backend of nowhere has endpoints")
	}
	f := model.Flow{Namespace: "shop", Workload: "web"}
	if w := s.WorkloadOf(&f); w == nil || w.ContainerID != "c1" {
		t.Errorf("by account: %+v", w)
	}
	if f.Container = "c2"; s.WorkloadOf(&f) != s.Workload("c2") || s.Workload("c2") == nil {
		t.Error("by container")
	}
	if f.Container = "c3"; s.WorkloadOf(&f) != nil {
		t.Error("a container that is not there was found")
	}
	if got := s.Service(model.ServiceName{Namespace: "shop", Name: "mine"}); got == nil || got.Name.Name != "mine" {
		t.Errorf("by name: %+v", got)
	}
	if s.Service(model.ServiceName{Namespace: "shop", Name: "nine"}) != nil {
		t.Error("a service that is not there was found")
	}
	var st snapshot.Store
	if st.Load() != nil {
		t.Error("an empty store is not empty")
	}
	if st.Swap(next); st.Load() != next {
		t.Error("the store lost it")
	}
}

func TestHeaderOps(t *testing.T) {
	field := func(n, v string) httpmsg.Field { return httpmsg.Field{Name: []byte(n), Value: []byte(v)} }
	o := &snapshot.HeaderOps{Set: []httpmsg.Field{field("b", "9"), field("new", "1")}, Add: []httpmsg.Field{field("b", "10"), field("gone", "back")}, Remove: [][]byte{[]byte("gone")}}
	h := httpmsg.Head{Fields: []httpmsg.Field{field("gone", "x"), field("b", "1"), field("c", "2"), field("b", "3"), field("gone", "y")}}
	o.Apply(&h)
	var got []string
	for _, f := range h.Fields {
		got = append(got, string(f.Name)+"="+string(f.Value))
	}
	if s := strings.Join(got, " "); s != "b=9 c=2 new=1 b=10 gone=back" {
		t.Error(s)
	}
	(*snapshot.HeaderOps)(nil).Apply(&h)
}

func TestEndpointSet(t *testing.T) {
	at := func(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }
	set := snapshot.NewEndpointSet([]*snapshot.Endpoint{{Addr: at("10.0.0.3:1"), Weight: 1}, {Addr: at("10.0.0.1:1"), Weight: 1, Priority: 1}, {Addr: at("10.0.0.2:1")}})
	if set.Len() != 3 || set.At(0).Addr != at("10.0.0.1:1") || set.Find(at("10.0.0.3:1")) != 2 || set.Find(at("10.0.0.3:2")) != -1 {
		t.Errorf("%+v", set.All())
	}
	// Half of priority 0 is usable (weight 0 is not): 70 % stay.
	if l := set.Levels(); len(l) != 2 || l[0].Upto != 700*snapshot.ShareOf/1000 || l[1].Upto != snapshot.ShareOf {
		t.Errorf("levels %+v", l)
	}
	if !snapshot.NewEndpointSet(nil).Empty() || !snapshot.NewEndpointSet([]*snapshot.Endpoint{{Weight: 0}}).Empty() {
		t.Error("something to pick where there is nothing")
	}
}

func TestNewPanics(t *testing.T) {
	for name, tables := range map[string]snapshot.Tables{
		"no endpoint table":    {},
		"backend out of place": {Backends: []*snapshot.Backend{{ID: 1}}, Endpoints: snapshot.NewEndpointTable(make([]*snapshot.EndpointSet, 1))},
		"service twice":        {Services: []*snapshot.Service{service("a", "b", true), service("a", "b", true)}, Endpoints: snapshot.NewEndpointTable(nil)},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			snapshot.New(tables)
		}()
	}
}

var found snapshot.Named

func TestNameAllocs(t *testing.T) {
	s, _ := world()
	host := []byte("Cart.Shop.svc.cluster.local.:8080")
	if n := testing.AllocsPerRun(1000, func() { found = snapshot.Name(s, host, "shop") }); n != 0 || found.Service == nil {
		t.Errorf("%v allocations, want 0 (%+v)", n, found)
	}
}
