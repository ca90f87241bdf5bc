// Package bench compares the proxy with its peers on one machine, side by side in one
// run: no proxy at all, Envoy, HAProxy where the work is the same, and a relay that
// shows what the kernel alone takes.
//
//   - Every variant has nodes, pods and an application of its own (e2e/rig), and
//     its proxies run only while it is measured.
//   - Rounds interleave the variants, so that a slow minute of the machine meets all of them;
//     what is reported is the median over the rounds.
//   - Processor time is the proxies' own, user and system; clients and
//     applications are separate processes.
//   - An error of any request, or a peer that cannot be had or started, fails the run.
//     Nothing is left out but what was left out by -variants.
//
// It knows the proxy only as a command with flags. Both `go test -bench ./bench` at the
// root of the module and `go test -bench . ./bench` run it; README.md explains the figures.
package bench

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"aether/e2e/rig"
)

// Flags, each with an environment variable for where flags cannot be passed.
var (
	full     = flag.Bool("full", os.Getenv("AETHER_BENCH_FULL") != "", "bench: more and longer rounds (environment: AETHER_BENCH_FULL=1); give go test -timeout 60m")
	variants = flag.String("variants", cmp.Or(os.Getenv("AETHER_BENCH_VARIANTS"), "direct,ours,envoy,haproxy,floor"), "bench: which to compare (environment: AETHER_BENCH_VARIANTS)")
	out      = flag.String("out", os.Getenv("AETHER_BENCH_OUT"), "bench: `file` that also gets the tables, in Markdown (environment: AETHER_BENCH_OUT)")
)

// size of a run.
type size struct {
	rounds     int           // of each measurement and variant
	sat, close int           // seconds of wrk
	rate       time.Duration // of the paced load
	bytes      int64         // of a download
	idle       int           // connections
	idleRounds int
}

var (
	short = size{rounds: 3, sat: 3, close: 2, rate: 3 * time.Second, bytes: 1e9, idle: 10_000, idleRounds: 1}
	long  = size{rounds: 5, sat: 10, close: 6, rate: 10 * time.Second, bytes: 4e9, idle: 10_000, idleRounds: 3}
)

// What is asked for: the Service's address belongs to nobody, port 8080 speaks HTTP
// and 9000 is declared raw TCP.
const (
	serviceIP   = "10.96.0.10"
	serviceHost = "b.demo.aether.internal:8080"
	trustDomain = "rig.test"
	bannerPort  = 2525
	outsidePort = 9100
	// stepTimeout bounds one start or one measurement.
	stepTimeout = 2 * time.Minute
)

// phase is one kind of load.
type phase struct {
	name   string // "bench=..." is what the pattern ./bench matches
	rounds func(size) int
	run    func(context.Context, *suite, *site) (sample, error)
	skip   []string // variants that do not do this work; the README says why
}

// sample is what one round of one variant gave: metric to value.
type sample map[string]float64

var phases = []phase{
	{name: "bench=saturation", rounds: size.load, run: saturation("/")},
	{name: "bench=bodies", rounds: size.load, run: saturation("/64k"), skip: []string{"floor"}},
	{name: "bench=h2c", rounds: size.load, run: multiplexed, skip: []string{"direct", "floor"}},
	{name: "bench=rate", rounds: size.load, run: fixedRate},
	{name: "bench=high", rounds: size.load, run: highRate, skip: []string{"floor"}},
	{name: "bench=close", rounds: size.load, run: closeEach, skip: []string{"floor"}},
	{name: "bench=tcp", rounds: size.load, run: rawTCP("download", 1), skip: []string{"floor"}},
	{name: "bench=tcp16", rounds: size.load, run: rawTCP("download", 16), skip: []string{"floor"}},
	{name: "bench=tcpup", rounds: size.load, run: rawTCP("upload", 1), skip: []string{"floor"}},
	{name: "bench=pass", rounds: size.load, run: passthrough, skip: []string{"haproxy", "floor"}},
	{name: "bench=idle", rounds: func(z size) int { return z.idleRounds }, run: idleConns, skip: []string{"direct", "floor"}},
	{name: "bench=loops", rounds: size.load, run: twoPods, skip: []string{"direct", "envoy", "haproxy", "floor", "big"}},
	{name: "bench=first", rounds: func(size) int { return 3 }, run: serverFirst, skip: []string{"haproxy", "floor"}},
}

func (z size) load() int { return z.rounds }

// suite is one run of the comparison.
type suite struct {
	size
	tools string // directory of what was built
	// highQPS is the rate of the phase high, once it is known.
	highQPS int
	sites   []*site
	rows    []row
}

// row is a median in the making.
type row struct {
	phase, variant string
	samples        []sample
}

// site is one variant's nodes and pods, and what is on them.
type site struct {
	variant
	suite *suite
	rig   *rig.Rig
	A, B  *rig.Pod
	C     *rig.Pod // a second one on A's node
	Certs string   // directory of the SVIDs
	conf  string   // directory of configuration made for the variant
}

// Run makes the comparison and reports it through b's sub-benchmarks and as tables on standard output.
// Call it from a benchmark that is called Benchmark.
func Run(b *testing.B) {
	s := &suite{size: short}
	if *full {
		s.size = long
	}
	ctx := b.Context()
	if err := rig.Need("wrk", "h2load", "nginx", "ip", "nft"); err != nil {
		b.Fatal(err)
	}
	if err := raiseFiles(); err != nil {
		b.Fatal(err)
	}
	s.tools = b.TempDir()
	root, err := moduleRoot()
	if err != nil {
		b.Fatal(err)
	}
	if err := build(ctx, root, filepath.Join(s.tools, "load"), "./bench/load"); err != nil {
		b.Fatal(err)
	}
	for name := range strings.SplitSeq(*variants, ",") {
		i := slices.IndexFunc(known, func(v variant) bool { return v.name == name })
		if i < 0 {
			b.Fatalf("bench: variant %q is none of direct, ours, envoy, haproxy, floor, adapt, two, big", name)
		}
		site, err := s.newSite(ctx, root, known[i])
		if err != nil {
			b.Fatalf("bench: set up %s: %v", name, err)
		}
		b.Cleanup(func() {
			if err := site.rig.Close(); err != nil {
				b.Error(err)
			}
		})
		s.sites = append(s.sites, site)
	}
	load := loadAverage()
	for _, p := range phases {
		if sites := s.does(p); len(sites) > 0 {
			b.Run(p.name, func(b *testing.B) { s.measure(b, p, sites) })
		}
	}
	if len(s.rows) == 0 {
		return // the pattern matched none
	}
	text := s.report(machine(root) + ", load average at the start " + load)
	fmt.Print("\n" + text + "\n")
	if *out != "" {
		if err := os.WriteFile(*out, []byte(text), 0o644); err != nil {
			b.Errorf("bench: %v", err)
		}
	}
}

// does lists the sites whose variant does the work of the phase.
func (s *suite) does(p phase) []*site {
	return slices.DeleteFunc(slices.Clone(s.sites), func(site *site) bool { return slices.Contains(p.skip, site.name) })
}

// measure runs all rounds of a phase and reports a sub-benchmark a variant.
func (s *suite) measure(b *testing.B, p phase, sites []*site) {
	start := len(s.rows)
	for _, site := range sites {
		s.rows = append(s.rows, row{phase: p.name, variant: site.name})
	}
	for round := range p.rounds(s.size) {
		for i, site := range sites {
			ctx, cancel := context.WithTimeout(b.Context(), stepTimeout)
			got, err := p.run(ctx, s, site)
			cancel()
			if err != nil {
				b.Fatalf("bench: %s of %s, round %d: %v", p.name, site.name, round+1, err)
			}
			r := &s.rows[start+i]
			r.samples = append(r.samples, got)
		}
	}
	for _, r := range s.rows[start:] {
		// The work is done; a sub-benchmark only gives each variant its line in Go's
		// format, so its count of iterations and ns/op mean nothing.
		b.Run("proxy="+r.variant, func(b *testing.B) {
			for _, m := range r.metrics() {
				b.ReportMetric(r.median(m), m)
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// newSite makes nodes, pods, certificates and applications of a variant, and what its proxies need.
func (s *suite) newSite(ctx context.Context, root string, v variant) (_ *site, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute) // a peer may be fetched
	defer cancel()
	r, err := rig.New(ctx, rig.Options{})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			r.Close() // the first error says more
		}
	}()
	site := &site{variant: v, suite: s, rig: r, Certs: filepath.Join(r.Dir, "certs"), conf: filepath.Join(r.Dir, "conf")}
	if site.A, err = r.AddPod(ctx, 0, "a"); err != nil {
		return nil, err
	}
	if site.B, err = r.AddPod(ctx, 1, "b"); err != nil {
		return nil, err
	}
	if site.C, err = r.AddPod(ctx, 0, "c"); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(site.conf, 0o755); err != nil {
		return nil, err
	}
	ca, err := rig.NewCA(trustDomain)
	if err != nil {
		return nil, err
	}
	for _, p := range r.Pods() {
		svid, err := ca.Issue(rig.SVIDRequest{Namespace: "demo", Account: p.Name})
		if err != nil {
			return nil, err
		}
		if _, err := svid.Write(site.Certs); err != nil {
			return nil, err
		}
		if err := svid.WriteCombined(filepath.Join(site.Certs, p.Name+"-full.pem")); err != nil {
			return nil, err
		}
	}
	if _, err := r.StartNginx(ctx, site.B, 8080); err != nil {
		return nil, err
	}
	load := filepath.Join(s.tools, "load")
	if _, err := r.StartProcess(&site.B.Space, "source", load, "source", "-addr", "0.0.0.0:9000"); err != nil {
		return nil, err
	}
	// What is outside the mesh stands on the other node, in no pod.
	if _, err := r.StartProcess(&r.Nodes[1].Space, "outside", load, "source", "-addr", "0.0.0.0:"+strconv.Itoa(outsidePort)); err != nil {
		return nil, err
	}
	if _, err := r.StartProcess(&r.Nodes[1].Space, "banner", load, "banner", "-addr", "0.0.0.0:"+strconv.Itoa(bannerPort)); err != nil {
		return nil, err
	}
	if v.prepare != nil {
		if err := v.prepare(ctx, site, root); err != nil {
			return nil, err
		}
	}
	return site, nil
}

// needFiles: clients and proxies hold 10,000 idle connections and some more.
const needFiles = 12_000

// raiseFiles lifts the limit of open files as far as it may be, for this process and those it starts.
func raiseFiles() error {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return fmt.Errorf("bench: limit of open files: %w", err)
	}
	if lim.Max < needFiles {
		lim.Max = needFiles
	}
	lim.Cur = lim.Max
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return fmt.Errorf("bench: raise the limit of open files to %d: %w; raise the hard limit (ulimit -Hn %d) first", lim.Max, err, needFiles)
	}
	return nil
}

// target is where the client dials for the port: the Service, or, with no
// proxy, the pod.
func (s *site) target(port uint16) netip.AddrPort {
	if s.start == nil {
		return netip.AddrPortFrom(s.B.IP4, port)
	}
	return netip.AddrPortFrom(netip.MustParseAddr(serviceIP), port)
}

// build builds a command of this module.
func build(ctx context.Context, root, to, pkg string) error {
	if _, err := os.Stat(filepath.Join(root, pkg, "main.go")); err != nil {
		return fmt.Errorf("bench: build %s: %w", pkg, err)
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-o", to, pkg)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("bench: go build %s: %w\n%s", pkg, err, out)
	}
	return nil
}

// moduleRoot is the directory of go.mod above the working directory, which a test
// has in its package.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("bench: no go.mod above %s; run it from the module's tree", dir)
		}
	}
}
