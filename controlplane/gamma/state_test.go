package gamma

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/yaml"

	"aether/controlplane/input"
	"aether/dataplane/model"
)

// object is YAML as an API server's client decodes it.
func object(t testing.TB, text string) map[string]any {
	t.Helper()
	b, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	var u map[string]any
	if err := json.Unmarshal(b, &u); err != nil {
		t.Fatal(err)
	}
	return u
}

// put is Set of YAML.
func (s *State) put(t testing.TB, kind, text string) {
	t.Helper()
	s.Set(kind, object(t, text))
}

// said are the problems that s has, one a line.
func (s *State) said() string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(s.problems)) {
		for _, p := range s.problems[k] {
			out = append(out, p.Object+": "+p.Reason)
		}
	}
	return strings.Join(out, "\n")
}

func routeTo(name, backend string) string {
	return `{metadata: {name: ` + name + `, namespace: shop}, spec: {parentRefs: [{kind: Service, group: "", name: cart}], rules: [{backendRefs: [` + backend + `]}]}}`
}

// TestObjectsThatCannotBeReadStay: an API server's object that this program cannot read any more, for it is
// of a newer version or what checks it was loosened, governs at least what it governed; its removal removes it.
func TestObjectsThatCannotBeReadStay(t *testing.T) {
	const filter = `{metadata: {name: f, namespace: shop}, spec: {scope: SCOPE_INBOUND, targetRefs: [{kind: Service, name: cart}], rbac: {action: DENY, policies: [{name: p, principals: [{namespace: x}]}]}}}`
	const route = `{metadata: {name: r, namespace: shop}, spec: {parentRefs: [{kind: Service, group: "", name: cart}, {kind: Service, group: "", name: till}], rules: [{backendRefs: [{name: cart, port: 80}]}]}}`
	governs := func(s *State) string {
		b := s.Whole()
		var out []string
		for _, list := range b.Filters {
			out = append(out, fmt.Sprint("filter ", list[0].Scope == model.ScopeInbound, list[0].Targets))
		}
		for _, list := range b.Routes {
			parents := slices.SortedFunc(slices.Values(list[0].Parents), func(a, b model.ParentRef) int { return model.ServiceName.Compare(a.Service, b.Service) })
			out = append(out, fmt.Sprint("route ", parents))
		}
		for _, list := range b.Services {
			out = append(out, fmt.Sprint("service ", list[0].ClusterIPs))
		}
		return strings.Join(out, "\n")
	}
	for _, tt := range []struct{ kind, good, bad string }{
		{KindHTTPFilter, filter, strings.Replace(filter, "targetRefs", "targetSelectors", 1)},
		{KindHTTPFilter, filter, strings.Replace(filter, "{kind: Service, name: cart}", "{kind: Service, selector: a}", 1)},
		{KindHTTPFilter, filter, strings.Replace(filter, "scope: SCOPE_INBOUND", "scope: SCOPE_BOTH", 1)},
		{KindHTTPFilter, filter, strings.Replace(filter, "spec: {", "spec2: {", 1)},
		{KindHTTPRoute, route, strings.Replace(route, "name: cart}, {", "name: [cart]}, {", 1)},
		{KindHTTPRoute, route, strings.Replace(route, "name: till", "nme: till", 1)},
		{KindHTTPRoute, route, strings.Replace(route, "parentRefs: [", "parentRefs: {a: 1}, x: [", 1)},
	} {
		s := NewState("", input.Settings{})
		s.put(t, tt.kind, tt.good)
		was := governs(s)
		s.put(t, tt.kind, tt.bad)
		if is := governs(s); is != was {
			t.Errorf("%s\ngoverns %s\nit was  %s", tt.bad, is, was)
		}
		if s.said() == "" {
			t.Errorf("%s: nothing is told", tt.bad)
		}
		s.Delete(tt.kind, "shop", object(t, tt.good)["metadata"].(map[string]any)["name"].(string))
		if is := governs(s); is != "" || s.said() != "" {
			t.Errorf("removed: %s\n%s", is, s.said())
		}
	}
	s := NewState("", input.Settings{})
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "cart", Namespace: "shop"}, Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Port: 80}}}}
	s.SetService(svc)
	was := governs(s)
	svc = svc.DeepCopy()
	svc.Spec.Ports[0].Protocol = "QUIC"
	s.SetService(svc)
	for range 2 {
		if is := governs(s); is != was || !strings.Contains(s.said(), "QUIC") || !strings.Contains(s.said(), stays) {
			t.Errorf("service: %s, was %s; %s", is, was, s.said())
		}
		// What it hangs on changes: that is told still.
		s.SetSlice(&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "cart-1", Namespace: "shop", Labels: map[string]string{discoveryv1.LabelServiceName: "cart"}}})
	}
	s.Delete(KindService, "shop", "cart")
	if is := governs(s); is != "" || s.said() != "" {
		t.Errorf("removed: %s, %s", is, s.said())
	}
}

// TestStays: an object that cannot be read any more stays as it was and one problem of it says so, in the same words
// whatever else becomes wrong with it: the age of a problem is that of its words (controlplane.Loop).
func TestStays(t *testing.T) {
	const route = `{metadata: {name: r, namespace: shop}, spec: {parentRefs: [{kind: Service, group: "", name: cart}], rules: [{backendRefs: [{name: cart, port: 80}]}]}}`
	const policy = `{metadata: {name: p, namespace: shop}, spec: {targetRef: {kind: Service, group: "", name: cart}, udsSocket: app/http.sock}}`
	service := func(s *State, protocol corev1.Protocol) {
		s.SetService(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "cart", Namespace: "shop"}, Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Port: 80, Protocol: protocol}}}})
	}
	put := func(kind, text string) func(*State, *testing.T) {
		return func(s *State, t *testing.T) { s.put(t, kind, text) }
	}
	for _, tt := range []struct {
		label           string
		good, bad, also func(*State, *testing.T)
	}{
		{"Service shop/cart",
			func(s *State, _ *testing.T) { service(s, corev1.ProtocolTCP) },
			func(s *State, _ *testing.T) { service(s, "QUIC") },
			func(s *State, _ *testing.T) { service(s, "SCTPX") }},
		{"HTTPRoute shop/r", put(KindHTTPRoute, route),
			put(KindHTTPRoute, strings.Replace(route, "parentRefs: [", "parentRefs: {a: 1}, x: [", 1)),
			put(KindHTTPRoute, strings.Replace(route, "parentRefs: [", "parentRefs: {b: 1}, y: [", 1))},
		{"EndpointPolicy shop/p", put(KindEndpointPolicy, policy),
			put(KindEndpointPolicy, strings.Replace(policy, "udsSocket: app/http.sock", "udsSocket: ../x", 1)),
			put(KindEndpointPolicy, strings.Replace(policy, "targetRef", "targetRefs", 1))},
	} {
		t.Run(tt.label, func(t *testing.T) {
			s := NewState("", input.Settings{})
			kept := func(when string) {
				t.Helper()
				n := 0
				for _, p := range s.Whole().Problems[tt.label] {
					if p.Reason == stays {
						n++
					}
				}
				if n != 1 {
					t.Fatalf("%s: %d problems say that it stays: %v", when, n, s.Whole().Problems)
				}
			}
			tt.good(s, t)
			in := s.Whole()
			tt.bad(s, t)
			kept("flawed")
			tt.also(s, t)
			kept("with another flaw")
			if is := s.Whole(); !reflect.DeepEqual(is.Services, in.Services) || !reflect.DeepEqual(is.Policies, in.Policies) || len(is.Routes) != len(in.Routes) {
				t.Errorf("is %+v\nwas %+v", is, in)
			}
			tt.good(s, t)
			if p := s.Whole().Problems; len(p) > 0 {
				t.Errorf("mended: %v", p)
			}
			tt.bad(s, t)
			kept("flawed again")
		})
	}
}

// TestRefusedFormsDoNotAddUp: of several refused forms of an object the last one governs, and with it what the last good one
// governed; what only those between named is let go.
func TestRefusedFormsDoNotAddUp(t *testing.T) {
	filter := func(target, more string) string {
		return `{metadata: {name: f, namespace: shop}, spec: {scope: SCOPE_CHAIN, targetRefs: [{kind: Service, name: ` + target + `}], rbac: {action: DENY, policies: [{name: p, principals: [{namespace: x}]}]}` + more + `}}`
	}
	route := func(parent, more string) string {
		return `{metadata: {name: f, namespace: shop}, spec: {parentRefs: [{kind: Service, group: "", name: ` + parent + `}], rules: [{backendRefs: [{name: cart, port: 80}]}]` + more + `}}`
	}
	for kind, form := range map[string]func(string, string) string{KindHTTPFilter: filter, KindHTTPRoute: route} {
		s := NewState("", input.Settings{})
		for i, tt := range []struct{ of, more, want string }{
			{"o", ", hostnames: 7", "o"}, {"m", ", hostnames: 7", "m"}, // it never was good
			{"a", "", "a"}, {"b", ", hostnames: 7", "a b"}, {"c", ", hostnames: 7", "a c"}, {"a", ", hostnames: 7", "a"}, {"d", "", "d"}, {"e", ", hostnames: 7", "d e"}, {"e", "", "e"},
		} {
			s.put(t, kind, form(tt.of, tt.more))
			var is []string
			for _, list := range s.Whole().Filters {
				for _, n := range list[0].Targets {
					is = append(is, n.Name)
				}
			}
			for _, list := range s.Whole().Routes {
				for _, p := range list[0].Parents {
					is = append(is, p.Service.Name)
				}
			}
			if slices.Sort(is); strings.Join(is, " ") != tt.want {
				t.Errorf("%s, form %d: governs %s, want %s\n%s", kind, i, is, tt.want, s.said())
			}
		}
	}
}

// A grant concerns the routes that point into its namespace, and no other is
// looked at again.
func TestGrantsTouchWhatTheyConcern(t *testing.T) {
	s := NewState("", input.Settings{})
	s.put(t, KindHTTPRoute, routeTo("into-db", "{name: pg, namespace: db, port: 80}"))
	for i := range 20 {
		s.put(t, KindHTTPRoute, routeTo(fmt.Sprint("own-", i), "{name: cart, port: 80}"))
		s.put(t, KindGRPCRoute, routeTo(fmt.Sprint("into-mail-", i), "{name: mx, namespace: mail, port: 80}"))
	}
	s.Take()
	key := input.RouteKey{Kind: model.HTTPRoute, Namespace: "shop", Name: "into-db"}
	invalid := func() string { return s.routes[key].out.Rules[0].Backends[0].Invalid }
	if !strings.HasPrefix(invalid(), "RefNotPermitted: ") || !strings.Contains(s.said(), "HTTPRoute shop/into-db: rules[0].backendRefs[0]: RefNotPermitted") {
		t.Fatalf("without a grant: %q\n%s", invalid(), s.said())
	}
	const grant = `{metadata: {name: g, namespace: db}, spec: {from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: shop}], to: [{group: "", kind: Service}]}}`
	before := s.resolved
	s.put(t, KindReferenceGrant, grant)
	b := s.Take()
	if invalid() != "" || len(b.Routes) != 1 || len(b.Routes[key]) != 1 || s.resolved != before+1 {
		t.Errorf("with a grant: %q, changed %v, %d translations", invalid(), b.Routes, s.resolved-before)
	}
	if problems, ok := b.Problems["HTTPRoute shop/into-db"]; !ok || len(problems) != 0 {
		t.Errorf("its problem is not taken back: %v", b.Problems)
	}
	if s.put(t, KindReferenceGrant, grant); s.resolved != before+1 {
		t.Error("the same grant again had something translated")
	}
	if b := s.Take(); !b.Empty() {
		t.Errorf("the same grant again says %+v", b)
	}
	s.Delete(KindReferenceGrant, "db", "g")
	if b := s.Take(); !strings.HasPrefix(invalid(), "RefNotPermitted") || len(b.Routes) != 1 {
		t.Errorf("the grant went: %q, %v", invalid(), b.Routes)
	}
	s.Clear(KindHTTPRoute)
	if b := s.Take(); len(b.Routes) != 21 || len(b.Routes[key]) != 0 || s.Count(KindHTTPRoute) != 0 || s.Count(KindGRPCRoute) != 20 {
		t.Errorf("all went: %v", b.Routes)
	}
	if strings.Contains(s.said(), "HTTPRoute") {
		t.Errorf("problems of routes that went: %s", s.said())
	}
}

// userService has two ports by name and one by number.
func userService(name string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.9", Ports: []corev1.ServicePort{
			{Name: "web", Port: 80, TargetPort: intstr.FromString("http")},
			{Name: "dns", Port: 80, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromString("dns")},
			{Name: "plain", Port: 81, TargetPort: intstr.FromInt32(8081)},
		}},
	}
}

type portIs struct {
	name   string
	udp    bool
	number int32
}

func sliceOf(service, name string, ready bool, endpoints int, ports ...portIs) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for range endpoints {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}})
	}
	for _, p := range ports {
		proto := corev1.ProtocolTCP
		if p.udp {
			proto = corev1.ProtocolUDP
		}
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: &p.name, Port: &p.number, Protocol: &proto})
	}
	return s
}

// TestReferencesIntoAParentsNamespace (decision 048): a reference into the namespace of one of the route's parents may stand
// without a grant, and is left to be judged for each parent; one into a third is refused.
func TestReferencesIntoAParentsNamespace(t *testing.T) {
	s := NewState("", input.Settings{})
	s.put(t, KindHTTPRoute, `{metadata: {name: mine, namespace: ops}, spec: {parentRefs: [{kind: Service, group: "", name: cart, namespace: shop}], rules: [
		{backendRefs: [{name: cart, namespace: shop, port: 80}, {name: far, namespace: db, port: 80}, {name: own, port: 80}]}]}}`)
	is := func() string {
		var out []string
		for _, b := range s.Whole().Routes[input.RouteKey{Kind: model.HTTPRoute, Namespace: "ops", Name: "mine"}][0].Rules[0].Backends {
			out = append(out, fmt.Sprint(b.Service, " ", b.Ungranted, " ", b.Invalid != ""))
		}
		return strings.Join(out, "; ")
	}
	if got, want := is(), "shop/cart true false; db/far false true; ops/own false false"; got != want || strings.Contains(s.said(), "cart") {
		t.Errorf("%s\nwant %s\n%s", got, want, s.said())
	}
	for _, n := range []string{"shop", "db"} {
		s.put(t, KindReferenceGrant, `{metadata: {name: g, namespace: `+n+`}, spec: {from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: ops}], to: [{group: "", kind: Service}]}}`)
	}
	if got, want := is(), "shop/cart false false; db/far false false; ops/own false false"; got != want || s.said() != "" {
		t.Errorf("with grants: %s\nwant %s\n%s", got, want, s.said())
	}
}

// TestPortMap: contract 4.10, the Service port map of user-owned Services.
func TestPortMap(t *testing.T) {
	web, dns := portIs{"web", false, 8080}, portIs{"dns", true, 5353}
	for _, tt := range []struct {
		name   string
		slices []*discoveryv1.EndpointSlice
		want   string // targets of 80, 80/UDP, 81
		why    string
	}{
		{"no slice", nil, "0 0 8081", `port 80: targetPort "http" names nothing: no EndpointSlice of the Service has the port`},
		{"one slice", []*discoveryv1.EndpointSlice{sliceOf("cart", "a", true, 2, web, dns)}, "8080 5353 8081", ""},
		{"split by port, case 147", []*discoveryv1.EndpointSlice{sliceOf("cart", "a", true, 1, web), sliceOf("cart", "b", true, 1, dns)}, "8080 5353 8081", ""},
		{"pods disagree, case 147", []*discoveryv1.EndpointSlice{sliceOf("cart", "a", true, 1, web, dns), sliceOf("cart", "b", true, 1, portIs{"web", false, 9090})},
			"0 5353 8081", `port 80: targetPort "http" names nothing: the Service's pods disagree, 8080 and 9090`},
		{"one without endpoints has no say", []*discoveryv1.EndpointSlice{sliceOf("cart", "a", true, 1, web, dns), sliceOf("cart", "b", true, 0, portIs{"web", false, 9090})}, "8080 5353 8081", ""},
		{"of the other protocol", []*discoveryv1.EndpointSlice{sliceOf("cart", "a", true, 1, portIs{"web", true, 8080}, dns)}, "0 5353 8081", "80: targetPort"},
		{"of another Service", []*discoveryv1.EndpointSlice{sliceOf("other", "a", true, 1, web, dns)}, "0 0 8081", "names nothing"},
		{"a port of the mesh", []*discoveryv1.EndpointSlice{sliceOf("cart", "a", true, 1, portIs{"web", false, 18081}, dns)}, "0 5353 8081", "it is 18081, which is the mesh's own"},
		{"no port", []*discoveryv1.EndpointSlice{sliceOf("cart", "a", true, 1, portIs{"web", false, 0}, dns)}, "0 5353 8081", "names nothing"},
		{"not ready", []*discoveryv1.EndpointSlice{sliceOf("cart", "a", false, 1, web, dns)}, "8080 5353 8081", ""},
	} {
		s := NewState("", input.Settings{})
		s.SetService(userService("cart"))
		if got := targets(s, "cart"); got != "0 0 8081" || !strings.Contains(s.said(), "not known: they have not been read yet") {
			t.Errorf("%s: before the slices are read: %s\n%s", tt.name, got, s.said())
		}
		for _, sl := range tt.slices {
			s.SetSlice(sl)
		}
		s.SlicesUnread("")
		if got := targets(s, "cart"); got != tt.want || !strings.Contains(s.said(), tt.why) || tt.why == "" && s.said() != "" {
			t.Errorf("%s: %s, want %s\n%s", tt.name, got, tt.want, s.said())
		}
		// A port without a number is one problem, of the Service, with the port.
		want := 0
		for i, port := range []string{"80", "80/UDP"} {
			if strings.Fields(tt.want)[i] != "0" {
				continue
			}
			if want++; strings.Count(s.said(), "Service shop/cart: spec.ports: port "+port+": targetPort") != 1 {
				t.Errorf("%s: not one problem of port %s\n%s", tt.name, port, s.said())
			}
		}
		if got := strings.Count(s.said(), "Service shop/cart: "); got != want {
			t.Errorf("%s: %d problems, want %d\n%s", tt.name, got, want, s.said())
		}
		// Case 146: whatever slices say of endpoints and their readiness, of this Service or
		// another, gives no endpoint to anything.
		if b := s.Whole(); len(b.Endpoints) != 0 || len(b.Catalog) != 0 {
			t.Errorf("%s: endpoints %v", tt.name, b.Endpoints)
		}
		for _, sl := range tt.slices {
			s.Delete(KindEndpointSlice, "shop", sl.Name)
		}
		if got := targets(s, "cart"); got != "0 0 8081" {
			t.Errorf("%s: with its slices gone: %s", tt.name, got)
		}
	}
}

// A reserved port of a user's Service, such as one that was the registrar's and has kept its
// ports, is left out, and no more: without the Service its address would be nobody's, and
// dials to it would pass by the policy of its routes.
func TestReservedPortOfAPIService(t *testing.T) {
	s := NewState("", input.Settings{})
	svc := userService("cart")
	svc.Spec.Ports = append(svc.Spec.Ports[2:], corev1.ServicePort{Name: "mesh", Port: 18081}, corev1.ServicePort{Name: "to", Port: 82, TargetPort: intstr.FromInt32(18082)})
	s.SetService(svc)
	b := s.Take()
	got := b.Services[name{Namespace: "shop", Name: "cart"}]
	if len(got) != 1 || len(got[0].ClusterIPs) != 1 || len(got[0].Ports) != 1 || got[0].Ports[0].Number != 81 {
		t.Errorf("%+v", got)
	}
	if said := s.said(); !strings.Contains(said, "port 18081: ") || !strings.Contains(said, "port 82: ") || !strings.Contains(said, "left out") {
		t.Errorf("%s", said)
	}
}

func targets(s *State, service string) string {
	var out []string
	for _, p := range s.services[name{Namespace: "shop", Name: service}].out.Ports {
		out = append(out, fmt.Sprint(p.Target))
	}
	return strings.Join(out, " ")
}

// Only Services with named target ports ask for slices, and a slice that is given to
// another Service is taken from the first.
func TestSlicesOnNeed(t *testing.T) {
	s := NewState("", input.Settings{})
	s.SlicesUnread("")
	plain := userService("plain")
	plain.Spec.Ports, plain.Spec.ClusterIP = plain.Spec.Ports[2:], "10.96.0.8"
	s.SetService(plain)
	s.SetService(userService("cart"))
	other := userService("other")
	other.Spec.ClusterIP = "10.96.0.7"
	s.SetService(other)
	if got := fmt.Sprint(s.Named()); got != "[shop/cart shop/other]" {
		t.Errorf("named: %s", got)
	}
	s.SetSlice(sliceOf("cart", "a", true, 1, portIs{"web", false, 8080}))
	s.SetSlice(sliceOf("other", "a", true, 1, portIs{"web", false, 8080}))
	if c, o := targets(s, "cart"), targets(s, "other"); c != "0 0 8081" || o != "8080 0 8081" {
		t.Errorf("the slice moved: %s, %s", c, o)
	}
	cart := userService("cart")
	cart.Spec.Ports = cart.Spec.Ports[2:]
	s.SetService(cart)
	s.Delete(KindService, "shop", "other")
	if len(s.Named()) != 0 || s.said() != "" {
		t.Errorf("named: %v\n%s", s.Named(), s.said())
	}
	if b := s.Take(); len(b.Services[name{Namespace: "shop", Name: "other"}]) != 0 || len(b.Services) != 3 {
		t.Errorf("%v", b.Services)
	}
}

// Case 174: a field of a newer version beside the rules is said and changes nothing;
// one in a rule, where it may narrow what is asked for, refuses that rule alone. A field
// of the server's own, in metadata, status or beside spec, is not even said.
func TestCase174NewerFields(t *testing.T) {
	s := NewState("", input.Settings{})
	s.put(t, KindHTTPRoute, `
metadata: {name: r, namespace: shop, generation: 3, brandNew: 1, creationTimestamp: "2026-10-01T08:00:00Z", managedFields: [{manager: x}]}
spec:
  brandNew: {a: 1}
  parentRefs: [{kind: Service, group: "", name: cart}]
  rules:
  - backendRefs: [{name: cart, port: 80}]
  - matches: [{path: {type: PathPrefix, value: /admin}, cookies: [{name: a}]}]
    backendRefs: [{name: cart, port: 80}]
status: {brandNew: 1}
brandNew: 1
`)
	rules := s.routes[input.RouteKey{Kind: model.HTTPRoute, Namespace: "shop", Name: "r"}].out.Rules
	if len(rules) != 2 || rules[0].Invalid != "" || !strings.Contains(rules[1].Invalid, `unknown field "spec.rules[1].matches[0].cookies"`) || rules[1].Matches[0].Path != "/admin" {
		t.Errorf("%+v", rules)
	}
	const want = `HTTPRoute shop/r: field "spec.brandNew" is of a newer version than this program and changes nothing: the rest is in force
HTTPRoute shop/r: unknown field "spec.rules[1].matches[0].cookies": correct or remove it; rules[1] is refused: requests that pick it get 500`
	if s.said() != want {
		t.Errorf("said\n%s\nwant\n%s", s.said(), want)
	}
	// A policy is in force whole or refuses.
	s.put(t, KindHTTPFilter, `{metadata: {name: f, namespace: shop}, spec: {scope: SCOPE_CHAIN, targetRefs: [{kind: Service, name: cart}], brandNew: 1, rbac: {policies: []}}}`)
	if f := s.filters[name{Namespace: "shop", Name: "f"}]; f.Invalid == "" || f.RBAC != nil || len(f.Targets) != 1 {
		t.Errorf("%+v", f)
	}
	// A grant that may grant less is none.
	s.put(t, KindReferenceGrant, `{metadata: {name: g, namespace: db}, spec: {from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: shop, only: x}], to: [{group: "", kind: Service}]}}`)
	if len(s.grants) != 0 {
		t.Errorf("%+v", s.grants)
	}
}

// Routes of gateways are none of the mesh and nobody is told of them, right or wrong; the
// API server's default group beside kind Service is core's.
func TestParentsOfAPIObjects(t *testing.T) {
	s := NewState("", input.Settings{})
	s.put(t, KindHTTPRoute, `{metadata: {name: gw, namespace: shop}, spec: {brandNew: 1, hostnames: [a.example], parentRefs: [{kind: Gateway, group: gateway.networking.k8s.io, name: g}], rules: [{brandNew: 1}]}}`)
	if b := s.Take(); !b.Empty() {
		t.Errorf("%+v", b)
	}
	s.put(t, KindHTTPRoute, `{metadata: {name: r, namespace: shop}, spec: {parentRefs: [{kind: Service, group: gateway.networking.k8s.io, name: cart}, {kind: Gateway, name: g}], rules: [{backendRefs: [{name: cart, port: 80}]}]}}`)
	r := s.Take().Routes[input.RouteKey{Kind: model.HTTPRoute, Namespace: "shop", Name: "r"}]
	if len(r) != 1 || len(r[0].Parents) != 1 || r[0].Parents[0].Service.Name != "cart" || s.said() != "" {
		t.Errorf("%+v\n%s", r, s.said())
	}
	// It turns to a gateway: the mesh has it no more.
	s.put(t, KindHTTPRoute, `{metadata: {name: r, namespace: shop}, spec: {parentRefs: [{kind: Gateway, name: g}], rules: []}}`)
	if b := s.Take(); len(b.Routes) != 1 || len(b.Routes[input.RouteKey{Kind: model.HTTPRoute, Namespace: "shop", Name: "r"}]) != 0 {
		t.Errorf("%+v", b)
	}
}

// MeshConfig: field by field from the control plane's own, then the flags (contract 10.9).
func TestSettings(t *testing.T) {
	flags := input.Settings{SameNode: model.InProcess, AccessLogSuccess: 100, TraceSample: 0.5, Tracing: true}
	s := NewState("mesh", flags)
	if got := *s.Whole().Settings; got != flags {
		t.Errorf("flags alone: %+v", got)
	}
	s.put(t, KindMeshConfig, `{metadata: {name: default, namespace: mesh}, spec: {routeSemantics: GatewayAPI, hopSource: node, proxy: {accessLogsEnabled: true, accessLogSuccessSampleRate: 0.5, tracingEnabled: false}}}`)
	want := flags
	want.Semantics, want.HopFromNode, want.AccessLogs, want.AccessLogSuccess, want.Tracing = model.GatewayAPI, true, true, 1, false
	if b := s.Take(); b.Settings == nil || *b.Settings != want {
		t.Errorf("%+v, want %+v", b.Settings, want)
	}
	// Of another namespace: for its pods, and not for the mesh.
	s.put(t, KindMeshConfig, `{metadata: {name: default, namespace: shop}, spec: {routeSemantics: Aether, proxy: {accessLogsEnabled: false, traceSampleRate: 1}}}`)
	b := s.Take()
	if b.Settings != nil || len(b.Namespaces["shop"]) != 1 || !strings.Contains(s.said(), "MeshConfig shop/default: spec.routeSemantics is of the whole mesh: MeshConfig mesh/default has it, and here it changes nothing") {
		t.Errorf("another namespace's: %+v\n%s", b, s.said())
	}
	own := want
	own.AccessLogs, own.TraceSample = false, 1
	if got := b.Namespaces["shop"][0].Apply(want); got != own {
		t.Errorf("another namespace's: %+v, want %+v", got, own)
	}
	s.put(t, KindMeshConfig, `{metadata: {name: default, namespace: shop}, spec: {proxy: {accessLogsEnabled: false, traceSampleRate: 2}}}`)
	if b := s.Take(); len(b.Namespaces) > 0 || len(s.Whole().Namespaces) != 1 || !strings.Contains(s.said(), "spec.proxy.traceSampleRate 2: write a number from 0 to 1") {
		t.Errorf("a refused one takes the good one's place: %+v\n%s", b, s.said())
	}
	s.Delete(KindMeshConfig, "shop", "default")
	if b := s.Take(); b.Namespaces["shop"] != nil || len(b.Namespaces) != 1 || len(s.Whole().Namespaces) > 0 {
		t.Errorf("gone: %+v", b)
	}
	s.put(t, KindMeshConfig, `{metadata: {name: other, namespace: mesh}, spec: {routeSemantics: Aether}}`)
	if b := s.Take(); b.Settings != nil || !strings.Contains(s.said(), "MeshConfig mesh/other: changes nothing: the one of a namespace that counts is called default") {
		t.Errorf("of another name: %+v\n%s", b, s.said())
	}
	s.Delete(KindMeshConfig, "mesh", "other")
	s.Take()
	// A refused one says what it said before.
	s.put(t, KindMeshConfig, `{metadata: {name: default, namespace: mesh}, spec: {sameNode: mTLS, routeSemantics: Both}}`)
	if b := s.Take(); b.Settings != nil || *s.Whole().Settings != want || !strings.Contains(s.said(), `spec.routeSemantics "Both" does not exist`) {
		t.Errorf("a refused one: %+v\n%s", b.Settings, s.said())
	}
	s.put(t, KindMeshConfig, `{metadata: {name: default, namespace: mesh}, spec: {sameNode: mTLS, newer: 1}}`)
	want = flags
	want.SameNode = model.MTLS
	if b := s.Take(); b.Settings == nil || *b.Settings != want || !strings.Contains(s.said(), `field "spec.newer" is of a newer version`) {
		t.Errorf("a newer one: %+v\n%s", b.Settings, s.said())
	}
	s.Delete(KindMeshConfig, "mesh", "default")
	if b := s.Take(); b.Settings == nil || *b.Settings != flags {
		t.Errorf("gone: %+v", b.Settings)
	}
}

// TestRefusedFromTheStart: a MeshConfig that was never seen otherwise takes nothing of what was known before the start,
// and says its settings as soon as it is mended or gone, whatever they are.
func TestRefusedFromTheStart(t *testing.T) {
	flags := input.Settings{AccessLogSuccess: 100}
	for _, mend := range []func(*State){
		func(s *State) {
			s.put(t, KindMeshConfig, `{metadata: {name: default, namespace: mesh}, spec: {routeSemantics: Aether}}`)
		},
		func(s *State) { s.Delete(KindMeshConfig, "mesh", "default") },
	} {
		s := NewState("mesh", flags)
		s.put(t, KindMeshConfig, `{metadata: {name: default, namespace: mesh}, spec: {routeSemantics: Both}}`)
		s.Take()
		if b := s.Whole(); b.Settings != nil || !b.KeepSettings {
			t.Errorf("refused: %+v", b.Settings)
		}
		mend(s)
		if b := s.Take(); b.Settings == nil || *b.Settings != flags {
			t.Errorf("mended: %+v", b.Settings)
		}
		if b := s.Whole(); b.Settings == nil || b.KeepSettings {
			t.Errorf("mended: %+v", b.Settings)
		}
	}
}

// What is not carried yet is said of each object, and of EndpointPolicies of one
// Service which does not count (contract 10.8).
func TestInertKinds(t *testing.T) {
	s := NewState("", input.Settings{})
	s.put(t, KindUDPRoute, `{metadata: {name: u, namespace: shop}, spec: {parentRefs: [{kind: Service, group: "", name: dns}, {kind: Gateway, name: g}], rules: [{backendRefs: [{name: dns, port: 53}]}]}}`)
	s.put(t, KindEndpointPolicy, `{metadata: {name: b, namespace: shop}, spec: {targetRef: {kind: Service, name: cart}, udsSocket: app/http.sock}}`)
	s.put(t, KindEndpointPolicy, `{metadata: {name: a, namespace: shop}, spec: {targetRef: {kind: Service, name: cart}, udsSocket: app/http.sock}}`)
	s.put(t, KindEndpointPolicy, `{metadata: {name: c, namespace: shop}, spec: {targetRef: {kind: Pod, name: cart}, udsSocket: app/http.sock}}`)
	const want = `EndpointPolicy shop/b: is not in force: EndpointPolicy shop/a is for the same Service and comes first by name; remove one of the two
EndpointPolicy shop/c: targetRef is a "Pod" of group "": name a Service of group ""; the object is not in force
UDPRoute shop/u: UDP is not carried yet: the route changes nothing, and datagrams to Service shop/dns go where they would without it`
	if s.said() != want {
		t.Errorf("said\n%s\nwant\n%s", s.said(), want)
	}
	s.Delete(KindEndpointPolicy, "shop", "a")
	s.Delete(KindEndpointPolicy, "shop", "c")
	s.Delete(KindUDPRoute, "shop", "u")
	if s.said() != "" {
		t.Errorf("said\n%s\nwant nothing", s.said())
	}
	if b := s.Whole(); len(b.Routes)+len(b.Filters)+len(b.Services) != 0 {
		t.Errorf("%+v", b)
	}
}

// Of the EndpointPolicies of a Service the first by name is in force (contract 10.8); each change
// of it is told, and nothing else.
func TestEndpointPolicies(t *testing.T) {
	s := NewState("", input.Settings{})
	cart := name{Namespace: "shop", Name: "cart"}
	told := func(step, want string) {
		t.Helper()
		b, got := s.Take(), "-"
		if list, ok := b.Policies[cart]; ok {
			got = ""
			for _, p := range list {
				got += p.Name + " " + p.UDSSocket
			}
		}
		if got != want {
			t.Errorf("%s: told %q, want %q", step, got, want)
		}
	}
	policy := func(n, target, socket string) {
		s.put(t, KindEndpointPolicy, `{metadata: {name: `+n+`, namespace: shop}, spec: {targetRef: {kind: Service, name: `+target+`}, udsSocket: "`+socket+`"}}`)
	}
	policy("b", "cart", "app/b.sock")
	told("the only one", "b app/b.sock")
	policy("c", "cart", "app/c.sock")
	told("a later one", "-")
	policy("a", "cart", "app/a.sock")
	told("an earlier one", "a app/a.sock")
	policy("a", "cart", "app/a.sock")
	told("the same again", "-")
	policy("a", "cart", "app/a2.sock")
	told("changed", "a app/a2.sock")
	policy("a", "cart", "app/a.sock")
	told("changed back", "a app/a.sock")
	for _, bad := range []string{"app", "app/", "app/x/y", "app/..", "./x", "app/" + strings.Repeat("x", 61)} {
		policy("a", "cart", bad)
		told("refused "+bad, "-") // it stays as it was (decision 045)
		if !strings.Contains(s.said(), "EndpointPolicy shop/a: spec.udsSocket") || !strings.Contains(s.said(), stays) {
			t.Errorf("%s: said %s", bad, s.said())
		}
		policy("a", "cart", "app/a.sock")
		told("mended", "-")
	}
	policy("a", "other", "app/a.sock")
	told("of another Service", "b app/b.sock")
	s.Delete(KindEndpointPolicy, "shop", "b")
	told("gone", "c app/c.sock")
	if b := s.Whole(); len(b.Policies) != 2 || b.Policies[cart][0].Name != "c" {
		t.Errorf("whole: %+v", b.Policies)
	}
	s.Delete(KindEndpointPolicy, "shop", "c")
	told("all gone", "")
}

// Case 171 over the API: a bad rule is refused, its neighbours and the other routes work.
func TestCase171OverAPI(t *testing.T) {
	s := NewState("", input.Settings{})
	s.put(t, KindHTTPRoute, `{metadata: {name: r, namespace: shop}, spec: {parentRefs: [{kind: Service, group: "", name: cart}], rules: [{matches: [{path: {type: PathPrefix, value: //a}}]}, {matches: [{path: {type: PathPrefix, value: /b}}]}]}}`)
	s.put(t, KindHTTPRoute, routeTo("good", "{name: cart, port: 80}"))
	b := s.Whole()
	rules := b.Routes[input.RouteKey{Kind: model.HTTPRoute, Namespace: "shop", Name: "r"}][0].Rules
	if rules[0].Invalid == "" || rules[1].Invalid != "" || len(b.Routes) != 2 || len(b.Problems) != 1 {
		t.Errorf("%+v\n%v", rules, b.Problems)
	}
}

// An annotation that files carry means nothing on an API server's object.
func TestFileAnnotationsAreFiles(t *testing.T) {
	s := NewState("", input.Settings{})
	s.SlicesUnread("")
	svc := userService("cart")
	svc.Annotations = map[string]string{AnnotationTargetPorts: "80=9999", AnnotationPrefix + "x": "y"}
	s.SetService(svc)
	s.put(t, KindHTTPRoute, `{metadata: {name: r, namespace: shop, annotations: {file.aether.io/invalid: '{"0":"why"}'}}, spec: {parentRefs: [{kind: Service, group: "", name: cart}], rules: [{}]}}`)
	if got := targets(s, "cart"); got != "0 0 8081" {
		t.Errorf("targets %s", got)
	}
	if r := s.routes[input.RouteKey{Kind: model.HTTPRoute, Namespace: "shop", Name: "r"}].out; r.Rules[0].Invalid != "" {
		t.Errorf("%+v", r)
	}
}

// BenchmarkChange is what one changed route costs among 2,000 routes and as many Services.
func BenchmarkChange(b *testing.B) {
	s := NewState("", input.Settings{})
	s.SlicesUnread("")
	var objects []map[string]any
	for i := range 2000 {
		svc := userService(fmt.Sprint("svc-", i))
		svc.Spec.ClusterIP = fmt.Sprintf("10.96.%d.%d", 1+i/250, 1+i%250)
		s.SetService(svc)
		objects = append(objects, object(b, routeTo(fmt.Sprint("route-", i), "{name: pg, namespace: db, port: 80}")))
		s.Set(KindHTTPRoute, objects[i])
	}
	s.Take()
	port := int64(80)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		port++
		o := objects[i%len(objects)]
		rule := o["spec"].(map[string]any)["rules"].([]any)[0].(map[string]any)
		rule["backendRefs"].([]any)[0].(map[string]any)["port"] = 1000 + port%60000
		s.Set(KindHTTPRoute, o)
		if batch := s.Take(); len(batch.Routes) != 1 {
			b.Fatalf("%+v", batch)
		}
	}
}
