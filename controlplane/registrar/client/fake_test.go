package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrypb"
)

type (
	event   = registrypb.WatchEndpointsResponse
	request = registrypb.WatchEndpointsRequest
	row     = registrypb.ServiceEndpoint
)

// place is where a row stands (contract 9.4, 9.7).
type place struct {
	service  string
	protocol registrypb.Service_Protocol
	ip       string
}

// fleet is the registry with its registrars, which say contract 9.7 word for word. It is the
// client's oracle, and knows nothing of the client.
type fleet struct {
	mu      sync.Mutex
	rows    map[place]*row
	names   map[string]map[place]bool // rows of each service
	sorted  []string                  // names, ascending; nil: made when asked for
	version int
	up      map[string]*replica // by address
	dials   []string
	asked   []*request
	mute    bool   // registrars take streams and say nothing
	more    bool   // events of kinds that do not exist yet, among the others
	silent  bool   // nothing of the catalog where there is no snapshot
	stalls  int    // what streams of fewer names say does not arrive; see stall
	endless int    // what a stream of so many names or more begins with does not end; 0: it does
	naked   bool   // no snapshot for whoever has another version
	counts  bool   // versions are numbers that registrars count, and all have come to the same
	refuses error  // what streams end with at once
	strange uint32 // kinds that were sent
}

// replica is one registrar: its life is the epoch in its versions.
type replica struct {
	f       *fleet
	epoch   int
	streams map[*stream]bool
}

func newFleet(addrs ...string) *fleet {
	f := &fleet{rows: map[place]*row{}, names: map[string]map[place]bool{}, up: map[string]*replica{}}
	for _, a := range addrs {
		f.start(a)
	}
	return f
}

var epochs int

// start starts a registrar, in the place of the one that was there.
func (f *fleet) start(addr string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	epochs++
	f.up[addr] = &replica{f: f, epoch: epochs, streams: map[*stream]bool{}}
}

// kill ends a registrar and the streams it had.
func (f *fleet) kill(addr string, err error) {
	f.mu.Lock()
	r := f.up[addr]
	delete(f.up, addr)
	f.mu.Unlock()
	if r != nil {
		r.cut(err)
	}
}

// cut ends the streams of a registrar that goes on.
func (r *replica) cut(err error) {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	for s := range r.streams {
		s.end(err)
	}
	clear(r.streams)
}

// versionLocked names what there is as our registrar's does: 128 bits, in hexadecimal.
func (r *replica) versionLocked() string {
	if r.f.counts {
		return "57"
	}
	return fmt.Sprintf("%016x%016x", r.epoch, r.f.version)
}

// dial is client.Config.Dial.
func (f *fleet) dial(_ context.Context, addr string) (registrypb.RegistrarServiceClient, io.Closer, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dials = append(f.dials, addr)
	r := f.up[addr]
	if r == nil {
		return nil, nil, status.Error(codes.Unavailable, "connection refused")
	}
	return link{r: r}, io.NopCloser(nil), nil
}

// link is a connection to a replica.
type link struct {
	registrypb.RegistrarServiceClient
	r *replica
}

// stream is the client's end of a watch.
type stream struct {
	grpc.ClientStream
	ctx  context.Context
	q    *request
	wake chan struct{}

	mu      sync.Mutex
	out     []*event
	err     error
	stalled bool // nothing of it arrives for now
	few     int  // but for so many events
}

func (s *stream) put(e *event) {
	s.mu.Lock()
	s.out = append(s.out, e)
	s.mu.Unlock()
	s.ring()
}

func (s *stream) end(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	s.mu.Unlock()
	s.ring()
}

func (s *stream) ring() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Recv is grpc.ServerStreamingClient.
func (s *stream) Recv() (*event, error) {
	for {
		s.mu.Lock()
		if len(s.out) > 0 && (!s.stalled || s.few > 0) {
			s.few = max(s.few-1, 0)
			e := s.out[0]
			s.out = s.out[1:]
			s.mu.Unlock()
			return e, nil
		}
		err := s.err
		s.mu.Unlock()
		if err != nil {
			return nil, err
		}
		select {
		case <-s.wake:
		case <-s.ctx.Done():
			return nil, status.FromContextError(s.ctx.Err()).Err()
		}
	}
}

// WatchEndpoints is registrypb.RegistrarServiceClient.
func (l link) WatchEndpoints(ctx context.Context, q *request, _ ...grpc.CallOption) (grpc.ServerStreamingClient[event], error) {
	f := l.r.f
	f.mu.Lock()
	defer f.mu.Unlock()
	live := false
	for _, r := range f.up {
		live = live || r == l.r
	}
	if !live {
		return nil, status.Error(codes.Unavailable, "connection refused")
	}
	if f.refuses != nil {
		return nil, f.refuses
	}
	q = proto.Clone(q).(*request)
	f.asked = append(f.asked, q)
	s := &stream{ctx: ctx, q: q, wake: make(chan struct{}, 1), stalled: q.Filter != nil && len(q.Filter.Services) < f.stalls}
	if f.mute {
		return s, nil
	}
	for other := range l.r.streams { // the newer of two watches of one instance is meant
		if other.q.GetClusterName() == q.GetClusterName() && other.q.GetNodeName() == q.GetNodeName() && other.q.GetInstance() == q.GetInstance() {
			other.end(status.Error(codes.Aborted, "replaced"))
			delete(l.r.streams, other)
		}
	}
	l.r.streams[s] = true
	context.AfterFunc(ctx, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(l.r.streams, s)
	})
	l.r.beginLocked(s)
	return s, nil
}

// beginLocked says on a new stream what contract 9.7 says.
func (r *replica) beginLocked(s *stream) {
	v := r.versionLocked()
	if s.q.GetLastVersion() != v && (s.q.GetLastVersion() == "" || !r.f.naked) {
		for _, n := range r.f.namesLocked() {
			if !s.wants(n) {
				continue
			}
			for p := range r.f.names[n] {
				s.put(&event{Type: registrypb.WatchEndpointsResponse_EVENT_TYPE_FULL_SNAPSHOT, ServiceName: p.service, Protocol: p.protocol, Endpoint: r.f.rows[p], Version: v})
			}
		}
	}
	if s.q.GetLastVersion() != v || !r.f.silent {
		for _, n := range r.f.namesLocked() {
			s.put(&event{Type: registrypb.WatchEndpointsResponse_EVENT_TYPE_SERVICE_ADDED, ServiceName: n, Version: v})
		}
	}
	r.f.strangeLocked(s)
	if n := r.f.endless; n == 0 || s.q.Filter != nil && len(s.q.Filter.Services) < n {
		s.put(&event{Type: registrypb.WatchEndpointsResponse_EVENT_TYPE_SNAPSHOT_COMPLETE, Version: v})
	}
}

// strangeLocked sends what a newer registrar may.
func (f *fleet) strangeLocked(s *stream) {
	if f.more {
		f.strange++
		e := &event{Type: registrypb.WatchEndpointsResponse_EventType(40 + f.strange%3), ServiceName: "no/where"}
		b, err := proto.Marshal(e)
		if err == nil { // and a field that nobody knows
			err = proto.Unmarshal(append(b, 0xba, 0x3e, 1, 'x'), e)
		}
		if err != nil {
			panic(err)
		}
		s.put(e)
	}
}

// stall keeps what streams of fewer than so many names say, from now on; 0: what was kept arrives.
func (f *fleet) stall(fewer int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stalls = fewer
	for _, r := range f.up {
		for s := range r.streams {
			s.mu.Lock()
			s.stalled = s.q.Filter != nil && len(s.q.Filter.Services) < fewer
			s.mu.Unlock()
			s.ring()
		}
	}
}

// trickle lets n events of each stalled stream arrive.
func (f *fleet) trickle(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.up {
		for s := range r.streams {
			s.mu.Lock()
			s.few = n
			s.mu.Unlock()
			s.ring()
		}
	}
}

// release ends what open streams begin with, which was endless.
func (f *fleet) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.endless = 0
	for _, r := range f.up {
		for s := range r.streams {
			s.put(&event{Type: registrypb.WatchEndpointsResponse_EVENT_TYPE_SNAPSHOT_COMPLETE, Version: r.versionLocked()})
		}
	}
}

func (s *stream) wants(service string) bool {
	return s.q.Filter == nil || slices.Contains(s.q.Filter.Services, service)
}

// setLocked makes e the row at p; nil: there is none.
func (f *fleet) setLocked(p place, e *row) {
	_, was := f.rows[p]
	switch {
	case e == nil && was:
		delete(f.rows, p)
		if delete(f.names[p.service], p); len(f.names[p.service]) == 0 {
			delete(f.names, p.service)
			f.sorted = nil
		}
	case e != nil:
		f.rows[p] = e
		if !was {
			if f.names[p.service] == nil {
				f.names[p.service] = map[place]bool{}
				f.sorted = nil
			}
			f.names[p.service][p] = true
		}
	}
}

func (f *fleet) namesLocked() []string {
	if f.sorted == nil {
		f.sorted = slices.Sorted(maps.Keys(f.names))
	}
	return f.sorted
}

// put writes a row under one class; nil takes it away.
func (f *fleet) put(p place, e *row) {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := len(f.names)
	was := f.rows[p]
	if was == nil && e == nil {
		return
	}
	f.version++
	kind := registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_UPDATED
	switch {
	case e == nil:
		f.setLocked(p, nil)
		kind, e = registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_REMOVED, &row{Ip: p.ip}
	case was == nil:
		kind = registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_ADDED
		fallthrough
	default:
		f.setLocked(p, e)
	}
	now := len(f.names)
	for _, r := range f.up {
		for s := range r.streams {
			v := r.versionLocked()
			f.strangeLocked(s)
			if now > names {
				s.put(&event{Type: registrypb.WatchEndpointsResponse_EVENT_TYPE_SERVICE_ADDED, ServiceName: p.service, Version: v})
			}
			if s.wants(p.service) {
				s.put(&event{Type: kind, ServiceName: p.service, Protocol: p.protocol, Endpoint: e, Version: v})
			}
			if now < names {
				s.put(&event{Type: registrypb.WatchEndpointsResponse_EVENT_TYPE_SERVICE_REMOVED, ServiceName: p.service, Version: v})
			}
		}
	}
}

// gone takes a pod away, as UnregisterEndpoint does: REMOVED without a protocol (contract 9.7).
func (f *fleet) gone(service, ip string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := len(f.names)
	for c := range registrypb.Service_Protocol_name {
		f.setLocked(place{service, registrypb.Service_Protocol(c), ip}, nil)
	}
	f.version++
	now := len(f.names)
	for _, r := range f.up {
		for s := range r.streams {
			v := r.versionLocked()
			if s.wants(service) {
				s.put(&event{Type: registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_REMOVED, ServiceName: service, Endpoint: &row{Ip: ip}, Version: v})
			}
			if now < names {
				s.put(&event{Type: registrypb.WatchEndpointsResponse_EVENT_TYPE_SERVICE_REMOVED, ServiceName: service, Version: v})
			}
		}
	}
}

// again sends everything once more on the streams that are open, as after a resync.
func (f *fleet) again() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	for _, r := range f.up {
		for s := range r.streams {
			s.q.LastVersion = ""
			s.put(&event{Type: registrypb.WatchEndpointsResponse_EVENT_TYPE_FULL_SNAPSHOT}) // there may be no row
			r.beginLocked(s)
		}
	}
}

// lose takes a row away and tells nobody, as a registrar does that heard of it while it was cut off.
func (f *fleet) lose(service, ip string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range registrypb.Service_Protocol_name {
		f.setLocked(place{service, registrypb.Service_Protocol(c), ip}, nil)
	}
	f.version++
}

// cutAll ends all streams of all registrars.
func (f *fleet) cutAll(err error) {
	f.mu.Lock()
	var all []*replica
	for _, r := range f.up {
		all = append(all, r)
	}
	f.mu.Unlock()
	for _, r := range all {
		r.cut(err)
	}
}

func (f *fleet) requests() []*request {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.asked)
}

func (f *fleet) streams() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.up {
		n += len(r.streams)
	}
	return n
}

var errKilled = status.Error(codes.Unavailable, "transport is closing")

var errLoss = status.Error(codes.DataLoss, "too slow")

var errNone = errors.New("no such host")
