package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestAnswer(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\nDate: x\r\nContent-LENGTH: 3\r\n\r\nabc"
	for i := range len(ok) { // incomplete: neither an answer nor an error
		if n, err := answer([]byte(ok[:i])); n != 0 || err != nil {
			t.Fatalf("%q: %d, %v", ok[:i], n, err)
		}
	}
	if n, err := answer([]byte(ok + "more")); n != len(ok) || err != nil {
		t.Errorf("%d, %v, want %d", n, err, len(ok))
	}
	for _, bad := range []string{
		"HTTP/1.1 503 no\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
	} {
		if _, err := answer([]byte(bad)); err == nil {
			t.Errorf("accepted %q", bad)
		}
	}
}

// An answer never changes as bytes arrive, is never longer than what is there, and is
// not given before its last byte.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcd"))
	f.Add([]byte("HTTP/1.1 200 OK\r\nA: b\r\ncontent-length:0\r\n\r\n"))
	f.Add([]byte("HTTP/1.1 404 no\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		b = b[:min(len(b), 300)]
		whole, err := answer(b)
		if whole < 0 || whole > len(b) {
			t.Fatalf("%d of %d bytes", whole, len(b))
		}
		for i := range b {
			n, e := answer(b[:i])
			switch {
			case err == nil && whole > 0 && i < whole && (n != 0 || e != nil):
				t.Fatalf("after %d bytes: %d, %v; the whole is %d", i, n, e, whole)
			case err == nil && whole > 0 && i >= whole && (n != whole || e != nil):
				t.Fatalf("after %d bytes: %d, %v; the whole is %d", i, n, e, whole)
			case err == nil && whole == 0 && (n != 0 || e != nil):
				t.Fatalf("after %d bytes: %d, %v; the whole is incomplete", i, n, e)
			case err != nil && n != 0:
				t.Fatalf("after %d bytes: %d; the whole is an error: %v", i, n, err)
			}
		}
	})
}

func TestAt(t *testing.T) {
	var v []int64
	for i := range int64(200) {
		v = append(v, (i+1)*1e6) // 1 to 200 ms
	}
	for p, want := range map[int]float64{50: 100, 90: 180, 99: 198, 100: 200} {
		if got := at(v, p); got != want {
			t.Errorf("p%d = %v, want %v", p, got, want)
		}
	}
	if got := at(v[:1], 50); got != 1 {
		t.Errorf("p50 of one value = %v", got)
	}
}

func get(host string) []byte { return []byte("GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n") }

func server(t *testing.T, h http.HandlerFunc) netip.AddrPort {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return netip.MustParseAddrPort(strings.TrimPrefix(s.URL, "http://"))
}

func TestPacedKeepsTheRate(t *testing.T) {
	var served atomic.Int64
	to := server(t, func(w http.ResponseWriter, r *http.Request) {
		served.Add(1)
		io.WriteString(w, "ok")
	})
	r, err := paced(to, get("x"), 500, 4, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if r.Requests != 500 || served.Load() != 500 {
		t.Errorf("%d requests, %d served, want 500", r.Requests, served.Load())
	}
	// The last request is due 2 ms before the end; nothing may come early, and little late.
	if r.QPS > 505 || r.QPS < 400 {
		t.Errorf("%.0f requests a second", r.QPS)
	}
	if !(r.P50 > 0 && r.P50 <= r.P90 && r.P90 <= r.P99 && r.P99 <= r.Max) {
		t.Errorf("percentiles out of order: %+v", r)
	}
}

// A server that stalls for 300 ms of a second delays every request due in that time:
// a third of a second's worth, by 0 to 300 ms. A closed loop would see one
// slow request a connection and report a good p90 (coordinated omission).
func TestPacedDoesNotOmit(t *testing.T) {
	var first atomic.Pointer[time.Time]
	to := server(t, func(w http.ResponseWriter, r *http.Request) {
		now := time.Now()
		first.CompareAndSwap(nil, &now)
		stall := first.Load().Add(600 * time.Millisecond)
		if since := time.Since(first.Load().Add(300 * time.Millisecond)); since > 0 {
			<-time.After(time.Until(stall)) // at once when it is over
		}
		io.WriteString(w, "ok")
	})
	r, err := paced(to, get("x"), 1000, 4, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	// Only that it is at least as slow as it is: a busy machine adds to each. Where latency counted from
	// when a request was sent, four would have met the stall, one a connection.
	if r.P90 < 150 || r.Max < 280 {
		t.Errorf("p50 %.1f, p90 %.1f, max %.1f ms; want p50 small, p90 about 200, max about 300", r.P50, r.P90, r.Max)
	}
	if r.LagP99 < 200 {
		t.Errorf("the queue in front of the connections does not show: %.1f ms", r.LagP99)
	}
}

func TestPacedReportsErrors(t *testing.T) {
	status := server(t, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(503) })
	if _, err := paced(status, get("x"), 100, 2, 100*time.Millisecond); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("503: %v", err)
	}
	hangUp := server(t, func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) })
	if _, err := paced(hangUp, get("x"), 100, 2, 100*time.Millisecond); err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("hang-up: %v", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := netip.MustParseAddrPort(l.Addr().String())
	l.Close()
	if _, err := paced(nobody, get("x"), 100, 2, time.Second); err == nil {
		t.Error("nobody listens, no error")
	}
}

func listen(t *testing.T, handle func(net.Conn) error) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c)
			}()
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String())
}

func TestTransfer(t *testing.T) {
	to := listen(t, source)
	for _, up := range []bool{false, true} {
		for _, n := range []int64{16, 1000, 10 << 20} {
			for _, streams := range []int{1, 16} {
				d, err := transfer(to, n, streams, up)
				if err != nil || d.Bytes != n || d.Seconds <= 0 {
					t.Errorf("up %v, %d bytes, %d streams: %+v, %v", up, n, streams, d, err)
				}
			}
		}
	}
	short := listen(t, func(c net.Conn) error {
		_, err := c.Write(make([]byte, 10))
		return err
	})
	if _, err := transfer(short, 1000, 1, false); err == nil || !strings.Contains(err.Error(), "of 1000") {
		t.Errorf("cut short: %v", err)
	}
	if _, err := transfer(short, 1<<30, 1, true); err == nil {
		t.Error("nobody took the upload, no error")
	}
}

func TestFirstByte(t *testing.T) {
	f, err := firstByte(listen(t, banner))
	if err != nil || f.Milliseconds <= 0 || f.Milliseconds > 1000 {
		t.Errorf("%+v, %v", f, err)
	}
	if _, err := firstByte(listen(t, func(net.Conn) error { return nil })); err == nil {
		t.Error("no byte, no error")
	}
}

func TestIdle(t *testing.T) {
	to := server(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })
	var said bytes.Buffer
	if err := idle(to, get("x"), 50, strings.NewReader(""), &said); err != nil || said.String() != "{\"idle\":50}\n" {
		t.Errorf("%q, %v", &said, err)
	}

	// A server that answers and then hangs up while the client holds.
	gone := make(chan struct{})
	cut := listen(t, func(c net.Conn) error {
		c.Read(make([]byte, 100))
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		c.(*net.TCPConn).CloseWrite()
		close(gone)
		_, err := io.Copy(io.Discard, c)
		return err
	})
	hold, release := io.Pipe()
	go func() {
		<-gone
		release.Close()
	}()
	if err := idle(cut, get("x"), 1, hold, io.Discard); err == nil || !strings.Contains(err.Error(), "did not stay") {
		t.Errorf("a connection was dropped: %v", err)
	}
}

// All kinds of connection are open, and answered where they ask for something.
func TestFlood(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })
	s := httptest.NewUnstartedServer(mux)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	defer s.Close()
	hold, release := io.Pipe()
	said, say := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- flood(netip.MustParseAddrPort(strings.TrimPrefix(s.URL, "http://")), "x", 130, hold, say)
	}()
	lines := bufio.NewReader(said)
	if line, err := lines.ReadString('\n'); err != nil || line != "{\"open\":130}\n" {
		t.Fatalf("%q, %v", line, err)
	}
	<-time.After(1500 * time.Millisecond) // a field of each head
	go release.Close()
	var f Flood
	if err := json.NewDecoder(lines).Decode(&f); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if f.Connections != 130 || f.Requests < 100 || f.Streams < 100 || f.Heads < 100 {
		t.Errorf("%+v", f)
	}
}

func TestArguments(t *testing.T) {
	for _, args := range [][]string{
		nil, {"fly", "-addr", "127.0.0.1:1"}, {"rate"}, {"rate", "-addr", "localhost:80"},
		{"rate", "-addr", "127.0.0.1:1", "-qps", "0"}, {"rate", "-addr", "127.0.0.1:1", "-conns", "20000"},
		{"download", "-addr", "127.0.0.1:1", "-streams", "0"}, {"upload", "-addr", "127.0.0.1:1", "-bytes", "3", "-streams", "4"},
	} {
		if err := start(args); err == nil {
			t.Errorf("%q: no error", args)
		}
	}
}

// A connection a request, none early, and the time that a slow server costs in each.
func TestChurn(t *testing.T) {
	var conns sync.Map
	to := server(t, func(w http.ResponseWriter, r *http.Request) {
		conns.Store(r.RemoteAddr, true)
		<-time.After(20 * time.Millisecond)
		io.WriteString(w, "ok")
	})
	request := []byte("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	began := time.Now()
	r, err := churn(to, request, 100, 8, 500*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	conns.Range(func(any, any) bool { n++; return true })
	if r.Requests != 50 || n != 50 {
		t.Errorf("%d requests on %d connections, want 50 on 50", r.Requests, n)
	}
	if took := time.Since(began); took < 490*time.Millisecond { // the last one is due then
		t.Errorf("all within %s", took)
	}
	if !(r.P50 >= 20 && r.P50 <= r.P99 && r.P99 <= r.Max) {
		t.Errorf("percentiles: %+v", r)
	}
	status := server(t, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(503) })
	if _, err := churn(status, request, 100, 2, 100*time.Millisecond); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("503: %v", err)
	}
	hangUp := server(t, func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) })
	if _, err := churn(hangUp, request, 100, 2, 100*time.Millisecond); err == nil {
		t.Error("hang-up: no error")
	}
}
