package meshhop

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"
)

// Limits of concurrent handshakes that a zero LimiterConfig stands for.
const (
	DefaultNode  = 512  // of all pods
	DefaultPod   = 128  // of one pod
	DefaultQueue = 1024 // that wait for their turn

	podQueue = 4           // one pod may have this part of the queue
	podOwn   = 8           // turns that a pod may have however many the others have
	patience = time.Second // a peer that has been silent so long in a handshake loses its turn to one that waits
)

// LimiterConfig: zero fields mean the defaults above; negative ones are not allowed.
type LimiterConfig struct{ Node, Pod, Queue int }

// Limiter bounds how many handshakes run at once, per pod and in all, and how
// many wait. Safe for concurrent use. The nil Limiter bounds nothing.
//
//   - The pod with the fewest turns comes next, and of its peers the one with the
//     fewest; a few turns are each pod's own.
//   - Where somebody waits, a handshake whose peer has been silent for a second
//     ends: of the pod, or if the node is full of the pod with most turns, the
//     oldest of the peer with most.
//   - A full queue gives up who came last of the peer, or of the pod, that
//     has most in it, if the newcomer's has fewer.
type Limiter struct {
	node, perPod, queue, part int

	mu      sync.Mutex
	pods    map[string]*podTurns // those that have a turn or wait
	open    int                  // turns taken
	waiting int
	timer   *time.Timer // looks for silent peers; nil until there was need
}

// podTurns is a pod's part; guarded by Limiter.mu.
type podTurns struct {
	name    string
	open    []*Turn
	waiting []*waiter // in the order of their coming
	peers   map[netip.Addr]int
}

// waiter is a handshake that waits for its turn.
type waiter struct {
	peer netip.Addr
	turn chan *Turn // holds one; nil: it was given up for another
}

// Turn is leave to shake hands, to be given back by Leave. The nil Turn is that of the
// nil Limiter.
type Turn struct {
	l    *Limiter
	pod  *podTurns
	peer netip.Addr

	// Guarded by l.mu.
	silent time.Time // since when the peer is waited for; zero: it is not
	conn   net.Conn  // that is waited on
	lost   bool      // given to another
	over   bool
}

// NewLimiter returns a Limiter with the bounds of c.
func NewLimiter(c LimiterConfig) *Limiter {
	queue := cmp.Or(c.Queue, DefaultQueue)
	return &Limiter{
		node: cmp.Or(c.Node, DefaultNode), perPod: cmp.Or(c.Pod, DefaultPod),
		queue: queue, part: (queue + podQueue - 1) / podQueue,
		pods: map[string]*podTurns{},
	}
}

// Busy: too many handshakes are under way or waiting.
type Busy struct {
	Pod  string
	Full bool // not even waiting was possible
	Lost bool // it had a turn, its peer was silent, and others waited
}

func (e *Busy) Error() string {
	switch {
	case e.Lost:
		return fmt.Sprintf("meshhop: the peer was silent in its handshake, and others of pod %s, or of the node, waited for the turn", e.Pod)
	case e.Full:
		return fmt.Sprintf("meshhop: too many handshakes wait for their turn (pod %s): raise the limit or find who connects so often", e.Pod)
	}
	return fmt.Sprintf("meshhop: no turn for a handshake of pod %s in time: raise the limit or find who connects so often", e.Pod)
}

// Enter waits until it is the turn of a handshake of pod with peer, until ctx ends.
// The caller calls Leave once, when the handshake is over. The error is a *Busy.
func (l *Limiter) Enter(ctx context.Context, pod string, peer netip.Addr) (*Turn, error) {
	if l == nil {
		return nil, nil
	}
	l.mu.Lock()
	p := l.pods[pod]
	if p == nil {
		p = &podTurns{name: pod, peers: map[netip.Addr]int{}}
		l.pods[pod] = p
	}
	if l.may(p) { // nobody of the pod waits, then
		t := l.take(p, peer)
		l.mu.Unlock()
		return t, nil
	}
	w := &waiter{peer: peer, turn: make(chan *Turn, 1)}
	if !l.line(p, w) {
		l.forget(p)
		l.mu.Unlock()
		return nil, &Busy{Pod: pod, Full: true}
	}
	l.next()
	l.mu.Unlock()
	select {
	case t := <-w.turn:
		if t == nil {
			return nil, &Busy{Pod: pod, Full: true}
		}
		return t, nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	if i := slices.Index(p.waiting, w); i >= 0 {
		l.unline(p, i)
		l.forget(p)
	}
	l.mu.Unlock()
	select {
	case t := <-w.turn: // at the same moment
		t.Leave()
	default:
	}
	return nil, &Busy{Pod: pod}
}

// Leave gives the turn back.
func (t *Turn) Leave() {
	if t == nil {
		return
	}
	t.l.mu.Lock()
	defer t.l.mu.Unlock()
	t.l.end(t)
	t.l.next()
}

// wrap gives the connection to shake hands on, which notes when the peer is waited for.
func (t *Turn) wrap(c net.Conn) net.Conn {
	if t == nil {
		return c
	}
	return &turned{c, t}
}

// wasLost reports whether the turn was given to another.
func (t *Turn) wasLost() bool {
	if t == nil {
		return false
	}
	t.l.mu.Lock()
	defer t.l.mu.Unlock()
	return t.lost
}

// turned is a connection whose handshake has a turn.
type turned struct {
	net.Conn
	turn *Turn
}

// Read fails from when the turn is lost on, also where bytes came at the same moment: the connection's deadline has passed
// for good, and a handshake that went on would end in a connection that cannot be read.
func (c *turned) Read(b []byte) (int, error) {
	c.turn.mark(time.Now(), c.Conn)
	n, err := c.Conn.Read(b)
	if c.turn.mark(time.Time{}, nil) {
		return 0, os.ErrDeadlineExceeded
	}
	return n, err
}

// mark notes since when the peer is waited for, on conn, and reports whether the turn is lost.
func (t *Turn) mark(silent time.Time, conn net.Conn) (lost bool) {
	t.l.mu.Lock()
	defer t.l.mu.Unlock()
	t.silent, t.conn = silent, conn
	return t.lost
}

// All that follows is called with mu held.

// may reports whether p may have another turn now.
func (l *Limiter) may(p *podTurns) bool {
	return len(p.open) < l.perPod && (l.open < l.node || len(p.open) < podOwn)
}

func (l *Limiter) take(p *podTurns, peer netip.Addr) *Turn {
	t := &Turn{l: l, pod: p, peer: peer}
	p.open = append(p.open, t)
	p.peers[peer]++
	l.open++
	return t
}

func (l *Limiter) end(t *Turn) {
	if t.over {
		return
	}
	t.over = true
	p := t.pod
	i := slices.Index(p.open, t)
	p.open = slices.Delete(p.open, i, i+1)
	if p.peers[t.peer]--; p.peers[t.peer] == 0 {
		delete(p.peers, t.peer)
	}
	l.open--
	l.forget(p)
}

func (l *Limiter) forget(p *podTurns) {
	if len(p.open)+len(p.waiting) == 0 {
		delete(l.pods, p.name)
	}
}

// line puts w at the end of p's queue, if there is room, or is made.
func (l *Limiter) line(p *podTurns, w *waiter) bool {
	if len(p.waiting) >= l.part || l.waiting >= l.queue {
		from := p
		if len(p.waiting) < l.part {
			for _, q := range l.pods {
				if len(q.waiting) > len(from.waiting) {
					from = q
				}
			}
			if from != p && len(from.waiting) <= len(p.waiting)+1 {
				return false
			}
		}
		counts := map[netip.Addr]int{}
		for _, o := range from.waiting {
			counts[o.peer]++
		}
		last := -1
		for i, o := range from.waiting {
			if last < 0 || counts[o.peer] >= counts[from.waiting[last].peer] {
				last = i
			}
		}
		if last < 0 || from == p && counts[from.waiting[last].peer] <= counts[w.peer]+1 {
			return false
		}
		from.waiting[last].turn <- nil
		l.unline(from, last)
		l.forget(from)
	}
	p.waiting = append(p.waiting, w)
	l.waiting++
	return true
}

func (l *Limiter) unline(p *podTurns, i int) {
	p.waiting = slices.Delete(p.waiting, i, i+1)
	l.waiting--
}

// next gives turns to those who wait, as far as there are any.
func (l *Limiter) next() {
	for {
		var p *podTurns
		for _, q := range l.pods {
			if len(q.waiting) > 0 && l.may(q) && (p == nil || len(q.open) < len(p.open)) {
				p = q
			}
		}
		if p == nil {
			if !l.evict() {
				return
			}
			continue
		}
		first := 0
		for i, w := range p.waiting {
			if p.peers[w.peer] < p.peers[p.waiting[first].peer] {
				first = i
			}
		}
		w := p.waiting[first]
		l.unline(p, first)
		w.turn <- l.take(p, w.peer)
	}
}

// evict ends a handshake whose peer is silent, if somebody waits for its turn and it may be ended;
// if it may be later, it sees to it that it is.
func (l *Limiter) evict() bool {
	if l.waiting == 0 {
		return false
	}
	now, due := time.Now(), time.Duration(-1)
	var most *podTurns
	for _, q := range l.pods {
		if most == nil || len(q.open) > len(most.open) {
			most = q
		}
	}
	for _, q := range l.pods {
		if len(q.waiting) == 0 {
			continue
		}
		from := q
		if len(q.open) < l.perPod {
			from = most // the node is full
		}
		var worst *Turn
		for _, t := range from.open {
			if t.silent.IsZero() {
				continue
			}
			if d := patience - now.Sub(t.silent); d > 0 {
				if due < 0 || d < due {
					due = d
				}
				continue
			}
			if worst == nil || from.peers[t.peer] > from.peers[worst.peer] || from.peers[t.peer] == from.peers[worst.peer] && t.silent.Before(worst.silent) {
				worst = t
			}
		}
		if worst != nil {
			worst.lost = true
			_ = worst.conn.SetReadDeadline(time.Unix(1, 0))
			l.end(worst)
			return true
		}
	}
	if due < 0 { // none waits for its peer now: one that begins to is looked at then
		due = patience
	}
	if l.timer == nil {
		l.timer = time.AfterFunc(due, l.look)
	} else {
		l.timer.Reset(due)
	}
	return false
}

// look is evict by the timer.
func (l *Limiter) look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next()
}
