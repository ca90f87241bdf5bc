package life

import (
	"context"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeclient "k8s.io/client-go/kubernetes"

	"aether/controlplane/input"
	"aether/controlplane/kubestore"
	"aether/controlplane/local"
	registrar "aether/controlplane/registrar/client"
	"aether/controlplane/registrar/register"
	"aether/controlplane/registrar/server"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/e2e/cluster/apiserver"
	"aether/e2e/rig"
)

// kubernetes is a real API server whose pods a registrar makes its rows of.
type kubernetes struct {
	api       kubeclient.Interface
	registrar string // address
}

// newKubernetes has the accounts of services, and of web, in the namespace shop.
func newKubernetes(t *testing.T, services ...string) *kubernetes {
	t.Helper()
	s := apiserver.Start(t)
	k := &kubernetes{api: s.Client(t)}
	if _, err := k.api.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, a := range append([]string{"web"}, services...) {
		s.Account(t, "shop", a)
	}
	store, err := kubestore.New(kubestore.Config{Client: s.Client(t), Cluster: "east"})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	k.registrar = ln.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- server.New(server.Config{Store: store, Derived: true, Cluster: "east", Drain: -1}).Run(ctx, ln)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return k
}

// register is how a node's pods write their rows, which does nothing here.
func (k *kubernetes) register(t *testing.T) local.Registry {
	r, err := register.New(register.Config{Targets: []string{k.registrar}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// client tells a node of all rows.
func (k *kubernetes) client(t *testing.T, n *node) *registrar.Client {
	n.rows = map[model.ServiceName][]model.Endpoint{}
	c, err := registrar.New(registrar.Config{Targets: []string{k.registrar}, Cluster: "east", Node: n.name, TrustDomain: trustDomain, Whole: true, Sink: rowsOf{n}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// rowsOf is a node's input.Sink for rows.
type rowsOf struct{ n *node }

func (r rowsOf) Replace(b input.Batch) { r.Apply(b) } // the first, of nothing

func (r rowsOf) Apply(b input.Batch) {
	r.n.mu.Lock()
	for s, rows := range b.Endpoints {
		r.n.rows[s] = rows
	}
	r.n.said++
	r.n.mu.Unlock()
	tell(r.n.news)
}

func (r rowsOf) Report(input.Status) {}

// await waits until both nodes do as a pod's health says; HEALTH_UNSPECIFIED: that it has no row.
func (k *kubernetes) await(ctx context.Context, c *cluster, p *pod, health registrypb.ServiceEndpoint_Health) error {
	for _, n := range c.nodes {
		if err := rig.Until(ctx, func(context.Context) error {
			n.mu.Lock()
			defer n.mu.Unlock()
			rows := n.rows[model.ServiceName{Namespace: "shop", Name: p.service}]
			i := slices.IndexFunc(rows, func(e model.Endpoint) bool { return e.IP == p.net.IP })
			is := registrypb.ServiceEndpoint_HEALTH_UNSPECIFIED
			if i >= 0 {
				is = registrypb.ServiceEndpoint_Health(rows[i].Health)
			}
			if is != health || n.inForce < n.said {
				return fmt.Errorf("%s knows %s as %s, waited for %s", n.name, p.name, is, health)
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// leaving deletes a pod's object, and holds what its application is still sent against
// contract 13.3: nothing more once it drains everywhere, but what was on its way.
func (k *kubernetes) leaving(c *cluster, p *pod) (check func()) {
	k.delete(c.t, p, 30)
	ctx, cancel := context.WithTimeout(c.ctx, time.Minute)
	defer cancel()
	if err := k.await(ctx, c, p, registrypb.ServiceEndpoint_DRAINING); err != nil {
		c.t.Error(err)
	}
	before := p.served.Load()
	return func() {
		if n := p.served.Load() - before; n > workers {
			c.t.Errorf("%s was sent %d requests while it drained", p.name, n)
		}
	}
}

// create makes a pod's object, as a controller and a scheduler do.
func (k *kubernetes) create(t *testing.T, p *pod) {
	t.Helper()
	if _, err := k.api.CoreV1().Pods("shop").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: p.name, Labels: map[string]string{"aether.io/managed": "true"}},
		Spec:       corev1.PodSpec{NodeName: p.node.name, ServiceAccountName: p.service, Containers: []corev1.Container{{Name: "app", Image: "app:1"}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// runs is what a kubelet says once a pod's containers run: its address, and then, if its
// application answers, that it is ready.
func (k *kubernetes) runs(t *testing.T, p *pod) {
	t.Helper()
	status := func(ready corev1.ConditionStatus) {
		o, err := k.api.CoreV1().Pods("shop").Get(t.Context(), p.name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ip := p.net.IP.String()
		o.Status = corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}},
		}
		if _, err := k.api.CoreV1().Pods("shop").UpdateStatus(t.Context(), o, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	status(corev1.ConditionFalse)
	if p.app != nil { // it listens
		status(corev1.ConditionTrue)
	}
}

// delete is a pod's end at the API server: of grace 0, when its kubelet has seen the last of it.
func (k *kubernetes) delete(t *testing.T, p *pod, grace int64) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := k.api.CoreV1().Pods("shop").Delete(ctx, p.name, metav1.DeleteOptions{GracePeriodSeconds: &grace})
	if err != nil && !apierrors.IsNotFound(err) {
		t.Error(err)
	}
}
