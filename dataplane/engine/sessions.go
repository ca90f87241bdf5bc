package engine

import (
	"aether/dataplane/exchange"
	"errors"
	"math/rand/v2"
	"slices"
)

// ErrHopFull: too many requests wait for a session to one destination, or for a
// connection of an HTTP/2 application.
var ErrHopFull = errors.New("engine: too many requests wait for a session to this destination")

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
		x.UpstreamClosed(exchange.Refused)
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
			w.x.UpstreamClosed(code)
		}
	}
}

// retired takes a session out of use; its streams go on.
func (s *sessions) retired(c *h2conn) {
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

// freed gives the place of a stream that has ended to a request that waits.
func (s *sessions) freed() {
	if len(s.waiters) > 0 {
		s.wake()
	}
}
