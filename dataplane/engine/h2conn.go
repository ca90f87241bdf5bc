package engine

import (
	"cmp"
	"slices"
	"syscall"
	"time"

	"aether/dataplane/exchange"
	"aether/dataplane/http2"
	"aether/dataplane/reactor"
)

func (c *h2conn) start(first []byte) {
	c.arm()
	if c.l.shut {
		c.farewell()
	} else if c.l.draining { // it serves for a moment: peers that come back at once are not to do nothing but shake hands
		c.l.Arm(&c.life, (*drainTimer)(c), warnAfter)
	}
	if len(first) > 0 {
		c.left = append(c.l.getOut(), first...)
		c.unfed = true
	}
	c.mark()
	c.bind(c.info.Bond)
	c.info.tie(c)
}

// sever is severed. Which requests were taken is said, so that the client may send the others anew.
func (c *h2conn) sever(cause error) {
	if c.closed {
		return
	}
	c.farewell()
	c.cause, c.severed = cause, true
	left := leaveTime
	if c.bond != nil {
		left = max(min(left, int64(c.bond.Left())), 1)
	}
	c.l.Arm(&c.cut, (*expiryTimer)(c), left)
}

func (c *h2conn) arm() {
	d := idleDown
	if c.client {
		d = idleHop
	}
	c.l.Arm(&c.timer, c, c.l.limit(d))
}

// Event is reactor.Source.
func (c *h2conn) Event(ev uint32) {
	if c.connecting {
		if ev&(reactor.Writable|reactor.Error|reactor.Hangup) == 0 {
			return
		}
		if err := c.connectError(); err != nil {
			c.end(exchange.Connect)
			return
		}
		c.connecting, c.wblk = false, false
		c.l.Disarm(&c.timer)
		c.arm()
		c.mark()
	}
	if ev&reactor.Writable != 0 && c.wblk && !c.unsent {
		c.wblk = false
		c.mark()
	}
	if ev&^reactor.Writable != 0 {
		c.edge(ev)
		c.pump()
	}
}

// Fail is reactor.Source, Flusher and Task.
func (c *h2conn) Fail(error) { c.end(exchange.Closed) }

// Run is reactor.Task.
func (c *h2conn) Run() {
	if c.closed {
		return
	}
	if !c.later {
		c.tick()
		return
	}
	c.later, c.queued = false, false
	if len(c.h2.Out())+len(c.sealed) > 0 {
		c.mark()
	}
	c.pump()
	if !c.closed && !c.timer.Armed() { // it was the timer
		c.tick()
	}
}

func (c *h2conn) pump() {
	if c.pumping || c.connecting {
		return
	}
	c.pumping = true
	defer func() { c.pumping = false; c.tell() }()
	buf := c.l.Scratch[:]
	for !c.closed {
		if !c.client && len(c.h2.Out()) > h2OutMax {
			c.full = true // it asks faster than it reads the answers; Flush goes on
			c.keepReadBuffer()
			return
		}
		if c.behind {
			if c.sh.readSpent() {
				c.keepReadBuffer()
				c.yield(c)
				return
			}
			if !c.feed(buf[:copy(buf, c.left)]) {
				return
			}
			continue
		}
		if c.stuffed() {
			if c.keepReadBuffer(); !c.hop && !c.mesh { // else stallTimer looks again
				c.await(c)
			}
			return
		}
		k := copy(buf, c.left)
		n, err := c.read(buf[k:])
		switch err {
		case nil:
		case errAgain:
			c.watchRecord()
			return
		case errYield:
			c.yield(c)
			return
		default:
			c.cause = err
			c.end(exchange.Closed)
			return
		}
		c.unfed = false
		c.owed, c.pinged = 0, 0
		if now := c.l.Now(); now-c.ticked >= tickAfter {
			c.ticked = now
			c.h2.Tick()
		}
		if !c.feed(buf[:k+n]) {
			return
		}
		if c.hop && c.h2.Streams() > 0 { // it owes more
			c.owed = c.l.Now()
		}
		c.freed() // SETTINGS may have come
	}
}

// feed parses b and keeps what is not a whole frame yet.
func (c *h2conn) feed(b []byte) bool {
	n, err := c.h2.Feed(b)
	c.behind = c.h2.Paused()
	c.watch(n, len(b))
	c.settle()
	c.wantReap()
	c.mark()
	if c.closed {
		return false
	}
	if err != nil && c.info != nil && c.info.OnRefused != nil && c.h2.Streams() == 0 { // else they tell of it
		c.info.OnRefused(c.info, 400, err)
	}
	if err != nil { // GOAWAY is queued; streams end with the connection
		c.flushOut(true)
		c.end(exchange.Protocol)
		return false
	}
	if n == len(b) {
		if c.left != nil {
			c.l.putOut(c.left)
			c.left = nil
		}
		return true
	}
	if c.left == nil {
		c.left = c.l.getOut()
	}
	c.left = append(c.left[:0], b[n:]...)
	return true
}

// watch notes when what has not ended began, after n of have bytes were used: a frame of
// which only a part is here, or a header block.
func (c *h2conn) watch(n, have int) {
	id := c.h2.Block()
	c.inRecord = false
	switch {
	case id == 0 && (n == have || c.behind):
		c.begun = 0
	case c.begun == 0 || id != c.block || id == 0 && n > 0:
		c.begin()
	}
	c.block = id
}

// begin notes that something has begun that is to end.
func (c *h2conn) begin() {
	if c.begun = c.l.Now(); !c.slow.Armed() {
		c.l.Arm(&c.slow, (*frameTimer)(c), c.l.limit(headTime))
	}
}

// watchRecord is watch for a record of TLS, all of what came having been read.
func (c *h2conn) watchRecord() {
	if c.rec == nil {
		return
	}
	switch part := c.rec.Partial(); {
	case part && c.begun == 0:
		c.inRecord = true
		c.begin()
	case !part && c.inRecord:
		c.inRecord, c.begun = false, 0
	}
}

// end closes the connection; its streams' exchanges are told.
func (c *h2conn) end(code exchange.Code) {
	if c.closed {
		return
	}
	c.goaway, c.ending, c.endCode, c.had = true, true, code, c.taken()
	if c.owner != nil {
		c.owner.lost(c, code) // first: what is sent anew is not to come back here
	}
	if code == exchange.Connect {
		c.h2.Abort(http2.RefusedStream)
	} else {
		c.h2.Abort(http2.Cancel)
	}
	c.l.Disarm(&c.life)
	c.l.Disarm(&c.stuff)
	c.l.Disarm(&c.cut)
	c.l.Disarm(&c.slow)
	if c.hop {
		c.l.Gauges.Sessions.Add(-1)
	}
	c.shut(false)
	if c.left != nil {
		c.l.putOut(c.left)
		c.left = nil
	}
	c.tell() // what outlives it
	c.wantReap()
	if c.bond != nil {
		c.bond.Release()
	}
	if c.info != nil && c.info.OnClose != nil {
		c.info.OnClose(c.info)
	}
}

// flushOut writes what is queued, and reports whether nothing is left to do now; all:
// whatever the pod has sent in this iteration.
func (c *h2conn) flushOut(all bool) bool {
	for !c.wblk && !c.closed {
		out := c.h2.Out()
		if len(out) == 0 && len(c.sealed) == 0 {
			return true
		}
		if !all && c.sh.writeSpent() {
			c.yield(c)
			return false
		}
		n, err := c.write(out)
		if n > 0 {
			c.h2.Sent(n)
		}
		if err != nil {
			c.cutOff(err)
			return false
		}
	}
	return false
}

// cutOff: a write failed. A peer may answer whole and go without reading the rest of what
// it is sent: of our own requests, what it sent before is read to its end first.
func (c *h2conn) cutOff(err error) {
	if _, socket := err.(syscall.Errno); !c.client || !socket || c.unsent {
		c.end(exchange.Closed)
		return
	}
	c.unsent, c.wblk, c.goaway = true, true, true
	c.ready, c.fin = true, true
	if c.owner != nil {
		c.owner.retired(c)
	}
	c.pump()
}

// Flush is reactor.Flusher.
func (c *h2conn) Flush() {
	c.dirty = false
	if c.closed {
		return
	}
	if c.unfed {
		c.unfed = false
		if !c.feed(c.l.Scratch[:copy(c.l.Scratch[:], c.left)]) {
			return
		}
	}
	if c.readable() || c.behind {
		c.pump()
	}
	if c.closed {
		return
	}
	defer c.tell()
	if _, err := c.h2.Feed(nil); err != nil { // heads that are not read
		c.end(exchange.Protocol)
		return
	}
	if !c.flushOut(false) {
		return
	}
	if c.full {
		c.full = false
		c.mark()
		return
	}
	if !c.slack && c.h2.Slack() > keepSlack { // a burst is over, if no other follows at once
		c.slack = true
		c.l.Arm(&c.timer, c, trimAfter)
	}
	if c.h2.Streams() == 0 {
		if c.h2.Done() || c.goaway && c.client {
			c.end(exchange.NoError)
			return
		}
		c.l.Arm(&c.timer, c, trimAfter) // the next request may come at once: what it needs is kept so long
	}
}

// Show is Shown. Hop sessions are shown by Hop.Sessions.
func (c *h2conn) Show(s *ConnState) bool {
	if c.closed || c.hop {
		return false
	}
	c.show(s)
	s.Protocol, s.Requests, s.Streams = "h2", c.requests, c.h2.Streams()
	switch {
	case c.connecting:
		s.State = "connect"
	case c.closing || c.goaway:
		s.State = "drain"
	case s.Streams > 0:
		s.State = "stream"
	default:
		s.State = "idle"
	}
	if c.client {
		if s.Role = "application"; c.socket != "" {
			s.Socket = c.socket
		} else {
			s.Destination = PeerAddr(c.fd)
		}
		return true
	}
	s.Client = PeerAddr(c.fd)
	if d, ok := c.info.User.(Describer); ok {
		d.Describe(s)
	}
	return true
}

// bind ends the connection with b, unless that is renewed meanwhile; nil: it has no end.
func (c *h2conn) bind(b Bond) {
	if c.bond = b; b != nil {
		(*expiryTimer)(c).arm(int64(b.Left()))
	}
}

// expiryTimer is a connection as the task of its timer: its identity has ended, or, of a client's, will soon; of one of ours its
// renewal is due.
type expiryTimer h2conn

// renewedBy is by how much a bond ends later where it has been renewed: below it is two clocks that differ.
const renewedBy = int64(100 * time.Millisecond)

// arm sets the timer where the bond has left to go, which was not known yet.
func (v *expiryTimer) arm(left int64) {
	c := (*h2conn)(v)
	c.until = c.l.Now() + left
	next := max(left-goawayTime, left/2) // to tell the client
	switch {
	case c.client:
		next = min(left, int64(c.bond.Ask(c.h2.Streams() > 0)))
	case c.closing:
		next = left // it was told
	}
	c.l.Arm(&c.cut, v, max(next, 1))
}

// Run is reactor.Task.
func (v *expiryTimer) Run() {
	c := (*h2conn)(v)
	if !c.severed {
		left := int64(c.bond.Left())
		switch {
		case left <= 0:
			c.cause = ErrExpired
		case c.client, c.l.Now()+left > c.until+renewedBy:
			v.arm(left)
			return
		default:
			c.drain()
			c.l.Arm(&c.cut, v, left)
			return
		}
	}
	c.end(exchange.Closed)
}

// Fail is reactor.Task.
func (v *expiryTimer) Fail(cause error) { (*h2conn)(v).Fail(cause) }

// pingTimer is a hop session as the task of its own timer. A peer that owes an
// answer and has been silent is asked whether it is still there: a network that
// drops everything is noticed in seconds, and the next request gets another
// session (case 53). Applications are not asked: servers of gRPC end
// connections whose clients ping often.
type pingTimer h2conn

// Run is reactor.Task.
func (v *pingTimer) Run() {
	c := (*h2conn)(v)
	now := c.l.Now()
	switch {
	case c.closed || c.owed == 0: // the next request starts the timer again
	case c.pinged != 0 && now-c.pinged >= pingWait:
		c.cause = ErrSilent
		c.end(exchange.Closed)
	case c.pinged != 0:
		c.l.Arm(&c.life, v, pingWait-(now-c.pinged))
	case now-c.owed < pingAfter:
		c.l.Arm(&c.life, v, pingAfter-(now-c.owed))
	default:
		c.pinged = now
		c.h2.Ping()
		c.mark()
		c.l.Arm(&c.life, v, pingWait)
	}
}

// Fail is reactor.Task.
func (v *pingTimer) Fail(cause error) { (*h2conn)(v).Fail(cause) }

// tick judges the connection's age, and that of its streams.
func (c *h2conn) tick() {
	if c.closed {
		return
	}
	if c.l.level >= NoKeepAlive && !c.client && !c.closing {
		c.retire()
	}
	now := c.l.Now()
	quiet := now - c.active
	if c.slack && quiet >= trimAfter {
		c.slack = false
		c.h2.Slim()
		c.tell()
	}
	defer func() {
		if c.slack && !c.closed { // sooner than what else the timer is for
			c.l.Arm(&c.timer, c, trimAfter-quiet)
		}
	}()
	limit := idleDown
	if c.client {
		limit = idleHop
	}
	busy := c.h2.Streams() > 0
	if busy {
		limit = idleStream
	}
	limit = c.l.limit(limit)
	switch {
	case c.connecting && quiet < connectTime:
		c.l.Arm(&c.timer, c, connectTime-quiet)
	case c.connecting:
		c.end(exchange.Connect)
	case busy && (quiet < limit || !c.client || c.tunnels > 0):
		c.l.Arm(&c.timer, c, c.expire(now))
	case busy:
		c.end(exchange.Timeout) // nothing at all came: so is what it carries
	case c.closing && quiet < pingWait:
		c.l.Arm(&c.timer, c, pingWait-quiet)
	case c.closing: // the peer does not say that it knows
		c.end(exchange.NoError)
	case quiet < trimAfter:
		c.l.Arm(&c.timer, c, trimAfter-quiet)
	case quiet < limit:
		c.h2.Idle()
		c.tell()
		c.l.Arm(&c.timer, c, limit-quiet)
	case !c.client:
		c.drain()
	default:
		c.h2.Shutdown(http2.NoError)
		c.goaway, c.closing = true, true
		c.active = now // from here on it has pingWait
		c.l.Arm(&c.timer, c, pingWait)
		c.mark()
	}
}

// retire ends a client's connection for want of memory, once its streams have ended.
func (c *h2conn) retire() {
	c.l.proc.shed(ShedKeepAlive)
	c.drain()
}

// expire ends the streams on which no byte of their messages has moved for
// idleStream, however busy the connection is: a client with shut windows would
// hold what its streams hold for ever. It returns when to look again. A
// server's streams have streamGrace more, so that the answer to a request whose
// upstream ran out of time is the service's.
func (c *h2conn) expire(now int64) (next int64) {
	limit := c.l.limit(idleStream)
	if !c.client {
		limit += streamGrace
	}
	next = limit
	late := c.free.late[:0]
	c.h2.Each(func(s *http2.Stream) {
		st, _ := s.User.(*h2stream)
		switch {
		case st == nil || st.tunnel:
		case now-st.moved >= limit:
			late = append(late, st)
		default:
			next = min(next, limit-(now-st.moved))
		}
	})
	for _, st := range late {
		st.expire()
	}
	clear(late)
	c.free.late = late[:0]
	return max(next, int64(time.Second))
}

// tell accounts the buffers as they are now, and has what stalls looked for where they are many.
func (c *h2conn) tell() {
	c.recount()
	if c.held >= fairHeld && (c.client || c.mesh) && !c.stuff.Armed() {
		c.l.Arm(&c.stuff, (*stallTimer)(c), stallLook)
	}
}

// stallTimer is a connection that holds much of many requests, a hop or one to an application, as the
// task of its own timer.
type stallTimer h2conn

// Run is reactor.Task: while the pod holds too much, and is refused new requests
// therefore, the streams whose data nobody has taken for stallTime end, the longest first.
func (v *stallTimer) Run() {
	c := (*h2conn)(v)
	defer c.tell()
	if !c.sh.tight {
		return
	}
	now, late := c.l.Now(), c.free.late[:0]
	if !c.closed {
		c.h2.Each(func(s *http2.Stream) {
			if st, _ := s.User.(*h2stream); st != nil && len(st.pend) > 0 && now-st.moved >= stallTime {
				late = append(late, st)
			}
		})
	}
	for _, st := range c.waits {
		if now-st.moved >= stallTime {
			late = append(late, st)
		}
	}
	slices.SortFunc(late, func(a, b *h2stream) int { return cmp.Compare(a.moved, b.moved) })
	for _, st := range late {
		if c.tell(); !c.sh.tight {
			break
		}
		st.expire()
	}
	clear(late)
	c.free.late = late[:0]
	c.pump()
}

// Fail is reactor.Task.
func (v *stallTimer) Fail(cause error) { (*h2conn)(v).Fail(cause) }

// frameTimer is a connection as the task of its own timer: a frame, a header block, or a TLS record that has not ended
// headTime after it began ends the connection, as a slow head of HTTP/1 does.
type frameTimer h2conn

// Run is reactor.Task.
func (v *frameTimer) Run() {
	c := (*h2conn)(v)
	limit := c.l.limit(headTime)
	switch age := c.l.Now() - c.begun; {
	case c.closed || c.begun == 0:
	case age < limit:
		c.l.Arm(&c.slow, v, limit-age)
	case c.readable() || c.later || c.full || c.stuffed(): // it is us who do not read
		c.l.Arm(&c.slow, v, stallLook)
	default:
		c.cause = ErrTardy
		c.h2.Shutdown(http2.EnhanceYourCalm)
		if c.flushOut(true); !c.closed {
			c.end(exchange.Timeout)
		}
	}
}

// Fail is reactor.Task.
func (v *frameTimer) Fail(cause error) { (*h2conn)(v).Fail(cause) }

// drainTimer is a client's connection as the task of its timer: it came while the process drains
// and is to be told, or was told and its last stream is to be named.
type drainTimer h2conn

// Run is reactor.Task.
func (v *drainTimer) Run() {
	c := (*h2conn)(v)
	c.drain()
	c.settle()
}

// Fail is reactor.Task.
func (v *drainTimer) Fail(cause error) { (*h2conn)(v).Fail(cause) }

// drain is drainable: the two GOAWAYs of RFC 9113 6.8, of which the second follows
// settleTime after the client has answered the PING between them: what it had begun before it read the first one arrives. One
// that does not answer is not waited for once it has no stream.
func (c *h2conn) drain() {
	if c.client || c.closed || c.closing {
		return
	}
	c.h2.Shutdown(http2.NoError)
	c.closing = true
	c.active = c.l.Now() // from here on it has pingWait
	c.l.Arm(&c.timer, c, pingWait)
	c.mark()
}

// settle names the last stream that is taken, once that is due.
func (c *h2conn) settle() {
	switch now := c.l.Now(); {
	case c.closed || !c.h2.Warned():
	case c.warned == 0: // it answers now, late perhaps: what it had begun before it knew follows
		c.warned = max(now, 1)
		c.l.Arm(&c.life, (*drainTimer)(c), settleTime)
	case now-c.warned >= settleTime:
		c.h2.Shutdown(http2.NoError)
		c.mark()
	}
}

// farewell is drainable: the last stream that was taken is named, so that the client knows
// which of its requests it may send anew.
func (c *h2conn) farewell() {
	if c.client || c.closed {
		return
	}
	c.h2.Shutdown(http2.NoError)
	c.h2.Shutdown(http2.NoError)
	c.closing = true
	c.mark()
}
