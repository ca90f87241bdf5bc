// Package mesh puts proxies, configuration, identities and applications into a
// rig: a whole mesh on one machine, for the demo and the end-to-end tests.
//
//   - The proxies are processes, told everything by files and asked everything by their admin.
//   - Sync returns when what was said last is in force on every running node;
//     nothing here waits for a time to pass.
//   - Everything made through a Mesh ends with its Close.
//
// It knows the proxy only from outside: no package of the data plane or the
// control plane is imported.
package mesh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"aether/e2e/rig"
)

// Options of New.
type Options struct {
	Proxy       string    // path of the aether-proxy binary; required
	TrustDomain string    // empty: "rig.test"
	IPv6        bool      // addresses of both families
	KeepDir     bool      // leave logs and configuration behind at Close
	DevCA       bool      // the proxies' own throw-away authority issues; else the mesh does, by files
	Args        []string  // further arguments of every proxy
	Registry    *Registry // nil: every proxy reads all of the mesh from files
}

// Mesh is two nodes with what runs on them. Safe for concurrent use, but for
// Close, which comes last.
type Mesh struct {
	Rig *rig.Rig

	o      Options
	ca     *rig.CA
	config string // directories
	certs  string

	mu              sync.Mutex
	proxies         []*rig.Proc // by node; nil: not running
	pods            map[string]*rig.Pod
	documents       map[string]string // of pods, by their names, until RemovePod
	namespaces      map[string]string // of pods, by their names
	etcd, registrar *rig.Proc
	api             *apiServer // nil: none has run
	mark            int
	stops           []func()
}

// markFile sorts before every other document: when a proxy has read a mark, it
// has read the others after they were written.
const markFile = "00-mark.yaml"

// New makes two nodes; nothing runs on them yet. ctx bounds the set-up only.
func New(ctx context.Context, o Options) (*Mesh, error) {
	o.TrustDomain = cmp.Or(o.TrustDomain, "rig.test")
	r, err := rig.New(ctx, rig.Options{Nodes: 2, IPv6: o.IPv6, KeepDir: o.KeepDir})
	if err != nil {
		return nil, err
	}
	m := &Mesh{
		Rig: r, o: o, config: filepath.Join(r.Dir, "config"), certs: filepath.Join(r.Dir, "certs"),
		proxies: make([]*rig.Proc, len(r.Nodes)), pods: map[string]*rig.Pod{}, documents: map[string]string{}, namespaces: map[string]string{},
	}
	if m.ca, err = rig.NewCA(o.TrustDomain); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	for _, d := range []string{m.config, m.certs, m.LastGoodDir()} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, errors.Join(fmt.Errorf("mesh: %w", err), m.Close())
		}
	}
	return m, nil
}

// Pod of AddPod.
type Pod struct {
	Name        string // of pod and namespace; required
	Node        int    // index in Rig.Nodes
	Namespace   string // empty: "shop"
	Account     string // empty: the pod's name
	Ports       string // endpoint.aether.io/ports
	Annotations map[string]string
	Volumes     map[string]string // rig.PodManifest's
	NoSVID      bool              // no certificate is made for it (the mesh's authority only)
	// Prepare, if not nil, is called before the pod's document is written: applications
	// that it starts are there before the first request can be.
	Prepare func(*rig.Pod) error
}

// AddPod makes a pod that the mesh manages, gives it its certificate and writes
// its document. It is served after the next Sync or Start.
func (m *Mesh) AddPod(ctx context.Context, p Pod) (*rig.Pod, error) {
	p.Namespace, p.Account = cmp.Or(p.Namespace, "shop"), cmp.Or(p.Account, p.Name)
	pod, err := m.Rig.AddPod(ctx, p.Node, p.Name)
	if err != nil {
		return nil, err
	}
	if !m.o.DevCA && !p.NoSVID {
		if err := m.Issue(rig.SVIDRequest{Namespace: p.Namespace, Account: p.Account}); err != nil {
			return nil, err
		}
	}
	m.mu.Lock()
	m.pods[p.Name] = pod
	m.mu.Unlock()
	if p.Prepare != nil {
		if err := p.Prepare(pod); err != nil {
			return nil, err
		}
	}
	yaml := rig.PodYAML(pod, rig.PodManifest{
		Namespace: p.Namespace, Account: p.Account, Ports: p.Ports, Annotations: p.Annotations, Volumes: p.Volumes,
	})
	m.mu.Lock()
	m.documents[p.Name], m.namespaces[p.Name] = yaml, p.Namespace
	m.mu.Unlock()
	if err := m.Write("pod-"+p.Name, yaml); err != nil {
		return nil, err
	}
	return pod, m.createObject(ctx, pod, p, yaml)
}

// Pod is the pod of that name that AddPod made; it panics when there is none.
func (m *Mesh) Pod(name string) *rig.Pod {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pods[name]
	if p == nil {
		panic("mesh: no pod " + name)
	}
	return p
}

// Issue makes a certificate and puts it where the proxies look for the identity
// of req's Namespace and Account.
func (m *Mesh) Issue(req rig.SVIDRequest) error { return m.IssueBy(m.ca, req) }

// IssueBy is Issue by another authority, which becomes the bundle's only one.
func (m *Mesh) IssueBy(ca *rig.CA, req rig.SVIDRequest) error {
	s, err := ca.Issue(req)
	if err != nil {
		return err
	}
	_, err = s.Write(m.certs)
	return err
}

// SVID makes a certificate of the mesh's trust domain for a peer that is no proxy of it.
func (m *Mesh) SVID(namespace, account string) (*rig.SVID, error) {
	return m.ca.Issue(rig.SVIDRequest{Namespace: namespace, Account: account})
}

// Service writes the document of a Service, in namespace "shop" unless it says otherwise.
func (m *Mesh) Service(s rig.ServiceManifest) error {
	s.Namespace = cmp.Or(s.Namespace, "shop")
	return m.Write("service-"+s.Namespace+"-"+s.Name, rig.ServiceYAML(s))
}

// Write puts a document under that name into the configuration, whole, in place of what
// was there. It is in force after Sync.
func (m *Mesh) Write(name, yaml string) error {
	return replace(filepath.Join(m.config, "mesh-"+name+".yaml"), yaml)
}

// Remove takes a document out. It is out of force after Sync.
func (m *Mesh) Remove(name string) error {
	if err := os.Remove(filepath.Join(m.config, "mesh-"+name+".yaml")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("mesh: %w", err)
	}
	return nil
}

func replace(path, content string) error {
	tmp := path + ".new" // not *.yaml: nobody reads it
	if err := os.WriteFile(tmp, []byte(content), 0o644); err != nil {
		return fmt.Errorf("mesh: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("mesh: %w", err)
	}
	return nil
}

// Start runs a proxy on every node, and before them the registry if there is one, and
// returns when what was written is in force.
func (m *Mesh) Start(ctx context.Context) error {
	if m.o.Registry != nil {
		if err := m.startRegistry(ctx); err != nil {
			return err
		}
	}
	for i := range m.Rig.Nodes {
		if err := m.StartProxy(i); err != nil {
			return err
		}
	}
	return m.Sync(ctx)
}

// drain is how long a proxy that is told to stop, or replaced, goes on, unless Options.Args
// say otherwise: clients' idle connections are not waited for.
const drain = "500ms"

// StartProxy runs the proxy of a node, which must not be running.
func (m *Mesh) StartProxy(node int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.proxies[node] != nil {
		return fmt.Errorf("mesh: the proxy of %s is running already", m.Rig.Nodes[node].Name)
	}
	return m.startLocked(node)
}

// ReplaceProxy has another proxy take the place of the one that runs on a node, whose
// sockets it takes over, and returns when it serves and the old one has ended.
func (m *Mesh) ReplaceProxy(ctx context.Context, node int) error {
	m.mu.Lock()
	old := m.proxies[node]
	var err error
	if old == nil {
		err = fmt.Errorf("mesh: no proxy runs on %s that could be replaced", m.Rig.Nodes[node].Name)
	} else {
		err = m.startLocked(node)
	}
	m.mu.Unlock()
	if err != nil {
		return err
	}
	select {
	case <-old.Done():
		if err := old.Err(); err != nil {
			return fmt.Errorf("mesh: the replaced proxy of %s failed: %w; its log ends:\n%s", m.Rig.Nodes[node].Name, err, old.Tail(2000))
		}
		return nil
	case <-m.Proxy(node).Done():
		return fmt.Errorf("mesh: the new proxy of %s ended: %w; its log ends:\n%s", m.Rig.Nodes[node].Name, m.Proxy(node).Err(), old.Tail(2000))
	case <-ctx.Done():
		return fmt.Errorf("mesh: the proxy of %s is not replaced: %w; its log ends:\n%s", m.Rig.Nodes[node].Name, ctx.Err(), old.Tail(2000))
	}
}

// identityArgs say where certificates come from.
func (m *Mesh) identityArgs() []string {
	if m.o.DevCA {
		return []string{"--dev-ca", m.devCA()}
	}
	return []string{"--certs", m.certs}
}

// startLocked starts a proxy on a node, which is the node's from then on.
func (m *Mesh) startLocked(node int) error {
	n := m.Rig.Nodes[node]
	args := []string{
		m.o.Proxy, "--config", m.config, "--node", n.Name, "--trust-domain", m.o.TrustDomain, "--capture",
		"--handover", filepath.Join(m.Rig.Dir, "handover-"+n.Name), "--drain-time", drain,
	}
	args = append(args, m.identityArgs()...)
	args = append(args, m.proxyArgs(n)...)
	p, err := m.Rig.StartProcess(&n.Space, "proxy-"+n.Name, append(args, m.o.Args...)...)
	if err != nil {
		return err
	}
	m.proxies[node] = p
	return nil
}

func (m *Mesh) devCA() string { return filepath.Join(m.Rig.Dir, "throw-away-ca") }

// StopProxy ends the proxy of a node with SIGTERM. An error means that it did
// not end in order.
func (m *Mesh) StopProxy(node int) error {
	m.mu.Lock()
	p := m.proxies[node]
	m.proxies[node] = nil
	m.mu.Unlock()
	if p == nil {
		return fmt.Errorf("mesh: no proxy runs on %s", m.Rig.Nodes[node].Name)
	}
	return p.Stop()
}

// Proxy is the process of a node's proxy; nil when none runs.
func (m *Mesh) Proxy(node int) *rig.Proc {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.proxies[node]
}

// Sync returns when all that was written before the call is in force on every node with a
// proxy: documents are read, pods are served or their problem is known, and
// certificates that lie ready are in use.
func (m *Mesh) Sync(ctx context.Context) error {
	m.mu.Lock()
	m.mark++
	mark := "mark-" + strconv.Itoa(m.mark)
	// Under the lock: a later mark must not be replaced by an earlier one.
	err := replace(filepath.Join(m.config, markFile), rig.ServiceYAML(rig.ServiceManifest{
		Namespace: "mesh-sync", Name: mark, Ports: []uint16{1},
	}))
	at := m.mark
	proxies := slices.Clone(m.proxies)
	m.mu.Unlock()
	if err != nil {
		return err
	}
	for i, p := range proxies {
		if p == nil {
			continue
		}
		if err := p.Ready(ctx, func(ctx context.Context) error { return m.inForce(ctx, i, at) }); err != nil {
			return err
		}
	}
	return nil
}

// inForce: the node has read the mark, or one after it, and its pods have their certificates.
func (m *Mesh) inForce(ctx context.Context, node, mark int) error {
	b, err := m.Admin(ctx, node, "/snapshot")
	if err != nil {
		return err
	}
	found := markForm.FindSubmatch(b)
	if found == nil {
		return errors.New("no mark is in force yet")
	}
	if n, err := strconv.Atoi(string(found[1])); err != nil || n < mark {
		return fmt.Errorf("mark %s is in force, %d is waited for", found[1], mark)
	}
	s, err := m.Status(ctx, node)
	if err != nil {
		return err
	}
	if m.o.Registry != nil { // pods are taken beside the documents
		for _, name := range m.on(node) {
			if !slices.ContainsFunc(s.Pods, func(p PodStatus) bool { return strings.HasSuffix(p.Pod, "/"+name) }) {
				return fmt.Errorf("pod %s is not served yet", name)
			}
		}
	}
	for _, p := range s.Pods {
		if p.CertificateUntil.IsZero() && m.hasSVID(p.Identity) {
			return fmt.Errorf("pod %s has no certificate yet", p.Pod)
		}
	}
	return nil
}

// on are the names of a node's pods.
func (m *Mesh) on(node int) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for name := range m.documents {
		if m.pods[name].Node == m.Rig.Nodes[node] {
			out = append(out, name)
		}
	}
	return out
}

// hasSVID: the certificate of an identity lies ready, or is the proxies' own business.
func (m *Mesh) hasSVID(id string) bool {
	if m.o.DevCA {
		return true
	}
	f := idForm.FindStringSubmatch(id)
	if f == nil {
		return false
	}
	_, err := os.Stat(filepath.Join(m.certs, f[1], f[2], rig.CertFile))
	return err == nil
}

// OnClose has f called by Close before the network goes; the last one first.
func (m *Mesh) OnClose(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stops = append(m.stops, f)
}

// Close ends everything and removes it. It reports all that failed, a proxy that
// had ended by itself among it.
func (m *Mesh) Close() error {
	m.mu.Lock()
	stops := m.stops
	m.stops = nil
	m.mu.Unlock()
	for _, f := range slices.Backward(stops) {
		f()
	}
	return m.Rig.Close()
}

// ClusterIPs are the addresses of service n: 10.96.0.<n> and fd00:96::<n>, which belong to nobody.
func (m *Mesh) ClusterIPs(n uint8) []netip.Addr {
	ips := []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, n})}
	if m.o.IPv6 {
		ips = append(ips, netip.MustParseAddr(fmt.Sprintf("fd00:96::%x", n)))
	}
	return ips
}

// Status is what a proxy's admin says of itself, as far as it is asked for here.
type Status struct {
	Seq      uint64      `json:"seq"`
	Pods     []PodStatus `json:"pods"`
	Problems []Problem   `json:"problems"`
}

// PodStatus is that of a pod that the proxy serves.
type PodStatus struct {
	Pod, NetNS, Identity string
	CertificateUntil     time.Time
	Connections          int64
}

// Problem is something that is not in force.
type Problem struct{ Object, Where, Reason string }
