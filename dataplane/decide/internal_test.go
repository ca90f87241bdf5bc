package decide

import (
	"fmt"
	"math/rand/v2"
	"net/url"
	"path"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

func TestPlain(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"/", "/"},
		{"/a/b", "/a/b"},
		{"/a/b/", "/a/b/"},
		{"/.well-known/x", "/.well-known/x"},
		{"//a", "/a"},
		{"/a//b///c", "/a/b/c"},
		{"/a/./b", "/a/b"},
		{"/a/.", "/a/"},
		{"/a/..", "/"},
		{"/a/b/..", "/a/"},
		{"/a/b/../", "/a/"},
		{"/a/b/../../c", "/c"},
		{"/../../a", "/a"},
		{"/..", "/"},
		{"/a%2fb", "/a/b"},
		{"/%2e%2e/a", "/a"},
		{"/a/%2E%2E/b", "/b"},
		{"/a/..%2fb", "/b"},
		{"/%61", "/a"},
		{"/%2561", "/a"},
		{"/%252561", "/a"},
		{"/%25252561", "/a"},
		{"/%2525252561", ""}, // five deep
		{"/a\\b", "/a/b"},
		{"/a%5c..%5cb", "/b"},
		{"/a;x=1/b;y", "/a/b"},
		{"/a/;x/b", "/a/b"},
		{"/a/..;/b", "/b"},
		{"/a%3bx/b", "/a/b"},
		{"/100%", "/100%"},
		{"/100%zz", "/100%zz"},
		{"/100%2", "/100%2"},
		{"/a%20b", "/a b"},
		{"/a+b", "/a+b"},
		{"*", "/*"},
		{"..%2fa", "/a"},
		{"/.../a", "/.../a"},
	} {
		in := []byte(tt.in)
		got, _, ok := plain(in)
		if string(in) != tt.in {
			t.Fatalf("%q was written to", tt.in)
		}
		if !ok {
			if tt.want != "" {
				t.Errorf("%q: too deep, want %q", tt.in, tt.want)
			}
			continue
		}
		if string(got) != tt.want {
			t.Errorf("%q reads as %q, want %q", tt.in, got, tt.want)
		}
	}
}

// TestThirdReading: plain says of every spelling of ".." that it is there, of slashes hidden
// behind ";", of NUL, and of nothing else.
func TestThirdReading(t *testing.T) {
	for in, want := range map[string]bool{
		"/a/../b": true, "/..": true, "/a/%2e%2e/b": true, "/a/.%2E": true, "/%252e%252e/a": true, "/a/..;x/b": true,
		"/a\\..\\b": true, "/a%5c..%5cb": true, "/a%2f..%2fb": true, "/a/..%3bx": true, "/a;/../b": true,
		"/a/.../b": false, "/a/..b": false, "/a..": false, "/a/./b": false, "/a;../b": false, "/a//b": false, "/..%20/": false,
		"/x;y%2fz": true, "/x;y\\z": true, "/x%3by%252fz": true, "/x;%255c": true, "/x/;%2F": true, "/x%00y": true,
		"/x;y/z": false, "/x%2fy;z": false, "/x\\y;z": false, "/x%3fy": false, "/x;y/z%2fy": false, "/x/;": false,
	} {
		if _, third, ok := plain([]byte(in)); third != want || !ok {
			t.Errorf("%s has a third reading: %t", in, third)
		}
	}
}

// TestPlainAgainstStandard: where only dot segments and empty elements are to be
// mended, path.Clean says the same; and what is plain stays.
func TestPlainAgainstStandard(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		in := "/"
		for range r.IntN(8) {
			in += []string{"a", "b", ".", "..", "/", "/", "..."}[r.IntN(7)]
		}
		got, _, _ := plain([]byte(in))
		if want := path.Clean(in); strings.TrimSuffix(string(got), "/") != strings.TrimSuffix(want, "/") {
			t.Fatalf("%q reads as %q, the standard library says %q", in, got, want)
		}
		if again, _, _ := plain(got); string(again) != string(got) {
			t.Fatalf("%q reads as %q, which reads as %q", in, got, again)
		}
		if string(got) != in && !hasAliases([]byte(in)) {
			t.Fatalf("%q reads as %q and is not looked at", in, got)
		}
	}
}

// FuzzPlain: what is plain has no other reading, and a path without another
// reading is not touched.
func FuzzPlain(f *testing.F) {
	for _, s := range []string{"/a/%2e%2e/b", "/a;x/..;/b", "//", "/%25%32%65", "\\..\\a"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, _, ok := plain(b)
		if !ok {
			return
		}
		if len(got) == 0 || got[0] != '/' || len(got) > len(b)+1 {
			t.Fatalf("%q reads as %q", b, got)
		}
		again, _, ok := plain(got)
		if !ok || string(again) != string(got) {
			t.Fatalf("%q reads as %q, which reads as %q", b, got, again)
		}
		if strings.HasPrefix(string(b), "/") && !hasAliases(b) && string(got) != string(b) {
			t.Fatalf("%q reads as %q and is not looked at", b, got)
		}
	})
}

// TestEditPath is the table of Gateway API HTTPPathModifier, and the edges beside it.
func TestEditPath(t *testing.T) {
	for _, tt := range []struct{ path, prefix, value, want string }{
		{"/foo/bar", "/foo", "/xyz", "/xyz/bar"},
		{"/foo/bar", "/foo", "/xyz/", "/xyz/bar"},
		{"/foo", "/foo", "/xyz", "/xyz"},
		{"/foo/", "/foo", "/xyz", "/xyz/"},
		{"/foo/bar", "/foo", "", "/bar"},
		{"/foo/", "/foo", "", "/"},
		{"/foo", "/foo", "", "/"},
		{"/foo/", "/foo", "/", "/"},
		{"/foo", "/foo", "/", "/"},
		{"/foo?q=1", "/foo", "/", "/?q=1"},
		{"/foo/bar?q=/foo", "/foo", "/x", "/x/bar?q=/foo"},
		{"/a", "", "/x", "/x/a"},
		{"/", "", "/x", "/x"},
		{"/?q=1", "", "/x/", "/x?q=1"},
		{"/", "", "/", "/"},
		{"", "", "/x", "/x"},
		{"*", "", "/x", "*"},
	} {
		got := string(editPath([]byte("kept "), model.PathEdit{Kind: model.PathPrefixPart, Value: tt.value}, []byte(tt.path), len(tt.prefix)))
		if got != "kept "+tt.want {
			t.Errorf("%s with %q replaced by %q: %s, want %s", tt.path, tt.prefix, tt.value, got, tt.want)
		}
	}
	for in, want := range map[string]string{"/a/b?x=1": "/new?x=1", "/a?": "/new?", "/": "/new"} {
		if got := string(editPath(nil, model.PathEdit{Kind: model.PathFull, Value: "/new"}, []byte(in), 0)); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

func TestEditQuery(t *testing.T) {
	op := func(kind model.MutationKind, name, value string) snapshot.Op {
		return snapshot.Op{Kind: kind, Name: []byte(name), Value: []byte(value)}
	}
	for _, tt := range []struct {
		in   string
		ops  []snapshot.Op
		want string
	}{
		{"/p", []snapshot.Op{op(model.AppendIfExistsOrAdd, "a", "1")}, "/p?a=1"},
		{"/p?", []snapshot.Op{op(model.AppendIfExistsOrAdd, "a", "1")}, "/p?a=1"},
		{"/p?a=0", []snapshot.Op{op(model.AppendIfExistsOrAdd, "a", "1")}, "/p?a=0&a=1"},
		{"/p?a=0", []snapshot.Op{op(model.AddIfAbsent, "a", "1")}, "/p?a=0"},
		{"/p?b=0", []snapshot.Op{op(model.AddIfAbsent, "a", "1")}, "/p?b=0&a=1"},
		{"/p?a=0&b=2&a=3", []snapshot.Op{op(model.OverwriteIfExistsOrAdd, "a", "1")}, "/p?a=1&b=2"},
		{"/p?b=2", []snapshot.Op{op(model.OverwriteIfExistsOrAdd, "a", "1")}, "/p?b=2&a=1"},
		{"/p?b=2", []snapshot.Op{op(model.OverwriteIfExists, "a", "1")}, "/p?b=2"},
		{"/p?a=2", []snapshot.Op{op(model.OverwriteIfExists, "a", "1")}, "/p?a=1"},
		{"/p?a=2", []snapshot.Op{op(model.RemoveAll, "a", "")}, "/p"},
		{"/p?a=2&b=%2f&%61=3", []snapshot.Op{op(model.RemoveAll, "a", "")}, "/p?b=%2f"},
		{"/p?b&c=&&a", []snapshot.Op{op(model.RemoveAll, "a", "")}, "/p?b&c=&"},
		{"/p", []snapshot.Op{op(model.RemoveAll, "a", "")}, "/p"},
		{"/p?x=y", []snapshot.Op{op(model.AppendIfExistsOrAdd, "a b", "c&d=e/f")}, "/p?x=y&a%20b=c%26d%3De%2Ff"},
		{"/p?a=1", []snapshot.Op{op(model.RemoveAll, "a", ""), op(model.AddIfAbsent, "a", "2"), op(model.AppendIfExistsOrAdd, "a", "3")}, "/p?a=2&a=3"},
	} {
		scratch, got := editQuery([]byte("kept"), tt.ops, []byte(tt.in))
		if string(got) != tt.want || string(scratch[:4]) != "kept" {
			t.Errorf("%s %v: %s (scratch %q), want %s", tt.in, tt.ops, got, scratch, tt.want)
		}
	}
}

// TestEditQueryRoom: many ops need the room of two queries, and not of one an op.
func TestEditQueryRoom(t *testing.T) {
	var ops []snapshot.Op
	for i := range 64 {
		ops = append(ops, snapshot.Op{Kind: model.OverwriteIfExistsOrAdd, Name: fmt.Append(nil, "k", i), Value: []byte("a b")})
	}
	target := "/p?" + strings.Repeat("abcdefg=1&", 1000) + "k0=0&k1=0&k0=1"
	scratch, got := editQuery(nil, ops, []byte(target))
	if cap(scratch) > 3*len(target) {
		t.Errorf("%d bytes of room for a query of %d", cap(scratch), len(target))
	}
	want := strings.TrimSuffix(target, "k0=0&k1=0&k0=1")
	for i := range ops {
		want += fmt.Sprintf("k%d=a%%20b&", i)
	}
	if string(got) != strings.TrimSuffix(want, "&") {
		t.Errorf("%s", got)
	}
	if again := append(scratch, "what comes next"...); string(got) != strings.TrimSuffix(want, "&") || len(again) == 0 {
		t.Error("the target is written over by what comes next in the scratch")
	}
}

// TestParameter compares with net/url, but for what it refuses to read.
func TestParameter(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 20000 {
		in := ""
		for range r.IntN(10) {
			in += []string{"a", "b", "=", "&", "%61", "+", "%20"}[r.IntN(7)]
		}
		values, err := url.ParseQuery(in)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"a", "b", "a b", "ab", "aa"} {
			got, ok := parameter([]byte(in), name)
			want, has := values[name]
			if ok != has || ok && string(plainValue(got)) != want[0] || ok && !decodesTo(got, want[0]) {
				t.Fatalf("%q: %s is %q (%t), net/url says %q", in, name, got, ok, want)
			}
		}
	}
}

func TestNamespaceOf(t *testing.T) {
	for id, want := range map[string]string{
		"spiffe://td/ns/shop/sa/web":       "shop",
		"spiffe://other.td/ns/shop/sa/w/x": "shop",
		"spiffe://td/ns/shop/sa/":          "",
		"spiffe://td/ns/shop/sa":           "",
		"spiffe://td/ns/shop":              "",
		"spiffe:///ns/shop/sa/web":         "",
		"spiffe://td/x/ns/shop/sa/web":     "",
		"https://td/ns/shop/sa/web":        "",
		"":                                 "",
	} {
		if got := namespaceOf(id); got != want {
			t.Errorf("%q is in %q, want %q", id, got, want)
		}
	}
	// The namespace is compared whole, and is not one of nothing.
	if principal([]model.Principal{{Namespace: "sho"}}, "spiffe://td/ns/shop/sa/web") || principal([]model.Principal{{}}, "spiffe://td/x") {
		t.Error("a principal that is not the caller holds")
	}
}

func TestOrigins(t *testing.T) {
	c := &snapshot.CORS{Origins: []snapshot.Origin{
		{Prefix: "https://a.example"}, {Prefix: "http://b.example:8080"},
		{Prefix: "https://", Suffix: ".c.example", Wild: true}, {Prefix: "https://", Suffix: ".d.example:8443", Wild: true},
	}}
	for origin, want := range map[string]bool{
		"https://a.example":            true,
		"HTTPS://A.Example":            true,
		"https://a.example:443":        true,
		"https://a.example:80":         false,
		"http://a.example":             false,
		"https://a.example.evil":       false,
		"https://a.example/":           false,
		"http://b.example:8080":        true,
		"http://b.example":             false,
		"https://x.c.example":          true,
		"https://x.y.c.example:443":    true,
		"https://.c.example":           false,
		"https://c.example":            false,
		"https://evil/x.c.example":     false,
		"https://evil:1.c.example":     false,
		"https://u@x.c.example":        false,
		"https://x.d.example:8443":     true,
		"https://x.d.example":          false,
		"null":                         false,
		"":                             false,
		strings.Repeat("x", maxOrigin): false,
		"https://" + strings.Repeat("x", maxOrigin) + ".c.example": false,
	} {
		if got := allowed(c, []byte(origin)); got != want {
			t.Errorf("%q: %t", origin, got)
		}
	}
	if !allowed(&snapshot.CORS{AnyOrigin: true}, []byte("null")) || allowed(&snapshot.CORS{AnyOrigin: true}, nil) {
		t.Error("any origin is any, and none is none")
	}
}

// TestCORSFields: what stands on preflights and answers (Fetch, "CORS protocol").
func TestCORSFields(t *testing.T) {
	b := func(s string) []byte { return []byte(s) }
	for _, tt := range []struct {
		name, request     string
		c                 snapshot.CORS
		preflight, answer string
	}{
		{"list", "h:origin=https://a.example",
			snapshot.CORS{Origins: []snapshot.Origin{{Prefix: "https://a.example"}}, Methods: b("GET,PUT"), Headers: b("x-a"), Expose: b("x-e"), MaxAge: b("60")},
			"access-control-allow-origin=https://a.example vary=Origin access-control-allow-methods=GET,PUT access-control-allow-headers=x-a access-control-expose-headers=x-e access-control-max-age=60",
			"access-control-allow-methods=app vary=Origin access-control-allow-origin=https://a.example access-control-expose-headers=x-e"},
		{"any", "h:origin=https://a.example",
			snapshot.CORS{AnyOrigin: true, AnyMethod: true, Methods: b("*"), AnyHeader: true, Headers: b("*")},
			"access-control-allow-origin=* access-control-allow-methods=* access-control-allow-headers=*",
			"access-control-allow-methods=app access-control-allow-origin=*"},
		{"any with credentials", "h:origin=https://a.example",
			snapshot.CORS{AnyOrigin: true, Credentials: true, AnyMethod: true, Methods: b("*"), AnyHeader: true, Headers: b("*")},
			"access-control-allow-origin=https://a.example vary=Origin access-control-allow-credentials=true access-control-allow-methods=PUT access-control-allow-headers=x-q",
			"access-control-allow-methods=app vary=Origin access-control-allow-origin=https://a.example access-control-allow-credentials=true"},
		{"another origin", "h:origin=https://b.example",
			snapshot.CORS{Origins: []snapshot.Origin{{Prefix: "https://a.example"}}, Methods: b("GET")},
			"", "access-control-allow-methods=app vary=Origin"},
	} {
		r, err := model.ParseRequest("OPTIONS cart/ h:access-control-request-method=PUT h:access-control-request-headers=x-q " + tt.request)
		if err != nil {
			t.Fatal(err)
		}
		if !preflight(&r) {
			t.Errorf("%s: no preflight", tt.name)
		}
		v := Verdict{Action: Reply, Pipe: &snapshot.FilterChain{CORS: &tt.c}, CORS: &tt.c}
		var h httpmsg.Head
		v.AppendPreflight(&h, &r)
		if got := words(&h); got != tt.preflight {
			t.Errorf("%s: preflight\ngot  %s\nwant %s", tt.name, got, tt.preflight)
		}
		v.Action = Forward
		h = httpmsg.Head{}
		for _, n := range []string{"access-control-allow-origin", "access-control-allow-credentials", "access-control-expose-headers", "access-control-allow-methods"} {
			h.Add([]byte(n), b("app"))
		}
		v.ApplyResponse(&h, v.Origin(&r))
		if got := words(&h); got != tt.answer {
			t.Errorf("%s: answer\ngot  %s\nwant %s", tt.name, got, tt.answer)
		}
		v.Action = Refuse // the proxy's own answer has the same of these
		h = httpmsg.Head{}
		v.MarkAnswer(&h, v.Origin(&r))
		if got, want := words(&h), strings.TrimSpace(strings.TrimPrefix(tt.answer, "access-control-allow-methods=app")); got != want {
			t.Errorf("%s: the proxy's own answer\ngot  %s\nwant %s", tt.name, got, want)
		}
	}
	for _, action := range []Action{Forward, Reply} { // without an origin; of a redirection, too
		v := Verdict{Action: action, Reason: Redirect, Pipe: &snapshot.FilterChain{CORS: &snapshot.CORS{Origins: []snapshot.Origin{{Prefix: "https://a.example"}}}, Response: []snapshot.Op{{Kind: model.AppendIfExistsOrAdd, Name: b("x-r"), Value: b("1")}}}}
		h := httpmsg.Head{Fields: []httpmsg.Field{{Name: hdrAllowOrigin, Value: valueAny}}}
		v.ApplyResponse(&h, nil)
		if got := words(&h); got != "x-r=1 vary=Origin" {
			t.Errorf("%s without an origin: %s", action, got)
		}
		v.ApplyResponse(&h, b("https://a.example"))
		if got := words(&h); got != "x-r=1 vary=Origin x-r=1 access-control-allow-origin=https://a.example" {
			t.Errorf("%s: %s", action, got)
		}
	}
	for _, not := range []string{"GET c/ h:origin=x h:access-control-request-method=PUT", "OPTIONS c/ h:access-control-request-method=PUT", "OPTIONS c/ h:origin=x"} {
		if r, err := model.ParseRequest(not); err != nil || preflight(&r) {
			t.Errorf("%s: %v", not, err)
		}
	}
}

func words(h *httpmsg.Head) string {
	var out []string
	for _, f := range h.Fields {
		out = append(out, string(f.Name)+"="+string(f.Value))
	}
	return strings.Join(out, " ")
}

// TestVaryOnce: an answer that varies on the origin already is not told twice.
func TestVaryOnce(t *testing.T) {
	c := &snapshot.CORS{Origins: []snapshot.Origin{{Prefix: "https://a.example"}}}
	for vary, want := range map[string]string{"accept, Origin": "", "*": "", "accept": " vary=Origin", "origin-x": " vary=Origin"} {
		h := httpmsg.Head{Fields: []httpmsg.Field{{Name: hdrVary, Value: []byte(vary)}}}
		mark(c, &h, []byte("https://a.example"))
		if got := words(&h); got != "vary="+vary+want+" access-control-allow-origin=https://a.example" {
			t.Errorf("%s: %s", vary, got)
		}
	}
}

func TestLocation(t *testing.T) {
	for _, tt := range []struct {
		flow, request string
		prefix        int
		d             snapshot.Redirect
		want          string
	}{
		{"s/w > 10.0.0.1:8080", "GET cart/a?x=1", 0, snapshot.Redirect{Scheme: "https"}, "https://cart/a?x=1"},
		{"s/w > 10.0.0.1:8080", "GET cart:8080/a", 0, snapshot.Redirect{Scheme: "https"}, "https://cart/a"},
		{"s/w > 10.0.0.1:8080", "GET cart/a", 0, snapshot.Redirect{}, "http://cart:8080/a"},
		{"s/w > 10.0.0.1:8080", "GET cart:8080/a", 0, snapshot.Redirect{Host: "x.example"}, "http://x.example:8080/a"},
		{"s/w > 10.0.0.1:80", "GET cart/a", 0, snapshot.Redirect{Host: "x.example"}, "http://x.example/a"},
		{"s/w > 10.0.0.1:80", "GET cart:80/a", 0, snapshot.Redirect{}, "http://cart/a"},
		{"s/w > 10.0.0.1:8080", "GET cart/a", 0, snapshot.Redirect{Port: 80}, "http://cart/a"},
		{"s/w > 10.0.0.1:8080", "GET cart/a", 0, snapshot.Redirect{Scheme: "https", Port: 443}, "https://cart/a"},
		{"s/w > 10.0.0.1:8080", "GET cart/a", 0, snapshot.Redirect{Scheme: "https", Port: 80}, "https://cart:80/a"},
		{"s/w > 10.0.0.1:8080", "GET cart/a", 0, snapshot.Redirect{Scheme: "http"}, "http://cart/a"},
		{"s/w > 10.0.0.1:18081", "GET cart/a", 0, snapshot.Redirect{}, "http://cart/a"},
		{"s/w > proxy", "GET cart/a", 0, snapshot.Redirect{}, "http://cart/a"},
		{"s/w > proxy", "GET cart:9090/a", 0, snapshot.Redirect{}, "http://cart:9090/a"},
		{"s/w > [fd00::1]:8080", `GET "/a"`, 0, snapshot.Redirect{}, "http://[fd00::1]:8080/a"},
		{"s/w > 10.0.0.1:8080", `GET "[fd00::2]:9090/a"`, 0, snapshot.Redirect{}, "http://[fd00::2]:9090/a"},
		{"s/w > 10.0.0.1:8080", `GET "[fd00::2]/a"`, 0, snapshot.Redirect{}, "http://[fd00::2]:8080/a"},
		{"s/w > 10.0.0.1:80", "GET cart/p/x?q=1", 2, snapshot.Redirect{Path: model.PathEdit{Kind: model.PathPrefixPart, Value: "/n"}}, "http://cart/n/x?q=1"},
		{"s/w > 10.0.0.1:8080", "OPTIONS cart*", 0, snapshot.Redirect{Host: "x.example"}, "http://x.example:8080"},
		{"s/w > 10.0.0.1:8080", "OPTIONS cart*", 0, snapshot.Redirect{Path: model.PathEdit{Kind: model.PathPrefixPart, Value: "/n"}}, "http://cart:8080"},
		{"s/w > 10.0.0.1:8080", "OPTIONS cart*", 0, snapshot.Redirect{Path: model.PathEdit{Kind: model.PathFull, Value: "/n"}}, "http://cart:8080/n"},
		{"s/w > 10.0.0.1:80", "GET cart/p/x?q=1", 2, snapshot.Redirect{Path: model.PathEdit{Kind: model.PathFull, Value: "/n"}}, "http://cart/n?q=1"},
	} {
		f, err := model.ParseFlow(tt.flow)
		if err != nil {
			t.Fatal(err)
		}
		r, err := model.ParseRequest(tt.request)
		if err != nil {
			t.Fatal(err)
		}
		v := Verdict{Action: Reply, Pipe: &snapshot.FilterChain{Redirect: &tt.d}, Prefix: tt.prefix}
		if got := string(v.Location([]byte("kept "), &f, &r)); got != "kept "+tt.want {
			t.Errorf("%s | %s %+v:\ngot  %s\nwant kept %s", tt.flow, tt.request, tt.d, got, tt.want)
		}
	}
}
