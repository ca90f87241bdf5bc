package engine

import (
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/mtls/record"
)

// ErrHopFull: too many requests wait for a session to one destination.
var ErrHopFull = errors.New("engine: too many requests wait for a session to this destination")

// ErrSilent: the peer of a session answers nothing any more, not even PING.
var ErrSilent = errors.New("engine: the peer of the session answers nothing any more, not even PING")

// DialHop makes one session: a connected socket whose handshake is done, out
// of the Go poller, and its record layer. It runs in its own goroutine and
// ends by its own deadlines.
// life is how long the session may take new requests.
type DialHop func(ctx context.Context) (fd int, rec record.Conn, life time.Duration, err error)

// Hop is the sessions of one key (design 4.7) on one loop. All methods run on it.
type Hop struct {
	l       *Loop
	pod     *Pod
	dial    DialHop
	empty   func()    // called when no session is left and none is being made
	conns   []*h2conn // take new requests
	old     []*h2conn // take none any more, by age or GOAWAY; their streams go on
	waiters []waiter
	dialing bool
	closed  bool
	cancel  context.CancelFunc
}

// waiter is a request that waits for a session. Its exchange may end meanwhile.
type waiter struct {
	x   *exchange.Exchange
	gen uint32
}

func (w waiter) alive() bool { return w.x.Gen == w.gen && !w.x.Over() }

// NewHop makes a hop without a session. empty is called whenever the last session is gone.
func (l *Loop) NewHop(pod *Pod, dial DialHop, empty func()) *Hop {
	h := &Hop{l: l, pod: pod, dial: dial, empty: empty}
	l.hops[h] = struct{}{}
	return h
}

// Send sends x over a session that has room, or over a new one once it is there.
func (h *Hop) Send(x *exchange.Exchange) {
	if c := h.room(); c != nil {
		c.request(x)
		return
	}
	if h.closed || len(h.waiters) >= maxWaiters {
		x.Cause = ErrHopFull
		x.ResponseGone(exchange.Refused)
		return
	}
	x.Park()
	h.waiters = append(h.waiters, waiter{x, x.Gen})
	h.more()
}

func (h *Hop) room() *h2conn {
	for i := 0; i < len(h.conns); {
		c := h.conns[i]
		if c.retireAt < h.l.Now() {
			c.goaway = true // a fresh session shows a fresh certificate
			c.mark()
			h.aside(c)
			continue
		}
		if !c.goaway && !c.closed && c.h2.Available() > 0 {
			return c
		}
		i++
	}
	return nil
}

// aside takes c out of use, so that it is in no other session's way.
func (h *Hop) aside(c *h2conn) {
	if i := slices.Index(h.conns, c); i >= 0 {
		h.conns = slices.Delete(h.conns, i, i+1)
		h.old = append(h.old, c)
	}
}

// more dials a further session if the key may have one.
func (h *Hop) more() {
	if h.dialing || h.closed || len(h.conns) >= maxSessions {
		return
	}
	h.dialing = true
	ctx, cancel := context.WithCancel(h.l.eng.ctx)
	h.cancel = cancel
	h.l.eng.wg.Go(func() {
		fd, rec, life, err := h.dial(ctx)
		cancel()
		if perr := h.l.Post(func() { h.dialled(fd, rec, life, err) }); perr != nil && err == nil {
			unix.Close(fd)
		}
	})
}

func (h *Hop) dialled(fd int, rec record.Conn, life time.Duration, err error) {
	h.dialing = false
	if err == nil && h.closed {
		unix.Close(fd)
		return
	}
	if err == nil {
		var c *h2conn
		if c, err = h.l.newHopConn(h.pod, fd, rec, h); err != nil {
			unix.Close(fd)
		} else {
			c.retireAt = h.l.Now() + int64(max(life-lifeMargin, life/2))
			h.conns = append(h.conns, c)
			h.wake()
			return
		}
	}
	for n := len(h.waiters); n > 0; n-- { // those that are here now: one that failed may come again
		w := h.waiters[0]
		h.waiters = h.waiters[1:]
		if w.alive() {
			w.x.Cause = err
			w.x.ResponseGone(exchange.Connect)
		}
	}
	h.check()
}

// wake gives waiting requests to sessions that have room again.
func (h *Hop) wake() {
	for len(h.waiters) > 0 {
		w := h.waiters[0]
		if w.alive() {
			c := h.room()
			if c == nil {
				h.more()
				return
			}
			h.waiters = h.waiters[1:]
			c.request(w.x)
			continue
		}
		h.waiters = h.waiters[1:]
	}
	h.waiters = nil
}

// retire takes a session out of use; its streams go on.
func (h *Hop) retire(c *h2conn) {
	h.aside(c)
	h.wake()
	h.check()
}

// lost forgets a session that ends.
func (h *Hop) lost(c *h2conn) {
	h.aside(c)
	if i := slices.Index(h.old, c); i >= 0 {
		h.old = slices.Delete(h.old, i, i+1)
	}
	h.wake()
	h.check()
}

func (h *Hop) check() {
	if len(h.conns)+len(h.old) == 0 && !h.dialing && len(h.waiters) == 0 {
		delete(h.l.hops, h)
		if h.empty != nil && !h.closed {
			h.closed = true
			h.empty()
		}
	}
}

// Close ends all sessions at once (identity revoked, endpoint or pod gone).
func (h *Hop) Close(cause error) {
	if h.closed {
		return
	}
	h.closed = true
	delete(h.l.hops, h)
	if h.cancel != nil {
		h.cancel()
	}
	q := h.waiters
	h.waiters = nil
	for _, w := range q {
		if w.alive() {
			w.x.Cause = cause
			w.x.ResponseGone(exchange.Closed)
		}
	}
	for _, c := range slices.Concat(h.conns, h.old) {
		c.end(exchange.Closed)
	}
	if h.empty != nil {
		h.empty()
	}
}
