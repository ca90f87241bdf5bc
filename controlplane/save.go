package controlplane

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"aether/controlplane/input"
	"aether/controlplane/lastgood"
	"aether/dataplane/model"
)

// Times of the last good state.
const (
	// saveSoon is how long after a change it is written, where it was not lately: what
	// follows a change at once is in it, too.
	saveSoon = time.Second
	// saveAgain is when it is written though nothing changed: until when it was true is in it.
	saveAgain = 10 * time.Minute
)

// lastGoodStatus is what became of the last good state on disk.
type lastGoodStatus struct {
	at      time.Time // of the state that the file has; zero: none of this process
	bytes   int64
	found   time.Time // of the state that the process found; zero: none
	err     string    // why it was not written the last time
	loadErr string    // why what was there was not taken; until the first one is written
}

// problem is what of it is to be mended.
func (s *lastGoodStatus) problem(f *lastgood.File) model.Problem {
	switch {
	case s.err != "":
		return model.Problem{Object: "last good state", Where: f.Path(), Reason: s.err}
	case s.loadErr != "":
		return model.Problem{Object: "last good state", Where: f.Path(), Reason: s.loadErr}
	}
	return model.Problem{}
}

// restore gives the sources what they said before the start; some: there was something.
func (l *Loop) restore() (some bool) {
	if l.cfg.LastGood == nil {
		return false
	}
	st, size, err := l.cfg.LastGood.Load(l.cfg.Node, l.cfg.Domain, l.cfg.TrustDomain)
	switch {
	case errors.Is(err, lastgood.ErrNone):
		return false
	case err != nil:
		l.log.Warn("no last good state", "file", l.cfg.LastGood.Path(), "err", err)
		l.mu.Lock()
		l.lastGood.loadErr = err.Error()
		l.mu.Unlock()
		return false
	}
	l.stateMu.Lock()
	defer l.stateMu.Unlock()
	now := time.Now()
	var oldest time.Time
	for i := range st.Sources {
		k := slices.IndexFunc(l.sources, func(s *Source) bool { return s.name == st.Sources[i].Name && !s.opts.Local })
		if k < 0 {
			continue // a source that is no more
		}
		s, of := l.sources[k], &st.Sources[i]
		b := input.Batch{Tables: input.Split(&of.Mesh), Settings: of.Settings, Locality: of.Locality}
		b.Namespaces = of.Namespaces
		pods := b.Workloads
		b.Workloads = nil
		s.merge(&b, true, &l.restoredChange)
		// A clock that was set back meanwhile makes nothing true for longer than until now.
		at := of.At
		if at.After(now) {
			at = now
		}
		s.restored, s.freshAt = true, at
		s.restoredOnly.settings, s.restoredOnly.locality = b.Settings, b.Locality
		s.restoredState = b
		s.restoredState.Workloads = pods
		s.restoredState.Problems = make(map[string][]model.Problem, len(of.Stayed))
		for _, x := range of.Stayed {
			s.restoredState.Problems[x.Object] = []model.Problem{{Object: x.Object, Since: x.Since}}
		}
		if oldest.IsZero() || at.Before(oldest) {
			oldest = at
		}
		l.log.Info("restored what a source last said", "source", s.name, "of", of.At, "services", len(s.tables.Endpoints), "endpoints", len(of.Mesh.Endpoints))
	}
	for _, k := range st.Kept { // what went before the start is kept for the rest of its time
		l.retained[k.Service] = retained{k.Ports, now.Add(max(min(k.Left, retention), 0))}
		l.restoredChange.keys.Retained.Note(k.Service)
	}
	l.mu.Lock()
	l.lastGood.found, l.lastGood.bytes, l.restored = oldest, size, !oldest.IsZero()
	l.mu.Unlock()
	return !oldest.IsZero()
}

// capture is what is to be kept; nil: there is nothing yet. It shares what does not change.
func (l *Loop) capture(now time.Time) *lastgood.State {
	l.stateMu.Lock()
	defer l.stateMu.Unlock()
	if !l.complete {
		return nil
	}
	st := &lastgood.State{Node: l.cfg.Node, Domain: l.cfg.Domain, TrustDomain: l.cfg.TrustDomain}
	for _, s := range l.sources {
		if s.opts.Local {
			continue
		}
		of := lastgood.Source{Name: s.name, At: s.freshUntil(now), Settings: s.settings, Locality: s.locality, Namespaces: maps.Clone(s.tables.Namespaces)}
		s.tables.Join(&of.Mesh)
		problems := s.tables.Problems
		if !s.whole {
			problems = s.restoredState.Problems // it has not spoken since the start
		}
		for _, list := range problems {
			for _, p := range list {
				if !p.Since.IsZero() {
					of.Stayed = append(of.Stayed, lastgood.Stayed{Object: p.Object, Since: p.Since})
				}
			}
		}
		st.Sources = append(st.Sources, of)
	}
	for n, r := range l.retained {
		st.Kept = append(st.Kept, lastgood.Kept{Service: n, Ports: r.ports, Left: r.until.Sub(now)})
	}
	return st
}

// runSaver writes the last good state after changes until ctx ends, and then once more if there are any.
func (l *Loop) runSaver(ctx context.Context) {
	again := time.NewTimer(saveAgain)
	defer again.Stop()
	var last time.Time
	for {
		l.mu.Lock()
		dirty, changed := l.dirty, l.changed
		l.mu.Unlock()
		var write <-chan time.Time
		var timer *time.Timer
		if !dirty.IsZero() {
			at := dirty.Add(saveSoon)
			if next := last.Add(saveEvery); next.After(at) {
				at = next
			}
			timer = time.NewTimer(time.Until(at))
			write = timer.C
			changed = nil // it is written anyhow
		}
		// The end; a first change; the time to write changes, or that nothing changed.
		ending := false
		select {
		case <-ctx.Done():
			ending = true
			l.mu.Lock()
			dirty = l.dirty
			l.mu.Unlock()
		case <-changed:
		case <-write:
			write = nil
		case <-again.C:
			dirty = time.Now()
		}
		if timer != nil {
			timer.Stop()
		}
		if ending && dirty.IsZero() && l.hasRetained() {
			dirty = time.Now()
		}
		switch {
		case ending && dirty.IsZero():
			return
		case dirty.IsZero(), !ending && write != nil:
			continue
		}
		last = time.Now()
		l.save(last)
		again.Reset(saveAgain)
		if ending {
			return
		}
	}
}

// Save writes the last good state now, if what is in force is newer: for a process that is
// about to follow this one, and begins with it. What cannot be written is tried again.
func (l *Loop) Save() {
	if l.cfg.LastGood == nil {
		return
	}
	l.mu.Lock()
	dirty := !l.dirty.IsZero()
	l.mu.Unlock()
	if dirty || l.hasRetained() {
		l.save(time.Now())
	}
}

// hasRetained reports whether services are kept against their removal: for how much longer is
// in the last good state, and is another time whenever it is written.
func (l *Loop) hasRetained() bool {
	l.stateMu.Lock()
	defer l.stateMu.Unlock()
	return len(l.retained) > 0
}

// save writes the last good state. What could not be written is tried again after a while.
func (l *Loop) save(now time.Time) {
	l.saveMu.Lock()
	defer l.saveMu.Unlock()
	if l.savesHeld {
		return
	}
	l.mu.Lock()
	since := l.dirty
	l.dirty = time.Time{}
	l.mu.Unlock()
	st := l.capture(now)
	if st == nil {
		return
	}
	size, err := l.cfg.LastGood.Save(st)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.Counters.SaveErrors.Inc()
		if l.lastGood.err != err.Error() {
			l.log.Warn("not in force", "object", "last good state", "where", l.cfg.LastGood.Path(), "reason", err)
		}
		l.lastGood.err = err.Error()
		if l.dirty.IsZero() {
			l.dirty = since
			if since.IsZero() {
				l.dirty = now
			}
		}
		return
	}
	l.Counters.Saves.Inc()
	l.lastGood.at, l.lastGood.bytes, l.lastGood.err, l.lastGood.loadErr = now, size, "", ""
}

// HoldSaves says whether the last good state's file is another process's, which follows this
// one: while it is nothing is written. It returns once that is so.
func (l *Loop) HoldSaves(held bool) {
	l.saveMu.Lock()
	defer l.saveMu.Unlock()
	l.savesHeld = held
}

// freshUntil is until when what the source says is known to be true; zero: it has said nothing.
func (s *Source) freshUntil(now time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.restored:
		return s.freshAt
	case !s.whole:
		return time.Time{}
	case s.status == (input.Status{}) || s.status.Connected: // one that never reports has nothing that it could lose
		return now
	}
	return s.status.Since
}

// Report is what the loop tells of itself. Of many problems some are left out.
func (l *Loop) Report() input.Report {
	now := time.Now()
	var r input.Report
	l.stateMu.Lock()
	for _, s := range l.sources {
		of := input.SourceReport{
			Name: s.name, Synced: s.whole, Restored: s.restored,
			Counts: input.Counts{
				Services: len(s.tables.Endpoints), Objects: len(s.tables.Services), Routes: len(s.tables.Routes), Filters: len(s.tables.Filters),
				Catalog: len(s.tables.Catalog), Workloads: len(s.tables.Workloads), Problems: len(s.tables.Problems),
			},
		}
		for _, rows := range s.tables.Endpoints {
			of.Counts.Endpoints += len(rows)
		}
		if at := s.freshUntil(now); !at.IsZero() && at.Before(now) && (r.StaleSince == nil || at.Before(*r.StaleSince)) {
			r.StaleSince = &at
		}
		s.mu.Lock()
		of.Connected, of.Err, of.Version, of.Since, of.Changed = s.status.Connected, s.status.Err, s.status.Version, s.status.Since, s.lastUpdate
		s.mu.Unlock()
		if !of.Changed.IsZero() {
			of.SilentMS = now.Sub(of.Changed).Milliseconds()
		}
		r.Sources = append(r.Sources, of)
	}
	l.stateMu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	r.Seq, r.At, r.Synced = l.seq, l.at, l.synced
	r.Problems = l.problemsLocked()
	r.ProblemsTotal = len(r.Problems)
	r.Problems = r.Problems[:min(len(r.Problems), maxReported)]
	if f := l.cfg.LastGood; f != nil {
		g := &input.LastGoodReport{Path: f.Path(), Written: l.lastGood.at, Bytes: l.lastGood.bytes, Restored: l.restored, Err: l.lastGood.problem(f).Reason}
		if g.Written.IsZero() {
			g.Written = l.lastGood.found
		}
		if !g.Written.IsZero() {
			g.AgeMS = now.Sub(g.Written).Milliseconds()
		}
		r.LastGood = g
	}
	return r
}
