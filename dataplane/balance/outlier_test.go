package balance

import (
	"fmt"
	"testing"
	"time"
)

// TestEjection: contract 5.6's numbers, and where it says nothing Envoy's: an
// endpoint that is out counts against the 50 % before it is out; the time grows by
// 30 s with each ejection and shrinks by as much with each 10 s without one; 300 s at most.
func TestEjection(t *testing.T) {
	const s = time.Second
	for _, tt := range []struct {
		name    string
		members int
		script  string // one letter a request: . answered, 5 with 5xx, x failed, X failed together with the last one
		want    time.Duration
	}{
		{"four 5xx", 10, "5555", 0},
		{"five", 10, "55555", 30 * s},
		{"not in a row", 10, "5555.5555", 0},
		{"two failures", 10, "xx", 0},
		{"three", 10, "xxx", 30 * s},
		{"not in a row", 10, "xx.xx", 0},
		{"a 5xx is an answer", 10, "xx5xx", 0},
		{"a failure is no answer: 5xx are counted by themselves", 10, "55x55x5", 30 * s},
		{"one event is one failure", 10, "xXXXXxXXX", 0},
		{"an only endpoint stays", 1, "xxxxxxxxx", 0},
		{"one of two may go", 2, "xxx", 30 * s},
		{"ejected once for what came meanwhile", 10, "xxxxxx55555", 30 * s},
	} {
		t.Run(tt.name+" "+tt.script, func(t *testing.T) {
			v := view(same(tt.members))
			d, h := v.Dest(), v.At(0)
			for i, c := range tt.script {
				switch c {
				case '.':
					d.Answered(h, 0, time.Millisecond, 200, tt.members)
				case '5':
					d.Answered(h, 0, time.Millisecond, 503, tt.members)
				case 'x':
					d.Failed(h, 0, time.Millisecond, uint64(i+1), tt.members)
				case 'X':
					d.Failed(h, 0, time.Millisecond, h.event, tt.members)
				}
			}
			if got := h.EjectedFor(0); got != tt.want {
				t.Errorf("ejected for %v, want %v", got, tt.want)
			}
		})
	}
}

func fails(d *Dest, h *Host, now time.Duration, members int) bool {
	out := false
	for i := range maxLocals {
		out = d.Failed(h, int64(now), 0, uint64(now)+uint64(i)+1, members) || out
	}
	return out
}

func TestEjectionGrows(t *testing.T) {
	v := view(same(10))
	d, h := v.Dest(), v.At(0)
	now := time.Duration(0)
	for n := range 15 { // again at once, each time
		if !fails(d, h, now, 10) {
			t.Fatalf("ejection %d did not come about", n+1)
		}
		want := min(time.Duration(n+1)*30*time.Second, 300*time.Second)
		if got := h.EjectedFor(int64(now)); got != want {
			t.Fatalf("ejection %d lasts %v, want %v", n+1, got, want)
		}
		now += want
	}
	for _, tt := range []struct{ well, want time.Duration }{
		{9 * time.Second, 300 * time.Second},  // no whole interval
		{20 * time.Second, 270 * time.Second}, // 10 less 2, and 1
		{time.Hour, 30 * time.Second},
	} {
		now += tt.well
		fails(d, h, now, 10)
		if got := h.EjectedFor(int64(now)); got != tt.want {
			t.Errorf("after %v without one an ejection lasts %v, want %v", tt.well, got, tt.want)
		}
		now += h.EjectedFor(int64(now))
	}
	if h.Ejections() != 18 {
		t.Errorf("%d ejections counted, want 18", h.Ejections())
	}
}

func TestEjectedAtMostHalf(t *testing.T) {
	for members, want := range []int{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5} {
		t.Run(fmt.Sprint(members), func(t *testing.T) {
			v := view(same(members))
			out := 0
			for i := range members {
				if fails(v.Dest(), v.At(i), time.Second, members) {
					out++
				}
			}
			if out != want {
				t.Errorf("%d of %d ejected, want %d", out, members, want)
			}
			// Who returned makes room for another.
			if members > 2 && !fails(v.Dest(), v.At(members-1), time.Minute, members) {
				t.Error("nobody is out any more, and none may go")
			}
		})
	}
}

// TestFailuresAreNotCheap: an endpoint that fails, gives up or errs fast does not
// become cheaper by it than it was, nor than one of which nothing is known.
func TestFailuresAreNotCheap(t *testing.T) {
	for name, event := range map[string]func(*Dest, *Host){
		"failed":   func(d *Dest, h *Host) { d.Failed(h, 0, time.Microsecond, 1, 10) },
		"500":      func(d *Dest, h *Host) { d.Answered(h, 0, time.Microsecond, 500, 10) },
		"429":      func(d *Dest, h *Host) { d.Answered(h, 0, time.Microsecond, 429, 10) },
		"404":      func(d *Dest, h *Host) { d.Answered(h, 0, time.Microsecond, 404, 10) },
		"refused":  func(d *Dest, h *Host) { d.Refused(h, 0) },
		"given up": func(d *Dest, h *Host) { d.GaveUp(h, 0, time.Microsecond) },
	} {
		for _, before := range []time.Duration{0, 40 * time.Millisecond} {
			v := view(same(2))
			d, h := v.Dest(), v.At(0)
			if before > 0 {
				d.Answered(h, 0, before, 200, 10)
			}
			d.Answered(v.At(1), 0, 40*time.Millisecond, 200, 10)
			for range 2 {
				event(d, h)
			}
			if h.Peak() < before || h.Peak() > 0 && before == 0 {
				t.Errorf("%s: the estimate went from %v to %v", name, before, h.Peak())
			}
			if got := shares(v, 0); got[0] > 0.51 {
				t.Errorf("%s, after %v: it gets %.2f of the requests", name, before, got[0])
			}
		}
	}
}
