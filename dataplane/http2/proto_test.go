package http2

import (
	"fmt"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"

	oracle "golang.org/x/net/http2"
)

func server(t testing.TB) *wire { return newWire(t, Config{Server: true}) }

func TestPreface(t *testing.T) {
	w := rawWire(t, Config{Server: true, EnableConnect: true})
	w.sends("SETTINGS ack=false 4=262144 6=61440 3=1000 8=1\nWINDOW_UPDATE 0 2031617")
	w.in.WriteString(clientPreface)
	w.WriteSettings()
	w.want("", "")
	w.sends("SETTINGS ack=true")

	w = rawWire(t, Config{})
	if !strings.HasPrefix(string(w.c.Out()), clientPreface) {
		t.Error("a client does not begin with the preface")
	}
	w.sends("SETTINGS ack=false 4=262144 6=61440 2=0\nWINDOW_UPDATE 0 2031617")

	for _, in := range []string{"GET / HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nXX", "Q"} {
		w := rawWire(t, Config{Server: true})
		w.in.WriteString(in)
		w.want("", "PROTOCOL_ERROR")
	}
	for _, server := range []bool{true, false} { // SETTINGS come first
		w := rawWire(t, Config{Server: server})
		if server {
			w.in.WriteString(clientPreface)
		}
		w.WritePing(false, [8]byte{})
		w.want("", "PROTOCOL_ERROR")
	}
}

// TestConnErrors: what costs the connection. Stream 1 is open and its request
// still coming, stream 3 is half-closed (remote), 5 ended well, 7 was reset by
// the client, 9 by us.
func TestConnErrors(t *testing.T) {
	open := func(t *testing.T) *wire {
		w := server(t)
		for id := uint32(1); id <= 9; id += 2 {
			w.head(id, id == 3 || id == 5, postRoot...)
		}
		w.feed()
		w.h.streams[5].WriteHead(respond(200), true)
		w.WriteRSTStream(7, oracle.ErrCodeCancel)
		w.feed()
		w.h.streams[9].Reset(Cancel)
		w.frames()
		w.h.take()
		return w
	}
	resets := func(code Code) string { return "1 reset " + code.String() + "\n3 reset " + code.String() }
	for _, tt := range []struct {
		name  string
		write func(w *wire)
		code  Code
	}{
		{"frame too long", func(w *wire) { w.WriteRawFrame(oracle.FrameData, 0, 1, make([]byte, maxFrame+1)) }, FrameSizeError},
		{"unknown frame too long", func(w *wire) { w.WriteRawFrame(0xee, 0, 0, make([]byte, maxFrame+1)) }, FrameSizeError},
		{"DATA on stream 0", func(w *wire) { w.WriteData(0, false, []byte("x")) }, ProtocolError},
		{"DATA on an idle stream", func(w *wire) { w.WriteData(11, false, []byte("x")) }, ProtocolError},
		{"DATA on an even stream", func(w *wire) { w.WriteData(2, false, []byte("x")) }, ProtocolError},
		{"DATA padded without a length", func(w *wire) { w.WriteRawFrame(oracle.FrameData, flagPadded, 1, nil) }, FrameSizeError},
		{"DATA padded beyond its end", func(w *wire) { w.WriteRawFrame(oracle.FrameData, flagPadded, 1, []byte{5, 1, 2, 3, 4}) }, ProtocolError},
		{"HEADERS on stream 0", func(w *wire) { w.head(0, true, getRoot...) }, ProtocolError},
		{"HEADERS on an even stream", func(w *wire) { w.head(12, true, getRoot...) }, ProtocolError},
		{"HEADERS on a lower stream, never used", func(w *wire) {
			w.head(21, true, getRoot...)
			w.feed()
			w.h.streams[21].Reset(Cancel)
			w.h.take()
			w.head(13, true, getRoot...)
		}, ProtocolError},
		{"HEADERS on a stream that ended", func(w *wire) { w.head(5, true, getRoot...) }, StreamClosed},
		{"HEADERS on a stream it reset", func(w *wire) { w.head(7, true, getRoot...) }, StreamClosed},
		{"HEADERS padded without a length", func(w *wire) { w.WriteRawFrame(oracle.FrameHeaders, flagPadded|flagEndHeaders, 11, nil) }, FrameSizeError},
		{"HEADERS padded beyond its end", func(w *wire) {
			w.WriteRawFrame(oracle.FrameHeaders, flagPadded|flagEndHeaders, 11, []byte{2, 0x82})
		}, ProtocolError},
		{"HEADERS too short for its priority", func(w *wire) {
			w.WriteRawFrame(oracle.FrameHeaders, flagPriority|flagEndHeaders, 11, []byte{0, 0, 0, 0})
		}, FrameSizeError},
		{"bad HPACK", func(w *wire) { w.WriteRawFrame(oracle.FrameHeaders, flagEndHeaders, 11, []byte{0x80}) }, CompressionError},
		{"block interrupted", func(w *wire) {
			w.WriteRawFrame(oracle.FrameHeaders, 0, 11, []byte{0x82})
			w.WritePing(false, [8]byte{})
		}, ProtocolError},
		{"block interrupted by an unknown frame", func(w *wire) {
			w.WriteRawFrame(oracle.FrameHeaders, 0, 11, []byte{0x82})
			w.WriteRawFrame(0xee, 0, 11, nil)
		}, ProtocolError},
		{"block continued on another stream", func(w *wire) {
			w.WriteRawFrame(oracle.FrameHeaders, 0, 11, []byte{0x82})
			w.WriteContinuation(13, true, nil)
		}, ProtocolError},
		{"CONTINUATION alone", func(w *wire) { w.WriteContinuation(1, true, nil) }, ProtocolError},
		{"CONTINUATION behind a whole block", func(w *wire) {
			w.head(11, true, getRoot...)
			w.feed()
			w.h.streams[11].Reset(Cancel)
			w.h.take()
			w.WriteContinuation(11, true, nil)
		}, ProtocolError},
		{"empty CONTINUATION flood", func(w *wire) {
			w.WriteRawFrame(oracle.FrameHeaders, 0, 11, []byte{0x82})
			for range maxContinuations + 1 {
				w.WriteContinuation(11, false, nil)
			}
		}, EnhanceYourCalm},
		{"endless header block", func(w *wire) {
			w.WriteRawFrame(oracle.FrameHeaders, 0, 11, []byte{0x82})
			for range 20 {
				w.WriteContinuation(11, false, make([]byte, maxFrame))
			}
		}, EnhanceYourCalm},
		{"HPACK bomb", func(w *wire) {
			b := w.fields("n", strings.Repeat("v", 4000))
			w.WriteHeaders(oracle.HeadersFrameParam{StreamID: 11, EndHeaders: true,
				BlockFragment: append(b, strings.Repeat("\xbe", 1000)...)})
		}, EnhanceYourCalm},
		{"PRIORITY on stream 0", func(w *wire) { w.WriteRawFrame(oracle.FramePriority, 0, 0, make([]byte, 5)) }, ProtocolError},
		{"PRIORITY of a wrong length", func(w *wire) { w.WriteRawFrame(oracle.FramePriority, 0, 1, make([]byte, 4)) }, FrameSizeError},
		{"RST_STREAM on stream 0", func(w *wire) { w.WriteRSTStream(0, oracle.ErrCodeCancel) }, ProtocolError},
		{"RST_STREAM on an idle stream", func(w *wire) { w.WriteRSTStream(11, oracle.ErrCodeCancel) }, ProtocolError},
		{"RST_STREAM of a wrong length", func(w *wire) { w.WriteRawFrame(oracle.FrameRSTStream, 0, 1, make([]byte, 5)) }, FrameSizeError},
		{"SETTINGS on a stream", func(w *wire) { w.WriteRawFrame(oracle.FrameSettings, 0, 1, nil) }, ProtocolError},
		{"SETTINGS of a wrong length", func(w *wire) { w.WriteRawFrame(oracle.FrameSettings, 0, 0, make([]byte, 7)) }, FrameSizeError},
		{"SETTINGS acknowledged with a payload", func(w *wire) { w.WriteRawFrame(oracle.FrameSettings, flagAck, 0, make([]byte, 6)) }, FrameSizeError},
		{"SETTINGS acknowledged twice", func(w *wire) { w.WriteSettingsAck() }, ProtocolError},
		{"ENABLE_PUSH 2", func(w *wire) { w.WriteSettings(oracle.Setting{ID: 2, Val: 2}) }, ProtocolError},
		{"INITIAL_WINDOW_SIZE 2^31", func(w *wire) { w.WriteSettings(oracle.Setting{ID: 4, Val: 1 << 31}) }, FlowControlError},
		{"INITIAL_WINDOW_SIZE overflows a stream", func(w *wire) {
			w.WriteWindowUpdate(1, 1<<20)
			w.WriteSettings(oracle.Setting{ID: 4, Val: 1<<31 - 1})
		}, FlowControlError},
		{"MAX_FRAME_SIZE 16383", func(w *wire) { w.WriteSettings(oracle.Setting{ID: 5, Val: 16383}) }, ProtocolError},
		{"MAX_FRAME_SIZE 2^24", func(w *wire) { w.WriteSettings(oracle.Setting{ID: 5, Val: 1 << 24}) }, ProtocolError},
		{"ENABLE_CONNECT_PROTOCOL 2", func(w *wire) { w.WriteSettings(oracle.Setting{ID: 8, Val: 2}) }, ProtocolError},
		{"PUSH_PROMISE", func(w *wire) { w.WriteRawFrame(oracle.FramePushPromise, flagEndHeaders, 1, []byte{0, 0, 0, 2}) }, ProtocolError},
		{"PING on a stream", func(w *wire) { w.WriteRawFrame(oracle.FramePing, 0, 1, make([]byte, 8)) }, ProtocolError},
		{"PING of a wrong length", func(w *wire) { w.WriteRawFrame(oracle.FramePing, 0, 0, make([]byte, 9)) }, FrameSizeError},
		{"GOAWAY on a stream", func(w *wire) { w.WriteRawFrame(oracle.FrameGoAway, 0, 1, make([]byte, 8)) }, ProtocolError},
		{"GOAWAY too short", func(w *wire) { w.WriteRawFrame(oracle.FrameGoAway, 0, 0, make([]byte, 7)) }, FrameSizeError},
		{"WINDOW_UPDATE of a wrong length", func(w *wire) { w.WriteRawFrame(oracle.FrameWindowUpdate, 0, 0, make([]byte, 5)) }, FrameSizeError},
		{"WINDOW_UPDATE of 0 on the connection", func(w *wire) { w.WriteWindowUpdate(0, 0) }, ProtocolError},
		{"WINDOW_UPDATE overflows the connection", func(w *wire) { w.WriteWindowUpdate(0, 1<<31-1) }, FlowControlError},
		{"WINDOW_UPDATE on an idle stream", func(w *wire) { w.WriteWindowUpdate(11, 1) }, ProtocolError},
		{"PING flood", func(w *wire) {
			for range 2*maxAcks + 1 {
				w.WritePing(false, [8]byte{})
			}
		}, EnhanceYourCalm},
		{"SETTINGS flood", func(w *wire) {
			for range maxUseless + maxBanked + 1 {
				w.WriteSettings()
			}
		}, EnhanceYourCalm},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := open(t)
			tt.write(w)
			w.want(resets(tt.code), tt.code.String())
			if got := w.frames(); !strings.HasSuffix(got, tt.code.String()) || !strings.Contains(got, "GOAWAY ") {
				t.Errorf("sends %.500q, want GOAWAY with %s last", got, tt.code)
			}
			if w.c.Streams() != 0 {
				t.Errorf("%d streams", w.c.Streams())
			}
			w.WritePing(false, [8]byte{})
			w.want("", tt.code.String())
			w.sends("")
		})
	}
}

// TestFloods that need a connection of their own.
func TestFloods(t *testing.T) {
	t.Run("empty DATA", func(t *testing.T) {
		w := server(t)
		w.head(1, false, postRoot...)
		for range maxUseless + usefulWorth - 1 { // the request made up for some
			w.WriteData(1, false, nil)
		}
		if code := w.feed(); code != "" {
			t.Fatal(code)
		}
		w.WriteDataPadded(1, false, nil, make([]byte, 3))
		if code := w.feed(); code != "ENHANCE_YOUR_CALM" {
			t.Fatalf("%q", code)
		}
	})
	t.Run("many small messages are no flood", func(t *testing.T) {
		w := server(t)
		w.h.onData = func(s *Stream, p []byte, end bool) { s.Credit(len(p)) }
		w.head(1, false, postRoot...)
		for i := range 20000 {
			w.WriteData(1, false, []byte("small"))
			if i%10 == 0 {
				w.WriteData(1, false, nil)
			}
			if code := w.feed(); code != "" {
				t.Fatal(code)
			}
			w.c.Sent(len(w.c.Out()))
		}
		balanced(t, w.c)
	})
	t.Run("rapid reset", func(t *testing.T) {
		w := newWire(t, Config{Server: true, MaxStreams: 50})
		n := 0
		w.h.onHead = func(*Stream, *httpmsg.Head, bool) { n++ }
		for id := uint32(1); id < 20000; id += 2 {
			w.head(id, true, getRoot...)
			w.WriteRSTStream(id, oracle.ErrCodeCancel)
		}
		if code := w.feed(); code != "ENHANCE_YOUR_CALM" || n > maxProvoked+1 {
			t.Fatalf("%q after %d requests", code, n)
		}
	})
	t.Run("resets among answers are no flood", func(t *testing.T) {
		w := server(t)
		w.h.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) {
			if s.ID()%4 == 1 {
				s.WriteHead(respond(204), true)
			}
		}
		for id := uint32(1); id < 20000; id += 2 {
			w.head(id, true, getRoot...)
			if id%4 == 3 {
				w.WriteRSTStream(id, oracle.ErrCodeCancel)
			}
			if code := w.feed(); code != "" {
				t.Fatal(code)
			}
			w.c.Sent(len(w.c.Out()))
			w.c.Reap()
		}
	})
	for _, tt := range []struct {
		name string
		harm func(w *wire, id uint32)
	}{
		{"made you reset: window update of 0", func(w *wire, id uint32) { w.WriteWindowUpdate(id, 0) }},
		{"made you reset: window overflow", func(w *wire, id uint32) { w.WriteWindowUpdate(id, 1<<31-1) }},
		{"made you reset: DATA after the end", func(w *wire, id uint32) { w.WriteData(id, true, []byte("x")) }},
		{"made you reset: HEADERS after the end", func(w *wire, id uint32) { w.head(id, true, "x", "y") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := server(t)
			n := 0
			w.h.onHead = func(*Stream, *httpmsg.Head, bool) { n++ }
			for id := uint32(1); id < 2000; id += 2 {
				w.head(id, true, getRoot...)
				tt.harm(w, id)
			}
			if code := w.feed(); code != "ENHANCE_YOUR_CALM" || n != maxProvoked+1 {
				t.Fatalf("%q after %d requests", code, n)
			}
		})
	}
	t.Run("PINGs that are read are no flood", func(t *testing.T) {
		w := server(t)
		w.head(1, true, getRoot...)
		w.feed()
		w.h.streams[1].WriteHead(respond(200), false)
		w.WriteWindowUpdate(0, 1<<30)
		w.WriteWindowUpdate(1, 1<<30)
		w.feed()
		body := make([]byte, 100)
		for range 5 * maxAcks { // the queue never runs empty
			w.h.streams[1].WriteData(body, false)
			w.WritePing(false, [8]byte{})
			if code := w.feed(); code != "" {
				t.Fatal(code)
			}
			w.c.Sent(len(w.c.Out()) - 50)
		}
	})
	t.Run("interim heads", func(t *testing.T) {
		w := newWire(t, Config{})
		s, _ := w.c.Open()
		s.WriteHead(get("/"), true)
		for range maxInterim + 1 {
			w.head(1, false, ":status", "103")
		}
		w.feed()
		if got := w.h.take(); !strings.HasSuffix(got, "1 reset ENHANCE_YOUR_CALM") {
			t.Error(got)
		}
	})
}

// TestStreamErrors: what costs one stream, 1, whose request is still coming.
func TestStreamErrors(t *testing.T) {
	for _, tt := range []struct {
		name  string
		write func(w *wire)
		code  Code
	}{
		{"WINDOW_UPDATE of 0", func(w *wire) { w.WriteWindowUpdate(1, 0) }, ProtocolError},
		{"WINDOW_UPDATE overflows", func(w *wire) { w.WriteWindowUpdate(1, 1<<31-1) }, FlowControlError},
		{"HEADERS without END_STREAM", func(w *wire) { w.head(1, false, "x", "y") }, ProtocolError},
		{"trailers with a pseudo-header field", func(w *wire) { w.head(1, true, ":path", "/") }, ProtocolError},
		{"trailers with a connection field", func(w *wire) { w.head(1, true, "connection", "close") }, ProtocolError},
		{"trailers too large", func(w *wire) { w.head(1, true, "x", strings.Repeat("v", 61440)) }, ProtocolError},
		{"more than content-length", func(w *wire) { w.WriteData(1, false, make([]byte, 11)) }, ProtocolError},
		{"less than content-length", func(w *wire) { w.WriteData(1, true, make([]byte, 9)) }, ProtocolError},
		{"trailers before content-length is met", func(w *wire) { w.head(1, true, "x", "y") }, ProtocolError},
		{"beyond the stream's window", func(w *wire) {
			w.head(3, false, postRoot...)
			w.feed()
			w.h.take()
			w.h.onHead = nil
			for range 4 {
				w.WriteData(3, false, make([]byte, 16384))
			}
			w.feed()
			w.WriteData(3, false, make([]byte, 1))
			w.feed()
			want := "3 data 65536 bytes 00000000\n3 reset FLOW_CONTROL_ERROR"
			if got := w.h.take(); got != want {
				w.t.Errorf("%s, want %s", got, want)
			}
			w.sends("RST_STREAM 3 FLOW_CONTROL_ERROR")
			w.WriteWindowUpdate(1, 0)
		}, ProtocolError},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWire(t, Config{Server: true, StreamWindow: 65536})
			w.head(1, false, append(postRoot[:8:8], "content-length", "10")...)
			w.feed()
			w.h.take()
			if tt.name == "trailers too large" {
				w.WriteData(1, false, make([]byte, 10))
				w.feed()
				w.h.take()
				for i, b := 0, w.fields("x", strings.Repeat("v", 61440)); len(b) > 0; i++ {
					n := min(len(b), maxFrame)
					if i == 0 {
						w.WriteHeaders(oracle.HeadersFrameParam{StreamID: 1, BlockFragment: b[:n], EndStream: true})
					} else {
						w.WriteContinuation(1, n == len(b), b[:n])
					}
					b = b[n:]
				}
			} else {
				tt.write(w)
			}
			w.want("1 reset "+tt.code.String(), "")
			w.sends("RST_STREAM 1 " + tt.code.String())
			balanced(t, w.c)
			w.c.Reap()
			w.WriteData(1, true, make([]byte, 100)) // under way: ignored
			w.head(1, true, "x", "y")
			w.WriteRSTStream(1, oracle.ErrCodeCancel)
			w.WriteWindowUpdate(1, 5)
			w.head(31, true, getRoot...)
			w.want("31 head GET http://a/ len=0 end", "")
			w.sends("")
			balanced(t, w.c)
		})
	}
	t.Run("DATA after the end", func(t *testing.T) {
		w := server(t)
		w.head(1, true, getRoot...)
		w.WriteData(1, true, []byte("x"))
		w.want("1 head GET http://a/ len=0 end\n1 reset STREAM_CLOSED", "")
		w.sends("RST_STREAM 1 STREAM_CLOSED")
		balanced(t, w.c)
	})
	t.Run("DATA on a stream that ended well", func(t *testing.T) {
		w := server(t)
		w.h.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) { s.WriteHead(respond(204), true) }
		w.head(1, true, getRoot...)
		w.WriteData(1, true, []byte("x"))
		w.want("1 head GET http://a/ len=0 end", "")
		w.sends("HEADERS 1 :status=204 end\nRST_STREAM 1 STREAM_CLOSED")
		balanced(t, w.c)
	})
}

// TestRequests: how heads map, and which are malformed (RFC 9113 8.2, 8.3).
func TestRequests(t *testing.T) {
	const malformed = "malformed"
	many := func(n int) []string {
		var kv []string
		for i := range n {
			kv = append(kv, fmt.Sprint("x-", i), "v")
		}
		return kv
	}
	for _, tt := range []struct {
		fields []string // after :method GET :scheme http :path / :authority a, unless the first begins with ':'
		open   bool     // without END_STREAM
		want   string
	}{
		{fields: nil, want: "GET http://a/ len=0 end"},
		{fields: nil, open: true, want: "GET http://a/ len=-1"},
		{fields: []string{"content-length", "5"}, open: true, want: `GET http://a/ len=5 content-length="5"`},
		{fields: []string{"content-length", "0"}, want: `GET http://a/ len=0 content-length="0" end`},
		{fields: []string{"content-length", "5"}, want: malformed},
		{fields: []string{"content-length", "5", "content-length", "5"}, open: true, want: malformed},
		{fields: []string{"content-length", "5, 5"}, open: true, want: malformed},
		{fields: []string{"content-length", "+5"}, open: true, want: malformed},
		{fields: []string{"content-length", ""}, open: true, want: malformed},
		{fields: []string{"content-length", "1234567890123456789"}, open: true, want: malformed},
		{fields: []string{"expect", "100-Continue"}, open: true, want: `GET http://a/ len=-1 expect expect="100-Continue"`},
		{fields: []string{"expect", "100-continues"}, open: true, want: `GET http://a/ len=-1 expect="100-continues"`},
		{fields: []string{"expect", "200-continue"}, open: true, want: `GET http://a/ len=-1 expect="200-continue"`},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", "Cart", "host", "cART"}, want: "GET http://Cart/ len=0 end"},
		{fields: []string{"te", "trailers"}, want: `GET http://a/ len=0 te="trailers" end`},
		{fields: []string{"te", "gzip"}, want: malformed},
		{fields: []string{"te", "trailers, gzip"}, want: malformed},
		{fields: []string{"connection", "close"}, want: malformed},
		{fields: []string{"keep-alive", "5"}, want: malformed},
		{fields: []string{"proxy-connection", "close"}, want: malformed},
		{fields: []string{"transfer-encoding", "chunked"}, open: true, want: malformed},
		{fields: []string{"upgrade", "websocket"}, want: malformed},
		{fields: []string{"X-Upper", "v"}, want: malformed},
		{fields: []string{"x y", "v"}, want: malformed},
		{fields: []string{"x\x00", "v"}, want: malformed},
		{fields: []string{"x:", "v"}, want: malformed},
		{fields: []string{"", "v"}, want: malformed},
		{fields: []string{"x", "a\r\nb: c"}, want: malformed},
		{fields: []string{"x", "a\x00"}, want: malformed},
		{fields: []string{"x", " a"}, want: `GET http://a/ len=0 x="a" end`},  // decision 037
		{fields: []string{"x", "\ta"}, want: `GET http://a/ len=0 x="a" end`}, // case 64
		{fields: []string{"x", "a \t "}, want: `GET http://a/ len=0 x="a" end`},
		{fields: []string{"x", " \t"}, want: `GET http://a/ len=0 x="" end`},
		{fields: []string{"x", " a \r"}, want: malformed},
		{fields: []string{"cookie", " a=1; ", "cookie", "\tb=2 "}, want: `GET http://a/ len=0 cookie="a=1;; b=2" end`},
		{fields: []string{"content-length", " 5 "}, open: true, want: `GET http://a/ len=5 content-length="5"`},
		{fields: []string{"content-length", "5 5"}, open: true, want: malformed},
		{fields: []string{"te", " trailers"}, want: `GET http://a/ len=0 te="trailers" end`},
		{fields: []string{"te", " gzip"}, want: malformed},
		{fields: []string{" x", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", " a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", " /", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a", "host", " a "}, want: "GET http://a/ len=0 end"},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a", "host", " b"}, want: malformed},
		{fields: []string{"x", ""}, want: `GET http://a/ len=0 x="" end`},
		{fields: []string{"x", "a\tb \xff"}, want: `GET http://a/ len=0 x="a\tb \xff" end`},
		{fields: []string{"x_y", "v"}, want: `GET http://a/ len=0 x_y="v" end`},
		{fields: []string{"host", "a"}, want: "GET http://a/ len=0 end"},
		{fields: []string{"host", "A"}, want: "GET http://a/ len=0 end"},
		{fields: []string{"host", "b"}, want: malformed},
		{fields: []string{"host", "a", "host", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "https", ":path", "/", "host", "b:8080"}, want: "GET https://b:8080/ len=0 end"},
		{fields: []string{":method", "GET", ":scheme", "https", ":path", "/", "host", "u@b"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/"}, want: "GET http:/// len=0 end"},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", ""}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", "u@a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a b"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a/b"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "x", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "http://b/", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/a b", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/a#b", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/ HTTP/1.1\r\nx: y", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "*", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "OPTIONS", ":scheme", "http", ":path", "*", ":authority", "a"}, want: "OPTIONS http://a* len=0 end"},
		{fields: []string{":method", "G T", ":scheme", "http", ":path", "/", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "", ":scheme", "http", ":path", "/", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "ht tp", ":path", "/", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":path", "/", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":authority", "a"}, want: malformed},
		{fields: []string{":scheme", "http", ":path", "/", ":authority", "a"}, want: malformed},
		{fields: []string{":method", "GET", ":method", "GET", ":scheme", "http", ":path", "/"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", "x", "y", ":path", "/"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/", ":status", "200"}, want: malformed},
		{fields: []string{":method", "GET", ":scheme", "http", ":path", "/", ":other", "x"}, want: malformed},
		{fields: []string{":method", "CONNECT", ":authority", "a:443"}, open: true, want: "CONNECT ://a:443 len=-1"},
		{fields: []string{":method", "CONNECT", ":authority", "a:443", ":path", "/"}, open: true, want: malformed},
		{fields: []string{":method", "CONNECT", ":authority", "a:443", ":scheme", "http"}, open: true, want: malformed},
		{fields: []string{":method", "CONNECT"}, open: true, want: malformed},
		{fields: []string{":method", "CONNECT", ":protocol", "websocket", ":scheme", "http", ":path", "/ws", ":authority", "a"}, open: true,
			want: "CONNECT http://a/ws upgrade=websocket len=-1"},
		{fields: []string{":method", "CONNECT", ":protocol", "websocket", ":authority", "a"}, open: true, want: malformed},
		{fields: []string{":method", "GET", ":protocol", "websocket", ":scheme", "http", ":path", "/ws", ":authority", "a"}, want: malformed},
		{fields: []string{"cookie", "a=1"}, want: `GET http://a/ len=0 cookie="a=1" end`},
		{fields: []string{"cookie", "a=1", "x", "y", "cookie", "b=2", "cookie", "c=3"}, want: `GET http://a/ len=0 cookie="a=1; b=2; c=3" x="y" end`},
		{fields: many(100), want: "GET http://a/ len=0 " + strings.TrimSpace(fieldText(fields(many(100)...))) + " end"},
		{fields: many(101), want: "431"}, // case 62
		{fields: []string{"x", strings.Repeat("v", 16000), "y", strings.Repeat("v", 50000)}, want: "431"},
	} {
		kv := tt.fields
		if len(kv) == 0 || !strings.HasPrefix(kv[0], ":") {
			kv = append(getRoot[:8:8], kv...)
		}
		t.Run(fmt.Sprintf("%.60q", tt.fields), func(t *testing.T) {
			w := newWire(t, Config{Server: true, EnableConnect: true})
			b := w.fields(kv...)
			n := min(len(b), maxFrame)
			w.WriteHeaders(oracle.HeadersFrameParam{StreamID: 1, BlockFragment: b[:n], EndStream: !tt.open, EndHeaders: n == len(b)})
			for b = b[n:]; len(b) > 0; b = b[n:] {
				n = min(len(b), maxFrame)
				w.WriteContinuation(1, n == len(b), b[:n])
			}
			switch tt.want {
			case malformed:
				w.want("", "")
				w.sends("RST_STREAM 1 PROTOCOL_ERROR")
				if w.c.Stats().Malformed != 1 {
					t.Error("not counted")
				}
			case "431":
				w.want("", "")
				w.sends("HEADERS 1 :status=431 content-length=0 end")
				if w.c.Stats().TooLarge != 1 {
					t.Error("not counted")
				}
			default:
				w.want("1 head "+tt.want, "")
				w.sends("")
			}
			// The connection lives, and a repeated field is judged the same.
			w.head(3, true, getRoot...)
			w.want("3 head GET http://a/ len=0 end", "")
			if tt.want == malformed {
				w.head(5, !tt.open, kv...)
				w.want("", "")
				w.sends("RST_STREAM 5 PROTOCOL_ERROR")
			}
		})
	}
	t.Run("extended CONNECT that was not offered", func(t *testing.T) {
		w := server(t)
		w.head(1, false, ":method", "CONNECT", ":protocol", "websocket", ":scheme", "http", ":path", "/", ":authority", "a")
		w.want("", "")
		w.sends("RST_STREAM 1 PROTOCOL_ERROR")
	})
	t.Run("431 while the body comes", func(t *testing.T) {
		w := newWire(t, Config{Server: true, MaxHeader: 200})
		w.head(1, false, append(postRoot[:8:8], "x", strings.Repeat("v", 200))...)
		w.WriteData(1, false, make([]byte, 1000))
		w.want("", "")
		w.sends("HEADERS 1 :status=431 content-length=0 end\nRST_STREAM 1 NO_ERROR")
		balanced(t, w.c)
	})
}

// TestTooLargeOfGRPC: a gRPC client is told in its own way, wherever in the head the field stands that says that it is one.
func TestTooLargeOfGRPC(t *testing.T) {
	big := strings.Repeat("v", 200)
	many := []string{}
	for i := range 100 {
		many = append(many, fmt.Sprint("x-", i), "v")
	}
	const own, plain = "HEADERS 1 :status=200 content-type=application/grpc grpc-status=8 grpc-message=the request's metadata is too large for the proxy content-length=0 end",
		"HEADERS 1 :status=431 content-length=0 end"
	for _, tt := range []struct {
		name   string
		limit  int
		fields []string
		want   string
	}{
		{"before what is too large", 300, []string{"content-type", "application/grpc", "x", big}, own},
		{"after it", 300, []string{"x", big, "content-type", "application/grpc+proto", "y", "z"}, own},
		{"is what is too large", 300, []string{"y", big[:150], "content-type", "application/grpc;" + big[:60]}, own},
		{"of too many", 0, append([]string{"content-type", "application/grpc"}, many...), own},
		{"gRPC-Web", 300, []string{"content-type", "application/grpc-web", "x", big}, plain},
		{"of many", 0, append([]string{"content-type", "application/json"}, many...), plain},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWire(t, Config{Server: true, MaxHeader: tt.limit})
			for id := uint32(1); id <= 5; id += 4 { // a second time all of it comes from the table
				w.head(id, true, append(postRoot[:8:8], tt.fields...)...)
				w.want("", "")
				w.sends(strings.Replace(tt.want, "1", fmt.Sprint(id), 1))
				w.head(id+2, true, append(postRoot[:8:8], "x", "y")...) // nothing of it is left
				w.want(fmt.Sprintf("%d head POST http://a/ len=0 x=\"y\" end", id+2), "")
			}
			if w.c.Stats().TooLarge != 2 {
				t.Error("not counted")
			}
		})
	}
}

// TestResponses: how heads map, and which are malformed.
func TestResponses(t *testing.T) {
	const malformed = "reset PROTOCOL_ERROR"
	for _, tt := range []struct {
		method string
		fields []string
		open   bool
		want   string
	}{
		{"GET", []string{":status", "200"}, false, "head 200 len=0 end"},
		{"GET", []string{":status", "200"}, true, "head 200 len=-1"},
		{"GET", []string{":status", "599", "content-length", "7"}, true, `head 599 len=7 content-length="7"`},
		{"GET", []string{":status", "999"}, true, `head 999 len=-1`},
		{"GET", []string{":status", "200", "content-length", "7"}, false, malformed},
		{"GET", []string{":status", "20"}, false, malformed},
		{"GET", []string{":status", "2000"}, false, malformed},
		{"GET", []string{":status", "099"}, false, malformed},
		{"GET", []string{":status", "2x0"}, false, malformed},
		{"GET", []string{"x", "y"}, false, malformed},
		{"GET", []string{":status", "200", ":path", "/"}, false, malformed},
		{"GET", []string{":status", "200", ":status", "200"}, false, malformed},
		{"GET", []string{":status", "200", "connection", "close"}, false, malformed},
		{"GET", []string{":status", "100"}, false, malformed},
		{"GET", []string{":status", "101"}, true, malformed},
		{"GET", []string{":status", "103", "link", "x"}, true, `head 103 len=0 link="x"`},
		{"GET", []string{":status", "204", "content-length", "7"}, false, `head 204 len=0 content-length="7" end`},
		{"GET", []string{":status", "304", "content-length", "7"}, false, `head 304 len=0 content-length="7" end`},
		{"HEAD", []string{":status", "200", "content-length", "7"}, false, `head 200 len=0 content-length="7" end`},
		{"HEAD", []string{":status", "200", "content-length", "7"}, true, `head 200 len=0 content-length="7"`},
		{"CONNECT", []string{":status", "200"}, true, `head 200 len=-1`},
		{"CONNECT", []string{":status", "200"}, false, `head 200 len=0 end`},
		{"GET", []string{":status", "200", "expect", "100-continue"}, false, `head 200 len=0 expect="100-continue" end`},
		{"CONNECT", []string{":status", "403"}, false, `head 403 len=0 end`},
	} {
		t.Run(fmt.Sprint(tt.method, tt.fields), func(t *testing.T) {
			w := newWire(t, Config{})
			s, err := w.c.Open()
			if err != nil {
				t.Fatal(err)
			}
			s.WriteHead(&httpmsg.Head{Method: []byte(tt.method), Authority: []byte("a")}, tt.method != "CONNECT")
			w.frames()
			w.head(1, !tt.open, tt.fields...)
			w.want("1 "+tt.want, "")
			if tt.want == malformed {
				w.sends("RST_STREAM 1 PROTOCOL_ERROR")
			}
			if tt.method == "HEAD" && tt.open {
				w.WriteData(1, true, nil)
				w.want("1 data \"\"\n1 end", "")
			}
		})
	}
	t.Run("a body where none may be", func(t *testing.T) {
		w := newWire(t, Config{})
		s, _ := w.c.Open()
		s.WriteHead(&httpmsg.Head{Method: []byte("HEAD"), Authority: []byte("a")}, true)
		w.head(1, false, ":status", "200", "content-length", "7")
		w.WriteData(1, true, make([]byte, 7))
		w.want("1 head 200 len=0 content-length=\"7\"\n1 reset PROTOCOL_ERROR", "")
	})
	t.Run("too large", func(t *testing.T) {
		w := newWire(t, Config{MaxHeader: 200})
		s, _ := w.c.Open()
		s.WriteHead(get("/"), true)
		w.head(1, true, ":status", "200", "x", strings.Repeat("v", 200))
		w.want("1 reset PROTOCOL_ERROR", "")
		if w.c.Stats().TooLarge != 1 {
			t.Error("not counted")
		}
	})
	t.Run("too many fields", func(t *testing.T) {
		w := newWire(t, Config{MaxFields: 1})
		s, _ := w.c.Open()
		s.WriteHead(get("/"), true)
		w.head(1, true, ":status", "200", "x", "1", "y", "2")
		w.want("1 reset PROTOCOL_ERROR", "")
		if w.c.Stats().TooLarge != 1 {
			t.Error("not counted")
		}
	})
	t.Run("DATA before the head", func(t *testing.T) {
		w := newWire(t, Config{})
		s, _ := w.c.Open()
		s.WriteHead(get("/"), true)
		w.WriteData(1, true, []byte("x"))
		w.want("1 reset PROTOCOL_ERROR", "")
	})
	t.Run("early and whole, then a reset", func(t *testing.T) { // RFC 9113 8.1
		w := newWire(t, Config{})
		s, _ := w.c.Open()
		s.WriteHead(&httpmsg.Head{Method: []byte("POST"), Authority: []byte("a")}, false)
		w.head(1, false, ":status", "413")
		w.WriteData(1, true, []byte("no"))
		w.WriteRSTStream(1, oracle.ErrCodeNo)
		w.want("1 head 413 len=-1\n1 data \"no\"\n1 end\n1 reset NO_ERROR", "")
	})
}

// TestClientErrors: what a server may not do.
func TestClientErrors(t *testing.T) {
	for _, tt := range []struct {
		name  string
		write func(w *wire)
		code  Code
	}{
		{"ENABLE_PUSH 1", func(w *wire) { w.WriteSettings(oracle.Setting{ID: 2, Val: 1}) }, ProtocolError},
		{"HEADERS on an idle stream", func(w *wire) { w.head(3, true, ":status", "200") }, ProtocolError},
		{"HEADERS on an even stream", func(w *wire) { w.head(2, true, ":status", "200") }, ProtocolError},
		{"HEADERS on a stream opened and not begun", func(w *wire) { w.c.Open(); w.head(3, true, ":status", "200") }, ProtocolError},
		{"PUSH_PROMISE", func(w *wire) {
			w.WritePushPromise(oracle.PushPromiseParam{StreamID: 1, PromiseID: 2, EndHeaders: true})
		}, ProtocolError},
		{"CONNECT withdrawn", func(w *wire) {
			w.WriteSettings(oracle.Setting{ID: 8, Val: 1})
			w.WriteSettings(oracle.Setting{ID: 8, Val: 0})
		}, ProtocolError},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWire(t, Config{})
			s, _ := w.c.Open()
			s.WriteHead(get("/"), true)
			tt.write(w)
			if code := w.feed(); code != tt.code.String() {
				t.Errorf("%q, want %s", code, tt.code)
			}
		})
	}
}
