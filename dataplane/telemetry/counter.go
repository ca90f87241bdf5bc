package telemetry

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Counter is an event's: a number that only grows. The zero value is ready; whoever
// has the event keeps a Counter beside what it works with, adds to it from anywhere
// without a lock, and has it made known once:
//
//	type Outbound struct {
//		...
//		Retries telemetry.Counter // requests sent once more
//	}
//
//	metrics.Count("aether_retries_total", "Requests sent once more.", &out.Retries)
type Counter struct{ n atomic.Uint64 }

// Inc adds one.
func (c *Counter) Inc() { c.n.Add(1) }

// Add adds n.
func (c *Counter) Add(n uint64) { c.n.Add(n) }

// Value is what has been added up to now.
func (c *Counter) Value() uint64 { return c.n.Load() }

// Count makes c known under a name that ends in _total. labels are pairs of name and
// value: counters of one name differ in the values, which are a closed set.
func (m *Metrics) Count(name, help string, c *Counter, labels ...string) {
	m.reg.MustRegister(prometheus.NewCounterFunc(
		prometheus.CounterOpts{Name: name, Help: help, ConstLabels: pairs(labels)}, func() float64 { return float64(c.Value()) }))
}
