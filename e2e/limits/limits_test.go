package main

import (
	"go/ast"
	"go/constant"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

const root = "../.."

func TestThePageIsUpToDate(t *testing.T) {
	want, err := render(root)
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(root, page))
	if err != nil || string(got) != string(want) {
		t.Errorf("%s is old (%v): run go run ./e2e/limits at the root", page, err)
	}
}

// looksLikeABound goes by how this tree names its bounds.
var looksLikeABound = regexp.MustCompile(`^(max|Max|default|Default|keep|idle)[A-Z]|(Limit|Max|Time|Bytes|Margin|Window)$|^[A-Z]\w*\.`)

func TestEveryBoundHasALine(t *testing.T) {
	l := newLoader(root)
	listed := map[string]bool{}
	var dirs []string
	for _, e := range bounds {
		if listed[e.pkg+"."+e.name] {
			t.Errorf("%s.%s has two lines", e.pkg, e.name)
		}
		listed[e.pkg+"."+e.name] = true
		if n := len(dirs); n == 0 || dirs[n-1] != e.pkg {
			if slices.Contains(dirs, e.pkg) {
				t.Errorf("the lines of %s do not stand together", e.pkg)
			}
			dirs = append(dirs, e.pkg)
		}
		p, err := l.load(e.pkg)
		if err != nil {
			t.Fatal(err)
		}
		if p.values[e.name] != nil && !ast.IsExported(e.name) && p.uses[e.name] < 2 {
			t.Errorf("%s.%s is declared and never used: it bounds nothing", e.pkg, e.name)
		}
	}
	for _, dir := range append(dirs, "dataplane/listen", "tproxy/netns") {
		p, err := l.load(dir)
		if err != nil {
			t.Fatal(err)
		}
		for name := range p.values {
			key := dir + "." + name
			if looksLikeABound.MatchString(name) && !p.own[name] && !listed[key] && notBounds[key] == "" {
				t.Errorf("%s looks like a bound: give it a line in e2e/limits/table.go that says what happens when it is met (or one in notBounds that says why it is none), then go run ./e2e/limits", key)
			}
		}
	}
	for key := range notBounds {
		i := strings.LastIndexByte(key, '.')
		if p, err := l.load(key[:i]); err != nil || p.values[key[i+1:]] == nil {
			t.Errorf("notBounds: %s does not exist (%v): take it out", key, err)
		}
	}
}

// The values that the loader reads are those of the language, whatever way they
// are written.
func TestValues(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"a/a.go": `package a
import ("aether/b"; "time"; "cmp"; "golang.org/x/sys/unix")
type mode int
const (
	maxA = 1 << 4
	maxB = b.Other*2 + maxA
	wait = 90 * time.Second
	wait64 = int64(wait) / 2
	unknown = unix.Something
	text = "x"
	first mode = iota
)
type Config struct { Size, Same int; Wait time.Duration }
func (c *Config) fill(o Config, i int) {
	c.Size = cmp.Or(c.Size, maxB+1)
	o.Wait = cmp.Or(o.Wait, 3*time.Minute)
	c.Same = cmp.Or(c.Same, maxA)
	i = cmp.Or(i, 7)
}`,
		"a/a_test.go": "package a\nconst maxTest = 1\n",
		"b/b.go":      "package b\nconst Other = 3\n",
	} {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p, err := newLoader(dir).load("a")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"maxA": "16", "maxB": "22", "wait": "90000000000", "wait64": "45000000000", "first": "6",
		"Config.Size": "23", "Config.Wait": "180000000000"}
	for name, v := range p.values {
		if want[name] != v.ExactString() {
			t.Errorf("%s is %s, want %q", name, v.ExactString(), want[name])
		}
		delete(want, name)
	}
	for name := range want {
		t.Errorf("%s was not found", name)
	}
	if !p.own["first"] || p.own["wait"] || p.own["maxA"] {
		t.Errorf("constants of the package's own types: %v", p.own)
	}
	if _, err := newLoader(dir).load("c"); err == nil || !strings.Contains(err.Error(), "root of the repository") {
		t.Errorf("a package that is not there: %v", err)
	}
}

func TestText(t *testing.T) {
	for _, tt := range []struct {
		n    int64
		unit string
		want string
	}{
		{512 << 10, "bytes a pod", "512 KiB a pod"},
		{16 << 20, "bytes", "16 MiB"},
		{1000, "bytes", "1000 bytes"},
		{64, "connections", "64 connections"},
		{int64(2 * time.Minute), "time", "2m time"},
		{int64(3 * time.Hour), "time", "3h time"},
		{int64(90 * time.Second), "time", "1m30s time"},
		{int64(250 * time.Millisecond), "time, all included", "250ms time, all included"},
	} {
		value, unit, err := bound{unit: tt.unit}.text(constant.MakeInt64(tt.n))
		if got := value + " " + unit; got != tt.want || err != nil {
			t.Errorf("%d %s: %q, %v, want %q", tt.n, tt.unit, got, err, tt.want)
		}
	}
	if _, _, err := (bound{}).text(constant.MakeFloat64(1.5)); err == nil {
		t.Error("1.5 is an integer")
	}
}

// ofMany goes by how units say that what is bounded is not one connection's, request's or pod's.
var ofMany = regexp.MustCompile(`\b(loop|node|of the process|all pods|at once|iteration|in flight|that wait|under way)\b`)

// notShared are bounds whose units read so, and that no pod can take from another.
var notShared = map[string]string{
	"dataplane/engine keepBufs": "a free list", "dataplane/engine keepBig": "a free list", "dataplane/engine keepLocalStreams": "a free list", "dataplane/engine keepStreams": "a free list",
	"dataplane/exchange keepChunks": "a free list", "dataplane/exchange poolMax": "a free list", "dataplane/detect keepFree": "a free list",
	"dataplane/engine podSocks": "of one pod, and of a loop", "dataplane/engine agedAtOnce": "how fast limits of time shrink",
	"dataplane/balance MaxOpen": "of one pod", "dataplane/balance MaxTunnels": "of one pod", "dataplane/balance MaxRetrying": "of one pod",
}

// TestWhatPodsShare: each bound of what there is one of for all pods is in the table of shares, or is none; and
// each test that the table names exists.
func TestWhatPodsShare(t *testing.T) {
	listed := map[string]bool{}
	for _, e := range bounds {
		listed[e.pkg+" "+e.name] = true
	}
	in := map[string]bool{}
	for _, s := range sharedOf {
		for _, b := range s.bounds {
			in[b] = true
			if !listed[b] {
				t.Errorf("%s: there is no bound %s", s.what, b)
			}
		}
		if s.test == "" {
			continue
		}
		dir, name, _ := strings.Cut(s.test, " ")
		files, err := filepath.Glob(filepath.Join(root, dir, "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Errorf("%s: no tests in %s (%v)", s.what, dir, err)
		}
		found := false
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			found = found || strings.Contains(string(text), "\nfunc "+name+"(t *testing.T)")
		}
		if !found {
			t.Errorf("%s: there is no test %s", s.what, s.test)
		}
	}
	for _, e := range bounds {
		key := e.pkg + " " + e.name
		if !strings.HasPrefix(e.pkg, "dataplane") && e.pkg != "meshhop" || strings.HasPrefix(e.unit, "time") || strings.HasPrefix(e.unit, "%") {
			continue
		}
		if ofMany.MatchString(e.unit) && !in[key] && notShared[key] == "" {
			t.Errorf("%s (%s) is of all pods: say in e2e/limits/shared.go what a pod's part is, or in notShared why that is no question", key, e.unit)
		}
	}
	for key := range notShared {
		if !listed[key] {
			t.Errorf("notShared: there is no bound %s", key)
		}
	}
}
