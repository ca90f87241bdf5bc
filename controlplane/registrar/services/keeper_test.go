package services

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"aether/controlplane/gamma"
	"aether/controlplane/kube/follow"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// keeping is a keeper that knows generated Services of those names in namespace shop, and
// rows that can be changed.
func keeping(t *testing.T, names ...string) (*keeper, *snapshot) {
	t.Helper()
	rows := newSnapshot(t)
	g, err := New(Config{Client: fake.NewClientset(), Rows: rows, Identity: "one", Namespace: "aether-system"})
	if err != nil {
		t.Fatal(err)
	}
	k := newKeeper(g)
	var all []*live
	for _, n := range names {
		rows.set("shop", n, "8080=http")
		all = append(all, generated(n, "7", 8080))
	}
	k.readRows()
	k.hear(follow.Event[*live]{Op: follow.Replaced, Objects: all})
	return k, rows
}

// generated is a Service of ours as it is seen.
func generated(name, version string, port int32) *live {
	return liveOf(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: name, ResourceVersion: version, UID: types.UID("uid of " + name), Labels: map[string]string{Label: "true"},
		},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: port}}},
	})
}

// TestPruneCountsAnew: a service whose rows came back, however shortly, has had none only since
// they went again, also if nobody looked at everything in between.
func TestPruneCountsAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, rows := keeping(t, "cart", "pay")
		cart := model.ServiceName{Namespace: "shop", Name: "cart"}
		look := func(ports ...string) {
			rows.set("shop", "cart", ports...)
			k.readRows()
		}
		look()
		k.lookAtAll()
		time.Sleep(k.cfg.PruneAfter - time.Second)
		look("8080=http")
		look()
		time.Sleep(2 * time.Second)
		k.lookAtAll()
		if k.mayGo(cart, time.Now()) {
			t.Errorf("its Service may go 2 s after its last row, of %s", k.cfg.PruneAfter)
		}
		time.Sleep(k.cfg.PruneAfter)
		if !k.mayGo(cart, time.Now()) {
			t.Error("its Service may not go")
		}
	})
}

// TestServerSetBack: what an API server lists that was set back to a backup is what there is,
// though its versions are older than those that were known. A version that was seen already is
// no news where changes come one by one.
func TestServerSetBack(t *testing.T) {
	k, _ := keeping(t, "cart")
	cart := model.ServiceName{Namespace: "shop", Name: "cart"}
	is := func(when, version string, port int32) {
		t.Helper()
		if l := k.live[cart]; l == nil || l.ResourceVersion != version || l.ports[0].number != port {
			t.Errorf("%s: %+v, want version %s with port %d", when, l, version, port)
		}
	}
	k.hear(follow.Event[*live]{Op: follow.Changed, Objects: []*live{generated("cart", "900", 9090)}})
	is("changed", "900", 9090)
	k.hear(follow.Event[*live]{Op: follow.Changed, Objects: []*live{generated("cart", "899", 8080)}})
	is("what is late", "900", 9090)
	k.hear(follow.Event[*live]{Op: follow.Replaced, Objects: []*live{generated("cart", "12", 8080)}})
	is("set back", "12", 8080)
	k.hear(follow.Event[*live]{Op: follow.Changed, Objects: []*live{generated("cart", "13", 7070)}})
	is("and changed since", "13", 7070)
}

// TestEventsComeLast: what a new leader has to say of users' Services costs no generated
// one its time, and what there is no room for is said later.
func TestEventsComeLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const users, others, room = 70, 25, 40
		k, rows := keeping(t)
		k.room = room
		var all []*live
		for i := range users {
			name := fmt.Sprintf("user-%d", i)
			rows.set("shop", name, "8080=http")
			all = append(all, liveOf(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name)}}))
		}
		for i := range others {
			rows.set("shop", fmt.Sprintf("other-%d", i), "8080=http")
		}
		k.hear(follow.Event[*live]{Op: follow.Replaced, Objects: all})
		k.readRows()
		services, events := 0, map[string]bool{}
		took := func() {
			c := k.cfg.Client.(*fake.Clientset)
			for _, a := range c.Actions() {
				create, ok := a.(clienttesting.CreateAction)
				if !ok {
					continue
				}
				switch o := create.GetObject().(type) {
				case *corev1.Service:
					if services++; len(events) > 0 {
						t.Errorf("Service %d is made after %d Events", services, len(events))
					}
				case *corev1.Event:
					events[o.InvolvedObject.Name] = true
				}
			}
			c.ClearActions()
		}
		begun := time.Now()
		for k.step(t.Context()) {
			if len(k.events) > room {
				t.Fatalf("%d Events wait, of %d at most", len(k.events), room)
			}
		}
		if took(); services != others || len(events) != room {
			t.Errorf("%d Services and Events on %d, want %d and %d", services, len(events), others, room)
		}
		if took, least := time.Since(begun), (room-eventBurst)*time.Second/eventsPerSecond; took < least-time.Millisecond {
			t.Errorf("the Events took %s, want %s at least", took, least)
		}
		k.lookAtAll() // as every few seconds
		for k.step(t.Context()) {
		}
		if took(); services != others || len(events) != users {
			t.Errorf("and then %d Services and Events on %d, want %d and %d", services, len(events), others, users)
		}
	})
}

// TestPortsAreReadBack: what a generated Service says of its ports is what a node reads of
// them once the rows are gone (contract 9.8): a TCP port does not become HTTP.
func TestPortsAreReadBack(t *testing.T) {
	s := specOf([]*registrypb.ServiceEndpoint{row(t, "10.0.0.1", "8080=http 5432=tcp 53=udp 9053=tcp+udp")})
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "cart", Labels: map[string]string{Label: "true"}}}
	for _, p := range s.ports {
		o.Spec.Ports = append(o.Spec.Ports, p.object())
	}
	r := &gamma.Reader{}
	read := r.Service(gamma.Object{Namespace: "shop", Name: "cart"}, o)
	if read == nil || len(r.Problems) > 0 {
		t.Fatalf("it is not wholly in force: %v", r.Problems)
	}
	got := map[string]model.Class{}
	for _, p := range read.Service.Ports {
		got[model.PortKey(p.Number, p.UDP)] = p.Class
	}
	for key, want := range map[string]model.Class{"8080": model.HTTP, "5432": model.TCP, "9053": model.TCP} {
		if got[key] != want {
			t.Errorf("port %s is read as %v, want %v", key, got[key], want)
		}
	}
	for _, key := range []string{"53/UDP", "9053/UDP"} { // UDP has no appProtocol, and needs none
		if c, ok := got[key]; !ok || c != model.ClassNone {
			t.Errorf("port %s is read as %v, %t", key, c, ok)
		}
	}
}
