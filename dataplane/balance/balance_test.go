package balance

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// point is what a test says about an endpoint; the address is its place.
type point struct {
	weight   uint32
	priority uint8
	health   model.Health
}

func set(points ...point) *snapshot.EndpointSet {
	var all []*snapshot.Endpoint
	for i, p := range points {
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 18008)
		all = append(all, &snapshot.Endpoint{Addr: a, Weight: p.weight, Priority: p.priority, Health: p.health})
	}
	return snapshot.NewEndpointSet(all)
}

const rounds = 200_000

// shares picks many times and returns each endpoint's share; index len is "none".
func shares(s *snapshot.EndpointSet, load func(int) uint32) []float64 {
	r := rand.New(rand.NewPCG(1, 2))
	out := make([]float64, s.Len()+1)
	for range rounds {
		i := Pick(s, load, r.Uint32())
		if i < 0 {
			i = s.Len()
		}
		out[i] += 1.0 / rounds
	}
	return out
}

func TestPickShares(t *testing.T) {
	healthy, unhealthy, draining := model.Healthy, model.Unhealthy, model.Draining
	for _, tt := range []struct {
		name string
		set  *snapshot.EndpointSet
		load func(int) uint32
		want []float64 // the last is "none"
	}{
		{"nobody", set(), nil, []float64{1}},
		{"one", set(point{1024, 0, healthy}), nil, []float64{1, 0}},
		{"unspecified counts as healthy", set(point{1024, 0, 0}), nil, []float64{1, 0}},
		{"unhealthy and draining never, even alone", set(point{1, 0, unhealthy}, point{1, 0, draining}), nil, []float64{0, 0, 1}},
		{"draining gets nothing new", set(point{1, 0, draining}, point{1, 0, healthy}), nil, []float64{0, 1, 0}},
		{"weight 0 gets nothing", set(point{0, 0, healthy}, point{5, 0, healthy}), nil, []float64{0, 1, 0}},
		{"without loads, by weight", set(point{100, 0, healthy}, point{300, 0, healthy}), nil, []float64{0.25, 0.75, 0}},
		{"idle of two always", set(point{1, 0, healthy}, point{1, 0, healthy}), func(i int) uint32 { return uint32(i * 9) }, []float64{1, 0, 0}},
		{"load counts for its weight", set(point{1, 0, healthy}, point{10, 0, healthy}), func(i int) uint32 { return []uint32{1, 9}[i] }, []float64{0, 1, 0}},
		{"excluded for another", set(point{1, 0, healthy}, point{1, 0, healthy}), func(i int) uint32 { return []uint32{Excluded, 999}[i] }, []float64{0, 1, 0}},
		{"all excluded", set(point{1, 0, healthy}, point{1, 1, healthy}), func(int) uint32 { return Excluded }, []float64{0, 0, 1}},
		{"excluded near: far", set(point{1, 0, healthy}, point{1, 1, healthy}), func(i int) uint32 { return []uint32{Excluded, 0}[i] }, []float64{0, 1, 0}},
		{"near first", set(point{1, 0, healthy}, point{9, 1, healthy}, point{9, 2, healthy}), nil, []float64{1, 0, 0, 0}},
		{"near gone: next", set(point{1, 0, unhealthy}, point{1, 2, healthy}), nil, []float64{0, 1, 0}},
		// 3 of 4 healthy are over 71 %: still all of the traffic.
		{"three of four suffice", set(point{1, 0, healthy}, point{1, 0, healthy}, point{1, 0, healthy}, point{1, 0, unhealthy}, point{1, 1, healthy}), nil,
			[]float64{1. / 3, 1. / 3, 1. / 3, 0, 0, 0}},
		// Half of them healthy: 70 % stay, 30 % spill.
		{"half spills", set(point{1, 0, healthy}, point{1, 0, unhealthy}, point{1, 1, healthy}), nil, []float64{0.7, 0, 0.3, 0}},
		// Both sick: 42 % and 42 % of what is there are scaled up to the whole.
		{"all sick: in proportion", set(
			point{1, 0, healthy}, point{1, 0, unhealthy}, point{1, 0, unhealthy}, point{1, 0, unhealthy},
			point{1, 1, healthy}, point{1, 1, unhealthy}, point{1, 1, unhealthy}, point{1, 1, unhealthy}), nil,
			[]float64{0.5, 0, 0, 0, 0.5, 0, 0, 0, 0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := shares(tt.set, tt.load)
			for i := range tt.want {
				if d := got[i] - tt.want[i]; d > 0.01 || d < -0.01 {
					t.Fatalf("shares %.3f, want %.3f", got, tt.want)
				}
			}
		})
	}
}

// TestPickEven runs requests that stay open against counters: two choices keep
// the fullest endpoint near the mean, where one choice would not.
func TestPickEven(t *testing.T) {
	const n, requests = 100, 100_000
	points := make([]point, n)
	for i := range points {
		points[i] = point{1024, 0, model.Healthy}
	}
	s, open := set(points...), make([]uint32, n)
	r := rand.New(rand.NewPCG(3, 4))
	for range requests {
		open[Pick(s, func(i int) uint32 { return open[i] }, r.Uint32())]++
	}
	for i, o := range open {
		if o > requests/n+10 {
			t.Errorf("endpoint %d holds %d, the mean is %d", i, o, requests/n)
		}
	}
}

// TestPickValid: whatever the set and the loads, the pick is usable and not
// excluded while such a one exists, and -1 exactly when none does.
func TestPickValid(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 20_000 {
		points := make([]point, r.IntN(7))
		loads := make([]uint32, len(points))
		possible := false
		for i := range points {
			points[i] = point{[]uint32{0, 1, 7, Excluded}[r.IntN(4)], uint8(r.IntN(4)), model.Health(r.IntN(4))}
			loads[i] = []uint32{0, 3, Excluded - 1, Excluded}[r.IntN(4)]
		}
		s := set(points...)
		for i, e := range s.All() {
			possible = possible || e.Usable() && loads[i] != Excluded
		}
		i := Pick(s, func(i int) uint32 { return loads[i] }, r.Uint32())
		switch {
		case i < 0 && possible, i >= 0 && !possible:
			t.Fatalf("picked %d of %v with loads %v", i, points, loads)
		case i >= 0 && (!s.At(i).Usable() || loads[i] == Excluded):
			t.Fatalf("picked unusable %d of %v with loads %v", i, points, loads)
		}
	}
}

var sink int

func TestPickAllocs(t *testing.T) {
	s, open := set(point{1, 0, 0}, point{2, 0, 0}, point{3, 1, 0}), make([]uint32, 3)
	rnd := uint32(0)
	if n := testing.AllocsPerRun(1000, func() { rnd++; sink = Pick(s, func(i int) uint32 { return open[i] }, rnd) }); n != 0 {
		t.Errorf("%v allocations a pick, want 0", n)
	}
}

func BenchmarkPick(b *testing.B) {
	points := make([]point, 100)
	for i := range points {
		points[i] = point{1024, uint8(i % 2), model.Healthy}
	}
	s, open := set(points...), make([]uint32, len(points))
	for i := range b.N {
		sink = Pick(s, func(i int) uint32 { return open[i] }, uint32(i))
	}
}
