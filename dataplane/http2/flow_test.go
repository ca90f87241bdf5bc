package http2

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"

	oracle "golang.org/x/net/http2"
)

// TestExchange: heads, bodies, trailers and interim heads, both ways.
func TestExchange(t *testing.T) {
	c, s, ch, sh := pair(t, Config{}, Config{EnableConnect: true})
	if !c.PeerAllowsConnect() || s.PeerAllowsConnect() {
		t.Error("PeerAllowsConnect")
	}
	st, err := c.Open()
	if err != nil {
		t.Fatal(err)
	}
	h := get("/up?x=1", "content-length", "5", "te", "trailers", "cookie", "a=1", "connection", "close", "host", "b",
		"keep-alive", "1", "upgrade", "h2c", "transfer-encoding", "chunked", "proxy-connection", "x", ":path", "/evil", "", "x")
	h.Method = []byte("PUT")
	st.WriteHead(h, false)
	st.WriteHead(get("/again"), true) // ignored
	if n := st.WriteData([]byte("hello"), false); n != 5 {
		t.Fatalf("WriteData took %d", n)
	}
	st.WriteTrailers(fields("x-sum", "1", "connection", "x"))
	st.WriteData([]byte("late"), true) // ignored
	settle(t, c, s)
	want := `1 head PUT http://cart.shop/up?x=1 len=5 content-length="5" te="trailers" cookie="a=1"` + "\n" +
		`1 data "hello"` + "\n" + `1 trailers x-sum="1"`
	if got := sh.take(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	r := sh.streams[1]
	r.WriteHead(respond(103, "link", "x"), true) // end does not go with 1xx
	r.WriteHead(respond(100), false)
	r.WriteHead(respond(201, "x", "y", "te", "gzip"), false)
	r.WriteHead(respond(500), true) // ignored
	r.WriteData([]byte("world"), false)
	r.WriteTrailers(fields("connection", "x")) // nothing is left of them
	settle(t, c, s)
	want = `1 head 103 len=0 link="x"` + "\n" + `1 head 100 len=0` + "\n" + `1 head 201 len=-1 x="y"` + "\n" +
		`1 data "world"` + "\n" + `1 end`
	if got := ch.take(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if c.Streams() != 0 || s.Streams() != 0 {
		t.Errorf("%d and %d streams open", c.Streams(), s.Streams())
	}
	if c.Stats() != (Stats{}) || s.Stats() != (Stats{}) {
		t.Errorf("%+v %+v", c.Stats(), s.Stats())
	}

	// An extended CONNECT, and what an empty Head becomes.
	st, _ = c.Open()
	st.WriteHead(&httpmsg.Head{Method: []byte("CONNECT"), Scheme: []byte("https"), Authority: []byte("a"), Path: []byte("/ws"), Upgrade: []byte("websocket")}, false)
	st, _ = c.Open()
	st.WriteHead(&httpmsg.Head{Method: []byte("CONNECT"), Scheme: []byte("https"), Authority: []byte("a:443"), Path: []byte("/ws")}, false)
	st, _ = c.Open()
	st.WriteHead(&httpmsg.Head{Method: []byte("POST"), Scheme: []byte("grpc"), Authority: []byte("a")}, true)
	settle(t, c, s)
	want = "3 head CONNECT https://a/ws upgrade=websocket len=-1\n5 head CONNECT ://a:443 len=-1\n7 head POST grpc://a/ len=0 end"
	if got := sh.take(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	sh.streams[3].WriteHead(respond(0), true) // no status
	settle(t, c, s)
	if got := ch.take(); got != "3 reset INTERNAL_ERROR" {
		t.Error(got)
	}
}

// TestStatuses: each status there is survives the way.
func TestStatuses(t *testing.T) {
	c, s, ch, sh := pair(t, Config{}, Config{})
	for status := 200; status <= 999; status++ {
		sh.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) { s.WriteHead(respond(status), true) }
		st, err := c.Open()
		if err != nil {
			t.Fatal(err)
		}
		st.WriteHead(get("/"), true)
		settle(t, c, s)
		if got, want := ch.take(), fmt.Sprintf("%d head %d len=0 end", st.ID(), status); got != want {
			t.Fatalf("%s, want %s", got, want)
		}
		sh.take()
	}
}

// TestLongHeads are cut into frames and put together again.
func TestLongHeads(t *testing.T) {
	for _, n := range []int{16000, 16300, 16370, 16384, 16400, 32768 - 30, 32768, 50000} {
		c, s, ch, sh := pair(t, Config{MaxHeader: 1 << 20}, Config{MaxHeader: 1 << 20})
		v := strings.Repeat("0123456789", n/10+1)[:n]
		st, _ := c.Open()
		st.WriteHead(get("/", "x", v), true)
		move(t, c, s)
		if got, want := sh.take(), fmt.Sprintf(`1 head GET http://cart.shop/ len=0 x="%s" end`, v); got != want {
			t.Errorf("%d: got %.80q, want %.80q", n, got, want)
		}
		sh.streams[1].WriteHead(respond(200, "y", v), false)
		sh.streams[1].WriteTrailers(fields("z", v, "last", "1"))
		move(t, s, c)
		if got, want := ch.take(), fmt.Sprintf("1 head 200 len=-1 y=%q\n1 trailers z=%q last=\"1\"", v, v); got != want {
			t.Errorf("%d: got %.80q, want %.80q", n, got, want)
		}
	}
	// As x/net sees it.
	w := server(t)
	w.head(1, true, getRoot...)
	w.feed()
	w.h.streams[1].WriteHead(respond(200, "y", strings.Repeat("v", 40000)), true)
	w.sends("HEADERS 1 2 fields end in 3 frames")
}

// TestSendWindows: WriteData keeps to both windows and the bound on queued
// output, and OnWritable comes when there is room, in rotation.
func TestSendWindows(t *testing.T) {
	w := newWire(t, Config{Server: true}, oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 100})
	for id := uint32(1); id <= 5; id += 2 {
		w.head(id, true, getRoot...)
	}
	w.feed()
	w.h.take()
	s1, s3, s5 := w.h.streams[1], w.h.streams[3], w.h.streams[5]
	if s1.Window() != 0 || s1.WriteData([]byte("x"), true) != 0 {
		t.Error("data before the head")
	}
	for _, s := range []*Stream{s1, s3, s5} {
		s.WriteHead(respond(200), false)
	}
	big := make([]byte, 1<<20)
	if n := s1.Window(); n != 100 {
		t.Errorf("window %d", n)
	}
	if n := s1.WriteData(big, true); n != 100 {
		t.Errorf("took %d", n)
	}
	w.sends("HEADERS 1 :status=200\nHEADERS 3 :status=200\nHEADERS 5 :status=200\nDATA 1 100")

	w.WriteSettings(oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 50}) // stream 1 is at -50
	w.WriteWindowUpdate(1, 50)
	w.want("", "")
	w.WriteWindowUpdate(1, 1)
	w.want("1 writable", "")
	w.sends("SETTINGS ack=true")
	w.WriteWindowUpdate(1, 9)
	w.want("", "") // told once
	if n := s1.WriteData(big, true); n != 10 {
		t.Errorf("took %d", n)
	}
	w.sends("DATA 1 10")
	w.WriteSettings(oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 1 << 30})
	w.want("1 writable", "")
	w.sends("SETTINGS ack=true")

	// Now only the connection holds back: 65535-110.
	total := 0
	for n := 1; n > 0; total += n {
		n = s1.WriteData(big, false)
		w.frames()
	}
	if total != 65535-110 {
		t.Errorf("took %d of the connection's window", total)
	}
	s3.WriteData(big, false)
	s5.WriteData(big, true)
	var order []uint32
	w.h.onWrite = func(s *Stream) {
		order = append(order, s.ID())
		s.WriteData(big[:1000], false)
		s.WriteData(big, false)
	}
	for range 7 {
		w.WriteWindowUpdate(0, 500)
	}
	w.feed()
	if got := fmt.Sprint(order); got != "[1 3 5 1 3 5 1]" {
		t.Errorf("writable in the order %s", got)
	}
	w.frames()

	// A reset or ended stream leaves the queue.
	s3.Reset(Cancel)
	order = nil
	w.WriteWindowUpdate(0, 500)
	w.WriteWindowUpdate(0, 500)
	w.feed()
	if got := fmt.Sprint(order); got != "[5 1]" {
		t.Errorf("writable in the order %s", got)
	}
	w.frames()

	// The bound on queued output.
	w.WriteWindowUpdate(0, 1<<30)
	w.h.onWrite = nil
	w.feed()
	w.h.take()
	w.frames()
	n := s1.WriteData(big, false)
	if n != maxQueued {
		t.Errorf("queued %d", n)
	}
	if s5.WriteData(big, false) != 0 || s5.Window() != 0 {
		t.Error("queued beyond the bound")
	}
	w.WriteWindowUpdate(5, 1) // has stream window, but no room
	w.want("", "")
	w.c.Sent(maxQueued / 3)
	if got := w.h.take(); got != "" {
		t.Errorf("woken early: %s", got)
	}
	w.c.Sent(maxQueued / 3)
	if got := w.h.take(); got != "1 writable\n5 writable" {
		t.Errorf("got %q", got)
	}
}

// TestReceiveWindows (case 60): credit is given back in halves of a window, padding and
// skipped DATA at once, and nothing leaks.
func TestReceiveWindows(t *testing.T) {
	w := newWire(t, Config{Server: true, StreamWindow: 70000, ConnWindow: 100000})
	for _, id := range []uint32{1, 3, 5} {
		w.head(id, false, postRoot...)
	}
	part := make([]byte, 10000)
	for range 7 {
		w.WriteData(1, false, part)
	}
	w.feed()
	w.sends("")
	s1 := w.h.streams[1]
	s1.Credit(34999)
	w.sends("")
	s1.Credit(1)
	w.sends("WINDOW_UPDATE 1 35000")
	s1.Credit(1 << 30) // no more than was received
	s1.Credit(1)
	s1.Credit(-1)
	w.sends("WINDOW_UPDATE 0 70000\nWINDOW_UPDATE 1 35000")
	balanced(t, w.c)

	// Padding: 200 of 210 bytes are given back by themselves.
	for range 300 {
		w.WriteDataPadded(3, false, part[:10], make([]byte, 199))
	}
	w.feed()
	w.sends("WINDOW_UPDATE 3 35000\nWINDOW_UPDATE 0 50000")
	balanced(t, w.c)

	// A reset stream's DATA returns what it held, and what still comes, padding too.
	w.WriteData(5, false, part)
	w.feed()
	w.h.streams[5].Reset(Cancel)
	balanced(t, w.c)
	for range 500 {
		w.WriteDataPadded(5, false, part[:1000], make([]byte, 100))
		if code := w.feed(); code != "" {
			t.Fatal(code)
		}
		balanced(t, w.c)
	}
	w.frames()
	w.h.streams[5].Credit(10000) // already done
	balanced(t, w.c)

	// A stream that ends well holds its bytes until they are credited or it is reaped.
	w.h.take()
	w.head(7, false, postRoot...)
	w.WriteData(7, true, part)
	w.feed()
	s7 := w.h.streams[7]
	s7.WriteHead(respond(200), true)
	balanced(t, w.c)
	before := w.c.credit
	s7.Credit(4000)
	if w.c.credit != before+4000 {
		t.Error("credit after the end is lost")
	}
	w.c.Reap()
	if w.c.credit != before+10000 {
		t.Error("Reap credits not what was held")
	}
	balanced(t, w.c)

	// Beyond the connection's window.
	w = newWire(t, Config{Server: true, ConnWindow: 65535})
	w.head(1, false, postRoot...)
	for range 6 {
		w.WriteData(1, false, part)
	}
	w.WriteData(1, false, part[:5535])
	if code := w.feed(); code != "" {
		t.Fatal(code)
	}
	w.WriteData(1, false, part[:1])
	if code := w.feed(); code != "FLOW_CONTROL_ERROR" {
		t.Errorf("%q", code)
	}
}

// TestSmallWindow: until it acknowledges our SETTINGS the peer may use the
// protocol's default.
func TestSmallWindow(t *testing.T) {
	w := rawWire(t, Config{Server: true, StreamWindow: 1000})
	w.in.WriteString(clientPreface)
	w.WriteSettings()
	w.head(1, false, postRoot...)
	w.WriteData(1, false, make([]byte, 900))
	w.WriteData(1, false, make([]byte, 900))
	w.WriteSettingsAck() // stream 1 is at -800
	w.want("1 head POST http://a/ len=-1\n1 data 1800 bytes 00000000", "")
	w.head(3, false, postRoot...)
	w.WriteData(3, false, make([]byte, 1001))
	w.want("3 head POST http://a/ len=-1\n3 reset FLOW_CONTROL_ERROR", "")
	w.h.streams[1].Credit(1800)
	w.WriteData(1, false, make([]byte, 1000))
	w.want("1 data 1000 bytes 00000000", "")
}

func TestStreamLimits(t *testing.T) {
	w := newWire(t, Config{Server: true, MaxStreams: 2})
	for id := uint32(1); id <= 5; id += 2 {
		w.head(id, false, postRoot...)
	}
	w.WriteData(5, true, make([]byte, 10))
	w.want("1 head POST http://a/ len=-1\n3 head POST http://a/ len=-1", "")
	w.sends("RST_STREAM 5 REFUSED_STREAM")
	balanced(t, w.c)
	w.WriteRSTStream(1, oracle.ErrCodeCancel)
	w.head(7, true, getRoot...)
	w.want("1 reset CANCEL\n7 head GET http://a/ len=0 end", "")
	if got := w.c.Stats(); got.Refused != 1 || got.PeerResets != 1 {
		t.Errorf("%+v", got)
	}

	// A client keeps to the peer's limit, and to 100 before it knows it.
	c := New(Config{}, new(recorder))
	if n := c.Available(); n != 100 {
		t.Errorf("%d available before SETTINGS", n)
	}
	w = newWire(t, Config{MaxStreams: 150})
	if n := w.c.Available(); n != 150 {
		t.Errorf("%d available without a limit of the peer", n)
	}
	w = newWire(t, Config{MaxStreams: 50}, oracle.Setting{ID: oracle.SettingMaxConcurrentStreams, Val: 3})
	var open []*Stream
	for range 3 {
		s, err := w.c.Open()
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, s)
		s.WriteHead(get("/"), true)
	}
	if _, err := w.c.Open(); !errors.Is(err, ErrTooManyStreams) || w.c.Available() != 0 {
		t.Errorf("%v, %d available", err, w.c.Available())
	}
	w.WriteSettings(oracle.Setting{ID: oracle.SettingMaxConcurrentStreams, Val: 1})
	w.want("", "")
	if w.c.Available() != 0 {
		t.Errorf("%d available", w.c.Available())
	}
	for _, s := range open {
		s.Reset(Cancel)
	}
	if w.c.Available() != 1 {
		t.Errorf("%d available", w.c.Available())
	}
	if _, err := server(t).c.Open(); err == nil {
		t.Error("a server opened a stream")
	}
}

// TestOrder: streams opened and begun in different orders get ascending
// identifiers (RFC 9113 5.1.1), and one that never begins says nothing.
func TestOrder(t *testing.T) {
	c, s, _, sh := pair(t, Config{}, Config{})
	a, _ := c.Open()
	b, _ := c.Open()
	d, _ := c.Open()
	b.WriteHead(get("/b"), true)
	a.WriteHead(get("/a"), true)
	d.Reset(Cancel)
	settle(t, c, s)
	want := "3 head GET http://cart.shop/b len=0 end\n7 head GET http://cart.shop/a len=0 end"
	if got := sh.take(); got != want || a.ID() != 7 || c.Streams() != 2 {
		t.Errorf("%s; %d, %d", got, a.ID(), c.Streams())
	}
	sh.streams[7].WriteHead(respond(200), true)
	settle(t, c, s)
	if c.Streams() != 1 {
		t.Errorf("%d streams", c.Streams())
	}
}

func TestStreamIDsRunOut(t *testing.T) {
	w := newWire(t, Config{})
	w.c.nextID = maxStreamID - 2
	if n := w.c.Available(); n != 2 {
		t.Errorf("%d available", n)
	}
	a, _ := w.c.Open()
	b, _ := w.c.Open()
	if _, err := w.c.Open(); !errors.Is(err, ErrStreamIDs) || w.c.Available() != 0 {
		t.Errorf("%v", err)
	}
	b.WriteHead(get("/"), true)
	a.WriteHead(get("/"), true) // would need another identifier
	if got := w.h.take(); !strings.HasSuffix(got, "reset REFUSED_STREAM") || w.c.Streams() != 1 {
		t.Errorf("%q, %d streams", got, w.c.Streams())
	}
}

func TestShutdown(t *testing.T) {
	w := server(t)
	w.head(1, false, postRoot...)
	w.head(3, true, getRoot...)
	w.feed()
	w.c.Shutdown(InternalError)
	w.c.Shutdown(NoError)
	w.sends("GOAWAY 3 INTERNAL_ERROR")
	w.head(5, false, postRoot...)
	w.WriteData(5, true, []byte("x"))
	w.h.take()
	w.want("", "")
	w.sends("RST_STREAM 5 REFUSED_STREAM")
	w.WriteData(1, true, []byte("y")) // the others go on
	w.want("1 data \"y\"\n1 end", "")
	for _, id := range []uint32{1, 3} {
		w.h.streams[id].WriteHead(respond(204), true)
	}
	w.sends("HEADERS 1 :status=204 end\nHEADERS 3 :status=204 end")
	balanced(t, w.c)
	if !w.c.Done() {
		t.Error("not done with no stream left")
	}
	w.WritePing(true, [8]byte{}) // an error after it names the same stream
	w.WriteWindowUpdate(0, 0)
	w.want("", "PROTOCOL_ERROR")
	w.sends("GOAWAY 3 PROTOCOL_ERROR")

	w = newWire(t, Config{})
	w.c.Shutdown(NoError)
	w.sends("GOAWAY 0 NO_ERROR")
	if _, err := w.c.Open(); !errors.Is(err, ErrGoAway) || w.c.Available() != 0 {
		t.Error(err)
	}
}

// TestGracefulShutdown: a request that was under way when the server began to
// shut down is served, as one is that comes behind the PING's answer; none is after the second call.
func TestGracefulShutdown(t *testing.T) {
	begin := func() *wire {
		w := server(t)
		w.head(1, true, getRoot...)
		w.feed()
		w.c.Ping() // somebody else's
		w.c.Shutdown(NoError)
		w.sends("PING 0000000000000001 ack=false\nGOAWAY 2147483647 NO_ERROR\nPING 0000000000000002 ack=false")
		w.h.take()
		w.head(3, true, getRoot...) // under way
		w.WritePing(true, [8]byte{7: 1})
		w.want("3 head GET http://a/ len=0 end", "")
		w.sends("")
		if w.c.Done() || w.c.Warned() {
			t.Error("done with two streams open, or warned before the answer to its own PING")
		}
		return w
	}
	w := begin()
	w.WritePing(true, [8]byte{7: 2})
	w.head(5, true, getRoot...) // begun before the client knew
	w.want("5 head GET http://a/ len=0 end", "")
	w.sends("")
	if !w.c.Warned() {
		t.Error("not warned with the PING answered")
	}
	w.c.Shutdown(NoError)
	w.sends("GOAWAY 5 NO_ERROR")
	if w.c.Warned() {
		t.Error("the last stream is named, and it asks for more")
	}
	w.head(7, true, getRoot...)
	w.want("", "")
	w.sends("RST_STREAM 7 REFUSED_STREAM")
	w.c.Shutdown(NoError)
	w.sends("")
	w.h.streams[1].WriteHead(respond(204), true)
	w.h.streams[3].WriteHead(respond(204), true)
	if w.c.Done() {
		t.Error("done with a stream open")
	}
	w.h.streams[5].WriteHead(respond(204), true)
	w.sends("HEADERS 1 :status=204 end\nHEADERS 3 :status=204 end\nHEADERS 5 :status=204 end")
	if !w.c.Done() {
		t.Error("not done with no stream left")
	}

	// A client that does not answer the PING: the second call is the last word.
	w = begin()
	w.c.Shutdown(NoError)
	w.sends("GOAWAY 3 NO_ERROR")
	w.WritePing(true, [8]byte{7: 2})
	w.want("", "")
	w.sends("")

	// An error meanwhile names the last stream.
	w = begin()
	w.WriteWindowUpdate(0, 0)
	w.want("1 reset PROTOCOL_ERROR\n3 reset PROTOCOL_ERROR", "PROTOCOL_ERROR")
	w.sends("GOAWAY 3 PROTOCOL_ERROR")
}

// TestPeerGoAway (cases 61, 67): streams above the last are refused (and may be retried), the
// others finish, new ones are not begun.
func TestPeerGoAway(t *testing.T) {
	w := newWire(t, Config{})
	for range 5 {
		s, _ := w.c.Open()
		s.WriteHead(get("/"), true)
	}
	waiting, _ := w.c.Open()
	// Resetting one about to be told is safe, and then it is not told.
	w.h.onReset = func(s *Stream, _ Code) {
		if s.ID() == 5 {
			w.c.table.get(1).Reset(Cancel)
			for _, o := range w.c.ended {
				if o.ID() == 9 {
					o.Reset(Cancel)
				}
			}
		}
	}
	w.WriteGoAway(3, oracle.ErrCodeNo, nil)
	w.want("0 goaway 3 NO_ERROR\n5 reset REFUSED_STREAM\n7 reset REFUSED_STREAM\n11 reset REFUSED_STREAM", "")
	waiting.WriteHead(get("/"), true) // over
	if _, err := w.c.Open(); !errors.Is(err, ErrGoAway) || w.c.Available() != 0 {
		t.Error(err)
	}
	w.head(3, true, ":status", "200")
	w.want("3 head 200 len=0 end", "")
	w.WriteGoAway(7, oracle.ErrCodeProtocol, []byte("debug")) // must not rise
	w.want("0 goaway 3 PROTOCOL_ERROR", "")

	// A server's streams go on.
	w = server(t)
	w.head(1, true, getRoot...)
	w.WriteGoAway(0, oracle.ErrCodeNo, nil)
	w.want("1 head GET http://a/ len=0 end\n0 goaway 0 NO_ERROR", "")
	w.h.streams[1].WriteHead(respond(200), true)
	w.sends("HEADERS 1 :status=200 end")
}

func TestAbort(t *testing.T) {
	w := server(t)
	w.head(1, false, postRoot...)
	w.head(3, false, postRoot...)
	w.feed()
	w.h.take()
	w.h.streams[1].WriteHead(respond(200), false)
	w.c.Abort(ConnectError)
	w.c.Abort(Cancel)
	if got := w.h.take(); got != "1 reset CONNECT_ERROR\n3 reset CONNECT_ERROR" {
		t.Error(got)
	}
	s := w.h.streams[1]
	s.WriteHead(respond(200), true)
	s.WriteData([]byte("x"), true)
	s.WriteTrailers(nil)
	s.Reset(Cancel)
	s.Credit(5)
	w.c.Shutdown(NoError)
	w.c.Ping()
	w.c.Reap()
	w.c.Idle()
	w.sends("")
	w.WritePing(false, [8]byte{})
	w.want("", "CONNECT_ERROR")
}

func TestPing(t *testing.T) {
	c, s, _, _ := pair(t, Config{}, Config{})
	c.Ping()
	c.Ping()
	if c.Pongs() != 0 {
		t.Error("answered already")
	}
	settle(t, c, s)
	if c.Pongs() != 2 {
		t.Errorf("%d answers", c.Pongs())
	}
	w := server(t)
	w.WritePing(false, [8]byte{1, 2, 3, 4, 5, 6, 7, 8})
	w.WritePing(true, [8]byte{9}) // an answer to nothing
	w.want("", "")
	w.sends("PING 0102030405060708 ack=true")
	if w.c.Pongs() != 0 {
		t.Error("counted an answer to nothing")
	}
}

// TestIgnored frames.
func TestIgnored(t *testing.T) {
	w := server(t)
	w.WriteRawFrame(0xee, 0xff, 77, make([]byte, 100))
	w.WritePriority(1, oracle.PriorityParam{StreamDep: 1})
	w.WritePriority(99, oracle.PriorityParam{})
	w.WriteSettings(oracle.Setting{ID: 0x99, Val: 1}, oracle.Setting{ID: oracle.SettingEnablePush, Val: 1})
	w.WriteHeaders(oracle.HeadersFrameParam{StreamID: 1, BlockFragment: w.fields(getRoot...), EndStream: true, EndHeaders: true,
		PadLength: 10, Priority: oracle.PriorityParam{StreamDep: 3, Weight: 5}})
	w.WriteContinuation(1, true, nil)
	b := w.in.Bytes()
	w.in.Truncate(len(b) - frameHeader) // without the CONTINUATION
	w.want("1 head GET http://a/ len=0 end", "")
	w.sends("SETTINGS ack=true")
}

// TestReentrant: commands on any stream inside any event.
func TestReentrant(t *testing.T) {
	for _, event := range []string{"head", "data", "trailers", "reset", "writable"} {
		for _, victim := range []uint32{1, 3} {
			t.Run(fmt.Sprint(event, " resets ", victim), func(t *testing.T) {
				w := newWire(t, Config{Server: true}, oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 10})
				w.head(1, false, postRoot...)
				w.WriteData(1, false, []byte("abc"))
				w.feed()
				w.h.streams[1].WriteHead(respond(200), false)
				w.h.streams[1].WriteData(make([]byte, 20), true)
				act := func(s *Stream) {
					if s.ID() != 3 {
						return
					}
					v := w.h.streams[victim]
					v.Reset(Cancel)
					v.Reset(Cancel)
					v.WriteHead(respond(200), true)
					v.WriteData([]byte("x"), true)
					v.Credit(3)
				}
				switch event {
				case "head":
					w.h.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) { act(s) }
				case "data":
					w.h.onData = func(s *Stream, _ []byte, _ bool) { act(s) }
				case "trailers":
					w.h.onTrail = func(s *Stream, _ []httpmsg.Field) { act(s) }
				case "reset":
					w.h.onReset = func(s *Stream, _ Code) { act(s) }
				case "writable":
					w.h.onWrite = act
				}
				w.head(3, false, postRoot...)
				w.feed()
				w.h.streams[3].WriteHead(respond(200), false)
				w.h.streams[3].WriteData(make([]byte, 20), true)
				w.WriteData(3, false, []byte("body"))
				w.WriteSettings(oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 100})
				switch event {
				case "reset":
					w.WriteRSTStream(3, oracle.ErrCodeCancel)
				case "trailers":
					w.head(3, true, "x", "y")
				}
				if code := w.feed(); code != "" {
					t.Fatal(code)
				}
				if w.h.streams[victim].life == alive {
					t.Error("not reset")
				}
				w.c.Reap()
				balanced(t, w.c)
				got := w.h.take()
				if strings.Contains(got, fmt.Sprint(victim, " reset")) != (event == "reset" && victim == 3) {
					t.Errorf("an event of a stream we reset:\n%s", got)
				}
			})
		}
	}
	// Inside OnReset of a failing connection.
	w := server(t)
	w.head(1, false, postRoot...)
	w.head(3, false, postRoot...)
	w.feed()
	w.h.take()
	w.h.onReset = func(s *Stream, _ Code) {
		for _, o := range w.h.streams {
			o.Reset(Cancel)
		}
		s.WriteHead(respond(500), true)
		w.c.Shutdown(NoError)
	}
	w.WriteWindowUpdate(0, 0)
	w.want("1 reset PROTOCOL_ERROR", "PROTOCOL_ERROR")
	w.sends("GOAWAY 3 PROTOCOL_ERROR")
}

// TestResetInMidFrame: a stream reset while its DATA frame arrives, its object
// taken by another stream: the rest of the frame reaches neither.
func TestResetInMidFrame(t *testing.T) {
	w := server(t)
	w.head(1, false, postRoot...)
	w.WriteDataPadded(1, true, []byte("first second"), make([]byte, 20))
	w.feed2(t, w.in.Len()-27) // behind "first"
	w.h.streams[1].Reset(Cancel)
	balanced(t, w.c)
	w.c.Reap()
	w.head(3, false, postRoot...)
	w.want("1 head POST http://a/ len=-1\n1 data \"first\"\n3 head POST http://a/ len=-1", "")
	balanced(t, w.c)
	if w.h.streams[1] != w.h.streams[3] {
		t.Error("the object was not reused")
	}
}

// feed2 feeds the first n bytes of what was written.
func (w *wire) feed2(t *testing.T, n int) {
	t.Helper()
	if m, err := w.c.Feed(w.in.Next(n)); m != n || err != nil {
		t.Fatalf("%d %v", m, err)
	}
}

// TestLateFrames: frames under way when the client resets many streams at
// once cost nothing.
func TestLateFrames(t *testing.T) {
	w := newWire(t, Config{})
	var all []*Stream
	for range 500 {
		s, _ := w.c.Open()
		s.WriteHead(get("/"), true)
		all = append(all, s)
	}
	for _, s := range all {
		s.Reset(Cancel)
	}
	w.frames()
	w.c.Reap()
	for id := uint32(1); id < 1000; id += 2 {
		w.head(id, false, ":status", "200", "x", fmt.Sprint(id))
		w.WriteData(id, false, make([]byte, 4000))
		w.head(id, true, "grpc-status", "0")
	}
	w.want("", "")
	for _, line := range strings.Split(w.frames(), "\n") {
		if !strings.HasPrefix(line, "WINDOW_UPDATE 0 ") {
			t.Errorf("sends %s", line)
		}
	}
	balanced(t, w.c)

	// The same at a server.
	w = server(t)
	w.h.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) { s.Reset(RefusedStream) }
	for id := uint32(1); id < 400; id += 2 {
		w.head(id, false, postRoot...)
	}
	w.feed()
	for id := uint32(1); id < 400; id += 2 {
		w.WriteData(id, false, make([]byte, 10))
		w.head(id, true, "x", "y")
	}
	w.h.take()
	w.frames()
	w.want("", "")
	w.sends("")
	balanced(t, w.c)
}

// TestMemory: what a Conn holds is bounded, and Idle gives it back.
func TestMemory(t *testing.T) {
	c, s, _, sh := pair(t, Config{}, Config{})
	sh.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) { s.WriteHead(respond(200), true) }
	var open []*Stream
	for c.Available() > 0 {
		st, _ := c.Open()
		open = append(open, st)
		st.WriteHead(get("/", "cookie", strings.Repeat("c", 4000), "cookie", "b=1"), false)
		st.WriteData(make([]byte, 1000), false)
		settle(t, c, s)
	}
	s.Idle() // does nothing while streams are open
	for _, st := range open {
		st.WriteData(make([]byte, 1000), true)
		settle(t, c, s)
	}
	held := func(c *Conn) int {
		return cap(c.out) + cap(c.cont) + cap(c.cookie) + 56*cap(c.fields) + 48*cap(c.head.Fields) + 160*cap(c.free) + 16*len(c.table.slots)
	}
	if n := held(s); n > 1<<20 {
		t.Errorf("%d bytes while busy", n)
	}
	for _, c := range []*Conn{c, s} {
		if c.Streams() != 0 {
			t.Fatalf("%d streams", c.Streams())
		}
		c.Reap()
		c.Sent(len(c.Out())) // the other's windows matter no more
		c.Idle()
		if n := held(c); n != 0 {
			t.Errorf("%d bytes while idle", n)
		}
	}
	// A driver that never reaps.
	c, s, _, sh = pair(t, Config{}, Config{})
	sh.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) { s.WriteHead(respond(200), true) }
	for range 3 * maxEnded {
		st, err := c.Open()
		if err != nil {
			t.Fatal(err)
		}
		st.WriteHead(get("/"), true)
		move(t, c, s)
		move(t, s, c)
		if len(sh.log) > 1000 {
			sh.log, sh.streams = nil, nil
		}
	}
	if len(s.ended) != maxEnded || cap(s.ended) > 2*maxEnded {
		t.Errorf("%d streams kept, room for %d", len(s.ended), cap(s.ended))
	}
	balanced(t, s)
	s.Reap()
	balanced(t, s)
}

// bulk moves data one way as fast as windows allow.
type bulk struct {
	chunk     []byte
	sent, got int
	total     int
}

func (b *bulk) OnHead(s *Stream, h *httpmsg.Head, end bool) {
	if h.Status == 0 {
		s.WriteHead(&httpmsg.Head{Status: 200}, true)
	}
}
func (b *bulk) OnData(s *Stream, p []byte, end bool)    { b.got += len(p); s.Credit(len(p)) }
func (b *bulk) OnTrailers(s *Stream, f []httpmsg.Field) {}
func (b *bulk) OnReset(s *Stream, code Code)            {}
func (b *bulk) OnRefused(int, *StreamError)             {}
func (b *bulk) OnGoAway(last uint32, code Code)         {}
func (b *bulk) OnWritable(s *Stream) {
	for b.sent < b.total {
		p := b.chunk[:min(len(b.chunk), b.total-b.sent)]
		n := s.WriteData(p, len(p) == b.total-b.sent)
		b.sent += n
		if n < len(p) {
			return
		}
	}
}

func newBulk(t testing.TB) func() *bulk {
	b := &bulk{chunk: make([]byte, 32<<10), total: 4 << 20}
	for i := range b.chunk {
		b.chunk[i] = byte(i)
	}
	c, s := New(Config{}, b), New(Config{Server: true}, b)
	settle(t, c, s)
	head := &httpmsg.Head{Method: []byte("POST"), Authority: []byte("a")}
	trailers := fields("grpc-status", "0")
	return func() *bulk {
		b.sent, b.got = 0, 0
		st, err := c.Open()
		if err != nil {
			t.Fatal(err)
		}
		st.WriteHead(head, false)
		b.OnWritable(st)
		settle(t, c, s)
		st, _ = c.Open()
		st.WriteHead(head, false)
		st.WriteTrailers(trailers)
		settle(t, c, s)
		c.Reap()
		s.Reap()
		return b
	}
}

func TestBulkAllocs(t *testing.T) {
	run := newBulk(t)
	run()
	if b := run(); b.got != b.total || b.sent != b.total {
		t.Fatalf("%d sent, %d received of %d", b.sent, b.got, b.total)
	}
	if n := testing.AllocsPerRun(10, func() { run() }); n != 0 {
		t.Errorf("%v allocations for 4 MiB and trailers, want 0", n)
	}
}

// BenchmarkBulk moves 4 MiB in one stream, both ends.
func BenchmarkBulk(b *testing.B) {
	run := newBulk(b)
	b.SetBytes(4 << 20)
	b.ReportAllocs()
	for b.Loop() {
		run()
	}
}

func TestCodeString(t *testing.T) {
	for c := range Code(14) {
		if got, want := c.String(), oracle.ErrCode(c).String(); got != want {
			t.Errorf("%d: %s, want %s", c, got, want)
		}
	}
	if got := Code(0x1234).String(); got != "error code 0x1234" {
		t.Error(got)
	}
	err := &ConnError{FlowControlError, "too much"}
	if !bytes.Contains([]byte(err.Error()), []byte("FLOW_CONTROL_ERROR: too much")) {
		t.Error(err)
	}
}
