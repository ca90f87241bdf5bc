package services

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/e2e/cluster/apiserver"
	"aether/e2e/rig"
)

const (
	// patience bounds each wait: nothing here takes longer than the API server's restart
	// and the longest wait of its client.
	patience = 90 * time.Second

	interval  = 100 * time.Millisecond
	pruneTime = 500 * time.Millisecond
	leaseTime = 3 * time.Second
)

// snapshot is a Source that a test fills.
type snapshot struct {
	t       *testing.T
	mu      sync.Mutex
	rows    map[model.ServiceName][]*registrypb.ServiceEndpoint
	synced  chan struct{}
	changed map[chan struct{}]bool
	reads   int
}

func newSnapshot(t *testing.T) *snapshot {
	return &snapshot{
		t: t, rows: map[model.ServiceName][]*registrypb.ServiceEndpoint{}, synced: make(chan struct{}), changed: map[chan struct{}]bool{},
	}
}

func (s *snapshot) Synced() <-chan struct{} { return s.synced }

func (s *snapshot) Changed() (<-chan struct{}, func()) {
	ch := make(chan struct{}, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed[ch] = true
	return ch, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.changed, ch)
	}
}

func (s *snapshot) Services() iter.Seq2[model.ServiceName, []*registrypb.ServiceEndpoint] {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reads++
	return maps.All(maps.Clone(s.rows))
}

// set gives a service rows, one for each text of ports; none takes them away.
func (s *snapshot) set(ns, name string, rows ...string) {
	s.t.Helper()
	var all []*registrypb.ServiceEndpoint
	for i, r := range rows {
		all = append(all, row(s.t, fmt.Sprintf("10.0.0.%d", i+1), r))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := model.ServiceName{Namespace: ns, Name: name}
	if delete(s.rows, key); len(all) > 0 {
		s.rows[key] = all
	}
	s.tellLocked()
}

// drop takes the rows of several services away at once.
func (s *snapshot) drop(ns string, names ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range names {
		delete(s.rows, model.ServiceName{Namespace: ns, Name: n})
	}
	s.tellLocked()
}

func (s *snapshot) tellLocked() {
	for ch := range s.changed {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// world is a namespace in which Services are generated.
type world struct {
	*testing.T
	client kubernetes.Interface
	ns     string
	rows   *snapshot
}

func newWorld(t *testing.T, s *apiserver.Server) *world {
	w := &world{t, s.Client(t), s.Namespace(t), newSnapshot(t)}
	t.Cleanup(func() { // another test's generator counts what there is
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		all, err := w.client.CoreV1().Services("").List(ctx, metav1.ListOptions{LabelSelector: Label + "=true"})
		if err != nil {
			t.Error(err)
			return
		}
		for _, o := range all.Items {
			if err := w.client.CoreV1().Services(o.Namespace).Delete(ctx, o.Name, metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		}
	})
	return w
}

// generate runs a Generator until the test ends, or stop is called.
func (w *world) generate(client kubernetes.Interface, edit ...func(*Config)) (g *Generator, stop func()) {
	w.Helper()
	c := Config{
		Client: client, Rows: w.rows, Identity: fmt.Sprintf("replica-%d", replicas.Add(1)), Namespace: w.ns,
		Interval: interval, PruneAfter: pruneTime, MassPruneAfter: time.Hour, LeaseTime: leaseTime,
	}
	for _, e := range edit {
		e(&c)
	}
	g, err := New(c)
	if err != nil {
		w.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := g.Run(ctx); !errors.Is(err, context.Canceled) {
			w.Errorf("Run: %v", err)
		}
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-ended
	})
	w.Cleanup(stop)
	return g, stop
}

var replicas atomic.Int32

// sync says that the snapshot is whole.
func (w *world) sync() { close(w.rows.synced) }

func (w *world) until(cond func(context.Context) error) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), patience)
	defer cancel()
	if err := rig.Until(ctx, cond); err != nil {
		w.Fatal(err)
	}
}

func (w *world) get(ctx context.Context, name string) (*corev1.Service, error) {
	return w.client.CoreV1().Services(w.ns).Get(ctx, name, metav1.GetOptions{})
}

// shows prints what of a Service is generated: its ports but the mesh's own two, which are counted.
func shows(o *corev1.Service) string {
	var out []string
	mesh := 0
	for _, p := range portsOf(o) {
		if strings.HasPrefix(p.name, "mesh") {
			mesh++
		} else {
			out = append(out, p.String())
		}
	}
	if mesh != 2 {
		out = append(out, fmt.Sprintf("%d of the mesh's own", mesh))
	}
	if o.Spec.Type != corev1.ServiceTypeClusterIP || len(o.Spec.Selector) > 0 || o.Spec.ClusterIP == "" || o.Spec.ClusterIP == corev1.ClusterIPNone {
		out = append(out, fmt.Sprintf("type %s, address %q, selector %v", o.Spec.Type, o.Spec.ClusterIP, o.Spec.Selector))
	}
	if o.Labels[Label] != "true" || o.Annotations[Annotation] != o.Name || len(o.Annotations) != 1 {
		out = append(out, fmt.Sprintf("labels %v, annotations %v", o.Labels, o.Annotations))
	}
	return strings.Join(out, " ")
}

// is waits until a Service is as want says.
func (w *world) is(name, want string) (found *corev1.Service) {
	w.Helper()
	w.until(func(ctx context.Context) error {
		o, err := w.get(ctx, name)
		if err != nil {
			return err
		}
		found = o
		if got := shows(o); got != want {
			return fmt.Errorf("Service %s is\n     %s\nwant %s", name, got, want)
		}
		return nil
	})
	return found
}

// isGone waits until there is no Service.
func (w *world) isGone(name string) {
	w.Helper()
	w.until(func(ctx context.Context) error {
		all, err := w.client.CoreV1().Services(w.ns).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		if err == nil && len(all.Items) > 0 {
			err = fmt.Errorf("Service %s is still there", name)
		}
		return err
	})
}

// event waits for an Event about a Service, and gives its message.
func (w *world) event(service, reason string) (message string) {
	w.Helper()
	w.until(func(ctx context.Context) error {
		all, err := w.client.CoreV1().Events(w.ns).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + service})
		if err != nil {
			return err
		}
		for _, e := range all.Items {
			if e.Reason == reason && e.Type == corev1.EventTypeWarning && e.Source.Component == Manager {
				message = e.Message
				return nil
			}
		}
		return fmt.Errorf("no Event %s about %s among %d", reason, service, len(all.Items))
	})
	return message
}

func (w *world) create(o *corev1.Service) *corev1.Service {
	w.Helper()
	made, err := w.client.CoreV1().Services(w.ns).Create(w.Context(), o, metav1.CreateOptions{FieldManager: "tester"})
	if err != nil {
		w.Fatal(err)
	}
	return made
}

func (w *world) patch(name, merge string) {
	w.Helper()
	if _, err := w.client.CoreV1().Services(w.ns).Patch(w.Context(), name, types.StrategicMergePatchType, []byte(merge), metav1.PatchOptions{FieldManager: "tester"}); err != nil {
		w.Fatal(err)
	}
}

const web = "p8080-tcp:8080/TCP>8080,http"

// TestAPIServer generates Services in a real API server (contract 9.8).
func TestAPIServer(t *testing.T) {
	server := apiserver.Start(t)

	t.Run("made, changed, and again", func(t *testing.T) {
		w := newWorld(t, server)
		g, _ := w.generate(w.client)
		w.rows.set(w.ns, "cart", "8080=http 53=tcp+udp")
		w.sync()
		o := w.is("cart", "p53-tcp:53/TCP>53,tcp p53-udp:53/UDP>53 "+web)
		if !slices.ContainsFunc(o.ManagedFields, func(m metav1.ManagedFieldsEntry) bool {
			return m.Manager == Manager && m.Operation == metav1.ManagedFieldsOperationApply
		}) {
			// the note comes right after the Service itself
			w.until(func(ctx context.Context) error {
				o, err := w.get(ctx, "cart")
				if err != nil {
					return err
				}
				for _, m := range o.ManagedFields {
					if m.Manager != Manager || m.Operation != metav1.ManagedFieldsOperationApply {
						return fmt.Errorf("fields are managed by %s (%s)", m.Manager, m.Operation)
					}
				}
				return nil
			})
		}
		w.rows.set(w.ns, "cart", "8080=http", "8080=http 9090=tcp 18081=http")
		w.is("cart", web+" p9090-tcp:9090/TCP>9090,tcp")
		w.rows.set(w.ns, "cart", "8080=tcp")
		w.is("cart", "p8080-tcp:8080/TCP>8080,tcp")
		if n := g.repaired.Value(); n != 0 {
			t.Errorf("%d ports had to be taken away by hand, not by an apply", n)
		}
		again, err := w.get(t.Context(), "cart")
		if err != nil {
			t.Fatal(err)
		}
		if again.UID != o.UID || again.Spec.ClusterIP != o.Spec.ClusterIP {
			t.Error("it is another Service now")
		}
	})

	t.Run("a user's Service is left alone", func(t *testing.T) {
		w := newWorld(t, server)
		mine := w.create(&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: "cart"},
			Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "cart"}, Ports: []corev1.ServicePort{{Name: "web", Port: 80}}},
		})
		w.generate(w.client)
		w.rows.set(w.ns, "cart", "8080=http")
		w.rows.set(w.ns, "other", "8080=http")
		w.sync()
		w.is("other", web)
		if m := w.event("cart", "NotGenerated"); !strings.Contains(m, Label) {
			t.Errorf("the Event says %q", m)
		}
		w.rows.set(w.ns, "cart", "8080=http 9090=http")
		w.rows.set(w.ns, "other", "8080=http 9090=http")
		w.is("other", web+" p9090-tcp:9090/TCP>9090,http")
		now, err := w.get(t.Context(), "cart")
		if err != nil {
			t.Fatal(err)
		}
		if now.ResourceVersion != mine.ResourceVersion {
			t.Errorf("it has been written to:\n%v\n%v", mine, now)
		}
		events, err := w.client.CoreV1().Events(w.ns).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=cart"})
		if err != nil || len(events.Items) != 1 {
			t.Errorf("%d Events (%v), want one a while", len(events.Items), err)
		}
		// Without rows it stays as well; and when the user gives the name up, it is used.
		w.rows.set(w.ns, "cart")
		w.rows.set(w.ns, "other", "8080=http")
		w.is("other", web)
		w.rows.set(w.ns, "cart", "8080=http")
		if err := w.client.CoreV1().Services(w.ns).Delete(t.Context(), "cart", metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &mine.UID}}); err != nil {
			t.Fatal(err)
		}
		w.is("cart", web)
	})

	t.Run("what others change is put right", func(t *testing.T) {
		w := newWorld(t, server)
		w.generate(w.client)
		w.rows.set(w.ns, "cart", "8080=http")
		w.sync()
		w.is("cart", web)
		w.patch("cart", `{"spec":{"selector":{"app":"x"},"ports":[{"port":8080,"protocol":"TCP","targetPort":9999},{"name":"more","port":81}]}}`)
		w.is("cart", web)
		if m := w.event("cart", "FieldsTakenBack"); !strings.Contains(m, "tester") || !strings.Contains(m, "targetPort") {
			t.Errorf("the Event says %q, and not whose field was taken back", m)
		}
	})

	t.Run("a Service of an older release", func(t *testing.T) {
		w := newWorld(t, server)
		w.create(&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{
				Name: "cart", Labels: map[string]string{Label: "true"},
				Annotations: map[string]string{Annotation: "cart", "aether.io/port": "8080", "aether.io/app-protocol": "http"},
			},
			Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}, {Name: "https", Port: 443}, {Name: "mesh", Port: 18081}}},
		})
		w.generate(w.client)
		w.rows.set(w.ns, "cart", "8080=http")
		w.sync()
		w.is("cart", web)
	})

	t.Run("pruned when its rows have gone, and not before", func(t *testing.T) {
		w := newWorld(t, server)
		for _, n := range []string{"a", "b", "c", "d", "e", "f"} {
			w.rows.set(w.ns, n, "8080=http")
		}
		g, stop := w.generate(w.client)
		for _, n := range []string{"a", "b", "c"} {
			w.create(&corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Name: n, Labels: map[string]string{Label: "true"}}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
			})
		}
		w.until(func(context.Context) error { // it leads, and does nothing while it knows nothing
			if !g.Leads() {
				return errors.New("it does not lead")
			}
			return nil
		})
		w.sync()
		for _, n := range []string{"a", "b", "c", "d", "e", "f"} {
			w.is(n, web)
		}
		if n := g.deleted.Value(); n != 0 {
			t.Errorf("%d deleted before the snapshot was whole", n)
		}
		w.rows.set(w.ns, "a")
		w.isGone("a")
		// Many at once are kept; a service that comes back has what it had.
		w.rows.drop(w.ns, "b", "c", "d")
		w.until(func(context.Context) error {
			if n := g.held.Load(); n != 3 {
				return fmt.Errorf("%d held back, want 3", n)
			}
			return nil
		})
		w.rows.set(w.ns, "b", "8080=http")
		w.rows.set(w.ns, "c", "8080=http")
		w.isGone("d")
		w.is("b", web)
		// All at once are a failure of the store.
		w.rows.drop(w.ns, "b", "c", "e", "f")
		w.until(func(context.Context) error {
			if n := g.held.Load(); n != 4 {
				return fmt.Errorf("%d held back, want 4", n)
			}
			return nil
		})
		stop()
		for _, n := range []string{"b", "c", "e", "f"} {
			w.is(n, web)
		}
	})

	t.Run("a namespace that is not in this cluster", func(t *testing.T) {
		w := newWorld(t, server)
		g, _ := w.generate(w.client)
		w.rows.set("elsewhere", "cart", "8080=http")
		w.rows.set(w.ns, "cart", "8080=http")
		w.sync()
		w.is("cart", web)
		w.until(func(context.Context) error {
			if g.failed.Value() == 0 {
				return errors.New("no failure is counted")
			}
			return nil
		})
	})

	t.Run("a leader that dies", func(t *testing.T) {
		w := newWorld(t, server)
		var dead atomic.Bool // its calls go nowhere any more
		config := server.Config()
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return mortal{&dead, next} })
		first, _ := w.generate(apiserver.NewClient(t, config))
		w.rows.set(w.ns, "cart", "8080=http")
		w.sync()
		w.is("cart", web)
		second, stop := w.generate(w.client)
		if !first.Leads() || second.Leads() {
			t.Errorf("the first leads: %t, the second: %t", first.Leads(), second.Leads())
		}
		dead.Store(true)
		w.rows.set(w.ns, "cart", "8080=http 9090=tcp")
		w.is("cart", web+" p9090-tcp:9090/TCP>9090,tcp")
		w.until(func(context.Context) error {
			if first.Leads() || !second.Leads() {
				return fmt.Errorf("the first leads: %t, the second: %t", first.Leads(), second.Leads())
			}
			return nil
		})
		// One that stops in order gives the Lease up at once.
		dead.Store(false)
		stop()
		w.rows.set(w.ns, "cart", "8080=http")
		w.is("cart", web)
		if !first.Leads() {
			t.Error("the first does not lead")
		}
	})

	t.Run("with the role's rights alone", func(t *testing.T) {
		w := newWorld(t, server)
		var config *rest.Config
		config, role := server.WithRoles(t, w.ns, "rbac.yaml")
		w.create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "mine"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}})
		_, stop := w.generate(apiserver.NewClient(t, config))
		w.rows.set(w.ns, "mine", "8080=http")
		w.rows.set(w.ns, "cart", "8080=http")
		w.rows.set(w.ns, "gone", "8080=http")
		w.sync()
		w.event("mine", "NotGenerated")
		w.is("gone", web)
		w.rows.set(w.ns, "gone")
		w.isGone("gone")
		w.rows.set(w.ns, "cart", "8080=tcp")
		w.is("cart", "p8080-tcp:8080/TCP>8080,tcp")
		stop() // which writes the Lease once more
		role.Check(t)
	})

	// Last: it takes the server away from whoever shares it.
	t.Run("an API server that goes and comes", func(t *testing.T) {
		w := newWorld(t, server)
		w.generate(w.client)
		w.rows.set(w.ns, "cart", "8080=http")
		w.rows.set(w.ns, "gone", "8080=http")
		w.sync()
		w.is("cart", web)
		w.is("gone", web)
		server.Kill(t)
		w.rows.set(w.ns, "cart", "8080=http 9090=tcp")
		w.rows.set(w.ns, "new", "8080=http")
		w.rows.set(w.ns, "gone")
		server.Restart(t)
		w.is("cart", web+" p9090-tcp:9090/TCP>9090,tcp")
		w.is("new", web)
		w.isGone("gone")
	})
}

// mortal fails all calls once its process is dead.
type mortal struct {
	dead *atomic.Bool
	next http.RoundTripper
}

func (m mortal) RoundTrip(q *http.Request) (*http.Response, error) {
	if m.dead.Load() {
		return nil, errors.New("dead")
	}
	return m.next.RoundTrip(q)
}
