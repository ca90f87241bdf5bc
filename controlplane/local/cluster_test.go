package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"aether/controlplane/endpointmeta"
)

// withCluster has the world's API server asked, which has these pods.
func withCluster(pods ...Pod) func(*world) {
	return func(w *world) {
		w.cfg.Cluster, w.cfg.EvictLost, w.api, w.own = w, true, map[string]ClusterPod{}, map[string]Pod{}
		for _, p := range pods {
			w.api[p.Name] = ofAPI(p)
		}
	}
}

// leaving is p while the API server says that it leaves.
func leaving(p Pod, t Termination) ClusterPod {
	c := ofAPI(p)
	c.Live, c.Leaving, c.Termination = false, true, t
	return c
}

func gone(p Pod) ClusterPod {
	c := leaving(p, Termination{PreStop: time.Hour, Grace: time.Hour}) // which is over
	c.Gone = true
	return c
}

// TestLeaving: contract 13.3, by the API server's word.
func TestLeaving(t *testing.T) {
	long := Termination{PreStop: 10 * time.Second, Grace: 30 * time.Second}
	t.Run("by its UID, in all of its containers", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			first, second, other := cart(1), cart(2), cart(3)
			second.UID, second.Name = first.UID, first.Name // its sandbox was made anew
			other.Name = first.Name                         // of the same name, and another pod
			for _, p := range []Pod{first, second, other} {
				w.healthy(p)
			}
			w.pods.Leaving(leaving(first, long))
			w.after(0)
			w.is("c1", "DRAINING")
			w.is("c2", "DRAINING")
			w.is("c3", "HEALTHY")
			w.after(long.PreStop - time.Second - 1)
			w.pods.Leaving(leaving(first, long)) // said once more: the clock goes on
			w.is("c1", "DRAINING")
			w.after(1)
			w.is("c1", "UNHEALTHY")
			w.is("c3", "HEALTHY")
			w.pods.Leaving(gone(first))
			w.after(0)
			w.is("c1", "")
			w.is("c2", "")
			w.is("c3", "HEALTHY")
		})
	})
	t.Run("by its name where no UID is recorded", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			p, api := cart(1), cart(1)
			p.UID = ""
			w.healthy(p)
			w.pods.Leaving(gone(api)) // it may be an older one's end
			w.after(0)
			w.is("c1", "HEALTHY")
			w.pods.Leaving(leaving(api, long))
			w.after(0)
			w.is("c1", "DRAINING")
		})
	})
	t.Run("killed at once, it has no row", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.healthy(cart(2))
			w.pods.Leaving(gone(cart(1)))
			w.pods.Leaving(leaving(cart(2), Termination{PreStop: 10 * time.Second}))
			w.after(0)
			w.is("c1", "")
			w.is("c2", "")
			w.after(10 * time.Minute)
			w.is("c1", "")
		})
	})
	t.Run("before it is here", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			unmanaged := leaving(cart(3), long)
			unmanaged.Labels = nil
			w.pods.Leaving(leaving(cart(1), long))
			w.pods.Leaving(leaving(cart(2), long))
			w.pods.Leaving(gone(cart(2)))
			w.pods.Leaving(unmanaged)
			if len(w.pods.early) != 1 {
				t.Errorf("%v are remembered", w.pods.early)
			}
			w.add(cart(1)) // the call was on its way
			w.after(2 * probeInterval)
			w.is("c1", "")
			if len(w.pods.early) != 0 {
				t.Errorf("%v are remembered", w.pods.early)
			}
			for i := range 2 * maxEarly {
				p := cart(1)
				p.UID = fmt.Sprint("other-", i)
				w.pods.Leaving(leaving(p, long))
			}
			if len(w.pods.early) != maxEarly {
				t.Errorf("%d are remembered, want %d at most", len(w.pods.early), maxEarly)
			}
		})
	})
	t.Run("what was said unheard is found by the next sweep", func(t *testing.T) {
		inWorld(t, withCluster(cart(1)), func(w *world) {
			w.healthy(cart(1))
			w.set(func() { w.api["cart-1"] = leaving(cart(1), long) })
			w.after(sweepInterval)
			w.is("c1", "DRAINING")
			w.after(long.PreStop)
			w.is("c1", "UNHEALTHY")
		})
	})
	t.Run("an end under way does not become healthy again by an API server that is away", func(t *testing.T) {
		inWorld(t, withCluster(cart(1)), func(w *world) {
			w.healthy(cart(1))
			w.pods.Leaving(leaving(cart(1), long))
			w.set(func() { w.apiErr, w.askErr = errors.New("away"), errors.New("away") })
			w.after(10 * time.Minute)
			w.is("c1", "UNHEALTHY")
			w.set(func() {
				if p := w.problems["cluster"]; len(p) != 1 || !strings.Contains(p[0].Reason, "away") || p[0].Object != "pods of node n1" {
					t.Errorf("%+v", w.problems)
				}
				w.apiErr, w.askErr = nil, nil
			})
			w.pass()
			w.set(func() {
				if len(w.problems) != 0 {
					t.Errorf("%+v", w.problems)
				}
			})
		})
	})
}

// TestAddNamed: contract 3.8 and 13.1: what a pod is the API server says, and nobody else.
func TestAddNamed(t *testing.T) {
	named := func() Pod {
		p := cart(1)
		p.UID, p.Account, p.Labels, p.Annotations = "", "", nil, nil
		return p
	}
	t.Run("what it is", func(t *testing.T) {
		inWorld(t, withCluster(), func(w *world) {
			w.set(func() {
				w.own["shop/cart-1"] = Pod{UID: "uid-1", Account: "cart", Labels: cart(1).Labels, Annotations: map[string]string{endpointmeta.KeyPort: "9090"}, Volumes: []Volume{}}
			})
			p := named()
			p.Volumes = []Volume{{Name: "run", Driver: "csi.aether.io"}}
			p.Account, p.Labels = "admin", map[string]string{"aether.io/managed": "true"} // what a caller says of it
			p.Annotations = map[string]string{"aether.io/spiffe-id": "spiffe://mesh.test/ns/shop/sa/admin"}
			if r, err := w.pods.AddNamed(w.t.Context(), p); r != Success || err != nil {
				t.Fatal(r, err)
			}
			if x := w.work["c1"]; x.SPIFFEID != "spiffe://mesh.test/ns/shop/sa/cart" || x.DefaultPort != 9090 || x.Account != "cart" || x.Volumes == nil || len(x.Volumes) > 0 {
				t.Errorf("%+v", x)
			}
			w.after(probeInterval)
			w.is("c1", "HEALTHY")
			w.pods.Leaving(leaving(cart(1), Termination{Grace: 30 * time.Second})) // by the UID that it has
			w.after(0)
			w.is("c1", "DRAINING")
			if r, err := w.pods.AddNamed(w.t.Context(), p); r != Success || err != nil { // sent once more
				t.Fatal(r, err)
			}
			w.is("c1", "DRAINING")
		})
	})
	t.Run("another one of its name", func(t *testing.T) {
		inWorld(t, withCluster(), func(w *world) {
			w.set(func() { w.own["shop/cart-1"] = Pod{UID: "uid-2", Account: "admin", Labels: cart(1).Labels} })
			p := named()
			p.UID = "uid-1"
			if _, err := w.pods.AddNamed(w.t.Context(), p); err == nil || !strings.Contains(err.Error(), "another pod") || len(w.work) > 0 {
				t.Errorf("%v, served: %v", err, w.work)
			}
		})
	})
	t.Run("one that leaves already has no row", func(t *testing.T) {
		inWorld(t, withCluster(), func(w *world) {
			w.set(func() {
				w.own["shop/cart-1"] = Pod{UID: "uid-1", Account: "cart", Labels: cart(1).Labels, Terminating: true}
			})
			if r, err := w.pods.AddNamed(w.t.Context(), named()); r != Success || err != nil {
				t.Fatal(r, err)
			}
			w.after(2 * probeInterval)
			w.is("c1", "")
		})
	})
	t.Run("none of the mesh's", func(t *testing.T) {
		inWorld(t, withCluster(), func(w *world) {
			w.set(func() { w.own["shop/cart-1"] = Pod{UID: "uid-1", Account: "cart"} })
			p := named()
			p.Labels = cart(1).Labels // the caller's word
			if r, err := w.pods.AddNamed(w.t.Context(), p); r != Ignored || err != nil {
				t.Error(r, err)
			}
			w.set(func() { w.askErr = errors.New("away") })
			p.Namespace = "kube-system" // the API server itself may be among these
			if r, err := w.pods.AddNamed(w.t.Context(), p); r != Ignored || err != nil {
				t.Error(r, err)
			}
		})
	})
	t.Run("one that cannot be asked for fails", func(t *testing.T) {
		inWorld(t, withCluster(), func(w *world) {
			if _, err := w.pods.AddNamed(w.t.Context(), named()); !errors.Is(err, ErrNoPod) {
				t.Error(err)
			}
			w.set(func() { w.askErr = errors.New("connection refused") })
			if _, err := w.pods.AddNamed(w.t.Context(), named()); err == nil || !strings.Contains(err.Error(), "connection refused") {
				t.Error(err)
			}
			if _, err := w.pods.AddNamed(w.t.Context(), Pod{}); err == nil {
				t.Error("an empty call is taken")
			}
			w.after(time.Minute)
			if len(w.work) > 0 || w.was() != "" {
				t.Error("it is told of")
			}
		})
		inWorld(t, nil, func(w *world) {
			if _, err := w.pods.AddNamed(w.t.Context(), named()); err == nil || !strings.Contains(err.Error(), "no API server") {
				t.Error(err)
			}
		})
	})
}

// hanging is a Cluster that answers nothing.
type hanging struct{ *world }

func (hanging) Pod(ctx context.Context, _, _ string) (Pod, error) {
	<-ctx.Done()
	return Pod{}, ctx.Err()
}

// TestAddNamedBound: an API server that hangs costs a call the time of the constant.
func TestAddNamedBound(t *testing.T) {
	inWorld(t, func(w *world) { w.cfg.Cluster = hanging{w} }, func(w *world) {
		start := time.Now()
		if _, err := w.pods.AddNamed(w.t.Context(), cart(1)); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != askWait {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
	})
}

// TestForgetByTheAPIServer: a pod is forgotten where the API server itself says that it has none.
func TestForgetByTheAPIServer(t *testing.T) {
	inWorld(t, withCluster(cart(1), cart(2), cart(3), cart(4)), func(w *world) {
		for i := range 4 {
			w.healthy(cart(i + 1))
		}
		w.pass()
		w.set(func() {
			clear(w.api) // whoever is listened to is behind, or ahead
			w.own["shop/cart-1"] = cart(1)
			p := cart(2)
			p.UID = "another" // of the same name
			w.own["shop/cart-2"] = p
			w.askErr = errors.New("away")
		})
		w.pass()
		if len(w.work) != 4 {
			t.Fatalf("%d pods: some are forgotten while nobody can be asked", len(w.work))
		}
		w.set(func() { w.askErr, w.elsewhere = nil, true }) // as where this process has another name for the node
		w.pass()
		if got := w.containers(); got != "c1 c3 c4" {
			t.Errorf("left: %s", got)
		}
		w.set(func() { w.elsewhere = false })
		w.pass()
		if got := w.containers(); got != "c1" || w.pods.Counts.OrphansPruned.Value() != 3 {
			t.Errorf("left: %s", got)
		}
		w.is("c1", "HEALTHY")
		w.is("c2", "")
	})
}

// TestEviction: contract 13.4's last sentence, and what it must never do.
func TestEviction(t *testing.T) {
	lost := func(n int) (pods []Pod) {
		for i := range n {
			pods = append(pods, cart(i+1))
		}
		return pods
	}
	t.Run("what is refused is tried again, and keeps nobody waiting", func(t *testing.T) {
		inWorld(t, withCluster(lost(5)...), func(w *world) {
			w.set(func() {
				w.evictErr = func(p ClusterPod) error {
					if p.Name < "cart-4" {
						return errors.New("a disruption budget")
					}
					return nil
				}
			})
			w.healthy(cart(9))
			for range missedPasses + 2 {
				w.pass()
			}
			slices.Sort(w.evicted)
			if got := strings.Join(w.evicted, " "); got != "AetherCNIAddLost shop/cart-4 AetherCNIAddLost shop/cart-5" {
				t.Errorf("%s, of attempts %v", got, w.attempts)
			}
			w.set(func() { w.evictErr, w.evicted = nil, nil })
			w.pass()
			w.pass()
			if len(w.evicted) != 3 {
				t.Errorf("%v", w.evicted)
			}
		})
	})
	t.Run("nobody before a pod has been added here", func(t *testing.T) {
		inWorld(t, withCluster(lost(3)...), func(w *world) {
			w.after(time.Hour)
			if len(w.attempts) != 0 {
				t.Fatalf("%v", w.attempts)
			}
			w.set(func() {
				if p := w.problems["lost uid-1"]; len(p) != 1 || p[0].Object != "Pod shop/cart-1" || !strings.Contains(p[0].Reason, "not served") {
					t.Errorf("%+v", w.problems)
				}
			})
			w.add(cart(1)) // one was late; so others would come
			w.pass()
			if len(w.evicted) != 2 || slices.ContainsFunc(w.evicted, func(s string) bool { return strings.HasSuffix(s, "cart-1") }) {
				t.Errorf("%v", w.evicted)
			}
			w.set(func() { clear(w.api); w.api["cart-1"] = ofAPI(cart(1)) })
			w.pass()
			w.set(func() {
				if len(w.problems) != 0 {
					t.Errorf("%+v", w.problems)
				}
			})
		})
	})
	t.Run("nobody who has no controller, but it is a problem", func(t *testing.T) {
		inWorld(t, withCluster(lost(2)...), func(w *world) {
			w.set(func() {
				bare := w.api["cart-1"]
				bare.Bare = true
				w.api["cart-1"] = bare
			})
			w.healthy(cart(9))
			w.after(time.Hour)
			if got := strings.Join(w.attempts, " "); !strings.Contains(got, "cart-2") || strings.Contains(got, "cart-1") {
				t.Errorf("%s", got)
			}
			w.set(func() {
				if len(w.problems["lost uid-1"]) != 1 {
					t.Errorf("%+v", w.problems)
				}
			})
		})
	})
	t.Run("nobody where that is not wanted", func(t *testing.T) {
		inWorld(t, func(w *world) { withCluster(lost(2)...)(w); w.cfg.EvictLost = false }, func(w *world) {
			w.healthy(cart(9))
			w.after(time.Hour)
			if len(w.attempts) != 0 || len(w.problems) != 2 {
				t.Errorf("%v; %v", w.attempts, w.problems)
			}
		})
	})
	t.Run("a start, or a registry that comes and goes, is no reason to hurry", func(t *testing.T) {
		inWorld(t, withCluster(lost(2)...), func(w *world) {
			w.healthy(cart(9))
			w.restart()
			lists := w.lists
			for range 50 {
				w.pods.Resync()
				w.after(sweepPause / 2)
				if time.Since(w.start) < 2*sweepInterval && len(w.attempts) > 0 {
					t.Fatalf("evicted after %s", time.Since(w.start))
				}
			}
			if w.lists-lists < 10 {
				t.Fatalf("%d sweeps", w.lists-lists)
			}
			w.after(sweepInterval)
			if len(w.evicted) != 2 {
				t.Errorf("%v", w.evicted)
			}
		})
	})
	t.Run("nobody while the list is not known, nor for the time that it was not", func(t *testing.T) {
		inWorld(t, withCluster(lost(2)...), func(w *world) {
			w.healthy(cart(9))
			w.pass()
			w.set(func() { w.apiErr = errors.New("not read yet") })
			w.after(time.Hour)
			w.set(func() { w.apiErr = nil })
			w.pass()
			if len(w.attempts) != 0 {
				t.Errorf("%v", w.attempts)
			}
			w.pass()
			if len(w.evicted) != 2 {
				t.Errorf("%v", w.evicted)
			}
		})
	})
}

// next is another process beside the world's: it has read the records, and does not lead.
func (w *world) next() (*Pods, func()) {
	w.t.Helper()
	cfg := w.cfg
	p, err := New(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return p, func() { // in the place of the one that leads
		w.stop()
		w.pods = p
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		w.stop = func() {
			cancel()
			if err := <-done; err != nil {
				w.t.Error(err)
			}
		}
		synctest.Wait()
	}
}

// TestSuccessor: contract 13.5: a process that follows another one begins with what that has on
// disk when it ends, and touches nothing before.
func TestSuccessor(t *testing.T) {
	inWorld(t, withCluster(cart(1), cart(2), cart(3), cart(4), cart(5)), func(w *world) {
		for i := range 4 {
			w.healthy(cart(i + 1))
		}
		half := filepath.Join(w.cfg.Dir, temporary+"1") // of a write under way
		if err := os.WriteFile(half, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		old := w.pods
		next, lead := w.next()
		if _, err := os.Stat(half); err != nil {
			t.Errorf("what the process that leads is about to write is taken from it: %v", err)
		}

		// While it waits the other one goes on.
		w.was()
		old.Leaving(leaving(cart(1), Termination{PreStop: 40 * time.Second, Grace: time.Minute}))
		if err := old.Remove(w.t.Context(), "c2"); err != nil {
			t.Fatal(err)
		}
		w.set(func() { w.answers["c3"] = errRefused })
		w.after(2 * probeInterval)
		if _, err := old.Add(w.t.Context(), cart(5)); err != nil {
			t.Fatal(err)
		}
		w.after(probeInterval)
		next.SetPlace(Place{Cluster: "east", Region: "eu", Zone: "eu-7", Node: "n1"})
		next.Leaving(leaving(cart(4), Termination{Grace: time.Minute}))
		w.after(0)
		for c, health := range map[string]string{"c1": "DRAINING", "c2": "", "c3": "UNHEALTHY", "c4": "HEALTHY", "c5": "HEALTHY"} {
			w.is(c, health)
		}
		if b, err := os.ReadFile(filepath.Join(w.cfg.Dir, "c4.json")); err != nil || strings.Contains(string(b), "eu-7") || strings.Contains(string(b), "draining") {
			t.Errorf("it writes to the other one's records: %s, %v", b, err)
		}

		lead()
		w.after(sweepPause)
		for c, health := range map[string]string{"c1": "DRAINING", "c2": "", "c3": "UNHEALTHY", "c4": "HEALTHY", "c5": "HEALTHY"} {
			w.is(c, health)
		}
		if got := w.containers(); got != "c1 c3 c4 c5" || len(w.work) != 4 {
			t.Errorf("it leads %s, and tells of %d", got, len(w.work))
		}
		for k, e := range w.rows {
			if e.GetLocality().GetZone() != "eu-7" || e.GetKubernetesMetadata().GetNodeIp() != "" {
				t.Errorf("%s: where the node is was said before it led, and is not in force: %v", k, e)
			}
		}
		if b, err := os.ReadFile(filepath.Join(w.cfg.Dir, "c4.json")); err != nil || !strings.Contains(string(b), "eu-7") {
			t.Errorf("%v: the record does not say where the node is: %s", err, b)
		}
		if _, err := os.Stat(half); err == nil {
			t.Error("what is left of the other one's write stays for ever")
		}
		w.after(19 * time.Second)
		w.is("c1", "UNHEALTHY")

		// Whoever comes to the other one late is sent away, and changes nothing.
		if _, err := old.Add(w.t.Context(), cart(6)); !errors.Is(err, errEnded) {
			t.Error(err)
		}
		if err := old.Remove(w.t.Context(), "c4"); !errors.Is(err, errEnded) {
			t.Error(err)
		}
		old.Terminating("c4", Termination{})
		old.Leaving(gone(cart(4)))
		old.SetPlace(Place{})
		if err := old.Run(w.t.Context()); err == nil {
			t.Error("it leads again")
		}
		w.restart()
		w.after(sweepPause)
		w.is("c4", "HEALTHY")
		if got := w.containers(); got != "c1 c3 c4 c5" {
			t.Errorf("on disk are %s", got)
		}
	})
}
