package outbound

import (
	"cmp"

	"aether/dataplane/engine"
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

// connectCause is the cause of a connection that was not made.
func connectCause(err error) string {
	return cmp.Or(engine.Shortage(err), "connect")
}

// sniffLater is a sniffer that its pod's share of an iteration did not suffice for.
type sniffLater sniffer

// Run is reactor.Task. The sniffer may be done by then, or another connection's: it reads only
// what is known to be there.
func (s *sniffLater) Run() { (*sniffer)(s).read() }

// Fail is reactor.Task.
func (s *sniffLater) Fail(error) { (*sniffer)(s).drop(true) }
