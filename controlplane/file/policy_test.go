package file

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/model"
)

// loadText reads a directory of one file.
func loadText(t *testing.T, text string) (*model.Mesh, []model.Problem) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return Load(dir, Options{Node: "n1"})
}

// TestWrongTarget: a filter whose target is written with a wrong kind or group refuses the Service
// of that name. Without it the Service would be open.
func TestWrongTarget(t *testing.T) {
	const pod = `apiVersion: v1
kind: Pod
metadata: {name: cart-1, namespace: shop, labels: {aether.io/managed: "true"}, annotations: {endpoint.aether.io/ports: "8080"}}
spec: {serviceAccountName: cart, nodeName: n1}
status: {podIP: 10.1.1.1, phase: Running}
---
`
	filter := func(scope, refs string) string {
		return "apiVersion: config.aether.io/v1\nkind: HTTPFilter\nmetadata: {name: f, namespace: shop}\nspec:\n  scope: " + scope +
			"\n  targetRefs: [" + refs + "]\n  rbac: {policies: [{name: p, principals: [{namespace: ops}]}]}\n"
	}
	cart := []model.ServiceName{{Namespace: "shop", Name: "cart"}}
	for _, c := range []struct {
		scope, refs string
		targets     []model.ServiceName
		says        string // a problem
	}{
		{"SCOPE_CHAIN", "{kind: service, name: cart}", cart, "x.yaml:12: "},
		{"SCOPE_INBOUND", "{kind: Service, group: apps, name: cart}", cart, "what it governs is refused too"},
		{"SCOPE_CHAIN", "{name: cart}", cart, "what it governs is refused too"},
		{"SCOPE_ROUTE", "{kind: HTTPRoute, name: cart}, {kind: Service, name: cart}", cart, "what it governs is refused too"},
		{"SCOPE_CHAIN", "{kind: service, name: a.b}", nil, "and governs nothing: "},
		{"SCOPE_INBOUND", "{kind: Service}", nil, "and governs nothing: "},
		{"SCOPE_ROUTE", "{kind: Service, name: [cart]}", nil, "governs no more than the rules that name it"},
	} {
		m, problems := loadText(t, pod+filter(c.scope, c.refs))
		if f := m.Filters[0]; f.Invalid == "" || !slices.Equal(f.Targets, c.targets) {
			t.Errorf("%s [%s]: targets %v, invalid %q", c.scope, c.refs, f.Targets, f.Invalid)
		}
		if !slices.ContainsFunc(problems, func(p model.Problem) bool { return strings.Contains(p.Where+": "+p.Reason, c.says) }) {
			t.Errorf("%s [%s]: no problem says %q: %v", c.scope, c.refs, c.says, problems)
		}
		s, _ := compile.Compile(m)
		var refused bool
		switch c.scope {
		case "SCOPE_INBOUND":
			in := s.Workloads()[0].Inbound
			refused = in != nil && in.Policy()
		default:
			refused = s.Services()[0].Ports[0].Self.Invalid != ""
		}
		if refused != (c.targets != nil) {
			t.Errorf("%s [%s]: refused %v", c.scope, c.refs, refused)
		}
	}
}

// TestPolicyPath: a path that decides about access is written decoded, or the filter is refused.
func TestPolicyPath(t *testing.T) {
	for _, c := range []struct{ path, says string }{
		{"/", ""},
		{"/admin", ""},
		{"/café/", ""},
		{"/.well-known", ""},
		{"/a..b", ""},
		{"/caf%C3%A9", `holds '%', and paths are compared decoded: write it decoded, "/café"`},
		{"/%61dmin/", `write it decoded, "/admin/"`},
		{"/a%20b", `or only what stands before, "/a"`},
		{"/a%2fb", `write it decoded, "/a/b"`},
		{"/a%252e", `or only what stands before, "/a"`},
		{"/a%ff", `or only what stands before, "/a"`},
		{"/50%", `or only what stands before, "/50"`},
		{`/a\b`, `holds '\\', and paths`},
		{"/a;v=1", `holds ';', and paths`},
		{"/a//b", `holds "//"`},
		{"/a/./b", `holds "/./"`},
		{"/a/..", "ends with a dot segment"},
		{"%2fa", "does not begin with /"},
	} {
		m, problems := loadText(t, "apiVersion: config.aether.io/v1\nkind: HTTPFilter\nmetadata: {name: f, namespace: shop}\nspec:\n"+
			"  scope: SCOPE_CHAIN\n  targetRefs: [{kind: Service, name: cart}]\n  rbac:\n    action: DENY\n    policies:\n"+
			"    - name: p\n      principals: [{namespace: ops}]\n      permissions:\n      - pathPrefix: '"+c.path+"'\n")
		f := m.Filters[0]
		switch {
		case c.says == "" && (f.Invalid != "" || len(problems) > 0):
			t.Errorf("%s is refused: %q, %v", c.path, f.Invalid, problems)
		case c.says != "" && (!strings.Contains(f.Invalid, c.says) || f.RBAC != nil || len(problems) != 1 || problems[0].Where != "x.yaml:13"):
			t.Errorf("%s: invalid %q, want %q; %v", c.path, f.Invalid, c.says, problems)
		}
	}
}
