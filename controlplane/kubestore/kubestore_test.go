package kubestore

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/e2e/cluster/apiserver"
)

// patience bounds each wait: nothing here takes longer than the API server's restart
// and the longest wait of its client.
const patience = 90 * time.Second

// seen is what a watcher has been told, put together.
type seen struct {
	mu      sync.Mutex
	rows    map[string]*registrypb.ServiceEndpoint // by service, class and address
	wholes  int
	err     error
	errs    int
	faults  []string
	changed chan struct{} // closed and replaced at each news
}

func key(r registry.Row) string {
	return fmt.Sprintf("%s %s %s", r.Service, strings.TrimPrefix(r.Protocol.String(), "PROTOCOL_"), r.IP)
}

func (s *seen) on(c registry.Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.Whole {
		s.wholes++
		clear(s.rows)
	} else if s.wholes == 0 {
		s.faults = append(s.faults, "a change before the whole")
	}
	if c.Version == "" || c.Version == "0" {
		s.faults = append(s.faults, "a change without a version")
	}
	for _, r := range c.Rows {
		if r.Region != "local" || r.Cluster != "c1" {
			s.faults = append(s.faults, fmt.Sprintf("%s is in partition %s/%s", key(r), r.Region, r.Cluster))
		}
		if r.Endpoint == nil {
			delete(s.rows, key(r))
		} else {
			s.rows[key(r)] = r.Endpoint
		}
	}
	s.tick()
}

func (s *seen) report(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err = err; err != nil {
		s.errs++
	}
	s.tick()
}

func (s *seen) tick() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// await waits until cond, which is called with s.mu held, says nothing is missing.
func (s *seen) await(t *testing.T, cond func() (missing string)) {
	t.Helper()
	late := time.After(patience)
	for {
		s.mu.Lock()
		missing, changed := cond(), s.changed
		s.mu.Unlock()
		if missing == "" {
			return
		}
		select {
		case <-changed:
		case <-late:
			t.Fatalf("%s; rows are %v, error %v", missing, slices.Sorted(maps.Keys(s.rows)), s.err)
		}
	}
}

// row waits until a row is as want says: "HEALTHY zone-a 10.9.0.1", or "" for none.
func (s *seen) row(t *testing.T, key, want string) *registrypb.ServiceEndpoint {
	t.Helper()
	var e *registrypb.ServiceEndpoint
	s.await(t, func() string {
		e = s.rows[key]
		got := ""
		if e != nil {
			got = strings.TrimSpace(fmt.Sprintf("%s %s %s", e.GetHealth(), e.GetLocality().GetZone(), e.GetKubernetesMetadata().GetNodeIp()))
		}
		if got == want {
			return ""
		}
		return fmt.Sprintf("row %s is %q, want %q", key, got, want)
	})
	return e
}

// watching follows a Store until the test ends.
func watching(t *testing.T, client kubernetes.Interface, log *slog.Logger) *seen {
	t.Helper()
	store, err := New(Config{Client: client, Cluster: "c1", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	s := &seen{rows: map[string]*registrypb.ServiceEndpoint{}, changed: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = store.Watch(ctx, s.on, s.report) // it ends with ctx, and only so
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		for _, f := range s.faults {
			t.Error(f)
		}
	})
	s.await(t, func() string {
		if s.wholes == 0 {
			return "no whole"
		}
		return ""
	})
	return s
}

// world makes pods and nodes as a kubelet would.
type world struct {
	t      *testing.T
	client kubernetes.Interface
	ns     string
}

func newWorld(t *testing.T, s *apiserver.Server) *world {
	w := &world{t, s.Client(t), s.Namespace(t)}
	s.Account(t, w.ns, "cart")
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) pod(name, node string, annotations map[string]string) {
	w.t.Helper()
	_, err := w.client.CoreV1().Pods(w.ns).Create(w.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{ManagedLabel: "true"}, Annotations: annotations},
		Spec:       corev1.PodSpec{NodeName: node, ServiceAccountName: "cart", Containers: []corev1.Container{{Name: "app", Image: "app:1"}}},
	}, metav1.CreateOptions{})
	w.must(err)
}

func (w *world) status(name, ip string, phase corev1.PodPhase, ready corev1.ConditionStatus) {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods(w.ns).Get(w.t.Context(), name, metav1.GetOptions{})
	w.must(err)
	p.Status = corev1.PodStatus{
		Phase: phase, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}},
	}
	_, err = w.client.CoreV1().Pods(w.ns).UpdateStatus(w.t.Context(), p, metav1.UpdateOptions{})
	w.must(err)
}

func (w *world) run(name, node, ip string, annotations map[string]string) {
	w.t.Helper()
	w.pod(name, node, annotations)
	w.status(name, ip, corev1.PodRunning, corev1.ConditionTrue)
}

func (w *world) annotate(name, key, value string) {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods(w.ns).Get(w.t.Context(), name, metav1.GetOptions{})
	w.must(err)
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	p.Annotations[key] = value
	_, err = w.client.CoreV1().Pods(w.ns).Update(w.t.Context(), p, metav1.UpdateOptions{})
	w.must(err)
}

func (w *world) remove(name string, grace int64) {
	w.t.Helper()
	w.must(w.client.CoreV1().Pods(w.ns).Delete(w.t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &grace}))
}

func (w *world) node(name, zone, ip string) {
	w.t.Helper()
	n, err := w.client.CoreV1().Nodes().Create(w.t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyRegion: "r1", corev1.LabelTopologyZone: zone}},
	}, metav1.CreateOptions{})
	w.must(err)
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: name}, {Type: corev1.NodeInternalIP, Address: ip}}
	_, err = w.client.CoreV1().Nodes().UpdateStatus(w.t.Context(), n, metav1.UpdateOptions{})
	w.must(err)
}

func (w *world) key(class, ip string) string { return fmt.Sprintf("%s/cart %s %s", w.ns, class, ip) }

// TestAPIServer follows pods of a real API server through their lives.
func TestAPIServer(t *testing.T) {
	server := apiserver.Start(t)

	t.Run("a pod's life", func(t *testing.T) {
		w := newWorld(t, server)
		w.node("life", "zone-a", "10.9.0.1")
		s := watching(t, w.client, nil)
		w.pod("cart-1", "life", nil)
		w.status("cart-1", "10.0.1.1", corev1.PodRunning, corev1.ConditionFalse)
		http := w.key("HTTP", "10.0.1.1")
		s.row(t, http, "UNHEALTHY zone-a 10.9.0.1")
		w.status("cart-1", "10.0.1.1", corev1.PodRunning, corev1.ConditionTrue)
		e := s.row(t, http, "HEALTHY zone-a 10.9.0.1")
		if e.GetLocality().GetRegion() != "r1" || e.GetKubernetesMetadata().GetPodName() != "cart-1" || e.GetKubernetesMetadata().GetNodeName() != "life" {
			t.Errorf("row %v", e)
		}
		// Under each class, with all of them (contract 9.4), and back.
		w.annotate("cart-1", "endpoint.aether.io/ports", "5432=tcp")
		tcp := s.row(t, w.key("TCP", "10.0.1.1"), "HEALTHY zone-a 10.9.0.1")
		if e := s.row(t, http, "HEALTHY zone-a 10.9.0.1"); len(e.GetPorts()) != 2 || len(tcp.GetPorts()) != 2 {
			t.Errorf("rows of the two classes: %v, %v", e, tcp)
		}
		w.annotate("cart-1", "endpoint.aether.io/ports", "")
		s.row(t, w.key("TCP", "10.0.1.1"), "")
		// Draining from the moment of its deletion, ready or not.
		w.remove("cart-1", 30)
		s.row(t, http, "DRAINING zone-a 10.9.0.1")
		w.status("cart-1", "10.0.1.1", corev1.PodRunning, corev1.ConditionFalse)
		w.remove("cart-1", 0)
		s.row(t, http, "")
	})

	t.Run("a node that is known late", func(t *testing.T) {
		w := newWorld(t, server)
		s := watching(t, w.client, nil)
		w.run("cart-1", "late", "10.0.2.1", nil)
		s.row(t, w.key("HTTP", "10.0.2.1"), "HEALTHY")
		w.node("late", "zone-b", "10.9.0.2")
		s.row(t, w.key("HTTP", "10.0.2.1"), "HEALTHY zone-b 10.9.0.2")
		w.remove("cart-1", 0)
		s.row(t, w.key("HTTP", "10.0.2.1"), "")
	})

	t.Run("a bad annotation among good pods", func(t *testing.T) {
		w := newWorld(t, server)
		var mu sync.Mutex
		var log bytes.Buffer
		s := watching(t, w.client, slog.New(slog.NewTextHandler(writer{&mu, &log}, nil)))
		w.run("bad", "late", "10.0.3.1", map[string]string{"endpoint.aether.io/protocol": "htpp"})
		w.status("bad", "10.0.3.1", corev1.PodRunning, corev1.ConditionFalse) // more news of it is no more log
		w.run("good", "late", "10.0.3.2", nil)
		s.row(t, w.key("HTTP", "10.0.3.2"), "HEALTHY zone-b 10.9.0.2")
		s.row(t, w.key("HTTP", "10.0.3.1"), "")
		mu.Lock()
		said := log.String()
		mu.Unlock()
		if strings.Count(said, w.ns+"/bad") != 2 || strings.Count(said, "level=WARN") != 1 || !strings.Contains(said, "write http or tcp") {
			t.Errorf("the log says\n%s\nwant one warning that names the pod and how to mend it", said)
		}
		w.annotate("bad", "endpoint.aether.io/protocol", "tcp")
		s.row(t, w.key("TCP", "10.0.3.1"), "UNHEALTHY zone-b 10.9.0.2")
	})

	t.Run("two pods at their node's address", func(t *testing.T) {
		w := newWorld(t, server)
		s := watching(t, w.client, nil)
		w.run("a", "late", "10.0.4.1", nil)
		k := w.key("HTTP", "10.0.4.1")
		s.row(t, k, "HEALTHY zone-b 10.9.0.2")
		w.run("b", "late", "10.0.4.1", nil)
		w.remove("a", 30) // whichever of them was shown
		s.await(t, func() string {
			if e := s.rows[k]; e.GetKubernetesMetadata().GetPodName() != "b" || e.GetHealth() != registrypb.ServiceEndpoint_HEALTHY {
				return fmt.Sprintf("row %v, want pod b's", e)
			}
			return ""
		})
		w.remove("b", 0)
		s.row(t, k, "DRAINING zone-b 10.9.0.2")
		w.remove("a", 0)
		s.row(t, k, "")
	})

	t.Run("with the role's rights alone", func(t *testing.T) {
		w := newWorld(t, server)
		config, role := server.WithRoles(t, w.ns, "rbac.yaml")
		s := watching(t, apiserver.NewClient(t, config), nil)
		w.run("cart-1", "late", "10.0.5.1", nil)
		s.row(t, w.key("HTTP", "10.0.5.1"), "HEALTHY zone-b 10.9.0.2")
		role.Check(t)
	})

	// Last: it takes the server away from whoever shares it.
	t.Run("an API server that goes, and has forgotten when it comes back", func(t *testing.T) {
		w := newWorld(t, server)
		s := watching(t, w.client, nil)
		w.run("stays", "late", "10.0.6.1", nil)
		w.run("goes", "late", "10.0.6.2", nil)
		s.row(t, w.key("HTTP", "10.0.6.2"), "HEALTHY zone-b 10.9.0.2")
		server.Kill(t)
		s.await(t, func() string {
			if s.err == nil {
				return "no report that it is away"
			}
			return ""
		})
		s.mu.Lock()
		kept := len(s.rows)
		s.mu.Unlock()
		if kept == 0 {
			t.Error("the rows went with the API server")
		}
		server.Restart(t)
		w.remove("goes", 0)
		w.run("comes", "late", "10.0.6.3", nil)
		server.Compact(t)
		server.Kill(t)
		server.Restart(t)
		s.row(t, w.key("HTTP", "10.0.6.2"), "")
		s.row(t, w.key("HTTP", "10.0.6.3"), "HEALTHY zone-b 10.9.0.2")
		s.row(t, w.key("HTTP", "10.0.6.1"), "HEALTHY zone-b 10.9.0.2")
		s.await(t, func() string {
			if s.err != nil {
				return "it is reported to be away still"
			}
			return ""
		})
	})
}

type writer struct {
	mu *sync.Mutex
	b  *bytes.Buffer
}

func (w writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}
