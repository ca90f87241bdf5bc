package extauthz

import (
	"context"
	"fmt"
	"testing"
	"time"

	"aether/dataplane/authz"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// still is a loop whose goroutines never come to run.
type still struct{ started int }

func (*still) Post(f func()) error { return nil }
func (l *still) Go(func())         { l.started++ }

// end is a downstream stream, and the service of its exchange and who asks.
type end struct {
	heads  []int
	resume int
	said   []string
}

func (e *end) WriteHead(h *httpmsg.Head, _ bool)        { e.heads = append(e.heads, h.Status) }
func (*end) WriteData(p []byte, _ bool) int             { return len(p) }
func (*end) WriteTrailers([]httpmsg.Field)              {}
func (e *end) Resume()                                  { e.resume++ }
func (*end) Abort(exchange.Code)                        {}
func (*end) Request(*exchange.Exchange)                 {}
func (*end) Response(*exchange.Exchange, *httpmsg.Head) {}
func (*end) Failed(*exchange.Exchange, exchange.Code)   {}
func (*end) Done(*exchange.Exchange)                    {}
func (e *end) Allowed(*exchange.Exchange)               { e.said = append(e.said, "allowed") }
func (e *end) Refused(_ *exchange.Exchange, r *Refusal) {
	e.said = append(e.said, fmt.Sprint(r.Status, " ", r.Cause))
}
func (e *end) begin(h httpmsg.Head, whole bool) *exchange.Exchange {
	return (&exchange.Pool{Service: e}).Begin(e, &h, whole, nil, 0)
}

var get = httpmsg.Head{Method: []byte("GET"), Path: []byte("/"), Minor: 1}

func question(pod string) authz.Question {
	return authz.Question{Flow: &model.Flow{Dir: model.Captured}, Workload: &snapshot.Workload{ContainerID: pod}, Time: time.Unix(1, 0)}
}

// TestBounds: one pod's questions have a bound of their own, which leaves others theirs, and what is given up
// gives its place back.
func TestBounds(t *testing.T) {
	s, err := New(Config{Target: "unix:///nobody"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l, e := &still{}, &end{}
	ask := func(pod string) {
		x := e.begin(get, true)
		q := question(pod)
		q.Head = &x.Req
		s.Ask(l, x, &snapshot.Authz{Name: "f"}, q, nil, e)
	}
	for range 2 * maxAsked {
		ask("0")
	}
	if l.started != maxAsked/2 || len(e.said) != 2*maxAsked-l.started {
		t.Errorf("of a pod that asks without end %d are asked about and %d refused, want %d", l.started, len(e.said), maxAsked/2)
	}
	before := l.started
	for range maxAsked {
		ask("1")
	}
	if n := l.started - before; n != maxAsked/8 {
		t.Errorf("beside it %d of another are asked about, want %d", n, maxAsked/8)
	}
	for i := range maxAsked { // each pod has a place while there is one
		ask(fmt.Sprint("another ", i))
	}
	if l.started != maxAsked { // the node's bound
		t.Errorf("%d are asked about, want %d", l.started, maxAsked)
	}
	for i, said := range e.said {
		if said != "503 overload" {
			t.Fatalf("%d: %s", i, said)
		}
	}
	s.leave("0")
	ask("another")
	if l.started != maxAsked+1 {
		t.Error("a place that was given back is not taken")
	}
}

// TestLate: an answer to a request that is over, or is another's by now, means nothing.
func TestLate(t *testing.T) {
	s, err := New(Config{Target: "unix:///nobody"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	yes := authz.Answer{Allowed: true}
	for name, end_ := range map[string]func(x *exchange.Exchange, c *Call){
		"cancelled":   func(_ *exchange.Exchange, c *Call) { c.Cancel() },
		"client gone": func(x *exchange.Exchange, _ *Call) { x.DownstreamClosed(exchange.Cancel) },
		"begun anew":  func(x *exchange.Exchange, _ *Call) { x.Gen++ },
	} {
		e := &end{}
		x := e.begin(get, true)
		q := question("pod")
		q.Head = &x.Req
		c := s.Ask(&still{}, x, &snapshot.Authz{}, q, nil, e)
		end_(x, c)
		c.answered(yes, nil)
		c.answered(authz.Answer{}, context.DeadlineExceeded)
		if len(e.said) != 0 {
			t.Errorf("%s: %v", name, e.said)
		}
		c.Cancel()
	}
	var none *Call
	none.Cancel()
	none.Edit(nil)
}

// TestContinue: who waits to be told to send its body is told so, once, where the body is wanted; a request for a tunnel
// has none, and one without a filter that wants it goes on as it came.
func TestContinue(t *testing.T) {
	s, err := New(Config{Target: "unix:///nobody"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, tt := range []struct {
		name    string
		filter  *snapshot.Authz
		change  func(h *httpmsg.Head)
		heads   string
		asked   int // before the body has come
		expects bool
	}{
		{"wanted", &snapshot.Authz{}, nil, "[100]", 0, false},
		{"of HTTP/1.0", &snapshot.Authz{}, func(h *httpmsg.Head) { h.Minor = 0 }, "[]", 0, false},
		{"not wanted", &snapshot.Authz{NoBody: true}, nil, "[]", 1, true},
		{"wanted by the second", &snapshot.Authz{NoBody: true, Next: &snapshot.Authz{}}, nil, "[100]", 0, false},
		{"a tunnel", &snapshot.Authz{}, func(h *httpmsg.Head) { h.Upgrade = []byte("websocket") }, "[]", 1, true},
	} {
		e, l := &end{}, &still{}
		h := get
		h.Length, h.Expect = httpmsg.Unknown, true
		h.Fields = []httpmsg.Field{{Name: []byte("expect"), Value: []byte("100-continue")}}
		if tt.change != nil {
			tt.change(&h)
		}
		x := e.begin(h, false)
		q := question("pod")
		q.Head = &x.Req
		s.Ask(l, x, tt.filter, q, nil, e)
		_, has := x.Req.Get("expect")
		if got := fmt.Sprint(e.heads); got != tt.heads || l.started != tt.asked || has != tt.expects || x.Req.Expect != tt.expects {
			t.Errorf("%s: heads %s, asked %d, expects %v; want %s, %d, %v", tt.name, got, l.started, has, tt.heads, tt.asked, tt.expects)
		}
		x.RequestData([]byte("body"), true)
		if l.started != 1 {
			t.Errorf("%s: asked %d times", tt.name, l.started)
		}
	}
}
