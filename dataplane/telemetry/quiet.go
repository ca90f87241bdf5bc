package telemetry

import (
	"log/slog"
	"sync"
	"time"
)

// Quiet logs a cause when it first occurs, and again only after a while, with
// how often it occurred meanwhile: a dead endpoint under load is one line a minute.
// Safe for concurrent use.
type Quiet struct {
	log   *slog.Logger
	now   func() time.Time
	every time.Duration

	mu     sync.Mutex
	causes map[string]*cause // guarded by mu, at most maxCauses
}

type cause struct {
	at   time.Time // of the last line
	more int       // since then
}

const maxCauses = 1024

// NewQuiet makes a Quiet: a line a cause and every. now may be nil: time.Now.
func NewQuiet(log *slog.Logger, every time.Duration, now func() time.Time) *Quiet {
	if now == nil {
		now = time.Now
	}
	return &Quiet{log: log, now: now, every: every, causes: map[string]*cause{}}
}

// Warn logs msg with args, unless the cause called key was logged lately.
func (q *Quiet) Warn(key, msg string, args ...any) {
	now := q.now()
	q.mu.Lock()
	c := q.causes[key]
	if c != nil && now.Sub(c.at) < q.every {
		c.more++
		q.mu.Unlock()
		return
	}
	more := 0
	if c != nil {
		more = c.more
	} else if len(q.causes) >= maxCauses {
		clear(q.causes) // rather a line twice than a map without end
	}
	q.causes[key] = &cause{at: now}
	q.mu.Unlock()
	if more > 0 {
		args = append(args, "repeated", more)
	}
	q.log.Warn(msg, args...)
}
