package compile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"aether/controlplane/endpointmeta"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// service is all that is known of one name: of a mesh service, of a user's
// Service that may turn out to be none, or of a name that others only refer to.
type service struct {
	name    model.ServiceName
	badName string // why it cannot be a mesh name

	// What is said of it.
	rows     []*model.Endpoint
	objects  []*model.Service // one; none: no Service; more: broken. In a stable order
	ips      []netip.Addr     // valid ClusterIPs of all objects, ascending
	catalog  bool
	retained []model.Retained
	parentOf []*route      // routes that name it as a parent
	backOf   []*route      // routes that name it as a backend
	targetOf []*httpFilter // filters that name it as a target, by name

	// What the rows say: readRows.
	valid       []*model.Endpoint
	classes     []endpointmeta.PortClass
	uniform     bool
	raw         uint16
	rawOK       bool
	keys        []string
	rowProblems []model.Problem

	// What others see of it: look.
	view
	rule         string // the object that stands for it in verdicts
	viewProblems []model.Problem
	texts        *snapshot.Texts // nil: not made yet
	backends     []*snapshot.Backend

	// What it compiles to: finish.
	out      *snapshot.Service
	policy   *policy // nil: no filter is service-wide
	problems []model.Problem

	dirty dirty
}

// view is what a reference to the service depends on.
type view struct {
	exists bool
	broken string
	ports  []viewPort // what callers may name, ascending by number
	// open: nobody knows its ports yet, so that a reference to any is not known to be wrong.
	open bool
	// keeps: it has no rows, and is kept against its removal (contract 4.12).
	keeps bool
	// podless: a user's Service, and no pod of the mesh has its name as the ServiceAccount.
	podless bool
}

func (v *view) equal(o *view) bool {
	return v.exists == o.exists && v.broken == o.broken && slices.Equal(v.ports, o.ports) && v.open == o.open && v.keeps == o.keeps && v.podless == o.podless
}

// viewPort is a port that callers name, and the pod port behind it.
type viewPort struct {
	number, target uint16
	class          model.Class
	assumed        bool // nobody says the class
}

func (s *service) user() bool { return len(s.objects) > 0 && !s.generated() }

func (s *service) generated() bool {
	return slices.ContainsFunc(s.objects, func(o *model.Service) bool { return o.Generated })
}

func (s *service) await() bool { return s.catalog && s.badName == "" && len(s.valid) == 0 }

// full is "shop/cart".
func (s *service) full() string { return s.rule[strings.IndexByte(s.rule, ' ')+1:] }

// idle reports that nothing speaks of the name any more.
func (s *service) idle() bool {
	return len(s.rows) == 0 && len(s.objects) == 0 && !s.catalog && len(s.retained) == 0 &&
		len(s.parentOf) == 0 && len(s.backOf) == 0 && len(s.targetOf) == 0
}

// resolveView works out what others see of the service (contract 4.6, 4.10, 4.12), and
// reports whether that changed.
func (x *Index) resolveView(s *service) (changed bool) {
	before := s.view
	s.view, s.viewProblems = view{}, nil
	say := func(object, format string, args ...any) {
		s.viewProblems = append(s.viewProblems, problem(object, format, args...))
	}
	// The object that stands for it.
	kind := "ServiceAccount "
	if len(s.objects) > 0 {
		kind = "Service "
	}
	if !strings.HasPrefix(s.rule, kind) {
		s.rule = kind + s.name.Namespace + "/" + s.name.Name
	}
	if s.badName != "" {
		if len(s.objects) > 0 {
			say(s.rule, "%s", s.badName)
		}
		if s.catalog || len(s.retained) > 0 {
			say("ServiceAccount "+s.name.String(), "%s", s.badName)
		}
		x.dropBackends(s)
		return !before.equal(&s.view)
	}
	for _, p := range s.classes {
		if p.Disagree != "" {
			say(s.rule, "its pods disagree on port %d (%s): served as %s, and the others get nothing on it; declare one class in endpoint.aether.io/ports", p.Number, p.Disagree, p.Class)
		}
	}
	x.lookAtObjects(s, say)
	var obj *model.Service
	if len(s.objects) > 0 {
		obj = s.objects[0]
	}
	s.keeps = len(s.retained) > 0 && len(s.valid) == 0 && !(s.generated() && declares(obj))
	s.exists = len(s.valid) > 0 || len(s.objects) > 0 || s.await() || s.keeps
	s.podless = s.user() && len(s.valid) == 0 && !s.await() && !s.keeps
	switch {
	case s.broken != "":
	case s.user():
		s.ports = s.userPorts(obj, say)
	case len(s.valid) > 0:
		s.ports = make([]viewPort, len(s.classes))
		for i, p := range s.classes {
			s.ports[i] = viewPort{p.Number, p.Number, p.Class, false}
		}
	default:
		// A generated Service without rows is the only witness of its ports.
		// The registrar's own 18081 and 18082 are spellings, not ports.
		if s.generated() {
			for _, p := range obj.Ports {
				if p.Number != 0 && !model.ReservedPort(p.Number) {
					s.ports = append(s.ports, viewPort{p.Number, p.Number, cmp.Or(p.Class, assumed(p)), p.Class == model.ClassNone})
				}
			}
		}
		for _, n := range s.retainedPorts() {
			s.ports = append(s.ports, viewPort{n, n, model.HTTP, false})
		}
		s.open = len(s.ports) == 0 && !s.keeps && (s.generated() || s.await())
	}
	if len(s.ports) > 1 {
		// One number, two transports: TCP is the one that dials and authorities ask for.
		slices.SortFunc(s.ports, func(a, b viewPort) int {
			return cmp.Or(cmp.Compare(a.number, b.number), cmp.Compare(a.class, b.class), cmp.Compare(a.target, b.target))
		})
		s.ports = slices.CompactFunc(s.ports, func(a, b viewPort) bool { return a.number == b.number })
	}
	if !slices.Equal(before.ports, s.ports) || before.podless != s.podless {
		s.texts = nil
	}
	x.dropBackends(s)
	return !before.equal(&s.view)
}

// declares reports whether a generated Service has a port of its pods.
func declares(o *model.Service) bool {
	return slices.ContainsFunc(o.Ports, func(p model.ServicePort) bool { return p.Number != 0 && !model.ReservedPort(p.Number) })
}

// lookAtObjects finds what is wrong with the Service objects.
func (x *Index) lookAtObjects(s *service, say func(object, format string, args ...any)) {
	if len(s.objects) > 1 {
		say(s.rule, "there are two Services of this name: neither is served; delete one")
		s.broken = "there are two Services of this name"
	}
	for _, o := range s.objects {
		for _, ip := range o.ClusterIPs {
			if ip = ip.Unmap(); !ip.IsValid() || ip.IsUnspecified() {
				say(s.rule, "%s cannot be a ClusterIP: give an address, or none for a headless Service", ip)
			}
		}
	}
	for _, ip := range s.ips {
		other := x.owners[ip].other(s)
		if other == nil {
			continue
		}
		say(s.rule, "ClusterIP %s is Service %s's, too: neither is served; give them different addresses", ip, other.name)
		if s.broken == "" {
			s.broken = "its ClusterIP " + ip.String() + " is also that of Service " + other.name.String()
		}
	}
}

// userPorts is the port map of a user's Service (contract 4.10).
func (s *service) userPorts(obj *model.Service, say func(object, format string, args ...any)) (out []viewPort) {
	kept := s.retainedPorts()
	for _, p := range obj.Ports {
		switch {
		case model.ReservedPort(p.Number):
			say(s.rule, "port %s is the mesh's own and cannot be reached through it: choose another number", model.PortKey(p.Number, p.UDP))
			continue
		case p.Number == 0:
			say(s.rule, "port 0 is no port: give a number of 1 to 65535")
			continue
		case model.ReservedPort(p.Target): // contract 1.3: no pod's port
			say(s.rule, "port %s leads to pod port %d, which is the mesh's own and no pod's: choose another targetPort", model.PortKey(p.Number, p.UDP), p.Target)
			continue
		case p.Target == 0:
			say(s.rule, "port %s names nothing: its targetPort %q is not resolved; use the number", model.PortKey(p.Number, p.UDP), p.TargetName)
			s.viewProblems[len(s.viewProblems)-1].Part = model.PortPart(&p)
			continue
		}
		v := viewPort{p.Number, p.Target, assumed(p), !p.UDP} // of pods that are not there, nobody can know
		switch {
		case len(s.valid) > 0 && !p.UDP:
			if v.class, v.assumed = s.class(p.Target), false; v.class == model.ClassNone {
				say(s.rule, "port %d leads to pod port %d, which no pod declares in endpoint.aether.io/ports", p.Number, p.Target)
				continue
			}
		case s.keeps:
			if v.assumed = false; p.UDP || !slices.Contains(kept, p.Target) {
				continue
			}
		}
		out = append(out, v)
	}
	return out
}

// retainedPorts are the HTTP ports that a service keeps, ascending; none if it keeps nothing.
func (s *service) retainedPorts() (out []uint16) {
	if !s.keeps {
		return nil
	}
	for _, r := range s.retained {
		for _, n := range r.Ports {
			if n != 0 && !model.ReservedPort(n) {
				out = append(out, n)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
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
	for i := range s.classes {
		if s.classes[i].Number == pod {
			return s.classes[i].Class
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

// portList is "8080 (http), 9000 (tcp)", or "no port".
func (s *service) portList() string { return cmp.Or(string(s.appendPorts(nil)), "no port") }

func (s *service) appendPorts(b []byte) []byte {
	for i := range s.ports {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = strconv.AppendUint(b, uint64(s.ports[i].number), 10)
		b = append(b, " ("...)
		b = append(b, s.ports[i].class.String()...)
		b = append(b, ')')
	}
	return b
}

// text is the refusals' bodies, all in one string: they are most of what a service weighs.
func (x *Index) text(s *service) *snapshot.Texts {
	if s.texts != nil {
		return s.texts
	}
	full := s.full()
	b := x.scratch[:0]
	var ends [5]int
	for i, reason := range [...]string{"port-mismatch", "port-not-declared", "port-not-http", "port-required"} {
		b = append(append(append(append(b, reason...), ": service "...), full...), ' ')
		if len(s.ports) == 0 {
			b = append(b, "declares no port that the mesh can reach\n"...)
		} else {
			b = append(s.appendPorts(append(b, "serves "...)), "; address it by one of these ports\n"...)
		}
		ends[i] = len(b)
	}
	b = append(append(b, "no pod of service "...), full...)
	if s.podless {
		b = append(append(append(b, " is in the mesh: none has the ServiceAccount "...), s.name.Name...), ", and a service's pods are found by their ServiceAccount, not by a selector\n"...)
	} else {
		b = append(b, " is ready on the port asked for\n"...)
	}
	ends[4] = len(b)
	x.scratch = b
	all := string(b)
	s.texts = &snapshot.Texts{
		PortMismatch: all[:ends[0]], PortNotDeclared: all[ends[0]:ends[1]], PortNotHTTP: all[ends[1]:ends[2]],
		PortRequired: all[ends[2]:ends[3]], NoEndpoint: all[ends[3]:],
	}
	return s.texts
}

// backend is the destination for a pod port of s, made when first asked for.
func (x *Index) backend(s *service, pod uint16, class model.Class) *snapshot.Backend {
	if class != model.HTTP && class != model.TCP {
		return nil
	}
	for _, b := range s.backends {
		if b.Port == pod && b.Class == class {
			return b
		}
	}
	b := x.newBackend(s, pod, class)
	x.assigned = true
	if n := len(x.free); n > 0 {
		b.ID = x.free[n-1]
		x.free = x.free[:n-1]
		x.backends[b.ID] = b
	} else {
		b.ID = len(x.backends)
		x.backends = append(x.backends, b)
	}
	s.backends = append(s.backends, b)
	x.mark(s, dirtySets)
	return b
}

// newBackend is a destination that stands in no table: it has no endpoints.
func (x *Index) newBackend(s *service, pod uint16, class model.Class) *snapshot.Backend {
	sni := x.numbers[pod]
	if sni == "" {
		sni = strconv.Itoa(int(pod))
		x.numbers[pod] = sni
	}
	return &snapshot.Backend{Service: s.name, Port: pod, Class: class, ID: -1, SNI: sni, Name: s.name.Namespace + "/" + s.name.Name + ":" + sni, Texts: x.text(s)}
}

// dropBackends gives up those that the service's ports do not lead to any more,
// or whose texts are not true any more.
func (x *Index) dropBackends(s *service) {
	if len(s.backends) == 0 {
		return
	}
	kept := make([]*snapshot.Backend, 0, len(s.backends))
	for _, b := range s.backends {
		there := slices.ContainsFunc(s.ports, func(p viewPort) bool { return p.target == b.Port && p.class == b.Class }) || s.class(b.Port) == b.Class
		if there && b.Texts == s.texts {
			kept = append(kept, b)
			continue
		}
		x.free = append(x.free, b.ID)
		x.freed = append(x.freed, b)
	}
	s.backends = kept
}

// finish makes the compiled service, or nil where it is no mesh service.
func (x *Index) finish(s *service) {
	s.out, s.problems = nil, nil
	s.policy = x.policyOf(s)
	at := x.attach(s)
	// The routes were judged; now what the service is.
	out := &snapshot.Service{Name: s.name, Rule: s.rule, Await: s.await()}
	switch {
	case !s.exists:
		return
	case s.generated():
		out.Kind, out.Kubernetes = snapshot.Generated, true
	case s.user() && at.routed:
		out.Kind, out.Kubernetes = snapshot.Routed, true
	case s.user() && (len(s.valid) > 0 || s.keeps || s.await()):
		out.Kind = snapshot.MeshOnly
	case s.user():
		return // pods of other accounts, or none
	default:
		out.Kind = snapshot.Bare
	}
	s.out = out
	out.Texts = x.text(s)
	self := s.self()
	if s.broken == "" {
		out.Cold = s.open
		out.Ports = make([]snapshot.Port, len(s.ports))
		for i, p := range s.ports {
			port := &out.Ports[i]
			*port = snapshot.Port{Number: p.number, Class: p.class, Backend: x.backend(s, p.target, p.class)}
			switch {
			case p.class == model.HTTP:
				port.Self = self
				port.Program, port.Consumers = at.programs(x, p.number)
			case p.class == model.TCP:
				port.Split, port.Splits = at.splits(x, p.number)
			}
		}
		out.TLS = at.arms(x)
	} else {
		out.Broken = fmt.Sprintf("service %s is not served: %s; the mesh refuses it until that is mended\n", s.name, s.broken)
	}
	s.problems = sortProblems(s.problems)
	switch {
	case !s.user() && s.broken == "" && len(s.valid) > 0:
		out.PodPorts = out.Ports // the same by definition
	default:
		for _, p := range s.classes {
			out.PodPorts = append(out.PodPorts, x.podPort(s, self, p.Number, p.Class))
		}
		if s.user() {
			for _, n := range s.retainedPorts() {
				out.PodPorts = append(out.PodPorts, x.podPort(s, self, n, model.HTTP))
			}
		}
	}
	switch {
	case s.broken != "":
	case s.rawOK:
		out.Raw = x.backend(s, s.raw, model.TCP)
	case len(s.valid) == 0:
		for _, p := range s.ports {
			if p.class == model.TCP {
				out.Raw = x.backend(s, p.target, p.class)
				break
			}
		}
	}
}

func (x *Index) podPort(s *service, self *snapshot.Rule, n uint16, class model.Class) snapshot.Port {
	p := snapshot.Port{Number: n, Class: class, Backend: x.backend(s, n, class)}
	if class == model.HTTP {
		p.Self = self
	}
	return p
}

// emptyPipe and plainSelf stand wherever there is no filter.
var (
	emptyPipe = &snapshot.FilterChain{}
	plainSelf = &snapshot.Rule{Pipe: emptyPipe}
)

// self is what happens to a request that no rule takes.
func (s *service) self() *snapshot.Rule {
	switch {
	case s.policy == nil:
		return plainSelf
	case s.policy.refusal != "":
		return &snapshot.Rule{Invalid: s.policy.refusal, Pipe: refusePipe}
	}
	return &snapshot.Rule{Pipe: s.policy.base[producer]}
}
