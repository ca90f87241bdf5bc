package decide_test

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
)

// lively is a random mesh in which most things work: drawn blindly, hardly any
// request gets beyond its name. What is mended is what makes objects cancel each
// other out; routes and filters stay as they were drawn, but for what they refer to.
func lively(r *rand.Rand) *model.Mesh {
	m := modeltest.RandomMesh(r)
	seen := map[model.ServiceName]bool{}
	m.Services = slices.DeleteFunc(m.Services, func(s model.Service) bool {
		twice := seen[s.Name]
		seen[s.Name] = true
		return twice && r.IntN(20) > 0
	})
	for i := range m.Services {
		if r.IntN(20) > 0 {
			m.Services[i].ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(i)})}
		}
		for j := range m.Services[i].Ports {
			if p := &m.Services[i].Ports[j]; r.IntN(4) > 0 && !m.Services[i].Generated {
				p.Number, p.Target, p.TargetName, p.UDP = []uint16{80, 8080, 9000}[j%3], []uint16{8080, 9090, 9000}[j%3], "", false
			}
		}
	}
	for i := range m.Endpoints {
		e := &m.Endpoints[i]
		if len(m.Services) > 0 && r.IntN(4) > 0 {
			e.Service = m.Services[r.IntN(len(m.Services))].Name
		}
		if r.IntN(10) > 0 {
			e.IP, e.Health, e.Weight = netip.AddrFrom4([4]byte{10, 244, 0, byte(1 + i)}), model.Healthy, uint32(1+r.IntN(2))
			e.SPIFFEID = "spiffe://td/ns/" + e.Service.Namespace + "/sa/" + e.Service.Name
			e.Ports = []model.Port{{Number: 80, Class: model.HTTP}, {Number: 8080, Class: model.HTTP}, {Number: 9000, Class: model.TCP}, {Number: 9090, Class: model.HTTP}}[r.IntN(2) : 2+r.IntN(3)]
		}
	}
	for i := range m.Workloads {
		w := &m.Workloads[i]
		if r.IntN(10) > 0 {
			w.ContainerID = "c" + strconv.Itoa(i)
			w.Ports = []model.Port{{Number: 80, Class: model.HTTP}, {Number: 8080, Class: model.HTTP}, {Number: 9000, Class: model.TCP}}
		}
		if len(m.Endpoints) > 0 && r.IntN(2) == 0 {
			s := m.Endpoints[r.IntN(len(m.Endpoints))].Service
			w.Namespace, w.Account = s.Namespace, s.Name
		}
	}
	some := func() model.ServiceName {
		if len(m.Endpoints) == 0 {
			return model.ServiceName{Namespace: "shop", Name: "cart"}
		}
		return m.Endpoints[r.IntN(len(m.Endpoints))].Service
	}
	names := map[string]bool{}
	m.Routes = slices.DeleteFunc(m.Routes, func(x model.Route) bool {
		key := x.Kind.String() + x.Namespace + "/" + x.Name
		twice := names[key]
		names[key] = true
		return twice && r.IntN(10) > 0
	})
	for i := range m.Routes {
		x := &m.Routes[i]
		for j := range x.Parents {
			if r.IntN(3) > 0 {
				x.Parents[j].Service = some()
			}
			if r.IntN(2) > 0 {
				x.Namespace = x.Parents[j].Service.Namespace // the producer's
			}
			if r.IntN(2) > 0 {
				x.Parents[j].Port = 0
			}
		}
		for j := range x.Rules {
			rule := &x.Rules[j]
			if r.IntN(4) > 0 {
				rule.Invalid = ""
			}
			for k := range rule.Backends {
				if r.IntN(3) > 0 {
					rule.Backends[k].Service, rule.Backends[k].Port, rule.Backends[k].Invalid = some(), 8080, ""
				}
			}
		}
	}
	files := map[string]bool{}
	m.Filters = slices.DeleteFunc(m.Filters, func(f model.HTTPFilter) bool {
		twice := files[f.Namespace+"/"+f.Name]
		files[f.Namespace+"/"+f.Name] = true
		return twice && r.IntN(10) > 0
	})
	for i := range m.Filters {
		f := &m.Filters[i]
		if r.IntN(4) > 0 {
			f.Invalid = ""
		}
		for j := range f.Targets {
			if r.IntN(3) > 0 {
				f.Targets[j] = some()
				f.Namespace = f.Targets[j].Namespace
			}
		}
	}
	return m
}

// aimed is a question that mostly is about something of the mesh.
func aimed(r *rand.Rand, m *model.Mesh) (model.Flow, httpmsg.Head) {
	f, h := modeltest.RandomFlow(r), modeltest.RandomRequest(r)
	if r.IntN(4) == 0 {
		return f, h
	}
	if string(h.Method) == "CONNECT" {
		h.Method = []byte("GET")
	}
	if f.Dir == model.Inbound {
		if len(m.Workloads) > 0 {
			w := &m.Workloads[r.IntN(len(m.Workloads))]
			f.Namespace, f.Workload, f.Container = w.Namespace, w.Account, w.ContainerID
			if len(w.Ports) > 0 {
				f.Dst = model.OrigDst{AddrPort: netip.AddrPortFrom(netip.Addr{}, w.Ports[r.IntN(len(w.Ports))].Number)}
			}
		}
		return f, h
	}
	if len(m.Endpoints) == 0 {
		return f, h
	}
	e := &m.Endpoints[r.IntN(len(m.Endpoints))]
	port := []uint16{80, 8080, 9000, 9090}[r.IntN(4)]
	if len(e.Ports) > 0 && r.IntN(4) > 0 {
		port = e.Ports[r.IntN(len(e.Ports))].Number
	}
	full := e.Service.Name + "." + e.Service.Namespace
	host := []string{full + ".aether.internal", full, full + ".svc.cluster.local", e.Service.Name}[r.IntN(4)]
	if r.IntN(2) == 0 {
		f.Namespace = e.Service.Namespace
	}
	if f.Dir == model.Captured {
		a := f.Dst.Addr()
		for i := range m.Services {
			if s := &m.Services[i]; s.Name == e.Service && len(s.ClusterIPs) > 0 && r.IntN(4) > 0 {
				a = s.ClusterIPs[0]
			}
		}
		f.Dst = model.OrigDst{AddrPort: netip.AddrPortFrom(a, port)}
	}
	if f.Dir == model.Proxy || r.IntN(3) == 0 {
		host += ":" + strconv.Itoa(int(port))
	}
	h.Authority = []byte(host)
	if f.Sniff != model.SniffTLS {
		f.Host = host
	}
	return f, h
}
