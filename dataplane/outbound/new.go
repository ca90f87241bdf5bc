package outbound

import (
	"log/slog"
	"math/rand/v2"
	"time"

	"aether/dataplane/engine"
	"aether/dataplane/telemetry"
)

// New makes an Outbound.
func New(cfg Config) *Outbound {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	o := &Outbound{cfg: cfg, log: cfg.Log, quiet: telemetry.NewLogLimiter(cfg.Log, time.Minute, nil), now: time.Now}
	if cfg.Dialer != nil {
		o.bonds.Now = cfg.Dialer.Now
	}
	o.loops.Make = func(l *engine.Loop) *loopState {
		st := &loopState{o: o, l: l, hops: map[hopKey]*hopState{}, pods: map[*Pod]*upstreams{}, waiting: map[waiter]struct{}{}, audits: o.Audits.Shard(), rnd: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))}
		st.pool.Service = o
		st.mirrored.Service = (*mirrors)(o)
		return st
	}
	return o
}
