package client_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/controlplane/compile"
	"aether/controlplane/input"
	"aether/controlplane/registrar/client"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// follower is a Sink that does what the loop does with it: an index, and its snapshots.
type follower struct {
	mu    sync.Mutex
	x     *compile.Index
	snap  *snapshot.Snapshot
	rows  map[model.ServiceName]int
	total int
	news  chan struct{}
	quiet bool // nothing is compiled
}

func newFollower() *follower {
	return &follower{x: compile.NewIndex(&model.Mesh{Domain: model.DefaultDomain, TrustDomain: "td"}), rows: map[model.ServiceName]int{}, news: make(chan struct{}, 1)}
}

func (f *follower) Replace(b input.Batch) { f.Apply(b) }

func (f *follower) Apply(b input.Batch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for n, rows := range b.Endpoints {
		f.total += len(rows) - f.rows[n]
		f.rows[n] = len(rows)
		f.x.SetEndpoints(n, rows)
	}
	for n, in := range b.Catalog {
		f.x.SetCatalog(n, len(in) > 0)
	}
	if !f.quiet {
		f.snap, _ = f.x.Update()
	}
	select {
	case f.news <- struct{}{}:
	default:
	}
}

func (f *follower) Report(input.Status) {}

func (f *follower) have(endpoints int) func() bool {
	return func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.total == endpoints
	}
}

// anonymous is the process's anonymous memory, in MiB.
func anonymous(b testing.TB) float64 {
	b.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			var kb float64
			if _, err := fmt.Sscanf(rest, "%f", &kb); err != nil {
				b.Fatal(err)
			}
			return kb / 1024
		}
	}
	b.Fatal("no RssAnon")
	return 0
}

func run(b testing.TB, cfg client.Config, f *follower) (*client.Client, func()) {
	b.Helper()
	cfg.Cluster, cfg.Node, cfg.TrustDomain, cfg.Sink = "c1", "n1", "td", f
	c, err := client.New(cfg)
	if err != nil {
		b.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = c.Run(ctx) }()
	return c, func() { stop(); <-done }
}

// scopeOf is the first services of a fleet that was filled.
func scopeOf(services int) (list []model.ServiceName) {
	for i := range services {
		list = append(list, name(fmt.Sprintf("namespace-%d/service-%d", i%100, i)))
	}
	return list
}

// generate has the index know a generated Service of every service, as a cluster has it (contract 9.8).
func (f *follower) generate(services int) {
	for i, n := range scopeOf(services) {
		f.x.SetServices(n, []model.Service{{
			Name: n, Generated: true, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})},
			Ports: []model.ServicePort{{Name: "p8080-tcp", Number: 8080, Target: 8080, Class: model.HTTP}},
		}})
	}
}

// BenchmarkMemory: what a node keeps, with the index and the snapshot that are made of it. The figures are those of
// the moment after everything came, its garbage with it, and of what is alive.
func BenchmarkMemory(b *testing.B) {
	for _, tt := range []struct {
		name                string
		services, endpoints int
		scope, here         int // services in scope, and their endpoints; 0: all
		generated           bool
		most                float64
	}{
		{"whole", 3000, 100000, 0, 100000, false, 150},
		{"scoped", 3000, 90000, 200, 6000, false, 30},
		// Every service has a Service with an address. Before decision 033 that brought the rows of all.
		{"generated, as before", 3000, 90000, 3000, 90000, true, 150},
		{"generated", 3000, 90000, 200, 6000, true, 30},
	} {
		b.Run(tt.name, func(b *testing.B) {
			addr := registrar(b, tt.services, tt.endpoints)
			for b.Loop() {
				runtime.GC()
				debug.FreeOSMemory()
				before := anonymous(b)
				f := newFollower()
				if tt.generated {
					f.generate(tt.services)
				}
				cfg := client.Config{Targets: []string{addr}, Whole: tt.scope == 0}
				began := time.Now()
				c, end := run(b, cfg, f)
				c.SetDeclared(scopeOf(tt.scope))
				until(b, "everything", f.have(tt.here))
				took := time.Since(began)
				peak := anonymous(b) - before
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				b.ReportMetric(took.Seconds()*1e3, "ms/snapshot")
				b.ReportMetric(peak, "MiB/anonymous")
				b.ReportMetric(float64(m.HeapAlloc)/(1<<20), "MiB/live")
				if peak > tt.most {
					b.Errorf("%.1f MiB of anonymous memory, want %.0f at most", peak, tt.most)
				}
				end()
				runtime.KeepAlive(f)
			}
		})
	}
}

// BenchmarkCold: from a request's question for a service to the snapshot that has its rows, of a node that has 200
// services of 30 endpoints in scope, out of 3,000.
func BenchmarkCold(b *testing.B) {
	addr := registrar(b, 3000, 90000)
	f := newFollower()
	c, end := run(b, client.Config{Targets: []string{addr}}, f)
	defer end()
	c.SetDeclared(scopeOf(200))
	until(b, "the scope", f.have(6000))
	all := scopeOf(3000)
	var took []time.Duration
	var before, after unix.Rusage
	i := 200
	if err := unix.Getrusage(unix.RUSAGE_SELF, &before); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		<-time.After(300 * time.Millisecond) // so that none has to wait for the one before it (contract 9.9)
		if i == len(all) {
			break
		}
		began := time.Now()
		if c.Want(all[i]) != client.Coming {
			b.Fatal("it is here already")
		}
		for here := false; !here; {
			<-f.news
			f.mu.Lock()
			s := f.snap.Service(all[i])
			here = s != nil && !s.Await
			f.mu.Unlock()
		}
		took = append(took, time.Since(began))
		i++
	}
	if err := unix.Getrusage(unix.RUSAGE_SELF, &after); err != nil {
		b.Fatal(err)
	}
	cpu := time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
	slices.Sort(took)
	b.ReportMetric(cpu.Seconds()*1e3/float64(len(took)), "ms-cpu/op")
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1e3, "ms/p50")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1e3, "ms/p99")
}
