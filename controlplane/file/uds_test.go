package file

import (
	"fmt"
	"strings"
	"testing"

	"aether/dataplane/model"
)

// TestUnixSockets: a pod's document says its UID, its volumes if any, and its annotation (decision 035).
func TestUnixSockets(t *testing.T) {
	const pod = `apiVersion: v1
kind: Pod
metadata: {name: cart-1, namespace: shop, uid: u-1, labels: {aether.io/managed: "true"}, annotations: {endpoint.aether.io/uds-socket: %s}}
spec: {serviceAccountName: cart, nodeName: n1%s}
status: {podIP: 10.1.1.1, phase: Running}
`
	for spec, want := range map[string][]model.Volume{
		"":              nil,
		", volumes: []": {},
		", volumes: [{name: app, csi: {driver: csi.aether.io}}, {name: tmp, emptyDir: {}}, {name: x, csi: {driver: other.io}}]": {{Name: "app", Driver: "csi.aether.io"}, {Name: "tmp"}, {Name: "x", Driver: "other.io"}},
	} {
		m, problems := loadText(t, fmt.Sprintf(pod, "app/http.sock", spec))
		if len(problems) > 0 || len(m.Workloads) != 1 {
			t.Fatalf("%s: %v", spec, problems)
		}
		if w := m.Workloads[0]; w.UID != "u-1" || w.UDSSocket != "app/http.sock" || fmt.Sprintf("%#v", w.Volumes) != fmt.Sprintf("%#v", want) {
			t.Errorf("%s: %q %q %#v", spec, w.UID, w.UDSSocket, w.Volumes)
		}
	}
	m, problems := loadText(t, fmt.Sprintf(pod, "app", ""))
	if len(m.Workloads) != 1 || len(problems) != 1 || problems[0].Where != "x.yaml:3" || !strings.Contains(problems[0].Reason, "not <volume>/<file>") {
		t.Errorf("a typo: %+v, %v", m.Workloads, problems)
	}
}

// TestEndpointPolicies: of those of one Service the first by name is in force, and a bad one is not (contract 10.8).
func TestEndpointPolicies(t *testing.T) {
	policy := func(name, target, socket string) string {
		return fmt.Sprintf("---\napiVersion: config.aether.io/v1\nkind: EndpointPolicy\nmetadata: {name: %s, namespace: shop}\nspec: {targetRef: %s, udsSocket: %q}\n", name, target, socket)
	}
	const cart, web = "{kind: Service, name: cart}", "{kind: Service, group: core, name: web}"
	m, problems := loadText(t, policy("b", cart, "app/b")+policy("a", cart, "app/a")+policy("z", web, "app/z")+
		policy("bad1", "{kind: Pod, name: x}", "app/x")+policy("bad2", "{kind: Service, name: x}", "app")+policy("bad3", "{kind: Service, name: x}", "app/"+strings.Repeat("x", 61)))
	got := ""
	for _, p := range m.Policies {
		got += fmt.Sprintf("%s %s/%s %s;", p.Service, p.Namespace, p.Name, p.UDSSocket)
	}
	if want := "shop/cart shop/a app/a;shop/web shop/z app/z;"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	var said []string
	for _, p := range problems {
		said = append(said, p.Where+": "+p.Object+": "+p.Reason)
	}
	all := strings.Join(said, "\n")
	for _, want := range []string{
		"x.yaml:2: EndpointPolicy shop/b: is not in force: EndpointPolicy shop/a at x.yaml:7 is for the same Service",
		`x.yaml:20: EndpointPolicy shop/bad1: targetRef is a "Pod"`, `x.yaml:25: EndpointPolicy shop/bad2: spec.udsSocket "app": not <volume>/<file>`,
		"x.yaml:30: EndpointPolicy shop/bad3: spec.udsSocket has 65 characters",
	} {
		if !strings.Contains(all, want) {
			t.Errorf("no problem says %s:\n%s", want, all)
		}
	}
	if len(problems) != 4 {
		t.Errorf("%d problems:\n%s", len(problems), all)
	}
}
