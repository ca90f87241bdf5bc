package journal

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/dataplane/model"
)

func TestRing(t *testing.T) {
	r := NewRing(4)
	if got := r.Last(10, false); len(got) != 0 {
		t.Fatalf("an empty ring has %d entries", len(got))
	}
	for i := range 10 {
		e := Entry{Action: "forward", Status: 200}
		if i%3 == 0 {
			e.Action = "refuse"
		}
		e.Rule = fmt.Sprint(i)
		r.Ended(&e)
	}
	rules := func(es []Entry) (s string) {
		for _, e := range es {
			s += e.Rule
		}
		return s
	}
	if got := rules(r.Last(3, false)); got != "987" {
		t.Errorf("the last three: %s, want 987", got)
	}
	if got := rules(r.Last(100, false)); got != "9876" {
		t.Errorf("all that is kept: %s, want 9876", got)
	}
	// Ordinary traffic does not push refusals out.
	if got := rules(r.Last(100, true)); got != "9630" {
		t.Errorf("refusals: %s, want 9630", got)
	}
}

func TestBad(t *testing.T) {
	for _, tt := range []struct {
		e    Entry
		want bool
	}{
		{Entry{Action: "forward", Status: 200, Ended: "complete"}, false},
		{Entry{Action: "forward", Status: 404, Ended: "complete"}, false}, // the application's own
		{Entry{Action: "forward", Status: 503, Ended: "complete"}, true},
		{Entry{Action: "refuse", Status: 421, Ended: "complete"}, true},
		{Entry{Action: "forward", Status: 200, Ended: "server"}, true},
		{Entry{Action: "passthrough", Ended: "client"}, false},
	} {
		if got := tt.e.Bad(); got != tt.want {
			t.Errorf("%s: bad %v, want %v", tt.e.String(), got, tt.want)
		}
	}
}

// The flow in a line can be given to explain.
func TestStringHoldsAFlow(t *testing.T) {
	e := Entry{
		At: time.Unix(0, 0), Request: true, Dir: model.Captured, Namespace: "shop", Workload: "web",
		Dst: netip.MustParseAddrPort("10.96.0.10:8080"), Sniff: model.SniffHTTP11, Action: "forward", Reason: "declared-http",
		Rule: "Service shop/cart", Backend: "shop/cart:8080", Endpoint: netip.MustParseAddrPort("10.1.2.10:18008"), Status: 200,
		BytesOut: 12, Attempts: 2, Ended: "complete",
	}
	e.Method.SetString("GET")
	e.Host.SetString("cart:8080")
	e.Path.SetString("/items")
	e.Outcome.SetString("200;-;GET;via_upstream")
	want := "00:00:00.000 shop/web > 10.96.0.10:8080 http1 GET cart:8080/items 200 forward shop/cart:8080 " +
		"(declared-http Service shop/cart) via 10.1.2.10:18008 0s in 0 out 12 attempts 2 outcome 200;-;GET;via_upstream"
	if got := e.String(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	flow := strings.TrimPrefix(want[:strings.Index(want, " GET")], "00:00:00.000 ")
	if f, err := model.ParseFlow(flow); err != nil || f.Dst.String() != "10.96.0.10:8080" {
		t.Errorf("%q: %v %v", flow, f, err)
	}
}

// A delivery to a Unix socket is shown by it, as one to an endpoint is by its address.
func TestStringHoldsASocket(t *testing.T) {
	e := Entry{At: time.Unix(0, 0), Request: true, Dir: model.Inbound, Namespace: "shop", Workload: "cart", Action: "deliver", Reason: "served-port", Rule: "Pod shop/cart-1",
		Socket: "unix:app.sock", Status: 200, Ended: "complete"}
	if got := e.String(); !strings.Contains(got, " 200 deliver (served-port Pod shop/cart-1) via unix:app.sock 0s") {
		t.Errorf("%s", got)
	}
}

func TestTextIsCut(t *testing.T) {
	var x Text
	if !x.Empty() {
		t.Error("a new text is not empty")
	}
	x.Set([]byte(strings.Repeat("a", 500)))
	if got := x.String(); got != strings.Repeat("a", 79) {
		t.Errorf("%d bytes kept", len(got))
	}
}

func TestKeepingAllocatesNothing(t *testing.T) {
	o := Tee{NewRing(8), NewRing(8)}
	e := Entry{Action: "refuse"}
	if n := testing.AllocsPerRun(1000, func() { o.Ended(&e) }); n != 0 {
		t.Errorf("%v allocations an entry, want 0", n)
	}
}

func TestConcurrent(t *testing.T) {
	r := NewRing(16)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 1000 {
				r.Ended(&Entry{Status: i})
				r.Last(4, false)
			}
		})
	}
	wg.Wait()
	if got := len(r.Last(100, false)); got != 16 {
		t.Errorf("%d entries, want 16", got)
	}
}

// TestLogShare: off it says nothing, of successes it has the share that it was told,
// evenly, and failures it has all.
func TestLogShare(t *testing.T) {
	var out bytes.Buffer
	l := NewLog(slog.New(slog.NewTextHandler(&out, nil)))
	count := func(e *Entry, n int) int {
		out.Reset()
		for range n {
			l.Ended(e)
		}
		return strings.Count(out.String(), "\n")
	}
	good, bad := &Entry{Request: true, Status: 200, Action: "forward"}, &Entry{Request: true, Status: 503, Action: "forward"}
	if n := count(bad, 10); n != 0 {
		t.Errorf("off: %d", n)
	}
	for _, tt := range []struct {
		share uint8
		want  int
	}{{100, 1000}, {0, 0}, {1, 10}, {33, 330}, {250, 1000}} {
		l.Set(Share{true, tt.share}, nil)
		if n := count(good, 1000); n != tt.want {
			t.Errorf("%d %%: %d of 1000", tt.share, n)
		}
		if n := count(bad, 10); n != 10 {
			t.Errorf("%d %%: %d of 10 failures", tt.share, n)
		}
	}
	l.Set(Share{false, 100}, nil)
	if n := count(bad, 10); n != 0 {
		t.Errorf("off again: %d", n)
	}
	// A namespace has its own share, and counts its own successes (contract 10.9).
	shop := *good
	shop.Namespace = "shop"
	for _, tt := range []struct {
		all, shop        Share
		wantAll, wantOwn int
	}{{Share{}, Share{true, 100}, 0, 100}, {Share{true, 100}, Share{false, 100}, 100, 0}, {Share{true, 10}, Share{true, 50}, 10, 50}} {
		l.Set(tt.all, map[string]Share{"shop": tt.shop})
		mine, others := 0, 0
		for range 100 {
			mine += count(&shop, 1)
			others += count(good, 1)
		}
		if mine != tt.wantOwn || others != tt.wantAll {
			t.Errorf("%+v: %d of its own and %d of others", tt, mine, others)
		}
	}
}
