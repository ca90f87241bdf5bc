package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestPlan: each package is in exactly one tier, a full run has the race detector everywhere, and what the tables name
// is there.
func TestPlan(t *testing.T) {
	packages := []string{"", "cmd/x", "dataplane", "dataplane/engine", "dataplane/relay", "sniff", "sniff/replay", "e2e/netns", "benches"}
	var got []string
	for _, tier := range plan(packages, true) {
		got = append(got, tier.paths...)
		if !tier.race {
			t.Errorf("tier %s of a full run is without the race detector", tier.name)
		}
	}
	slices.Sort(got)
	if want := slices.Sorted(slices.Values(packages)); !slices.Equal(got, want) {
		t.Errorf("packages of the tiers are %q, want %q", got, want)
	}
	for _, tier := range plan(packages, false) {
		if has := slices.Contains(tier.paths, "dataplane/relay"); has && !tier.race {
			t.Error("dataplane/relay is without the race detector, though only dataplane itself is heavy")
		}
		if has := slices.Contains(tier.paths, "e2e/netns"); has && tier.race {
			t.Error("e2e/netns has the race detector in a default run")
		}
	}
	for _, dir := range slices.Concat(pure, heavy, heavyAlone) {
		if _, err := os.Stat(filepath.Join("../..", dir)); err != nil {
			t.Errorf("a table of plan.go names what is not there: %v", err)
		}
	}
}

// read gives what a report says of a stream, and its error.
func read(t *testing.T, n int, stream string) (string, *report, error) {
	t.Helper()
	var b strings.Builder
	r := &report{out: &b}
	r.begin("tier 1/1 pure", n)
	err := r.read(strings.NewReader(stream))
	r.summary()
	return b.String(), r, err
}

// TestReport: counts, failures with their output and that of their subtests, and nothing of tests that passed.
func TestReport(t *testing.T) {
	said, r, err := read(t, 2, `{"Action":"start","Package":"aether/sniff"}
{"Action":"output","Package":"aether/sniff","Test":"TestGood","Output":"noise\n"}
{"Action":"pass","Package":"aether/sniff","Test":"TestGood"}
{"Action":"output","Package":"aether/sniff","Test":"TestBad/sub","Output":"    got 1, want 2\n"}
{"Action":"fail","Package":"aether/sniff","Test":"TestBad/sub"}
{"Action":"fail","Package":"aether/sniff","Test":"TestBad"}
{"Action":"fail","Package":"aether/sniff","Elapsed":41.2}
{"Action":"output","Package":"aether/mtls","Test":"TestFine","Output":"noise\n"}
{"Action":"pass","Package":"aether/mtls","Test":"TestFine"}
{"Action":"pass","Package":"aether/mtls","Elapsed":3}
`)
	if err != nil || r.failed != 1 {
		t.Errorf("%d packages failed, error %v; want 1 and none", r.failed, err)
	}
	for _, want := range []string{
		"FAILED TestBad in sniff:\n    got 1, want 2\n", "tier 1/1 pure [1/2] sniff ... FAILED 41 s, 1 tests\n",
		"tier 1/1 pure [2/2] mtls ... ok 3 s, 1 tests\n", "    41 s  sniff\n     3 s  mtls\n", "2 packages, 2 tests passed, 1 packages failed\n  FAILED sniff\n",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("nothing says %q in\n%s", want, said)
		}
	}
	if strings.Contains(said, "noise") {
		t.Errorf("output of a test that passed is shown:\n%s", said)
	}
}

// TestReportOfWhatHasNoEnd: a panic, a build that fails and a go test that stops are failures with what was said.
func TestReportOfWhatHasNoEnd(t *testing.T) {
	said, r, _ := read(t, 2, `{"Action":"output","Package":"aether/mtls","Test":"TestPanics","Output":"panic: oh\n"}
{"Action":"fail","Package":"aether/mtls","Elapsed":1}
{"ImportPath":"aether/sniff","Action":"build-output","Output":"sniff.go:1:1: syntax error\n"}
{"ImportPath":"aether/sniff","Action":"build-fail"}
{"Action":"fail","Package":"aether/sniff","FailedBuild":"aether/sniff"}
`)
	for _, want := range []string{"UNFINISHED TestPanics in mtls:\npanic: oh\n", "sniff.go:1:1: syntax error\n"} {
		if r.failed != 2 || !strings.Contains(said, want) {
			t.Errorf("%d failed; want 2 and %q in\n%s", r.failed, want, said)
		}
	}
	if _, _, err := read(t, 2, `{"Action":"pass","Package":"aether/mtls"}
{"Action":"start","Package":"aether/sniff"}
`); err == nil || !strings.HasSuffix(err.Error(), "1 of 2 packages have ended; begun and not ended: sniff") {
		t.Errorf("a package that never ended: error %v", err)
	}
}

// TestAgainstGo holds the reading against what this machine's go says.
func TestAgainstGo(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":      "module aether\n\ngo 1.24\n",
		"a/a_test.go": "package a\n\nimport \"testing\"\n\nfunc TestA(t *testing.T) { t.Run(\"b\", func(t *testing.T) { t.Error(\"wrong\") }) }\n",
		"b/b_test.go": "package b\n\nvar x int = \"\"\n",
		"c/c.go":      "package c\n",
	} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	c := exec.CommandContext(t.Context(), "go", "test", "-json", "./...")
	c.Dir = dir
	c.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	out, err := c.Output()
	if err == nil {
		t.Fatal("go test passed")
	}
	said, r, err := read(t, 3, string(out))
	if err != nil || r.failed != 2 || !strings.Contains(said, "wrong") || !strings.Contains(said, "cannot use") || !strings.Contains(said, "c ... no tests") {
		t.Errorf("error %v, %d failed, said\n%s", err, r.failed, said)
	}
}
