package kubestore

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"aether/controlplane/input"
	"aether/controlplane/registrar/client"
	"aether/controlplane/registrar/server"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/e2e/cluster/apiserver"
	"aether/e2e/counts"
	"aether/e2e/etcdtest"
	"aether/e2e/rig"
	"aether/e2e/testseed"
)

var (
	rounds = flag.Int("converge", testseed.Count(2, 3), "rounds of TestConvergence: of 150 changes each, and in all but the first an API server that has forgotten")
)

// TestConvergence: whatever becomes of pods and nodes, of watches, API server, registrars
// and their connections, in whatever order, nodes end with what contract 9.6 makes of the
// objects that the API server then has, and at no time hold a row that never was one.
//
// Two registrars over one real API server, each with a network of its own to it that can
// fail, and two nodes, each with a network to both: one that needs every service and one
// that needs some. What contract 9.6 makes of an object is said here a second time
// (derive), of annotations whose meaning is given and not read.
func TestConvergence(t *testing.T) {
	w := newConverging(t, testseed.Rand(t))
	for i := range *rounds {
		w.round(i > 0)
	}
	counts.Say(t, "%d changes of pods and nodes; %d watches cut, %d refused for a while, %d connections of nodes cut, %d registrars replaced, %d API servers that had forgotten; "+
		"in each of %d rounds %d nodes and %d registrars ended as contract 9.6 says, with %d rows at the last; %d rows that nodes held, all of which had been",
		w.changes, w.cuts, w.shuts, w.hops, w.replaced, w.forgot, *rounds, len(w.nodes), len(w.registrars), w.last, len(w.held()))
}

// saying is what annotations say, and what that means (contract 1.3).
type saying struct {
	annotations map[string]string
	bad         bool // they cannot be read: the pod has no row
	row         func(*registrypb.ServiceEndpoint)
}

func ports(def uint32, classes map[uint32]registrypb.PortProtocol) func(*registrypb.ServiceEndpoint) {
	return func(e *registrypb.ServiceEndpoint) {
		e.Port, e.PortProtocols = def, maps.Clone(classes)
		e.Ports = slices.Sorted(maps.Keys(classes))
	}
}

var sayings = []saying{
	{nil, false, func(*registrypb.ServiceEndpoint) {}},
	{map[string]string{"endpoint.aether.io/ports": "8080=h2,5432=tcp"}, false, ports(8080, map[uint32]registrypb.PortProtocol{8080: 1, 5432: 2})},
	{map[string]string{"endpoint.aether.io/port": "9090", "endpoint.aether.io/protocol": "tcp"}, false, ports(9090, map[uint32]registrypb.PortProtocol{9090: 2})},
	{map[string]string{"endpoint.aether.io/ports": "53=udp"}, false, ports(8080, map[uint32]registrypb.PortProtocol{8080: 1, 53: 3})},
	{map[string]string{"endpoint.aether.io/ports": "53=udp, 53=tcp"}, false, func(e *registrypb.ServiceEndpoint) {
		ports(8080, map[uint32]registrypb.PortProtocol{8080: 1, 53: 2})(e)
		e.UdpPorts = []uint32{53} // our own field (docs/deviations.md)
	}},
	{map[string]string{"endpoint.aether.io/weight": "7"}, false, func(e *registrypb.ServiceEndpoint) { e.Weight = 7 }},
	{map[string]string{"endpoint.aether.io/weight": "0"}, false, func(e *registrypb.ServiceEndpoint) { e.Weight, e.Weightless = 0, true }},
	{map[string]string{"metadata.endpoint.aether.io/version": "v2"}, false, func(e *registrypb.ServiceEndpoint) { e.Metadata = map[string]string{"version": "v2"} }},
	{map[string]string{"aether.io/spiffe-id": "spiffe://td/other"}, false, func(e *registrypb.ServiceEndpoint) { e.SpiffeId = "spiffe://td/other" }},
	{map[string]string{"endpoint.aether.io/health-check-mode": "eds"}, false, func(e *registrypb.ServiceEndpoint) { e.HealthCheckMode = registrypb.ServiceEndpoint_EDS }},
	{map[string]string{"endpoint.aether.io/health-check-mode": "active"}, false, func(e *registrypb.ServiceEndpoint) { e.HealthCheckMode = registrypb.ServiceEndpoint_ACTIVE }},
	{map[string]string{"endpoint.aether.io/protocol": "htpp"}, true, nil},
	{map[string]string{"endpoint.aether.io/port": "99999"}, true, nil},
	{map[string]string{"endpoint.aether.io/ports": "8080=grpc"}, true, nil},
}

// says is the annotation by which derive knows what the others mean.
const says = "test/says"

// derive is contract 9.6: the row of a pod, without what its node adds; nil: none.
func derive(p *corev1.Pod) *registrypb.ServiceEndpoint {
	if p.Labels["aether.io/managed"] != "true" || p.Status.Phase != corev1.PodRunning || p.Status.PodIP == "" {
		return nil
	}
	var s saying
	for i := range sayings {
		if p.Annotations[says] == fmt.Sprint(i) {
			s = sayings[i]
		}
	}
	if s.bad {
		return nil
	}
	e := &registrypb.ServiceEndpoint{
		Ip: p.Status.PodIP, ClusterName: "c1", Port: 8080, Weight: 1024, Ports: []uint32{8080}, PortProtocols: map[uint32]registrypb.PortProtocol{8080: 1},
		KubernetesMetadata: &registrypb.ServiceEndpoint_KubernetesMetadata{Namespace: p.Namespace, PodName: p.Name, NodeName: p.Spec.NodeName},
	}
	for _, c := range p.Status.Conditions {
		if c.Type != corev1.PodReady {
			continue
		}
		if e.Health = registrypb.ServiceEndpoint_UNHEALTHY; c.Status == corev1.ConditionTrue {
			e.Health = registrypb.ServiceEndpoint_HEALTHY
		}
	}
	if p.DeletionTimestamp != nil { // at once (docs/deviations.md)
		e.Health = registrypb.ServiceEndpoint_DRAINING
	}
	s.row(e)
	return e
}

// at adds what a row has of its node, if that is there.
func at(e *registrypb.ServiceEndpoint, n *corev1.Node) {
	if n == nil {
		return
	}
	if r, z := n.Labels["topology.kubernetes.io/region"], n.Labels["topology.kubernetes.io/zone"]; r+z != "" {
		e.Locality = &registrypb.ServiceEndpoint_Locality{Region: r, Zone: z}
	}
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			e.KubernetesMetadata.NodeIp = a.Address
		}
	}
}

// reference are the rows of all pods, by service and address. Of pods of a service at one
// address the youngest stands that is not being deleted (decision 026), and of those of
// one second the first by name.
func reference(pods []corev1.Pod, nodes []corev1.Node) map[string]*registrypb.ServiceEndpoint {
	slices.SortFunc(pods, func(a, b corev1.Pod) int {
		deleted := func(p *corev1.Pod) int {
			if p.DeletionTimestamp != nil {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(deleted(&a), deleted(&b)), b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	out := map[string]*registrypb.ServiceEndpoint{}
	for i := range pods {
		e := derive(&pods[i])
		if e == nil {
			continue
		}
		for j := range nodes {
			if nodes[j].Name == pods[i].Spec.NodeName {
				at(e, &nodes[j])
			}
		}
		key := serviceOf(&pods[i]) + " " + e.Ip
		if out[key] == nil {
			out[key] = e
		}
	}
	return out
}

func serviceOf(p *corev1.Pod) string { return p.Namespace + "/" + p.Spec.ServiceAccountName }

// line is a row as a node holds it; place is what it has of where its node is.
func line(service string, e *registrypb.ServiceEndpoint) (text, place string) {
	var ports []string
	for _, p := range e.GetPorts() {
		s := fmt.Sprintf("%d=%d", p, e.GetPortProtocols()[p])
		if slices.Contains(e.GetUdpPorts(), p) {
			s += "+udp"
		}
		ports = append(ports, s)
	}
	ns, account, _ := strings.Cut(service, "/")
	k := e.GetKubernetesMetadata()
	return fmt.Sprintf("%s %s pod=%s node=%s cluster=%s port=%d ports=%v weight=%d health=%d id=%s metadata=%v", service, e.GetIp(), k.GetPodName(), k.GetNodeName(),
			e.GetClusterName(), e.GetPort(), ports, e.GetWeight(), e.GetHealth(), cmp.Or(e.GetSpiffeId(), "spiffe://td/ns/"+ns+"/sa/"+account), e.GetMetadata()),
		e.GetLocality().GetRegion() + "/" + e.GetLocality().GetZone()
}

// holds is the same of what a node holds.
func holds(e *model.Endpoint) (text, place string) {
	var ports []string
	for _, p := range e.Ports {
		s := fmt.Sprintf("%d=%d", p.Number, p.Class)
		if p.AlsoUDP {
			s += "+udp"
		}
		ports = append(ports, s)
	}
	return fmt.Sprintf("%s %s pod=%s node=%s cluster=%s port=%d ports=%v weight=%d health=%d id=%s metadata=%v", e.Service, e.IP, e.Pod, e.Node,
		e.Cluster, e.DefaultPort, ports, e.Weight, e.Health, e.SPIFFEID, e.Metadata), e.Region + "/" + e.Zone
}

// converging is the test's world. Its goroutine alone changes anything.
type converging struct {
	t        *testing.T
	rnd      *rand.Rand
	api      *apiserver.Server
	client   kubernetes.Interface
	spaces   []string
	pods     map[string]bool // namespace/name: there
	machines map[string]bool

	everRow   map[string]bool            // lines that pods were, as the API server gave them
	everPlace map[string]map[string]bool // by node: where it was
	nodeOf    map[string]string          // by line: the pod's node

	registrars []*replica
	nodes      []*member

	changes, cuts, shuts, hops, replaced, forgot, last int
}

// replica is a registrar, behind networks that can fail.
type replica struct {
	w     *converging
	toAPI *etcdtest.Gate
	addr  string // of now
	stop  func()
	shut  bool
}

// member is a node of the mesh: a registrar's client and what it was told.
type member struct {
	w    *converging
	name string
	only map[model.ServiceName]bool // services that it needs; nil: all
	to   []*etcdtest.Gate           // of each registrar
	stop func()

	mu      sync.Mutex
	rows    map[model.ServiceName][]model.Endpoint
	held    map[[2]string]bool // text and place, ever
	changed chan struct{}      // closed and replaced at each news
}

func newConverging(t *testing.T, rnd *rand.Rand) *converging {
	api := apiserver.Start(t)
	w := &converging{
		t: t, rnd: rnd, api: api, client: api.Client(t), pods: map[string]bool{}, machines: map[string]bool{},
		everRow: map[string]bool{}, everPlace: map[string]map[string]bool{}, nodeOf: map[string]string{},
	}
	only := map[model.ServiceName]bool{}
	for range 2 {
		ns := api.Namespace(t)
		w.spaces = append(w.spaces, ns)
		for _, a := range accounts {
			api.Account(t, ns, a)
		}
		only[model.ServiceName{Namespace: ns, Name: accounts[0]}] = true
	}
	for range 2 {
		r := &replica{w: w, toAPI: etcdtest.NewGate(t, api.Addr())}
		r.start()
		w.registrars = append(w.registrars, r)
	}
	for _, n := range []*member{{name: "whole"}, {name: "scoped", only: only}} {
		n.w, n.held, n.changed = w, map[[2]string]bool{}, make(chan struct{})
		for _, r := range w.registrars {
			n.to = append(n.to, etcdtest.NewGate(t, r.addr))
		}
		w.nodes = append(w.nodes, n)
		n.start()
	}
	t.Cleanup(func() {
		for _, n := range w.nodes {
			n.stop()
		}
		for _, r := range w.registrars {
			r.stop()
		}
	})
	return w
}

var accounts = []string{"cart", "web"}

// start runs the registrar, at an address of its own.
func (r *replica) start() {
	t := r.w.t
	t.Helper()
	config := r.w.api.Config()
	config.TLSClientConfig.ServerName, _, _ = net.SplitHostPort(r.w.api.Addr())
	config.Host = "https://" + r.toAPI.Addr()
	store, err := New(Config{Client: apiserver.NewClient(t, config), Cluster: "c1"})
	if err != nil {
		t.Fatal(err)
	}
	store.retry = wait.Backoff{Duration: 50 * time.Millisecond, Factor: 1, Jitter: 1, Steps: 1 << 30}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = ln.Addr().String()
	s := server.New(server.Config{Store: store, Derived: true, Cluster: "c1", Drain: -1, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, ln) }()
	r.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("a registrar ended with %v", err)
		}
	}
}

// has are all rows that the registrar serves, whole.
func (r *replica) has(ctx context.Context) (map[string]*registrypb.ServiceEndpoint, error) {
	conn, err := grpc.NewClient(r.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	out := map[string]*registrypb.ServiceEndpoint{}
	for _, class := range []registrypb.Service_Protocol{registrypb.Service_PROTOCOL_HTTP, registrypb.Service_PROTOCOL_TCP, registrypb.Service_PROTOCOL_UDP} {
		all, err := registrypb.NewRegistrarServiceClient(conn).ListAllEndpoints(ctx, &registrypb.ListAllEndpointsRequest{Protocol: class}, grpc.WaitForReady(true))
		if err != nil {
			return nil, err
		}
		for service, list := range all.GetServices() {
			for _, e := range list.GetEndpoints() {
				key := service + " " + e.GetIp()
				if out[key] != nil && !proto.Equal(out[key], e) {
					return nil, fmt.Errorf("the rows of %s differ from class to class", key)
				}
				out[key] = e
			}
		}
	}
	return out, nil
}

// start begins a life of the node, which knows nothing.
func (n *member) start() {
	t := n.w.t
	t.Helper()
	cfg := client.Config{Cluster: "c1", Node: n.name, TrustDomain: "td", Identities: []string{"/other"}, Whole: n.only == nil, Sink: n}
	for _, g := range n.to {
		cfg.Targets = append(cfg.Targets, g.Addr())
	}
	n.rows = map[model.ServiceName][]model.Endpoint{}
	c, err := client.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if n.only != nil {
		c.SetDeclared(slices.Collect(maps.Keys(n.only)))
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	n.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// Replace, Apply and Report are input.Sink.
func (n *member) Replace(b input.Batch) {
	n.mu.Lock()
	clear(n.rows)
	n.mu.Unlock()
	n.Apply(b)
}

func (n *member) Apply(b input.Batch) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for s, rows := range b.Endpoints {
		if n.only != nil && !n.only[s] && len(rows) > 0 {
			n.w.t.Errorf("%s holds rows of %s, which it does not need", n.name, s)
		}
		n.rows[s] = rows
		for i := range rows {
			text, place := holds(&rows[i])
			n.held[[2]string{text, place}] = true
		}
	}
	for k, p := range b.Problems {
		if len(p) > 0 {
			n.w.t.Errorf("%s: %s: %s", n.name, k, p[0].Reason)
		}
	}
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *member) Report(input.Status) {}

// lines are what the node holds.
func (n *member) lines() ([]string, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for _, rows := range n.rows {
		for i := range rows {
			text, place := holds(&rows[i])
			out = append(out, text+" at "+place)
		}
	}
	slices.Sort(out)
	return out, n.changed
}

// held is all that nodes ever held.
func (w *converging) held() map[[2]string]bool {
	out := map[[2]string]bool{}
	for _, n := range w.nodes {
		n.mu.Lock()
		maps.Copy(out, n.held)
		n.mu.Unlock()
	}
	return out
}

func (w *converging) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// was notes a version of a pod that the API server has, or had.
func (w *converging) was(p *corev1.Pod) {
	w.changes++
	if e := derive(p); e != nil {
		text, _ := line(serviceOf(p), e)
		w.everRow[text] = true
		w.nodeOf[text] = p.Spec.NodeName
	}
}

// stood notes where a node was.
func (w *converging) stood(n *corev1.Node) {
	w.changes++
	e := &registrypb.ServiceEndpoint{KubernetesMetadata: &registrypb.ServiceEndpoint_KubernetesMetadata{}}
	at(e, n)
	if w.everPlace[n.Name] == nil {
		w.everPlace[n.Name] = map[string]bool{}
	}
	w.everPlace[n.Name][e.GetLocality().GetRegion()+"/"+e.GetLocality().GetZone()] = true
}

func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

func annotations(r *rand.Rand) map[string]string {
	i := r.IntN(len(sayings))
	out := map[string]string{says: fmt.Sprint(i)}
	maps.Copy(out, sayings[i].annotations)
	return out
}

// change changes one pod or node.
func (w *converging) change() {
	ctx, r := w.t.Context(), w.rnd
	if r.IntN(8) == 0 {
		w.machine()
		return
	}
	ns, name := pick(r, w.spaces...), fmt.Sprintf("p%d", r.IntN(16))
	api, key := w.client.CoreV1().Pods(ns), ns+"/"+name
	get := func() *corev1.Pod {
		p, err := api.Get(ctx, name, metav1.GetOptions{})
		w.must(err)
		return p
	}
	if !w.pods[key] {
		p, err := api.Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"aether.io/managed": pick(r, "true", "true", "true", "true", "true", "false")}, Annotations: annotations(r)},
			Spec: corev1.PodSpec{
				NodeName: fmt.Sprintf("n%d", r.IntN(4)), ServiceAccountName: pick(r, accounts...), Containers: []corev1.Container{{Name: "app", Image: "app:1"}},
			},
		}, metav1.CreateOptions{})
		w.must(err)
		w.was(p)
		w.pods[key] = true
		if r.IntN(4) > 0 {
			w.status(p)
		}
		return
	}
	remove := func(grace int64) {
		marked := get() // which the API server does first, also where it then takes it out at once
		marked.DeletionTimestamp = &metav1.Time{Time: time.Now()}
		w.was(marked)
		w.must(api.Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &grace}))
		switch p, err := api.Get(ctx, name, metav1.GetOptions{}); {
		case apierrors.IsNotFound(err):
			delete(w.pods, key)
		default:
			w.must(err)
			if p.DeletionTimestamp == nil {
				w.t.Fatalf("pod %s was deleted, and is not", key)
			}
		}
	}
	switch r.IntN(16) {
	default:
		w.status(get())
	case 4, 5, 6, 7:
		p := get()
		p.Annotations = annotations(r)
		p, err := api.Update(ctx, p, metav1.UpdateOptions{})
		w.must(err)
		w.was(p)
	case 8:
		p := get()
		p.Labels["aether.io/managed"] = pick(r, "true", "true", "false", "True")
		p, err := api.Update(ctx, p, metav1.UpdateOptions{})
		w.must(err)
		w.was(p)
	case 9:
		remove(30)
	case 10, 11:
		remove(0) // and perhaps another one of its name next
	}
}

// status is what a kubelet says of a pod, whatever that is. There are fewer addresses than pods.
func (w *converging) status(p *corev1.Pod) {
	r := w.rnd
	ip := fmt.Sprintf("10.0.0.%d", 1+r.IntN(8))
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning}
	if r.IntN(8) == 0 {
		p.Status.Phase = pick(r, corev1.PodPending, corev1.PodSucceeded)
	}
	if r.IntN(8) > 0 {
		p.Status.PodIP, p.Status.PodIPs = ip, []corev1.PodIP{{IP: ip}}
	}
	if r.IntN(8) > 0 {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: pick(r, corev1.ConditionTrue, corev1.ConditionTrue, corev1.ConditionFalse, corev1.ConditionUnknown)}}
	}
	p, err := w.client.CoreV1().Pods(p.Namespace).UpdateStatus(w.t.Context(), p, metav1.UpdateOptions{})
	w.must(err)
	w.was(p)
}

// machine changes a node.
func (w *converging) machine() {
	ctx, r, api := w.t.Context(), w.rnd, w.client.CoreV1().Nodes()
	name := fmt.Sprintf("n%d", r.IntN(4))
	labels := map[string]string{}
	if r.IntN(4) > 0 {
		labels["topology.kubernetes.io/region"], labels["topology.kubernetes.io/zone"] = pick(r, "r1", "r2"), pick(r, "a", "b")
	}
	var n *corev1.Node
	var err error
	switch {
	case !w.machines[name]:
		n, err = api.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
		w.machines[name] = true
	case r.IntN(3) == 0:
		w.must(api.Delete(ctx, name, metav1.DeleteOptions{}))
		delete(w.machines, name)
		w.changes++
		return
	default:
		if n, err = api.Get(ctx, name, metav1.GetOptions{}); err == nil {
			n.Labels = labels
			n, err = api.Update(ctx, n, metav1.UpdateOptions{})
		}
	}
	w.must(err)
	w.stood(n)
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: name}, {Type: corev1.NodeInternalIP, Address: fmt.Sprintf("10.9.0.%d", 1+r.IntN(4))}}
	n, err = api.UpdateStatus(ctx, n, metav1.UpdateOptions{})
	w.must(err)
	w.stood(n)
}

// round is some changes among interruptions, and then the comparison. A node that lost
// its registrar waits longer each time (contract 9.7); each round is its next life.
func (w *converging) round(forget bool) {
	r := w.rnd
	for _, n := range w.nodes {
		n.stop()
		n.start()
	}
	const steps = 150
	replace, hop, gone := r.IntN(steps), r.IntN(steps), -1
	if forget {
		gone = r.IntN(steps - 1)
	}
	for i := range steps {
		w.change()
		a := pick(r, w.registrars...)
		switch d := r.IntN(60); {
		case d < 3:
			a.toAPI.Cut()
			w.cuts++
		case d < 5 && !a.shut:
			a.toAPI.Shut()
			a.shut = true
			w.shuts++
		case d < 10:
			a.open()
		}
		if i == replace {
			a.stop()
			a.start()
			for _, n := range w.nodes {
				n.to[slices.Index(w.registrars, a)].Lead(a.addr)
			}
			w.replaced++
		}
		if i == hop {
			pick(r, pick(r, w.nodes...).to...).Cut()
			w.hops++
		}
		if i == gone { // of what one registrar hears later, nobody can tell it any more
			if !a.shut {
				a.toAPI.Shut()
				a.shut = true
			}
			for range steps / 4 {
				w.change()
			}
			w.api.Compact(w.t)
			w.api.Kill(w.t)
			w.api.Restart(w.t)
			w.forgot++
		}
	}
	for _, a := range w.registrars {
		a.open()
	}
	w.compare()
}

func (r *replica) open() {
	r.shut = false
	r.w.must(r.toAPI.Open())
}

// compare waits until everybody has what is, and holds what they had against what was.
func (w *converging) compare() {
	w.t.Helper()
	pods, err := w.client.CoreV1().Pods("").List(w.t.Context(), metav1.ListOptions{})
	w.must(err)
	machines, err := w.client.CoreV1().Nodes().List(w.t.Context(), metav1.ListOptions{})
	w.must(err)
	want := reference(pods.Items, machines.Items)
	w.last = len(want)

	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	for _, n := range w.nodes {
		var lines []string
		for key, e := range want {
			service, _, _ := strings.Cut(key, " ")
			ns, name, _ := strings.Cut(service, "/")
			if n.only == nil || n.only[model.ServiceName{Namespace: ns, Name: name}] {
				text, place := line(service, e)
				lines = append(lines, text+" at "+place)
			}
		}
		slices.Sort(lines)
		for {
			have, changed := n.lines()
			if slices.Equal(have, lines) {
				break
			}
			select {
			case <-changed:
			case <-ctx.Done():
				w.t.Fatalf("the node %s holds\n%s\nthe API server's objects make\n%s", n.name, strings.Join(have, "\n"), strings.Join(lines, "\n"))
			}
		}
	}
	for i, r := range w.registrars { // one of which may have no node
		var have map[string]*registrypb.ServiceEndpoint
		if err := rig.Until(ctx, func(ctx context.Context) (err error) {
			if have, err = r.has(ctx); err == nil && !maps.EqualFunc(have, want, func(a, b *registrypb.ServiceEndpoint) bool { return proto.Equal(a, b) }) {
				err = errors.New("its rows are others")
			}
			return err
		}); err != nil {
			w.t.Fatalf("registrar %d: %v: it has\n%v\nthe API server's objects make\n%v", i, err, have, want)
		}
	}
	for held := range w.held() {
		text, place := held[0], held[1]
		if !w.everRow[text] {
			w.t.Errorf("a row that never was one: %s", text)
		} else if place != "/" && !w.everPlace[w.nodeOf[text]][place] { // a node that is not known leaves it out
			w.t.Errorf("a row at %s, where its node never was: %s", place, text)
		}
	}
}
