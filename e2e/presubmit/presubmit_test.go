// Package presubmit checks what no compiler does: that arrows between packages only
// point down, that heavy imports stay where they belong, that pure packages are
// pure, that every package says what it is, that tests neither sleep nor skip, and that
// whatever code and documents cite is there.
//
//   - The tables are in layers_test.go; a line of a table has its reason beside it.
//   - A new package fails until it has a line there: choosing its row is part of making it.
//   - Citations are resolved in citations_test.go: a section of docs/contract.md, a row of
//     docs/cases.md, a page of docs/decisions, a heading of another document.
//   - Imports of tests are free: a test may hold its package against anything.
//
// It reads source, and runs nothing but go list.
package presubmit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	module = "aether"
	root   = "../.."
)

// listed is what go list says of a package.
type listed struct {
	ImportPath string
	Imports    []string
}

// name is the package's path below the module.
func (p *listed) name() string { return below(p.ImportPath) }

// below is a path of this module without the module's own.
func below(importPath string) string {
	return strings.TrimPrefix(strings.TrimPrefix(importPath, module), "/")
}

func ours(importPath string) bool {
	return importPath == module || strings.HasPrefix(importPath, module+"/")
}

// in reports whether pkg is dir or below it.
func in(pkg, dir string) bool { return pkg == dir || strings.HasPrefix(pkg, dir+"/") }

func inAny(pkg string, dirs ...string) bool {
	return slices.ContainsFunc(dirs, func(d string) bool { return in(pkg, d) })
}

func placeOf(pkg string) (place, bool) {
	for _, p := range places {
		if p.pkg == pkg {
			return p, true
		}
	}
	return place{}, false
}

// TestImports checks rows and imports of every package.
func TestImports(t *testing.T) {
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Imports", "./...")
	cmd.Dir = root
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, errs.Bytes())
	}
	n := 0
	for d := json.NewDecoder(bytes.NewReader(out)); ; n++ {
		var p listed
		if err := d.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		for _, e := range checkImports(p) {
			t.Error(e)
		}
	}
	if n < 3 {
		t.Errorf("go list found %d packages", n)
	}
}

// checkImports gives what is wrong with a package's place and imports.
func checkImports(p listed) (wrong []string) {
	say := func(format string, args ...any) {
		wrong = append(wrong, p.ImportPath+": "+fmt.Sprintf(format, args...))
	}
	from, ok := placeOf(p.name())
	if !ok {
		say("has no row: choose the lowest that is above all it imports, and add a line with the reason to places in e2e/presubmit/layers_test.go")
		return wrong
	}
	for _, path := range p.Imports {
		if !ours(path) {
			checkForeign(from, path, say)
			continue
		}
		to, ok := placeOf(below(path))
		switch {
		case !ok: // its own line says so
		case from.row == beside:
		case to.row == beside && from.row != topRow:
			say("imports %s, which stands beside the rows (%s): only commands and tests may", path, to.why)
		case to.row == beside, to.row < from.row:
		case to.row == from.row && slices.ContainsFunc(sideways, func(s [3]string) bool { return s[0] == from.pkg && s[1] == to.pkg }):
		default:
			say("is in row %d and imports %s of row %d; imports point down. Move what it needs to a lower row, "+
				"or turn the call round with an interface", from.row, path, to.row)
		}
		if a := apartOf(from.pkg); a != "" && from.row != beside && !inAny(below(path), apart...) {
			say("imports %s; %s can be lifted out of this module and imports nothing of the rest", path, a)
		}
	}
	return wrong
}

func apartOf(pkg string) string {
	for _, a := range apart {
		if in(pkg, a) {
			return a
		}
	}
	return ""
}

// checkForeign checks an import from outside the module.
func checkForeign(from place, path string, say func(string, ...any)) {
	std := !strings.Contains(strings.Split(path, "/")[0], ".")
	if from.row == 0 && !std {
		say("is in row 0 and imports %s; row 0 has the standard library only", path)
	}
	if from.row >= 0 && from.row <= pureRow {
		if why := impure[path]; why != "" {
			say("is in row %d and imports %s: %s", from.row, path, why)
		}
	}
	if inAny(from.pkg, "bench", "e2e") || strings.HasSuffix(from.pkg, "test") && from.row == beside {
		return
	}
	for _, o := range only {
		if in(path, o.path) {
			if !inAny(from.pkg, o.in...) {
				say("imports %s, which may stand only in %s: %s", path, orNone(o.in), o.why)
			}
			return
		}
	}
}

func orNone(l []string) string {
	if len(l) == 0 {
		return "tests"
	}
	return strings.Join(l, ", ")
}

// impure are the imports that rows 0 to 3 do without.
var impure = map[string]string{
	"net":                   "no sockets there; addresses are in net/netip",
	"net/http":              "no sockets there",
	"log":                   "no logger there; return an error or a value",
	"os":                    "no files there; take bytes, an io.Reader or an fs.FS",
	"os/exec":               "no processes there",
	"syscall":               "no system calls there",
	"golang.org/x/sys/unix": "no system calls there",
}

// banned are the calls that rows 0 to 3 do without, by package and name; * is every name.
var banned = map[string]struct {
	names []string
	why   string
}{
	"time":     {[]string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick"}, "no clock there; take the time as an argument"},
	"log/slog": {[]string{"Default", "New", "With", "Log", "LogAttrs", "Debug", "Info", "Warn", "Error", "DebugContext", "InfoContext", "WarnContext", "ErrorContext"}, "no logger there; values may have a LogValue"},
	"fmt":      {[]string{"Print", "Printf", "Println", "Scan", "Scanf", "Scanln"}, "no terminal there"},
}

// testers are what tests call their testing.TB.
var testers = []string{".t", ".b", ".f", ".tb"}

// source is a parsed Go file.
type source struct {
	name string // below the root
	pkg  string // the package's path below the module
	test bool
	fset *token.FileSet
	file *ast.File
}

func (s *source) at(n ast.Node) string {
	return fmt.Sprintf("%s:%d", s.name, s.fset.Position(n.Pos()).Line)
}

// selector gives the import path and name of a pkg.Name expression; of
// variable.Name, a dot and the variable for a path.
func (s *source) selector(n ast.Node) (importPath, name string) {
	sel, ok := n.(*ast.SelectorExpr)
	if !ok {
		return "", ""
	}
	x, ok := sel.X.(*ast.Ident)
	if !ok {
		return "", ""
	}
	importPath = "." + x.Name
	for _, i := range s.file.Imports {
		p, _ := strconv.Unquote(i.Path.Value)
		local := path.Base(p)
		if i.Name != nil {
			local = i.Name.Name
		}
		if local == x.Name {
			return p, sel.Sel.Name
		}
	}
	return importPath, sel.Sel.Name
}

func parse(t testing.TB, name string, src any) *source {
	t.Helper()
	s := &source{name: filepath.ToSlash(name), fset: token.NewFileSet(), test: strings.HasSuffix(name, "_test.go")}
	s.pkg = strings.TrimPrefix(path.Dir(s.name), ".")
	var err error
	if s.file, err = parser.ParseFile(s.fset, filepath.Join(root, name), src, parser.ParseComments|parser.SkipObjectResolution); err != nil {
		t.Fatal(err)
	}
	return s
}

// sources parses every Go file of the tree, whatever its build tags.
func sources(t testing.TB) (all []*source) {
	t.Helper()
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // a test of another package took its temporary file away
			}
			return err
		}
		name, _ := filepath.Rel(root, file)
		if d.IsDir() && name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || name == "bin") {
			return fs.SkipDir
		}
		if !d.IsDir() && strings.HasSuffix(name, ".go") {
			all = append(all, parse(t, name, nil))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 10 {
		t.Fatalf("%d Go files found below %s", len(all), root)
	}
	return all
}

// TestSource checks what stands in the files.
func TestSource(t *testing.T) {
	all := sources(t)
	for _, s := range all {
		for _, e := range checkSource(s) {
			t.Error(e)
		}
	}
	for _, e := range checkDocs(all) {
		t.Error(e)
	}
}

// checkSource gives what a file does that it may not.
func checkSource(s *source) (wrong []string) {
	say := func(n ast.Node, format string, args ...any) {
		wrong = append(wrong, s.at(n)+": "+fmt.Sprintf(format, args...))
	}
	p, ok := placeOf(s.pkg)
	pure := ok && p.row >= 0 && p.row <= pureRow && !s.test
	free := s.test || inAny(s.pkg, "tproxy", "cni", "bench", "e2e")

	var bubbles []ast.Node // calls of synctest.Test: time is virtual in them
	ast.Inspect(s.file, func(n ast.Node) bool {
		if c, ok := n.(*ast.CallExpr); ok {
			if pkg, name := s.selector(c.Fun); pkg == "testing/synctest" && name == "Test" {
				bubbles = append(bubbles, c)
			}
		}
		return true
	})
	inBubble := func(n ast.Node) bool {
		return slices.ContainsFunc(bubbles, func(b ast.Node) bool { return b.Pos() <= n.Pos() && n.End() <= b.End() })
	}
	ast.Inspect(s.file, func(n ast.Node) bool {
		if g, ok := n.(*ast.GoStmt); ok && pure {
			say(g, "starts a goroutine; row %d is pure (%s)", p.row, p.why)
		}
		if c, ok := n.(*ast.CallExpr); ok && !free && s.logs(c) {
			say(n, "a log's handler that does not write to a plain.Writer: what peers send would reach a terminal as it is")
		}
		pkg, name := s.selector(n)
		switch {
		case name == "":
		case s.test && pkg == "time" && name == "Sleep" && !inBubble(n):
			say(n, "time.Sleep: wait for what the test waits for (a channel, a sequence number), or use testing/synctest")
		case s.test && slices.Contains(testers, pkg) && (name == "Skip" || name == "Skipf" || name == "SkipNow"):
			say(n, "%s: a test that cannot run must fail; one that does not apply should not be built", name)
		case pkg == "golang.org/x/sys/unix" && (name == "Setns" || name == "Unshare") && !free:
			say(n, "unix.%s: namespaces are changed only in tproxy and cni", name)
		case pure && slices.Contains(banned[pkg].names, name):
			say(n, "%s.%s in row %d: %s", path.Base(pkg), name, p.row, banned[pkg].why)
		}
		return true
	})
	return wrong
}

// logs reports whether c makes a handler of log/slog that writes elsewhere than to a plain.Writer.
func (s *source) logs(c *ast.CallExpr) bool {
	pkg, name := s.selector(c.Fun)
	if pkg != "log/slog" || name != "NewTextHandler" && name != "NewJSONHandler" || len(c.Args) == 0 {
		return false
	}
	to, ok := c.Args[0].(*ast.CallExpr)
	if !ok {
		return true
	}
	pkg, name = s.selector(to.Fun)
	return pkg != module+"/dataplane/plain" || name != "NewWriter"
}

// checkDocs gives the packages without a package comment, or with several.
func checkDocs(all []*source) (wrong []string) {
	docs := map[string][]string{} // package: files with a comment
	command := map[string]bool{}
	for _, s := range all {
		key := s.pkg
		if _, ok := docs[key]; !ok {
			docs[key] = nil
		}
		command[key] = command[key] || s.file.Name.Name == "main"
		if s.file.Doc == nil {
			continue
		}
		text := s.file.Doc.Text()
		want := "Package " + s.file.Name.Name + " "
		if s.file.Name.Name == "main" {
			want = "Command " + path.Base(s.pkg) + " "
		}
		if !strings.HasPrefix(text, want) {
			if directive(s.file.Doc) {
				continue
			}
			wrong = append(wrong, fmt.Sprintf("%s: the package comment begins %.40q, not %q", s.name, text, want))
		}
		docs[key] = append(docs[key], s.name)
	}
	for pkg, files := range docs {
		switch len(files) {
		case 0:
			wrong = append(wrong, fmt.Sprintf("%s has no package comment: say in one what it is for, what always holds, and what it does not know", pkg))
		case 1:
		default:
			wrong = append(wrong, fmt.Sprintf("%s has several package comments, in %s: keep one", pkg, strings.Join(files, ", ")))
		}
	}
	slices.Sort(wrong)
	return wrong
}

// directive reports whether a comment is for tools only.
func directive(g *ast.CommentGroup) bool { return g.Text() == "" }

// TestTopLevel checks that the root holds what it may and no more.
func TestTopLevel(t *testing.T) {
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if n := e.Name(); !strings.HasPrefix(n, ".") && !slices.Contains(topLevel, n) {
			t.Errorf("%s stands at the root; only these may: %s", n, strings.Join(topLevel, " "))
		}
	}
}

// TestTables checks the tables themselves.
func TestTables(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range places {
		if seen[p.pkg] || p.why == "" || p.row < beside || p.row > topRow {
			t.Errorf("%+v: twice, without a reason, or in no row", p)
		}
		seen[p.pkg] = true
		if (p.row == topRow) != in(p.pkg, "cmd") {
			t.Errorf("%s: commands and only commands are in row %d", p.pkg, topRow)
		}
	}
	for _, s := range sideways {
		a, aok := placeOf(s[0])
		b, bok := placeOf(s[1])
		if !aok || !bok || a.row != b.row || s[2] == "" {
			t.Errorf("%q: not two packages of one row and a reason", s)
		}
	}
	for _, o := range only {
		if o.why == "" {
			t.Errorf("%s: no reason", o.path)
		}
	}
}

// TestChecks sees to it that each rule catches what it is for.
func TestChecks(t *testing.T) {
	for _, tt := range []struct{ pkg, imports, want string }{
		{"sniff", "iter", ""},
		{"sniff", "golang.org/x/net/idna", "standard library only"},
		{"sniff", "net", "no sockets there"},
		{"dataplane/decide", "aether/dataplane/snapshot", ""},
		{"dataplane/decide", "aether/dataplane/engine", "imports point down"},
		{"dataplane/decide", "aether/dataplane/balance", "imports point down"},
		{"dataplane/http2", "aether/dataplane/hpack", ""},
		{"dataplane/hpack", "aether/dataplane/http2", "imports point down"},
		{"meshhop", "aether/mtls/record", ""},
		{"meshhop", "aether/dataplane/httpmsg", "can be lifted out"},
		{"dataplane/engine", "aether/sniff/replay", "beside the rows"},
		{"cmd/aetherctl", "aether/sniff/replay", ""},
		{"bench", "aether/cmd/aetherctl", ""},
		{"dataplane/outbound", "github.com/prometheus/client_golang/prometheus", "typed interface"},
		{"dataplane/telemetry", "github.com/prometheus/client_golang/prometheus", ""},
		{"dataplane/outbound", "net/http", "own codecs"},
		{"controlplane/file", "k8s.io/api/core/v1", ""},
		{"controlplane/file", "k8s.io/client-go/kubernetes", "should end at the sources"},
		{"dataplane/model/modeltest", "testing", ""},
		{"e2e/rig", "github.com/vishvananda/netlink", ""},
		{"dataplane/http2", "golang.org/x/net/http2", "oracle"},
		{"dataplane/http2", "golang.org/x/net/http2/hpack", ""},
		{"dataplane/nowhere", "fmt", "has no row"},
	} {
		got := strings.Join(checkImports(listed{ImportPath: module + "/" + tt.pkg, Imports: []string{tt.imports}}), "\n")
		if (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%s imports %s: %q, want %q", tt.pkg, tt.imports, got, tt.want)
		}
	}
	for _, tt := range []struct{ file, src, want string }{
		{"sniff/a.go", `import "time"; var d = time.Second`, ""},
		{"sniff/a.go", `import "time"; var d = time.Now()`, "no clock there"},
		{"sniff/a.go", `import clock "time"; func f() { clock.Sleep(1) }`, "no clock there"},
		{"sniff/a.go", `func f() { go f() }`, "starts a goroutine"},
		{"sniff/a_test.go", `func f() { go f() }`, ""},
		{"sniff/a_test.go", `import "time"; func f() { time.Sleep(1) }`, "a:1: time.Sleep"},
		{"sniff/a_test.go", `import ("time"; "testing/synctest"); func f() { synctest.Test(nil, func() { time.Sleep(1) }) }`, ""},
		{"sniff/a_test.go", `func f(t T) { t.Skip("x") }`, "must fail"},
		{"dataplane/decide/a.go", `import "log/slog"; func f() slog.Value { return slog.StringValue("x") }`, ""},
		{"dataplane/decide/a.go", `import "log/slog"; func f() { slog.Info("x") }`, "no logger there"},
		{"dataplane/engine/a.go", `import "time"; func f() { go time.Now() }`, ""},
		{"dataplane/engine/a.go", `import "golang.org/x/sys/unix"; func f() { unix.Setns(1, 2) }`, "only in tproxy"},
		{"cmd/x/a.go", `import ("log/slog"; "os"; "aether/dataplane/plain"); var h = slog.NewJSONHandler(plain.NewWriter(os.Stderr), nil)`, ""},
		{"cmd/x/a.go", `import ("log/slog"; "os"); var h = slog.NewJSONHandler(os.Stderr, nil)`, "plain.Writer"},
		{"cmd/x/a.go", `import ("log/slog"; "os"; "bufio"); var h = slog.NewTextHandler(bufio.NewWriter(os.Stderr), nil)`, "plain.Writer"},
		{"tproxy/netns/a.go", `import "golang.org/x/sys/unix"; func f() { unix.Setns(1, 2) }`, ""},
	} {
		s := parse(t, tt.file, "package a;"+tt.src)
		got := strings.ReplaceAll(strings.Join(checkSource(s), "\n"), tt.file, "a")
		if (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %s\n got %q\nwant %q", tt.file, tt.src, got, tt.want)
		}
	}
	for _, tt := range []struct{ a, b, want string }{
		{"// Package a is.\npackage a", "package a", ""},
		{"package a", "package a", "no package comment"},
		{"// Package a is.\npackage a", "// Package a too.\npackage a", "several"},
		{"// A thing.\npackage a", "package a", "not \"Package a \""},
		{"// Command x does.\npackage main", "package main", ""},
	} {
		got := strings.Join(checkDocs([]*source{parse(t, "cmd/x/a.go", tt.a), parse(t, "cmd/x/b.go", tt.b)}), "\n")
		if (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%q, %q: %q, want %q", tt.a, tt.b, got, tt.want)
		}
	}
}
