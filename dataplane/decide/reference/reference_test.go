package reference

import (
	"strings"
	"testing"

	"aether/dataplane/model"
)

// TestNormal: the path policy of decision 009, by hand.
func TestNormal(t *testing.T) {
	for _, tt := range []struct{ path, want string }{
		{"/", "/"}, {"/a", "/a"}, {"/a/", "/a/"}, {"*", "*"}, {"", ""},
		{"//a", "/a"}, {"/a//b", "/a/b"}, {"/a//", "/a/"}, {"///", "/"},
		{"/./a", "/a"}, {"/a/.", "/a/"}, {"/a/..", "/"}, {"/a/b/..", "/a/"}, {"/a/../b", "/b"}, {"/..", "/"}, {"/../../a", "/a"}, {"/a/./b/../c", "/a/c"},
		{"/.a", "/.a"}, {"/a/...", "/a/..."}, {"/a..", "/a.."},
		{"/%61", "/a"}, {"/%2561", "/a"}, {"/%2e%2e/a", "/a"}, {"/a%2fb", "/a/b"}, {"/a%2F..%2Fb", "/b"}, {"/a%", "/a%"}, {"/a%zz", "/a%zz"}, {"/a%2", "/a%2"},
		{`/a\b`, "/a/b"}, {"/a%5cb", "/a/b"}, {`/a\..\b`, "/b"},
		{"/a;v=1", "/a"}, {"/a;v/b", "/a/b"}, {"/a/..;x/b", "/b"}, {"/;x/a", "/a"}, {"/a%3bx", "/a"}, {"/;", "/"},
		{"/%252561", "/a"}, {"/%25252561", "/a"},
	} {
		if got, settled := normal(tt.path); got != tt.want || !settled {
			t.Errorf("normal(%q) = %q, %v, want %q", tt.path, got, settled, tt.want)
		}
	}
	if got, settled := normal("/%2525252561"); settled {
		t.Errorf("five rounds settled at %q", got)
	}
}

// TestPrefixed: the table of Gateway API's HTTPPathModifier.replacePrefixMatch.
func TestPrefixed(t *testing.T) {
	for _, tt := range []struct{ path, prefix, value, want string }{
		{"/foo/bar", "/foo", "/xyz", "/xyz/bar"},
		{"/foo/bar", "/foo", "/xyz/", "/xyz/bar"},
		{"/foo/bar", "/foo/", "/xyz", "/xyz/bar"},
		{"/foo/bar", "/foo/", "/xyz/", "/xyz/bar"},
		{"/foo", "/foo", "/xyz", "/xyz"},
		{"/foo/", "/foo", "/xyz", "/xyz/"},
		{"/foo/bar", "/foo", "", "/bar"},
		{"/foo/", "/foo", "", "/"},
		{"/foo", "/foo", "", "/"},
		{"/foo/", "/foo", "/", "/"},
		{"/foo", "/foo", "/", "/"},
		// cases 154 to 157
		{"/", "/", "/xyz", "/xyz"},
		{"/foo", "/", "/xyz", "/xyz/foo"},
		{"/api/foo/public/bar", "/api/foo/public/", "/", "/bar"},
		{"/test", "/", "/prefix/", "/prefix/test"},
	} {
		m := model.Match{PathKind: model.PathPrefix, Path: tt.prefix}
		if got := editPath(tt.path+"?q", model.PathEdit{Kind: model.PathPrefixPart, Value: tt.value}, m); got != tt.want+"?q" {
			t.Errorf("%s, prefix %s by %q: %s, want %s", tt.path, tt.prefix, tt.value, got, tt.want)
		}
	}
}

// TestPrecedence: each arm stands above the next (Gateway API, HTTPRouteRule.matches
// and GRPCRouteRule.matches).
func TestPrecedence(t *testing.T) {
	r := &model.Route{Namespace: "a", Name: "r"}
	of := func(m model.Match) arm { return arm{route: r, match: m} }
	h := func(names ...string) (out []model.ValueMatch) {
		for _, n := range names {
			out = append(out, model.ValueMatch{Name: n, Value: "1"})
		}
		return out
	}
	grpc := func(service, method string, regex bool) model.Match {
		return model.Match{GRPC: &model.GRPCMatch{Service: service, Method: method, Regex: regex}}
	}
	prefix := func(p string) model.Match { return model.Match{PathKind: model.PathPrefix, Path: p} }
	with := func(m model.Match, method string, headers, query []model.ValueMatch) model.Match {
		m.Method, m.Headers, m.Query = method, headers, query
		return m
	}
	for _, list := range [][]model.Match{
		{
			{PathKind: model.PathExact, Path: "/a"},
			{PathKind: model.PathRegex, Path: "/a/b.*"},
			{PathKind: model.PathRegex, Path: "/.*"},
			prefix("/a/b/c"),
			with(prefix("/a/b"), "GET", nil, nil),
			with(prefix("/a/b"), "", h("x", "y"), nil),
			with(prefix("/a/b"), "", h("x", "x"), h("q")), // of one name twice the first counts
			with(prefix("/a/b"), "", h("x"), nil),
			with(prefix("/a/b/"), "", nil, h("q")),
			prefix("/a/b"),
			prefix("/"),
		},
		{
			grpc("service", "", false), grpc("svc", "method", false), grpc("svc", "meth", false), grpc("svc", "m.*h", true),
			with(grpc("svc", "m", false), "", h("x"), nil), grpc("svc", "m", false), grpc("", "m", false), {},
		},
	} {
		for i := range list[1:] {
			a, b := of(list[i]), of(list[i+1])
			if !before(a, b) || before(b, a) {
				t.Errorf("%+v does not stand above %+v", list[i], list[i+1])
			}
		}
	}
}

// TestPatterns: the bounds of R6.
func TestPatterns(t *testing.T) {
	for p, want := range map[string]bool{
		"": true, "a|b": true, "(": false, strings.Repeat("a", 1024): true, strings.Repeat("a", 1025): false,
		".{1000}.{1000}": true, ".{1000}.{1000}.{1000}.{1000}.{1000}": false, `(?P<n>a)\d`: true, `(?=a)`: false,
	} {
		if got := patternValid(p); got != want {
			t.Errorf("patternValid(%.20q) = %v", p, got)
		}
	}
	if wholeMatch("a|b", "ab") || !wholeMatch("a|b", "b") {
		t.Error("a pattern is not held against the whole")
	}
}

// TestEditQuery: what is not changed keeps its spelling, each kind does what
// Envoy's append_action of the name says.
func TestEditQuery(t *testing.T) {
	op := func(k model.MutationKind, n, v string) model.MutationOp {
		return model.MutationOp{Kind: k, Name: n, Value: v}
	}
	for _, tt := range []struct {
		query string
		op    model.MutationOp
		want  string
	}{
		{"a=%31&b", op(model.AppendIfExistsOrAdd, "a", "2"), "a=%31&b&a=2"},
		{"", op(model.AppendIfExistsOrAdd, "a", "2"), "a=2"},
		{"a=1", op(model.AddIfAbsent, "a", "2"), "a=1"},
		{"%61=1", op(model.AddIfAbsent, "a", "2"), "%61=1"},
		{"b", op(model.AddIfAbsent, "a", "2"), "b&a=2"},
		{"b&a=1&c&a=3", op(model.OverwriteIfExistsOrAdd, "a", "2"), "b&a=2&c"},
		{"b", op(model.OverwriteIfExistsOrAdd, "a", "2"), "b&a=2"},
		{"b", op(model.OverwriteIfExists, "a", "2"), "b"},
		{"a=1&b&a", op(model.RemoveAll, "a", ""), "b"},
		{"a", op(model.RemoveAll, "a", ""), ""},
	} {
		if got, _ := editQuery(tt.query, []model.MutationOp{tt.op}); got != tt.want {
			t.Errorf("%q %+v: %q, want %q", tt.query, tt.op, got, tt.want)
		}
	}
}

// TestChoose: pick is a position in the whole weight (10.4).
func TestChoose(t *testing.T) {
	of := []weighted{{ref: model.BackendRef{Weight: 0}}, {ref: model.BackendRef{Weight: 1}}, {ref: model.BackendRef{Weight: 3}}}
	for pick, want := range map[uint32]int{0: 1, 1<<30 - 1: 1, 1 << 30: 2, 1<<32 - 1: 2} {
		if got := choose(of, pick); got != &of[want] {
			t.Errorf("pick %d: %+v", pick, got)
		}
	}
	if choose(of[:1], 0) != nil || choose(nil, 7) != nil {
		t.Error("no weight was chosen from")
	}
}
