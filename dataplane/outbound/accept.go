package outbound

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"aether/dataplane/decide"
	"aether/dataplane/detect"
	"aether/dataplane/engine"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
	"aether/tproxy/socket"
)

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

// AcceptCaptured takes connections of a pod's capture listener.
func (o *Outbound) AcceptCaptured(p *Pod) engine.Accept {
	return func(l *engine.Loop, fd int) {
		dst, err := socket.OrigDst(fd)
		if err != nil {
			o.log.Warn("captured connection without an original destination", "pod", p.Container, "err", err)
			unix.Close(fd)
			return
		}
		o.accept(l, fd, p, model.Captured, dst)
	}
}

// AcceptProxy takes connections of a pod's proxy port.
func (o *Outbound) AcceptProxy(p *Pod) engine.Accept {
	return func(l *engine.Loop, fd int) { o.accept(l, fd, p, model.Proxy, netip.AddrPort{}) }
}

func (o *Outbound) accept(l *engine.Loop, fd int, p *Pod, dir model.Direction, dst netip.AddrPort) {
	st := o.loops.Get(l)
	c := &conn{o: o, pod: p, st: st, start: l.Now()}
	c.info = engine.ConnInfo{Pod: p.Engine, Loop: l, Pool: &st.pool, User: c}
	c.flow = model.Flow{Namespace: p.Namespace, Workload: p.Account, Container: p.Container, Dir: dir, Dst: model.OrigDst{AddrPort: dst}}
	snap := o.cfg.Store.Load()
	draw := st.rnd.Uint32()
	c.flow.Waited = dir == model.Captured && o.cfg.Want == nil // nobody would bring rows
	v := decide.Decide(snap, &c.flow, draw, nil)
	if dir == model.Captured && model.ReservedPort(dst.Port()) && (v.Action == decide.Sniff && v.Sniff.Race || v.Action == decide.Passthrough) {
		c.foreign(fd, v, snap, draw)
		return
	}
	c.begin(fd, v, snap, draw, nil)
}

// foreign begins a connection to one of the mesh's own ports at an address that is nobody's in the mesh, once the pod's
// namespace has told that the address is not the pod's own: behind those our own listeners wait (decision 043).
func (c *conn) foreign(fd int, v decide.Verdict, snap *snapshot.Snapshot, draw uint32) {
	l, addr := c.st.l, c.flow.Dst.Addr().Unmap()
	c.pod.Engine.CountFDs(2)
	c.pod.Sockets.Request(addr.Is6(), func(probe int, err error) {
		own := true // also where nobody can tell
		if err == nil {
			own, err = socket.IsLocal(probe, addr)
			own = own || err != nil
			unix.Close(probe)
		}
		perr := l.Post(func() {
			c.pod.Engine.CountFDs(-2)
			if !own {
				c.begin(fd, v, snap, draw, nil)
				return
			}
			_ = socket.Abort(fd)
			end := connEnd{}
			if err != nil {
				end.cause = engine.ConnectCause(err)
			}
			c.record(decide.Verdict{Action: decide.Refuse, Reason: decide.Loop}, snap, end)
		})
		if perr != nil {
			c.pod.Engine.CountFDs(-2)
			_ = socket.Abort(fd)
		}
	})
}

// begin does what the verdict on a captured connection says. fd is no loop's. first is what
// has been read from it; it may alias anything.
func (c *conn) begin(fd int, v decide.Verdict, snap *snapshot.Snapshot, draw uint32, first []byte) {
	switch {
	case (v.Action == decide.Sniff || v.Action == decide.Serve) && c.flow.Sniff == model.SniffNone:
		c.sniff(snap, v, fd)
	case v.Action == decide.Forward:
		c.forward(fd, v, snap, first)
	case v.Action == decide.Passthrough:
		c.pass(fd, v, snap, -1, first)
	case v.Action == decide.Await:
		c.await(fd, v, snap, draw, first, (*conn).begin)
	default: // refused; or the port has become another one since it was sniffed
		_ = socket.Abort(fd)
		c.record(v, snap, connEnd{})
	}
}
