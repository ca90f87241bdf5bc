package telemetry

import (
	"sync"
	"time"
)

// maxCauses bounds the causes that a limiter keeps apart.
const maxCauses = 4096

// limiter lets a cause have n lines in a while, and counts those it may not. Safe for
// concurrent use.
type limiter[K comparable] struct {
	n     int
	every time.Duration

	mu     sync.Mutex
	causes map[K]*share // guarded by mu, at most maxCauses
}

type share struct {
	at      time.Time // of the first line of this while
	n       int       // lines since
	without int       // left out since the last line
}

// allow asks for a line of cause k; without is how many were left out since the last one.
func (r *limiter[K]) allow(k K, now time.Time) (without int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.causes[k]
	if s == nil {
		if r.causes == nil || len(r.causes) >= maxCauses {
			r.causes = map[K]*share{} // rather a line too many than a map without end
		}
		s = &share{at: now}
		r.causes[k] = s
	}
	if now.Sub(s.at) >= r.every {
		s.at, s.n = now, 0
	}
	if s.n >= r.n {
		s.without++
		return 0, false
	}
	s.n++
	without, s.without = s.without, 0
	return without, true
}

// suppressed forgets the causes whose while is over, and returns how many lines of each
// were left out with none after them.
func (r *limiter[K]) suppressed(now time.Time) map[K]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	var left map[K]int
	for k, s := range r.causes {
		if now.Sub(s.at) < r.every {
			continue
		}
		if s.without > 0 {
			if left == nil {
				left = map[K]int{}
			}
			left[k] = s.without
		}
		delete(r.causes, k)
	}
	return left
}
