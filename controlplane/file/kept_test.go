package file

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"aether/controlplane/gamma"
	"aether/controlplane/input"
	"aether/dataplane/model"
	"aether/e2e/testseed"
)

const guardFilter = `apiVersion: config.aether.io/v1
kind: HTTPFilter
metadata: {name: guard, namespace: shop}
spec:
  scope: SCOPE_INBOUND
  targetRefs: [{kind: Service, name: green}]
  rbac:
    action: DENY
    policies:
    - name: nobody
      principals: [{namespace: shop}]
      permissions: [{pathPrefix: /secret}]
`

const guardPod = `apiVersion: v1
kind: Pod
metadata:
  name: web-1
  namespace: shop
  labels: {aether.io/managed: "true"}
  annotations: {capture.aether.io/redirect-all: "true"}
spec: {nodeName: n1, serviceAccountName: web, containers: [{name: web}]}
status: {phase: Running, podIPs: [{ip: 10.1.0.1}]}
`

// slipsOf are ways in which a document that was good stops saying what it said.
func slipsOf(doc string) map[string]string {
	edit := func(from, to string) string {
		out := strings.Replace(doc, from, to, 1)
		if out == doc {
			panic("nothing to replace: " + from)
		}
		return out
	}
	kind := strings.Fields(doc[strings.Index(doc, "kind: "):])[1]
	version := strings.Fields(doc)[1]
	name := strings.Fields(doc[strings.Index(doc, "name: "):])[1]
	return map[string]string{
		"tab":                edit("\nspec", "\n\tspec"),
		"bracket":            edit("spec:", "spec: [["),
		"colon":              edit("apiVersion:", "a: apiVersion:"),
		"cut":                doc[:len(doc)/2],
		"cut in the head":    doc[:strings.Index(doc, "name:")+8],
		"merge marks":        "<<<<<<< HEAD\n" + doc + "=======\n" + doc + ">>>>>>> other\n",
		"merge marks, split": "<<<<<<< HEAD\n---\n" + doc + "=======\n---\n" + doc + ">>>>>>> other\n",
		"not UTF-8":          edit("shop", "sh\xf6p"),
		"UTF-16":             "\xff\xfe" + strings.Join(strings.Split(doc, ""), "\x00"),
		"emptied":            "",
		"blank":              "\n  \n",
		"commented out":      "# " + strings.ReplaceAll(strings.TrimSpace(doc), "\n", "\n# ") + "\n",
		"marker alone":       "---\n",
		"kind":               edit("kind: "+kind, "kind: "+strings.ToLower(kind[:3])+kind[3:]),
		"kind, a letter":     edit("kind: "+kind, "kind: "+kind[:2]+"x"+kind[2:]),
		"kind gone":          edit("kind: "+kind+"\n", ""),
		"apiVersion":         edit("apiVersion: "+version, "apiVersion: "+version+"beta1"),
		"apiVersion gone":    edit("apiVersion: "+version+"\n", ""),
		"name":               edit("name: "+name, "name: a_b"),
		"name, upper case":   edit("name: "+name, "name: A"),
		"namespace":          edit("namespace: shop", "namespace: sh_op"),
		"metadata":           edit("metadata:", "metdata:"),
		"spec":               edit("\nspec:", "\nspecs:"),
		"newer field":        doc + "newer: 1\n",
		"twice":              doc + "kind: Other\n",
		"text before it":     "Error from server\n" + doc,
		"two in one":         doc + doc,
	}
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	check(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
}

func read(t *testing.T, l *loader) (*model.Mesh, []model.Problem) {
	t.Helper()
	if _, err := l.read(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	return l.build()
}

// closed: what was denied to the callers of green is denied still.
func closed(m *model.Mesh) bool {
	return slices.ContainsFunc(m.Filters, func(f model.HTTPFilter) bool {
		return f.Scope == model.ScopeInbound && slices.Contains(f.Targets, model.ServiceName{Namespace: "shop", Name: "green"}) &&
			(f.Invalid != "" || f.RBAC != nil && f.RBAC.Deny && len(f.RBAC.Policies) == 1)
	})
}

// captured: the pod's traffic is carried as it was.
func captured(m *model.Mesh) bool {
	return slices.ContainsFunc(m.Workloads, func(w model.Workload) bool {
		return w.Name == "web-1" && w.Namespace == "shop" && w.Capture.RedirectAll && w.SPIFFEID == "spiffe://aether.internal/ns/shop/sa/web"
	})
}

// TestSlips: a slip in a file opens no policy and lets no pod out, however often it is read; a problem names
// the file, and the file's removal removes the object.
func TestSlips(t *testing.T) {
	for _, of := range []struct {
		name, doc string
		holds     func(*model.Mesh) bool
		more      map[string]string
	}{
		{"policy", guardFilter, closed, map[string]string{
			"target":        strings.Replace(guardFilter, "targetRefs:", "targetRef:", 1),
			"target's name": strings.Replace(guardFilter, "name: green", "nme: green", 1),
			"scope":         strings.Replace(guardFilter, "scope: SCOPE_INBOUND", "scop: SCOPE_INBOUND", 1),
			"action":        strings.Replace(guardFilter, "DENY", "DENIE", 1),
		}},
		{"pod", guardPod, captured, map[string]string{
			"label":      strings.Replace(guardPod, `managed: "true"`, `managed: "ture"`, 1),
			"capture":    strings.Replace(guardPod, `redirect-all: "true"`, `redirect-all: "ture"`, 1),
			"annotation": strings.Replace(guardPod, "capture.aether.io", "file.aether.io", 1),
			"account":    strings.Replace(guardPod, "serviceAccountName: web", "serviceAccountName: We", 1),
			"address":    strings.Replace(guardPod, "10.1.0.1", "10.1.0.256", 1),
			"no address": strings.Replace(guardPod, "podIPs", "podIP", 1),
			"host":       strings.Replace(guardPod, "nodeName: n1", "nodeName: n1, hostNetwork: true", 1),
		}},
	} {
		all := slipsOf(of.doc)
		maps.Copy(all, of.more)
		for _, beside := range []string{"", svc("other") + "---\n"} { // alone, and behind another document
			for _, name := range slices.Sorted(maps.Keys(all)) {
				t.Run(fmt.Sprintf("%s/%s/%v", of.name, name, beside != ""), func(t *testing.T) {
					dir := t.TempDir()
					l := newLoader(dir, Options{Node: "n1"})
					write(t, dir, "x.yaml", beside+of.doc)
					if m, p := read(t, l); !of.holds(m) || len(p) > 0 {
						t.Fatalf("before: %v", p)
					}
					write(t, dir, "x.yaml", beside+all[name])
					for range 2 {
						m, p := read(t, l)
						if !of.holds(m) {
							if beside != "" && len(split([]byte(all[name]))) == 0 {
								return // the object was taken out of a file that reads well
							}
							t.Fatalf("it is open: %v", p)
						}
						if !slices.ContainsFunc(p, func(p model.Problem) bool { return strings.HasPrefix(p.Where, "x.yaml") }) {
							t.Errorf("nothing is told: %v", p)
						}
					}
					// Another edit, which mends nothing.
					write(t, dir, "x.yaml", all[name]+"\n# a comment\n")
					if m, p := read(t, l); !of.holds(m) {
						t.Errorf("after another edit it is open: %v", p)
					}
					check(t, os.Remove(filepath.Join(dir, "x.yaml")))
					if m, p := read(t, l); of.holds(m) || len(p) > 0 {
						t.Errorf("the file is gone, and it is in force: %v", p)
					}
				})
			}
		}
	}
}

// TestWellEdited: what is taken out of a file that reads well, renamed there, or given up for another kind, goes.
func TestWellEdited(t *testing.T) {
	foreign := "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\n"
	knative := "apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: x}\n"
	stray := "a: b: c\n" // stood there before
	for name, tt := range map[string]struct{ before, after string }{
		"taken out":          {guardFilter + "---\n" + svc("other"), svc("other")},
		"renamed":            {guardFilter, strings.ReplaceAll(strings.Replace(guardFilter, "name: guard", "name: other", 1), "green", "blue")},
		"foreign":            {guardFilter, foreign},
		"foreign beside":     {foreign + "---\n" + guardFilter, foreign},
		"another's Service":  {knative + "---\n" + guardFilter, knative},
		"beside a stray one": {stray + "---\n" + guardFilter + "---\n" + svc("other"), stray + "---\n" + svc("other")},
		"list":               {"apiVersion: v1\nkind: List\nitems:\n- " + strings.ReplaceAll(strings.TrimSpace(guardFilter), "\n", "\n  ") + "\n", "apiVersion: v1\nkind: List\nitems: []\n"},
	} {
		dir := t.TempDir()
		l := newLoader(dir, Options{Node: "n1"})
		write(t, dir, "x.yaml", tt.before)
		if m, p := read(t, l); !closed(m) {
			t.Fatalf("%s: before: %v", name, p)
		}
		write(t, dir, "x.yaml", tt.after)
		if m, p := read(t, l); closed(m) {
			t.Errorf("%s: it is in force: %v", name, p)
		}
	}
}

// TestFinalNewline: a file that loses white space at its end alone is not cut.
func TestFinalNewline(t *testing.T) {
	text := guardFilter + "---\n" + guardPod
	for _, tt := range []struct {
		before, after string
		problems      bool
	}{
		{text, strings.TrimSuffix(text, "\n"), false},
		{text + "\n \n", strings.TrimSuffix(text, "\n"), false},
		{text + "\n\n", text, false},
		{text, strings.TrimSuffix(text, "}\n"), true},
		{text + "---\n" + svc("a"), strings.TrimSuffix(text, "\n"), true},
	} {
		dir := t.TempDir()
		l := newLoader(dir, Options{Node: "n1"})
		write(t, dir, "x.yaml", tt.before)
		read(t, l)
		write(t, dir, "x.yaml", tt.after)
		if m, problems := read(t, l); !closed(m) || !captured(m) || len(problems) > 0 != tt.problems {
			t.Errorf("%q: %v", tt.after[len(tt.after)-10:], problems)
		}
	}
}

// TestCutBehindALine: a file that ends behind a line of a document which others followed is cut, and that document is as
// it was, although it can be read; a line more makes it the word.
func TestCutBehindALine(t *testing.T) {
	second := "    - name: second\n      principals: [{namespace: shop}]\n      permissions: [{pathPrefix: /other}]\n"
	text := svc("a") + "---\n" + guardFilter + second + "---\n" + svc("c")
	dir := t.TempDir()
	l := newLoader(dir, Options{Node: "n1"})
	write(t, dir, "x.yaml", text)
	was, _ := read(t, l)
	if len(was.Filters) != 1 || len(was.Filters[0].RBAC.Policies) != 2 || services(was) != "a c" {
		t.Fatalf("%+v", was)
	}
	short := text[:strings.Index(text, second)]
	for range 2 {
		write(t, dir, "x.yaml", short)
		if m, problems := read(t, l); !reflect.DeepEqual(m.Filters, was.Filters) || services(m) != "a c" || !strings.Contains(fmt.Sprint(problems), "cut off") {
			t.Errorf("cut: %+v %s %v", m.Filters, services(m), problems)
		}
	}
	write(t, dir, "x.yaml", short+"\n")
	if m, problems := read(t, l); len(m.Filters) != 1 || m.Filters[0].Invalid != "" || len(m.Filters[0].RBAC.Policies) != 1 || services(m) != "a" || len(problems) > 0 {
		t.Errorf("it is meant: %+v %s %v", m.Filters, services(m), problems)
	}
}

// TestMayGuard: which texts that cannot be read may have been a policy, or a route that has one.
func TestMayGuard(t *testing.T) {
	for text, want := range map[string]bool{
		"kind: HTTPFilter\n{":                                        true,
		"\"kind\": \"TLSRoute\" {":                                   true,
		"kind: HttpRote\n{":                                          true,
		"apiVersion: config.aether.io/v1\n{":                         true,
		"apiVersion: config.aether.io/v1\nkind: MeshConfig\n{":       false,
		"apiVersion: gateway.networking.k8s.io/v1\n{":                true,
		"apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\n{": false,
		"apiVersion: v1\nkind: Pod\n{":                               false,
		"kind: Deployment\n---\nkind: GRPCRoute\n{":                  true,
		"{": false,
	} {
		if mayGuard([]byte(text)) != want {
			t.Errorf("%q may guard: %t", text, !want)
		}
	}
}

// TestRefusedFormsDoNotAddUp: of several refused forms of a policy the last one governs, and with it what the last good one
// governed, and not what those between named.
func TestRefusedFormsDoNotAddUp(t *testing.T) {
	dir := t.TempDir()
	l := newLoader(dir, Options{Node: "n1"})
	for i, tt := range []struct{ target, action, want string }{
		{"n", "DNY", "n"}, {"m", "DNY", "m"}, // it never was good
		{"green", "DENY", "green"}, {"b", "DNY", "b green"}, {"c", "DNY", "c green"}, {"green", "DNY", "green"}, {"d", "DENY", "d"}, {"e", "DNY", "d e"}, {"e", "DENY", "e"},
	} {
		write(t, dir, "x.yaml", strings.NewReplacer("green", tt.target, "DENY", tt.action).Replace(guardFilter))
		m, problems := read(t, l)
		var is []string
		for _, n := range m.Filters[0].Targets {
			is = append(is, n.Name)
		}
		if slices.Sort(is); strings.Join(is, " ") != tt.want {
			t.Errorf("form %d: governs %s, want %s: %v", i, is, tt.want, problems)
		}
	}
}

// TestKeptGivesWay: what is kept gives way to the same object in another file, and to a pod that has its address.
func TestKeptGivesWay(t *testing.T) {
	dir := t.TempDir()
	l := newLoader(dir, Options{Node: "n1"})
	write(t, dir, "a.yaml", guardFilter+"---\n"+guardPod)
	read(t, l)
	write(t, dir, "a.yaml", "{")
	write(t, dir, "b.yaml", strings.Replace(guardFilter, "DENY", "ALLOW", 1)+"---\n"+strings.Replace(guardPod, "name: web-1", "name: web-2", 1))
	m, p := read(t, l)
	if len(m.Filters) != 1 || m.Filters[0].Invalid != "" || m.Filters[0].RBAC.Deny || len(m.Endpoints) != 1 || m.Endpoints[0].Pod != "web-2" {
		t.Errorf("%+v %+v %v", m.Filters, m.Endpoints, p)
	}
}

// docs are the documents of a text by what they say, as another reader has them: identity to values.
func docsOf(text string) map[string][]string {
	out := map[string][]string{}
	for _, doc := range strings.Split("\n"+text, "\n---") {
		var v map[string]any
		if err := yaml.Unmarshal([]byte(doc), &v); err != nil {
			out["none"] = append(out["none"], "")
		}
		if v == nil {
			continue
		}
		meta, _ := v["metadata"].(map[string]any)
		b, err := json.Marshal(v)
		if err != nil {
			continue
		}
		id := fmt.Sprint(v["kind"], " ", meta["namespace"], "/", meta["name"])
		if v["kind"] == "Node" {
			id = fmt.Sprint(v["kind"], " ", meta["name"])
		}
		out[id] = append(out[id], fmt.Sprint(v["apiVersion"])+string(b))
	}
	return out
}

// parts are a mesh's objects by the identity of the documents they are of.
func parts(m *model.Mesh) map[string][]any {
	out := map[string][]any{}
	add := func(v any, kind, namespace, name string) {
		id := gamma.Label(kind, namespace, name)
		out[id] = append(out[id], v)
	}
	for _, e := range m.Endpoints {
		add(e, "Pod", e.Service.Namespace, e.Pod)
	}
	for _, w := range m.Workloads {
		add(w, "Pod", w.Namespace, w.Name)
	}
	for _, s := range m.Services {
		add(s, "Service", s.Name.Namespace, s.Name.Name)
	}
	for _, r := range m.Routes {
		add(r, r.Kind.String(), r.Namespace, r.Name)
	}
	for _, f := range m.Filters {
		add(f, "HTTPFilter", f.Namespace, f.Name)
	}
	for _, p := range m.Policies {
		add(p, "EndpointPolicy", p.Namespace, p.Name)
	}
	for _, n := range m.Catalog {
		add(n, "ServiceAccount", n.Namespace, n.Name)
	}
	for _, r := range m.Retained {
		add(r, "ServiceAccount", r.Service.Namespace, r.Service.Name)
	}
	return out
}

// asClosed: is lets through no more than was, of a filter or route that is refused as a whole.
func asClosed(was, is any) bool {
	switch is := is.(type) {
	case model.HTTPFilter:
		if was := was.(model.HTTPFilter); is.Invalid != "" {
			return is.Scope == was.Scope && !slices.ContainsFunc(was.Targets, func(t model.ServiceName) bool { return !slices.Contains(is.Targets, t) })
		}
	case model.Route:
		if was := was.(model.Route); !slices.ContainsFunc(is.Rules, func(r model.Rule) bool { return r.Invalid == "" }) {
			return !slices.ContainsFunc(was.Parents, func(p model.ParentRef) bool { return !slices.Contains(is.Parents, p) })
		}
	}
	return reflect.DeepEqual(was, is)
}

// slip makes one mistake in a text, as editors, copies and merges do.
func (g *generator) slip(text string) string {
	at := g.IntN(len(text) + 1)
	lines := strings.SplitAfter(text, "\n")
	line := g.IntN(len(lines))
	put := func(f func(string) string) string {
		lines[line] = f(lines[line])
		return strings.Join(lines, "")
	}
	pick := func(word string, with ...string) string {
		var all []int
		for i, l := range lines {
			if strings.Contains(l, word) {
				all = append(all, i)
			}
		}
		if len(all) == 0 {
			return text + "\n}\n"
		}
		line = all[g.IntN(len(all))]
		return put(func(l string) string { return strings.Replace(l, word, oneOf(g, with...), 1) })
	}
	switch g.IntN(14) {
	case 0, 1, 2:
		return text[:at]
	case 3:
		return put(func(l string) string { return "\t" + l })
	case 4:
		return put(func(l string) string { return strings.Replace(l, ": ", ": "+oneOf(g, "[", "{", "\"", "'"), 1) })
	case 5:
		return text[:at] + oneOf(g, "\xff", "\x00", "\x01") + text[at:]
	case 6:
		return strings.Join(lines[:line], "") + "<<<<<<< HEAD\n" + strings.Join(lines[line:], "") + "=======\n>>>>>>> x\n"
	case 7:
		return oneOf(g, "", "\n", "# gone\n", "---\n")
	case 8:
		return pick("kind: ", "kind: x", "knd: ", "Kind: ", "kind:")
	case 9:
		return pick("apiVersion: ", "apiVersion: x", "apiversion: ", "apiVersion: 1")
	case 10:
		return pick("name: ", "name: -", "name: _", "nam: ")
	case 11:
		return pick("namespace: ", "namespace: -", "namespace: a_")
	case 12: // the marker between two documents
		return pick("---", "--", "", "-- -")
	}
	return put(func(string) string { return "" }) // a line is gone
}

// TestRandomSlips: of random good directories, whatever mistakes are made in one file, each object whose
// document cannot be told any more is in force as it was; the file's good text brings all back, and its
// removal removes what it had.
func TestRandomSlips(t *testing.T) {
	rounds := testseed.Count(50, 250)
	lost, well := 0, 0
	first := 0
	if s := os.Getenv("SLIPS"); s != "" { // rounds, and the first one: more of the same
		if _, err := fmt.Sscan(s, &rounds, &first); err != nil {
			t.Fatal(err)
		}
	}
	for round := first; round < first+rounds; round++ {
		seed := uint64(round)
		g := &generator{Rand: rand.New(rand.NewPCG(seed, 45))}
		o := Options{Node: "n1", Domain: "aether.internal", TrustDomain: "td.test"}
		all := strings.Split(string(Dump(g.mesh())), "\n---\n")
		dir := t.TempDir()
		var names []string
		text := map[string]string{}
		for i := 0; i < len(all); {
			n := min(1+g.IntN(4), len(all)-i)
			name := fmt.Sprintf("f%03d.yaml", i)
			text[name] = strings.Join(all[i:i+n], "\n---\n") + "\n"
			names = append(names, name)
			write(t, dir, name, text[name])
			i += n
		}
		l := newLoader(dir, o)
		before, problems := read(t, l)
		good := parts(before)
		name := names[g.IntN(len(names))]
		was := docsOf(text[name])
		bad := text[name]
		for range 1 + g.IntN(2) {
			if bad = g.slip(bad); bad == "" {
				break
			}
		}
		write(t, dir, name, bad)
		after, told := read(t, l)
		is, have := docsOf(bad), parts(after)
		// What still says something else of the same name is an edit; so is a file whose last documents
		// are gone, between two lines, and one in which a mistake left nothing wrong.
		edited := false
		for id, values := range was {
			for _, v := range is[id] {
				edited = edited || !slices.Contains(values, v)
			}
		}
		for id := range is {
			edited = edited || was[id] == nil && id != "none" && id != "<nil> <nil>/<nil>" // another name, or namespace, that can be one
		}
		whole := strings.HasPrefix(text[name], bad) && len(is) > 0
		for id, values := range is {
			whole = whole && reflect.DeepEqual(values, was[id]) && !slices.Contains(values, "")
		}
		for id, list := range good {
			if edited || whole {
				well++
				break
			}
			if len(is[id]) < len(was[id]) {
				lost++
			}
			if !slices.EqualFunc(list, have[id], asClosed) {
				t.Fatalf("seed %d: %s is %+v, was %+v\nin %s:\n%s\nproblems: %v", seed, id, have[id], list, name, bad, told)
			}
		}
		write(t, dir, name, text[name])
		if m, p := read(t, l); !reflect.DeepEqual(m, before) || !reflect.DeepEqual(p, problems) {
			t.Fatalf("seed %d: its good text does not bring all back: %v", seed, p)
		}
		write(t, dir, name, bad)
		read(t, l)
		check(t, os.Remove(filepath.Join(dir, name)))
		m, _ := read(t, l)
		if fresh, _ := Load(dir, o); !reflect.DeepEqual(m, fresh) {
			t.Fatalf("seed %d: the file is gone, and there is %+v, without it %+v", seed, m, fresh)
		}
	}
	t.Logf("%d objects could not be told any more; %d of %d rounds left a text that reads well", lost, well, rounds)
	if lost < rounds/4 {
		t.Errorf("the mistakes lost %d objects only", lost)
	}
}

// heard is a Sink that passes on what it is told.
type heard struct {
	whole chan input.Batch
	how   chan input.Status
}

func (h *heard) Replace(b input.Batch) { h.whole <- b }
func (h *heard) Apply(input.Batch)     {}
func (h *heard) Report(s input.Status) { h.how <- s }

// TestFeedAtStart: a document that cannot be read when a process starts, and may be a policy, has nothing published,
// unless it is known what was in force; then that stays, as far as it is missing, and pods too.
func TestFeedAtStart(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "x.yaml", guardFilter+"---\n"+guardPod)
	good, _ := Load(dir, Options{Node: "n1"})
	before := &Before{Batch: input.FullBatch(good, nil, input.Settings{}), At: time.Date(2026, 11, 30, 1, 2, 3, 4, time.UTC)}
	longer := &Before{Batch: before.Batch, At: before.At}
	longer.Batch.Problems = map[string][]model.Problem{"HTTPFilter shop/guard": {{Since: before.At.Add(-time.Hour)}}}
	broken := strings.Replace(guardFilter, "spec:", "spec: [", 1)
	for name, tt := range map[string]struct {
		text   string
		before *Before
		held   string // where; empty: the whole state is told
	}{
		"good":                         {guardFilter, nil, ""},
		"a policy":                     {broken, nil, "x.yaml:"},
		"a policy, among others":       {svc("a") + "---\n" + broken + "---\n" + guardPod, nil, "x.yaml:"},
		"its kind":                     {strings.Replace(guardFilter, "HTTPFilter", "HttpFilter", 1), nil, "x.yaml:1"},
		"its kind is gone":             {strings.Replace(guardFilter, "kind: HTTPFilter\n", "", 1), nil, "x.yaml:1"},
		"its name":                     {strings.Replace(guardFilter, "name: guard", "name: gu_ard", 1), nil, "x.yaml:1"},
		"its targets":                  {strings.Replace(guardFilter, "targetRefs", "targetRef", 1), nil, "x.yaml:1"},
		"its scope and targets":        {strings.NewReplacer("scope:", "scop:", "targetRefs", "targetRef").Replace(guardFilter), nil, "x.yaml:1"},
		"a rule's that is refused":     {strings.NewReplacer("  scope: SCOPE_INBOUND\n", "", "  targetRefs: [{kind: Service, name: green}]\n", "", "DENY", "DNY").Replace(guardFilter), nil, ""},
		"a policy that is refused":     {strings.Replace(guardFilter, "DENY", "DNY", 1), nil, ""},
		"a route without parents":      {"apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r}\nspec: {parentRef: [{kind: Service, name: a}]}\n", nil, "x.yaml:1"},
		"a gateway's route":            {"apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r}\nspec: {parentRefs: [{name: a}]}\n", nil, ""},
		"foreign":                      {"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\n", nil, ""},
		"foreign and broken":           {"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x\n", nil, ""},
		"no object":                    {"replicas: 3\nimage: {{ .Values.image }}\n", nil, ""},
		"empty":                        {"", nil, ""},
		"a pod":                        {strings.Replace(guardPod, "spec:", "spec: [", 1), nil, ""},
		"all, and it is known":         {"{", before, ""},
		"all, and it stays for longer": {"{", longer, ""},
		"emptied, and it is known":     {"", before, ""},
		"the policy, and it is known":  {broken + "---\n" + guardPod, before, ""},
		"the targets, and it is known": {strings.Replace(guardFilter, "targetRefs", "targetRef", 1) + "---\n" + guardPod, before, ""},
		"the pod, and it is known":     {guardFilter + "---\n" + strings.Replace(guardPod, "status:", "state:", 1), before, ""},
		"removed":                      {svc("a"), before, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, "x.yaml", tt.text)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			sink := &heard{make(chan input.Batch, 8), make(chan input.Status, 8)}
			done := make(chan error, 1)
			go func() {
				done <- Feed(ctx, dir, Options{Node: "n1", Before: func(context.Context) *Before { return tt.before }}, input.Settings{}, sink)
			}()
			how := <-sink.how
			if how.Connected != (tt.held == "") || !strings.Contains(how.Err, tt.held) {
				t.Errorf("status %+v", how)
			}
			if tt.held != "" {
				if len(sink.whole) > 0 {
					t.Error("something is published")
				}
				write(t, dir, "x.yaml", guardFilter)
				if how := <-sink.how; !how.Connected {
					t.Errorf("mended: status %+v", how)
				}
			}
			b := <-sink.whole
			stop()
			check(t, <-done)
			m := &model.Mesh{}
			for _, list := range b.Filters {
				m.Filters = append(m.Filters, list...)
			}
			for _, list := range b.Workloads {
				m.Workloads = append(m.Workloads, list...)
			}
			if known := tt.before != nil && name != "removed"; known && (!closed(m) || !captured(m)) {
				t.Errorf("what was in force before the start is not: %+v %+v %v", m.Filters, m.Workloads, b.Problems)
			}
			if name == "removed" && len(m.Filters)+len(m.Workloads) > 0 {
				t.Errorf("what was removed is in force: %+v %+v", m.Filters, m.Workloads)
			}
			for of, since := range map[string]string{"all, and it is known": "2026-11-30T01:02:03Z", "all, and it stays for longer": "2026-11-30T00:02:03Z"} {
				if is := fmt.Sprint(b.Problems["HTTPFilter shop/guard"]); name == of && !strings.Contains(is, "kept as of "+since) {
					t.Errorf("%s, want since %s", is, since)
				}
			}
		})
	}
}

// TestNotReadAtStart: what cannot be read at all when a process starts may have anything that was in force, as a document
// that is no YAML may; a device is no file of ours.
func TestNotReadAtStart(t *testing.T) {
	good := t.TempDir()
	write(t, good, "x.yaml", guardFilter+"---\n"+guardPod)
	m, _ := Load(good, Options{Node: "n1"})
	before := Before{Batch: input.FullBatch(m, nil, input.Settings{}), At: time.Now()}
	link := func(to, name string) func(*testing.T, string) {
		return func(t *testing.T, dir string) { check(t, os.Symlink(to, filepath.Join(dir, name))) }
	}
	deep := strings.Repeat("d"+string(filepath.Separator), maxDirDepth+1)
	for name, tt := range map[string]struct {
		make  func(*testing.T, string)
		where string // what the status names; empty: it is read
	}{
		"a link to nowhere":      {link("/nowhere/x.yaml", "x.yaml"), "x.yaml"},
		"a link to no directory": {link("/nowhere/conf", "conf"), "conf"},
		"a link to itself":       {link("x.yaml", "x.yaml"), "x.yaml"},
		"too large": {func(t *testing.T, dir string) {
			write(t, dir, "x.yaml", strings.Repeat("# .............\n", 1+maxFileSize/16))
		}, "x.yaml"},
		"too deep":                         {func(t *testing.T, dir string) { check(t, os.MkdirAll(filepath.Join(dir, deep), 0o700)) }, "d/d"},
		"a device, as of what is left out": {link(os.DevNull, "x.yaml"), ""},
		"a file of another kind":           {func(t *testing.T, dir string) { write(t, dir, "x.txt", "{") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			tt.make(t, dir)
			l := newLoader(dir, Options{Node: "n1"})
			read(t, l)
			if got := l.unsure(); (got == "") != (tt.where == "") || !strings.HasPrefix(got, tt.where) || l.whole != (tt.where == "") {
				t.Errorf("nothing is known of before: %q, whole %t", got, l.whole)
			}
			l = newLoader(dir, Options{Node: "n1"})
			l.before = &before
			m, problems := read(t, l)
			if kept := closed(m) && captured(m); kept != (tt.where != "") {
				t.Errorf("what was in force before the start is kept: %t: %v", kept, problems)
			}
			// Once it can be read, what is not in it has gone.
			check(t, os.RemoveAll(filepath.Join(dir, strings.SplitN(cmp.Or(tt.where, "x.yaml"), "/", 2)[0])))
			if m, problems := read(t, l); len(m.Filters)+len(m.Workloads)+len(problems) > 0 || !l.whole {
				t.Errorf("it has gone: %+v %+v %v, whole %t", m.Filters, m.Workloads, problems, l.whole)
			}
		})
	}
	t.Run("more files than are read", func(t *testing.T) {
		dir := t.TempDir()
		write(t, dir, "x.yaml", guardFilter)
		s := scan{files: map[string]*parsed{}, old: map[string]*parsed{}}
		for i := range maxFiles {
			s.files[fmt.Sprint(i)] = &parsed{}
		}
		s.file("x.yaml", filepath.Join(dir, "x.yaml"))
		if !slices.Equal(s.unread, []string{"x.yaml"}) {
			t.Errorf("%v", s.unread)
		}
	})
}

// TestRemovedWhileOtherIsDoubtful: what was in force before the start, has been told since and is removed with its file
// is not kept for the sake of a document elsewhere that cannot be told.
func TestRemovedWhileOtherIsDoubtful(t *testing.T) {
	route := "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: r, namespace: shop}\nspec: {parentRefs: [{kind: Service, group: '', name: green}], rules: [{backendRefs: [{name: green, port: 80}]}]}\n"
	policy := "apiVersion: config.aether.io/v1\nkind: EndpointPolicy\nmetadata: {name: p, namespace: shop}\nspec: {targetRef: {kind: Service, name: green}, udsSocket: {volume: v, file: s}}\n"
	far := strings.NewReplacer("web-1", "web-2", "10.1.0.1", "10.1.0.2", "n1", "n2").Replace(guardPod)
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("a"))
	write(t, dir, "b.yaml", strings.Join([]string{svc("b"), guardFilter, guardPod, route, policy, far}, "---\n"))
	was, problems := Load(dir, Options{Node: "n1"})
	if len(was.Services) != 2 || len(was.Filters) != 1 || len(was.Routes) != 1 || len(was.Workloads) != 1 || len(was.Endpoints) != 2 {
		t.Fatalf("%+v %v", was, problems)
	}
	write(t, dir, "a.yaml", "{")
	l := newLoader(dir, Options{Node: "n1"})
	l.before = &Before{Batch: input.FullBatch(was, nil, input.Settings{}), At: time.Now()}
	if m, _ := read(t, l); services(m) != services(was) {
		t.Fatalf("at the start: %s", services(m))
	}
	check(t, os.Remove(filepath.Join(dir, "b.yaml")))
	m, problems := read(t, l)
	if services(m) != "a" || len(m.Filters)+len(m.Routes)+len(m.Workloads)+len(m.Endpoints)+len(m.Policies) > 0 {
		t.Errorf("b.yaml is removed: %+v %v", m, problems)
	}
	if l.whole {
		t.Error("a.yaml can be told")
	}
}

// TestToldWholeOnce: that the last file can be told is told, although it changes nothing else.
func TestToldWholeOnce(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "x.yaml", "")
	pods := make(chan Local, 8)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- Feed(ctx, dir, Options{Node: "n1", OnPods: func(l Local) { pods <- l }}, input.Settings{}, &settled{make(chan input.Batch, 8)})
	}()
	if l := <-pods; !l.Partial {
		t.Error("an emptied file may have a pod")
	}
	check(t, os.Remove(filepath.Join(dir, "x.yaml")))
	if l := <-pods; l.Partial {
		t.Error("there is no file that cannot be told")
	}
	stop()
	check(t, <-done)
}

// TestOthersKinds: kinds of other groups are others', near as their group or name may be; a slip in ours is one.
func TestOthersKinds(t *testing.T) {
	for _, tt := range []struct {
		version, kind string
		foreign       bool
	}{
		{"gateway.networking.x-k8s.io/v1alpha1", "XBackendTrafficPolicy", true},
		{"gateway.networking.x-k8s.io/v1alpha1", "XListenerSet", true},
		{"policy.linkerd.io/v1beta3", "HTTPRoute", true},
		{"specs.smi-spec.io/v1alpha4", "TCPRoute", true},
		{"serving.knative.dev/v1", "Service", true},
		{"apps/v1", "Deployment", true},
		{"gateway.networking.k8s.io/v1", "Gateway", true},
		{"gateway.networking.k8s.io/v1", "HTTPRoute", false},
		{"gateway.networking.x-k8s.io/v1", "HTTPRoute", false},
		{"gateway.netwrking.k8s.io/v1", "HTTPRoute", false},
		{"networking.k8s.io/v1", "HTTPRoute", false},
		{"gateway/v1", "HTTPRoute", false},
		{"gateway.networking.k8s.io/v1", "HttpRoutes", false},
		{"aether.io/v1", "HTTPFilter", false},
		{"config.aether.oi/v1", "HTTPFilter", false},
		{"", "Service", false},
	} {
		if got := foreign(tt.version, tt.kind); got != tt.foreign {
			t.Errorf("%s %s: foreign %t", tt.version, tt.kind, got)
		}
	}
}
