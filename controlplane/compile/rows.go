package compile

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// collectRows takes the valid registry rows, each pod of a service once.
func (c *compiler) collectRows() {
	rows := make([]*model.Endpoint, 0, len(c.mesh.Endpoints))
	for i := range c.mesh.Endpoints {
		rows = append(rows, &c.mesh.Endpoints[i])
	}
	slices.SortFunc(rows, compareRows)
	for i := 0; i < len(rows); {
		// All rows of one service at one address.
		j := i + 1
		for j < len(rows) && rows[j].Service == rows[i].Service && rows[j].IP.Unmap() == rows[i].IP.Unmap() {
			j++
		}
		if r := c.row(rows[i:j]); r != nil {
			s := c.service(r.Service)
			s.rows = append(s.rows, r)
		}
		i = j
	}
}

// row is the one valid row among rows of one service and address, or nil.
func (c *compiler) row(same []*model.Endpoint) *model.Endpoint {
	var best *model.Endpoint
	for _, r := range same {
		object := "Pod " + r.Service.Namespace + "/" + r.Pod
		ports, warning := cleanPorts(r.Ports)
		why := ""
		switch {
		case nameProblem(r.Service) != "":
			why = "service " + nameProblem(r.Service)
		case !r.IP.IsValid() || r.IP.IsUnspecified():
			why = "its row has no address"
		case !spiffeID(r.SPIFFEID):
			why = fmt.Sprintf("%q is no SPIFFE ID, and without one nothing says who must answer there", r.SPIFFEID)
		case len(ports) == 0 && warning != "":
			why = warning
		case len(ports) == 0:
			why = "its row declares no port"
		}
		if why != "" {
			c.problem(object, "%s; the row is not served", why)
			continue
		}
		if warning != "" {
			c.problem(object, "%s", warning)
		}
		clean := *r
		clean.Ports = ports
		switch {
		case best == nil:
			best = &clean
		case worse(clean.Health) > worse(best.Health) && sameButHealth(&clean, best):
			// A pod stands in the registry once a class; a change of health
			// that reached only one of them is believed.
			best = &clean
		case !sameButHealth(&clean, best):
			c.problem(object, "the address %s of service %s is in rows that contradict each other (the other: pod %s): none is served; remove the stale one", r.IP, r.Service, best.Pod)
			c.problem("Pod "+best.Service.Namespace+"/"+best.Pod, "the address %s of service %s is in rows that contradict each other (the other: pod %s): none is served; remove the stale one", r.IP, r.Service, r.Pod)
			return nil
		}
	}
	return best
}

// worse orders health by how much it keeps traffic away.
func worse(h model.Health) int {
	switch h {
	case model.Unhealthy:
		return 3
	case model.Draining:
		return 2
	case model.HealthUnspecified:
		return 0
	}
	return 1
}

func sameButHealth(a, b *model.Endpoint) bool {
	return a.Pod == b.Pod && a.Node == b.Node && a.Cluster == b.Cluster && a.Region == b.Region && a.Zone == b.Zone &&
		a.DefaultPort == b.DefaultPort && a.Weight == b.Weight && a.SPIFFEID == b.SPIFFEID &&
		slices.Equal(a.Ports, b.Ports) && maps.Equal(a.Metadata, b.Metadata)
}

// compareRows is a total order but for equal rows.
func compareRows(a, b *model.Endpoint) int {
	if d := cmp.Or(compareNames(a.Service, b.Service), a.IP.Unmap().Compare(b.IP.Unmap()), cmp.Compare(a.Pod, b.Pod)); d != 0 {
		return d
	}
	return cmp.Compare(fmt.Sprint(*a), fmt.Sprint(*b))
}

// spiffeID is the form that a pin must have: a trust domain and a path. What
// it allows is for the handshake to say.
func spiffeID(id string) bool {
	rest, ok := strings.CutPrefix(id, "spiffe://")
	td, path, has := strings.Cut(rest, "/")
	return ok && has && td != "" && path != ""
}

// cleanPorts are the ports that can be served, ascending; warning says what of
// the declaration cannot. A declaration that contradicts itself serves nothing
// (contract 9.3).
func cleanPorts(in []model.Port) (out []model.Port, warning string) {
	in = slices.Clone(in)
	slices.SortFunc(in, func(a, b model.Port) int { return cmp.Compare(a.Number, b.Number) })
	var reserved []string
	for i, p := range in {
		switch {
		case p.Class != model.HTTP && p.Class != model.TCP && p.Class != model.UDP:
			return nil, fmt.Sprintf("port %d has no class: declare it in endpoint.aether.io/ports", p.Number)
		case p.Number == 0:
			return nil, "port 0 is no port: declare one of 1 to 65535"
		case i > 0 && in[i-1].Number == p.Number:
			return nil, fmt.Sprintf("port %d is there twice: declare it once", p.Number)
		case model.ReservedPort(p.Number): // contract 1.3: the port goes, the pod stays
			reserved = append(reserved, fmt.Sprint(p.Number))
		default:
			out = append(out, p)
		}
	}
	if len(reserved) > 0 {
		warning = fmt.Sprintf("port %s is the mesh's own and is not served: declare another number in endpoint.aether.io/ports", strings.Join(reserved, " and "))
	}
	return out, warning
}

// classes is the one place where the class of a port is worked out: what most
// rows say, HTTP before TCP before UDP in a tie (contract 1.3). Ascending by number.
func classes(rows []*model.Endpoint) []portClass {
	votes := map[uint16]*[4]int{}
	for _, r := range rows {
		for _, p := range r.Ports {
			v := votes[p.Number]
			if v == nil {
				v = new([4]int)
				votes[p.Number] = v
			}
			v[p.Class]++
		}
	}
	out := make([]portClass, 0, len(votes))
	for n, v := range votes {
		p := portClass{number: n}
		var said []string
		for class := model.HTTP; class <= model.UDP; class++ {
			if v[class] > 0 {
				said = append(said, fmt.Sprintf("%d as %s", v[class], class))
			}
			if v[class] > v[p.class] {
				p.class = class
			}
		}
		if len(said) > 1 {
			p.disagree = strings.Join(said, ", ")
		}
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b portClass) int { return cmp.Compare(a.number, b.number) })
	return out
}

// rawPort is the pod port that :18082 spells (contract 4.2 step 3): the
// declared port that most rows have, if it is TCP, else the lowest TCP port.
func rawPort(rows []*model.Endpoint, ports []portClass) (uint16, bool) {
	votes := map[uint16]int{}
	for _, r := range rows {
		votes[r.DefaultPort]++
	}
	declared, most := uint16(0), 0
	for n, v := range votes {
		if v > most || v == most && n < declared {
			declared, most = n, v
		}
	}
	lowest, ok := uint16(0), false
	for _, p := range ports {
		if p.class != model.TCP {
			continue
		}
		if p.number == declared {
			return declared, true
		}
		if !ok {
			lowest, ok = p.number, true
		}
	}
	return lowest, ok
}

// endpointTable makes every backend's set: the rows that declare its port with
// its class (contract 5.5). prev, when not nil, lends the sets that are equal.
func endpointTable(backends []*snapshot.Backend, prev *snapshot.EndpointTable, rowsOf func(model.ServiceName) []*model.Endpoint, m *model.Mesh) *snapshot.EndpointTable {
	type made struct {
		points []*snapshot.Endpoint
		sets   map[string]*snapshot.EndpointSet // by which rows are in: most ports of a service have all
	}
	services := map[model.ServiceName]*made{}
	sets := make([]*snapshot.EndpointSet, len(backends))
	for _, b := range backends {
		rows := rowsOf(b.Service)
		s := services[b.Service]
		if s == nil {
			s = &made{sets: map[string]*snapshot.EndpointSet{}}
			for _, r := range rows {
				s.points = append(s.points, endpoint(r, m))
			}
			services[b.Service] = s
		}
		in := make([]byte, len(rows))
		var members []*snapshot.Endpoint
		for i, r := range rows {
			if slices.ContainsFunc(r.Ports, func(p model.Port) bool { return p.Number == b.Port && p.Class == b.Class }) {
				in[i] = 1
				members = append(members, s.points[i])
			}
		}
		set := s.sets[string(in)]
		if set == nil {
			set = snapshot.NewEndpointSet(members)
			if prev != nil && equalSets(prev.Set(b.ID), set) {
				set = prev.Set(b.ID)
			}
			s.sets[string(in)] = set
		}
		sets[b.ID] = set
	}
	return snapshot.NewEndpointTable(sets)
}

func equalSets(a, b *snapshot.EndpointSet) bool {
	return slices.EqualFunc(a.All(), b.All(), func(x, y *snapshot.Endpoint) bool {
		return x.Addr == y.Addr && x.Pod == y.Pod && x.Node == y.Node && x.Zone == y.Zone && x.Weight == y.Weight &&
			x.Health == y.Health && x.SPIFFEID == y.SPIFFEID && x.Priority == y.Priority && maps.Equal(x.Metadata, y.Metadata)
	})
}

func endpoint(r *model.Endpoint, m *model.Mesh) *snapshot.Endpoint {
	return &snapshot.Endpoint{
		Addr: netip.AddrPortFrom(r.IP.Unmap(), model.PortMesh), Pod: r.Pod, Node: r.Node, Zone: r.Zone,
		Weight: r.Weight, Health: r.Health, SPIFFEID: r.SPIFFEID, Priority: priority(r, m), Metadata: r.Metadata,
	}
}

// priority is the table of contract 5.5.
func priority(r *model.Endpoint, m *model.Mesh) uint8 {
	switch {
	case m.Region == "":
		return 0
	case r.Region != m.Region:
		return 2
	case m.Zone == "" || r.Zone == m.Zone:
		return 0
	}
	return 1
}
