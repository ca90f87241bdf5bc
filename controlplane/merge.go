package controlplane

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"aether/controlplane/input"
	"aether/dataplane/model"
)

// change is what differs from what the index was told last.
type change struct {
	batches int  // of sources
	objects bool // more than rows, names and problems

	keys               input.Tables                   // of what sources say otherwise than before; no objects
	fleeting           map[model.ServiceName]struct{} // of keys.Endpoints, those of sources that are not Final
	settings, locality bool
}

// any reports whether something changed of which a state is compiled.
func (c *change) any() bool {
	but := c.keys
	but.Problems = nil
	return !but.Empty() || c.settings || c.locality
}

func addKey[K comparable](to *map[K]struct{}, k K) {
	if *to == nil {
		*to = map[K]struct{}{}
	}
	(*to)[k] = struct{}{}
}

// drainSources enters what the sources have said.
func (l *Loop) drainSources() (c change) {
	c, l.restoredChange = l.restoredChange, change{}
	for _, s := range l.sources {
		p, said := s.takePending()
		c.batches += int(said - s.drained)
		s.drained = said
		c.objects = c.objects || !p.objects.first.IsZero()
		if p.replace != nil {
			if s.restored {
				s.dropRestored(p.replace, &c)
			}
			s.merge(p.replace, true, &c)
			s.whole, s.restored, s.restoredState = true, false, input.Batch{}
		}
		s.merge(&p.then, false, &c)
	}
	return c
}

// dropRestored takes back settings and locality that the source said before the start, where
// b, its first whole state since, says none: nil is as before only within one life.
func (s *Source) dropRestored(b *input.Batch, c *change) {
	if b.Settings == nil && !b.KeepSettings && s.settings != nil && s.settings == s.restoredOnly.settings {
		s.settings, c.settings = nil, true
	}
	if b.Locality == nil && s.locality != nil && s.locality == s.restoredOnly.locality {
		s.locality, c.locality = nil, true
	}
}

// merge takes a Batch in; all: it is all that the source says.
func (s *Source) merge(b *input.Batch, all bool, c *change) {
	if !s.opts.Final {
		s.noteFleeting(b, all, c)
	}
	s.tables.Merge(&b.Tables, all, &c.keys)
	if b.Settings != nil {
		s.settings, c.settings = b.Settings, true
	}
	if b.Locality != nil {
		s.locality, c.locality = b.Locality, true
	}
}

// noteFleeting notes the services that have rows of the source of which b says something, before b is entered.
func (s *Source) noteFleeting(b *input.Batch, all bool, c *change) {
	if all {
		for n := range s.tables.Endpoints {
			addKey(&c.fleeting, n)
		}
		return
	}
	for n := range b.Endpoints {
		if len(s.tables.Endpoints[n]) > 0 {
			addKey(&c.fleeting, n)
		}
	}
}

func equal[T any](a, b []T) bool { return reflect.DeepEqual(a, b) }

// reindex tells the index what changed, of all sources together.
func (l *Loop) reindex(c *change) {
	for n := range c.keys.Endpoints {
		l.mesh.Endpoints.Put(n, l.endpoints(n))
		l.index.SetEndpoints(n, l.mesh.Endpoints[n])
	}
	for n := range c.keys.Services {
		l.mesh.Services.Put(n, fromFirst(l, n, func(t *input.Tables) input.Table[model.ServiceName, model.Service] { return t.Services }, "Service "+n.String()))
		l.index.SetServices(n, l.mesh.Services[n])
	}
	for n := range c.keys.Catalog {
		l.mesh.Catalog.Put(n, l.catalog(n))
		l.index.SetCatalog(n, len(l.mesh.Catalog[n]) > 0)
	}
	for n := range c.keys.Retained {
		l.setRetained(n)
	}
	for n := range c.keys.Filters {
		l.mesh.Filters.Put(n, l.filters(n))
		l.index.SetFilters(n.Namespace, n.Name, l.mesh.Filters[n])
	}
	for n := range c.keys.Policies {
		l.mesh.Policies.Put(n, fromFirst(l, n, func(t *input.Tables) input.Table[model.ServiceName, model.EndpointPolicy] { return t.Policies }, "EndpointPolicy of Service "+n.String()))
		l.index.SetPolicies(n, l.mesh.Policies[n])
	}
	for k := range c.keys.Routes {
		l.mesh.Routes.Put(k, fromFirst(l, k, func(t *input.Tables) input.Table[input.RouteKey, model.Route] { return t.Routes }, k.Kind.String()+" "+k.Namespace+"/"+k.Name))
		l.index.SetRoutes(k.Kind, k.Namespace, k.Name, l.mesh.Routes[k])
	}
	if len(c.keys.Workloads) > 0 {
		l.workloads = l.pods()
		l.index.SetWorkloads(l.workloads)
	}
	if c.settings {
		was := l.settings
		l.settings = l.mergedSettings()
		c.settings = l.settings != was
		l.index.SetSettings(l.settings.Semantics, l.settings.SameNode)
	}
	for ns := range c.keys.Namespaces {
		l.mesh.Namespaces.Put(ns, fromFirst(l, ns, func(t *input.Tables) input.Table[string, input.Override] { return t.Namespaces }, "MeshConfig of namespace "+ns))
	}
	if c.locality {
		was := l.locality
		l.locality = l.mergedLocality()
		c.locality = l.locality != was
		l.index.SetLocality(l.locality.Region, l.locality.Zone)
	}
}

// merged is what came of putting sources together.
type merged struct {
	conflicts map[string]model.Problem // by what they are about
	changed   bool
}

func newMerged() merged { return merged{conflicts: map[string]model.Problem{}} }

// setConflict notes, or with an empty reason takes back, that sources speak of one thing.
func (m *merged) setConflict(object, format string, args ...any) {
	_, had := m.conflicts[object]
	if format == "" {
		m.changed = m.changed || had
		delete(m.conflicts, object)
		return
	}
	p := model.Problem{Object: object, Reason: fmt.Sprintf(format, args...)}
	m.changed = m.changed || m.conflicts[object] != p
	m.conflicts[object] = p
}

// sourcesOf are the sources that speak of a key, by precedence.
func sourcesOf[K comparable, T any](l *Loop, k K, table func(*input.Tables) input.Table[K, T]) []*Source {
	var out []*Source
	for _, s := range l.sources {
		if len(table(&s.tables)[k]) > 0 {
			out = append(out, s)
		}
	}
	return out
}

func sourceNames(of []*Source) string {
	out := make([]string, len(of))
	for i, s := range of {
		out[i] = s.name
	}
	return strings.Join(out, " and ")
}

// fromFirst is what the first source says of k. Where another says something else it is a
// problem, called object.
func fromFirst[K comparable, T any](l *Loop, k K, table func(*input.Tables) input.Table[K, T], object string) []T {
	who := sourcesOf(l, k, table)
	if len(who) == 0 {
		l.merged.setConflict(object, "")
		return nil
	}
	list := table(&who[0].tables)[k]
	for _, s := range who[1:] {
		if !equal(list, table(&s.tables)[k]) {
			l.merged.setConflict(object, "the sources %s say different things of it: what %s says is in force; remove it from the other", sourceNames(who), who[0].name)
			return list
		}
	}
	l.merged.setConflict(object, "")
	return list
}

// filters are those of a name. Which of two policies was meant cannot be told: where
// sources contradict each other, the index is given both and refuses what they govern.
func (l *Loop) filters(n model.ServiceName) []model.HTTPFilter {
	object := "HTTPFilter " + n.String()
	who := sourcesOf(l, n, func(t *input.Tables) input.Table[model.ServiceName, model.HTTPFilter] { return t.Filters })
	if len(who) == 0 {
		l.merged.setConflict(object, "")
		return nil
	}
	list, contradict := who[0].tables.Filters[n], false
	for _, s := range who[1:] {
		if more := s.tables.Filters[n]; !equal(who[0].tables.Filters[n], more) {
			list, contradict = slices.Concat(list, more), true
		}
	}
	if contradict {
		l.merged.setConflict(object, "the sources %s say different things of it: what it governs is refused; remove it from the other", sourceNames(who))
	} else {
		l.merged.setConflict(object, "")
	}
	return list
}

// catalog is the name itself, if a source has it.
func (l *Loop) catalog(n model.ServiceName) []model.ServiceName {
	for _, s := range l.sources {
		if list := s.tables.Catalog[n]; len(list) > 0 {
			return list
		}
	}
	return nil
}

// endpoints are the rows of a service: those of all sources. Of rows at one address the
// first source's stand. That a service has rows of several is a problem, unless one of
// the two is the local source.
func (l *Loop) endpoints(n model.ServiceName) []model.Endpoint {
	object := "ServiceAccount " + n.String()
	who := sourcesOf(l, n, func(t *input.Tables) input.Table[model.ServiceName, model.Endpoint] { return t.Endpoints })
	if len(who) < 2 {
		l.merged.setConflict(object, "")
		if len(who) == 0 {
			return nil
		}
		return who[0].tables.Endpoints[n]
	}
	out := slices.Clone(who[0].tables.Endpoints[n])
	at := map[netip.Addr]struct{}{}
	for _, s := range who {
		if s != who[0] {
			for _, e := range s.tables.Endpoints[n] {
				if _, taken := at[e.IP.Unmap()]; !taken {
					out = append(out, e)
				}
			}
		}
		for _, e := range s.tables.Endpoints[n] {
			at[e.IP.Unmap()] = struct{}{}
		}
	}
	who = slices.DeleteFunc(who, func(s *Source) bool { return s.opts.Local })
	if len(who) > 1 {
		l.merged.setConflict(object, "the sources %s both have pods of it: all are used, and of two rows at one address that of %s; remove it from the other", sourceNames(who), who[0].name)
	} else {
		l.merged.setConflict(object, "")
	}
	return out
}

// pods are the workloads of all sources, of one container the first source's.
func (l *Loop) pods() []model.Workload {
	var out []model.Workload
	seen := map[string]*Source{}
	for _, s := range l.sources {
		for c, list := range s.tables.Workloads {
			if other := seen[c]; other != nil {
				if !equal(other.tables.Workloads[c], list) {
					l.merged.setConflict("container "+c, "the sources %s and %s say different things of it: what %s says is in force", other.name, s.name, other.name)
				}
				continue
			}
			seen[c] = s
			out = append(out, list...)
			l.merged.setConflict("container "+c, "")
		}
	}
	for object := range l.merged.conflicts {
		if c, ok := strings.CutPrefix(object, "container "); ok && seen[c] == nil {
			l.merged.setConflict(object, "")
		}
	}
	slices.SortFunc(out, func(a, b model.Workload) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.ContainerID, b.ContainerID))
	})
	return out
}

// mergedSettings are those of the first source that says any. One that says those of
// Config says none: that is how a source tells that its MeshConfig is gone.
func (l *Loop) mergedSettings() input.Settings {
	var who []*Source
	for _, s := range l.sources {
		if s.settings != nil && *s.settings != l.cfg.Settings && (len(who) == 0 || *s.settings != *who[0].settings) {
			who = append(who, s)
		}
	}
	const object = "MeshConfig"
	if len(who) > 1 {
		l.merged.setConflict(object, "the sources %s say different things of it: what %s says is in force", sourceNames(who), who[0].name)
	} else {
		l.merged.setConflict(object, "")
	}
	if len(who) == 0 {
		return l.cfg.Settings
	}
	return *who[0].settings
}

// namespaceSettings are the settings of pods of namespaces that have others than the mesh's.
func (l *Loop) namespaceSettings() map[string]input.Settings {
	out := make(map[string]input.Settings, len(l.mesh.Namespaces))
	for ns, o := range l.mesh.Namespaces {
		if s := o[0].Apply(l.settings); s != l.settings {
			out[ns] = s
		}
	}
	return out
}

func (l *Loop) mergedLocality() input.Locality {
	for _, s := range l.sources {
		if s.locality != nil && *s.locality != (input.Locality{}) {
			return *s.locality
		}
	}
	return input.Locality{}
}

// retained is a service that is kept against its removal.
type retained struct {
	ports []uint16
	until time.Time
}

// retainedBySource is what of a service is kept: by a source's own word, and because its rows have gone.
func (l *Loop) retainedBySource(n model.ServiceName) []model.Retained {
	var out []model.Retained
	for _, s := range l.sources {
		out = append(out, s.tables.Retained[n]...)
	}
	if r, ok := l.retained[n]; ok {
		out = append(out, model.Retained{Service: n, Ports: r.ports})
	}
	return out
}

// setRetained tells the index what of a service is kept.
func (l *Loop) setRetained(n model.ServiceName) {
	l.mesh.Retained.Put(n, l.retainedBySource(n))
	l.index.SetRetained(n, l.mesh.Retained[n])
}

// servedPorts is what the services whose rows change, and may come and go, had before.
func (l *Loop) servedPorts(c *change) map[model.ServiceName][]uint16 {
	var out map[model.ServiceName][]uint16
	for n := range c.fleeting {
		if http, _ := l.index.Served(n); len(http) > 0 {
			if out == nil {
				out = map[model.ServiceName][]uint16{}
			}
			out[n] = http
		}
	}
	return out
}

// retainRemoved keeps those services that had HTTP ports and have no rows any more, and lets go of
// those that have some again (contract 4.12). It reports whether the index was told so.
func (l *Loop) retainRemoved(now time.Time, c *change, served map[model.ServiceName][]uint16) (changed bool) {
	for n := range c.keys.Endpoints {
		_, rows := l.index.Served(n)
		_, was := l.retained[n]
		switch ports := served[n]; {
		case rows && was:
			delete(l.retained, n)
		case !rows && len(ports) > 0:
			l.retained[n] = retained{ports, now.Add(retention)}
		default:
			continue
		}
		changed = true
		l.setRetained(n)
	}
	return changed
}

// dropExpired lets go of what was kept long enough.
func (l *Loop) dropExpired(now time.Time, c *change) {
	for n, r := range l.retained {
		if !r.until.After(now) {
			delete(l.retained, n)
			c.keys.Retained.Note(n)
		}
	}
}

// nextExpiry is when that is next to be done.
func (l *Loop) nextExpiry() (next time.Time, ok bool) {
	for _, r := range l.retained {
		if !ok || r.until.Before(next) {
			next, ok = r.until, true
		}
	}
	return next, ok
}

// allProblems are those of the sources, of putting them together, and of compiling, each with the time at which
// it appeared. It is the list before where none of them changed.
func (l *Loop) allProblems(now time.Time, c *change) []model.Problem {
	if l.all != nil && len(c.keys.Problems) == 0 && !c.settings && len(c.keys.Namespaces) == 0 && !l.merged.changed && len(l.compiled) == l.allCompiled && (l.allCompiled == 0 || &l.compiled[0] == l.allFirst) {
		return l.all
	}
	out := []model.Problem{}
	for _, s := range l.sources {
		for _, list := range s.tables.Problems {
			out = append(out, list...)
		}
	}
	for _, p := range l.merged.conflicts {
		out = append(out, p)
	}
	const tracing = "tracingEnabled: this version makes no traces, and nothing is traced: it may stay"
	if l.settings.Tracing {
		out = append(out, model.Problem{Object: "MeshConfig", Reason: tracing})
	}
	for ns, list := range l.mesh.Namespaces {
		if o := &list[0]; o.Tracing != nil && *o.Tracing && !l.settings.Tracing {
			out = append(out, model.Problem{Object: "MeshConfig of namespace " + ns, Reason: tracing})
		}
	}
	slices.SortFunc(out, func(a, b model.Problem) int {
		return cmp.Or(cmp.Compare(a.Where, b.Where), cmp.Compare(a.Object, b.Object), cmp.Compare(a.Reason, b.Reason))
	})
	l.merged.changed = false
	l.all, l.allCompiled = input.Problems(out, l.compiled), len(l.compiled)
	if l.allCompiled > 0 {
		l.allFirst = &l.compiled[0]
	}
	since := make(map[problemKey]time.Time, len(l.all))
	for i := range l.all {
		p := &l.all[i]
		k := problemKey{p.Object, p.Reason}
		if p.Since.IsZero() {
			if p.Since = l.since[k]; p.Since.IsZero() {
				p.Since = now.Round(0) // without the reading of the monotonic clock: it is compared and shown as a time of day
			}
		}
		since[k] = p.Since
	}
	l.since = since
	return l.all
}

// neededServices are what OnNeeds is told.
func (l *Loop) neededServices() []model.ServiceName {
	set := map[model.ServiceName]struct{}{}
	for i := range l.workloads {
		w := &l.workloads[i]
		set[w.Service()] = struct{}{}
		for _, u := range w.Upstreams {
			set[u] = struct{}{}
		}
	}
	for _, s := range l.sources {
		for n, objects := range s.tables.Services {
			if slices.ContainsFunc(objects, needsRows) {
				set[n] = struct{}{}
			}
		}
	}
	return slices.SortedFunc(maps.Keys(set), model.ServiceName.Compare)
}

// needsRows reports whether the rows of a Service are needed before anybody asks for them
// (contract 9.9, decision 033): it has an address, and it is a user's, whose pods alone say
// which of its ports are HTTP and which calls are the mesh's (contract 4.9), or it has a UDP
// port, whose datagrams nobody holds. A generated Service says its ports itself, and
// connections to it wait for its rows.
func needsRows(o model.Service) bool {
	return len(o.ClusterIPs) > 0 && (!o.Generated || slices.ContainsFunc(o.Ports, func(p model.ServicePort) bool { return p.UDP }))
}

// Mesh is everything that the state in force is compiled from, made for the caller, whose
// lists are ascending by name. What is in it may not be changed.
func (l *Loop) Mesh() *model.Mesh {
	l.stateMu.Lock()
	defer l.stateMu.Unlock()
	m := &model.Mesh{
		Domain: l.cfg.Domain, TrustDomain: l.cfg.TrustDomain, Node: l.cfg.Node, Region: l.locality.Region, Zone: l.locality.Zone,
		Semantics: l.settings.Semantics, SameNode: l.settings.SameNode,
	}
	l.mesh.Join(m)
	m.Workloads = l.workloads
	return m
}
