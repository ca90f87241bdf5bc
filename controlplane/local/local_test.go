package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"aether/controlplane/endpointmeta"
	"aether/controlplane/registrar/register"
	"aether/tproxy/netns"
)

var _ Registry = (*register.Caller)(nil)

// TestAdd: contract 13.1, sentence by sentence.
func TestAdd(t *testing.T) {
	t.Run("ignorable pods are ignored", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			for name, change := range map[string]func(*Pod){
				"namespace": func(p *Pod) { p.Namespace = "Kube-System" },
				"labels":    func(p *Pod) { p.Labels = nil },
				"label":     func(p *Pod) { p.Labels = map[string]string{"aether.io/managed": "True"} },
				"address":   func(p *Pod) { p.IPs = nil },
			} {
				p := cart(1)
				change(&p)
				if r, err := w.pods.Add(w.t.Context(), p); r != Ignored || err != nil {
					t.Errorf("%s: %v, %v", name, r, err)
				}
			}
			synctest.Wait()
			if len(w.work) > 0 || w.was() != "" {
				t.Error("an ignored pod is told of")
			}
			if e, _ := os.ReadDir(w.cfg.Dir); len(e) > 0 {
				t.Error("an ignored pod is on disk")
			}
		})
	})
	t.Run("what is missing fails the call", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			for want, change := range map[string]func(*Pod){
				"name is empty":              func(p *Pod) { p.Name = "" },
				"namespace is empty":         func(p *Pod) { p.Namespace = "" },
				"container_id is empty":      func(p *Pod) { p.ContainerID = "" },
				"network_namespace is empty": func(p *Pod) { p.NetNS = "" },
				"container_id \"../x\"":      func(p *Pod) { p.ContainerID = "../x" },
				"no absolute path":           func(p *Pod) { p.NetNS = "netns" },
			} {
				p := cart(1)
				change(&p)
				if _, err := w.pods.Add(w.t.Context(), p); err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("want %q, got %v", want, err)
				}
			}
		})
	})
	t.Run("bad annotations fail the call and leave nothing", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			for _, a := range [][]string{
				{"endpoint.aether.io/port", "http"}, {"endpoint.aether.io/ports", "8080=grpc"}, {"endpoint.aether.io/protocol", "udp"},
				{"endpoint.aether.io/weight", "-1"}, {"endpoint.aether.io/port", "0"},
			} {
				_, err := w.pods.Add(w.t.Context(), cart(1, a...))
				if err == nil || !strings.Contains(err.Error(), "failed to build endpoint") {
					t.Errorf("%q: %v", a, err)
				}
			}
			w.after(time.Minute)
			if len(w.work) > 0 || w.was() != "" {
				t.Error("a pod with bad annotations is told of")
			}
			if e, _ := os.ReadDir(w.cfg.Dir); len(e) > 0 {
				t.Error("a pod with bad annotations is on disk")
			}
		})
	})
	t.Run("unhealthy first, under every class, whole rows", func(t *testing.T) {
		inWorld(t, func(w *world) { w.answers["c1"] = errRefused }, func(w *world) {
			w.add(cart(1, "endpoint.aether.io/ports", "8080,5432=tcp,9000=h2", "metadata.endpoint.aether.io/version", "v2",
				"endpoint.aether.io/weight", "7", "aether.io/spiffe-id", "spiffe://mesh.test/special"))
			if got, want := w.was(), "register shop/cart HTTP 10.1.0.1 UNHEALTHY; register shop/cart TCP 10.1.0.1 UNHEALTHY"; got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
			for k, e := range w.rows {
				got, want := strings.ReplaceAll(e.String(), "  ", " "), []string{
					`ip:"10.1.0.1"`, `cluster_name:"east"`, "port:8080", "weight:7", `region:"eu"`, `zone:"eu-1"`, `key:"version" value:"v2"`,
					`container_id:"c1"`, `network_namespace:"/run/aether/netns/c1"`, `namespace:"shop"`, `pod_name:"cart-1"`, `node_name:"n1"`,
					`node_ip:"192.0.2.1"`, "health:UNHEALTHY", "health_check_mode:EDS", "ports:5432 ports:8080 ports:9000",
					`spiffe_id:"spiffe://mesh.test/special"`, "key:5432 value:PORT_PROTOCOL_TCP", "key:9000 value:PORT_PROTOCOL_HTTP",
				}
				for _, x := range want {
					if !strings.Contains(got, x) {
						t.Errorf("%s: %s is not in %s", k, x, got)
					}
				}
			}
			if x := w.work["c1"]; x.SPIFFEID != "spiffe://mesh.test/special" || len(x.Ports) != 3 || !x.Capture.RedirectAll || x.NetNS != "/run/aether/netns/c1" {
				t.Errorf("workload %+v", x)
			}
		})
	})
	t.Run("on disk before anybody hears of it", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			if err := os.Chmod(w.cfg.Dir, 0); err != nil {
				t.Fatal(err)
			}
			if err := os.RemoveAll(w.cfg.Dir); err != nil {
				t.Fatal(err)
			}
			if _, err := w.pods.Add(w.t.Context(), cart(1)); err == nil {
				t.Error("a pod that cannot be kept is taken")
			}
			w.after(time.Minute)
			if len(w.work) > 0 || w.was() != "" {
				t.Error("a pod that is not on disk is told of")
			}
		})
	})
	t.Run("a registry failure is no error, and is repaired", func(t *testing.T) {
		inWorld(t, func(w *world) {
			w.failing = func(string) error { return errors.New("no registrar") }
			w.answers["c1"] = errRefused
		}, func(w *world) {
			w.add(cart(1))
			w.is("c1", "")
			w.after(10 * time.Minute) // no try goes on for ever
			if n := w.pods.Counts.WriteErrors.Value(); n < 2 || n > maxTries {
				t.Errorf("%d tries", n)
			}
			w.set(func() { w.failing = nil })
			w.after(sweepInterval + sweepPause)
			w.is("c1", "UNHEALTHY")
			if w.pods.Counts.MissingRegistered.Value() != 1 {
				t.Error("the sweep did not count it")
			}
			w.was()
			w.add(cart(1))
			w.after(0)
			if got := w.was(); got != "" {
				t.Errorf("what is written is written again: %s", got)
			}
		})
	})
	t.Run("a registry that hangs holds the call no longer than the plugin waits", func(t *testing.T) {
		inWorld(t, func(w *world) { w.hangs = true }, func(w *world) {
			start := time.Now()
			w.add(cart(1))
			if took := time.Since(start); took != ackWait {
				t.Errorf("took %s", took)
			}
		})
	})
	t.Run("waits for the data plane, 2 s at most", func(t *testing.T) {
		served := make(chan struct{})
		inWorld(t, func(w *world) {
			served = make(chan struct{})
			w.cfg.Served = func(ctx context.Context, container string, yes bool) error {
				select {
				case <-served:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		}, func(w *world) {
			start := time.Now()
			w.add(cart(1))
			if took := time.Since(start); took != ackWait || w.pods.Counts.AckFailures.Value() != 1 {
				t.Errorf("took %s, %d late", took, w.pods.Counts.AckFailures.Value())
			}
			time.AfterFunc(time.Second, func() { close(served) })
			start = time.Now()
			w.add(cart(2))
			if took := time.Since(start); took != time.Second {
				t.Errorf("took %s", took)
			}
		})
	})
	t.Run("a re-sent call does not demote", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.was()
			p := cart(1)
			w.add(p)
			w.after(time.Second)
			if got := w.was(); got != "" {
				t.Errorf("a re-sent add writes %s", got)
			}
			w.is("c1", "HEALTHY")
			p.NetNS = "/run/aether/netns/again"
			w.add(p)
			if got := w.was(); got != "register shop/cart HTTP 10.1.0.1 HEALTHY" || w.work["c1"].NetNS != p.NetNS {
				t.Errorf("a re-sent add with another path writes %q", got)
			}
		})
	})
	t.Run("a re-sent call takes what has changed", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1, "endpoint.aether.io/ports", "8080,5432=tcp"))
			w.was()
			w.add(cart(1))
			if got := w.was(); got != "unregister shop/cart 10.1.0.1; register shop/cart HTTP 10.1.0.1 HEALTHY" {
				t.Errorf("a class that went: %s", got)
			}
			p := cart(1)
			p.Account = "basket"
			w.add(p)
			w.after(0)
			if got := w.was(); !strings.Contains(got, "unregister shop/cart 10.1.0.1") || !strings.Contains(got, "register shop/basket HTTP 10.1.0.1 HEALTHY") {
				t.Errorf("another service: %s", got)
			}
		})
	})
	t.Run("a terminating pod is not registered", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			p := cart(1)
			p.Terminating = true
			w.add(p)
			w.after(10 * time.Minute)
			w.is("c1", "")
			if _, served := w.work["c1"]; !served || strings.Contains(w.was(), "register shop/cart HTTP") {
				t.Error("it is to be served, and to have no row")
			}
		})
	})
	t.Run("active mode", func(t *testing.T) {
		inWorld(t, func(w *world) { w.answers["c1"] = errRefused }, func(w *world) {
			w.add(cart(1, endpointmeta.KeyHealthCheckMode, "active"))
			w.is("c1", "HEALTH_UNSPECIFIED")
		})
	})
	t.Run("annotations that degrade are problems", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.add(cart(1, "endpoint.aether.io/uds-socket", "a", "config.aether.io/upstream", "x", "capture.aether.io/exclude-outbound-ports", "http"))
			if got := len(w.problems["pod c1"]); got != 3 {
				t.Errorf("%d problems: %v", got, w.problems)
			}
			if err := w.pods.Remove(w.t.Context(), "c1"); err != nil || len(w.problems) != 0 {
				t.Errorf("they stay: %v, %v", err, w.problems)
			}
		})
	})
	t.Run("an identity that other nodes do not take is a problem", func(t *testing.T) {
		const custom = "spiffe://mesh.test/special"
		for _, allowed := range []bool{false, true} {
			inWorld(t, func(w *world) {
				if allowed {
					w.cfg.Identities = []string{"/special"}
				}
			}, func(w *world) {
				w.add(cart(1, endpointmeta.KeySPIFFEID, custom))
				p := w.problems["pod c1"]
				if allowed != (len(p) == 0) || !allowed && (p[0].Object != "Pod shop/cart-1" || !strings.Contains(p[0].Reason, custom) || !strings.Contains(p[0].Reason, "--allow-spiffe-id")) {
					t.Errorf("allowed: %t: %v", allowed, p)
				}
				if _, served := w.work["c1"]; !served {
					t.Error("its own node is to serve it")
				}
			})
		}
	})
	t.Run("at most so many", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.pods.mu.Lock()
			for i := range maxPods - 1 { // without a disk's time for each
				r := record{Pod: cart(i + 2), Health: "UNHEALTHY"}
				w.pods.pods[r.ContainerID] = w.pods.make(r)
			}
			w.pods.mu.Unlock()
			w.add(cart(1))
			if _, err := w.pods.Add(w.t.Context(), cart(maxPods+1)); err == nil {
				t.Error("one more is taken")
			}
			w.add(cart(1))
		})
	})
}

// TestPromotion: contract 13.2 and 6.6.
func TestPromotion(t *testing.T) {
	t.Run("on the first pass", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.add(cart(1))
			w.after(spread("c1", probeInterval) - 1)
			w.is("c1", "UNHEALTHY")
			w.after(1)
			w.is("c1", "HEALTHY")
			if w.pods.Counts.HealthTransitions.Value() != 1 {
				t.Error("not counted")
			}
		})
	})
	t.Run("not before there is a certificate", func(t *testing.T) {
		inWorld(t, func(w *world) { w.uncert["c1"] = true }, func(w *world) {
			w.add(cart(1))
			w.after(10 * time.Minute)
			w.is("c1", "UNHEALTHY")
			if !w.pods.Ready("c1") {
				t.Error("the application answers, which is all that the readiness path tells")
			}
			w.set(func() { w.uncert["c1"] = false })
			w.after(probeInterval)
			w.is("c1", "HEALTHY")
			w.set(func() { w.uncert["c1"] = true })
			w.after(2 * probeInterval)
			w.is("c1", "UNHEALTHY")
		})
	})
	t.Run("every 5 s, healthy after 1, unhealthy after 2, under every class", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1, "endpoint.aether.io/ports", "8080,5432=tcp"))
			w.after(probeInterval) // a probe has just been, or will be in a moment
			w.was()
			w.set(func() { w.answers["c1"] = errRefused; w.probed = nil })
			w.after(probeInterval)
			w.is("c1", "HEALTHY") // one failure is none
			w.set(func() { delete(w.answers, "c1") })
			w.after(probeInterval)
			w.set(func() { w.answers["c1"] = errRefused })
			w.after(probeInterval)
			w.is("c1", "HEALTHY") // not two in a row
			w.after(probeInterval)
			w.is("c1", "UNHEALTHY")
			if got, want := w.was(), "register shop/cart HTTP 10.1.0.1 UNHEALTHY; register shop/cart TCP 10.1.0.1 UNHEALTHY"; got != want {
				t.Errorf("got %s, want %s", got, want)
			}
			w.set(func() { delete(w.answers, "c1") })
			w.after(probeInterval)
			w.is("c1", "HEALTHY")
			if got := len(w.probed); got != 5 {
				t.Errorf("%d probes in 25 s: %v", got, w.probed)
			}
		})
	})
	t.Run("case 138: a namespace that is gone is known at once", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.after(probeInterval)
			w.set(func() { w.answers["c1"] = fmt.Errorf("dial: %w", netns.ErrGone) })
			w.after(probeInterval)
			w.is("c1", "UNHEALTHY")
		})
	})
	t.Run("a probe takes no longer than a second", func(t *testing.T) {
		inWorld(t, func(w *world) { w.answers["c1"] = errSilent }, func(w *world) {
			w.add(cart(1))
			w.after(time.Minute)
			w.is("c1", "UNHEALTHY")
			w.set(func() { delete(w.answers, "c1") })
			w.after(probeInterval)
			w.is("c1", "HEALTHY")
			w.set(func() { w.answers["c1"] = errSilent })
			w.after(2*probeInterval + probeTimeout)
			w.is("c1", "UNHEALTHY")
		})
	})
	t.Run("spread in time", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			for i := range 100 {
				w.add(cart(i + 1))
			}
			w.after(probeInterval)
			in := map[time.Duration]int{}
			for _, p := range w.probed {
				at, err := time.ParseDuration(strings.Fields(p)[1])
				if err != nil {
					t.Fatal(err)
				}
				in[at.Truncate(500*time.Millisecond)]++
			}
			for at, n := range in {
				if n > 25 {
					t.Errorf("%d of 100 probes within half a second, at %s", n, at)
				}
			}
		})
	})
	t.Run("many that hang hold up nobody", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			for i := range 200 {
				w.set(func() { w.answers[cart(i+1).ContainerID] = errSilent })
				w.add(cart(i + 1))
			}
			w.add(cart(201))
			w.after(2 * probeInterval)
			w.is("c201", "HEALTHY")
		})
	})
	t.Run("active mode: failures of the first 15 s mean nothing", func(t *testing.T) {
		inWorld(t, func(w *world) { w.answers["c1"] = errRefused }, func(w *world) {
			w.add(cart(1, endpointmeta.KeyHealthCheckMode, "active"))
			w.after(firstSight - 1)
			w.is("c1", "HEALTH_UNSPECIFIED")
			w.after(probeInterval + 1)
			w.is("c1", "UNHEALTHY")
			w.set(func() { delete(w.answers, "c1") })
			w.after(probeInterval)
			w.is("c1", "HEALTHY")
		})
	})
	t.Run("a write that fails is tried again, and the last word stands", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.add(cart(1))
			w.set(func() { w.failing = func(string) error { return errors.New("no registrar") } })
			w.after(probeInterval) // promoted meanwhile
			w.is("c1", "UNHEALTHY")
			w.set(func() { w.failing = nil })
			w.after(4 * maxBackoff / 3)
			w.is("c1", "HEALTHY")
			w.set(func() {
				w.failing = func(string) error { return errors.New("no registrar") }
				w.answers["c1"] = errRefused
			})
			w.after(2 * probeInterval)
			w.set(func() { delete(w.answers, "c1") })
			w.after(probeInterval)
			w.was()
			w.set(func() { w.failing = nil })
			w.after(maxBackoff)
			w.is("c1", "HEALTHY")
			if got := w.was(); strings.Contains(got, "UNHEALTHY") {
				t.Errorf("what is no longer so is written: %s", got)
			}
		})
	})
}

// TestReadiness: contract 6.6 over /run/aether/health.sock, and 4.11's /-/-/ready.
func TestReadiness(t *testing.T) {
	inWorld(t, nil, func(w *world) {
		get := func(path string) int {
			r := httptest.NewRecorder()
			w.pods.Handler().ServeHTTP(r, httptest.NewRequest("GET", path, nil))
			return r.Code
		}
		check := func(want int, ready bool) {
			t.Helper()
			if got := get("/healthz/health_cart-1"); got != want || w.pods.Ready("c1") != ready {
				t.Errorf("%d, ready %t; want %d, %t", got, w.pods.Ready("c1"), want, ready)
			}
		}
		check(404, false)
		w.set(func() { w.answers["c1"] = errRefused })
		w.add(cart(1))
		check(503, false) // warming
		w.after(2 * probeInterval)
		check(503, false) // failing
		w.set(func() { delete(w.answers, "c1") })
		w.after(probeInterval)
		check(200, true)
		if get("/healthz/cart-1") != 404 || get("/healthz/health_cart-2") != 404 {
			t.Error("other paths")
		}
		p := cart(2) // of the same name elsewhere: all must answer
		p.Name, p.Namespace = "cart-1", "other"
		w.set(func() { w.answers["c2"] = errRefused })
		w.add(p)
		check(503, true)
		if err := w.pods.Remove(w.t.Context(), "c2"); err != nil {
			t.Fatal(err)
		}
		w.pods.Terminating("c1", Termination{PreStop: 10 * time.Second, Grace: 30 * time.Second})
		check(200, true) // the application's truth, not the endpoint's
		if err := w.pods.Remove(w.t.Context(), "c1"); err != nil {
			t.Fatal(err)
		}
		check(404, false)
	})
}

// TestTermination: contract 13.3.
func TestTermination(t *testing.T) {
	for _, tt := range []struct {
		name           string
		preStop, grace time.Duration
		want           time.Duration
	}{
		{"preStop less a second", 10 * time.Second, 30 * time.Second, 9 * time.Second},
		{"2 s at least", 0, 30 * time.Second, 2 * time.Second},
		{"2 s at least, short preStop", time.Second, 30 * time.Second, 2 * time.Second},
		{"preStop of 3 s", 3 * time.Second, 30 * time.Second, 2 * time.Second},
		{"capped at the grace less 2 s", time.Minute, 30 * time.Second, 28 * time.Second},
		{"a short grace", 0, 3 * time.Second, time.Second},
		{"hardly any", 0, time.Second, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inWorld(t, nil, func(w *world) {
				w.healthy(cart(1, "endpoint.aether.io/ports", "8080,5432=tcp"))
				w.was()
				w.pods.Terminating("c1", Termination{PreStop: tt.preStop, Grace: tt.grace})
				if tt.want > 0 {
					w.after(tt.want - 1)
					w.is("c1", "DRAINING")
					w.after(1)
				}
				w.after(0)
				w.is("c1", "UNHEALTHY")
				w.after(5 * time.Minute) // it answers its probes, and is swept
				w.is("c1", "UNHEALTHY")
				if got := w.was(); strings.Contains(got, " HEALTHY") {
					t.Errorf("a pod that leaves is registered healthy: %s", got)
				}
				if err := w.pods.Remove(w.t.Context(), "c1"); err != nil {
					t.Fatal(err)
				}
				w.is("c1", "")
			})
		})
	}
	t.Run("a write of DRAINING that fails takes the row out", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.set(func() {
				w.failing = func(call string) error {
					if strings.HasPrefix(call, "register") {
						return errors.New("not taken")
					}
					return nil
				}
			})
			w.pods.Terminating("c1", Termination{PreStop: 10 * time.Second, Grace: 30 * time.Second})
			w.after(0)
			w.is("c1", "")
			w.set(func() { w.failing = nil })
			w.after(5 * time.Minute)
			w.is("c1", "") // and it does not come back
		})
	})
	t.Run("the row comes out when the registry is back", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.set(func() { w.failing = func(string) error { return errors.New("away") } })
			w.pods.Terminating("c1", Termination{PreStop: 10 * time.Second, Grace: 30 * time.Second})
			w.after(10 * time.Second)
			w.is("c1", "HEALTHY")
			w.set(func() { w.failing = nil })
			w.after(maxBackoff)
			w.is("c1", "")
		})
	})
	t.Run("a pod that is killed at once loses its row at once", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.healthy(cart(2))
			w.was()
			w.pods.Terminating("c1", Termination{})
			w.after(0)
			if got := w.was(); got != "unregister shop/cart 10.1.0.1" {
				t.Errorf("%s", got)
			}
			w.pods.Terminating("c2", Termination{PreStop: time.Minute, Grace: 2 * time.Minute})
			w.pods.Terminating("c2", Termination{PreStop: time.Hour, Grace: 2 * time.Hour}) // said twice: the first holds
			w.after(time.Minute)
			w.is("c2", "UNHEALTHY")
			w.pods.Terminating("c2", Termination{}) // and then killed
			w.after(0)
			w.is("c2", "")
			w.after(5 * time.Minute)
			w.is("c1", "")
			w.is("c2", "")
		})
	})
	t.Run("a re-sent add brings nobody back", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.pods.Terminating("c1", Termination{PreStop: 10 * time.Second, Grace: 30 * time.Second})
			w.after(time.Second)
			w.add(cart(1))
			w.is("c1", "DRAINING")
			w.after(8 * time.Second)
			w.is("c1", "UNHEALTHY")
		})
	})
	t.Run("a re-sent add says that it leaves", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			p := cart(1)
			p.Terminating = true
			w.add(p)
			w.is("c1", "DRAINING")
			w.after(leastDrain)
			w.is("c1", "UNHEALTHY")
		})
	})
	t.Run("a restart does not stop the clock", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			for i := 1; i <= 3; i++ {
				w.healthy(cart(i))
			}
			w.pods.Terminating("c1", Termination{PreStop: 11 * time.Second, Grace: 30 * time.Second})
			w.pods.Terminating("c2", Termination{PreStop: 3 * time.Second, Grace: 30 * time.Second})
			w.pods.Terminating("c3", Termination{})
			w.after(time.Second)
			w.stop()
			w.set(func() { w.rows["shop/cart PROTOCOL_HTTP 10.1.0.3"] = w.rows["shop/cart PROTOCOL_HTTP 10.1.0.2"] })
			w.set(func() { // no sweep helps
				w.failing = func(call string) error {
					if call == "list" {
						return errors.New("not listed")
					}
					return nil
				}
			})
			w.after(4 * time.Second)
			w.run()
			w.is("c2", "UNHEALTHY")
			w.after(5*time.Second - 1)
			w.is("c1", "DRAINING")
			w.after(1)
			w.is("c1", "UNHEALTHY")
			w.is("c3", "")
		})
	})
	t.Run("a row that has gone does not come back, and probes mean nothing any more", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.pods.Terminating("c1", Termination{PreStop: 10 * time.Second, Grace: 2 * time.Minute})
			w.after(20 * time.Second)
			w.is("c1", "UNHEALTHY")
			changes := w.pods.Counts.HealthTransitions.Value()
			w.set(func() { clear(w.rows); w.answers["c1"] = errRefused })
			w.after(5 * time.Minute)
			w.is("c1", "")
			if got := w.pods.Counts.HealthTransitions.Value(); got != changes {
				t.Errorf("%d transitions of a pod that leaves", got-changes)
			}
		})
	})
	t.Run("unknown containers are nobody's", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.pods.Terminating("c9", Termination{})
			if err := w.pods.Remove(w.t.Context(), "c9"); err != nil {
				t.Error(err)
			}
			if w.was() != "" {
				t.Error("something is written")
			}
		})
	})
}

// TestRemove: the order of contract 13.3's last step.
func TestRemove(t *testing.T) {
	t.Run("record, data plane, row", func(t *testing.T) {
		var order []string
		inWorld(t, func(w *world) {
			w.cfg.Served = func(_ context.Context, container string, served bool) error {
				if !served {
					if _, err := os.Stat(filepath.Join(w.cfg.Dir, "c1.json")); err == nil {
						order = append(order, "the record is still there")
					}
					w.mu.Lock()
					defer w.mu.Unlock()
					if _, ok := w.work["c1"]; ok {
						order = append(order, "the data plane has not been told")
					}
					order = append(order, "waited")
				}
				return nil
			}
		}, func(w *world) {
			w.healthy(cart(1))
			if err := w.pods.Remove(w.t.Context(), "c1"); err != nil {
				t.Fatal(err)
			}
			w.is("c1", "")
			if len(order) != 1 {
				t.Errorf("%v", order)
			}
		})
	})
	t.Run("a record that stays is an error, and so does the pod", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			// A directory that is not empty in the record's place: root itself cannot remove it as a file.
			path := filepath.Join(w.cfg.Dir, "c1.json")
			if err := errors.Join(os.Remove(path), os.MkdirAll(filepath.Join(path, "x"), 0o700)); err != nil {
				t.Fatal(err)
			}
			if err := w.pods.Remove(w.t.Context(), "c1"); err == nil {
				t.Error("no error")
			}
			w.is("c1", "HEALTHY")
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
			if err := w.pods.Remove(w.t.Context(), "c1"); err != nil {
				t.Error(err)
			}
			w.is("c1", "")
		})
	})
	t.Run("the row does not depend on the call", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.set(func() { w.hangs = true })
			ctx, cancel := context.WithTimeout(w.t.Context(), time.Second)
			defer cancel()
			if err := w.pods.Remove(ctx, "c1"); err != nil {
				t.Fatal(err)
			}
			w.set(func() { w.hangs = false })
			w.after(writeTimeout + maxBackoff)
			w.is("c1", "")
		})
	})
	t.Run("a container made anew keeps the address's row", func(t *testing.T) {
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			p := cart(1)
			p.ContainerID, p.NetNS = "c1b", "/run/aether/netns/c1b"
			w.set(func() { w.answers["c1b"] = errRefused })
			w.add(p)
			w.is("c1b", "UNHEALTHY") // it has proved nothing yet
			w.was()
			if err := w.pods.Remove(w.t.Context(), "c1"); err != nil {
				t.Fatal(err)
			}
			w.after(5 * time.Minute)
			if got := w.was(); got != "" {
				t.Errorf("the old container's end writes %s", got)
			}
			w.is("c1b", "UNHEALTHY")
		})
	})
	t.Run("an address that is given anew at once", func(t *testing.T) { // the old row's removal is late
		inWorld(t, nil, func(w *world) {
			w.healthy(cart(1))
			w.set(func() { w.failing = func(string) error { return errors.New("away") } })
			if err := w.pods.Remove(w.t.Context(), "c1"); err != nil {
				t.Fatal(err)
			}
			p := cart(1)
			p.ContainerID, p.Name, p.UID = "c7", "cart-7", "uid-7"
			w.add(p)
			w.set(func() { w.failing = nil })
			w.after(10 * time.Minute)
			w.is("c7", "HEALTHY")
		})
	})
}

// TestRestart: contract 13.6: what is on disk is served without any server, and demotes nobody.
func TestRestart(t *testing.T) {
	inWorld(t, nil, func(w *world) {
		w.healthy(cart(1, "endpoint.aether.io/ports", "8080,5432=tcp"))
		w.set(func() { w.answers["c2"] = errRefused })
		w.add(cart(2, endpointmeta.KeyUpstreams, "db,other/x"))
		before := w.work["c2"]
		w.set(func() {
			w.failing = func(string) error { return errors.New("away") }
			w.cfg.Cluster, w.apiErr = w, errors.New("away")
			w.uncert["c1"] = true // for a moment
		})
		w.cfg.Place = Place{Cluster: "east", Node: "n1"} // who would tell?
		w.restart()
		if got := w.work["c2"]; len(w.work) != 2 || len(got.Upstreams) != 2 || got.NetNS != before.NetNS || got.SPIFFEID != before.SPIFFEID || got.IPs[0] != before.IPs[0] {
			t.Errorf("workloads %v", w.work)
		}
		if !w.pods.Ready("c1") || w.pods.Ready("c2") {
			t.Error("what was known of the applications is forgotten")
		}
		w.set(func() { w.failing = nil })
		w.was()
		w.pods.Resync()
		w.after(probeInterval)
		w.set(func() { w.uncert["c1"] = false })
		w.after(sweepPause)
		if got := w.was(); got != "" {
			t.Errorf("a restart writes %s", got)
		}
		w.is("c1", "HEALTHY")
		w.is("c2", "UNHEALTHY")
		w.set(func() { w.answers["c1"] = errRefused })
		w.after(2 * probeInterval)
		w.is("c1", "UNHEALTHY")
		for k, e := range w.rows {
			if e.GetLocality().GetZone() != "eu-1" || e.GetKubernetesMetadata().GetNodeIp() != "192.0.2.1" {
				t.Errorf("%s: a restart forgot where the node is: %v", k, e)
			}
		}
		w.pods.SetPlace(Place{Cluster: "east", Region: "eu", Zone: "eu-2", Node: "n1", NodeIP: netip.MustParseAddr("192.0.2.1")})
		w.after(0)
		for k, e := range w.rows {
			if e.GetLocality().GetZone() != "eu-2" {
				t.Errorf("%s: the node has another place: %v", k, e)
			}
		}
	})
}

// TestRestartKeepsTheOrder: the row of an address is the latest container's, also after a restart
// and where the earlier one's add is sent once more.
func TestRestartKeepsTheOrder(t *testing.T) {
	inWorld(t, nil, func(w *world) {
		old, anew := cart(1), cart(1)
		old.ContainerID, old.NetNS = "c9", "/run/aether/netns/c9" // by name it is the last
		w.healthy(old)
		w.healthy(anew)
		w.set(func() { w.answers["c9"] = errRefused })
		for _, again := range []func(){w.restart, func() { w.add(old) }, w.restart} {
			again()
			w.after(sweepPause + unhealthAfter*probeInterval)
			w.is("c9", "")
			w.is("c1", "HEALTHY")
		}
	})
}

// TestDamagedStorage: a file that is no record is set aside and named, and takes nobody with it.
func TestDamagedStorage(t *testing.T) {
	bad := map[string]string{
		"cut.json":     `{"version":1,"name":"cart-1","names`,
		"empty.json":   "",
		"zeros.json":   strings.Repeat("\x00", 300),
		"other.json":   `{"version":1,"name":"a","namespace":"shop","container_id":"else","network_namespace":"/x","ips":["10.1.0.9"],"health":"HEALTHY"}`,
		"health.json":  `{"version":1,"name":"a","namespace":"shop","container_id":"health","network_namespace":"/x","ips":["10.1.0.9"],"health":"FINE"}`,
		"phase.json":   `{"version":1,"name":"a","namespace":"shop","container_id":"phase","network_namespace":"/x","ips":["10.1.0.9"],"health":"HEALTHY","phase":"x"}`,
		"version.json": `{"name":"a","namespace":"shop","container_id":"version","network_namespace":"/x","ips":["10.1.0.9"],"health":"HEALTHY"}`,
		"ip.json":      `{"version":1,"name":"a","namespace":"shop","container_id":"ip","network_namespace":"/x","ips":["0.0.0.0"],"health":"HEALTHY"}`,
		"two.json":     `{"version":1,"name":"a","namespace":"shop","container_id":"two","network_namespace":"/x","ips":["10.1.0.9"],"health":"HEALTHY"}{}`,
		"big.json":     strings.Repeat(" ", maxRecord+1),
	}
	inWorld(t, func(w *world) {
		files := map[string]string{
			"good.json":      `{"version":1,"name":"good","namespace":"shop","container_id":"good","network_namespace":"/x","ips":["10.1.0.8"],"health":"HEALTHY"}`,
			"newer.json":     `{"version":9,"tomorrow":{"a":[1]},"name":"newer","namespace":"shop","container_id":"newer","network_namespace":"/x","ips":["10.1.0.7"],"health":"HEALTHY"}`,
			"annotated.json": `{"version":1,"name":"annotated","namespace":"shop","container_id":"annotated","network_namespace":"/x","ips":["10.1.0.6"],"health":"HEALTHY","annotations":{"endpoint.aether.io/port":"x"}}`,
			".new-123":       "half",
			"notes.txt":      "not ours",
		}
		for name, content := range bad {
			files[name] = content
		}
		for name, content := range files {
			if err := os.WriteFile(filepath.Join(w.cfg.Dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}, func(w *world) {
		if _, good := w.work["good"]; !good || len(w.work) != 2 {
			t.Errorf("served: %v", w.work)
		}
		if got := w.pods.Counts.DamagedRecords.Value(); got != uint64(len(bad)) {
			t.Errorf("%d of %d are set aside", got, len(bad))
		}
		for name := range bad {
			path := filepath.Join(w.cfg.Dir, name)
			if _, err := os.Stat(path); err == nil {
				t.Errorf("%s is still there", name)
			}
			if _, err := os.Stat(path + damagedSuffix); err != nil {
				t.Error(err)
			}
			if len(w.problems["record "+path+damagedSuffix]) != 1 || !strings.Contains(w.logs.String(), path) {
				t.Errorf("%s is not named", name)
			}
		}
		// A record that is sound and cannot be served, as by an older version: it stays, and is named.
		if got := w.problems["pod annotated"]; len(got) != 1 || !strings.Contains(got[0].Reason, "endpoint.aether.io/port") {
			t.Errorf("%v", got)
		}
		w.after(5 * time.Minute)
		if _, err := os.Stat(filepath.Join(w.cfg.Dir, "annotated.json")); err != nil {
			t.Error(err)
		}
		for name, want := range map[string]bool{".new-123": false, "notes.txt": true} {
			if _, err := os.Stat(filepath.Join(w.cfg.Dir, name)); (err == nil) != want {
				t.Errorf("%s: %v", name, err)
			}
		}
		p := cart(1) // made anew
		p.ContainerID = "cut"
		w.add(p)
		if len(w.problems["record "+filepath.Join(w.cfg.Dir, "cut.json"+damagedSuffix)]) != 0 {
			t.Error("the problem stays although the pod is there again")
		}
		if err := w.pods.Remove(w.t.Context(), "annotated"); err != nil {
			t.Error(err)
		}
	})
}

// TestUnreadRecords: a record that cannot be read now, as for want of descriptors, is no damaged one: it stays on
// disk, and a process that has read it before goes on with it.
func TestUnreadRecords(t *testing.T) {
	dir := t.TempDir()
	const text = `{"version":1,"name":"%s","namespace":"shop","container_id":"%[1]s","network_namespace":"/x","ips":["10.1.0.8"],"health":"HEALTHY"}`
	for _, name := range []string{"one", "two", "gone"} {
		if err := os.WriteFile(filepath.Join(dir, name+recordSuffix), fmt.Appendf(nil, text, name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := store{dir: dir, open: func(path string) (*os.File, error) {
		switch filepath.Base(path) {
		case "two" + recordSuffix:
			return nil, &fs.PathError{Op: "open", Path: path, Err: syscall.EMFILE}
		case "gone" + recordSuffix: // since the directory was read
			return nil, &fs.PathError{Op: "open", Path: path, Err: syscall.ENOENT}
		}
		return os.Open(path)
	}}
	records, bad, err := s.load()
	if err != nil || len(records) != 1 || records[0].Name != "one" {
		t.Fatalf("%+v, %v", records, err)
	}
	if len(bad) != 1 || !bad[0].unread || !errors.Is(bad[0].err, syscall.EMFILE) {
		t.Fatalf("%+v", bad)
	}
	if _, err := os.Stat(filepath.Join(dir, "two"+recordSuffix)); err != nil {
		t.Error(err)
	}

	inWorld(t, func(w *world) {
		if err := os.WriteFile(filepath.Join(w.cfg.Dir, "two"+recordSuffix), fmt.Appendf(nil, text, "two"), 0o600); err != nil {
			t.Fatal(err)
		}
	}, func(w *world) {
		w.pods.store.open = s.open
		w.pods.mu.Lock()
		w.pods.inheritLocked()
		w.pods.mu.Unlock()
		if _, ok := w.work["two"]; !ok || w.pods.Counts.StorageErrors.Value() != 1 {
			t.Errorf("served: %v", w.work)
		}
	})
}
