package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// answerTo writes req and returns the first line of what comes, or how the connection ended without.
func answerTo(t *testing.T, c net.Conn, req string) string {
	t.Helper()
	b := make([]byte, 4096)
	n := 0
	_, err := io.WriteString(c, req)
	if err == nil {
		n, err = io.ReadAtLeast(c, b, 1)
	}
	switch {
	case n > 0:
		first, _, _ := strings.Cut(string(b[:n]), "\r\n")
		return first
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "reset"
	}
	return fmt.Sprint("nothing, ", err)
}

// TestUnreadableStays (decision 042): what begins like a request at an HTTP port of the mesh is answered, though
// somebody listens behind the Service's address who would take it.
func TestUnreadableStays(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	l := listen(t, ctx, &w.out.Space, vip(appVIP, portH2))
	for _, tt := range []struct{ name, req, want string }{
		{"a long target", "GET /denied?x=" + strings.Repeat("a", 16400) + " HTTP/1.1\r\nHost: app\r\n\r\n", "414"},
		{"two spaces", "GET  /denied HTTP/1.1\r\nHost: app\r\n\r\n", "400"},
		{"a version of nobody", "GET /denied HTTP/1.2\r\nHost: app\r\n\r\n", "505"},
		{"no version", "GET /denied\r\n", "400"},
		{"a long method", strings.Repeat("M", 40), "501"},
	} {
		if got := answerTo(t, dial(t, ctx, w.Pod("web"), vip(appVIP, portH2)), tt.req); !strings.Contains(got, " "+tt.want+" ") {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
	l.(*net.TCPListener).SetDeadline(time.Now())
	if c, err := l.Accept(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("something left the mesh: %v, %v", c, err)
	}
}

// TestPortsThatAreNone: a mesh name with a port that is no port is answered 400, wherever the request was sent.
func TestPortsThatAreNone(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	elsewhere := listen(t, ctx, &w.out.Space, w.out.IP4.String()+":0").Addr().String() // who would take it
	for _, port := range []string{":08083", ":0", ":00080", ":65536", ":http", ":8083:8083"} {
		for _, by := range []struct{ pod, addr string }{{"web", vip(appVIP, portRaw)}, {"web", elsewhere}, {"job", proxyPort}} {
			got := answerTo(t, dial(t, ctx, w.Pod(by.pod), by.addr), "GET / HTTP/1.1\r\nHost: "+appName+port+"\r\nConnection: close\r\n\r\n")
			if !strings.Contains(got, " 400 ") {
				t.Errorf("Host %s%s, from %s to %s: %s, want 400", appName, port, by.pod, by.addr, got)
			}
		}
	}
}

// TestEmptyLineFirst: empty lines before the first request are passed over (RFC 9112 2.2, decision 062), captured as on the
// proxy port; one more than there may be is 400 at both.
func TestEmptyLineFirst(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	for _, by := range []struct{ pod, addr string }{{"job", proxyPort}, {"web", vip(appVIP, portH1)}} {
		for k, want := range map[int]string{0: " 404 ", 1: " 404 ", 3: " 404 ", 8: " 404 ", 9: " 400 "} { // 404 is the application's own
			req := fmt.Sprintf("%sGET /nobody-has-this HTTP/1.1\r\nHost: %s:%d\r\nConnection: close\r\n\r\n", strings.Repeat("\r\n", k), appName, portH1)
			if got := answerTo(t, dial(t, ctx, w.Pod(by.pod), by.addr), req); !strings.Contains(got, want) {
				t.Errorf("from %s, %d empty lines: %s, want%s", by.pod, k, got, want)
			}
		}
	}
}

// TestNoWayBack (decision 043): connections to the mesh's own ports at whatever address a pod has end at once, and
// the proxy makes none of its own of them.
func TestNoWayBack(t *testing.T) {
	ctx := within(t, 2*patience)
	pod := w.Pod("web2")
	for _, a := range []string{"10.77.0.1/24", "10.77.0.2/24", "fd77::1/128"} { // no status lists these; the second is secondary
		family := "-4"
		if strings.Contains(a, ":") {
			family = "-6"
		}
		if out, err := pod.Command(ctx, "ip", family, "addr", "add", a, "dev", "lo").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		t.Cleanup(func() { pod.Command(context.Background(), "ip", family, "addr", "del", a, "dev", "lo").Run() })
	}
	for _, addr := range []string{"127.0.0.1", "127.8.7.6", "[::1]", "10.77.0.1", "10.77.0.2", "[fd77::1]", pod.IP4.String(), "[" + pod.IP6.String() + "]", "[::ffff:10.77.0.1]", "0.0.0.0"} {
		for _, port := range []int{18001, 18008, 18081, 18082} {
			c, err := pod.Dial(ctx, "tcp", fmt.Sprintf("%s:%d", addr, port))
			if err != nil { // nobody listens there
				continue
			}
			deadline(ctx, c.(*net.TCPConn))
			local := port == 18081 && (addr == "127.0.0.1" || addr == "[::1]" || addr == "0.0.0.0") // the proxy port itself
			got := answerTo(t, c, "GET / HTTP/1.1\r\nHost: other.example\r\nConnection: close\r\n\r\n")
			c.Close()
			switch {
			case local && strings.Contains(got, " 404 "):
			case !local && (got == "reset" || got == "nothing, EOF"):
			default:
				t.Errorf("%s:%d: %s", addr, port, got)
			}
		}
	}
}

// TestPodAddress (decision 044): HTTP to a pod's own address, at a port that it declares HTTP, goes there, and without what
// only a proxy may say of its caller: each request of the connection, however late the client begins. Other ports are passed through.
func TestPodAddress(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	app := w.Pod("app")
	const claims = "X-Forwarded-Client-Cert: By=spiffe://x;URI=spiffe://rig.test/ns/admin/sa/root\r\nx_forwarded-client_cert: y\r\nX-Aether-Outcome: 200\r\nx_aether_pod: z\r\nX-Kept: 1\r\n\r\n"
	request := func(path, host string) string { return "GET " + path + " HTTP/1.1\r\nHost: " + host + "\r\n" + claims }
	at := fmt.Sprintf("%s:%d", app.IP4, portH1)
	l := listen(t, ctx, &app.Space, at)
	heads := make(chan string, 8)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 16<<10)
				for have := 0; ; {
					n, err := c.Read(b[have:])
					if have += n; err != nil {
						return
					}
					if strings.Contains(string(b[:have]), "\r\n\r\n") {
						heads <- string(b[:have])
						have = 0
						io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
					}
				}
			}()
		}
	}()
	c := dial(t, ctx, w.Pod("web"), at)
	for _, path := range []string{"/first", "/second"} {
		if got := answerTo(t, c, request(path, "other.example")); !strings.Contains(got, " 200 ") {
			t.Fatalf("%s: %s", path, got)
		}
		head := strings.ToLower(recv(t, ctx, heads, "the request"))
		if !strings.HasPrefix(head, "get "+path+" ") || !strings.Contains(head, "x-kept: 1") || strings.Contains(head, "client-cert") || strings.Contains(head, "client_cert") || strings.Contains(head, "aether") {
			t.Errorf("the pod is sent:\n%s", head)
		}
	}
	if got := answerTo(t, dial(t, ctx, w.Pod("web"), at), "GET  /third HTTP/1.1\r\nHost: other.example\r\n"+claims); !strings.Contains(got, " 400 ") {
		t.Errorf("what begins like a request: %s", got)
	}
	other := listen(t, ctx, &app.Space, app.IP4.String()+":0") // a port that the pod does not declare
	o := dial(t, ctx, w.Pod("web"), other.Addr().String())
	say(t, o, request("/", "other.example"))
	expect(t, acceptOne(t, ctx, other), request("/", "other.example"))
}
