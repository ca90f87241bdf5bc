package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
)

// event is a line of `go test -json` (go doc test2json), or of the build before it (go help buildjson).
type event struct {
	Action      string
	ImportPath  string // of builds
	Package     string
	Test        string
	Output      string
	Elapsed     float64
	FailedBuild string
}

// result is what became of a package.
type result struct {
	name  string
	tests int // top-level tests that passed
	ok    bool
	took  time.Duration
}

// report says on out how a run goes. Its methods are safe for concurrent use.
type report struct {
	out io.Writer

	mu      sync.Mutex
	tier    string
	total   int
	last    time.Time // when something was said
	running map[string]*pkg
	builds  map[string]string // output of builds by what is built
	results []result
	done    int // of this tier
	failed  int
}

// pkg is a package whose tests run.
type pkg struct {
	since  time.Time
	tests  int
	own    strings.Builder             // output of no test
	output map[string]*strings.Builder // of tests that run
	told   bool                        // a failed test's output was shown
}

// say prints a line.
func (r *report) say(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.print(format, args...)
}

func (r *report) print(format string, args ...any) {
	r.last = time.Now()
	fmt.Fprintf(r.out, format+"\n", args...)
}

// begin starts a tier of n packages.
func (r *report) begin(name string, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tier, r.total, r.done = name, n, 0
	r.running, r.builds = map[string]*pkg{}, map[string]string{}
}

// read takes the events of one tier's go test. It fails where the stream is none of go test's, or a package has no end.
func (r *report) read(in io.Reader) error {
	b := bufio.NewReader(in)
	for {
		line, err := b.ReadString('\n')
		if line != "" {
			var e event
			if jerr := json.Unmarshal([]byte(line), &e); jerr != nil {
				r.say("%s", strings.TrimSuffix(line, "\n"))
			} else {
				r.take(e)
			}
		}
		if err == io.EOF {
			break
		} else if err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done != r.total {
		var open []string
		for path := range r.running {
			open = append(open, strings.TrimPrefix(path, module+"/"))
		}
		slices.Sort(open)
		return fmt.Errorf("%d of %d packages have ended; begun and not ended: %s", r.done, r.total, strings.Join(open, ", "))
	}
	return nil
}

func (r *report) take(e event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.Action == "build-output" {
		r.builds[e.ImportPath] += e.Output
		return
	}
	if e.Package == "" {
		return
	}
	p := r.running[e.Package]
	if p == nil {
		p = &pkg{since: time.Now(), output: map[string]*strings.Builder{}}
		r.running[e.Package] = p
	}
	name := strings.TrimPrefix(e.Package, module+"/")
	top, _, sub := strings.Cut(e.Test, "/") // a test's output is kept with that of its subtests
	switch {
	case e.Action == "output" && e.Test == "":
		p.own.WriteString(e.Output)
	case e.Action == "output":
		if p.output[top] == nil {
			p.output[top] = &strings.Builder{}
		}
		p.output[top].WriteString(e.Output)
	case e.Test != "" && !sub && (e.Action == "pass" || e.Action == "skip"):
		p.tests++
		delete(p.output, top)
	case e.Test != "" && !sub && e.Action == "fail":
		r.print("FAILED %s in %s:\n%s", e.Test, name, text(p.output[top]))
		delete(p.output, top)
		p.told = true
	case e.Test == "" && (e.Action == "pass" || e.Action == "fail" || e.Action == "skip"):
		r.end(name, e, p)
		delete(r.running, e.Package)
	}
}

// end says what became of a package.
func (r *report) end(name string, e event, p *pkg) {
	r.done++
	res := result{name: name, tests: p.tests, ok: e.Action != "fail", took: time.Duration(e.Elapsed * float64(time.Second))}
	r.results = append(r.results, res)
	word := "ok"
	switch {
	case !res.ok:
		word = "FAILED"
		r.failed++
		if e.FailedBuild != "" {
			r.print("%s", strings.TrimSuffix(r.builds[e.FailedBuild], "\n"))
		} else {
			for test, b := range p.output { // what did not get as far as an end: a panic, a limit of time
				r.print("UNFINISHED %s in %s:\n%s", test, name, text(b))
			}
			if !p.told {
				r.print("%s", text(&p.own))
			}
		}
	case e.Action == "skip":
		word = "no tests"
	}
	r.print("%s [%d/%d] %s ... %s %.0f s, %d tests", r.tier, r.done, r.total, name, word, res.took.Seconds(), res.tests)
}

func text(b *strings.Builder) string {
	if b == nil {
		return ""
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// quiet says what runs where nothing was said for a while.
func (r *report) quiet(while time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.last) < while || len(r.running) == 0 {
		return
	}
	var l []string
	for path, p := range r.running {
		l = append(l, fmt.Sprintf("%s (%.0f s, %d tests done)", strings.TrimPrefix(path, module+"/"), time.Since(p.since).Seconds(), p.tests))
	}
	slices.Sort(l)
	r.print("%s [%d/%d] running: %s", r.tier, r.done, r.total, strings.Join(l, ", "))
}

// summary says the slowest packages and what failed.
func (r *report) summary() {
	r.mu.Lock()
	defer r.mu.Unlock()
	tests := 0
	var failed []string
	for _, p := range r.results {
		tests += p.tests
		if !p.ok {
			failed = append(failed, p.name)
		}
	}
	slowest := slices.SortedFunc(slices.Values(r.results), func(a, b result) int { return cmp.Compare(b.took, a.took) })
	r.print("slowest packages:")
	for _, p := range slowest[:min(10, len(slowest))] {
		r.print("  %4.0f s  %s", p.took.Seconds(), p.name)
	}
	r.print("%d packages, %d tests passed, %d packages failed", len(r.results), tests, r.failed)
	for _, f := range failed {
		r.print("  FAILED %s", f)
	}
}
