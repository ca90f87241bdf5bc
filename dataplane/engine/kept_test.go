package engine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// keeping is a service that sends again what may be, as both sides of the hop do.
type keeping struct {
	*svc
	before func(x *exchange.Exchange) // on the loop, before each request goes out the first time
	resent atomic.Int64
}

func (k *keeping) Request(x *exchange.Exchange) {
	x.KeepForReplay()
	if k.before != nil {
		k.before(x)
	}
	k.svc.Request(x)
}

func (k *keeping) Failed(x *exchange.Exchange, c exchange.Code) {
	k.codes[c].Add(1)
	if x.Attempts < 3 && x.Resendable(c) {
		k.resent.Add(1)
		if k.request == nil || !k.request(x) {
			k.send(x)
		}
		return
	}
	x.Reply(&httpmsg.Head{Status: 503}, []byte(c.String()))
}

// posted reads one request with its body and returns its path.
func posted(br *bufio.Reader) (path string, err error) {
	req, err := http.ReadRequest(br)
	if err != nil {
		return "", err
	}
	_, err = io.Copy(io.Discard, req.Body)
	return req.URL.Path, err
}

// unread is how many bytes wait to be read from c.
func unread(t *testing.T, c *net.TCPConn) (n int) {
	rc, err := c.SyscallConn()
	if err == nil {
		err = rc.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
	}
	if err != nil {
		t.Error(err)
	}
	return n
}

// TestAnswersThenCloses: of an application that closes each connection behind its answer
// without a word, clients that send at once see nothing, and nothing is run twice.
func TestAnswersThenCloses(t *testing.T) {
	const clients, each = 8, 250
	for _, kind := range []string{"tcp", "unix"} {
		t.Run(kind, func(t *testing.T) {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			var ran sync.Map // path: times
			serve := func(c net.Conn) {
				br := bufio.NewReader(c)
				path, err := posted(br)
				if err != nil {
					return
				}
				n, _ := ran.LoadOrStore(path, new(atomic.Int64))
				n.(*atomic.Int64).Add(1)
				fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(path), path)
			}
			v := &keeping{svc: &svc{pod: pod}}
			if kind == "unix" {
				at := unixHome(t, "s")
				unixApp(t, at, serve)
				v.svc = overUnix(pod, at, false)
			} else {
				v.to = s.app(func(c *net.TCPConn) { serve(c) })
			}
			addr := s.front(pod, v, false)
			do := func(c net.Conn, br *bufio.Reader, method, path string) {
				body := "x"
				if method == "GET" {
					body = ""
				}
				fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", method, path, len(body), body)
				res, err := http.ReadResponse(br, nil)
				if err != nil {
					t.Errorf("%s %s: %v", method, path, err)
					return
				}
				b, err := io.ReadAll(res.Body)
				if err != nil || res.StatusCode != 200 || string(b) != path {
					t.Errorf("%s %s: %d %q, %v", method, path, res.StatusCode, b, err)
				}
			}
			first := dial(t, addr)
			br := bufio.NewReader(first)
			for i := range 4 { // what the application does is known then
				do(first, br, "GET", "/get/"+strconv.Itoa(i))
			}
			var wg sync.WaitGroup
			for i := range clients {
				c := dial(t, addr)
				wg.Go(func() {
					br := bufio.NewReader(c)
					for n := range each {
						do(c, br, "POST", fmt.Sprintf("/%d/%d", i, n))
					}
				})
			}
			wg.Wait()
			posts := 0
			ran.Range(func(path, n any) bool {
				if !strings.HasPrefix(path.(string), "/get/") {
					posts++
					if n := n.(*atomic.Int64).Load(); n != 1 {
						t.Errorf("POST %s was run %d times", path, n)
					}
				}
				return true
			})
			if posts != clients*each {
				t.Errorf("%d POSTs were run, want %d", posts, clients*each)
			}
		})
	}
}

// TestEndOfAKeptConnection: how a kept connection ended decides whether a POST is sent
// again: only what surely was not taken is, once, on another.
func TestEndOfAKeptConnection(t *testing.T) {
	const closes, reads, resets, halves = "closed before it was sent", "read, then closed", "reset, unread", "its side ended before, the rest read"
	for _, tt := range []struct {
		how    string
		status int
		code   exchange.Code
	}{
		{closes, 200, exchange.Unsent},
		{halves, 200, exchange.Unsent},
		{reads, 503, exchange.Stale},
		{resets, 503, exchange.Stale},
	} {
		t.Run(tt.how, func(t *testing.T) {
			s := newStage(t, Config{Now: newClock().Now}) // no connection is idle for long
			pod := s.e.AddPod("p")
			var conns, ran atomic.Int64
			now, done := make(chan struct{}), make(chan struct{})
			app := s.app(func(c *net.TCPConn) {
				br := bufio.NewReader(c)
				kept := conns.Add(1) == 1
				for n := 0; ; n++ {
					if kept && n == 2 {
						<-now
						switch tt.how {
						case closes:
							c.Close()
							close(done)
							return
						case halves:
							c.CloseWrite()
							close(done)
							io.Copy(io.Discard, br)
							return
						case resets:
							close(done)
							for unread(t, c) == 0 && !t.Failed() {
								runtime.Gosched()
							}
							c.SetLinger(0)
							return
						default:
							close(done)
						}
					}
					if _, err := posted(br); err != nil {
						return
					}
					ran.Add(1)
					if kept && n == 2 {
						return
					}
					io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
				}
			})
			v := &keeping{svc: &svc{pod: pod, to: app}}
			v.before = func(x *exchange.Exchange) {
				if string(x.Req.Path) == "/second" { // the loop has not looked for events since
					close(now)
					<-done
				}
			}
			c := dial(t, s.front(pod, v, false))
			br := bufio.NewReader(c)
			for i, path := range []string{"/first", "/again", "/second"} {
				method := []string{"GET", "GET", "POST"}[i] // the first ones show that the application keeps connections
				fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx", method, path)
				res, err := http.ReadResponse(br, nil)
				if err != nil {
					t.Fatal(err)
				}
				io.Copy(io.Discard, res.Body)
				if want := []int{200, 200, tt.status}[i]; res.StatusCode != want {
					t.Errorf("%s: %d, want %d", path, res.StatusCode, want)
				}
			}
			want := int64(3)
			if tt.how == resets {
				want = 2
			}
			if ran.Load() != want || v.codes[tt.code].Load() != 1 {
				t.Errorf("%d requests were run, want %d; failed as %v once: %v", ran.Load(), want, tt.code, v.codes[tt.code].Load() == 1)
			}
		})
	}
}

// TestEndOfASession: the same of HTTP/2, towards an application and over a hop.
func TestEndOfASession(t *testing.T) {
	for _, hop := range []bool{false, true} {
		for _, taken := range []bool{false, true} {
			t.Run(fmt.Sprintf("hop=%v taken=%v", hop, taken), func(t *testing.T) {
				s := newStage(t, Config{})
				pod := s.e.AddPod("p")
				var conns, ran atomic.Int64
				now, done := make(chan struct{}), make(chan struct{})
				peer := s.app(func(c *net.TCPConn) {
					p := newPeer2(t, c, false)
					if p.flush() != nil {
						return
					}
					kept, told := conns.Add(1) == 1, false
					for n := 0; ; {
						if kept && n == 1 && !told {
							told = true
							<-now
							if !taken {
								c.Close()
								close(done)
								return
							}
							close(done)
						}
						f, err := p.ReadFrame()
						if err != nil {
							return
						}
						h, ok := f.(*oracle.MetaHeadersFrame)
						if !ok {
							continue
						}
						ran.Add(1)
						if n++; kept && n == 2 {
							return
						}
						p.head(h.StreamID, true, ":status", "201")
						if p.flush() != nil {
							return
						}
						for kept && n == 1 { // what was sent before is read: its end is one, not a reset
							f, err := p.ReadFrame()
							if err != nil {
								return
							}
							if f, ok := f.(*oracle.DataFrame); ok && f.StreamEnded() {
								break
							}
						}
					}
				})
				v := &keeping{svc: &svc{pod: pod, to: peer, h2: true}}
				var theHop *Hop
				if hop {
					v.hop = plainHop(pod, peer.String(), &theHop)
				}
				v.before = func(x *exchange.Exchange) {
					if string(x.Req.Path) == "/second" {
						close(now)
						<-done
					}
				}
				c := dial(t, s.front(pod, v, false))
				br := bufio.NewReader(c)
				var got []int
				for _, path := range []string{"/first", "/second"} {
					fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx", path)
					res, err := http.ReadResponse(br, nil)
					if err != nil {
						t.Fatal(err)
					}
					io.Copy(io.Discard, res.Body)
					got = append(got, res.StatusCode)
				}
				want := "[201 201]"
				if taken {
					want = "[201 503]"
				}
				if fmt.Sprint(got) != want || ran.Load() != 2 {
					t.Errorf("%v, want %s; %d were run, want 2", got, want, ran.Load())
				}
			})
		}
	}
}

// TestLooksBeforeItSends: a request whose body is not kept goes to no connection of which
// the kernel knows that it has ended.
func TestLooksBeforeItSends(t *testing.T) {
	clock := newClock()
	s := newStage(t, Config{Now: clock.Now})
	pod := s.e.AddPod("p")
	var conns atomic.Int64
	now, done := make(chan struct{}), make(chan struct{})
	v := &keeping{svc: &svc{pod: pod, to: s.app(func(c *net.TCPConn) {
		kept := conns.Add(1) == 1
		br := bufio.NewReader(c)
		for n := 1; ; n++ {
			if _, err := posted(br); err != nil {
				return
			}
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
			if kept && n == 2 {
				<-now
				c.Close()
				close(done)
				return
			}
		}
	})}}
	v.before = func(x *exchange.Exchange) {
		if string(x.Req.Path) == "/second" {
			close(now)
			<-done
		}
	}
	c := dial(t, s.front(pod, v, false))
	br := bufio.NewReader(c)
	for i, path := range []string{"/first", "/again", "/second"} {
		fmt.Fprintf(c, "%s %s HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx", []string{"GET", "GET", "POST"}[i], path)
		res, err := http.ReadResponse(br, nil)
		if err != nil || res.StatusCode != 200 {
			t.Fatal(res, err)
		}
		io.Copy(io.Discard, res.Body)
		clock.move(t, s.e, 20*time.Millisecond)
	}
	if v.resent.Load() != 0 || conns.Load() != 2 {
		t.Errorf("sent again %d times, over %d connections", v.resent.Load(), conns.Load())
	}
}
