// Package snapshot holds one node's view of the mesh, compiled for the data
// plane: names, addresses, ports, route programs, workloads and endpoints.
//
//   - A Snapshot never changes. Everything reached from one may be read by any
//     number of goroutines and is changed by none, exported fields included.
//   - Endpoint sets stand in a table of their own beside the rest, because they
//     change a thousand times as often: a new table makes a new Snapshot header
//     that shares everything else.
//   - No lookup allocates.
//
// It holds the facts, not the rules: who may go where is decided in decide,
// and what the facts are is worked out in compile. It knows no clock and no
// history.
package snapshot

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"
	"sync/atomic"

	"aether/dataplane/model"
)

// Snapshot is an immutable compiled mesh. Make one with New; the zero value is
// not usable, but a nil *Snapshot answers every lookup with "nothing".
type Snapshot struct {
	t         *tables
	endpoints *EndpointTable
	version   uint64
	draining  bool
}

// Tables is what a Snapshot is made of. New keeps it: whoever filled it lets go of it.
type Tables struct {
	Domain    string     // mesh domain, lower case: "aether.internal"
	Services  []*Service // ascending by name, each once
	Workloads []*Workload
	Backends  []*Backend              // Backends[i].ID == i
	Addresses map[netip.Addr]*Service // ClusterIPs; each a service of Services
	// Outside are the ClusterIPs of Services that are no mesh service: no pod of the mesh has their name as the ServiceAccount.
	// No decision depends on them; explanations name the Service.
	Outside   map[netip.Addr]model.ServiceName
	Endpoints *EndpointTable // one set a backend
	Semantics model.Semantics
	SameNode  model.SameNode
	// SubsetKeys are the metadata keys that any endpoint has and a selection header
	// may name (contract 5.10), ascending.
	SubsetKeys []string
}

// tables is Tables and the indexes over it. The indexes hold places in Services,
// not pointers, so that they are shared where only what stands there changes.
type tables struct {
	Tables
	suffix      string           // "." + Domain
	names       map[string]int32 // "cart.shop"
	v4          map[uint32]int32 // by far the most; a key of four bytes hashes fastest
	v6          map[netip.Addr]int32
	shorts      map[string]struct{} // first labels of services that answer to a short name
	byContainer map[string]*Workload
	byService   map[model.ServiceName]*Workload
	near        map[netip.Addr]*Workload // by pod address, where SameNode is InProcess; nil: two pods have it
}

// New makes a snapshot of t with version 0. It panics when t breaks what its
// fields promise: that is a bug of the caller's, never a fault of the input.
func New(t Tables) *Snapshot {
	x := &tables{
		Tables:      t,
		suffix:      "." + t.Domain,
		names:       make(map[string]int32, len(t.Services)),
		v4:          make(map[uint32]int32, len(t.Addresses)),
		v6:          make(map[netip.Addr]int32),
		shorts:      make(map[string]struct{}),
		byContainer: make(map[string]*Workload, len(t.Workloads)),
		byService:   make(map[model.ServiceName]*Workload, len(t.Workloads)),
	}
	x.check()
	for i, s := range t.Services {
		if i > 0 && !t.Services[i-1].Name.Less(s.Name) {
			panic("snapshot: service " + s.Name.String() + " twice, or out of order")
		}
		x.names[s.Name.Name+"."+s.Name.Namespace] = int32(i)
		if s.Kubernetes {
			x.shorts[s.Name.Name] = struct{}{}
		}
	}
	for a, s := range t.Addresses {
		i, ok := x.find(s.Name)
		if !ok || t.Services[i] != s {
			panic("snapshot: an address of service " + s.Name.String() + ", which is none of the snapshot's")
		}
		if a = a.Unmap(); a.Is4() {
			x.v4[v4Key(a)] = int32(i)
		} else {
			x.v6[a] = int32(i)
		}
	}
	x.Addresses = nil // everything is in v4 and v6
	slices.SortFunc(x.Workloads, func(a, b *Workload) int { return cmp.Compare(a.ContainerID, b.ContainerID) })
	for _, w := range x.Workloads {
		x.byContainer[w.ContainerID] = w
		if x.byService[w.Service] == nil { // the first by container ID: the same on every build
			x.byService[w.Service] = w
		}
	}
	if x.SameNode == model.InProcess {
		x.near = map[netip.Addr]*Workload{}
		for _, w := range x.Workloads {
			for _, a := range w.IPs {
				a = a.Unmap()
				if _, twice := x.near[a]; twice { // one of the two is about to go: the kernel knows which
					x.near[a] = nil
					continue
				}
				x.near[a] = w
			}
		}
	}
	return &Snapshot{t: x, endpoints: t.Endpoints}
}

// check panics where backends and endpoint sets are not what Tables promises.
func (x *tables) check() {
	for i, b := range x.Backends {
		if b.ID != i {
			panic("snapshot: backend " + b.Name + " stands at another place than its ID")
		}
	}
	if x.Endpoints == nil || x.Endpoints.Len() != len(x.Backends) {
		panic("snapshot: the endpoint table has not one set a backend")
	}
}

// find is the place of a service among Services.
func (x *tables) find(n model.ServiceName) (int, bool) {
	return slices.BinarySearchFunc(x.Services, n, func(s *Service, n model.ServiceName) int {
		switch {
		case s.Name.Less(n):
			return -1
		case n.Less(s.Name):
			return 1
		}
		return 0
	})
}

// WithServices is s with others in the place of services of the same names,
// which answer to the same names and addresses; with other backends, and their
// endpoints. It shares everything else, the indexes too, and panics as New does.
func (s *Snapshot) WithServices(changed []*Service, backends []*Backend, t *EndpointTable) *Snapshot {
	x := *s.t
	x.Services, x.Backends, x.Endpoints = slices.Clone(x.Services), backends, t
	x.check()
	for _, c := range changed {
		i, ok := x.find(c.Name)
		if !ok || x.Services[i].Kubernetes != c.Kubernetes {
			panic("snapshot: service " + c.Name.String() + " does not take the place of another")
		}
		x.Services[i] = c
	}
	n := *s
	n.t, n.endpoints = &x, t
	return &n
}

// Version is the number given by WithVersion: it orders the snapshots of one
// process and means nothing outside it. 0: not numbered.
func (s *Snapshot) Version() uint64 {
	if s == nil {
		return 0
	}
	return s.version
}

// WithVersion is s with another version, sharing everything else.
func (s *Snapshot) WithVersion(v uint64) *Snapshot { n := *s; n.version = v; return &n }

// Draining reports whether the process is leaving: the readiness path then
// answers 503 (contract 4.11) and nothing else changes.
func (s *Snapshot) Draining() bool { return s != nil && s.draining }

// WithDraining is s with that flag, sharing everything else. Whoever swaps in a
// later snapshot carries the flag over.
func (s *Snapshot) WithDraining(on bool) *Snapshot { n := *s; n.draining = on; return &n }

// WithEndpoints is s with another endpoint table, sharing everything else. The
// table must have one set a backend of s: take it from compile.Endpoints or
// from EndpointTable.With.
func (s *Snapshot) WithEndpoints(t *EndpointTable) *Snapshot {
	if t.Len() != len(s.t.Backends) {
		panic("snapshot: endpoint table of another snapshot")
	}
	n := *s
	n.endpoints = t
	return &n
}

// EndpointTable is the table that Endpoints reads.
func (s *Snapshot) EndpointTable() *EndpointTable { return s.endpoints }

// Endpoints are b's pods; never nil for a backend of this snapshot or of one
// it shares its tables with, and an empty set for any other.
func (s *Snapshot) Endpoints(b *Backend) *EndpointSet {
	if s == nil || b == nil || uint(b.ID) >= uint(len(s.t.Backends)) || s.t.Backends[b.ID] != b {
		return noEndpoints
	}
	return s.endpoints.Set(b.ID)
}

// Domain is the mesh domain, lower case.
func (s *Snapshot) Domain() string {
	if s == nil {
		return ""
	}
	return s.t.Domain
}

// Semantics is how routes and names work together.
func (s *Snapshot) Semantics() model.Semantics {
	if s == nil {
		return model.Aether
	}
	return s.t.Semantics
}

// Near is the pod of this node that e is, if requests to it are to stay in the
// process (sameNode: inProcess); nil: they go over the hop. Address and identity
// both have to be the pod's.
func (s *Snapshot) Near(e *Endpoint) *Workload {
	if s == nil || s.t.near == nil {
		return nil
	}
	if w := s.t.near[e.Addr.Addr()]; w != nil && w.SPIFFEID == e.SPIFFEID {
		return w
	}
	return nil
}

// SubsetKeys are the metadata keys that a selection header may name, ascending. Read only.
func (s *Snapshot) SubsetKeys() []string {
	if s == nil {
		return nil
	}
	return s.t.SubsetKeys
}

// Address is the Service that owns the ClusterIP a; nil: none that the mesh
// knows. A v4-mapped address is read as IPv4.
func (s *Snapshot) Address(a netip.Addr) *Service {
	if s == nil {
		return nil
	}
	a = a.Unmap()
	var i int32
	var ok bool
	if a.Is4() {
		i, ok = s.t.v4[v4Key(a)]
	} else {
		i, ok = s.t.v6[a]
	}
	if !ok {
		return nil
	}
	return s.t.Services[i]
}

// Outside is the Service whose address a is, if it is no mesh service (Tables.Outside).
func (s *Snapshot) Outside(a netip.Addr) (n model.ServiceName, ok bool) {
	if s == nil {
		return n, false
	}
	n, ok = s.t.Outside[a.Unmap()]
	return n, ok
}

func v4Key(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

// Service is the mesh service of that name, or nil.
func (s *Snapshot) Service(n model.ServiceName) *Service {
	if s == nil {
		return nil
	}
	if i, ok := s.t.find(n); ok {
		return s.t.Services[i]
	}
	return nil
}

// Services are all mesh services, ascending by name. Read only.
func (s *Snapshot) Services() []*Service {
	if s == nil {
		return nil
	}
	return s.t.Services
}

// Backends are all destinations; a backend stands at its ID. One that nothing
// leads to any more may stand among them for a while, without endpoints. Read only.
func (s *Snapshot) Backends() []*Backend {
	if s == nil {
		return nil
	}
	return s.t.Backends
}

// Backend is the backend of s in the place of b, one of another snapshot; nil: nothing leads to
// such a one any more.
func (s *Snapshot) Backend(b *Backend) *Backend {
	if s == nil || b == nil {
		return nil
	}
	if all := s.t.Backends; uint(b.ID) < uint(len(all)) && all[b.ID] == b {
		return b
	}
	svc := s.Service(b.Service)
	if svc == nil {
		return nil
	}
	same := func(o *Backend) bool { return o != nil && o.Port == b.Port && o.Class == b.Class }
	for _, ports := range [...][]Port{svc.Ports, svc.PodPorts} {
		for i := range ports {
			if o := ports[i].Backend; same(o) {
				return o
			}
		}
	}
	if same(svc.Raw) {
		return svc.Raw
	}
	return nil
}

// Workload is the local pod with that container ID, or nil.
func (s *Snapshot) Workload(containerID string) *Workload {
	if s == nil {
		return nil
	}
	return s.t.byContainer[containerID]
}

// Workloads are the local pods, ascending by container ID. Read only.
func (s *Snapshot) Workloads() []*Workload {
	if s == nil {
		return nil
	}
	return s.t.Workloads
}

// WorkloadOf is the pod that f belongs to: by container ID when f has one, else
// the first local pod of its ServiceAccount. nil: no such pod on this node.
func (s *Snapshot) WorkloadOf(f *model.Flow) *Workload {
	switch {
	case s == nil:
		return nil
	case f.Container != "":
		return s.t.byContainer[f.Container]
	}
	return s.t.byService[model.ServiceName{Namespace: f.Namespace, Name: f.Workload}]
}

// Store hands out the current snapshot. Load once a decision and keep it: two
// Loads may see two worlds. Safe for concurrent use; the zero value holds nil.
type Store struct{ p atomic.Pointer[Snapshot] }

// Load is the current snapshot; nil before the first Swap.
func (s *Store) Load() *Snapshot { return s.p.Load() }

// Swap makes next the current snapshot.
func (s *Store) Swap(next *Snapshot) { s.p.Store(next) }
