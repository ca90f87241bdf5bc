package http2

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	oracle "golang.org/x/net/http2"

	"aether/dataplane/httpmsg"
)

// TestFaultsAreNamed: each refusal of a message names the field, the byte or the limit, whichever side refuses it, the
// second time as the first (then the fields come from the table); no refusal is left out.
func TestFaultsAreNamed(t *testing.T) {
	many := []string{}
	for i := range 101 {
		many = append(many, fmt.Sprint("x-", i), "v")
	}
	req := func(kv ...string) []string { return append(getRoot[:8:8], kv...) }
	res := func(kv ...string) []string { return append([]string{":status", "200"}, kv...) }
	met := ""
	check := func(what string, err error, want string) {
		t.Helper()
		e, ok := err.(*StreamError)
		if !ok || !regexp.MustCompile(want).MatchString(e.Fault()) {
			t.Errorf("%.80s: %v, want %s", what, err, want)
			return
		}
		met += e.Reason + "\n"
		for _, c := range []byte(e.Error()) {
			if c < ' ' || c > '~' {
				t.Errorf("%.80s: byte %#x in %q", what, c, e.Error())
			}
		}
		if len(e.Where) > httpmsg.MaxWhere || len(e.Reason) > 200 {
			t.Errorf("%.80s: %d and %d bytes: %v", what, len(e.Reason), len(e.Where), e)
		}
	}
	for _, tt := range []struct {
		fields []string
		want   string
	}{
		{[]string{":scheme", "http", ":path", "/"}, "missing.*':method'"},
		{[]string{":method", "GET", ":path", "/"}, "missing.*':scheme'"},
		{[]string{":method", "GET", ":scheme", "http"}, "missing.*':path'"},
		{[]string{":method", "CONNECT"}, "missing.*':authority'"},
		{[]string{":method", "CONNECT", ":authority", "a:1", ":path", "/"}, "no place.*':path'"},
		{[]string{":method", "CONNECT", ":authority", "a:1", ":scheme", "http"}, "no place.*':scheme'"},
		{[]string{":method", "CONNECT", ":protocol", "websocket", ":authority", "a:1"}, "extended CONNECT.*':protocol'"},
		{[]string{":method", "GET", ":scheme", "http", ":path", "*", ":authority", "a"}, `path \*`},
		{[]string{":method", "GET", ":scheme", "http", ":path", "a b", ":authority", "a"}, "malformed pseudo-header.*':path'"},
		{req("host", "b"), "host field that is not"},
		{req("host", "a/b"), "malformed host.*'host'"},
		{req("host", "a", "host", "a"), "twice.*'host'"},
		{req(":path", "/"), "twice.*':path'"},
		{req("x", "y", ":path", "/"), "behind another.*':path'"},
		{req(":status", "200"), "no place.*':status'"},
		{req(":odd", "1"), "unknown.*':odd'"},
		{req("content-length", "5"), "short of its content-length"},
		{req(many...), "too many fields.*at most 100"},
		{req("x", strings.Repeat("v", 16000), "y", strings.Repeat("v", 50000)), "head is too large.*at most 61440 bytes"},
	} {
		w := newWire(t, Config{Server: true})
		for _, id := range []uint32{1, 3} {
			var got []error
			status := 0
			w.h.onRefused = func(s int, why *StreamError) { status, got = s, append(got, why) }
			sendHead(w, id, true, tt.fields...)
			w.want("", "")
			if want := 400; len(got) != 1 || status != want && status != 431 {
				t.Fatalf("%.80q: %v, %d", tt.fields, got, status)
			}
			check(fmt.Sprint(tt.fields), got[0], tt.want)
		}
	}
	for _, tt := range []struct {
		what string
		do   func(w *wire, id uint32)
		want string
	}{
		{"an upper name", func(w *wire, id uint32) { w.head(id, true, res("X-A", "1")...) }, "lower case.*'x-a', byte 0x58"},
		{"a space in a name", func(w *wire, id uint32) { w.head(id, true, res("x a", "1")...) }, "field name.*'x a', byte 0x20"},
		{"an escape in a name", func(w *wire, id uint32) { w.head(id, true, res("x\x1b[31m", "1")...) }, `field name.*'x\\x1b\[31m', byte 0x1b`},
		{"an empty name", func(w *wire, id uint32) { w.head(id, true, res("", "1")...) }, "empty field name"},
		{"a long name", func(w *wire, id uint32) { w.head(id, true, res(strings.Repeat("y", 99)+" ", "1")...) }, "field name.*yyy[.][.][.]', byte 0x20"},
		{"NUL in a value", func(w *wire, id uint32) { w.head(id, true, res("x-a", "1\x00")...) }, "field value.*'x-a', byte 0x00"},
		{"LF in a value", func(w *wire, id uint32) { w.head(id, true, res("x-a", "1\n2")...) }, "field value.*'x-a', byte 0x0a"},
		{"connection", func(w *wire, id uint32) { w.head(id, true, res("connection", "close")...) }, "field of a connection.*'connection'"},
		{"te", func(w *wire, id uint32) { w.head(id, true, res("te", "gzip")...) }, "te field.*'te'"},
		{"a bad length", func(w *wire, id uint32) { w.head(id, true, res("content-length", "+1")...) }, "malformed content-length"},
		{"two lengths", func(w *wire, id uint32) { w.head(id, false, res("content-length", "1", "content-length", "2")...) }, "twice.*'content-length'"},
		{"no status", func(w *wire, id uint32) { w.head(id, true, "x", "y") }, "missing.*':status'"},
		{"101 fields", func(w *wire, id uint32) { sendHead(w, id, true, res(many...)...) }, "too many fields.*at most 100"},
		{"a large head", func(w *wire, id uint32) {
			sendHead(w, id, true, res("x", strings.Repeat("v", 16000), "y", strings.Repeat("v", 50000))...)
		}, "head is too large.*at most 61440 bytes"},
		{"101", func(w *wire, id uint32) { w.head(id, false, ":status", "101") }, "status 101"},
		{"an interim end", func(w *wire, id uint32) { w.head(id, true, ":status", "103") }, "interim response ends"},
		{"65 interim heads", func(w *wire, id uint32) {
			for range 65 {
				w.head(id, false, ":status", "103")
			}
		}, "too many interim responses.*at most 64"},
		{"a length and no body", func(w *wire, id uint32) { w.head(id, true, res("content-length", "5")...) }, "short of its content-length"},
		{"a short body", func(w *wire, id uint32) {
			w.head(id, false, res("content-length", "5")...)
			w.WriteData(id, true, []byte("abc"))
		}, "short of its content-length"},
		{"a long body", func(w *wire, id uint32) {
			w.head(id, false, res("content-length", "2")...)
			w.WriteData(id, true, []byte("abc"))
		}, "more DATA than content-length"},
		{"DATA first", func(w *wire, id uint32) { w.WriteData(id, true, []byte("abc")) }, "DATA before the head"},
		{"beyond the window", func(w *wire, id uint32) {
			w.head(id, false, res()...)
			for range 17 { // of 256 KiB
				w.WriteData(id, false, make([]byte, 16384))
			}
		}, "beyond the stream's window"},
		{"behind the end", func(w *wire, id uint32) {
			w.head(id, true, res()...)
			w.WriteData(id, true, []byte("abc"))
		}, "behind the end"},
		{"no window", func(w *wire, id uint32) { w.head(id, false, res()...); w.WriteWindowUpdate(id, 0) }, "WINDOW_UPDATE of 0"},
		{"a wide window", func(w *wire, id uint32) { w.head(id, false, res()...); w.WriteWindowUpdate(id, 1<<31-1) }, "WINDOW_UPDATE overflows"},
		{"trailers that go on", func(w *wire, id uint32) { w.head(id, false, res()...); w.head(id, false, "x", "y") }, "do not end the stream"},
		{"trailers of a short body", func(w *wire, id uint32) {
			w.head(id, false, res("content-length", "5")...)
			w.head(id, true, "x", "y")
		}, "short of its content-length"},
		{"a status in trailers", func(w *wire, id uint32) { w.head(id, false, res()...); w.head(id, true, ":status", "200") }, "no place.*':status'"},
		{"NUL in a trailer", func(w *wire, id uint32) { w.head(id, false, res()...); w.head(id, true, "x-a", "\x00") }, "field value.*'x-a', byte 0x00"},
		{"101 trailers", func(w *wire, id uint32) { w.head(id, false, res()...); sendHead(w, id, true, many...) }, "too many fields.*at most 100"},
		{"large trailers", func(w *wire, id uint32) {
			w.head(id, false, res()...)
			sendHead(w, id, true, "x", strings.Repeat("v", 16000), "y", strings.Repeat("v", 50000))
		}, "trailer section is too large.*at most 61440 bytes"},
	} {
		w := newWire(t, Config{})
		for _, id := range []uint32{1, 3} {
			s, err := w.c.Open()
			if err != nil {
				t.Fatal(err)
			}
			var got error
			w.h.onReset = func(s *Stream, _ Code) { got = s.Err() }
			s.WriteHead(get("/"), tt.what != "behind the end")
			w.frames()
			tt.do(w, id)
			if code := w.feed(); code != "" {
				t.Fatalf("%s: %s", tt.what, code)
			}
			w.h.take()
			check(tt.what, got, tt.want)
			w.c.Reap()
			w.c.Tick()
		}
	}
	t.Run("a tunnel's trailers", func(t *testing.T) {
		w := newWire(t, Config{})
		s, _ := w.c.Open()
		s.WriteHead(&httpmsg.Head{Method: []byte("CONNECT"), Authority: []byte("a:1")}, false)
		w.h.onReset = func(s *Stream, _ Code) { check("tunnel", s.Err(), "trailers in a tunnel") }
		w.head(1, false, res()...)
		w.head(1, true, "x", "y")
		w.feed()
	})
	src, err := os.ReadFile("head.go")
	if err != nil {
		t.Fatal(err)
	}
	all := regexp.MustCompile(`(?m)^\t\w+ += "([^"]*)"$|return markBad, "((?:[^"\\]|\\.)*)", `).FindAllSubmatch(src, -1)
	if len(all) < 25 {
		t.Errorf("only %d reasons in head.go", len(all))
	}
	for _, m := range all {
		if r := strings.ReplaceAll(string(m[1])+string(m[2]), `\"`, `"`); !strings.Contains(met, r) {
			t.Errorf("no message here is refused with %q", r)
		}
	}
}

// TestErrIsThePeers: what a stream tells of its end is what the peer did wrong, on it or on its connection; where the peer
// reset it, or the driver ended the connection, there is nothing.
func TestErrIsThePeers(t *testing.T) {
	for _, tt := range []struct {
		what string
		do   func(w *wire)
		want string
	}{
		{"a reset", func(w *wire) { w.WriteRSTStream(1, 2); w.feed() }, "<nil>"},
		{"GOAWAY", func(w *wire) { w.WriteGoAway(0, 0, nil); w.feed() }, "<nil>"},
		{"the driver", func(w *wire) { w.feed(); w.c.Abort(Cancel) }, "<nil>"},
		{"a broken connection", func(w *wire) { w.WriteRawFrame(6, 0, 0, []byte("x")); w.feed() }, "http2: FRAME_SIZE_ERROR: PING is not 8 bytes (6.7)"},
	} {
		w := newWire(t, Config{})
		s, _ := w.c.Open()
		s.WriteHead(get("/"), true)
		w.frames()
		got := "none"
		w.h.onReset = func(s *Stream, _ Code) { got = fmt.Sprint(s.Err()) }
		if tt.do(w); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.what, got, tt.want)
		}
	}
}

// sendHead is head of as many frames as it takes.
func sendHead(w *wire, id uint32, end bool, kv ...string) {
	b := w.fields(kv...)
	n := min(len(b), maxFrame)
	w.WriteHeaders(oracle.HeadersFrameParam{StreamID: id, BlockFragment: b[:n], EndStream: end, EndHeaders: n == len(b)})
	for b = b[n:]; len(b) > 0; b = b[n:] {
		n = min(len(b), maxFrame)
		w.WriteContinuation(id, n == len(b), b[:n])
	}
}
