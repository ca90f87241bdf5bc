// Package modeltest reads a mesh written in a few short lines, for tests.
//
//	domain aether.internal
//	node n1 region=eu zone=a
//	semantics gatewayapi                                # or aether, the default
//	service shop/cart 10.96.0.1,fd00::1 8080,9000=tcp   # generated; ports count only without pods
//	user shop/legacy 10.96.0.9 80:8080,90:web,53:53/udp # a user's; a name is an unresolved targetPort
//	pods shop/cart*2 8080,9000=tcp port=9000 health=draining weight=10 meta=version:v2
//	local shop/web 8080=h2 scoped ip=10.1.0.1 cid=c1
//	catalog shop/cold pay/colder                        # names whose rows are not here yet
//	retained shop/gone 8080,9090                        # kept against removal, with its HTTP ports
//	route shop/split cart cart:8080 created=2           # HTTPRoute; also grpcroute, tcproute, tlsroute
//	rule name=new match=prefix:/items&GET&h:version=2 to=shop/cart-v2:8080*90 bset=x-b:2 set=x-a:1
//	grpcroute shop/calls cart
//	rule match=grpc:echo.Echo/Say to=cart:8080
//	tlsroute shop/db db sni=db.example,*.db.example
//	rule to=db:5432
//	filter shop/admins scope=chain target=cart rbac policy=admins;ns:ops;path:/admin
//	filter shop/ask target=cart authz ctx=team:cart
//
// Services of a route's (a filter's) own namespace may be written without it.
// Words of a rule, and of a filter, are those of the two functions that read
// them, rule and filter, where each is explained. It is for tests only: its
// errors name a line, it knows nothing of Kubernetes, and what it reads may be
// as wrong as a test needs.
package modeltest

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"aether/dataplane/model"
)

// Mesh is Parse for tests: an error ends the test.
func Mesh(tb testing.TB, text string) *model.Mesh {
	tb.Helper()
	m, err := Parse(text)
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

// Parse reads the form above. Pods get addresses from 10.244.0.1 on and names
// <account>-1 and so on, in the order of the text.
func Parse(text string) (*model.Mesh, error) {
	p := &parser{m: &model.Mesh{Domain: model.DefaultDomain, TrustDomain: "td", Node: "n1"}, pods: map[model.ServiceName]int{}}
	for i, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if err := p.line(words[0], words[1:]); err != nil {
			return nil, fmt.Errorf("mesh line %d: %q: %w", i+1, strings.TrimSpace(line), err)
		}
	}
	return p.m, nil
}

type parser struct {
	m    *model.Mesh
	pods map[model.ServiceName]int
	ips  int
}

func (p *parser) line(verb string, words []string) error {
	if len(words) == 0 {
		return fmt.Errorf("nothing after %s", verb)
	}
	switch verb {
	case "domain":
		p.m.Domain = words[0]
		return nil
	case "node":
		p.m.Node = words[0]
		for _, w := range words[1:] {
			switch k, v, _ := strings.Cut(w, "="); k {
			case "region":
				p.m.Region = v
			case "zone":
				p.m.Zone = v
			default:
				return fmt.Errorf("%q is unknown", w)
			}
		}
		return nil
	case "service", "user":
		return p.service(verb == "service", words)
	case "pods":
		return p.endpoints(words)
	case "local":
		return p.local(words)
	case "semantics":
		switch words[0] {
		case "aether":
			p.m.Semantics = model.Aether
		case "gatewayapi":
			p.m.Semantics = model.GatewayAPI
		default:
			return fmt.Errorf("%q is no semantics: aether or gatewayapi", words[0])
		}
		return nil
	case "samenode":
		switch words[0] {
		case "mtls":
			p.m.SameNode = model.MTLS
		case "inprocess":
			p.m.SameNode = model.InProcess
		default:
			return fmt.Errorf("%q is no way between pods of a node: mtls or inprocess", words[0])
		}
		return nil
	case "catalog":
		for _, w := range words {
			n, err := name(w, "")
			if err != nil {
				return err
			}
			p.m.Catalog = append(p.m.Catalog, n)
		}
		return nil
	case "retained":
		return p.retained(words)
	case "route":
		return p.route(model.HTTPRoute, words)
	case "grpcroute":
		return p.route(model.GRPCRoute, words)
	case "tcproute":
		return p.route(model.TCPRoute, words)
	case "tlsroute":
		return p.route(model.TLSRoute, words)
	case "rule":
		return p.rule(words)
	case "filter":
		return p.filter(words)
	}
	return fmt.Errorf("%q is unknown", verb)
}

func name(w, ns string) (model.ServiceName, error) {
	a, b, ok := strings.Cut(w, "/")
	if !ok {
		a, b = ns, w
	}
	if a == "" || b == "" {
		return model.ServiceName{}, fmt.Errorf("%q is not namespace/name", w)
	}
	return model.ServiceName{Namespace: a, Name: b}, nil
}

func number(w string) (uint16, error) {
	n, err := strconv.ParseUint(w, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("%q is no port", w)
	}
	return uint16(n), nil
}

func (p *parser) nextIP() netip.Addr {
	p.ips++
	return netip.AddrFrom4([4]byte{10, 244, byte(p.ips >> 8), byte(p.ips)})
}

// ports: 8080 (http), 8080=h2 (http, h2c to the application), 9000=tcp, 53=udp.
func ports(w string) (out []model.Port, err error) {
	for item := range strings.SplitSeq(w, ",") {
		num, class, _ := strings.Cut(item, "=")
		n, err := number(num)
		if err != nil {
			return nil, err
		}
		port := model.Port{Number: n, Class: model.HTTP}
		switch class {
		case "", "http":
		case "h2":
			port.App = model.AppH2C
		case "tcp":
			port.Class = model.TCP
		case "udp":
			port.Class = model.UDP
		case "none":
			port.Class = model.ClassNone
		default:
			return nil, fmt.Errorf("%q is no class", class)
		}
		out = append(out, port)
	}
	return out, nil
}

func (p *parser) service(generated bool, words []string) error {
	n, err := name(words[0], "")
	if err != nil {
		return err
	}
	s := model.Service{Name: n, Generated: generated}
	for _, w := range words[1:] {
		first, _, _ := strings.Cut(w, ",")
		if _, err := netip.ParseAddr(first); err == nil {
			for ip := range strings.SplitSeq(w, ",") {
				a, err := netip.ParseAddr(ip)
				if err != nil {
					return err
				}
				s.ClusterIPs = append(s.ClusterIPs, a)
			}
			continue
		}
		if generated {
			list, err := ports(w)
			if err != nil {
				return err
			}
			for _, q := range list {
				s.Ports = append(s.Ports, model.ServicePort{Number: q.Number, Target: q.Number, Class: q.Class, UDP: q.Class == model.UDP})
			}
			continue
		}
		for item := range strings.SplitSeq(w, ",") {
			item, udp := strings.CutSuffix(item, "/udp")
			a, b, ok := strings.Cut(item, ":")
			num, err := number(a)
			if !ok || err != nil {
				return fmt.Errorf("%q is not port:target", item)
			}
			sp := model.ServicePort{Number: num, UDP: udp}
			if t, err := number(b); err == nil {
				sp.Target = t
			} else {
				sp.TargetName = b
			}
			s.Ports = append(s.Ports, sp)
		}
	}
	p.m.Services = append(p.m.Services, s)
	return nil
}

func (p *parser) endpoints(words []string) error {
	who, times, _ := strings.Cut(words[0], "*")
	n, err := name(who, "")
	if err != nil {
		return err
	}
	count := 1
	if times != "" {
		if count, err = strconv.Atoi(times); err != nil {
			return err
		}
	}
	e := model.Endpoint{
		Service: n, Node: "n2", Cluster: "local", Weight: model.DefaultWeight, Health: model.Healthy,
		SPIFFEID: "spiffe://" + p.m.TrustDomain + "/ns/" + n.Namespace + "/sa/" + n.Name,
	}
	for i, w := range words[1:] {
		k, v, ok := strings.Cut(w, "=")
		if i == 0 && (w[0] >= '0' && w[0] <= '9') {
			if e.Ports, err = ports(w); err != nil {
				return err
			}
			if e.DefaultPort == 0 {
				e.DefaultPort = e.Ports[0].Number
			}
			continue
		}
		if !ok {
			return fmt.Errorf("%q is unknown", w)
		}
		switch k {
		case "port":
			e.DefaultPort, err = number(v)
		case "ip":
			e.IP, err = netip.ParseAddr(v)
		case "pod":
			e.Pod = v
		case "id":
			e.SPIFFEID = v
		case "node":
			e.Node = v
		case "region":
			e.Region = v
		case "zone":
			e.Zone = v
		case "cluster":
			e.Cluster = v
		case "meta": // key:value
			key, value, _ := strings.Cut(v, ":")
			if e.Metadata == nil {
				e.Metadata = map[string]string{}
			}
			e.Metadata[key] = value
		case "weight":
			var x uint64
			x, err = strconv.ParseUint(v, 10, 32)
			e.Weight = uint32(x)
		case "health":
			err = fmt.Errorf("%q is no health", v)
			for h := model.HealthUnspecified; h <= model.Draining; h++ {
				if h.String() == v {
					e.Health, err = h, nil
				}
			}
		default:
			err = fmt.Errorf("%q is unknown", w)
		}
		if err != nil {
			return err
		}
	}
	for range count {
		x := e
		p.pods[n]++
		if !x.IP.IsValid() {
			x.IP = p.nextIP()
		}
		if x.Pod == "" {
			x.Pod = n.Name + "-" + strconv.Itoa(p.pods[n])
		}
		p.m.Endpoints = append(p.m.Endpoints, x)
	}
	return nil
}

func (p *parser) local(words []string) error {
	n, err := name(words[0], "")
	if err != nil {
		return err
	}
	w := model.Workload{
		Namespace: n.Namespace, Account: n.Name, Name: n.Name + "-0", ContainerID: n.String(), NetNS: "/run/netns/" + n.Name,
		SPIFFEID: "spiffe://" + p.m.TrustDomain + "/ns/" + n.Namespace + "/sa/" + n.Name, DefaultPort: model.DefaultPort,
		Capture: model.Capture{RedirectAll: true},
	}
	for i, word := range words[1:] {
		k, v, _ := strings.Cut(word, "=")
		switch {
		case i == 0 && word[0] >= '0' && word[0] <= '9':
			w.Ports, err = ports(word)
		case word == "scoped":
			w.Capture.RedirectAll = false
		case k == "ip":
			for ip := range strings.SplitSeq(v, ",") {
				a, perr := netip.ParseAddr(ip)
				if perr != nil {
					return perr
				}
				w.IPs = append(w.IPs, a)
			}
		case k == "cid":
			w.ContainerID = v
		case k == "pod":
			w.Name = v
		case k == "id":
			w.SPIFFEID = v
		default:
			err = fmt.Errorf("%q is unknown", word)
		}
		if err != nil {
			return err
		}
	}
	p.m.Workloads = append(p.m.Workloads, w)
	return nil
}

// target: service or service:port.
func target(w, ns string) (model.ServiceName, uint16, error) {
	who, num, has := strings.Cut(w, ":")
	n, err := name(who, ns)
	if err != nil || !has {
		return n, 0, err
	}
	port, err := number(num)
	return n, port, err
}

// retained: the service, and its HTTP ports if it has any.
func (p *parser) retained(words []string) error {
	n, err := name(words[0], "")
	if err != nil {
		return err
	}
	kept := model.Retained{Service: n}
	for _, w := range words[1:] {
		for item := range strings.SplitSeq(w, ",") {
			port, err := number(item)
			if err != nil {
				return err
			}
			kept.Ports = append(kept.Ports, port)
		}
	}
	p.m.Retained = append(p.m.Retained, kept)
	return nil
}

// route: its name, then its parents, service or service:port; created=, in
// seconds; sni=, server names of a TLSRoute.
func (p *parser) route(kind model.RouteKind, words []string) error {
	n, err := name(words[0], "")
	if err != nil {
		return err
	}
	r := model.Route{Kind: kind, Namespace: n.Namespace, Name: n.Name}
	for _, w := range words[1:] {
		if v, ok := strings.CutPrefix(w, "sni="); ok {
			r.ServerNames = append(r.ServerNames, strings.Split(v, ",")...)
			continue
		}
		if v, ok := strings.CutPrefix(w, "created="); ok { // seconds
			sec, err := strconv.ParseInt(v, 10, 64)
			if err != nil {
				return err
			}
			r.Created = time.Unix(sec, 0).UTC()
			continue
		}
		svc, port, err := target(w, n.Namespace)
		if err != nil {
			return err
		}
		r.Parents = append(r.Parents, model.ParentRef{Service: svc, Port: port})
	}
	p.m.Routes = append(p.m.Routes, r)
	return nil
}
