package life

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aether/controlplane/compile"
	"aether/controlplane/input"
	"aether/controlplane/local"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/reactor"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/tproxy/netns"
	"aether/tproxy/netns/netnstest"
)

const trustDomain = "roll.test"

// cluster is two nodes with their pods, and the registry between them, in one process.
type cluster struct {
	t        *testing.T
	kube     *kubernetes // where rows are made of its pods; nil: they are in rows
	router   *netnstest.Node
	services []model.Service
	nodes    []*node
	ca       *devca.CA
	held     map[string]chan struct{} // accounts that get no certificate before it is closed; set up before nodes
	ctx      context.Context
	wg       *sync.WaitGroup

	mu       sync.Mutex
	rows     map[rowKey]*registrypb.ServiceEndpoint
	policies []model.EndpointPolicy
	udsDir   string                 // of pods' Unix sockets; empty: none has one
	away     bool                   // the registry can be neither written nor listed
	news     map[chan struct{}]bool // a place each
	n        int                    // containers made
}

var errAway = errors.New("no registrar")

func (c *cluster) reached() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.away {
		return errAway
	}
	return nil
}

type rowKey struct {
	service model.ServiceName
	class   registrypb.Service_Protocol
	ip      string
}

// node is a data plane with the life of its pods.
type node struct {
	c    *cluster
	name string
	data *dataplane.Node
	life *local.Pods

	mu            sync.Mutex
	work          map[string]model.Workload
	rows          map[model.ServiceName][]model.Endpoint // that a registrar told of; with kube
	said, inForce int                                    // changes of rows: those that there were, and those that the data plane has
	news          chan struct{}
	dir           string // of the pods' records
	end           func() // ends it
}

// Watch is mtls.Source: the cluster's authority, which may make an account wait.
func (c *cluster) Watch(ctx context.Context, r mtls.Ref, on func(*mtls.SVID, error)) error {
	if hold := c.held[r.Account]; hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return nil
		}
	}
	return c.ca.Source(0).Watch(ctx, r, on)
}

func newCluster(t *testing.T, held map[string]chan struct{}, services ...string) *cluster {
	t.Helper()
	return newClusterOver(t, nil, held, services...)
}

func newClusterOver(t *testing.T, kube *kubernetes, held map[string]chan struct{}, services ...string) *cluster {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	c := &cluster{
		t: t, kube: kube, held: held, ctx: ctx, wg: &sync.WaitGroup{}, router: netnstest.NewNode(t), rows: map[rowKey]*registrypb.ServiceEndpoint{}, news: map[chan struct{}]bool{},
	}
	t.Cleanup(func() { // before the namespaces go
		cancel()
		c.wg.Wait()
	})
	for i, s := range services {
		c.services = append(c.services, model.Service{
			Name: model.ServiceName{Namespace: "shop", Name: s}, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(i + 1)})}, Generated: true,
			Ports: []model.ServicePort{{Name: "p8080-tcp", Number: 8080, Target: 8080, Class: model.HTTP}},
		})
	}
	var err error
	if c.ca, err = devca.Open(t.TempDir(), trustDomain, nil); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"n1", "n2"} {
		c.nodes = append(c.nodes, c.node(name, t.TempDir()))
	}
	return c
}

type silent struct{}

func (silent) Ended(*journal.Entry) {}

// node is a process: what the one before it left in dir is there.
func (c *cluster) node(name, dir string) *node {
	c.t.Helper()
	n := &node{c: c, name: name, work: map[string]model.Workload{}, news: make(chan struct{}, 1), dir: dir}
	log := slog.New(slog.NewTextHandler(logTo(c.t, name), &slog.HandlerOptions{Level: slog.LevelInfo}))
	var err error
	n.data, err = dataplane.New(dataplane.Config{
		Identities: c, Journal: silent{}, Blocking: reactor.Safe, MaxLoops: 1, Capture: true, Log: log,
		Ready: func(container string) bool { return n.life.Ready(container) },
	})
	if err != nil {
		c.t.Fatal(err)
	}
	var reg local.Registry = c
	if c.kube != nil {
		reg = c.kube.register(c.t)
	}
	n.life, err = local.New(local.Config{
		Dir: dir, Place: local.Place{Cluster: "east", Node: name}, TrustDomain: trustDomain, Registry: reg, Sink: n,
		Probe: local.Prober(n.data.Dial), Certificate: n.data.HasCertificate, Served: n.data.Await, RedirectAllDefault: true, Log: log,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.mu.Lock()
	c.news[n.news] = true
	c.mu.Unlock()
	ctx, cancel := context.WithCancel(c.ctx)
	var mine sync.WaitGroup
	runs := []func(context.Context) error{n.data.Run, n.life.Run, n.follow}
	if c.kube != nil {
		runs = append(runs, c.kube.client(c.t, n).Run)
	}
	for _, run := range runs {
		c.wg.Add(1)
		mine.Go(func() {
			defer c.wg.Done()
			if err := run(ctx); err != nil {
				c.t.Error(err)
			}
		})
	}
	n.end = func() {
		cancel()
		mine.Wait()
		c.change(func() { delete(c.news, n.news) })
	}
	return n
}

// logTo is a file that is shown when the test fails.
func logTo(t *testing.T, name string) *os.File {
	f, err := os.Create(filepath.Join(t.TempDir(), name+".log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if b, err := os.ReadFile(f.Name()); t.Failed() && err == nil {
			t.Logf("%s:\n%s", name, b[max(0, len(b)-8000):])
		}
		f.Close()
	})
	return f
}

// follow gives the data plane what registry and pods say, as the control loop does.
func (n *node) follow(ctx context.Context) error {
	var version uint64
	for {
		select {
		case <-n.news:
		case <-ctx.Done():
			return nil
		}
		m := &model.Mesh{Services: n.c.services}
		n.c.mu.Lock()
		for k, e := range n.c.rows {
			row, err := registry.Endpoint(k.service, trustDomain, e)
			if err != nil {
				n.c.t.Error(err)
				continue
			}
			m.Endpoints = append(m.Endpoints, row)
		}
		m.Policies = slices.Clone(n.c.policies)
		udsDir := n.c.udsDir
		n.c.mu.Unlock()
		n.mu.Lock()
		said := n.said
		for _, rows := range n.rows {
			m.Endpoints = append(m.Endpoints, rows...)
		}
		for _, w := range n.work {
			m.Workloads = append(m.Workloads, w)
		}
		n.mu.Unlock()
		x := compile.NewIndex(m)
		x.SetUDSDir(udsDir)
		snap, problems := x.Update()
		for _, p := range problems {
			n.c.t.Errorf("%s: %s", p.Object, p.Reason)
		}
		version++
		n.data.Apply(snap.WithVersion(version), m.Workloads)
		n.mu.Lock()
		n.inForce = said
		n.mu.Unlock()
	}
}

func tell(news chan struct{}) {
	select {
	case news <- struct{}{}:
	default:
	}
}

// Replace, Apply and Report are input.Sink.
func (n *node) Replace(b input.Batch) { n.Apply(b) }

func (n *node) Apply(b input.Batch) {
	n.mu.Lock()
	for c, list := range b.Workloads {
		if delete(n.work, c); len(list) > 0 {
			n.work[c] = list[0]
		}
	}
	n.mu.Unlock()
	for k, list := range b.Problems {
		for _, p := range list {
			n.c.t.Errorf("%s: %s", k, p.Reason)
		}
	}
	tell(n.news)
}

func (n *node) Report(input.Status) {}

// Register, Unregister and OfNode are local.Registry.
func (c *cluster) Register(_ context.Context, service model.ServiceName, class registrypb.Service_Protocol, e *registrypb.ServiceEndpoint) error {
	if err := c.reached(); err != nil {
		return err
	}
	c.change(func() { c.rows[rowKey{service, class, e.GetIp()}] = e })
	return nil
}

func (c *cluster) Unregister(_ context.Context, service model.ServiceName, ip string, _ registry.Statement) error {
	if err := c.reached(); err != nil {
		return err
	}
	c.change(func() {
		maps.DeleteFunc(c.rows, func(k rowKey, _ *registrypb.ServiceEndpoint) bool { return k.service == service && k.ip == ip })
	})
	return nil
}

func (c *cluster) OfNode(_ context.Context, node string) (rows []registry.Row, _ error) {
	if err := c.reached(); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, e := range c.rows {
		if e.GetKubernetesMetadata().GetNodeName() == node {
			rows = append(rows, registry.Row{Service: k.service, Protocol: k.class, IP: k.ip, Endpoint: e})
		}
	}
	return rows, nil
}

func (c *cluster) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
	for news := range c.news {
		tell(news)
	}
}

// await waits until the row of a pod says health.
func (c *cluster) await(p *pod, health registrypb.ServiceEndpoint_Health, limit time.Duration) {
	c.t.Helper()
	if c.kube != nil {
		ctx, cancel := context.WithTimeout(c.ctx, limit)
		defer cancel()
		if err := c.kube.await(ctx, c, p, health); err != nil {
			c.t.Fatal(err)
		}
		return
	}
	news := make(chan struct{}, 1)
	c.change(func() { c.news[news] = true })
	defer c.change(func() { delete(c.news, news) })
	late := time.After(limit)
	for {
		c.mu.Lock()
		got := c.rows[rowKey{model.ServiceName{Namespace: "shop", Name: p.service}, registrypb.Service_PROTOCOL_HTTP, p.net.IP.String()}].GetHealth()
		c.mu.Unlock()
		if got == health {
			return
		}
		select {
		case <-news:
		case <-late:
			c.t.Fatalf("%s is %s after %s, wanted %s", p.name, got, limit, health)
		}
	}
}

// pod is a namespace with an application in it.
type pod struct {
	name, service, container string
	node                     *node
	net                      *netnstest.Pod
	app                      *http.Server
	ended                    chan struct{}
	served                   atomic.Int64 // requests that the application was sent
}

// pod makes a pod of a service as the kubelet does: a network, the plugin's call, and then
// the application. serve nil: it has none.
func (c *cluster) pod(n *node, service string, serve http.Handler) *pod {
	c.t.Helper()
	return c.podOf(n, service, serve, nil)
}

// podOf is pod with further annotations.
func (c *cluster) podOf(n *node, service string, serve http.Handler, further map[string]string) *pod {
	c.t.Helper()
	annotations := map[string]string{"endpoint.aether.io/health-path": "/healthz"}
	maps.Copy(annotations, further)
	c.n++
	p := &pod{name: fmt.Sprintf("%s-%d", service, c.n), service: service, container: fmt.Sprintf("c%d", c.n), node: n, net: c.router.Pod(c.t)}
	if c.kube != nil {
		c.kube.create(c.t, p)
	}
	r, err := n.life.Add(c.ctx, local.Pod{
		Namespace: "shop", Name: p.name, UID: "uid-" + p.container, Account: service, ContainerID: p.container, NetNS: p.net.NS.Path(),
		IPs: []netip.Addr{p.net.IP}, Labels: map[string]string{"aether.io/managed": "true"},
		Annotations: annotations,
	})
	if err != nil || r != local.Success {
		c.t.Fatalf("add %s: %v, %v", p.name, r, err)
	}
	if serve != nil {
		c.begin(p, serve)
	}
	if c.kube != nil {
		c.kube.runs(c.t, p)
	}
	return p
}

// begin starts a pod's application.
func (c *cluster) begin(p *pod, serve http.Handler) {
	c.t.Helper()
	var l net.Listener
	netnstest.Do(c.t, p.net.NS, func() (err error) {
		l, err = net.Listen("tcp", "127.0.0.1:8080")
		return err
	})
	p.app = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.served.Add(1)
		serve.ServeHTTP(w, r)
	})}
	p.ended = make(chan struct{})
	go func() {
		defer close(p.ended)
		_ = p.app.Serve(l) // ends with Shutdown or Close
	}()
	c.t.Cleanup(func() {
		p.app.Close()
		<-p.ended
	})
}

// leave deletes a pod as Kubernetes does: the deletion is seen, preStop sleeps, the
// application is told to end, and the plugin is called for the last time.
func (c *cluster) leave(p *pod, preStop time.Duration) {
	check := func() {}
	if c.kube != nil {
		check = c.kube.leaving(c, p)
	}
	p.node.life.Terminating(p.container, local.Termination{PreStop: preStop, Grace: 30 * time.Second})
	select {
	case <-time.After(preStop):
	case <-c.ctx.Done():
		return
	}
	check()
	ctx, cancel := context.WithTimeout(c.ctx, 5*time.Second)
	defer cancel()
	if err := p.app.Shutdown(ctx); err != nil {
		c.t.Errorf("%s: its application does not end: %v", p.name, err)
	}
	if err := p.node.life.Remove(c.ctx, p.container); err != nil {
		c.t.Error(err)
	}
	if c.kube != nil {
		c.kube.delete(c.t, p, 0)
	}
}

// client is HTTP from a pod's namespace, captured as any program's.
func client(p *pod, keep bool) *http.Client {
	return &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: !keep, MaxIdleConnsPerHost: 64,
		DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
			d := net.Dialer{}
			err = netns.Do(p.net.NS, func() (err error) {
				c, err = d.DialContext(ctx, "tcp4", addr) // one literal address: on this thread
				return err
			})
			return c, err
		},
	}}
}

func (c *cluster) address(service string) string {
	for _, s := range c.services {
		if s.Name.Name == service {
			return netip.AddrPortFrom(s.ClusterIPs[0], 8080).String()
		}
	}
	c.t.Fatalf("no service %s", service)
	return ""
}

func host(service string) string {
	return strings.Join([]string{service, "shop", "svc.cluster.local"}, ".")
}
