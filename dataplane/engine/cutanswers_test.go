package engine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	oracle "golang.org/x/net/http2"
)

// TestCutAnswersAreNoSuccess: an answer that ends before it is whole never ends for an HTTP/2 client in a reset with NO_ERROR, which clients take
// for an orderly end (RFC 9113 8.1), whatever ended it.
func TestCutAnswersAreNoSuccess(t *testing.T) {
	cutH1 := func(how string) func(c *net.TCPConn) {
		return heads(func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
			switch how {
			case "length":
				io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nsome")
			case "chunked":
				io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nsome\r\n")
			case "reset":
				io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nsome")
				reset(c)
			}
			return false
		})
	}
	cutH2 := func(code oracle.ErrCode) func(t *testing.T) func(c *net.TCPConn) {
		return func(t *testing.T) func(c *net.TCPConn) {
			return func(c *net.TCPConn) {
				p := newPeer2(t, c, false)
				for p.flush() == nil {
					f, err := p.ReadFrame()
					if err != nil {
						return
					}
					switch f := f.(type) {
					case *oracle.SettingsFrame:
						if !f.IsAck() {
							p.WriteSettingsAck()
						}
					case *oracle.MetaHeadersFrame:
						p.head(f.StreamID, false, ":status", "200")
						p.WriteData(f.StreamID, false, []byte("some"))
						p.WriteRSTStream(f.StreamID, code)
					}
				}
			}
		}
	}
	h1 := func(how string) func(t *testing.T) func(c *net.TCPConn) {
		return func(*testing.T) func(c *net.TCPConn) { return cutH1(how) }
	}
	for _, tt := range []struct {
		name string
		app  func(t *testing.T) func(c *net.TCPConn)
		h2   bool
	}{
		{"length", h1("length"), false},
		{"chunked", h1("chunked"), false},
		{"reset", h1("reset"), false},
		{"NO_ERROR", cutH2(oracle.ErrCodeNo), true},
		{"CANCEL", cutH2(oracle.ErrCodeCancel), true},
		{"REFUSED_STREAM", cutH2(oracle.ErrCodeRefusedStream), true},
	} {
		for _, over := range []string{"application", "hop", "in process"} {
			t.Run(tt.name+" "+over, func(t *testing.T) {
				var at string
				switch over {
				case "application":
					s := newStage(t, Config{})
					pod := s.e.AddPod("p")
					at = s.front(pod, &svc{pod: pod, to: s.app(tt.app(t)), h2: tt.h2}, true)
				case "hop":
					m := newMesh(t, Config{}, netip.AddrPort{})
					m.in.to, m.in.h2 = m.app(tt.app(t)), tt.h2
					at = m.h2
				default:
					m := newNear(t, netip.AddrPort{})
					m.in.to, m.in.h2 = m.app(tt.app(t)), tt.h2
					at = m.front(m.src, m.out, true)
				}
				p := newPeer2(t, dial(t, at), true)
				p.get(1, "/")
				if err := p.flush(); err != nil {
					t.Fatal(err)
				}
				for {
					f, err := p.ReadFrame()
					if err != nil {
						t.Fatal(err)
					}
					switch f := f.(type) {
					case *oracle.RSTStreamFrame:
						if f.ErrCode == oracle.ErrCodeNo || f.ErrCode == oracle.ErrCodeRefusedStream {
							t.Errorf("reset with %v", f.ErrCode)
						}
						return
					case *oracle.DataFrame:
						if f.StreamEnded() {
							t.Fatal("it ended in order")
						}
					case *oracle.SettingsFrame:
						if !f.IsAck() {
							p.WriteSettingsAck()
						}
					}
				}
			})
		}
	}
}

// TestNoResetBeforeItsHead: a request that is given up at once is either never seen by an upstream, or its head comes before its reset: a reset of
// an idle stream ends the connection and all that is on it (RFC 9113 6.4).
func TestNoResetBeforeItsHead(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	bad := make(chan string, 1)
	app := s.app(func(c *net.TCPConn) {
		p := newPeer2(t, c, false)
		seen := map[uint32]bool{}
		for p.flush() == nil {
			f, err := p.ReadFrame()
			if err != nil {
				return
			}
			switch f := f.(type) {
			case *oracle.SettingsFrame:
				if !f.IsAck() {
					p.WriteSettingsAck()
				}
			case *oracle.MetaHeadersFrame:
				seen[f.StreamID] = true
				for _, h := range f.Fields {
					if h.Name == ":path" && h.Value == "/last" {
						p.head(f.StreamID, true, ":status", "204")
					}
				}
			case *oracle.RSTStreamFrame:
				if !seen[f.StreamID] {
					select {
					case bad <- fmt.Sprintf("stream %d is reset before its head", f.StreamID):
					default:
					}
				}
			}
		}
	})
	v := &svc{pod: pod, to: app, h2: true}
	p := newPeer2(t, dial(t, s.front(pod, v, true)), true)
	for i := range uint32(200) {
		id := 2*i + 1
		if i%2 == 0 {
			p.get(id, "/")
		} else {
			p.head(id, false, request()...)
			p.WriteData(id, false, []byte("some"))
		}
		p.WriteRSTStream(id, oracle.ErrCodeCancel)
	}
	p.get(401, "/last")
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	for {
		f, err := p.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if h, ok := f.(*oracle.MetaHeadersFrame); ok && h.StreamID == 401 {
			break
		}
	}
	select {
	case what := <-bad:
		t.Error(what)
	default:
	}
}

// TestRefusedUpgradeHoldsNothing: an application that refuses an upgrade and keeps its connection gets further requests on
// it, and one whose client has gone is let go.
func TestRefusedUpgradeHoldsNothing(t *testing.T) {
	m := newMesh(t, Config{}, netip.AddrPort{})
	m.in.to = m.app(heads(func(c *net.TCPConn, _ *bufio.Reader, line string) bool {
		answer := "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"
		if strings.HasPrefix(line, "GET /small") {
			answer = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes"
		}
		_, err := io.WriteString(c, answer)
		return err == nil
	}))
	for range 20 {
		c := dial(t, m.h1)
		io.WriteString(c, "GET /chat HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || res.StatusCode != 404 {
			t.Fatalf("%v, %v", res, err)
		}
		c.Close()
	}
	m.small(t)
	eventually(t, "all requests are over, and one connection is left to the application", func() bool {
		n := 0
		m.onLoop(func(l *Loop) {
			for _, p := range l.appPools() {
				n += p.n
			}
		})
		return m.in.begun.Load() == m.in.done.Load() && m.out.begun.Load() == m.out.done.Load() && n <= 1
	})
}

// TestLateBytesAreNoAnswer: bytes that come behind an answer, which was announced shorter than it is, are not the next request's answer.
func TestLateBytesAreNoAnswer(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	more := make(chan struct{})
	first := true
	app := s.app(heads(func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		if first {
			first = false
			<-more
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong")
		}
		return true
	}))
	at := s.front(pod, &svc{pod: pod, to: app}, false)
	c := dial(t, at)
	br := bufio.NewReader(c)
	for i := range 20 {
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(res.Body); string(b) != "ok" {
			t.Fatalf("answer %d: %q", i, b)
		}
		if i == 0 {
			close(more)
			eventually(t, "the connection is given up", func() (gone bool) {
				s.onLoop(func(l *Loop) {
					gone = true
					for _, p := range l.appPools() {
						gone = gone && p.n == 0
					}
				})
				return gone
			})
		}
	}
}
