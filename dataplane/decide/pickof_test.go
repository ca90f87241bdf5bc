package decide_test

import (
	"math/rand/v2"
	"testing"

	"aether/dataplane/decide"
	"aether/dataplane/snapshot"
)

// TestPickOf: the pick of a backend draws it, whatever the weights; one without a weight has none.
func TestPickOf(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 20_000 {
		rule := &snapshot.Rule{}
		for range 1 + r.IntN(16) {
			weight := uint64(r.IntN(3))
			if r.IntN(2) == 0 {
				weight = uint64(r.IntN(1_000_001)) // the API's most
			}
			rule.WeightSum += weight
			rule.Backends = append(rule.Backends, snapshot.Weighted{Upto: rule.WeightSum})
		}
		before := uint64(0)
		for i, b := range rule.Backends {
			pick, ok := decide.PickOf(rule, i)
			if ok != (b.Upto > before) {
				t.Fatalf("%v: backend %d: %v", rule.Backends, i, ok)
			}
			// What a pick draws: the share that this part of the sum of the weights falls into.
			if x := uint64(float64(pick) / (1 << 32) * float64(rule.WeightSum)); ok && (x < before || x >= b.Upto) {
				t.Fatalf("%v: backend %d: pick %d draws at %d", rule.Backends, i, pick, x)
			}
			before = b.Upto
		}
	}
}
