package admin

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"aether/controlplane/compile"
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
		State: func() (uint64, time.Time, []model.Problem) { return 7, time.Unix(0, 0), []model.Problem{problem} },
		Dump:  func() []byte { return []byte("kind: Pod\n") },
		Level: level,
	})
	get := func(path string) (int, string) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
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
		h.ServeHTTP(w, httptest.NewRequest(method, "/loglevel?level="+level, nil))
		if w.Code != code || !strings.Contains(w.Body.String(), says) {
			t.Errorf("%s %s: %d %s, want %d %q", method, level, w.Code, w.Body, code, says)
		}
	}
	set("PUT", "debug", 200, "debug\n")
	set("POST", "error", 200, "error\n")
	set("PUT", "loud", 400, `there is no "loud"; the levels are debug info warn error`)
	set("PUT", "info%2B3", 400, "the levels are")
	set("DELETE", "info", 405, "")
	if level.Level() != slog.LevelError {
		t.Errorf("the level is %s", level.Level())
	}
	want("/", 200, "/explain")
	want("/nothing", 404, "")
}
