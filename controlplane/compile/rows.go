package compile

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"aether/controlplane/endpointmeta"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
	"aether/mtls/spiffeid"
)

// group gives each service its rows.
func (x *Index) group(rows []model.Endpoint) {
	for i := range rows {
		s := x.service(rows[i].Service)
		s.rows = append(s.rows, &rows[i])
	}
}

// readRows works out what the service's rows say: which of them are valid, each
// pod once; the classes of the ports; the default TCP port; the keys of metadata
// that select. It reports whether anything but the endpoints changed by it.
func (s *service) readRows() (changed bool) {
	before := *s
	s.rowProblems = nil
	s.valid = s.readValid()
	s.classes, s.uniform = endpointmeta.Classes(s.valid, func(r *model.Endpoint) []model.Port { return r.Ports })
	s.raw, s.rawOK = rawPort(s.valid, s.classes)
	s.keys = subsetKeys(s.valid)
	return !slices.Equal(before.classes, s.classes) || before.raw != s.raw || before.rawOK != s.rawOK ||
		!slices.Equal(before.keys, s.keys) || !slices.Equal(before.rowProblems, s.rowProblems)
}

// readValid is the valid rows, ascending by address.
func (s *service) readValid() []*model.Endpoint {
	if len(s.rows) > 1 {
		slices.SortFunc(s.rows, compareRows)
	}
	whole := true // all rows are valid as they are
	for i, r := range s.rows {
		if i > 0 && r.IP.Unmap() == s.rows[i-1].IP.Unmap() || !s.plainRow(r) {
			whole = false
			break
		}
	}
	if whole {
		return s.rows
	}
	var valid []*model.Endpoint
	for i := 0; i < len(s.rows); {
		// All rows at one address.
		j := i + 1
		for j < len(s.rows) && s.rows[j].IP.Unmap() == s.rows[i].IP.Unmap() {
			j++
		}
		if r := s.row(s.rows[i:j]); r != nil {
			valid = append(valid, r)
		}
		i = j
	}
	return valid
}

// plainRow reports whether a row is valid without a change.
func (s *service) plainRow(r *model.Endpoint) bool {
	if s.badName != "" || !r.IP.IsValid() || r.IP.IsUnspecified() || len(r.Ports) == 0 || !spiffeID(r.SPIFFEID) {
		return false
	}
	return plainPorts(r.Ports)
}

// plainPorts reports whether cleanPorts would return ports as they are.
func plainPorts(ports []model.Port) bool {
	last := uint16(0)
	for i := range ports {
		p := &ports[i]
		if p.Number <= last || p.Class < model.HTTP || p.Class > model.UDP || model.ReservedPort(p.Number) {
			return false
		}
		last = p.Number
	}
	return true
}

// row is the one valid row among rows at one address, or nil.
func (s *service) row(same []*model.Endpoint) *model.Endpoint {
	say := func(object, format string, args ...any) {
		s.rowProblems = append(s.rowProblems, problem(object, format, args...))
	}
	var best *model.Endpoint
	for _, r := range same {
		object := "Pod " + r.Service.Namespace + "/" + r.Pod
		ports, warning := cleanPorts(r.Ports)
		why := ""
		switch {
		case s.badName != "":
			why = "service " + s.badName
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
			say(object, "%s; the row is not served", why)
			continue
		}
		if warning != "" {
			say(object, "%s", warning)
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
			say(object, "the address %s of service %s is in rows that contradict each other (the other: pod %s): none is served; remove the stale one", r.IP, r.Service, best.Pod)
			say("Pod "+best.Service.Namespace+"/"+best.Pod, "the address %s of service %s is in rows that contradict each other (the other: pod %s): none is served; remove the stale one", r.IP, r.Service, r.Pod)
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

// sameButHealth reports whether two rows are of one pod and differ in health at
// most. How a proxy speaks to the application is its node's affair and never in a
// row (contract 1.3): it tells nothing apart.
func sameButHealth(a, b *model.Endpoint) bool {
	samePort := func(p, q model.Port) bool {
		return p.Number == q.Number && p.Class == q.Class && p.AlsoUDP == q.AlsoUDP
	}
	return a.Pod == b.Pod && a.Node == b.Node && a.Cluster == b.Cluster && a.Region == b.Region && a.Zone == b.Zone &&
		a.DefaultPort == b.DefaultPort && a.Weight == b.Weight && a.SPIFFEID == b.SPIFFEID &&
		slices.EqualFunc(a.Ports, b.Ports, samePort) && maps.Equal(a.Metadata, b.Metadata)
}

// compareRows is a total order of a service's rows but for equal ones.
func compareRows(a, b *model.Endpoint) int {
	if d := a.IP.Unmap().Compare(b.IP.Unmap()); d != 0 {
		return d
	}
	if d := cmp.Compare(a.Pod, b.Pod); d != 0 {
		return d
	}
	return cmp.Compare(fmt.Sprint(*a), fmt.Sprint(*b))
}

// spiffeID reports whether id can be a pod's: a SPIFFE ID with a path, for that
// of a trust domain is the authority's own. No certificate carries anything else,
// so that an endpoint with it could never be reached.
func spiffeID(id string) bool {
	x, err := spiffeid.Parse(id)
	return err == nil && x.Path() != ""
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

// rawPort is the pod port that :18082 spells (contract 4.2 step 3): the
// declared port that most rows have, if it is TCP, else the lowest TCP port.
func rawPort(rows []*model.Endpoint, ports []endpointmeta.PortClass) (uint16, bool) {
	lowest := slices.IndexFunc(ports, func(p endpointmeta.PortClass) bool { return p.Class == model.TCP })
	if lowest < 0 {
		return 0, false
	}
	declared, same := rows[0].DefaultPort, true
	for _, r := range rows[1:] {
		same = same && r.DefaultPort == declared
	}
	if !same {
		votes := map[uint16]int{}
		for _, r := range rows {
			votes[r.DefaultPort]++
		}
		most := 0
		for n, v := range votes {
			if v > most || v == most && n < declared {
				declared, most = n, v
			}
		}
	}
	for _, p := range ports[lowest:] {
		if p.Class == model.TCP && p.Number == declared {
			return declared, true
		}
	}
	return ports[lowest].Number, true
}

// subsetKeys are the metadata keys of rows that a request may select by (contract 5.10), ascending.
func subsetKeys(rows []*model.Endpoint) (keys []string) {
	for _, r := range rows {
		for k := range r.Metadata {
			if snapshot.RoutableKey(k) && !slices.Contains(keys, k) {
				keys = append(keys, k)
			}
		}
	}
	slices.Sort(keys)
	return keys
}

// makeSets makes the set of each of the service's backends: the rows that
// declare its port with its class (contract 5.5). Ports with the same rows share
// one; endpoints and sets that are equal to those in old are those. put gets the
// sets that are not.
func (x *Index) makeSets(s *service, old *snapshot.EndpointTable, put func(snapshot.SetAt)) {
	if len(s.backends) == 0 {
		return
	}
	at := func(id int) *snapshot.EndpointSet { // the old set
		if old == nil || id >= old.Len() {
			return nil
		}
		return old.Set(id)
	}
	var find func(a netip.AddrPort) *snapshot.Endpoint
	if old != nil {
		find = func(a netip.AddrPort) *snapshot.Endpoint {
			for _, b := range s.backends {
				if set := at(b.ID); set != nil {
					if i := set.Find(a); i >= 0 {
						return set.At(i)
					}
				}
			}
			return nil
		}
	}
	points := x.points(s, find)
	keep := func(id int, set *snapshot.EndpointSet) *snapshot.EndpointSet {
		if was := at(id); was != nil && slices.Equal(was.All(), set.All()) && slices.Equal(was.Keys(), set.Keys()) { // equal endpoints are the same ones
			return was
		}
		return set
	}
	var all *snapshot.EndpointSet // of every row
	var some map[string]*snapshot.EndpointSet
	for _, b := range s.backends {
		var set *snapshot.EndpointSet
		if s.uniform && slices.ContainsFunc(s.classes, func(p endpointmeta.PortClass) bool { return p.Number == b.Port && p.Class == b.Class }) {
			if all == nil {
				all = keep(b.ID, snapshot.NewServiceSet(points, s.keys))
			}
			set = all
		} else {
			in := make([]byte, len(s.valid))
			var members []*snapshot.Endpoint
			for i, r := range s.valid {
				if slices.ContainsFunc(r.Ports, func(p model.Port) bool { return p.Number == b.Port && p.Class == b.Class }) {
					in[i] = 1
					members = append(members, points[i])
				}
			}
			if set = some[string(in)]; set == nil {
				set = keep(b.ID, snapshot.NewServiceSet(members, s.keys))
				if some == nil {
					some = map[string]*snapshot.EndpointSet{}
				}
				some[string(in)] = set
			}
		}
		if set != at(b.ID) {
			put(snapshot.SetAt{ID: b.ID, Set: set})
		}
	}
}

// points are the endpoints of the valid rows, in their order; find, when not
// nil, gives an older one at an address.
func (x *Index) points(s *service, find func(netip.AddrPort) *snapshot.Endpoint) []*snapshot.Endpoint {
	out := make([]*snapshot.Endpoint, len(s.valid))
	var all []snapshot.Endpoint
	if find == nil { // all are new, and will most often go together
		all = make([]snapshot.Endpoint, len(s.valid))
	}
	for i, r := range s.valid {
		e := snapshot.Endpoint{
			Addr: netip.AddrPortFrom(r.IP.Unmap(), model.PortMesh), Pod: r.Pod, Node: r.Node, Zone: r.Zone,
			Weight: r.Weight, Health: r.Health, SPIFFEID: r.SPIFFEID, Priority: x.priority(r), Metadata: r.Metadata,
		}
		if find == nil {
			e.Key = snapshot.EndpointKey(s.name, e.Pod, e.Addr)
			all[i] = e
			out[i] = &all[i]
			continue
		}
		out[i] = find(e.Addr)
		if out[i] == nil || !sameEndpoint(out[i], &e) {
			fresh := e // only what is new is put on the heap
			fresh.Key = snapshot.EndpointKey(s.name, e.Pod, e.Addr)
			out[i] = &fresh
		}
	}
	return out
}

func sameEndpoint(x, y *snapshot.Endpoint) bool {
	return x.Addr == y.Addr && x.Pod == y.Pod && x.Node == y.Node && x.Zone == y.Zone && x.Weight == y.Weight &&
		x.Health == y.Health && x.SPIFFEID == y.SPIFFEID && x.Priority == y.Priority && maps.Equal(x.Metadata, y.Metadata)
}

// priority is the table of contract 5.5.
func (x *Index) priority(r *model.Endpoint) uint8 {
	switch {
	case x.region == "":
		return 0
	case r.Region != x.region:
		return 2
	case x.zone == "" || r.Zone == x.zone:
		return 0
	}
	return 1
}
