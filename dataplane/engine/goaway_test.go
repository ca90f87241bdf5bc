package engine

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"

	"aether/dataplane/exchange"
	"aether/mtls/record"
	"aether/tproxy/socket"
)

// plainHop makes sessions to a peer of the test's, without TLS.
func plainHop(pod *Pod, to string, hop **Hop) func(l *Loop) *Hop {
	return func(l *Loop) *Hop {
		if *hop == nil {
			*hop = l.NewHop(pod, func(ctx context.Context) (int, record.Conn, Bond, error) {
				c, err := new(net.Dialer).DialContext(ctx, "tcp", to)
				if err != nil {
					return -1, nil, nil, err
				}
				fd, err := socket.TakeFD(c.(*net.TCPConn))
				return fd, nil, lasts(time.Hour), err
			}, func() { *hop = nil })
		}
		return *hop
	}
}

// TestPeerGoesAway (case 67): the streams that an upstream's GOAWAY excludes are sent over
// another connection and answered, the others are finished on the old one, and
// the client sees nothing of it. The upstream is a hop, or an application.
func TestPeerGoesAway(t *testing.T) {
	const requests, last = 9, 5 // the streams 1, 3 and 5 are taken
	for _, app := range []bool{false, true} {
		t.Run(fmt.Sprintf("application=%v", app), func(t *testing.T) {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			var conns atomic.Int64
			first := make(chan *peer2, 1)
			peer := s.app(func(c *net.TCPConn) {
				p := newPeer2(t, c, false)
				if p.flush() != nil {
					return
				}
				if conns.Add(1) > 1 { // a successor: it answers all
					for {
						f, err := p.ReadFrame()
						if err != nil {
							return
						}
						if f, ok := f.(*oracle.MetaHeadersFrame); ok {
							p.head(f.StreamID, true, ":status", "201")
							if p.flush() != nil {
								return
							}
						}
					}
				}
				for n := 0; n < requests; {
					f, err := p.ReadFrame()
					if err != nil {
						t.Error(err)
						return
					}
					if _, ok := f.(*oracle.MetaHeadersFrame); ok {
						n++
					}
				}
				first <- p
				_, _ = io.Copy(io.Discard, c)
			})
			v := &retrying{svc: &svc{pod: pod, to: peer, h2: true}}
			var hop *Hop
			if !app {
				v.hop = plainHop(pod, peer.String(), &hop)
			}
			addr := s.front(pod, v, false)
			var clients []net.Conn
			for range requests {
				c := dial(t, addr)
				fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
				clients = append(clients, c)
			}
			p := <-first
			p.WriteGoAway(last, oracle.ErrCodeNo, []byte("going"))
			if err := p.flush(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the excluded ones are sent anew", func() bool { return v.retried.Load() == requests-(last+1)/2 })
			c := dial(t, addr) // and so are new ones
			fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
			if got := rest(t, c); !strings.HasPrefix(got, "HTTP/1.1 201") {
				t.Errorf("after GOAWAY: %q", got)
			}
			for id := uint32(1); id <= last; id += 2 { // it finishes what it took
				p.head(id, true, ":status", "200")
			}
			if err := p.flush(); err != nil {
				t.Fatal(err)
			}
			old := 0
			for i, c := range clients {
				res, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil {
					t.Fatalf("request %d: %v", i, err)
				}
				switch res.StatusCode {
				case 200:
					old++
				case 201:
				default:
					t.Errorf("request %d: %d", i, res.StatusCode)
				}
			}
			if old != (last+1)/2 {
				t.Errorf("%d requests were answered by the connection that went away, want %d", old, (last+1)/2)
			}
			if n := conns.Load(); n != 2 {
				t.Errorf("%d connections, want 2", n)
			}
			// Nothing of the old one is left: it ends once its last stream has.
			if _, err := p.ReadFrame(); err == nil {
				eventually(t, "it is closed", func() bool { _, err := p.ReadFrame(); return err != nil })
			}
		})
	}
}

// TestWeGoAway: a client that sends a request while an idle connection is being closed
// loses nothing: it is served, and what would come later knows that it has to go elsewhere.
func TestWeGoAway(t *testing.T) {
	ck := newClock()
	s := newStage(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, request: local}
	p := newPeer2(t, dial(t, s.front(pod, v, true)), true)
	p.get(1, "/")
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	if got := p.status(1); got != "421" {
		t.Fatal(got)
	}
	s.onLoop(func(*Loop) {}) // the iteration that answered has ended
	ck.move(t, s.e, time.Duration(idleDown)+time.Second)
	if g := p.goaway(); g.LastStreamID != 1<<31-1 || g.ErrCode != oracle.ErrCodeNo {
		t.Fatalf("%v", g)
	}
	ping := p.next(func(f oracle.Frame) bool { _, ok := f.(*oracle.PingFrame); return ok }).(*oracle.PingFrame)
	p.get(3, "/") // it was under way
	p.WritePing(true, ping.Data)
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	if got := p.status(3); got != "421" {
		t.Errorf("a request that was under way: %s", got)
	}
	s.seen(t, func(c *h2conn) bool { return c.h2.Warned() })
	ck.move(t, s.e, time.Duration(settleTime)+time.Second)
	if g := p.goaway(); g.LastStreamID != 3 || g.ErrCode != oracle.ErrCodeNo {
		t.Errorf("%v", g)
	}
	if f, err := p.ReadFrame(); err != io.EOF {
		t.Errorf("then %v, %v, want an orderly end", f, err)
	}
}

// TestStreamsOfAnApplication: the limit of an HTTP/2 application is kept on each of a bounded
// number of connections, those beyond wait in order, and beyond a bound they are refused.
func TestStreamsOfAnApplication(t *testing.T) {
	const limit = 2
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	var conns, open, total, over atomic.Int64
	answer := make(chan struct{})
	app := s.app(func(c *net.TCPConn) {
		p := newPeer2(t, c, false, oracle.Setting{ID: oracle.SettingMaxConcurrentStreams, Val: limit})
		if p.flush() != nil {
			return
		}
		conns.Add(1)
		acked := false
		var mine []uint32
		reply := func() {
			for _, id := range mine {
				p.head(id, true, ":status", "204")
			}
			open.Add(-int64(len(mine)))
			mine = mine[:0]
			_ = p.flush()
		}
		frames := make(chan oracle.Frame)
		go func() {
			defer close(frames)
			for {
				f, err := p.ReadFrame()
				if err != nil {
					return
				}
				switch f := f.(type) {
				case *oracle.MetaHeadersFrame:
					frames <- &oracle.HeadersFrame{FrameHeader: f.FrameHeader}
				case *oracle.SettingsFrame:
					if f.IsAck() {
						frames <- &oracle.SettingsFrame{}
					}
				}
			}
		}()
		on := answer
		for {
			select {
			case f, ok := <-frames:
				if !ok {
					return
				}
				h, ok := f.(*oracle.HeadersFrame)
				if !ok {
					acked = true
					continue
				}
				if len(mine) >= limit {
					if acked {
						over.Add(1)
					}
					p.WriteRSTStream(h.StreamID, oracle.ErrCodeRefusedStream) // before it could know
					_ = p.flush()
					continue
				}
				total.Add(1)
				open.Add(1)
				if mine = append(mine, h.StreamID); on == nil {
					reply()
				}
			case <-on:
				on = nil
				reply()
			}
		}
	})
	v := &retrying{svc: &svc{pod: pod, to: app, h2: true}}
	front := newPeer2(t, dial(t, s.front(pod, v, true)), true)
	// The first request teaches the limit; the connection keeps it.
	front.get(1, "/")
	if err := front.flush(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it has come", func() bool { return open.Load() == 1 })
	const many = 500
	for i := range uint32(many) {
		front.get(2*i+3, "/")
	}
	if err := front.flush(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all have come to the service", func() bool { return v.begun.Load() == many+1 })
	s.onLoop(func(l *Loop) {
		for _, a := range l.appPools() {
			if len(a.h2.conns) > maxAppH2 || len(a.h2.waiters) > maxWaiters {
				t.Errorf("%d connections, %d waiting", len(a.h2.conns), len(a.h2.waiters))
			}
		}
	})
	close(answer)
	got := map[string]int{}
	for range many + 1 {
		f := front.next(func(f oracle.Frame) bool { _, ok := f.(*oracle.MetaHeadersFrame); return ok }).(*oracle.MetaHeadersFrame)
		got[f.PseudoValue("status")]++
	}
	if got["204"] != many+1 {
		t.Errorf("answers %v, want %d of 204", got, many+1)
	}
	if n := over.Load(); n != 0 {
		t.Errorf("%d streams beyond the application's limit, which was acknowledged", n)
	}
	if n := conns.Load(); n > maxAppH2 {
		t.Errorf("%d connections, want at most %d", n, maxAppH2)
	}
}

// TestUpstreamsThatBreakTheProtocol (cases 48, 49): the connection is given up at once,
// and so are the requests on it and those that wait for it; the next request tries again.
func TestUpstreamsThatBreakTheProtocol(t *testing.T) {
	for _, tt := range []struct {
		name string
		say  func(p *peer2)
	}{
		{"SETTINGS out of range after the preface", func(p *peer2) {
			p.WriteSettings(oracle.Setting{ID: oracle.SettingMaxFrameSize, Val: 1})
		}},
		{"WINDOW_UPDATE over the maximum", func(p *peer2) { p.WriteWindowUpdate(0, 1<<31-1) }},
		{"HTTP/1", func(p *peer2) {
			p.buf.Reset()
			p.buf.WriteString("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
		}},
		{"a PING flood", func(p *peer2) {
			for range 20_000 {
				p.WritePing(false, [8]byte{})
			}
		}},
		{"GOAWAY at once", func(p *peer2) { p.WriteGoAway(0, oracle.ErrCodeEnhanceYourCalm, nil) }},
		{"the end", func(p *peer2) { p.c.CloseWrite() }},
	} {
		for _, app := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, application=%v", tt.name, app), func(t *testing.T) {
				ck := newClock() // which stands: no limit of time helps
				s := newStage(t, Config{Now: ck.Now})
				pod := s.e.AddPod("p")
				hold := make(chan struct{})
				bad := s.app(func(c *net.TCPConn) {
					p := newPeer2(t, c, false)
					<-hold
					tt.say(p)
					_ = p.flush()
					_, _ = io.Copy(io.Discard, c)
				})
				v := &svc{pod: pod, to: bad, h2: true}
				var hop *Hop
				if !app {
					v.hop = plainHop(pod, bad.String(), &hop)
				}
				addr := s.front(pod, v, false)
				var clients []net.Conn
				for range 20 {
					c := dial(t, addr)
					fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
					clients = append(clients, c)
				}
				eventually(t, "all have come", func() bool { return v.begun.Load() == 20 })
				close(hold)
				again := dial(t, addr)
				fmt.Fprint(again, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
				for _, c := range append(clients, again) {
					if got := rest(t, c); !strings.HasPrefix(got, "HTTP/1.1 503") {
						t.Fatalf("%q, want a 503 at once", got)
					}
				}
			})
		}
	}
}

// TestSilentPeer (case 53): a hop's peer that owes an answer is asked by PING whether it
// lives. One that says so may take its time; one that does not is given up.
func TestSilentPeer(t *testing.T) {
	ck := newClock()
	s := newStage(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	peers := make(chan *peer2, 2)
	hang := make(chan struct{})
	to := s.app(func(c *net.TCPConn) {
		p := newPeer2(t, c, false)
		if p.flush() == nil {
			peers <- p
			<-hang
		}
	})
	t.Cleanup(func() { close(hang) })
	v := &svc{pod: pod}
	var hop *Hop
	v.hop = plainHop(pod, to.String(), &hop)
	addr := s.front(pod, v, false)
	ask := func() net.Conn {
		c := dial(t, addr)
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
		return c
	}
	c := ask()
	p := <-peers
	head := func(f oracle.Frame) bool { _, ok := f.(*oracle.MetaHeadersFrame); return ok }
	ping := func(f oracle.Frame) bool { _, ok := f.(*oracle.PingFrame); return ok }
	p.next(head)
	for range 3 {
		s.onLoop(func(*Loop) {})
		ck.move(t, s.e, time.Duration(pingAfter)+time.Second)
		f := p.next(ping).(*oracle.PingFrame)
		p.WritePing(true, f.Data)
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
		s.seen(t, func(c *h2conn) bool { return c.hop && c.pinged == 0 })
	}
	ck.move(t, s.e, time.Duration(pingAfter)+time.Second)
	p.next(ping)
	if v.done.Load() != 0 {
		t.Fatal("too early")
	}
	s.onLoop(func(*Loop) {})
	ck.move(t, s.e, time.Duration(pingWait)+time.Second)
	if got := rest(t, c); !strings.HasPrefix(got, "HTTP/1.1 503") {
		t.Errorf("%q", got)
	}
	c = ask() // takes another session
	p = <-peers
	id := p.next(head).Header().StreamID
	p.head(id, true, ":status", "204")
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	if got := rest(t, c); !strings.HasPrefix(got, "HTTP/1.1 204") {
		t.Errorf("%q", got)
	}
}

// TestQueueIsBounded: beyond what an application's connections carry requests wait, so many and
// no more; the rest is refused at once, and the client gets every answer.
func TestQueueIsBounded(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	hang := make(chan struct{})
	app := s.app(func(c *net.TCPConn) { // one request a connection, for ever
		p := newPeer2(t, c, false, oracle.Setting{ID: oracle.SettingMaxConcurrentStreams, Val: 1})
		if p.flush() == nil {
			<-hang
		}
	})
	t.Cleanup(func() { close(hang) }) // before that of app, which waits for them
	v := &svc{pod: pod, to: app, h2: true}
	addr := s.front(pod, v, true)
	const clients, each = 2, 600
	const beyond = clients*each - maxAppH2 - maxWaiters
	var fronts []*peer2
	for range clients {
		p := newPeer2(t, dial(t, addr), true)
		for i := range uint32(each) {
			p.get(2*i+1, "/")
		}
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
		fronts = append(fronts, p)
	}
	eventually(t, "all have come, and all connections are made", func() (ok bool) {
		if v.begun.Load() < clients*each {
			return false
		}
		s.onLoop(func(l *Loop) {
			for _, a := range l.appPools() {
				ok = len(a.h2.conns) == maxAppH2 && !a.h2.unsettled()
			}
		})
		return ok
	})
	s.onLoop(func(l *Loop) {
		for _, a := range l.appPools() {
			if n := len(a.h2.waiters); n > maxWaiters {
				t.Errorf("%d requests wait", n)
			}
		}
	})
	// Those that came while connections were still being made found fewer places.
	if n := v.codes[exchange.Refused].Load(); n < beyond || n > beyond+maxAppH2 || n != v.done.Load() {
		t.Errorf("%d requests refused, %d done, want %d or a little more", n, v.done.Load(), beyond)
	}
	for _, p := range fronts { // who gives up leaves the queue
		p.c.Close()
	}
	eventually(t, "nothing waits", func() bool { return v.done.Load() == clients*each })
}
