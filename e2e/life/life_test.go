package life

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"aether/controlplane/local"
	"aether/controlplane/registrypb"
	"aether/mtls"
	"aether/mtls/spiffeid"
	"aether/tproxy/netns"
)

// hop asks a pod's inbound listener, as another node's proxy does.
func (c *cluster) hop(from, to *pod, path string) int {
	c.t.Helper()
	id := func(p *pod) spiffeid.ID {
		id, err := spiffeid.ForServiceAccount(trustDomain, "shop", p.service)
		if err != nil {
			c.t.Fatal(err)
		}
		return id
	}
	svid, err := c.ca.Issue(id(from), time.Hour)
	if err != nil {
		c.t.Fatal(err)
	}
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		ForceAttemptHTTP2: true, DisableKeepAlives: true,
		DialTLSContext: func(ctx context.Context, _, _ string) (conn net.Conn, err error) {
			err = netns.Do(c.router.NS, func() (err error) {
				conn, err = (&net.Dialer{}).DialContext(ctx, "tcp4", netip.AddrPortFrom(to.net.IP, 18008).String())
				return err
			})
			if err != nil {
				return nil, err
			}
			t := tls.Client(conn, mtls.ClientConfig(mtls.Client{SVID: svid, SNI: "8080", ALPN: []string{"h2"}, Pin: id(to)}))
			return t, t.HandshakeContext(ctx)
		},
	}}
	res, err := client.Get("https://" + to.service + path)
	if err != nil {
		c.t.Logf("%s%s: %v", to.name, path, err)
		return 0
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		c.t.Error(err)
	}
	return res.StatusCode
}

// until waits for what nothing tells of.
func until(t *testing.T, limit time.Duration, what string, f func() bool) {
	t.Helper()
	late, again := time.After(limit), time.NewTicker(10*time.Millisecond)
	defer again.Stop()
	for !f() {
		select {
		case <-again.C:
		case <-late:
			t.Fatalf("not within %s: %s", limit, what)
		}
	}
}

// TestLife: a pod from its first call to its last, with real probes into its captured
// namespace, real certificates and real hops.
func TestLife(t *testing.T) {
	const probes = 12 * time.Second // two of them, and some
	hold := make(chan struct{})
	c := newCluster(t, map[string]chan struct{}{"bill": hold}, "cart", "bill")
	web := c.pod(c.nodes[0], "web", nil)
	var sick atomic.Bool
	app := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" && sick.Load() {
			w.WriteHeader(http.StatusInternalServerError)
		}
		fmt.Fprint(w, "cart")
	})
	is := func(p *pod, live, ready int) {
		t.Helper()
		if l, r := c.hop(web, p, "/-/-/live"), c.hop(web, p, "/-/-/ready"); l != live || r != ready {
			t.Errorf("%s: live %d, ready %d; want %d, %d", p.name, l, r, live, ready)
		}
	}
	outside := client(web, true)
	ask := func() int {
		t.Helper()
		req, err := http.NewRequest(http.MethodGet, "http://"+c.address("cart")+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host("cart") + ":8080"
		res, err := outside.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		return res.StatusCode
	}

	// Not healthy before its application answers, although it is served.
	cart := c.pod(c.nodes[1], "cart", nil)
	bill := c.pod(c.nodes[1], "bill", app)
	c.await(cart, registrypb.ServiceEndpoint_UNHEALTHY, 5*time.Second)
	is(cart, 200, 503)
	if got := ask(); got != 503 {
		t.Errorf("nobody is healthy: %d", got)
	}
	c.begin(cart, app)
	c.await(cart, registrypb.ServiceEndpoint_HEALTHY, probes)
	is(cart, 200, 200)
	if got := ask(); got != 200 {
		t.Errorf("it is healthy: %d", got)
	}

	// Not healthy before its listener can shake hands, although its application answers.
	c.await(bill, registrypb.ServiceEndpoint_UNHEALTHY, 5*time.Second)
	until(t, probes, "bill's application answers", func() bool { return c.nodes[1].life.Ready(bill.container) })
	is(bill, 0, 0) // no certificate, no handshake
	close(hold)
	c.await(bill, registrypb.ServiceEndpoint_HEALTHY, probes)
	is(bill, 200, 200)

	// Sick, and well again.
	sick.Store(true)
	c.await(cart, registrypb.ServiceEndpoint_UNHEALTHY, probes)
	is(cart, 200, 503)
	sick.Store(false)
	c.await(cart, registrypb.ServiceEndpoint_HEALTHY, probes)

	// Another process in this one's place, while no registrar can be reached: the pods are
	// served from disk, and demoted by nobody (contract 13.6).
	c.change(func() { c.away = true })
	old := c.nodes[1]
	old.end()
	if got := c.hop(web, cart, "/-/-/live"); got != 0 {
		t.Errorf("nobody is to listen: %d", got)
	}
	again := c.node("n2", old.dir)
	c.nodes[1], cart.node = again, again
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := again.data.Await(ctx, cart.container, true); err != nil {
		t.Fatal(err)
	}
	c.await(cart, registrypb.ServiceEndpoint_HEALTHY, 0)
	until(t, 10*time.Second, "a certificate, which is asked for anew", func() bool { return again.data.HasCertificate(cart.container) })
	is(cart, 200, 200)
	if got := ask(); got != 200 {
		t.Errorf("after a restart: %d", got)
	}
	c.change(func() { c.away = false })

	// And its end.
	c.leave(cart, time.Second)
	c.await(cart, registrypb.ServiceEndpoint_HEALTH_UNSPECIFIED, 0) // there is none
	if got := c.hop(web, cart, "/-/-/live"); got != 0 {
		t.Errorf("it is still served: %d", got)
	}
	if r, err := again.life.Add(t.Context(), local.Pod{}); err == nil {
		t.Errorf("an empty call: %v", r)
	}
}
