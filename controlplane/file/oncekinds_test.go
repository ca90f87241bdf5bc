package file

import (
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/controlplane/input"
	"aether/dataplane/model"
)

// kindFlaws are single flaws of objects of each kind: what of the good document is replaced, by what, and where and what the
// one problem has to say. Compiling knows no line.
var kindFlaws = []struct {
	object, good string
	flaws        [][4]string // old, new, where, what; empty: no problem
}{
	{"Pod shop/cart-1", cartPod, [][4]string{
		{`ports: "8080"`, `ports: "80800"`, "x.yaml:3", `annotation endpoint.aether.io/ports: "80800": entry "80800": "80800" is too large`},
		{`ports: "8080"`, `ports: "8080=grpc"`, "x.yaml:3", `annotation endpoint.aether.io/ports: "8080=grpc": entry "8080=grpc": unknown protocol "grpc"`},
		{`ports: "8080"`, `ports: "18081"`, "x.yaml:3", `annotation endpoint.aether.io/ports: "18081": entry "18081": port 18081 is reserved by the mesh (its listeners have 1800`},
		{`ports: "8080"`, `port: "x"`, "x.yaml:3", `annotation endpoint.aether.io/port: "x": "x" is not a number`},
		{`ports: "8080"`, `weight: "-1"`, "x.yaml:3", `annotation endpoint.aether.io/weight: "-1": "-1" is not a number`},
		{`ports: "8080"`, `protocol: "udpp"`, "x.yaml:3", `annotation endpoint.aether.io/protocol: "udpp": unknown protocol "udpp"`},
		{`ports: "8080"`, `health-check-mode: "x"`, "", ""},
		{`ports: "8080"`, `uds-socket: "x"`, "x.yaml:3", `annotation endpoint.aether.io/uds-socket: "x": not <volume>/<file>, two plain names with one slash between: delivered ov`},
		{`endpoint.aether.io/ports: "8080"`, `aether.io/spiffe-id: "x"`, "x.yaml:3", `annotation aether.io/spiffe-id: "x": spiffeid: "x" does not begin with spiffe://`},
		{`endpoint.aether.io/ports: "8080"`, `config.aether.io/upstreams: "a/b/c"`, "x.yaml:3", `annotation config.aether.io/upstreams: "a/b/c": entry "a/b/c"`},
		{`endpoint.aether.io/ports: "8080"`, `capture.aether.io/redirect-all: "yes"`, "x.yaml:3", `annotation capture.aether.io/redirect-all: "yes"`},
		{`endpoint.aether.io/ports: "8080"`, `capture.aether.io/exclude-outbound-ports: "a"`, "x.yaml:3", `annotation capture.aether.io/exclude-outbound-ports: "a": not a port`},
		{`endpoint.aether.io/ports: "8080"`, `capture.aether.io/exclude-outbound-ip-ranges: "a"`, "x.yaml:3", `annotation capture.aether.io/exclude-outbound-ip-ranges: "a": not an address range`},
		{`endpoint.aether.io/ports: "8080"`, `metadata.endpoint.aether.io/A_b: "a"`, "", ""},
		{`endpoint.aether.io/ports: "8080"`, `endpoint.aether.io/prot: "a"`, "x.yaml:3", `annotation endpoint.aether.io/prot: "a": no such annotation: the ones that exist are endpoint.aether.io/port, endpoint.a`},
		{`endpoint.aether.io/ports: "8080"`, `file.aether.io/nets: "a"`, "x.yaml:3", `annotation file.aether.io/nets does not exist: a Pod has file.aether.io/netns, file.aether.io/container-id, file.aether.`},
		{`serviceAccountName: cart`, `serviceAccountName: CART`, "x.yaml:4", `service account "CART" cannot name a mesh service: a lowercase RFC 1123 label must consist of lower case alphanumeric ch`},
		{`serviceAccountName: cart`, `serviceAccount_Name: cart`, "x.yaml:4", `unknown field "spec.serviceAccount_Name" (did you mean "serviceAccountName"?)`},
		{`ip: 10.244.1.11`, `ip: 10.244.1.256`, "x.yaml:5", `pod address "10.244.1.256": not an IP address`},
		{`containers: [{name: cart}]`, `containers: 7`, "x.yaml:4", `field "spec.containers" is a number where a list is expected`},
		{`phase: Running`, `phase: Runing`, "", ""},
		{`metadata: {name: cart-1`, `metadata: {name: cart_1`, "x.yaml:3", `metadata.name "cart_1" cannot be a name: a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characte`},
	}},
	{"Service shop/web", "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80, targetPort: 8080}], selector: {app: web}}\n", [][4]string{
		{`port: 80,`, `port: 80000,`, "x.yaml:10", `port 80000 is no port`},
		{`port: 80,`, `port: x,`, "x.yaml:10", `field "spec.ports[0].port" is text where a whole number is expected`},
		{`targetPort: 8080`, `targetPort: 80800`, "x.yaml:10", `targetPort 80800 is no port`},
		{`targetPort: 8080`, `targetPort: web_http`, "x.yaml:10", `targetPort "web_http" is no port's name: must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)`},
		{`targetPort: 8080`, `targetPort: http`, "x.yaml:10", `port 80: targetPort "http" names nothing: no pod that the Service selects has a container port of that name`},
		{`targetPort: 8080`, `protocol: QUIC`, "x.yaml:10", `port 80: protocol "QUIC" does not exist`},
		{`clusterIP: 10.96.0.1`, `clusterIP: 10.96.0.256`, "x.yaml:10", `cluster address "10.96.0.256": not an IP address`},
		{`ports: [{port: 80, targetPort: 8080}]`, `ports: 7`, "x.yaml:10", `field "spec.ports" is a number where a list is expected`},
		{`ports: [{port: 80, targetPort: 8080}]`, `ports: [{port: 80}, {port: 80}]`, "x.yaml:10", `port 80 stands twice`},
		{`selector: {app: web}`, `selectors: {app: web}`, "x.yaml:10", `unknown field "spec.selectors" (did you mean "selector"?)`},
		{`selector: {app: web}`, `type: Nope`, "", ""},
	}},
	{"HTTPFilter shop/f", "apiVersion: config.aether.io/v1\nkind: HTTPFilter\nmetadata: {name: f, namespace: shop}\nspec: {scope: SCOPE_CHAIN, targetRefs: [{group: \"\", kind: Service, name: cart}], rbac: {action: DENY, policies: [{name: p, principals: [{namespace: x}]}]}}\n", [][4]string{
		{`DENY`, `DNY`, "x.yaml:10", `spec.rbac.action "DNY" does not exist`},
		{`SCOPE_CHAIN`, `CHAIN`, "x.yaml:10", `spec.scope "CHAIN" does not exist`},
		{`kind: Service`, `kind: Gateway`, "x.yaml:10", `targetRefs[0] is a "Gateway" of group ""`},
		{`namespace: x}`, `namespac: x}`, "x.yaml:10", `unknown field "spec.rbac.policies[0].principals[0].namespac" (did you mean "namespace"?)`},
		{`principals: [{namespace: x}]`, `principals: []`, "x.yaml:10", `rbac.policies[0]: no principals`},
		{`principals: [{namespace: x}]`, `principals: [{spiffeId: x}]`, "x.yaml:10", `rbac.policies[0].principals[0]: spiffeid: "x" does not begin with spiffe://`},
		{`policies: [`, `policy: [`, "x.yaml:10", `unknown field "spec.rbac.policy"`},
		{`rbac: {`, `rbca: {`, "x.yaml:10", `unknown field "spec.rbca" (did you mean "rbac"?)`},
		{`name: p,`, `name: 7,`, "x.yaml:10", `field "spec.rbac.policies[0].name" is a number where text is expected`},
		{`targetRefs: [{group: "", kind: Service, name: cart}]`, `targetRefs: 7`, "x.yaml:10", `field "spec.targetRefs" is a number where a list is expected`},
	}},
	{"EndpointPolicy shop/p", "apiVersion: config.aether.io/v1\nkind: EndpointPolicy\nmetadata: {name: p, namespace: shop}\nspec: {targetRef: {group: \"\", kind: Service, name: cart}, udsSocket: app/http.sock}\n", [][4]string{
		{`udsSocket: app/http.sock`, `udsSocket: ../x`, "x.yaml:10", `spec.udsSocket "../x": not <volume>/<file>, two plain names with one slash between`},
		{`udsSocket: app/http.sock`, `udsSoket: app/http.sock`, "x.yaml:10", `unknown field "spec.udsSoket" (did you mean "udsSocket"?)`},
		{`kind: Service`, `kind: Pod`, "x.yaml:10", `targetRef is a "Pod" of group ""`},
		{`name: cart}`, `name: CART}`, "x.yaml:10", `targetRef: name "CART" cannot be a Service's name: a lowercase RFC 1123 label must consist of lower case alphanumeric ch`},
		{`targetRef:`, `targetRefs:`, "x.yaml:10", `unknown field "spec.targetRefs" (did you mean "targetRef"?)`},
	}},
	{"ReferenceGrant shop/g", "apiVersion: gateway.networking.k8s.io/v1beta1\nkind: ReferenceGrant\nmetadata: {name: g, namespace: shop}\nspec: {from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: other}], to: [{group: \"\", kind: Service}]}\n", [][4]string{
		{`kind: HTTPRoute`, `kind: 7`, "x.yaml:10", `field "spec.from[0].kind" is a number where text is expected`},
		{`namespace: other`, `namespace: 7`, "x.yaml:10", `field "spec.from[0].namespace" is a number where text is expected`},
		{`from: [`, `form: [`, "x.yaml:10", `unknown field "spec.form" (did you mean "from"?)`},
		{`to: [{group: "", kind: Service}]`, `to: 7`, "x.yaml:10", `field "spec.to" is a number where a list is expected`},
		{`to: [{group: "", kind: Service}]`, `to: []`, "", ""},
	}},
	{"GRPCRoute shop/r", "apiVersion: gateway.networking.k8s.io/v1\nkind: GRPCRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{group: \"\", kind: Service, name: cart}], rules: [{matches: [{method: {service: a.B, method: C}}], backendRefs: [{name: cart, port: 8080}]}]}\n", [][4]string{
		{`service: a.B`, `service: "a/B"`, "x.yaml:10", `rules[0]: matches[0]: method.service "a/B" is no name of gRPC: letters, digits, _ and, in a service, dots`},
		{`service: a.B`, `type: Nope, service: a.B`, "x.yaml:10", `rules[0]: matches[0]: method.type "Nope" does not exist`},
		{`service: a.B`, `type: RegularExpression, service: "("`, "x.yaml:10", `rules[0]: matches[0]: method.service pattern "(" is no regular expression`},
		{`matches: [`, `match: [`, "x.yaml:10", `unknown field "spec.rules[0].match" (did you mean "matches"?)`},
		{`matches: [`, `filters: [{type: Nope}], matches: [`, "x.yaml:10", `rules[0]: filters[0]: filter Nope does not exist: the filters that may stand here: RequestHeaderModifier, ResponseHeader`},
		{`matches: [`, `timeouts: {request: 7}, matches: [`, "x.yaml:10", `unknown field "spec.rules[0].timeouts"`},
		{`port: 8080`, `port: 80800`, "x.yaml:10", `rules[0].backendRefs[0]: port 80800 is no port`},
		{`name: cart, port`, `name: nowhere, port`, "", `GRPCRoute shop/r rule 1: backendRef shop/nowhere port 8080: BackendNotFound: no such service`},
		{`kind: Service, name: cart}]`, `kind: Nope, name: cart}]`, "x.yaml:10", `parentRefs[0] is a Nope: this source attaches routes to Services (group "", kind Service) and leaves this parent alone`},
		{`rules: [`, `hostnames: [a_b], rules: [`, "x.yaml:10", `hostnames mean nothing on a route of a Service and are ignored: the Service's names are the route's`},
	}},
	{"TCPRoute shop/r", "apiVersion: gateway.networking.k8s.io/v1alpha2\nkind: TCPRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{group: \"\", kind: Service, name: cart}], rules: [{backendRefs: [{name: cart, port: 5432}]}]}\n", [][4]string{
		{`port: 5432`, `port: 0`, "x.yaml:10", `rules[0].backendRefs[0]: port 0 is no port`},
		{`name: cart, port`, `name: nowhere, port`, "", `TCPRoute shop/r rule 1: backendRef shop/nowhere port 5432: BackendNotFound: no such service`},
		{`name: cart, port: 5432`, `name: cart, namespace: other, port: 5432`, "x.yaml:10", `rules[0].backendRefs[0]: RefNotPermitted: no ReferenceGrant in namespace other lets TCPRoutes of namespace shop name Ser`},
		{`backendRefs: [`, `backendRef: [`, "x.yaml:10", `unknown field "spec.rules[0].backendRef" (did you mean "backendRefs"?)`},
		{`rules: [`, `rules: [{}, `, "", ""},
		{`rules: [{backendRefs: [{name: cart, port: 5432}]}]`, `rules: 7`, "x.yaml:10", `field "spec.rules" is a number where a list is expected`},
	}},
	{"TLSRoute shop/r", "apiVersion: gateway.networking.k8s.io/v1alpha2\nkind: TLSRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{group: \"\", kind: Service, name: cart}], hostnames: [a.example], rules: [{backendRefs: [{name: cart, port: 5432}]}]}\n", [][4]string{
		{`a.example`, `a_example`, "x.yaml:10", `hostnames[0]: "a_example" is no host name`},
		{`[a.example]`, `7`, "x.yaml:10", `field "spec.hostnames" is a number where a list is expected`},
		{`port: 5432`, `port: x`, "x.yaml:10", `field "spec.rules[0].backendRefs[0].port" is text where a whole number is expected`},
		{`name: cart, port`, `name: nowhere, port`, "", `TLSRoute shop/r rule 1: backendRef shop/nowhere port 5432: BackendNotFound: no such service`},
		{`backendRefs: [`, `backendRef: [`, "x.yaml:10", `unknown field "spec.rules[0].backendRef" (did you mean "backendRefs"?)`},
	}},
	{"HTTPRoute shop/r", "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{group: \"\", kind: Service, name: cart}], rules: [{backendRefs: [{name: cart, port: 8080}]}]}\n", [][4]string{
		{`kind: Service, name: cart}]`, `kind: Nope, name: cart}]`, "x.yaml:10", `parentRefs[0] is a Nope: this source attaches routes to Services (group "", kind Service) and leaves this parent alone`},
		{`kind: Service, name: cart}]`, `kind: Service, nam: cart}]`, "x.yaml:10", `unknown field "spec.parentRefs[0].nam" (did you mean "name"?)`},
		{`kind: Service, name: cart}]`, `kind: Service, name: cart, port: 70000}]`, "x.yaml:10", `parentRefs[0]: port 70000 is no port`},
		{`rules: [`, `hostnames: 7, rules: [`, "x.yaml:10", `field "spec.hostnames" is a number where a list is expected`},
		{`rules: [`, `rule: [`, "x.yaml:10", `unknown field "spec.rule" (did you mean "rules"?)`},
		{`rules: [{`, `rules: [7, {`, "x.yaml:10", `field "spec.rules[0]" is a number where a map of fields is expected`},
	}},
	{"MeshConfig aether-system/mesh", "apiVersion: config.aether.io/v1\nkind: MeshConfig\nmetadata: {name: mesh, namespace: aether-system}\nspec: {sameNode: inProcess}\n", [][4]string{
		{`inProcess`, `inproc`, "x.yaml:10", `spec.sameNode "inproc" does not exist`},
		{`sameNode: inProcess`, `hopSource: x`, "x.yaml:10", `spec.hopSource "x" does not exist`},
		{`sameNode: inProcess`, `sameNod: inProcess`, "x.yaml:10", `unknown field "spec.sameNod" (did you mean "sameNode"?)`},
		{`sameNode: inProcess`, `accessLogs: 7`, "x.yaml:10", `unknown field "spec.accessLogs"`},
	}},
}

// TestOneProblemAFlaw: a flaw of an object of any kind is one problem, which names the object, the line and the field,
// and says what is wrong there; a value that the contract takes for its default is none.
func TestOneProblemAFlaw(t *testing.T) {
	pod := strings.NewReplacer(`ports: "8080"`, `ports: "8080,5432=tcp"`, `labels: {`, `uid: u1, labels: {`, `containers: [`,
		`volumes: [{name: app, csi: {driver: csi.aether.io}}], containers: [`).Replace(cartPod) + "---\n"
	problems := func(text string) []model.Problem {
		m, reported := loadText(t, text)
		_, compiled := compile.Compile(m)
		return input.Problems(reported, compiled)
	}
	for _, k := range kindFlaws {
		text := pod + k.good
		if strings.HasPrefix(k.object, "Pod ") {
			text = k.good
		}
		if got := problems(text); len(got) > 0 {
			t.Errorf("%s as it is: %v", k.object, got)
			continue
		}
		for _, f := range k.flaws {
			if strings.Count(text, f[0]) == 0 {
				t.Fatalf("%s has no %q", k.object, f[0])
			}
			got := problems(strings.TrimSuffix(text, k.good) + strings.Replace(k.good, f[0], f[1], 1))
			switch object := k.object; {
			case f[3] == "":
				if len(got) > 0 {
					t.Errorf("%s with %q: %v, want no problem", k.object, f[1], got)
				}
			case len(got) != 1 || got[0].Where != f[2] || !strings.Contains(got[0].Reason, f[3]):
				t.Errorf("%s with %q: %+v, want one at %q that says %q", k.object, f[1], got, f[2], f[3])
			case got[0].Object != object && !strings.Contains(f[1], "cart_1"):
				t.Errorf("%s with %q: a problem of %s", k.object, f[1], got[0].Object)
			}
		}
	}
}
