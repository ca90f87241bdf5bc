package life

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// TestProbeBySocket: a pod that is delivered to by a Unix socket is probed there (contract 1.7), and an
// EndpointPolicy whose socket nobody serves unpromotes the pods of its service and no others (15.1).
func TestProbeBySocket(t *testing.T) {
	t.Parallel()
	const probes = 12 * time.Second // two of them, and some
	const healthy, unhealthy = registrypb.ServiceEndpoint_HEALTHY, registrypb.ServiceEndpoint_UNHEALTHY
	c := newCluster(t, nil, "cart", "bill", "calm")
	dir, err := os.MkdirTemp("", "uds") // t.TempDir's is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c.change(func() { c.udsDir = dir })
	ok := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})

	var loopback atomic.Int64
	asked := make(chan string, 64)
	cart := c.podOf(c.nodes[0], "cart", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { loopback.Add(1) }),
		map[string]string{"endpoint.aether.io/uds-socket": "app/http.sock"})
	bill, calm := c.pod(c.nodes[0], "bill", ok), c.pod(c.nodes[0], "calm", ok)
	home := filepath.Join(dir, "uid-"+cart.container)
	if err := os.Mkdir(home, 0o777); err != nil {
		t.Fatal(err)
	}
	serve := func() (stop func()) {
		t.Helper()
		l, err := net.Listen("unix", filepath.Join(home, "http.sock"))
		if err != nil {
			t.Fatal(err)
		}
		srv := &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			select {
			case asked <- fmt.Sprintf("%s http://%s%s %s", r.Method, r.Host, r.URL, r.Proto):
			default:
			}
		})}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = srv.Serve(l) // ends with Close
		}()
		return func() {
			srv.Close()
			<-ended
		}
	}
	c.await(bill, healthy, probes)
	c.await(calm, healthy, probes)
	c.await(cart, unhealthy, probes)
	stop := serve()
	c.await(cart, healthy, probes)
	if got := <-asked; got != "GET http://localhost/healthz HTTP/1.1" {
		t.Errorf("asked %s", got)
	}
	if n := loopback.Load(); n > 0 {
		t.Errorf("its port was asked %d times", n)
	}

	stop()
	c.change(func() {
		c.policies = []model.EndpointPolicy{{Namespace: "shop", Name: "p", Service: model.ServiceName{Namespace: "shop", Name: "bill"}, UDSSocket: "app/none.sock"}}
	})
	c.await(cart, unhealthy, probes)
	c.await(bill, unhealthy, probes)
	c.await(calm, healthy, time.Second)
	stop = serve()
	defer func() { stop() }()
	c.change(func() { c.policies = nil })
	c.await(cart, healthy, probes)
	c.await(bill, healthy, probes)
}
