package netns

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// udsCarrier is the volume of pods that listen at a Unix socket (contract 1.7).
var udsCarrier = map[string]string{"app": "csi.aether.io", "tmp": ""}

// udsMesh is a mesh whose pods' Unix sockets are in a directory of the test's.
type udsMesh struct {
	*mesh.Mesh
	t   *testing.T
	ctx context.Context
	dir string
	n   uint8
}

func newUDSMesh(t *testing.T, ctx context.Context) *udsMesh {
	t.Helper()
	dir, err := os.MkdirTemp("", "uds") // t.TempDir's is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	m, err := mesh.New(ctx, mesh.Options{Proxy: w.binary, Args: []string{"--uds-dir", dir}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return &udsMesh{Mesh: m, t: t, ctx: ctx, dir: dir, n: 10}
}

// pod makes a pod with a Service, and the directory of its volume.
func (m *udsMesh) pod(p mesh.Pod) *rig.Pod {
	m.t.Helper()
	pod, err := m.AddPod(m.ctx, p)
	if err != nil {
		m.t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(m.dir, pod.UID("shop")), 0o2770); err != nil {
		m.t.Fatal(err)
	}
	return pod
}

// service makes a Service and returns where its port is dialled, by port.
func (m *udsMesh) service(name string, ports ...uint16) func(port int) string {
	m.t.Helper()
	m.n++
	ips := m.ClusterIPs(m.n)
	if err := m.Service(rig.ServiceManifest{Name: name, ClusterIPs: ips, Ports: ports}); err != nil {
		m.t.Fatal(err)
	}
	return func(port int) string { return fmt.Sprintf("%s:%d", ips[0], port) }
}

// at is the path of a file in the pod's volume.
func (m *udsMesh) at(pod *rig.Pod, file string) string {
	return filepath.Join(m.dir, pod.UID("shop"), file)
}

// policy has the pods of a Service delivered to by a socket; "": by none, any more.
func (m *udsMesh) policy(service, socket string) {
	m.t.Helper()
	var err error
	if socket == "" {
		err = m.Remove("policy-" + service)
	} else {
		err = m.Write("policy-"+service, fmt.Sprintf(
			"apiVersion: config.aether.io/v1\nkind: EndpointPolicy\nmetadata: {namespace: shop, name: %s}\nspec: {targetRef: {kind: Service, name: %s}, udsSocket: %s}\n", service, service, socket))
	}
	if err := errors.Join(err, m.Sync(m.ctx)); err != nil {
		m.t.Fatal(err)
	}
}

// oneForAll is an application that takes whatever comes at one Unix socket: raw TCP that begins with
// RAW, which it sends back, and HTTP/1.1 and h2c, which it answers with its name and what it was asked.
type oneForAll struct {
	conns atomic.Int64
	queue chan net.Conn
	net.Listener
	srv  *http.Server
	done sync.WaitGroup
}

func (m *udsMesh) serve(path, name string) *oneForAll {
	m.t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		m.t.Fatal(err)
	}
	a := &oneForAll{Listener: l, queue: make(chan net.Conn)}
	a.srv = &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "echo" {
			c, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				m.t.Error(err)
				return
			}
			defer c.Close()
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			io.Copy(c, rw)
			return
		}
		b, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s HTTP/%d %s %d %s", name, r.ProtoMajor, r.Host, len(b), r.Header.Get("X-Forwarded-Client-Cert"))
	})}
	a.srv.Protocols.SetHTTP1(true)
	a.srv.Protocols.SetUnencryptedHTTP2(true)
	ended := make(chan struct{})
	a.done.Go(func() { a.srv.Serve(httpQueue{a, ended}) })
	a.done.Go(func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			a.conns.Add(1)
			a.done.Go(func() {
				r := bufio.NewReader(c)
				if first, err := r.Peek(4); err != nil || string(first) == "RAW\n" {
					defer c.Close()
					io.Copy(c, r)
					return
				}
				select {
				case a.queue <- peeked{c, r}:
				case <-ended:
					c.Close()
				}
			})
		}
	})
	m.t.Cleanup(a.stop)
	return a
}

func (a *oneForAll) stop() {
	a.Listener.Close()
	a.srv.Close()
	a.done.Wait()
}

type peeked struct {
	net.Conn
	r *bufio.Reader
}

func (p peeked) Read(b []byte) (int, error) { return p.r.Read(b) }

// httpQueue is what of an application's connections is HTTP.
type httpQueue struct {
	a     *oneForAll
	ended chan struct{}
}

func (q httpQueue) Accept() (net.Conn, error) {
	select {
	case c := <-q.a.queue:
		return c, nil
	case <-q.ended:
		return nil, net.ErrClosed
	}
}
func (q httpQueue) Close() error   { return nil }
func (q httpQueue) Addr() net.Addr { return q.a.Listener.Addr() }

// problems are what a node tells of what is not in force.
func (m *udsMesh) problems(node int) string {
	m.t.Helper()
	s, err := m.Status(m.ctx, node)
	if err != nil {
		m.t.Fatal(err)
	}
	var out []string
	for _, p := range s.Problems {
		out = append(out, p.Object+": "+p.Reason)
	}
	return strings.Join(out, "\n")
}

func (m *udsMesh) admin(node int, path string) string {
	m.t.Helper()
	b, err := m.Admin(m.ctx, node, path)
	if err != nil {
		m.t.Fatal(err)
	}
	return string(b)
}

// TestUDS: contract 15.1's suite on the rig: delivery by annotation and by EndpointPolicy, which of them
// counts, every port to the one socket, what a pod may not plant, and what is refused.
func TestUDS(t *testing.T) {
	t.Parallel()
	ctx := within(t, 10*patience)
	m := newUDSMesh(t, ctx)
	client := m.pod(mesh.Pod{Name: "client"})
	beside := m.pod(mesh.Pod{Name: "beside", Node: 1})

	const ports = "8080,8081=h2,9000=tcp"
	annotated := func(socket string) map[string]string {
		return map[string]string{"endpoint.aether.io/uds-socket": socket}
	}
	ann := m.pod(mesh.Pod{Name: "ann", Node: 1, Ports: ports, Annotations: annotated("app/ann.sock"), Volumes: udsCarrier})
	both := m.pod(mesh.Pod{Name: "both", Node: 1, Ports: ports, Annotations: annotated("app/mine.sock")}) // its document says nothing of volumes
	pol := m.pod(mesh.Pod{Name: "pol", Node: 1, Ports: ports, Volumes: udsCarrier})
	bad := m.pod(mesh.Pod{Name: "bad", Node: 1, Ports: ports, Annotations: annotated("tmp/ann.sock"), Volumes: udsCarrier})
	annAt, bothAt := m.service("ann", 8080, 8081, 9000), m.service("both", 8080, 8081, 9000)
	polAt, badAt := m.service("pol", 8080, 8081, 9000), m.service("bad", 8080, 8081, 9000)

	annApp := m.serve(m.at(ann, "ann.sock"), "ann")
	m.serve(m.at(both, "mine.sock"), "annotation")
	m.serve(m.at(both, "other.sock"), "policy")
	m.serve(m.at(bad, "ann.sock"), "never")
	for _, p := range []*rig.Pod{pol, bad} {
		if err := m.ServeHTTP(ctx, &p.Space, local(8080), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "loopback") })); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Start(ctx); err != nil {
		t.Fatal(err)
	}
	get := func(from *rig.Pod, h2 bool, at, host string) string {
		t.Helper()
		return outcome(mustSend(t, ctx, transport(t, h2, from, at), "POST", host, "/", strings.NewReader("body")))
	}
	prefix := func(what, got, want string) {
		t.Helper()
		if !strings.HasPrefix(got, want) {
			t.Errorf("%s:\ngot  %s\nwant %s...", what, got, want)
		}
	}

	t.Run("every port goes to the one socket", func(t *testing.T) {
		for _, h2 := range []bool{false, true} {
			prefix("HTTP/1.1 port", get(client, h2, annAt(8080), "ann"), "200 ann HTTP/1 ann 4 By=spiffe://rig.test/ns/shop/sa/ann;Hash=")
			prefix("h2c port", get(client, h2, annAt(8081), "ann"), "200 ann HTTP/2 ann 4 By=spiffe://")
		}
		c := dial(t, ctx, client, annAt(9000))
		say(t, c, "RAW\nbytes\n")
		expect(t, c, "RAW\nbytes\n")
		c.CloseWrite()
		expectEnd(t, c)
		if n := annApp.conns.Load(); n < 3 {
			t.Errorf("%d connections came to the socket", n)
		}
		if why := m.admin(1, "/why?n=100"); !strings.Contains(why, "unix:ann.sock") {
			t.Errorf("nothing tells of the socket:\n%s", why)
		}
		if conns := m.admin(1, "/connections"); !strings.Contains(conns, "unix:ann.sock") {
			t.Errorf("no connection is shown with its socket:\n%s", conns)
		}
	})

	t.Run("an upgrade", func(t *testing.T) {
		c := dial(t, ctx, client, annAt(8080))
		say(t, c, "GET /chat HTTP/1.1\r\nHost: ann\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		r := bufio.NewReader(c)
		if head, err := readHead(r); err != nil || !strings.HasPrefix(head, "HTTP/1.1 101 ") {
			t.Fatalf("%q, %v", head, err)
		}
		say(t, c, "ping\n")
		if got, err := r.ReadString('\n'); got != "ping\n" {
			t.Errorf("%q, %v", got, err)
		}
	})

	t.Run("in process, too", func(t *testing.T) {
		for _, way := range []string{"mTLS", "inProcess"} {
			if err := errors.Join(m.Write("config", "apiVersion: config.aether.io/v1\nkind: MeshConfig\nmetadata: {namespace: aether-system, name: default}\nspec: {sameNode: "+way+"}\n"), m.Sync(ctx)); err != nil {
				t.Fatal(err)
			}
			prefix(way, get(beside, false, annAt(8080), "ann"), "200 ann HTTP/1 ann 4 By=spiffe://rig.test/ns/shop/sa/ann;Hash=")
		}
	})

	t.Run("an annotation beats a policy", func(t *testing.T) {
		prefix("annotation alone", get(client, false, bothAt(8080), "both"), "200 annotation HTTP/1")
		m.policy("both", "app/other.sock")
		prefix("with a policy", get(client, false, bothAt(8080), "both"), "200 annotation HTTP/1")
		m.policy("both", "")
	})

	t.Run("what is refused keeps TCP, is a problem and counted", func(t *testing.T) {
		prefix("an emptyDir", get(client, false, badAt(8080), "bad"), "200 loopback")
		if p := m.problems(1); !strings.Contains(p, "Pod shop/bad: annotation endpoint.aether.io/uds-socket") || strings.Contains(p, "Pod shop/ann") {
			t.Errorf("problems:\n%s", p)
		}
		if metrics := m.admin(1, "/metrics"); !strings.Contains(metrics, `aether_agent_uds_resolve_failures_total{reason="not_csi"} 1`) {
			t.Error("it is not counted as not_csi")
		}
	})

	t.Run("what is planted is not followed", func(t *testing.T) {
		secret := filepath.Join(m.dir, "secret.sock")
		reached := m.serve(secret, "secret")
		for name, plant := range map[string]func(path string) error{
			"a link out":             func(path string) error { return os.Symlink(secret, path) },
			"a link to another pod":  func(path string) error { return os.Symlink(m.at(ann, "ann.sock"), path) },
			"a link up":              func(path string) error { return os.Symlink("../secret.sock", path) },
			"a file":                 func(path string) error { return os.WriteFile(path, []byte("x"), 0o666) },
			"a directory":            func(path string) error { return os.Mkdir(path, 0o777) },
			"nothing":                func(string) error { return nil },
			"a socket nobody serves": func(path string) error { return stale(path) },
		} {
			if err := plant(m.at(pol, "planted.sock")); err != nil {
				t.Fatal(err)
			}
			before := annApp.conns.Load()
			m.policy("pol", "app/planted.sock")
			for _, port := range []int{8080, 8081} {
				if got := get(client, false, polAt(port), "pol"); !strings.HasPrefix(got, "503") {
					t.Errorf("%s, port %d: %s", name, port, got)
				}
			}
			switch c, err := client.Dial(ctx, "tcp", polAt(9000)); {
			case errors.Is(err, syscall.ECONNRESET): // which may come before the client has seen itself connected
			case err != nil:
				t.Errorf("%s, raw TCP: %v", name, err)
			default:
				deadline(ctx, c.(*net.TCPConn))
				_, wrote := io.WriteString(c, "RAW\n") // the first call that meets the reset is told of it, and no other
				n, err := c.Read(make([]byte, 1))
				if n > 0 || !errors.Is(errors.Join(wrote, err), syscall.ECONNRESET) {
					t.Errorf("%s, raw TCP: %v, then %d bytes, %v", name, wrote, n, err)
				}
				c.Close()
			}
			if reached.conns.Load() > 0 || annApp.conns.Load() != before {
				t.Fatalf("%s was followed", name)
			}
			m.policy("pol", "")
			if got := get(client, false, polAt(8080), "pol"); got != "200 loopback" {
				t.Errorf("%s, the policy is gone: %s", name, got)
			}
			os.Remove(m.at(pol, "planted.sock"))
		}
		prefix("others are served", get(client, false, annAt(8080), "ann"), "200 ann")
	})
}

// TestUDSIsNoWayAroundAFilter: where an inbound filter judges the requests that come to a pod's Unix socket, raw TCP
// does not come there, on a new connection of anybody's: its bytes could be a request, with a caller's own word of
// who it is. It goes to the loopback, whether anybody listens there or not; and without the filter to the socket again.
func TestUDSIsNoWayAroundAFilter(t *testing.T) {
	t.Parallel()
	ctx := within(t, 5*patience)
	m := newUDSMesh(t, ctx)
	client := m.pod(mesh.Pod{Name: "client"})
	shop := m.pod(mesh.Pod{Name: "shop", Node: 1, Ports: "8080,9000=tcp,9001=tcp", Annotations: map[string]string{"endpoint.aether.io/uds-socket": "app/shop.sock"}, Volumes: udsCarrier})
	at := m.service("shop", 8080, 9000, 9001)
	m.serve(m.at(shop, "shop.sock"), "socket")
	if err := m.ServeHTTP(ctx, &shop.Space, local(9000), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "loopback") })); err != nil {
		t.Fatal(err)
	}
	if err := m.Start(ctx); err != nil {
		t.Fatal(err)
	}
	const forged = "GET /admin HTTP/1.1\r\nHost: shop\r\nX-Forwarded-Client-Cert: By=x;URI=spiffe://rig.test/ns/admin/sa/root\r\nConnection: close\r\n\r\n"
	raw := func(port int) string {
		t.Helper()
		c, err := client.Dial(ctx, "tcp", at(port))
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		deadline(ctx, c.(*net.TCPConn))
		_, wrote := io.WriteString(c, forged)
		b, err := io.ReadAll(c)
		return fmt.Sprint(string(b), errors.Join(wrote, err))
	}
	request := func() string {
		return outcome(mustSend(t, ctx, transport(t, false, client, at(8080)), "GET", "shop", "/admin", nil))
	}
	filter := func(spec string) {
		t.Helper()
		err := m.Remove("filter")
		if spec != "" {
			err = m.Write("filter", "apiVersion: config.aether.io/v1\nkind: HTTPFilter\nmetadata: {namespace: shop, name: guard}\nspec:\n  scope: SCOPE_INBOUND\n  targetRefs: [{kind: Service, name: shop}]\n"+spec)
		}
		if err := errors.Join(err, m.Sync(ctx)); err != nil {
			t.Fatal(err)
		}
	}
	open := func() {
		t.Helper()
		if got := request(); !strings.HasPrefix(got, "200 socket") {
			t.Errorf("without a filter: %s", got)
		}
		if got := raw(9000); !strings.Contains(got, "socket HTTP/1") {
			t.Errorf("without a filter, raw TCP: %s", got)
		}
	}
	open()
	for what, spec := range map[string]string{
		"a policy that denies":      "  rbac: {action: DENY, policies: [{name: p, principals: [{namespace: shop}], permissions: [{pathPrefix: /admin}]}]}\n",
		"a filter that is mistaken": "  rbac: {action: DENY, policies: [{nonsense: 1}]}\n",
	} {
		filter(spec)
		if got := request(); !strings.HasPrefix(got, "403") {
			t.Errorf("%s: %s", what, got)
		}
		if got := raw(9000); !strings.Contains(got, "loopback") || strings.Contains(got, "socket") {
			t.Errorf("%s, raw TCP to a port with a listener: %s", what, got)
		}
		if got := raw(9001); !strings.Contains(got, "connection reset") || strings.Contains(got, "HTTP/") {
			t.Errorf("%s, raw TCP to a port without one: %s", what, got)
		}
		if p := m.problems(1); !strings.Contains(p, "Pod shop/shop: raw TCP (9000, 9001) goes to 127.0.0.1 and not to its Unix socket") {
			t.Errorf("%s: problems:\n%s", what, p)
		}
	}
	filter("")
	open()
}

// stale leaves a socket that nobody serves.
func stale(path string) error {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	return l.Close()
}

// TestUDSPolicyUnderTraffic: an EndpointPolicy appears, changes and goes while requests are under way: each
// is answered, by what is in force, and the hop's session is the same throughout.
func TestUDSPolicyUnderTraffic(t *testing.T) {
	t.Parallel()
	ctx := within(t, 10*patience)
	m := newUDSMesh(t, ctx)
	client := m.pod(mesh.Pod{Name: "client"})
	pod := m.pod(mesh.Pod{Name: "app", Node: 1, Ports: "8080,8081=h2", Volumes: udsCarrier})
	at := m.service("app", 8080, 8081)
	m.serve(m.at(pod, "a.sock"), "a")
	m.serve(m.at(pod, "b.sock"), "b")
	for _, port := range []int{8080, 8081} {
		if err := m.ServeHTTP(ctx, &pod.Space, local(port), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "tcp") })); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Start(ctx); err != nil {
		t.Fatal(err)
	}
	sessions := func() (n int, requests uint64) {
		t.Helper()
		var s struct {
			Sessions []struct{ Requests uint64 } `json:"sessions"`
		}
		if err := json.Unmarshal([]byte(m.admin(0, "/sessions?format=json")), &s); err != nil {
			t.Fatal(err)
		}
		for _, x := range s.Sessions {
			requests += x.Requests
		}
		return len(s.Sessions), requests
	}
	stop, end := context.WithCancel(ctx)
	var failed, sent atomic.Int64
	var seen sync.Map              // by whom a port was answered
	news := make(chan struct{}, 1) // of seen
	var traffic sync.WaitGroup
	for i := range 4 {
		traffic.Go(func() {
			port := []int{8080, 8081}[i%2]
			rt := transport(t, i/2 == 1, client, at(port))
			for stop.Err() == nil {
				a, err := send(ctx, rt, "POST", "app", "/", strings.NewReader("x"))
				sent.Add(1)
				if err != nil || a.StatusCode != 200 {
					if failed.Add(1) < 5 {
						t.Errorf("port %d: %v %+v", port, err, a)
					}
					continue
				}
				name, _, _ := strings.Cut(a.body, " ")
				seen.Store(fmt.Sprint(name, port), true)
				select {
				case news <- struct{}{}:
				default:
				}
			}
		})
	}
	// Once a change is in force, no request that begins later is answered by what was before.
	is := func(want string) {
		t.Helper()
		for _, port := range []int{8080, 8081} {
			if got := outcome(mustSend(t, ctx, transport(t, false, client, at(port)), "POST", "app", "/", strings.NewReader("x"))); !strings.HasPrefix(got, "200 "+want) {
				t.Errorf("port %d: %s, want %s", port, got, want)
			}
			name, _, _ := strings.Cut(want, " ")
			seen.Delete(fmt.Sprint(name, port))
			for _, ok := seen.Load(fmt.Sprint(name, port)); !ok; _, ok = seen.Load(fmt.Sprint(name, port)) {
				recv(t, ctx, news, "an answer by "+want)
			}
		}
	}
	is("tcp")
	before, _ := sessions()
	for range 5 {
		m.policy("app", "app/a.sock")
		is("a HTTP")
		m.policy("app", "app/b.sock")
		is("b HTTP")
		m.policy("app", "")
		is("tcp")
	}
	after, requests := sessions()
	end()
	traffic.Wait()
	if failed.Load() > 0 {
		t.Errorf("%d of %d requests failed", failed.Load(), sent.Load())
	}
	if before != after || requests < uint64(sent.Load())/2 {
		t.Errorf("%d hop sessions before, %d after with %d requests of %d: the listener was touched", before, after, requests, sent.Load())
	}
	t.Logf("%d requests under %d changes, %d failed", sent.Load(), 15, failed.Load())
}

// TestUDSRetriedElsewhere: a pod whose socket nobody serves costs no request where another serves.
func TestUDSRetriedElsewhere(t *testing.T) {
	t.Parallel()
	ctx := within(t, 5*patience)
	m := newUDSMesh(t, ctx)
	client := m.pod(mesh.Pod{Name: "client"})
	for _, name := range []string{"dead", "live"} {
		p := m.pod(mesh.Pod{Name: name, Account: "app", Node: 1, Ports: "8080", Volumes: udsCarrier, Annotations: map[string]string{"endpoint.aether.io/uds-socket": "app/a.sock"}})
		if name == "live" {
			m.serve(m.at(p, "a.sock"), "live")
		} else if err := stale(m.at(p, "a.sock")); err != nil {
			t.Fatal(err)
		}
	}
	at := m.service("app", 8080)
	if err := m.Start(ctx); err != nil {
		t.Fatal(err)
	}
	rt := transport(t, false, client, at(8080))
	for i := range 30 {
		if got := outcome(mustSend(t, ctx, rt, "POST", "app", "/", strings.NewReader("x"))); !strings.HasPrefix(got, "200 live") {
			t.Errorf("request %d: %s", i, got)
		}
	}
	if why := m.admin(1, "/why?n=200"); !strings.Contains(why, "0;UF;POST;upstream_connection_failure") {
		t.Errorf("the dead one was never met, or not told so:\n%s", why)
	}
}
