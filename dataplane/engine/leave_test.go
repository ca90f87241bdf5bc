package engine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"

	"aether/dataplane/exchange"
	"aether/mtls/record"
	"aether/tproxy/socket"
)

var errLeft = errors.New("the endpoint has left")

// TestHopLeaves: of an endpoint that has left, sessions without a request are closed at
// once, those with one when it has ended, and all at leaveTime; who waits is told that
// nothing was sent (decision 029).
func TestHopLeaves(t *testing.T) {
	ck := newClock()
	s := newStage(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	answer := make(chan struct{})
	asked := make(chan struct{}, 8)
	hang := make(chan struct{})
	peer := s.app(func(c *net.TCPConn) { // one request at a time
		p := newPeer2(t, c, false, oracle.Setting{ID: oracle.SettingMaxConcurrentStreams, Val: 1})
		_ = p.flush()
		f := p.next(func(f oracle.Frame) bool { _, ok := f.(*oracle.MetaHeadersFrame); return ok })
		if f == nil {
			return
		}
		asked <- struct{}{}
		select {
		case <-answer:
			p.head(f.Header().StreamID, true, ":status", "200")
			_ = p.flush()
			<-hang
		case <-hang:
		}
	})
	t.Cleanup(func() { close(hang) })
	var h *Hop
	gone := 0
	v := &svc{pod: pod, hop: func(l *Loop) *Hop {
		if h == nil {
			h = l.NewHop(pod, func(ctx context.Context) (int, record.Conn, Bond, error) {
				c, err := new(net.Dialer).DialContext(ctx, "tcp", peer.String())
				if err != nil {
					return -1, nil, nil, err
				}
				fd, err := socket.TakeFD(c.(*net.TCPConn))
				return fd, nil, lasts(time.Hour), err
			}, func() { gone++ })
		}
		return h
	}}
	front := s.front(pod, v, true)
	p := newPeer2(t, dial(t, front), true)
	for i := range uint32(5) { // one more than there may be sessions
		p.get(2*i+1, "/")
	}
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	for range maxSessions {
		<-asked
	}
	open := func() (n, waiting, empty int) {
		s.onLoop(func(*Loop) { n, waiting, empty = h.Open(), len(h.waiters), gone })
		return
	}
	is := func(what string, want, wantWaiting, wantEmpty int) {
		t.Helper()
		eventually(t, what, func() bool {
			n, w, e := open()
			return n == want && w == wantWaiting && e == wantEmpty
		})
	}
	is("all have a session but one", maxSessions, 1, 0)
	s.onLoop(func(*Loop) { h.Leave(errLeft); h.Leave(errors.New("again")) })
	is("who waits is told", maxSessions, 0, 0)
	if n := v.codes[exchange.Connect].Load(); n != 1 {
		t.Errorf("%d were told that nothing was sent, want 1", n)
	}
	s.onLoop(func(*Loop) {
		if h.dialMore(); h.dialing {
			t.Error("a further session is made")
		}
	})
	answer <- struct{}{}
	is("a session whose request has ended is closed", maxSessions-1, 0, 0)
	ck.move(t, s.e, time.Duration(leaveTime)-200*time.Millisecond)
	if n, _, _ := open(); n != maxSessions-1 || v.codes[exchange.Closed].Load() != 0 {
		t.Fatalf("too early: %d sessions", n)
	}
	ck.move(t, s.e, 400*time.Millisecond)
	is("all are closed", 0, 0, 1)
	eventually(t, "all are told", func() bool { return v.done.Load() == 5 })
	if n := v.codes[exchange.Closed].Load(); n != maxSessions-1 {
		t.Errorf("%d were told that their session was closed, want %d", n, maxSessions-1)
	}
}

// TestHopLeavesIdle: a session that nobody uses, and one that is being made, do not
// outlast the endpoint by a moment.
func TestHopLeavesIdle(t *testing.T) {
	for _, dialing := range []bool{false, true} {
		t.Run(fmt.Sprintf("dialing=%t", dialing), func(t *testing.T) {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			hang := make(chan struct{})
			peer := s.app(func(c *net.TCPConn) {
				p := newPeer2(t, c, false)
				_ = p.flush()
				if f := p.next(func(f oracle.Frame) bool { _, ok := f.(*oracle.MetaHeadersFrame); return ok }); f != nil {
					p.head(f.Header().StreamID, true, ":status", "200")
					_ = p.flush()
				}
				<-hang
			})
			t.Cleanup(func() { close(hang) })
			var h *Hop
			gone := 0
			dials := make(chan struct{}, 1)
			v := &svc{pod: pod, hop: func(l *Loop) *Hop {
				if h == nil {
					h = l.NewHop(pod, func(ctx context.Context) (int, record.Conn, Bond, error) {
						if dialing {
							dials <- struct{}{}
							<-ctx.Done()
							return -1, nil, nil, ctx.Err()
						}
						c, err := new(net.Dialer).DialContext(ctx, "tcp", peer.String())
						if err != nil {
							return -1, nil, nil, err
						}
						fd, err := socket.TakeFD(c.(*net.TCPConn))
						return fd, nil, lasts(time.Hour), err
					}, func() { gone++ })
				}
				return h
			}}
			p := newPeer2(t, dial(t, s.front(pod, v, true)), true)
			p.get(1, "/")
			if err := p.flush(); err != nil {
				t.Fatal(err)
			}
			if dialing {
				<-dials
			} else {
				eventually(t, "it is answered", func() bool { return v.done.Load() == 1 })
			}
			s.onLoop(func(*Loop) {
				h.Leave(errLeft)
				if !dialing && (h.Open() != 0 || gone != 1) {
					t.Errorf("%d sessions are open, empty was called %d times", h.Open(), gone)
				}
			})
			eventually(t, "nothing is left", func() (none bool) {
				s.onLoop(func(*Loop) { none = h.Open() == 0 && gone == 1 })
				return none && v.done.Load() == 1
			})
		})
	}
}

// TestNearLeaves is TestHopLeaves for a destination in this process.
func TestNearLeaves(t *testing.T) {
	answer, asked := make(chan struct{}), make(chan struct{}, 8)
	hang := make(chan struct{})
	m := newNear(t, (&stage{t: t}).app(func(c *net.TCPConn) {
		if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
			return
		}
		asked <- struct{}{}
		select {
		case <-answer:
			_, _ = fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		case <-hang:
		}
	}))
	t.Cleanup(func() { close(hang) })
	answers := make(chan int, 2)
	for range 2 {
		go func() { status, _ := m.get("/"); answers <- status }()
		<-asked
	}
	var n *InProcess
	m.onLoop(func(*Loop) { n = m.n; n.Leave(errLeft); n.Leave(errLeft) })
	answer <- struct{}{}
	if status := <-answers; status != 200 {
		t.Errorf("status %d, want 200", status)
	}
	m.onLoop(func(*Loop) {
		if n.closed || len(n.streams) != 1 {
			t.Errorf("closed=%t, %d requests under way, want 1", n.closed, len(n.streams))
		}
	})
	if status, _ := m.get("/"); status != 503 || m.out.codes[exchange.Connect].Load() != 1 {
		t.Errorf("a request to who has left: %d, %d were told that nothing was sent", status, m.out.codes[exchange.Connect].Load())
	}
	answer <- struct{}{}
	if status := <-answers; status != 200 {
		t.Errorf("status %d, want 200", status)
	}
	eventually(t, "it is closed with its last request", func() (closed bool) {
		m.onLoop(func(*Loop) { closed = n.closed && m.n == nil })
		return closed
	})
	m.none()
}

// TestNearLeavesInTime: what has not ended at leaveTime is ended.
func TestNearLeavesInTime(t *testing.T) {
	asked, hang := make(chan struct{}, 1), make(chan struct{})
	ck := newClock()
	m := newNearOf(t, Config{Now: ck.Now}, (&stage{t: t}).app(func(c *net.TCPConn) {
		if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			asked <- struct{}{}
			<-hang
		}
	}))
	t.Cleanup(func() { close(hang) })
	answers := make(chan int, 1)
	go func() { status, _ := m.get("/"); answers <- status }()
	<-asked
	m.onLoop(func(*Loop) { m.n.Leave(errLeft) })
	ck.move(t, m.e, time.Duration(leaveTime)-200*time.Millisecond)
	if n := m.out.done.Load(); n != 0 {
		t.Fatalf("too early: %d have ended", n)
	}
	ck.move(t, m.e, 400*time.Millisecond)
	if status := <-answers; status != 503 || m.out.codes[exchange.Closed].Load() != 1 {
		t.Errorf("status %d", status)
	}
	m.none()
}
