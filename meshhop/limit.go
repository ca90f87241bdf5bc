package meshhop

import (
	"cmp"
	"context"
	"fmt"
	"sync"
)

// Limits of concurrent handshakes that a zero LimiterConfig stands for.
const (
	DefaultNode  = 256  // of all pods
	DefaultPod   = 64   // of one pod
	DefaultQueue = 1024 // that wait for their turn

	podQueue = 4 // one pod may have this part of the queue
)

// LimiterConfig: zero fields mean the defaults above; negative ones are not allowed.
type LimiterConfig struct{ Node, Pod, Queue int }

// Limiter bounds how many handshakes run at once, per pod and in all, and how
// many wait. One pod that is flooded fills its own share only. Safe for
// concurrent use. The nil Limiter bounds nothing.
type Limiter struct {
	perPod int
	most   int // of one pod, in or waiting
	node   chan struct{}
	queue  chan struct{}

	mu   sync.Mutex
	pods map[string]*podLimit
}

type podLimit struct {
	slots chan struct{}
	users int // in or waiting; guarded by Limiter.mu
}

// NewLimiter returns a Limiter with the bounds of c.
func NewLimiter(c LimiterConfig) *Limiter {
	perPod, queue := cmp.Or(c.Pod, DefaultPod), cmp.Or(c.Queue, DefaultQueue)
	return &Limiter{
		perPod: perPod,
		most:   perPod + (queue+podQueue-1)/podQueue,
		node:   make(chan struct{}, cmp.Or(c.Node, DefaultNode)),
		queue:  make(chan struct{}, queue),
		pods:   map[string]*podLimit{},
	}
}

// Busy: too many handshakes are under way or waiting.
type Busy struct {
	Pod  string
	Full bool // not even waiting was possible
}

func (e *Busy) Error() string {
	if e.Full {
		return fmt.Sprintf("meshhop: too many handshakes wait for their turn (pod %s): raise the limit or find who connects so often", e.Pod)
	}
	return fmt.Sprintf("meshhop: no turn for a handshake of pod %s in time: raise the limit or find who connects so often", e.Pod)
}

// Enter waits for a handshake's turn, until ctx ends. The caller calls leave once,
// when the handshake is over. The error is a *Busy.
func (l *Limiter) Enter(ctx context.Context, pod string) (leave func(), err error) {
	if l == nil {
		return func() {}, nil
	}
	p, ok := l.join(pod)
	if !ok {
		return nil, &Busy{Pod: pod, Full: true}
	}
	select {
	case p.slots <- struct{}{}:
		select {
		case l.node <- struct{}{}:
			return func() { <-l.node; <-p.slots; l.part(pod, p) }, nil
		default:
			<-p.slots // queue without holding anything
		}
	default:
	}
	select {
	case l.queue <- struct{}{}:
	default:
		l.part(pod, p)
		return nil, &Busy{Pod: pod, Full: true}
	}
	defer func() { <-l.queue }()
	select {
	case p.slots <- struct{}{}:
	case <-ctx.Done():
		l.part(pod, p)
		return nil, &Busy{Pod: pod}
	}
	select {
	case l.node <- struct{}{}:
		return func() { <-l.node; <-p.slots; l.part(pod, p) }, nil
	case <-ctx.Done():
		<-p.slots
		l.part(pod, p)
		return nil, &Busy{Pod: pod}
	}
}

// join counts one more of the pod's, if it may have one.
func (l *Limiter) join(pod string) (*podLimit, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.pods[pod]
	if p == nil {
		p = &podLimit{slots: make(chan struct{}, l.perPod)}
		l.pods[pod] = p
	}
	if p.users >= l.most {
		return nil, false
	}
	p.users++
	return p, true
}

func (l *Limiter) part(pod string, p *podLimit) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p.users--; p.users == 0 {
		delete(l.pods, pod)
	}
}
