package engine

import (
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

// farewell is drainer: an idle connection ends in order.
func (c *h1server) farewell() {
	if c.x == nil && c.r == c.w && len(c.out) == 0 {
		c.drop(false, exchange.NoError)
	}
}

// lastAnswer: the process is leaving, and no pipelined request waits that could be
// answered on this connection.
func (c *h1server) lastAnswer() bool { return c.l.draining && c.r == c.w }

// serves is drainer.
func (c *h2conn) serves() bool { return !c.client }

// drain is drainer: the two GOAWAYs of RFC 9113 6.8, of which the second follows
// when the client has answered the PING between them. One that does not answer
// is not waited for once it has no stream.
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
// are told the same. Idle lets the caller wait for the end. There is no way back.
// Safe for concurrent use.
func (e *Engine) Drain() {
	e.mu.Lock()
	e.draining = true
	loops := append([]*Loop(nil), e.loops...)
	e.mu.Unlock()
	e.everywhere(loops, func(l *Loop) {
		l.draining = true
		l.Each(func(s reactor.Source) {
			if d, ok := s.(drainer); ok {
				d.drain()
			}
		})
	})
}

// Farewell ends clients' idle connections in order and names to HTTP/2 clients the
// last request that was taken: whoever calls it ends Run next, which cuts the
// rest. Safe for concurrent use.
func (e *Engine) Farewell() {
	e.everywhere(e.Loops(), func(l *Loop) {
		l.Each(func(s reactor.Source) {
			if d, ok := s.(drainer); ok {
				d.farewell()
			}
		})
	})
	e.everywhere(e.Loops(), func(*Loop) {}) // the iteration that wrote it is over
}

// Serving counts what clients have under way: connections, and goroutines that
// relay or shake hands. Where no connection is accepted meanwhile 0 means that
// none is left. Safe for concurrent use.
func (e *Engine) Serving() int {
	// What moves from a goroutine to its loop is posted before the goroutine
	// counts as ended, and a loop runs what is posted in order; what moves the
	// other way is counted by the second look.
	n := int(e.going.Load())
	if n > 0 {
		return n
	}
	var mu sync.Mutex
	e.everywhere(e.Loops(), func(l *Loop) {
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
	return n + int(e.going.Load())
}

// everywhere runs f on the loops and waits for them. A loop that has ended has nothing left.
func (e *Engine) everywhere(loops []*Loop, f func(*Loop)) {
	var wg sync.WaitGroup
	for _, l := range loops {
		wg.Add(1)
		if err := l.Post(func() { defer wg.Done(); f(l) }); err != nil {
			wg.Done()
		}
	}
	wg.Wait()
}

// StopListening takes the pod's listening sockets off their loops; the pod's
// connections stay. What waits to be accepted stays in the sockets, for whoever
// has them too. It returns when the loops have let go of the descriptors, which
// are the caller's to close. There is no way back.
func (p *Pod) StopListening() {
	p.mu.Lock()
	p.deaf = true
	p.mu.Unlock()
	p.eng.everywhere(p.eng.Loops(), func(l *Loop) { p.unlisten(l) })
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
