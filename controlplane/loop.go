// Package controlplane carries a source's view of the mesh to the data plane:
// source → model → compile → apply, one after the other, on one goroutine.
//
//   - Nothing is published before the source has given a whole state.
//   - A bad object is a problem, listed by Problems; it holds up nothing else.
//   - Every published state has a sequence number that one can wait for.
//
// It makes no rule about traffic and holds no socket.
package controlplane

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"aether/controlplane/compile"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Source gives whole states until its context ends; it returns an error only for good.
type Source func(ctx context.Context, on func(*model.Mesh, []model.Problem)) error

// Target is what states are applied to.
type Target interface {
	Apply(s *snapshot.Snapshot, workloads []model.Workload)
}

// Loop is the way from one source to one target. Make it with New.
type Loop struct {
	source Source
	target Target
	log    *slog.Logger

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at each publish
	seq      uint64
	at       time.Time
	mesh     *model.Mesh
	problems []model.Problem
}

// New makes a loop; log may be nil.
func New(source Source, target Target, log *slog.Logger) *Loop {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Loop{source: source, target: target, log: log, changed: make(chan struct{}), mesh: &model.Mesh{}}
}

// Run publishes what the source gives until ctx ends.
func (l *Loop) Run(ctx context.Context) error {
	return l.source(ctx, l.publish)
}

func (l *Loop) publish(m *model.Mesh, problems []model.Problem) {
	start := time.Now()
	snap, more := compile.Compile(m)
	problems = append(append([]model.Problem(nil), problems...), more...)
	l.mu.Lock()
	known := map[model.Problem]bool{}
	for _, p := range l.problems {
		known[p] = true
	}
	seq := l.seq + 1
	l.mu.Unlock()
	for _, p := range problems {
		if !known[p] { // once a cause
			l.log.Warn("not in force", "object", p.Object, "where", p.Where, "reason", p.Reason)
		}
	}
	l.target.Apply(snap.WithVersion(seq), m.Workloads)
	l.mu.Lock()
	l.seq, l.at, l.mesh, l.problems = seq, time.Now(), m, problems
	close(l.changed)
	l.changed = make(chan struct{})
	l.mu.Unlock()
	l.log.Info("published", "seq", seq, "services", len(snap.Services()), "endpoints", len(m.Endpoints),
		"workloads", len(m.Workloads), "problems", len(problems), "took", time.Since(start))
}

// State is what was published last.
type State struct {
	Seq      uint64 // 0: nothing yet
	At       time.Time
	Mesh     *model.Mesh // read only
	Problems []model.Problem
}

// State returns what was published last. Safe for concurrent use.
func (l *Loop) State() State {
	l.mu.Lock()
	defer l.mu.Unlock()
	return State{Seq: l.seq, At: l.at, Mesh: l.mesh, Problems: l.problems}
}

// Wait returns once a state with at least that sequence number is in force.
func (l *Loop) Wait(ctx context.Context, seq uint64) error {
	for {
		l.mu.Lock()
		have, changed := l.seq, l.changed
		l.mu.Unlock()
		if have >= seq {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
