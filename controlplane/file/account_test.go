package file

import (
	"fmt"
	"strings"
	"testing"
)

// TestServiceAccounts: a Service whose selector selects pods of the mesh, none of which has its name as the ServiceAccount, is
// a problem that names the ServiceAccounts that they have; no other Service is.
func TestServiceAccounts(t *testing.T) {
	pod := func(name, account, labels string) string {
		return fmt.Sprintf(`
---
apiVersion: v1
kind: Pod
metadata: {namespace: shop, name: %s, labels: {%s}, annotations: {endpoint.aether.io/ports: "9080"}}
spec: {nodeName: n1, serviceAccountName: %s, containers: [{name: c}]}
status: {phase: Running, podIPs: [{ip: 10.1.0.%d}], conditions: [{type: Ready, status: "True"}]}
`, name, labels, account, name[len(name)-1]-'0')
	}
	const managed = `aether.io/managed: "true", `
	service := func(selector string) string {
		return fmt.Sprintf(`
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: reviews-v1}
spec: {clusterIP: 10.96.0.1, ports: [{port: 9080}], selector: {%s}}
`, selector)
	}
	for _, tt := range []struct {
		name, text string
		want       string // in the only problem; empty: there is none
	}{
		{"another account", service("app: reviews") + pod("a-1", "bookinfo-reviews", managed+"app: reviews"), `no pod of it has "reviews-v1"; the pods that the selector selects have bookinfo-reviews.`},
		{"the pods come first", pod("a-1", "bookinfo-reviews", managed+"app: reviews") + service("app: reviews"), "have bookinfo-reviews."},
		{"several accounts", service("app: reviews") + pod("a-1", "b", managed+"app: reviews") + pod("a-2", "a", managed+"app: reviews") + pod("a-3", "b", managed+"app: reviews"), "have a, b."},
		{"its own account", service("app: reviews") + pod("a-1", "reviews-v1", managed+"app: reviews"), ""},
		{"one of several has its account", service("app: reviews") + pod("a-1", "other", managed+"app: reviews") + pod("a-2", "reviews-v1", managed+"app: reviews"), ""},
		{"its account, not selected", service("app: reviews") + pod("a-1", "other", managed+"app: reviews") + pod("a-2", "reviews-v1", managed+"app: none"), ""},
		{"no selector", strings.Replace(service("x"), ", selector: {x}", "", 1) + pod("a-1", "other", managed+"app: reviews"), ""},
		{"no pods", service("app: reviews"), ""},
		{"pods of others' labels", service("app: reviews") + pod("a-1", "other", managed+"app: ratings"), ""},
		{"pods that are not the mesh's", service("app: reviews") + pod("a-1", "other", "app: reviews"), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, problems := reload(t, []byte(tt.text), testOptions)
			switch {
			case tt.want == "" && len(problems) > 0:
				t.Errorf("%v", problems)
			case tt.want != "" && (len(problems) != 1 || !strings.Contains(problems[0].Reason, tt.want) || problems[0].Object != "Service shop/reviews-v1"):
				t.Errorf("%v, want one with %q", problems, tt.want)
			}
		})
	}
}
