package server

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/e2e/testseed"
)

// errSpace is what etcd answers to a put once its quota is used up (alarm NOSPACE).
var errSpace = errors.New("etcdserver: mvcc: database space exceeded")

// TestStoreWithoutSpace: pods come, drain and go for ten minutes while the store takes
// removals only, as etcd does without space. What their nodes have registered holds, and is
// in the store once there is space.
func TestStoreWithoutSpace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		var old []string
		for i := range 20 {
			old = append(old, fmt.Sprintf("10.0.1.%d", i+1))
		}
		store.Set(httpRows(cart, append(old, "10.0.0.1")...)...)
		store.Refuse(func(w storetest.Write) error {
			if w.Row != nil {
				return errSpace
			}
			return nil
		})
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		<-r.Synced()
		draining := storetest.HTTP("10.0.0.1", "node-a")
		draining.Health = registrypb.ServiceEndpoint_DRAINING
		register(t, c, cart, draining)                             // a pod that is there drains
		register(t, c, cart, storetest.HTTP("10.0.0.9", "node-a")) // a new one comes
		for m := range old {
			time.Sleep(30 * time.Second)   // virtual
			unregister(t, c, cart, old[m]) // and old ones go
			synctest.Wait()
			drains, comes := rowOf(r.Server, cart, "10.0.0.1").GetHealth() == registrypb.ServiceEndpoint_DRAINING, rowOf(r.Server, cart, "10.0.0.9") != nil
			if !drains || !comes || r.dropped.Value() != 0 {
				t.Fatalf("after %s: the draining pod drains: %v; the new pod is there: %v; %d given up", time.Duration(m+1)*30*time.Second, drains, comes, r.dropped.Value())
			}
		}
		st := r.Status()
		if waited := time.Since(st.RefusedSince); st.Refused != 2 || st.RefusedErr != errSpace.Error() || waited < 10*time.Minute || waited > 11*time.Minute {
			t.Errorf("the status says %d refused writes, %q, for %s: want 2, the store's reason and 10 min", st.Refused, st.RefusedErr, waited)
		}
		store.Refuse(nil)
		time.Sleep(maxBackoff + 2*writeTick)
		synctest.Wait()
		if st := r.Status(); len(store.All()) != 2 || st.Pending != 0 || st.Refused != 0 || st.RefusedErr != "" || !sameAs(r.Server, store.All()) {
			t.Errorf("once there is space the store has %v and the status is %+v", store.All(), st)
		}
	})
}

// rowOf is a pod's row in the snapshot; nil: there is none.
func rowOf(s *Server, service model.ServiceName, ip string) *registrypb.ServiceEndpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.state.rowsOf(service.String()) {
		if r.ip == ip {
			e := &registrypb.ServiceEndpoint{}
			if err := proto.Unmarshal(r.endpoint, e); err != nil {
				panic(err)
			}
			return e
		}
	}
	return nil
}

// TestOneSortRefused: a store that refuses one sort of write and takes all others for an
// hour loses none of those that it refuses, and has them once it takes them.
func TestOneSortRefused(t *testing.T) {
	large := func(e *registrypb.ServiceEndpoint) *registrypb.ServiceEndpoint {
		e = proto.CloneOf(e)
		e.Metadata = map[string]string{"note": strings.Repeat("x", 4000)}
		return e
	}
	for name, refused := range map[string]func(storetest.Write) bool{
		"puts":              func(w storetest.Write) bool { return w.Row != nil },
		"removals":          func(w storetest.Write) bool { return w.Row == nil },
		"large rows":        func(w storetest.Write) bool { return proto.Size(w.Row) > 2000 },
		"a service's":       func(w storetest.Write) bool { return w.Service == cart },
		"a service's puts":  func(w storetest.Write) bool { return w.Service == cart && w.Row != nil },
		"an address'":       func(w storetest.Write) bool { return strings.HasPrefix(w.IP, "10.0.0.") },
		"those of one node": func(w storetest.Write) bool { return w.Row.GetKubernetesMetadata().GetNodeName() == "node-a" },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := storetest.New("local", "local")
				store.Set(httpRows(cart, "10.0.0.1", "10.0.0.2")...)
				store.Refuse(func(w storetest.Write) error {
					if refused(w) {
						return errors.New("etcdserver: permission denied")
					}
					return nil
				})
				r := start(t, Config{Store: store})
				defer r.stop()
				c := r.dial()
				<-r.Synced()
				draining := large(storetest.HTTP("10.0.0.1", "node-a"))
				draining.Health = registrypb.ServiceEndpoint_DRAINING
				register(t, c, cart, draining)
				unregister(t, c, cart, "10.0.0.2")
				for i := range 60 { // others, large ones among them, are taken meanwhile, where they are not of that sort
					time.Sleep(time.Minute) // virtual
					other := storetest.HTTP(fmt.Sprintf("10.0.9.%d", i), "node-b")
					if i%2 == 0 {
						other = large(other)
					}
					register(t, c, pay, other)
					if i > 5 {
						unregister(t, c, pay, fmt.Sprintf("10.0.9.%d", i-5))
					}
				}
				synctest.Wait()
				if got := rowOf(r.Server, cart, "10.0.0.1"); !proto.Equal(got, draining) || rowOf(r.Server, cart, "10.0.0.2") != nil || r.dropped.Value() != 0 || r.Status().Refused == 0 {
					t.Errorf("after an hour: %d given up, %d refused; the draining pod is %s", r.dropped.Value(), r.Status().Refused, got.GetHealth())
				}
				store.Refuse(nil)
				time.Sleep(maxBackoff + 2*writeTick)
				synctest.Wait()
				if st := r.Status(); st.Pending != 0 || st.Refused != 0 || !sameAs(r.Server, store.All()) {
					t.Errorf("once all is taken: %+v", st)
				}
			})
		})
	}
}

// TestUnfit: a row that the store can never hold is given up although nothing else is
// written, holds up nobody meanwhile, and is found in the log's and the status' words.
func TestUnfit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		store.FailWritesOf("10.0.0.1", fmt.Errorf("%w: etcdserver: request is too large", registry.ErrUnfit))
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		<-r.Synced()
		register(t, c, cart, storetest.HTTP("10.0.0.1", "node-a"))
		register(t, c, cart, storetest.HTTP("10.0.0.2", "node-a"))
		time.Sleep(writeTick)
		synctest.Wait()
		if got := store.All(); len(got) != 1 || got[0].IP != "10.0.0.2" {
			t.Errorf("beside the row that is too large the store has %v, want 10.0.0.2", got)
		}
		time.Sleep(dropTime - time.Second)
		synctest.Wait()
		if st := r.Status(); r.dropped.Value() != 0 || st.Refused != 1 || !strings.Contains(st.RefusedErr, "too large") {
			t.Errorf("before %s: %d given up, %+v", dropTime, r.dropped.Value(), st)
		}
		time.Sleep(maxBackoff)
		synctest.Wait()
		if st := r.Status(); r.dropped.Value() != 1 || st.Pending != 0 || st.Refused != 0 || !sameAs(r.Server, store.All()) {
			t.Errorf("after %s: %d given up, %+v", dropTime, r.dropped.Value(), st)
		}
	})
}

// TestUnfitSeldom: a store that calls a write unfit fewer than dropTries times, as one does whose limit was too small for a
// moment, and otherwise has no space, loses it not, however long that lasts.
func TestUnfitSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		tries := 0
		store.Refuse(func(storetest.Write) error {
			if tries++; tries < dropTries {
				return fmt.Errorf("%w: etcdserver: request is too large", registry.ErrUnfit)
			}
			return errors.New("etcdserver: mvcc: database space exceeded")
		})
		r := start(t, Config{Store: store})
		defer r.stop()
		<-r.Synced()
		register(t, r.dial(), cart, storetest.HTTP("10.0.0.1", "node-a"))
		time.Sleep(10 * dropTime)
		synctest.Wait()
		if rowOf(r.Server, cart, "10.0.0.1") == nil || r.dropped.Value() != 0 || r.Status().Refused != 1 {
			t.Errorf("it is given up: %+v", r.Status())
		}
		store.Refuse(nil)
		time.Sleep(maxBackoff + 2*writeTick)
		synctest.Wait()
		if st := r.Status(); st.Pending != 0 || !sameAs(r.Server, store.All()) || len(store.All()) != 1 {
			t.Errorf("once it is taken: %+v", st)
		}
	})
}

// slowly is a store that takes long to refuse the writes of one service, and takes all others.
type slowly struct {
	*storetest.Store
	service model.ServiceName
}

func (s *slowly) Put(ctx context.Context, n model.ServiceName, e *registrypb.ServiceEndpoint) error {
	if n == s.service {
		<-ctx.Done() // writeTime
		return ctx.Err()
	}
	return s.Store.Put(ctx, n, e)
}

// TestRefusedSlowly: writes that a store refuses by letting them wait hold up none that it
// would take, however many they are.
func TestRefusedSlowly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &slowly{storetest.New("local", "local"), cart}
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		<-r.Synced()
		const waiting = 10 * maxWrites
		for i := range waiting {
			register(t, c, cart, storetest.HTTP(fmt.Sprintf("10.1.0.%d", i), "node-a"))
		}
		time.Sleep(waiting / maxWrites * writeTime * 3) // virtual: each has been tried, and most wait for a further try
		for i := range 20 {
			register(t, c, pay, storetest.HTTP(fmt.Sprintf("10.2.0.%d", i), "node-a"))
			time.Sleep(time.Second)
			synctest.Wait()
			if n := len(store.All()); n != i+1 {
				t.Fatalf("a second after registration %d the store has %d of them", i+1, n)
			}
		}
		if r.Status().Refused != waiting {
			t.Errorf("%d refused, want %d", r.Status().Refused, waiting)
		}
		unregister(t, c, cart, "10.1.0.0")    // another statement of a pod that waits is a new write
		time.Sleep(confirmTime + 2*writeTick) // there was no row to be shown gone
		synctest.Wait()
		if st := r.Status(); st.Pending != waiting-1 {
			t.Errorf("%d pending after a removal, which the store takes, want %d", st.Pending, waiting-1)
		}
	})
}

// TestRefusals: whatever sorts of write a store refuses, one after another and for however
// long, what was said last of each pod is in the snapshot at every moment and in the store in
// the end. Given up is only what the store calls unfit.
func TestRefusals(t *testing.T) {
	seed := testseed.Seed(t)
	for i := range uint64(*seeds) {
		t.Run(fmt.Sprint(i), func(t *testing.T) { refusals(t, rand.New(rand.NewPCG(seed, i))) })
	}
}

func refusals(t *testing.T, rnd *rand.Rand) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.New("local", "local")
		r := start(t, Config{Store: store})
		defer r.stop()
		c := r.dial()
		<-r.Synced()
		services := []model.ServiceName{cart, pay, none}
		type pod struct {
			service model.ServiceName
			ip      string
		}
		said := map[pod]*registrypb.ServiceEndpoint{} // what was said last; nil: removed
		check := func(when string) {
			t.Helper()
			synctest.Wait()
			for p, want := range said {
				if got := rowOf(r.Server, p.service, p.ip); !proto.Equal(got, want) {
					t.Fatalf("%s: pod %s of %s is %v, want %v", when, p.ip, p.service, got, want)
				}
			}
			if r.dropped.Value() != 0 {
				t.Fatalf("%s: %d given up", when, r.dropped.Value())
			}
		}
		for step := range 60 {
			switch rnd.IntN(3) {
			case 0: // the store refuses something else from now on
				kind, size, service, ip := rnd.IntN(3), rnd.IntN(3)*1000, services[rnd.IntN(3)], fmt.Sprintf("10.0.0.%d", rnd.IntN(6))
				every, calls := rnd.IntN(4), 0
				store.Refuse(func(w storetest.Write) error {
					calls++
					switch {
					case kind == 1 && w.Row == nil, kind == 2 && w.Row != nil: // the other kind of write
					case every == 0 && calls%2 == 0: // now and then
					case every == 1 && w.Service != service, every == 2 && w.IP != ip, every == 3 && proto.Size(w.Row) < size:
					default:
						return errors.New("refused")
					}
					return nil
				})
			default:
				p := pod{services[rnd.IntN(3)], fmt.Sprintf("10.0.0.%d", rnd.IntN(6))}
				if rnd.IntN(3) == 0 {
					unregister(t, c, p.service, p.ip)
					said[p] = nil
					break
				}
				e := storetest.HTTP(p.ip, "node-a")
				e.Health = registrypb.ServiceEndpoint_Health(rnd.IntN(4))
				e.Metadata = map[string]string{"note": strings.Repeat("x", rnd.IntN(3)*1000)}
				register(t, c, p.service, e)
				said[p] = e
			}
			time.Sleep(time.Duration(rnd.Int64N(int64(4 * time.Minute)))) // virtual
			check(fmt.Sprint("step ", step))
		}
		store.Refuse(nil)
		time.Sleep(maxBackoff + 2*writeTick + confirmTime)
		check("in the end")
		if st := r.Status(); st.Pending != 0 || !sameAs(r.Server, store.All()) {
			t.Fatalf("in the end the store has other rows than the snapshot: %+v", st)
		}
	})
}
