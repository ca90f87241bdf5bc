package telemetry

import (
	"math"
	"runtime/metrics"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// pauseBounds are of the histograms of what the Go runtime keeps: they reach from what a
// stop of the world takes on a machine with room to what a user notices.
var pauseBounds = []time.Duration{
	10 * time.Microsecond, 100 * time.Microsecond, 500 * time.Microsecond, time.Millisecond, 2500 * time.Microsecond,
	5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, time.Second,
}

// runtimeTimes are the distributions that the runtime measures of itself, by its own names for them.
var runtimeTimes = []struct{ name, source, help string }{
	{"aether_gc_pause_seconds", "/sched/pauses/total/gc:seconds",
		"How long the garbage collector kept the world stopped, from the moment it asked for that: two stops a cycle."},
	{"aether_gc_stopping_seconds", "/sched/pauses/stopping/gc:seconds",
		"The part of aether_gc_pause_seconds until the last thread had stopped: what a loop that keeps its processor makes longer."},
	{"aether_goroutine_wait_seconds", "/sched/latencies:seconds",
		"How long goroutines that could run waited for a processor."},
}

// runtimeHistogram is one of runtimeTimes as a collector.
type runtimeHistogram struct {
	desc   *prometheus.Desc
	source string
}

// registerRuntime adds runtimeTimes to reg.
func registerRuntime(reg *prometheus.Registry) {
	for _, t := range runtimeTimes {
		reg.MustRegister(&runtimeHistogram{prometheus.NewDesc(t.name, t.help, nil, nil), t.source})
	}
}

// Describe is prometheus.Collector.
func (h *runtimeHistogram) Describe(ch chan<- *prometheus.Desc) { ch <- h.desc }

// Collect is prometheus.Collector.
func (h *runtimeHistogram) Collect(ch chan<- prometheus.Metric) {
	s := []metrics.Sample{{Name: h.source}}
	metrics.Read(s)
	if s[0].Value.Kind() != metrics.KindFloat64Histogram {
		return // another runtime, which does not measure it: the metric is missing, not zero
	}
	counts, sum := rebucket(s[0].Value.Float64Histogram(), pauseBounds)
	send(ch, h.desc, pauseBounds, counts, sum)
}

// rebucket counts by bounds what the runtime counted by its own. Of a bucket of the runtime's
// only the limits are known: it counts as its upper one, so that nothing is told shorter
// than it was, and to the sum its lower one adds.
func rebucket(h *metrics.Float64Histogram, bounds []time.Duration) (counts []uint64, sum time.Duration) {
	counts = make([]uint64, len(bounds)+1)
	for i, n := range h.Counts {
		if n == 0 {
			continue
		}
		low, high := h.Buckets[i], h.Buckets[i+1]
		j := 0
		for j < len(bounds) && high > bounds[j].Seconds() {
			j++
		}
		counts[j] += n
		if low > 0 && !math.IsInf(low, 0) {
			sum += time.Duration(low * float64(n) * float64(time.Second))
		}
	}
	return counts, sum
}
