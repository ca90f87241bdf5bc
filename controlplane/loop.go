// Package controlplane carries what several sources say of the mesh to the data plane:
// sources → one model → compile → apply.
//
//   - One goroutine owns the model. Sources only leave what they say, by key, and what
//     is not taken yet is bounded by the number of keys.
//   - Nothing is published before every source has given a whole state, or has one from
//     before the start (package lastgood).
//   - A change costs what it changes: the compiled state is an index, the whole mesh
//     is made on demand only.
//   - A bad object is a problem, listed by Report; it holds up nothing else.
//   - Every published state has a sequence number that one can wait for.
//
// It makes no rule about traffic and holds no socket.
package controlplane

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"aether/controlplane/compile"
	"aether/controlplane/endpointmeta"
	"aether/controlplane/input"
	"aether/controlplane/lastgood"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
	"aether/dataplane/telemetry"
)

// Times of a Loop (decision 023).
const (
	// quietRows without a further change, or holdRows since the first one, and endpoints,
	// names and problems are published.
	quietRows = 2 * time.Millisecond
	holdRows  = 10 * time.Millisecond
	// quietObjects and holdObjects are those of everything else: Services, routes, filters, pods.
	quietObjects = 20 * time.Millisecond
	holdObjects  = 250 * time.Millisecond
	// retention is how long a service is kept against its removal (contract 4.12).
	retention = 90 * time.Second
	// saveEvery is how often the last good state is written, at most.
	saveEvery = 30 * time.Second
)

// Bounds of what is told of problems.
const (
	maxLogged   = 100  // problems logged at a publish; how many more there are is said
	maxReported = 1000 // problems in a Report; ProblemsTotal counts all
)

// Target is what states are applied to.
type Target interface {
	// Apply is called by one goroutine at a time. workloads is the same slice as long as they are the same.
	Apply(s *snapshot.Snapshot, workloads []model.Workload)
}

// Config of a Loop.
type Config struct {
	Target Target // required
	// Node, Domain and TrustDomain are whose view of which mesh it is.
	Node, Domain, TrustDomain string
	// Settings hold where no source says any.
	Settings input.Settings
	// UDSDir holds the directories of pods' Unix sockets, an absolute path (contract 1.7);
	// empty: nobody is delivered to by one.
	UDSDir string
	// OnSettings is told of settings before the state that goes with them is applied, first
	// when Run begins: of the mesh's, and of those of the pods of namespaces that have others
	// (contract 10.9). It is called by the loop's goroutine and returns soon. nil: nobody is.
	OnSettings func(of input.Settings, namespaces map[string]input.Settings)
	// OnNeeds is told, by the loop's goroutine, which services this node needs whoever asks
	// (contract 9.9): those of its own pods, those that they declare, and those with an
	// address for which nothing can wait (decision 033); ascending. It returns soon. nil:
	// nobody is.
	OnNeeds func([]model.ServiceName)
	// LastGood is where the last good state is kept; nil: it is not.
	LastGood *lastgood.File
	Log      *slog.Logger // nil: discard
}

// Counters of a Loop, for metrics.
type Counters struct {
	Builds      telemetry.Counter // states published
	BuildNanos  telemetry.Counter // time that compiling and applying them took
	Batches     telemetry.Counter // what sources said
	Coalesced   telemetry.Counter // of it, what came into force together with more
	Problems    telemetry.Counter // problems that appeared
	Saves       telemetry.Counter // of the last good state
	SaveErrors  telemetry.Counter
	Disconnects telemetry.Counter // times a source lost what it follows
	// UDSRefused are, by reason, the pods that asked for delivery to a Unix socket and did
	// not get it (contract 1.7): each once, until its reason is another one.
	UDSRefused [endpointmeta.UDSReasons]telemetry.Counter
}

// Loop is the way from the sources to one target. Make it with New, give it its sources,
// then Run it. All methods are safe for concurrent use.
type Loop struct {
	Counters Counters

	cfg          Config
	log          *slog.Logger
	sources      []*Source     // by precedence; fixed once Run begins
	wake         chan struct{} // of one: a source has said something
	lastGoodRead chan struct{} // closed once it is known what was kept before the start

	// What the loop's goroutine owns; others hold own for reading.
	stateMu        sync.Mutex
	index          *compile.Index
	merged         merged
	mesh           input.Tables // what of all sources is in force, without Workloads and Problems
	retained       map[model.ServiceName]retained
	workloads      []model.Workload
	settings       input.Settings
	locality       input.Locality
	needs          []model.ServiceName
	complete       bool                              // every source has given a whole state, now or before the start
	restoredChange change                            // of what was restored
	lastTook       time.Duration                     // that compiling took
	lastEnd        time.Time                         // when it was done
	compiled       []model.Problem                   // of the last Update
	refused        map[string]endpointmeta.UDSReason // by container, as counted

	// All problems, and which of compiled's lists is in it.
	all         []model.Problem
	allFirst    *model.Problem
	allCompiled int
	since       map[problemKey]time.Time // when each of all appeared, however its place moves in its file

	saveMu    sync.Mutex // of the last good state's file; before own and mu
	savesHeld bool       // nothing is written to it; guarded by saving

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced when anything of the following changes
	seq      uint64
	at       time.Time
	synced   bool
	problems []model.Problem
	lastGood lastGoodStatus
	dirty    time.Time // since when the last good state is older than the one in force; zero: it is not
	restored bool      // parts of the last good state were taken
}

// problemKey is what makes two problems one that goes on.
type problemKey struct{ object, reason string }

// New makes a loop that has no source yet.
func New(cfg Config) *Loop {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	l := &Loop{
		cfg: cfg, log: cfg.Log, wake: make(chan struct{}, 1), lastGoodRead: make(chan struct{}), changed: make(chan struct{}),
		index:    compile.NewIndex(&model.Mesh{Domain: cfg.Domain, TrustDomain: cfg.TrustDomain, Node: cfg.Node, Semantics: cfg.Settings.Semantics, SameNode: cfg.Settings.SameNode}),
		retained: map[model.ServiceName]retained{}, settings: cfg.Settings, merged: newMerged(),
	}
	l.index.SetUDSDir(cfg.UDSDir)
	return l
}

// Run publishes what the sources say until ctx ends, and keeps the last good state; the
// error is always nil. A loop without a source publishes nothing.
func (l *Loop) Run(ctx context.Context) error {
	restored := l.restore()
	close(l.lastGoodRead)
	if l.cfg.OnSettings != nil {
		l.cfg.OnSettings(l.settings, nil)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	if l.cfg.LastGood != nil {
		saving, stop := context.WithCancel(context.WithoutCancel(ctx))
		defer stop() // then one last time: nothing is published any more
		wg.Go(func() { l.runSaver(saving) })
	}
	hold, kept := stopped(), stopped()
	defer hold.Stop()
	defer kept.Stop()
	if restored {
		if next, ok := l.step(time.Now()); ok {
			kept.Reset(time.Until(next))
		}
	}
	for {
		if due, ok := l.due(time.Now()); ok {
			hold.Reset(time.Until(due))
		} else {
			hold.Stop()
		}
		// A source said something; what was said is held off no longer; a service was
		// kept long enough; or the end.
		select {
		case <-ctx.Done():
			return nil
		case <-l.wake:
			continue
		case <-hold.C:
		case <-kept.C:
		}
		if next, ok := l.step(time.Now()); ok {
			kept.Reset(time.Until(next))
		}
	}
}

// stopped is a timer that does not run.
func stopped() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// due is when what sources have said is to be taken; ok: they have said something.
func (l *Loop) due(now time.Time) (due time.Time, ok bool) {
	for _, s := range l.sources {
		if at, some := s.due(); some && (!ok || at.Before(due)) {
			due, ok = at, true
		}
	}
	// Compiling takes half of the time at most.
	if rest := l.lastEnd.Add(min(l.lastTook, holdObjects)); ok && due.Before(rest) {
		due = rest
	}
	if due.Before(now) {
		due = now
	}
	return due, ok
}

// step takes in what the sources have said, and publishes what is then the mesh. next is
// when the next service has been kept long enough.
func (l *Loop) step(now time.Time) (next time.Time, ok bool) {
	l.stateMu.Lock()
	c := l.drainSources()
	l.dropExpired(now, &c)
	served := l.servedPorts(&c)
	l.reindex(&c)
	needs, others := l.needs, false
	if l.cfg.OnNeeds != nil && len(c.keys.Workloads)+len(c.keys.Services) > 0 {
		needs = l.neededServices()
		others = !slices.Equal(needs, l.needs)
		l.needs = needs
	}
	settings, first := l.settings, !l.complete && l.known()
	tell := l.cfg.OnSettings != nil && (c.settings || len(c.keys.Namespaces) > 0)
	var namespaces map[string]input.Settings
	if tell {
		namespaces = l.namespaceSettings()
	}
	l.complete = l.complete || first
	var snap *snapshot.Snapshot
	if l.complete && (first || c.any()) {
		snap, l.compiled = l.index.Update()
		if l.retainRemoved(now, &c, served) {
			snap, l.compiled = l.index.Update()
		}
	}
	if snap != nil {
		l.countRefused(l.index.UDSRefused())
	}
	var problems []model.Problem
	if l.complete {
		problems = l.allProblems(now, &c)
	}
	workloads := l.workloads
	next, ok = l.nextExpiry()
	l.lastEnd = time.Now()
	l.lastTook = l.lastEnd.Sub(now)
	l.stateMu.Unlock()

	if others {
		l.cfg.OnNeeds(needs)
	}
	if tell {
		l.cfg.OnSettings(settings, namespaces)
	}
	if snap == nil {
		l.publishState(c.batches, time.Time{}, problems)
		return next, ok
	}
	seq := l.State().Seq + 1
	l.cfg.Target.Apply(snap.WithVersion(seq), workloads)
	end := time.Now()
	l.Counters.Builds.Inc()
	l.Counters.BuildNanos.Add(uint64(max(end.Sub(now), 0)))
	l.Counters.Coalesced.Add(uint64(max(c.batches-1, 0)))
	l.publishState(c.batches, end, problems)
	level := slog.LevelDebug
	if first || c.objects {
		level = slog.LevelInfo
	}
	l.log.Log(context.Background(), level, "published", "seq", seq, "services", len(snap.Services()), "backends", len(snap.Backends()),
		"workloads", len(workloads), "problems", len(problems), "took", end.Sub(now))
	return next, ok
}

// countRefused counts the pods that are refused their Unix socket and were not, or for another reason.
func (l *Loop) countRefused(now map[string]endpointmeta.UDSReason) {
	for container, why := range now {
		if l.refused[container] != why {
			l.Counters.UDSRefused[why].Inc()
		}
	}
	l.refused = now
}

// known reports whether of every source there is a whole state.
func (l *Loop) known() bool {
	return len(l.sources) > 0 && !slices.ContainsFunc(l.sources, func(s *Source) bool { return !s.whole && !s.restored })
}

// publishState makes what was done known: when a state was published, which problems there are,
// and that what sources had said is in force.
func (l *Loop) publishState(batches int, published time.Time, problems []model.Problem) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !published.IsZero() {
		l.seq++
		l.at = published
		if l.dirty.IsZero() {
			l.dirty = published
		}
	}
	news := problems != nil && (len(problems) != len(l.problems) || len(problems) > 0 && &problems[0] != &l.problems[0])
	if news {
		l.logNew(problems)
		l.problems = problems
		if l.dirty.IsZero() {
			l.dirty = time.Now() // since when something stays as it was is in the last good state
		}
	}
	synced, heard := true, false
	for _, s := range l.sources {
		s.inForce.Store(s.drained)
		is := s.whole || s.restored
		heard = heard || is != s.hasState
		s.hasState = is
		synced = synced && s.whole
	}
	if batches == 0 && published.IsZero() && !news && !heard && synced == l.synced {
		return
	}
	l.synced = synced
	l.notifyWaitersLocked()
}

func (l *Loop) notifyWaitersLocked() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// logNew logs the problems that were not there before: each once a cause.
func (l *Loop) logNew(problems []model.Problem) {
	known := make(map[model.Problem]struct{}, len(l.problems))
	for _, p := range l.problems {
		known[p] = struct{}{}
	}
	logged := 0
	for _, p := range problems {
		if _, old := known[p]; old {
			continue
		}
		l.Counters.Problems.Inc()
		if logged++; logged <= maxLogged {
			l.log.Warn("not in force", "object", p.Object, "where", p.Where, "reason", p.Reason)
		}
	}
	if logged > maxLogged {
		l.log.Warn("more is not in force; the admin's /status lists it", "more", logged-maxLogged)
	}
}

// State is what was published last.
type State struct {
	Seq      uint64 // 0: nothing yet
	At       time.Time
	Synced   bool            // every source has said its whole state since the start
	Problems []model.Problem // read only
}

// State returns what was published last.
func (l *Loop) State() State {
	l.mu.Lock()
	defer l.mu.Unlock()
	return State{Seq: l.seq, At: l.at, Synced: l.synced, Problems: l.problemsLocked()}
}

// problemsLocked are all problems, those of the last good state among them.
func (l *Loop) problemsLocked() []model.Problem {
	if p := l.lastGood.problem(l.cfg.LastGood); p.Reason != "" {
		return append([]model.Problem{p}, l.problems...)
	}
	return l.problems
}

// Wait returns once a state with at least that sequence number is in force. The error is ctx's.
func (l *Loop) Wait(ctx context.Context, seq uint64) error {
	return l.wait(ctx, func() bool { return l.seq >= seq })
}

// WaitSynced returns once every source has said its whole state since the start, and that
// is in force. The error is ctx's.
func (l *Loop) WaitSynced(ctx context.Context) error {
	return l.wait(ctx, func() bool { return l.synced && l.seq > 0 })
}

// wait returns once is, which is called with mu held, says so.
func (l *Loop) wait(ctx context.Context, is func() bool) error {
	for {
		l.mu.Lock()
		done, changed := is(), l.changed
		l.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
