package relay

import (
	"errors"
	"io"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
)

// clog writes until nothing more is taken, and says how much was.
func (h half) clog(t *testing.T) (n int64) {
	t.Helper()
	for buf := make([]byte, 32<<10); ; {
		h.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		k, err := h.Write(buf)
		n += int64(k)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return n
		}
		if err != nil {
			t.Error(err)
			return n
		}
	}
}

// Directions that wait for a peer hold no permit: more of them than there are permits, stuck both
// ways, keep nobody from working, and what they hold is bounded.
func TestStuckRelaysHoldNoPermit(t *testing.T) {
	each(t, func(t *testing.T, kind string) {
		const most = 64 << 20 // mostly the kernel's: three pairs of sockets
		var all []*bed
		var stuck sync.WaitGroup
		for range cap(permits()) + 2 {
			b := newBed(t, kind, nil)
			for _, h := range []half{b.client, b.server} {
				stuck.Go(func() {
					if n := h.clog(t); n > most {
						t.Errorf("%d MiB went to a reader that reads nothing", n>>20)
					}
				})
			}
			all = append(all, b)
		}
		stuck.Wait()
		for end := time.Now().Add(5 * time.Second); len(permits()) > 0; runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatalf("%d of %d permits are held by relays that wait", len(permits()), cap(permits()))
			}
		}
		b := newBed(t, kind, nil)
		for _, d := range [][2]half{{b.client, b.server}, {b.server, b.client}} {
			io.WriteString(d[0], "hello")
			p := make([]byte, 5)
			if _, err := io.ReadFull(d[1], p); err != nil || string(p) != "hello" {
				t.Fatalf("%q, %v", p, err)
			}
		}
		for _, b := range append(all, b) {
			b.cancel()
			b.result(t)
		}
	})
}

// As many permits as there are and no more are out at once, and all come to theirs.
func TestPermit(t *testing.T) {
	if got, want := cap(permits()), max(1, runtime.GOMAXPROCS(0)-spareProcs); got != want {
		t.Errorf("%d permits, want %d", got, want)
	}
	var none *permit
	none.acquire() // needs none
	none.release()
	all := make(chan struct{}, 1)
	a := permit{all: all}
	a.release() // not held
	a.acquire()
	a.acquire() // held: no second one
	const n = 50
	order := make(chan int, n)
	var waiting sync.WaitGroup
	for i := range n {
		b := permit{all: all}
		asking := make(chan struct{})
		waiting.Go(func() {
			close(asking)
			b.acquire()
			order <- i
			b.release()
		})
		<-asking
	}
	if len(order) > 0 {
		t.Fatal("two permits are out where there is one")
	}
	a.release()
	waiting.Wait()
	if len(order) != n || len(all) != 0 {
		t.Errorf("%d of %d came to their permit, %d are still out", len(order), n, len(all))
	}
	a.acquire()
	a.release()
}
