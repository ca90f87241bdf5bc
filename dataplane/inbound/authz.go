package inbound

import (
	"net"
	"net/netip"
	"time"

	"aether/dataplane/authz"
	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/extauthz"
	"aether/dataplane/httpmsg"
	"aether/dataplane/snapshot"
)

// ask parks a request until the pod's inbound filters have been asked about it (contract 10.7).
func (in *Inbound) ask(x *exchange.Exchange, c *conn, rq *reqState, snap *snapshot.Snapshot) {
	if in.cfg.Authz == nil {
		in.Refused(x, extauthz.Nobody)
		return
	}
	id, _ := x.Req.Get("x-request-id")
	rq.asked = in.cfg.Authz.Ask(c.info.Loop, x, rq.v.Pipe.Authz, authz.Question{
		Flow: &c.flow, Head: &x.Req, Workload: snap.WorkloadOf(&c.flow), ID: string(id),
		Time: time.Now().Add(-time.Duration(c.info.Loop.Now() - x.Start)), Source: c.from, Destination: c.to,
	}, rq.v.AuthzPath(&x.Req), in)
}

// Allowed is extauthz.Asker.
func (in *Inbound) Allowed(x *exchange.Exchange) {
	in.deliver(x, x.Conn.(*engine.ConnInfo).User.(*conn), x.User.(*reqState))
}

// Refused is extauthz.Asker. The flag UAEX stands in no rule of contract 5.7: a refusal is not asked
// for again elsewhere. What we had no room for is (code 0, "overload").
func (in *Inbound) Refused(x *exchange.Exchange, r *extauthz.Refusal) {
	rq := x.User.(*reqState)
	rq.cause = r.Cause
	rq.v.Action = decide.Refuse // what becomes of it, for the record
	tail := ";ext_authz_error"
	flags := "0;UAEX;"
	switch r.Cause {
	case extauthz.CauseDenied:
		tail = ";ext_authz_denied"
	case extauthz.CauseOverload:
		flags, tail = "0;-;", ";overload"
	}
	rq.outcome = append(append(append(rq.outcome[:0], flags...), x.Req.Method...), tail...)
	ct, _ := x.Req.Get("content-type")
	r.Reply(x, httpmsg.IsGRPC(ct), func(h *httpmsg.Head) { h.Set(hdrOutcome, rq.outcome) })
}

// addressOf is an address of a TCP connection; invalid: none is known.
func addressOf(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	p := t.AddrPort()
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
}
