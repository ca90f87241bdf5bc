package outbound

import (
	"math/rand/v2"
	"testing"
	"time"

	"aether/dataplane/balance"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// silent is an upstream, and a downstream, that takes everything.
type silent struct{}

func (silent) WriteHead(*httpmsg.Head, bool)              {}
func (silent) WriteData(p []byte, _ bool) int             { return len(p) }
func (silent) WriteTrailers(f []httpmsg.Field)            {}
func (silent) Resume()                                    {}
func (silent) Abort(exchange.Code)                        {}
func (silent) Request(*exchange.Exchange)                 {}
func (silent) Failed(*exchange.Exchange, exchange.Code)   {}
func (silent) Done(*exchange.Exchange)                    {}
func (silent) Response(*exchange.Exchange, *httpmsg.Head) {}

// TestRetryCosts: what stands ready for retries and limits of time costs a request that needs neither no
// allocation, nor does a request that is sent again, once a destination has been.
func TestRetryCosts(t *testing.T) {
	e, err := engine.New(engine.Config{MaxLoops: 1})
	if err != nil {
		t.Fatal(err)
	}
	l := e.Loops()[0]
	defer l.Stop()
	st := &loopState{l: l, rnd: rand.New(rand.NewPCG(1, 2)), hops: map[hopKey]*hopState{}, pods: map[*Pod]*upstreams{}}
	o := &Outbound{}
	c := &conn{o: o, st: st, pod: &Pod{Context: t.Context()}}
	info := &engine.ConnInfo{Loop: l, User: c}
	pool := &exchange.Pool{Service: silent{}}
	rule := &snapshot.Rule{Timeouts: model.Timeouts{Request: time.Minute, Backend: time.Second}, Retry: &model.Retry{Codes: []uint16{500}, Attempts: 3}}
	backend := &snapshot.Backend{Name: "shop/cart:8080"}
	req := &httpmsg.Head{Method: []byte("POST"), Path: []byte("/"), Length: 4, Minor: 1}
	ok := &httpmsg.Head{Status: 200, Fields: []httpmsg.Field{{Name: []byte("x-aether-outcome"), Value: []byte("200;-;POST;via_upstream")}}}
	busy := &httpmsg.Head{Status: 503, Fields: []httpmsg.Field{{Name: []byte("x-aether-outcome"), Value: []byte("503;-;POST;via_upstream")}}}
	body := []byte("body")
	run := func(again bool) {
		x := pool.Begin(silent{}, req, false, info, l.Now())
		rq, _ := x.User.(*reqState)
		if rq == nil {
			rq = &reqState{}
			x.User = rq
		}
		rq.v.Matched, rq.v.Backend = rule, backend
		rq.retries = 0
		o.start(x, c, rq)
		rq.tries(l)
		x.Forward(silent{})
		x.RequestData(body, true)
		if again {
			if !o.retryOnResponse(x, c, rq, busy, busy.Fields[0].Value) || !rq.wait.Armed() || rq.tryEnd.Armed() || rq.retrying == nil {
				t.Fatal("not sent again")
			}
			rq.tries(l)
			x.Forward(silent{})
		}
		if o.retryOnResponse(x, c, rq, ok, ok.Fields[0].Value) {
			t.Fatal("sent again")
		}
		rq.accepted(x, c, ok)
		if rq.retrying != nil {
			t.Fatal("still among those that are sent again")
		}
		x.ResponseHead(ok, true)
		rq.stop(st)
		if rq.whole.Armed() || rq.tryEnd.Armed() || rq.wait.Armed() || !x.Over() {
			t.Fatal("something is left")
		}
		pool.Release(x)
	}
	for name, again := range map[string]bool{"a request": false, "a request that is sent again": true} {
		if n := testing.AllocsPerRun(1000, func() { run(again) }); n != 0 {
			t.Errorf("%s: %v allocations, want 0", name, n)
		}
	}
}

// TestRefusedIsNotBounded: the streams that a GOAWAY excludes are sent again at once, all of
// them (case 67): only what waits to be sent again has a bound.
func TestRefusedIsNotBounded(t *testing.T) {
	k := newCaller(t, 1, nil)
	o, st, info := k.o, k.st, &k.c.info
	pool := &exchange.Pool{Service: silent{}}
	for i := range 3 * balance.MaxRetrying {
		for _, code := range []exchange.Code{exchange.Closed, exchange.Refused} {
			x := pool.Begin(silent{}, &httpmsg.Head{Method: []byte("GET"), Minor: 1}, true, info, st.l.Now())
			rq := &reqState{x: x, snap: k.snap}
			x.User = rq
			rq.v.Backend, rq.v.Set = &snapshot.Backend{Name: "shop/cart:8080"}, snapshot.NewEndpointSet(nil)
			x.Forward(silent{})
			want := code == exchange.Refused || i < balance.MaxRetrying
			if got := o.retryOnFailure(x, info.User.(*conn), rq, code); got != want {
				t.Fatalf("%s %d: sent again %v", code, i, got)
			}
			if code == exchange.Refused && !x.Answered() {
				t.Fatalf("%s %d: not sent at once", code, i) // there is no endpoint: that is the answer
			}
		}
	}
	if st.of(k.c.pod).table.Dest(k.b).Retry() {
		t.Error("there is a place left")
	}
}
