package client

import "aether/dataplane/telemetry"

// Register makes the client's counters and gauges known to m (contract 14.4, in
// Prometheus' spelling). Call it once.
func (c *Client) Register(m *telemetry.Metrics) {
	m.Gauge("aether_agent_registry_connected", "1 while a registrar tells of changes as they happen.", func() float64 {
		if c.Status().Connected {
			return 1
		}
		return 0
	})
	m.Count("aether_agent_registry_reconnects_total", "Connections to registrars after the first.", &c.Reconnects)
	m.Count("aether_agent_registry_watch_errors_total", "Connections to registrars, and streams of them, that failed.", &c.Errors)
	m.Count("aether_agent_registry_events_total", "Messages that registrars sent.", &c.Events)
	m.Count("aether_agent_registry_unknown_events_total", "Messages of a kind that this version does not know.", &c.Unknown)
	for i, f := range faults {
		m.Count("aether_agent_registry_malformed_total", "Rows that are not valid, and are not served.", &c.Malformed[i], "fault", string(f))
	}
	m.Gauge("aether_agent_registry_catalog", "Names of services that there are in the mesh.", func() float64 { return float64(c.Catalog()) })
	m.Gauge("aether_agent_upstreams", "Services in this node's scope.", func() float64 { return float64(c.Declared()) }, "why", "declared")
	m.Gauge("aether_agent_upstreams", "Services in this node's scope.", func() float64 { return float64(c.Asked()) }, "why", "observed")
	m.Count("aether_agent_upstreams_miss_total", "Services that came into scope because a request asked for them.", &c.Misses)
	m.Count("aether_agent_upstreams_rejected_total", "Names that were asked for and are not in the catalog.", &c.Rejected)
	m.Count("aether_agent_refresher_coalesced_total", "Changes of scope that went together with another one.", &c.Coalesced)
	for i, way := range rescopings {
		m.Count("aether_agent_refresher_streams_total", "Streams that were opened for a new scope.", &c.Rescoped[i], "scope", way)
	}
}
