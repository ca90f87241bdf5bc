package reactor

import (
	"math/rand"
	"testing"
	"time"
)

// TestTimers runs thousands of timers, armed, moved and stopped at random,
// against a plain list: none runs early, none more than a slot late, none
// twice, and the loop never means to sleep past one.
func TestTimers(t *testing.T) {
	const slot = int64(1) << slotShift
	for seed := range int64(60) {
		rnd := rand.New(rand.NewSource(seed))
		now := rnd.Int63n(1 << 40)
		l := newLoop(t, &now, Config{})
		type entry struct {
			Timer
			at    int64 // deadline; -1: not armed
			fired int
		}
		timers := make([]*entry, 1+rnd.Intn(200))
		for i := range timers {
			timers[i] = &entry{at: -1}
		}
		random := func() int64 { // from now to two minutes
			switch rnd.Intn(4) {
			case 0:
				return rnd.Int63n(slot)
			case 1:
				return rnd.Int63n(int64(time.Second))
			case 2:
				return rnd.Int63n(int64(30 * time.Second))
			}
			return rnd.Int63n(int64(2 * time.Minute))
		}
		var arm func(e *entry)
		arm = func(e *entry) {
			d := random()
			e.at = l.Now() + d
			l.Arm(&e.Timer, &fake{run: func() {
				if e.at < 0 || e.at > now {
					t.Fatalf("seed %d: ran %v early (armed: %v)", seed, time.Duration(e.at-now), e.at >= 0)
				}
				e.at = -1
				e.fired++
				if rnd.Intn(3) == 0 {
					arm(e)
				}
				if rnd.Intn(3) == 0 { // a neighbour, perhaps of the same slot
					o := timers[rnd.Intn(len(timers))]
					l.Disarm(&o.Timer)
					o.at = -1
				}
			}}, d)
		}
		for range 300 {
			for range rnd.Intn(20) {
				e := timers[rnd.Intn(len(timers))]
				if rnd.Intn(4) == 0 {
					l.Disarm(&e.Timer)
					e.at = -1
				} else {
					arm(e)
				}
			}
			earliest := int64(-1)
			for _, e := range timers {
				if e.Armed() != (e.at >= 0) {
					t.Fatalf("seed %d: armed %v, want %v", seed, e.Armed(), e.at >= 0)
				}
				if e.at >= 0 && (earliest < 0 || e.at < earliest) {
					earliest = e.at
				}
			}
			wait := int64(l.timeout())
			if earliest < 0 && wait >= 0 {
				// A timer that was moved later keeps its old place; one that was stopped does not.
				t.Fatalf("seed %d: waits %d ms for nothing", seed, wait)
			}
			if earliest >= 0 && (wait < 0 || now+wait*1e6 > max(now, earliest)+2*slot) {
				t.Fatalf("seed %d: waits %d ms, the first is due in %v", seed, wait, time.Duration(earliest-now))
			}
			switch rnd.Intn(5) {
			case 0:
				now += rnd.Int63n(int64(3 * time.Minute)) // more than a turn of the wheel
			case 1:
				now += rnd.Int63n(slot)
			default:
				if wait >= 0 {
					now += wait * 1e6
				}
			}
			l.iterate(false)
			for _, e := range timers {
				if e.at >= 0 && e.at>>slotShift+1 <= now>>slotShift {
					t.Fatalf("seed %d: %v late", seed, time.Duration(now-e.at))
				}
			}
		}
		if l.wheel.n+l.fine.n != func() (n int) {
			for _, e := range timers {
				if e.Armed() {
					n++
				}
			}
			return
		}() {
			t.Fatalf("seed %d: the wheel's count is wrong", seed)
		}
	}
}

// TestTimerCosts: arming, moving and stopping allocates nothing.
func TestTimerCosts(t *testing.T) {
	now := int64(1)
	l := newLoop(t, &now, Config{})
	var tm Timer
	task := &fake{}
	if n := testing.AllocsPerRun(1000, func() {
		l.Arm(&tm, task, int64(time.Second))
		l.Arm(&tm, task, int64(time.Minute))
		l.Arm(&tm, task, int64(time.Millisecond))
		l.Disarm(&tm)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestShortTimers: what is due within half a second is met to the millisecond,
// whatever else runs, and the loop does not wake more often for it.
func TestShortTimers(t *testing.T) {
	rnd := rand.New(rand.NewSource(1))
	now := int64(time.Hour)
	l := newLoop(t, &now, Config{})
	var far Timer
	l.Arm(&far, &fake{}, int64(20*time.Second))
	for range 2000 {
		var tm Timer
		d := rnd.Int63n(fineTurn)
		at, ran := now+d, int64(-1)
		l.Arm(&tm, &fake{run: func() { ran = now }}, d)
		wakes := 0
		for ; ran < 0 && wakes < 10; wakes++ {
			now += int64(l.timeout()) * 1e6
			l.iterate(false)
		}
		if ran < at || ran > at+2<<fineShift {
			t.Fatalf("after %v: %v late", time.Duration(d), time.Duration(ran-at))
		}
		if wakes > 2 {
			t.Fatalf("after %v: %d wakes", time.Duration(d), wakes)
		}
		if rnd.Intn(10) == 0 { // the far one has come near
			l.Arm(&far, &fake{}, int64(20*time.Second))
			now += int64(time.Minute)
			l.iterate(false)
		}
	}
}

// TestOneTimer: a timer that is alone on its wheel, and was moved later by any number of slots, is looked at by a loop that is
// late by any number of slots, and runs once its deadline has passed and not before.
func TestOneTimer(t *testing.T) {
	now := int64(1) << 40
	l := newLoop(t, &now, Config{})
	for _, shift := range []int{slotShift, fineShift} {
		slot := int64(1) << shift
		for late := range int64(slots + 3) {
			for _, ahead := range []int64{0, 1, 2, slots - late, slots - late + 1, slots - 2, slots - 1, slots, slots + 1, 3 * slots} {
				ran := false
				var timer Timer
				task := &fake{run: func() { ran = true }}
				l.iterate(false)
				l.Arm(&timer, task, 3*slot)
				deadline := now + 3*slot + max(ahead, 0)*slot
				l.Arm(&timer, task, deadline-now)
				done := make(chan struct{})
				go func() {
					defer close(done)
					for now += (4 + late) * slot; !ran; now += int64(max(l.timeout(), 1)) * 1e6 {
						l.iterate(false)
						if ran && now < deadline || !ran && now > deadline+2<<slotShift {
							t.Errorf("late by %d, ahead by %d slots of %d: %v behind the deadline it has run: %v", late, ahead, slot, time.Duration(now-deadline), ran)
							return
						}
					}
				}()
				select {
				case <-done:
				case <-time.After(20 * time.Second):
					t.Fatalf("late by %d, ahead by %d slots of %d: the loop does not come back", late, ahead, slot)
				}
				if t.Failed() {
					return
				}
			}
		}
	}
}
