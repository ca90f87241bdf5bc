package reactor

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// newLoop makes a loop that the test steps by itself, on a clock of its own.
func newLoop(t *testing.T, now *int64, cfg Config) *Loop {
	t.Helper()
	if now != nil {
		cfg.Now = func() int64 { return *now }
	}
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		unix.Close(l.ep)
		unix.Close(l.efd)
	})
	return l
}

func pair(t *testing.T) (a, b int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fds[0], fds[1]
}

func fds(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// fake is a source, flusher and task made of functions; nil: nothing.
type fake struct {
	event func(ev uint32)
	run   func()
	flush func()
	fail  func(error)
}

func (f *fake) Event(ev uint32) {
	if f.event != nil {
		f.event(ev)
	}
}
func (f *fake) Run() {
	if f.run != nil {
		f.run()
	}
}
func (f *fake) Flush() {
	if f.flush != nil {
		f.flush()
	}
}
func (f *fake) Fail(err error) {
	if f.fail != nil {
		f.fail(err)
	}
}

func TestOrderOfAnIteration(t *testing.T) {
	now := int64(1)
	l := newLoop(t, &now, Config{})
	var said []string
	say := func(s string) *fake { return &fake{run: func() { said = append(said, s) }} }
	fd, peer := pair(t)
	defer unix.Close(fd)
	defer unix.Close(peer)
	src := &fake{event: func(ev uint32) {
		if ev&Readable == 0 {
			return
		}
		said = append(said, "event")
		l.After(say("after"))
		l.Dirty(&fake{flush: func() {
			said = append(said, "flush")
			l.Dirty(&fake{flush: func() { said = append(said, "flush of a flush") }})
		}})
		l.Later(say("later"))
		l.Later(&fake{run: func() {
			said = append(said, "later, again")
			l.Later(say("much later"))
		}})
	}}
	if err := l.Register(fd, src, Stream); err != nil {
		t.Fatal(err)
	}
	step := func(want ...string) {
		t.Helper()
		said = nil
		l.iterate(false)
		if !slices.Equal(said, want) {
			t.Fatalf("%q, want %q", said, want)
		}
	}
	step()
	unix.Write(peer, []byte("x"))
	step("event", "flush", "flush of a flush", "after")
	step("later", "later, again")
	step("much later")
	step()

	// What an After task makes dirty is flushed next, without a wait.
	l.After(&fake{run: func() { l.Dirty(&fake{flush: func() { said = append(said, "flush") }}) }})
	l.iterate(false)
	said = nil
	l.iterate(true) // would not return: nothing else happens
	if !slices.Equal(said, []string{"flush"}) {
		t.Fatalf("%q", said)
	}
}

func TestPost(t *testing.T) {
	for _, b := range []Blocking{Safe, Adapt} {
		t.Run(fmt.Sprint(b), func(t *testing.T) {
			before := fds(t)
			l, err := New(Config{Blocking: b})
			if err != nil {
				t.Fatal(err)
			}
			var wg, senders sync.WaitGroup
			wg.Go(l.Run)
			const each = 2000
			var seen [8][]int // by the loop only
			for g := range seen {
				senders.Go(func() {
					for i := range each {
						if err := l.Post(func() { seen[g] = append(seen[g], i) }); err != nil {
							t.Error(err)
						}
						if i%500 == 0 { // let the loop go to sleep
							done := make(chan struct{})
							if l.Post(func() { close(done) }) == nil {
								<-done
							}
						}
					}
				})
			}
			senders.Wait()
			l.Stop()
			wg.Wait()
			for g := range seen {
				if len(seen[g]) != each || !slices.IsSorted(seen[g]) {
					t.Errorf("goroutine %d: %d of %d, in order: %v", g, len(seen[g]), each, slices.IsSorted(seen[g]))
				}
			}
			if err := l.Post(func() {}); !errors.Is(err, ErrClosed) {
				t.Errorf("Post after the end: %v", err)
			}
			if n := fds(t); n != before {
				t.Errorf("%d descriptors, %d before", n, before)
			}
		})
	}
}

// TestPostAgainstTheEnd: whatever Post accepted runs, once, and what it did not accept never.
func TestPostAgainstTheEnd(t *testing.T) {
	for range 200 {
		l, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		var ran, accepted atomic.Int64
		var wg sync.WaitGroup
		wg.Go(l.Run)
		for range 4 {
			wg.Go(func() {
				for l.Post(func() { ran.Add(1) }) == nil {
					accepted.Add(1)
				}
			})
		}
		l.Stop()
		wg.Wait()
		if ran.Load() != accepted.Load() {
			t.Fatalf("%d accepted, %d ran", accepted.Load(), ran.Load())
		}
	}
}

// TestStop: at the end every source has failed once, also those that others
// opened on the way out, or that a posted function brought.
func TestStop(t *testing.T) {
	before := fds(t)
	l, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	failed := map[string]int{}
	var add func(name string, heirs int)
	add = func(name string, heirs int) {
		fd, peer := pair(t)
		err := l.Register(fd, &fake{fail: func(err error) {
			failed[name]++
			if !errors.Is(err, ErrClosed) {
				t.Errorf("%s: %v", name, err)
			}
			l.Unregister(fd)
			unix.Close(fd)
			unix.Close(peer)
			if heirs > 0 {
				add(name+"+", heirs-1)
			}
		}}, Stream)
		if err != nil {
			t.Error(err)
		}
	}
	add("a", 3)
	add("b", 0)
	_ = l.Post(func() {
		l.stop = true
		_ = l.Post(func() { add("late", 1) })
	})
	l.Run()
	want := map[string]int{"a": 1, "a+": 1, "a++": 1, "a+++": 1, "b": 1, "late": 1, "late+": 1}
	if fmt.Sprint(failed) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", failed, want)
	}
	if n := l.Stats().Registered; n != 0 {
		t.Errorf("%d still registered", n)
	}
	if n := fds(t); n != before {
		t.Errorf("%d descriptors, %d before", n, before)
	}
}

func TestPanicsAreIsolated(t *testing.T) {
	now := int64(1)
	var reported int
	l := newLoop(t, &now, Config{OnPanic: func(_ int, cause any, stack []byte) {
		reported++
		if !strings.Contains(string(stack), "reactor_test.go") {
			t.Errorf("no stack for %v", cause)
		}
	}})
	var failed []string
	bad := func(name string) *fake {
		boom := func() { panic("boom " + name) }
		return &fake{event: func(uint32) { boom() }, run: boom, flush: boom, fail: func(err error) {
			failed = append(failed, name)
			if !strings.Contains(err.Error(), "boom "+name) {
				t.Error(err)
			}
		}}
	}
	good := 0
	fine := &fake{run: func() { good++ }, flush: func() { good++ }}
	l.Later(bad("task"))
	l.Later(fine)
	l.Dirty(bad("flush"))
	l.Dirty(fine)
	l.After(bad("after"))
	l.After(fine)
	var tm, tm2 Timer
	l.Arm(&tm, bad("timer"), 0)
	l.Arm(&tm2, fine, 0)
	fd, peer := pair(t)
	defer unix.Close(fd)
	defer unix.Close(peer)
	src := bad("source")
	first := src.fail
	src.fail = func(err error) { first(err); panic("and again") }
	if err := l.Register(fd, src, Stream); err != nil {
		t.Fatal(err)
	}
	_ = l.Post(func() { panic("boom mail") })
	_ = l.Post(func() { good++ })
	now += 1 << (slotShift + 1)
	l.iterate(false)
	slices.Sort(failed)
	if want := []string{"after", "flush", "source", "task", "timer"}; !slices.Equal(failed, want) {
		t.Errorf("%v, want %v", failed, want)
	}
	if good != 5 {
		t.Errorf("%d of 5 neighbours lived", good)
	}
	if n := l.Stats().Panics; n != 7 || reported != 7 {
		t.Errorf("%d panics counted, %d reported, want 7", n, reported)
	}

	fd2, peer2 := pair(t)
	defer unix.Close(fd2)
	defer unix.Close(peer2)
	if err := l.Register(fd2, &fake{}, Stream); err != nil {
		t.Fatal(err)
	}
	seen := 0
	l.Each(func(Source) { seen++; panic("each") })
	if seen != 2 {
		t.Errorf("Each reached %d sources, want 2", seen)
	}
}

// TestStaleEvents: an event of a descriptor that was closed in the same
// iteration does not reach whoever got its number.
func TestStaleEvents(t *testing.T) {
	l := newLoop(t, nil, Config{})
	var fd, peer [2]int
	var told, stale int
	for i := range fd {
		fd[i], peer[i] = pair(t)
		defer unix.Close(peer[i])
	}
	fresh, freshPeer := pair(t)
	defer unix.Close(freshPeer)
	for i := range fd {
		other := fd[1-i]
		err := l.Register(fd[i], &fake{event: func(ev uint32) {
			if ev&Readable == 0 {
				return
			}
			if told++; told > 1 {
				return
			}
			l.Unregister(other)
			if err := unix.Dup3(fresh, other, unix.O_CLOEXEC); err != nil { // closes other and takes its number
				t.Error(err)
			}
			if err := l.Register(other, &fake{event: func(ev uint32) {
				if ev&Readable != 0 {
					stale++
				}
			}}, Stream); err != nil {
				t.Error(err)
			}
		}}, Stream)
		if err != nil {
			t.Fatal(err)
		}
	}
	l.iterate(false)
	unix.Write(peer[0], []byte("x"))
	unix.Write(peer[1], []byte("x"))
	for range 3 {
		l.iterate(false)
	}
	if told != 1 || stale != 0 {
		t.Errorf("told %d times, %d stale events", told, stale)
	}
	unix.Write(freshPeer, []byte("x"))
	l.iterate(false)
	if stale != 1 {
		t.Error("the new source is deaf")
	}
	unix.Close(fresh)
	unix.Close(fd[0])
	unix.Close(fd[1])
}

// TestRegisterTwice: a second registration fails and does the first no harm.
func TestRegisterTwice(t *testing.T) {
	l := newLoop(t, nil, Config{})
	fd, peer := pair(t)
	defer unix.Close(fd)
	defer unix.Close(peer)
	heard := 0
	if err := l.Register(fd, &fake{event: func(ev uint32) { heard++ }}, Stream); err != nil {
		t.Fatal(err)
	}
	l.iterate(false)
	if err := l.Register(fd, &fake{}, Stream); err == nil {
		t.Fatal("registered twice")
	}
	before := heard
	unix.Write(peer, []byte("x"))
	l.iterate(false)
	if heard == before {
		t.Error("the first one went deaf")
	}
}

// TestReplaceAndDetach: a replaced source gets the rest of the iteration's
// events; a detached descriptor none.
func TestReplaceAndDetach(t *testing.T) {
	l := newLoop(t, nil, Config{})
	fd, peer := pair(t)
	defer unix.Close(fd)
	defer unix.Close(peer)
	var a, b int
	if err := l.Register(fd, &fake{event: func(uint32) { a++ }}, Stream); err != nil {
		t.Fatal(err)
	}
	l.iterate(false)
	l.Replace(fd, &fake{event: func(uint32) { b++ }})
	unix.Write(peer, []byte("x"))
	l.iterate(false)
	if a != 1 || b != 1 {
		t.Errorf("%d and %d events", a, b)
	}
	if err := l.Detach(fd); err != nil {
		t.Fatal(err)
	}
	unix.Write(peer, []byte("x"))
	l.iterate(false)
	if b != 1 || l.Stats().Registered != 1 { // the wakeup
		t.Errorf("%d events, %d registered", b, l.Stats().Registered)
	}
}

func TestWatchdog(t *testing.T) {
	now := int64(time.Second)
	var took []time.Duration
	l := newLoop(t, &now, Config{Slow: 30 * time.Millisecond, OnSlow: func(_ int, d time.Duration, stack string) {
		took = append(took, d)
		if !strings.Contains(stack, "TestWatchdog") {
			t.Error("the stack does not show who is slow")
		}
	}})
	l.Later(&fake{run: func() {
		now += int64(20 * time.Millisecond)
		l.Check()
		now += int64(20 * time.Millisecond)
		l.Check()
		now += int64(20 * time.Millisecond)
		l.Check() // told already
	}})
	l.iterate(false)
	l.Later(&fake{run: func() { l.Check() }})
	l.iterate(false)
	now += int64(40 * time.Millisecond)
	l.Check() // others have the processor: no iteration runs
	if len(took) != 1 || took[0] != 40*time.Millisecond || l.Stats().Slow != 1 {
		t.Errorf("reported %v, counted %d", took, l.Stats().Slow)
	}
}

// TestLags: an iteration is counted by how long it took, waiting aside.
func TestLags(t *testing.T) {
	now := int64(1)
	l := newLoop(t, &now, Config{})
	iteration := func(took time.Duration) {
		l.Later(&fake{run: func() { now += int64(took) }})
		now += int64(time.Hour) // waited
		l.iterate(false)
	}
	for _, took := range []time.Duration{0, Lags[0], Lags[0] + 1, 7 * time.Millisecond, Lags[len(Lags)-1], time.Minute} {
		iteration(took)
	}
	want := map[int]uint64{0: 2, 1: 1, 7: 1, len(Lags) - 1: 1, len(Lags): 1}
	for i, n := range l.Stats().Took {
		if n != want[i] {
			t.Errorf("%d iterations in bucket %d, want %d", n, i, want[i])
		}
	}
}

// TestPending: what was seen of a descriptor is known before its source is told, and no longer then.
func TestPending(t *testing.T) {
	l, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	var a, b [2]int
	for _, p := range []*[2]int{&a, &b} {
		if *p, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0); err != nil {
			t.Fatal(err)
		}
		defer unix.Close(p[0])
	}
	var seen [][2]uint32
	see := func(own, other int) *probe {
		return &probe{event: func(uint32) {
			seen = append(seen, [2]uint32{l.Pending(own), l.Pending(other)})
			if len(seen) == 2 {
				l.Stop()
			}
		}}
	}
	_ = l.Post(func() {
		for _, p := range [][2]int{{a[0], b[0]}, {b[0], a[0]}} {
			if err := l.Register(p[0], see(p[0], p[1]), Readable|PeerEnd|unix.EPOLLET); err != nil {
				t.Error(err)
			}
		}
		unix.Close(a[1])
		unix.Close(b[1])
	})
	l.Run()
	if len(seen) != 2 || seen[0][0] != 0 || seen[0][1]&PeerEnd == 0 || seen[1] != [2]uint32{} {
		t.Errorf("pending of the one that is told, and of the other: %v", seen)
	}
}

// probe is a source of functions.
type probe struct{ event func(uint32) }

func (p *probe) Event(ev uint32) { p.event(ev) }
func (p *probe) Fail(error)      {}
