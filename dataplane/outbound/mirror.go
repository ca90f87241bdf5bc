package outbound

import (
	"aether/dataplane/decide"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/share"
	"aether/dataplane/snapshot"
)

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

// A mirror is the stream that the answer goes down on: to nowhere.

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
		if !x.Local() && x.Answered() && (x.Ended == exchange.Nobody || m.full) {
			m.how = mirrorAnswered
		}
	}
	o.Mirrored[m.how].Inc()
}
