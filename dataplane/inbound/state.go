package inbound

import (
	"net"
	"net/netip"

	"aether/dataplane/engine"
)

// Describe is engine.Describer.
func (c *conn) Describe(s *engine.ConnState) {
	s.Role = c.flow.Dir.String()
	s.Destination, s.Peer = c.flow.Dst.AddrPort, c.flow.Peer
}

// state is a connection that a relay carries.
func (c *conn) state(tc *net.TCPConn) engine.ConnState {
	s := engine.ConnState{Pod: c.pod.Engine.Name, Loop: c.pod.Engine.Home().ID(), Protocol: "tcp"}
	c.Describe(&s)
	if a, ok := tc.RemoteAddr().(*net.TCPAddr); ok {
		s.Client = netip.AddrPortFrom(a.AddrPort().Addr().Unmap(), uint16(a.Port))
	}
	return s
}
