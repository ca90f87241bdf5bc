package engine

import (
	"sync"
	"time"
)

// Relays are the relays that run: connections that have left the loops for goroutines.
// The zero value is empty. Safe for concurrent use.
type Relays struct {
	mu  sync.Mutex
	all map[*openRelay]struct{} // guarded by mu
}

type openRelay struct {
	state ConnState
	since time.Time
}

// Add notes one, and returns what is to be called once it is over. s is all of it but
// State and ages.
func (r *Relays) Add(s ConnState) (over func()) {
	o := &openRelay{s, time.Now()}
	o.state.State = "relay"
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all = map[*openRelay]struct{}{}
	}
	r.all[o] = struct{}{}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.all, o)
	}
}

// Len is how many there are.
func (r *Relays) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.all)
}

// List tells of up to limit, of pod ("": of all), and how many there are.
func (r *Relays) List(pod string, limit int) (list []ConnState, total int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for o := range r.all {
		if pod != "" && o.state.Pod != pod {
			continue
		}
		if total++; len(list) < limit {
			s := o.state
			s.AgeMS = time.Since(o.since).Milliseconds()
			list = append(list, s)
		}
	}
	return list, total
}
