package engine

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/reactor"
)

// TestCase43 (hyper 4085): a client that ends in the midst of its body has asked for nothing: the request ends
// upstream too, and the loop does not spin over the end that it was told of.
func TestCase43(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	cut := make(chan error, 1)
	v := &svc{pod: pod, to: s.app(func(c *net.TCPConn) {
		_, err := io.Copy(io.Discard, c)
		cut <- err
	})}
	c := dial(t, s.front(pod, v, false))
	io.WriteString(c, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
	s.seen(t, func(c *h1client) bool { return c.x != nil && c.x.ReqBytes == 5 })
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	<-cut // the application's connection has ended
	if got := rest(t, c); strings.Contains(got, "200") {
		t.Errorf("answered: %q", got)
	}
	eventually(t, "both are closed", func() bool { return pod.Conns() == 0 && v.done.Load() == 1 })
	l := s.e.Loops()[0]
	before := l.Stats().Iterations
	for range 10 {
		s.onLoop(func(*Loop) {})
	}
	if n := l.Stats().Iterations - before; n > 20 {
		t.Errorf("%d iterations for ten posts: the loop spins", n)
	}
}

// TestCase45 (linkerd2-proxy 3985): the limit of a head's time runs from its first byte, not
// while a kept connection is idle.
func TestCase45(t *testing.T) {
	ck := newClock()
	s := newStage(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	c := dial(t, s.front(pod, &svc{pod: pod, request: local}, false))
	br := bufio.NewReader(c)
	for range 3 {
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		res, err := http.ReadResponse(br, nil)
		if err != nil || res.StatusCode != 421 {
			t.Fatal(res, err)
		}
		io.Copy(io.Discard, res.Body)
		ck.move(t, s.e, 40*time.Second)
	}
	ck.move(t, s.e, 4*time.Minute)
	if pod.Conns() != 1 {
		t.Error("cut before idleDown")
	}
}

// TestCase46 (hyper 3780): a head that trickles in is cut off at the limit, however lively its
// connection is, the first of a connection and one of a kept connection.
func TestCase46(t *testing.T) {
	for _, kept := range []bool{false, true} {
		t.Run(fmt.Sprintf("kept=%v", kept), func(t *testing.T) {
			ck := newClock()
			s := newStage(t, Config{Now: ck.Now})
			pod := s.e.AddPod("p")
			c := dial(t, s.front(pod, &svc{pod: pod, request: local}, false))
			br := bufio.NewReader(c)
			if kept {
				io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
				res, err := http.ReadResponse(br, nil)
				if err != nil {
					t.Fatal(err)
				}
				io.Copy(io.Discard, res.Body)
				ck.move(t, s.e, time.Minute)
			}
			io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\nX: ")
			s.seen(t, func(c *h1server) bool { return c.w > c.r })
			for left := time.Duration(headTime) - 200*time.Millisecond; left > 0; left -= 3 * time.Second {
				n := 0
				s.onLoop(func(l *Loop) {
					l.Each(func(src reactor.Source) {
						if c, ok := src.(*h1server); ok {
							n = c.w
						}
					})
				})
				io.WriteString(c, "x")
				s.seen(t, func(c *h1server) bool { return c.w > n })
				ck.move(t, s.e, min(left, 3*time.Second))
			}
			if pod.Conns() != 1 {
				t.Fatal("cut too early")
			}
			ck.move(t, s.e, 400*time.Millisecond)
			res, err := http.ReadResponse(br, nil)
			if err != nil || res.StatusCode != 408 || !res.Close {
				t.Errorf("%v, %v", res, err)
			}
		})
	}
}

// TestCase66 (hyper 4040): a client that goes in the midst of an upload ends it everywhere: the hop's stream is
// reset, the application's connection cut, and nothing of it is held.
func TestCase66(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("h2=%v", h2), func(t *testing.T) {
			hold := make(chan struct{})
			release := sync.OnceFunc(func() { close(hold) })
			defer release()
			cut := make(chan int64, 1)
			m := newMesh(t, Config{}, (&stage{t: t}).app(func(c *net.TCPConn) {
				<-hold // it does not read, so that buffers fill
				n, _ := io.Copy(io.Discard, c)
				cut <- n
			}))
			const size = 100 << 20
			var c *net.TCPConn
			if h2 {
				p := newPeer2(t, dial(t, m.h2), true)
				c = p.c
				p.head(1, false, ":method", "POST", ":scheme", "http", ":path", "/", ":authority", "a", "content-length", fmt.Sprint(size))
				for range 8 { // as the first window lets through
					p.WriteData(1, false, make([]byte, 8000))
				}
				if err := p.flush(); err != nil {
					t.Fatal(err)
				}
			} else {
				c = dial(t, m.h1)
				fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", size)
				// Not more than the source's socket takes: the client's end has to get there.
				b, stalled := make([]byte, 8<<10), false
				for !stalled {
					if _, err := c.Write(b); err != nil {
						t.Fatal(err)
					}
					eventually(t, "the source's socket takes it", func() bool { return unsent(t, c) == 0 })
					m.onLoop(func(l *Loop) {
						l.Each(func(src reactor.Source) {
							if c, is := src.(*h1server); is {
								stalled = c.stalled
							}
						})
					})
				}
			}
			eventually(t, "it reached the application's connection", func() bool { return m.in.begun.Load() == 1 })
			m.seen(t, func(c *h1client) bool { return c.x != nil && c.x.ReqBytes > 0 })
			c.Close() // over HTTP/1 its end lies behind bytes that nobody can read yet
			eventually(t, "both exchanges are over", func() bool { return m.out.done.Load() == 1 && m.in.done.Load() == 1 })
			if got := *m.in.last.Load(); !strings.HasPrefix(got, exchange.Client.String()) {
				t.Errorf("the destination saw %q, want the client's going", got)
			}
			release()
			if n := <-cut; n >= size {
				t.Errorf("the application got %d bytes", n)
			}
			eventually(t, "the source's connection is closed, the hop stays, the streams are gone", func() (ok bool) {
				m.onLoop(func(l *Loop) {
					ok = m.src.Conns() == 1 && m.dst.Conns() == 1
					l.Each(func(src reactor.Source) {
						if c, is := src.(*h2conn); is {
							ok = ok && c.h2.Streams() == 0 && c.kept == 0
						}
					})
				})
				return
			})
		})
	}
}

// unsent is how much of what c wrote its peer's socket has not taken.
func unsent(t *testing.T, c *net.TCPConn) (n int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		cerr := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
		err = cmp.Or(err, cerr)
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestCase82OfTheLoop (ztunnel 1630): connections that each had a burst and are idle hold no buffer.
func TestCase82OfTheLoop(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, to: newEcho(t), silent: true}
	addr := s.front(pod, v, false)
	for range 50 {
		c := dial(t, addr)
		fmt.Fprintf(c, "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n%s", strings.Repeat("x", 300_000))
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := io.Copy(io.Discard, res.Body); n != 300_000 || err != nil {
			t.Fatal(n, err)
		}
	}
	eventually(t, "nothing is held", func() (ok bool) {
		s.onLoop(func(l *Loop) {
			ok = pod.share(l).held == 0
			l.Each(func(src reactor.Source) {
				switch c := src.(type) {
				case *h1server:
					ok = ok && c.in == nil && c.out == nil && c.sealed == nil
				case *h1client:
					ok = ok && c.in == nil && c.out == nil && c.sealed == nil
				}
			})
		})
		return
	})
	s.onLoop(func(l *Loop) {
		kept := len(l.in)*readBuf + len(l.big)*bigReadBuf + len(l.out)*4*smallOut + len(l.bigOut)*bigOut
		if most := keepBufs*(readBuf+4*smallOut) + keepBufs/8*bigReadBuf + keepBig*bigOut; kept > most {
			t.Errorf("%d bytes of free buffers are kept, want at most %d", kept, most)
		}
	})
}

// TestCase196 (fasthttp 1849): an application that resets the connection in the midst of an upload
// ends it at once, and the client sees that it failed.
func TestCase196(t *testing.T) {
	m := newMesh(t, Config{}, (&stage{t: t}).app(func(c *net.TCPConn) {
		io.CopyN(io.Discard, c, 1<<20)
		_ = c.SetLinger(0)
		c.Close()
	}))
	c := dial(t, m.h1)
	const size = 100 << 20
	fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", size)
	var sent int64
	over := make(chan struct{})
	go func() {
		defer close(over)
		b := make([]byte, 64<<10)
		for sent < size {
			n, err := c.Write(b)
			if sent += int64(n); err != nil {
				return
			}
		}
	}()
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err == nil && res.StatusCode < 500 {
		t.Errorf("%s", res.Status)
	}
	c.Close()
	<-over
	if sent >= size {
		t.Error("the whole upload was taken")
	}
	eventually(t, "both exchanges are over", func() bool { return m.out.done.Load() == 1 && m.in.done.Load() == 1 })
	eventually(t, "only the hop is left", func() bool { return m.src.Conns() == 1 && m.dst.Conns() == 1 })
}
