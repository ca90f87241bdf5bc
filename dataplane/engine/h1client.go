package engine

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"io"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/http1"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
	"aether/tproxy/socket"
)

// h1client is a connection to an application (or, passed through, to a
// foreign server) that speaks HTTP/1.
type h1client struct {
	h1conn
	owner  h1Owner
	addr   netip.AddrPort
	socket string // the Unix socket that it is to, in the place of addr; empty: none

	connecting  bool
	reused      bool // it has carried a request before this one
	asked       bool // something of this request has been sent
	gotByte     bool // of its answer
	isHead      bool
	reqDone     bool
	resF        http1.Framing
	inBody      bool
	noReuse     bool
	idle        bool
	requests    uint64
	from        int64  // of the bytes written, those before this request
	rested      int64  // when its last answer was complete
	rst         bool   // the connection is closed with a reset
	wantsTunnel bool   // for an upgrade
	accept      []byte // that the answer to a key of ours must hold
}

// h1Owner has opened a connection and gives it requests. Its methods are called on the connection's loop.
type h1Owner interface {
	lost(c *h1client) // it has ended
	put(c *h1client)  // its answer is complete, and it may carry another request
	// hasty: the application closes connections right behind its answers, without a word.
	isHasty() bool
	setHasty(bool)
}

// local: it is to a Unix socket.
func (c *h1client) local() bool { return c.socket != "" }

// serves is drainable: a connection of ours has nothing to drain.
func (c *h1client) serves() bool { return false }

// drain is drainable.
func (c *h1client) drain() {}

// farewell is drainable.
func (c *h1client) farewell() {}

// dialHTTP1 starts a non-blocking connect on fd, a socket from the pod's namespace; one of a
// Unix socket's pool is connected already.
func (l *Loop) dialHTTP1(pod *Pod, fd int, addr netip.AddrPort, unixSocket string, owner h1Owner) (*h1client, error) {
	c := &h1client{owner: owner, addr: addr, socket: unixSocket}
	if !c.local() {
		if err := socket.StartConnect(fd, addr); err != nil {
			unix.Close(fd)
			return nil, err
		}
	}
	if err := c.open(l, pod, fd, nil, c); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if c.local() {
		c.arm()
		return c, nil
	}
	c.connecting, c.wblk = true, true
	l.Arm(&c.timer, c, connectTime)
	return c, nil
}

// Event is reactor.Source.
func (c *h1client) Event(ev uint32) {
	if c.connecting {
		if ev&(reactor.Writable|reactor.Error|reactor.Hangup) == 0 {
			return
		}
		if err := c.connectError(); err != nil {
			c.gone(exchange.Connect)
			return
		}
		c.connecting, c.wblk = false, false
		c.active = c.l.Now()
		c.l.Disarm(&c.timer)
		c.arm()
		c.mark()
	}
	if ev&reactor.Writable != 0 && c.wblk {
		c.wblk = false
		c.mark()
	}
	if ev&^reactor.Writable != 0 {
		c.edge(ev)
		if c.tunnel && ev&reactor.Error != 0 { // reset: a stalled reader would not find out
			c.gone(exchange.Closed)
			return
		}
		c.pump()
	}
}

func (c *h1client) arm() { c.l.Arm(&c.timer, c, c.l.limit(min(idleStream, idleApp))) }

// Fail is reactor.Source, Flusher and Task.
func (c *h1client) Fail(error) { c.gone(exchange.Closed) }

// Run is reactor.Task.
func (c *h1client) Run() {
	if c.closed {
		return
	}
	if !c.later {
		c.tick()
		return
	}
	c.later, c.queued = false, false
	if len(c.out)+len(c.sealed) > 0 {
		c.mark()
	}
	c.pump()
	if !c.closed && !c.timer.Armed() { // it was the timer
		c.tick()
	}
}

// tick judges the connection's age.
func (c *h1client) tick() {
	if c.closed || c.tunnel && c.x != nil {
		return
	}
	limit := idleApp
	if c.x != nil {
		limit = idleStream
	}
	limit = c.l.limit(limit)
	quiet := c.l.Now() - c.active
	switch {
	case c.connecting && quiet < connectTime:
		c.l.Arm(&c.timer, c, connectTime-quiet)
	case c.connecting:
		c.gone(exchange.Connect)
	case quiet < limit:
		c.l.Arm(&c.timer, c, limit-quiet)
	case c.x != nil:
		c.gone(exchange.Timeout)
	default:
		c.gone(exchange.NoError)
	}
}

func (c *h1client) mark() {
	if !c.dirty && !c.closed {
		c.dirty = true
		c.l.Dirty(c)
	}
}

// take gives the connection a request; it must be idle or new.
func (c *h1client) take(x *exchange.Exchange) {
	c.x = x
	c.requests++
	c.idle = false
	c.asked, c.gotByte, c.inBody, c.trailing, c.stalled, c.starved, c.reqDone = false, false, false, false, false, false, false
	c.isHead = x.Head()
	c.from = c.tx
	c.active = c.l.Now()
	c.wantsTunnel = false
	x.Forward(c)
}

// WriteHead is exchange.Stream.
func (c *h1client) WriteHead(h *httpmsg.Head, end bool) {
	if c.closed {
		return
	}
	switch c.outF = http1.RequestFraming(h); {
	case h.Upgrade != nil: // the request ends with its head, whatever follows once it is granted
		h, end = c.tunnelRequest(h), true
		c.outF = http1.None
	case end && c.outF == http1.Chunked:
		c.outF = http1.None
	}
	if c.out == nil {
		c.out = c.l.getOut()
	}
	c.out = http1.AppendRequest(c.out, h, c.outF)
	c.reqDone = end
	c.mark()
}

// WriteData is exchange.Stream.
func (c *h1client) WriteData(p []byte, end bool) int {
	if c.closed {
		return len(p)
	}
	n := c.queue(p, end)
	if end && n == len(p) {
		c.reqDone = true
		if c.tunnel {
			c.outEnd = true
			c.tunnelEnded()
		}
	}
	c.mark()
	return n
}

// WriteTrailers is exchange.Stream.
func (c *h1client) WriteTrailers(f []httpmsg.Field) {
	if c.closed {
		return
	}
	c.queueEnd(f)
	c.reqDone = true
	c.mark()
}

// Resume is exchange.Stream.
func (c *h1client) Resume() {
	if c.stalled {
		c.stalled = false
		c.mark()
	}
}

// Abort is exchange.Stream: HTTP/1 has no way to give up a request but to close.
func (c *h1client) Abort(exchange.Code) {
	c.x = nil
	c.rst = c.tunnel // an end would tell the application that all had come
	c.gone(exchange.NoError)
}

// gone closes the connection; an exchange on it is told.
func (c *h1client) gone(code exchange.Code) {
	if c.closed {
		return
	}
	c.shut(c.rst)
	c.dropBuffers()
	c.owner.lost(c)
	if x := c.x; x != nil {
		c.x = nil
		x.UpstreamClosed(code)
	}
}

// broke ends the connection for what its answer breaks.
func (c *h1client) broke(why error) {
	if c.x != nil {
		c.x.Cause = why
	}
	c.gone(exchange.Protocol)
}

// short is what an end amid the answer leaves it without; nil: nothing of the answer has come, or its length is not known.
func (c *h1client) short() error {
	switch {
	case !c.gotByte || c.tunnel:
	case !c.inBody:
		return shortHead
	case c.resF == http1.Chunked:
		return shortChunks
	case c.resF == http1.Length:
		return shortLength
	}
	return nil
}

// fresh reports whether the idle connection can carry a request, as far as is known before it is
// sent: bytes that nobody asked for are no answer to it, and behind an end there is none. A look at the
// socket is a system call: it is made only where something may have come unseen.
func (c *h1client) fresh() bool {
	switch {
	case c.readable():
		return false
	case c.l.Pending(c.fd)&^reactor.Writable == 0 && !c.owner.isHasty() && c.l.Now()-c.active < lookAfter:
		return true
	}
	return c.asleep()
}

// broken is what a connection's end means for the request on it.
func (c *h1client) broken() exchange.Code {
	switch {
	case !c.reused || c.gotByte:
		return exchange.Closed
	case c.taken() <= c.from:
		return exchange.Unsent
	}
	return exchange.Stale
}

func (c *h1client) pump() { c.pumpAll(c) }

// fill is h1end.
func (c *h1client) fill() bool {
	if c.inEnd {
		return false
	}
	n, err := c.refill(c, !c.inBody)
	if err != nil {
		c.ended(err)
		return false
	}
	if n == 0 {
		return false
	}
	if c.x != nil && !c.asked {
		c.gone(exchange.Stale) // an answer before its request is an answer to something else
		return false
	}
	c.gotByte = true
	c.w += n
	return true
}

// ended: the application closed or reset the connection.
func (c *h1client) ended(err error) {
	if c.x != nil && c.tunnel && errors.Is(err, io.EOF) {
		c.appEnded()
		return
	}
	if c.x != nil && c.inBody && c.resF == http1.ToClose && errors.Is(err, io.EOF) {
		c.noReuse = true
		c.x.ResponseData(nil, true)
		c.responseDone()
		return
	}
	if c.x == nil || !c.gotByte {
		c.hasty()
	}
	if err := c.short(); c.x != nil && err != nil {
		c.x.Cause = err
	}
	c.gone(c.broken())
}

// hasty notes an end that the application made right behind an answer that did not announce it.
func (c *h1client) hasty() {
	if c.reused && c.l.Now()-c.rested < hastyTime {
		c.owner.setHasty(true)
	}
}

// process is h1end.
func (c *h1client) process() bool {
	for (c.r < c.w || c.trailing) && !c.closed {
		if c.x == nil { // bytes that nobody asked for: the connection is not to be trusted
			c.gone(exchange.Protocol)
			return false
		}
		if !c.inBody {
			n, f, err := c.parser.Response(c.in[c.r:c.w], &c.l.resHead, c.isHead)
			if err != nil {
				c.broke(err)
				return false
			}
			if n == 0 {
				return true
			}
			c.r += n
			c.resF = f
			if c.l.resHead.Status < 200 {
				if c.l.resHead.Status == 101 {
					if err := c.switched(&c.l.resHead); err != nil {
						c.broke(err)
						return false
					}
				}
				c.x.ResponseHead(&c.l.resHead, false)
				continue
			}
			c.noReuse = c.l.resHead.Close || f == http1.ToClose
			end := f == http1.None || f == http1.Length && c.l.resHead.Length == 0
			c.inBody = !end
			if !end {
				c.body.Start(f, c.l.resHead.Length)
			}
			x := c.x
			x.ResponseHead(&c.l.resHead, end)
			if end {
				c.responseDone()
			}
			continue
		}
		if c.stalled {
			return false
		}
		switch c.pumpBody(c) {
		case bodyWait:
			return false
		case bodyBad:
			_, _, _, err := c.body.Next(nil) // again: it stays
			c.broke(err)
			return false
		case bodyDone:
			c.responseDone()
		}
	}
	return !c.closed
}

// partial is h1end.
func (c *h1client) partial() bool {
	return c.x != nil && c.gotByte && !c.local()
}

// takeData is h1end.
func (c *h1client) takeData(p []byte, end bool) int { return c.x.ResponseData(p, end) }

// takeTrailers is h1end.
func (c *h1client) takeTrailers(f []httpmsg.Field) bool {
	c.x.ResponseTrailers(f)
	return true
}

// responseDone: the answer is complete; the connection goes back to its pool if it can.
func (c *h1client) responseDone() {
	c.x = nil
	c.inBody = false
	if c.closed {
		return
	}
	if c.noReuse || !c.reqDone || c.r != c.w || len(c.out) > 0 {
		c.gone(exchange.NoError)
		return
	}
	if c.reused {
		c.owner.setHasty(false)
	}
	c.reused = true
	c.active = c.l.Now()
	c.rested = c.active
	c.owner.put(c)
}

// Flush is reactor.Flusher.
func (c *h1client) Flush() {
	c.dirty = false
	if c.closed {
		return
	}
	defer c.tell()
	if len(c.out) > 0 && !c.wblk {
		if c.sh.writeSpent() {
			c.yield(c)
			return
		}
		c.asked = true
		if err := c.send(); err != nil {
			if c.tunnel {
				c.gone(exchange.Closed)
				return
			}
			// An answer may have come before the application stopped reading.
			c.out = c.out[:0]
			c.noReuse = true
			c.ready = true
			c.pump()
			if !c.closed && c.x != nil && c.r == c.w && !c.later { // else the pod's share was spent before that was read
				c.gone(c.broken())
			}
			return
		}
	}
	if c.wblk {
		if !c.connecting { // it may have to be read before it reads on
			c.pump()
		}
		return
	}
	if c.roomAgain() {
		if c.x != nil {
			c.x.UpstreamWritable()
		}
		if c.closed || len(c.out) > 0 {
			return
		}
	}
	if err := c.endOut(); err != nil || c.tunnel && c.x == nil {
		c.gone(exchange.Closed) // or both sides have ended
		return
	}
	if c.pending() {
		c.pump()
		return
	}
	c.rest()
}

// Show is Shown.
func (c *h1client) Show(s *ConnState) bool {
	if c.closed {
		return false
	}
	c.show(s)
	s.Role, s.Protocol, s.Requests = "application", "http1", c.requests
	s.Destination, s.Socket = c.addr, c.socket
	switch {
	case c.connecting:
		s.State = "connect"
	case c.x == nil:
		s.State = "idle"
	case c.tunnel:
		s.State = "tunnel"
	case c.gotByte:
		s.State = "response"
	default:
		s.State = "request"
	}
	if c.x != nil {
		s.Streams = 1
	}
	return true
}

// tunnelRequest makes the head of a request for an upgrade as the application gets it.
// WebSocket over HTTP/2 has no key (RFC 8441 5); one is made here, and its answer judged here.
func (c *h1client) tunnelRequest(h *httpmsg.Head) *httpmsg.Head {
	c.wantsTunnel, c.accept = true, nil
	if !isWebSocket(h.Upgrade) {
		return h
	}
	if _, ok := h.Get(string(fieldWSKey)); ok {
		return h
	}
	var nonce [16]byte
	_, _ = rand.Read(nonce[:]) // never fails
	key := base64.StdEncoding.AppendEncode(nil, nonce[:])
	c.accept = wsAccept(key)
	own := *h
	own.Fields = append(slices.Clone(h.Fields), httpmsg.Field{Name: fieldWSKey, Value: key})
	if _, ok := h.Get(string(fieldWSVersion)); !ok {
		own.Fields = append(own.Fields, httpmsg.Field{Name: fieldWSVersion, Value: wsVersion})
	}
	return &own
}

// switched judges a 101, and opens the tunnel; or gives what is wrong with it.
func (c *h1client) switched(h *httpmsg.Head) error {
	if !c.wantsTunnel || !bytes.EqualFold(h.Upgrade, c.x.Req.Upgrade) {
		return strangeSwitch
	}
	if c.accept != nil {
		if v, _ := h.Get(string(fieldWSAccept)); !bytes.Equal(v, c.accept) {
			return badAccept
		}
		h.Del(string(fieldWSAccept))
	}
	h.Upgrade = c.x.Req.Upgrade
	c.startTunnel()
	c.inBody, c.resF, c.noReuse = true, http1.ToClose, true
	return nil
}

// appEnded: the application has ended its side of the tunnel.
func (c *h1client) appEnded() {
	c.inEnded()
	c.x.ResponseData(nil, true)
	c.tunnelEnded()
}

// tunnelEnded closes once both sides have ended and all has been sent.
func (c *h1client) tunnelEnded() {
	if c.closed || !c.inEnd || !c.outEnd {
		return
	}
	c.x = nil
	c.active = c.l.Now()
	c.arm() // should what is left not get out
	c.mark()
}
