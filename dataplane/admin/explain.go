package admin

import (
	"fmt"
	"net/http"
	"strings"

	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Explanation is what becomes of a flow, and of a request on it, and why. In JSON
// the names are a promise to scripts; new ones may be added.
type Explanation struct {
	// Flow and Request are what was asked about, in the text forms of package model.
	Flow    string `json:"flow"`
	Request string `json:"request,omitempty"`

	// Verdict is decide.Verdict's text; the fields after it are its parts.
	Verdict string `json:"verdict"`
	Action  string `json:"action"`
	Reason  string `json:"reason"`
	Rule    string `json:"rule,omitempty"`
	Status  int    `json:"status,omitempty"`
	Backend string `json:"backend,omitempty"`
	// Text is what a refused client reads.
	Text string `json:"text,omitempty"`

	// Snapshot is the version of the snapshot that was asked; 0: it has none.
	Snapshot uint64 `json:"snapshot"`
	// Steps are what was looked at, in order.
	Steps []string `json:"steps"`
	// Advice is there where something is refused.
	Advice *Advice `json:"advice,omitempty"`
}

// Explain asks the decision core about flow and, where request is not empty,
// about that request on it; both in the text forms of package model. An error says
// what of them cannot be read.
func Explain(s *snapshot.Snapshot, flow, request string) (*Explanation, error) {
	f, err := model.ParseFlow(flow)
	if err != nil {
		return nil, err
	}
	var head *httpmsg.Head
	if request != "" {
		h, err := model.ParseRequest(request)
		if err != nil {
			return nil, err
		}
		head = &h
	}
	return ExplainFlow(s, &f, head), nil
}

// ExplainFlow is Explain for values. r may be nil: no request is asked about.
func ExplainFlow(s *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head) *Explanation {
	v, t := decide.Explain(s, f, r)
	e := &Explanation{
		Flow: f.String(), Verdict: v.String(), Action: v.Action.String(), Reason: v.Reason.String(), Rule: v.Rule,
		Status: v.Status, Text: v.Text, Snapshot: s.Version(), Steps: make([]string, len(t.Steps)), Advice: advise(s, f, r, &v),
	}
	if r != nil {
		e.Request = model.RequestString(r)
	}
	if v.Backend != nil {
		e.Backend = v.Backend.Name
	}
	for i := range t.Steps {
		e.Steps[i] = t.Steps[i].Text
	}
	return e
}

// String is the explanation for people: the verdict, the steps, and for what is refused
// the text that the client reads and what would have worked.
func (e *Explanation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", e.Verdict)
	for i, s := range e.Steps {
		fmt.Fprintf(&b, "%3d. %s\n", i+1, s)
	}
	if e.Text != "" {
		fmt.Fprintf(&b, "the client reads: %s\n", strings.TrimSuffix(e.Text, "\n"))
	}
	if e.Advice != nil {
		b.WriteString(e.Advice.String())
	}
	return b.String()
}

func (a *admin) explain(w http.ResponseWriter, r *http.Request) {
	e, err := Explain(a.Node.Snapshot(), r.FormValue("flow"), r.FormValue("request"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if wantsJSON(r) {
		writeJSON(w, e)
		return
	}
	text(w)
	fmt.Fprint(w, e)
}
