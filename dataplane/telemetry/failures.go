package telemetry

import (
	"context"
	"io"
	"strconv"
	"sync"
	"time"

	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/plain"
)

// Bounds of the failure log.
const (
	failureRate    = 10          // lines a second, cause and pod
	failureQueue   = 512         // lines that wait to be written
	failureShare   = 128         // of these, of one pod
	failureDrain   = time.Second // for what waits when Run ends
	failureSummary = 10 * time.Second
)

// FailureConfig of Failures. Only Out is required.
type FailureConfig struct {
	Out io.Writer        // gets a line a Write; called by Run only
	Now func() time.Time // nil: time.Now
}

// Failures is a journal.Observer that writes a line of JSON for every request and
// connection that failed (journal.Entry.Failed), at most failureRate a second, cause
// and pod. A line that follows others which were left out says how many (suppressed);
// of a cause that does not come again a line of its own does, within failureSummary.
//
// Whoever tells of an entry does not wait: the entry is copied into a bounded queue,
// and Run writes. What finds the queue, or its pod's share of it, full is counted
// (Dropped). Safe for concurrent use.
type Failures struct {
	out io.Writer
	now func() time.Time

	// Dropped are the lines that found the queue, or their pod's share of it, full.
	Dropped Counter
	// Suppressed are those that their cause had too many of.
	Suppressed Counter

	queue   chan failure
	limiter limiter[failureCause]

	mu      sync.Mutex
	waiting map[failurePod]int // lines in queue; of no more pods than queue has lines
}

type failurePod struct{ namespace, pod string }

type failure struct {
	e          journal.Entry
	suppressed int
}

// failureCause is what lines are rationed by: pods of the node and closed sets, so that no
// peer's bytes make one, and no pod's failures hide another's.
type failureCause struct {
	failurePod
	dir           model.Direction
	flags         journal.Flags
	reason, cause string
}

// NewFailures makes a Failures; Run writes.
func NewFailures(c FailureConfig) *Failures {
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Failures{out: c.Out, now: c.Now, queue: make(chan failure, failureQueue), limiter: limiter[failureCause]{n: failureRate, every: time.Second},
		waiting: map[failurePod]int{}}
}

// Ended is journal.Observer.
func (f *Failures) Ended(e *journal.Entry) {
	if !e.Failed() {
		return
	}
	pod := failurePod{e.Namespace, e.Pod}
	without, ok := f.limiter.allow(failureCause{pod, e.Dir, e.Flags, e.Reason, e.Cause}, f.now())
	if !ok {
		f.Suppressed.Inc()
		return
	}
	if !f.wait(pod, 1) {
		f.Dropped.Inc()
		return
	}
	select {
	case f.queue <- failure{*e, without}:
	default:
		f.wait(pod, -1)
		f.Dropped.Inc()
	}
}

// wait adds n to the lines of a pod that wait; it does not, and returns false, where they are its share already.
func (f *Failures) wait(pod failurePod, n int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch n += f.waiting[pod]; {
	case n > failureShare:
		return false
	case n == 0:
		delete(f.waiting, pod)
	default:
		f.waiting[pod] = n
	}
	return true
}

// line appends the line of a failure that was taken from the queue.
func (f *Failures) line(b []byte, x *failure) []byte {
	f.wait(failurePod{x.e.Namespace, x.e.Pod}, -1)
	return appendFailure(b, &x.e, x.suppressed)
}

// Run writes until ctx ends, and then for at most failureDrain what waits.
func (f *Failures) Run(ctx context.Context) {
	tick := time.NewTicker(failureSummary)
	defer tick.Stop()
	var line []byte
	write := func(b []byte) {
		_, _ = f.out.Write(b) // there is nowhere to say that the log cannot be written
		line = b[:0]
	}
	summary := func() {
		now := f.now()
		for k, n := range f.limiter.suppressed(now) {
			write(appendSummary(line, k, n, now))
		}
	}
	for {
		select {
		case x := <-f.queue:
			write(f.line(line, &x))
		case <-tick.C:
			summary()
		case <-ctx.Done():
			end := time.Now().Add(failureDrain)
			for time.Now().Before(end) {
				select {
				case x := <-f.queue:
					write(f.line(line, &x))
				default:
					summary()
					return
				}
			}
			return
		}
	}
}

// stamp is RFC 3339 in UTC with milliseconds (contract 17).
const stamp = "2006-01-02T15:04:05.000Z07:00"

// appendFailure appends the line of e. Its names are a promise to whoever reads logs by program.
func appendFailure(b []byte, e *journal.Entry, suppressed int) []byte {
	b = append(b, `{"time":"`...)
	b = e.At.UTC().AppendFormat(b, stamp)
	b = append(b, `","msg":"failed"`...)
	b = text(b, "kind", kinds[kindOf(e)])
	b = text(b, "reporter", reporter(e.Dir))
	b = text(b, "direction", e.Dir.String())
	b = text(b, "namespace", e.Namespace)
	b = text(b, "pod", e.Pod)
	b = text(b, "container", e.Container)
	b = text(b, "service_account", e.Workload)
	b = text(b, "peer", e.Peer)
	if e.Request {
		b = text(b, "method", e.Method.String())
		b = text(b, "authority", e.Host.String())
		b = text(b, "path", e.Path.String())
		b = number(b, "status", int64(e.Status))
	} else {
		b = text(b, "server_name", e.Host.String())
	}
	b = text(b, "flags", e.Flags.String())
	b = text(b, "details", e.Details)
	b = text(b, "cause", e.Cause)
	b = text(b, "fault", e.Fault)
	b = text(b, "action", e.Action)
	b = text(b, "reason", e.Reason)
	b = text(b, "rule", e.Rule)
	b = text(b, "audit_filter", e.AuditFilter)
	b = text(b, "audit_policy", e.AuditPolicy)
	b = text(b, "backend", e.Backend)
	if e.Endpoint.IsValid() {
		b = text(b, "endpoint", e.Endpoint.String())
	} else if e.Socket != "" {
		b = text(b, "endpoint", e.Socket)
	}
	if e.Dst.IsValid() {
		b = text(b, "destination", e.Dst.String())
	}
	b = number(b, "attempts", int64(e.Attempts))
	b = number(b, "bytes_in", e.BytesIn)
	b = number(b, "bytes_out", e.BytesOut)
	b = append(b, `,"duration_ms":`...)
	b = strconv.AppendFloat(b, float64(e.Took.Microseconds())/1000, 'f', -1, 64)
	b = text(b, "ended", e.Ended)
	b = text(b, "outcome", e.Outcome.String())
	b = text(b, "request_id", e.RequestID.String())
	if suppressed > 0 {
		b = number(b, "suppressed", int64(suppressed))
	}
	return append(b, "}\n"...)
}

func appendSummary(b []byte, k failureCause, n int, at time.Time) []byte {
	b = append(b, `{"time":"`...)
	b = at.UTC().AppendFormat(b, stamp)
	b = append(b, `","msg":"suppressed"`...)
	b = text(b, "reporter", reporter(k.dir))
	b = text(b, "direction", k.dir.String())
	b = text(b, "namespace", k.namespace)
	b = text(b, "pod", k.pod)
	b = text(b, "flags", k.flags.String())
	b = text(b, "cause", k.cause)
	b = text(b, "reason", k.reason)
	b = number(b, "suppressed", int64(n))
	return append(b, "}\n"...)
}

func kindOf(e *journal.Entry) int {
	if e.Request {
		return 1
	}
	return 0
}

// reporter is contract 14.1's.
func reporter(d model.Direction) string {
	if d == model.Inbound {
		return "destination"
	}
	return "source"
}

func number(b []byte, name string, n int64) []byte {
	b = append(append(append(b, `,"`...), name...), `":`...)
	return strconv.AppendInt(b, n, 10)
}

// text appends a member whose value may be anybody's bytes: what is left of it is
// valid JSON on one line, and nothing that a terminal would act upon. What is empty is left out.
func text(b []byte, name, value string) []byte {
	if value == "" {
		return b
	}
	b = append(append(append(b, `,"`...), name...), `":"`...)
	return append(plain.AppendJSON(b, value), '"')
}
