// Package demo runs the main job where anyone can watch it: two nodes, four
// pods, captured traffic, the mTLS hop, and each decision explained.
//
//   - Everything is real: network namespaces, nftables, TPROXY, two proxy
//     processes, certificates. Only the certificate authority is a throw-away one.
//   - Every answer is checked; a wrong one fails the demo.
//   - It leaves nothing behind unless asked to keep it.
//
// It knows the proxy only from outside: its command line, its admin, its traffic.
package demo

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// Options of Run.
type Options struct {
	Proxy string // path of the aether-proxy binary; required
	// Registry: the nodes know of each other's pods by a registrar over a real etcd; nil:
	// every node reads all of the mesh from files.
	Registry *Registry
	Keep     bool // leave it running, with the commands to try, until ctx ends
	Out      io.Writer
}

// demo is one run.
type demo struct {
	o    Options
	out  io.Writer
	mesh *mesh.Mesh
	n    int
	bad  int
}

// Run builds the mesh, shows it and takes it down again.
func Run(ctx context.Context, o Options) (err error) {
	d := &demo{o: o, out: o.Out}
	start := time.Now()
	d.head("two nodes, four pods")
	if err := d.up(ctx); err != nil {
		return errors.Join(err, d.down())
	}
	defer func() { err = errors.Join(err, d.down()) }()
	d.say("up after %v", time.Since(start).Round(10*time.Millisecond))
	d.show(ctx)
	if d.bad > 0 {
		return fmt.Errorf("%d of %d answers were not what they must be", d.bad, d.n)
	}
	if o.Keep {
		d.keep()
		<-ctx.Done()
	}
	d.say("\n%d calls, all as they must be, in %v", d.n, time.Since(start).Round(100*time.Millisecond))
	return nil
}

func (d *demo) say(format string, args ...any) { fmt.Fprintf(d.out, format+"\n", args...) }
func (d *demo) head(s string)                  { d.say("\n== %s", s) }

func (d *demo) up(ctx context.Context) error {
	m, err := mesh.New(ctx, mesh.Options{Proxy: d.o.Proxy, TrustDomain: "demo.example", KeepDir: d.o.Keep, DevCA: true, Registry: d.o.Registry})
	if err != nil {
		return err
	}
	d.mesh = m
	for _, p := range []mesh.Pod{
		{Name: "web-1", Account: "web", Ports: "8080"},
		{Name: "job-1", Account: "job", Ports: "8080", Annotations: map[string]string{"capture.aether.io/redirect-all": "false"}},
		{Name: "cart-1", Account: "cart", Ports: "8080,8081=h2,9000=tcp", Node: 1},
		{Name: "db-1", Account: "db", Ports: "5432=tcp", Node: 1, Annotations: map[string]string{"endpoint.aether.io/port": "5432", "endpoint.aether.io/protocol": "tcp"}},
	} {
		pod, err := m.AddPod(ctx, p)
		if err != nil {
			return err
		}
		d.say("   %-7s shop/%-5s %-10s ports %s", pod.Node.Name, p.Account, pod.IP4, p.Ports)
	}
	err = errors.Join(
		m.Service(rig.ServiceManifest{Name: "cart", ClusterIPs: m.ClusterIPs(10), Ports: []uint16{8080, 8081, 9000}}),
		m.Service(rig.ServiceManifest{Name: "db", ClusterIPs: m.ClusterIPs(20), Ports: []uint16{5432}}),
		m.Write("route", route),
		d.apps(ctx))
	if err != nil {
		return err
	}
	if err := m.Start(ctx); err != nil {
		return err
	}
	for i := range m.Rig.Nodes {
		s, err := m.Status(ctx, i)
		if err != nil {
			return err
		}
		if len(s.Problems) > 0 {
			return fmt.Errorf("problems: %v", s.Problems)
		}
	}
	if d.o.Registry != nil {
		return d.registered(ctx)
	}
	return nil
}

const route = `---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {namespace: shop, name: cart-beta}
spec:
  parentRefs: [{group: "", kind: Service, name: cart, port: 8080}]
  rules:
  - matches: [{path: {type: PathPrefix, value: /beta}, headers: [{name: x-tester, value: "yes"}]}]
    filters:
    - type: ResponseHeaderModifier
      responseHeaderModifier: {set: [{name: x-route, value: beta}]}
    backendRefs: [{name: cart, port: 8080}]
`

// apps starts the applications, inside the pods and one outside the mesh.
func (d *demo) apps(ctx context.Context) error {
	m := d.mesh
	cart, node2 := &m.Pod("cart-1").Space, m.Rig.Nodes[1]
	l, err := cart.Listen(ctx, "tcp", "127.0.0.1:8081")
	if err != nil {
		return err
	}
	g := grpc.NewServer()
	healthpb.RegisterHealthServer(g, health.NewServer())
	go g.Serve(l)
	m.OnClose(g.Stop)
	banner := func(s string) func(*net.TCPConn) {
		return func(c *net.TCPConn) {
			io.WriteString(c, s)
			c.CloseWrite()
			io.Copy(io.Discard, c)
		}
	}
	return errors.Join(
		m.ServeHTTP(ctx, cart, "127.0.0.1:8080", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			who := r.Header.Get("X-Forwarded-Client-Cert")
			fmt.Fprintf(w, "cart:8080 got %s %s from %s", r.Method, r.URL.Path, who[max(0, strings.LastIndex(who, "URI=")):])
		})),
		m.ServeTCP(ctx, cart, "127.0.0.1:9000", func(c *net.TCPConn) { io.Copy(c, c) }),
		m.ServeTCP(ctx, &m.Pod("db-1").Space, "127.0.0.1:5432", banner("db ready\n")),
		m.ServeTCP(ctx, &node2.Space, net.JoinHostPort(node2.IP4.String(), "25"), banner("220 mail outside the mesh\r\n")))
}

func (d *demo) down() error {
	if d.mesh == nil {
		return nil
	}
	return d.mesh.Close()
}

// call is one thing to show: what is done, and what must come of it.
type call struct {
	title    string
	from     string // the client pod
	do       func(ctx context.Context, p *rig.Pod) (string, error)
	want     string // must be in the answer
	flow     string // for the explanation
	request  string
	withinMS float64 // 0: no bound
}

func (d *demo) show(ctx context.Context) {
	mail := netip.AddrPortFrom(d.mesh.Rig.Nodes[1].IP4, 25).String()
	d.head("calls, each beside its explanation")
	for _, c := range []call{
		{
			title: "captured HTTP/1.1: curl http://cart.shop.aether.internal:8080/items", from: "web-1",
			do: d.get("10.96.0.10:8080", "cart.shop.aether.internal:8080", "/items"), want: "200 cart:8080 got GET /items from URI=spiffe://demo.example/ns/shop/sa/web",
			flow: "shop/web > 10.96.0.10:8080 http1 host=cart.shop.aether.internal:8080", request: "GET cart.shop.aether.internal:8080/items",
		}, {
			title: "the short name, and a route by path and header", from: "web-1",
			do: d.get("10.96.0.10:8080", "cart", "/beta/x", "x-tester", "yes"), want: "x-route=beta",
			flow: "shop/web > 10.96.0.10:8080 http1 host=cart", request: "GET cart/beta/x h:x-tester=yes",
		}, {
			title: "h2c with prior knowledge", from: "web-1",
			do: d.h2c("10.96.0.10:8080", "cart.shop:8080", "/h2"), want: "200 cart:8080 got GET /h2",
			flow: "shop/web > 10.96.0.10:8080 h2c host=cart.shop:8080", request: "GET cart.shop:8080/h2",
		}, {
			title: "gRPC health check (grpc-go, trailers)", from: "web-1",
			do: d.grpc("10.96.0.10:8081", "cart.shop.svc.cluster.local:8081"), want: "SERVING",
			flow: "shop/web > 10.96.0.10:8081 h2c host=cart.shop.svc.cluster.local:8081", request: "POST cart.shop.svc.cluster.local:8081/grpc.health.v1.Health/Check",
		}, {
			title: "raw TCP to a declared port: no byte is looked at", from: "web-1",
			do: d.raw("10.96.0.10:9000", "ping\n"), want: "ping",
			flow: "shop/web > 10.96.0.10:9000",
		}, {
			title: "server-first on a declared raw-TCP port, over mTLS", from: "web-1",
			do: d.raw("10.96.0.20:5432", ""), want: "db ready",
			flow: "shop/web > 10.96.0.20:5432", withinMS: 200,
		}, {
			title: "server-first outside the mesh, undeclared: passed through at once", from: "web-1",
			do: d.raw(mail, ""), want: "220 mail",
			flow: "shop/web > " + mail + " silent", withinMS: 200,
		}, {
			title: "wrong port in Host", from: "web-1",
			do: d.get("10.96.0.10:8080", "cart.shop.aether.internal:9000", "/"), want: "421 port-mismatch",
			flow: "shop/web > 10.96.0.10:8080 http1 host=cart.shop.aether.internal:9000", request: "GET cart.shop.aether.internal:9000/",
		}, {
			title: "a port nobody declares", from: "web-1",
			do: d.get("10.96.0.10:7777", "cart.shop.aether.internal:7777", "/"), want: "421 port-not-declared",
			flow: "shop/web > 10.96.0.10:7777 http1 host=cart.shop.aether.internal:7777", request: "GET cart.shop.aether.internal:7777/",
		}, {
			title: "the proxy port, from a pod that captures nothing", from: "job-1",
			do: d.get("127.0.0.1:18081", "cart.shop.aether.internal:8080", "/proxy"), want: "200 cart:8080 got GET /proxy from URI=spiffe://demo.example/ns/shop/sa/job",
			flow: "shop/job > proxy http1 host=cart.shop.aether.internal:8080", request: "GET cart.shop.aether.internal:8080/proxy",
		}, {
			title: "the proxy port without a port in Host, and 80 not declared", from: "job-1",
			do: d.get("127.0.0.1:18081", "cart.shop.aether.internal", "/"), want: "421 port-required",
			flow: "shop/job > proxy http1 host=cart.shop.aether.internal", request: "GET cart.shop.aether.internal/",
		}, {
			title: "CONNECT is never a tunnel into the mesh", from: "job-1",
			do: d.raw("127.0.0.1:18081", "CONNECT cart.shop.aether.internal:8080 HTTP/1.1\r\nHost: cart\r\nConnection: close\r\n\r\n"), want: "HTTP/1.1 404",
			flow: "shop/job > proxy http1", request: "CONNECT cart.shop.aether.internal:8080",
		},
	} {
		d.call(ctx, c)
	}
	d.head("the hop is mTLS: what node2 verified (its last decisions)")
	if b, err := d.mesh.Admin(ctx, 1, "/why?n=4"); err == nil {
		d.say("%s", indent(string(b)))
	}
	d.plainHop(ctx)
	d.latency(ctx)
	if d.o.Registry != nil {
		d.leave(ctx)
	}
}

func (d *demo) call(ctx context.Context, c call) {
	d.n++
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	pod := d.mesh.Pod(c.from)
	start := time.Now()
	got, err := c.do(ctx, pod)
	took := time.Since(start)
	mark := "ok "
	if err != nil {
		got = "error: " + err.Error()
	}
	ms := float64(took.Microseconds()) / 1000
	if err != nil || !strings.Contains(got, c.want) || c.withinMS > 0 && ms > c.withinMS {
		mark = "BAD"
		d.bad++
	}
	d.say("\n%s %s   [%.1f ms]\n    answer:  %s", mark, c.title, ms, strings.ReplaceAll(strings.TrimSpace(got), "\n", "\n             "))
	if mark == "BAD" {
		d.say("    wanted:  %s", c.want)
	}
	q := url.Values{"flow": {c.flow}}
	if c.request != "" {
		q.Set("request", c.request)
	}
	b, err := d.mesh.Admin(ctx, slices.Index(d.mesh.Rig.Nodes, pod.Node), "/explain?"+q.Encode())
	if err != nil {
		d.bad++
		d.say("    explain: %v", err)
		return
	}
	d.say("    explain: %s", strings.ReplaceAll(strings.TrimSpace(string(b)), "\n", "\n             "))
}

func indent(s string) string {
	return "    " + strings.ReplaceAll(strings.TrimSpace(s), "\n", "\n    ")
}

func (d *demo) get(addr, host, path string, header ...string) func(context.Context, *rig.Pod) (string, error) {
	return func(ctx context.Context, p *rig.Pod) (string, error) {
		t := mesh.HTTP1(p, addr)
		defer t.CloseIdleConnections()
		return fetch(ctx, t, host, path, header...)
	}
}

func (d *demo) h2c(addr, host, path string) func(context.Context, *rig.Pod) (string, error) {
	return func(ctx context.Context, p *rig.Pod) (string, error) {
		t := mesh.H2C(p, addr)
		defer t.CloseIdleConnections()
		return fetch(ctx, t, host, path)
	}
}

func fetch(ctx context.Context, t *http.Transport, host, path string, header ...string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, "GET", "http://service"+path, nil)
	if err != nil {
		return "", err
	}
	req.Host = host
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := t.RoundTrip(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return "", err
	}
	s := fmt.Sprint(res.StatusCode)
	if v := res.Header.Get("X-Aether-Error"); v != "" {
		s += " " + v
	}
	if v := res.Header.Get("X-Route"); v != "" {
		s += " x-route=" + v
	}
	return s + " " + string(b), nil
}

func (d *demo) grpc(addr, authority string) func(context.Context, *rig.Pod) (string, error) {
	return func(ctx context.Context, p *rig.Pod) (string, error) {
		cc, err := grpc.NewClient("passthrough:///"+authority, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return mesh.To(p, addr)(ctx, "", "") }))
		if err != nil {
			return "", err
		}
		defer cc.Close()
		r, err := healthpb.NewHealthClient(cc).Check(ctx, &healthpb.HealthCheckRequest{})
		if err != nil {
			return "", err
		}
		return r.Status.String(), nil
	}
}

// raw sends s and returns the first bytes that come back.
func (d *demo) raw(addr, s string) func(context.Context, *rig.Pod) (string, error) {
	return func(ctx context.Context, p *rig.Pod) (string, error) {
		c, err := p.Dial(ctx, "tcp", addr)
		if err != nil {
			return "", err
		}
		defer c.Close()
		dl, _ := ctx.Deadline()
		_ = c.SetDeadline(dl)
		if _, err := io.WriteString(c, s); err != nil {
			return "", err
		}
		b := make([]byte, 256)
		n, err := c.Read(b)
		return string(b[:n]), err
	}
}

// plainHop shows that 18008 takes nobody without a certificate of the mesh.
func (d *demo) plainHop(ctx context.Context) {
	d.n++
	addr := netip.AddrPortFrom(d.mesh.Pod("cart-1").IP4, 18008).String()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c, err := d.mesh.Rig.Nodes[0].Dial(ctx, "tcp", addr)
	if err == nil {
		defer c.Close()
		tc := tls.Client(c, &tls.Config{ServerName: "8080", InsecureSkipVerify: true, NextProtos: []string{"h2"}})
		if err = tc.HandshakeContext(ctx); err == nil {
			_, err = tc.Read(make([]byte, 1)) // TLS 1.3: the refusal comes with the first read
		}
	}
	if err == nil || ctx.Err() != nil {
		d.bad++
		d.say("BAD a client without a certificate was let in (%v)", err)
		return
	}
	d.say("\nok  a client without a certificate at %s: %v", addr, err)
}

// latency compares one connection's round trips with and without the two proxies.
func (d *demo) latency(ctx context.Context) {
	d.head("latency of one keep-alive connection, 1,000 requests each (job, which captures nothing)")
	p := d.mesh.Pod("job-1")
	// The application listens on loopback only, as it may; a second listener makes it reachable directly.
	cart := d.mesh.Pod("cart-1")
	direct := netip.AddrPortFrom(cart.IP4, 8088).String()
	err := d.mesh.ServeHTTP(ctx, &cart.Space, direct, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") }))
	if err != nil {
		d.bad++
		d.say("    %v", err)
		return
	}
	for _, v := range []struct{ name, addr, host string }{
		{"direct", direct, "cart"},
		{"through both proxies", "127.0.0.1:18081", "cart.shop.aether.internal:8080"},
	} {
		t := mesh.HTTP1(p, v.addr)
		var all []time.Duration
		for range 1000 {
			start := time.Now()
			if _, err := fetch(ctx, t, v.host, "/l"); err != nil {
				d.bad++
				d.say("    %s: %v", v.name, err)
				return
			}
			all = append(all, time.Since(start))
		}
		t.CloseIdleConnections()
		slices.Sort(all)
		d.say("    %-22s p50 %v   p99 %v", v.name, all[len(all)/2].Round(time.Microsecond), all[len(all)*99/100].Round(time.Microsecond))
	}
}

func (d *demo) keep() {
	web, n1 := d.mesh.Pod("web-1").NSName(), d.mesh.Rig.Nodes[0].NSName()
	d.head("kept running; end it with Ctrl-C. Try:")
	d.say(`    ip netns exec %[1]s curl -si --resolve cart.shop.aether.internal:8080:10.96.0.10 http://cart.shop.aether.internal:8080/
    ip netns exec %[1]s curl -si -H 'Host: cart:9000' http://10.96.0.10:8080/
    ip netns exec %[1]s nft list table inet aether_capture
    ip netns exec %[2]s curl -s '127.0.0.1:9901/why?n=5'
    ip netns exec %[2]s aetherctl explain 'shop/web > 10.96.0.10:8080 http1 host=cart:9090'
    ip netns exec %[2]s curl -s 127.0.0.1:9901/snapshot
    ls %[3]s   # configuration (edit it: it is reloaded), logs`, web, n1, d.mesh.Rig.Dir)
}
