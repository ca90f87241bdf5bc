package decide_test

import (
	"slices"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
)

// TestExplainInProcess: explain says which endpoints are met in process, and says nothing where none
// is: the address and the identity have to be one pod's of this node, and sameNode has to say so.
func TestExplainInProcess(t *testing.T) {
	const pods = `
service shop/cart 10.96.0.1
pods shop/cart 8080,9000=tcp ip=10.1.0.8 pod=cart-1
pods shop/cart 8080,9000=tcp ip=10.1.0.9 pod=cart-2
local shop/web
`
	const here = "in process, not over mTLS (sameNode inProcess): cart-1 (10.1.0.8) of this node"
	for _, tt := range []struct {
		name, mesh, flow, request string
		want                      bool
	}{
		{"one of two", "samenode inprocess\nlocal shop/cart 8080 pod=cart-1 ip=10.1.0.8 cid=c1", "shop/web > 10.96.0.1:8080", "GET cart/", true},
		{"pinned", "samenode inprocess\nlocal shop/cart 8080 pod=cart-1 ip=10.1.0.8 cid=c1", "shop/web > 10.96.0.1:8080", "GET cart/ h:x-aether-ip=10.1.0.8", true},
		{"pinned to the other", "samenode inprocess\nlocal shop/cart 8080 pod=cart-1 ip=10.1.0.8 cid=c1", "shop/web > 10.96.0.1:8080", "GET cart/ h:x-aether-ip=10.1.0.9", false},
		{"mTLS", "samenode mtls\nlocal shop/cart 8080 pod=cart-1 ip=10.1.0.8 cid=c1", "shop/web > 10.96.0.1:8080", "GET cart/", false},
		{"by default", "local shop/cart 8080 pod=cart-1 ip=10.1.0.8 cid=c1", "shop/web > 10.96.0.1:8080", "GET cart/", false},
		{"another address", "samenode inprocess\nlocal shop/cart 8080 pod=cart-1 ip=10.1.0.7 cid=c1", "shop/web > 10.96.0.1:8080", "GET cart/", false},
		{"another identity", "samenode inprocess\nlocal shop/other 8080 pod=cart-1 ip=10.1.0.8 cid=c1", "shop/web > 10.96.0.1:8080", "GET cart/", false},
		{"two pods with one address", "samenode inprocess\nlocal shop/cart 8080 pod=cart-1 ip=10.1.0.8 cid=c1\nlocal shop/cart 8080 pod=old ip=10.1.0.8 cid=c2", "shop/web > 10.96.0.1:8080", "GET cart/", false},
		{"raw TCP", "samenode inprocess\nlocal shop/cart 9000=tcp pod=cart-1 ip=10.1.0.8 cid=c1", "shop/web > 10.96.0.1:9000", "", false},
	} {
		s, problems := compile.Compile(modeltest.Mesh(t, pods+tt.mesh))
		if len(problems) > 0 {
			t.Fatalf("%s: %v", tt.name, problems)
		}
		f, err := model.ParseFlow(tt.flow)
		if err != nil {
			t.Fatal(err)
		}
		_, trace := decide.Explain(s, &f, nil)
		if tt.request != "" {
			r, err := model.ParseRequest(tt.request)
			if err != nil {
				t.Fatal(err)
			}
			_, trace = decide.Explain(s, &f, &r)
		}
		if got := slices.ContainsFunc(trace.Steps, func(s decide.Step) bool { return s.Text == here }); got != tt.want {
			t.Errorf("%s: says so: %v; steps %+v", tt.name, got, trace.Steps)
		}
	}
}
