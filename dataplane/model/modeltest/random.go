package modeltest

import (
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
)

// The pools are small, so that what is drawn meets: names are shared between
// namespaces, ports between classes, addresses between Services and dials.
var (
	namespaces = []string{"shop", "pay", "svc"}
	accounts   = []string{"cart", "web", "db", "shop"}
	portPool   = []uint16{80, 443, 8080, 9090, 9000, 18081, 18082}
	paths      = []string{"/", "/a", "/a/", "/a/b", "/ab", "/A", "/a?x=1", "/a/b/c", "/aether/readyz", "/-/-/live", "/-/-/ready", "*", ""}
	spellings  = []string{"//a", "/a/../a/b", "/%61", "/a%2fb", "/a/%2e%2e/ab", "/a;x", "/a\\b", "/%2561", "/s/m", "/s/m/", "/s.T/M"}
	methods    = []string{"GET", "POST", "CONNECT", "OPTIONS"}
	values     = []string{"1", "2", "yes"}
	fields     = []string{"version", "beta", "x-a", "host"}
	metadata   = []string{"version", "tier", "zone-x", "a", "b", "ip"}
	regexes    = []string{"/a.*", "/[ab]+", ".*", "1|2", "s.*", "(", "[a-z]{1,3}"}
	filters    = []string{"f0", "f1", "f2", "f3"}
	identities = []string{"spiffe://td/ns/shop/sa/web", "spiffe://td/ns/pay/sa/cart", "spiffe://td/x"}
	servers    = []string{"db.example", "*.example", "*.db.example", "a.db.example"}
	uids       = []string{"", "uid-0", "uid-1", "..", "u/5", "11111111-2222-3333-4444-555555555555"}
	sockets    = []string{"", "app/a.sock", "app/b.sock", "sock/a.sock", "tmp/a.sock", "app", "app/", "/a.sock", "app/x/y", "../a.sock", "app/..",
		"app/" + strings.Repeat("x", 54), "app/" + strings.Repeat("x", 55), "app/" + strings.Repeat("x", 90)}
	volumes = [][]model.Volume{nil, nil, {}, {{Name: "app", Driver: "csi.aether.io"}}, {{Name: "tmp"}, {Name: "app", Driver: "csi.aether.io"}},
		{{Name: "app", Driver: "csi.aether.io"}, {Name: "sock", Driver: "csi.aether.io"}}, {{Name: "app", Driver: "other.io"}}}
)

func pick[T any](r *rand.Rand, of []T) T { return of[r.IntN(len(of))] }

func serviceName(r *rand.Rand) model.ServiceName {
	return model.ServiceName{Namespace: pick(r, namespaces), Name: pick(r, accounts)}
}

func clusterIP(r *rand.Rand) netip.Addr {
	if r.IntN(4) == 0 {
		return netip.MustParseAddr("fd00::" + strconv.Itoa(1+r.IntN(20)))
	}
	return netip.AddrFrom4([4]byte{10, 96, 0, byte(r.IntN(20))})
}

func randomPorts(r *rand.Rand) (out []model.Port) {
	for n := 1 + r.IntN(3); n > 0; n-- {
		out = append(out, model.Port{Number: pick(r, portPool), Class: model.Class(r.IntN(20) % 4), App: model.AppCodec(r.IntN(2))})
	}
	return out
}

// RandomMesh is a mesh in which most things are valid and some are not:
// missing, contradicting, twice, or of no use.
func RandomMesh(r *rand.Rand) *model.Mesh {
	m := &model.Mesh{Domain: model.DefaultDomain, TrustDomain: "td", Node: "n1"}
	if r.IntN(2) == 0 {
		m.Region, m.Zone = "r1", pick(r, []string{"", "z1"})
	}
	for n := r.IntN(7); n > 0; n-- {
		s := model.Service{Name: serviceName(r), Generated: r.IntN(2) == 0}
		for k := r.IntN(3); k > 0; k-- {
			s.ClusterIPs = append(s.ClusterIPs, clusterIP(r))
		}
		for k := r.IntN(4); k > 0; k-- {
			p := model.ServicePort{Number: pick(r, portPool), Target: pick(r, portPool), UDP: r.IntN(8) == 0, Class: model.Class(r.IntN(4))}
			if s.Generated {
				p.Target = p.Number
			} else if r.IntN(6) == 0 {
				p.Target, p.TargetName = 0, "http"
			}
			s.Ports = append(s.Ports, p)
		}
		m.Services = append(m.Services, s)
	}
	for n := r.IntN(16); n > 0; n-- {
		s := serviceName(r)
		m.Endpoints = append(m.Endpoints, model.Endpoint{
			Service: s, IP: netip.AddrFrom4([4]byte{10, 244, 0, byte(1 + r.IntN(60))}), Pod: s.Name + "-" + strconv.Itoa(r.IntN(4)), Node: "n2",
			DefaultPort: pick(r, portPool), Ports: randomPorts(r), Weight: uint32(r.IntN(3)), Health: model.Health(r.IntN(4)),
			SPIFFEID: pick(r, []string{"spiffe://td/ns/shop/sa/cart", "spiffe://td/x", ""}), Region: pick(r, []string{"", "r1", "r2"}), Zone: pick(r, []string{"", "z1", "z2"}),
			Metadata: randomMetadata(r),
		})
	}
	for n := r.IntN(5); n > 0; n-- {
		s := serviceName(r)
		m.Workloads = append(m.Workloads, model.Workload{
			Namespace: s.Namespace, Account: s.Name, Name: s.Name + "-0", ContainerID: "c" + strconv.Itoa(r.IntN(8)), SPIFFEID: "spiffe://td/x",
			IPs: []netip.Addr{clusterIP(r)}, Ports: randomPorts(r), Capture: model.Capture{RedirectAll: r.IntN(2) == 0},
		})
	}
	for n := r.IntN(6); n > 0; n-- {
		m.Routes = append(m.Routes, randomRoute(r))
	}
	for n := r.IntN(5); n > 0; n-- {
		m.Filters = append(m.Filters, randomHTTPFilter(r))
	}
	for n := r.IntN(3); n > 0; n-- {
		m.Catalog = append(m.Catalog, serviceName(r))
	}
	for n := r.IntN(3); n > 0; n-- {
		kept := model.Retained{Service: serviceName(r)}
		for k := r.IntN(3); k > 0; k-- {
			kept.Ports = append(kept.Ports, pick(r, portPool))
		}
		m.Retained = append(m.Retained, kept)
	}
	ways := r.IntN(4)
	m.Semantics, m.SameNode = model.Semantics(ways&1), model.SameNode(ways>>1)
	randomSockets(m)
	return m
}

// randomSockets draws by the mesh itself, so that what else a seed gives stays as it was.
func randomSockets(m *model.Mesh) {
	r := rand.New(rand.NewPCG(uint64(len(m.Endpoints)*64+len(m.Routes)*8+len(m.Filters)), uint64(len(m.Services)*8+len(m.Workloads))))
	for i := range m.Workloads {
		w := &m.Workloads[i]
		if w.UID = "uid-" + strconv.Itoa(i); r.IntN(4) == 0 {
			w.UID = pick(r, uids)
		}
		if r.IntN(2) == 0 {
			w.UDSSocket = pick(r, sockets)
		}
		w.Volumes = pick(r, volumes)
	}
	for n := r.IntN(4); n > 0; n-- {
		s := serviceName(r)
		if len(m.Workloads) > 0 {
			w := &m.Workloads[r.IntN(len(m.Workloads))]
			s = w.Service()
		}
		m.Policies = append(m.Policies, model.EndpointPolicy{Namespace: s.Namespace, Name: "p" + strconv.Itoa(n), Service: s, UDSSocket: pick(r, sockets[1:])})
	}
}

// LivelyMesh is a mesh in which most things work: every service of the pools has
// a Service and healthy pods on 8080 and 9090 (HTTP) and 9000 (TCP), and routes
// and filters mean something to them. In RandomMesh hardly any request gets as
// far as a route.
func LivelyMesh(r *rand.Rand) *model.Mesh {
	m := RandomMesh(r)
	m.Services, m.Endpoints, m.Catalog, m.Retained = nil, nil, nil, nil
	ports := []model.Port{{Number: 8080, Class: model.HTTP}, {Number: 9000, Class: model.TCP}, {Number: 9090, Class: model.HTTP}}
	i := byte(0)
	for _, ns := range namespaces {
		for _, account := range accounts {
			i++
			s := model.ServiceName{Namespace: ns, Name: account}
			m.Services = append(m.Services, model.Service{Name: s, Generated: true, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, i})}})
			for k := range byte(1 + r.IntN(2)) {
				m.Endpoints = append(m.Endpoints, model.Endpoint{
					Service: s, IP: netip.AddrFrom4([4]byte{10, 244, k, i}), Pod: account + "-" + strconv.Itoa(int(k)), Node: "n2", DefaultPort: 8080, Ports: ports,
					Weight: model.DefaultWeight, Health: model.Healthy, SPIFFEID: "spiffe://td/ns/" + ns + "/sa/" + account, Metadata: randomMetadata(r),
				})
			}
		}
	}
	for i := range m.Workloads {
		m.Workloads[i].ContainerID, m.Workloads[i].Ports = "c"+strconv.Itoa(i), ports
	}
	backend := func(ref *model.BackendRef, kind model.RouteKind) {
		if ref.Port = 8080; kind == model.TCPRoute || kind == model.TLSRoute {
			ref.Port = 9000
		}
		if r.IntN(10) > 0 {
			ref.Weight, ref.Invalid = 1, ""
		}
	}
	for i := range m.Routes {
		x := &m.Routes[i]
		x.Name = "r" + strconv.Itoa(i) // no twins
		x.Parents = []model.ParentRef{{Service: serviceName(r), Port: pick(r, []uint16{0, 0, 0, 8080})}}
		if r.IntN(3) > 0 {
			x.Namespace = x.Parents[0].Service.Namespace
		}
		for j := range x.Rules {
			rule := &x.Rules[j]
			if r.IntN(10) > 0 {
				rule.Invalid = ""
			}
			keep := rule.Filters[:0]
			for _, f := range rule.Filters {
				switch {
				case f.Kind == 0, f.Kind == model.Redirect && r.IntN(4) > 0, f.Kind == model.CORS, f.Kind == model.Rewrite:
					continue
				case f.Kind == model.Extension && len(m.Filters) > 0 && r.IntN(8) > 0:
					g := &m.Filters[r.IntN(len(m.Filters))]
					g.Namespace, g.Scope, f.Extension = x.Namespace, model.ScopeRoute, g.Name
				case f.Kind == model.RequestHeaders || f.Kind == model.ResponseHeaders:
					f.Set[0].Name = "x-b"
				}
				keep = append(keep, f)
			}
			rule.Filters = keep
			for k := range rule.Backends {
				backend(&rule.Backends[k], x.Kind)
				rule.Backends[k].Filters = nil
			}
			for k := range rule.Matches {
				if y := &rule.Matches[k]; y.PathKind == model.PathExact || y.PathKind == model.PathPrefix {
					y.Path = pick(r, []string{"/", "/a", "/a/b", "/ab"})
				}
			}
		}
	}
	for i := range m.Filters {
		f := &m.Filters[i]
		if r.IntN(10) > 0 {
			f.Name, f.Invalid = f.Name+"-"+strconv.Itoa(i), ""
			for j := range m.Routes { // those that meant it still do
				for k := range m.Routes[j].Rules {
					for l := range m.Routes[j].Rules[k].Filters {
						if g := &m.Routes[j].Rules[k].Filters[l]; g.Extension == f.Name[:2] && m.Routes[j].Namespace == f.Namespace {
							g.Extension = f.Name
						}
					}
				}
			}
		}
		if f.RBAC != nil { // nobody is verified at the source, so that to allow is to refuse all
			f.RBAC.Deny = f.RBAC.Deny || r.IntN(4) > 0
		}
		for j := range f.Targets {
			f.Targets[j].Namespace = f.Namespace
		}
	}
	return m
}

func randomMetadata(r *rand.Rand) map[string]string {
	if r.IntN(2) == 0 {
		return nil
	}
	out := map[string]string{}
	for n := r.IntN(4); n > 0; n-- {
		out[pick(r, metadata)] = pick(r, values)
	}
	return out
}

func randomRoute(r *rand.Rand) model.Route {
	out := model.Route{
		Kind: pick(r, []model.RouteKind{model.HTTPRoute, model.HTTPRoute, model.HTTPRoute, model.GRPCRoute, model.TCPRoute, model.TLSRoute}), Namespace: pick(r, namespaces),
		Name: "r" + strconv.Itoa(r.IntN(6)), Created: time.Unix(int64(r.IntN(3)), 0),
	}
	if r.IntN(40) == 0 {
		out.Kind = 0
	}
	for n := r.IntN(3); n > 0; n-- {
		out.Parents = append(out.Parents, model.ParentRef{Service: serviceName(r), Port: pick(r, []uint16{0, 0, 80, 8080, 9000})})
	}
	if out.Kind == model.TLSRoute {
		for n := 1 + r.IntN(2); n > 0; n-- {
			out.ServerNames = append(out.ServerNames, pick(r, servers))
		}
	}
	for n := r.IntN(4); n > 0; n-- {
		out.Rules = append(out.Rules, randomRule(r, out.Kind))
	}
	return out
}

func randomRule(r *rand.Rand, kind model.RouteKind) (rule model.Rule) {
	http := kind == model.HTTPRoute || kind == model.GRPCRoute
	for k := r.IntN(3); k > 0 && http; k-- {
		rule.Matches = append(rule.Matches, randomMatch(r, kind))
	}
	if r.IntN(3) == 0 && http {
		for k := 1 + r.IntN(2); k > 0; k-- {
			rule.Filters = append(rule.Filters, randomFilter(r))
		}
	}
	for k := r.IntN(3); k > 0; k-- {
		ref := randomBackend(r)
		if r.IntN(6) == 0 && http {
			ref.Filters = append(ref.Filters, randomFilter(r))
		}
		rule.Backends = append(rule.Backends, ref)
	}
	if r.IntN(4) == 0 && http {
		rule.Timeouts = model.Timeouts{Request: time.Second, Backend: time.Duration(r.IntN(3)) * time.Second}
		rule.Retry = &model.Retry{Codes: []uint16{503}, Attempts: uint8(r.IntN(3))}
	}
	if r.IntN(12) == 0 {
		rule.Invalid = "not served"
	}
	return rule
}

func randomBackend(r *rand.Rand) model.BackendRef {
	ref := model.BackendRef{Service: serviceName(r), Port: pick(r, portPool), Weight: uint32(r.IntN(3))}
	if r.IntN(8) == 0 {
		ref.Invalid = "RefNotPermitted"
	}
	ref.Ungranted = r.IntN(3) == 0
	return ref
}

func randomValue(r *rand.Rand, name string) model.ValueMatch {
	if r.IntN(4) == 0 {
		return model.ValueMatch{Name: name, Value: pick(r, regexes), Regex: true}
	}
	return model.ValueMatch{Name: name, Value: pick(r, values)}
}

func randomMatch(r *rand.Rand, kind model.RouteKind) (m model.Match) {
	if kind == model.GRPCRoute {
		if r.IntN(4) > 0 {
			m.GRPC = &model.GRPCMatch{Service: pick(r, []string{"", "s", "s.T", "a"}), Method: pick(r, []string{"", "m", "b"})}
			if r.IntN(4) == 0 {
				m.GRPC = &model.GRPCMatch{Service: pick(r, regexes), Method: pick(r, []string{"", "m|b"}), Regex: true}
			}
		}
	} else {
		m = model.Match{PathKind: model.PathKind(r.IntN(4)), Path: pick(r, paths)}
		if m.Path[:min(1, len(m.Path))] != "/" && r.IntN(8) > 0 { // such a match refuses what all others would have
			m.Path = "/b"
		}
		if m.PathKind == model.PathRegex {
			m.Path = pick(r, regexes)
		}
		if r.IntN(3) == 0 {
			m.Method = pick(r, methods)
		}
		for q := r.IntN(5) - 3; q > 0; q-- {
			m.Query = append(m.Query, randomValue(r, pick(r, []string{"x", "y"})))
		}
	}
	for h := r.IntN(3); h > 0; h-- {
		m.Headers = append(m.Headers, randomValue(r, pick(r, fields)))
	}
	return m
}

func randomFilter(r *rand.Rand) model.Filter {
	f := model.Filter{Kind: model.FilterKind(r.IntN(8))}
	edit := model.PathEdit{Kind: model.PathEditKind(r.IntN(3)), Value: pick(r, []string{"/", "/z", "/z/"})}
	switch f.Kind {
	case model.RequestHeaders, model.ResponseHeaders:
		f.Set = []model.HeaderValue{{Name: pick(r, []string{"x-a", "x-b", "host", "beta"}), Value: pick(r, values)}}
		f.Remove = []string{pick(r, []string{"x-a", "version"})}
	case model.Redirect:
		f.Redirect = &model.RedirectFilter{Scheme: pick(r, []string{"", "https"}), Host: pick(r, []string{"", "other.example"}), Port: pick(r, []uint16{0, 443, 8443}), Path: edit, Status: pick(r, []int{301, 302, 200})}
	case model.Rewrite:
		f.Rewrite = &model.RewriteFilter{Host: pick(r, []string{"", "other.example"}), Path: edit}
	case model.Mirror:
		f.Mirror = &model.MirrorFilter{Backend: randomBackend(r), Numerator: 1, Denominator: uint32(r.IntN(3))}
	case model.CORS:
		f.CORS = &model.CORSFilter{Origins: []string{pick(r, []string{"*", "https://a.example", "http://*.example", "rubbish"})}, Credentials: r.IntN(2) == 0, Methods: []string{pick(r, []string{"*", "GET"})}, Headers: []string{"x-a"}, MaxAge: time.Minute}
	case model.Extension:
		f.Extension = pick(r, filters)
	}
	return f
}

func randomHTTPFilter(r *rand.Rand) model.HTTPFilter {
	f := model.HTTPFilter{Namespace: pick(r, namespaces), Name: pick(r, filters), Scope: model.Scope(1 + r.IntN(3))}
	for n := r.IntN(3); n > 0; n-- {
		f.Targets = append(f.Targets, model.ServiceName{Namespace: f.Namespace, Name: pick(r, accounts)})
	}
	if r.IntN(10) == 0 {
		f.Invalid = "not served"
	}
	switch r.IntN(5) {
	case 0, 1:
		f.RBAC = &model.RBAC{Audit: r.IntN(4) == 0, Deny: r.IntN(2) == 0}
		for n := r.IntN(3); n > 0; n-- {
			p := model.Policy{Name: "p", Principals: []model.Principal{{SPIFFEID: pick(r, identities)}}}
			if r.IntN(2) == 0 {
				p.Principals = append(p.Principals, model.Principal{Namespace: pick(r, namespaces)})
			}
			switch r.IntN(3) {
			case 0:
				p.Permissions = append(p.Permissions, model.Permission{PathPrefix: pick(r, []string{"/", "/a", "/a/b"})})
			case 1:
				p.Permissions = append(p.Permissions, model.Permission{Method: pick(r, methods)})
			}
			f.RBAC.Policies = append(f.RBAC.Policies, p)
		}
	case 2:
		f.ExtAuthz = &model.ExtAuthz{Disabled: r.IntN(3) == 0, NoBody: r.IntN(2) == 0}
	case 3:
		f.HeaderToMetadata = []model.HeaderToMetadata{{Header: pick(r, []string{"x-a", "beta"}), Key: pick(r, metadata), Namespace: pick(r, []string{"envoy.lb", "other"})}}
	case 4:
		f.Mutation = &model.Mutation{
			Request:  []model.MutationOp{{Kind: model.MutationKind(r.IntN(5)), Name: pick(r, []string{"x-a", "beta", "host"}), Value: pick(r, values)}},
			Query:    []model.MutationOp{{Kind: model.MutationKind(r.IntN(5)), Name: pick(r, []string{"x", "y"}), Value: pick(r, values)}},
			Response: []model.MutationOp{{Kind: model.MutationKind(r.IntN(5)), Name: "x-b", Value: pick(r, values)}},
		}
	}
	return f
}

// RandomHost is an authority: mostly names of the pools, some of them spoiled.
func RandomHost(r *rand.Rand) string {
	n := serviceName(r)
	host := pick(r, []string{
		n.Name, n.Name + "." + n.Namespace, n.Name + "." + n.Namespace + ".svc", n.Name + "." + n.Namespace + ".svc.cluster.local",
		n.Name + "." + n.Namespace + "." + model.DefaultDomain, "CART.Shop.aether.internal", "x." + n.Name + "." + n.Namespace, "example.com", "", "[fd00::1]",
	})
	host += pick(r, []string{"", "", "", "."})
	if r.IntN(2) == 0 {
		host += ":" + pick(r, []string{"80", "8080", "9090", "9000", "18081", "18082", "0", "080", "x", "8080:8080"})
	}
	return host
}

// RandomFlow is a connection in any direction and state.
func RandomFlow(r *rand.Rand) model.Flow {
	n := serviceName(r)
	f := model.Flow{
		Namespace: n.Namespace, Workload: n.Name, Dir: model.Direction(1 + r.IntN(3)),
		Dst: model.OrigDst{AddrPort: netip.AddrPortFrom(clusterIP(r), pick(r, append(portPool, model.PortCapture)))}, Sniff: model.Sniff(r.IntN(8)),
	}
	switch f.Dir {
	case model.Proxy:
		f.Dst = model.OrigDst{}
	case model.Inbound:
		f.Dst = model.OrigDst{AddrPort: netip.AddrPortFrom(netip.Addr{}, f.Dst.Port())}
	}
	if r.IntN(10) == 0 {
		f.Namespace = ""
	}
	if r.IntN(3) == 0 {
		f.Container = "c" + strconv.Itoa(r.IntN(8))
	}
	switch {
	case f.Sniff == model.SniffTLS:
		f.Host = pick(r, []string{"db.example", "a.db.example", "x.example", "", "DB.example"})
	case r.IntN(3) > 0:
		f.Host = RandomHost(r)
	}
	if f.Dir == model.Inbound && r.IntN(2) == 0 {
		f.Peer = pick(r, identities)
	}
	f.Waited = f.Dir == model.Captured && r.IntN(3) == 0
	return f
}

// RandomRequest is a request head.
func RandomRequest(r *rand.Rand) httpmsg.Head {
	h := httpmsg.Head{Method: []byte(pick(r, methods)), Scheme: []byte("http"), Authority: []byte(RandomHost(r)), Path: []byte(pick(r, paths)), Minor: 1}
	if r.IntN(4) == 0 {
		h.Path = []byte(pick(r, spellings))
	}
	if r.IntN(5) == 0 && len(h.Path) > 1 {
		h.Path = append(h.Path, pick(r, []string{"?x=1", "?x=2&y=%31", "?y", "?x=1;y=2"})...)
	}
	add := func(name, value string) {
		h.Fields = append(h.Fields, httpmsg.Field{Name: []byte(name), Value: []byte(value)})
	}
	for n := r.IntN(3); n > 0; n-- {
		add(pick(r, []string{"version", "beta", "x-a"}), pick(r, values))
	}
	if r.IntN(6) == 0 {
		add("origin", pick(r, []string{"https://a.example", "http://b.example:80", "null"}))
		if r.IntN(2) == 0 {
			add("access-control-request-method", "GET")
		}
	}
	for n := r.IntN(6) - 3; n > 0; n-- {
		switch r.IntN(4) {
		case 0:
			add("x-aether-ip", pick(r, []string{"10.244.0.1", "10.244.0.2", "x", ""}))
		case 1:
			add("x-aether-pod", pick(r, accounts)+"-"+strconv.Itoa(r.IntN(4)))
		default:
			add("x-aether-subset-"+pick(r, metadata), pick(r, values))
		}
	}
	if r.IntN(8) == 0 {
		h.Upgrade = []byte("websocket")
	}
	return h
}
