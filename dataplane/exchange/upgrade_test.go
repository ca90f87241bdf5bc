package exchange_test

import (
	"strings"
	"testing"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

func TestTunnelProtocol(t *testing.T) {
	for list, want := range map[string]string{
		"websocket": "websocket", "WebSocket": "websocket", " websocket\t": "websocket", "foo": "foo", "Foo/2.0": "Foo/2.0",
		"h2c, websocket": "websocket", "foo, websocket": "foo", ",, foo": "foo", "TLS/1.0, foo": "foo", "HTTP/3,foo/1": "foo/1",
		"h2c": "", "H2C": "", "h2": "", "h2/1": "", "h2c-17": "h2c-17", "TLS/1.0": "", "tls": "", "HTTP/2.0": "", "http": "", "": "", ",": "", " ": "",
		"a b": "", "a b, c": "c", "a/b/c": "", "/1": "", "a/": "", "a\x00": "", "\"q\"": "",
	} {
		if got := string(exchange.TunnelProtocol([]byte(list))); got != want {
			t.Errorf("%q: %q, want %q", list, got, want)
		}
	}
}

// TestTunnelSequences: what an exchange says to both streams when a tunnel is asked for.
// Length 0 is how HTTP/1.1 asks, Unknown how extended CONNECT does.
func TestTunnelSequences(t *testing.T) {
	ask := func(length int64) *httpmsg.Head {
		return &httpmsg.Head{Method: []byte("GET"), Path: []byte("/"), Length: length, Minor: 1, Upgrade: []byte("foo")}
	}
	t.Run("ended with its head", func(t *testing.T) { // END_STREAM on an extended CONNECT
		down, up := &tape{room: 100}, &tape{room: 100}
		s := &script{request: func(x *exchange.Exchange) { x.Forward(up) }}
		x := (&exchange.Pool{Service: s}).Begin(down, ask(0), true, nil, 0)
		x.Begin()
		x.ResponseHead(&httpmsg.Head{Status: 101}, false)
		if got, want := strings.Join(up.said, ", "), "head GET len= end=false, data  end=true"; got != want {
			t.Errorf("up\n got %s\nwant %s", got, want)
		}
	})
	grant := &httpmsg.Head{Status: 101, Upgrade: []byte("foo")}
	for _, tt := range []struct {
		name     string
		h        *httpmsg.Head
		play     func(x *exchange.Exchange)
		down, up string
		done     int
	}{
		{"granted, both ways, the client ends first", ask(0), func(x *exchange.Exchange) {
			x.ResponseHead(grant, false)
			x.RequestData([]byte("to"), false)
			x.ResponseData([]byte("fro"), false)
			x.RequestData(nil, true)
			x.ResponseData([]byte("late"), false)
			x.ResponseData(nil, true)
		}, "resume, head 101 len= end=false, data fro end=false, data late end=false, data  end=true", "head GET len= end=false, data to end=false, data  end=true", 1},
		{"granted, the application ends first", ask(0), func(x *exchange.Exchange) {
			x.ResponseHead(grant, false)
			x.ResponseData([]byte("fro"), true)
			if x.Over() || !x.Tunnel() {
				t.Error("over with one direction")
			}
			x.RequestData([]byte("to"), false)
			x.RequestData(nil, true)
		}, "resume, head 101 len= end=false, data fro end=true", "head GET len= end=false, data to end=false, data  end=true", 1},
		{"bytes ahead of the answer wait for it", ask(httpmsg.Unknown), func(x *exchange.Exchange) {
			if n := x.RequestData([]byte("early"), false); n != 0 {
				t.Errorf("%d bytes taken", n)
			}
			if !x.Replayable() {
				t.Error("not replayable")
			}
			x.ResponseHead(grant, false)
		}, "resume, head 101 len= end=false, resume", "head GET len= end=false", 0},
		{"an end ahead of the answer is passed on with it", ask(httpmsg.Unknown), func(x *exchange.Exchange) {
			x.RequestData(nil, true)
			x.ResponseHead(grant, false)
			x.ResponseData([]byte("fro"), true)
		}, "resume, head 101 len= end=false, data fro end=true", "head GET len= end=false, data  end=true", 1},
		{"declined over HTTP/1.1: an ordinary response, at a clean end", ask(0), func(x *exchange.Exchange) {
			x.ResponseHead(&httpmsg.Head{Status: 200, Length: httpmsg.Unknown}, false)
			if x.AsksTunnel() || x.Tunnel() {
				t.Error("still a tunnel")
			}
			x.ResponseData([]byte("no"), true)
		}, "resume, head 200 len= end=false, data no end=true", "head GET len= end=false, data  end=true", 1},
		{"declined over HTTP/2: the client's stream is not at its end", ask(httpmsg.Unknown), func(x *exchange.Exchange) {
			x.ResponseHead(&httpmsg.Head{Status: 403}, true)
		}, "resume, head 403 len= end=true, abort no-error", "head GET len= end=false, data  end=true", 1},
		{"answered by the service", ask(0), func(x *exchange.Exchange) {
			x.Reply(&httpmsg.Head{Status: 403}, nil)
		}, "resume, head 403 len=0 end=true", "head GET len= end=false, abort cancel", 1},
		{"the upstream is lost before the answer, and another asked", ask(0), func(x *exchange.Exchange) {
			x.UpstreamClosed(exchange.Refused)
			x.Forward(&tape{})
			x.ResponseHead(grant, false)
			if !x.Tunnel() {
				t.Error("no tunnel")
			}
		}, "resume, resume, head 101 len= end=false", "head GET len= end=false", 0},
		{"the client is lost", ask(0), func(x *exchange.Exchange) {
			x.ResponseHead(grant, false)
			x.DownstreamClosed(exchange.Cancel)
		}, "resume, head 101 len= end=false", "head GET len= end=false, abort cancel", 1},
		{"the application is lost", ask(0), func(x *exchange.Exchange) {
			x.ResponseHead(grant, false)
			x.UpstreamClosed(exchange.Closed)
		}, "resume, head 101 len= end=false, abort closed", "head GET len= end=false", 1},
		{"a second 101 is none", ask(0), func(x *exchange.Exchange) {
			x.ResponseHead(&httpmsg.Head{Status: 103}, false)
			x.ResponseHead(&httpmsg.Head{Status: 200, Length: httpmsg.Unknown}, false)
			x.ResponseHead(grant, false)
		}, "resume, head 103 len= end=false, head 200 len= end=false", "head GET len= end=false, data  end=true", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			down, up := &tape{room: 100}, &tape{room: 100}
			s := &script{request: func(x *exchange.Exchange) { x.Forward(up) }, failed: func(x *exchange.Exchange, _ exchange.Code) { x.Park() }}
			p := &exchange.Pool{Service: s}
			x := p.Begin(down, tt.h, false, nil, 0)
			x.Begin()
			tt.play(x)
			if got := strings.Join(down.said, ", "); got != tt.down {
				t.Errorf("down\n got %s\nwant %s", got, tt.down)
			}
			if got := strings.Join(up.said, ", "); got != tt.up {
				t.Errorf("up\n got %s\nwant %s", got, tt.up)
			}
			if s.done != tt.done {
				t.Errorf("Done %d times, want %d", s.done, tt.done)
			}
		})
	}
}
