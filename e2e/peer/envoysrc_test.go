package peer

import (
	"testing"

	"aether/e2e/rig"
)

// Envoy as source, our destination, strict and with --envoy-peers (contract 6.2).
func TestEnvoySource(t *testing.T) {
	_, err := interopTools() // before the clock of the test runs
	must(t, err)
	w := newWorld(t)
	var apps app
	b := w.pod(1, "b", rig.PodManifest{Ports: "8080=h1,8081=h2,9000=tcp", Annotations: map[string]string{
		"endpoint.aether.io/port": "9000", "endpoint.aether.io/protocol": "tcp"}})
	h := w.pod(1, "h", rig.PodManifest{Ports: "8080,8081=h2,9000=tcp", Annotations: map[string]string{
		"endpoint.aether.io/port": "8080"}})
	w.service("b", service, 8080, 8081, 9000)
	apps.start(w, b)
	apps.start(w, h)

	// A certificate of a in an authority that b does not trust.
	foreign, err := rig.NewCA(trustDomain)
	must(t, err)
	fake, err := foreign.Issue(rig.SVIDRequest{Namespace: namespace, Account: "a"})
	must(t, err)
	fakeDir, err := fake.Write(w.rig.Dir + "/fake")
	must(t, err)
	// One of the right authority, but of another trust domain.
	guest, err := w.ca.Issue(rig.SVIDRequest{Namespace: namespace, Account: "guest", ID: "spiffe://elsewhere.test/ns/demo/sa/a"})
	must(t, err)
	guestDir, err := guest.Write(w.certs)
	must(t, err)

	pin, cert := spiffe("b"), w.svid("a")
	e := w.source([]hop{
		{Name: "h2", Codec: "h2", To: b.IP4, SNI: "8080", ALPN: "h2", Pin: pin, Cert: cert},
		{Name: "grpc", Codec: "h2", To: b.IP4, SNI: "8081", ALPN: "h2", Pin: pin, Cert: cert},
		{Name: "noalpn", Codec: "h2", To: b.IP4, SNI: "8080", Pin: pin, Cert: cert},
		{Name: "h1", Codec: "h1", To: b.IP4, SNI: "8080", Pin: pin, Cert: cert},
		{Name: "unserved", Codec: "h2", To: b.IP4, SNI: "8089", ALPN: "h2", Pin: pin, Cert: cert},
		{Name: "wrongpin", Codec: "h2", To: b.IP4, SNI: "8080", ALPN: "h2", Pin: spiffe("other"), Cert: cert},
		{Name: "fake", Codec: "h2", To: b.IP4, SNI: "8080", ALPN: "h2", Pin: pin, Cert: fakeDir},
		{Name: "guest", Codec: "h2", To: b.IP4, SNI: "8080", ALPN: "h2", Pin: pin, Cert: guestDir},
		{Name: "fqdn", Codec: "h2", To: b.IP4, SNI: "8080.b.demo.aether.internal", ALPN: "h2", Pin: pin, Cert: cert},
		{Name: "tls12", Codec: "h2", To: b.IP4, SNI: "8080", ALPN: "h2", TLS: "TLSv1_2", Pin: pin, Cert: cert},
		{Name: "nosni", Codec: "h2", To: h.IP4, ALPN: "h2", Pin: spiffe("h"), Cert: cert},
		{Name: "raw", Codec: "tcp", Dial: 9000, To: b.IP4, SNI: "9000", Pin: pin, Cert: cert},
		{Name: "rawnosni", Codec: "tcp", Dial: 9001, To: b.IP4, Pin: pin, Cert: cert},
		{Name: "rawwrongpin", Codec: "tcp", Dial: 9002, To: b.IP4, SNI: "9000", Pin: spiffe("other"), Cert: cert},
		{Name: "rawfake", Codec: "tcp", Dial: 9003, To: b.IP4, SNI: "9000", Pin: pin, Cert: fakeDir},
		{Name: "rawtls12", Codec: "tcp", Dial: 9004, To: b.IP4, SNI: "9000", TLS: "TLSv1_2", Pin: pin, Cert: cert},
	})
	const addr = "10.96.0.10:8080"
	raw := func(port string) string { return "10.96.0.10:" + port }

	answers := func(t *testing.T, by string, names ...string) {
		t.Helper()
		for _, name := range names {
			c := w.client(w.a, addr, name == "h2")
			c.caller(t, name+".test", "a", by)
		}
	}
	refuses := func(t *testing.T, p *proxy, names ...string) {
		t.Helper()
		for _, name := range names {
			before := apps.calls.Load()
			res, body, err := w.client(w.a, addr, false).do("GET", name+".test", "/", nil)
			if err != nil {
				t.Errorf("%s: %v", name, err)
			} else if res.StatusCode/100 == 2 || apps.calls.Load() != before {
				t.Errorf("%s: got %s %q; decisions:\n%s", name, res.Status, body, p.why(2))
			}
		}
	}

	strict := w.proxy(1)
	t.Run("strict", func(t *testing.T) {
		for _, v := range []struct {
			name string
			hop  string
			h2c  bool
		}{{"HTTP1", "h2.test", false}, {"h2c", "h2.test", true}, {"no ALPN", "noalpn.test", true}, {"HTTP1 hop", "h1.test", false}} {
			t.Run(v.name, func(t *testing.T) {
				c := w.client(w.a, addr, v.h2c)
				c.caller(t, v.hop, "a", "b")
				c.large(t, v.hop)
			})
		}
		t.Run("keep-alive", func(t *testing.T) {
			c := w.client(w.a, addr, false)
			before := e.stat("cluster.h2.upstream_cx_total")
			for i := range 200 {
				if _, _, err := c.get("h2.test", "/"); err != nil {
					t.Fatalf("request %d: %v", i, err)
				}
			}
			if n := e.stat("cluster.h2.upstream_cx_total") - before; n > 1 {
				t.Errorf("200 requests one after the other took %d new hops, want one at most", n)
			}
		})
		t.Run("outcome", func(t *testing.T) { // every answer carries it (contract 5.7)
			res, _, err := w.client(w.a, addr, false).do("GET", "h2.test", "/status?code=404&outcome=503%3B-%3BPOST%3Bvia_upstream", nil)
			must(t, err)
			if got := res.Header["X-Aether-Outcome"]; len(got) != 1 || got[0] != "404;-;GET;via_upstream" {
				t.Errorf("x-aether-outcome: %q", got)
			}
		})
		t.Run("raw TCP", func(t *testing.T) {
			w.echoTCP(t, w.a, raw("9000"), size)
			w.echoTCP(t, w.a, raw("9000"), 0)
		})
		t.Run("refused", func(t *testing.T) {
			refuses(t, strict, "unserved", "wrongpin", "fake", "guest", "fqdn", "tls12", "nosni")
			for _, port := range []string{"9001", "9002", "9003", "9004"} {
				w.refusedTCP(t, w.a, raw(port))
			}
		})
	})
	w.grpcInterop(t, w.a, addr, "grpc.test", false)

	strict.stop()
	compat := w.proxy(1, "--envoy-peers")
	t.Run("envoy-peers", func(t *testing.T) {
		answers(t, "b", "h2", "noalpn", "h1", "fqdn", "tls12")
		answers(t, "h", "nosni")
		for _, port := range []string{"9000", "9001", "9004"} {
			w.echoTCP(t, w.a, raw(port), 1<<20)
		}
		refuses(t, compat, "unserved", "wrongpin", "fake", "guest")
		for _, port := range []string{"9002", "9003"} {
			w.refusedTCP(t, w.a, raw(port))
		}
		// Large bodies over TLS 1.2, where records are sealed otherwise.
		w.client(w.a, addr, true).large(t, "tls12.test")
		w.echoTCP(t, w.a, raw("9004"), size)
	})
}
