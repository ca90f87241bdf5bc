package reactor

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestCrowdThatPutsOff: one ready source behind a crowd of two thousand is told in
// the same iteration when the crowd only notes its events, and waits its turn when
// the crowd does its work.
func TestCrowdThatPutsOff(t *testing.T) {
	const crowd = 2000
	for _, tt := range []struct {
		name   string
		putOff bool
		want   int // iterations until the last one is told
	}{
		{"noted only", true, 1},
		{"handled", false, crowd/256 + 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			now := int64(1)
			l := newLoop(t, &now, Config{})
			told := 0
			add := func(f *fake) int {
				fd, peer := pair(t)
				t.Cleanup(func() { unix.Close(fd); unix.Close(peer) })
				if err := l.Register(fd, f, unix.EPOLLIN|unix.EPOLLET); err != nil {
					t.Fatal(err)
				}
				return peer
			}
			var peers []int
			for range crowd {
				peers = append(peers, add(&fake{event: func(uint32) {
					if told++; tt.putOff {
						l.CountDeferred()
					}
				}}))
			}
			alone := false
			peers = append(peers, add(&fake{event: func(uint32) { alone = true }}))
			for _, p := range peers {
				unix.Write(p, []byte("x"))
			}
			n := 0
			for ; !alone && n < 100; n++ {
				before := told
				l.iterate(false)
				if got := told - before; !tt.putOff && got > len(l.evs) {
					t.Fatalf("%d sources did their work in one iteration", got)
				}
			}
			if n != tt.want {
				t.Errorf("told in iteration %d, want %d", n, tt.want)
			}
		})
	}
}

// TestCrowdHasAnEnd: however many put off, an iteration ends.
func TestCrowdHasAnEnd(t *testing.T) {
	now := int64(1)
	l := newLoop(t, &now, Config{})
	told := 0
	for range len(l.evs) {
		fd, peer := pair(t)
		defer unix.Close(fd)
		defer unix.Close(peer)
		// Level-triggered: it is ready again at once.
		if err := l.Register(fd, &fake{event: func(uint32) { told++; l.CountDeferred() }}, unix.EPOLLIN); err != nil {
			t.Fatal(err)
		}
		unix.Write(peer, []byte("x"))
	}
	l.iterate(false)
	if want := maxRounds * len(l.evs); told != want {
		t.Errorf("%d events, want %d", told, want)
	}
}

// TestFullMailbox: what is posted in bulk runs in order, a bounded part of it an
// iteration, and a loop with a part left does not wait.
func TestFullMailbox(t *testing.T) {
	now := int64(1)
	l := newLoop(t, &now, Config{})
	const n = 2*maxMail + 10
	var ran []int
	for i := range n {
		if err := l.Post(func() { ran = append(ran, i) }); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []int{maxMail, 2 * maxMail, n, n + 1} {
		l.iterate(true) // would not return if it waited
		if len(ran) != want {
			t.Fatalf("%d ran after iteration %d, want %d", len(ran), i+1, want)
		}
		if i == 0 {
			_ = l.Post(func() { ran = append(ran, n) }) // comes last
		}
	}
	_ = l.Post(func() { ran = append(ran, n+1) }) // and the wakeup still works
	l.iterate(true)
	for i, got := range ran {
		if got != i {
			t.Fatalf("%d ran in place %d", got, i)
		}
	}
	if len(ran) != n+2 {
		t.Errorf("%d of %d ran", len(ran), n+2)
	}
}

// TestManyTimers: timers that are due at once run in parts, each once, and a loop with
// some left does not wait.
func TestManyTimers(t *testing.T) {
	now := int64(1)
	l := newLoop(t, &now, Config{})
	const n = 2*maxTimers + 10
	tm := make([]Timer, n)
	ran := make([]int, n)
	total := 0
	for i := range tm {
		l.Arm(&tm[i], &fake{run: func() {
			ran[i]++
			total++
			if ran[i] == 1 && i%2 == 0 {
				l.Arm(&tm[i], &fake{run: func() { ran[i]++ }}, -1) // due at once: in a later ring
			}
		}}, 10)
	}
	now += 1 << (slotShift + 1)
	for i, want := range []int{maxTimers, 2 * maxTimers, n} {
		l.iterate(true) // would not return if it waited
		if total != want {
			t.Fatalf("%d ran after iteration %d, want %d", total, i+1, want)
		}
	}
	now += 1 << (slotShift + 1)
	for range 3 {
		l.iterate(false)
	}
	for i := range ran {
		if want := 2 - i%2; ran[i] != want {
			t.Fatalf("timer %d ran %d times, want %d", i, ran[i], want)
		}
	}
}

// TestProcessorTime: a loop's processor time is that of its work, not of the clock on the wall.
func TestProcessorTime(t *testing.T) {
	l, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	began := time.Now()
	wg.Go(l.Run)
	run := func(f func()) {
		done := make(chan struct{})
		if err := l.Post(func() { defer close(done); f() }); err != nil {
			t.Fatal(err)
		}
		<-done
	}
	run(func() {
		runtime.LockOSThread() // a and b are one thread's
		defer runtime.UnlockOSThread()
		var a, b unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &a)
		for b.Nano() < a.Nano()+int64(50*time.Millisecond) {
			_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &b)
		}
	})
	run(func() {}) // an iteration after it
	run(func() {})
	l.Stop()
	wg.Wait()
	if got, all := l.Stats().CPU, time.Since(began); got < 50*time.Millisecond || got > all {
		t.Errorf("%v of processor time in %v", got, all)
	}
}
