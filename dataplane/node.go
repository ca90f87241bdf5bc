// Package dataplane assembles one node's data plane: the listeners of its pods,
// the loops that serve them, identities and capture.
//
//   - Apply is told the whole wanted state and changes only what differs: a pod
//     that stays keeps its sockets and connections.
//   - A pod that cannot be served (its namespace is gone, a port is taken) is a
//     problem of that pod alone, reported and tried again.
//   - Capture rules go in after the pod's listeners accept.
//
// It makes no decision about traffic; those are decide's.
package dataplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"aether/dataplane/engine"
	"aether/dataplane/extauthz"
	"aether/dataplane/inbound"
	"aether/dataplane/journal"
	"aether/dataplane/listen"
	"aether/dataplane/model"
	"aether/dataplane/outbound"
	"aether/dataplane/reactor"
	"aether/dataplane/relay"
	"aether/dataplane/snapshot"
	"aether/meshhop"
	"aether/mtls"
	"aether/mtls/record"
	"aether/mtls/spiffeid"
	"aether/tproxy/apply"
	"aether/tproxy/netns"
	"aether/tproxy/rules"
	"aether/tproxy/socket"
)

// Config of a Node.
type Config struct {
	Identities mtls.Source      // required: where the pods' certificates come from
	Journal    journal.Observer // required
	Owner      *listen.Owner    // nil: a new one, with nothing inherited
	Blocking   reactor.Blocking // how loops wait
	MaxLoops   int              // 0: GOMAXPROCS
	MinLoops   int              // open from the start; 0: one
	Memory     int64            // bytes of memory that the process may use; 0: no limit (see MemoryLimit)
	Records    record.Maker     // who seals TLS records
	Authz      string           // where the authorization service is, in grpc-go's form; empty: extauthz.Target
	Compat     bool             // accept Envoy-based peers: TLS 1.2, no server name (contract 6.2)
	// Want asks whoever keeps the catalog for the rows of a service that something waits for
	// (contract 4.6). Called on loops: it must not block. nil: nobody waits.
	Want func(model.ServiceName)
	// Ready: the pod's application answers its probe, which is what /-/-/ready says of
	// it over the hop (contract 4.11). It must not wait. nil: nobody probes, and all do.
	Ready func(container string) bool

	Relay relay.Options // of raw TCP and of what is passed through

	Capture     bool         // install the capture rules in the pods, as the CNI plugin would
	StartPaused bool         // accept nothing before Open, and leave capture rules where they are until Alone: the Owner's sockets are still another process's, too
	Log         *slog.Logger // nil: discard
}

// Node is the data plane of one node. Make it with New, run it with Run.
type Node struct {
	cfg      Config
	log      *slog.Logger
	store    snapshot.Store
	engine   *engine.Engine
	factory  *socket.Factory
	certs    *mtls.Store
	dialer   *meshhop.Dialer
	acceptor *meshhop.Acceptor
	authz    *extauthz.Service
	out      *outbound.Outbound
	in       *inbound.Inbound

	mu       sync.Mutex
	want     []model.Workload // of the last Apply
	given    []model.Workload // the slice that it was given
	pods     map[string]*pod  // by container
	problems map[string]model.Problem
	had      map[string]model.Problem // problems of the try before: what is the same again is not logged again
	applied  bool
	ctx      context.Context // of Run; nil before
	held     bool            // until Open
	frozen   bool            // a successor has a copy of the sockets there are: none is opened or closed
	gone     bool            // it accepts, and this process does not; or nobody does: a drain is over but for what has been taken
	guest    bool            // a predecessor serves, or may: the pods' capture is not this process's to take out
	draining bool
	homes    []netns.ID    // network namespaces that are no pod's
	host     *netns.NS     // the node's own; nil: no hop was to be made from there
	hostPool *socket.Pool  // in it
	news     chan struct{} // of one: the state or an identity changed
	synced   chan struct{} // closed and replaced when pods were opened or dropped

	fromNode atomic.Pointer[socket.Pool] // hops' sockets are of the node's own network namespace; nil: of the pod's

	socks sync.Map // container → *sockets: what a dial needs, without the lock that Apply holds
	near  sync.Map // container → *inbound.LocalDestination, likewise
}

// pod is a workload that is served.
type pod struct {
	w      model.Workload
	ns     *netns.NS
	socks  *sockets
	engine *engine.Pod
	cancel context.CancelFunc

	listen   func() error // makes the engine accept; called once
	captured bool         // rules of ours are in the pod
}

// New makes a node that serves nothing yet.
func New(cfg Config) (*Node, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Owner == nil {
		cfg.Owner = &listen.Owner{}
	}
	e, err := engine.New(engine.Config{Blocking: cfg.Blocking, MaxLoops: cfg.MaxLoops, MinLoops: cfg.MinLoops, Memory: cfg.Memory, Log: cfg.Log})
	if err != nil {
		return nil, err
	}
	n := &Node{
		cfg: cfg, log: cfg.Log, engine: e, factory: socket.NewFactory(), pods: map[string]*pod{}, problems: map[string]model.Problem{},
		homes: homesOf(), held: cfg.StartPaused, guest: cfg.StartPaused, news: make(chan struct{}, 1), synced: make(chan struct{}),
	}
	n.certs = mtls.NewStore(mtls.Config{Source: cfg.Identities, Changed: n.certChanged})
	n.dialer = &meshhop.Dialer{
		Sockets: n.hop, SVID: n.certs.Current, Maker: cfg.Records,
		Limit: meshhop.NewLimiter(meshhop.LimiterConfig{}),
	}
	n.acceptor = &meshhop.Acceptor{Limit: meshhop.NewLimiter(meshhop.LimiterConfig{}), Maker: cfg.Records}
	if n.authz, err = extauthz.New(extauthz.Config{Target: cfg.Authz, Log: cfg.Log}); err != nil {
		return nil, err
	}
	n.out = outbound.New(outbound.Config{Store: &n.store, Dialer: n.dialer, Journal: cfg.Journal, Authz: n.authz, Log: cfg.Log, LocalDestination: n.neighbour, Want: cfg.Want, Relay: cfg.Relay})
	n.in = inbound.New(inbound.Config{Store: &n.store, Acceptor: n.acceptor, Journal: cfg.Journal, Authz: n.authz, Ready: cfg.Ready, Relay: cfg.Relay, Log: cfg.Log})
	return n, nil
}

// Run serves until ctx ends. Capture rules that it installed are taken out, unless a
// successor serves by them, and everything it opened is closed, when it returns.
func (n *Node) Run(ctx context.Context) error {
	inner, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var wg sync.WaitGroup
	wg.Go(func() { n.engine.Run(inner) })
	certs := make(chan error, 1)
	wg.Go(func() { certs <- n.certs.Run(inner) })
	n.mu.Lock()
	n.ctx = inner
	n.syncLocked()
	n.mu.Unlock()
	n.changed()
	retry := time.NewTicker(time.Second)
	defer retry.Stop()
	var err error
	for running := true; running; {
		select {
		case <-ctx.Done():
			running = false
		case err = <-certs:
			running = false
		case <-retry.C:
			n.mu.Lock()
			if len(n.problems) > 0 {
				n.syncLocked()
			}
			n.mu.Unlock()
		}
	}
	n.mu.Lock()
	for _, p := range n.pods {
		n.dropLocked(p)
	}
	n.ctx = nil
	n.mu.Unlock()
	stop()
	wg.Wait()
	err = errors.Join(err, n.authz.Close(), n.factory.Close(), n.cfg.Owner.Close())
	if n.host != nil {
		n.host.Close()
	}
	return err
}

// Apply makes snap the node's view of the mesh and workloads the pods it
// serves. It returns once listeners of new pods accept, or their problem is known. The
// slice that it was given the last time says that the pods are the same.
func (n *Node) Apply(snap *snapshot.Snapshot, workloads []model.Workload) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.draining {
		snap = snap.WithDraining(true)
	}
	n.store.Swap(snap)
	n.out.RetryWaiting() // first: somebody waits
	same := n.applied && len(workloads) == len(n.given) && (len(workloads) == 0 || &workloads[0] == &n.given[0])
	n.given, n.applied = workloads, true
	if !same {
		n.want = slices.Clone(workloads)
		defer n.changed()
		if n.ctx != nil {
			n.syncLocked()
		}
	}
	n.out.OnSnapshot(snap) // in order, for mu is held
}

// Snapshot is the current view; nil before the first Apply.
func (n *Node) Snapshot() *snapshot.Snapshot { return n.store.Load() }

// Ready reports whether a first state has been applied, its pods are being
// listened for, and the process is not about to leave; pods with a problem do not
// hold it up.
func (n *Node) Ready() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.applied && n.ctx != nil && !n.held && !n.draining
}

// Problems are those of pods that cannot be served, or whose certificate cannot be renewed, by pod.
func (n *Node) Problems() []model.Problem {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]model.Problem, 0, len(n.problems))
	for _, p := range n.problems {
		out = append(out, p)
	}
	out = append(out, certificateProblems(n.certs.Held())...)
	slices.SortStableFunc(out, func(a, b model.Problem) int { return cmp.Compare(a.Object, b.Object) })
	return out
}

// PodStatus is what Pods tells of one pod.
type PodStatus struct {
	Pod, Container, NetNS, Identity string
	CertificateUntil                time.Time // zero: no valid certificate
	Connections                     int64
	Loop                            int
}

// Pods tells of the pods that are served, by name.
func (n *Node) Pods() []PodStatus {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]PodStatus, 0, len(n.pods))
	for c, p := range n.pods {
		s := PodStatus{
			Pod: p.w.Namespace + "/" + p.w.Name, Container: c, NetNS: p.w.NetNS, Identity: p.w.SPIFFEID,
			Connections: p.engine.Conns(), Loop: p.engine.Home().ID(),
		}
		if v := n.certs.Current(c); v != nil {
			s.CertificateUntil = v.NotAfter
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b PodStatus) int { return cmp.Compare(a.Pod, b.Pod) })
	return out
}

// Outbound is the node's outbound side, whose counters can be made known.
func (n *Node) Outbound() *outbound.Outbound { return n.out }

// Engine is for statistics.
func (n *Node) Engine() *engine.Engine { return n.engine }

func (n *Node) certChanged(r mtls.Ref, s *mtls.SVID, err error) {
	defer n.changed()
	if err != nil {
		n.log.Warn("identity", "pod", r.Namespace+"/"+r.Pod, "id", r.ID.String(), "err", err)
		return
	}
	n.engine.Loops()[0].Go(func() { // it verifies, and the store is not to wait
		n.out.Rotated(r.Container)
		n.in.Rotated(r.Container)
	})
	n.log.Info("identity in force", "pod", r.Namespace+"/"+r.Pod, "id", r.ID.String(), "until", s.NotAfter)
}

// syncLocked makes the pods what want says.
func (n *Node) syncLocked() {
	if n.frozen || n.gone {
		return // what is new is the successor's to serve
	}
	defer n.syncedLocked()
	want := map[string]*model.Workload{}
	for i := range n.want {
		want[n.want[i].ContainerID] = &n.want[i]
	}
	n.had, n.problems = n.problems, map[string]model.Problem{}
	for c, p := range n.pods {
		if w := want[c]; w == nil || !sameSockets(&p.w, w) {
			n.dropLocked(p)
		} else {
			if n.cfg.Capture && !n.held && !slices.Equal(ruleset(w), ruleset(&p.w)) {
				n.captureLocked(p, w)
			}
			if slices.Equal(p.w.IPs, w.IPs) {
				p.w = *w
			} else if err := n.ownLocked(p.ns, w); err == nil {
				p.w = *w
			} else {
				n.problemLocked(w, fmt.Errorf("it is served as before: %w", err))
			}
		}
	}
	for c, w := range want {
		p := n.pods[c]
		if p == nil {
			var err error
			if p, err = n.addLocked(w); err != nil {
				n.problemLocked(w, err)
				continue
			}
			n.pods[c] = p
			if n.held {
				continue
			}
			if err := n.openLocked(p); err != nil {
				n.problemLocked(w, err)
			}
		}
	}
}

// sameSockets: nothing changed that sockets and sessions were made from.
func sameSockets(a, b *model.Workload) bool {
	return a.Namespace == b.Namespace && a.Account == b.Account && a.NetNS == b.NetNS && a.SPIFFEID == b.SPIFFEID
}

func ruleset(w *model.Workload) []string {
	return []string{captureOf(w).Ruleset().String()}
}

func captureOf(w *model.Workload) rules.Config {
	return rules.Config{RedirectAll: w.Capture.RedirectAll, ExcludePorts: w.Capture.ExcludePorts, ExcludeRanges: w.Capture.ExcludeRanges}
}

func (n *Node) problemLocked(w *model.Workload, err error) {
	name := w.Namespace + "/" + w.Name
	p := model.Problem{Object: "Pod " + name, Reason: err.Error()}
	if n.had[w.ContainerID] != p && n.problems[w.ContainerID] != p {
		n.log.Warn("pod not served; it is tried again", "pod", name, "err", err)
	}
	n.problems[w.ContainerID] = p
}

// openLocked makes the pod's listeners accept, and then its capture lead to them.
func (n *Node) openLocked(p *pod) error {
	if err := p.listen(); err != nil {
		n.dropLocked(p)
		return err
	}
	if n.cfg.Capture {
		n.captureLocked(p, &p.w)
	}
	n.log.Info("pod served", "pod", p.w.Namespace+"/"+p.w.Name, "netns", p.w.NetNS, "id", p.w.SPIFFEID)
	return nil
}

func (n *Node) captureLocked(p *pod, w *model.Workload) {
	p.captured = true
	err := apply.Apply(p.ns, captureOf(w).Ruleset())
	switch {
	case errors.Is(err, apply.ErrNoIPv6):
		n.log.Info("capture without IPv6", "pod", w.Namespace+"/"+w.Name, "note", err)
	case err != nil:
		n.problemLocked(w, fmt.Errorf("capture: %w", err))
	}
}

func (n *Node) addLocked(w *model.Workload) (_ *pod, err error) {
	id, err := spiffeid.Parse(w.SPIFFEID)
	if err != nil {
		return nil, err
	}
	p := &pod{w: *w}
	if p.ns, err = netns.Open(w.NetNS); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.ns.Close()
		}
	}()
	if err = n.ownLocked(p.ns, w); err != nil {
		return nil, err
	}
	set, err := n.cfg.Owner.OpenPod(p.ns, w.ContainerID)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(n.ctx)
	p.cancel = cancel
	p.socks = &sockets{ctx: ctx, pool: n.factory.Open(p.ns), pod: w.Namespace + "/" + w.Name}
	p.engine = n.engine.AddPod(w.Namespace + "/" + w.Name)
	n.certs.Add(mtls.Ref{Container: w.ContainerID, Namespace: w.Namespace, Account: w.Account, Pod: w.Name, ID: id})

	container := w.ContainerID
	op := &outbound.Pod{
		Context: ctx, Engine: p.engine, Container: container, Namespace: w.Namespace, Name: w.Name, Account: w.Account, ID: id, Sockets: p.socks,
	}
	ip := &inbound.Pod{
		Context: ctx, Engine: p.engine, Container: container, Namespace: w.Namespace, Name: w.Name, Account: w.Account, ID: id, Sockets: p.socks,
		Local: &meshhop.Local{Pod: container, ID: id, Compat: n.cfg.Compat, SVID: func() *mtls.SVID { return n.certs.Current(container) }, TLS: mtls.ServerConfig(mtls.Server{
			Pod:    container,
			SVID:   func() *mtls.SVID { return n.certs.Current(container) },
			Serves: func(port uint16) bool { return n.serves(container, port) },
			Compat: n.cfg.Compat,
		})},
	}
	n.socks.Store(container, p.socks)
	n.near.Store(container, n.in.LocalDestination(ip))
	p.listen = func() error {
		err := errors.Join(
			p.engine.Listen(set.Capture, n.out.AcceptCaptured(op)),
			p.engine.ListenVital(set.Proxy, n.out.AcceptProxy(op)),
			p.engine.ListenVital(set.Mesh, n.in.Accept(ip)),
		)
		if set.Proxy6 >= 0 && err == nil {
			err = p.engine.ListenVital(set.Proxy6, n.out.AcceptProxy(op))
		}
		return err
	}
	return p, nil
}

// ownLocked says why ns is not w's, if so: whoever is in it would speak with w's identity. It is asked again
// each second, for a pod's addresses may come late.
func (n *Node) ownLocked(ns *netns.NS, w *model.Workload) error {
	const mend = "name the pod's own (in a file: annotation file.aether.io/netns)"
	if slices.Contains(n.homes, ns.ID()) {
		return fmt.Errorf("the network namespace %s is the node's, not the pod's, and nothing in it is touched: %s", ns, mend)
	}
	for c, p := range n.pods {
		if c != w.ContainerID && p.ns.ID() == ns.ID() {
			return fmt.Errorf("the network namespace %s is that of pod %s/%s: %s", ns, p.w.Namespace, p.w.Name, mend)
		}
	}
	have, err := ns.Addresses()
	if err != nil {
		return err
	}
	for _, ip := range w.IPs {
		if !slices.Contains(have, ip.Unmap()) {
			return fmt.Errorf("the network namespace %s has not the pod's address %s, and may be another's: %s, or correct the address (status.podIPs)", ns, ip, mend)
		}
	}
	return nil
}

// homesOf are the network namespaces that are no pod's: this process's and, where it can be seen, that of the
// machine's first process, which is the node's where this one has its own.
func homesOf() (out []netns.ID) {
	// This thread's is the process's: threads that enter another are locked to whoever does.
	for _, path := range []string{"/proc/thread-self/ns/net", "/proc/1/ns/net"} {
		if ns, err := netns.Open(path); err == nil {
			out = append(out, ns.ID())
			ns.Close()
		}
	}
	return out
}

// serves: the pod declares the port; 0, no server name, stands for its declared port (Compat).
func (n *Node) serves(container string, port uint16) bool {
	w := n.store.Load().Workload(container)
	if w == nil {
		return false
	}
	if port == 0 {
		return true
	}
	p, ok := w.Port(port)
	return ok && (p.Class == model.HTTP || p.Class == model.TCP)
}

func (n *Node) dropLocked(p *pod) {
	delete(n.pods, p.w.ContainerID)
	n.socks.Delete(p.w.ContainerID)
	n.near.Delete(p.w.ContainerID)
	n.uncaptureLocked(p) // first: what is dialled from now on is not to meet a closed listener
	p.cancel()
	n.engine.RemovePod(p.engine)
	n.certs.Remove(p.w.ContainerID)
	if err := n.cfg.Owner.ReleasePod(p.w.ContainerID); err != nil {
		n.log.Warn("listeners", "pod", p.w.Namespace+"/"+p.w.Name, "err", err)
	}
	p.socks.pool.Close()
	p.ns.Close()
	n.log.Info("pod no longer served", "pod", p.w.Namespace+"/"+p.w.Name)
}

// uncaptureLocked takes out the pod's capture, where it leads to this process alone.
func (n *Node) uncaptureLocked(p *pod) {
	if !p.captured || n.gone || n.frozen || n.guest {
		return
	}
	p.captured = false
	if err := apply.Remove(p.ns); err != nil && p.ns.Check() == nil {
		n.log.Warn("capture rules stay behind", "pod", p.w.Namespace+"/"+p.w.Name, "err", err)
	}
}

// neighbour is outbound.Config.LocalDestination.
func (n *Node) neighbour(container string) outbound.LocalDestination {
	v, ok := n.near.Load(container)
	if !ok {
		return nil
	}
	return v.(*inbound.LocalDestination)
}

// hop is meshhop.Dialer.Sockets.
func (n *Node) hop(ctx context.Context, container string, addr netip.AddrPort) (*net.TCPConn, error) {
	own := n.fromNode.Load()
	if _, served := n.socks.Load(container); own == nil || !served {
		return n.connect(ctx, container, addr)
	}
	return connectFrom(ctx, own, "the node", addr)
}

// connect connects from the network namespace of a pod that is served.
func (n *Node) connect(ctx context.Context, container string, addr netip.AddrPort) (*net.TCPConn, error) {
	s, ok := n.socks.Load(container)
	if !ok {
		return nil, fmt.Errorf("dataplane: pod %s is not served any more", container)
	}
	return s.(*sockets).Connect(ctx, addr)
}

// HopFromNode says whether hops to other nodes leave from the node's network namespace
// instead of the pod's (hopSource of MeshConfig, contract 10.9): new ones, for sessions that are
// open stay where they are. The error says why it cannot be; then it is as before.
func (n *Node) HopFromNode(on bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if on && n.host == nil {
		// This thread's is the process's: threads that enter another are locked to whoever does.
		ns, err := netns.Open("/proc/thread-self/ns/net")
		if err != nil {
			return fmt.Errorf("dataplane: hops from the node: %w", err)
		}
		n.host, n.hostPool = ns, n.factory.Open(ns)
	}
	if on {
		n.fromNode.Store(n.hostPool)
	} else {
		n.fromNode.Store(nil)
	}
	return nil
}

// sockets makes sockets in one pod's namespace.
type sockets struct {
	ctx  context.Context
	pool *socket.Pool
	pod  string
}

func (s *sockets) Get(v6 bool) (int, bool) { return s.pool.Get(v6) }

// Request is engine.SocketPool.
func (s *sockets) Request(v6 bool, on func(int, error)) {
	go func() {
		ctx, cancel := context.WithTimeout(s.ctx, 2*time.Second)
		defer cancel()
		on(s.pool.Wait(ctx, v6))
	}()
}

// Connect connects from the pod's namespace.
func (s *sockets) Connect(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error) {
	return connectFrom(ctx, s.pool, "pod "+s.pod, addr)
}

func connectFrom(ctx context.Context, pool *socket.Pool, whose string, addr netip.AddrPort) (*net.TCPConn, error) {
	fd, err := pool.Wait(ctx, addr.Addr().Unmap().Is6())
	if err != nil {
		return nil, fmt.Errorf("dataplane: socket for %s: %w", whose, err)
	}
	return socket.Connect(ctx, fd, addr)
}
