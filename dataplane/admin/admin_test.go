package admin

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"
	"unicode"

	"aether/controlplane/compile"
	"aether/controlplane/input"
	"aether/dataplane"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/telemetry"
	"aether/mtls"
)

// nobody is an mtls.Source that has no certificate for anybody.
type nobody struct{}

func (nobody) Watch(ctx context.Context, _ mtls.Ref, _ func(*mtls.SVID, error)) error {
	<-ctx.Done()
	return nil
}

// report is of a loop with two sources, of which one is away.
func report(problems ...model.Problem) input.Report {
	long := time.Now().Add(-time.Hour)
	return input.Report{
		Seq: 7, At: long, Problems: problems, ProblemsTotal: len(problems), StaleSince: &long,
		Sources: []input.SourceReport{
			{Name: "file", Synced: true, Connected: true, Since: long, Changed: long, SilentMS: 3600_000, Counts: input.Counts{Services: 2, Endpoints: 5, Routes: 1}},
			{Name: "registrar", Restored: true, Err: "connection refused", Since: long, Counts: input.Counts{Services: 3, Endpoints: 9}},
		},
		LastGood: &input.LastGoodReport{Path: "/run/last-good", Written: long, AgeMS: 3600_000, Bytes: 2048, Restored: true},
	}
}

// TestStatusText is what people read of a node that was started while its registrar is away.
func TestStatusText(t *testing.T) {
	r := report(model.Problem{Object: "Service shop/x", Where: "x.yaml:1", Reason: "no"})
	var b strings.Builder
	WriteStatus(&b, &Status{Report: r, Pods: []dataplane.PodStatus{{Pod: "shop/web-1", Identity: "spiffe://td/ns/shop/sa/web"}}}, r.At.Add(time.Hour))
	for _, want := range []string{
		"state 7, since 1h0m0s",
		"STALE: not all is known to be true since " + r.At.UTC().Format(time.RFC3339) + " (1h0m0s)",
		"file       connected  1h0m0s  2         5",
		"registrar  restored   1h0m0s  3         9",
		"registrar: connection refused",
		"last good state /run/last-good: of 1h0m0s ago, 2 KiB; this process started with it",
		"shop/web-1",
		"1 problem:",
		"Service shop/x (x.yaml:1): no",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing in\n%s", want, b.String())
		}
	}
}

func TestAdmin(t *testing.T) {
	ring := journal.NewRing(4)
	node, err := dataplane.New(dataplane.Config{Identities: nobody{}, Journal: ring})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- node.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	problem := model.Problem{Object: "Service shop/x", Where: "x.yaml:1", Reason: "no"}
	level := new(slog.LevelVar)
	h := Handler(Config{
		Node: node, Why: ring, Metrics: telemetry.New(telemetry.Config{}).Handler(),
		Report: func() input.Report { return report(problem) },
		Wait: func(ctx context.Context, synced bool, seq uint64) error {
			if synced || seq > 7 {
				<-ctx.Done()
			}
			return ctx.Err()
		},
		Dump:  func() []byte { return []byte("kind: Pod\n") },
		Level: level,
	})
	get := func(path string) (int, string) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "http://localhost:9901"+path, nil))
		b, _ := io.ReadAll(w.Body)
		return w.Code, string(b)
	}
	want := func(path string, code int, has string) {
		t.Helper()
		if c, b := get(path); c != code || !strings.Contains(b, has) {
			t.Errorf("%s: %d %s, want %d %q", path, c, b, code, has)
		}
	}
	want("/ready", 503, "no state")
	snap, _ := compile.Compile(modeltest.Mesh(t, `
service shop/cart 10.96.0.10
pods shop/cart 8080
local shop/web 8080
`))
	node.Apply(snap.WithVersion(7), nil)
	for code := 0; code != 200; { // Run has not got far enough yet
		code, _ = get("/ready")
	}
	flow := url.QueryEscape("shop/web > 10.96.0.10:8080 http1 host=cart:9090")
	want("/explain?flow="+flow+"&request="+url.QueryEscape("GET cart:9090/"), 200, "refuse 421 (port-mismatch Service shop/cart)")
	want("/explain?flow=nonsense", 400, "")
	want("/explain?flow="+flow+"&request=nonsense", 400, "")
	want("/snapshot", 200, "kind: Pod")
	want("/metrics", 200, "go_goroutines")
	want("/debug/pprof/", 200, "goroutine")
	want("/why?n=0", 400, "positive")
	ring.Ended(&journal.Entry{Action: "forward", Reason: "declared-http", Rule: "first"})
	ring.Ended(&journal.Entry{Action: "refuse", Reason: "port-mismatch", Rule: "second"})
	want("/why", 200, "first")
	if _, b := get("/why?bad=1"); strings.Contains(b, "first") || !strings.Contains(b, "second") {
		t.Errorf("/why?bad=1: %s", b)
	}
	want("/why?reason=port-mismatch", 200, "second")
	want("/why?reason=nonsense", 400, "the reasons are ")
	want("/why?pod=web", 400, "not namespace/name")
	want("/why?%zz", 400, "query: ")
	want("/why?n=1&format=json", 200, `"reason":"port-mismatch"`)
	want("/explain?format=json&flow="+flow+"&request="+url.QueryEscape("GET cart:9090/"), 200, `"advice":{"text":`)
	_, b := get("/status")
	var s Status
	if err := json.Unmarshal([]byte(b), &s); err != nil || s.Seq != 7 || len(s.Problems) != 1 || s.Problems[0] != problem || len(s.Loops) == 0 {
		t.Errorf("/status: %v %s", err, b)
	}
	if s.ProblemsTotal != 1 || len(s.Sources) != 2 || s.Sources[1].Err != "connection refused" || s.LastGood.Bytes != 2048 {
		t.Errorf("/status: %s", b)
	}
	want("/status?format=text", 200, "state 7, since ")
	want("/wait?for=seq=7", 200, "7\n")
	want("/wait?for=seq=8&timeout=1ms", 504, "not within 1ms: 1 of 2 sources has not been heard yet: registrar (connection refused)")
	want("/wait?for=synced&timeout=1ms", 504, "registrar")
	for _, q := range []string{"", "?for=", "?for=seq", "?for=seq=", "?for=seq=-1", "?for=seq=x", "?for=synced&timeout=-1s", "?for=synced&timeout=1h", "?for=synced&timeout=x"} {
		want("/wait"+q, 400, "")
	}
	want("/connections", 200, "POD  ROLE  CLIENT")
	want("/connections?format=json", 200, `{"connections":[],"total":0}`)
	want("/sessions?limit=2000&format=json", 200, `{"sessions":[],"total":0}`)
	want("/certs?pod=shop/web-1&format=json", 200, `{"certificates":[],"total":0}`)
	want("/endpoints?format=json", 200, `{"endpoints":[],"total":0}`)
	for _, path := range []string{"/connections", "/sessions", "/endpoints", "/certs"} {
		want(path+"?limit=0", 400, `limit: "0" is no number from 1 to 2000`)
		want(path+"?limit=2001", 400, `limit: "2001" is no number`)
		want(path+"?pod=web", 400, `pod: "web" is not namespace/name`)
	}
	want("/loglevel", 200, "info\n")
	set := func(method, level string, code int, says string) {
		t.Helper()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, "http://127.0.0.1:9901/loglevel?level="+level, nil))
		if w.Code != code || !strings.Contains(w.Body.String(), says) {
			t.Errorf("%s %s: %d %s, want %d %q", method, level, w.Code, w.Body, code, says)
		}
	}
	set("PUT", "debug", 200, "debug\n")
	set("POST", "warn", 405, "") // a page may send one elsewhere
	set("PUT", "error", 200, "error\n")
	set("PUT", "loud", 400, `there is no "loud"; the levels are debug info warn error`)
	set("PUT", "info%2B3", 400, "the levels are")
	set("DELETE", "info", 405, "")
	if level.Level() != slog.LevelError {
		t.Errorf("the level is %s", level.Level())
	}
	want("/", 200, "/explain")
	want("/nothing", 404, "")
}

// TestAdminIsPlain: whatever peers and configurations have in their texts, no answer holds
// anything that a terminal acts upon, as text and as JSON.
func TestAdminIsPlain(t *testing.T) {
	const hostile = "\x1b[2J\u009b2J\u202e\u2066\u200b\u2028\x07\x7f\xff"
	ring := journal.NewRing(4)
	node, err := dataplane.New(dataplane.Config{Identities: nobody{}, Journal: ring})
	if err != nil {
		t.Fatal(err)
	}
	h := Handler(Config{
		Node: node, Why: ring, Metrics: http.NotFoundHandler(),
		Report: func() input.Report {
			return report(model.Problem{Object: "Service " + hostile, Where: hostile, Reason: hostile})
		},
		Wait: func(context.Context, bool, uint64) error { return errors.New(hostile) },
	})
	snap, _ := compile.Compile(modeltest.Mesh(t, `
service shop/cart 10.96.0.10
pods shop/cart 8080
local shop/web 8080
`))
	node.Apply(snap.WithVersion(7), nil)
	e := journal.Entry{Request: true, Namespace: "shop", Workload: "web", Action: "refuse", Reason: "port-mismatch", Rule: hostile, Backend: hostile, Cause: hostile, Peer: hostile}
	e.Host.SetString(hostile)
	e.Path.SetString("/" + hostile)
	e.Method.SetString(hostile)
	e.Outcome.SetString(hostile)
	ring.Ended(&e)
	q := url.QueryEscape(hostile)
	flow := url.QueryEscape(`shop/web > 10.96.0.10:8080 http1 host="cart\u202e\u009b:9090"`)
	for _, path := range []string{
		"/", "/ready", "/status", "/status?format=text", "/why", "/why?format=json", "/why?reason=" + q, "/why?n=" + q, "/why?pod=" + q, "/wait?for=" + q,
		"/explain?flow=" + flow, "/explain?format=json&flow=" + flow, "/explain?flow=" + q, "/explain?flow=" + flow + "&request=" + q,
		"/explain?flow=" + flow + "&request=" + url.QueryEscape(`GET "cart:9090/\u009b\u202e"`),
		"/connections?limit=" + q, "/connections?pod=" + q, "/sessions?pod=" + q, "/endpoints?pod=" + q, "/certs?pod=" + q,
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "http://localhost"+path, nil))
		b := w.Body.String()
		if i := strings.IndexFunc(b, func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' && r != '\t' }); b == "" || i >= 0 || strings.Contains(b, "\xff") {
			t.Errorf("%s: %d, and at byte %d of %q", path, w.Code, i, b)
		}
		if strings.HasPrefix(w.Header().Get("Content-Type"), "application/json") && !json.Valid(w.Body.Bytes()) {
			t.Errorf("%s is no JSON any more: %s", path, b)
		}
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", "http://localhost/why", nil))
	if !strings.Contains(w.Body.String(), `/\u001b[2J\u009b2J\u202e`) {
		t.Errorf("what was there is not shown: %s", w.Body)
	}
}
