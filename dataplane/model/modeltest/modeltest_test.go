package modeltest_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
)

// TestParse: every word that the language has, and what it means.
func TestParse(t *testing.T) {
	cart := model.ServiceName{Namespace: "shop", Name: "cart"}
	db := model.ServiceName{Namespace: "pay", Name: "db"}
	ref := func(n model.ServiceName, port uint16, weight uint32) model.BackendRef {
		return model.BackendRef{Service: n, Port: port, Weight: weight}
	}
	one := func(text string) *model.Mesh { return modeltest.Mesh(t, text) }
	rule := func(text string) model.Rule { return one("route shop/r cart\nrule " + text).Routes[0].Rules[0] }
	filter := func(text string) model.HTTPFilter { return one("filter shop/f " + text).Filters[0] }
	fields := func(kind model.FilterKind, set, add []model.HeaderValue, remove ...string) model.Filter {
		return model.Filter{Kind: kind, Set: set, Add: add, Remove: remove}
	}
	v := func(name, value string) []model.HeaderValue {
		return []model.HeaderValue{{Name: name, Value: value}}
	}
	base := model.HTTPFilter{Namespace: "shop", Name: "f", Scope: model.ScopeRoute}
	with := func(edit func(f *model.HTTPFilter)) model.HTTPFilter { f := base; edit(&f); return f }
	for _, tt := range []struct {
		name      string
		got, want any
	}{
		{"semantics", one("semantics gatewayapi").Semantics, model.GatewayAPI},
		{"aether", one("semantics aether").Semantics, model.Aether},
		{"samenode", one("samenode inprocess").SameNode, model.InProcess},
		{"mtls", one("samenode mtls").SameNode, model.MTLS},
		{"node", *one("domain a.b\nnode x region=r zone=z # a comment"), model.Mesh{Domain: "a.b", TrustDomain: "td", Node: "x", Region: "r", Zone: "z"}},
		{"catalog", one("catalog shop/cart pay/db").Catalog, []model.ServiceName{cart, db}},
		{"retained", one("retained shop/cart 80,81\nretained pay/db").Retained, []model.Retained{{Service: cart, Ports: []uint16{80, 81}}, {Service: db}}},
		{"service", one("service shop/cart 10.0.0.1,fd00::1 80,90=tcp,53=udp").Services, []model.Service{{Name: cart, Generated: true,
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")},
			Ports:      []model.ServicePort{{Number: 80, Target: 80, Class: model.HTTP}, {Number: 90, Target: 90, Class: model.TCP}, {Number: 53, Target: 53, Class: model.UDP, UDP: true}}}}},
		{"user", one("user shop/cart 80:8080,90:web,53:53/udp").Services, []model.Service{{Name: cart,
			Ports: []model.ServicePort{{Number: 80, Target: 8080}, {Number: 90, TargetName: "web"}, {Number: 53, Target: 53, UDP: true}}}}},
		{"pods", one("pods shop/cart*2 80=h2,90=tcp port=90 health=draining weight=7 node=n9 region=r zone=z cluster=c meta=k:v meta=l: id=i").Endpoints[1], model.Endpoint{
			Service: cart, IP: netip.MustParseAddr("10.244.0.2"), Pod: "cart-2", Node: "n9", Cluster: "c", Region: "r", Zone: "z", DefaultPort: 90,
			Ports: []model.Port{{Number: 80, Class: model.HTTP, App: model.AppH2C}, {Number: 90, Class: model.TCP}}, Weight: 7, Health: model.Draining, SPIFFEID: "i", Metadata: map[string]string{"k": "v", "l": ""}}},
		{"local", one("local shop/web 80 scoped ip=10.0.0.1 cid=c pod=p id=i").Workloads[0], model.Workload{
			Namespace: "shop", Account: "web", Name: "p", ContainerID: "c", NetNS: "/run/netns/web", SPIFFEID: "i", DefaultPort: 8080, Ports: []model.Port{{Number: 80, Class: model.HTTP}}, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}},

		{"route", one("route shop/r cart pay/db:80 created=7").Routes[0], model.Route{Kind: model.HTTPRoute, Namespace: "shop", Name: "r", Created: time.Unix(7, 0).UTC(), Parents: []model.ParentRef{{Service: cart}, {Service: db, Port: 80}}}},
		{"grpcroute", one("grpcroute shop/r cart").Routes[0].Kind, model.GRPCRoute},
		{"tcproute", one("tcproute shop/r cart").Routes[0].Kind, model.TCPRoute},
		{"tlsroute", one("tlsroute shop/r cart sni=a.b,*.c").Routes[0], model.Route{Kind: model.TLSRoute, Namespace: "shop", Name: "r", Parents: []model.ParentRef{{Service: cart}}, ServerNames: []string{"a.b", "*.c"}}},

		{"nothing", rule("all"), model.Rule{}},
		{"name", rule("name=x invalid=why"), model.Rule{Name: "x", Invalid: "why"}},
		{"match", rule("match=exact:/a&GET&h:a=b&hr:c=d.*&q:e=f&qr:g=h+ match=prefix:/ match=regex:/x.+").Matches, []model.Match{
			{PathKind: model.PathExact, Path: "/a", Method: "GET", Headers: []model.ValueMatch{{Name: "a", Value: "b"}, {Name: "c", Value: "d.*", Regex: true}}, Query: []model.ValueMatch{{Name: "e", Value: "f"}, {Name: "g", Value: "h+", Regex: true}}},
			{PathKind: model.PathPrefix, Path: "/"}, {PathKind: model.PathRegex, Path: "/x.+"}}},
		{"grpc", rule("match=grpc:a.B/C match=grpcr:/x&h:a=b").Matches, []model.Match{{GRPC: &model.GRPCMatch{Service: "a.B", Method: "C"}}, {GRPC: &model.GRPCMatch{Method: "x", Regex: true}, Headers: []model.ValueMatch{{Name: "a", Value: "b"}}}}},
		{"to", rule("to=cart:80 to=pay/db:81*0 to=cart:82*9!why").Backends, []model.BackendRef{ref(cart, 80, 1), ref(db, 81, 0), {Service: cart, Port: 82, Weight: 9, Invalid: "why"}}},
		{"timeouts", rule("timeout=10s attempt=2s").Timeouts, model.Timeouts{Request: 10 * time.Second, Backend: 2 * time.Second}},
		{"retry", rule("retry=502,503;attempts=3;backoff=100ms").Retry, &model.Retry{Codes: []uint16{502, 503}, Attempts: 3, Backoff: 100 * time.Millisecond}},
		{"sticky", rule("sticky=s;header;absolute=1h;idle=5m;lasting").Persistence, &model.Persistence{Name: "s", Header: true, Absolute: time.Hour, Idle: 5 * time.Minute, Lasting: true}},
		{"modifiers", rule("set=a:1 radd=b:2 remove=c rremove=d add=e:3 rset=f:4 again set=g:5 remove=h").Filters, []model.Filter{
			fields(model.RequestHeaders, v("a", "1"), v("e", "3"), "c"), fields(model.ResponseHeaders, v("f", "4"), v("b", "2"), "d"), fields(model.RequestHeaders, v("g", "5"), nil, "h")}},
		{"backend's", rule("to=cart:80 bset=a:1 brremove=b to=cart:81 brewrite=host=h;path=/p bmirror=db:1*1/2").Backends, []model.BackendRef{
			{Service: cart, Port: 80, Weight: 1, Filters: []model.Filter{fields(model.RequestHeaders, v("a", "1"), nil), fields(model.ResponseHeaders, nil, nil, "b")}},
			{Service: cart, Port: 81, Weight: 1, Filters: []model.Filter{
				{Kind: model.Rewrite, Rewrite: &model.RewriteFilter{Host: "h", Path: model.PathEdit{Kind: model.PathFull, Value: "/p"}}},
				{Kind: model.Mirror, Mirror: &model.MirrorFilter{Backend: ref(model.ServiceName{Namespace: "shop", Name: "db"}, 1, 1), Numerator: 1, Denominator: 2}}}}}},
		{"redirect", rule("redirect=scheme=https;host=h;port=1;prefix=/p;code=301").Filters[0].Redirect, &model.RedirectFilter{Scheme: "https", Host: "h", Port: 1, Path: model.PathEdit{Kind: model.PathPrefixPart, Value: "/p"}, Status: 301}},
		{"plain redirect", rule("redirect=-").Filters[0].Redirect, &model.RedirectFilter{Status: 302}},
		{"mirror", rule("mirror=db:1!why").Filters[0].Mirror, &model.MirrorFilter{Backend: model.BackendRef{Service: model.ServiceName{Namespace: "shop", Name: "db"}, Port: 1, Weight: 1, Invalid: "why"}, Numerator: 1, Denominator: 1}},
		{"cors", rule("cors=https://a,*;methods=GET,PUT;headers=x;expose=y;age=60s;credentials").Filters[0].CORS, &model.CORSFilter{Origins: []string{"https://a", "*"}, Credentials: true, Methods: []string{"GET", "PUT"}, Headers: []string{"x"}, Expose: []string{"y"}, MaxAge: time.Minute}},
		{"use", rule("use=f").Filters, []model.Filter{{Kind: model.Extension, Extension: "f"}}},

		{"filter", filter("scope=chain target=cart,pay/db invalid=why"), with(func(f *model.HTTPFilter) {
			f.Scope, f.Targets, f.Invalid = model.ScopeChain, []model.ServiceName{cart, db}, "why"
		})},
		{"inbound", filter("scope=inbound").Scope, model.ScopeInbound},
		{"rbac", filter("rbac deny audit policy=p;id:spiffe://td/x;ns:a;path:/p;method:GET policy=q"), with(func(f *model.HTTPFilter) {
			f.RBAC = &model.RBAC{Audit: true, Deny: true, Policies: []model.Policy{
				{Name: "p", Principals: []model.Principal{{SPIFFEID: "spiffe://td/x"}, {Namespace: "a"}}, Permissions: []model.Permission{{PathPrefix: "/p"}, {Method: "GET"}}}, {Name: "q"}}}
		})},
		{"authz", filter("authz disabled nobody ctx=a:b"), with(func(f *model.HTTPFilter) {
			f.ExtAuthz = &model.ExtAuthz{Disabled: true, NoBody: true, ContextExtensions: map[string]string{"a": "b"}}
		})},
		{"metadata", filter("metadata=x-a:k metadata=x-b:l:other").HeaderToMetadata, []model.HeaderToMetadata{{Header: "x-a", Key: "k", Namespace: "envoy.lb"}, {Header: "x-b", Key: "l", Namespace: "other"}}},
		{"mutation", filter("request=append:a:1 request=absent:b:2 query=set:c:3 query=replace:d:4 response=remove:e").Mutation, &model.Mutation{
			Request:  []model.MutationOp{{Kind: model.AppendIfExistsOrAdd, Name: "a", Value: "1"}, {Kind: model.AddIfAbsent, Name: "b", Value: "2"}},
			Query:    []model.MutationOp{{Kind: model.OverwriteIfExistsOrAdd, Name: "c", Value: "3"}, {Kind: model.OverwriteIfExists, Name: "d", Value: "4"}},
			Response: []model.MutationOp{{Kind: model.RemoveAll, Name: "e"}}}},
	} {
		if !reflect.DeepEqual(tt.got, tt.want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v", tt.name, tt.got, tt.want)
		}
	}
}

// TestParseErrors: what is no word is an error that names the line.
func TestParseErrors(t *testing.T) {
	for _, text := range []string{
		"mesh x", "route", "service cart", "service shop/cart x", "pods shop/cart 80=x", "pods shop/cart health=ill", "user shop/cart 80", "local shop/web odd",
		"semantics odd", "retained shop/x y", "catalog x", "filter shop/f odd", "filter shop/f scope=odd", "filter shop/f policy=p;odd:x", "filter shop/f request=odd:x",
		"rule all", "route shop/r x:y", "route shop/r x created=y",
	} {
		if _, err := modeltest.Parse("# comment\n" + text); err == nil || !strings.Contains(err.Error(), "line 2") {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, words := range []string{"odd", "odd=1", "bset=a:1", "match=odd:x", "to=x:y", "to=x:1*y", "timeout=y", "attempt=y", "retry=x", "retry=503;odd", "sticky=s;odd", "redirect=odd", "redirect=port=x", "rewrite=odd", "mirror=x:1*a/b", "cors=*;odd"} {
		if _, err := modeltest.Parse("route shop/r x\nrule " + words); err == nil || !strings.Contains(err.Error(), "line 2") {
			t.Errorf("rule %q: %v", words, err)
		}
	}
}

// TestRandomMeshHasEverything: no kind of object or part of one is never drawn.
func TestRandomMeshHasEverything(t *testing.T) {
	seen := map[string]bool{}
	var walk func(v reflect.Value, path string)
	walk = func(v reflect.Value, path string) {
		switch v.Kind() {
		case reflect.Pointer:
			if !v.IsNil() {
				walk(v.Elem(), path)
			}
		case reflect.Struct:
			if v.Type() == reflect.TypeFor[time.Time]() || v.Type() == reflect.TypeFor[netip.Addr]() {
				seen[path] = true
				return
			}
			for i := range v.NumField() {
				walk(v.Field(i), path+"."+v.Type().Field(i).Name)
			}
		case reflect.Slice:
			for i := range v.Len() {
				walk(v.Index(i), path)
			}
		default:
			if !v.IsZero() {
				seen[path] = true
				if v.Kind() == reflect.Uint8 {
					seen[fmt.Sprintf("%s=%d", path, v.Uint())] = true
				}
			}
		}
	}
	for i := range uint64(2000) {
		walk(reflect.ValueOf(modeltest.RandomMesh(rand.New(rand.NewPCG(i, 3)))), "")
	}
	for _, path := range []string{
		".Semantics", ".SameNode", ".Catalog.Name", ".Retained.Ports", ".Endpoints.Metadata", ".Services.Ports.TargetName",
		".Routes.Kind=1", ".Routes.Kind=2", ".Routes.Kind=3", ".Routes.Kind=4", ".Routes.ServerNames",
		".Routes.Rules.Matches.PathKind=1", ".Routes.Rules.Matches.PathKind=2", ".Routes.Rules.Matches.PathKind=3", ".Routes.Rules.Matches.GRPC.Service", ".Routes.Rules.Matches.GRPC.Regex",
		".Routes.Rules.Matches.Headers.Regex", ".Routes.Rules.Matches.Query.Value", ".Routes.Rules.Invalid", ".Routes.Rules.Retry.Attempts", ".Routes.Rules.Timeouts.Request",
		".Routes.Rules.Filters.Kind=1", ".Routes.Rules.Filters.Kind=2", ".Routes.Rules.Filters.Redirect.Status", ".Routes.Rules.Filters.Rewrite.Host", ".Routes.Rules.Filters.Mirror.Numerator",
		".Routes.Rules.Filters.CORS.Credentials", ".Routes.Rules.Filters.Extension", ".Routes.Rules.Backends.Filters.Kind=4", ".Routes.Rules.Backends.Invalid",
		".Filters.Scope=1", ".Filters.Scope=2", ".Filters.Scope=3", ".Filters.Invalid", ".Filters.RBAC.Policies.Principals.Namespace", ".Filters.RBAC.Policies.Permissions.PathPrefix",
		".Filters.ExtAuthz.Disabled", ".Filters.HeaderToMetadata.Key", ".Filters.Mutation.Query.Name",
		".Workloads.UID", ".Workloads.Volumes.Driver", ".Workloads.UDSSocket", ".Policies.UDSSocket",
	} {
		if !seen[path] {
			t.Errorf("%s is never drawn", path)
		}
	}
}
