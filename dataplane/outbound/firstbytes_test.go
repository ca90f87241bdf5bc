package outbound

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/controlplane/compile"
	"aether/dataplane/engine"
	"aether/dataplane/hpack"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
	"aether/e2e/testseed"
	"aether/tproxy/socket"
)

// gateway is the outbound side of one pod on a running engine. Nothing outside can be reached: a connection
// that is passed through is reset, and shows in the journal.
type gateway struct {
	t   *testing.T
	o   *Outbound
	e   *engine.Engine
	l   *engine.Loop
	pod *Pod
	ln  net.Listener
	nowhere

	ended chan journal.Entry
}

func (g *gateway) Ended(e *journal.Entry) {
	select {
	case g.ended <- *e:
	default: // of answers, which nobody looks at
	}
}

// nowhere are sockets that there are none of, but for so many probes.
type nowhere struct{ probes atomic.Int32 }

var errNowhere = errors.New("nothing can be reached")

func (*nowhere) Get(bool) (int, bool) { return -1, false }
func (s *nowhere) Request(v6 bool, on func(int, error)) {
	if s.probes.Add(-1) < 0 {
		go on(-1, errNowhere)
		return
	}
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	go on(fd, err)
}
func (*nowhere) Connect(context.Context, netip.AddrPort) (*net.TCPConn, error) {
	return nil, errNowhere
}

func newGateway(t *testing.T, mesh string) *gateway { return newGatewayOf(t, mesh, 0) }

// newGatewayOf is newGateway with a limit of memory, of which nothing is said to be in use.
func newGatewayOf(t *testing.T, mesh string, memory int64) *gateway {
	e, err := engine.New(engine.Config{MaxLoops: 1, Memory: memory, Used: func() uint64 { return 0 }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { e.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	s, problems := compile.Compile(modeltest.Mesh(t, mesh))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	var store snapshot.Store
	store.Swap(s)
	g := &gateway{t: t, e: e, l: e.Loops()[0], ended: make(chan journal.Entry, 64)}
	g.o = New(Config{Store: &store, Journal: g})
	g.pod = &Pod{Context: ctx, Engine: e.AddPod("web"), Container: "shop-web-0", Namespace: "shop", Account: "web", Sockets: &g.nowhere}
	if g.ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.ln.Close() })
	return g
}

// send writes the parts one after the other as first bytes to dst (invalid: the proxy port), and returns
// what comes back and whether the bytes went to the dialled address.
func (g *gateway) send(dst netip.AddrPort, parts ...string) (answer string, passed bool) {
	g.t.Helper()
	c := g.open(dst, parts...)
	defer c.Close()
	b := make([]byte, 4096)
	n, err := io.ReadAtLeast(c, b, 1)
	if err != nil && err != io.EOF && !errors.Is(err, unix.ECONNRESET) {
		g.t.Fatalf("%.60q: %v", strings.Join(parts, ""), err)
	}
	if n == 0 {
		return "", g.passed()
	}
	return string(b[:n]), false
}

// passed reports how the last connection, which has ended without an answer, did: it has an entry of
// its own, without a status.
func (g *gateway) passed() bool {
	g.t.Helper()
	for {
		select {
		case e := <-g.ended:
			if e.Status == 0 {
				return e.Action == "passthrough"
			}
		case <-time.After(20 * time.Second):
			g.t.Fatal("neither an answer nor an entry")
		}
	}
}

// open begins a connection to dst with these first bytes, a segment each.
func (g *gateway) open(dst netip.AddrPort, parts ...string) net.Conn {
	g.t.Helper()
	c, err := net.Dial("tcp", g.ln.Addr().String())
	if err != nil {
		g.t.Fatal(err)
	}
	a, err := g.ln.Accept()
	if err != nil {
		g.t.Fatal(err)
	}
	fd, err := socket.TakeFD(a.(*net.TCPConn))
	if err != nil {
		g.t.Fatal(err)
	}
	for len(g.ended) > 0 {
		<-g.ended
	}
	g.probes.Store(0)
	if model.ReservedPort(dst.Port()) && g.o.cfg.Store.Load().Address(dst.Addr().Unmap()) == nil {
		g.probes.Store(1) // whether the address is the pod's own
	}
	dir := model.Captured
	if !dst.IsValid() {
		dir = model.Proxy
	}
	pod := g.pod
	if err := g.l.Post(func() { g.o.accept(g.l, fd, pod, dir, dst) }); err != nil {
		g.t.Fatal(err)
	}
	for _, p := range parts {
		if _, err := c.Write([]byte(p)); err != nil { // answered already
			break
		}
		if len(parts) > 1 { // a segment of its own: until the loop has been there
			done := make(chan struct{})
			if g.l.Post(func() { close(done) }) == nil {
				<-done
			}
		}
	}
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	return c
}

// status is the answer's, or what there was in its place.
func status(answer string, passed bool) string {
	switch {
	case passed, strings.Contains(answer, "the dialled address did not answer"): // the connection, or the request
		return "passed"
	case answer == "":
		return "closed"
	}
	first, _, _ := strings.Cut(answer, "\r\n")
	if w := strings.Fields(first); len(w) > 1 && strings.HasPrefix(w[0], "HTTP/1.") {
		return w[1]
	}
	return fmt.Sprintf("%.20q", answer)
}

const firstBytesMesh = `
service shop/cart 10.96.0.1
service shop/db 10.96.0.2 5432=tcp
pods shop/cart 8080 health=unhealthy
pods shop/db 5432=tcp health=unhealthy
local shop/web
`

// TestFirstBytes is the table of contract 4.2 and 4.3, completed by decision 042: what becomes of each kind of
// first bytes at each kind of dialled address. "503": it was the mesh's, and no endpoint is healthy.
func TestFirstBytes(t *testing.T) {
	g := newGateway(t, firstBytesMesh)
	at := func(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }
	places := []struct {
		name string
		dst  netip.AddrPort
	}{
		{"HTTP port", at("10.96.0.1:8080")},
		{"mesh address, 18081", at("10.96.0.1:18081")},
		{"undeclared port", at("10.96.0.1:7777")},
		{"foreign address", at("203.0.113.5:8080")},
		{"foreign address, 18081", at("203.0.113.5:18081")},
		{"proxy port", netip.AddrPort{}},
	}
	long, method := strings.Repeat("a", 17<<10), strings.Repeat("M", 33)
	mesh, foreign := "Host: cart:8080\r\n\r\n", "Host: other.example\r\n\r\n"
	for _, tt := range []struct {
		name, in string
		want     string // at each place
	}{
		{"a request, mesh name", "GET / HTTP/1.1\r\n" + mesh, "503 503 421 503 503 503"},
		{"a request, foreign name", "GET / HTTP/1.1\r\n" + foreign, "passed passed passed passed passed 404"},
		{"an empty line, then a request", "\r\nGET / HTTP/1.1\r\n" + mesh, "503 503 421 503 503 503"},
		{"an empty line, then a foreign one", "\r\nGET / HTTP/1.1\r\n" + foreign, "passed passed passed passed passed 404"},
		{"eight empty lines", strings.Repeat("\r\n", 8) + "GET / HTTP/1.1\r\n" + mesh, "503 503 421 503 503 503"},
		{"eight empty lines and a foreign one", strings.Repeat("\r\n", 8) + "GET / HTTP/1.1\r\n" + foreign, "passed passed passed passed passed 404"},
		{"nine empty lines", strings.Repeat("\r\n", 9) + "GET / HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"an empty line of LF", "\nGET / HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"a long target", "GET /ok?x=" + long + " HTTP/1.1\r\n" + mesh, "414 414 passed passed passed 414"},
		{"a long field", "GET / HTTP/1.1\r\nX: " + strings.Repeat("a", 70<<10) + "\r\n" + mesh, "431 431 431 passed 431 431"},
		{"two spaces", "GET  / HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"a tab", "GET\t/ HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"a bare CR", "GET\r/ HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"a space first", " GET / HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"a lone LF first", "\nGET / HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"another version", "GET / HTTP/1.2\r\n" + mesh, "505 505 passed passed passed 505"},
		{"HTTP/2.0", "GET / HTTP/2.0\r\n" + mesh, "505 505 passed passed passed 505"},
		{"HTTP/1.10", "GET / HTTP/1.10\r\n" + mesh, "400 400 passed passed passed 400"},
		{"a version in lower case", "GET / http/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"no version", "GET /\r\n", "400 400 passed passed passed 400"},
		{"no version, no path", "GET mykey\r\n", "400 400 passed passed passed 400"},
		{"a method of 33 letters", method + " / HTTP/1.1\r\n" + mesh, "501 501 passed passed passed 501"},
		{"a method without an end", method, "501 501 passed passed passed 501"},
		{"a method with a colon", "A:B / HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"a method beyond ASCII", "G\xc3\x84T / HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"absolute-form, two spaces", "GET http://cart:8080/  HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"a NUL in the target", "GET /a\x00b HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"a space in the target", "GET /a b HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		// What measurement-kit#1416 asks middle boxes with.
		{"a version of letters", "GET / HTTP/aXb\n\r", "400 400 passed passed passed 400"},
		{"four words", "aaaaa bbbbb ccccc ddddd\n\r", "400 400 passed passed passed 400"},
		{"a method of 1024 letters", strings.Repeat("Qz", 512) + " / HTTP/1.1\n\r", "501 501 passed passed passed 501"},
		{"another scheme", "GET cache_object://localhost/ HTTP/1.0\r\n\r\n", "400 400 400 passed 400 400"},
		{"the PROXY protocol", "PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\nGET / HTTP/1.1\r\n" + mesh, "400 400 passed passed passed 400"},
		{"the PROXY protocol, version 2", "\r\n\r\n\x00\r\nQUIT\n", "400 400 passed passed passed 400"},
		{"a broken preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\rx", "505 505 passed passed passed 505"},
		{"one word", "PING\r\n", "passed passed passed passed passed 400"},
		{"SSH", "SSH-2.0-OpenSSH_9.6\r\n", "passed passed passed passed passed 400"},
		{"no text", "\x00\x00\x00\x08ping", "passed passed passed passed passed 400"},
		{"a record of TLS", "\x16\x03\x01\x00\x05\x02", "passed passed passed passed passed 400"},
	} {
		want := strings.Fields(tt.want)
		for i, p := range places {
			for _, cuts := range []int{1, 3, len(tt.in)} { // whole, in threes, byte by byte
				if cuts > 100 {
					continue
				}
				parts := inParts(tt.in, cuts)
				if got := status(g.send(p.dst, parts...)); got != want[i] {
					t.Errorf("%s, at %s, in %d parts: %s, want %s", tt.name, p.name, len(parts), got, want[i])
				}
			}
		}
	}
	// A raw-TCP port takes any bytes unread: no endpoint can be dialled, and nothing is passed through.
	for _, in := range []string{"GET / HTTP/1.1\r\n" + mesh, "GET  / HTTP/1.1\r\n", "\x00"} {
		if a, passed := g.send(at("10.96.0.2:5432"), in); a != "" || passed {
			t.Errorf("raw-TCP port, %q: %q, passed %v", in, a, passed)
		}
	}
}

// inParts is s in n parts of about one size.
func inParts(s string, n int) (parts []string) {
	for i := range n {
		if a, b := i*len(s)/n, (i+1)*len(s)/n; b > a {
			parts = append(parts, s[a:b])
		}
	}
	return parts
}

// TestNoRequestLeavesAnHTTPPort: whatever net/http would serve, or would if blanks and the version were what
// they should be, does not leave an HTTP port of the mesh, however it is written, of whatever length, cut anyhow.
func TestNoRequestLeavesAnHTTPPort(t *testing.T) {
	g := newGateway(t, firstBytesMesh)
	r := testseed.Rand(t)
	one := func(all ...string) string { return all[r.IntN(len(all))] }
	dst := netip.MustParseAddrPort("10.96.0.1:8080")
	readable := 0
	for range 800 {
		in := one("", "", "", "", "", "\r\n", "\n", " ", "\r\n\r\n", "\t") + one("GET", "POST", "get", "PURGE", strings.Repeat("M", 31+r.IntN(4))) + one(" ", " ", " ", " ", "  ", "\t", "\v", "\r") +
			one("/denied", "/"+strings.Repeat("x", 16370+r.IntN(40)), "/a?b", "http://cart:8080/denied", "*") + one(" ", " ", " ", " ", "  ", "\t ", "") +
			one("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/1.2", "HTTP/2.0", "http/1.1", "HTTP/1.01", "") + one("\r\n", "\r\n", "\n", " \r\n", "\r\r\n") + "Host: cart:8080\r\n\r\n"
		if q, err := http.ReadRequest(bufio.NewReader(bytes.NewReader([]byte(in)))); err == nil && q.Host != "" {
			readable++
		}
		parts := []string{in}
		if r.IntN(2) == 0 {
			at := []int{0, r.IntN(min(len(in), 60)), r.IntN(len(in)), len(in)}
			slices.Sort(at)
			parts = []string{in[:at[1]], in[at[1]:at[2]], in[at[2]:]}
			parts = slices.DeleteFunc(parts, func(s string) bool { return s == "" })
		}
		switch got := status(g.send(dst, parts...)); got {
		case "400", "414", "421", "431", "501", "503", "505":
		default:
			t.Errorf("%.80q in %d parts: %s", in, len(parts), got)
		}
	}
	if readable < 15 {
		t.Errorf("net/http reads %d of the requests only: the test shows nothing", readable)
	}
}

// h2Status sends in, an HTTP/2 client's first request, to dst. "400": the stream is reset as malformed.
func (g *gateway) h2Status(dst netip.AddrPort, in string) string {
	g.t.Helper()
	c := g.open(dst, in)
	defer c.Close()
	dec := hpack.NewDecoder(0, nil)
	head := make([]byte, 9)
	answer := ""
	for {
		if _, err := io.ReadFull(c, head); err != nil {
			return map[bool]string{true: "passed", false: "closed"}[g.passed()]
		}
		p := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		if _, err := io.ReadFull(c, p); err != nil {
			g.t.Fatal(err)
		}
		switch kind, flags := head[3], head[4]; {
		case kind == 3: // RST_STREAM
			return map[bool]string{true: "400", false: "reset"}[len(p) == 4 && p[3] == 1]
		case kind == 1:
			fields, err := dec.Decode(p, nil)
			if err != nil {
				g.t.Fatal(err)
			}
			answer = string(fields[0].Value)
			if flags&1 != 0 {
				return answer
			}
		case kind == 0:
			if bytes.Contains(p, []byte("the dialled address did not answer")) {
				return "passed"
			}
			return answer
		}
	}
}
