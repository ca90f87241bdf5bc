package presubmit

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const architectureFile = "docs/architecture.md"

// Between these lines of docs/architecture.md stands the table of rows.
const (
	rowsBegin = "<!-- rows: go test ./e2e/presubmit -run TestRowsTable -update -->\n"
	rowsEnd   = "<!-- end of rows -->\n"
)

var update = flag.Bool("update", false, "write the table of rows into docs/architecture.md")

// rowsTable is the packages of each row as a table, the highest row first. Packages that are
// planned, and not there, are left out; helpers of tests stand beside the rows.
func rowsTable(exists func(string) bool) string {
	var b strings.Builder
	b.WriteString("\n| row | packages | what is there |\n|---|---|---|\n")
	for row := len(rows) - 1; row >= 0; row-- {
		var here []string
		for _, p := range places {
			if p.row == row && exists(p.pkg) {
				here = append(here, "`"+p.pkg+"`")
			}
		}
		fmt.Fprintf(&b, "| %d | %s | %s |\n", row, strings.Join(here, ", "), rows[row])
	}
	b.WriteString("\n")
	return b.String()
}

// TestRowsTable holds the table in docs/architecture.md against the rows; with -update it writes it.
func TestRowsTable(t *testing.T) {
	file := filepath.Join(root, architectureFile)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), rowsBegin)
	_, after, end := strings.Cut(rest, rowsEnd)
	if !ok || !end {
		t.Fatalf("%s has no table of rows: put it between %q and %q", architectureFile, rowsBegin, rowsEnd)
	}
	want := before + rowsBegin + rowsTable(func(pkg string) bool {
		files, _ := filepath.Glob(filepath.Join(root, pkg, "*.go"))
		return len(files) > 0
	}) + rowsEnd + after
	switch {
	case want == string(b):
	case *update:
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		t.Errorf("%s has an old table of rows: run go test ./e2e/presubmit -run TestRowsTable -update", architectureFile)
	}
}
