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

// TestColdBounds: one pod has 512 places to wait for rows in, the process 4,096; whoever finds none is refused at once,
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
		k.o.park(x, &c, rq, nil)
		return waiting{x, rq, down}
	}
	pods := make([]*Pod, 9)
	for i := range pods {
		pods[i] = &Pod{Context: t.Context()}
	}
	refused := func(w waiting) bool {
		return w.down.status == 503 && w.rq.cause == causeOverload
	}
	var all []waiting
	for range maxPodCold {
		all = append(all, park(pods[0]))
	}
	if w := park(pods[0]); !refused(w) {
		t.Errorf("one more of the pod's: %d, cause %q", w.down.status, w.rq.cause)
	}
	for _, p := range pods[1:8] {
		for range maxPodCold {
			all = append(all, park(p))
		}
	}
	if k.o.Waiting() != maxCold || wanted != maxCold {
		t.Fatalf("%d wait and %d asked, want %d", k.o.Waiting(), wanted, maxCold)
	}
	if w := park(pods[8]); !refused(w) {
		t.Errorf("one more of another pod's: %d, cause %q", w.down.status, w.rq.cause)
	}
	// One runs into the limit, one is left by its client.
	(*coldEnd)(all[0].rq).Run()
	if w := all[0]; w.down.status != 503 || w.rq.cause != causeAwait || w.rq.wait.Armed() {
		t.Errorf("expired: %d, cause %q", w.down.status, w.rq.cause)
	}
	all[1].x.RequestGone(exchange.Cancel)
	if k.o.Waiting() != maxCold-2 || pods[0].waiting.Load() != maxPodCold-2 || len(k.st.cold) != maxCold-2 {
		t.Errorf("%d wait, %d of the pod's", k.o.Waiting(), pods[0].waiting.Load())
	}
	if w := park(pods[0]); w.down.status != 0 {
		t.Errorf("a place is free: %d", w.down.status)
	}
	for i, want := range []uint64{0, 1, 1, 2} {
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
	k.o.park(x, k.c, rq, nil)
	if down.status != 503 || rq.cause != "no-endpoint" || k.o.Waiting() != 0 {
		t.Errorf("%d, cause %q", down.status, rq.cause)
	}
}
