package server

import (
	"time"

	"aether/controlplane/registry"
	"aether/dataplane/telemetry"
)

// counters are what happens in a server.
type counters struct {
	syncs, syncErrors            telemetry.Counter // what the store said; interruptions
	unencodable                  telemetry.Counter
	snapshots, resumed, caughtUp telemetry.Counter // watches by how they began
	broadcasts, events, slow     telemetry.Counter // changes of rows; tellings of watchers; those cut off
	writes, writeErrors          telemetry.Counter
	dropped, full, unconfirmed   telemetry.Counter
	outdated                     telemetry.Counter
	denied                       telemetry.Counter
	refused                      map[registry.Fault]*telemetry.Counter
}

// The faults of a registration beyond its row's.
const (
	badService registry.Fault = "bad_service" // its name is none
	tooLarge   registry.Fault = "too_large"
)

func newRefused() map[registry.Fault]*telemetry.Counter {
	m := map[registry.Fault]*telemetry.Counter{}
	for _, f := range append(registry.Faults(), badService, tooLarge, otherNode) {
		m[f] = new(telemetry.Counter)
	}
	return m
}

// Register makes the server's gauges and counters known to m (contract 14.4). Call it once.
func (s *Server) Register(m *telemetry.Metrics) {
	gauge := func(name, help string, f func(Status) int) {
		m.Gauge(name, help, func() float64 { return float64(f(s.Status())) })
	}
	gauge("aether_registrar_snapshot_version", "Changes of services' rows since the start.", func(st Status) int { return int(st.Changes) })
	gauge("aether_registrar_snapshot_services", "Services in the snapshot.", func(st Status) int { return st.Services })
	gauge("aether_registrar_snapshot_rows", "Rows in the snapshot: one a pod and class.", func(st Status) int { return st.Rows })
	gauge("aether_registrar_watchers", "Watch streams.", func(st Status) int { return st.Watchers })
	gauge("aether_registrar_watch_filtered_subscribers", "Watch streams with a filter.", func(st Status) int { return st.Filtered })
	gauge("aether_registrar_synced", "1 once the store's first whole state is here.", func(st Status) int { return number(st.Synced) })
	gauge("aether_registrar_sync_connected", "1 while the store is followed.", func(st Status) int { return number(st.Synced && st.StoreErr == "") })
	m.Gauge("aether_registrar_sync_last_timestamp_seconds", "When the store said something last.", func() float64 {
		at := s.Status().StoreAt
		if at.IsZero() {
			return 0
		}
		return float64(at.UnixMilli()) / 1000
	})
	m.Count("aether_registrar_sync_total", "What the store said: whole states and changes.", &s.syncs)
	m.Count("aether_registrar_sync_errors_total", "Interruptions of what the store says.", &s.syncErrors)
	m.Count("aether_registrar_sync_unencodable_total", "Rows of the store that are left out: they cannot be sent to nodes, or name an identity that they may not.", &s.unencodable)
	m.Count("aether_registrar_watches_total", "Watches that began, by what they were told first.", &s.snapshots, "began", "snapshot")
	m.Count("aether_registrar_watches_total", "Watches that began, by what they were told first.", &s.resumed, "began", "unchanged")
	m.Count("aether_registrar_watches_total", "Watches that began, by what they were told first.", &s.caughtUp, "began", "changes")
	m.Count("aether_registrar_broadcast_changes_total", "Changes of rows.", &s.broadcasts)
	m.Count("aether_registrar_broadcast_events_total", "Events that watchers were told, each watcher's counted.", &s.events)
	m.Count("aether_registrar_broadcast_slow_total", "Watchers that did not read and were cut off.", &s.slow)
	m.Gauge("aether_registrar_broadcast_queued", "Events that wait for watchers.", func() float64 { return float64(s.queued.Load()) })
	gauge("aether_registrar_writebehind_pending", "Writes that the store has not shown yet.", func(st Status) int { return st.Pending })
	gauge("aether_registrar_writebehind_unwritten", "Writes that the store has refused and that are tried again.", func(st Status) int { return st.Refused })
	m.Gauge("aether_registrar_writebehind_unwritten_seconds", "How long the oldest of them has waited.", func() float64 {
		since := s.Status().RefusedSince
		if since.IsZero() {
			return 0
		}
		return time.Since(since).Seconds()
	})
	m.Count("aether_registrar_writebehind_writes_total", "Writes that the store has taken.", &s.writes)
	m.Count("aether_registrar_writebehind_errors_total", "Tries of a write that failed.", &s.writeErrors)
	m.Count("aether_registrar_writebehind_dropped_total", "Writes given up: those that the store could not hold for "+dropTime.String()+", or owed at the end.", &s.dropped)
	m.Count("aether_registrar_writebehind_refused_total", "Registrations refused because too many writes wait.", &s.full)
	m.Count("aether_registrar_writebehind_unconfirmed_total", "Writes that the store took and did not show.", &s.unconfirmed)
	m.Count("aether_registrar_writebehind_outdated_total", "Registrations that were not written, because their node has said otherwise since.", &s.outdated)
	m.Count("aether_registrar_denied_total", "Calls of peers that may not change rows.", &s.denied)
	for why, n := range s.refused {
		m.Count("aether_registrar_rows_refused_total", "Registrations refused, by what is wrong with the row.", n, "reason", string(why))
	}
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}
