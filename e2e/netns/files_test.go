package netns

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const guardFilter = `apiVersion: config.aether.io/v1
kind: HTTPFilter
metadata: {name: guard, namespace: shop}
spec:
  scope: SCOPE_INBOUND
  targetRefs: [{kind: Service, name: green}]
  rbac:
    action: DENY
    policies:
    - name: nobody
      principals: [{namespace: shop}]
      permissions: [{pathPrefix: /secret}]
`

// TestBrokenPolicyFile: what was denied before a slip is not allowed after it.
func TestBrokenPolicyFile(t *testing.T) {
	ctx := within(t, time.Minute)
	f := filepath.Join(w.Rig.Dir, "config", "mesh-guard.yaml")
	remove(t, f)
	ask := func() string {
		a, err := send(ctx, transport(t, false, w.Pod("web"), vip(firstColour+2, 8080)), "GET", "green.shop.aether.internal:8080", "/secret/x", nil)
		if err != nil {
			return err.Error()
		}
		return fmt.Sprintf("%d %.40s", a.StatusCode, strings.TrimSpace(a.body))
	}
	put := func(doc string) { rewrite(t, ctx, f, doc) }
	for _, tt := range []struct{ name, doc string }{
		{"unknown field", strings.Replace(guardFilter, "action: DENY", "acton: DENY", 1)},
		{"wrong kind of value", strings.Replace(guardFilter, "action: DENY", "action: [DENY]", 1)},
		{"unbalanced bracket", strings.Replace(guardFilter, "[{pathPrefix: /secret}]", "[{pathPrefix: /secret}", 1)},
		{"tab", strings.Replace(guardFilter, "    action", "\taction", 1)},
		{"unquoted colon", strings.Replace(guardFilter, "name: nobody", "name: no: body", 1)},
		{"cut short", guardFilter[:len(guardFilter)/2]},
		{"a letter of the kind", strings.Replace(guardFilter, "kind: HTTPFilter", "kind: HttpFilter", 1)},
		{"apiVersion", strings.Replace(guardFilter, "config.aether.io/v1", "config.aether.io/v1beta1", 1)},
		{"metadata.name", strings.Replace(guardFilter, "guard", "gu_ard", 1)},
		{"merge conflict", "<<<<<<< HEAD\n" + guardFilter + "=======\n" + guardFilter + ">>>>>>> other\n"},
		{"not UTF-8", strings.Replace(guardFilter, "nobody", "nob\xf6dy", 1)},
		{"emptied, to be written anew", ""},
	} {
		put(guardFilter)
		if s := ask(); !strings.HasPrefix(s, "403") {
			t.Fatalf("with the policy in force: %s", s)
		}
		put(tt.doc)
		if s := ask(); strings.HasPrefix(s, "200") {
			t.Errorf("%s: what was denied is let through: %s", tt.name, s)
		}
		status, err := w.Admin(ctx, 0, "/status?format=text")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(status), "mesh-guard.yaml") {
			t.Errorf("%s: the status does not name the file:\n%s", tt.name, status)
		}
	}
	if err := os.Remove(f); err != nil {
		t.Fatal(err)
	}
	settle(t, ctx)
	if s := ask(); !strings.HasPrefix(s, "200") {
		t.Errorf("the file is gone, and what it denied is not let through: %s", s)
	}
}

// rewrite puts text into a file in place, as editors and shells do.
func rewrite(t *testing.T, ctx context.Context, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	settle(t, ctx)
}

// remove has a file gone, and that in force, when the test is over.
func remove(t *testing.T, path string) {
	t.Cleanup(func() {
		os.Remove(path)
		ctx, stop := context.WithTimeout(context.Background(), patience) // t's own has ended
		defer stop()
		if err := w.Sync(ctx); err != nil {
			t.Error(err)
		}
	})
}

// TestBrokenPodFile: a slip in a pod's document does not send its traffic around the mesh. Whoever has the Service's address sees what leaves.
func TestBrokenPodFile(t *testing.T) {
	ctx := within(t, time.Minute)
	var around atomic.Int32
	l := listen(t, ctx, &w.out.Space, vip(appVIP, portH1))
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			around.Add(1)
			c.Close()
		}
	}()
	path := w.app.at(t, func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, "mesh") })
	ask := func() {
		rt := transport(t, false, w.Pod("web2"), vip(appVIP, portH1))
		defer rt.CloseIdleConnections()
		send(ctx, rt, "GET", fmt.Sprintf("%s:%d", appName, portH1), path, nil)
	}
	f := filepath.Join(w.Rig.Dir, "config", "mesh-pod-web2.yaml")
	good, err := os.ReadFile(f)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, doc string }{
		{"tab", strings.Replace(string(good), "\n  name:", "\n\tname:", 1)},
		{"a field that is newer than the program", string(good) + "\nnewer: 1\n"},
		{"emptied, to be written anew", ""},
	} {
		rewrite(t, ctx, f, tt.doc)
		around.Store(0)
		ask()
		if n := around.Load(); n > 0 {
			t.Errorf("%s: %d connections of the pod left in the clear, around the mesh", tt.name, n)
		}
		rewrite(t, ctx, f, string(good))
	}
}
