// Package kubestore derives the registry's rows from what Kubernetes knows of pods and
// nodes (contract 9.6). It is the registry.Store of meshes that keep no store of their own.
//
//   - A row is a managed pod that runs and has an address. Nothing is ever written:
//     Put and Delete do nothing.
//   - A pod whose annotations cannot be read has no row: it is logged once, with what is
//     wrong, and counted. Other pods are not concerned.
//   - A pod that is being deleted drains from the moment that Kubernetes says so.
//   - Of pods and nodes only what rows are made of is kept.
//
// It knows nothing of who reads the rows.
package kubestore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	kubewatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"aether/controlplane/kube/follow"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/dataplane/telemetry"
)

// ManagedLabel is what a pod says to be in the mesh: exactly "true" (contract 1.2).
const ManagedLabel = "aether.io/managed"

// Config of a Store.
type Config struct {
	Client kubernetes.Interface // required: it lists and watches pods and nodes
	// Region and Cluster are the partition that the rows belong to, and Cluster is the
	// rows' cluster_name (contract 9.5); empty: local.
	Region, Cluster string
	Log             *slog.Logger // nil: discard
}

// Store is a registry.Store. Make it with New. Safe for concurrent use.
type Store struct {
	cfg      Config
	retry    wait.Backoff // see follow.Kind; tests have another one
	pods     atomic.Int64
	rows     atomic.Int64
	watching atomic.Int64

	changes     telemetry.Counter
	annotations telemetry.Counter // pods that became unreadable
	invalid     telemetry.Counter // pods whose row became invalid
	shared      telemetry.Counter // pods that came to an address that another one of their service has
}

// New makes a Store; nothing is asked before Watch.
func New(c Config) (*Store, error) {
	if c.Client == nil {
		return nil, errors.New("kubestore: no client of Kubernetes")
	}
	c.Region, c.Cluster = cmp.Or(c.Region, "local"), cmp.Or(c.Cluster, "local")
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Store{cfg: c}, nil
}

// Register makes the store's gauges and counters known to m. Call it once.
func (s *Store) Register(m *telemetry.Metrics) {
	m.Gauge("aether_registrar_kubernetes_pods", "Managed pods that run, as Kubernetes tells.", func() float64 { return float64(s.pods.Load()) })
	m.Gauge("aether_registrar_kubernetes_rows", "Pods of them that have a row.", func() float64 { return float64(s.rows.Load()) })
	const help = "Pods that came to have no row, by reason."
	m.Count("aether_registrar_kubernetes_bad_pods_total", help, &s.annotations, "reason", "bad_annotation")
	m.Count("aether_registrar_kubernetes_bad_pods_total", help, &s.invalid, "reason", "invalid_row")
	m.Count("aether_registrar_kubernetes_bad_pods_total", help, &s.shared, "reason", "shared_address")
	m.Count("aether_registrar_kubernetes_changes_total", "Changes of rows that were told.", &s.changes)
}

// Put does nothing: the rows are what Kubernetes says (contract 9.1).
func (s *Store) Put(context.Context, model.ServiceName, *registrypb.ServiceEndpoint) error {
	return nil
}

// Delete does nothing, like Put.
func (s *Store) Delete(context.Context, model.ServiceName, string, registry.Statement) error {
	return nil
}

// Watch is registry.Store's. It tells what is there once both pods and nodes have been
// listed, and that again as a whole after a listing that follows an interruption. It
// returns when ctx has ended, with ctx's error, and takes no second caller meanwhile.
func (s *Store) Watch(ctx context.Context, on func(registry.Change), report func(error)) error {
	if s.watching.Add(1) > 1 {
		s.watching.Add(-1)
		return errors.New("kubestore: it is being watched already")
	}
	defer s.watching.Add(-1)
	ctx, cancel := context.WithCancel(ctx)
	podNews, nodeNews := make(chan follow.Event[*pod]), make(chan follow.Event[*node])
	var all sync.WaitGroup
	all.Go(func() { follow.Objects(ctx, s.podKind(), s.pod, sender(ctx, podNews)) })
	all.Go(func() { follow.Objects(ctx, s.nodeKind(), nodeOf, sender(ctx, nodeNews)) })
	defer all.Wait()
	defer cancel()

	w := watch{
		store: s, on: on, report: report,
		pods: map[string]*pod{}, nodes: map[string]*node{}, at: map[rowID]*pod{}, shown: map[rowID]*registrypb.ServiceEndpoint{},
	}
	for {
		select {
		case n := <-podNews:
			w.onPodEvent(n)
		case n := <-nodeNews:
			w.onNodeEvent(n)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// sender sends what it is given, unless ctx ends.
func sender[N any](ctx context.Context, to chan<- N) func(N) {
	return func(n N) {
		select {
		case to <- n:
		case <-ctx.Done():
		}
	}
}

// podKind are the pods that may have a row: the API server leaves out the rest.
func (s *Store) podKind() follow.Kind {
	c := s.cfg.Client
	pick := func(o metav1.ListOptions) metav1.ListOptions {
		o.LabelSelector, o.FieldSelector = ManagedLabel+"=true", "status.phase="+string(corev1.PodRunning)
		return o
	}
	return follow.Kind{
		Name: "pods", Example: &corev1.Pod{}, Retry: s.retry,
		List: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return c.CoreV1().Pods(metav1.NamespaceAll).List(ctx, pick(o))
		},
		Watch: func(ctx context.Context, o metav1.ListOptions) (kubewatch.Interface, error) {
			return c.CoreV1().Pods(metav1.NamespaceAll).Watch(ctx, pick(o))
		},
	}
}

func (s *Store) nodeKind() follow.Kind {
	c := s.cfg.Client
	return follow.Kind{
		Name: "nodes", Example: &corev1.Node{}, Retry: s.retry,
		List: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return c.CoreV1().Nodes().List(ctx, o)
		},
		Watch: func(ctx context.Context, o metav1.ListOptions) (kubewatch.Interface, error) {
			return c.CoreV1().Nodes().Watch(ctx, o)
		},
	}
}

// rowID is where a row stands: a service has one at an address.
type rowID struct {
	service model.ServiceName
	ip      string
}

// watch is the state of one Watch. It belongs to one goroutine.
type watch struct {
	store  *Store
	on     func(registry.Change)
	report func(error)

	pods              map[string]*pod // by namespace/name
	nodes             map[string]*node
	at                map[rowID]*pod                        // the pods that claim a row, linked
	shown             map[rowID]*registrypb.ServiceEndpoint // what was told last
	podFate, nodeFate listState
	published         bool  // the first whole has been
	reported          bool  // report has been called
	reportedErr       error // what it was told last
	version           string
}

// listState is how a kind of objects fares.
type listState struct {
	listed bool
	err    error // why it is not followed
}

func (w *watch) onPodEvent(n follow.Event[*pod]) {
	touched := map[rowID]bool{}
	switch n.Op {
	case follow.StatusChanged:
		w.podFate.err = n.Err
		w.reportStatus()
		return
	case follow.Replaced:
		w.podFate.listed = true
		keep := make(map[string]bool, len(n.Objects))
		for _, p := range n.Objects {
			keep[p.key()] = true
			w.setPod(p, touched)
		}
		for k := range w.pods {
			if !keep[k] {
				w.dropPod(k, touched)
			}
		}
	case follow.Removed:
		w.dropPod(n.Objects[0].key(), touched)
	default:
		w.setPod(n.Objects[0], touched)
	}
	w.store.pods.Store(int64(len(w.pods)))
	w.publish(touched, n.Op == follow.Replaced, n.Version)
}

func (w *watch) onNodeEvent(n follow.Event[*node]) {
	if n.Op == follow.StatusChanged {
		w.nodeFate.err = n.Err
		w.reportStatus()
		return
	}
	changed := map[string]bool{}
	drop := func(name string) {
		if w.nodes[name] != nil {
			changed[name] = true
			delete(w.nodes, name)
		}
	}
	keep := make(map[string]bool, len(n.Objects))
	for _, o := range n.Objects {
		if n.Op == follow.Removed {
			drop(o.Name)
			continue
		}
		keep[o.Name] = true
		if old := w.nodes[o.Name]; old == nil || old.nodeFacts != o.nodeFacts {
			changed[o.Name] = true
		}
		w.nodes[o.Name] = o
	}
	if n.Op == follow.Replaced {
		w.nodeFate.listed = true
		for name := range w.nodes {
			if !keep[name] {
				drop(name)
			}
		}
	}
	touched := map[rowID]bool{}
	if len(changed) > 0 {
		for _, p := range w.pods {
			if p.endpoint != nil && changed[p.node] {
				p.endpoint = proto.CloneOf(p.endpoint) // the old one has been handed over
				w.addLocality(p)
				touched[p.rowID()] = true
			}
		}
	}
	w.publish(touched, false, n.Version)
}

// reportStatus reports how the store fares, if that has changed.
func (w *watch) reportStatus() {
	now := errors.Join(w.podFate.err, w.nodeFate.err)
	switch {
	case now == nil && !w.published: // not there yet, which is no error
	case w.reported && fmt.Sprint(now) == fmt.Sprint(w.reportedErr):
	default:
		w.reported, w.reportedErr = true, now
		w.report(now)
	}
}

// setPod takes what a pod says now.
func (w *watch) setPod(p *pod, touched map[rowID]bool) {
	key := p.key()
	old := w.pods[key]
	if !p.runs {
		w.dropPod(key, touched)
		return
	}
	if old != nil && p.problem != "" && p.problem == old.problem {
		p.logged = true
	}
	if p.endpoint != nil {
		w.addLocality(p)
	}
	if old != nil && proto.Equal(old.endpoint, p.endpoint) && old.created == p.created && old.deleting == p.deleting && old.uid == p.uid {
		old.problem, old.fault, old.logged = p.problem, p.fault, p.logged // what rows are made of has not changed
		w.reportProblem(old)
		return
	}
	if old != nil {
		w.unlink(old, touched)
	}
	w.pods[key] = p
	if p.endpoint != nil {
		id := p.rowID()
		p.next = w.at[id]
		w.at[id] = p
		touched[id] = true
	}
	w.reportProblem(p)
}

// reportProblem logs why a pod has no row, once.
func (w *watch) reportProblem(p *pod) {
	if p.problem == "" || p.logged {
		return
	}
	p.logged = true
	if p.fault == registry.NoFault {
		w.store.annotations.Inc()
	} else {
		w.store.invalid.Inc()
	}
	w.store.cfg.Log.Warn("a pod is not registered", "pod", p.key(), "reason", p.problem)
}

func (w *watch) dropPod(key string, touched map[rowID]bool) {
	if p := w.pods[key]; p != nil {
		w.unlink(p, touched)
		delete(w.pods, key)
	}
}

// unlink takes a pod from those that claim its row.
func (w *watch) unlink(p *pod, touched map[rowID]bool) {
	if p.endpoint == nil {
		return
	}
	id := p.rowID()
	touched[id] = true
	first := w.at[id]
	if first == p {
		first = p.next
	} else {
		for q := first; q != nil; q = q.next {
			if q.next == p {
				q.next = p.next
				break
			}
		}
	}
	if first == nil {
		delete(w.at, id)
	} else {
		w.at[id] = first
	}
	p.next = nil
}

// addLocality writes into a pod's endpoint where its node is. A node that is not known (yet)
// leaves it out; the row is told again once it is.
func (w *watch) addLocality(p *pod) {
	e := p.endpoint
	e.Locality, e.KubernetesMetadata.NodeIp = nil, ""
	n := w.nodes[p.node]
	if n == nil {
		return
	}
	if n.region != "" || n.zone != "" {
		e.Locality = &registrypb.ServiceEndpoint_Locality{Region: n.region, Zone: n.zone}
	}
	e.KubernetesMetadata.NodeIp = n.ip
}

// publish tells the rows that have changed, or all: the first time, which is when both
// kinds have been listed, and where whole says so.
func (w *watch) publish(touched map[rowID]bool, whole bool, version string) {
	w.version = laterVersion(w.version, version)
	if !w.podFate.listed || !w.nodeFate.listed {
		return
	}
	if !w.published {
		whole = true
		for id := range w.at {
			touched[id] = true
		}
	}
	c := registry.Change{Whole: whole, Version: w.version}
	for id := range touched {
		c.Rows = append(c.Rows, w.show(id)...)
	}
	if whole {
		c.Rows = make([]registry.Row, 0, len(w.shown))
		for id, e := range w.shown {
			c.Rows = w.rows(c.Rows, id, e)
		}
	} else if len(c.Rows) == 0 {
		return
	}
	slices.SortFunc(c.Rows, func(a, b registry.Row) int {
		return cmp.Or(cmp.Compare(a.Service.Namespace, b.Service.Namespace), cmp.Compare(a.Service.Name, b.Service.Name),
			cmp.Compare(a.IP, b.IP), cmp.Compare(a.Protocol, b.Protocol))
	})
	w.published = true
	w.store.rows.Store(int64(len(w.shown)))
	w.store.changes.Inc()
	w.on(c)
	w.reportStatus()
}

// show brings what is shown of a row up to date and gives the difference.
func (w *watch) show(id rowID) (diff []registry.Row) {
	old := w.shown[id]
	best := w.best(id)
	if best == nil {
		if old == nil {
			return nil
		}
		delete(w.shown, id)
		return w.gone(nil, id, old, nil)
	}
	if old != nil && proto.Equal(old, best.endpoint) {
		best.endpoint = old // nothing is kept twice
		return nil
	}
	w.shown[id] = best.endpoint
	return w.rows(w.gone(nil, id, old, best.endpoint), id, best.endpoint)
}

// best is the pod that a row is made of. Several pods of a service have one address if
// they use their node's; only one of them can be reached there, so one is shown: one
// that is not being deleted, the youngest.
func (w *watch) best(id rowID) *pod {
	best := w.at[id]
	if best == nil || best.next == nil {
		return best
	}
	for p := best.next; p != nil; p = p.next {
		if p.beats(best) {
			best = p
		}
	}
	for p := w.at[id]; p != nil; p = p.next {
		if p != best && !p.deleting && !p.shadowed {
			p.shadowed = true
			w.store.shared.Inc()
			w.store.cfg.Log.Warn("a pod is not registered", "pod", p.key(), "reason",
				fmt.Sprintf("pod %s of service %s has its address, %s: only one of them can be reached there", best.key(), id.service, id.ip))
		}
	}
	return best
}

// rows adds the rows of an endpoint, one a class (contract 9.4).
func (w *watch) rows(to []registry.Row, id rowID, e *registrypb.ServiceEndpoint) []registry.Row {
	for _, p := range registry.Protocols(e) {
		to = append(to, w.row(id, p, e))
	}
	return to
}

// gone adds the removal of the classes that old has and e has not.
func (w *watch) gone(to []registry.Row, id rowID, old, e *registrypb.ServiceEndpoint) []registry.Row {
	if old == nil {
		return to
	}
	var now []registrypb.Service_Protocol
	if e != nil {
		now = registry.Protocols(e)
	}
	for _, p := range registry.Protocols(old) {
		if !slices.Contains(now, p) {
			to = append(to, w.row(id, p, nil))
		}
	}
	return to
}

func (w *watch) row(id rowID, p registrypb.Service_Protocol, e *registrypb.ServiceEndpoint) registry.Row {
	return registry.Row{Region: w.store.cfg.Region, Cluster: w.store.cfg.Cluster, Service: id.service, Protocol: p, IP: id.ip, Endpoint: e}
}

// laterVersion is the later of two resource versions, which are numbers that grow.
func laterVersion(a, b string) string {
	x, errX := strconv.ParseUint(a, 10, 64)
	y, errY := strconv.ParseUint(b, 10, 64)
	if errY != nil || errX == nil && x > y {
		return a
	}
	return b
}
