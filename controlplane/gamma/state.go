package gamma

import (
	"fmt"
	"maps"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"aether/controlplane/input"
	"aether/dataplane/model"
)

// The kinds of objects that State takes beside Service and EndpointSlice.
const (
	KindHTTPRoute      = "HTTPRoute"
	KindGRPCRoute      = "GRPCRoute"
	KindTCPRoute       = "TCPRoute"
	KindTLSRoute       = "TLSRoute"
	KindUDPRoute       = "UDPRoute"
	KindReferenceGrant = "ReferenceGrant"
	KindHTTPFilter     = "HTTPFilter"
	KindEndpointPolicy = "EndpointPolicy"
	KindMeshConfig     = "MeshConfig"
	KindService        = "Service"
	KindEndpointSlice  = "EndpointSlice"
)

// name is the namespace and name of any object.
type name = model.ServiceName

// State is the objects of one API server and what they come to, each translated once and
// again only when it changes, or what it depends on: a route into other namespaces on
// their ReferenceGrants, a Service with named target ports on its EndpointSlices. What
// changed by it is collected until Take. Not safe for concurrent use.
type State struct {
	namespace string // of the control plane
	flags     input.Settings

	services map[name]*service
	named    map[name]bool // Services with a named target port
	slices   map[name]*slice
	of       map[name]map[name]*slice // EndpointSlices by their Service
	unread   string                   // why EndpointSlices are not known; empty: they are

	routes   map[input.RouteKey]*route
	pointing map[string]map[input.RouteKey]bool // routes with references into a namespace, by that
	grants   map[string]map[string]*Grant       // by namespace and name

	filters    map[name]model.HTTPFilter
	good       map[name]model.HTTPFilter // of filters: as they were last without doubt
	policies   map[name]*endpointPolicy
	aimed      map[name]map[name]bool        // EndpointPolicies by their Service
	chosen     map[name]model.EndpointPolicy // of them that in force, by Service
	meshes     map[name]*Mesh                // as they were last good
	settings   input.Settings
	namespaces map[string][]input.Override
	unsaid     bool // the whole state had no settings: the MeshConfig that has them cannot be read

	problems map[string][]model.Problem // by the object's label
	objects  map[string]map[name]bool   // what there is of each kind
	batch    input.Batch
	resolved int // translations of routes and Services, for tests
}

type service struct {
	facts *Service
	said  []Problem // of the facts
	out   model.Service
}

type route struct {
	facts *Route
	good  *Route // facts as they were last without doubt; nil: they never were
	said  []Problem
	out   model.Route
}

// slice is what an EndpointSlice says of ports.
type slice struct {
	service name
	ports   []slicePort
}

type slicePort struct {
	name   string // of the Service's port
	udp    bool
	number uint16
}

type endpointPolicy struct {
	model.EndpointPolicy
	said []Problem
}

// NewState makes an empty State of a mesh whose control plane is in namespace (empty:
// MeshNamespace); flags are the settings where its MeshConfig says nothing.
func NewState(namespace string, flags input.Settings) *State {
	if namespace == "" {
		namespace = MeshNamespace
	}
	return &State{
		namespace: namespace, flags: flags, settings: flags,
		services: map[name]*service{}, named: map[name]bool{}, slices: map[name]*slice{}, of: map[name]map[name]*slice{},
		routes: map[input.RouteKey]*route{}, pointing: map[string]map[input.RouteKey]bool{}, grants: map[string]map[string]*Grant{},
		filters: map[name]model.HTTPFilter{}, good: map[name]model.HTTPFilter{}, policies: map[name]*endpointPolicy{}, aimed: map[name]map[name]bool{}, chosen: map[name]model.EndpointPolicy{}, meshes: map[name]*Mesh{}, namespaces: map[string][]input.Override{},
		problems: map[string][]model.Problem{}, objects: map[string]map[name]bool{},
		unread: NotRead,
	}
}

// Take gives what changed since it was called last.
func (s *State) Take() input.Batch {
	b := s.batch
	s.batch = input.Batch{}
	return b
}

// Whole gives all there is, settings included, unless their MeshConfig is refused and was never seen otherwise.
func (s *State) Whole() input.Batch {
	settings := s.settings
	b := input.Batch{Tables: input.Tables{
		Services:   make(map[name][]model.Service, len(s.services)),
		Routes:     make(map[input.RouteKey][]model.Route, len(s.routes)),
		Filters:    make(map[name][]model.HTTPFilter, len(s.filters)),
		Policies:   make(map[name][]model.EndpointPolicy, len(s.chosen)),
		Problems:   maps.Clone(s.problems),
		Namespaces: maps.Clone(s.namespaces),
	}, Settings: &settings}
	if s.unsaid {
		b.Settings, b.KeepSettings = nil, true
	}
	for n, e := range s.services {
		b.Services[n] = []model.Service{e.out}
	}
	for k, e := range s.routes {
		b.Routes[k] = []model.Route{e.out}
	}
	for n, f := range s.filters {
		b.Filters[n] = []model.HTTPFilter{f}
	}
	for n, p := range s.chosen {
		b.Policies[n] = []model.EndpointPolicy{p}
	}
	return b
}

// Names are the objects there are of a kind, in any order.
func (s *State) Names(kind string) []model.ServiceName {
	return slices.Collect(maps.Keys(s.objects[kind]))
}

// Count is how many objects there are of a kind.
func (s *State) Count(kind string) int { return len(s.objects[kind]) }

// Named are the Services whose named target ports only their EndpointSlices can tell
// (contract 4.10), ascending.
func (s *State) Named() []model.ServiceName {
	return slices.SortedFunc(maps.Keys(s.named), model.ServiceName.Compare)
}

func (s *State) note(kind string, n name) {
	if s.objects[kind] == nil {
		s.objects[kind] = map[name]bool{}
	}
	s.objects[kind][n] = true
}

// tell puts the problems of an object into the batch, if they are others than before.
func (s *State) tell(kind string, n name, said []Problem) {
	label := Label(kind, n.Namespace, n.Name)
	var list []model.Problem
	for _, p := range said {
		list = append(list, model.Problem{Object: p.Object, Where: Place(p.File, p.Line), Reason: p.Reason, Part: p.Part})
	}
	if slices.Equal(list, s.problems[label]) {
		return
	}
	if s.problems[label] = list; len(list) == 0 {
		delete(s.problems, label)
	}
	s.batch.Problems.Change(label, list)
}

// Say puts a problem of an object that is none of State's into the batch; no reason: it is over.
func (s *State) Say(object, reason string) {
	if was := s.problems[object]; reason == "" && was == nil || len(was) == 1 && was[0].Reason == reason {
		return
	}
	var list []model.Problem
	if reason != "" {
		list = []model.Problem{{Object: object, Reason: reason}}
		s.problems[object] = list
	} else {
		delete(s.problems, object)
	}
	s.batch.Problems.Change(object, list)
}

// SetService takes a Service that is new or has changed.
func (s *State) SetService(svc *corev1.Service) {
	n := name{Namespace: svc.Namespace, Name: svc.Name}
	s.note(KindService, n)
	r := Reader{API: true}
	facts := r.Service(Object{Kind: KindService, Namespace: n.Namespace, Name: n.Name}, svc)
	switch e := s.services[n]; {
	case facts == nil && e != nil: // to forget it would let what is sent to its address go by its routes
		r.Report(Label(KindService, n.Namespace, n.Name), 0, "%s", stays)
		e.said = r.Problems
		s.resolveService(n, false)
		return
	case facts == nil:
		s.tell(KindService, n, r.Problems)
		return
	}
	e := s.services[n]
	fresh := e == nil
	if fresh {
		e = &service{}
		s.services[n] = e
	}
	e.facts, e.said = facts, r.Problems
	if slices.ContainsFunc(facts.Service.Ports, func(p model.ServicePort) bool { return p.TargetName != "" }) {
		s.named[n] = true
	} else {
		delete(s.named, n)
	}
	s.resolveService(n, fresh)
}

// resolveService gives named target ports the numbers that the EndpointSlices say (contract 4.10).
func (s *State) resolveService(n name, fresh bool) {
	e := s.services[n]
	if e == nil {
		return
	}
	s.resolved++
	out, said := e.facts.Service, slices.Clone(e.said)
	if s.named[n] {
		out.Ports = slices.Clone(out.Ports)
	}
	for i := range out.Ports {
		p := &out.Ports[i]
		if p.TargetName == "" {
			continue
		}
		var why string
		if p.Target, why = s.target(n, p, out.Generated); why != "" {
			said = append(said, Problem{Object: Label(KindService, n.Namespace, n.Name), Part: model.PortPart(p), Reason: fmt.Sprintf(
				"spec.ports: port %s: targetPort %q names nothing: %s; what is sent to it is refused until that changes", model.PortKey(p.Number, p.UDP), p.TargetName, why)})
		}
	}
	if fresh || !reflect.DeepEqual(out, e.out) {
		e.out = out
		s.batch.Services.Change(n, []model.Service{out})
	}
	s.tell(KindService, n, said)
}

// target is the number that all of the Service's slices give to a port, or why there is none.
func (s *State) target(n name, p *model.ServicePort, generated bool) (uint16, string) {
	if s.unread != "" {
		return 0, "the Service's EndpointSlices are not known: " + s.unread
	}
	var found uint16
	for _, sl := range s.of[n] {
		for _, q := range sl.ports {
			switch {
			case q.name != p.Name || q.udp != p.UDP:
			case found != 0 && found != q.number:
				return 0, fmt.Sprintf("the Service's pods disagree, %d and %d: give the port one number in all of them", min(found, q.number), max(found, q.number))
			default:
				found = q.number
			}
		}
	}
	switch {
	case found == 0:
		return 0, "no EndpointSlice of the Service has the port: it has no pod with a container port of that name"
	case model.ReservedPort(found) && !generated:
		return 0, fmt.Sprintf("it is %d, which is the mesh's own: let the application listen on another", found)
	}
	return found, ""
}

func (s *State) dropService(n name) {
	delete(s.named, n)
	if s.services[n] != nil {
		delete(s.services, n)
		s.batch.Services.Change(n, nil)
	}
}

// SetSlice takes an EndpointSlice that is new or has changed. One without endpoints
// has no say, and the endpoints themselves are not looked at: the mesh's are the
// registry's.
func (s *State) SetSlice(e *discoveryv1.EndpointSlice) {
	n := name{Namespace: e.Namespace, Name: e.Name}
	was := s.dropSlice(n)
	s.note(KindEndpointSlice, n)
	sl := &slice{service: name{Namespace: e.Namespace, Name: e.Labels[discoveryv1.LabelServiceName]}}
	if len(e.Endpoints) > 0 && e.AddressType != discoveryv1.AddressTypeFQDN {
		for _, p := range e.Ports {
			if p.Port == nil || *p.Port <= 0 || *p.Port >= 1<<16 {
				continue
			}
			switch value(p.Protocol, corev1.ProtocolTCP) {
			case corev1.ProtocolTCP:
				sl.ports = append(sl.ports, slicePort{value(p.Name, ""), false, uint16(*p.Port)})
			case corev1.ProtocolUDP:
				sl.ports = append(sl.ports, slicePort{value(p.Name, ""), true, uint16(*p.Port)})
			}
		}
	}
	s.slices[n] = sl
	if s.of[sl.service] == nil {
		s.of[sl.service] = map[name]*slice{}
	}
	s.of[sl.service][n] = sl
	if was != sl.service {
		s.resolveNamed(was)
	}
	s.resolveNamed(sl.service)
}

func (s *State) resolveNamed(n name) {
	if s.named[n] && s.unread == "" {
		s.resolveService(n, false)
	}
}

// dropSlice forgets a slice and resolves nothing.
func (s *State) dropSlice(n name) (of name) {
	sl := s.slices[n]
	if sl == nil {
		return name{}
	}
	delete(s.slices, n)
	if delete(s.of[sl.service], n); len(s.of[sl.service]) == 0 {
		delete(s.of, sl.service)
	}
	return sl.service
}

// NotRead is SlicesUnread's reason where nothing went wrong.
const NotRead = "they have not been read yet"

// SlicesUnread says why the EndpointSlices of the Services that need them are not
// known; empty: what was said of them is all there is. Until then no named target port
// has a number.
func (s *State) SlicesUnread(why string) {
	if s.unread == why {
		return
	}
	s.unread = why
	for n := range s.named {
		s.resolveService(n, false)
	}
}

// stays is said of an object that cannot be read any more.
const stays = "what it was before stays in force until it can be read again, or is removed"

// Set takes an object of another kind that is new or has changed, as decoded JSON.
func (s *State) Set(kind string, u map[string]any) {
	o := FromAPI(kind, u)
	n := name{Namespace: o.Namespace, Name: o.Name}
	s.note(kind, n)
	r := Reader{API: true}
	switch kind {
	case KindHTTPRoute, KindGRPCRoute, KindTCPRoute, KindTLSRoute:
		facts := r.Route(o)
		good := facts
		if r.Doubt {
			good = nil
			if was := s.routes[routeKey(kind, n)]; was != nil {
				switch good = was.good; {
				case facts == nil:
					facts = was.facts
					r.Report(o.String(), 0, "%s", stays)
				case good != nil:
					facts = facts.Instead(good)
				}
			}
		}
		s.setRoute(o, facts, r.Problems)
		if e := s.routes[routeKey(kind, n)]; e != nil {
			e.good = good
		}
	case KindUDPRoute:
		r.udpRoute(o)
		s.tell(kind, n, r.Problems)
	case KindReferenceGrant:
		g := r.Grant(o)
		s.setGrant(n, g)
		s.tell(kind, n, r.Problems)
	case KindHTTPFilter:
		f := *r.Filter(o)
		old, ok := s.filters[n]
		if was, before := s.good[n]; r.Doubt && before {
			f = *Instead(&f, &was)
		} else if !r.Doubt {
			s.good[n] = f
		}
		if !ok || !reflect.DeepEqual(old, f) {
			s.filters[n] = f
			s.batch.Filters.Change(n, []model.HTTPFilter{f})
		}
		s.tell(kind, n, r.Problems)
	case KindEndpointPolicy:
		p := r.EndpointPolicy(o)
		if was := s.policies[n]; p == nil && was != nil { // else its pods' requests would be delivered over TCP
			p = &was.EndpointPolicy
			r.Report(o.String(), 0, "%s", stays)
		}
		s.setPolicy(n, p, r.Problems)
	case KindMeshConfig:
		m := r.MeshConfig(o)
		switch good := m.Good(s.meshes[n]); {
		case n.Name != MeshName:
			r.Report(o.String(), 0, "changes nothing: the one of a namespace that counts is called %s", MeshName)
		case n.Namespace == s.namespace:
			if s.meshes[n] = good; good == nil {
				s.unsaid = true
			} else {
				s.setSettings()
			}
		case !m.Refused:
			s.meshes[n] = m
			for _, f := range m.Stray(Label(kind, s.namespace, MeshName)) {
				r.Report(o.String(), f.Line, "%s", f.Reason)
			}
			s.setNamespace(n.Namespace, []input.Override{m.Override()})
		}
		s.tell(kind, n, r.Problems)
	}
}

// Delete takes it that an object of any kind is gone.
func (s *State) Delete(kind, namespace, objectName string) {
	n := name{Namespace: namespace, Name: objectName}
	if !s.objects[kind][n] {
		return
	}
	delete(s.objects[kind], n)
	switch kind {
	case KindService:
		s.dropService(n)
	case KindEndpointSlice:
		s.resolveNamed(s.dropSlice(n))
		return
	case KindHTTPRoute, KindGRPCRoute, KindTCPRoute, KindTLSRoute:
		s.dropRoute(routeKey(kind, n))
	case KindReferenceGrant:
		s.setGrant(n, nil)
	case KindHTTPFilter:
		delete(s.filters, n)
		delete(s.good, n)
		s.batch.Filters.Change(n, nil)
	case KindEndpointPolicy:
		s.setPolicy(n, nil, nil)
	case KindMeshConfig:
		delete(s.meshes, n)
		switch {
		case n.Name != MeshName:
		case n.Namespace == s.namespace:
			s.setSettings()
		default:
			s.setNamespace(n.Namespace, nil)
		}
	}
	s.tell(kind, n, nil)
}

// Clear takes it that there is no object of a kind any more.
func (s *State) Clear(kind string) {
	for _, n := range s.Names(kind) {
		s.Delete(kind, n.Namespace, n.Name)
	}
}

func routeKey(kind string, n name) input.RouteKey {
	k := input.RouteKey{Namespace: n.Namespace, Name: n.Name}
	for _, r := range []model.RouteKind{model.GRPCRoute, model.HTTPRoute, model.TLSRoute, model.TCPRoute} {
		if r.String() == kind {
			k.Kind = r
		}
	}
	return k
}

func (s *State) setRoute(o Object, facts *Route, said []Problem) {
	n := name{Namespace: o.Namespace, Name: o.Name}
	k := routeKey(o.Kind, n)
	if facts == nil { // none of the mesh
		s.dropRoute(k)
		s.tell(o.Kind, n, said)
		return
	}
	e := s.routes[k]
	fresh := e == nil
	if fresh {
		e = &route{}
		s.routes[k] = e
	} else {
		s.unpoint(k, e)
	}
	e.facts, e.said = facts, said
	for _, ns := range facts.Foreign() {
		if s.pointing[ns] == nil {
			s.pointing[ns] = map[input.RouteKey]bool{}
		}
		s.pointing[ns][k] = true
	}
	s.resolveRoute(k, fresh)
}

func (s *State) unpoint(k input.RouteKey, e *route) {
	for _, ns := range e.facts.Foreign() {
		if delete(s.pointing[ns], k); len(s.pointing[ns]) == 0 {
			delete(s.pointing, ns)
		}
	}
}

func (s *State) dropRoute(k input.RouteKey) {
	if e := s.routes[k]; e != nil {
		s.unpoint(k, e)
		delete(s.routes, k)
		s.batch.Routes.Change(k, nil)
	}
}

// resolveRoute refuses what no ReferenceGrant permits.
func (s *State) resolveRoute(k input.RouteKey, fresh bool) {
	s.resolved++
	e := s.routes[k]
	r := Reader{API: true, Problems: slices.Clone(e.said)}
	out := r.Resolve(e.facts, func(from RoutesOf, to model.ServiceName) bool {
		return Permits(slices.Collect(maps.Values(s.grants[to.Namespace])), from, to)
	})
	if fresh || !reflect.DeepEqual(out, e.out) {
		e.out = out
		s.batch.Routes.Change(k, []model.Route{out})
	}
	s.tell(k.Kind.String(), name{Namespace: k.Namespace, Name: k.Name}, r.Problems)
}

// setGrant takes a grant, or that there is none, and looks again at the routes that
// point into its namespace.
func (s *State) setGrant(n name, g *Grant) {
	old := s.grants[n.Namespace][n.Name]
	if reflect.DeepEqual(old, g) {
		return
	}
	if g == nil {
		if delete(s.grants[n.Namespace], n.Name); len(s.grants[n.Namespace]) == 0 {
			delete(s.grants, n.Namespace)
		}
	} else {
		if s.grants[n.Namespace] == nil {
			s.grants[n.Namespace] = map[string]*Grant{}
		}
		s.grants[n.Namespace][n.Name] = g
	}
	for k := range s.pointing[n.Namespace] {
		s.resolveRoute(k, false)
	}
}

// udpRoute says that a UDPRoute of a Service is not carried.
func (r *Reader) udpRoute(o Object) {
	var u gatewayv1.UDPRoute
	r.Strict(o, &u) // nothing of it is in force, wrong or not
	for _, p := range u.Spec.ParentRefs {
		if group := value(p.Group, ""); value(p.Kind, "Gateway") == KindService && (group == "" || group == "core" || group == GatewayGroup) {
			r.Report(o.String(), 0, "UDP is not carried yet: the route changes nothing, and datagrams to Service %s/%s go where they would without it",
				value(p.Namespace, gatewayv1.Namespace(o.Namespace)), p.Name)
		}
	}
}

// setPolicy takes an EndpointPolicy, or that there is none. Of those of one Service the
// first by name is in force (contract 10.8).
func (s *State) setPolicy(n name, p *model.EndpointPolicy, said []Problem) {
	old := s.policies[n]
	if old != nil {
		if delete(s.aimed[old.Service], n); len(s.aimed[old.Service]) == 0 {
			delete(s.aimed, old.Service)
		}
		delete(s.policies, n)
	}
	if p == nil {
		s.tell(KindEndpointPolicy, n, said)
	} else {
		s.policies[n] = &endpointPolicy{*p, said}
		if s.aimed[p.Service] == nil {
			s.aimed[p.Service] = map[name]bool{}
		}
		s.aimed[p.Service][n] = true
	}
	if old != nil {
		s.judgePolicies(old.Service)
	}
	if p != nil {
		s.judgePolicies(p.Service)
	}
}

func (s *State) judgePolicies(target name) {
	mine := slices.Collect(maps.Keys(s.aimed[target]))
	slices.SortFunc(mine, model.ServiceName.Compare)
	was, had := s.chosen[target]
	switch {
	case len(mine) == 0 && had:
		delete(s.chosen, target)
		s.batch.Policies.Change(target, nil)
	case len(mine) > 0 && (!had || was != s.policies[mine[0]].EndpointPolicy):
		s.chosen[target] = s.policies[mine[0]].EndpointPolicy
		s.batch.Policies.Change(target, []model.EndpointPolicy{s.chosen[target]})
	}
	for _, n := range mine {
		said := slices.Clone(s.policies[n].said)
		if n != mine[0] {
			said = append(said, Problem{Object: Label(KindEndpointPolicy, n.Namespace, n.Name), Reason: fmt.Sprintf(
				"is not in force: %s is for the same Service and comes first by name; remove one of the two", Label(KindEndpointPolicy, mine[0].Namespace, mine[0].Name))})
		}
		s.tell(KindEndpointPolicy, n, said)
	}
}

// setSettings works out the mesh's settings (contract 10.9): what the control plane's
// own MeshConfig says, then the flags.
func (s *State) setSettings() {
	settings := s.flags
	if m := s.meshes[name{Namespace: s.namespace, Name: MeshName}]; m != nil {
		settings = m.Over(s.flags)
	}
	if settings != s.settings || s.unsaid {
		s.settings, s.unsaid = settings, false
		s.batch.Settings = &settings
	}
}

// setNamespace takes what a namespace's own MeshConfig says of its pods.
func (s *State) setNamespace(ns string, list []input.Override) {
	if reflect.DeepEqual(s.namespaces[ns], list) {
		return
	}
	if s.namespaces[ns] = list; list == nil {
		delete(s.namespaces, ns)
	}
	s.batch.Namespaces.Change(ns, list)
}
