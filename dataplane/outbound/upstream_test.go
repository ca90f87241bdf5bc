package outbound

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"aether/dataplane/balance"
	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/snapshot"
	"aether/meshhop"
	"aether/mtls"
)

// caller is a pod on a loop that does not run, and a destination of n endpoints.
type caller struct {
	o    *Outbound
	st   *loopState
	c    *conn
	b    *snapshot.Backend
	set  *snapshot.EndpointSet
	snap *snapshot.Snapshot
	pool exchange.Pool
}

func newCaller(t testing.TB, n int, now func() int64) *caller {
	return newCallerOn(t, n, stillEngine(t, now))
}

// newCallerOn is newCaller on e's first loop.
func newCallerOn(t testing.TB, n int, e *engine.Engine) *caller {
	var all []*snapshot.Endpoint
	for i := range n {
		all = append(all, &snapshot.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 18008), Weight: 1024, SPIFFEID: "spiffe://td/ns/shop/sa/cart"})
	}
	k := &caller{b: &snapshot.Backend{Name: "shop/cart:8080", Port: 8080, SNI: "8080"}, set: snapshot.NewEndpointSet(all)}
	k.snap = snapshot.New(snapshot.Tables{Backends: []*snapshot.Backend{k.b}, Endpoints: snapshot.NewEndpointTable([]*snapshot.EndpointSet{k.set})})
	k.o = New(Config{Store: &snapshot.Store{}})
	k.o.cfg.Store.Swap(k.snap)
	k.st = k.o.loops.Make(e.Loops()[0])
	p := &Pod{Context: t.Context(), Container: "web", Engine: e.AddPod("web")}
	k.c = &conn{o: k.o, pod: p, st: k.st}
	k.c.info = engine.ConnInfo{User: k.c}
	k.pool.Service = unrecorded{k.o}
	return k
}

func (k *caller) request(t testing.TB) (*exchange.Exchange, *reqState, *answerOf) {
	down := &answerOf{}
	x := k.pool.Begin(down, &httpmsg.Head{Method: []byte("GET"), Path: []byte("/")}, true, &k.c.info, 0)
	rq := &reqState{snap: k.snap, v: decide.Verdict{Action: decide.Forward, Backend: k.b, Set: k.set}}
	x.User = rq
	return x, rq, down
}

// TestOverflow: the breaker of contract 5.6 answers 503, with a cause that is UO in
// Envoy's words.
func TestOverflow(t *testing.T) {
	k := newCaller(t, 2, nil)
	d := k.st.of(k.c.pod).table.Dest(k.b)
	for i := range balance.MaxOpen {
		d.Begin(d.Host(k.set.At(i%2).Addr), 0)
	}
	x, rq, down := k.request(t)
	k.o.send(x, k.c, rq, k.st.pick(k.c.pod, rq))
	if down.status != 503 || rq.cause != "overflow" || rq.try.open {
		t.Errorf("%d, cause %q, want 503 overflow", down.status, rq.cause)
	}
	if _, _, ok := k.st.beginRaw(k.c.pod, rq, k.set.At(0)); ok {
		t.Error("a raw-TCP connection more is let through")
	}
}

// TestAttempts: each attempt is counted in and out once, whatever becomes of it.
func TestAttempts(t *testing.T) {
	k := newCaller(t, 4, nil)
	e := k.set.At(0)
	open := func() (n int) {
		k.st.of(k.c.pod).table.Each(func(_ *balance.Dest, h *balance.Host) { n += h.Open() })
		return n
	}
	begin := func(rq *reqState) {
		d, h := k.st.hostOf(k.c.pod, rq, e)
		rq.try.begin(d, h, k.st.l.Now(), false)
	}
	host := func() (h *balance.Host) {
		_, h = k.st.hostOf(k.c.pod, &reqState{v: decide.Verdict{Backend: k.b}}, e)
		return h
	}
	for name, how := range map[string]struct {
		do      func(x *exchange.Exchange, rq *reqState)
		trouble bool
	}{
		"answered": {func(x *exchange.Exchange, rq *reqState) { k.st.answered(x, rq, &httpmsg.Head{Status: 200}) }, false},
		"5xx":      {func(x *exchange.Exchange, rq *reqState) { k.st.answered(x, rq, &httpmsg.Head{Status: 503}) }, true},
		"failed":   {func(x *exchange.Exchange, rq *reqState) { k.st.failed(x, rq, exchange.Closed) }, true},
		"refused":  {func(x *exchange.Exchange, rq *reqState) { k.st.failed(x, rq, exchange.Refused) }, true},
		"too many wait already": {func(x *exchange.Exchange, rq *reqState) {
			x.Cause = engine.ErrHopFull
			k.st.failed(x, rq, exchange.Refused)
		}, false},
		"the client went": {func(*exchange.Exchange, *reqState) {}, false},
		"its answer broke off": {func(x *exchange.Exchange, rq *reqState) {
			k.st.answered(x, rq, &httpmsg.Head{Status: 200})
			x.ResponseHead(&httpmsg.Head{Status: 200}, false)
			x.UpstreamClosed(exchange.Closed)
		}, true},
		"its stream was silent for too long": {func(x *exchange.Exchange, rq *reqState) {
			k.st.answered(x, rq, &httpmsg.Head{Status: 200})
			x.ResponseHead(&httpmsg.Head{Status: 200}, false)
			x.UpstreamClosed(exchange.Timeout)
		}, false},
	} {
		x, rq, _ := k.request(t)
		begin(rq)
		if open() != 1 {
			t.Fatalf("%s: %d under way", name, open())
		}
		how.do(x, rq)
		k.st.leave(x, rq)
		k.st.leave(x, rq)
		if open() != 0 {
			t.Errorf("%s: %d under way after the end", name, open())
		}
		if got := host().Trouble(k.st.l.Now()) > 0; got != how.trouble {
			t.Errorf("%s: held against the endpoint: %v, want %v", name, got, how.trouble)
		}
		k.st.forget(func(*balance.Dest, *balance.Host) bool { return true })
	}
}

// TestWhose: what is held against an endpoint (decision 014).
func TestWhose(t *testing.T) {
	for _, tt := range []struct {
		code  exchange.Code
		cause error
		want  fault
	}{
		{exchange.Closed, nil, upstreamFault},
		{exchange.Closed, engine.ErrSilent, upstreamFault},
		{exchange.Protocol, nil, upstreamFault},
		{exchange.Timeout, nil, upstreamFault},
		{exchange.Refused, nil, refusal},
		{exchange.Refused, engine.ErrHopFull, noFault},
		{exchange.Closed, errEndpointGone, noFault},
		{exchange.Connect, errEndpointUnhealthy, noFault},
		{exchange.Connect, &meshhop.Connect{Err: errors.New("refused")}, upstreamFault},
		{exchange.Connect, fmt.Errorf("handshake: %w", context.DeadlineExceeded), upstreamFault},
		{exchange.Connect, &mtls.WrongPeer{}, upstreamFault},
		{exchange.Connect, &mtls.NoCertificate{}, noFault},
		{exchange.Connect, &meshhop.Busy{}, noFault},
		{exchange.Connect, context.Canceled, noFault},
		{exchange.Cancel, nil, noFault},
		{exchange.Internal, nil, noFault},
	} {
		if got := attribute(tt.code, tt.cause); got != tt.want {
			t.Errorf("%v, %v: %d, want %d", tt.code, tt.cause, got, tt.want)
		}
	}
}

// TestGRPCStatus: gRPC's own table of HTTP statuses (google.rpc.Code, code.proto),
// which Envoy maps by.
func TestGRPCStatus(t *testing.T) {
	for grpc, want := range map[string]int{
		"0": 200, "1": 499, "2": 500, "3": 400, "4": 504, "5": 404, "6": 409, "7": 403, "8": 429, "9": 400, "10": 409,
		"11": 400, "12": 501, "13": 500, "14": 503, "15": 500, "16": 401, "17": 500, "-1": 500, "": 500, "x": 500,
	} {
		if got := httpStatus([]byte(grpc)); got != want {
			t.Errorf("grpc-status %q: %d, want %d", grpc, got, want)
		}
	}
}

// TestForgotten: a pod that calls nobody any more costs nothing after a while.
func TestForgotten(t *testing.T) {
	now := int64(time.Hour)
	k := newCaller(t, 3, func() int64 { return now })
	ctx, cancel := context.WithCancel(t.Context())
	k.c.pod.Context = ctx
	use := func() {
		_, rq, _ := k.request(t)
		e := k.st.pick(k.c.pod, rq)
		d, h := k.st.hostOf(k.c.pod, rq, e)
		rq.try.begin(d, h, k.st.l.Now(), false)
		d.End(h)
	}
	use()
	if len(k.st.pods) != 1 || !k.st.sweep.Armed() {
		t.Fatal("nothing is remembered, or nothing will forget it")
	}
	k.st.forget(nil)
	if len(k.st.pods) != 1 {
		t.Fatal("forgotten at once")
	}
	use()
	cancel()
	k.st.forget(nil)
	if len(k.st.pods) != 0 {
		t.Error("a pod that is gone is remembered")
	}
}

// TestUpstreamAllocations: choosing and accounting cost no allocation once warm.
func TestUpstreamAllocations(t *testing.T) {
	k := newCaller(t, 10, nil)
	x, rq, _ := k.request(t)
	ok := &httpmsg.Head{Status: 200}
	if n := testing.AllocsPerRun(1000, func() { k.once(x, rq, ok) }); n != 0 {
		t.Errorf("%v allocations a request, want 0", n)
	}
}

func (k *caller) once(x *exchange.Exchange, rq *reqState, ok *httpmsg.Head) {
	e := k.st.pick(k.c.pod, rq)
	d, h := k.st.hostOf(k.c.pod, rq, e)
	rq.try.begin(d, h, k.st.l.Now(), false)
	k.st.answered(x, rq, ok)
	k.st.leave(x, rq)
}

func BenchmarkUpstream(b *testing.B) {
	k := newCaller(b, 100, nil)
	x, rq, _ := k.request(b)
	ok := &httpmsg.Head{Status: 200}
	b.ReportAllocs()
	for b.Loop() {
		k.once(x, rq, ok)
	}
}
