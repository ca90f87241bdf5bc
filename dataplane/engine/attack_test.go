package engine

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"aether/dataplane/exchange"
	"aether/dataplane/http2"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
)

// peer2 speaks HTTP/2 by x/net's Framer, frame by frame.
type peer2 struct {
	*oracle.Framer
	t   testing.TB
	c   *net.TCPConn
	rw  io.ReadWriter // c, or TLS over it
	buf bytes.Buffer  // frames not sent yet
	blk bytes.Buffer
	enc *hpack.Encoder
}

// newPeer2 makes a peer on c; a client's preface and SETTINGS are sent first.
func newPeer2(t testing.TB, c *net.TCPConn, client bool, settings ...oracle.Setting) *peer2 {
	return newPeer2Over(t, c, c, client, settings...)
}

func newPeer2Over(t testing.TB, c *net.TCPConn, rw io.ReadWriter, client bool, settings ...oracle.Setting) *peer2 {
	p := &peer2{t: t, c: c, rw: rw}
	p.Framer = oracle.NewFramer(&p.buf, rw)
	p.AllowIllegalWrites = true
	p.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	p.enc = hpack.NewEncoder(&p.blk)
	if client {
		p.buf.WriteString(oracle.ClientPreface)
	} else {
		b := make([]byte, len(oracle.ClientPreface))
		_, err := io.ReadFull(rw, b)
		if errors.Is(err, net.ErrClosed) {
			return p // the test is over, and has closed it
		}
		if err != nil || string(b) != oracle.ClientPreface {
			t.Errorf("preface %q, %v", b, err)
		}
	}
	p.WriteSettings(settings...)
	return p
}

// flush sends what was written; whether the other side still takes it is the test's affair.
func (p *peer2) flush() error {
	_, err := p.rw.Write(p.buf.Bytes())
	p.buf.Reset()
	return err
}

func (p *peer2) head(id uint32, end bool, kv ...string) {
	p.blk.Reset()
	for i := 0; i < len(kv); i += 2 {
		p.enc.WriteField(hpack.HeaderField{Name: kv[i], Value: kv[i+1]})
	}
	p.WriteHeaders(oracle.HeadersFrameParam{StreamID: id, BlockFragment: p.blk.Bytes(), EndStream: end, EndHeaders: true})
}

func (p *peer2) get(id uint32, path string) {
	p.head(id, true, ":method", "GET", ":scheme", "http", ":path", path, ":authority", "a")
}

// next reads until a frame that want is content with. SETTINGS are acknowledged.
func (p *peer2) next(want func(f oracle.Frame) bool) oracle.Frame {
	p.t.Helper()
	for {
		f, err := p.ReadFrame()
		if err != nil {
			p.t.Fatalf("the frame that the test waits for does not come: %v", err)
		}
		if s, ok := f.(*oracle.SettingsFrame); ok && !s.IsAck() {
			p.WriteSettingsAck()
			if err := p.flush(); err != nil {
				p.t.Fatal(err)
			}
		}
		if want(f) {
			return f
		}
	}
}

// status waits for the final head of a stream.
func (p *peer2) status(id uint32) string {
	p.t.Helper()
	return p.next(func(f oracle.Frame) bool {
		m, ok := f.(*oracle.MetaHeadersFrame)
		return ok && m.StreamID == id
	}).(*oracle.MetaHeadersFrame).PseudoValue("status")
}

// goaway waits for GOAWAY.
func (p *peer2) goaway() *oracle.GoAwayFrame {
	p.t.Helper()
	return p.next(func(f oracle.Frame) bool { _, ok := f.(*oracle.GoAwayFrame); return ok }).(*oracle.GoAwayFrame)
}

// TestFloodsOfTheLoop: what a client does to us does not reach the application
// without bound, and its connection ends.
func TestFloodsOfTheLoop(t *testing.T) {
	for _, tt := range []struct {
		name  string
		round func(p *peer2, i int)
		begun int64 // requests that may reach the service
	}{
		{"rapid reset, CVE-2023-44487", func(p *peer2, i int) {
			p.get(uint32(2*i+1), "/")
			p.WriteRSTStream(uint32(2*i+1), oracle.ErrCodeCancel)
		}, 1001},
		{"made you reset, CVE-2025-8671", func(p *peer2, i int) {
			p.get(uint32(2*i+1), "/")
			p.WriteWindowUpdate(uint32(2*i+1), 0)
		}, 101},
		{"PING flood", func(p *peer2, i int) { p.WritePing(false, [8]byte{}) }, 0},
		{"SETTINGS flood", func(p *peer2, i int) { p.WriteSettings() }, 0},
		{"PRIORITY flood", func(p *peer2, i int) { p.WritePriority(1, oracle.PriorityParam{}) }, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ck := newClock() // which stands: nothing is forgiven
			s := newStage(t, Config{Now: ck.Now})
			pod := s.e.AddPod("p")
			hang := make(chan struct{})
			v := &svc{pod: pod, to: s.app(func(c *net.TCPConn) { <-hang })}
			t.Cleanup(func() { close(hang) })
			p := newPeer2(t, dial(t, s.front(pod, v, true)), true)
			p.WriteSettingsAck()
			for i := range 20_000 {
				tt.round(p, i)
				if i%100 == 0 && p.flush() != nil {
					break
				}
			}
			_ = p.flush()
			// GOAWAY may be lost to the reset that answers what we sent after it; the end may not.
			_, _ = io.Copy(io.Discard, p.c)
			eventually(t, "every exchange ends", func() bool { return v.begun.Load() == v.done.Load() })
			eventually(t, "its connections are closed", func() bool { return pod.Conns() == 0 })
			if n := v.begun.Load(); n > tt.begun {
				t.Errorf("%d requests reached the service, want at most %d", n, tt.begun)
			}
		})
	}
}

// heap is what is held, after a collection.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestZeroWindowHoarding: streams whose windows the client keeps shut hold a
// bounded part of memory each, and not for ever, however lively the connection is; others on
// it are served meanwhile and after.
func TestZeroWindowHoarding(t *testing.T) {
	const streams, body = 200, 1 << 20
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("application h2=%v", h2), func(t *testing.T) {
			ck := newClock()
			s := newStage(t, Config{Now: ck.Now})
			pod := s.e.AddPod("p")
			big := make([]byte, body)
			app := serveHTTP(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/none" {
					w.WriteHeader(204)
					return
				}
				w.Write(big)
			}))
			v := &svc{pod: pod, to: app, h2: h2}
			p := newPeer2(t, dial(t, s.front(pod, v, true)), true, oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 0})
			if err := p.flush(); err != nil {
				t.Fatal(err)
			}
			before := heap()
			for i := range uint32(streams) {
				p.get(2*i+1, "/big")
			}
			if err := p.flush(); err != nil {
				t.Fatal(err)
			}
			for heads := 0; heads < streams; heads++ {
				p.next(func(f oracle.Frame) bool { _, ok := f.(*oracle.MetaHeadersFrame); return ok })
			}
			held := func() (n int) {
				s.onLoop(func(l *Loop) {
					l.Each(func(src reactor.Source) {
						switch c := src.(type) {
						case *h1client:
							n += len(c.in)
						case *h2conn:
							c.h2.Each(func(st *http2.Stream) { n += cap(st.User.(*h2stream).pend) })
							n += len(c.h2.Out())
						}
					})
				})
				return
			}
			limit := streams * readBuf
			if h2 {
				limit = 2 * h2Window // what append grew by included
			}
			if n := held(); n > limit+(1<<20) {
				t.Errorf("%d bytes are held for %d shut streams, want at most %d", n, streams, limit)
			}
			// The test's own applications hold their share of it.
			if grown := heap() - before; grown > int64(limit)+streams*(128<<10) {
				t.Errorf("%d bytes more on the heap", grown)
			}
			// Time passes, and the connection is never silent.
			id := uint32(2*streams + 1)
			for left := time.Duration(idleStream) + time.Minute; left > 0; left -= 30 * time.Second {
				ck.move(t, s.e, 30*time.Second)
				p.get(id, "/none")
				if err := p.flush(); err != nil {
					t.Fatal(err)
				}
				if got := p.status(id); got != "204" {
					t.Fatalf("a request among them: %s", got)
				}
				id += 2
			}
			eventually(t, "the shut streams end", func() bool { return v.done.Load() == v.begun.Load() })
			s.onLoop(func(l *Loop) {
				l.Each(func(src reactor.Source) {
					if c, ok := src.(*h2conn); ok && c.h2.Streams() != 0 {
						t.Errorf("%d streams are left", c.h2.Streams())
					}
				})
			})
			if n := held(); n > 1<<20 {
				t.Errorf("%d bytes are still held", n)
			}
		})
	}
}

// TestHeadsThatNobodyReads: a client that asks for big heads and reads none is
// cut off before they fill the memory.
func TestHeadsThatNobodyReads(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	fat := []byte(strings.Repeat("x", 50_000))
	var parked []*exchange.Exchange
	v := &svc{pod: pod, request: func(x *exchange.Exchange) bool {
		parked = append(parked, x)
		return true
	}}
	p := newPeer2(t, dial(t, s.front(pod, v, true)), true)
	for i := range uint32(1000) {
		p.get(2*i+1, "/")
	}
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all have come", func() bool { return v.begun.Load() == 1000 })
	s.onLoop(func(l *Loop) { // at once, as when an upstream comes back to life
		for i, x := range parked {
			fat[0] = 'a' + byte(i%26) // no place in the table helps
			x.Reply(&httpmsg.Head{Status: 200, Fields: []httpmsg.Field{{Name: []byte("x-fat"), Value: fat}}}, nil)
		}
		l.Each(func(src reactor.Source) {
			if c, ok := src.(*h2conn); ok && len(c.h2.Out()) > 9<<20 {
				t.Errorf("%d bytes of heads are queued", len(c.h2.Out()))
			}
		})
	})
	eventually(t, "the connection is closed", func() bool { return pod.Conns() == 0 })
	if b, d := v.begun.Load(), v.done.Load(); b != d {
		t.Errorf("%d exchanges began, %d are done", b, d)
	}
}

// TestDribble: a body that a client lets through in crumbs arrives whole, whatever
// brought it, and the rest of it is not moved about for each of them.
func TestDribble(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("application h2=%v", h2), func(t *testing.T) {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			want := make([]byte, 200_000)
			for i := range want {
				want[i] = byte(i * i >> 3)
			}
			app := serveHTTP(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.Write(want) }))
			v := &svc{pod: pod, to: app, h2: h2}
			p := newPeer2(t, dial(t, s.front(pod, v, true)), true, oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 0})
			p.get(1, "/")
			p.WriteWindowUpdate(0, 1<<20)
			if err := p.flush(); err != nil {
				t.Fatal(err)
			}
			p.status(1)
			var got []byte
			for n := uint32(500); ; n = n%1500 + 500 {
				p.WriteWindowUpdate(1, n)
				if err := p.flush(); err != nil {
					t.Fatal(err)
				}
				for left := int(n); left > 0; {
					f := p.next(func(f oracle.Frame) bool { _, ok := f.(*oracle.DataFrame); return ok }).(*oracle.DataFrame)
					got = append(got, f.Data()...)
					left -= len(f.Data())
					if left < 0 {
						t.Fatalf("%d bytes beyond the window", -left)
					}
					if f.StreamEnded() {
						if !bytes.Equal(got, want) {
							t.Errorf("%d of %d bytes, or wrong ones", len(got), len(want))
						}
						return
					}
				}
			}
		})
	}
}

// serveHTTP runs an application of the standard library's, HTTP/1 and h2c.
func serveHTTP(t testing.TB, h http.Handler) netip.AddrPort {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	t.Cleanup(func() { srv.Close(); wg.Wait() })
	return ln.Addr().(*net.TCPAddr).AddrPort()
}

// retrying sends anew what its upstream did not process, as a service does.
type retrying struct {
	*svc
	retried atomic.Int64
}

func (r *retrying) Failed(x *exchange.Exchange, c exchange.Code) {
	if c == exchange.Refused && x.Replayable() && x.Attempts < 3 && !errors.Is(x.Cause, ErrHopFull) {
		r.retried.Add(1)
		r.send(x)
		return
	}
	r.svc.Failed(x, c)
}
