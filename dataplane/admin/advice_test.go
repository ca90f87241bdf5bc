package admin

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

func shop(t testing.TB) *snapshot.Snapshot {
	t.Helper()
	s, problems := compile.Compile(modeltest.Mesh(t, `
service shop/cart 10.96.0.10
pods shop/cart 8080,9000=tcp
service pay/cart 10.96.0.11
pods pay/cart 80,443=tcp
service pay/ledger 10.96.0.12
pods pay/ledger 7000=tcp
service shop/ill 10.96.0.13
pods shop/ill 8080 health=unhealthy
local shop/web 8080
local shop/job 8080 scoped
`))
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	return s
}

// TestAdvice: a refusal says which ports and names there are, and gives what would have worked.
func TestAdvice(t *testing.T) {
	s := shop(t)
	for _, tt := range []struct{ name, flow, request, want string }{
		{"another port in Host", "shop/web > 10.96.0.10:8080 http1 host=cart:9090", "GET cart:9090/x",
			"port-mismatch; shop/cart; 8080/http 9000/tcp; cart cart.shop cart.shop.svc cart.shop.svc.cluster.local cart.shop.aether.internal; shop/web > 10.96.0.10:8080 http1 host=cart | GET cart/x; shop/web > 10.96.0.10:9000"},
		{"another port dialled", "shop/web > 10.96.0.10:7070 http1 host=cart", "GET cart/",
			"port-not-declared; shop/cart; 8080/http 9000/tcp; cart cart.shop cart.shop.svc cart.shop.svc.cluster.local cart.shop.aether.internal; shop/web > 10.96.0.10:8080 http1 host=cart | GET cart/; shop/web > 10.96.0.10:9000"},
		{"no port on the proxy port", "shop/web > proxy http1 host=cart", "POST cart/",
			"port-required; shop/cart; 8080/http 9000/tcp; cart cart.shop cart.shop.svc cart.shop.svc.cluster.local cart.shop.aether.internal; shop/web > proxy http1 host=cart:8080 | POST cart:8080/"},
		{"a raw port on the proxy port", "shop/web > proxy http1 host=cart:9000", "GET cart:9000/",
			"port-not-http; shop/cart; 8080/http 9000/tcp; cart cart.shop cart.shop.svc cart.shop.svc.cluster.local cart.shop.aether.internal; shop/web > proxy http1 host=cart:8080 | GET cart:8080/"},
		{"another namespace's, by its short name", "shop/web > proxy http1 host=ledger:7000", "GET ledger:7000/",
			"no-such-name; ; ; ledger.pay; "},
		{"a slip", "shop/web > proxy http1 host=crat:8080", "GET crat:8080/",
			"no-such-name; ; ; cart cart.pay; shop/web > proxy http1 host=cart:8080 | GET cart:8080/; shop/web > proxy http1 host=cart.pay:80 | GET cart.pay:80/"},
		{"nothing like it", "shop/web > proxy http1 host=elsewhere.example", "GET elsewhere.example/",
			"no-such-name; ; ; cart ill; shop/web > proxy http1 host=cart:8080 | GET cart:8080/"},
		{"nobody healthy", "shop/web > 10.96.0.13:8080 http1 host=ill", "GET ill/",
			"no-endpoint; shop/ill; 8080/http; ill ill.shop ill.shop.svc ill.shop.svc.cluster.local ill.shop.aether.internal; "},
		{"silence on HTTP", "shop/web > 10.96.0.10:8080 silent", "",
			"idle; shop/cart; 8080/http 9000/tcp; cart cart.shop cart.shop.svc cart.shop.svc.cluster.local cart.shop.aether.internal; shop/web > 10.96.0.10:8080 http1 host=cart | GET cart/; shop/web > 10.96.0.10:9000"},
		{"18082 to nobody", "shop/job > 192.0.2.1:18082 opaque", "", "blackhole; ; ; cart ill; shop/job > 192.0.2.1:8080 http1 host=cart | GET cart/"},
		{"no namespace", "/x > proxy http1 host=cart:8080", "GET cart:8080/",
			"caller-namespace-unknown; ; ; cart.pay.aether.internal cart.shop.aether.internal; /x > proxy http1 host=cart.pay.aether.internal:80 | GET cart.pay.aether.internal:80/; /x > proxy http1 host=cart.shop.aether.internal:8080 | GET cart.shop.aether.internal:8080/"},
		{"CONNECT", "shop/web > proxy http1 host=cart:8080", "CONNECT cart:8080",
			"connect; shop/cart; 8080/http 9000/tcp; cart cart.shop cart.shop.svc cart.shop.svc.cluster.local cart.shop.aether.internal; shop/web > proxy http1 host=cart:8080 | GET cart:8080/"},
		{"a port that the pod does not serve", "shop/web < 9999", "", "unknown-sni; shop/web; 8080/http; ; shop/web < 8080"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e, err := Explain(s, tt.flow, tt.request)
			if err != nil {
				t.Fatal(err)
			}
			a := e.Advice
			if a == nil {
				t.Fatalf("%s: no advice", e.Verdict)
			}
			ports := make([]string, len(a.Ports))
			for i, p := range a.Ports {
				ports[i] = fmt.Sprintf("%d/%s", p.Port, p.Class)
			}
			try := make([]string, len(a.Try))
			for i, t := range a.Try {
				try[i] = strings.TrimSuffix(t.Flow+" | "+t.Request, " | ")
			}
			got := strings.Join([]string{e.Reason, a.Service, strings.Join(ports, " "), strings.Join(a.Names, " "), strings.Join(try, "; ")}, "; ")
			if got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
			if a.Text == "" {
				t.Error("it does not say how to mend it")
			}
			if !strings.Contains(e.String(), a.Text) {
				t.Errorf("the text for people lacks it:\n%s", e)
			}
		})
	}
	for _, flow := range []string{"shop/web > 10.96.0.10:9000", "shop/web > 192.0.2.1:443 tls"} {
		if e, err := Explain(s, flow, ""); err != nil || e.Advice != nil {
			t.Errorf("%s is not refused and gets advice: %+v, %v", flow, e, err)
		}
	}
}

// TestMend: every reason there is either never refuses, or says how to mend it.
func TestMend(t *testing.T) {
	fine := []decide.Reason{
		decide.DeclaredTCP, decide.RawSpelling, decide.DeclaredHTTP, decide.ProxyPort, decide.MeshAddress, decide.EndpointAddress, decide.ForeignAddress,
		decide.TLSRoute, decide.TCPRoute, decide.MeshName, decide.NotMesh, decide.TLS, decide.Opaque, decide.ServerFirst, decide.NoNames,
		decide.HTTPRoute, decide.GRPCRoute, decide.Redirect, decide.CORSPreflight, decide.Readyz, decide.Live, decide.Ready, decide.ServedPort,
	}
	known := map[string]bool{}
	for _, r := range decide.Reasons() {
		known[r.String()] = true
		if slices.Contains(fine, r) == (mend[r.String()] != "") {
			t.Errorf("%s: it has to be among the two, and only one of them", r)
		}
	}
	for r := range mend {
		if !known[r] {
			t.Errorf("there is no reason %s", r)
		}
	}
}

// TestAdviceHolds: over random meshes and flows, every refusal says how to mend it; what is advised
// is not refused when it is asked about as it is written; every name names what it is given for, and the
// ports of the service are all there.
func TestAdviceHolds(t *testing.T) {
	refused, tried := map[string]int{}, 0
	for seed := range uint64(1500) {
		r := rand.New(rand.NewPCG(seed, 23))
		s, _ := compile.Compile(modeltest.RandomMesh(r))
		for range 4 {
			f, q := modeltest.RandomFlow(r), modeltest.RandomRequest(r)
			f.Sniff, f.Host = model.SniffHTTP11, string(q.Authority)
			e := ExplainFlow(s, &f, &q)
			if e.Action == decide.Refuse.String() && e.Advice == nil || e.Action == decide.Forward.String() && e.Advice != nil {
				t.Fatalf("seed %d: %s > %s: advice %+v", seed, e.Flow, e.Verdict, e.Advice)
			}
			if e.Advice == nil {
				continue
			}
			refused[e.Reason]++
			if e.Advice.Text == "" {
				t.Fatalf("seed %d: %s: %s does not say how to mend it", seed, e.Flow, e.Verdict)
			}
			for _, a := range e.Advice.Try {
				tried++
				again, err := Explain(s, a.Flow, a.Request)
				if err != nil {
					t.Fatalf("seed %d: %s: %v", seed, a.Flow, err)
				}
				if again.Action != "forward" && again.Action != "deliver" {
					t.Fatalf("seed %d: %s is refused (%s), and so is what is advised: %s %s: %s", seed, e.Flow, e.Verdict, a.Flow, a.Request, again.Verdict)
				}
			}
			if e.Advice.Service == "" || f.Dir == model.Inbound {
				continue
			}
			for _, n := range e.Advice.Names {
				if svc := snapshot.Name(s, n, f.Namespace).Service; svc == nil || svc.Name.String() != e.Advice.Service {
					t.Fatalf("seed %d: %s is no name of %s for %s", seed, n, e.Advice.Service, e.Flow)
				}
			}
			ns, name, _ := strings.Cut(e.Advice.Service, "/")
			svc := s.Service(model.ServiceName{Namespace: ns, Name: name})
			ports := svc.Ports
			if svc.Kind == snapshot.MeshOnly && len(e.Advice.Ports) != len(ports) {
				ports = svc.PodPorts
			}
			if !slices.EqualFunc(ports, e.Advice.Ports, func(p snapshot.Port, a PortAdvice) bool { return p.Number == a.Port && p.Class.String() == a.Class }) {
				t.Fatalf("seed %d: ports %v of %s, which has %+v", seed, e.Advice.Ports, e.Advice.Service, ports)
			}
		}
	}
	t.Logf("%d attempts advised, for %v", tried, refused)
	if len(refused) < 5 || tried < 50 {
		t.Error("too few refusals were met")
	}
}

// TestDistance against the definition.
func TestDistance(t *testing.T) {
	var slow func(a, b string) int
	slow = func(a, b string) int {
		switch {
		case a == "" || b == "":
			return len(a) + len(b)
		case a[0] == b[0]:
			return slow(a[1:], b[1:])
		}
		return 1 + min(slow(a[1:], b), slow(a, b[1:]), slow(a[1:], b[1:]))
	}
	r := rand.New(rand.NewPCG(4, 2))
	word := func() string {
		b := make([]byte, r.IntN(7))
		for i := range b {
			b[i] = "abc"[r.IntN(3)]
		}
		return string(b)
	}
	for range 2000 {
		if a, b := word(), word(); distance(a, b) != slow(a, b) {
			t.Fatalf("%q and %q: %d, want %d", a, b, distance(a, b), slow(a, b))
		}
	}
	if d := distance(strings.Repeat("x", 300), "x"); d < 10 {
		t.Errorf("a name that is no label is %d away", d)
	}
}
