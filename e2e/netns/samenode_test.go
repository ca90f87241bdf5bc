package netns

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// TestSameNode: the MeshConfig says whether pods of one node meet over the hop or in process. The
// application sees the same caller, by the same certificate; a pod of the other node is met over the hop.
func TestSameNode(t *testing.T) {
	t.Parallel()
	ctx := within(t, 2*patience)
	m, err := mesh.New(ctx, mesh.Options{Proxy: w.binary, DevCA: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	for i, name := range []string{"client", "near", "far"} {
		if _, err := m.AddPod(ctx, mesh.Pod{Name: name, Node: i / 2, Ports: "8080"}); err != nil {
			t.Fatal(err)
		}
		app := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "%s %s", name, r.Header.Get("X-Forwarded-Client-Cert"))
		})
		if err := m.ServeHTTP(ctx, &m.Pod(name).Space, local(8080), app); err != nil {
			t.Fatal(err)
		}
		if err := m.Service(rig.ServiceManifest{Name: name, ClusterIPs: m.ClusterIPs(uint8(10 + i)), Ports: []uint16{8080}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Start(ctx); err != nil {
		t.Fatal(err)
	}
	ask := func(name string) string {
		t.Helper()
		at := m.ClusterIPs(map[string]uint8{"near": 11, "far": 12}[name])[0].String() + ":8080"
		a := mustSend(t, ctx, transport(t, false, m.Pod("client"), at), "GET", name, "/", nil)
		got := outcome(a)
		if !strings.HasPrefix(got, "200 "+name+" By=spiffe://") || !strings.Contains(got, "/sa/"+name+";Hash=") || !strings.HasSuffix(got, "/sa/client") {
			t.Errorf("%s: %s", name, got)
		}
		return got
	}
	state := func() string {
		t.Helper()
		b, err := m.Admin(ctx, 0, "/sessions")
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	near, far := ask("near"), ask("far")
	if s := state(); strings.Contains(s, "in-process") {
		t.Errorf("in process without being asked to:\n%s", s)
	}
	for _, way := range []string{"inProcess", "mTLS"} {
		if err := m.Write("config", "apiVersion: config.aether.io/v1\nkind: MeshConfig\nmetadata: {namespace: aether-system, name: default}\nspec: {sameNode: "+way+"}\n"); err != nil {
			t.Fatal(err)
		}
		if err := m.Sync(ctx); err != nil {
			t.Fatal(err)
		}
		if got := ask("near"); got != near {
			t.Errorf("%s: the application saw %s, before %s", way, got, near)
		}
		if got := ask("far"); got != far {
			t.Errorf("%s: the application of the other node saw %s, before %s", way, got, far)
		}
		if s := state(); way == "inProcess" && strings.Count(s, "in-process") != 1 {
			t.Errorf("in process should be the one pod of this node:\n%s", s)
		}
	}
}
