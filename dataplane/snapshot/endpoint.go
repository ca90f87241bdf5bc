package snapshot

import (
	"crypto/sha256"
	"encoding/binary"
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
	Key      uint64            // EndpointKey
}

// EndpointKey names an endpoint of a service to those who are sent there again: the same
// on every node, and no more to be read out of it than out of any hash of the pod's name
// and address (decision 017).
func EndpointKey(service model.ServiceName, pod string, addr netip.AddrPort) uint64 {
	b := make([]byte, 0, 128)
	b = append(append(b, service.Namespace...), '/')
	b = append(append(b, service.Name...), 0)
	b = append(append(b, pod...), 0)
	b = addr.AppendTo(b)
	sum := sha256.Sum256(b)
	return binary.BigEndian.Uint64(sum[:])
}

// Usable reports whether the endpoint may be picked for new work (contract 5.5).
func (e *Endpoint) Usable() bool {
	return e.Weight > 0 && (e.Health == model.HealthUnspecified || e.Health == model.Healthy)
}

// EndpointSet is the pods of a backend, in a stable order: ascending by address.
// Immutable; a set that did not change keeps its pointer over endpoint updates
// where the maker can tell, so a caller may hold counters beside a set by its pointer.
type EndpointSet struct {
	all     []*Endpoint
	levels  []Level
	subsets *subsets // nil: no endpoint of the service has metadata that selects
	part    string   // the conditions, of a subset; "": it is none
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
//
// The keys that select are those of these endpoints; where the set is a part of
// a service's, use NewServiceSet.
func NewEndpointSet(all []*Endpoint) *EndpointSet {
	var keys []string
	for _, e := range all {
		for k := range e.Metadata {
			if RoutableKey(k) && !slices.Contains(keys, k) {
				keys = append(keys, k)
			}
		}
	}
	slices.Sort(keys)
	return NewServiceSet(all, keys)
}

// NewServiceSet is NewEndpointSet for a part of a service's endpoints; keys, which
// is kept, are the metadata keys of all of them that select, ascending. Which of
// them combine depends on all of them (contract 5.10).
func NewServiceSet(all []*Endpoint, keys []string) *EndpointSet {
	if len(all) == 0 {
		return noEndpoints
	}
	slices.SortFunc(all, func(a, b *Endpoint) int { return a.Addr.Compare(b.Addr) })
	s := newSet(all)
	if len(keys) > 0 {
		s.subsets = makeSubsets(all, keys)
	}
	return s
}

// newSet is NewEndpointSet of endpoints in order, without subsets.
func newSet(all []*Endpoint) *EndpointSet {
	return &EndpointSet{all: all, levels: makeLevels(all, nil)}
}

// makeLevels shares the traffic among the priorities of endpoints, which are in
// order. Those that are aside count as unhealthy; nil: none is.
func makeLevels(all []*Endpoint, aside func(i int) bool) []Level {
	picks := func(i int, e *Endpoint) bool { return e.Usable() && (aside == nil || !aside(i)) }
	priorities := 1 // up to the farthest that is there
	for _, e := range all {
		priorities = max(priorities, int(e.Priority)+1)
	}
	var few [2][4]int // contract 5.5 has three, and three more with a waypoint
	total, usable := few[0][:], few[1][:]
	if priorities > len(total) {
		total, usable = make([]int, priorities), make([]int, priorities)
	}
	levels := 0
	for i, e := range all {
		total[e.Priority]++
		if picks(i, e) {
			if usable[e.Priority]++; usable[e.Priority] == 1 {
				levels++
			}
		}
	}
	if levels == 0 {
		return nil
	}
	health := func(p int) int { // of 1000; never 0 while one is usable
		if usable[p] == 0 {
			return 0
		}
		return max(1, min(1000, usable[p]*1400/total[p]))
	}
	whole := 0
	for p := range priorities {
		whole += health(p)
	}
	whole = min(whole, 1000) // below 1000 the levels share what is there
	given := 0
	out := make([]Level, 0, levels)
	for p := range priorities {
		if usable[p] == 0 {
			continue
		}
		// A level that the nearer ones leave nothing is kept without a share:
		// a caller that has set those aside still finds it.
		given += min(health(p), whole-given)
		l := Level{Upto: uint32(uint64(given) * ShareOf / uint64(whole)), Index: make([]int, 0, usable[p]), Weight: make([]uint64, 0, usable[p])}
		var sum uint64
		for i, e := range all {
			if int(e.Priority) == p && picks(i, e) {
				sum += uint64(e.Weight)
				l.Index = append(l.Index, i)
				l.Weight = append(l.Weight, sum)
			}
		}
		out = append(out, l)
	}
	return out
}

// Keys are the metadata keys of the service that select, ascending. Read only.
func (s *EndpointSet) Keys() []string {
	if s.subsets == nil {
		return nil
	}
	return s.subsets.keys
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

// LevelsWithout are the levels that there would be if the endpoints that aside
// reports were unhealthy: how outlier ejection composes with priorities (contract
// 5.5, 5.6).
func (s *EndpointSet) LevelsWithout(aside func(i int) bool) []Level { return makeLevels(s.all, aside) }

// None is the set of no endpoint.
func (s *EndpointSet) None() *EndpointSet { return noEndpoints }

// Part is what the selection that o came by leaves of s: s itself where o is no subset.
func (s *EndpointSet) Part(o *EndpointSet) *EndpointSet {
	if o == nil || o.part == "" {
		return s
	}
	if s.subsets != nil {
		if p := s.subsets.sets[o.part]; p != nil {
			return p
		}
	}
	return noEndpoints
}

// Like is the endpoint of s at the address of o, one of another snapshot, if it is the same
// pod's; nil: there is none.
func (s *EndpointSet) Like(o *Endpoint) *Endpoint {
	i := s.Find(o.Addr)
	if i < 0 || s.all[i].Pod != o.Pod {
		return nil
	}
	return s.all[i]
}

// Find is the index of the endpoint at that address, or -1.
func (s *EndpointSet) Find(a netip.AddrPort) int {
	i := sort.Search(len(s.all), func(i int) bool { return s.all[i].Addr.Compare(a) >= 0 })
	if i < len(s.all) && s.all[i].Addr == a {
		return i
	}
	return -1
}

// EndpointTable holds one set a backend, at the backend's ID. Immutable: a
// changed table shares with the old one all chunks but those that hold a change,
// so that a change costs the same whatever the size of the mesh.
type EndpointTable struct {
	chunks []*chunk // the last one may hold more than size
	size   int
	places *places // nil: there is no endpoint
}

// chunkLen is a compromise: a change copies a chunk and the list of chunks. At
// 30,000 backends those are 2 KiB and 1 KiB.
const chunkLen = 256

type chunk [chunkLen]*EndpointSet

// SetAt is the set of one backend.
type SetAt struct {
	ID  int
	Set *EndpointSet // nil: empty
}

// NewEndpointTable makes a table; nil entries become empty sets.
func NewEndpointTable(sets []*EndpointSet) *EndpointTable {
	at := make([]SetAt, len(sets))
	for i, s := range sets {
		at[i] = SetAt{i, s}
	}
	return (*EndpointTable)(nil).Update(len(sets), at)
}

// With is t with another set for backend id; the other sets are shared.
func (t *EndpointTable) With(id int, set *EndpointSet) *EndpointTable {
	return t.Update(t.size, []SetAt{{id, set}})
}

// Update is t, resized to size backends, with other sets at some IDs, each less
// than size. What is new and not named is empty. A nil t is an empty table.
func (t *EndpointTable) Update(size int, at []SetAt) *EndpointTable {
	if t == nil {
		t = &EndpointTable{}
	}
	n := &EndpointTable{chunks: make([]*chunk, (size+chunkLen-1)/chunkLen), size: size}
	copy(n.chunks, t.chunks)
	moved := placing{was: t.places}
	for id := size; id < t.size; id++ {
		moved.replace(id, t.Set(id), noEndpoints)
	}
	own := make([]bool, len(n.chunks))
	edit := func(i int) *chunk {
		if !own[i] {
			own[i] = true
			c := new(chunk)
			if old := n.chunks[i]; old != nil {
				*c = *old
			} else {
				for j := range c {
					c[j] = noEndpoints
				}
			}
			n.chunks[i] = c
		}
		return n.chunks[i]
	}
	for i := range n.chunks {
		if n.chunks[i] == nil {
			edit(i)
		}
	}
	for id := size; id < t.size && id < len(n.chunks)*chunkLen; id++ {
		edit(id / chunkLen)[id%chunkLen] = noEndpoints // else they came back when the table grew
	}
	for _, a := range at {
		if a.ID >= size {
			panic("snapshot: a set for a backend that the table has no room for")
		}
		set := a.Set
		if set == nil {
			set = noEndpoints
		}
		c := edit(a.ID / chunkLen)
		moved.replace(a.ID, c[a.ID%chunkLen], set)
		c[a.ID%chunkLen] = set
	}
	if n.places = t.places; moved.p != nil {
		n.places = moved.p
	}
	return n
}

// Set is the set of backend id.
func (t *EndpointTable) Set(id int) *EndpointSet { return t.chunks[id/chunkLen][id%chunkLen] }

// Len is the number of backends that the table has sets for.
func (t *EndpointTable) Len() int { return t.size }
