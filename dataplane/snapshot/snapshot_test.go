package snapshot_test

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
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
	cart := service("shop", "cart", true)
	s := snapshot.New(snapshot.Tables{
		Domain:   "aether.internal",
		Services: []*snapshot.Service{service(long, long, true), service("pay", "cart", true), cart, service("shop", "mine", false), service("svc", "a", true)},
		Backends: []*snapshot.Backend{b},
		Addresses: map[netip.Addr]*snapshot.Service{
			netip.MustParseAddr("10.96.0.1"): cart,
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
	if !next.Endpoints(&snapshot.Backend{ID: 0}).Empty() || !next.Endpoints(&snapshot.Backend{ID: -1}).Empty() || !next.Endpoints(&snapshot.Backend{ID: 9}).Empty() || !next.Endpoints(nil).Empty() {
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

// TestWithServices: the next snapshot finds the new service by name and address,
// the one before the old one.
func TestWithServices(t *testing.T) {
	s, b := world()
	name := model.ServiceName{Namespace: "shop", Name: "cart"}
	ip := netip.MustParseAddr("10.96.0.1")
	cart := service("shop", "cart", true)
	more := &snapshot.Backend{Name: "shop/cart:9090", Port: 9090, ID: 1}
	set := snapshot.NewEndpointSet([]*snapshot.Endpoint{{Weight: 1}})
	n := s.WithVersion(3).WithServices([]*snapshot.Service{cart}, []*snapshot.Backend{b, more}, s.EndpointTable().Update(2, []snapshot.SetAt{{ID: 1, Set: set}}))
	for _, got := range []*snapshot.Service{n.Service(name), n.Address(ip), snapshot.Name(n, "cart", "shop").Service} {
		if got != cart {
			t.Errorf("%p, want %p", got, cart)
		}
	}
	for _, got := range []*snapshot.Service{s.Service(name), s.Address(ip), snapshot.Name(s, "cart", "shop").Service} {
		if got == nil || got == cart {
			t.Error("the snapshot before changed")
		}
	}
	if n.Endpoints(more) != set || !s.Endpoints(more).Empty() || n.Version() != 3 || n.Workload("c1") == nil {
		t.Error("the rest of it")
	}
	for _, c := range []*snapshot.Service{service("shop", "cart", false), service("shop", "none", true)} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", c.Name)
				}
			}()
			s.WithServices([]*snapshot.Service{c}, []*snapshot.Backend{b}, s.EndpointTable())
		}()
	}
}

// TestApply: every kind of change, on a field that is there twice, once and not.
func TestApply(t *testing.T) {
	field := func(n, v string) httpmsg.Field { return httpmsg.Field{Name: []byte(n), Value: []byte(v)} }
	for _, tt := range []struct {
		kind model.MutationKind
		name string
		want string
	}{
		{model.AppendIfExistsOrAdd, "twice", "twice=1 once=2 twice=3 twice=new"},
		{model.AppendIfExistsOrAdd, "none", "twice=1 once=2 twice=3 none=new"},
		{model.AddIfAbsent, "once", "twice=1 once=2 twice=3"},
		{model.AddIfAbsent, "none", "twice=1 once=2 twice=3 none=new"},
		{model.OverwriteIfExistsOrAdd, "twice", "twice=new once=2"},
		{model.OverwriteIfExistsOrAdd, "none", "twice=1 once=2 twice=3 none=new"},
		{model.OverwriteIfExists, "once", "twice=1 once=new twice=3"},
		{model.OverwriteIfExists, "none", "twice=1 once=2 twice=3"},
		{model.RemoveAll, "twice", "once=2"},
		{model.RemoveAll, "none", "twice=1 once=2 twice=3"},
		{model.RemoveAll + 1, "once", "twice=1 once=2 twice=3"},
	} {
		h := httpmsg.Head{Fields: []httpmsg.Field{field("twice", "1"), field("once", "2"), field("twice", "3")}}
		snapshot.Apply([]snapshot.Op{{Kind: tt.kind, Name: []byte(tt.name), Value: []byte("new")}}, &h)
		var got []string
		for _, f := range h.Fields {
			got = append(got, string(f.Name)+"="+string(f.Value))
		}
		if s := strings.Join(got, " "); s != tt.want {
			t.Errorf("%d %s: %s, want %s", tt.kind, tt.name, s, tt.want)
		}
	}
	h := httpmsg.Head{Fields: make([]httpmsg.Field, 0, 8)}
	ops := []snapshot.Op{{Kind: model.AppendIfExistsOrAdd, Name: []byte("a"), Value: []byte("1")}, {Kind: model.AppendIfExistsOrAdd, Name: []byte("a"), Value: []byte("2")}, {Kind: model.RemoveAll, Name: []byte("a")}}
	if n := testing.AllocsPerRun(1000, func() { snapshot.Apply(ops, &h) }); n != 0 || len(h.Fields) != 0 {
		t.Errorf("%v allocations where there is room, and %d fields", n, len(h.Fields))
	}
}

// TestPolicy: what counts as a decision over access.
func TestPolicy(t *testing.T) {
	for _, tt := range []struct {
		pipe *snapshot.FilterChain
		want bool
	}{
		{nil, false},
		{&snapshot.FilterChain{}, false},
		{&snapshot.FilterChain{CORS: &snapshot.CORS{}, Selectors: make([]snapshot.Selector, 1)}, false},
		{&snapshot.FilterChain{RBAC: []snapshot.RBAC{{Audit: true}}}, false},
		{&snapshot.FilterChain{RBAC: []snapshot.RBAC{{Audit: true}, {Deny: true}}}, true},
		{&snapshot.FilterChain{Authz: &snapshot.Authz{}}, true},
	} {
		if got := tt.pipe.Policy(); got != tt.want {
			t.Errorf("%+v: %v", tt.pipe, got)
		}
	}
}

// TestGroups: a consumer's program and split stand in the place of the producer's.
func TestGroups(t *testing.T) {
	own, theirs := &snapshot.Program{}, &snapshot.Program{}
	split, theirSplit := &snapshot.Split{}, &snapshot.Split{}
	p := &snapshot.Port{Program: own, Consumers: map[string]*snapshot.Program{"pay": theirs}, Split: split, Splits: map[string]*snapshot.Split{"pay": theirSplit}}
	if p.ProgramFor("pay") != theirs || p.ProgramFor("shop") != own || p.ProgramFor("") != own || p.SplitFor("pay") != theirSplit || p.SplitFor("shop") != split {
		t.Error("another group's")
	}
	if none := (&snapshot.Port{}); none.ProgramFor("pay") != nil || none.SplitFor("pay") != nil {
		t.Error("something where there is nothing")
	}
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

// TestEndpointTable walks a table and a plain slice through the same random
// changes: they agree, older tables stay as they were, and only what changed is new.
func TestEndpointTable(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	fresh := func() *snapshot.EndpointSet { return snapshot.NewEndpointSet([]*snapshot.Endpoint{{Weight: 1}}) }
	empty := snapshot.NewEndpointSet(nil)
	table, plain := snapshot.NewEndpointTable(nil), []*snapshot.EndpointSet{}
	for range 400 {
		was, before := table, slices.Clone(plain)
		size := r.IntN(900)
		if r.IntN(2) == 0 {
			size = len(plain)
		}
		for len(plain) < size {
			plain = append(plain, empty)
		}
		plain = plain[:size]
		var at []snapshot.SetAt
		for range min(size, r.IntN(5)) {
			a := snapshot.SetAt{ID: r.IntN(size), Set: fresh()}
			if r.IntN(4) == 0 {
				a.Set = nil
			}
			at = append(at, a)
			if plain[a.ID] = a.Set; a.Set == nil {
				plain[a.ID] = empty
			}
		}
		table = table.Update(size, at)
		for _, x := range []struct {
			table *snapshot.EndpointTable
			want  []*snapshot.EndpointSet
		}{{was, before}, {table, plain}} {
			if x.table.Len() != len(x.want) {
				t.Fatalf("%d sets, want %d", x.table.Len(), len(x.want))
			}
			for i, want := range x.want {
				if x.table.Set(i) != want {
					t.Fatalf("set %d of %d is another", i, len(x.want))
				}
			}
		}
	}
}

// TestSubset compares selections with a plain filter over the endpoints (contract 5.10).
func TestSubset(t *testing.T) {
	at := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 18008)
	}
	keys := []string{"a", "b", "c", "d", "e", "f", "ip", "Upper"}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 7))
		var all []*snapshot.Endpoint
		have := map[string]bool{}
		for i := range 1 + r.IntN(12) {
			e := &snapshot.Endpoint{Addr: at(i), Pod: "p" + strconv.Itoa(i), Weight: uint32(r.IntN(3)), Health: model.Health(r.IntN(4)), Priority: uint8(r.IntN(3)), Metadata: map[string]string{}}
			for _, k := range keys {
				if r.IntN(2) == 0 {
					e.Metadata[k] = strconv.Itoa(r.IntN(3))
					have[k] = have[k] || snapshot.RoutableKey(k)
				}
			}
			all = append(all, e)
		}
		var known []string
		for _, k := range keys {
			if have[k] {
				known = append(known, k)
			}
		}
		set := snapshot.NewEndpointSet(slices.Clone(all))
		for range 30 {
			var want []snapshot.Want
			for _, k := range []string{"a", "b", "c", "d", "e", "f", "g"} {
				if r.IntN(3) == 0 {
					want = append(want, snapshot.Want{Key: []byte(k), Value: []byte(strconv.Itoa(r.IntN(3)))})
				}
			}
			ok := len(want) > 0
			for _, w := range want { // beyond the first four keys one selects alone only
				if i := slices.Index(known, string(w.Key)); i >= 4 && len(want) > 1 {
					ok = false
				}
			}
			var members []*snapshot.Endpoint
			for _, e := range all {
				all := true
				for _, w := range want {
					v, there := e.Metadata[string(w.Key)]
					all = all && there && v == string(w.Value)
				}
				if all {
					members = append(members, e)
				}
			}
			got, gotOK := set.Subset(want)
			if gotOK != ok || ok && !slices.Equal(got.All(), members) {
				t.Fatalf("seed %d, %s: %d endpoints, %v; want %d, %v", seed, want, got.Len(), gotOK, len(members), ok)
			}
			if ok && !slices.EqualFunc(got.Levels(), snapshot.NewEndpointSet(members).Levels(), func(a, b snapshot.Level) bool {
				return a.Upto == b.Upto && slices.Equal(a.Index, b.Index) && slices.Equal(a.Weight, b.Weight)
			}) {
				t.Fatalf("seed %d, %s: levels %v", seed, want, got.Levels())
			}
		}
	}
}

// TestServiceSet: which keys combine depends on the whole service, not on the set.
func TestServiceSet(t *testing.T) {
	e := &snapshot.Endpoint{Weight: 1, Metadata: map[string]string{"k2": "2", "tier": "1"}}
	want := []snapshot.Want{{Key: []byte("k2"), Value: []byte("2")}, {Key: []byte("tier"), Value: []byte("1")}}
	if got, ok := snapshot.NewEndpointSet([]*snapshot.Endpoint{e}).Subset(want); !ok || got.Len() != 1 {
		t.Errorf("two keys of two: %d endpoints, %v", got.Len(), ok)
	}
	set := snapshot.NewServiceSet([]*snapshot.Endpoint{e}, []string{"k1", "k2", "k3", "lane", "tier"})
	if got, ok := set.Subset(want); ok || got != set {
		t.Errorf("the second and the fifth key: %d endpoints, %v", got.Len(), ok)
	}
	if got, ok := set.Subset(want[1:]); !ok || got.Len() != 1 {
		t.Errorf("the fifth alone: %d endpoints, %v", got.Len(), ok)
	}
	if got := set.Keys(); len(got) != 5 || snapshot.NewEndpointSet(nil).Keys() != nil {
		t.Errorf("keys %v", got)
	}
}

// TestSubsetLookalikes: values that hold what could be taken for a boundary select nobody else.
func TestSubsetLookalikes(t *testing.T) {
	set := snapshot.NewEndpointSet([]*snapshot.Endpoint{{Weight: 1, Metadata: map[string]string{"a": "x\x00\x00\x01y", "b": "z"}}})
	for _, w := range [][]snapshot.Want{
		{{Key: []byte("a"), Value: []byte("x")}},
		{{Key: []byte("a"), Value: []byte("x\x00\x00\x01y\x00")}},
		{{Key: []byte("a"), Value: []byte("x\x00\x00\x01yb\x00\x00\x01z")}},
		{{Key: []byte("a"), Value: make([]byte, 1<<16)}},
		{{Key: []byte("c"), Value: []byte("z")}},
	} {
		if got, ok := set.Subset(w); !ok || got.Len() != 0 {
			t.Errorf("%q: %d endpoints, %v", w, got.Len(), ok)
		}
	}
}

func TestRoutableKey(t *testing.T) {
	for key, want := range map[string]bool{
		"a": true, "version": true, "a-b": true, "9": true, "": false, "-a": false, "a-": false, "-": false, "A": false, "a_b": false, "a.b": false,
		"ip": false, "pod": false, "cluster": false, "namespace": false, "ips": true,
	} {
		if snapshot.RoutableKey(key) != want {
			t.Errorf("%q: %v", key, !want)
		}
	}
}

func TestNewPanics(t *testing.T) {
	for name, tables := range map[string]snapshot.Tables{
		"no endpoint table":    {},
		"backend out of place": {Backends: []*snapshot.Backend{{ID: 1}}, Endpoints: snapshot.NewEndpointTable(make([]*snapshot.EndpointSet, 1))},
		"out of order":         {Services: []*snapshot.Service{service("b", "a", true), service("a", "b", true)}, Endpoints: snapshot.NewEndpointTable(nil)},
		"stray address":        {Addresses: map[netip.Addr]*snapshot.Service{{}: service("a", "b", true)}, Endpoints: snapshot.NewEndpointTable(nil)},
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

var selected *snapshot.EndpointSet

func TestSubsetAllocs(t *testing.T) {
	set := snapshot.NewEndpointSet([]*snapshot.Endpoint{{Weight: 1, Metadata: map[string]string{"tier": "gold", "version": "v2"}}})
	want := []snapshot.Want{{Key: []byte("tier"), Value: []byte("gold")}, {Key: []byte("version"), Value: []byte("v2")}}
	if n := testing.AllocsPerRun(1000, func() { selected, _ = set.Subset(want) }); n != 0 || selected.Len() != 1 {
		t.Errorf("%v allocations, want 0 (%d endpoints)", n, selected.Len())
	}
}

func TestNameAllocs(t *testing.T) {
	s, _ := world()
	host := []byte("Cart.Shop.svc.cluster.local.:8080")
	if n := testing.AllocsPerRun(1000, func() { found = snapshot.Name(s, host, "shop") }); n != 0 || found.Service == nil {
		t.Errorf("%v allocations, want 0 (%+v)", n, found)
	}
}
