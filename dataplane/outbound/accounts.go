package outbound

import (
	"context"
	"errors"
	"slices"
	"strconv"

	"aether/dataplane/balance"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/snapshot"
	"aether/meshhop"
)

// pick chooses an endpoint out of the verdict's, none of those already tried; nil:
// there is no other. The first choice is where the client's session is. A pinned one is used though it is ejected: it was asked for,
// and there is no other to spare it for (decision 014).
func (st *loopState) pick(p *Pod, rq *reqState) *snapshot.Endpoint {
	tried := rq.tried[:min(rq.attempt, len(rq.tried))]
	if e := rq.v.Pinned; e != nil { // it or none (contract 5.10)
		if slices.Contains(tried, e.Addr) {
			return nil
		}
		return e
	}
	if e := rq.session.at; e != nil && !slices.Contains(tried, e.Addr) {
		if d, h := st.hostOf(p, rq, e); h.EjectedFor(st.l.Now()) == 0 {
			rq.next = choice{d, h}
			return e
		}
	}
	v := st.of(p).table.View(rq.v.Backend, rq.v.Set)
	i := v.Pick(st.l.Now(), st.rnd.Uint32(), tried)
	if i < 0 {
		return nil
	}
	rq.next = choice{v.Dest(), v.At(i)}
	return rq.v.Set.At(i)
}

// hostOf is what p knows of e, mostly what pick has just chosen.
func (st *loopState) hostOf(p *Pod, rq *reqState, e *snapshot.Endpoint) (*balance.Dest, *balance.Host) {
	if n := rq.next; n.host != nil && n.host.Addr == e.Addr {
		return n.dest, n.host
	}
	d := st.of(p).table.Dest(rq.v.Backend)
	return d, d.Host(e.Addr)
}

// answered tells of an answer's head. Called for each, before it is decided
// whether the answer goes down or the request to another endpoint.
func (st *loopState) answered(x *exchange.Exchange, rq *reqState, h *httpmsg.Head) {
	a := &rq.try
	if a.told || !a.open {
		return
	}
	a.told = true
	now, status := st.l.Now(), h.Status
	if rq.grpc {
		if v, ok := h.Get("grpc-status"); ok { // in the head only, as Envoy does (decision 014)
			status = httpStatus(v)
		}
	}
	members := 0
	if status >= 500 {
		members = rq.snap.Endpoints(rq.v.Backend).Len()
	}
	if a.dest.Answered(a.host, now, a.took(now), status, members) {
		st.ejected(x.Conn.(*engine.ConnInfo).User.(*conn).pod, a)
	}
}

// failed tells of an attempt that got no answer. Called before it is decided what
// becomes of the request.
func (st *loopState) failed(x *exchange.Exchange, rq *reqState, code exchange.Code) {
	a := &rq.try
	if a.told || !a.open {
		return
	}
	a.told = true
	st.blame(x.Conn.(*engine.ConnInfo).User.(*conn).pod, rq, a, code, x.Cause)
}

// blame counts against the endpoint what was not our own doing.
func (st *loopState) blame(p *Pod, rq *reqState, a *attempt, code exchange.Code, cause error) {
	now := st.l.Now()
	switch attribute(code, cause) {
	case upstreamFault:
		if a.dest.Failed(a.host, now, a.took(now), st.l.Iteration(), rq.snap.Endpoints(rq.v.Backend).Len()) {
			st.ejected(p, a)
		}
	case refusal:
		a.dest.Refused(a.host, now)
	}
}

type fault uint8

const (
	noFault fault = iota
	upstreamFault
	refusal // it took nothing, and said so
)

// attribute fault is it that there was no answer.
func attribute(code exchange.Code, cause error) fault {
	switch {
	case errors.Is(cause, engine.ErrHopFull), errors.Is(cause, engine.ErrNoTunnel), errors.Is(cause, errEndpointGone), errors.Is(cause, errEndpointUnhealthy),
		errors.Is(cause, errRevoked), errors.Is(cause, engine.ErrExpired):
		return noFault
	case code == exchange.Refused, code == exchange.Unsent:
		return refusal
	case code == exchange.Internal, code == exchange.Cancel, code == exchange.NoError:
		return noFault
	case code == exchange.Connect && localFault(cause):
		return noFault
	}
	return upstreamFault
}

// localFault reports whether a hop was not made for reasons of this node's or pod's.
func localFault(err error) bool {
	switch meshhop.ReasonOf(err) {
	case meshhop.ReasonNoCertificate, meshhop.ReasonBusy, meshhop.ReasonCancelled, meshhop.ReasonFiles, meshhop.ReasonPorts:
		return true
	}
	return errors.Is(err, errNoIdentity)
}

// leave counts the attempt out, if one is open.
func (st *loopState) leave(x *exchange.Exchange, rq *reqState) {
	a := &rq.try
	if !a.open {
		return
	}
	now := st.l.Now()
	switch {
	case !a.told: // nobody waits for it any more
		if t := a.took(now); t > 0 {
			a.dest.GaveUp(a.host, now, t)
		}
	case x.Over() && x.Ended == exchange.Server && x.Code != exchange.Timeout: // its answer broke off
		st.blame(x.Conn.(*engine.ConnInfo).User.(*conn).pod, rq, a, x.Code, x.Cause)
	}
	if a.pipe {
		a.dest.EndTunnel(a.host)
	} else {
		a.dest.End(a.host)
	}
	*a = attempt{}
}

// ejected logs it, away from the loop.
func (st *loopState) ejected(p *Pod, a *attempt) {
	dest, addr, left, n := a.dest.Name, a.host.Addr, a.host.EjectedFor(st.l.Now()), a.host.Ejections()
	st.l.Go(func() {
		st.o.quiet.Warn("ejected "+p.Container+" "+dest+" "+addr.String(), "endpoint ejected: this pod's requests go elsewhere for a while",
			"pod", p.Container, "destination", dest, "endpoint", addr, "for", left, "times", n)
	})
}

// httpStatus is the HTTP status that stands for a grpc-status, as in Envoy.
func httpStatus(grpc []byte) int {
	status := [...]int{200, 499, 500, 400, 504, 404, 409, 403, 429, 400, 409, 400, 501, 500, 503, 500, 401}
	n, err := strconv.ParseUint(string(grpc), 10, 8)
	if err != nil || n >= uint64(len(status)) {
		return 500
	}
	return status[n]
}

// beginRaw counts a raw-TCP connection in, and gives the context that it lives in:
// the pod's, until its endpoint leaves. false: too many are open.
func (st *loopState) beginRaw(p *Pod, rq *reqState, e *snapshot.Endpoint) (context.Context, *rawConn, bool) {
	d, host := st.hostOf(p, rq, e)
	if d.Full() {
		return nil, nil, false
	}
	ctx, cut := context.WithCancelCause(p.Context)
	r := &rawConn{of: st.of(p), key: hopKey{p, e.Addr, rq.v.Backend.Port, e.SPIFFEID, ""}, cut: cut}
	r.begin(d, host, st.l.Now(), true)
	r.of.raw[r] = struct{}{}
	return ctx, r, true
}

// connected tells how the connect of r ended; nil: well. Any goroutine.
func (st *loopState) connected(r *rawConn, rq *reqState, err error) {
	_ = st.l.Post(func() {
		if err == nil {
			r.dest.Connected(r.host, st.l.Now())
			return
		}
		st.blame(r.key.pod, rq, &r.attempt, exchange.Connect, err)
	})
}

// endRaw counts r out and returns what cut it, if something did. Any goroutine.
func (st *loopState) endRaw(ctx context.Context, r *rawConn) error {
	cause := context.Cause(ctx)
	r.cut(nil)
	_ = st.l.Post(func() {
		r.dest.End(r.host)
		delete(r.of.raw, r)
	})
	if errors.Is(cause, errEndpointGone) || errors.Is(cause, errEndpointUnhealthy) || errors.Is(cause, errRevoked) || errors.Is(cause, meshhop.ErrExpired) {
		return cause
	}
	return nil
}

// stopRetries is called before an answer of ours: the request is not sent again any more, though
// the client may take its time to read the answer.
func (rq *reqState) stopRetries(x *exchange.Exchange) {
	if rq.x == nil { // it is not for the hop, or not yet
		return
	}
	st := x.Conn.(*engine.ConnInfo).User.(*conn).st
	st.leave(x, rq)
	if rq.wait.Armed() {
		st.l.Disarm(&rq.wait)
	}
	if rq.tryEnd.Armed() {
		st.l.Disarm(&rq.tryEnd)
	}
	rq.releaseRetrySlot()
}

// stop ends what runs on the request's timers, and its place among those that are sent again.
func (rq *reqState) stop(st *loopState) {
	rq.stopTimers(st)
	if rq.wait.Armed() {
		st.l.Disarm(&rq.wait)
	}
	rq.releaseRetrySlot()
	rq.x = nil
}
