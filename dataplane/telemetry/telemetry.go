// Package telemetry counts what the journal tells, in Prometheus form.
//
//   - Every label is a closed set: no pod, host, address or path is one.
//   - Counting an entry that was seen before allocates nothing.
//   - The metrics library stops here.
//
// It knows no decision and no connection: it is told of ends, and asks for gauges when scraped.
package telemetry

import (
	"net/http"
	"strconv"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"aether/dataplane/journal"
)

// Metrics is a journal.Observer. Safe for concurrent use.
type Metrics struct {
	reg      *prometheus.Registry
	ends     *prometheus.CounterVec
	bytes    *prometheus.CounterVec
	failures *prometheus.CounterVec
	duration *prometheus.HistogramVec

	mu   sync.RWMutex
	seen map[key]*series
}

// key is what an entry is counted under.
type key struct {
	dir    string
	kind   string
	action string
	reason string
	status uint8 // hundreds
	ended  string
}

type series struct {
	n        prometheus.Counter
	in, out  prometheus.Counter
	duration prometheus.Observer
}

// New makes an empty registry with the process's and the Go runtime's own metrics.
func New() *Metrics {
	m := &Metrics{reg: prometheus.NewRegistry(), seen: map[key]*series{}}
	labels := []string{"direction", "kind", "action", "reason", "code", "ended"}
	m.ends = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "aether_ends_total",
		Help: "Requests, and connections that carried none, by how they were decided and how they ended.",
	}, labels)
	m.bytes = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "aether_bytes_total",
		Help: "Payload bytes of requests and connections; flow says from (in) or to (out) the client.",
	}, []string{"direction", "kind", "flow"})
	m.duration = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "aether_duration_seconds",
		Help:    "From the head of a request, or the accept of a connection, to its end.",
		Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 60, 300},
	}, []string{"direction", "kind"})
	m.failures = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "aether_failures_total",
		Help: "Requests and connections that something went wrong with, by what: no-certificate, connect, wrong-peer, ...",
	}, []string{"direction", "kind", "cause"})
	m.reg.MustRegister(m.ends, m.bytes, m.failures, m.duration, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Gauge adds a value that is asked for at each scrape. Call it before serving.
func (m *Metrics) Gauge(name, help string, f func() float64) {
	m.reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f))
}

// Counter is Gauge for a value that only grows.
func (m *Metrics) Counter(name, help string, f func() float64) {
	m.reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, f))
}

// Handler serves the metrics.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.reg, promhttp.HandlerOpts{})
}

// Ended is journal.Observer.
func (m *Metrics) Ended(e *journal.Entry) {
	k := key{dir: e.Dir.String(), kind: "connection", action: e.Action, reason: e.Reason, ended: e.Ended}
	if e.Request {
		k.kind = "request"
		k.status = uint8(min(max(e.Status, 0)/100, 9))
	}
	m.mu.RLock()
	s := m.seen[k]
	m.mu.RUnlock()
	if s == nil {
		s = m.add(k)
	}
	if e.Cause != "" {
		m.failures.WithLabelValues(k.dir, k.kind, e.Cause).Inc()
	}
	s.n.Inc()
	s.in.Add(float64(e.BytesIn))
	s.out.Add(float64(e.BytesOut))
	s.duration.Observe(e.Took.Seconds())
}

func (m *Metrics) add(k key) *series {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.seen[k]; s != nil {
		return s
	}
	code := ""
	if k.kind == "request" {
		code = strconv.Itoa(int(k.status)) + "xx"
	}
	s := &series{
		n:        m.ends.WithLabelValues(k.dir, k.kind, k.action, k.reason, code, k.ended),
		in:       m.bytes.WithLabelValues(k.dir, k.kind, "in"),
		out:      m.bytes.WithLabelValues(k.dir, k.kind, "out"),
		duration: m.duration.WithLabelValues(k.dir, k.kind),
	}
	m.seen[k] = s
	return s
}
