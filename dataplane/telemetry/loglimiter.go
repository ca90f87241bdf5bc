package telemetry

import (
	"log/slog"
	"time"
)

// LogLimiter logs a cause when it first occurs, and again only after a while, with
// how often it occurred meanwhile: a dead endpoint under load is one line a minute.
// Safe for concurrent use.
type LogLimiter struct {
	log    *slog.Logger
	now    func() time.Time
	ration limiter[string]
}

// NewLogLimiter makes a LogLimiter: one line for each cause in each interval of every. now may be nil: time.Now.
func NewLogLimiter(log *slog.Logger, every time.Duration, now func() time.Time) *LogLimiter {
	if now == nil {
		now = time.Now
	}
	return &LogLimiter{log: log, now: now, ration: limiter[string]{n: 1, every: every}}
}

// Warn logs msg with args, unless the cause called key was logged lately.
func (q *LogLimiter) Warn(key, msg string, args ...any) {
	more, ok := q.ration.allow(key, q.now())
	if !ok {
		return
	}
	if more > 0 {
		args = append(args, "repeated", more)
	}
	q.log.Warn(msg, args...)
}
