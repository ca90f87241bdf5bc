package presubmit

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// The most that a function of dataplane/decide may be: its steps are read beside the
// contract, one at a time.
const (
	mostStepLines    = 60
	mostStepBranches = 20
)

// TestSteps: every step of a decision is a function that fits on a screen.
func TestSteps(t *testing.T) {
	files, err := filepath.Glob("../../dataplane/decide/*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		fset := token.NewFileSet()
		tree, err := parser.ParseFile(fset, file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range tree.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if n := fset.Position(f.End()).Line - fset.Position(f.Pos()).Line + 1; n > mostStepLines {
				t.Errorf("%s: %s has %d lines, more than %d: make a step of it a function", fset.Position(f.Pos()), f.Name, n, mostStepLines)
			}
			if n := branches(f); n > mostStepBranches {
				t.Errorf("%s: %s has %d branches, more than %d: make a step of it a function", fset.Position(f.Pos()), f.Name, n, mostStepBranches)
			}
		}
	}
}

// branches is the cyclomatic complexity of f.
func branches(f *ast.FuncDecl) int {
	n := 1
	ast.Inspect(f, func(x ast.Node) bool {
		switch x := x.(type) {
		case *ast.IfStmt, *ast.ForStmt, *ast.RangeStmt:
			n++
		case *ast.CaseClause:
			if x.List != nil {
				n++
			}
		case *ast.BinaryExpr:
			if x.Op == token.LAND || x.Op == token.LOR {
				n++
			}
		}
		return true
	})
	return n
}
