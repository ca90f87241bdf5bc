package reactor

import "math/bits"

// The wheel has slots of 2^26 ns (67 ms); a timer more than one turn (34 s)
// away goes round until its deadline is in this turn. Deadlines are therefore
// met late by at most one slot: enough for idle, head and connect limits.
const (
	slotShift = 26
	slots     = 512
)

// Timer calls a Task once its deadline has passed. The zero value is ready.
// It belongs to one loop; moving the deadline later is free.
type Timer struct {
	next, prev *Timer
	slot       int32
	armed      bool
	deadline   int64
	at         int64 // where it is filed: the deadline when last filed
	task       Task
}

// Armed reports whether the timer is running.
func (t *Timer) Armed() bool { return t.armed }

type wheel struct {
	head [slots]Timer // ring heads
	used [slots / 64]uint64
	tick int64 // the slot number that was last run
	n    int
}

func (w *wheel) init(now int64) {
	for i := range w.head {
		w.head[i].next, w.head[i].prev = &w.head[i], &w.head[i]
	}
	w.tick = now >> slotShift
}

// Arm starts t: task runs after d nanoseconds. Arming a running timer moves it.
func (l *Loop) Arm(t *Timer, task Task, d int64) {
	at := l.now + d
	t.task = task
	if t.armed {
		if at >= t.at { // later: it is looked at again when the old place comes up
			t.deadline = at
			return
		}
		l.wheel.unlink(t)
	}
	t.deadline = at
	t.armed = true
	l.wheel.file(t)
}

// Disarm stops t; its task will not run.
func (l *Loop) Disarm(t *Timer) {
	if t.armed {
		l.wheel.unlink(t)
		t.armed = false
	}
	t.task = nil
}

func (w *wheel) file(t *Timer) {
	k := t.deadline>>slotShift + 1 // the first slot that is wholly past the deadline
	if k <= w.tick {
		k = w.tick + 1
	}
	if k-w.tick >= slots { // beyond one turn: as far as the wheel goes
		k = w.tick + slots - 1
	}
	t.at = k << slotShift
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
	t.next, t.prev = nil, nil
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
			return (w.tick + d + int64(bits.TrailingZeros64(word))) << slotShift, true
		}
		d += 64 - s&63
	}
	return 0, false
}

func (w *wheel) advance(l *Loop, now int64) {
	to := now >> slotShift
	if to <= w.tick || w.n == 0 {
		w.tick = max(w.tick, to)
		return
	}
	w.tick = max(w.tick, to-slots) // after a jump of more than a turn, one turn sees every timer
	for w.tick < to {
		w.tick++
		h := &w.head[w.tick&(slots-1)]
		// Take the whole ring first: what is filed meanwhile waits for its turn.
		for h.next != h {
			t := h.next
			w.unlink(t)
			if t.deadline > now {
				w.file(t)
				continue
			}
			t.armed = false
			task := t.task
			t.task = nil
			if task != nil {
				l.task(task)
			}
		}
	}
}
