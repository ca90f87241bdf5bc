package presubmit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// room is a part of a package: its files in the order in which they may use each other, each those before it.
type room struct {
	name  string
	files []string
}

// orders are packages of several rooms. A file uses what is declared in files before it alone, in its room or in
// a room before.
var orders = map[string][]room{
	"dataplane/engine": {
		{"scheduling", []string{"bounds", "files", "overload", "state", "flaws", "date", "process", "loop", "perloop", "pod", "listener", "relays", "engine"}},
		{"connections", []string{"transport", "h1conn", "upgrade", "h1server", "h1client", "h2state", "h2stream", "h2conn", "h2events", "h2server", "h2client"}},
		{"upstreams", []string{"sessions", "dials", "hop", "apppool", "localstream", "inprocess"}},
	},
	"dataplane/detect": {
		{"detection", []string{"authority", "race", "detect"}},
	},
	"dataplane/outbound": {
		{"state", []string{"causes", "outcome", "token", "attempt", "pod", "results", "upstreams", "outbound", "conn", "copy", "reqstate"}},
		{"upstreams", []string{"sweep", "bonds", "near", "hops", "accounts", "state"}},
		{"requests", []string{"fields", "answer", "send", "mirror", "retry", "await", "authz", "persist", "request"}},
		{"connections", []string{"relay", "accept", "new"}},
	},
}

// TestRooms: no file of a package with rooms uses a type, function, variable, field or method of a file behind it.
func TestRooms(t *testing.T) {
	for pkg, rooms := range orders {
		t.Run(pkg, func(t *testing.T) {
			var order []string
			for _, r := range rooms {
				order = append(order, r.files...)
			}
			flaws, err := backUses(filepath.Join("../..", pkg), order)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range flaws {
				t.Error(f)
			}
		})
	}
}

// TestRoomsSees: backUses finds each kind of use, and no use that is in order.
func TestRoomsSees(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module m\n\ngo 1.26\n",
		"a.go": `package m

import "fmt"

type A struct{ f int }

func (a *A) m() { fmt.Println(a.f) }

type iface interface{ late() }

func call(i iface) { i.late() }

func up(b *B) { b.late(); _ = b.g; later(); _ = v }
`,
		"b.go": `package m

type B struct {
	A
	g int
}

func (b *B) late() { b.m(); b.f++ }

func later() {}

var v int
`,
		"c.go": "package m\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := backUses(dir, []string{"a", "b"})
	want := []string{
		"a.go uses B, g, late, later, v of b.go: move what both need in front of a.go, or let b.go hand it in",
		"c.go stands in no room: add it to orders",
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
}

// backUses lists what files of the package in dir use of files that order has behind them.
func backUses(dir string, order []string) (flaws []string, err error) {
	exports, err := exportFiles(dir)
	if err != nil {
		return nil, err
	}
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	fset := token.NewFileSet()
	var files []*ast.File
	rank := map[string]int{}
	for i, f := range order {
		rank[f+".go"] = i
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
		if base := filepath.Base(name); !slices.Contains(order, strings.TrimSuffix(base, ".go")) {
			flaws = append(flaws, base+" stands in no room: add it to orders")
			rank[base] = len(order)
		}
	}
	open := func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	conf := types.Config{Importer: importer.ForCompiler(fset, "gc", open)}
	pkg, err := conf.Check(dir, fset, files, info)
	if err != nil {
		return nil, err
	}
	type arrow struct{ from, to string }
	uses := map[arrow]map[string]bool{}
	at := func(p token.Pos) string { return filepath.Base(fset.Position(p).Filename) }
	for id, o := range info.Uses {
		if v, ok := o.(*types.Var); o.Pkg() != pkg || ok && !v.IsField() && v.Parent() != pkg.Scope() {
			continue // of another package, or local
		}
		if a := (arrow{at(id.Pos()), at(o.Pos())}); rank[a.from] < rank[a.to] {
			if uses[a] == nil {
				uses[a] = map[string]bool{}
			}
			uses[a][o.Name()] = true
		}
	}
	for a, names := range uses {
		flaws = append(flaws, fmt.Sprintf("%s uses %s of %s: move what both need in front of %s, or let %s hand it in",
			a.from, strings.Join(slices.Sorted(maps.Keys(names)), ", "), a.to, a.from, a.to))
	}
	slices.Sort(flaws)
	return flaws, nil
}

// exportFiles are the compiled types of what the package in dir imports, by import path.
func exportFiles(dir string) (map[string]string, error) {
	cmd := exec.Command("go", "list", "-export", "-deps", "-json=ImportPath,Export", ".")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOFLAGS=")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list in %s: %w: %s", dir, err, &stderr)
	}
	exports := map[string]string{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct{ ImportPath, Export string }
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return exports, nil
		} else if err != nil {
			return nil, err
		}
		exports[p.ImportPath] = p.Export
	}
}
