package testseed_test

import (
	"fmt"
	"strings"
	"testing"

	"aether/e2e/testseed"
)

// recorder is a test of which only the log and the failure count.
type recorder struct {
	testing.TB
	lines []string
}

func (r *recorder) Helper()                   {}
func (r *recorder) Name() string              { return "TestSomething" }
func (r *recorder) Logf(f string, a ...any)   { r.lines = append(r.lines, fmt.Sprintf(f, a...)) }
func (r *recorder) Fatalf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }

func TestSeed(t *testing.T) {
	seed := func(value string) (uint64, string) {
		t.Setenv(testseed.Variable, value)
		r := &recorder{TB: t}
		return testseed.Seed(r), strings.Join(r.lines, "\n")
	}
	one, _ := seed("")
	if two, _ := seed(""); one != two {
		t.Errorf("two runs have %d and %d, want one seed", one, two)
	}
	if got, line := seed("1796084540737760719"); got != 1796084540737760719 || !strings.Contains(line, "AETHER_SEED=1796084540737760719 go test -run '^TestSomething$'") {
		t.Errorf("a seed that was set: %d, log %q", got, line)
	}
	a, line := seed("random")
	if b, _ := seed("random"); a == b || !strings.Contains(line, fmt.Sprintf("AETHER_SEED=%d ", a)) {
		t.Errorf("fresh seeds: %d and %d, log %q", a, b, line)
	}
	defer func() {
		if got := fmt.Sprint(recover()); !strings.Contains(got, `AETHER_SEED="-1" is neither`) {
			t.Errorf("a seed that is no number: %s", got)
		}
	}()
	seed("-1")
}

func TestCount(t *testing.T) {
	t.Setenv(testseed.FullVariable, "")
	if got := testseed.Count(2, 30); got != 2 {
		t.Errorf("%d by default, want 2", got)
	}
	t.Setenv(testseed.FullVariable, "1")
	if got := testseed.Count(2, 30); got != 30 {
		t.Errorf("%d at full strength, want 30", got)
	}
}
