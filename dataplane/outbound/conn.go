package outbound

import (
	"context"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/decide"
	"aether/dataplane/detect"
	"aether/dataplane/engine"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/reactor"
	"aether/dataplane/relay"
	"aether/dataplane/snapshot"
	"aether/meshhop"
	"aether/mtls/spiffeid"
	"aether/tproxy/socket"
)

// opening is the verdict on a connection before its first byte, and the world that it was made in.
type opening struct {
	v    decide.Verdict
	snap *snapshot.Snapshot
}

// sniff has the first bytes of a connection looked at, as v asks for.
func (c *conn) sniff(snap *snapshot.Snapshot, v decide.Verdict, fd int) {
	c.st.detectors.Begin(c.st.l, fd, detect.Question{
		Pod: c.pod.Engine, Sockets: c.pod.Sockets, Dst: c.flow.Dst.AddrPort, Begin: c.start,
		Wait: v.Sniff.Wait, Race: v.Sniff.Race, HelloOnly: v.Sniff.HelloOnly,
		Authority: v.Reason == decide.ForeignAddress, // only there does the verdict hang on the authority
		Answers:   c.flow.Dir != model.Captured,
	}, c, opening{v, snap})
}

// Detected is detect.Client: it asks Decide with the result and acts.
func (c *conn) Detected(d *detect.Detector[opening], r detect.Result) {
	snap, v := d.Aside.snap, d.Aside.v
	c.flow.Sniff, c.flow.Host = r.Sniff, r.Host
	draw := c.st.rnd.Uint32()
	if v.Action == decide.Sniff || r.Sniff != model.SniffHTTP11 && r.Sniff != model.SniffHTTP10 && r.Sniff != model.SniffH2C {
		v = decide.Decide(snap, &c.flow, draw, nil)
	}
	switch v.Action {
	case decide.Serve:
		if r.Sniff == model.SniffH2C {
			d.ServeHTTP2(&c.info)
		} else {
			d.ServeHTTP1(&c.info)
		}
		c.info.OnClose, c.info.OnRefused = closed, refused
	case decide.Passthrough:
		if fd, race, ok := d.DetachRace(); ok {
			c.passOn(fd, race, v, snap, d.First())
		}
	case decide.Forward:
		if fd, ok := d.Detach(); ok {
			c.forward(fd, v, snap, d.First())
		}
	case decide.Await:
		if fd, ok := d.Detach(); ok {
			c.await(fd, v, snap, draw, d.First(), (*conn).begin)
		}
	default:
		d.Abort()
		c.record(v, snap, connEnd{})
	}
}

// Undetected is detect.Client.
func (c *conn) Undetected(d *detect.Detector[opening], how detect.End) {
	end := connEnd{ended: "client"}
	if how == detect.Shed {
		end = connEnd{ended: "proxy", cause: causeOverload}
	}
	c.record(d.Aside.v, d.Aside.snap, end)
}

// refused is engine.ConnInfo.OnRefused.
func refused(info *engine.ConnInfo, status int, why error) { info.User.(*conn).refused(status, why) }

// closed is engine.ConnInfo.OnClose of a served connection.
func closed(info *engine.ConnInfo) {
	c := info.User.(*conn)
	if c.passed {
		info.Loop.DropScope(info, c.flow.Dst.AddrPort, c.passH2)
	}
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

func clone(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return append([]byte(nil), b...)
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
