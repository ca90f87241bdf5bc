package outbound

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

// answerOf is a downstream stream that keeps what is answered.
type answerOf struct {
	status int
	fields []string
}

func (s *answerOf) WriteHead(h *httpmsg.Head, _ bool) {
	s.status = h.Status
	for _, f := range h.Fields {
		s.fields = append(s.fields, string(f.Name)+"="+string(f.Value))
	}
}
func (*answerOf) WriteData(p []byte, _ bool) int { return len(p) }
func (*answerOf) WriteTrailers([]httpmsg.Field)  {}
func (*answerOf) Resume()                        {}
func (*answerOf) Abort(exchange.Code)            {}

// unrecorded is an Outbound without a loop, and so without an end of a request.
type unrecorded struct{ *Outbound }

func (unrecorded) Done(*exchange.Exchange) {}

// stillLoop is a loop that does not run; its clock stands unless now is given.
func stillLoop(t testing.TB, now func() int64) *engine.Loop { return stillEngine(t, now).Loops()[0] }

// stillEngine is the engine of a stillLoop.
func stillEngine(t testing.TB, now func() int64) *engine.Engine {
	e, err := engine.New(engine.Config{Now: now, MaxLoops: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		e.Run(ctx) // which ends at once, and closes it
	})
	return e
}

// TestLocalAnswers: what Outbound answers by itself, with no endpoint that it could dial.
func TestLocalAnswers(t *testing.T) { // case 193
	m := modeltest.Mesh(t, `
service shop/cart 10.96.0.1
pods shop/cart 8080,9090
local shop/web
route shop/cart cart:8080
rule name=to-grpc match=prefix:/to-grpc set=content-type:application/grpc
rule name=of-grpc match=prefix:/of-grpc set=content-type:text/plain
rule name=away match=prefix:/away cors=https://a.example;methods=GET rset=x-r:1 redirect=host=other.example
rule name=boss match=h:x-forwarded-client-cert=boss
rule name=lied match=h:x-aether-outcome=200
grpcroute shop/calls cart:9090
rule name=say match=grpc:echo.Echo/Say
`)
	s, problems := compile.Compile(m)
	for _, b := range s.Backends() {
		for _, e := range s.Endpoints(b).All() {
			e.SPIFFEID = "none" // no compiled one is: nobody is dialled
		}
	}
	var store snapshot.Store
	store.Swap(s)
	o := New(Config{Store: &store})
	e := stillEngine(t, nil)
	st := o.loops.Make(e.Loops()[0])
	st.rnd = rand.New(rand.NewPCG(1, 2))
	pool := exchange.Pool{Service: unrecorded{o}}
	for _, tt := range []struct {
		port, request string
		status        int
		fields        string // some of the answer's
		reason, rule  string
	}{
		// gRPC is what the client speaks, not what a rule makes of the head.
		{"8080", "GET cart/to-grpc", 503, "content-type=text/plain; charset=utf-8", "http-route", "to-grpc"},
		{"8080", "POST cart/of-grpc h:content-type=application/grpc", 503, "content-type=application/grpc grpc-status=14", "http-route", "of-grpc"},
		{"9090", "POST cart/echo.Echo/Say h:content-type=application/grpc+proto", 503, "content-type=application/grpc grpc-status=14", "grpc-route", "say"},
		// A browser follows a redirection only if it may read it.
		{"8080", "GET cart/away h:origin=https://a.example", 302,
			"location=http://other.example:8080/away content-type=text/plain; charset=utf-8 x-r=1 vary=Origin access-control-allow-origin=https://a.example", "redirect", "away"},
		{"8080", "GET cart/away", 302, "location=http://other.example:8080/away content-type=text/plain; charset=utf-8 x-r=1 vary=Origin", "redirect", "away"},
		// What only a proxy may say is not believed by rules, either.
		{"8080", "GET cart/x h:x-forwarded-client-cert=boss", 503, "", "declared-http", ""},
		{"8080", "GET cart/x h:x-aether-outcome=200", 503, "", "declared-http", ""},
	} {
		f, err := model.ParseFlow("shop/web > 10.96.0.1:" + tt.port + " http1")
		if err != nil {
			t.Fatal(err)
		}
		r, err := model.ParseRequest(tt.request)
		if err != nil {
			t.Fatal(err)
		}
		c := &conn{o: o, pod: &Pod{Engine: e.AddPod("web")}, st: st, flow: f}
		c.info = engine.ConnInfo{User: c}
		down := &answerOf{}
		x := pool.Begin(down, &r, true, &c.info, 0)
		x.Begin()
		rq := x.User.(*reqState)
		status := x.Status
		if got := strings.Join(down.fields, " "); status != tt.status || !strings.Contains(got, tt.fields) {
			t.Errorf("%s: %d (%d on the wire) %s, want %d %s", tt.request, status, down.status, got, tt.status, tt.fields)
		}
		if v := rq.v; v.Reason.String() != tt.reason || !strings.Contains(v.Rule, tt.rule) {
			t.Errorf("%s: %s, want %s %s", tt.request, v, tt.reason, tt.rule)
		}
	}
	if len(problems) > 0 {
		t.Error(problems)
	}
}

// TestClean: what was taken out is there again for a request that leaves the mesh.
func TestClean(t *testing.T) {
	text := func(fields []httpmsg.Field) (out []string) {
		for _, f := range fields {
			out = append(out, string(f.Name)+"="+string(f.Value))
		}
		return out
	}
	r, err := model.ParseRequest("GET x/ h:a=1 h:x-forwarded-client-cert=b h:x-aether-outcome=c h:d=2")
	if err != nil {
		t.Fatal(err)
	}
	before := text(r.Fields)
	sent := clean(&r)
	if got := text(r.Fields); !slices.Equal(got, []string{"a=1", "d=2"}) {
		t.Errorf("left: %v", got)
	}
	if !slices.Equal(text(sent), before) {
		t.Errorf("sent: %v, want %v", text(sent), before)
	}
	if clean(&r) != nil {
		t.Error("nothing was there to be removed, and something was kept")
	}
}
