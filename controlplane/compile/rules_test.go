package compile_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
)

// The short forms of what compiles, for tables.

func pipeText(p *snapshot.FilterChain) string {
	var out []string
	for _, r := range p.RBAC {
		out = append(out, "rbac("+r.Name+")")
	}
	for a := p.Authz; a != nil; a = a.Next {
		out = append(out, "authz("+a.Name+")")
	}
	for _, x := range p.Selectors {
		out = append(out, "select("+x.Header+">"+x.Key+")")
	}
	if p.CORS != nil {
		out = append(out, fmt.Sprintf("cors(%v)", p.CORS.Origins))
	}
	if r := p.Redirect; r != nil {
		out = append(out, fmt.Sprintf("redirect(%d %s %s %d %s)", r.Status, r.Scheme, r.Host, r.Port, r.Path.Value))
	}
	if p.Rewrite != nil {
		out = append(out, fmt.Sprintf("rewrite(%s %s)", p.Rewrite.Host, p.Rewrite.Path.Value))
	}
	for _, list := range []struct {
		name string
		ops  []snapshot.Op
	}{{"request", p.Request}, {"query", p.Query}, {"response", p.Response}} {
		for _, o := range list.ops {
			out = append(out, fmt.Sprintf("%s(%s%s=%s)", list.name, []string{"+", "?", "", "=", "-"}[o.Kind], o.Name, o.Value))
		}
	}
	for _, m := range p.Mirrors {
		out = append(out, fmt.Sprintf("mirror(%s %d/%d)", m.Backend.Name, m.Numerator, m.Denominator))
	}
	return strings.Join(out, " ")
}

func backendsText(list []snapshot.Weighted, pipe *snapshot.FilterChain) (out []string) {
	for _, w := range list {
		text := fmt.Sprintf("to(%d invalid)", w.Upto)
		if w.Backend != nil {
			text = fmt.Sprintf("to(%d %s)", w.Upto, w.Backend.Name)
		}
		if w.Pipe != nil && w.Pipe != pipe {
			text += "[" + pipeText(w.Pipe) + "]"
		}
		out = append(out, text)
	}
	return out
}

func ruleText(r *snapshot.Rule) string {
	out := []string{}
	if r.Invalid != "" {
		out = append(out, "invalid")
	}
	out = append(out, backendsText(r.Backends, r.Pipe)...)
	if p := pipeText(r.Pipe); p != "" {
		out = append(out, p)
	}
	return strings.Join(out, " ")
}

func armText(a *snapshot.Match) string {
	out := []string{map[model.PathKind]string{model.PathAny: "any", model.PathExact: "exact:" + a.Path, model.PathPrefix: "prefix:" + a.Path, model.PathRegex: "regex:" + a.Path}[a.PathKind]}
	if g := a.GRPC; g != nil {
		kind := "grpc:"
		if g.ServiceRegex != nil || g.MethodRegex != nil {
			kind = "grpcr:"
		}
		out = append(out, kind+g.Service+"/"+g.Method)
	}
	if a.Method != "" {
		out = append(out, a.Method)
	}
	for i, list := range [][]snapshot.ValueMatch{a.Headers, a.Query} {
		for _, v := range list {
			kind := []string{"h", "q"}[i]
			if v.Regex != nil {
				kind += "r"
			}
			out = append(out, kind+":"+v.Name+"="+v.Value)
		}
	}
	_, short, _ := strings.Cut(a.Rule.Name, " ")
	out = append(out, "->", short)
	if t := ruleText(a.Rule); t != "" {
		out = append(out, t)
	}
	return strings.Join(out, " ")
}

// show is the port of a service as callers of each group see it, one thing a line.
func show(s *snapshot.Snapshot, ns, name string, port uint16) string {
	svc := s.Service(model.ServiceName{Namespace: ns, Name: name})
	if svc == nil {
		return "no service\n"
	}
	var b strings.Builder
	p := svc.Port(port)
	if p == nil {
		return "no port\n"
	}
	if p.Self != nil {
		fmt.Fprintf(&b, "self: %s\n", ruleText(p.Self))
	}
	programs, splits := map[string]*snapshot.Program{}, map[string]*snapshot.Split{}
	maps.Copy(programs, p.Consumers)
	maps.Copy(splits, p.Splits)
	if p.Program != nil {
		programs["-"] = p.Program
	}
	if p.Split != nil {
		splits["-"] = p.Split
	}
	for _, who := range slices.Sorted(maps.Keys(programs)) {
		g := programs[who]
		flags := ""
		if g.Strict {
			flags += " strict"
		}
		if g.Policy {
			flags += " policy"
		}
		if g.Invalid != "" {
			flags += " invalid"
		}
		fmt.Fprintf(&b, "%s:%s\n", who, flags)
		for i := range g.Arms {
			fmt.Fprintf(&b, "%s\n", armText(&g.Arms[i]))
		}
	}
	for _, who := range slices.Sorted(maps.Keys(splits)) {
		fmt.Fprintf(&b, "%s: %s\n", who, splitText(splits[who]))
	}
	for _, a := range svc.TLS {
		wild := ""
		if a.Below {
			wild = "*"
		}
		fmt.Fprintf(&b, "tls %d %s %s%s: %s\n", a.Port, a.Caller, wild, a.Name, splitText(a.Split))
	}
	return b.String()
}

func splitText(x *snapshot.Split) string {
	if x.Invalid != "" {
		return x.Name + " invalid"
	}
	return x.Name + " " + strings.Join(backendsText(x.Backends, nil), " ")
}

// TestRules is what compiles of each kind of object: the mesh, a port of it, and
// every Problem. "base" stands before each mesh.
func TestRules(t *testing.T) {
	const base = `
service shop/cart 10.96.0.1
pods shop/cart 8080,9090,9000=tcp
service shop/v2 10.96.0.2
pods shop/v2 8080,5432=tcp
service pay/api 10.96.0.3
pods pay/api 8080,5432=tcp
`
	for _, tt := range []struct {
		name, mesh, port, want string
		problems               []string // a part of each, in order
	}{
		{"nothing", "", "shop/cart:8080", "self: ", nil},
		{"strict", "semantics gatewayapi\nroute shop/r cart\nrule all", "shop/cart:8080", "self: |-: strict|any -> shop/r rule 1", nil},
		{"no rules", "route shop/r cart", "shop/cart:8080", "self: |-:", nil},

		// Kinds on one port, and groups of callers (GEP-1426).
		{"grpc before http", "route shop/h cart created=1\nrule all\ngrpcroute shop/g cart:8080 created=9\nrule all", "shop/cart:8080",
			"self: |-:|any -> shop/g rule 1", []string{"HTTPRoute shop/h: parentRef Service shop/cart port 8080: not attached (Conflicted), for GRPCRoute shop/g is"}},
		{"grpc on another port", "route shop/h cart created=1\nrule all\ngrpcroute shop/g cart:8080\nrule all", "shop/cart:9090",
			"self: |-:|any -> shop/h rule 1", []string{"Conflicted"}},
		{"grpc of another group", "route shop/h cart\nrule all\ngrpcroute pay/g shop/cart\nrule all", "shop/cart:8080",
			"self: |-:|any -> shop/h rule 1|pay:|any -> pay/g rule 1", nil},
		{"consumers", "route pay/r shop/cart:8080\nrule all\nroute ops/r shop/cart\nrule all", "shop/cart:8080",
			"self: |ops:|any -> ops/r rule 1|pay:|any -> pay/r rule 1", nil},
		{"a consumer's other port", "route pay/r shop/cart:8080\nrule all", "shop/cart:9090", "self: ", nil},
		{"kind nobody set", "route shop/r cart\nrule all", "shop/cart:9000", "", nil},

		// Parents.
		{"wrong class", "route shop/r cart:9000 cart:7\nrule all\ntcproute shop/t cart:8080\nrule to=v2:5432\ntlsroute shop/s cart:8080 cart:1 sni=a.b\nrule to=v2:5432", "shop/cart:9000", "",
			[]string{"port 7: that is no HTTP port", "port 9000: that is no HTTP port", "TCPRoute shop/t: parentRef Service shop/cart port 8080: that is no TCP port", "port 1: that is no raw port", "port 8080: that is no raw port"}},
		{"no such class", "service shop/web 10.96.0.9\npods shop/web 80\ntcproute shop/t web\nrule to=v2:5432", "shop/web:80", "self: ", []string{"it has no TCP port (NoMatchingParent)"}},

		// Precedence (10.3).
		{"http order", `route shop/r cart:8080
rule match=prefix:/ match=prefix:/aa/ match=prefix:/a&q:x=1 match=prefix:/a&q:x=1&q:y=1 match=prefix:/a&h:x=1 match=prefix:/a&h:x=1&h:y=2&h:X=3 match=prefix:/a&GET match=regex:/a.* match=regex:/a.*b.* match=exact:/z
route shop/a cart created=1
rule all match=prefix:/a&GET`, "shop/cart:8080",
			"self: |-:|exact:/z -> shop/r rule 1|regex:/a.*b.* -> shop/r rule 1|regex:/a.* -> shop/r rule 1|prefix:/aa -> shop/r rule 1|prefix:/a GET -> shop/r rule 1|prefix:/a GET -> shop/a rule 1|" +
				"prefix:/a h:x=1 h:y=2 -> shop/r rule 1|prefix:/a h:x=1 -> shop/r rule 1|prefix:/a q:x=1 q:y=1 -> shop/r rule 1|prefix:/a q:x=1 -> shop/r rule 1|prefix: -> shop/r rule 1", nil},
		{"age", "route shop/a cart:8080 created=9\nrule all\nroute shop/z cart:8080 created=1\nrule all\nroute shop/b cart:8080 created=9\nrule all", "shop/cart:8080",
			"self: |-:|any -> shop/z rule 1|any -> shop/a rule 1|any -> shop/b rule 1", nil},
		{"grpc order", "grpcroute shop/g cart:8080\nrule all match=grpc:/ match=grpc:/M match=grpc:s/ match=grpcr:s/ match=grpc:s/M match=grpc:ss/ match=grpc:s/M&h:a=b", "shop/cart:8080",
			"self: |-:|any grpc:ss/ -> shop/g rule 1|any grpc:s/M h:a=b -> shop/g rule 1|any grpc:s/M -> shop/g rule 1|any grpc:s/ -> shop/g rule 1|any grpcr:s/ -> shop/g rule 1|any grpc:/M -> shop/g rule 1|any -> shop/g rule 1", nil},

		// Matches that are no good: refused as wide as they were meant, where they were meant.
		{"bad path regex", "route shop/r cart:8080\nrule match=regex:/(\nrule match=prefix:/a match=exact:/e", "shop/cart:8080",
			"self: |-: policy|exact:/e -> shop/r rule 2|any -> shop/r rule 1 invalid|prefix:/a -> shop/r rule 2", []string{"missing closing"}},
		{"bad value regex", "route shop/r cart:8080\nrule match=prefix:/a&hr:x=(&h:y=1 match=prefix:/a&h:y=1\nrule match=prefix:/a&qr:x=[", "shop/cart:8080",
			"self: |-: policy|prefix:/a h:y=1 -> shop/r rule 1 invalid|prefix:/a h:y=1 -> shop/r rule 1 invalid|prefix:/a -> shop/r rule 2 invalid", []string{"field x's", "parameter x's"}},
		{"bad grpc regex", "grpcroute shop/g cart:8080\nrule match=grpcr:(/M", "shop/cart:8080", "self: |-: policy|any grpcr:/M -> shop/g rule 1 invalid", []string{"missing closing"}},
		{"brackets that meet ours", "route shop/r cart:8080\nrule match=regex:a)(b", "shop/cart:8080", "self: |-: policy|any -> shop/r rule 1 invalid", []string{"unexpected )"}},
		{"huge repetition", "route shop/r cart:8080\nrule match=regex:(a{1,99}b{1,99}){1,9}", "shop/cart:8080", "self: |-:|regex:(a{1,99}b{1,99}){1,9} -> shop/r rule 1", nil},
		{"too huge", "route shop/r cart:8080\nrule match=regex:(abcdefgh){1,900}", "shop/cart:8080", "self: |-: policy|any -> shop/r rule 1 invalid", []string{"instructions, and 4096 are the most"}},
		{"too long", "route shop/r cart:8080\nrule match=regex:/" + strings.Repeat("a", 1024), "shop/cart:8080", "self: |-: policy|any -> shop/r rule 1 invalid", []string{"has 1025 bytes, and 1024 are the most"}},
		{"no slash, no field", "route shop/r cart:8080\nrule match=prefix:a match=h:a_b()=1\nrule match=prefix:/long match=exact:/e", "shop/cart:8080",
			"self: |-: policy|exact:/e -> shop/r rule 2|any -> shop/r rule 1 invalid|prefix:/long -> shop/r rule 2|any -> shop/r rule 1 invalid", []string{"can match nothing"}},
		{"bad regex before a longer one", "route shop/r cart:8080\nrule match=regex:/long.*\nrule match=regex:(", "shop/cart:8080",
			"self: |-: policy|any -> shop/r rule 2 invalid|regex:/long.* -> shop/r rule 1", []string{"missing closing"}},
		{"bad grpc service before a longer one", "grpcroute shop/g cart:8080\nrule match=grpcr:long/M\nrule match=grpcr:(/", "shop/cart:8080",
			"self: |-: policy|any grpc:/ -> shop/g rule 2 invalid|any grpcr:long/M -> shop/g rule 1", []string{"missing closing"}},
		{"bad grpc method before a longer one", "grpcroute shop/g cart:8080\nrule match=grpcr:s/MMM\nrule match=grpcr:s/(", "shop/cart:8080",
			"self: |-: policy|any grpcr:s/ -> shop/g rule 2 invalid|any grpcr:s/MMM -> shop/g rule 1", []string{"missing closing"}},

		// Filters of a rule (10.2) and their order.
		{"edits", "route shop/r cart:8080\nrule add=x-c:3 set=x-b:2 remove=x-a radd=y:1 to=cart:9090 bset=x-d:4 to=v2:8080", "shop/cart:8080",
			"self: |-:|any -> shop/r rule 1 to(1 shop/cart:9090)[request(-x-a=) request(x-b=2) request(+x-c=3) request(x-d=4) response(+y=1)] to(2 shop/v2:8080) request(-x-a=) request(x-b=2) request(+x-c=3) response(+y=1)", nil},
		{"two of a kind", "route shop/r cart:8080\nrule set=a:1 again set=b:1", "shop/cart:8080", "self: |-: policy|any -> shop/r rule 1 invalid", []string{"two filters of one kind"}},
		{"not theirs", "route shop/r cart:8080\nrule set=X-Forwarded-Client-Cert:1\nrule remove=:path\nrule rset=x-aether-outcome:1\nrule add=host:a", "shop/cart:8080",
			"self: |-: policy|any -> shop/r rule 1 invalid|any -> shop/r rule 2 invalid|any -> shop/r rule 3 invalid|any -> shop/r rule 4 invalid", []string{"on who called", ":path is no field", "what became", "the request's target"}},
		{"redirect", "route shop/r cart:8080\nrule match=prefix:/a redirect=scheme:x\nrule match=prefix:/a redirect=scheme=https;host=b.example;port=8443;prefix=/z;code=308 to=nope:1", "shop/cart:8080", "error", nil},
		{"redirect wins", "route shop/r cart:8080\nrule match=prefix:/a redirect=scheme=https;host=b.example;port=8443;prefix=/z;code=308 to=nope:1", "shop/cart:8080",
			"self: |-:|prefix:/a -> shop/r rule 1 redirect(308 https b.example 8443 /z)", nil},
		{"bad redirects", "route shop/r cart:8080\nrule redirect=scheme=ftp\nrule redirect=code=200\nrule redirect=host=a:80\nrule redirect=path=x\nrule redirect=path=/a?b\nrule match=exact:/a redirect=prefix=/b\nrule redirect=- rewrite=host=a", "shop/cart:8080",
			"self: |-: policy|exact:/a -> shop/r rule 6 invalid|any -> shop/r rule 1 invalid|any -> shop/r rule 2 invalid|any -> shop/r rule 3 invalid|any -> shop/r rule 4 invalid|any -> shop/r rule 5 invalid|any -> shop/r rule 7 invalid",
			[]string{"scheme", "200", "a:80", "does not begin", "percent-encode", "every match", "sent elsewhere or changed"}},
		{"rewrites", "route shop/r cart:8080\nrule rewrite=host=a.example;path=/x to=v2:8080 brewrite=path=/y to=v2:8080 brewrite=host=b.example", "shop/cart:8080",
			"self: |-:|any -> shop/r rule 1 to(1 shop/v2:8080)[rewrite(a.example /y)] to(2 shop/v2:8080)[rewrite(b.example /x)] rewrite(a.example /x)", nil},
		{"mirrors", "route shop/r cart:8080\nrule mirror=v2:8080*1/2 mirror=nope:1 mirror=v2:8080*3/2 mirror=v2:8080!Refused to=cart:9090 bmirror=pay/api:8080", "shop/cart:8080",
			"self: |-:|any -> shop/r rule 1 to(1 shop/cart:9090)[mirror(shop/v2:8080 1/2) mirror(pay/api:8080 1/1)] mirror(shop/v2:8080 1/2)", []string{"BackendNotFound", "3 of 2 is no share", "Refused"}},
		{"cors", "route shop/r cart:8080\nrule cors=https://A.example:443,http://*.b:8080,*;methods=GET\nrule cors=rubbish\nrule cors=https://a:0\nrule cors=*;methods=G()\nrule cors=*;age=1500ms", "shop/cart:8080",
			"self: |-: policy|any -> shop/r rule 1 cors([{https://a.example  false} {http:// .b:8080 true}])|any -> shop/r rule 2 invalid|any -> shop/r rule 3 invalid|any -> shop/r rule 4 invalid|any -> shop/r rule 5 invalid",
			[]string{"no origin", "no origin", "no name", "whole seconds"}},
		{"grpc filters", "grpcroute shop/g cart:8080\nrule set=a:1 mirror=v2:8080\nrule redirect=-\nrule rewrite=host=a\nrule cors=*\nrule to=v2:8080 brewrite=host=a", "shop/cart:8080",
			"self: |-: policy|any -> shop/g rule 1 request(a=1) mirror(shop/v2:8080 1/1)|any -> shop/g rule 2 invalid|any -> shop/g rule 3 invalid|any -> shop/g rule 4 invalid|any -> shop/g rule 5 to(1 invalid)",
			[]string{"rules[1]: RequestRedirect cannot", "rules[2]: URLRewrite cannot", "rules[3]: CORS cannot", "URLRewrite cannot"}},
		{"backend filters", "route shop/r cart:8080\nrule to=v2:8080 bredirect=- to=v2:8080 bcors=* to=v2:8080 buse=f to=v2:8080 bset=host:1 to=v2:8080", "shop/cart:8080",
			"self: |-:|any -> shop/r rule 1 to(1 shop/v2:8080)[redirect(302   0 )] to(2 invalid) to(3 invalid) to(4 invalid) to(5 shop/v2:8080)", []string{"CORS cannot", "ExtensionRef cannot", "target"}},
		{"weights", "route shop/r cart:8080\nrule to=v2:8080*0 to=v2:8080*3\nrule to=v2:8080*0\nrule to=v2:8080*4294967295 to=pay/api:8080*4294967295", "shop/cart:8080",
			"self: |-:|any -> shop/r rule 1 to(0 shop/v2:8080) to(3 shop/v2:8080)|any -> shop/r rule 2 to(0 shop/v2:8080)|any -> shop/r rule 3 to(4294967295 shop/v2:8080) to(8589934590 pay/api:8080)", []string{"weight 0"}},

		// HTTPFilters (10.7).
		{"reference", "filter shop/f rbac policy=p;ns:a\nroute shop/r cart:8080\nrule use=f set=x-a:1", "shop/cart:8080", "self: |-: policy|any -> shop/r rule 1 rbac(HTTPFilter shop/f) request(x-a=1)", nil},
		{"references that are none", "filter shop/c scope=chain rbac target=v2\nfilter pay/p rbac\nfilter shop/i invalid=broken\nroute shop/r cart:8080\nrule use=c\nrule use=p\nrule use=i", "shop/cart:8080",
			"self: |-: policy|any -> shop/r rule 1 invalid rbac(a filter that cannot be honoured)|any -> shop/r rule 2 invalid rbac(a filter that cannot be honoured)|any -> shop/r rule 3 invalid rbac(a filter that cannot be honoured)",
			[]string{"HTTPFilter shop/i: broken", "rules[0]: filters[0]: HTTPFilter shop/c is not of SCOPE_ROUTE", "rules[1]: filters[0]: HTTPFilter shop/p is not there", "rules[2]: filters[0]: HTTPFilter shop/i cannot be honoured: broken"}},
		{"order of levels", "filter shop/own request=set:own:1\nfilter shop/b target=cart request=set:b:1\nfilter shop/a target=cart request=set:a:1\nfilter shop/chain scope=chain target=cart request=set:chain:1 response=remove:r query=append:q:1\nroute shop/r cart:8080\nrule set=first:1 use=own to=v2:8080 bset=backend:1", "shop/cart:8080",
			"self: request(a=1) request(b=1) request(chain=1) query(+q=1) response(-r=)|-:|any -> shop/r rule 1 to(1 shop/v2:8080)[request(first=1) request(own=1) request(a=1) request(b=1) request(backend=1) request(chain=1) query(+q=1) response(-r=)] request(first=1) request(own=1) request(a=1) request(b=1) request(chain=1) query(+q=1) response(-r=)", nil},
		{"the producer overrides", "filter shop/own rbac\nfilter shop/chain scope=chain target=cart rbac\nfilter shop/ask scope=chain target=cart authz\nroute shop/r cart:8080\nrule use=own", "shop/cart:8080",
			"self: rbac(HTTPFilter shop/chain) authz(HTTPFilter shop/ask)|-: policy|any -> shop/r rule 1 rbac(HTTPFilter shop/own) authz(HTTPFilter shop/ask)", nil},
		{"the consumer does not", "filter pay/own rbac\nfilter pay/ask authz\nfilter pay/meta metadata=x:k\nfilter shop/chain scope=chain target=cart rbac\nfilter shop/ask scope=chain target=cart authz\nfilter shop/meta scope=chain target=cart metadata=y:k\nroute pay/r shop/cart:8080\nrule use=own use=ask use=meta", "shop/cart:8080",
			"self: rbac(HTTPFilter shop/chain) authz(HTTPFilter shop/ask) select(y>k)|pay: policy|any -> pay/r rule 1 rbac(HTTPFilter pay/own) rbac(HTTPFilter shop/chain) authz(HTTPFilter pay/ask) authz(HTTPFilter shop/ask) select(x>k) select(y>k)", nil},
		{"targeted at routes", "filter shop/t target=cart rbac\nfilter shop/chain scope=chain target=cart rbac\nroute shop/r cart:8080\nrule use=t", "shop/cart:8080",
			"self: rbac(HTTPFilter shop/t)|-: policy|any -> shop/r rule 1 rbac(HTTPFilter shop/t)", nil},
		{"targeted at a consumer's route", "filter shop/t target=cart rbac\nfilter shop/chain scope=chain target=cart rbac\nroute pay/r shop/cart:8080\nrule all", "shop/cart:8080",
			"self: rbac(HTTPFilter shop/t)|pay: policy|any -> pay/r rule 1 rbac(HTTPFilter shop/t) rbac(HTTPFilter shop/chain)", nil},
		{"several chain filters", "filter shop/b scope=chain target=cart rbac\nfilter shop/a scope=chain target=cart rbac\nfilter shop/d scope=chain target=cart authz\nfilter shop/c scope=chain target=cart authz", "shop/cart:8080",
			"self: rbac(HTTPFilter shop/a) rbac(HTTPFilter shop/b) authz(HTTPFilter shop/c) authz(HTTPFilter shop/d)", nil},
		{"switched off", "filter shop/off authz disabled\nfilter shop/ask scope=chain target=cart authz\nroute shop/r cart:8080\nrule use=off", "shop/cart:8080", "self: authz(HTTPFilter shop/ask)|-:|any -> shop/r rule 1", nil},
		{"not switched off", "filter pay/off authz disabled\nfilter shop/ask scope=chain target=cart authz\nroute pay/r shop/cart:8080\nrule use=off", "shop/cart:8080",
			"self: authz(HTTPFilter shop/ask)|pay: policy|any -> pay/r rule 1 authz(HTTPFilter shop/ask)", []string{"HTTPFilter pay/off switches extAuthz off, which only a route in the namespace of Service shop/cart may"}},
		{"other metadata", "filter shop/m scope=chain target=cart metadata=X-A:k:other metadata=x-b:l", "shop/cart:8080", "self: select(x-b>l)", nil},
		{"an audit takes no place", "filter shop/a rbac audit policy=p;ns:a\nfilter shop/chain scope=chain target=cart rbac policy=p;ns:a\nroute shop/r cart:8080\nrule use=a", "shop/cart:8080",
			"self: rbac(HTTPFilter shop/chain)|-: policy|any -> shop/r rule 1 rbac(HTTPFilter shop/a) rbac(HTTPFilter shop/chain)", nil},
		{"an audit and an enforced one", "filter shop/a rbac audit\nfilter shop/own rbac\nfilter shop/chain scope=chain target=cart rbac\nroute shop/r cart:8080\nrule use=a use=own", "shop/cart:8080",
			"self: rbac(HTTPFilter shop/chain)|-: policy|any -> shop/r rule 1 rbac(HTTPFilter shop/a) rbac(HTTPFilter shop/own)", nil},
		{"metadata that selects nothing", "filter shop/m metadata=x:k:other\nfilter shop/chain scope=chain target=cart metadata=y:k\nroute shop/r cart:8080\nrule use=m", "shop/cart:8080",
			"self: select(y>k)|-:|any -> shop/r rule 1 select(y>k)", nil},
		{"audit is no policy", "filter shop/a rbac audit\nroute shop/r cart:8080\nrule use=a", "shop/cart:8080", "self: |-:|any -> shop/r rule 1 rbac(HTTPFilter shop/a)", nil},
		{"invalid chain", "filter shop/c scope=chain target=cart invalid=broken\nroute shop/r cart:8080\nrule to=v2:8080", "shop/cart:8080",
			"self: invalid rbac(a filter that cannot be honoured)|-: policy|any -> shop/r rule 1 invalid rbac(a filter that cannot be honoured)", []string{"broken; what it governs is refused"}},
		{"filters that contradict", "filter shop/a scope=chain target=cart\nfilter shop/b scope=chain target=cart rbac authz\nfilter shop/c scope=inbound target=cart request=set:a:1\nfilter shop/d target=v2 rbac policy=p\nfilter shop/e target=v2 authz disabled ctx=a:b\nfilter shop/f target=v2 request=set:host:b\nfilter shop/g target=v2 metadata=x:", "shop/cart:9090",
			"self: invalid rbac(a filter that cannot be honoured)", []string{"it has 0 of", "it has 2 of", "SCOPE_INBOUND only", "not judged on raw TCP: 9000; policy there needs a NetworkPolicy", "no principal", "disabled and has", "the request's target", "no metadataKey"}},
		{"twins", "filter shop/a scope=chain target=cart rbac\nfilter shop/a target=v2 request=set:a:1", "shop/v2:8080", "self: invalid rbac(a filter that cannot be honoured)", []string{"two HTTPFilters of this name"}},
		{"targets", "filter shop/a scope=chain target=pay/api,nope rbac\nfilter shop/b scope=chain rbac\nfilter shop/c scope=inbound target=gone rbac", "pay/api:8080", "self: ",
			[]string{"target Service pay/api is of another namespace", "target Service shop/nope: there is no such service", "names no target", "target Service shop/gone"}},

		// Policy is at paths that can be held against what applications read.
		{"escaped paths with policy", `filter shop/f rbac policy=p;ns:a
route shop/r cart:8080
rule match=prefix:/caf%C3%A9 use=f
rule match=prefix:/caf%C3%A9
rule match=exact:/a//b match=prefix:/a use=f
rule match=exact:/b/.. use=f
rule match=prefix:/c;v/ use=f
rule match=exact:/d\e use=f
rule match=prefix:/café/.x use=f
rule match=regex:/caf%.* use=f`, "shop/cart:8080",
			"self: |-: policy|exact:/a//b -> shop/r rule 3 invalid rbac(HTTPFilter shop/f)|exact:/b/.. -> shop/r rule 4 invalid rbac(HTTPFilter shop/f)|exact:/d\\e -> shop/r rule 6 invalid rbac(HTTPFilter shop/f)|" +
				"regex:/caf%.* -> shop/r rule 8 rbac(HTTPFilter shop/f)|prefix:/caf%C3%A9 -> shop/r rule 1 invalid rbac(HTTPFilter shop/f)|prefix:/caf%C3%A9 -> shop/r rule 2|prefix:/café/.x -> shop/r rule 7 rbac(HTTPFilter shop/f)|" +
				"prefix:/c;v -> shop/r rule 5 invalid rbac(HTTPFilter shop/f)|prefix:/a -> shop/r rule 3 invalid rbac(HTTPFilter shop/f)",
			[]string{`rules[0]: the path "/caf%C3%A9" of a match could be walked around`, `rules[2]: the path "/a//b"`, `"/b/.."`, `"/c;v"`, "write it decoded, as /café"}},
		{"escaped path under a chain's policy", "filter shop/f scope=chain target=cart authz\nroute shop/r cart:8080\nrule match=prefix:/a%20b", "shop/cart:8080",
			"self: authz(HTTPFilter shop/f)|-: policy|prefix:/a%20b -> shop/r rule 1 invalid authz(HTTPFilter shop/f)", []string{"write it decoded"}},
		{"escaped permission", "filter shop/f scope=chain target=cart rbac deny policy=p;ns:a;path:/caf%C3%A9", "shop/cart:8080", "self: invalid rbac(a filter that cannot be honoured)",
			[]string{`pathPrefix "/caf%C3%A9" could be walked around: policy is held against paths as applications read them; write it decoded, as /café`}},
		{"permission with dots", "filter shop/f scope=chain target=cart rbac deny policy=p;ns:a;path:/a/../b", "shop/cart:8080", "self: invalid rbac(a filter that cannot be honoured)", []string{"dot segments"}},
		{"permission of hidden files", "filter shop/f scope=chain target=cart rbac deny policy=p;ns:a;path:/.;path:/café", "shop/cart:8080", "self: rbac(HTTPFilter shop/f)", nil},

		// A user's Service is its own namespace's to name (4.9).
		{"a consumer's alone", "user shop/own 10.96.0.5 80:8080\npods shop/own 8080\nroute pay/r shop/own:80\nrule to=api:8080", "shop/own:80", "self: ",
			[]string{"HTTPRoute pay/r: parentRef Service shop/own: not attached, for no route of namespace shop names that Service: it must be named there first"}},
		{"a consumer's beside the producer's", "user shop/own 10.96.0.5 80:8080,81:8080\npods shop/own 8080\nroute pay/r shop/own:80\nrule to=api:8080\nroute shop/r own:81\nrule all", "shop/own:80",
			"self: |pay:|any -> pay/r rule 1 to(1 pay/api:8080)", nil},
		{"a consumer's beside one that fits nothing", "user shop/own 10.96.0.5 80:8080\npods shop/own 8080\nroute pay/r shop/own:80\nrule to=api:8080\nroute shop/r own:82\nrule all", "shop/own:80",
			"self: ", []string{"must be named there first", "NoMatchingParent"}},

		// Backends (10.4).
		{"references to backends", "catalog shop/cold\nservice shop/bare 10.96.0.7\nuser shop/mine 10.96.0.8 80:8080\nroute shop/r cart:8080\nrule to=v2:1 to=v2:5432 to=nope:1 to=v2 to=v2:8080!Why to=cold:7 to=bare:7 to=bare:18081 to=mine:80", "shop/cart:8080",
			"self: |-:|any -> shop/r rule 1 to(1 invalid) to(2 invalid) to(3 invalid) to(4 invalid) to(5 invalid) to(6 shop/cold:7) to(7 shop/bare:7) to(8 invalid) to(9 shop/mine:8080)",
			[]string{"rules[0].backendRefs[0]: backendRef shop/v2 port 1:", "port 5432: UnsupportedProtocol", "shop/nope", "port 0", "Why", "rules[0].backendRefs[7]: backendRef shop/bare port 18081"}},
		{"rule without backends", "route shop/r cart:8080\nrule all", "shop/cart:8080", "self: |-:|any -> shop/r rule 1", nil},

		// Raw TCP (10.6).
		{"tcp", "tcproute shop/t cart\nrule to=v2:5432*3 to=pay/api:5432!No\nrule to=pay/api:5432*2 to=v2:8080", "shop/cart:9000", "-: TCPRoute shop/t to(3 shop/v2:5432) to(4 invalid) to(6 pay/api:5432) to(7 invalid)", []string{"No; its share of the connections", "UnsupportedProtocol: the port is http"}},
		{"tcp groups", "tcproute shop/t cart created=2\nrule to=v2:5432\ntcproute shop/older cart created=1\nrule to=pay/api:5432\ntcproute pay/t shop/cart\nrule to=api:5432", "shop/cart:9000",
			"-: TCPRoute shop/older to(1 pay/api:5432)|pay: TCPRoute pay/t to(1 pay/api:5432)", []string{"TCPRoute shop/t: parentRef Service shop/cart port 9000: not attached (Conflicted), for TCPRoute shop/older is, and is older"}},
		{"tcp that goes nowhere", "tcproute shop/t cart\nrule to=v2:5432*0\ntcproute pay/t shop/cart\nrule invalid=no to=api:5432", "shop/cart:9000", "-: TCPRoute shop/t invalid|pay: TCPRoute pay/t invalid", []string{"pay/t: rules[0]: no; connections", "no backend of it has a weight"}},
		{"tls", "tlsroute shop/b cart created=2 sni=*.example,B.db.example,*.db.example\nrule to=v2:5432\ntlsroute shop/a cart:9000 sni=b.db.example\nrule to=pay/api:5432\ntlsroute pay/c shop/cart sni=c.example\nrule to=api:5432", "shop/cart:9000",
			"tls 9000  b.db.example: TLSRoute shop/a to(1 pay/api:5432)|tls 0  b.db.example: TLSRoute shop/b to(1 shop/v2:5432)|tls 0 pay c.example: TLSRoute pay/c to(1 pay/api:5432)|tls 0  *.db.example: TLSRoute shop/b to(1 shop/v2:5432)|tls 0  *.example: TLSRoute shop/b to(1 shop/v2:5432)", nil},
		{"tls names", "tlsroute shop/a cart sni=a..b,*,*x.y,*.,a:1\nrule to=v2:5432\ntlsroute shop/b cart\nrule to=v2:5432", "shop/cart:9000", "tls 0  *: TLSRoute shop/a invalid", []string{`"*"`, `"*."`, `"*x.y"`, `"a..b"`, `"a:1"`, "no server name and takes"}},
		{"raw rules with matches", "tcproute shop/t cart\nrule match=prefix:/a to=v2:5432", "shop/cart:9000", "-: TCPRoute shop/t invalid", []string{"mean nothing to raw TCP"}},

		// What is not there (4.6, 4.12).
		{"retained", "retained shop/gone 8080,18081,80", "shop/gone:8080", "self: ", nil},
		{"retained, undeclared", "retained shop/gone 8080", "shop/gone:81", "no port", nil},
		{"retained, with rows", "retained shop/cart 7", "shop/cart:7", "no port", nil},
		{"retained, declared", "service shop/gone 10.96.0.9 90\nretained shop/gone 8080", "shop/gone:8080", "no port", nil},
		{"retained, a user's", "user shop/gone 10.96.0.9 80:8080,81:8081\nretained shop/gone 8080", "shop/gone:80", "self: ", nil},
		{"retained, a user's other port", "user shop/gone 10.96.0.9 80:8080,81:8081\nretained shop/gone 8080", "shop/gone:81", "no port", nil},
		{"retained and routed", "user shop/gone 10.96.0.9 80:8080\nretained shop/gone 8080\nroute shop/r gone\nrule all", "shop/gone:80", "self: |-:|any -> shop/r rule 1", nil},
		{"reserved target", "user shop/x 10.96.0.9 80:18081\npods shop/x 8080", "shop/x:80", "no port", []string{"which is the mesh's own and no pod's"}},

		// Twins.
		{"two routes of one name", "route shop/r cart:8080\nrule match=prefix:/a\nroute shop/r cart:8080\nrule match=prefix:/b", "shop/cart:8080", "self: |-: policy|prefix:/a -> shop/r rule 1 invalid|prefix:/b -> shop/r rule 1 invalid", []string{"two HTTPRoutes of this name"}},
		{"one name, two kinds", "route shop/r cart:8080\nrule all\ngrpcroute shop/r cart:9090\nrule all", "shop/cart:8080", "self: |-:|any -> shop/r rule 1", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m, err := modeltest.Parse(base + tt.mesh)
			if tt.want == "error" {
				if err == nil {
					t.Fatal("no error")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			s, problems := compile.Compile(m)
			var ns, name string
			var port uint16
			who, num, _ := strings.Cut(tt.port, ":")
			ns, name, _ = strings.Cut(who, "/")
			if _, err := fmt.Sscan(num, &port); err != nil {
				t.Fatal(err)
			}
			if got := strings.ReplaceAll(strings.TrimSuffix(show(s, ns, name, port), "\n"), "\n", "|"); got != tt.want {
				t.Errorf("got  %s\nwant %s", strings.ReplaceAll(got, "|", "\n     "), strings.ReplaceAll(tt.want, "|", "\n     "))
			}
			for i, p := range problems {
				if i >= len(tt.problems) || !strings.Contains(p.Object+": "+p.Reason, tt.problems[i]) {
					t.Errorf("problem %d: %s: %s", i, p.Object, p.Reason)
				}
			}
			if len(problems) < len(tt.problems) {
				t.Errorf("%d problems, want %q", len(problems), tt.problems)
			}
		})
	}
}

// TestKindNobodySet: a route of no kind is an object that is not in force.
func TestKindNobodySet(t *testing.T) {
	m := modeltest.Mesh(t, "pods shop/cart 8080\nroute shop/r cart\nrule all")
	m.Routes[0].Kind = 0
	s, problems := compile.Compile(m)
	if got := show(s, "shop", "cart", 8080); got != "self: \n" || len(problems) != 1 || !strings.Contains(problems[0].Reason, "unknown kind of route") {
		t.Error(got, problems)
	}
}

// values are n conditions, sets n changes.
func values(n int) (out []model.ValueMatch) {
	for i := range n {
		out = append(out, model.ValueMatch{Name: fmt.Sprintf("x-%d", i), Value: "v"})
	}
	return out
}

func sets(n int) (out []model.HeaderValue) {
	for i := range n {
		out = append(out, model.HeaderValue{Name: fmt.Sprintf("x-%d", i), Value: "v"})
	}
	return out
}

// mutation is one of n changes.
func mutation(n int) *model.Mutation {
	out := &model.Mutation{}
	for _, v := range sets(n) {
		out.Query = append(out.Query, model.MutationOp{Kind: model.OverwriteIfExistsOrAdd, Name: v.Name, Value: v.Value})
	}
	return out
}

// use makes the first rule of r refer to more mutations of n changes each.
func use(m *model.Mesh, r *model.Route, more, n int) {
	for range more {
		name := fmt.Sprintf("f%d", len(m.Filters))
		m.Filters = append(m.Filters, model.HTTPFilter{Namespace: "shop", Name: name, Scope: model.ScopeRoute, Mutation: mutation(n)})
		r.Rules[0].Filters = append(r.Rules[0].Filters, model.Filter{Kind: model.Extension, Extension: name})
	}
}

// TestChainBounds: changes that are too many for all requests of a service.
func TestChainBounds(t *testing.T) {
	cart := model.ServiceName{Namespace: "shop", Name: "cart"}
	for _, tt := range []struct {
		filters, each int
		backend       int    // changes of a backend of the rule
		want          string // of the only problem; "": none
		self, share   bool   // refused
	}{
		{4, 64, 0, "", false, false},
		{5, 52, 0, "Service shop/cart: its filters, with those of the service, make 260 changes, and 256 are the most", true, false},
		{1, 65, 0, "HTTPFilter shop/f0: it makes 65 changes, and 64 are the most", true, false},
		{4, 60, 16, "", false, false},
		{4, 60, 17, "HTTPRoute shop/r: rules[0].backendRefs[0]: backendRef shop/cart port 8080: its filters, with those of the service, make 257 changes", false, true},
	} {
		m := modeltest.Mesh(t, "service shop/cart 10.96.0.1\npods shop/cart 8080\nroute shop/r cart\nrule to=cart:8080")
		for i := range tt.filters {
			m.Filters = append(m.Filters, model.HTTPFilter{Namespace: "shop", Name: fmt.Sprintf("f%d", i), Scope: model.ScopeChain, Targets: []model.ServiceName{cart}, Mutation: mutation(tt.each)})
		}
		if tt.backend > 0 {
			m.Routes[0].Rules[0].Backends[0].Filters = []model.Filter{{Kind: model.RequestHeaders, Set: sets(tt.backend)}}
		}
		s, problems := compile.Compile(m)
		p := s.Service(cart).Port(8080)
		rule := p.Program.Arms[0].Rule
		share := len(rule.Backends) > 0 && rule.Backends[0].Invalid != ""
		text := ""
		for _, x := range problems {
			text += x.Object + ": " + x.Reason
		}
		if (p.Self.Invalid != "") != tt.self || (rule.Invalid != "") != tt.self || share != tt.share || !strings.HasPrefix(text, tt.want) || (tt.want == "") != (text == "") {
			t.Errorf("%+v: self %.60q, rule %.60q, share %v, %s", tt, p.Self.Invalid, rule.Invalid, share, text)
		}
	}
}

// TestBounds: what is too big is refused by name, and nothing else is.
func TestBounds(t *testing.T) {
	heavy := []model.Match{{Headers: []model.ValueMatch{{Name: "x", Value: "(?:ab?c){850}", Regex: true}}}}
	build := func(edit func(m *model.Mesh, r *model.Route)) (*snapshot.Snapshot, []model.Problem) {
		m := modeltest.Mesh(t, "pods shop/cart 8080,9090\npods shop/v2 8080\nroute shop/r cart:8080\nrule to=v2:8080\nroute shop/ok cart:9090\nrule to=v2:8080")
		edit(m, &m.Routes[0])
		return compile.Compile(m)
	}
	for _, tt := range []struct {
		name string
		edit func(m *model.Mesh, r *model.Route)
		want string // "": accepted
	}{
		{"1024 matches", func(m *model.Mesh, r *model.Route) { r.Rules[0].Matches = make([]model.Match, 1024) }, ""},
		{"1025 matches", func(m *model.Mesh, r *model.Route) { r.Rules[0].Matches = make([]model.Match, 1025) }, "with 1025 matches on one port, and 1024 are the most"},
		{"10000 rules", func(m *model.Mesh, r *model.Route) { r.Rules = make([]model.Rule, 10000) }, "with 10000 matches on one port, and 1024 are the most"},
		{"64 backends", func(m *model.Mesh, r *model.Route) {
			r.Rules[0].Backends = slices.Repeat(r.Rules[0].Backends, 64)
		}, ""},
		{"65 backends", func(m *model.Mesh, r *model.Route) {
			r.Rules[0].Backends = slices.Repeat(r.Rules[0].Backends, 65)
		}, "it has 65 backends, and 64 are the most"},
		{"32 filters", func(m *model.Mesh, r *model.Route) {
			r.Rules[0].Filters = slices.Repeat([]model.Filter{{Kind: model.Mirror, Mirror: &model.MirrorFilter{Backend: r.Rules[0].Backends[0], Numerator: 1, Denominator: 1}}}, 32)
		}, ""},
		{"33 filters", func(m *model.Mesh, r *model.Route) {
			r.Rules[0].Filters = slices.Repeat([]model.Filter{{Kind: model.RequestHeaders}}, 33)
		}, "it has 33 filters, and 32 are the most"},
		{"expressions within the bound", func(m *model.Mesh, r *model.Route) { r.Rules[0].Matches = slices.Repeat(heavy, 1) }, ""},
		{"expressions over it", func(m *model.Mesh, r *model.Route) { r.Rules[0].Matches = slices.Repeat(heavy, 5) }, "compile to 17010 instructions on one port, and 4096 are the most"},
		{"expressions over it in two rules", func(m *model.Mesh, r *model.Route) {
			r.Rules[0].Matches = slices.Repeat(heavy, 3)
			r.Rules = append(r.Rules, r.Rules[0])
		}, "instructions on one port"},
		{"16 fields and 16 parameters", func(m *model.Mesh, r *model.Route) {
			r.Rules[0].Matches = []model.Match{{Headers: values(16), Query: values(16)}}
		}, ""},
		{"17 fields", func(m *model.Mesh, r *model.Route) {
			r.Rules[0].Matches = []model.Match{{Headers: values(17)}}
		}, "a match has 17 conditions on a field, and 16 are the most"},
		{"17 parameters", func(m *model.Mesh, r *model.Route) {
			r.Rules[0].Matches = []model.Match{{Query: values(17)}}
		}, "a match has 17 conditions on a parameter, and 16 are the most"},
		{"64 changes", func(m *model.Mesh, r *model.Route) {
			r.Rules[0].Filters = []model.Filter{{Kind: model.RequestHeaders, Set: sets(64)}}
		}, ""},
		{"65 changes", func(m *model.Mesh, r *model.Route) {
			r.Rules[0].Filters = []model.Filter{{Kind: model.ResponseHeaders, Set: sets(32), Add: sets(32), Remove: []string{"x"}}}
		}, "ResponseHeaderModifier: it makes 65 changes, and 64 are the most"},
		{"256 changes of a rule", func(m *model.Mesh, r *model.Route) { use(m, r, 4, 64) }, ""},
		{"257 changes of a rule", func(m *model.Mesh, r *model.Route) { use(m, r, 4, 64); use(m, r, 1, 1) }, "make 257 changes, and 256 are the most"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, problems := build(tt.edit)
			svc := s.Service(model.ServiceName{Namespace: "shop", Name: "cart"})
			p := svc.Port(8080).Program
			refused := p.Invalid != "" || len(p.Arms) > 0 && p.Arms[0].Rule.Invalid != ""
			if refused != (tt.want != "") || len(problems) > 1 || refused && (len(problems) == 0 || !strings.Contains(problems[0].Reason, tt.want) || problems[0].Object != "HTTPRoute shop/r") {
				t.Errorf("refused %v: %.300s", refused, fmt.Sprint(problems))
			}
			if o := svc.Port(9090).Program; o.Invalid != "" || o.Arms[0].Rule.Invalid != "" {
				t.Error("the other port's route is refused, too")
			}
		})
	}
	// More server names than a service may have: the most specific stand, the rest is refused.
	m := modeltest.Mesh(t, "pods shop/db 5432=tcp\ntlsroute shop/t db\nrule to=db:5432")
	for i := range 1200 {
		m.Routes[0].ServerNames = append(m.Routes[0].ServerNames, fmt.Sprintf("h%d.example", i))
	}
	s, problems := compile.Compile(m)
	arms := s.Services()[0].TLS
	if last := arms[len(arms)-1]; len(arms) != 1025 || !last.Below || last.Name != "" || last.Split.Invalid == "" || len(problems) != 1 {
		t.Errorf("%d arms, the last %+v; %v", len(arms), last, problems)
	}
}

// TestServerNamesOfOthers: whoever names too many is cut, and nobody else: not
// the producer, nor callers of other namespaces, nor other ports.
func TestServerNamesOfOthers(t *testing.T) {
	m := modeltest.Mesh(t, "pods shop/db 5432=tcp,6000=tcp\npods pay/x 5432=tcp\ntlsroute shop/t db sni=*.example\nrule to=db:5432\ntlsroute pay/t shop/db:5432\nrule to=x:5432\ntlsroute ops/t shop/db:5432 sni=a.b\nrule to=pay/x:5432")
	for i := range 1100 {
		m.Routes[1].ServerNames = append(m.Routes[1].ServerNames, fmt.Sprintf("h%d.evil.example", i))
	}
	s, problems := compile.Compile(m)
	count := map[string]int{}
	for _, a := range s.Service(model.ServiceName{Namespace: "shop", Name: "db"}).TLS {
		count[fmt.Sprintf("%d %s %v", a.Port, a.Caller, a.Split.Invalid != "")]++
	}
	want := map[string]int{"0  false": 1, "5432 ops false": 1, "5432 pay false": 1024, "5432 pay true": 1}
	if !maps.Equal(count, want) || len(problems) != 1 || problems[0].Object != "TLSRoute pay/t" || !strings.Contains(problems[0].Reason, "with 1100 server names") {
		t.Error(count, problems)
	}
	// The producer's dial goes where it went.
	f, err := model.ParseFlow("shop/web > 10.96.0.1:5432 tls host=db.example")
	if err != nil {
		t.Fatal(err)
	}
	m.Services = modeltest.Mesh(t, "service shop/db 10.96.0.1").Services
	s, _ = compile.Compile(m)
	if v := decide.Decide(s, &f, 0, nil); v.Action != decide.Forward {
		t.Error(v)
	}
}

// TestRawInbound: what is not judged at the destination is said.
func TestRawInbound(t *testing.T) {
	_, problems := compile.Compile(modeltest.Mesh(t, `
pods shop/db 8080,5432=tcp,53=udp
pods shop/db 8080,90=tcp
pods shop/web 8080
local shop/db 8080,7000=tcp cid=a
filter shop/a scope=inbound target=db,web rbac policy=p;ns:a
filter shop/b scope=inbound target=db authz
filter shop/c scope=inbound target=db authz disabled
filter shop/d scope=chain target=db rbac
`))
	var got []string
	for _, p := range problems {
		got = append(got, p.Object+": "+p.Reason)
	}
	const what = ": target Service shop/db: not judged on raw TCP: 90, 5432, 7000; policy there needs a NetworkPolicy"
	if want := []string{"HTTPFilter shop/a" + what, "HTTPFilter shop/b" + what}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestServiceKinds: what a name is, by its rows, its objects, its routes, the
// catalog and what is retained.
func TestServiceKinds(t *testing.T) {
	for _, tt := range []struct{ mesh, want string }{
		{"", "none"},
		{"pods shop/x 8080", "bare"},
		{"catalog shop/x", "bare await cold"},
		{"retained shop/x 80", "bare"},
		{"retained shop/x", "bare"},
		{"catalog shop/x\npods shop/x 80", "bare"},
		{"service shop/x 10.0.0.1", "generated cold"},
		{"service shop/x 10.0.0.1 80", "generated"},
		{"service shop/x 10.0.0.1 80\ncatalog shop/x", "generated await"},
		{"service shop/x 10.0.0.1 18081,18082\ncatalog shop/x", "generated await cold"},
		{"service shop/x 10.0.0.1\nretained shop/x 80", "generated"},
		{"service shop/x 10.0.0.1\nretained shop/x", "generated"},
		{"user shop/x 10.0.0.1 80:80", "none"},
		{"user shop/x 10.0.0.1 80:80\npods shop/x 80", "meshOnly"},
		{"user shop/x 10.0.0.1 80:80\ncatalog shop/x", "meshOnly await"},
		{"user shop/x 10.0.0.1 80:80\nretained shop/x 80", "meshOnly"},
		{"user shop/x 10.0.0.1 80:80\nroute shop/r x\nrule all", "routed"},
		{"user shop/x 10.0.0.1 80:80\ngrpcroute shop/r x\nrule all", "routed"},
		{"user shop/x 10.0.0.1 80:80\ngrpcroute pay/r shop/x\nrule all", "none"}, // a consumer's names are for nobody to take
		{"user shop/x 10.0.0.1 80:80\npods shop/x 80=tcp\ntcproute shop/r x\nrule all", "routed"},
		{"user shop/x 10.0.0.1\ntlsroute shop/r x sni=a.b\nrule all", "routed"},
		{"user shop/x 10.0.0.1 80:80\nroute shop/r x:81\nrule all", "none"},
		{"user shop/x 10.0.0.1 80:80\npods shop/x 80\nroute pay/r shop/x\nrule all", "meshOnly"},
		{"user shop/x 10.0.0.1 80:80\npods shop/x 80\ntlsroute pay/r shop/x sni=a.b\nrule all", "meshOnly"},
		{"user shop/x 10.0.0.1 80:80\nuser shop/x 10.0.0.2 80:80\npods shop/x 80\nroute pay/r shop/x\nrule all", "meshOnly"},
		{"user shop/x 10.0.0.1 80:80\nuser shop/x 10.0.0.2 80:80\npods shop/x 80\nroute shop/r x\nrule all", "routed"},
		{"user shop/x 10.0.0.1 80:web\nroute shop/r x\nrule all\ncatalog shop/x", "meshOnly await"},
		{"catalog shop/X.y", "none"},
	} {
		s, _ := compile.Compile(modeltest.Mesh(t, tt.mesh))
		got := "none"
		for _, svc := range s.Services() {
			got = svc.Kind.String()
			if svc.Await {
				got += " await"
			}
			if svc.Cold {
				got += " cold"
			}
			if svc.Kubernetes != (svc.Kind == snapshot.Generated || svc.Kind == snapshot.Routed) {
				t.Errorf("%s: its names", tt.mesh)
			}
		}
		if got != tt.want {
			t.Errorf("%s: %s, want %s", strings.ReplaceAll(tt.mesh, "\n", "; "), got, tt.want)
		}
	}
}

// TestInbound: what filters do at the destination, for the pods of this node.
func TestInbound(t *testing.T) {
	s, problems := compile.Compile(modeltest.Mesh(t, `
local shop/cart 8080 cid=a
local shop/web 8080 cid=b
local shop/bad 8080 cid=c
filter shop/b scope=inbound target=cart rbac policy=p;ns:web
filter shop/a scope=inbound target=cart rbac deny policy=p;ns:ops
filter shop/c scope=inbound target=cart authz ctx=a:b
filter shop/d scope=inbound target=cart authz disabled
filter shop/x scope=inbound target=bad invalid=broken
filter shop/y scope=chain target=bad rbac
`))
	for cid, want := range map[string]string{"a": "rbac(HTTPFilter shop/a) rbac(HTTPFilter shop/b) authz(HTTPFilter shop/c)", "b": "nil", "c": "rbac(HTTPFilter shop/x)"} {
		got := "nil"
		if p := s.Workload(cid).Inbound; p != nil {
			got = pipeText(p)
		}
		if got != want {
			t.Errorf("%s: %s, want %s", cid, got, want)
		}
	}
	if r := s.Workload("c").Inbound.RBAC[0]; r.Audit || r.Deny || len(r.Policies) > 0 {
		t.Errorf("%+v lets somebody in", r)
	}
	if len(problems) != 2 || problems[0].Object != "HTTPFilter shop/x" || problems[1].Object != "HTTPFilter shop/y" {
		t.Error(problems)
	}
}

// TestSubsetKeys: the keys that any valid row has and a request may name.
func TestSubsetKeys(t *testing.T) {
	s, _ := compile.Compile(modeltest.Mesh(t, "pods shop/a 80 meta=version:1 meta=ip:2 meta=Up:3\npods pay/b 80 meta=tier:1 meta=version:2\npods pay/c 80 meta=lost:1 id=none"))
	if got := strings.Join(s.SubsetKeys(), " "); got != "tier version" {
		t.Error(got)
	}
}

// TestMaxText: few expressions may see 8 KiB of text; the more all of them cost, the less.
func TestMaxText(t *testing.T) {
	for _, tt := range []struct{ n, least, most int }{{0, 8 << 10, 8 << 10}, {1, 490, 520}, {5, 98, 104}, {8, 61, 66}} {
		m := modeltest.Mesh(t, "service shop/cart 10.96.0.1\npods shop/cart 8080\nroute shop/r cart:8080\nrule name=re")
		for i := range tt.n {
			m.Routes[0].Rules[0].Matches = append(m.Routes[0].Rules[0].Matches,
				model.Match{PathKind: model.PathRegex, Path: fmt.Sprintf("/%d(a{500})*", i)})
		}
		s, _ := compile.Compile(m)
		program := s.Service(model.ServiceName{Namespace: "shop", Name: "cart"}).Port(8080).Program
		if program.Invalid != "" {
			t.Fatal(program.Invalid)
		}
		got := program.MaxText
		if got < tt.least || got > tt.most {
			t.Errorf("%d expressions of some 510 instructions: %d bytes, want %d to %d", tt.n, got, tt.least, tt.most)
		}
	}
}
