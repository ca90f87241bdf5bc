package decide_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

var update = flag.Bool("update", false, "rewrite the verdicts in testdata")

// TestGolden runs the files of testdata. Each has sections:
//
//	-- mesh --      the mesh, as modeltest reads it
//	-- problems --  what compile says of it: "object: reason"
//	-- cases --     one question a line, and its verdict behind an "= ":
//
//	shop/web > 10.96.0.1:8080                      Decide
//	shop/web > 10.96.0.1:8080 | GET cart:8080/     Explain: the connection, and if it is served the request
//	... pick=0.9 before the bar: the random number of a weighted split, as a share
//
// After the verdict of a request stand, each on its line, the body of a refusal
// (~) and the fields a filter leaves (> request, < response).
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
				if !strings.HasPrefix(want[i], "= ") {
					question = want[i]
				}
			}
			t.Fatalf("%d lines, want %d; run with -update and look at the difference", len(got), len(want))
		})
	}
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
	snap, problems := compile.Compile(modeltest.Mesh(t, mesh))
	snap = snap.WithVersion(7)
	var b strings.Builder
	b.WriteString(head + "-- mesh --\n" + mesh + "-- problems --\n")
	for _, p := range problems {
		fmt.Fprintf(&b, "%s: %s\n", p.Object, p.Reason)
	}
	b.WriteString("-- cases --\n")
	for line := range strings.SplitAfterSeq(cases, "\n") {
		text := strings.TrimSuffix(line, "\n")
		switch {
		case strings.HasPrefix(text, "= "), strings.HasPrefix(text, "~ "), strings.HasPrefix(text, "> "), strings.HasPrefix(text, "< "):
			continue // written anew
		case strings.TrimSpace(text) == "", strings.HasPrefix(text, "#"):
			b.WriteString(line)
			continue
		}
		b.WriteString(text + "\n" + answer(t, snap, text))
	}
	return b.String()
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
		return "= " + decide.Decide(snap, &f, nil).String() + "\n"
	}
	r, err := model.ParseRequest(reqText)
	if err != nil {
		t.Fatal(err)
	}
	v, _ := decide.Explain(snap, &f, &r)
	if pick != 0 {
		v = decide.Route(snap, &f, &r, uint32(pick*(1<<32)), nil)
	}
	out := "= " + v.String() + "\n"
	if v.Text != "" && v.Action == decide.Refuse {
		out += "~ " + v.Text
	}
	before := fields(&r)
	v.ApplyRequest(&r)
	if after := fields(&r); after != before {
		out += "> " + after + "\n"
	}
	resp := httpmsg.Head{Status: 200, Fields: []httpmsg.Field{{Name: []byte("server"), Value: []byte("app")}}}
	before = fields(&resp)
	v.ApplyResponse(&resp)
	if after := fields(&resp); after != before {
		out += "< " + after + "\n"
	}
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
