package server

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// Bounds of the writes behind (contract 9.7).
const (
	// maxPending are pods whose row the store has not shown as it was written, and as many
	// again whose removal it has not; further ones are refused. Each sort has its own, so
	// that a store that takes one of them is given it.
	maxPending = 32768
	// maxWrites are under way at once.
	maxWrites = 16
	// writeTick is how often what is to be written again is looked for. New writes do
	// not wait for it.
	writeTick = 500 * time.Millisecond
	// writeTime is how long one write may take.
	writeTime = 5 * time.Second
	// minBackoff and maxBackoff are between two tries of one write.
	minBackoff = time.Second
	maxBackoff = 30 * time.Second
	// dropTime: a write that has not succeeded for so long is given up, if the store has
	// called the write itself unfit (registry.ErrUnfit) at dropTries of its tries. What the
	// store does with other writes shows nothing: it may take one sort and refuse another.
	dropTime  = 5 * time.Minute
	dropTries = 3
	// maxAgain of the writes under way are some that have failed before: those that the
	// store refuses slowly must not hold up those that it would take.
	maxAgain = maxWrites / 2
	// confirmTime is how long after a write the store may take to show it while it is
	// followed; then what it shows is believed, once its watch has come so far: somebody
	// else has written since, or there was nothing to remove.
	confirmTime = 5 * time.Second
	// flushTime is for what is owed when the server ends.
	flushTime = 5 * time.Second
)

// podKey is what is written as one: the rows of a pod in the own partition.
type podKey struct{ service, ip string }

// pending is a write that the store has not shown yet. It is guarded by Server.mu.
type pending struct {
	name     model.ServiceName
	endpoint *registrypb.ServiceEndpoint // nil: it is to be removed
	said     registry.Statement          // who wants it
	rows     []*row                      // what the snapshot says of the pod meanwhile; nil: nothing
	stored   []*row                      // what the store says of it

	gen     uint64 // grows when endpoint changes
	since   time.Time
	due     time.Time // not to be tried before
	backoff time.Duration
	queued  bool              // it is to be written, and stands in Server.ready or Server.again
	inAgain bool              // it stands in Server.again, and perhaps in Server.ready as well
	writing bool              // a write is under way
	written time.Time         // when the store was done with endpoint; zero: it has not been
	at      registry.Position // of that, where the Store is registry.Positioned
	seen    bool              // the store has said of the pod just this since that write began

	unfit int   // tries that the store has called unfit
	err   error // of the last try; nil: endpoint has not been tried, or was taken
}

// unwritten are the writes that the store has refused and that are tried again.
type unwritten struct {
	n     int
	since time.Time // when the first of them was asked for; zero: there is none
	err   error     // why that one was refused the last time
}

// shown reports whether the store has shown what was written.
func (p *pending) shown() bool {
	return !p.written.IsZero() && p.seen
}

// overtaken reports whether the store has what was said later: then this is written no more.
func (p *pending) overtaken() bool { return stays(p.stored, p.said, p.endpoint == nil) }

// stays reports whether one of a pod's rows stays, whatever by has to say of the pod.
func stays(rows []*row, by registry.Statement, removal bool) bool {
	return slices.ContainsFunc(rows, func(r *row) bool {
		return r.said().Outdates(by) || removal && r.said().Keeps(by)
	})
}

func (s *Server) register(service model.ServiceName, e *registrypb.ServiceEndpoint) error {
	e = proto.CloneOf(e) // gRPC's message is nobody else's, but a caller in process has its own
	e.Ip = registry.Address(e.GetIp())
	said := registry.StatementOf(e)
	var rows []*row
	for _, p := range registry.Protocols(e) {
		r, err := encodeIn(service.String(), s.cfg.Region, s.cfg.Cluster, p, e.GetIp(), e)
		if err != nil {
			return status.Errorf(codes.InvalidArgument, "row %s of service %s: %v", e.GetIp(), service, err)
		}
		rows = append(rows, r)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.outdatedLocked(podKey{service.String(), e.GetIp()}, said, false) {
		s.outdated.Inc()
		return nil // its node knows better by now
	}
	others := written(s.state.rowsOf(service.String()), s.cfg.Region, s.cfg.Cluster, e.GetIp())
	if !s.roomLocked(service, false, append(others, e.GetIp())...) {
		return s.errFull()
	}
	for _, ip := range others { // the address has one row
		s.enqueueLocked(service, ip, nil, nil, registry.Statement{})
	}
	s.enqueueLocked(service, e.GetIp(), e, rows, said)
	return nil
}

// unregister takes addresses out, however they are spelled.
func (s *Server) unregister(service model.ServiceName, ips []string, by registry.Statement) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.state.rowsOf(service.String())
	var all []string
	for _, ip := range ips {
		ip = registry.Address(ip)
		all = append(append(all, ip), written(now, s.cfg.Region, s.cfg.Cluster, ip)...)
	}
	slices.Sort(all)
	all = slices.Compact(all)
	if !s.roomLocked(service, true, all...) {
		return s.errFull()
	}
	for _, ip := range all {
		if s.outdatedLocked(podKey{service.String(), ip}, by, true) {
			s.outdated.Inc()
			continue
		}
		s.enqueueLocked(service, ip, nil, nil, by)
	}
	return nil
}

// respelledLocked takes out a row of the store whose address is spelled otherwise than in a write that waits. The call
// that asked for the write could not do so where it came before the row: the address would keep a second row.
func (s *Server) respelledLocked(service string, k rowKey) {
	ip := k.ip
	if !strings.Contains(ip, ":") || !s.own(k) {
		return
	}
	address := registry.Address(ip)
	p := s.pending[podKey{service, address}]
	if address == ip || p == nil {
		return
	}
	by := registry.Statement{} // the address has one row
	if p.endpoint == nil {
		if by = p.said; s.outdatedLocked(podKey{service, ip}, by, true) {
			s.outdated.Inc()
			return
		}
	}
	if !s.roomLocked(p.name, true, ip) {
		s.full.Inc()
		s.quiet.Warn("respelled", "an address has two rows in the store, and no further write can wait: the other stays until the address is registered again", "service", service, "ip", ip)
		return
	}
	s.enqueueLocked(p.name, ip, nil, nil, by)
}

// outdatedLocked reports whether what is known of a pod was said later than by.
func (s *Server) outdatedLocked(k podKey, by registry.Statement, removal bool) bool {
	if p := s.pending[k]; p != nil && p.said.Outdates(by) {
		return true
	}
	now := s.state.rowsOf(k.service)
	from, to := pod(now, s.cfg.Region, s.cfg.Cluster, k.ip)
	return stays(now[from:to], by, removal)
}

// roomLocked reports whether writes of all of these, which are removals or are not, may wait.
func (s *Server) roomLocked(service model.ServiceName, removals bool, ips ...string) bool {
	n := s.waiting[sort(removals)]
	for _, ip := range ips {
		if s.pending[podKey{service.String(), ip}] == nil {
			n++
		}
	}
	return n <= s.maxPending
}

// sort is the place in Server.waiting of a sort of write.
func sort(removal bool) int {
	if removal {
		return 1
	}
	return 0
}

func (s *Server) errFull() error {
	s.full.Inc()
	return status.Errorf(codes.ResourceExhausted, "%d writes wait for the store already: try again once it takes them", s.maxPending)
}

// enqueueLocked puts rows into the snapshot at once, and the write on its way.
func (s *Server) enqueueLocked(service model.ServiceName, ip string, e *registrypb.ServiceEndpoint, rows []*row, said registry.Statement) {
	k := podKey{service.String(), ip}
	now := s.state.rowsOf(k.service)
	p := s.pending[k]
	if p == nil {
		from, to := pod(now, s.cfg.Region, s.cfg.Cluster, ip)
		p = &pending{name: service, stored: now[from:to:to]}
		s.pending[k] = p
		s.waiting[sort(e == nil)]++
	} else if p.written.IsZero() && (p.endpoint == nil) == (e == nil) && same(p.rows, rows) {
		p.since = time.Now() // it is on its way, and whoever wants it does so still
		p.unfit, p.said = 0, said
		if p.writing {
			p.gen++ // the store may refuse what is on its way as outdated, and not this
		}
		return
	} else {
		s.waiting[sort(p.endpoint == nil)]--
		s.waiting[sort(e == nil)]++
	}
	p.endpoint, p.rows, p.said = e, rows, said
	p.gen++
	p.since, p.due, p.backoff, p.written = time.Now(), time.Time{}, 0, time.Time{}
	if p.unfit = 0; p.err != nil { // it is another write now, which has not been refused
		p.err, p.queued = nil, false
	}
	s.readyLocked(k, p)
	s.setLocked(k.service, withPod(now, s.cfg.Region, s.cfg.Cluster, ip, rows))
}

func (s *Server) readyLocked(k podKey, p *pending) {
	if p.queued || p.writing {
		return // whoever writes looks again when it has
	}
	p.queued = true
	switch {
	case p.err == nil:
		s.ready = append(s.ready, k)
	case !p.inAgain:
		p.inAgain = true
		s.again = append(s.again, k)
	}
	s.poke()
}

func (s *Server) poke() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// releaseLocked ends a write: from here on the store is believed again.
func (s *Server) releaseLocked(k podKey, p *pending) {
	delete(s.pending, k)
	s.waiting[sort(p.endpoint == nil)]--
	s.setLocked(k.service, withPod(s.state.rowsOf(k.service), s.cfg.Region, s.cfg.Cluster, k.ip, p.stored))
}

// writeBehind writes until ctx ends, and then, within hard and flushTime, what is owed.
func (s *Server) writeBehind(ctx, hard context.Context) {
	tick := time.NewTicker(writeTick)
	defer tick.Stop()
	defer s.writers.Wait()
	for {
		select {
		case <-ctx.Done():
			s.flush(hard)
			return
		case <-s.kick:
		case now := <-tick.C:
			s.sweep(now)
		}
		s.startWrites(hard)
	}
}

// sweep looks after what waits: due again, given up, or never shown.
func (s *Server) sweep(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unwritten = unwritten{}
	for k, p := range s.pending {
		if p.err != nil {
			s.unwritten.n++
			if s.unwritten.since.IsZero() || p.since.Before(s.unwritten.since) {
				s.unwritten.since, s.unwritten.err = p.since, p.err
			}
		}
		switch {
		case p.writing:
		case !p.written.IsZero():
			if now.Sub(p.written) >= s.confirmTime && s.storeErr == nil && s.isSynced() && s.comeSoFar(p) {
				s.unconfirmed.Inc()
				s.releaseLocked(k, p)
			}
		case p.unfit >= dropTries && now.Sub(p.since) >= dropTime:
			s.dropped.Inc()
			s.quiet.Warn("drop", "a registration that the store cannot hold is given up after "+dropTime.String()+": make the row smaller, or raise the store's limit; the node registers it again",
				"service", k.service, "ip", k.ip, "err", p.err)
			s.releaseLocked(k, p)
		case !p.queued && !now.Before(p.due):
			s.readyLocked(k, p)
		}
	}
	if u := s.unwritten; u.n > 0 && now.Sub(u.since) >= dropTime {
		s.quiet.Warn("kept", "the store has refused writes for long: they hold at this registrar alone, and are lost if it ends before the store takes them",
			"writes", u.n, "for", now.Sub(u.since).Round(time.Second), "err", u.err)
	}
}

// comeSoFar reports whether the store's watch is not behind a write that was done; where
// it cannot be told, confirmTime alone counts.
func (s *Server) comeSoFar(p *pending) bool {
	st, ok := s.cfg.Store.(registry.Positioned)
	return !ok || st.Shown(p.at)
}

// startWrites begins as many writes as there is room for.
func (s *Server) startWrites(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.inflight < maxWrites {
		var k podKey
		again := false
		switch {
		case len(s.ready) > 0:
			k, s.ready = s.ready[0], s.ready[1:]
		case len(s.again) > 0 && s.inflightAgain < maxAgain:
			k, s.again = s.again[0], s.again[1:]
			again = true
		default:
			return
		}
		p := s.pending[k]
		if p != nil && again {
			p.inAgain = false
		}
		if p == nil || !p.queued {
			continue // given up meanwhile, or it stood in both
		}
		p.queued, p.writing, p.seen = false, true, false
		s.inflight++
		if again {
			s.inflightAgain++
		}
		e, gen, said := p.endpoint, p.gen, p.said
		s.writers.Go(func() {
			ctx, stop := context.WithTimeout(ctx, writeTime)
			defer stop()
			var err error
			if e != nil {
				err = s.cfg.Store.Put(ctx, p.name, e)
			} else {
				err = s.cfg.Store.Delete(ctx, p.name, k.ip, said)
			}
			s.wrote(k, p, gen, again, err)
		})
	}
}

// wrote takes how a write ended, which was one of Server.again or was not.
func (s *Server) wrote(k podKey, p *pending, gen uint64, again bool, err error) {
	late := errors.Is(err, registry.ErrOutdated)
	switch {
	case late:
		s.outdated.Inc()
	case err != nil:
		s.writeErrors.Inc()
		s.quiet.Warn("write", "the store does not take a registration: it is tried again", "service", k.service, "ip", k.ip, "err", err)
	default:
		s.writes.Inc()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inflight--
	if again {
		s.inflightAgain--
	}
	p.writing = false
	now := time.Now()
	switch {
	case s.pending[k] != p: // overtaken meanwhile
	case p.gen != gen:
		s.readyLocked(k, p)
	case err == nil || late:
		p.err = nil
		p.written = now // or what the store has instead, which its watch shows
		if st, ok := s.cfg.Store.(registry.Positioned); ok {
			p.at = st.Position()
		}
		if p.shown() {
			s.releaseLocked(k, p)
		}
	default:
		if errors.Is(err, registry.ErrUnfit) {
			p.unfit++
		}
		p.err = err
		p.backoff = min(max(2*p.backoff, minBackoff), maxBackoff)
		p.due = now.Add(p.backoff - rand.N(p.backoff/4))
	}
	s.poke() // there is room for another
}

// flush writes what is owed to the store before the server ends.
func (s *Server) flush(ctx context.Context) {
	ctx, stop := context.WithTimeout(ctx, flushTime)
	defer stop()
	s.mu.Lock()
	for k, p := range s.pending {
		if p.written.IsZero() {
			s.readyLocked(k, p)
		}
	}
	s.mu.Unlock()
	for {
		s.startWrites(ctx)
		s.mu.Lock()
		idle := s.inflight == 0 && len(s.ready) == 0 && len(s.again) == 0
		s.mu.Unlock()
		if idle || ctx.Err() != nil {
			break
		}
		select {
		case <-s.kick:
		case <-ctx.Done():
		}
	}
	stop()
	s.writers.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	owed := 0
	for _, p := range s.pending {
		if p.written.IsZero() {
			owed++
		}
	}
	if owed > 0 {
		s.dropped.Add(uint64(owed))
		s.log.Warn("registrations that the store has not taken end with this registrar: nodes register again", "number", owed)
	}
}
