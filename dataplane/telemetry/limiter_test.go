package telemetry

import (
	"testing"
	"time"
)

// TestCausesAreBounded: causes without end, as a hostile peer can make, are not remembered without end; what is forgotten
// costs a line too many, never one too few.
func TestCausesAreBounded(t *testing.T) {
	r := limiter[int]{n: 1, every: time.Hour}
	now := time.Unix(0, 0)
	lines := 0
	for range 3 {
		for k := range 5000 {
			if _, ok := r.allow(k, now); ok {
				lines++
			}
			if len(r.causes) > maxCauses {
				t.Fatalf("%d causes are remembered", len(r.causes))
			}
		}
	}
	if lines != 15000 {
		t.Errorf("%d lines of causes that were forgotten", lines)
	}
	for range 2 {
		for k := range 1000 { // as many as are told apart
			if _, ok := r.allow(-1-k, now); ok {
				lines++
			}
		}
	}
	if lines -= 15000; lines < 1000 || lines > 2000 {
		t.Errorf("%d lines of 1000 causes", lines)
	}
}
