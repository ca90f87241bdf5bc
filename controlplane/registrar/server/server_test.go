package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

const patience = 20 * time.Second // before a test that waits for an event has failed

var (
	cart = model.ServiceName{Namespace: "shop", Name: "cart"}
	pay  = model.ServiceName{Namespace: "shop", Name: "pay"}
	none = model.ServiceName{Namespace: "shop", Name: "none"}
)

func httpRows(service model.ServiceName, ips ...string) (out []registry.Row) {
	for _, ip := range ips {
		out = append(out, storetest.Rows("local", "local", service, storetest.HTTP(ip, "node-a"))...)
	}
	return out
}

func gone(service model.ServiceName, ip string) registry.Row {
	return registry.Row{Region: "local", Cluster: "local", Service: service, Protocol: registrypb.Service_PROTOCOL_HTTP, IP: ip}
}

// both is a pod that serves two classes, and so has two rows.
func both(ip string) *registrypb.ServiceEndpoint {
	return storetest.Endpoint(ip, "node-a", map[uint32]registrypb.PortProtocol{
		8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP, 5432: registrypb.PortProtocol_PORT_PROTOCOL_TCP})
}

// replica is a server that runs, and how to reach it.
type replica struct {
	*Server
	t    testing.TB
	ln   *bufconn.Listener
	stop func() // ends Run and waits for that; the second call does nothing
}

func start(t testing.TB, c Config, change ...func(*Server)) *replica {
	t.Helper()
	if c.Drain == 0 {
		c.Drain = -1
	}
	r := &replica{Server: New(c), t: t, ln: bufconn.Listen(1 << 20)}
	for _, f := range change {
		f(r.Server)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx, r.ln) }()
	stopped := false
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	t.Cleanup(r.stop)
	return r
}

func (r *replica) dial(opts ...grpc.DialOption) registrypb.RegistrarServiceClient {
	r.t.Helper()
	opts = append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return r.ln.DialContext(ctx) }),
	}, opts...)
	conn, err := grpc.NewClient("passthrough:///registrar", opts...)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return registrypb.NewRegistrarServiceClient(conn)
}

// node is a client as contract 9.7 describes one: it clears its cache at the first
// FULL_SNAPSHOT of a stream, and swaps the catalog at SNAPSHOT_COMPLETE.
type node struct {
	t       testing.TB
	rows    map[string]*registrypb.ServiceEndpoint // by service, class, cluster and address
	catalog map[string]bool
	version string // of the last event, whichever it was

	// Of the stream.
	stream  grpc.ServerStreamingClient[registrypb.WatchEndpointsResponse]
	cancel  func()
	coming  map[string]bool // the catalog until it is complete; nil: it is
	cleared bool
	full    int // FULL_SNAPSHOT of this stream
}

func newNode(t testing.TB) *node {
	n := &node{t: t, rows: map[string]*registrypb.ServiceEndpoint{}, catalog: map[string]bool{}, cancel: func() {}}
	t.Cleanup(func() { n.cancel() })
	return n
}

// watch begins a stream; services nil: no filter.
func (n *node) watch(c registrypb.RegistrarServiceClient, req *registrypb.WatchEndpointsRequest) *node {
	n.t.Helper()
	n.cancel()
	ctx, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	req = proto.CloneOf(req)
	req.LastVersion = n.version
	var err error
	if n.stream, err = c.WatchEndpoints(ctx, req); err != nil {
		n.t.Fatal(err)
	}
	n.coming, n.cleared, n.full = map[string]bool{}, false, 0
	return n
}

func of(services ...string) *registrypb.WatchEndpointsRequest {
	return &registrypb.WatchEndpointsRequest{Filter: &registrypb.ServiceFilter{Services: services}}
}

// next takes one event.
func (n *node) next() (*registrypb.WatchEndpointsResponse, error) {
	late := time.AfterFunc(patience, n.cancel)
	defer late.Stop()
	e, err := n.stream.Recv()
	if err != nil {
		return nil, err
	}
	n.version = e.GetVersion()
	key := func(p registrypb.Service_Protocol) string {
		return fmt.Sprintf("%s %s %s %s", e.GetServiceName(), p, e.GetEndpoint().GetClusterName(), e.GetEndpoint().GetIp())
	}
	switch e.GetType() {
	case fullSnapshot:
		if !n.cleared {
			n.cleared = true
			clear(n.rows)
		}
		n.full++
		if e.GetEndpoint() != nil {
			n.rows[key(e.GetProtocol())] = e.GetEndpoint()
		}
	case endpointAdded, endpointUpdated:
		n.rows[key(e.GetProtocol())] = e.GetEndpoint()
	case endpointRemoved:
		delete(n.rows, key(e.GetProtocol()))
		if e.GetProtocol() == 0 { // from every class
			for p := range registrypb.Service_Protocol_name {
				delete(n.rows, key(registrypb.Service_Protocol(p)))
			}
		}
	case serviceAdded:
		if n.coming != nil {
			n.coming[e.GetServiceName()] = true
		} else {
			n.catalog[e.GetServiceName()] = true
		}
	case serviceRemoved:
		delete(n.catalog, e.GetServiceName())
	case snapshotComplete:
		n.catalog, n.coming = n.coming, nil
	default:
		n.t.Errorf("an event of type %v", e.GetType())
	}
	return e, nil
}

// complete reads until SNAPSHOT_COMPLETE.
func (n *node) complete() *node {
	n.t.Helper()
	for n.coming != nil {
		if _, err := n.next(); err != nil {
			n.t.Fatalf("before SNAPSHOT_COMPLETE: %v", err)
		}
	}
	return n
}

// until reads until ok.
func (n *node) until(what string, ok func() bool) {
	n.t.Helper()
	for !ok() {
		if _, err := n.next(); err != nil {
			n.t.Fatalf("waiting for %s: %v\n%s", what, err, n)
		}
	}
}

// String is what the node knows: rows with ports and health, and the catalog.
func (n *node) String() string {
	var out []string
	for k, e := range n.rows {
		out = append(out, fmt.Sprintf("%s %v %s", k, e.GetPorts(), e.GetHealth()))
	}
	slices.Sort(out)
	return strings.Join(out, "\n") + "\ncatalog " + strings.Join(slices.Sorted(maps.Keys(n.catalog)), " ")
}

// seen is what a node should know of a store's rows with a filter (nil: none).
func seen(rows []registry.Row, filter []string) string {
	n := node{rows: map[string]*registrypb.ServiceEndpoint{}, catalog: map[string]bool{}}
	for _, r := range rows {
		n.catalog[r.Service.String()] = true
		if filter == nil || slices.Contains(filter, r.Service.String()) {
			n.rows[fmt.Sprintf("%s %s %s %s", r.Service, r.Protocol, r.Endpoint.GetClusterName(), r.IP)] = r.Endpoint
		}
	}
	return n.String()
}

func (n *node) wants(rows []registry.Row, filter []string) {
	n.t.Helper()
	if got, want := n.String(), seen(rows, filter); got != want {
		n.t.Errorf("the node knows\n%s\nwant\n%s", got, want)
	}
}

// ends reads until the stream ends, and wants it to for that reason.
func (n *node) ends(want codes.Code) {
	n.t.Helper()
	for {
		if _, err := n.next(); err != nil {
			if status.Code(err) != want {
				n.t.Errorf("the stream ended with %v, want %v", err, want)
			}
			return
		}
	}
}

func register(t testing.TB, c registrypb.RegistrarServiceClient, service model.ServiceName, e *registrypb.ServiceEndpoint) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := c.RegisterEndpoint(ctx, &registrypb.RegisterEndpointRequest{ServiceName: service.String(), Endpoint: e}); err != nil {
		t.Fatal(err)
	}
}

func unregister(t testing.TB, c registrypb.RegistrarServiceClient, service model.ServiceName, ips ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := c.UnregisterEndpoint(ctx, &registrypb.UnregisterEndpointRequest{ServiceName: service.String(), Ips: ips}); err != nil {
		t.Fatal(err)
	}
}

// TestFilter: unset is everything, set and empty nothing; the catalog comes whole,
// past the filter; SNAPSHOT_COMPLETE comes always.
func TestFilter(t *testing.T) {
	store := storetest.New("local", "local")
	store.Set(httpRows(cart, "10.0.0.1", "10.0.0.2")...)
	store.Set(storetest.Rows("local", "local", pay, both("10.0.0.3"))...)
	r := start(t, Config{Store: store})
	c := r.dial()
	for _, tt := range []struct {
		name   string
		req    *registrypb.WatchEndpointsRequest
		filter []string
	}{
		{"unset", &registrypb.WatchEndpointsRequest{}, nil},
		{"empty", of(), []string{}},
		{"one", of("shop/pay"), []string{"shop/pay"}},
		{"one twice, and one that does not exist", of("shop/pay", "shop/none", "shop/pay"), []string{"shop/pay", "shop/none"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t).watch(c, tt.req).complete()
			n.wants(store.All(), tt.filter)
		})
	}

	t.Run("changes", func(t *testing.T) {
		n := newNode(t).watch(c, of("shop/pay", "shop/none")).complete()
		store.Set(httpRows(cart, "10.0.0.9")...) // not for it
		store.Set(gone(cart, "10.0.0.1"), gone(cart, "10.0.0.2"), gone(cart, "10.0.0.9"))
		store.Set(httpRows(none, "10.0.0.4")...)
		n.until("a service that came, and one without rows to leave the catalog", func() bool { return len(n.rows) == 3 && !n.catalog["shop/cart"] })
		n.wants(store.All(), []string{"shop/pay", "shop/none"})
	})
}

// TestCatalogOrder: a service stands in the catalog before its first row comes, and
// until its last has gone.
func TestCatalogOrder(t *testing.T) {
	store := storetest.New("local", "local")
	r := start(t, Config{Store: store})
	n := newNode(t).watch(r.dial(), &registrypb.WatchEndpointsRequest{}).complete()
	store.Set(httpRows(cart, "10.0.0.1")...)
	for i, want := range []eventType{serviceAdded, endpointAdded, endpointRemoved, serviceRemoved} {
		if i == 2 {
			store.Set(gone(cart, "10.0.0.1"))
		}
		e, err := n.next()
		if err != nil {
			t.Fatal(err)
		}
		if e.GetType() != want {
			t.Errorf("event %d is %v, want %v", i, e.GetType(), want)
		}
	}
}

// TestVersion: rows come only to whom they are news. A version stands for what the
// watcher is told, so it is the same at another replica, or a restarted one, if and
// only if the contents are.
func TestVersion(t *testing.T) {
	store, other := storetest.New("local", "local"), storetest.New("local", "local")
	store.Set(httpRows(cart, "10.0.0.1", "10.0.0.2")...)
	store.Set(httpRows(pay, "10.0.0.3")...)
	other.Set(httpRows(pay, "10.0.0.3")...)
	other.Set(httpRows(cart, "10.0.0.2", "10.0.0.1")...) // in another order
	a, b := start(t, Config{Store: store}).dial(), start(t, Config{Store: other}).dial()

	n := newNode(t).watch(a, of("shop/cart")).complete()
	if n.full != 2 {
		t.Fatalf("%d rows in the first snapshot, want 2", n.full)
	}
	again := func(name string, c registrypb.RegistrarServiceClient, req *registrypb.WatchEndpointsRequest, full int, filter []string, s *storetest.Store) {
		t.Helper()
		n.watch(c, req).complete()
		if n.full != full {
			t.Errorf("%s: %d FULL_SNAPSHOT, want %d", name, n.full, full)
		}
		n.wants(s.All(), filter)
	}
	cartOnly := []string{"shop/cart"}
	again("the same again", a, of("shop/cart"), 0, cartOnly, store)
	again("another replica", b, of("shop/cart"), 0, cartOnly, other)
	again("another filter", a, of("shop/cart", "shop/pay"), 3, []string{"shop/cart", "shop/pay"}, store)
	again("no filter, the same rows", a, &registrypb.WatchEndpointsRequest{}, 0, nil, store)
	again("a further name without rows", a, of("shop/cart", "shop/pay", "shop/none"), 0, nil, store)
	again("back", a, of("shop/cart"), 2, cartOnly, store)

	// What the filter does not let through changes nothing.
	other.Set(httpRows(pay, "10.0.0.7")...)
	again("a change of another service", b, of("shop/cart"), 0, cartOnly, other)
	drained := storetest.HTTP("10.0.0.1", "node-a")
	drained.Health = registrypb.ServiceEndpoint_DRAINING
	other.Set(storetest.Rows("local", "local", cart, drained)...)
	n.until("DRAINING", func() bool { return strings.Contains(n.String(), "DRAINING") })
	again("one row is another", a, of("shop/cart"), 2, cartOnly, store)

	// Nothing is left: who had something is told so.
	other.Reset(httpRows(pay, "10.0.0.3")...)
	n.watch(b, of("shop/cart"))
	n.complete()
	n.until("the rows to go, and the name", func() bool { return n.String() == seen(other.All(), cartOnly) })
	other.Reset(httpRows(cart, "10.0.0.1")...)
	n.until("a row", func() bool { return len(n.rows) == 1 })
	n.watch(start(t, Config{Store: storetest.New("local", "local")}).dial(), of("shop/cart")).complete()
	n.wants(nil, cartOnly)
}

// TestPartialVersion: who was told a part of a change holds the version of no state.
func TestPartialVersion(t *testing.T) {
	store := storetest.New("local", "local")
	store.Set(httpRows(cart, "10.0.0.1")...)
	c := start(t, Config{Store: store}).dial()
	n := newNode(t).watch(c, &registrypb.WatchEndpointsRequest{}).complete()
	before := n.version
	store.Set(httpRows(cart, "10.0.0.2", "10.0.0.3")...)
	e, err := n.next()
	if err != nil {
		t.Fatal(err)
	}
	if e.GetVersion() == before {
		t.Errorf("half of a change has the version from before it")
	}
	n.watch(c, &registrypb.WatchEndpointsRequest{}).complete() // it goes in the middle, and comes back
	n.wants(store.All(), nil)
	store.Set(httpRows(cart, "10.0.0.4", "10.0.0.5")...)
	if _, err := n.next(); err != nil {
		t.Fatal(err)
	}
	n.cancel()
	store.Set(gone(cart, "10.0.0.2"), gone(cart, "10.0.0.3"), gone(cart, "10.0.0.4"), gone(cart, "10.0.0.5"))
	n.watch(c, &registrypb.WatchEndpointsRequest{}).complete() // to the version that it once had
	n.until("all", func() bool { return n.version == before })
	n.wants(store.All(), nil)
}

// TestNothingBeforeTheStore: watches and lists wait for the first whole state, for a
// bounded time; writes do not wait.
func TestNothingBeforeTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		store.Set(httpRows(cart, "10.0.0.1")...)
		catchUp := store.Lag()
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		begun := time.Now()
		n := newNode(t).watch(c, &registrypb.WatchEndpointsRequest{})
		n.ends(codes.Unavailable)
		if waited := time.Since(begun); waited < syncTime || waited > syncTime+time.Second {
			t.Errorf("it waited for %s, want %s", waited, syncTime)
		}
		if _, err := c.ListAllEndpoints(t.Context(), &registrypb.ListAllEndpointsRequest{}); status.Code(err) != codes.Unavailable {
			t.Errorf("a list before the store is here: %v", err)
		}
		register(t, c, pay, storetest.HTTP("10.0.0.2", "node-a"))
		n.watch(c, &registrypb.WatchEndpointsRequest{})
		synctest.Wait()
		catchUp()
		n.complete()
		n.wants(store.All(), nil)
		n.cancel()
		synctest.Wait()
	})
}

// TestRegisterAtOnce: a registration is in the snapshot and with the watchers before
// the store has it, and then in the store under every class.
func TestRegisterAtOnce(t *testing.T) {
	store := storetest.New("local", "local")
	release := store.HoldWrites()
	r := start(t, Config{Store: store})
	c := r.dial()
	n := newNode(t).watch(c, of("shop/pay")).complete()
	register(t, c, pay, both("10.0.0.1"))
	n.until("both rows", func() bool { return len(n.rows) == 2 })
	n.wants(storetest.Rows("local", "local", pay, both("10.0.0.1")), nil)
	if rows := store.All(); len(rows) > 0 {
		t.Fatalf("the store has it already: %v", rows)
	}
	release()
	eventually(t, "the store to have it", func() bool { return len(store.All()) == 2 })
	eventually(t, "the write to be confirmed", func() bool { return r.Status().Pending == 0 })
	n.wants(store.All(), []string{"shop/pay"})

	// A pod that stops serving a class leaves that key alone.
	register(t, c, pay, storetest.HTTP("10.0.0.1", "node-a"))
	n.until("one row", func() bool { return len(n.rows) == 1 })
	eventually(t, "the store to follow", func() bool { return len(store.All()) == 1 && r.Status().Pending == 0 })
	n.wants(store.All(), nil)

	// REMOVED of all.
	register(t, c, pay, both("10.0.0.1"))
	register(t, c, pay, both("10.0.0.2"))
	n.until("four rows", func() bool { return len(n.rows) == 4 })
	unregister(t, c, pay, "10.0.0.1", "10.0.0.77")
	n.until("two rows", func() bool { return len(n.rows) == 2 })
	eventually(t, "the store to follow", func() bool { return len(store.All()) == 2 })
	n.wants(store.All(), nil)
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// TestBadRows: what is not valid is refused, whatever the store, with the reason
// (contract 9.3).
func TestBadRows(t *testing.T) {
	for _, derived := range []bool{false, true} {
		store := storetest.New("local", "local")
		r := start(t, Config{Store: store, Derived: derived})
		c := r.dial()
		for name, tt := range map[string]struct {
			service string
			spoil   func(*registrypb.ServiceEndpoint)
			says    string
		}{
			"no namespace":     {"cart", func(*registrypb.ServiceEndpoint) {}, "<namespace>/<service account>"},
			"two slashes":      {"a/b/c", func(*registrypb.ServiceEndpoint) {}, "<namespace>/<service account>"},
			"no address":       {"shop/cart", func(e *registrypb.ServiceEndpoint) { e.Ip = "" }, "no address of a pod"},
			"no cluster":       {"shop/cart", func(e *registrypb.ServiceEndpoint) { e.ClusterName = "" }, "cluster_name is empty"},
			"no class":         {"shop/cart", func(e *registrypb.ServiceEndpoint) { e.PortProtocols = nil }, "port 8080 has no class"},
			"class of no port": {"shop/cart", func(e *registrypb.ServiceEndpoint) { e.PortProtocols[9] = 1 }, "port 9, which is not among ports"},
			"larger than anything real": {"shop/cart", func(e *registrypb.ServiceEndpoint) {
				e.Metadata = map[string]string{"x": strings.Repeat("x", maxRowBytes)}
			}, "give it less metadata"},
		} {
			e := storetest.HTTP("10.0.0.1", "node-a")
			tt.spoil(e)
			_, err := c.RegisterEndpoint(t.Context(), &registrypb.RegisterEndpointRequest{ServiceName: tt.service, Endpoint: e})
			if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%s (derived %v): %v, want InvalidArgument and %q", name, derived, err, tt.says)
			}
		}
		if _, err := c.RegisterEndpoint(t.Context(), &registrypb.RegisterEndpointRequest{ServiceName: "shop/cart"}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("no endpoint at all: %v", err)
		}
		if st := r.Status(); st.Rows != 0 || st.Pending != 0 {
			t.Errorf("something of it was taken: %+v", st)
		}
	}
}

// TestDerived: over a store that makes its rows itself, writes are taken and do nothing.
func TestDerived(t *testing.T) {
	store := storetest.New("local", "local")
	store.Set(httpRows(cart, "10.0.0.1")...)
	r := start(t, Config{Store: store, Derived: true})
	c := r.dial()
	n := newNode(t).watch(c, &registrypb.WatchEndpointsRequest{}).complete()
	register(t, c, cart, storetest.HTTP("10.0.0.2", "node-a"))
	unregister(t, c, cart, "10.0.0.1")
	store.Set(httpRows(pay, "10.0.0.3")...) // comes after them
	n.until("what the store says", func() bool { return len(n.rows) == 2 })
	n.wants(store.All(), nil)
	if attempts, _ := store.Writes(); attempts > 0 {
		t.Errorf("%d writes reached the store", attempts)
	}
	if l, err := c.ListAllEndpoints(t.Context(), &registrypb.ListAllEndpointsRequest{NodeName: "node-a"}); err != nil || !l.GetDerived() {
		t.Errorf("a node is not told that its rows are not what it registered: %v, %v", l, err)
	}
}

// TestShield: until the store shows what was written, what it says of that pod is not
// believed; afterwards it is.
func TestShield(t *testing.T) {
	draining := storetest.HTTP("10.0.0.1", "node-a")
	draining.Health = registrypb.ServiceEndpoint_DRAINING
	for _, tt := range []struct {
		name  string
		stale func(*storetest.Store)
	}{
		{"a change from before", func(s *storetest.Store) { s.Set(httpRows(cart, "10.0.0.1")...) }},
		{"a removal from before", func(s *storetest.Store) { s.Set(gone(cart, "10.0.0.1")) }},
		{"a whole state from before", func(s *storetest.Store) { s.Reset(httpRows(cart, "10.0.0.1", "10.0.0.2")...) }},
		{"a whole state without it", func(s *storetest.Store) { s.Reset(httpRows(cart, "10.0.0.2")...) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := storetest.New("local", "local")
				store.Set(httpRows(cart, "10.0.0.1", "10.0.0.2")...)
				r := start(t, Config{Store: store})
				defer r.stop()
				c := r.dial()
				n := newNode(t).watch(c, of("shop/cart")).complete()
				defer func() { n.cancel(); synctest.Wait() }()
				release := store.HoldWrites()
				register(t, c, cart, draining)
				tt.stale(store)
				store.Set(httpRows(cart, "10.0.0.3")...) // comes behind it
				n.until("the row behind", func() bool { return strings.Contains(n.String(), "10.0.0.3") })
				if !strings.Contains(n.String(), "10.0.0.1 [8080] DRAINING") {
					t.Errorf("the store's view from before the write got through:\n%s", n)
				}
				catchUp := store.Lag() // the write is done, and not shown yet
				release()
				synctest.Wait()
				if _, done := store.Writes(); done != 1 || r.Status().Pending != 1 {
					t.Errorf("%d writes done, %d pending, want 1 and 1: the store has not shown it", done, r.Status().Pending)
				}
				catchUp()
				synctest.Wait()
				if p := r.Status().Pending; p != 0 {
					t.Errorf("%d writes pending after the store has shown it", p)
				}
				store.Set(httpRows(cart, "10.0.0.1")...) // by somebody else, later
				n.until("the store's word", func() bool { return strings.Contains(n.String(), "10.0.0.1 [8080] HEALTHY") })
				n.wants(store.All(), nil)
			})
		})
	}
}

// TestShieldInARow: of several writes to one pod the store's view of an earlier one
// does not come through before that of the last.
func TestShieldInARow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		store.Set(httpRows(cart, "10.0.0.1")...)
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		n := newNode(t).watch(c, of("shop/cart")).complete()
		defer func() { n.cancel(); synctest.Wait() }()
		catchUp := store.Lag()
		unregister(t, c, cart, "10.0.0.1")
		synctest.Wait()
		register(t, c, cart, storetest.HTTP("10.0.0.1", "node-a")) // what the lagging store shows all the time
		synctest.Wait()
		if _, done := store.Writes(); done != 2 {
			t.Fatalf("%d writes done, want 2", done)
		}
		var events []eventType
		take := func() {
			e, err := n.next()
			if err != nil {
				t.Fatal(err)
			}
			events = append(events, e.GetType())
		}
		catchUp()
		store.Set(httpRows(pay, "10.0.0.9")...) // behind all
		for n.String() != seen(store.All(), []string{"shop/cart"}) || !n.catalog["shop/pay"] {
			take()
		}
		if want := []eventType{endpointRemoved, serviceRemoved, serviceAdded, endpointAdded, serviceAdded}; !slices.Equal(events, want) {
			t.Errorf("the node was told %v, want %v", events, want)
		}
		if p := r.Status().Pending; p != 0 {
			t.Errorf("%d writes pending", p)
		}
	})
}

// TestShownAndOverwritten: where the store shows what was written and what somebody
// else wrote over it in one breath, the latter is believed at once.
func TestShownAndOverwritten(t *testing.T) {
	for _, tt := range []struct {
		name    string
		pending *registrypb.ServiceEndpoint // nil: a removal
	}{
		{"a row", both("10.0.0.1")},
		{"a removal", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := storetest.New("local", "local")
				store.Set(storetest.Rows("local", "local", cart, both("10.0.0.1"))...)
				r := start(t, Config{Store: store})
				defer r.stop()
				c := r.dial()
				n := newNode(t).watch(c, of("shop/cart")).complete()
				defer func() { n.cancel(); synctest.Wait() }()
				defer store.Lag()()
				var rows []registry.Row
				if tt.pending != nil {
					tt.pending.Health = registrypb.ServiceEndpoint_UNHEALTHY
					register(t, c, cart, tt.pending)
					rows = storetest.Rows("local", "local", cart, tt.pending)
				} else {
					unregister(t, c, cart, "10.0.0.1")
					tcp := gone(cart, "10.0.0.1")
					tcp.Protocol = registrypb.Service_PROTOCOL_TCP
					rows = []registry.Row{gone(cart, "10.0.0.1"), tcp}
				}
				synctest.Wait() // written, and not shown
				later := both("10.0.0.1")
				later.Health = registrypb.ServiceEndpoint_DRAINING
				r.heard(registry.Change{Rows: append(rows, storetest.Rows("local", "local", cart, later)...), Version: "9"})
				if p := r.Status().Pending; p != 0 {
					t.Errorf("%d writes pending after the store has shown them", p)
				}
				n.until("what was written last", func() bool { return strings.Count(n.String(), "DRAINING") == 2 })
				if u := r.unconfirmed.Value(); u != 0 {
					t.Errorf("%d believed only after %s", u, confirmTime)
				}
			})
		})
	}
}

// TestUnconfirmed: a write that somebody else's covers before the store shows it does
// not hide the store for ever.
func TestUnconfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		catchUp := store.Lag()
		register(t, c, cart, storetest.HTTP("10.0.0.1", "node-a"))
		synctest.Wait()
		other := storetest.HTTP("10.0.0.1", "node-b")
		store.Reset(storetest.Rows("local", "local", cart, other)...)
		catchUp()
		time.Sleep(confirmTime + writeTick) // virtual
		n := newNode(t).watch(c, of("shop/cart")).complete()
		n.wants(store.All(), nil)
		if r.unconfirmed.Value() != 1 || r.Status().Pending != 0 {
			t.Errorf("%d unconfirmed, %d pending, want 1 and 0", r.unconfirmed.Value(), r.Status().Pending)
		}
		n.cancel()
		synctest.Wait()
	})
}

// TestLaggingWatch: a watch that is behind by more than confirmTime, and says of itself
// that it is well, reverts nothing that was written.
func TestLaggingWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		store.Set(httpRows(cart, "10.0.0.1")...)
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		n := newNode(t).watch(c, of("shop/cart")).complete()
		defer func() { n.cancel(); synctest.Wait() }()
		catchUp := store.Lag()
		draining := storetest.HTTP("10.0.0.1", "node-a")
		draining.Health = registrypb.ServiceEndpoint_DRAINING
		register(t, c, cart, draining)
		time.Sleep(10 * confirmTime) // virtual
		synctest.Wait()
		n.watch(c, of("shop/cart")).complete()
		if !strings.Contains(n.String(), "DRAINING") {
			t.Errorf("what was written is taken back before the store has come so far:\n%s", n)
		}
		if p, u := r.Status().Pending, r.unconfirmed.Value(); p != 1 || u != 0 {
			t.Errorf("%d pending and %d unconfirmed, want 1 and 0", p, u)
		}
		catchUp()
		synctest.Wait()
		if p := r.Status().Pending; p != 0 {
			t.Errorf("%d writes pending after the store has shown them", p)
		}
		n.wants(store.All(), nil)
	})
}

// TestBackoff: a write that fails is tried again after 1 s and up to 30 s, is done once
// the store takes it, and given up after 5 min in which the store calls it unfit: then the
// store's view holds.
func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		store.Set(httpRows(cart, "10.0.0.2")...)
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		n := newNode(t).watch(c, of("shop/cart")).complete()
		defer func() { n.cancel(); synctest.Wait() }()
		store.FailWrites(errors.New("no leader"))
		register(t, c, cart, storetest.HTTP("10.0.0.1", "node-a"))
		begun := time.Now()
		var at []time.Duration
		for last := 0; time.Since(begun) < 2*time.Minute; time.Sleep(10 * time.Millisecond) { // virtual
			synctest.Wait()
			if attempts, _ := store.Writes(); attempts > last {
				last = attempts
				at = append(at, time.Since(begun))
			}
		}
		for i := 1; i < len(at); i++ {
			want := min(time.Second<<(i-1), 30*time.Second)
			if gap := at[i] - at[i-1]; gap < want*3/4-20*time.Millisecond || gap > want+writeTick+20*time.Millisecond {
				t.Errorf("try %d came %s after the one before, want about %s", i+1, gap, want)
			}
		}
		if len(at) < 6 {
			t.Errorf("%d tries in two minutes", len(at))
		}
		store.FailWrites(nil)
		time.Sleep(maxBackoff + writeTick)
		synctest.Wait()
		if len(store.All()) != 2 || r.Status().Pending != 0 {
			t.Errorf("not written once the store takes it: %v", store.All())
		}

		store.FailWritesOf("10.0.0.1", fmt.Errorf("%w: too large", registry.ErrUnfit))
		unregister(t, c, cart, "10.0.0.1")
		n.until("the removal", func() bool { return len(n.rows) == 1 })
		others := func(d time.Duration) { // others are taken meanwhile
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second) {
				register(t, c, pay, storetest.HTTP("10.0.9.9", "node-a"))
			}
			synctest.Wait()
		}
		others(dropTime - time.Second)
		if r.dropped.Value() != 0 || r.Status().Pending != 1 {
			t.Error("given up too early")
		}
		others(maxBackoff)
		if r.dropped.Value() != 1 || r.Status().Pending != 0 {
			t.Errorf("%d given up, %d pending, want 1 and 0", r.dropped.Value(), r.Status().Pending)
		}
		n.until("the store's view", func() bool { return len(n.rows) == 2 && n.catalog["shop/pay"] })
		n.wants(store.All(), []string{"shop/cart"})
	})
}

// TestSaidAgain: what is registered again while it waits is not given up for what was
// said first.
func TestSaidAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		store.FailWritesOf("10.0.0.1", fmt.Errorf("%w: too large", registry.ErrUnfit))
		others := func(d time.Duration) { // others are taken meanwhile
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second) { // virtual
				register(t, c, pay, storetest.HTTP("10.0.9.9", "node-a"))
			}
			synctest.Wait()
		}
		for range 2 {
			register(t, c, cart, storetest.HTTP("10.0.0.1", "node-a"))
			others(dropTime - time.Minute)
		}
		if st := r.Status(); st.Rows != 2 || st.Pending != 1 || r.dropped.Value() != 0 {
			t.Errorf("%d rows, %d pending, %d given up, want 2, 1 and 0", st.Rows, st.Pending, r.dropped.Value())
		}
		others(dropTime)
		if st := r.Status(); st.Rows != 1 || r.dropped.Value() != 1 {
			t.Errorf("%d rows, %d given up, want 1 and 1", st.Rows, r.dropped.Value())
		}
	})
}

// TestSlowWriteHoldsNobody: a store that hangs costs a write its time, and no other
// registration its place with the watchers.
func TestSlowWriteHoldsNobody(t *testing.T) {
	store := storetest.New("local", "local")
	defer store.HoldWrites()()
	r := start(t, Config{Store: store})
	c := r.dial()
	n := newNode(t).watch(c, of("shop/cart")).complete()
	for i := range 10 * maxWrites {
		register(t, c, cart, storetest.HTTP(fmt.Sprintf("10.0.%d.%d", i/250, i%250+1), "node-a"))
	}
	n.until("all", func() bool { return len(n.rows) == 10*maxWrites })
	if attempts, _ := store.Writes(); attempts > maxWrites {
		t.Errorf("%d writes at once, want %d at most", attempts, maxWrites)
	}
}

// TestTooManyWrites: what cannot wait is refused, never lost; what waits may change.
// Removals have room of their own.
func TestTooManyWrites(t *testing.T) {
	store := storetest.New("local", "local")
	release := store.HoldWrites()
	const most = 300
	r := start(t, Config{Store: store}, func(s *Server) { s.maxPending = most })
	add := func(i int, h registrypb.ServiceEndpoint_Health) error {
		e := storetest.HTTP(fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255), "node-a")
		e.Health = h
		_, err := r.RegisterEndpoint(t.Context(), &registrypb.RegisterEndpointRequest{ServiceName: fmt.Sprintf("shop/s%d", i%7), Endpoint: e})
		return err
	}
	for i := range most {
		if err := add(i, registrypb.ServiceEndpoint_UNHEALTHY); err != nil {
			t.Fatal(err)
		}
	}
	if err := add(most, registrypb.ServiceEndpoint_UNHEALTHY); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one too many: %v", err)
	}
	for i := range most {
		if err := r.unregister(cart, []string{fmt.Sprintf("10.200.%d.%d", i>>8, i&255)}, registry.Statement{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.unregister(cart, []string{"10.201.0.1"}, registry.Statement{}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a removal too many: %v", err)
	}
	if err := add(7, registrypb.ServiceEndpoint_HEALTHY); err != nil {
		t.Errorf("a further write of a pod whose write waits: %v", err)
	}
	if st := r.Status(); st.Rows != most || r.full.Value() != 2 {
		t.Errorf("%d rows, %d refused, want %d and 2", st.Rows, r.full.Value(), most)
	}
	release()
	eventually(t, "all to be written", func() bool { return r.Status().Pending == 0 })
	rows := store.All()
	healthy := 0
	for _, r := range rows {
		if r.Endpoint.GetHealth() == registrypb.ServiceEndpoint_HEALTHY {
			healthy++
		}
	}
	if len(rows) != most || healthy != 1 {
		t.Errorf("%d rows in the store, %d healthy, want %d and 1", len(rows), healthy, most)
	}
}

// TestSlowWatcher is case 143: a watcher that does not read is cut with DATA_LOSS, and
// the others hear of everything meanwhile.
func TestSlowWatcher(t *testing.T) {
	store := storetest.New("local", "local")
	r := start(t, Config{Store: store}, few)
	everything := &registrypb.WatchEndpointsRequest{}
	slow, quick := newNode(t).watch(r.dial(), everything), newNode(t).watch(r.dial(), everything)
	slow.complete()
	quick.complete()
	const n = fewest * 20
	for i := range n {
		service := model.ServiceName{Namespace: "shop", Name: fmt.Sprint("s", i>>8)}
		store.Set(httpRows(service, fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255))...)
		quick.until("its row", func() bool { return len(quick.rows) == i+1 })
	}
	quick.wants(store.All(), nil)
	if r.slow.Value() != 1 {
		t.Errorf("%d watchers cut off, want 1", r.slow.Value())
	}
	slow.ends(codes.DataLoss)
	slow.watch(r.dial(), everything).complete()
	slow.wants(store.All(), nil)
}

// TestSlowButAlive: however often rows change, a watcher that reads now and then is
// not cut off, and is told the latest.
func TestSlowButAlive(t *testing.T) {
	store := storetest.New("local", "local")
	r := start(t, Config{Store: store}, few)
	n := newNode(t).watch(r.dial(), of("shop/cart")).complete()
	for i := range 20 * fewest {
		e := storetest.HTTP(fmt.Sprintf("10.0.0.%d", i%100+1), "node-a")
		e.Weight = uint32(i + 1)
		store.Set(storetest.Rows("local", "local", cart, e)...)
	}
	eventually(t, "the server to have heard all", func() bool { return r.Status().Changes == 20*fewest })
	n.until("the latest", func() bool { return n.rows["shop/cart PROTOCOL_HTTP local 10.0.0.100"].GetWeight() == 20*fewest })
	n.until("all", func() bool {
		for _, row := range store.All() {
			if !proto.Equal(n.rows["shop/cart PROTOCOL_HTTP local "+row.IP], row.Endpoint) {
				return false
			}
		}
		return true
	})
	if r.slow.Value() != 0 {
		t.Error("it was cut off")
	}
}

// few lets fewer events wait, so that a test is soon there.
func few(s *Server) { s.maxEvents = fewest }

const fewest = 200

// TestReplaced: a second watch of a node's instance ends the first; another instance,
// another node and watchers that do not say who they are do not.
func TestReplaced(t *testing.T) {
	store := storetest.New("local", "local")
	r := start(t, Config{Store: store})
	who := func(cluster, node, instance string) *registrypb.WatchEndpointsRequest {
		return &registrypb.WatchEndpointsRequest{ClusterName: cluster, NodeName: node, Instance: instance}
	}
	first := newNode(t).watch(r.dial(), who("local", "node-a", "1")).complete()
	var others []*node
	for _, w := range []*registrypb.WatchEndpointsRequest{who("local", "node-a", "2"), who("local", "node-b", "1"), who("west", "node-a", "1"), who("", "", ""), who("", "", "")} {
		others = append(others, newNode(t).watch(r.dial(), w).complete())
	}
	second := newNode(t).watch(r.dial(), who("local", "node-a", "1")).complete()
	first.ends(codes.Aborted)
	if got := r.Status().Watchers; got != 6 {
		t.Errorf("%d watchers, want 6", got)
	}
	store.Set(httpRows(cart, "10.0.0.1")...)
	for _, n := range append(others, second) {
		n.until("the row", func() bool { return len(n.rows) == 1 })
	}
	for _, n := range append(others, second) {
		n.cancel()
	}
	eventually(t, "all to be forgotten", func() bool { return r.Status().Watchers == 0 })
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.unscoped)+len(r.scoped)+len(r.named) > 0 {
		t.Error("something is left of them")
	}
}

// TestLists: ListAllEndpoints gives the rows that serve the class, of no class each
// pod once; ListAllConfig asks a store that has such.
func TestLists(t *testing.T) {
	store := storetest.New("local", "local")
	store.Set(storetest.Rows("local", "local", pay, both("10.0.0.1"))...)
	store.Set(httpRows(pay, "10.0.0.2")...)
	store.Set(httpRows(cart, "10.0.0.3")...)
	r := start(t, Config{Store: store})
	c := r.dial()
	for _, tt := range []struct {
		class registrypb.Service_Protocol
		want  string
	}{
		{registrypb.Service_PROTOCOL_HTTP, "shop/cart 10.0.0.3; shop/pay 10.0.0.1 10.0.0.2"},
		{registrypb.Service_PROTOCOL_TCP, "shop/pay 10.0.0.1"},
		{registrypb.Service_PROTOCOL_UDP, ""},
		{registrypb.Service_PROTOCOL_UNSPECIFIED, "shop/cart 10.0.0.3; shop/pay 10.0.0.1 10.0.0.2"},
	} {
		got, err := c.ListAllEndpoints(t.Context(), &registrypb.ListAllEndpointsRequest{Protocol: tt.class})
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for name, list := range got.GetServices() {
			line := name
			for _, e := range list.GetEndpoints() {
				line += " " + e.GetIp()
				if want := storetest.HTTP(e.GetIp(), "node-a"); e.GetIp() != "10.0.0.1" && !proto.Equal(e, want) {
					t.Errorf("%v, want %v", e, want)
				}
			}
			all = append(all, line)
		}
		slices.Sort(all)
		if s := strings.Join(all, "; "); s != tt.want {
			t.Errorf("%s: %q, want %q", tt.class, s, tt.want)
		}
		if n := newNode(t).watch(c, &registrypb.WatchEndpointsRequest{}).complete(); got.GetVersion() != n.version {
			t.Errorf("version %q, of a watch it is %q", got.GetVersion(), n.version)
		}
	}

	for node, want := range map[string]int{"node-a": 2, "node-b": 0} {
		got, err := c.ListAllEndpoints(t.Context(), &registrypb.ListAllEndpointsRequest{Protocol: registrypb.Service_PROTOCOL_HTTP, NodeName: node})
		if err != nil || len(got.GetServices()) != want {
			t.Errorf("rows of %s: %v, %v; want those of %d services", node, got, err, want)
		}
	}
	if got, err := c.ListAllConfig(t.Context(), &registrypb.ListAllConfigRequest{}); err != nil || len(got.GetProjections()) != 0 {
		t.Errorf("of a store without configuration: %v, %v", got, err)
	}
	c = start(t, Config{Store: configs{store}}).dial()
	if got, err := c.ListAllConfig(t.Context(), &registrypb.ListAllConfigRequest{}); err != nil || len(got.GetProjections()) != 1 || got.GetProjections()[0].GetService() != "shop/cart" {
		t.Errorf("%v, %v", got, err)
	}
}

type configs struct{ *storetest.Store }

func (configs) Configs(context.Context) ([]*registrypb.ServiceConfigProjection, error) {
	return []*registrypb.ServiceConfigProjection{{Service: "shop/cart", OriginCluster: "west"}}, nil
}

// TestRowsOfNode: what is listed of a node follows its rows as they come, move and go,
// and nothing is remembered of a node that has none.
func TestRowsOfNode(t *testing.T) {
	r := New(Config{Store: storetest.New("local", "local")})
	rnd := rand.New(rand.NewPCG(1, 2))
	var rows []registry.Row
	check := func(step int) {
		t.Helper()
		r.heard(registry.Change{Whole: true, Rows: rows})
		for i := range 5 {
			node, want, got := fmt.Sprintf("node-%d", i), 0, 0
			for _, row := range rows {
				if row.Endpoint.GetKubernetesMetadata().GetNodeName() == node {
					want++
				}
			}
			for _, p := range []registrypb.Service_Protocol{registrypb.Service_PROTOCOL_HTTP, registrypb.Service_PROTOCOL_TCP} {
				out, err := r.ListAllEndpoints(t.Context(), &registrypb.ListAllEndpointsRequest{Protocol: p, NodeName: node})
				if err != nil {
					t.Fatal(err)
				}
				b, err := proto.Marshal(out)
				if err == nil {
					err = proto.Unmarshal(b, out)
				}
				if err != nil {
					t.Fatal(err)
				}
				for _, list := range out.GetServices() {
					got += len(list.GetEndpoints())
				}
			}
			if got != want {
				t.Fatalf("step %d: %d rows of %s, want %d", step, got, node, want)
			}
		}
	}
	for step := range 200 {
		rows = nil
		for i := range rnd.IntN(30) {
			e := both(fmt.Sprintf("10.0.0.%d", i+1))
			if e.KubernetesMetadata.NodeName = fmt.Sprintf("node-%d", rnd.IntN(5)); rnd.IntN(8) == 0 {
				e.KubernetesMetadata.NodeName = ""
			}
			rows = append(rows, storetest.Rows("local", "local", []model.ServiceName{cart, pay, none}[rnd.IntN(3)], e)...)
		}
		check(step)
	}
	rows = nil
	check(-1)
	if n := len(r.state.nodes); n != 0 {
		t.Errorf("%d nodes are remembered that have no rows", n)
	}
}

// TestStoreAway: while the store is away what is known is served and registrations are
// heard of; when it is back, what it says counts, without an event for what is the same.
func TestStoreAway(t *testing.T) {
	store := storetest.New("local", "local")
	store.Set(httpRows(cart, "10.0.0.1", "10.0.0.2")...)
	r := start(t, Config{Store: store})
	c := r.dial()
	n := newNode(t).watch(c, of("shop/cart")).complete()
	store.Down(errors.New("connection refused"))
	store.FailWrites(errors.New("connection refused"))
	eventually(t, "it to be known", func() bool { return r.Status().StoreErr != "" })
	register(t, c, cart, storetest.HTTP("10.0.0.3", "node-a"))
	n.until("a registration", func() bool { return len(n.rows) == 3 })
	newNode(t).watch(c, of("shop/cart")).complete().wants(append(store.All(), httpRows(cart, "10.0.0.3")...), nil)
	store.Set(gone(cart, "10.0.0.1"))
	store.FailWrites(nil)
	store.Up()
	n.until("what happened meanwhile", func() bool { return len(n.rows) == 2 })
	eventually(t, "the write", func() bool { return len(store.All()) == 2 && r.Status().Pending == 0 })
	n.wants(store.All(), nil)
	if st := r.Status(); st.StoreErr != "" {
		t.Errorf("still away: %s", st.StoreErr)
	}
}

// TestReplicas: what one replica is told, the watchers of another hear by the store.
func TestReplicas(t *testing.T) {
	store := storetest.New("local", "local")
	a, b := start(t, Config{Store: store}).dial(), start(t, Config{Store: store}).dial()
	n := newNode(t).watch(b, of("shop/cart")).complete()
	register(t, a, cart, storetest.HTTP("10.0.0.1", "node-a"))
	n.until("the row", func() bool { return len(n.rows) == 1 })
	register(t, b, cart, storetest.HTTP("10.0.0.2", "node-a"))
	unregister(t, a, cart, "10.0.0.1")
	n.until("both", func() bool { return len(n.rows) == 1 && strings.Contains(n.String(), "10.0.0.2") })
	n.watch(a, of("shop/cart")).complete()
	n.until("the same at the other", func() bool { return n.String() == seen(store.All(), nil) })
}

// TestClusters: pods of two clusters that share an address are two, and the removal of
// one leaves the other.
func TestClusters(t *testing.T) {
	store := storetest.New("local", "local")
	west := storetest.HTTP("10.0.0.1", "node-w")
	west.ClusterName = "west"
	there := storetest.Rows("local", "west", cart, west)
	store.Set(there...)
	store.Set(httpRows(cart, "10.0.0.1")...)
	c := start(t, Config{Store: store}).dial()
	n := newNode(t).watch(c, of("shop/cart")).complete()
	n.wants(store.All(), nil)
	unregister(t, c, cart, "10.0.0.1")
	n.until("one to go", func() bool { return len(n.rows) == 1 })
	n.wants(there, nil)
}

// TestBadKeys: a row whose key cannot be sent is left out, and ends nobody's stream.
func TestBadKeys(t *testing.T) {
	store := storetest.New("local", "local")
	bad := httpRows(model.ServiceName{Namespace: "shop", Name: "ca\xffrt"}, "10.0.0.8")
	store.Set(append(bad, httpRows(cart, "10.0.0.1")...)...)
	r := start(t, Config{Store: store})
	n := newNode(t).watch(r.dial(), &registrypb.WatchEndpointsRequest{}).complete()
	n.wants(httpRows(cart, "10.0.0.1"), nil)
	if r.unencodable.Value() != 1 {
		t.Errorf("%d counted, want 1", r.unencodable.Value())
	}
}

// TestTooLargeForNodes: a row, or a name, that a node could not take is left out: it
// would end the stream of every node that is told of it, each time anew.
func TestTooLargeForNodes(t *testing.T) {
	store := storetest.New("local", "local")
	large := storetest.HTTP("10.0.0.8", "node-a")
	large.Metadata = map[string]string{"notes": strings.Repeat("x", 1<<20)}
	long := model.ServiceName{Namespace: "shop", Name: strings.Repeat("s", 1<<20)}
	store.Set(append(storetest.Rows("local", "local", cart, large), httpRows(long, "10.0.0.7")...)...)
	store.Set(httpRows(cart, "10.0.0.1")...)
	r := start(t, Config{Store: store})
	c := r.dial(grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1 << 20))) // nodes take a little more
	n := newNode(t).watch(c, &registrypb.WatchEndpointsRequest{}).complete()
	n.wants(httpRows(cart, "10.0.0.1"), nil)
	large = proto.CloneOf(large)
	large.Ip = "10.0.0.1" // a good row that becomes one
	store.Set(storetest.Rows("local", "local", cart, large)...)
	n.until("what stood there to go", func() bool { return len(n.rows) == 0 })
	if u := r.unencodable.Value(); u != 3 {
		t.Errorf("%d counted, want 3", u)
	}
	// Names that Kubernetes would not take as a namespace, or that are no part of a mesh name.
	for _, name := range []string{"shop/" + strings.Repeat("s", 64), strings.Repeat("n", 64) + "/cart", "Shop/cart", "shop/a.b", "shop/a_b", "-/cart", "shop/cart ", "shop/\x00"} {
		_, err := r.RegisterEndpoint(t.Context(), &registrypb.RegisterEndpointRequest{ServiceName: name, Endpoint: storetest.HTTP("10.0.0.2", "node-a")})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "letters, digits and -") {
			t.Errorf("service %q: %v", name, err)
		}
		// What an older registrar let in can be taken out.
		if _, err := r.UnregisterEndpoint(t.Context(), &registrypb.UnregisterEndpointRequest{ServiceName: name, Ips: []string{"10.0.0.2"}}); err != nil {
			t.Errorf("removing from service %q: %v", name, err)
		}
	}
}

// TestUnknownClasses: a row that has no place in the store takes no other one's.
func TestUnknownClasses(t *testing.T) {
	store := storetest.New("local", "local")
	store.Set(httpRows(cart, "10.0.0.1")...)
	r := start(t, Config{Store: store})
	c := r.dial()
	newNode(t).watch(c, of("shop/cart")).complete()
	newer := storetest.Endpoint("10.0.0.1", "node-a", map[uint32]registrypb.PortProtocol{8080: 77})
	_, err := c.RegisterEndpoint(t.Context(), &registrypb.RegisterEndpointRequest{ServiceName: "shop/cart", Endpoint: newer})
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("it is answered as if it were kept: %v", err)
	}
	if st := r.Status(); st.Rows != 1 || st.Pending != 0 {
		t.Errorf("%d rows and %d writes pending, want 1 and 0", st.Rows, st.Pending)
	}
	newNode(t).watch(c, of("shop/cart")).complete().wants(store.All(), nil)
}

// TestAsksTooMuch: what may be asked for is bounded, and addresses are some.
func TestAsksTooMuch(t *testing.T) {
	c := start(t, Config{Store: storetest.New("local", "local")}).dial()
	many := make([]string, maxFilter+1)
	for i := range many {
		many[i] = fmt.Sprintf("s/%d", i)
	}
	for _, req := range []*registrypb.WatchEndpointsRequest{of(many...), {NodeName: strings.Repeat("n", maxName+1)}} {
		newNode(t).watch(c, req).ends(codes.InvalidArgument)
	}
	for _, ips := range [][]string{slices.Repeat([]string{"10.0.0.1"}, maxIPs+1), {"10.0.0.1", "../x"}, {""}} {
		if _, err := c.UnregisterEndpoint(t.Context(), &registrypb.UnregisterEndpointRequest{ServiceName: "shop/cart", Ips: ips}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%.40q: %v", ips, err)
		}
	}
}

// TestStalled: a watcher that takes nothing while little waits is cut after a while.
func TestStalled(t *testing.T) {
	block := make(chan struct{})
	defer close(block)
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		r := start(t, Config{Store: store})
		defer r.stop()
		<-r.Synced()
		w := &watcher{all: true, ended: make(chan struct{}), wake: make(chan struct{}, 1), total: &r.queued, max: maxEvents}
		begin, err := r.join(w, "", false)
		if err != nil {
			t.Fatal(err)
		}
		defer r.part(w)
		letGo := make(chan struct{})
		sent := make(chan error, 1)
		go func() { sent <- w.send(stuck(letGo), begin) }()
		store.Set(httpRows(cart, "10.0.0.1")...)
		begun := time.Now()
		<-w.ended
		if took := time.Since(begun); took < stallTime || took > stallTime+3*lookEvery {
			t.Errorf("cut after %s, want %s", took, stallTime)
		}
		if status.Code(w.why.Err()) != codes.DataLoss || r.slow.Value() != 1 || r.queued.Load() != 0 {
			t.Errorf("ended with %v, %d counted, %d queued", w.why, r.slow.Value(), r.queued.Load())
		}
		close(letGo)
		<-sent
	})
}

// stuck is a stream whose messages nobody takes until it is closed.
type stuck chan struct{}

func (s stuck) SendMsg(any) error { <-s; return errors.New("ended") }

// TestLeaving: at the end watchers are sent away one after another, with GOAWAY before,
// and the store gets what it is owed.
func TestLeaving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		r := start(t, Config{Store: store, Drain: 10 * time.Second})
		const n = 10
		var nodes []*node
		for range n {
			nodes = append(nodes, newNode(t).watch(r.dial(), &registrypb.WatchEndpointsRequest{}).complete())
		}
		late := r.dial() // connected before, calls afterwards
		register(t, late, cart, storetest.HTTP("10.0.0.1", "node-a"))
		store.FailWrites(errors.New("no leader"))
		register(t, late, cart, storetest.HTTP("10.0.0.2", "node-a"))
		synctest.Wait()
		begun := time.Now()
		ended := make(chan time.Duration, n)
		for _, x := range nodes {
			go func() {
				x.ends(codes.Unavailable)
				ended <- time.Since(begun)
			}()
		}
		time.AfterFunc(9*time.Second, func() { store.FailWrites(nil) }) // before the end
		r.stop()
		took := time.Since(begun)
		var at []time.Duration
		for range n {
			at = append(at, <-ended)
		}
		slices.Sort(at)
		if at[0] > time.Second || at[n-1] < 8*time.Second || at[n-1] > 10*time.Second || at[n/2] < 4*time.Second || at[n/2] > 6*time.Second {
			t.Errorf("watchers were sent away at %v, want them spread over 10 s", at)
		}
		if took > 16*time.Second {
			t.Errorf("it took %s", took)
		}
		if rows := store.All(); len(rows) != 2 {
			t.Errorf("the store was owed two rows and has %v", rows)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := late.ListAllEndpoints(ctx, &registrypb.ListAllEndpointsRequest{}); status.Code(err) != codes.Unavailable {
			t.Errorf("a call after the end: %v", err)
		}
	})
}

// TestServices: what is generated from sees each pod once, and is told of changes.
func TestServices(t *testing.T) {
	store := storetest.New("local", "local")
	store.Set(storetest.Rows("local", "local", pay, both("10.0.0.1"))...)
	r := start(t, Config{Store: store})
	<-r.Synced()
	changed, end := r.Changed()
	defer end()
	store.Set(httpRows(cart, "10.0.0.3")...)
	select {
	case <-changed:
	case <-time.After(patience):
		t.Fatal("nothing was said of a change")
	}
	got := maps.Collect(r.Services())
	if len(got) != 2 || len(got[pay]) != 1 || !proto.Equal(got[pay][0], both("10.0.0.1")) || len(got[cart]) != 1 {
		t.Errorf("%v", got)
	}
}
