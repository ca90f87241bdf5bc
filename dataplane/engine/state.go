package engine

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
)

// RefusedCause names, by the status that the engine answered, why what a client sent was
// no request: a closed set, for journal.Entry.Cause.
func RefusedCause(status int) string {
	switch status {
	case 408:
		return "head-timeout"
	case 414, 431:
		return "head-too-large"
	}
	return "bad-request"
}

// FaultOf is what is wrong with a message that could not be read, where err tells it: the field, the byte or the
// limit, printable and bounded. "": err is about something else.
func FaultOf(err error) string {
	if f, ok := errors.AsType[interface {
		error
		Fault() string
	}](err); ok {
		return f.Fault()
	}
	return ""
}

// What is wrong with messages that no codec refuses.
const (
	strangeSwitch = httpmsg.Flaw("status 101 with an Upgrade field that is not what the request asked for (RFC 9110 7.8)")
	badAccept     = httpmsg.Flaw("Sec-WebSocket-Accept does not belong to the request's key (RFC 6455 4.1)")
	strangeTunnel = httpmsg.Flaw("extended CONNECT for a protocol that is HTTP or TLS itself: send an ordinary request")
	shortLength   = httpmsg.Flaw("the connection ended before the body had the length of its Content-Length (RFC 9112 8)")
	shortChunks   = httpmsg.Flaw("the connection ended before the last chunk of the body (RFC 9112 8)")
	shortHead     = httpmsg.Flaw("the connection ended in the middle of the head (RFC 9112 8)")
)

// Gauges are what a loop carries now.
type Gauges struct {
	Outbound, Inbound atomic.Int64 // requests under way, counted by the service that answers
	Sessions          atomic.Int64 // hop sessions
}

// Ask runs f on every loop and returns what it gave, and the loops that did not run it
// before ctx ended: what their goroutines are stuck in is in /debug/pprof. A loop that
// still owes an earlier answer is not asked again, so that questions do not pile up.
// Questions are asked one after the other. f must be quick: the loop serves nobody meanwhile.
// Not on a loop.
func Ask[T any](ctx context.Context, e *Engine, f func(*Loop) T) (answers []T, silent []int) {
	loops := e.Loops()
	select {
	case e.ask <- struct{}{}:
		defer func() { <-e.ask }()
	case <-ctx.Done():
		for _, l := range loops {
			silent = append(silent, l.ID())
		}
		return nil, silent
	}
	type answer struct {
		loop int
		v    T
	}
	ch := make(chan answer, len(loops))
	waiting := map[int]bool{}
	for _, l := range loops {
		if !l.asked.CompareAndSwap(false, true) {
			silent = append(silent, l.ID())
			continue
		}
		err := l.Post(func() {
			defer l.asked.Store(false) // should f panic
			v := f(l)
			l.asked.Store(false) // before Ask returns: the next question may follow at once
			ch <- answer{l.ID(), v}
		})
		if err != nil { // it has ended, and carries nothing
			l.asked.Store(false)
			continue
		}
		waiting[l.ID()] = true
	}
	for len(waiting) > 0 {
		select {
		case a := <-ch:
			delete(waiting, a.loop)
			answers = append(answers, a.v)
		case <-ctx.Done():
			for id := range waiting {
				silent = append(silent, id)
			}
			return answers, silent
		}
	}
	return answers, silent
}

// ConnState is a connection as it stands, for whoever shows it. The names in JSON are a
// promise to scripts; new ones may be added.
type ConnState struct {
	Pod  string `json:"pod"` // "shop/web-1"
	Loop int    `json:"loop"`
	// Role: captured, proxy or inbound, of connections to us; application, of ours to the
	// pod's application or, passed through, to the dialled address.
	Role        string         `json:"role"`
	Client      netip.AddrPort `json:"client,omitzero"`      // who connected
	Destination netip.AddrPort `json:"destination,omitzero"` // what was dialled; inbound the port alone
	Socket      string         `json:"socket,omitempty"`     // in the place of Destination: the application's Unix socket, "unix:<file>"
	Peer        string         `json:"peer,omitempty"`       // verified SPIFFE ID: inbound the caller's, of a relay over a hop the endpoint's
	Protocol    string         `json:"protocol"`             // http1, h2, tcp, or "" while it is looked at
	State       string         `json:"state"`                // sniff, idle, head, request, response, linger, connect, stream, tunnel, drain, relay
	AgeMS       int64          `json:"age_ms"`
	IdleMS      int64          `json:"idle_ms"` // since the last byte either way
	Requests    uint64         `json:"requests"`
	Streams     int            `json:"streams"` // under way
	BytesIn     int64          `json:"bytes_in"`
	BytesOut    int64          `json:"bytes_out"` // of the socket, TLS included; of a relay not known before its end
}

// Shown is a source that is a connection. Show fills in all but Loop and the
// pod, on the loop. A source that is no connection, or none any more, answers false.
type Shown interface {
	Owned
	Show(*ConnState) bool
}

// Describer is a ConnInfo.User that knows what the engine does not: role, destination and peer.
type Describer interface{ Describe(*ConnState) }

// Conns tells of up to limit connections on the loop, of pod ("shop/web-1"; "": of all),
// and how many there are. On the loop.
func (l *Loop) Conns(pod string, limit int) (list []ConnState, total int) {
	l.Each(func(s reactor.Source) {
		c, ok := s.(Shown)
		if h, hop := s.(*h2conn); !ok || hop && h.hop {
			return
		}
		p := c.Owner()
		if pod != "" && p.Name != pod {
			return
		}
		if len(list) == limit {
			total++ // one that ends is counted too: it is still there
			return
		}
		st := ConnState{Pod: p.Name, Loop: l.ID()}
		if c.Show(&st) {
			total++
			list = append(list, st)
		}
	})
	return list, total
}

// PeerAddr is the address of who is at the other end of a socket; zero: it is gone.
func PeerAddr(fd int) netip.AddrPort {
	sa, err := unix.Getpeername(fd)
	if err != nil {
		return netip.AddrPort{}
	}
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}

func (t *transport) show(s *ConnState) {
	now := t.l.Now()
	s.AgeMS, s.IdleMS = (now-t.born)/1e6, (now-t.active)/1e6
	s.BytesIn, s.BytesOut = t.rx, t.tx
}

// Show is Shown.
func (c *h1server) Show(s *ConnState) bool {
	if c.closed {
		return false
	}
	c.show(s)
	s.Protocol, s.Client, s.Requests = "http1", PeerAddr(c.fd), c.requests
	switch {
	case c.state == stLinger:
		s.State = "linger"
	case c.x != nil && c.tunnel:
		s.State = "tunnel"
	case c.x != nil && !c.reqDone:
		s.State = "request"
	case c.x != nil:
		s.State = "response"
	case c.r < c.w:
		s.State = "head"
	default:
		s.State = "idle"
	}
	if c.x != nil {
		s.Streams = 1
	}
	if d, ok := c.info.User.(Describer); ok {
		d.Describe(s)
	}
	return true
}

// Show is Shown. Hop sessions are shown by Hop.Sessions.
func (c *h2conn) Show(s *ConnState) bool {
	if c.closed || c.hop {
		return false
	}
	c.show(s)
	s.Protocol, s.Requests, s.Streams = "h2", c.requests, c.h2.Streams()
	switch {
	case c.connecting:
		s.State = "connect"
	case c.closing || c.goaway:
		s.State = "drain"
	case s.Streams > 0:
		s.State = "stream"
	default:
		s.State = "idle"
	}
	if c.client {
		if s.Role = "application"; c.in != nil && c.in.name != "" {
			s.Socket = c.in.name
		} else {
			s.Destination = PeerAddr(c.fd)
		}
		return true
	}
	s.Client = PeerAddr(c.fd)
	if d, ok := c.info.User.(Describer); ok {
		d.Describe(s)
	}
	return true
}

// Show is Shown.
func (c *h1client) Show(s *ConnState) bool {
	if c.closed {
		return false
	}
	c.show(s)
	s.Role, s.Protocol, s.Requests = "application", "http1", c.requests
	if c.pool != nil {
		s.Destination, s.Socket = c.pool.key.addr, c.pool.h2.name
	}
	switch {
	case c.connecting:
		s.State = "connect"
	case c.x == nil:
		s.State = "idle"
	case c.tunnel:
		s.State = "tunnel"
	case c.gotByte:
		s.State = "response"
	default:
		s.State = "request"
	}
	if c.x != nil {
		s.Streams = 1
	}
	return true
}

// SessionState is a hop session as it stands, for whoever shows it. The names in JSON are
// a promise to scripts; new ones may be added.
type SessionState struct {
	Pod      string         `json:"pod"` // whose it is: "shop/web-1"
	Loop     int            `json:"loop"`
	Identity string         `json:"identity"` // the pod's own SPIFFE ID, which it shows
	Endpoint netip.AddrPort `json:"endpoint"`
	Port     uint16         `json:"port"` // of the service, and the server name
	Peer     string         `json:"peer"` // the endpoint's SPIFFE ID, which it must show
	// State: connect (being dialled), ready, full (takes no more streams now), or drain
	// (takes none any more: by GOAWAY, by age, or because its certificates end); or
	// in-process: the endpoint is of this node, and there is no session (decision 018).
	State    string    `json:"state"`
	Streams  int       `json:"streams"` // under way
	Requests uint64    `json:"requests"`
	Waiting  int       `json:"waiting"` // requests that wait for any session of this key
	AgeMS    int64     `json:"age_ms"`
	IdleMS   int64     `json:"idle_ms"`
	BytesIn  int64     `json:"bytes_in"`
	BytesOut int64     `json:"bytes_out"`
	Until    time.Time `json:"certificates_until,omitzero"` // the earlier end of the two ends' certificates
}

// Sessions calls f with the hop's sessions, and with one that is being dialled; wall is
// the time of day. On the loop.
func (h *Hop) Sessions(wall time.Time, f func(SessionState)) {
	now := h.l.Now()
	base := SessionState{Pod: h.pod.Name, Loop: h.l.ID(), Waiting: len(h.waiters)}
	tell := func(c *h2conn, state string) {
		s := base
		s.State, s.Streams, s.Requests = state, c.h2.Streams(), c.requests
		s.AgeMS, s.IdleMS = (now-c.born)/1e6, (now-c.active)/1e6
		s.BytesIn, s.BytesOut = c.rx, c.tx
		s.Until = wall.Add(c.bond.Left()).UTC().Truncate(time.Second)
		f(s)
	}
	for _, c := range h.conns {
		switch {
		case c.goaway || c.retireAt < now:
			tell(c, "drain")
		case c.h2.Available() == 0:
			tell(c, "full")
		default:
			tell(c, "ready")
		}
	}
	for _, c := range h.old {
		tell(c, "drain")
	}
	if h.dialing {
		s := base
		s.State = "connect"
		f(s)
	}
}
