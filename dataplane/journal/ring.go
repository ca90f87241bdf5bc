package journal

import (
	"sync"
	"time"

	"aether/dataplane/model"
)

// staleAfter is how much older than the newest entry one is that makes room before
// those of the pod that has the most: pods that are gone do not keep a share for ever.
const staleAfter = time.Hour

// Ring keeps the last entries: of each pod, and of each direction of its traffic, its
// share at least. While there is room anybody has it; then whoever holds more than
// its share makes room, and a pod that holds its share makes room for its own next
// entry. Make it with NewRing.
type Ring struct {
	mu       sync.Mutex
	all, bad ring
}

// NewRing makes a ring of the last n entries, and as many refusals and failures. Its
// memory is taken at once, and does not grow with the number of pods beyond n.
func NewRing(n int) *Ring { return &Ring{all: newRing(n), bad: newRing(n)} }

// Ended is Observer.
func (r *Ring) Ended(e *Entry) {
	r.mu.Lock()
	r.all.add(e)
	if e.Bad() {
		r.bad.add(e)
	}
	r.mu.Unlock()
}

// Last returns up to n entries, the newest first; bad: refusals and failures only.
func (r *Ring) Last(n int, bad bool) []Entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &r.all
	if bad {
		s = &r.bad
	}
	n = min(n, s.used)
	out := make([]Entry, 0, n)
	for i := s.newest; len(out) < n; i = s.slots[i].before {
		out = append(out, s.slots[i].Entry)
	}
	return out
}

// ring is the entries of one kind: slots in the order in which they were told, and
// those of a holder in the same order.
type ring struct {
	slots          []slot
	used           int
	oldest, newest int // slots; of no meaning while used is 0
	holders        []*holder
	of             map[whose]*holder
	free           []*holder // that hold nothing
}

type slot struct {
	Entry
	holder        *holder
	before, after int // slots of the entries told before and after it
	next          int // the slot of the holder's next entry
}

// whose are the entries that make room for each other. The direction is part of it, so that what
// callers make a pod refuse does not hide what the pod itself fails at.
type whose struct {
	namespace, pod string
	dir            model.Direction
}

// holder is one that has entries here.
type holder struct {
	whose       whose
	at          int // in holders
	first, last int // slots of its oldest and its newest entry
	n           int // entries
}

func newRing(n int) ring { return ring{slots: make([]slot, n), of: map[whose]*holder{}} }

func (r *ring) add(e *Entry) {
	h := r.holder(whose{e.Namespace, e.Pod, e.Dir})
	i := r.used
	if i == len(r.slots) {
		i = r.room(h, e.At)
	}
	s := &r.slots[i]
	s.Entry, s.holder, s.before = *e, h, r.newest
	if r.used > 0 {
		r.slots[r.newest].after = i
	} else {
		r.oldest = i
	}
	r.newest = i
	r.used++
	if h.n > 0 {
		r.slots[h.last].next = i
	} else {
		h.first = i
	}
	h.last = i
	h.n++
}

// holder finds who holds entries of w, or makes one that holds none.
func (r *ring) holder(w whose) *holder {
	h := r.of[w]
	if h != nil {
		return h
	}
	if k := len(r.free); k > 0 {
		h, r.free = r.free[k-1], r.free[:k-1]
	} else {
		h = &holder{}
	}
	*h = holder{whose: w, at: len(r.holders)}
	r.holders = append(r.holders, h)
	r.of[w] = h
	return h
}

// room takes an entry out of a full ring, for one of h that is told at now, and returns its slot.
func (r *ring) room(h *holder, now time.Time) int {
	i := r.oldest
	if now.Sub(r.slots[i].At) < staleAfter {
		most := h
		if h.n < max(len(r.slots)/len(r.holders), 1) {
			for _, x := range r.holders {
				if x.n > most.n || x.n == most.n && x.n > 0 && r.slots[x.first].At.Before(r.slots[most.first].At) {
					most = x
				}
			}
		}
		i = most.first
	}
	s := &r.slots[i]
	if i == r.oldest {
		r.oldest = s.after
	} else {
		r.slots[s.before].after = s.after
	}
	if i == r.newest {
		r.newest = s.before
	} else {
		r.slots[s.after].before = s.before
	}
	r.used--
	r.forget(s.holder, h)
	return i
}

// forget takes the oldest entry from x, and x from the holders when it has no other, unless it is about to have one.
func (r *ring) forget(x, unless *holder) {
	x.first = r.slots[x.first].next
	if x.n--; x.n > 0 || x == unless {
		return
	}
	last := r.holders[len(r.holders)-1]
	r.holders[x.at], last.at = last, x.at
	r.holders = r.holders[:len(r.holders)-1]
	delete(r.of, x.whose)
	r.free = append(r.free, x)
}
