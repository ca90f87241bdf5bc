package file

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/yaml"

	"aether/controlplane/compile"
	"aether/controlplane/gamma"
	"aether/controlplane/input"
	"aether/dataplane/model"
)

// kindFlaws are single flaws of objects of each kind: what of the good document is replaced, by what, where its one
// problem is, and how that begins, which is the field and what is wrong there. Nothing: there is no problem.
//
// A | begins a new line, at which the problem is; "up": it is at the line above, where what it is in begins; "none": at
// none, for only compiling sees it. "file": an API server's object cannot have the flaw, or it is nobody's there, or it is
// said otherwise. "of": the problem is of another object.
var kindFlaws = []struct {
	object, good string
	flaws        [][4]string
}{
	{"Pod shop/cart-1", cartPod, [][4]string{
		{`endpoint.aether.io/ports: "8080"`, `endpoint.aether.io/ports: |"80800"`, "up", `annotation endpoint.aether.io/ports: "80800": entry "80800": "80800" is too large: write <port> or <port>=<h1|`},
		{`endpoint.aether.io/ports: "8080"`, `endpoint.aether.io/ports: |"8080=grpc"`, "up", `annotation endpoint.aether.io/ports: "8080=grpc": entry "8080=grpc": unknown protocol "grpc": write h2, which `},
		{`endpoint.aether.io/ports: "8080"`, `endpoint.aether.io/ports: |"18081"`, "up", `annotation endpoint.aether.io/ports: "18081": entry "18081": port 18081 is reserved by the mesh (its listeners`},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/port: "x"`, "", `annotation endpoint.aether.io/port: "x": "x" is not a number: write a whole number from 0 to 65535, digits onl`},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/weight: "-1"`, "", `annotation endpoint.aether.io/weight: "-1": "-1" is not a number: write a whole number from 0 to 4294967295, d`},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/protocol: "udpp"`, "", `annotation endpoint.aether.io/protocol: "udpp": unknown protocol "udpp": write http or tcp (lower case), or dr`},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/health-check-mode: "x"`, "", ``},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/uds-socket: "x"`, "", `annotation endpoint.aether.io/uds-socket: "x": not <volume>/<file>, two plain names with one slash between: de`},
		{`endpoint.aether.io/ports: "8080"`, `|aether.io/spiffe-id: "x"`, "", `annotation aether.io/spiffe-id: "x": spiffeid: "x" does not begin with spiffe://: write spiffe://<trust domain`},
		{`endpoint.aether.io/ports: "8080"`, `|config.aether.io/upstreams: "a/b/c"`, "", `annotation config.aether.io/upstreams: "a/b/c": entry "a/b/c": write <service> or <namespace>/<service>`},
		{`endpoint.aether.io/ports: "8080"`, `|capture.aether.io/redirect-all: "yes"`, "", `annotation capture.aether.io/redirect-all: "yes": write "true" or "false"`},
		{`endpoint.aether.io/ports: "8080"`, `|capture.aether.io/exclude-outbound-ports: "a"`, "", `annotation capture.aether.io/exclude-outbound-ports: "a": not a port`},
		{`endpoint.aether.io/ports: "8080"`, `|capture.aether.io/exclude-outbound-ip-ranges: "a"`, "", `annotation capture.aether.io/exclude-outbound-ip-ranges: "a": not an address range`},
		{`endpoint.aether.io/ports: "8080"`, `|metadata.endpoint.aether.io/A_b: "a"`, "", ``},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/prot: "a"`, "", `annotation endpoint.aether.io/prot: "a": no such annotation: the ones that exist are endpoint.aether.io/port, `},
		{`endpoint.aether.io/ports: "8080"`, `|file.aether.io/nets: "a"`, "", `annotation file.aether.io/nets does not exist: a Pod has file.aether.io/netns, file.aether.io/container-id, fi`},
		{`serviceAccountName: cart`, `serviceAccountName: |CART`, "up", `spec.serviceAccountName: service account "CART" cannot name a mesh service: a lowercase RFC 1123 label must co`},
		{`serviceAccountName: cart`, `|serviceAccount_Name: cart`, "", `unknown field "spec.serviceAccount_Name" (did you mean "serviceAccountName"?): correct or remove it`},
		{`ip: 10.244.1.11`, `ip: |10.244.1.256`, "up", `status.podIPs[0].ip: pod address "10.244.1.256": not an IP address: write one like 10.0.0.1 or fd00::1`},
		{`containers: [{name: cart}]`, `containers: |7`, "", `field "spec.containers" is a number where a list is expected: write a list`},
		{`phase: Running`, `phase: |Runing`, "up", `status.phase "Runing" does not exist, and counts as Running: write Pending, Running, Succeeded or Failed`},
		{`metadata: {name: cart-1`, `metadata: {name: |cart_1`, "up of Pod shop/cart_1", `metadata.name "cart_1" cannot be a name: a lowercase RFC 1123 subdomain must consist of lower case alphanumeri`},
	}},
	{"Service shop/web", "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80, targetPort: 8080}], selector: {app: web}}\n", [][4]string{
		{`port: 80,`, `port: |80000,`, "up", `spec.ports[0]: port 80000 is no port: write a number from 1 to 65535`},
		{`port: 80,`, `port: |x,`, "file", `field "spec.ports[0].port" is text where a whole number is expected: write a whole number`},
		{`targetPort: 8080`, `targetPort: |80800`, "up", `spec.ports[0]: targetPort 80800 is no port: write a number from 1 to 65535, or a port's name`},
		{`targetPort: 8080`, `targetPort: |web_http`, "up", `spec.ports[0]: targetPort "web_http" is no port's name: must contain only alpha-numeric characters (a-z, 0-9),`},
		{`targetPort: 8080`, `targetPort: |http`, "up file", `spec.ports: port 80: targetPort "http" names nothing: no pod that the Service selects has a container port of `},
		{`targetPort: 8080`, `|protocol: QUIC`, "", `spec.ports[0]: port 80: protocol "QUIC" does not exist: write TCP or UDP`},
		{`clusterIP: 10.96.0.1`, `clusterIP: |10.96.0.256`, "up", `spec.clusterIP: cluster address "10.96.0.256": not an IP address: write one like 10.0.0.1 or fd00::1`},
		{`ports: [{port: 80, targetPort: 8080}]`, `ports: |7`, "file", `field "spec.ports" is a number where a list is expected: write a list`},
		{`ports: [{port: 80, targetPort: 8080}]`, `ports: [{port: |80}, {port: 80}]`, "", `spec.ports[1]: port 80 stands twice: keep one`},
		{`selector: {app: web}`, `|selectors: {app: web}`, "file", `unknown field "spec.selectors" (did you mean "selector"?): correct or remove it`},
		{`selector: {app: web}`, `|type: Nope`, "", ``},
	}},
	{"HTTPFilter shop/f", "apiVersion: config.aether.io/v1\nkind: HTTPFilter\nmetadata: {name: f, namespace: shop}\nspec: {scope: SCOPE_CHAIN, targetRefs: [{group: \"\", kind: Service, name: cart}], rbac: {action: DENY, policies: [{name: p, principals: [{namespace: x}]}]}}\n", [][4]string{
		{`DENY`, `|DNY`, "up", `spec.rbac.action "DNY" does not exist: write ALLOW or DENY`},
		{`SCOPE_CHAIN`, `|CHAIN`, "up", `spec.scope "CHAIN" does not exist: write SCOPE_ROUTE or SCOPE_CHAIN or SCOPE_INBOUND`},
		{`kind: Service`, `kind: |Gateway`, "up", `targetRefs[0] is a "Gateway" of group "": name a Service of group ""`},
		{`namespace: x}`, `|namespac: x}`, "", `unknown field "spec.rbac.policies[0].principals[0].namespac" (did you mean "namespace"?): correct or remove it`},
		{`principals: [{namespace: x}]`, `principals: [|]`, "up", `rbac.policies[0]: no principals: write one at least, with spiffeId or namespace`},
		{`principals: [{namespace: x}]`, `principals: [{|spiffeId: x}]`, "", `rbac.policies[0].principals[0]: spiffeid: "x" does not begin with spiffe://: write an ID like spiffe://example`},
		{`policies: [`, `|policy: [`, "", `unknown field "spec.rbac.policy": correct or remove it`},
		{`rbac: {`, `|rbca: {`, "", `unknown field "spec.rbca" (did you mean "rbac"?): correct or remove it`},
		{`name: p,`, `name: |7,`, "", `field "spec.rbac.policies[0].name" is a number where text is expected: put it in quotes: "7"`},
		{`targetRefs: [{group: "", kind: Service, name: cart}]`, `targetRefs: |7`, "", `field "spec.targetRefs" is a number where a list is expected: write a list`},
	}},
	{"EndpointPolicy shop/p", "apiVersion: config.aether.io/v1\nkind: EndpointPolicy\nmetadata: {name: p, namespace: shop}\nspec: {targetRef: {group: \"\", kind: Service, name: cart}, udsSocket: app/http.sock}\n", [][4]string{
		{`udsSocket: app/http.sock`, `udsSocket: |../x`, "up", `spec.udsSocket "../x": not <volume>/<file>, two plain names with one slash between`},
		{`udsSocket: app/http.sock`, `|udsSoket: app/http.sock`, "file", `unknown field "spec.udsSoket" (did you mean "udsSocket"?): correct or remove it`},
		{`kind: Service`, `kind: |Pod`, "up", `targetRef is a "Pod" of group "": name a Service of group ""`},
		{`name: cart}`, `name: |CART}`, "up", `targetRef: name "CART" cannot be a Service's name: a lowercase RFC 1123 label must consist of lower case alpha`},
		{`targetRef:`, `|targetRefs:`, "file", `unknown field "spec.targetRefs" (did you mean "targetRef"?): correct or remove it`},
		{`kind: Service`, `|kin: Service`, "", `unknown field "spec.targetRef.kin" (did you mean "kind"?): correct or remove it`},
		{`kind: Service`, `kind: |7`, "", `field "spec.targetRef.kind" is a number where text is expected: put it in quotes: "7"`},
		{`name: cart`, `|nam: cart`, "", `unknown field "spec.targetRef.nam" (did you mean "name"?): correct or remove it`},
		{`name: cart`, `name: |7`, "", `field "spec.targetRef.name" is a number where text is expected: put it in quotes: "7"`},
		{`name: cart`, `name: |nowhere`, "none", `targetRef Service shop/nowhere: there is no such service in the mesh`},
		{`group: ""`, `|grop: ""`, "", `unknown field "spec.targetRef.grop" (did you mean "group"?): correct or remove it`},
		{`group: ""`, `group: |apps`, "up", `targetRef is a "Service" of group "apps": name a Service of group ""`},
		{`targetRef: {group: "", kind: Service, name: cart}`, `targetRef: |7`, "", `field "spec.targetRef" is a number where a map of fields is expected: write a map of fields`},
		{`targetRef: {group: "", kind: Service, name: cart}, udsSocket`, `|udsSocket`, "up", `no targetRef: name the Service whose pods' socket it is`},
		{`udsSocket: app/http.sock`, `udsSocket: |7`, "", `field "spec.udsSocket" is a number where text is expected: put it in quotes: "7"`},
		{`udsSocket: app/http.sock`, `udsSocket: |""`, "up", `no spec.udsSocket: write <volume>/<file>`},
		{`udsSocket: app/http.sock`, `udsSocket: |a/b/c`, "up", `spec.udsSocket "a/b/c": not <volume>/<file>, two plain names with one slash between`},
		{`udsSocket: app/http.sock`, `udsSocket: |nope/http.sock`, "none of Pod shop/cart-1", `EndpointPolicy shop/p: "nope/http.sock": the pod declares no volume "nope": name its inline csi volume of driv`},
		{`udsSocket: app/http.sock`, `udsSocket: |app/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa`, "up", `spec.udsSocket has 96 characters: write 3 to 64`},
		{`name: p,`, `name: |p, annotations: {file.aether.io/x: ""},`, "file", `annotation file.aether.io/x does not exist: an EndpointPolicy has none of this prefix`},
		{`spec: {`, `|spce: {`, "file", `unknown field "spce" (did you mean "spec"?): correct or remove it`},
	}},
	{"ReferenceGrant shop/g", "apiVersion: gateway.networking.k8s.io/v1beta1\nkind: ReferenceGrant\nmetadata: {name: g, namespace: shop}\nspec: {from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: other}], to: [{group: \"\", kind: Service}]}\n", [][4]string{
		{`kind: HTTPRoute`, `kind: |7`, "", `field "spec.from[0].kind" is a number where text is expected: put it in quotes: "7"`},
		{`namespace: other`, `namespace: |7`, "", `field "spec.from[0].namespace" is a number where text is expected: put it in quotes: "7"`},
		{`from: [`, `|form: [`, "", `unknown field "spec.form" (did you mean "from"?): correct or remove it`},
		{`to: [{group: "", kind: Service}]`, `to: |7`, "", `field "spec.to" is a number where a list is expected: write a list`},
		{`to: [{group: "", kind: Service}]`, `to: [|]`, "up", `spec.to is empty, and the grant permits nothing: write to what it permits references`},
	}},
	{"GRPCRoute shop/r", "apiVersion: gateway.networking.k8s.io/v1\nkind: GRPCRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{group: \"\", kind: Service, name: cart}], rules: [{matches: [{method: {service: a.B, method: C}}], backendRefs: [{name: cart, port: 8080}]}]}\n", [][4]string{
		{`service: a.B`, `service: |"a/B"`, "up", `rules[0]: matches[0]: method.service "a/B" is no name of gRPC: letters, digits, _ and, in a service, dots`},
		{`service: a.B`, `|type: Nope, service: a.B`, "up", `rules[0]: matches[0]: method.type "Nope" does not exist: write Exact or RegularExpression`},
		{`service: a.B`, `|type: RegularExpression, service: "("`, "up", `rules[0]: matches[0]: method.service pattern "(" is no regular expression (error parsing regexp: missing closi`},
		{`matches: [`, `|match: [`, "", `unknown field "spec.rules[0].match" (did you mean "matches"?): correct or remove it`},
		{`matches: [`, `|filters: [{type: Nope}], matches: [`, "", `rules[0]: filters[0]: filter Nope does not exist: the filters that may stand here: RequestHeaderModifier, Resp`},
		{`matches: [`, `|timeouts: {request: 7}, matches: [`, "", `unknown field "spec.rules[0].timeouts": correct or remove it`},
		{`port: 8080`, `port: |80800`, "up", `rules[0].backendRefs[0]: port 80800 is no port: write a Service port from 1 to 65535`},
		{`name: cart, port`, `name: |nowhere, port`, "none", `rules[0].backendRefs[0]: backendRef shop/nowhere port 8080: BackendNotFound: no such service`},
		{`kind: Service, name: cart}]`, `kind: |Nope, name: cart}]`, "up file", `parentRefs[0] is a Nope: this source attaches routes to Services (group "", kind Service) and leaves this pare`},
		{`rules: [`, `|hostnames: [a_b], rules: [`, "", `hostnames mean nothing on a route of a Service and are ignored: the Service's names are the route's`},
	}},
	{"TCPRoute shop/r", "apiVersion: gateway.networking.k8s.io/v1alpha2\nkind: TCPRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{group: \"\", kind: Service, name: cart}], rules: [{backendRefs: [{name: cart, port: 5432}]}]}\n", [][4]string{
		{`port: 5432`, `port: |0`, "up", `rules[0].backendRefs[0]: port 0 is no port: write a Service port from 1 to 65535`},
		{`name: cart, port`, `name: |nowhere, port`, "none", `rules[0].backendRefs[0]: backendRef shop/nowhere port 5432: BackendNotFound: no such service`},
		{`name: cart, port: 5432`, `name: cart, |namespace: other, port: 5432`, "up", `rules[0].backendRefs[0]: RefNotPermitted: no ReferenceGrant in namespace other lets TCPRoutes of namespace sho`},
		{`backendRefs: [`, `|backendRef: [`, "", `unknown field "spec.rules[0].backendRef" (did you mean "backendRefs"?): correct or remove it`},
		{`rules: [`, `rules: [|{}, `, "", ``},
		{`rules: [{backendRefs: [{name: cart, port: 5432}]}]`, `rules: |7`, "", `field "spec.rules" is a number where a list is expected: write a list`},
		{`port: 5432`, `|prt: 5432`, "", `unknown field "spec.rules[0].backendRefs[0].prt" (did you mean "port"?): correct or remove it`},
		{`port: 5432`, `port: |5432, weight: x`, "", `field "spec.rules[0].backendRefs[0].weight" is text where a whole number is expected: write a whole number`},
		{`port: 5432`, `port: |8080`, "none", `rules[0].backendRefs[0]: backendRef shop/cart port 8080: UnsupportedProtocol: the port is http`},
		{`port: 5432`, `port: |5432, kind: Nope`, "up", `rules[0].backendRefs[0]: InvalidKind: Nope "" is not a Service: name a Service of group ""`},
		{`name: cart, port`, `|nam: cart, port`, "", `unknown field "spec.rules[0].backendRefs[0].nam" (did you mean "name"?): correct or remove it`},
		{`backendRefs: [`, `backendRefs: [|7, `, "", `field "spec.rules[0].backendRefs[0]" is a number where a map of fields is expected: write a map of fields`},
		{`rules: [{backendRefs: [{name: cart, port: 5432}]}]`, `rules: [|]`, "up", `no rules: what the route takes is refused`},
		{`rules: [`, `|rule: [`, "file", `unknown field "spec.rule" (did you mean "rules"?): correct or remove it`},
		{`rules: [`, `rules: [|7, `, "", `field "spec.rules[0]" is a number where a map of fields is expected: write a map of fields`},
		{`kind: Service, name: cart}]`, `kind: Service, name: |cart, port: 8080}]`, "none", `parentRef Service shop/cart port 8080: that is no TCP port of it (NoMatchingParent)`},
		{`kind: Service, name: cart}]`, `kind: Service, name: |cart, port: 0}]`, "", `parentRefs[0]: port 0 is no port: write a Service port from 1 to 65535, or drop it for all of them`},
		{`kind: Service, name: cart}]`, `kind: |Servic, name: cart}]`, "up file", `parentRefs[0]: kind "Servic" does not exist: write Service`},
	}},
	{"TLSRoute shop/r", "apiVersion: gateway.networking.k8s.io/v1alpha2\nkind: TLSRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{group: \"\", kind: Service, name: cart}], hostnames: [a.example], rules: [{backendRefs: [{name: cart, port: 5432}]}]}\n", [][4]string{
		{`a.example`, `|a_example`, "", `hostnames[0]: "a_example" is no host name: write a lower-case DNS name without a port, like cart.example, or *`},
		{`[a.example]`, `|7`, "", `field "spec.hostnames" is a number where a list is expected: write a list`},
		{`port: 5432`, `port: |x`, "", `field "spec.rules[0].backendRefs[0].port" is text where a whole number is expected: write a whole number`},
		{`name: cart, port`, `name: |nowhere, port`, "none", `rules[0].backendRefs[0]: backendRef shop/nowhere port 5432: BackendNotFound: no such service`},
		{`backendRefs: [`, `|backendRef: [`, "", `unknown field "spec.rules[0].backendRef" (did you mean "backendRefs"?): correct or remove it`},
		{`hostnames: [a.example]`, `|hostname: [a.example]`, "file", `unknown field "spec.hostname" (did you mean "hostnames"?): correct or remove it`},
		{`hostnames: [a.example]`, `hostnames: [|]`, "up", `no hostnames: a TLSRoute is chosen by the server name`},
		{`a.example`, `|a.example, b_c`, "", `hostnames[1]: "b_c" is no host name: write a lower-case DNS name without a port, like cart.example, or *. and `},
		{`a.example`, `|a.example, 7`, "", `field "spec.hostnames[1]" is a number where text is expected: put it in quotes: "7"`},
		{`rules: [{backendRefs: [{name: cart, port: 5432}]}]`, `rules: [|]`, "up", `no rules: what the route takes is refused`},
		{`rules: [`, `|rule: [`, "file", `unknown field "spec.rule" (did you mean "rules"?): correct or remove it`},
		{`rules: [`, `rules: [|7, `, "", `field "spec.rules[0]" is a number where a map of fields is expected: write a map of fields`},
		{`port: 5432`, `|prt: 5432`, "", `unknown field "spec.rules[0].backendRefs[0].prt" (did you mean "port"?): correct or remove it`},
		{`port: 5432`, `port: |5432, weight: -1`, "up", `rules[0].backendRefs[0]: weight -1: write a number from 0 to 1000000`},
		{`kind: Service, name: cart}]`, `kind: Service, name: |cart, port: 8080}]`, "none", `parentRef Service shop/cart port 8080: that is no raw port of it (NoMatchingParent)`},
		{`name: cart, port`, `|namespace: other, name: cart, port`, "up", `rules[0].backendRefs[0]: RefNotPermitted: no ReferenceGrant in namespace other lets TLSRoutes of namespace sho`},
		{`spec: {`, `|spce: {`, "file", `unknown field "spce" (did you mean "spec"?): correct or remove it`},
	}},
	{"HTTPRoute shop/r", "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{group: \"\", kind: Service, name: cart}], rules: [{backendRefs: [{name: cart, port: 8080}]}]}\n", [][4]string{
		{`kind: Service, name: cart}]`, `kind: |Nope, name: cart}]`, "up file", `parentRefs[0] is a Nope: this source attaches routes to Services (group "", kind Service) and leaves this pare`},
		{`kind: Service, name: cart}]`, `kind: Service, |nam: cart}]`, "", `unknown field "spec.parentRefs[0].nam" (did you mean "name"?): correct or remove it`},
		{`kind: Service, name: cart}]`, `kind: Service, name: |cart, port: 70000}]`, "", `parentRefs[0]: port 70000 is no port: write a Service port from 1 to 65535, or drop it for all of them`},
		{`rules: [`, `|hostnames: 7, rules: [`, "", `field "spec.hostnames" is a number where a list is expected: write a list`},
		{`rules: [`, `|rule: [`, "file", `unknown field "spec.rule" (did you mean "rules"?): correct or remove it`},
		{`rules: [{`, `rules: [|7, {`, "", `field "spec.rules[0]" is a number where a map of fields is expected: write a map of fields`},
	}},
	{"MeshConfig aether-system/default", "apiVersion: config.aether.io/v1\nkind: MeshConfig\nmetadata: {name: default, namespace: aether-system}\nspec: {sameNode: inProcess}\n", [][4]string{
		{`inProcess`, `|inproc`, "up", `spec.sameNode "inproc" does not exist: write mTLS or inProcess`},
		{`sameNode: inProcess`, `|hopSource: x`, "", `spec.hopSource "x" does not exist: write pod or node`},
		{`sameNode: inProcess`, `|sameNod: inProcess`, "file", `unknown field "spec.sameNod" (did you mean "sameNode"?): correct or remove it`},
		{`sameNode: inProcess`, `|accessLogs: 7`, "file", `unknown field "spec.accessLogs": correct or remove it`},
	}},
	{"HTTPRoute shop/r", "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{group: \"\", kind: Service, name: cart}], rules: [{matches: [{path: {type: PathPrefix, value: /a}, headers: [{name: a, value: b}], queryParams: [{name: q, value: v}]}], filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x, value: yy}]}}], backendRefs: [{name: cart, port: 8080}]}]}\n", [][4]string{
		{`value: /a`, `|valu: /a`, "", `unknown field "spec.rules[0].matches[0].path.valu" (did you mean "value"?): correct or remove it`},
		{`value: /a`, `value: |7`, "", `field "spec.rules[0].matches[0].path.value" is a number where text is expected: put it in quotes: "7"`},
		{`type: PathPrefix`, `type: |7`, "", `field "spec.rules[0].matches[0].path.type" is a number where text is expected: put it in quotes: "7"`},
		{`type: PathPrefix`, `|typ: Exact`, "", `unknown field "spec.rules[0].matches[0].path.typ" (did you mean "type"?): correct or remove it`},
		{`path: {type: PathPrefix, value: /a}`, `path: |7`, "", `field "spec.rules[0].matches[0].path" is a number where a map of fields is expected: write a map of fields`},
		{`name: a,`, `|nam: a,`, "", `unknown field "spec.rules[0].matches[0].headers[0].nam" (did you mean "name"?): correct or remove it`},
		{`name: a,`, `name: |7,`, "", `field "spec.rules[0].matches[0].headers[0].name" is a number where text is expected: put it in quotes: "7"`},
		{`value: b`, `|valu: b`, "", `unknown field "spec.rules[0].matches[0].headers[0].valu" (did you mean "value"?): correct or remove it`},
		{`value: b`, `value: |7`, "", `field "spec.rules[0].matches[0].headers[0].value" is a number where text is expected: put it in quotes: "7"`},
		{`value: b`, `value: |""`, "up", `rules[0]: matches[0].headers[0]: header a: no value: write what it must be, or a RegularExpression`},
		{`value: b`, `value: |b, type: Nope`, "up", `rules[0]: matches[0].headers[0]: header "a": match type "Nope" does not exist: write Exact or RegularExpressio`},
		{`name: q,`, `|nam: q,`, "", `unknown field "spec.rules[0].matches[0].queryParams[0].nam" (did you mean "name"?): correct or remove it`},
		{`name: q,`, `name: |"",`, "up", `rules[0]: matches[0].queryParams[0]: a parameter without a name: write its name`},
		{`name: q,`, `name: |7,`, "", `field "spec.rules[0].matches[0].queryParams[0].name" is a number where text is expected: put it in quotes: "7"`},
		{`value: v`, `|valu: v`, "", `unknown field "spec.rules[0].matches[0].queryParams[0].valu" (did you mean "value"?): correct or remove it`},
		{`value: v`, `value: |""`, "up", `rules[0]: matches[0].queryParams[0]: parameter q: no value: write what it must be, or a RegularExpression`},
		{`[{name: a, value: b}]`, `[{name: a, value: |b}, {name: A, value: c}]`, "", `rules[0]: matches[0].headers[1]: header A stands twice (case does not count), and the first counts: remove thi`},
		{`[{name: a, value: b}]`, `[{name: a, value: |b}, {name: a, value: c}]`, "", `rules[0]: matches[0].headers[1]: header a stands twice: keep one`},
		{`[{name: a, value: b}]`, `[|7]`, "", `field "spec.rules[0].matches[0].headers[0]" is a number where a map of fields is expected: write a map of fiel`},
		{`headers: [{name: a, value: b}]`, `headers: |7`, "", `field "spec.rules[0].matches[0].headers" is a number where a list is expected: write a list`},
		{`headers: [{name: a, value: b}]`, `|header: [{name: a, value: b}]`, "", `unknown field "spec.rules[0].matches[0].header" (did you mean "headers"?): correct or remove it`},
		{`type: RequestHeaderModifier`, `|typ: RequestHeaderModifier`, "", `unknown field "spec.rules[0].filters[0].typ" (did you mean "type"?): correct or remove it`},
		{`type: RequestHeaderModifier`, `type: |7`, "", `field "spec.rules[0].filters[0].type" is a number where text is expected: put it in quotes: "7"`},
		{`type: RequestHeaderModifier`, `type: |ResponseHeaderModifier`, "up", `rules[0]: filters[0]: a filter ResponseHeaderModifier has its own field and no other: write that one only`},
		{`requestHeaderModifier: {`, `|requestHeaderModifer: {`, "", `unknown field "spec.rules[0].filters[0].requestHeaderModifer" (did you mean "requestHeaderModifier"?): correct`},
		{`requestHeaderModifier: {set: [{name: x, value: yy}]}`, `requestHeaderModifier: |7`, "", `field "spec.rules[0].filters[0].requestHeaderModifier" is a number where a map of fields is expected: write a `},
		{`set: [{name: x`, `|sett: [{name: x`, "", `unknown field "spec.rules[0].filters[0].requestHeaderModifier.sett" (did you mean "set"?): correct or remove i`},
		{`name: x`, `|nam: x`, "", `unknown field "spec.rules[0].filters[0].requestHeaderModifier.set[0].nam" (did you mean "name"?): correct or r`},
		{`name: x`, `name: |7`, "", `field "spec.rules[0].filters[0].requestHeaderModifier.set[0].name" is a number where text is expected: put it `},
		{`value: yy`, `|valu: yy`, "", `unknown field "spec.rules[0].filters[0].requestHeaderModifier.set[0].valu" (did you mean "value"?): correct or`},
		{`value: yy`, `value: |7`, "", `field "spec.rules[0].filters[0].requestHeaderModifier.set[0].value" is a number where text is expected: put it`},
		{`filters: [{type: RequestHeaderModifier`, `filters: [|7, {type: RequestHeaderModifier`, "", `field "spec.rules[0].filters[0]" is a number where a map of fields is expected: write a map of fields`},
		{`filters: [`, `|filter: [`, "", `unknown field "spec.rules[0].filter" (did you mean "filters"?): correct or remove it`},
		{`filters: [`, `filters: [|{type: RequestMirror, requestMirror: {backendRef: {name: cart, prt: 8080}}}, `, "", `unknown field "spec.rules[0].filters[0].requestMirror.backendRef.prt" (did you mean "port"?): correct or remov`},
		{`filters: [`, `filters: [|{type: RequestMirror, requestMirror: {backendRef: {name: cart, port: x}}}, `, "", `field "spec.rules[0].filters[0].requestMirror.backendRef.port" is text where a whole number is expected: write`},
		{`filters: [`, `filters: [|{type: RequestMirror, requestMirror: {backendRef: {nam: cart, port: 8080}}}, `, "", `unknown field "spec.rules[0].filters[0].requestMirror.backendRef.nam" (did you mean "name"?): correct or remov`},
		{`filters: [`, `filters: [|{type: RequestMirror, requestMirror: {percent: 101, backendRef: {name: cart, port: 8080}}}, `, "", `rules[0]: filters[0]: percent 101: write a number from 0 to 100`},
		{`filters: [`, `filters: [|{type: RequestMirror, requestMirror: {percnt: 10, backendRef: {name: cart, port: 8080}}}, `, "", `unknown field "spec.rules[0].filters[0].requestMirror.percnt" (did you mean "percent"?): correct or remove it`},
		{`filters: [`, `filters: [|{type: RequestMirror, requestMirror: {backendRef: {name: nowhere, port: 8080}}}, `, "none", `rules[0].filters[0]: mirror to shop/nowhere port 8080: BackendNotFound: no such service`},
		{`filters: [`, `filters: [|{type: RequestMirror, requestMirror: {backendRef: {name: cart, namespace: other, port: 8080}}}, `, "", `rules[0].filters[0]: RefNotPermitted: no ReferenceGrant in namespace other lets HTTPRoutes of namespace shop n`},
		{`filters: [`, `filters: [|{type: URLRewrite, urlRewrite: {path: {typ: ReplaceFullPath, replaceFullPath: /x}}}, `, "", `unknown field "spec.rules[0].filters[0].urlRewrite.path.typ" (did you mean "type"?): correct or remove it`},
		{`filters: [`, `filters: [|{type: URLRewrite, urlRewrite: {path: {type: ReplaceFullPath, replaceFulPath: /x}}}, `, "", `unknown field "spec.rules[0].filters[0].urlRewrite.path.replaceFulPath" (did you mean "replaceFullPath"?): cor`},
		{`filters: [`, `filters: [|{type: URLRewrite, urlRewrite: {hostname: 7}}, `, "", `field "spec.rules[0].filters[0].urlRewrite.hostname" is a number where text is expected: put it in quotes: "7"`},
		{`filters: [`, `filters: [|{type: URLRewrite, urlRewrite: {hostname: a_b}}, `, "", `rules[0]: filters[0]: hostname "a_b" is no host name: write a lower-case DNS name without a port, like cart.ex`},
		{`filters: [`, `filters: [|{type: CORS, cors: {allowOrigins: [x]}}, `, "", `rules[0]: filters[0]: allowOrigins: "x": write http:// or https://, a host, which may begin with *., and perha`},
		{`filters: [`, `filters: [|{type: CORS, cors: {maxAge: x}}, `, "", `field "spec.rules[0].filters[0].cors.maxAge" is text where a whole number is expected: write a whole number`},
		{`filters: [`, `filters: [|{type: ExtensionRef, extensionRef: {group: config.aether.io, kind: HTTPFilter, name: none}}, `, "none", `rules[0]: filters[0]: HTTPFilter shop/none is not there: create it, or remove the ExtensionRef`},
		{`filters: [`, `filters: [|{type: ExtensionRef, extensionRef: {group: config.aether.io, kind: HTTPFilter, nam: none}}, `, "", `unknown field "spec.rules[0].filters[0].extensionRef.nam" (did you mean "name"?): correct or remove it`},
		{`filters: [`, `filters: [|{type: ExtensionRef, extensionRef: {grp: config.aether.io, kind: HTTPFilter, name: none}}, `, "", `unknown field "spec.rules[0].filters[0].extensionRef.grp": correct or remove it`},
		{`filters: [`, `filters: [|{type: ExtensionRef, extensionRef: {group: config.aether.io, kind: 7, name: none}}, `, "", `field "spec.rules[0].filters[0].extensionRef.kind" is a number where text is expected: put it in quotes: "7"`},
		{`filters: [{type`, `|timeouts: {request: 10}, filters: [{type`, "", `field "spec.rules[0].timeouts.request" is a number where text is expected: put it in quotes: "10"`},
		{`filters: [{type`, `|timeouts: {request: 10x}, filters: [{type`, "", `rules[0]: timeouts.request: "10x" is no duration: write one to four numbers of at most five digits, each with `},
		{`filters: [{type`, `|timeouts: {reqest: 10s}, filters: [{type`, "", `unknown field "spec.rules[0].timeouts.reqest" (did you mean "request"?): correct or remove it`},
		{`filters: [{type`, `|timeouts: 7, filters: [{type`, "", `field "spec.rules[0].timeouts" is a number where a map of fields is expected: write a map of fields`},
		{`filters: [{type`, `|timeouts: {backendRequest: 2s, request: 1s}, filters: [{type`, "", `rules[0]: timeouts: backendRequest, 2s, is longer than request, 1s: shorten it`},
		{`filters: [{type`, `|retry: {codes: [x]}, filters: [{type`, "", `field "spec.rules[0].retry.codes[0]" is text where a whole number is expected: write a whole number`},
		{`filters: [{type`, `|retry: {codes: 7}, filters: [{type`, "", `field "spec.rules[0].retry.codes" is a number where a list is expected: write a list`},
		{`filters: [{type`, `|retry: {codes: [500, 500]}, filters: [{type`, "", `rules[0]: retry.codes[1]: 500 stands twice: keep one`},
		{`filters: [{type`, `|retry: {attempts: x}, filters: [{type`, "", `field "spec.rules[0].retry.attempts" is text where a whole number is expected: write a whole number`},
		{`filters: [{type`, `|retry: {attempts: 300}, filters: [{type`, "", `rules[0]: retry.attempts 300: write a number from 0, none, to 255`},
		{`filters: [{type`, `|retry: {backoff: 1}, filters: [{type`, "", `field "spec.rules[0].retry.backoff" is a number where text is expected: put it in quotes: "1"`},
		{`filters: [{type`, `|retry: {backof: 1s}, filters: [{type`, "", `unknown field "spec.rules[0].retry.backof" (did you mean "backoff"?): correct or remove it`},
		{`filters: [{type`, `|sessionPersistence: {type: Header, cookieConfig: {}}, filters: [{type`, "", `rules[0]: sessionPersistence: cookieConfig with type Header: remove it`},
		{`filters: [{type`, `|sessionPersistence: {cookieConfig: {lifetimeType: Permanent}}, filters: [{type`, "", `rules[0]: sessionPersistence: a Permanent cookie needs absoluteTimeout: write it`},
		{`filters: [{type`, `|sessionPersistence: {absoluteTimeout: x, cookieConfig: {lifetimeType: Permanent}}, filters: [{type`, "", `rules[0]: sessionPersistence.absoluteTimeout: "x" is no duration: write one to four numbers of at most five di`},
		{`filters: [{type`, `|sessionPersistence: {absoluteTimeout: 7, cookieConfig: {lifetimeType: Permanent}}, filters: [{type`, "", `field "spec.rules[0].sessionPersistence.absoluteTimeout" is a number where text is expected: put it in quotes:`},
		{`filters: [{type`, `|sessionPersistence: {cookieConfig: {lifetimeType: Nope}}, filters: [{type`, "", `rules[0]: sessionPersistence.cookieConfig.lifetimeType "Nope" does not exist: write Session or Permanent`},
		{`filters: [{type`, `|sessionPersistence: {cookieConfig: {lifetimetype: Permanent}}, filters: [{type`, "", `unknown field "spec.rules[0].sessionPersistence.cookieConfig.lifetimetype" (did you mean "lifetimeType"?): cor`},
		{`filters: [{type`, `|sessionPersistence: {sessionName: "a b"}, filters: [{type`, "", `rules[0]: sessionPersistence.sessionName "a b": write at most 128 letters, digits and -`},
		{`filters: [{type`, `|sessionPersistence: {type: Header, sessionName: host}, filters: [{type`, "", `rules[0]: sessionPersistence.sessionName: header host is the proxy's own: choose another`},
		{`name: cart, port: 8080`, `|nam: cart, port: 8080`, "", `unknown field "spec.rules[0].backendRefs[0].nam" (did you mean "name"?): correct or remove it`},
		{`name: cart, port: 8080`, `name: cart, |prt: 8080`, "", `unknown field "spec.rules[0].backendRefs[0].prt" (did you mean "port"?): correct or remove it`},
		{`name: cart, port: 8080`, `name: cart, port: |x`, "", `field "spec.rules[0].backendRefs[0].port" is text where a whole number is expected: write a whole number`},
		{`name: cart, port: 8080`, `name: cart, port: |8080, weight: x`, "", `field "spec.rules[0].backendRefs[0].weight" is text where a whole number is expected: write a whole number`},
		{`name: cart, port: 8080`, `name: cart, port: |8080, weight: -1`, "up", `rules[0].backendRefs[0]: weight -1: write a number from 0 to 1000000`},
		{`name: cart, port: 8080`, `name: |CART, port: 8080`, "up", `rules[0].backendRefs[0]: name "CART" cannot be a Service's name: a lowercase RFC 1123 label must consist of lo`},
		{`name: cart, port: 8080`, `name: cart, |namespace: a_b, port: 8080`, "up", `rules[0].backendRefs[0]: namespace "a_b" cannot be a name: a lowercase RFC 1123 label must consist of lower ca`},
		{`name: cart, port: 8080`, `name: cart, port: |81`, "none", `rules[0].backendRefs[0]: backendRef shop/cart port 81: BackendNotFound: the service has no such port`},
		{`name: cart, port: 8080`, `name: cart, port: |5432`, "none", `rules[0].backendRefs[0]: backendRef shop/cart port 5432: UnsupportedProtocol: the port is tcp`},
		{`name: cart, port: 8080`, `name: cart, port: |8080, filters: [{type: CORS, cors: {}}]`, "up", `rules[0].backendRefs[0]: filters[0]: filter CORS cannot stand here: the filters that may stand here: RequestHe`},
		{`name: cart, port: 8080`, `name: cart, port: |8080, filters: [{typ: CORS, cors: {}}]`, "", `unknown field "spec.rules[0].backendRefs[0].filters[0].typ" (did you mean "type"?): correct or remove it`},
		{`name: cart, port: 8080`, `name: cart, port: |8080, filters: [{type: RequestMirror, requestMirror: {backendRef: {name: cart, prt: 8080}}}]`, "", `unknown field "spec.rules[0].backendRefs[0].filters[0].requestMirror.backendRef.prt" (did you mean "port"?): c`},
		{`name: cart, port: 8080`, `name: cart, port: |8080, filters: [{type: RequestMirror, requestMirror: {backendRef: {name: cart}}}]`, "", `rules[0].backendRefs[0].filters[0]: no port: write the Service's port`},
		{`backendRefs: [`, `backendRefs: [|7, `, "", `field "spec.rules[0].backendRefs[0]" is a number where a map of fields is expected: write a map of fields`},
		{`backendRefs: [`, `|backendRef: [`, "", `unknown field "spec.rules[0].backendRef" (did you mean "backendRefs"?): correct or remove it`},
		{`parentRefs: [`, `|parentRef: [`, "file", `unknown field "spec.parentRef" (did you mean "parentRefs"?): correct or remove it`},
		{`parentRefs: [`, `parentRefs: [|7, `, "", `field "spec.parentRefs[0]" is a number where a map of fields is expected: write a map of fields`},
		{`parentRefs: [{group: "", kind: Service, name: cart}]`, `parentRefs: [|]`, "up", `no parentRef names a Service: the route is attached to nothing`},
		{`parentRefs: [{group: "", kind: Service, name: cart}]`, `parentRefs: |7`, "", `field "spec.parentRefs" is a number where a list is expected: write a list`},
		{`kind: Service, name: cart}]`, `|kin: Service, name: cart}]`, "", `unknown field "spec.parentRefs[0].kin" (did you mean "kind"?): correct or remove it`},
		{`kind: Service, name: cart}]`, `kind: |Servce, name: cart}]`, "up file", `parentRefs[0]: kind "Servce" does not exist: write Service`},
		{`kind: Service, name: cart}]`, `kind: Service, name: |CART}]`, "up", `parentRefs[0]: name "CART" cannot be a Service's name: a lowercase RFC 1123 label must consist of lower case a`},
		{`kind: Service, name: cart}]`, `kind: Service, name: |nowhere}]`, "none", `parentRef Service shop/nowhere: there is no such service in the mesh (NoMatchingParent)`},
		{`kind: Service, name: cart}]`, `kind: Service, name: |cart, port: 81}]`, "none", `parentRef Service shop/cart port 81: that is no HTTP port of it (NoMatchingParent)`},
		{`kind: Service, name: cart}]`, `kind: Service, name: |cart, port: x}]`, "", `field "spec.parentRefs[0].port" is text where a whole number is expected: write a whole number`},
		{`kind: Service, name: cart}]`, `kind: Service, name: |cart, sectionName: x}]`, "", `parentRefs[0]: sectionName of a Service is not built: write port instead`},
		{`kind: Service, name: cart}]`, `kind: Service, name: |cart, namespac: x}]`, "", `unknown field "spec.parentRefs[0].namespac" (did you mean "namespace"?): correct or remove it`},
		{`kind: Service, name: cart}]`, `kind: Service, name: |cart, namespace: a_b}]`, "up", `parentRefs[0]: namespace "a_b" cannot be a name: a lowercase RFC 1123 label must consist of lower case alphanu`},
		{`group: "",`, `group: |apps,`, "up file", `parentRefs[0] is a Service: this source attaches routes to Services (group "", kind Service) and leaves this p`},
		{`group: "",`, `|grop: "",`, "", `unknown field "spec.parentRefs[0].grop" (did you mean "group"?): correct or remove it`},
		{`spec: {`, `|spce: {`, "file", `unknown field "spce" (did you mean "spec"?): correct or remove it`},
		{`spec: {`, `spec: {|useDefaultGateways: All, `, "file", `useDefaultGateways is ignored: this source attaches routes to Services only`},
		{`spec: {`, `spec: {|nope: 7, `, "file", `unknown field "spec.nope": correct or remove it`},
		{`name: r,`, `name: |r, annotations: {file.aether.io/invalid: "x"},`, "file", `annotation file.aether.io/invalid: invalid character 'x' looking for beginning of value: write a JSON object l`},
		{`name: r,`, `name: |r, annotations: {file.aether.io/invalid: '{"7":"x"}'},`, "file", `annotation file.aether.io/invalid: entry "7": write the number of a rule, <rule>/<backend>, or either with /fi`},
		{`name: r,`, `name: |r, annotations: {file.aether.io/invald: "x"},`, "file", `annotation file.aether.io/invald does not exist: an HTTPRoute has file.aether.io/invalid`},
		{`name: r,`, `name: |r, annotations: 7,`, "file", `field "metadata.annotations" is a number where a map of fields is expected: write a map of fields`},
	}},
	{"GRPCRoute shop/r", "apiVersion: gateway.networking.k8s.io/v1\nkind: GRPCRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{group: \"\", kind: Service, name: cart}], rules: [{matches: [{method: {service: a.B, method: C}, headers: [{name: a, value: b}]}], backendRefs: [{name: cart, port: 8080}]}]}\n", [][4]string{
		{`service: a.B, method: C`, `|servce: a.B`, "", `unknown field "spec.rules[0].matches[0].method.servce" (did you mean "service"?): correct or remove it`},
		{`service: a.B, method: C`, `service: |7`, "", `field "spec.rules[0].matches[0].method.service" is a number where text is expected: put it in quotes: "7"`},
		{`service: a.B, method: C`, `|type: 7, service: a.B`, "", `field "spec.rules[0].matches[0].method.type" is a number where text is expected: put it in quotes: "7"`},
		{`service: a.B`, `service: |""`, "up", `rules[0]: matches[0]: method.service is empty: drop it for any, or write a name`},
		{`method: C`, `method: |C/D`, "up", `rules[0]: matches[0]: method.method "C/D" is no name of gRPC: letters, digits, _ and, in a service, dots`},
		{`method: C`, `|methd: C`, "", `unknown field "spec.rules[0].matches[0].method.methd" (did you mean "method"?): correct or remove it`},
		{`method: {service: a.B, method: C}`, `method: {|}`, "up", `rules[0]: matches[0]: method names neither service nor method: write one of them, or drop method`},
		{`method: {service: a.B, method: C}`, `method: |7`, "", `field "spec.rules[0].matches[0].method" is a number where a map of fields is expected: write a map of fields`},
		{`method: {service: a.B, method: C}`, `|path: {value: /a}`, "", `unknown field "spec.rules[0].matches[0].path": correct or remove it`},
		{`name: a,`, `|nam: a,`, "", `unknown field "spec.rules[0].matches[0].headers[0].nam" (did you mean "name"?): correct or remove it`},
		{`value: b`, `|valu: b`, "", `unknown field "spec.rules[0].matches[0].headers[0].valu" (did you mean "value"?): correct or remove it`},
		{`value: b`, `value: |b, type: Nope`, "up", `rules[0]: matches[0].headers[0]: header "a": match type "Nope" does not exist: write Exact or RegularExpressio`},
		{`value: b`, `value: |"(", type: RegularExpression`, "up", `rules[0]: matches[0].headers[0]: header a: pattern "(" is no regular expression (error parsing regexp: missing`},
		{`matches: [`, `matches: [|7, `, "", `field "spec.rules[0].matches[0]" is a number where a map of fields is expected: write a map of fields`},
		{`matches: [`, `|filters: [{type: URLRewrite, urlRewrite: {hostname: a}}], matches: [`, "", `unknown field "spec.rules[0].filters[0].urlRewrite": correct or remove it`},
		{`matches: [`, `|filters: [{type: CORS, cors: {}}], matches: [`, "", `unknown field "spec.rules[0].filters[0].cors": correct or remove it`},
		{`matches: [`, `|retry: {attempts: 1}, matches: [`, "", `unknown field "spec.rules[0].retry": correct or remove it`},
		{`matches: [`, `|sessionPersistence: {type: Nope}, matches: [`, "", `rules[0]: sessionPersistence.type "Nope" does not exist: write Cookie or Header`},
		{`name: cart, port`, `|weight: -1, name: cart, port`, "up", `rules[0].backendRefs[0]: weight -1: write a number from 0 to 1000000`},
		{`name: cart, port`, `|namespace: other, name: cart, port`, "up", `rules[0].backendRefs[0]: RefNotPermitted: no ReferenceGrant in namespace other lets GRPCRoutes of namespace sh`},
		{`name: cart, port`, `|kind: Nope, name: cart, port`, "up", `rules[0].backendRefs[0]: InvalidKind: Nope "" is not a Service: name a Service of group ""`},
		{`rules: [`, `|rule: [`, "file", `unknown field "spec.rule" (did you mean "rules"?): correct or remove it`},
	}},
	{"HTTPFilter shop/f", "apiVersion: config.aether.io/v1\nkind: HTTPFilter\nmetadata: {name: f, namespace: shop}\nspec: {scope: SCOPE_CHAIN, targetRefs: [{group: \"\", kind: Service, name: cart}], rbac: {action: DENY, policies: [{name: p, principals: [{namespace: x}], permissions: [{pathPrefix: /a}]}]}}\n", [][4]string{
		{`name: cart`, `|nam: cart`, "", `unknown field "spec.targetRefs[0].nam" (did you mean "name"?): correct or remove it`},
		{`name: cart`, `name: |7`, "", `field "spec.targetRefs[0].name" is a number where text is expected: put it in quotes: "7"`},
		{`name: cart`, `name: |CART`, "up", `targetRefs[0]: name "CART" cannot be a Service's name: a lowercase RFC 1123 label must consist of lower case a`},
		{`kind: Service`, `|kin: Service`, "", `unknown field "spec.targetRefs[0].kin" (did you mean "kind"?): correct or remove it`},
		{`kind: Service`, `kind: |7`, "", `field "spec.targetRefs[0].kind" is a number where text is expected: put it in quotes: "7"`},
		{`kind: Service`, `kind: |Servce`, "up", `targetRefs[0] is a "Servce" of group "": name a Service of group ""`},
		{`group: ""`, `|grop: ""`, "", `unknown field "spec.targetRefs[0].grop" (did you mean "group"?): correct or remove it`},
		{`group: ""`, `group: |apps`, "up", `targetRefs[0] is a "Service" of group "apps": name a Service of group ""`},
		{`group: ""`, `group: |7`, "", `field "spec.targetRefs[0].group" is a number where text is expected: put it in quotes: "7"`},
		{`targetRefs: [`, `targetRefs: [|7, `, "", `field "spec.targetRefs[0]" is a number where a map of fields is expected: write a map of fields`},
		{`targetRefs: [`, `|targetRef: [`, "", `unknown field "spec.targetRef" (did you mean "targetRefs"?): correct or remove it`},
		{`targetRefs: [{group: "", kind: Service, name: cart}]`, `targetRefs: [|]`, "up", `SCOPE_CHAIN without targetRefs is in force nowhere: name the Services`},
		{`scope: SCOPE_CHAIN`, `|scpe: SCOPE_CHAIN`, "", `unknown field "spec.scpe" (did you mean "scope"?): correct or remove it`},
		{`scope: SCOPE_CHAIN`, `scope: |7`, "", `field "spec.scope" is a number where text is expected: put it in quotes: "7"`},
		{`action: DENY`, `action: |7`, "", `field "spec.rbac.action" is a number where text is expected: put it in quotes: "7"`},
		{`action: DENY`, `|actio: DENY`, "", `unknown field "spec.rbac.actio" (did you mean "action"?): correct or remove it`},
		{`action: DENY`, `|mode: LOG, action: DENY`, "", `spec.rbac.mode "LOG" does not exist: write ENFORCE or AUDIT`},
		{`policies: [`, `policies: [|7, `, "", `field "spec.rbac.policies[0]" is a number where a map of fields is expected: write a map of fields`},
		{`policies: [{name: p, principals: [{namespace: x}], permissions: [{pathPrefix: /a}]}]`, `policies: |7`, "", `field "spec.rbac.policies" is a number where a list is expected: write a list`},
		{`name: p`, `|nam: p`, "", `unknown field "spec.rbac.policies[0].nam" (did you mean "name"?): correct or remove it`},
		{`name: p`, `name: |""`, "up", `rbac.policies[0]: no name: write one`},
		{`principals: [`, `principals: [|7, `, "", `field "spec.rbac.policies[0].principals[0]" is a number where a map of fields is expected: write a map of fiel`},
		{`principals: [`, `|principal: [`, "", `unknown field "spec.rbac.policies[0].principal" (did you mean "principals"?): correct or remove it`},
		{`principals: [{namespace: x}]`, `principals: |7`, "", `field "spec.rbac.policies[0].principals" is a number where a list is expected: write a list`},
		{`namespace: x`, `namespace: |X`, "up", `rbac.policies[0].principals[0]: namespace "X" cannot be a name: write a namespace's`},
		{`namespace: x`, `namespace: |7`, "", `field "spec.rbac.policies[0].principals[0].namespace" is a number where text is expected: put it in quotes: "7`},
		{`namespace: x`, `namespace: |x, spiffeId: spiffe://a/b`, "up", `rbac.policies[0].principals[0]: write exactly one of spiffeId and namespace`},
		{`namespace: x`, `|spiffeid: spiffe://a/b`, "", `unknown field "spec.rbac.policies[0].principals[0].spiffeid" (did you mean "spiffeId"?): correct or remove it`},
		{`pathPrefix: /a`, `|pathPrefx: /a`, "", `unknown field "spec.rbac.policies[0].permissions[0].pathPrefx" (did you mean "pathPrefix"?): correct or remove`},
		{`pathPrefix: /a`, `pathPrefix: |a`, "up", `rbac.policies[0].permissions[0]: pathPrefix "a" does not begin with /: write it absolute`},
		{`pathPrefix: /a`, `pathPrefix: |/a%20`, "up", `rbac.policies[0].permissions[0]: pathPrefix "/a%20" holds '%', and paths are compared decoded: write it decode`},
		{`pathPrefix: /a`, `pathPrefix: |7`, "", `field "spec.rbac.policies[0].permissions[0].pathPrefix" is a number where text is expected: put it in quotes: `},
		{`pathPrefix: /a`, `|method: get`, "", `rbac.policies[0].permissions[0]: no request has the method "get": write GET`},
		{`pathPrefix: /a`, `|method: "G T"`, "", `rbac.policies[0].permissions[0]: "G T" is no method: write one like GET`},
		{`pathPrefix: /a`, `|method: 7`, "", `field "spec.rbac.policies[0].permissions[0].method" is a number where text is expected: put it in quotes: "7"`},
		{`pathPrefix: /a`, `|method: GET, pathPrefix: /a`, "up", `rbac.policies[0].permissions[0]: write exactly one of pathPrefix and method`},
		{`permissions: [`, `permissions: [|7, `, "", `field "spec.rbac.policies[0].permissions[0]" is a number where a map of fields is expected: write a map of fie`},
		{`permissions: [`, `|permission: [`, "", `unknown field "spec.rbac.policies[0].permission" (did you mean "permissions"?): correct or remove it`},
		{`rbac: {action`, `|extAuthz: {}, rbac: {action`, "up", `extAuthz and rbac in one filter: keep one, and write an HTTPFilter for each other`},
		{`spec: {`, `|spce: {`, "file", `unknown field "spce" (did you mean "spec"?): correct or remove it`},
		{`name: f,`, `name: |f, annotations: {file.aether.io/invalid: ""},`, "file", `annotation file.aether.io/invalid: no reason: write why the filter is refused, or remove it`},
		{`name: f,`, `name: |f, annotations: {file.aether.io/invlid: "a"},`, "file", `annotation file.aether.io/invlid does not exist: an HTTPFilter has file.aether.io/invalid`},
	}},
	{"HTTPFilter shop/f", "apiVersion: config.aether.io/v1\nkind: HTTPFilter\nmetadata: {name: f, namespace: shop}\nspec: {scope: SCOPE_CHAIN, targetRefs: [{group: \"\", kind: Service, name: cart}], headerToMetadata: {rules: [{header: x, metadataKey: k}]}}\n", [][4]string{
		{`header: x`, `|heder: x`, "", `unknown field "spec.headerToMetadata.rules[0].heder" (did you mean "header"?): correct or remove it`},
		{`header: x`, `header: |7`, "", `field "spec.headerToMetadata.rules[0].header" is a number where text is expected: put it in quotes: "7"`},
		{`header: x`, `header: |"a b"`, "up", `headerToMetadata.rules[0]: header name "a b" is not a field name: letters, digits and - only`},
		{`metadataKey: k`, `|metadatKey: k`, "", `unknown field "spec.headerToMetadata.rules[0].metadatKey" (did you mean "metadataKey"?): correct or remove it`},
		{`metadataKey: k`, `metadataKey: |7`, "", `field "spec.headerToMetadata.rules[0].metadataKey" is a number where text is expected: put it in quotes: "7"`},
		{`metadataKey: k`, `metadataKey: |""`, "up", `headerToMetadata.rules[0]: no metadataKey: write the key of the endpoints' metadata`},
		{`rules: [`, `|rule: [`, "", `unknown field "spec.headerToMetadata.rule" (did you mean "rules"?): correct or remove it`},
		{`rules: [`, `rules: [|7, `, "", `field "spec.headerToMetadata.rules[0]" is a number where a map of fields is expected: write a map of fields`},
		{`rules: [{header: x, metadataKey: k}]`, `rules: |7`, "", `field "spec.headerToMetadata.rules" is a number where a list is expected: write a list`},
		{`rules: [{header: x, metadataKey: k}]`, `rules: [|]`, "up", `headerToMetadata without rules: write one at least`},
		{`headerToMetadata: {rules: [{header: x, metadataKey: k}]}`, `headerToMetadata: |7`, "", `field "spec.headerToMetadata" is a number where a map of fields is expected: write a map of fields`},
	}},
	{"HTTPFilter shop/f", "apiVersion: config.aether.io/v1\nkind: HTTPFilter\nmetadata: {name: f, namespace: shop}\nspec: {scope: SCOPE_CHAIN, targetRefs: [{group: \"\", kind: Service, name: cart}], extAuthz: {contextExtensions: {a: b}}}\n", [][4]string{
		{`contextExtensions: {a: b}`, `|contextExtension: {a: b}`, "", `unknown field "spec.extAuthz.contextExtension" (did you mean "contextExtensions"?): correct or remove it`},
		{`contextExtensions: {a: b}`, `contextExtensions: {a: |7}`, "", `field "spec.extAuthz.contextExtensions.a" is a number where text is expected: put it in quotes: "7"`},
		{`contextExtensions: {a: b}`, `contextExtensions: |7`, "", `field "spec.extAuthz.contextExtensions" is a number where a map of fields is expected: write a map of fields`},
		{`contextExtensions: {a: b}`, `|disabled: 7`, "", `field "spec.extAuthz.disabled" is a number where true or false is expected: write true or false`},
		{`contextExtensions: {a: b}`, `|disabled: true, contextExtensions: {a: b}`, "", `extAuthz: contextExtensions where it is disabled: keep one of the two`},
	}},
	{"HTTPFilter shop/f", "apiVersion: config.aether.io/v1\nkind: HTTPFilter\nmetadata: {name: f, namespace: shop}\nspec: {scope: SCOPE_CHAIN, targetRefs: [{group: \"\", kind: Service, name: cart}], filter: envoy.filters.http.header_mutation, typedConfig: {\"@type\": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation, mutations: {requestMutations: [{append: {header: {key: a, value: b}, appendAction: ADD_IF_ABSENT}}], responseMutations: [{remove: c}], queryParameterMutations: [{append: {record: {key: a, value: b}}}]}}}\n", [][4]string{
		{`filter: envoy.filters.http.header_mutation`, `|filte: envoy.filters.http.header_mutation`, "", `unknown field "spec.filte" (did you mean "filter"?): correct or remove it`},
		{`filter: envoy.filters.http.header_mutation`, `filter: |7`, "", `field "spec.filter" is a number where text is expected: put it in quotes: "7"`},
		{`filter: envoy.filters.http.header_mutation`, `filter: |envoy.filters.http.lua`, "up", `filter "envoy.filters.http.lua" is not read, there is no Envoy here: write rbac, extAuthz or headerToMetadata,`},
		{`filter: envoy.filters.http.header_mutation`, `filter: |envoy.filters.http.rbac`, "up", `filter envoy.filters.http.rbac in Envoy's form is not read: write spec.rbac in its place`},
		{`typedConfig: {"`, `|typedConfg: {"`, "", `unknown field "spec.typedConfg" (did you mean "typedConfig"?): correct or remove it`},
		{`"@type": type`, `|"@typ": type`, "up", `typedConfig: @type "" is not read: write type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.`},
		{`"@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation`, `"@type": |7`, "up", `typedConfig: @type "" is not read: write type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.`},
		{`"@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation`, `"@type": |x`, "up", `typedConfig: @type "x" is not read: write type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3`},
		{`mutations: {`, `|mutation: {`, "", `unknown field "spec.typedConfig.mutation" (did you mean "mutations"?): correct or remove it`},
		{`requestMutations: [`, `|requestMutation: [`, "", `unknown field "spec.typedConfig.mutations.requestMutation" (did you mean "requestMutations"?): correct or remo`},
		{`requestMutations: [`, `requestMutations: [|7, `, "", `field "spec.typedConfig.mutations.requestMutations[0]" is a number where a map of fields is expected: write a `},
		{`requestMutations: [`, `requestMutations: [|{remov: x}, `, "", `unknown field "spec.typedConfig.mutations.requestMutations[0].remov" (did you mean "remove"?): correct or remo`},
		{`requestMutations: [`, `requestMutations: [|{remove: 7}, `, "", `field "spec.typedConfig.mutations.requestMutations[0].remove" is a number where text is expected: put it in qu`},
		{`requestMutations: [`, `requestMutations: [|{remove: host}, `, "", `typedConfig.mutations.requestMutations[0]: header host is the proxy's own to write: remove it from the filter`},
		{`requestMutations: [`, `requestMutations: [|{removeOnMatch: {}}, `, "", `typedConfig.mutations.requestMutations[0]: removeOnMatch is not built: write a remove for each header`},
		{`header: {key: a, value: b}`, `|heade: {key: a, value: b}`, "", `unknown field "spec.typedConfig.mutations.requestMutations[0].append.heade" (did you mean "header"?): correct `},
		{`key: a, value: b}, appendAction`, `|ky: a, value: b}, appendAction`, "", `unknown field "spec.typedConfig.mutations.requestMutations[0].append.header.ky" (did you mean "key"?): correct`},
		{`key: a, value: b}, appendAction`, `key: |7, value: b}, appendAction`, "", `field "spec.typedConfig.mutations.requestMutations[0].append.header.key" is a number where text is expected: p`},
		{`key: a, value: b}, appendAction`, `key: a, |valu: b}, appendAction`, "", `unknown field "spec.typedConfig.mutations.requestMutations[0].append.header.valu" (did you mean "value"?): cor`},
		{`key: a, value: b}, appendAction`, `key: a, value: |7}, appendAction`, "", `field "spec.typedConfig.mutations.requestMutations[0].append.header.value" is a number where text is expected:`},
		{`key: a, value: b}, appendAction`, `key: a, value: |"%X%"}, appendAction`, "up", `typedConfig.mutations.requestMutations[0]: value "%X%": substitutions of Envoy are not built: write text, and `},
		{`key: a, value: b}, appendAction`, `key: a, value: |""}, appendAction`, "up", `typedConfig.mutations.requestMutations[0]: an empty value without keepEmptyValue changes nothing: write keepEm`},
		{`appendAction: ADD_IF_ABSENT`, `appendAction: |NOPE`, "up", `spec.typedConfig.mutations.requestMutations[0].append.appendAction "NOPE" does not exist: write APPEND_IF_EXIS`},
		{`appendAction: ADD_IF_ABSENT`, `|append: true`, "", `typedConfig.mutations.requestMutations[0]: append is not read inside append: write appendAction, which is one `},
		{`appendAction: ADD_IF_ABSENT`, `|appendActin: ADD_IF_ABSENT`, "", `unknown field "spec.typedConfig.mutations.requestMutations[0].append.appendActin" (did you mean "appendAction"`},
		{`remove: c`, `remove: |"c d"`, "up", `typedConfig.mutations.responseMutations[0]: header name "c d" is not a field name: letters, digits and - only`},
		{`record: {`, `|recrd: {`, "", `unknown field "spec.typedConfig.mutations.queryParameterMutations[0].append.recrd" (did you mean "record"?): c`},
		{`record: {key: a`, `record: {|ky: a`, "", `unknown field "spec.typedConfig.mutations.queryParameterMutations[0].append.record.ky" (did you mean "key"?): `},
		{`record: {key: a`, `record: {key: |""`, "up", `typedConfig.mutations.queryParameterMutations[0]: parameter "": a name that is not empty, and no control chara`},
		{`record: {key: a, value: b}`, `record: {key: a, value: |"%X%"}`, "up", `typedConfig.mutations.queryParameterMutations[0]: value "%X%": substitutions of Envoy are not built: write tex`},
		{`record: {key: a, value: b}`, `record: {key: a, value: |7}`, "", `field "spec.typedConfig.mutations.queryParameterMutations[0].append.record.value" is a number where text is ex`},
	}},
	{"ReferenceGrant shop/g", "apiVersion: gateway.networking.k8s.io/v1beta1\nkind: ReferenceGrant\nmetadata: {name: g, namespace: shop}\nspec: {from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: other}], to: [{group: \"\", kind: Service, name: cart}]}\n", [][4]string{
		{`kind: HTTPRoute`, `|kin: HTTPRoute`, "", `unknown field "spec.from[0].kin" (did you mean "kind"?): correct or remove it`},
		{`kind: HTTPRoute`, `kind: |HTTPRout`, "up", `spec.from[0]: kind "HTTPRout" does not exist: write HTTPRoute`},
		{`kind: HTTPRoute`, `kind: |Gateway`, "", ``},
		{`group: gateway`, `|grop: gateway`, "", `unknown field "spec.from[0].grop" (did you mean "group"?): correct or remove it`},
		{`group: gateway.networking.k8s.io`, `group: |gateway.networking.k8s`, "up", `spec.from[0]: group "gateway.networking.k8s" has no HTTPRoute: write group gateway.networking.k8s.io`},
		{`group: gateway.networking.k8s.io, kind`, `|kind`, "up", `spec.from[0]: group "" has no HTTPRoute: write group gateway.networking.k8s.io`},
		{`kind: HTTPRoute, namespace: other`, `kind: |HTTPRoute`, "up", `spec.from[0]: no namespace: write that of the references`},
		{`namespace: other`, `namespace: |a_b`, "up", `spec.from[0]: namespace "a_b" cannot be a name: a lowercase RFC 1123 label must consist of lower case alphanum`},
		{`namespace: other`, `|namspace: other`, "", `unknown field "spec.from[0].namspace" (did you mean "namespace"?): correct or remove it`},
		{`kind: Service`, `kind: |Servce`, "up", `spec.to[0]: kind "Servce" does not exist: write Service`},
		{`kind: Service`, `kind: |Secret`, "", ``},
		{`kind: Service`, `|kin: Service`, "", `unknown field "spec.to[0].kin" (did you mean "kind"?): correct or remove it`},
		{`group: "",`, `group: |apps,`, "", ``},
		{`name: cart`, `name: |CART`, "up", `spec.to[0]: name "CART" cannot be a Service's name: a lowercase RFC 1123 label must consist of lower case alph`},
		{`name: cart`, `|nam: cart`, "", `unknown field "spec.to[0].nam" (did you mean "name"?): correct or remove it`},
		{`from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: other}]`, `from: [|]`, "up", `spec.from is empty, and the grant permits nothing: write whose references it permits`},
		{`from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: other}], to`, `|to`, "up", `spec.from is empty, and the grant permits nothing: write whose references it permits`},
		{`to: [`, `|tos: [`, "", `unknown field "spec.tos" (did you mean "to"?): correct or remove it`},
		{`spec: {`, `|spce: {`, "file", `unknown field "spce" (did you mean "spec"?): correct or remove it`},
		{`name: g,`, `name: |g, annotations: {file.aether.io/x: ""},`, "file", `annotation file.aether.io/x does not exist: a ReferenceGrant has none of this prefix`},
	}},
	{"MeshConfig aether-system/default", "apiVersion: config.aether.io/v1\nkind: MeshConfig\nmetadata: {name: default, namespace: aether-system}\nspec: {sameNode: inProcess, proxy: {traceSampleRate: 0.5, accessLogSuccessSampleRate: 50, tracingEnabled: true}}\n", [][4]string{
		{`traceSampleRate: 0.5`, `traceSampleRate: |2`, "up", `spec.proxy.traceSampleRate 2: write a number from 0 to 1`},
		{`traceSampleRate: 0.5`, `traceSampleRate: |x`, "", `field "spec.proxy.traceSampleRate" is text where a number is expected: write a number`},
		{`accessLogSuccessSampleRate: 50`, `accessLogSuccessSampleRate: |101`, "up", `spec.proxy.accessLogSuccessSampleRate 101: write a number from 0 to 100`},
		{`tracingEnabled: true`, `tracingEnabled: |x`, "", `field "spec.proxy.tracingEnabled" is text where true or false is expected: write true or false`},
		{`tracingEnabled: true`, `|tracingEnable: true`, "", `unknown field "spec.proxy.tracingEnable" (did you mean "tracingEnabled"?): correct or remove it`},
		{`sameNode: inProcess`, `|routeSemantics: x`, "", `spec.routeSemantics "x" does not exist: write Aether or GatewayAPI`},
		{`sameNode: inProcess`, `|routeSemantics: 7`, "", `field "spec.routeSemantics" is a number where text is expected: put it in quotes: "7"`},
		{`proxy: {`, `|proxi: {`, "file", `unknown field "spec.proxi" (did you mean "proxy"?): correct or remove it`},
		{`name: default,`, `name: |default, annotations: {file.aether.io/x: ""},`, "file", `annotation file.aether.io/x does not exist: a MeshConfig has none of this prefix`},
		{`namespace: aether-system`, `namespace: |shop`, "file", ``},
	}},
	{"Service shop/web", "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80, targetPort: 8080}, {port: 81, targetPort: 8080}], selector: {app: web}}\n", [][4]string{
		{`port: 80,`, `port: |18081,`, "up", `spec.ports[0]: port 18081: 18001, 18008, 18081 and 18082 are reserved by the mesh and can be no Service's port`},
		{`port: 80,`, `|prt: 80,`, "file", `unknown field "spec.ports[0].prt" (did you mean "port"?): correct or remove it`},
		{`port: 80,`, `|protocol: SCTP, port: 80,`, "up", `spec.ports[0]: port 80: the mesh carries no SCTP: this port is left out`},
		{`port: 80,`, `port: |80, nodePort: x,`, "file", `field "spec.ports[0].nodePort" is text where a whole number is expected: write a whole number`},
		{`port: 81`, `port: |80`, "up", `spec.ports[1]: port 80 stands twice: keep one`},
		{`port: 81`, `port: |0`, "up", `spec.ports[1]: port 0 is no port: write a number from 1 to 65535`},
		{`targetPort: 8080}`, `targetPort: |-1}`, "up", `spec.ports[0]: targetPort -1 is no port: write a number from 1 to 65535, or a port's name`},
		{`targetPort: 8080}`, `targetPort: |18081}`, "up", `spec.ports[0]: port 80: 18001, 18008, 18081 and 18082 are reserved by the mesh and can be no Service's port or`},
		{`targetPort: 8080}`, `targetPort: |{a: b}}`, "file", `field "spec.ports[0].targetPort" cannot be read: cannot unmarshal object into Go value of type int32: correct `},
		{`targetPort: 8080}`, `|appProtocol: 7}`, "file", `field "spec.ports[0].appProtocol" is a number where text is expected: put it in quotes: "7"`},
		{`clusterIP: 10.96.0.1`, `|clusterIPs: [10.96.0.1, x]`, "", `spec.clusterIPs[1]: cluster address "x": not an IP address: write one like 10.0.0.1 or fd00::1`},
		{`clusterIP: 10.96.0.1`, `clusterIP: |0.0.0.0`, "up", `spec.clusterIP: cluster address "0.0.0.0": not an address of one host: write one like 10.0.0.1 or fd00::1`},
		{`selector: {app: web}`, `selector: {app: |7}`, "file", `field "spec.selector.app" is a number where text is expected: put it in quotes: "7"`},
		{`name: web,`, `name: |web, annotations: {file.aether.io/target-ports: "x"},`, "file", `annotation file.aether.io/target-ports: entry "x": write <port>=<pod port> or <port>/UDP=<pod port>`},
		{`name: web,`, `name: |web, annotations: {file.aether.io/target-ports: "80=8080"},`, "file", `annotation file.aether.io/target-ports: the Service has no port 80 with a named targetPort: remove the entry`},
		{`name: web,`, `name: |web, annotations: {file.aether.io/target-port: "80=8080"},`, "file", `annotation file.aether.io/target-port does not exist: a Service has file.aether.io/target-ports`},
		{`name: web,`, `name: |web.x,`, "up of Service shop/web.x", `metadata.name "web.x" cannot be a Service's name: must not contain dots`},
		{`spec: {`, `|spce: {`, "file", `unknown field "spce" (did you mean "spec"?): correct or remove it`},
	}},
	{"Service shop/cart", "apiVersion: v1\nkind: Service\nmetadata: {name: cart, namespace: shop, labels: {aether.io/mesh-service: \"true\"}}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80, targetPort: 8080, appProtocol: http}]}\n", [][4]string{
		{`appProtocol: http`, `appProtocol: |x`, "up", `spec.ports[0]: port 80: appProtocol "x" says nothing to the mesh: leave it out, or write http or tcp (UDP: udp`},
		{`appProtocol: http`, `appProtocol: |udp`, "up", `spec.ports[0]: port 80: appProtocol "udp" says nothing to the mesh: leave it out, or write http or tcp (UDP: u`},
	}},
	{"Pod shop/cart-1", "apiVersion: v1\nkind: Pod\nmetadata: {name: cart-1, namespace: shop, labels: {aether.io/managed: \"true\"}, annotations: {endpoint.aether.io/ports: \"8080\"}}\nspec: {nodeName: n1, serviceAccountName: cart, containers: [{name: cart, ports: [{name: web, containerPort: 8080}]}]}\nstatus: {phase: Running, podIPs: [{ip: 10.244.1.11}], conditions: [{type: Ready, status: \"True\"}]}\n", [][4]string{
		{`endpoint.aether.io/ports: "8080"`, `endpoint.aether.io/ports: |"8080,x"`, "up", `annotation endpoint.aether.io/ports: "8080,x": entry "x": "x" is not a number: write <port> or <port>=<h1|h2|t`},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/port: ""`, "", `annotation endpoint.aether.io/port: "": no number: write a whole number from 0 to 65535, digits only, or drop `},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/port: "18081"`, "", `annotation endpoint.aether.io/port: "18081": port 18081 is reserved by the mesh (its listeners have 18001, 180`},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/port: 8080`, "", `field "metadata.annotations.endpoint.aether.io/port" is a number where text is expected: put it in quotes: "80`},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/weight: "x"`, "", `annotation endpoint.aether.io/weight: "x": "x" is not a number: write a whole number from 0 to 4294967295, dig`},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/health-path: ""`, "", ``},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/uds-socket: ""`, "", `annotation endpoint.aether.io/uds-socket: "": says nothing: ignored`},
		{`endpoint.aether.io/ports: "8080"`, `|endpoint.aether.io/uds-socket: "a/.."`, "", `annotation endpoint.aether.io/uds-socket: "a/..": not <volume>/<file>: the file is no plain name: delivered ov`},
		{`endpoint.aether.io/ports: "8080"`, `|metadata.endpoint.aether.io/: "x"`, "", `annotation metadata.endpoint.aether.io/: "x": no key after "metadata.endpoint.aether.io/": write metadata.endp`},
		{`endpoint.aether.io/ports: "8080"`, `|aether.io/spiffe-id: "spiffe://a"`, "", `annotation aether.io/spiffe-id: "spiffe://a": names a trust domain, not a workload: write spiffe://<trust doma`},
		{`endpoint.aether.io/ports: "8080"`, `|config.aether.io/upstreams: "/x"`, "", `annotation config.aether.io/upstreams: "/x": entry "/x": write <service> or <namespace>/<service>`},
		{`endpoint.aether.io/ports: "8080"`, `|config.aether.io/upstream: "x"`, "", `annotation config.aether.io/upstream: "x": no such annotation: ignored`},
		{`endpoint.aether.io/ports: "8080"`, `|capture.aether.io/exclude-outbound-ports: "80,99999"`, "", `annotation capture.aether.io/exclude-outbound-ports: "99999": not a port`},
		{`endpoint.aether.io/ports: "8080"`, `|capture.aether.io/exclude-outbound-ip-ranges: "10.0.0.0/33"`, "", `annotation capture.aether.io/exclude-outbound-ip-ranges: "10.0.0.0/33": not an address range`},
		{`endpoint.aether.io/ports: "8080"`, `|capture.aether.io/redirect: "true"`, "", `annotation capture.aether.io/redirect does not exist and is ignored: the ones that do are capture.aether.io/re`},
		{`endpoint.aether.io/ports: "8080"`, `|file.aether.io/netns: "run/x"`, "", `annotation file.aether.io/netns: "run/x" is not an absolute path: write one that begins with /`},
		{`endpoint.aether.io/ports: "8080"`, `|file.aether.io/part: "x"`, "", `annotation file.aether.io/part: "x": write endpoint or workload, or drop it for both`},
		{`endpoint.aether.io/ports: "8080"`, `|file.aether.io/container-id: ""`, "", `annotation file.aether.io/container-id: no ID: write the container's, or drop the annotation`},
		{`endpoint.aether.io/ports: "8080"`, `|file.aether.io/zone: 7`, "", `field "metadata.annotations.file.aether.io/zone" is a number where text is expected: put it in quotes: "7"`},
		{`endpoint.aether.io/ports: "8080"`, `|aether.io/nope: "x"`, "", ``},
		{`aether.io/managed: "true"`, `aether.io/managed: |"yes"`, "up", `label aether.io/managed is "yes", and only "true" puts a pod in the mesh: write "true" or "false"`},
		{`aether.io/managed: "true"`, `aether.io/managed: |true`, "", `field "metadata.labels.aether.io/managed" is true or false where text is expected: put it in quotes: "true"`},
		{`aether.io/managed: "true"`, `|aether.io/manged: "true"`, "", `label aether.io/manged does not exist, and the pod is not in the mesh: write aether.io/managed`},
		{`nodeName: n1`, `nodeName: |N_1`, "up", `spec.nodeName: node "N_1" cannot be a name: a lowercase RFC 1123 subdomain must consist of lower case alphanum`},
		{`nodeName: n1`, `|hostNetwork: true, nodeName: n1`, "", `spec.hostNetwork: a pod on the host's network cannot be in the mesh, its network namespace is the node's: drop`},
		{`containerPort: 8080`, `containerPort: |80800`, "up", `spec.containers[0].ports[0].containerPort 80800 is no port: write a number from 1 to 65535`},
		{`containerPort: 8080`, `containerPort: |x`, "", `field "spec.containers[0].ports[0].containerPort" is text where a whole number is expected: write a whole numb`},
		{`containerPort: 8080`, `containerPort: |8080, protocol: QUIC`, "", `spec.containers[0].ports[0].protocol "QUIC" does not exist: write TCP or UDP`},
		{`name: web,`, `name: |web_http,`, "up", `spec.containers[0].ports[0].name "web_http" is no port's name: must contain only alpha-numeric characters (a-z`},
		{`podIPs: [{ip: 10.244.1.11}]`, `podIPs: [|]`, "up", `status: no address: write status.podIPs`},
		{`podIPs: [{ip: 10.244.1.11}]`, `podIPs: [{|}]`, "up", `status.podIPs[0].ip: pod address "": not an IP address: write one like 10.0.0.1 or fd00::1`},
		{`podIPs: [{ip: 10.244.1.11}]`, `podIPs: [{ip: |10.244.1.11}, {ip: x}]`, "", `status.podIPs[1].ip: pod address "x": not an IP address: write one like 10.0.0.1 or fd00::1`},
		{`podIPs: [{ip: 10.244.1.11}]`, `podIPs: [{ip: |0.0.0.0}]`, "up", `status.podIPs[0].ip: pod address "0.0.0.0": not an address of one host: write one like 10.0.0.1 or fd00::1`},
		{`podIPs: [{ip: 10.244.1.11}]`, `|podIP: 10.244.1.300`, "", `status.podIP: pod address "10.244.1.300": not an IP address: write one like 10.0.0.1 or fd00::1`},
		{`podIPs: [{ip: 10.244.1.11}]`, `podIPs: [{|i: 10.244.1.11}]`, "", `unknown field "status.podIPs[0].i": correct or remove it`},
		{`status: "True"`, `status: |"Tru"`, "up", `status.conditions[0].status "Tru" does not exist, and the pod counts as not ready: write "True" or "False"`},
		{`status: "True"`, `status: |true`, "", `field "status.conditions[0].status" is true or false where text is expected: put it in quotes: "true"`},
		{`namespace: shop`, `namespace: |Shop`, "up of Pod Shop/cart-1", `metadata.namespace "Shop" cannot be a name: a lowercase RFC 1123 label must consist of lower case alphanumeric`},
		{`namespace: shop`, `namespace: |kube-system`, "up of Pod kube-system/cart-1", `namespace kube-system is never in the mesh: the pod is not served`},
	}},
	{"Node n1", "apiVersion: v1\nkind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/zone: z}}\nspec: {}\n", [][4]string{
		{`zone: z`, `zone: |7`, "", `field "metadata.labels.topology.kubernetes.io/zone" is a number where text is expected: put it in quotes: "7"`},
		{`labels: {`, `|lables: {`, "", `unknown field "metadata.lables" (did you mean "labels"?): correct or remove it`},
		{`name: n1,`, `name: |n1, annotations: {file.aether.io/x: "y"},`, "", `annotation file.aether.io/x does not exist: a Node has none of this prefix`},
	}},
	{"ServiceAccount shop/x", "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: x, namespace: shop, annotations: {file.aether.io/catalog: \"true\"}}\n", [][4]string{
		{`catalog: "true"`, `catalog: |"yes"`, "up", `annotation file.aether.io/catalog: "yes": write "true" or "false"`},
		{`catalog: "true"`, `catalog: |true`, "", `field "metadata.annotations.file.aether.io/catalog" is true or false where text is expected: put it in quotes:`},
		{`file.aether.io/catalog: "true"`, `|file.aether.io/catlog: "true"`, "", `annotation file.aether.io/catlog does not exist: a ServiceAccount has file.aether.io/catalog, file.aether.io/r`},
		{`file.aether.io/catalog: "true"`, `|file.aether.io/retained-ports: "x"`, "", `annotation file.aether.io/retained-ports does not exist: a ServiceAccount has file.aether.io/catalog, file.aet`},
		{`file.aether.io/catalog: "true"`, `|file.aether.io/retained: "80,x"`, "", `annotation file.aether.io/retained: entry "x": write the HTTP ports the service had, from 1 to 65535, joined b`},
		{`name: x,`, `name: |x.y,`, "up of ServiceAccount shop/x.y", `name "x.y" cannot be a Service's name: must not contain dots`},
	}},
}

// carrier is cartPod with what all the good documents need.
var carrier = strings.NewReplacer(`ports: "8080"`, `ports: "8080,5432=tcp"`, `labels: {`, `uid: u1, labels: {`, `containers: [`,
	`volumes: [{name: app, csi: {driver: csi.aether.io}}], containers: [`).Replace(cartPod)

// TestOneProblemAFlaw: a flaw of an object of any kind is one problem, which names the object, the line and the field,
// and says what is wrong there; a value that the contract takes for its default is none. So it is of a file's objects and
// of an API server's.
func TestOneProblemAFlaw(t *testing.T) {
	fromFile := func(text string) []model.Problem {
		m, reported := loadText(t, text)
		_, compiled := compile.Compile(m)
		return input.Problems(reported, compiled)
	}
	rows := map[string]int{}
	for _, k := range kindFlaws {
		kind, _, _ := strings.Cut(k.object, " ")
		before := carrier + "---\n"
		if kind == "Pod" {
			before = ""
		}
		if got := fromFile(before + k.good); len(got) > 0 {
			t.Errorf("%s as it is: %v", k.object, got)
			continue
		}
		for _, f := range k.flaws {
			if strings.Count(k.good, f[0]) == 0 {
				t.Fatalf("%s has no %q", k.object, f[0])
			}
			rows[kind]++
			begin, rest, _ := strings.Cut(f[1], "|")
			if begin != "" || !strings.HasPrefix(f[0], "spec: {") { // else a key at the margin
				begin += "\n   "
			}
			text := strings.Replace(k.good, f[0], begin+rest, 1)
			line := strings.Count(before+text[:strings.Index(k.good, f[0])+len(begin)], "\n")
			at, object, other := strings.Cut(f[2], "of ")
			if !other {
				object = k.object
			}
			at, inAPI := strings.CutSuffix(strings.TrimSpace(at), "file")
			switch strings.TrimSpace(at) {
			case "":
				at = fmt.Sprintf("x.yaml:%d", line+1)
			case "up":
				at = fmt.Sprintf("x.yaml:%d", line)
			case "none":
				at = ""
			}
			check := func(source string, got []model.Problem, at string) {
				switch {
				case f[3] == "":
					if len(got) > 0 {
						t.Errorf("%s of %s with %q: %v, want no problem", k.object, source, f[1], got)
					}
				case len(got) != 1 || got[0].Object != object || got[0].Where != at || !strings.HasPrefix(got[0].Reason, f[3]):
					t.Errorf("%s of %s with %q: %+v, want one of %s at %q that begins with %q", k.object, source, f[1], got, object, at, f[3])
				}
			}
			check("a file", fromFile(before+text), at)
			if !inAPI && kind != "Pod" && kind != "Node" && kind != "ServiceAccount" {
				check("an API server", fromAPI(t, text), "")
			}
		}
	}
	t.Log(rows)
}

// fromAPI are the problems of one object of an API server, beside the carrier.
func fromAPI(t *testing.T, text string) []model.Problem {
	t.Helper()
	b, err := yaml.YAMLToJSON([]byte(text))
	var u map[string]any
	if err == nil {
		err = json.Unmarshal(b, &u) // as the client reads it
	}
	if err != nil {
		t.Fatal(err)
	}
	s := gamma.NewState("", input.Settings{})
	s.SlicesUnread("")
	if kind := u["kind"].(string); kind != gamma.KindService {
		s.Set(kind, u)
	} else {
		var svc corev1.Service
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u, &svc); err != nil {
			t.Fatal(err)
		}
		s.SetService(&svc)
	}
	whole := s.Whole()
	m, reported := loadText(t, carrier)
	for _, list := range whole.Services {
		m.Services = append(m.Services, list...)
	}
	for _, list := range whole.Routes {
		m.Routes = append(m.Routes, list...)
	}
	for _, list := range whole.Filters {
		m.Filters = append(m.Filters, list...)
	}
	for _, list := range whole.Policies {
		m.Policies = append(m.Policies, list...)
	}
	for _, list := range whole.Problems {
		reported = append(reported, list...)
	}
	_, compiled := compile.Compile(m)
	return input.Problems(reported, compiled)
}
