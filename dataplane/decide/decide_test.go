package decide_test

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
	"aether/e2e/counts"
)

var update = flag.Bool("update", false, "rewrite the verdicts in testdata")

// TestGolden runs the files of testdata. Each has sections:
//
//	-- mesh --      the mesh, as modeltest reads it
//	-- problems --  what compile says of it: "object: reason"
//	-- cases --     one question a line, and behind it its answer
//
// A question is a connection, or a connection and the first request on it, which is
// asked about if the connection is served:
//
//	shop/web > 10.96.0.1:8080
//	shop/web > 10.96.0.1:8080 | GET cart:8080/
//	... pick=0.9 before the bar: the random number of a weighted split, as a share
//	... draining: the process is leaving
//
// The answer is the verdict behind an "= ", and then, each on its line, what of
// this there is:
//
//	~ the body of a refusal
//	> fields of the request after the rule's changes      < fields of the answer (which had server=app)
//	@ authority and path after the rule's changes         L the Location of a redirection
//	E the pods that one is picked from, where selection fields leave some out
//	R timeouts, retry, session persistence of the rule    M its mirrors
//	A the filter whose authorization service is asked, and a second path that it is asked about
//
// With a g before it: the same under routeSemantics GatewayAPI, where it differs.
//
// A comment "# [4.3a] words" begins the cases of a section of the contract;
// TestSections counts them.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden files: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			in, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			out := golden(t, string(in))
			if out == string(in) {
				return
			}
			if *update {
				if err := os.WriteFile(file, []byte(out), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, got := strings.Split(string(in), "\n"), strings.Split(out, "\n")
			question := ""
			for i := range min(len(want), len(got)) {
				if want[i] != got[i] {
					t.Fatalf("line %d, after %q:\ngot  %s\nwant %s", i+1, question, got[i], want[i])
				}
				if !isAnswer(want[i]) {
					question = want[i]
				}
			}
			t.Fatalf("%d lines, want %d; run with -update and look at the difference", len(got), len(want))
		})
	}
}

// isAnswer: the line is written anew.
func isAnswer(line string) bool {
	line = strings.TrimPrefix(line, "g")
	return len(line) > 1 && line[1] == ' ' && strings.ContainsRune("=~><@LERMA", rune(line[0]))
}

// golden is in, with the problems and verdicts of today.
func golden(t *testing.T, in string) string {
	t.Helper()
	head, rest, ok1 := strings.Cut(in, "-- mesh --\n")
	mesh, rest, ok2 := strings.Cut(rest, "-- problems --\n")
	_, cases, ok3 := strings.Cut(rest, "-- cases --\n")
	if !ok1 || !ok2 || !ok3 {
		t.Fatal("sections mesh, problems, cases are needed in this order")
	}
	m := modeltest.Mesh(t, mesh)
	record, problems := compile.Compile(m)
	other := *m
	other.Semantics = model.GatewayAPI
	gateway, problems2 := compile.Compile(&other)
	if a, b := fmt.Sprint(problems), fmt.Sprint(problems2); a != b {
		t.Errorf("problems differ with the semantics:\n%s\n%s", a, b)
	}
	record, gateway = record.WithVersion(7), gateway.WithVersion(7)
	var b strings.Builder
	b.WriteString(head + "-- mesh --\n" + mesh + "-- problems --\n")
	for _, p := range problems {
		fmt.Fprintf(&b, "%s: %s\n", p.Object, p.Reason)
	}
	b.WriteString("-- cases --\n")
	for line := range strings.SplitAfterSeq(cases, "\n") {
		text := strings.TrimSuffix(line, "\n")
		switch {
		case isAnswer(text):
			continue
		case strings.TrimSpace(text) == "", strings.HasPrefix(text, "#"):
			b.WriteString(line)
			continue
		}
		a, g := answer(t, record, text), answer(t, gateway, text)
		b.WriteString(text + "\n" + a)
		if a != g {
			for line := range strings.Lines(g) {
				b.WriteString("g" + line)
			}
		}
	}
	return b.String()
}

// ask is Explain with a pick. connection: the verdict is one on the connection.
func ask(snap *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head, pick uint32) (v decide.Verdict) {
	if v = decide.Decide(snap, f, pick, nil); r == nil {
		return v
	}
	if v.Action == decide.Await {
		f.Waited = true
		v = decide.Decide(snap, f, pick, nil)
	}
	if v.Action == decide.Sniff {
		f.Sniff, f.Host = model.SniffHTTP11, string(r.Authority)
		v = decide.Decide(snap, f, pick, nil)
	}
	if v.Action == decide.Serve || v.Action == decide.Deliver && v.Deliver.Class == model.HTTP {
		v = decide.Route(snap, f, r, pick, nil)
	}
	return v
}

func answer(t *testing.T, snap *snapshot.Snapshot, question string) string {
	t.Helper()
	flowText, reqText, hasReq := strings.Cut(question, " | ")
	pick := 0.0
	if a, p, ok := strings.Cut(flowText, " pick="); ok {
		if _, err := fmt.Sscan(p, &pick); err != nil {
			t.Fatalf("%s: %v", question, err)
		}
		flowText = a
	}
	flowText, draining := strings.CutSuffix(flowText, " draining")
	if draining {
		snap = snap.WithDraining(true)
	}
	f, err := model.ParseFlow(flowText)
	if err != nil {
		t.Fatal(err)
	}
	if !hasReq {
		v := decide.Decide(snap, &f, uint32(pick*(1<<32)), nil)
		return "= " + v.String() + "\n" + narrowed(snap, &v)
	}
	r, err := model.ParseRequest(reqText)
	if err != nil {
		t.Fatal(err)
	}
	explained, _ := decide.Explain(snap, &f, &r)
	v := ask(snap, &f, &r, uint32(pick*(1<<32)))
	// Of an authority that is none, or has an empty port, explain has the codec's answer, which Route is not asked for.
	if a, _, ok := httpmsg.Authority(r.Authority); ok && len(a) == len(r.Authority) && pick == 0 && v != explained {
		t.Errorf("%s: %s, explained %s", question, v, explained)
	}
	return told(snap, &f, &r, &v)
}

// told is the verdict on a request and all that comes of it, in the form of
// TestGolden; without a snapshot, but for the pods. r is changed.
func told(snap *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head, v *decide.Verdict) string {
	var b strings.Builder
	fmt.Fprintf(&b, "= %s\n", v)
	if v.Text != "" && v.Action == decide.Refuse {
		b.WriteString("~ " + v.Text)
	}
	if v.Pipe != nil && v.Pipe.Authz != nil {
		fmt.Fprintf(&b, "A %s", v.Pipe.Authz.Name)
		if p := v.AuthzPath(r); p != nil {
			fmt.Fprintf(&b, " and as %s", p)
		}
		b.WriteByte('\n')
	}
	switch v.Reason {
	case decide.Redirect:
		fmt.Fprintf(&b, "L %s\n", v.Location(nil, f, r))
	case decide.CORSPreflight:
		var h httpmsg.Head
		v.AppendPreflight(&h, r)
		if len(h.Fields) > 0 {
			fmt.Fprintf(&b, "< %s\n", fields(&h))
		}
	}
	origin := v.Origin(r)
	before, target := fields(r), string(r.Authority)+string(r.Path)
	v.ApplyRequest(r, nil)
	if after := fields(r); after != before {
		b.WriteString("> " + after + "\n")
	}
	if after := string(r.Authority) + string(r.Path); after != target {
		b.WriteString("@ " + after + "\n")
	}
	resp := httpmsg.Head{Status: 200, Fields: []httpmsg.Field{{Name: []byte("server"), Value: []byte("app")}}}
	before = fields(&resp)
	v.ApplyResponse(&resp, origin)
	if after := fields(&resp); after != before {
		b.WriteString("< " + after + "\n")
	}
	if snap != nil {
		b.WriteString(narrowed(snap, v))
	}
	if m := v.Matched; m != nil && v.Action == decide.Forward {
		var of []string
		if m.Timeouts.Request != 0 {
			of = append(of, "request="+m.Timeouts.Request.String())
		}
		if m.Timeouts.Backend != 0 {
			of = append(of, "attempt="+m.Timeouts.Backend.String())
		}
		if m.Retry != nil {
			of = append(of, fmt.Sprintf("retry=%+v", *m.Retry))
		}
		if m.Persistence != nil {
			of = append(of, fmt.Sprintf("sticky=%+v", *m.Persistence))
		}
		if len(of) > 0 {
			b.WriteString("R " + strings.Join(of, " ") + "\n")
		}
	}
	if v.Pipe != nil && len(v.Pipe.Mirrors) > 0 && v.Action == decide.Forward {
		b.WriteString("M")
		for _, m := range v.Pipe.Mirrors {
			fmt.Fprintf(&b, " %s*%d/%d", m.Backend.Name, m.Numerator, m.Denominator)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// narrowed names the pods that one is picked from, where these are not all of the backend's.
func narrowed(snap *snapshot.Snapshot, v *decide.Verdict) string {
	if v.Action != decide.Forward || v.Pinned == nil && v.Set == snap.Endpoints(v.Backend) {
		return ""
	}
	return "E " + strings.Join(pods(v), " ") + "\n"
}

// pods are those that may be picked, in order.
func pods(v *decide.Verdict) (out []string) {
	if v.Pinned != nil {
		return []string{v.Pinned.Pod}
	}
	for _, l := range v.Set.Levels() {
		for _, i := range l.Index {
			out = append(out, v.Set.At(i).Pod)
		}
	}
	slices.Sort(out)
	return out
}

func fields(h *httpmsg.Head) string {
	var b bytes.Buffer
	for i, f := range h.Fields {
		if i > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%s=%s", f.Name, f.Value)
	}
	return b.String()
}

// sections are those of the contract that a case must stand for.
var sections = []string{
	"4.2", "4.3a", "4.3b", "4.4", "4.5", "4.6", "4.7", "4.8", "4.9", "4.10", "4.11", "4.12", "4.13", "4.14",
	"5.10", "6.2", "6.4", "10.1", "10.2", "10.3", "10.4", "10.5", "10.6", "10.7", "13",
}

var sectionMark = regexp.MustCompile(`^# \[(\d+(?:\.\d+)?[a-z]?)[\] ]`)

// TestSections: every section has its cases, and every case its section.
func TestSections(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	count, both := map[string]int{}, map[string]int{}
	total := 0
	for _, file := range files {
		in, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, cases, _ := strings.Cut(string(in), "-- cases --\n")
		section := ""
		for line := range strings.SplitSeq(cases, "\n") {
			switch m := sectionMark.FindStringSubmatch(line); {
			case m != nil:
				section = m[1]
			case strings.HasPrefix(line, "g= "):
				both[section]++
			case strings.TrimSpace(line) == "", strings.HasPrefix(line, "#"), isAnswer(line):
			case section == "":
				t.Errorf("%s: %q stands under no section: begin with a comment like # [4.3a]", file, line)
			default:
				count[section]++
				total++
			}
		}
	}
	order := slices.Clone(sections)
	for s := range count {
		if !slices.Contains(order, s) {
			order = append(order, s)
		}
	}
	var table strings.Builder
	for _, s := range order {
		fmt.Fprintf(&table, "%-6s %4d cases, %3d that differ with the semantics\n", s, count[s], both[s])
		if count[s] == 0 {
			t.Errorf("section %s of the contract has no case", s)
		}
	}
	t.Log(table.String())
	line := ""
	for _, s := range order {
		line += fmt.Sprintf(" %s:%d", s, count[s])
	}
	counts.Say(t, "%d golden cases in %d files, by section of the contract:%s", total, len(files), line)
	if extra := cmp.Compare(len(count), len(sections)); extra > 0 {
		t.Errorf("cases stand under sections that are not listed: %v", order[len(sections):])
	}
}
