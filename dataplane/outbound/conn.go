package outbound

import (
	"net"
	"net/netip"
	"time"

	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/reactor"
	"aether/dataplane/relay"
	"aether/dataplane/snapshot"
)

// conn is one downstream connection.
type conn struct {
	info           engine.ConnInfo
	o              *Outbound
	pod            *Pod
	st             *loopState
	flow           model.Flow
	start          int64
	requests       int
	lastWaitFailed int64 // when a wait for the rows of what was dialled ended without them; 0: none did
	passed         bool  // a request of it went to the dialled address: that connection is closed with it
	passH2         bool
}

// refused tells the journal of what a client sent that could not be read as a request.
func (c *conn) refused(status int, why error) {
	e := &c.st.end
	*e = journal.Entry{}
	e.At = time.Now()
	e.Request, e.Local, e.Status, e.Ended = true, true, status, "complete"
	e.Loop = c.st.l.ID() + 1
	c.entry(e)
	e.Host.SetString(c.flow.Host)
	e.Action, e.Reason, e.Cause = decide.Refuse.String(), decide.NoVerdict.String(), engine.RefusedCause(status)
	e.Fault = engine.FaultOf(why)
	e.Version = c.o.cfg.Store.Load().Version()
	e.Classify()
	c.o.cfg.Journal.Ended(e)
}

// entry fills in what is known of the connection.
func (c *conn) entry(e *journal.Entry) {
	e.Dir, e.Namespace, e.Workload = c.flow.Dir, c.flow.Namespace, c.flow.Workload
	e.Pod, e.Container = c.pod.Name, c.pod.Container
	e.Dst, e.Sniff = c.flow.Dst.AddrPort, c.flow.Sniff
}

// Describe is engine.Describer.
func (c *conn) Describe(s *engine.ConnState) {
	s.Role = c.flow.Dir.String()
	s.Destination = c.flow.Dst.AddrPort
}

// state is a connection that a relay carries. peer is who must be at the other end of a hop.
func (c *conn) state(client net.Addr, peer string) engine.ConnState {
	s := engine.ConnState{Pod: c.pod.Engine.Name, Loop: c.st.l.ID(), Protocol: "tcp", Peer: peer}
	c.Describe(&s)
	if a, ok := client.(*net.TCPAddr); ok {
		s.Client = netip.AddrPortFrom(a.AddrPort().Addr().Unmap(), uint16(a.Port))
	}
	return s
}

// connEnd is what a connection's entry says beside its verdict.
type connEnd struct {
	endpoint *snapshot.Endpoint
	in, out  int64
	ended    string
	cause    string
}

// recordRelay tells of a relay that is over; cut is what ended it, if it was ended by us.
func (c *conn) recordRelay(v decide.Verdict, snap *snapshot.Snapshot, e *snapshot.Endpoint, r relay.Result, cut error) {
	ended := "proxy"
	switch r.First {
	case relay.A:
		ended = "client"
	case relay.B:
		ended = "server"
	}
	cause := r.Cause()
	if r.End == relay.Cancelled && cut != nil {
		cause = why(cut)
	}
	c.record(v, snap, connEnd{endpoint: e, in: r.AtoB, out: r.BtoA, ended: ended, cause: cause})
}

// record tells the journal of a connection that carried no request of ours. Any goroutine.
func (c *conn) record(v decide.Verdict, snap *snapshot.Snapshot, end connEnd) {
	var e journal.Entry
	e.At = time.Now()
	e.Took = time.Duration(reactor.Monotonic() - c.start)
	c.entry(&e)
	e.Host.SetString(c.flow.Host)
	e.Action, e.Reason, e.Rule = v.Action.String(), v.Reason.String(), v.Rule
	if v.Backend != nil {
		e.Backend = v.Backend.Name
	}
	if end.endpoint != nil {
		e.Endpoint, e.Peer = end.endpoint.Addr, end.endpoint.SPIFFEID
	}
	e.BytesIn, e.BytesOut, e.Ended = end.in, end.out, end.ended
	e.Cause = end.cause
	e.Version = snap.Version()
	e.Classify()
	c.o.cfg.Journal.Ended(&e)
}

func clone(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return append([]byte(nil), b...)
}
