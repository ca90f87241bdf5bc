package telemetry

import (
	"io"
	"math"
	"net/http/httptest"
	"regexp"
	"runtime"
	"runtime/metrics"
	"slices"
	"strconv"
	"testing"
	"time"
)

// Nothing is told shorter than it was, and nothing is lost.
func TestRebucket(t *testing.T) {
	h := &metrics.Float64Histogram{
		Counts:  []uint64{1, 2, 3, 4, 5, 6},
		Buckets: []float64{math.Inf(-1), 0, 0.001, 0.004, 0.006, 0.010, math.Inf(1)},
	}
	counts, sum := rebucket(h, []time.Duration{time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond})
	// What lies from 4 to 6 ms may be longer than 5.
	if want := []uint64{1 + 2, 3, 4 + 5, 6}; !slices.Equal(counts, want) {
		t.Errorf("%v, want %v", counts, want)
	}
	if want := (3*1 + 4*4 + 5*6 + 6*10) * time.Millisecond; (sum - want).Abs() > time.Microsecond {
		t.Errorf("sum %s, want %s", sum, want)
	}
}

// The runtime knows each of the names, and what it does is counted.
func TestRuntimeTimes(t *testing.T) {
	m := New(Config{})
	count := func(name string) uint64 {
		t.Helper()
		rec := httptest.NewRecorder()
		m.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
		text, err := io.ReadAll(rec.Result().Body)
		if err != nil {
			t.Fatal(err)
		}
		f := regexp.MustCompile(`(?m)^` + name + `_count (\d+)$`).FindSubmatch(text)
		if f == nil {
			t.Fatalf("no %s in\n%s", name, text)
		}
		n, err := strconv.ParseUint(string(f[1]), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, r := range runtimeTimes {
		before := count(r.name)
		runtime.GC()
		// A cycle stops the world twice; of goroutines the runtime measures one in eight.
		if after := count(r.name); after < before+2 && r.name != "aether_goroutine_wait_seconds" || after < before {
			t.Errorf("%s: %d, and %d after a collection", r.name, before, after)
		}
	}
}
