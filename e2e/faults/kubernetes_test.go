package faults

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"aether/e2e/rig"
)

var away = flag.Duration("away", 4*time.Second, "how long TestKubernetesFaults keeps the API server away, at each of its steps")

// TestKubernetesFaults is one mesh over a real API server from one fault to the next: the
// registrar makes its rows of pods there, and keeps their Services there; proxies read
// these and routes.
//
// That "away" may be hours is shown elsewhere: what proxies and registrar do while it is
// (keep what they know, ask again every 30 s at most) hangs on no other length of time,
// and package controlplane/kube/follow holds these waits against ten hours of a clock that
// is not the machine's. make soak-away shows it on that of the machine.
func TestKubernetesFaults(t *testing.T) {
	newWorld(t, form{kubernetes: true}).run([]fault{
		{"a pod is added", kubePodAdded},
		{"API server and etcd killed, kept away, and restored", apiServerKilled},
		{"the same with a registrar and a proxy that start meanwhile", startedWithoutAPIServer},
		{"registrar killed and started anew", kubeRegistrarKilled},
	})
}

// kubePodAdded: a pod that becomes ready while requests are sent gets its share of them.
func kubePodAdded(w *world) {
	w.route("one")
	l := w.begin()
	l.until("the route to be in force", func() bool { return l.routes["one"] > 0 })
	p := w.cart("cart-3", 1)
	w.healthy("cart-3")
	start := time.Now()
	w.must(w.AwaitUsable(w.ctx, 0, p, true))
	usable := time.Since(start)
	l.until("an answer of the new pod", func() bool { return l.from["cart-3"] > 0 })
	l.check("a pod is added")
	w.t.Logf("from its being ready to what the other node may send to %s, to its first answer %s", usable.Round(time.Millisecond), time.Since(start).Round(time.Millisecond))
}

// route makes the route that writes a value on every answer, or changes it.
func (w *world) route(value string) {
	w.t.Helper()
	const crd = "httproutes.gateway.networking.k8s.io"
	dir, err := exec.CommandContext(w.ctx, "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api").Output()
	w.must(err)
	b, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml"))
	w.must(err)
	w.must(w.ApplyObject(w.ctx, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"+crd, string(b)))
	w.must(rig.Until(w.ctx, func(ctx context.Context) error { // once the kind is served
		return w.ApplyObject(ctx, "/apis/gateway.networking.k8s.io/v1/namespaces/shop/httproutes/r", fmt.Sprintf(`
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {namespace: shop, name: r}
spec:
  parentRefs: [{group: "", kind: Service, name: cart}]
  rules:
  - filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {set: [{name: x-route, value: %s}]}}]
    backendRefs: [{name: cart, port: 8080}]
`, value))
	}))
}

// keptAway takes API server and etcd away, and has requests go on.
func (w *world) keptAway(l *load) {
	w.t.Helper()
	w.APIServer().Kill()
	w.Etcd().Kill()
	w.awaitSource("kubernetes", false)
	l.lasts(*away)
}

// restored brings them back, with a history that begins now, and says what changes then,
// before those who were away from it can have come back.
func (w *world) restored(change func()) {
	w.t.Helper()
	w.must(w.StartEtcd(w.ctx))
	w.must(w.Compact(w.ctx))
	w.must(w.StartAPIServer(w.ctx))
	change()
	w.awaitSource("kubernetes", true)
}

// apiServerKilled: with the API server away the registrar's rows and the nodes' routes stay
// in force; what has changed when it is back is in force soon.
func apiServerKilled(w *world) {
	l := w.begin()
	l.until("the route to be in force", func() bool { return l.routes["one"] > 0 })
	w.keptAway(l)
	p := w.Pod("cart-3")
	w.restored(func() {
		w.must(w.Terminate("cart-3"))
		w.route("two")
	})
	start := time.Now()
	w.must(w.AwaitUsable(w.ctx, 0, p, false))
	l.until("the route's change", func() bool { return l.routes["two"] > 0 })
	w.t.Logf("what changed is in force %s after the API server is followed again", time.Since(start).Round(time.Millisecond))
	w.must(w.RemovePod("cart-3"))
	fourth := w.cart("cart-4", 1)
	w.healthy("cart-4")
	w.must(w.AwaitUsable(w.ctx, 0, fourth, true))
	l.until("answers of the new pod", func() bool { return l.from["cart-4"] > 0 })
	l.check("API server killed")
	if l.routes[""] > 0 {
		w.t.Errorf("answers without what the route writes: %v", l.routes)
	}
}

// startedWithoutAPIServer: a registrar that starts meanwhile knows nothing and says nothing:
// nodes keep what they know. A proxy that starts meanwhile begins with its last good state.
func startedWithoutAPIServer(w *world) {
	l := w.begin()
	w.keptAway(l)
	w.Registrar().Kill()
	w.awaitConnected(false)
	w.must(w.StartRegistrar())
	l.lasts(*away)
	start := time.Now()
	w.must(w.ReplaceProxy(w.ctx, 0))
	w.t.Logf("the proxy of the first node was replaced in %s", time.Since(start).Round(time.Millisecond))
	l.more(2 * rps)
	for node := range w.Rig.Nodes {
		if s, err := w.registrarOf(w.ctx, node); err != nil || s.Connected {
			w.t.Errorf("node %d hears a registrar that knows nothing: %+v, %v", node+1, s, err)
		}
	}
	p := w.Pod("cart-4")
	w.restored(func() {
		w.must(w.Terminate("cart-4"))
		w.route("three")
	})
	w.must(w.AwaitRegistrar(w.ctx))
	w.awaitConnected(true)
	w.must(w.AwaitUsable(w.ctx, 0, p, false))
	l.until("the route's change", func() bool { return l.routes["three"] > 0 })
	w.must(w.RemovePod("cart-4"))
	l.more(rps)
	l.check("registrar and proxy started without an API server")
	if l.routes[""] > 0 {
		w.t.Errorf("answers without what the route writes: %v", l.routes)
	}
}

// kubeRegistrarKilled: nodes serve what they know, and hear what changed once there is a
// registrar again, which makes its rows anew.
func kubeRegistrarKilled(w *world) {
	p := w.cart("cart-5", 1)
	w.healthy("cart-5")
	w.must(w.AwaitUsable(w.ctx, 0, p, true))
	l := w.begin()
	l.until("answers of the new pod", func() bool { return l.from["cart-5"] > 0 })
	w.Registrar().Kill()
	w.awaitConnected(false)
	w.must(w.Terminate("cart-5")) // which nobody can tell the nodes
	l.more(2 * rps)
	w.must(w.StartRegistrar())
	w.must(w.AwaitRegistrar(w.ctx))
	w.awaitConnected(true)
	w.must(w.AwaitUsable(w.ctx, 0, p, false))
	w.must(w.RemovePod("cart-5"))
	l.more(rps)
	l.check("registrar killed")
}
