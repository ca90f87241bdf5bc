package main

import (
	"bytes"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/controlplane/file"
	"aether/dataplane/snapshot"
)

// manyNodes writes a configuration of pods spread over nodes in six zones of two regions, and one
// pod that no node has. Pod i has the address 10.1.<i/256>.<i%256>.
func manyNodes(t testing.TB, pods, nodes int) string {
	t.Helper()
	var b strings.Builder
	for i := range nodes {
		fmt.Fprintf(&b, "---\napiVersion: v1\nkind: Node\nmetadata: {name: n%d, labels: {topology.kubernetes.io/region: r%d, topology.kubernetes.io/zone: z%d}}\n", i, i%2, i%6)
	}
	for i := range pods {
		fmt.Fprintf(&b, "---\napiVersion: v1\nkind: Pod\nmetadata: {name: p%d, namespace: shop, labels: {aether.io/managed: \"true\"}, annotations: {endpoint.aether.io/ports: \"8080\", capture.aether.io/exclude-outbound-ports: \"%d\"}}\n"+
			"spec: {serviceAccountName: s%d, nodeName: n%d}\nstatus: {podIP: 10.1.%d.%d, phase: Running}\n", i, 1000+i, i/3, i%nodes, i>>8, i&255)
	}
	b.WriteString("---\napiVersion: v1\nkind: Pod\nmetadata: {name: pending, namespace: shop, labels: {aether.io/managed: \"true\"}}\nspec: {serviceAccountName: s0}\nstatus: {podIP: 10.2.0.1}\n")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func podAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}) }

// ranks are the endpoints of a snapshot with their priorities.
func ranks(s *snapshot.Snapshot) string {
	var out []string
	for _, b := range s.Backends() {
		for _, e := range s.Endpoints(b).All() {
			out = append(out, fmt.Sprintln(b.Name, e.Pod, e.Priority))
		}
	}
	slices.Sort(out)
	return strings.Join(out, "")
}

// TestViews: whichever node is asked about, in whichever order, it is what a configuration
// loaded for that node alone says.
func TestViews(t *testing.T) {
	const pods, nodes = 72, 24
	dir := manyNodes(t, pods, nodes)
	m, err := openMesh(dir, nil, meshFlags{}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	var alone [nodes]*snapshot.Snapshot
	for i := range 2 * pods {
		i = i * 7 % pods
		s, w := m.at(podAddr(i))
		if w == nil || w.Pod != fmt.Sprintf("p%d", i) {
			t.Fatalf("pod %d: %+v", i, w)
		}
		want := alone[i%nodes]
		if want == nil {
			in, _ := file.Load(dir, file.Options{Node: fmt.Sprintf("n%d", i%nodes), RedirectAllDefault: true})
			want, _ = compile.Compile(in)
			alone[i%nodes] = want
		}
		if len(s.Workloads()) != len(want.Workloads()) {
			t.Fatalf("pod %d: %d pods on its node, want %d", i, len(s.Workloads()), len(want.Workloads()))
		}
		for j, p := range want.Workloads() {
			if got := s.Workloads()[j]; got.Rule != p.Rule || !slices.Equal(got.Capture.ExcludePorts, p.Capture.ExcludePorts) {
				t.Fatalf("pod %d: its node has %+v, want %+v", i, got, p)
			}
		}
		if got, want := ranks(s), ranks(want); got != want {
			t.Fatalf("pod %d: its node ranks endpoints\n%swant\n%s", i, got, want)
		}
	}
	if _, w := m.at(netip.MustParseAddr("10.2.0.1")); w != nil {
		t.Errorf("a pod that no node has: %+v", w)
	}
	if len(m.nodes.list) > maxViews || len(m.places.list) > maxPlaces {
		t.Errorf("%d views and %d places are kept", len(m.nodes.list), len(m.places.list))
	}
}

// TestViewsOnce: a configuration is read once, however many nodes the flows of a capture are of, and
// what is wrong with a node's pods is told when the node is asked about, once.
func TestViewsOnce(t *testing.T) {
	dir := manyNodes(t, 120, 40)
	bad := "apiVersion: v1\nkind: Pod\nmetadata: {name: bad, namespace: shop, labels: {aether.io/managed: \"true\"}, annotations: {capture.aether.io/nothing: \"1\"}}\n" +
		"spec: {serviceAccountName: bad, nodeName: n3}\nstatus: {podIP: 10.3.0.1}\n"
	if err := os.WriteFile(filepath.Join(dir, "b.yaml"), []byte(bad), 0o600); err != nil {
		t.Fatal(err)
	}
	var errs bytes.Buffer
	m, err := openMesh(dir, nil, meshFlags{}, &errs)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	for i := range 120 {
		if i == 3 && errs.Len() > 0 {
			t.Errorf("told of a node that nobody asked about: %s", &errs)
		}
		if _, w := m.at(podAddr(i)); w == nil {
			t.Fatalf("pod %d is not known any more", i)
		}
	}
	if n := strings.Count(errs.String(), "capture.aether.io/nothing does not exist"); n != 1 || strings.Count(errs.String(), "\n") != 1 {
		t.Errorf("told: %s", &errs)
	}
}

func TestRecent(t *testing.T) {
	r := recent[string, int]{most: 3}
	for i, k := range []string{"a", "b", "c"} {
		r.put(k, i)
	}
	if v, ok := r.get("a"); v != 0 || !ok {
		t.Errorf("a: %d %v", v, ok)
	}
	r.put("d", 3) // b was asked for longest ago
	var have []string
	for _, e := range r.list {
		have = append(have, e.key)
	}
	if _, ok := r.get("b"); ok || !slices.Equal(have, []string{"d", "a", "c"}) {
		t.Errorf("kept: %v", have)
	}
}

// BenchmarkViews: a flow of a pod whose node's view is not kept any more.
func BenchmarkViews(b *testing.B) {
	const pods, nodes = 3000, 40
	m, err := openMesh(manyNodes(b, pods, nodes), nil, meshFlags{}, io.Discard)
	if err != nil {
		b.Fatal(err)
	}
	defer m.close()
	for i := range nodes {
		m.at(podAddr(i))
	}
	for i := 0; b.Loop(); i++ {
		if _, w := m.at(podAddr(i % pods)); w == nil {
			b.Fatal("not known")
		}
	}
}
