package balance

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// simulation is one caller of n endpoints in virtual time: Poisson arrivals, and
// endpoints that are queues with exponential service times.
type simulation struct {
	r       *rand.Rand
	rate    float64 // arrivals a second
	workers int     // requests an endpoint serves at once
	service time.Duration
	weights []uint32
	// fault says how endpoint i is at a time: how many times slower, and whether it
	// fails, which takes no time.
	fault func(i int, at time.Duration) (slower float64, fails bool)
	// random picks by weight alone, in place of what is tested.
	random bool
	// joins, unless 0, is when the last endpoint comes to the set.
	joins time.Duration
	// seen is told of each request when it is picked.
	seen func(i int, at time.Duration)

	table Table
	set   *snapshot.EndpointSet
	nodes []server
	now   time.Duration
	todo  events
	seq   int

	took   []time.Duration // of requests that were answered, after the warm-up
	picked []int           // after the warm-up
	failed int
	warm   time.Duration
}

type server struct {
	busy  int
	queue []time.Duration // arrivals of those that wait
}

type event struct {
	at      time.Duration
	seq     int
	to      int           // endpoint; -1: a request arrives
	arrived time.Duration // of what is finished
	fails   bool
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	o := *e
	x := o[len(o)-1]
	*e = o[:len(o)-1]
	return x
}

func (s *simulation) at(d time.Duration, to int, arrived time.Duration, fails bool) {
	s.seq++
	heap.Push(&s.todo, event{s.now + d, s.seq, to, arrived, fails})
}

func (s *simulation) exp(mean time.Duration) time.Duration {
	return time.Duration(s.r.ExpFloat64() * float64(mean))
}

// start serves a request that arrived then on endpoint i.
func (s *simulation) start(i int, arrived time.Duration) {
	slower := 1.0
	if s.fault != nil {
		slower, _ = s.fault(i, s.now)
	}
	s.nodes[i].busy++
	s.at(time.Duration(slower*float64(s.exp(s.service))), i, arrived, false)
}

func (s *simulation) run(length time.Duration) {
	if s.weights == nil {
		s.weights = slices.Repeat([]uint32{1024}, 10)
	}
	var points []point
	var sum uint64
	for _, w := range s.weights {
		points = append(points, point{w, 0, model.Healthy})
		sum += uint64(w)
	}
	s.set = set(points...)
	later := s.set
	if s.joins > 0 {
		s.set = set(points[:len(points)-1]...)
	}
	s.nodes = make([]server, len(points))
	s.picked = make([]int, len(points))
	s.at(0, -1, 0, false)
	for len(s.todo) > 0 {
		e := heap.Pop(&s.todo).(event)
		if s.now = e.at; s.now > length {
			return
		}
		if s.now >= s.joins {
			s.set = later
		}
		now := int64(s.now)
		v := s.table.View(cart, s.set)
		if e.to < 0 { // a request arrives
			s.at(time.Duration(s.r.ExpFloat64()/s.rate*float64(time.Second)), -1, 0, false)
			i := 0
			if s.random {
				x := s.r.Uint64N(sum)
				for x >= uint64(s.weights[i]) {
					x -= uint64(s.weights[i])
					i++
				}
			} else {
				i = v.Pick(now, s.r.Uint32(), nil)
				v.Dest().Begin(v.At(i), now)
			}
			if s.seen != nil {
				s.seen(i, s.now)
			}
			if s.now >= s.warm {
				s.picked[i]++
			}
			if s.fault != nil {
				if _, fails := s.fault(i, s.now); fails {
					s.at(100*time.Microsecond, i, s.now, true)
					continue
				}
			}
			if n := &s.nodes[i]; n.busy < s.workers {
				s.start(i, s.now)
			} else {
				n.queue = append(n.queue, s.now)
			}
			continue
		}
		took := s.now - e.arrived
		status := 200
		if e.fails {
			status = 500
		}
		if !s.random {
			v.Dest().Answered(v.At(e.to), now, took, status, s.set.Len())
			v.Dest().End(v.At(e.to))
		}
		if e.fails {
			if s.now >= s.warm {
				s.failed++
			}
			continue
		}
		n := &s.nodes[e.to]
		n.busy--
		if len(n.queue) > 0 {
			a := n.queue[0]
			n.queue = n.queue[1:]
			s.start(e.to, a)
		}
		if s.now >= s.warm {
			s.took = append(s.took, took)
		}
	}
}

func (s *simulation) p(q float64) time.Duration {
	slices.Sort(s.took)
	return s.took[int(q*float64(len(s.took)-1))]
}

// simulate runs ten endpoints that serve four requests at once, 5 ms each: 8,000 a
// second are the most that they can do.
func simulate(rate float64, length time.Duration, change func(*simulation)) *simulation {
	s := &simulation{r: rand.New(rand.NewPCG(1, 2)), rate: rate, workers: 4, service: 5 * time.Millisecond, warm: 10 * time.Second}
	if change != nil {
		change(s)
	}
	s.run(s.warm + length)
	return s
}

func (s *simulation) share(i int) float64 {
	n := 0
	for _, p := range s.picked {
		n += p
	}
	return float64(s.picked[i]) / float64(n)
}

// within is four standard deviations of a share p of n independent picks: once in
// 16,000 by chance. Picks that mind what is under way stray less.
func within(p float64, n int) float64 { return 4 * math.Sqrt(p*(1-p)/float64(n)) }

const fair = 0.1

// TestSimulatedShares: shares are the weights', idle or busy. Of weights that
// differ, what is under way comes in whole requests, which shifts up to 3.5 %.
func TestSimulatedShares(t *testing.T) {
	for _, rate := range []float64{200, 2000, 6500} {
		s := simulate(rate, time.Duration(60_000/rate)*time.Second, nil)
		n := len(s.took)
		for i := range s.picked {
			if got, tol := s.share(i), within(fair, n); math.Abs(got-fair) > tol {
				t.Errorf("%v/s: endpoint %d gets %.4f of %d requests, want %.1f within %.4f", rate, i, got, n, fair, tol)
			}
		}
	}
	weights := []uint32{100, 300, 200, 400}
	for _, rate := range []float64{200, 1000, 2000} {
		s := simulate(rate, time.Duration(60_000/rate)*time.Second, func(s *simulation) { s.weights, s.workers = weights, 16 })
		for i, w := range weights {
			want := float64(w) / 1000
			if got, tol := s.share(i), 0.035+within(want, len(s.took)); math.Abs(got-want) > tol {
				t.Errorf("%v/s: weight %d gets %.4f, want %.1f within %.4f", rate, w, got, want, tol)
			}
		}
	}
}

// TestSimulatedTail: at 62 and 81 % of what the endpoints can do the slowest
// hundredth is faster than by random choice, and near the service time's own: an
// exponential's, ln 100 of 5 ms, is 23 ms.
func TestSimulatedTail(t *testing.T) {
	for _, tt := range []struct{ rate, ofRandom float64 }{{5000, 0.95}, {6500, 0.75}} {
		p99 := simulate(tt.rate, 10*time.Second, nil).p(0.99)
		random := simulate(tt.rate, 10*time.Second, func(s *simulation) { s.random = true }).p(0.99)
		if limit := time.Duration(tt.ofRandom * float64(random)); p99 > limit || p99 > 25*time.Millisecond {
			t.Errorf("%v/s: p99 %v, want at most %v (random choice: %v) and 25ms", tt.rate, p99, limit, random)
		}
	}
}

const bad = 3 // the endpoint that something is wrong with

// TestSimulatedSlow: one endpoint is ten times slower.
func TestSimulatedSlow(t *testing.T) {
	slow := func(i int, _ time.Duration) (float64, bool) {
		if i == bad {
			return 10, false
		}
		return 1, false
	}
	well := simulate(1000, 30*time.Second, nil).p(0.99)
	s := simulate(1000, 30*time.Second, func(s *simulation) { s.fault = slow })
	random := simulate(1000, 30*time.Second, func(s *simulation) { s.fault, s.random = slow, true })
	if got := s.share(bad); got > 0.01 {
		t.Errorf("the slow one gets %.4f, want at most a hundredth", got)
	}
	if got := s.p(0.99); got > well*5/4 {
		t.Errorf("p99 %v, and %v without a slow one", got, well)
	}
	if got := random.p(0.99); got < 3*well {
		t.Errorf("p99 of random choice is %v: the slow one is not slow enough to prove anything", got)
	}
}

// TestSimulatedFailing: one endpoint fails at once, and so is never busy.
func TestSimulatedFailing(t *testing.T) {
	s := simulate(1000, time.Minute, func(s *simulation) {
		s.warm = 0
		s.fault = func(i int, _ time.Duration) (float64, bool) { return 1, i == bad }
	})
	// Ejected at 0, 30 and, for a minute, at some 31 seconds more: each time five failures.
	if s.failed > 3*maxErrors {
		t.Errorf("%d requests failed of %d, want at most %d", s.failed, len(s.took), 3*maxErrors)
	}
	// One of two fails, and so hardly ever five in a row: that it is no dearer by
	// latency must not make it the cheapest.
	s = simulate(1000, time.Minute, func(s *simulation) {
		r := rand.New(rand.NewPCG(7, 8))
		s.fault = func(i int, _ time.Duration) (float64, bool) { return 1, i == bad && r.IntN(2) == 0 }
	})
	if got := s.share(bad); got > fair/5 {
		t.Errorf("the endpoint that fails now and then gets %.4f, want at most a fifth of its share", got)
	}
}

// TestSimulatedFlapping: one endpoint fails every other second.
func TestSimulatedFlapping(t *testing.T) {
	s := simulate(1000, 2*time.Minute, func(s *simulation) {
		s.warm = 0
		s.fault = func(i int, at time.Duration) (float64, bool) { return 1, i == bad && int(at/time.Second)%2 == 1 }
	})
	// Of its share of 12,000 one half would fail. It is ejected whenever five fail in a
	// row, and in between it is avoided for what failed.
	if s.failed > 6_000/100 {
		t.Errorf("%d requests failed, want at most a hundredth of 6,000", s.failed)
	}
}

// TestSimulatedRecovery: an endpoint that was slow, or failed, has its share again
// within 30 s of being well; one that was ejected within 30 s more than that, as the
// table says.
func TestSimulatedRecovery(t *testing.T) {
	const ill = 20 * time.Second
	for _, tt := range []struct {
		name   string
		fault  func(i int, at time.Duration) (float64, bool)
		within time.Duration
	}{
		{"slow", func(i int, at time.Duration) (float64, bool) {
			if i == bad && at < ill {
				return 10, false
			}
			return 1, false
		}, 30 * time.Second},
		{"failing", func(i int, at time.Duration) (float64, bool) { return 1, i == bad && at < ill }, 30 * time.Second},
	} {
		for _, rate := range []float64{100, 1000} {
			const window = 5 * time.Second
			count := make([][2]int, 20) // by window from its recovery on: of it, of all
			simulate(rate, 2*time.Minute, func(s *simulation) {
				s.fault = tt.fault
				s.seen = func(i int, at time.Duration) {
					if w := int((at - ill) / window); at >= ill && w < len(count) {
						count[w][1]++
						if i == bad {
							count[w][0]++
						}
					}
				}
			})
			for w, c := range count {
				start := time.Duration(w) * window
				if got := float64(c[0]) / float64(c[1]); start >= tt.within && math.Abs(got-fair) > 0.02+within(fair, c[1]) {
					t.Errorf("%s, %v/s: %v after its recovery it gets %.3f", tt.name, rate, start, got)
				}
			}
		}
	}
}

// TestSimulatedJoin: a new endpoint gets its share at once, and no crowd.
func TestSimulatedJoin(t *testing.T) {
	const at = 20 * time.Second
	for _, rate := range []float64{2000, 6500} {
		var n, of [2]int // in the first 50 ms, and the second that follows
		simulate(rate, 11*time.Second+50*time.Millisecond, func(s *simulation) {
			s.joins = at
			s.seen = func(i int, now time.Duration) {
				w := 0
				if now >= at+50*time.Millisecond {
					w = 1
				}
				if now >= at && now < at+1050*time.Millisecond {
					of[w]++
					if i == 9 {
						n[w]++
					}
				}
			}
		})
		for w, most := range []float64{2 * fair, 1.2 * fair} {
			got, slack := float64(n[w])/float64(of[w]), within(fair, of[w])
			if got > most+slack || got < fair/2-slack {
				t.Errorf("%v/s: of window %d (%d requests) it gets %.3f, want %.3f to %.3f", rate, w, of[w], got, fair/2, most)
			}
		}
	}
}
