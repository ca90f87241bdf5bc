package engine

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"aether/dataplane/http2"
)

// endless is an application that answers /small, and to anything else sends without
// end: as a tunnel, or as an answer.
func endless(c *net.TCPConn) {
	br := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		switch {
		case req.URL.Path == "/small":
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes")
			continue
		case req.Header.Get("Upgrade") != "":
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: foo\r\n\r\n")
		default:
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
		}
		io.Copy(c, zeros{})
		return
	}
}

// stall opens n tunnels and downloads of one client that reads none of them.
func (m *mesh) stall(n int) *peer2 {
	m.t.Helper()
	p := newPeer2(m.t, dial(m.t, m.h2), true)
	for i := range n {
		id := uint32(2*i + 1)
		if i%2 == 0 {
			p.head(id, false, ":method", "CONNECT", ":protocol", "foo", ":scheme", "http", ":path", "/chat", ":authority", "a")
		} else {
			p.get(id, "/much")
		}
	}
	if err := p.flush(); err != nil {
		m.t.Fatal(err)
	}
	return p
}

// kept looks at the hop's only session: its streams with data that nobody takes, what they
// keep, and what the source pod holds.
func (m *mesh) kept() (streams, bytes, held int) {
	m.onLoop(func(l *Loop) {
		held = m.src.share(l).held
		if m.theHop == nil || len(m.theHop.conns) != 1 {
			return
		}
		c := m.theHop.conns[0]
		bytes = c.kept
		c.h2.Each(func(s *http2.Stream) {
			if st, _ := s.User.(*h2stream); st != nil && len(st.pend) > 0 {
				streams++
			}
		})
	})
	return
}

// ask asks the application for /small; the channel gets all that comes.
func (m *mesh) ask(t *testing.T) <-chan string {
	t.Helper()
	c := dial(t, m.h1)
	io.WriteString(c, "GET /small HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
	got := make(chan string, 1)
	go func() {
		b, err := io.ReadAll(c)
		if err != nil {
			b = append(b, err.Error()...)
		}
		c.Close()
		got <- string(b)
	}()
	return got
}

// yes is what /small is answered.
func yes(t *testing.T, got string) {
	t.Helper()
	if !strings.HasPrefix(got, "HTTP/1.1 200") || !strings.HasSuffix(got, "yes") {
		t.Fatalf("%q", got)
	}
}

func (m *mesh) small(t *testing.T) {
	t.Helper()
	yes(t, <-m.ask(t))
}

// TestStalledStreams: tunnels and downloads that nobody reads stop nobody but themselves, however many
// one session carries; what they keep is bounded, and the pod's.
func TestStalledStreams(t *testing.T) {
	m := newMesh(t, Config{}, netip.AddrPort{})
	m.in.to = m.app(endless)
	m.small(t)
	const n = 200
	p := m.stall(n)
	eventually(t, "all have stalled", func() bool { streams, _, _ := m.kept(); return streams == n })
	for range 20 {
		m.small(t)
	}
	_, bytes, held := m.kept()
	t.Logf("%d MiB kept, %d MiB held", bytes>>20, held>>20)
	if bytes <= h2Window {
		t.Errorf("%d bytes kept: the window of the connection was not met", bytes)
	}
	if held < bytes || held > podHeld {
		t.Errorf("%d bytes kept, %d accounted to the pod", bytes, held)
	}
	if hops := m.hops.Load(); hops != 1 {
		t.Errorf("%d sessions, want 1", hops)
	}
	p.c.Close()
	eventually(t, "what they kept is given back", func() bool { _, bytes, held := m.kept(); return bytes == 0 && held < 1<<20 })
	m.small(t)
}

// TestStalledTooMuch: when a pod holds more than it may, the streams of a hop that have stalled for long
// end, and no more of them than need be; the pod's requests are served once it holds less.
func TestStalledTooMuch(t *testing.T) {
	ck := newClock()
	calm := func() uint64 { return 0 }
	m := newMesh(t, Config{Now: ck.Now, Memory: 16 << 20, Used: calm}, netip.AddrPort{}) // a pod may hold a quarter
	m.in.to = m.app(endless)
	m.small(t)
	const most, n = 4 << 20, 100
	p := m.stall(n)
	tight := func() (yes bool) {
		m.onLoop(func(l *Loop) { yes = m.src.share(l).tight })
		return
	}
	eventually(t, "it holds what it may", tight)
	if _, _, held := m.kept(); held > hopHeld*most+1<<20 {
		t.Errorf("%d bytes held, want about %d at most", held, hopHeld*most)
	}
	ck.move(t, m.e, time.Duration(stallTime)/2)
	if !tight() {
		t.Error("what has just stalled is ended")
	}
	// Those that are left take in what had been held back, so that it may hold too much again, and then
	// further ones end: but only then. Time passes while it holds too much, and no longer.
	for range 50 {
		got := m.ask(t)
		eventually(t, "it is served, while those who stall stay", func() bool {
			select {
			case answer := <-got:
				yes(t, answer)
				return true
			default:
				if tight() {
					ck.move(t, m.e, time.Second)
				}
				return false
			}
		})
	}
	streams, bytes, held := m.kept()
	t.Logf("%d streams are left, %d KiB kept, %d KiB held", streams, bytes>>10, held>>10)
	if streams == 0 {
		t.Error("all of them have ended")
	}
	if held > most {
		t.Errorf("%d bytes held, want %d at most", held, most)
	}
	p.c.Close()
	eventually(t, "the rest has ended", func() bool { streams, _, held := m.kept(); return streams == 0 && held < 1<<20 })
	m.small(t)
}

// TestEarlyResets: a session on which many requests were given up takes no more of
// them before its peer might take it for an attack, and ends when its last stream has.
func TestEarlyResets(t *testing.T) {
	gate := make(chan struct{})
	m := newMesh(t, Config{}, netip.AddrPort{})
	m.in.to = m.app(heads(func(c *net.TCPConn, _ *bufio.Reader, line string) bool {
		if !strings.HasPrefix(line, "GET /long") {
			_, _ = io.Copy(io.Discard, c)
			return false
		}
		<-gate
		_, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes")
		return err == nil
	}))
	long := dial(t, m.h1)
	io.WriteString(long, "GET /long HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
	eventually(t, "it has come", func() bool { return m.in.begun.Load() == 1 })
	const n = 1200
	for i := range n {
		c := dial(t, m.h1)
		io.WriteString(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
		eventually(t, "it has come", func() bool { return m.in.begun.Load() == int64(i+2) })
		reset(c)
		c.Close()
		eventually(t, "it is given up", func() bool { return m.in.done.Load() == int64(i+1) })
	}
	close(gate)
	if got := rest(t, long); !strings.HasPrefix(got, "HTTP/1.1 200") {
		t.Errorf("the one that was under way all the time: %q", got)
	}
	if hops := m.hops.Load(); hops < 2 || hops > n/500+1 {
		t.Errorf("%d sessions", hops)
	}
	m.onLoop(func(*Loop) {
		if n := m.theHop.Open(); n > 1 {
			t.Errorf("%d sessions are left, want those that were retired ended", n)
		}
	})
}
