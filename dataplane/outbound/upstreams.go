package outbound

import (
	"context"
	"net/netip"
	"time"

	"aether/dataplane/balance"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
)

// upstreams is what a pod knows, on one loop, of what it calls (decision 014).
type upstreams struct {
	table  balance.Table
	groups map[netip.AddrPort]*engine.HopGroup // by endpoint
	raw    map[*rawConn]struct{}
	nears  int // endpoints of this node that have been met in process

	mirrors int // of the pod's requests, under way
}

// target is what stands behind a balance.Host: its User.
type target struct {
	hop *hopState
}

type hopKey struct {
	pod  *Pod
	addr netip.AddrPort
	port uint16
	pin  string
	near string // container of a pod of this node that is met in process; "": the hop is taken
}

// hop carries requests to an endpoint: engine.Hop, or in process engine.InProcess.
type hop interface {
	Send(*exchange.Exchange)
	Open() int
	Leave(cause error)
	Close(cause error)
	Sessions(wall time.Time, f func(engine.SessionState))
}

type hopState struct {
	hop  hop
	pin  string
	near string // as in hopKey
	gone bool   // closed, or out of sessions: the next request makes another
}

// rawConn is a raw-TCP connection that is relayed. It lives on the loop that it began on.
type rawConn struct {
	attempt
	of  *upstreams
	key hopKey
	cut context.CancelCauseFunc
}
