package engine

import (
	"aether/dataplane/exchange"
	"aether/dataplane/reactor"
	"sync"
	"sync/atomic"
)

// Pod is the engine's side of one pod: its home loop and its budget.
type Pod struct {
	Name  string // for errors and the state dump
	proc  *process
	home  atomic.Pointer[Loop]
	loops func() []*Loop // all there are

	shares      []*share // by loop: each is its loop's own
	files       atomic.Int64
	elsewhere   atomic.Int64 // bytes held by what the engine does not serve
	tight       atomic.Int32 // loops on which the pod holds too much
	look        atomic.Bool  // they are on their way to look again
	warned      atomic.Int64 // when the log was last told of the pod's bounds
	mu          sync.Mutex
	listeners   map[int]*listener // by fd; guarded by mu
	gone        bool              // guarded by mu
	closedToNew bool              // accepts no more; guarded by mu
	conns       atomic.Int64
}

// Owned is a source that ends with its pod: RemovePod calls its Fail.
type Owned interface{ Owner() *Pod }

// Shown is a source that is a connection. Show fills in all but Loop and the
// pod, on the loop. A source that is no connection, or none any more, answers false.
type Shown interface {
	Owned
	Show(*ConnState) bool
}

// Home is the loop that the pod's new connections go to.
func (p *Pod) Home() *Loop { return p.home.Load() }

// Conns is how many connections the pod has on all loops.
func (p *Pod) Conns() int64 { return p.conns.Load() }

// joined and left account a connection that the engine serves.
func (p *Pod) joined() {
	p.conns.Add(1)
	p.CountFDs(1)
}

func (p *Pod) left() {
	p.conns.Add(-1)
	p.CountFDs(-1)
}

func (p *Pod) removed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gone
}

// CountFDs accounts n descriptors to the pod that the engine does not serve itself:
// connections that are sniffed, shake hands or are relayed. Whoever holds
// gives the same number back, negative, later. Safe for concurrent use.
func (p *Pod) CountFDs(n int) {
	p.files.Add(int64(n))
	p.proc.files.Add(int64(n))
}

// Files is how many descriptors are accounted to the pod. Safe for concurrent use.
func (p *Pod) Files() int64 { return p.files.Load() }

// full reports whether the pod may have no further connection.
func (p *Pod) full() bool {
	e := p.proc
	own := p.files.Load()
	return own >= leastFiles && own >= e.budget.share(own, e.files.Load(), e.npods.Load() <= 1)
}

// share is a pod's part of one loop: what it has used of the running iteration,
// what waits for its turn, and what the pod holds. It is the loop's own.
type share struct {
	l   *Loop
	pod *Pod

	iter              uint64
	bytes, work, sent int            // of iteration iter
	maxBytes, maxWork int            // in it
	maxSent           int            // in it
	queue             []reactor.Task // put off, the longest waiting first: queue[head:]
	head              int
	queued            bool // the loop runs the share in its next iteration

	kept    exchange.Share
	held    int  // bytes, as the connections last told
	tight   bool // held, with what the pod holds elsewhere, has met the bound, and is not three quarters of it again yet
	waiting []heldUp

	resources map[resource]struct{}
	dials     any // dialQueue, which what makes connections for the pod keeps here
}

// resource is what ends with its pod, beside the pod's connections.
type resource interface{ podGone() }

// heldUp is a connection that is not read from while its pod holds too much.
type heldUp interface {
	reactor.Task
	over() bool
	resumed() // it waits no more
}

// beginIteration begins an iteration's account when there is a new one.
func (s *share) beginIteration() {
	it := s.l.Iteration()
	if it == s.iter {
		return
	}
	s.iter, s.bytes, s.work, s.sent = it, 0, 0, 0
	n := 1
	if s.l.backlog.iter == it {
		n = max(n, s.l.backlog.now)
	}
	s.maxBytes = max(podBytes/n, leastBytes)
	s.maxWork = max(podWork/n, leastWork)
	s.maxSent = max(podSent/n, leastSent)
}

// addRead accounts a read of n bytes.
func (s *share) addRead(n int) {
	s.beginIteration()
	s.bytes += n
	s.work++
}

// addWork accounts a piece of work that no read stands for.
func (s *share) addWork() {
	s.beginIteration()
	s.work++
}

// addWritten accounts n bytes sent.
func (s *share) addWritten(n int) {
	s.beginIteration()
	s.sent += n
}

// readSpent reports whether the pod has had its share of this iteration.
func (s *share) readSpent() bool {
	return s.iter == s.l.Iteration() && (s.bytes >= s.maxBytes || s.work >= s.maxWork)
}

// writeSpent is spent for what is sent.
func (s *share) writeSpent() bool {
	return s.iter == s.l.Iteration() && s.sent >= s.maxSent
}

// enqueue queues t behind what else the pod has put off.
func (s *share) enqueue(t reactor.Task) {
	if s.head > 0 && len(s.queue) == cap(s.queue) {
		n := copy(s.queue, s.queue[s.head:])
		clear(s.queue[n:])
		s.queue, s.head = s.queue[:n], 0
	}
	s.queue = append(s.queue, t)
	s.reschedule()
}

func (s *share) reschedule() {
	if !s.queued {
		s.queued = true
		s.l.backlog.next++
		s.l.Later(s)
	}
}

// Run is reactor.Task: those that waited go on, as far as the share reaches.
func (s *share) Run() {
	s.queued = false
	if c, it := &s.l.backlog, s.l.Iteration(); c.iter != it {
		c.iter, c.now, c.next = it, c.next, 0
	}
	s.beginIteration()
	for n := len(s.queue) - s.head; n > 0 && !s.readSpent() && !s.writeSpent(); n-- {
		t := s.queue[s.head]
		s.queue[s.head] = nil
		s.head++
		s.l.Do(t)
	}
	if s.head == len(s.queue) {
		s.queue, s.head = s.queue[:0], 0
		return
	}
	s.reschedule()
}

// Fail is reactor.Task: what waited is lost, as what the loop itself queues is.
func (s *share) Fail(error) { s.queue, s.head = nil, 0 }

// addHeldBytes accounts d bytes more, or less, that the pod's connections hold.
func (s *share) addHeldBytes(d int) {
	s.held += d
	most := s.l.proc.podHeld()
	if !s.tight && s.holds() > most {
		s.tight = true
		s.pod.tight.Add(1)
		s.l.proc.shed(ShedPodMemory)
	}
	// What the pod holds is read again after tight is set: a HoldBytes that gave something back before that did not see
	// tight, and no loop is to look again for it.
	if s.tight && s.holds() < most/4*3 {
		s.tight = false
		s.pod.tight.Add(-1)
		for i, t := range s.waiting {
			s.waiting[i] = nil
			if t.resumed(); !t.over() {
				s.enqueue(t)
			}
		}
		s.waiting = s.waiting[:0]
	}
}

// holds is how many bytes are held for the pod, on the loop and elsewhere.
func (s *share) holds() int { return s.held + int(s.pod.elsewhere.Load()) }

// wait keeps t until the pod holds less.
func (s *share) wait(t heldUp) {
	if len(s.waiting) == cap(s.waiting) { // before it grows: those that have ended need not wait
		k := 0
		for _, o := range s.waiting {
			if !o.over() {
				s.waiting[k] = o
				k++
			}
		}
		clear(s.waiting[k:])
		s.waiting = s.waiting[:k]
	}
	s.waiting = append(s.waiting, t)
}

// share is the pod's part of l.
func (p *Pod) share(l *Loop) *share {
	s := p.shares[l.ID()]
	s.l, s.pod = l, p
	return s
}

// HoldBytes accounts n bytes more, or less, that are held for the pod by what the engine does not serve: connections
// that are sniffed, wait or are relayed. It counts on each loop. Safe for concurrent use.
func (p *Pod) HoldBytes(n int) {
	if p.elsewhere.Add(int64(n)); n >= 0 || p.tight.Load() == 0 || !p.look.CompareAndSwap(false, true) {
		return
	}
	for _, l := range p.loops() { // those whose connections wait for it
		_ = l.Post(func() {
			p.look.Store(false)
			p.share(l).addHeldBytes(0)
		})
	}
}

// BytesElsewhere is how many bytes HoldBytes has accounted. Safe for concurrent use.
func (p *Pod) BytesElsewhere() int64 { return p.elsewhere.Load() }

// Roomy reports whether what is held for the pod elsewhere than by the engine is so little that large
// buffers may be taken. Safe for concurrent use.
func (p *Pod) Roomy() bool {
	return p.tight.Load() == 0 && p.elsewhere.Load() < int64(p.proc.podHeld()/roomyPart)
}

// HoldsTooMuch reports whether the pod holds as much memory as it may: nothing more is to be kept for it. Safe
// for concurrent use.
func (p *Pod) HoldsTooMuch() bool {
	return p.tight.Load() > 0 || p.elsewhere.Load() > int64(p.proc.podHeld())
}

// Defer reports whether the pod has had its share of this iteration; t then
// runs once it has one again. For connections that the engine does not serve
// (yet). On l only.
func (p *Pod) Defer(l *Loop, t reactor.Task) bool {
	s := p.share(l)
	if !s.readSpent() {
		s.addWork()
		return false
	}
	l.CountDeferred()
	s.enqueue(t)
	return true
}

// Sheds reports whether a request of the pod is to be refused because it, or the
// process, holds too much memory: answer 503 with the outcome `overload`
// (contract 5.7). What asks whether the node lives is exempt: ask only about what
// would be sent on. On l only.
func (p *Pod) Sheds(l *Loop) bool {
	s := p.share(l)
	if s.addHeldBytes(0); l.level < StopRequests && !s.tight { // what is held elsewhere may have changed
		return false
	}
	l.proc.shed(ShedRequest)
	return true
}

// listener is one listening socket of a pod on a loop.
type listener struct {
	l      *Loop
	pod    *Pod
	fd     int
	accept Accept
	vital  bool
	timer  reactor.Timer
	paused bool
}

// Accept gets a connected, non-blocking socket, which is its own from now on.
type Accept func(l *Loop, fd int)
