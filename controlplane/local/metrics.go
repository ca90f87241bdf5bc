package local

import (
	"sync/atomic"
	"time"

	"aether/dataplane/telemetry"
)

// Counts of a node's pods, named after contract 14.4.
type Counts struct {
	HealthTransitions telemetry.Counter // by probes
	WriteErrors       telemetry.Counter // of rows, each try
	StorageErrors     telemetry.Counter
	DamagedRecords    telemetry.Counter // set aside
	AckFailures       telemetry.Counter // the data plane was late

	GhostsRemoved       telemetry.Counter // rows of the node without a pod
	OrphansPruned       telemetry.Counter // records whose pod the API does not have
	StalePruned         telemetry.Counter // records whose namespace is gone
	MissingRegistered   telemetry.Counter // pods without their row
	Corrected           telemetry.Counter // rows that did not say what they should
	MissingStorage      telemetry.Counter // live pods without a record
	LostAddEvictions    telemetry.Counter
	PruneBreakerTripped telemetry.Counter
	SweepErrors         telemetry.Counter

	promotions [len(promotionBounds) + 1]atomic.Uint64
	waited     atomic.Int64
}

// promotionBounds of the distribution of promotion delays.
var promotionBounds = [...]time.Duration{
	time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 20 * time.Second, 30 * time.Second, time.Minute, 5 * time.Minute,
}

// promoted counts a pod that became healthy for the first time.
func (c *Counts) promoted(after time.Duration) {
	i := 0
	for i < len(promotionBounds) && after > promotionBounds[i] {
		i++
	}
	c.promotions[i].Add(1)
	c.waited.Add(int64(after))
}

// Register makes the counts known to m. Call it once.
func (l *Pods) Register(m *telemetry.Metrics) {
	c := &l.Counts
	const sweep = "aether_agent_ghost_sweep_"
	for _, x := range []struct {
		name, help string
		counter    *telemetry.Counter
	}{
		{"aether_agent_liveness_health_transitions_total", "Changes of endpoints' health by probes.", &c.HealthTransitions},
		{"aether_agent_liveness_write_errors_total", "Attempts to write a row that failed.", &c.WriteErrors},
		{"aether_agent_storage_errors_total", "Records of pods that could not be written or removed.", &c.StorageErrors},
		{"aether_agent_storage_damaged_total", "Records of pods that were set aside.", &c.DamagedRecords},
		{"aether_agent_ack_wait_failures_total", "Pods for which the data plane was late.", &c.AckFailures},
		{sweep + "ghosts_removed_total", "Rows of this node without a pod, removed.", &c.GhostsRemoved},
		{sweep + "orphans_pruned_total", "Records whose pod the API server does not have, removed.", &c.OrphansPruned},
		{sweep + "stale_pruned_total", "Records whose network namespace is gone, removed.", &c.StalePruned},
		{sweep + "missing_registered_total", "Pods without their row, registered.", &c.MissingRegistered},
		{sweep + "corrected_total", "Rows that said something else than their pod, written anew.", &c.Corrected},
		{sweep + "missing_storage_total", "Live pods without a record, found.", &c.MissingStorage},
		{sweep + "lost_add_evictions_total", "Pods evicted because their add was lost.", &c.LostAddEvictions},
		{sweep + "prune_breaker_tripped_total", "Passes that would have removed too many pods.", &c.PruneBreakerTripped},
		{sweep + "errors_total", "Listings and evictions that failed.", &c.SweepErrors},
	} {
		m.Count(x.name, x.help, x.counter)
	}
	m.Gauge("aether_agent_storage_pods", "Pods on disk.", func() float64 {
		l.mu.Lock()
		defer l.mu.Unlock()
		return float64(len(l.pods))
	})
	m.Histogram("aether_agent_liveness_promotion_delay_seconds", "From a pod's add to its first health.", promotionBounds[:],
		func() ([]uint64, time.Duration) {
			counts := make([]uint64, len(c.promotions))
			for i := range c.promotions {
				counts[i] = c.promotions[i].Load()
			}
			return counts, time.Duration(c.waited.Load())
		})
}
