// Package server is the registrar: it takes endpoints from nodes, keeps them in a
// registry.Store, and tells every watching node what changes (contract 9.7).
//
//   - What a node registers is in the snapshot, and on its way to all watchers, before
//     it is answered; the store is written behind, with bounds. Until the store shows
//     what was written, what it says of that pod is not believed.
//   - Nothing is served before the store's first whole state is here; afterwards what
//     is known is served, whether or not the store can be reached.
//   - A watcher that does not read costs nobody else: what waits for it is bounded and
//     of each row only the latest; beyond, its stream ends with DATA_LOSS.
//   - A row is encoded once, whoever is told of it.
//   - A version names contents: equal versions are equal states, on whichever replica
//     and after whatever restart (decision 021).
//
// It knows neither etcd nor Kubernetes; who may call is the certificates' and
// Config.Writer's business.
package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/dataplane/telemetry"
	"aether/mtls/spiffeid"
)

// Bounds of what peers may ask for.
const (
	maxConnections  = 16384
	maxWatchers     = 16384
	maxStreams      = 256     // calls at once on one connection
	maxRequestBytes = 1 << 20 // one message that comes in
	maxRowBytes     = 64 << 10
	maxStoredBytes  = 256 << 10 // of a row of the store, with its service's name: whoever watches must be able to take it
	maxFilter       = 16384     // services that a watch asks for
	maxIPs          = 1024      // that one UnregisterEndpoint names
	maxName         = 253       // bytes of cluster, node and instance
	maxHeaderBytes  = 16 << 10
	handshakeTime   = 30 * time.Second // many nodes come at once when a replica has gone
	// syncTime is how long a call waits for the store's first state; then it is to try another replica.
	syncTime = 5 * time.Second
	// pingAfter and pingTime find peers that are gone.
	pingAfter = 30 * time.Second
	pingTime  = 20 * time.Second
	// pingMin is how often a peer may ask whether we live.
	pingMin = 5 * time.Second
	// readBuffer and writeBuffer of a connection: there are many, and most are idle.
	readBuffer  = 4 << 10
	writeBuffer = 16 << 10
	// lookEvery is how often watchers are looked at that stand still.
	lookEvery = 5 * time.Second
	// quietTime is how often one cause is logged.
	quietTime = time.Minute
)

// ConfigLister is a registry.Store that also keeps what clusters export of their
// routes (contract 9.5, config). ListAllConfig asks it; without it there are none.
type ConfigLister interface {
	Configs(ctx context.Context) ([]*registrypb.ServiceConfigProjection, error)
}

// Config of a Server. Only Store is required.
type Config struct {
	Store registry.Store
	// Region and Cluster are the partition that the Store writes to (contract 9.5).
	Region, Cluster string // empty: local
	// Derived: the Store makes its rows of something else, as of pods. Then
	// registrations are judged, accepted and do nothing.
	Derived bool

	// TLS of the listener, which asks for and verifies client certificates
	// (mtls.ServerConfig). nil: no TLS, and whoever can connect may call everything.
	TLS *tls.Config
	// Writer says who may register and unregister. nil: whoever TLS lets in.
	Writer func(spiffeid.ID) bool
	// Node is the node that a caller's identity names: such a caller writes and removes that
	// node's rows alone (decision 051). "", nil: it names none, and may write any.
	Node func(spiffeid.ID) string
	// TrustDomain is the mesh's: rows may name identities of their service's namespace in it
	// (registry.IdentityFault). Empty: the caller's own, and without TLS none is judged.
	TrustDomain string
	// Identities are the forms of those that rows may name besides.
	Identities []string

	// Drain is how long watchers are given to go elsewhere when Run ends; they are
	// told one by one over that time. 0: 5 s; negative: all at once.
	Drain time.Duration
	Log   *slog.Logger // nil: discard
}

// Server is one replica of the registrar. Any number may stand over one store; all
// of them serve.
type Server struct {
	registrypb.UnimplementedRegistrarServiceServer

	cfg   Config
	log   *slog.Logger
	quiet *telemetry.LogLimiter

	synced  chan struct{} // closed with the store's first whole state
	leaving chan struct{} // closed once the server is to end
	kick    chan struct{} // a write is ready
	senders sync.WaitGroup
	writers sync.WaitGroup

	counters

	mu            sync.Mutex
	state         state                            // guarded by mu, as all below
	watchers      map[*watcher]bool                // all of them
	unscoped      map[*watcher]bool                // those without a filter
	scoped        map[string]map[*watcher]struct{} // those with one, by the services in it
	named         map[watchName]*watcher           // those that say which node they are
	pending       map[podKey]*pending              // writes that the store has not shown yet
	waiting       [2]int                           // of pending, by sort
	ready         []podKey                         // of pending: to be written next
	again         []podKey                         // of pending: those that have failed before, after ready
	inflight      int                              // writes under way
	inflightAgain int                              // of those, out of again
	unwritten     unwritten                        // as sweep saw it last
	changed       map[chan<- struct{}]struct{}     // of Changed
	storeErr      error                            // why the store is not heard; nil: it is
	storeAt       time.Time                        // when it was heard last
	storeVer      string                           // where in its history it stands
	stopping      bool
	queued        atomic.Int64 // events that wait for watchers

	// The constants, but for tests.
	maxPending, maxEvents int
	confirmTime           time.Duration
}

// New makes a Server; Run starts it.
func New(c Config) *Server {
	c.Region, c.Cluster = cmp.Or(c.Region, "local"), cmp.Or(c.Cluster, "local")
	c.Drain = cmp.Or(c.Drain, 5*time.Second)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	return &Server{
		cfg: c, log: c.Log, quiet: telemetry.NewLogLimiter(c.Log, quietTime, nil), counters: counters{refused: newRefused()}, state: newState(),
		synced: make(chan struct{}), leaving: make(chan struct{}), kick: make(chan struct{}, 1),
		watchers: map[*watcher]bool{}, unscoped: map[*watcher]bool{}, scoped: map[string]map[*watcher]struct{}{},
		named: map[watchName]*watcher{}, pending: map[podKey]*pending{}, changed: map[chan<- struct{}]struct{}{},
		maxPending: maxPending, maxEvents: maxEvents, confirmTime: confirmTime,
	}
}

// Run follows the store and serves on ln until ctx ends. Then it sends everybody
// elsewhere (GOAWAY, UNAVAILABLE), writes what the store is still owed, and returns
// nil once all of its goroutines have ended. It closes ln. Call it once.
func (s *Server) Run(ctx context.Context, ln net.Listener) error {
	hard, kill := context.WithCancel(context.WithoutCancel(ctx)) // outlives ctx by the drain
	defer kill()
	g := s.grpcServer()
	errs := make(chan error, 2)
	var serving, following, writing sync.WaitGroup
	serving.Go(func() {
		if err := g.Serve(netutil.LimitListener(ln, maxConnections)); err != nil {
			errs <- fmt.Errorf("registrar: serve on %s: %w", ln.Addr(), err)
		}
	})
	following.Go(func() {
		if err := s.cfg.Store.Watch(hard, s.heard, s.report); hard.Err() == nil {
			errs <- fmt.Errorf("registrar: the store's watch ended: %w", cmp.Or(err, errors.New("no reason given")))
		}
	})
	writeCtx, stopWriting := context.WithCancel(hard)
	defer stopWriting()
	writing.Go(func() { s.writeBehind(writeCtx, hard) })
	looking := time.NewTicker(lookEvery)
	defer looking.Stop()

	var err error
	for err == nil && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case err = <-errs:
		case now := <-looking.C:
			s.cutStalled(now)
		}
	}
	s.leave(g)
	serving.Wait()
	s.senders.Wait()
	stopWriting()
	writing.Wait() // it writes what is owed first
	kill()
	following.Wait()
	return err
}

func (s *Server) grpcServer() *grpc.Server {
	opts := []grpc.ServerOption{
		grpc.ForceServerCodecV2(newCodec()),
		grpc.MaxRecvMsgSize(maxRequestBytes), grpc.MaxConcurrentStreams(maxStreams), grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.ConnectionTimeout(handshakeTime),
		grpc.ReadBufferSize(readBuffer), grpc.WriteBufferSize(writeBuffer),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingAfter, Timeout: pingTime}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingMin, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
	}
	if s.cfg.TLS != nil {
		opts = append(opts, grpc.Creds(credentials.NewTLS(s.cfg.TLS)))
	}
	g := grpc.NewServer(opts...)
	registrypb.RegisterRegistrarServiceServer(g, s)
	return g
}

// leave takes no new calls and ends those that are open: the watches one after
// another, so that they do not all fall upon the next replica at once.
func (s *Server) leave(g *grpc.Server) {
	close(s.leaving)
	s.mu.Lock()
	s.stopping = true
	left := slices.Collect(maps.Keys(s.watchers))
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.GracefulStop() // GOAWAY on every connection; it returns once no call is open
	}()
	if s.cfg.Drain > 0 && len(left) > 0 {
		begun := time.Now()
		step := time.NewTicker(leaveStep)
		for i := 0; i < len(left); <-step.C {
			for ; i < len(left) && int64(i)*int64(s.cfg.Drain) <= int64(time.Since(begun))*int64(len(left)); i++ {
				left[i].end(errLeaving)
			}
		}
		step.Stop()
	}
	for _, w := range left {
		w.end(errLeaving)
	}
	late := time.AfterFunc(leaveTime, g.Stop)
	<-done
	late.Stop()
}

const (
	// leaveTime is how long calls have to end once every watch was told to.
	leaveTime = 5 * time.Second
	// leaveStep is how often watches are ended meanwhile.
	leaveStep = 10 * time.Millisecond
)

// report is told how the store fares.
func (s *Server) report(err error) {
	if err != nil {
		s.syncErrors.Inc()
		s.quiet.Warn("store", "the registry's store cannot be followed: what is known is served meanwhile", "err", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && s.storeErr != nil {
		s.log.Info("the registry's store is followed again")
	}
	s.storeErr = err
}

// heard takes what the store says.
func (s *Server) heard(c registry.Change) {
	type at struct {
		service string
		change
	}
	ups := make([]at, 0, len(c.Rows))
	for _, r := range c.Rows {
		a := at{intern(r.Service.String()), change{key: rowKey{r.IP, intern(r.Region), intern(r.Cluster), r.Protocol}}}
		if r.Endpoint != nil {
			enc, err := s.encode(r)
			if err != nil { // what nodes cannot read would end every stream it is sent on, again and again
				s.unencodable.Inc()
				s.quiet.Warn("encode "+a.service+" "+r.IP, "a row of the store cannot be sent to nodes: left out", "service", a.service, "ip", r.IP, "err", err)
			}
			a.row = enc // nil: as if it were not there
		}
		ups = append(ups, a)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.syncs.Inc()
	s.storeAt, s.storeVer = time.Now(), c.Version
	byService := map[string][]change{}
	var touched []podKey // of pending
	if c.Whole {
		for name := range s.state.services {
			byService[name] = nil
		}
		for k, p := range s.pending {
			p.stored = nil
			byService[k.service] = nil
			touched = append(touched, k)
		}
	}
	for _, a := range ups {
		k := podKey{a.service, a.key.ip}
		if p := s.pending[k]; p != nil && s.own(a.key) {
			p.stored = merged(p.stored, []change{a.change})
			p.seen = p.seen || !c.Whole && same(p.stored, p.rows) // somebody else may have written since, in the same breath
			touched = append(touched, k)
			continue // until it shows what was written
		}
		byService[a.service] = append(byService[a.service], a.change)
	}
	if c.Whole {
		for k, p := range s.pending {
			for _, r := range p.rows {
				byService[k.service] = append(byService[k.service], change{r.rowKey, r})
			}
		}
	}
	for name, changes := range byService {
		var old []*row
		if !c.Whole {
			old = s.state.rowsOf(name)
		}
		s.setLocked(name, merged(old, changes))
	}
	for _, a := range ups {
		if a.row != nil {
			s.respelledLocked(a.service, a.key)
		}
	}
	for _, k := range touched {
		p := s.pending[k]
		if p == nil {
			continue
		}
		if p.seen = p.seen || same(p.stored, p.rows); p.shown() {
			s.releaseLocked(k, p)
		} else if p.overtaken() { // it came to another replica, which was faster
			s.outdated.Inc()
			s.releaseLocked(k, p)
		}
	}
	if c.Whole && !s.isSynced() {
		close(s.synced)
		s.log.Info("the registry is here", "services", len(s.state.services), "rows", s.state.rows, "version", c.Version)
	}
}

// own reports whether a row stands in the partition that is written to.
func (s *Server) own(k rowKey) bool { return k.region == s.cfg.Region && k.cluster == s.cfg.Cluster }

// setLocked replaces the rows of a service and tells whom it concerns.
func (s *Server) setLocked(name string, rows []*row) {
	n := s.state.set(name, rows)
	if n.empty() {
		return
	}
	told := 0
	tell := func(w *watcher, events []event, sum digest) {
		told += len(events)
		if w.tell(events, sum) {
			s.slow.Inc()
			s.quiet.Warn("slow", "a watcher that does not read is cut off", "node", w.name.node, "peer", w.name.peer.String())
		}
	}
	if n.catalog == nil {
		for w := range s.scoped[name] {
			tell(w, n.rows, n.sum)
		}
		for w := range s.unscoped {
			tell(w, n.rows, n.sum)
		}
	} else {
		catalog := []event{*n.catalog}
		both := append(catalog[:1:1], n.rows...)
		for w := range s.watchers {
			if _, sees := s.scoped[name][w]; sees || w.all {
				tell(w, both, n.sum.plus(n.name))
			} else {
				tell(w, catalog, n.name)
			}
		}
	}
	s.broadcasts.Add(uint64(len(n.rows)))
	s.events.Add(uint64(told))
	for ch := range s.changed {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

func (s *Server) cutStalled(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watchers {
		if w.stalled(now) {
			w.end(errStalled)
			s.slow.Inc()
			s.quiet.Warn("slow", "a watcher that does not read is cut off", "node", w.name.node, "peer", w.name.peer.String())
		}
	}
}

// Synced is closed once the store's first whole state is here.
func (s *Server) Synced() <-chan struct{} { return s.synced }

func (s *Server) isSynced() bool {
	select {
	case <-s.synced:
		return true
	default:
		return false
	}
}

// Status is how the server fares, for whoever shows it.
type Status struct {
	Synced       bool      `json:"synced"`
	Leaving      bool      `json:"leaving"`
	StoreErr     string    `json:"store_error,omitempty"` // why the store is not followed; empty: it is
	StoreVersion string    `json:"store_version"`
	StoreAt      time.Time `json:"store_at"` // when the store said something last
	Version      string    `json:"version"`  // of the whole state, as a watcher without a filter sees it
	Changes      uint64    `json:"changes"`  // of services' rows, since the start
	Services     int       `json:"services"`
	Rows         int       `json:"rows"`
	Watchers     int       `json:"watchers"`
	Filtered     int       `json:"filtered_watchers"`
	Pending      int       `json:"pending_writes"`
	Refused      int       `json:"refused_writes"`                 // of those, tried and not taken so far
	RefusedErr   string    `json:"refused_writes_error,omitempty"` // why the one that has waited longest was not
	RefusedSince time.Time `json:"refused_writes_since,omitzero"`  // when that one was asked for
}

// Status tells how the server fares. Safe for concurrent use.
func (s *Server) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{
		Synced: s.isSynced(), Leaving: s.stopping, StoreVersion: s.storeVer, StoreAt: s.storeAt,
		Version: s.seenLocked(true, nil).String(), Changes: s.state.version, Services: len(s.state.services), Rows: s.state.rows,
		Watchers: len(s.watchers), Filtered: len(s.watchers) - len(s.unscoped), Pending: len(s.pending),
	}
	if s.storeErr != nil {
		st.StoreErr = s.storeErr.Error()
	}
	if u := s.unwritten; u.n > 0 {
		st.Refused, st.RefusedErr, st.RefusedSince = u.n, u.err.Error(), u.since
	}
	return st
}

// Services gives every service with its pods' endpoints, each pod once a partition,
// as they are in the snapshot. Services come in no order. Safe for concurrent use,
// also while it runs; a service's endpoints are all of one moment.
func (s *Server) Services() iter.Seq2[model.ServiceName, []*registrypb.ServiceEndpoint] {
	return func(yield func(model.ServiceName, []*registrypb.ServiceEndpoint) bool) {
		s.mu.Lock()
		all := make(map[string][]*row, len(s.state.services))
		for name, sv := range s.state.services {
			all[name] = sv.rows
		}
		s.mu.Unlock()
		for key, rows := range all {
			name, err := registry.ParseService(key)
			if err != nil {
				continue // of a store whose keys are not services': nothing is generated for it
			}
			out := make([]*registrypb.ServiceEndpoint, 0, len(rows))
			for i, r := range rows {
				if i > 0 && rows[i-1].ip == r.ip && rows[i-1].region == r.region && rows[i-1].cluster == r.cluster {
					continue // the same pod under another class
				}
				e := &registrypb.ServiceEndpoint{}
				if proto.Unmarshal(r.endpoint, e) == nil { // we encoded it
					out = append(out, e)
				}
			}
			if !yield(name, out) {
				return
			}
		}
	}
}

// Changed returns a channel that is sent to, without waiting, whenever a service's
// rows change, and what ends that.
func (s *Server) Changed() (changed <-chan struct{}, end func()) {
	ch := make(chan struct{}, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed[ch] = struct{}{}
	return ch, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.changed, ch)
	}
}

// awaitSynced waits until there is something to serve.
func (s *Server) awaitSynced(ctx context.Context) error {
	if s.isSynced() {
		return nil
	}
	t := time.NewTimer(syncTime)
	defer t.Stop()
	select {
	case <-s.synced:
		return nil
	case <-t.C:
		return status.Error(codes.Unavailable, "this registrar has not heard its store yet: try another one, or wait")
	case <-s.leaving:
		return errLeaving.Err()
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// WatchEndpoints is contract 9.7.
func (s *Server) WatchEndpoints(req *registrypb.WatchEndpointsRequest, stream grpc.ServerStreamingServer[registrypb.WatchEndpointsResponse]) error {
	ctx := stream.Context()
	peer, err := s.peer(ctx)
	if err != nil {
		return err
	}
	w := &watcher{
		name: watchName{peer, req.GetClusterName(), req.GetNodeName(), req.GetInstance()}, all: req.GetFilter() == nil,
		ended: make(chan struct{}), wake: make(chan struct{}, 1), total: &s.queued, max: s.maxEvents,
	}
	if !w.all {
		w.filter = slices.Clone(req.GetFilter().GetServices())
		slices.Sort(w.filter)
		w.filter = slices.Compact(w.filter)
	}
	switch {
	case len(w.filter) > maxFilter:
		return status.Errorf(codes.InvalidArgument, "filter names %d services, more than %d: leave it unset to watch everything", len(w.filter), maxFilter)
	case max(len(w.name.cluster), len(w.name.node), len(w.name.instance)) > maxName:
		return status.Errorf(codes.InvalidArgument, "cluster_name, node_name and instance have %d bytes at most", maxName)
	}
	if err := s.awaitSynced(ctx); err != nil {
		return err
	}
	begin, err := s.join(w, req.GetLastVersion(), req.GetChanges())
	if err != nil {
		return err
	}
	defer s.part(w)
	sent := make(chan error, 1)
	s.senders.Go(func() { sent <- w.send(stream, begin) })
	// The sender may wait for a peer that does not read; the end of this call ends that.
	select {
	case err := <-sent:
		if err != nil {
			return err
		}
	case <-w.ended:
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.why.Err()
}

// join makes w one of the watchers and returns what it is told first: the rows only
// if they are not those of the version it has, and then, where it takes changes and what
// has changed since is known, that alone.
func (s *Server) join(w *watcher, last string, changes bool) (*first, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.stopping:
		return nil, errLeaving.Err()
	case len(s.watchers) >= maxWatchers:
		return nil, status.Errorf(codes.ResourceExhausted, "%d watchers are here already: try another registrar", maxWatchers)
	}
	if w.name.node != "" {
		if old := s.named[w.name]; old != nil {
			s.partLocked(old, errReplaced)
		}
		s.named[w.name] = w
	}
	w.sum = s.seenLocked(w.all, w.filter)
	begin := &first{names: s.state.catalogBodies(), version: w.sum.String()}
	rows := begin.version != last
	if rows && changes {
		// Rows are shared by all whom they are sent to, and such changes are not: they count as events that wait.
		if b, ok := s.state.since(w, last); ok && s.queued.Load()+int64(b.n) <= maxAllEvents/2 {
			s.queued.Add(int64(b.n))
			begin.behind, begin.since, rows = b, last, false
		}
	}
	if w.all {
		s.unscoped[w] = true
		if rows {
			for _, sv := range s.state.services {
				begin.rows = append(begin.rows, sv.rows)
			}
		}
	}
	for _, name := range w.filter {
		in := s.scoped[name]
		if in == nil {
			in = map[*watcher]struct{}{}
			s.scoped[name] = in
		}
		in[w] = struct{}{}
		if r := s.state.rowsOf(name); rows && r != nil {
			begin.rows = append(begin.rows, r)
		}
	}
	s.watchers[w] = true
	begin.clear = rows && last != "" && len(begin.rows) == 0
	switch {
	case rows:
		s.snapshots.Inc()
	case begin.since != "":
		s.caughtUp.Inc()
	default:
		s.resumed.Inc()
	}
	return begin, nil
}

// seenLocked is the digest of what a watcher with this filter is told. The filter
// itself is no part of it: where two let the same rows through, neither has more.
func (s *Server) seenLocked(all bool, filter []string) digest {
	d := s.state.catalog
	if all {
		return d.plus(s.state.sum)
	}
	for _, name := range filter {
		if sv := s.state.services[name]; sv != nil {
			d = d.plus(sv.sum)
		}
	}
	return d
}

// part forgets w, whose stream has ended.
func (s *Server) part(w *watcher) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.partLocked(w, errGone)
}

var errGone = status.New(codes.Canceled, "the watcher has gone")

func (s *Server) partLocked(w *watcher, why *status.Status) {
	w.end(why)
	if !s.watchers[w] {
		return
	}
	delete(s.watchers, w)
	delete(s.unscoped, w)
	if s.named[w.name] == w {
		delete(s.named, w.name)
	}
	for _, name := range w.filter {
		delete(s.scoped[name], w)
		if len(s.scoped[name]) == 0 {
			delete(s.scoped, name)
		}
	}
}

// ListAllEndpoints is contract 9.7: of each service the rows that serve a port of
// this class; of no class: each pod once. With a node's name, which is ours: of its
// pods alone.
func (s *Server) ListAllEndpoints(ctx context.Context, req *registrypb.ListAllEndpointsRequest) (*registrypb.ListAllEndpointsResponse, error) {
	if _, err := s.peer(ctx); err != nil {
		return nil, err
	}
	if err := s.awaitSynced(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	all := map[string][]*row{}
	if node := req.GetNodeName(); node != "" { // every node asks, every minute
		for name := range s.state.nodes[node] {
			all[name] = s.state.services[name].rows
		}
	} else {
		for name, sv := range s.state.services {
			all[name] = sv.rows
		}
	}
	out := &registrypb.ListAllEndpointsResponse{Version: s.seenLocked(true, nil).String(), Derived: s.cfg.Derived}
	s.mu.Unlock()
	// Rows are encoded already, so the map is written as it stands on the wire: an
	// entry a service, of its name and a ServiceEndpoints.
	var wire []byte
	for name, rows := range all {
		var list []byte
		for i, r := range rows {
			switch {
			case req.GetNodeName() != "" && r.node != req.GetNodeName():
				continue
			case req.GetProtocol() == registrypb.Service_PROTOCOL_UNSPECIFIED:
				if i > 0 && rows[i-1].ip == r.ip && rows[i-1].region == r.region && rows[i-1].cluster == r.cluster {
					continue
				}
			case r.protocol != req.GetProtocol():
				continue
			}
			list = protowire.AppendTag(list, 1, protowire.BytesType)
			list = protowire.AppendBytes(list, r.endpoint)
		}
		if list == nil {
			continue
		}
		entry := protowire.AppendTag(nil, 1, protowire.BytesType)
		entry = protowire.AppendString(entry, name)
		entry = protowire.AppendTag(entry, 2, protowire.BytesType)
		entry = protowire.AppendBytes(entry, list)
		wire = protowire.AppendTag(wire, 1, protowire.BytesType)
		wire = protowire.AppendBytes(wire, entry)
	}
	out.ProtoReflect().SetUnknown(wire)
	return out, nil
}

// ListAllConfig is contract 9.7.
func (s *Server) ListAllConfig(ctx context.Context, _ *registrypb.ListAllConfigRequest) (*registrypb.ListAllConfigResponse, error) {
	if _, err := s.peer(ctx); err != nil {
		return nil, err
	}
	l, ok := s.cfg.Store.(ConfigLister)
	if !ok {
		return &registrypb.ListAllConfigResponse{}, nil
	}
	projections, err := l.Configs(ctx)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "the store's configuration cannot be listed: %v", err)
	}
	return &registrypb.ListAllConfigResponse{Projections: projections}, nil
}

// RegisterEndpoint is contract 9.7. The protocol of the request says nothing: a row is
// registered under every class that it serves, by whichever call comes first.
func (s *Server) RegisterEndpoint(ctx context.Context, req *registrypb.RegisterEndpointRequest) (*registrypb.RegisterEndpointResponse, error) {
	who, err := s.mayWrite(ctx)
	if err != nil {
		return nil, err
	}
	service, err := registry.ParseService(req.GetServiceName())
	if err != nil {
		s.refused[badService].Inc()
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	// What is there already may be removed, whatever it is called, but every node would be told of a new one.
	if why := registry.NameFault(service); why != "" {
		s.refused[badService].Inc()
		return nil, status.Errorf(codes.InvalidArgument, "service %.128q: %s", req.GetServiceName(), why)
	}
	if fault, why := registry.RowFault(req.GetEndpoint()); fault != registry.NoFault {
		s.refused[fault].Inc()
		return nil, status.Errorf(codes.InvalidArgument, "row %s of service %s: %s", req.GetEndpoint().GetIp(), service, why)
	}
	if fault, why := s.judge(who, service, req.GetEndpoint()); fault != registry.NoFault {
		s.refused[fault].Inc()
		s.quiet.Warn("judge "+who.id.String(), "a row is not believed of its writer", "peer", who.id.String(), "service", service.String(), "ip", req.GetEndpoint().GetIp(), "reason", why)
		return nil, status.Errorf(codes.PermissionDenied, "row %s of service %s: %s", req.GetEndpoint().GetIp(), service, why)
	}
	if n := proto.Size(req.GetEndpoint()); n > maxRowBytes {
		s.refused[tooLarge].Inc()
		return nil, status.Errorf(codes.InvalidArgument, "row %s of service %s has %d bytes, more than %d: give it less metadata", req.GetEndpoint().GetIp(), service, n, maxRowBytes)
	}
	if s.cfg.Derived {
		return &registrypb.RegisterEndpointResponse{}, nil
	}
	if len(registry.Protocols(req.GetEndpoint())) == 0 { // there is no place for it in the store
		s.refused[registry.Unclassed].Inc()
		return nil, status.Errorf(codes.InvalidArgument, "row %s of service %s: it serves no class that this registrar knows: bring the registrar up to date", req.GetEndpoint().GetIp(), service)
	}
	if err := s.register(service, req.GetEndpoint()); err != nil {
		return nil, err
	}
	return &registrypb.RegisterEndpointResponse{}, nil
}

// UnregisterEndpoint is contract 9.7: it takes the addresses, however they are spelled,
// from every class. Where it says whose word it is, what that node has said later and what
// is another node's stays (decision 032).
//
// A caller whose identity names a node speaks as that node, whatever it says of itself.
func (s *Server) UnregisterEndpoint(ctx context.Context, req *registrypb.UnregisterEndpointRequest) (*registrypb.UnregisterEndpointResponse, error) {
	who, err := s.mayWrite(ctx)
	if err != nil {
		return nil, err
	}
	node := req.GetNodeName()
	if who.node != "" && node != "" && node != who.node {
		s.denied.Inc()
		s.quiet.Warn("denied "+who.id.String(), "a caller may not remove another node's rows", "peer", who.id.String(), "node", node)
		return nil, status.Errorf(codes.PermissionDenied, "%s may not remove rows of node %.253q", who.id, node)
	} else if who.node != "" {
		node = who.node
	}
	service, err := registry.ParseService(req.GetServiceName())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if n := len(req.GetIps()); n > maxIPs {
		return nil, status.Errorf(codes.InvalidArgument, "%d addresses are more than %d: send several requests", n, maxIPs)
	}
	for _, ip := range req.GetIps() {
		if _, err := netip.ParseAddr(ip); err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "ip %.64q is no address of a pod", ip)
		}
	}
	if s.cfg.Derived {
		return &registrypb.UnregisterEndpointResponse{}, nil
	}
	if err := s.unregister(service, req.GetIps(), registry.StatementOf(&registrypb.ServiceEndpoint{
		KubernetesMetadata: &registrypb.ServiceEndpoint_KubernetesMetadata{NodeName: node}, Stated: req.GetStated(),
	})); err != nil {
		return nil, err
	}
	return &registrypb.UnregisterEndpointResponse{}, nil
}
