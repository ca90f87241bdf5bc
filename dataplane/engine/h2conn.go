package engine

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/http2"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
	"aether/mtls/record"
	"aether/tproxy/socket"
)

// h2conn drives an HTTP/2 connection: a client's (captured h2c, the hop at
// the destination) or one of our own (the hop at the source, an h2c application).
type h2conn struct {
	transport
	h2    *http2.Conn
	left  []byte // a frame's first part, nil when none
	unfed bool   // left came with the connection and was never fed
	info  *ConnInfo
	free  *h2Free // of its loop

	owner  h2Owner // of a client; nil: a server
	socket string  // of a client: the Unix socket that it is to; empty: an address
	hop    bool    // the source's hop session, which is asked whether it lives
	mesh   bool    // server: the peer is a proxy, and verified

	client     bool
	connecting bool
	cause      error // what ended the connection, for the exchanges on it
	goaway     bool  // takes no new requests
	ending     bool  // the connection ends, and its streams with it
	endCode    exchange.Code
	had        int64  // ending, client: how many of the bytes written the peer may have taken
	requests   uint64 // streams opened on it
	bond       Bond   // nil: it has no end
	until      int64  // when bond ends, as was known last
	severed    bool   // it ends before
	resets     uint64 // http2.Stats.PeerResets at the last OnReset
	retireAt   int64  // hop: when that becomes so by age
	closing    bool   // close once out is empty and no stream is left
	reaping    bool
	pumping    bool
	owed       int64         // hop: since when the peer owes an answer and is silent; 0: it owes none
	life       reactor.Timer // hop: pingTimer; server: drainTimer
	stuff      reactor.Timer // stallTimer
	cut        reactor.Timer // its identity ends
	slow       reactor.Timer // frameTimer
	begun      int64         // time of the first byte of a frame, or header block, that has not ended; 0: none
	block      uint32        // the stream of that block; 0: it is a frame
	inRecord   bool          // what begun is about is a TLS record, in which a frame may begin
	slack      bool          // timer looks for what a burst has left behind
	pinged     int64         // hop: time of a PING that nothing has followed; 0: none
	tunnels    int           // streams that are tunnels
	full       bool          // server: not read from because the client does not read
	ticked     int64         // time of the codec's last Tick
	warned     int64         // server: since when the client is known to have read the first of its two GOAWAYs; 0: it is not
	drains     int           // streams that are drained
	behind     bool          // left has whole frames: the pod's share of an iteration did not suffice for them
	unsent     bool          // a write failed: nothing is sent any more, and what the peer sent before is read to its end
	kept       int           // bytes that the streams hold, those of waits too
	waits      []*h2stream   // those that are over on the wire, of which something waits
}

// h2stream is one stream's adapter between http2 and exchange.
type h2stream struct {
	c           *h2conn
	s           *http2.Stream // nil once it is over on the wire: it is another request's by then
	x           *exchange.Exchange
	moved       int64  // time of the last byte of a message either way
	from        int64  // client: its first byte on the wire is behind so many
	kept        int    // bytes that the connection's kept has of it
	pend        []byte // received data that the exchange refused: pend[off:]
	off         int
	trailers    []httpmsg.Field
	arena       []byte // of trailers
	used        bool   // pend is the stream's own, no leftover of another
	pendEnd     bool
	pendTr      bool // trailers follow pend
	wantsTunnel bool // for a tunnel (upgrade.go)
	tunnel      bool // it was granted
	remote      bool // the peer's side has ended
	local       bool // ours has
	dead        bool
	drained     bool          // nobody wants the rest of the answer: x is nil
	lost        bool          // client: reset behind the end of an answer that is not taken whole yet, and
	code        exchange.Code // why
	at          int           // in c.waits, from 1; 0: it is not there
}

// h2Owner has opened a client's connection. Its methods are called on the connection's loop.
type h2Owner interface {
	lost(c *h2conn, code exchange.Code) // it ends; its streams' exchanges are told next
	retired(c *h2conn)                  // it takes no new requests; its streams go on
	freed()                             // a stream of it has ended: another may be opened
}

// h2Free is what the HTTP/2 connections of a loop recycle.
type h2Free struct {
	l       *Loop
	streams []*h2stream // free
	late    []*h2stream // scratch of h2conn.expire
	dead    []*h2stream // to be recycled after the flush
	reap    []*h2conn   // whose codecs recycle theirs then
	queued  bool
}

func (l *Loop) h2Free() *h2Free {
	f, ok := l.kept[keptH2].(*h2Free)
	if !ok {
		f = &h2Free{l: l}
		l.kept[keptH2] = f
	}
	return f
}

func (f *h2Free) shrink() { f.streams = nil }

func (f *h2Free) getStream() *h2stream {
	if n := len(f.streams); n > 0 {
		s := f.streams[n-1]
		f.streams = f.streams[:n-1]
		return s
	}
	return &h2stream{}
}

func (f *h2Free) queue() {
	if !f.queued {
		f.queued = true
		f.l.After(f)
	}
}

// Run recycles what ended in this iteration: nothing holds it any more.
func (f *h2Free) Run() {
	f.queued = false
	for i, s := range f.dead {
		f.dead[i] = nil
		if len(f.streams) < f.l.keep(keepStreams) {
			*s = h2stream{pend: s.pend[:0]}
			if cap(s.pend) > keepPend {
				s.pend = nil
			}
			f.streams = append(f.streams, s)
		}
	}
	f.dead = f.dead[:0]
	for i, c := range f.reap {
		f.reap[i] = nil
		c.reaping = false
		c.h2.Reap()
		if c.closed {
			c.h2.Idle() // a stream of it may wait for long
		}
		if !c.closed && !c.wblk && len(c.h2.Out()) > 0 {
			c.mark() // window that nobody had given back
		}
	}
	f.reap = f.reap[:0]
}

// Fail: there is nothing to close; what was not recycled is garbage.
func (f *h2Free) Fail(error) {
	f.queued = false
	clear(f.dead)
	clear(f.reap)
	f.dead, f.reap = f.dead[:0], f.reap[:0]
}

// ServeHTTP2 serves HTTP/2 on fd, which it owns from now on. first are bytes already read
// from it. rec: a hop, whose peer is verified.
func (l *Loop) ServeHTTP2(fd int, rec record.Conn, info *ConnInfo, first []byte) error {
	c := &h2conn{info: info, free: l.h2Free()}
	c.mesh = rec != nil
	c.h2 = http2.New(http2.Config{Server: true, ConnWindow: h2Window, EnableConnect: true, Known: c.mesh, Date: l.dateNow}, c)
	if err := c.open(l, info.Pod, fd, rec, c); err != nil {
		return err
	}
	c.start(first)
	return nil
}

// AdoptHTTP2 is ServeHTTP2 for an fd that this loop has registered for another source.
func (l *Loop) AdoptHTTP2(fd int, info *ConnInfo, first []byte, readable bool) {
	c := &h2conn{info: info, free: l.h2Free()}
	c.h2 = http2.New(http2.Config{Server: true, ConnWindow: h2Window, EnableConnect: true, Date: l.dateNow}, c)
	c.adopt(l, info.Pod, fd, c, readable)
	c.start(first)
}

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

// bind ends the connection with b, unless that is renewed meanwhile; nil: it has no end.
func (c *h2conn) bind(b Bond) {
	if c.bond = b; b != nil {
		(*expiryTimer)(c).arm(int64(b.Left()))
	}
}

// ErrExpired: the certificate of one of a session's ends has ended, and the session with it.
var ErrExpired = errors.New("engine: the certificates that the session was opened with have expired")

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

// dialH2 starts an h2c connection to an application. fd of a Unix socket is connected already.
func (l *Loop) dialH2(pod *Pod, fd int, addr netip.AddrPort, owner h2Owner, unixSocket string) (*h2conn, error) {
	c := &h2conn{client: true, owner: owner, socket: unixSocket, free: l.h2Free()}
	connected := unixSocket != ""
	if !connected {
		if err := socket.StartConnect(fd, addr); err != nil {
			unix.Close(fd)
			return nil, err
		}
	}
	c.h2 = http2.New(http2.Config{ConnWindow: h2Window}, c)
	if err := c.open(l, pod, fd, nil, c); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if connected {
		c.arm()
	} else {
		c.connecting, c.wblk = true, true
		l.Arm(&c.timer, c, connectTime)
	}
	c.mark()
	return c, nil
}

// newHopConn puts a hop session whose handshake is done on the loop.
func (l *Loop) newHopConn(pod *Pod, fd int, rec record.Conn, owner h2Owner) (*h2conn, error) {
	c := &h2conn{client: true, owner: owner, hop: true, free: l.h2Free()}
	c.h2 = http2.New(http2.Config{ConnWindow: h2Window}, c)
	if err := c.open(l, pod, fd, rec, c); err != nil {
		return nil, err
	}
	l.Gauges.Sessions.Add(1)
	c.ready = true
	c.arm()
	c.mark()
	return c, nil
}

func (c *h2conn) arm() {
	d := idleDown
	if c.client {
		d = idleHop
	}
	c.l.Arm(&c.timer, c, c.l.limit(d))
}

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

// expire ends the stream's exchange as a timeout.
func (st *h2stream) expire() {
	x := st.x
	switch {
	case st.dead:
	case st.c.client:
		st.Abort(exchange.Timeout)
		if x != nil {
			x.UpstreamClosed(exchange.Timeout)
		}
	default:
		x.Abort(exchange.Timeout)
	}
}

// stuffed reports whether the connection is not to be read from because its pod
// holds too much. A hop carries the requests of many: it is read from up to twice
// podHeld, and what has stalled on it ends before (stallTimer).
//
// One that is known to end is read to its end: what it holds goes with it.
func (c *h2conn) stuffed() bool {
	return c.sh.tight && !c.fin && c.held >= fairHeld && (!c.hop && !c.mesh || c.sh.held >= hopHeld*c.l.proc.podHeld())
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

func (c *h2conn) mark() {
	if !c.dirty && !c.closed {
		c.dirty = true
		c.l.Dirty(c)
	}
}

func (c *h2conn) wantReap() {
	if !c.reaping {
		c.reaping = true
		c.free.reap = append(c.free.reap, c)
		c.free.queue()
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

// request opens a stream for x; Available was > 0.
func (c *h2conn) request(x *exchange.Exchange) {
	if x.Req.Upgrade != nil && !c.h2.PeerAllowsConnect() {
		x.Cause = ErrNoTunnel
		x.UpstreamClosed(exchange.Refused)
		return
	}
	s, err := c.h2.Open()
	if err != nil {
		x.UpstreamClosed(exchange.Refused)
		return
	}
	if c.hop && c.owed == 0 { // a request that is given up later was not answered either
		c.owed = c.l.Now()
		if !c.life.Armed() {
			c.l.Arm(&c.life, (*pingTimer)(c), pingAfter)
		}
	}
	c.requests++
	st := c.free.getStream()
	st.c, st.s, st.x, st.moved, st.from = c, s, x, c.l.Now(), c.tx+int64(len(c.sealed))
	s.User = st
	x.Forward(st)
}

// tell accounts the buffers as they are now.
func (c *h2conn) tell() {
	n := c.kept
	if !c.closed {
		n += cap(c.left) + c.records() + c.h2.Held()
	}
	c.account(n)
	if c.held >= fairHeld && (c.client || c.mesh) && !c.stuff.Armed() {
		c.l.Arm(&c.stuff, (*stallTimer)(c), stallLook)
	}
}

// keep accounts what the stream holds.
func (st *h2stream) keep() {
	n := streamHeld
	if !st.c.client && st.x != nil {
		n = requestHeld + st.x.Held()
	}
	if st.used = st.used || len(st.pend) > 0; st.used {
		n += cap(st.pend)
	}
	n += cap(st.arena) + cap(st.trailers)*fieldSize
	st.c.holds(n - st.kept)
	st.kept = n
}

// held is keep where the exchange may hold more than it did, or less.
func (st *h2stream) held() {
	if !st.dead && !st.c.client {
		st.keep()
	}
}

// holds accounts d bytes more, or less, that streams hold; what waits may outlive its connection.
func (c *h2conn) holds(d int) {
	if c.kept += d; d == 0 {
		return
	}
	if c.closed {
		c.tell()
	} else {
		c.mark()
	}
}

// OnHead is http2.Handler.
func (c *h2conn) OnHead(s *http2.Stream, h *httpmsg.Head, end bool) {
	if c.sh.addWork(); c.sh.readSpent() {
		c.h2.Pause() // a buffer may hold a thousand of them
	}
	if c.client {
		st, _ := s.User.(*h2stream)
		if st == nil || st.dead {
			return
		}
		st.remote = end
		x := st.x
		if st.wantsTunnel {
			st.connectAnswer(h, end)
		}
		x.ResponseHead(h, end && !st.tunnel)
		if st.tunnel && end && !st.dead {
			x.ResponseData(nil, true)
		}
		st.settle()
		return
	}
	if h.Upgrade != nil && !c.extended(s, h, end) {
		return
	}
	c.requests++
	st := c.free.getStream()
	st.c, st.s, st.remote, st.moved = c, s, end, c.l.Now()
	st.wantsTunnel = h.Upgrade != nil
	s.User = st
	if c.l.level >= NoKeepAlive && !c.closing {
		c.retire()
	}
	st.x = c.info.Pool.Begin(st, h, end, c.info, c.l.Now())
	st.x.Share = c.info.Kept()
	st.keep()
	st.x.Begin()
	st.held()
}

// OnData is http2.Handler.
func (c *h2conn) OnData(s *http2.Stream, p []byte, end bool) {
	st, _ := s.User.(*h2stream)
	if st == nil || st.dead {
		s.Credit(len(p))
		return
	}
	st.moved = c.l.Now()
	if len(st.pend) > 0 { // bounded by the stream's window
		st.pend = append(st.pend, p...)
		s.Keep(len(p))
		st.pendEnd = end
		st.keep()
		st.over()
		return
	}
	n := st.offer(p, end)
	if st.dead {
		return
	}
	st.held()
	if n < len(p) {
		st.pend = append(st.pend[:0], p[n:]...)
		s.Keep(len(p) - n)
		st.pendEnd = end
		st.keep()
		st.over()
		return
	}
	if end {
		st.remote = true
		st.settle()
	}
}

// offer gives data to the exchange and credits what was taken.
func (st *h2stream) offer(p []byte, end bool) int {
	var n int
	if st.drained {
		n = len(p)
	} else if st.c.client {
		n = st.x.ResponseData(p, end)
	} else {
		n = st.x.RequestData(p, end)
	}
	if !st.dead && n > 0 {
		st.moved = st.c.l.Now()
		if st.s != nil {
			st.s.Credit(n)
			st.c.mark()
		}
	}
	return n
}

// OnTrailers is http2.Handler.
func (c *h2conn) OnTrailers(s *http2.Stream, f []httpmsg.Field) {
	st, _ := s.User.(*h2stream)
	if st == nil || st.dead {
		return
	}
	if len(st.pend) > 0 || !st.offerTrailers(f) {
		st.pendTr = true // f dies with this call
		st.trailers, st.arena = copyFields(f)
		st.keep()
		st.over()
		return
	}
	st.held()
	if !st.dead {
		st.remote = true
		st.settle()
	}
}

// copyFields copies fields that die into one array.
func copyFields(f []httpmsg.Field) (to []httpmsg.Field, arena []byte) {
	need := 0
	for i := range f {
		need += len(f[i].Name) + len(f[i].Value)
	}
	to, arena = make([]httpmsg.Field, 0, len(f)), make([]byte, 0, need)
	keep := func(b []byte) []byte {
		o := len(arena)
		arena = append(arena, b...)
		return arena[o:len(arena):len(arena)]
	}
	for i := range f {
		to = append(to, httpmsg.Field{Name: keep(f[i].Name), Value: keep(f[i].Value)})
	}
	return to, arena
}

func (st *h2stream) offerTrailers(f []httpmsg.Field) bool {
	if st.drained {
		return true
	}
	if st.c.client {
		st.x.ResponseTrailers(f)
		return true
	}
	return st.x.RequestTrailers(f)
}

// OnReset is http2.Handler.
func (c *h2conn) OnReset(s *http2.Stream, code http2.Code) {
	resets := c.h2.Stats().PeerResets
	byPeer := resets != c.resets
	c.resets = resets
	st, _ := s.User.(*h2stream)
	if st == nil || st.dead {
		return
	}
	x := st.x
	from := st.from
	if c.client {
		gone, why := fromH2(code, c.connecting), s.Err()
		if _, ours := why.(*http2.StreamError); ours { // whatever the code that we sent
			gone = exchange.Protocol
		}
		if x != nil && !st.remote && (st.pendEnd || st.pendTr) {
			st.outlive(gone)
		} else {
			if c.ending && gone == exchange.Closed && from >= c.had {
				gone = exchange.Unsent
			}
			st.release()
			if x != nil {
				if x.Cause = c.cause; why != nil {
					x.Cause = why
				}
				x.UpstreamClosed(gone)
			}
		}
		c.freed()
		return
	}
	st.release()
	x.Cause = s.Err()
	gone := exchange.Protocol // the codec found fault with the stream, or with the connection
	switch {
	case byPeer:
		gone = exchange.Reset
	case c.ending && c.endCode != exchange.Protocol:
		gone = exchange.Cancel
	}
	x.DownstreamClosed(gone)
	c.l.release(c.info.Pool, x)
}

// outlive: the stream was reset behind the end of its answer, of which something still
// waits in pend. That a client must not discard (RFC 9113 8.1), whatever the reset says: the
// stream goes on without the wire, and what still comes of the request is read and dropped.
func (st *h2stream) outlive(code exchange.Code) {
	st.lost, st.code, st.local = true, code, true
	st.over()
	st.x.UpstreamWritable() // a client that reads only once it has written everything
}

// taken: what waited has been taken, with its end.
func (st *h2stream) taken() {
	st.remote = true
	if x := st.x; st.lost && st.tunnel && !st.dead { // its other direction was cut
		st.release()
		x.UpstreamClosed(st.code)
		return
	}
	st.settle()
}

// OnRefused is http2.Handler.
func (c *h2conn) OnRefused(status int, why *http2.StreamError) {
	if c.info != nil && c.info.OnRefused != nil {
		c.info.OnRefused(c.info, status, why)
	}
}

// OnWritable is http2.Handler.
func (c *h2conn) OnWritable(s *http2.Stream) {
	st, _ := s.User.(*h2stream)
	if st == nil || st.dead || st.drained {
		return
	}
	if c.client {
		st.x.UpstreamWritable()
	} else {
		st.x.DownstreamWritable()
	}
}

// OnGoAway is http2.Handler.
func (c *h2conn) OnGoAway(uint32, http2.Code) {
	c.goaway = true
	if c.owner != nil {
		c.owner.retired(c)
	}
	c.mark()
}

func fromH2(code http2.Code, connecting bool) exchange.Code {
	switch {
	case connecting:
		return exchange.Connect
	case code == http2.RefusedStream:
		return exchange.Refused
	case code == http2.NoError:
		return exchange.Closed
	case code == http2.Cancel, code == http2.ConnectError:
		return exchange.Closed
	case code == http2.EnhanceYourCalm:
		return exchange.TooLarge
	default:
		return exchange.Protocol
	}
}

func toH2(code exchange.Code, client bool) http2.Code {
	switch code {
	case exchange.NoError:
		if client {
			return http2.Cancel
		}
		return http2.NoError
	case exchange.Cancel, exchange.Timeout:
		return http2.Cancel
	case exchange.Refused:
		return http2.RefusedStream
	case exchange.Protocol:
		return http2.ProtocolError
	default:
		return http2.InternalError
	}
}

// settle ends the adapter once both directions have ended.
func (st *h2stream) settle() {
	if st.dead || !st.remote || !st.local {
		return
	}
	st.finish()
}

// finish ends the adapter; a server's exchange is over by now.
func (st *h2stream) finish() {
	x := st.x
	c := st.c
	st.release()
	if !c.client && x != nil {
		c.l.release(c.info.Pool, x)
	}
	c.freed()
}

// freed: a stream has ended, and its place may be another's.
func (c *h2conn) freed() {
	if c.owner != nil {
		c.owner.freed()
	}
}

// over lets go of the stream once both directions have ended on the wire. What
// was received and waits in pend does not need it: the connection's window is open again.
func (st *h2stream) over() {
	if st.local && (st.remote || st.pendEnd || st.pendTr) {
		st.leave()
		if st.at == 0 && !st.remote {
			st.c.waits = append(st.c.waits, st)
			st.at = len(st.c.waits)
		}
	}
}

func (st *h2stream) leave() {
	if st.s != nil {
		st.s.User = nil
		st.s = nil
	}
}

// release detaches the adapter from its stream.
func (st *h2stream) release() {
	if st.drained {
		st.c.drains--
	}
	st.dead = true
	if st.tunnel {
		st.c.tunnels--
	}
	st.x = nil
	st.c.holds(-st.kept)
	st.kept = 0
	if st.at > 0 {
		ws := st.c.waits
		last := len(ws) - 1
		ws[st.at-1] = ws[last]
		ws[st.at-1].at = st.at
		ws[last] = nil
		st.c.waits, st.at = ws[:last], 0
	}
	st.leave()
	st.c.free.dead = append(st.c.free.dead, st)
	st.c.free.queue()
}

// WriteHead is exchange.Stream.
func (st *h2stream) WriteHead(h *httpmsg.Head, end bool) {
	if st.s == nil {
		return
	}
	if !st.c.client {
		st.c.l.dated(h)
	}
	switch {
	case st.c.client && h.Upgrade != nil:
		h = st.connectHead(h)
	case st.wantsTunnel && !st.c.client:
		h = st.grantHead(h)
	}
	st.s.WriteHead(h, end)
	st.ended(end)
}

// WriteData is exchange.Stream.
func (st *h2stream) WriteData(p []byte, end bool) int {
	if st.s == nil {
		return len(p)
	}
	n := st.s.WriteData(p, end)
	if n > 0 || len(p) == 0 {
		st.ended(end && n == len(p))
	}
	return n
}

// WriteTrailers is exchange.Stream.
func (st *h2stream) WriteTrailers(f []httpmsg.Field) {
	if st.s == nil {
		return
	}
	st.s.WriteTrailers(f)
	st.ended(true)
}

func (st *h2stream) ended(end bool) {
	st.c.mark()
	st.moved = st.c.l.Now()
	st.c.active = st.moved
	if !end {
		return
	}
	st.local = true
	if !st.c.client && st.remote {
		st.finish()
		return
	}
	st.over()
}

// Resume is exchange.Stream.
func (st *h2stream) Resume() {
	if st.dead {
		return
	}
	if len(st.pend) > 0 {
		n := st.offer(st.pend[st.off:], st.pendEnd)
		if st.dead {
			return
		}
		if st.off += n; st.off < len(st.pend) {
			if 2*st.off >= len(st.pend) { // moving what is left costs less than what has gone
				st.pend = st.pend[:copy(st.pend, st.pend[st.off:])]
				st.off = 0
			}
			return
		}
		if st.pend, st.off = st.pend[:0], 0; cap(st.pend) > keepPend {
			st.pend = nil
		}
		st.keep()
		if st.pendEnd {
			st.taken()
			return
		}
	}
	if st.pendTr {
		if !st.offerTrailers(st.trailers) || st.dead {
			return
		}
		st.pendTr = false
		st.trailers, st.arena = nil, nil // who needs them longer has a copy
		st.keep()
		st.taken()
	}
}

// Abort is exchange.Stream.
func (st *h2stream) Abort(code exchange.Code) {
	if st.dead {
		return
	}
	if st.s != nil {
		why := toH2(code, st.c.client)
		if st.tunnel && code == exchange.Closed { // what the tunnel led to was reset (RFC 9113 8.5)
			why = http2.ConnectError
		}
		st.s.Reset(why)
	}
	c := st.c
	c.mark()
	c.wantReap()
	st.finish()
	if c.owner != nil && !c.goaway && c.h2.Tired() { // the peer might take us for an attack, and cut the others
		c.goaway = true
		c.owner.retired(c)
	}
}

// Drain is exchange.Drainer: what is left of the answer is read and thrown
// away. A stream that its client resets costs the peer as much as one that is
// answered, and may count as an attack there (CVE-2023-44487).
func (st *h2stream) Drain() {
	switch {
	case st.dead:
	case st.c.drains >= maxDrains && !st.remote:
		st.Abort(exchange.Cancel)
	default:
		st.x = nil
		st.drained = true
		st.c.drains++
	}
}

// serves is drainable.
func (c *h2conn) serves() bool { return !c.client }

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

// ErrSilent: the peer of a session answers nothing any more, not even PING.
var ErrSilent = errors.New("engine: the peer of the session answers nothing any more, not even PING")

// ErrTardy: the peer began a frame, or a header block, of HTTP/2, or a TLS record under it, and did not end it in time.
var ErrTardy = errors.New("engine: the peer began an HTTP/2 frame, header block or TLS record and did not end it in time")

// ended reports whether the peer has ended the session, of which the loop will be told.
func (c *h2conn) ended() bool {
	const ends = reactor.PeerEnd | reactor.Hangup | reactor.Error
	return c.fin || c.l.Pending(c.fd)&ends != 0
}

// connectHead makes the head of a request for a tunnel as it is sent over
// HTTP/2: the method stands in no field of it, for it is always GET. An application that speaks
// HTTP/2 gets no key (RFC 8441 5); between proxies it passes.
func (st *h2stream) connectHead(h *httpmsg.Head) *httpmsg.Head {
	st.wantsTunnel = true
	own := *h
	own.Method = methodCONNECT
	if !st.c.hop {
		own.Fields = slices.Clone(h.Fields)
		own.Del(string(fieldWSKey))
	}
	return &own
}

// connectAnswer reads the answer to connectHead: 2xx grants the tunnel, which is 101 to the exchange.
func (st *h2stream) connectAnswer(h *httpmsg.Head, end bool) {
	req := &st.x.Req
	switch {
	case h.Status >= 200 && h.Status < 300:
		h.Status, h.Upgrade = 101, req.Upgrade
		h.Del("content-length") // means nothing (RFC 9110 9.3.6)
		if key, ok := req.Get(string(fieldWSKey)); ok && !st.c.hop && isWebSocket(req.Upgrade) {
			h.Set(fieldWSAccept, wsAccept(key))
		}
		st.open()
	case h.Status >= 300:
		st.wantsTunnel = false
		v, ok := h.Get(declined)
		if !ok || !st.c.hop || h.Status != 502 {
			return
		}
		if n, err := strconv.Atoi(string(v)); err == nil && n >= 200 && n < 300 && (n != 204 || end) {
			h.Status = n // a 204 with a body would break the client's framing
		}
		h.Del(declined)
	}
}

// grantHead makes the head of an answer to an extended CONNECT.
func (st *h2stream) grantHead(h *httpmsg.Head) *httpmsg.Head {
	if h.Status < 200 && h.Status != 101 {
		return h
	}
	own := *h
	own.Upgrade = nil
	switch {
	case h.Status == 101:
		own.Status = 200
		st.open()
	case h.Status < 300:
		own.Fields = slices.Clone(h.Fields)
		own.Set(fieldDeclined, strconv.AppendInt(nil, int64(h.Status), 10))
		own.Status = 502
	default:
		own.Fields = slices.Clone(h.Fields)
		own.Del(declined) // the application's own means nothing
	}
	st.wantsTunnel = false
	return &own
}

// open: the stream is a tunnel from here on.
func (st *h2stream) open() {
	st.wantsTunnel, st.tunnel = false, true
	st.c.tunnels++
}

// extended takes the head of an extended CONNECT for what it asks; false: it was answered here.
func (c *h2conn) extended(s *http2.Stream, h *httpmsg.Head, end bool) bool {
	if h.Upgrade = exchange.TunnelProtocol(h.Upgrade); h.Upgrade == nil {
		answer := httpmsg.Head{Status: 501}
		c.l.dated(&answer)
		s.WriteHead(&answer, true) // further HTTP, or TLS: there is no ordinary request to fall back to
		if !end {
			s.Reset(http2.NoError)
		}
		if c.info.OnRefused != nil {
			c.info.OnRefused(c.info, 501, strangeTunnel)
		}
		return false
	}
	h.Method = methodGET
	if !end {
		h.Length = httpmsg.Unknown
	}
	return true
}
