package server

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"maps"
	"math/bits"
	"slices"
	"strings"
	"unique"

	"google.golang.org/grpc/mem"

	"aether/controlplane/registry"
)

// rowKey is where a row of a service stands.
type rowKey struct {
	ip              string
	region, cluster string // the partition
	protocol        protocol
}

func (k rowKey) compare(o rowKey) int {
	return cmp.Or(cmp.Compare(k.ip, o.ip), cmp.Compare(k.region, o.region), cmp.Compare(k.cluster, o.cluster), cmp.Compare(k.protocol, o.protocol))
}

// row is one row, encoded. Immutable: watchers, states and queues share it.
type row struct {
	rowKey
	body     mem.Buffer // the service's and the endpoint's field of an event
	endpoint []byte     // of body: the endpoint alone
	sum      digest     // of all that it says
	node     string     // of the pod; empty: not said
	stated   uint64     // when that node said it; 0: not said
}

// said is who said what the row says, and when.
func (r *row) said() registry.Statement { return registry.Statement{Node: r.node, Stated: r.stated} }

// change is a row that is there now, or, if row is nil, is not any more.
type change struct {
	key rowKey
	row *row
}

// service is a service that has rows, and so stands in the catalog.
type service struct {
	rows []*row // ascending by key; replaced as a whole, so that readers may keep it
	sum  digest // of rows
	name digest // its own, in the catalog's
	body mem.Buffer
}

// state is the snapshot: what the store says, with writes that wait for it in its
// place. It is guarded by Server.mu, but the rows of a service may be read without.
type state struct {
	services map[string]*service
	rows     int
	sum      digest // of all rows
	catalog  digest // of all names
	version  uint64 // grows with every change; for people
	names    []mem.Buffer
	nodes    map[string]map[string]int // by node: the services that it has rows of, and how many
	past     []past                    // what set changed last, the latest at the end
	kept     int                       // keys in past
}

// maxKept are the changes of rows that are remembered for watchers that come back. Who left
// before those is told everything.
const maxKept = 16384

// past is a change that set made: without its digests, it is what was before.
type past struct {
	service   string
	keys      []rowKey
	sum, name digest
}

// remember keeps what set changed, and forgets what was longest ago.
func (st *state) remember(n *news) {
	p := past{service: n.service, keys: make([]rowKey, len(n.rows)), sum: n.sum, name: n.name}
	for i := range n.rows {
		p.keys[i] = n.rows[i].key.rowKey
	}
	st.past = append(st.past, p)
	st.kept += len(p.keys)
	for st.kept > maxKept {
		st.kept -= len(st.past[0].keys)
		st.past[0] = past{}
		st.past = st.past[1:]
	}
}

// behind is what a watcher has to be told that has an earlier state. It is of one moment and
// shares what does not change, so that it costs the lock little; events may be called without.
type behind struct {
	past []past
	now  map[string][]*row // the rows of the services in past
	n    int               // keys in past: no fewer than there are events
}

// since is what a watcher is to be told whose rows are those of a version: it looks back for
// the state that had this version for w's filter. ok is false where none is remembered, or
// the changes are no fewer than the rows.
func (st *state) since(w *watcher, version string) (b *behind, ok bool) {
	want, ok := parseDigest(version)
	if !ok {
		return nil, false
	}
	sees, rows := map[string]bool{}, st.rows
	if !w.all {
		rows = 0
		for _, name := range w.filter {
			sees[name] = true
			rows += len(st.rowsOf(name))
		}
	}
	at, n := w.sum, 0
	i := len(st.past)
	for at != want {
		if i--; i < 0 {
			return nil, false
		}
		p := &st.past[i]
		at = at.minus(p.name)
		if !w.all && !sees[p.service] {
			continue
		}
		at = at.minus(p.sum)
		if n += len(p.keys); n >= rows {
			return nil, false
		}
	}
	b = &behind{now: map[string][]*row{}, n: n}
	for _, p := range st.past[i:] {
		if w.all || sees[p.service] {
			b.past = append(b.past, p)
			b.now[p.service] = st.rowsOf(p.service)
		}
	}
	return b, true
}

// events are the changes, each row once.
func (b *behind) events() (changes []event) {
	told := make(map[eventKey]bool, b.n)
	for _, p := range b.past {
		now := b.now[p.service]
		for _, k := range p.keys {
			key := eventKey{p.service, k}
			if told[key] {
				continue
			}
			told[key] = true
			if j, there := slices.BinarySearchFunc(now, k, func(r *row, k rowKey) int { return r.compare(k) }); there {
				changes = append(changes, event{typ: endpointUpdated, key: key, body: now[j].body})
			} else {
				changes = append(changes, event{typ: endpointRemoved, key: key, body: removal(p.service, k)})
			}
		}
	}
	return changes
}

func newState() state {
	return state{services: map[string]*service{}, nodes: map[string]map[string]int{}}
}

// catalogBodies are the SERVICE_ADDED of all names. The slice must not be changed.
func (st *state) catalogBodies() []mem.Buffer {
	if st.names == nil {
		st.names = make([]mem.Buffer, 0, len(st.services))
		for _, n := range slices.Sorted(maps.Keys(st.services)) {
			st.names = append(st.names, st.services[n].body)
		}
	}
	return st.names
}

// news is what set changed.
type news struct {
	service string
	rows    []event // in the order of rows
	sum     digest  // what rows adds to the digest of those who see the service
	catalog *event  // the service came or went
	name    digest  // what catalog adds to everybody's digest
}

func (n *news) empty() bool { return len(n.rows) == 0 }

// set replaces the rows of a service, which must be ascending and each key once.
// What has not changed stays the same object, so that nothing is kept twice.
func (st *state) set(name string, rows []*row) news {
	n := news{service: name}
	s := st.services[name]
	var old []*row
	if s != nil {
		old = s.rows
	}
	i := 0
	for j, r := range rows {
		if i < len(old) && old[i] == r {
			i++
			continue
		}
		for i < len(old) && old[i].compare(r.rowKey) < 0 {
			n.remove(old[i])
			st.count(name, old[i].node, -1)
			i++
		}
		switch {
		case i == len(old) || old[i].compare(r.rowKey) != 0:
			n.put(endpointAdded, r)
			st.count(name, r.node, 1)
		case old[i].sum == r.sum:
			rows[j] = old[i]
			i++
		default:
			n.sum = n.sum.minus(old[i].sum)
			n.put(endpointUpdated, r)
			st.count(name, old[i].node, -1)
			st.count(name, r.node, 1)
			i++
		}
	}
	for ; i < len(old); i++ {
		n.remove(old[i])
		st.count(name, old[i].node, -1)
	}
	if n.empty() {
		return n
	}
	switch {
	case s == nil:
		s = &service{name: sumOf("catalog", name), body: mem.SliceBuffer(serviceField(name))}
		st.services[name] = s
		n.catalog, n.name = &event{typ: serviceAdded, key: eventKey{service: name}, body: s.body}, s.name
	case len(rows) == 0:
		delete(st.services, name)
		n.catalog, n.name = &event{typ: serviceRemoved, key: eventKey{service: name}, body: s.body}, digest{}.minus(s.name)
	}
	if n.catalog != nil {
		st.names = nil
		st.catalog = st.catalog.plus(n.name)
	}
	s.rows, s.sum = rows, s.sum.plus(n.sum)
	st.rows += len(rows) - len(old)
	st.sum = st.sum.plus(n.sum)
	st.version++
	st.remember(&n)
	return n
}

// count counts a row of a node in, or out.
func (st *state) count(service, node string, by int) {
	if node == "" {
		return
	}
	of := st.nodes[node]
	if of == nil {
		of = map[string]int{}
		st.nodes[node] = of
	}
	if of[service] += by; of[service] != 0 {
		return
	}
	if delete(of, service); len(of) == 0 {
		delete(st.nodes, node)
	}
}

func (n *news) put(t eventType, r *row) {
	n.sum = n.sum.plus(r.sum)
	n.rows = append(n.rows, event{typ: t, key: eventKey{n.service, r.rowKey}, body: r.body})
}

func (n *news) remove(r *row) {
	n.sum = n.sum.minus(r.sum)
	n.rows = append(n.rows, event{typ: endpointRemoved, key: eventKey{n.service, r.rowKey}, body: removal(n.service, r.rowKey)})
}

// rowsOf are the rows of a service; nil: it is not there.
func (st *state) rowsOf(name string) []*row {
	if s := st.services[name]; s != nil {
		return s.rows
	}
	return nil
}

// merged are rows with changes made: of several to one key the last counts.
func merged(rows []*row, changes []change) []*row {
	slices.SortStableFunc(changes, func(a, b change) int { return a.key.compare(b.key) })
	out := make([]*row, 0, len(rows)+len(changes))
	i := 0
	for j, c := range changes {
		if j+1 < len(changes) && changes[j+1].key == c.key {
			continue
		}
		for i < len(rows) && rows[i].compare(c.key) < 0 {
			out = append(out, rows[i])
			i++
		}
		if i < len(rows) && rows[i].rowKey == c.key {
			i++
		}
		if c.row != nil {
			out = append(out, c.row)
		}
	}
	return append(out, rows[i:]...)
}

// pod are the bounds in rows of what one address has in a partition.
func pod(rows []*row, region, cluster, ip string) (from, to int) {
	at := func(p protocol) int {
		i, _ := slices.BinarySearchFunc(rows, rowKey{ip, region, cluster, p}, func(r *row, k rowKey) int { return r.compare(k) })
		return i
	}
	from = at(0)
	for to = from; to < len(rows) && rows[to].ip == ip && rows[to].region == region && rows[to].cluster == cluster; to++ {
	}
	return from, to
}

// withPod are rows with those of one address in a partition replaced.
func withPod(rows []*row, region, cluster, ip string, by []*row) []*row {
	from, to := pod(rows, region, cluster, ip)
	return slices.Concat(rows[:from], by, rows[to:])
}

// written are the other texts under which a partition has an address: whoever wrote them
// spelled it otherwise.
func written(rows []*row, region, cluster, ip string) (others []string) {
	for _, r := range rows {
		// Of IPv4 there is one text, but for its forms in IPv6.
		if r.ip != ip && strings.Contains(r.ip, ":") && r.region == region && r.cluster == cluster && registry.Address(r.ip) == ip && !slices.Contains(others, r.ip) {
			others = append(others, r.ip)
		}
	}
	return others
}

// same reports whether two lists of rows say the same.
func same(a, b []*row) bool {
	return slices.EqualFunc(a, b, func(a, b *row) bool { return a == b || a.rowKey == b.rowKey && a.sum == b.sum })
}

// digest stands for a set of things: it is the sum of those of its members, so it
// follows every change without a look at the rest. Equal digests mean equal sets,
// but for a chance of 2^-128; whoever may write rows could search for two sets that
// collide, and has easier ways to mislead.
type digest struct{ hi, lo uint64 }

func (d digest) plus(o digest) digest {
	lo, carry := bits.Add64(d.lo, o.lo, 0)
	hi, _ := bits.Add64(d.hi, o.hi, carry)
	return digest{hi, lo}
}

func (d digest) minus(o digest) digest {
	lo, borrow := bits.Sub64(d.lo, o.lo, 0)
	hi, _ := bits.Sub64(d.hi, o.hi, borrow)
	return digest{hi, lo}
}

func (d digest) String() string {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:], d.hi)
	binary.BigEndian.PutUint64(b[8:], d.lo)
	return hex.EncodeToString(b[:])
}

// parseDigest reads what String wrote.
func parseDigest(s string) (d digest, ok bool) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 16 {
		return digest{}, false
	}
	return digest{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}, true
}

// sumOf is the digest of one thing, which parts tell apart from all others.
func sumOf(parts ...string) digest {
	var b []byte
	for _, p := range parts {
		b = binary.AppendUvarint(b, uint64(len(p)))
		b = append(b, p...)
	}
	h := sha256.Sum256(b)
	return digest{binary.BigEndian.Uint64(h[:]), binary.BigEndian.Uint64(h[8:])}
}

func intern(s string) string { return unique.Make(s).Value() }
