package compile_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
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
	"aether/dataplane/snapshot/snapshottest"
)

func shuffled[T any](r *rand.Rand, in []T) []T {
	out := slices.Clone(in)
	r.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// TestOrder: the order of the model's lists means nothing.
func TestOrder(t *testing.T) {
	each(t, func(t *testing.T, r *rand.Rand, m *model.Mesh) {
		n := *m
		n.Workloads, n.Endpoints, n.Services = shuffled(r, m.Workloads), shuffled(r, m.Endpoints), shuffled(r, m.Services)
		n.Routes, n.Filters, n.Catalog, n.Retained = shuffled(r, m.Routes), shuffled(r, m.Filters), shuffled(r, m.Catalog), shuffled(r, m.Retained)
		a, problemsA := compile.Compile(m)
		b, problemsB := compile.Compile(&n)
		if x, y := snapshottest.Text(a), snapshottest.Text(b); x != y {
			t.Error(diff(x, y))
		}
		if x, y := lines(problemsA), lines(problemsB); x != y {
			t.Error(diff(x, y))
		}
	})
}

// TestOrderOfFilters: those of one service are in force by name, in whatever
// order they came.
func TestOrderOfFilters(t *testing.T) {
	text, want := "pods shop/cart 8080\n", ""
	for i := range 8 {
		text += fmt.Sprintf("filter shop/f%d scope=chain target=cart rbac\n", 7-i)
		want += fmt.Sprintf("rbac(HTTPFilter shop/f%d) ", i)
	}
	s, _ := compile.Compile(modeltest.Mesh(t, text))
	if got := pipeText(s.Services()[0].Port(8080).Self.Pipe); got+" " != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestUnrelated: objects of another namespace that name nothing of these change
// nothing of them, broken ones neither.
func TestUnrelated(t *testing.T) {
	extra := modeltest.Mesh(t, `
service far/away 10.97.0.1
pods far/away*3 8080,9000=tcp
user far/own 10.97.0.2 80:8080
pods far/own 8080
catalog far/cold
retained far/gone 8080
route far/r away own
rule match=prefix:/a set=x-a:9 use=f to=own:80
rule match=regex:(
grpcroute far/g own:80
rule match=grpc:a/b
tcproute far/t away
rule to=away:9000
tlsroute far/s away sni=db.example
rule to=away:9000
filter far/f rbac deny policy=p;ns:shop
filter far/chain scope=chain target=away invalid=broken
filter far/in scope=inbound target=away rbac
service far/twin 10.97.0.3
service far/twin 10.97.0.4
route far/two away
rule all
route far/two own
rule all
local far/away 8080 cid=far
`)
	per := func(s *snapshot.Snapshot) (out []string) {
		for _, line := range strings.Split(snapshottest.Text(s), "\n")[1:] {
			if !strings.Contains(line, "far/") && !strings.Contains(line, "Container:far") && !strings.Contains(line, `ContainerID:"far"`) {
				out = append(out, line)
			}
		}
		return out
	}
	each(t, func(t *testing.T, r *rand.Rand, m *model.Mesh) {
		n := *m
		n.Workloads, n.Endpoints, n.Services = slices.Concat(extra.Workloads, m.Workloads), slices.Concat(extra.Endpoints, m.Endpoints), slices.Concat(m.Services, extra.Services)
		n.Routes, n.Filters = slices.Concat(extra.Routes, m.Routes), slices.Concat(m.Filters, extra.Filters)
		n.Catalog, n.Retained = slices.Concat(m.Catalog, extra.Catalog), slices.Concat(m.Retained, extra.Retained)
		a, problems := compile.Compile(m)
		b, more := compile.Compile(&n)
		if x, y := per(a), per(b); !slices.Equal(x, y) {
			t.Error(diff(strings.Join(y, "\n"), strings.Join(x, "\n")))
		}
		for _, p := range problems {
			if !slices.Contains(more, p) {
				t.Errorf("a problem went: %s: %s", p.Object, p.Reason)
			}
		}
		for _, p := range more {
			if !slices.Contains(problems, p) && !strings.Contains(p.Object, "far/") {
				t.Errorf("a problem came: %s: %s", p.Object, p.Reason)
			}
		}
	})
}

// spoil makes one thing of a copy of m invalid, and says which; "": nothing was there.
func spoil(r *rand.Rand, m *model.Mesh) (*model.Mesh, string) {
	n := *m
	n.Routes, n.Filters, n.Services = slices.Clone(m.Routes), slices.Clone(m.Filters), slices.Clone(m.Services)
	rule := func() (*model.Rule, string) {
		if len(n.Routes) == 0 {
			return nil, ""
		}
		o := &n.Routes[r.IntN(len(n.Routes))]
		if len(o.Rules) == 0 {
			return nil, ""
		}
		o.Rules = slices.Clone(o.Rules)
		i := r.IntN(len(o.Rules))
		return &o.Rules[i], fmt.Sprintf("%s %s/%s rule %d", o.Kind, o.Namespace, o.Name, i+1)
	}
	raw := func() (*model.Route, string) { // of connections
		if len(n.Routes) == 0 {
			return nil, ""
		}
		o := &n.Routes[r.IntN(len(n.Routes))]
		if o.Kind != model.TLSRoute && o.Kind != model.TCPRoute {
			return nil, ""
		}
		return o, fmt.Sprintf("%s %s/%s", o.Kind, o.Namespace, o.Name)
	}
	switch r.IntN(12) {
	case 10:
		if o, what := raw(); o != nil && len(o.ServerNames) > 0 {
			o.ServerNames = slices.Clone(o.ServerNames)
			o.ServerNames[r.IntN(len(o.ServerNames))] = []string{"", "*", "*.", "a..b", "a_b", "a.*.b", "a:1", strings.Repeat("a", 300)}[r.IntN(8)]
			return &n, "server name of " + what
		}
	case 11:
		if o, what := raw(); o != nil && len(o.Parents) > 0 {
			o.Rules = nil
			return &n, "no rules of " + what
		}
	case 0:
		if x, what := rule(); x != nil {
			x.Invalid = "spoiled"
			return &n, "invalid " + what
		}
	case 1:
		if x, what := rule(); x != nil {
			x.Filters = append(slices.Clone(x.Filters), model.Filter{Kind: model.Extension, Extension: "nowhere"})
			return &n, "filter of " + what
		}
	case 2:
		if x, what := rule(); x != nil && len(x.Backends) > 0 {
			x.Backends = slices.Clone(x.Backends)
			x.Backends[r.IntN(len(x.Backends))].Invalid = "spoiled"
			return &n, "backend of " + what
		}
	case 3:
		if x, what := rule(); x != nil && len(x.Matches) > 0 {
			x.Matches = slices.Clone(x.Matches)
			y := &x.Matches[r.IntN(len(x.Matches))]
			switch r.IntN(7) {
			case 0:
				if y.PathKind == model.PathExact {
					return nil, "" // another kind of match stands elsewhere in the order: that is no spoiling
				}
				y.PathKind, y.Path = model.PathRegex, "("
			case 3:
				if y.PathKind != model.PathExact && y.PathKind != model.PathPrefix {
					return nil, ""
				}
				y.Path = ""
			case 4: // what could not be read is not there
				y.Method, y.Headers, y.Query, y.GRPC, y.Unread = "", nil, nil, nil, true
			case 5:
				if y.Headers = slices.Clone(y.Headers); len(y.Headers) == 0 {
					return nil, ""
				}
				name := y.Headers[r.IntN(len(y.Headers))].Name
				for i := range y.Headers { // all of that name: of two the first counts, and without it the second would
					if y.Headers[i].Name == name {
						y.Headers[i].Name = "x(y"
					}
				}
			case 6:
				if y.GRPC == nil {
					return nil, ""
				}
				g := model.GRPCMatch{Service: y.GRPC.Service, Method: y.GRPC.Method, Regex: true}
				if r.IntN(2) == 0 {
					g.Service = "("
				} else {
					g.Method = "("
				}
				y.GRPC = &g
			case 1:
				y.Headers = slices.Clone(y.Headers)
				if len(y.Headers) == 0 {
					return nil, ""
				}
				y.Headers[0].Value, y.Headers[0].Regex = "[", true
			default:
				y.PathKind = 77
			}
			return &n, "match of " + what
		}
	case 4:
		if len(n.Filters) > 0 {
			f := &n.Filters[r.IntN(len(n.Filters))]
			f.Invalid = "spoiled"
			return &n, "invalid HTTPFilter " + f.Namespace + "/" + f.Name
		}
	case 5:
		if len(n.Filters) > 0 {
			f := &n.Filters[r.IntN(len(n.Filters))]
			f.RBAC, f.ExtAuthz, f.HeaderToMetadata, f.Mutation = nil, nil, nil, nil
			return &n, "empty HTTPFilter " + f.Namespace + "/" + f.Name
		}
	case 6:
		if len(n.Filters) > 0 {
			f := n.Filters[r.IntN(len(n.Filters))]
			n.Filters = append(n.Filters, f)
			return &n, "two of HTTPFilter " + f.Namespace + "/" + f.Name
		}
	case 7:
		if len(n.Routes) > 0 {
			o := n.Routes[r.IntN(len(n.Routes))]
			n.Routes = append(n.Routes, o)
			return &n, "two of route " + o.Namespace + "/" + o.Name
		}
	case 8:
		if len(n.Services) > 0 {
			o := n.Services[r.IntN(len(n.Services))]
			n.Services = append(n.Services, o)
			return &n, "two of Service " + o.Name.String()
		}
	case 9:
		if x, what := rule(); x != nil {
			x.Matches = append(slices.Clone(x.Matches), slices.Repeat([]model.Match{{PathKind: model.PathExact, Path: "/never"}}, 1100)...)
			return &n, "too many matches of " + what
		}
	}
	return nil, ""
}

// aimed is a flow and a request, most often at a service that there is, and at
// what a route of it matches.
func aimed(r *rand.Rand, m *model.Mesh) (model.Flow, httpmsg.Head) {
	f, h := modeltest.RandomFlow(r), modeltest.RandomRequest(r)
	if f.Dir == model.Inbound {
		if len(m.Workloads) == 0 {
			return f, h
		}
		w := &m.Workloads[r.IntN(len(m.Workloads))]
		f.Namespace, f.Workload, f.Container = w.Namespace, w.Account, w.ContainerID
		f.Dst = model.OrigDst{AddrPort: netip.AddrPortFrom(netip.Addr{}, w.Ports[r.IntN(len(w.Ports))].Number)}
		return f, h
	}
	if len(m.Endpoints) == 0 || r.IntN(5) == 0 {
		return f, h
	}
	name := m.Endpoints[r.IntN(len(m.Endpoints))].Service
	if len(m.Routes) > 0 && r.IntN(4) > 0 {
		o := &m.Routes[r.IntN(len(m.Routes))]
		if len(o.Parents) > 0 {
			name = o.Parents[r.IntN(len(o.Parents))].Service
			if r.IntN(2) == 0 {
				f.Namespace = o.Namespace
			}
		}
		if len(o.ServerNames) > 0 && r.IntN(2) == 0 {
			f.Sniff, f.Host = model.SniffTLS, strings.Replace(o.ServerNames[r.IntN(len(o.ServerNames))], "*", "x", 1)
		}
		if len(o.Rules) > 0 {
			if rule := &o.Rules[r.IntN(len(o.Rules))]; len(rule.Matches) > 0 {
				meet(&h, &rule.Matches[r.IntN(len(rule.Matches))])
			}
		}
	}
	port := uint16(8080)
	for i := range m.Endpoints {
		if e := &m.Endpoints[i]; e.Service == name && len(e.Ports) > 0 && r.IntN(2) == 0 {
			port = e.Ports[r.IntN(len(e.Ports))].Number
		}
	}
	host := name.Name + "." + name.Namespace + "." + model.DefaultDomain
	f.Dst = model.OrigDst{AddrPort: netip.AddrPortFrom(f.Dst.Addr(), port)}
	if f.Dir == model.Proxy {
		f.Dst = model.OrigDst{}
		host += fmt.Sprintf(":%d", port)
	}
	for i := range m.Services {
		if s := &m.Services[i]; s.Name == name && len(s.ClusterIPs) > 0 && f.Dir == model.Captured {
			f.Dst = model.OrigDst{AddrPort: netip.AddrPortFrom(s.ClusterIPs[0], port)}
		}
	}
	if f.Sniff != model.SniffTLS {
		f.Host = host
	}
	h.Authority = []byte(host)
	return f, h
}

// meet makes a request one that a match takes, as far as that is plain to see.
func meet(h *httpmsg.Head, m *model.Match) {
	switch {
	case m.PathKind == model.PathExact || m.PathKind == model.PathPrefix:
		h.Path = []byte(m.Path)
	case m.GRPC != nil && !m.GRPC.Regex:
		h.Path = []byte("/" + cmp.Or(m.GRPC.Service, "s") + "/" + cmp.Or(m.GRPC.Method, "m"))
	}
	if m.Method != "" {
		h.Method = []byte(m.Method)
	}
	for _, v := range m.Headers {
		if !v.Regex && v.Name != "host" {
			h.Set([]byte(v.Name), []byte(v.Value))
		}
	}
}

// TestInvalidNeverWidens: where one thing becomes invalid, every connection and
// every request gets what it got, or less: a refusal.
//
// An invalid object may move what it stood for out of the mesh's hands only
// where it was before: a Service that is twice there is refused on all its names.
func TestInvalidNeverWidens(t *testing.T) {
	refused, reached, asked := 0, 0, 0
	each(t, func(t *testing.T, r *rand.Rand, m *model.Mesh) {
		before, _ := compile.Compile(m)
		for range 8 {
			n, what := spoil(r, m)
			if n == nil {
				continue
			}
			after, problems := compile.Compile(n)
			if len(problems) == 0 && snapshottest.Text(before) != snapshottest.Text(after) { // backends of a redirection are not looked at
				t.Errorf("%s: no problem", what)
			}
			for range 60 {
				f, h := aimed(r, m)
				pick := r.Uint32()
				for _, ask := range []struct {
					kind string
					of   func(s *snapshot.Snapshot) decide.Verdict
				}{
					{"Decide", func(s *snapshot.Snapshot) decide.Verdict { return decide.Decide(s, &f, pick, nil) }},
					{"Route", func(s *snapshot.Snapshot) decide.Verdict { return decide.Route(s, &f, &h, pick, nil) }},
				} {
					asked++
					a, b := ask.of(before), ask.of(after)
					switch b.Action {
					case decide.Refuse:
						if a.Action != decide.Refuse {
							refused++
						}
						continue
					case decide.Forward, decide.Deliver:
						reached++
						if b.Deliver.Socket == nil && b.Deliver.Class == model.TCP {
							a.Deliver.Socket = nil // raw TCP goes past a socket at which an inbound filter judges (decision 035)
						}
						if a.String() == b.String() && policyText(a) == policyText(b) {
							continue
						}
					default:
						if a.Action == b.Action {
							continue
						}
						// Which names are the mesh's is no question of access.
						if ask.kind == "Decide" && (b.Action == decide.Serve || b.Action == decide.Sniff) {
							continue
						}
					}
					t.Errorf("%s\n%s %s | %s\nbefore %s\nafter  %s", what, ask.kind, f, model.RequestString(&h), a, b)
				}
			}
		}
	})
	t.Logf("%d questions: %d refused that were not before, %d reached as before", asked, refused, reached)
	if refused == 0 || reached == 0 {
		t.Error("the questions missed the point")
	}
}

// TestWhole: what a decision relies on is there: a rule and a pipe wherever a
// request can arrive, and nothing of HTTP on other ports.
func TestWhole(t *testing.T) {
	each(t, func(t *testing.T, r *rand.Rand, m *model.Mesh) {
		s, _ := compile.Compile(m)
		rule := func(where string, x *snapshot.Rule) {
			if x == nil || x.Pipe == nil {
				t.Errorf("%s: no rule, or one without a pipe", where)
				return
			}
			sum := uint64(0)
			for _, w := range x.Backends {
				if w.Pipe == nil || (w.Backend == nil) != (w.Invalid != "") || w.Upto < sum {
					t.Errorf("%s: backend %+v", where, w)
				}
				if w.Backend != nil && w.Backend.Class != model.HTTP {
					t.Errorf("%s: backend %s is %s", where, w.Backend.Name, w.Backend.Class)
				}
				sum = w.Upto
			}
			if sum != x.WeightSum {
				t.Errorf("%s: weights %d, the last ends at %d", where, x.WeightSum, sum)
			}
		}
		split := func(where string, x *snapshot.Split) {
			if x == nil || x.Invalid == "" && x.WeightSum == 0 {
				t.Errorf("%s: split %+v", where, x)
				return
			}
			for _, w := range x.Backends {
				if (w.Backend == nil) != (w.Invalid != "") || w.Backend != nil && w.Backend.Class != model.TCP {
					t.Errorf("%s: backend %+v", where, w)
				}
			}
		}
		for _, svc := range s.Services() {
			for _, ports := range [][]snapshot.Port{svc.Ports, svc.PodPorts} {
				for i := range ports {
					p := &ports[i]
					where := fmt.Sprintf("%s:%d", svc.Name, p.Number)
					if model.ReservedPort(p.Number) || p.Number == 0 || i > 0 && ports[i-1].Number >= p.Number {
						t.Errorf("%s: such a port, or out of order", where)
					}
					if http := p.Class == model.HTTP; http != (p.Self != nil) || !http && (p.Program != nil || p.Consumers != nil) || p.Class != model.TCP && (p.Split != nil || p.Splits != nil) {
						t.Errorf("%s: %+v", where, p)
					}
					if (p.Backend == nil) != (p.Class == model.UDP) || p.Backend != nil && (s.Backends()[p.Backend.ID] != p.Backend || p.Backend.Class != p.Class || p.Backend.Service != svc.Name) {
						t.Errorf("%s: backend %+v", where, p.Backend)
					}
					if p.Self != nil {
						rule(where, p.Self)
					}
					for _, g := range append(slices.Collect(maps.Values(p.Consumers)), p.Program) {
						if g == nil {
							continue
						}
						policy := false
						for j := range g.Arms {
							rule(where, g.Arms[j].Rule)
							policy = policy || g.Arms[j].Rule.Pipe.Policy()
						}
						if policy && !g.Policy || g.Strict != (m.Semantics == model.GatewayAPI) {
							t.Errorf("%s: a program's flags", where)
						}
					}
					for _, x := range append(slices.Collect(maps.Values(p.Splits)), p.Split) {
						if x != nil {
							split(where, x)
						}
					}
				}
			}
			for _, a := range svc.TLS {
				split(svc.Name.String(), a.Split)
			}
			if svc.Texts == nil || svc.Broken != "" && len(svc.Ports) > 0 || svc.Cold && len(svc.Ports) > 0 {
				t.Errorf("%s: %+v", svc.Name, svc)
			}
		}
	})
}

// policyText is what of a verdict's pipe decides over access.
func policyText(v decide.Verdict) string {
	if v.Pipe == nil {
		return ""
	}
	return pipeText(&snapshot.FilterChain{RBAC: v.Pipe.RBAC, Authz: v.Pipe.Authz})
}

// FuzzRegex: an expression that is accepted matches what the plain expression
// matches from end to end, and one that is not makes the rule refuse.
func FuzzRegex(f *testing.F) {
	for _, p := range []string{"", "a", "a|b", "a)(b", "(?i)A", `\Qa.b`, "^a$", "(?m)^a$", "a\\", "[", "a{1,2}", "(?s).*", "a*?", `\bab\b`} {
		f.Add(p, "ab")
	}
	f.Fuzz(func(t *testing.T, pattern, text string) {
		s, problems := compile.Compile(&model.Mesh{
			Endpoints: []model.Endpoint{{Service: model.ServiceName{Namespace: "a", Name: "b"}, IP: netip.MustParseAddr("10.0.0.1"), Ports: []model.Port{{Number: 80, Class: model.HTTP}}, SPIFFEID: "spiffe://td/x"}},
			Routes: []model.Route{{Kind: model.HTTPRoute, Namespace: "a", Name: "r", Parents: []model.ParentRef{{Service: model.ServiceName{Namespace: "a", Name: "b"}}},
				Rules: []model.Rule{{Matches: []model.Match{{PathKind: model.PathRegex, Path: pattern}}}}}},
		})
		arm := s.Services()[0].Ports[0].Program.Arms[0]
		if (arm.Regex == nil) != (arm.Rule.Invalid != "") || (arm.Rule.Invalid != "") != (len(problems) > 0) || arm.Regex == nil && arm.PathKind != model.PathAny {
			t.Fatalf("%q: %+v, %v", pattern, arm, problems)
		}
		plain, err := regexp.Compile(pattern)
		if err != nil {
			if arm.Regex != nil {
				t.Fatalf("%q was accepted: %v", pattern, err)
			}
			return
		}
		if arm.Regex == nil {
			return
		}
		plain.Longest()
		at := plain.FindStringIndex(text)
		if want := at != nil && at[0] == 0 && at[1] == len(text); arm.Regex.MatchString(text) != want {
			t.Fatalf("%q on %q: %v, want %v", pattern, text, !want, want)
		}
	})
}
