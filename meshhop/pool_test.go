package meshhop

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"aether/mtls/spiffeid"
)

func testKey(t *testing.T, pod, src string, n int) Key {
	t.Helper()
	id, err := spiffeid.ForServiceAccount("td", "t", src)
	if err != nil {
		t.Fatal(err)
	}
	return Key{Pod: pod, Source: id, Endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), 18008), SNI: "8080", Proto: H2, Pin: id}
}

// Every field of a key keeps sessions apart.
func TestPoolKeys(t *testing.T) {
	k := testKey(t, "p", "web", 1)
	p := NewPool[int]()
	at, ok := p.Reserve(k)
	if !ok || !p.Put(at, 1) {
		t.Fatal("no place in an empty pool")
	}
	for i, mod := range []func(*Key){
		func(k *Key) { k.Pod = "q" },
		func(k *Key) { k.Source = testKey(t, "p", "cart", 1).Source },
		func(k *Key) { k.Endpoint = netip.MustParseAddrPort("10.0.0.2:18008") },
		func(k *Key) { k.Endpoint = netip.AddrPortFrom(k.Endpoint.Addr(), 18009) },
		func(k *Key) { k.SNI = "8081" },
		func(k *Key) { k.Proto = Raw },
		func(k *Key) { k.Pin = testKey(t, "p", "cart", 1).Source },
	} {
		other := k
		mod(&other)
		if s, n := p.Get(other); len(s) != 0 || n != 0 {
			t.Errorf("change %d: %s found the session of %s", i, other, k)
		}
	}
	if s, _ := p.Get(k); !slices.Equal(s, []int{1}) {
		t.Error(s)
	}
}

// Random operations agree with a list that is searched from end to end.
func TestPoolModel(t *testing.T) {
	type row struct {
		k Key
		t int
	}
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	p := NewPool[int]()
	var rows []row
	type dial struct {
		at   Place[int]
		k    Key
		dead bool
	}
	var dials []dial
	keys := []Key{testKey(t, "a", "web", 1), testKey(t, "a", "web", 2), testKey(t, "b", "web", 1), testKey(t, "c", "cart", 9)}
	count := func(k Key) (sessions []int, dialing int) {
		for _, x := range rows {
			if x.k == k {
				sessions = append(sessions, x.t)
			}
		}
		for _, d := range dials {
			if d.k == k && !d.dead {
				dialing++
			}
		}
		return
	}
	for i := range 20000 {
		k := keys[r.IntN(len(keys))]
		switch op := r.IntN(100); {
		case op < 40:
			s, d := count(k)
			at, ok := p.Reserve(k)
			if ok != (len(s)+d < MaxSessions) {
				t.Fatalf("step %d: Reserve says %v with %d sessions and %d dials", i, ok, len(s), d)
			}
			if ok {
				dials = append(dials, dial{at, k, false})
			}
		case op < 75 && len(dials) > 0:
			j := r.IntN(len(dials))
			d := dials[j]
			dials = slices.Delete(dials, j, j+1)
			if r.IntN(4) == 0 {
				p.Release(d.at)
				break
			}
			if ok := p.Put(d.at, i); ok == d.dead {
				t.Fatalf("step %d: Put says %v, the pod was dropped: %v", i, ok, d.dead)
			} else if ok {
				rows = append(rows, row{d.k, i})
			}
		case op < 98 && len(rows) > 0:
			j := r.IntN(len(rows))
			x := rows[j]
			if p.Remove(keys[0], -1) || !p.Remove(x.k, x.t) || p.Remove(x.k, x.t) {
				t.Fatalf("step %d: Remove", i)
			}
			rows = slices.Delete(rows, j, j+1)
		case op >= 98:
			var want []int
			rows = slices.DeleteFunc(rows, func(x row) bool {
				if x.k.Pod == k.Pod {
					want = append(want, x.t)
				}
				return x.k.Pod == k.Pod
			})
			for j := range dials {
				dials[j].dead = dials[j].dead || dials[j].k.Pod == k.Pod
			}
			got := p.Drop(k.Pod)
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Fatalf("step %d: Drop gave %v, want %v", i, got, want)
			}
		}
		for _, k := range keys {
			s, d := count(k)
			if gs, gd := p.Get(k); !slices.Equal(gs, s) || gd != d {
				t.Fatalf("step %d: Get(%s) = %v, %d; want %v, %d", i, k, gs, gd, s, d)
			}
		}
		if p.Len() != len(rows) {
			t.Fatalf("step %d: Len %d, want %d", i, p.Len(), len(rows))
		}
	}
	all := map[int]Key{}
	for k, s := range p.All() {
		all[s] = k
	}
	want := map[int]Key{}
	for _, x := range rows {
		want[x.t] = x.k
	}
	if !maps.Equal(all, want) {
		t.Errorf("All: %v, want %v", all, want)
	}
}

func TestPoolAllocs(t *testing.T) {
	p := NewPool[*int]()
	k := testKey(t, "p", "web", 1)
	at, _ := p.Reserve(k)
	p.Put(at, new(int))
	if n := testing.AllocsPerRun(100, func() {
		if s, _ := p.Get(k); len(s) != 1 {
			t.Fatal("lost")
		}
	}); n != 0 {
		t.Errorf("%v allocations a Get, want 0", n)
	}
}
