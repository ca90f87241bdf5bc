package file

import (
	"fmt"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
)

// rawWorld is a service of which a route takes some connections or requests to another one.
const rawWorld = `apiVersion: v1
kind: Pod
metadata: {name: db-1, namespace: shop, labels: {aether.io/managed: "true"}, annotations: {endpoint.aether.io/ports: "5432=tcp,9000"}}
spec: {nodeName: n1, serviceAccountName: db, containers: [{name: db}]}
status: {phase: Running, podIPs: [{ip: 10.244.1.11}], conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: safe-1, namespace: shop, labels: {aether.io/managed: "true"}, annotations: {endpoint.aether.io/ports: "5432=tcp,9000"}}
spec: {nodeName: n1, serviceAccountName: safe, containers: [{name: safe}]}
status: {phase: Running, podIPs: [{ip: 10.244.1.12}], conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop, labels: {aether.io/mesh-service: "true"}}
spec: {clusterIP: 10.96.0.1, ports: [{port: 5432, name: db}, {port: 9000, name: grpc}]}
---
`

// TestSelectorsNeverWiden breaks each key and each value by which a TLSRoute, a TCPRoute and a GRPCRoute say what they
// are for: what the route took goes where it went, or is refused, or nothing is published because of it.
func TestSelectorsNeverWiden(t *testing.T) {
	for _, tt := range []struct{ name, route, flow string }{
		{"TLSRoute", `apiVersion: gateway.networking.k8s.io/v1
kind: TLSRoute
metadata: {name: r, namespace: shop}
spec:
  parentRefs: [{group: "", kind: Service, name: db, port: 5432}]
  hostnames: [db.example, "*.db.example"]
  rules: [{name: one, backendRefs: [{name: safe, port: 5432, weight: 1}]}]
`, "shop/web > 10.96.0.1:5432 tls host=db.example"},
		{"TCPRoute", `apiVersion: gateway.networking.k8s.io/v1alpha2
kind: TCPRoute
metadata: {name: r, namespace: shop}
spec:
  parentRefs: [{group: "", kind: Service, name: db, port: 5432}]
  rules: [{name: one, backendRefs: [{name: safe, port: 5432, weight: 1}]}]
`, "shop/web > 10.96.0.1:5432"},
		{"GRPCRoute", `apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {name: r, namespace: shop}
spec:
  parentRefs: [{group: "", kind: Service, name: db, port: 9000}]
  rules: [{name: one, matches: [{method: {type: Exact, service: s, method: m}, headers: [{type: Exact, name: a, value: b}]}], backendRefs: [{name: safe, port: 9000, weight: 1}]}]
`, "shop/web > 10.96.0.1:9000 h2c host=db:9000"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			flow, err := model.ParseFlow(tt.flow)
			if err != nil {
				t.Fatal(err)
			}
			ask := func(text string) (v decide.Verdict, unsure string) {
				dir := t.TempDir()
				write(t, dir, "world.yaml", rawWorld)
				write(t, dir, "route.yaml", text)
				l := newLoader(dir, Options{Node: "n1"})
				m, _ := read(t, l)
				s, _ := compile.Compile(m)
				if tt.name == "GRPCRoute" {
					h := httpmsg.Head{Method: []byte("POST"), Path: []byte("/s/m"), Authority: []byte("db:9000")}
					h.Set([]byte("a"), []byte("b"))
					h.Set([]byte("content-type"), []byte("application/grpc"))
					return decide.Route(s, &flow, &h, 0, nil), l.unsure()
				}
				return decide.Decide(s, &flow, 0, nil), l.unsure()
			}
			want, _ := ask(tt.route)
			if !strings.Contains(want.String(), "safe") {
				t.Fatalf("the route does not take it: %s", want)
			}
			var root yaml.Node
			if err := yaml.Unmarshal([]byte(tt.route), &root); err != nil {
				t.Fatal(err)
			}
			spec, broken := child(root.Content[0], "spec"), 0
			parent := child(spec, "parentRefs").Content[0]
			walk(spec, func(n *yaml.Node) {
				was := *n
				for _, wrong := range []yaml.Node{
					{Kind: yaml.ScalarNode, Tag: "!!str", Value: "z z"},
					{Kind: yaml.ScalarNode, Tag: "!!str", Value: was.Value + "_"},
					{Kind: yaml.MappingNode, Tag: "!!map", Content: []*yaml.Node{{Kind: yaml.ScalarNode, Value: "zzz"}, {Kind: yaml.ScalarNode, Value: "1"}}},
					{Kind: yaml.SequenceNode, Tag: "!!seq", Content: []*yaml.Node{{Kind: yaml.SequenceNode}}},
				} {
					if wrong.Kind != yaml.ScalarNode && isKey(spec, n) {
						continue
					}
					// Another group, or a kind unlike Service, is a parent of somebody else's.
					if n == child(parent, "group") && wrong.Kind == yaml.ScalarNode || n == child(parent, "kind") && wrong.Value == "z z" {
						continue
					}
					// Another right value: a rule's name may be any text, and so may what a header is to have.
					if right := "one b"; wrong.Kind == yaml.ScalarNode && len(was.Value) > 0 && strings.Contains(right+" s m a", was.Value) && (strings.HasSuffix(wrong.Value, "_") || strings.Contains(right, was.Value)) && !isKey(spec, n) {
						continue
					}
					*n = wrong
					out, err := yaml.Marshal(&root)
					*n = was
					if err != nil {
						t.Fatal(err)
					}
					broken++
					got, unsure := ask(string(out))
					if got.Action != decide.Refuse && got.String() != want.String() && unsure == "" {
						t.Errorf("%s\nline %d: %s, was %s", out, n.Line, got, want)
					}
				}
			})
			if broken < 40 {
				t.Error(fmt.Sprint("only ", broken, " breaks"))
			}
		})
	}
}
