package server

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"aether/mtls/spiffeid"
)

// Bounds of a watcher.
const (
	// maxEvents that wait for one watcher: rows of as many keys, for what is said of a
	// key replaces what waits.
	maxEvents = 8192
	// maxEventBytes of rows that wait for one watcher.
	maxEventBytes = 8 << 20
	// maxAllEvents wait for all watchers together.
	maxAllEvents = 1 << 20
	// fewEvents may wait for a watcher even then.
	fewEvents = 64
	// stallTime is how long a watcher may take nothing while something waits for it.
	stallTime = time.Minute
	// keepIndex is the largest index of a queue that is used again.
	keepIndex = 64
)

// partial is the version of an event that is not the last of what a watcher was told
// in one go: the state that it leaves behind is none that there ever was, so no state
// is called that, and whoever comes back with it is told everything.
const partial = "-"

var partialPart = versionPart(partial)

type eventKey struct {
	service string
	rowKey  // zero: the service's place in the catalog
}

// event is what watchers are told of a key.
type event struct {
	typ  eventType
	key  eventKey
	body mem.Buffer
}

// turn is in which order the events of a queue go: a service's name stands in the
// catalog before its rows come, and until they have gone.
func (e *event) turn() int {
	switch e.typ {
	case serviceAdded:
		return 0
	case serviceRemoved:
		return 2
	}
	return 1
}

// watchName tells watches apart: a further one of the same name replaces the first.
type watchName struct {
	peer                    spiffeid.ID // who asks: nobody ends the watch of another identity
	cluster, node, instance string
}

// watcher is one stream of WatchEndpoints.
type watcher struct {
	name   watchName
	all    bool     // no filter
	filter []string // ascending, each once; nothing if all

	ended chan struct{} // closed once the stream is to end, for the reason in why
	wake  chan struct{}
	total *atomic.Int64 // of all watchers' queues
	max   int           // events that may wait

	// sent counts messages, for whoever looks whether it stands still; busy: one is being
	// sent, or there are more that have left the queue.
	sent atomic.Uint64
	busy atomic.Bool

	mu    sync.Mutex
	why   *status.Status // guarded by mu, as all below; nil: the watch goes on
	sum   digest         // of what it has been told, once all of the queue has
	queue []event
	index map[eventKey]int // of queue
	bytes int              // of queue's bodies

	// Of the look at whether it stands still, by one goroutine.
	sentThen uint64
	sinceAt  time.Time
}

// tell adds events to the queue, and sum to what the watcher knows after them. It
// never waits: for whom too much waits, the watch ends.
func (w *watcher) tell(events []event, sum digest) (slow bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.why != nil {
		return false
	}
	w.sum = w.sum.plus(sum)
	before := len(w.queue)
	for _, e := range events {
		i, ok := w.index[e.key]
		if ok {
			switch was := w.queue[i].typ; {
			case was == endpointAdded && e.typ == endpointUpdated:
				e.typ = endpointAdded // it has not heard of the row yet
			case was == endpointRemoved && e.typ == endpointAdded:
				e.typ = endpointUpdated
			}
			w.bytes += e.body.Len() - w.queue[i].body.Len()
			w.queue[i] = e
			continue
		}
		if w.index == nil {
			w.index = map[eventKey]int{}
		}
		w.index[e.key] = len(w.queue)
		w.queue = append(w.queue, e)
		w.bytes += e.body.Len()
		if len(w.queue) > w.max {
			break
		}
	}
	total := w.total.Add(int64(len(w.queue) - before))
	if len(w.queue) > w.max || w.bytes > maxEventBytes || total > maxAllEvents && len(w.queue) > fewEvents {
		w.endLocked(errSlow)
		return true
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
	return false
}

var (
	errSlow     = status.New(codes.DataLoss, "the watcher does not read as fast as the mesh changes: watch again for a full snapshot")
	errStalled  = status.New(codes.DataLoss, "the watcher has taken nothing for "+stallTime.String()+": watch again for a full snapshot")
	errReplaced = status.New(codes.Aborted, "another watch of this node and instance has begun")
	errLeaving  = status.New(codes.Unavailable, "this registrar is leaving: watch another one")
)

// end ends the watch for a reason; the first one counts.
func (w *watcher) end(why *status.Status) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.endLocked(why)
}

func (w *watcher) endLocked(why *status.Status) {
	if w.why != nil {
		return
	}
	w.why = why
	w.total.Add(-int64(len(w.queue)))
	w.queue, w.index, w.bytes = nil, nil, 0
	close(w.ended)
}

// take is all that waits, in the order in which it may be sent, and the version of
// what the watcher knows after it. buf is used again.
func (w *watcher) take(buf []event) (events []event, version string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) == 0 {
		return nil, ""
	}
	events, w.queue, w.bytes = w.queue, buf[:0], 0
	w.total.Add(-int64(len(events)))
	if len(w.index) > keepIndex {
		w.index = nil
	} else {
		clear(w.index)
	}
	slices.SortStableFunc(events, func(a, b event) int { return a.turn() - b.turn() })
	return events, w.sum.String()
}

// stalled reports whether nothing has been sent for stallTime although something
// waits, or is being sent, as the first snapshot. One goroutine calls it.
func (w *watcher) stalled(now time.Time) bool {
	sent := w.sent.Load()
	w.mu.Lock()
	defer w.mu.Unlock()
	if sent != w.sentThen || len(w.queue) == 0 && !w.busy.Load() || w.sinceAt.IsZero() {
		w.sentThen, w.sinceAt = sent, now
		return false
	}
	return now.Sub(w.sinceAt) >= stallTime
}

// first is what a watcher is told when it comes.
type first struct {
	rows    [][]*row
	clear   bool    // it has something, and there are no rows
	behind  *behind // in place of rows: what has changed since the version that it has; counted in watcher.total
	since   string  // that version
	names   []mem.Buffer
	version string
}

// sender sends frames; grpc.ServerStream is one.
type sender interface{ SendMsg(m any) error }

// send tells what there was when the watcher came, and then what changes, until the
// stream ends.
func (w *watcher) send(to sender, begin *first) error {
	w.busy.Store(true)
	var changes []event
	owed := int64(0) // of total
	if begin.behind != nil {
		changes, owed = begin.behind.events(), int64(begin.behind.n)
	}
	told := func() {
		w.total.Add(-owed)
		owed, changes = 0, nil
	}
	defer told()
	var f frame
	say := func(h, body, version mem.Buffer) error {
		f.parts = [3]mem.Buffer{h, body, version}
		err := to.SendMsg(&f)
		w.sent.Add(1)
		return err
	}
	for _, rows := range begin.rows {
		for _, r := range rows {
			if err := say(head(fullSnapshot, r.protocol), r.body, partialPart); err != nil {
				return err
			}
		}
	}
	if begin.clear { // a client forgets what it has at the first FULL_SNAPSHOT: here is one, without a row
		if err := say(head(fullSnapshot, 0), nil, partialPart); err != nil {
			return err
		}
	}
	for i := range changes {
		e := &changes[i]
		if err := say(head(e.typ, e.key.protocol), e.body, partialPart); err != nil {
			return err
		}
	}
	told()
	for _, n := range begin.names {
		if err := say(head(serviceAdded, 0), n, partialPart); err != nil {
			return err
		}
	}
	var since mem.Buffer
	if begin.since != "" {
		since = stringPart(fieldSince, begin.since)
	}
	if err := say(head(snapshotComplete, 0), since, versionPart(begin.version)); err != nil {
		return err
	}
	*begin = first{} // what has changed since need not be kept
	var buf []event
	for {
		events, version := w.take(buf)
		for i := range events {
			e := &events[i]
			v := partialPart
			if i == len(events)-1 {
				v = versionPart(version)
			}
			if err := say(head(e.typ, e.key.protocol), e.body, v); err != nil {
				return err
			}
		}
		if len(events) > 0 {
			buf = nil
			if cap(events) <= keepIndex {
				clear(events)
				buf = events
			}
			continue
		}
		w.busy.Store(false)
		select {
		case <-w.wake:
		case <-w.ended:
			return nil
		}
		w.busy.Store(true)
	}
}
