package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
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

func TestAskNode(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/explain" && r.FormValue("request") != "GET cart:8080/" {
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
		{[]string{"why", "-n", "3", "--bad"}, 0, "asked /why?n=3&bad=1"},
		{[]string{"status"}, 0, "asked /status"},
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
