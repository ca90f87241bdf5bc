package inbound

import "aether/dataplane/exchange"

// What a request is not delivered for want of: also the cause in the journal.
const (
	causeOverload = "overload"
	textOverload  = "overload: the proxy of the destination's node is short of memory, or the pod's connections hold too much of it\n"
	textShortage  = ": the proxy of the destination's node has none left to connect to the application\n"
)

// overloaded answers the request if the process or the pod is short of memory, so that the
// source tries another host (contract 5.7). What is asked about the node's life never
// comes here.
func (in *Inbound) overloaded(x *exchange.Exchange, c *conn, rq *reqState) bool {
	if !c.pod.Engine.Sheds(c.info.Loop) {
		return false
	}
	rq.cause = causeOverload
	in.reply(x, rq, 503, textOverload, "0", "-", causeOverload)
	return true
}
