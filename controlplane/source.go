package controlplane

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"aether/controlplane/input"
)

// SourceOptions say what of a source is not as of others. The zero value is an ordinary source.
type SourceOptions struct {
	// Local is the source that knows this node's own pods best: that it speaks of a row that
	// another source speaks of, too, is nothing to complain of, and of what it said
	// nothing is kept for the next start.
	Local bool
	// Final is a source whose removals are somebody's will, as a directory's of files are: a
	// service that it removes is not kept (contract 4.12 is of rows that come and go with pods).
	Final bool
}

// Source is how one source speaks to the loop: an input.Sink. Its methods are safe for
// concurrent use.
type Source struct {
	loop *Loop
	name string
	opts SourceOptions

	mu         sync.Mutex
	pending    pending
	updates    uint64 // Batches
	status     input.Status
	lastUpdate time.Time // when it last said something

	// What the loop's goroutine owns, as Loop.own guards.
	known
	whole        bool      // it has said a whole state since the start
	restored     bool      // what it knows is of before the start
	freshAt      time.Time // restored: until when that was known to be true
	restoredOnly struct {  // what of it a whole state does not replace by saying nothing
		settings *input.Settings
		locality *input.Locality
	}
	restoredState input.Batch // restored: all that it said before the start, its pods included; not ours to change
	drained       uint64      // how many of said are in known

	inForce  atomic.Uint64 // how many of said are in force
	hasState bool          // whole or restored, as Loop.mu guards
}

// pending is what a source has said and the loop has not taken yet. Of a key only the
// last word is there.
type pending struct {
	replace *input.Batch // a whole state to begin with; not ours to change
	then    input.Batch
	rows    span // of what is soon published
	objects span // of what is held off longer
	urgent  bool // somebody waits for it
}

// span is when the first and the last of several things came.
type span struct{ first, last time.Time }

func (s *span) add(t time.Time) {
	if s.first.IsZero() {
		s.first = t
	}
	s.last = t
}

// Source adds a source; of several that speak of one thing the one that was added first
// has precedence (decision 023). Call it before Run.
func (l *Loop) Source(name string, o SourceOptions) *Source {
	s := &Source{loop: l, name: name, opts: o}
	l.sources = append(l.sources, s)
	return s
}

// Apply is input.Sink.
func (s *Source) Apply(b input.Batch) {
	s.mu.Lock()
	now := time.Now()
	s.pending.then.Add(&b)
	if objects(&b) {
		s.pending.objects.add(now)
	} else {
		s.pending.rows.add(now)
	}
	s.countUpdateLocked(now)
	s.mu.Unlock()
	s.loop.wakeUp()
}

// Replace is input.Sink.
func (s *Source) Replace(b input.Batch) {
	s.mu.Lock()
	now := time.Now()
	if old := &s.pending; b.Settings == nil || b.Locality == nil { // nil is as before, also of what is not taken yet
		for _, was := range []*input.Batch{&old.then, old.replace} {
			if was == nil {
				continue
			}
			if b.Settings == nil {
				b.Settings = was.Settings
			}
			if b.Locality == nil {
				b.Locality = was.Locality
			}
		}
	}
	s.pending.replace, s.pending.then = &b, input.Batch{}
	s.pending.objects.add(now)
	s.countUpdateLocked(now)
	s.mu.Unlock()
	s.loop.wakeUp()
}

func (s *Source) countUpdateLocked(now time.Time) {
	s.updates++
	s.lastUpdate = now
	s.loop.Counters.Batches.Inc()
}

// objects reports whether a Batch says more than rows, names and problems.
func objects(b *input.Batch) bool {
	but := *b
	but.Endpoints, but.Catalog, but.Problems = nil, nil, nil
	return !but.Empty()
}

// Report is input.Sink.
func (s *Source) Report(st input.Status) {
	s.mu.Lock()
	was := s.status
	if st.Since.IsZero() {
		if st.Since = was.Since; st.Connected != was.Connected || st.Since.IsZero() {
			st.Since = time.Now()
		}
	}
	s.status = st
	s.mu.Unlock()
	switch {
	case st.Connected && !was.Connected:
		s.loop.log.Info("source connected", "source", s.name, "version", st.Version)
	case !st.Connected && (was.Connected || st.Err != was.Err):
		if was.Connected {
			s.loop.Counters.Disconnects.Inc()
		}
		s.loop.log.Warn("source not connected; what it last said is in force", "source", s.name, "err", st.Err)
	}
}

// Flush has what was said so far taken at once, and returns when it is in force, or
// would be if all sources had said a whole state. The error is ctx's.
func (s *Source) Flush(ctx context.Context) error {
	s.mu.Lock()
	want := s.updates
	s.pending.urgent = !s.pending.rows.first.IsZero() || !s.pending.objects.first.IsZero()
	s.mu.Unlock()
	s.loop.wakeUp()
	return s.loop.wait(ctx, func() bool { return s.inForce.Load() >= want })
}

// WaitForOthers returns once every other source has said a whole state, now or before the
// start, and Config.OnNeeds knows of it: what this source is to look for. The error is ctx's.
func (s *Source) WaitForOthers(ctx context.Context) error {
	return s.loop.wait(ctx, func() bool {
		return !slices.ContainsFunc(s.loop.sources, func(o *Source) bool { return o != s && !o.hasState })
	})
}

// Before returns what the source said before the start and until when that was known to be true, as soon as
// Run has looked; ok: there is something. Its pods are among it, which are not in force by that. The
// error is ctx's.
func (s *Source) Before(ctx context.Context) (b input.Batch, at time.Time, ok bool, err error) {
	select {
	case <-s.loop.lastGoodRead:
	case <-ctx.Done():
		return b, at, false, ctx.Err()
	}
	s.loop.stateMu.Lock()
	defer s.loop.stateMu.Unlock()
	return s.restoredState, s.freshAt, !s.freshAt.IsZero(), nil
}

// due is when what was said is to be taken; ok: something was.
func (s *Source) due() (at time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	consider := func(x span, quiet, hold time.Duration) {
		if x.first.IsZero() {
			return
		}
		t := x.last.Add(quiet)
		if end := x.first.Add(hold); end.Before(t) {
			t = end
		}
		if s.pending.urgent {
			t = x.first
		}
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	consider(s.pending.rows, quietRows, holdRows)
	consider(s.pending.objects, quietObjects, holdObjects)
	return at, ok
}

// takePending is what was said and not taken, and how much has been said in all.
func (s *Source) takePending() (p pending, said uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, s.pending = s.pending, pending{}
	return p, s.updates
}

// wakeUp has the loop look.
func (l *Loop) wakeUp() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// known is what a source says; keys of which it says nothing are not there.
type known struct {
	tables   input.Tables
	settings *input.Settings
	locality *input.Locality
}
