package engine

import (
	"aether/dataplane/exchange"
	"aether/dataplane/http1"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
	"aether/tproxy/socket"
)

// h1conn is what both ends of HTTP/1 have in common: buffers that are held
// while bytes move, a body that comes in, and a body that goes out.
type h1conn struct {
	transport
	x *exchange.Exchange // the request under way, nil between two

	in   []byte // read buffer, nil when idle
	r, w int    // unread bytes are in[r:w]
	out  []byte // bytes waiting for the flush, nil when idle

	parser http1.Parser
	body   http1.BodyReader // of the message that comes in
	outF   http1.Framing    // of the message that goes out

	stalled  bool // the exchange refused body bytes: wait for Resume
	trailing bool // the body has ended, its trailers have not been taken
	starved  bool // body bytes for out were refused: tell the exchange once there is room
	pumping  bool
	server   bool // requests come on it: what their exchanges hold is this connection's

	tunnel  bool // both directions are bytes, not messages (upgrade.go)
	inEnd   bool // tunnel: the peer has ended its side
	outEnd  bool // tunnel: our side ends with what is in out
	outSaid bool // tunnel: and the peer has been told so
}

// h1end is the end that an h1conn is part of.
type h1end interface {
	// process handles unread bytes; false: wait for something else than bytes.
	process() bool
	// fill reads once; false: there is nothing new to process.
	fill() bool
	// partial reports whether the peer, at the other end of a TCP connection, has begun a message
	// and not ended it.
	partial() bool
	// takeData and takeTrailers give the body to the exchange.
	takeData(p []byte, end bool) int
	takeTrailers(f []httpmsg.Field) bool
}

// pumpAll reads and processes until there is nothing more to do now.
func (c *h1conn) pumpAll(e h1end) {
	if c.pumping {
		return
	}
	c.pumping = true
	before := c.rx
	defer func() { c.pumping = false; c.prompt(e, c.rx-before); c.tell() }()
	for !c.closed {
		if (c.r < c.w || c.trailing) && !e.process() {
			c.keepReadBuffer()
			return
		}
		if c.closed || c.stalled || !e.fill() {
			return
		}
	}
}

// prompt acknowledges at once what was read, n bytes, if the peer may hold back the rest of its
// message for want of that: whoever writes a head and then a body, with Nagle's algorithm, waits for the
// acknowledgement that the kernel puts off by 40 ms (RFC 9293 3.7.4, 3.8.6.3). Of what comes in bulk the
// kernel acknowledges enough by itself.
func (c *h1conn) prompt(e h1end, n int64) {
	if n > 0 && n < readBuf && !c.closed && !c.fin && c.rec == nil && !c.tunnel && e.partial() {
		socket.QuickAck(c.fd)
	}
}

// refill reads once behind the unread bytes; the caller adds what came to w.
// grow: a head is being read, which may need the big buffer. Nothing and no
// error: nothing is there now, or the exchange or the parser has to move first.
func (c *h1conn) refill(self reactor.Task, grow bool) (int, error) {
	if !c.readable() {
		c.rest()
		return 0, nil
	}
	if c.in == nil {
		if c.sh.readSpent() { // a buffer is not held for the wait
			c.yield(self)
			return 0, nil
		}
		c.in = c.l.getIn()
	}
	if c.r > 0 {
		c.w = copy(c.in, c.in[c.r:c.w])
		c.r = 0
	}
	if c.w == len(c.in) {
		if !grow || len(c.in) == bigReadBuf {
			c.keepReadBuffer()
			return 0, nil
		}
		b := c.l.getBig()
		copy(b, c.in)
		c.l.putIn(c.in)
		c.in = b
	}
	n, err := c.read(c.in[c.w:])
	switch err {
	case errAgain:
		c.rest()
		return 0, nil
	case errYield:
		c.yield(self)
		return 0, nil
	}
	return n, err
}

// What became of a run of body bytes.
const (
	bodyMore uint8 = iota
	bodyWait       // refused, or the connection is gone
	bodyDone       // that was all, trailers included
	bodyBad        // the framing is broken
)

// pumpBody offers one run of the body that comes in.
func (c *h1conn) pumpBody(e h1end) uint8 {
	if c.trailing {
		if !e.takeTrailers(c.body.Trailers()) {
			c.stalled = true
			return bodyWait
		}
		c.trailing = false
		return bodyDone
	}
	data, used, done, err := c.body.Next(c.in[c.r:c.w])
	if err != nil {
		return bodyBad
	}
	trailers := done && len(c.body.Trailers()) > 0
	if len(data) > 0 || done && !trailers {
		n := e.takeData(data, done && !trailers)
		if c.closed {
			return bodyWait
		}
		if n < len(data) {
			c.body.Unread(len(data) - n)
			c.r += used - (len(data) - n)
			c.stalled = true
			return bodyWait
		}
	}
	c.r += used
	switch {
	case trailers:
		c.trailing = true
		return bodyMore
	case done:
		return bodyDone
	}
	return bodyMore
}

// queue takes as much of p as there is room for; end, with all of p, ends the body.
func (c *h1conn) queue(p []byte, end bool) int {
	n := min(len(p), max(0, c.high()-len(c.out)))
	if n > 0 {
		c.out = c.l.room(c.out, n+chunkExtra)
		if c.outF == http1.Chunked {
			c.out = http1.AppendChunk(c.out, p[:n])
		} else {
			c.out = append(c.out, p[:n]...)
		}
	}
	if n < len(p) {
		c.starved = true
	} else if end {
		c.queueEnd(nil)
	}
	return n
}

// queueEnd ends the body that goes out. Only chunked has a place for trailers.
func (c *h1conn) queueEnd(trailers []httpmsg.Field) {
	if c.outF == http1.Chunked {
		c.out = http1.AppendLast(c.out, trailers)
	}
}

// send writes what it can of out.
func (c *h1conn) send() error {
	n, err := c.write(c.out)
	if err != nil {
		return err
	}
	c.out = c.out[:copy(c.out, c.out[n:])]
	return nil
}

// high is how much output is queued before its source is stopped.
func (c *h1conn) high() int {
	if c.sh.tight {
		return tightOut
	}
	return outHigh
}

// tell accounts the buffers as they are now.
func (c *h1conn) tell() {
	if !c.closed { // else shut has
		n := len(c.in) + cap(c.out) + c.records() + c.body.Held()
		if c.x != nil && c.server {
			n += requestHeld + c.x.Held()
		}
		c.account(n)
	}
}

// roomAgain reports, once, that what was refused for out can be offered again.
func (c *h1conn) roomAgain() bool {
	if !c.starved || len(c.out) >= c.high()/2 {
		return false
	}
	c.starved = false
	return true
}

// pending: there is something to pump without a new edge.
func (c *h1conn) pending() bool { return c.r < c.w || c.trailing || c.readable() }

// rest gives the buffers of an idle connection back.
func (c *h1conn) rest() {
	if c.r == c.w && c.in != nil && !c.trailing {
		c.r, c.w = 0, 0
		c.l.putIn(c.in)
		c.in = nil
	}
	if len(c.out) == 0 && c.out != nil {
		c.l.putOut(c.out)
		c.out = nil
	}
}

// dropBuffers gives them back whatever is in them.
func (c *h1conn) dropBuffers() {
	if c.in != nil {
		c.l.putIn(c.in)
		c.in = nil
	}
	c.l.putOut(c.out)
	c.out = nil
}

// startTunnel turns both directions of an HTTP/1 connection into bytes. Its timer
// rests until both have ended.
func (c *h1conn) startTunnel() {
	c.tunnel, c.stalled, c.starved = true, false, false
	c.outF = http1.None
	c.body.Start(http1.ToClose, 0)
	c.l.Disarm(&c.timer)
}

// inEnded notes that a tunnel's peer has ended its side: there is nothing to read any more.
func (c *h1conn) inEnded() {
	c.ready, c.fin, c.more = false, false, false
	c.inEnd = true
	c.rest()
}

// endOut ends our side of a tunnel once all of it has been sent.
func (c *h1conn) endOut() error {
	if !c.outEnd || c.outSaid || c.wblk || len(c.out) > 0 {
		return nil
	}
	c.outSaid = true
	return c.halfClose()
}

// chunkExtra is room for a chunk's framing.
const chunkExtra = 32
