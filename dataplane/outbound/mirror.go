package outbound

import (
	"time"

	"aether/dataplane/decide"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
	"aether/dataplane/share"
	"aether/dataplane/snapshot"
)

// Bounds of mirrors (Gateway API HTTPRequestMirrorFilter; decision 017).
const (
	maxMirrors   = 256      // under way, of a loop; see package share for a pod's part
	mirrorBehind = 64 << 10 // what is kept of a body that a mirror does not take as fast as it comes
	mirrorAnswer = 1 << 20  // of an answer, which nobody wants, is read
	mirrorWait   = 15 * time.Second
)

// mirror is a copy of a request on its way to another backend. It is the client of an
// exchange of its own, reads the answer and throws it away; nothing of it comes back to
// the request it is a copy of.
type mirror struct {
	x     *exchange.Exchange
	st    *loopState
	of    *upstreams // of the pod whose request it is a copy of
	next  *mirror    // of the same request
	whole bool       // all there is of the request has been pushed
	full  bool       // the answer was too long, and its end is on its way
	ended bool
	read  int // of the answer
	how   int // why it was given up; mirrorResults: it was not
	wait  reactor.Timer
}

// How mirrors end, as they are counted.
const (
	mirrorAnswered = iota
	mirrorFailed   // no endpoint, no connection, or one that broke
	mirrorSlow     // it did not take the body as fast as it came
	mirrorCut      // the request it is a copy of ended before its body had
	mirrorTimeout
	mirrorOverflow // not sent: too many were under way
	mirrorResults
)

// MirrorResults are the names of what Outbound.Mirrored counts.
var MirrorResults = [mirrorResults]string{"answered", "failed", "slow", "cut", "timeout", "overflow"}

// mirror sends copies of a request, its head as it goes out, to where its rule says. A
// request for a tunnel is not copied: a tunnel has two ends that speak to each other.
func (o *Outbound) mirror(x *exchange.Exchange, c *conn, rq *reqState) {
	if x.Req.Upgrade != nil {
		return
	}
	st := c.st
	for i := range rq.v.Pipe.Mirrors {
		to := &rq.v.Pipe.Mirrors[i]
		if uint64(st.rnd.Uint32())*uint64(to.Denominator)>>32 >= uint64(to.Numerator) {
			continue
		}
		if !share.Room(st.of(c.pod).mirrors, st.mirrors, maxMirrors) {
			o.Mirrored[mirrorOverflow].Inc()
			continue
		}
		m := st.newMirror(x, c, rq, to)
		m.next = rq.mirrors
		rq.mirrors = m
	}
	if rq.mirrors != nil {
		x.Tap(rq.mirrors)
	}
}

func (st *loopState) newMirror(x *exchange.Exchange, c *conn, rq *reqState, to *snapshot.MirrorTo) *mirror {
	m := &mirror{st: st, of: st.of(c.pod), how: mirrorResults, whole: x.Bodyless()}
	m.count(1)
	st.mirrored.Service = (*mirrors)(st.o)
	m.x = st.mirrored.Begin(m, &x.Req, m.whole, &c.info, st.l.Now())
	m.x.Share = c.info.Kept()
	m.x.Req.Del("expect") // the body comes, or not, as the client sends it
	m.x.Req.Expect = false
	copied := &reqState{snap: rq.snap, grpc: rq.grpc}
	copied.v = decide.Verdict{Action: decide.Forward, Reason: rq.v.Reason, Rule: rq.v.Rule, Backend: to.Backend, Set: rq.snap.Endpoints(to.Backend)}
	copied.copyOf = m
	if svc := rq.snap.Service(to.Backend.Service); svc != nil && svc.Await && copied.v.Set.Len() == 0 && st.o.cfg.Want != nil {
		st.o.cfg.Want(svc.Name) // this copy is lost, later ones are not: nothing waits for a copy
	}
	m.x.User = copied
	if m.whole {
		st.l.Arm(&m.wait, (*mirrorLate)(m), int64(mirrorWait))
	}
	st.o.send(m.x, c, copied, st.pick(c.pod, copied))
	return m
}

// count counts n more mirrors under way.
func (m *mirror) count(n int) {
	m.st.mirrors += n
	m.of.mirrors += n
}

// TapData is exchange.Tap.
func (m *mirror) TapData(p []byte, end bool) {
	for ; m != nil; m = m.next {
		if m.ended {
			continue
		}
		if !m.x.Push(p, end, mirrorBehind) {
			m.giveUp(mirrorSlow)
			continue
		}
		m.sent(end)
	}
}

// TapTrailers is exchange.Tap.
func (m *mirror) TapTrailers(f []httpmsg.Field) {
	for ; m != nil; m = m.next {
		if !m.ended {
			m.x.PushTrailers(f)
			m.sent(true)
		}
	}
}

// sent: the request has been pushed, up to its end.
func (m *mirror) sent(end bool) {
	if end && !m.ended {
		m.whole = true
		m.st.l.Arm(&m.wait, (*mirrorLate)(m), int64(mirrorWait))
	}
}

// orphaned ends the mirrors of a request that is over, as far as they wait for more of it.
func (m *mirror) orphaned() {
	for ; m != nil; m = m.next {
		if !m.whole {
			m.giveUp(mirrorCut)
		}
	}
}

func (m *mirror) giveUp(how int) {
	if !m.ended {
		m.how = how
		m.x.Abort(exchange.Cancel)
	}
}

// A mirror is the stream that the answer goes down on: to nowhere.

// WriteHead is exchange.Stream.
func (*mirror) WriteHead(*httpmsg.Head, bool) {}

// WriteData is exchange.Stream.
func (m *mirror) WriteData(p []byte, _ bool) int {
	if m.read += len(p); m.read > mirrorAnswer && !m.full {
		m.full = true
		m.st.l.Later((*mirrorFull)(m))
	}
	return len(p)
}

// WriteTrailers is exchange.Stream.
func (*mirror) WriteTrailers([]httpmsg.Field) {}

// Resume is exchange.Stream: what is pushed is not held back.
func (*mirror) Resume() {}

// Abort is exchange.Stream.
func (*mirror) Abort(exchange.Code) {}

// mirrorFull is a mirror as the task that ends an answer of which enough has been read.
type mirrorFull mirror

// Run is reactor.Task.
func (t *mirrorFull) Run() {
	if m := (*mirror)(t); !m.ended {
		m.x.Abort(exchange.NoError)
	}
}

// Fail is reactor.Task.
func (t *mirrorFull) Fail(error) {}

// mirrorLate is a mirror as the task of its limit of time.
type mirrorLate mirror

// Run is reactor.Task.
func (t *mirrorLate) Run() { (*mirror)(t).giveUp(mirrorTimeout) }

// Fail is reactor.Task.
func (t *mirrorLate) Fail(error) {}

// mirrors is an Outbound as the service of the exchanges of mirrors.
type mirrors Outbound

// Request is exchange.Service. It is not called: a mirror knows where it goes.
func (*mirrors) Request(*exchange.Exchange) {}

// Response is exchange.Service: whatever the answer is, it is not retried.
func (*mirrors) Response(x *exchange.Exchange, h *httpmsg.Head) {
	rq := x.User.(*reqState)
	rq.copyOf.st.answered(x, rq, h)
}

// Failed is exchange.Service: the answer that takes the place of none goes nowhere, too.
func (*mirrors) Failed(x *exchange.Exchange, code exchange.Code) {
	rq := x.User.(*reqState)
	rq.copyOf.st.failed(x, rq, code)
}

// Done is exchange.Service.
func (o *mirrors) Done(x *exchange.Exchange) {
	rq := x.User.(*reqState)
	m := rq.copyOf
	m.ended = true
	m.count(-1)
	if m.wait.Armed() {
		m.st.l.Disarm(&m.wait)
	}
	m.st.leave(x, rq)
	if m.how == mirrorResults {
		m.how = mirrorFailed
		if !x.Local && x.Answered() && (x.Ended == exchange.Nobody || m.full) {
			m.how = mirrorAnswered
		}
	}
	o.Mirrored[m.how].Inc()
}
