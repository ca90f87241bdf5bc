package dataplane_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"aether/dataplane/engine"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/outbound"
	"aether/meshhop"
)

// pool is a pod that calls a service of several pods, whose application behaves as
// its pods' names say.
type pool struct {
	*town
	web    *outbound.Pod
	at     string // web's proxy port
	port   int
	lines  []string      // of endpoints, in modeltest's words
	inside chan string   // is told which pod a request to /hang has reached
	hang   chan struct{} // requests to /hang get no answer before it is closed
	client *http.Client

	release func() // closes hang
}

// newPool makes n pods, cart1 to cartN, at 127.1.0.1 and on.
func newPool(t *testing.T, n int) *pool {
	p := &pool{town: newTown(t), hang: make(chan struct{}), inside: make(chan string, 16)}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.port = ln.Addr().(*net.TCPAddr).Port
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		by, _, _ := strings.Cut(r.Header.Get("X-Forwarded-Client-Cert"), ";")
		by = by[strings.LastIndex(by, "/")+1:]
		switch {
		case r.URL.Path == "/fail" && by == "cart1":
			w.WriteHeader(500)
		case r.URL.Path == "/grpc" && by == "cart1":
			w.Header().Set("Content-Type", "application/grpc")
			w.Header().Set("Grpc-Status", "14")
			return
		case r.URL.Path == "/hang":
			p.inside <- by
			<-p.hang
		}
		fmt.Fprint(w, by)
	})}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	t.Cleanup(func() { srv.Close(); wg.Wait() })
	p.release = sync.OnceFunc(func() { close(p.hang) })
	t.Cleanup(p.release)
	p.web = p.pod("web", "web", "web", "127.1.0.99")
	p.at = p.listen(p.web.Engine, "127.0.0.1:0", p.out.AcceptProxy(p.web))
	for i := 1; i <= n; i++ {
		name := fmt.Sprintf("cart%d", i)
		p.pod(name, "cart", name, fmt.Sprintf("127.1.0.%d", i))
		p.lines = append(p.lines, fmt.Sprintf("pods shop/cart PORT=CLASS ip=127.1.0.%d id=spiffe://td/ns/shop/sa/%s", i, name))
	}
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", p.at)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	p.client = &http.Client{Transport: tr, Timeout: 20 * time.Second}
	return p
}

// mesh applies the endpoints as edit, which may be nil, changes their lines; an
// empty line is an endpoint that is not there. What is in use hears of it.
func (p *pool) mesh(class string, port int, edit func(i int, line string) string) {
	p.t.Helper()
	text := "service shop/cart 127.0.0.2\nlocal shop/web cid=web\n"
	for i, l := range p.lines {
		if edit != nil {
			l = edit(i+1, l)
		}
		text += l + "\n"
		text += fmt.Sprintf("local shop/cart PORT=CLASS cid=cart%d\n", i+1)
	}
	p.apply(strings.NewReplacer("PORT", fmt.Sprint(port), "CLASS", class).Replace(text))
	p.out.OnSnapshot(p.store.Load())
}

// sessions counts those to all endpoints, listed as one's or not.
func (p *pool) sessions() (n int64) {
	for _, l := range p.engine.Loops() {
		n += l.Gauges.Sessions.Load()
	}
	return n
}

// ask sends a request and returns the status and the body. pin may be empty.
func (p *pool) ask(path, pin string) (int, string) {
	p.t.Helper()
	req, err := http.NewRequest("POST", fmt.Sprintf("http://cart.shop.aether.internal:%d%s", p.port, path), nil)
	if err != nil {
		p.t.Fatal(err)
	}
	if pin != "" {
		req.Header.Set("X-Aether-Ip", pin)
	}
	res, err := p.client.Do(req)
	if err != nil {
		p.t.Error(err)
		return 0, ""
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		p.t.Error(err)
	}
	return res.StatusCode, string(b)
}

// endpoints is what all pods know.
func (p *pool) endpoints() (all []outbound.EndpointState) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	parts, silent := engine.Ask(ctx, p.engine, func(l *engine.Loop) []outbound.EndpointState {
		list, _ := p.out.Endpoints(l, "", 1000)
		return list
	})
	if len(silent) > 0 {
		p.t.Errorf("loops %v do not answer", silent)
	}
	return slices.Concat(parts...)
}

// status is what web knows of the endpoint at 127.1.0.i.
func (p *pool) status(i int) outbound.EndpointState {
	for _, s := range p.endpoints() {
		if s.Pod == "web" && s.Endpoint.Addr() == netip.AddrFrom4([4]byte{127, 1, 0, byte(i)}) {
			return s
		}
	}
	return outbound.EndpointState{}
}

// entry waits for the source's next entry with that cause.
func (p *pool) entry(cause string) (e journal.Entry) {
	p.t.Helper()
	for late := time.After(20 * time.Second); ; {
		select {
		case e = <-p.journal.ch:
			if e.Dir != model.Inbound && e.Cause == cause {
				return e
			}
		case <-late:
			p.t.Fatalf("nothing was recorded with the cause %q", cause)
		}
	}
}

func (p *pool) until(what string, ok func() bool) {
	p.t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			p.t.Fatalf("never: %s; endpoints %+v", what, p.endpoints())
		}
	}
}

// TestEjectedByErrors: five 5xx of an application, or of gRPC in its clothes, and
// its pod gets nothing more for 30 s, except what asks for it by name.
func TestEjectedByErrors(t *testing.T) {
	for _, path := range []string{"/fail", "/grpc"} {
		t.Run(path[1:], func(t *testing.T) {
			p := newPool(t, 3)
			p.mesh("http", p.port, nil)
			call := func(pin string) (int, string) {
				if path == "/fail" {
					return p.ask(path, pin)
				}
				req, _ := http.NewRequest("POST", fmt.Sprintf("http://cart.shop.aether.internal:%d%s", p.port, path), nil)
				req.Header.Set("Content-Type", "application/grpc")
				if pin != "" {
					req.Header.Set("X-Aether-Ip", pin)
				}
				res, err := p.client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer res.Body.Close()
				b, _ := io.ReadAll(res.Body)
				if res.Header.Get("Grpc-Status") == "14" {
					return 500, ""
				}
				return res.StatusCode, string(b)
			}
			for range 4 {
				if code, _ := call("127.1.0.1"); code != 500 {
					t.Fatalf("status %d, want the application's 500", code)
				}
			}
			if s := p.status(1); s.EjectedMS != 0 {
				t.Fatalf("ejected after four: %+v", s)
			}
			call("127.1.0.1")
			if s := p.status(1); s.EjectedMS <= 29_000 || s.EjectedMS > 30_000 || s.Ejections != 1 {
				t.Fatalf("after five: %+v, want to be ejected for 30s", s)
			}
			for range 100 {
				if code, by := call(""); code != 200 || by == "cart1" {
					t.Fatalf("%d by %q, want one of the others", code, by)
				}
			}
			if code, _ := call("127.1.0.1"); code != 500 {
				t.Errorf("pinned: status %d, want the ejected endpoint's 500", code)
			}
		})
	}
}

// TestEjectedByConnects (case 138): an endpoint that cannot be reached costs three
// dials, and no request fails for it, since nothing of it was sent.
func TestEjectedByConnects(t *testing.T) {
	p := newPool(t, 3)
	p.mu.Lock()
	delete(p.hops, netip.MustParseAddr("127.1.0.1"))
	p.mu.Unlock()
	p.mesh("http", p.port, nil)
	for range 50 { // until one has met it
		if code, by := p.ask("/", ""); code != 200 {
			t.Fatalf("%d %q", code, by)
		}
	}
	if s := p.status(1); s.Trouble == 0 || s.EjectedMS != 0 {
		t.Fatalf("after 50 requests: %+v, want to be avoided, for one failure", s)
	}
	for range 2 { // it is dear now: ask for it
		if code, _ := p.ask("/", "127.1.0.1"); code != 503 {
			t.Fatalf("pinned: status %d, want 503", code)
		}
	}
	if s := p.status(1); s.EjectedMS == 0 {
		t.Fatalf("after three failed dials: %+v", s)
	}
	for range 100 {
		if code, by := p.ask("/", ""); code != 200 {
			t.Fatalf("%d %q", code, by)
		}
	}
	if s := p.status(1); s.Ejections != 1 || s.Open != 0 {
		t.Errorf("%+v", s)
	}
}

// TestAddressReused (case 112): the address of an endpoint is another pod's by now,
// and the registry does not know it yet. Nothing reaches that pod, requests go to
// other endpoints, and the row counts as one that fails.
func TestAddressReused(t *testing.T) {
	p := newPool(t, 2)
	p.pod("thief", "thief", "thief", "127.1.0.1") // takes its place
	p.mesh("http", p.port, nil)
	for range 50 {
		if code, by := p.ask("/", ""); code != 200 || by != "cart2" {
			t.Fatalf("%d by %q, want cart2", code, by)
		}
	}
	for p.status(1).EjectedMS == 0 {
		if code, by := p.ask("/", "127.1.0.1"); code != 503 {
			t.Fatalf("pinned: %d by %q, want 503", code, by)
		}
		p.entry("wrong-peer")
	}
}

// TestOwnFaultEjectsNobody: a pod without a certificate cannot call anybody, and
// holds it against nobody.
func TestOwnFaultEjectsNobody(t *testing.T) {
	p := newPool(t, 3)
	p.mesh("http", p.port, nil)
	p.mu.Lock()
	svid := p.svids["web"]
	delete(p.svids, "web")
	p.mu.Unlock()
	for range 10 {
		if code, _ := p.ask("/", ""); code != 503 {
			t.Fatalf("status %d, want 503", code)
		}
	}
	for _, s := range p.endpoints() {
		if s.Ejections != 0 || s.Trouble != 0 {
			t.Errorf("held against an endpoint: %+v", s)
		}
	}
	p.mu.Lock()
	p.svids["web"] = svid
	p.mu.Unlock()
	if code, by := p.ask("/", ""); code != 200 {
		t.Errorf("with a certificate: %d %q", code, by)
	}
}

// TestEndpointLeaves (case 112, too: the address is another's): sessions to an endpoint that is unhealthy or somebody else
// end at once, with what is on them; of one that is gone with the last request under way (decision 029); those to
// one that drains go on; and nothing new comes.
func TestEndpointLeaves(t *testing.T) {
	for _, tt := range []struct {
		name  string
		edit  func(line string) string
		cause string // of the request under way; "": it ends well
	}{
		{"gone", func(string) string { return "" }, ""},
		{"another identity", func(l string) string { return strings.Replace(l, "sa/cart1", "sa/cart9", 1) }, "endpoint-gone"},
		{"unhealthy", func(l string) string { return l + " health=unhealthy" }, "endpoint-unhealthy"},
		{"draining", func(l string) string { return l + " health=draining" }, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newPool(t, 2)
			p.mesh("http", p.port, nil)
			code := make(chan int, 1)
			go func() {
				c, _ := p.ask("/hang", "127.1.0.1")
				code <- c
			}()
			if by := <-p.inside; by != "cart1" {
				t.Fatalf("pinned to cart1, and reached %s", by)
			}
			p.mesh("http", p.port, func(i int, l string) string {
				if i == 1 {
					return tt.edit(l)
				}
				return l
			})
			if tt.cause != "" {
				if e := p.entry(tt.cause); e.Status != 503 || e.Endpoint.Addr() != netip.MustParseAddr("127.1.0.1") {
					t.Errorf("recorded %s", e.String())
				}
				if c := <-code; c != 503 {
					t.Errorf("status %d, want 503", c)
				}
				p.until("its session is closed", func() bool { return p.status(1).Sessions == 0 })
			} else if s := p.status(1); tt.name != "gone" && (s.Sessions != 1 || s.Open != 1) {
				t.Errorf("%+v, want its session, and the request on it", s)
			}
			if tt.name != "another identity" { // it is there, if nobody can be it
				for range 20 {
					if c, by := p.ask("/", ""); c != 200 || by != "cart2" {
						t.Errorf("%d by %q, want cart2", c, by)
					}
				}
			}
			if n := p.sessions(); tt.name == "gone" && !p.near && n != 2 {
				t.Errorf("%d sessions, want the one with a request and the other's", n)
			}
			if tt.cause == "" {
				p.release()
				if c := <-code; c != 200 {
					t.Errorf("status %d, want 200", c)
				}
			}
			if tt.name == "gone" && !p.near {
				p.until("only the other's session is open", func() bool { return p.sessions() == 1 })
			}
		})
	}
}

// TestEndpointLeavesWhileDialled: a request that waits for a session to an endpoint
// that goes has not been sent, and goes elsewhere, a POST too.
func TestEndpointLeavesWhileDialled(t *testing.T) {
	p := newPool(t, 2)
	ln, err := net.Listen("tcp", "127.0.0.1:0") // takes connections, and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	p.mu.Lock()
	p.hops[netip.MustParseAddr("127.1.0.1")] = ln.Addr().String()
	p.mu.Unlock()
	// The other one takes nothing for as long as the first is to be chosen.
	p.mesh("http", p.port, func(i int, l string) string {
		if i == 2 {
			return l + " health=draining"
		}
		return l
	})
	type answer struct {
		code int
		by   string
	}
	got := make(chan answer, 1)
	go func() {
		c, by := p.ask("/", "")
		got <- answer{c, by}
	}()
	p.until("the request waits for cart1", func() bool { return p.status(1).Open == 1 })
	// In one step cart1 goes and cart2 is back: where there was nobody else when it was
	// decided, there is by now.
	p.mesh("http", p.port, func(i int, l string) string {
		if i == 1 {
			return ""
		}
		return l
	})
	if a := <-got; a.code != 200 || a.by != "cart2" {
		t.Errorf("%+v, want 200 by cart2", a)
	}
	// And where there was somebody else from the beginning, there it goes.
	p.mesh("http", p.port, nil)
	waiting := false
	for range 64 { // until one chooses cart1, which depends on chance
		go func() {
			c, by := p.ask("/", "")
			got <- answer{c, by}
		}()
		select {
		case a := <-got:
			if a.code != 200 || a.by != "cart2" {
				t.Fatalf("%+v, want cart2", a)
			}
			continue
		case <-p.chose(1):
			waiting = true
		}
		break
	}
	if !waiting {
		t.Fatal("nothing chose cart1")
	}
	p.mesh("http", p.port, func(i int, l string) string {
		if i == 1 {
			return ""
		}
		return l
	})
	if a := <-got; a.code != 200 || a.by != "cart2" {
		t.Errorf("%+v, want cart2", a)
	}
}

// chose is closed once a request is with endpoint i.
func (p *pool) chose(i int) <-chan struct{} {
	ch := make(chan struct{})
	go func() {
		for end := time.Now().Add(time.Second); time.Now().Before(end); runtime.Gosched() {
			if p.status(i).Open > 0 {
				close(ch)
				return
			}
		}
	}()
	return ch
}

// TestRawBalance: connections of raw TCP go where there are fewest, and end with
// their endpoint.
func TestRawBalance(t *testing.T) {
	p := newPool(t, 3)
	port := p.line("hello")
	captured := p.listen(p.web.Engine, fmt.Sprintf("127.0.0.2:%d", port), p.out.AcceptCaptured(p.web))
	p.mesh("tcp", port, nil)
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for range 31 {
		c, err := net.Dial("tcp", captured)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		b := make([]byte, 6)
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatalf("connection %d: %v", len(conns), err)
		}
	}
	most, least := 0, 99
	for i := 1; i <= 3; i++ {
		n := p.status(i).Open
		most, least = max(most, n), min(least, n)
	}
	if most-least > 2 {
		t.Errorf("%d connections at most, %d at least: want them even", most, least)
	}
	first, second, third := p.status(1).Open, p.status(2).Open, p.status(3).Open
	p.mesh("tcp", port, func(i int, l string) string {
		switch i {
		case 1:
			return "" // gone
		case 2:
			return l + " health=draining"
		}
		return l + " health=unhealthy"
	})
	for range first {
		p.entry("endpoint-gone") // no order is promised: what is passed over is the other cause
	}
	p.until("only what drains is open", func() bool { return p.status(2).Open == second && p.status(3).Open == 0 })
	cut := 0
	for _, c := range conns {
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		if _, err := c.Read(make([]byte, 1)); err != nil && !isTimeout(err) {
			cut++
		}
	}
	if cut != first+third {
		t.Errorf("%d connections cut, want %d", cut, first+third)
	}
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// TestRawEjected: three failed connects in a row, of raw TCP, and then there is
// nobody rather than one that is out.
func TestRawEjected(t *testing.T) {
	p := newPool(t, 2)
	port := p.line("hello")
	captured := p.listen(p.web.Engine, fmt.Sprintf("127.0.0.2:%d", port), p.out.AcceptCaptured(p.web))
	p.mu.Lock()
	delete(p.hops, netip.MustParseAddr("127.1.0.1"))
	p.mu.Unlock()
	connect := func() error {
		c, err := net.Dial("tcp", captured)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		_, err = io.ReadFull(c, make([]byte, 6))
		return err
	}
	p.mesh("tcp", port, func(i int, l string) string {
		if i == 2 {
			return l + " health=draining"
		}
		return l
	})
	for n := range 3 {
		if s := p.status(1); s.EjectedMS != 0 {
			t.Fatalf("ejected after %d: %+v", n, s)
		}
		if connect() == nil {
			t.Fatal("connected to nobody")
		}
		if e := p.entry(string(meshhop.ReasonConnect)); e.Endpoint.Addr() != netip.MustParseAddr("127.1.0.1") {
			t.Errorf("recorded %s", e.String())
		}
	}
	p.until("it is ejected", func() bool { return p.status(1).Ejections == 1 })
	if connect() == nil {
		t.Error("connected to nobody")
	}
	p.entry("no-endpoint")
	p.mesh("tcp", port, nil)
	for range 20 {
		if err := connect(); err != nil {
			t.Fatalf("with another one: %v", err)
		}
	}
}
