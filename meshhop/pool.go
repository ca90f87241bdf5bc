package meshhop

import "iter"

// MaxSessions is how many sessions a key has at most, dials under way included
// (design 4.7).
const MaxSessions = 4

// Pool keeps the sessions of one loop, by key. T is the loop's own session type.
// The zero value is not usable; NewPool makes one. Not safe for concurrent use:
// it holds no lock, because a pod's sessions live on one loop.
type Pool[T comparable] struct {
	pods map[string]map[Key]*slot[T]
	n    int
}

type slot[T comparable] struct {
	sessions [MaxSessions]T
	n        int // of sessions
	dialing  int
}

// NewPool returns an empty Pool.
func NewPool[T comparable]() *Pool[T] {
	return &Pool[T]{pods: map[string]map[Key]*slot[T]{}}
}

// Get returns the sessions of k, oldest first, and how many dials for k are under
// way. The slice is the pool's own: valid until its next change, not to be
// written to. Allocates nothing.
func (p *Pool[T]) Get(k Key) (sessions []T, dialing int) {
	s := p.pods[k.Pod][k]
	if s == nil {
		return nil, 0
	}
	return s.sessions[:s.n], s.dialing
}

// Place is room for one session, taken by Reserve. The zero value is no room.
type Place[T comparable] struct {
	key  Key
	slot *slot[T]
}

// Reserve takes one of k's places for a dial and reports whether there was one.
// Each place is given to one Put or one Release.
func (p *Pool[T]) Reserve(k Key) (Place[T], bool) {
	keys := p.pods[k.Pod]
	if keys == nil {
		keys = map[Key]*slot[T]{}
		p.pods[k.Pod] = keys
	}
	s := keys[k]
	if s == nil {
		s = &slot[T]{}
		keys[k] = s
	}
	if s.n+s.dialing >= MaxSessions {
		return Place[T]{}, false
	}
	s.dialing++
	return Place[T]{k, s}, true
}

// Release gives back a place that no session fills.
func (p *Pool[T]) Release(at Place[T]) {
	if s := at.slot; p.holds(at) {
		s.dialing--
		p.tidy(at.key, s)
	}
}

// Put adds a session in the place that was reserved for it. It reports false, and
// adds nothing, when the place is gone: the pod was dropped while the dial was
// under way, and the session must be closed.
func (p *Pool[T]) Put(at Place[T], t T) bool {
	s := at.slot
	if !p.holds(at) {
		return false
	}
	s.dialing--
	s.sessions[s.n] = t
	s.n++
	p.n++
	return true
}

// holds: at is of this pool and its pod was not dropped since.
func (p *Pool[T]) holds(at Place[T]) bool {
	return at.slot != nil && p.pods[at.key.Pod][at.key] == at.slot && at.slot.dialing > 0
}

// Remove forgets session t of k and reports whether it was there.
func (p *Pool[T]) Remove(k Key, t T) bool {
	s := p.pods[k.Pod][k]
	if s == nil {
		return false
	}
	for i, have := range s.sessions[:s.n] {
		if have == t {
			copy(s.sessions[i:], s.sessions[i+1:s.n])
			s.n--
			clear(s.sessions[s.n : s.n+1]) // keep nothing alive
			p.n--
			p.tidy(k, s)
			return true
		}
	}
	return false
}

// Drop forgets everything of a pod, reserved places too, and returns its
// sessions, which the caller closes: the pod is gone or its identity revoked.
func (p *Pool[T]) Drop(pod string) []T {
	var all []T
	for _, s := range p.pods[pod] {
		all = append(all, s.sessions[:s.n]...)
	}
	p.n -= len(all)
	delete(p.pods, pod)
	return all
}

// Pod yields the sessions of a pod in no order. The pool must not change meanwhile.
func (p *Pool[T]) Pod(pod string) iter.Seq2[Key, T] {
	return func(yield func(Key, T) bool) {
		for k, s := range p.pods[pod] {
			for _, t := range s.sessions[:s.n] {
				if !yield(k, t) {
					return
				}
			}
		}
	}
}

// All yields every session in no order. The pool must not change meanwhile.
func (p *Pool[T]) All() iter.Seq2[Key, T] {
	return func(yield func(Key, T) bool) {
		for pod := range p.pods {
			for k, t := range p.Pod(pod) {
				if !yield(k, t) {
					return
				}
			}
		}
	}
}

// Len returns the number of sessions.
func (p *Pool[T]) Len() int { return p.n }

// tidy lets go of a slot that holds nothing.
func (p *Pool[T]) tidy(k Key, s *slot[T]) {
	if s.n > 0 || s.dialing > 0 {
		return
	}
	keys := p.pods[k.Pod]
	delete(keys, k)
	if len(keys) == 0 {
		delete(p.pods, k.Pod)
	}
}
