package engine

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/reactor"
	"aether/mtls/record"
)

// TestFilesAreShared: the formula, at its fixed points.
func TestFilesAreShared(t *testing.T) {
	f := newFiles(20_000)
	if f.reserve != 2500 || newFiles(100).reserve != 50 || newFiles(400).reserve != 64 || newFiles(1<<20).reserve != mostReserve {
		t.Errorf("%d, %d, %d, %d", f.reserve, newFiles(100).reserve, newFiles(400).reserve, newFiles(1<<20).reserve)
	}
	usable := int64(20_000 - 2500)
	if got := f.share(0, 0, true); got != usable {
		t.Errorf("alone: %d", got)
	}
	// Pods that take what they can, in turns, come to rest; a rest is left for one that comes.
	for hogs := 1; hogs <= 20; hogs++ {
		own := make([]int64, hogs)
		all := int64(0)
		for moved := true; moved; {
			moved = false
			for i := range own {
				if own[i] < f.share(own[i], all, false) {
					own[i]++
					all++
					moved = true
				}
			}
		}
		if all > usable {
			t.Fatalf("%d pods took %d of %d", hogs, all, usable)
		}
		ideal := usable * filesShare / int64(1+filesShare*hogs)
		for _, n := range own {
			if n < ideal-filesShare || n > ideal+filesShare {
				t.Errorf("one of %d pods has %d, want %d", hogs, n, ideal)
			}
		}
		if left := f.share(0, all, false); left < leastFiles {
			t.Errorf("beside %d pods a new one may have %d", hogs, left)
		}
	}
}

// TestPodsPartOfFiles: a pod at its part waits in its backlog, without a spin and with its
// vital listener half open; its neighbour does not wait; what ends makes room.
func TestPodsPartOfFiles(t *testing.T) {
	ck := newClock()
	complaints := counter{of: "new connections wait"}
	s := newStage(t, Config{Now: ck.Now, Files: 4096, Log: slog.New(&complaints)})
	pod, other := s.e.AddPod("p"), s.e.AddPod("q")
	var n, v, o atomic.Int64
	count := func(n *atomic.Int64) Accept { return func(l *Loop, fd int) { n.Add(1); unix.Close(fd) } }
	a, b, c := s.listen(pod, count(&n)), s.listenVital(pod, count(&v)), s.listen(other, count(&o))
	usable := 4096 - 512
	pod.CountFDs(usable*4/5 + 10) // relays, say
	for range 5 {
		dial(t, a)
		dial(t, b)
		dial(t, c)
	}
	eventually(t, "the neighbour is served", func() bool { return o.Load() == 5 })
	eventually(t, "the pod waits", func() bool { return s.e.Shed(ShedPodFiles) >= 2 })
	before := s.e.Loops()[0].Stats().Iterations
	for i := range int64(3) {
		eventually(t, "a vital one", func() bool { return v.Load() == i+1 })
		ck.move(t, s.e, 300*time.Millisecond)
	}
	if k := s.e.Loops()[0].Stats().Iterations - before; k > 100 {
		t.Errorf("%d iterations: the loop spins", k)
	}
	if n.Load() != 0 {
		t.Errorf("%d accepted beyond the pod's part", n.Load())
	}
	for _, lines := range []int64{1, 2, 3} { // one a minute
		if n := complaints.Load(); n != lines {
			t.Errorf("%d lines in the log about it, want %d", n, lines)
		}
		waits := s.e.Shed(ShedPodFiles)
		ck.move(t, s.e, 61*time.Second)
		eventually(t, "it has waited again", func() bool { return s.e.Shed(ShedPodFiles) > waits })
		s.onLoop(func(*Loop) {}) // and has said so
	}
	pod.CountFDs(-100)
	ck.move(t, s.e, 300*time.Millisecond)
	eventually(t, "it goes on", func() bool { return n.Load() == 5 && v.Load() == 5 })
	pod.CountFDs(-usable*4/5 - 10 + 100)
	if s.e.files.Load() != 0 {
		t.Errorf("%d descriptors are accounted", s.e.files.Load())
	}
}

// TestReserveOfFiles: clients that take all descriptors stop at the reserve: connections to
// applications are still made, and who waits is served once others have gone.
func TestReserveOfFiles(t *testing.T) {
	s := newStage(t, Config{Files: 400}) // a reserve of 64; the clients below take numbers of the same process
	pod := s.e.AddPod("p")
	app := s.app(raw("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"))
	v := &svc{pod: pod, to: app, silent: true}
	addr := s.front(pod, v, false)
	var conns []*net.TCPConn
	// Nothing is accepted while they dial: a number that a client took between a look and an accept would be the reserve's.
	wait := make(chan struct{})
	dialled := sync.OnceFunc(func() { close(wait) })
	t.Cleanup(dialled)
	if err := s.e.Loops()[0].Post(func() { <-wait }); err != nil {
		t.Fatal(err)
	}
	for range 250 {
		conns = append(conns, dial(t, addr))
	}
	dialled()
	eventually(t, "the reserve is met", func() bool { return s.e.Shed(ShedFiles) >= 3 })
	if got := s.e.Shed(ShedDescriptor); got > 0 {
		t.Errorf("%d connections were reset", got)
	}
	s.onLoop(func(l *Loop) {
		l.Each(func(src reactor.Source) {
			if c, ok := src.(*h1server); ok && c.fd >= 400-64 {
				t.Errorf("a client's connection has descriptor %d, of the reserve", c.fd)
			}
		})
	})
	// The first is served, by an application's connection out of the reserve.
	ask := func(c net.Conn) error {
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil && res.StatusCode != 200 {
			err = fmt.Errorf("%s", res.Status)
		}
		return err
	}
	if err := ask(conns[0]); err != nil {
		t.Fatal(err)
	}
	last := conns[len(conns)-1]
	for _, c := range conns[:len(conns)-20] {
		c.Close()
	}
	if err := ask(last); err != nil {
		t.Errorf("one that waited: %v", err)
	}
}

// TestDialsAtOnce: of hop sessions a pod makes a bounded number at once; the others wait for
// their turn, those that are not wanted any more lose it, and a neighbour does not wait.
func TestDialsAtOnce(t *testing.T) {
	s := newStage(t, Config{})
	pod, other := s.e.AddPod("p"), s.e.AddPod("q")
	var now, most, all atomic.Int64
	release := make(chan struct{})
	hop := func(l *Loop, p *Pod) *Hop {
		return l.NewHop(p, func(ctx context.Context) (int, record.Conn, Bond, error) {
			all.Add(1)
			n := now.Add(1)
			defer now.Add(-1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			select {
			case <-release:
			case <-ctx.Done():
			}
			return -1, nil, nil, io.ErrUnexpectedEOF
		}, nil)
	}
	const hops = 3 * podDials
	var made []*Hop
	s.onLoop(func(l *Loop) {
		for range hops {
			h := hop(l, pod)
			h.more()
			made = append(made, h)
		}
	})
	eventually(t, "as many as may are being made", func() bool { return now.Load() == podDials })
	s.onLoop(func(l *Loop) { hop(l, other).more() })
	eventually(t, "the neighbour's too", func() bool { return now.Load() == podDials+1 })
	s.onLoop(func(*Loop) {
		for _, h := range made[hops-10:] { // their endpoint is gone
			h.Close(io.EOF)
		}
	})
	close(release)
	eventually(t, "all have had their turn", func() bool { return all.Load() == hops-10+1 && now.Load() == 0 })
	if most.Load() > podDials+1 {
		t.Errorf("%d dials at once", most.Load())
	}
	eventually(t, "no place is lost", func() (ok bool) {
		s.onLoop(func(l *Loop) {
			ok = l.dialsOf(pod).dials == 0 && len(l.dialsOf(pod).dialq) == 0 && len(pod.share(l).resources) == 0
		})
		return
	})
}

// TestConnectCause (case 86 for local ports): out of descriptors is told from a peer that cannot be reached.
func TestConnectCause(t *testing.T) {
	for err, want := range map[error]string{unix.ECONNREFUSED: "connect", unix.EMFILE: "descriptors", unix.ENFILE: "descriptors", unix.EADDRNOTAVAIL: "local-ports"} {
		if got := ConnectCause(fmt.Errorf("socket: make a socket: %w", err)); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}
