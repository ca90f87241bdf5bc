// Package testseed gives tests with random input the number that they draw from, and how much of it they draw.
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

// FullVariable is the environment variable that asks for full strength when it is not empty (make test-full, CI).
const FullVariable = "AETHER_FULL"

// Full reports whether tests run at full strength.
func Full() bool { return os.Getenv(FullVariable) != "" }

// Count is how often a test does what it does again and again: few times by default, many at full strength. What is
// asserted is the same.
func Count(few, many int) int {
	if Full() {
		return many
	}
	return few
}

// Rand returns a source of random numbers that is drawn from Seed.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(Seed(t), 0))
}
