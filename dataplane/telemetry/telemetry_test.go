package telemetry

import (
	"bytes"
	"io"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"aether/dataplane/journal"
	"aether/dataplane/model"
)

func TestMetrics(t *testing.T) {
	m := New(Config{})
	m.Gauge("aether_test", "A test.", func() float64 { return 7 })
	e := journal.Entry{
		Dir: model.Captured, Request: true, Action: "forward", Reason: "declared-http", Status: 204, Ended: "complete",
		BytesIn: 3, BytesOut: 5, Took: 2 * time.Millisecond,
	}
	e.Host.SetString("secret.host")
	m.Ended(&e)
	m.Ended(&e)
	m.Ended(&journal.Entry{Dir: model.Captured, Request: true, Action: "forward", Status: 503, Cause: "no-certificate"})
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	b, _ := io.ReadAll(w.Body)
	for _, want := range []string{
		`aether_ends_total{action="forward",code="2xx",direction="captured",ended="complete",kind="request",reason="declared-http"} 2`,
		`aether_bytes_total{direction="captured",flow="in",kind="request"} 6`,
		`aether_bytes_total{direction="captured",flow="out",kind="request"} 10`,
		`aether_duration_seconds_count{direction="captured",kind="request"} 3`,
		`aether_failures_total{cause="no-certificate",direction="captured",kind="request"} 1`,
		`aether_test 7`,
	} {
		if !strings.Contains(string(b), want) {
			t.Errorf("no %s", want)
		}
	}
	if bytes.Contains(b, []byte("secret.host")) {
		t.Error("a host became a label")
	}
}

func TestCountingAllocatesNothing(t *testing.T) {
	m := New(Config{})
	e := journal.Entry{Dir: model.Inbound, Request: true, Action: "deliver", Reason: "served-port", Status: 200, Ended: "complete"}
	e.Loop, e.Workload, e.Peer = 1, "cart", "spiffe://td/ns/shop/sa/web"
	m.Ended(&e)
	if n := testing.AllocsPerRun(1000, func() { m.Ended(&e) }); n != 0 {
		t.Errorf("%v allocations an entry, want 0", n)
	}
}

func BenchmarkEnded(b *testing.B) {
	m := New(Config{})
	e := journal.Entry{
		Dir: model.Captured, Request: true, Action: "forward", Reason: "declared-http", Status: 200, Ended: "complete", Loop: 1,
		Workload: "web", Backend: "shop/cart:8080", BytesOut: 12, Took: time.Millisecond,
	}
	b.ReportAllocs()
	for b.Loop() {
		m.Ended(&e)
	}
}

func TestQuiet(t *testing.T) {
	var b bytes.Buffer
	now := time.Unix(1000, 0)
	q := NewLogLimiter(slog.New(slog.NewTextHandler(&b, nil)), time.Minute, func() time.Time { return now })
	for range 5 {
		q.Warn("a", "cause a")
		q.Warn("b", "cause b")
	}
	if n := strings.Count(b.String(), "\n"); n != 2 {
		t.Fatalf("%d lines, want 2:\n%s", n, b.String())
	}
	now = now.Add(time.Minute)
	b.Reset()
	q.Warn("a", "cause a")
	if s := b.String(); !strings.Contains(s, "repeated=4") || strings.Count(s, "\n") != 1 {
		t.Errorf("%s", s)
	}
}
