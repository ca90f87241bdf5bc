package file

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"aether/controlplane/gamma"
	"aether/controlplane/input"
	"aether/dataplane/model"
)

// build makes the mesh of everything that l has read, as the node of its options has it.
func (l *loader) build() (*model.Mesh, []model.Problem) { return l.views().Mesh(l.o.Node) }

// views makes the meshes of everything that l has read. It changes none of it.
func (l *loader) views() *Views {
	b := builder{
		mesh:   &model.Mesh{Domain: l.o.Domain, TrustDomain: l.o.TrustDomain},
		taken:  map[string]item{},
		nodes:  map[string]*nodeFacts{},
		pods:   map[string][]*podFacts{},
		grants: map[string][]*gamma.Grant{},
		served: map[model.ServiceName]bool{},
	}
	b.problems = append(b.problems, l.problems...)
	var items []item
	filters := map[string][]item{}
	take := func(it item) {
		if it.filter != nil {
			filters[it.key] = append(filters[it.key], it)
		} else if b.claim(it, it.key, "is defined twice, first at %s: this one is not in force; keep one of the two") {
			items = append(items, it)
		}
	}
	var kept []item // they give way to what is said
	for _, name := range slices.Sorted(maps.Keys(l.files)) {
		f := l.files[name]
		b.problems = append(b.problems, f.problems...)
		for _, it := range f.items {
			if it.since.IsZero() {
				take(it)
			} else {
				kept = append(kept, it)
			}
		}
	}
	for _, it := range kept {
		if it.filter == nil || len(filters[it.key]) == 0 {
			take(it)
		}
	}
	for _, it := range items {
		switch {
		case it.node != nil:
			b.nodes[it.node.name] = it.node
		case it.pod != nil:
			b.pods[it.pod.namespace] = append(b.pods[it.pod.namespace], it.pod)
			b.served[model.ServiceName{Namespace: it.pod.namespace, Name: it.pod.account}] = true
		case it.grant != nil:
			b.grants[it.grant.Namespace] = append(b.grants[it.grant.Namespace], it.grant)
		}
	}
	for _, it := range items {
		switch {
		case it.pod != nil:
			b.pod(it)
		case it.service != nil:
			b.service(it)
		case it.account != nil:
			b.account(it)
		case it.route != nil:
			b.route(it)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(filters)) {
		b.filters(filters[key])
	}
	b.policies(items)
	b.meshConfig(items)
	l.restore(&b)
	b.sort()
	return &Views{mesh: b.mesh, configs: b.configs, problems: b.problems, nodes: b.nodes, pods: b.local}
}

type builder struct {
	mesh     *model.Mesh
	configs  meshConfigs
	problems []problem
	taken    map[string]item // by key: names, addresses, namespaces
	nodes    map[string]*nodeFacts
	pods     map[string][]*podFacts     // by namespace
	served   map[model.ServiceName]bool // ServiceAccounts that pods of the mesh have
	local    []item                     // pods that have a workload
	grants   map[string][]*gamma.Grant  // by the namespace that grants
}

func (b *builder) report(it item, line int, format string, args ...any) {
	b.refuse("", it, line, format, args...)
}

// refuse reports that a part of the object is refused (model.Problem.Part).
func (b *builder) refuse(part string, it item, line int, format string, args ...any) {
	b.problems = append(b.problems, problem{Object: it.object, File: it.file, Line: line, Reason: fmt.Sprintf(format, args...), Part: part})
}

// claim takes key for it, or reports whoever has it already; what is kept gives way without a word. format
// has one %s: where that is.
func (b *builder) claim(it item, key, format string) bool {
	if first, ok := b.taken[key]; ok && !it.since.IsZero() {
		return false
	} else if ok {
		where := place(first.file, first.line)
		if first.object != it.object {
			where += " (" + first.object + ")"
		}
		b.report(it, it.line, format, where)
		return false
	}
	b.taken[key] = it
	return true
}

func (b *builder) pod(it item) {
	f := it.pod
	if f.endpoint != nil {
		e := *f.endpoint
		if n := b.nodes[e.Node]; n != nil && !f.ownPlace {
			e.Region, e.Zone = n.region, n.zone
		}
		// The row of a pod that has gone may linger beside its successor's; only a registry says so.
		if f.part != partEndpoint && !b.claim(it, "address "+e.Cluster+" "+e.IP.String(),
			"has the address "+e.IP.String()+" of %s: the pod is not served; correct status.podIPs") {
			return
		}
		b.mesh.Endpoints = append(b.mesh.Endpoints, e)
	}
	if f.workload != nil {
		b.local = append(b.local, it)
	}
}

// workload takes a pod of the mesh's own node.
func (b *builder) workload(it item) {
	w := it.pod.workload
	b.problems = append(b.problems, it.pod.told...)
	mend := "; set annotation " + AnnotationNetNS
	if b.claim(it, "netns "+w.NetNS, "has the network namespace "+w.NetNS+" of %s: the pod's traffic is not carried"+mend) &&
		b.claim(it, "container "+w.ContainerID, "has the container ID "+w.ContainerID+" of %s: the pod's traffic is not carried; set annotation "+AnnotationContainerID) {
		b.mesh.Workloads = append(b.mesh.Workloads, *w)
	}
}

func (b *builder) service(it item) {
	s := it.service.Service
	for _, ip := range s.ClusterIPs {
		if !b.claim(it, "address of a Service "+ip.String(), "has the cluster address "+ip.String()+" of %s: this Service is not in force; correct spec.clusterIPs") {
			return
		}
	}
	s.Ports = slices.Clone(s.Ports)
	for i := range s.Ports {
		p := &s.Ports[i]
		if p.TargetName == "" || p.Target != 0 {
			continue
		}
		var why string
		if p.Target, why = resolve(it.service, p, b.pods[s.Name.Namespace]); why != "" {
			b.refuse(model.PortPart(p), it, it.service.Lines[i], "spec.ports: port %s: targetPort %q names nothing: %s; write the number, or annotation %s",
				model.PortKey(p.Number, p.UDP), p.TargetName, why, AnnotationTargetPorts)
		}
	}
	if !s.Generated {
		b.checkAccount(it)
	}
	b.mesh.Services = append(b.mesh.Services, s)
}

// checkAccount reports a Service whose selector selects pods of the mesh, none of which has its name as the ServiceAccount.
// The mesh finds a service's pods by that (contract 1.1), so nothing that is sent to the Service reaches them.
func (b *builder) checkAccount(it item) {
	s := it.service
	if len(s.Selector) == 0 || b.served[s.Service.Name] {
		return
	}
	var have []string
	for _, pod := range b.pods[s.Service.Name.Namespace] {
		if pod.account != "" && selects(s.Selector, pod.labels) {
			have = append(have, pod.account)
		}
	}
	if len(have) == 0 {
		return
	}
	slices.Sort(have)
	have = slices.Compact(have)
	more := ""
	if n := len(have) - maxAccounts; n > 0 {
		have, more = have[:maxAccounts], fmt.Sprintf(" and %d more", n)
	}
	b.report(it, it.line, "metadata.name: the mesh finds a service's pods by their ServiceAccount, and no pod of it has %q; the pods that the selector selects have %s%s. Nothing is delivered to them by this Service: name routes and calls after their ServiceAccount, or give the pods the ServiceAccount %s",
		s.Service.Name.Name, strings.Join(have, ", "), more, s.Service.Name.Name)
}

// maxAccounts are named in a problem.
const maxAccounts = 8

// resolve finds the number that every selected pod gives to p's target name
// (contract 4.10). Pods that disagree name nothing; there is no fallback.
func resolve(s *gamma.Service, p *model.ServicePort, pods []*podFacts) (uint16, string) {
	if len(s.Selector) == 0 {
		return 0, "the Service has no selector"
	}
	var found uint16
	for _, pod := range pods {
		if !selects(s.Selector, pod.labels) {
			continue
		}
		for _, n := range pod.namedPorts {
			if n.name != p.TargetName || n.udp != p.UDP {
				continue
			}
			if found != 0 && found != n.number {
				return 0, fmt.Sprintf("the pods disagree, %d and %d", found, n.number)
			}
			found = n.number
		}
	}
	if found == 0 {
		return 0, "no pod that the Service selects has a container port of that name"
	}
	return found, ""
}

func selects(selector, labels map[string]string) bool {
	for k, v := range selector {
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}

func (b *builder) account(it item) {
	f := it.account
	if f.catalog {
		b.mesh.Catalog = append(b.mesh.Catalog, f.service)
	}
	if f.retained != nil {
		b.mesh.Retained = append(b.mesh.Retained, *f.retained)
	}
}

// route refuses the references into other namespaces that nothing permits (contract 10.5).
func (b *builder) route(it item) {
	r := gamma.Reader{File: it.file}
	b.mesh.Routes = append(b.mesh.Routes, r.Resolve(it.route, func(from gamma.RoutesOf, to model.ServiceName) bool {
		return gamma.Permits(b.grants[to.Namespace], from, to)
	}))
	b.problems = append(b.problems, r.Problems...)
}

// filters takes the HTTPFilters of one name. Two are none: which was meant nobody can say,
// and to drop one could widen access.
func (b *builder) filters(same []item) {
	for i, it := range same {
		f := *it.filter
		if len(same) > 1 {
			other := same[0]
			if i == 0 {
				other = same[1]
			}
			why := fmt.Sprintf("is defined twice, also at %s: neither is in force, and what they govern is refused; keep one of the two", place(other.file, other.line))
			b.report(it, it.line, "%s", why)
			b.problems[len(b.problems)-1].Part = model.AllParts
			if f.Invalid == "" {
				f.Invalid = why
			}
		}
		b.mesh.Filters = append(b.mesh.Filters, f)
	}
}

// policies takes of the EndpointPolicies of each service the first by name (contract 10.8).
func (b *builder) policies(items []item) {
	first := map[model.ServiceName]item{}
	var all []item
	for _, it := range items {
		if it.policy == nil {
			continue
		}
		all = append(all, it)
		if was, ok := first[it.policy.Service]; !ok || it.policy.Name < was.policy.Name {
			first[it.policy.Service] = it
		}
	}
	for _, it := range all {
		if f := first[it.policy.Service]; f.policy != it.policy {
			b.report(it, it.line, "is not in force: %s at %s is for the same Service and comes first by name; remove one of the two", f.object, place(f.file, f.line))
			continue
		}
		b.mesh.Policies = append(b.mesh.Policies, *it.policy)
	}
}

func (b *builder) sort() {
	m := b.mesh
	sortWorkloads(m.Workloads)
	slices.SortFunc(m.Endpoints, func(a, b model.Endpoint) int {
		return cmp.Or(model.ServiceName.Compare(a.Service, b.Service), cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.Pod, b.Pod), a.IP.Compare(b.IP))
	})
	slices.SortFunc(m.Services, func(a, b model.Service) int { return model.ServiceName.Compare(a.Name, b.Name) })
	slices.SortFunc(m.Routes, compareRoutes)
	// Stable: two of one name stay as they stood.
	slices.SortStableFunc(m.Filters, compareFilters)
	slices.SortFunc(m.Policies, func(a, b model.EndpointPolicy) int { return model.ServiceName.Compare(a.Service, b.Service) })
	slices.SortFunc(m.Catalog, model.ServiceName.Compare)
	slices.SortFunc(m.Retained, func(a, b model.Retained) int { return model.ServiceName.Compare(a.Service, b.Service) })
}

func sortWorkloads(w []model.Workload) {
	slices.SortFunc(w, func(a, b model.Workload) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
}

func compareRoutes(a, b model.Route) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Kind, b.Kind))
}

func compareFilters(a, b model.HTTPFilter) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

// wholeMesh is the MeshConfig of the whole mesh, where there are several.
var wholeMesh = gamma.Label("MeshConfig", gamma.MeshNamespace, gamma.MeshName)

// meshConfigs are those that say something.
type meshConfigs struct {
	mesh *gamma.Mesh            // the whole mesh's; nil: there is none
	of   map[string]*gamma.Mesh // those of namespaces, for their pods
}

// meshConfig takes the one MeshConfig that is for the whole mesh: that of
// aether-system/default, else the first by name. A refused one is still the one:
// another's words would not be what was asked for. One called default of another
// namespace is for the pods of that (contract 10.9).
func (b *builder) meshConfig(items []item) {
	var all []item
	for _, it := range items {
		if it.mesh != nil {
			all = append(all, it)
		}
	}
	if len(all) == 0 {
		return
	}
	first := slices.MinFunc(all, func(x, y item) int {
		if px, py := x.object == wholeMesh, y.object == wholeMesh; px != py {
			if px {
				return -1
			}
			return 1
		}
		return strings.Compare(x.object, y.object)
	})
	settings := first.mesh.Over(input.Settings{})
	b.mesh.Semantics, b.mesh.SameNode = settings.Semantics, settings.SameNode
	b.configs = meshConfigs{mesh: first.mesh, of: map[string]*gamma.Mesh{}}
	for _, it := range all {
		switch m := it.mesh; {
		case m == first.mesh:
		case m.Name != gamma.MeshName || m.Namespace == first.mesh.Namespace:
			b.report(it, it.line, "is not in force: %s at %s is the mesh's; remove this one, or that", first.object, place(first.file, first.line))
		default:
			b.configs.of[m.Namespace] = m
			for _, f := range m.Stray(first.object) {
				b.report(it, f.Line, "%s", f.Reason)
			}
		}
	}
}
