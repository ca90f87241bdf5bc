package engine

import (
	"context"
	"sync"

	"aether/dataplane/exchange"
	"aether/dataplane/http2"
	"aether/dataplane/reactor"
)

// drainer is a connection of a client's, which is told when the process is
// about to leave. Its methods run on its loop.
type drainer interface {
	// serves reports whether it is a client's: one of ours has nothing to drain.
	serves() bool
	// drain begins an end that loses no request.
	drain()
	// farewell says, at the deadline, what is left to say: the connection is cut next.
	farewell()
}

// serves is drainer.
func (c *h1server) serves() bool { return true }

// drain is drainer. An idle connection stays: a request may be on its way, and
// HTTP/1 has no word to call it back. The next answer says that it is the last
// (WriteHead, RFC 9112 9.6).
func (c *h1server) drain() {}

// farewell is drainer: an idle connection ends in order. One on which something has come
// meanwhile is not idle: its next answer is its last.
func (c *h1server) farewell() {
	if c.x == nil && c.r == c.w && len(c.out) == 0 && !c.readable() && c.l.Pending(c.fd)&reactor.Readable == 0 {
		c.drop(false, exchange.NoError)
	}
}

// lastAnswer: the process is leaving, or the client has ended its side, and no pipelined request
// waits that could be answered on this connection.
func (c *h1server) lastAnswer() bool { return (c.l.draining || c.half) && c.r == c.w }

// serves is drainer.
func (c *h2conn) serves() bool { return !c.client }

// drain is drainer: the two GOAWAYs of RFC 9113 6.8, of which the second follows
// when the client has answered the PING between them, but not before settleTime. One
// that does not answer is not waited for once it has no stream.
func (c *h2conn) drain() {
	if c.client || c.closed || c.closing {
		return
	}
	c.h2.Shutdown(http2.NoError)
	c.closing = true
	c.warned = c.l.Now()
	c.active = c.warned // from here on it has pingWait
	c.l.Arm(&c.timer, c, pingWait)
	c.l.Arm(&c.life, (*parting)(c), settleTime)
	c.mark()
}

// settle names the last stream that is taken, once that is due.
func (c *h2conn) settle() {
	if !c.closed && c.h2.Warned() && c.l.Now()-c.warned >= settleTime {
		c.h2.Shutdown(http2.NoError)
		c.mark()
	}
}

// parting is a client's connection as the task of its timer: it came while the process drains
// and is to be told, or was told and its last stream is to be named.
type parting h2conn

// Run is reactor.Task.
func (v *parting) Run() {
	c := (*h2conn)(v)
	c.drain()
	c.settle()
}

// Fail is reactor.Task.
func (v *parting) Fail(cause error) { (*h2conn)(v).Fail(cause) }

// farewell is drainer: the last stream that was taken is named, so that the client knows
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

// Drain begins the end of every client's connection, for a process that is about
// to leave: HTTP/2 clients get GOAWAY, HTTP/1 clients "Connection: close" with
// their next answer; requests go on, and so do connections that come later, which
// are told the same, HTTP/2 ones after warnAfter. Serving tells how many are left.
// There is no way back. A loop that does not run is waited for until ctx ends.
// Safe for concurrent use.
func (e *Engine) Drain(ctx context.Context) {
	e.mu.Lock()
	e.draining = true
	loops := append([]*Loop(nil), e.loops...)
	e.mu.Unlock()
	_ = e.everywhere(ctx, loops, func(l *Loop) { // what is late is told when its loop runs
		l.draining = true
		l.Each(func(s reactor.Source) {
			if d, ok := s.(drainer); ok {
				d.drain()
			}
		})
	})
}

// Farewell ends clients' idle connections in order and names to HTTP/2 clients the
// last request that was taken; those whose handshake ends later are told that none is. Whoever calls it
// ends Run soon, which cuts the rest. A loop that does not run is waited for until ctx ends. Safe for concurrent use.
func (e *Engine) Farewell(ctx context.Context) {
	e.mu.Lock()
	e.shut = true
	loops := append([]*Loop(nil), e.loops...)
	e.mu.Unlock()
	_ = e.everywhere(ctx, loops, func(l *Loop) { // a loop that is late ends its connections when it runs, or Run cuts them
		l.shut = true
		l.Each(func(s reactor.Source) {
			if d, ok := s.(drainer); ok {
				d.farewell()
			}
		})
	})
	_ = e.everywhere(ctx, e.Loops(), func(*Loop) {}) // the iteration that wrote it is over
}

// Serving counts what clients have under way: connections, and goroutines that
// relay or shake hands. Where no connection is accepted meanwhile 0 means that
// none is left. A loop that does not answer before ctx ends counts as one. Safe for
// concurrent use.
func (e *Engine) Serving(ctx context.Context) int {
	// What moves from a goroutine to its loop is posted before the goroutine
	// counts as ended, and a loop runs what is posted in order; what moves the
	// other way is counted by the second look.
	n := int(e.going.Load())
	if n > 0 {
		return n
	}
	var mu sync.Mutex
	err := e.everywhere(ctx, e.Loops(), func(l *Loop) {
		here := 0
		l.Each(func(s reactor.Source) {
			if d, ok := s.(drainer); ok {
				if d.serves() {
					here++
				}
				return
			}
			if _, ours := s.(*h1client); ours {
				return
			}
			if _, ok := s.(Owned); ok { // a connection of which nobody knows yet what it is
				here++
			}
		})
		mu.Lock()
		n += here
		mu.Unlock()
	})
	mu.Lock()
	defer mu.Unlock()
	if err != nil {
		n++
	}
	return n + int(e.going.Load())
}

// everywhere runs f on the loops and waits for them, or until ctx ends: f then runs
// on the others when they get to it. A loop that has ended has nothing left.
func (e *Engine) everywhere(ctx context.Context, loops []*Loop, f func(*Loop)) error {
	done := make(chan struct{}, len(loops))
	n := 0
	for _, l := range loops {
		if l.Post(func() { defer func() { done <- struct{}{} }(); f(l) }) == nil {
			n++
		}
	}
	for ; n > 0; n-- {
		select {
		case <-done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// StopListening takes the pod's listening sockets off their loops; the pod's
// connections stay. What waits to be accepted is accepted first if nobody else has the sockets
// (last), else it stays in them for whoever has. When it returns nil the loops have let go
// of the descriptors, which are the caller's to close; a loop that does not run is waited for
// until ctx ends. There is no way back.
func (p *Pod) StopListening(ctx context.Context, last bool) error {
	p.mu.Lock()
	p.deaf = true
	p.mu.Unlock()
	return p.eng.everywhere(ctx, p.eng.Loops(), func(l *Loop) {
		if last {
			p.acceptRest(l)
		}
		p.unlisten(l)
	})
}

// acceptRest accepts what waits in the pod's listening sockets on l, which nobody would answer
// once they are closed.
func (p *Pod) acceptRest(l *Loop) {
	p.mu.Lock()
	var here []*listener
	for _, ln := range p.listeners {
		if ln.l == l {
			here = append(here, ln)
		}
	}
	p.mu.Unlock()
	for _, ln := range here {
		for n := 0; n < restRounds && !ln.paused && ln.take(); n++ {
		}
	}
}

// unlisten takes the pod's listeners off l.
func (p *Pod) unlisten(l *Loop) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for fd, ln := range p.listeners {
		if ln.l == l {
			l.Disarm(&ln.timer) // else a pause ends with a descriptor that may be another's by then
			_ = l.Detach(fd)
			delete(p.listeners, fd)
		}
	}
}
