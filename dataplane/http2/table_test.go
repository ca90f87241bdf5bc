package http2

import (
	"math/rand/v2"
	"testing"
)

// TestTableAgainstMap: the table finds what was put and not taken, whatever the identifiers are, as a map does.
func TestTableAgainstMap(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		var tab table
		want, ids, last := map[uint32]*Stream{}, []uint32{}, uint32(1)
		for range 2000 {
			if n := len(ids); n > 0 && r.IntN(3) == 0 {
				i := r.IntN(n)
				tab.del(ids[i])
				delete(want, ids[i])
				ids[i] = ids[n-1]
				ids = ids[:n-1]
				continue
			}
			last += 2 + 2*uint32(r.IntN(1<<r.IntN(20)))
			s := &Stream{id: last}
			tab.put(s)
			want[last] = s
			ids = append(ids, last)
		}
		for id := range want {
			for _, near := range []uint32{id, id + 2, id + 4096} {
				if got := tab.get(near); got != want[near] {
					t.Fatalf("stream %d: %p, want %p", near, got, want[near])
				}
			}
		}
	}
}

// TestTableSpreads: a peer that leaves out identifiers cannot make a lookup long. Each row would meet in one place, or a few, of a
// table that takes low or high bits of the identifier as they are.
func TestTableSpreads(t *testing.T) {
	for name, id := range map[string]func(i uint32) uint32{
		"one after the other":  func(i uint32) uint32 { return 2*i + 1 },
		"equal low bits":       func(i uint32) uint32 { return i<<13 | 1 },
		"equal lower bits":     func(i uint32) uint32 { return i<<20 | 1 },
		"equal high bits":      func(i uint32) uint32 { return 1<<30 + 2*i + 1 },
		"every other low bits": func(i uint32) uint32 { return i<<12 | 1 },
		"two dense runs":       func(i uint32) uint32 { return (i&1)<<29 | i&^1 | 1 },
		"multiples of a prime": func(i uint32) uint32 { return 1_000_003*i | 1 },
		"squares":              func(i uint32) uint32 { return i*i<<1 | 1 },
	} {
		t.Run(name, func(t *testing.T) {
			worst, sum, n := 0, 0, 0
			for range 20 { // factors
				var tab table
				seen := map[uint32]bool{}
				for i := uint32(0); len(seen) < 1000; i++ {
					at := id(i) & maxStreamID
					if i > 5000 {
						break // it has no thousand of them
					}
					if !seen[at] {
						seen[at] = true
						tab.put(&Stream{id: at})
					}
				}
				for at := range seen {
					probes := 1
					for j := tab.home(at); tab.slots[j].id != at; j = (j + 1) & (len(tab.slots) - 1) {
						probes++
					}
					worst = max(worst, probes)
					sum += probes
					n++
				}
			}
			if mean := float64(sum) / float64(n); mean > 8 {
				t.Errorf("a lookup takes %.1f probes on average, %d at worst", mean, worst)
			}
		})
	}
}
