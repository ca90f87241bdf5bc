package reference

import (
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"sort"
	"strings"

	"aether/dataplane/model"
)

// world is the facts of one mesh, worked out for one question.
type world struct {
	m        *model.Mesh
	rows     []model.Endpoint // those that are served, one a pod
	services []*service       // ascending by name
}

// kind of a service: where its names and ports come from (contract 4.5, 4.9, 4.10).
type kind string

const (
	bare      kind = "bare"
	generated kind = "generated"
	routed    kind = "routed"
	meshOnly  kind = "meshOnly"
)

type service struct {
	name   model.ServiceName
	kind   kind
	broken bool
	ports  []port // what a dial or an authority may name
	pods   []port // as the pods declare them
	cold   bool   // nothing says which ports it has
	await  bool   // in the catalog, and no row is here yet (4.6)
	ips    []netip.Addr
	rows   []model.Endpoint
}

// port of a service: the number that callers name, and the pods' own.
type port struct {
	number, target uint16
	class          model.Class
	guess          bool // nothing says what it speaks: HTTP is a guess (10.4)
}

func (s *service) port(n uint16) (port, bool) { return findPort(s.ports, n) }

func findPort(of []port, n uint16) (port, bool) {
	for _, p := range of {
		if p.number == n {
			return p, true
		}
	}
	return port{}, false
}

// mesh: a dial to its ClusterIP is the mesh's (4.9).
func (s *service) mesh() bool { return s.kind == generated || s.kind == routed }

// kubernetes: it answers to its Kubernetes names, the short one included (4.5).
func (s *service) kubernetes() bool { return s.mesh() }

// see works the facts of m out.
func see(m *model.Mesh) *world {
	w := &world{m: m, rows: servedRows(m)}
	for _, n := range candidateNames(m, w.rows) {
		if s := w.makeService(n); s != nil {
			w.services = append(w.services, s)
		}
	}
	return w
}

func (w *world) service(n model.ServiceName) *service {
	for _, s := range w.services {
		if s.name == n {
			return s
		}
	}
	return nil
}

var (
	labelForm  = regexp.MustCompile(`\A[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\z`)
	dotSegment = regexp.MustCompile(`/\.\.?(/|\z)`) // SPIFFE ID specification 2.2
	spiffeForm = regexp.MustCompile(`\Aspiffe://[a-z0-9._-]+(/[a-zA-Z0-9._-]+)+\z`)
)

// nameable: both parts can be labels of a mesh name (4.5).
func nameable(n model.ServiceName) bool {
	return labelForm.MatchString(n.Namespace) && labelForm.MatchString(n.Name)
}

// rowValid is contract 9.3, and 1.3's reserved ports, which are left off: ok is
// false when the row is dropped whole.
func rowValid(e model.Endpoint) (model.Endpoint, bool) {
	if !nameable(e.Service) || !e.IP.IsValid() || !spiffeForm.MatchString(e.SPIFFEID) || dotSegment.MatchString(e.SPIFFEID) {
		return e, false
	}
	kept, ok := portsValid(e.Ports)
	e.Ports = kept
	e.IP = e.IP.Unmap()
	return e, ok && len(kept) > 0
}

// portsValid is what pods may declare: each number once, each with a class (9.3);
// the reserved ones are left off (1.3).
func portsValid(ports []model.Port) (kept []model.Port, ok bool) {
	for i, p := range ports {
		if p.Class == model.ClassNone || p.Number == 0 {
			return nil, false
		}
		for _, q := range ports[:i] {
			if p.Number == q.Number {
				return nil, false
			}
		}
		if !model.ReservedPort(p.Number) {
			kept = append(kept, p)
		}
	}
	return kept, true
}

// servedRows are the valid rows, each pod once. A pod is registered once a class
// (9.4), so the same row may stand there several times, of which the worst
// health counts; rows of one address that differ otherwise contradict each other
// and none is served.
func servedRows(m *model.Mesh) []model.Endpoint {
	var valid []model.Endpoint
	for _, e := range m.Endpoints {
		if e, ok := rowValid(e); ok {
			valid = append(valid, e)
		}
	}
	var out []model.Endpoint
	for i, e := range valid {
		first, contradicted := true, false
		for j, o := range valid {
			if o.IP != e.IP || o.Service != e.Service || i == j {
				continue
			}
			if j < i {
				first = false
			}
			if !samePod(e, o) {
				contradicted = true
			}
			if !healthy(o.Health) {
				e.Health = o.Health
			}
		}
		if first && !contradicted {
			out = append(out, e)
		}
	}
	return out
}

// samePod: the rows differ in health alone.
func samePod(a, b model.Endpoint) bool {
	a.Health, b.Health = 0, 0
	byNumber := func(p []model.Port) []model.Port {
		p = slices.Clone(p)
		sort.Slice(p, func(i, j int) bool { return p[i].Number < p[j].Number })
		for i := range p {
			p[i].App = 0 // node-local, never in a row (1.3)
		}
		return p
	}
	a.Ports, b.Ports = byNumber(a.Ports), byNumber(b.Ports)
	if len(a.Metadata) == 0 && len(b.Metadata) == 0 {
		a.Metadata, b.Metadata = nil, nil
	}
	return reflect.DeepEqual(a, b)
}

// healthy is contract 5.5: unspecified counts as healthy.
func healthy(h model.Health) bool { return h == model.HealthUnspecified || h == model.Healthy }

// candidateNames are all names that anything speaks of, ascending.
func candidateNames(m *model.Mesh, rows []model.Endpoint) []model.ServiceName {
	var out []model.ServiceName
	add := func(n model.ServiceName) {
		if nameable(n) && !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	for _, e := range rows {
		add(e.Service)
	}
	for _, s := range m.Services {
		add(s.Name)
	}
	for _, n := range m.Catalog {
		add(n)
	}
	for _, r := range m.Retained {
		add(r.Service)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].String() < out[j].String() })
	return out
}

// makeService is nil where the name is no mesh service at all.
func (w *world) makeService(n model.ServiceName) *service {
	s := &service{name: n}
	for _, e := range w.rows {
		if e.Service == n {
			s.rows = append(s.rows, e)
		}
	}
	var objects []model.Service
	for _, o := range w.m.Services {
		if o.Name == n {
			objects = append(objects, o)
			s.ips = append(s.ips, unmapped(o.ClusterIPs)...)
		}
	}
	s.pods = podPorts(s.rows)
	s.await = len(s.rows) == 0 && slices.Contains(w.m.Catalog, n)
	kept, isRetained := w.retained(s, objects)
	if isRetained {
		s.pods = kept
	}
	known := len(s.rows) > 0 || isRetained
	taken := w.addressTaken(s)

	switch {
	case len(objects) == 0:
		s.kind, s.ports = bare, s.pods
	case anyGenerated(objects):
		s.kind, s.ports = generated, s.pods
		if !known {
			s.ports = generatedPorts(objects[0])
		}
	default:
		s.kind, s.ports = meshOnly, userPorts(objects[0], s.pods, known)
		if isRetained { // those HTTP ports, and no others
			s.ports = slices.DeleteFunc(s.ports, func(p port) bool { return p.class != model.HTTP })
		}
		if w.aRouteNames(s, len(objects) > 1 || taken) {
			s.kind = routed
		}
	}
	s.cold = !known && len(s.ports) == 0 && s.kind != meshOnly && s.kind != routed
	s.broken = len(objects) > 1 || taken

	if len(s.rows) > 0 || s.await || isRetained || s.mesh() {
		return s
	}
	return nil
}

func unmapped(of []netip.Addr) (out []netip.Addr) {
	for _, a := range of {
		out = append(out, a.Unmap())
	}
	return out
}

func anyGenerated(of []model.Service) bool {
	for _, o := range of {
		if o.Generated {
			return true
		}
	}
	return false
}

// addressTaken: a ClusterIP of the service is another Service's, too.
func (w *world) addressTaken(s *service) bool {
	for _, o := range w.m.Services {
		if o.Name == s.name || !nameable(o.Name) {
			continue
		}
		for _, a := range unmapped(o.ClusterIPs) {
			if slices.Contains(s.ips, a) {
				return true
			}
		}
	}
	return false
}

// retained is contract 4.12 with 13's retention: kept against a removal, replaced
// on evidence, which is rows, or a port of the generated Service.
func (w *world) retained(s *service, objects []model.Service) (ports []port, ok bool) {
	if len(s.rows) > 0 {
		return nil, false
	}
	for _, o := range objects {
		if o.Generated && len(generatedPorts(o)) > 0 {
			return nil, false
		}
	}
	for _, r := range w.m.Retained {
		if r.Service != s.name {
			continue
		}
		ok = true
		for _, n := range r.Ports {
			if _, there := findPort(ports, n); !there && !model.ReservedPort(n) {
				ports = append(ports, port{number: n, target: n, class: model.HTTP})
			}
		}
	}
	return ports, ok
}

// podPorts is the majority rule of 1.3: by number the class that most rows say; a
// tie goes to HTTP before TCP before UDP.
func podPorts(rows []model.Endpoint) (out []port) {
	votes := map[uint16]map[model.Class]int{}
	for _, e := range rows {
		for _, p := range e.Ports {
			if votes[p.Number] == nil {
				votes[p.Number] = map[model.Class]int{}
			}
			votes[p.Number][p.Class]++
		}
	}
	for n, v := range votes {
		best := model.HTTP
		for _, c := range []model.Class{model.TCP, model.UDP} {
			if v[c] > v[best] {
				best = c
			}
		}
		out = append(out, port{number: n, target: n, class: best})
	}
	sortPorts(out)
	return out
}

func sortPorts(p []port) { sort.Slice(p, func(i, j int) bool { return p[i].number < p[j].number }) }

// onePort keeps one of the ports of a number: HTTP before TCP before UDP, then the
// lowest target. One number of two transports is ordinary, the stream is what is asked for;
// two of one transport Kubernetes does not allow, and any order of them must
// mean the same.
func onePort(of []port) (out []port) {
	sort.Slice(of, func(i, j int) bool {
		a, b := of[i], of[j]
		switch {
		case a.number != b.number:
			return a.number < b.number
		case a.class != b.class:
			return a.class < b.class
		}
		return a.target < b.target
	})
	for _, p := range of {
		if _, there := findPort(out, p.number); !there {
			out = append(out, p)
		}
	}
	return out
}

// generatedPorts is 4.6: while no endpoint is known, the ports are read from the
// generated Service. Its mesh and mesh-tcp ports are the reserved ones.
func generatedPorts(o model.Service) (out []port) {
	for _, sp := range o.Ports {
		p := port{number: sp.Number, target: sp.Number, class: sp.Class}
		switch {
		case sp.UDP:
			p.class = model.UDP
		case p.class == model.ClassNone: // not said: as with a user's, no node can know
			p.class, p.guess = model.HTTP, true
		}
		if !model.ReservedPort(sp.Number) {
			out = append(out, p)
		}
	}
	return onePort(out)
}

// userPorts is the port map of 4.10: a Service's number leads to its targetPort
// and has the class that the pods declare there. What leads nowhere names nothing.
// Without a row no node can know the classes (10.4): they count as HTTP then, so
// that nothing is refused as wrong that may be right.
func userPorts(o model.Service, pods []port, known bool) (out []port) {
	for _, sp := range o.Ports {
		if model.ReservedPort(sp.Number) || model.ReservedPort(sp.Target) || sp.Target == 0 {
			continue // no pod can declare it, or its name is not resolved
		}
		p := port{number: sp.Number, target: sp.Target, class: model.HTTP, guess: !known && !sp.UDP}
		if sp.UDP {
			p.class = model.UDP
		} else if known {
			pod, ok := findPort(pods, sp.Target)
			if !ok {
				continue
			}
			p.class = pod.class
		}
		out = append(out, p)
	}
	return onePort(out)
}

// byAddress is the mesh service whose ClusterIP a is (4.2, 4.9).
func (w *world) byAddress(a netip.Addr) *service {
	for _, s := range w.services {
		if s.mesh() && slices.Contains(s.ips, a.Unmap()) {
			return s
		}
	}
	return nil
}

// rawPort is the default TCP port of 4.2 step 3, a port of the pods: the declared
// port if it is TCP, else the lowest-numbered TCP port. Where a Service port leads
// to it, it is that port, so that what is attached to it is in force (4.12).
func (s *service) rawPort() (port, bool) {
	pods := s.pods
	if len(s.rows) == 0 {
		pods = s.ports
	}
	declared, votes := uint16(0), map[uint16]int{}
	for _, e := range s.rows { // the majority's, a tie goes to the lowest
		n := e.DefaultPort
		votes[n]++
		if votes[n] > votes[declared] || votes[n] == votes[declared] && n < declared {
			declared = n
		}
	}
	var best port
	found := false
	for _, p := range pods {
		if p.class == model.TCP && (!found || p.target == declared) {
			best, found = p, true
		}
	}
	for _, p := range s.ports {
		if found && p.class == model.TCP && p.target == best.target {
			return p, true
		}
	}
	best.number = 0 // no Service port leads there, and nothing can be attached to it
	return best, found
}

// endpoint of a backend, with its priority (5.5).
type endpoint struct {
	model.Endpoint
	priority int
}

// endpoints is contract 5.5: the rows that declare the port with the class that
// the service serves it as.
func (w *world) endpoints(s *service, p port) (out []endpoint) {
	for _, e := range s.rows {
		for _, q := range e.Ports {
			if q.Number == p.target && q.Class == p.class {
				out = append(out, endpoint{e, w.priority(e)})
			}
		}
	}
	return out
}

// priority is the table of 5.5.
func (w *world) priority(e model.Endpoint) int {
	switch {
	case w.m.Region == "":
		return 0
	case e.Region != w.m.Region:
		return 2
	case w.m.Zone == "" || e.Zone == w.m.Zone:
		return 0
	}
	return 1
}

// workload is the pod that a flow belongs to: by container where it is known,
// else the first of the ServiceAccount.
func (w *world) workload(f *model.Flow) *model.Workload {
	var found *model.Workload
	for i := range w.m.Workloads {
		x := &w.m.Workloads[i]
		if !w.served(x) {
			continue
		}
		if f.Container != "" {
			if x.ContainerID == f.Container {
				found = x
			}
			continue
		}
		if x.Namespace == f.Namespace && x.Account == f.Workload && (found == nil || x.ContainerID < found.ContainerID) {
			found = x
		}
	}
	return found
}

// served: it has an identity, and its container is nobody else's.
func (w *world) served(x *model.Workload) bool {
	same := 0
	for i := range w.m.Workloads {
		if w.m.Workloads[i].ContainerID == x.ContainerID {
			same++
		}
	}
	return same == 1 && x.SPIFFEID != ""
}

// domain of mesh names, lower case.
func (w *world) domain() string { return strings.ToLower(w.m.Domain) }
