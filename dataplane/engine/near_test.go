package engine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"aether/dataplane/exchange"
	"aether/dataplane/reactor"
)

// near is two pods of one process: a client's with a front, and the
// destination's, whose service delivers to an application.
type near struct {
	*stage
	src, dst *Pod
	in, out  *svc
	at       string
	n        *InProcess // on the loop
	fresh    atomic.Bool
	refuse   atomic.Bool
	meets    atomic.Int64
	wait     chan struct{} // not nil: meeting waits for it
}

func newNear(t testing.TB, app netip.AddrPort) *near {
	t.Helper()
	return newNearOf(t, Config{}, app)
}

func newNearOf(t testing.TB, cfg Config, app netip.AddrPort) *near {
	t.Helper()
	m := &near{stage: newStage(t, cfg)}
	m.fresh.Store(true)
	m.src, m.dst = m.e.AddPod("src"), m.e.AddPod("dst")
	m.in = &svc{pod: m.dst, to: app}
	pool := &exchange.Pool{Service: m.in}
	m.out = &svc{pod: m.src}
	m.out.request = func(x *exchange.Exchange) bool {
		l := x.Conn.(*ConnInfo).Loop
		if m.n == nil {
			m.n = l.NewInProcess(m.src, m.dst, func(ctx context.Context) (LocalPeer, error) {
				m.meets.Add(1)
				if m.wait != nil {
					select {
					case <-m.wait:
					case <-ctx.Done():
						return LocalPeer{}, ctx.Err()
					}
				}
				if m.refuse.Load() {
					return LocalPeer{}, errors.New("not who it has to be")
				}
				return LocalPeer{Info: &ConnInfo{Pod: m.dst, Loop: l, Pool: pool}, Fresh: m.fresh.Load, Life: time.Hour}, nil
			}, func() { m.n = nil })
		}
		m.n.Send(x)
		return true
	}
	m.at = m.front(m.src, m.out, false)
	return m
}

func (m *near) get(path string) (int, string) {
	m.t.Helper()
	c := dial(m.t, m.at)
	defer c.Close()
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", path)
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0, err.Error()
	}
	b, _ := io.ReadAll(res.Body)
	return res.StatusCode, string(b)
}

// none waits until no pair and no exchange is left.
func (m *near) none() {
	m.t.Helper()
	eventually(m.t, "nothing is under way", func() (none bool) {
		m.onLoop(func(*Loop) { none = m.n == nil || len(m.n.streams) == 0 })
		return none && m.in.begun.Load() == m.in.done.Load() && m.out.begun.Load() == m.out.done.Load()
	})
}

// TestNearMeets: nothing is sent before the two have met, each change makes them meet
// anew, and who is refused is refused to all that wait.
func TestNearMeets(t *testing.T) {
	m := newNear(t, newApp(t))
	m.wait = make(chan struct{})
	const waiting = 5
	answers := make(chan int, waiting)
	ask := func() {
		for range waiting {
			go func() {
				status, _ := m.get("/")
				answers <- status
			}()
		}
		eventually(t, "they wait", func() (ok bool) {
			m.onLoop(func(*Loop) { ok = m.n != nil && len(m.n.waiters) == waiting })
			return ok
		})
	}
	for i, refuse := range []bool{true, false} {
		m.refuse.Store(refuse)
		begun := m.in.begun.Load()
		ask()
		if got := m.in.begun.Load(); got != begun || m.meets.Load() != int64(i+1) {
			t.Errorf("%d requests have reached a destination that was not met, %d meetings", got-begun, m.meets.Load())
		}
		m.wait <- struct{}{}
		for range waiting {
			if status := <-answers; (status == 200) == refuse {
				t.Errorf("refused %v: %d", refuse, status)
			}
		}
	}
	if n := m.out.codes[exchange.Connect].Load(); n != waiting {
		t.Errorf("%d requests were told that nobody could be met, want %d", n, waiting)
	}
	close(m.wait)
	if status, _ := m.get("/"); status != 200 || m.meets.Load() != 2 {
		t.Errorf("%d, %d meetings, want none anew", status, m.meets.Load())
	}
	m.fresh.Store(false)
	m.refuse.Store(true)
	if status, _ := m.get("/"); status != 503 || m.meets.Load() != 3 {
		t.Errorf("what was met by is gone: %d, %d meetings", status, m.meets.Load())
	}
	m.none()
}

// newApp is an application that answers GET with its path, and anything else with the
// length of its body.
func newApp(t testing.TB) netip.AddrPort {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, r.URL.Path, " ", n, " ", err)
	})}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(ln) }()
	t.Cleanup(func() { srv.Close(); <-done })
	return netip.MustParseAddrPort(ln.Addr().String())
}

// TestNearIsBounded: an application that does not read, and a client that does not, stop the
// other end; no more than pairHigh of a request's body is kept between, nothing of an
// answer's, and all of it arrives once they read.
func TestNearIsBounded(t *testing.T) {
	const size = 24 << 20
	read := make(chan struct{})
	s := strings.Repeat("0123456789abcdef", size/16)
	stage := newNear(t, (&stage{t: t}).app(func(c *net.TCPConn) {
		br := bufio.NewReader(c)
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		if req.Method == "GET" {
			_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", size, s)
			return
		}
		<-read
		b, _ := io.ReadAll(req.Body)
		_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n%-5v", string(b) == s)
	}))
	c := dial(t, stage.at)
	go func() { _, _ = fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", size, s) }()
	eventually(t, "the upload stalls", func() (stalled bool) {
		stage.onLoop(func(l *Loop) {
			l.Each(func(src reactor.Source) {
				if c, ok := src.(*h1server); ok {
					stalled = stalled || c.stalled
				}
			})
			if stalled = stalled && stage.n != nil && len(stage.n.streams) == 1; stage.n != nil {
				for _, p := range stage.n.streams {
					if n := len(p.buf) - p.off; n > localHigh {
						t.Errorf("%d bytes are kept, the bound is %d", n, localHigh)
					}
					stalled = stalled && p.stalled && p.starved
				}
			}
		})
		return stalled
	})
	close(read)
	br := bufio.NewReader(c)
	res, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(res.Body); string(b) != "true " {
		t.Errorf("the application got something else than was sent: %s", b)
	}
	d := dial(t, stage.at)
	fmt.Fprint(d, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	eventually(t, "the answer stalls", func() (stalled bool) {
		stage.onLoop(func(l *Loop) {
			l.Each(func(src reactor.Source) {
				if c, ok := src.(*h1client); ok {
					stalled = stalled || c.stalled
				}
			})
		})
		return stalled
	})
	if res, err = http.ReadResponse(bufio.NewReader(d), nil); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(res.Body); err != nil || string(b) != s {
		t.Errorf("%d bytes came, %v", len(b), err)
	}
	stage.none()
}

// TestNearEnds: whichever pod is removed, the requests between the two end on both
// sides, each once; and a service that panics costs the request that it panicked over.
func TestNearEnds(t *testing.T) {
	for _, who := range []string{"source", "destination", "closed", "panic"} {
		t.Run(who, func(t *testing.T) {
			inside := make(chan struct{}, 8)
			m := newNear(t, (&stage{t: t}).app(func(c *net.TCPConn) {
				if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
					inside <- struct{}{}
					_, _ = io.Copy(io.Discard, c)
				}
			}))
			if who == "panic" {
				m.panics = 1
				m.onLoop(func(*Loop) { m.in.request = func(*exchange.Exchange) bool { panic("meant") } })
				if status, text := m.get("/"); status != 503 || text != exchange.Internal.String() {
					t.Errorf("%d %s", status, text)
				}
				m.onLoop(func(*Loop) { m.in.request = local })
				if status, _ := m.get("/"); status != 421 {
					t.Errorf("the next one: %d", status)
				}
				m.none()
				return
			}
			const n = 3
			answers := make(chan int, n)
			for range n {
				go func() {
					status, _ := m.get("/")
					answers <- status
				}()
				<-inside
			}
			want := 503
			switch who {
			case "source":
				m.e.RemovePod(m.src)
				want = 0
			case "destination":
				m.e.RemovePod(m.dst)
			default:
				m.onLoop(func(*Loop) { m.n.Close(errors.New("gone")) })
			}
			for range n {
				if status := <-answers; status != want {
					t.Errorf("status %d, want %d", status, want)
				}
			}
			m.none()
			if who != "source" && m.out.codes[exchange.Closed].Load() != n {
				t.Errorf("%d of %d were told that it was closed", m.out.codes[exchange.Closed].Load(), n)
			}
		})
	}
}

// TestNearAllocates: a request between two that have met allocates nothing.
func TestNearAllocates(t *testing.T) {
	m := newNear(t, (&stage{t: t}).app(raw(okAnswer)))
	m.onLoop(func(*Loop) { m.in.silent, m.out.silent = true, true })
	if n := perRequest(t, m.at); n > 0.05 {
		t.Errorf("%.3f allocations a request through both sides, want 0", n)
	}
}
