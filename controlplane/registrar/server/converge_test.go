package server

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/e2e/testseed"
)

var seeds = flag.Int("converge", testseed.Count(4, 12), "random histories of TestConvergence")

// TestConvergence: whatever happens in whatever order (writers by two replicas and by
// others, a store that goes away, fails or is replaced, watchers that go in the middle
// of anything and come back to any replica with any filter), a watcher ends with what
// the store has, and at no time holds a row that nobody ever wrote.
func TestConvergence(t *testing.T) {
	seed := testseed.Seed(t)
	for i := range uint64(*seeds) {
		t.Run(fmt.Sprint(i), func(t *testing.T) { converge(t, rand.New(rand.NewPCG(seed, i))) })
	}
}

func converge(t *testing.T, rnd *rand.Rand) {
	store := storetest.New("local", "local")
	const replicas, watchers, steps = 2, 3, 150
	var running [replicas]*replica
	var clients [replicas]registrypb.RegistrarServiceClient
	boot := func(i int) {
		running[i] = start(t, Config{Store: store}, func(s *Server) { s.maxEvents, s.confirmTime = 30, time.Millisecond })
		clients[i] = running[i].dial()
	}
	for i := range replicas {
		boot(i)
	}
	services := make([]model.ServiceName, 6)
	for i := range services {
		services[i] = model.ServiceName{Namespace: "shop", Name: fmt.Sprint("s", i)}
	}
	written := map[string]bool{} // rows that somebody wrote, whole
	weight := uint32(0)
	random := func() (model.ServiceName, *registrypb.ServiceEndpoint) {
		service := services[rnd.IntN(len(services))]
		ip := fmt.Sprintf("10.0.0.%d", rnd.IntN(5)+1)
		e := storetest.HTTP(ip, "node-a")
		if rnd.IntN(3) == 0 {
			e = both(ip)
		}
		weight++
		e.Weight = weight
		for _, r := range storetest.Rows("local", "local", service, e) {
			written[exact(r.Service.String(), r.Protocol, e)] = true
		}
		return service, e
	}
	type watching struct {
		*node
		filter []string
		open   bool
	}
	all := make([]*watching, watchers)
	for i := range all {
		all[i] = &watching{node: newNode(t)}
	}
	// check holds what a node has against what was ever written.
	check := func(w *watching, e *registrypb.WatchEndpointsResponse) {
		switch e.GetType() {
		case fullSnapshot, endpointAdded, endpointUpdated:
			if e.GetEndpoint() != nil && !written[exact(e.GetServiceName(), e.GetProtocol(), e.GetEndpoint())] {
				t.Fatalf("a row that nobody wrote: %v", e)
			}
			if e.GetEndpoint() != nil && w.filter != nil && !slices.Contains(w.filter, e.GetServiceName()) {
				t.Fatalf("a row past the filter: %v", e)
			}
		}
	}
	watch := func(w *watching) {
		w.filter = nil
		req := &registrypb.WatchEndpointsRequest{}
		if rnd.IntN(3) > 0 {
			w.filter = []string{}
			for _, s := range services {
				if rnd.IntN(2) == 0 {
					w.filter = append(w.filter, s.String())
				}
			}
			req = of(w.filter...)
		}
		req.Changes = rnd.IntN(4) > 0
		w.watch(clients[rnd.IntN(replicas)], req)
		w.open = true
	}
	read := func(w *watching, n int) {
		for range n {
			e, err := w.next()
			if err != nil {
				w.open = false
				return
			}
			check(w, e)
			if e.GetType() == snapshotComplete {
				return // what follows may not come before something happens
			}
		}
	}
	for range steps {
		switch w := all[rnd.IntN(watchers)]; rnd.IntN(12) {
		case 0, 1, 2:
			service, e := random()
			register(t, clients[rnd.IntN(replicas)], service, e)
		case 3:
			unregister(t, clients[rnd.IntN(replicas)], services[rnd.IntN(len(services))], fmt.Sprintf("10.0.0.%d", rnd.IntN(5)+1))
		case 4: // somebody else writes
			service, e := random()
			store.Set(storetest.Rows("local", "local", service, e)...)
		case 5:
			service, e := random()
			rows := storetest.Rows("local", "local", service, e)
			for i := range rows {
				rows[i].Endpoint = nil
			}
			store.Set(rows...)
		case 6:
			store.Down(errors.New("gone"))
			store.Up()
		case 7:
			if rnd.IntN(4) == 0 { // a replica is replaced
				i := rnd.IntN(replicas)
				running[i].stop()
				boot(i)
			}
		case 8:
			rows := store.All()
			rnd.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
			store.Reset(rows[:len(rows)*3/4]...)
		case 9:
			watch(w)
			read(w, rnd.IntN(30)) // and perhaps no more before it goes again
		default:
			if w.open && w.coming != nil {
				read(w, rnd.IntN(10))
			}
		}
	}
	for _, r := range running {
		eventually(t, "what was written to be shown", func() bool { return r.Status().Pending == 0 })
		eventually(t, "the store's last word", func() bool { return sameAs(r.Server, store.All()) })
	}
	for _, w := range all {
		if w.open {
			for err := error(nil); err == nil && w.String() != seen(store.All(), w.filter); {
				var e *registrypb.WatchEndpointsResponse
				if e, err = w.next(); err == nil {
					check(w, e)
				} else {
					w.open = false
				}
			}
		}
		if !w.open { // cut off, or its replica was replaced
			watch(w)
			w.complete()
		}
		w.wants(store.All(), w.filter)
		w.cancel()
	}
}

// exact is a row as a whole, for comparison.
func exact(service string, p registrypb.Service_Protocol, e *registrypb.ServiceEndpoint) string {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(e)
	if err != nil {
		panic(err)
	}
	return service + " " + p.String() + " " + string(b)
}

// sameAs reports whether s has exactly these rows.
func sameAs(s *Server, rows []registry.Row) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state.rows != len(rows) {
		return false
	}
	var sum digest
	for _, r := range rows {
		enc, err := encode(r)
		if err != nil {
			return false
		}
		sum = sum.plus(enc.sum)
	}
	return sum == s.state.sum
}
