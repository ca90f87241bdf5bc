package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"

	"aether/e2e/rig"
)

// Our source, Envoy as destination: it selects no ALPN and stamps no outcome (contract 6.1, 5.7).
func TestEnvoyDestination(t *testing.T) {
	_, err := interopTools() // before the clock of the test runs
	must(t, err)
	w := newWorld(t)
	var apps app
	ports := rig.PodManifest{Ports: "8080,8081=h2,9000=tcp"}
	b := w.pod(1, "b", ports)
	other := w.pod(1, "other", ports)   // its Envoy shows b's certificate
	choosy := w.pod(1, "choosy", ports) // its Envoy takes another caller
	otherIP, choosyIP := netip.MustParseAddr("10.96.0.11"), netip.MustParseAddr("10.96.0.12")
	w.service("b", service, 8080, 8081, 9000)
	w.service("other", otherIP, 8080, 8081, 9000)
	w.service("choosy", choosyIP, 8080, 8081, 9000)
	apps.start(w, b)
	var wrong app // nothing may arrive
	wrong.start(w, other)
	wrong.start(w, choosy)
	e := w.destinations(1, 9901, []destination{
		{Pod: b, Cert: w.svid("b"), Ports: bPorts},
		{Pod: other, Cert: w.svid("b"), Ports: bPorts},
		{Pod: choosy, Cert: w.svid("choosy"), Only: spiffe("somebody"), Ports: bPorts},
	})
	ours := w.proxy(0)
	const addr, raw = "10.96.0.10:8080", "10.96.0.10:9000"
	name := host("b", 8080)

	t.Run("one hop session carries all", func(t *testing.T) {
		for range 2 { // clients, one after the other
			c := w.client(w.a, addr, false)
			for i := range 100 {
				if _, _, err := c.get(name, "/"); err != nil {
					t.Fatalf("request %d: %v", i, err)
				}
			}
		}
		if n := e.stat("http.in_b_8080.downstream_cx_total"); n != 1 {
			t.Errorf("200 requests one after the other came on %d connections, want 1", n)
		}
		if n := e.stat("http.in_b_8080.downstream_cx_http2_total"); n != 1 {
			t.Errorf("%d of them HTTP/2, want 1", n)
		}
	})
	for _, v := range []struct {
		name string
		h2c  bool
	}{{"HTTP1", false}, {"h2c", true}} {
		t.Run(v.name, func(t *testing.T) {
			c := w.client(w.a, addr, v.h2c)
			c.caller(t, name, "a", "b")
			c.large(t, name)
		})
	}
	w.grpcInterop(t, w.a, "10.96.0.10:8081", fmt.Sprintf("b.%s.%s", namespace, domain), false)
	t.Run("raw TCP", func(t *testing.T) {
		w.echoTCP(t, w.a, raw, size)
		w.echoTCP(t, w.a, raw, 0)
	})
	t.Run("no upgrade", func(t *testing.T) { // Envoy announces no extended CONNECT, and upstream enables none
		c := w.client(w.a, addr, false)
		before := apps.calls.Load()
		for range 2 {
			res, body, err := c.do("GET", name, "/", nil, "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")
			must(t, err)
			if res.StatusCode != 501 || !strings.Contains(body, "upgrade-not-supported") {
				t.Errorf("got %s %q, want 501 that says why", res.Status, body)
			}
		}
		if n := apps.calls.Load() - before; n != 0 {
			t.Errorf("%d requests reached the application without their Upgrade", n)
		}
		if _, _, err := c.get(name, "/"); err != nil {
			t.Errorf("then: %v", err)
		}
	})
	t.Run("no outcome, no retry", func(t *testing.T) {
		c := w.client(w.a, addr, false)
		before := apps.calls.Load()
		res, _, err := c.do("GET", name, "/status?code=503", nil)
		must(t, err)
		if n := apps.calls.Load() - before; res.StatusCode != 503 || n != 1 {
			t.Errorf("got %s after %d calls, want the application's 503 after one", res.Status, n)
		}
		res, _, err = c.do("GET", name, "/status?code=404&outcome=404%3B-%3BGET%3Bvia_upstream", nil)
		must(t, err)
		if v, ok := res.Header["X-Aether-Outcome"]; ok || res.StatusCode != 404 {
			t.Errorf("%s, x-aether-outcome reached the client: %q", res.Status, v)
		}
	})
	for _, tt := range []struct{ name, service, addr string }{
		{"the peer shows another identity", "other", otherIP.String()},
		{"the peer wants another caller", "choosy", choosyIP.String()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, h2c := range []bool{false, true} {
				res, body, err := w.client(w.a, tt.addr+":8080", h2c).do("GET", host(tt.service, 8080), "/", nil)
				must(t, err)
				if res.StatusCode != 503 {
					t.Errorf("h2c %v: got %s %q, want 503; decisions:\n%s", h2c, res.Status, body, ours.why(2))
				}
			}
			w.refusedTCP(t, w.a, tt.addr+":9000")
			if n := wrong.calls.Load(); n != 0 {
				t.Errorf("%d requests reached the application", n)
			}
		})
	}
}

// Envoy drains: it says GOAWAY on every connection, then closes its listener.
func TestEnvoyDrain(t *testing.T) {
	w := newWorld(t)
	var apps [2]app
	m := rig.PodManifest{Account: "b", Ports: "8080,8081=h2,9000=tcp"}
	pods := []*rig.Pod{w.pod(1, "b1", m), w.pod(1, "b2", m)}
	cIP := netip.MustParseAddr("10.96.0.11")
	w.service("b", service, 8080, 8081, 9000)
	m.Account = "c"
	c := w.pod(1, "c", m)
	w.service("c", cIP, 8080, 8081, 9000)
	for i, p := range pods {
		apps[i].start(w, p)
	}
	var cApp app
	cApp.start(w, c)
	start := func(admin int, p *rig.Pod, account, drain string) *envoy {
		return w.destinations(1, admin, []destination{{Pod: p, Cert: w.svid(account), Ports: bPorts}}, "--drain-time-s", drain, "--drain-strategy", "immediate")
	}
	short := start(9901, pods[0], "b", "2")
	start(9902, pods[1], "b", "600")
	long := start(9903, c, "c", "600")
	w.proxy(0)
	drain := func(t *testing.T, e *envoy, how string) {
		t.Helper()
		_, err := admin(w.ctx, e.node, e.admin, "POST", "/drain_listeners?"+how)
		must(t, err)
	}

	t.Run("GOAWAY on every connection", func(t *testing.T) {
		// An upload that is under way all the time must end well too.
		body, feed := io.Pipe()
		type answer struct {
			body string
			err  error
		}
		uploaded := make(chan answer, 1)
		go func() {
			_, got, err := w.client(w.a, cIP.String()+":8080", true).do("POST", host("c", 8080), "/sum", body)
			uploaded <- answer{got, err}
		}()
		half := noise(size)
		_, err := io.CopyN(feed, half, size/2)
		must(t, err)
		l := w.load(cIP.String()+":8080", host("c", 8080))
		err = l.more(w.ctx, 200)
		drain(t, long, "graceful&skip_exit") // the listener stays open
		err = errors.Join(err, rig.Until(w.ctx, func(context.Context) error {
			if n := long.stat("http.in_c_8080.downstream_cx_drain_close"); n < 5 {
				return fmt.Errorf("GOAWAY on %d connections so far", n)
			}
			return nil
		}), l.more(w.ctx, 200))
		l.end(t)
		must(t, err)
		_, err = io.Copy(feed, half)
		must(t, err)
		must(t, feed.Close())
		if got := <-uploaded; got.err != nil || got.body != largeSum() {
			t.Errorf("upload across GOAWAY: %q, %v, want %q", got.body, got.err, largeSum())
		}
	})
	t.Run("the listener closes, another endpoint takes over", func(t *testing.T) {
		l := w.load("10.96.0.10:8080", host("b", 8080))
		err := rig.Until(w.ctx, func(context.Context) error {
			for i := range apps {
				if apps[i].calls.Load() < 50 {
					return fmt.Errorf("endpoint %d has had %d requests", i, apps[i].calls.Load())
				}
			}
			return nil
		})
		drain(t, short, "graceful")
		err = errors.Join(err, rig.Until(w.ctx, func(ctx context.Context) error {
			c, err := w.rig.Nodes[1].Dial(ctx, "tcp", netip.AddrPortFrom(pods[0].IP4, 18008).String())
			if err == nil {
				c.Close()
				return errors.New("the listener still takes connections")
			}
			return nil
		}))
		err = errors.Join(err, l.more(w.ctx, 400))
		l.end(t)
		must(t, err)
	})
}
