package server

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// away is a store whose writes one replica cannot reach while its watch goes on.
type away struct {
	*storetest.Store
	is atomic.Bool
}

var errAway = errors.New("no route to the leader")

func (a *away) Put(ctx context.Context, n model.ServiceName, e *registrypb.ServiceEndpoint) error {
	if a.is.Load() {
		return errAway
	}
	return a.Store.Put(ctx, n, e)
}

func (a *away) Delete(ctx context.Context, n model.ServiceName, ip string, by registry.Statement) error {
	if a.is.Load() {
		return errAway
	}
	return a.Store.Delete(ctx, n, ip, by)
}

// said is an HTTP row as a node states it.
func said(ip, node string, at uint64, h registrypb.ServiceEndpoint_Health) *registrypb.ServiceEndpoint {
	e := storetest.HTTP(ip, node)
	e.Stated, e.Health = at, h
	return e
}

func unsaid(t testing.TB, c registrypb.RegistrarServiceClient, ip, node string, at uint64) {
	t.Helper()
	if _, err := c.UnregisterEndpoint(t.Context(), &registrypb.UnregisterEndpointRequest{ServiceName: cart.String(), Ips: []string{ip}, NodeName: node, Stated: at}); err != nil {
		t.Fatal(err)
	}
}

// TestLaterStatement is decision 032: what waits at one replica does not overwrite what
// the node has said later through another one, whichever reaches the store first.
func TestLaterStatement(t *testing.T) {
	const healthy, draining = registrypb.ServiceEndpoint_HEALTHY, registrypb.ServiceEndpoint_DRAINING
	const ip = "10.0.0.1"
	type calls func(t testing.TB, c registrypb.RegistrarServiceClient)
	says := func(node string, at uint64, h registrypb.ServiceEndpoint_Health) calls {
		return func(t testing.TB, c registrypb.RegistrarServiceClient) { register(t, c, cart, said(ip, node, at, h)) }
	}
	goes := func(node string, at uint64) calls {
		return func(t testing.TB, c registrypb.RegistrarServiceClient) { unsaid(t, c, ip, node, at) }
	}
	for _, tt := range []struct {
		name        string
		first, then calls // first waits at a replica that cannot write, then goes over the other
		want        *registrypb.ServiceEndpoint
	}{
		{"a change", says("node-a", 2, healthy), says("node-a", 3, draining), said(ip, "node-a", 3, draining)},
		{"a removal", goes("node-a", 2), says("node-a", 3, draining), said(ip, "node-a", 3, draining)},
		{"a removal, and another node has the address", goes("node-a", 9), says("node-b", 3, healthy), said(ip, "node-b", 3, healthy)},
		{"what another node said is no earlier", says("node-a", 2, draining), says("node-b", 3, healthy), said(ip, "node-a", 2, draining)},
		{"whoever does not say when is written as it comes", says("node-a", 0, draining), says("node-a", 3, healthy), said(ip, "node-a", 0, draining)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// What is late waits at a replica; or there, and that hears of nothing before it
			// writes; or it is the call itself that comes late.
			for _, how := range []string{"waits", "waits and lags", "calls late"} {
				synctest.Test(t, func(t *testing.T) {
					store := storetest.New("local", "local")
					store.Set(storetest.Rows("local", "local", cart, said(ip, "node-a", 1, healthy))...)
					near, far := &away{Store: store}, &away{Store: store}
					a, b := start(t, Config{Store: near}), start(t, Config{Store: far})
					defer a.stop()
					defer b.stop()
					want := storetest.Rows("local", "local", cart, tt.want)
					near.is.Store(true)
					if how != "calls late" {
						tt.first(t, a.dial())
						synctest.Wait()
					}
					catchUp := func() {}
					if how == "waits and lags" {
						catchUp = store.Lag()
					}
					tt.then(t, b.dial())
					synctest.Wait()
					if how == "calls late" {
						if tt.first(t, b.dial()); !sameAs(b.Server, want) {
							t.Error("it is shown before the store has said anything")
						}
					}
					near.is.Store(false)
					time.Sleep(maxBackoff + confirmTime) // virtual
					synctest.Wait()
					catchUp()
					time.Sleep(maxBackoff + confirmTime)
					synctest.Wait()
					if got := store.All(); !slices.EqualFunc(got, want, func(a, b registry.Row) bool { return proto.Equal(a.Endpoint, b.Endpoint) }) {
						t.Errorf("%s: the store has\n%v\nwant\n%v", how, got, want)
					}
					for i, r := range []*replica{a, b} {
						if !sameAs(r.Server, want) || r.Status().Pending != 0 {
							t.Errorf("%s: replica %d shows something else, with %d pending", how, i, r.Status().Pending)
						}
					}
				})
			}
		})
	}
}

// TestOvertaken: a replica that hears what was said later believes it at once, though it
// cannot write, and the write that is under way ends nothing that came after it.
func TestOvertaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		n := newNode(t).watch(c, of("shop/cart")).complete()
		defer func() { n.cancel(); synctest.Wait() }()
		release := store.HoldWrites()
		register(t, c, cart, said("10.0.0.1", "node-a", 2, registrypb.ServiceEndpoint_HEALTHY))
		synctest.Wait() // its write is under way
		store.Set(storetest.Rows("local", "local", cart, said("10.0.0.1", "node-a", 3, registrypb.ServiceEndpoint_DRAINING))...)
		n.until("the later word", func() bool { return strings.Contains(n.String(), "DRAINING") })
		if p := r.Status().Pending; p != 0 {
			t.Errorf("%d writes pending", p)
		}
		register(t, c, cart, said("10.0.0.1", "node-a", 4, registrypb.ServiceEndpoint_UNHEALTHY))
		release()
		n.until("the last word", func() bool { return strings.Contains(n.String(), "UNHEALTHY") })
		time.Sleep(maxBackoff + confirmTime) // virtual
		synctest.Wait()
		n.wants(store.All(), nil)
		if rows := store.All(); len(rows) != 1 || rows[0].Endpoint.GetStated() != 4 {
			t.Errorf("the store has %v", rows)
		}
		if r.outdated.Value() == 0 || r.unconfirmed.Value() != 0 || r.Status().Pending != 0 {
			t.Errorf("%d outdated, %d unconfirmed, %d pending", r.outdated.Value(), r.unconfirmed.Value(), r.Status().Pending)
		}
	})
}

// TestStoreAwayForHours: what was registered holds for as long as the store takes nothing,
// and is written once it does.
func TestStoreAwayForHours(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		store.Set(httpRows(cart, "10.0.0.1", "10.0.0.2")...)
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		<-r.Synced()
		store.Down(errors.New("connection refused"))
		store.FailWrites(errors.New("connection refused"))
		draining := storetest.HTTP("10.0.0.1", "node-a")
		draining.Health = registrypb.ServiceEndpoint_DRAINING
		register(t, c, cart, draining)
		unregister(t, c, cart, "10.0.0.2")
		want := storetest.Rows("local", "local", cart, draining)
		time.Sleep(24 * time.Hour) // virtual
		synctest.Wait()
		if !sameAs(r.Server, want) || r.dropped.Value() != 0 {
			t.Errorf("what was registered is reverted: %v, %d given up", r.Status(), r.dropped.Value())
		}
		store.FailWrites(nil)
		store.Up()
		time.Sleep(maxBackoff + writeTick)
		synctest.Wait()
		if got := store.All(); len(got) != 1 || got[0].Endpoint.GetHealth() != registrypb.ServiceEndpoint_DRAINING || r.Status().Pending != 0 {
			t.Errorf("the store has %v, %d pending", got, r.Status().Pending)
		}
	})
}

// TestSpelling: an address is one however it is spelled, in calls and in the store, and whether the call or what the
// store has comes first.
func TestSpelling(t *testing.T) {
	for _, first := range []string{"store", "call, store's first state", "call, store's change"} {
		synctest.Test(t, func(t *testing.T) {
			store := storetest.New("local", "local")
			other := storetest.Rows("west", "local", cart, storetest.HTTP("FD00::1", "node-w")) // not ours to write
			store.Set(other...)
			rows := httpRows(cart, "fd00::0001", "::ffff:10.0.0.2", "10.0.0.3")
			catchUp := func() {}
			lag := func() {
				if first != "store" {
					catchUp = store.Lag()
				}
			}
			if first != "call, store's change" {
				store.Set(rows...)
				lag()
			}
			r := start(t, Config{Store: store})
			defer r.stop()
			if first != "call, store's first state" {
				<-r.Synced()
			}
			if first == "call, store's change" {
				lag()
				store.Set(rows...)
			}
			c := r.dial()
			has := func(want ...string) {
				t.Helper()
				time.Sleep(confirmTime + writeTick) // virtual
				catchUp()
				time.Sleep(confirmTime + writeTick)
				synctest.Wait()
				var got []string
				for _, r := range store.All() {
					if r.Region == "local" {
						got = append(got, r.IP)
					}
				}
				if !slices.Equal(got, want) || r.Status().Rows != len(want)+len(other) || r.Status().Pending != 0 {
					t.Errorf("%s first: the store has %q, the snapshot %d rows, want %q", first, got, r.Status().Rows, want)
				}
			}
			register(t, c, cart, storetest.HTTP("FD00:0::1", "node-a"))
			has("10.0.0.3", "::ffff:10.0.0.2", "fd00::1")
			lag()
			if first != "store" {
				store.Set(httpRows(cart, "::FFFF:10.0.0.3")...)
			}
			unregister(t, c, cart, "fd00:0:0::1", "10.0.0.2", "10.0.0.3", "::ffff:10.0.0.3")
			has()
		})
	}
}

// TestStalledInItsSnapshot: a watcher that takes nothing is cut although nothing waits
// behind what it is being sent: its first snapshot, or a single event.
func TestStalledInItsSnapshot(t *testing.T) {
	for _, after := range []int{0, 1, 3} { // messages that it takes before
		synctest.Test(t, func(t *testing.T) {
			store := storetest.New("local", "local")
			store.Set(httpRows(cart, "10.0.0.1")...)
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
			go func() { sent <- w.send(&tired{after, letGo}, begin) }() // row, name, SNAPSHOT_COMPLETE
			defer func() { w.end(errGone); close(letGo); <-sent }()
			if after == 3 {
				time.Sleep(2 * stallTime) // virtual; it has all, and is not cut for that
				synctest.Wait()
				if w.why != nil {
					t.Fatalf("cut although it has all: %v", w.why)
				}
				store.Set(httpRows(cart, "10.0.0.2")...)
			}
			begun := time.Now()
			select {
			case <-w.ended:
			case <-time.After(10 * stallTime):
			}
			if took := time.Since(begun); took < stallTime-lookEvery || took > stallTime+3*lookEvery || r.slow.Value() != 1 {
				t.Errorf("after %d messages: cut after %s, want %s; %d counted", after, took, stallTime, r.slow.Value())
			}
		})
	}
}

// tired takes some messages, and then none until it is let go.
type tired struct {
	left  int
	letGo chan struct{}
}

func (s *tired) SendMsg(any) error {
	if s.left--; s.left >= 0 {
		return nil
	}
	<-s.letGo
	return errors.New("ended")
}

// late is a store that does what it is asked at once, and says so only when it is let.
type late struct {
	*storetest.Store
	letGo chan struct{}
}

func (l *late) Put(ctx context.Context, n model.ServiceName, e *registrypb.ServiceEndpoint) error {
	err := l.Store.Put(ctx, n, e)
	<-l.letGo
	return err
}

// TestOvertakenWhileWriting: the end of a write that was shown, and overtaken, before it
// was over ends nothing that came after it.
func TestOvertakenWhileWriting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &late{storetest.New("local", "local"), make(chan struct{})}
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		register(t, c, cart, said("10.0.0.1", "node-a", 2, registrypb.ServiceEndpoint_HEALTHY))
		synctest.Wait()
		store.Set(storetest.Rows("local", "local", cart, said("10.0.0.1", "node-a", 3, registrypb.ServiceEndpoint_DRAINING))...)
		synctest.Wait()
		register(t, c, cart, said("10.0.0.1", "node-a", 4, registrypb.ServiceEndpoint_UNHEALTHY))
		synctest.Wait()
		want := storetest.Rows("local", "local", cart, said("10.0.0.1", "node-a", 4, registrypb.ServiceEndpoint_UNHEALTHY))
		store.letGo <- struct{}{} // the first
		synctest.Wait()
		if !sameAs(r.Server, want) {
			t.Error("the end of the first write brought back what came before the last")
		}
		close(store.letGo)
		time.Sleep(confirmTime + writeTick) // virtual
		synctest.Wait()
		if got := store.All(); !sameAs(r.Server, want) || len(got) != 1 || got[0].Endpoint.GetStated() != 4 || r.Status().Pending != 0 {
			t.Errorf("the store has %v, the replica shows %v", got, r.Status())
		}
	})
}

// outdating is a store whose first removal takes its time, and finds that what is there was said later.
type outdating struct {
	*storetest.Store
	letGo chan struct{}
	said  chan uint64
}

func (o *outdating) Delete(ctx context.Context, n model.ServiceName, ip string, by registry.Statement) error {
	o.said <- by.Stated
	if by.Stated == 2 {
		<-o.letGo
		return registry.ErrOutdated
	}
	return o.Store.Delete(ctx, n, ip, by)
}

// TestSaidAgainWhileWriting: that the store refuses a removal says nothing of the same one that was said again, later.
func TestSaidAgainWhileWriting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &outdating{storetest.New("local", "local"), make(chan struct{}), make(chan uint64, 8)}
		store.Set(storetest.Rows("local", "local", cart, said("10.0.0.1", "node-a", 1, registrypb.ServiceEndpoint_HEALTHY))...)
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		synctest.Wait()
		unsaid(t, c, "10.0.0.1", "node-a", 2)
		synctest.Wait()
		unsaid(t, c, "10.0.0.1", "node-a", 4)
		close(store.letGo)
		synctest.Wait()
		if n := len(store.said); n != 2 || len(store.All()) != 0 {
			t.Fatalf("the store was told %d times, and has %v", n, store.All())
		}
		if a, b := <-store.said, <-store.said; a != 2 || b != 4 {
			t.Errorf("the store was told of %d and %d", a, b)
		}
	})
}
