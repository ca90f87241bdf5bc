package engine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
)

// TestFreeStreamsAreBounded: after a rush a loop keeps so many streams, and of none a great buffer.
func TestFreeStreamsAreBounded(t *testing.T) {
	s := newStage(t, Config{})
	s.onLoop(func(l *Loop) {
		for range 5000 {
			l.deadSt = append(l.deadSt, &h2stream{pend: make([]byte, 64<<10)})
		}
		l.deadSt[1].pend = make([]byte, 64<<10+1)
		(*reaper)(l).Run()
		if len(l.streams) != 4096 || len(l.deadSt) != 0 {
			t.Errorf("%d of 5000 streams are kept, %d wait", len(l.streams), len(l.deadSt))
		}
		if l.streams[0].pend == nil || l.streams[1].pend != nil || l.streams[2].pend == nil {
			t.Error("a great buffer is kept, or a small one is not")
		}
	})
}

// TestFreePairsAreBounded: the same of requests in process.
func TestFreePairsAreBounded(t *testing.T) {
	s := newStage(t, Config{})
	s.onLoop(func(l *Loop) {
		n := &Near{}
		for range 1100 {
			p := &pair{l: l, n: n}
			p.at = len(n.pairs)
			n.pairs = append(n.pairs, p)
		}
		for len(n.pairs) > 0 {
			n.pairs[len(n.pairs)-1].settle()
		}
		if len(l.pairs) != 1024 {
			t.Errorf("%d of 1100 pairs are kept", len(l.pairs))
		}
	})
}

// counted is a connection whose limits of time are looked at.
type counted struct{ n *int }

func (c counted) tick() { *c.n++ }

// TestAgingIsBounded: when limits of time shrink, an iteration looks at so many connections, and the next ones at the rest.
func TestAgingIsBounded(t *testing.T) {
	s := newStage(t, Config{})
	n := 0
	a := &aging{conns: slices.Repeat([]aged{counted{&n}}, 600)}
	var seen []int
	s.onLoop(func(l *Loop) {
		a.l = l
		a.Run()
		seen = append(seen, n)
	})
	eventually(t, "all are looked at", func() (all bool) {
		s.onLoop(func(*Loop) { all = n == 600 })
		return all
	})
	if seen[0] != 256 {
		t.Errorf("%d connections are looked at at once", seen[0])
	}
}

// TestIdleAppConnectionsAreBounded: a further connection to an application is closed once it is idle.
func TestIdleAppConnectionsAreBounded(t *testing.T) {
	const conns = 300
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	var asked atomic.Int64
	all := make(chan struct{})
	v := &svc{pod: pod, to: s.app(heads(func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
		if asked.Add(1) == conns {
			close(all)
		}
		<-all // each needs a connection of its own
		_, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		return err == nil
	}))}
	addr := s.front(pod, v, false)
	var wg sync.WaitGroup
	for range conns {
		c := dial(t, addr)
		wg.Go(func() {
			fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
			if res, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || res.StatusCode != 200 {
				t.Errorf("%v, %v", res, err)
			}
		})
	}
	wg.Wait()
	eventually(t, "of those to the application 256 are kept", func() (ok bool) {
		s.onLoop(func(l *Loop) {
			for _, p := range l.apps {
				ok = len(p.idle) == 256 && p.n == 256
			}
		})
		return ok
	})
}

// TestLingerIsBounded: whoever goes on sending after its request was refused is cut.
func TestLingerIsBounded(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	fd := rawDial(t, s.front(pod, &svc{pod: pod, request: local}, false))
	t.Cleanup(func() { unix.Close(fd) })
	send := func(p []byte) {
		if _, err := unix.Write(fd, p); err != nil {
			t.Fatal(err)
		}
	}
	send([]byte("GET / HTTP/1.1\r\nHost : a\r\n\r\n"))
	lingers := func(f func(c *h1server) bool) func() bool {
		return func() (ok bool) {
			s.onLoop(func(l *Loop) {
				l.Each(func(src reactor.Source) {
					if c, is := src.(*h1server); is && c.state == stLinger {
						ok = f(c)
					}
				})
			})
			return ok
		}
	}
	eventually(t, "the refused lingers", lingers(func(c *h1server) bool {
		c.l.Disarm(&c.timer) // it is not the time that ends it
		c.lingered = 64<<20 - 1000
		return true
	}))
	send(make([]byte, 1000))
	eventually(t, "and may send 64 MiB", lingers(func(c *h1server) bool { return c.lingered == 64<<20 }))
	send(make([]byte, 1))
	eventually(t, "and no byte more", func() bool { return pod.Conns() == 0 })
}

// TestDrainsAreBounded: of answers that are given up while they come, a session throws away so many at once; the
// others are cut.
func TestDrainsAreBounded(t *testing.T) {
	const n = 90
	m := newMesh(t, Config{}, netip.AddrPort{})
	var again sync.WaitGroup // requests that have been seen twice
	again.Add(n)
	var mu sync.Mutex
	seen := map[string]bool{} // guarded by mu
	app := m.app(func(c *net.TCPConn) {
		br := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(br)
			if err != nil {
				return
			}
			mu.Lock()
			second := seen[req.URL.Path]
			seen[req.URL.Path] = true
			mu.Unlock()
			if second {
				again.Done()
				_, err = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
			} else if _, err = io.WriteString(c, "HTTP/1.1 503 x\r\nContent-Length: 5\r\n\r\n"); err == nil {
				again.Wait()
				_, err = io.WriteString(c, "again")
			}
			if err != nil {
				return
			}
		}
	})
	most, cut := 0, uint64(0)
	m.onLoop(func(l *Loop) {
		m.in.to = app
		m.out.request = func(x *exchange.Exchange) bool { x.KeepForReplay(); return false }
		m.out.response = func(x *exchange.Exchange, h *httpmsg.Head) {
			if h.Status != 503 {
				return
			}
			x.Retire()
			l.Each(func(s reactor.Source) {
				if c, ok := s.(*h2conn); ok && c.client {
					most = max(most, c.drains)
				}
			})
			m.out.send(x)
		}
	})
	var wg sync.WaitGroup
	for i := range n {
		c := dial(t, m.h1)
		wg.Go(func() {
			fmt.Fprintf(c, "GET /%d HTTP/1.1\r\nHost: a\r\n\r\n", i)
			if res, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || res.StatusCode != 200 {
				t.Errorf("request %d: %v, %v", i, res, err)
			}
		})
	}
	wg.Wait()
	m.onLoop(func(l *Loop) {
		l.Each(func(s reactor.Source) {
			if c, ok := s.(*h2conn); ok && !c.client {
				cut += c.h2.Stats().PeerResets
			}
		})
	})
	if most != 64 || cut != n-64 {
		t.Errorf("%d of %d answers are thrown away as they come, %d cut", most, n, cut)
	}
}
