package snapshot

import (
	"net/netip"
	"slices"
	"sort"

	"aether/dataplane/model"
)

// Endpoint is one pod behind a backend. Immutable, shared by the backends of its service.
type Endpoint struct {
	Addr     netip.AddrPort // the pod's inbound listener: its address and port 18008
	Pod      string
	Node     string
	Zone     string
	Weight   uint32 // 0: takes no new work
	Health   model.Health
	SPIFFEID string            // the identity the hop must meet, exactly (contract 5.3)
	Priority uint8             // 0 is nearest (contract 5.5)
	Metadata map[string]string // read only
}

// Usable reports whether the endpoint may be picked for new work (contract 5.5).
func (e *Endpoint) Usable() bool {
	return e.Weight > 0 && (e.Health == model.HealthUnspecified || e.Health == model.Healthy)
}

// EndpointSet is the pods of a backend, in a stable order: ascending by address.
// Immutable; a set that did not change keeps its pointer over endpoint updates
// where the maker can tell, so a caller may hold counters beside a set by its pointer.
type EndpointSet struct {
	all    []*Endpoint
	levels []Level
}

// Level is one priority's usable endpoints.
type Level struct {
	Upto   uint32   // end of its share of the traffic, of ShareOf
	Index  []int    // into the set
	Weight []uint64 // Weight[i]: sum of the weights of Index[:i+1]
}

// ShareOf is the whole of the traffic that levels share.
const ShareOf = 1 << 16

var noEndpoints = &EndpointSet{}

// NewEndpointSet makes a set of endpoints; the slice is kept and sorted.
//
// Traffic goes to the lowest priority while enough of its endpoints are
// usable; below 1/1.4 (about 71 %) the rest spills to the next, as Envoy's
// overprovisioning factor does (contract 5.5).
func NewEndpointSet(all []*Endpoint) *EndpointSet {
	if len(all) == 0 {
		return noEndpoints
	}
	slices.SortFunc(all, func(a, b *Endpoint) int { return a.Addr.Compare(b.Addr) })
	s := &EndpointSet{all: all}
	var total, usable [256]int // by priority
	for _, e := range all {
		total[e.Priority]++
		if e.Usable() {
			usable[e.Priority]++
		}
	}
	health := func(p int) int { // of 1000; never 0 while one is usable
		if usable[p] == 0 {
			return 0
		}
		return max(1, min(1000, usable[p]*1400/total[p]))
	}
	whole := 0
	for p := range total {
		whole += health(p)
	}
	whole = min(whole, 1000) // below 1000 the levels share what is there
	given := 0
	for p := range total {
		if usable[p] == 0 {
			continue
		}
		// A level that the nearer ones leave nothing is kept without a share:
		// a caller that has set those aside still finds it.
		given += min(health(p), whole-given)
		l := Level{Upto: uint32(uint64(given) * ShareOf / uint64(whole))}
		var sum uint64
		for i, e := range all {
			if int(e.Priority) == p && e.Usable() {
				sum += uint64(e.Weight)
				l.Index = append(l.Index, i)
				l.Weight = append(l.Weight, sum)
			}
		}
		s.levels = append(s.levels, l)
	}
	return s
}

// Len is the number of endpoints, usable or not.
func (s *EndpointSet) Len() int { return len(s.all) }

// At is endpoint i, 0 <= i < Len.
func (s *EndpointSet) At(i int) *Endpoint { return s.all[i] }

// All are the endpoints in order. Read only.
func (s *EndpointSet) All() []*Endpoint { return s.all }

// Empty reports whether no endpoint may be picked.
func (s *EndpointSet) Empty() bool { return len(s.levels) == 0 }

// Levels are the usable endpoints by priority, nearest first. Read only.
func (s *EndpointSet) Levels() []Level { return s.levels }

// Find is the index of the endpoint at that address, or -1.
func (s *EndpointSet) Find(a netip.AddrPort) int {
	i := sort.Search(len(s.all), func(i int) bool { return s.all[i].Addr.Compare(a) >= 0 })
	if i < len(s.all) && s.all[i].Addr == a {
		return i
	}
	return -1
}

// EndpointTable holds one set a backend, at the backend's ID. Immutable.
type EndpointTable struct{ sets []*EndpointSet }

// NewEndpointTable makes a table; the slice is kept, and nil entries become empty sets.
func NewEndpointTable(sets []*EndpointSet) *EndpointTable {
	for i := range sets {
		if sets[i] == nil {
			sets[i] = noEndpoints
		}
	}
	return &EndpointTable{sets}
}

// With is t with another set for backend id; the other sets are shared.
func (t *EndpointTable) With(id int, set *EndpointSet) *EndpointTable {
	sets := slices.Clone(t.sets)
	sets[id] = set
	return &EndpointTable{sets}
}

// Set is the set of backend id.
func (t *EndpointTable) Set(id int) *EndpointSet { return t.sets[id] }
