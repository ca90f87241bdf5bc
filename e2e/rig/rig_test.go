package rig

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// limit bounds a test; nothing here should take a tenth of it.
func limit(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func newRig(t *testing.T, ctx context.Context, o Options) *Rig {
	t.Helper()
	r, err := New(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func addPod(t *testing.T, ctx context.Context, r *Rig, node int, name string) *Pod {
	t.Helper()
	p, err := r.AddPod(ctx, node, name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Every pod and node reaches every other over both families, and an address of a
// Service nobody.
func TestEveryoneReachesEveryone(t *testing.T) {
	ctx := limit(t)
	r := newRig(t, ctx, Options{Nodes: 3, IPv6: true})
	addPod(t, ctx, r, 0, "a")
	addPod(t, ctx, r, 1, "b")
	addPod(t, ctx, r, 1, "b2")
	addPod(t, ctx, r, 2, "c")

	type place struct {
		*Space
		ips []netip.Addr
	}
	var places []place
	for _, n := range r.Nodes {
		places = append(places, place{&n.Space, []netip.Addr{n.IP4, n.IP6}})
	}
	for _, p := range r.Pods() {
		places = append(places, place{&p.Space, p.IPs()})
	}
	for _, p := range places {
		l, err := p.Listen(ctx, "tcp", ":7000")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				fmt.Fprintf(c, "%s from %s", p.Name, c.RemoteAddr())
				c.Close()
			}
		}()
	}
	for _, from := range places {
		for _, to := range places {
			for i, ip := range to.ips {
				c, err := from.Dial(ctx, "tcp", netip.AddrPortFrom(ip, 7000).String())
				if err != nil {
					t.Fatalf("%s > %s (%s): %v", from.Name, to.Name, ip, err)
				}
				got, err := io.ReadAll(c)
				c.Close()
				// The source is seen as it is: no address translation on the way.
				src, _, _ := net.SplitHostPort(c.LocalAddr().String())
				want := to.Name + " from "
				if err != nil || !strings.HasPrefix(string(got), want) || !strings.Contains(string(got), src) {
					t.Errorf("%s > %s (%s): got %q (%v), want %q and %s", from.Name, to.Name, ip, got, err, want, src)
				}
				if pod := i < len(from.ips) && !strings.HasPrefix(from.Name, "node"); pod && from.Name != to.Name && src != from.ips[i].String() {
					t.Errorf("%s > %s: left from %s, want %s", from.Name, to.Name, src, from.ips[i])
				}
			}
		}
	}
	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	if c, err := places[3].Dial(short, "tcp", "10.96.0.10:7000"); err == nil {
		c.Close()
		t.Error("a Service address answered without a proxy")
	}
}

func TestNginxAcrossNodes(t *testing.T) {
	ctx := limit(t)
	r := newRig(t, ctx, Options{})
	a, b := addPod(t, ctx, r, 0, "a"), addPod(t, ctx, r, 1, "b")
	if _, err := r.StartNginx(ctx, b, 8080, 9000); err != nil {
		t.Fatal(err)
	}
	client := a.HTTPClient()
	defer client.CloseIdleConnections()
	for _, tt := range []struct {
		path         string
		status, size int
	}{
		{":8080/", 200, len(AppBody)}, {":9000/1k", 200, 1024}, {":8080/64k", 200, 65536}, {":8080/none", 404, 13},
	} {
		resp, err := client.Get("http://" + b.IP4.String() + tt.path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != tt.status || len(body) != tt.size {
			t.Errorf("%s: %d with %d bytes (%v), want %d with %d", tt.path, resp.StatusCode, len(body), err, tt.status, tt.size)
		}
	}
}

// A captured connection arrives at the transparent listener, which sees the dialled
// address; an exempt one does not.
func TestCapture(t *testing.T) {
	for _, ipv6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("ipv6=%v", ipv6), func(t *testing.T) {
			ctx := limit(t)
			r := newRig(t, ctx, Options{IPv6: ipv6})
			a, b := addPod(t, ctx, r, 0, "a"), addPod(t, ctx, r, 1, "b")
			stop, err := b.ServeHTTP(ctx, ":8080", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "direct") }))
			if err != nil {
				t.Fatal(err)
			}
			defer stop()
			if err := a.Capture(ctx, netip.AddrPortFrom(b.IP4, 8080)); err != nil {
				t.Fatal(err)
			}
			lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
				raw.Control(func(fd uintptr) {
					err = syscall.SetsockoptInt(int(fd), syscall.SOL_IP, syscall.IP_TRANSPARENT, 1)
				})
				return err
			}}
			var l net.Listener
			if err := a.Do(func() (err error) { l, err = lc.Listen(ctx, "tcp", ":18001"); return }); err != nil {
				t.Fatal(err)
			}
			srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprint(w, r.Context().Value(http.LocalAddrContextKey))
			})}
			go srv.Serve(l)
			defer srv.Close()
			client := a.HTTPClient()
			defer client.CloseIdleConnections()
			cases := map[string]string{
				"10.96.0.10:8080":                               "10.96.0.10:8080",
				netip.AddrPortFrom(b.IP4, 8081).String():        b.IP4.String() + ":8081",
				netip.AddrPortFrom(b.IP4, 8080).String():        "direct",
				netip.AddrPortFrom(b.IP4, 18008).String():       b.IP4.String() + ":18008",
				netip.AddrPortFrom(r.Nodes[1].IP4, 80).String(): "10.0.0.2:80",
			}
			if ipv6 {
				cases["[fd00:96::10]:8080"] = "[fd00:96::10]:8080"
			}
			for addr, want := range cases {
				resp, err := client.Get("http://" + addr + "/")
				if err != nil {
					t.Errorf("%s: %v", addr, err)
					continue
				}
				got, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				if string(got) != want {
					t.Errorf("%s: got %q, want %q", addr, got, want)
				}
			}
		})
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	ctx := limit(t)
	r := newRig(t, ctx, Options{})
	a := addPod(t, ctx, r, 0, "a")
	other := newRig(t, ctx, Options{}) // must not be touched
	b := addPod(t, ctx, other, 0, "a")

	polite, err := r.StartProcess(&a.Space, "polite", "sleep", "1000")
	if err != nil {
		t.Fatal(err)
	}
	stray := a.Command(ctx, "sleep", "1001") // not the rig's: found by its namespace
	if err := stray.Start(); err != nil {
		t.Fatal(err)
	}
	strayEnded := make(chan error, 1)
	go func() { strayEnded <- stray.Wait() }()
	// ip(8) becomes the command; only then is it in the namespace.
	if err := Until(ctx, func(context.Context) error {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", stray.Process.Pid))
		if err == nil && string(b) != "sleep\n" {
			err = fmt.Errorf("still %q", b)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	neighbour, err := other.StartProcess(&b.Space, "neighbour", "sleep", "1002")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	<-polite.Done()
	<-strayEnded
	if left, err := spacesOf(r.Prefix); err != nil || len(left) != 0 {
		t.Errorf("namespaces left: %v (%v)", left, err)
	}
	if _, err := os.Stat(r.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("directory left: %v", err)
	}
	if err := r.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	if _, err := r.AddPod(ctx, 0, "late"); err == nil {
		t.Error("a pod was added to a closed rig")
	}
	if neighbour.ended() {
		t.Error("the other rig's process was ended")
	}
	if left, _ := spacesOf(other.Prefix); len(left) != 3 {
		t.Errorf("the other rig has %v", left)
	}
}

// A rig whose owner crashed is found by its prefix, or, with a name of our making, by
// the next New.
func TestSweep(t *testing.T) {
	ctx := limit(t)
	prefix := fmt.Sprintf("sweep%d", os.Getpid())
	newRig(t, ctx, Options{Prefix: prefix}) // its Close must cope with namespaces that are gone
	if _, err := New(ctx, Options{Prefix: prefix}); err == nil || !strings.Contains(err.Error(), "Sweep") {
		t.Fatalf("a second rig with the prefix: %v", err)
	}
	if err := Sweep(ctx, prefix); err != nil {
		t.Fatal(err)
	}
	if left, _ := spacesOf(prefix); len(left) != 0 {
		t.Fatalf("left: %v", left)
	}
	if err := Sweep(ctx, prefix); err != nil {
		t.Errorf("nothing to sweep: %v", err)
	}

	// A process id above the kernel's limit: no such owner.
	dead := "rig4194305x1-node1"
	if err := run(ctx, "", "ip", "netns", "add", dead); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(os.TempDir(), dirPrefix+"rig4194305x1-0")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	newRig(t, ctx, Options{})
	for _, path := range []string{filepath.Join(netnsDir, dead), dir} {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("of the dead rig %s is still there: %v", path, err)
		}
	}
}

func TestBadNames(t *testing.T) {
	ctx := limit(t)
	for _, o := range []Options{{Prefix: "Rig"}, {Prefix: "a-b"}, {Prefix: "../x"}, {Nodes: -1}, {Nodes: MaxNodes + 1}} {
		if r, err := New(ctx, o); err == nil {
			r.Close()
			t.Errorf("New(%+v) worked", o)
		}
	}
	r := newRig(t, ctx, Options{})
	for _, name := range []string{"", "A", "a/b", "node1"} {
		if _, err := r.AddPod(ctx, 0, name); err == nil {
			t.Errorf("AddPod(%q) worked", name)
		}
	}
	if _, err := r.AddPod(ctx, 2, "x"); err == nil {
		t.Error("AddPod on the third of two nodes worked")
	}
	if _, err := r.Nodes[0].Dial(ctx, "tcp", "localhost:80"); err == nil {
		t.Error("Dial by name worked")
	}
}

func TestProc(t *testing.T) {
	ctx := limit(t)
	r := newRig(t, ctx, Options{Nodes: 1})
	node := &r.Nodes[0].Space

	// The parent waits, the child works: both count.
	busy, err := r.StartProcess(node, "busy", "sh", "-c", "echo begun; sh -c 'while :; do :; done'; true")
	if err != nil {
		t.Fatal(err)
	}
	var cpu time.Duration
	err = busy.Ready(ctx, func(context.Context) error {
		if cpu, err = busy.CPU(); err == nil && cpu < 200*time.Millisecond {
			err = fmt.Errorf("only %s yet", cpu)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	// The oracle: utime and stime of the family, in ticks of 10 ms, read afterwards and before.
	ticks := func() (sum time.Duration) {
		for _, pid := range family(busy.PID()) {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err != nil {
				t.Fatal(err)
			}
			var u, s int64
			f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
			fmt.Sscan(f[11], &u)
			fmt.Sscan(f[12], &s)
			sum += time.Duration(u+s) * 10 * time.Millisecond
		}
		return sum
	}
	before := ticks()
	if cpu, err = busy.CPU(); err != nil {
		t.Fatal(err)
	}
	after := ticks()
	const tick = 40 * time.Millisecond // rounding of two values of two processes
	if cpu < before-tick || cpu > after+tick {
		t.Errorf("CPU %s, /proc says between %s and %s", cpu, before, after)
	}
	rss, err := busy.RSS()
	if err != nil || rss < 500<<10 || rss > 100<<20 {
		t.Errorf("RSS %d, %v", rss, err)
	}
	if anon, err := busy.Anonymous(); err != nil || anon <= 0 || anon >= rss {
		t.Errorf("of RSS %d anonymous %d, %v", rss, anon, err)
	}
	if !strings.Contains(busy.Tail(100), "begun") {
		t.Errorf("log: %q", busy.Tail(100))
	}
	child := family(busy.PID())[1:]
	if len(child) == 0 {
		t.Error("no child found")
	}
	if err := busy.Stop(); err != nil {
		t.Error(err)
	}
	if _, err := busy.CPU(); err == nil {
		t.Error("CPU of a process that ended")
	}

	// One that fails by itself says so, with its log, instead of letting the caller wait.
	fails, err := r.StartProcess(node, "fails", "sh", "-c", "echo because >&2; exit 3")
	if err != nil {
		t.Fatal(err)
	}
	err = fails.Ready(ctx, func(context.Context) error { return errors.New("not yet") })
	if err == nil || !strings.Contains(err.Error(), "because") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("Ready: %v", err)
	}
	if err := fails.Stop(); err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("Stop: %v", err)
	}

	// One that ignores SIGTERM is killed.
	deaf, err := r.StartProcess(node, "deaf", "sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 1000; done")
	if err != nil {
		t.Fatal(err)
	}
	if err := deaf.Ready(ctx, func(context.Context) error {
		if !strings.Contains(deaf.Tail(10), "deaf") {
			return errors.New("no trap yet")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := deaf.Stop(); err != nil {
		t.Error(err)
	}
}

func TestUntilReportsTheLastError(t *testing.T) {
	ctx, cancel := context.WithTimeout(limit(t), 20*time.Millisecond)
	defer cancel()
	calls := 0
	err := Until(ctx, func(context.Context) error { calls++; return fmt.Errorf("call %d", calls) })
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), fmt.Sprintf("call %d", calls)) || calls < 2 {
		t.Errorf("after %d calls: %v", calls, err)
	}
}

// crypto/tls takes what was written, on both sides of a handshake.
func TestSVIDs(t *testing.T) {
	ca, err := NewCA("rig.test")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	load := func(account string) tls.Certificate {
		s, err := ca.Issue(SVIDRequest{Namespace: "demo", Account: account})
		if err != nil {
			t.Fatal(err)
		}
		d, err := s.Write(dir)
		if err != nil {
			t.Fatal(err)
		}
		if d != filepath.Join(dir, "demo", account) {
			t.Errorf("written to %s", d)
		}
		if err := s.WriteCombined(filepath.Join(dir, account+".pem")); err != nil {
			t.Fatal(err)
		}
		if _, err := tls.LoadX509KeyPair(filepath.Join(dir, account+".pem"), filepath.Join(dir, account+".pem")); err != nil {
			t.Error(err)
		}
		c, err := tls.LoadX509KeyPair(filepath.Join(d, CertFile), filepath.Join(d, KeyFile))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	bundle := func() *x509.CertPool {
		b, err := os.ReadFile(filepath.Join(dir, "demo", "a", BundleFile))
		pool := x509.NewCertPool()
		if err != nil || !pool.AppendCertsFromPEM(b) {
			t.Fatalf("bundle: %v", err)
		}
		return pool
	}
	a, b := load("a"), load("b")
	// Go's own client wants a DNS name, which an SVID has not: verify as a mesh does.
	verify := func(want string) func(tls.ConnectionState) error {
		return func(cs tls.ConnectionState) error {
			_, err := cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: bundle(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
			if err == nil && cs.PeerCertificates[0].URIs[0].String() != want {
				err = fmt.Errorf("peer is %s, want %s", cs.PeerCertificates[0].URIs[0], want)
			}
			return err
		}
	}
	ca1, cb1 := net.Pipe()
	srv := tls.Server(cb1, &tls.Config{Certificates: []tls.Certificate{b}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: bundle(),
		VerifyConnection: verify("spiffe://rig.test/ns/demo/sa/a")})
	cli := tls.Client(ca1, &tls.Config{Certificates: []tls.Certificate{a}, ServerName: "8080", InsecureSkipVerify: true,
		VerifyConnection: verify("spiffe://rig.test/ns/demo/sa/b")})
	served := make(chan error, 1)
	go func() { served <- srv.Handshake() }()
	if err := cli.Handshake(); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	// OpenSSL, which HAProxy uses, is stricter than Go about who signed whom.
	leaf := filepath.Join(dir, "demo", "a")
	if out, err := exec.Command("openssl", "verify", "-x509_strict", "-CAfile", filepath.Join(leaf, BundleFile), filepath.Join(leaf, CertFile)).CombinedOutput(); err != nil {
		t.Errorf("openssl verify: %v: %s", err, out)
	}
	past, err := ca.Issue(SVIDRequest{ID: "spiffe://other/x", NotAfter: time.Now().Add(-time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	c, err := past.TLS()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Leaf.Verify(x509.VerifyOptions{Roots: ca.Pool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err == nil {
		t.Error("an expired SVID was accepted")
	}
}

func TestManifests(t *testing.T) {
	p := &Pod{
		Space: Space{Name: "a", NetNS: "/run/netns/x-a", ns: "x-a"},
		Node:  &Node{Space: Space{Name: "node1"}, IP4: netip.MustParseAddr("10.0.0.1")},
		IP4:   netip.MustParseAddr("10.1.1.10"), IP6: netip.MustParseAddr("fd00:1:1::a"),
	}
	pod := PodYAML(p, PodManifest{Ports: "8080,9000=tcp", Annotations: map[string]string{"k": "v"}})
	svc := ServiceYAML(ServiceManifest{Name: "b", ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, Ports: []uint16{8080, 9000}})
	for _, tt := range []struct{ doc, path, want string }{
		{pod, "kind", "Pod"},
		{pod, "metadata.namespace", "demo"},
		{pod, "metadata.annotations.endpoint.aether.io/ports", "8080,9000=tcp"},
		{pod, "metadata.annotations.file.aether.io/netns", "/run/netns/x-a"},
		{pod, "metadata.annotations.k", "v"},
		{pod, "metadata.labels.aether.io/managed", "true"},
		{pod, "spec.serviceAccountName", "a"},
		{pod, "spec.nodeName", "node1"},
		{pod, "status.podIPs", "[map[ip:10.1.1.10] map[ip:fd00:1:1::a]]"},
		{svc, "kind", "Service"},
		{svc, "metadata.labels.aether.io/mesh-service", "true"},
		{svc, "spec.clusterIP", "10.96.0.10"},
		{svc, "spec.clusterIPs", "[10.96.0.10]"},
	} {
		var v any
		if err := yaml.Unmarshal([]byte(tt.doc), &v); err != nil {
			t.Fatal(err)
		}
		// Keys with dots in them stand last.
		rest := tt.path
		for rest != "" {
			m, ok := v.(map[string]any)
			if !ok {
				break
			}
			if whole, ok := m[rest]; ok {
				v, rest = whole, ""
				continue
			}
			var key string
			key, rest, _ = strings.Cut(rest, ".")
			v = m[key]
		}
		if got := fmt.Sprint(v); got != tt.want {
			t.Errorf("%s: got %s, want %s", tt.path, got, tt.want)
		}
	}
}
