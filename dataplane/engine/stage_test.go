package engine

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
	"aether/mtls/record"
	"aether/tproxy/socket"
)

// stage is an engine with what a test puts around it. When the test ends, no
// descriptor and no goroutine may be left.
type stage struct {
	t      testing.TB
	e      *Engine
	cancel context.CancelFunc
	wg     sync.WaitGroup
	panics uint64 // that the test means to happen
	lns    map[string]int
	vital  bool // of the next listen
	alone  bool // nobody else opens descriptors or starts goroutines in this process meanwhile
}

// eventually waits for something that nothing announces.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func openFDs() int {
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	return len(d)
}

var warm sync.Once // Go's poller has descriptors of its own, from first use on

func newStage(t testing.TB, cfg Config) *stage {
	t.Helper()
	warm.Do(func() {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err == nil {
			ln.Close()
		}
	})
	fds, routines := openFDs(), runtime.NumGoroutine()
	if cfg.MaxLoops == 0 { // what tests keep beside a loop, such as its hop, is that one loop's
		cfg.MaxLoops = 1
	}
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s := &stage{t: t, e: e, alone: true}
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	s.wg.Go(func() { e.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		s.wg.Wait()
		for _, fd := range s.lns {
			unix.Close(fd)
		}
		var n uint64
		for _, l := range e.Loops() {
			n += l.Stats().Panics
		}
		if n != s.panics {
			t.Errorf("%d panics, want %d", n, s.panics)
		}
		if t.Failed() || !s.alone {
			return
		}
		eventually(t, "descriptors and goroutines are back to where they were", func() bool {
			return openFDs() <= fds && runtime.NumGoroutine() <= routines
		})
	})
	return s
}

// listen opens a listening socket of the pod and returns its address.
func (s *stage) listen(pod *Pod, accept Accept) string {
	s.t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		s.t.Fatal(err)
	}
	if err := errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1), // as tproxy/socket does
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1)); err != nil {
		s.t.Fatal(err)
	}
	if err := unix.Listen(fd, 1024); err != nil {
		s.t.Fatal(err)
	}
	sa, _ := unix.Getsockname(fd)
	listen := pod.Listen
	if s.vital {
		listen = pod.ListenVital
	}
	if err := listen(fd, accept); err != nil {
		s.t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", sa.(*unix.SockaddrInet4).Port)
	if s.lns == nil {
		s.lns = map[string]int{}
	}
	s.lns[addr] = fd
	return addr
}

// unlisten closes a listening socket, whose pod has been removed.
func (s *stage) unlisten(addr string) {
	unix.Close(s.lns[addr])
	delete(s.lns, addr)
}

// front serves HTTP/1 (or HTTP/2) of a pod by svc.
func (s *stage) front(pod *Pod, svc exchange.Service, h2 bool) string {
	pools := map[*Loop]*exchange.Pool{}
	return s.listen(pod, func(l *Loop, fd int) {
		if pools[l] == nil {
			pools[l] = &exchange.Pool{Service: svc}
		}
		serve := l.ServeHTTP1
		if h2 {
			serve = l.ServeHTTP2
		}
		if err := serve(fd, nil, &ConnInfo{Pod: pod, Loop: l, Pool: pools[l]}, nil); err != nil {
			unix.Close(fd)
		}
	})
}

// app runs serve for each connection it accepts, and closes them at the end of the test.
func (s *stage) app(serve func(c *net.TCPConn)) netip.AddrPort {
	s.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	over := false
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			if over {
				c.Close()
			} else {
				open[c] = true
			}
			mu.Unlock()
			wg.Go(func() {
				defer func() {
					c.Close()
					mu.Lock()
					delete(open, c)
					mu.Unlock()
				}()
				serve(c.(*net.TCPConn))
			})
		}
	})
	s.t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		over = true
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return netip.MustParseAddrPort(ln.Addr().String())
}

// svc is a service that sends every request to one application, or over a hop.
type svc struct {
	pod      *Pod
	to       netip.AddrPort
	h2       bool
	hop      func(l *Loop) *Hop // not nil: over this
	request  func(x *exchange.Exchange) bool
	response func(x *exchange.Exchange, h *httpmsg.Head)
	begun    atomic.Int64
	done     atomic.Int64
	codes    [16]atomic.Int64 // of Failed
	last     atomic.Pointer[string]
	silent   bool     // keep no last
	faults   sync.Map // FaultOf of what ended
}

func (s *svc) send(x *exchange.Exchange) {
	l := x.Conn.(*ConnInfo).Loop
	if s.hop != nil {
		s.hop(l).Send(x)
		return
	}
	l.Send(x, s.pod, plainSockets{}, s.to, s.h2, nil)
}

func (s *svc) Request(x *exchange.Exchange) {
	s.begun.Add(1)
	if s.request != nil && s.request(x) {
		return
	}
	s.send(x)
}

func (s *svc) Response(x *exchange.Exchange, h *httpmsg.Head) {
	if s.response != nil {
		s.response(x, h)
	}
}

func (s *svc) Failed(x *exchange.Exchange, c exchange.Code) {
	s.codes[c].Add(1)
	if x.Resendable(c) && x.Attempts < 3 {
		s.send(x)
		return
	}
	x.Reply(&httpmsg.Head{Status: 503}, []byte(c.String()))
}

func (s *svc) Done(x *exchange.Exchange) {
	defer s.done.Add(1) // who waits for it looks at last
	if s.silent {
		return
	}
	s.faults.Store(FaultOf(x.Cause), true)
	how := fmt.Sprintf("%s %s %d", x.Ended, x.Code, x.Status)
	s.last.Store(&how)
}

// clock is a test's clock for Config.Now.
type clock struct{ now atomic.Int64 }

func newClock() *clock {
	c := &clock{}
	c.now.Store(int64(time.Hour))
	return c
}

func (c *clock) Now() int64 { return c.now.Load() }

// move lets d pass and makes every loop notice.
func (c *clock) move(t testing.TB, e *Engine, d time.Duration) {
	t.Helper()
	c.now.Add(int64(d))
	for range 2 {
		for _, l := range e.Loops() {
			done := make(chan struct{})
			if err := l.Post(func() { close(done) }); err != nil {
				t.Fatal(err)
			}
			<-done
		}
	}
}

func dial(t testing.TB, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	return c.(*net.TCPConn)
}

// raw is an application that reads one head and the given length of body at a time, and
// answers the same bytes, without an allocation.
func raw(answer string) func(c *net.TCPConn) {
	return func(c *net.TCPConn) {
		buf, out := make([]byte, 64<<10), []byte(answer)
		n := 0
		for {
			m, err := c.Read(buf[n:])
			if err != nil {
				return
			}
			n += m
			for n >= 4 && string(buf[n-4:n]) == "\r\n\r\n" { // no pipelining on a proxy's connection
				n = 0
				if _, err := c.Write(out); err != nil {
					return
				}
			}
		}
	}
}

// heads is an application that gives serve each request's connection once its head was read.
func heads(serve func(c *net.TCPConn, br *bufio.Reader, line string) bool) func(c *net.TCPConn) {
	return func(c *net.TCPConn) {
		br := bufio.NewReader(c)
		for {
			line, err := br.ReadString('\n')
			if err != nil {
				return
			}
			for {
				f, err := br.ReadString('\n')
				if err != nil {
					return
				}
				if f == "\r\n" {
					break
				}
			}
			if !serve(c, br, line) {
				return
			}
		}
	}
}

// tlsPair makes a server's and a client's configuration that trust each other.
func tlsPair(t testing.TB) (server, client *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"a"}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tpl, tpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, _ := x509.ParseCertificate(der)
	roots := x509.NewCertPool()
	roots.AddCert(leaf)
	cert := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	return &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true, NextProtos: []string{"h2"}},
		&tls.Config{RootCAs: roots, ServerName: "a", MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"}}
}

// mesh is the whole way: a client's pod with a front, the hop over TLS, and
// the destination's pod, whose service delivers to an application.
type mesh struct {
	*stage
	src, dst   *Pod
	in, out    *svc
	hops       atomic.Int64 // sessions made
	life       time.Duration
	refuse     atomic.Bool // fail to dial
	h1, h2     string      // fronts
	hopAddr    string
	peer       *tls.Config // of whoever dials hopAddr
	theHop     *Hop        // on the loop
	hopsClosed int
}

func newMesh(t testing.TB, cfg Config, app netip.AddrPort) *mesh {
	t.Helper()
	m := &mesh{stage: newStage(t, cfg), life: time.Hour}
	now := cfg.Now
	if now == nil {
		now = reactor.Monotonic
	}
	sc, cc := tlsPair(t)
	m.peer = cc
	m.src, m.dst = m.e.AddPod("src"), m.e.AddPod("dst")
	m.in = &svc{pod: m.dst, to: app}
	pool := &exchange.Pool{Service: m.in}
	m.hopAddr = m.listen(m.dst, func(l *Loop, fd int) {
		l.Go(func() {
			c, err := socket.MakeConn(fd)
			if err != nil {
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			st := record.Server(c, sc, record.Own)
			if err := st.Handshake(ctx); err != nil {
				c.Close()
				return
			}
			rec := st.Flip()
			if fd, err = socket.TakeFD(c); err != nil {
				return
			}
			if l.Post(func() {
				if l.ServeHTTP2(fd, rec, &ConnInfo{Pod: m.dst, Loop: l, Pool: pool}, nil) != nil {
					unix.Close(fd)
				}
			}) != nil {
				unix.Close(fd)
			}
		})
	})
	m.out = &svc{pod: m.src, hop: func(l *Loop) *Hop {
		if m.theHop == nil {
			m.theHop = l.NewHop(m.src, func(ctx context.Context) (int, record.Conn, Bond, error) {
				if m.refuse.Load() {
					return -1, nil, nil, io.ErrUnexpectedEOF
				}
				var d net.Dialer
				c, err := d.DialContext(ctx, "tcp", m.hopAddr)
				if err != nil {
					return -1, nil, nil, err
				}
				st := record.Client(c, cc, record.Own)
				if err := st.Handshake(ctx); err != nil {
					c.Close()
					return -1, nil, nil, err
				}
				rec := st.Flip()
				fd, err := socket.TakeFD(c.(*net.TCPConn))
				if err != nil {
					return -1, nil, nil, err
				}
				m.hops.Add(1)
				return fd, rec, ends{now() + int64(m.life), now}, nil
			}, func() { m.theHop = nil; m.hopsClosed++ })
		}
		return m.theHop
	}}
	m.h1 = m.front(m.src, m.out, false)
	m.h2 = m.front(m.src, m.out, true)
	return m
}

// onLoop runs f on the first loop and waits for it.
func (s *stage) onLoop(f func(l *Loop)) {
	s.t.Helper()
	l := s.e.Loops()[0]
	done := make(chan struct{})
	if err := l.Post(func() { defer close(done); f(l) }); err != nil {
		s.t.Fatal(err)
	}
	<-done
}

// local answers by itself.
func local(x *exchange.Exchange) bool {
	x.Reply(&httpmsg.Head{Status: 421}, []byte("local\n"))
	return true
}

// lasts is a Bond that is as far from its end whenever it is asked.
type lasts time.Duration

func (b lasts) Left() time.Duration    { return time.Duration(b) }
func (b lasts) Ask(bool) time.Duration { return time.Duration(b) }
func (b lasts) Release()               {}

// ends is a Bond that is not renewed.
type ends struct {
	at  int64
	now func() int64
}

func (b ends) Left() time.Duration    { return time.Duration(b.at - b.now()) }
func (b ends) Ask(bool) time.Duration { return b.Left() }
func (b ends) Release()               {}
