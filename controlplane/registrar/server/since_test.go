package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
)

// TestComesBack: a watcher that comes back is told of what has changed since, at whichever
// replica, and of everything where that is not known.
func TestComesBack(t *testing.T) {
	store := storetest.New("local", "local")
	ips := make([]string, 100)
	for i := range ips {
		ips[i] = fmt.Sprintf("10.0.0.%d", i+1)
	}
	store.Set(httpRows(cart, ips...)...)
	store.Set(httpRows(pay, ips[:50]...)...)
	replicas := []*replica{start(t, Config{Store: store}), start(t, Config{Store: store})}
	alike := func() {
		t.Helper()
		for _, r := range replicas {
			eventually(t, "the store's last word", func() bool { return sameAs(r.Server, store.All()) })
		}
	}
	drains := func(ip string) []registry.Row {
		e := storetest.HTTP(ip, "node-a")
		e.Health = registrypb.ServiceEndpoint_DRAINING
		return storetest.Rows("local", "local", cart, e)
	}
	everything, own := &registrypb.WatchEndpointsRequest{Changes: true}, of("shop/cart")
	own.Changes = true
	foreign := of("shop/pay")
	foreign.Changes = true
	old := proto.CloneOf(own)
	old.Changes = false
	for _, tt := range []struct {
		name   string
		req    *registrypb.WatchEndpointsRequest
		filter []string
		change func()
		told   int // rows; all: a snapshot
		all    bool
	}{
		{"nothing", own, []string{"shop/cart"}, func() {}, 0, false},
		{"one row", own, []string{"shop/cart"}, func() { store.Set(drains("10.0.0.1")...) }, 1, false},
		{"one row, of one that takes no changes", old, []string{"shop/cart"}, func() { store.Set(drains("10.0.0.2")...) }, 100, true},
		{"one row of another service", foreign, []string{"shop/pay"}, func() { store.Set(drains("10.0.0.3")...) }, 0, false},
		{"another service's name", foreign, []string{"shop/pay"}, func() { store.Set(httpRows(none, "10.0.0.1")...) }, 0, false},
		{"a row that goes", own, []string{"shop/cart"}, func() { store.Set(gone(cart, "10.0.0.100")) }, 1, false},
		{"a service that goes", everything, nil, func() { store.Set(gone(none, "10.0.0.1")) }, 1, false},
		{"one row, five times", everything, nil, func() {
			for i := range 5 {
				store.Set(drains("10.0.0.4")...)
				if i < 4 {
					store.Set(httpRows(cart, "10.0.0.4")...)
				}
			}
		}, 1, false},
		{"one row, there and back", own, []string{"shop/cart"}, func() { store.Set(drains("10.0.0.5")...); store.Set(httpRows(cart, "10.0.0.5")...) }, 0, false},
		{"a store that was away", own, []string{"shop/cart"}, func() { rows := store.All(); store.Reset(rows[1:]...) }, 1, false},
		{"as many as there are", own, []string{"shop/cart"}, func() {
			for _, ip := range ips {
				store.Set(drains(ip)...)
				store.Set(httpRows(cart, ip)...)
			}
			store.Set(drains("10.0.0.1")...)
		}, 100, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			alike()
			n := newNode(t).watch(replicas[0].dial(), tt.req).complete()
			n.cancel()
			tt.change()
			alike()
			for i, r := range replicas {
				again := newNode(t)
				again.version = n.version
				for k, e := range n.rows {
					again.rows[k] = e
				}
				again.watch(r.dial(), tt.req)
				rows := 0
				for again.coming != nil {
					e, err := again.next()
					if err != nil {
						t.Fatal(err)
					}
					if e.GetEndpoint() != nil {
						rows++
					}
					if since := e.GetSince(); since != "" && since != n.version {
						t.Errorf("since %q, and it came with %q", since, n.version)
					}
				}
				if rows != tt.told || (again.full > 0) != tt.all {
					t.Errorf("replica %d: %d rows were told, %d of a snapshot, want %d, a snapshot: %t", i, rows, again.full, tt.told, tt.all)
				}
				again.wants(store.All(), tt.filter)
				again.cancel()
			}
		})
	}
	alike()
	n := newNode(t).watch(replicas[0].dial(), own).complete()
	n.cancel()
	store.Set(drains("10.0.0.7")...)
	fresh := start(t, Config{Store: store}) // it knows nothing of before
	n.watch(fresh.dial(), own).complete().wants(store.All(), []string{"shop/cart"})
	if n.full == 0 {
		t.Error("a replica that has begun since sent no snapshot")
	}
}

// TestPastIsBounded: what is remembered for those who come back is bounded; who left before
// that is told everything, and what is no version of ours is none.
func TestPastIsBounded(t *testing.T) {
	st := newState()
	make := func(i int, h registrypb.ServiceEndpoint_Health) *row {
		e := storetest.HTTP(fmt.Sprintf("10.0.%d.%d", i>>8, i&255), "node-a")
		e.Health = h
		r, err := encodeIn("shop/cart", "local", "local", registrypb.Service_PROTOCOL_HTTP, e.GetIp(), e)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	rows := []*row{}
	for i := range 1000 {
		rows = append(rows, make(i, registrypb.ServiceEndpoint_HEALTHY))
	}
	slices.SortFunc(rows, func(a, b *row) int { return a.compare(b.rowKey) })
	st.set("shop/cart", rows)
	change := func(i int) {
		next := slices.Clone(st.rowsOf("shop/cart"))
		next[0] = make(0, registrypb.ServiceEndpoint_HEALTHY)
		next[0].rowKey = rows[0].rowKey
		next[0].sum = digest{1, uint64(i)}
		st.set("shop/cart", next)
	}
	now := func() *watcher { return &watcher{all: true, sum: st.catalog.plus(st.sum)} }
	version := now().sum.String()
	for i := range 500 {
		change(i)
	}
	if c, ok := st.since(now(), version); !ok || len(c.events()) != 1 {
		t.Errorf("after 500 changes of one row: %v, %t, want that row", c, ok)
	}
	for _, v := range []string{"", "-", "7", version[1:], version + "0", "zz" + version[2:], digest{1, 2}.String()} {
		if _, ok := st.since(now(), v); ok {
			t.Errorf("version %q is taken for a state", v)
		}
	}
	for i := range 2 * maxKept {
		change(1000 + i)
	}
	if n := len(st.past); n != maxKept || st.kept != maxKept {
		t.Errorf("%d changes of %d keys are remembered, want %d", n, st.kept, maxKept)
	}
	if _, ok := st.since(now(), version); ok {
		t.Error("what is forgotten is known")
	}
}

// TestWhatIsOwedIsBounded: what has changed counts among the events that wait for all watchers, until it is sent; where
// half of those wait already, a watcher that comes back is told everything, of which nothing is made for it.
func TestWhatIsOwedIsBounded(t *testing.T) {
	for _, tt := range []struct {
		waiting int64
		behind  bool
	}{{0, true}, {maxAllEvents/2 - 1, true}, {maxAllEvents / 2, false}, {maxAllEvents, false}} {
		s := New(Config{Store: storetest.New("local", "local")})
		rows := func(h registrypb.ServiceEndpoint_Health) (all []*row) {
			for i := range 3 {
				e := storetest.HTTP(fmt.Sprintf("10.0.0.%d", i+1), "node-a")
				if i == 0 {
					e.Health = h
				}
				r, err := encodeIn("shop/cart", "local", "local", registrypb.Service_PROTOCOL_HTTP, e.GetIp(), e)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, r)
			}
			return all
		}
		s.state.set("shop/cart", rows(registrypb.ServiceEndpoint_HEALTHY))
		version := s.seenLocked(true, nil).String()
		s.state.set("shop/cart", rows(registrypb.ServiceEndpoint_DRAINING))
		s.queued.Store(tt.waiting)
		w := &watcher{all: true, ended: make(chan struct{}), wake: make(chan struct{}, 1), total: &s.queued, max: maxEvents}
		begin, err := s.join(w, version, true)
		if err != nil {
			t.Fatal(err)
		}
		if owed := s.queued.Load() - tt.waiting; (begin.behind != nil) != tt.behind || (begin.rows == nil) != tt.behind || owed != int64(len(begin.since)/32) {
			t.Errorf("%d wait: %+v, %d owed", tt.waiting, begin, owed)
		}
		w.end(errGone)
		n := 0
		if err := w.send(senderFunc(func(any) error { n++; return nil }), begin); err != nil {
			t.Fatal(err)
		}
		if want := map[bool]int{true: 3, false: 5}[tt.behind]; n != want || s.queued.Load() != tt.waiting { // and name and end
			t.Errorf("%d wait: %d messages, want %d; %d wait afterwards", tt.waiting, n, want, s.queued.Load())
		}
		begin, _ = s.join(w, version, true)
		if err := w.send(senderFunc(func(any) error { return errors.New("gone") }), begin); err == nil || s.queued.Load() != tt.waiting {
			t.Errorf("%d wait: a watcher that goes leaves %d, %v", tt.waiting, s.queued.Load(), err)
		}
	}
}

type senderFunc func(any) error

func (f senderFunc) SendMsg(m any) error { return f(m) }

// BenchmarkComesBack: what it costs a registrar that a node comes back which has 10,001 rows,
// of which one has changed: as a snapshot, and as what has changed. bytes/op are those of rows
// and names on the wire, without gRPC's own.
func BenchmarkComesBack(b *testing.B) {
	store := storetest.New("local", "local")
	var filter []string
	for i := range 200 {
		n := cart
		n.Name = fmt.Sprint("s", i)
		filter = append(filter, n.String())
		var ips []string
		for j := range 50 {
			ips = append(ips, fmt.Sprintf("10.%d.0.%d", i, j+1))
		}
		store.Set(httpRows(n, ips...)...)
	}
	store.Set(httpRows(cart, "10.250.0.1")...)
	filter = append(filter, cart.String())
	r := start(b, Config{Store: store})
	<-r.Synced()
	eventually(b, "all", func() bool { return sameAs(r.Server, store.All()) })
	c := r.dial(grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1 << 20)))
	req := of(filter...)
	n := newNode(b).watch(c, req).complete()
	n.cancel()
	version := n.version
	e := storetest.HTTP("10.250.0.1", "node-a")
	e.Health = registrypb.ServiceEndpoint_DRAINING
	store.Set(storetest.Rows("local", "local", cart, e)...)
	eventually(b, "the change", func() bool { return sameAs(r.Server, store.All()) })
	for _, changes := range []bool{false, true} {
		b.Run(fmt.Sprintf("changes=%t", changes), func(b *testing.B) {
			bytes := 0
			for b.Loop() {
				req := proto.CloneOf(req)
				req.LastVersion, req.Changes = version, changes
				ctx, cancel := context.WithCancel(b.Context())
				stream, err := c.WatchEndpoints(ctx, req)
				if err != nil {
					b.Fatal(err)
				}
				bytes = 0
				for done := false; !done; {
					m, err := stream.Recv()
					if err != nil {
						b.Fatal(err)
					}
					bytes += proto.Size(m)
					done = m.GetType() == snapshotComplete
				}
				cancel()
			}
			b.ReportMetric(float64(bytes), "wire-bytes/op")
		})
	}
}
