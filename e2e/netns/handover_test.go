package netns

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"aether/controlplane/compile"
	"aether/dataplane"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/e2e/mesh"
	"aether/e2e/rig"
	"aether/mtls/devca"
)

var replacements = flag.Int("replacements", 3, "how often TestHandOver replaces the proxy of each node")

// traffic is a mesh of its own with a client on node1 and a server on node2, whose
// application keeps count of what reached it.
type traffic struct {
	*mesh.Mesh
	client, server *rig.Pod
	got            sync.Map // id of a request, or connection → *atomic.Int32
	sent           atomic.Int64
	failed         atomic.Int64
}

const trafficHost = "server.shop.aether.internal:8080"

func newTraffic(t *testing.T, ctx context.Context, args ...string) *traffic {
	t.Helper()
	m, err := mesh.New(ctx, mesh.Options{Proxy: w.binary, Args: args})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for i := range m.Rig.Nodes {
				if p := m.Proxy(i); p != nil {
					t.Logf("log of node%d's proxies ends:\n%s", i+1, p.Tail(6000))
				}
			}
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	f := &traffic{Mesh: m}
	for i, name := range []string{"client", "server"} {
		if _, err := m.AddPod(ctx, mesh.Pod{Name: name, Node: i, Ports: "8080,9000=tcp"}); err != nil {
			t.Fatal(err)
		}
	}
	f.client, f.server = m.Pod("client"), m.Pod("server")
	if err := m.Service(rig.ServiceManifest{Name: "server", ClusterIPs: m.ClusterIPs(10), Ports: []uint16{8080, 9000}}); err != nil {
		t.Fatal(err)
	}
	err = errors.Join(
		m.ServeHTTP(ctx, &f.server.Space, local(8080), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			b, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			f.came(string(b))
			w.Write(b)
		})),
		m.ServeTCP(ctx, &f.server.Space, local(9000), func(c *net.TCPConn) {
			b, err := io.ReadAll(c)
			if err != nil {
				return
			}
			f.came(string(b))
			c.Write(b)
			c.CloseWrite()
		}),
		m.Start(ctx))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *traffic) came(id string) {
	n, _ := f.got.LoadOrStore(id, new(atomic.Int32))
	n.(*atomic.Int32).Add(1)
}

func (f *traffic) vip(port uint16) string {
	return netip.AddrPortFrom(f.ClusterIPs(10)[0], port).String()
}

// post sends the id and wants it back.
func (f *traffic) post(ctx context.Context, rt http.RoundTripper, id string) error {
	// Without GetBody: the client itself sends nothing a second time.
	a, err := send(ctx, rt, "POST", trafficHost, "/", struct{ io.Reader }{strings.NewReader(id)})
	if err == nil && (a.StatusCode != 200 || a.body != id) {
		err = fmt.Errorf("%d %q", a.StatusCode, a.body)
	}
	return err
}

// raw is post over a TCP connection of its own.
func (f *traffic) raw(ctx context.Context, id string) error {
	c, err := f.client.Dial(ctx, "tcp", f.vip(9000))
	if err != nil {
		return err
	}
	defer c.Close()
	deadline(ctx, c.(*net.TCPConn))
	if _, err := io.WriteString(c, id); err != nil {
		return err
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	b, err := io.ReadAll(c)
	if err == nil && string(b) != id {
		err = fmt.Errorf("%q came back", b)
	}
	return err
}

// run makes calls from many workers, rate a second in all, until the returned function is called, which waits for those
// under way. A call that is late is made at once; none is left out.
func (f *traffic) run(t *testing.T, rate int) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	const kinds, each = 5, 3
	one := func(name string, call func(ctx context.Context, id string) error) {
		for i := range each {
			all.Go(func() {
				start, every := time.Now(), time.Second*kinds*each/time.Duration(rate)
				for n := 0; ; n++ {
					select {
					case <-ctx.Done():
						return
					case <-time.After(time.Until(start.Add(time.Duration(n+1) * every))):
					}
					id := fmt.Sprintf("%s-%d-%d", name, i, n)
					call1, done := context.WithTimeout(context.Background(), patience)
					err := call(call1, id)
					done()
					f.sent.Add(1)
					if err != nil && f.failed.Add(1) <= 10 {
						t.Errorf("%s: %v", id, err)
					}
				}
			})
		}
	}
	h1, h2 := transport(t, false, f.client, f.vip(8080)), transport(t, true, f.client, f.vip(8080))
	h1.MaxIdleConnsPerHost = each
	h1new := transport(t, false, f.client, f.vip(8080))
	h1new.DisableKeepAlives = true
	proxied := transport(t, false, f.client, proxyPort)
	proxied.MaxIdleConnsPerHost = each
	for name, rt := range map[string]http.RoundTripper{"kept": h1, "new": h1new, "h2c": h2, "proxied": proxied} {
		one(name, func(ctx context.Context, id string) error { return f.post(ctx, rt, id) })
	}
	one("raw", f.raw)
	return func() { cancel(); all.Wait() }
}

// once: everything that was sent came, and came once.
func (f *traffic) once(t *testing.T) {
	n := int64(0)
	f.got.Range(func(id, times any) bool {
		n++
		if c := times.(*atomic.Int32).Load(); c != 1 {
			t.Errorf("%s came %d times", id, c)
		}
		return true
	})
	if want := f.sent.Load() - f.failed.Load(); n < want {
		t.Errorf("%d calls reached the application, of %d that were answered", n, want)
	}
}

// TestHandOver: proxies are replaced under load, first the source's, then the destination's, and
// no call fails or is made twice, on connections that are kept or new, HTTP/1, HTTP/2 or TCP: the old
// process keeps what it accepted until its drain ends (case 140).
func TestHandOver(t *testing.T) {
	ctx := within(t, time.Minute+time.Duration(*replacements)*20*time.Second)
	f := newTraffic(t, ctx, "--drain-time", "10s")
	rate := 1000
	if raceEnabled {
		rate = 150 // its proxies are some ten times as slow
	}
	start := time.Now()
	stop := f.run(t, rate)
	replaced := 0
	for node := range f.Rig.Nodes {
		for range *replacements {
			began := f.sent.Load()
			if err := f.ReplaceProxy(ctx, node); err != nil {
				t.Error(err)
				break
			}
			replaced++
			// And some calls by the new one before it is replaced in turn.
			err := rig.Until(ctx, func(context.Context) error {
				if n := f.sent.Load() - began; n < int64(rate/2) {
					return fmt.Errorf("%d calls", n)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		}
	}
	reached := float64(f.sent.Load()) / time.Since(start).Seconds()
	stop()
	f.once(t)
	t.Logf("%d replacements: %d calls, %.0f a second, %d failed", replaced, f.sent.Load(), reached, f.failed.Load())
	if reached < 0.8*float64(rate) {
		t.Errorf("%.0f calls a second were reached, of %d", reached, rate)
	}
	if replaced < 2**replacements || f.failed.Load() > 0 {
		t.Errorf("%d replacements, %d calls of %d failed", replaced, f.failed.Load(), f.sent.Load())
	}
	for node := range f.Rig.Nodes {
		s, err := f.Status(ctx, node)
		if err != nil || len(s.Pods) != 1 || len(s.Problems) != 0 {
			t.Errorf("node%d: %+v, %v", node+1, s, err)
		}
	}
	if !strings.Contains(tables(t, ctx, f.client), "aether_capture") {
		t.Error("the capture rules went with a replaced proxy")
	}
}

// TestSuccessorGivesUp: a process that took the sockets and ended before it accepted leaves the
// old one serving as before; while one takes over another is refused.
func TestSuccessorGivesUp(t *testing.T) {
	t.Parallel()
	ctx := within(t, 2*patience)
	f := newTraffic(t, ctx)
	dialLine := func() *net.UnixConn {
		t.Helper()
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: filepath.Join(f.Rig.Dir, "handover-node1"), Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(patience))
		if _, err := c.Write([]byte("aeth\x01\x01")); err != nil { // hello
			t.Fatal(err)
		}
		return c
	}
	read := func(c *net.UnixConn) (kind byte, fds int) {
		t.Helper()
		b, oob := make([]byte, 1<<16), make([]byte, 1<<12)
		n, oobn, _, _, err := c.ReadMsgUnix(b, oob)
		if err != nil || n < 6 {
			t.Fatalf("%d bytes, %v", n, err)
		}
		msgs, err := syscall.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range msgs {
			got, err := syscall.ParseUnixRights(&m)
			if err != nil {
				t.Fatal(err)
			}
			for _, fd := range got {
				syscall.Close(fd)
			}
			fds += len(got)
		}
		return b[5], fds
	}
	first := dialLine()
	if kind, fds := read(first); kind != 2 || fds != 5 { // capture, proxy twice, mesh; the admin
		t.Errorf("message %d with %d descriptors, want sockets with 5", kind, fds)
	}
	if kind, fds := read(first); kind != 3 || fds != 0 {
		t.Errorf("message %d with %d descriptors, want the end", kind, fds)
	}
	if kind, _ := read(dialLine()); kind != 6 {
		t.Errorf("a second one meanwhile got message %d, want a refusal", kind)
	}
	rt := transport(t, false, f.client, proxyPort)
	if err := f.post(ctx, rt, "meanwhile"); err != nil {
		t.Error(err)
	}
	first.Close()
	// What changed meanwhile is in force once it has gone.
	if _, err := f.AddPod(ctx, mesh.Pod{Name: "late", Ports: "8080", NoSVID: true}); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	err := rig.Until(ctx, func(ctx context.Context) error {
		s, err := f.Status(ctx, 0)
		if err == nil && len(s.Pods) != 2 {
			err = fmt.Errorf("%d pods are served", len(s.Pods))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if err := f.post(ctx, rt, "afterwards"); err != nil {
		t.Error(err)
	}
	if err := f.ReplaceProxy(ctx, 0); err != nil { // and the next one takes over, though a pod's certificate never comes
		t.Error(err)
	}
	if log := f.Proxy(0).Tail(4000); !strings.Contains(log, "without a certificate") || !strings.Contains(log, "shop/late") {
		t.Errorf("it does not say that it waited for a certificate:\n%s", log)
	}
	if err := f.post(ctx, transport(t, false, f.client, proxyPort), "by the next"); err != nil {
		t.Error(err)
	}
}

// TestDrain: a proxy that is told to stop, with no successor, answers what is under way and what
// still comes, says 503 to readiness, ends when nothing is left (case 142), and only then refuses. What
// does not end in time is cut.
func TestDrain(t *testing.T) {
	t.Parallel()
	for node, name := range []string{"source", "destination"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := within(t, 3*patience)
			f := newTraffic(t, ctx, "--drain-time", "20s")
			begun, gate := make(chan struct{}, 2), make(chan struct{})
			slow := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				io.WriteString(w, "half")
				w.(http.Flusher).Flush()
				begun <- struct{}{}
				<-gate
				io.WriteString(w, " and half")
			})
			if err := f.ServeHTTP(ctx, &f.server.Space, "127.0.0.1:8081", slow); err != nil {
				t.Fatal(err)
			}
			if err := f.Write("pod-server", rig.PodYAML(f.server, rig.PodManifest{Namespace: "shop", Account: "server", Ports: "8080,8081,9000=tcp"})); err != nil {
				t.Fatal(err)
			}
			if err := f.Service(rig.ServiceManifest{Name: "server", ClusterIPs: f.ClusterIPs(10), Ports: []uint16{8080, 8081, 9000}}); err != nil {
				t.Fatal(err)
			}
			if err := f.Sync(ctx); err != nil {
				t.Fatal(err)
			}
			type result struct {
				a   *answer
				err error
			}
			long := make(chan result, 2)
			for _, h2 := range []bool{false, true} {
				rt := transport(t, h2, f.client, f.vip(8081))
				go func() {
					a, err := send(ctx, rt, "GET", "server", "/", nil)
					rt.CloseIdleConnections() // its head went before it could say that it is the last
					long <- result{a, err}
				}()
				recv(t, ctx, begun, "the slow request")
			}
			relay := dial(t, ctx, f.client, f.vip(9000))
			say(t, relay, "first ")
			p := f.Proxy(node)
			if err := p.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			pod := []*rig.Pod{f.client, f.server}[node]
			err := rig.Until(ctx, func(ctx context.Context) error {
				rt := transport(t, false, pod, proxyPort)
				defer rt.CloseIdleConnections() // one that was asked too early
				a, err := send(ctx, rt, "GET", "any.example", "/aether/readyz", nil)
				if err == nil && (a.StatusCode != 503 || !a.Close) {
					err = fmt.Errorf("readiness is %d, close %v", a.StatusCode, a.Close)
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
			for i, h2 := range []bool{false, true} { // new connections are served
				if err := f.post(ctx, transport(t, h2, f.client, f.vip(8080)), fmt.Sprint("late", i)); err != nil {
					t.Errorf("a connection while it drains: %v", err)
				}
			}
			if err := f.raw(ctx, "late raw"); err != nil {
				t.Errorf("a TCP connection while it drains: %v", err)
			}
			say(t, relay, "second")
			relay.CloseWrite()
			expect(t, relay, "first second")
			relay.Close()
			select {
			case <-p.Done():
				t.Error("it ended while requests were under way")
			default:
			}
			close(gate)
			for range 2 {
				r := recv(t, ctx, long, "the slow request's end")
				if r.err != nil || r.a.body != "half and half" {
					t.Errorf("a request that was under way: %v, %+v", r.err, r.a)
				}
			}
			select {
			case <-p.Done():
				if err := p.Err(); err != nil {
					t.Errorf("it ended with %v", err)
				}
			case <-ctx.Done():
				t.Fatal("it does not end")
			}
			if err := f.StopProxy(node); err != nil { // forgotten
				t.Error(err)
			}
			if left := tables(t, ctx, pod); strings.TrimSpace(left) != "" {
				t.Errorf("it left capture rules:\n%s", left)
			}
			if c, err := pod.Dial(ctx, "tcp", proxyPort); err == nil {
				c.Close()
				t.Error("connected to the proxy port of a proxy that has ended")
			}
		})
	}
}

// TestDrainUnderLoad: clients that send as fast as they can, on kept connections and over HTTP/2,
// get the answer of every request that the application has done, to the last one that the proxy takes:
// whether it is told to stop or is replaced, at the source and at the destination.
func TestDrainUnderLoad(t *testing.T) {
	for node, side := range []string{"source", "destination"} {
		for _, how := range []string{"told to stop", "replaced"} {
			t.Run(side+" "+how, func(t *testing.T) {
				ctx := within(t, 4*patience)
				f := newTraffic(t, ctx, "--drain-time", "2s")
				const rounds, clients = 3, 8
				for round := range rounds {
					var answered sync.Map
					var all sync.WaitGroup
					over := make(chan struct{})
					for i := range clients {
						rt := transport(t, i%4 == 3, f.client, []string{f.vip(8080), proxyPort}[i%2])
						all.Go(func() {
							defer rt.CloseIdleConnections()
							for n := 0; ; n++ {
								select {
								case <-over:
									return
								default:
								}
								id := fmt.Sprintf("%d-%d-%d", round, i, n)
								call, done := context.WithTimeout(ctx, 3*time.Second) // nobody answers while there is no proxy
								if f.post(call, rt, id) == nil {
									answered.Store(id, true)
								}
								done()
							}
						})
					}
					count := func() (n int64) {
						answered.Range(func(any, any) bool { n++; return true })
						return n
					}
					more := func(n int64) error {
						return rig.Until(ctx, func(context.Context) error {
							if c := count(); c < n {
								return fmt.Errorf("%d answers", c)
							}
							return nil
						})
					}
					if err := more(100); err != nil {
						t.Fatal(err)
					}
					p := f.Proxy(node)
					var err error
					if how == "replaced" {
						err = f.ReplaceProxy(ctx, node)
					} else {
						err = p.Signal(syscall.SIGTERM)
					}
					if err != nil {
						t.Fatal(err)
					}
					recv(t, ctx, p.Done(), "the end of the proxy")
					close(over)
					all.Wait()
					f.got.Range(func(id, times any) bool {
						if n := times.(*atomic.Int32).Load(); n != 1 {
							t.Errorf("%s was done %d times", id, n)
						}
						if _, ok := answered.Load(id); !ok && strings.HasPrefix(id.(string), fmt.Sprint(round, "-")) {
							t.Errorf("%s was done, and its client was not told", id)
						}
						return true
					})
					t.Logf("%d answers", count())
					if how == "told to stop" {
						if err := errors.Join(f.StopProxy(node), f.StartProxy(node), f.Sync(ctx)); err != nil {
							t.Fatal(err)
						}
					}
				}
			})
		}
	}
}

// TestDrainDeadline: what is left at the deadline is cut, and a second signal does not wait for it.
func TestDrainDeadline(t *testing.T) {
	t.Parallel()
	ctx := within(t, 2*patience)
	f := newTraffic(t, ctx, "--drain-time", "1h")
	hang := func() *net.TCPConn {
		c := dial(t, ctx, f.client, f.vip(9000))
		say(t, c, "x")
		return c
	}
	c := hang()
	p := f.Proxy(0)
	if err := errors.Join(p.Signal(syscall.SIGTERM), rig.Until(ctx, func(context.Context) error {
		if !strings.Contains(p.Tail(4000), "draining") {
			return errors.New("it does not drain")
		}
		return nil
	}), p.Signal(syscall.SIGTERM)); err != nil {
		t.Fatal(err)
	}
	recv(t, ctx, p.Done(), "the end after a second signal")
	if b, err := io.ReadAll(c); err == nil {
		t.Errorf("a relay that was cut: %q and an orderly end", b)
	}
}

// TestCaptureOfSuccessor: a process that is about to take over has written the pod's capture rules, and
// if it ends before the other has let go, that one still serves by them: they stay. Once it is alone it takes
// them out; and one whose successor took them out and gave up writes them anew.
func TestCaptureOfSuccessor(t *testing.T) {
	t.Parallel()
	ctx := within(t, 2*patience)
	r, err := rig.New(ctx, rig.Options{Nodes: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	p, err := r.AddPod(ctx, 0, "web")
	if err != nil {
		t.Fatal(err)
	}
	ca, err := devca.Open(t.TempDir(), "td", nil)
	if err != nil {
		t.Fatal(err)
	}
	snap, _ := compile.Compile(&model.Mesh{})
	pods := []model.Workload{{Namespace: "shop", Name: "web", Account: "web", ContainerID: "web", NetNS: "/run/netns/" + p.NSName(), IPs: []netip.Addr{p.IP4}, SPIFFEID: "spiffe://td/ns/shop/sa/web"}}
	captured := func(want bool, when string) {
		t.Helper()
		if got := strings.Contains(tables(t, ctx, p), "aether_capture"); got != want {
			t.Errorf("%s: captured %v, want %v", when, got, want)
		}
	}
	serve := func(hold bool, during func(n *dataplane.Node)) {
		t.Helper()
		n, err := dataplane.New(dataplane.Config{Identities: ca.Source(time.Hour), Journal: journal.NewRing(1), Capture: true, StartPaused: hold})
		if err != nil {
			t.Fatal(err)
		}
		run, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- n.Run(run) }()
		n.Apply(snap, pods)
		if hold {
			err = n.Open(ctx)
		} else {
			err = rig.Until(ctx, func(context.Context) error {
				if !n.Ready() {
					return errors.New("not ready")
				}
				return nil
			})
		}
		if err != nil {
			t.Error(err)
		}
		during(n)
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	serve(true, func(*dataplane.Node) { captured(true, "open") })
	captured(true, "ended before the other had let go")
	serve(true, func(n *dataplane.Node) { n.Alone() })
	captured(false, "ended when it was alone")
	serve(false, func(n *dataplane.Node) {
		captured(true, "served")
		n.Freeze(true)
		if out, err := p.Command(ctx, "nft", "flush", "ruleset").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		n.Freeze(false)
		captured(true, "the successor gave up")
	})
	captured(false, "ended without a successor")
}
