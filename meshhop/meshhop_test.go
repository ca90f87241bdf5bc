package meshhop

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/record"
	"aether/mtls/spiffeid"
)

// rig is a mesh of one CA and one destination pod on loopback.
type rig struct {
	ca        *devca.CA
	web, cart atomic.Pointer[mtls.SVID] // current certificates of the two pods
	l         *net.TCPListener
	local     *Local
	acc       Acceptor
	dialer    Dialer
	in        chan result
}

type result struct {
	in  *Inbound
	err error
}

// newRig accepts until the test ends; wait is the acceptor's time for a handshake.
func newRig(t *testing.T, m record.Maker, wait time.Duration) *rig {
	t.Helper()
	ca, err := devca.Open(t.TempDir(), "mesh.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{ca: ca, l: l, in: make(chan result, 16)}
	r.web.Store(r.issue(t, "web"))
	r.cart.Store(r.issue(t, "cart"))
	r.local = &Local{Pod: "cart-1", ID: r.cart.Load().ID, TLS: mtls.ServerConfig(mtls.Server{
		Pod: "cart-1", SVID: r.cart.Load, Serves: func(p uint16) bool { return p == 8080 || p == 5432 },
	})}
	r.acc = Acceptor{Maker: m, Handshake: wait, Limit: NewLimiter(LimiterConfig{})}
	r.dialer = Dialer{
		Maker: m,
		SVID: func(pod string) *mtls.SVID {
			if pod != "web-1" {
				return nil
			}
			return r.web.Load()
		},
		Sockets: func(ctx context.Context, pod string, addr netip.AddrPort) (*net.TCPConn, error) {
			c, err := new(net.Dialer).DialContext(ctx, "tcp", addr.String())
			if err != nil {
				return nil, err
			}
			return c.(*net.TCPConn), nil
		},
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			in, err := r.acc.Accept(t.Context(), r.local, c)
			r.in <- result{in, err}
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return r
}

func (r *rig) issue(t *testing.T, name string) *mtls.SVID {
	t.Helper()
	id, err := spiffeid.ForServiceAccount(r.ca.TrustDomain(), "t", name)
	if err != nil {
		t.Fatal(err)
	}
	s, err := r.ca.Issue(id, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (r *rig) key(p Proto) Key {
	return Key{Pod: "web-1", Source: r.web.Load().ID, Endpoint: netip.MustParseAddrPort(r.l.Addr().String()), SNI: "8080", Proto: p, Pin: r.cart.Load().ID}
}

// say sends s from one end to the other.
func say(t *testing.T, from, to record.Conn, a, b net.Conn, s string) {
	t.Helper()
	wire, err := from.Seal(nil, []byte(s))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Write(wire); err != nil {
		t.Fatal(err)
	}
	var got []byte
	buf := make([]byte, 1000)
	b.SetReadDeadline(time.Now().Add(5 * time.Second))
	for len(got) < len(s) {
		n, err := b.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		to.Feed(buf[:n])
		p := make([]byte, 1000)
		for {
			n, err := to.Read(p)
			got = append(got, p[:n]...)
			if err == record.ErrMore {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if string(got) != s {
		t.Errorf("got %q, want %q", got, s)
	}
}

func TestHop(t *testing.T) {
	for _, m := range []record.Maker{record.Std, record.Own} {
		for _, p := range []Proto{H2, Raw} {
			r := newRig(t, m, 0)
			s, err := r.dialer.Dial(t.Context(), r.key(p))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Conn.Close()
			got := <-r.in
			if got.err != nil {
				t.Fatal(got.err)
			}
			in := got.in
			defer in.Conn.Close()
			alpn := map[Proto]string{H2: "h2", Raw: ""}[p]
			if in.Port != 8080 || in.SNI != "8080" || in.ALPN != alpn || s.ALPN != alpn || in.Caller != s.Key.Source {
				t.Errorf("%s: %+v", p, in)
			}
			if want := "By=spiffe://mesh.test/ns/t/sa/cart;Hash="; !strings.HasPrefix(in.XFCC, want) || !strings.HasSuffix(in.XFCC, ";URI=spiffe://mesh.test/ns/t/sa/web") {
				t.Errorf("XFCC %s", in.XFCC)
			}
			if d := time.Until(s.NotAfter); d < 50*time.Minute || d > time.Hour || time.Until(in.NotAfter) > time.Hour {
				t.Errorf("valid for %s", d)
			}
			a, b := s.Record(), in.Record()
			say(t, a, b, s.Conn, in.Conn, "there")
			say(t, b, a, in.Conn, s.Conn, "and back")
		}
	}
}

// A rotation shows at the next dial; sessions that stand are not touched.
func TestRotation(t *testing.T) {
	r := newRig(t, record.Std, 0)
	old, err := r.dialer.Dial(t.Context(), r.key(H2))
	if err != nil {
		t.Fatal(err)
	}
	defer old.Conn.Close()
	oldIn := (<-r.in).in
	defer oldIn.Conn.Close()
	a, b := old.Record(), oldIn.Record()
	say(t, a, b, old.Conn, oldIn.Conn, "before")
	r.web.Store(r.issue(t, "web"))
	r.cart.Store(r.issue(t, "cart"))
	fresh, err := r.dialer.Dial(t.Context(), r.key(H2))
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.Conn.Close()
	freshIn := (<-r.in).in
	defer freshIn.Conn.Close()
	if freshIn.Peer.Equal(oldIn.Peer) || !freshIn.Peer.Equal(r.web.Load().Cert.Leaf) || !fresh.Peer.Equal(r.cart.Load().Cert.Leaf) {
		t.Error("the new session uses an old certificate")
	}
	say(t, a, b, old.Conn, oldIn.Conn, "after")
}

func TestDialFails(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	r := newRig(t, record.Std, 0)
	dials := 0
	inner := r.dialer.Sockets
	r.dialer.Sockets = func(ctx context.Context, pod string, addr netip.AddrPort) (*net.TCPConn, error) {
		dials++
		if addr.Port() == 1 { // a dropped SYN
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return inner(ctx, pod, addr)
	}
	impatient := r.dialer
	impatient.Connect, impatient.Handshake = 20*time.Millisecond, 50*time.Millisecond
	for _, tt := range []struct {
		name   string
		mod    func(k *Key)
		want   Reason
		dialed bool
	}{
		{"no certificate", func(k *Key) { k.Pod = "stranger" }, ReasonNoCertificate, false},
		{"another's certificate", func(k *Key) { k.Source = k.Pin }, ReasonWrongPeer, false},
		{"no protocol", func(k *Key) { k.Proto = 0 }, ReasonTLS, false},
		{"wrong pin", func(k *Key) { k.Pin = k.Source }, ReasonWrongPeer, true},
		{"no pin", func(k *Key) { k.Pin = spiffeid.ID{} }, ReasonWrongPeer, true},
		{"unserved port", func(k *Key) { k.SNI = "9999" }, ReasonUnknownSNI, true},
		{"silent", func(k *Key) { k.Endpoint = netip.MustParseAddrPort(silent.Addr().String()) }, ReasonHandshakeWait, true},
		{"refused", func(k *Key) { k.Endpoint = netip.MustParseAddrPort(closed.Addr().String()) }, ReasonConnect, true},
		{"dropped", func(k *Key) { k.Endpoint = netip.MustParseAddrPort("127.0.0.1:1") }, ReasonConnectWait, true},
	} {
		k := r.key(H2)
		tt.mod(&k)
		dials = 0
		d := &r.dialer
		if tt.want == ReasonHandshakeWait || tt.want == ReasonConnectWait {
			d = &impatient
		}
		s, err := d.Dial(t.Context(), k)
		if s != nil || ReasonOf(err) != tt.want || (dials > 0) != tt.dialed {
			t.Errorf("%s: %v (%s), %d dials; want %s", tt.name, err, ReasonOf(err), dials, tt.want)
		}
		if tt.name == "dropped" && !strings.Contains(err.Error(), "NetworkPolicy") {
			t.Errorf("%v does not name the likely cause", err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.dialer.Dial(ctx, r.key(H2)); ReasonOf(err) != ReasonCancelled {
		t.Errorf("cancelled: %v", err)
	}
}

// A refused caller learns why although it has sent data already.
func TestRefusalReachesCaller(t *testing.T) {
	r := newRig(t, record.Std, 0)
	other, err := devca.Open(t.TempDir(), "mesh.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	fake, err := other.Issue(r.web.Load().ID, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	fake.Roots = r.ca.Roots()
	r.web.Store(fake)
	s, err := r.dialer.Dial(t.Context(), r.key(H2))
	if err == nil { // the usual case: judged after our handshake is over
		defer s.Conn.Close()
		rec := s.Record()
		wire, _ := rec.Seal(nil, make([]byte, 30000))
		s.Conn.Write(wire)
		var b []byte
		if b, err = io.ReadAll(s.Conn); err != nil {
			t.Fatal(err)
		}
		rec.Feed(b)
		_, err = rec.Read(make([]byte, 100))
	}
	if ReasonOf(err) != ReasonRemote {
		t.Errorf("the caller sees %v (%s)", err, ReasonOf(err))
	}
	if got := <-r.in; ReasonOf(got.err) != ReasonUntrusted {
		t.Errorf("accept: %v", got.err)
	}
}

func TestAcceptFails(t *testing.T) {
	r := newRig(t, record.Std, 0)
	impatient := newRig(t, record.Std, 50*time.Millisecond)
	for _, tt := range []struct {
		name string
		do   func(c net.Conn)
		want Reason
	}{
		{"silent", func(net.Conn) {}, ReasonHandshakeWait},
		{"not TLS", func(c net.Conn) { c.Write([]byte("GET / HTTP/1.1\r\n\r\n")) }, ReasonTLS},
		{"gone", func(c net.Conn) { c.Close() }, ReasonClosed},
		{"no client certificate", func(c net.Conn) {
			tls.Client(c, &tls.Config{InsecureSkipVerify: true, ServerName: "8080"}).Handshake()
		}, ReasonTLS},
	} {
		r := r
		if tt.want == ReasonHandshakeWait {
			r = impatient
		}
		c, err := net.Dial("tcp", r.l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		tt.do(c)
		if got := <-r.in; ReasonOf(got.err) != tt.want {
			t.Errorf("%s: %v (%s), want %s", tt.name, got.err, ReasonOf(got.err), tt.want)
		}
		c.Close()
	}
	r.cart.Store(nil)
	if _, err := r.dialer.Dial(t.Context(), Key{Pod: "web-1", Source: r.web.Load().ID, Endpoint: netip.MustParseAddrPort(r.l.Addr().String()), SNI: "8080", Proto: Raw}); ReasonOf(err) != ReasonRemote {
		t.Errorf("a destination without certificate: %v (%s)", err, ReasonOf(err))
	}
	if got := <-r.in; ReasonOf(got.err) != ReasonNoCertificate {
		t.Error(got.err)
	}
}

// line is handshakes that take turns of a Limiter, in a synctest bubble. A handshake is
// "<pod>/<last number of the peer's address>".
type line struct {
	t     *testing.T
	l     *Limiter
	mu    sync.Mutex
	turns map[string][]*Turn
	came  []string // since the last call of news: who has got a turn, or "full <who>"
}

// enter has n handshakes come, one after the other, and tells what came of all there are.
func (r *line) enter(ctx context.Context, n int, who string) {
	pod, peer, _ := strings.Cut(who, "/")
	for range n {
		go func() {
			turn, err := r.l.Enter(ctx, pod, netip.MustParseAddr("10.0.0."+peer))
			r.mu.Lock()
			defer r.mu.Unlock()
			switch {
			case err == nil:
				r.turns[who] = append(r.turns[who], turn)
				r.came = append(r.came, who)
			case isBusy(err, true):
				r.came = append(r.came, "full "+who)
			case !isBusy(err, false):
				r.t.Error(err)
			}
		}()
		synctest.Wait()
	}
}

// leave ends one handshake.
func (r *line) leave(who string) {
	r.mu.Lock()
	turn := r.turns[who][0]
	r.turns[who] = r.turns[who][1:]
	r.mu.Unlock()
	turn.Leave()
	synctest.Wait()
}

func (r *line) news(want ...string) {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Equal(r.came, want) {
		r.t.Errorf("%q, want %q", r.came, want)
	}
	r.came = nil
}

// TestTurnsAreFair: who comes next is of the pod with the fewest turns, and there of the peer with the fewest; a few turns are each
// pod's own; a full queue gives up who came last of whoever has most in it.
func TestTurnsAreFair(t *testing.T) {
	for name, tt := range map[string]struct {
		cfg LimiterConfig
		run func(t *testing.T, r *line)
	}{
		"the pod with the fewest": {LimiterConfig{Node: 20, Pod: 20}, func(t *testing.T, r *line) {
			r.enter(t.Context(), 12, "greedy/1")
			r.enter(t.Context(), 8, "modest/1")
			r.came = nil
			r.enter(t.Context(), 1, "greedy/1")
			r.enter(t.Context(), 1, "modest/1")
			r.news()
			r.leave("greedy/1")
			r.news("modest/1")
			r.leave("greedy/1")
			r.news("greedy/1")
		}},
		"of it the peer with the fewest": {LimiterConfig{Node: 20, Pod: 3}, func(t *testing.T, r *line) {
			r.enter(t.Context(), 3, "pod/1")
			r.enter(t.Context(), 2, "pod/1")
			r.enter(t.Context(), 1, "pod/2")
			r.news("pod/1", "pod/1", "pod/1")
			r.leave("pod/1")
			r.news("pod/2")
			r.leave("pod/2")
			r.news("pod/1")
		}},
		"some are each pod's own": {LimiterConfig{Node: 1, Pod: 20}, func(t *testing.T, r *line) {
			r.enter(t.Context(), 20, "greedy/1")
			if r.came = nil; len(r.turns["greedy/1"]) != podOwn {
				t.Errorf("%d turns, want its own", len(r.turns["greedy/1"]))
			}
			r.enter(t.Context(), podOwn+1, "innocent/1")
			r.came = nil
			if n := len(r.turns["innocent/1"]); n != podOwn {
				t.Errorf("%d turns, want its own", n)
			}
		}},
		"a pod's part of the queue": {LimiterConfig{Node: 20, Pod: 1, Queue: 4 * podQueue}, func(t *testing.T, r *line) {
			r.enter(t.Context(), 1+4+1, "pod/1")
			r.news("pod/1", "full pod/1")
			r.enter(t.Context(), 1, "pod/2")
			r.news("full pod/1")
			r.enter(t.Context(), 1, "other/1")
			r.news("other/1")
			r.leave("pod/1")
			r.news("pod/1")
		}},
		"the whole queue": {LimiterConfig{Node: 20, Pod: 1, Queue: 4 * podQueue}, func(t *testing.T, r *line) {
			for _, pod := range []string{"a", "b", "c", "d"} {
				r.enter(t.Context(), 1+4, pod+"/1")
			}
			r.enter(t.Context(), 1, "e/1")
			r.came = nil
			r.enter(t.Context(), 1, "e/1")
			if len(r.came) != 1 || r.came[0] == "full e/1" || !strings.HasPrefix(r.came[0], "full ") {
				t.Errorf("%q, want one of the others to be given up", r.came)
			}
			r.came = nil
		}},
		"who gives up": {LimiterConfig{Node: 20, Pod: 1}, func(t *testing.T, r *line) {
			gone, cancel := context.WithCancel(t.Context())
			r.enter(gone, 2, "pod/1")
			r.news("pod/1")
			cancel()
			synctest.Wait()
			r.news()
			r.leave("pod/1")
			r.enter(t.Context(), 1, "pod/1")
			r.news("pod/1")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &line{t: t, l: NewLimiter(tt.cfg), turns: map[string][]*Turn{}}
				tt.run(t, r)
				for len(r.turns) > 0 { // and nothing is left over
					for who := range r.turns {
						if len(r.turns[who]) == 0 {
							delete(r.turns, who)
							continue
						}
						r.leave(who)
					}
				}
				if len(r.l.pods)+r.l.open+r.l.waiting != 0 {
					t.Errorf("left over: %d pods, %d in, %d waiting", len(r.l.pods), r.l.open, r.l.waiting)
				}
			})
		})
	}
	var none *Limiter
	if turn, err := none.Enter(t.Context(), "x", netip.Addr{}); err != nil {
		t.Error(err)
	} else {
		turn.Leave()
	}
}

// TestSilentServers: what four pods dial that takes TCP and does not shake hands, four hundred times each, keeps
// a fifth pod from nothing.
func TestSilentServers(t *testing.T) {
	r := newRig(t, record.Std, 0)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer silent.Close()
	wg.Go(func() {
		for {
			c, err := silent.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_, _ = io.Copy(io.Discard, c)
			})
		}
	})
	r.dialer.Limit = NewLimiter(LimiterConfig{})
	r.dialer.SVID = func(string) *mtls.SVID { return r.web.Load() }
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var left atomic.Int32
	left.Store(4 * 400)
	for i := range 4 {
		for range 400 {
			wg.Go(func() {
				k := r.key(Raw)
				k.Pod, k.Endpoint = fmt.Sprint("greedy-", i), netip.MustParseAddrPort(silent.Addr().String())
				if s, err := r.dialer.Dial(ctx, k); err == nil {
					t.Error("it shook hands")
					s.Conn.Close()
				}
				left.Add(-1)
			})
		}
	}
	for full := false; !full && left.Load() > 0; { // until they have what they can get
		r.dialer.Limit.mu.Lock()
		full = r.dialer.Limit.open >= 256 && r.dialer.Limit.waiting > 0
		r.dialer.Limit.mu.Unlock()
		runtime.Gosched()
	}
	for range 20 {
		s, err := r.dialer.Dial(t.Context(), r.key(H2))
		if err != nil {
			t.Fatal(err)
		}
		s.Conn.Close()
		if in := <-r.in; in.err == nil {
			in.in.Conn.Close()
		}
	}
}

func isBusy(err error, full bool) bool {
	b, ok := errors.AsType[*Busy](err)
	return ok && b.Full == full && ReasonOf(err) == ReasonBusy
}
