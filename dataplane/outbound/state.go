package outbound

import (
	"net"
	"net/netip"
	"time"

	"aether/dataplane/engine"
)

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

// Sessions tells of up to limit hop sessions on the loop l, of pod ("shop/web-1"; "": of
// all), and how many there are; wall is the time of day. On the loop.
func (o *Outbound) Sessions(l *engine.Loop, pod string, limit int, wall time.Time) (list []engine.SessionState, total int) {
	for k, h := range o.loops.Get(l).hops {
		if pod != "" && k.pod.Engine.Name != pod {
			continue
		}
		h.hop.Sessions(wall, func(s engine.SessionState) {
			if total++; len(list) < limit {
				s.Identity, s.Endpoint, s.Port, s.Peer = k.pod.ID.String(), k.addr, k.port, k.pin
				list = append(list, s)
			}
		})
	}
	return list, total
}
