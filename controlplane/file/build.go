package file

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"aether/dataplane/model"
)

// build makes the mesh of everything that l has read. It changes none of it.
func (l *loader) build() (*model.Mesh, []model.Problem) {
	b := builder{
		o:      l.o,
		mesh:   &model.Mesh{Domain: l.o.Domain, TrustDomain: l.o.TrustDomain, Node: l.o.Node},
		taken:  map[string]item{},
		nodes:  map[string]*nodeFacts{},
		pods:   map[string][]*podFacts{},
		grants: map[string][]*grantFacts{},
	}
	b.problems = append(b.problems, l.problems...)
	var items []item
	for _, name := range slices.Sorted(maps.Keys(l.files)) {
		f := l.files[name]
		b.problems = append(b.problems, f.problems...)
		for _, it := range f.items {
			if b.claim(it, it.key, "is defined twice, first at %s: this one is not in force; keep one of the two") {
				items = append(items, it)
			}
		}
	}
	for _, it := range items {
		switch {
		case it.node != nil:
			b.nodes[it.node.name] = it.node
			if l.o.Node != "" && it.node.name == l.o.Node {
				b.mesh.Region, b.mesh.Zone = it.node.region, it.node.zone
			}
		case it.pod != nil:
			b.pods[it.pod.namespace] = append(b.pods[it.pod.namespace], it.pod)
		case it.grant != nil:
			b.grants[it.grant.namespace] = append(b.grants[it.grant.namespace], it.grant)
		}
	}
	for _, it := range items {
		switch {
		case it.pod != nil:
			b.pod(it)
		case it.service != nil:
			b.service(it)
		case it.route != nil:
			b.route(it)
		}
	}
	b.sort()
	return b.mesh, finish(b.problems)
}

type builder struct {
	o        Options
	mesh     *model.Mesh
	problems []problem
	taken    map[string]item // by key: names, addresses, namespaces
	nodes    map[string]*nodeFacts
	pods     map[string][]*podFacts // by namespace
	grants   map[string][]*grantFacts
}

func (b *builder) report(it item, line int, format string, args ...any) {
	b.problems = append(b.problems, problem{it.object, it.file, line, fmt.Sprintf(format, args...)})
}

// claim takes key for it, or reports whoever has it already. format has one %s: where that is.
func (b *builder) claim(it item, key, format string) bool {
	if first, ok := b.taken[key]; ok {
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
	if w := f.workload; w != nil {
		mend := "; set annotation " + AnnotationNetNS
		if b.claim(it, "netns "+w.NetNS, "has the network namespace "+w.NetNS+" of %s: the pod's traffic is not carried"+mend) &&
			b.claim(it, "container "+w.ContainerID, "has the container ID "+w.ContainerID+" of %s: the pod's traffic is not carried; set annotation "+AnnotationContainerID) {
			b.mesh.Workloads = append(b.mesh.Workloads, *w)
		}
	}
}

func (b *builder) service(it item) {
	s := it.service.svc
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
			b.report(it, it.service.ports[i], "port %s: targetPort %q names nothing: %s; write the number, or annotation %s",
				portKey(p.Number, p.UDP), p.TargetName, why, AnnotationTargetPorts)
		}
	}
	b.mesh.Services = append(b.mesh.Services, s)
}

// resolve finds the number that every selected pod gives to p's target name
// (contract 4.10). Pods that disagree name nothing; there is no fallback.
func resolve(s *serviceFacts, p *model.ServicePort, pods []*podFacts) (uint16, string) {
	if len(s.selector) == 0 {
		return 0, "the Service has no selector"
	}
	var found uint16
	for _, pod := range pods {
		if !selects(s.selector, pod.labels) {
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

func (b *builder) route(it item) {
	r := it.route.route
	r.Rules = slices.Clone(r.Rules)
	for i := range r.Rules {
		rule := &r.Rules[i]
		rule.Backends = slices.Clone(rule.Backends)
		for j := range rule.Backends {
			ref := &rule.Backends[j]
			if ref.Invalid != "" || ref.Service.Namespace == r.Namespace || granted(r.Namespace, ref.Service.Name, b.grants[ref.Service.Namespace]) {
				continue
			}
			ref.Invalid = fmt.Sprintf("RefNotPermitted: no ReferenceGrant in namespace %s lets HTTPRoutes of namespace %s name Service %s: add one",
				ref.Service.Namespace, r.Namespace, ref.Service.Name)
			b.report(it, it.route.lines[i][j], "rules[%d].backendRefs[%d]: %s; its share of requests gets 500", i, j, ref.Invalid)
		}
	}
	b.mesh.Routes = append(b.mesh.Routes, r)
}

func granted(from, service string, grants []*grantFacts) bool {
	for _, g := range grants {
		if slices.Contains(g.from, from) && (slices.Contains(g.to, "") || slices.Contains(g.to, service)) {
			return true
		}
	}
	return false
}

func (b *builder) sort() {
	m := b.mesh
	slices.SortFunc(m.Workloads, func(a, b model.Workload) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	slices.SortFunc(m.Endpoints, func(a, b model.Endpoint) int {
		return cmp.Or(compareNames(a.Service, b.Service), cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.Pod, b.Pod), a.IP.Compare(b.IP))
	})
	slices.SortFunc(m.Services, func(a, b model.Service) int { return compareNames(a.Name, b.Name) })
	slices.SortFunc(m.Routes, func(a, b model.Route) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
}

func compareNames(a, b model.ServiceName) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}
