// Package aether_test lets `go test -bench ./bench` at the module's root run the
// comparison of package bench. The flag takes "./bench" as its pattern, not as a package:
// any benchmark, and of its sub-benchmarks those whose names hold "bench". So the
// package tested is this one, and bench names its sub-benchmarks "bench=...".
package aether_test

import (
	"testing"

	"aether/bench"
)

// Benchmark is the comparison with the peers; bench/README.md explains it.
func Benchmark(b *testing.B) { bench.Run(b) }
