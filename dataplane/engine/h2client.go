package engine

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/http2"
	"aether/mtls/record"
	"aether/tproxy/socket"
)

// dialH2 starts an h2c connection to an application. fd of a Unix socket is connected already.
func (l *Loop) dialH2(pod *Pod, fd int, addr netip.AddrPort, owner h2Owner, unixSocket string) (*h2conn, error) {
	c := &h2conn{client: true, owner: owner, socket: unixSocket, free: l.h2Free()}
	connected := unixSocket != ""
	if !connected {
		if err := socket.StartConnect(fd, addr); err != nil {
			unix.Close(fd)
			return nil, err
		}
	}
	c.h2 = http2.New(http2.Config{ConnWindow: h2Window}, c)
	if err := c.open(l, pod, fd, nil, c); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if connected {
		c.arm()
	} else {
		c.connecting, c.wblk = true, true
		l.Arm(&c.timer, c, connectTime)
	}
	c.mark()
	return c, nil
}

// newHopConn puts a hop session whose handshake is done on the loop.
func (l *Loop) newHopConn(pod *Pod, fd int, rec record.Conn, owner h2Owner) (*h2conn, error) {
	c := &h2conn{client: true, owner: owner, hop: true, free: l.h2Free()}
	c.h2 = http2.New(http2.Config{ConnWindow: h2Window}, c)
	if err := c.open(l, pod, fd, rec, c); err != nil {
		return nil, err
	}
	l.Gauges.Sessions.Add(1)
	c.ready = true
	c.arm()
	c.mark()
	return c, nil
}

// request opens a stream for x; Available was > 0.
func (c *h2conn) request(x *exchange.Exchange) {
	if x.Req.Upgrade != nil && !c.h2.PeerAllowsConnect() {
		x.Cause = ErrNoTunnel
		x.UpstreamClosed(exchange.Refused)
		return
	}
	s, err := c.h2.Open()
	if err != nil {
		x.UpstreamClosed(exchange.Refused)
		return
	}
	if c.hop && c.owed == 0 { // a request that is given up later was not answered either
		c.owed = c.l.Now()
		if !c.life.Armed() {
			c.l.Arm(&c.life, (*pingTimer)(c), pingAfter)
		}
	}
	c.requests++
	st := c.free.getStream()
	st.c, st.s, st.x, st.moved, st.from = c, s, x, c.l.Now(), c.tx+int64(len(c.sealed))
	s.User = st
	x.Forward(st)
}
