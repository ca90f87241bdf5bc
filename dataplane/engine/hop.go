package engine

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/reactor"
	"aether/mtls/record"
)

// ErrHopFull: too many requests wait for a session to one destination, or for a
// connection of an HTTP/2 application.
var ErrHopFull = errors.New("engine: too many requests wait for a session to this destination")

// ErrSilent: the peer of a session answers nothing any more, not even PING.
var ErrSilent = errors.New("engine: the peer of the session answers nothing any more, not even PING")

// ErrTardy: the peer began a frame, or a header block, of HTTP/2, or a TLS record under it, and did not end it in time.
var ErrTardy = errors.New("engine: the peer began an HTTP/2 frame, header block or TLS record and did not end it in time")

// DialHop makes one session: a connected socket whose handshake is done, out
// of the Go poller, and its record layer. It runs in its own goroutine and
// ends by its own deadlines.
// bond is what the session lives by; a while before it ends as it was at first the session takes no new requests.
type DialHop func(ctx context.Context) (fd int, rec record.Conn, bond Bond, err error)

// Hop is the sessions of one key (contract 5.2) on one loop. All methods run on it.
type Hop struct {
	sessions
	pod     *Pod
	dial    DialHop
	empty   func() // called when no session is left and none is being made
	dialing bool   // or in the queue for it
	cancel  context.CancelFunc
	group   *HopGroup     // nil: none
	again   reactor.Timer // to dial, after a pause; to end what Leave left
	leaving error         // why it takes no more requests; nil: it does
}

// sessions are the HTTP/2 connections to one destination, and the requests
// that wait for one of them: each takes as many streams at once as its peer allows.
type sessions struct {
	l       *Loop
	conns   []*h2conn // take new requests
	old     []*h2conn // take none any more, by age or GOAWAY; their streams go on
	waiters []waiter
	more    func() // makes a further connection, if there may be one
	check   func() // one has ended: perhaps nothing is left
	closed  bool
	bare    int    // connections in a row that ended, or were sent away, without a request
	pause   int64  // a hop: no dial before this time
	name    string // of the Unix socket that they are to; empty: an address
}

// waiter is a request that waits for a session. Its exchange may end meanwhile, or wait elsewhere.
type waiter struct {
	x   *exchange.Exchange
	gen uint32
}

func (w waiter) alive() bool { return w.x.Gen == w.gen && !w.x.Over() && !w.x.Answered() }

// NewHop makes a hop without a session. empty is called whenever the last session is gone.
func (l *Loop) NewHop(pod *Pod, dial DialHop, empty func()) *Hop {
	h := &Hop{pod: pod, dial: dial, empty: empty}
	h.sessions = sessions{l: l, more: h.dialMore, check: h.emptied}
	l.hops[h] = struct{}{}
	return h
}

// Send sends x over a session that has room, or over a new one once it is there.
func (h *Hop) Send(x *exchange.Exchange) {
	if h.leaving != nil {
		x.Cause = h.leaving
		x.ResponseGone(exchange.Connect)
		return
	}
	h.send(x)
}

func (s *sessions) send(x *exchange.Exchange) {
	if len(s.waiters) == 0 { // else they come first
		if c := s.room(x.Req.Upgrade != nil); c != nil {
			c.request(x)
			return
		}
	}
	if len(s.waiters) >= maxWaiters { // some may wait no more
		s.waiters = slices.DeleteFunc(s.waiters, func(w waiter) bool { return !w.alive() })
	}
	if s.closed || len(s.waiters) >= maxWaiters {
		x.Cause = ErrHopFull
		x.ResponseGone(exchange.Refused)
		return
	}
	x.Park()
	s.waiters = append(s.waiters, waiter{x, x.Gen})
	s.wake()
}

// room returns a session that takes a request now. A new one takes a single
// request until it has said how many it takes: what it refused would have been sent for nothing.
// tunnel: the request needs to know what the peer allows, and so waits for its SETTINGS.
func (s *sessions) room(tunnel bool) *h2conn {
	for i := 0; i < len(s.conns); {
		c := s.conns[i]
		if c.retireAt < s.l.Now() {
			c.goaway = true // a fresh session shows a fresh certificate
			c.mark()
			s.aside(c)
			continue
		}
		if !c.goaway && !c.closed && !c.ended() && c.h2.Available() > 0 && (c.h2.Settled() || c.h2.Streams() == 0 && !tunnel) {
			return c
		}
		i++
	}
	return nil
}

// ended reports whether the peer has ended the session, of which the loop will be told.
func (c *h2conn) ended() bool {
	const ends = reactor.PeerEnd | reactor.Hangup | reactor.Error
	return c.fin || c.l.Pending(c.fd)&ends != 0
}

// unsettled reports whether a session may have room as soon as its peer says so.
func (s *sessions) unsettled() bool {
	return slices.ContainsFunc(s.conns, func(c *h2conn) bool { return !c.h2.Settled() && !c.goaway && !c.closed })
}

// aside takes c out of use, so that it is in no other session's way.
func (s *sessions) aside(c *h2conn) {
	if i := slices.Index(s.conns, c); i >= 0 {
		s.conns = slices.Delete(s.conns, i, i+1)
		s.old = append(s.old, c)
		if c.requests > 0 {
			s.bare = 0
			return
		}
		d := min(leastPause<<min(s.bare, 10), mostPause)
		s.bare++
		s.pause = s.l.Now() + d/2 + rand.Int64N(d/2+1)
	}
}

// wake gives waiting requests to sessions that have room again.
func (s *sessions) wake() {
	for len(s.waiters) > 0 {
		w := s.waiters[0]
		if w.alive() {
			c := s.room(w.x.Req.Upgrade != nil)
			if c == nil {
				if !s.unsettled() {
					s.more()
				}
				return
			}
			s.waiters = s.waiters[1:]
			c.request(w.x)
			continue
		}
		s.waiters = s.waiters[1:]
	}
	s.waiters = nil
}

// fail tells those that wait now: one that comes again waits anew.
func (s *sessions) fail(cause error, code exchange.Code) {
	for n := len(s.waiters); n > 0 && len(s.waiters) > 0; n-- {
		w := s.waiters[0]
		s.waiters = s.waiters[1:]
		if w.alive() {
			w.x.Cause = cause
			w.x.ResponseGone(code)
		}
	}
}

// retire takes a session out of use; its streams go on.
func (s *sessions) retire(c *h2conn) {
	s.aside(c)
	s.wake()
	s.check()
}

// lost forgets a session that ends.
func (s *sessions) lost(c *h2conn, code exchange.Code) {
	s.aside(c)
	if i := slices.Index(s.old, c); i >= 0 {
		s.old = slices.Delete(s.old, i, i+1)
	}
	if code == exchange.Connect || !s.closed && !c.h2.Settled() { // the next would fail alike
		s.fail(c.cause, exchange.Connect)
	}
	s.wake()
	s.check()
}

// close ends all sessions at once.
func (s *sessions) close(cause error, code exchange.Code) {
	s.closed = true
	s.fail(cause, code)
	for _, c := range slices.Concat(s.conns, s.old) {
		c.cause = cause
		c.end(code)
	}
}

// dialMore dials a further session if the key may have one.
func (h *Hop) dialMore() {
	if h.dialing || h.closed || h.leaving != nil || !h.mayDial() {
		return
	}
	if d := h.pause - h.l.Now(); d > 0 {
		h.l.Arm(&h.again, (*redial)(h), d)
		return
	}
	h.dialing = true
	sh := h.pod.share(h.l)
	if sh.dials >= podDials {
		sh.dialq = append(sh.dialq, h)
		return
	}
	h.dialNow(sh)
}

// redial is a hop as the task of its timer: the pause after sessions that carried
// nothing is over. A peer that sends everybody away is not met with handshakes alone.
type redial Hop

// Run is reactor.Task.
func (v *redial) Run() {
	h := (*Hop)(v)
	h.wake()
	h.check()
}

// Fail is reactor.Task.
func (v *redial) Fail(cause error) { (*Hop)(v).fail(cause, exchange.Connect) }

// dialNow dials; it is its turn.
func (h *Hop) dialNow(sh *share) {
	sh.dials++
	ctx, cancel := context.WithCancel(h.l.eng.ctx)
	h.cancel = cancel
	h.l.eng.wg.Go(func() {
		fd, rec, bond, err := h.dial(ctx)
		cancel()
		if perr := h.l.Post(func() { sh.dialled(); h.dialled(fd, rec, bond, err) }); perr != nil && err == nil {
			unix.Close(fd)
			bond.Release()
		}
	})
}

// dialled gives the place of a dial that is over to the hop that waits longest.
func (s *share) dialled() {
	s.dials--
	for len(s.dialq) > 0 && s.dials < podDials {
		h := s.dialq[0]
		s.dialq[0] = nil
		if s.dialq = s.dialq[1:]; h.leaving != nil {
			h.dialing = false
			h.emptied()
		} else if !h.closed {
			h.dialNow(s)
		}
	}
}

func (h *Hop) dialled(fd int, rec record.Conn, bond Bond, err error) {
	h.dialing = false
	if err == nil && (h.closed || h.leaving != nil) {
		unix.Close(fd)
		bond.Release()
		h.check()
		return
	}
	if err == nil {
		var c *h2conn
		if c, err = h.l.newHopConn(h.pod, fd, rec, &h.sessions); err != nil {
			unix.Close(fd)
			bond.Release()
		} else {
			c.bind(bond)
			life := time.Duration(c.until - h.l.Now())
			c.retireAt = h.l.Now() + int64(max(life-lifeMargin, life/2))
			h.conns = append(h.conns, c)
			h.wake()
			return
		}
	}
	h.fail(err, exchange.Connect)
	h.check()
}

func (h *Hop) emptied() {
	if len(h.conns)+len(h.old) == 0 && !h.dialing && len(h.waiters) == 0 {
		delete(h.l.hops, h)
		h.l.Disarm(&h.again)
		if h.empty != nil && !h.closed {
			h.closed = true
			h.leaveGroup()
			h.empty()
		}
	}
}

// Close ends all sessions at once (identity revoked, endpoint unhealthy). Requests under
// way fail as Closed; those that wait, of which nothing was sent, as Connect.
func (h *Hop) Close(cause error) { h.shut(cause, exchange.Connect) }

// Leave takes no more requests (endpoint gone): those that wait fail as Connect, sessions
// without a stream are closed at once, the others when their streams have ended, or
// after leaveTime with cause, as by Close.
func (h *Hop) Leave(cause error) {
	if h.closed || h.leaving != nil {
		return
	}
	h.leaving = cause
	if h.cancel != nil {
		h.cancel()
	}
	h.fail(cause, exchange.Connect)
	for _, c := range slices.Concat(h.conns, h.old) {
		c.goaway = true
		h.aside(c)
		if c.h2.Streams() == 0 {
			c.cause = cause
			c.end(exchange.Closed)
		}
	}
	if !h.closed {
		h.l.Arm(&h.again, (*leave)(h), leaveTime)
		h.emptied()
	}
}

// leave is a hop as the task of its timer: what is under way at an endpoint that has left ends now.
type leave Hop

// Run is reactor.Task.
func (v *leave) Run() { (*Hop)(v).Close((*Hop)(v).leaving) }

// Fail is reactor.Task.
func (v *leave) Fail(error) { v.Run() }
