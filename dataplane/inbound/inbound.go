// Package inbound is the destination end of the hop: it shakes hands on 18008
// with the pod's own certificate, takes the caller from the client's, the port
// from the server name, and delivers to the application.
//
//   - Nothing is delivered before the caller is verified.
//   - x-forwarded-client-cert is always ours; x-aether-outcome stands on every answer.
//   - Delivery is to 127.0.0.1:<port> in the pod's namespace, or for all ports to the
//     pod's Unix socket (contract 6.5).
//   - A request is sent a second time only where a kept connection had ended, and only
//     if nothing of it was taken, or its method allows that.
//
// It knows no listener and no registry: those are given to it.
package inbound

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/extauthz"
	"aether/dataplane/httpmsg"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/reactor"
	"aether/dataplane/relay"
	"aether/dataplane/snapshot"
	"aether/dataplane/telemetry"
	"aether/meshhop"
	"aether/mtls"
	"aether/mtls/record"
	"aether/mtls/spiffeid"
	"aether/sniff"
	"aether/tproxy/socket"
)

const (
	connectLimit = 5 * time.Second // to the application (contract 6.5)
	firstLimit   = 15 * time.Second
)

// Config of the inbound side. All fields are required but those that say what nil is.
type Config struct {
	Store    *snapshot.Store
	Acceptor *meshhop.Acceptor
	Journal  journal.Observer
	Authz    *extauthz.Service // nil: nobody can be asked, and what a filter wants asked is refused
	// Ready: the pod's application answers its probe (contract 4.11). It must not wait. nil: nobody probes, and all do.
	Ready func(container string) bool
	Relay relay.Options // of raw-TCP ports
	Log   *slog.Logger  // nil: discard
}

// Inbound serves the pods that are added to it.
type Inbound struct {
	cfg   Config
	log   *slog.Logger
	quiet *telemetry.LogLimiter
	loops engine.PerLoop[loopState]
	bonds meshhop.Bonds

	// Relays are the connections that goroutines carry.
	Relays engine.Relays
	// Audits counts what filters in mode AUDIT make of requests.
	Audits telemetry.Audits
}

// New makes an Inbound.
func New(cfg Config) *Inbound {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	in := &Inbound{cfg: cfg, log: cfg.Log, quiet: telemetry.NewLogLimiter(cfg.Log, time.Minute, nil)}
	if cfg.Acceptor != nil {
		in.bonds.Now = cfg.Acceptor.Now
	}
	in.loops.Make = func(l *engine.Loop) *loopState {
		st := &loopState{l: l, lobbies: map[*Pod]*lobby{}, audits: in.Audits.Shard()}
		st.pool.Service = in
		return st
	}
	return in
}

// Pod is a workload that is delivered to. Its fields are not changed once it is used.
type Pod struct {
	Context   context.Context // ends with the pod, and its relays with it
	Engine    *engine.Pod
	Container string
	Namespace string
	Name      string
	Account   string
	ID        spiffeid.ID
	Local     *meshhop.Local
	Sockets   engine.Sockets
}

// loopState is what the inbound side keeps on one loop.
type loopState struct {
	l       *engine.Loop
	lobbies map[*Pod]*lobby // of pods whose callers have not sent a ClientHello yet
	pool    exchange.Pool
	audits  telemetry.AuditShard
	end     journal.Entry // scratch: observers copy what they keep
}

// conn is one connection of a caller.
type conn struct {
	info  engine.ConnInfo
	in    *Inbound
	pod   *Pod
	st    *loopState
	flow  model.Flow
	v     decide.Verdict
	snap  *snapshot.Snapshot // of the verdict
	xfcc  []byte
	start int64
	// Addresses of the connection.
	from, to netip.AddrPort
}

// reqState is one request's; it stays with its exchange object.
type reqState struct {
	v       decide.Verdict
	version uint64
	outcome []byte         // scratch
	cause   string         // journal.Entry's
	asked   *extauthz.Call // what the authorization service is asked, or was; nil: nothing
}

// Accept takes connections of a pod's mesh port.
func (in *Inbound) Accept(p *Pod) engine.Accept {
	return func(l *engine.Loop, fd int) { in.await(l, p, fd) }
}

// shake serves a connection whose ClientHello is there, away from the loop.
func (in *Inbound) shake(l *engine.Loop, p *Pod, fd int, start int64) {
	p.Engine.CountFDs(1)
	l.Go(func() {
		defer p.Engine.CountFDs(-1)
		c, err := socket.MakeConn(fd)
		if err != nil {
			in.quiet.Warn("take "+p.Container, "cannot take an inbound connection", "pod", p.Container, "err", err)
			return
		}
		in.serve(l, p, c, start)
	})
}

// serve shakes hands and hands the connection on; it runs in its own goroutine.
func (in *Inbound) serve(l *engine.Loop, p *Pod, tc *net.TCPConn, start int64) {
	c := in.newConn(p, start)
	h, err := in.cfg.Acceptor.Accept(p.Context, p.Local, tc)
	if err != nil {
		from := "unknown" // whoever has gone before we looked has no address any more
		if a := tc.RemoteAddr(); a != nil {
			from, _, _ = net.SplitHostPort(a.String())
		}
		c.declined(from, err)
		return
	}
	c.met(h)
	if h.ALPN == mtls.RenewALPN {
		_ = h.Confirm() // a caller that does not hear of it comes again
		return
	}
	c.from, c.to = addressOf(tc.RemoteAddr()), addressOf(tc.LocalAddr())
	if !c.admit(h.Port, h.Caller, h.XFCC) {
		_ = tc.SetLinger(0)
		tc.Close()
		c.record(0, 0, "proxy", "")
		return
	}
	rec := h.Record()
	if c.v.Deliver.Class == model.TCP {
		in.relay(l, c, h, rec)
		return
	}
	h2 := h.ALPN == "h2"
	var first []byte
	if !h2 { // codec by the first bytes, as an Envoy-based peer does (contract 6.1)
		if first, h2, err = peek(tc, rec); err != nil {
			tc.Close()
			c.record(0, 0, "client", "no-request")
			return
		}
	}
	fd, err := socket.TakeFD(tc)
	if err != nil {
		in.log.Error("cannot take an inbound connection", "pod", p.Container, "err", err)
		return
	}
	home := p.Engine.Home()
	serve := home.ServeHTTP1
	if h2 {
		serve = home.ServeHTTP2
	}
	c.serves(home, h2)
	held := c.hold(h, c.info.Sever)
	c.info.Bond = held
	err = home.Post(func() {
		if err := serve(fd, rec, &c.info, first); err != nil {
			in.log.Error("cannot serve an inbound connection", "pod", p.Container, "err", err)
			unix.Close(fd)
			held.Release()
		}
	})
	if err != nil {
		unix.Close(fd)
		held.Release()
	}
}

// newConn is a connection of which nothing is known yet.
func (in *Inbound) newConn(p *Pod, start int64) *conn {
	c := &conn{in: in, pod: p, start: start, snap: in.cfg.Store.Load()}
	c.flow = model.Flow{Namespace: p.Namespace, Workload: p.Account, Container: p.Container, Dir: model.Inbound}
	return c
}

// declined tells of a caller who was not verified.
func (c *conn) declined(from string, err error) {
	kind, pod := meshhop.ReasonOf(err), c.pod.Container
	c.in.quiet.Warn(string(kind)+" "+pod+" "+from, "inbound hop refused", "pod", pod, "from", from, "reason", string(kind), "err", err)
	c.v = decide.Verdict{Action: decide.Refuse, Reason: decide.NoVerdict}
	c.record(0, 0, "client", string(kind))
}

// admit takes what was verified of the caller, and decides; false: nothing is delivered for him.
func (c *conn) admit(port uint16, caller spiffeid.ID, xfcc string) bool {
	c.flow.Dst = model.OrigDst{AddrPort: netip.AddrPortFrom(netip.IPv4Unspecified(), port)}
	c.flow.Peer = caller.String()
	c.xfcc = []byte(xfcc)
	c.v = decide.Decide(c.snap, &c.flow, 0, nil)
	return c.v.Action == decide.Deliver
}

// serves makes it a connection that l serves.
func (c *conn) serves(l *engine.Loop, h2 bool) {
	c.st = c.in.loops.Get(l)
	c.info = engine.ConnInfo{Pod: c.pod.Engine, Loop: l, Pool: &c.st.pool, User: c, OnRefused: refused}
	c.flow.Sniff = model.SniffHTTP11
	if h2 {
		c.flow.Sniff = model.SniffH2C
	}
}

// peek reads the first plaintext and tells whether it is the HTTP/2 preface.
func peek(tc net.Conn, rec record.Conn) (first []byte, h2 bool, err error) {
	_ = tc.SetReadDeadline(time.Now().Add(firstLimit))
	defer tc.SetReadDeadline(time.Time{})
	buf := make([]byte, 16<<10)
	plain := make([]byte, 0, 4<<10)
	for len(plain) < 4 {
		n, err := rec.Read(plain[len(plain):cap(plain)])
		plain = plain[:len(plain)+n]
		if err == nil {
			continue
		}
		if !errors.Is(err, record.ErrMore) {
			return nil, false, err
		}
		n, err = tc.Read(buf)
		if n == 0 {
			if err == nil {
				err = io.ErrUnexpectedEOF
			}
			return nil, false, err
		}
		rec.Feed(buf[:n])
	}
	rec.Feed(nil) // buf is ours: what was not read must not lie in it
	return plain, string(plain[:4]) == sniff.Preface[:4], nil
}

// relay delivers a raw-TCP port.
func (in *Inbound) relay(l *engine.Loop, c *conn, h *meshhop.Inbound, rec record.Conn) {
	p, tc := c.pod, h.Conn
	if p.Engine.HoldsTooMuch() {
		_ = tc.SetLinger(0)
		tc.Close()
		c.record(0, 0, "proxy", causeOverload)
		return
	}
	ctx, cancel := context.WithTimeout(p.Context, connectLimit)
	app, err := c.connect(ctx)
	cancel()
	if err != nil {
		c.odd(err)
		_ = tc.SetLinger(0)
		tc.Close()
		c.record(0, 0, "server", engine.ConnectCause(err))
		return
	}
	// In a goroutine of its own: this one has grown a stack of many kilobytes for the
	// handshake, which an idle relay would keep.
	p.Engine.CountFDs(2)
	l.Go(func() {
		defer p.Engine.CountFDs(-2)
		defer in.Relays.Add(c.state(tc))()
		life, over := c.holdRelay(h)
		defer over()
		o := in.cfg.Relay
		o.Memory = p.Engine
		r := relay.TLS(life, app, tc, rec, nil, o)
		ended := "proxy"
		switch r.First {
		case relay.A:
			ended = "server"
		case relay.B:
			ended = "client"
		}
		cause := r.Cause()
		if r.End == relay.Cancelled && p.Context.Err() == nil {
			cause = revokedCause(context.Cause(life))
		}
		c.record(r.BtoA, r.AtoB, ended, cause)
	})
}

// connect connects to the application, for a raw-TCP port.
func (c *conn) connect(ctx context.Context) (relay.Conn, error) {
	if s := c.v.Deliver.Socket; s != nil {
		app, err := socket.DialUnix(ctx, unixOf(s))
		if err != nil {
			return nil, err
		}
		return app, nil
	}
	app, err := c.pod.Sockets.Connect(ctx, appAddr(c.v.Deliver.Port))
	if err != nil {
		return nil, err
	}
	return app, nil
}

func unixOf(s *model.Socket) socket.Unix { return socket.Unix{Dir: s.Dir, Sub: s.Pod, File: s.File} }

// odd tells of what stands at the place of a pod's Unix socket and is none: that is no
// application that is not there yet.
func (c *conn) odd(err error) {
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTSOCK) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EPROTOTYPE) {
		c.in.quiet.Warn("socket "+c.pod.Container, "what stands at the place of a pod's Unix socket is not connected to: it is a link, or no stream socket", "pod", c.pod.Namespace+"/"+c.pod.Name, "err", err)
	}
}

func appAddr(port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)
}

const causeGone = "pod-gone"

const textNotReady = "the application does not answer its probe, or has not yet: see endpoint.aether.io/port and health-path of the pod\n"

const causeNoTunnel = "upgrade-not-supported"

var (
	hdrXFCC    = []byte("x-forwarded-client-cert")
	hdrOutcome = []byte("x-aether-outcome")
	textPlain  = []byte("text/plain; charset=utf-8")
)

// Request is exchange.Service.
func (in *Inbound) Request(x *exchange.Exchange) {
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	c.info.Loop.Gauges.Inbound.Add(1)
	rq, _ := x.User.(*reqState)
	if rq == nil {
		rq = &reqState{}
		x.User = rq
	}
	*rq = reqState{outcome: rq.outcome[:0]}
	snap := in.cfg.Store.Load()
	rq.version = snap.Version()
	rq.v = decide.Route(snap, &c.flow, &x.Req, 0, nil)
	if rq.v.Reason == decide.Ready && rq.v.Status == 200 && in.cfg.Ready != nil && !in.cfg.Ready(c.pod.Container) {
		rq.v.Status, rq.v.Text = 503, textNotReady // no snapshot knows of it: it changes with each probe
	}
	switch rq.v.Action {
	case decide.Deliver:
		if in.overloaded(x, c, rq) {
			return
		}
		x.Req.DelProxyOnly() // a caller's own
		x.Req.Add(hdrXFCC, c.xfcc)
		if rq.v.Pipe != nil && rq.v.Pipe.Authz != nil {
			in.ask(x, c, rq, snap)
			return
		}
		in.deliver(x, c, rq)
	case decide.Reply, decide.Refuse:
		if rq.v.Reason == decide.UnknownSNI && snap.Workload(c.pod.Container) == nil {
			// It leaves while its callers have not heard of it: they may try another (contract 5.7).
			rq.cause = causeGone
			in.reply(x, rq, 503, "the pod leaves this node\n", "0", "UF", "upstream_connection_failure")
			return
		}
		in.reply(x, rq, rq.v.Status, rq.v.Text, strconv.Itoa(rq.v.Status), "-", rq.v.Reason.String())
	default:
		in.reply(x, rq, 500, "the proxy has no answer for this request\n", "500", "-", "no-verdict")
	}
}

func (in *Inbound) deliver(x *exchange.Exchange, c *conn, rq *reqState) {
	h2 := rq.v.Deliver.App == model.AppH2C
	if s := rq.v.Deliver.Socket; s != nil {
		c.info.Loop.SendUnix(x, c.pod.Engine, unixOf(s), h2)
		return
	}
	c.info.Loop.Send(x, c.pod.Engine, c.pod.Sockets, appAddr(rq.v.Deliver.Port), h2, nil)
}

// reply answers locally, with the outcome that the source judges retries by (contract 5.7).
func (in *Inbound) reply(x *exchange.Exchange, rq *reqState, status int, text, code, flags, details string) {
	var h httpmsg.Head
	var fields [6]httpmsg.Field // and content-length and date, which others add
	h.Fields = fields[:0]
	h.Status = status
	rq.outcome = append(append(append(append(append(rq.outcome[:0], code...), ';'), flags...), ';'), x.Req.Method...)
	rq.outcome = append(append(rq.outcome, ';'), details...)
	h.Add(hdrOutcome, rq.outcome)
	if ct, _ := x.Req.Get("content-type"); httpmsg.IsGRPC(ct) { // contract 5.7: it leaves as HTTP 200
		grpcReply(&h, status, text)
		x.LoggedStatus = status
		x.Reply(&h, nil)
		return
	}
	if text != "" {
		h.Add([]byte("content-type"), textPlain)
	}
	x.Reply(&h, []byte(text))
}

// Response is exchange.Service: every answer carries the outcome, an
// application's own field of that name does not get out.
func (in *Inbound) Response(x *exchange.Exchange, h *httpmsg.Head) {
	rq := x.User.(*reqState)
	o := strconv.AppendInt(rq.outcome[:0], int64(h.Status), 10)
	o = append(append(append(o, ";-;"...), x.Req.Method...), ";via_upstream"...)
	rq.outcome = o
	h.DelProxyOnly() // an application's own
	h.Set(hdrOutcome, o)
	rq.asked.Edit(h)
}

// Failed is exchange.Service.
func (in *Inbound) Failed(x *exchange.Exchange, code exchange.Code) {
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	rq := x.User.(*reqState)
	if rq.v.Action != decide.Deliver {
		return
	}
	if x.Attempts < 3 && x.Resendable(code) {
		x.Cause = nil
		in.deliver(x, c, rq) // the kept connection had been closed by the application
		return
	}
	if errors.Is(x.Cause, engine.ErrNoTunnel) {
		rq.cause = causeNoTunnel
		in.reply(x, rq, 501, causeNoTunnel+": the application on port "+strconv.Itoa(int(rq.v.Deliver.Port))+" speaks HTTP/2 and does not announce extended CONNECT (RFC 8441), which an upgrade needs; send the request without Upgrade\n", "0", "-", causeNoTunnel)
		return
	}
	if code == exchange.Connect {
		c.odd(x.Cause)
	}
	f := failureOf(code, x.Cause, &rq.v)
	rq.cause = code.String()
	if short := engine.Shortage(x.Cause); code == exchange.Connect && short != "" {
		rq.cause, f.text = short, short+textShortage
	}
	in.reply(x, rq, f.status, f.text, "0", f.flags, f.details)
}

// Done is exchange.Service.
func (in *Inbound) Done(x *exchange.Exchange) {
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	rq := x.User.(*reqState)
	c.info.Loop.Gauges.Inbound.Add(-1)
	rq.asked.Cancel()
	rq.asked = nil
	v := &rq.v
	if v.Reason == decide.Live || v.Reason == decide.Ready {
		return // never access-logged (contract 4.11)
	}
	e := &c.st.end
	*e = journal.Entry{}
	c.entry(e, v)
	e.Took = time.Duration(c.info.Loop.Now() - x.Start)
	e.Request = true
	e.Loop = c.info.Loop.ID() + 1
	e.Host.Set(x.Req.Authority)
	e.Method.Set(x.Req.Method)
	e.Path.Set(x.Req.Path)
	e.Status = x.Status
	e.BytesIn, e.BytesOut = x.ReqBytes, x.ResBytes
	e.Attempts = x.Attempts
	e.Local, e.Ended = x.Local(), x.Ended.String()
	if x.Ended != exchange.Nobody {
		e.Code = x.Code.String()
	}
	for f, denied := range v.Audited.All() {
		c.st.audits.Count(f.Name, denied)
	}
	e.AuditFilter, e.AuditPolicy = v.Audited.Names()
	e.Cause, e.Fault = rq.cause, engine.FaultOf(x.Cause)
	if e.Cause == "" && x.Ended == exchange.Server { // amid its answer
		e.Cause = e.Code
	}
	e.Outcome.Set(rq.outcome)
	e.Version = rq.version
	if e.Classify(); e.Failed() {
		id, _ := x.Req.Get("x-request-id")
		e.RequestID.Set(id)
	}
	in.cfg.Journal.Ended(e)
}

// refused is engine.ConnInfo.OnRefused: what a caller sent could not be read as a request.
func refused(info *engine.ConnInfo, status int, why error) {
	c := info.User.(*conn)
	e := &c.st.end
	*e = journal.Entry{}
	c.entry(e, &decide.Verdict{Action: decide.Refuse, Reason: decide.NoVerdict})
	e.Request, e.Local, e.Status, e.Ended = true, true, status, "complete"
	e.Loop = info.Loop.ID() + 1
	e.Cause, e.Fault = engine.RefusedCause(status), engine.FaultOf(why)
	e.Version = c.snap.Version()
	e.Classify()
	c.in.cfg.Journal.Ended(e)
}

func (c *conn) entry(e *journal.Entry, v *decide.Verdict) {
	e.At = time.Now()
	e.Dir, e.Namespace, e.Workload = model.Inbound, c.flow.Namespace, c.flow.Workload
	e.Pod, e.Container = c.pod.Name, c.pod.Container
	e.Dst, e.Sniff, e.Peer = c.flow.Dst.AddrPort, c.flow.Sniff, c.flow.Peer
	e.Action, e.Reason, e.Rule = v.Action.String(), v.Reason.String(), v.Rule
	if v.Deliver.Socket != nil {
		e.Socket = v.Deliver.Socket.Name
	}
}

// record tells the journal of a connection that carried no request.
func (c *conn) record(in, out int64, ended, cause string) {
	var e journal.Entry
	c.entry(&e, &c.v)
	e.Took = time.Duration(reactor.Monotonic() - c.start)
	e.BytesIn, e.BytesOut, e.Ended = in, out, ended
	e.Cause = cause
	e.Version = c.snap.Version()
	e.Classify()
	c.in.cfg.Journal.Ended(&e)
}
