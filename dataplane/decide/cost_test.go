package decide_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

var sink decide.Verdict

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
		return decide.Decide(s, f, 0, nil)
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

// TestFilterAllocs: with room for what they write, filters cost no allocation either.
func TestFilterAllocs(t *testing.T) {
	s, problems := compile.Compile(modeltest.Mesh(t, `
service shop/cart 10.96.0.1
pods shop/cart*3 8080 meta=version:v2
local shop/web
filter shop/pick scope=chain target=cart metadata=x-v:version
filter shop/change scope=chain target=cart request=set:x-m:1 query=set:a:1 response=remove:server
filter shop/no scope=chain target=cart rbac deny policy=p;ns:nobody
route shop/cart cart
rule match=prefix:/p&q:x=1&hr:version=[0-9]+ set=x-a:1 rset=x-r:1 rewrite=prefix=/n;host=other cors=https://a.example;expose=x-e to=cart:8080 bset=x-b:1
`))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	f, err := model.ParseFlow("shop/web > 10.96.0.1:8080 http1")
	if err != nil {
		t.Fatal(err)
	}
	h, err := model.ParseRequest("GET cart/p/y?x=1 h:version=2 h:origin=https://a.example h:x-aether-subset-version=v2")
	if err != nil {
		t.Fatal(err)
	}
	fields, target, authority := append(make([]httpmsg.Field, 0, 16), h.Fields...), h.Path, h.Authority
	scratch := make([]byte, 0, 256)
	answer := httpmsg.Head{Fields: make([]httpmsg.Field, 0, 16)}
	var v decide.Verdict
	once := func() {
		h.Fields, h.Path, h.Authority = fields, target, authority
		answer.Fields = answer.Fields[:0]
		v = decide.Route(s, &f, &h, 0, nil)
		origin := v.Origin(&h)
		v.ApplyRequest(&h, scratch)
		v.ApplyResponse(&answer, origin)
	}
	if n := testing.AllocsPerRun(1000, once); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
	if got := string(h.Authority) + string(h.Path); got != "other/n/y?x=1&a=1" || len(h.Fields) != 6 || len(answer.Fields) != 4 || v.Set.Len() != 3 {
		t.Errorf("%s: target %s, fields %q, answer %q", v, got, h.Fields, answer.Fields)
	}
}

// BenchmarkDecide asks in a mesh of 10 and of 10,000 services: it must not grow with them (150 ns).
func BenchmarkDecide(b *testing.B) {
	for _, n := range []int{10, 10000} {
		s, _ := compile.Compile(big(b, n))
		for _, q := range []question{
			{"tcp", "ns0/svc0@c0 > 10.96.0.7:9000", "", "forward ns7/svc7:9000 (declared-tcp Service ns7/svc7)"},
			{"sniff", "ns0/svc0@c0 > 203.0.113.1:443", "", "sniff race 1s (foreign-address)"},
			{"serve", "ns0/svc0@c0 > 10.96.0.7:8080 http1 host=svc7.ns7:8080", "", "serve (declared-http Service ns7/svc7)"},
			{"name", "ns0/svc0@c0 > 203.0.113.1:8080 http1 host=svc7.ns7:8080", "", "serve (mesh-name Service ns7/svc7)"},
			{"foreign", "ns0/svc0@c0 > 203.0.113.1:80 http1 host=www.example.com", "", "passthrough (not-mesh)"},
		} {
			b.Run(fmt.Sprintf("%d_services/%s", n, q.name), func(b *testing.B) { q.bench(b, s) })
		}
	}
}

// BenchmarkRoute20 asks a port with 20 rules for the first, the last and none of
// them, in a mesh of 10 and of 10,000 services (300 ns).
func BenchmarkRoute20(b *testing.B) {
	for _, n := range []int{10, 10000} {
		m := big(b, n)
		var text strings.Builder
		text.WriteString("route ns1/many svc1:8080\n")
		for i := range 20 {
			fmt.Fprintf(&text, "rule match=prefix:/api/v1/part%02d&h:version=%d set=x-a:1 to=svc1:8080\n", i, i)
		}
		m.Routes = append(m.Routes, modeltest.Mesh(b, text.String()).Routes...)
		s, _ := compile.Compile(m)
		for _, q := range []question{
			{"first", "ns1/svc1 > 10.96.0.1:8080 http1", "GET svc1/api/v1/part00/x?y=1 h:accept=*/* h:user-agent=curl h:version=0", "forward ns1/svc1:8080 (http-route HTTPRoute ns1/many rule 1)"},
			{"last", "ns1/svc1 > 10.96.0.1:8080 http1", "GET svc1/api/v1/part19/x?y=1 h:accept=*/* h:user-agent=curl h:version=19", "forward ns1/svc1:8080 (http-route HTTPRoute ns1/many rule 20)"},
			{"none", "ns1/svc1 > 10.96.0.1:8080 http1", "GET svc1/api/v1/part19/x?y=1 h:accept=*/* h:user-agent=curl h:version=20", "forward ns1/svc1:8080 (declared-http Service ns1/svc1)"},
		} {
			b.Run(fmt.Sprintf("%d_services/%s", n, q.name), func(b *testing.B) { q.bench(b, s) })
		}
	}
}

// BenchmarkQuestions asks everything that costs no allocation.
func BenchmarkQuestions(b *testing.B) {
	s, _ := compile.Compile(big(b, 2000))
	for _, q := range costly {
		b.Run(q.name, func(b *testing.B) { q.bench(b, s) })
	}
}

func (q question) bench(b *testing.B, s *snapshot.Snapshot) {
	f, h := q.ask(b)
	if got := answerTo(s, &f, h).String(); got != q.want {
		b.Fatalf("%s, want %s", got, q.want)
	}
	b.ReportAllocs()
	before := cpuTime(b)
	for b.Loop() {
		sink = answerTo(s, &f, h)
	}
	b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/op")
}

// cpuTime is what this process has used: on a busy machine it says more than the clock.
func cpuTime(tb testing.TB) int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t); err != nil {
		tb.Fatal(err)
	}
	return t.Nano()
}

// BenchmarkExpressions is the longest that the expressions of a port keep a loop: as much text as they
// are run on, of a form that none of them matches and that no prefix tells.
func BenchmarkExpressions(b *testing.B) {
	for _, n := range []int{1, 2, 4, 8, 16, 32} {
		m := modeltest.Mesh(b, "service shop/cart 10.96.0.1\npods shop/cart 8080\nlocal shop/web\nroute shop/r cart:8080\nrule name=re")
		for i := range n {
			m.Routes[0].Rules[0].Matches = append(m.Routes[0].Rules[0].Matches,
				model.Match{PathKind: model.PathRegex, Path: fmt.Sprintf("/(?:.?.?.?){%d}(?:.*.*.*)*%d", (4096/n-60)/6, i)})
		}
		s, problems := compile.Compile(m)
		if len(problems) > 0 {
			b.Fatal(problems)
		}
		most := s.Service(model.ServiceName{Namespace: "shop", Name: "cart"}).Port(8080).Program.MaxText
		f, err := model.ParseFlow("shop/web > 10.96.0.1:8080 http1")
		if err != nil {
			b.Fatal(err)
		}
		h := httpmsg.Head{Method: []byte("GET"), Scheme: []byte("http"), Authority: []byte("cart"), Path: append([]byte("/"), bytes.Repeat([]byte("a"), most-1)...), Minor: 1}
		b.Run(fmt.Sprintf("%d of %d bytes", n, most), func(b *testing.B) {
			for b.Loop() {
				if v := decide.Route(s, &f, &h, 0, nil); v.Reason != decide.DeclaredHTTP {
					b.Fatal(v)
				}
			}
		})
	}
}
