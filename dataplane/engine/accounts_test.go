package engine

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"

	"aether/dataplane/exchange"
	"aether/dataplane/reactor"
	"aether/e2e/testseed"
)

// unruly1 answers each request of HTTP/1 in one of the ways that applications do.
func unruly1(r func(n int) int) func(c *net.TCPConn) {
	return func(c *net.TCPConn) {
		br := bufio.NewReader(c)
		for {
			line, err := br.ReadString('\n')
			if err != nil {
				return
			}
			for line != "\r\n" {
				if line, err = br.ReadString('\n'); err != nil {
					return
				}
			}
			size := r(1 << (4 * (1 + r(5))))
			switch r(7) {
			case 0: // cut short
				fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nab", size+3)
				return
			case 1: // whole, and then a reset, for bytes of the request are not read
				fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", size, body(size))
				reset(c)
				return
			case 2:
				fmt.Fprintf(c, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n%s", body(size))
				return
			case 3:
				fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nx-end: yes\r\n\r\n", size+1, body(size+1))
				if br.Buffered() > 0 {
					return
				}
			case 4: // nothing
				return
			case 5:
				io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n")
				return
			default:
				fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", size, body(size))
			}
		}
	}
}

// unruly2 is unruly1 by HTTP/2.
func unruly2(r func(n int) int) http.HandlerFunc {
	return func(w http.ResponseWriter, q *http.Request) {
		size := r(1 << (4 * (1 + r(5))))
		switch r(6) {
		case 0:
			_, _ = w.Write(body(size))
			panic(http.ErrAbortHandler)
		case 1: // early
		case 2:
			w.Header().Set("Trailer", "x-end")
			defer w.Header().Set("x-end", "yes")
		case 3:
			_ = q.Context().Value(netConn{}).(net.Conn).Close()
		default:
			_, _ = io.Copy(io.Discard, q.Body)
		}
		_, _ = w.Write(body(size))
	}
}

// TestAccountsComeBack: whatever clients and applications do, once all of them have gone nobody holds anything: no pod
// memory, no place in a pool, no connection, no request.
func TestAccountsComeBack(t *testing.T) {
	type way struct {
		s        *stage
		h1, h2   string
		pods     []*Pod
		services []*svc
	}
	for name, open := range map[string]func(t *testing.T, to func(s *stage) (netip.AddrPort, bool)) way{
		"hop": func(t *testing.T, to func(s *stage) (netip.AddrPort, bool)) way {
			m := newMesh(t, Config{}, netip.AddrPort{})
			m.in.to, m.in.h2 = to(m.stage)
			return way{m.stage, m.h1, m.h2, []*Pod{m.src, m.dst}, []*svc{m.in, m.out}}
		},
		"in process": func(t *testing.T, to func(s *stage) (netip.AddrPort, bool)) way {
			m := newNear(t, netip.AddrPort{})
			m.in.to, m.in.h2 = to(m.stage)
			return way{m.stage, m.at, m.front(m.src, m.out, true), []*Pod{m.src, m.dst}, []*svc{m.in, m.out}}
		},
	} {
		for _, h2 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, h2 %v", name, h2), func(t *testing.T) {
				seed := testseed.Seed(t)
				var mu sync.Mutex
				rnd := rand.New(rand.NewPCG(seed, 1))
				r := func(n int) int { mu.Lock(); defer mu.Unlock(); return rnd.IntN(max(n, 1)) }
				w := open(t, func(s *stage) (netip.AddrPort, bool) {
					if !h2 {
						return s.app(unruly1(r)), false
					}
					return s.h2App(unruly2(r)), true
				})
				w.s.onLoop(func(*Loop) {
					for _, v := range w.services { // both keep bodies to send them again
						inner := v.request
						v.request = func(x *exchange.Exchange) bool {
							x.KeepForReplay()
							return inner != nil && inner(x)
						}
					}
				})
				var wg sync.WaitGroup
				for range 12 {
					wg.Go(func() {
						for range 20 {
							if r(2) == 0 {
								rude1(t, w.h1, r)
							} else {
								rude2(t, w.h2, r)
							}
						}
					})
				}
				wg.Wait()
				var left string
				defer func() {
					if left != "" {
						t.Log(left)
					}
				}()
				eventually(t, "all has been given back", func() bool {
					left = ""
					w.s.onLoop(func(l *Loop) {
						for _, p := range w.pods {
							sh := p.share(l)
							if held := sh.held - standing(l, p, &left); held != 0 || sh.kept != (exchange.Share{}) || len(sh.queue) > 0 {
								left += fmt.Sprintf("pod %s: %d bytes held, %+v kept, %d tasks; ", p.Name, held, sh.kept, len(sh.queue))
							}
						}
					})
					for i, v := range w.services {
						if b, d := v.begun.Load(), v.done.Load(); b != d {
							left += fmt.Sprintf("service %d: %d of %d requests are over; ", i, d, b)
						}
					}
					return left == ""
				})
			})
		}
	}
}

// standing is what the pod's idle connections hold by themselves; what else there is on them it adds to left.
func standing(l *Loop, p *Pod, left *string) (n int) {
	l.Each(func(s reactor.Source) {
		switch c := s.(type) {
		case *h2conn:
			if c.pod != p {
				return
			}
			if n += c.held; c.kept != 0 || len(c.waits) > 0 || c.h2.Streams() > 0 || !c.client && !c.mesh {
				*left += fmt.Sprintf("connection (client %v): %d kept, %d wait, %d streams; ", c.client, c.kept, len(c.waits), c.h2.Streams())
			}
		case *h1client:
			if c.transport.pod == p {
				n += c.held
			}
		case *h1server:
			*left += "a client's connection; "
		}
	})
	return n
}

// rude1 asks by HTTP/1, reads as much as it likes, and goes as it likes.
func rude1(t *testing.T, addr string, r func(int) int) {
	c := small(t, addr)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(150 * time.Millisecond)) // its patience
	for range 1 + r(3) {
		size, sent := r(200_000), 0
		switch r(4) {
		case 0:
			io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		case 1:
			fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", size)
			sent = r(size + 1)
			if r(2) == 0 {
				sent = size
			}
		case 2:
			fmt.Fprintf(c, "PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTE: trailers\r\n\r\n%x\r\n%s\r\n0\r\nx-a: b\r\n\r\n", size+1, body(size+1))
		case 3:
			io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")
		}
		c.Write(body(sent))
		if r(5) == 0 {
			c.CloseWrite()
		}
		io.CopyN(io.Discard, c, int64(r(3)*r(100_000)))
	}
	if r(2) == 0 {
		reset(c)
	}
}

// rude2 is rude1 by HTTP/2.
func rude2(t *testing.T, addr string, r func(int) int) {
	c := small(t, addr)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(150 * time.Millisecond)) // its patience
	p := newPeer2(t, c, true, oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: uint32(r(2) * r(100_000))})
	n := 1 + r(20)
	for i := range n {
		id := uint32(2*i + 1)
		switch r(4) {
		case 0:
			p.get(id, "/")
		case 1:
			p.head(id, false, request()...)
			p.WriteData(id, r(2) == 0, body(r(16<<10)))
		case 2:
			p.head(id, false, request()...)
			p.WriteData(id, false, body(r(16<<10)))
			p.head(id, true, "x-end", "yes")
		case 3:
			p.get(id, "/")
			p.WriteRSTStream(id, oracle.ErrCodeCancel)
		}
	}
	if p.flush() != nil {
		return
	}
	for range r(30) {
		f, err := p.ReadFrame()
		if err != nil {
			return
		}
		if f, ok := f.(*oracle.DataFrame); ok && len(f.Data()) > 0 && r(4) > 0 {
			p.WriteWindowUpdate(0, uint32(len(f.Data())))
			p.WriteWindowUpdate(f.StreamID, uint32(1+r(50_000)))
			if p.flush() != nil {
				return
			}
		}
		if r(50) == 0 {
			p.WriteRSTStream(uint32(2*r(n)+1), oracle.ErrCodeCancel)
		}
	}
	if r(2) == 0 {
		reset(c)
	}
}
