package kube_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"aether/controlplane/kube"
	"aether/e2e/rig"
)

// podWorld is a node's pods on a real API server, made as a kubelet and its users would.
type podWorld struct {
	*server
	t      *testing.T
	client kubernetes.Interface
	ns     string
	node   string
	pods   *kube.Pods

	mu    sync.Mutex
	heard []string // what leaves, in order
}

// follow follows the pods of a node of its own until the test ends.
func (s *server) follow(t *testing.T, c *rest.Config) *podWorld {
	t.Helper()
	w := &podWorld{server: s, t: t, client: s.Client(t), ns: s.Namespace(t)}
	w.node = "node-of-" + w.ns
	s.Account(t, w.ns, "cart")
	var err error
	if w.pods, err = kube.NewPods(kube.PodsConfig{REST: c, Node: w.node, Leaving: w.hear}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.pods.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("following the pods does not end")
		}
	})
	return w
}

func (w *podWorld) hear(p kube.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	said := fmt.Sprintf("%s leaving preStop=%s grace=%s", p.Name, p.PreStop, p.Grace)
	if p.Gone {
		said = p.Name + " gone"
	}
	if !p.Leaving || p.UID == "" || p.Live {
		said += fmt.Sprintf(" %+v", p)
	}
	if n := len(w.heard); n == 0 || w.heard[n-1] != said { // once for each change of a pod that leaves
		w.heard = append(w.heard, said)
	}
}

// told waits until just this has been heard.
func (w *podWorld) told(want ...string) {
	w.t.Helper()
	w.until(w.t, "what leaves", func(context.Context) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !slices.Equal(w.heard, want) {
			return fmt.Errorf("heard %q, want %q", w.heard, want)
		}
		return nil
	})
}

// list waits until the pods are as want says: "cart-1 managed 1 live".
func (w *podWorld) list(want ...string) {
	w.t.Helper()
	w.until(w.t, "the list", func(ctx context.Context) error {
		all, err := w.pods.List(ctx)
		if err != nil {
			return err
		}
		var have []string
		for _, p := range all {
			s := p.Name
			if p.Labels["aether.io/managed"] == "true" {
				s += " managed"
			}
			s += fmt.Sprintf(" %d", p.Addresses)
			if p.Live {
				s += " live"
			}
			if p.Leaving {
				s += " leaving"
			}
			have = append(have, s)
		}
		slices.Sort(have)
		if !slices.Equal(have, want) {
			return fmt.Errorf("%q, want %q", have, want)
		}
		return nil
	})
}

func (w *podWorld) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// pod makes a managed pod that runs, and is ready, but for what change says.
func (w *podWorld) pod(name string, change func(*corev1.Pod)) *corev1.Pod {
	w.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"aether.io/managed": "true", "app": "cart"}},
		Spec:       corev1.PodSpec{NodeName: w.node, ServiceAccountName: "cart", Containers: []corev1.Container{{Name: "app", Image: "app:1"}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.1.1", PodIPs: []corev1.PodIP{{IP: "10.0.1.1"}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	if change != nil {
		change(p)
	}
	status := p.Status
	p, err := w.client.CoreV1().Pods(w.ns).Create(w.t.Context(), p, metav1.CreateOptions{})
	w.must(err)
	p.Status = status
	p, err = w.client.CoreV1().Pods(w.ns).UpdateStatus(w.t.Context(), p, metav1.UpdateOptions{})
	w.must(err)
	return p
}

func (w *podWorld) remove(name string, grace int64) {
	w.t.Helper()
	w.must(w.client.CoreV1().Pods(w.ns).Delete(w.t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &grace}))
}

// event is what the API server has of the pod's one Event: "3 AetherCNIAddLost Warning text".
func (w *podWorld) event(pod string) string {
	w.t.Helper()
	all, err := w.client.CoreV1().Events(w.ns).List(w.t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod + ",involvedObject.kind=Pod"})
	w.must(err)
	if len(all.Items) != 1 {
		return fmt.Sprintf("%d events", len(all.Items))
	}
	e := all.Items[0]
	if e.InvolvedObject.UID == "" || e.Source.Host != w.node || e.LastTimestamp.Before(&e.FirstTimestamp) {
		w.t.Errorf("%+v", e)
	}
	return fmt.Sprintf("%d %s %s %s", e.Count, e.Reason, e.Type, e.Message)
}

// budget lets so many pods of the app be evicted, as the controller manager would say.
func (w *podWorld) budget(allowed int32) {
	w.t.Helper()
	c := w.client.PolicyV1().PodDisruptionBudgets(w.ns)
	b, err := c.Get(w.t.Context(), "cart", metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		one := intstr.FromInt32(1)
		b, err = c.Create(w.t.Context(), &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "cart"},
			Spec: policyv1.PodDisruptionBudgetSpec{MinAvailable: &one, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "cart"}}},
		}, metav1.CreateOptions{})
	}
	w.must(err)
	b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: b.Generation, DisruptionsAllowed: allowed, CurrentHealthy: 1, DesiredHealthy: 1, ExpectedPods: 1}
	_, err = c.UpdateStatus(w.t.Context(), b, metav1.UpdateOptions{})
	w.must(err)
}

// nobody is an account without a role.
func nobody(t *testing.T, s *server) *rest.Config {
	t.Helper()
	ns := s.Namespace(t)
	s.Account(t, ns, "nobody")
	return s.As(t, ns, "nobody")
}

// budgetUnseen is a budget that the controller manager has not looked at since it changed: the API
// server says when to ask again.
func (w *podWorld) budgetUnseen() {
	w.t.Helper()
	c := w.client.PolicyV1().PodDisruptionBudgets(w.ns)
	b, err := c.Get(w.t.Context(), "cart", metav1.GetOptions{})
	w.must(err)
	two := intstr.FromInt32(2)
	b.Spec.MinAvailable = &two
	_, err = c.Update(w.t.Context(), b, metav1.UpdateOptions{})
	w.must(err)
}

func kubePod(p *corev1.Pod) kube.Pod {
	return kube.Pod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID)}
}

// TestPods follows pods of one node on a real API server, with the role of rbac-pods.yaml
// (contract 13.1, 13.3, 13.4).
func TestPods(t *testing.T) {
	s := start(t)
	config, role := s.WithRoles(t, s.Namespace(t), "rbac-pods.yaml")

	t.Run("which there are", func(t *testing.T) {
		w := s.follow(t, config)
		w.list()
		w.pod("runs", nil)
		w.pod("elsewhere", func(p *corev1.Pod) { p.Spec.NodeName = "another" })
		w.pod("host", func(p *corev1.Pod) { p.Spec.HostNetwork = true })
		w.pod("done", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })
		w.pod("failed", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed })
		w.pod("starts", func(p *corev1.Pod) { p.Status = corev1.PodStatus{Phase: corev1.PodPending} })
		w.pod("other", func(p *corev1.Pod) { p.Labels = map[string]string{"aether.io/managed": "True"} })
		w.pod("static", func(p *corev1.Pod) {
			p.Annotations, p.Spec.ServiceAccountName = map[string]string{corev1.MirrorPodAnnotationKey: "x"}, ""
		})
		w.list("done managed 1", "failed managed 1", "host managed 1", "other 1 live", "runs managed 1 live", "starts managed 0", "static managed 1")
		w.told()
		// The static pod is its kubelet's, by a UID of that one's; its object is made anew, and no container goes with it.
		p, err := w.pods.Get(t.Context(), w.ns, "static")
		w.must(err)
		if p.UID != "x" {
			t.Errorf("UID %q, want the file's", p.UID)
		}
		w.remove("static", 0)
		w.list("done managed 1", "failed managed 1", "host managed 1", "other 1 live", "runs managed 1 live", "starts managed 0")
		w.told()
	})

	t.Run("how they leave", func(t *testing.T) {
		w := s.follow(t, config)
		sleep := func(seconds int64) *corev1.Lifecycle {
			return &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: seconds}}}
		}
		w.pod("slow", func(p *corev1.Pod) {
			grace := int64(40)
			p.Spec.TerminationGracePeriodSeconds = &grace
			p.Spec.Containers = []corev1.Container{
				{Name: "a", Image: "a:1", Lifecycle: sleep(3)}, {Name: "b", Image: "b:1", Lifecycle: sleep(9)},
				{Name: "c", Image: "c:1", Lifecycle: &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"sleep", "30"}}}}},
			}
		})
		w.pod("forced", nil)
		w.list("forced managed 1 live", "slow managed 1 live")
		w.must(w.client.CoreV1().Pods(w.ns).Delete(t.Context(), "slow", metav1.DeleteOptions{}))
		want := []string{"slow leaving preStop=9s grace=40s"}
		w.told(want...)
		w.list("forced managed 1 live", "slow managed 1 leaving")
		w.remove("slow", 25) // somebody is in a hurry
		want = append(want, "slow leaving preStop=9s grace=25s")
		w.told(want...)
		w.remove("forced", 0)
		want = append(want, "forced leaving preStop=0s grace=0s", "forced gone")
		w.told(want...)
		w.remove("slow", 0)
		w.told(append(want, "slow leaving preStop=9s grace=0s", "slow gone")...)
		w.list()
	})

	t.Run("what one is, as it is now", func(t *testing.T) {
		w := s.follow(t, config)
		o := w.pod("cart-1", func(p *corev1.Pod) { p.Annotations = map[string]string{"endpoint.aether.io/port": "9090"} })
		p, err := w.pods.Get(t.Context(), w.ns, "cart-1")
		w.must(err)
		if p.UID != string(o.UID) || p.Account != "cart" || p.Annotations["endpoint.aether.io/port"] != "9090" || !maps.Equal(p.Labels, o.Labels) || p.Leaving || !p.Live || !p.Bare || p.Volumes == nil {
			t.Errorf("%+v", p)
		}
		w.remove("cart-1", 30)
		if p, err = w.pods.Get(t.Context(), w.ns, "cart-1"); err != nil || !p.Leaving || p.Live || p.Grace != 30*time.Second {
			t.Errorf("%+v, %v", p, err)
		}
		w.pod("far", func(p *corev1.Pod) { p.Spec.NodeName = "another" })
		for _, name := range []string{"none", "far"} {
			if p, err := w.pods.Get(t.Context(), w.ns, name); !errors.Is(err, kube.ErrNoPod) || (p.UID != "") != (name == "far") {
				t.Errorf("%s: UID %q, %v", name, p.UID, err)
			}
		}
		if _, err := w.pods.Get(t.Context(), w.ns, "../cart"); err == nil || errors.Is(err, kube.ErrNoPod) {
			t.Errorf("a name that is none: %v", err)
		}
	})

	t.Run("eviction", func(t *testing.T) {
		w := s.follow(t, config)
		const reason = "AetherCNIAddLost"
		evict := func(p kube.Pod) error { return w.pods.Evict(t.Context(), p, reason, "it is lost") }
		o := w.pod("cart-1", nil)
		w.list("cart-1 managed 1 live")
		w.budget(0)
		for n := 1; n <= 2; n++ {
			if err := evict(kubePod(o)); !apierrors.IsTooManyRequests(err) {
				t.Fatalf("against the budget: %v", err)
			}
			if e := w.event("cart-1"); !strings.HasPrefix(e, fmt.Sprintf("%d %s Warning it is lost; that is refused for now", n, reason)) || !strings.Contains(e, "disruption budget") {
				t.Error(e)
			}
		}
		// What the API server has forgotten is written anew.
		w.must(w.client.CoreV1().Events(w.ns).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}))
		if err := evict(kubePod(o)); !apierrors.IsTooManyRequests(err) || !strings.HasPrefix(w.event("cart-1"), "3 ") {
			t.Errorf("%v, %s", err, w.event("cart-1"))
		}
		// A server that says when to come again is not waited for.
		w.budgetUnseen()
		var asked atomic.Int32
		counted := rest.CopyConfig(config)
		counted.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(q *http.Request) (*http.Response, error) {
				if strings.HasSuffix(q.URL.Path, "/eviction") {
					asked.Add(1)
				}
				return next.RoundTrip(q)
			})
		})
		impatient, err := kube.NewPods(kube.PodsConfig{REST: counted, Node: w.node})
		w.must(err)
		err = impatient.Evict(t.Context(), kubePod(o), reason, "it is lost")
		if seconds, ok := apierrors.SuggestsClientDelay(err); !apierrors.IsTooManyRequests(err) || !ok || seconds == 0 || asked.Load() != 1 {
			t.Errorf("asked %d times, told to wait %d s: %v", asked.Load(), seconds, err)
		}
		w.budget(0)

		// Another process of this one's node knows nothing of it, and writes no second Event.
		other, err := kube.NewPods(kube.PodsConfig{REST: config, Node: w.node})
		w.must(err)
		if err := other.Evict(t.Context(), kubePod(o), reason, "it is lost"); !apierrors.IsTooManyRequests(err) || !strings.Contains(w.event("cart-1"), "refused") {
			t.Errorf("%v, %s", err, w.event("cart-1"))
		}

		// Of another pod that has its name by now nothing is asked, nor of one that leaves.
		w.budget(1)
		old := kubePod(o)
		old.UID = "another"
		if err := evict(old); err == nil || !strings.Contains(err.Error(), "another pod has its name") {
			t.Error(err)
		}
		w.must(evict(kubePod(o)))
		if e := w.event("cart-1"); !strings.HasSuffix(e, " "+reason+" Warning it is lost") {
			t.Error(e)
		}
		w.told("cart-1 leaving preStop=0s grace=30s")
		if err := evict(kubePod(o)); err == nil || !strings.Contains(err.Error(), "leaves already") {
			t.Error(err)
		}
		if e := w.event("cart-1"); strings.Contains(e, "refused") {
			t.Errorf("it is said of a pod that was left alone: %s", e)
		}
		w.remove("cart-1", 0)
		if err := evict(kubePod(o)); !errors.Is(err, kube.ErrNoPod) {
			t.Error(err)
		}

		// The longest name that a pod may have.
		long := strings.Repeat("a", 234) + "-" + strings.Repeat("b", 18)
		o = w.pod(long, nil)
		w.budget(0)
		if err := w.pods.Evict(t.Context(), kubePod(o), reason, strings.Repeat("é", 2000)); !apierrors.IsTooManyRequests(err) {
			t.Error(err)
		}
		if e, want := w.event(long), "1 "+reason+" Warning "+strings.Repeat("é", 512); e != want {
			t.Errorf("%s, want %s", e, want)
		}
	})

	t.Run("the role is what is used", func(t *testing.T) { role.Check(t) })

	t.Run("without the role", func(t *testing.T) {
		w := s.follow(t, nobody(t, s))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if _, err := w.pods.List(ctx); err == nil || !strings.Contains(err.Error(), "rbac-pods.yaml") {
			t.Errorf("%v, wanted what mends it", err)
		}
		if _, err := w.pods.Get(ctx, w.ns, "x"); err == nil || !strings.Contains(err.Error(), "rbac-pods.yaml") {
			t.Errorf("%v, wanted what mends it", err)
		}
	})

	// Last: it takes the server away from whoever shares it.
	t.Run("an API server that goes, and has forgotten when it comes back", func(t *testing.T) {
		w := s.follow(t, config)
		stays := w.pod("stays", nil)
		w.pod("goes", nil)
		w.list("goes managed 1 live", "stays managed 1 live")
		s.Kill(t)
		w.until(t, "it is known to be away", func(ctx context.Context) error {
			if _, err := w.pods.List(ctx); err == nil {
				return errors.New("the list is still given")
			}
			return nil
		})
		w.told() // that it is away says of no pod that it is gone
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := w.pods.Evict(ctx, kubePod(stays), "x", "x"); err == nil || errors.Is(err, kube.ErrNoPod) {
			t.Errorf("an eviction while it is away: %v", err)
		}
		if r, err := s.Etcd().Client().Delete(t.Context(), "/registry/pods/"+w.ns+"/goes"); err != nil || r.Deleted != 1 {
			t.Fatal(r, err)
		}
		s.Compact(t)
		s.Restart(t)
		w.list("stays managed 1 live")
		w.told("goes gone")
	})
}

// TestPodsBound: of more pods than are kept nothing is said to be all there are.
func TestPodsBound(t *testing.T) {
	const many = 4096
	item := func(i int) string {
		return fmt.Sprintf(`{"metadata":{"namespace":"shop","name":"p%d","uid":"u%d","resourceVersion":"1"},"spec":{"nodeName":"n1"},"status":{"phase":"Running"}}`, i, i)
	}
	items := make([]string, many)
	for i := range items {
		items[i] = item(i)
	}
	f := startFaulty(t, map[string]answer{podsPath: {200, append(slices.Clone(items), item(many))}})
	pods, err := kube.NewPods(kube.PodsConfig{REST: &rest.Config{Host: f.URL}, Node: "n1", Leaving: func(p kube.Pod) { t.Errorf("%s leaves", p.Name) }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- pods.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	in, end := context.WithTimeout(ctx, patience)
	defer end()
	if list, err := pods.List(in); err == nil || !strings.Contains(err.Error(), "more than 4096 pods") {
		t.Errorf("%d pods, %v", len(list), err)
	}
	if err := rig.Until(in, func(ctx context.Context) error {
		f.set(podsPath, answer{200, items}) // which ends the watch, if that has begun by now
		list, err := pods.List(ctx)
		if err == nil && len(list) != many {
			err = fmt.Errorf("%d pods", len(list))
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

const podsPath = "/api/v1/pods"
