package outbound

import (
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/decide"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/reactor"
	"aether/dataplane/share"
	"aether/dataplane/snapshot"
	"aether/tproxy/socket"
)

// Bounds of what waits for rows (contract 4.6; docs/limits.md).
const (
	coldTime = 2 * time.Second // until the rows of a service that is known must be here
	maxCold  = 4096            // requests and connections that wait, of the process; see package share for a pod's part
)

const (
	causeAwait   = "await-rows" // of nothing that came in time
	textTooCold  = "overload: as many requests wait for services that this node has not used yet as may; try again"
	textTooLate  = "no registrar told in time where the pods of "
	textTryAgain = " are; try again shortly"
)

// Waiting is how many requests and connections wait for rows. Safe for concurrent use.
func (o *Outbound) Waiting() int { return int(o.waiting.Load()) }

// admitWaiting counts one more of the pod's in; false: as many wait as may.
func (o *Outbound) admitWaiting(p *Pod) bool {
	all, own := o.waiting.Add(1), p.waiting.Add(1)
	if !share.Room(int(own-1), int(all-1), maxCold) {
		o.leaveWaiting(p)
		return false
	}
	return true
}

func (o *Outbound) leaveWaiting(p *Pod) {
	p.waiting.Add(-1)
	o.waiting.Add(-1)
}

// awaitRows lets a request wait until the rows of the service that it is for are here. It is
// decided anew, with the same draw, in each world that comes; again is called when it does not wait any more.
func (o *Outbound) awaitRows(x *exchange.Exchange, c *conn, rq *reqState, sent []httpmsg.Field, again decided) {
	if o.cfg.Want == nil { // answered as what has no endpoint
		o.fail(x, rq, "no-endpoint", strings.TrimSuffix(rq.v.Text, "\n"))
		return
	}
	if c.justTimedOut() {
		o.cfg.Want(rq.v.Awaits.Name)
		o.fail(x, rq, causeAwait, textTooLate+rq.v.Awaits.Name.String()+textTryAgain)
		return
	}
	if !o.admitWaiting(c.pod) {
		o.Cold[coldOverflow].Inc()
		o.fail(x, rq, causeOverload, textTooCold)
		return
	}
	rq.x, rq.cold, rq.sent, rq.again = x, true, sent, again
	c.st.waiting[rq] = struct{}{}
	c.st.l.Arm(&rq.wait, (*waitTimer)(rq), int64(coldTime))
	o.cfg.Want(rq.v.Awaits.Name)
	rq.reconsider(o.cfg.Store.Load()) // RetryWaiting may have looked before it was counted
}

// resumeWaiting ends the wait of a request.
func (st *loopState) resumeWaiting(rq *reqState, how int) {
	rq.cold = false
	delete(st.waiting, rq)
	if rq.wait.Armed() {
		st.l.Disarm(&rq.wait)
	}
	st.o.leaveWaiting(rq.conn().pod)
	st.o.Cold[how].Inc()
}

// reconsider is waiter.
func (rq *reqState) reconsider(snap *snapshot.Snapshot) {
	if !rq.cold || snap == rq.snap {
		return
	}
	x, c := rq.x, rq.conn()
	was := rq.v.Awaits.Name
	rq.snap = snap
	rq.v = decide.Route(snap, &c.flow, &x.Req, rq.draw, nil)
	if rq.v.Action == decide.Await {
		if n := rq.v.Awaits.Name; n != was {
			c.o.cfg.Want(n)
		}
		return
	}
	sent := rq.sent
	c.st.resumeWaiting(rq, coldCame)
	rq.again(c.o, x, c, rq, sent)
}

// waitTimer is a request as the task of its wait.
type waitTimer reqState

// Run is reactor.Task: nothing came in time.
func (t *waitTimer) Run() {
	rq := (*reqState)(t)
	c := rq.conn()
	c.st.resumeWaiting(rq, coldExpired)
	c.o.fail(rq.x, rq, causeAwait, textTooLate+rq.v.Awaits.Name.String()+textTryAgain)
}

// Fail is reactor.Task.
func (t *waitTimer) Fail(error) { (*reqState)(t).fault() }

// RetryWaiting decides again about what waits for rows, after the store has a new snapshot. It
// does not wait for the loops. Safe for concurrent use.
func (o *Outbound) RetryWaiting() {
	if o.waiting.Load() == 0 { // who counts itself in looks at the store afterwards
		return
	}
	o.loops.Each(func(st *loopState) {
		snap := o.cfg.Store.Load()
		for _, w := range slices.Collect(maps.Keys(st.waiting)) {
			w.reconsider(snap)
		}
	})
}

// justTimedOut: the connection has just waited for rows in vain. What it asks for next is not waited for
// once more: 2 s is what a client waits (contract 4.6).
func (c *conn) justTimedOut() bool {
	return c.lastWaitFailed != 0 && c.st.l.Now()-c.lastWaitFailed < int64(coldTime)
}

// begun does what the verdict on a connection says (conn.begin).
type begun func(c *conn, fd int, v decide.Verdict, snap *snapshot.Snapshot, draw uint32, first []byte)

// waitingConn is a connection that waits for rows: to a service whose rows are not here, or to a
// raw-TCP port that leads to one. Nothing is read from it meanwhile.
type waitingConn struct {
	c     *conn
	fd    int
	v     decide.Verdict
	snap  *snapshot.Snapshot
	draw  uint32
	first []byte // what has been read before
	again begun
	timer reactor.Timer
	done  bool
}

// await lets a connection wait until the rows of the service that it is for are here.
// first may alias anything; again is called when it does not wait any more.
func (c *conn) await(fd int, v decide.Verdict, snap *snapshot.Snapshot, draw uint32, first []byte, again begun) {
	o, l := c.o, c.st.l
	var end connEnd
	switch {
	case o.cfg.Want == nil:
	case c.justTimedOut():
		o.cfg.Want(v.Awaits.Name)
		end = connEnd{ended: "proxy", cause: causeAwait}
	case !o.admitWaiting(c.pod):
		if c.unexamined() { // to an HTTP port it is said in HTTP
			c.flow.Waited = true
			again(c, fd, decide.Decide(snap, &c.flow, draw, nil), snap, draw, first)
			return
		}
		o.Cold[coldOverflow].Inc()
		end = connEnd{ended: "proxy", cause: causeOverload}
	default:
		k := &waitingConn{c: c, fd: fd, v: v, snap: snap, draw: draw, first: clone(first), again: again}
		if err := l.Register(fd, k, reactor.Stream); err != nil {
			o.leaveWaiting(c.pod)
			end = connEnd{ended: "proxy", cause: engine.ConnectCause(err)}
			break
		}
		c.pod.Engine.CountFDs(1)
		c.pod.Engine.HoldBytes(len(k.first))
		c.st.waiting[k] = struct{}{}
		l.Arm(&k.timer, k, int64(coldTime))
		o.cfg.Want(v.Awaits.Name)
		k.reconsider(o.cfg.Store.Load())
		return
	}
	_ = socket.Abort(fd)
	c.record(v, snap, end)
}

// unexamined: no byte of the connection has been looked at, and what else is known of the service
// that was dialled has not been either.
func (c *conn) unexamined() bool { return c.flow.Sniff == model.SniffNone && !c.flow.Waited }

// over: it does not wait any more.
func (k *waitingConn) over(how int) {
	k.done = true
	c := k.c
	delete(c.st.waiting, k)
	c.st.l.Disarm(&k.timer)
	c.pod.Engine.CountFDs(-1)
	c.pod.Engine.HoldBytes(-len(k.first))
	c.o.leaveWaiting(c.pod)
	c.o.Cold[how].Inc()
}

func (k *waitingConn) drop(how int, ended, cause string) {
	if k.done {
		return
	}
	k.over(how)
	k.c.st.l.Unregister(k.fd)
	_ = socket.Abort(k.fd)
	k.c.record(k.v, k.snap, connEnd{ended: ended, cause: cause})
}

func (k *waitingConn) reconsider(snap *snapshot.Snapshot) {
	if k.done || snap == k.snap {
		return
	}
	c := k.c
	v := decide.Decide(snap, &c.flow, k.draw, nil)
	if v.Action == decide.Await {
		if v.Awaits.Name != k.v.Awaits.Name {
			c.o.cfg.Want(v.Awaits.Name)
		}
		k.v, k.snap = v, snap
		return
	}
	k.over(coldCame)
	k.begin(v, snap)
}

// begin does what a verdict says that is not to wait.
func (k *waitingConn) begin(v decide.Verdict, snap *snapshot.Snapshot) {
	c := k.c
	if err := c.st.l.Detach(k.fd); err != nil {
		unix.Close(k.fd)
		return
	}
	k.again(c, k.fd, v, snap, k.draw, k.first)
}

// Event is reactor.Source. A client that has said all it has to say waits for an answer.
func (k *waitingConn) Event(ev uint32) {
	if ev&(reactor.Hangup|reactor.Error) != 0 {
		k.drop(coldGone, "client", "")
	}
}

// Run is reactor.Task: nothing came in time. What else is known of the service decides: to an HTTP
// port the answer is said in HTTP, and bytes that would have to go to its pods are refused.
func (k *waitingConn) Run() {
	c := k.c
	unasked := c.unexamined()
	c.flow.Waited, c.lastWaitFailed = true, c.st.l.Now()
	if v := decide.Decide(k.snap, &c.flow, k.draw, nil); unasked && v.Action != decide.Await {
		k.over(coldExpired)
		k.begin(v, k.snap)
		return
	}
	k.drop(coldExpired, "proxy", causeAwait)
}

// Fail is reactor.Source and Task.
func (k *waitingConn) Fail(error) { k.drop(coldGone, "proxy", "internal") }

// Owner is engine.Owned.
func (k *waitingConn) Owner() *engine.Pod { return k.c.pod.Engine }

// Show is engine.Shown: a connection that waits for rows.
func (k *waitingConn) Show(st *engine.ConnState) bool {
	if k.done {
		return false
	}
	st.State, st.Client = causeAwait, engine.PeerAddr(k.fd)
	st.AgeMS = (k.c.st.l.Now() - k.c.start) / 1e6
	st.IdleMS = st.AgeMS
	st.BytesIn = int64(len(k.first))
	k.c.Describe(st)
	return true
}
