// Package outbound carries what a pod sends: captured connections and the
// proxy port. It asks decide what each one is, serves HTTP request by request
// over the hop, and hands everything else to a relay.
//
//   - Identity and namespace come from the listener's pod; nothing on the wire is believed.
//   - No certificate of the pod's own, no hop: 503, and nothing is dialled.
//   - What passes through is decided once a connection, and leaves from the pod's namespace.
//   - One journal entry at the end of each request and of each connection that carried none.
//
// It knows no listener, no registry and no TLS: those are given to it.
package outbound

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/balance"
	"aether/dataplane/decide"
	"aether/dataplane/detect"
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
	"aether/mtls/spiffeid"
	"aether/tproxy/socket"
)

// Config of the outbound side. All fields are required but those that say what nil is.
type Config struct {
	Store   *snapshot.Store
	Dialer  *meshhop.Dialer
	Journal journal.Observer
	Authz   *extauthz.Service // nil: nobody can be asked, and what a filter wants asked is refused
	Relay   relay.Options     // of raw TCP and of what is passed through
	Log     *slog.Logger      // nil: discard

	// Want asks for the rows of a service that a request, or a connection, waits for (contract
	// 4.6); RetryWaiting is called when there are new rows. Called on loops: it must not block. nil: rows
	// cannot be asked for, and nobody waits for any.
	Want func(model.ServiceName)

	// LocalDestination is the destination's side of a pod of this node, by container; nil: it is not
	// served here, and the hop is taken. Any goroutine. nil: none ever is.
	LocalDestination func(container string) LocalDestination
}

// LocalDestination is a pod of this process as a destination.
type LocalDestination interface {
	// Engine is the pod's; Local what it would shake hands as.
	Engine() *engine.Pod
	Local() *meshhop.Local
	// Admit takes a source that has been verified, as an accepted hop would be taken;
	// its requests are served on l. nil: the destination refuses it. Any goroutine.
	Admit(l *engine.Loop, m *meshhop.LocalPeer) *engine.ConnInfo
	// Declined tells of a source that was not who it has to be. Any goroutine.
	Declined(err error)
}

// Outbound serves the pods that are added to it.
type Outbound struct {
	cfg   Config
	log   *slog.Logger
	quiet *telemetry.LogLimiter
	loops engine.PerLoop[loopState]
	now   func() time.Time // the wall clock
	bonds meshhop.Bonds

	sweep sync.Mutex
	swept *snapshot.Snapshot // of the last OnSnapshot

	// Relays are the connections that goroutines carry.
	Relays engine.Relays

	// Audits counts what filters in mode AUDIT make of requests.
	Audits telemetry.Audits

	Retries         telemetry.Counter // requests sent once more
	RetriesOverflow telemetry.Counter // and those that were not, because too many others were

	// Mirrored counts copies of requests by how they ended, in the order of MirrorResults.
	Mirrored [mirrorResults]telemetry.Counter

	// Cold counts requests and connections that waited for rows by how that ended, in the order of ColdResults.
	Cold [coldResults]telemetry.Counter

	waiting atomic.Int64 // for rows
}

// New makes an Outbound.
func New(cfg Config) *Outbound {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	o := &Outbound{cfg: cfg, log: cfg.Log, quiet: telemetry.NewLogLimiter(cfg.Log, time.Minute, nil), now: time.Now}
	if cfg.Dialer != nil {
		o.bonds.Now = cfg.Dialer.Now
	}
	o.loops.Make = func(l *engine.Loop) *loopState {
		st := &loopState{o: o, l: l, hops: map[hopKey]*hopState{}, pods: map[*Pod]*upstreams{}, waiting: map[waiter]struct{}{}, audits: o.Audits.Shard(), rnd: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))}
		st.pool.Service = o
		return st
	}
	return o
}

// Pod is a workload whose egress is served. It is neither copied nor changed from outside once it is used.
type Pod struct {
	Context   context.Context // ends with the pod, and its relays with it
	Engine    *engine.Pod
	Container string
	Namespace string
	Name      string
	Account   string
	ID        spiffeid.ID
	Sockets   engine.Sockets

	waiting atomic.Int64 // requests and connections of it that wait for rows
}

// loopState is what the outbound side keeps on one loop.
type loopState struct {
	o         *Outbound
	l         *engine.Loop
	pool      exchange.Pool
	hops      map[hopKey]*hopState
	pods      map[*Pod]*upstreams
	rnd       *rand.Rand
	detectors detect.Pool[opening]
	mirrored  exchange.Pool // of mirrors
	audits    telemetry.AuditShard
	mirrors   int           // under way
	end       journal.Entry // scratch: observers copy what they keep

	waiting map[waiter]struct{} // what waits for rows

	lastPod *Pod // whose upstreams last is; nil: none
	last    *upstreams
	sweep   reactor.Timer
}

// waiter is a request or a connection that waits for rows.
type waiter interface {
	reconsider(snap *snapshot.Snapshot) // decides about it in the world as it is now
}

// conn is one downstream connection.
type conn struct {
	info           engine.ConnInfo
	o              *Outbound
	pod            *Pod
	st             *loopState
	flow           model.Flow
	start          int64
	requests       int
	lastWaitFailed int64 // when a wait for the rows of what was dialled ended without them; 0: none did
	passed         bool  // a request of it went to the dialled address: that connection is closed with it
	passH2         bool
}

// reqState is one request's; it stays with its exchange object.
type reqState struct {
	v        decide.Verdict
	snap     *snapshot.Snapshot
	try      attempt // where the request is, if anywhere
	next     choice  // where it goes next
	endpoint *snapshot.Endpoint
	tried    [3]netip.AddrPort // the last ones
	attempt  int
	cause    string // journal.Entry's
	outcome  journal.Text
	reqID    [36]byte
	mirrors  *mirror        // copies of it, if any
	copyOf   *mirror        // of a copy: which it is
	session  session        // where the client's session is (persist.go)
	asked    *extauthz.Call // what the authorization service is asked, or was; nil: nothing

	// Retries and limits of time (retry.go). The timers are stopped by Done.
	x                   *exchange.Exchange // while it is served
	retries             int
	retrying            *balance.Dest // among whose retries it is counted; nil: none
	whole, tryEnd, wait reactor.Timer

	// A wait for rows (await.go).
	cold  bool            // it waits
	again decided         // what is called when it does not wait any more
	draw  uint32          // what decides by chance have gone by: the next verdict goes by it too
	sent  []httpmsg.Field // what clean took out

	// What was asked, before a rule changed it.
	host, path, origin []byte
	grpc               bool
	deadline           bool // whole is for the call's own limit of time, not the rule's
	// scratch is what a rule's changes are written to; it stays with the object.
	scratch []byte
}

// decided does with a request what its verdict, which is new, asks for. sent are the fields that clean took out.
type decided func(o *Outbound, x *exchange.Exchange, c *conn, rq *reqState, sent []httpmsg.Field)

// keepScratch bounds the scratch that is kept from one request to the next.
const keepScratch = 16 << 10

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

// Request is exchange.Service.
func (o *Outbound) Request(x *exchange.Exchange) {
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	c.requests++
	c.st.l.Gauges.Outbound.Add(1)
	rq, _ := x.User.(*reqState)
	if rq == nil {
		rq = &reqState{}
		x.User = rq
	}
	if cap(rq.scratch) > keepScratch {
		rq.scratch = nil
	}
	*rq = reqState{scratch: rq.scratch[:0]}
	snap := o.cfg.Store.Load()
	rq.snap = snap
	h := &x.Req
	ct, _ := h.Get("content-type")
	rq.grpc = httpmsg.IsGRPC(ct)
	sent := clean(h) // before rules see it: what only a proxy may say matches nothing, either
	rq.draw = c.st.rnd.Uint32()
	rq.v = decide.Route(snap, &c.flow, h, rq.draw, nil)
	o.decided(x, c, rq, sent)
}

// decided does with the request what its verdict, which is new, asks for.
func (o *Outbound) decided(x *exchange.Exchange, c *conn, rq *reqState, sent []httpmsg.Field) {
	h := &x.Req
	if m := rq.v.Matched; m != nil && m.Persistence != nil {
		o.resumeSession(c, rq, h)
	}
	rq.host, rq.path, rq.origin = h.Authority, h.Path, rq.v.Origin(h)
	if (rq.v.Action == decide.Forward || rq.v.Action == decide.Passthrough || rq.v.Action == decide.Await) && o.overloaded(x, c, rq) {
		return
	}
	if rq.v.Pipe != nil && rq.v.Pipe.Authz != nil { // before anything is answered, too (contract 10.7)
		o.ask(x, c, rq)
		return
	}
	o.act(x, c, rq, sent)
}

// act does what the verdict says. sent are the fields that clean took out.
func (o *Outbound) act(x *exchange.Exchange, c *conn, rq *reqState, sent []httpmsg.Field) {
	h := &x.Req
	switch rq.v.Action {
	case decide.Forward:
		o.requestID(x, rq)
		forwardedProto(h)
		rq.scratch = rq.v.ApplyRequest(h, rq.scratch)
		o.start(x, c, rq)
		if rq.v.Pipe != nil && len(rq.v.Pipe.Mirrors) > 0 {
			o.mirror(x, c, rq)
		}
		rq.renew(o.cfg.Store.Load()) // somebody may have been asked meanwhile
		rq.tries(c.st.l)
		o.send(x, c, rq, c.st.pick(c.pod, rq))
	case decide.Passthrough:
		// Not the mesh's: it goes where it was dialled, in the client's own version.
		if dst := c.flow.Dst; rq.snap.Address(dst.Addr()) != nil || rq.snap.HTTPEndpoint(dst.Addr(), dst.Port()) != nil {
			h.DelMesh() // behind it is a pod of the mesh, which believes its own proxy (decision 044)
		} else if sent != nil {
			h.Fields = sent
		}
		c.passed = true
		c.passH2 = c.flow.Sniff == model.SniffH2C
		c.st.l.Send(x, c.pod.Engine, c.pod.Sockets, c.flow.Dst.AddrPort, c.passH2, &c.info)
	case decide.Reply:
		switch rq.v.Reason {
		case decide.Redirect:
			o.redirect(x, c, rq)
		case decide.CORSPreflight:
			var out httpmsg.Head
			var fields [8]httpmsg.Field
			out.Fields, out.Status = fields[:0], rq.v.Status
			rq.v.AppendPreflight(&out, h)
			rq.asked.Edit(&out)
			x.Reply(&out, nil)
		default:
			o.reply(x, rq.v.Status, rq.v.Reason.Header(), rq.v.Text, httpmsg.GRPCStatus(rq.v.Status))
		}
	case decide.Refuse:
		o.reply(x, rq.v.Status, rq.v.Reason.Header(), rq.v.Text, httpmsg.GRPCStatus(rq.v.Status))
	case decide.Await:
		o.awaitRows(x, c, rq, sent, (*Outbound).decided)
	default:
		o.reply(x, 500, "", "the proxy has no answer for this request (reason "+rq.v.Reason.String()+")\n", 13)
	}
}

const causeNoTunnel = "upgrade-not-supported"

// redirect answers with a Location, and with what the rule does to its answers.
func (o *Outbound) redirect(x *exchange.Exchange, c *conn, rq *reqState) {
	var h httpmsg.Head
	var fields [8]httpmsg.Field
	h.Fields, h.Status = fields[:0], rq.v.Status
	rq.scratch = rq.v.Location(rq.scratch, &c.flow, &x.Req)
	h.Add(hdrLocation, rq.scratch)
	h.Add(hdrContentType, textPlain)
	rq.v.ApplyResponse(&h, rq.origin)
	rq.asked.Edit(&h)
	x.Reply(&h, []byte(rq.v.Text))
}

var (
	hdrError       = []byte("x-aether-error")
	hdrProto       = []byte("x-forwarded-proto")
	hdrRequestID   = []byte("x-request-id")
	hdrContentType = []byte("content-type")
	hdrLocation    = []byte("location")
	hdrGRPCStatus  = []byte("grpc-status")
	hdrGRPCMessage = []byte("grpc-message")
	textPlain      = []byte("text/plain; charset=utf-8")
	appGRPC        = []byte(httpmsg.GRPC)
)

// clean removes what only a proxy may say (contract 5.7, 5.9). sent are the fields as
// they were; nil: nothing was removed.
func clean(h *httpmsg.Head) (sent []httpmsg.Field) {
	if !h.HasProxyOnly() {
		return nil
	}
	sent = slices.Clone(h.Fields)
	h.DelProxyOnly()
	return sent
}

const hexDigits = "0123456789abcdef"

// requestID gives the request an id unless the client sent one (contract 5.9).
func (o *Outbound) requestID(x *exchange.Exchange, rq *reqState) {
	if _, ok := x.Req.Get("x-request-id"); ok {
		return
	}
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	var u [16]byte
	a, b := c.st.rnd.Uint64(), c.st.rnd.Uint64()
	for i := range 8 {
		u[i], u[8+i] = byte(a>>(8*i)), byte(b>>(8*i))
	}
	u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80 // version 4, RFC 9562
	j := 0
	for i, v := range u {
		if i == 4 || i == 6 || i == 8 || i == 10 {
			rq.reqID[j] = '-'
			j++
		}
		rq.reqID[j], rq.reqID[j+1] = hexDigits[v>>4], hexDigits[v&15]
		j += 2
	}
	x.Req.Add(hdrRequestID, rq.reqID[:])
}

// fail answers 503 with a reason for people; its kind goes to the journal.
func (o *Outbound) fail(x *exchange.Exchange, rq *reqState, kind, text string) {
	rq.cause = kind
	o.reply(x, 503, "", text+"\n", 14)
}

// noTunnel refuses an upgrade that cannot be carried. Without its Upgrade it would be another
// request than the client made.
func (o *Outbound) noTunnel(x *exchange.Exchange, rq *reqState, who string) {
	rq.cause = causeNoTunnel
	o.reply(x, 501, "", causeNoTunnel+": "+who+" takes no upgrades over HTTP/2 (extended CONNECT, RFC 8441); send the request without Upgrade, or to a destination that does\n", 12)
}

// reply answers locally; grpc is the grpc-status for a gRPC request (docs/engine.md, "gRPC").
func (o *Outbound) reply(x *exchange.Exchange, status int, reason, text string, grpc int) {
	rq, _ := x.User.(*reqState)
	if rq != nil {
		rq.stopRetries(x)
	}
	var h httpmsg.Head
	var fields [8]httpmsg.Field
	h.Fields = fields[:0]
	h.Status = status
	if reason != "" {
		h.Add(hdrError, []byte(reason))
	}
	if rq != nil {
		rq.v.MarkAnswer(&h, rq.origin)
	}
	if rq != nil && rq.grpc { // as it was asked, whatever a rule made of the head
		h.Status = 200
		h.Add(hdrContentType, appGRPC)
		h.Add(hdrGRPCStatus, strconv.AppendInt(nil, int64(grpc), 10))
		h.Add(hdrGRPCMessage, httpmsg.GRPCMessage(text))
		x.LoggedStatus = status
		x.Reply(&h, nil)
		return
	}
	if text != "" {
		h.Add(hdrContentType, textPlain)
	}
	x.Reply(&h, []byte(text))
}

// Response is exchange.Service.
func (o *Outbound) Response(x *exchange.Exchange, h *httpmsg.Head) {
	rq := x.User.(*reqState)
	if rq.v.Action != decide.Forward {
		return
	}
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	c.st.answered(x, rq, h)
	v, ok := h.Get("x-aether-outcome")
	rq.outcome.Set(v)
	if o.retryOnResponse(x, c, rq, h, v) {
		return
	}
	if ok {
		if m := loggedStatus(v); m != 0 && rq.grpc && h.Status == 200 {
			x.Status = m
		}
		h.Del("x-aether-outcome")
	}
	rq.accepted(x, c, h)
	rq.v.ApplyResponse(h, rq.origin)
	rq.asked.Edit(h)
	if m := rq.v.Matched; m != nil && m.Persistence != nil {
		o.setSessionToken(rq, h)
	}
}

// Failed is exchange.Service.
func (o *Outbound) Failed(x *exchange.Exchange, code exchange.Code) {
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	rq := x.User.(*reqState)
	if rq.v.Action == decide.Passthrough {
		if x.Attempts < 2 && x.Resendable(code) {
			x.Cause = nil
			c.st.l.Send(x, c.pod.Engine, c.pod.Sockets, c.flow.Dst.AddrPort, c.passH2, &c.info)
			return
		}
		if errors.Is(x.Cause, engine.ErrNoTunnel) {
			o.noTunnel(x, rq, "the server at the dialled address")
			return
		}
		rq.cause = cmp.Or(engine.Shortage(x.Cause), code.String())
		o.reply(x, 503, "", "the dialled address did not answer ("+rq.cause+")"+because(x.Cause)+"\n", 14)
		return
	}
	c.st.failed(x, rq, code)
	if o.retryOnFailure(x, c, rq, code) {
		return
	}
	if errors.Is(x.Cause, engine.ErrNoTunnel) {
		o.noTunnel(x, rq, "the proxy in front of "+rq.v.Backend.Name)
		return
	}
	kind := code.String()
	text := "the destination did not answer (" + kind + ")" + because(x.Cause)
	switch {
	case x.Cause == nil:
	case !x.Reached(), meshhop.ReasonOf(x.Cause) == meshhop.ReasonRemote: // the handshake's end, as TLS 1.3 tells it: after the first request
		kind = why(x.Cause)
		text = "no connection to " + rq.v.Backend.Name + " (" + kind + ")"
	case code == exchange.Closed, code == exchange.Unsent: // what ended a session that was there is no reason why there was none
		kind = cut(x.Cause)
		text = "the connection ended before an answer (" + kind + ")"
	}
	if code == exchange.Timeout {
		rq.cause = kind
		o.reply(x, 504, "", text+"\n", 14)
		return
	}
	o.fail(x, rq, kind, text)
}

// because is what was wrong with an answer that could not be read, to be appended to a text; "": it was not that.
func because(cause error) string {
	if f := engine.FaultOf(cause); f != "" {
		return ": " + f
	}
	return ""
}

// Done is exchange.Service.
func (o *Outbound) Done(x *exchange.Exchange) {
	c := x.Conn.(*engine.ConnInfo).User.(*conn)
	rq := x.User.(*reqState)
	c.st.leave(x, rq)
	if rq.cold { // its client went first
		c.st.resumeWaiting(rq, coldGone)
	}
	c.st.l.Gauges.Outbound.Add(-1)
	rq.stop(c.st)
	rq.asked.Cancel()
	rq.asked = nil
	rq.mirrors.orphaned()
	rq.mirrors = nil
	v := &rq.v
	if v.Action == 0 {
		return // never asked: the connection went first
	}
	if v.Reason == decide.Readyz {
		return // never counted and never logged (contract 4.11, 14.1)
	}
	e := &c.st.end
	*e = journal.Entry{}
	now := c.st.l.Now()
	e.At = time.Now()
	e.Took = time.Duration(now - x.Start)
	e.Request = true
	e.Loop = c.st.l.ID() + 1
	c.entry(e)
	e.Host.Set(rq.host)
	e.Method.Set(x.Req.Method)
	e.Path.Set(rq.path)
	e.Action, e.Reason, e.Rule = v.Action.String(), v.Reason.String(), v.Rule
	for f, denied := range v.Audited.All() {
		c.st.audits.Count(f.Name, denied)
	}
	e.AuditFilter, e.AuditPolicy = v.Audited.Names()
	if v.Backend != nil {
		e.Backend = v.Backend.Name
	}
	if rq.endpoint != nil {
		e.Endpoint = rq.endpoint.Addr
		e.Peer = rq.endpoint.SPIFFEID
	}
	e.Status = x.Status
	e.BytesIn, e.BytesOut = x.ReqBytes, x.ResBytes
	e.Attempts = x.Attempts
	e.Exhausted = rq.retries > 0 && rq.retries >= rq.limit()
	e.Local, e.Ended = x.Local, x.Ended.String()
	if x.Ended != exchange.Nobody {
		e.Code = x.Code.String()
	}
	e.Cause, e.Fault, e.Outcome = rq.cause, engine.FaultOf(x.Cause), rq.outcome
	if e.Cause == "" && x.Ended == exchange.Server { // amid its answer
		e.Cause = e.Code
	}
	e.Version = rq.snap.Version()
	rq.snap = nil // a request that is over keeps no old world alive
	rq.next = choice{}
	rq.session.at = nil
	rq.sent = nil
	rq.v, rq.endpoint, rq.host, rq.path, rq.origin = decide.Verdict{}, nil, nil, nil, nil
	if e.Classify(); e.Failed() {
		id, _ := x.Req.Get("x-request-id")
		e.RequestID.Set(id)
	}
	o.cfg.Journal.Ended(e)
}

// refused tells the journal of what a client sent that could not be read as a request.
func (c *conn) refused(status int, why error) {
	e := &c.st.end
	*e = journal.Entry{}
	e.At = time.Now()
	e.Request, e.Local, e.Status, e.Ended = true, true, status, "complete"
	e.Loop = c.st.l.ID() + 1
	c.entry(e)
	e.Host.SetString(c.flow.Host)
	e.Action, e.Reason, e.Cause = decide.Refuse.String(), decide.NoVerdict.String(), engine.RefusedCause(status)
	e.Fault = engine.FaultOf(why)
	e.Version = c.o.cfg.Store.Load().Version()
	e.Classify()
	c.o.cfg.Journal.Ended(e)
}

// entry fills in what is known of the connection.
func (c *conn) entry(e *journal.Entry) {
	e.Dir, e.Namespace, e.Workload = c.flow.Dir, c.flow.Namespace, c.flow.Workload
	e.Pod, e.Container = c.pod.Name, c.pod.Container
	e.Dst, e.Sniff = c.flow.Dst.AddrPort, c.flow.Sniff
}

// why classes what kept a hop from being made, or ended it while requests waited: a closed
// set, fit for a metric's label.
func why(err error) string {
	if errors.Is(err, engine.ErrHopFull) {
		return "hop-full"
	}
	return cmp.Or(ending(err), string(meshhop.ReasonOf(err)))
}

// cut classes what ended a hop under a request that had been sent: the same set.
func cut(err error) string { return cmp.Or(ending(err), exchange.Closed.String()) }

// ending is why we ended a session; "": it was not us.
func ending(err error) string {
	switch {
	case errors.Is(err, engine.ErrSilent):
		return "silent"
	case errors.Is(err, errEndpointGone):
		return "endpoint-gone"
	case errors.Is(err, errEndpointUnhealthy):
		return "endpoint-unhealthy"
	case errors.Is(err, errRevoked):
		return "identity-revoked"
	case errors.Is(err, engine.ErrExpired), errors.Is(err, meshhop.ErrExpired):
		return "identity-expired"
	}
	return ""
}
