package balance

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// point is what a test says about an endpoint; the address is its place.
type point struct {
	weight   uint32
	priority uint8
	health   model.Health
}

func addr(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 18008)
}

func set(points ...point) *snapshot.EndpointSet {
	var all []*snapshot.Endpoint
	for i, p := range points {
		all = append(all, &snapshot.Endpoint{Addr: addr(i), Weight: p.weight, Priority: p.priority, Health: p.health})
	}
	return snapshot.NewEndpointSet(all)
}

// same is n endpoints alike.
func same(n int) *snapshot.EndpointSet {
	return set(slices.Repeat([]point{{1024, 0, model.Healthy}}, n)...)
}

var cart = &snapshot.Backend{Name: "shop/cart:8080", Port: 8080}

func view(s *snapshot.EndpointSet) *View { return new(Table).View(cart, s) }

const rounds = 40_000 // 0.01 is four standard deviations

// shares picks many times at a time and returns each endpoint's share; index len is "none".
func shares(v *View, now time.Duration, tried ...int) []float64 {
	r := rand.New(rand.NewPCG(1, 2))
	out := make([]float64, v.set.Len()+1)
	var not []netip.AddrPort
	for _, i := range tried {
		not = append(not, addr(i))
	}
	for range rounds {
		i := v.Pick(int64(now), r.Uint32(), not)
		if i < 0 {
			i = v.set.Len()
		}
		out[i] += 1.0 / rounds
	}
	return out
}

func near(got, want []float64, by float64) bool {
	return slices.EqualFunc(got, want, func(a, b float64) bool { return math.Abs(a-b) <= by })
}

func TestPickShares(t *testing.T) {
	healthy, unhealthy, draining := model.Healthy, model.Unhealthy, model.Draining
	two := func() *snapshot.EndpointSet { return same(2) }
	busy := func(open ...int) func(*View) {
		return func(v *View) {
			for i, n := range open {
				for range n {
					v.Dest().Begin(v.At(i), 0)
				}
			}
		}
	}
	// answers makes endpoints that have answered in that many milliseconds.
	answers := func(ms ...int) func(*View) {
		return func(v *View) {
			for i, n := range ms {
				v.Dest().Answered(v.At(i), 0, time.Duration(n)*time.Millisecond, 200, v.set.Len())
			}
		}
	}
	ejected := func(which ...int) func(*View) {
		return func(v *View) {
			for _, i := range which {
				for n := range maxLocals {
					v.Dest().Failed(v.At(i), 0, 0, uint64(n+1), 1000)
				}
				if v.At(i).EjectedFor(0) == 0 {
					t.Fatal("not ejected")
				}
			}
		}
	}
	for _, tt := range []struct {
		name  string
		set   *snapshot.EndpointSet
		known func(*View) // at time 0
		now   time.Duration
		tried []int
		want  []float64 // the last is "none"
	}{
		{name: "nobody", set: set(), want: []float64{1}},
		{name: "one", set: same(1), want: []float64{1, 0}},
		{name: "unspecified counts as healthy", set: set(point{1024, 0, 0}), want: []float64{1, 0}},
		{name: "unhealthy and draining never, even alone", set: set(point{1, 0, unhealthy}, point{1, 0, draining}), want: []float64{0, 0, 1}},
		{name: "draining gets nothing new", set: set(point{1, 0, draining}, point{1, 0, healthy}), want: []float64{0, 1, 0}},
		{name: "weight 0 gets nothing", set: set(point{0, 0, healthy}, point{5, 0, healthy}), want: []float64{0, 1, 0}},
		{name: "idle: by weight", set: set(point{100, 0, healthy}, point{300, 0, healthy}), want: []float64{0.25, 0.75, 0}},
		{name: "the less busy of two", set: two(), known: busy(0, 1), want: []float64{1, 0, 0}},
		{name: "busy for its weight", set: set(point{1, 0, healthy}, point{10, 0, healthy}), known: busy(1, 9), want: []float64{0, 1, 0}},
		{name: "tried: another", set: two(), known: busy(0, 999), tried: []int{0}, want: []float64{0, 1, 0}},
		{name: "all tried", set: set(point{1, 0, healthy}, point{1, 1, healthy}), tried: []int{0, 1}, want: []float64{0, 0, 1}},
		{name: "tried near: far", set: set(point{1, 0, healthy}, point{1, 1, healthy}), tried: []int{0}, want: []float64{0, 1, 0}},
		{name: "two of three tried", set: same(3), tried: []int{0, 1}, want: []float64{0, 0, 1, 0}},
		{name: "near first", set: set(point{1, 0, healthy}, point{9, 1, healthy}, point{9, 2, healthy}), want: []float64{1, 0, 0, 0}},
		{name: "near gone: next", set: set(point{1, 0, unhealthy}, point{1, 2, healthy}), want: []float64{0, 1, 0}},
		// Contract 5.5: full while at least 1/1.4 of them are healthy.
		{name: "three of four suffice", set: set(point{1, 0, healthy}, point{1, 0, healthy}, point{1, 0, healthy}, point{1, 0, unhealthy}, point{1, 1, healthy}),
			want: []float64{1. / 3, 1. / 3, 1. / 3, 0, 0, 0}},
		{name: "half of them: 70 % stay", set: set(point{1, 0, healthy}, point{1, 0, unhealthy}, point{1, 1, healthy}), want: []float64{0.7, 0, 0.3, 0}},
		// Both sick: 42 % and 42 % of what is there are scaled up to the whole.
		{name: "all sick: in proportion", set: set(
			point{1, 0, healthy}, point{1, 0, unhealthy}, point{1, 0, unhealthy}, point{1, 0, unhealthy},
			point{1, 1, healthy}, point{1, 1, unhealthy}, point{1, 1, unhealthy}, point{1, 1, unhealthy}),
			want: []float64{0.5, 0, 0, 0, 0.5, 0, 0, 0, 0}},

		// Latencies.
		{name: "twice as slow is alike", set: two(), known: answers(5, 10), want: []float64{0.5, 0.5, 0}},
		{name: "three times as slow is not", set: two(), known: answers(5, 15), want: []float64{1, 0, 0}},
		{name: "below a millisecond is alike", set: two(), known: func(v *View) {
			v.Dest().Answered(v.At(0), 0, 10*time.Microsecond, 200, 2)
			v.Dest().Answered(v.At(1), 0, 900*time.Microsecond, 200, 2)
		}, want: []float64{0.5, 0.5, 0}},
		{name: "unknown is as good", set: two(), known: answers(5), want: []float64{0.5, 0.5, 0}},
		{name: "slow, but the other is busier by more", set: two(), known: func(v *View) { answers(5, 15)(v); busy(5)(v) }, want: []float64{0, 1, 0}},
		{name: "an old estimate excuses", set: two(), known: func(v *View) {
			answers(0, 50)(v)
			v.Dest().Answered(v.At(0), int64(20*time.Second), 5*time.Millisecond, 200, 2)
		}, now: 24 * time.Second, want: []float64{0.5, 0.5, 0}}, // 50 ms have faded to 4.5
		{name: "also after an answer that was not measured", set: two(), known: func(v *View) {
			answers(0, 50)(v)
			v.Dest().Answered(v.At(0), int64(20*time.Second), 5*time.Millisecond, 200, 2)
			v.Dest().Answered(v.At(1), int64(20*time.Second), 0, 200, 2)
		}, now: 24 * time.Second, want: []float64{0.5, 0.5, 0}},
		{name: "and does not recommend", set: two(), known: func(v *View) {
			answers(20)(v) // is still 20, and not the 1 ms that it has faded to
			v.Dest().Answered(v.At(1), int64(18*time.Second), 50*time.Millisecond, 200, 2)
		}, now: 30 * time.Second, want: []float64{0.5, 0.5, 0}}, // 50 ms have faded to 15
		{name: "nor does one that only has faded more", set: two(), known: func(v *View) {
			answers(50)(v)
			v.Dest().Answered(v.At(1), int64(time.Minute), 50*time.Millisecond, 200, 2)
		}, now: time.Minute, want: []float64{0.5, 0.5, 0}},

		// Failures.
		{name: "an error of the application's is forgiven", set: two(), known: func(v *View) { v.Dest().Answered(v.At(0), 0, 1, 500, 2) }, want: []float64{0.5, 0.5, 0}},
		{name: "two are not", set: two(), known: func(v *View) { v.Dest().Answered(v.At(0), 0, 1, 500, 2); v.Dest().Answered(v.At(0), 0, 1, 500, 2) }, want: []float64{0, 1, 0}},
		{name: "a failed connect is not", set: two(), known: func(v *View) { v.Dest().Failed(v.At(0), 0, 0, 1, 2) }, want: []float64{0, 1, 0}},
		{name: "for a while", set: two(), known: func(v *View) { v.Dest().Failed(v.At(0), 0, 0, 1, 2) }, now: 8 * time.Second, want: []float64{0.5, 0.5, 0}},
		{name: "all of them fail: as ever", set: two(), known: func(v *View) { v.Dest().Failed(v.At(0), 0, 0, 1, 2); v.Dest().Failed(v.At(1), 0, 0, 1, 2) }, want: []float64{0.5, 0.5, 0}},

		// Ejection counts as ill health, and there is no panic.
		{name: "ejected", set: two(), known: ejected(0), want: []float64{0, 1, 0}},
		{name: "and back", set: two(), known: ejected(0), now: baseEjection, want: []float64{0.5, 0.5, 0}},
		{name: "ejected near: spills as ill health does", set: set(point{1, 0, healthy}, point{1, 0, healthy}, point{1, 1, healthy}), known: ejected(0), want: []float64{0, 0.7, 0.3, 0}},
		{name: "all ejected: none", set: two(), known: ejected(0, 1), want: []float64{0, 0, 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := view(tt.set)
			if tt.known != nil {
				tt.known(v)
			}
			if got := shares(v, tt.now, tt.tried...); !near(got, tt.want, 0.01) {
				t.Fatalf("shares %.3f, want %.3f", got, tt.want)
			}
		})
	}
}

// TestPickSubset: what is known of an endpoint is known in every subset that it is
// in, ejection too, and priorities are those within the subset (contract 5.10).
func TestPickSubset(t *testing.T) {
	var all []*snapshot.Endpoint
	for i := range 4 {
		all = append(all, &snapshot.Endpoint{Addr: addr(i), Weight: 1, Priority: uint8(i % 2), Metadata: map[string]string{"version": []string{"a", "b"}[i/2]}})
	}
	whole := snapshot.NewEndpointSet(all)
	sub, ok := whole.Subset([]snapshot.Want{{Key: []byte("version"), Value: []byte("b")}})
	if !ok || sub.Len() != 2 {
		t.Fatalf("subset of %d", sub.Len())
	}
	var table Table
	v := table.View(cart, sub) // of 2 (near) and 3 (far)
	if got := shares(v, 0); !near(got, []float64{1, 0, 0}, 0.01) {
		t.Fatalf("shares %.3f: near first, within the subset", got)
	}
	w := table.View(cart, whole)
	for n := range maxLocals {
		w.Dest().Failed(w.At(2), 0, 0, uint64(n+1), whole.Len())
	}
	if got := shares(v, 0); !near(got, []float64{0, 1, 0}, 0.01) {
		t.Errorf("shares %.3f after an ejection, want the other one of the subset", got)
	}
	for n := range maxLocals {
		w.Dest().Failed(w.At(3), 0, 0, uint64(n+10), whole.Len())
	}
	if got := shares(v, 0); !near(got, []float64{0, 0, 1}, 0.01) {
		t.Errorf("shares %.3f after two ejections: a subset does not fall back to what it left out", got)
	}
	if other := table.View(&snapshot.Backend{Name: "shop/cart:9090", Port: 9090}, whole); !near(shares(other, 0), []float64{0.5, 0, 0.5, 0, 0}, 0.01) {
		t.Error("another port of the same pods is another application")
	}
}

// TestPickEven runs requests that stay open: two choices keep the fullest endpoint
// near the mean, where one choice would not.
func TestPickEven(t *testing.T) {
	const n, requests = 100, 100_000
	v := view(same(n))
	r := rand.New(rand.NewPCG(3, 4))
	for range requests {
		v.Dest().Begin(v.At(v.Pick(0, r.Uint32(), nil)), 0)
	}
	for i := range n {
		if o := v.At(i).Open(); o > requests/n+10 {
			t.Errorf("endpoint %d holds %d, the mean is %d", i, o, requests/n)
		}
	}
}

// TestPickValid: whatever the set and its past, the pick is usable, not ejected and
// not tried while such a one exists, and -1 exactly when none does.
func TestPickValid(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	picks := [2]int{}
	for range 20_000 {
		points := make([]point, r.IntN(7))
		for i := range points {
			points[i] = point{[]uint32{0, 1, 7, math.MaxUint32}[r.IntN(4)], uint8(r.IntN(4)), model.Health(r.IntN(4))}
		}
		s := set(points...)
		v := view(s)
		now := int64(0)
		var tried []netip.AddrPort
		for step := range r.IntN(40) {
			if len(points) == 0 {
				break
			}
			h := v.At(r.IntN(len(points)))
			now += r.Int64N(int64(5 * time.Second))
			switch r.IntN(6) {
			case 0:
				v.Dest().Begin(h, now)
			case 1:
				v.Dest().Answered(h, now, time.Duration(r.Int64N(int64(time.Minute))), []int{200, 404, 503}[r.IntN(3)], 10)
			case 2, 3:
				v.Dest().Failed(h, now, time.Second, uint64(step), 10)
			case 4:
				v.Dest().GaveUp(h, now, time.Hour)
			case 5:
				if len(tried) < 3 {
					tried = append(tried, h.Addr)
				}
			}
		}
		possible := false
		ok := func(i int) bool {
			return s.At(i).Usable() && !slices.Contains(tried, s.At(i).Addr) && v.At(i).EjectedFor(now) == 0
		}
		for i := range s.Len() {
			possible = possible || ok(i)
		}
		i := v.Pick(now, r.Uint32(), tried)
		if possible != (i >= 0) || i >= 0 && !ok(i) {
			t.Fatalf("picked %d of %v, tried %v", i, points, tried)
		}
		picks[min(i+1, 1)]++
	}
	if picks[0] < 1000 || picks[1] < 1000 {
		t.Errorf("%v picks without and with an answer: one side is hardly tested", picks)
	}
}

// TestSweep: what is kept is what is used.
func TestSweep(t *testing.T) {
	var table Table
	s := same(3)
	v := table.View(cart, s)
	d := v.Dest()
	d.Begin(v.At(0), 0)
	d.Begin(v.At(1), 0)
	d.End(v.At(1))
	d.Failed(v.At(1), 0, 0, 1, 3)
	const later = int64(KeepIdle) + 1

	v.Pick(later, 1, nil)
	table.Sweep(later, nil)
	if v.hosts[0] == nil || v.hosts[1] != nil {
		t.Error("the busy one is to be kept, the idle one forgotten")
	}
	if w := table.View(cart, s); w != v {
		t.Error("the view has just been used, and is gone")
	}
	table.Sweep(later+int64(keepView)+1, nil)
	if w := table.View(cart, s); w == v {
		t.Error("a view that nobody uses is kept")
	}
	// Another set of the same destination: what is known comes along.
	s2 := same(4)
	if w := table.View(cart, s2); w.hosts[0] != v.hosts[0] || w.Dest() != d {
		t.Error("an endpoint is not known any more in another set")
	}
	table.Sweep(later, func(d *Dest, h *Host) bool { return d.Port == 8080 && h.Addr == addr(0) })
	if d.Full() || d.open != 1 {
		t.Error("what is under way with an endpoint that is gone is under way")
	}
	d.End(v.At(0)) // a caller holds on to what it had
	table.Sweep(later, func(*Dest, *Host) bool { return true })
	table.Sweep(later+int64(time.Hour), nil)
	if !table.Empty() {
		t.Errorf("kept: %d views, %d destinations", len(table.views), len(table.dests))
	}
}

// TestFull: the breaker counts all endpoints of a destination.
func TestFull(t *testing.T) {
	v := view(same(2))
	for i := range MaxOpen {
		if v.Dest().Full() {
			t.Fatalf("full with %d", i)
		}
		v.Dest().Begin(v.At(i%2), 0)
	}
	if !v.Dest().Full() {
		t.Errorf("not full with %d", MaxOpen)
	}
	v.Dest().End(v.At(0))
	if v.Dest().Full() {
		t.Error("still full with one less")
	}
}

var sink int

func TestPickAllocs(t *testing.T) {
	var table Table
	s := set(point{1, 0, 0}, point{2, 0, 0}, point{3, 1, 0})
	rnd, now := uint32(0), int64(0)
	if n := testing.AllocsPerRun(1000, func() { rnd++; now += 1e6; request(&table, s, now, rnd) }); n != 0 {
		t.Errorf("%v allocations a request, want 0", n)
	}
}

// request is all that balancing does for one.
func request(table *Table, s *snapshot.EndpointSet, now int64, rnd uint32) {
	v := table.View(cart, s)
	sink = v.Pick(now, rnd, nil)
	d, h := v.Dest(), v.At(sink)
	if d.Full() {
		return
	}
	d.Begin(h, now)
	d.Answered(h, now+1e6, time.Millisecond, 200, 0)
	d.End(h)
}

func hundred() *snapshot.EndpointSet {
	points := make([]point, 100)
	for i := range points {
		points[i] = point{1024, uint8(i % 2), model.Healthy}
	}
	return set(points...)
}

func BenchmarkPick(b *testing.B) {
	v := view(hundred())
	for i := range v.set.Len() {
		v.Dest().Answered(v.At(i), 0, time.Millisecond, 200, 0)
	}
	for i := range b.N {
		sink = v.Pick(int64(i)*1000, uint32(i), nil)
	}
}

// BenchmarkRequest is the pick with its bookkeeping.
func BenchmarkRequest(b *testing.B) {
	var table Table
	s := hundred()
	for i := range b.N {
		request(&table, s, int64(i)*1000, uint32(i))
	}
}
