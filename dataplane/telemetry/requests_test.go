package telemetry

import (
	"fmt"
	"io"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"aether/dataplane/journal"
	"aether/dataplane/model"
)

// scrape returns the lines of a family, without comments.
func scrape(t *testing.T, m *Metrics, family string) []string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	b, err := io.ReadAll(w.Body)
	if err != nil || w.Code != 200 {
		t.Fatalf("%d %v: %s", w.Code, err, b)
	}
	var out []string
	for l := range strings.Lines(string(b)) {
		if strings.HasPrefix(l, family+"{") || strings.HasPrefix(l, family+" ") {
			out = append(out, strings.TrimSpace(l))
		}
	}
	return out
}

func source(f func(*journal.Entry)) journal.Entry {
	e := journal.Entry{
		Dir: model.Captured, Request: true, Namespace: "shop", Workload: "web", Pod: "web-1", Loop: 1, Dst: netip.MustParseAddrPort("10.96.0.10:8080"),
		Action: "forward", Reason: "declared-http", Backend: "shop/cart:8080", Status: 200, Ended: "complete",
	}
	f(&e)
	e.Classify()
	return e
}

func destination(f func(*journal.Entry)) journal.Entry {
	e := journal.Entry{
		Dir: model.Inbound, Request: true, Namespace: "shop", Workload: "cart", Pod: "cart-1", Loop: 1, Dst: netip.MustParseAddrPort("0.0.0.0:8080"),
		Action: "deliver", Reason: "served-port", Peer: "spiffe://td/ns/shop/sa/web", Status: 200, Ended: "complete",
	}
	f(&e)
	e.Classify()
	return e
}

// TestPodsOfNamespaces: whose pods have their names in the counter, for a namespace and for the others (contract 10.9).
func TestPodsOfNamespaces(t *testing.T) {
	for _, tt := range []struct {
		all  bool
		of   map[string]bool
		want string // pods that are named
	}{
		{false, nil, ""}, {true, nil, "bill-1 web-1"}, {false, map[string]bool{"shop": true}, "web-1"}, {true, map[string]bool{"shop": false}, "bill-1"},
		{false, map[string]bool{"none": true}, ""},
	} {
		m := New(Config{})
		m.SetPods(tt.all, tt.of)
		for _, of := range [][2]string{{"shop", "web-1"}, {"pay", "bill-1"}} {
			e := source(func(e *journal.Entry) { e.Namespace, e.Pod = of[0], of[1] })
			m.Ended(&e)
		}
		families, err := m.reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, f := range families {
			for _, x := range f.GetMetric() {
				for _, l := range x.GetLabel() {
					if l.GetName() == "source_pod" && l.GetValue() != "" {
						got = append(got, l.GetValue())
					}
				}
			}
		}
		slices.Sort(got)
		if s := strings.Join(got, " "); s != tt.want {
			t.Errorf("%+v: %q, want %q", tt, s, tt.want)
		}
	}
}

// TestRequestLabels: the labels of contract 14.1, and its spelling of services.
func TestRequestLabels(t *testing.T) {
	for _, tt := range []struct {
		name string
		pods bool
		e    journal.Entry
		want string // reporter source source_pod > destination destination_pod port code flags
	}{
		{"source", false, source(func(*journal.Entry) {}), "source web  > cart.shop  8080 200 -"},
		{"source, proxy port", false, source(func(e *journal.Entry) { e.Dir = model.Proxy }), "source web  > cart.shop  8080 200 -"},
		{"source, refused", false, source(func(e *journal.Entry) {
			e.Backend, e.Action, e.Reason, e.Local, e.Status = "", "refuse", "port-mismatch", true, 421
		}), "source web  > unknown   421 -"},
		{"source, no connection", false, source(func(e *journal.Entry) { e.Local, e.Status, e.Cause = true, 503, "connect" }), "source web  > cart.shop  8080 503 UF"},
		{"source, the client went", false, source(func(e *journal.Entry) { e.Status, e.Ended, e.Code = 0, "client", "cancel" }), "source web  > cart.shop  8080 0 DC"},
		{"source, tried too often", false, source(func(e *journal.Entry) { e.Local, e.Status, e.Cause, e.Exhausted = true, 503, "refused", true }), "source web  > cart.shop  8080 503 UR,URX"},
		{"source, with pods", true, source(func(*journal.Entry) {}), "source web web-1 > cart.shop  8080 200 -"},
		{"destination", false, destination(func(*journal.Entry) {}), "destination web  > cart  8080 200 -"},
		{"destination, with pods", true, destination(func(*journal.Entry) {}), "destination web  > cart cart-1 8080 200 -"},
		{"destination, an ID of another form", false, destination(func(e *journal.Entry) { e.Peer = "spiffe://td/machine/7" }), "destination unknown  > cart  8080 200 -"},
		{"destination, an ID that goes on", false, destination(func(e *journal.Entry) { e.Peer = "spiffe://td/ns/a/sa/b/c" }), "destination unknown  > cart  8080 200 -"},
		{"destination, the application's 500", false, destination(func(e *journal.Entry) { e.Status = 500 }), "destination web  > cart  8080 500 -"},
		{"a probe", false, source(func(e *journal.Entry) { e.Action, e.Reason, e.Local, e.Status = "reply", "readyz", true, 200 }), ""},
		{"a connection", false, source(func(e *journal.Entry) { e.Request, e.Status = false, 0 }), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := New(Config{Pods: tt.pods})
			for range 3 {
				m.Ended(&tt.e)
			}
			want := ""
			if tt.want != "" {
				from, to, _ := strings.Cut(tt.want, " > ")
				f, g := strings.Split(from, " "), strings.Split(to, " ")
				want = fmt.Sprintf(`aether_requests_total{destination_pod=%q,destination_service=%q,port=%q,reporter=%q,response_code=%q,response_flags=%q,source_pod=%q,source_service=%q} 3`,
					g[1], g[0], g[2], f[0], g[3], g[4], f[2], f[1])
			}
			if got := strings.Join(scrape(t, m, "aether_requests_total"), "\n"); got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
}

// TestCase199: ten thousand requests with Hosts of somebody's invention make one series.
func TestCase199(t *testing.T) {
	m := New(Config{})
	for i := range 10_000 {
		e := source(func(e *journal.Entry) {
			e.Backend, e.Action, e.Reason, e.Local, e.Status = "", "refuse", "no-such-name", true, 404
		})
		e.Host.SetString(fmt.Sprintf("shop/junk-%d:80", i)) // as a backend is spelled
		e.Path.SetString(fmt.Sprintf("/%d", i))
		e.Method.SetString(fmt.Sprintf("M%d", i))
		e.Dst = netip.AddrPortFrom(e.Dst.Addr(), uint16(i))
		m.Ended(&e)
	}
	got := scrape(t, m, "aether_requests_total")
	if len(got) != 1 || !strings.HasSuffix(got[0], " 10000") || !strings.Contains(got[0], `destination_service="unknown",port=""`) {
		t.Errorf("%d series: %s", len(got), strings.Join(got[:min(3, len(got))], "\n"))
	}
	if got := strings.Join(scrape(t, m, "aether_series"), ""); got != "aether_series 1" {
		t.Error(got)
	}
}

// TestSeriesAreBounded: beyond maxSeries nothing is lost, and nothing grows but counts.
func TestSeriesAreBounded(t *testing.T) {
	m := New(Config{})
	const more = 5000
	for i := range maxSeries + more {
		e := source(func(e *journal.Entry) { e.Backend, e.Status = fmt.Sprintf("shop/s%d:80", i), 200+i%2 })
		m.Ended(&e)
	}
	if got := strings.Join(scrape(t, m, "aether_series"), ""); got != fmt.Sprintf("aether_series %d", maxSeries+1) {
		t.Error(got)
	}
	var over string
	for _, l := range scrape(t, m, "aether_requests_total") {
		if strings.Contains(l, `destination_service="overflow"`) {
			over += l
		}
	}
	if !strings.HasSuffix(over, fmt.Sprintf(" %d", more)) || !strings.Contains(over, `port="",reporter="source",response_code="200"`) {
		t.Error(over)
	}
}

// TestLoopsCountApart: loops, goroutines and scrapes at once lose nothing (with -race: and share nothing).
func TestLoopsCountApart(t *testing.T) {
	m := New(Config{})
	const loops, goroutines, each = 3, 3, 2000
	var wg sync.WaitGroup
	for i := range loops + goroutines {
		wg.Go(func() {
			for j := range each {
				e := source(func(e *journal.Entry) { e.Loop, e.Status = max(0, i-goroutines+1), 200+j%50 })
				m.Ended(&e)
			}
		})
	}
	for range 20 {
		scrape(t, m, "aether_requests_total")
	}
	wg.Wait()
	got := scrape(t, m, "aether_requests_total")
	if len(got) != 50 {
		t.Errorf("%d series, want 50", len(got))
	}
	for _, l := range got {
		if !strings.HasSuffix(l, fmt.Sprintf(" %d", (loops+goroutines)*each/50)) {
			t.Error(l)
		}
	}
}

func TestCounter(t *testing.T) {
	m := New(Config{})
	var a, b Counter
	m.Count("aether_test_total", "A test.", &a, "cause", "x")
	m.Count("aether_test_total", "A test.", &b, "cause", "y")
	a.Inc()
	b.Add(41)
	b.Inc()
	if got := strings.Join(scrape(t, m, "aether_test_total"), " "); got != `aether_test_total{cause="x"} 1 aether_test_total{cause="y"} 42` {
		t.Error(got)
	}
}
