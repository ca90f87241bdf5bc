package engine

//lint:file-ignore SA1019 x/net/http2 is the other implementation that these tests hold ours against: net/http asks for no tunnel.

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/http2"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
	"aether/mtls/record"
	"aether/tproxy/socket"

	oracle "golang.org/x/net/http2"
)

// withConnect runs the test in a process whose net/http speaks extended CONNECT, the
// other implementation of it; false: this one is not it, and the test is over.
func withConnect(t *testing.T) bool {
	t.Helper()
	const on = "http2xconnect=1"
	if strings.Contains(os.Getenv("GODEBUG"), on) {
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), "GODEBUG="+on)
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

// tunnel is a client's end of one, or an application's.
type tunnel struct {
	io.Reader
	write func(p []byte) error
	end   func()
	cut   func()
	res   *http.Response
}

// askH1 asks for an upgrade by hand.
func askH1(t testing.TB, addr, head string) (*http.Response, *net.TCPConn, *bufio.Reader) {
	t.Helper()
	c := dial(t, addr)
	io.WriteString(c, head)
	br := bufio.NewReader(c)
	res, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	return res, c, br
}

func upgradeHead(protocol string, more ...string) string {
	return "GET /chat?x=1 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: " + protocol + "\r\n" + strings.Join(more, "") + "\r\n"
}

// openH1 opens a tunnel as an HTTP/1.1 client.
func openH1(t testing.TB, addr, protocol string, more ...string) *tunnel {
	t.Helper()
	res, c, br := askH1(t, addr, upgradeHead(protocol, more...))
	return &tunnel{
		Reader: br, res: res,
		write: func(p []byte) error { _, err := c.Write(p); return err },
		end:   func() { c.CloseWrite() },
		cut:   func() { reset(c); c.Close() },
	}
}

// openH2 asks for a tunnel as x/net/http2's client does.
func openH2(t testing.TB, addr, protocol string, more ...string) *tunnel {
	t.Helper()
	tr := &oracle.Transport{AllowHTTP: true, DialTLSContext: func(ctx context.Context, _, _ string, _ *tls.Config) (net.Conn, error) {
		return to(addr)(ctx, "", "")
	}}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	r, w := io.Pipe()
	req, _ := http.NewRequestWithContext(ctx, "CONNECT", "http://a/chat?x=1", r)
	req.Header[":protocol"] = []string{protocol}
	for _, f := range more {
		name, value, _ := strings.Cut(strings.TrimSpace(f), ": ")
		req.Header.Set(name, value)
	}
	res, err := tr.RoundTrip(req)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); w.Close(); res.Body.Close(); tr.CloseIdleConnections() })
	return &tunnel{
		Reader: res.Body, res: res,
		write: func(p []byte) error { _, err := w.Write(p); return err },
		end:   func() { w.Close() },
		cut:   func() { w.CloseWithError(errors.New("cut")) },
	}
}

// asked is what an application saw of a request for an upgrade.
type asked struct {
	line   string
	header http.Header
}

// appH1 takes each upgrade by HTTP/1.1 and gives serve the connection.
func (s *stage) appH1(seen chan<- asked, serve func(c *net.TCPConn, br *bufio.Reader)) netip.AddrPort {
	return s.app(func(c *net.TCPConn) {
		br := bufio.NewReader(c)
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		if seen != nil {
			seen <- asked{req.Method + " " + req.RequestURI + " " + req.Host, req.Header}
		}
		accept := ""
		if k := req.Header.Get("Sec-Websocket-Key"); k != "" {
			accept = "Sec-WebSocket-Accept: " + string(wsAccept([]byte(k))) + "\r\n"
		}
		fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n%s\r\n", req.Header.Get("Upgrade"), accept)
		serve(c, br)
	})
}

// echoBye sends back what it gets, says bye, and ends.
func echoBye(c *net.TCPConn, br *bufio.Reader) {
	io.Copy(c, br)
	io.WriteString(c, "bye")
}

// appH2 is echoBye over HTTP/2.
func (s *stage) appH2(seen chan<- asked) netip.AddrPort {
	s.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	srv := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if seen != nil {
			seen <- asked{r.Method + " " + r.RequestURI + " " + r.Host, r.Header.Clone()}
		}
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		buf := make([]byte, 32<<10)
		for {
			n, err := r.Body.Read(buf)
			if n > 0 {
				w.Write(buf[:n])
				w.(http.Flusher).Flush()
			}
			if err != nil {
				break
			}
		}
		io.WriteString(w, "bye")
	})}
	srv.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() { defer close(done); srv.Serve(ln) }()
	s.t.Cleanup(func() { srv.Close(); <-done })
	return netip.MustParseAddrPort(ln.Addr().String())
}

// TestTunnels: every pair of codecs, at one proxy and over a hop: the application
// sees a GET (or an extended CONNECT), a megabyte is echoed, and each direction ends by itself.
func TestTunnels(t *testing.T) {
	if !withConnect(t) {
		return
	}
	for _, hop := range []bool{false, true} {
		for _, down2 := range []bool{false, true} {
			for _, up2 := range []bool{false, true} {
				t.Run(fmt.Sprintf("hop %v, client h2 %v, application h2 %v", hop, down2, up2), func(t *testing.T) {
					seen := make(chan asked, 1)
					var addr string
					var services []*svc
					if hop {
						m := newMesh(t, Config{}, netip.AddrPort{})
						if m.in.to = m.appH1(seen, echoBye); up2 {
							m.in.to, m.in.h2 = m.appH2(seen), true
						}
						if addr = m.h1; down2 {
							addr = m.h2
						}
						services = []*svc{m.out, m.in}
					} else {
						s := newStage(t, Config{})
						pod := s.e.AddPod("p")
						v := &svc{pod: pod, to: s.appH1(seen, echoBye)}
						if up2 {
							v.to, v.h2 = s.appH2(seen), true
						}
						addr = s.front(pod, v, down2)
						services = []*svc{v}
					}
					open, status := openH1, 101
					if down2 {
						open, status = openH2, 200
					}
					for range 2 {
						c := open(t, addr, "foo/2")
						if c.res.StatusCode != status || !down2 && c.res.Header.Get("Upgrade") != "foo/2" || c.res.Header.Get("Transfer-Encoding") != "" {
							t.Fatalf("%s %v", c.res.Status, c.res.Header)
						}
						got := <-seen
						want := "GET /chat?x=1 a"
						token := got.header.Get("Upgrade")
						if up2 {
							want, token = "CONNECT /chat?x=1 a", got.header.Get(":protocol")
						}
						if got.line != want || token != "foo/2" {
							t.Errorf("the application saw %s, protocol %q, want %s", got.line, token, want)
						}
						sent := make([]byte, 1<<20)
						rand.NewChaCha8([32]byte{1}).Read(sent)
						var wg sync.WaitGroup
						wg.Go(func() {
							for b := sent; len(b) > 0; b = b[min(len(b), 10_000):] {
								if err := c.write(b[:min(len(b), 10_000)]); err != nil {
									t.Error(err)
									return
								}
							}
							c.end()
						})
						back, err := io.ReadAll(c)
						wg.Wait()
						if err != nil || sha256.Sum256(back) != sha256.Sum256(append(sent, "bye"...)) {
							t.Errorf("%d bytes came back, %v; want what was sent, and bye", len(back), err)
						}
					}
					for _, v := range services {
						eventually(t, "every exchange is done", func() bool { return v.done.Load() == 2 })
						if how := *v.last.Load(); how != "complete no-error 101" {
							t.Errorf("it ended as %q", how)
						}
					}
				})
			}
		}
	}
}

// TestTunnelHead (cases 31 and 32): nothing frames a 101, and what a handshake says is spelled as
// RFC 6455 spells it, for those that compare letter by letter.
func TestTunnelHead(t *testing.T) {
	heads := make(chan string, 1)
	m := newMesh(t, Config{}, netip.AddrPort{})
	m.in.to = m.app(func(c *net.TCPConn) {
		br := bufio.NewReader(c)
		var b strings.Builder
		for !strings.HasSuffix(b.String(), "\r\n\r\n") {
			line, err := br.ReadString('\n')
			if err != nil {
				return
			}
			b.WriteString(line)
		}
		heads <- b.String()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nupgrade: WebSocket\r\nconnection: upgrade\r\ntransfer-encoding: chunked\r\nsec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nsec-websocket-protocol: chat\r\nx-more: 1\r\n\r\nat once")
	})
	c := dial(t, m.h1)
	io.WriteString(c, upgradeHead("websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", "Sec-WebSocket-Version: 13\r\n", "Sec-WebSocket-Protocol: chat\r\n", "Origin: http://b\r\n"))
	want := "HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Protocol: chat\r\nx-more: 1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nat once"
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		t.Errorf("the client got %q, %v\nwant %q", got, err, want)
	}
	want = "GET /chat?x=1 HTTP/1.1\r\nHost: a\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: chat\r\norigin: http://b\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
	if got := <-heads; got != want {
		t.Errorf("the application got %q\nwant %q", got, want)
	}
}

// TestDeclined (case 47): an upgrade that the application declines is an ordinary response,
// over a hop too, where a 2xx would grant it; and the client's connection goes on.
func TestDeclined(t *testing.T) {
	if !withConnect(t) {
		return
	}
	m := newMesh(t, Config{}, netip.AddrPort{})
	m.in.to = m.app(func(c *net.TCPConn) {
		br := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(br)
			if err != nil {
				return
			}
			switch how := req.Header.Get("X-How"); how {
			case "204":
				fmt.Fprint(c, "HTTP/1.1 204 No Content\r\n\r\n")
			case "trailers":
				fmt.Fprint(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\nx-sum: 1\r\n\r\n")
			default:
				fmt.Fprintf(c, "HTTP/1.1 %s Status\r\nContent-Length: 2\r\nX-Upgrade: %s\r\nX-Aether-Declined: 299\r\n\r\nno", how, req.Header.Get("Upgrade"))
			}
		}
	})
	c := dial(t, m.h1)
	br := bufio.NewReader(c)
	for _, how := range []string{"200", "201", "204", "206", "trailers", "304", "403", "426", "502", "503"} {
		io.WriteString(c, upgradeHead("foo", "X-How: "+how+"\r\n"))
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatalf("%s: %v", how, err)
		}
		b, err := io.ReadAll(res.Body)
		status, body := how, "no"
		switch how {
		case "204", "304":
			body = ""
		case "trailers":
			status = "200"
			if res.Trailer.Get("X-Sum") != "1" {
				t.Errorf("trailers %v", res.Trailer)
			}
		}
		if err != nil || fmt.Sprint(res.StatusCode) != status || string(b) != body || res.Close {
			t.Errorf("%s: got %s %q, %v", how, res.Status, b, err)
		}
		if up := res.Header.Get("X-Upgrade"); body != "" && how != "trailers" && up != "foo" {
			t.Errorf("%s: the application was asked for %q", how, up)
		}
	}
	// A client of HTTP/2 must not take a 2xx for a grant.
	for how, want := range map[string]string{"200": "502 200", "204": "502 204", "403": "403 ", "503": "503 "} {
		c := openH2(t, m.h2, "foo", "X-How: "+how)
		if got := fmt.Sprint(c.res.StatusCode, " ", c.res.Header.Get("X-Aether-Declined")); got != want {
			t.Errorf("%s over HTTP/2: got %s, want %s", how, got, want)
		}
		b, err := io.ReadAll(c)
		if err != nil || how != "204" && string(b) != "no" {
			t.Errorf("%s over HTTP/2: %q, %v", how, b, err)
		}
		c.end()
	}
	eventually(t, "every exchange is done", func() bool {
		return m.out.begun.Load() == m.out.done.Load() && m.in.begun.Load() == m.in.done.Load()
	})
	if n := m.out.begun.Load(); n != 14 {
		t.Errorf("%d requests, want 14", n)
	}
}

// TestNoUpgrade (case 47): what may not be carried as an upgrade is an ordinary request
// without one, its body read as it is framed; of several protocols the first that may be carried is.
func TestNoUpgrade(t *testing.T) {
	m := newMesh(t, Config{}, netip.AddrPort{})
	seen := make(chan string, 1)
	m.in.to = m.app(func(c *net.TCPConn) {
		br := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(br)
			if err != nil {
				return
			}
			b, _ := io.ReadAll(req.Body)
			seen <- fmt.Sprintf("%s upgrade=%q connection=%q %s", req.Method, req.Header["Upgrade"], req.Header["Connection"], b)
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
	})
	c := dial(t, m.h1)
	br := bufio.NewReader(c)
	for _, tt := range []struct{ ask, want string }{
		{upgradeHead("foo", "Content-Length: 9\r\n") + "nine byte", "GET upgrade=[] connection=[] nine byte"},
		{upgradeHead("foo", "Transfer-Encoding: chunked\r\n") + "2\r\nhi\r\n0\r\n\r\n", "GET upgrade=[] connection=[] hi"},
		{strings.Replace(upgradeHead("foo", "Content-Length: 0\r\n"), "GET", "POST", 1), "POST upgrade=[] connection=[] "},
		{upgradeHead("foo", "Content-Length: 0\r\n"), `GET upgrade=["foo"] connection=["Upgrade"] `},
		{upgradeHead("h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"), "GET upgrade=[] connection=[] "},
		{upgradeHead("TLS/1.2"), "GET upgrade=[] connection=[] "},
		{upgradeHead("HTTP/2.0"), "GET upgrade=[] connection=[] "},
		{upgradeHead("websocket"), "GET upgrade=[] connection=[] "}, // no key: the application says 400, or 426
		{upgradeHead("h2c, Bar/1, baz"), `GET upgrade=["Bar/1"] connection=["Upgrade"] `},
		{strings.Replace(upgradeHead("foo"), "Connection: Upgrade", "Connection: close", 1), "GET upgrade=[] connection=[] "}, // the last: it closes
	} {
		io.WriteString(c, tt.ask)
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatalf("%q: %v", tt.ask, err)
		}
		if b, _ := io.ReadAll(res.Body); res.StatusCode != 200 || string(b) != "ok" {
			t.Errorf("%q: %s %q", tt.ask, res.Status, b)
		}
		if got := <-seen; got != tt.want {
			t.Errorf("%q: the application saw\n%s, want\n%s", tt.ask, got, tt.want)
		}
	}
}

// TestNotGranted: a 101 that does not say what was asked is no answer, and
// none of its bytes reach the client.
func TestNotGranted(t *testing.T) {
	if !withConnect(t) {
		return
	}
	for _, answer := range []string{
		"Connection: upgrade\r\nUpgrade: bar\r\n", "", "Upgrade: websocket, foo\r\n", "Upgrade: foo\r\nUpgrade: foo\r\n",
		"Upgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n", "Upgrade: websocket\r\n",
	} {
		m := newMesh(t, Config{}, netip.AddrPort{})
		m.in.to = m.app(heads(func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\n"+answer+"\r\nHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
			return true
		}))
		if !strings.Contains(answer, "websocket\r\n") {
			res, c, br := askH1(t, m.h1, upgradeHead("foo"))
			if b, _ := io.ReadAll(res.Body); res.StatusCode != 503 || string(b) != "protocol" {
				t.Errorf("%q: %s %q", answer, res.Status, b)
			}
			if n := br.Buffered(); n != 0 {
				t.Errorf("%q: %d bytes follow", answer, n)
			}
			c.Close()
			continue
		}
		if c := openH2(t, m.h2, "websocket"); c.res.StatusCode != 503 { // a key of ours, and not its answer
			t.Errorf("%q: %s", answer, c.res.Status)
		}
	}
}

// TestWebSocketKey: HTTP/2 has no Sec-WebSocket-Key and no -Accept (RFC 8441 5): towards an
// application that speaks HTTP/1.1 the key is made, and its answer judged; one that speaks HTTP/2
// gets none, and the client the answer to its own.
func TestWebSocketKey(t *testing.T) {
	if !withConnect(t) {
		return
	}
	seen := make(chan asked, 1)
	m := newMesh(t, Config{}, netip.AddrPort{})
	m.in.to = m.appH1(seen, echoBye)
	c := openH2(t, m.h2, "websocket", "Sec-WebSocket-Protocol: chat")
	got := <-seen
	if k := got.header.Get("Sec-Websocket-Key"); c.res.StatusCode != 200 || len(k) != 24 || got.header.Get("Sec-Websocket-Version") != "13" || got.header.Get("Sec-Websocket-Protocol") != "chat" {
		t.Errorf("%s; the application saw %v", c.res.Status, got.header)
	}
	if v, ok := c.res.Header["Sec-Websocket-Accept"]; ok {
		t.Errorf("the client got accept %q", v)
	}
	c.end()
	if b, err := io.ReadAll(c); err != nil || string(b) != "bye" {
		t.Errorf("%q, %v", b, err)
	}

	m = newMesh(t, Config{}, netip.AddrPort{})
	m.in.to, m.in.h2 = m.appH2(seen), true
	c = openH1(t, m.h1, "WebSocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", "Sec-WebSocket-Version: 13\r\n")
	if c.res.StatusCode != 101 || c.res.Header.Get("Sec-Websocket-Accept") != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" { // RFC 6455 1.3
		t.Errorf("%s %v", c.res.Status, c.res.Header)
	}
	got = <-seen
	if v, ok := got.header["Sec-Websocket-Key"]; ok || got.header.Get(":protocol") != "websocket" || got.header.Get("Sec-Websocket-Version") != "13" {
		t.Errorf("the application got key %q of %v", v, got.header)
	}
	c.end()
	if b, err := io.ReadAll(c); err != nil || string(b) != "bye" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestNoConnect: towards an HTTP/2 peer that does not announce extended CONNECT nothing is sent,
// and the service is told why.
func TestNoConnect(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	seen := make(chan asked, 10)
	v := &svc{pod: pod, to: s.appH2(seen), h2: true} // net/http without its switch
	causes := make(chan error, 1)
	front := s.front(pod, &failing{v, causes}, false)
	for range 2 {
		res, _, _ := askH1(t, front, upgradeHead("foo"))
		if err := <-causes; res.StatusCode != 501 || !errors.Is(err, ErrNoTunnel) {
			t.Errorf("%s, %v", res.Status, err)
		}
	}
	if len(seen) != 0 {
		t.Errorf("the application saw %v", <-seen)
	}
}

// failing answers what fails by 501 and tells the cause.
type failing struct {
	*svc
	causes chan error
}

func (f *failing) Failed(x *exchange.Exchange, _ exchange.Code) {
	f.causes <- x.Cause
	x.Reply(&httpmsg.Head{Status: 501}, nil)
}

// TestTunnelResets: a side that is gone resets the other, over the hop; what one side had sent before its orderly
// end arrives whole although the other way is still open.
func TestTunnelResets(t *testing.T) {
	if !withConnect(t) {
		return
	}
	for _, down2 := range []bool{false, true} {
		open := openH1
		if down2 {
			open = openH2
		}
		t.Run(fmt.Sprintf("the client, h2 %v", down2), func(t *testing.T) {
			ended := make(chan error, 1)
			m := newMesh(t, Config{}, netip.AddrPort{})
			m.in.to = m.appH1(nil, func(c *net.TCPConn, br *bufio.Reader) {
				io.WriteString(c, "ready")
				_, err := io.Copy(io.Discard, br)
				ended <- err
			})
			addr := m.h1
			if down2 {
				addr = m.h2
			}
			c := open(t, addr, "foo")
			io.ReadFull(c, make([]byte, 5))
			c.cut()
			if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the application's connection ended with %v, want a reset", err)
			}
			eventually(t, "both exchanges are done", func() bool { return m.out.done.Load() == 1 && m.in.done.Load() == 1 })
			want := "client cancel 101"
			if down2 {
				want = "client reset 101"
			}
			if got := *m.out.last.Load(); got != want {
				t.Errorf("it ended as %q, want %q", got, want)
			}
		})
		t.Run(fmt.Sprintf("the application, client h2 %v", down2), func(t *testing.T) {
			m := newMesh(t, Config{}, netip.AddrPort{})
			m.in.to = m.appH1(nil, func(c *net.TCPConn, br *bufio.Reader) { br.ReadByte(); reset(c) })
			addr := m.h1
			if down2 {
				addr = m.h2
			}
			c := open(t, addr, "foo")
			c.write([]byte("x"))
			b, err := io.ReadAll(c)
			if err == nil || len(b) > 0 || !down2 && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the client got %q, %v; want a reset", b, err)
			}
			eventually(t, "both exchanges are done", func() bool { return m.out.done.Load() == 1 && m.in.done.Load() == 1 })
			if got := *m.out.last.Load(); got != "server closed 101" {
				t.Errorf("it ended as %q", got)
			}
		})
	}
	t.Run("the application, while the client does not read", func(t *testing.T) {
		gate := make(chan struct{})
		m := newMesh(t, Config{}, netip.AddrPort{})
		m.in.to = m.appH1(nil, func(c *net.TCPConn, br *bufio.Reader) {
			go func() { <-gate; reset(c); c.Close() }()
			for b := make([]byte, 1<<20); ; {
				if _, err := c.Write(b); err != nil {
					return
				}
			}
		})
		openH1(t, m.h1, "foo") // stays open, and unread
		m.stopped()
		close(gate)
		eventually(t, "both exchanges are done", func() bool { return m.out.done.Load() == 1 && m.in.done.Load() == 1 })
	})
	t.Run("the application ends first", func(t *testing.T) {
		got := make(chan string, 1)
		m := newMesh(t, Config{}, netip.AddrPort{})
		m.in.to = m.appH1(nil, func(c *net.TCPConn, br *bufio.Reader) {
			io.WriteString(c, "that is all")
			c.CloseWrite()
			b, err := io.ReadAll(br)
			got <- fmt.Sprint(string(b), err)
		})
		c := openH1(t, m.h1, "foo")
		if b, err := io.ReadAll(c); err != nil || string(b) != "that is all" {
			t.Fatalf("%q, %v", b, err)
		}
		c.write([]byte("and more"))
		c.end()
		if s := <-got; s != "and more<nil>" {
			t.Errorf("the application got %q", s)
		}
		eventually(t, "both exchanges are done", func() bool { return m.out.done.Load() == 1 && m.in.done.Load() == 1 })
	})
}

// TestTunnelWaits: an application that does not read stops its client, and the other way round, in bounded
// memory; nothing is lost when it goes on.
func TestTunnelWaits(t *testing.T) {
	const n = 24 << 20 // more than all windows, buffers and sockets on the way hold
	for _, way := range []string{"to the application", "to the client"} {
		t.Run(way, func(t *testing.T) {
			m := newMesh(t, Config{}, netip.AddrPort{})
			gate, sum := make(chan struct{}), make(chan [32]byte, 1)
			blob := make([]byte, n)
			rand.NewChaCha8([32]byte{2}).Read(blob)
			wrote := make(chan error, 1)
			toApp := way == "to the application"
			m.in.to = m.appH1(nil, func(c *net.TCPConn, br *bufio.Reader) {
				_ = c.SetReadBuffer(64 << 10)
				_ = c.SetWriteBuffer(64 << 10)
				if !toApp {
					_, err := c.Write(blob)
					wrote <- err
					c.CloseWrite()
					io.Copy(io.Discard, br)
					return
				}
				<-gate
				h := sha256.New()
				io.Copy(h, br)
				sum <- [32]byte(h.Sum(nil))
			})
			c := openH1(t, m.h1, "foo")
			go func() {
				if toApp {
					wrote <- c.write(blob)
					c.end()
				}
			}()
			m.stopped()
			select {
			case err := <-wrote:
				t.Fatalf("%d bytes were taken for a reader that does not read (%v)", n, err)
			default:
			}
			var left int
			m.onLoop(func(l *Loop) { left = m.buffered(l) })
			if left > 3<<20 {
				t.Errorf("%d bytes are kept", left)
			}
			if toApp {
				close(gate)
			} else {
				h := sha256.New()
				io.Copy(h, c)
				sum <- [32]byte(h.Sum(nil))
				c.end()
			}
			if got := <-sum; got != sha256.Sum256(blob) {
				t.Error("what arrived is not what was sent")
			}
			if err := <-wrote; err != nil {
				t.Error(err)
			}
			eventually(t, "both exchanges are done", func() bool { return m.out.done.Load() == 1 && m.in.done.Load() == 1 })
		})
	}
}

// TestTunnelQuiet: nothing but the end of its certificates cuts a tunnel on which nothing moves for a day. (What becomes of a quiet
// request is TestLimitsOfTime's.)
func TestTunnelQuiet(t *testing.T) {
	if !withConnect(t) {
		return
	}
	for _, tt := range []struct {
		name         string
		down2, appH2 bool
	}{{"h1 to h1", false, false}, {"h2 to h1", true, false}, {"h1 to h2", false, true}, {"h2 to h2", true, true}} {
		t.Run(tt.name, func(t *testing.T) {
			clk := newClock()
			m := newMesh(t, Config{Now: clk.Now}, netip.AddrPort{})
			m.life = 48 * time.Hour // it ends with its certificates, and not before
			if m.in.to = m.appH1(nil, echoBye); tt.appH2 {
				m.in.to, m.in.h2 = m.appH2(nil), true
			}
			open, addr := openH1, m.h1
			if tt.down2 {
				open, addr = openH2, m.h2
			}
			c := open(t, addr, "foo")
			for range 24 * 4 {
				clk.move(t, m.e, 15*time.Minute)
				eventually(t, "the hop's peer has answered", func() bool {
					quiet := false
					m.onLoop(func(*Loop) {
						for _, h := range slices.Concat(m.theHop.conns, m.theHop.old) {
							quiet = h.pinged == 0
						}
					})
					return quiet
				})
			}
			c.write([]byte("still there"))
			c.end()
			if b, err := io.ReadAll(c); err != nil || string(b) != "still therebye" {
				t.Errorf("%q, %v", b, err)
			}
		})
	}
}

// TestTunnelTLS: a hop that speaks HTTP/1.1, as an Envoy-based peer's without ALPN may: each direction ends by
// its close_notify, and the other goes on.
func TestTunnelTLS(t *testing.T) {
	s := newStage(t, Config{})
	sc, cc := tlsPair(t)
	pod := s.e.AddPod("p")
	for _, first := range []string{"client", "application"} {
		got := make(chan string, 1)
		v := &svc{pod: pod, to: s.appH1(nil, func(c *net.TCPConn, br *bufio.Reader) {
			if first == "application" {
				io.WriteString(c, "all of it")
				c.CloseWrite()
			}
			b, err := io.ReadAll(br)
			got <- fmt.Sprint(string(b), " ", err)
			if first == "client" {
				io.WriteString(c, "all of it")
			}
		})}
		pool := &exchange.Pool{Service: v}
		addr := s.listen(pod, func(l *Loop, fd int) {
			l.Go(func() {
				c, err := socket.MakeConn(fd)
				if err != nil {
					return
				}
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
				defer cancel()
				st := record.Server(c, sc, record.Own)
				if err := st.Handshake(ctx); err != nil {
					c.Close()
					return
				}
				rec := st.Flip()
				if fd, err = socket.TakeFD(c); err != nil {
					return
				}
				if l.Post(func() {
					if l.ServeHTTP1(fd, rec, &ConnInfo{Pod: pod, Loop: l, Pool: pool}, nil) != nil {
						unix.Close(fd)
					}
				}) != nil {
					unix.Close(fd)
				}
			})
		})
		c := tls.Client(dial(t, addr), cc)
		io.WriteString(c, upgradeHead("foo"))
		br := bufio.NewReader(c)
		if res, err := http.ReadResponse(br, nil); err != nil || res.StatusCode != 101 {
			t.Fatalf("%v, %v", res, err)
		}
		said := func() {
			io.WriteString(c, "said")
			c.CloseWrite()
			if s := <-got; s != "said <nil>" {
				t.Errorf("%s first: the application got %q", first, s)
			}
		}
		if first == "client" {
			said()
		}
		if b, err := io.ReadAll(br); err != nil || string(b) != "all of it" {
			t.Errorf("%s first: the client got %q, %v", first, b, err)
		}
		if first == "application" {
			said()
		}
		eventually(t, "the exchange is done", func() bool { return v.done.Load() == 1 })
		if how := *v.last.Load(); how != "complete no-error 101" {
			t.Errorf("%s first: it ended as %q", first, how)
		}
	}
}

// TestRefusedProtocol: an extended CONNECT for further HTTP, or for TLS, is refused: there is no ordinary
// request that it also is.
func TestRefusedProtocol(t *testing.T) {
	if !withConnect(t) {
		return
	}
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod}
	front := s.front(pod, v, true)
	for _, p := range []string{"h2c", "TLS/1.0", "HTTP/3"} {
		if c := openH2(t, front, p); c.res.StatusCode != 501 {
			t.Errorf("%s: %s", p, c.res.Status)
		}
	}
	if n := v.begun.Load(); n != 0 {
		t.Errorf("%d requests reached the service", n)
	}
}

// TestTunnelEnds: a pod that is removed takes its tunnels with it.
func TestTunnelEnds(t *testing.T) {
	m := newMesh(t, Config{}, netip.AddrPort{})
	ended := make(chan error, 1)
	m.in.to = m.appH1(nil, func(c *net.TCPConn, br *bufio.Reader) {
		io.WriteString(c, "ready")
		_, err := io.Copy(io.Discard, br)
		ended <- err
	})
	c := openH1(t, m.h1, "foo")
	io.ReadFull(c, make([]byte, 5))
	m.e.RemovePod(m.src)
	if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client's connection ended with %v, want a reset", err)
	}
	if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the application's connection ended with %v, want a reset", err)
	}
	eventually(t, "both exchanges are done", func() bool { return m.out.done.Load() == 1 && m.in.done.Load() == 1 })
}

var pairNames = []string{"h1 to h1", "h1 to h2", "h2 to h1", "h2 to h2"}

// TestFlushedAtOnce: what the application writes is at the client before the application
// writes again (server-sent events, long polling), over the hop, for every pair of codecs. Each waits for the other: no time is involved.
func TestFlushedAtOnce(t *testing.T) {
	for i, name := range pairNames {
		t.Run(name, func(t *testing.T) {
			read := make(chan struct{})
			m := newMesh(t, Config{}, netip.AddrPort{})
			p := new(http.Protocols)
			p.SetHTTP1(true)
			p.SetUnencryptedHTTP2(true)
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			srv := &http.Server{Protocols: p, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				w.WriteHeader(200)
				w.(http.Flusher).Flush()
				for k := range 50 {
					select {
					case <-read:
					case <-r.Context().Done():
						return
					}
					fmt.Fprintf(w, "data: %d\n\n", k)
					w.(http.Flusher).Flush()
				}
			})}
			done := make(chan struct{})
			go func() { defer close(done); srv.Serve(ln) }()
			t.Cleanup(func() { srv.Close(); <-done })
			m.in.to, m.in.h2 = netip.MustParseAddrPort(ln.Addr().String()), i%2 == 1
			tr := &http.Transport{DialContext: to(m.h1)}
			if i > 1 {
				tr.DialContext = to(m.h2)
				tr.Protocols = new(http.Protocols)
				tr.Protocols.SetUnencryptedHTTP2(true)
			}
			defer tr.CloseIdleConnections()
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			req, _ := http.NewRequestWithContext(ctx, "GET", "http://a/events", nil)
			res, err := tr.RoundTrip(req) // the head alone
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			br := bufio.NewReader(res.Body)
			for k := range 50 {
				read <- struct{}{}
				line, err := br.ReadString('\n')
				if err != nil || line != fmt.Sprintf("data: %d\n", k) {
					t.Fatalf("event %d: %q, %v", k, line, err)
				}
				br.ReadString('\n')
			}
			if rest, err := io.ReadAll(br); err != nil || len(rest) > 0 {
				t.Errorf("then %q, %v", rest, err)
			}
		})
	}
}

// stopped waits until nothing moves any more: because somebody does not read.
func (m *mesh) stopped() {
	m.t.Helper()
	var held int64
	eventually(m.t, "the writer is stopped", func() bool {
		last := held
		held = m.moved()
		for range 50 {
			m.onLoop(func(*Loop) {})
		}
		return held > 0 && held == last && m.moved() == held
	})
}

// moved is how many bytes of bodies have gone on at the two services.
func (m *mesh) moved() (n int64) {
	m.onLoop(func(l *Loop) {
		for _, x := range m.exchanges(l) {
			n += x.ReqBytes + x.ResBytes
		}
	})
	return n
}

// exchanges are those of the loop's HTTP/1 connections.
func (m *mesh) exchanges(l *Loop) (all []*exchange.Exchange) {
	l.Each(func(src reactor.Source) {
		switch c := src.(type) {
		case *h1server:
			if c.x != nil {
				all = append(all, c.x)
			}
		case *h1client:
			if c.x != nil && !slices.Contains(all, c.x) {
				all = append(all, c.x)
			}
		}
	})
	return all
}

// buffered is how many bytes the loop's connections hold.
func (m *mesh) buffered(l *Loop) (n int) {
	l.Each(func(src reactor.Source) {
		switch c := src.(type) {
		case *h1server:
			n += len(c.in) + len(c.out)
		case *h1client:
			n += len(c.in) + len(c.out)
		case *h2conn:
			n += len(c.h2.Out()) + len(c.left) + len(c.sealed)
			c.h2.Each(func(s *http2.Stream) {
				if st, ok := s.User.(*h2stream); ok {
					n += len(st.pend) - st.off
				}
			})
		}
	})
	return n
}
