// Package balance picks the endpoint for one request or connection.
//
//   - The choice is among usable endpoints only; there is no panic mode that
//     tries unhealthy ones (contract 5.5).
//   - It is a pure function: randomness comes in as a number, counters stay
//     with the caller, nothing is allocated.
//
// It knows no connection and no clock.
package balance

import (
	"math/bits"
	"sort"

	"aether/dataplane/snapshot"
)

// Excluded, as a load, sets an endpoint aside: it was tried already, or is ejected.
const Excluded = ^uint32(0)

// Pick is the index in set of the endpoint to use, or -1 if there is none.
//
// The nearest priority is used as long as enough of it is healthy (see
// snapshot.NewEndpointSet). In it two different endpoints are drawn by weight
// and the one with the lower load for its weight is taken. An endpoint that is
// Excluded is passed over for any other that is not, of a farther priority if
// need be.
//
// load tells what the caller has outstanding on endpoint i, or any cost that
// grows with it; nil means none anywhere. Keep counters in a slice beside the
// set, made anew when the set's pointer changes, and carried over by address.
// rnd is a random number; equal numbers pick alike. Pick does not allocate, and
// load does not escape.
func Pick(set *snapshot.EndpointSet, load func(i int) uint32, rnd uint32) int {
	levels := set.Levels()
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
		if i := pickIn(set, &levels[l], load, &seed); i >= 0 {
			return i
		}
	}
	return -1
}

// pickIn is two choices within one level; -1 if all of it is Excluded.
func pickIn(set *snapshot.EndpointSet, l *snapshot.Level, load func(i int) uint32, seed *uint64) int {
	n := len(l.Index)
	total := l.Weight[n-1]
	a := draw(l, below(mix(seed), total))
	if n == 1 {
		if load != nil && load(l.Index[0]) == Excluded {
			return -1
		}
		return l.Index[0]
	}
	// The second from what is left without the first.
	start, end := uint64(0), l.Weight[a]
	if a > 0 {
		start = l.Weight[a-1]
	}
	x := below(mix(seed), total-(end-start))
	if x >= start {
		x += end - start
	}
	b := draw(l, x)
	if load == nil {
		return l.Index[a]
	}
	i, j := l.Index[a], l.Index[b]
	la, lb := load(i), load(j)
	switch {
	case la == Excluded && lb == Excluded:
		// Both set aside, which is rare: the next one that is not, from a place drawn
		// by weight, so that not always the same neighbour gets it.
		for k := range n {
			if c := l.Index[(a+k)%n]; load(c) != Excluded {
				return c
			}
		}
		return -1
	case la == Excluded:
		return j
	case lb == Excluded:
		return i
	}
	// (la+1)/wa <= (lb+1)/wb, without dividing.
	if (uint64(la)+1)*uint64(set.At(j).Weight) <= (uint64(lb)+1)*uint64(set.At(i).Weight) {
		return i
	}
	return j
}

// draw is the place whose share of the weights x falls into, x below their sum.
func draw(l *snapshot.Level, x uint64) int {
	return sort.Search(len(l.Weight), func(k int) bool { return x < l.Weight[k] })
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
