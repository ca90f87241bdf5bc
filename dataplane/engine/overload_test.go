package engine

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/reactor"
)

// TestLevels: the record's order and thresholds (contract 17), and no flapping about them.
func TestLevels(t *testing.T) {
	var o overload
	for i, tt := range []struct {
		used  uint64
		level Level
		scale int
	}{
		{0, Calm, 100}, {79, Calm, 100}, {80, Shrink, 100}, {85, Shrink, 100}, {86, Shrink, 91}, {89, Shrink, 64},
		{90, NoKeepAlive, 55}, {94, NoKeepAlive, 19}, {95, StopRequests, 10}, {97, StopRequests, 10}, {98, StopAccepting, 10},
		{1000, StopAccepting, 10},
		// A level ends three hundredths below where it begins.
		{97, StopAccepting, 10}, {95, StopAccepting, 10}, {94, StopRequests, 19}, {92, StopRequests, 37}, {91, NoKeepAlive, 46},
		{87, NoKeepAlive, 82}, {86, Shrink, 91}, {77, Shrink, 100}, {76, Calm, 100},
		// And at once, however far it falls or rises.
		{99, StopAccepting, 10}, {10, Calm, 100},
	} {
		was := o
		changed := o.sample(tt.used, 100)
		if o.level != tt.level || o.scale != tt.scale {
			t.Errorf("%d: %d %%: %v and %d, want %v and %d", i, tt.used, o.level, o.scale, tt.level, tt.scale)
		}
		if i > 0 && changed != (was != o) {
			t.Errorf("%d: %d %%: changed %v", i, tt.used, changed)
		}
	}
	if o.sample(1<<60, 0); o.level != Calm {
		t.Errorf("%v without a limit", o.level)
	}
	if n := memoryUsed(); n < 64<<10 || n > 1<<40 {
		t.Errorf("%d bytes in use", n)
	}
}

// pressed is a stage whose use of memory, in hundredths of its limit, the test sets.
type pressed struct {
	*stage
	used atomic.Uint64
}

func newPressed(t *testing.T, cfg Config) *pressed {
	p := &pressed{}
	cfg.Memory = 1000 << 20 // a pod may hold as much as ever
	cfg.Used = func() uint64 { return p.used.Load() * 10 << 20 }
	p.stage = newStage(t, cfg)
	return p
}

// set makes the engine measure pct, and the loops act on it.
func (p *pressed) set(pct uint64) {
	p.t.Helper()
	p.used.Store(pct)
	p.e.mu.Lock()
	p.e.measure()
	p.e.mu.Unlock()
	p.onLoop(func(*Loop) {})
	p.onLoop(func(*Loop) {})
}

// TestShrink: free buffers are given back at 80 %.
func TestShrink(t *testing.T) {
	s := newPressed(t, Config{})
	free := func() (n int) {
		s.onLoop(func(l *Loop) { n = len(l.in) + len(l.big) + len(l.out) + len(l.bigOut) + len(l.h2Free().streams) })
		return
	}
	fill := func() {
		s.onLoop(func(l *Loop) {
			for range keepBufs {
				l.putIn(make([]byte, readBuf))
				l.putOut(make([]byte, 0, smallOut))
			}
		})
	}
	fill()
	if n := free(); n != 2*keepBufs {
		t.Fatalf("%d free buffers", n)
	}
	s.set(79)
	if n := free(); n != 2*keepBufs {
		t.Errorf("%d free buffers at 79 %%", n)
	}
	s.set(80)
	if n := free(); n != 0 {
		t.Errorf("%d free buffers at 80 %%", n)
	}
	fill()
	if n := free(); n > keepBufs/8 {
		t.Errorf("%d free buffers are kept at 80 %%", n)
	}
	s.set(10)
	fill()
	if n := free(); n != 2*keepBufs {
		t.Errorf("%d free buffers once it is over", n)
	}
}

// TestNoKeepAlive: at 90 % a connection ends with the answer under way, orderly.
func TestNoKeepAlive(t *testing.T) {
	s := newPressed(t, Config{})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, request: local}
	h1, h2 := s.front(pod, v, false), s.front(pod, v, true)
	c := dial(t, h1)
	br := bufio.NewReader(c)
	ask := func() *http.Response {
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, res.Body)
		return res
	}
	p := newPeer2(t, dial(t, h2), true)
	p.get(1, "/")
	if err := p.flush(); err != nil || p.status(1) != "421" {
		t.Fatal(err)
	}
	s.set(89)
	if ask().Close {
		t.Error("closed at 89 %")
	}
	s.set(90)
	if !ask().Close {
		t.Error("kept alive at 90 %")
	}
	if got := rest(t, c); got != "" {
		t.Errorf("%q", got)
	}
	// HTTP/2: warned, the request under way is answered, then the last stream is named.
	p.goaway()
	p.get(3, "/")
	if err := p.flush(); err != nil || p.status(3) != "421" {
		t.Fatal(err)
	}
	eventually(t, "both are gone", func() bool { return s.e.Shed(ShedKeepAlive) == 2 && pod.Conns() <= 1 })
	// And a connection that comes now gets its answer, and no more.
	c = dial(t, h1)
	br.Reset(c)
	if res := ask(); !res.Close || res.StatusCode != 421 {
		t.Errorf("%v", res)
	}
}

// TestShorterTimes: from 85 % on limits of time shrink, for connections that are there already as well.
func TestShorterTimes(t *testing.T) {
	ck := newClock()
	s := newPressed(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, request: local}
	idle := dial(t, s.front(pod, v, false))
	eventually(t, "accepted", func() bool { return pod.Conns() == 1 })
	ck.move(t, s.e, time.Duration(idleDown/100*60))
	s.set(89) // 64 hundredths are left
	ck.move(t, s.e, time.Second)
	if pod.Conns() != 1 {
		t.Fatal("too early")
	}
	s.set(90) // 55
	s.onLoop(func(*Loop) {})
	if got := rest(t, idle); got != "" {
		t.Errorf("%q", got)
	}
	eventually(t, "closed", func() bool { return pod.Conns() == 0 })
}

// TestStopRequests: from 95 % on, or when its own pod holds too much, a service is told to refuse.
func TestStopRequests(t *testing.T) {
	s := newPressed(t, Config{})
	pod, other := s.e.AddPod("p"), s.e.AddPod("q")
	sheds := func(p *Pod) (yes bool) {
		s.onLoop(func(l *Loop) { yes = p.Sheds(l) })
		return
	}
	s.set(94)
	if sheds(pod) {
		t.Error("at 94 %")
	}
	s.set(95)
	if !sheds(pod) || !sheds(other) {
		t.Error("not at 95 %")
	}
	s.set(10)
	s.onLoop(func(l *Loop) { pod.share(l).addHeldBytes(podHeld + 1) })
	if !sheds(pod) || sheds(other) {
		t.Error("a pod that holds too much is not the one refused")
	}
	s.onLoop(func(l *Loop) { pod.share(l).addHeldBytes(-podHeld / 8) })
	if !sheds(pod) {
		t.Error("let in again at once: it flaps")
	}
	s.onLoop(func(l *Loop) { pod.share(l).addHeldBytes(-podHeld / 4) })
	if sheds(pod) {
		t.Error("still refused")
	}
	if s.e.Shed(ShedRequest) != 4 || s.e.Shed(ShedPodMemory) != 1 {
		t.Errorf("%d and %d counted", s.e.Shed(ShedRequest), s.e.Shed(ShedPodMemory))
	}
}

// TestStopAccepting: at 98 % the backlog waits, but that of a vital listener is served now
// and then; and all goes on by itself.
func TestStopAccepting(t *testing.T) {
	ck := newClock()
	s := newPressed(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	var captured, vital atomic.Int64
	count := func(n *atomic.Int64) Accept { return func(l *Loop, fd int) { n.Add(1); unix.Close(fd) } }
	a := s.listen(pod, count(&captured))
	b := s.listenVital(pod, count(&vital))
	s.set(98)
	const each = 5
	for range each {
		dial(t, a)
		dial(t, b)
	}
	eventually(t, "both have met the level", func() bool { return s.e.Shed(ShedAccept) >= 2 })
	before := s.e.Loops()[0].Stats().Iterations
	for i := range int64(3) {
		eventually(t, "a vital one", func() bool { return vital.Load() == i+1 })
		ck.move(t, s.e, 300*time.Millisecond)
	}
	if n := s.e.Loops()[0].Stats().Iterations - before; n > 100 {
		t.Errorf("%d iterations: the loop spins", n)
	}
	if n := captured.Load(); n != 0 {
		t.Errorf("%d connections accepted at 98 %%", n)
	}
	s.set(94)
	ck.move(t, s.e, 300*time.Millisecond)
	eventually(t, "all are accepted", func() bool { return captured.Load() == each && vital.Load() == each })
}

// listenVital is listen for a vital listener.
func (s *stage) listenVital(pod *Pod, accept Accept) string {
	s.vital = true
	defer func() { s.vital = false }()
	return s.listen(pod, accept)
}

// TestPodHoldsTooMuch: a pod whose clients begin heads without end holds a bounded
// part of memory; what has begun goes on, the rest waits, and its neighbour notices nothing.
func TestPodHoldsTooMuch(t *testing.T) {
	ck := newClock()
	calm := func() uint64 { return 0 }
	s := newStage(t, Config{Now: ck.Now, Memory: 16 << 20, Used: calm}) // a pod may hold a quarter
	pod, other := s.e.AddPod("p"), s.e.AddPod("q")
	v := &svc{pod: pod, request: local, silent: true}
	addr, quiet := s.front(pod, v, false), s.front(other, &svc{pod: other, request: local}, false)
	const most = 4 << 20
	conns := most/readBuf + 200
	var late []io.ReadWriter
	for i := range conns {
		c := dial(t, addr)
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: a\r\nX-%d: ", i)
		late = append(late, c)
	}
	held := func() (n int, tight bool) {
		s.onLoop(func(l *Loop) { n, tight = pod.share(l).held, pod.share(l).tight })
		return
	}
	eventually(t, "the pod holds what it may", func() bool { _, tight := held(); return tight && pod.Conns() == int64(conns) })
	if n, _ := held(); n > most+2*readBuf {
		t.Errorf("%d bytes are held, want at most %d", n, most)
	}
	sum := 0
	s.onLoop(func(l *Loop) {
		l.Each(func(src reactor.Source) {
			if c, ok := src.(*h1server); ok && c.pod == pod {
				sum += len(c.in) + cap(c.out)
			}
		})
	})
	if n, _ := held(); n != sum {
		t.Errorf("%d bytes are accounted, %d are held", n, sum)
	}
	get := func(addr string) int {
		c := dial(t, addr)
		defer c.Close()
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode
	}
	if get(quiet) != 421 {
		t.Error("the neighbour is not served")
	}
	// A head that has begun may end.
	for _, c := range late[:10] {
		io.WriteString(c, "x\r\n\r\n")
		if res, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || res.StatusCode != 421 {
			t.Fatalf("%v, %v", res, err)
		}
	}
	// Time ends the others, and those that waited are read.
	ck.move(t, s.e, time.Duration(headTime)+time.Second)
	eventually(t, "the slow are gone", func() bool { _, tight := held(); return !tight })
	for _, c := range late[len(late)-10:] {
		io.WriteString(c, "x\r\n\r\n")
		if res, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || res.StatusCode != 421 {
			t.Fatalf("one that waited: %v, %v", res, err)
		}
	}
	ck.move(t, s.e, time.Duration(idleDown)+time.Second)
	ck.move(t, s.e, time.Duration(lingerTime)+time.Second) // of those who were answered 408
	eventually(t, "all are gone, and nothing is accounted", func() bool { n, _ := held(); return pod.Conns() == 0 && n == 0 })
}

// TestNothingIsAccountedTwice: whatever has gone through the two proxies, what their pods
// hold is nothing again once it has ended, and what they are said to hold is right in between.
func TestNothingIsAccountedTwice(t *testing.T) {
	m := newMesh(t, Config{}, newEcho(t))
	body := strings.Repeat("x", 3<<20)
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	for _, c := range []*http.Client{
		{Transport: &http.Transport{DialContext: to(m.h1)}},
		{Transport: &http.Transport{DialContext: to(m.h2), Protocols: p}},
	} {
		for range 5 {
			res, err := c.Post("http://a/echo", "x/y", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			if n, err := io.Copy(io.Discard, res.Body); err != nil || n != int64(len(body)) {
				t.Fatal(n, err)
			}
			res.Body.Close()
		}
		// One that is given up in its midst.
		res, err := c.Get("http://a/big")
		if err != nil {
			t.Fatal(err)
		}
		io.CopyN(io.Discard, res.Body, 100_000)
		res.Body.Close()
		c.CloseIdleConnections()
	}
	m.e.RemovePod(m.src)
	m.e.RemovePod(m.dst)
	m.onLoop(func(l *Loop) {
		for _, p := range []*Pod{m.src, m.dst} {
			if n := p.share(l).held; n != 0 {
				t.Errorf("%s: %d bytes are accounted to a pod without a connection", p.Name, n)
			}
			if n := p.Files(); n != 0 {
				t.Errorf("%s: %d descriptors", p.Name, n)
			}
		}
	})
	if n := m.e.files.Load(); n != 0 {
		t.Errorf("%d descriptors are accounted to pods", n)
	}
}
