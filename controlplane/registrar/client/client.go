// Package client is the node's end of the registrar (contract 9.7): it follows the
// rows of the services that this node needs, and says what it knows to an input.Sink.
//
//   - What the Sink hears never passes through an emptier state: a snapshot is
//     gathered aside and said as what differs once it is complete, and what was
//     known stays while no registrar can be reached.
//   - What the node needs is what is declared and what is asked for (contract 9.9). A
//     change of it is a new stream, opened before the old one is let go.
//   - A row that is not valid gives nothing, is counted, and is named once.
//
// It keeps rows as the model has them, with what is the same in many of them once. It
// makes no rule about traffic and writes nothing to the registrar.
package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"

	"aether/controlplane/input"
	"aether/controlplane/registrar/target"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/dataplane/telemetry"
)

// Bounds and times.
const (
	leastBackoff = time.Second // before another registrar is tried (contract 9.7)
	mostBackoff  = 30 * time.Second
	livedWell    = 30 * time.Second // a stream that lived so long ends a row of failures

	connectTime = 5 * time.Second  // a connect, DNS included
	quietTime   = 15 * time.Second // for a stream to begin, and between two messages of a snapshot

	coalesceTime = 250 * time.Millisecond // between two changes of scope (contract 9.9)
	restTime     = 20 * time.Millisecond  // and where somebody waits for it
	idleTTL      = time.Hour              // what was asked for and is not used leaves the scope (contract 4.6)
	pruneEvery   = time.Minute            // how often that is looked for, and streams are joined

	maxAsked      = 4096           // names in scope because they were asked for; if more are in use, all are
	maxNamed      = 16384          // names that a stream is asked for; if more are needed, all are
	maxNamedBytes = 960 << 10      // of them, for a registrar takes a message of 1 MiB
	lately        = 2 * pruneEvery // what was asked for and not used since makes room for what is

	leastDelta  = 8       // names of a second stream that are left in it
	maxDelta    = 64      // names of a second stream; more are joined with the first one
	mostDelta   = 128     // and until they are
	maxMessage  = 4 << 20 // bytes of a message; the largest row that etcd takes has 1.5 MiB
	maxQueue    = 256     // messages of a stream that wait to be looked at; then it is not read from
	maxBatch    = 1024    // messages that are said to the Sink as one Batch
	maxProblems = 256     // rows that are listed as problems
	maxSpoken   = 4096    // bad rows that are remembered as spoken of
)

// Config of a Client.
type Config struct {
	// Targets are where registrars are, "host:port". Each address that a host has in
	// DNS is one; they serve alike, and after a failure it is the next one's turn. Required.
	Targets []string
	// Credentials of each connection; see TLS. nil: none, and no encryption: for a
	// registrar on the loopback.
	Credentials credentials.TransportCredentials

	Cluster string // this mesh's part, as in the rows that are asked for; required
	Node    string // this node's name; required
	// Instance tells this process from another one of the node's that watches at the
	// same time, as in a hand-over. Empty: made up.
	Instance    string
	TrustDomain string // of rows that have no identity of their own; required
	// Identities are the forms of those that rows may name beside their namespace's in
	// TrustDomain (registry.IdentityFault).
	Identities []string

	// Whole: rows of all services are kept. Else of those that are declared or asked for.
	Whole bool
	// InUse, once a minute and before the first stream, tells the services that traffic went
	// to lately, which keeps in scope what is not declared, or is so no more. It may take a
	// second. nil: Used tells.
	InUse func(context.Context) []model.ServiceName

	Sink input.Sink   // required
	Log  *slog.Logger // nil: discard

	// Dial makes a connection to a registrar; the Closer ends it. nil: gRPC over TCP.
	Dial func(ctx context.Context, addr string) (registrypb.RegistrarServiceClient, io.Closer, error)
	// Resolve gives the addresses of a host name. nil: DNS.
	Resolve func(ctx context.Context, host string) ([]string, error)
}

// Client follows registrars. Make it with New. All methods are safe for concurrent use.
type Client struct {
	cfg   Config
	log   *slog.Logger
	pings atomic.Bool // a registrar may be sent HTTP/2 pings

	// Counters, for Register.
	Reconnects telemetry.Counter                  // connections after the first
	Errors     telemetry.Counter                  // streams and connections that failed
	Events     telemetry.Counter                  // messages that were taken
	Malformed  [len(faults)]telemetry.Counter     // rows that are not valid, in the order of faults
	Unknown    telemetry.Counter                  // messages of a kind that this version does not know
	Misses     telemetry.Counter                  // names that were asked for and were not in scope (contract 4.6)
	Rejected   telemetry.Counter                  // and those that are not in the catalog (contract 9.9)
	Coalesced  telemetry.Counter                  // changes of scope that went with another one
	Rescoped   [len(rescopings)]telemetry.Counter // streams for a new scope, by Rescopings

	demand demand
	status atomic.Pointer[input.Status]
}

// faults are the kinds of invalid rows in the order of Malformed: those that package
// registry finds in a row, a row of a service whose name is none, and any other.
var faults = [...]registry.Fault{
	registry.BadAddress, registry.NoCluster, registry.NoPorts, registry.BadPort, registry.Unclassed, registry.Undeclared,
	registry.BadIdentity, registry.ManyPorts, registry.OwnPorts, registry.ForeignIdentity, badService, otherFault,
}

const (
	badService registry.Fault = "bad_service"
	otherFault registry.Fault = "other"
)

// rescopings are the ways in which a scope is changed, in the order of Rescoped.
var rescopings = [...]string{"whole", "added"}

const (
	rescopeWhole = iota
	rescopeAdded
)

// New makes a client; nothing is dialled before Run.
func New(cfg Config) (*Client, error) {
	switch {
	case len(cfg.Targets) == 0:
		return nil, errors.New("registrar client: no registrar is named")
	case cfg.Cluster == "" || cfg.Node == "" || cfg.TrustDomain == "" || cfg.Sink == nil:
		return nil, errors.New("registrar client: cluster, node, trust domain and sink are required")
	}
	for _, t := range cfg.Targets {
		if err := target.Check(t); err != nil {
			return nil, err
		}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Instance == "" {
		cfg.Instance = strconv.FormatUint(rand.Uint64(), 36)
	}
	c := &Client{cfg: cfg, log: cfg.Log}
	c.pings.Store(true)
	if cfg.Dial == nil {
		c.cfg.Dial = c.dial
	}
	if cfg.Resolve == nil {
		c.cfg.Resolve = target.DNS
	}
	c.demand.init(c)
	return c, nil
}

// Status is how the client fares, as it was last said to the Sink.
func (c *Client) Status() input.Status {
	if s := c.status.Load(); s != nil {
		return *s
	}
	return input.Status{}
}

// Run follows registrars until ctx ends, and returns nil then. It is to be called once.
func (c *Client) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() { c.prune(ctx) })
	f := &follower{c: c, cache: newKnown(c)}
	failures := 0
	for first := true; ; first = false {
		began := time.Now()
		addr, err := f.next(ctx)
		if err == nil {
			if !first {
				c.Reconnects.Inc()
			}
			err = f.follow(ctx, addr)
		}
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, errAskAgain) { // it is there, and has nothing against us
			continue
		}
		c.Errors.Inc()
		if tooManyPings(err) && c.pings.Swap(false) {
			c.log.Warn("the registrar does not let itself be asked whether it lives: TCP alone tells of a connection that is dead", "addr", addr)
		}
		if f.synced && time.Since(began) >= livedWell {
			failures = 0
		}
		wait := backoff(failures)
		failures++
		f.report(input.Status{Err: explain(addr, err), Version: f.version})
		c.log.Warn("registrar", "addr", addr, "err", err, "again", wait.Round(time.Millisecond))
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-t.C:
		}
	}
}

// backoff is how long is waited after so many failures before: any time between a
// second and a bound that doubles, so that nodes that lost one registrar do not
// all come to the next at once.
func backoff(failures int) time.Duration {
	most := min(2*leastBackoff<<min(failures, 8), mostBackoff)
	return leastBackoff + rand.N(most-leastBackoff)
}

// follower is Run's: one registrar after the other.
type follower struct {
	c      *Client
	addrs  []string // of registrars; found anew when all have had their turn
	turn   int
	last   string // whose turn it was
	cache  *cache
	synced bool // of the connection: a snapshot was complete

	version   string // of what is known, in the registrar's words
	scope     scope  // of it
	resumable bool   // it is all that the registrar gave for that scope and version

	// Of the connection.
	conn         registrypb.RegistrarServiceClient
	ctx          context.Context
	wg           *sync.WaitGroup
	msgs         chan message
	seq          int    // of streams, over all connections
	full         *watch // the first stream; nil: not complete yet
	extra        *watch // a second one, for what came into scope since; nil: none
	pendingFull  *watch // a first one that is not complete yet; nil: none
	pendingExtra *watch // a second one that is not complete yet; nil: none
	again        bool   // the scope changed meanwhile
	tidy         bool   // two streams are to be one, and what left the scope is to go

	changed time.Time     // when the scope was last changed
	ready   time.Time     // when what came of it was here
	took    time.Duration // and how long that was after it
	later   *time.Timer   // of the next change
	laterOn bool
	laterAt time.Time
	early   bool // rows were taken out of a stream that is not complete
	quiet   *time.Timer
}

// errAskAgain: the registrar has changed and did not say what there is now; it is asked for all.
var errAskAgain = errors.New("the registrar has another version and sent no snapshot")

// errQuiet: a stream did not begin.
var errQuiet = fmt.Errorf("it takes the question and says nothing for %s", quietTime)

// message is what a stream gave, or how it ended.
type message struct {
	w   *watch
	ev  *registrypb.WatchEndpointsResponse
	err error
}

// watch is a stream.
type watch struct {
	scope    scope
	delta    bool
	sent     string // last_version
	version  string
	since    string // the version that what was sent builds upon; empty: none
	cancel   context.CancelFunc
	complete bool
	ended    bool
	behind   *watch // of a second stream: the first, whose word counts of what both cover
	shown    bool   // rows of what nobody else covers were taken before it was complete

	building *snapshotBuilder // a snapshot, until it is complete; nil: none is coming
	names    names            // the catalog, likewise
}

// next is the registrar whose turn it is.
func (f *follower) next(ctx context.Context) (string, error) {
	if f.turn >= len(f.addrs) {
		ctx, cancel := context.WithTimeout(ctx, connectTime)
		defer cancel()
		addrs, err := target.Resolve(ctx, f.c.cfg.Targets, f.c.cfg.Resolve)
		if err != nil {
			return "", err
		}
		if i := slices.Index(addrs, f.last); i >= 0 { // it goes behind the others
			addrs = append(slices.Concat(addrs[i+1:], addrs[:i]), f.last)
		}
		f.addrs, f.turn = addrs, 0
	}
	f.last = f.addrs[f.turn]
	f.turn++
	return f.last, nil
}

// follow is one connection, until it fails.
func (f *follower) follow(ctx context.Context, addr string) error {
	c := f.c
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	conn, end, err := c.cfg.Dial(ctx, addr)
	if err != nil {
		return err
	}
	defer end.Close()
	f.conn, f.ctx, f.wg, f.msgs = conn, ctx, &wg, make(chan message, maxQueue)
	f.full, f.extra, f.pendingFull, f.pendingExtra, f.again, f.tidy, f.synced = nil, nil, nil, nil, false, false, false
	f.later, f.quiet = time.NewTimer(time.Hour), time.NewTimer(quietTime)
	defer f.later.Stop()
	defer f.quiet.Stop()
	f.later.Stop()
	f.laterOn = false
	last := ""
	if f.version == "" && c.cfg.InUse != nil && !c.cfg.Whole { // rows of before the start may be in use
		c.Used(c.cfg.InUse(ctx)...)
	}
	want := c.demand.wanted()
	f.cache.wide(c.demand.wide)
	// Else rows that are missing would be taken for none; a version that only counts may be
	// another registrar's, or another life's, for something else.
	if f.resumable && want.equal(f.scope) && registry.NamesContents(f.version) {
		last = f.version
	}
	f.changed, f.took, f.early = time.Now(), 0, false
	f.open(want, false, last)
	for {
		// What may happen: the end; messages; somebody asks for a name or declares
		// some; the time for that has come; a stream does not begin.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case m := <-f.msgs:
			err := f.take(m)
			for n := 1; err == nil && n < maxBatch && !f.early; n++ {
				select {
				case m := <-f.msgs:
					err = f.take(m)
					continue
				default:
				}
				break
			}
			f.early = false
			f.publish()
			if err != nil {
				return err
			}
		case why := <-c.demand.news:
			f.tidy = f.tidy || why&tidyUp != 0
			f.rescopeAt(f.due(why&somebodyWaits != 0))
			f.publish()
		case <-f.later.C:
			f.laterOn = false
			f.rescope()
			f.publish()
		case <-f.quiet.C:
			if f.pendingFull != nil || f.pendingExtra != nil {
				return errQuiet
			}
		}
	}
}

// due is when the scope may change again: coalesceTime after it last did (contract 9.9). Whom
// somebody waits for is not held off, but for what keeps two thirds of the time from going
// into it where each change takes long.
func (f *follower) due(waits bool) time.Time {
	due := f.changed.Add(coalesceTime)
	if !waits {
		return due
	}
	soon := f.changed.Add(restTime)
	if rest := f.ready.Add(f.took / 2); rest.After(soon) {
		soon = rest
	}
	if soon.Before(due) {
		return soon
	}
	return due
}

// rescopeAt changes the scope at a time, or together with what was to change it before that.
func (f *follower) rescopeAt(due time.Time) {
	if f.laterOn {
		f.c.Coalesced.Inc()
		if !due.Before(f.laterAt) {
			return
		}
	}
	if wait := time.Until(due); wait > 0 {
		f.laterOn, f.laterAt = true, due
		f.later.Reset(wait)
		return
	}
	f.laterOn = false
	f.later.Stop()
	f.rescope()
}

// rescope makes the streams follow what is wanted: what is missing comes over a second stream
// at once; a first one for all of it is opened beside that where the second has become large,
// or may be joined with it.
func (f *follower) rescope() {
	if f.full == nil || f.pendingExtra != nil {
		f.again = true
		return
	}
	f.again = false
	want := f.c.demand.wanted()
	f.cache.wide(f.c.demand.wide)
	missing := names{}
	if !want.all {
		for n := range want.names {
			if !f.covers(n) {
				missing.add(n)
			}
		}
	}
	size := len(missing) + f.extra.size()
	whole := f.tidy || size > f.fewest() || want.all
	if whole && f.pendingFull == nil {
		f.tidy = false
		if f.extra != nil || len(missing) > 0 || !want.equal(f.full.scope) {
			f.c.Rescoped[rescopeWhole].Inc()
			f.changed = time.Now()
			f.open(want, false, "")
		}
	}
	switch {
	case len(missing) == 0:
	case size > mostDelta: // they come with the first one
		for n := range missing {
			f.again = f.again || !f.pendingFull.covers(n)
		}
	default:
		if f.extra != nil {
			for n := range f.extra.scope.names {
				missing.add(n)
			}
		}
		f.c.Rescoped[rescopeAdded].Inc()
		f.changed = time.Now()
		f.open(scope{names: missing}, true, "")
	}
}

// covers reports whether the rows of a name come over a complete stream.
func (f *follower) covers(n model.ServiceName) bool {
	return f.full.covers(n) || f.extra.covers(n)
}

// fewest is how many names of a second stream are joined with the first one: the root of twice
// the names of that. The rows of a second stream are sent again with each name that comes to it,
// and those of the first with each joining; of both together that is least.
func (f *follower) fewest() int {
	return min(max(int(math.Sqrt(float64(2*len(f.full.scope.names)))), leastDelta), maxDelta)
}

// elsewhere reports whether the rows of a name come over a second stream, and not over the first.
func (f *follower) elsewhere(n model.ServiceName) bool {
	return !f.full.covers(n) && (f.extra.covers(n) || f.pendingExtra.covers(n))
}

func (w *watch) covers(n model.ServiceName) bool { return w != nil && w.scope.has(n) }

// authoritative reports whether what the stream says of a name counts.
func (w *watch) authoritative(n model.ServiceName) bool { return w.covers(n) && !w.behind.covers(n) }

// redundant reports whether o covers all that is wanted of what w, which may be nil, covers.
func (w *watch) redundant(o *watch, want scope) bool {
	if w != nil {
		for n := range w.scope.names {
			if want.has(n) && !o.covers(n) {
				return false
			}
		}
	}
	return true
}

// subsetOf reports whether o covers all that w, which may be nil, covers.
func (w *watch) subsetOf(o *watch) bool {
	switch {
	case o == nil:
		return false
	case w == nil || o.scope.all:
		return true
	case w.scope.all:
		return false
	}
	for n := range w.scope.names {
		if !o.covers(n) {
			return false
		}
	}
	return true
}

func (w *watch) size() int {
	if w == nil {
		return 0
	}
	return len(w.scope.names)
}

// open opens a stream beside those that there are.
func (f *follower) open(s scope, delta bool, last string) {
	f.seq++
	w := &watch{scope: s, delta: delta, sent: last, names: names{}}
	if last == "" {
		w.building = newGathered()
	}
	q := &registrypb.WatchEndpointsRequest{
		ClusterName: f.c.cfg.Cluster, NodeName: f.c.cfg.Node, LastVersion: last, Changes: last != "",
		// A watch takes the place of another one of the same instance: each is one of its own.
		Instance: f.c.cfg.Instance + "." + strconv.Itoa(f.seq),
	}
	if !s.all {
		q.Filter = &registrypb.ServiceFilter{Services: make([]string, 0, len(s.names))}
		for n := range s.names {
			q.Filter.Services = append(q.Filter.Services, n.String())
		}
		slices.Sort(q.Filter.Services)
	}
	ctx, cancel := context.WithCancel(f.ctx)
	w.cancel = cancel
	if w.delta {
		f.pendingExtra = w
	} else {
		f.pendingFull = w
	}
	f.quiet.Reset(quietTime)
	conn, msgs := f.conn, f.msgs
	f.wg.Go(func() {
		defer cancel()
		put := func(m message) bool {
			select {
			case msgs <- m:
				return m.err == nil
			case <-ctx.Done():
				return false
			}
		}
		stream, err := conn.WatchEndpoints(ctx, q)
		if err != nil {
			put(message{w: w, err: err})
			return
		}
		for {
			ev, err := stream.Recv()
			if !put(message{w: w, ev: ev, err: err}) {
				return
			}
		}
	})
}

// take takes a message. An error ends the connection.
func (f *follower) take(m message) error {
	w := m.w
	coming := w == f.pendingFull || w == f.pendingExtra
	if w != f.full && w != f.extra && !coming || w.ended {
		return nil // it was let go
	}
	if m.err != nil {
		if !coming && w.subsetOf(f.pendingFull) { // what takes its place is on its way
			w.ended = true
			return nil
		}
		if dataLoss(m.err) {
			f.resumable = false
		}
		return fmt.Errorf("watch: %w", m.err)
	}
	f.c.Events.Inc()
	if coming {
		f.quiet.Reset(quietTime)
	}
	ev := m.ev
	if v := ev.GetVersion(); v != "" {
		w.version = v
	}
	switch ev.GetType() {
	case registrypb.WatchEndpointsResponse_EVENT_TYPE_FULL_SNAPSHOT:
		if w.building == nil {
			w.building, w.names = newGathered(), names{}
		}
		f.cache.put(w, ev)
	case registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_ADDED, registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_UPDATED:
		f.halfway(w)
		f.cache.put(w, ev)
	case registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_REMOVED:
		f.halfway(w)
		f.cache.remove(w, ev)
	case registrypb.WatchEndpointsResponse_EVENT_TYPE_SNAPSHOT_COMPLETE:
		w.since = ev.GetSince()
		if err := f.completed(w); err != nil {
			return err
		}
	case registrypb.WatchEndpointsResponse_EVENT_TYPE_SERVICE_ADDED:
		if coming && f.full != nil && w.building != nil && !w.shown { // all rows are here (contract 9.7), and only names are still to come
			w.shown, f.early, f.resumable = true, true, false
			f.cache.show(w, f.covers)
		}
		f.cache.named(w, ev.GetServiceName(), true)
	case registrypb.WatchEndpointsResponse_EVENT_TYPE_SERVICE_REMOVED:
		f.cache.named(w, ev.GetServiceName(), false)
	default:
		f.c.Unknown.Inc()
		f.cache.unknown(int32(ev.GetType()))
	}
	if w == f.full {
		f.version = w.version
	}
	return nil
}

// halfway: what has changed since the version that is known is put in place row by row, and
// until all of it is, that is no version to come back with.
func (f *follower) halfway(w *watch) {
	if w.building == nil && !w.complete {
		f.resumable = false
	}
}

// completed: what the stream gathered is what there is.
func (f *follower) completed(w *watch) error {
	if w.building == nil && w.sent != "" && !w.complete && w.version != "" && w.version != w.sent && w.since != w.sent {
		f.resumable = false
		return errAskAgain
	}
	first := !w.complete
	w.complete = true
	switch w {
	case f.pendingExtra:
		f.pendingExtra = nil
		f.ready = time.Now()
		f.took = f.ready.Sub(f.changed)
		f.extra.close()
		if f.extra, w.behind = w, f.full; w.redundant(f.full, f.c.demand.wanted()) { // the joining was faster
			w.close()
			f.extra = nil
			f.cache.leave(w, f.full)
		}
	case f.pendingFull:
		f.pendingFull = nil
		f.full.close()
		f.full = w
		if f.extra.redundant(w, f.c.demand.wanted()) {
			f.extra.close()
			f.extra = nil
		} else {
			f.extra.behind = w
		}
		f.scope, f.version, f.synced = w.scope, w.version, true
	}
	if f.pendingFull == nil && f.pendingExtra == nil {
		f.quiet.Stop()
	}
	if first {
		f.resumable = f.extra == nil && f.pendingExtra == nil
		f.c.demand.serving(f.full, f.extra)
	}
	if !w.ended {
		f.cache.complete(w, first, f.elsewhere)
	}
	if f.again { // somebody asked while there was no answer yet
		f.again = false
		f.rescopeAt(f.due(true))
	}
	return nil
}

// close lets a stream go. w may be nil.
func (w *watch) close() {
	if w != nil {
		w.ended = true
		w.cancel()
	}
}

// publish says to the Sink what changed.
func (f *follower) publish() {
	if f.full == nil {
		return
	}
	f.cache.say(f.covers)
	f.report(input.Status{Connected: true, Version: f.version})
}

// report says how it fares, if that has changed.
func (f *follower) report(s input.Status) {
	was := f.c.Status()
	if was.Connected == s.Connected && was.Err == s.Err && !was.Since.IsZero() {
		if was.Version == s.Version {
			return
		}
		s.Since = was.Since
	} else {
		s.Since = time.Now()
	}
	f.c.status.Store(&s)
	f.c.cfg.Sink.Report(s)
}
