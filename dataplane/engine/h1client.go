package engine

import (
	"context"
	"errors"
	"io"
	"math"
	"net"
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
	pool *appPool // nil once the connection does not go back to it

	connecting bool
	reused     bool // it has carried a request before this one
	asked      bool // something of this request has been sent
	gotByte    bool // of its answer
	isHead     bool
	reqDone    bool
	resF       http1.Framing
	inBody     bool
	noReuse    bool
	idle       bool
	requests   uint64
	from       int64  // of the bytes written, those before this request
	rested     int64  // when its last answer was complete
	rst        bool   // the connection is closed with a reset
	asks       bool   // for an upgrade
	accept     []byte // that the answer to a key of ours must hold
}

// dialHTTP1 starts a non-blocking connect on fd, a socket from the pod's namespace; one of a
// Unix socket's pool is connected already.
func (l *Loop) dialHTTP1(pod *Pod, fd int, addr netip.AddrPort, pool *appPool) (*h1client, error) {
	c := &h1client{pool: pool}
	if !pool.local() {
		if err := socket.StartConnect(fd, addr); err != nil {
			unix.Close(fd)
			return nil, err
		}
	}
	if err := c.open(l, pod, fd, nil, c); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if pool.local() {
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
	c.later = false
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
	c.asks = false
	x.Forward(c)
}

// WriteHead is exchange.Stream.
func (c *h1client) WriteHead(h *httpmsg.Head, end bool) {
	if c.closed {
		return
	}
	switch c.outF = http1.RequestFraming(h); {
	case h.Upgrade != nil: // the request ends with its head, whatever follows once it is granted
		h, end = c.ask(h), true
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
	if c.pool != nil {
		c.pool.lost(c)
	}
	if x := c.x; x != nil {
		c.x = nil
		x.ResponseGone(code)
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
	case c.l.Pending(c.fd)&^reactor.Writable == 0 && !c.pool.hasty && c.l.Now()-c.active < lookAfter:
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
	if c.pool != nil && c.reused && c.l.Now()-c.rested < hastyTime {
		c.pool.hasty = true
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
	return c.x != nil && c.gotByte && (c.pool == nil || !c.pool.local())
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
	if c.noReuse || !c.reqDone || c.r != c.w || len(c.out) > 0 || c.pool == nil {
		c.gone(exchange.NoError)
		return
	}
	if c.reused {
		c.pool.hasty = false
	}
	c.reused = true
	c.active = c.l.Now()
	c.rested = c.active
	c.pool.put(c)
}

// Flush is reactor.Flusher.
func (c *h1client) Flush() {
	c.dirty = false
	if c.closed {
		return
	}
	defer c.tell()
	if len(c.out) > 0 && !c.wblk {
		if c.sh.sentUp() {
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
			c.x.UpRoom()
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

// appKey names a pool of connections to one port of one pod's application, to its Unix
// socket, or to a foreign address dialled from the pod (scope then names the connection it serves).
type appKey struct {
	pod   *Pod
	addr  netip.AddrPort
	h2    bool
	scope *ConnInfo
	unix  socket.Unix // in the place of addr
}

// SocketPool gives unconnected, non-blocking sockets made in a pod's namespace.
type SocketPool interface {
	// Get returns a socket at once, or ok == false.
	Get(v6 bool) (fd int, ok bool)
	// Request calls on, from any goroutine, with a socket or an error, soon.
	Request(v6 bool, on func(fd int, err error))
}

// Sockets makes sockets in a pod's network namespace, marked so that capture
// leaves what is dialled with them alone.
type Sockets interface {
	SocketPool
	// Connect connects from the pod's namespace until ctx ends.
	Connect(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error)
}

// appPool is owned by a loop.
type appPool struct {
	l       *Loop
	key     appKey
	socks   SocketPool // nil: of a Unix socket
	idle    []*h1client
	h2      sessions
	hasty   bool // the application closes connections right behind its answers, without a word
	waiting bool // h2: a socket is being made
	n       int
	dials   int // connections to a Unix socket that are being made
	dead    bool
}

// Send sends x to addr from the pod's namespace: to an application, or, with a
// scope, to a foreign server for that downstream connection alone.
func (l *Loop) Send(x *exchange.Exchange, pod *Pod, socks SocketPool, addr netip.AddrPort, h2 bool, scope *ConnInfo) {
	k := appKey{pod: pod, addr: addr, h2: h2, scope: scope}
	p := l.apps[k]
	if p == nil {
		p = &appPool{l: l, key: k, socks: socks}
		p.h2 = sessions{l: l, more: p.dialMoreH2, check: func() {}}
		l.apps[k] = p
	}
	p.send(x)
}

// DropScope closes what Send opened for a downstream connection.
func (l *Loop) DropScope(scope *ConnInfo, addr netip.AddrPort, h2 bool) {
	k := appKey{pod: scope.Pod, addr: addr, h2: h2, scope: scope}
	if p := l.apps[k]; p != nil {
		p.close()
		delete(l.apps, k)
	}
}

func (p *appPool) send(x *exchange.Exchange) {
	if p.key.h2 {
		p.h2.send(x)
		return
	}
	if c := p.reuse(x); c != nil {
		c.take(x)
		return
	}
	if p.local() {
		p.dialLocal(x)
		return
	}
	v6 := p.key.addr.Addr().Unmap().Is6()
	if fd, ok := p.socks.Get(v6); ok {
		p.dial(x, fd)
		return
	}
	x.Park()
	w := waiter{x, x.Gen}
	p.socks.Request(v6, func(fd int, err error) {
		if perr := p.l.Post(func() { p.made(w, fd, err) }); perr != nil && err == nil {
			unix.Close(fd)
		}
	})
}

// reuse takes a connection for x out of the idle ones; nil: there is none.
func (p *appPool) reuse(x *exchange.Exchange) *h1client {
	for n := len(p.idle); n > 0; n = len(p.idle) {
		i := n - 1 // the one used last: the likeliest to be alive
		if p.hasty && !x.Idempotent() {
			// Its end may be on the way, and only a request that may be done twice can be sent again
			// whatever the application had of it. Others get one that has been left open for a while.
			if i = 0; p.l.Now()-p.idle[0].active < hastyTime {
				return nil
			}
		}
		c := p.idle[i]
		p.idle = slices.Delete(p.idle, i, i+1)
		c.idle = false
		if c.fresh() {
			return c
		}
		c.hasty()
		c.gone(exchange.NoError)
	}
	return nil
}

// made takes the socket that was made for w, or why there is none.
func (p *appPool) made(w waiter, fd int, err error) {
	alive := w.alive()
	switch {
	case err != nil:
		if alive {
			w.x.Cause = err
			w.x.ResponseGone(exchange.Connect)
		}
	case !alive || p.dead:
		unix.Close(fd)
		if alive {
			w.x.ResponseGone(exchange.Connect)
		}
	default:
		p.dial(w.x, fd)
	}
}

func (p *appPool) dial(x *exchange.Exchange, fd int) {
	c, err := p.l.dialHTTP1(p.key.pod, fd, p.key.addr, p)
	if err != nil {
		x.Cause = err
		x.ResponseGone(exchange.Connect)
		return
	}
	p.n++
	c.take(x)
}

// dialMoreH2 connects to an HTTP/2 application once more, if it may, and gives
// those that wait to the connection.
func (p *appPool) dialMoreH2() {
	if p.waiting || p.dead || len(p.h2.conns) >= maxAppH2 {
		return
	}
	p.waiting = true
	if p.local() {
		p.dialLocalH2()
		return
	}
	if fd, ok := p.socks.Get(p.key.addr.Addr().Unmap().Is6()); ok {
		p.dialH2(fd, nil)
		return
	}
	p.socks.Request(p.key.addr.Addr().Unmap().Is6(), func(fd int, err error) {
		if perr := p.l.Post(func() { p.dialH2(fd, err) }); perr != nil && err == nil {
			unix.Close(fd)
		}
	})
}

// dialH2 goes on with a socket, or without.
func (p *appPool) dialH2(fd int, err error) {
	p.waiting = false
	if p.dead {
		if err == nil {
			unix.Close(fd)
		}
		return
	}
	if err == nil {
		var c *h2conn
		if c, err = p.l.dialH2(p.key.pod, fd, p.key.addr, &p.h2, p.local()); err == nil {
			c.retireAt = math.MaxInt64
			p.h2.conns = append(p.h2.conns, c)
			p.h2.wake()
			return
		}
	}
	p.h2.fail(err, exchange.Connect)
	p.check()
}

func (p *appPool) put(c *h1client) {
	if p.dead || len(p.idle) >= maxIdleApp {
		c.gone(exchange.NoError)
		return
	}
	c.idle = true
	p.idle = append(p.idle, c)
}

// lost forgets a connection that ended.
func (p *appPool) lost(c *h1client) {
	p.n--
	defer p.check()
	if !c.idle {
		return
	}
	for i, o := range p.idle {
		if o == c {
			last := len(p.idle) - 1
			copy(p.idle[i:], p.idle[i+1:])
			p.idle[last] = nil
			p.idle = p.idle[:last]
			return
		}
	}
}

func (p *appPool) close() {
	p.dead = true
	idle := p.idle
	p.idle = nil
	for _, c := range idle {
		c.idle = false
		c.gone(exchange.NoError)
	}
	p.h2.close(errPodGone, exchange.Closed)
}
