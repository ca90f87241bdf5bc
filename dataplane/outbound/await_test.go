package outbound

import (
	"testing"

	"aether/dataplane/decide"
	"aether/dataplane/exchange"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// deaf keeps no entry.
type deaf struct{}

func (deaf) Ended(*journal.Entry) {}

// TestColdBounds: the process has 4,096 places to wait for rows in, of which a pod has its part (package share); whoever finds none is refused at once,
// and a place is free again whichever way a wait ends.
func TestColdBounds(t *testing.T) {
	now := int64(0)
	k := newCaller(t, 1, func() int64 { return now })
	k.pool.Service, k.o.cfg.Journal = k.o, deaf{} // Done is what is tested, too
	wanted := 0
	k.o.cfg.Want = func(n model.ServiceName) {
		if n.String() != "shop/cart" {
			t.Errorf("%s is asked for", n)
		}
		wanted++
	}
	svc := &snapshot.Service{Name: model.ServiceName{Namespace: "shop", Name: "cart"}, Await: true}
	type waiting struct {
		x    *exchange.Exchange
		rq   *reqState
		down *answerOf
	}
	park := func(p *Pod) waiting {
		c := *k.c
		c.pod = p
		c.info.User = &c
		x, rq, down := k.request(t)
		x.Conn = &c.info
		rq.v = decide.Verdict{Action: decide.Await, Reason: decide.AwaitRows, Status: 503, Awaits: svc, Backend: k.b}
		k.o.awaitRows(x, &c, rq, nil, (*Outbound).decided)
		return waiting{x, rq, down}
	}
	greedy, other := &Pod{Context: t.Context()}, &Pod{Context: t.Context()}
	refused := func(w waiting) bool {
		return w.down.status == 503 && w.rq.cause == causeOverload
	}
	var all []waiting
	fill := func(p *Pod) (n int) {
		for {
			w := park(p)
			if refused(w) {
				return n
			}
			all = append(all, w)
			n++
		}
	}
	if n := fill(greedy); n != maxCold/2 {
		t.Errorf("one pod has %d places", n)
	}
	if n := fill(other); n != maxCold/8 {
		t.Errorf("and another beside it %d", n)
	}
	for n := 1; n > 0; {
		n = fill(&Pod{Context: t.Context()})
	}
	if k.o.Waiting() != maxCold || wanted != maxCold {
		t.Fatalf("%d wait and %d asked, want %d", k.o.Waiting(), wanted, maxCold)
	}
	overflows := k.o.Cold[coldOverflow].Value()
	// One runs into the limit, one is left by its client.
	(*waitTimer)(all[0].rq).Run()
	if w := all[0]; w.down.status != 503 || w.rq.cause != causeAwait || w.rq.wait.Armed() {
		t.Errorf("expired: %d, cause %q", w.down.status, w.rq.cause)
	}
	all[1].x.DownstreamClosed(exchange.Cancel)
	if k.o.Waiting() != maxCold-2 || greedy.waiting.Load() != maxCold/2-2 || len(k.st.waiting) != maxCold-2 {
		t.Errorf("%d wait, %d of the pod's", k.o.Waiting(), greedy.waiting.Load())
	}
	if w := park(&Pod{Context: t.Context()}); w.down.status != 0 {
		t.Errorf("a place is free: %d", w.down.status)
	}
	for i, want := range []uint64{0, 1, 1, overflows} {
		if got := k.o.Cold[i].Value(); got != want {
			t.Errorf("%s: %d, want %d", ColdResults[i], got, want)
		}
	}
}

// TestColdNobodyToAsk: where rows cannot be asked for, nobody waits for them.
func TestColdNobodyToAsk(t *testing.T) {
	k := newCaller(t, 1, nil)
	x, rq, down := k.request(t)
	rq.v = decide.Verdict{Action: decide.Await, Status: 503, Text: "its rows are not here\n", Awaits: &snapshot.Service{}}
	k.o.awaitRows(x, k.c, rq, nil, (*Outbound).decided)
	if down.status != 503 || rq.cause != "no-endpoint" || k.o.Waiting() != 0 {
		t.Errorf("%d, cause %q", down.status, rq.cause)
	}
}
