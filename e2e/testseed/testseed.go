// Package testseed gives tests with random input the number that they draw from.
package testseed

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

// Variable is the environment variable that sets the seed: a number, or "random" for a fresh one in each test (CI and
// soaks). Without it the seed is the same in every run, so that a test which fails fails again.
const Variable = "AETHER_SEED"

const fixed = 1

// Seed returns the seed of t, and logs the command that repeats the test with it. A value of Variable that is neither
// a number nor "random" ends the test. Safe for concurrent use.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := uint64(fixed)
	switch v := os.Getenv(Variable); v {
	case "":
	case "random":
		seed = rand.Uint64()
	default:
		var err error
		if seed, err = strconv.ParseUint(v, 10, 64); err != nil {
			t.Fatalf("%s=%q is neither a number nor \"random\"", Variable, v)
		}
	}
	t.Logf("to repeat it: %s=%d go test -run '^%s$'", Variable, seed, t.Name())
	return seed
}

// Rand returns a source of random numbers that is drawn from Seed.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(Seed(t), 0))
}
