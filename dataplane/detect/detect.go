// Package detect looks at the first bytes of a connection on a loop, until they say which protocol its client speaks and
// to which authority, and yields that as a value.
//
//   - The bytes are not taken: whoever serves the connection gets them with the result.
//   - A connection that waits for its client holds no buffer; what it has sent counts against its pod.
//   - Where the dialled server may be the one that speaks first, it is dialled meanwhile (Race): nobody waits for a time
//     that only shows that the client says nothing.
//   - Every wait has a bound.
//
// It decides nothing: what a result means is the caller's.
package detect

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/engine"
	"aether/dataplane/model"
	"aether/dataplane/reactor"
	"aether/sniff"
	"aether/tproxy/socket"
)

const (
	idleLimit  = 5 * time.Minute  // of a connection that says nothing to a port that must be HTTP
	beginLimit = 15 * time.Second // from the first byte until the bytes say what they are, on a port that must be HTTP; elsewhere bytes that dribble in
	firstRead  = 4 << 10
	keepFree   = 256 // detectors that a loop keeps for the next connections

	recordHandshake = 22 // ContentType of a TLS record that holds a ClientHello (RFC 8446 5.1)
)

// Question is what is to be found out of a connection, and whose it is.
type Question struct {
	Pod     *engine.Pod
	Sockets engine.Sockets // of the pod's namespace; used where Race is set
	Dst     netip.AddrPort // that the client dialled; used where Race is set
	Begin   int64          // when the connection began, by the loop's clock

	// Wait is how long the client may be silent before the result is SniffSilent. 0: the port must be HTTP, and a
	// client may open a connection long before it uses it.
	Wait time.Duration
	// Race: dial Dst meanwhile. If it speaks first, the result is SniffSilent.
	Race bool
	// HelloOnly: nothing but a ClientHello matters. A first byte that begins none is SniffOpaque at once.
	HelloOnly bool
	// Authority: the result has to have the authority of an HTTP request, for which more is read than the bytes that
	// tell the protocol.
	Authority bool
	// Answers: a request that does not come in time is for the codec, which answers that. Else the connection is closed.
	Answers bool
}

// mustBeHTTP: what begins like a request is answered rather than passed on (decision 042).
func (q *Question) mustBeHTTP() bool { return q.Wait == 0 }

// Result is what the first bytes say.
type Result struct {
	Sniff model.Sniff
	Host  string // authority of the first request, or server name of the ClientHello; "": there is none
}

// End is how a connection ended before there was a result.
type End uint8

// How connections end.
const (
	ByClient End = iota // it closed, or did not use the connection
	Shed                // its pod held too much
)

// Client is whose connection is looked at. A is what it wants back with the result. Methods are called on the loop.
type Client[A any] interface {
	// Detected is called once with the result. The connection is d's until one of its Serve methods, Detach or Abort is
	// called; d and its bytes are not used any more after Detected has returned.
	Detected(d *Detector[A], r Result)
	// Undetected is called in the place of Detected when the connection has ended. It is closed.
	Undetected(d *Detector[A], how End)
	// Describe is engine.Describer.
	Describe(s *engine.ConnState)
}

// Detector looks at one connection. It lives on a loop.
type Detector[A any] struct {
	Aside A // the caller's

	q      Question
	l      *engine.Loop
	pool   *Pool[A]
	client Client[A]
	fd     int
	buf    []byte
	held   int // bytes of buf that the pod's account has
	bytes  sniff.State
	h2     authority
	timer  reactor.Timer
	until  int64 // the result must be there by then; 0: the client has not begun
	race   *Race
	done   bool
	last   bool // no more bytes are waited for
	ready  bool
	fin    bool // its end lies behind the bytes, and no further edge will tell of it
}

// Pool keeps detectors of one loop for the next connections. The zero value is ready.
type Pool[A any] struct{ free []*Detector[A] }

// get takes one from the pool. It is reset here and not when it is given back: whoever calls settled or
// end may still look at it.
func (p *Pool[A]) get() *Detector[A] {
	if n := len(p.free); n > 0 {
		d := p.free[n-1]
		p.free = p.free[:n-1]
		*d = Detector[A]{}
		return d
	}
	return &Detector[A]{}
}

// put gives a detector back that is done: nothing but its caller refers to it.
func (d *Detector[A]) put() {
	d.q.Pod.CountFDs(-1)
	d.q.Pod.HoldBytes(-d.held)
	d.held = 0
	if p := d.pool; len(p.free) < keepFree {
		var none A
		d.Aside, d.client, d.buf, d.race = none, nil, nil, nil
		p.free = append(p.free, d)
	}
}

// Begin looks at fd, which is no loop's, on l. aside comes back with the result.
func (p *Pool[A]) Begin(l *engine.Loop, fd int, q Question, c Client[A], aside A) {
	d := p.get()
	d.q, d.l, d.pool, d.client, d.fd, d.Aside = q, l, p, c, fd, aside
	q.Pod.CountFDs(1)
	if err := l.Register(fd, d, reactor.Stream); err != nil {
		unix.Close(fd)
		d.done = true
		d.put()
		return
	}
	wait := q.Wait
	if wait == 0 {
		wait = idleLimit
	}
	l.Arm(&d.timer, d, int64(wait))
	if q.Race {
		d.race = startRace(l, q.Pod, q.Sockets, q.Dst, d)
	}
}

// keep makes buf a buffer of its own with room for n bytes; false: the pod holds too much already, and
// the connection is gone.
func (d *Detector[A]) keep(n int) bool {
	p := d.q.Pod
	if p.HoldsTooMuch() {
		d.end(true, Shed)
		return false
	}
	d.buf = append(make([]byte, 0, n), d.buf...)
	p.HoldBytes(n - d.held)
	d.held = n
	return true
}

// Event is reactor.Source.
func (d *Detector[A]) Event(ev uint32) {
	if ev&^reactor.Writable == 0 || d.done {
		return
	}
	d.ready = true
	d.fin = d.fin || ev&(reactor.PeerEnd|reactor.Hangup|reactor.Error|reactor.Urgent) != 0
	if !d.q.Pod.Defer(d.l, (*later[A])(d)) {
		d.read()
	}
}

// Owner is engine.Owned.
func (d *Detector[A]) Owner() *engine.Pod { return d.q.Pod }

// later is a detector that its pod's share of an iteration did not suffice for.
type later[A any] Detector[A]

// Run is reactor.Task. The detector may be done by then, or another connection's: it reads only
// what is known to be there.
func (d *later[A]) Run() { (*Detector[A])(d).read() }

// Fail is reactor.Task.
func (d *later[A]) Fail(error) { (*Detector[A])(d).end(true, ByClient) }

func (d *Detector[A]) read() {
	for d.ready && !d.done {
		// The first bytes mostly decide: only if they do not are they kept.
		room := d.l.Scratch[:sniff.MaxPeek]
		if len(d.buf) > 0 {
			if len(d.buf) == cap(d.buf) && cap(d.buf) < sniff.MaxPeek && !d.keep(min(2*cap(d.buf), sniff.MaxPeek)) {
				return
			}
			room = d.buf[len(d.buf):cap(d.buf)]
		}
		if len(room) == 0 {
			d.last = true
			d.settle(d.bytes.Last(d.buf))
			return
		}
		n, err := unix.Read(d.fd, room)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			d.ready, d.fin = false, false
			return
		case err != nil:
			d.end(true, ByClient)
			return
		case n == 0: // no more will come
			d.last = true
			if len(d.buf) == 0 && d.race == nil && !d.q.HelloOnly { // who only listens is served by a raw port
				d.end(false, ByClient)
				return
			}
			d.settle(d.bytes.Last(d.buf))
			return
		}
		d.ready = n == len(room) || d.fin
		first := len(d.buf) == 0
		if first {
			d.buf = room[:n]
		} else {
			d.buf = d.buf[:len(d.buf)+n]
		}
		if d.q.HelloOnly && d.buf[0] != recordHandshake {
			d.settled(model.SniffOpaque, "")
			return
		}
		if r := d.bytes.Detect(d.buf); !r.More {
			if d.settle(r); d.done {
				return
			}
		}
		if first {
			if !d.keep(max(firstRead, len(d.buf))) {
				return
			}
			d.until = d.l.Now() + int64(beginLimit)
		}
		if d.race == nil { // the client has begun: it may finish, but not take for ever
			left := d.until - d.l.Now()
			if d.q.Wait != 0 {
				left = min(left, int64(d.q.Wait))
			}
			d.l.Arm(&d.timer, d, max(left, 1))
		}
	}
}

// Run is reactor.Task: the wait is over.
func (d *Detector[A]) Run() {
	if d.done {
		return
	}
	if len(d.buf) == 0 && d.q.mustBeHTTP() {
		d.end(false, ByClient) // a pre-opened connection that was never used
		return
	}
	d.last = true
	r := d.bytes.Last(d.buf)
	if yes, more := sniff.BeginsRequest(d.buf); r.Proto == sniff.Unknown && d.q.mustBeHTTP() && !d.q.Answers && (yes || more) {
		d.end(false, ByClient) // a request that takes too long
		return
	}
	d.settle(r)
}

// Fail is reactor.Source and Task.
func (d *Detector[A]) Fail(error) { d.end(true, ByClient) }

// serverFirst: the dialled server was first, so nothing is waited for any more.
func (d *Detector[A]) serverFirst() {
	switch {
	case d.done:
	case len(d.buf) == 0:
		d.settled(model.SniffSilent, "")
	default:
		// Both have spoken: the client's bytes win, if they say what they are. The
		// beginning of a preface may go on only once it has the server's SETTINGS;
		// any other beginning is none of HTTP, whose servers do not speak before
		// they were asked.
		r := d.bytes.Detect(d.buf)
		switch {
		case !r.More:
		case len(d.buf) < len(sniff.Preface) && string(d.buf) == sniff.Preface[:len(d.buf)]:
			return
		case r.Proto == sniff.None:
			r.Proto = sniff.Unknown
		}
		d.last = true
		d.settle(r)
	}
}

// lostRace: there is no race any more.
func (d *Detector[A]) lostRace() { d.race = nil }

// settle makes the result of what the bytes are, or reads on where it has to have more.
func (d *Detector[A]) settle(r sniff.Result) {
	if d.done {
		return
	}
	if d.q.HelloOnly && r.Proto != sniff.TLS {
		kind := model.SniffOpaque
		if r.Proto == sniff.None {
			kind = model.SniffSilent
		}
		d.settled(kind, "")
		return
	}
	needed := d.q.Authority && !d.last
	switch r.Proto {
	case sniff.HTTP10, sniff.HTTP11:
		kind := model.SniffHTTP11
		if r.Proto == sniff.HTTP10 {
			kind = model.SniffHTTP10
		}
		host, more, _ := d.bytes.RequestHost(d.buf)
		if more && needed {
			return // the request line is here, the authority is not: read on
		}
		d.settled(kind, string(host))
	case sniff.H2C:
		host, more := "", false
		if d.q.Authority {
			host, more = d.h2.find(d.buf)
		}
		if more && needed {
			return
		}
		d.settled(model.SniffH2C, host)
	case sniff.TLS:
		d.settled(model.SniffTLS, string(r.SNI))
	case sniff.None:
		d.settled(model.SniffSilent, "")
	default:
		kind := model.SniffOpaque
		if d.q.mustBeHTTP() {
			yes, more := sniff.BeginsRequest(d.buf)
			if more && !d.last {
				return
			}
			if yes || more {
				kind = model.SniffMalformed
			}
		}
		d.settled(kind, "")
	}
}

// settled yields the result.
func (d *Detector[A]) settled(kind model.Sniff, host string) {
	d.done = true
	defer d.put()
	d.l.Disarm(&d.timer)
	d.client.Detected(d, Result{kind, host})
}

// First is what has been read. It may lie in the loop's scratch.
func (d *Detector[A]) First() []byte { return d.buf }

// ServeHTTP1 makes the connection one that is served, from its first byte on.
func (d *Detector[A]) ServeHTTP1(info *engine.ConnInfo) {
	d.stopRace()
	d.l.AdoptHTTP1(d.fd, info, d.buf, d.ready)
}

// ServeHTTP2 is ServeHTTP1 for HTTP/2.
func (d *Detector[A]) ServeHTTP2(info *engine.ConnInfo) {
	d.stopRace()
	d.l.AdoptHTTP2(d.fd, info, d.buf, d.ready)
}

// Detach takes the connection from the loop; false: it could not be, and is closed.
func (d *Detector[A]) Detach() (fd int, ok bool) {
	d.stopRace()
	return d.detach()
}

func (d *Detector[A]) detach() (fd int, ok bool) {
	if err := d.l.Detach(d.fd); err != nil {
		unix.Close(d.fd)
		return -1, false
	}
	return d.fd, true
}

// DetachRace is Detach together with the race, which is the caller's from now on; nil: there is none.
func (d *Detector[A]) DetachRace() (fd int, r *Race, ok bool) {
	fd, ok = d.detach()
	if !ok {
		d.stopRace()
		return -1, nil, false
	}
	r, d.race = d.race, nil
	if r != nil {
		r.d = nil
	}
	return fd, r, true
}

// Abort closes the connection with a reset.
func (d *Detector[A]) Abort() {
	d.stopRace()
	d.l.Unregister(d.fd)
	_ = socket.Abort(d.fd)
}

func (d *Detector[A]) stopRace() {
	if d.race != nil {
		d.race.close()
		d.race = nil
	}
}

// end closes the connection without a result, with a reset if abort.
func (d *Detector[A]) end(abort bool, how End) {
	if d.done {
		return
	}
	d.done = true
	if abort && d.race != nil {
		d.race.abortLater()
	}
	d.stopRace()
	d.l.Disarm(&d.timer)
	d.l.Unregister(d.fd)
	if abort {
		_ = socket.Abort(d.fd)
	} else {
		unix.Close(d.fd)
	}
	d.client.Undetected(d, how)
	d.put()
}

// Show is engine.Shown: a connection that is being looked at.
func (d *Detector[A]) Show(s *engine.ConnState) bool {
	if d.done {
		return false
	}
	s.State, s.Client = "sniff", engine.PeerAddr(d.fd)
	s.AgeMS = (d.l.Now() - d.q.Begin) / 1e6
	s.IdleMS = s.AgeMS
	s.BytesIn = int64(len(d.buf))
	d.client.Describe(s)
	return true
}
