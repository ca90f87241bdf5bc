package outbound

import (
	"context"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/reactor"
	"aether/dataplane/relay"
	"aether/dataplane/snapshot"
	"aether/meshhop"
	"aether/mtls/spiffeid"
	"aether/sniff"
	"aether/tproxy/socket"
)

const (
	idleLimit  = 5 * time.Minute  // of a connection that says nothing to a port that must be HTTP
	beginLimit = 15 * time.Second // from the first byte until the bytes say what they are, on a port that must be HTTP; elsewhere bytes that dribble in
	dialLimit  = 2 * time.Second  // of a passthrough connect (contract 4.7)
	firstRead  = 4 << 10

	recordHandshake = 22 // ContentType of a TLS record that holds a ClientHello (RFC 8446 5.1)
)

// sniffer waits for a connection's first bytes and asks Decide again. While it
// waits it holds no buffer.
type sniffer struct {
	c     *conn
	snap  *snapshot.Snapshot // the world of the first verdict, and of the second
	v     decide.Verdict
	fd    int
	buf   []byte
	held  int // bytes of buf that the pod's account has
	state sniff.State
	h2    h2First
	timer reactor.Timer
	until int64 // what it is must be known by then; 0: the client has not begun
	race  *racer
	done  bool
	last  bool // no more bytes are waited for
	ready bool
	fin   bool // its end lies behind the bytes, and no further edge will tell of it
}

func (c *conn) sniff(snap *snapshot.Snapshot, v decide.Verdict, fd int) {
	s := c.st.sniffer()
	s.c, s.snap, s.v, s.fd = c, snap, v, fd
	c.pod.Engine.CountFDs(1)
	l := c.st.l
	if err := l.Register(fd, s, reactor.Stream); err != nil {
		unix.Close(fd)
		s.done = true
		s.put()
		return
	}
	wait := v.Sniff.Wait
	if wait == 0 {
		wait = idleLimit
	}
	l.Arm(&s.timer, s, int64(wait))
	if v.Sniff.Race {
		s.race = c.startRace(s)
	}
}

const keepSniffers = 256

// sniffer takes one from the free list. It is reset here and not when it is
// given back: whoever calls settled or drop may still look at it.
func (st *loopState) sniffer() *sniffer {
	if n := len(st.free); n > 0 {
		s := st.free[n-1]
		st.free = st.free[:n-1]
		*s = sniffer{}
		return s
	}
	return &sniffer{}
}

// put gives a sniffer back that is done: nothing but its caller refers to it.
func (s *sniffer) put() {
	s.c.pod.Engine.CountFDs(-1)
	s.c.pod.Engine.HoldBytes(-s.held)
	s.held = 0
	if st := s.c.st; len(st.free) < keepSniffers {
		s.snap, s.buf, s.race = nil, nil, nil
		st.free = append(st.free, s)
	}
}

// keep makes buf a buffer of its own with room for n bytes; false: the pod holds too much already, and
// the connection is gone.
func (s *sniffer) keep(n int) bool {
	p := s.c.pod.Engine
	if p.HoldsTooMuch() {
		s.end(true, connEnd{ended: "proxy", cause: causeOverload})
		return false
	}
	s.buf = append(make([]byte, 0, n), s.buf...)
	p.HoldBytes(n - s.held)
	s.held = n
	return true
}

// Event is reactor.Source.
func (s *sniffer) Event(ev uint32) {
	if ev&^reactor.Writable == 0 || s.done {
		return
	}
	s.ready = true
	s.fin = s.fin || ev&(reactor.PeerEnd|reactor.Hangup|reactor.Error|reactor.Urgent) != 0
	if !s.c.pod.Engine.Defer(s.c.st.l, (*sniffLater)(s)) {
		s.read()
	}
}

// Owner is engine.Owned.
func (s *sniffer) Owner() *engine.Pod { return s.c.pod.Engine }

func (s *sniffer) read() {
	l := s.c.st.l
	for s.ready && !s.done {
		// The first bytes mostly decide: only if they do not are they kept.
		room := l.Scratch[:sniff.MaxPeek]
		if len(s.buf) > 0 {
			if len(s.buf) == cap(s.buf) && cap(s.buf) < sniff.MaxPeek && !s.keep(min(2*cap(s.buf), sniff.MaxPeek)) {
				return
			}
			room = s.buf[len(s.buf):cap(s.buf)]
		}
		if len(room) == 0 {
			s.last = true
			s.settle(s.state.Last(s.buf))
			return
		}
		n, err := unix.Read(s.fd, room)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			s.ready, s.fin = false, false
			return
		case err != nil:
			s.drop(true)
			return
		case n == 0: // no more will come
			s.last = true
			if len(s.buf) == 0 && s.race == nil && !s.v.Sniff.HelloOnly { // who only listens is served by a raw port
				s.drop(false)
				return
			}
			s.settle(s.state.Last(s.buf))
			return
		}
		s.ready = n == len(room) || s.fin
		first := len(s.buf) == 0
		if first {
			s.buf = room[:n]
		} else {
			s.buf = s.buf[:len(s.buf)+n]
		}
		if s.v.Sniff.HelloOnly && s.buf[0] != recordHandshake {
			s.settled(model.SniffOpaque, "")
			return
		}
		if r := s.state.Detect(s.buf); !r.More {
			if s.settle(r); s.done {
				return
			}
		}
		if first {
			if !s.keep(max(firstRead, len(s.buf))) {
				return
			}
			s.until = l.Now() + int64(beginLimit)
		}
		if s.race == nil { // the client has begun: it may finish, but not take for ever
			d := s.until - l.Now()
			if s.v.Sniff.Wait != 0 {
				d = min(d, int64(s.v.Sniff.Wait))
			}
			l.Arm(&s.timer, s, max(d, 1))
		}
	}
}

// Run is reactor.Task: the wait is over.
func (s *sniffer) Run() {
	if s.done {
		return
	}
	if len(s.buf) == 0 && s.mustBeHTTP() {
		s.drop(false) // a pre-opened connection that was never used
		return
	}
	s.last = true
	r := s.state.Last(s.buf)
	if yes, more := sniff.BeginsRequest(s.buf); r.Proto == sniff.Unknown && s.mustBeHTTP() && s.c.flow.Dir == model.Captured && (yes || more) {
		s.drop(false) // a request that takes too long; on the proxy port the codec takes it from here
		return
	}
	s.settle(r)
}

// Fail is reactor.Source and Task.
func (s *sniffer) Fail(error) { s.drop(true) }

// serverSpoke: the dialled server was first, so nothing is waited for any more.
func (s *sniffer) serverSpoke() {
	switch {
	case s.done:
	case len(s.buf) == 0:
		s.settled(model.SniffSilent, "")
	default:
		// Both have spoken: the client's bytes win, if they say what they are. The
		// beginning of a preface may go on only once it has the server's SETTINGS;
		// any other beginning is none of HTTP, whose servers do not speak before
		// they were asked.
		r := s.state.Detect(s.buf)
		switch {
		case !r.More:
		case len(s.buf) < len(sniff.Preface) && string(s.buf) == sniff.Preface[:len(s.buf)]:
			return
		case r.Proto == sniff.None:
			r.Proto = sniff.Unknown
		}
		s.last = true
		s.settle(r)
	}
}

func (s *sniffer) settle(r sniff.Result) {
	if s.done {
		return
	}
	if s.v.Sniff.HelloOnly && r.Proto != sniff.TLS {
		kind := model.SniffOpaque
		if r.Proto == sniff.None {
			kind = model.SniffSilent
		}
		s.settled(kind, "")
		return
	}
	switch r.Proto {
	case sniff.HTTP10, sniff.HTTP11:
		kind := model.SniffHTTP11
		if r.Proto == sniff.HTTP10 {
			kind = model.SniffHTTP10
		}
		host, more, _ := s.state.RequestHost(s.buf)
		if more && s.needsHost() {
			return // the request line is here, the authority is not: read on
		}
		s.settled(kind, string(host))
	case sniff.H2C:
		host, more := "", false
		if s.v.Reason == decide.ForeignAddress {
			host, more = s.h2.authority(s.buf)
		}
		if more && s.needsHost() {
			return
		}
		s.settled(model.SniffH2C, host)
	case sniff.TLS:
		s.settled(model.SniffTLS, string(r.SNI))
	case sniff.None:
		s.settled(model.SniffSilent, "")
	default:
		kind := model.SniffOpaque
		if s.mustBeHTTP() {
			yes, more := sniff.BeginsRequest(s.buf)
			if more && !s.last {
				return
			}
			if yes || more {
				kind = model.SniffMalformed
			}
		}
		s.settled(kind, "")
	}
}

// mustBeHTTP: the port is an HTTP port of the mesh, where what begins like a request is answered
// rather than passed on (decision 042).
func (s *sniffer) mustBeHTTP() bool { return s.v.Sniff.Wait == 0 }

// needsHost: only on a connection to a foreign address does the verdict hang on the authority.
func (s *sniffer) needsHost() bool { return !s.last && s.v.Reason == decide.ForeignAddress }

// settled asks Decide with the result and acts.
func (s *sniffer) settled(kind model.Sniff, host string) {
	c, l := s.c, s.c.st.l
	s.done = true
	defer s.put()
	l.Disarm(&s.timer)
	c.flow.Sniff, c.flow.Host = kind, host
	v := s.v
	draw := c.st.rnd.Uint32()
	if v.Action == decide.Sniff || kind != model.SniffHTTP11 && kind != model.SniffHTTP10 && kind != model.SniffH2C {
		v = decide.Decide(s.snap, &c.flow, draw, nil)
	}
	switch v.Action {
	case decide.Serve:
		s.stopRace()
		if kind == model.SniffH2C {
			l.AdoptHTTP2(s.fd, &c.info, s.buf, s.ready)
		} else {
			l.AdoptHTTP1(s.fd, &c.info, s.buf, s.ready)
		}
		c.info.OnClose, c.info.OnRefused = closed, refused
	case decide.Passthrough:
		c.passOn(s, v)
	case decide.Forward:
		s.stopRace()
		if err := l.Detach(s.fd); err != nil {
			unix.Close(s.fd)
			return
		}
		c.forward(s.fd, v, s.snap, s.buf)
	case decide.Await:
		s.stopRace()
		if err := l.Detach(s.fd); err != nil {
			unix.Close(s.fd)
			return
		}
		c.await(s.fd, v, s.snap, draw, s.buf)
	default:
		s.stopRace()
		l.Unregister(s.fd)
		_ = socket.Abort(s.fd)
		c.record(v, s.snap, connEnd{})
	}
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

func (s *sniffer) stopRace() {
	if s.race != nil {
		s.race.close()
		s.race = nil
	}
}

func (s *sniffer) drop(abort bool) { s.end(abort, connEnd{ended: "client"}) }

// end closes the connection, with a reset if abort; how is what the journal is told.
func (s *sniffer) end(abort bool, how connEnd) {
	if s.done {
		return
	}
	s.done = true
	if abort && s.race != nil && s.race.fd >= 0 {
		_ = socket.SetLinger0(s.race.fd) // who was dialled sees the reset too
	}
	s.stopRace()
	l := s.c.st.l
	l.Disarm(&s.timer)
	l.Unregister(s.fd)
	if abort {
		_ = socket.Abort(s.fd)
	} else {
		unix.Close(s.fd)
	}
	s.c.record(s.v, s.snap, how)
	s.put()
}

// racer is a connection to the dialled address, made while the client has not spoken.
type racer struct {
	c         *conn
	s         *sniffer // nil once somebody waits for the connection instead
	fd        int      // -1 until there is a socket
	connected bool
	failed    bool
	spoke     bool
	cause     string // why it failed
	timer     reactor.Timer
	then      func(ok bool) // called when the connect is over
}

// startRace dials; where no socket is at hand one is asked for.
func (c *conn) startRace(s *sniffer) *racer {
	l := c.st.l
	r := &racer{c: c, s: s, fd: -1, cause: "connect"}
	c.pod.Engine.CountFDs(1)
	l.Arm(&r.timer, r, int64(dialLimit))
	v6 := c.flow.Dst.Addr().Unmap().Is6()
	if fd, ok := c.pod.Sockets.Get(v6); ok {
		if !r.connect(fd) {
			r.close()
			return nil
		}
		return r
	}
	c.pod.Sockets.Request(v6, func(fd int, err error) {
		perr := l.Post(func() {
			switch {
			case err != nil:
				r.cause = connectCause(err)
				r.lost()
			case r.failed:
				unix.Close(fd)
			case !r.connect(fd):
				r.lost()
			}
		})
		if perr != nil && err == nil {
			unix.Close(fd)
		}
	})
	return r
}

// connect starts the connect on fd, which is the racer's, or closed, from now on.
func (r *racer) connect(fd int) bool {
	err := socket.StartConnect(fd, r.c.flow.Dst.AddrPort)
	if err == nil {
		err = r.c.st.l.Register(fd, r, reactor.Stream)
	}
	if err != nil {
		r.cause = connectCause(err)
		unix.Close(fd)
		return false
	}
	r.fd = fd
	return true
}

// Event is reactor.Source.
func (r *racer) Event(ev uint32) {
	if r.failed {
		return
	}
	if !r.connected && ev&(reactor.Writable|reactor.Error|reactor.Hangup) != 0 {
		done, err := socket.Connected(r.fd)
		if err != nil {
			r.lost()
			return
		}
		if !done {
			return
		}
		r.connected = true
		r.c.st.l.Disarm(&r.timer)
		if r.then != nil {
			r.then(true)
			return
		}
	}
	if r.connected && ev&^reactor.Writable != 0 {
		r.spoke = true // bytes, or its end: either way the server was first
		if r.s != nil {
			r.s.serverSpoke()
		}
	}
}

// Run is reactor.Task: the connect took too long.
func (r *racer) Run() { r.lost() }

// Fail is reactor.Source and Task.
func (r *racer) Fail(error) {
	r.connected = false
	r.lost()
}

// Owner is engine.Owned.
func (r *racer) Owner() *engine.Pod { return r.c.pod.Engine }

func (r *racer) lost() {
	if r.failed || r.connected {
		return
	}
	r.close()
	if r.s != nil {
		r.s.race = nil
	}
	if r.then != nil {
		r.then(false)
	}
}

func (r *racer) close() {
	if !r.failed {
		r.failed = true
		r.c.pod.Engine.CountFDs(-1)
		l := r.c.st.l
		l.Disarm(&r.timer)
		if r.fd >= 0 {
			l.Unregister(r.fd)
			unix.Close(r.fd)
		}
	}
}

// passOn passes a sniffed connection through, over the racer's connection if there is one.
func (c *conn) passOn(s *sniffer, v decide.Verdict) {
	l := c.st.l
	if err := l.Detach(s.fd); err != nil {
		unix.Close(s.fd)
		s.stopRace()
		return
	}
	r := s.race
	s.race = nil
	if r == nil {
		c.pass(s.fd, v, s.snap, -1, s.buf)
		return
	}
	r.s = nil
	fd, buf, snap, held := s.fd, s.buf, s.snap, 0
	go1 := func(ok bool) {
		c.pod.Engine.HoldBytes(-held)
		if !ok {
			_ = socket.Abort(fd)
			c.record(v, snap, connEnd{ended: "server", cause: r.cause})
			return
		}
		r.failed = true // the racer is used up; its socket lives on
		c.pod.Engine.CountFDs(-1)
		if err := l.Detach(r.fd); err != nil {
			unix.Close(r.fd)
			_ = socket.Abort(fd)
			return
		}
		c.pass(fd, v, snap, r.fd, buf)
	}
	if r.connected {
		go1(true)
		return
	}
	buf = clone(buf) // it may lie in the loop's scratch
	held = len(buf)
	c.pod.Engine.HoldBytes(held)
	r.then = go1
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
			c.record(v, snap, connEnd{ended: "proxy", cause: connectCause(err)})
			return
		}
		var b *net.TCPConn
		if up >= 0 {
			b, err = socket.MakeConn(up)
		} else {
			ctx, cancel := context.WithTimeout(c.pod.Context, dialLimit)
			b, err = c.pod.Sockets.Connect(ctx, c.flow.Dst.AddrPort)
			cancel()
		}
		if err != nil {
			_ = a.SetLinger(0)
			a.Close()
			c.record(v, snap, connEnd{ended: "server", cause: connectCause(err)})
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
			c.record(v, snap, connEnd{endpoint: e, ended: "proxy", cause: connectCause(err)})
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
