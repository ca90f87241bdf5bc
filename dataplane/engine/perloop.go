package engine

import "sync"

// PerLoop keeps one T for each loop: what a service shares among the
// connections of a loop and, being the loop's own, needs no lock for.
type PerLoop[T any] struct {
	// Make makes the T of a loop, when it is first asked for.
	Make func(*Loop) *T

	mu sync.Mutex
	m  map[*Loop]*T // guarded by mu
}

// Get is l's T. Safe for concurrent use; what it returns is for l alone.
func (p *PerLoop[T]) Get(l *Loop) *T {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.m[l]
	if t == nil {
		if p.m == nil {
			p.m = map[*Loop]*T{}
		}
		t = p.Make(l)
		p.m[l] = t
	}
	return t
}

// Each runs f on every loop that has a T. It does not wait. Safe for concurrent use.
func (p *PerLoop[T]) Each(f func(*T)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l, t := range p.m {
		_ = l.Post(func() { f(t) }) // a loop that has ended has nothing left to do
	}
}
