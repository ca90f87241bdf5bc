package life

import (
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aether/controlplane/registrypb"
)

// load is requests at a steady rate, whatever becomes of them.
type load struct {
	sent, failed atomic.Int64
	mu           sync.Mutex
	why          []string
	stop         func()
}

// begin sends so many requests a second to the services in turn, from the pod: most on
// connections that are kept, one in eight on a new one.
func begin(c *cluster, from *pod, services []string, rps int) *load {
	l := &load{}
	kept, fresh := client(from, true), client(from, false)
	type job struct {
		client  *http.Client
		service string
	}
	jobs := make(chan job, rps) // a second's worth
	end := make(chan struct{})
	var pace, work sync.WaitGroup
	fail := func(format string, args ...any) {
		l.failed.Add(1)
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.why) < 20 {
			l.why = append(l.why, time.Now().Format("05.000 ")+fmt.Sprintf(format, args...))
		}
	}
	pace.Go(func() {
		every := time.NewTicker(time.Second / time.Duration(rps))
		defer every.Stop()
		for i := 0; ; i++ {
			select {
			case <-every.C:
			case <-end:
				return
			}
			j := job{kept, services[i%len(services)]}
			if i%8 == 0 {
				j.client = fresh
			}
			select {
			case jobs <- j:
			default: // a machine that is too busy for the rate
			}
		}
	})
	for range 32 {
		work.Go(func() {
			for j := range jobs {
				l.sent.Add(1)
				req, err := http.NewRequest(http.MethodPost, "http://"+c.address(j.service)+"/", nil)
				if err != nil {
					fail("%v", err)
					continue
				}
				req.Host = host(j.service) + ":8080"
				res, err := j.client.Do(req)
				if err != nil {
					fail("%s: %v", j.service, err)
					continue
				}
				body, err := io.ReadAll(res.Body)
				res.Body.Close()
				if err != nil || res.StatusCode != 200 || string(body) != j.service {
					fail("%s: %d %q %v", j.service, res.StatusCode, body, err)
				}
			}
		})
	}
	l.stop = func() {
		close(end)
		pace.Wait()
		close(jobs)
		work.Wait()
		kept.CloseIdleConnections()
	}
	return l
}

// TestRoll: three services of two pods are rolled in turn while requests come, as a Deployment
// with maxSurge 1 and maxUnavailable 0 does it. Contract 13.3: no request fails with a
// preStop of 10 s; with 3 s upstream quotes about one a pod. Case 138.
func TestRoll(t *testing.T) {
	services := []string{"cart", "stock", "bill"}
	const replicas, rps = 2, 250
	for _, tt := range []struct {
		preStop time.Duration
		failed  int64 // at most
	}{
		{10 * time.Second, 0},
		{3 * time.Second, int64(len(services) * replicas)},
	} {
		t.Run("preStop "+tt.preStop.String(), func(t *testing.T) {
			c := newCluster(t, nil, services...)
			app := func(service string) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, service) })
			}
			pods := map[string][]*pod{}
			for _, s := range services {
				for i := range replicas {
					pods[s] = append(pods[s], c.pod(c.nodes[i%2], s, app(s)))
				}
			}
			web := c.pod(c.nodes[0], "web", nil)
			for _, s := range services {
				for _, p := range pods[s] {
					c.await(p, registrypb.ServiceEndpoint_HEALTHY, 20*time.Second)
				}
			}
			l := begin(c, web, services, rps)
			var leaving sync.WaitGroup
			start := time.Now()
			for _, s := range services {
				for i, old := range pods[s] {
					p := c.pod(c.nodes[(i+1)%2], s, app(s))
					c.await(p, registrypb.ServiceEndpoint_HEALTHY, 20*time.Second)
					leaving.Go(func() { c.leave(old, tt.preStop) })
				}
			}
			leaving.Wait()
			l.stop()
			t.Logf("preStop %s: %d requests in %s, %d pods rolled, %d failed", tt.preStop, l.sent.Load(), time.Since(start).Round(time.Second), len(services)*replicas, l.failed.Load())
			for _, why := range l.why {
				t.Log(why)
			}
			if l.failed.Load() > tt.failed {
				t.Errorf("%d failed, want %d at most", l.failed.Load(), tt.failed)
			}
			if n := l.sent.Load(); n < int64(time.Since(start).Seconds())*rps/10 {
				t.Errorf("only %d requests were sent", n)
			}
		})
	}
}
