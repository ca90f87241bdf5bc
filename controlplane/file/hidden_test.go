package file

import (
	"fmt"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/controlplane/input"
)

// TestHiddenParent: a parent whose kind stands under a misspelt key is the Service that it names, so that the route,
// which is refused, is not gone around. One of another kind, or of none, is not made a Service.
func TestHiddenParent(t *testing.T) {
	for _, c := range []struct {
		parent string
		hung   bool
	}{
		{`{group: "", kin: Service, name: cart}`, true},
		{`{group: "", Kind: Service, name: cart}`, true},
		{`{group: "", kind: Servce, name: cart}`, true},
		{`{group: "", kin: Gateway, name: cart}`, false},
		{`{group: "", kind: 7, name: cart}`, false},
	} {
		m, got := loadText(t, carrier+"---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\n"+
			"spec: {parentRefs: ["+c.parent+"], rules: [{backendRefs: [{name: cart, port: 8080}]}]}\n")
		if len(got) != 1 || !strings.Contains(got[0].Reason, "the whole route is refused") {
			t.Errorf("%s: %v", c.parent, got)
		}
		if hung := len(m.Routes) == 1 && len(m.Routes[0].Parents) == 1 && m.Routes[0].Rules[0].Invalid != ""; hung != c.hung || !hung && len(m.Routes) > 0 {
			t.Errorf("%s: %+v", c.parent, m.Routes)
		}
	}
}

// TestGrantEntries: an entry of a ReferenceGrant that can be for nothing permits nothing, least of all everything, and the
// other entries permit what they say.
func TestGrantEntries(t *testing.T) {
	const from = `{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: shop}`
	for _, c := range []struct {
		from, to string
		permits  bool
		problems int // of the grant
	}{
		{from, `{group: "", kind: Service}`, true, 0},
		{from, `{group: "", kind: Service, name: web}`, true, 0},
		{from, `{group: "", kind: Service, name: other}`, false, 0},
		{from, `{group: "", kind: Service, name: ""}`, false, 1},
		{from, `{group: "", kind: Service, name: ""}, {group: "", kind: Service, name: web}`, true, 1},
		{from, `{group: "", kind: Servce}`, false, 1},
		{from, ``, false, 1},
		{``, `{group: "", kind: Service}`, false, 1},
		{`{group: gateway.networking.k8s.io, kind: HTTPRout, namespace: shop}`, `{group: "", kind: Service}`, false, 1},
		{`{group: gateway.networking.k8s.io, kind: UDPRoute, namespace: shop}`, `{group: "", kind: Service}`, false, 0},
		{`{group: "", kind: HTTPRoute, namespace: shop}, ` + from, `{group: "", kind: Service}`, true, 1},
	} {
		m, got := loadText(t, carrier+"---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\n"+
			"spec: {parentRefs: [{group: \"\", kind: Service, name: cart}], rules: [{backendRefs: [{name: web, namespace: pay, port: 8080}]}]}\n"+
			"---\napiVersion: gateway.networking.k8s.io/v1\nkind: ReferenceGrant\nmetadata: {name: g, namespace: pay}\nspec: {from: ["+c.from+"], to: ["+c.to+"]}\n")
		n := 0
		for _, p := range got {
			if p.Object == "ReferenceGrant pay/g" {
				n++
			}
		}
		if permits := m.Routes[0].Rules[0].Backends[0].Invalid == ""; permits != c.permits || n != c.problems {
			t.Errorf("from %s to %s: permits %v, %v", c.from, c.to, permits, got)
		}
	}
}

// TestOneProblemADocument: what keeps a document from being read as an object is one problem, at its line.
func TestOneProblemADocument(t *testing.T) {
	const route = "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{group: \"\", kind: Service, name: cart}]}\n"
	for _, c := range []struct {
		old, new string
		line     int // of the document
		what     string
	}{
		{"kind: HTTPRoute", "kind: HTTPRout", 2, "kind HTTPRout (gateway.networking.k8s.io/v1) is not read: write HTTPRoute"},
		{"kind: HTTPRoute", "kind: 7", 1, "no kind: begin the object with apiVersion and kind"},
		{"kind: HTTPRoute\n", "", 1, "no kind: begin the object with apiVersion and kind"},
		{"kind: HTTPRoute", "kind: HTTPRoute\nkind: GRPCRoute", 3, `field "kind" stands twice`},
		{"k8s.io/v1\n", "k8s.io/v2\n", 1, `apiVersion "gateway.networking.k8s.io/v2" of an HTTPRoute is not read`},
		{"apiVersion: gateway.networking.k8s.io/v1\n", "", 1, `apiVersion "" of an HTTPRoute is not read`},
		{"name: r,", "nam: r,", 3, `metadata.name "" cannot be a name`},
		{"namespace: shop", "namespace: Shop", 3, `metadata.namespace "Shop" cannot be a name`},
		{"metadata: {name", "metadata: {{name", 3, "not YAML"},
		{"spec: ", "\tspec: ", 4, "not YAML"},
		{route, "- 7\n", 1, "a list where a Kubernetes object is expected"},
		{route, "just text\n", 1, "text where a Kubernetes object is expected"},
		{route, "apiVersion: v1\nkind: List\nitems: 7\n", 3, `field "items" is a number where a list is expected`},
		{route, "apiVersion: v1\nkind: List\nitem: []\n", 3, `unknown field "item"`},
		{route, "apiVersion: v1\nkind: List\nitems: [7]\n", 3, "a number where a Kubernetes object is expected"},
	} {
		m, reported := loadText(t, carrier+"---\n"+strings.Replace(route, c.old, c.new, 1))
		_, compiled := compile.Compile(m)
		got := input.Problems(reported, compiled)
		first := 1 + strings.Count(carrier, "\n") + 1
		if len(got) != 1 || got[0].Where != fmt.Sprintf("x.yaml:%d", first-1+c.line) || !strings.HasPrefix(got[0].Reason, c.what) {
			t.Errorf("%q: %+v, want one at line %d of the document, %d, that begins with %q", c.new, got, c.line, first-1+c.line, c.what)
		}
	}
}
