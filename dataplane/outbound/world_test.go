package outbound

import (
	"io"
	"strings"
	"testing"
	"time"

	"aether/dataplane/balance"
	"aether/dataplane/decide"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// shut is a client that reads the head of an answer and no more.
type shut struct {
	answerOf
	text []byte
}

func (s *shut) WriteData(p []byte, _ bool) int {
	s.text = append(s.text, p...)
	return 0
}

// world is k's with these endpoints of the same destination.
func (k *caller) world(all ...*snapshot.Endpoint) *snapshot.Snapshot {
	return snapshot.New(snapshot.Tables{Backends: []*snapshot.Backend{k.b}, Endpoints: snapshot.NewEndpointTable([]*snapshot.EndpointSet{snapshot.NewEndpointSet(all)})})
}

// TestRenew: what a request asked for is looked for in the world as it is by now.
func TestRenew(t *testing.T) {
	k := newCaller(t, 3, nil)
	like := func(i int, change func(e *snapshot.Endpoint)) *snapshot.Endpoint {
		e := *k.set.At(i)
		e.Key = uint64(i)
		if change != nil {
			change(&e)
		}
		return &e
	}
	v2 := func(e *snapshot.Endpoint) { e.Metadata = map[string]string{"version": "v2"} }
	v1 := func(e *snapshot.Endpoint) { e.Metadata = map[string]string{"version": "v1"} }
	before := k.world(like(0, v2), like(1, v2), like(2, v1))
	old := before.Endpoints(k.b)
	part, ok := old.Subset([]snapshot.Want{{Key: []byte("version"), Value: []byte("v2")}})
	if !ok || part.Len() != 2 {
		t.Fatal("no subset")
	}
	for _, tt := range []struct {
		name   string
		v      decide.Verdict
		at     *snapshot.Endpoint
		now    []*snapshot.Endpoint
		set    int
		pinned bool
		stays  bool
	}{
		{"all", decide.Verdict{Set: old}, nil, []*snapshot.Endpoint{like(1, nil)}, 1, false, false},
		{"nobody", decide.Verdict{Set: old}, nil, nil, 0, false, false},
		{"a subset", decide.Verdict{Set: part}, nil, []*snapshot.Endpoint{like(0, v1), like(1, v2), like(2, v2)}, 2, false, false},
		{"a subset that nobody is in any more", decide.Verdict{Set: part}, nil, []*snapshot.Endpoint{like(0, v1)}, 0, false, false},
		{"a subset, without any keys", decide.Verdict{Set: part}, nil, []*snapshot.Endpoint{like(0, nil)}, 0, false, false},
		{"a pin", decide.Verdict{Set: old, Pinned: old.At(1)}, nil, []*snapshot.Endpoint{like(1, nil), like(2, nil)}, 2, true, false},
		{"a pin that has gone", decide.Verdict{Set: old, Pinned: old.At(1)}, nil, []*snapshot.Endpoint{like(0, nil)}, 0, false, false},
		{"a pin that is another pod's", decide.Verdict{Set: old, Pinned: old.At(1)}, nil, []*snapshot.Endpoint{like(1, func(e *snapshot.Endpoint) { e.Pod = "thief" })}, 0, false, false},
		{"a pin that drains", decide.Verdict{Set: old, Pinned: old.At(1)}, nil, []*snapshot.Endpoint{like(1, func(e *snapshot.Endpoint) { e.Health = model.Draining })}, 0, false, false},
		{"a session", decide.Verdict{Set: old}, old.At(1), []*snapshot.Endpoint{like(1, nil)}, 1, false, true},
		{"a session whose endpoint has gone", decide.Verdict{Set: old}, old.At(1), []*snapshot.Endpoint{like(2, nil)}, 1, false, false},
		{"a session whose endpoint is out of the subset", decide.Verdict{Set: part}, old.At(1), []*snapshot.Endpoint{like(0, v2), like(1, v1)}, 1, false, false},
	} {
		now := k.world(tt.now...)
		rq := &reqState{snap: before, v: tt.v}
		rq.v.Backend, rq.session.at = k.b, tt.at
		rq.renew(now)
		all := now.Endpoints(k.b)
		of := func(e *snapshot.Endpoint) bool { return e == nil || all.Like(e) == e }
		if rq.snap != now || rq.v.Set.Len() != tt.set || (rq.v.Pinned != nil) != tt.pinned || (rq.session.at != nil) != tt.stays || !of(rq.v.Pinned) || !of(rq.session.at) {
			t.Errorf("%s: %d endpoints, pinned %v, session at %v", tt.name, rq.v.Set.Len(), rq.v.Pinned, rq.session.at)
		}
	}
}

// TestNoHopToWhoHasGone: a hop is not made to what the snapshot in force does not have, for OnSnapshot, which
// would close it, has been there.
func TestNoHopToWhoHasGone(t *testing.T) {
	k := newCaller(t, 1, nil)
	e := k.set.At(0)
	x, rq, down := k.request(t)
	k.o.cfg.Store.Swap(k.world())
	k.o.send(x, k.c, rq, e)
	if down.status != 503 || rq.cause != "no-endpoint" || len(k.st.hops) != 0 {
		t.Errorf("%d, cause %q, %d hops", down.status, rq.cause, len(k.st.hops))
	}
	other := *e
	other.SPIFFEID = "spiffe://td/ns/shop/sa/thief"
	sick := *e
	sick.Health = model.Unhealthy
	for _, now := range []*snapshot.Endpoint{&other, &sick} {
		if lives(k.world(now), k.b, e) {
			t.Errorf("%+v is taken for %+v", now, e)
		}
	}
	if !lives(k.snap, k.b, e) {
		t.Error("it is there")
	}
}

// TestNotSentAfterItsAnswer: once the client has been told 504 the request is not sent again, however long
// the client takes to read that, and its place among those that are is another's.
func TestNotSentAfterItsAnswer(t *testing.T) {
	k := newCaller(t, 2, nil)
	rule := &snapshot.Rule{Timeouts: model.Timeouts{Request: time.Minute, Backend: time.Second}, Retry: &model.Retry{Codes: []uint16{503}, Attempts: 3, Backoff: time.Second}}
	down := &shut{}
	x := k.pool.Begin(down, &httpmsg.Head{Method: []byte("POST"), Path: []byte("/"), Minor: 1}, true, &k.c.info, 0)
	rq := &reqState{snap: k.snap, v: decide.Verdict{Action: decide.Forward, Backend: k.b, Set: k.set, Matched: rule}}
	x.User = rq
	k.o.start(x, k.c, rq)
	busy := &httpmsg.Head{Status: 503, Fields: []httpmsg.Field{{Name: []byte("x-aether-outcome"), Value: []byte("503;-;POST;via_upstream")}}}
	x.Forward(silent{})
	if !k.o.retryOnResponse(x, k.c, rq, busy, busy.Fields[0].Value) || !rq.wait.Armed() {
		t.Fatal("it does not wait to be sent again")
	}
	d := rq.retrying
	(*requestTimer)(rq).Run()
	if down.status != 504 || x.Over() {
		t.Fatalf("%d, over %v: want a client that has not read 504", down.status, x.Over())
	}
	if rq.wait.Armed() || rq.tryEnd.Armed() || rq.retrying != nil {
		t.Error("something of a retry is left")
	}
	for range balance.MaxRetrying {
		if !d.Retry() {
			t.Fatal("its place is taken")
		}
	}
	k.o.send(x, k.c, rq, nil) // whoever comes late changes nothing
	if down.status != 504 || !strings.HasPrefix(string(down.text), "no answer within timeouts.request") {
		t.Errorf("%d %q", down.status, down.text)
	}
}

// TestCutIsNoConnect: a session that ends under a request is not told as one that could not be made.
func TestCutIsNoConnect(t *testing.T) {
	for _, tt := range []struct {
		reached     bool
		code        exchange.Code
		why         error
		cause, text string
	}{
		{true, exchange.Closed, io.ErrUnexpectedEOF, "closed", "the connection ended before an answer (closed)\n"},
		{true, exchange.Closed, errEndpointGone, "endpoint-gone", "the connection ended before an answer (endpoint-gone)\n"},
		{true, exchange.Closed, nil, "closed", "the destination did not answer (closed)\n"},
		{true, exchange.Protocol, io.ErrUnexpectedEOF, "protocol", "the destination did not answer (protocol)\n"},
		{false, exchange.Connect, errEndpointGone, "endpoint-gone", "no connection to shop/cart:8080 (endpoint-gone)\n"},
	} {
		k := newCaller(t, 0, nil)
		down := &shut{}
		x := k.pool.Begin(down, &httpmsg.Head{Method: []byte("POST"), Path: []byte("/"), Minor: 1}, true, &k.c.info, 0)
		rq := &reqState{snap: k.snap, v: decide.Verdict{Action: decide.Forward, Backend: k.b, Set: k.set}}
		x.User = rq
		k.o.start(x, k.c, rq)
		if tt.reached {
			x.Forward(silent{})
		}
		x.Cause = tt.why
		x.UpstreamClosed(tt.code)
		if down.status != 503 || rq.cause != tt.cause || string(down.text) != tt.text {
			t.Errorf("%+v: %d, cause %q, %q", tt, down.status, rq.cause, down.text)
		}
	}
}

// TestNamedCodes: a rule's codes are statuses of answers. Where a proxy answered for want of one, and what it
// says of the request is not understood, the request may be at work: it is not sent again.
func TestNamedCodes(t *testing.T) {
	for _, tt := range []struct {
		status   int
		outcomes []string
		want     bool
	}{
		{503, []string{"503;-;POST;via_upstream"}, true},
		{500, []string{"500;-;POST;via_upstream"}, true},
		{502, []string{"0;UPE;POST;upstream_protocol_error"}, true}, // an answer, if a broken one
		{504, []string{"0;UT;POST;response_timeout"}, true},
		{503, []string{"0;UF;POST;upstream_connection_failure"}, true},
		{503, []string{"0;UC;POST;x"}, false},
		{503, []string{"0;UC,UPE;POST;x"}, false},
		{503, []string{"0;XX;POST;x"}, false},
		{503, []string{"0;UF,XX;POST;x"}, false},
		{503, []string{"0;UF"}, false},
		{503, []string{"0;UF;GET;of another request"}, false},
		{503, []string{"503;-;POST;via_upstream", "0;UC;POST;x"}, false},
		{503, nil, true}, // of somebody who knows nothing of outcomes
	} {
		k := newCaller(t, 2, nil)
		x, rq, _ := k.request(t)
		x.Req.Method = []byte("POST")
		rq.v.Matched = &snapshot.Rule{Retry: &model.Retry{Codes: []uint16{500, 502, 503, 504}, Attempts: 3, Backoff: time.Second}}
		k.o.start(x, k.c, rq)
		x.Forward(silent{})
		h := &httpmsg.Head{Status: tt.status}
		for _, o := range tt.outcomes {
			h.Add([]byte("x-aether-outcome"), []byte(o))
		}
		v, _ := h.Get("x-aether-outcome")
		if got := k.o.retryOnResponse(x, k.c, rq, h, v); got != tt.want {
			t.Errorf("%d %q: sent again %v", tt.status, tt.outcomes, got)
		}
	}
}

// TestTunnelsCountApart: open tunnels leave the breaker of requests alone, and have a bound of their own.
func TestTunnelsCountApart(t *testing.T) {
	k := newCaller(t, 1, nil)
	d := k.st.of(k.c.pod).table.Dest(k.b)
	h := d.Host(k.set.At(0).Addr)
	open := make([]reqState, balance.MaxTunnels)
	for i := range open {
		open[i].try.begin(d, h, 0, false)
		open[i].accepted(nil, k.c, &httpmsg.Head{Status: 101})
	}
	if d.Full() || h.Open() != balance.MaxTunnels {
		t.Fatalf("full %v, %d open", d.Full(), h.Open())
	}
	x, rq, down := k.request(t)
	x.Req.Upgrade = []byte("websocket")
	k.o.send(x, k.c, rq, k.st.pick(k.c.pod, rq))
	if down.status != 503 || rq.cause != causeOverflow {
		t.Errorf("one tunnel more: %d, cause %q", down.status, rq.cause)
	}
	k.st.leave(x, &open[0])
	if d.FullOfTunnels() || h.Open() != balance.MaxTunnels-1 {
		t.Errorf("one less: full %v, %d open", d.FullOfTunnels(), h.Open())
	}
	for i := range open[1:] {
		k.st.leave(x, &open[1+i])
	}
	for i := range balance.MaxOpen {
		if d.Full() {
			t.Fatalf("full after %d requests", i)
		}
		d.Begin(h, 0)
	}
	if !d.Full() {
		t.Error("the breaker of requests does not count")
	}
}
