// Package balance picks the endpoint for one request or connection, and keeps
// what one caller has learnt of its endpoints for the next pick.
//
//   - The choice is among usable endpoints only; there is no panic mode that
//     tries unhealthy or ejected ones (contract 5.5).
//   - Two endpoints are drawn by weight, and the first stays unless the second is
//     clearly the better one: shares are the weights' while nothing is wrong.
//   - A failure never makes an endpoint look cheap, and an old estimate may excuse
//     an endpoint but never recommends it.
//   - Times and randomness come in as numbers; nothing is allocated where nothing
//     is new. What is kept is bounded by what was used in the last KeepIdle.
//
// It knows no connection and no clock. Nothing in it is safe for concurrent use:
// a Table is one pod's on one loop (decision 014).
package balance

import (
	"math"
	"math/bits"
	"net/netip"
	"slices"
	"time"

	"aether/dataplane/snapshot"
)

const (
	// memory is the time in which an estimate, and the trouble that failures are,
	// fades to 1/e: Finagle's and linkerd's default for peak EWMA.
	memory = 10 * time.Second
	// clearly is how many times dearer an endpoint must be to give way for its
	// latency or its failures alone. Peaks of one and the same distribution of
	// latencies are mostly closer than this, and must not move shares.
	clearly = 2
	// least is the latency below which differences are the network's and the
	// scheduler's, not the endpoint's.
	least = time.Millisecond
	// most is the highest estimate: a long poll is no reason to be avoided for minutes.
	most = 5 * time.Second
	// dread is what a request's failure multiplies an endpoint's cost by, less 1; an
	// application's own error is half a failure: one alone does not move shares.
	dread      = 2
	failed     = 1.0
	halfFailed = 0.5
	// mostTrouble bounds the failures that an endpoint is remembered for, so that
	// they are forgotten in a known time.
	mostTrouble = 8.0
)

// View is one set of endpoints as its caller knows them. Get it from Table.View.
type View struct {
	dest   *Dest
	of     *snapshot.Backend
	set    *snapshot.EndpointSet
	hosts  []*Host // beside the set; nil: nothing is known, and nothing under way
	levels []level
	due    int64 // levels are made anew then: an ejection ends
	gen    uint32
	used   int64 // time of the last Pick
}

// Dest is the destination whose endpoints these are.
func (v *View) Dest() *Dest { return v.dest }

// At is what is known of endpoint i of the set, made if it is new.
func (v *View) At(i int) *Host {
	if h := v.hosts[i]; h != nil {
		return h
	}
	return v.dest.Host(v.set.At(i).Addr)
}

// Pick is the index in the set of the endpoint to use, or -1 if there is none.
//
// The nearest priority is used as long as enough of it is healthy (see
// snapshot.NewEndpointSet); ejected endpoints count as unhealthy. In it two
// different endpoints are drawn by weight, and one of them is taken (see better).
// One whose address is among tried is passed over for any other, of a farther
// priority if need be.
//
// now is in nanoseconds of the caller's monotonic clock, rnd a random number;
// equal numbers pick alike. Pick does not allocate unless an ejection has begun or
// ended.
func (v *View) Pick(now int64, rnd uint32, tried []netip.AddrPort) int {
	v.used = now
	if now >= v.due || v.gen != v.dest.gen {
		v.refresh(now)
	}
	levels := v.levels
	if len(levels) == 0 {
		return -1
	}
	seed := uint64(rnd)
	at := 0
	if len(levels) > 1 {
		x := uint32(mix(&seed) % snapshot.ShareOf)
		for at < len(levels)-1 && x >= levels[at].Upto {
			at++
		}
	}
	for n := range levels { // the level drawn, then the others, nearest first
		l := at
		if n > 0 {
			if l = n - 1; l >= at {
				l = n
			}
		}
		if i := v.pickIn(&levels[l], now, tried, &seed); i >= 0 {
			return i
		}
	}
	return -1
}

// refresh takes endpoints out of the levels while they are ejected.
func (v *View) refresh(now int64) {
	v.gen, v.due = v.dest.gen, math.MaxInt64
	for _, h := range v.hosts {
		if h != nil && h.until > now {
			v.due = min(v.due, h.until)
		}
	}
	levels := v.set.Levels()
	if v.due != math.MaxInt64 {
		levels = v.set.LevelsWithout(func(i int) bool { return v.hosts[i] != nil && v.hosts[i].until > now })
	}
	v.levels = v.levels[:0]
	for _, l := range levels {
		n := len(l.Index)
		e := level{Level: l, mean: float64(l.Weight[n-1]) / float64(n), even: true}
		for i, sum := range l.Weight {
			e.even = e.even && sum == uint64(i+1)*l.Weight[0]
		}
		v.levels = append(v.levels, e)
	}
}

// level is one priority, as it is drawn from.
type level struct {
	snapshot.Level
	mean float64 // weight
	even bool    // all weights are the same
}

// pickIn is two choices within one level; -1 if all of it was tried.
func (v *View) pickIn(l *level, now int64, tried []netip.AddrPort, seed *uint64) int {
	n := len(l.Index)
	if n == 1 {
		if v.tried(l.Index[0], tried) {
			return -1
		}
		return l.Index[0]
	}
	a, b := l.draw(seed)
	i, j := l.Index[a], l.Index[b]
	if len(tried) > 0 {
		switch ti, tj := v.tried(i, tried), v.tried(j, tried); {
		case ti && tj:
			// Both tried, which is rare: the next one that is not, from a place drawn
			// by weight, so that not always the same neighbour gets it.
			for k := range n {
				if c := l.Index[(a+k)%n]; !v.tried(c, tried) {
					return c
				}
			}
			return -1
		case ti:
			return j
		case tj:
			return i
		}
	}
	if v.better(j, i, now, l.mean) {
		return j
	}
	return i
}

func (v *View) tried(i int, tried []netip.AddrPort) bool {
	return len(tried) > 0 && slices.Contains(tried, v.set.At(i).Addr)
}

// better reports whether endpoint b is to be taken in the place of a, which was
// drawn first. mean is the mean weight.
//
// Costs are estimated latency times what is under way for the weight. Latencies
// count where the difference is clear: where a, as it may be by now, is still
// worse than b was at its last answer, so that an estimate that has faded lets an
// endpoint be tried again but draws no crowd to it. An endpoint without an estimate
// is as good as the other. On a tie the first stays, so that shares are the weights'.
func (v *View) better(b, a int, now int64, mean float64) bool {
	ha, hb := v.hosts[a], v.hosts[b]
	if ha == nil && hb == nil {
		return false
	}
	if ha == nil {
		ha = &unknown
	}
	if hb == nil {
		hb = &unknown
	}
	fa, fb := 1.0, 1.0 // how many times dearer it is than the other one
	if pa, pb := ha.latency(), hb.latency(); pa > 0 && pb > 0 && (pa > clearly*pb || pb > clearly*pa) {
		if pa > pb {
			fa = clear(ha.faded(now), pb)
		} else {
			fb = clear(hb.faded(now), pa)
		}
	}
	if ha.trouble > 0 || hb.trouble > 0 {
		ta, tb := 1+dread*ha.Trouble(now), 1+dread*hb.Trouble(now)
		fa, fb = fa*clear(ta, tb), fb*clear(tb, ta)
	}
	wa, wb := float64(v.set.At(a).Weight), float64(v.set.At(b).Weight)
	if fa == fb {
		return float64(ha.open)*wb >= float64(hb.open+1)*wa
	}
	return fb*(1+float64(hb.open)*mean/wb) < fa*(1+float64(ha.open)*mean/wa)
}

// clear is how many times more x is than y, where that is clear; else 1.
func clear(x, y float64) float64 {
	if x > clearly*y {
		return x / y
	}
	return 1
}

var unknown Host // read only

// draw is two different places of a level that has two, each by weight.
func (l *level) draw(seed *uint64) (a, b int) {
	n := len(l.Index)
	if l.even {
		a, b = int(below(mix(seed), uint64(n))), int(below(mix(seed), uint64(n-1)))
		if b >= a {
			b++
		}
		return a, b
	}
	total := l.Weight[n-1]
	a = place(l.Weight, below(mix(seed), total))
	// The second from what is left without the first.
	start, end := uint64(0), l.Weight[a]
	if a > 0 {
		start = l.Weight[a-1]
	}
	x := below(mix(seed), total-(end-start))
	if x >= start {
		x += end - start
	}
	return a, place(l.Weight, x)
}

// place is the first of ascending sums that is above x, which is below the last.
func place(sums []uint64, x uint64) int {
	lo, hi := 0, len(sums)-1
	for lo < hi {
		if m := int(uint(lo+hi) >> 1); x < sums[m] {
			hi = m
		} else {
			lo = m + 1
		}
	}
	return lo
}

// below maps a random r to 0..n-1.
func below(r, n uint64) uint64 {
	hi, _ := bits.Mul64(r, n)
	return hi
}

// mix makes the next number of a sequence (splitmix64): the caller's 32 bits
// serve for three draws.
func mix(seed *uint64) uint64 {
	*seed += 0x9e3779b97f4a7c15
	z := *seed
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
