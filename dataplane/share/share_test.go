package share

import (
	"math/rand/v2"
	"testing"
)

// TestRoom: pods that take all they can, one after the other or by turns, leave so much
// of what there is that another gets its part; they never have more together than there is.
func TestRoom(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 1000 {
		most, greedy, turns := 1+r.IntN(4096), 1+r.IntN(8), i%2 == 0
		own, all := make([]int, greedy), 0
		for left := true; left; {
			left = false
			for i := range own {
				for Room(own[i], all, most) {
					own[i]++
					all++
					left = true
					if turns {
						break
					}
				}
			}
		}
		if all > most {
			t.Fatalf("%d of %d are taken", all, most)
		}
		want := float64(most) / 2 // the first, which is alone, leaves half
		for range greedy - 1 {
			want *= 0.75
		}
		free := most - all
		if float64(free) < want-float64(greedy) {
			t.Errorf("%d greedy pods leave %d of %d, want %.0f at least", greedy, free, most, want)
		}
		for i := 1; i < greedy; i++ {
			if own[i] > most/4+1 {
				t.Errorf("one of %d pods has %d of %d", greedy, own[i], most)
			}
		}
		mine := 0
		for Room(mine, all, most) {
			mine++
			all++
		}
		if mine < free/4 || mine == 0 && free > 0 {
			t.Errorf("of %d that %d greedy pods leave another gets %d", free, greedy, mine)
		}
	}
	for _, tt := range []struct {
		own, all, most int
		want           bool
	}{
		{0, 0, 0, false}, {0, 0, 1, true}, {0, 1, 1, false}, {0, 99, 100, true}, {0, 100, 100, false},
		{49, 49, 100, true}, {50, 50, 100, false}, // alone
		{16, 50, 100, true}, {17, 50, 100, false}, {24, 25, 100, true}, {25, 26, 100, false}, // not alone
	} {
		if got := Room(tt.own, tt.all, tt.most); got != tt.want {
			t.Errorf("%d of %d of %d: %v", tt.own, tt.all, tt.most, got)
		}
	}
}
