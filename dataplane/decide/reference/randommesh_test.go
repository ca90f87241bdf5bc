package reference_test

import (
	"cmp"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
)

// The alphabets are as small as they can be, so that what is drawn meets: the
// same few names in every namespace, ports of every class at one number, paths
// that are prefixes, spellings and relatives of one another.
var (
	genNamespaces = []string{"a", "b", "svc"}
	genAccounts   = []string{"x", "y", "z"}
	genPorts      = []uint16{80, 80, 8080, 8080, 9000, 443}
	genOddPorts   = []uint16{18081, 18082, 1, 65535}
	genPaths      = []string{"/", "/p", "/p/", "/p/q", "/p/q/r", "/pq", "/s/m", "/P", "/s.T/m"}
	genSpellings  = []string{
		"//p", "/p//q", "/./p", "/p/.", "/p/..", "/z/../p", "/p/q/..", "/%70", "/%2570", "/%252570", "/%25252570", "/%2525252570", "/p%2fq", "/p%5cq", `/\p`, `/p\q`, "/p;v=1", "/;p", "/p;v/q",
		"/p/%2e%2e/p", "/%2e/p", "/..", "/../p", "/p%", "/p%zz", "/p%2", "/p/..;/q", "/p%3bv", "/.p", "/p/...", "/s%2fm", "//", "/%2f", "/p%3fq",
	}
	genMethods  = []string{"GET", "GET", "POST", "OPTIONS"}
	genFields   = []string{"x-a", "x-b", "version"}
	genValues   = []string{"1", "2", "1,2", "1, 2", ""}
	genPatterns = []string{"/p.*", "/p(/q)?", ".*", "[12]", "1|2", "s.*", "m", "/p/q", "1(,2)?"}
	genRefused  = []string{"(", strings.Repeat("p", 1025), ".{1000}.{1000}.{1000}.{1000}.{1000}"}
	genKeys     = []string{"tier", "lane", "k1", "k2", "k3", "ip", "Bad"}
	genFilters  = []string{"f", "g", "h", "i"}
	genServers  = []string{"db.test", "*.test", "*.db.test", "a.db.test", "*.b.test"}
	genHellos   = []string{"db.test", "DB.test", "a.db.test", "b.a.db.test", "x.test", "test", ".test", "", "a.b.test"}
	genPeers    = []string{"spiffe://td/ns/a/sa/x", "spiffe://td/ns/b/sa/x", "spiffe://other/ns/a/sa/y", "spiffe://td/ns/a/sa/", "spiffe://td/other", ""}
	genOrigins  = []string{"https://app.test", "https://app.test:443", "HTTPS://App.Test", "http://app.test", "http://app.test:80", "https://x.app.test", "https://x.app.test:8443", "null"}
	genAllowed  = []string{"*", "https://app.test", "https://*.app.test", "https://*.app.test:8443", "http://app.test:80", "https://App.test"}
)

type gen struct{ *rand.Rand }

func one[T any](g gen, of []T) T { return of[g.IntN(len(of))] }

// in is true once in n.
func (g gen) in(n int) bool { return g.IntN(n) == 0 }

func (g gen) name() model.ServiceName {
	ns := one(g, genNamespaces[:2])
	if g.in(12) {
		ns = genNamespaces[2]
	}
	return model.ServiceName{Namespace: ns, Name: one(g, genAccounts)}
}

func (g gen) port() uint16 {
	if g.in(25) {
		return one(g, genOddPorts)
	}
	return one(g, genPorts)
}

func (g gen) clusterIP() netip.Addr {
	if g.in(5) {
		return netip.MustParseAddr("fd00::" + strconv.Itoa(1+g.IntN(9)))
	}
	return netip.AddrFrom4([4]byte{10, 96, 0, byte(1 + g.IntN(12))})
}

// class is HTTP more often than not.
func (g gen) class() model.Class {
	return one(g, []model.Class{model.HTTP, model.HTTP, model.HTTP, model.HTTP, model.HTTP, model.TCP, model.TCP, model.UDP})
}

// mesh is a small mesh in which most objects are whole, some contradict each
// other, and some are wrong.
func (g gen) mesh() *model.Mesh {
	m := &model.Mesh{Domain: model.DefaultDomain, TrustDomain: "td", Node: "n1"}
	if g.in(20) {
		m.Domain = one(g, []string{"svc.cluster.local", "svc", "Mesh.Test"})
	}
	if g.in(2) {
		m.Region, m.Zone = "r1", one(g, []string{"", "z1"})
	}
	if g.in(2) {
		m.Semantics = model.GatewayAPI
	}
	var names []model.ServiceName
	for n := 2 + g.IntN(4); n > 0; n-- {
		if s := g.name(); !slices.Contains(names, s) {
			names = append(names, s)
		}
	}
	for i, n := range names {
		ports := g.ports()
		if !g.in(5) {
			m.Services = append(m.Services, g.service(n, ports, i))
		}
		if g.in(60) {
			m.Services = append(m.Services, g.service(n, ports, i)) // of one name, perhaps of one address
		}
		if !g.in(7) {
			g.endpoints(m, n, ports)
		}
		if g.in(2) {
			m.Workloads = append(m.Workloads, g.workload(n, ports, len(m.Workloads)))
		}
	}
	for n := g.IntN(5); n > 0; n-- {
		m.Filters = append(m.Filters, g.httpFilter(names, len(m.Filters)))
	}
	for n := g.IntN(7); n > 0; n-- {
		r := g.route(m, names)
		if slices.ContainsFunc(m.Routes, func(o model.Route) bool { return o.Kind == r.Kind && o.Namespace == r.Namespace && o.Name == r.Name }) {
			// Both are refused. Of one age too, nothing would say which of the two a request picks.
			r.Created = time.Unix(int64(10+len(m.Routes)), 0).UTC()
		}
		m.Routes = append(m.Routes, r)
	}
	for n := g.IntN(3); n > 0; n-- {
		s := one(g, names)
		m.Policies = append(m.Policies, model.EndpointPolicy{Namespace: s.Namespace, Name: "p" + strconv.Itoa(g.IntN(1000)), Service: s, UDSSocket: g.socket()})
	}
	for g.in(4) {
		m.Catalog = append(m.Catalog, one(g, names))
	}
	for g.in(5) {
		r := model.Retained{Service: one(g, names)}
		for n := g.IntN(3); n > 0; n-- {
			r.Ports = append(r.Ports, g.port())
		}
		m.Retained = append(m.Retained, r)
	}
	g.Shuffle(len(m.Services), func(i, j int) { m.Services[i], m.Services[j] = m.Services[j], m.Services[i] })
	g.Shuffle(len(m.Endpoints), func(i, j int) { m.Endpoints[i], m.Endpoints[j] = m.Endpoints[j], m.Endpoints[i] })
	return m
}

// ports that the pods of a service declare, by and large.
func (g gen) ports() (out []model.Port) {
	for n := 2 + g.IntN(3); n > 0; n-- {
		p := model.Port{Number: g.port(), Class: g.class(), App: model.AppCodec(g.IntN(2))}
		if i := indexPort(out, p.Number); i < 0 || g.in(60) {
			out = append(out, p)
		}
	}
	return out
}

func indexPort(of []model.Port, n uint16) int {
	for i, p := range of {
		if p.Number == n {
			return i
		}
	}
	return -1
}

// varied is the ports of one pod: those of its service, now and then another class.
func (g gen) varied(ports []model.Port) (out []model.Port) {
	for _, p := range ports {
		if g.in(10) {
			p.Class = g.class()
		}
		if g.in(100) {
			p.Class = model.ClassNone
		}
		if len(ports) == 1 || !g.in(10) {
			out = append(out, p)
		}
	}
	return out
}

func (g gen) service(n model.ServiceName, ports []model.Port, i int) model.Service {
	s := model.Service{Name: n, Generated: g.IntN(5) < 3}
	s.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(1 + i)})}
	if g.in(40) {
		s.ClusterIPs[0] = g.clusterIP()
	}
	if g.in(4) {
		s.ClusterIPs = append(s.ClusterIPs, netip.MustParseAddr("fd00::"+strconv.Itoa(1+i)))
	}
	if g.in(20) {
		s.ClusterIPs = nil
	}
	for _, p := range ports {
		if g.in(8) {
			continue
		}
		sp := model.ServicePort{Number: p.Number, Target: p.Number, UDP: p.Class == model.UDP, Class: p.Class}
		switch {
		case s.Generated && g.in(10):
			sp.Class = model.ClassNone
		case s.Generated:
		case g.in(2):
			sp.Number = g.port()
		case g.in(4):
			sp.Target, sp.TargetName = 0, "web"
		case g.in(4):
			sp.TargetName = "web" // resolved
		case g.in(6):
			sp.UDP = !sp.UDP
		}
		if !s.Generated {
			sp.Class = model.ClassNone
		}
		s.Ports = append(s.Ports, sp)
	}
	if s.Generated && g.in(4) {
		s.Ports = append(s.Ports, model.ServicePort{Name: "mesh", Number: model.PortProxy, Target: model.PortProxy}, model.ServicePort{Name: "mesh-tcp", Number: model.PortRaw, Target: model.PortRaw})
	}
	return s
}

func (g gen) endpoints(m *model.Mesh, n model.ServiceName, ports []model.Port) {
	for k := 1 + g.IntN(3); k > 0; k-- {
		id := len(m.Endpoints) + 1
		e := model.Endpoint{
			Service: n, IP: netip.AddrFrom4([4]byte{10, 244, 0, byte(id)}), Pod: n.Name + "-" + strconv.Itoa(id), Node: "n2", Cluster: "local",
			DefaultPort: one(g, genPorts), Ports: g.varied(ports), Weight: 1024, Health: one(g, []model.Health{0, 1, 1, 1, 1, 1, 2, 3}),
			SPIFFEID: "spiffe://td/ns/" + n.Namespace + "/sa/" + n.Name, Region: one(g, []string{"r1", "r1", "r2", ""}), Zone: one(g, []string{"z1", "z2", ""}),
		}
		if len(e.Ports) > 0 && !g.in(3) {
			e.DefaultPort = one(g, e.Ports).Number
		}
		if g.in(6) {
			e.Weight = uint32(g.IntN(2))
		}
		keys := g.IntN(6) - 2
		if g.in(4) {
			keys = 12 // most there are: more than combine
		}
		for q := keys; q > 0; q-- {
			if e.Metadata == nil {
				e.Metadata = map[string]string{}
			}
			e.Metadata[one(g, genKeys)] = one(g, genValues)
		}
		if g.in(40) {
			e.SPIFFEID = one(g, []string{"", "x", "http://td/x", "spiffe://td/a//b", "spiffe://TD/x", "spiffe://td/a/", "spiffe://td/../x"})
		}
		switch g.IntN(60) {
		case 0:
			e.IP = netip.MustParseAddr("fd00::f:" + strconv.Itoa(id))
		case 1:
			e.IP = netip.AddrFrom16(e.IP.As16())
		case 2:
			e.IP = netip.Addr{}
		case 3:
			e.Service.Name = one(g, []string{"X", "x.y", "-x", strings.Repeat("x", 64)})
		}
		m.Endpoints = append(m.Endpoints, e)
		if g.in(15) { // the same pod again: once a class (contract 9.4), a rival, or a change half done
			if g.in(2) {
				e.Health = model.Health(g.IntN(4))
			}
			if g.in(4) {
				e.Pod += "b"
			}
			if g.in(4) {
				e.Ports = g.varied(ports)
			}
			m.Endpoints = append(m.Endpoints, e)
		}
	}
}

func (g gen) workload(n model.ServiceName, ports []model.Port, id int) model.Workload {
	w := model.Workload{
		Namespace: n.Namespace, Account: n.Name, Name: n.Name + "-w", ContainerID: "c" + strconv.Itoa(id), NetNS: "/run/netns/" + strconv.Itoa(id),
		SPIFFEID: "spiffe://td/ns/" + n.Namespace + "/sa/" + n.Name, IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 244, 9, byte(1 + id)})},
		DefaultPort: 8080, Capture: model.Capture{RedirectAll: !g.in(3)},
	}
	for _, p := range ports {
		if indexPort(w.Ports, p.Number) < 0 || g.in(60) {
			w.Ports = append(w.Ports, p)
		}
		if g.in(60) {
			w.Ports[len(w.Ports)-1].Class = g.class()
		}
		if g.in(100) {
			w.Ports[len(w.Ports)-1].Class = model.ClassNone
		}
	}
	if g.in(20) {
		w.ContainerID = "c0"
	}
	if g.in(30) {
		w.SPIFFEID = ""
	}
	w.UID = "uid-" + strconv.Itoa(id)
	if g.in(10) {
		w.UID = one(g, []string{"", "uid-0", "uid-1", "..", "a/b"})
	}
	if g.in(3) {
		w.UDSSocket = g.socket()
	}
	if g.in(2) {
		w.Volumes = one(g, [][]model.Volume{
			{{Name: "app", Driver: "csi.aether.io"}}, {{Name: "tmp"}, {Name: "app", Driver: "csi.aether.io"}}, {{Name: "app", Driver: "csi.aether.io"}}, {},
			{{Name: "app", Driver: "csi.aether.io"}, {Name: "tmp", Driver: "csi.aether.io"}}, {{Name: "app", Driver: "other"}}, {{Name: "tmp"}},
		})
	}
	return w
}

// socket is a Unix socket as an annotation or a policy names one.
func (g gen) socket() string {
	if g.in(3) {
		return one(g, []string{"tmp/a", "app", "app/", "/a", "app/x/y", "../a", "app/.", "app/" + strings.Repeat("f", 100)})
	}
	return one(g, []string{"app/a.sock", "app/b.sock", "app/" + strings.Repeat("f", 85), "app/" + strings.Repeat("f", 86)})
}

// known is a port that a service's pods or Service have with a class, most of the
// time; ClassNone stands for any class.
func (g gen) known(m *model.Mesh, n model.ServiceName, c model.Class) uint16 {
	var of []uint16
	for _, s := range m.Services {
		for _, p := range s.Ports {
			if s.Name == n && (c == model.ClassNone || p.Class == c || p.Class == model.ClassNone) {
				of = append(of, p.Number)
			}
		}
	}
	for _, e := range m.Endpoints {
		for _, p := range e.Ports {
			if e.Service == n && (c == model.ClassNone || p.Class == c) {
				of = append(of, p.Number)
			}
		}
	}
	if len(of) == 0 || g.in(8) {
		return g.port()
	}
	return one(g, of)
}

// classOf is what routes of a kind are about; ClassNone where they are not about one.
func classOf(k model.RouteKind) model.Class {
	switch k {
	case model.TCPRoute:
		return model.TCP
	case model.TLSRoute:
		return model.ClassNone
	}
	return model.HTTP
}

// mostly is c two times of three, and else any class.
func (g gen) mostly(c model.Class) model.Class {
	if g.in(3) {
		return model.ClassNone
	}
	return c
}

func (g gen) route(m *model.Mesh, names []model.ServiceName) model.Route {
	r := model.Route{
		Kind:      one(g, []model.RouteKind{model.HTTPRoute, model.HTTPRoute, model.HTTPRoute, model.HTTPRoute, model.GRPCRoute, model.GRPCRoute, model.TCPRoute, model.TLSRoute}),
		Namespace: one(g, genNamespaces[:2]), Name: one(g, []string{"q", "r", "s", "t"}), Created: time.Unix(int64(g.IntN(3)), 0).UTC(),
	}
	if g.in(6) {
		r.Created = time.Time{}
	}
	for n := 1 + g.IntN(2); n > 0; n-- {
		p := model.ParentRef{Service: one(g, names)}
		if !g.in(4) {
			r.Namespace = p.Service.Namespace
		}
		if g.in(3) {
			p.Port = g.known(m, p.Service, classOf(r.Kind))
		}
		r.Parents = append(r.Parents, p)
	}
	if r.Kind == model.TLSRoute {
		for n := 1 + g.IntN(2); n > 0; n-- {
			r.ServerNames = append(r.ServerNames, one(g, genServers))
		}
		if g.in(20) {
			r.ServerNames = append(r.ServerNames, one(g, []string{"*", "*.", "", "a.*.test", "DB.test", "db.test."}))
		}
	}
	for n := 1 + g.IntN(3); n > 0; n-- {
		r.Rules = append(r.Rules, g.rule(m, names, r.Kind, r.Namespace))
	}
	if g.in(20) {
		r.Rules = nil
	}
	if g.in(150) {
		r.Kind = 0
	}
	return r
}

func (g gen) rule(m *model.Mesh, names []model.ServiceName, kind model.RouteKind, ns string) (rule model.Rule) {
	for n := g.IntN(3); n > 0; n-- {
		rule.Backends = append(rule.Backends, g.backend(m, names, kind))
	}
	if g.in(30) {
		rule.Invalid = "not served"
	}
	if kind == model.TCPRoute || kind == model.TLSRoute {
		if len(rule.Backends) == 0 {
			rule.Backends = append(rule.Backends, g.backend(m, names, kind))
		}
		return rule
	}
	for n := g.IntN(5) / 2; n > 0; n-- {
		rule.Matches = append(rule.Matches, g.match(kind))
	}
	if !g.in(3) {
		for n := 1 + g.IntN(5)/3; n > 0; n-- {
			rule.Filters = append(rule.Filters, g.filter(m, names, kind, ns))
		}
	}
	for i := range rule.Backends {
		if g.in(6) {
			rule.Backends[i].Filters = []model.Filter{g.filter(m, names, kind, ns)}
		}
	}
	if g.in(5) {
		rule.Timeouts = model.Timeouts{Request: time.Duration(g.IntN(3)) * time.Second, Backend: time.Duration(g.IntN(2)) * time.Second}
	}
	switch g.IntN(300) { // too much of something
	case 0:
		for len(rule.Matches) <= 1024 {
			rule.Matches = append(rule.Matches, g.match(kind))
		}
	case 1:
		for len(rule.Filters) <= 32 {
			rule.Filters = append(rule.Filters, model.Filter{Kind: model.Mirror, Mirror: &model.MirrorFilter{Backend: g.backend(m, names, kind), Numerator: 1, Denominator: 1}})
		}
	case 2:
		for len(rule.Backends) <= 64 {
			rule.Backends = append(rule.Backends, g.backend(m, names, kind))
		}
	}
	if g.in(8) {
		rule.Retry = &model.Retry{Codes: []uint16{500, 503}, Attempts: uint8(g.IntN(3)), Backoff: time.Duration(g.IntN(2)) * time.Millisecond}
	}
	if g.in(8) {
		rule.Persistence = &model.Persistence{Name: "s", Header: g.in(2), Lasting: g.in(2), Idle: time.Minute}
	}
	return rule
}

func (g gen) backend(m *model.Mesh, names []model.ServiceName, kind model.RouteKind) model.BackendRef {
	ref := model.BackendRef{Service: one(g, names), Weight: uint32(g.IntN(4))}
	want := classOf(kind)
	if kind == model.TLSRoute {
		want = model.TCP
	}
	ref.Port = g.known(m, ref.Service, want)
	if g.in(3) {
		ref.Weight = 1
	}
	if g.in(15) {
		ref.Service = g.name()
	}
	if g.in(20) {
		ref.Invalid = "RefNotPermitted"
	}
	ref.Ungranted = g.in(4)
	return ref
}

func (g gen) pattern() string {
	if g.in(12) {
		return one(g, genRefused)
	}
	return one(g, genPatterns)
}

func (g gen) valueMatch(name string) model.ValueMatch {
	if g.in(4) {
		return model.ValueMatch{Name: name, Value: g.pattern(), Regex: true}
	}
	return model.ValueMatch{Name: name, Value: one(g, genValues)}
}

func (g gen) match(kind model.RouteKind) (m model.Match) {
	for n := g.IntN(5) - 2; n > 0; n-- {
		m.Headers = append(m.Headers, g.valueMatch(one(g, genFields)))
	}
	if g.in(25) {
		m.Headers = append(m.Headers, model.ValueMatch{Name: "host", Value: one(g, []string{"x.a", "x"})})
	}
	m.Unread = g.in(60)
	if g.in(80) {
		m.Headers = append(m.Headers, model.ValueMatch{Name: "x(y", Value: "1"})
	}
	if kind == model.GRPCRoute {
		if !g.in(5) {
			m.GRPC = &model.GRPCMatch{Service: one(g, []string{"", "s", "p", "s.T"}), Method: one(g, []string{"", "m", "q"})}
			if g.in(4) {
				m.GRPC = &model.GRPCMatch{Service: g.pattern(), Method: one(g, []string{"", "m", "m|q", ".*"}), Regex: true}
			}
		}
		return m
	}
	m.PathKind = one(g, []model.PathKind{model.PathAny, model.PathExact, model.PathPrefix, model.PathPrefix, model.PathRegex})
	if g.in(60) {
		m.PathKind = one(g, []model.PathKind{model.PathUnread, 77})
	}
	switch m.PathKind {
	case model.PathRegex:
		m.Path = g.pattern()
	case model.PathExact, model.PathPrefix:
		m.Path = one(g, genPaths)
		if g.in(30) {
			m.Path = one(g, []string{"p", "", "*", "/p?x=1", "/p?x=1", "/p//", "/p//", "/%70", "/%70"})
		}
	}
	if g.in(4) {
		m.Method = one(g, genMethods)
	}
	for n := g.IntN(6) - 4; n > 0; n-- {
		m.Query = append(m.Query, g.valueMatch(one(g, []string{"x", "y"})))
	}
	return m
}

func (g gen) headerValues() (out []model.HeaderValue) {
	for n := g.IntN(3); n > 0; n-- {
		name := one(g, genFields)
		if g.in(40) {
			name = one(g, []string{"connection", "x-aether-outcome", "x-forwarded-client-cert", ":path", "content-length", "transfer-encoding", "upgrade", "x(y", "", "host", "expect", "te", "trailer", "keep-alive", "proxy-connection"})
		}
		value := one(g, genValues[:4])
		if g.in(150) {
			value = one(g, []string{"a\nb", "a\x00", "a\tb", "\x7f", "\x80"})
		}
		out = append(out, model.HeaderValue{Name: name, Value: value})
	}
	return out
}

func (g gen) pathEdit() model.PathEdit {
	return model.PathEdit{Kind: model.PathEditKind(g.IntN(3)), Value: one(g, []string{"/", "/n", "/n/", "/n/o"})}
}

func (g gen) filter(m *model.Mesh, names []model.ServiceName, kind model.RouteKind, ns string) model.Filter {
	f := model.Filter{Kind: model.FilterKind(1 + g.IntN(7))}
	if kind == model.GRPCRoute && !g.in(12) {
		f.Kind = one(g, []model.FilterKind{model.RequestHeaders, model.ResponseHeaders, model.Mirror, model.Extension})
	}
	switch f.Kind {
	case model.RequestHeaders, model.ResponseHeaders:
		f.Set, f.Add = g.headerValues(), g.headerValues()
		if g.in(2) {
			f.Remove = []string{one(g, genFields)}
		}
	case model.Redirect:
		f.Redirect = &model.RedirectFilter{
			Scheme: one(g, []string{"", "", "http", "https"}), Host: one(g, []string{"", "n.test"}), Port: one(g, []uint16{0, 0, 80, 443, 8080}),
			Path: g.pathEdit(), Status: one(g, []int{301, 302, 303, 307, 308}),
		}
		if g.in(20) {
			f.Redirect.Status = 200
		}
		if g.in(20) {
			f.Redirect.Scheme = "ftp"
		}
	case model.Rewrite:
		f.Rewrite = &model.RewriteFilter{Host: one(g, []string{"", "n.test"}), Path: g.pathEdit()}
	case model.Mirror:
		f.Mirror = &model.MirrorFilter{Backend: g.backend(m, names, kind), Numerator: uint32(g.IntN(3)), Denominator: 2}
	case model.CORS:
		f.CORS = &model.CORSFilter{Credentials: g.in(2), Methods: g.some([]string{"GET", "PUT", "*"}), Headers: g.some([]string{"x-a", "*"}), Expose: g.some([]string{"x-e", "x-f"})}
		for n := 1 + g.IntN(2); n > 0; n-- {
			f.CORS.Origins = append(f.CORS.Origins, one(g, genAllowed))
		}
		if g.in(25) {
			f.CORS.Origins = append(f.CORS.Origins, "app.test")
		}
		f.CORS.MaxAge = time.Duration(g.IntN(2)) * time.Minute
	case model.Extension:
		f.Extension = one(g, genFilters)
		for _, x := range m.Filters {
			if x.Namespace == ns && x.Scope == model.ScopeRoute && !g.in(6) {
				f.Extension = x.Name
			}
		}
	}
	return f
}

func (g gen) some(of []string) (out []string) {
	for _, s := range of {
		if g.in(2) {
			out = append(out, s)
		}
	}
	return out
}

func (g gen) httpFilter(names []model.ServiceName, i int) model.HTTPFilter {
	target := one(g, names)
	f := model.HTTPFilter{Namespace: target.Namespace, Name: genFilters[i], Scope: model.Scope(1 + g.IntN(3)), Targets: []model.ServiceName{target}}
	if g.in(15) {
		f.Name = one(g, genFilters)
	}
	if f.Scope == model.ScopeRoute && g.in(2) {
		f.Targets = nil
	}
	if g.in(4) {
		f.Targets = append(f.Targets, model.ServiceName{Namespace: f.Namespace, Name: one(g, genAccounts)})
	}
	if g.in(25) {
		f.Targets = append(f.Targets, one(g, names)) // perhaps of another namespace, which is none of its business
	}
	kind := g.IntN(4)
	if f.Scope == model.ScopeInbound && !g.in(8) {
		kind = g.IntN(2)
	}
	switch kind {
	case 0:
		f.RBAC = g.rbac()
	case 1:
		f.ExtAuthz = &model.ExtAuthz{Disabled: g.in(3), NoBody: g.in(2)}
	case 2:
		f.HeaderToMetadata = []model.HeaderToMetadata{{Header: one(g, genFields), Key: one(g, genKeys), Namespace: one(g, []string{"envoy.lb", "envoy.lb", "other"})}}
	case 3:
		f.Mutation = &model.Mutation{Request: g.ops(genFields), Query: g.ops([]string{"x", "y"}), Response: g.ops(genFields)}
	}
	if g.in(30) {
		g.spoil(&f)
	}
	if g.in(20) {
		f = model.HTTPFilter{Namespace: f.Namespace, Name: f.Name, Scope: f.Scope, Targets: f.Targets, Invalid: "not served"}
	}
	return f
}

// spoil makes a filter one that cannot be honoured.
func (g gen) spoil(f *model.HTTPFilter) {
	switch g.IntN(6) {
	case 0: // not exactly one of what a filter can be
		f.RBAC, f.ExtAuthz = &model.RBAC{}, &model.ExtAuthz{}
	case 1:
		f.RBAC, f.ExtAuthz, f.HeaderToMetadata, f.Mutation = nil, nil, nil, nil
	case 2:
		f.RBAC, f.ExtAuthz, f.HeaderToMetadata, f.Mutation = &model.RBAC{Policies: []model.Policy{{Name: "nobody"}}}, nil, nil, nil
	case 3:
		f.RBAC, f.ExtAuthz, f.HeaderToMetadata, f.Mutation = &model.RBAC{Policies: []model.Policy{{Name: "both", Principals: []model.Principal{{SPIFFEID: genPeers[0], Namespace: "a"}}}}}, nil, nil, nil
	case 4:
		f.RBAC, f.ExtAuthz, f.HeaderToMetadata, f.Mutation = &model.RBAC{Policies: []model.Policy{{Name: "nothing", Principals: []model.Principal{{Namespace: "a"}}, Permissions: []model.Permission{{}}}}}, nil, nil, nil
	case 5:
		f.RBAC, f.ExtAuthz, f.HeaderToMetadata, f.Mutation = nil, nil, nil, &model.Mutation{Request: []model.MutationOp{{Kind: model.OverwriteIfExistsOrAdd, Name: "x-aether-outcome", Value: "1"}}}
	}
}

func (g gen) rbac() *model.RBAC {
	r := &model.RBAC{Audit: g.in(6), Deny: g.in(2)}
	for n := g.IntN(3); n > 0; n-- {
		p := model.Policy{Name: "p"}
		for k := 1 + g.IntN(2); k > 0; k-- {
			if g.in(2) {
				p.Principals = append(p.Principals, model.Principal{SPIFFEID: one(g, genPeers[:4])})
			} else {
				p.Principals = append(p.Principals, model.Principal{Namespace: one(g, genNamespaces)})
			}
		}
		for k := g.IntN(3); k > 0; k-- {
			if g.in(3) {
				p.Permissions = append(p.Permissions, model.Permission{Method: one(g, genMethods)})
			} else {
				p.Permissions = append(p.Permissions, model.Permission{PathPrefix: one(g, genPaths)})
			}
		}
		r.Policies = append(r.Policies, p)
	}
	return r
}

func (g gen) ops(names []string) (out []model.MutationOp) {
	for n := g.IntN(3); n > 0; n-- {
		op := model.MutationOp{Kind: model.MutationKind(g.IntN(5)), Name: one(g, names), Value: one(g, genValues[:4])}
		if op.Kind == model.RemoveAll {
			op.Value = ""
		}
		out = append(out, op)
	}
	return out
}

// host is an authority: mostly a spelling of a service, with one of its ports or
// the one that was dialled.
func (g gen) host(m *model.Mesh, f *model.Flow) string {
	n := g.name()
	if len(m.Endpoints) > 0 && g.in(2) {
		n = one(g, m.Endpoints).Service
	} else if len(m.Services) > 0 && !g.in(6) {
		n = one(g, m.Services).Name
	}
	dialled := f.Dst.Port()
	if f.Dir == model.Captured && !g.in(4) {
		for _, s := range m.Services {
			if slices.Contains(s.ClusterIPs, f.Dst.Addr()) {
				n = s.Name
			}
		}
	}
	if f.Dir == model.Proxy || dialled == model.PortProxy || g.in(5) {
		dialled = g.known(m, n, g.mostly(model.HTTP))
	}
	host := n.Name + "." + n.Namespace + "." + m.Domain
	switch g.IntN(10) {
	case 0, 1:
		host = n.Name
	case 2:
		host = n.Name + "." + n.Namespace
	case 3:
		host = n.Name + "." + n.Namespace + ".svc"
	case 4:
		host = n.Name + "." + n.Namespace + ".svc.cluster.local"
	case 5:
		host = one(g, []string{"", "foreign.test", "q.a." + m.Domain, "u@x.a", "[fd00::1]", "x..a", ".x.a", "w.x.a.svc", "x.a." + m.Domain + ".", "x a"})
	}
	if g.in(6) {
		host = strings.ToUpper(host)
	}
	if g.in(10) {
		host += "."
	}
	switch {
	case g.in(2):
		host += ":" + strconv.Itoa(int(dialled))
	case g.in(15):
		host += one(g, []string{":", ":0", ":080", ":65536", ":x", ":80:80", ":18081", ":18082"})
	}
	return host
}

func (g gen) flow(m *model.Mesh) model.Flow {
	n := g.name()
	f := model.Flow{Namespace: n.Namespace, Workload: n.Name, Dir: one(g, []model.Direction{model.Captured, model.Captured, model.Captured, model.Proxy, model.Inbound})}
	if len(m.Workloads) > 0 && !g.in(4) {
		w := one(g, m.Workloads)
		f.Namespace, f.Workload = w.Namespace, w.Account
		if g.in(2) {
			f.Container = w.ContainerID
		}
	}
	if g.in(40) {
		f.Container = "c9"
	}
	if g.in(25) {
		f.Namespace = ""
	}
	if g.in(300) {
		f.Dir = 0
	}
	switch f.Dir {
	case model.Captured:
		a, p := g.clusterIP(), g.port()
		if len(m.Services) > 0 && !g.in(4) {
			if s := one(g, m.Services); len(s.ClusterIPs) > 0 {
				a, p = one(g, s.ClusterIPs), g.known(m, s.Name, g.mostly(model.HTTP))
			}
		}
		if g.in(20) {
			a = netip.AddrFrom16(a.As16())
		}
		if g.in(15) {
			p = one(g, []uint16{model.PortCapture, model.PortProxy, model.PortRaw})
			if len(m.Workloads) > 0 && g.in(2) {
				a = one(g, m.Workloads).IPs[0]
			}
		}
		if len(m.Endpoints) > 0 && g.in(10) { // a pod itself
			e := one(g, m.Endpoints)
			if a = e.IP; len(e.Ports) > 0 {
				p = one(g, e.Ports).Number
			}
		}
		f.Dst = model.OrigDst{AddrPort: netip.AddrPortFrom(a, p)}
		f.Waited = g.in(3)
		f.Sniff = model.Sniff(g.IntN(8))
		for _, r := range m.Routes { // TLSRoutes are about ClientHellos
			if r.Kind == model.TLSRoute && g.in(2) {
				f.Sniff = model.SniffTLS
			}
		}
		switch {
		case f.Sniff == model.SniffTLS:
			f.Host = one(g, genHellos)
		case f.Sniff == model.SniffHTTP10 || f.Sniff == model.SniffHTTP11 || f.Sniff == model.SniffH2C:
			f.Host = g.host(m, &f)
		}
	case model.Inbound:
		p := g.port()
		if len(m.Workloads) > 0 && !g.in(4) {
			w := one(g, m.Workloads)
			f.Namespace, f.Workload, f.Container = w.Namespace, w.Account, w.ContainerID
			if len(w.Ports) > 0 {
				p = one(g, w.Ports).Number
			}
		}
		f.Dst = model.OrigDst{AddrPort: netip.AddrPortFrom(netip.Addr{}, p)}
		f.Peer = one(g, genPeers)
	}
	return f
}

func (g gen) request(m *model.Mesh, f *model.Flow) *httpmsg.Head {
	h := &httpmsg.Head{Method: []byte(one(g, genMethods)), Scheme: []byte("http"), Authority: []byte(g.host(m, f)), Path: []byte(one(g, genPaths)), Minor: 1}
	if g.in(4) {
		h.Path = []byte(one(g, genSpellings))
	}
	if g.in(25) {
		h.Path = []byte(one(g, []string{"/aether/readyz", "/aether/readyz?", "/-/-/live", "/-/-/ready", "/-/-/live?"}))
	}
	if g.in(4) {
		h.Path = append(h.Path, one(g, []string{"?x=1", "?x=2&y=1", "?y=%31", "?", "?x=1&x=2", "?y", "?x=1,2", "?%78=1", "?x=1%2c+2", "?x=%zz"})...)
	}
	if g.in(30) { // about as much as rules look at, and more
		h.Path = append(h.Path, []string{"?x=1" + strings.Repeat("&a", 255), "?x=1" + strings.Repeat("&a", 256), "?x=" + strings.Repeat("1", 8192), "?x=" + strings.Repeat("1", 8193)}[g.IntN(4)]...)
	}
	switch {
	case g.in(60) && len(h.Path) > 0:
		h.Path = append(h.Path, strings.Repeat("a", 8193)...)
	case g.in(40):
		h.Method, h.Path = []byte("OPTIONS"), []byte("*")
	case g.in(40):
		h.Method, h.Path = []byte("CONNECT"), nil
	case g.in(40):
		h.Method, h.Upgrade = []byte("CONNECT"), []byte("websocket")
	}
	add := func(name, value string) {
		h.Fields = append(h.Fields, httpmsg.Field{Name: []byte(name), Value: []byte(value)})
	}
	for n := g.IntN(4); n > 0; n-- {
		add(one(g, genFields), one(g, genValues))
	}
	if g.in(30) {
		add(one(g, genFields), strings.Repeat("1", 8190+g.IntN(6)))
	}
	if g.in(4) {
		add("origin", one(g, genOrigins))
		if g.in(2) && len(h.Upgrade) == 0 && len(h.Path) > 0 {
			h.Method = []byte("OPTIONS")
			add("access-control-request-method", one(g, []string{"GET", "PUT", "POST"}))
			if g.in(2) {
				add("access-control-request-headers", one(g, []string{"x-a", "x-a,x-z"}))
			}
		}
	}
	if g.in(3) {
		for n := 1 + g.IntN(3); n > 0; n-- {
			switch g.IntN(4) {
			case 0:
				v := one(g, []string{"", "x", "10.244.0.1", "::ffff:10.244.0.2"})
				if len(m.Endpoints) > 0 && !g.in(3) {
					v = one(g, m.Endpoints).IP.String()
				}
				add("x-aether-ip", v)
			case 1:
				v := ""
				if len(m.Endpoints) > 0 && !g.in(4) {
					v = one(g, m.Endpoints).Pod
				}
				add("x-aether-pod", v)
			default:
				k, v := one(g, genKeys), one(g, genValues)
				if len(m.Endpoints) > 0 && g.in(2) {
					v = one(g, m.Endpoints).Metadata[k]
				}
				add("x-aether-subset-"+strings.ToLower(k), v)
			}
		}
	}
	return h
}

// aimed is a flow and a request that a route of the mesh is likely to take; false: the
// mesh has none.
func (g gen) aimed(m *model.Mesh) (f model.Flow, h *httpmsg.Head, ok bool) {
	var routes []model.Route
	for _, r := range m.Routes {
		if (r.Kind == model.HTTPRoute || r.Kind == model.GRPCRoute) && len(r.Parents) > 0 && len(r.Rules) > 0 {
			routes = append(routes, r)
		}
	}
	if len(routes) == 0 {
		return f, nil, false
	}
	r := one(g, routes)
	parent := one(g, r.Parents)
	p := parent.Port
	if p == 0 {
		p = g.known(m, parent.Service, model.HTTP)
	}
	n := parent.Service
	f = model.Flow{Namespace: r.Namespace, Workload: "w", Dir: model.Proxy}
	if g.in(4) {
		f.Namespace = one(g, genNamespaces)
	}
	for _, s := range m.Services {
		if s.Name == n && len(s.ClusterIPs) > 0 && !g.in(3) {
			f.Dir, f.Dst = model.Captured, model.OrigDst{AddrPort: netip.AddrPortFrom(one(g, s.ClusterIPs), p)}
		}
	}
	h = g.request(m, &f)
	switch g.IntN(10) {
	case 0: // as it is
	case 1:
		h.Authority = nil
	case 2:
		h.Authority = []byte(n.Name + "." + n.Namespace + "." + m.Domain)
	default:
		h.Authority = []byte(n.Name + "." + n.Namespace + "." + m.Domain + ":" + strconv.Itoa(int(p)))
	}
	if rule := one(g, r.Rules); len(rule.Matches) > 0 && len(h.Upgrade) == 0 {
		match := one(g, rule.Matches)
		if match.Method != "" {
			h.Method = []byte(match.Method)
		} else if string(h.Method) == "CONNECT" {
			h.Method = []byte("GET")
		}
		switch {
		case match.GRPC != nil && !match.GRPC.Regex:
			h.Path = []byte("/" + cmp.Or(match.GRPC.Service, "s") + "/" + cmp.Or(match.GRPC.Method, "m"))
		case strings.HasPrefix(match.Path, "/") && match.PathKind == model.PathExact:
			h.Path = []byte(match.Path)
		case strings.HasPrefix(match.Path, "/") && match.PathKind == model.PathPrefix:
			h.Path = []byte(strings.TrimSuffix(match.Path, "/") + one(g, append([]string{"", "/", "/q"}, genSpellings...)))
		case len(h.Path) == 0:
			h.Path = []byte("/")
		}
		for _, v := range match.Headers {
			if !v.Regex && v.Name != "host" {
				h.Fields = append([]httpmsg.Field{{Name: []byte(v.Name), Value: []byte(v.Value)}}, h.Fields...)
			}
		}
		for _, v := range match.Query {
			if !v.Regex {
				h.Path = append(h.Path, "?"+v.Name+"="+v.Value...)
				break
			}
		}
	}
	return f, h, true
}
