package file

import (
	"bytes"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"aether/controlplane/gamma"
	"aether/dataplane/model"
)

// TestNothingWidens breaks each key and each value of two routes that say
// everything, one at a time: the rule that held it is refused, no rule is
// lost, and no match becomes narrower or loses its place in silence, so that no request
// meant for the rule is served by another.
func TestNothingWidens(t *testing.T) {
	broken := 0
	for _, tt := range []struct{ file, route string }{{"testdata/http/routes.yaml", "all"}, {"testdata/grpc/routes.yaml", "all"}} {
		b, err := os.ReadFile(tt.file)
		if err != nil {
			t.Fatal(err)
		}
		text := split(b)[0].text
		want := readRoute(t, text)
		if want == nil || want.Name != tt.route || len(want.Rules) < 3 {
			t.Fatalf("%s: %+v", tt.file, want)
		}
		var root yaml.Node
		if err := yaml.Unmarshal(text, &root); err != nil {
			t.Fatal(err)
		}
		rules := child(child(root.Content[0], "spec"), "rules")
		for i, rule := range rules.Content {
			walk(rule, func(n *yaml.Node) {
				was := *n
				for _, wrong := range []yaml.Node{
					{Kind: yaml.ScalarNode, Tag: "!!str", Value: "zzz"},
					{Kind: yaml.MappingNode, Tag: "!!map", Content: []*yaml.Node{{Kind: yaml.ScalarNode, Value: "zzz"}, {Kind: yaml.ScalarNode, Value: "1"}}},
					{Kind: yaml.SequenceNode, Tag: "!!seq", Content: []*yaml.Node{{Kind: yaml.SequenceNode}}},
				} {
					if wrong.Kind == was.Kind && (was.Kind == yaml.ScalarNode) != isKey(rules, n) {
						continue // may be a right value
					}
					if wrong.Kind != yaml.ScalarNode && isKey(rules, n) {
						continue
					}
					*n = wrong
					out, err := yaml.Marshal(&root)
					*n = was
					if err != nil {
						t.Fatal(err)
					}
					broken++
					got := readRoute(t, out)
					if got == nil || len(got.Rules) != len(want.Rules) {
						t.Fatalf("rules are lost:\n%s\n%+v", out, got)
					}
					if got.Rules[i].Invalid == "" {
						t.Fatalf("line %d: rule %d is in force:\n%s", was.Line, i, out)
					}
					for j := range got.Rules {
						if !wider(got.Rules[j].Matches, want.Rules[j].Matches) {
							t.Fatalf("line %d: rule %d matches less: %+v\n%+v\n%s", was.Line, j, got.Rules[j].Matches, want.Rules[j].Matches, out)
						}
					}
				}
			})
		}
	}
	if broken < 300 {
		t.Errorf("only %d ways", broken)
	}
}

func readRoute(t *testing.T, text []byte) *model.Route {
	t.Helper()
	for _, it := range parse("x.yaml", text, Options{}.withDefaults(), nil).items {
		if it.route != nil {
			return &it.route.Route
		}
	}
	return nil
}

func child(n *yaml.Node, name string) *yaml.Node {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == name {
			return n.Content[i+1]
		}
	}
	return nil
}

func walk(n *yaml.Node, f func(*yaml.Node)) {
	f(n)
	for _, c := range n.Content {
		walk(c, f)
	}
}

// isKey: n is the key of a field below root.
func isKey(root, n *yaml.Node) (found bool) {
	walk(root, func(m *yaml.Node) {
		for i := 0; m.Kind == yaml.MappingNode && i < len(m.Content); i += 2 {
			found = found || m.Content[i] == n
		}
	})
	return found
}

// wider: got has no condition that want has not, and where one is missing it says so, by
// which it stands in the place of want's or before (controlplane/compile).
func wider(got, want []model.Match) bool {
	all := func(m model.Match) bool {
		return m.Unread && m.Path == "" && m.Method == "" && m.GRPC == nil && len(m.Headers)+len(m.Query) == 0 && (m.PathKind == model.PathUnread || m.PathKind == model.PathAny)
	}
	if len(got) == 1 && all(got[0]) {
		return true
	}
	if len(got) != len(want) {
		return false
	}
	pattern := func(s string) bool { _, err := regexp.Compile(s); return err == nil }
	// Conditions with a broken expression are kept: they compare with nothing, and count.
	same := func(got, want []model.ValueMatch) bool {
		return slices.EqualFunc(got, want, func(g, w model.ValueMatch) bool {
			return g == w || g.Name == w.Name && g.Regex && !pattern(g.Value)
		})
	}
	subset := func(got, want []model.ValueMatch) bool {
		return !slices.ContainsFunc(got, func(v model.ValueMatch) bool {
			return !slices.Contains(want, v) && (!v.Regex || pattern(v.Value))
		})
	}
	for i := range got {
		g, w := got[i], want[i]
		switch {
		case g.PathKind == w.PathKind && g.Path == w.Path, g.PathKind == model.PathUnread:
		case g.PathKind == w.PathKind && (g.Path == "" || g.PathKind == model.PathRegex && !pattern(g.Path)):
		default:
			return false
		}
		switch {
		case g.Method != "" && g.Method != w.Method, !subset(g.Headers, w.Headers), !subset(g.Query, w.Query):
			return false
		case g.GRPC != nil && (w.GRPC == nil || g.GRPC.Service != "" && g.GRPC.Service != w.GRPC.Service && !(g.GRPC.Regex && !pattern(g.GRPC.Service)) ||
			g.GRPC.Method != "" && g.GRPC.Method != w.GRPC.Method && !(g.GRPC.Regex && !pattern(g.GRPC.Method))):
			return false
		case g.Unread:
		case g.Method != w.Method, !same(g.Headers, w.Headers), !same(g.Query, w.Query), (g.GRPC == nil) != (w.GRPC == nil),
			g.GRPC != nil && (g.GRPC.Service == "") != (w.GRPC.Service == ""), g.GRPC != nil && (g.GRPC.Method == "") != (w.GRPC.Method == ""):
			return false
		}
	}
	return true
}

// TestTooManyMistakes: what is beyond the mistakes that are told is not in force either.
func TestTooManyMistakes(t *testing.T) {
	var b strings.Builder
	b.WriteString("apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\nspec:\n  parentRefs: [{kind: Service, group: \"\", name: cart}]\n  rules:\n")
	for i := range gamma.MaxFlaws + 5 {
		fmt.Fprintf(&b, "  - {matches: [{path: {type: Exact, valeu: /%d}}], filtres: []}\n", i)
	}
	r := readRoute(t, []byte(b.String()))
	if r == nil || len(r.Rules) != gamma.MaxFlaws+5 {
		t.Fatalf("%+v", r)
	}
	for i, rule := range r.Rules {
		if rule.Invalid == "" || !reflect.DeepEqual(rule.Matches, []model.Match{{PathKind: model.PathUnread, Unread: true}}) {
			t.Errorf("rule %d: %+v", i, rule)
		}
	}
}

// TestHuge: routes and filters that are far beyond any use take time and room in
// proportion, and what is said of them stays short.
func TestHuge(t *testing.T) {
	const n = 4000
	route := func(kind, rules string) string {
		return "apiVersion: gateway.networking.k8s.io/v1\nkind: " + kind + "\nmetadata: {name: r, namespace: shop}\nspec:\n  parentRefs: [{kind: Service, group: \"\", name: cart}]\n  rules:\n" + rules
	}
	for name, text := range map[string]string{
		"matches":   route("HTTPRoute", "  - matches:\n"+strings.Repeat("    - {path: {value: bad}}\n", n)),
		"headers":   route("HTTPRoute", "  - matches:\n    - headers:\n"+strings.Repeat("      - {name: a, value: b}\n", n)),
		"patterns":  route("HTTPRoute", "  - matches:\n"+strings.Repeat(`    - {path: {type: RegularExpression, value: "(`+strings.Repeat(`\\pL{1000}`, 90)+`)"}}`+"\n", n/100)),
		"backends":  route("HTTPRoute", "  - backendRefs:\n"+strings.Repeat("    - {name: a, namespace: db, port: 80}\n", n)),
		"rules":     route("GRPCRoute", strings.Repeat("  - {matches: [{method: {}}]}\n", n)),
		"hostnames": route("TLSRoute", "  - {}\n  hostnames:\n"+strings.Repeat("  - a.example\n", n)),
		"a value":   route("HTTPRoute", "  - matches: [{path: {type: RegularExpression, value: \"("+strings.Repeat("x", 1<<20)+"\"}}]\n"),
		"policies": "apiVersion: config.aether.io/v1\nkind: HTTPFilter\nmetadata: {name: f, namespace: shop}\nspec:\n  rbac:\n    policies:\n" +
			strings.Repeat("    - {name: a, principals: [{}]}\n", n),
		"targets": "apiVersion: config.aether.io/v1\nkind: HTTPFilter\nmetadata: {name: f, namespace: shop}\nspec:\n  extAuthz: {}\n  targetRefs:\n" +
			strings.Repeat("  - {kind: Pod, name: a}\n", n),
		"grant": "apiVersion: gateway.networking.k8s.io/v1\nkind: ReferenceGrant\nmetadata: {name: g, namespace: db}\nspec:\n  from:\n" +
			strings.Repeat("  - {group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: shop}\n", n) + "  to:\n" + strings.Repeat("  - {group: \"\", kind: Service}\n", n),
	} {
		t.Run(name, func(t *testing.T) {
			p := parse("x.yaml", []byte(text), Options{}.withDefaults(), nil)
			l := newLoader("", Options{})
			l.files["x.yaml"] = p
			m, _ := l.build()
			if name != "backends" && len(p.problems) > gamma.MaxRefusals+gamma.MaxFlaws+2 {
				t.Errorf("%d problems", len(p.problems))
			}
			for _, pr := range p.problems {
				if len(pr.Reason) > 2000 {
					t.Errorf("a reason of %d bytes: %.200s", len(pr.Reason), pr.Reason)
				}
			}
			for _, r := range m.Routes {
				for _, rule := range r.Rules {
					if len(rule.Invalid) > 10000 {
						t.Errorf("a rule's reason of %d bytes", len(rule.Invalid))
					}
				}
				if name != "backends" && r.Rules[0].Invalid == "" {
					t.Error("in force")
				}
			}
			for _, f := range m.Filters {
				if f.Invalid == "" || len(f.Invalid) > 10000 {
					t.Errorf("Invalid is of %d bytes", len(f.Invalid))
				}
			}
			if name == "grant" && len(l.files["x.yaml"].items) > 0 {
				t.Error("the grant is in force")
			}
		})
	}
}

// FuzzDumpLoads: whatever can be read can be written, and reads as the same:
// also when one value of it, the n-th node, is another.
func FuzzDumpLoads(f *testing.F) {
	seeds, err := filesBelow("testdata")
	if err != nil {
		f.Fatal(err)
	}
	odd := []string{"", "zzz", "5", "-1", "0", "99999999999", "''", "null", "true", "[]", "{}", "'*'", "a/b", "/", "//", "'('", "0s", "[[a]]", "{a: b}", "SCOPE_INBOUND", "GatewayAPI", "Header"}
	n := 0
	for _, b := range seeds {
		for _, doc := range split(b) {
			for k := range 4 {
				f.Add(doc.text, uint16(n*7+k*13), odd[n%len(odd)])
				n++
			}
		}
	}
	f.Fuzz(func(t *testing.T, text []byte, n uint16, with string) {
		text = replaceNode(text, int(n), with)
		build := func(text []byte) *model.Mesh {
			l := newLoader("", testOptions)
			l.files["x.yaml"] = parse("x.yaml", text, l.o, nil)
			m, _ := l.build()
			return m
		}
		m := build(text)
		dumped := Dump(m)
		if got, want := render(build(dumped)), render(m); got != want {
			t.Fatalf("%s\n\n%s\n%s", text, dumped, firstDifference(got, want))
		}
		if again := Dump(build(dumped)); !bytes.Equal(again, dumped) {
			t.Fatalf("a dump's dump differs: %s", firstDifference(string(again), string(dumped)))
		}
	})
}

// replaceNode writes with in the place of the n-th node of text, where both are YAML.
func replaceNode(text []byte, n int, with string) []byte {
	var root, other yaml.Node
	if with == "" || yaml.Unmarshal(text, &root) != nil || yaml.Unmarshal([]byte(with), &other) != nil || root.Kind == 0 || other.Kind == 0 {
		return text
	}
	var all []*yaml.Node
	walk(root.Content[0], func(n *yaml.Node) { all = append(all, n) })
	*all[n%len(all)] = *other.Content[0]
	out, err := yaml.Marshal(&root)
	if err != nil {
		return text
	}
	return out
}

func filesBelow(dir string) (out [][]byte, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		path := dir + "/" + e.Name()
		if e.IsDir() {
			more, err := filesBelow(path)
			if err != nil {
				return nil, err
			}
			out = append(out, more...)
		} else if isYAML(e.Name()) {
			b, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			out = append(out, b)
		}
	}
	return out, err
}
