package engine

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"
	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/http2"
	"aether/e2e/testseed"
)

// early is what an application of TestWholeAnswerWhateverFollows does with one request: an answer that is
// whole while the request is not, and then something that ends more than the answer.
type early struct {
	size     int
	trailers bool
	behind   string // what follows END_STREAM
	code     oracle.ErrCode
}

var behinds = []string{"reset", "reset twice", "GOAWAY and reset", "GOAWAY that excludes it", "end", "GOAWAY and end", "reset and end", "broken frame"}

func (e early) String() string {
	return fmt.Sprintf("%d bytes, trailers %v, then %s (%v)", e.size, e.trailers, e.behind, e.code)
}

// body is n bytes that show where one is missing.
func body(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i>>8) ^ byte(i)
	}
	return b
}

// earlyApp answers every request with what next gives, by x/net's Framer and within our windows.
func earlyApp(s *stage, next func() early, open *atomic.Int64) netip.AddrPort {
	return s.app(func(c *net.TCPConn) {
		open.Add(1)
		defer open.Add(-1)
		p := newPeer2(s.t, c, false)
		if p.flush() != nil {
			return
		}
		window := map[uint32]int{0: 65535}
		initial := 65535
		var at uint32
		read := func() bool { // one frame
			f, err := p.ReadFrame()
			if err != nil {
				return false
			}
			switch f := f.(type) {
			case *oracle.SettingsFrame:
				if v, ok := f.Value(oracle.SettingInitialWindowSize); ok && !f.IsAck() {
					initial = int(v)
				}
				if !f.IsAck() {
					p.WriteSettingsAck()
				}
			case *oracle.WindowUpdateFrame:
				window[f.StreamID] += int(f.Increment)
			case *oracle.MetaHeadersFrame:
				at = f.StreamID
				window[at] += initial
			}
			return true
		}
		for {
			for at = 0; at == 0; {
				if !read() {
					return
				}
			}
			id, e := at, next()
			p.head(id, false, ":status", "413")
			for b := body(e.size); ; {
				n := min(len(b), 16384, window[0], window[id])
				if end := n == len(b); n > 0 || end {
					p.WriteData(id, end && !e.trailers, b[:n])
					window[0] -= n
					window[id] -= n
					if b = b[n:]; end {
						break
					}
					continue
				}
				if p.flush() != nil || !read() {
					return
				}
			}
			if e.trailers {
				p.head(id, true, "x-end", "yes")
			}
			switch e.behind {
			case "reset":
				p.WriteRSTStream(id, e.code)
			case "reset twice":
				p.WriteRSTStream(id, e.code)
				p.WriteRSTStream(id, e.code)
			case "GOAWAY and reset":
				p.WriteGoAway(id, e.code, nil)
				p.WriteRSTStream(id, e.code)
			case "GOAWAY that excludes it":
				p.WriteGoAway(0, e.code, nil)
			case "GOAWAY and end":
				p.WriteGoAway(id, e.code, nil)
			case "reset and end":
				p.WriteRSTStream(id, e.code)
			case "broken frame":
				p.WriteRawFrame(oracle.FramePing, 0, 0, []byte("short"))
			}
			if p.flush() != nil {
				return
			}
			if e.behind == "end" || e.behind == "GOAWAY and end" || e.behind == "reset and end" {
				_ = c.CloseWrite()
				_, _ = io.Copy(io.Discard, c)
				return
			}
		}
	})
}

// small dials with little room for what comes, so that what a slow reader leaves stays in the proxy.
func small(t testing.TB, addr string) *net.TCPConn {
	t.Helper()
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096) }); cerr != nil {
			return cerr
		}
		return err
	}}
	c, err := d.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	return c.(*net.TCPConn)
}

// took is what a client has had of an answer.
type took struct {
	body     []byte
	trailers bool
	err      error
}

// slow1 asks with an upload that it does not end, and reads by steps.
func slow1(t testing.TB, addr string, step int) (got took) {
	c := small(t, addr)
	defer c.Close()
	fmt.Fprint(c, "POST / HTTP/1.1\r\nHost: a\r\nTE: trailers\r\nContent-Length: 1000000\r\n\r\n0123456789")
	res, err := http.ReadResponse(bufio.NewReaderSize(c, 16), nil)
	if err != nil {
		return took{err: err}
	}
	var b bytes.Buffer
	for err == nil {
		_, err = io.CopyN(&b, res.Body, int64(step))
	}
	if !errors.Is(err, io.EOF) {
		return took{err: fmt.Errorf("%d bytes, then %w", b.Len(), err)}
	}
	return took{body: b.Bytes(), trailers: res.Trailer.Get("x-end") == "yes"}
}

// slow2 is slow1 by HTTP/2, with a window of its own, opened by steps.
func slow2(t testing.TB, addr string, window, step int) (got took) {
	c := small(t, addr)
	defer c.Close()
	p := newPeer2(t, c, true, oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: uint32(window)})
	p.head(1, false, ":method", "POST", ":scheme", "http", ":path", "/", ":authority", "a", "te", "trailers")
	p.WriteData(1, false, []byte("0123456789"))
	if err := p.flush(); err != nil {
		return took{err: err}
	}
	room := window
	for {
		f, err := p.ReadFrame()
		if err != nil {
			return took{err: fmt.Errorf("%d bytes, then %w", len(got.body), err)}
		}
		switch f := f.(type) {
		case *oracle.SettingsFrame:
			if !f.IsAck() {
				p.WriteSettingsAck()
			}
		case *oracle.DataFrame:
			got.body = append(got.body, f.Data()...)
			if room -= len(f.Data()); f.StreamEnded() {
				return got
			}
			p.WriteWindowUpdate(0, uint32(max(1, len(f.Data()))))
		case *oracle.MetaHeadersFrame:
			for _, h := range f.Fields {
				got.trailers = got.trailers || h.Name == "x-end" && h.Value == "yes"
			}
			if f.StreamEnded() {
				return got
			}
		case *oracle.RSTStreamFrame:
			return took{err: fmt.Errorf("%d bytes, then RST_STREAM %v", len(got.body), f.ErrCode)}
		}
		if room == 0 {
			p.WriteWindowUpdate(1, uint32(step))
			room = step
		}
		if err := p.flush(); err != nil {
			return took{err: err}
		}
	}
}

// TestWholeAnswerWhateverFollows: an answer that has been received to its end reaches the client, whatever comes behind
// its END_STREAM on the stream or the connection, however slowly the client takes it, and counts as complete
// (RFC 9113 8.1). Every kind of HTTP/2 upstream, every version of client.
func TestWholeAnswerWhateverFollows(t *testing.T) {
	type way struct {
		s      *stage
		h1, h2 string
		asked  *svc // at the source
	}
	var apps atomic.Int64 // connections that applications have
	for name, open := range map[string]func(t *testing.T, next func() early) way{
		"application": func(t *testing.T, next func() early) way {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			v := &svc{pod: pod, to: earlyApp(s, next, &apps), h2: true}
			return way{s, s.front(pod, v, false), s.front(pod, v, true), v}
		},
		"peer of a hop": func(t *testing.T, next func() early) way {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			var hop *Hop
			v := &svc{pod: pod, hop: plainHop(pod, earlyApp(s, next, &apps).String(), &hop)}
			return way{s, s.front(pod, v, false), s.front(pod, v, true), v}
		},
		"application behind a hop": func(t *testing.T, next func() early) way {
			m := newMesh(t, Config{}, netip.AddrPort{})
			m.in.to, m.in.h2 = earlyApp(m.stage, next, &apps), true
			return way{m.stage, m.h1, m.h2, m.out}
		},
		"HTTP/1 application behind a hop": func(t *testing.T, next func() early) way {
			m := newMesh(t, Config{}, netip.AddrPort{})
			m.in.to = m.app(heads(func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
				e := next()
				out := fmt.Sprintf("HTTP/1.1 413 x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n", e.size, body(e.size))
				if e.trailers {
					out += "x-end: yes\r\n"
				}
				_, _ = io.WriteString(c, out+"\r\n")
				return false
			}))
			return way{m.stage, m.h1, m.h2, m.out}
		},
		"application in process": func(t *testing.T, next func() early) way {
			m := newNear(t, netip.AddrPort{})
			m.in.to, m.in.h2 = earlyApp(m.stage, next, &apps), true
			return way{m.stage, m.at, m.front(m.src, m.out, true), m.out}
		},
	} {
		t.Run(name, func(t *testing.T) {
			seed := testseed.Seed(t)
			r := rand.New(rand.NewPCG(seed, 1))
			var mu sync.Mutex
			var is early
			w := open(t, func() early {
				mu.Lock()
				defer mu.Unlock()
				return is
			})
			failed := 0
			for i := range 40 {
				e := early{size: 1 + r.IntN(1<<[]int{8, 16, 18, 20}[r.IntN(4)]), trailers: r.IntN(2) == 0,
					behind: behinds[r.IntN(len(behinds))], code: oracle.ErrCode(r.IntN(14))}
				mu.Lock()
				is = e
				mu.Unlock()
				window, step := 1+r.IntN(70_000), 256+r.IntN(70_000)
				how := "HTTP/2"
				var got took
				if i%2 == 0 {
					how = "HTTP/1.1"
					got = slow1(t, w.h1, step)
				} else {
					got = slow2(t, w.h2, window, step)
				}
				if got.err != nil || !bytes.Equal(got.body, body(e.size)) || e.trailers != got.trailers {
					failed++
					t.Errorf("seed %d, %s client with window %d and steps of %d, %v: %d bytes, trailers %v, %v",
						seed, how, window, step, e, len(got.body), got.trailers, got.err)
				}
				eventually(t, "every exchange ends", func() bool { return w.asked.done.Load() == w.asked.begun.Load() })
				if last := *w.asked.last.Load(); last != "complete no-error 413" {
					failed++
					t.Errorf("seed %d, %s client, %v: is recorded as %q", seed, how, e, last)
				}
				if failed > 6 {
					t.FailNow()
				}
				if !strings.HasPrefix(e.behind, "reset") || e.behind == "reset and end" { // the next is to find it gone
					eventually(t, "the application's connection ends", func() bool { return apps.Load() == 0 })
				}
			}
			if n := w.asked.begun.Load(); n != 40 {
				t.Errorf("%d requests for 40: something was sent again", n)
			}
		})
	}
}

// TestUploadGoesOnBehindAWholeAnswer: a client that opens its windows only once it has written everything gets its answer, though
// the stream of the application was reset behind the end of it while the upload stood still.
func TestUploadGoesOnBehindAWholeAnswer(t *testing.T) {
	const size, answered = 4 << 20, 200_000
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	answer, stood := make(chan struct{}), false
	v := &svc{pod: pod, h2: true, to: earlyApp(s, func() early {
		<-answer
		return early{size: answered, behind: "reset", code: oracle.ErrCodeNo}
	}, new(atomic.Int64))}
	p := newPeer2(t, dial(t, s.front(pod, v, true)), true, oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 100})
	p.head(1, false, ":method", "POST", ":scheme", "http", ":path", "/", ":authority", "a")
	window := map[uint32]int{0: 65535, 1: 256 << 10} // as the proxy has them
	var got []byte
	ended := false
	for left := size; !ended; {
		for left > 0 && min(window[0], window[1]) > 0 {
			n := min(left, 16384, window[0], window[1])
			left -= n
			window[0] -= n
			window[1] -= n
			if p.WriteData(1, left == 0, make([]byte, n)); left == 0 {
				p.WriteWindowUpdate(1, answered)
				p.WriteWindowUpdate(0, answered)
			}
		}
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
		if !stood && window[1] == 0 { // the application takes no more than its first windows
			s.seen(t, func(c *h2conn) (stands bool) {
				c.h2.Each(func(s *http2.Stream) {
					st, _ := s.User.(*h2stream)
					stands = stands || !c.client && st != nil && len(st.pend) > 0
				})
				return stands
			})
			close(answer)
			stood = true
		}
		f, err := p.ReadFrame()
		if err != nil {
			t.Fatalf("%d of %d bytes are still to be sent, %d came: %v", left, size, len(got), err)
		}
		switch f := f.(type) {
		case *oracle.SettingsFrame:
			if !f.IsAck() {
				p.WriteSettingsAck()
			}
		case *oracle.WindowUpdateFrame:
			window[f.StreamID] += int(f.Increment)
		case *oracle.DataFrame:
			got = append(got, f.Data()...)
			ended = f.StreamEnded()
		case *oracle.RSTStreamFrame:
			t.Fatalf("reset with %v after %d bytes, %d still to be sent", f.ErrCode, len(got), left)
		}
	}
	if !bytes.Equal(got, body(answered)) {
		t.Errorf("%d bytes, or others than those of the answer", len(got))
	}
}

// TestWholeAnswerBehindAFailedWrite: an application answers whole and resets its connection, which is found out by a write on it before anything was
// read: the answer reaches its client.
func TestWholeAnswerBehindAFailedWrite(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	begun, answer, gone := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var once atomic.Bool
	v := &svc{pod: pod, h2: true, to: s.app(func(c *net.TCPConn) {
		if once.Swap(true) {
			return // another connection, for the other request
		}
		defer close(gone)
		p := newPeer2(t, c, false)
		for p.flush() == nil {
			f, err := p.ReadFrame()
			if err != nil {
				t.Error(err)
				return
			}
			switch f := f.(type) {
			case *oracle.SettingsFrame:
				if !f.IsAck() {
					p.WriteSettingsAck()
				}
			case *oracle.MetaHeadersFrame:
				close(begun)
				<-answer
				p.head(f.StreamID, false, ":status", "200")
				p.WriteData(f.StreamID, true, body(100))
				_ = p.flush()
				reset(c)
				_ = c.Close()
				return
			}
		}
	})}
	v.request = func(x *exchange.Exchange) bool {
		if string(x.Req.Path) == "/2" { // on the loop, which has asked for events before
			close(answer)
			<-gone
		}
		return false
	}
	addr := s.front(pod, v, false)
	first, second := dial(t, addr), dial(t, addr)
	io.WriteString(first, "GET /1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
	<-begun
	io.WriteString(second, "GET /2 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
	if got := rest(t, first); !strings.HasPrefix(got, "HTTP/1.1 200 ") || !strings.Contains(got, string(body(100))) {
		t.Errorf("%q", got)
	}
	rest(t, second)
}
