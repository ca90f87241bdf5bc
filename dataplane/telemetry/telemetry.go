// Package telemetry counts what the journal tells, in Prometheus form, and logs
// what failed.
//
//   - Every label is out of a closed set, or a name that the configuration knows: no
//     host, address or path is one. The series are bounded (maxSeries).
//   - Counting on a loop takes no lock and, once the series is there, allocates nothing.
//   - Nothing here blocks whoever tells of an entry.
//   - The metrics library stops here.
//
// It knows no decision and no connection: it is told of ends, and asks for gauges when scraped.
package telemetry

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Config of Metrics. The zero value is usable.
type Config struct {
	// Pods fills source_pod, or destination_pod, of aether_requests_total with the pod's
	// own name: a series for each pod (contract 14.1, emitStatsPod).
	Pods bool
	// Bare leaves out the families of requests and connections: for a process that
	// carries no traffic.
	Bare bool
}

// Metrics is a journal.Observer. Safe for concurrent use. What else is to be counted:
//
//   - an event: a Counter where it happens, made known by Count;
//   - a value that somebody holds: Gauge, or CounterOf where it only grows;
//   - a distribution: Histogram.
//
// They are made known before serving (cmd/aether-proxy, and dataplane.Node.Register).
type Metrics struct {
	reg    *prometheus.Registry
	counts counts
}

// New makes an empty registry with the process's and the Go runtime's own metrics.
func New(c Config) *Metrics {
	m := &Metrics{reg: prometheus.NewRegistry()}
	m.SetPods(c.Pods, nil)
	m.reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	registerRuntime(m.reg)
	if !c.Bare {
		m.reg.MustRegister(&m.counts)
	}
	return m
}

// SetPods is Config.Pods from now on, and what of the pods of namespaces that have it
// otherwise; of may not change any more. Safe for concurrent use.
func (m *Metrics) SetPods(on bool, of map[string]bool) { m.counts.pods.Store(&named{on, of}) }

// named says whether pods have their names in metrics.
type named struct {
	all bool
	of  map[string]bool // by namespace
}

func (n *named) has(namespace string) bool {
	if len(n.of) > 0 {
		if on, there := n.of[namespace]; there {
			return on
		}
	}
	return n.all
}

// Gauge adds a value that is asked for at each scrape. labels are pairs of name and
// value; several gauges may have one name, and then the same help and label names.
func (m *Metrics) Gauge(name, help string, f func() float64, labels ...string) {
	m.reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: pairs(labels)}, f))
}

// CounterOf is Gauge for a value that only grows.
func (m *Metrics) CounterOf(name, help string, f func() float64, labels ...string) {
	m.reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: pairs(labels)}, f))
}

func pairs(labels []string) prometheus.Labels {
	l := prometheus.Labels{}
	for i := 0; i+1 < len(labels); i += 2 {
		l[labels[i]] = labels[i+1]
	}
	return l
}

// Histogram adds a distribution of times that somebody else counts: f gives how many
// were at most each of bounds, and more than the last one, and the sum of all.
func (m *Metrics) Histogram(name, help string, bounds []time.Duration, f func() (counts []uint64, sum time.Duration)) {
	m.reg.MustRegister(&histogram{prometheus.NewDesc(name, help, nil, nil), bounds, f})
}

type histogram struct {
	desc   *prometheus.Desc
	bounds []time.Duration
	f      func() ([]uint64, time.Duration)
}

// Describe is prometheus.Collector.
func (h *histogram) Describe(ch chan<- *prometheus.Desc) { ch <- h.desc }

// Collect is prometheus.Collector.
func (h *histogram) Collect(ch chan<- prometheus.Metric) {
	counts, sum := h.f()
	send(ch, h.desc, h.bounds, counts, sum)
}

// send makes a histogram of counts that are not cumulative.
func send(ch chan<- prometheus.Metric, d *prometheus.Desc, bounds []time.Duration, counts []uint64, sum time.Duration, labels ...string) {
	buckets := make(map[float64]uint64, len(bounds))
	var n uint64
	for i, c := range counts {
		n += c
		if i < len(bounds) {
			buckets[bounds[i].Seconds()] = n
		}
	}
	ch <- prometheus.MustNewConstHistogram(d, n, sum.Seconds(), buckets, labels...)
}

// Handler serves the metrics.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.reg, promhttp.HandlerOpts{})
}

// class is a status by its hundreds: "2xx".
func class(status uint16) string { return strconv.Itoa(int(min(status/100, 9))) + "xx" }
