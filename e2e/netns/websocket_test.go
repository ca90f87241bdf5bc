package netns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/coder/websocket"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"aether/e2e/mesh"
)

// socketAt serves f with each WebSocket that a client opens at the path it returns.
func socketAt(t testing.TB, f func(ctx context.Context, c *websocket.Conn)) (path string) {
	return w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{"chat"}})
		if err != nil {
			return
		}
		defer c.CloseNow()
		c.SetReadLimit(64 << 20)
		f(r.Context(), c)
	})
}

// socket opens a WebSocket from web to app.
func socket(t testing.TB, ctx context.Context, path string) *websocket.Conn {
	t.Helper()
	c, res, err := websocket.Dial(ctx, fmt.Sprintf("ws://%s:%d%s", appName, portH1, path), &websocket.DialOptions{
		HTTPClient:   &http.Client{Transport: mesh.HTTP1(w.Pod("web"), vip(appVIP, portH1))},
		Subprotocols: []string{"chat"},
	})
	if err != nil {
		t.Fatalf("%v (%v)", err, res)
	}
	t.Cleanup(func() { c.CloseNow() })
	c.SetReadLimit(64 << 20)
	if res.StatusCode != 101 || c.Subprotocol() != "chat" || res.Header.Get("X-Aether-Outcome") != "" {
		t.Errorf("handshake: %s %v", res.Status, res.Header)
	}
	return c
}

// TestWebSocket: an independent client and server, two proxies and a hop between them: what is
// said comes back, text and binary, from nothing to 16 MiB, whole or in many frames.
func TestWebSocket(t *testing.T) {
	t.Parallel()
	ctx := within(t, 2*patience)
	path := socketAt(t, func(ctx context.Context, c *websocket.Conn) {
		for {
			kind, b, err := c.Read(ctx)
			if err != nil || c.Write(ctx, kind, b) != nil {
				return
			}
		}
	})
	c := socket(t, ctx, path)
	for _, m := range []struct {
		kind   websocket.MessageType
		b      []byte
		frames int
	}{
		{websocket.MessageText, nil, 1},
		{websocket.MessageText, []byte("grüß dich"), 1},
		{websocket.MessageBinary, []byte{0, 1, 0xff, '\r', '\n', '\r', '\n'}, 1},
		{websocket.MessageBinary, blob(1 << 20), 7},
		{websocket.MessageText, []byte(strings.Repeat("fragment ", 1000)), 1000},
		{websocket.MessageBinary, blob(16 << 20), 1},
	} {
		var sent sync.WaitGroup
		sent.Go(func() {
			wr, err := c.Writer(ctx, m.kind)
			if err != nil {
				t.Error(err)
				return
			}
			for b, n := m.b, len(m.b)/m.frames+1; len(b) > 0; b = b[min(n, len(b)):] {
				wr.Write(b[:min(n, len(b))])
			}
			if err := wr.Close(); err != nil {
				t.Error(err)
			}
		})
		kind, b, err := c.Read(ctx)
		sent.Wait()
		if err != nil || kind != m.kind || !bytes.Equal(b, m.b) {
			t.Fatalf("%v of %d bytes in %d frames: %v of %d bytes came back, %v", m.kind, len(m.b), m.frames, kind, len(b), err)
		}
	}
	c.CloseRead(ctx) // so that pongs are seen
	if err := c.Ping(ctx); err != nil {
		t.Errorf("ping: %v", err)
	}
}

// TestWebSocketClose: the code and the reason of a close frame reach the other side, whichever closes.
func TestWebSocketClose(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	got := make(chan error, 1)
	path := socketAt(t, func(ctx context.Context, c *websocket.Conn) {
		_, b, err := c.Read(ctx)
		if err == nil && string(b) == "close" {
			got <- c.Close(4321, "enough")
			return
		}
		got <- err
	})
	c := socket(t, ctx, path)
	if err := c.Close(websocket.StatusGoingAway, "leaving"); err != nil {
		t.Errorf("close: %v", err)
	}
	var ce websocket.CloseError
	if err := recv(t, ctx, got, "the client's close"); !errors.As(err, &ce) || ce.Code != websocket.StatusGoingAway || ce.Reason != "leaving" {
		t.Errorf("the application saw %v", err)
	}
	c = socket(t, ctx, path)
	if err := c.Write(ctx, websocket.MessageText, []byte("close")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Read(ctx); !errors.As(err, &ce) || ce.Code != 4321 || ce.Reason != "enough" {
		t.Errorf("the client saw %v", err)
	}
	if err := recv(t, ctx, got, "the application's close"); err != nil {
		t.Errorf("the application's close: %v", err)
	}
}

// TestWebSocketDeath: a side that dies without a word takes the other with it.
func TestWebSocketDeath(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	const open = "GET %s HTTP/1.1\r\nHost: app\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
	const taken = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
	died := make(chan error, 1)
	path := w.raw.at(t, func(q rawRequest) {
		io.WriteString(q.c, taken)
		if strings.Contains(q.head, "?die") {
			q.r.ReadByte()
			q.c.SetLinger(0)
			q.c.Close()
			return
		}
		_, err := io.Copy(io.Discard, q.r)
		died <- err
		q.c.Close()
	})
	c := dialH1(t, ctx, portRaw)
	c.send(open, path)
	if a, err := http.ReadResponse(c.r, nil); err != nil || a.StatusCode != 101 {
		t.Fatalf("%v, %v", a, err)
	}
	c.SetLinger(0)
	c.Close()
	if err := recv(t, ctx, died, "the end of the application's connection"); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client died; the application's connection ended with %v", err)
	}
	c = dialH1(t, ctx, portRaw)
	c.send(open, path+"?die")
	if a, err := http.ReadResponse(c.r, nil); err != nil || a.StatusCode != 101 {
		t.Fatalf("%v, %v", a, err)
	}
	c.send("x")
	if _, err := c.r.ReadByte(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the application died; the client's connection ended with %v", err)
	}
}

// TestUpgradeJudged: an upgrade is a GET to routes and to the application, with the caller's identity; and
// an application that declines it is heard.
func TestUpgradeJudged(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusUpgradeRequired)
		fmt.Fprintf(w, "%s %s %s %v %v %v", r.Method, r.Header.Get("Connection"), r.Header.Get("Upgrade"),
			strings.Contains(r.Header.Get("X-Forwarded-Client-Cert"), "/sa/web"), len(r.Header.Get("X-Request-Id")), r.Header["X-Aether-Outcome"])
	})
	c := dialH1(t, ctx, portH1)
	for range 2 { // on one connection
		c.send("GET %s HTTP/1.1\r\nHost: app\r\nConnection: Upgrade\r\nUpgrade: foo\r\n\r\n", path)
		if a := c.response("GET"); a.StatusCode != 426 || a.body != "GET Upgrade foo true 36 []" || a.Header.Get("X-Aether-Outcome") != "" {
			t.Errorf("%s %q %v", a.Status, a.body, a.Header)
		}
	}
}

// TestCase74: one port carries HTTP/2 with prior knowledge and WebSocket over HTTP/1.1; what comes is decided by the connection.
// Where the application declares HTTP/2 it must announce extended CONNECT: this one does not, and an
// upgrade to it is refused by name.
func TestCase74(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	path := socketAt(t, func(ctx context.Context, c *websocket.Conn) { c.Write(ctx, websocket.MessageText, []byte("socket")) })
	if a := mustSend(t, ctx, transport(t, true, w.Pod("web"), vip(appVIP, portH1)), "GET", appName, path, nil); a.StatusCode != http.StatusUpgradeRequired {
		t.Errorf("h2c: %s %q", a.Status, a.body)
	}
	c := socket(t, ctx, path)
	if _, b, err := c.Read(ctx); err != nil || string(b) != "socket" {
		t.Errorf("%q, %v", b, err)
	}
	h := dialH1(t, ctx, portH2)
	h.send("GET %s HTTP/1.1\r\nHost: app\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", path)
	if a := h.response("GET"); a.StatusCode != 501 || !strings.Contains(a.body, "upgrade-not-supported") || !strings.Contains(a.body, "port 8081") {
		t.Errorf("an application without extended CONNECT: %s %q", a.Status, a.body)
	}
}

// TestCase30: CONNECT to the mesh is 404 and no tunnel, whatever the client speaks.
func TestCase30(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	c := dialH1(t, ctx, portH1)
	c.send("CONNECT app:8080 HTTP/1.1\r\nHost: app:8080\r\n\r\n")
	if a := c.response("GET"); a.StatusCode != 404 {
		t.Errorf("HTTP/1.1: %s", a.Status)
	}
	rt := transport(t, true, w.Pod("web"), vip(appVIP, portH1))
	req, err := http.NewRequestWithContext(ctx, "CONNECT", "http://app:8080", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := rt.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != 404 {
		t.Errorf("HTTP/2: %s", res.Status)
	}
}

// TestCase26And198: an early final answer to Expect reaches the client while it holds its body back, of which no
// byte is read, for every pair of codecs; and the connection's state is clear: over HTTP/2 it goes on, HTTP/1's says that it
// closes, and does.
func TestCase26And198(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, ctx context.Context, rt *http.Transport, host string) {
		path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.RawQuery == "next" {
				io.WriteString(w, "next")
				return
			}
			http.NewResponseController(w).EnableFullDuplex()
			if r.Header.Get("Expect") != "100-continue" && r.ProtoMajor == 1 {
				t.Error("no Expect")
			}
			var code int
			fmt.Sscan(r.URL.RawQuery, &code)
			w.WriteHeader(code)
			io.WriteString(w, "no need")
		})
		_, port, _ := strings.Cut(host, ":")
		h1 := rt.Protocols == nil
		rt.ExpectContinueTimeout = patience // the body does not go by the clock
		for _, code := range []int{417, 200, 401} {
			if h1 { // net/http's client of HTTP/1 sends the body after any answer
				var n int
				fmt.Sscan(port, &n)
				c := dialH1(t, ctx, n)
				c.send("POST %s?%d HTTP/1.1\r\nHost: %s\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n", path, code, host)
				if a := c.response("POST"); a.StatusCode != code || a.body != "no need" || !a.Close {
					t.Errorf("%d: got %d %q, and the connection closes: %v", code, a.StatusCode, a.body, a.Close)
				}
				c.ended() // a request without its body has no end after which another could begin
				continue
			}
			body := &heldBack{}
			a := mustSend(t, ctx, rt, "POST", host, fmt.Sprint(path, "?", code), body, "Expect", "100-continue")
			if a.StatusCode != code || a.body != "no need" || body.read.Load() {
				t.Errorf("%d: got %d %q, body read: %v", code, a.StatusCode, a.body, body.read.Load())
			}
			if a := mustSend(t, ctx, rt, "GET", host, path+"?next", nil); a.body != "next" {
				t.Errorf("then %d %q", a.StatusCode, a.body)
			}
		}
	})
}

// TestCase195: an interim head on a gRPC call is no final one: the call goes on to its status.
func TestCase195(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	const method = "/aether.test.Hints/Say"
	w.app.m.Store(method, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Link", "</x>; rel=preload")
		w.WriteHeader(103)
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Trailer", "Grpc-Status")
		w.WriteHeader(200)
		w.Write([]byte{0, 0, 0, 0, 0}) // an empty message
		w.Header().Set("Grpc-Status", "0")
	}))
	t.Cleanup(func() { w.app.m.Delete(method) })
	cc := grpcClient(t, w.Pod("web"), vip(appVIP, portH2), fmt.Sprintf("%s:%d", appName, portH2))
	for range 2 {
		var out healthpb.HealthCheckRequest
		if err := cc.Invoke(ctx, method, &healthpb.HealthCheckRequest{Service: "x"}, &out); err != nil {
			t.Errorf("the call ended with %v", err)
		}
	}
}

// heldBack is a body that tells whether it was asked for.
type heldBack struct{ read atomic.Bool }

func (h *heldBack) Read([]byte) (int, error) {
	h.read.Store(true)
	return 0, io.EOF
}
