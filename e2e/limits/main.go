// Command limits writes docs/limits.md: every bound that is a constant of the
// source, and what happens when it is met.
//
//   - What happens is said in bounds (table.go); the value is read from the
//     source, so the page cannot say another one than the program has.
//   - Its test fails when the page is old, when a constant that looks like a bound
//     has no line, and when a bound that has one is used nowhere.
//
// Run it at the root: go run ./e2e/limits. It type-checks no more than constants need.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"
)

const (
	module = "aether"
	page   = "docs/limits.md"
)

func main() {
	text, err := render(".")
	if err == nil {
		err = os.WriteFile(page, text, 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "limits:", err)
		os.Exit(1)
	}
}

const preamble = `# Limits

Every bound that is a constant of the source, and what happens when it is met. Nothing here is a promise to keep the
number; that there is one is. Sizes are in powers of two. A *loop* is one event loop, of which there is one a busy core;
an *iteration* is one round of it; a *key* of hop sessions is (source pod, its identity, endpoint, port, protocol).

This page is made by ` + "`go run ./e2e/limits`" + `, which reads the values from the source: do not edit it.
`

// render makes the page for the tree at root.
func render(root string) ([]byte, error) {
	l := newLoader(root)
	var b bytes.Buffer
	b.WriteString(preamble)
	b.WriteString(renderShared())
	last := ""
	for _, e := range bounds {
		if e.pkg != last {
			last = e.pkg
			fmt.Fprintf(&b, "\n## `%s`\n\n| name | value | unit | when it is met |\n|---|---|---|---|\n", e.pkg)
		}
		p, err := l.load(e.pkg)
		if err != nil {
			return nil, err
		}
		v, ok := p.values[e.name]
		if !ok {
			return nil, fmt.Errorf("%s has no constant and no default %s: take its line out of e2e/limits/table.go, or write the new name there", e.pkg, e.name)
		}
		value, unit, err := e.text(v)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", e.name, value, unit, e.effect)
	}
	return b.Bytes(), nil
}

// text is the value as the page shows it, and its unit.
func (e bound) text(v constant.Value) (value, unit string, err error) {
	n, ok := constant.Int64Val(constant.ToInt(v))
	if !ok {
		return "", "", fmt.Errorf("%s.%s is %s, which is no integer", e.pkg, e.name, v)
	}
	word, rest, _ := strings.Cut(e.unit, " ")
	switch strings.TrimSuffix(word, ",") {
	case "time":
		s := time.Duration(n).String()
		if short, ok := strings.CutSuffix(s, "m0s"); ok {
			s = short + "m"
		}
		if short, ok := strings.CutSuffix(s, "h0m"); ok {
			s = short + "h"
		}
		return s, e.unit, nil
	case "bytes":
		for _, u := range []struct {
			size int64
			name string
		}{{1 << 20, "MiB"}, {1 << 10, "KiB"}} {
			if n%u.size == 0 {
				return fmt.Sprint(n / u.size), strings.TrimSpace(u.name + " " + rest), nil
			}
		}
	}
	return fmt.Sprint(n), e.unit, nil
}

// pkg is what a package's source says.
type pkg struct {
	types *types.Package
	// values of integer constants, by name, and of defaults: the second argument
	// of cmp.Or(x.Field, default), by the name Type.Field.
	values map[string]constant.Value
	// own are constants of a type that the package declares: sets of names, no bounds.
	own map[string]bool
	// uses counts how often an identifier stands in the package's source.
	uses map[string]int
}

// loader reads packages of the module, each once. It is the types.Importer of
// their constants.
type loader struct {
	root string
	fset *token.FileSet
	pkgs map[string]*pkg
}

func newLoader(root string) *loader {
	return &loader{root: root, fset: token.NewFileSet(), pkgs: map[string]*pkg{}}
}

// Import gives a package of the module with its constants, time with its
// durations, and any other empty: what is read from it is unknown, and so is what
// depends on it.
func (l *loader) Import(path string) (*types.Package, error) {
	if dir, ok := strings.CutPrefix(path, module+"/"); ok {
		p, err := l.load(dir)
		if err != nil {
			return nil, err
		}
		return p.types, nil
	}
	return foreign(path), nil
}

func foreign(importPath string) *types.Package {
	p := types.NewPackage(importPath, path.Base(importPath))
	if importPath == "time" {
		name := types.NewTypeName(token.NoPos, p, "Duration", nil)
		duration := types.NewNamed(name, types.Typ[types.Int64], nil)
		p.Scope().Insert(name)
		for name, d := range map[string]time.Duration{"Nanosecond": time.Nanosecond, "Microsecond": time.Microsecond,
			"Millisecond": time.Millisecond, "Second": time.Second, "Minute": time.Minute, "Hour": time.Hour} {
			p.Scope().Insert(types.NewConst(token.NoPos, p, name, duration, constant.MakeInt64(int64(d))))
		}
	}
	p.MarkComplete()
	return p
}

// load reads the package in dir, a path below the root.
func (l *loader) load(dir string) (*pkg, error) {
	if p := l.pkgs[dir]; p != nil {
		return p, nil
	}
	entries, err := os.ReadDir(filepath.Join(l.root, dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no package %s below %s: run this at the root of the repository", dir, l.root)
	}
	if err != nil {
		return nil, err
	}
	var files []*ast.File
	for _, e := range entries {
		if name := e.Name(); strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") {
			f, err := parser.ParseFile(l.fset, filepath.Join(l.root, dir, name), nil, parser.SkipObjectResolution)
			if err != nil {
				return nil, err
			}
			files = append(files, f)
		}
	}
	// What needs more than constants does not check: that is expected, and no concern here.
	conf := types.Config{Importer: l, IgnoreFuncBodies: true, Error: func(error) {}}
	tp, _ := conf.Check(module+"/"+dir, l.fset, files, nil)
	p := &pkg{types: tp, values: map[string]constant.Value{}, own: map[string]bool{}, uses: map[string]int{}}
	l.pkgs[dir] = p
	for _, name := range tp.Scope().Names() {
		if c, ok := tp.Scope().Lookup(name).(*types.Const); ok {
			p.add(name, c.Val())
			if n, ok := c.Type().(*types.Named); ok && n.Obj().Pkg() == tp {
				p.own[name] = true
			}
		}
	}
	for _, f := range files {
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok {
				l.defaults(p, fn)
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok {
				p.uses[id.Name]++
			}
			return true
		})
	}
	return p, nil
}

func (p *pkg) add(name string, v constant.Value) {
	if v.Kind() == constant.Int || v.Kind() == constant.Float {
		p.values[name] = v
	}
}

// defaults finds each cmp.Or(x.Field, default) of fn whose x is a parameter or
// the receiver.
func (l *loader) defaults(p *pkg, fn *ast.FuncDecl) {
	typeOf := map[string]string{}
	for _, list := range []*ast.FieldList{fn.Recv, fn.Type.Params} {
		if list == nil {
			continue
		}
		for _, f := range list.List {
			t := f.Type
			if star, ok := t.(*ast.StarExpr); ok {
				t = star.X
			}
			if id, ok := t.(*ast.Ident); ok {
				for _, n := range f.Names {
					typeOf[n.Name] = id.Name
				}
			}
		}
	}
	ast.Inspect(fn, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) != 2 || types.ExprString(call.Fun) != "cmp.Or" {
			return true
		}
		field, ok := call.Args[0].(*ast.SelectorExpr)
		if _, named := call.Args[1].(*ast.Ident); !ok || named { // a named one is a constant already
			return true
		}
		if x, ok := field.X.(*ast.Ident); ok && typeOf[x.Name] != "" {
			info := types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
			if types.CheckExpr(l.fset, p.types, call.Pos(), call.Args[1], &info) == nil {
				if v := info.Types[call.Args[1]].Value; v != nil {
					p.add(typeOf[x.Name]+"."+field.Sel.Name, v)
				}
			}
		}
		return true
	})
}
