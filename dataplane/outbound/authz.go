package outbound

import (
	"time"

	"aether/dataplane/authz"
	"aether/dataplane/decide"
	"aether/dataplane/exchange"
	"aether/dataplane/extauthz"
	"aether/dataplane/httpmsg"
)

// ask parks a request until the filters in force have been asked about it (contract 10.7).
func (o *Outbound) ask(x *exchange.Exchange, c *conn, rq *reqState) {
	// What the service sees is what goes on: with the fields that the proxy itself adds.
	o.requestID(x, rq)
	forwardedProto(&x.Req)
	if o.cfg.Authz == nil {
		o.Refused(x, extauthz.Nobody)
		return
	}
	id, _ := x.Req.Get("x-request-id")
	q := authz.Question{
		Flow: &c.flow, Head: &x.Req, Workload: rq.snap.WorkloadOf(&c.flow), ID: string(id),
		Time: time.Now().Add(-time.Duration(c.st.l.Now() - x.Start)), Destination: c.flow.Dst.AddrPort,
	}
	if q.Workload != nil {
		q.Source = q.Workload.Address()
	}
	rq.asked = o.cfg.Authz.Ask(c.st.l, x, rq.v.Pipe.Authz, q, rq.v.AuthzPath(&x.Req), o)
}

// Refused is extauthz.Asker.
func (o *Outbound) Refused(x *exchange.Exchange, r *extauthz.Refusal) {
	rq := x.User.(*reqState)
	rq.cause = r.Cause
	rq.v.Action = decide.Refuse // what becomes of it, for the record
	r.Reply(x, rq.grpc, func(h *httpmsg.Head) { rq.v.MarkAnswer(h, rq.origin) })
}
