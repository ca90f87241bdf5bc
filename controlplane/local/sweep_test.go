package local

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrypb"
)

// pass lets the next sweep come and go.
func (w *world) pass() { w.after(sweepInterval) }

// TestSweep: contract 13.4.
func TestSweep(t *testing.T) {
	t.Run("every 60 s, and after a reconnect", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			if w.lists != 1 {
				t.Errorf("%d at the start", w.lists)
			}
			w.after(10 * time.Minute)
			if w.lists != 11 {
				t.Errorf("%d in ten minutes", w.lists)
			}
			w.pods.Resync()
			w.after(0)
			if w.lists != 11 { // the last one was a moment ago
				t.Error("at once after another")
			}
			w.after(sweepPause)
			if w.lists != 12 {
				t.Error("not after a reconnect")
			}
			for range 1000 { // a registry that comes and goes
				w.pods.Resync()
				w.after(10 * time.Millisecond)
			}
			if w.lists > 16 {
				t.Errorf("%d sweeps for a registry that comes and goes for 10 s", w.lists-12)
			}
		})
	})
	t.Run("rows without a pod go, from every class", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			ghost := func(service, class, ip, node, cluster string) {
				e := proto.CloneOf(w.rows["shop/cart PROTOCOL_HTTP 10.1.0.1"])
				e.Ip, e.ClusterName = ip, cluster
				e.KubernetesMetadata.NodeName = node
				w.rows[service+" "+class+" "+ip] = e
			}
			w.set(func() {
				ghost("shop/cart", "PROTOCOL_HTTP", "10.1.0.9", "n1", "east")
				ghost("shop/cart", "PROTOCOL_TCP", "10.1.0.9", "n1", "east")
				ghost("shop/gone", "PROTOCOL_UDP", "10.1.0.1", "n1", "east")
				ghost("shop/cart", "PROTOCOL_HTTP", "10.1.0.10", "n2", "east") // another node's
				ghost("shop/cart", "PROTOCOL_HTTP", "10.1.0.11", "n1", "west") // another cluster's node of this name
			})
			w.pass()
			if _, a := w.rows["shop/cart PROTOCOL_HTTP 10.1.0.10"]; !a || len(w.rows) != 3 {
				t.Errorf("left: %v", w.rows)
			}
			if w.pods.Counts.GhostsRemoved.Value() != 2 {
				t.Errorf("%d counted", w.pods.Counts.GhostsRemoved.Value())
			}
			w.is("c1", "HEALTHY")
		})
	})
	t.Run("pods without their row get it, under every class", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1, "endpoint.aether.io/ports", "8080,5432=tcp"))
			w.healthy(cart(2, "endpoint.aether.io/ports", "8080,5432=tcp"))
			w.set(func() {
				delete(w.rows, "shop/cart PROTOCOL_HTTP 10.1.0.1")
				delete(w.rows, "shop/cart PROTOCOL_TCP 10.1.0.1")
				delete(w.rows, "shop/cart PROTOCOL_TCP 10.1.0.2")
			})
			w.pass()
			w.is("c1", "HEALTHY")
			w.is("c2", "HEALTHY")
			if len(w.rows) != 4 {
				t.Errorf("%d rows", len(w.rows))
			}
			if c := &w.pods.Counts; c.MissingRegistered.Value() != 1 || c.Corrected.Value() != 1 {
				t.Errorf("%d missing, %d corrected", c.MissingRegistered.Value(), c.Corrected.Value())
			}
		})
	})
	t.Run("rows that the registry makes itself are nobody's to correct", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.set(func() {
				clear(w.rows)
				w.derived = true
				w.said = nil
			})
			w.after(10 * sweepInterval)
			if c := &w.pods.Counts; len(w.said) != 0 || c.MissingRegistered.Value()+c.Corrected.Value()+c.SweepErrors.Value() != 0 {
				t.Errorf("%q; %d missing, %d corrected, %d errors", w.said, c.MissingRegistered.Value(), c.Corrected.Value(), c.SweepErrors.Value())
			}
			w.is("c1", "")
			w.set(func() { w.derived = false }) // another registrar
			w.pass()
			w.is("c1", "HEALTHY")
		})
	})
	t.Run("what is said anew is said later, whatever the clock", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1, "endpoint.aether.io/ports", "8080,5432=tcp"))
			http, tcp := w.rows["shop/cart PROTOCOL_HTTP 10.1.0.1"], w.rows["shop/cart PROTOCOL_TCP 10.1.0.1"]
			if http.GetStated() == 0 || http.GetStated() != tcp.GetStated() {
				t.Errorf("one statement under two classes was made at %d and %d", http.GetStated(), tcp.GetStated())
			}
			ahead := uint64(time.Now().Add(time.Hour).UnixNano()) // said before the clock was set back
			w.set(func() {
				for k, e := range w.rows {
					e = proto.CloneOf(e)
					e.Health, e.Stated = registrypb.ServiceEndpoint_DRAINING, ahead
					w.rows[k] = e
				}
			})
			w.restart()
			w.after(sweepPause)
			w.is("c1", "HEALTHY")
			if got := w.rows["shop/cart PROTOCOL_HTTP 10.1.0.1"].GetStated(); got <= ahead {
				t.Errorf("said at %d, and before at %d", got, ahead)
			}
			last := w.by
			if err := w.pods.Remove(w.t.Context(), "c1"); err != nil {
				t.Fatal(err)
			}
			w.after(time.Second)
			if w.by.Node != "n1" || w.by.Stated <= last.Stated || w.by.Stated <= ahead {
				t.Errorf("taken out by %v, after %d", w.by, ahead)
			}
		})
	})
	t.Run("rows that say something else are written anew", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			for name, change := range map[string]func(*registrypb.ServiceEndpoint){
				"health": func(e *registrypb.ServiceEndpoint) { e.Health = registrypb.ServiceEndpoint_DRAINING },
				"ports":  func(e *registrypb.ServiceEndpoint) { e.Ports = []uint32{80} },
				"weight": func(e *registrypb.ServiceEndpoint) { e.Weight = 3 },
				"zone":   func(e *registrypb.ServiceEndpoint) { e.Locality.Zone = "eu-9" },
			} {
				w.set(func() {
					e := proto.CloneOf(w.rows["shop/cart PROTOCOL_HTTP 10.1.0.1"])
					change(e)
					w.rows["shop/cart PROTOCOL_HTTP 10.1.0.1"] = e
				})
				w.pass()
				e := w.rows["shop/cart PROTOCOL_HTTP 10.1.0.1"]
				if e.GetHealth() != registrypb.ServiceEndpoint_HEALTHY || e.GetPorts()[0] != 8080 || e.GetWeight() != 1024 || e.GetLocality().GetZone() != "eu-1" {
					t.Errorf("%s stays: %v", name, e)
				}
			}
			// Under a class that it does not serve: out with all, and anew.
			w.set(func() {
				w.rows["shop/cart PROTOCOL_TCP 10.1.0.1"] = w.rows["shop/cart PROTOCOL_HTTP 10.1.0.1"]
			})
			w.pass()
			w.is("c1", "HEALTHY")
			if len(w.rows) != 1 {
				t.Errorf("%v", w.rows)
			}
			// What is as it should be is left alone.
			w.was()
			w.set(func() { w.rows["shop/cart PROTOCOL_HTTP 10.1.0.1"].ContainerMetadata = nil }) // not others' business
			w.pass()
			if got := w.was(); got != "" {
				t.Errorf("written without need: %s", got)
			}
		})
	})
	t.Run("a listing that fails changes nothing", func(t *testing.T) {
		inWorld(t, func(w *world) { w.cfg.Cluster = w }, func(w *world) {
			w.healthy(cart(1))
			w.healthy(cart(2))
			w.set(func() {
				w.apiErr, w.failing = errors.New("not synced"), func(string) error { return errors.New("away") }
			})
			w.was()
			w.after(10 * time.Minute)
			if len(w.work) != 2 || w.was() != "" || w.pods.Counts.SweepErrors.Value() != 20 {
				t.Errorf("%d pods, %d errors", len(w.work), w.pods.Counts.SweepErrors.Value())
			}
			if n := strings.Count(w.logs.String(), "cannot list"); n > 30 {
				t.Errorf("%d lines for it", n)
			}
		})
	})
	t.Run("case 137: a namespace must be gone for three passes, and is then forgotten", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.healthy(cart(2))
			w.set(func() { w.gone[cart(1).NetNS] = true })
			w.pass()
			w.pass()
			w.set(func() { w.gone[cart(1).NetNS] = false }) // it was a mistake
			w.pass()
			w.set(func() { w.gone[cart(1).NetNS] = true })
			w.pass()
			w.pass()
			if len(w.work) != 2 {
				t.Fatal("pruned too early")
			}
			w.pass()
			w.is("c1", "")
			w.is("c2", "HEALTHY")
			if _, err := os.Stat(w.cfg.Dir + "/c1.json"); err == nil || len(w.work) != 1 || w.pods.Counts.StalePruned.Value() != 1 {
				t.Error("not pruned")
			}
		})
	})
	for _, tt := range []struct{ pods, gone, pruned int }{
		{10, 3, 3}, {10, 4, 0}, {2, 2, 2}, {3, 2, 2}, {3, 3, 0}, {100, 30, 30}, {100, 31, 0},
	} {
		t.Run(fmt.Sprintf("circuit breaker, %d of %d", tt.gone, tt.pods), func(t *testing.T) {
			inWorld(t, nil, func(w *world) {
				for i := range tt.pods {
					w.add(cart(i + 1))
					w.set(func() { w.gone[cart(i+1).NetNS] = i < tt.gone })
				}
				for range 5 {
					w.pass()
				}
				if got := tt.pods - len(w.work); got != tt.pruned {
					t.Errorf("%d pruned, want %d", got, tt.pruned)
				}
				if (w.pods.Counts.PruneBreakerTripped.Value() > 0) != (tt.pruned == 0) {
					t.Errorf("tripped %d times", w.pods.Counts.PruneBreakerTripped.Value())
				}
			})
		})
	}
	t.Run("what the API server does not have is gone, however many", func(t *testing.T) {
		inWorld(t, func(w *world) { w.cfg.Cluster, w.api = w, map[string]ClusterPod{} }, func(w *world) {
			for i := range 10 {
				w.healthy(cart(i + 1))
				w.set(func() { w.api[fmt.Sprint(i+1)] = ofAPI(cart(i + 1)) })
			}
			w.pass()
			if len(w.work) != 10 {
				t.Fatal("pods that it has are pruned")
			}
			w.set(func() {
				for i := range 8 {
					delete(w.api, fmt.Sprint(i+1))
				}
				p := ofAPI(cart(9)) // of the same name, and another pod
				p.UID = "another"
				w.api["9"] = p
			})
			w.pass()
			if len(w.work) != 1 || w.pods.Counts.OrphansPruned.Value() != 9 || w.pods.Counts.PruneBreakerTripped.Value() != 0 {
				t.Errorf("%d pods left, %d pruned", len(w.work), w.pods.Counts.OrphansPruned.Value())
			}
			w.is("c10", "HEALTHY")
			w.is("c9", "")
		})
	})
	t.Run("what has just been added is not judged", func(t *testing.T) {
		inWorld(t, func(w *world) { w.cfg.Cluster, w.api = w, map[string]ClusterPod{} }, func(w *world) {
			w.after(sweepInterval - time.Second)
			w.add(cart(1)) // the watch has not brought it yet
			w.after(time.Second)
			if len(w.work) != 1 {
				t.Fatal("pruned at once")
			}
			w.set(func() { w.api["1"] = ofAPI(cart(1)) })
			w.pass()
			if len(w.work) != 1 {
				t.Error("pruned although it is there")
			}
		})
	})
	t.Run("a live pod without a record is evicted after three passes, two a pass", func(t *testing.T) {
		inWorld(t, func(w *world) { w.cfg.Cluster, w.cfg.EvictLost, w.api = w, true, map[string]ClusterPod{} }, func(w *world) {
			w.healthy(cart(1))
			w.set(func() {
				for i := range 6 {
					w.api[fmt.Sprint(i+1)] = ofAPI(cart(i + 1))
				}
				not := func(n int, change func(*ClusterPod)) {
					p := ofAPI(cart(n))
					change(&p)
					w.api[fmt.Sprint(n)] = p
				}
				not(7, func(p *ClusterPod) { p.Live = false })
				not(8, func(p *ClusterPod) { p.Labels = nil })
				not(9, func(p *ClusterPod) { p.Namespace = "kube-system" })
				not(10, func(p *ClusterPod) { p.Addresses = 0 })
			})
			w.pass()
			w.set(func() { delete(w.api, "6") }) // it was on its way: seen again, it begins anew
			w.pass()
			if len(w.evicted) != 0 {
				t.Fatal("too early")
			}
			w.set(func() { w.api["6"] = ofAPI(cart(6)) })
			for i, want := range []int{2, 4, 5, 5, 5} {
				w.pass()
				if len(w.evicted) != want {
					t.Errorf("pass %d: %d evicted, want %d: %v", i+3, len(w.evicted), want, w.evicted)
				}
			}
			slices.Sort(w.evicted)
			if w.evicted[0] != "AetherCNIAddLost shop/cart-2" || slices.ContainsFunc(w.evicted, func(s string) bool { return strings.HasSuffix(s, "cart-1") }) {
				t.Errorf("%v", w.evicted)
			}
			if c := &w.pods.Counts; c.MissingStorage.Value() != 6 || c.LostAddEvictions.Value() != 5 {
				t.Errorf("%d missing, %d evicted", c.MissingStorage.Value(), c.LostAddEvictions.Value())
			}
		})
	})
	t.Run("a row that changes while it is listed is not judged by the listing", func(t *testing.T) {
		inWorld(t, func(w *world) { w.answers["c1"] = errRefused }, func(w *world) {
			w.add(cart(1))
			rows, err := w.OfNode(w.t.Context(), "n1")
			if err != nil {
				t.Fatal(err)
			}
			before := w.pods.gens()
			w.set(func() { delete(w.answers, "c1") })
			w.after(probeInterval) // promoted meanwhile
			w.was()
			w.pods.compare(rows, before)
			w.after(0)
			if got := w.was(); got != "" || w.pods.Counts.Corrected.Value() != 0 {
				t.Errorf("an older listing has %q written", got)
			}
			w.pods.compare(rows, w.pods.gens()) // and one that is right has
			w.after(0)
			if got := w.was(); got != "register shop/cart HTTP 10.1.0.1 HEALTHY" {
				t.Errorf("%q", got)
			}
		})
	})
}

// TestAddresses: the row is under the first address, however it is written.
func TestAddresses(t *testing.T) {
	inWorld(t, nil, func(w *world) {
		p := cart(1)
		p.IPs = []netip.Addr{netip.MustParseAddr("::ffff:10.1.0.1"), netip.MustParseAddr("fd00::1")}
		w.healthy(p)
		p = cart(2)
		p.IPs = []netip.Addr{netip.MustParseAddr("fd00::2")}
		w.healthy(p)
		w.was()
		w.pass()
		if _, a := w.rows["shop/cart PROTOCOL_HTTP 10.1.0.1"]; !a || len(w.rows) != 2 || w.was() != "" {
			t.Errorf("%v", w.rows)
		}
	})
}
