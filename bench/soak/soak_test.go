// Package soak holds the two ways in which a loop can wait against each other: a pair of proxies with
// --blocking adapt and a pair with --blocking safe, side by side, under the same load, while the garbage
// collector runs all the time and others want the machine's processors.
//
//   - What happens to one pair happens to the other in the same minute: what is judged is the difference.
//   - Every request is answered, or the run fails.
//   - Worse is what chance does not explain: three standard errors of the minutes' differences.
//
// Run it as root: make soak-blocking SOAK=1h
package soak

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

var (
	length = flag.Duration("soak", 2*time.Minute, "soak: how long, in rounds of a minute at most")
	qps    = flag.Int("soak-qps", 2000, "soak: requests a second and pair, over kept connections")
)

const (
	round    = time.Minute
	conns    = 16
	churnQPS = 50                     // connections a second and pair that carry one request
	gcEvery  = 100 * time.Millisecond // between collections that each proxy is told to make
	spinners = 2                      // processes that only use a processor, every other second
	vip      = 10
	host     = "app.shop.aether.internal:8080"
	stall    = 250 // ms that a request may wait before it counts as one that was in a stall
)

// side is one pair of proxies.
type side struct {
	name   string
	mesh   *mesh.Mesh
	rounds []sample
}

// sample is what a round gave: name to value.
type sample map[string]float64

// BenchmarkBlocking is the soak. Its iterations and ns/op mean nothing.
func BenchmarkBlocking(b *testing.B) {
	ctx, cancel := context.WithTimeout(b.Context(), *length+10*time.Minute)
	defer cancel()
	dir := b.TempDir()
	for name, pkg := range map[string]string{"load": "aether/bench/load", "aether-proxy": "aether/cmd/aether-proxy"} {
		if out, err := exec.CommandContext(ctx, "go", "build", "-o", filepath.Join(dir, name), pkg).CombinedOutput(); err != nil {
			b.Fatalf("build %s: %v\n%s", pkg, err, out)
		}
	}
	load := filepath.Join(dir, "load")
	var sides []*side
	for _, name := range []string{"adapt", "safe"} {
		s, err := newSide(ctx, b, name, filepath.Join(dir, "aether-proxy"))
		if err != nil {
			b.Fatalf("%s: %v", name, err)
		}
		sides = append(sides, s)
	}
	for i := range spinners {
		node := sides[0].mesh.Rig.Nodes[0]
		if _, err := sides[0].mesh.Rig.StartProcess(&node.Space, "spin"+strconv.Itoa(i), "sh", "-c", "while :; do timeout 1 sh -c 'while :; do :; done'; sleep 1; done"); err != nil {
			b.Fatal(err)
		}
	}
	took := min(round, *length)
	for n := range max(1, int(*length/took)) {
		var all sync.WaitGroup
		errs := make([]error, len(sides))
		for i, s := range sides {
			all.Go(func() { errs[i] = s.round(ctx, load, took) })
		}
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			for _, s := range sides {
				for node := range 2 {
					b.Logf("%s, node%d: %s", s.name, node+1, s.mesh.Proxy(node).Tail(2000))
				}
			}
			both := min(len(sides[0].rounds), len(sides[1].rounds))
			text, _ := compare(sides[0].rounds[:both], sides[1].rounds[:both])
			b.Fatalf("round %d: %v\nup to there:\n%s", n+1, err, text)
		}
		for _, s := range sides {
			r := s.rounds[len(s.rounds)-1]
			fmt.Printf("%3d %-5s p50 %6.2f p99 %7.2f max %7.1f ms  churn p99 %7.2f max %7.1f ms  stops %4.0f, over 5 ms %3.0f (stopping %3.0f)  iterations over 5 ms %4.0f, 50 ms %3.0f  CPU %.1f/%.1f s\n",
				n+1, s.name, r["p50-ms"], r["p99-ms"], r["max-ms"], r["churn-p99-ms"], r["churn-max-ms"], r["stops"], r["stops>5ms"], r["stopping>5ms"], r["iterations>5ms"], r["iterations>50ms"], r["cpu-a-s"], r["cpu-b-s"])
		}
	}
	text, worse := compare(sides[0].rounds, sides[1].rounds)
	fmt.Print("\n" + text)
	for _, w := range worse {
		b.Errorf("adapt is worse than chance explains: %s", w)
	}
	b.ReportMetric(0, "ns/op")
}

// newSide makes a mesh of two nodes whose proxies wait as name says, with nginx behind them.
func newSide(ctx context.Context, b *testing.B, name, proxy string) (*side, error) {
	m, err := mesh.New(ctx, mesh.Options{Proxy: proxy, Args: []string{"--blocking", name}})
	if err != nil {
		return nil, err
	}
	b.Cleanup(func() {
		if err := m.Close(); err != nil {
			b.Error(err)
		}
	})
	for _, p := range []mesh.Pod{
		{Name: "app", Node: 1, Ports: "8080", Prepare: func(p *rig.Pod) error { _, err := m.Rig.StartNginx(ctx, p, 8080); return err }},
		{Name: "client", Annotations: map[string]string{"capture.aether.io/redirect-all": "true"}},
	} {
		if _, err := m.AddPod(ctx, p); err != nil {
			return nil, err
		}
	}
	if err := m.Service(rig.ServiceManifest{Namespace: "shop", Name: "app", ClusterIPs: m.ClusterIPs(vip)[:1], Ports: []uint16{8080}}); err != nil {
		return nil, err
	}
	if err := m.Start(ctx); err != nil {
		return nil, err
	}
	s := &side{name: name, mesh: m}
	return s, rig.Until(ctx, func(ctx context.Context) error {
		return rig.Get200(ctx, m.Pod("client").HTTPClient(), "http://"+s.service()+"/", host)
	})
}

func (s *side) service() string { return s.mesh.ClusterIPs(vip)[0].String() + ":8080" }

// round loads the pair for so long and notes what it met with.
func (s *side) round(ctx context.Context, load string, took time.Duration) error {
	got := sample{}
	before, err := s.counts(ctx)
	if err != nil {
		return err
	}
	gc, stop := context.WithCancel(ctx)
	defer stop()
	var (
		all    sync.WaitGroup
		errs   = make([]error, 4)
		steady = map[string]float64{}
		churn  = map[string]float64{}
		asked  [2][]float64
	)
	for node := range 2 {
		all.Go(func() { asked[node], errs[2+node] = s.collect(gc, node) })
	}
	var loads sync.WaitGroup
	loads.Go(func() {
		errs[0] = s.load(ctx, steady, load, "rate", "-qps", strconv.Itoa(*qps), "-conns", strconv.Itoa(conns), "-duration", took.String())
	})
	loads.Go(func() {
		errs[1] = s.load(ctx, churn, load, "churn", "-qps", strconv.Itoa(churnQPS), "-conns", "100", "-duration", took.String())
	})
	loads.Wait()
	stop()
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	after, err := s.counts(ctx)
	if err != nil {
		return err
	}
	for k, v := range after {
		got[k] = v - before[k]
	}
	for _, k := range []string{"p50_ms", "p99_ms", "max_ms"} {
		name := strings.ReplaceAll(k, "_", "-")
		got[name], got["churn-"+name] = steady[k], churn[k]
	}
	for _, k := range []string{"max-ms", "churn-max-ms"} {
		if got[k] > stall {
			got["stalls"] = 1
		}
	}
	admin := slices.Concat(asked[:]...)
	slices.Sort(admin)
	if len(admin) > 0 {
		got["admin-p99-ms"], got["admin-max-ms"] = admin[(len(admin)*99+99)/100-1], admin[len(admin)-1]
	}
	s.rounds = append(s.rounds, got)
	return nil
}

// load runs a client in the pod and decodes what it says.
func (s *side) load(ctx context.Context, into map[string]float64, load, how string, args ...string) error {
	cmd := s.mesh.Pod("client").Command(ctx, append([]string{load, how, "-addr", s.service(), "-host", host}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("load %s: %w: %s", how, err, errs.Bytes())
	}
	return json.Unmarshal(out.Bytes(), &into)
}

// collect has a proxy collect its garbage again and again until ctx ends, and returns how long each
// answer took in milliseconds: the admin's goroutines want a processor as any do.
func (s *side) collect(ctx context.Context, node int) (took []float64, err error) {
	c := s.mesh.Rig.Nodes[node].HTTPClient()
	defer c.CloseIdleConnections()
	tick := time.NewTicker(gcEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return took, nil
		case <-tick.C:
		}
		began := time.Now()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:9901/debug/pprof/heap?gc=1", nil)
		if err != nil {
			return nil, err
		}
		res, err := c.Do(req)
		if err == nil {
			_, err = io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}
		if ctx.Err() != nil {
			return took, nil
		}
		if err != nil {
			return nil, fmt.Errorf("admin of node %d: %w", node+1, err)
		}
		took = append(took, time.Since(began).Seconds()*1e3)
	}
}

// limits in milliseconds, above which what the proxies count is told.
var limits = []string{"1", "5", "10", "25", "50", "250"}

// counts is what both proxies have counted up to now.
func (s *side) counts(ctx context.Context) (sample, error) {
	got := sample{}
	for node := range 2 {
		cpu, err := s.mesh.Proxy(node).CPU()
		if err != nil {
			return nil, err
		}
		got["cpu-"+"ab"[node:node+1]+"-s"] = cpu.Seconds()
		text, err := s.mesh.Admin(ctx, node, "/metrics")
		if err != nil {
			return nil, err
		}
		for name, metric := range map[string]string{
			"stops": "aether_gc_pause_seconds", "stopping": "aether_gc_stopping_seconds",
			"iterations": "aether_loop_lag_seconds", "waits": "aether_goroutine_wait_seconds",
		} {
			if err := over(got, string(text), name, metric); err != nil {
				return nil, err
			}
		}
	}
	return got, nil
}

// over adds to got how many a histogram in Prometheus' text counted, and how many above each of limits.
func over(got sample, text, name, metric string) error {
	value := func(series string) (float64, error) {
		_, rest, ok := strings.Cut("\n"+text, "\n"+series+" ")
		if !ok {
			return 0, fmt.Errorf("no series %s", series)
		}
		line, _, _ := strings.Cut(rest, "\n")
		return strconv.ParseFloat(line, 64)
	}
	n, err := value(metric + "_count")
	if err != nil {
		return err
	}
	got[name] += n
	for _, ms := range limits {
		f, err := strconv.ParseFloat(ms, 64)
		if err != nil {
			return err
		}
		below, err := value(fmt.Sprintf("%s_bucket{le=%q}", metric, strconv.FormatFloat(f/1e3, 'g', -1, 64)))
		if err != nil {
			return err
		}
		got[name+">"+ms+"ms"] += n - below
	}
	return nil
}

// judged is what adapt must not have more of than safe.
var judged = []string{"stops>5ms", "stops>25ms", "stopping>5ms", "iterations>5ms", "iterations>50ms", "waits>25ms", "stalls", "p99-ms", "max-ms", "churn-p99-ms", "admin-p99-ms"}

// compare makes the table of both, and names what a has more of than b in a way that chance does not explain.
func compare(a, b []sample) (text string, worse []string) {
	var w strings.Builder
	fmt.Fprintf(&w, "%d rounds. Sums of what was counted, medians and greatest of what was timed.\n\n| | adapt | safe | difference a round | its standard error |\n|---|---|---|---|---|\n", len(a))
	names := map[string]bool{}
	for _, s := range slices.Concat(a, b) {
		for name := range s {
			names[name] = true
		}
	}
	sorted := make([]string, 0, len(names))
	for name := range names {
		sorted = append(sorted, name)
	}
	slices.Sort(sorted)
	for _, name := range sorted {
		mean, err := difference(a, b, name)
		fmt.Fprintf(&w, "| %s | %s | %s | %.3g | %.2g |\n", name, summary(a, name), summary(b, name), mean, err)
		if slices.Contains(judged, name) && len(a) > 1 && mean > 3*err && mean > 0 {
			worse = append(worse, fmt.Sprintf("%s: %s, safe %s", name, summary(a, name), summary(b, name)))
		}
	}
	return w.String(), worse
}

// difference is the mean of a minus b over the rounds, and its standard error.
func difference(a, b []sample, name string) (mean, stderr float64) {
	n := float64(len(a))
	for i := range a {
		mean += (a[i][name] - b[i][name]) / n
	}
	if len(a) < 2 {
		return mean, 0
	}
	var square float64
	for i := range a {
		d := a[i][name] - b[i][name] - mean
		square += d * d
	}
	return mean, math.Sqrt(square / (n - 1) / n)
}

// summary of a value over the rounds: the sum of counts and seconds, median and greatest of milliseconds.
func summary(s []sample, name string) string {
	v := make([]float64, 0, len(s))
	sum := 0.0
	for _, r := range s {
		v, sum = append(v, r[name]), sum+r[name]
	}
	if !strings.HasSuffix(name, "-ms") {
		return strconv.FormatFloat(sum, 'f', -1, 64)
	}
	slices.Sort(v)
	return fmt.Sprintf("%.2f, %.2f", v[len(v)/2], v[len(v)-1])
}

// The judgement itself: chance passes, what is worse every time does not, and better never fails.
func TestCompare(t *testing.T) {
	make := func(values ...float64) (s []sample) {
		for _, v := range values {
			s = append(s, sample{"stops>5ms": v, "cpu-a-s": v})
		}
		return s
	}
	for _, tt := range []struct {
		name string
		a, b []sample
		want int
	}{
		{"the same", make(3, 5, 2, 8), make(4, 4, 3, 7), 0},
		{"always more", make(13, 15, 12, 18), make(4, 4, 3, 7), 1},
		{"always less", make(4, 4, 3, 7), make(13, 15, 12, 18), 0},
		{"one bad minute", make(3, 5, 2, 90), make(4, 4, 3, 7), 0},
		{"none at all", make(0, 0), make(0, 0), 0},
	} {
		text, worse := compare(tt.a, tt.b)
		if len(worse) != tt.want {
			t.Errorf("%s: worse are %v\n%s", tt.name, worse, text)
		}
	}
}

func TestOver(t *testing.T) {
	text := "# HELP x y\nx_bucket{le=\"0.001\"} 3\nx_bucket{le=\"0.005\"} 5\nx_bucket{le=\"0.01\"} 5\nx_bucket{le=\"0.025\"} 6\nx_bucket{le=\"0.05\"} 6\nx_bucket{le=\"0.25\"} 7\nx_bucket{le=\"+Inf\"} 9\nx_sum 1\nx_count 9\n"
	got := sample{}
	for range 2 { // of two proxies
		if err := over(got, text, "n", "x"); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]float64{"n": 18, "n>1ms": 12, "n>5ms": 8, "n>25ms": 6, "n>250ms": 4} {
		if got[name] != want {
			t.Errorf("%s = %v, want %v", name, got[name], want)
		}
	}
	if err := over(got, text, "n", "none"); err == nil {
		t.Error("a metric that is not there: no error")
	}
}
