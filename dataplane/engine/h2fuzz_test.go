package engine

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/reactor"
	"aether/mtls/record"
)

// script turns fuzz bytes into what a peer of either kind might send: frames that make sense, mostly.
type script struct{ b []byte }

func (s *script) byte() byte {
	if len(s.b) == 0 {
		return 0
	}
	c := s.b[0]
	s.b = s.b[1:]
	return c
}

func (s *script) n(max int) int { return int(s.byte()) % max }

// frames reads the script to its end. What breaks the protocol is rare, so that much goes before it.
func (s *script) frames(client bool) []byte {
	var out, blk bytes.Buffer
	fr, enc := oracle.NewFramer(&out, nil), hpack.NewEncoder(&blk)
	fr.AllowIllegalWrites = true
	next := uint32(1)
	id := func() uint32 { // of a stream that may be open
		if !client {
			return uint32(2*s.n(5) + 1)
		}
		return 2*uint32(s.n(max(1, int(next)/2))) + 1
	}
	fields := func(kv ...string) []byte {
		blk.Reset()
		for range s.n(3) {
			kv = append(kv[:len(kv):len(kv)], []string{"x-a", "cookie", "te", "grpc-status", "content-type"}[s.n(5)],
				[]string{"1", "trailers", "application/grpc", strings.Repeat("x", 9000)}[s.n(4)])
		}
		for i := 0; i < len(kv); i += 2 {
			_ = enc.WriteField(hpack.HeaderField{Name: kv[i], Value: kv[i+1]})
		}
		return bytes.Clone(blk.Bytes())
	}
	head := func() (block []byte, at uint32) {
		if !client {
			return fields(":status", []string{"200", "200", "200", "103", "204", "304", "503"}[s.n(7)]), id()
		}
		at = next
		next += 2
		block = fields([][]string{
			{":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a"},
			{":method", "POST", ":scheme", "http", ":path", "/on", ":authority", "a"},
			{":method", "POST", ":scheme", "http", ":path", "/on", ":authority", "a", "content-length", "5"},
			{":method", "PUT", ":scheme", "http", ":path", "/on", ":authority", "a", "expect", "100-continue"},
			{":method", "CONNECT", ":protocol", "foo", ":scheme", "http", ":path", "/on", ":authority", "a"},
			{":method", "GET", ":scheme", "http", ":path", "/on", ":authority", "a"},
		}[s.n(6)]...)
		return block, at
	}
	if client {
		_ = fr.WriteSettings()
		block, at := head()
		_ = fr.WriteHeaders(oracle.HeadersFrameParam{StreamID: at, BlockFragment: block, EndHeaders: true})
	}
	for len(s.b) > 0 {
		flags := s.byte()
		end := flags&1 != 0
		switch s.n(16) {
		case 0, 1, 2:
			block, at := head()
			_ = fr.WriteHeaders(oracle.HeadersFrameParam{StreamID: at, BlockFragment: block, EndStream: end, EndHeaders: true})
		case 3:
			block, at := head()
			k := min(len(block), s.n(20))
			_ = fr.WriteHeaders(oracle.HeadersFrameParam{StreamID: at, BlockFragment: block[:k], EndStream: end})
			_ = fr.WriteContinuation(at, true, block[k:])
		case 4, 5, 6, 7:
			p := bytes.Repeat([]byte{flags}, s.n(256)*(1+s.n(2)*63))
			if flags&2 != 0 {
				_ = fr.WriteDataPadded(id(), end, p, make([]byte, flags>>4))
			} else {
				_ = fr.WriteData(id(), end, p)
			}
		case 8: // trailers
			_ = fr.WriteHeaders(oracle.HeadersFrameParam{StreamID: id(), BlockFragment: fields("x-t", "1"), EndStream: true, EndHeaders: true})
		case 9:
			_ = fr.WriteRSTStream(id(), oracle.ErrCode(s.n(14)))
		case 10:
			_ = fr.WriteWindowUpdate(id()&^uint32(flags>>1&1), 1+uint32(s.byte())<<(flags%18))
		case 11: // an initial window, or how many streams there may be
			_ = fr.WriteSettings(oracle.Setting{ID: oracle.SettingID(3 + s.n(2)), Val: uint32(s.byte()) << (flags % 12)})
		case 12:
			_ = fr.WritePing(end, [8]byte{7: flags >> 4})
		case 13:
			if last := id(); flags > 230 {
				_ = fr.WriteGoAway(last, oracle.ErrCode(s.n(14)), nil)
			} else if flags > 200 {
				_ = fr.WriteGoAway(1<<31-1, oracle.ErrCodeNo, nil)
			}
		default:
			if flags < 230 {
				continue
			}
			n := min(s.n(64), len(s.b))
			_ = fr.WriteRawFrame(oracle.FrameType(s.n(12)), oracle.Flags(flags), uint32(s.byte()), s.b[:min(n, len(s.b))])
			s.b = s.b[min(n, len(s.b)):]
		}
	}
	return out.Bytes()
}

// hostile is the fuzzed end of a connection whose other end is the engine's.
type hostile struct {
	m   *fuzzed
	fd  int
	dst []byte
}

// socketpair gives one end to the engine and keeps the other.
func (m *fuzzed) socketpair() (theirs int, ours *hostile) {
	m.t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		m.t.Fatal(err)
	}
	return fds[0], &hostile{m: m, fd: fds[1]}
}

// say writes p and lets the engine see it; a peer that has gone, or does not read, is left alone.
func (h *hostile) say(p []byte) {
	for len(p) > 0 {
		n, err := unix.SendmsgN(h.fd, p, nil, nil, unix.MSG_NOSIGNAL)
		if err != nil {
			break
		}
		p = p[n:]
		h.m.onLoop(func(*Loop) {})
	}
	h.m.onLoop(func(*Loop) {}) // the iteration that handled it is over
	h.m.bounded()
}

// hear takes what has come, and keeps it.
func (h *hostile) hear() {
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Read(h.fd, buf)
		if n <= 0 || err != nil {
			return
		}
		h.dst = append(h.dst, buf[:n]...)
	}
}

func (h *hostile) close() {
	if h.fd >= 0 {
		unix.Close(h.fd)
		h.fd = -1
	}
}

// fuzzed is a stage that lives through many runs.
type fuzzed struct {
	*stage
	ck     *clock
	pod    *Pod
	v      *svc
	pool   *exchange.Pool
	closed int // clients' connections, on the loop
	hops   int // hops that have ended, on the loop
	hop    *Hop
	dials  []int // what the hop's next dials get, on the loop
}

// mostHeld is far above what runs of 4 KiB can make a pod hold, and far below what it may.
const mostHeld = 8 << 20

func (m *fuzzed) bounded() {
	m.t.Helper()
	m.onLoop(func(l *Loop) {
		if n := m.pod.share(l).held; n > mostHeld || n < 0 {
			m.t.Errorf("%d bytes held", n)
		}
	})
}

// ends waits until every request is done and what f says holds as well, and moves the clock meanwhile if time is to end it.
func (m *fuzzed) ends(what string, passes bool, f func() bool) {
	m.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; {
		var over bool
		m.onLoop(func(*Loop) { over = m.v.begun.Load() == m.v.done.Load() && f() })
		if over {
			m.onLoop(func(*Loop) {}) // the iteration is over, at whose end what it wrote has gone out
			return
		}
		if time.Now().After(end) {
			m.t.Fatalf("%s: %d requests begun, %d done", what, m.v.begun.Load(), m.v.done.Load())
		}
		if passes {
			m.ck.move(m.t, m.e, 7*time.Second)
		}
	}
}

// server plays a hostile client against a connection that is served.
func (m *fuzzed) server(pieces [][]byte, reads, silent bool) {
	theirs, h := m.socketpair()
	defer h.close()
	m.v.hop = nil
	before := 0
	m.onLoop(func(l *Loop) {
		before = m.closed
		info := &ConnInfo{Pod: m.pod, Loop: l, Pool: m.pool, OnClose: func(*ConnInfo) { m.closed++ }}
		if err := l.ServeHTTP2(theirs, nil, info, nil); err != nil {
			m.t.Fatal(err)
		}
	})
	for _, p := range pieces {
		h.say(p)
		if reads {
			h.hear()
		}
	}
	gone := func() bool { return m.closed == before+1 }
	if silent { // time alone ends it, unless it has a tunnel
		tunnels := false
		m.onLoop(func(l *Loop) {
			for s := range sourcesOf(l) {
				tunnels = tunnels || s.tunnels > 0
			}
		})
		if !tunnels {
			m.ends("a client that has fallen silent", true, gone)
		}
	}
	h.close()
	m.ends("a client that has gone", false, gone)
}

// client plays a hostile server against a hop session with some requests on it: they come from a
// client that does as it should, and each of them is answered or reset.
func (m *fuzzed) client(pieces [][]byte, reads, silent bool) {
	theirs, h := m.socketpair()
	defer h.close()
	front, c := m.socketpair()
	defer c.close()
	before := 0
	m.v.hop = func(l *Loop) *Hop {
		if m.hop == nil {
			m.hop = l.NewHop(m.pod, func(context.Context) (fd int, _ record.Conn, _ Bond, err error) {
				done := make(chan struct{})
				if l.Post(func() {
					defer close(done)
					if fd = -1; len(m.dials) > 0 {
						fd, m.dials = m.dials[0], m.dials[1:]
					}
				}) != nil {
					return -1, nil, nil, os.ErrClosed
				}
				<-done
				if fd < 0 {
					return -1, nil, nil, errors.New("no further session")
				}
				return fd, nil, lasts(time.Hour), nil
			}, func() { m.hop = nil; m.hops++ })
		}
		return m.hop
	}
	m.onLoop(func(l *Loop) {
		before = m.closed
		m.dials = append(m.dials[:0], theirs)
		info := &ConnInfo{Pod: m.pod, Loop: l, Pool: m.pool, OnClose: func(*ConnInfo) { m.closed++ }}
		if err := l.ServeHTTP2(front, nil, info, nil); err != nil {
			m.t.Fatal(err)
		}
	})
	const requests = 5
	c.say(m.ask(requests))
	eventually(m.t, "the session is there", func() (there bool) {
		m.onLoop(func(*Loop) { there = len(m.dials) == 0 })
		return
	})
	for _, p := range pieces {
		h.say(p)
		c.hear()
		if reads {
			h.hear()
		}
	}
	if !silent {
		h.close()
	}
	// What the hop owes is answered once it is gone, or time has run out, for a client that gives windows.
	tunnel := false
	m.onLoop(func(l *Loop) {
		for s := range sourcesOf(l) {
			tunnel = tunnel || s.tunnels > 0
		}
	})
	if !tunnel || !silent {
		m.ends("requests over the session", true, func() bool { return true })
	}
	h.close()
	m.ends("requests over a session that has gone", true, func() bool { return m.hop == nil })
	c.hear()
	if over := streamsOver(m.t, c.dst); over != requests {
		m.t.Errorf("%d of %d requests were answered or reset", over, requests)
	}
	c.close()
	m.ends("the client that has gone", false, func() bool { return m.closed == before+1 })
}

// ask is the preface of a client with big windows, and some requests.
func (m *fuzzed) ask(n int) []byte {
	var out, blk bytes.Buffer
	out.WriteString(oracle.ClientPreface)
	fr, enc := oracle.NewFramer(&out, nil), hpack.NewEncoder(&blk)
	_ = fr.WriteSettings(oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 1 << 24})
	_ = fr.WriteWindowUpdate(0, 1<<24)
	for i := range n {
		blk.Reset()
		method, protocol := "GET", ""
		switch i {
		case 1:
			method = "POST"
		case 2:
			method, protocol = "CONNECT", "foo"
		}
		_ = enc.WriteField(hpack.HeaderField{Name: ":method", Value: method})
		if protocol != "" {
			_ = enc.WriteField(hpack.HeaderField{Name: ":protocol", Value: protocol})
		}
		for _, f := range [][2]string{{":scheme", "http"}, {":path", "/on"}, {":authority", "a"}} {
			_ = enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
		}
		id := uint32(2*i + 1)
		_ = fr.WriteHeaders(oracle.HeadersFrameParam{StreamID: id, BlockFragment: blk.Bytes(), EndStream: method == "GET", EndHeaders: true})
		if method == "POST" {
			_ = fr.WriteData(id, true, make([]byte, 5000))
		}
	}
	return out.Bytes()
}

// streamsOver counts the streams whose end is in what a client received.
func streamsOver(t testing.TB, b []byte) int {
	fr := oracle.NewFramer(nil, bytes.NewReader(b))
	fr.SetMaxReadFrameSize(1 << 20)
	over := map[uint32]bool{}
	for {
		f, err := fr.ReadFrame()
		if err != nil {
			if err != io.EOF && err != io.ErrUnexpectedEOF {
				t.Errorf("what the client got is no HTTP/2: %v", err)
			}
			return len(over)
		}
		switch f := f.(type) {
		case *oracle.HeadersFrame:
			over[f.StreamID] = over[f.StreamID] || f.StreamEnded()
		case *oracle.DataFrame:
			over[f.StreamID] = over[f.StreamID] || f.StreamEnded()
		case *oracle.RSTStreamFrame:
			over[f.StreamID] = true
		}
		for id, yes := range over {
			if !yes {
				delete(over, id)
			}
		}
	}
}

// FuzzHTTP2 lets a hostile client, or a hostile server, say anything, cut anywhere, to a connection of
// the engine's: nothing panics, what the pod holds is bounded, every request ends exactly once, whoever did
// nothing wrong gets an answer to each, and nothing is left when the peer has gone, or time has.
func FuzzHTTP2(f *testing.F) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for how := range 16 {
		f.Add(append([]byte{byte(192 + how), 3}, "\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x04\x01\x00\x00\x00\x00"...))
		for range 16 {
			b := make([]byte, 2+rnd.IntN(300))
			for i := range b {
				b[i] = byte(rnd.Uint32())
			}
			b[0] = byte(how)
			b[1] |= byte(rnd.IntN(2)) * 255
			f.Add(b)
		}
	}
	m := &fuzzed{ck: newClock()}
	m.stage = newStage(f, Config{Now: m.ck.Now})
	m.alone = flag.Lookup("test.fuzz").Value.String() == "" // else the fuzzer's pipes to its workers come and go
	m.pod = m.e.AddPod("p")
	app := serveHTTP(f, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err == nil {
			w.Write(b)
		}
	}))
	m.v = &svc{pod: m.pod, to: app, silent: true}
	m.v.request = func(x *exchange.Exchange) bool { return string(x.Req.Path) != "/on" && local(x) }
	m.pool = &exchange.Pool{Service: m.v}
	f.Fuzz(func(t *testing.T, b []byte) {
		m.t = t
		if b = b[:min(len(b), 4096)]; len(b) < 2 {
			return
		}
		how, size := b[0], 1+int(b[1])*4
		b = b[2:]
		client, raw := how&1 == 0, how >= 192 // the hostile one is; what it says are frames, or anything
		if !raw {
			b = (&script{b}).frames(client)
		}
		var pieces [][]byte
		switch {
		case raw && how&16 == 0:
		case client:
			b = append([]byte(oracle.ClientPreface), b...)
		default: // SETTINGS: streams, tunnels among them, come once it has said what it takes
			pieces = append(pieces, []byte("\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x08\x00\x00\x00\x01"))
		}
		for len(b) > 0 {
			k := min(len(b), size)
			if len(pieces) > 16 {
				k = len(b)
			}
			pieces = append(pieces, b[:k])
			b = b[k:]
		}
		if client {
			m.server(pieces, how&4 != 0, how&8 != 0)
		} else {
			m.client(pieces, how&4 != 0, how&8 != 0)
		}
		m.onLoop(func(l *Loop) {
			if n := l.Stats().Panics; n > 0 {
				t.Fatalf("%d panics", n)
			}
		})
	})
}

// sourcesOf are the HTTP/2 connections on the loop.
func sourcesOf(l *Loop) func(func(*h2conn) bool) {
	return func(yield func(*h2conn) bool) {
		more := true
		l.Each(func(s reactor.Source) {
			if c, ok := s.(*h2conn); ok && more {
				more = yield(c)
			}
		})
	}
}
