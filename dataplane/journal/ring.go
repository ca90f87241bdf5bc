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
	for i := s.newest; len(out) < n; i = s.links[i].before {
		out = append(out, s.slots[i])
	}
	return out
}

// ring is the entries of one kind: slots in the order in which they were told, and
// those of a holder in the same order.
type ring struct {
	slots          []Entry
	links          []link // of each slot: apart, so that a few lines of cache hold them
	used           int
	oldest, newest int32 // slots; of no meaning while used is 0
	holders        []*holder
	of             map[whose]*holder
	free           []*holder // that hold nothing
	recent         *holder   // who was told of last: most often one pod has a loop's attention for a while
}

type link struct {
	holder        *holder
	at            int64 // when the entry ended, in nanoseconds
	before, after int32 // slots of the entries told before and after it
	next          int32 // the slot of the holder's next entry
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
	at          int   // in holders
	first, last int32 // slots of its oldest and its newest entry
	n           int   // entries
}

func newRing(n int) ring {
	return ring{slots: make([]Entry, n), links: make([]link, n), of: map[whose]*holder{}}
}

func (r *ring) add(e *Entry) {
	h := r.holder(whose{e.Namespace, e.Pod, e.Dir})
	i, at := int32(r.used), e.At.UnixNano()
	if r.used == len(r.slots) {
		i = r.room(h, at)
	}
	r.slots[i] = *e
	r.links[i] = link{holder: h, at: at, before: r.newest}
	if r.used > 0 {
		r.links[r.newest].after = i
	} else {
		r.oldest = i
	}
	r.newest = i
	r.used++
	if h.n > 0 {
		r.links[h.last].next = i
	} else {
		h.first = i
	}
	h.last = i
	h.n++
}

// holder finds who holds entries of w, or makes one that holds none.
func (r *ring) holder(w whose) *holder {
	if r.recent != nil && r.recent.whose == w {
		return r.recent
	}
	h := r.of[w]
	if h != nil {
		r.recent = h
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
func (r *ring) room(h *holder, now int64) int32 {
	i := r.oldest
	if now-r.links[i].at < int64(staleAfter) {
		most := h
		if h.n < max(len(r.slots)/len(r.holders), 1) {
			for _, x := range r.holders {
				if x.n > most.n || x.n == most.n && x.n > 0 && r.links[x.first].at < r.links[most.first].at {
					most = x
				}
			}
		}
		i = most.first
	}
	s := &r.links[i]
	if i == r.oldest {
		r.oldest = s.after
	} else {
		r.links[s.before].after = s.after
	}
	if i == r.newest {
		r.newest = s.before
	} else {
		r.links[s.after].before = s.before
	}
	r.used--
	r.forget(s.holder, h)
	return i
}

// forget takes the oldest entry from x, and x from the holders when it has no other, unless it is about to have one.
func (r *ring) forget(x, unless *holder) {
	x.first = r.links[x.first].next
	if x.n--; x.n > 0 || x == unless {
		return
	}
	last := r.holders[len(r.holders)-1]
	r.holders[x.at], last.at = last, x.at
	r.holders = r.holders[:len(r.holders)-1]
	delete(r.of, x.whose)
	if r.recent == x {
		r.recent = nil
	}
	r.free = append(r.free, x)
}
