package engine

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"
	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/reactor"
)

// gated is an application that answers each request when the test says so.
func gated(s *stage) (v func(pod *Pod) *svc, answer chan struct{}) {
	answer = make(chan struct{})
	over := make(chan struct{})
	app := s.app(heads(func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
		select {
		case <-answer:
		case <-over:
			return false
		}
		_, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		return err == nil
	}))
	s.t.Cleanup(func() { close(over) }) // before that of app, which waits for them
	return func(pod *Pod) *svc { return &svc{pod: pod, to: app} }, answer
}

// response reads one answer; closes is whether it says that it is the connection's last.
func response(t *testing.T, r *bufio.Reader) (body string, closes bool) {
	t.Helper()
	res, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b), res.Close
}

// TestDrainHTTP1: an answer under way, one to a request on an idle connection and one on a
// connection that came later say that they are the last; what was pipelined is answered first.
// Nothing is closed that waits for a request.
func TestDrainHTTP1(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	svc, answer := gated(s)
	v := svc(pod)
	addr := s.front(pod, v, false)
	const ask = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"
	open := func() (*net.TCPConn, *bufio.Reader) {
		c := dial(t, addr)
		return c, bufio.NewReader(c)
	}
	busy, busyR := open()
	fmt.Fprint(busy, ask)
	eventually(t, "it is under way", func() bool { return v.begun.Load() == 1 })
	idle, idleR := open()
	fmt.Fprint(idle, ask)
	answer <- struct{}{}
	answer <- struct{}{}
	for _, r := range []*bufio.Reader{busyR, idleR} {
		if _, closes := response(t, r); closes {
			t.Error("an answer before the drain says that it is the last")
		}
	}
	fmt.Fprint(busy, ask)
	eventually(t, "it is under way", func() bool { return v.begun.Load() == 3 })
	s.e.Drain(t.Context())
	late, lateR := open()
	fmt.Fprint(late, ask)
	piped, pipedR := open()
	fmt.Fprint(piped, ask+ask+ask)
	fmt.Fprint(idle, ask)
	eventually(t, "all four are served", func() bool { return s.e.Serving(t.Context()) == 4 })
	close(answer)
	for name, r := range map[string]*bufio.Reader{"under way": busyR, "idle": idleR, "late": lateR} {
		if body, closes := response(t, r); body != "ok" || !closes {
			t.Errorf("%s: %q, last %v", name, body, closes)
		}
		if _, err := r.ReadByte(); err != io.EOF {
			t.Errorf("%s: then %v, want an orderly end", name, err)
		}
	}
	for i := range 3 {
		if body, closes := response(t, pipedR); body != "ok" || closes != (i == 2) {
			t.Errorf("pipelined %d: %q, last %v", i, body, closes)
		}
	}
	eventually(t, "none is left", func() bool { return s.e.Serving(t.Context()) == 0 })
}

// TestDrainHTTP2: GOAWAY comes in two steps, between which requests are taken, those too that the
// client sends after it has answered the PING: it had begun them. What is under way is answered, what
// comes after the second is refused, and then the connection ends. One that comes while the process
// drains is told after a while, and served.
func TestDrainHTTP2(t *testing.T) {
	ck := newClock()
	s := newStage(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	svc, answer := gated(s)
	v := svc(pod)
	addr := s.front(pod, v, true)
	flush := func(p *peer2) {
		t.Helper()
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
	}
	const slack = 200 * time.Millisecond // the wheel's slots
	var last uint32
	ask := func(p *peer2) {
		t.Helper()
		last += 2
		n := v.begun.Load()
		p.get(last, "/")
		flush(p)
		eventually(t, "it is taken", func() bool { return v.begun.Load() == n+1 })
	}
	open := func() *peer2 {
		t.Helper()
		p := newPeer2(t, dial(t, addr), true)
		last = ^uint32(0) // the first is 1
		ask(p)
		return p
	}
	isPing := func(f oracle.Frame) bool { _, ok := f.(*oracle.PingFrame); return ok }
	drained := func(p *peer2, between func(pong func())) {
		t.Helper()
		if g := p.goaway(); g.LastStreamID != 1<<31-1 || g.ErrCode != oracle.ErrCodeNo {
			t.Errorf("%v, want a warning", g)
		}
		ping := p.next(isPing).(*oracle.PingFrame)
		ask(p) // it was on its way
		between(func() { p.WritePing(true, ping.Data) })
		if g := p.goaway(); g.LastStreamID != last || g.ErrCode != oracle.ErrCodeNo {
			t.Errorf("%v, want stream %d as the last", g, last)
		}
		p.get(last+2, "/")
		flush(p)
		r := p.next(func(f oracle.Frame) bool { _, ok := f.(*oracle.RSTStreamFrame); return ok }).(*oracle.RSTStreamFrame)
		if r.StreamID != last+2 || r.ErrCode != oracle.ErrCodeRefusedStream {
			t.Errorf("a request after the end: %v", r)
		}
		for range (last + 1) / 2 {
			select {
			case answer <- struct{}{}:
			case <-time.After(20 * time.Second):
				t.Fatal("the application is not asked")
			}
		}
		for range (last + 1) / 2 {
			f := p.next(func(f oracle.Frame) bool { _, ok := f.(*oracle.MetaHeadersFrame); return ok }).(*oracle.MetaHeadersFrame)
			if got := f.PseudoValue("status"); got != "200" {
				t.Errorf("stream %d is answered %s", f.StreamID, got)
			}
		}
		for {
			if _, err := p.ReadFrame(); err != nil {
				if err != io.EOF {
					t.Errorf("then %v, want an orderly end", err)
				}
				return
			}
		}
	}
	p := open()
	s.e.Drain(t.Context())
	drained(p, func(pong func()) {
		pong()
		ask(p)
		ck.move(t, s.e, time.Duration(settleTime)-1)
		ask(p)
		ck.move(t, s.e, slack)
	})
	p = open()
	ck.move(t, s.e, time.Duration(warnAfter)+slack)
	drained(p, func(pong func()) { // nothing is named before the client knows, and what it began before that has arrived
		ck.move(t, s.e, time.Duration(settleTime)+slack)
		ask(p)
		pong()
		ask(p)
		ck.move(t, s.e, time.Duration(settleTime)-1)
		ask(p)
		ck.move(t, s.e, slack)
	})
	eventually(t, "none is left", func() bool { return s.e.Serving(t.Context()) == 0 })
}

// TestDrainHop (case 139, on the hop): a destination that drains sends its peers away, and a source loses no request,
// however many sessions it takes: each is sent away as soon as it is there.
func TestDrainHop(t *testing.T) {
	var served atomic.Int64
	// An application of its own, so that no request can be answered by a retry that nobody saw.
	app := serveHTTP(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err == nil {
			served.Add(1)
			w.Write(b)
		}
	}))
	m := newMesh(t, Config{}, app)
	post := func(i int) {
		t.Helper()
		c := dial(t, m.h1)
		defer c.Close()
		fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nConnection: close\r\n\r\n%04d", i)
		if got := rest(t, c); !strings.HasPrefix(got, "HTTP/1.1 200") || !strings.HasSuffix(got, fmt.Sprintf("%04d", i)) {
			t.Fatalf("request %d: %q", i, got)
		}
	}
	post(0)
	m.e.Drain(t.Context())
	const n = 50
	for i := range n {
		post(i + 1)
	}
	if got := served.Load(); got != n+1 {
		t.Errorf("the application was asked %d times for %d requests", got, n+1)
	}
	if m.hops.Load() < 2 {
		t.Errorf("%d sessions: none was sent away", m.hops.Load())
	}
}

// TestFarewell: at the deadline an idle connection ends in order, an HTTP/2 client that
// answers nothing learns which of its requests were taken, and one of whose requests is under
// way is cut by the end.
func TestFarewell(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	svc, _ := gated(s)
	v := svc(pod)
	idle, busy := dial(t, s.front(pod, v, false)), dial(t, s.front(pod, v, false))
	fmt.Fprint(busy, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	p := newPeer2(t, dial(t, s.front(pod, v, true)), true)
	p.get(1, "/")
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "both are under way", func() bool { return v.begun.Load() == 2 })
	eventually(t, "and the idle one is there", func() bool { return s.e.Serving(t.Context()) == 3 })
	s.e.Drain(t.Context())
	s.e.Farewell(t.Context())
	if b, err := io.ReadAll(idle); err != nil || len(b) > 0 {
		t.Errorf("idle: %q, %v, want an orderly end", b, err)
	}
	for _, last := range []uint32{1<<31 - 1, 1} {
		if g := p.goaway(); g.LastStreamID != last {
			t.Errorf("%v, want %d as the last", g, last)
		}
	}
	if n := s.e.Serving(t.Context()); n != 2 {
		t.Errorf("%d are served, want the two with a request", n)
	}
	s.cancel()
	s.wg.Wait()
	if b, err := io.ReadAll(busy); err == nil {
		t.Errorf("cut in the middle: %q and an orderly end", b)
	}
}

// TestStopListening: what waits to be accepted stays with the socket, and another engine that
// has it too accepts it; connections of the first go on, and it accepts no more.
func TestStopListening(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("old")
	var old, next atomic.Int64
	serve := func(n *atomic.Int64, pod *Pod, pool *exchange.Pool) Accept {
		return func(l *Loop, fd int) {
			n.Add(1)
			if l.ServeHTTP1(fd, nil, &ConnInfo{Pod: pod, Loop: l, Pool: pool}, nil) != nil {
				unix.Close(fd)
			}
		}
	}
	v := &svc{pod: pod, request: local}
	addr := s.listen(pod, serve(&old, pod, &exchange.Pool{Service: v}))
	kept := dial(t, addr)
	ask := func(c *net.TCPConn) {
		t.Helper()
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		if body, _ := response(t, bufio.NewReader(c)); body != "local\n" {
			t.Fatalf("%q", body)
		}
	}
	ask(kept)
	mine, err := unix.FcntlInt(uintptr(s.lns[addr]), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(mine) })
	_ = pod.StopListening(t.Context(), false)
	s.unlisten(addr)
	waits := dial(t, addr) // the kernel accepts it: the backlog is the socket's
	s.onLoop(func(*Loop) {})
	if old.Load() != 1 {
		t.Fatal("it accepts still")
	}
	ask(kept)
	if err := pod.Listen(mine, nil); err == nil {
		t.Error("it listens again")
	}

	s2 := newStage(t, Config{})
	pod2 := s2.e.AddPod("next")
	v2 := &svc{pod: pod2, request: local}
	if err := pod2.Listen(mine, serve(&next, pod2, &exchange.Pool{Service: v2})); err != nil {
		t.Fatal(err)
	}
	ask(waits)
	if old.Load() != 1 || next.Load() != 1 {
		t.Errorf("the old one accepted %d, the next %d, want 1 each", old.Load(), next.Load())
	}
	s2.e.RemovePod(pod2)
}

// TestStopListeningWhileMoved: a listener that is between two loops is not registered any more,
// nor is a descriptor that has its number by then touched.
func TestStopListeningWhileMoved(t *testing.T) {
	s := newStage(t, Config{MaxLoops: 2})
	s.e.mu.Lock()
	_, err := s.e.addLoop()
	s.e.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	for range 200 {
		pod := s.e.AddPod("p")
		addr := s.listen(pod, func(_ *Loop, fd int) { unix.Close(fd) })
		from := pod.Home()
		to := s.e.Loops()[1-from.ID()]
		moved := make(chan struct{})
		go func() {
			pod.moveTo(from, to)
			close(moved)
		}()
		runtime.Gosched()
		_ = pod.StopListening(t.Context(), false)
		fd := s.lns[addr]
		<-moved
		_ = everywhere(t.Context(), s.e.Loops(), func(*Loop) {})
		_ = everywhere(t.Context(), s.e.Loops(), func(*Loop) {})
		_ = everywhere(t.Context(), s.e.Loops(), func(l *Loop) {
			if err := l.Register(fd, &listener{l: l, pod: pod, fd: fd}, reactor.Accept); err != nil {
				t.Errorf("loop %d has it still: %v", l.ID(), err)
			}
			_ = l.Detach(fd)
		})
		s.unlisten(addr)
		s.e.RemovePod(pod)
	}
}

// TestServingCountsGoroutines: a relay, or a handshake, holds a drain up.
func TestServingCountsGoroutines(t *testing.T) {
	s := newStage(t, Config{})
	gate := make(chan struct{})
	s.onLoop(func(l *Loop) { l.Go(func() { <-gate }) })
	if n := s.e.Serving(t.Context()); n == 0 {
		t.Error("a goroutine that serves is not counted")
	}
	close(gate)
	eventually(t, "it is over", func() bool { return s.e.Serving(t.Context()) == 0 })
}

// TestClientGoesAway (case 61): a client's GOAWAY ends none of its requests that are under way;
// their answers come, and then the connection ends.
func TestClientGoesAway(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	svc, answer := gated(s)
	v := svc(pod)
	p := newPeer2(t, dial(t, s.front(pod, v, true)), true)
	p.get(1, "/")
	p.get(3, "/")
	p.WriteGoAway(0, oracle.ErrCodeNo, nil)
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "both are under way", func() bool { return v.begun.Load() == 2 })
	close(answer)
	got := map[uint32]string{}
	for len(got) < 2 {
		f := p.next(func(f oracle.Frame) bool { _, ok := f.(*oracle.MetaHeadersFrame); return ok }).(*oracle.MetaHeadersFrame)
		got[f.StreamID] = f.PseudoValue("status")
	}
	if got[1] != "200" || got[3] != "200" {
		t.Errorf("answers %v", got)
	}
	p.c.CloseWrite()
	_ = p.c.SetReadDeadline(time.Now().Add(20 * time.Second))
	for {
		if _, err := p.ReadFrame(); err != nil {
			if err != io.EOF {
				t.Errorf("then %v, want an orderly end", err)
			}
			return
		}
	}
}

// TestTunnelWhileDraining: a destination that drains serves those that come: a tunnel, which
// has to wait for the peer's SETTINGS, too, and for a handful of handshakes at most.
func TestTunnelWhileDraining(t *testing.T) {
	m := newMesh(t, Config{}, netip.AddrPort{})
	m.in.to = m.appH1(nil, echoBye)
	m.e.Drain(t.Context())
	tun := openH1(t, m.h1, "foo")
	if tun.res.StatusCode != 101 {
		t.Fatalf("%s", tun.res.Status)
	}
	if err := tun.write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	tun.end()
	if b, err := io.ReadAll(tun); err != nil || string(b) != "hellobye" {
		t.Errorf("%q, %v", b, err)
	}
	if n := m.hops.Load(); n > 3 {
		t.Errorf("%d handshakes", n)
	}
}

// TestSentAway: a hop whose peer sends every session away before it has carried
// anything is dialled at ever greater distances, of a second at most.
func TestSentAway(t *testing.T) {
	ck := newClock()
	s := newStage(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	var conns atomic.Int64
	peer := s.app(func(c *net.TCPConn) {
		conns.Add(1)
		p := newPeer2(t, c, false)
		p.WriteGoAway(1<<31-1, oracle.ErrCodeNo, nil)
		if p.flush() != nil {
			return
		}
		_, _ = io.Copy(io.Discard, c)
	})
	var hop *Hop
	v := &svc{pod: pod, hop: plainHop(pod, peer.String(), &hop)}
	c := dial(t, s.front(pod, v, false))
	io.WriteString(c, upgradeHead("foo")) // waits for a session that says what it takes
	for i := range 12 {
		var d time.Duration
		eventually(t, "it has been sent away and waits", func() (waits bool) {
			s.onLoop(func(l *Loop) {
				waits = conns.Load() == int64(i+1) && hop != nil && hop.again.Armed()
				if waits {
					d = time.Duration(hop.pause - l.Now())
				}
			})
			return waits
		})
		if want := min(10*time.Millisecond<<i, time.Second); d < want/2 || d > want {
			t.Errorf("after %d sessions %v, want %v at most, and half of it at least", i+1, d, want)
		}
		ck.move(t, s.e, 2*time.Second)
	}
	c.Close()
}

// TestDrainOfAStuckLoop: no step of a drain waits for a loop for longer than it is told.
func TestDrainOfAStuckLoop(t *testing.T) {
	s := newStage(t, Config{})
	gate, stuck := make(chan struct{}), make(chan struct{})
	if err := s.e.Loops()[0].Post(func() { close(stuck); <-gate }); err != nil {
		t.Fatal(err)
	}
	<-stuck
	defer close(gate)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	done := make(chan int)
	go func() {
		s.e.Drain(ctx)
		n := s.e.Serving(ctx)
		s.e.Farewell(ctx)
		done <- n
	}()
	select {
	case n := <-done:
		if n != 1 {
			t.Errorf("%d are served, want the loop to count as one", n)
		}
	case <-time.After(20 * time.Second):
		t.Error("it waits for the loop")
	}
}

// TestLastAccept: what waits in a socket that nobody else has is served before the socket is closed.
func TestLastAccept(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, request: local}
	addr := s.front(pod, v, false)
	const waiting = 600 // more than is accepted at a time
	in, out := make(chan struct{}), make(chan struct{})
	if err := s.e.Loops()[0].Post(func() { close(in); <-out }); err != nil {
		t.Fatal(err)
	}
	<-in
	var clients []net.Conn
	for range waiting {
		c := dial(t, addr)
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
		clients = append(clients, c)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- pod.StopListening(t.Context(), true) }()
	eventually(t, "no listener is taken any more", func() bool {
		pod.mu.Lock()
		defer pod.mu.Unlock()
		return pod.closedToNew
	})
	close(out)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	s.unlisten(addr)
	for i, c := range clients {
		if b, err := io.ReadAll(c); err != nil || !bytes.HasPrefix(b, []byte("HTTP/1.1 421")) {
			t.Fatalf("client %d: %q, %v", i, b, err)
		}
	}
}

// TestLateHandshake: an HTTP/2 connection that is there only once the last streams were named has
// no request taken: it would be cut.
func TestLateHandshake(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, request: local}
	addr := s.front(pod, v, true)
	s.e.Drain(t.Context())
	s.e.Farewell(t.Context())
	p := newPeer2(t, dial(t, addr), true)
	p.head(1, true, ":method", "POST", ":scheme", "http", ":authority", "a", ":path", "/")
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	var last *oracle.GoAwayFrame
	for {
		f, err := p.ReadFrame()
		if err != nil {
			break
		}
		if f, ok := f.(*oracle.GoAwayFrame); ok {
			c := *f
			last = &c
		}
	}
	if last == nil || last.LastStreamID != 0 || v.begun.Load() != 0 {
		t.Errorf("GOAWAY %v, %d requests were taken", last, v.begun.Load())
	}
}
