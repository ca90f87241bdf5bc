package engine

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
)

// told is what the pods' shares of the first loop hold, as far as they know.
func (s *stage) told() (n int) {
	s.onLoop(func(l *Loop) {
		for p := range s.e.pods {
			n += p.share(l).held
		}
	})
	return n
}

// fill is a table of repeated fields: each costs its name, its value and 32 bytes decoded, and two bytes on the wire
// once it is in the table of the connection (RFC 7541 6.1).
func fill(bytes int) []string {
	var kv []string
	for i := 0; i*1000 < bytes; i++ {
		kv = append(kv, fmt.Sprintf("x-%d", i%3), strings.Repeat("v", 1000-32-3))
	}
	return kv
}

func request(kv ...string) []string {
	return append([]string{":method", "POST", ":scheme", "http", ":path", "/", ":authority", "a"}, kv...)
}

// TestWhateverAStreamHoldsIsCounted: what a client, a peer of the hop or an application makes us keep, the share of its pod
// is told of: the account meets what the heap grows by. One row a kind of what can wait.
func TestWhateverAStreamHoldsIsCounted(t *testing.T) {
	type side struct {
		s     *stage
		serve *svc                                 // what the requests come to
		dial  func() (*net.TCPConn, io.ReadWriter) // a client's or peer's connection
	}
	// What comes, by a number of connections; it returns once all has been sent.
	kinds := []struct {
		name  string
		conns int
		park  func(x *exchange.Exchange)
		say   func(p *peer2)
		app   func(p *peer2, id uint32) // answers, in the place of park
		least int                       // MiB that the heap grows by
	}{
		{name: "streams", conns: 4, least: 4, say: func(p *peer2) {
			for i := range uint32(990) {
				p.head(2*i+1, true, request()...)
			}
		}},
		{name: "heads", conns: 2, least: 20, say: func(p *peer2) {
			for i := range uint32(990) {
				p.head(2*i+1, true, request(fill(16_000)...)...)
			}
		}},
		{name: "bodies", conns: 1, least: 15, say: func(p *peer2) {
			for i := range uint32(100) {
				p.head(2*i+1, false, request()...)
				for range 12 {
					p.WriteData(2*i+1, false, make([]byte, 16_000))
				}
				_ = p.flush()
			}
		}},
		{name: "bodies that are kept", conns: 1, least: 13, park: func(x *exchange.Exchange) { x.Hold(256<<10, keeper{}) }, say: func(p *peer2) {
			for i := range uint32(80) {
				p.head(2*i+1, false, request()...)
				for range 12 {
					p.WriteData(2*i+1, false, make([]byte, 16_000))
				}
				_ = p.flush()
			}
		}},
		{name: "trailers", conns: 4, least: 20, say: func(p *peer2) {
			for i := range uint32(990) {
				p.head(2*i+1, false, request()...)
				p.WriteData(2*i+1, false, []byte("x"))
				p.head(2*i+1, true, fill(7000)...)
			}
		}},
		{name: "trailers that are kept", conns: 4, least: 20, park: func(x *exchange.Exchange) { x.Hold(256<<10, keeper{}) }, say: func(p *peer2) {
			for i := range uint32(990) {
				p.head(2*i+1, false, request()...)
				p.WriteData(2*i+1, false, []byte("x"))
				p.head(2*i+1, true, fill(7000)...)
			}
		}},
		{name: "header blocks without an end", conns: 60, least: 4, say: func(p *peer2) {
			p.WriteHeaders(oracle.HeadersFrameParam{StreamID: 1, BlockFragment: make([]byte, 16_000)})
			for range 6 {
				p.WriteContinuation(1, false, make([]byte, 16_000))
			}
		}},
		{name: "frames without an end", conns: 300, least: 4, say: func(p *peer2) {
			p.WriteHeaders(oracle.HeadersFrameParam{StreamID: 1, BlockFragment: make([]byte, 16_000), EndHeaders: true})
			p.buf.Truncate(p.buf.Len() - 1)
		}},
		{name: "tables", conns: 300, least: 1, say: func(p *peer2) {
			p.head(1, false, request("x-a", strings.Repeat("a", 3900))...)
			p.WriteRSTStream(1, oracle.ErrCodeCancel)
		}},
		{name: "answers that are not read", conns: 1, least: 10, app: func(p *peer2, id uint32) {
			p.head(id, false, ":status", "200")
			for range 12 {
				p.WriteData(id, false, make([]byte, 16_000))
			}
		}, say: func(p *peer2) {
			for i := range uint32(80) {
				p.head(2*i+1, true, request()...)
			}
		}},
		{name: "trailers of answers that are not read", conns: 1, least: 8, app: func(p *peer2, id uint32) {
			p.head(id, false, ":status", "200")
			p.WriteData(id, false, []byte("x"))
			p.head(id, true, fill(20_000)...)
		}, say: func(p *peer2) {
			for i := range uint32(600) {
				p.head(2*i+1, true, request()...)
			}
		}},
	}
	for name, open := range map[string]func(t *testing.T) side{
		"a client": func(t *testing.T) side {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			v := &svc{pod: pod, h2: true}
			addr := s.front(pod, v, true)
			return side{s: s, serve: v, dial: func() (*net.TCPConn, io.ReadWriter) { c := dial(t, addr); return c, c }}
		},
		"a peer": func(t *testing.T) side {
			m := newMesh(t, Config{}, netip.AddrPort{})
			m.in.h2 = true
			return side{s: m.stage, serve: m.in, dial: func() (*net.TCPConn, io.ReadWriter) {
				c := dial(t, m.hopAddr)
				over := tls.Client(c, m.peer)
				if err := over.Handshake(); err != nil {
					t.Fatal(err)
				}
				return c, over
			}}
		},
		"in process": func(t *testing.T) side {
			m := newNear(t, netip.AddrPort{})
			m.in.h2 = true
			addr := m.front(m.src, m.out, true)
			return side{s: m.stage, serve: m.in, dial: func() (*net.TCPConn, io.ReadWriter) { c := dial(t, addr); return c, c }}
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, k := range kinds {
				t.Run(k.name, func(t *testing.T) {
					d := open(t)
					if k.app != nil {
						d.serve.to = d.s.app(func(c *net.TCPConn) {
							p := newPeer2(t, c, false)
							_ = p.flush()
							for {
								f, err := p.ReadFrame()
								if err != nil {
									return
								}
								if h, ok := f.(*oracle.MetaHeadersFrame); ok {
									k.app(p, h.StreamID)
									_ = p.flush()
								}
							}
						})
					} else {
						d.serve.request = func(x *exchange.Exchange) bool {
							x.Park()
							if k.park != nil {
								k.park(x)
							}
							return true
						}
					}
					var peers []*peer2
					for range k.conns {
						c, over := d.dial()
						p := newPeer2Over(t, c, over, true, oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 0})
						p.WriteWindowUpdate(0, 1<<30)
						_ = p.flush()
						p.next(func(f oracle.Frame) bool { // our windows
							_, ok := f.(*oracle.WindowUpdateFrame)
							return ok
						})
						peers = append(peers, p)
					}
					heap0, told0 := heap(), d.s.told()
					for _, p := range peers {
						k.say(p)
						if err := p.flush(); err != nil {
							t.Fatal(err)
						}
						p.buf, p.blk, p.Framer, p.enc = bytes.Buffer{}, bytes.Buffer{}, nil, nil // what the test holds is not the question
					}
					var grown int64
					last := int64(-1)
					eventually(t, "all has come, and its account with it", func() bool {
						grown = heap() - heap0
						settled := grown == last || grown >= int64(k.least)<<20 && grown-last < 100<<10 && last-grown < 100<<10
						last = grown
						return settled && grown >= int64(k.least)<<20
					})
					told := int64(d.s.told() - told0)
					t.Logf("the heap grew by %d KiB, the account by %d KiB", grown>>10, told>>10)
					if told < grown*3/4 {
						t.Errorf("the heap grew by %d KiB, of which the account knows %d KiB", grown>>10, told>>10)
					}
					if told > grown*2+1<<20 {
						t.Errorf("the account grew by %d KiB, the heap by %d KiB: a pod would be refused what it does not hold", told>>10, grown>>10)
					}
					for _, p := range peers {
						p.c.Close()
					}
					eventually(t, "the account is as it was", func() bool { return d.s.told() <= told0+64<<10 })
				})
			}
		})
	}
}

// keeper keeps what is held.
type keeper struct{}

func (keeper) Held(x *exchange.Exchange, _ exchange.Held) { x.Park() }

// TestTrailersOfRequestsAreBounded: an attack in which each stream costs its sender 34 bytes: trailers of indexed fields that
// wait for an application that takes nothing. They are bounded apart from heads, at a client's connection, a peer's, and in process.
func TestTrailersOfRequestsAreBounded(t *testing.T) {
	attack := func(t *testing.T, open func() (*net.TCPConn, io.ReadWriter)) {
		before := heap()
		var conns []*net.TCPConn
		for range 4 {
			c, over := open()
			conns = append(conns, c)
			p := newPeer2Over(t, c, over, true)
			for i := range uint32(990) {
				p.head(2*i+1, false, request()...)
				p.WriteData(2*i+1, false, []byte("x"))
				p.blk.Reset()
				for range 14 {
					p.enc.WriteField(hpack.HeaderField{Name: "x-a", Value: strings.Repeat("a", 4000)})
				}
				p.WriteHeaders(oracle.HeadersFrameParam{StreamID: 2*i + 1, BlockFragment: p.blk.Bytes(), EndStream: true, EndHeaders: true})
			}
			_ = p.flush() // it may have been cut off
			_, _ = io.Copy(io.Discard, over)
		}
		if grown := heap() - before; grown > 8<<20 {
			t.Errorf("%d MiB are held of 4 connections that sent little", grown>>20)
		}
		for _, c := range conns {
			c.Close()
		}
	}
	parked := func(x *exchange.Exchange) bool { x.Park(); return true }
	t.Run("a client", func(t *testing.T) {
		s := newStage(t, Config{})
		pod := s.e.AddPod("p")
		addr := s.front(pod, &svc{pod: pod, request: parked}, true)
		attack(t, func() (*net.TCPConn, io.ReadWriter) { c := dial(t, addr); return c, c })
	})
	t.Run("a peer", func(t *testing.T) {
		m := newMesh(t, Config{}, netip.AddrPort{})
		m.in.request = parked
		attack(t, func() (*net.TCPConn, io.ReadWriter) {
			c := dial(t, m.hopAddr)
			return c, tls.Client(c, m.peer)
		})
	})
	t.Run("in process", func(t *testing.T) {
		m := newNear(t, netip.AddrPort{})
		m.in.request = parked
		addr := m.front(m.src, m.out, true)
		attack(t, func() (*net.TCPConn, io.ReadWriter) { c := dial(t, addr); return c, c })
	})
}

// TestWhatBeginsEnds: a frame, or a header block, that has not ended a head's time after it began ends its connection, whoever
// sends it, however lively the connection is; a connection that we do not read from is not blamed.
func TestWhatBeginsEnds(t *testing.T) {
	for _, tt := range []struct {
		name string
		say  func(p *peer2)
	}{
		{"header block", func(p *peer2) {
			p.WriteHeaders(oracle.HeadersFrameParam{StreamID: 3, BlockFragment: []byte{0x82}})
		}},
		{"frame", func(p *peer2) {
			p.WriteHeaders(oracle.HeadersFrameParam{StreamID: 3, BlockFragment: make([]byte, 100), EndHeaders: true})
			p.buf.Truncate(p.buf.Len() - 50)
		}},
	} {
		t.Run(tt.name+" of a client", func(t *testing.T) {
			ck := newClock()
			s := newStage(t, Config{Now: ck.Now})
			pod := s.e.AddPod("p")
			p := newPeer2(t, dial(t, s.front(pod, &svc{pod: pod, request: func(x *exchange.Exchange) bool { x.Park(); return true }}, true)), true)
			p.head(1, false, request()...)
			tt.say(p)
			if err := p.flush(); err != nil {
				t.Fatal(err)
			}
			s.seen(t, func(c *h2conn) bool { return c.begun != 0 })
			ck.move(t, s.e, 14*time.Second)
			if pod.Conns() != 1 {
				t.Fatal("ended before a head's time")
			}
			ck.move(t, s.e, 2*time.Second)
			p.goaway()
			eventually(t, "the connection ends", func() bool { return pod.Conns() == 0 })
		})
		t.Run(tt.name+" of an application", func(t *testing.T) {
			ck := newClock()
			s := newStage(t, Config{Now: ck.Now})
			pod := s.e.AddPod("p")
			v := &svc{pod: pod, h2: true, to: s.app(func(c *net.TCPConn) {
				p := newPeer2(t, c, false)
				_ = p.flush()
				for {
					f, err := p.ReadFrame()
					if err != nil {
						return
					}
					if f, ok := f.(*oracle.MetaHeadersFrame); ok {
						p.WriteHeaders(oracle.HeadersFrameParam{StreamID: f.StreamID, BlockFragment: make([]byte, 100), EndHeaders: tt.name == "frame"})
						if tt.name == "frame" {
							p.buf.Truncate(p.buf.Len() - 50)
						}
						_ = p.flush()
					}
				}
			})}
			p := newPeer2(t, dial(t, s.front(pod, v, true)), true)
			p.get(1, "/")
			if err := p.flush(); err != nil {
				t.Fatal(err)
			}
			s.seen(t, func(c *h2conn) bool { return c.client && c.begun != 0 })
			ck.move(t, s.e, 16*time.Second)
			if got := p.status(1); got != "503" {
				t.Errorf("status %s, want 503", got)
			}
		})
	}
	t.Run("a connection that we do not read from", func(t *testing.T) {
		ck := newClock()
		s := newStage(t, Config{Now: ck.Now, Memory: 16 << 20, Used: func() uint64 { return 0 }}) // a pod may hold a quarter
		pod := s.e.AddPod("p")
		addr := s.front(pod, &svc{pod: pod, request: func(x *exchange.Exchange) bool { x.Park(); return true }}, true)
		fill := func(streams uint32) *peer2 { // of which the exchanges take nothing
			p := newPeer2(t, dial(t, addr), true)
			for id := uint32(1); id < 2*streams; id += 2 {
				p.head(id, false, request()...)
				for range 15 {
					p.WriteData(id, false, make([]byte, 16<<10))
				}
			}
			return p
		}
		p := fill(6)
		p.WritePing(false, [8]byte{1})
		rest := bytes.Clone(p.buf.Bytes()[p.buf.Len()-5:])
		p.buf.Truncate(p.buf.Len() - 5)
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
		s.seen(t, func(c *h2conn) bool { return c.begun != 0 })
		other := fill(12)
		if err := other.flush(); err != nil {
			t.Fatal(err)
		}
		held := func(want bool) func() bool {
			return func() (yes bool) {
				s.onLoop(func(l *Loop) { yes = pod.share(l).tight == want })
				return yes
			}
		}
		eventually(t, "the pod holds too much", held(true))
		p.buf.Write(rest)
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
		s.seen(t, func(c *h2conn) bool { return c.begun != 0 && c.readable() })
		ck.move(t, s.e, 16*time.Second)
		if pod.Conns() != 2 {
			t.Fatal("a connection was ended for what it had sent, and nobody had read")
		}
		other.c.Close()
		eventually(t, "the pod holds less", held(false))
		for {
			f, err := p.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			if f, ok := f.(*oracle.PingFrame); ok && f.IsAck() {
				break
			}
		}
	})
	t.Run("frames in pieces, one after the other", func(t *testing.T) {
		ck := newClock()
		s := newStage(t, Config{Now: ck.Now})
		pod := s.e.AddPod("p")
		v := &svc{pod: pod, request: local}
		p := newPeer2(t, dial(t, s.front(pod, v, true)), true)
		for i := range uint32(6) { // each read ends within a frame, each frame ends
			p.get(2*i+1, "/")
			p.WriteWindowUpdate(0, 1)
			whole := p.buf.Len()
			rest := bytes.Clone(p.buf.Bytes()[whole-5:])
			p.buf.Truncate(whole - 5)
			if err := p.flush(); err != nil {
				t.Fatal(err)
			}
			s.seen(t, func(c *h2conn) bool { return c.begun == ck.Now() })
			ck.move(t, s.e, 10*time.Second)
			p.buf.Write(rest)
		}
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
		if got := p.status(11); got != "421" {
			t.Errorf("status %s", got)
		}
	})
}

// TestABurstLeavesNothingBehind: what a burst needed in buffers is given back a moment after it, though the connection stays busy.
func TestABurstLeavesNothingBehind(t *testing.T) {
	ck := newClock()
	s := newStage(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	addr := s.front(pod, &svc{pod: pod, request: func(x *exchange.Exchange) bool {
		if string(x.Req.Path) == "/wait" {
			x.Park()
		} else {
			x.Reply(&httpmsg.Head{Status: 200}, make([]byte, 200_000))
		}
		return true
	}}, true)
	p := newPeer2(t, dial(t, addr), true, oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 1 << 20})
	p.WriteWindowUpdate(0, 1<<20)
	p.get(1, "/wait")
	p.get(3, "/much")
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	for {
		f, err := p.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if f, ok := f.(*oracle.DataFrame); ok && f.StreamEnded() {
			break
		}
	}
	slack := func() (n int) {
		s.onLoop(func(l *Loop) {
			l.Each(func(src reactor.Source) {
				if c, ok := src.(*h2conn); ok {
					n += c.h2.Slack()
				}
			})
		})
		return n
	}
	if slack() <= keepSlack {
		t.Fatalf("%d bytes are left: the answer was none of a burst", slack())
	}
	ck.move(t, s.e, time.Duration(2*trimAfter))
	eventually(t, "they are given back", func() bool { return slack() <= keepSlack })
}

// TestHeadsOfHTTP1AreCounted: what a request of HTTP/1 that waits keeps of its head is its pod's, and no longer than it waits.
func TestHeadsOfHTTP1AreCounted(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	addr := s.front(pod, &svc{pod: pod, request: func(x *exchange.Exchange) bool { x.Park(); return true }}, false)
	var conns []*net.TCPConn
	const n, fields, size = 20, 50, 600
	for range n {
		c := dial(t, addr)
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: a\r\n%s\r\n", strings.Repeat("X-A: "+strings.Repeat("v", size)+"\r\n", fields))
		conns = append(conns, c)
	}
	eventually(t, "the pod's account has them", func() bool { return s.told() >= n*fields*size })
	if told := s.told(); told > n*(2*fields*size+bigReadBuf) {
		t.Errorf("%d bytes are accounted for %d", told, n*fields*size)
	}
	for _, c := range conns {
		reset(c)
		c.Close()
	}
	eventually(t, "the account is empty", func() bool { return s.told() == 0 })
}
