package outbound

import (
	"aether/dataplane/exchange"
)

// What is short when a request, or a connection, is not served for want of it: also
// the cause in the journal.
const (
	causeOverload = "overload"
	textOverload  = "overload: the proxy of this node is short of memory, or this pod holds too much of it; try again"
)

// overloaded answers the request if the process or the pod is short of memory. What
// the proxy answers by itself, readiness among it, is exempt (contract 17).
func (o *Outbound) overloaded(x *exchange.Exchange, c *conn, rq *reqState) bool {
	if !c.pod.Engine.Sheds(c.st.l) {
		return false
	}
	o.fail(x, rq, causeOverload, textOverload)
	return true
}
