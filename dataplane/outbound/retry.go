package outbound

import (
	"bytes"
	"errors"
	"time"

	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/mtls"
)

// Bounds of retries (contract 5.6, 5.7; decision 013).
const (
	backoffBase = 25 * time.Millisecond
	backoffMax  = 250 * time.Millisecond

	// deadlineGrace is what a gRPC call has beyond its grpc-timeout: who keeps it, client or
	// application, is first.
	deadlineGrace = 250 * time.Millisecond
)

// start begins a request that goes over the hop: its rule's limit of time, and what is
// kept to send it again.
func (o *Outbound) start(x *exchange.Exchange, c *conn, rq *reqState) {
	rq.x = x
	if rq.limit() > 0 {
		x.KeepForReplay()
	}
	limit := time.Duration(0)
	if m := rq.v.Matched; m != nil {
		limit = m.Timeouts.Request
	}
	if rq.deadline = false; rq.grpc {
		v, _ := x.Req.Get("grpc-timeout")
		if d, ok := httpmsg.GRPCTimeout(v); ok && (limit == 0 || d+deadlineGrace < limit) {
			limit, rq.deadline = d+deadlineGrace, true
		}
	}
	if limit > 0 {
		since := c.st.l.Now() - x.Start // it may have waited for a filter
		c.st.l.Arm(&rq.whole, (*requestTimer)(rq), max(0, int64(limit)-since))
	}
}

// tries begins an attempt's limit of time.
func (rq *reqState) tries(l *engine.Loop) {
	if m := rq.v.Matched; m != nil && m.Timeouts.Backend > 0 {
		l.Arm(&rq.tryEnd, (*attemptTimer)(rq), int64(m.Timeouts.Backend))
	}
}

// retryOnResponse is called with each final answer, its outcome still in h; true: it is not
// wanted, and the request is sent again.
func (o *Outbound) retryOnResponse(x *exchange.Exchange, c *conn, rq *reqState, h *httpmsg.Head, v []byte) bool {
	// Nearly every answer is an application's, and none of those that are retried.
	named := rq.names(h.Status)
	if !named && !bytes.HasPrefix(v, codeNone) && !bytes.HasPrefix(v, codeUnavailable) {
		return false
	}
	seen, none := 0, false
	for i := range h.Fields {
		switch string(h.Fields[i].Name) {
		case "x-aether-outcome":
			seen++
			none = none || bytes.HasPrefix(h.Fields[i].Value, codeNone)
		case "x-envoy-ratelimited": // the veto
			return false
		}
	}
	out, ok := parseOutcome(v, x.Req.Method)
	ok = ok && seen == 1
	switch {
	case ok && out.retriable(x.Idempotent()):
	case !named:
		return false
	case ok && out.mayBegun(): // a cut is no status of an application's
		return false
	case !ok && none: // a proxy's, and of what happened to the request nothing is known
		return false
	}
	return o.scheduleRetry(x, c, rq, false)
}

var (
	codeNone        = []byte("0;")
	codeUnavailable = []byte("503;")
)

// retryOnFailure is called with each attempt that ended without an answer; true: the request is sent again.
func (o *Outbound) retryOnFailure(x *exchange.Exchange, c *conn, rq *reqState, code exchange.Code) bool {
	var none *mtls.NoCertificate
	if errors.As(x.Cause, &none) { // trying elsewhere cannot mend that
		return false
	}
	rq.renew(o.cfg.Store.Load())
	out := observed(code, x.Reached(), x.Cause)
	if (code == exchange.Connect || errors.Is(x.Cause, engine.ErrNoTunnel)) && c.st.pick(c.pod, rq) == nil {
		return false // a host that cannot be reached costs its connect's limit each time, and one that has no tunnels stays so: only another is worth that
	}
	// A peer that says at once that it took nothing wants it sent to another
	// session, or another host, now (RFC 9113 6.8).
	return out.retriable(x.Idempotent()) && o.scheduleRetry(x, c, rq, out.refused)
}

// scheduleRetry gives up the attempt under way and sends the request once more, to
// another host if there is one, if it may be sent at all; at once: without waiting, the first time.
func (o *Outbound) scheduleRetry(x *exchange.Exchange, c *conn, rq *reqState, atOnce bool) bool {
	st := c.st
	if rq.retries >= rq.limit() || !x.Replayable() {
		return false
	}
	var least time.Duration
	if r := rq.retry(); r != nil {
		least = r.Backoff
	}
	wait := least + backoff(rq.retries, st.rnd.Uint64())
	if atOnce && least == 0 && rq.retries == 0 {
		wait = 0
	}
	// What the peer took nothing of costs nobody anything twice: of a session that
	// ends, all streams may be sent again.
	if wait > 0 && rq.retrying == nil {
		d := rq.try.dest // nil: it was given up before it was with an endpoint
		if d == nil {
			d = st.of(c.pod).table.Dest(rq.v.Backend)
		}
		if !d.Retry() {
			o.RetriesOverflow.Inc()
			return false
		}
		rq.retrying = d
	}
	o.Retries.Inc()
	rq.retries++
	st.leave(x, rq)
	if rq.tryEnd.Armed() {
		st.l.Disarm(&rq.tryEnd)
	}
	x.DiscardResponse()
	x.Park()
	if wait == 0 {
		o.sendNext(x, c, rq)
		return true
	}
	st.l.Arm(&rq.wait, (*backoffTimer)(rq), int64(wait))
	return true
}

// backoff is how long retry n (0: the first) waits: any time below a bound
// that doubles, so that those who failed together do not come back together.
func backoff(n int, rnd uint64) time.Duration {
	most := min(backoffBase<<min(n, 16), backoffMax)
	return time.Duration(rnd % uint64(most))
}

// sendNext sends the request to another endpoint of those that there are by now, or, if all
// have been tried, to any.
func (o *Outbound) sendNext(x *exchange.Exchange, c *conn, rq *reqState) {
	x.Cause = nil
	rq.renew(o.cfg.Store.Load())
	e := c.st.pick(c.pod, rq)
	if e == nil {
		rq.attempt = 0 // who was tried counts as not tried
		e = c.st.pick(c.pod, rq)
	}
	rq.tries(c.st.l)
	o.send(x, c, rq, e)
}

// backoffTimer is a request as the task of its backoff.
type backoffTimer reqState

// Run is reactor.Task.
func (t *backoffTimer) Run() {
	rq := (*reqState)(t)
	c := rq.conn()
	c.o.sendNext(rq.x, c, rq)
}

// Fail is reactor.Task.
func (t *backoffTimer) Fail(error) { (*reqState)(t).fault() }

// requestTimer is a request as the task of timeouts.request.
type requestTimer reqState

// Run is reactor.Task.
func (t *requestTimer) Run() {
	rq := (*reqState)(t)
	if rq.deadline {
		v, _ := rq.x.Req.Get("grpc-timeout")
		rq.conn().o.timedOut(rq.x, rq, causeDeadline, "no answer within the call's own deadline (grpc-timeout "+string(v)+")\n")
		return
	}
	rq.ruleTimedOut(causeRequestTimeout, "timeouts.request", rq.v.Matched.Timeouts.Request)
}

// Fail is reactor.Task.
func (t *requestTimer) Fail(error) { (*reqState)(t).fault() }

// attemptTimer is a request as the task of timeouts.backendRequest.
type attemptTimer reqState

// Run is reactor.Task. What ran out is tried again where the rule has a retry and the method may be
// repeated (GEP-1731, decision 013), or where it names 504, for every method.
func (t *attemptTimer) Run() {
	rq := (*reqState)(t)
	x, c := rq.x, rq.conn()
	if !x.Answered() {
		c.st.failed(x, rq, exchange.Timeout)
	}
	if !x.Answered() && (rq.names(504) || rq.retry() != nil && x.Idempotent()) && c.o.scheduleRetry(x, c, rq, false) {
		return
	}
	rq.ruleTimedOut(causeTryTimeout, "timeouts.backendRequest", rq.v.Matched.Timeouts.Backend)
}

// Fail is reactor.Task.
func (t *attemptTimer) Fail(error) { (*reqState)(t).fault() }

// ruleTimedOut is timedOut for a limit of the request's rule.
func (rq *reqState) ruleTimedOut(cause, field string, limit time.Duration) {
	rq.conn().o.timedOut(rq.x, rq, cause, "no answer within "+field+" ("+limit.String()+") of "+rq.v.Matched.Name+"\n")
}

// timedOut ends a request that has met a limit of time: 504, or a cut where the answer has begun.
func (o *Outbound) timedOut(x *exchange.Exchange, rq *reqState, cause, text string) {
	rq.cause = cause
	if x.Answered() {
		if x.AbortTrailers != nil {
			x.AbortTrailers = []httpmsg.Field{{Name: hdrGRPCStatus, Value: []byte("4")}, {Name: hdrGRPCMessage, Value: httpmsg.GRPCMessage(text)}}
		}
		x.Abort(exchange.Timeout)
		return
	}
	rq.conn().st.failed(x, rq, exchange.Timeout)
	x.DiscardResponse()
	o.reply(x, 504, "", text, 4)
}
