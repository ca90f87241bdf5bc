package file

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// TestViews: each node gets of one reading what Load gives it, whatever others were asked about
// before; what only a node could trip over is told to that node alone.
func TestViews(t *testing.T) {
	pod := func(namespace, name, node, ip, annotations string) string {
		return "apiVersion: v1\nkind: Pod\nmetadata: {name: " + name + ", namespace: " + namespace + `, labels: {aether.io/managed: "true"}, annotations: {` + annotations +
			"}}\nspec: {serviceAccountName: web, nodeName: " + node + "}\nstatus: {podIP: " + ip + "}\n---\n"
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x.yaml"), []byte("apiVersion: v1\nkind: Node\nmetadata: {name: n2, labels: {topology.kubernetes.io/region: eu}}\n---\n"+
		pod("a", "web-1", "n1", "10.0.0.1", "file.aether.io/netns: /run/netns/web-1")+
		pod("b", "web-1", "n2", "10.0.0.2", "file.aether.io/netns: /run/netns/web-1")+ // the same network namespace, on another node
		pod("c", "web-1", "n2", "10.0.0.3", "file.aether.io/netns: /run/netns/web-1")+ // and on the same
		pod("d", "web-2", "n1", "10.0.0.4", `capture.aether.io/nothing: "1"`)+
		pod("e", "web-3", `""`, "10.0.0.5", "")+
		pod("f", "web-4", "n3", "10.0.0.6", "file.aether.io/part: workload")), 0o600); err != nil {
		t.Fatal(err)
	}
	v := LoadViews(dir, Options{Node: "of no concern"})
	for _, node := range []string{"n1", "n2", "n3", "", "n4", "n1"} {
		m, problems := v.Mesh(node)
		want, wantProblems := Load(dir, Options{Node: node})
		if !reflect.DeepEqual(m, want) || !reflect.DeepEqual(problems, wantProblems) {
			t.Errorf("node %q: %s%v\nwant %s%v", node, render(m), problems, render(want), wantProblems)
		}
		var pods, said []string
		for _, w := range m.Workloads {
			pods = append(pods, w.Namespace+"/"+w.Name)
		}
		for _, p := range problems {
			said = append(said, p.Object)
		}
		got := strings.Join(pods, " ") + "; " + strings.Join(said, " ") + "; " + m.Node + " " + m.Region
		if want := map[string]string{
			"n1": "a/web-1 d/web-2 f/web-4; Pod d/web-2; n1 ",
			"n2": "b/web-1 f/web-4; Pod c/web-1; n2 eu",
			"n3": "f/web-4; ; n3 ",
			"":   "f/web-4; ;  ",
			"n4": "f/web-4; ; n4 ",
		}[node]; got != want {
			t.Errorf("node %q has %q, want %q", node, got, want)
		}
	}
	gone := LoadViews(filepath.Join(dir, "gone"), Options{})
	if m, problems := gone.Mesh("n1"); m == nil || len(problems) != 1 || !strings.Contains(problems[0].Reason, "cannot be read") {
		t.Errorf("no directory: %v", problems)
	}
}
