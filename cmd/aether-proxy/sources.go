package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"aether/controlplane"
	"aether/controlplane/file"
	"aether/controlplane/input"
	"aether/controlplane/lastgood"
	"aether/dataplane"
	"aether/dataplane/telemetry"
)

// sources are what tells this node of the mesh, and the loop that they tell.
type sources struct {
	o    options
	cfg  controlplane.Config
	loop *controlplane.Loop
	run  []source
}

// source is one that runs beside the loop.
type source struct {
	name string
	run  func(context.Context) error
}

// checkSources says what is missing of the flags.
func (o *options) checkSources() error {
	switch {
	case o.node == "":
		return errors.New("--node is required (see --help)")
	case o.config == "":
		return errors.New("--config is required (see --help)")
	}
	return nil
}

func newSources(o options, node *dataplane.Node, log *slog.Logger) *sources {
	s := &sources{o: o, cfg: controlplane.Config{
		Target: node, Node: o.node, Domain: o.domain, TrustDomain: o.trustDomain, Log: log, Settings: o.settings(),
	}}
	if o.lastGood != "" {
		s.cfg.LastGood = lastgood.New(o.lastGood)
	}
	return s
}

// settings are those of the flags, which hold where no MeshConfig says otherwise.
func (o *options) settings() input.Settings {
	return input.Settings{AccessLogs: o.accessLog, AccessLogSuccess: 100, EmitStatsPod: o.statsPod}
}

// build makes the loop and its sources, by precedence (decision 023).
func (s *sources) build() error {
	s.loop = controlplane.New(s.cfg)
	if dir := s.o.config; dir != "" {
		sink := s.loop.Source("file", controlplane.SourceOptions{Final: true})
		how := file.Options{
			Node: s.o.node, Domain: s.o.domain, TrustDomain: s.o.trustDomain, NetNSDir: s.o.netnsDir, RedirectAllDefault: s.o.redirectAll,
		}
		s.add("file", func(ctx context.Context) error { return file.Feed(ctx, dir, how, s.o.settings(), sink) })
	}
	return nil
}

func (s *sources) add(name string, run func(context.Context) error) {
	s.run = append(s.run, source{name, run})
}

// gauges make the loop and the node known to m. Of contract 14.4 the names are those of
// upstream's agent, in Prometheus' spelling.
func gauges(m *telemetry.Metrics, n *dataplane.Node, l *controlplane.Loop) {
	m.Gauge("aether_config_seq", "Sequence number of the state in force.", func() float64 { return float64(l.State().Seq) })
	m.Gauge("aether_config_problems", "Objects that are not, or not wholly, in force.", func() float64 { return float64(len(l.State().Problems)) })
	m.Gauge("aether_config_synced", "1 once every source has said its whole state since the start.", func() float64 {
		if l.State().Synced {
			return 1
		}
		return 0
	})
	m.Gauge("aether_config_stale_seconds", "How long ago everything in force was known to be true; 0: it is now.", func() float64 {
		if t := l.Report().StaleSince; t != nil {
			return time.Since(*t).Seconds()
		}
		return 0
	})
	c := &l.Counters
	m.Count("aether_agent_snapshot_builds_total", "States published.", &c.Builds)
	m.CounterOf("aether_agent_snapshot_duration_seconds_total", "Time that compiling and applying them took.", func() float64 {
		return time.Duration(c.BuildNanos.Value()).Seconds()
	})
	m.Count("aether_agent_snapshot_errors_total", "Problems that appeared.", &c.Problems)
	m.Gauge("aether_agent_snapshot_version", "Sequence number of the state in force.", func() float64 { return float64(l.State().Seq) })
	m.Count("aether_agent_refresher_batches_total", "Changes that sources told.", &c.Batches)
	m.Count("aether_agent_refresher_coalesced_total", "Of these, what came into force together with others.", &c.Coalesced)
	m.Count("aether_last_good_writes_total", "Times that the last good state was written.", &c.Saves)
	m.Count("aether_last_good_errors_total", "Times that it could not be.", &c.SaveErrors)
	m.Gauge("aether_last_good_age_seconds", "Age of the last good state on disk; 0: none is kept, or there is none yet.", func() float64 {
		if g := l.Report().LastGood; g != nil {
			return float64(g.AgeMS) / 1000
		}
		return 0
	})
	for _, s := range l.Report().Sources {
		report := func() (of input.SourceReport) {
			for _, r := range l.Report().Sources {
				if r.Name == s.Name {
					return r
				}
			}
			return of
		}
		m.Gauge("aether_source_connected", "1 while a source hears of changes as they happen.", func() float64 {
			if report().Connected {
				return 1
			}
			return 0
		}, "source", s.Name)
		m.Gauge("aether_source_since_seconds", "How long a source has been connected, or not.", func() float64 {
			if r := report(); !r.Since.IsZero() {
				return time.Since(r.Since).Seconds()
			}
			return 0
		}, "source", s.Name)
	}
	m.Count("aether_source_disconnects_total", "Times that a source lost what it follows.", &c.Disconnects)
	n.Register(m)
}
