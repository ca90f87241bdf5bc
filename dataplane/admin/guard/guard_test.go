package guard

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// TestWhoMayAsk: tools on the machine, by any of its addresses that they reach the admin by, and no page of another site.
func TestWhoMayAsk(t *testing.T) {
	asked := 0
	h := Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked++ }))
	for _, tt := range []struct {
		name, local, host string
		fields            [2]string // names and values in turn
		want              string    // part of the refusal; empty: it is answered
	}{
		{name: "loopback", host: "127.0.0.1:9901"},
		{name: "loopback without a port", host: "127.0.0.1"},
		{name: "another loopback address", host: "127.8.0.1:9901"},
		{name: "IPv6 loopback", host: "[::1]:9901"},
		{name: "IPv6 loopback without a port", host: "[::1]"},
		{name: "mapped loopback", host: "[::ffff:127.0.0.1]:9901"},
		{name: "localhost", host: "localhost:9901"},
		{name: "localhost in capitals, and rooted", host: "LocalHost.:9901"},
		{name: "a forwarded port", host: "localhost:18888"},
		{name: "HTTP/1.0 without a Host", host: ""},
		{name: "the address that was dialled", local: "10.1.2.3:9902", host: "10.1.2.3:9902"},
		{name: "an IPv6 address that was dialled", local: "[fd00::1]:9902", host: "[fd00::1]:9902"},
		{name: "a link-local address that was dialled", local: "[fe80::1%eth0]:9902", host: "[fe80::1]:9902"},
		{name: "the address itself, in a browser", host: "127.0.0.1:9901", fields: [2]string{"Sec-Fetch-Site", "none"}},
		{name: "a page of the admin's own", host: "127.0.0.1:9901", fields: [2]string{"Sec-Fetch-Site", "same-origin"}},
		{name: "the admin's own origin", host: "127.0.0.1:9901", fields: [2]string{"Origin", "http://127.0.0.1:9901"}},

		{name: "a name of somebody's", host: "evil.example:9901", want: `host "evil.example:9901" is not this admin's`},
		{name: "a name that begins like ours", host: "localhost.evil.example", want: "not this admin's"},
		{name: "a name that begins like an address", host: "127.0.0.1.evil.example", want: "not this admin's"},
		{name: "a name below ours", host: "a.localhost", want: "not this admin's"},
		{name: "another address", local: "10.1.2.3:9902", host: "10.1.2.4:9902", want: "not this admin's"},
		{name: "all addresses", host: "0.0.0.0:9901", want: "not this admin's"},
		{name: "a name that was made to mean this machine, with its own origin", host: "evil.example:9901", fields: [2]string{"Origin", "http://evil.example:9901"}, want: "not this admin's"},
		{name: "an origin that begins like ours", host: "127.0.0.1:9901", fields: [2]string{"Origin", "http://127.0.0.1:9901.evil.example"}, want: "Origin"},
		{name: "a number", host: "2130706433", want: "not this admin's"},
		{name: "bytes for a terminal", host: "\u009b2J", want: `\u009b2J`},
		{name: "cross-site", host: "127.0.0.1:9901", fields: [2]string{"Sec-Fetch-Site", "cross-site"}, want: "Sec-Fetch-Site"},
		{name: "another port of this machine", host: "127.0.0.1:9901", fields: [2]string{"Sec-Fetch-Site", "same-site"}, want: "Sec-Fetch-Site"},
		{name: "another origin", host: "127.0.0.1:9901", fields: [2]string{"Origin", "http://evil.example"}, want: `"http://evil.example"`},
		{name: "another port's origin", host: "127.0.0.1:9901", fields: [2]string{"Origin", "http://127.0.0.1:80"}, want: "Origin"},
		{name: "an origin that is hidden", host: "127.0.0.1:9901", fields: [2]string{"Origin", "null"}, want: "Origin"},
		{name: "no origin", host: "127.0.0.1:9901", fields: [2]string{"Origin", ""}, want: "Origin"},
		{name: "a broken origin", host: "127.0.0.1:9901", fields: [2]string{"Origin", "http://[::1"}, want: "Origin"},
	} {
		for _, method := range []string{"GET", "PUT"} {
			r := httptest.NewRequest(method, "/loglevel?level=debug", nil)
			r.Host = tt.host
			if tt.fields[0] != "" {
				r.Header.Set(tt.fields[0], tt.fields[1])
			}
			if tt.local != "" {
				a, err := net.ResolveTCPAddr("tcp", tt.local)
				if err != nil {
					t.Fatal(err)
				}
				r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(a)))
			}
			asked = 0
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if answered := tt.want == ""; asked != map[bool]int{true: 1}[answered] || answered != (w.Code == 200) || !answered && w.Code != 403 || !strings.Contains(w.Body.String(), tt.want) {
				t.Errorf("%s: %s: %d %q, asked %d times, want %q", tt.name, method, w.Code, w.Body, asked, tt.want)
			}
		}
	}
}

// TestAListenersOwnAddress: a server has the address that a client dialled, and answers that Host.
func TestAListenersOwnAddress(t *testing.T) {
	srv := httptest.NewServer(Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	defer srv.Close()
	for host, want := range map[string]int{"": 200, "localhost": 200, "evil.example": 403} {
		r, err := http.NewRequest("GET", srv.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = host
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("host %q: %d, want %d", host, res.StatusCode, want)
		}
	}
}

// TestProfilesAreBounded: in time, and one at a time.
func TestProfilesAreBounded(t *testing.T) {
	mux := http.NewServeMux()
	Profiles(mux)
	srv := httptest.NewServer(mux)
	defer srv.Close()
	get := func(ctx context.Context, path string) (int, string) {
		r, err := http.NewRequestWithContext(ctx, "GET", srv.URL+"/debug/pprof/"+path, nil)
		if err != nil {
			t.Error(err)
			return 0, ""
		}
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			return 0, err.Error()
		}
		defer res.Body.Close()
		b, _ := io.ReadAll(res.Body)
		return res.StatusCode, string(b)
	}
	for _, kind := range []string{"profile", "trace", "heap", "goroutine", "mutex"} {
		for _, seconds := range []string{"61", "60.001", "1e9", "-1", "0", "NaN", "Inf", "long"} {
			if code, b := get(t.Context(), kind+"?seconds="+seconds); code != 400 || !strings.Contains(b, "60 at most") {
				t.Errorf("%s of %s seconds: %d %s", kind, seconds, code, b)
			}
		}
	}
	for path, want := range map[string]string{"": "goroutine", "cmdline": "test", "goroutine?debug=1": "goroutine profile", "symbol": "num_symbols", "nothing": "Unknown profile"} {
		if code, b := get(t.Context(), path); code != 200 && path != "nothing" || !strings.Contains(b, want) {
			t.Errorf("%q: %d %.100s, want %q", path, code, b, want)
		}
	}
}

// TestProfilesTakeTurns: while one is taken no other is, of any kind; and one that is given up, or panics, makes room.
func TestProfilesTakeTurns(t *testing.T) {
	var turns turn
	begun, end := make(chan struct{}), make(chan struct{})
	long := turns.one(func(http.ResponseWriter, *http.Request) { close(begun); <-end })
	ran := 0
	other := turns.one(func(http.ResponseWriter, *http.Request) { ran++ })
	ask := func(h http.HandlerFunc) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		h(w, httptest.NewRequest("GET", "/debug/pprof/heap", nil))
		return w
	}
	var wg sync.WaitGroup
	wg.Go(func() { ask(long) })
	<-begun
	for range 3 {
		if w := ask(other); w.Code != 503 || !strings.Contains(w.Body.String(), "another profile") || w.Header().Get("Retry-After") == "" {
			t.Errorf("beside another: %d %s", w.Code, w.Body)
		}
	}
	close(end)
	wg.Wait()
	if w := ask(other); w.Code != 200 || ran != 1 {
		t.Errorf("after it: %d, %d ran", w.Code, ran)
	}
	func() {
		defer func() { _ = recover() }()
		ask(turns.one(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
	}()
	if w := ask(other); w.Code != 200 {
		t.Errorf("after one that panicked: %d", w.Code)
	}
}

// TestPlain: an answer's text has nothing that a terminal acts upon, and keeps its lines.
func TestPlain(t *testing.T) {
	w := httptest.NewRecorder()
	Plain(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(404)
		fmt.Fprint(w, "a\u009b2J\tb\n\u202ec\n")
	})(w, nil)
	if got := w.Body.String(); w.Code != 404 || got != "a\\u009b2J\tb\n\\u202ec\n" {
		t.Errorf("%d %q", w.Code, got)
	}
}
