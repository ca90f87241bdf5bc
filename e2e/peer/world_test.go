// Package peer tests the proxy against programs that others wrote: Envoy as the
// other end of the hop and in our place, curl, nghttp, h2load and grpc-go as clients, grpc-go and
// nginx as applications.
//
//   - Everything runs in network namespaces of e2e/rig, with captured traffic and real mTLS.
//   - The proxy is built from this tree, with the race detector if the tests are; a race,
//     a panic or an unwanted end of a proxy fails the test that it happens in.
//   - A peer that cannot be had is a failure, never a skip.
//
// It knows the proxy only from outside: its command line, its admin, its traffic.
package peer

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
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

	"aether/e2e/rig"
)

// buildFlags of the proxy.
var buildFlags []string

var proxyFlag = flag.String("proxy", "", "`path` of an aether-proxy to test instead of one built from this tree")

// proxyBinary builds the proxy once a run.
var proxyBinary = sync.OnceValues(func() (string, error) {
	if *proxyFlag != "" {
		return filepath.Abs(*proxyFlag)
	}
	bin := filepath.Join(built, "aether-proxy")
	args := append(append([]string{"build"}, buildFlags...), "-o", bin, "aether/cmd/aether-proxy")
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return bin, nil
})

// built is a directory for the run.
var built string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		os.Setenv("GORACE", "atexit_sleep_ms=0") // or every process with the race detector ends a second late
		var err error
		if built, err = os.MkdirTemp("", "aether-peer-"); err != nil {
			fmt.Fprintln(os.Stderr, "peer:", err)
			return 1
		}
		defer os.RemoveAll(built)
		return m.Run()
	}())
}

const (
	trustDomain = "rig.test"
	namespace   = "demo"
	domain      = "aether.internal"
)

// service is the address of service b; nobody has it.
var service = netip.MustParseAddr("10.96.0.10")

// world is two nodes with pods on them. Pod a, on the first node, is the client.
type world struct {
	testing.TB
	ctx   context.Context
	rig   *rig.Rig
	ca    *rig.CA
	certs string // directory of SVIDs
	conf  string // directory of the proxies' configuration
	pods  map[string]*rig.Pod
	docs  strings.Builder
	a     *rig.Pod
}

// limit bounds a test, so that what hangs is reported with its logs.
const limit = 90 * time.Second

func newWorld(t testing.TB) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	r, err := rig.New(ctx, rig.Options{})
	must(t, err)
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	w := &world{TB: t, ctx: ctx, rig: r, pods: map[string]*rig.Pod{}, certs: filepath.Join(r.Dir, "certs"), conf: filepath.Join(r.Dir, "conf")}
	w.ca, err = rig.NewCA(trustDomain)
	must(t, err)
	must(t, os.MkdirAll(w.conf, 0o755))
	w.a = w.pod(0, "a", rig.PodManifest{Ports: "8080"})
	return w
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pod adds a pod whose ServiceAccount has an SVID and takes all its outbound TCP through the mesh.
func (w *world) pod(node int, name string, m rig.PodManifest) *rig.Pod {
	w.Helper()
	p, err := w.rig.AddPod(w.ctx, node, name)
	must(w, err)
	w.pods[name] = p
	if m.Account == "" {
		m.Account = name
	}
	ann := map[string]string{"capture.aether.io/redirect-all": "true"}
	maps.Copy(ann, m.Annotations)
	m.Annotations = ann
	w.docs.WriteString(rig.PodYAML(p, m))
	w.svid(m.Account)
	return p
}

// svid writes the account's certificate and returns its directory.
func (w *world) svid(account string) string {
	w.Helper()
	dir := filepath.Join(w.certs, namespace, account)
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	s, err := w.ca.Issue(rig.SVIDRequest{Namespace: namespace, Account: account})
	must(w, err)
	_, err = s.Write(w.certs)
	must(w, err)
	return dir
}

func spiffe(account string) string {
	return fmt.Sprintf("spiffe://%s/ns/%s/sa/%s", trustDomain, namespace, account)
}

// service adds the Service of the pods with that account.
func (w *world) service(name string, ip netip.Addr, ports ...uint16) {
	w.docs.WriteString(rig.ServiceYAML(rig.ServiceManifest{Name: name, ClusterIPs: []netip.Addr{ip}, Ports: ports}))
}

// host is a service's name with a port.
func host(service string, port int) string {
	return fmt.Sprintf("%s.%s.%s:%d", service, namespace, domain, port)
}

// proxy starts ours on a node and waits until it serves its pods.
func (w *world) proxy(node int, args ...string) *proxy {
	w.Helper()
	bin, err := proxyBinary()
	must(w, err)
	must(w, os.WriteFile(filepath.Join(w.conf, "mesh.yaml"), []byte(w.docs.String()), 0o644))
	n := w.rig.Nodes[node]
	p := &proxy{w: w, node: n}
	p.Proc, err = w.rig.StartProcess(&n.Space, fmt.Sprintf("proxy-%s-%d", n.Name, w.starts()), append([]string{bin,
		"--config", w.conf, "--node", n.Name, "--certs", w.certs, "--trust-domain", trustDomain, "--capture", "--drain-time", "500ms"}, args...)...)
	must(w, err)
	w.Cleanup(p.stop)
	must(w, p.Ready(w.ctx, p.serves))
	return p
}

var serial struct {
	sync.Mutex
	n int
}

func (w *world) starts() int {
	serial.Lock()
	defer serial.Unlock()
	serial.n++
	return serial.n
}

// proxy is a running aether-proxy.
type proxy struct {
	*rig.Proc
	w       *world
	node    *rig.Node
	stopped bool
}

// serves: the node's proxy is ready and every pod of the node has its certificate.
func (p *proxy) serves(ctx context.Context) error {
	var s struct {
		Seq  uint64 `json:"seq"`
		Pods []struct {
			CertificateUntil time.Time
		} `json:"pods"`
		Problems []struct{ Object, Reason string } `json:"problems"`
	}
	b, err := admin(ctx, p.node, 9901, "GET", "/status")
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	want := 0
	for _, pod := range p.w.pods {
		if pod.Node == p.node {
			want++
		}
	}
	if len(s.Problems) > 0 || s.Seq == 0 || len(s.Pods) != want {
		return fmt.Errorf("%d of %d pods served, problems %v", len(s.Pods), want, s.Problems)
	}
	for _, pod := range s.Pods {
		if pod.CertificateUntil.IsZero() {
			return errors.New("a pod has no certificate yet")
		}
	}
	return nil
}

var (
	panicsMetric = regexp.MustCompile(`(?m)^aether_loop_panics_total (\S+)$`)
	badInLog     = regexp.MustCompile(`(?m)^(WARNING: DATA RACE|panic: |fatal error: )`)
)

// stop ends the proxy and looks for what must never happen in one. A second call does nothing.
func (p *proxy) stop() {
	p.w.Helper()
	if p.stopped {
		return
	}
	p.stopped = true
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second) // the test's own may be over
	defer cancel()
	if p.w.Failed() {
		why, err := admin(ctx, p.node, 9901, "GET", "/why?n=10")
		p.w.Logf("%s: its last decisions:\n%s (%v)", p.Name, why, err)
	}
	if b, err := admin(ctx, p.node, 9901, "GET", "/metrics"); err != nil {
		p.w.Errorf("%s: metrics at the end: %v", p.Name, err)
	} else if m := panicsMetric.FindSubmatch(b); m == nil || string(m[1]) != "0" {
		p.w.Errorf("%s: panics on its loops: %q", p.Name, m)
	}
	if err := p.Stop(); err != nil {
		p.w.Error(err)
	}
	log, err := os.ReadFile(p.Log)
	if err != nil {
		p.w.Error(err)
	}
	if at := badInLog.FindIndex(log); at != nil {
		p.w.Errorf("%s: its log says\n%s", p.Name, log[at[0]:min(len(log), at[0]+6000)])
	}
	if p.w.Failed() {
		p.w.Logf("%s: its log ends\n%s", p.Name, p.Tail(3000))
	}
}

// why is the proxy's account of its last n decisions.
func (p *proxy) why(n int) string {
	b, err := admin(p.w.ctx, p.node, 9901, "GET", fmt.Sprintf("/why?n=%d", n))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// admin asks an admin port on a node; ours and Envoy's are alike in this.
func admin(ctx context.Context, n *rig.Node, port int, method, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, fmt.Sprintf("http://127.0.0.1:%d%s", port, path), nil)
	if err != nil {
		return nil, err
	}
	c := n.HTTPClient()
	defer c.CloseIdleConnections()
	res, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 10<<20))
	if err == nil && res.StatusCode != 200 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, res.Status, b)
	}
	return b, err
}

// run runs a command in the space and returns what it wrote to standard output and to standard
// error, and its exit code, which is -1 if it was killed.
func (w *world) run(in *rig.Space, stdin io.Reader, args ...string) (stdout, stderr string, code int) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, 40*time.Second)
	defer cancel()
	cmd := in.Command(ctx, args...)
	var out, errs strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errs
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		w.Fatalf("%s: %v", strings.Join(args, " "), err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}
