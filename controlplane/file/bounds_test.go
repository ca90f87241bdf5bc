package file

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"aether/controlplane/gamma"
)

// TestConditionsAreBounded: a match has as many headers or parameters as may be, and one more is refused by number;
// so is one more name in a list of a CORS filter.
func TestConditionsAreBounded(t *testing.T) {
	const head = "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\nspec:\n  parentRefs: [{kind: Service, group: \"\", name: cart}]\n  rules:\n"
	list := func(n int, one string) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(strings.ReplaceAll(one, "#", string(rune('a'+i/26))+string(rune('a'+i%26))))
		}
		return b.String()
	}
	for name, tt := range map[string]struct {
		rules, one string
		most       int
	}{
		"headers":     {"  - matches:\n    - headers:\n", "      - {name: x-#, value: v}\n", 64},
		"queryParams": {"  - matches:\n    - queryParams:\n", "      - {name: q#, value: v}\n", 64},
		"CORS":        {"  - filters:\n    - type: CORS\n      cors:\n        allowMethods: [GET]\n        allowOrigins:\n", "        - \"https://#.example\"\n", 64},
	} {
		for n, fine := range map[int]bool{tt.most: true, tt.most + 1: false} {
			p := parse("x.yaml", []byte(head+tt.rules+list(n, tt.one)), Options{}.withDefaults(), nil)
			l := newLoader("", Options{})
			l.files["x.yaml"] = p
			_, problems := l.build()
			said := false
			for _, pr := range problems {
				said = said || strings.Contains(pr.Reason, "the limit is 64:")
			}
			if said == fine {
				t.Errorf("%d %s: %v", n, name, problems)
			}
		}
	}
}

// TestFilesAreBounded: a directory of too many files, or of too many bytes, loses what is beyond, by name, and what it
// has stays: new files push out none that are known; a file that does not fit any more keeps what it last said.
func TestFilesAreBounded(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "next.yaml")
	check(t, os.WriteFile(path, []byte(svc("next")), 0o600))
	size := int64(len(svc("next")))
	old := &parsed{}
	for _, tt := range []struct {
		files int
		total int64
		known bool
		want  string // of the problem
	}{
		{19_999, 0, false, ""},
		{20_000, 0, false, "more than 20000 files"},
		{39_999, 0, true, ""},
		{40_000, 0, true, "more than 20000 files"},
		{0, 256<<20 - size, true, ""},
		{0, 256<<20 - size + 1, true, "more than 256 MiB"},
	} {
		s := scan{files: map[string]*parsed{}, old: map[string]*parsed{}, total: tt.total}
		if tt.known {
			s.old["next.yaml"] = old
		}
		for i := range tt.files {
			s.files[fmt.Sprintf("%d.yaml", i)] = old
		}
		s.file("next.yaml", path)
		switch p := s.files["next.yaml"]; {
		case tt.want == "" && (len(s.problems) != 0 || p == nil || p == old):
			t.Errorf("%+v: %v", tt, s.problems)
		case tt.want != "" && (len(s.problems) != 1 || s.problems[0].File != "next.yaml" || !strings.Contains(s.problems[0].Reason, tt.want) || len(s.files) > max(tt.files, 1) || p != nil && p != old):
			t.Errorf("%+v: %d files, %v", tt, len(s.files), s.problems)
		}
	}
}

// TestAliasesAreBounded: what aliases expand to is counted, and a document with more of it is not in force.
func TestAliasesAreBounded(t *testing.T) {
	for n, fine := range map[int]bool{100: true, 101: false} {
		list := "[" + strings.TrimSuffix(strings.Repeat("x, ", 999), ", ") + "]" // with itself a thousand values
		text := "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\n  managedFields:\n  - fieldsV1:\n      a: &a " + list + "\n      b: [" + strings.TrimSuffix(strings.Repeat("*a, ", n), ", ") + "]\n"
		_, problems := load(t, Options{}, text)
		said := strings.Contains(strings.Join(problems, "\n"), "aliases expand to more than 100000 values")
		if said == fine {
			t.Errorf("%d aliases of a thousand values: %q", n, problems)
		}
	}
}

// TestDepthIsBounded: what lies too deep is named and not read.
func TestDepthIsBounded(t *testing.T) {
	w := &world{t: t, dir: t.TempDir()}
	deep := func(n int) string { return strings.Repeat("d/", n) }
	w.write(deep(16)+"a.yaml", svc("a"))
	w.write(deep(17)+"b.yaml", svc("b"))
	m, problems := Load(w.dir, testOptions)
	if services(m) != "a" || len(problems) != 1 || problems[0].Where != strings.TrimSuffix(deep(17), "/") || !strings.Contains(problems[0].Reason, "deeper than 16") {
		t.Errorf("services %q, problems %v", services(m), problems)
	}
}

// TestSearchForErrorsIsBounded: the line of an error is looked for by parsing ever less of a document, within bounds
// for a file: beyond them it is where the YAML package says that it began.
func TestSearchForErrorsIsBounded(t *testing.T) {
	// Without its second line all is well with each of them.
	short, long := "a: 1\nb: [\n"+strings.Repeat("x,\n", 10), "a: 1\nb: [\n"+strings.Repeat("x,\n", 1000)
	const before = 4<<20 - 100<<10 // spent on what precedes them
	r := reader{Reader: gamma.Reader{File: "x.yaml"}, o: Options{}.withDefaults(), retried: before}
	for _, doc := range split([]byte(short + "---\n" + long)) {
		r.document(doc)
	}
	if len(r.Problems) != 2 || r.Problems[0].Line != 2 {
		t.Errorf("problems: %+v", r.Problems)
	}
	if r.retried <= before || r.retried > 4<<20 {
		t.Errorf("%d bytes were parsed again", r.retried-before)
	}
}

// TestListsAreBounded: a TLSRoute of too many hostnames, and a ReferenceGrant of too many entries, are told by number; as
// many as may be are fine.
func TestListsAreBounded(t *testing.T) {
	items := func(n int, format string) string {
		s := make([]string, n)
		for i := range s {
			s[i] = strings.ReplaceAll(format, "#", fmt.Sprint(i))
		}
		return "[" + strings.Join(s, ", ") + "]"
	}
	const head = "apiVersion: gateway.networking.k8s.io/v1\nkind: %s\nmetadata: {name: x, namespace: shop}\nspec:\n"
	for name, tt := range map[string]struct {
		most int
		text func(n int) string
	}{
		"hostnames": {1024, func(n int) string {
			return fmt.Sprintf(head, "TLSRoute") + "  parentRefs: [{kind: Service, group: \"\", name: cart}]\n  rules: [{backendRefs: [{name: cart, port: 443}]}]\n  hostnames: " + items(n, "h#.example")
		}},
		"spec.from": {64, func(n int) string {
			return fmt.Sprintf(head, "ReferenceGrant") + "  to: [{group: \"\", kind: Service}]\n  from: " + items(n, "{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: n#}")
		}},
		"spec.to": {64, func(n int) string {
			return fmt.Sprintf(head, "ReferenceGrant") + "  from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: n}]\n  to: " + items(n, "{group: \"\", kind: Service, name: s#}")
		}},
	} {
		if _, problems := load(t, Options{}, tt.text(tt.most)); len(problems) != 0 {
			t.Errorf("%d of %s: %q", tt.most, name, problems)
		}
		want := fmt.Sprintf("the limit is %d: write several", tt.most)
		if _, problems := load(t, Options{}, tt.text(tt.most+1)); len(problems) == 0 || !strings.Contains(problems[0], name) || !strings.Contains(problems[0], want) {
			t.Errorf("%d of %s: %q, want %s", tt.most+1, name, problems, want)
		}
	}
}

// TestNestingIsBounded: a value within values without end is not followed.
func TestNestingIsBounded(t *testing.T) {
	for n, want := range map[int]bool{58: false, 65: true, 5000: true} {
		_, problems := load(t, Options{}, "apiVersion: v1\nkind: Service\nspec: {}\nmetadata: {name: x, namespace: shop, creationTimestamp: "+
			strings.Repeat("[", n)+strings.Repeat("]", n)+"}\n")
		said := slices.ContainsFunc(problems, func(p string) bool { return strings.Contains(p, "nested deeper than 64 levels") })
		if said != want {
			t.Errorf("%d levels: %.300q", n, problems)
		}
	}
}
