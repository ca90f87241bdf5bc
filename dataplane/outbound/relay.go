package outbound

import (
	"context"
	"net"

	"golang.org/x/sys/unix"

	"aether/dataplane/decide"
	"aether/dataplane/detect"
	"aether/dataplane/engine"
	"aether/dataplane/relay"
	"aether/dataplane/snapshot"
	"aether/meshhop"
	"aether/mtls/spiffeid"
	"aether/tproxy/socket"
)

// pass relays fd to the dialled address for life. up is a connection to it, or -1.
func (c *conn) pass(fd int, v decide.Verdict, snap *snapshot.Snapshot, up int, first []byte) {
	if c.pod.Engine.HoldsTooMuch() {
		_ = socket.Abort(fd)
		if up >= 0 {
			unix.Close(up)
		}
		c.record(v, snap, connEnd{ended: "proxy", cause: causeOverload})
		return
	}
	first = clone(first)
	c.pod.Engine.CountFDs(2)
	c.pod.Engine.HoldBytes(len(first))
	c.st.l.Go(func() {
		defer c.pod.Engine.CountFDs(-2)
		defer c.pod.Engine.HoldBytes(-len(first)) // the relay counts for itself
		a, err := socket.MakeConn(fd)
		if err != nil {
			if up >= 0 {
				unix.Close(up)
			}
			c.record(v, snap, connEnd{ended: "proxy", cause: engine.ConnectCause(err)})
			return
		}
		var b *net.TCPConn
		if up >= 0 {
			b, err = socket.MakeConn(up)
		} else {
			ctx, cancel := context.WithTimeout(c.pod.Context, detect.DialLimit)
			b, err = c.pod.Sockets.Connect(ctx, c.flow.Dst.AddrPort)
			cancel()
		}
		if err != nil {
			_ = a.SetLinger(0)
			a.Close()
			c.record(v, snap, connEnd{ended: "server", cause: engine.ConnectCause(err)})
			return
		}
		c.relay(func() {
			defer c.o.Relays.Add(c.state(a.RemoteAddr(), ""))()
			c.recordRelay(v, snap, nil, relay.Plain(c.pod.Context, a, b, first, c.relayOptions()), nil)
		})
	})
}

// forward relays fd over the hop: a declared raw-TCP port.
func (c *conn) forward(fd int, v decide.Verdict, snap *snapshot.Snapshot, first []byte) {
	if c.pod.Engine.HoldsTooMuch() {
		_ = socket.Abort(fd)
		c.record(v, snap, connEnd{ended: "proxy", cause: causeOverload})
		return
	}
	rq := &reqState{v: v, snap: snap}
	rq.renew(c.o.cfg.Store.Load()) // the client may have taken its time to say what it is
	e := c.st.pick(c.pod, rq)
	if e == nil {
		_ = socket.Abort(fd)
		c.record(v, snap, connEnd{ended: "proxy", cause: "no-endpoint"})
		return
	}
	ctx, raw, ok := c.st.beginRaw(c.pod, rq, e)
	if !ok {
		_ = socket.Abort(fd)
		c.record(v, snap, connEnd{endpoint: e, ended: "proxy", cause: causeOverflow})
		return
	}
	first = clone(first)
	c.pod.Engine.CountFDs(2)
	c.pod.Engine.HoldBytes(len(first))
	c.st.l.Go(func() {
		defer c.pod.Engine.CountFDs(-2)
		defer c.pod.Engine.HoldBytes(-len(first)) // the relay counts for itself
		a, err := socket.MakeConn(fd)
		if err != nil {
			_ = c.st.endRaw(ctx, raw)
			c.record(v, snap, connEnd{endpoint: e, ended: "proxy", cause: engine.ConnectCause(err)})
			return
		}
		refuse := func(kind string) {
			_ = a.SetLinger(0)
			a.Close()
			_ = c.st.endRaw(ctx, raw)
			c.record(v, snap, connEnd{endpoint: e, ended: "server", cause: kind})
		}
		pin, err := spiffeid.Parse(e.SPIFFEID)
		if err != nil {
			refuse("wrong-peer")
			return
		}
		k := meshhop.Key{Pod: c.pod.Container, Source: c.pod.ID, Endpoint: e.Addr, SNI: v.Backend.SNI, Proto: meshhop.Raw, Pin: pin}
		s, err := c.o.cfg.Dialer.Dial(ctx, k)
		c.st.connected(raw, rq, err)
		if err != nil {
			c.o.notOpened(k, err)
			refuse(string(meshhop.ReasonOf(err)))
			return
		}
		hop, rec := s.Conn, s.Record()
		c.relay(func() {
			defer c.o.Relays.Add(c.state(a.RemoteAddr(), e.SPIFFEID))()
			defer c.st.holdRaw(raw, s)()
			r := relay.TLS(ctx, a, hop, rec, first, c.relayOptions())
			c.recordRelay(v, snap, e, r, c.st.endRaw(ctx, raw))
		})
	})
}

// relay runs f, which lasts as long as the connection, in a goroutine of its own: the one that dialled and shook
// hands has grown a stack of many kilobytes for it, which an idle relay would keep.
func (c *conn) relay(f func()) {
	c.pod.Engine.CountFDs(2)
	c.st.l.Go(func() {
		defer c.pod.Engine.CountFDs(-2)
		f()
	})
}

// relayOptions are those of a relay of the connection's pod.
func (c *conn) relayOptions() relay.Options {
	o := c.o.cfg.Relay
	o.Memory = c.pod.Engine
	return o
}

// passOn passes a sniffed connection through, over the race's connection if there is one.
func (c *conn) passOn(fd int, r *detect.Race, v decide.Verdict, snap *snapshot.Snapshot, first []byte) {
	if r == nil {
		c.pass(fd, v, snap, -1, first)
		return
	}
	held := 0
	over := func(ok bool) {
		c.pod.Engine.HoldBytes(-held)
		if !ok {
			_ = socket.Abort(fd)
			c.record(v, snap, connEnd{ended: "server", cause: r.Cause()})
			return
		}
		up, ok := r.Take()
		if !ok {
			_ = socket.Abort(fd)
			return
		}
		c.pass(fd, v, snap, up, first)
	}
	if r.Connected() {
		over(true)
		return
	}
	first = clone(first) // it may lie in the loop's scratch
	held = len(first)
	c.pod.Engine.HoldBytes(held)
	r.Wait(over)
}
