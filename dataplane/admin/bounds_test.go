package admin

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"aether/controlplane/compile"
	"aether/controlplane/input"
	"aether/dataplane/model/modeltest"
)

// TestAnswersAreBounded: who asks for no number gets so many, and cannot ask for all there is.
func TestAnswersAreBounded(t *testing.T) {
	if f, err := ParseFilter(url.Values{}); err != nil || f.Lines != 50 {
		t.Errorf("/why: %d lines, %v", f.Lines, err)
	}
	if s, err := ParseSelection(url.Values{}); err != nil || s.Limit != 200 {
		t.Errorf("a table: %d lines, %v", s.Limit, err)
	}
	for n, want := range map[string]bool{"2000": true, "2001": false} {
		if _, err := ParseSelection(url.Values{"limit": {n}}); (err == nil) != want {
			t.Errorf("limit %s: %v", n, err)
		}
	}
}

// TestWaitIsBounded: /wait answers, though nothing comes, after the time asked for, or half a minute, and no time
// asked for is longer than ten.
func TestWaitIsBounded(t *testing.T) {
	for timeout, want := range map[string]time.Duration{"": 30 * time.Second, "&timeout=10m": 10 * time.Minute, "&timeout=10m1ns": 0} {
		synctest.Test(t, func(t *testing.T) {
			h := Handler(Config{Report: func() input.Report { return input.Report{} }, Metrics: http.NotFoundHandler(),
				Wait: func(ctx context.Context, _ bool, _ uint64) error { <-ctx.Done(); return ctx.Err() }})
			start := time.Now()
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest("GET", "http://localhost/wait?for=seq=9"+timeout, nil))
			code := 504
			if want == 0 {
				code = 400
			}
			if got := time.Since(start); got != want || w.Code != code {
				t.Errorf("%q: %d after %v, want %v", timeout, w.Code, got, want)
			}
		})
	}
}

// TestAdviceIsBounded: of a service of many ports, and among many names alike, a few are suggested.
func TestAdviceIsBounded(t *testing.T) {
	var mesh strings.Builder
	ports := make([]string, 20)
	for i := range ports {
		ports[i] = fmt.Sprintf("%d=tcp", 9000+i)
		fmt.Fprintf(&mesh, "service shop/cart%c 10.96.1.%d\npods shop/cart%c 8080 ip=10.1.1.%d\n", 'a'+i, i+1, 'a'+i, i+1)
	}
	fmt.Fprintf(&mesh, "service shop/many 10.96.0.10\npods shop/many %s\nlocal shop/web 8080\n", strings.Join(ports, ","))
	s, problems := compile.Compile(modeltest.Mesh(t, mesh.String()))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	ask := func(flow, request string) *Advice {
		e, err := Explain(s, flow, request)
		if err != nil || e.Advice == nil {
			t.Fatalf("%s: %+v, %v", flow, e, err)
		}
		return e.Advice
	}
	if a := ask("shop/web > 10.96.0.10:7070 http1 host=many", "GET many/"); len(a.Ports) != 20 || len(a.Try) != 6 {
		t.Errorf("%d ports, %d flows to try", len(a.Ports), len(a.Try))
	}
	if a := ask("shop/web > proxy http1 host=cartz:8080", "GET cartz:8080/"); len(a.Names) != 5 {
		t.Errorf("names alike: %q", a.Names)
	}
	x := strings.Repeat("x", 64)
	if label, long := distance(x[1:], x[1:]), distance(x, x); label != 0 || long != 63 {
		t.Errorf("of labels %d, of what is no label %d", label, long)
	}
}
