package faults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/e2e/cluster/apiserver"
	"aether/e2e/mesh"
	"aether/e2e/rig"
	"aether/e2e/tool"
)

const (
	rps      = 50
	patience = 2 * time.Minute // what was away for long is asked for every 30 s
)

// world is a mesh with a registry:
//
//	node1: web-1, which sends; cart-1
//	node2: cart-2
type world struct {
	*mesh.Mesh
	t          *testing.T
	ctx        context.Context // bounds a step; see step
	address    string          // of the Service cart
	kubernetes bool            // rows are derived from an API server's pods; else they are etcd's
	tap        *tap            // between registrar and etcd
}

// binaries is where proxy and registrar are, which are built once.
var binaries = sync.OnceValues(func() (string, error) {
	build := exec.Command("go", "build", "-o", built+string(filepath.Separator), "aether/cmd/aether-proxy", "aether/cmd/aether-registrar")
	if b, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, b)
	}
	return built, nil
})

var built string // directory of binaries

func TestMain(m *testing.M) {
	var err error
	if built, err = os.MkdirTemp("", "aether-faults-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(built)
	os.Exit(code)
}

// form is how a world is made.
type form struct {
	kubernetes bool // see world
	files      bool // certificates are files, and not the throw-away authority's
}

func newWorld(t *testing.T, of form) *world {
	t.Helper()
	begun := time.Now()
	dir, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	etcd, err := tool.Etcd.Build(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, kubernetes: of.kubernetes, address: "10.96.0.10:8080"}
	w.step()
	r := &mesh.Registry{Registrar: filepath.Join(dir, "aether-registrar"), Etcd: etcd, EtcdURL: "http://" + tapAddr, LastGood: true}
	if of.kubernetes {
		if r.APIServer, err = apiserver.Tool.Build(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	w.Mesh, err = mesh.New(w.ctx, mesh.Options{Proxy: filepath.Join(dir, "aether-proxy"), DevCA: !of.files, Registry: r})
	w.must(err)
	t.Cleanup(func() {
		if t.Failed() {
			for i, n := range w.Rig.Nodes {
				if p := w.Proxy(i); p != nil {
					t.Logf("%s:\n%s", n.Name, p.Tail(6000))
				}
			}
			for name, p := range map[string]*rig.Proc{"registrar": w.Registrar(), "API server": w.APIServer()} {
				if p != nil {
					t.Logf("%s:\n%s", name, p.Tail(3000))
				}
			}
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	w.disk()
	w.tap = newTap(w)
	w.must(w.StartEtcd(w.ctx))
	if of.kubernetes {
		w.must(w.StartAPIServer(w.ctx))
	}
	_, err = w.AddPod(w.ctx, mesh.Pod{Name: "web-1", Account: "web", Ports: "8080"})
	w.must(err)
	w.cart("cart-1", 0)
	w.cart("cart-2", 1)
	if !of.kubernetes {
		w.must(w.Service(rig.ServiceManifest{Name: "cart", ClusterIPs: w.ClusterIPs(10), Ports: []uint16{8080}}))
	}
	w.must(w.Start(w.ctx))
	if of.kubernetes {
		ip, err := w.ClusterIP(w.ctx, "shop", "cart")
		w.must(err)
		w.address = ip + ":8080"
	}
	for _, name := range []string{"cart-1", "cart-2"} {
		w.healthy(name)
		for node := range w.Rig.Nodes {
			w.must(w.AwaitUsable(w.ctx, node, w.Pod(name), true))
		}
	}
	t.Logf("all of it is there after %s", time.Since(begun).Round(time.Second))
	return w
}

// step begins a new one: what is done with w.ctx has patience from now.
func (w *world) step() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	w.t.Cleanup(cancel)
	w.ctx = ctx
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// cart makes a pod of the service, whose application says its name.
func (w *world) cart(name string, node int) *rig.Pod {
	w.t.Helper()
	p, err := w.AddPod(w.ctx, mesh.Pod{Name: name, Account: "cart", Ports: "8080", Node: node, Prepare: func(p *rig.Pod) error {
		return w.ServeHTTP(w.ctx, &p.Space, "127.0.0.1:8080", http.HandlerFunc(func(out http.ResponseWriter, _ *http.Request) { io.WriteString(out, name) }))
	}})
	w.must(err)
	return p
}

// healthy returns once a pod's application has been found to answer: by its node, which says
// so to the registrar, or, where there is an API server, by a kubelet that says so there.
func (w *world) healthy(name string) {
	w.t.Helper()
	if !w.kubernetes {
		w.must(w.AwaitRows(w.ctx, w.Pod(name), "HEALTHY"))
		return
	}
	w.must(w.Sync(w.ctx)) // the pod is served
	w.must(w.SetReady(w.ctx, name, true))
}

// source is what a node's proxy says of one.
type source struct {
	Name                        string
	Synced, Restored, Connected bool
	Counts                      struct{ Catalog int }
}

func (w *world) registrarOf(ctx context.Context, node int) (source, error) {
	return w.sourceOf(ctx, node, "registrar")
}

func (w *world) sourceOf(ctx context.Context, node int, name string) (source, error) {
	b, err := w.Admin(ctx, node, "/status")
	if err != nil {
		return source{}, err
	}
	var s struct{ Sources []source }
	if err := json.Unmarshal(b, &s); err != nil {
		return source{}, err
	}
	i := slices.IndexFunc(s.Sources, func(s source) bool { return s.Name == name })
	if i < 0 {
		return source{}, fmt.Errorf("no such source: %s", b)
	}
	return s.Sources[i], nil
}

// awaitConnected returns once every node hears, or does not hear, a registrar.
func (w *world) awaitConnected(connected bool) {
	w.t.Helper()
	w.awaitSource("registrar", connected)
}

func (w *world) awaitSource(name string, connected bool) {
	w.t.Helper()
	for node := range w.Rig.Nodes {
		w.must(rig.Until(w.ctx, func(ctx context.Context) error {
			s, err := w.sourceOf(ctx, node, name)
			if err == nil && s.Connected != connected {
				err = fmt.Errorf("node %d: %s: connected=%t", node+1, name, s.Connected)
			}
			return err
		}))
	}
}

// load is requests of web-1 to cart, at a steady rate.
type load struct {
	w    *world
	stop func()

	start  time.Time
	mu     sync.Mutex
	sent   int
	why    []string
	failed int
	from   map[string]int // answers, by who gave them
	routes map[string]int // and by what their route has written on them
	news   chan struct{}  // closed and replaced at each answer
}

// begin sends: most requests on connections that are kept, one in eight on a new one. One that is late is sent at once,
// none is left out.
func (w *world) begin() *load {
	l := &load{w: w, start: time.Now(), from: map[string]int{}, routes: map[string]int{}, news: make(chan struct{})}
	kept, fresh := mesh.HTTP1(w.Pod("web-1"), w.address), mesh.HTTP1(w.Pod("web-1"), w.address)
	kept.MaxIdleConnsPerHost, fresh.DisableKeepAlives = 16, true
	end := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		var sending sync.WaitGroup
		defer sending.Wait()
		for i := 0; ; i++ {
			select {
			case <-time.After(time.Until(l.start.Add(time.Duration(i+1) * time.Second / rps))):
			case <-end:
				return
			}
			t := kept
			if i%8 == 0 {
				t = fresh
			}
			sending.Go(func() { l.send(t) })
		}
	})
	l.stop = sync.OnceFunc(func() {
		close(end)
		all.Wait()
		kept.CloseIdleConnections()
	})
	w.t.Cleanup(l.stop)
	return l
}

func (l *load) send(t *http.Transport) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	who, route, err := ask(ctx, t)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sent++; err != nil {
		l.failed++
		if len(l.why) < 10 {
			l.why = append(l.why, time.Now().UTC().Format("15:04:05.000 ")+err.Error())
		}
	} else {
		l.from[who]++
		l.routes[route]++
	}
	close(l.news)
	l.news = make(chan struct{})
}

func ask(ctx context.Context, t *http.Transport) (who, route string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://cart.shop.aether.internal:8080/", nil)
	if err != nil {
		return "", "", err
	}
	res, err := t.RoundTrip(req)
	if err != nil {
		return "", "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err == nil && (res.StatusCode != http.StatusOK || !strings.HasPrefix(string(b), "cart-")) {
		err = fmt.Errorf("%d %.100s", res.StatusCode, b)
	}
	return string(b), res.Header.Get("X-Route"), err
}

// until waits for what the answers so far make true.
func (l *load) until(what string, ok func() bool) {
	l.w.t.Helper()
	for {
		l.mu.Lock()
		is, news := ok(), l.news
		l.mu.Unlock()
		if is {
			return
		}
		select {
		case <-news:
		case <-l.w.ctx.Done():
			l.w.t.Fatalf("waiting for %s: %v", what, context.Cause(l.w.ctx))
		}
	}
}

// more waits for n further requests.
func (l *load) more(n int) {
	l.w.t.Helper()
	l.mu.Lock()
	want := l.sent + n
	l.mu.Unlock()
	l.until("more requests", func() bool { return l.sent >= want })
}

// lasts waits for as many requests as are sent in that time, a step each half of a minute.
func (l *load) lasts(d time.Duration) {
	l.w.t.Helper()
	for ; d > 0; d -= 30 * time.Second {
		l.w.step()
		l.more(int(min(d, 30*time.Second).Seconds() * rps))
	}
	l.w.step()
}

// check says how it went.
func (l *load) check(what string) {
	l.w.t.Helper()
	took := time.Since(l.start)
	l.stop()
	reached := float64(l.sent) / took.Seconds()
	l.w.t.Logf("%s: %d requests, %.0f a second, %d failed, answered by %v", what, l.sent, reached, l.failed, l.from)
	if l.failed > 0 {
		l.w.t.Errorf("%s: %d of %d requests failed:\n%s", what, l.failed, l.sent, strings.Join(l.why, "\n"))
	}
	if reached < 0.8*rps {
		l.w.t.Errorf("%s: %.0f requests a second were reached, of %d", what, reached, rps)
	}
}

// TestCertificateFiles: proxies and registrar that take their certificates from files
// (--certs) meet with those, and the pods of either node with theirs.
func TestCertificateFiles(t *testing.T) {
	w := newWorld(t, form{files: true}) // which has seen rows of both nodes, and that the other knows them
	w.step()
	l := w.begin()
	l.until("answers of both nodes' pods", func() bool { return l.from["cart-1"] > 0 && l.from["cart-2"] > 0 })
	l.check("certificates from files")
	w.step()
	w.must(w.Terminate("cart-2"))
	w.must(w.AwaitRows(w.ctx, w.Pod("cart-2"), "DRAINING"))
	w.must(w.AwaitUsable(w.ctx, 0, w.Pod("cart-2"), false))
}

// fault is a step of a test.
type fault struct {
	name string
	do   func(*world)
}

// TestFaults is one mesh over etcd from one fault to the next.
func TestFaults(t *testing.T) {
	newWorld(t, form{}).run([]fault{
		{"a pod is added", podAdded},
		{"the disk of the last good state is full", diskFull},
		{"registrar killed and started anew", registrarKilled},
		{"etcd compacted while the registrar is cut off", compacted},
		{"thousands of bad rows", badRows},
		{"a watcher that does not read", stalledWatcher},
		{"that the disk is full is told", diskFullTold},
		{"etcd killed and restored", etcdKilled},
		{"a proxy is replaced", replaced},
		{"the disk has room again", diskMended},
		{"proxies start while registrar and etcd are away", startedAlone},
	})
}

// run does one after the other.
func (w *world) run(faults []fault) {
	t := w.t
	for _, f := range faults {
		if !t.Run(f.name, func(t *testing.T) {
			w.t = t
			w.step()
			f.do(w)
		}) {
			break
		}
	}
	w.t = t
}

// podAdded: a pod that comes while requests are sent gets its share of them.
func podAdded(w *world) {
	l := w.begin()
	l.more(rps)
	p := w.cart("cart-3", 1)
	start := time.Now()
	w.must(w.AwaitRows(w.ctx, p, "UNHEALTHY"))
	registered := time.Since(start)
	w.must(w.AwaitRows(w.ctx, p, "HEALTHY"))
	healthy := time.Now()
	w.must(w.AwaitUsable(w.ctx, 0, p, true))
	usable := time.Since(healthy)
	l.until("an answer of the new pod", func() bool { return l.from["cart-3"] > 0 })
	answered := time.Since(healthy)
	l.check("a pod is added")
	w.t.Logf("from its document to its row %s, to its health %s (it is asked every 5 s); from there to what the other node may send to %s, to its first answer %s",
		registered.Round(time.Millisecond), healthy.Sub(start).Round(time.Millisecond), usable.Round(time.Millisecond), answered.Round(time.Millisecond))
	if answered > 5*time.Second { // milliseconds, on a machine that has time
		w.t.Errorf("its first answer came %s after its health was known", answered)
	}
}

// registrarKilled: nodes serve what they know, and hear what changed once there is a
// registrar again.
func registrarKilled(w *world) {
	l := w.begin()
	l.more(rps)
	w.Registrar().Kill()
	w.awaitConnected(false)
	p := w.Pod("cart-3")
	w.must(w.Terminate("cart-3")) // while nobody can be told
	l.more(2 * rps)
	w.must(w.StartRegistrar())
	w.must(w.AwaitRegistrar(w.ctx))
	w.awaitConnected(true)
	w.must(w.AwaitRows(w.ctx, p, "")) // said once it can be, or withdrawn (contract 13.3)
	w.must(w.AwaitUsable(w.ctx, 0, p, false))
	w.must(w.RemovePod("cart-3"))
	l.more(rps)
	l.check("registrar killed")
}

// etcdKilled: the registrar tells nodes what changes while etcd is away, and etcd once it
// is back.
func etcdKilled(w *world) {
	p := w.cart("cart-4", 1)
	w.must(w.AwaitRows(w.ctx, p, "HEALTHY"))
	w.must(w.AwaitUsable(w.ctx, 0, p, true))
	l := w.begin()
	l.more(rps)
	w.Etcd().Kill()
	l.more(rps)
	w.must(w.Terminate("cart-4"))
	w.must(w.AwaitUsable(w.ctx, 0, p, false))
	l.more(rps)
	w.must(w.StartEtcd(w.ctx))
	w.must(rig.Until(w.ctx, func(ctx context.Context) error {
		rows, err := w.Rows(ctx)
		if err == nil && slices.ContainsFunc(rows, func(r mesh.Row) bool { return r.IP == p.IP4.String() && r.Health == "HEALTHY" }) {
			err = errors.New("etcd does not know yet that the pod leaves")
		}
		return err
	}))
	w.must(w.RemovePod("cart-4"))
	w.must(w.AwaitRows(w.ctx, p, ""))
	l.more(rps)
	l.check("etcd killed")
}

// startedAlone: a proxy's successor, and one that starts with nothing but its disk, serve
// what the node knew, and their pods are demoted by nobody.
func startedAlone(w *world) {
	l := w.begin()
	l.more(rps)
	w.Registrar().Kill()
	w.Etcd().Kill()
	l.more(rps)
	w.must(w.ReplaceProxy(w.ctx, 0))
	l.more(rps)
	l.check("replaced alone")

	w.must(w.StopProxy(0))
	w.must(w.StartProxy(0))
	start := time.Now()
	w.must(w.Sync(w.ctx))
	w.t.Logf("all in force %s after the start", time.Since(start).Round(time.Millisecond))
	s, err := w.registrarOf(w.ctx, 0)
	w.must(err)
	if s.Connected || s.Synced || !s.Restored {
		w.t.Errorf("the registrar's rows are to be those of before: %+v", s)
	}
	l = w.begin()
	l.more(2 * rps)
	l.until("answers of both nodes", func() bool { return l.from["cart-1"] > 0 && l.from["cart-2"] > 0 })

	w.must(w.StartEtcd(w.ctx))
	w.must(w.StartRegistrar())
	w.must(w.AwaitRegistrar(w.ctx))
	w.awaitConnected(true)
	for _, name := range []string{"cart-1", "cart-2"} {
		w.must(w.AwaitRows(w.ctx, w.Pod(name), "HEALTHY"))
	}
	l.more(rps)
	l.check("started alone")
}
