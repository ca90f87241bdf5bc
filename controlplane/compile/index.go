package compile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"aether/controlplane/endpointmeta"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Index is a mesh arranged by what depends on what, and what it compiles to.
// Whoever follows a mesh keeps one, tells it what changed by the Set methods, and
// takes the next snapshot from Update, which costs what changed and what depends
// on it: endpoints cost their own service's sets, and share all else with the
// snapshot before.
//
// An Index at any time gives the same as Compile of the mesh it holds, but that
// backends may have other IDs. It keeps what it is given, which therefore must
// not change afterwards. Not safe for concurrent use; the snapshots are.
type Index struct {
	domain, region, zone string
	semantics            model.Semantics
	sameNode             model.SameNode
	services             map[model.ServiceName]*service
	order                []*service // all of services by name, once sorted
	sorted               bool
	owners               map[netip.Addr]owners
	routes               map[routeKey][]*route
	users                map[model.ServiceName][]*route // by the HTTPFilter that they name
	filters              map[model.ServiceName][]*httpFilter
	workloads            []model.Workload
	policies             map[model.ServiceName][]model.EndpointPolicy
	udsDir               string
	udsRefused           map[string]endpointmeta.UDSReason
	troubled             map[*service]struct{} // those with problems
	domainProblems       []model.Problem
	podProblems          []model.Problem

	touched  []*service // those with dirty set
	judged   bool       // problems may have changed
	whole    bool       // names, addresses, pods or keys may have changed, not only services in their places
	assigned bool       // backends changed
	backends []*snapshot.Backend
	free     []int               // IDs of backends that are nobody's
	freed    []*snapshot.Backend // those that became nobody's since the last Update

	snap     *snapshot.Snapshot // of the last Update; nil: none yet
	problems []model.Problem

	numbers map[uint16]string
	scratch []byte
}

// routeKey names a route object.
type routeKey struct {
	kind model.RouteKind
	name model.ServiceName // a route's name has the same two parts
}

// dirty says what of a service has to be worked out again.
type dirty uint8

const (
	dirtyRows dirty = 1 << iota // what the rows say
	dirtyView                   // what others see
	dirtyOut                    // what it compiles to
	dirtySets                   // its endpoint sets
	listed                      // it stands in touched
)

// owners are the Services that claim an address: one, if all is well.
type owners struct {
	first *service
	more  []*service
}

func (o owners) other(than *service) *service {
	var out *service
	for _, s := range append(o.more[:len(o.more):len(o.more)], o.first) {
		if s != than && (out == nil || s.name.Less(out.name)) {
			out = s
		}
	}
	return out
}

// NewIndex makes an index of m. Nothing is compiled before the first Update.
func NewIndex(m *model.Mesh) *Index {
	n := max(len(m.Services), len(m.Endpoints)/4)
	x := &Index{
		region: m.Region, zone: m.Zone, semantics: m.Semantics, sameNode: m.SameNode, whole: true,
		services: make(map[model.ServiceName]*service, n), owners: make(map[netip.Addr]owners, len(m.Services)),
		order: make([]*service, 0, n), touched: make([]*service, 0, n), backends: make([]*snapshot.Backend, 0, 2*n),
		routes: map[routeKey][]*route{}, users: map[model.ServiceName][]*route{}, filters: map[model.ServiceName][]*httpFilter{},
		workloads: m.Workloads, policies: map[model.ServiceName][]model.EndpointPolicy{}, udsDir: model.DefaultUDSDir, numbers: map[uint16]string{}, troubled: map[*service]struct{}{},
	}
	x.domain, x.domainProblems = readDomain(m.Domain)
	x.group(m.Endpoints)
	for i := range m.Services {
		s := x.service(m.Services[i].Name)
		s.objects = append(s.objects, &m.Services[i])
	}
	for _, s := range x.services {
		x.claim(s)
	}
	for _, n := range m.Catalog {
		x.service(n).catalog = true
	}
	for _, r := range m.Retained {
		s := x.service(r.Service)
		s.retained = append(s.retained, r)
	}
	for _, p := range m.Policies {
		x.policies[p.Service] = append(x.policies[p.Service], p)
	}
	filters := map[model.ServiceName][]model.HTTPFilter{}
	for _, f := range m.Filters {
		n := model.ServiceName{Namespace: f.Namespace, Name: f.Name}
		filters[n] = append(filters[n], f)
	}
	for n, list := range filters {
		x.SetFilters(n.Namespace, n.Name, list)
	}
	routes := map[routeKey][]model.Route{}
	for _, r := range m.Routes {
		k := routeKey{r.Kind, model.ServiceName{Namespace: r.Namespace, Name: r.Name}}
		routes[k] = append(routes[k], r)
	}
	for k, list := range routes {
		x.SetRoutes(k.kind, k.name.Namespace, k.name.Name, list)
	}
	clear(x.touched)
	x.touched = x.touched[:0]
	x.sort()
	for _, s := range x.order {
		s.dirty = 0
		x.mark(s, dirtyRows|dirtyView|dirtyOut|dirtySets)
	}
	return x
}

// service is the entry of a name, made when first spoken of.
func (x *Index) service(n model.ServiceName) *service {
	s := x.services[n]
	if s == nil {
		s = &service{name: n, badName: nameProblem(n)}
		x.services[n] = s
		x.order = append(x.order, s)
		x.sorted = false
	}
	return s
}

func (x *Index) mark(s *service, d dirty) {
	if s.dirty&listed == 0 {
		x.touched = append(x.touched, s)
	}
	s.dirty |= d | listed
}

// claim enters the addresses of the service's objects.
func (x *Index) claim(s *service) {
	if len(s.objects) == 0 || s.badName != "" {
		return
	}
	if len(s.objects) > 1 {
		slices.SortFunc(s.objects, compareServices)
	}
	for _, o := range s.objects {
		for _, ip := range o.ClusterIPs {
			if ip = ip.Unmap(); ip.IsValid() && !ip.IsUnspecified() && !slices.Contains(s.ips, ip) {
				s.ips = append(s.ips, ip)
			}
		}
	}
	slices.SortFunc(s.ips, netip.Addr.Compare)
	for _, ip := range s.ips {
		o, taken := x.owners[ip]
		if !taken {
			x.owners[ip] = owners{first: s}
			continue
		}
		o.each(func(other *service) { x.mark(other, dirtyView) })
		x.owners[ip] = owners{o.first, append(o.more[:len(o.more):len(o.more)], s)}
	}
}

// disclaim takes them back.
func (x *Index) disclaim(s *service) {
	for _, ip := range s.ips {
		var left owners
		x.owners[ip].each(func(other *service) {
			switch {
			case other == s:
				return
			case left.first == nil:
				left.first = other
			default:
				left.more = append(left.more, other)
			}
			x.mark(other, dirtyView)
		})
		if left.first == nil {
			delete(x.owners, ip)
		} else {
			x.owners[ip] = left
		}
	}
	s.ips = nil
}

func (o owners) each(f func(*service)) {
	f(o.first)
	for _, s := range o.more {
		f(s)
	}
}

// compareServices is a total order but for equal objects.
func compareServices(a, b *model.Service) int { return compareJSON(a, b) }

// SetEndpoints replaces the registry's rows of a service. Rows of another
// service among them are not looked at.
func (x *Index) SetEndpoints(n model.ServiceName, rows []model.Endpoint) {
	s := x.service(n)
	s.rows = make([]*model.Endpoint, 0, len(rows))
	for i := range rows {
		if rows[i].Service == n {
			s.rows = append(s.rows, &rows[i])
		}
	}
	x.mark(s, dirtyRows)
}

// SetServices replaces the Service objects of a name: one, or none. More than
// one contradict each other.
func (x *Index) SetServices(n model.ServiceName, objects []model.Service) {
	s := x.service(n)
	x.disclaim(s)
	s.objects = nil
	for i := range objects {
		if objects[i].Name == n {
			s.objects = append(s.objects, &objects[i])
		}
	}
	x.claim(s)
	x.mark(s, dirtyView)
	x.whole = true
}

// SetCatalog says whether the mesh's catalog has the name.
func (x *Index) SetCatalog(n model.ServiceName, in bool) {
	s := x.service(n)
	s.catalog = in
	x.mark(s, dirtyView)
}

// SetRetained says that a service is kept against its removal, and with which
// HTTP ports; none: it is not.
func (x *Index) SetRetained(n model.ServiceName, kept []model.Retained) {
	s := x.service(n)
	s.retained = slices.DeleteFunc(slices.Clone(kept), func(r model.Retained) bool { return r.Service != n })
	x.mark(s, dirtyView)
}

// SetWorkloads replaces this node's pods.
func (x *Index) SetWorkloads(w []model.Workload) {
	x.workloads = w
	x.whole = true
}

// SetPolicies replaces the EndpointPolicies of a service: one, or none. Of several the
// first by name is in force.
func (x *Index) SetPolicies(n model.ServiceName, policies []model.EndpointPolicy) {
	if delete(x.policies, n); len(policies) > 0 {
		x.policies[n] = policies
	}
	x.whole = true
}

// SetUDSDir says where the directories of pods' Unix sockets are, an absolute path; empty:
// nobody is delivered to by one. Until it is said, it is model.DefaultUDSDir.
func (x *Index) SetUDSDir(dir string) {
	x.whole = x.whole || x.udsDir != dir
	x.udsDir = dir
}

// UDSRefused is, by container, why pods of this node are not delivered to by the Unix
// socket that was asked for, as of the last Update. Read only.
func (x *Index) UDSRefused() map[string]endpointmeta.UDSReason { return x.udsRefused }

// SetRoutes replaces the route objects of a kind and name: one, or none. More
// than one contradict each other.
func (x *Index) SetRoutes(kind model.RouteKind, namespace, name string, objects []model.Route) {
	k := routeKey{kind, model.ServiceName{Namespace: namespace, Name: name}}
	for _, r := range x.routes[k] {
		for _, s := range r.parents {
			s.parentOf = without(s.parentOf, r)
			x.mark(s, dirtyOut)
		}
		for _, s := range r.backends {
			s.backOf = without(s.backOf, r)
			x.mark(s, 0)
		}
		for _, f := range r.uses {
			if x.users[f] = without(x.users[f], r); len(x.users[f]) == 0 {
				delete(x.users, f)
			}
		}
	}
	delete(x.routes, k)
	x.judged = true
	mine := make([]model.Route, 0, len(objects))
	for _, r := range objects {
		if r.Kind == kind && r.Namespace == namespace && r.Name == name {
			mine = append(mine, r)
		}
	}
	if len(mine) == 0 {
		return
	}
	list := compileRoutes(mine)
	x.routes[k] = list
	for _, r := range list {
		for _, p := range r.Parents {
			if s := x.service(p.Service); !slices.Contains(r.parents, s) {
				r.parents = append(r.parents, s)
				s.parentOf = append(s.parentOf, r)
				x.mark(s, dirtyOut)
			}
		}
		r.refersTo(func(n model.ServiceName) {
			if s := x.service(n); !slices.Contains(r.backends, s) {
				r.backends = append(r.backends, s)
				s.backOf = append(s.backOf, r)
				x.mark(s, 0)
			}
		})
		for i := range r.Rules {
			for j := range r.Rules[i].Filters {
				f := model.ServiceName{Namespace: namespace, Name: r.Rules[i].Filters[j].Extension}
				if f.Name != "" && !slices.Contains(r.uses, f) {
					r.uses = append(r.uses, f)
					x.users[f] = append(x.users[f], r)
				}
			}
		}
	}
}

func without[T comparable](list []T, x T) []T {
	return slices.DeleteFunc(list, func(y T) bool { return y == x })
}

// SetFilters replaces the HTTPFilter objects of a name: one, or none. More than
// one contradict each other.
func (x *Index) SetFilters(namespace, name string, objects []model.HTTPFilter) {
	k := model.ServiceName{Namespace: namespace, Name: name}
	for _, f := range x.filters[k] {
		for _, t := range f.targets {
			s := x.service(t)
			s.targetOf = without(s.targetOf, f)
			x.markGoverned(s)
		}
	}
	delete(x.filters, k)
	x.whole = true
	for _, r := range x.users[k] {
		for _, s := range r.parents {
			x.mark(s, dirtyOut)
		}
	}
	mine := make([]model.HTTPFilter, 0, len(objects))
	for _, f := range objects {
		if f.Namespace == namespace && f.Name == name {
			mine = append(mine, f)
		}
	}
	if len(mine) == 0 {
		return
	}
	list := compileFilters(mine)
	x.filters[k] = list
	for _, f := range list {
		for _, t := range f.targets {
			s := x.service(t)
			s.targetOf = append(s.targetOf, f)
			slices.SortStableFunc(s.targetOf, func(a, b *httpFilter) int {
				return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
			})
			x.markGoverned(s)
		}
	}
}

// markGoverned marks a service whose filters change, and those whose routes lead to it: what
// they may lead to without a ReferenceGrant hangs on its policy.
func (x *Index) markGoverned(s *service) {
	x.mark(s, dirtyOut)
	for _, r := range s.backOf {
		for _, p := range r.parents {
			x.mark(p, dirtyOut)
		}
	}
}

// tooFree is when so many IDs are nobody's that backends get new ones.
const tooFree = 1024

// Update is the snapshot (version 0) of the mesh as it is now, and what of it is
// not, or not wholly, in force, in a stable order. Where nothing changed it is
// the snapshot before.
func (x *Index) Update() (*snapshot.Snapshot, []model.Problem) {
	if len(x.free) > tooFree && len(x.free) > len(x.backends)/2 {
		x.renumber()
	}
	// A change of rows that changes no more than endpoints stops here.
	for _, s := range x.touched {
		if s.dirty&dirtyRows == 0 {
			continue
		}
		keys := s.keys
		if s.readRows() || x.snap == nil {
			s.dirty |= dirtyView
		}
		s.dirty |= dirtySets
		x.whole = x.whole || !slices.Equal(keys, s.keys)
	}
	// What others see, and who sees it. The order is that of names, so that equal
	// meshes get equal IDs.
	sortByName(x.touched)
	for i := 0; i < len(x.touched); i++ {
		s := x.touched[i]
		if s.dirty&dirtyView == 0 {
			continue
		}
		s.dirty |= dirtyOut | dirtySets
		if !x.resolveView(s) || x.snap == nil { // the first time all are marked
			continue
		}
		for _, r := range s.backOf {
			for _, p := range r.parents {
				x.mark(p, dirtyOut)
			}
		}
	}
	sortByName(x.touched)                           // marks were added behind
	for i, end := 0, len(x.touched); i < end; i++ { // those that get backends meanwhile need sets only
		s := x.touched[i]
		if s.dirty&dirtyOut == 0 {
			continue
		}
		was := s.out
		x.finish(s)
		x.judged = true
		x.whole = x.whole || (was == nil) != (s.out == nil) || was != nil && (was.Kubernetes != s.out.Kubernetes || was.Mesh() != s.out.Mesh())
	}
	for _, s := range x.touched {
		if len(s.rowProblems)+len(s.viewProblems)+len(s.problems) > 0 {
			x.troubled[s] = struct{}{}
		} else {
			delete(x.troubled, s)
		}
	}
	x.publish()
	for _, s := range x.touched {
		s.dirty = 0
		if s.idle() {
			delete(x.services, s.name)
			x.sorted = false
		}
	}
	clear(x.touched)
	x.touched = x.touched[:0]
	return x.snap, x.problems
}

// renumber gives all backends new IDs, the lowest there are.
func (x *Index) renumber() {
	x.backends, x.free, x.freed, x.snap, x.whole = nil, nil, nil, nil, true
	for _, s := range x.services {
		s.backends = nil
		x.mark(s, dirtyView|dirtyOut|dirtySets)
	}
}

// publish makes the snapshot of what was worked out.
func (x *Index) publish() {
	var old *snapshot.EndpointTable
	if x.snap != nil {
		old = x.snap.EndpointTable()
	}
	var sets []snapshot.SetAt
	if old == nil {
		sets = make([]snapshot.SetAt, 0, len(x.backends))
	}
	for _, b := range x.freed {
		if x.backends[b.ID] == b { // nobody got its place
			sets = append(sets, snapshot.SetAt{ID: b.ID})
		}
	}
	x.freed = nil
	for _, s := range x.touched {
		if s.dirty&dirtySets != 0 {
			x.makeSets(s, old, func(at snapshot.SetAt) { sets = append(sets, at) })
		}
	}
	table := old
	if old == nil || len(sets) > 0 || old.Len() != len(x.backends) {
		table = old.Update(len(x.backends), sets)
	}
	var backends []*snapshot.Backend
	if x.assigned || x.snap == nil {
		backends = slices.Clone(x.backends)
	} else {
		backends = x.snap.Backends()
	}
	x.assigned = false
	switch {
	case x.whole:
		x.remake(backends, table)
	case x.judged:
		var changed []*snapshot.Service
		for _, s := range x.touched {
			if s.dirty&dirtyOut != 0 && s.out != nil {
				changed = append(changed, s.out)
			}
		}
		x.snap = x.snap.WithServices(changed, backends, table)
	case table != old:
		x.snap = x.snap.WithEndpoints(table)
	}
	if x.judged || x.whole {
		x.judge()
	}
	x.judged, x.whole = false, false
}

// remake makes all tables anew.
func (x *Index) remake(backends []*snapshot.Backend, table *snapshot.EndpointTable) {
	x.sort()
	t := snapshot.Tables{
		Domain: x.domain, Semantics: x.semantics, SameNode: x.sameNode, Services: make([]*snapshot.Service, 0, len(x.order)),
		Addresses: make(map[netip.Addr]*snapshot.Service, len(x.owners)), Backends: backends, Endpoints: table,
	}
	keys := map[string]struct{}{}
	for _, s := range x.order {
		for _, k := range s.keys {
			keys[k] = struct{}{}
		}
		if s.out == nil {
			if s.podless {
				for _, ip := range s.ips {
					if t.Outside == nil {
						t.Outside = map[netip.Addr]model.ServiceName{}
					}
					t.Outside[ip] = s.name
				}
			}
			continue
		}
		t.Services = append(t.Services, s.out)
		for _, ip := range s.ips {
			// Of two claimants both are broken; one whose address is the mesh's goes
			// first, so that the address refuses.
			if was := t.Addresses[ip]; was == nil || !was.Mesh() {
				t.Addresses[ip] = s.out
			}
		}
	}
	t.SubsetKeys = sortedKeys(keys)
	t.Workloads, x.podProblems = x.localPods()
	x.snap = snapshot.New(t)
}

// judge gathers the problems.
func (x *Index) judge() {
	problems := slices.Concat(x.domainProblems, x.podProblems)
	for s := range x.troubled {
		problems = append(append(append(problems, s.rowProblems...), s.viewProblems...), s.problems...)
	}
	for _, list := range x.routes {
		for _, r := range list {
			problems = append(problems, r.problems...)
		}
	}
	for _, list := range x.filters {
		for _, f := range list {
			problems = append(append(append(problems, f.problems...), x.strayTargets(f)...), x.rawTargets(f)...)
		}
	}
	x.problems = sortProblems(append(problems, x.strayPolicies()...))
}

// sort puts the services into the order of names, those that are gone left out.
func (x *Index) sort() {
	if x.sorted {
		return
	}
	x.order = slices.DeleteFunc(x.order, func(s *service) bool { return x.services[s.name] != s })
	sortByName(x.order)
	x.sorted = true
}

func sortByName(list []*service) {
	slices.SortFunc(list, func(a, b *service) int { return model.ServiceName.Compare(a.name, b.name) })
}

// strayTargets are the targets of a filter that are no mesh service.
func (x *Index) strayTargets(f *httpFilter) (out []model.Problem) {
	for _, t := range f.targets {
		switch {
		case x.snap.Service(t) != nil:
		case f.Scope == model.ScopeInbound && slices.ContainsFunc(x.snap.Workloads(), func(w *snapshot.Workload) bool { return w.Service == t }):
		default:
			out = append(out, problem(f.object, "target Service %s: there is no such service in the mesh; check the name, or wait for its pods", t))
		}
	}
	return out
}

// strayPolicies are the EndpointPolicies whose target is no mesh service, and which change nothing.
func (x *Index) strayPolicies() (out []model.Problem) {
	for n, list := range x.policies {
		if x.snap.Service(n) != nil || slices.ContainsFunc(x.snap.Workloads(), func(w *snapshot.Workload) bool { return w.Service == n }) {
			continue
		}
		for _, p := range list {
			out = append(out, problem("EndpointPolicy "+p.Namespace+"/"+p.Name, "targetRef Service %s: there is no such service in the mesh; check the name, or wait for its pods", n))
		}
	}
	return out
}

// rawTargets says on which ports of its targets a filter of SCOPE_INBOUND judges
// nothing: raw TCP has no request that could be judged.
func (x *Index) rawTargets(f *httpFilter) (out []model.Problem) {
	if f.Scope != model.ScopeInbound || f.rbac == nil && f.authz == nil && f.invalid == "" {
		return nil
	}
	for _, t := range f.targets {
		var raw []uint16
		if s := x.services[t]; s != nil {
			for _, r := range s.valid {
				raw = rawPorts(raw, r.Ports)
			}
		}
		for _, w := range x.snap.Workloads() {
			if w.Service == t {
				raw = rawPorts(raw, w.Ports)
			}
		}
		if len(raw) == 0 {
			continue
		}
		slices.Sort(raw)
		out = append(out, problem(f.object, "target Service %s: not judged on raw TCP: %s; policy there needs a NetworkPolicy", t, numbers(raw)))
	}
	return out
}

// rawPorts adds to raw the raw-TCP ports among ports, each once.
func rawPorts(raw []uint16, ports []model.Port) []uint16 {
	for _, p := range ports {
		if p.Class == model.TCP && !model.ReservedPort(p.Number) && !slices.Contains(raw, p.Number) {
			raw = append(raw, p.Number)
		}
	}
	return raw
}

func numbers(ports []uint16) string {
	return strings.Trim(strings.Join(strings.Fields(fmt.Sprint(ports)), ", "), "[]")
}
