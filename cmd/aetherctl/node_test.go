package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"aether/controlplane/file"
	"aether/dataplane/admin"
)

const shop = `apiVersion: v1
kind: Pod
metadata:
  namespace: shop
  name: web-1
  labels: {aether.io/managed: "true"}
spec: {serviceAccountName: web, nodeName: n1}
status: {podIP: 10.1.1.10, phase: Running}
---
apiVersion: v1
kind: Pod
metadata:
  namespace: shop
  name: cart-1
  labels: {aether.io/managed: "true"}
  annotations: {endpoint.aether.io/ports: "8080,9000=tcp"}
spec: {serviceAccountName: cart, nodeName: n2}
status: {podIP: 10.1.2.10, phase: Running}
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: cart, labels: {aether.io/mesh-service: "true"}}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{name: a, port: 8080}, {name: b, port: 9000}]}
`

func TestExplainConfiguration(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("shop.yaml", shop)
	for _, tt := range []struct {
		flow, request string
		status        int
		want          string
	}{
		{"shop/web > 10.96.0.10:9000", "", 0, "forward shop/cart:9000 (declared-tcp Service shop/cart)"},
		{"shop/web > 10.96.0.10:8080 http1 host=cart", "", 0, "forward shop/cart:8080"},
		{"shop/web > 10.96.0.10:8080 http1 host=cart:9090", "", 0, "refuse 421 (port-mismatch Service shop/cart)"},
		{"shop/web > 10.96.0.10:8080 http1 host=cart", "CONNECT cart:8080", 0, "reply 404 (connect)"},
		{"shop/web > 192.0.2.1:443 tls host=example.org", "", 0, "passthrough (tls)"},
		{"shop/web", "", 2, "see 'aetherctl explain --help'"},
		{"shop/web > 10.96.0.10:8080 http1 host=cart", "nonsense", 2, "see 'aetherctl explain --help'"},
	} {
		args := []string{"explain", "--config", dir, "--node", "n1", tt.flow}
		if tt.request != "" {
			args = append(args, tt.request)
		}
		status, out, errs := aetherctl(t, "", args...)
		if status != tt.status || !strings.Contains(out+errs, tt.want) {
			t.Errorf("%s %s: status %d, want %d with %q; printed:\n%s%s", tt.flow, tt.request, status, tt.status, tt.want, out, errs)
		}
	}
	// A bad document is named, and the rest explained all the same.
	write("bad.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: x, namespace: shop}\nspecc: {}\n")
	status, out, errs := aetherctl(t, "", "explain", "--config", dir, "--node", "n1", "shop/web > 10.96.0.10:9000")
	if status != 0 || !strings.Contains(errs, "bad.yaml:4") || !strings.HasPrefix(out, "forward shop/cart:9000") {
		t.Errorf("status %d:\n%s%s", status, out, errs)
	}
}

// TestExplainFile: a snapshot is a configuration that says itself whose it is, in a file or from
// standard input, and it explains like what it was taken of.
func TestExplainFile(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "shop.yaml"), []byte(shop), 0o644); err != nil {
		t.Fatal(err)
	}
	m, problems := file.Load(dir, file.Options{Node: "n1", Domain: "mesh.example", RedirectAllDefault: true})
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	dump := file.Dump(m)
	path := filepath.Join(t.TempDir(), "mesh.snapshot")
	if err := os.WriteFile(path, dump, 0o644); err != nil {
		t.Fatal(err)
	}
	const flow = "shop/web > proxy http1 host=cart.shop.mesh.example:8080"
	_, want, _ := aetherctl(t, "", "explain", "--config", dir, "--node", "n1", "--mesh-domain", "mesh.example", flow)
	if !strings.HasPrefix(want, "forward shop/cart:8080 ") {
		t.Fatal(want)
	}
	if status, got, errs := aetherctl(t, "", "explain", "--config", path, flow); status != 0 || got != want {
		t.Errorf("of a file: status %d\n%s%s", status, got, errs)
	}
	if status, got, errs := aetherctl(t, string(dump), "explain", "--config", "-", flow); status != 0 || got != want {
		t.Errorf("of standard input: status %d\n%s%s", status, got, errs)
	}
	if status, got, _ := aetherctl(t, "", "explain", "--config", path, "--mesh-domain", "other.example", flow); status != 0 || !strings.HasPrefix(got, "refuse 404 ") {
		t.Errorf("a flag is stronger than the file: status %d\n%s", status, got)
	}
}

// TestBigSnapshot: one file may be larger than the source takes a file to be.
func TestBigSnapshot(t *testing.T) {
	var b strings.Builder
	b.WriteString(shop)
	for b.Len() < 20<<20 {
		fmt.Fprintf(&b, "---\n# %s\n", strings.Repeat("a big mesh has many pods ", 4000))
	}
	b.WriteString("---\napiVersion: v1\nkind: Pod\nmetadata:\n  namespace: shop\n  name: late-1\n  labels: {aether.io/managed: \"true\"}\n" +
		"spec: {serviceAccountName: late, nodeName: n1}\nstatus: {podIP: 10.1.1.99, phase: Running}\n")
	status, out, errs := aetherctl(t, b.String(), "explain", "--config", "-", "shop/late > 10.96.0.10:9000")
	if status != 0 || errs != "" || !strings.HasPrefix(out, "forward shop/cart:9000 ") {
		t.Errorf("status %d\n%s%s", status, out, errs)
	}
}

// TestExplainErrors: what, where, and how to mend it.
func TestExplainErrors(t *testing.T) {
	dir, empty := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "shop.yaml"), []byte(shop), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"--config", dir, "shop/wob > 10.96.0.10:8080"}, 1, "shop/wob has no pod in " + dir + "; the ServiceAccounts that have are shop/cart, shop/web. Name one of them, or with --node the node to explain for"},
		{[]string{"--config", dir, "--node", "n1", "shop/wob > 10.96.0.10:9000"}, 0, "no such pod on this node"},
		{[]string{"--config", filepath.Join(dir, "none"), "shop/web > 10.96.0.10:8080"}, 1, "none: no such file or directory"},
		{[]string{"--config", empty, "shop/web > 10.96.0.10:8080"}, 1, "there is no pod and no service of the mesh in it"},
		{[]string{"--config", dir, "--admin", "127.0.0.1:1", "shop/web > 10.96.0.10:8080"}, 2, "--config and --admin exclude each other"},
		{[]string{"--node", "n1", "shop/web > 10.96.0.10:8080"}, 2, "--node is for --config; a running node knows it"},
		{[]string{"--config", dir, "shop/web > 10.96.0.10:8080", "GET"}, 2, "the form is: METHOD authority/path"},
		{[]string{"--config", dir, "shop/web > nowhere"}, 2, `destination "nowhere" is neither an address with a port nor the word proxy`},
	} {
		status, out, errs := aetherctl(t, "", append([]string{"explain"}, tt.args...)...)
		if status != tt.status || !strings.Contains(out+errs, tt.want) {
			t.Errorf("%v: status %d, want %d with %q; printed:\n%s%s", tt.args, status, tt.status, tt.want, out, errs)
		}
	}
}

// TestExplainText is the whole answer to a refused request, as people read it.
func TestExplainText(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "shop.yaml"), []byte(shop), 0o644); err != nil {
		t.Fatal(err)
	}
	const flow = "shop/web > 10.96.0.10:8080 http1 host=cart:9090"
	_, out, _ := aetherctl(t, "", "explain", "--config", dir, flow)
	steps := regexp.MustCompile(`(?m)^ +\d+\. .*\n`)
	if n := len(steps.FindAllString(out, -1)); n < 5 {
		t.Errorf("%d steps:\n%s", n, out)
	}
	const want = `refuse 421 (port-mismatch Service shop/cart)
the client reads: port-mismatch: service shop/cart serves 8080 (http), 9000 (tcp); address it by one of these ports
why: the port that was dialled and the port in Host are different; dial the port that Host names, or leave it out of Host
ports of shop/cart: 8080 (http), 9000 (tcp)
names: cart, cart.shop, cart.shop.svc, cart.shop.svc.cluster.local, cart.shop.aether.internal
would work: 'shop/web > 10.96.0.10:8080 http1 host=cart' 'GET cart/'
            'shop/web > 10.96.0.10:9000'
`
	if got := steps.ReplaceAllString(out, ""); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	_, out, _ = aetherctl(t, "", "explain", "--config", dir, "-o", "json", flow)
	var e admin.Explanation
	if err := json.Unmarshal([]byte(out), &e); err != nil || strings.Count(out, "\n") != 1 {
		t.Fatalf("%v: %s", err, out)
	}
	if e.Action != "refuse" || e.Reason != "port-mismatch" || e.Status != 421 || e.Rule != "Service shop/cart" || e.Advice == nil || len(e.Advice.Try) != 2 {
		t.Errorf("%+v", e)
	}
}

func TestAskNode(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/explain" && strings.Contains(r.FormValue("flow"), "host=") && r.FormValue("request") != "GET cart:8080/" {
			http.Error(w, "no request was made of the flow's host", http.StatusBadRequest)
			return
		}
		fmt.Fprintln(w, "asked", r.URL.RequestURI())
	}))
	defer srv.Close()
	address := strings.TrimPrefix(srv.URL, "http://")
	for _, tt := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"explain", "shop/web > 10.96.0.10:8080 http1 host=cart:8080"}, 0, "asked /explain?"},
		{[]string{"explain", "shop/web > 10.96.0.10:8080 http1 host=other"}, 1, "no request was made"},
		{[]string{"why", "-n", "3", "--bad"}, 0, "asked /why?bad=1&format=text&n=3"},
		{[]string{"why", "--pod", "shop/web", "--reason", "idle,loop", "--service", "shop/cart"}, 0, "asked /why?format=text&n=20&pod=shop%2Fweb&reason=idle%2Cloop&service=shop%2Fcart"},
		{[]string{"why", "-o", "json"}, 1, "its answer is no list of decisions"},
		{[]string{"explain", "-o", "json", "shop/web > 10.96.0.10:8080"}, 0, "asked /explain?flow=shop%2Fweb+%3E+10.96.0.10%3A8080&format=json"},
		{[]string{"status"}, 0, "asked /status?format=text"},
		{[]string{"status", "-o", "json"}, 0, "asked /status?format=json"},
		{[]string{"status", "-o", "yaml"}, 2, "the formats are text and json"},
		{[]string{"wait"}, 0, "asked /wait?for=synced&timeout=30s"},
		{[]string{"wait", "--for=seq=12", "--timeout", "5s"}, 0, "asked /wait?for=seq%3D12&timeout=5s"},
		{[]string{"wait", "--for=nothing"}, 2, `--for: "nothing" is neither synced nor seq=N`},
		{[]string{"wait", "--timeout", "-1s"}, 2, "--timeout -1s"},
		{[]string{"snapshot"}, 0, "asked /snapshot"},
	} {
		status, out, errs := aetherctl(t, "", append(tt.args, "--admin", address)...)
		if status != tt.status || !strings.Contains(out+errs, tt.want) {
			t.Errorf("%v: status %d, want %d with %q; printed:\n%s%s", tt.args, status, tt.status, tt.want, out, errs)
		}
	}
	srv.Close()
	if status, _, errs := aetherctl(t, "", "status", "--admin", address); status != 1 || !strings.Contains(errs, "network namespace") {
		t.Errorf("nobody answers: status %d: %s", status, errs)
	}
}
