// Package netns tests the proxy as users meet it: two aether-proxy processes, pods in
// network namespaces, real capture, the mTLS hop, and clients and applications
// that know of none of it.
//
//   - One mesh serves all tests but those that stop proxies or change what holds for a
//     whole mesh; a test owns the paths, ports and documents that it makes.
//   - Clients and servers are the standard library's and grpc-go's, or bytes written
//     by hand: never the product's own codecs.
//   - What is waited for is a condition. Tests that promise a time run alone.
//   - TestCase<n> is row n of docs/cases.md, a public bug report; the legs are those of
//     contract 4.14.
package netns

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
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// world is the mesh that the tests share.
//
//	node1: web, web2 (captured), ops (captured, of another namespace), job (not captured),
//	       shy (captured, with exclusions)
//	node2: app, the six mp-* of contract 4.14, front, blue and green (routes), out (no pod of the mesh; whoever has a Service's address)
type world struct {
	*mesh.Mesh
	binary string
	out    *rig.Pod
	app    handlers // of app:8080 and :8081
	raw    rawApp   // of app:8083
}

var w world

const (
	appName  = "app.shop.aether.internal"
	appVIP   = 30
	firstVIP = 40 // of the mp-* services
)

// The ports of app.
const (
	portH1     = 8080 // net/http, HTTP/1.1
	portH2     = 8081 // net/http, h2c
	portGRPC   = 8082 // grpc-go
	portRaw    = 8083 // HTTP/1 by hand
	portNobody = 8089 // declared, and nobody listens
	portEcho   = 9000
	portBanner = 9001
	portQueue  = 9002 // to 9006: connections are a test's (tcpQueue)
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	dir, err := os.MkdirTemp("", "aether-netns-")
	if err != nil {
		return fail(err)
	}
	defer os.RemoveAll(dir)
	w.binary = filepath.Join(dir, "aether-proxy")
	build := exec.Command("go", "build", "-o", w.binary, "aether/cmd/aether-proxy")
	if raceEnabled {
		build.Args = append(build.Args[:2], append([]string{"-race"}, build.Args[2:]...)...)
	}
	if out, err := build.CombinedOutput(); err != nil {
		return fail(fmt.Errorf("build the proxy: %w\n%s", err, out))
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	defer func() {
		if w.Mesh == nil {
			return
		}
		if code != 0 {
			tails()
		}
		if err := w.Close(); err != nil {
			code = fail(err)
		}
	}()
	if err := w.up(ctx); err != nil {
		return fail(err)
	}
	code = m.Run()
	ctx, cancel = context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := w.clean(ctx); err != nil {
		return fail(err)
	}
	return code
}

func tails() {
	for i := range w.Rig.Nodes {
		if p := w.Proxy(i); p != nil {
			fmt.Fprintf(os.Stderr, "--- log of the proxy of node%d ends:\n%s\n", i+1, p.Tail(6000))
		}
	}
}

// up builds the mesh and starts it.
func (w *world) up(ctx context.Context) (err error) {
	if w.Mesh, err = mesh.New(ctx, mesh.Options{Proxy: w.binary, IPv6: true}); err != nil {
		return err
	}
	if w.out, err = w.Rig.AddPod(ctx, 1, "out"); err != nil {
		return err
	}
	if err := w.ownVIPs(ctx); err != nil {
		return err
	}
	for _, p := range append([]mesh.Pod{
		{Name: "web"},
		{Name: "web2"},
		{Name: "ops", Namespace: "ops"},
		{Name: "job", Annotations: map[string]string{"capture.aether.io/redirect-all": "false"}},
		{Name: "shy", Annotations: map[string]string{
			"capture.aether.io/exclude-outbound-ports":     "7101",
			"capture.aether.io/exclude-outbound-ip-ranges": w.Rig.Nodes[1].IP4.String() + "/32",
		}},
		{Name: "app", Node: 1, Ports: "8080,8081=h2,8082=h2,8083,8089,9000=tcp,9001=tcp,9002=tcp,9003=tcp,9004=tcp,9005=tcp,9006=tcp"},
	}, append(legPods(), colourPods()...)...) {
		if _, err := w.AddPod(ctx, p); err != nil {
			return err
		}
	}
	err = w.Service(rig.ServiceManifest{
		Name: "app", ClusterIPs: w.ClusterIPs(appVIP),
		Ports: []uint16{portH1, portH2, portGRPC, portRaw, portNobody, portEcho, portBanner, portQueue, portQueue + 1, portQueue + 2, portQueue + 3, portQueue + 4},
	})
	if err != nil {
		return err
	}
	app := &w.Pod("app").Space
	err = errors.Join(
		w.ServeHTTP(ctx, app, local(portH1), &w.app),
		w.ServeHTTP(ctx, app, local(portH2), &w.app),
		w.ServeTCP(ctx, app, local(portRaw), w.raw.serve),
		w.ServeTCP(ctx, app, local(portEcho), echo),
		w.ServeTCP(ctx, app, local(portBanner), func(c *net.TCPConn) { io.WriteString(c, "banner\n"); echo(c) }),
		serveGRPC(ctx, app),
		legApps(ctx),
		colourApps(ctx))
	for i := range queues {
		err = errors.Join(err, w.ServeTCP(ctx, app, local(portQueue+i), queues[i].serve))
	}
	if err != nil {
		return err
	}
	return w.Start(ctx)
}

// ownVIPs makes pod out the owner of the Services' addresses, where nothing listens unless a test does: what a proxy
// passes through to one is refused at once, or is seen.
func (w *world) ownVIPs(ctx context.Context) error {
	far := w.Rig.Nodes[1]
	for _, v := range []struct {
		family, net, node, pod string
	}{
		{"-4", "10.96.0.0/24", far.IP4.String(), w.out.IP4.String()},
		{"-6", "fd00:96::/64", far.IP6.String(), w.out.IP6.String()},
	} {
		for _, c := range []struct {
			in   *rig.Space
			args []string
		}{
			{&w.Rig.Nodes[0].Space, []string{"add", v.net, "via", v.node}},
			{&far.Space, []string{"add", v.net, "via", v.pod}},
			{&w.out.Space, []string{"add", "local", v.net, "dev", "lo"}},
		} {
			args := append([]string{"ip", v.family, "route"}, c.args...)
			if out, err := c.in.Command(ctx, args...).CombinedOutput(); err != nil {
				return fmt.Errorf("%s in %s: %w: %s", strings.Join(args, " "), c.in.NSName(), err, out)
			}
		}
	}
	return nil
}

// clean: nothing went wrong in the proxies that no test saw.
func (w *world) clean(ctx context.Context) error {
	for i := range w.Rig.Nodes {
		p := w.Proxy(i)
		if p == nil {
			return fmt.Errorf("node%d has no proxy any more", i+1)
		}
		log, err := os.ReadFile(p.Log)
		if err != nil {
			return err
		}
		if at := bytes.Index(log, []byte("WARNING: DATA RACE")); at >= 0 {
			return fmt.Errorf("node%d: %s", i+1, log[at:min(len(log), at+4000)])
		}
		b, err := w.Admin(ctx, i, "/metrics")
		if err != nil {
			return err
		}
		if !regexp.MustCompile(`(?m)^aether_loop_panics_total 0$`).Match(b) {
			at := max(0, bytes.Index(log, []byte("panic")))
			return fmt.Errorf("node%d: the proxy panicked: %s", i+1, log[at:min(len(log), at+4000)])
		}
	}
	return nil
}

func local(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

// vip is the IPv4 address of service n with a port.
func vip(n uint8, port int) string {
	return netip.AddrPortFrom(w.ClusterIPs(n)[0], uint16(port)).String()
}

const proxyPort = "127.0.0.1:18081"

// within bounds what the test does.
func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// patience is how long a test waits for what must happen but promises no time.
const patience = 12 * time.Second

// handlers dispatch by path, each path a test's own.
type handlers struct{ m sync.Map }

// at serves f at the path that it returns.
func (h *handlers) at(t testing.TB, f http.HandlerFunc) (path string) {
	path = pathOf(t)
	if _, taken := h.m.LoadOrStore(path, f); taken {
		t.Fatalf("path %s is taken", path)
	}
	t.Cleanup(func() { h.m.Delete(path) })
	return path
}

var noPath = regexp.MustCompile(`[^A-Za-z0-9/_-]+`)

func pathOf(t testing.TB) string { return "/" + noPath.ReplaceAllString(t.Name(), "-") }

func (h *handlers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if f, ok := h.m.Load(r.URL.Path); ok {
		f.(http.HandlerFunc)(w, r)
		return
	}
	http.Error(w, "no test serves "+r.URL.Path, http.StatusNotFound)
}

// rawApp speaks HTTP/1 by hand: each request's head is read, and the connection
// given to the test that owns its path.
type rawApp struct{ m sync.Map }

// rawRequest is a request as it came.
type rawRequest struct {
	c    *net.TCPConn
	r    *bufio.Reader // what follows the head
	head string        // with the empty line
}

// at calls f with each request for the path. The connection takes another one when
// f returns, unless f has closed it.
func (a *rawApp) at(t testing.TB, f func(rawRequest)) (path string) {
	path = pathOf(t)
	if _, taken := a.m.LoadOrStore(path, f); taken {
		t.Fatalf("path %s is taken", path)
	}
	t.Cleanup(func() { a.m.Delete(path) })
	return path
}

func (a *rawApp) serve(c *net.TCPConn) {
	r := bufio.NewReader(c)
	for {
		head, err := readHead(r)
		if err != nil {
			return
		}
		target := strings.Fields(head)
		if len(target) < 2 {
			return
		}
		path, _, _ := strings.Cut(target[1], "?")
		f, ok := a.m.Load(path)
		if !ok {
			return
		}
		f.(func(rawRequest))(rawRequest{c, r, head})
	}
}

// readHead reads up to and with the empty line.
func readHead(r *bufio.Reader) (string, error) {
	var b strings.Builder
	for {
		line, err := r.ReadString('\n')
		b.WriteString(line)
		if err != nil {
			return b.String(), err
		}
		if line == "\r\n" {
			return b.String(), nil
		}
	}
}

// tcpQueue gives a raw-TCP port's connections to the test that asks for one.
// A port is one test's.
type tcpQueue struct{ c chan *queued }

type queued struct {
	*net.TCPConn
	done chan struct{}
}

var queues = func() (q [5]tcpQueue) {
	for i := range q {
		q[i].c = make(chan *queued)
	}
	return q
}()

func (q *tcpQueue) serve(c *net.TCPConn) {
	s := &queued{c, make(chan struct{})}
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case q.c <- s:
		<-s.done
	case <-t.C: // no test wants it
	}
}

// accept returns the next connection to the port; it is closed with the test.
func (q *tcpQueue) accept(t testing.TB, ctx context.Context) *net.TCPConn {
	t.Helper()
	select {
	case s := <-q.c:
		t.Cleanup(func() { s.Close(); close(s.done) })
		return deadline(ctx, s.TCPConn)
	case <-ctx.Done():
		t.Fatal("no connection reached the application")
		return nil
	}
}

func echo(c *net.TCPConn) {
	io.Copy(c, c)
	c.CloseWrite()
}

// deadline gives the connection ctx's.
func deadline(ctx context.Context, c *net.TCPConn) *net.TCPConn {
	if d, ok := ctx.Deadline(); ok {
		c.SetDeadline(d)
	}
	return c
}

// dial connects from the pod; the connection ends with the test and has ctx's deadline.
func dial(t testing.TB, ctx context.Context, from *rig.Pod, addr string) *net.TCPConn {
	t.Helper()
	c, err := from.Dial(ctx, "tcp", addr)
	if err != nil {
		t.Fatalf("dial %s from %s: %v", addr, from.Name, err)
	}
	t.Cleanup(func() { c.Close() })
	return deadline(ctx, c.(*net.TCPConn))
}

// listen listens in the namespace until the test's end.
func listen(t testing.TB, ctx context.Context, s *rig.Space, addr string) net.Listener {
	t.Helper()
	l, err := s.Listen(ctx, "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// acceptOne accepts a connection, which ends with the test and has ctx's deadline.
func acceptOne(t testing.TB, ctx context.Context, l net.Listener) *net.TCPConn {
	t.Helper()
	if d, ok := ctx.Deadline(); ok {
		l.(*net.TCPListener).SetDeadline(d)
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatalf("nothing reached the server: %v", err)
	}
	t.Cleanup(func() { c.Close() })
	return deadline(ctx, c.(*net.TCPConn))
}

// answer is a response read whole.
type answer struct {
	*http.Response
	body string
}

// send makes one request by t and reads the answer.
func send(ctx context.Context, rt http.RoundTripper, method, host, path string, body io.Reader, header ...string) (*answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://service"+path, body)
	if err != nil {
		return nil, err
	}
	req.Host = host
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	res, err := rt.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return &answer{res, string(b)}, err
}

// mustSend is send that ends the test on an error.
func mustSend(t testing.TB, ctx context.Context, rt http.RoundTripper, method, host, path string, body io.Reader, header ...string) *answer {
	t.Helper()
	a, err := send(ctx, rt, method, host, path, body, header...)
	if err != nil {
		t.Fatalf("%s %s%s: %v", method, host, path, err)
	}
	return a
}

// transport is an HTTP client from the pod to addr, closed with the test.
func transport(t testing.TB, h2 bool, from *rig.Pod, addr string) *http.Transport {
	rt := mesh.HTTP1(from, addr)
	if h2 {
		rt = mesh.H2C(from, addr)
	}
	t.Cleanup(rt.CloseIdleConnections)
	return rt
}

// pair is a codec of the client and one of the application.
type pair struct {
	name     string
	clientH2 bool
	port     int
}

var pairs = []pair{
	{"h1 to h1", false, portH1},
	{"h1 to h2", false, portH2},
	{"h2 to h1", true, portH1},
	{"h2 to h2", true, portH2},
}

// each runs f, in parallel, for every pair of codecs, with a captured client.
func each(t *testing.T, f func(t *testing.T, ctx context.Context, rt *http.Transport, host string)) {
	for _, p := range pairs {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			f(t, within(t, patience), transport(t, p.clientH2, w.Pod("web"), vip(appVIP, p.port)), fmt.Sprintf("%s:%d", appName, p.port))
		})
	}
}

// recv is the next value of ch; the test ends when there is none in ctx's time.
func recv[T any](t testing.TB, ctx context.Context, ch <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-ctx.Done():
		t.Fatalf("%s did not happen: %v", what, ctx.Err())
		panic("not reached")
	}
}
