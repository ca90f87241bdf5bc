package local

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// follow runs a Follower of the world's pods.
func (w *world) follow() (f *Follower, stop func()) {
	f = NewFollower(w.pods)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	return f, func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	}
}

// containers are those that there are, in order.
func (w *world) containers() string {
	var out []string
	for _, s := range w.pods.State() {
		out = append(out, s.Container)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// TestFollow: pods come, change, leave and go as the list says.
func TestFollow(t *testing.T) {
	inWorld(t, nil, func(w *world) {
		f, stop := w.follow()
		defer func() { stop() }()
		tell := func(list ...Listed) {
			f.Tell(list, false)
			w.after(time.Millisecond)
		}
		one, two := Listed{Pod: cart(1)}, Listed{Pod: cart(2), Termination: Termination{PreStop: 10 * time.Second, Grace: 30 * time.Second}}
		tell(one, two)
		w.is("c1", "UNHEALTHY")
		w.after(probeInterval)
		w.is("c1", "HEALTHY")
		w.is("c2", "HEALTHY")

		// The same again is nothing; what differs is a further add, which demotes nobody.
		w.was()
		tell(one, two)
		if said := w.was(); said != "" {
			t.Errorf("the same list again: %s", said)
		}
		one.Annotations = map[string]string{"endpoint.aether.io/weight": "7"}
		tell(one, two)
		if said := w.was(); said != "register shop/cart HTTP 10.1.0.1 HEALTHY" {
			t.Errorf("another weight: %s", said)
		}

		// It leaves as its preStop says, and is gone when the list has it no more.
		two.Terminating = true
		tell(one, two)
		w.is("c2", "DRAINING")
		w.after(8 * time.Second)
		w.is("c2", "DRAINING")
		w.after(time.Second)
		w.is("c2", "UNHEALTHY")
		tell(one)
		w.is("c2", "")
		if got := w.containers(); got != "c1" {
			t.Errorf("there are %s", got)
		}

		// A successor of the address is another container: the row is the later one's.
		next := Listed{Pod: cart(1)}
		next.ContainerID, next.UID = "c1b", "uid-1b"
		tell(next)
		w.is("c1b", "UNHEALTHY")
		w.is("c1", "")

		// Another process knows the pods from disk; before the first list it removes nobody.
		stop()
		w.restart()
		f, stop = w.follow()
		w.after(time.Second)
		if got := w.containers(); got != "c1b" {
			t.Errorf("before the first list there are %s", got)
		}

		// A list in part removes no pod that it did not have, and one that it had.
		f.Tell([]Listed{two}, true)
		w.after(time.Second)
		if got := w.containers(); got != "c1b c2" {
			t.Errorf("after a list in part there are %s", got)
		}
		f.Tell(nil, true)
		w.after(time.Second)
		if got := w.containers(); got != "c1b" {
			t.Errorf("after a list in part that a pod has left there are %s", got)
		}
		tell(one)
		if got := w.containers(); got != "c1" {
			t.Errorf("there are %s", got)
		}
	})
}

// TestFollowAlreadyLeaving: a pod that is first seen while it leaves has no row.
func TestFollowAlreadyLeaving(t *testing.T) {
	inWorld(t, nil, func(w *world) {
		f, stop := w.follow()
		defer stop()
		p := Listed{Pod: cart(1), Termination: Termination{Grace: 30 * time.Second}}
		p.Terminating = true
		f.Tell([]Listed{p}, false)
		w.after(2 * probeInterval)
		w.is("c1", "")
		if got := w.containers(); got != "c1" {
			t.Errorf("there are %s", got)
		}
	})
}

// TestFollowFailures: what cannot be taken is a problem, holds up nobody, and is tried again.
func TestFollowFailures(t *testing.T) {
	inWorld(t, nil, func(w *world) {
		f, stop := w.follow()
		defer stop()
		bad := Listed{Pod: cart(2, "endpoint.aether.io/weight", "heavy")}
		none := Listed{Pod: cart(3)}
		none.Labels = nil
		f.Tell([]Listed{{Pod: cart(1)}, bad, none}, false)
		w.after(time.Millisecond)
		w.is("c1", "UNHEALTHY")
		w.set(func() {
			if p := w.problems["list c2"]; len(p) != 1 || p[0].Object != "Pod shop/cart-2" || !strings.Contains(p[0].Reason, "weight") {
				t.Errorf("%+v", w.problems)
			}
			if p := w.problems["list c3"]; len(p) != 1 || !strings.Contains(p[0].Reason, "none of the mesh's") {
				t.Errorf("%+v", w.problems)
			}
		})
		f.Tell([]Listed{{Pod: cart(1)}, {Pod: cart(2)}}, false)
		w.after(time.Millisecond)
		w.is("c2", "UNHEALTHY")
		w.set(func() {
			if len(w.problems) != 0 {
				t.Errorf("all is mended: %+v", w.problems)
			}
		})

		// A disk that takes nothing, and takes it later.
		dir := w.cfg.Dir
		if err := errors.Join(os.Rename(dir, dir+"-away"), os.WriteFile(dir, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		f.Tell([]Listed{{Pod: cart(1)}, {Pod: cart(2)}, {Pod: cart(4)}}, false)
		w.after(time.Millisecond)
		w.is("c4", "")
		if err := errors.Join(os.Remove(dir), os.Rename(dir+"-away", dir)); err != nil {
			t.Fatal(err)
		}
		w.after(followAgain)
		w.is("c4", "UNHEALTHY")
		w.set(func() {
			if len(w.problems) != 0 {
				t.Errorf("%+v", w.problems)
			}
		})
	})
}

// TestFollowManyWithoutRegistry: a registry that hangs holds pods up by little, and
// the end by nothing.
func TestFollowManyWithoutRegistry(t *testing.T) {
	inWorld(t, func(w *world) { w.hangs = true }, func(w *world) {
		f, stop := w.follow()
		const n = 2 * maxFollowed
		list := make([]Listed, n)
		for i := range list {
			list[i].Pod = cart(i + 1)
		}
		f.Tell(list, false)
		w.after(2 * ackWait)
		w.set(func() {
			if len(w.work) != n {
				t.Errorf("%d of %d pods are served", len(w.work), n)
			}
		})
		start := time.Now()
		stop()
		synctest.Wait()
		if took := time.Since(start); took > 0 {
			t.Errorf("the end took %s", took)
		}
	})
}
