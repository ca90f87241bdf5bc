package reactor

import "math/bits"

// There are two wheels. The coarse one has slots of 2^26 ns (67 ms); a timer more
// than one turn (34 s) away goes round until its deadline is in this turn. The
// fine one has slots of 2^20 ns (1 ms) and takes what is due within half a
// second. Deadlines are met late by at most one slot: enough for idle, head and
// connect limits on the one, for backoff and short limits of routes on the other.
const (
	slotShift = 26
	fineShift = 20
	slots     = 512
	fineTurn  = (slots - 2) << fineShift // a deadline nearer than that is the fine wheel's
)

// Timer calls a Task once its deadline has passed. The zero value is ready.
// It belongs to one loop; moving the deadline later is free.
type Timer struct {
	next, prev *Timer
	wheel      *wheel // that it is filed in, while armed
	slot       int32
	armed      bool
	deadline   int64
	at         int64 // where it is filed: the deadline when last filed
	task       Task
}

// Armed reports whether the timer is running.
func (t *Timer) Armed() bool { return t.armed }

type wheel struct {
	head  [slots]Timer // ring heads
	used  [slots / 64]uint64
	shift uint8
	tick  int64 // the slot number that was last run
	n     int
	turns bool // advance runs: tick is its own
}

func (w *wheel) init(now int64, shift uint8) {
	for i := range w.head {
		w.head[i].next, w.head[i].prev = &w.head[i], &w.head[i]
	}
	w.shift = shift
	w.tick = now >> shift
}

// Arm starts t: task runs after d nanoseconds. Arming a running timer moves it.
func (l *Loop) Arm(t *Timer, task Task, d int64) {
	l.owner.check("Arm")
	at := l.now + d
	t.task = task
	if t.armed {
		if at >= t.at { // later: it is looked at again when the old place comes up
			t.deadline = at
			return
		}
		t.wheel.unlink(t)
	}
	t.deadline = at
	t.armed = true
	l.file(t)
}

// Disarm stops t; its task will not run.
func (l *Loop) Disarm(t *Timer) {
	l.owner.check("Disarm")
	if t.armed {
		t.wheel.unlink(t)
		t.armed = false
	}
	t.task = nil
}

func (l *Loop) file(t *Timer) {
	w := &l.wheel
	if t.deadline-l.now < fineTurn {
		w = &l.fine
	}
	// An empty wheel is not turned. One that turns is: a tick that went ahead would let a timer be filed into the ring that is
	// being emptied, for ever.
	if w.n == 0 && !w.turns {
		w.tick = max(w.tick, l.now>>w.shift)
	}
	w.file(t)
}

func (w *wheel) file(t *Timer) {
	t.wheel = w
	k := t.deadline>>w.shift + 1 // the first slot that is wholly past the deadline
	if k <= w.tick {
		k = w.tick + 1
	}
	if k-w.tick >= slots { // beyond one turn: as far as the wheel goes
		k = w.tick + slots - 1
	}
	t.at = k << w.shift
	s := int32(k & (slots - 1))
	t.slot = s
	h := &w.head[s]
	t.prev, t.next = h.prev, h
	h.prev.next = t
	h.prev = t
	w.used[s>>6] |= 1 << (s & 63)
	w.n++
}

func (w *wheel) unlink(t *Timer) {
	t.prev.next, t.next.prev = t.next, t.prev
	t.next, t.prev, t.wheel = nil, nil, nil
	w.n--
	if h := &w.head[t.slot]; h.next == h {
		w.used[t.slot>>6] &^= 1 << (t.slot & 63)
	}
}

// next is when the next used slot is due.
func (w *wheel) next() (at int64, ok bool) {
	if w.n == 0 {
		return 0, false
	}
	for d := int64(1); d <= slots; {
		s := (w.tick + d) & (slots - 1)
		if word := w.used[s>>6] >> (s & 63); word != 0 {
			return (w.tick + d + int64(bits.TrailingZeros64(word))) << w.shift, true
		}
		d += 64 - s&63
	}
	return 0, false
}

func (w *wheel) advance(l *Loop, now int64) {
	to := now >> w.shift
	if to <= w.tick || w.n == 0 {
		w.tick = max(w.tick, to)
		return
	}
	w.turns = true
	defer func() { w.turns = false }()
	w.tick = max(w.tick, to-slots) // after a jump of more than a turn, one turn sees every timer
	for ran := 0; w.tick < to; {
		w.tick++
		h := &w.head[w.tick&(slots-1)]
		for h.next != h { // what is filed meanwhile goes to a later ring
			if ran == maxTimers {
				w.tick-- // this ring is due in the next iteration
				return
			}
			t := h.next
			w.unlink(t)
			if t.deadline > now {
				l.file(t)
				continue
			}
			t.armed = false
			task := t.task
			t.task = nil
			if task != nil {
				ran++
				l.task(task)
			}
		}
	}
}
