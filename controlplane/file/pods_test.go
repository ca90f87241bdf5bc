package file

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"aether/controlplane/input"
)

// sunk is a Sink that keeps the last whole state and what was said after it.
type sunk struct{ whole, then input.Batch }

func (s *sunk) Replace(b input.Batch) { s.whole = b }
func (s *sunk) Apply(b input.Batch)   { s.then.Add(&b) }
func (s *sunk) Report(input.Status)   {}

// TestPodsOfAnother: where another leads the lives of this node's pods it is told of them, of
// each change too, and the Sink hears of no pod.
func TestPodsOfAnother(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		tmp := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(tmp, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	const web = `apiVersion: v1
kind: Pod
metadata:
  namespace: shop
  name: web-1
  uid: u-1
  labels: {aether.io/managed: "true"}
  annotations: {endpoint.aether.io/health-path: /up}
spec:
  nodeName: n1
  serviceAccountName: web
  terminationGracePeriodSeconds: 40
  containers:
  - {name: a, image: i, lifecycle: {preStop: {sleep: {seconds: 3}}}}
  - {name: b, image: i, lifecycle: {preStop: {sleep: {seconds: 9}}}}
  - {name: c, image: i, lifecycle: {preStop: {exec: {command: [sleep, "60"]}}}}
status: {podIPs: [{ip: 10.1.0.1}]}
`
	write("a.yaml", web)
	write("b.yaml", `apiVersion: v1
kind: Pod
metadata: {namespace: shop, name: job-1, labels: {aether.io/managed: "true"}}
spec: {nodeName: n1, containers: []}
status: {podIPs: [{ip: 10.1.0.2}]}
---
apiVersion: v1
kind: Pod
metadata: {namespace: shop, name: far-1, labels: {aether.io/managed: "true"}}
spec: {nodeName: n2, containers: []}
status: {podIPs: [{ip: 10.1.0.3}]}
---
apiVersion: v1
kind: Pod
metadata: {namespace: shop, name: plain-1}
spec: {nodeName: n1, containers: []}
status: {podIPs: [{ip: 10.1.0.4}]}
---
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/zone: z1}}
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: web, labels: {aether.io/mesh-service: "true"}}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80, targetPort: 8080}]}
`)
	told := make(chan Local, 16)
	sink := &sunk{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	o := Options{Node: "n1", OnPods: func(l Local) { told <- l }}
	go func() { done <- Feed(ctx, dir, o, input.Settings{}, sink) }()
	next := func() Local {
		t.Helper()
		select {
		case l := <-told:
			return l
		case err := <-done:
			t.Fatal(err)
		case <-time.After(time.Minute):
			t.Fatal("nothing is told")
		}
		panic("unreachable")
	}
	l := next()
	if len(l.Pods) != 2 || l.Locality.Zone != "z1" {
		t.Fatalf("%+v", l)
	}
	job, p := l.Pods[0], l.Pods[1]
	if job.Container != "shop_job-1" || job.Account != "default" || job.Grace != 30*time.Second || job.PreStop != 0 || job.NetNS != "/run/netns/shop_job-1" {
		t.Errorf("%+v", job)
	}
	if p.Container != "u-1" || p.UID != "u-1" || p.Account != "web" || p.PreStop != 9*time.Second || p.Grace != 40*time.Second || p.Terminating ||
		p.IPs[0].String() != "10.1.0.1" || p.Labels["aether.io/managed"] != "true" {
		t.Errorf("%+v", p)
	}

	// Also of what a mesh does not say.
	write("a.yaml", strings.Replace(web, "/up", "/healthz", 1))
	if l = next(); l.Pods[1].Annotations["endpoint.aether.io/health-path"] != "/healthz" {
		t.Errorf("%+v", l)
	}
	write("a.yaml", strings.Replace(web, "  uid:", "  deletionTimestamp: \"2026-01-01T00:00:00Z\"\n  deletionGracePeriodSeconds: 7\n  uid:", 1))
	if l = next(); !l.Pods[1].Terminating || l.Pods[1].Grace != 7*time.Second {
		t.Errorf("%+v", l)
	}
	if err := os.Remove(filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	if l = next(); len(l.Pods) != 1 {
		t.Errorf("%+v", l)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if len(sink.whole.Services) != 1 || len(sink.whole.Endpoints)+len(sink.whole.Workloads) != 0 || len(sink.then.Endpoints)+len(sink.then.Workloads) != 0 {
		t.Errorf("the sink is told of pods: %+v, %+v", sink.whole, sink.then)
	}
}
