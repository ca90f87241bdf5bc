// Package reference answers the questions of package decide again, slowly and
// in plain sight, so that the two can be compared over random meshes.
//
//   - It reads the model alone, anew for every question: there is nothing that is
//     compiled, indexed, shared or remembered.
//   - One small function a table or section of the contract, which it names.
//   - It shares no code with decide or compile but the values of model and httpmsg,
//     and judges for itself what they judge: classes, port maps, names, precedence,
//     spellings.
//   - An Answer is plain text in fields: two answers are the same when their
//     String is.
//
// It knows no socket, no snapshot and no speed, and serves tests only.
package reference

import (
	"fmt"
	"strings"
	"time"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
)

// Answer is what becomes of a connection or a request, in words. What does not
// belong to the action is empty.
type Answer struct {
	Action string // the names of decide.Action
	Reason string // the names of decide.Reason

	Race      bool          // of a sniff: the dialled address is dialled meanwhile
	Wait      time.Duration // of a sniff: how long the client may be silent; 0: no limit of its own
	HelloOnly bool          // of a sniff: only whether it is a ClientHello matters

	Status int    // of a refusal or reply of a request; 0: the connection is closed
	Header string // x-aether-error

	Backend     string   // of a forward: "ns/svc:port", the pods' port
	Endpoints   []string // of a forward: "pod@priority", those that may be picked, ascending
	Authority   string   // of a forwarded request, after edits; so are Path and Request
	Path        string
	Request     []string // fields, "name=value", ascending by name, lines of one name in order
	Response    []string // of the sample answer (SampleResponse), after edits; of a redirect, too
	Timeouts    string
	Retry       string
	Persistence string
	Mirrors     []string // "ns/svc:port 1/10", in order

	Authz     string // the HTTPFilter that asks the authorization service; "": nobody does
	AuthzPath string // the path it is asked about, too; "": the request's alone

	Location string   // of a redirect
	Reply    []string // fields of a preflight's answer, ascending

	Deliver string // of a delivery: "8080 http h2c"
	Socket  string // of a delivery to a Unix socket: its path
}

// String is a line a fact: two answers are the same when their strings are.
func (a Answer) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s (%s)", a.Action, a.Reason)
	word := func(name string, v any) {
		if s := fmt.Sprint(v); s != "" && s != "0" && s != "false" && s != "[]" && s != "0s" {
			fmt.Fprintf(&b, "\n  %s: %s", name, s)
		}
	}
	list := func(name string, of []string) {
		for _, v := range of {
			fmt.Fprintf(&b, "\n  %s: %q", name, v)
		}
	}
	word("race", a.Race)
	word("wait", a.Wait)
	word("hello only", a.HelloOnly)
	word("status", a.Status)
	word("x-aether-error", a.Header)
	word("deliver", a.Deliver)
	word("socket", a.Socket)
	word("backend", a.Backend)
	word("endpoints", a.Endpoints)
	word("authority", a.Authority)
	word("path", a.Path)
	list("request", a.Request)
	list("response", a.Response)
	word("timeouts", a.Timeouts)
	word("retry", a.Retry)
	word("persistence", a.Persistence)
	list("mirror", a.Mirrors)
	word("authz", a.Authz)
	word("authz path", a.AuthzPath)
	word("location", a.Location)
	list("reply", a.Reply)
	return b.String()
}

// SampleResponse is the answer that response edits are shown on.
func SampleResponse() *httpmsg.Head {
	return &httpmsg.Head{Status: 200, Fields: []httpmsg.Field{
		{Name: []byte("server"), Value: []byte("app")},
		{Name: []byte("x-a"), Value: []byte("1")},
		{Name: []byte("x-b"), Value: []byte("1")},
		{Name: []byte("x-b"), Value: []byte("2")},
		{Name: []byte("access-control-allow-origin"), Value: []byte("https://app.example")},
		{Name: []byte("vary"), Value: []byte("accept")},
	}}
}

// Connection is the answer of contract 4.2 (captured), 4.1 (proxy port) and 6.2
// (inbound). pick, of 2^32, says where in a weighted split the connection falls.
func Connection(m *model.Mesh, f *model.Flow, pick uint32) Answer {
	w := see(m)
	switch f.Dir {
	case model.Captured:
		return w.captured(f, pick)
	case model.Proxy: // 4.1: it does not sniff, it is HTTP
		return Answer{Action: "serve", Reason: "proxy-port"}
	case model.Inbound:
		return w.inbound(f)
	}
	return Answer{Action: "refuse", Reason: "no-verdict"}
}

// Request is the answer to one HTTP request on a connection that Connection
// serves or delivers as HTTP: contract 4.3 to 4.11, 5.10, 6.4, 10.
func Request(m *model.Mesh, f *model.Flow, r *httpmsg.Head, pick uint32) Answer {
	w := see(m)
	switch f.Dir {
	case model.Captured, model.Proxy:
		if a, local := answeredLocally(r); local {
			return a
		}
		svc, p, a := w.address(f, r)
		if svc == nil {
			return a
		}
		return w.serve(f, r, svc, p, pick)
	case model.Inbound:
		return w.inboundRequest(f, r)
	}
	return Answer{Action: "refuse", Reason: "no-verdict", Status: 500}
}
