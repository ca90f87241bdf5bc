package telemetry

import (
	"log/slog"
	"time"
)

// Quiet logs a cause when it first occurs, and again only after a while, with
// how often it occurred meanwhile: a dead endpoint under load is one line a minute.
// Safe for concurrent use.
type Quiet struct {
	log    *slog.Logger
	now    func() time.Time
	ration ration[string]
}

// NewQuiet makes a Quiet: a line a cause and every. now may be nil: time.Now.
func NewQuiet(log *slog.Logger, every time.Duration, now func() time.Time) *Quiet {
	if now == nil {
		now = time.Now
	}
	return &Quiet{log: log, now: now, ration: ration[string]{n: 1, every: every}}
}

// Warn logs msg with args, unless the cause called key was logged lately.
func (q *Quiet) Warn(key, msg string, args ...any) {
	more, ok := q.ration.take(key, q.now())
	if !ok {
		return
	}
	if more > 0 {
		args = append(args, "repeated", more)
	}
	q.log.Warn(msg, args...)
}
