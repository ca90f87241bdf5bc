package netns

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// TestReload: a service, a route and their end take effect without a restart, on the
// connection that is open.
func TestReload(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	rt := transport(t, false, w.Pod("job"), proxyPort)
	const host = "fresh.shop.aether.internal:8080"
	ask := func(want string) *answer {
		t.Helper()
		a := mustSend(t, ctx, rt, "GET", host, "/x", nil)
		if got := fmt.Sprintf("%d %s", a.StatusCode, a.body); !strings.HasPrefix(got, want) {
			t.Errorf("got %s, want %s", got, want)
		}
		return a
	}
	ask("404")
	pod := addPod(t, ctx, mesh.Pod{Name: "fresh", Node: 1, Ports: "8080", Prepare: func(p *rig.Pod) error {
		return w.ServeHTTP(ctx, &p.Space, local(8080), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "fresh "+r.Header.Get("X-Route"))
		}))
	}})
	ask("200 fresh ")
	route := func(value string) string {
		return `apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {namespace: shop, name: fresh}
spec:
  parentRefs: [{group: "", kind: Service, name: fresh}]
  rules:
  - filters:
    - type: RequestHeaderModifier
      requestHeaderModifier: {set: [{name: x-route, value: ` + value + `}]}
`
	}
	write(t, ctx, "fresh-service", rig.ServiceYAML(rig.ServiceManifest{Namespace: "shop", Name: "fresh", ClusterIPs: w.ClusterIPs(91), Ports: []uint16{8080}}))
	write(t, ctx, "fresh-route", route("one"))
	ask("200 fresh one")
	write(t, ctx, "fresh-route", route("two"))
	ask("200 fresh two")
	for _, doc := range []string{"fresh-route", "fresh-service", "pod-" + pod.Name} {
		if err := w.Remove(doc); err != nil {
			t.Fatal(err)
		}
	}
	settle(t, ctx)
	ask("404")
}

// TestBadDocument: it is told by file and line, and everything else stays in force.
func TestBadDocument(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "served") })
	for name, doc := range map[string]string{
		"not YAML":         "apiVersion: v1\nkind: Service\n\t{{{\n",
		"an unknown field": "apiVersion: v1\nkind: Service\nmetadata: {namespace: shop, name: odd}\nspec:\n  portz: []\n",
		"a bad annotation": "apiVersion: v1\nkind: Pod\nmetadata:\n  namespace: shop\n  name: odd\n  labels: {aether.io/managed: \"true\"}\n  annotations:\n    endpoint.aether.io/ports: \"8080=grpc\"\nspec: {nodeName: node1, serviceAccountName: odd, containers: []}\nstatus: {phase: Running, podIPs: [{ip: 10.1.1.99}]}\n",
	} {
		t.Run(name, func(t *testing.T) {
			write(t, ctx, "bad", doc)
			for node := range w.Rig.Nodes {
				s, err := w.Status(ctx, node)
				if err != nil {
					t.Fatal(err)
				}
				found := false
				for _, p := range s.Problems {
					found = found || regexp.MustCompile(`mesh-bad\.yaml:\d+$`).MatchString(p.Where) && p.Reason != ""
				}
				if !found {
					t.Errorf("node%d tells of no problem with file and line: %+v", node+1, s.Problems)
				}
			}
			a := mustSend(t, ctx, transport(t, false, w.Pod("web"), vip(appVIP, portH1)), "GET", "app", path, nil)
			if a.body != "served" {
				t.Errorf("beside a bad document: %d %q", a.StatusCode, a.body)
			}
		})
	}
}

// TestPodsComeAndGo: a pod that comes or goes does not disturb what others have under way.
func TestPodsComeAndGo(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	const size = 8 << 20
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(size))
		io.Copy(w, newPattern(size))
	})
	req, err := http.NewRequestWithContext(ctx, "GET", "http://app"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := transport(t, false, w.Pod("web"), vip(appVIP, portH1)).RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	raw := dial(t, ctx, w.Pod("web"), vip(appVIP, portEcho))
	h := sha256.New()
	step := func() { // a part of the download, and a word on the raw connection
		t.Helper()
		if _, err := io.CopyN(h, res.Body, size/4); err != nil {
			t.Fatalf("the download was cut: %v", err)
		}
		say(t, raw, "still there?")
		expect(t, raw, "still there?")
	}
	step()
	guest := addPod(t, ctx, mesh.Pod{Name: "guest-0", Ports: "8080"})
	other := addPod(t, ctx, mesh.Pod{Name: "guest-1", Node: 1, Ports: "8080"})
	step()
	own := dial(t, ctx, guest, vip(appVIP, portEcho))
	say(t, own, "me too")
	expect(t, own, "me too")
	for _, p := range []*rig.Pod{guest, other} {
		if err := w.Remove("pod-" + p.Name); err != nil {
			t.Fatal(err)
		}
	}
	settle(t, ctx)
	if b, err := io.ReadAll(own); len(b) > 0 || err == nil {
		t.Errorf("the removed pod's own connection: %q, %v; want a reset", b, err)
	}
	if out := tables(t, ctx, guest); strings.Contains(out, "aether_capture") {
		t.Errorf("capture rules stay in a pod that is not served any more:\n%s", out)
	}
	step()
	step()
	if _, err := res.Body.Read(make([]byte, 1)); err != io.EOF || sum(h) != sumOf(size) {
		t.Errorf("the download's end: %v, the same bytes: %v", err, sum(h) == sumOf(size))
	}
}

func tables(t *testing.T, ctx context.Context, p *rig.Pod) string {
	t.Helper()
	out, err := p.Command(ctx, "nft", "list", "tables").CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	for _, family := range []string{"-4", "-6"} {
		rules, err := p.Command(ctx, "ip", family, "rule", "list", "table", "100").CombinedOutput()
		if err != nil {
			t.Fatalf("ip: %v: %s", err, rules)
		}
		out = append(out, rules...)
	}
	return string(out)
}

// TestNamespaceLater: a pod without its namespace is told and skipped; when the
// namespace is there the pod is served, without another change.
func TestNamespaceLater(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	ip := func(args ...string) error {
		if out, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %v: %w: %s", args, err, out)
		}
		return nil
	}
	late := addPod(t, ctx, mesh.Pod{Name: "late", Ports: "8080", Prepare: func(p *rig.Pod) error {
		return ip("netns", "del", p.NSName())
	}})
	served := func() bool {
		t.Helper()
		s, err := w.Status(ctx, 0)
		if err != nil {
			t.Fatal(err)
		}
		told := false
		for _, p := range s.Problems {
			told = told || p.Object == "Pod shop/"+late.Name && strings.Contains(p.Reason, late.NetNS)
		}
		serves := false
		for _, p := range s.Pods {
			serves = serves || p.Pod == "shop/"+late.Name
		}
		if told == serves {
			t.Errorf("served: %v, told as a problem: %v", serves, told)
		}
		return serves
	}
	if served() {
		t.Fatal("served without a namespace")
	}
	ns := late.NSName()
	err := errors.Join(ip("netns", "add", ns), ip("-n", ns, "link", "set", "lo", "up"),
		ip("-n", ns, "addr", "add", late.IP4.String()+"/32", "dev", "lo"), ip("-n", ns, "addr", "add", late.IP6.String()+"/128", "dev", "lo"))
	if err != nil {
		t.Fatal(err)
	}
	err = rig.Until(ctx, func(ctx context.Context) error {
		if !served() {
			return fmt.Errorf("not served yet")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	a := mustSend(t, ctx, transport(t, false, late, proxyPort), "GET", "any.example", "/aether/readyz", nil)
	if a.StatusCode != 200 {
		t.Errorf("the proxy port of a late namespace: %d %q", a.StatusCode, a.body)
	}
}

// TestRestart: a proxy that is stopped takes its capture with it, so that the pod's traffic
// goes its own way; started again it serves as before.
func TestRestart(t *testing.T) {
	t.Parallel()
	ctx := within(t, 2*patience)
	m, err := mesh.New(ctx, mesh.Options{Proxy: w.binary, IPv6: true, DevCA: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	for i, name := range []string{"client", "server"} {
		if _, err := m.AddPod(ctx, mesh.Pod{Name: name, Node: i, Ports: "8080,8081"}); err != nil {
			t.Fatal(err)
		}
	}
	client, server := m.Pod("client"), m.Pod("server")
	out, err := m.Rig.AddPod(ctx, 1, "out")
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Service(rig.ServiceManifest{Name: "server", ClusterIPs: m.ClusterIPs(10), Ports: []uint16{8080, 8081}}); err != nil {
		t.Fatal(err)
	}
	hello := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.RemoteAddr) })
	for s, addr := range map[*rig.Space]string{&server.Space: local(8080), &out.Space: netip.AddrPortFrom(out.IP4, 80).String()} {
		if err := m.ServeHTTP(ctx, s, addr, hello); err != nil {
			t.Fatal(err)
		}
	}
	meshCall := func() error {
		a, err := send(ctx, transport(t, false, client, netip.AddrPortFrom(m.ClusterIPs(10)[0], 8080).String()), "GET", "server", "/", nil)
		if err == nil && a.StatusCode != 200 {
			err = fmt.Errorf("%d %s", a.StatusCode, a.body)
		}
		return err
	}
	if err := m.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if err := meshCall(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(tables(t, ctx, client), "aether_capture") {
		t.Error("no capture rules while the proxy runs")
	}
	for round := range 2 {
		if err := m.StopProxy(0); err != nil {
			t.Fatal(err)
		}
		if left := tables(t, ctx, client); strings.TrimSpace(left) != "" {
			t.Errorf("the stopped proxy left:\n%s", left)
		}
		a := mustSend(t, ctx, transport(t, false, client, netip.AddrPortFrom(out.IP4, 80).String()), "GET", "out.example", "/", nil)
		if !strings.HasPrefix(a.body, client.IP4.String()+":") {
			t.Errorf("without the proxy the client's own traffic got %d %q", a.StatusCode, a.body)
		}
		if err := m.StartProxy(0); err != nil {
			t.Fatal(err)
		}
		if err := m.Sync(ctx); err != nil {
			t.Fatal(err)
		}
		if err := meshCall(); err != nil {
			t.Errorf("after restart %d: %v", round+1, err)
		}
	}
	// A crash leaves capture, and the next start takes it over.
	m.Proxy(0).Kill()
	_ = m.StopProxy(0) // it is gone: only forgotten
	if !strings.Contains(tables(t, ctx, client), "aether_capture") {
		t.Error("a crash took the capture rules: traffic would go around the mesh")
	}
	if err := m.StartProxy(0); err != nil {
		t.Fatal(err)
	}
	if err := m.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	if err := meshCall(); err != nil {
		t.Errorf("after a crash: %v", err)
	}
	// And the destination's proxy: what it was carrying is cut, and seen to be.
	endless := make(chan struct{})
	err = m.ServeHTTP(ctx, &server.Space, local(8081), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "half")
		w.(http.Flusher).Flush()
		<-endless
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer close(endless)
	for _, h2 := range []bool{false, true} {
		req, err := http.NewRequestWithContext(ctx, "GET", "http://server/", nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := transport(t, h2, client, netip.AddrPortFrom(m.ClusterIPs(10)[0], 8081).String()).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if _, err := io.ReadFull(res.Body, make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if b, err := io.ReadAll(res.Body); err == nil || len(b) > 0 {
				t.Errorf("an answer that the destination's crash cut looks whole: %q, %v", b, err)
			}
		}()
	}
	m.Proxy(1).Kill()
	_ = m.StopProxy(1)
	if err := meshCall(); err == nil || !strings.HasPrefix(err.Error(), "503") {
		t.Errorf("without the destination's proxy: %v, want 503", err)
	}
	if err := m.StartProxy(1); err != nil {
		t.Fatal(err)
	}
	if err := m.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	if err := meshCall(); err != nil {
		t.Errorf("after the destination's restart: %v", err)
	}
}

// TestRoll: a pod that another replaces, in two phases (contract 13.3: first no new requests,
// then gone), costs no request, whatever its method.
func TestRoll(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	start := func() *rig.Pod {
		return addPod(t, ctx, mesh.Pod{Name: "rolls", Account: "rolls", Node: 1, Ports: "8080", Prepare: func(p *rig.Pod) error {
			return w.ServeHTTP(ctx, &p.Space, local(8080), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				io.WriteString(w, p.Name)
			}))
		}})
	}
	old := start()
	stop := make(chan struct{})
	var callers sync.WaitGroup
	var answered atomic.Int64
	last := make([]string, 4)
	for i := range last {
		rt := transport(t, i%2 == 1, w.Pod("job"), proxyPort)
		callers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				a, err := send(ctx, rt, "POST", "rolls.shop.aether.internal:8080", "/", strings.NewReader("x"))
				if err != nil || a.StatusCode != 200 {
					t.Errorf("a request was lost: %v, %v", a, err)
					return
				}
				last[i] = a.body
				answered.Add(1)
			}
		})
	}
	// more waits for so many further answers: the roll is to meet traffic at each of its steps.
	more := func(n int64) {
		t.Helper()
		want := answered.Load() + n
		err := rig.Until(ctx, func(context.Context) error {
			if got := answered.Load(); got < want {
				return fmt.Errorf("%d answers of %d", got, want)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		more(50)
		next := start()
		doc := rig.PodYAML(old, rig.PodManifest{Namespace: "shop", Account: "rolls", Ports: "8080"})
		write(t, ctx, "pod-"+old.Name, strings.Replace(doc, "metadata:\n", "metadata:\n  deletionTimestamp: \"2026-01-01T00:00:00Z\"\n", 1))
		if err := w.Remove("pod-" + old.Name); err != nil {
			t.Fatal(err)
		}
		settle(t, ctx)
		more(50)
		old = next
	}
	close(stop)
	callers.Wait()
	for _, l := range last {
		if l != old.Name {
			t.Errorf("the last answer came from %q, want %s", l, old.Name)
		}
	}
}
