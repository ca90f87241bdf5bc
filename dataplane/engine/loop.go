package engine

import (
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
	"aether/tproxy/socket"
	"context"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Gauges are what a loop carries now.
type Gauges struct {
	Outbound, Inbound atomic.Int64 // requests under way, counted by the service that answers
	Sessions          atomic.Int64 // hop sessions
}

// Loop is a reactor loop with what HTTP connections on it share.
type Loop struct {
	*reactor.Loop
	proc *process

	// Gauges say what the loop carries now. The loop writes them; anybody may read.
	Gauges Gauges

	asked   atomic.Bool // a question of Ask is on its way or in work
	load    float64     // guarded by Engine.mu
	lastCPU time.Duration

	backlog backlog
	level   Level // how short of memory the process is, and
	scale   int64 // hundredths of the limits of time that are in force

	draining bool // the process is leaving: clients' connections are to end
	shut     bool // and HTTP/2 requests of new ones are not taken any more

	dates   dates
	dateNow func() []byte // date, made once

	reqHead, resHead httpmsg.Head // the head just parsed; whoever keeps it copies it

	in, big, out, bigOut [][]byte // free buffers

	dead   []*exchange.Exchange // to be recycled after the flush
	deadOf []*exchange.Pool
	reap   bool

	kept [keptKinds]freeList // what the rooms above keep on each loop
}

// What the rooms above keep on each loop.
const (
	keptH2           = iota // h2Free
	keptApps                // appPools
	keptLocalStreams        // pairFree
	keptKinds
)

// freeList is something that a room above keeps on a loop.
type freeList interface {
	shrink() // memory is short: what is free is not to be kept
}

// Run recycles what ended in this iteration: nothing holds it any more.
func (r *recycler) Run() {
	l := (*Loop)(r)
	l.reap = false
	for i, x := range l.dead {
		l.deadOf[i].Release(x)
		l.dead[i], l.deadOf[i] = nil, nil
	}
	l.dead, l.deadOf = l.dead[:0], l.deadOf[:0]
}

type recycler Loop

// Fail: there is nothing to close; what was not recycled is garbage.
func (r *recycler) Fail(error) {
	l := (*Loop)(r)
	clear(l.dead)
	clear(l.deadOf)
	l.dead, l.deadOf = l.dead[:0], l.deadOf[:0]
}

func (l *Loop) queueRecycle() {
	if !l.reap {
		l.reap = true
		l.After((*recycler)(l))
	}
}

func (l *Loop) release(p *exchange.Pool, x *exchange.Exchange) {
	l.dead = append(l.dead, x)
	l.deadOf = append(l.deadOf, p)
	l.queueRecycle()
}

func (l *Loop) getIn() []byte {
	if n := len(l.in); n > 0 {
		b := l.in[n-1]
		l.in = l.in[:n-1]
		return b
	}
	return make([]byte, readBuf)
}

func (l *Loop) getBig() []byte {
	if n := len(l.big); n > 0 {
		b := l.big[n-1]
		l.big = l.big[:n-1]
		return b
	}
	return make([]byte, bigReadBuf)
}

func (l *Loop) putIn(b []byte) {
	switch {
	case len(b) == readBuf && len(l.in) < l.keep(keepBufs):
		l.in = append(l.in, b)
	case len(b) == bigReadBuf && len(l.big) < l.keep(keepBufs/8):
		l.big = append(l.big, b)
	}
}

func (l *Loop) getOut() []byte {
	if n := len(l.out); n > 0 {
		b := l.out[n-1]
		l.out = l.out[:n-1]
		return b[:0]
	}
	return make([]byte, 0, smallOut)
}

// room returns b with room for n more bytes. What outgrows a small buffer
// moves to a big one of the loop's, instead of growing step by step.
func (l *Loop) room(b []byte, n int) []byte {
	switch need := len(b) + n; {
	case need <= cap(b):
		return b
	case b == nil && need <= smallOut:
		return l.getOut()
	case need > bigOut:
		return b // append makes one of its own, which is not kept
	}
	var big []byte
	if k := len(l.bigOut); k > 0 {
		big = l.bigOut[k-1][:0]
		l.bigOut = l.bigOut[:k-1]
	} else {
		big = make([]byte, 0, bigOut)
	}
	big = append(big, b...)
	l.putOut(b)
	return big
}

func (l *Loop) putOut(b []byte) {
	switch {
	case cap(b) == bigOut:
		if len(l.bigOut) < l.keep(keepBig) {
			l.bigOut = append(l.bigOut, b[:0])
		}
	case cap(b) >= smallOut && cap(b) <= 4*smallOut && len(l.out) < l.keep(keepBufs):
		l.out = append(l.out, b[:0])
	}
}

// press puts a level in force on the loop.
func (l *Loop) press(level Level, scale int64) {
	if level >= Shrink {
		l.in, l.big, l.out, l.bigOut = nil, nil, nil, nil
		for _, k := range l.kept {
			if k != nil {
				k.shrink()
			}
		}
	}
	shorter := scale < l.scale
	l.level, l.scale = level, scale
	if !shorter && level < NoKeepAlive {
		return
	}
	// Timers of idle connections were set by the longer limits.
	a := &aging{l: l}
	l.Each(func(s reactor.Source) {
		if c, ok := s.(aged); ok {
			a.conns = append(a.conns, c)
		}
	})
	l.Later(a)
}

// limit is a limit of time as it is in force.
func (l *Loop) limit(d int64) int64 { return d / 100 * l.scale }

// keep is how many free buffers are kept, of n.
func (l *Loop) keep(n int) int {
	if l.level >= Shrink {
		return n / 16
	}
	return n
}

// aged is a connection whose limits of time are looked at out of turn.
type aged interface{ tick() }

// agedAtOnce bounds how many of them an iteration looks at.
const agedAtOnce = 256

// aging looks at connections, some an iteration.
type aging struct {
	l     *Loop
	conns []aged
}

// Run is reactor.Task.
func (a *aging) Run() {
	n := min(len(a.conns), agedAtOnce)
	for _, c := range a.conns[:n] {
		a.l.Do(once{c})
	}
	if a.conns = a.conns[n:]; len(a.conns) > 0 {
		a.l.Later(a)
	}
}

// Fail is reactor.Task.
func (a *aging) Fail(error) {}

// once is a tick as a task: a panic in it ends its connection alone.
type once struct{ aged }

func (o once) Run() { o.tick() }

func (o once) Fail(cause error) {
	if s, ok := o.aged.(reactor.Source); ok {
		s.Fail(cause)
	}
}

// backlog counts the pods that had work put off, on a loop.
type backlog struct {
	iter uint64 // the iteration that now is about
	now  int
	next int // of the next iteration
}

// HandOff takes a registered socket off the loop for a goroutine to use.
func (l *Loop) HandOff(fd int) (*net.TCPConn, error) {
	if err := l.Detach(fd); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return socket.MakeConn(fd)
}

// Go runs f in a goroutine that Run waits for. It is for what a client has under
// way: Serving counts it.
func (l *Loop) Go(f func()) {
	l.proc.going.Add(1)
	l.proc.wg.Go(func() {
		defer l.proc.going.Add(-1)
		f()
	})
}

// everywhere runs f on the loops and waits for them, or until ctx ends: f then runs
// on the others when they get to it. A loop that has ended has nothing left.
func everywhere(ctx context.Context, loops []*Loop, f func(*Loop)) error {
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

// drainable is a connection of a client's, which is told when the process is
// about to leave. Its methods run on its loop.
type drainable interface {
	// serves reports whether it is a client's: one of ours has nothing to drain.
	serves() bool
	// drain begins an end that loses no request.
	drain()
	// farewell says, at the deadline, what is left to say: the connection is cut next.
	farewell()
}

// date is the Date of an answer that goes out now.
func (l *Loop) date() []byte { return l.dates.at(l.Now(), time.Now) }

// dated adds the Date that a final answer lacks: its origin had none, or we made it (RFC 9110 6.6.1).
func (l *Loop) dated(h *httpmsg.Head) {
	if h.Status < 200 {
		return
	}
	if _, ok := h.Get("date"); !ok {
		h.Add(fieldDate, l.date())
	}
}
