package outbound

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/controlplane/compile"
	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/dataplane/snapshot"
	"aether/tproxy/socket"
)

// TestOverloadedSource: with 95 % of its memory in use the source refuses what it would send on, with a
// reason, and answers what it answers by itself: refusals, and whether it is ready.
func TestOverloadedSource(t *testing.T) {
	e, err := engine.New(engine.Config{MaxLoops: 1, Memory: 100, Used: func() uint64 { return 96 }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	var wg sync.WaitGroup
	defer func() { cancel(); wg.Wait() }()
	wg.Go(func() { e.Run(ctx) })
	l := e.Loops()[0]
	onLoop := func(f func()) {
		done := make(chan struct{})
		if err := l.Post(func() { defer close(done); f() }); err != nil {
			t.Fatal(err)
		}
		<-done
	}
	pod := e.AddPod("web")
	for shed := false; !shed; {
		if ctx.Err() != nil {
			t.Fatal("the level never comes into force")
		}
		onLoop(func() { shed = pod.Sheds(l) })
	}
	m := modeltest.Mesh(t, `
service shop/cart 10.96.0.1
pods shop/cart 8080
local shop/web
`)
	s, _ := compile.Compile(m)
	var store snapshot.Store
	store.Swap(s)
	o := New(Config{Store: &store})
	for _, tt := range []struct {
		flow, request string
		status        int
		fields        string
	}{
		{"shop/web > 10.96.0.1:8080 http1", "GET cart/", 503, ""},
		{"shop/web > 10.96.0.1:8080 http1", "POST cart/ h:content-type=application/grpc", 503, "grpc-status=14 grpc-message=overload"},
		{"shop/web > proxy http1", "GET x/aether/readyz", 200, ""},
		{"shop/web > proxy http1", "GET nobody.shop.aether.internal:8080/", 404, ""},
	} {
		f, err := model.ParseFlow(tt.flow)
		if err != nil {
			t.Fatal(err)
		}
		r, err := model.ParseRequest(tt.request)
		if err != nil {
			t.Fatal(err)
		}
		onLoop(func() {
			st := o.loops.Make(l)
			st.rnd = rand.New(rand.NewPCG(1, 2))
			pool := exchange.Pool{Service: unrecorded{o}}
			c := &conn{o: o, pod: &Pod{Engine: pod}, st: st, flow: f}
			c.info = engine.ConnInfo{User: c, Loop: l}
			down := &answerOf{}
			x := pool.Begin(down, &r, true, &c.info, 0)
			x.Begin()
			rq := x.User.(*reqState)
			if got := strings.Join(down.fields, " "); x.Status != tt.status || !strings.Contains(got, tt.fields) {
				t.Errorf("%s: %d %s, want %d %s", tt.request, x.Status, got, tt.status, tt.fields)
			}
			if want := map[bool]string{true: causeOverload}[tt.status == 503]; rq.cause != want {
				t.Errorf("%s: cause %q, want %q", tt.request, rq.cause, want)
			}
		})
	}
}

// TestSlowBeginning (case 46): a client of a port that must be HTTP which begins, and trickles, is
// closed after 15 s; one that is silent has five minutes.
func TestSlowBeginning(t *testing.T) {
	for _, tt := range []struct {
		name  string
		say   string
		limit time.Duration
	}{{"silent", "", 5 * time.Minute}, {"slow", "PO", 15 * time.Second}} {
		t.Run(tt.name, func(t *testing.T) {
			var now atomic.Int64
			now.Store(int64(time.Hour))
			e, err := engine.New(engine.Config{MaxLoops: 1, Now: now.Load})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			defer func() { cancel(); wg.Wait() }()
			wg.Go(func() { e.Run(ctx) })
			l, pod := e.Loops()[0], e.AddPod("web")
			onLoop := func(f func()) {
				done := make(chan struct{})
				if err := l.Post(func() { defer close(done); f() }); err != nil {
					t.Fatal(err)
				}
				<-done
			}
			s, _ := compile.Compile(modeltest.Mesh(t, "service shop/cart 10.96.0.1\npods shop/cart 8080\nlocal shop/web\n"))
			var store snapshot.Store
			store.Swap(s)
			o := New(Config{Store: &store, Journal: journal.NewRing(4)})
			fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fds[1])
			onLoop(func() {
				o.accept(l, fds[0], &Pod{Engine: pod, Namespace: "shop", Account: "web"}, model.Captured, netip.MustParseAddrPort("10.96.0.1:8080"))
			})
			unix.Write(fds[1], []byte(tt.say))
			closed := func() bool {
				n, err := unix.Read(fds[1], make([]byte, 100))
				return n == 0 && err == nil || err == unix.ECONNRESET
			}
			pass := func(d time.Duration) {
				now.Add(int64(d))
				onLoop(func() {})
				onLoop(func() {})
			}
			pass(0)
			pass(tt.limit - time.Second)
			if closed() {
				t.Fatal("too early")
			}
			if tt.say != "" { // a further byte does not help
				unix.Write(fds[1], []byte("S"))
				pass(0)
			}
			pass(1200 * time.Millisecond)
			for i := 0; !closed(); i++ {
				if i > 1000 {
					t.Fatal("still open")
				}
				onLoop(func() {})
			}
			onLoop(func() {
				if n := pod.Files(); n != 0 {
					t.Errorf("%d descriptors are accounted", n)
				}
			})
		})
	}
}

// TestSessionsOfAnEndpoint: whatever ports a pod speaks to an endpoint on, its hops there share one bound on sessions;
// another endpoint has another.
func TestSessionsOfAnEndpoint(t *testing.T) {
	k := newCaller(t, 2, nil)
	hop := func(port uint16, e int) {
		_, rq, _ := k.request(t)
		rq.v.Backend = &snapshot.Backend{Name: k.b.Name, Port: port, SNI: fmt.Sprint(port)}
		if _, err := k.st.makeHop(k.c.pod, rq, k.set.At(e), ""); err != nil {
			t.Fatal(err)
		}
	}
	for i := range uint16(20) {
		hop(8080+i, 0)
	}
	hop(8080, 1)
	groups := k.st.of(k.c.pod).groups
	if len(groups) != 2 || len(k.st.hops) != 21 {
		t.Errorf("%d bounds of %d hops", len(groups), len(k.st.hops))
	}
	for e, g := range groups {
		if g.Max != 16 {
			t.Errorf("%v may have %d sessions", e, g.Max)
		}
	}
}

// TestFreeIsBounded: no request keeps what a long target needed.
func TestFreeIsBounded(t *testing.T) {
	k := newCaller(t, 1, nil)
	for n, want := range map[int]bool{16 << 10: true, 16<<10 + 1: false} {
		x, rq, _ := k.request(t)
		rq.scratch = make([]byte, 0, n)
		k.o.Request(x)
		if got := cap(rq.scratch) == n; got != want {
			t.Errorf("of %d bytes %d are kept", n, cap(rq.scratch))
		}
	}
}

// TestMirrorsAreBounded: of a body that a mirror does not take so much is kept, and of its answer so much read; what is more
// ends the mirror, and nothing else.
func TestMirrorsAreBounded(t *testing.T) {
	k := newCaller(t, 1, nil)
	begin := func() *mirror {
		x, rq, _ := k.request(t)
		m := &mirror{st: k.st, of: k.st.of(k.c.pod), how: mirrorResults}
		m.count(1)
		m.x = k.st.mirrored.Begin(m, &x.Req, false, &k.c.info, 0)
		m.x.User = &reqState{snap: rq.snap, v: rq.v, copyOf: m}
		return m
	}
	m := begin() // which nobody takes anything of
	m.TapData(make([]byte, 64<<10), false)
	if m.ended {
		t.Error("given up with 64 KiB waiting")
	}
	if m.TapData(make([]byte, 1), false); !m.ended || m.how != mirrorSlow || k.o.Mirrored[mirrorSlow].Value() != 1 || k.st.mirrors != 0 {
		t.Errorf("with a byte more: ended %v, how %d", m.ended, m.how)
	}
	m = begin()
	if n := m.WriteData(make([]byte, 1<<20), false); n != 1<<20 || m.full {
		t.Errorf("%d bytes of 1 MiB are read, cut %v", n, m.full)
	}
	if n := m.WriteData(make([]byte, 1), false); n != 1 || !m.full {
		t.Error("an answer without end is read on")
	}
}

// still is a hop on which nothing moves.
type still struct{}

func (still) Send(*exchange.Exchange)                       {}
func (still) Open() int                                     { return 1 }
func (still) Leave(error)                                   {}
func (still) Close(error)                                   {}
func (still) Sessions(time.Time, func(engine.SessionState)) {}

// TestAPodHasItsShareOfMirrors: a pod whose mirrors are never answered leaves another's room, and has its own again once they end.
func TestAPodHasItsShareOfMirrors(t *testing.T) {
	k := newCaller(t, 1, nil)
	other := *k.c
	other.pod = &Pod{Context: t.Context(), Container: "job", Engine: k.c.pod.Engine}
	other.info.User = &other
	e := k.set.At(0)
	for _, p := range []*Pod{k.c.pod, other.pod} {
		k.st.hops[hopKey{p, e.Addr, k.b.Port, e.SPIFFEID, ""}] = &hopState{hop: still{}, pin: e.SPIFFEID}
	}
	var all []*mirror
	mirrored := func(c *conn) bool {
		x, rq, _ := k.request(t)
		x.Conn = &c.info
		rq.v.Pipe = &snapshot.FilterChain{Mirrors: []snapshot.MirrorTo{{Backend: k.b, Numerator: 1, Denominator: 1}}}
		k.o.mirror(x, c, rq)
		if rq.mirrors != nil {
			all = append(all, rq.mirrors)
		}
		return rq.mirrors != nil
	}
	for range 2 * maxMirrors {
		mirrored(k.c)
	}
	if greedy := k.st.of(k.c.pod).mirrors; greedy != maxMirrors/2 || k.st.mirrors != greedy || k.o.Mirrored[mirrorOverflow].Value() != uint64(2*maxMirrors-greedy) {
		t.Fatalf("a pod has %d of %d mirrors, %d in all", greedy, maxMirrors, k.st.mirrors)
	}
	n := 0
	for mirrored(&other) {
		n++
	}
	if n != maxMirrors/8 {
		t.Errorf("%d of another pod's requests are mirrored beside it, want %d", n, maxMirrors/8)
	}
	for _, m := range all {
		m.giveUp(mirrorSlow)
	}
	if k.st.mirrors != 0 || k.st.of(k.c.pod).mirrors != 0 || k.st.of(other.pod).mirrors != 0 || !mirrored(k.c) {
		t.Errorf("%d mirrors are under way, %d of the pod, and all have ended", k.st.mirrors, k.st.of(k.c.pod).mirrors)
	}
}

// ticking is a loop that runs, by a clock that the test moves.
type ticking struct {
	t   *testing.T
	e   *engine.Engine
	now atomic.Int64
}

func newTicking(t *testing.T) *ticking {
	k := &ticking{t: t}
	k.now.Store(int64(time.Hour))
	var err error
	if k.e, err = engine.New(engine.Config{MaxLoops: 1, Now: k.now.Load}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { k.e.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return k
}

func (k *ticking) onLoop(f func()) {
	done := make(chan struct{})
	if err := k.e.Loops()[0].Post(func() { defer close(done); f() }); err != nil {
		k.t.Fatal(err)
	}
	<-done
}

// at reports whether over becomes true when d has passed, and not before.
func (k *ticking) at(what string, d time.Duration, over func() bool) {
	k.t.Helper()
	for _, step := range []struct {
		d    time.Duration
		want bool
	}{{d - 50*time.Millisecond, false}, {100 * time.Millisecond, true}} {
		k.now.Add(int64(step.d))
		k.onLoop(func() {})
		k.onLoop(func() {}) // by now its timers have run
		k.onLoop(func() {
			if over() != step.want {
				k.t.Errorf("%s: %v in %v, want it at %v", what, !step.want, step.d, d)
			}
		})
	}
}

// hung is a namespace in which nothing comes of a socket or a connect.
type hung struct{ until chan time.Time }

func (hung) Get(bool) (int, bool)           { return -1, false }
func (hung) Request(bool, func(int, error)) {}
func (h hung) Connect(ctx context.Context, _ netip.AddrPort) (*net.TCPConn, error) {
	until, _ := ctx.Deadline()
	h.until <- until
	return nil, context.DeadlineExceeded
}

// TestPassthroughConnectIsBounded: the connect of a connection that is passed through has two seconds (contract 4.7), whether
// the client waits for it or has spoken; then the client is reset.
func TestPassthroughConnectIsBounded(t *testing.T) {
	k := newTicking(t)
	c := newCallerOn(t, 1, k.e).c
	sockets := hung{make(chan time.Time, 1)}
	c.pod.Sockets = sockets
	c.o.cfg.Journal = deaf{}
	c.flow.Dst.AddrPort = netip.MustParseAddrPort("192.0.2.1:80")
	c.flow.Dir = model.Captured
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[1])
	k.onLoop(func() {
		v := decide.Verdict{Action: decide.Sniff, Reason: decide.ForeignAddress, Sniff: decide.Listening{Wait: time.Second, Race: true}}
		c.sniff(c.o.cfg.Store.Load(), v, pair[0])
	})
	k.at("the connect fails", 2*time.Second, func() bool {
		n, err := unix.Read(pair[1], make([]byte, 1))
		return n == 0 && err == nil || err == unix.ECONNRESET
	})

	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	client, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	captured, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	fd, err := socket.TakeFD(captured.(*net.TCPConn))
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	k.onLoop(func() { c.pass(fd, decide.Verdict{}, c.o.cfg.Store.Load(), -1, nil) })
	until := <-sockets.until
	if least, most := start.Add(2*time.Second), time.Now().Add(2*time.Second); until.Before(least) || until.After(most) {
		t.Errorf("the connect has %v", until.Sub(start))
	}
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the client sees %v", err)
	}
}

// TestMirrorsTimeIsBounded: a mirror that has the whole request and is not answered is given up.
func TestMirrorsTimeIsBounded(t *testing.T) {
	k := newTicking(t)
	c := newCallerOn(t, 1, k.e)
	var m *mirror
	k.onLoop(func() {
		x, rq, _ := c.request(t)
		m = &mirror{st: c.st, of: c.st.of(c.c.pod), how: mirrorResults}
		m.count(1)
		m.x = c.st.mirrored.Begin(m, &x.Req, false, &c.c.info, 0)
		m.x.User = &reqState{snap: rq.snap, v: rq.v, copyOf: m}
		m.TapData([]byte("x"), true)
	})
	k.at("it is given up", 15*time.Second, func() bool { return m.ended })
	if m.how != mirrorTimeout || c.o.Mirrored[mirrorTimeout].Value() != 1 {
		t.Errorf("ended as %d", m.how)
	}
}

// TestWhatIsRememberedIsLookedThrough: each minute, and forgotten if its pod has gone.
func TestWhatIsRememberedIsLookedThrough(t *testing.T) {
	k := newTicking(t)
	c := newCallerOn(t, 1, k.e)
	ctx, cancel := context.WithCancel(t.Context())
	c.c.pod.Context = ctx
	k.onLoop(func() { c.st.of(c.c.pod) })
	cancel()
	k.at("it is forgotten", time.Minute, func() bool { return len(c.st.pods) == 0 })
}
