package bench

import (
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"aether/e2e/rig"
)

// Benchmark is the comparison; see README.md.
func Benchmark(b *testing.B) { Run(b) }

// What `-bench ./bench` selects is decided by the names: the part before the
// slash matches any benchmark, the part after it these.
func TestEveryPhaseIsSelectedByThePattern(t *testing.T) {
	for _, p := range phases {
		if !regexp.MustCompile("bench").MatchString(p.name) || strings.Contains(p.name, "/") {
			t.Errorf("phase %q is not matched by -bench ./bench", p.name)
		}
	}
}

func TestParseWrk(t *testing.T) {
	const good = `Running 2s test @ http://10.96.0.10:8080/
  1 threads and 32 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.02ms  350.00us   9.00ms   50.93%
    Req/Sec    31.00k     1.00k   33.00k    99.00%
  Latency Distribution
     50%    0.95ms
     75%    1.10ms
     90%    1.30ms
     99%    1.02s
  62000 requests in 2.01s, 9.00MB read
Requests/sec:  30845.77
Transfer/sec:      4.48MB
`
	w, err := parseWrk(good)
	if want := (wrkResult{requests: 62000, perSecond: 30845.77, p50: 0.95, p99: 1020}); err != nil || w != want {
		t.Errorf("%+v, %v, want %+v", w, err, want)
	}
	for _, line := range []string{
		"  Socket errors: connect 0, read 3, write 0, timeout 0\n",
		"  Non-2xx or 3xx responses: 12\n",
	} {
		bad := strings.Replace(good, "Requests/sec:", line+"Requests/sec:", 1)
		if _, err := parseWrk(bad); err == nil || !strings.Contains(err.Error(), strings.TrimSpace(line)) {
			t.Errorf("%q: %v", line, err)
		}
	}
	for _, bad := range []string{"", "unable to connect", strings.Replace(good, "62000", "0", 1), strings.Replace(good, "1.02s", "1.02x", 1)} {
		if _, err := parseWrk(bad); err == nil {
			t.Errorf("accepted %q", bad)
		}
	}
}

func TestParseH2load(t *testing.T) {
	const good = `
finished in 1.52s, 19736.84 req/s, 1.02MB/s
requests: 30000 total, 30000 started, 30000 done, 30000 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 30000 2xx, 0 3xx, 0 4xx, 0 5xx
`
	r, err := parseH2load(good, 30000)
	if err != nil || r.perSecond != 19736.84 {
		t.Errorf("%+v, %v", r, err)
	}
	for _, bad := range []string{
		"", strings.Replace(good, "30000 2xx, 0 3xx", "29999 2xx, 1 3xx", 1), strings.Replace(good, "0 errored", "1 errored", 1),
		strings.Replace(good, "30000 succeeded", "29999 succeeded", 1), strings.Replace(good, "finished in", "finished", 1),
	} {
		if _, err := parseH2load(bad, 30000); err == nil {
			t.Errorf("accepted %q", bad)
		}
	}
	if _, err := parseH2load(good, 30001); err == nil {
		t.Error("accepted fewer answers than were asked for")
	}
}

func TestMedian(t *testing.T) {
	for _, tt := range []struct {
		values []float64
		want   float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 3, 2}, 2.5}} {
		r := row{}
		for _, v := range tt.values {
			r.samples = append(r.samples, sample{"m": v})
		}
		if got := r.median("m"); got != tt.want {
			t.Errorf("median of %v = %v, want %v", tt.values, got, tt.want)
		}
	}
}

func TestReport(t *testing.T) {
	noStart := variant{name: "direct"}
	s := &suite{
		size:  size{rounds: 1},
		sites: []*site{{variant: noStart}, {variant: known[1]}, {variant: known[2]}},
		rows: []row{
			{"bench=saturation", "direct", []sample{{"req/s": 40000}}},
			{"bench=saturation", "ours", []sample{{"A-us/req": 10, "B-us/req": 12, "req/s": 20000}}},
			{"bench=saturation", "envoy", []sample{{"A-us/req": 60, "B-us/req": 66, "req/s": 10000}}},
		},
	}
	text := s.report("a machine")
	for _, want := range []string{
		"a machine\n", "Medians of 1 ",
		"| direct | – | 40000 |", "| ours | 10.0/12.0 | 20000 |", "| envoy | 60.0/66.0 | 10000 |",
		"Ratios to ours.", "| envoy | 6.00/5.50 | 0.50 |", "| direct | – | 2.00 |",
		"| saturation | envoy | B-us/req | 66 | 66 | 66 |",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if base := (&suite{sites: []*site{{variant: noStart}, {variant: known[3]}}}).base(); base != "haproxy" {
		t.Errorf("without ours the base is %q", base)
	}
}

// testSite is the first two pods of a rig, without the rig.
func testSite(t *testing.T) *site {
	t.Helper()
	return &site{
		A:     &rig.Pod{Space: rig.Space{Name: "a", NetNS: "/run/netns/x-a"}, IP4: netip.MustParseAddr("10.1.1.10")},
		B:     &rig.Pod{Space: rig.Space{Name: "b", NetNS: "/run/netns/x-b"}, IP4: netip.MustParseAddr("10.1.2.10")},
		Certs: "certs", conf: t.TempDir(),
	}
}

// Every peer's configuration renders from a site, and names no place of its own.
func TestPeersRender(t *testing.T) {
	entries, err := peers.ReadDir("peers")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if len(names) != 6 {
		t.Errorf("peers: %v", names)
	}
	s := testSite(t)
	if err := s.render(names...); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join(s.conf, name))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b), "{{") || strings.Contains(string(b), "<no value>") {
			t.Errorf("%s is not rendered", name)
		}
		if a := strings.HasSuffix(strings.TrimSuffix(strings.TrimSuffix(name, ".yaml"), ".cfg"), "-a"); a && !strings.Contains(string(b), "10.1.2.10") {
			t.Errorf("%s does not name the destination", name)
		}
	}
	if err := s.render("none.cfg"); err == nil {
		t.Error("a peer without configuration rendered")
	}
}

func TestSizesAreWithinTheBounds(t *testing.T) {
	for _, z := range []size{short, long} {
		if z.rounds < 3 {
			t.Errorf("%d rounds; a median wants three", z.rounds)
		}
		if z.idle+1000 > needFiles {
			t.Errorf("%d idle connections do not fit %d open files", z.idle, needFiles)
		}
		if step := time.Duration(z.sat+z.close)*time.Second + z.rate; step > stepTimeout/2 {
			t.Errorf("measurements of %s do not fit the limit of a step", step)
		}
	}
}
