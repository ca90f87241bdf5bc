package netns

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// serial makes names that no other run of a test has.
var serial atomic.Int32

func unique(name string) string { return fmt.Sprintf("%s-u%d", name, serial.Add(1)) }

// addPod adds a managed pod for this test, its name made unique, and syncs.
func addPod(t *testing.T, ctx context.Context, p mesh.Pod) *rig.Pod {
	t.Helper()
	p.Account, p.Name = cmp.Or(p.Account, p.Name), unique(p.Name)
	pod, err := w.AddPod(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Remove("pod-" + p.Name) })
	settle(t, ctx)
	return pod
}

// addRow adds a registry row without a pod of ours: at the address of that one.
func addRow(t *testing.T, ctx context.Context, name, account, ports string, at *rig.Pod) {
	t.Helper()
	row := *at
	row.Name = name
	write(t, ctx, "row-"+name, rig.PodYAML(&row, rig.PodManifest{
		Namespace: "shop", Account: account, Ports: ports, Annotations: map[string]string{"file.aether.io/part": "endpoint"},
	}))
}

// write puts a document into force for as long as the test lasts.
func write(t *testing.T, ctx context.Context, name, doc string) {
	t.Helper()
	if err := w.Write(name, doc); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Remove(name) })
	settle(t, ctx)
}

// settle waits until everything written is in force.
func settle(t *testing.T, ctx context.Context) {
	t.Helper()
	if err := w.Sync(ctx); err != nil {
		t.Fatal(err)
	}
}

// hops are the connections to the mesh port of a pod, by their source.
func hops(t *testing.T, ctx context.Context, p *rig.Pod) (from []netip.AddrPort) {
	t.Helper()
	out, err := p.Command(ctx, "ss", "-Htn", "state", "established", "( sport = :18008 )").CombinedOutput()
	if err != nil {
		t.Fatalf("ss: %v: %s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) < 4 {
			continue
		}
		a, err := netip.ParseAddrPort(f[3])
		if err != nil {
			t.Fatalf("ss said %q: %v", line, err)
		}
		from = append(from, netip.AddrPortFrom(a.Addr().Unmap(), a.Port()))
	}
	return from
}

// nft runs a script in the pod's namespace.
func nft(t *testing.T, ctx context.Context, p *rig.Pod, script string) string {
	t.Helper()
	cmd := p.Command(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script + "\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	return string(out)
}

// countSYN counts the connections that the pod tries to make to a port, from now on.
func countSYN(t *testing.T, ctx context.Context, p *rig.Pod, port int) func() int {
	t.Helper()
	nft(t, ctx, p, fmt.Sprintf("table inet test_count { chain out { type filter hook output priority 0; tcp dport %d tcp flags syn / syn,ack counter; }; }", port))
	packets := regexp.MustCompile(`counter packets (\d+)`)
	return func() int {
		m := packets.FindStringSubmatch(nft(t, ctx, p, "list table inet test_count"))
		if m == nil {
			t.Fatal("nft lists no counter")
		}
		n, _ := strconv.Atoi(m[1])
		return n
	}
}

var callerForm = regexp.MustCompile(`URI=(\S+)$`)

// TestHopIdentity: requests of two pods never share a session, whatever their order, and
// each arrives with its own caller.
func TestHopIdentity(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	one := addPod(t, ctx, mesh.Pod{Name: "caller-1", Account: "caller-a"})
	two := addPod(t, ctx, mesh.Pod{Name: "caller-2", Account: "caller-b"})
	same := addPod(t, ctx, mesh.Pod{Name: "caller-3", Account: "caller-a"})
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		var all []string // in any spelling that a CGI application cannot tell from it
		for k, v := range r.Header {
			if strings.EqualFold(strings.ReplaceAll(k, "_", "-"), "X-Forwarded-Client-Cert") {
				all = append(all, v...)
			}
		}
		io.WriteString(w, strings.Join(all, "|"))
	})
	var all sync.WaitGroup
	for pod, id := range map[*rig.Pod]string{one: "caller-a", two: "caller-b", same: "caller-a"} {
		for _, h2 := range []bool{false, true} {
			rt := transport(t, h2, pod, vip(appVIP, portH1))
			for range 5 {
				all.Go(func() {
					for range 10 {
						a, err := send(ctx, rt, "GET", "app", path, nil, "X-Forwarded-Client-Cert", "URI=spiffe://rig.test/ns/shop/sa/forged",
							"X_Forwarded_Client_Cert", "URI=spiffe://rig.test/ns/shop/sa/forged")
						if err != nil {
							t.Error(err)
							return
						}
						if m := callerForm.FindStringSubmatch(a.body); m == nil || m[1] != "spiffe://rig.test/ns/shop/sa/"+id || strings.Contains(a.body, "|") {
							t.Errorf("the application takes %s for %q", id, a.body)
							return
						}
					}
				})
			}
		}
	}
	all.Wait()
	n := map[netip.Addr]int{}
	for _, a := range hops(t, ctx, w.Pod("app")) {
		n[a.Addr()]++
	}
	t.Logf("sessions for 100 requests each, 10 at a time: %d, %d, %d", n[one.IP4], n[two.IP4], n[same.IP4])
	for _, p := range []*rig.Pod{one, two, same} {
		if n[p.IP4] < 1 || n[p.IP4] > 4 {
			t.Errorf("%d sessions from %s, want 1 to 4 from the pod's own address", n[p.IP4], p.Name)
		}
	}
}

// TestNoCertificate: a pod without a certificate gets a reason, and nothing is dialled for
// it; once its certificate is there it is served.
func TestNoCertificate(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	account := unique("nocert")
	pod := addPod(t, ctx, mesh.Pod{Name: account, NoSVID: true})
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "served") })
	dialled := countSYN(t, ctx, pod, 18008)
	rt := transport(t, false, pod, vip(appVIP, portH1))
	for range 3 {
		a := mustSend(t, ctx, rt, "GET", "app", path, nil)
		if a.StatusCode != 503 || !strings.Contains(a.body, "no-certificate") {
			t.Errorf("got %d %q, want 503 and the reason", a.StatusCode, a.body)
		}
	}
	expectRefused(t, ctx, pod, vip(appVIP, portEcho), "")
	if n := dialled(); n != 0 {
		t.Errorf("%d connections were tried without a certificate", n)
	}
	// As a destination it has nothing to show either.
	a := mustSend(t, ctx, transport(t, false, w.Pod("job"), proxyPort), "GET", account+".shop.aether.internal:8080", "/", nil)
	if a.StatusCode != 503 {
		t.Errorf("a destination without a certificate: %d %q, want 503", a.StatusCode, a.body)
	}
	if err := w.Issue(rig.SVIDRequest{Namespace: "shop", Account: account}); err != nil {
		t.Fatal(err)
	}
	settle(t, ctx)
	if a := mustSend(t, ctx, rt, "GET", "app", path, nil); a.body != "served" {
		t.Errorf("with a certificate: %d %q", a.StatusCode, a.body)
	}
	if dialled() == 0 {
		t.Error("the count of connections counts nothing")
	}
}

// TestBadEndpoints: what is wrong with an endpoint is told by a 503 and its reason, in time.
func TestBadEndpoints(t *testing.T) {
	ctx := within(t, time.Minute)
	hole, err := w.Rig.AddPod(ctx, 1, unique("hole"))
	if err != nil {
		t.Fatal(err)
	}
	nft(t, ctx, hole, "table inet hole { chain in { type filter hook input priority 0; policy drop; }; }")
	addRow(t, ctx, "imposter-1", "imposter", "8080,9000=tcp", w.Pod("app")) // another's address
	addRow(t, ctx, "dead-1", "dead", "8080,9000=tcp", w.out)                // nobody at 18008
	addRow(t, ctx, "hole-1", "hole", "8080,9000=tcp", hole)                 // nothing answers
	job := transport(t, false, w.Pod("job"), proxyPort)
	for _, tt := range []struct {
		name, host, reason string
		limit              time.Duration
		times              int
	}{
		{"another identity", "imposter.shop.aether.internal:8080", "wrong-peer", time.Second, 3},
		{"nobody at the mesh port", "dead.shop.aether.internal:8080", "connect", time.Second, 3},
		{"a black hole", "hole.shop.aether.internal:8080", "connect-timeout", 3 * time.Second, 1},
		{"application not listening", fmt.Sprintf("%s:%d", appName, portNobody), "does not listen", time.Second, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := strings.Count(proxyLog(t, 0), "hop not opened")
			start := time.Now()
			for i := range tt.times {
				a := mustSend(t, ctx, job, "GET", tt.host, "/", nil)
				if a.StatusCode != 503 || !strings.Contains(a.body, tt.reason) {
					t.Errorf("got %d %q, want 503 and %q", a.StatusCode, a.body, tt.reason)
				}
				if i == 0 && time.Since(start) > tt.limit {
					t.Errorf("took %v, must be below %v", time.Since(start), tt.limit)
				}
			}
			t.Logf("%d requests made %d log lines", tt.times, strings.Count(proxyLog(t, 0), "hop not opened")-before)
		})
	}
	// Never a byte to an imposter, raw TCP either.
	write(t, ctx, "service-imposter", rig.ServiceYAML(rig.ServiceManifest{Namespace: "shop", Name: "imposter", ClusterIPs: w.ClusterIPs(90), Ports: []uint16{8080, 9000}}))
	expectRefused(t, ctx, w.Pod("web"), vip(90, 9000), "secret")
	b, err := w.Admin(ctx, 0, "/why?n=20&bad=1")
	if err != nil || !strings.Contains(string(b), "wrong-peer") {
		t.Errorf("/why does not tell of the wrong peer: %v\n%s", err, b)
	}
}

func proxyLog(t *testing.T, node int) string {
	t.Helper()
	b, err := os.ReadFile(w.Proxy(node).Log)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestOneDeadEndpoint: with another endpoint that is well no request is lost, whatever its method.
func TestOneDeadEndpoint(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	addPod(t, ctx, mesh.Pod{Name: "half-1", Account: "half", Node: 1, Ports: "8080", Prepare: func(p *rig.Pod) error {
		return w.ServeHTTP(ctx, &p.Space, local(8080), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(w, r.Body)
		}))
	}})
	addRow(t, ctx, "half-2", "half", "8080", w.out)
	rt := transport(t, false, w.Pod("job"), proxyPort)
	for i := range 20 {
		a := mustSend(t, ctx, rt, "POST", "half.shop.aether.internal:8080", "/", strings.NewReader("body"))
		if a.StatusCode != 200 || a.body != "body" {
			t.Fatalf("request %d: %d %q", i+1, a.StatusCode, a.body)
		}
	}
}

// TestForeignPeers: nobody outside the mesh's trust domain gets past the handshake.
func TestForeignPeers(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	other, err := rig.NewCA("other.test")
	if err != nil {
		t.Fatal(err)
	}
	forger, err := rig.NewCA("rig.test") // the same name, another key
	if err != nil {
		t.Fatal(err)
	}
	for name, req := range map[string]func() (*rig.SVID, error){
		"another trust domain": func() (*rig.SVID, error) { return other.Issue(rig.SVIDRequest{Namespace: "shop", Account: "web"}) },
		"a forged authority":   func() (*rig.SVID, error) { return forger.Issue(rig.SVIDRequest{Namespace: "shop", Account: "web"}) },
		"no certificate":       func() (*rig.SVID, error) { return nil, nil },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := &tls.Config{ServerName: "8080", InsecureSkipVerify: true, NextProtos: []string{"h2"}}
			svid, err := req()
			if err != nil {
				t.Fatal(err)
			}
			if svid != nil {
				cert, err := svid.TLS()
				if err != nil {
					t.Fatal(err)
				}
				cfg.Certificates = []tls.Certificate{cert}
			}
			c := tls.Client(dial(t, ctx, w.out, netip.AddrPortFrom(w.Pod("app").IP4, 18008).String()), cfg)
			if err = c.HandshakeContext(ctx); err == nil {
				_, err = c.Read(make([]byte, 1)) // TLS 1.3: the refusal comes with the first read
			}
			if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("let in: %v", err)
			}
		})
	}
}

// TestSilentHop: a session whose packets are lost without a word, as when a firewall on the
// way has forgotten it, is found out, and another one takes its place.
func TestSilentHop(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience+10*time.Second)
	to := addPod(t, ctx, mesh.Pod{Name: "quiet", Account: "quiet", Node: 1, Ports: "8080", Prepare: func(p *rig.Pod) error {
		return w.ServeHTTP(ctx, &p.Space, local(8080), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "here") }))
	}})
	rt := transport(t, false, w.Pod("job"), proxyPort)
	ask := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		a, err := send(ctx, rt, "GET", "quiet.shop.aether.internal:8080", "/", nil)
		if err == nil && a.body != "here" {
			err = fmt.Errorf("%d %s", a.StatusCode, a.body)
		}
		return err
	}
	if err := ask(ctx); err != nil {
		t.Fatal(err)
	}
	session := hops(t, ctx, to)
	if len(session) != 1 {
		t.Fatalf("sessions: %v, want one", session)
	}
	nft(t, ctx, to, fmt.Sprintf("table inet test_hole { chain in { type filter hook input priority 0; tcp dport 18008 tcp sport %d drop; }; }", session[0].Port()))
	start := time.Now()
	if err := rig.Until(within(t, 15*time.Second), ask); err != nil {
		t.Fatalf("a dead session still takes every request: %v", err)
	}
	t.Logf("found out after %v", time.Since(start).Round(time.Millisecond))
}

// TestRotation: new certificates at both ends come into force while a connection and requests
// go on, and neither notices.
func TestRotation(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	from := addPod(t, ctx, mesh.Pod{Name: "turns-1", Account: "turns-a"})
	to := addPod(t, ctx, mesh.Pod{Name: "turns-2", Account: "turns-b", Node: 1, Ports: "8080,9000=tcp"})
	write(t, ctx, "service-turns", rig.ServiceYAML(rig.ServiceManifest{Namespace: "shop", Name: "turns-b", ClusterIPs: w.ClusterIPs(92), Ports: []uint16{8080, 9000}}))
	err := errors.Join(
		w.ServeTCP(ctx, &to.Space, local(9000), echo),
		w.ServeHTTP(ctx, &to.Space, local(8080), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, strings.Join(r.Header["X-Forwarded-Client-Cert"], "|"))
		})))
	if err != nil {
		t.Fatal(err)
	}
	until := func(node int, pod string) (at time.Time) {
		s, err := w.Status(ctx, node)
		if err != nil {
			t.Error(err)
			return
		}
		for _, p := range s.Pods {
			if p.Pod == "shop/"+pod {
				at = p.CertificateUntil
			}
		}
		return at
	}
	rt := transport(t, false, from, vip(92, 8080))
	ask := func() string {
		t.Helper()
		a := mustSend(t, ctx, rt, "POST", "turns-b", "/", strings.NewReader("x"))
		if a.StatusCode != 200 || !strings.Contains(a.body, "/sa/turns-a") {
			t.Fatalf("got %d %q", a.StatusCode, a.body)
		}
		return a.body
	}
	raw := dial(t, ctx, from, vip(92, 9000))
	say(t, raw, "before")
	expect(t, raw, "before")
	ask()
	for i, account := range []string{"turns-a", "turns-b", "turns-a"} {
		// An earlier end than before is as new as a later one, and tells them apart.
		end := time.Now().Add(time.Duration(5-i) * time.Hour).Truncate(time.Second)
		if err := w.Issue(rig.SVIDRequest{Namespace: "shop", Account: account, NotAfter: end}); err != nil {
			t.Fatal(err)
		}
		node, pod := 0, from.Name
		if account == "turns-b" {
			node, pod = 1, to.Name
		}
		err := rig.Until(ctx, func(context.Context) error {
			ask()
			if at := until(node, pod); !at.Equal(end) {
				return fmt.Errorf("the certificate of %s in force ends at %v, not yet at %v", pod, at, end)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		ask()
		say(t, raw, "still")
		expect(t, raw, "still")
	}
}

// TestOutlived: a raw connection and a WebSocket outlive several certificates of both ends, which are files that are
// replaced at half of their lives.
func TestOutlived(t *testing.T) {
	t.Parallel()
	const life, lives = 16 * time.Second, 3
	ctx := within(t, patience+(lives+2)*life)
	from := addPod(t, ctx, mesh.Pod{Name: "lasts-1", Account: "lasts-a"})
	to := addPod(t, ctx, mesh.Pod{Name: "lasts-2", Account: "lasts-b", Node: 1, Ports: "8080,9000=tcp"})
	write(t, ctx, "service-lasts", rig.ServiceYAML(rig.ServiceManifest{Namespace: "shop", Name: "lasts-b", ClusterIPs: w.ClusterIPs(121), Ports: []uint16{8080, 9000}}))
	err := errors.Join(
		w.ServeTCP(ctx, &to.Space, local(9000), echo),
		w.ServeHTTP(ctx, &to.Space, local(8080), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c, err := websocket.Accept(w, r, nil)
			if err != nil {
				return
			}
			defer c.CloseNow()
			for {
				kind, b, err := c.Read(r.Context())
				if err != nil || c.Write(r.Context(), kind, b) != nil {
					return
				}
			}
		})))
	if err != nil {
		t.Fatal(err)
	}
	renew := func(account string) (end time.Time) {
		t.Helper()
		end = time.Now().Add(life).Truncate(time.Second)
		if err := w.Issue(rig.SVIDRequest{Namespace: "shop", Account: account, NotAfter: end}); err != nil {
			t.Fatal(err)
		}
		return end
	}
	inForce := func(node int, pod string, end time.Time) {
		t.Helper()
		err := rig.Until(ctx, func(context.Context) error {
			s, err := w.Status(ctx, node)
			for _, p := range s.Pods {
				if p.Pod == "shop/"+pod && p.CertificateUntil.Equal(end) {
					return nil
				}
			}
			return cmp.Or(err, fmt.Errorf("%s has another certificate still", pod))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	a, b := renew("lasts-a"), renew("lasts-b")
	inForce(0, from.Name, a)
	inForce(1, to.Name, b)
	raw := dial(t, ctx, from, vip(121, 9000))
	ws, res, err := websocket.Dial(ctx, "ws://lasts-b.shop.aether.internal:8080/", &websocket.DialOptions{HTTPClient: &http.Client{Transport: mesh.HTTP1(from, vip(121, 8080))}})
	if err != nil {
		t.Fatalf("%v (%v)", err, res)
	}
	defer ws.CloseNow()
	talk := func() {
		t.Helper()
		say(t, raw, "still")
		expect(t, raw, "still")
		if err := ws.Write(ctx, websocket.MessageText, []byte("still")); err != nil {
			t.Fatal(err)
		}
		if _, b, err := ws.Read(ctx); err != nil || string(b) != "still" {
			t.Fatalf("%q %v", b, err)
		}
	}
	talk()
	begun := time.Now()
	for tick := time.NewTicker(life / 4); time.Since(begun) < lives*life; {
		for _, p := range []struct {
			account string
			node    int
			pod     string
		}{{"lasts-a", 0, from.Name}, {"lasts-b", 1, to.Name}} {
			<-tick.C
			inForce(p.node, p.pod, renew(p.account))
			talk()
		}
	}
}

// TestRevoked: when a pod trusts another authority, what it has open with those of the old one ends, at whichever side
// it is, though nobody has asked for anything.
func TestRevoked(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	for i, side := range []string{"source", "destination"} {
		t.Run(side, func(t *testing.T) {
			a, b := "leaves-a"+side[:1], "leaves-b"+side[:1]
			from := addPod(t, ctx, mesh.Pod{Name: a, Account: a})
			to := addPod(t, ctx, mesh.Pod{Name: b, Account: b, Node: 1, Ports: "9000=tcp"})
			write(t, ctx, "service-"+b, rig.ServiceYAML(rig.ServiceManifest{Namespace: "shop", Name: b, ClusterIPs: w.ClusterIPs(uint8(96 + i)), Ports: []uint16{9000}}))
			if err := w.ServeTCP(ctx, &to.Space, local(9000), echo); err != nil {
				t.Fatal(err)
			}
			raw := dial(t, ctx, from, vip(uint8(96+i), 9000))
			say(t, raw, "before")
			expect(t, raw, "before")
			next, err := rig.NewCA("rig.test")
			if err != nil {
				t.Fatal(err)
			}
			account := a
			if side == "destination" {
				account = b
			}
			if err := w.IssueBy(next, rig.SVIDRequest{Namespace: "shop", Account: account}); err != nil {
				t.Fatal(err)
			}
			if n, err := raw.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%d bytes, %v: want its end", n, err)
			}
		})
	}
}
