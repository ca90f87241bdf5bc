package mutants

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"aether/e2e/counts"
)

// root is the module's directory.
func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestMutants: every break is noticed by the tests of its property.
func TestMutants(t *testing.T) {
	dir := root(t)
	killed := 0
	for _, m := range All {
		t.Run(strings.ReplaceAll(m.Property, " ", "-"), func(t *testing.T) {
			o, out, err := m.Try(t.Context(), dir, t.TempDir())
			switch {
			case err != nil:
				t.Fatalf("%v\n%s", err, out)
			case o == Survived:
				t.Fatalf("no test of %s (-run %s) notices that in %s\n%s\nbecame\n%s", m.Package, m.Run, m.File, m.Old, m.New)
			}
			killed++
		})
	}
	counts.Say(t, "%d of %d mutants killed", killed, len(All))
}

// TestApply: a stale or empty break is an error.
func TestApply(t *testing.T) {
	for _, tt := range []struct {
		m    Mutant
		text string
		want string // of the error
	}{
		{Mutant{Old: "a", New: "b"}, "xax", ""},
		{Mutant{Old: "a", New: "b"}, "aa", "2 times"},
		{Mutant{Old: "a", New: "b"}, "x", "0 times"},
		{Mutant{Old: "a", New: "a"}, "a", "changes nothing"},
	} {
		got, err := tt.m.Apply(tt.text)
		if tt.want == "" && (err != nil || got != "xbx") || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%+v on %q: %q, %v", tt.m, tt.text, got, err)
		}
	}
}
