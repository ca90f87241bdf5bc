package dataplane_test

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/controlplane/compile"
	"aether/dataplane/engine"
	"aether/dataplane/inbound"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/outbound"
	"aether/dataplane/snapshot"
	"aether/meshhop"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/spiffeid"
)

// here makes sockets in the test's own namespace.
type here struct{}

func (here) Get(v6 bool) (int, bool) {
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	return fd, err == nil
}

func (s here) Request(v6 bool, on func(int, error)) {
	fd, _ := s.Get(v6)
	go on(fd, nil)
}

func (here) Connect(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// told keeps the entries of the journal.
type told struct{ ch chan journal.Entry }

func (o *told) Ended(e *journal.Entry) {
	select {
	case o.ch <- *e:
	default: // nobody looks
	}
}

// town is both sides of a hop in one process: pods with real listeners, real
// certificates, and a mesh written down in text.
type town struct {
	t       testing.TB
	engine  *engine.Engine
	ctx     context.Context
	ca      *devca.CA
	out     *outbound.Outbound
	in      *inbound.Inbound
	store   snapshot.Store
	journal *told

	mu    sync.Mutex
	svids map[string]*mtls.SVID    // by container
	hops  map[netip.Addr]string    // where the inbound listener of the pod with that address is
	outs  map[string]*outbound.Pod // by container

	inbounds map[string]*inbound.Pod // by container
	ips      map[string]netip.Addr   // by container
	wall     func() time.Time        // that certificates are judged by; nil: time.Now
	life     time.Duration           // of the pods' certificates; 0: an hour
	near     bool                    // sameNode: inProcess; what apply makes of the mesh

	// sockets, if not nil, makes the sockets that a pod's inbound side delivers with.
	sockets func(container string) engine.Sockets
	// serves, if not nil, is what the handshake takes as a server name; else any port, of which the pod decides.
	serves func(container string, port uint16) bool
	// wire, if not nil, stands between the two ends of each hop.
	wire func(c *net.TCPConn) *net.TCPConn
}

func newTown(t testing.TB, with ...func(*outbound.Config, *inbound.Config)) *town {
	t.Helper()
	return newTownOn(t, engine.Config{}, with...)
}

// newTownOn is newTown on an engine with that configuration.
func newTownOn(t testing.TB, cfg engine.Config, with ...func(*outbound.Config, *inbound.Config)) *town {
	t.Helper()
	w := &town{t: t, journal: &told{make(chan journal.Entry, 1024)}, svids: map[string]*mtls.SVID{}, hops: map[netip.Addr]string{}, outs: map[string]*outbound.Pod{}, inbounds: map[string]*inbound.Pod{}, ips: map[string]netip.Addr{}, near: inProcess}
	var err error
	if w.ca, err = devca.Open(t.TempDir(), "td", time.Now); err != nil {
		t.Fatal(err)
	}
	if w.engine, err = engine.New(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	w.ctx = ctx
	var wg sync.WaitGroup
	wg.Go(func() { w.engine.Run(ctx) })
	t.Cleanup(func() {
		stop()
		wg.Wait()
		for _, l := range w.engine.Loops() {
			if n := l.Stats().Panics; n != 0 {
				t.Errorf("%d panics on loop %d", n, l.ID())
			}
		}
	})
	out := outbound.Config{Store: &w.store, Journal: w.journal, LocalDestination: w.neighbour, Dialer: &meshhop.Dialer{
		Sockets: func(ctx context.Context, _ string, addr netip.AddrPort) (*net.TCPConn, error) {
			w.mu.Lock()
			to := w.hops[addr.Addr()]
			w.mu.Unlock()
			if to == "" {
				return nil, fmt.Errorf("no pod at %s", addr)
			}
			c, err := here{}.Connect(ctx, netip.MustParseAddrPort(to))
			if err == nil && w.wire != nil {
				c = w.wire(c)
			}
			return c, err
		},
		SVID: w.svid,
	}}
	in := inbound.Config{Store: &w.store, Journal: w.journal, Acceptor: &meshhop.Acceptor{}}
	for _, f := range with {
		f(&out, &in)
	}
	w.out, w.in = outbound.New(out), inbound.New(in)
	return w
}

func (w *town) neighbour(container string) outbound.LocalDestination {
	w.mu.Lock()
	p := w.inbounds[container]
	w.mu.Unlock()
	if p == nil {
		return nil
	}
	neighbours.Add(1)
	return w.in.LocalDestination(p)
}

func (w *town) svid(container string) *mtls.SVID {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.svids[container]
}

// listen opens a listening socket of the pod at addr ("127.0.0.1:0") and returns where it is.
func (w *town) listen(p *engine.Pod, addr string, accept engine.Accept) string {
	w.t.Helper()
	a := netip.MustParseAddrPort(addr)
	fd, _ := here{}.Get(false)
	w.t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}); err != nil {
		w.t.Fatalf("bind %s: %v", addr, err)
	}
	if err := unix.Listen(fd, 64); err != nil {
		w.t.Fatal(err)
	}
	if err := p.Listen(fd, accept); err != nil {
		w.t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		w.t.Fatal(err)
	}
	return netip.AddrPortFrom(a.Addr(), uint16(sa.(*unix.SockaddrInet4).Port)).String()
}

// pod adds a pod of account in namespace shop with that container, identity (its last part) and address.
func (w *town) pod(container, account, identity, ip string) *outbound.Pod {
	w.t.Helper()
	id, err := spiffeid.Parse("spiffe://td/ns/shop/sa/" + identity)
	if err != nil {
		w.t.Fatal(err)
	}
	s, err := w.ca.Issue(id, cmp.Or(w.life, time.Hour))
	if err != nil {
		w.t.Fatal(err)
	}
	e := w.engine.AddPod(container)
	w.mu.Lock()
	w.svids[container] = s
	w.mu.Unlock()
	var sockets engine.Sockets = here{}
	if w.sockets != nil {
		sockets = w.sockets(container)
	}
	ip4 := &inbound.Pod{
		Context: w.ctx, Engine: e, Container: container, Namespace: "shop", Account: account, ID: id, Sockets: sockets,
		Local: &meshhop.Local{Pod: container, ID: id, SVID: func() *mtls.SVID { return w.svid(container) }, TLS: mtls.ServerConfig(mtls.Server{
			Pod: container, SVID: func() *mtls.SVID { return w.svid(container) }, Now: w.wall,
			Serves: func(port uint16) bool { return w.serves == nil || w.serves(container, port) },
		})},
	}
	at := w.listen(e, "127.0.0.1:0", w.in.Accept(ip4))
	w.mu.Lock()
	w.inbounds[container], w.ips[container] = ip4, netip.MustParseAddr(ip)
	w.hops[netip.MustParseAddr(ip)] = at
	w.mu.Unlock()
	return &outbound.Pod{Context: w.ctx, Engine: e, Container: container, Namespace: "shop", Account: account, ID: id, Sockets: here{}}
}

// apply makes text the mesh.
func (w *town) apply(text string) {
	w.t.Helper()
	m := modeltest.Mesh(w.t, text)
	if w.near {
		m.SameNode = model.InProcess
	}
	w.mu.Lock()
	for i := range m.Workloads { // all of them are this node's
		p := &m.Workloads[i]
		if at, ok := w.ips[p.ContainerID]; ok {
			p.IPs, p.SPIFFEID = []netip.Addr{at}, w.inbounds[p.ContainerID].ID.String()
		}
	}
	w.mu.Unlock()
	s, problems := compile.Compile(m)
	if len(problems) > 0 {
		w.t.Fatal(problems)
	}
	w.store.Swap(s)
}

// app serves HTTP at 127.0.0.1 and returns its port. It tells what it was asked, and by XFCC which pod was.
func (w *town) app() (port int) {
	w.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		by, _, _ := strings.Cut(r.Header.Get("X-Forwarded-Client-Cert"), ";")
		rw.Header().Set("Access-Control-Allow-Origin", "app")
		rw.Header().Set("X-App", "yes")
		fmt.Fprintf(rw, "%s %s%s by=%s x-rule=%s", r.Method, r.Host, r.RequestURI, by[strings.LastIndex(by, "/")+1:], r.Header.Get("X-Rule"))
	})}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	w.t.Cleanup(func() { srv.Close(); wg.Wait() })
	return ln.Addr().(*net.TCPAddr).Port
}

// line serves TCP at 127.0.0.1: it says its name at once, then what it heard first.
func (w *town) line(name string) (port int) {
	w.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				fmt.Fprintf(c, "%s\n", name)
				_, _ = io.Copy(io.Discard, c)
			})
		}
	})
	w.t.Cleanup(func() { ln.Close(); wg.Wait() })
	return ln.Addr().(*net.TCPAddr).Port
}

// TestRules: what a rule says is done to real requests over a real hop.
func TestRules(t *testing.T) {
	w := newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	other := w.pod("other", "other", "other", "127.1.0.8")
	w.pod("cart1", "cart", "cart", "127.1.0.1")
	w.pod("cart2", "cart", "cart2", "127.1.0.2")
	w.pod("cart3", "cart", "cart3", "127.1.0.3")
	w.pod("ask1", "ask", "ask", "127.1.0.4")
	port := w.app()
	proxy := map[string]string{
		"web":   w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web)),
		"other": w.listen(other.Engine, "127.0.0.1:0", w.out.AcceptProxy(other)),
	}
	captured := w.listen(web.Engine, fmt.Sprintf("127.0.0.2:%d", port), w.out.AcceptCaptured(web))
	w.apply(strings.ReplaceAll(`
service shop/cart 127.0.0.2
pods shop/cart PORT ip=127.1.0.1 pod=cart-1 meta=version:v1
pods shop/cart PORT ip=127.1.0.2 pod=cart-2 meta=version:v2 id=spiffe://td/ns/shop/sa/cart2
pods shop/cart PORT ip=127.1.0.3 pod=cart-3 health=unhealthy id=spiffe://td/ns/shop/sa/cart3
service shop/ask 127.0.0.3
pods shop/ask PORT ip=127.1.0.4
service shop/cold 127.0.0.4 PORT=http
catalog shop/cold
local shop/web cid=web
local shop/other cid=other
local shop/cart PORT cid=cart1
local shop/cart PORT cid=cart2
local shop/ask PORT cid=ask1
filter shop/nobody rbac policy=p;ns:none
filter shop/ext authz
filter shop/in scope=inbound target=cart rbac deny policy=p;id:spiffe://td/ns/shop/sa/other policy=q;ns:shop;path:/private
filter shop/in2 scope=inbound target=ask authz
filter shop/query query=set:q:1
route shop/cart cart
rule match=prefix:/redirect redirect=scheme=https;host=other.example;prefix=/new
rule match=prefix:/rewrite rewrite=host=new.example;prefix=/there use=query set=x-rule:rewrite
rule match=prefix:/edit set=x-rule:edit rremove=x-app rset=x-answer:1
rule match=prefix:/cors cors=https://a.example;methods=GET,PUT;expose=x-e;age=60s
rule match=prefix:/admin use=nobody
rule match=prefix:/ext use=ext
rule match=prefix:/extredirect use=ext redirect=host=other.example
rule match=prefix:/extcors use=ext cors=https://a.example
rule match=prefix:/cold to=cold:PORT
`, "PORT", fmt.Sprint(port)))

	name := fmt.Sprintf("cart.shop.aether.internal:%d", port)
	for _, tt := range []struct {
		from, method, host, path string
		fields                   []string // name, value, name, value
		status                   int
		body                     string   // a part of it
		has                      []string // name, value: fields of the answer; an empty value: it has none
		entry                    string   // action, reason, cause of the source's entry
	}{
		{"web", "GET", name, "/redirect/x?q=2", nil, 302, "location", []string{"Location", "https://other.example/new/x?q=2"}, "reply redirect "},
		{"captured", "GET", "cart", "/redirect", nil, 302, "location", []string{"Location", "https://other.example/new"}, "reply redirect "},
		{"web", "GET", name, "/rewrite/x?z=2", nil, 200, "GET new.example/there/x?z=2&q=1 by=", nil, "forward http-route "},
		{"web", "GET", name, "/rewrite", nil, 200, "x-rule=rewrite", nil, "forward http-route "},
		{"web", "GET", name, "/edit", nil, 200, "x-rule=edit", []string{"X-App", "", "X-Answer", "1"}, "forward http-route "},
		{"web", "OPTIONS", name, "/cors", []string{"Origin", "https://a.example", "Access-Control-Request-Method", "PUT"}, 204, "",
			[]string{"Access-Control-Allow-Origin", "https://a.example", "Access-Control-Allow-Methods", "GET,PUT", "Access-Control-Max-Age", "60", "Vary", "Origin"}, "reply cors-preflight "},
		{"web", "OPTIONS", name, "/cors", []string{"Origin", "https://b.example", "Access-Control-Request-Method", "PUT"}, 204, "",
			[]string{"Access-Control-Allow-Origin", "", "Access-Control-Allow-Methods", ""}, "reply cors-preflight "},
		{"web", "GET", name, "/cors", []string{"Origin", "https://a.example"}, 200, "GET ",
			[]string{"Access-Control-Allow-Origin", "https://a.example", "Access-Control-Expose-Headers", "x-e"}, "forward http-route "},
		{"web", "GET", name, "/cors", []string{"Origin", "https://b.example"}, 200, "GET ", []string{"Access-Control-Allow-Origin", "", "Vary", "Origin"}, "forward http-route "},

		{"web", "GET", name, "/", []string{"X-Aether-Pod", "cart-2"}, 200, "by=cart2 ", nil, "forward declared-http "},
		{"web", "GET", name, "/", []string{"X-Aether-Ip", "127.1.0.1"}, 200, "by=cart ", nil, "forward declared-http "},
		{"web", "GET", name, "/", []string{"X-Aether-Pod", "cart-3"}, 503, "x-aether-pod", nil, "refuse no-endpoint "},
		{"web", "GET", name, "/", []string{"X-Aether-Subset-Version", "v2"}, 200, "by=cart2 ", nil, "forward declared-http "},
		{"web", "GET", name, "/", []string{"X-Aether-Subset-Version", "v3"}, 503, "x-aether-subset", nil, "refuse no-endpoint "},

		{"web", "GET", name, "/admin", nil, 403, "RBAC: access denied\n", []string{"X-Aether-Error", ""}, "refuse rbac-denied "},
		{"web", "GET", name, "/x/%2e%2e/admin", nil, 403, "plain path", []string{"X-Aether-Error", ""}, "refuse path-spelling "},
		{"web", "POST", name, "/admin", []string{"Content-Type", "application/grpc"}, 200, "",
			[]string{"Grpc-Status", "7", "Grpc-Message", "RBAC: access denied"}, "refuse rbac-denied "},
		{"web", "GET", name, "/ext", nil, 403, "ext-authz-unavailable", nil, "refuse http-route ext-authz-unavailable"},
		{"web", "GET", name, "/extredirect", nil, 403, "ext-authz-unavailable", []string{"Location", ""}, "refuse redirect ext-authz-unavailable"},
		{"web", "OPTIONS", name, "/extcors", []string{"Origin", "https://a.example", "Access-Control-Request-Method", "PUT"}, 403, "ext-authz-unavailable",
			[]string{"Access-Control-Allow-Origin", "https://a.example"}, "refuse cors-preflight ext-authz-unavailable"},

		{"web", "GET", name, "/cold", nil, 503, "not yet", nil, "await await-rows no-endpoint"},
		{"web", "GET", fmt.Sprintf("cold:%d", port), "/", nil, 503, "not yet", nil, "await await-rows no-endpoint"},

		// The destination judges by the certificate of the hop.
		{"web", "GET", name, "/private/x", nil, 403, "RBAC: access denied\n", nil, "forward declared-http "},
		{"web", "GET", name, "/%70rivate", nil, 403, "plain path", nil, "forward declared-http "},
		{"web", "GET", name, "/a/..%2fprivate", nil, 403, "plain path", nil, "refuse path-spelling "}, // at the source: it has policy of its own
		{"other", "GET", name, "/", nil, 403, "RBAC: access denied\n", nil, "forward declared-http "},
		{"web", "GET", name, "/", nil, 200, "GET ", nil, "forward declared-http "},
		{"web", "GET", fmt.Sprintf("ask:%d", port), "/", nil, 403, "ext-authz-unavailable", nil, "forward declared-http "},
	} {
		t.Run(fmt.Sprintf("%s_%s_%s", tt.from, tt.method, strings.ReplaceAll(tt.path, "/", "_")), func(t *testing.T) {
			at := proxy[tt.from]
			if tt.from == "captured" {
				at = captured
			}
			tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", at)
			}}
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			req, err := http.NewRequestWithContext(ctx, tt.method, "http://"+tt.host+tt.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			for i := 0; i < len(tt.fields); i += 2 {
				req.Header.Set(tt.fields[i], tt.fields[i+1])
			}
			res, err := tr.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(res.Body)
			res.Body.Close()
			if err != nil {
				t.Fatal(err)
			}
			if res.StatusCode != tt.status || !strings.Contains(string(body), tt.body) {
				t.Errorf("%d %q, want %d with %q", res.StatusCode, body, tt.status, tt.body)
			}
			for i := 0; i < len(tt.has); i += 2 {
				if got := strings.Join(res.Header.Values(tt.has[i]), "|"); got != tt.has[i+1] {
					t.Errorf("%s is %q, want %q", tt.has[i], got, tt.has[i+1])
				}
			}
			for {
				select {
				case e := <-w.journal.ch:
					if e.Dir.String() == "inbound" {
						continue
					}
					if got := e.Action + " " + e.Reason + " " + e.Cause; got != tt.entry {
						t.Errorf("recorded as %q, want %q", got, tt.entry)
					}
					if got := e.Path.String(); got != tt.path {
						t.Errorf("recorded path %q, want %q", got, tt.path)
					}
				case <-ctx.Done():
					t.Error("nothing was recorded")
				}
				break
			}
		})
	}
}

// TestTCPRules: TCPRoute and TLSRoute on real connections. A port with TLSRoutes
// is looked at for a ClientHello only, and is what it is for everything else.
func TestTCPRules(t *testing.T) {
	w := newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.pod("db1", "db", "db", "127.1.0.1")
	w.pod("new1", "new", "new", "127.1.0.2")
	own, moved, plain := w.line("own"), w.line("moved"), w.line("plain")
	at := map[int]string{}
	for _, p := range []int{own, plain} {
		at[p] = w.listen(web.Engine, fmt.Sprintf("127.0.0.2:%d", p), w.out.AcceptCaptured(web))
	}
	w.apply(strings.NewReplacer("OWN", fmt.Sprint(own), "MOVED", fmt.Sprint(moved), "PLAIN", fmt.Sprint(plain)).Replace(`
service shop/db 127.0.0.2
pods shop/db OWN=tcp,PLAIN=tcp ip=127.1.0.1
pods shop/new MOVED=tcp ip=127.1.0.2
local shop/web cid=web
local shop/db OWN=tcp,PLAIN=tcp cid=db1
local shop/new MOVED=tcp cid=new1
tlsroute shop/db db:OWN sni=db.example
rule to=new:MOVED
tcproute shop/plain db:PLAIN
rule to=new:MOVED
`))
	for _, tt := range []struct {
		name string
		port int
		say  func(c net.Conn)
		want string
	}{
		{"server name of the route", own, hello("db.example"), "moved"},
		{"another server name", own, hello("other.example"), "own"},
		{"no ClientHello", own, func(c net.Conn) { fmt.Fprint(c, "x") }, "own"},
		{"HTTP bytes", own, func(c net.Conn) { fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: db.example\r\n\r\n") }, "own"},
		{"a client that says nothing", own, func(net.Conn) {}, "own"},
		{"a client that has said all", own, func(c net.Conn) { _ = c.(*net.TCPConn).CloseWrite() }, "own"},
		{"half a ClientHello", own, func(c net.Conn) { _, _ = c.Write([]byte{22, 3, 1}) }, "own"},
		{"TCPRoute", plain, func(net.Conn) {}, "moved"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := net.DialTimeout("tcp", at[tt.port], 5*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			tt.say(c)
			buf := make([]byte, 64)
			n, err := io.ReadAtLeast(c, buf, len(tt.want)+1)
			if err != nil || string(buf[:n]) != tt.want+"\n" {
				t.Errorf("%q, %v; want %q", buf[:n], err, tt.want)
			}
		})
	}
}

// hello says a ClientHello with that server name, and nothing after it.
func hello(name string) func(net.Conn) {
	return func(c net.Conn) {
		a, b := net.Pipe()
		go func() {
			defer a.Close()
			_ = tls.Client(a, &tls.Config{ServerName: name}).Handshake()
		}()
		buf := make([]byte, 16<<10)
		n, _ := b.Read(buf)
		b.Close()
		_, _ = c.Write(buf[:n])
	}
}
