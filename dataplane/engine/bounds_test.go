package engine

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"
	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
	"aether/mtls/record"
)

// TestFreeStreamsAreBounded: after a rush a loop keeps so many streams, and of none a great buffer.
func TestFreeStreamsAreBounded(t *testing.T) {
	s := newStage(t, Config{})
	s.onLoop(func(l *Loop) {
		f := l.h2Free()
		for range 5000 {
			f.dead = append(f.dead, &h2stream{pend: make([]byte, 64<<10)})
		}
		f.dead[1].pend = make([]byte, 64<<10+1)
		f.Run()
		if len(f.streams) != 4096 || len(f.dead) != 0 {
			t.Errorf("%d of 5000 streams are kept, %d wait", len(f.streams), len(f.dead))
		}
		if f.streams[0].pend == nil || f.streams[1].pend != nil || f.streams[2].pend == nil {
			t.Error("a great buffer is kept, or a small one is not")
		}
	})
}

// TestFreePairsAreBounded: the same of requests in process.
func TestFreePairsAreBounded(t *testing.T) {
	s := newStage(t, Config{})
	s.onLoop(func(l *Loop) {
		n := &InProcess{l: l}
		for range 1100 {
			p := &localStream{l: l, owner: n}
			p.at = len(n.streams)
			n.streams = append(n.streams, p)
		}
		for len(n.streams) > 0 {
			n.streams[len(n.streams)-1].settle()
		}
		if len(l.localStreams().free) != 1024 {
			t.Errorf("%d of 1100 streams are kept", len(l.localStreams().free))
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
			for _, p := range l.appPools() {
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
			x.DiscardResponse()
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

// TestUnreadAnswersAreBounded: a client of HTTP/2 that asks faster than it reads is not read from while so much waits for it;
// nothing is lost, and it is served once it reads.
func TestUnreadAnswersAreBounded(t *testing.T) {
	const n = 6000
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	big := bytes.Repeat([]byte{'~'}, 2000) // larger than what has a place in the table
	v := &svc{pod: pod, silent: true, request: func(x *exchange.Exchange) bool {
		x.Reply(&httpmsg.Head{Status: 421, Fields: []httpmsg.Field{{Name: []byte("x-big"), Value: big}}}, nil)
		return true
	}}
	pool := &exchange.Pool{Service: v}
	c := dial(t, s.listen(pod, func(l *Loop, fd int) {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 64<<10)
		if err := l.ServeHTTP2(fd, nil, &ConnInfo{Pod: pod, Loop: l, Pool: pool}, nil); err != nil {
			unix.Close(fd)
		}
	}))
	_ = c.SetReadBuffer(64 << 10)
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	p := newPeer2(t, c, true)
	for i := range uint32(n) {
		p.get(2*i+1, "/")
	}
	var wg sync.WaitGroup
	wg.Go(func() { p.c.Write(p.buf.Bytes()) })
	defer wg.Wait()
	waits := 0
	eventually(t, "it is not read from", func() (full bool) {
		s.onLoop(func(l *Loop) {
			l.Each(func(src reactor.Source) {
				if c, ok := src.(*h2conn); ok {
					full, waits = c.full, len(c.h2.Out())
				}
			})
		})
		return full || pod.Conns() == 0
	})
	// 512 KiB, and what a turn of the pod may ask for more.
	if waits == 0 || waits > 512<<10+128*2100 {
		t.Errorf("%d bytes wait", waits)
	}
	for got := 0; got < n; {
		f, err := p.ReadFrame()
		if err != nil {
			t.Fatalf("after %d answers: %v", got, err)
		}
		switch f := f.(type) {
		case *oracle.MetaHeadersFrame:
			got++
		case *oracle.GoAwayFrame:
			t.Fatalf("sent away after %d answers: %v", got, f.ErrCode)
		}
	}
}

// TestShareOfAnIteration: what a pod may do in an iteration, alone and beside others that have work put off, down to a least.
func TestShareOfAnIteration(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	s.onLoop(func(l *Loop) {
		sh := pod.share(l)
		for busy, most := range map[int]struct{ bytes, work, sent int }{
			1:    {512 << 10, 128, 4 << 20},
			2:    {256 << 10, 64, 2 << 20},
			1000: {64 << 10, 32, 512 << 10},
		} {
			begin := func() {
				l.backlog.iter, l.backlog.now = l.Iteration(), busy
				sh.iter = 0
			}
			begin()
			sh.addRead(most.bytes - 1)
			if sh.readSpent() {
				t.Errorf("%d pods: spent before %d bytes", busy, most.bytes)
			}
			if sh.addRead(1); !sh.readSpent() {
				t.Errorf("%d pods: not spent after %d bytes", busy, most.bytes)
			}
			begin()
			for range most.work - 1 {
				sh.addWork()
			}
			if sh.readSpent() {
				t.Errorf("%d pods: spent before %d pieces of work", busy, most.work)
			}
			if sh.addWork(); !sh.readSpent() {
				t.Errorf("%d pods: not spent after %d pieces of work", busy, most.work)
			}
			begin()
			sh.addWritten(most.sent - 1)
			if sh.writeSpent() {
				t.Errorf("%d pods: spent before %d bytes sent", busy, most.sent)
			}
			if sh.addWritten(1); !sh.writeSpent() {
				t.Errorf("%d pods: not spent after %d bytes sent", busy, most.sent)
			}
		}
		l.backlog = backlog{}
	})
}

// TestAcceptsAreBounded: a listener takes so many connections of its backlog in an iteration, and a few although the pod's
// share of it is spent.
func TestAcceptsAreBounded(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	per, all := map[uint64]int{}, 0 // the loop's
	addr := s.listen(pod, func(l *Loop, fd int) {
		per[l.Iteration()]++
		all++
		unix.Close(fd)
	})
	var fds []int
	come := func(n int) {
		for range n {
			fds = append(fds, rawDial(t, addr))
		}
	}
	s.onLoop(func(*Loop) { come(200) }) // which sees them once this has returned
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	eventually(t, "all are accepted", func() (ok bool) {
		s.onLoop(func(*Loop) { ok = all == 200 })
		return ok
	})
	s.onLoop(func(*Loop) {
		most := 0
		for _, n := range per {
			most = max(most, n)
		}
		if most != 64 {
			t.Errorf("%d are accepted in an iteration", most)
		}
	})
	s.onLoop(func(l *Loop) {
		come(20)
		pod.share(l).addRead(64 << 20)
		all = 0
		pod.listeners[s.lns[addr]].Event(0)
		if all != 8 {
			t.Errorf("%d are accepted of a pod whose share is spent", all)
		}
	})
	eventually(t, "the rest is accepted then", func() (ok bool) {
		s.onLoop(func(*Loop) { ok = all == 20 })
		return ok
	})
}

// sealer is a record layer that notes how much it is given at once.
type sealer struct {
	record.Conn
	parts []int
}

func (*sealer) Pending() bool { return false }
func (s *sealer) Seal(dst, p []byte) ([]byte, error) {
	s.parts = append(s.parts, len(p))
	return append(dst, p...), nil
}

// TestOutputIsBounded: of what a connection is to send so much is queued, less of a pod that holds too much, and so much is
// sealed at once.
func TestOutputIsBounded(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	s.onLoop(func(l *Loop) {
		sh := pod.share(l)
		for tight, want := range map[bool]int{false: 256 << 10, true: 16 << 10} {
			sh.tight = tight
			c := &h1conn{}
			c.l, c.sh = l, sh
			if n := c.queue(make([]byte, 1<<20), false); n != want || !c.starved {
				t.Errorf("%d bytes are queued (tight: %v), want %d", n, tight, want)
			}
			c.dropBuffers()
		}
		sh.tight = false
		null, err := unix.Open("/dev/null", unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(null)
		rec := &sealer{}
		c := &transport{l: l, sh: sh, fd: null, rec: rec}
		const q = 256 << 10
		if n, err := c.write(make([]byte, 3*q+1)); n != 3*q+1 || err != nil || !slices.Equal(rec.parts, []int{q, q, q, 1}) {
			t.Errorf("%d bytes are taken, sealed by %v: %v", n, rec.parts, err)
		}
	})
}

// TestLifeOfASession: a hop session takes no new requests in the last two minutes of its certificates, or in the second half
// of their rest.
func TestLifeOfASession(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	for life, want := range map[time.Duration]time.Duration{time.Hour: 58 * time.Minute, 3 * time.Minute: 90 * time.Second} {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		s.onLoop(func(l *Loop) {
			h := l.NewHop(pod, nil, nil)
			h.dialled(fds[0], nil, lasts(life), nil)
			if got := time.Duration(h.conns[0].retireAt - l.Now()); got != want {
				t.Errorf("of %v it takes requests for %v, want %v", life, got, want)
			}
			h.Close(io.EOF)
		})
		unix.Close(fds[1])
	}
}

// TestMemoryIsMeasured: and again and again, though nothing happens.
func TestMemoryIsMeasured(t *testing.T) {
	var n atomic.Int64
	newStage(t, Config{Memory: 1 << 30, Used: func() uint64 { n.Add(1); return 0 }})
	eventually(t, "it has been measured three times", func() bool { return n.Load() >= 3 })
}

// TestPingsAreForgiven: what an HTTP/2 peer did a second ago is not counted any more, and what it did less long ago is.
func TestPingsAreForgiven(t *testing.T) {
	for gap, cut := range map[time.Duration]bool{900 * time.Millisecond: true, 1100 * time.Millisecond: false} {
		ck := newClock()
		s := newStage(t, Config{Now: ck.Now})
		pod := s.e.AddPod("p")
		p := newPeer2(t, dial(t, s.front(pod, &svc{pod: pod, request: local}, true)), true)
		ping := func() (sentAway bool) {
			const n = 900 // of a thousand
			for range n {
				p.WritePing(false, [8]byte{})
			}
			p.flush()
			for acks := 0; acks < n; {
				f, err := p.ReadFrame()
				if err != nil {
					t.Fatalf("%v: %v", gap, err)
				}
				switch f := f.(type) {
				case *oracle.PingFrame:
					acks++
				case *oracle.GoAwayFrame:
					return f.ErrCode == oracle.ErrCodeEnhanceYourCalm
				}
			}
			return false
		}
		if ping() {
			t.Errorf("sent away at once")
		}
		ck.move(t, s.e, gap)
		if got := ping(); got != cut {
			t.Errorf("after %v: sent away %v, want %v", gap, got, cut)
		}
		p.c.Close()
	}
}

// TestIdleHop: a hop session without a stream is closed after half a minute, and not before.
func TestIdleHop(t *testing.T) {
	ck := newClock()
	m := newMesh(t, Config{Now: ck.Now}, netip.AddrPort{})
	m.in.to = m.app(endless)
	m.small(t)
	open := func() (n int) {
		m.onLoop(func(*Loop) {
			if m.theHop != nil {
				n = m.theHop.Open()
			}
		})
		return n
	}
	eventually(t, "the stream has ended", func() bool { return m.in.done.Load() == 1 && m.out.done.Load() == 1 })
	ck.move(t, m.e, 29500*time.Millisecond)
	if n := open(); n != 1 {
		t.Errorf("%d sessions after half a minute less half a second", n)
	}
	ck.move(t, m.e, time.Second)
	eventually(t, "closed", func() bool { return open() == 0 })
}
