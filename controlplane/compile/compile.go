// Package compile makes the data plane's snapshot out of a model of the mesh.
//
//   - Compile is a pure function, and the order of the model's slices does not
//     matter to it.
//   - A bad object is refused alone and named in a Problem. Where leaving it
//     out could open something, it compiles to a refusal instead.
//   - The class of a port of a service is worked out once, from the rows, and
//     every table is built from that value (contract 1.3, 4.12).
//
// It keeps no history: what must be remembered over time is the caller's.
package compile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Compile makes a snapshot (version 0) of m, and lists what of m is not, or
// not wholly, in force. It keeps strings and maps of m, which therefore must not
// change afterwards. Problems are in a stable order.
func Compile(m *model.Mesh) (*snapshot.Snapshot, []model.Problem) {
	c := &compiler{mesh: m, services: map[model.ServiceName]*service{}}
	domain := c.domain()
	c.collectRows()
	c.collectServices()
	for _, s := range c.order {
		c.view(s)
	}
	routes := c.collectRoutes()
	c.attach(routes)

	t := snapshot.Tables{Domain: domain, Addresses: map[netip.Addr]*snapshot.Service{}}
	for _, s := range c.order {
		if out := c.finish(s); out != nil {
			t.Services = append(t.Services, out)
		}
	}
	for _, s := range c.order {
		if s.out == nil {
			continue
		}
		for _, ip := range s.ips {
			// Of two claimants both are broken; one whose address is the mesh's goes
			// first, so that the address refuses.
			if old := t.Addresses[ip]; old == nil || !old.Mesh() {
				t.Addresses[ip] = s.out
			}
		}
	}
	t.Backends = c.backends
	t.Workloads = c.workloads()
	t.Endpoints = endpointTable(t.Backends, nil, c.rowsOf, m)
	slices.SortFunc(c.problems, func(a, b model.Problem) int {
		return cmp.Or(cmp.Compare(a.Object, b.Object), cmp.Compare(a.Where, b.Where), cmp.Compare(a.Reason, b.Reason))
	})
	return snapshot.New(t), slices.Compact(c.problems)
}

// Endpoints makes the endpoint table for s out of m's rows, where the rows
// changed and nothing else of m did. ok is false when that is not enough, for a
// port or service came, went or changed its class, or a row is not valid: then
// Compile it is. Sets that did not change keep their pointers.
func Endpoints(s *snapshot.Snapshot, m *model.Mesh) (t *snapshot.EndpointTable, ok bool) {
	c := &compiler{mesh: m, services: map[model.ServiceName]*service{}}
	c.collectRows()
	if len(c.problems) > 0 {
		return nil, false
	}
	known := 0
	for _, svc := range s.Services() {
		rows := c.rowsOf(svc.Name)
		if len(rows) > 0 {
			known++
		}
		have := classes(rows)
		if len(have) != len(svc.PodPorts) {
			return nil, false
		}
		for i, p := range have {
			if p.disagree != "" || p.number != svc.PodPorts[i].Number || p.class != svc.PodPorts[i].Class {
				return nil, false
			}
		}
		if b := svc.Raw; b != nil && len(rows) > 0 {
			if n, _ := rawPort(rows, have); n != b.Port {
				return nil, false
			}
		}
	}
	if known != len(c.services) {
		return nil, false // rows of a service that s does not have
	}
	return endpointTable(s.Backends(), s.EndpointTable(), c.rowsOf, m), true
}

type compiler struct {
	mesh     *model.Mesh
	problems []model.Problem
	services map[model.ServiceName]*service
	order    []*service // by name
	backends []*snapshot.Backend
}

// service is one mesh service, or a user's Service that may turn out to be none.
type service struct {
	name     model.ServiceName
	objects  []*model.Service // one; none: no Service; more: broken
	ips      []netip.Addr     // ClusterIPs of all objects
	rows     []*model.Endpoint
	classes  []portClass
	ports    []viewPort // what callers may name
	routed   bool       // a route names it
	attached map[uint16][]*route
	broken   string
	byPort   map[uint16]*snapshot.Backend
	texts    *snapshot.Texts
	out      *snapshot.Service
}

// viewPort is a port that callers name, and the pod port behind it.
type viewPort struct {
	number, target uint16
	class          model.Class
}

// portClass is what the majority of a service's rows says a port is.
type portClass struct {
	number   uint16
	class    model.Class
	disagree string // what each side says, when they do
}

func (c *compiler) problem(object, format string, args ...any) {
	c.problems = append(c.problems, model.Problem{Object: object, Reason: fmt.Sprintf(format, args...)})
}

func (c *compiler) domain() string {
	d := strings.ToLower(cmp.Or(c.mesh.Domain, model.DefaultDomain))
	for label := range strings.SplitSeq(d, ".") {
		if !dnsLabel(label) {
			c.problem("mesh domain", "%q is no DNS name; %s is used: set a domain of dot-separated labels, as mesh.example", d, model.DefaultDomain)
			return model.DefaultDomain
		}
	}
	return d
}

// dnsLabel reports whether s can stand between the dots of a mesh name.
func dnsLabel(s string) bool {
	if len(s) == 0 || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

// nameProblem says why a service cannot have a mesh name, or "".
func nameProblem(n model.ServiceName) string {
	for _, part := range []string{n.Namespace, n.Name} {
		if !dnsLabel(part) {
			return fmt.Sprintf("%q cannot be a label of a mesh name: use lower-case letters, digits and -, 63 at most, no dots", part)
		}
	}
	return ""
}

func (c *compiler) service(n model.ServiceName) *service {
	s := c.services[n]
	if s == nil {
		s = &service{name: n, attached: map[uint16][]*route{}, byPort: map[uint16]*snapshot.Backend{}}
		c.services[n] = s
	}
	return s
}

func (c *compiler) rowsOf(n model.ServiceName) []*model.Endpoint {
	if s := c.services[n]; s != nil {
		return s.rows
	}
	return nil
}

// collectServices takes the Service objects and fixes the order of everything.
func (c *compiler) collectServices() {
	objects := make([]*model.Service, 0, len(c.mesh.Services))
	for i := range c.mesh.Services {
		objects = append(objects, &c.mesh.Services[i])
	}
	owner := map[netip.Addr]*service{}
	slices.SortFunc(objects, compareServices)
	for _, o := range objects {
		object := "Service " + o.Name.String()
		if why := nameProblem(o.Name); why != "" {
			c.problem(object, "%s", why)
			continue
		}
		s := c.service(o.Name)
		s.objects = append(s.objects, o)
		if len(s.objects) == 2 {
			c.problem(object, "there are two Services of this name: neither is served; delete one")
			s.broken = "there are two Services of this name"
		}
		for _, ip := range o.ClusterIPs {
			ip = ip.Unmap()
			if !ip.IsValid() || ip.IsUnspecified() {
				c.problem(object, "%s cannot be a ClusterIP: give an address, or none for a headless Service", ip)
				continue
			}
			s.ips = append(s.ips, ip)
			other := owner[ip]
			if other == nil {
				owner[ip] = s
			} else if other != s {
				for _, pair := range [][2]*service{{s, other}, {other, s}} {
					c.problem("Service "+pair[0].name.String(), "ClusterIP %s is Service %s's, too: neither is served; give them different addresses", ip, pair[1].name)
					pair[0].broken = "its ClusterIP " + ip.String() + " is also that of Service " + pair[1].name.String()
				}
			}
		}
	}
	for _, s := range c.services {
		c.order = append(c.order, s)
	}
	slices.SortFunc(c.order, func(a, b *service) int { return compareNames(a.name, b.name) })
}

func compareNames(a, b model.ServiceName) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

// compareServices is a total order but for equal objects.
func compareServices(a, b *model.Service) int {
	if d := compareNames(a.Name, b.Name); d != 0 {
		return d
	}
	return cmp.Compare(fmt.Sprint(*a), fmt.Sprint(*b))
}

func (s *service) user() bool { return len(s.objects) > 0 && !s.generated() }

func (s *service) generated() bool {
	return slices.ContainsFunc(s.objects, func(o *model.Service) bool { return o.Generated })
}

// rule names the object that stands for the service in verdicts.
func (s *service) rule() string {
	if len(s.objects) == 0 {
		return "ServiceAccount " + s.name.String()
	}
	return "Service " + s.name.String()
}

// view works out the ports that callers may name (contract 4.10, 4.6).
func (c *compiler) view(s *service) {
	s.classes = classes(s.rows)
	for _, p := range s.classes {
		if p.disagree != "" {
			c.problem(s.rule(), "its pods disagree on port %d (%s): served as %s, and the others get nothing on it; declare one class in endpoint.aether.io/ports", p.number, p.disagree, p.class)
		}
	}
	var obj *model.Service
	if len(s.objects) > 0 {
		obj = s.objects[0]
	}
	switch {
	case s.broken != "":
	case !s.user() && len(s.rows) > 0:
		for _, p := range s.classes {
			s.ports = append(s.ports, viewPort{p.number, p.number, p.class})
		}
	case !s.user():
		// A generated Service without rows is the only witness of its ports.
		// The registrar's own 18081 and 18082 are spellings, not ports.
		for _, p := range obj.Ports {
			if p.Number == 0 || model.ReservedPort(p.Number) {
				continue
			}
			class := p.Class
			if class == model.ClassNone {
				class = assumed(p)
			}
			s.ports = append(s.ports, viewPort{p.Number, p.Number, class})
		}
	default:
		for _, p := range obj.Ports {
			switch {
			case model.ReservedPort(p.Number):
				c.problem(s.rule(), "port %d is the mesh's own and cannot be reached through it: choose another number", p.Number)
				continue
			case p.Number == 0:
				c.problem(s.rule(), "port 0 is no port: give a number of 1 to 65535")
				continue
			case p.Target == 0:
				c.problem(s.rule(), "port %d names nothing: its targetPort %q is not resolved; use the number", p.Number, p.TargetName)
				continue
			}
			class := assumed(p) // of pods that are not there, nobody can know
			if len(s.rows) > 0 && !p.UDP {
				class = s.class(p.Target)
				if class == model.ClassNone {
					c.problem(s.rule(), "port %d leads to pod port %d, which no pod declares in endpoint.aether.io/ports", p.Number, p.Target)
					continue
				}
			}
			s.ports = append(s.ports, viewPort{p.Number, p.Target, class})
		}
	}
	// One number, two transports: TCP is the one that dials and authorities ask for.
	slices.SortFunc(s.ports, func(a, b viewPort) int {
		return cmp.Or(cmp.Compare(a.number, b.number), cmp.Compare(a.class, b.class), cmp.Compare(a.target, b.target))
	})
	s.ports = slices.CompactFunc(s.ports, func(a, b viewPort) bool { return a.number == b.number })
}

// assumed is the class of a port where no row says any: HTTP, for nothing is
// delivered to a service without rows and a refusal is best said in HTTP.
func assumed(p model.ServicePort) model.Class {
	if p.UDP {
		return model.UDP
	}
	return model.HTTP
}

func (s *service) class(pod uint16) model.Class {
	for _, p := range s.classes {
		if p.number == pod {
			return p.class
		}
	}
	return model.ClassNone
}

func (s *service) port(n uint16) *viewPort {
	for i := range s.ports {
		if s.ports[i].number == n {
			return &s.ports[i]
		}
	}
	return nil
}

// backend is the destination for a pod port of s, made when first asked for.
func (c *compiler) backend(s *service, pod uint16, class model.Class) *snapshot.Backend {
	if class != model.HTTP && class != model.TCP {
		return nil
	}
	b := s.byPort[pod]
	if b == nil {
		number := strconv.Itoa(int(pod))
		b = &snapshot.Backend{Service: s.name, Port: pod, Class: class, ID: len(c.backends), SNI: number, Name: s.name.String() + ":" + number, Texts: c.texts(s)}
		s.byPort[pod] = b
		c.backends = append(c.backends, b)
	}
	return b
}

// finish makes the compiled service; nil: it is no mesh service.
func (c *compiler) finish(s *service) *snapshot.Service {
	out := &snapshot.Service{Name: s.name, Rule: s.rule(), Texts: c.texts(s)}
	switch {
	case s.generated():
		out.Kind, out.Kubernetes = snapshot.Generated, true
		out.Cold = len(s.rows) == 0 && len(s.ports) == 0
	case s.user() && s.routed:
		out.Kind, out.Kubernetes = snapshot.Routed, true
	case s.user() && len(s.rows) > 0:
		out.Kind = snapshot.MeshOnly
	case len(s.rows) > 0:
		out.Kind = snapshot.Bare
	default:
		return nil
	}
	s.out = out
	if s.broken != "" {
		out.Broken = fmt.Sprintf("service %s is not served: %s; the mesh refuses it until that is mended\n", s.name, s.broken)
		out.Cold = false
	}
	for _, p := range s.classes {
		out.PodPorts = append(out.PodPorts, snapshot.Port{Number: p.number, Class: p.class, Backend: c.backend(s, p.number, p.class)})
	}
	if s.broken != "" {
		return out
	}
	var last []*route
	var program *snapshot.Program
	for _, p := range s.ports {
		port := snapshot.Port{Number: p.number, Class: p.class, Backend: c.backend(s, p.target, p.class)}
		if rs := s.attached[p.number]; len(rs) > 0 {
			if !slices.Equal(rs, last) { // most routes name no port: one program serves all of them
				last, program = rs, c.program(rs)
			}
			port.Program = program
		}
		out.Ports = append(out.Ports, port)
	}
	if n, ok := rawPort(s.rows, s.classes); ok {
		out.Raw = s.byPort[n]
	} else if len(s.rows) == 0 {
		for _, p := range s.ports {
			if p.class == model.TCP {
				out.Raw = s.byPort[p.target]
				break
			}
		}
	}
	return out
}

// texts are the refusals' bodies; one string of ports behind all of them.
func (c *compiler) texts(s *service) *snapshot.Texts {
	if s.texts != nil {
		return s.texts
	}
	var b strings.Builder
	fmt.Fprintf(&b, "service %s ", s.name)
	if len(s.ports) == 0 {
		b.WriteString("declares no port that the mesh can reach\n")
	} else {
		b.WriteString("serves ")
		for i, p := range s.ports {
			if i > 0 {
				b.WriteString(", ")
			}
			fmt.Fprintf(&b, "%d (%s)", p.number, p.class)
		}
		b.WriteString("; address it by one of these ports\n")
	}
	tail := b.String()
	s.texts = &snapshot.Texts{
		PortMismatch:    "port-mismatch: " + tail,
		PortNotDeclared: "port-not-declared: " + tail,
		PortNotHTTP:     "port-not-http: " + tail,
		PortRequired:    "port-required: " + tail,
		NoEndpoint:      fmt.Sprintf("no pod of service %s is ready on the port asked for\n", s.name),
	}
	return s.texts
}

// workloads are the pods of this node.
func (c *compiler) workloads() []*snapshot.Workload {
	count := map[string]int{}
	for i := range c.mesh.Workloads {
		count[c.mesh.Workloads[i].ContainerID]++
	}
	var out []*snapshot.Workload
	for i := range c.mesh.Workloads {
		w := &c.mesh.Workloads[i]
		object := "Pod " + w.Namespace + "/" + w.Name
		switch {
		case w.ContainerID == "":
			c.problem(object, "has no container ID: its sockets could not be told from another pod's, so it is not served")
			continue
		case count[w.ContainerID] > 1:
			c.problem(object, "shares container ID %s with another pod: neither is served; remove the stale one", w.ContainerID)
			continue
		case w.SPIFFEID == "":
			c.problem(object, "has no SPIFFE ID: it is not served; set one, or leave aether.io/spiffe-id out for the default")
			continue
		}
		ports, why := cleanPorts(w.Ports)
		if why != "" {
			c.problem(object, "%s", why)
		}
		ips := make([]netip.Addr, 0, len(w.IPs))
		for _, ip := range w.IPs {
			ips = append(ips, ip.Unmap())
		}
		out = append(out, &snapshot.Workload{
			Service: w.Service(), Pod: w.Name, ContainerID: w.ContainerID, NetNS: w.NetNS, SPIFFEID: w.SPIFFEID,
			IPs: ips, DefaultPort: w.DefaultPort, Ports: ports, Capture: w.Capture, Upstreams: w.Upstreams, Rule: object,
		})
	}
	return out
}
