package services

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"aether/controlplane/kube/follow"
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
	k.hear(follow.News[*live]{Op: follow.Replaced, Objects: all})
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
	k.hear(follow.News[*live]{Op: follow.Changed, Objects: []*live{generated("cart", "900", 9090)}})
	is("changed", "900", 9090)
	k.hear(follow.News[*live]{Op: follow.Changed, Objects: []*live{generated("cart", "899", 8080)}})
	is("what is late", "900", 9090)
	k.hear(follow.News[*live]{Op: follow.Replaced, Objects: []*live{generated("cart", "12", 8080)}})
	is("set back", "12", 8080)
	k.hear(follow.News[*live]{Op: follow.Changed, Objects: []*live{generated("cart", "13", 7070)}})
	is("and changed since", "13", 7070)
}
