package engine

import (
	"bytes"
	"errors"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/http1"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
	"aether/mtls/record"
)

// ConnInfo is what is known of a downstream connection; its exchanges carry it in Conn.
type ConnInfo struct {
	Pod  *Pod
	Loop *Loop
	Pool *exchange.Pool // of the service that answers
	User any            // the service's: flow, identity
	// OnClose is called once, on the loop, when the connection is gone.
	OnClose func(*ConnInfo)
	// OnRefused is called, on the loop, with the status of an answer that the engine
	// itself gave to what could not be read as a request, and why; no exchange tells of it. nil: nobody is told.
	OnRefused func(c *ConnInfo, status int, why error)
	// Bond is what ends the connection, whatever it carries: its peer's certificate, or ours. An HTTP/2 client is told
	// goawayTime before. nil: it has no end.
	Bond Bond

	conn  severed // the connection; nil: there is none (yet, or any more). The loop's own
	cause error   // it was severed before it was there
}

// Bond is the certificates that a session lives by, which may be renewed while it lives. Its methods do not wait.
type Bond interface {
	// Left is how long the session may go on as things stand; it is asked again then.
	Left() time.Duration
	// Ask is for a session that this node opened, whose certificates are renewed only while it is busy: it
	// returns after how long it wants to be called again.
	Ask(busy bool) (again time.Duration)
	// Release is called once, when the session has ended.
	Release()
}

// severed is a connection whose identity holds no more.
type severed interface {
	// sever takes no more requests, and ends those there are after leaveTime.
	sever(cause error)
}

// Sever ends the connection because its identity holds no more: it takes no new requests, and those under
// way have a moment to end. Safe for concurrent use.
func (i *ConnInfo) Sever(cause error) {
	_ = i.Loop.Post(func() { // it fails when the loop has ended, and the connection with it
		if i.cause = cause; i.conn != nil {
			i.conn.sever(cause)
		}
	})
}

// tie makes c the connection of i.
func (i *ConnInfo) tie(c severed) {
	if i.conn = c; i.cause != nil {
		c.sever(i.cause)
	}
}

// Kept counts what is kept of the bodies of the pod's requests on the loop; nil where there is no pod.
func (c *ConnInfo) Kept() *exchange.Share {
	if c.Pod == nil {
		return nil
	}
	return &c.Pod.share(c.Loop).kept
}

// h1server is a connection whose client speaks HTTP/1.
type h1server struct {
	h1conn
	info *ConnInfo

	state    uint8
	minor    uint8
	isHead   bool
	keep10   bool // an HTTP/1.0 client that asked for keep-alive
	last     bool // the connection ends after this response
	reqDone  bool
	cut      reactor.Timer // its identity ends
	severed  bool          // it has ended before its time
	closing  bool          // close once out is empty
	ended    bool          // the client's end was seen: it lies behind the bytes that are not read yet
	half     bool          // it was read, and belongs to the request: the client waits for the answer
	heard    int64         // when bytes of the client's last came
	endAt    int64         // when its end was first seen; 0: it was not
	reset    bool          // by the client
	headAt   int64         // when the first byte of the head under way arrived; 0: none
	lingered int
	requests uint64
}

const (
	stHead uint8 = iota
	stBody
	stWait // the request is whole; its response is not
	stLinger
)

// ServeHTTP1 serves HTTP/1 on fd, which it owns from now on. first are bytes
// already read from it.
func (l *Loop) ServeHTTP1(fd int, rec record.Conn, info *ConnInfo, first []byte) error {
	c := &h1server{info: info}
	if err := c.open(l, info.Pod, fd, rec, c); err != nil {
		return err
	}
	c.start(first)
	return nil
}

// AdoptHTTP1 is ServeHTTP1 for an fd that this loop has registered for another source.
func (l *Loop) AdoptHTTP1(fd int, info *ConnInfo, first []byte, readable bool) {
	c := &h1server{info: info}
	c.adopt(l, info.Pod, fd, c, readable)
	c.start(first)
}

func (c *h1server) start(first []byte) {
	c.server = true
	c.l.Arm(&c.timer, c, c.l.limit(idleDown))
	c.heard = c.l.Now()
	if len(first) > 0 {
		c.in = c.l.getIn()
		if len(first) > len(c.in) {
			c.l.putIn(c.in)
			c.in = c.l.getBig()
		}
		c.w = copy(c.in, first)
		c.headAt = c.l.Now()
		c.tell()
	}
	c.mark() // the flush pumps
	if c.info.Bond != nil {
		c.l.Arm(&c.cut, (*h1cut)(c), max(int64(c.info.Bond.Left()), 1))
	}
	c.info.tie(c)
}

// sever is severed.
func (c *h1server) sever(error) {
	if c.closed {
		return
	}
	c.last, c.severed = true, true
	if c.x == nil {
		c.drop(true, exchange.Closed)
		return
	}
	c.l.Arm(&c.cut, (*h1cut)(c), leaveTime)
}

// h1cut is a connection as the task of its timer: its identity has ended, or would have.
type h1cut h1server

// Run is reactor.Task.
func (v *h1cut) Run() {
	c := (*h1server)(v)
	if !c.severed {
		if left := c.info.Bond.Left(); left > 0 { // renewed meanwhile
			c.l.Arm(&c.cut, v, int64(left))
			return
		}
	}
	c.drop(true, exchange.Closed)
}

// Fail is reactor.Task.
func (v *h1cut) Fail(error) { (*h1server)(v).drop(true, exchange.Closed) }

// Event is reactor.Source.
func (c *h1server) Event(ev uint32) {
	if ev&reactor.Writable != 0 && c.wblk {
		c.wblk = false
		c.mark()
	}
	if ev&^reactor.Writable == 0 {
		return
	}
	c.edge(ev)
	if ev&reactor.PeerEnd != 0 {
		c.seeEnd()
	} else if ev&reactor.Readable != 0 {
		c.heard = c.l.Now()
	}
	cut := uint32(reactor.Hangup | reactor.Error)
	if c.tunnel { // whose sides end one by one, the last bytes unread
		cut = reactor.Error
	}
	if ev&cut != 0 && c.state != stLinger || c.left() {
		c.reset = true // or as good as: docs/decisions/040
		if c.sh.readSpent() && !c.later {
			c.yield(c)
			return
		}
		c.sh.addWork()
		c.drop(true, exchange.Cancel) // no answer can reach it, and a stalled reader would not find out
		return
	}
	c.pump()
}

// seeEnd notes the client's end.
func (c *h1server) seeEnd() {
	if c.ended = true; c.endAt == 0 {
		c.endAt = c.l.Now()
	}
}

// waits reports whether a client that has ended its side waits for the answer, as one does whose end comes
// with its request; one whose end comes later gave up (docs/decisions/040).
func (c *h1server) waits() bool { return c.rec == nil && c.endAt-c.heard <= halfTime }

// left reports whether the client has gone while its body was refused: nobody waits for what
// the rest of it would bring about.
func (c *h1server) left() bool { return c.stalled && c.ended && !c.tunnel && !c.waits() }

// Fail is reactor.Source, Flusher and Task.
func (c *h1server) Fail(cause error) {
	if c.closed {
		return
	}
	c.drop(true, exchange.Closed)
}

func (c *h1server) mark() {
	if !c.dirty && !c.closed {
		c.dirty = true
		c.l.Dirty(c)
	}
}

func (c *h1server) pump() { c.pumpAll(c) }

// fill is h1end.
func (c *h1server) fill() bool {
	if c.state == stLinger {
		return c.linger()
	}
	if c.half && c.state == stHead { // what is there is no whole request
		c.drop(false, exchange.NoError)
		return false
	}
	if c.inEnd || c.half {
		return false
	}
	if c.sh.tight && c.state == stHead {
		switch {
		case c.in == nil && c.readable(): // others of the pod have to end first
			c.await(c)
			return false
		case c.r == 0 && c.w == len(c.in) && len(c.in) < bigReadBuf:
			c.l.proc.shed(ShedRequest)
			c.refuse(errTight)
			return false
		}
	}
	n, err := c.refill(c, c.state == stHead)
	if err != nil && c.tunnel && errors.Is(err, io.EOF) {
		c.clientEnded()
		return false
	}
	if errors.Is(err, io.EOF) && c.state == stWait && c.x != nil {
		if c.seeEnd(); c.waits() {
			c.half, c.ready, c.fin = true, false, false
			return false
		}
	}
	if err != nil {
		// Orderly or not, the client is gone: nobody waits for the response (docs/decisions/040).
		c.drop(!errors.Is(err, io.EOF) && c.x != nil, exchange.Cancel)
		return false
	}
	if n == 0 {
		return false
	}
	c.heard = c.l.Now()
	if c.state == stHead && c.w == c.r {
		c.headAt = c.heard
	}
	c.w += n
	return true
}

// Run is reactor.Task: the next iteration after the budget was spent, or a timer.
func (c *h1server) Run() {
	if c.closed {
		return
	}
	if !c.later {
		c.tick()
		return
	}
	c.later, c.queued = false, false
	if c.reset {
		c.drop(true, exchange.Cancel)
		return
	}
	if len(c.out)+len(c.sealed) > 0 {
		c.mark()
	}
	c.pump()
	if !c.closed && !c.timer.Armed() { // it was the timer
		c.tick()
	}
}

// tick judges the connection's age. The timer is lazy: it runs when the
// earliest limit may have been met.
func (c *h1server) tick() {
	if c.closed || c.tunnel && c.x != nil {
		return
	}
	now := c.l.Now()
	var limit, since int64
	switch {
	case c.state == stLinger:
		c.shutNow()
		return
	case c.x != nil:
		limit, since = idleStream, c.active
	case c.headAt != 0 && c.w > c.r:
		limit, since = headTime, c.headAt
	default:
		limit, since = idleDown, c.active
	}
	if limit = c.l.limit(limit); now-since < limit {
		c.l.Arm(&c.timer, c, limit-(now-since))
		return
	}
	switch {
	case c.x != nil:
		c.x.Abort(exchange.Timeout)
		c.drop(false, exchange.Timeout)
	case c.headAt != 0 && c.w > c.r:
		c.refuse(errSlowHead)
	default:
		c.drop(false, exchange.NoError)
	}
}

// process is h1end.
func (c *h1server) process() bool {
	for c.r < c.w || c.trailing {
		if c.closing {
			c.r, c.w, c.trailing = 0, 0, false
			return false
		}
		switch c.state {
		case stHead:
			if c.wblk || len(c.out) >= c.high() {
				return false // it asks faster than it reads the answers
			}
			if c.sh.readSpent() { // heads come by the hundred in a buffer
				c.yield(c)
				return false
			}
			if c.headAt == 0 {
				c.headAt = c.l.Now()
			}
			n, f, err := c.parser.Request(c.in[c.r:c.w], &c.l.reqHead)
			if err != nil {
				c.refuse(err)
				return false
			}
			if n == 0 {
				if k := c.parser.EmptyLines(c.in[c.r:c.w]); k > 0 {
					// Old clients end a body with one (RFC 9112 2.2). No head has begun, so
					// no deadline runs and no buffer is held.
					c.r, c.headAt = c.w, 0
					return true
				}
				if d := c.headAt + headTime - c.l.Now(); c.state == stHead && d > 0 {
					c.l.Arm(&c.timer, c, d)
				}
				return true
			}
			c.r += n
			c.begin(f)
		case stBody:
			if c.stalled {
				return false
			}
			switch c.pumpBody(c) {
			case bodyWait:
				if c.left() {
					c.drop(true, exchange.Cancel)
				}
				return false
			case bodyBad:
				c.badBody()
				return false
			case bodyDone:
				c.requestDone()
			}
		default:
			return true // pipelined bytes wait; reading on finds out when the client goes
		}
		if c.closed {
			return false
		}
	}
	return true
}

func (c *h1server) begin(f http1.Framing) {
	h := &c.l.reqHead // shared: Begin copies it
	c.requests++
	c.sh.addWork()
	c.headAt = 0
	c.minor, c.isHead = h.Minor, string(h.Method) == "HEAD"
	c.last = h.Close
	if c.l.level >= NoKeepAlive && !c.last {
		c.last = true
		c.l.proc.shed(ShedKeepAlive)
	}
	c.keep10 = h.Minor == 0 && !h.Close
	c.reqDone = f == http1.None || f == http1.Length && h.Length == 0
	c.stalled, c.trailing, c.starved = false, false, false
	if h.Upgrade != nil {
		h.Upgrade = upgradeOf(h, c.reqDone)
	}
	if c.reqDone {
		c.state = stWait
	} else {
		c.state = stBody
		c.body.Start(f, h.Length)
	}
	c.x = c.info.Pool.Begin(c, h, c.reqDone && h.Upgrade == nil, c.info, c.l.Now())
	c.x.Share = c.info.Kept()
	c.x.Begin()
}

// partial is h1end.
func (c *h1server) partial() bool {
	return c.state == stBody && !c.stalled || c.state == stHead && c.r < c.w
}

// takeData is h1end. What follows an answer that went first is read and dropped.
func (c *h1server) takeData(p []byte, end bool) int {
	if c.x == nil {
		return len(p)
	}
	return c.x.RequestData(p, end)
}

// takeTrailers is h1end.
func (c *h1server) takeTrailers(f []httpmsg.Field) bool {
	return c.x == nil || c.x.RequestTrailers(f)
}

func (c *h1server) requestDone() {
	c.reqDone = true
	c.state = stWait
	if c.x == nil { // the response went first
		c.next()
	}
}

// badBody: the client broke the framing of its body.
func (c *h1server) badBody() {
	x := c.x
	_, _, _, err := c.body.Next(nil) // again: it stays
	if x != nil {
		x.Cause = err
	}
	if x != nil && !x.Answered() {
		c.x = nil
		x.DownstreamClosed(exchange.Protocol)
		c.l.release(c.info.Pool, x)
		c.answer(err)
		return
	}
	c.drop(true, exchange.Protocol)
}

var (
	headMethod  = []byte("HEAD ")
	errTight    = &http1.Error{Status: 503, Reason: "overload: this pod's connections hold too much of the proxy's memory for so large a head; try again"}
	errSlowHead = &http1.Error{Status: 408, Reason: "the head was not whole 15 s after its first byte: send it at once"}
	refusedType = []httpmsg.Field{{Name: []byte("content-type"), Value: []byte("text/plain; charset=utf-8")}}
)

// refuse answers what could not be read as a request, and closes.
func (c *h1server) refuse(err error) {
	// isHead is the request's before: of this one no more is known than what has come.
	c.isHead = bytes.HasPrefix(bytes.TrimLeft(c.in[c.r:c.w], "\r\n"), headMethod)
	status := c.answer(err)
	if c.info.OnRefused != nil {
		c.info.OnRefused(c.info, status, err)
	}
}

// answer answers without an exchange, and closes. The answer says what is wrong with the request.
func (c *h1server) answer(err error) (status int) {
	if c.out == nil {
		c.out = c.l.getOut()
	}
	var fields [2]httpmsg.Field
	h := httpmsg.Head{Status: 400, Fields: append(fields[:0], refusedType...)}
	c.l.dated(&h)
	text := ""
	var he *http1.Error
	if errors.As(err, &he) {
		h.Status, text = he.Status, he.Fault()+"\n"
	}
	h.Length = int64(len(text))
	c.out = http1.AppendResponse(c.out, &h, http1.Length, http1.ResponseOptions{Close: true, Head: c.isHead, Minor: 1})
	if !c.isHead {
		c.out = append(c.out, text...)
	}
	c.r, c.w = 0, 0
	c.closing = true
	c.l.Arm(&c.timer, c, idleDown) // should the answer not get out
	c.mark()
	return h.Status
}

// next makes ready for another request once both messages are complete.
func (c *h1server) next() {
	if c.last || c.half && c.r == c.w {
		c.closing = true
		c.mark()
		return
	}
	c.state = stHead
	c.headAt = 0
	c.active = c.l.Now()
	c.mark() // the flush pumps what was pipelined
}

// responseDone: the final response has been queued whole.
func (c *h1server) responseDone() {
	x := c.x
	c.x = nil
	if x != nil {
		c.l.release(c.info.Pool, x)
	}
	if c.outF == http1.ToClose {
		c.last = true
	}
	if c.reqDone {
		c.next()
	}
	c.mark()
}

// WriteHead is exchange.Stream.
func (c *h1server) WriteHead(h *httpmsg.Head, end bool) {
	if c.closed {
		return
	}
	if c.out == nil {
		c.out = c.l.getOut()
	}
	c.l.dated(h)
	if h.Status < 200 {
		c.out = http1.AppendResponse(c.out, h, http1.None, http1.ResponseOptions{Minor: 1})
		if h.Status == 101 {
			c.granted()
		}
		c.mark()
		return
	}
	c.outF = http1.None
	if !end {
		c.outF = http1.ResponseFraming(h, c.isHead, c.minor)
	}
	// An answer of ours does not wait for the request's end, and one to a client that waits for
	// 100 with its body has none to wait for (RFC 9110 10.1.1).
	if c.outF == http1.ToClose || !c.reqDone && (end || c.x != nil && (c.x.Local() || c.x.Req.Expect && c.x.ReqBytes == 0)) || c.lastAnswer() {
		c.last = true
	}
	c.out = http1.AppendResponse(c.out, h, c.outF, http1.ResponseOptions{
		Close: c.last, KeepAlive10: c.keep10 && !c.last, Head: c.isHead, Minor: 1,
	})
	if end {
		c.responseDone()
	}
	c.mark()
}

// WriteData is exchange.Stream.
func (c *h1server) WriteData(p []byte, end bool) int {
	if c.closed {
		return len(p)
	}
	n := c.queue(p, end)
	switch {
	case !end || n < len(p):
	case c.tunnel:
		c.outEnd = true
		c.tunnelEnded()
	default:
		c.responseDone()
	}
	c.mark()
	return n
}

// WriteTrailers is exchange.Stream.
func (c *h1server) WriteTrailers(f []httpmsg.Field) {
	if c.closed {
		return
	}
	c.queueEnd(f)
	c.responseDone()
}

// Resume is exchange.Stream: refused body bytes are offered again at the flush.
func (c *h1server) Resume() {
	if c.stalled {
		c.stalled = false
		c.mark()
	}
}

// Abort is exchange.Stream.
func (c *h1server) Abort(code exchange.Code) {
	if c.closed {
		return
	}
	if x := c.x; x != nil {
		c.x = nil
		c.l.release(c.info.Pool, x)
	}
	if code == exchange.NoError { // answered before the request had ended: the rest is not read
		c.closing, c.last = true, true
		c.mark()
		return
	}
	// A response under way cannot be completed: the client must see a cut, not an end.
	c.drop(true, code)
}

// Flush is reactor.Flusher.
func (c *h1server) Flush() {
	c.dirty = false
	if c.closed {
		return
	}
	defer c.tell()
	if !c.wblk && (len(c.out) > 0 || len(c.sealed) > 0) {
		if c.sh.writeSpent() {
			c.yield(c)
			return
		}
		if err := c.send(); err != nil {
			c.drop(true, exchange.Cancel)
			return
		}
	}
	if c.wblk {
		if c.state == stBody { // a client may send its request on before it reads
			c.pump()
		}
		return
	}
	if c.roomAgain() {
		if c.x != nil {
			c.x.DownstreamWritable()
		}
		if c.closed || len(c.out) > 0 {
			return // marked again
		}
	}
	if c.closing && c.x == nil {
		c.end()
		return
	}
	if err := c.endOut(); err != nil {
		c.drop(true, exchange.Cancel)
		return
	}
	if c.pending() {
		c.pump()
		return
	}
	c.rest()
}

// end closes after the last response. Where the client may still be sending,
// an immediate close would reset the connection and could destroy the
// response on its way: stop sending, and read for a while (RFC 9112 9.6).
func (c *h1server) end() {
	if c.reqDone && c.r == c.w && c.state != stHead && !c.readable() {
		c.shutNow()
		return
	}
	c.rest()
	c.r, c.w = 0, 0
	c.stalled = false // nobody refuses what comes now
	c.state = stLinger
	if c.rec != nil {
		c.shutNow()
		return
	}
	_ = unix.Shutdown(c.fd, unix.SHUT_WR)
	c.l.Disarm(&c.timer)
	c.l.Arm(&c.timer, c, lingerTime)
	if c.readable() {
		c.pump()
	}
}

func (c *h1server) linger() bool {
	n, err := c.read(c.l.Scratch[:])
	if err == errAgain {
		return false
	}
	if err == errYield {
		c.yield(c)
		return false
	}
	c.lingered += n
	if err != nil || c.lingered > lingerBytes {
		c.shutNow()
		return false
	}
	return true
}

func (c *h1server) shutNow() { c.close(false) }

// drop ends the connection and what is under way on it.
func (c *h1server) drop(abort bool, code exchange.Code) {
	defer c.close(abort) // even if the service panics
	if x := c.x; x != nil {
		c.x = nil
		x.DownstreamClosed(code)
		c.l.release(c.info.Pool, x)
	}
}

func (c *h1server) close(abort bool) {
	if c.closed {
		return
	}
	c.l.Disarm(&c.cut)
	c.shut(abort)
	c.dropBuffers()
	if c.info.Bond != nil {
		c.info.Bond.Release()
	}
	if c.info.OnClose != nil {
		c.info.OnClose(c.info)
	}
}

// serves is drainable.
func (c *h1server) serves() bool { return true }

// drain is drainable. An idle connection stays: a request may be on its way, and
// HTTP/1 has no word to call it back. The next answer says that it is the last
// (WriteHead, RFC 9112 9.6).
func (c *h1server) drain() {}

// farewell is drainable: an idle connection ends in order. One on which something has come
// meanwhile is not idle: its next answer is its last.
func (c *h1server) farewell() {
	if c.x == nil && c.r == c.w && len(c.out) == 0 && !c.readable() && c.l.Pending(c.fd)&reactor.Readable == 0 {
		c.drop(false, exchange.NoError)
	}
}

// lastAnswer: the process is leaving, or the client has ended its side, and no pipelined request
// waits that could be answered on this connection.
func (c *h1server) lastAnswer() bool { return (c.l.draining || c.half) && c.r == c.w }

// Show is Shown.
func (c *h1server) Show(s *ConnState) bool {
	if c.closed {
		return false
	}
	c.show(s)
	s.Protocol, s.Client, s.Requests = "http1", PeerAddr(c.fd), c.requests
	switch {
	case c.state == stLinger:
		s.State = "linger"
	case c.x != nil && c.tunnel:
		s.State = "tunnel"
	case c.x != nil && !c.reqDone:
		s.State = "request"
	case c.x != nil:
		s.State = "response"
	case c.r < c.w:
		s.State = "head"
	default:
		s.State = "idle"
	}
	if c.x != nil {
		s.Streams = 1
	}
	if d, ok := c.info.User.(Describer); ok {
		d.Describe(s)
	}
	return true
}

// granted: the answer 101 goes to the client.
func (c *h1server) granted() {
	c.startTunnel()
	c.state, c.reqDone, c.last = stBody, false, true
}

// clientEnded: the client has ended its side of the tunnel.
func (c *h1server) clientEnded() {
	c.inEnded()
	c.state, c.reqDone = stWait, true
	c.x.RequestData(nil, true)
	c.tunnelEnded()
}

// tunnelEnded closes once both sides have ended.
func (c *h1server) tunnelEnded() {
	if c.closed || !c.inEnd || !c.outEnd {
		return
	}
	if x := c.x; x != nil {
		c.x = nil
		c.l.release(c.info.Pool, x)
	}
	c.closing = true
	c.l.Arm(&c.timer, c, idleDown) // should what is left not get out
	c.mark()
}
