package client

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"aether/controlplane/input"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// served are the rows of a service. What the Sink has been given of it does not
// change: the next change makes another one.
type served struct {
	rows  []model.Endpoint // ascending by address; more than one of an address while they differ, and of several clusters
	under []uint8          // of each, the classes that it is registered under, as bits
	given bool             // the Sink has it
}

// bit is a class among those that a row is registered under (contract 9.4). Classes
// that this version does not know share one.
func bit(p registrypb.Service_Protocol) uint8 { return 1 << min(max(p, 0), 7) }

// at is the first row of ip, or where it would stand.
func (s *served) at(ip netip.Addr) (int, bool) {
	return slices.BinarySearchFunc(s.rows, ip, func(e model.Endpoint, ip netip.Addr) int { return e.IP.Compare(ip) })
}

// cluster is the name to drop a row by of which cluster's name is said: two clusters may
// have pods of one address. Empty, which is any: none is said, or none of that name is there.
func (s *served) cluster(ip netip.Addr, name string) string {
	i, _ := s.at(ip)
	for ; i < len(s.rows) && s.rows[i].IP == ip; i++ {
		if s.rows[i].Cluster == name {
			return name
		}
	}
	return ""
}

// drop takes what a cluster (empty: any) has at ip under the classes; it reports whether
// that was anything.
func (s *served) drop(ip netip.Addr, cluster string, classes uint8) (changed bool) {
	i, _ := s.at(ip)
	for i < len(s.rows) && s.rows[i].IP == ip {
		if s.under[i]&classes == 0 || cluster != "" && s.rows[i].Cluster != cluster {
			i++
			continue
		}
		if s.under[i] &^= classes; s.under[i] != 0 {
			i++
			continue
		}
		s.rows = slices.Delete(s.rows, i, i+1)
		s.under = slices.Delete(s.under, i, i+1)
		changed = true
	}
	return changed
}

// put makes e what its cluster has at its address under the classes.
func (s *served) put(e model.Endpoint, classes uint8) (changed bool) {
	like := func() int {
		i, _ := s.at(e.IP)
		for ; i < len(s.rows) && s.rows[i].IP == e.IP; i++ {
			if same(&s.rows[i], &e) {
				return i
			}
		}
		return -1
	}
	if i := like(); i >= 0 && s.under[i]&classes == classes {
		return false
	}
	changed = s.drop(e.IP, e.Cluster, classes)
	if i := like(); i >= 0 {
		s.under[i] |= classes
		return changed
	}
	i, _ := s.at(e.IP)
	s.rows = slices.Insert(s.rows, i, e)
	s.under = slices.Insert(s.under, i, classes)
	return true
}

// same reports whether two rows of a service say the same.
func same(a, b *model.Endpoint) bool {
	return a.IP == b.IP && a.Pod == b.Pod && a.Health == b.Health && a.Weight == b.Weight && a.DefaultPort == b.DefaultPort &&
		a.Node == b.Node && a.SPIFFEID == b.SPIFFEID && a.Cluster == b.Cluster && a.Region == b.Region && a.Zone == b.Zone &&
		slices.Equal(a.Ports, b.Ports) && maps.Equal(a.Metadata, b.Metadata)
}

// rowKey names a row among the problems.
type rowKey struct {
	service, ip string // as they were sent
	protocol    registrypb.Service_Protocol
}

func (k rowKey) String() string { return k.service + " " + k.ip + " " + k.protocol.String() }

// snapshotBuilder is a snapshot while it comes.
type snapshotBuilder struct {
	rows map[model.ServiceName]*served // unordered until sorted
	bad  map[rowKey]model.Problem
}

func newGathered() *snapshotBuilder {
	return &snapshotBuilder{rows: map[model.ServiceName]*served{}, bad: map[rowKey]model.Problem{}}
}

// cache is what the registrar's words amount to, and what of it the Sink has been told.
type cache struct {
	c    *Client
	have map[model.ServiceName]*served
	bad  map[rowKey]model.Problem
	in   interner

	spoken map[rowKey]string // why rows were said to be bad: each is counted and logged once

	told     bool                     // a whole state has been said
	said     names                    // names that the Sink has as in the catalog, without rows here
	dirty    names                    // services whose rows are to be said
	renamed  names                    // and names whose place in the catalog may have changed
	all      bool                     // all names may have
	problems map[string]model.Problem // what the Sink has as problems
	judged   bool                     // they may have changed
	broad    string                   // why rows of all services are here; empty: they are not, or that is what was asked for
	strange  map[int32]bool           // kinds of events that have been spoken of
	clashes  map[model.ServiceName]model.Problem
}

func newKnown(c *Client) *cache {
	return &cache{
		c: c, have: map[model.ServiceName]*served{}, bad: map[rowKey]model.Problem{}, said: names{}, dirty: names{}, renamed: names{},
		spoken: map[rowKey]string{}, problems: map[string]model.Problem{}, strange: map[int32]bool{},
		clashes: map[model.ServiceName]model.Problem{},
	}
}

// put takes a row that is there.
func (k *cache) put(w *watch, ev *registrypb.WatchEndpointsResponse) {
	row := ev.GetEndpoint()
	if row == nil {
		return // a snapshot's beginning
	}
	key := rowKey{ev.GetServiceName(), row.GetIp(), ev.GetProtocol()}
	name, err := k.in.service(key.service)
	if err != nil {
		k.fault(w, key, badService, err.Error())
		return
	}
	if !w.authoritative(name) {
		return // nobody asked for it, or another one tells
	}
	f, why := registry.RowFault(row)
	if f == registry.NoFault {
		f, why = registry.IdentityFault(name, k.c.cfg.TrustDomain, row, k.c.cfg.Identities...)
	}
	if f != registry.NoFault {
		if ip, err := netip.ParseAddr(row.GetIp()); err == nil { // what stood there does not any more
			k.drop(w, name, ip.Unmap(), row.GetClusterName(), bit(key.protocol))
		}
		k.fault(w, key, f, why)
		return
	}
	e, err := registry.Endpoint(name, k.c.cfg.TrustDomain, row, k.c.cfg.Identities...)
	if err != nil {
		k.fault(w, key, registry.BadIdentity, err.Error())
		return
	}
	k.in.endpoint(&e)
	k.mended(w, key)
	if g := w.building; g != nil {
		s := g.rows[name]
		if s == nil {
			s = &served{}
			g.rows[name] = s
		}
		s.rows = append(s.rows, e)
		s.under = append(s.under, bit(key.protocol))
		return
	}
	if k.own(name).put(e, bit(key.protocol)) {
		k.dirty.add(name)
	}
}

// remove takes a row that has gone: of one class, or, where none is said, of all.
func (k *cache) remove(w *watch, ev *registrypb.WatchEndpointsResponse) {
	key := rowKey{ev.GetServiceName(), ev.GetEndpoint().GetIp(), ev.GetProtocol()}
	classes := bit(key.protocol)
	k.mended(w, key)
	if key.protocol == registrypb.Service_PROTOCOL_UNSPECIFIED {
		classes = 0xff
		for p := range registrypb.Service_Protocol_name {
			k.mended(w, rowKey{key.service, key.ip, registrypb.Service_Protocol(p)})
		}
	}
	name, err := k.in.service(key.service)
	ip, err2 := netip.ParseAddr(key.ip)
	if err != nil || err2 != nil || !w.authoritative(name) {
		return
	}
	k.drop(w, name, ip.Unmap(), ev.GetEndpoint().GetClusterName(), classes)
}

func (k *cache) drop(w *watch, name model.ServiceName, ip netip.Addr, cluster string, classes uint8) {
	if g := w.building; g != nil {
		if s := g.rows[name]; s != nil {
			// Not in order yet, and rare: all are looked at.
			if !slices.ContainsFunc(s.rows, func(e model.Endpoint) bool { return e.IP == ip && e.Cluster == cluster }) {
				cluster = ""
			}
			for i := 0; i < len(s.rows); {
				if s.rows[i].IP == ip && (cluster == "" || s.rows[i].Cluster == cluster) && s.under[i]&^classes == 0 {
					s.rows = slices.Delete(s.rows, i, i+1)
					s.under = slices.Delete(s.under, i, i+1)
					continue
				}
				i++
			}
		}
		return
	}
	if s := k.have[name]; s == nil {
		return
	} else if i, ok := s.at(ip); !ok || i >= len(s.rows) {
		return
	}
	s := k.own(name)
	if s.drop(ip, s.cluster(ip, cluster), classes) {
		k.dirty.add(name)
	}
}

// own is the service's rows, to be changed.
func (k *cache) own(name model.ServiceName) *served {
	s := k.have[name]
	switch {
	case s == nil:
		s = &served{}
	case s.given:
		s = &served{rows: slices.Clone(s.rows), under: slices.Clone(s.under)}
	default:
		return s
	}
	k.have[name] = s
	return s
}

// sorted brings a gathered service into order, and each row that stands under several
// classes into one (contract 9.4). Of what was sent twice the later counts.
func (s *served) sorted() *served {
	order := make([]int, len(s.rows))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return s.rows[a].IP.Compare(s.rows[b].IP) })
	out := &served{rows: make([]model.Endpoint, 0, len(s.rows)), under: make([]uint8, 0, len(s.rows))}
	for _, i := range order {
		if n := len(out.rows); n == 0 || out.rows[n-1].IP != s.rows[i].IP {
			out.rows = append(out.rows, s.rows[i])
			out.under = append(out.under, s.under[i])
			continue
		}
		out.put(s.rows[i], s.under[i])
	}
	if cap(out.rows) > len(out.rows)+len(out.rows)/8 { // several classes: half of it would stay empty
		out.rows, out.under = slices.Clip(slices.Clone(out.rows)), slices.Clip(slices.Clone(out.under))
	}
	return out
}

// complete: what a stream gathered is what there is in its scope. first: it is the
// stream's first time; where it is no second stream, it then stands for all there are, but
// for what comes elsewhere.
func (k *cache) complete(w *watch, first bool, elsewhere func(model.ServiceName) bool) {
	g := w.building
	if g != nil {
		for n, s := range g.rows {
			if !w.authoritative(n) {
				continue
			}
			s = s.sorted()
			if was := k.have[n]; was == nil || !slices.EqualFunc(was.rows, s.rows, func(a, b model.Endpoint) bool { return same(&a, &b) }) {
				k.have[n] = s
				k.dirty.add(n)
			} else if !slices.Equal(was.under, s.under) {
				k.have[n] = &served{rows: was.rows, under: s.under, given: true}
			}
		}
		gone := func(n model.ServiceName) {
			if _, ok := g.rows[n]; !ok && k.have[n] != nil {
				delete(k.have, n)
				k.dirty.add(n)
			}
		}
		if w.delta {
			for n := range w.scope.names {
				if w.authoritative(n) {
					gone(n)
				}
			}
		} else {
			for n := range k.have {
				if first && !elsewhere(n) || w.covers(n) {
					gone(n)
				}
			}
		}
		for key := range k.bad {
			if n, err := k.in.service(key.service); !w.delta && (first && !elsewhere(n) || err != nil) || err == nil && w.covers(n) {
				if _, still := g.bad[key]; !still {
					delete(k.bad, key)
				}
			}
		}
		maps.Copy(k.bad, g.bad)
		k.judged = true
		w.building = nil
	}
	// A registrar of before says no names where nothing has changed.
	if !w.delta && (g != nil || first && (len(w.names) > 0 || w.since != "")) {
		k.c.demand.setCatalog(w.names)
	}
	w.names = nil
	if !w.delta {
		k.all = true
		return
	}
	for n := range w.scope.names {
		k.renamed.add(n)
	}
}

// show takes the rows that a stream has gathered of services that no other covers, before it
// is complete: somebody waits for them. What it does not have is known only then.
func (k *cache) show(w *watch, covers func(model.ServiceName) bool) {
	for n, s := range w.building.rows {
		if !covers(n) && len(s.rows) > 0 {
			k.have[n] = s.sorted()
			k.dirty.add(n)
		}
	}
}

// leave forgets the rows of what w covers, which is let go, and main does not.
func (k *cache) leave(w, main *watch) {
	for n := range w.scope.names {
		if !main.covers(n) && k.have[n] != nil {
			delete(k.have, n)
			k.dirty.add(n)
		}
	}
}

// wide notes why rows of all services are asked for; empty: they are not.
func (k *cache) wide(why string) {
	if k.broad == why {
		return
	}
	if k.broad == "" {
		k.c.log.Warn("rows of all services are kept", "reason", why)
	}
	k.broad, k.judged = why, true
}

// named takes a name of the catalog, which one stream tells of.
func (k *cache) named(w *watch, service string, in bool) {
	if w.delta {
		return
	}
	name, err := k.in.service(service)
	switch key := (rowKey{service: service}); {
	case err != nil && in:
		k.fault(w, key, badService, err.Error())
		return
	case err != nil:
		k.mended(w, key)
		return
	}
	if !w.complete || w.building != nil {
		if in {
			w.names.add(name)
			return
		}
		delete(w.names, name)
		if w.building != nil {
			return
		}
	}
	k.c.demand.named(name, in)
	k.renamed.add(name)
}

// fault counts a row that gives nothing, and names it once.
func (k *cache) fault(w *watch, key rowKey, f registry.Fault, why string) {
	p := model.Problem{Object: "Row " + key.ip + " of service " + key.service, Reason: why + "; the row is not served: whoever registers it must be brought up to date"}
	if key.ip == "" {
		p = model.Problem{Object: "Service " + key.service, Reason: why + "; it is not served"}
	}
	bad := k.bad
	if w.building != nil {
		bad = w.building.bad
	}
	_, listed := bad[key]
	room := listed || len(bad) < maxProblems
	if k.spoken[key] != why {
		i := slices.Index(faults[:], f)
		if i < 0 {
			i = len(faults) - 1
		}
		k.c.Malformed[i].Inc()
		if len(k.spoken) >= maxSpoken {
			clear(k.spoken)
		}
		k.spoken[key] = why
		if room {
			k.c.log.Warn("row not served", "service", key.service, "ip", key.ip, "protocol", key.protocol.String(), "fault", string(f), "reason", why)
		}
	}
	if room {
		bad[key] = p
		k.judged = true
	}
}

// mended: the row is valid, or gone.
func (k *cache) mended(w *watch, key rowKey) {
	delete(k.spoken, key)
	if w.building != nil {
		delete(w.building.bad, key)
		return
	}
	if _, ok := k.bad[key]; ok {
		delete(k.bad, key)
		k.judged = true
	}
}

// unknown speaks once of a kind of event.
func (k *cache) unknown(kind int32) {
	if k.strange[kind] || len(k.strange) >= maxProblems {
		return
	}
	k.strange[kind] = true
	k.c.log.Info("the registrar is newer than this node: an event that is not known is ignored", "type", kind)
}

// say tells the Sink what it has not heard. covers are the services whose rows are here.
func (k *cache) say(covers func(model.ServiceName) bool) {
	b := input.Batch{Tables: input.Tables{Endpoints: map[model.ServiceName][]model.Endpoint{}, Catalog: map[model.ServiceName][]model.ServiceName{}, Problems: map[string][]model.Problem{}}}
	catalog := k.c.demand.catalog // which nobody else changes
	if k.all {
		for n := range catalog {
			k.renamed.add(n)
		}
		for n := range k.said {
			k.renamed.add(n)
		}
	}
	for n := range k.renamed {
		switch cold := catalog.has(n) && !covers(n); {
		case cold && !k.said.has(n):
			k.said.add(n)
			b.Catalog[n] = []model.ServiceName{n}
		case !cold && k.said.has(n):
			delete(k.said, n)
			b.Catalog[n] = nil
		}
	}
	for n := range k.dirty {
		s := k.have[n]
		if s == nil {
			b.Endpoints[n] = nil
			k.clash(n, "")
			continue
		}
		s.given = true
		rows, clash := oneCluster(s.rows, k.c.cfg.Cluster)
		k.clash(n, clash)
		b.Endpoints[n] = slices.Clip(rows)
		if len(s.rows) == 0 {
			delete(k.have, n)
		}
	}
	if k.judged {
		now := make(map[string]model.Problem, len(k.bad))
		for key, p := range k.bad {
			now[key.String()] = p
		}
		if len(k.bad) >= maxProblems {
			now["rows"] = model.Problem{Object: "registry", Reason: fmt.Sprintf("%d rows or more cannot be used, and the first are listed; aether_agent_registry_malformed_total counts all", maxProblems)}
		}
		for n, p := range k.clashes {
			now["clash "+n.String()] = p
		}
		if k.broad != "" {
			now["scope"] = model.Problem{Object: "registry", Reason: k.broad + ": the rows of all services are kept until it needs fewer, which takes the memory of the whole mesh"}
		}
		for key, p := range now {
			if k.problems[key] != p {
				b.Problems[key] = []model.Problem{p}
			}
		}
		for key := range k.problems {
			if _, still := now[key]; !still {
				b.Problems[key] = nil
			}
		}
		k.problems = now
	}
	clear(k.dirty)
	clear(k.renamed)
	k.all, k.judged = false, false
	switch {
	case !k.told:
		k.told = true
		k.c.cfg.Sink.Replace(b) // of nothing, all is what differs
	case !b.Empty():
		k.c.cfg.Sink.Apply(b)
	}
}

// clash notes what is to be told of addresses of a service that several clusters have.
func (k *cache) clash(n model.ServiceName, why string) {
	was, is := k.clashes[n]
	switch {
	case why == "" && is:
		delete(k.clashes, n)
	case why == "" || why == was.Reason || !is && len(k.clashes) >= maxProblems:
		return
	default:
		k.clashes[n] = model.Problem{Object: "Service " + n.String(), Reason: why}
		k.c.log.Warn("rows not served", "service", n.String(), "reason", why)
	}
	k.judged = true
}

// oneCluster are the rows of which those are left out whose address another cluster's row
// has as well: a node can reach one of them, and that is its own cluster's, if that has
// one; else the first by name. why names one of those that are left out.
func oneCluster(rows []model.Endpoint, own string) (out []model.Endpoint, why string) {
	differ := func(i int) bool { return rows[i].IP == rows[i-1].IP && rows[i].Cluster != rows[i-1].Cluster }
	i := 1
	for ; i < len(rows) && !differ(i); i++ {
	}
	if i >= len(rows) {
		return rows, ""
	}
	for from := 0; from < len(rows); {
		to, keep := from, rows[from].Cluster
		for ; to < len(rows) && rows[to].IP == rows[from].IP; to++ {
			if c := rows[to].Cluster; c == own || keep != own && c < keep {
				keep = c
			}
		}
		for _, e := range rows[from:to] {
			if e.Cluster == keep {
				out = append(out, e)
			} else if why == "" {
				why = fmt.Sprintf("clusters %s and %s both have a pod at %s: %s's is served; give clusters that share a mesh addresses of their own", keep, e.Cluster, e.IP, keep)
			}
		}
		from = to
	}
	return out, why
}

// maxInterned bounds what is kept to find equal values by; beyond, sharing starts anew.
const maxInterned = 1 << 16

// interner keeps once what is the same in many rows. What it gave stays good when it starts anew.
type interner struct {
	strings  map[string]string
	services map[string]model.ServiceName
	ports    map[string][]model.Port
	metadata map[string]map[string]string
	scratch  []byte
}

func (t *interner) string(s string) string {
	if s == "" {
		return ""
	}
	if x, ok := t.strings[s]; ok {
		return x
	}
	if t.strings == nil || len(t.strings) >= maxInterned {
		t.strings = map[string]string{}
	}
	t.strings[s] = s
	return s
}

func (t *interner) service(key string) (model.ServiceName, error) {
	if n, ok := t.services[key]; ok {
		return n, nil
	}
	n, err := registry.ParseService(key)
	if err != nil {
		return n, err
	}
	if t.services == nil || len(t.services) >= maxInterned {
		t.services = map[string]model.ServiceName{}
	}
	n.Namespace = t.string(n.Namespace)
	t.services[key] = n
	return n, nil
}

// endpoint shares the parts of e.
func (t *interner) endpoint(e *model.Endpoint) {
	e.Node, e.Cluster, e.Region, e.Zone, e.SPIFFEID = t.string(e.Node), t.string(e.Cluster), t.string(e.Region), t.string(e.Zone), t.string(e.SPIFFEID)
	b := t.scratch[:0]
	for _, p := range e.Ports {
		b = append(b, byte(p.Number), byte(p.Number>>8), byte(p.Class))
	}
	switch x, ok := t.ports[string(b)]; {
	case !ok:
		if t.ports == nil || len(t.ports) >= maxInterned {
			t.ports = map[string][]model.Port{}
		}
		e.Ports = slices.Clip(e.Ports)
		t.ports[string(b)] = e.Ports
	case slices.Equal(x, e.Ports): // as they nearly always are
		e.Ports = x
	}
	if len(e.Metadata) == 0 {
		e.Metadata = nil
		t.scratch = b
		return
	}
	b = b[:0]
	for _, key := range slices.SortedFunc(maps.Keys(e.Metadata), cmp.Compare[string]) {
		v := e.Metadata[key]
		b = append(fmt.Appendf(b, "%d %d ", len(key), len(v)), key...)
		b = append(b, v...)
	}
	if x, ok := t.metadata[string(b)]; ok {
		e.Metadata = x
	} else {
		if t.metadata == nil || len(t.metadata) >= maxInterned {
			t.metadata = map[string]map[string]string{}
		}
		t.metadata[string(b)] = e.Metadata
	}
	t.scratch = b
}
