package engine

import (
	"context"
	"errors"
	"slices"
	"time"

	"aether/dataplane/exchange"
	"aether/dataplane/reactor"
)

// LocalPeer is a destination in this process, and a source that may call it.
type LocalPeer struct {
	Info  *ConnInfo     // the destination's, for the exchanges of this source
	Fresh func() bool   // whether that still holds; asked once an iteration, and must not allocate
	Life  time.Duration // how long it may hold
}

// VerifyLocal makes the two pods of an InProcess known to each other. It runs in its own goroutine
// and ends by its own deadlines; the error says which one is not who it has to be.
type VerifyLocal func(ctx context.Context) (LocalPeer, error)

// Revoked is an error of VerifyLocal that ends what is under way as well: one of the two is not who it was any more.
type Revoked struct{ Err error }

func (e *Revoked) Error() string { return e.Err.Error() }
func (e *Revoked) Unwrap() error { return e.Err }

// InProcess is to a destination in this process what Hop is to others (decision 018):
// each request is a pair of exchanges that hand each other what they have (localstream.go),
// both on the source's loop. All methods run on it.
type InProcess struct {
	l         *Loop
	from      *Pod
	to        *Pod
	verify    VerifyLocal
	empty     func()    // called once it is closed
	peer      LocalPeer // Info nil: they have not met, or have to meet anew
	until     int64
	checked   uint64 // iteration in which met was last found fresh
	verifying bool
	cancel    context.CancelFunc
	waiters   []waiter
	streams   []*localStream
	drains    int
	closed    bool
	leaving   error         // why it takes no more requests; nil: it does
	last      reactor.Timer // to end what Leave left
	judged    reactor.Timer // to meet anew, for what is under way

	requests   uint64
	born, used int64
}

// NewInProcess makes an InProcess from one pod to another, of which nothing is known yet. empty
// is called when it has been closed.
func (l *Loop) NewInProcess(from, to *Pod, meet VerifyLocal, empty func()) *InProcess {
	n := &InProcess{l: l, from: from, to: to, verify: meet, empty: empty, born: l.Now(), used: l.Now()}
	from.share(l).resources[n] = struct{}{}
	to.share(l).resources[n] = struct{}{}
	return n
}

// Send sends x, once both sides are known to each other.
func (n *InProcess) Send(x *exchange.Exchange) {
	if n.leaving != nil {
		x.Cause = n.leaving
		x.UpstreamClosed(exchange.Connect)
		return
	}
	n.used = n.l.Now()
	if len(n.waiters) == 0 && n.fresh() { // else they come first
		n.open(x)
		return
	}
	if len(n.waiters) >= maxWaiters { // some may wait no more
		n.waiters = slices.DeleteFunc(n.waiters, func(w waiter) bool { return !w.alive() })
	}
	if n.closed || len(n.waiters) >= maxWaiters {
		x.Cause = ErrHopFull
		x.UpstreamClosed(exchange.Refused)
		return
	}
	x.Park()
	n.waiters = append(n.waiters, waiter{x, x.Gen})
	n.startVerify()
}

// open gives x to the destination.
func (n *InProcess) open(x *exchange.Exchange) {
	p := n.l.localStreams().get()
	p.owner, p.from, p.l, p.info, p.out, p.at = n, n.from, n.l, n.peer.Info, x, len(n.streams)
	n.streams = append(n.streams, p)
	n.requests++
	x.Forward((*localUpstream)(p))
}

// settled is pairOwner.
func (n *InProcess) settled(p *localStream) {
	last := len(n.streams) - 1
	n.streams[p.at] = n.streams[last]
	n.streams[p.at].at = p.at
	n.streams[last] = nil
	n.streams = n.streams[:last]
	n.used = n.l.Now()
	if p.drained {
		n.drains--
	}
}

// mayDrain is pairOwner.
func (n *InProcess) mayDrain() bool {
	if n.drains >= maxDrains {
		return false
	}
	n.drains++
	return true
}

// checkLeft is pairOwner.
func (n *InProcess) checkLeft() {
	if n.leaving != nil && len(n.streams) == 0 {
		n.Close(n.leaving)
	}
}

// podGone is resource.
func (n *InProcess) podGone() { n.shut(errPodGone, exchange.Closed) }

// fresh reports whether requests may go: everything holds that was true when the two met.
func (n *InProcess) fresh() bool {
	if n.closed || n.peer.Info == nil {
		return false
	}
	if it := n.l.Iteration(); n.checked != it {
		if n.l.Now() >= n.until || !n.peer.Fresh() {
			n.peer = LocalPeer{} // what is under way goes on until they have met anew, or cannot
			return false
		}
		n.checked = it
	}
	return true
}

// startVerify makes the two meet.
func (n *InProcess) startVerify() {
	if n.verifying {
		return
	}
	n.verifying = true
	ctx, cancel := context.WithCancel(n.l.proc.ctx)
	n.cancel = cancel
	n.l.proc.wg.Go(func() {
		met, err := n.verify(ctx)
		cancel()
		_ = n.l.Post(func() { n.verified(met, err) })
	})
}

func (n *InProcess) verified(met LocalPeer, err error) {
	n.verifying = false
	if n.closed {
		return
	}
	gone, revoked := errors.AsType[*Revoked](err)
	switch {
	case err == nil:
		n.peer, n.until, n.checked = met, n.l.Now()+int64(met.Life), n.l.Iteration()
		n.l.Arm(&n.judged, (*judgeTimer)(n), max(int64(met.Life), 1))
	case revoked:
		for _, p := range slices.Clone(n.streams) {
			p.cut(gone.Err, exchange.Closed)
		}
		if n.closed {
			return
		}
	case len(n.streams) > 0: // that says nothing of who they are
		n.l.Arm(&n.judged, (*judgeTimer)(n), stallLook)
	}
	waiting := n.waiters
	n.waiters = nil
	for _, w := range waiting {
		switch {
		case !w.alive():
		case err != nil:
			w.x.Cause = err
			w.x.UpstreamClosed(exchange.Connect)
		case n.fresh():
			n.open(w.x)
		default: // closed meanwhile
			w.x.Cause = errPodGone
			w.x.UpstreamClosed(exchange.Connect)
		}
	}
	n.checked = 0 // something may have changed while they met, and Judge was called in vain
	n.Judge()
}

// Judge makes the two meet anew if anything has changed that they were found to be themselves by, for the sake
// of what is under way: it goes on where both have certificates that hold, and ends where one has none.
func (n *InProcess) Judge() {
	if len(n.streams) > 0 && !n.fresh() && !n.closed {
		n.startVerify()
	}
}

// judgeTimer is an InProcess as the task of its timer: a certificate ends.
type judgeTimer InProcess

// Run is reactor.Task.
func (v *judgeTimer) Run() { (*InProcess)(v).Judge() }

// Fail is reactor.Task.
func (v *judgeTimer) Fail(error) { v.Run() }

// Open is 1 once requests go without a wait. What is known of it need not be fresh.
func (n *InProcess) Open() int {
	if n.peer.Info == nil {
		return 0
	}
	return 1
}

// Idle is how long nothing has been sent or been under way.
func (n *InProcess) Idle() time.Duration {
	if len(n.streams) > 0 || len(n.waiters) > 0 || n.verifying {
		return 0
	}
	return time.Duration(n.l.Now() - n.used)
}

// Close ends all requests at once (identity revoked, endpoint unhealthy). Those under way fail as Closed;
// those that wait, of which nothing was sent, as Connect.
func (n *InProcess) Close(cause error) { n.shut(cause, exchange.Connect) }

// Leave takes no more requests (endpoint gone), as Hop.Leave.
func (n *InProcess) Leave(cause error) {
	if n.closed || n.leaving != nil {
		return
	}
	n.leaving = cause
	waiting := n.waiters
	n.waiters = nil
	for _, w := range waiting {
		if w.alive() {
			w.x.Cause = cause
			w.x.UpstreamClosed(exchange.Connect)
		}
	}
	if n.closed {
		return
	}
	if len(n.streams) == 0 {
		n.Close(cause)
		return
	}
	n.l.Arm(&n.last, (*inProcessLeaveTimer)(n), leaveTime)
}

// inProcessLeaveTimer is an InProcess as the task of its timer.
type inProcessLeaveTimer InProcess

// Run is reactor.Task.
func (v *inProcessLeaveTimer) Run() { (*InProcess)(v).Close((*InProcess)(v).leaving) }

// Fail is reactor.Task.
func (v *inProcessLeaveTimer) Fail(error) { v.Run() }

// shut ends all at once; waiting is what requests are told that wait.
func (n *InProcess) shut(cause error, waiting exchange.Code) {
	if n.closed {
		return
	}
	n.closed = true
	n.l.Disarm(&n.last)
	n.l.Disarm(&n.judged)
	delete(n.from.share(n.l).resources, n)
	delete(n.to.share(n.l).resources, n)
	n.peer = LocalPeer{}
	if n.cancel != nil {
		n.cancel()
	}
	ws := n.waiters
	n.waiters = nil
	for _, w := range ws {
		if w.alive() {
			w.x.Cause = cause
			w.x.UpstreamClosed(waiting)
		}
	}
	for _, p := range slices.Clone(n.streams) {
		p.cut(cause, exchange.Closed)
	}
	n.empty()
}

// Sessions calls f with what there is in the place of hop sessions; wall is the time of day. On the loop.
func (n *InProcess) Sessions(wall time.Time, f func(SessionState)) {
	now := n.l.Now()
	s := SessionState{Pod: n.from.Name, Loop: n.l.ID(), Waiting: len(n.waiters), State: "in-process", Streams: len(n.streams), Requests: n.requests}
	s.AgeMS, s.IdleMS = (now-n.born)/1e6, n.Idle().Milliseconds()
	if n.peer.Info == nil {
		s.State = "connect"
	} else {
		s.Until = wall.Add(time.Duration(n.until - now)).UTC().Truncate(time.Second)
	}
	f(s)
}
