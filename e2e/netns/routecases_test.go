package netns

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// Public bug reports about where a request goes and what it looks like when it arrives, by their numbers in
// docs/cases.md. Each has its own route on Service front, told apart by the path or a field.

// colours are the services of the route tests: front is the parent, the others are backends.
var colours = []string{"front", "blue", "green"}

const firstColour = 60 // of their addresses

func colourPods() (pods []mesh.Pod) {
	for _, name := range colours {
		pods = append(pods, mesh.Pod{Name: name, Node: 1, Ports: "8080"})
	}
	return pods
}

// arrived is what an application saw of a request.
type arrived struct {
	By     string // whose application; "" if none answered
	Target string
	Header http.Header
	status int
	answer http.Header
}

func colourApps(ctx context.Context) error {
	for i, name := range colours {
		err := w.ServeHTTP(ctx, &w.Pod(name).Space, local(8080), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			json.NewEncoder(w).Encode(arrived{By: name, Target: r.RequestURI, Header: r.Header})
		}))
		if err == nil {
			err = w.Service(rig.ServiceManifest{Name: name, ClusterIPs: w.ClusterIPs(uint8(firstColour + i)), Ports: []uint16{8080}})
		}
		if err != nil {
			return err
		}
	}
	return w.Service(rig.ServiceManifest{Name: "hollow", ClusterIPs: w.ClusterIPs(firstColour + 5), Ports: []uint16{8080}}) // no pod
}

// routes puts a document into force whose HTTPRoute has these rules on Service front.
func routes(t *testing.T, ctx context.Context, name, rules string) {
	t.Helper()
	write(t, ctx, name, routeOn("shop", name, rules))
}

func routeOn(namespace, name, rules string) string {
	return "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {namespace: " + namespace + ", name: " + name + "}\n" +
		"spec:\n  parentRefs: [{group: \"\", kind: Service, namespace: shop, name: front}]\n  rules:\n" + rules
}

// to is a backendRef.
func to(name string, weight int) string {
	return fmt.Sprintf("{group: \"\", kind: Service, name: %s, port: 8080, weight: %d}", name, weight)
}

// asks sends a request for front by every way that there is and wants the same of all; it returns what came of the last.
func asks(t *testing.T, ctx context.Context, path string, header ...string) arrived {
	t.Helper()
	var last arrived
	for i, by := range []way{{"web", vip(firstColour, 8080)}, {"job", proxyPort}, {"web", vip6(firstColour, 8080)}} {
		a := ask(t, ctx, by, path, header...)
		if i > 0 && (a.By != last.By || a.Target != last.Target || a.status != last.status) {
			t.Errorf("%s: %s by %s gets %d from %q as %q, but %d from %q as %q before", path, by.from, by.dial, a.status, a.By, a.Target, last.status, last.By, last.Target)
		}
		last = a
	}
	return last
}

func ask(t *testing.T, ctx context.Context, by way, path string, header ...string) (got arrived) {
	t.Helper()
	rt := transport(t, false, w.Pod(by.from), by.dial)
	defer rt.CloseIdleConnections()
	a := mustSend(t, ctx, rt, "GET", "front.shop.aether.internal:8080", path, nil, header...)
	if a.StatusCode == 200 {
		if err := json.Unmarshal([]byte(a.body), &got); err != nil {
			t.Fatalf("%s: %v: %q", path, err, a.body)
		}
	}
	got.status, got.answer = a.StatusCode, a.Header
	return got
}

// TestCase149 (kuma 18266): with weight 0 alone nobody gets the request, and it fails.
func TestCase149(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	routes(t, ctx, "case149", "  - {matches: [{path: {value: /case149}}], backendRefs: ["+to("blue", 0)+"]}\n")
	if got := asks(t, ctx, "/case149"); got.By != "" || got.status != 503 {
		t.Errorf("got %d from %q, want 503 from nobody", got.status, got.By)
	}
}

// TestCase150 (kuma 18146): the share of a backend that cannot be resolved fails; it is nobody else's.
func TestCase150(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	routes(t, ctx, "case150", "  - {matches: [{path: {value: /case150}}], backendRefs: ["+to("blue", 1)+", "+to("missing", 1)+"]}\n")
	count := map[string]int{}
	const n = 300
	rt := transport(t, false, w.Pod("web"), vip(firstColour, 8080))
	for range n {
		a := mustSend(t, ctx, rt, "GET", "front", "/case150", nil)
		if a.StatusCode == 200 && strings.Contains(a.body, `"By":"blue"`) {
			count["blue"]++
		} else {
			count[fmt.Sprint(a.StatusCode)]++
		}
	}
	// Six standard deviations.
	if count["blue"]+count["500"] != n || count["500"] < n/2-52 || count["500"] > n/2+52 {
		t.Errorf("%v of %d, want half of them 500 and half blue", count, n)
	}
}

// TestCase151 (istio 31745): a backend of weight 0 gets nothing.
func TestCase151(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	routes(t, ctx, "case151", "  - {matches: [{path: {value: /case151}}], backendRefs: ["+to("blue", 0)+", "+to("green", 100)+", "+to("missing", 0)+"]}\n")
	for range 50 {
		if got := ask(t, ctx, way{"web", vip(firstColour, 8080)}, "/case151"); got.By != "green" {
			t.Fatalf("got %d from %q, want green", got.status, got.By)
		}
	}
}

// TestCase152 (envoy gateway 8288): a Service without endpoints is 503, not an invalid reference.
func TestCase152(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	routes(t, ctx, "case152", "  - {matches: [{path: {value: /case152}}], backendRefs: ["+to("hollow", 1)+"]}\n")
	if got := asks(t, ctx, "/case152"); got.status != 503 {
		t.Errorf("got %d, want 503", got.status)
	}
}

// TestCase153 (kgateway 11548): a rule that can reach nobody takes no other with it.
func TestCase153(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	routes(t, ctx, "case153-zero", "  - {matches: [{path: {value: /case153/zero}}], backendRefs: ["+to("blue", 0)+", "+to("green", 0)+"]}\n")
	routes(t, ctx, "case153-good", "  - {matches: [{path: {value: /case153}}], backendRefs: ["+to("green", 1)+"]}\n")
	if got := asks(t, ctx, "/case153/zero"); got.By != "" || got.status < 500 {
		t.Errorf("weights of zero: got %d from %q", got.status, got.By)
	}
	if got := asks(t, ctx, "/case153/other"); got.By != "green" {
		t.Errorf("the good route: got %d from %q", got.status, got.By)
	}
	if got := asks(t, ctx, "/elsewhere"); got.By != "front" {
		t.Errorf("neither: got %d from %q", got.status, got.By)
	}
}

// TestCase159 (conformance): a prefix is one of whole path elements.
func TestCase159(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	routes(t, ctx, "case159", "  - {matches: [{path: {value: /case159/v2}}], backendRefs: ["+to("green", 1)+"]}\n")
	for path, want := range map[string]string{
		"/case159/v2": "green", "/case159/v2/": "green", "/case159/v2/x": "green", "/case159/v2?v2": "green",
		"/case159/v2example": "front", "/case159/v": "front", "/case159": "front", "/x/case159/v2": "front",
	} {
		if got := asks(t, ctx, path); got.By != want || got.Target != path {
			t.Errorf("%s: got %d from %q as %q, want %s", path, got.status, got.By, got.Target, want)
		}
	}
}

// TestCase161 (istio 47341): of equal names in a match the first counts, and a field that is there is there though empty.
func TestCase161(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	routes(t, ctx, "case161", "  - {matches: [{path: {value: /case161}, headers: [{name: X-Colour, value: green}, {name: x-colour, value: blue}]}], backendRefs: ["+to("green", 1)+"]}\n")
	for _, tt := range []struct {
		header []string
		want   string
	}{
		{[]string{"X-Colour", "green"}, "green"}, {[]string{"x-colour", "blue"}, "front"}, {[]string{"X-Colour", ""}, "front"}, {nil, "front"},
	} {
		if got := asks(t, ctx, "/case161", tt.header...); got.By != tt.want {
			t.Errorf("%q: got %d from %q, want %s", tt.header, got.status, got.By, tt.want)
		}
	}
}

// TestCase162 (istio 59933): a filter that cannot be honoured is not left out: its rule fails, and is told.
func TestCase162(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	routes(t, ctx, "case162", "  - {matches: [{path: {value: /case162/bad}}], filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x-a, value: \"a\\nx-b: c\"}]}}]}\n"+
		"  - {matches: [{path: {value: /case162}}], filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x-a, value: fine}]}}]}\n")
	if got := asks(t, ctx, "/case162/bad"); got.status != 500 || got.By != "" {
		t.Errorf("got %d from %q, want 500", got.status, got.By)
	}
	if got := asks(t, ctx, "/case162/good"); got.By != "front" || got.Header.Get("X-A") != "fine" {
		t.Errorf("the good rule: got %d from %q with %q", got.status, got.By, got.Header.Get("X-A"))
	}
	told(t, ctx, "case162")
}

// told: both proxies name the object among their problems.
func told(t *testing.T, ctx context.Context, object string) {
	t.Helper()
	for node := range w.Rig.Nodes {
		s, err := w.Status(ctx, node)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, p := range s.Problems {
			found = found || strings.Contains(p.Object+p.Where+p.Reason, object)
		}
		if !found {
			t.Errorf("node%d tells nothing of %s: %+v", node+1, object, s.Problems)
		}
	}
}

// TestCase164 (gateway-api 4823): of the backends' own filters only the chosen one's apply, after the rule's.
func TestCase164(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	ref := func(name string) string {
		return "{group: \"\", kind: Service, name: " + name + ", port: 8080, filters: [{type: RequestHeaderModifier, requestHeaderModifier: {add: [{name: x-order, value: " + name + "}], set: [{name: x-" + name + ", value: \"1\"}]}}]}"
	}
	routes(t, ctx, "case164", "  - matches: [{path: {value: /case164}}]\n    filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x-order, value: rule}]}}]\n"+
		"    backendRefs: ["+ref("blue")+", "+ref("green")+"]\n")
	seen := map[string]bool{}
	for range 60 {
		got := ask(t, ctx, way{"job", proxyPort}, "/case164", "X-Order", "client")
		other := map[string]string{"blue": "green", "green": "blue"}[got.By]
		if got.Header.Get("X-"+got.By) != "1" || got.Header.Get("X-"+other) != "" || strings.Join(got.Header["X-Order"], ",") != "rule,"+got.By {
			t.Fatalf("%s got %v", got.By, got.Header)
		}
		seen[got.By] = true
	}
	if len(seen) != 2 {
		t.Errorf("60 requests reached %v only", seen)
	}
}

// TestCase171 (linkerd2-proxy 4175): a prefix that is none is told. What it was to govern cannot be told, so nothing
// of its Service goes to another rule until it is mended (decision 047).
func TestCase171(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	addPod(t, ctx, mesh.Pod{Name: "case171", Account: "case171", Node: 1, Ports: "8080"}) // other tests' rules are on front
	if err := w.Service(rig.ServiceManifest{Name: "case171", ClusterIPs: w.ClusterIPs(201), Ports: []uint16{8080}}); err != nil {
		t.Fatal(err)
	}
	on := func(name, rules string) {
		write(t, ctx, name, strings.Replace(routeOn("shop", name, rules), "name: front}", "name: case171}", 1))
	}
	on("case171-bad", "  - {matches: [{path: {type: PathPrefix, value: case171}}], backendRefs: ["+to("blue", 1)+"]}\n")
	on("case171-good", "  - {matches: [{path: {type: PathPrefix, value: /case171}}], backendRefs: ["+to("green", 1)+"]}\n")
	get := func() *answer {
		return mustSend(t, ctx, transport(t, false, w.Pod("job"), proxyPort), "GET", "case171.shop.aether.internal:8080", "/case171/x", nil)
	}
	if a := get(); a.StatusCode != 500 {
		t.Errorf("beside a prefix that is none: %d %q, want 500", a.StatusCode, a.body)
	}
	told(t, ctx, "case171-bad")
	if err := w.Remove("case171-bad"); err != nil {
		t.Fatal(err)
	}
	settle(t, ctx)
	if a := get(); a.StatusCode != 200 || !strings.Contains(a.body, `"green"`) {
		t.Errorf("without it: %d %q, want green's answer", a.StatusCode, a.body)
	}
}

// TestCase174 (linkerd): what a route says that is not known is told, and its rules are not forgotten.
func TestCase174(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	routes(t, ctx, "case174", "  - {matches: [{path: {value: /case174/new}}], backendRefs: ["+to("green", 1)+"], fromTheFuture: {a: b}}\n"+
		"  - {matches: [{path: {value: /case174/old}}], backendRefs: ["+to("green", 1)+"]}\n")
	told(t, ctx, "case174")
	// Whatever is made of the rule: what it was written to govern does not go on without it.
	if got := asks(t, ctx, "/case174/new"); got.By == "front" || got.By == "blue" {
		t.Errorf("the rule was dropped: got %d from %q", got.status, got.By)
	}
	if got := asks(t, ctx, "/case174/old"); got.By == "front" || got.By == "blue" {
		t.Errorf("the other rule was dropped: got %d from %q", got.status, got.By)
	}
}

// TestCase154 (gateway-api 3592), 155 (envoy gateway 2976), 156 (envoy gateway 6764) and 157 (gateway-api 2078): a replaced
// prefix joins what follows with one slash, none more and none less.
func TestCase154(t *testing.T) {
	rewrites(t, "case154", "/", "/xyz", map[string]string{
		"/foo": "/xyz/foo", "/foo/": "/xyz/foo/", "/foo?a=/": "/xyz/foo?a=/",
		"/": "/xyz", // ours to choose: the root is no element, so that nothing followed the prefix
	})
}

func TestCase155(t *testing.T) {
	rewrites(t, "case155", "/api/foo/public/", "/", map[string]string{
		"/api/foo/public/bar": "/bar", "/api/foo/public/": "/", "/api/foo/public": "/", "/api/foo/public/a/b/": "/a/b/", "/api/foo/publicity": "/api/foo/publicity",
	})
}

func TestCase156(t *testing.T) {
	rewrites(t, "case156", "/", "/prefix/", map[string]string{"/test": "/prefix/test", "/a/b": "/prefix/a/b", "/": "/prefix"})
}

func TestCase157(t *testing.T) {
	rewrites(t, "case157", "/foo", "", map[string]string{"/foo": "/", "/foo/": "/", "/foo/bar": "/bar", "/foo?x=1": "/?x=1", "/food": "/food"})
}

// rewrites puts a route into force for requests with a field of its own, and compares the targets that arrive.
func rewrites(t *testing.T, name, prefix, replacement string, want map[string]string) {
	t.Helper()
	t.Parallel()
	ctx := within(t, patience)
	routes(t, ctx, name, fmt.Sprintf("  - matches: [{path: {type: PathPrefix, value: %s}, headers: [{name: x-case, value: %s}]}]\n", prefix, name)+
		fmt.Sprintf("    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: %q}}}]\n", replacement))
	for path, target := range want {
		if got := asks(t, ctx, path, "X-Case", name); got.By != "front" || got.Target != target {
			t.Errorf("%s with %s for %s: got %d from %q as %q, want %q", path, replacement, prefix, got.status, got.By, got.Target, target)
		}
	}
	if got := asks(t, ctx, prefix); got.Target != prefix {
		t.Errorf("without the field: %q became %q", prefix, got.Target)
	}
}

// TestCase175 (gateway-api conformance): the route of a consumer's namespace is for callers of that namespace alone.
func TestCase175(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	const rule = "  - {matches: [{path: {value: /case175}}], filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {set: [{name: x-route, value: %s}]}}]}\n"
	write(t, ctx, "case175-consumer", routeOn("ops", "case175-consumer", fmt.Sprintf(rule, "consumer")))
	check := func(when string, want map[string]string) {
		t.Helper()
		for _, by := range []way{{"ops", vip(firstColour, 8080)}, {"ops", proxyPort}, {"web", vip(firstColour, 8080)}, {"web", proxyPort}, {"job", proxyPort}} {
			got := ask(t, ctx, by, "/case175")
			if value := want[by.from]; got.By != "front" || got.answer.Get("X-Route") != value {
				t.Errorf("%s, from %s by %s: %d from %q, route %q, want %q", when, by.from, by.dial, got.status, got.By, got.answer.Get("X-Route"), value)
			}
		}
	}
	check("the consumer's alone", map[string]string{"ops": "consumer", "web": "", "job": ""})
	write(t, ctx, "case175-producer", routeOn("shop", "case175-producer", fmt.Sprintf(rule, "producer")))
	check("beside the producer's", map[string]string{"ops": "consumer", "web": "producer", "job": "producer"})
}

// TestConsumerRouteNamesTheProducersServices (Gateway API conformance, MeshConsumerRoute; GEP-1294): the route of a consumer's
// namespace may have the Service that it hangs on, and its neighbours, as backends without a ReferenceGrant.
func TestConsumerRouteNamesTheProducersServices(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	const rule = "  - {matches: [{path: {value: /consumer/%[1]s}}], filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {set: [{name: x-header-set, value: set}]}}],\n" +
		"     backendRefs: [{name: %[1]s, namespace: shop, port: 8080}]}\n"
	write(t, ctx, "consumer-backends", routeOn("ops", "consumer-backends", fmt.Sprintf(rule, "front")+fmt.Sprintf(rule, "blue")))
	for from, want := range map[string]string{"ops": "set", "web": ""} {
		for _, dial := range []string{vip(firstColour, 8080), proxyPort} {
			for _, backend := range []string{"front", "blue"} {
				by := backend
				if want == "" {
					by = "front" // the service itself
				}
				got := ask(t, ctx, way{from, dial}, "/consumer/"+backend)
				if got.status != 200 || got.By != by || got.answer.Get("X-Header-Set") != want {
					t.Errorf("from %s by %s for %s: %d of %q, x-header-set %q, want 200 of %s and %q", from, dial, backend, got.status, got.By, got.answer.Get("X-Header-Set"), by, want)
				}
			}
		}
	}
}

// TestPreflightsAndOwnAnswers (GEP-1767, Gateway API conformance HTTPRouteCORS; gateway-api 3857, ingress-nginx 2134, envoy 23839): a preflight is
// answered by the rule of the request that it asks about, and what the proxy answers itself can be read by those who may read the application's answers.
func TestPreflightsAndOwnAnswers(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	const cors = "filters: [{type: CORS, cors: {allowOrigins: [\"https://www.foo.com\"], %s}}]"
	rule := func(match, filter, backend string) string {
		return fmt.Sprintf("  - {matches: [{path: {value: /cors%s}], "+cors+", backendRefs: [{name: %s, port: 8080}]}\n", match, filter, backend)
	}
	routes(t, ctx, "cors", rule("/method}, method: PUT", "allowMethods: [GET, PUT]", "blue")+
		rule("/header}, headers: [{name: x-api, value: \"2\"}]", "allowHeaders: [x-api]", "blue")+
		rule("/none}", "allowMethods: [GET]", "hollow")+
		rule("/missing}", "allowMethods: [GET]", "is-not")+
		rule("/expose}", "allowMethods: [GET], exposeHeaders: [x-header-3]", "blue"))
	rt := transport(t, false, w.Pod("web"), vip(firstColour, 8080))
	for _, tt := range []struct {
		method, path string
		header       []string
		status       int
		name, want   string
	}{
		{"OPTIONS", "/method", []string{"Access-Control-Request-Method", "PUT"}, 204, "Allow-Origin", "https://www.foo.com"},
		{"OPTIONS", "/header", []string{"Access-Control-Request-Method", "GET", "Access-Control-Request-Headers", "x-api"}, 204, "Allow-Origin", "https://www.foo.com"},
		{"GET", "/none", nil, 503, "Allow-Origin", "https://www.foo.com"},
		{"GET", "/missing", nil, 500, "Allow-Origin", "https://www.foo.com"},
		{"OPTIONS", "/expose", []string{"Access-Control-Request-Method", "GET"}, 204, "Expose-Headers", "x-header-3"},
		{"OPTIONS", "/expose", []string{"Access-Control-Request-Method", "GET"}, 204, "Max-Age", "5"},
	} {
		a := mustSend(t, ctx, rt, tt.method, "front.shop.aether.internal:8080", "/cors"+tt.path, nil, append(tt.header, "Origin", "https://www.foo.com")...)
		if got := a.Header.Get("Access-Control-" + tt.name); a.StatusCode != tt.status || got != tt.want {
			t.Errorf("%s %s: %d with Access-Control-%s %q, want %d with %q", tt.method, tt.path, a.StatusCode, tt.name, got, tt.status, tt.want)
		}
		if a := mustSend(t, ctx, rt, tt.method, "front.shop.aether.internal:8080", "/cors"+tt.path, nil, append(tt.header, "Origin", "https://evil.example")...); a.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s %s: another origin may read it", tt.method, tt.path)
		}
	}
}

// TestCase106 (rustls 1014): a TLSRoute's names are compared without case, and the bytes that arrive are the client's own.
func TestCase106(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	tlsPort.Lock()
	t.Cleanup(tlsPort.Unlock)
	write(t, ctx, "case106", `apiVersion: gateway.networking.k8s.io/v1
kind: TLSRoute
metadata: {namespace: shop, name: case106}
spec:
  parentRefs: [{group: "", kind: Service, name: mp-tcpfirst}]
  hostnames: [web.secure.example]
  rules: [{backendRefs: [{name: app, port: 9006}]}]
`)
	first, l := legNamed("mp-tcpfirst")
	for name, routed := range map[string]bool{
		"web.secure.example": true, "Web.SECURE.Example": true, "web.secure.example.": true,
		"web.secure.example..": false, "other.secure.example": false, "secure.example": false,
	} {
		t.Run(name, func(t *testing.T) {
			ctx := within(t, patience/2)
			hello := string(clientHello(sni(name)))
			c := dial(t, ctx, w.Pod("web"), vip(first, l.tcp[0]))
			say(t, c, hello)
			if !routed {
				expect(t, c, "mp-tcpfirst:9000 tcp\n"+hello)
				return
			}
			s := queues[4].accept(t, ctx)
			expect(t, s, hello)
			say(t, s, "routed")
			expect(t, c, "routed")
		})
	}
	// What is no TLS is the port's own.
	c := dial(t, ctx, w.Pod("web"), vip(first, l.tcp[0]))
	say(t, c, "\x00plain")
	expect(t, c, "mp-tcpfirst:9000 tcp\n\x00plain")
}

// TestCase176 (gateway-api conformance): with routeSemantics GatewayAPI the dialled Service is meant, whatever Host says; without,
// Host names it.
func TestCase176(t *testing.T) {
	t.Parallel()
	ctx := within(t, 2*patience)
	m, err := mesh.New(ctx, mesh.Options{Proxy: w.binary, DevCA: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	for i, name := range []string{"client", "echo", "echo-v2"} {
		if _, err := m.AddPod(ctx, mesh.Pod{Name: name, Node: min(i, 1), Ports: "8080"}); err != nil {
			t.Fatal(err)
		}
		app := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "%s %s", name, r.Header.Get("X-Route"))
		})
		if err := m.ServeHTTP(ctx, &m.Pod(name).Space, local(8080), app); err != nil {
			t.Fatal(err)
		}
		if err := m.Service(rig.ServiceManifest{Name: name, ClusterIPs: m.ClusterIPs(uint8(10 + i)), Ports: []uint16{8080}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Write("route", `apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {namespace: shop, name: echo-v2}
spec:
  parentRefs: [{group: "", kind: Service, name: echo-v2}]
  rules:
  - matches: [{path: {value: /routed}}]
    filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: x-route, value: v2}]}}]
    backendRefs: [{name: echo-v2, port: 8080}]
`); err != nil {
		t.Fatal(err)
	}
	if err := m.Start(ctx); err != nil {
		t.Fatal(err)
	}
	v2 := m.ClusterIPs(12)[0].String() + ":8080"
	check := func(semantics string, want map[[2]string]string) {
		t.Helper()
		for ask, value := range want {
			a := mustSend(t, ctx, transport(t, false, m.Pod("client"), v2), "GET", ask[0], ask[1], nil)
			if got := outcome(a); got != value {
				t.Errorf("%s: Host %s%s: got %s, want %s", semantics, ask[0], ask[1], got, value)
			}
		}
	}
	check("Aether", map[[2]string]string{
		{"echo", "/routed"}: "200 echo", {"echo-v2", "/routed"}: "200 echo-v2 v2", {"echo-v2", "/else"}: "200 echo-v2",
	})
	if err := m.Write("config", "apiVersion: config.aether.io/v1\nkind: MeshConfig\nmetadata: {namespace: aether-system, name: default}\nspec: {routeSemantics: GatewayAPI}\n"); err != nil {
		t.Fatal(err)
	}
	if err := m.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	check("GatewayAPI", map[[2]string]string{
		{"echo", "/routed"}: "200 echo-v2 v2", {"echo-v2", "/routed"}: "200 echo-v2 v2", {"foreign.example", "/routed"}: "200 echo-v2 v2",
		{"echo-v2", "/else"}: "404", {"echo", "/else"}: "404",
	})
}
