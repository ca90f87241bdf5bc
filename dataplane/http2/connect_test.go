package http2

import (
	"fmt"
	"testing"

	oracle "golang.org/x/net/http2"

	"aether/dataplane/httpmsg"
)

// TestProtocolNames: :protocol is what Upgrade holds, a token or two with a slash between (RFC 9110 7.8).
func TestProtocolNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"websocket": true, "foo/2": true, "connect-udp": true, "SPDY/3.1": true,
		"": false, "a b": false, "a, b": false, "/2": false, "foo/": false, "a/b/c": false, "a\"": false, "é": false,
	} {
		w := newWire(t, Config{Server: true, EnableConnect: true})
		w.head(1, false, ":method", "CONNECT", ":protocol", name, ":scheme", "http", ":path", "/ws", ":authority", "a")
		if ok {
			w.want(fmt.Sprintf("1 head CONNECT http://a/ws upgrade=%s len=-1", name), "")
			w.sends("")
			continue
		}
		w.want("", "")
		w.sends("RST_STREAM 1 PROTOCOL_ERROR")
	}
}

// TestMalformedConnect: what makes an extended CONNECT malformed costs its stream alone (RFC 8441 4, RFC 9113 8.5).
func TestMalformedConnect(t *testing.T) {
	for _, fields := range [][]string{
		{":method", "CONNECT", ":protocol", "foo", ":scheme", "http", ":path", "/"},                                         // no authority
		{":method", "CONNECT", ":protocol", "foo", ":path", "/", ":authority", "a"},                                         // no scheme
		{":method", "CONNECT", ":protocol", "foo", ":scheme", "http", ":authority", "a"},                                    // no path
		{":method", "CONNECT", ":protocol", "foo", ":scheme", "http", ":path", "*", ":authority", "a"},                      // OPTIONS alone has this
		{":method", "GET", ":protocol", "foo", ":scheme", "http", ":path", "/", ":authority", "a"},                          // not CONNECT
		{":method", "CONNECT", ":protocol", "foo", ":protocol", "foo", ":scheme", "http", ":path", "/", ":authority", "a"},  // twice
		{":method", "CONNECT", ":scheme", "http", ":path", "/", ":authority", "a", "x", "y", ":protocol", "foo"},            // late
		{":method", "CONNECT", ":protocol", "foo", ":scheme", "http", ":path", "/", ":authority", "a", "upgrade", "foo"},    // RFC 9113 8.2.2
		{":method", "CONNECT", ":protocol", "foo", ":scheme", "http", ":path", "/", ":authority", "a", "connection", "x"},   // the same
		{":method", "CONNECT", ":protocol", "foo", ":scheme", "http", ":path", "/", ":authority", "a", "host", "elsewhere"}, // two names
	} {
		w := newWire(t, Config{Server: true, EnableConnect: true})
		w.head(1, false, fields...)
		w.want("", "")
		w.sends("RST_STREAM 1 PROTOCOL_ERROR")
		w.head(3, false, ":method", "CONNECT", ":protocol", "foo", ":scheme", "http", ":path", "/", ":authority", "a")
		w.want("3 head CONNECT http://a/ upgrade=foo len=-1", "")
	}
	t.Run("a response with :protocol", func(t *testing.T) {
		w := newWire(t, Config{}, oracle.Setting{ID: 8, Val: 1})
		connect(t, w)
		w.head(1, false, ":status", "200", ":protocol", "foo")
		w.want("1 reset PROTOCOL_ERROR", "")
	})
	t.Run("a response of 101", func(t *testing.T) {
		w := newWire(t, Config{}, oracle.Setting{ID: 8, Val: 1})
		connect(t, w)
		w.head(1, false, ":status", "101")
		w.want("1 reset PROTOCOL_ERROR", "")
	})
}

// connect sends an extended CONNECT on stream 1.
func connect(t *testing.T, w *wire) *Stream {
	t.Helper()
	s, err := w.c.Open()
	if err != nil {
		t.Fatal(err)
	}
	s.WriteHead(&httpmsg.Head{Method: []byte("CONNECT"), Authority: []byte("a"), Path: []byte("/"), Upgrade: []byte("foo")}, false)
	w.sends("HEADERS 1 :method=CONNECT :scheme=http :authority=a :path=/ :protocol=foo")
	return s
}

// TestTunnelFrames: a tunnel is DATA both ways, each with its own end, and nothing else (RFC 9113 8.5).
func TestTunnelFrames(t *testing.T) {
	t.Run("server: trailers", func(t *testing.T) {
		w := newWire(t, Config{Server: true, EnableConnect: true})
		w.head(1, false, ":method", "CONNECT", ":protocol", "foo", ":scheme", "http", ":path", "/", ":authority", "a", "content-length", "3")
		w.WriteData(1, false, []byte("more than three"))
		w.head(1, true, "x", "y")
		w.want("1 head CONNECT http://a/ upgrade=foo len=-1 content-length=\"3\"\n1 data \"more than three\"\n1 reset PROTOCOL_ERROR", "")
		w.sends("RST_STREAM 1 PROTOCOL_ERROR")
	})
	t.Run("client: trailers where it was granted", func(t *testing.T) {
		w := newWire(t, Config{}, oracle.Setting{ID: 8, Val: 1})
		connect(t, w)
		w.head(1, false, ":status", "103")
		w.head(1, false, ":status", "200")
		w.WriteData(1, false, []byte("hello"))
		w.head(1, true, "x", "y")
		w.want("1 head 103 len=0\n1 head 200 len=-1\n1 data \"hello\"\n1 reset PROTOCOL_ERROR", "")
		w.sends("RST_STREAM 1 PROTOCOL_ERROR")
	})
	t.Run("client: trailers where it was declined", func(t *testing.T) {
		w := newWire(t, Config{}, oracle.Setting{ID: 8, Val: 1})
		s := connect(t, w)
		w.head(1, false, ":status", "403")
		w.WriteData(1, false, []byte("no"))
		w.head(1, true, "x", "y")
		w.want("1 head 403 len=-1\n1 data \"no\"\n1 trailers x=\"y\"", "")
		s.WriteData(nil, true)
		w.sends("DATA 1 0 end")
	})
	t.Run("half-closed, the server's side goes on", func(t *testing.T) {
		w := newWire(t, Config{Server: true, EnableConnect: true})
		w.head(1, false, ":method", "CONNECT", ":protocol", "foo", ":scheme", "http", ":path", "/", ":authority", "a")
		w.want("1 head CONNECT http://a/ upgrade=foo len=-1", "")
		s := w.h.streams[1]
		s.WriteHead(&httpmsg.Head{Status: 200}, false)
		w.WriteData(1, true, nil)
		w.want("1 data \"\"\n1 end", "")
		s.WriteData([]byte("late"), false)
		s.WriteData(nil, true)
		w.sends("HEADERS 1 :status=200\nDATA 1 4\nDATA 1 0 end")
		if w.c.Streams() != 0 {
			t.Error("the stream is not over")
		}
	})
}
