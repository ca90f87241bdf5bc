package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"aether/controlplane/input"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/tproxy/netns"
)

// world is everything around a node's pods, on the clock of a synctest bubble.
type world struct {
	t     *testing.T
	cfg   Config
	pods  *Pods
	start time.Time
	stop  func() // ends Run

	mu        sync.Mutex
	rows      map[string]*registrypb.ServiceEndpoint // "shop/cart PROTOCOL_HTTP 10.1.0.1"
	said      []string                               // what the registry was told, with the time since start
	failing   func(call string) error                // of the registry; nil: none fails
	hangs     bool                                   // calls end with their context
	derived   bool                                   // the registry makes its rows itself
	by        registry.Statement                     // of the last row that was taken out
	lists     int
	answers   map[string]error // of applications, by container; not there: it answers
	probed    []string         // container and time
	uncert    map[string]bool  // containers without a certificate
	gone      map[string]bool  // paths of namespaces
	work      map[string]model.Workload
	problems  map[string][]model.Problem
	applied   []string // what the sink was told
	api       map[string]ClusterPod
	apiErr    error
	askErr    error          // of the API server itself
	elsewhere bool           // to it, the others are another node's
	own       map[string]Pod // what it has besides api, by namespace/name
	evicted   []string
	evictErr  func(ClusterPod) error
	attempts  []string // evictions asked for
	logs      *strings.Builder
}

// inWorld runs f in a bubble, with pods that run.
func inWorld(t *testing.T, prepare func(*world), f func(*world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{
			t: t, start: time.Now(), rows: map[string]*registrypb.ServiceEndpoint{}, answers: map[string]error{}, uncert: map[string]bool{},
			gone: map[string]bool{}, work: map[string]model.Workload{}, problems: map[string][]model.Problem{}, logs: &strings.Builder{},
		}
		w.cfg = Config{
			Dir: t.TempDir(), Place: Place{Cluster: "east", Region: "eu", Zone: "eu-1", Node: "n1", NodeIP: netip.MustParseAddr("192.0.2.1")}, TrustDomain: "mesh.test",
			Registry: w, Sink: w, Probe: w.probe, Certificate: func(c string) bool { w.mu.Lock(); defer w.mu.Unlock(); return !w.uncert[c] },
			NetNS: func(path string) error {
				w.mu.Lock()
				defer w.mu.Unlock()
				if w.gone[path] {
					return netns.ErrGone
				}
				return nil
			},
			RedirectAllDefault: true,
			Log:                slog.New(slog.NewTextHandler(&lockedWriter{mu: &w.mu, w: w.logs}, nil)),
		}
		if prepare != nil {
			prepare(w)
		}
		w.run()
		defer func() { w.stop() }()
		f(w)
	})
}

type lockedWriter struct {
	mu *sync.Mutex
	w  *strings.Builder
}

func (l *lockedWriter) Write(b []byte) (int, error) {
	// The world's lock is never held while something is logged.
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

// run starts the pods, as a process does.
func (w *world) run() {
	w.t.Helper()
	var err error
	if w.pods, err = New(w.cfg); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.pods.Run(ctx) }()
	w.stop = func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	}
	synctest.Wait()
}

// restart is another process in the place of this one.
func (w *world) restart() {
	w.t.Helper()
	w.stop()
	w.mu.Lock()
	clear(w.work)
	clear(w.problems)
	w.mu.Unlock()
	w.run()
}

// after lets time pass.
func (w *world) after(d time.Duration) {
	w.set(func() {}) // what the test has read, it has read before anything else happens
	<-time.After(d)  // of the bubble's clock
	synctest.Wait()
}

func (w *world) call(ctx context.Context, what string) error {
	w.mu.Lock()
	failing, hangs := w.failing, w.hangs
	w.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	if failing != nil {
		return failing(what)
	}
	return ctx.Err()
}

func (w *world) say(format string, args ...any) {
	w.said = append(w.said, fmt.Sprintf("%s ", time.Since(w.start))+fmt.Sprintf(format, args...))
}

// Register is Registry.
func (w *world) Register(ctx context.Context, service model.ServiceName, class registrypb.Service_Protocol, e *registrypb.ServiceEndpoint) error {
	if err := w.call(ctx, "register "+e.GetHealth().String()); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, why := registry.RowFault(e); why != "" {
		w.t.Errorf("an invalid row is written: %s", why)
	}
	if w.derived {
		return nil
	}
	w.rows[fmt.Sprintf("%s %s %s", service, class, e.GetIp())] = e
	w.say("register %s %s %s %s", service, strings.TrimPrefix(class.String(), "PROTOCOL_"), e.GetIp(), e.GetHealth())
	return nil
}

// Unregister is Registry.
func (w *world) Unregister(ctx context.Context, service model.ServiceName, ip string, by registry.Statement) error {
	if err := w.call(ctx, "unregister"); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.rows, func(k string, _ *registrypb.ServiceEndpoint) bool {
		return strings.HasPrefix(k, service.String()+" ") && strings.HasSuffix(k, " "+ip)
	})
	w.by = by
	w.say("unregister %s %s", service, ip)
	return nil
}

// OfNode is Registry.
func (w *world) OfNode(ctx context.Context, node string) ([]registry.Row, error) {
	if err := w.call(ctx, "list"); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lists++
	if w.derived {
		return nil, registry.ErrDerived
	}
	var out []registry.Row
	for k, e := range w.rows {
		f := strings.Fields(k)
		service, err := registry.ParseService(f[0])
		if err != nil {
			return nil, err
		}
		out = append(out, registry.Row{Service: service, Protocol: registrypb.Service_Protocol(registrypb.Service_Protocol_value[f[1]]), IP: f[2], Endpoint: e})
	}
	return out, nil
}

func (w *world) probe(ctx context.Context, t Target) error {
	w.mu.Lock()
	w.probed = append(w.probed, fmt.Sprintf("%s %s", t.Container, time.Since(w.start)))
	err := w.answers[t.Container]
	w.mu.Unlock()
	if errors.Is(err, errSilent) {
		<-ctx.Done()
		return ctx.Err()
	}
	return err
}

var (
	errRefused = errors.New("connection refused")
	errSilent  = errors.New("it takes the connection and says nothing")
)

// Replace, Apply and Report are input.Sink.
func (w *world) Replace(b input.Batch) {
	w.mu.Lock()
	clear(w.work)
	clear(w.problems)
	w.mu.Unlock()
	w.Apply(b)
}

func (w *world) Apply(b input.Batch) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c, list := range b.Workloads {
		if len(list) == 0 {
			delete(w.work, c)
			w.applied = append(w.applied, "no "+c)
			continue
		}
		w.work[c] = list[0]
		w.applied = append(w.applied, c)
	}
	for k, list := range b.Problems {
		if len(list) == 0 {
			delete(w.problems, k)
			continue
		}
		w.problems[k] = list
	}
}

func (w *world) Report(input.Status) {}

// Pods, Pod and Evict are Cluster.
func (w *world) Pods(context.Context) ([]ClusterPod, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Collect(maps.Values(w.api)), w.apiErr
}

func (w *world) Pod(_ context.Context, namespace, name string) (Pod, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.askErr != nil {
		return Pod{}, w.askErr
	}
	if p, ok := w.own[namespace+"/"+name]; ok {
		return p, nil
	}
	for _, p := range w.api {
		if p.Namespace == namespace && p.Name == name {
			return Pod{Namespace: namespace, Name: name, UID: p.UID, Labels: p.Labels, Terminating: p.Leaving}, nil
		}
	}
	p := Pod{}
	if w.elsewhere {
		p.UID = "uid-" + strings.TrimPrefix(name, "cart-")
	}
	return p, fmt.Errorf("%s/%s: %w", namespace, name, ErrNoPod)
}

func (w *world) Evict(_ context.Context, p ClusterPod, reason, _ string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.attempts = append(w.attempts, p.name())
	if w.evictErr != nil {
		if err := w.evictErr(p); err != nil {
			return err
		}
	}
	w.evicted = append(w.evicted, reason+" "+p.name())
	return nil
}

// cart is a pod of shop/cart; annotations are pairs.
func cart(n int, annotations ...string) Pod {
	p := Pod{
		Namespace: "shop", Name: fmt.Sprintf("cart-%d", n), UID: fmt.Sprintf("uid-%d", n), Account: "cart", ContainerID: fmt.Sprintf("c%d", n),
		NetNS: fmt.Sprintf("/run/aether/netns/c%d", n), IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(n >> 8), byte(n)})},
		Labels: map[string]string{"aether.io/managed": "true"}, Annotations: map[string]string{},
	}
	for i := 0; i < len(annotations); i += 2 {
		p.Annotations[annotations[i]] = annotations[i+1]
	}
	return p
}

// ofAPI is p as the API server has it.
func ofAPI(p Pod) ClusterPod {
	return ClusterPod{Namespace: p.Namespace, Name: p.Name, UID: p.UID, Labels: p.Labels, Addresses: len(p.IPs), Live: true}
}

func (w *world) add(p Pod) {
	w.t.Helper()
	if r, err := w.pods.Add(w.t.Context(), p); err != nil || r != Success {
		w.t.Fatalf("add %s: %v, %v", p.Name, r, err)
	}
}

// healthy adds p and lets it be promoted.
func (w *world) healthy(p Pod) {
	w.t.Helper()
	w.add(p)
	w.after(probeInterval)
	w.is(p.ContainerID, "HEALTHY")
}

// is checks the health that every row of a container's address has; "": it has none.
func (w *world) is(container, health string) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for k, e := range w.rows {
		if e.GetContainerMetadata().GetContainerId() != container {
			continue
		}
		if n++; e.GetHealth().String() != health {
			w.t.Errorf("%s: %s says %s, want %q", time.Since(w.start), k, e.GetHealth(), health)
		}
	}
	if (n == 0) != (health == "") {
		w.t.Errorf("%s: container %s has %d rows, want health %q", time.Since(w.start), container, n, health)
	}
}

// was returns what the registry was told since it was asked last, without the times.
func (w *world) was() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for _, s := range w.said {
		_, s, _ = strings.Cut(s, " ")
		out = append(out, s)
	}
	w.said = nil
	return strings.Join(out, "; ")
}

func (w *world) set(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}
