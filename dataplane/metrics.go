package dataplane

import (
	"time"

	"aether/dataplane/engine"
	"aether/dataplane/extauthz"
	"aether/dataplane/outbound"
	"aether/dataplane/reactor"
	"aether/dataplane/telemetry"
)

// Register makes the node's gauges and counters known to m. A counter that is kept in
// outbound, inbound or the engine is made known here. Call it once.
func (n *Node) Register(m *telemetry.Metrics) {
	loops := func(f func(*engine.Loop) float64) func() float64 {
		return func() (sum float64) {
			for _, l := range n.engine.Loops() {
				sum += f(l)
			}
			return sum
		}
	}
	m.Gauge("aether_pods", "Pods that are served.", func() float64 { return float64(len(n.Pods())) })
	m.Gauge("aether_pods_failed", "Pods of this node that cannot be served.", func() float64 {
		n.mu.Lock()
		defer n.mu.Unlock()
		return float64(len(n.problems))
	})
	m.Gauge("aether_certificates_failed", "Pods whose certificate could not be renewed, or has not come, as its source said last.", func() float64 {
		return float64(len(certificateProblems(n.certs.Held())))
	})
	m.Gauge("aether_certificate_first_end_seconds", "When the first of the pods' certificates ends, in seconds of Unix time; 0: there is none.", func() float64 {
		var first time.Time
		for _, h := range n.certs.Held() {
			if h.SVID != nil && (first.IsZero() || h.SVID.NotAfter.Before(first)) {
				first = h.SVID.NotAfter
			}
		}
		if first.IsZero() {
			return 0
		}
		return float64(first.Unix())
	})
	m.Gauge("aether_connections", "Connections on the event loops, hop sessions and those to applications included.", func() float64 {
		var c int64
		for _, p := range n.Pods() {
			c += p.Connections
		}
		return float64(c)
	})
	for direction, relays := range map[string]*engine.Relays{"outbound": &n.out.Relays, "inbound": &n.in.Relays} {
		m.Gauge("aether_relays", "Connections that are relayed: raw TCP and what passes through.", func() float64 { return float64(relays.Len()) }, "direction", direction)
	}
	m.Gauge("aether_hop_sessions", "Sessions to other nodes' proxies.", loops(func(l *engine.Loop) float64 { return float64(l.Gauges.Sessions.Load()) }))
	m.Gauge("aether_requests_in_flight", "Requests under way.", loops(func(l *engine.Loop) float64 { return float64(l.Gauges.Outbound.Load()) }), "direction", "outbound")
	m.Gauge("aether_requests_in_flight", "Requests under way.", loops(func(l *engine.Loop) float64 { return float64(l.Gauges.Inbound.Load()) }), "direction", "inbound")
	for i, result := range outbound.MirrorResults {
		m.Count("aether_mirrored_total", "Copies of requests that rules mirror, by how they ended.", &n.out.Mirrored[i], "result", result)
	}
	for i, result := range outbound.ColdResults {
		m.Count("aether_cold_total", "Requests and connections that waited for a service that this node had not used yet, by how that ended.", &n.out.Cold[i], "result", result)
	}
	m.Audits(&n.out.Audits, "outbound")
	m.Audits(&n.in.Audits, "inbound")
	m.Gauge("aether_cold_waiting", "Those that wait now.", func() float64 { return float64(n.out.Waiting()) })
	for i, result := range extauthz.Results {
		m.Count("aether_ext_authz_total", "Questions to the authorization service, by how they ended.", &n.authz.Asked[i], "result", result)
	}

	m.Gauge("aether_descriptors", "Descriptors accounted to pods.", func() float64 { return float64(n.engine.Files()) })
	m.Gauge("aether_overload_level", "How short of memory the proxy is: 0 calm, 1 shrink, 2 no-keep-alive, 3 stop-requests, 4 stop-accepting.", func() float64 { return float64(n.engine.Level()) })
	for i, kind := range engine.ShedKinds() {
		m.CounterOf("aether_shed_total", "What was refused, ended or left waiting for want of memory or descriptors.",
			func() float64 { return float64(n.engine.Shed(engine.Shed(i))) }, "kind", kind)
	}

	m.Gauge("aether_loops", "Event loops.", loops(func(*engine.Loop) float64 { return 1 }))
	m.CounterOf("aether_loop_busy_seconds_total", "Time loops did not wait.", loops(func(l *engine.Loop) float64 { return l.Stats().Busy.Seconds() }))
	m.CounterOf("aether_loop_cpu_seconds_total", "Processor time of the loops.", loops(func(l *engine.Loop) float64 { return l.Stats().CPU.Seconds() }))
	m.CounterOf("aether_loop_panics_total", "Panics that cost one connection each.", loops(func(l *engine.Loop) float64 { return float64(l.Stats().Panics) }))
	m.CounterOf("aether_loop_slow_total", "Loop iterations over 50 ms.", loops(func(l *engine.Loop) float64 { return float64(l.Stats().Slow) }))
	m.Histogram("aether_loop_lag_seconds", "How long loop iterations took: what is ready meanwhile waits for as long at most.",
		reactor.Lags[:], func() (counts []uint64, sum time.Duration) {
			counts = make([]uint64, len(reactor.Lags)+1)
			for _, l := range n.engine.Loops() {
				st := l.Stats()
				for i, c := range st.Took {
					counts[i] += c
				}
				sum += st.Busy
			}
			return counts, sum
		})
}
