package outbound

import (
	"cmp"
	"errors"
	"time"

	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/meshhop"
)

// The life of a request. Boxes are where it waits; the words on the arrows are the functions that move it.
//
//	         Request (decide.Route)
//	            │
//	            ▼          a filter asks       ┌─────────────────────────┐
//	         decided ─────────────────────────►│ asked: parked until the │ Refused ──► answer
//	            │                              │ authorization service   │
//	            │                              │ has answered (authz.go) │
//	            │                              └───────────┬─────────────┘
//	            ▼                                  Allowed │
//	           act ◄───────────────────────────────────────┘
//	            │
//	            ├─ Await ────────► ┌──────────────────────────┐ reconsider ──► decided
//	            │                  │ cold: parked until rows  │
//	            │                  │ are here (await.go)      │ 2 s ──► answer 503
//	            │                  └──────────────────────────┘
//	            ├─ Reply, Refuse ──────────────────────────────────────► answer (answer.go)
//	            ├─ Passthrough ──► the dialled address
//	            └─ Forward ─► start, pick
//	                            │
//	                            ▼
//	         ┌───────────► send (send.go): no endpoint, overflow ──────► answer 503
//	         │                  │
//	         │                  ▼
//	 sendNext│      ┌────────────────────────────┐ Failed, attempt's limit: not again ──► answer 503, 504
//	         │      │ open: an attempt is with   │
//	         │      │ an endpoint (attempt.open) │ Response: wanted ──► accepted: the answer goes down
//	         │      └───────────┬────────────────┘
//	         │   Failed or Response: scheduleRetry (retry.go)
//	         │                  ▼
//	         │      ┌────────────────────────────┐
//	         └──────┤ backoff: wait is armed     │
//	                └────────────────────────────┘
//
// Wherever it is: Done ends it, once, when its client has the answer or is gone; the limit of its rule (requestTimer) answers
// 504, or cuts an answer that has begun.

// Request is exchange.Service.
func (o *Outbound) Request(x *exchange.Exchange) {
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	c.requests++
	c.st.l.Gauges.Outbound.Add(1)
	rq, _ := x.User.(*reqState)
	if rq == nil {
		rq = &reqState{}
		x.User = rq
	}
	if cap(rq.scratch) > keepScratch {
		rq.scratch = nil
	}
	*rq = reqState{scratch: rq.scratch[:0]}
	snap := o.cfg.Store.Load()
	rq.snap = snap
	h := &x.Req
	ct, _ := h.Get("content-type")
	rq.grpc = httpmsg.IsGRPC(ct)
	sent := clean(h) // before rules see it: what only a proxy may say matches nothing, either
	rq.draw = c.st.rnd.Uint32()
	rq.v = decide.Route(snap, &c.flow, h, rq.draw, nil)
	o.decided(x, c, rq, sent)
}

// decided does with the request what its verdict, which is new, asks for.
func (o *Outbound) decided(x *exchange.Exchange, c *conn, rq *reqState, sent []httpmsg.Field) {
	h := &x.Req
	if m := rq.v.Matched; m != nil && m.Persistence != nil {
		o.resumeSession(c, rq, h)
	}
	rq.host, rq.path, rq.origin = h.Authority, h.Path, rq.v.Origin(h)
	if (rq.v.Action == decide.Forward || rq.v.Action == decide.Passthrough || rq.v.Action == decide.Await) && o.overloaded(x, c, rq) {
		return
	}
	if rq.v.Pipe != nil && rq.v.Pipe.Authz != nil { // before anything is answered, too (contract 10.7)
		o.ask(x, c, rq)
		return
	}
	o.act(x, c, rq, sent)
}

// act does what the verdict says. sent are the fields that clean took out.
func (o *Outbound) act(x *exchange.Exchange, c *conn, rq *reqState, sent []httpmsg.Field) {
	h := &x.Req
	switch rq.v.Action {
	case decide.Forward:
		o.requestID(x, rq)
		forwardedProto(h)
		rq.scratch = rq.v.ApplyRequest(h, rq.scratch)
		o.start(x, c, rq)
		if rq.v.Pipe != nil && len(rq.v.Pipe.Mirrors) > 0 {
			o.mirror(x, c, rq)
		}
		rq.renew(o.cfg.Store.Load()) // somebody may have been asked meanwhile
		rq.tries(c.st.l)
		o.send(x, c, rq, c.st.pick(c.pod, rq))
	case decide.Passthrough:
		// Not the mesh's: it goes where it was dialled, in the client's own version.
		if dst := c.flow.Dst; rq.snap.Address(dst.Addr()) != nil || rq.snap.HTTPEndpoint(dst.Addr(), dst.Port()) != nil {
			h.DelMesh() // behind it is a pod of the mesh, which believes its own proxy (decision 044)
		} else if sent != nil {
			h.Fields = sent
		}
		c.passed = true
		c.passH2 = c.flow.Sniff == model.SniffH2C
		c.st.l.Send(x, c.pod.Engine, c.pod.Sockets, c.flow.Dst.AddrPort, c.passH2, &c.info)
	case decide.Reply:
		switch rq.v.Reason {
		case decide.Redirect:
			o.redirect(x, c, rq)
		case decide.CORSPreflight:
			var out httpmsg.Head
			var fields [8]httpmsg.Field
			out.Fields, out.Status = fields[:0], rq.v.Status
			rq.v.AppendPreflight(&out, h)
			rq.asked.Edit(&out)
			x.Reply(&out, nil)
		default:
			o.reply(x, rq.v.Status, rq.v.Reason.Header(), rq.v.Text, httpmsg.GRPCStatus(rq.v.Status))
		}
	case decide.Refuse:
		o.reply(x, rq.v.Status, rq.v.Reason.Header(), rq.v.Text, httpmsg.GRPCStatus(rq.v.Status))
	case decide.Await:
		o.awaitRows(x, c, rq, sent, (*Outbound).decided)
	default:
		o.reply(x, 500, "", "the proxy has no answer for this request (reason "+rq.v.Reason.String()+")\n", 13)
	}
}

// Response is exchange.Service.
func (o *Outbound) Response(x *exchange.Exchange, h *httpmsg.Head) {
	rq := x.User.(*reqState)
	if rq.v.Action != decide.Forward {
		return
	}
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	c.st.answered(x, rq, h)
	v, ok := h.Get("x-aether-outcome")
	rq.outcome.Set(v)
	if o.retryOnResponse(x, c, rq, h, v) {
		return
	}
	if ok {
		if m := loggedStatus(v); m != 0 && rq.grpc && h.Status == 200 {
			x.Status = m
		}
		h.Del("x-aether-outcome")
	}
	rq.accepted(x, c, h)
	rq.v.ApplyResponse(h, rq.origin)
	rq.asked.Edit(h)
	if m := rq.v.Matched; m != nil && m.Persistence != nil {
		o.setSessionToken(rq, h)
	}
}

// cutTrailers end a gRPC response that has no status: clients may try again (case 68).
var cutTrailers = []httpmsg.Field{
	{Name: hdrGRPCStatus, Value: []byte("14")},
	{Name: hdrGRPCMessage, Value: []byte("the response ended without a status")},
}

// accepted is called with an answer that goes down.
func (rq *reqState) accepted(x *exchange.Exchange, c *conn, h *httpmsg.Head) {
	rq.releaseRetrySlot()
	if h.Status == 101 { // an open tunnel has no end that a limit could wait for
		rq.stopTimers(c.st)
		rq.try.tunnelled()
	}
	if rq.grpc && c.flow.Sniff == model.SniffH2C && h.Status == 200 {
		if ct, _ := h.Get("content-type"); httpmsg.IsGRPC(ct) {
			x.AbortTrailers = cutTrailers
		}
	}
}

// Failed is exchange.Service.
func (o *Outbound) Failed(x *exchange.Exchange, code exchange.Code) {
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	rq := x.User.(*reqState)
	if rq.v.Action == decide.Passthrough {
		if x.Attempts < 2 && x.Resendable(code) {
			x.Cause = nil
			c.st.l.Send(x, c.pod.Engine, c.pod.Sockets, c.flow.Dst.AddrPort, c.passH2, &c.info)
			return
		}
		if errors.Is(x.Cause, engine.ErrNoTunnel) {
			o.noTunnel(x, rq, "the server at the dialled address")
			return
		}
		rq.cause = cmp.Or(engine.Shortage(x.Cause), code.String())
		o.reply(x, 503, "", "the dialled address did not answer ("+rq.cause+")"+because(x.Cause)+"\n", 14)
		return
	}
	c.st.failed(x, rq, code)
	if o.retryOnFailure(x, c, rq, code) {
		return
	}
	if errors.Is(x.Cause, engine.ErrNoTunnel) {
		o.noTunnel(x, rq, "the proxy in front of "+rq.v.Backend.Name)
		return
	}
	kind := code.String()
	text := "the destination did not answer (" + kind + ")" + because(x.Cause)
	switch {
	case x.Cause == nil:
	case !x.Reached(), meshhop.ReasonOf(x.Cause) == meshhop.ReasonRemote: // the handshake's end, as TLS 1.3 tells it: after the first request
		kind = why(x.Cause)
		text = "no connection to " + rq.v.Backend.Name + " (" + kind + ")"
	case code == exchange.Closed, code == exchange.Unsent: // what ended a session that was there is no reason why there was none
		kind = cut(x.Cause)
		text = "the connection ended before an answer (" + kind + ")"
	}
	if code == exchange.Timeout {
		rq.cause = kind
		o.reply(x, 504, "", text+"\n", 14)
		return
	}
	o.fail(x, rq, kind, text)
}

// Done is exchange.Service.
func (o *Outbound) Done(x *exchange.Exchange) {
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	rq := x.User.(*reqState)
	c.st.leave(x, rq)
	if rq.cold { // its client went first
		c.st.resumeWaiting(rq, coldGone)
	}
	c.st.l.Gauges.Outbound.Add(-1)
	rq.stop(c.st)
	rq.asked.Cancel()
	rq.asked = nil
	rq.mirrors.orphaned()
	rq.mirrors = nil
	v := &rq.v
	if v.Action == 0 {
		return // never asked: the connection went first
	}
	if v.Reason == decide.Readyz {
		return // never counted and never logged (contract 4.11, 14.1)
	}
	e := &c.st.end
	*e = journal.Entry{}
	now := c.st.l.Now()
	e.At = time.Now()
	e.Took = time.Duration(now - x.Start)
	e.Request = true
	e.Loop = c.st.l.ID() + 1
	c.entry(e)
	e.Host.Set(rq.host)
	e.Method.Set(x.Req.Method)
	e.Path.Set(rq.path)
	e.Action, e.Reason, e.Rule = v.Action.String(), v.Reason.String(), v.Rule
	for f, denied := range v.Audited.All() {
		c.st.audits.Count(f.Name, denied)
	}
	e.AuditFilter, e.AuditPolicy = v.Audited.Names()
	if v.Backend != nil {
		e.Backend = v.Backend.Name
	}
	if rq.endpoint != nil {
		e.Endpoint = rq.endpoint.Addr
		e.Peer = rq.endpoint.SPIFFEID
	}
	e.Status = x.Status
	e.BytesIn, e.BytesOut = x.ReqBytes, x.ResBytes
	e.Attempts = x.Attempts
	e.Exhausted = rq.retries > 0 && rq.retries >= rq.limit()
	e.Local, e.Ended = x.Local(), x.Ended.String()
	if x.Ended != exchange.Nobody {
		e.Code = x.Code.String()
	}
	e.Cause, e.Fault, e.Outcome = rq.cause, engine.FaultOf(x.Cause), rq.outcome
	if e.Cause == "" && x.Ended == exchange.Server { // amid its answer
		e.Cause = e.Code
	}
	e.Version = rq.snap.Version()
	rq.snap = nil // a request that is over keeps no old world alive
	rq.next = choice{}
	rq.session.at = nil
	rq.sent = nil
	rq.v, rq.endpoint, rq.host, rq.path, rq.origin = decide.Verdict{}, nil, nil, nil, nil
	if e.Classify(); e.Failed() {
		id, _ := x.Req.Get("x-request-id")
		e.RequestID.Set(id)
	}
	o.cfg.Journal.Ended(e)
}

// Allowed is extauthz.Asker.
func (o *Outbound) Allowed(x *exchange.Exchange) {
	o.act(x, x.Conn.(*engine.ConnInfo).User.(*conn), x.User.(*reqState), nil)
}
