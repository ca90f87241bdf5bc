package engine

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
	"aether/mtls/record"
	"aether/tproxy/socket"
)

// told is what the pods' shares of the first loop hold, as far as they know.
func (s *stage) told() (n int) {
	s.onLoop(func(l *Loop) {
		for p := range s.e.pods {
			n += p.share(l).held + int(p.BytesElsewhere())
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
		tls   bool                      // a kind of connections with TLS alone
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
		{name: "bodies that are kept", conns: 1, least: 13, park: func(x *exchange.Exchange) { x.HoldBody(256<<10, keeper{}) }, say: func(p *peer2) {
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
		{name: "trailers that are kept", conns: 4, least: 20, park: func(x *exchange.Exchange) { x.HoldBody(256<<10, keeper{}) }, say: func(p *peer2) {
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
		{name: "records without an end", conns: 300, least: 4, tls: true, say: func(p *peer2) {
			_, _ = p.c.Write(append([]byte{23, 3, 3, 0x40, 0x11}, make([]byte, 100)...))
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
				if k.tls && name != "a peer" {
					continue
				}
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

// TestWhatAnHTTP1ConnectionHoldsIsCounted: the same for what begins as a request of HTTP/1 and does not end.
func TestWhatAnHTTP1ConnectionHoldsIsCounted(t *testing.T) {
	sc, cc := tlsPair(t)
	for _, over := range []bool{false, true} {
		for _, k := range []struct {
			name  string
			say   string
			park  bool // the requests that are whole wait
			raw   []byte
			least int // KiB a connection
		}{
			{name: "one byte of a head", say: "G", least: 15},
			{name: "a head of 40 KiB without an end", say: "GET / HTTP/1.1\r\nx: " + strings.Repeat("a", 40<<10), least: 60},
			{name: "a body that nobody takes", say: "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n" + strings.Repeat("a", 90_000), least: 15},
			{name: "a record without an end", raw: append([]byte{23, 3, 3, 0x40, 0x11}, make([]byte, 100)...), least: 15},
		} {
			if k.raw != nil && !over {
				continue
			}
			t.Run(fmt.Sprintf("%s, TLS %v", k.name, over), func(t *testing.T) {
				s := newStage(t, Config{})
				pod := s.e.AddPod("p")
				addr := s.h1OverTLS(pod, &svc{pod: pod, request: func(x *exchange.Exchange) bool { x.Park(); return true }}, over, sc)
				var conns []*net.TCPConn
				var rw []io.ReadWriter
				for range 100 {
					c := dial(t, addr)
					conns, rw = append(conns, c), append(rw, c)
					if over {
						tc := tls.Client(c, cc)
						if err := tc.Handshake(); err != nil {
							t.Fatal(err)
						}
						rw[len(rw)-1] = tc
					}
				}
				eventually(t, "all are served", func() bool { return pod.Conns() == 100 })
				heap()
				heap() // pools of the handshakes are emptied by the second
				heap0, told0 := heap(), s.told()
				for i := range rw {
					if k.raw != nil {
						_, _ = conns[i].Write(k.raw)
					} else if _, err := io.WriteString(rw[i], k.say); err != nil {
						t.Fatal(err)
					}
				}
				var grown, told int64
				eventually(t, "all has come", func() bool {
					grown, told = heap()-heap0, int64(s.told()-told0)
					return grown >= int64(100*k.least)<<10 && told >= int64(100*k.least)<<10*3/4
				})
				t.Logf("the heap grew by %d KiB, the account by %d KiB", grown>>10, told>>10)
				if told < grown*3/4 || told > grown*2+1<<20 {
					t.Errorf("the heap grew by %d KiB, the account by %d KiB", grown>>10, told>>10)
				}
				runtime.KeepAlive(rw)
				for _, c := range conns {
					_ = c.SetLinger(0) // one that ends in order would wait for its answer
					c.Close()
				}
				eventually(t, "the account is as it was", func() bool { return s.told() <= told0+64<<10 })
			})
		}
	}
}

// h1OverTLS is front for HTTP/1, over TLS if over.
func (s *stage) h1OverTLS(pod *Pod, v exchange.Service, over bool, sc *tls.Config) string {
	if !over {
		return s.front(pod, v, false)
	}
	pool := &exchange.Pool{Service: v}
	return s.listen(pod, func(l *Loop, fd int) {
		l.Go(func() {
			c, err := socket.MakeConn(fd)
			if err != nil {
				return
			}
			st := record.Server(c, sc, record.Own)
			if err := st.Handshake(s.e.ctx); err != nil {
				c.Close()
				return
			}
			rec := st.Flip()
			if fd, err = socket.TakeFD(c); err != nil {
				return
			}
			if l.Post(func() {
				if l.ServeHTTP1(fd, rec, &ConnInfo{Pod: pod, Loop: l, Pool: pool}, nil) != nil {
					unix.Close(fd)
				}
			}) != nil {
				unix.Close(fd)
			}
		})
	})
}

// TestBodiesOfTwoConnectionsDoNotMix: what one caller of HTTP/1 over TLS has sent, and nobody has taken yet, is not
// overwritten by what another sends meanwhile. The end of a head and a body come in one record, of which the read
// buffer takes a part.
func TestBodiesOfTwoConnectionsDoNotMix(t *testing.T) {
	sc, cc := tlsPair(t)
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	bodies := make(chan string, 2)
	app := serveHTTP(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		bodies <- string(b)
	}))
	v := &svc{pod: pod, to: app}
	var parked []*exchange.Exchange
	v.request = func(x *exchange.Exchange) bool {
		x.Park()
		parked = append(parked, x)
		return true
	}
	addr := s.h1OverTLS(pod, v, true, sc)
	const size = 16_000
	for i, b := range []string{"a", "b"} {
		tc := tls.Client(dial(t, addr), &tls.Config{RootCAs: cc.RootCAs, ServerName: cc.ServerName, NextProtos: cc.NextProtos, DynamicRecordSizingDisabled: true})
		if err := tc.Handshake(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(tc, "POST / HTTP/1.1\r\nHost: a\r\nx: "+strings.Repeat("x", 10_000)); err != nil {
			t.Fatal(err)
		}
		s.seenAll(t, 1, func(c *h1server) bool { return c.x == nil && c.w == 10_029 })
		if _, err := fmt.Fprintf(tc, "\r\nContent-Length: %d\r\n\r\n%s", size, strings.Repeat(b, size)); err != nil {
			t.Fatal(err)
		}
		s.seenAll(t, i+1, func(c *h1server) bool { return c.stalled })
	}
	s.onLoop(func(*Loop) {
		for _, x := range parked {
			v.send(x)
		}
	})
	for range 2 {
		b := <-bodies
		if len(b) != size || strings.Trim(b, b[:1]) != "" {
			t.Errorf("a body of %d bytes, of which %d are not %q", len(b), len(strings.ReplaceAll(b, b[:1], "")), b[:1])
		}
	}
}

// seenAll waits until n connections are in a state.
func (s *stage) seenAll(t *testing.T, n int, f func(c *h1server) bool) {
	t.Helper()
	eventually(t, "connections in the state that the test needs", func() bool {
		k := 0
		s.onLoop(func(l *Loop) {
			l.Each(func(src reactor.Source) {
				if c, ok := src.(*h1server); ok && f(c) {
					k++
				}
			})
		})
		return k == n
	})
}

// pieces is a connection that writes in two parts.
type pieces struct {
	*net.TCPConn
	between func()
}

func (p *pieces) Write(b []byte) (int, error) {
	if p.between == nil {
		return p.TCPConn.Write(b)
	}
	n, err := p.TCPConn.Write(b[:len(b)-7])
	if err != nil {
		return n, err
	}
	p.between()
	m, err := p.TCPConn.Write(b[len(b)-7:])
	return n + m, err
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
		_ = other.c.SetLinger(0) // an end would wait behind what nobody reads
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
	t.Run("record of a peer", func(t *testing.T) {
		ck := newClock()
		m := newMesh(t, Config{Now: ck.Now}, netip.AddrPort{})
		m.in.request = func(x *exchange.Exchange) bool { x.Park(); return true }
		c := dial(t, m.hopAddr)
		over := tls.Client(c, m.peer)
		if err := over.Handshake(); err != nil {
			t.Fatal(err)
		}
		p := newPeer2Over(t, c, over, true)
		p.head(1, false, request()...)
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
		m.seen(t, func(c *h2conn) bool { return c.h2.Streams() == 1 && c.begun == 0 })
		if _, err := c.Write([]byte{23, 3, 3, 0, 100, 1}); err != nil {
			t.Fatal(err)
		}
		m.seen(t, func(c *h2conn) bool { return c.begun != 0 })
		ck.move(t, m.e, 14*time.Second)
		if m.dst.Conns() != 1 {
			t.Fatal("ended before a head's time")
		}
		ck.move(t, m.e, 2*time.Second)
		eventually(t, "the connection ends", func() bool { return m.dst.Conns() == 0 })
	})
	t.Run("records and frames in pieces, one after the other", func(t *testing.T) {
		ck := newClock()
		m := newMesh(t, Config{Now: ck.Now}, netip.AddrPort{})
		m.in.request = local
		c := dial(t, m.hopAddr)
		slow := &pieces{TCPConn: c}
		over := tls.Client(slow, m.peer)
		if err := over.Handshake(); err != nil {
			t.Fatal(err)
		}
		p := newPeer2Over(t, c, over, true)
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
		for i := range uint32(6) {
			slow.between = func() {
				m.seen(t, func(c *h2conn) bool { return c.begun == ck.Now() })
				ck.move(t, m.e, 10*time.Second)
			}
			p.get(2*i+1, "/")
			if err := p.flush(); err != nil {
				t.Fatal(err)
			}
			slow.between = nil
			if got := p.status(2*i + 1); got != "421" {
				t.Fatalf("request %d: status %s", i, got)
			}
			m.seen(t, func(c *h2conn) bool { return c.begun == 0 })
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

// TestReleaseMeetsTheBound: what is given back elsewhere while a loop finds that its pod holds too much is not missed. Nothing
// else would make the loop look again, and the pod's raw connections would be reset from then on.
func TestReleaseMeetsTheBound(t *testing.T) {
	s := newStage(t, Config{MaxLoops: 1})
	var pods []*Pod
	for i := range 64 {
		pods = append(pods, s.e.AddPod(fmt.Sprintf("c%d", i)))
	}
	much := pods[0].proc.podHeld() + 1
	for round := range 300 {
		for _, p := range pods {
			p.HoldBytes(much)
		}
		var at atomic.Int32
		meet := func() {
			for at.Add(1); at.Load() < 2; {
				runtime.Gosched()
			}
		}
		over := make(chan struct{})
		go func() {
			defer close(over)
			meet()
			for _, p := range slices.Backward(pods) { // the two meet at one of the pods
				p.HoldBytes(-much)
			}
		}()
		s.onLoop(func(l *Loop) {
			meet()
			for _, p := range pods {
				p.share(l).addHeldBytes(0)
			}
		})
		<-over
		s.onLoop(func(*Loop) {}) // behind what was posted by those that gave back
		for i, p := range pods {
			if p.HoldsTooMuch() {
				t.Fatalf("round %d: nothing is held of pod %d, and it holds too much", round, i)
			}
		}
	}
}
