package bench

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
)

// metrics of the row, in alphabetical order.
func (r *row) metrics() []string {
	if len(r.samples) == 0 {
		return nil
	}
	return slices.Sorted(maps.Keys(r.samples[0]))
}

// values of the metric over the rounds, ascending.
func (r *row) values(metric string) []float64 {
	var v []float64
	for _, s := range r.samples {
		if x, ok := s[metric]; ok {
			v = append(v, x)
		}
	}
	slices.Sort(v)
	return v
}

// median over the rounds; the mean of the middle two of an even number.
func (r *row) median(metric string) float64 {
	v := r.values(metric)
	if len(v) == 0 {
		return 0
	}
	return (v[len(v)/2] + v[(len(v)-1)/2]) / 2
}

// column of the table: metrics of one phase in one cell, and how they are printed.
type column struct {
	title, phase, format string
	metrics              []string
}

var columns = []column{
	{"saturation, µs A/B", "bench=saturation", "%.1f", []string{"A-us/req", "B-us/req"}},
	{"req/s", "bench=saturation", "%.0f", []string{"req/s"}},
	{"RSS, MB A/B", "bench=saturation", "%.0f", []string{"A-MB", "B-MB"}},
	{"64 kB bodies, µs A/B", "bench=bodies", "%.0f", []string{"A-us/req", "B-us/req"}},
	{"h2c, µs A/B", "bench=h2c", "%.1f", []string{"A-us/req", "B-us/req"}},
	{"2,000 qps, µs A/B", "bench=rate", "%.1f", []string{"A-us/req", "B-us/req"}},
	{"p50/p99, ms", "bench=rate", "%.2f", []string{"p50-ms", "p99-ms"}},
	{"high rate, p50/p99, ms", "bench=high", "%.2f", []string{"p50-ms", "p99-ms"}},
	{"close, µs A/B", "bench=close", "%.1f", []string{"A-us/req", "B-us/req"}},
	{"raw TCP, s/GB A/B", "bench=tcp", "%.2f", []string{"A-s/GB", "B-s/GB"}},
	{"Gbit/s", "bench=tcp", "%.1f", []string{"Gbit/s"}},
	{"16 streams, s/GB A/B", "bench=tcp16", "%.2f", []string{"A-s/GB", "B-s/GB"}},
	{"upload, s/GB A/B", "bench=tcpup", "%.2f", []string{"A-s/GB", "B-s/GB"}},
	{"passthrough, s/GB", "bench=pass", "%.2f", []string{"A-s/GB"}},
	{"idle, B/conn A", "bench=idle", "%.0f", []string{"A-B/conn"}},
	{"idle, MB A empty/all/anonymous", "bench=idle", "%.1f", []string{"A-MB-empty", "A-MB-idle", "A-MB-anon"}},
	{"two pods, µs A/B", "bench=loops", "%.1f", []string{"A-us/req", "B-us/req"}},
	{"first byte, ms", "bench=first", "%.2f", []string{"first-byte-ms"}},
}

// report renders three Markdown tables: medians, ratios, and every metric with its range.
func (s *suite) report(head string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\nMedians of %d interleaved rounds.\n\n", head, s.rounds)
	cells := func(site *site, value func(*row, column, string) string) {
		fmt.Fprintf(&b, "| %s |", site.name)
		for _, c := range columns {
			var parts []string
			if r := s.row(c.phase, site.name); r != nil {
				for _, m := range c.metrics {
					if len(r.values(m)) > 0 {
						parts = append(parts, value(r, c, m))
					}
				}
			}
			fmt.Fprintf(&b, " %s |", cmp.Or(strings.Join(parts, "/"), "–"))
		}
		b.WriteByte('\n')
	}
	title := func(first string) {
		fmt.Fprintf(&b, "| %s |", first)
		for _, c := range columns {
			fmt.Fprintf(&b, " %s |", c.title)
		}
		fmt.Fprintf(&b, "\n|%s\n", strings.Repeat("---|", len(columns)+1))
	}
	title("who")
	for _, site := range s.sites {
		cells(site, func(r *row, c column, m string) string { return fmt.Sprintf(c.format, r.median(m)) })
	}
	if base := s.base(); base != "" && len(s.sites) > 1 {
		fmt.Fprintf(&b, "\nRatios to %s.\n\n", base)
		title("who")
		for _, site := range s.sites {
			if site.name == base {
				continue
			}
			cells(site, func(r *row, c column, m string) string {
				ours := s.row(c.phase, base)
				if ours == nil || ours.median(m) == 0 {
					return "–"
				}
				return fmt.Sprintf("%.2f", r.median(m)/ours.median(m))
			})
		}
	}
	b.WriteString("\n| what | who | metric | median | least | most |\n|---|---|---|---|---|---|\n")
	for _, r := range s.rows {
		for _, m := range r.metrics() {
			v := r.values(m)
			fmt.Fprintf(&b, "| %s | %s | %s | %.4g | %.4g | %.4g |\n", strings.TrimPrefix(r.phase, "bench="), r.variant, m, r.median(m), v[0], v[len(v)-1])
		}
	}
	return b.String()
}

// base is the variant that the others are compared with: ours, or the first proxy there is.
func (s *suite) base() string {
	name := ""
	for _, site := range s.sites {
		switch {
		case site.name == "ours":
			return site.name
		case name == "" && site.start != nil:
			name = site.name
		}
	}
	return name
}

func (s *suite) row(phase, variant string) *row {
	for i := range s.rows {
		if s.rows[i].phase == phase && s.rows[i].variant == variant {
			return &s.rows[i]
		}
	}
	return nil
}

// machine names the processor, the kernel, Go and the commit.
func machine(root string) string {
	cpu := "unknown processor"
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range bytes.Lines(b) {
			if k, v, ok := strings.Cut(string(line), ":"); ok && strings.TrimSpace(k) == "model name" {
				cpu = strings.TrimSpace(v)
				break
			}
		}
	}
	kernel := "unknown"
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		kernel = strings.TrimSpace(string(b))
	}
	commit := "unknown"
	cmd := exec.Command("git", "describe", "--always", "--dirty")
	cmd.Dir = root
	if b, err := cmd.Output(); err == nil {
		commit = strings.TrimSpace(string(b))
	}
	return fmt.Sprintf("%d × %s, Linux %s, %s, commit %s", runtime.NumCPU(), cpu, kernel, runtime.Version(), commit)
}

// loadAverage is the first three numbers of /proc/loadavg.
func loadAverage() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	f := strings.Fields(string(b))
	return strings.Join(f[:min(3, len(f))], " ")
}
