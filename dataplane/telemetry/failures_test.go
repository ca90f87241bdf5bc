package telemetry

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode"
	"unicode/utf8"

	"aether/dataplane/journal"
	"aether/dataplane/model"
)

// lines is a writer that keeps what it is given; each Write must be a line.
type lines struct {
	mu sync.Mutex
	b  []string
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, string(b))
	return len(b), nil
}

func (l *lines) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.b...)
}

func failed(cause string) *journal.Entry {
	e := &journal.Entry{
		At: time.Date(2026, 5, 4, 3, 2, 1, 987_654_321, time.FixedZone("x", 3600)), Took: 1500 * time.Microsecond, Request: true,
		Dir: model.Captured, Namespace: "shop", Workload: "web", Pod: "web-1", Container: "c0ffee", Dst: netip.MustParseAddrPort("10.96.0.10:8080"),
		Action: "forward", Reason: "declared-http", Rule: "Service shop/cart", Backend: "shop/cart:8080",
		Endpoint: netip.MustParseAddrPort("10.1.2.10:18008"), Peer: "spiffe://td/ns/shop/sa/cart",
		Status: 503, Local: true, Ended: "complete", Cause: cause, BytesIn: 3, BytesOut: 5, Attempts: 2,
	}
	e.Host.SetString("cart:8080")
	e.Method.SetString("GET")
	e.Path.SetString("/items")
	e.RequestID.SetString("an-id")
	e.Classify()
	return e
}

// TestFailureLine: a line holds what contract 14.2 asks for, and package json reads it.
func TestFailureLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out lines
		f := NewFailures(FailureConfig{Out: &out})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { f.Run(ctx) })
		f.Ended(failed("connect"))
		good := journal.Entry{Request: true, Status: 404, Ended: "complete", Action: "forward"}
		good.Classify()
		f.Ended(&good)
		synctest.Wait()
		cancel()
		wg.Wait()
		got := out.all()
		if len(got) != 1 || !strings.HasSuffix(got[0], "}\n") {
			t.Fatalf("%d lines, want one: %q", len(got), got)
		}
		var m map[string]any
		if err := json.Unmarshal([]byte(got[0]), &m); err != nil {
			t.Fatalf("%v: %s", err, got[0])
		}
		for name, want := range map[string]any{
			"time": "2026-05-04T02:02:01.987Z", "msg": "failed", "kind": "request", "reporter": "source", "direction": "captured",
			"namespace": "shop", "pod": "web-1", "container": "c0ffee", "service_account": "web", "peer": "spiffe://td/ns/shop/sa/cart",
			"method": "GET", "authority": "cart:8080", "path": "/items", "status": 503.0, "flags": "UF",
			"details": "upstream_reset_before_response_started{remote_connection_failure}", "cause": "connect", "action": "forward",
			"reason": "declared-http", "rule": "Service shop/cart", "backend": "shop/cart:8080", "endpoint": "10.1.2.10:18008",
			"destination": "10.96.0.10:8080", "attempts": 2.0, "bytes_in": 3.0, "bytes_out": 5.0, "duration_ms": 1.5, "ended": "complete",
			"request_id": "an-id",
		} {
			if m[name] != want {
				t.Errorf("%s: %v, want %v", name, m[name], want)
			}
			delete(m, name)
		}
		if len(m) > 0 {
			t.Errorf("further members: %v", m)
		}
	})
}

// TestFailureAtASocket: the endpoint of a delivery to a Unix socket is that.
func TestFailureAtASocket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out lines
		f := NewFailures(FailureConfig{Out: &out})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { f.Run(ctx) })
		e := failed("connect")
		e.Endpoint, e.Socket = netip.AddrPort{}, "unix:app.sock"
		f.Ended(e)
		synctest.Wait()
		cancel()
		wg.Wait()
		if got := out.all(); len(got) != 1 || !strings.Contains(got[0], `"endpoint":"unix:app.sock"`) {
			t.Errorf("%q", got)
		}
	})
}

// TestFailureLinesAreRationed: a cause has its lines a second, and what was left out is
// said with its next line, or, where none comes, by a line of its own.
func TestFailureLinesAreRationed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out lines
		f := NewFailures(FailureConfig{Out: &out})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go f.Run(ctx)
		many := func(n int) {
			for range n {
				f.Ended(failed("connect"))
			}
			synctest.Wait()
		}
		many(failureRate + 7)
		f.Ended(failed("wrong-peer")) // another cause has a limit of its own
		synctest.Wait()
		if got := len(out.all()); got != failureRate+1 {
			t.Fatalf("%d lines, want %d", got, failureRate+1)
		}
		time.Sleep(time.Second) // virtual
		many(1)
		got := out.all()
		if last := got[len(got)-1]; !strings.Contains(last, `"suppressed":7}`) {
			t.Errorf("the next line says nothing of the 7 before it: %s", last)
		}
		many(failureRate + 4)
		time.Sleep(2 * failureSummary)
		synctest.Wait()
		got = out.all()
		last := got[len(got)-1]
		if !strings.Contains(last, `"msg":"suppressed"`) || !strings.Contains(last, `"cause":"connect"`) || !strings.Contains(last, `"suppressed":5`) {
			t.Errorf("nothing is said of the last 5: %s", last)
		}
		if f.Suppressed.Value() != 12 || f.Dropped.Value() != 0 {
			t.Errorf("%d suppressed and %d dropped, want 12 and 0", f.Suppressed.Value(), f.Dropped.Value())
		}
	})
}

// stuck is a writer that never returns until it is let go.
type stuck struct{ entered, letGo chan struct{} }

func (s *stuck) Write(b []byte) (int, error) {
	s.entered <- struct{}{}
	<-s.letGo
	return len(b), nil
}

// TestFailureQueueIsBounded: while the log cannot be written nobody waits, and what does
// not fit is counted.
func TestFailureQueueIsBounded(t *testing.T) {
	out := &stuck{make(chan struct{}, 2*failureQueue), make(chan struct{})}
	f := NewFailures(FailureConfig{Out: out})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { f.Run(ctx) })
	f.Ended(failed("first"))
	<-out.entered // Run waits in Write: the queue is empty, and nobody takes from it
	for i := range failureQueue + 3 {
		e := failed("connect")
		e.Pod = fmt.Sprint(i)
		f.Ended(e)
	}
	if got := f.Dropped.Value(); got != 3 {
		t.Errorf("%d dropped, want 3", got)
	}
	close(out.letGo)
	cancel()
	wg.Wait()
}

// TestAPodHasItsShareOfTheFailureLog: beside a pod that fails in every way without end, another's failures are all
// in the log, while it is written and while it cannot be.
func TestAPodHasItsShareOfTheFailureLog(t *testing.T) {
	out := &stuck{make(chan struct{}, 2*failureQueue), make(chan struct{})}
	f := NewFailures(FailureConfig{Out: out, Now: func() time.Time { return time.Unix(1, 0) }})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { f.Run(ctx) })
	f.Ended(failed("first"))
	<-out.entered // Run waits in Write
	evil := func(cause int) *journal.Entry {
		e := failed(fmt.Sprint(cause))
		e.Namespace, e.Pod = "bad", "evil-1"
		return e
	}
	for i := range 2000 {
		f.Ended(evil(i % 100))
	}
	dropped := f.Dropped.Value()
	if want := uint64(100*failureRate - failureShare); dropped != want {
		t.Errorf("%d lines of the greedy pod dropped, want %d: all but its share", dropped, want)
	}
	for range failureRate {
		f.Ended(failed("50")) // of a cause that the other has spent
	}
	if got := f.Dropped.Value() - dropped; got != 0 {
		t.Errorf("%d of the other's %d failures dropped", got, failureRate)
	}
	close(out.letGo)
	for range failureShare + failureRate {
		<-out.entered
	}
	f.mu.Lock()
	if len(f.waiting) != 0 {
		t.Errorf("%v wait, and all is written", f.waiting)
	}
	f.mu.Unlock()
	f.Ended(evil(100)) // and its share is free again
	<-out.entered
	cancel()
	wg.Wait()
}

// slow is a writer that takes its time.
type slow struct{ lines }

func (s *slow) Write(b []byte) (int, error) {
	<-time.After(10 * time.Millisecond) // virtual
	return s.lines.Write(b)
}

// TestFailureDrainIsBounded: what waits when the process ends is written for a second, and no longer, however slow the log is.
func TestFailureDrainIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out slow
		f := NewFailures(FailureConfig{Out: &out})
		for i := range failureQueue {
			e := failed("connect")
			e.Pod = fmt.Sprint(i)
			f.Ended(e)
		}
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		var wg sync.WaitGroup
		wg.Go(func() { f.Run(ctx) })
		time.Sleep(105 * time.Millisecond) // in the midst of the eleventh line
		cancel()
		wg.Wait()
		// Beside the second, Run may take some more lines before it sees that it is to end: it draws among what is there.
		if took, n := time.Since(start), len(out.all()); n < 100 || n >= failureQueue || took < time.Second || took > 2*time.Second {
			t.Errorf("%d of %d lines, written in %v", n, failureQueue, took)
		}
	})
}

func TestFailureAllocatesNothing(t *testing.T) {
	f := NewFailures(FailureConfig{Now: func() time.Time { return time.Unix(1, 0) }})
	e := failed("connect")
	f.Ended(e)
	if n := testing.AllocsPerRun(100, func() { f.Ended(e) }); n != 0 {
		t.Errorf("%v allocations an entry, want 0", n)
	}
	good := journal.Entry{Request: true, Status: 200, Ended: "complete"}
	if n := testing.AllocsPerRun(100, func() { f.Ended(&good) }); n != 0 {
		t.Errorf("%v allocations an entry that did not fail, want 0", n)
	}
}

// FuzzFailureText: whatever bytes a peer sends, a line stays one line of valid JSON, says
// what package json would say, and holds nothing that a terminal acts upon.
func FuzzFailureText(f *testing.F) {
	for _, s := range []string{"/a\"b\\c", "\r\n{\"msg\":\"forged\"}", "\x1b[2J\x07", "\x9b2J", "caf\u00e9 \U0001f600", "\u202e\u2028\ufeff", "\xff\xc3(\xe2\x82", "\U000e0001", "</script>"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		b := text([]byte(`{"a":1`), "v", s)
		b = append(b, '}')
		if !utf8.Valid(b) || bytes.ContainsFunc(b, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Fatalf("%q", b)
		}
		var m struct{ V string }
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatalf("%v: %q", err, b)
		}
		if want := string([]rune(s)); m.V != want { // a byte that is no UTF-8 becomes U+FFFD
			t.Fatalf("%q, want %q", m.V, want)
		}
	})
}
