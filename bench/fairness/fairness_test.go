// Package fairness shows what a neighbour notices of a pod that does its worst: 12,000
// connections, requests and HTTP/2 streams as fast as they are answered, and heads without an end.
//
//   - The neighbour asks at a fixed rate, before and during, through the same proxies, and past
//     them (direct), which is what the machine alone does to it.
//   - The flood runs at the lowest priority: what is shown is what the proxies share
//     out, not who gets the machine's processors.
//   - Every request of the neighbour's is answered, or the run fails.
//
// Run it as root: go test -bench . ./bench/fairness
package fairness

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

const (
	conns  = 12_000
	qps    = 200
	length = 10 * time.Second
	vip    = 10
	host   = "app.shop.aether.internal:8080"
)

// BenchmarkFairness reports the neighbour's latencies. Its iterations and ns/op mean nothing.
func BenchmarkFairness(b *testing.B) {
	ctx, cancel := context.WithTimeout(b.Context(), 5*time.Minute)
	defer cancel()
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		b.Fatal(err)
	}
	if lim.Max < conns+4000 {
		b.Fatalf("the hard limit of open files is %d: raise it to %d (ulimit -Hn)", lim.Max, conns+4000)
	}
	lim.Cur = lim.Max
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		b.Fatal(err)
	}
	dir := b.TempDir()
	for name, pkg := range map[string]string{"load": "aether/bench/load", "aether-proxy": "aether/cmd/aether-proxy"} {
		if out, err := exec.CommandContext(ctx, "go", "build", "-o", filepath.Join(dir, name), pkg).CombinedOutput(); err != nil {
			b.Fatalf("build %s: %v\n%s", pkg, err, out)
		}
	}
	m, err := mesh.New(ctx, mesh.Options{Proxy: filepath.Join(dir, "aether-proxy")})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := m.Close(); err != nil {
			b.Error(err)
		}
	})
	all := map[string]string{"capture.aether.io/redirect-all": "true"}
	for _, p := range []mesh.Pod{
		{Name: "app", Node: 1, Ports: "8080", Prepare: func(p *rig.Pod) error { _, err := m.Rig.StartNginx(ctx, p, 8080); return err }},
		{Name: "hog", Annotations: all}, {Name: "quiet", Annotations: all},
	} {
		if _, err := m.AddPod(ctx, p); err != nil {
			b.Fatal(err)
		}
	}
	if err := m.Service(rig.ServiceManifest{Namespace: "shop", Name: "app", ClusterIPs: m.ClusterIPs(vip)[:1], Ports: []uint16{8080}}); err != nil {
		b.Fatal(err)
	}
	if err := m.Start(ctx); err != nil {
		b.Fatal(err)
	}
	service := m.ClusterIPs(vip)[0].String() + ":8080"
	direct := m.Pod("app").IP4.String() + ":8080"
	load := filepath.Join(dir, "load")
	if err := rig.Until(ctx, func(ctx context.Context) error {
		return rig.Get200(ctx, m.Pod("quiet").HTTPClient(), "http://"+service+"/", host)
	}); err != nil {
		b.Fatal(err)
	}
	measure := func(name, addr string, from *rig.Pod) {
		cmd := from.Command(ctx, load, "rate", "-addr", addr, "-host", host, "-qps", strconv.Itoa(qps), "-conns", "8", "-duration", length.String())
		var errs strings.Builder
		cmd.Stderr = &errs
		out, err := cmd.Output()
		var r struct {
			P50 float64 `json:"p50_ms"`
			P99 float64 `json:"p99_ms"`
			Max float64 `json:"max_ms"`
		}
		if err == nil {
			err = json.Unmarshal(out, &r)
		}
		if err != nil {
			b.Fatalf("%s: %v: %s", name, err, errs.String())
		}
		b.ReportMetric(r.P50, name+"-p50-ms")
		b.ReportMetric(r.P99, name+"-p99-ms")
		fmt.Printf("%-16s p50 %7.2f ms  p99 %7.2f ms  max %7.2f ms\n", name, r.P50, r.P99, r.Max)
	}
	quiet := m.Pod("quiet")
	measure("before", service, quiet)
	measure("before-direct", direct, quiet)

	cmd := m.Pod("hog").Command(ctx, "nice", "-n", "19", load, "flood", "-addr", service, "-host", host, "-n", strconv.Itoa(conns))
	var errs strings.Builder
	cmd.Stderr = &errs
	hold, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	said, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	lines := bufio.NewReader(said)
	if line, err := lines.ReadString('\n'); err != nil {
		b.Fatalf("flood: %q, %v: %s", line, err, errs.String())
	}
	measure("during", service, quiet)
	measure("during-direct", direct, quiet)
	state := func(when string) {
		for node := range 2 {
			text, err := m.Admin(ctx, node, "/metrics")
			if err != nil {
				b.Fatal(err)
			}
			for line := range strings.Lines(string(text)) {
				if strings.HasPrefix(line, "aether_shed_total") || strings.HasPrefix(line, "aether_descriptors") || strings.HasPrefix(line, "aether_loop_slow") || strings.HasPrefix(line, "aether_loop_cpu") {
					fmt.Printf("%s, node %d: %s", when, node+1, line)
				}
			}
			if rss, err := m.Proxy(node).RSS(); err == nil {
				fmt.Printf("%s, node %d: %d MB resident\n", when, node+1, rss>>20)
			}
		}
	}
	state("during")
	hold.Close()
	text, err := io.ReadAll(lines)
	if e := cmd.Wait(); err != nil || e != nil {
		b.Fatalf("flood: %v, %v: %s", err, e, errs.String())
	}
	fmt.Printf("flood: %s", text)
	measure("after", service, quiet)
	b.ReportMetric(0, "ns/op")
}
