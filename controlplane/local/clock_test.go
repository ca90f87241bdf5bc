package local

import (
	"testing"
	"time"
)

// TestClockIsSet: contract 13.3 on a node whose clock is set between two lives of the process:
// each bubble's clock begins at the same moment, so that the second life begins as long
// before the first one's end as that lasted. A pod that drained drains for the rest of
// its time at most, one that was healthy stays so, and neither stays for ever.
func TestClockIsSet(t *testing.T) {
	const drains = 9 * time.Second // a preStop of 10 s
	for _, tt := range []struct {
		name          string
		first, second time.Duration // on the clock, when a life begins
		closed        time.Duration // after the start of the second, when UNHEALTHY is said at the latest
	}{
		{"back by hours", 5 * time.Hour, 0, drains},
		{"forward by hours", 0, 5 * time.Hour, 0},
		{"back by a second", 4 * time.Second, 4 * time.Second, drains},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			at := func(w *world) { w.cfg.Dir = dir }
			inWorld(t, at, func(w *world) {
				w.after(tt.first)
				w.healthy(cart(1))
				w.healthy(cart(2))
				w.pods.Terminating("c1", Termination{PreStop: 10 * time.Second, Grace: 30 * time.Second})
				w.after(time.Second)
				w.is("c1", "DRAINING")
			})
			inWorld(t, at, func(w *world) {
				w.stop()
				w.after(tt.second)
				w.run()
				if tt.closed > 0 {
					w.is("c1", "DRAINING")
				}
				w.is("c2", "HEALTHY")
				w.after(tt.closed)
				w.is("c1", "UNHEALTHY")
				w.after(time.Hour)
				w.is("c2", "HEALTHY")
			})
		})
	}
}
