package engine

import (
	"context"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/reactor"
	"aether/mtls/record"
)

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

// NewHop makes a hop without a session. empty is called whenever the last session is gone.
func (l *Loop) NewHop(pod *Pod, dial DialHop, empty func()) *Hop {
	h := &Hop{pod: pod, dial: dial, empty: empty}
	h.sessions = sessions{l: l, more: h.dialMore, check: h.emptied}
	pod.share(l).resources[h] = struct{}{}
	return h
}

// Send sends x over a session that has room, or over a new one once it is there.
func (h *Hop) Send(x *exchange.Exchange) {
	if h.leaving != nil {
		x.Cause = h.leaving
		x.UpstreamClosed(exchange.Connect)
		return
	}
	h.send(x)
}

// dialMore dials a further session if the key may have one.
func (h *Hop) dialMore() {
	if h.dialing || h.closed || h.leaving != nil || !h.mayDial() {
		return
	}
	if d := h.pause - h.l.Now(); d > 0 {
		h.l.Arm(&h.again, (*redialTimer)(h), d)
		return
	}
	h.dialing = true
	d := h.l.dialsOf(h.pod)
	if d.dials >= podDials {
		d.dialq = append(d.dialq, h)
		return
	}
	h.dialNow(d)
}

// redialTimer is a hop as the task of its timer: the pause after sessions that carried
// nothing is over. A peer that sends everybody away is not met with handshakes alone.
type redialTimer Hop

// Run is reactor.Task.
func (v *redialTimer) Run() {
	h := (*Hop)(v)
	h.wake()
	h.check()
}

// Fail is reactor.Task.
func (v *redialTimer) Fail(cause error) { (*Hop)(v).fail(cause, exchange.Connect) }

// dialNow dials; it is its turn.
func (h *Hop) dialNow(d *dialQueue) {
	d.dials++
	ctx, cancel := context.WithCancel(h.l.proc.ctx)
	h.cancel = cancel
	h.l.proc.wg.Go(func() {
		fd, rec, bond, err := h.dial(ctx)
		cancel()
		if perr := h.l.Post(func() { d.dialled(); h.dialled(fd, rec, bond, err) }); perr != nil && err == nil {
			unix.Close(fd)
			bond.Release()
		}
	})
}

// nextDial is dialWaiter.
func (h *Hop) nextDial(d *dialQueue) {
	if h.leaving != nil {
		h.dialing = false
		h.emptied()
	} else if !h.closed {
		h.dialNow(d)
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
		delete(h.pod.share(h.l).resources, h)
		h.l.Disarm(&h.again)
		if h.empty != nil && !h.closed {
			h.closed = true
			h.leaveGroup()
			h.empty()
		}
	}
}

// podGone is resource: nothing is to be tried again for the pod.
func (h *Hop) podGone() { h.shut(errPodGone, exchange.Closed) }

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
		h.l.Arm(&h.again, (*leaveTimer)(h), leaveTime)
		h.emptied()
	}
}

// leaveTimer is a hop as the task of its timer: what is under way at an endpoint that has left ends now.
type leaveTimer Hop

// Run is reactor.Task.
func (v *leaveTimer) Run() { (*Hop)(v).Close((*Hop)(v).leaving) }

// Fail is reactor.Task.
func (v *leaveTimer) Fail(error) { v.Run() }

// Sessions calls f with the hop's sessions, and with one that is being dialled; wall is
// the time of day. On the loop.
func (h *Hop) Sessions(wall time.Time, f func(SessionState)) {
	now := h.l.Now()
	base := SessionState{Pod: h.pod.Name, Loop: h.l.ID(), Waiting: len(h.waiters)}
	tell := func(c *h2conn, state string) {
		s := base
		s.State, s.Streams, s.Requests = state, c.h2.Streams(), c.requests
		s.AgeMS, s.IdleMS = (now-c.born)/1e6, (now-c.active)/1e6
		s.BytesIn, s.BytesOut = c.rx, c.tx
		s.Until = wall.Add(c.bond.Left()).UTC().Truncate(time.Second)
		f(s)
	}
	for _, c := range h.conns {
		switch {
		case c.goaway || c.retireAt < now:
			tell(c, "drain")
		case c.h2.Available() == 0:
			tell(c, "full")
		default:
			tell(c, "ready")
		}
	}
	for _, c := range h.old {
		tell(c, "drain")
	}
	if h.dialing {
		s := base
		s.State = "connect"
		f(s)
	}
}

// HopGroup bounds the sessions of hops to one endpoint, on one loop. Its methods run there.
type HopGroup struct {
	Max  int // sessions of all hops together; a hop's first one is always made
	hops []*Hop
}

// Join makes h, which has no session yet, one of g's hops until h is closed or empty.
func (h *Hop) Join(g *HopGroup) {
	h.group = g
	g.hops = append(g.hops, h)
}

// Open counts the hop's sessions, those that take no new requests too, and not one
// that is being made.
func (h *Hop) Open() int { return len(h.conns) + len(h.old) }

// Empty reports whether no hop is left.
func (g *HopGroup) Empty() bool { return len(g.hops) == 0 }

// mayDial reports whether h may have one more session.
func (h *Hop) mayDial() bool {
	if len(h.conns) >= maxSessions {
		return false
	}
	if h.group == nil || len(h.conns) == 0 {
		return true
	}
	n := 0
	for _, o := range h.group.hops {
		if n += o.Open(); o.dialing {
			n++
		}
	}
	return n < h.group.Max
}

func (h *Hop) leaveGroup() {
	if g := h.group; g != nil {
		h.group = nil
		g.hops = slices.DeleteFunc(g.hops, func(o *Hop) bool { return o == h })
	}
}

// shut ends all sessions at once; waiting is what requests are told that wait for one.
func (h *Hop) shut(cause error, waiting exchange.Code) {
	if h.closed {
		return
	}
	delete(h.pod.share(h.l).resources, h)
	h.l.Disarm(&h.again)
	h.leaveGroup()
	if h.cancel != nil {
		h.cancel()
	}
	h.closed = true
	h.fail(cause, waiting)
	h.close(cause, exchange.Closed)
	if h.empty != nil {
		h.empty()
	}
}
