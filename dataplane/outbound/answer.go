package outbound

import (
	"strconv"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// redirect answers with a Location, and with what the rule does to its answers.
func (o *Outbound) redirect(x *exchange.Exchange, c *conn, rq *reqState) {
	var h httpmsg.Head
	var fields [8]httpmsg.Field
	h.Fields, h.Status = fields[:0], rq.v.Status
	rq.scratch = rq.v.Location(rq.scratch, &c.flow, &x.Req)
	h.Add(hdrLocation, rq.scratch)
	h.Add(hdrContentType, textPlain)
	rq.v.ApplyResponse(&h, rq.origin)
	rq.asked.Edit(&h)
	x.Reply(&h, []byte(rq.v.Text))
}

// fail answers 503 with a reason for people; its kind goes to the journal.
func (o *Outbound) fail(x *exchange.Exchange, rq *reqState, kind, text string) {
	rq.cause = kind
	o.reply(x, 503, "", text+"\n", 14)
}

// noTunnel refuses an upgrade that cannot be carried. Without its Upgrade it would be another
// request than the client made.
func (o *Outbound) noTunnel(x *exchange.Exchange, rq *reqState, who string) {
	rq.cause = causeNoTunnel
	o.reply(x, 501, "", causeNoTunnel+": "+who+" takes no upgrades over HTTP/2 (extended CONNECT, RFC 8441); send the request without Upgrade, or to a destination that does\n", 12)
}

// reply answers locally; grpc is the grpc-status for a gRPC request (docs/engine.md, "gRPC").
func (o *Outbound) reply(x *exchange.Exchange, status int, reason, text string, grpc int) {
	rq, _ := x.User.(*reqState)
	if rq != nil {
		rq.stopRetries(x)
	}
	var h httpmsg.Head
	var fields [8]httpmsg.Field
	h.Fields = fields[:0]
	h.Status = status
	if reason != "" {
		h.Add(hdrError, []byte(reason))
	}
	if rq != nil {
		rq.v.MarkAnswer(&h, rq.origin)
	}
	if rq != nil && rq.grpc { // as it was asked, whatever a rule made of the head
		h.Status = 200
		h.Add(hdrContentType, appGRPC)
		h.Add(hdrGRPCStatus, strconv.AppendInt(nil, int64(grpc), 10))
		h.Add(hdrGRPCMessage, httpmsg.GRPCMessage(text))
		x.LoggedStatus = status
		x.Reply(&h, nil)
		return
	}
	if text != "" {
		h.Add(hdrContentType, textPlain)
	}
	x.Reply(&h, []byte(text))
}

// overloaded answers the request if the process or the pod is short of memory. What
// the proxy answers by itself, readiness among it, is exempt (contract 17).
func (o *Outbound) overloaded(x *exchange.Exchange, c *conn, rq *reqState) bool {
	if !c.pod.Engine.Sheds(c.st.l) {
		return false
	}
	o.fail(x, rq, causeOverload, textOverload)
	return true
}
