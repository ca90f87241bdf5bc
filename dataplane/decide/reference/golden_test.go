package reference_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"aether/dataplane/decide/reference"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
)

// TestGolden: the reference gives the verdicts of decide's golden files, which
// people have read against the contract. So that both are not wrong alike.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("../testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden files: %v", err)
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(filepath.Base(name), func(t *testing.T) { golden(t, string(text)) })
	}
}

func golden(t *testing.T, text string) {
	_, rest, _ := strings.Cut(text, "-- mesh --\n")
	mesh, rest, _ := strings.Cut(rest, "-- problems --\n")
	_, cases, ok := strings.Cut(rest, "-- cases --\n")
	if !ok {
		t.Fatal("no cases")
	}
	m := modeltest.Mesh(t, mesh)
	var question, want, gateway string
	asked := 0
	check := func() {
		if want == "" || strings.Contains(question, " draining") { // that is a state of the process: no mesh says it
			return
		}
		for m.Semantics = range model.GatewayAPI + 1 {
			want := want
			if m.Semantics == model.GatewayAPI && gateway != "" {
				want = gateway
			}
			asked++
			if got := goldenAnswer(t, m, question); got != firstLine(want) {
				t.Errorf("%s (%s)\nreference: %s\ngolden:    %s", question, m.Semantics, got, want)
			}
		}
	}
	for line := range strings.SplitSeq(cases, "\n") {
		kind, verdict, _ := strings.Cut(line, " ")
		switch {
		case kind == "=":
			want = verdict
		case kind == "g=":
			gateway = verdict
		case strings.HasPrefix(line, "#"), len(strings.TrimPrefix(kind, "g")) < 2: // words, or a detail of the verdict
		default:
			check()
			question, want, gateway = line, "", ""
		}
	}
	check()
	t.Logf("%d verdicts", asked)
	if asked == 0 {
		t.Error("no case was read: has the form of the file changed?")
	}
}

// firstLine is a verdict without the object that said so, which the reference does
// not name.
func firstLine(verdict string) string {
	head, reason, ok := strings.Cut(verdict, " (")
	if !ok {
		return verdict
	}
	reason, _, _ = strings.Cut(strings.TrimSuffix(reason, ")"), " ")
	return head + " (" + reason + ")"
}

// goldenAnswer asks as decide.Explain does: the connection, what it is once it
// has been looked at, and then the request.
func goldenAnswer(t *testing.T, m *model.Mesh, question string) string {
	t.Helper()
	flow, request, isRequest := strings.Cut(question, " | ")
	var pick uint32
	var words []string
	for _, w := range strings.Fields(flow) {
		if v, ok := strings.CutPrefix(w, "pick="); ok {
			x, err := strconv.ParseFloat(v, 64)
			if err != nil {
				t.Fatal(err)
			}
			pick = uint32(x * (1 << 32))
			continue
		}
		words = append(words, w)
	}
	f, err := model.ParseFlow(strings.Join(words, " "))
	if err != nil {
		t.Fatal(err)
	}
	a := reference.Connection(m, &f, pick)
	if isRequest {
		h, err := model.ParseRequest(request)
		if err != nil {
			t.Fatal(err)
		}
		if a.Action == "await" {
			f.Waited = true
			a = reference.Connection(m, &f, pick)
		}
		if a.Action == "sniff" {
			f.Sniff, f.Host = model.SniffHTTP11, string(h.Authority)
			a = reference.Connection(m, &f, pick)
		}
		if a.Action == "serve" || a.Action == "deliver" && strings.Contains(a.Deliver, "http") {
			a = reference.Request(m, &f, &h, pick)
		}
	}
	out := a.Action
	for _, w := range []string{"race", "hello", "wait", "status", "backend", "deliver"} {
		switch {
		case w == "race" && a.Race, w == "hello" && a.HelloOnly:
			out += " " + w
		case w == "wait" && a.Wait != 0:
			out += " " + a.Wait.String()
		case w == "status" && a.Status != 0:
			out += " " + strconv.Itoa(a.Status)
		case w == "backend" && a.Backend != "":
			out += " " + a.Backend
		case w == "deliver" && a.Deliver != "":
			out += " " + a.Deliver
		}
	}
	return fmt.Sprintf("%s (%s)", out, a.Reason)
}
