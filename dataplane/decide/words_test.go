package decide_test

import (
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
)

// TestExplainSteps: every step that can decide says so in the trace: what lost and
// why, and of a refusal what would have worked.
func TestExplainSteps(t *testing.T) {
	m := modeltest.Mesh(t, `
service shop/cart 10.96.0.1
pods shop/cart 8080,9000=tcp pod=a ip=10.1.0.1 meta=version:v1
pods shop/cart 8080,9000=tcp pod=b ip=10.1.0.2 meta=version:v2
service pay/cart 10.96.0.2
pods pay/cart 9090
service shop/cold 10.96.0.3 8080
catalog shop/cold
user shop/reviews-v1 10.96.0.4 80:8080
local shop/web
local shop/cart 8080,9000=tcp cid=in
filter shop/nobody rbac policy=p;ns:none
filter shop/audit rbac audit policy=p;ns:none
filter shop/ask authz
filter shop/in scope=inbound target=cart rbac deny policy=private;ns:shop;path:/private
route shop/cart cart:8080
rule match=regex:/v[0-9]+ to=cold:8080
rule match=prefix:/q&q:x=1 use=ask
rule match=prefix:/f&hr:version=v[0-9] use=audit
rule match=prefix:/admin use=nobody
grpcroute shop/calls pay/cart
rule match=grpcr:a.*/Say
tlsroute shop/tls cart sni=db.example
rule to=cart:9000
tcproute shop/raw cart
rule to=cart:9000
rule to=pay/cart:9090
`)
	snap, _ := compile.Compile(m)
	other := *m
	other.Semantics = model.GatewayAPI
	gateway, _ := compile.Compile(&other)
	for _, tt := range []struct {
		question string
		gateway  bool
		steps    []string
	}{
		{"shop/web > 10.96.0.1:8080 | GET cart/x", false, []string{
			`HTTPRoute shop/cart rule 1 match 1: path "/x" is not like "/v[0-9]+"`,
			"no rule matches: the port itself",
			"shop/cart:8080: 2 endpoints, SNI 8080",
		}},
		{"shop/web > 10.96.0.4:80 | GET reviews-v1/", false, []string{
			"10.96.0.4 is the address of Service shop/reviews-v1, which has no pods in the mesh: none has the ServiceAccount reviews-v1 (contract 1.1)",
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart/v1", false, []string{
			"HTTPRoute shop/cart rule 1 match 1: matches",
			"shop/cold is in the mesh's catalog and its rows are not here yet (contract 4.6)",
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart/q?x=2", false, []string{`HTTPRoute shop/cart rule 2 match 1: query parameter x is not "1"`}},
		{"shop/web > 10.96.0.1:8080 | GET cart/q?x=1", false, []string{"HTTPFilter shop/ask: the authorization service is asked"}},
		{"shop/web > 10.96.0.1:8080 | GET cart/f h:version=1", false, []string{`HTTPRoute shop/cart rule 3 match 1: field version is not like "v[0-9]"`}},
		{"shop/web > 10.96.0.1:8080 | GET cart/f h:version=v1", false, []string{
			"HTTPFilter shop/audit: no policy holds for spiffe://td/ns/shop/sa/web: it denies, were it not for audit only",
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart/admin", false, []string{
			"HTTPFilter shop/nobody: no policy holds for spiffe://td/ns/shop/sa/web: it denies",
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart//admin", false, []string{
			`path "//admin" may be read as "/admin": which rule is that?`,
			"the two spellings choose different rules (the port itself, HTTPRoute shop/cart rule 4), and policy is in force on one of them",
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart/%2525252561dmin", false, []string{`path "/%2525252561dmin" holds escapes more than 4 deep`}},
		{"shop/web > 10.96.0.1:8080 | GET cart/ h:x-aether-pod=b", false, []string{`pinned to pod "b": b at 10.1.0.2:18008`}},
		{"shop/web > 10.96.0.1:8080 | GET cart/ h:x-aether-ip=10.1.0.9", false, []string{
			`pinned to address "10.1.0.9": no healthy endpoint is that, and none other will do (contract 5.10)`,
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart/ h:x-aether-subset-version=v2", false, []string{`subset version="v2": 1 of 2 endpoints`}},
		{"shop/web > 10.96.0.1:8080 | GET cart/ h:x-aether-subset-version=v2 h:x-aether-pod=a", false, []string{
			"a pin and a subset together select nothing: balanced over all (contract 5.10)",
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart/x", true, []string{
			`the dialled address is Service shop/cart's (generated): it is meant, whatever the authority "cart" says (routeSemantics GatewayAPI)`,
			"no rule matches, and with routes attached that is a 404 (routeSemantics GatewayAPI)",
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart:9999/", false, []string{
			"dialled 8080, an HTTP port of it, and the authority names 9999",
			"what would work: cart.shop.aether.internal, cart.shop.svc.cluster.local, cart.shop.svc, cart.shop, cart with port 8080 (http), 9000 (tcp)",
		}},
		{"shop/web > proxy | GET cart.pay/", false, []string{
			"the authority names no port, which means 80 here, and that is no HTTP port of it",
			"what would work: cart.pay.aether.internal, cart.pay.svc.cluster.local, cart.pay.svc, cart.pay with port 9090 (http)",
		}},
		{"shop/web > proxy | GET cart.shop:9000/", false, []string{"the authority asks for port 9000, which is not HTTP"}},
		{"shop/web > proxy | GET cart.nosuch/", false, []string{
			`authority "cart.nosuch": names no service for this caller`,
			"Service pay/cart is there: what would work: cart.pay.aether.internal, cart.pay.svc.cluster.local, cart.pay.svc, cart.pay with port 9090 (http)",
		}},
		{"shop/web > proxy | GET nosuch.shop/", false, []string{`no service is called "nosuch" in any namespace`}},
		{"shop/web > 10.96.0.2:9090 | GET cart.pay/x", false, []string{"routes of the caller's own namespace shop are attached to the port: they stand in the place of the producer's (GEP-1426)",
			`GRPCRoute shop/calls rule 1 match 1: path "/x" is not a call of service like`}},
		{"shop/web > 10.96.0.1:9000", false, []string{"TLSRoutes are in force on the port"}},
		{"shop/web > 10.96.0.1:9000 tls host=db.example", false, []string{`server name "db.example" is TLSRoute shop/tls's`}},
		{"shop/web > 10.96.0.1:9000 tls host=x.example", false, []string{
			`server name "x.example" is in no TLSRoute of it`,
			"the port is raw TCP: what the bytes say does not matter",
			"TCPRoute shop/raw: shop/cart:9000 drawn out of 2 backends by weight",
		}},
		{"shop/cart@in < 8080 peer=spiffe://td/ns/shop/sa/web | GET cart/private", false, []string{
			"HTTPFilter shop/in: policy private holds for spiffe://td/ns/shop/sa/web: it denies",
		}},
		{"shop/cart@in < 8080 peer=spiffe://td/ns/shop/sa/web | GET cart/x/../private", false, []string{
			`path "/x/../private" holds an element "..", a slash hidden behind ";" or a NUL, which applications read in different ways, and policy is in force on the pod`,
		}},
		{"shop/cart@in < 8080 peer=spiffe://td/ns/shop/sa/web | GET cart//private", false, []string{
			`HTTPFilter shop/in allows one of the spellings "//private" and "/private" only`,
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart/x/../y", false, []string{
			`path "/x/../y" holds an element "..", a slash hidden behind ";" or a NUL, which applications read in different ways, and policy is in force on the port`,
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart/f h:version=" + strings.Repeat("1", 8193), false, []string{
			"HTTPRoute shop/cart rule 3 match 1: field version has more than the 8192 bytes that an expression is run on",
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart/q?x=1" + strings.Repeat("&y", 256), false, []string{
			"HTTPRoute shop/cart rule 2 match 1: the query has more than 256 parameters",
		}},
		{"shop/web > 10.96.0.1:8080 | GET cart/" + strings.Repeat("v", 8193), false, []string{
			"HTTPRoute shop/cart rule 1 match 1: the path has 8194 bytes, more than the 8192 that an expression is run on",
		}},
		{"shop/cart@in < 7777", false, []string{"Pod shop/cart-0 declares no HTTP or TCP port 7777; it declares 8080 (http), 9000 (tcp)"}},
	} {
		s := snap
		if tt.gateway {
			s = gateway
		}
		flow, request, has := strings.Cut(tt.question, " | ")
		f, err := model.ParseFlow(flow)
		if err != nil {
			t.Fatal(err)
		}
		var r *httpmsg.Head
		if has {
			h, err := model.ParseRequest(request)
			if err != nil {
				t.Fatal(err)
			}
			r = &h
		}
		_, tr := decide.Explain(s, &f, r)
		all := ""
		for _, step := range tr.Steps {
			all += step.Text + "\n"
		}
		for _, want := range tt.steps {
			if !strings.Contains(all, want) {
				t.Errorf("%s: nothing says\n%s\nbut\n%s", tt.question, want, all)
			}
		}
	}
}
