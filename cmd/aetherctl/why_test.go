package main

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"aether/controlplane/compile"
	"aether/controlplane/file"
	"aether/dataplane"
	"aether/dataplane/admin"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/mtls"
)

// nobody is an mtls.Source that has no certificate for anybody.
type nobody struct{}

func (nobody) Watch(ctx context.Context, _ mtls.Ref, _ func(*mtls.SVID, error)) error {
	<-ctx.Done()
	return nil
}

// TestWhyOfNode asks a node's own admin, as a user does.
func TestWhyOfNode(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "shop.yaml"), []byte(shop), 0o644); err != nil {
		t.Fatal(err)
	}
	ring := journal.NewRing(100)
	node, err := dataplane.New(dataplane.Config{Identities: nobody{}, Journal: ring})
	if err != nil {
		t.Fatal(err)
	}
	m, _ := file.Load(dir, file.Options{Node: "n1", RedirectAllDefault: true})
	snap, _ := compile.Compile(m)
	node.Apply(snap.WithVersion(3), nil)
	srv := httptest.NewServer(admin.Handler(admin.Config{Node: node, Why: ring, Metrics: http.NotFoundHandler(), Dump: func() []byte { return file.Dump(m) }}))
	defer srv.Close()
	address := strings.TrimPrefix(srv.URL, "http://")

	entry := func(at int, e journal.Entry, host string) {
		e.At = time.Unix(int64(at), 0)
		e.Took, e.Version, e.Dst = 1500*time.Microsecond, 3, netip.MustParseAddrPort("10.96.0.10:8080")
		e.Dir, e.Sniff = model.Captured, model.SniffHTTP11
		e.Host.SetString(host)
		ring.Ended(&e)
	}
	entry(1, journal.Entry{Namespace: "shop", Workload: "web", Pod: "web-1", Action: "refuse", Reason: "port-mismatch", Rule: "Service shop/cart"}, "cart:9090")
	entry(2, journal.Entry{Namespace: "shop", Workload: "web", Pod: "web-2", Action: "passthrough", Reason: "not-mesh", Ended: "complete"}, "example.org")
	entry(3, journal.Entry{Namespace: "other", Workload: "job", Action: "forward", Reason: "declared-http", Backend: "shop/cart:8080", Rule: "Service shop/cart"}, "cart.shop:8080")

	why := func(args ...string) (status int, at []int, errs string) {
		t.Helper()
		status, out, errs := aetherctl(t, "", append([]string{"why", "--admin", address, "-o", "json"}, args...)...)
		for l := range strings.Lines(out) {
			var d admin.Decision
			if err := json.Unmarshal([]byte(l), &d); err != nil {
				t.Fatalf("%v: %s", err, l)
			}
			at = append(at, int(d.At.Unix()))
		}
		return status, at, errs
	}
	for _, tt := range []struct {
		args string
		want []int
	}{
		{"", []int{3, 2, 1}},
		{"-n 2", []int{3, 2}},
		{"--bad", []int{1}},
		{"--pod shop/web", []int{2, 1}},
		{"--pod shop/web-1", []int{1}},
		{"--pod shop/web-2", []int{2}},
		{"--pod shop/nobody", nil},
		{"--reason port-mismatch", []int{1}},
		{"--reason port-mismatch,declared-http", []int{3, 1}},
		{"--service shop/cart --pod shop/web --reason port-mismatch", []int{1}},
		{"--service other/job", nil},
		{"--pod other/job --service shop/cart", []int{3}},
	} {
		if status, at, errs := why(strings.Fields(tt.args)...); status != 0 || !slices.Equal(at, tt.want) {
			t.Errorf("%q: status %d, %v, want %v %s", tt.args, status, at, tt.want, errs)
		}
	}
	status, out, errs := aetherctl(t, "", "why", "--admin", address, "--bad")
	if status != 0 || out != "00:00:01.000 shop/web > 10.96.0.10:8080 http1 host=cart:9090 refuse (port-mismatch Service shop/cart) 1.5ms in 0 out 0\n" {
		t.Errorf("status %d: %s%s", status, out, errs)
	}
	if _, out, errs := aetherctl(t, "", "why", "--admin", address, "--reason", "loop"); out != "" || !strings.Contains(errs, "no decision of those that the node keeps is like that") {
		t.Errorf("nothing: %q %q", out, errs)
	}

	// What it says of a flow, explain takes; and a snapshot of the node explains alike.
	_, out, _ = aetherctl(t, "", "why", "--admin", address, "-o", "json", "--bad")
	var d admin.Decision
	if err := json.Unmarshal([]byte(out), &d); err != nil || d.Kind != "connection" || d.TookMS != 1.5 || d.Pod != "shop/web" || !d.Bad || d.Snapshot != 3 {
		t.Fatalf("%v: %+v", err, d)
	}
	_, live, errs := aetherctl(t, "", "explain", "--admin", address, d.Flow)
	if !strings.HasPrefix(live, "refuse 421 (port-mismatch Service shop/cart)\n") || !strings.Contains(live, "would work: 'shop/web > 10.96.0.10:8080 http1 host=cart'") {
		t.Errorf("explained: %s%s", live, errs)
	}
	_, dump, _ := aetherctl(t, "", "snapshot", "--admin", address)
	_, kept, errs := aetherctl(t, dump, "explain", "--config", "-", d.Flow)
	if strings.Replace(kept, "snapshot 0:", "snapshot 3:", 1) != live {
		t.Errorf("of the snapshot:\n%s%s\nof the node:\n%s", kept, errs, live)
	}
	if status, out, errs := aetherctl(t, "", "explain", "--admin", address, "-o", "json", d.Flow); status != 0 || json.Unmarshal([]byte(out), new(admin.Explanation)) != nil {
		t.Errorf("status %d: %s%s", status, out, errs)
	}
}
