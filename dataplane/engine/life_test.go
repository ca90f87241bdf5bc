package engine

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/http2"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
	"aether/mtls/record"
	"aether/tproxy/socket"
)

// rest reads c to its end and returns what came.
func rest(t *testing.T, c net.Conn) string {
	t.Helper()
	b, err := io.ReadAll(c)
	if err != nil && isTimeout(err) {
		t.Fatal("the connection stays open")
	}
	return string(b)
}

// TestLimitsOfTime walks every limit on a clock of the test's own: nothing
// happens just before it, and it does just after.
func TestLimitsOfTime(t *testing.T) {
	const slack = 200 * time.Millisecond // the wheel's slots
	for _, tt := range []struct {
		name  string
		limit int64
		h2    bool
		begin func(t *testing.T, s *stage, v *svc, c *net.TCPConn)
		still func(v *svc) bool // holds until the limit
		want  string            // what the client reads then
		over  func(v *svc) bool // holds after it
	}{
		{name: "a connection that says nothing", limit: idleDown, want: ""},
		{name: "half a head", limit: headTime, begin: func(t *testing.T, s *stage, v *svc, c *net.TCPConn) {
			io.WriteString(c, "GET / HTTP/1.1\r\nHo")
			s.seen(t, func(c *h1server) bool { return c.w > c.r })
		}, want: "HTTP/1.1 408 "},
		{name: "kept alive after a request", limit: idleDown, begin: func(t *testing.T, s *stage, v *svc, c *net.TCPConn) {
			s.onLoop(func(*Loop) { v.request = local })
			io.WriteString(c, "HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
			if _, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: "HEAD"}); err != nil {
				t.Fatal(err)
			}
		}, want: ""},
		{name: "an application that never answers", limit: idleStream, begin: func(t *testing.T, s *stage, v *svc, c *net.TCPConn) {
			io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
			eventually(t, "asked", func() bool { return v.begun.Load() == 1 })
			s.seen(t, func(c *h1client) bool { return !c.connecting && c.reqDone && len(c.out) == 0 })
		}, still: func(v *svc) bool { return v.done.Load() == 0 }, over: func(v *svc) bool { return v.done.Load() == 1 }},
		{name: "a client that sends no more of its body", limit: idleStream, begin: func(t *testing.T, s *stage, v *svc, c *net.TCPConn) {
			io.WriteString(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc")
			s.seen(t, func(c *h1client) bool { return !c.connecting && len(c.out) == 0 && c.x != nil && c.x.ReqBytes == 3 })
		}, still: func(v *svc) bool { return v.done.Load() == 0 }, over: func(v *svc) bool { return v.done.Load() == 1 }},
		{name: "HTTP/2 that says nothing", h2: true, limit: idleDown, begin: func(t *testing.T, s *stage, v *svc, c *net.TCPConn) {
			io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
			s.seen(t, func(c *h2conn) bool { return len(c.left) == 0 && c.turn > 0 })
		}, want: "*GOAWAY"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ck := newClock()
			s := newStage(t, Config{Now: ck.Now})
			pod := s.e.AddPod("p")
			hang := make(chan struct{})
			v := &svc{pod: pod, to: s.app(func(c *net.TCPConn) { <-hang })}
			t.Cleanup(func() { close(hang) })
			c := dial(t, s.front(pod, v, tt.h2))
			eventually(t, "accepted", func() bool { return pod.Conns() >= 1 })
			if tt.begin != nil {
				tt.begin(t, s, v, c)
			}
			conns := pod.Conns()
			ck.move(t, s.e, time.Duration(tt.limit)-slack)
			if pod.Conns() != conns || tt.still != nil && !tt.still(v) {
				t.Fatal("too early")
			}
			ck.move(t, s.e, 2*slack)
			ck.move(t, s.e, time.Duration(max(lingerTime, pingWait))+slack) // HTTP/2: for its answer that it knows
			got := rest(t, c)
			if want, ok := strings.CutPrefix(tt.want, "*"); ok {
				if want == "GOAWAY" && !strings.Contains(got, "\x00\x00\x08\x07") {
					t.Errorf("%q", got)
				}
			} else if tt.over == nil && !strings.HasPrefix(got, tt.want) || tt.want == "" && tt.over == nil && got != "" {
				t.Errorf("%q, want %q", got, tt.want)
			}
			if tt.over != nil && !tt.over(v) {
				t.Error("not over")
			}
		})
	}
}

// seen waits until a connection on the loop is as f wants it.
func (s *stage) seen(t *testing.T, f any) {
	t.Helper()
	eventually(t, "a connection in the state that the test needs", func() (ok bool) {
		s.onLoop(func(l *Loop) {
			l.Each(func(src reactor.Source) {
				switch c := src.(type) {
				case *h1server:
					if f, is := f.(func(*h1server) bool); is {
						ok = ok || f(c)
					}
				case *h1client:
					if f, is := f.(func(*h1client) bool); is {
						ok = ok || f(c)
					}
				case *h2conn:
					if f, is := f.(func(*h2conn) bool); is {
						ok = ok || f(c)
					}
				}
			})
		})
		return
	})
}

// TestKeptAppConnectionsEnd: an idle connection to the application is closed
// in time, and so is one that never connects.
func TestKeptAppConnectionsEnd(t *testing.T) {
	ck := newClock()
	s := newStage(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, to: s.app(raw("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"))}
	addr := s.front(pod, v, false)
	c := dial(t, addr)
	br := bufio.NewReader(c)
	ask := func() int {
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, res.Body)
		return res.StatusCode
	}
	ask()
	ck.move(t, s.e, 4*time.Minute)
	ask() // and so it is as good as new
	ck.move(t, s.e, 4*time.Minute)
	if n := pod.Conns(); n != 2 {
		t.Fatalf("%d connections, want 2", n)
	}
	ask()
	c.Close()
	eventually(t, "the client's is closed", func() bool { return pod.Conns() == 1 })
	ck.move(t, s.e, time.Duration(idleApp)+time.Second)
	eventually(t, "the application's too", func() bool { return pod.Conns() == 0 })

	// A full backlog swallows the handshake.
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, _ := unix.Getsockname(fd)
	port := uint16(sa.(*unix.SockaddrInet4).Port)
	filler := dial(t, fmt.Sprintf("127.0.0.1:%d", port))
	defer filler.Close()
	s.onLoop(func(*Loop) { v.to = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port) })
	c = dial(t, addr)
	br = bufio.NewReader(c)
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	s.seen(t, func(c *h1client) bool { return c.connecting })
	ck.move(t, s.e, time.Duration(connectTime)+time.Second)
	res, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(res.Body)
	if res.StatusCode != 503 || string(b) != "connect" {
		t.Errorf("%d %s", res.StatusCode, b)
	}
}

// TestCutAnywhere: a thousand clients that go away at any byte, in any way,
// leave nothing behind.
func TestCutAnywhere(t *testing.T) {
	m := newMesh(t, Config{}, newEcho(t))
	const n = 1000
	var script [2][]byte
	script[0] = fmt.Appendf(nil, "GET /a HTTP/1.1\r\nHost: a\r\n\r\nPOST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 20000\r\n\r\n%s"+
		"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-T: 1\r\n\r\nGET /big HTTP/1.1\r\nHost: a\r\n\r\n", strings.Repeat("x", 20000))
	rec := &recorder{}
	h2 := http2.New(http2.Config{}, rec)
	for i := range 3 {
		st, err := h2.Open()
		if err != nil {
			t.Fatal(err)
		}
		h := &httpmsg.Head{Method: []byte("POST"), Authority: []byte("a"), Path: []byte("/echo"), Length: httpmsg.Unknown}
		if i == 1 {
			h.Path = []byte("/big")
		}
		st.WriteHead(h, i == 1)
		if i != 1 {
			st.WriteData(bytes.Repeat([]byte("y"), 20000), true)
		}
	}
	script[1] = bytes.Clone(h2.Out())
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			rnd := rand.New(rand.NewSource(int64(w)))
			buf := make([]byte, 32<<10)
			for range n / 4 {
				k := rnd.Intn(2)
				addr := []string{m.h1, m.h2}[k]
				c, err := net.Dial("tcp", addr)
				if err != nil {
					t.Error(err)
					return
				}
				b := script[k][:rnd.Intn(len(script[k])+1)]
				if rnd.Intn(2) == 0 { // heads are the interesting part
					b = b[:min(len(b), rnd.Intn(400))]
				}
				for len(b) > 0 {
					k := min(len(b), 1+rnd.Intn(8000))
					if _, err := c.Write(b[:k]); err != nil {
						break
					}
					b = b[k:]
				}
				if rnd.Intn(2) == 0 { // wait for something of the answer
					_ = c.SetReadDeadline(time.Now().Add(time.Duration(rnd.Intn(3)) * time.Millisecond))
					c.Read(buf[:1+rnd.Intn(len(buf))])
				}
				switch rnd.Intn(3) {
				case 0:
					_ = c.(*net.TCPConn).SetLinger(0)
				case 1:
					_ = c.(*net.TCPConn).CloseWrite()
				}
				c.Close()
			}
		})
	}
	wg.Wait()
	eventually(t, "every exchange of the source is done", func() bool { return m.out.begun.Load() == m.out.done.Load() })
	eventually(t, "and of the destination", func() bool { return m.in.begun.Load() == m.in.done.Load() })
	t.Logf("%d exchanges, %d at the destination", m.out.begun.Load(), m.in.begun.Load())
	if m.out.begun.Load() < n/3 {
		t.Errorf("only %d exchanges", m.out.begun.Load())
	}
	eventually(t, "only the hop is left of the source", func() bool {
		open := 0
		m.onLoop(func(*Loop) {
			if m.theHop != nil {
				open = m.theHop.Open() // those on which much was given up have ended
			}
		})
		return m.src.Conns() == int64(open)
	})
	m.e.RemovePod(m.src)
	m.e.RemovePod(m.dst)
	if a, b := m.src.Conns(), m.dst.Conns(); a != 0 || b != 0 {
		t.Errorf("%d and %d connections after removal", a, b)
	}
}

// recorder is an http2.Handler that does nothing.
type recorder struct{}

func (*recorder) OnHead(*http2.Stream, *httpmsg.Head, bool) {}
func (*recorder) OnData(s *http2.Stream, p []byte, _ bool)  { s.Credit(len(p)) }
func (*recorder) OnTrailers(*http2.Stream, []httpmsg.Field) {}
func (*recorder) OnReset(*http2.Stream, http2.Code)         {}
func (*recorder) OnRefused(int, *http2.StreamError)         {}
func (*recorder) OnWritable(*http2.Stream)                  {}
func (*recorder) OnGoAway(uint32, http2.Code)               {}

// newEcho is the application of engine_test.go.
func newEcho(t testing.TB) netip.AddrPort {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: echo()}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	t.Cleanup(func() { srv.Close(); wg.Wait() })
	return netip.MustParseAddrPort(ln.Addr().String())
}

// TestMesh is the whole way, both kinds of client.
func TestMesh(t *testing.T) {
	m := newMesh(t, Config{}, newEcho(t))
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	data := make([]byte, 5<<20)
	rand.New(rand.NewSource(3)).Read(data)
	for name, c := range map[string]*http.Client{
		"http1": {Transport: &http.Transport{DialContext: to(m.h1)}},
		"h2c":   {Transport: &http.Transport{DialContext: to(m.h2), Protocols: p}},
	} {
		for _, body := range []io.Reader{bytes.NewReader(data), struct{ io.Reader }{bytes.NewReader(data)}, struct{ io.Reader }{strings.NewReader("")}} {
			res, err := c.Post("http://a/echo", "x/y", body)
			if err != nil {
				t.Fatal(name, err)
			}
			b, err := io.ReadAll(res.Body)
			res.Body.Close()
			if err != nil || len(b) != 0 && !bytes.Equal(b, data) || res.Trailer.Get("X-Sum") == "" {
				t.Fatalf("%s: %d bytes, %v, %v", name, len(b), err, res.Trailer)
			}
		}
		c.CloseIdleConnections()
	}
	if m.hops.Load() != 1 {
		t.Errorf("%d sessions for one client after the other", m.hops.Load())
	}
}

// TestHopSessions: sessions that age make room for new ones while their
// streams go on until the certificates end, and the waiting are never forgotten.
func TestHopSessions(t *testing.T) {
	ck := newClock()
	hang := make(chan struct{})
	app := heads(func(c *net.TCPConn, _ *bufio.Reader, line string) bool {
		if strings.HasPrefix(line, "GET /hang") {
			<-hang
		}
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		return true
	})
	m := newMesh(t, Config{Now: ck.Now}, (&stage{t: t}).app(app))
	m.life = 3 * time.Minute // takes requests for one and a half
	var long []net.Conn
	for i := range maxSessions + 2 { // more generations than sessions a key may have
		c := dial(t, m.h1)
		io.WriteString(c, "GET /hang HTTP/1.1\r\nHost: a\r\n\r\n")
		eventually(t, "it reached the application", func() bool { return m.in.begun.Load() == int64(i+1) })
		long = append(long, c)
		if got := m.hops.Load(); got != int64(i+1) {
			t.Fatalf("%d sessions after %d generations", got, i+1)
		}
		ck.move(t, m.e, 100*time.Second)
		ck.move(t, m.e, 100*time.Millisecond)
		// Bytes keep the old streams from their idle limit.
		m.onLoop(func(l *Loop) {
			l.Each(func(s reactor.Source) {
				switch c := s.(type) {
				case *h1server:
					c.active = l.Now()
				case *h1client:
					c.active = l.Now()
				case *h2conn:
					c.active = l.Now()
					c.h2.Each(func(s *http2.Stream) { s.User.(*h2stream).moved = l.Now() })
				}
			})
		})
	}
	close(hang)
	for i, c := range long {
		want := 200
		if left := m.life - time.Duration(len(long)-i)*100*time.Second; left < 0 {
			want = 503 // the session has ended with its certificates
		}
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || res.StatusCode != want {
			t.Fatalf("stream %d on an aged session: %v %v, want %d", i, res, err, want)
		}
		c.Close()
	}
	ck.move(t, m.e, time.Second)
	eventually(t, "aged sessions are closed", func() bool { return m.src.Conns() <= 1 })

	// A dial that fails fails those that wait, and the next request tries again.
	m.e.RemovePod(m.dst)
	eventually(t, "the hop is gone", func() bool { return m.src.Conns() == 0 })
	m.refuse.Store(true)
	for range 2 {
		c := dial(t, m.h1)
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || res.StatusCode != 503 {
			t.Fatal(res, err)
		}
		c.Close()
	}
	m.onLoop(func(l *Loop) {
		if n := len(m.src.share(l).resources); n != 0 || m.theHop != nil {
			t.Errorf("%d hops are kept for nothing", n)
		}
	})
}

// TestWaitersOfAHop: requests beyond what the sessions carry wait, and go on
// also when streams end by reset, and only by that.
func TestWaitersOfAHop(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	peer := s.app(func(c *net.TCPConn) {
		r := &resetter{}
		r.h2 = http2.New(http2.Config{Server: true, MaxStreams: 2}, r)
		buf := make([]byte, 32<<10)
		for n := 0; ; {
			_ = c.SetReadDeadline(time.Time{})
			if len(r.held) > 0 { // until nothing more comes for a moment
				_ = c.SetReadDeadline(time.Now().Add(5 * time.Millisecond))
			}
			m, err := c.Read(buf[n:])
			switch {
			case err != nil && isTimeout(err):
				for _, st := range r.held {
					st.Reset(http2.Cancel)
				}
				r.held = nil
			case err != nil:
				return
			}
			n += m
			k, err := r.h2.Feed(buf[:n])
			if err != nil {
				return
			}
			n = copy(buf, buf[k:n])
			r.h2.Reap()
			out := r.h2.Out()
			if _, err := c.Write(out); err != nil {
				return
			}
			r.h2.Sent(len(out))
		}
	})
	var hop *Hop
	v := &svc{pod: pod}
	v.hop = func(l *Loop) *Hop {
		if hop == nil {
			hop = l.NewHop(pod, func(ctx context.Context) (int, record.Conn, Bond, error) {
				c, err := new(net.Dialer).DialContext(ctx, "tcp", peer.String())
				if err != nil {
					return -1, nil, nil, err
				}
				fd, err := socket.TakeFD(c.(*net.TCPConn))
				return fd, nil, lasts(time.Hour), err
			}, func() { hop = nil })
		}
		return hop
	}
	addr := s.front(pod, v, false)
	batch := func(n int) {
		t.Helper()
		conns := make([]*net.TCPConn, n)
		for i := range conns {
			conns[i] = dial(t, addr)
			io.WriteString(conns[i], "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		}
		for i, c := range conns {
			_ = c.SetDeadline(time.Now().Add(5 * time.Second))
			res, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil || res.StatusCode != 503 {
				t.Fatalf("request %d: %v %v", i, res, err)
			}
			c.Close()
		}
	}
	for k := range maxSessions { // open all sessions, so that their limits are known
		batch(2 * (k + 1))
	}
	batch(64)
	s.onLoop(func(*Loop) {
		if hop == nil || len(hop.conns) > maxSessions || len(hop.waiters) != 0 {
			t.Errorf("hop %+v", hop)
		}
	})
}

// resetter is a server that resets its streams after a while.
type resetter struct {
	recorder
	h2   *http2.Conn
	held []*http2.Stream
}

func (r *resetter) OnHead(s *http2.Stream, _ *httpmsg.Head, _ bool) { r.held = append(r.held, s) }

// TestRemovePod: in the middle of everything a pod goes; its connections go
// with it, other pods do not notice.
func TestRemovePod(t *testing.T) {
	s := newStage(t, Config{})
	app := newEcho(t)
	stay := s.e.AddPod("stays")
	vs := &svc{pod: stay, to: app}
	addr := s.front(stay, vs, false)
	for round := range 20 {
		pod := s.e.AddPod(fmt.Sprint("goes ", round))
		v := &svc{pod: pod, to: app}
		a1, a2 := s.front(pod, v, false), s.front(pod, v, true)
		stop := make(chan struct{})
		var wg sync.WaitGroup
		p := new(http.Protocols)
		p.SetUnencryptedHTTP2(true)
		for _, tr := range []*http.Transport{{DialContext: to(a1)}, {DialContext: to(a2), Protocols: p}} {
			for range 3 {
				wg.Go(func() {
					c := &http.Client{Transport: tr, Timeout: 10 * time.Second}
					for {
						select {
						case <-stop:
							return
						default:
						}
						res, err := c.Post("http://a/echo", "x/y", struct{ io.Reader }{io.LimitReader(zeros{}, 300_000)})
						if err == nil {
							io.Copy(io.Discard, res.Body)
							res.Body.Close()
						}
					}
				})
			}
		}
		for i := range 1 + round {
			c := dial(t, addr)
			fmt.Fprintf(c, "GET /%d HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", i)
			if got := rest(t, c); !strings.HasPrefix(got, "HTTP/1.1 200") {
				t.Fatalf("the other pod: %q", got)
			}
			c.Close()
		}
		s.e.RemovePod(pod)
		if n := pod.Conns(); n != 0 {
			t.Errorf("%d connections after removal", n)
		}
		if b, d := v.begun.Load(), v.done.Load(); b != d {
			t.Errorf("%d exchanges began, %d are done", b, d)
		}
		s.unlisten(a1)
		s.unlisten(a2)
		close(stop)
		wg.Wait()
		if n := pod.Conns(); n != 0 {
			t.Errorf("%d connections came after removal", n)
		}
	}
	s.onLoop(func(l *Loop) {
		for k := range l.appPools() {
			if k.pod != stay {
				t.Error("a pool of a removed pod is kept")
			}
		}
	})
}

// TestFairness: bulk of one pod, and of a neighbour in the same pod, does not
// stop anyone's small requests.
func TestFairness(t *testing.T) {
	s := newStage(t, Config{})
	sink := s.app(heads(func(c *net.TCPConn, br *bufio.Reader, line string) bool {
		if strings.HasPrefix(line, "POST") {
			io.CopyN(io.Discard, br, 1<<40)
			return false
		}
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		return true
	}))
	busy, calm := s.e.AddPod("busy"), s.e.AddPod("calm")
	vb, vc := &svc{pod: busy, to: sink}, &svc{pod: calm, to: sink}
	ab, ac := s.front(busy, vb, false), s.front(calm, vc, false)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var moved atomic.Int64
	for range 6 {
		wg.Go(func() {
			c, err := net.Dial("tcp", ab)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			go func() { <-stop; c.Close() }()
			fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", int64(1)<<40)
			buf := make([]byte, 256<<10)
			for {
				n, err := c.Write(buf)
				if moved.Add(int64(n)); err != nil {
					return
				}
			}
		})
	}
	eventually(t, "bulk moves", func() bool { return moved.Load() > 16<<20 })
	for name, addr := range map[string]string{"same pod": ab, "other pod": ac} {
		c := dial(t, addr)
		br := bufio.NewReader(c)
		from, start := moved.Load(), time.Now()
		for range 50 {
			io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
			res, err := http.ReadResponse(br, nil)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			io.Copy(io.Discard, res.Body)
		}
		t.Logf("%s: 50 requests in %v while %d MB moved", name, time.Since(start).Round(time.Millisecond), (moved.Load()-from)>>20)
	}
	close(stop)
	wg.Wait()
}

// TestPanicOfAService costs a connection, not the loop.
func TestPanicOfAService(t *testing.T) {
	for _, where := range []string{"request", "response", "failed"} {
		for _, h2 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s h2=%v", where, h2), func(t *testing.T) {
				s := newStage(t, Config{})
				pod := s.e.AddPod("p")
				var armed atomic.Bool
				armed.Store(true)
				boom := func(at string) {
					if at == where && armed.CompareAndSwap(true, false) {
						panic("boom")
					}
				}
				v := &bomb{svc: &svc{pod: pod, to: s.app(heads(func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
					if where == "failed" && armed.Load() {
						return false
					}
					io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
					return true
				}))}, boom: boom}
				addr := s.front(pod, v, h2)
				p := new(http.Protocols)
				p.SetUnencryptedHTTP2(h2)
				p.SetHTTP1(!h2)
				tr := &http.Transport{DialContext: to(addr), Protocols: p, DisableKeepAlives: true}
				c := &http.Client{Transport: tr, Timeout: 10 * time.Second}
				s.panics = 1
				if res, err := c.Get("http://a/"); err == nil {
					res.Body.Close()
				}
				res, err := c.Get("http://a/")
				if err != nil || res.StatusCode != 200 {
					t.Fatal(res, err)
				}
				res.Body.Close()
				tr.CloseIdleConnections()
				eventually(t, "its connections are closed", func() bool { return pod.Conns() <= 1 })
			})
		}
	}
}

type bomb struct {
	*svc
	boom func(at string)
}

func (b *bomb) Request(x *exchange.Exchange) { b.boom("request"); b.svc.Request(x) }
func (b *bomb) Response(x *exchange.Exchange, h *httpmsg.Head) {
	b.boom("response")
	b.svc.Response(x, h)
}
func (b *bomb) Failed(x *exchange.Exchange, c exchange.Code) { b.boom("failed"); b.svc.Failed(x, c) }

// TestStopWithOpenConnections: whatever is going on, the end of the context is the end of it all.
func TestStopWithOpenConnections(t *testing.T) {
	for range 10 {
		hang := make(chan struct{})
		m := newMesh(t, Config{}, (&stage{t: t}).app(heads(func(c *net.TCPConn, _ *bufio.Reader, line string) bool {
			if strings.HasPrefix(line, "GET /hang") {
				<-hang
			}
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
			return true
		})))
		var conns []net.Conn
		for i := range 20 {
			c := dial(t, []string{m.h1, m.h2}[i&1])
			conns = append(conns, c)
			switch {
			case i&1 == 1:
				io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
			case i%4 == 0:
				io.WriteString(c, "GET /hang HTTP/1.1\r\nHost: a\r\n\r\n")
			default:
				io.WriteString(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhalf")
			}
		}
		eventually(t, "requests are under way", func() bool { return m.out.begun.Load() > 2 })
		m.cancel()
		m.wg.Wait()
		if b, d := m.out.begun.Load(), m.out.done.Load(); b != d {
			t.Errorf("%d exchanges began, %d are done", b, d)
		}
		if a, b := m.src.Conns(), m.dst.Conns(); a != 0 || b != 0 {
			t.Errorf("%d and %d connections left", a, b)
		}
		for _, c := range conns {
			c.Close()
		}
		close(hang)
	}
}

// perRequest measures the allocations of one request on a warm kept connection,
// with a client and an application that allocate nothing.
func perRequest(t *testing.T, addr string) float64 {
	t.Helper()
	c := dial(t, addr)
	ask := []byte("GET /items?x=1 HTTP/1.1\r\nHost: shop\r\nUser-Agent: test\r\nAccept: */*\r\n\r\n")
	buf := make([]byte, 4096)
	one := func() {
		if _, err := c.Write(ask); err != nil {
			t.Fatal(err)
		}
		for n := 0; ; {
			m, err := c.Read(buf[n:])
			if err != nil {
				t.Fatal(err)
			}
			if n += m; n >= 2 && string(buf[n-2:n]) == "ok" {
				return
			}
		}
	}
	for range 2000 {
		one()
	}
	const n = 5000
	var a, b runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&a)
	for range n {
		one()
	}
	runtime.ReadMemStats(&b)
	return float64(b.Mallocs-a.Mallocs) / n
}

const okAnswer = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"

// TestAllocations: a request on warm connections allocates nothing, be it
// delivered on the spot or over the hop.
func TestAllocations(t *testing.T) {
	t.Run("http1 to http1", func(t *testing.T) {
		s := newStage(t, Config{})
		pod := s.e.AddPod("p")
		v := &svc{pod: pod, to: s.app(raw(okAnswer)), silent: true}
		if n := perRequest(t, s.front(pod, v, false)); n > 0.01 {
			t.Errorf("%.3f allocations a request, want 0", n)
		} else {
			t.Logf("%.4f allocations a request", n)
		}
	})
	t.Run("http1 to hop to http1", func(t *testing.T) {
		m := newMesh(t, Config{}, (&stage{t: t}).app(raw(okAnswer)))
		m.in.silent, m.out.silent = true, true
		if n := perRequest(t, m.h1); n > 0.05 {
			t.Errorf("%.3f allocations a request through both proxies, want 0", n)
		} else {
			t.Logf("%.4f allocations a request", n)
		}
	})
}
