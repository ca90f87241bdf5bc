package modeltest

import (
	"math/rand/v2"
	"net/netip"
	"strconv"
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
	methods    = []string{"GET", "POST", "CONNECT", "OPTIONS"}
	values     = []string{"1", "2", "yes"}
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
		})
	}
	for n := r.IntN(5); n > 0; n-- {
		s := serviceName(r)
		m.Workloads = append(m.Workloads, model.Workload{
			Namespace: s.Namespace, Account: s.Name, Name: s.Name + "-0", ContainerID: "c" + strconv.Itoa(r.IntN(8)), SPIFFEID: "spiffe://td/x",
			IPs: []netip.Addr{clusterIP(r)}, Ports: randomPorts(r), Capture: model.Capture{RedirectAll: r.IntN(2) == 0},
		})
	}
	for n := r.IntN(5); n > 0; n-- {
		m.Routes = append(m.Routes, randomRoute(r))
	}
	return m
}

func randomRoute(r *rand.Rand) model.Route {
	out := model.Route{Namespace: pick(r, namespaces), Name: "r" + strconv.Itoa(r.IntN(6)), Created: time.Unix(int64(r.IntN(3)), 0)}
	for n := r.IntN(3); n > 0; n-- {
		out.Parents = append(out.Parents, model.ParentRef{Service: serviceName(r), Port: pick(r, []uint16{0, 0, 80, 8080, 9000})})
	}
	for n := r.IntN(4); n > 0; n-- {
		var rule model.Rule
		for k := r.IntN(3); k > 0; k-- {
			match := model.Match{PathKind: model.PathKind(r.IntN(3)), Path: pick(r, paths)}
			if r.IntN(3) == 0 {
				match.Method = pick(r, methods)
			}
			for h := r.IntN(3); h > 0; h-- {
				match.Headers = append(match.Headers, model.HeaderMatch{Name: pick(r, []string{"version", "beta", "host"}), Value: pick(r, values)})
			}
			rule.Matches = append(rule.Matches, match)
		}
		if r.IntN(3) == 0 {
			rule.Filters = append(rule.Filters, model.Filter{Kind: model.FilterKind(r.IntN(4)), Set: []model.HeaderValue{{Name: pick(r, []string{"x-a", "host", "beta"}), Value: pick(r, values)}}})
		}
		for k := r.IntN(3); k > 0; k-- {
			ref := model.BackendRef{Service: serviceName(r), Port: pick(r, portPool), Weight: uint32(r.IntN(3))}
			if r.IntN(8) == 0 {
				ref.Invalid = "RefNotPermitted"
			}
			rule.Backends = append(rule.Backends, ref)
		}
		if r.IntN(8) == 0 {
			rule.Invalid = "not served"
		}
		out.Rules = append(out.Rules, rule)
	}
	return out
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
		Dst: model.OrigDst{AddrPort: netip.AddrPortFrom(clusterIP(r), pick(r, append(portPool, model.PortCapture)))}, Sniff: model.Sniff(r.IntN(7)),
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
	if r.IntN(3) > 0 {
		f.Host = RandomHost(r)
	}
	return f
}

// RandomRequest is a request head.
func RandomRequest(r *rand.Rand) httpmsg.Head {
	h := httpmsg.Head{Method: []byte(pick(r, methods)), Scheme: []byte("http"), Authority: []byte(RandomHost(r)), Path: []byte(pick(r, paths)), Minor: 1}
	for n := r.IntN(3); n > 0; n-- {
		h.Fields = append(h.Fields, httpmsg.Field{Name: []byte(pick(r, []string{"version", "beta", "x-a"})), Value: []byte(pick(r, values))})
	}
	if r.IntN(8) == 0 {
		h.Upgrade = []byte("websocket")
	}
	return h
}
