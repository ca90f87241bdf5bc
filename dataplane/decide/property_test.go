package decide_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

const worlds, questions = 250, 100

// each asks many questions of many random meshes.
func each(t *testing.T, seed uint64, ask func(t *testing.T, m *model.Mesh, s *snapshot.Snapshot, r *rand.Rand)) {
	t.Helper()
	for i := range uint64(worlds) {
		r := rand.New(rand.NewPCG(seed, i))
		m := modeltest.RandomMesh(r)
		if i%4 > 0 {
			m = lively(r)
		}
		s, _ := compile.Compile(m)
		ask(t, m, s, r)
		if t.Failed() {
			t.Fatalf("seed %d, mesh %d: %+v", seed, i, *m)
		}
	}
}

// TestEveryQuestionIsAnswered: a valid action and reason for any input, whole
// and nothing else set; never Sniff after a sniff; never Serve from Route.
func TestEveryQuestionIsAnswered(t *testing.T) {
	each(t, 1, func(t *testing.T, m *model.Mesh, s *snapshot.Snapshot, r *rand.Rand) {
		for range questions {
			f, h := aimed(r, m)
			v := decide.Decide(s, &f, 0, nil)
			if why := unfit(s, &f, v, false); why != "" {
				t.Errorf("%s: %s: %s", f, v, why)
			}
			v = decide.Route(s, &f, &h, r.Uint32(), nil)
			if why := unfit(s, &f, v, true); why != "" {
				t.Errorf("%s | %s: %s: %s", f, model.RequestString(&h), v, why)
			}
		}
	})
}

// unfit says what is wrong with a verdict, or "".
func unfit(s *snapshot.Snapshot, f *model.Flow, v decide.Verdict, request bool) string {
	if v.Action.String() == "invalid" || v.Reason.String() == "invalid" {
		return "no action or no reason"
	}
	answers := v.Action == decide.Refuse || v.Action == decide.Reply || v.Action == decide.Await
	if (v.Status != 0) != (request && answers) {
		return "a status on something that is no answer to a request, or none"
	}
	if (v.Text != "") != (v.Status != 0 && v.Status != 204) {
		return "status without text, or the reverse"
	}
	if h := v.Reason.Header(); h != "" && (v.Action == decide.Refuse) && v.Status != 421 {
		return "a reason of 4.4 with another status than 421"
	}
	switch v.Action {
	case decide.Sniff:
		if request || f.Dir != model.Captured || f.Sniff != model.SniffNone {
			return "sniff again"
		}
		if v.Sniff.Race && v.Sniff.Wait == 0 {
			return "a race without a bound"
		}
		if v.Sniff.HelloOnly && (v.Sniff.Race || v.Sniff.Wait == 0) {
			return "a raw-TCP port with a race or without a bound"
		}
	case decide.Serve:
		if request || f.Dir == model.Inbound {
			return "serve"
		}
	case decide.Reply:
		if !request {
			return "an answer to a connection"
		}
	case decide.Passthrough:
		if f.Dir != model.Captured {
			return "nothing was dialled"
		}
	case decide.Forward:
		want := model.TCP
		if request {
			want = model.HTTP
		}
		if f.Dir == model.Inbound || v.Backend == nil || v.Backend.Class != want {
			return "no backend of the class"
		}
		if v.Set == nil || v.Pinned == nil && v.Set.Empty() {
			return "nothing to pick from"
		}
		all := s.Endpoints(v.Backend).All()
		for _, e := range v.Set.All() {
			if !slices.Contains(all, e) {
				return "endpoints of something else"
			}
		}
		if p := v.Pinned; p != nil && (!slices.Contains(all, p) || p.Health > model.Healthy) {
			return "pinned to what is not there or not healthy"
		}
		if v.Backend.SNI != strconv.Itoa(int(v.Backend.Port)) || model.ReservedPort(v.Backend.Port) {
			return "bad SNI"
		}
	case decide.Deliver:
		if f.Dir != model.Inbound || v.Deliver.Port != f.Dst.Port() || v.Deliver.Class != model.HTTP && v.Deliver.Class != model.TCP {
			return "delivery of something else"
		}
	}
	if v.Backend != nil && v.Action != decide.Forward && v.Action != decide.Await {
		return "a backend without a forward"
	}
	if v.Action != decide.Forward && (v.Set != nil || v.Pinned != nil) {
		return "endpoints on what is not forwarded"
	}
	if (v.Awaits != nil) != (v.Action == decide.Await) {
		return "an await of nobody"
	}
	if v.Pipe != nil && !request {
		return "filters on a connection"
	}
	acts := v.Action == decide.Forward || v.Action == decide.Reply
	if v.Matched != nil && (acts && v.Pipe == nil || v.Matched.Name != v.Rule) {
		return "a rule without its filters, or that is not the one named"
	}
	if v.Respelled && (v.Pipe == nil || v.Pipe.Authz == nil) {
		return "two paths, and nobody to ask"
	}
	return ""
}

// TestExplainAgrees: with a trace and without, the verdicts are the same.
func TestExplainAgrees(t *testing.T) {
	each(t, 2, func(t *testing.T, m *model.Mesh, s *snapshot.Snapshot, r *rand.Rand) {
		for range questions {
			f, h := aimed(r, m)
			want := decide.Decide(s, &f, 0, nil)
			got, tr := decide.Explain(s, &f, nil)
			if got != want || len(tr.Steps) < 2 {
				t.Errorf("%s: %s, explained %s by %v", f, want, got, tr.Steps)
			}
			asked := f
			if want.Action == decide.Await {
				f.Waited = true
				want = decide.Decide(s, &f, 0, nil)
			}
			if want.Action == decide.Sniff {
				f.Sniff, f.Host = model.SniffHTTP11, string(h.Authority)
				want = decide.Decide(s, &f, 0, nil)
			}
			f.Sniff, f.Host = asked.Sniff, asked.Host
			if want.Action == decide.Serve || want.Action == decide.Deliver && want.Deliver.Class == model.HTTP {
				a, _, ok := httpmsg.Authority(h.Authority)
				q := h
				q.Authority = a
				want = decide.Route(s, &f, &q, 0, nil)
				if !ok { // the codec's answer comes first
					want = decide.Verdict{Action: decide.Refuse, Reason: decide.BadAuthority, Status: 400}
				}
			}
			if got, _ := decide.Explain(s, &asked, &h); got != want && !(got.Reason == decide.BadAuthority && got.String() == want.String()) {
				t.Errorf("%s | %s: %s, explained %s", asked, model.RequestString(&h), want, got)
			}
		}
	})
}

// TestCompileOrder: the order of the model means nothing, to verdicts and to problems.
func TestCompileOrder(t *testing.T) {
	each(t, 3, func(t *testing.T, m *model.Mesh, s *snapshot.Snapshot, r *rand.Rand) {
		_, problems := compile.Compile(m)
		n := *m
		n.Workloads, n.Endpoints = shuffled(r, m.Workloads), shuffled(r, m.Endpoints)
		n.Services, n.Routes = shuffled(r, m.Services), shuffled(r, m.Routes)
		n.Filters, n.Catalog, n.Retained = shuffled(r, m.Filters), shuffled(r, m.Catalog), shuffled(r, m.Retained)
		s2, problems2 := compile.Compile(&n)
		if a, b := fmt.Sprint(problems), fmt.Sprint(problems2); a != b {
			t.Errorf("problems:\n%s\n%s", a, b)
		}
		same(t, m, s, s2, r, nil)
	})
}

func shuffled[T any](r *rand.Rand, in []T) []T {
	out := append([]T(nil), in...)
	r.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// same asks two snapshots the same questions, which are about m.
func same(t *testing.T, m *model.Mesh, a, b *snapshot.Snapshot, r *rand.Rand, except func(f *model.Flow) bool) {
	t.Helper()
	for range questions {
		f, h := aimed(r, m)
		if except != nil && except(&f) {
			continue
		}
		p := r.Uint32()
		if va, vb := decide.Decide(a, &f, p, nil), decide.Decide(b, &f, p, nil); whole(&f, nil, va) != whole(&f, nil, vb) {
			t.Errorf("%s:\n%s\n%s", f, whole(&f, nil, va), whole(&f, nil, vb))
		}
		if va, vb := decide.Route(a, &f, &h, p, nil), decide.Route(b, &f, &h, p, nil); whole(&f, &h, va) != whole(&f, &h, vb) {
			t.Errorf("%s | %s:\n%s\n%s", f, model.RequestString(&h), whole(&f, &h, va), whole(&f, &h, vb))
		}
	}
}

// whole is everything of a verdict that matters, its endpoints included.
func whole(f *model.Flow, r *httpmsg.Head, v decide.Verdict) string {
	out := fmt.Sprint(v.String(), v.Sniff.Race, v.Sniff.HelloOnly, v.Sniff.Wait, v.Status, v.Text)
	if v.Awaits != nil {
		out += " " + v.Awaits.Name.String()
	}
	if r != nil {
		h, _ := model.ParseRequest(model.RequestString(r)) // a copy: it is changed
		out += " " + told(nil, f, &h, &v)
	}
	if v.Pinned != nil {
		return out + fmt.Sprint(" ", *v.Pinned)
	}
	if v.Set != nil {
		for _, e := range v.Set.All() {
			out += fmt.Sprint(" ", *e)
		}
	}
	return out
}

// TestUnrelatedObjects: a service, its pods, its route and a pod of this node
// that nothing else mentions change no verdict about the rest.
func TestUnrelatedObjects(t *testing.T) {
	extra := modeltest.Mesh(t, `
service far/away 10.97.0.1
pods far/away*3 8080,9000=tcp
user far/own 10.97.0.2 80:8080
pods far/own 8080
route far/away away own
rule match=prefix:/a set=x-a:9 to=own:80
local far/away 8080 cid=far
grpcroute far/calls away:8080
rule match=grpc:/a set=x-a:9
tcproute far/raw away
rule to=away:9000
tlsroute far/tls away sni=*.example
rule to=away:9000
filter far/f0 scope=chain target=away rbac policy=p;ns:far
filter far/f1 scope=inbound target=away authz
filter far/f2 rbac invalid=it_is_not_understood
catalog far/cold
retained far/gone 8080
service far/twin 10.97.0.3
service far/twin 10.97.0.4
`)
	each(t, 4, func(t *testing.T, m *model.Mesh, s *snapshot.Snapshot, r *rand.Rand) {
		n := *m
		n.Services = append(extra.Services[:len(extra.Services):len(extra.Services)], m.Services...)
		n.Endpoints = append(extra.Endpoints[:len(extra.Endpoints):len(extra.Endpoints)], m.Endpoints...)
		n.Routes = append(extra.Routes[:len(extra.Routes):len(extra.Routes)], m.Routes...)
		n.Workloads = append(extra.Workloads[:len(extra.Workloads):len(extra.Workloads)], m.Workloads...)
		n.Filters = append(extra.Filters[:len(extra.Filters):len(extra.Filters)], m.Filters...)
		n.Catalog = append(extra.Catalog[:len(extra.Catalog):len(extra.Catalog)], m.Catalog...)
		n.Retained = append(extra.Retained[:len(extra.Retained):len(extra.Retained)], m.Retained...)
		s2, _ := compile.Compile(&n)
		same(t, m, s, s2, r, func(f *model.Flow) bool {
			// The one thing they do change: with no service at all nobody waits.
			return len(s.Services()) == 0 && decide.Decide(s, f, 0, nil).Reason == decide.NoNames
		})
	})
}

// TestEndpointUpdate: the endpoint table made for a live snapshot gives what a
// compile of the same model gives, whenever it says that it can.
func TestEndpointUpdate(t *testing.T) {
	updated := 0
	each(t, 5, func(t *testing.T, m *model.Mesh, s *snapshot.Snapshot, r *rand.Rand) {
		n := *m
		n.Endpoints = append([]model.Endpoint(nil), m.Endpoints...)
		for i := range n.Endpoints {
			e := &n.Endpoints[i]
			switch r.IntN(4) {
			case 0:
				e.Health = model.Health(r.IntN(4))
			case 1:
				e.IP = netip.AddrFrom4([4]byte{10, 244, 1, byte(i)})
			case 2:
				if r.IntN(4) == 0 {
					n.Endpoints = append(n.Endpoints[:i:i], n.Endpoints[i+1:]...)
				}
			}
			if i >= len(n.Endpoints)-1 {
				break
			}
		}
		want, _ := compile.Compile(&n)
		table, ok := compile.Endpoints(s, &n)
		if !ok {
			return
		}
		updated++
		same(t, m, want, s.WithEndpoints(table), r, nil)
		again, ok := compile.Endpoints(s.WithEndpoints(table), &n)
		for _, b := range s.Backends() {
			if !ok || again.Set(b.ID) != table.Set(b.ID) {
				t.Errorf("%s: a set that did not change was made anew", b.Name)
			}
		}
	})
	if updated < worlds/20 {
		t.Errorf("only %d of %d meshes took the short way: the test says nothing", updated, worlds)
	}
}

// TestNilSnapshot: before the first configuration everything has an answer.
func TestNilSnapshot(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 6))
	for range 2000 {
		f, h := modeltest.RandomFlow(r), modeltest.RandomRequest(r)
		if why := unfit(nil, &f, decide.Decide(nil, &f, 0, nil), false); why != "" {
			t.Fatalf("%s: %s", f, why)
		}
		if why := unfit(nil, &f, decide.Route(nil, &f, &h, 0, nil), true); why != "" {
			t.Fatalf("%s | %s: %s", f, model.RequestString(&h), why)
		}
	}
}

// TestNoDirection: a flow that nobody filled in is refused.
func TestNoDirection(t *testing.T) {
	var f model.Flow
	h, err := model.ParseRequest("GET cart/")
	if err != nil {
		t.Fatal(err)
	}
	if v := decide.Decide(nil, &f, 0, nil).String(); v != "refuse (no-verdict)" {
		t.Error(v)
	}
	if v := decide.Route(nil, &f, &h, 0, nil).String(); v != "refuse 500 (no-verdict)" {
		t.Error(v)
	}
}

// TestExplainWords: the trace says what was looked at, the losers and why.
func TestExplainWords(t *testing.T) {
	s, _ := compile.Compile(modeltest.Mesh(t, `
service shop/cart 10.96.0.1
pods shop/cart*2 8080
pods shop/v2 8080
local shop/web
route shop/split cart
rule match=exact:/pay&POST to=v2:8080
rule match=prefix:/items&h:version=2 to=v2:8080
rule match=prefix:/it to=v2:8080
rule name=rest match=GET to=v2:8080*3 to=cart:8080
`))
	f, err := model.ParseFlow("shop/web > 10.96.0.1:8080")
	if err != nil {
		t.Fatal(err)
	}
	h, err := model.ParseRequest("GET cart/items/7 h:version=1")
	if err != nil {
		t.Fatal(err)
	}
	_, tr := decide.Explain(s.WithVersion(42), &f, &h)
	got := ""
	for _, step := range tr.Steps {
		got += step.Text + "\n"
	}
	const want = `snapshot 42: connection shop/web > 10.96.0.1:8080
Pod shop/web-0: captured with redirect-all
10.96.0.1 is Service shop/cart's (generated)
8080 is an HTTP port of it
verdict before the first byte: sniff (declared-http Service shop/cart)
snapshot 42: connection shop/web > 10.96.0.1:8080 http1 host=cart
Pod shop/web-0: captured with redirect-all
10.96.0.1 is Service shop/cart's (generated)
8080 is an HTTP port of it
verdict for the connection: serve (declared-http Service shop/cart)
request GET cart/items/7 h:version=1
authority "cart" names Service shop/cart (generated)
HTTPRoute shop/split rule 1 match 1: path "/items/7" is not exactly "/pay"
HTTPRoute shop/split rule 2 match 1: field version is not "2"
HTTPRoute shop/split rule 3 match 1: path "/items/7" is not below "/it"
HTTPRoute shop/split rule 4 (rest) match 1: matches
shop/v2:8080 drawn out of 2 backends by weight
shop/v2:8080: 1 endpoints, SNI 8080
verdict: forward shop/v2:8080 (http-route HTTPRoute shop/split rule 4 (rest))
`
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestReasons: every reason has a name of its own, and every refusal of 4.4 its header.
func TestReasons(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range decide.Reasons() {
		if n := r.String(); n == "" || n == "invalid" || seen[n] {
			t.Errorf("reason %d is called %q", r, n)
		} else {
			seen[n] = true
		}
		if h := r.Header(); h != "" && h != r.String() {
			t.Errorf("%s says %s", r, h)
		}
	}
	for _, name := range []string{"port-mismatch", "port-not-declared", "port-not-http", "port-required", "caller-namespace-unknown"} {
		if !seen[name] {
			t.Errorf("no reason %s", name)
		}
	}
	if v := (decide.Verdict{}).String(); v != "invalid (invalid)" {
		t.Errorf("the zero verdict is %q", v)
	}
}
