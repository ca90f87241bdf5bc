// Package storetest is a registry.Store in memory, for tests of whoever stands above
// one: it can fail, lag, lose its watchers and be written to by others.
//
//   - Its watch keeps the promises of registry.Store: whole first, no gap, in order.
//   - Nothing in it takes time: what is to be late is held until the test lets it go.
//   - Safe for concurrent use, and usable inside a testing/synctest bubble.
//
// It knows no registrar and checks no row.
package storetest

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"sync"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

type key struct {
	region, cluster string
	service         model.ServiceName
	protocol        registrypb.Service_Protocol
	ip              string
}

// Store is the registry. Make it by New.
type Store struct {
	region, cluster string

	mu       sync.Mutex
	rows     map[key]registry.Row
	rev      int
	watches  map[*watch]bool
	refuse   func(Write) error // why a write fails; nil: none does
	held     chan struct{}     // closed by the release of HoldWrites; nil: writes are not held
	lagging  bool
	down     error
	writes   int
	attempts int
}

// watch is one caller of Watch: what it has not been told.
type watch struct {
	queue []registry.Change
	err   error // why it is interrupted; nil: it is not
	whole bool  // it is to be told everything
	said  bool  // of err
	wake  chan struct{}
}

// New makes an empty Store whose writes go to the partition of region and cluster.
func New(region, cluster string) *Store {
	return &Store{region: region, cluster: cluster, rows: map[key]registry.Row{}, watches: map[*watch]bool{}}
}

// Rows makes the rows of an endpoint of service as they stand in a store: one a class.
func Rows(region, cluster string, service model.ServiceName, e *registrypb.ServiceEndpoint) []registry.Row {
	var out []registry.Row
	for _, p := range registry.Protocols(e) {
		out = append(out, registry.Row{Region: region, Cluster: cluster, Service: service, Protocol: p, IP: e.GetIp(), Endpoint: e})
	}
	return out
}

// Endpoint makes a valid row of a pod on node that serves ports in these classes.
func Endpoint(ip, node string, ports map[uint32]registrypb.PortProtocol) *registrypb.ServiceEndpoint {
	e := &registrypb.ServiceEndpoint{
		Ip: ip, ClusterName: "local", Weight: 1024, PortProtocols: ports, Health: registrypb.ServiceEndpoint_HEALTHY,
		Locality:           &registrypb.ServiceEndpoint_Locality{Region: "local", Zone: "a"},
		KubernetesMetadata: &registrypb.ServiceEndpoint_KubernetesMetadata{NodeName: node, PodName: "pod-" + ip},
	}
	for p := range ports {
		e.Ports = append(e.Ports, p)
	}
	slices.Sort(e.Ports)
	if len(e.Ports) > 0 {
		e.Port = e.Ports[0]
	}
	return e
}

// HTTP is Endpoint with one HTTP port, 8080.
func HTTP(ip, node string) *registrypb.ServiceEndpoint {
	return Endpoint(ip, node, map[uint32]registrypb.PortProtocol{8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP})
}

// Set changes rows as another writer would; a nil Endpoint removes. Watchers hear of it at once.
func (s *Store) Set(rows ...registry.Row) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setLocked(rows)
}

// Reset replaces everything by rows, interrupting watchers: they hear of it as a whole Change.
func (s *Store) Reset(rows ...registry.Row) {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.rows)
	s.rev++
	for _, r := range rows {
		s.rows[keyOf(r)] = r
	}
	for w := range s.watches {
		w.queue, w.whole = nil, true
		w.poke()
	}
}

// Down interrupts every watch with err, and new ones, until Up.
func (s *Store) Down(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = err
	for w := range s.watches {
		w.interrupt(err)
	}
}

// Up ends Down: watchers are told everything.
func (s *Store) Up() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = nil
	for w := range s.watches {
		w.err, w.said = nil, false
		w.poke()
	}
}

// Lag holds back what watchers would be told, until the function it returns is called.
func (s *Store) Lag() (catchUp func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lagging = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.lagging = false
		for w := range s.watches {
			w.poke()
		}
	}
}

// FailWrites makes Put and Delete fail with err; nil ends that.
func (s *Store) FailWrites(err error) { s.FailWritesOf("", err) }

// FailWritesOf is FailWrites for the rows of one address.
func (s *Store) FailWritesOf(ip string, err error) {
	s.Refuse(func(w Write) error {
		if ip != "" && ip != w.IP {
			return nil
		}
		return err
	})
}

// Write is a call of Put or Delete.
type Write struct {
	Service model.ServiceName
	IP      string
	Row     *registrypb.ServiceEndpoint // nil: it is a Delete
}

// Refuse makes the writes fail for which why gives a reason; nil ends that. why is called
// while the Store is locked.
func (s *Store) Refuse(why func(Write) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuse = why
}

// HoldWrites makes Put and Delete wait, until the function it returns is called.
func (s *Store) HoldWrites() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	held := make(chan struct{})
	s.held = held
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.held == held {
			s.held = nil
		}
		close(held)
	}
}

// All returns the rows, sorted.
func (s *Store) All() []registry.Row {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.allLocked()
}

// Writes counts the calls of Put and Delete: those that were made, and those that succeeded.
func (s *Store) Writes() (attempts, done int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.attempts, s.writes
}

// Watch is registry.Store.
func (s *Store) Watch(ctx context.Context, on func(registry.Change), report func(error)) error {
	w := &watch{whole: true, wake: make(chan struct{}, 1)}
	s.mu.Lock()
	w.err = s.down
	s.watches[w] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watches, w)
	}()
	for {
		c, err, ok := s.next(w)
		switch {
		case err != nil:
			report(err)
			continue
		case ok:
			if c.Whole {
				report(nil)
			}
			on(c)
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.wake:
		}
	}
}

// next is what w is to be told next, if anything.
func (s *Store) next(w *watch) (c registry.Change, down error, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case w.err != nil:
		if w.said {
			return c, nil, false
		}
		w.said = true
		return c, w.err, false
	case s.lagging:
		return c, nil, false
	case w.whole:
		w.whole, w.queue = false, nil
		return registry.Change{Whole: true, Rows: s.allLocked(), Version: strconv.Itoa(s.rev)}, nil, true
	case len(w.queue) > 0:
		c, w.queue = w.queue[0], w.queue[1:]
		return c, nil, true
	}
	return c, nil, false
}

// Put is registry.Store.
func (s *Store) Put(ctx context.Context, service model.ServiceName, e *registrypb.ServiceEndpoint) error {
	e = proto.CloneOf(e)
	said := registry.StatementOf(e)
	return s.write(ctx, Write{service, e.GetIp(), e}, Rows(s.region, s.cluster, service, e), func(there registry.Statement) bool { return there.Outdates(said) })
}

// Delete is registry.Store.
func (s *Store) Delete(ctx context.Context, service model.ServiceName, ip string, by registry.Statement) error {
	return s.write(ctx, Write{service, ip, nil}, nil, func(there registry.Statement) bool { return there.Keeps(by) })
}

// Position is registry.Positioned's.
func (s *Store) Position() registry.Position {
	s.mu.Lock()
	defer s.mu.Unlock()
	return registry.Position{Revision: int64(s.rev)}
}

// Shown is registry.Positioned's: every watch has been told.
func (s *Store) Shown(p registry.Position) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		if w.whole || len(w.queue) > 0 && w.first() <= p.Revision {
			return false
		}
	}
	return true
}

// first is the revision of what waits first.
func (w *watch) first() int64 {
	n, err := strconv.ParseInt(w.queue[0].Version, 10, 64)
	if err != nil {
		panic(err) // setLocked made it
	}
	return n
}

func (s *Store) write(ctx context.Context, w Write, rows []registry.Row, late func(there registry.Statement) bool) error {
	s.mu.Lock()
	s.attempts++
	held := s.held
	s.mu.Unlock()
	if held != nil {
		select {
		case <-held:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuse != nil {
		if err := s.refuse(w); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	service, ip := w.Service, w.IP
	for p := range registrypb.Service_Protocol_name {
		if r, there := s.rows[key{s.region, s.cluster, service, registrypb.Service_Protocol(p), ip}]; there && late(registry.StatementOf(r.Endpoint)) {
			return registry.ErrOutdated
		}
	}
	set := map[key]bool{}
	for _, r := range rows {
		set[keyOf(r)] = true
	}
	for p := range registrypb.Service_Protocol_name {
		r := registry.Row{Region: s.region, Cluster: s.cluster, Service: service, Protocol: registrypb.Service_Protocol(p), IP: ip}
		if _, there := s.rows[keyOf(r)]; there && !set[keyOf(r)] {
			rows = append(rows, r)
		}
	}
	s.writes++
	s.setLocked(rows)
	return nil
}

func (s *Store) setLocked(rows []registry.Row) {
	if len(rows) == 0 {
		return
	}
	s.rev++
	for _, r := range rows {
		if r.Endpoint == nil {
			delete(s.rows, keyOf(r))
		} else {
			s.rows[keyOf(r)] = r
		}
	}
	for w := range s.watches {
		if !w.whole {
			w.queue = append(w.queue, registry.Change{Rows: slices.Clone(rows), Version: strconv.Itoa(s.rev)})
		}
		w.poke()
	}
}

func (s *Store) allLocked() []registry.Row {
	out := make([]registry.Row, 0, len(s.rows))
	for _, r := range s.rows {
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b registry.Row) int {
		return cmp.Or(cmp.Compare(a.Region, b.Region), cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.Service.String(), b.Service.String()),
			cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.IP, b.IP))
	})
	return out
}

func keyOf(r registry.Row) key { return key{r.Region, r.Cluster, r.Service, r.Protocol, r.IP} }

func (w *watch) interrupt(err error) {
	w.err, w.said, w.whole, w.queue = err, false, true, nil
	w.poke()
}

func (w *watch) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}
