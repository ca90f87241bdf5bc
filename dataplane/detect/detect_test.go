package detect

import (
	"testing"

	"aether/dataplane/engine"
)

// TestPoolIsBounded: after a rush of connections a loop keeps so many of what waited for their first bytes.
func TestPoolIsBounded(t *testing.T) {
	e, err := engine.New(engine.Config{MaxLoops: 1})
	if err != nil {
		t.Fatal(err)
	}
	pod, p := e.AddPod("web"), &Pool[int]{}
	for range 300 {
		(&Detector[int]{pool: p, q: Question{Pod: pod}}).put()
	}
	if len(p.free) != 256 {
		t.Errorf("%d of 300 are kept", len(p.free))
	}
}
