package engine

import (
	"aether/dataplane/http2"
	"aether/mtls/record"
)

// ServeHTTP2 serves HTTP/2 on fd, which it owns from now on. first are bytes already read
// from it. rec: a hop, whose peer is verified.
func (l *Loop) ServeHTTP2(fd int, rec record.Conn, info *ConnInfo, first []byte) error {
	c := &h2conn{info: info, free: l.h2Free()}
	c.mesh = rec != nil
	c.h2 = http2.New(http2.Config{Server: true, ConnWindow: h2Window, EnableConnect: true, Known: c.mesh, Date: l.dateNow}, c)
	if err := c.open(l, info.Pod, fd, rec, c); err != nil {
		return err
	}
	c.start(first)
	return nil
}

// AdoptHTTP2 is ServeHTTP2 for an fd that this loop has registered for another source.
func (l *Loop) AdoptHTTP2(fd int, info *ConnInfo, first []byte, readable bool) {
	c := &h2conn{info: info, free: l.h2Free()}
	c.h2 = http2.New(http2.Config{Server: true, ConnWindow: h2Window, EnableConnect: true, Date: l.dateNow}, c)
	c.adopt(l, info.Pod, fd, c, readable)
	c.start(first)
}
