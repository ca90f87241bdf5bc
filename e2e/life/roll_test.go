package life

import (
	"flag"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aether/controlplane/registrypb"
)

// workers send requests at once, at most.
const workers = 32

var rollRate = flag.Int("roll-rate", 100, "requests a second that TestRoll and TestRollKubernetes send, and have to reach")

// load is requests at a steady rate, whatever becomes of them. It is of many goroutines until stop returns.
type load struct {
	sent, failed atomic.Int64
	mu           sync.Mutex
	why          []string
	stop         func()
}

// begin sends so many requests a second to the services in turn, from the pod: most on connections that are kept, one
// in eight on a new one. Request i is due i/rps after the start; one that is late is sent at once, none is left out.
func begin(c *cluster, from *pod, services []string, rps int) *load {
	l := &load{}
	kept, fresh := client(from, true), client(from, false)
	fail := func(format string, args ...any) {
		l.failed.Add(1)
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.why) < 20 {
			l.why = append(l.why, time.Now().Format("05.000 ")+fmt.Sprintf(format, args...))
		}
	}
	one := func(i int) {
		by, service := kept, services[i%len(services)]
		if i%8 == 0 {
			by = fresh
		}
		req, err := http.NewRequest(http.MethodPost, "http://"+c.address(service)+"/", nil)
		if err != nil {
			fail("%v", err)
			return
		}
		req.Host = host(service) + ":8080"
		res, err := by.Do(req)
		if err != nil {
			fail("%s: %v", service, err)
			return
		}
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || res.StatusCode != 200 || string(body) != service {
			fail("%s: %d %q %v", service, res.StatusCode, body, err)
		}
	}
	end := make(chan struct{})
	var next atomic.Int64
	var work sync.WaitGroup
	start := time.Now()
	for range workers {
		work.Go(func() {
			for {
				i := int(next.Add(1) - 1)
				select {
				case <-time.After(time.Until(start.Add(time.Duration(i) * time.Second / time.Duration(rps)))):
				case <-end:
					return
				}
				l.sent.Add(1)
				one(i)
			}
		})
	}
	l.stop = func() {
		close(end)
		work.Wait()
		kept.CloseIdleConnections()
	}
	return l
}

// TestRoll: three services of two pods are rolled in turn while requests come, as a Deployment
// with maxSurge 1 and maxUnavailable 0 does it. Contract 13.3: no request fails with a
// preStop of 10 s; with 3 s upstream quotes about one a pod. Case 138.
func TestRoll(t *testing.T) {
	for _, preStop := range []time.Duration{10 * time.Second, 3 * time.Second} {
		t.Run("preStop "+preStop.String(), func(t *testing.T) { roll(t, nil, preStop) })
	}
}

// TestRollKubernetes is the same where rows are made of a real API server's pods: a pod is
// healthy as soon as Kubernetes has it ready, and drains until it is gone.
func TestRollKubernetes(t *testing.T) {
	for _, preStop := range []time.Duration{10 * time.Second, 3 * time.Second} {
		t.Run("preStop "+preStop.String(), func(t *testing.T) { roll(t, newKubernetes(t, rolled...), preStop) })
	}
}

var rolled = []string{"cart", "stock", "bill"}

func roll(t *testing.T, kube *kubernetes, preStop time.Duration) {
	const replicas = 2
	allowed := int64(0)
	if preStop < 10*time.Second {
		allowed = int64(len(rolled) * replicas)
	}
	c := newClusterOver(t, kube, nil, rolled...)
	app := func(service string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, service) })
	}
	pods := map[string][]*pod{}
	for _, s := range rolled {
		for i := range replicas {
			pods[s] = append(pods[s], c.pod(c.nodes[i%2], s, app(s)))
		}
	}
	web := c.pod(c.nodes[0], "web", nil)
	for _, s := range rolled {
		for _, p := range pods[s] {
			c.await(p, registrypb.ServiceEndpoint_HEALTHY, 20*time.Second)
		}
	}
	start := time.Now()
	l := begin(c, web, rolled, *rollRate)
	var leaving sync.WaitGroup
	for _, s := range rolled {
		for i, old := range pods[s] {
			p := c.pod(c.nodes[(i+1)%2], s, app(s))
			c.await(p, registrypb.ServiceEndpoint_HEALTHY, 20*time.Second)
			leaving.Go(func() { c.leave(old, preStop) })
		}
	}
	leaving.Wait()
	took := time.Since(start)
	reached := float64(l.sent.Load()) / took.Seconds()
	l.stop()
	t.Logf("preStop %s: %d requests in %s, %.0f a second, %d pods rolled, %d failed", preStop, l.sent.Load(), took.Round(time.Second), reached, len(rolled)*replicas, l.failed.Load())
	for _, why := range l.why {
		t.Log(why)
	}
	if l.failed.Load() > allowed {
		t.Errorf("%d failed, want %d at most", l.failed.Load(), allowed)
	}
	if reached < 0.9*float64(*rollRate) {
		t.Errorf("%.0f requests a second were reached, of %d", reached, *rollRate)
	}
}
