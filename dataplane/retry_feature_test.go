package dataplane_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aether/dataplane/engine"
)

// sight is a request as an application saw it.
type sight struct {
	pod   string // whose
	body  []byte
	whole bool // the body's end was seen
	did   string
	head  string
}

// witness is an application that does to each request what it is told, and
// remembers all it saw: requests are told apart by the last part of their path.
type witness struct {
	t    *testing.T
	port int

	mu     sync.Mutex
	act    func(id string, n int) string // what to do with the n-th sight of a request, from 0
	sights map[string][]*sight
	conns  map[net.Conn]bool
	over   bool
}

func newWitness(t *testing.T, act func(id string, n int) string) *witness {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a := &witness{t: t, port: ln.Addr().(*net.TCPAddr).Port, act: act, sights: map[string][]*sight{}, conns: map[net.Conn]bool{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			a.mu.Lock()
			if a.over {
				c.Close()
			}
			a.conns[c] = true
			a.mu.Unlock()
			wg.Go(func() {
				a.serve(c.(*net.TCPConn))
				a.mu.Lock()
				delete(a.conns, c)
				a.mu.Unlock()
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		a.mu.Lock()
		a.over = true
		for c := range a.conns {
			c.Close()
		}
		a.mu.Unlock()
		wg.Wait()
	})
	return a
}

// serve reads requests with net/http and answers by hand. What it is told to do:
//
//	200 500 ...   read the request and answer that; +limited, +grpc: with such fields
//	cut, rst      at once, when the request line is there
//	cut:N, rst:N  after N bytes of the body; beyond it: after its end
//	early         answer 200 without reading the body
//	half          after the request, half of an answer's head; half+: half of its body
//	hang          read, and never answer; stall: stop after half of the answer's body
//	garbage       read, and answer no HTTP
//	tiny message messages    gRPC with trailers, cut off, and without trailers
func (a *witness) serve(c *net.TCPConn) {
	defer c.Close()
	br := bufio.NewReader(c)
	for {
		if _, err := br.Peek(1); err != nil {
			return
		}
		line, ok := peekLine(br)
		if !ok { // whose it was cannot be said
			return
		}
		_, target, _ := strings.Cut(line, " ")
		target, _, _ = strings.Cut(target, " ")
		id := target[strings.LastIndex(target, "/")+1:]
		s := &sight{}
		a.mu.Lock()
		s.did = a.act(id, len(a.sights[id]))
		a.sights[id] = append(a.sights[id], s)
		a.mu.Unlock()
		what, arg, _ := strings.Cut(s.did, ":")
		cut := func() {
			if what == "rst" {
				_ = c.SetLinger(0)
			}
		}
		if (what == "cut" || what == "rst") && arg == "" {
			cut()
			return
		}
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		by, _, _ := strings.Cut(req.Header.Get("X-Forwarded-Client-Cert"), ";")
		a.mu.Lock()
		s.pod, s.head = by[strings.LastIndex(by, "/")+1:], line
		a.mu.Unlock()
		if what == "early" {
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nearly")
			_ = c.CloseWrite()
			_, _ = io.Copy(io.Discard, c)
			return
		}
		var in io.Reader = req.Body
		if n, err := strconv.Atoi(arg); err == nil {
			in = io.LimitReader(req.Body, int64(n))
		}
		b, err := io.ReadAll(in)
		beyond, end := req.Body.Read(make([]byte, 1))
		a.mu.Lock()
		s.body, s.whole = b, err == nil && beyond == 0 && end == io.EOF
		whole := s.whole
		a.mu.Unlock()
		switch what {
		case "cut", "rst":
			cut()
			return
		case "hang":
			_, _ = io.Copy(io.Discard, br)
			return
		case "garbage":
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n")
			return
		case "stall":
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
			_, _ = io.Copy(io.Discard, br)
			return
		case "tiny": // one small chunk, then trailers
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\nTrailer: grpc-status\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nGrpc-Status: 5\r\n\r\n")
			continue
		case "message", "messages": // and the connection ends, or, with the other, the body does without trailers
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\nTransfer-Encoding: chunked\r\n\r\n7\r\nmessage\r\n")
			if what == "message" {
				return
			}
			fmt.Fprint(c, "0\r\n\r\n")
			continue
		case "half":
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-")
			return
		case "half+":
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
			return
		}
		if !whole {
			return
		}
		status, more, _ := strings.Cut(what, "+")
		extra := map[string]string{"limited": "X-Envoy-Ratelimited: true\r\n", "grpc": "Content-Type: application/grpc\r\nGrpc-Status: 14\r\n"}[more]
		text := "answer to " + id
		if req.Method == "HEAD" {
			fmt.Fprintf(c, "HTTP/1.1 %s x\r\nContent-Length: %d\r\n%s\r\n", status, len(text), extra)
			continue
		}
		fmt.Fprintf(c, "HTTP/1.1 %s x\r\nContent-Length: %d\r\n%s\r\n%s", status, len(text), extra, text)
	}
}

// peekLine is the first line.
func peekLine(br *bufio.Reader) (string, bool) {
	for n := 1; n <= 512; n++ {
		b, err := br.Peek(n)
		if err != nil {
			return "", false
		}
		if b[n-1] == '\r' {
			return string(b), true
		}
	}
	return "", false
}

func (a *witness) saw(id string) []sight {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []sight
	for _, s := range a.sights[id] {
		out = append(out, *s)
	}
	return out
}

// lame is a pod whose applications do not listen while down says so.
type lame struct {
	here
	down *atomic.Bool
}

func (s lame) Get(v6 bool) (int, bool) {
	if s.down.Load() {
		return -1, false
	}
	return s.here.Get(v6)
}

func (s lame) Request(v6 bool, on func(int, error)) {
	if s.down.Load() {
		go on(-1, errors.New("refused"))
		return
	}
	s.here.Request(v6, on)
}

// leaver is a client's connection that is reset where the call is given up: of one that only ends, right behind its
// request, nobody can tell whether it waits for the answer (decision 040).
type leaver struct {
	*net.TCPConn
	call context.Context
}

func (l leaver) Close() error {
	if l.call.Err() != nil {
		_ = l.SetLinger(0)
	}
	return l.TCPConn.Close()
}

// ask sends one request to the proxy at addr, over a connection of its own, so that net/http does not send it again.
func ask(ctx context.Context, addr, method, host, path string, body io.Reader, fields ...string) (status int, text string, h http.Header, err error) {
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(dial context.Context, _, _ string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(dial, "tcp", addr)
		if err != nil {
			return nil, err
		}
		return leaver{c.(*net.TCPConn), ctx}, nil
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+host+path, body)
	if err != nil {
		return 0, "", nil, err
	}
	for i := 0; i < len(fields); i += 2 {
		req.Header.Set(fields[i], fields[i+1])
	}
	res, err := tr.RoundTrip(req)
	if err != nil {
		return 0, "", nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return res.StatusCode, string(b), res.Header, err
}

// TestRetries: what an application does to a request, and what becomes of it (contract 5.7, GEP-1731, GEP-1742).
func TestRetries(t *testing.T) {
	plans := map[string][]string{}
	app := newWitness(t, func(id string, n int) string {
		p := plans[id]
		return p[min(n, len(p)-1)]
	})
	w := newTown(t)
	var down [3]atomic.Bool
	w.sockets = func(container string) engine.Sockets {
		if i, err := strconv.Atoi(strings.TrimPrefix(container, "lame")); err == nil {
			return lame{down: &down[i]}
		}
		return here{}
	}
	web := w.pod("web", "web", "web", "127.1.0.9")
	for i := 1; i <= 3; i++ {
		w.pod(fmt.Sprint("cart", i), "cart", fmt.Sprint("cart", i), fmt.Sprint("127.1.0.", i))
	}
	w.pod("one", "one", "one", "127.1.0.4")
	w.pod("lame1", "two", "lame1", "127.1.0.5")
	w.pod("lame2", "two", "lame2", "127.1.0.6")
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(strings.ReplaceAll(`
service shop/cart 127.0.0.2
pods shop/cart PORT ip=127.1.0.1 pod=cart-1 id=spiffe://td/ns/shop/sa/cart1
pods shop/cart PORT ip=127.1.0.2 pod=cart-2 id=spiffe://td/ns/shop/sa/cart2
pods shop/cart PORT ip=127.1.0.3 pod=cart-3 id=spiffe://td/ns/shop/sa/cart3
service shop/one 127.0.0.3
pods shop/one PORT ip=127.1.0.4
service shop/two 127.0.0.4
pods shop/two PORT ip=127.1.0.5 id=spiffe://td/ns/shop/sa/lame1
pods shop/two PORT ip=127.1.0.6 id=spiffe://td/ns/shop/sa/lame2
local shop/web cid=web
local shop/cart PORT cid=cart1
local shop/cart PORT cid=cart2
local shop/cart PORT cid=cart3
local shop/one PORT cid=one
local shop/two PORT cid=lame1
local shop/two PORT cid=lame2
route shop/cart cart
rule name=never match=prefix:/never retry=503;attempts=0
rule name=500s match=prefix:/500s retry=500,502;attempts=1
rule name=503s match=prefix:/503s retry=503;attempts=4
rule name=429s match=prefix:/429s retry=429;attempts=2;backoff=30ms
rule name=504s match=prefix:/504s retry=504;attempts=1 attempt=150ms
rule name=tries match=prefix:/tries retry=any;attempts=2 attempt=150ms
rule name=none match=prefix:/none retry=any;attempts=0 attempt=150ms
rule name=500only match=prefix:/500only retry=500;attempts=1 attempt=150ms
rule name=try match=prefix:/try attempt=150ms
rule name=whole match=prefix:/whole timeout=150ms
rule name=patient match=prefix:/patient timeout=150ms retry=503;attempts=9;backoff=1h
`, "PORT", fmt.Sprint(app.port)))

	rows := []struct {
		service, method, path string
		body                  int
		plan                  string // of the application, a word a sight
		status, sights        int
		fields                []string
		has                   string // of the answer: text, or a field as "name: value"
	}{
		{"cart", "GET", "/", 0, "200", 200, 1, nil, ""},
		{"cart", "GET", "/", 0, "503 200", 200, 2, nil, ""},
		{"cart", "HEAD", "/", 0, "503 503 200", 200, 3, nil, ""},
		{"cart", "POST", "/", 1000, "503 200", 200, 2, nil, ""},
		{"cart", "PATCH", "/", 60000, "503 503 200", 200, 3, nil, ""},
		{"cart", "GET", "/", 0, "503 503 503 200", 503, 3, nil, ""},
		{"cart", "GET", "/", 0, "500", 500, 1, nil, ""},
		{"cart", "GET", "/", 0, "504", 504, 1, nil, ""},
		{"cart", "POST", "/", 100, "503+limited", 503, 1, nil, ""},
		{"cart", "GET", "/", 0, "garbage", 502, 1, nil, ""},
		{"cart", "POST", "/", 1000, "cut:10", 503, 1, nil, ""},
		{"cart", "POST", "/", 1000, "rst:99999", 503, 1, nil, ""},
		{"cart", "POST", "/", 0, "cut", 503, 1, nil, ""},
		{"cart", "PATCH", "/", 0, "half", 503, 1, nil, ""},
		{"cart", "PUT", "/", 60000, "cut:99999 200", 200, 2, nil, ""},
		{"cart", "PUT", "/", 60000, "cut:99999 cut:99999 cut:99999", 503, 3, nil, ""},
		{"cart", "DELETE", "/", 0, "half 200", 200, 2, nil, ""},
		{"cart", "PUT", "/", 300000, "rst:99999999 200", 503, 1, nil, ""}, // more than is kept
		{"cart", "GET", "/", 0, "half+", -1, 1, nil, ""},                  // the answer has begun
		// Cases 65, 71: an answer before the request's end. Its rest is not waited for.
		{"cart", "POST", "/", 300000, "early", 200, 1, nil, "early"},
		{"cart", "POST", "/", 10000, "early", 200, 1, nil, "early"},
		// The application's own status of a gRPC call is no failure of the mesh's; a call that was not answered is.
		{"cart", "POST", "/", 10, "200+grpc", 200, 1, []string{"Content-Type", "application/grpc"}, "Grpc-Status: 14"},
		{"cart", "POST", "/", 10, "cut:10", 200, 1, []string{"Content-Type", "application/grpc"}, "Grpc-Status: 14"},
		// One endpoint: there is no other.
		{"one", "POST", "/", 10, "503 200", 200, 2, nil, ""},
		{"one", "GET", "/", 0, "cut 200", 200, 2, nil, ""},
		{"cart", "GET", "/", 0, "503 200", 200, 2, []string{"X-Aether-Pod", "cart-2"}, ""},
		// Rules that speak of retries.
		{"cart", "GET", "/never/", 0, "503", 503, 1, nil, ""},
		{"cart", "POST", "/500s/", 100, "500 200", 200, 2, nil, ""},
		{"cart", "POST", "/500s/", 100, "500 500 200", 500, 2, nil, ""},
		{"cart", "POST", "/500s/", 100, "503 200", 200, 2, nil, ""},
		{"cart", "POST", "/500s/", 100, "500+limited", 500, 1, nil, ""},
		{"cart", "POST", "/500s/", 100, "garbage 200", 200, 2, nil, ""}, // 502, which the rule names
		{"cart", "POST", "/500s/", 0, "501", 501, 1, nil, ""},
		{"cart", "POST", "/503s/", 100, "503 503 503 503 200", 200, 5, nil, ""},
		{"cart", "POST", "/503s/", 100, "cut:10", 503, 1, nil, ""}, // a cut is no status
		{"cart", "PATCH", "/429s/", 100, "429 429 200", 200, 3, nil, ""},
		{"cart", "GET", "/504s/", 0, "hang 200", 200, 2, nil, ""},
		{"cart", "GET", "/504s/", 0, "hang hang 200", 504, 2, nil, "timeouts.backendRequest (150ms)"},
		{"cart", "GET", "/try/", 0, "hang", 504, 1, nil, "timeouts.backendRequest (150ms)"},
		// A try that ran out, of a rule that has a retry: what may be repeated is.
		{"cart", "GET", "/tries/", 0, "hang hang 200", 200, 3, nil, ""},
		{"cart", "PUT", "/tries/", 100, "hang 200", 200, 2, nil, ""},
		{"cart", "GET", "/tries/", 0, "hang hang hang 200", 504, 3, nil, "timeouts.backendRequest (150ms)"},
		{"cart", "POST", "/tries/", 100, "hang", 504, 1, nil, "timeouts.backendRequest (150ms)"},
		{"cart", "GET", "/none/", 0, "hang", 504, 1, nil, "timeouts.backendRequest (150ms)"},
		{"cart", "GET", "/500only/", 0, "hang 200", 200, 2, nil, ""},
		{"cart", "POST", "/500only/", 100, "hang", 504, 1, nil, "timeouts.backendRequest (150ms)"},
		{"cart", "POST", "/504s/", 100, "hang 200", 200, 2, nil, ""},
		{"cart", "POST", "/whole/", 100, "hang", 504, 1, nil, "timeouts.request (150ms)"},
		{"cart", "POST", "/whole/", 100, "hang", 200, 1, []string{"Content-Type", "application/grpc"}, "Grpc-Status: 4"},
		{"cart", "GET", "/patient/", 0, "503", 504, 1, nil, "timeouts.request"},
		{"cart", "GET", "/whole/", 0, "stall", -1, 1, nil, ""},
	}
	for i := range rows {
		plans[strconv.Itoa(i)] = strings.Fields(rows[i].plan)
	}
	for i, tt := range rows {
		// A pod of its own for each: what one met with ejects nobody for another (decision 014).
		from := w.pod(fmt.Sprint("row", i), "web", "web", fmt.Sprint("127.1.1.", i+1))
		at := w.listen(from.Engine, "127.0.0.1:0", w.out.AcceptProxy(from))
		t.Run(fmt.Sprintf("%s %s%s %d %s", tt.method, tt.service, tt.path, tt.body, tt.plan), func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			id := strconv.Itoa(i)
			body := make([]byte, tt.body)
			for k := range body {
				body[k] = byte(k*7 + k>>8)
			}
			var in io.Reader
			if tt.body > 0 {
				in = bytes.NewReader(body)
			}
			began := time.Now()
			status, text, h, err := ask(ctx, at, tt.method, fmt.Sprintf("%s.shop.aether.internal:%d", tt.service, app.port), tt.path+id, in, tt.fields...)
			if tt.status < 0 {
				if err == nil {
					t.Errorf("%d %q: want an answer that breaks off", status, text)
				}
			} else if err != nil || status != tt.status {
				t.Errorf("%d %q, %v; want %d", status, text, err, tt.status)
			}
			if name, value, ok := strings.Cut(tt.has, ": "); ok {
				if h.Get(name) != value {
					t.Errorf("%s is %q, want %q", name, h.Get(name), value)
				}
			} else if !strings.Contains(text, tt.has) {
				t.Errorf("the answer is %q, want %q in it", text, tt.has)
			}
			if h.Get("X-Aether-Outcome") != "" {
				t.Errorf("the outcome got out: %q", h.Get("X-Aether-Outcome"))
			}
			if strings.Contains(tt.path, "try") || strings.Contains(tt.path, "whole") {
				if d := time.Since(began); d < 150*time.Millisecond {
					t.Errorf("ended after %v", d)
				}
			}
			sights := app.saw(id)
			if len(sights) != tt.sights {
				t.Errorf("the applications saw it %d times, want %d", len(sights), tt.sights)
			}
			pods := map[string]bool{}
			for _, s := range sights {
				pods[s.pod] = true
				if s.whole && !bytes.Equal(s.body, body) || !bytes.HasPrefix(body, s.body) {
					t.Errorf("the application got a body of %d bytes, whole %v", len(s.body), s.whole)
				}
			}
			if want := min(3, len(sights)); tt.service == "cart" && tt.fields == nil && len(pods) != want && !strings.Contains(tt.plan, "cut ") {
				t.Errorf("it was seen at %d hosts, want %d", len(pods), want)
			}
		})
	}
	t.Run("one of two does not listen", func(t *testing.T) {
		t.Parallel()
		app.mu.Lock()
		plans["lame"] = []string{"200"}
		app.mu.Unlock()
		host := fmt.Sprintf("two.shop.aether.internal:%d", app.port)
		down[1].Store(true)
		for n := 1; n <= 20; n++ {
			status, text, _, err := ask(t.Context(), at, "POST", host, "/lame", strings.NewReader("body"))
			if s := app.saw("lame"); err != nil || status != 200 || len(s) != n || string(s[n-1].body) != "body" || s[n-1].pod != "lame2" {
				t.Fatalf("request %d: %d %q, %v, seen %d times", n, status, text, err, len(s))
			}
		}
		// A pin knows no other host.
		for range 3 {
			status, _, _, err := ask(t.Context(), at, "POST", host, "/lame", nil, "X-Aether-Ip", "127.1.0.5")
			if err != nil || status != 503 {
				t.Fatalf("nobody listens: %d, %v", status, err)
			}
		}
	})
}

// TestGRPCStatus: a gRPC client over HTTP/2 gets a status at the end of every response (case 68), what comes before it is
// as it was sent (case 72), and an application's own status is not touched.
func TestGRPCStatus(t *testing.T) {
	plans := map[string][]string{"tiny": {"503", "tiny"}, "cut": {"message"}, "end": {"messages"}, "down": {"rst"}, "busy": {"503", "503", "503"}}
	app := newWitness(t, func(id string, n int) string { return plans[id][n] })
	w := newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart1", "cart", "cart", "127.1.0.1")
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(fmt.Sprintf("service shop/cart 127.0.0.2\npods shop/cart %[1]d ip=127.1.0.1\nlocal shop/web cid=web\nlocal shop/cart %[1]d cid=cart1\n", app.port))
	tr := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", at)
	}}
	tr.Protocols.SetUnencryptedHTTP2(true)
	defer tr.CloseIdleConnections()
	for id, want := range map[string]string{
		"tiny": "200 x 5 seen 2",
		"cut":  "200 message 14 seen 1",
		"end":  "200 message 14 seen 1",
		"down": "200  14 seen 1",
		"busy": "503 answer to busy  seen 3", // the application's own, and no gRPC at all
	} {
		req, err := http.NewRequestWithContext(t.Context(), "POST", fmt.Sprintf("http://cart.shop.aether.internal:%d/%s", app.port, id), strings.NewReader("request"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/grpc")
		req.Header.Set("Te", "trailers")
		res, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatalf("%s: %v", id, err)
		}
		b, err := io.ReadAll(res.Body)
		res.Body.Close()
		status := res.Header.Get("Grpc-Status") + res.Trailer.Get("Grpc-Status")
		if got := fmt.Sprintf("%d %s %s seen %d", res.StatusCode, b, status, len(app.saw(id))); got != want || err != nil {
			t.Errorf("%s: %s, %v; want %s", id, got, err, want)
		}
	}
}

// TestRetriesAreBounded: of many requests that an application has no room for, 16 at a time are sent again (contract 5.6).
func TestRetriesAreBounded(t *testing.T) {
	const n = 60
	var first sync.WaitGroup // until each has been seen once
	first.Add(n)
	hold := make(chan struct{})
	app := newWitness(t, func(_ string, k int) string {
		if k > 0 {
			return "hang" // keeps its place
		}
		return "503"
	})
	w := newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart1", "cart", "cart", "127.1.0.1")
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(fmt.Sprintf("service shop/cart 127.0.0.2\npods shop/cart %[1]d ip=127.1.0.1\nlocal shop/web cid=web\nlocal shop/cart %[1]d cid=cart1\nroute shop/cart cart\nrule match=prefix:/ timeout=20s\n", app.port))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var refused, hung atomic.Int64
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			first.Done()
			<-hold
			status, _, _, err := ask(ctx, at, "POST", fmt.Sprintf("cart.shop.aether.internal:%d", app.port), fmt.Sprint("/", i), strings.NewReader("body"))
			switch {
			case err == nil && status == 503:
				if refused.Add(1) == n-16 {
					cancel() // nobody waits any more but those that were sent again
				}
			case err != nil:
				hung.Add(1)
			}
		})
	}
	first.Wait()
	close(hold)
	wg.Wait()
	if r, o := w.out.Retries.Value(), w.out.RetriesOverflow.Value(); r != 16 || o != n-16 {
		t.Errorf("counted %d retries, %d that were not", r, o)
	}
	if refused.Load() != n-16 || hung.Load() != 16 {
		t.Errorf("%d were not sent again and %d were, want %d and 16", refused.Load(), hung.Load(), n-16)
	}
}

// TestClientLeavesMeanwhile: one that goes while its request waits to be sent again ends it there.
func TestClientLeavesMeanwhile(t *testing.T) {
	seen := make(chan struct{})
	app := newWitness(t, func(string, int) string {
		close(seen)
		return "503"
	})
	w := newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart1", "cart", "cart", "127.1.0.1")
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(fmt.Sprintf("service shop/cart 127.0.0.2\npods shop/cart %[1]d ip=127.1.0.1\nlocal shop/web cid=web\nlocal shop/cart %[1]d cid=cart1\nroute shop/cart cart\nrule match=prefix:/ timeout=2h retry=503;attempts=2;backoff=1h\n", app.port))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		<-seen
		for e := range w.journal.ch { // the destination's: the answer is on its way to the source
			if e.Dir.String() == "inbound" {
				cancel()
				return
			}
		}
	}()
	_, _, _, err := ask(ctx, at, "POST", fmt.Sprintf("cart.shop.aether.internal:%d", app.port), "/1", strings.NewReader("body"))
	if err == nil {
		t.Error("answered")
	}
	select {
	case e := <-w.journal.ch:
		if e.Ended != "client" || e.Attempts != 1 {
			t.Errorf("recorded as %s", e.String())
		}
	case <-time.After(20 * time.Second):
		t.Error("the request has not ended")
	}
	if n := len(app.saw("1")); n != 1 {
		t.Errorf("seen %d times", n)
	}
}
