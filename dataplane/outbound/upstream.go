package outbound

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"aether/dataplane/balance"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
	"aether/meshhop"
	"aether/mtls/record"
	"aether/mtls/spiffeid"
	"aether/tproxy/socket"
)

// maxEndpointSessions bounds the hop sessions of one pod to one endpoint over all
// its ports. The first session of a port is always made.
const maxEndpointSessions = 16

// sweepAfter is how often what balancing remembers is looked through while there
// is any.
const sweepAfter = time.Minute

// upstreams is what a pod knows, on one loop, of what it calls (decision 014).
type upstreams struct {
	table  balance.Table
	groups map[netip.AddrPort]*engine.HopGroup // by endpoint
	raw    map[*rawConn]struct{}
	nears  int // endpoints of this node that have been met in process

	mirrors int // of the pod's requests, under way
}

// target is what stands behind a balance.Host: its User.
type target struct {
	hop *hopState
}

type hopKey struct {
	pod  *Pod
	addr netip.AddrPort
	port uint16
	pin  string
	near string // container of a pod of this node that is met in process; "": the hop is taken
}

// hop carries requests to an endpoint: engine.Hop, or in process engine.InProcess.
type hop interface {
	Send(*exchange.Exchange)
	Open() int
	Leave(cause error)
	Close(cause error)
	Sessions(wall time.Time, f func(engine.SessionState))
}

type hopState struct {
	hop  hop
	pin  string
	near string // as in hopKey
	gone bool   // closed, or out of sessions: the next request makes another
}

// attempt is a request, or a connection, that is with an endpoint, or was.
type attempt struct {
	dest  *balance.Dest
	host  *balance.Host
	began int64
	open  bool // not counted out yet
	pipe  bool // it is an open tunnel
	told  bool // what became of it has been told
	cold  bool // it waits for a session to be made: how long it takes says nothing
}

// choice is what pick chose.
type choice struct {
	dest *balance.Dest
	host *balance.Host
}

// rawConn is a raw-TCP connection that is relayed. It lives on the loop that it began on.
type rawConn struct {
	attempt
	of  *upstreams
	key hopKey
	cut context.CancelCauseFunc
}

// of is what p knows on this loop.
func (st *loopState) of(p *Pod) *upstreams {
	if st.lastPod == p { // most often one pod has a loop's attention for a while
		return st.last
	}
	u := st.pods[p]
	if u == nil {
		u = &upstreams{groups: map[netip.AddrPort]*engine.HopGroup{}, raw: map[*rawConn]struct{}{}}
		st.pods[p] = u
		if !st.sweep.Armed() {
			st.l.Arm(&st.sweep, (*sweeper)(st), int64(sweepAfter))
		}
	}
	st.lastPod, st.last = p, u
	return u
}

// sweeper is a loopState as the task of its timer.
type sweeper loopState

// Run is reactor.Task.
func (s *sweeper) Run() {
	st := (*loopState)(s)
	st.forget(nil)
	if len(st.pods) > 0 {
		st.l.Arm(&st.sweep, s, int64(sweepAfter))
	}
}

// Fail is reactor.Task: what is remembered may be half changed.
func (s *sweeper) Fail(error) {
	clear(s.pods)
	s.lastPod, s.last = nil, nil
}

// forget drops what is idle, and hosts that gone reports.
func (st *loopState) forget(gone func(d *balance.Dest, h *balance.Host) bool) {
	st.forgetNear()
	st.lastPod, st.last = nil, nil
	for p, u := range st.pods {
		u.table.Sweep(st.l.Now(), gone)
		if p.Context.Err() != nil || u.table.Empty() && len(u.groups) == 0 && len(u.raw) == 0 && u.nears == 0 && u.mirrors == 0 {
			delete(st.pods, p)
		}
	}
}

// pick chooses an endpoint out of the verdict's, none of those already tried; nil:
// there is no other. The first choice is where the client's session is. A pinned one is used though it is ejected: it was asked for,
// and there is no other to spare it for (decision 014).
func (st *loopState) pick(p *Pod, rq *reqState) *snapshot.Endpoint {
	tried := rq.tried[:min(rq.attempt, len(rq.tried))]
	if e := rq.v.Pinned; e != nil { // it or none (contract 5.10)
		if slices.Contains(tried, e.Addr) {
			return nil
		}
		return e
	}
	if e := rq.session.at; e != nil && !slices.Contains(tried, e.Addr) {
		if d, h := st.hostOf(p, rq, e); h.EjectedFor(st.l.Now()) == 0 {
			rq.next = choice{d, h}
			return e
		}
	}
	v := st.of(p).table.View(rq.v.Backend, rq.v.Set)
	i := v.Pick(st.l.Now(), st.rnd.Uint32(), tried)
	if i < 0 {
		return nil
	}
	rq.next = choice{v.Dest(), v.At(i)}
	return rq.v.Set.At(i)
}

// hostOf is what p knows of e, mostly what pick has just chosen.
func (st *loopState) hostOf(p *Pod, rq *reqState, e *snapshot.Endpoint) (*balance.Dest, *balance.Host) {
	if n := rq.next; n.host != nil && n.host.Addr == e.Addr {
		return n.dest, n.host
	}
	d := st.of(p).table.Dest(rq.v.Backend)
	return d, d.Host(e.Addr)
}

// send gives the request to the hop of e; nil: there is no endpoint.
func (o *Outbound) send(x *exchange.Exchange, c *conn, rq *reqState, e *snapshot.Endpoint) {
	st := c.st
	st.leave(x, rq)
	if e == nil {
		o.fail(x, rq, "no-endpoint", "no healthy endpoint serves "+rq.v.Backend.Name)
		return
	}
	d, host := st.hostOf(c.pod, rq, e)
	if d.Full() {
		o.fail(x, rq, causeOverflow, textOverflow(rq.v.Backend))
		return
	}
	if x.Req.Upgrade != nil && d.FullOfTunnels() {
		o.fail(x, rq, causeOverflow, textTunnels(rq.v.Backend))
		return
	}
	h, err := st.hopFor(c.pod, rq, e, host)
	if errors.Is(err, errEndpointGone) { // since it was chosen
		rq.renew(o.cfg.Store.Load())
		o.send(x, c, rq, st.pick(c.pod, rq))
		return
	}
	if err != nil {
		x.Cause = err
		o.fail(x, rq, "wrong-peer", err.Error())
		return
	}
	rq.endpoint = e
	rq.tried[rq.attempt%len(rq.tried)] = e.Addr
	rq.attempt++
	rq.try.begin(d, host, st.l.Now(), h.hop.Open() == 0)
	h.hop.Send(x)
}

const causeOverflow = "overflow"

func textOverflow(b *snapshot.Backend) string {
	return "overflow: as many requests of this pod to " + b.Name + " are under way as may be (" + strconv.Itoa(balance.MaxOpen) + ")"
}

func textTunnels(b *snapshot.Backend) string {
	return "overflow: as many tunnels of this pod to " + b.Name + " are open as may be (" + strconv.Itoa(balance.MaxTunnels) + ")"
}

func (a *attempt) begin(d *balance.Dest, h *balance.Host, now int64, cold bool) {
	*a = attempt{dest: d, host: h, began: now, open: true, cold: cold}
	d.Begin(h, now)
}

// tunnelled: the attempt is an open tunnel from here on.
func (a *attempt) tunnelled() {
	if a.open && !a.pipe {
		a.pipe = true
		a.dest.Tunnel()
	}
}

// took is how long the attempt has been under way; 0: that says nothing.
func (a *attempt) took(now int64) time.Duration {
	if a.cold {
		return 0
	}
	return max(1, time.Duration(now-a.began)) // at least a nanosecond: it was measured
}

// answered tells of an answer's head. Called for each, before it is decided
// whether the answer goes down or the request to another endpoint.
func (st *loopState) answered(x *exchange.Exchange, rq *reqState, h *httpmsg.Head) {
	a := &rq.try
	if a.told || !a.open {
		return
	}
	a.told = true
	now, status := st.l.Now(), h.Status
	if rq.grpc {
		if v, ok := h.Get("grpc-status"); ok { // in the head only, as Envoy does (decision 014)
			status = httpStatus(v)
		}
	}
	members := 0
	if status >= 500 {
		members = rq.snap.Endpoints(rq.v.Backend).Len()
	}
	if a.dest.Answered(a.host, now, a.took(now), status, members) {
		st.ejected(x.Conn.(*engine.ConnInfo).User.(*conn).pod, a)
	}
}

// failed tells of an attempt that got no answer. Called before it is decided what
// becomes of the request.
func (st *loopState) failed(x *exchange.Exchange, rq *reqState, code exchange.Code) {
	a := &rq.try
	if a.told || !a.open {
		return
	}
	a.told = true
	st.blame(x.Conn.(*engine.ConnInfo).User.(*conn).pod, rq, a, code, x.Cause)
}

// blame counts against the endpoint what was not our own doing.
func (st *loopState) blame(p *Pod, rq *reqState, a *attempt, code exchange.Code, cause error) {
	now := st.l.Now()
	switch attribute(code, cause) {
	case upstreamFault:
		if a.dest.Failed(a.host, now, a.took(now), st.l.Iteration(), rq.snap.Endpoints(rq.v.Backend).Len()) {
			st.ejected(p, a)
		}
	case refusal:
		a.dest.Refused(a.host, now)
	}
}

type fault uint8

const (
	noFault fault = iota
	upstreamFault
	refusal // it took nothing, and said so
)

// attribute fault is it that there was no answer.
func attribute(code exchange.Code, cause error) fault {
	switch {
	case errors.Is(cause, engine.ErrHopFull), errors.Is(cause, engine.ErrNoTunnel), errors.Is(cause, errEndpointGone), errors.Is(cause, errEndpointUnhealthy),
		errors.Is(cause, errRevoked), errors.Is(cause, engine.ErrExpired):
		return noFault
	case code == exchange.Refused, code == exchange.Unsent:
		return refusal
	case code == exchange.Internal, code == exchange.Cancel, code == exchange.NoError:
		return noFault
	case code == exchange.Connect && localFault(cause):
		return noFault
	}
	return upstreamFault
}

// localFault reports whether a hop was not made for reasons of this node's or pod's.
func localFault(err error) bool {
	switch meshhop.ReasonOf(err) {
	case meshhop.ReasonNoCertificate, meshhop.ReasonBusy, meshhop.ReasonCancelled, meshhop.ReasonFiles, meshhop.ReasonPorts:
		return true
	}
	return errors.Is(err, errNoIdentity)
}

// leave counts the attempt out, if one is open.
func (st *loopState) leave(x *exchange.Exchange, rq *reqState) {
	a := &rq.try
	if !a.open {
		return
	}
	now := st.l.Now()
	switch {
	case !a.told: // nobody waits for it any more
		if t := a.took(now); t > 0 {
			a.dest.GaveUp(a.host, now, t)
		}
	case x.Over() && x.Ended == exchange.Server && x.Code != exchange.Timeout: // its answer broke off
		st.blame(x.Conn.(*engine.ConnInfo).User.(*conn).pod, rq, a, x.Code, x.Cause)
	}
	if a.pipe {
		a.dest.EndTunnel(a.host)
	} else {
		a.dest.End(a.host)
	}
	*a = attempt{}
}

// ejected logs it, away from the loop.
func (st *loopState) ejected(p *Pod, a *attempt) {
	dest, addr, left, n := a.dest.Name, a.host.Addr, a.host.EjectedFor(st.l.Now()), a.host.Ejections()
	st.l.Go(func() {
		st.o.quiet.Warn("ejected "+p.Container+" "+dest+" "+addr.String(), "endpoint ejected: this pod's requests go elsewhere for a while",
			"pod", p.Container, "destination", dest, "endpoint", addr, "for", left, "times", n)
	})
}

// httpStatus is the HTTP status that stands for a grpc-status, as in Envoy.
func httpStatus(grpc []byte) int {
	status := [...]int{200, 499, 500, 400, 504, 404, 409, 403, 429, 400, 409, 400, 501, 500, 503, 500, 401}
	n, err := strconv.ParseUint(string(grpc), 10, 8)
	if err != nil || n >= uint64(len(status)) {
		return 500
	}
	return status[n]
}

var errNoIdentity = errors.New("the endpoint's row has no valid SPIFFE ID")

// renew makes the request go by snap: the same destination, and of it what the request
// asked for, as they are now. What is not there any more is no endpoint.
func (rq *reqState) renew(snap *snapshot.Snapshot) {
	if snap == rq.snap {
		return
	}
	v := &rq.v
	if b := snap.Backend(v.Backend); b != nil {
		v.Backend = b
	}
	all := snap.Endpoints(v.Backend)
	v.Set = all.Part(v.Set)
	if v.Pinned != nil {
		e := all.Like(v.Pinned)
		if e == nil || e.Health != model.HealthUnspecified && e.Health != model.Healthy { // it or none
			v.Set = all.None()
			e = nil
		}
		v.Pinned = e
	}
	if at := rq.session.at; at != nil {
		e := v.Set.Like(at)
		if e != nil && (e.Key != at.Key || !e.Usable()) {
			e = nil
		}
		rq.session.at = e
	}
	rq.snap, rq.next = snap, choice{}
}

// lives reports whether e, which was chosen by an older snapshot, is an endpoint of b still.
func lives(snap *snapshot.Snapshot, b *snapshot.Backend, e *snapshot.Endpoint) bool {
	now := snap.Endpoints(snap.Backend(b)).Like(e)
	return now != nil && now.SPIFFEID == e.SPIFFEID && now.Health != model.Unhealthy
}

// hopFor finds or makes the hop that carries requests of the pod to e, which is host.
func (st *loopState) hopFor(p *Pod, rq *reqState, e *snapshot.Endpoint, host *balance.Host) (*hopState, error) {
	t, _ := host.User.(*target)
	if t == nil {
		t = &target{}
		host.User = t
	}
	near := ""
	if w := rq.snap.Near(e); w != nil {
		near = w.ContainerID
	}
	if h := t.hop; h != nil && !h.gone && h.pin == e.SPIFFEID && h.near == near {
		return h, nil
	}
	h, err := st.makeHop(p, rq, e, near)
	t.hop = h
	return h, err
}

func (st *loopState) makeHop(p *Pod, rq *reqState, e *snapshot.Endpoint, near string) (*hopState, error) {
	b := rq.v.Backend
	k := hopKey{p, e.Addr, b.Port, e.SPIFFEID, near}
	if h := st.hops[k]; h != nil {
		return h, nil
	}
	// OnSnapshot has ended what was there at its time: of an older snapshot no hop is made any more.
	if now := st.o.cfg.Store.Load(); now != rq.snap && !lives(now, b, e) {
		return nil, errEndpointGone
	}
	pin, err := spiffeid.Parse(e.SPIFFEID)
	if err != nil {
		return nil, errNoIdentity
	}
	mk := meshhop.Key{Pod: p.Container, Source: p.ID, Endpoint: e.Addr, SNI: b.SNI, Proto: meshhop.H2, Pin: pin}
	if near != "" {
		if n := st.o.localDestination(near); n != nil && n.Local().ID == pin {
			return st.newInProcess(k, mk, n), nil
		}
		// Not served here yet, or somebody else by now: whoever has the address answers for himself.
		if k.near = ""; st.hops[k] != nil {
			return st.hops[k], nil
		}
	}
	u := st.of(p)
	group := u.groups[e.Addr]
	if group == nil {
		group = &engine.HopGroup{Max: maxEndpointSessions}
		u.groups[e.Addr] = group
	}
	h := &hopState{pin: e.SPIFFEID, near: k.near}
	made := st.l.NewHop(p.Engine, func(ctx context.Context) (int, record.Conn, engine.Bond, error) {
		s, err := st.o.cfg.Dialer.Dial(ctx, mk)
		if err != nil {
			st.o.notOpened(mk, err)
			return -1, nil, nil, err
		}
		rec := s.Record()
		fd, err := socket.TakeFD(s.Conn)
		if err != nil {
			return -1, nil, nil, err
		}
		return fd, rec, st.hold(p, mk, s.Bond, func(err error) {
			_ = st.l.Post(func() {
				if !h.gone {
					h.gone = true
					delete(st.hops, k)
					h.hop.Leave(err)
				}
			})
		}), nil
	}, func() {
		h.gone = true
		if st.hops[k] == h {
			delete(st.hops, k)
		}
		if group.Empty() && u.groups[e.Addr] == group {
			delete(u.groups, e.Addr)
		}
	})
	made.Join(group)
	h.hop = made
	st.hops[k] = h
	return h, nil
}

// notOpened logs once a cause.
func (o *Outbound) notOpened(k meshhop.Key, err error) {
	why := string(meshhop.ReasonOf(err))
	o.quiet.Warn(why+" "+k.String(), "hop not opened", "reason", why, "err", err)
}

// beginRaw counts a raw-TCP connection in, and gives the context that it lives in:
// the pod's, until its endpoint leaves. false: too many are open.
func (st *loopState) beginRaw(p *Pod, rq *reqState, e *snapshot.Endpoint) (context.Context, *rawConn, bool) {
	d, host := st.hostOf(p, rq, e)
	if d.Full() {
		return nil, nil, false
	}
	ctx, cut := context.WithCancelCause(p.Context)
	r := &rawConn{of: st.of(p), key: hopKey{p, e.Addr, rq.v.Backend.Port, e.SPIFFEID, ""}, cut: cut}
	r.begin(d, host, st.l.Now(), true)
	r.of.raw[r] = struct{}{}
	return ctx, r, true
}

// connected tells how the connect of r ended; nil: well. Any goroutine.
func (st *loopState) connected(r *rawConn, rq *reqState, err error) {
	_ = st.l.Post(func() {
		if err == nil {
			r.dest.Connected(r.host, st.l.Now())
			return
		}
		st.blame(r.key.pod, rq, &r.attempt, exchange.Connect, err)
	})
}

// endRaw counts r out and returns what cut it, if something did. Any goroutine.
func (st *loopState) endRaw(ctx context.Context, r *rawConn) error {
	cause := context.Cause(ctx)
	r.cut(nil)
	_ = st.l.Post(func() {
		r.dest.End(r.host)
		delete(r.of.raw, r)
	})
	if errors.Is(cause, errEndpointGone) || errors.Is(cause, errEndpointUnhealthy) || errors.Is(cause, errRevoked) || errors.Is(cause, meshhop.ErrExpired) {
		return cause
	}
	return nil
}

var (
	errEndpointGone      = errors.New("the endpoint left the registry")
	errEndpointUnhealthy = errors.New("the endpoint is unhealthy")
)

// EndpointState is what one pod knows of one endpoint, on one loop. The names in
// JSON are a promise to scripts; new ones may be added.
type EndpointState struct {
	Pod         string         `json:"pod"` // "shop/web-1"
	Loop        int            `json:"loop"`
	Destination string         `json:"destination"` // "shop/cart:8080"
	Endpoint    netip.AddrPort `json:"endpoint"`
	Open        int            `json:"open"`                 // requests, or raw-TCP connections, under way
	Sessions    int            `json:"sessions"`             // hop sessions
	LatencyMS   float64        `json:"latency_ms"`           // peak EWMA up to the answer's head; 0: not known
	Trouble     float64        `json:"trouble"`              // recent failures, fading
	EjectedMS   int64          `json:"ejected_ms,omitempty"` // for so long yet; 0: it is not
	Ejections   int            `json:"ejections,omitempty"`  // as long as it is remembered
}

// Endpoints tells of up to limit endpoints that pod ("shop/web-1"; "": any) has used
// lately from the loop l, in no order, and how many there are. On the loop.
func (o *Outbound) Endpoints(l *engine.Loop, pod string, limit int) (list []EndpointState, total int) {
	now := l.Now()
	for p, u := range o.loops.Get(l).pods {
		if pod != "" && p.Engine.Name != pod {
			continue
		}
		u.table.Each(func(d *balance.Dest, h *balance.Host) {
			if total++; len(list) >= limit {
				return
			}
			s := EndpointState{
				Pod: p.Engine.Name, Loop: l.ID(), Destination: d.Name, Endpoint: h.Addr, Open: h.Open(),
				LatencyMS: float64(h.Peak()) / 1e6, Trouble: h.Trouble(now), EjectedMS: h.EjectedFor(now).Milliseconds(), Ejections: h.Ejections(),
			}
			if t, _ := h.User.(*target); t != nil && t.hop != nil && !t.hop.gone {
				s.Sessions = t.hop.hop.Open()
			}
			list = append(list, s)
		})
	}
	return list, total
}
