package outbound

import (
	"net/netip"
	"slices"

	"aether/dataplane/balance"
	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/extauthz"
	"aether/dataplane/httpmsg"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/reactor"
	"aether/dataplane/snapshot"
)

// maxRetries is how often a request is sent again where its rule does not say (contract 5.7).
const maxRetries = 2

// reqState is one request's; it stays with its exchange object.
type reqState struct {
	v        decide.Verdict
	snap     *snapshot.Snapshot
	try      attempt // where the request is, if anywhere
	next     choice  // where it goes next
	endpoint *snapshot.Endpoint
	tried    [3]netip.AddrPort // the last ones
	attempt  int
	cause    string // journal.Entry's
	outcome  journal.Text
	reqID    [36]byte
	mirrors  *mirror        // copies of it, if any
	copyOf   *mirror        // of a copy: which it is
	session  session        // where the client's session is (persist.go)
	asked    *extauthz.Call // what the authorization service is asked, or was; nil: nothing

	// Retries and limits of time (retry.go). The timers are stopped by Done.
	x                   *exchange.Exchange // while it is served
	retries             int
	retrying            *balance.Dest // among whose retries it is counted; nil: none
	whole, tryEnd, wait reactor.Timer

	// A wait for rows (await.go).
	cold  bool            // it waits
	again decided         // what is called when it does not wait any more
	draw  uint32          // what decides by chance have gone by: the next verdict goes by it too
	sent  []httpmsg.Field // what clean took out

	// What was asked, before a rule changed it.
	host, path, origin []byte
	grpc               bool
	deadline           bool // whole is for the call's own limit of time, not the rule's
	// scratch is what a rule's changes are written to; it stays with the object.
	scratch []byte
}

// decided does with a request what its verdict, which is new, asks for. sent are the fields that clean took out.
type decided func(o *Outbound, x *exchange.Exchange, c *conn, rq *reqState, sent []httpmsg.Field)

// keepScratch bounds the scratch that is kept from one request to the next.
const keepScratch = 16 << 10

// retry is what the request's rule says about retries; nil: nothing.
func (rq *reqState) retry() *model.Retry {
	if m := rq.v.Matched; m != nil {
		return m.Retry
	}
	return nil
}

// limit is how often the request may be sent again.
func (rq *reqState) limit() int {
	if r := rq.retry(); r != nil {
		return int(r.Attempts)
	}
	return maxRetries
}

// names reports whether the request's rule asks for a retry on status.
func (rq *reqState) names(status int) bool {
	r := rq.retry()
	return r != nil && slices.Contains(r.Codes, uint16(status))
}

func (rq *reqState) conn() *conn { return rq.x.Conn.(*engine.ConnInfo).User.(*conn) }

// fault ends a request whose timer's task has failed.
func (rq *reqState) fault() {
	if rq.x != nil {
		rq.x.Abort(exchange.Internal)
	}
}

// releaseRetrySlot gives back the request's place among those that are sent again.
func (rq *reqState) releaseRetrySlot() {
	if rq.retrying != nil {
		rq.retrying.Settled()
		rq.retrying = nil
	}
}

// stopTimers ends the limits of time of the request's rule.
func (rq *reqState) stopTimers(st *loopState) {
	if rq.whole.Armed() {
		st.l.Disarm(&rq.whole)
	}
	if rq.tryEnd.Armed() {
		st.l.Disarm(&rq.tryEnd)
	}
}

// renew makes the request go by snap: the same destination, and of it what the request
// asked for, as they are now. What is not there any more is no endpoint.
func (rq *reqState) renew(snap *snapshot.Snapshot) {
	if snap == rq.snap {
		return
	}
	v := &rq.v
	if b := snap.Backend(v.Backend); b != nil {
		v.Backend = b
	}
	all := snap.Endpoints(v.Backend)
	v.Set = all.Part(v.Set)
	if v.Pinned != nil {
		e := all.Like(v.Pinned)
		if e == nil || e.Health != model.HealthUnspecified && e.Health != model.Healthy { // it or none
			v.Set = all.None()
			e = nil
		}
		v.Pinned = e
	}
	if at := rq.session.at; at != nil {
		e := v.Set.Like(at)
		if e != nil && (e.Key != at.Key || !e.Usable()) {
			e = nil
		}
		rq.session.at = e
	}
	rq.snap, rq.next = snap, choice{}
}
