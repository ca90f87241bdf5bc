package outbound

import (
	"errors"
	"strconv"

	"aether/dataplane/balance"
	"aether/dataplane/exchange"
	"aether/dataplane/snapshot"
)

// send gives the request to the hop of e; nil: there is no endpoint.
func (o *Outbound) send(x *exchange.Exchange, c *conn, rq *reqState, e *snapshot.Endpoint) {
	st := c.st
	st.leave(x, rq)
	if e == nil {
		o.fail(x, rq, "no-endpoint", "no healthy endpoint serves "+rq.v.Backend.Name)
		return
	}
	d, host := st.hostOf(c.pod, rq, e)
	if d.Full() {
		o.fail(x, rq, causeOverflow, textOverflow(rq.v.Backend))
		return
	}
	if x.Req.Upgrade != nil && d.FullOfTunnels() {
		o.fail(x, rq, causeOverflow, textTunnels(rq.v.Backend))
		return
	}
	h, err := st.hopFor(c.pod, rq, e, host)
	if errors.Is(err, errEndpointGone) { // since it was chosen
		rq.renew(o.cfg.Store.Load())
		o.send(x, c, rq, st.pick(c.pod, rq))
		return
	}
	if err != nil {
		x.Cause = err
		o.fail(x, rq, "wrong-peer", err.Error())
		return
	}
	rq.endpoint = e
	rq.tried[rq.attempt%len(rq.tried)] = e.Addr
	rq.attempt++
	rq.try.begin(d, host, st.l.Now(), h.hop.Open() == 0)
	h.hop.Send(x)
}

func textOverflow(b *snapshot.Backend) string {
	return "overflow: as many requests of this pod to " + b.Name + " are under way as may be (" + strconv.Itoa(balance.MaxOpen) + ")"
}

func textTunnels(b *snapshot.Backend) string {
	return "overflow: as many tunnels of this pod to " + b.Name + " are open as may be (" + strconv.Itoa(balance.MaxTunnels) + ")"
}
