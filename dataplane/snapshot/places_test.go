package snapshot_test

import (
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
	"aether/e2e/testseed"
)

// TestHTTPEndpoint holds the index of addresses against a walk over all sets, through random changes, and older
// tables are as they were.
func TestHTTPEndpoint(t *testing.T) {
	r := testseed.Rand(t)
	addr := func(i int) netip.Addr {
		if i%5 == 0 {
			return netip.AddrFrom16([16]byte{0xfd, 15: byte(i)})
		}
		return netip.AddrFrom4([4]byte{10, 244, byte(i / 7), byte(i)})
	}
	set := func() *snapshot.EndpointSet {
		var all []*snapshot.Endpoint
		for range r.IntN(6) {
			all = append(all, &snapshot.Endpoint{Addr: netip.AddrPortFrom(addr(r.IntN(40)), 18008), Weight: 1})
		}
		return snapshot.NewEndpointSet(all)
	}
	var backends []*snapshot.Backend
	for i := range 300 { // more than a chunk
		class := model.HTTP
		if i%4 == 0 {
			class = model.TCP
		}
		backends = append(backends, &snapshot.Backend{ID: i, Port: uint16(8080 + i%3), Class: class, Name: "b" + strconv.Itoa(i)})
	}
	type world struct {
		s    *snapshot.Snapshot
		sets []*snapshot.EndpointSet
	}
	check := func(w world) {
		t.Helper()
		for i := range 40 {
			for port := uint16(8079); port < 8084; port++ {
				a, want := addr(i), false
				for id, set := range w.sets {
					b := backends[id]
					want = want || set != nil && b.Port == port && b.Class == model.HTTP && slices.ContainsFunc(set.All(), func(e *snapshot.Endpoint) bool { return e.Addr.Addr() == a })
				}
				for _, a := range []netip.Addr{a, netip.AddrFrom16(a.As16())} {
					if b := w.s.HTTPEndpoint(a, port); (b != nil) != want || b != nil && (b.Port != port || b.Class != model.HTTP) {
						t.Fatalf("%s port %d: %+v, want one: %v", a, port, b, want)
					}
				}
			}
		}
	}
	size := 200
	sets := make([]*snapshot.EndpointSet, size)
	for i := range sets {
		sets[i] = set()
	}
	table := snapshot.NewEndpointTable(sets)
	of := func() world {
		return world{snapshot.New(snapshot.Tables{Backends: backends[:size], Endpoints: table}), slices.Clone(sets)}
	}
	before := of()
	check(before)
	for range 60 {
		old := size
		size = max(1, min(len(backends), size+r.IntN(41)-20))
		if sets = sets[:min(old, size)]; size > old {
			sets = append(sets, make([]*snapshot.EndpointSet, size-old)...)
		}
		var at []snapshot.SetAt
		for range r.IntN(5) {
			id := r.IntN(size)
			sets[id] = set()
			at = append(at, snapshot.SetAt{ID: id, Set: sets[id]})
		}
		table = table.Update(size, at)
		check(of())
	}
	check(before)
	s := of().s
	if n := testing.AllocsPerRun(100, func() { s.HTTPEndpoint(addr(7), 8080) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if (*snapshot.Snapshot)(nil).HTTPEndpoint(addr(1), 8080) != nil {
		t.Error("an endpoint of no snapshot")
	}
}
