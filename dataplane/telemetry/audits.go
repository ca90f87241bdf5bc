package telemetry

import (
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// maxAudited bounds the filters that Audits tells apart, those that are gone among them.
const maxAudited = 1024

// Audits count what filters in mode AUDIT make of requests (contract 10.7). Each loop counts in a shard of its own; a
// scrape adds them up. The zero value is ready. Safe for concurrent use.
type Audits struct {
	mu      sync.Mutex
	results map[string][]*auditResults // by filter, of each shard that has met it; guarded by mu
}

// auditResults are one filter's counts on one loop.
type auditResults struct{ allowed, denied Counter }

// AuditShard is what one loop counts in, and no other.
type AuditShard struct {
	all  *Audits
	seen map[string]*auditResults
}

// Shard makes the shard of a loop.
func (a *Audits) Shard() AuditShard { return AuditShard{all: a, seen: map[string]*auditResults{}} }

// Count counts a request that the filter of that name, as rules are called, would have denied, or not.
func (s *AuditShard) Count(filter string, denied bool) {
	r := s.seen[filter]
	if r == nil {
		r = s.add(filter)
	}
	if denied {
		r.denied.Inc()
	} else {
		r.allowed.Inc()
	}
}

func (s *AuditShard) add(filter string) *auditResults {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	if s.all.results == nil {
		s.all.results = map[string][]*auditResults{}
	}
	if _, ok := s.all.results[filter]; !ok && len(s.all.results) >= maxAudited {
		if r := s.seen[overflow]; r != nil {
			return r
		}
		filter = overflow
	}
	r := &auditResults{}
	s.seen[filter] = r
	s.all.results[filter] = append(s.all.results[filter], r)
	return r
}

// Audits makes a known as aether_audit_requests_total of that direction.
func (m *Metrics) Audits(a *Audits, direction string) {
	m.reg.MustRegister(&auditCollector{a, prometheus.NewDesc("aether_audit_requests_total",
		"Requests that rbac filters in mode AUDIT were asked about, by what they would have done.",
		[]string{"filter", "result"}, prometheus.Labels{"direction": direction})})
}

type auditCollector struct {
	a    *Audits
	desc *prometheus.Desc
}

// Describe is prometheus.Collector.
func (c *auditCollector) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect is prometheus.Collector.
func (c *auditCollector) Collect(ch chan<- prometheus.Metric) {
	c.a.mu.Lock()
	defer c.a.mu.Unlock()
	for filter, shards := range c.a.results {
		var allowed, denied uint64
		for _, r := range shards {
			allowed += r.allowed.Value()
			denied += r.denied.Value()
		}
		name := strings.TrimPrefix(filter, "HTTPFilter ")
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.CounterValue, float64(allowed), name, "allowed")
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.CounterValue, float64(denied), name, "denied")
	}
}
