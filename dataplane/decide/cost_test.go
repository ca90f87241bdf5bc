package decide_test

import (
	"fmt"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

var (
	sink decide.Verdict
	snap *snapshot.Snapshot
)

// big is a mesh of n services with three ports and three pods each, and a route on one.
func big(tb testing.TB, n int) *model.Mesh {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "service ns%d/svc%d 10.%d.%d.%d\npods ns%d/svc%d*3 8080,9090,9000=tcp\n", i%50, i, 96+i>>16, i>>8&255, i&255, i%50, i)
	}
	b.WriteString(`local ns0/svc0 8080,9000=tcp ip=10.244.200.1 cid=c0
route ns0/split svc0
rule match=exact:/pay&POST to=svc50:8080
rule match=prefix:/items&h:version=2 set=x-v:2 rset=x-r:1 to=svc50:8080*90 bset=x-b:1 to=svc0:8080*10
`)
	return modeltest.Mesh(tb, b.String())
}

type question struct {
	name, flow, request, want string
}

var costly = []question{
	{"tcp", "ns0/svc0@c0 > 10.96.0.7:9000", "", "forward ns7/svc7:9000 (declared-tcp Service ns7/svc7)"},
	{"sniff", "ns0/svc0@c0 > 203.0.113.1:443", "", "sniff race 1s (foreign-address)"},
	{"serve", "ns0/svc0@c0 > 10.96.0.7:8080 http1 host=svc7.ns7:8080", "", "serve (declared-http Service ns7/svc7)"},
	{"foreign", "ns0/svc0@c0 > 203.0.113.1:80 http1 host=www.example.com", "", "passthrough (not-mesh)"},
	{"inbound", "ns0/svc0@c0 < 8080", "", "deliver 8080 http http1 (served-port Pod ns0/svc0-0)"},
	{"short", "ns0/svc0 > 10.96.0.50:8080 http1", "GET svc50/", "forward ns0/svc50:8080 (declared-http Service ns0/svc50)"},
	{"mesh-name", "ns0/svc0 > 10.96.0.50:8080 http1", "GET Svc50.ns0.aether.internal:8080/", "forward ns0/svc50:8080 (declared-http Service ns0/svc50)"},
	{"kubernetes-name", "ns0/svc0 > proxy", "GET svc1999.ns49.svc.cluster.local:9090/", "forward ns49/svc1999:9090 (declared-http Service ns49/svc1999)"},
	{"route", "ns0/svc0 > 10.96.0.0:8080 http1", "GET svc0/items/7?x=1 h:accept=*/* h:version=2", "forward ns0/svc50:8080 (http-route HTTPRoute ns0/split rule 2)"},
	{"refuse", "ns0/svc0 > 10.96.0.0:8080 http1", "GET svc0:9090/", "refuse 421 (port-mismatch Service ns0/svc0)"},
	{"no-name", "ns0/svc0 > proxy", "GET www.example.com/", "refuse 404 (no-such-name)"},
	{"deliver", "ns0/svc0@c0 < 8080", "GET svc0/", "deliver 8080 http http1 (served-port Pod ns0/svc0-0)"},
}

func (q question) ask(tb testing.TB) (f model.Flow, h *httpmsg.Head) {
	f, err := model.ParseFlow(q.flow)
	if err != nil {
		tb.Fatal(err)
	}
	if q.request == "" {
		return f, nil
	}
	r, err := model.ParseRequest(q.request)
	if err != nil {
		tb.Fatal(err)
	}
	return f, &r
}

func answerTo(s *snapshot.Snapshot, f *model.Flow, h *httpmsg.Head) decide.Verdict {
	if h == nil {
		return decide.Decide(s, f, nil)
	}
	return decide.Route(s, f, h, 12345, nil)
}

func TestDecideAllocs(t *testing.T) {
	s, problems := compile.Compile(big(t, 2000))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	for _, q := range costly {
		t.Run(q.name, func(t *testing.T) {
			f, h := q.ask(t)
			if got := answerTo(s, &f, h).String(); got != q.want {
				t.Fatalf("%s, want %s", got, q.want)
			}
			if n := testing.AllocsPerRun(1000, func() { sink = answerTo(s, &f, h) }); n != 0 {
				t.Errorf("%v allocations, want 0", n)
			}
		})
	}
}

// TestFilterAllocs: with room in the fields, filters cost no allocation either.
func TestFilterAllocs(t *testing.T) {
	s, _ := compile.Compile(big(t, 100))
	f, err := model.ParseFlow("ns0/svc0 > 10.96.0.0:8080 http1")
	if err != nil {
		t.Fatal(err)
	}
	h, err := model.ParseRequest("GET svc0/items h:version=2")
	if err != nil {
		t.Fatal(err)
	}
	fields := append(make([]httpmsg.Field, 0, 8), h.Fields...)
	if n := testing.AllocsPerRun(1000, func() {
		h.Fields = fields
		v := decide.Route(s, &f, &h, 0, nil)
		v.ApplyRequest(&h)
		v.ApplyResponse(&h)
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
	if len(h.Fields) != 4 {
		t.Errorf("fields %q", h.Fields)
	}
}

func BenchmarkDecide(b *testing.B) {
	s, _ := compile.Compile(big(b, 2000))
	for _, q := range costly {
		b.Run(q.name, func(b *testing.B) {
			f, h := q.ask(b)
			b.ReportAllocs()
			for b.Loop() {
				sink = answerTo(s, &f, h)
			}
		})
	}
}

func BenchmarkCompile(b *testing.B) {
	m := big(b, 2000)
	s, _ := compile.Compile(m)
	b.Run("whole", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			snap, _ = compile.Compile(m)
		}
	})
	b.Run("endpoints", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			t, ok := compile.Endpoints(s, m)
			if !ok {
				b.Fatal("the short way was refused")
			}
			snap = s.WithEndpoints(t)
		}
	})
}
