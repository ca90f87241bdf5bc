package local

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// Bounds of writing rows.
const (
	writeTimeout = 5 * time.Second // contract 13.3: of a call
	maxWrites    = 8               // rows written at once
	maxTries     = 8               // of one state of a row; then it is left to the sweep
	minBackoff   = time.Second     // between two, with jitter
	maxBackoff   = 30 * time.Second
)

// rowKey is where a pod's row stands, under each class that it serves.
type rowKey struct {
	service model.ServiceName
	ip      string
}

// row is what is to stand under a key. One goroutine at a time writes it, the latest
// state alone. Pods.mu guards it. It goes once a key without a pod is written.
type row struct {
	key     rowKey
	want    *registrypb.ServiceEndpoint // nil: none
	anew    bool                        // what is there is to go first: it stands under classes that it no longer serves
	gen     uint64                      // counts changes of want
	tried   uint64                      // the last gen that was tried, and whatever came of it
	busy    bool                        // a goroutine writes it
	failed  bool                        // it was given up
	changed chan struct{}               // closed and replaced when want changes or tried does
}

// rowOf is what p's row is to say; nil: it is to have none (contract 13).
func (l *Pods) rowOf(p *pod) *registrypb.ServiceEndpoint {
	if p.rec.Phase == withdrawn {
		return nil
	}
	e, err := l.describe(p)
	if err != nil {
		return nil // not met: the same facts gave a row when the pod was taken
	}
	switch p.rec.Phase {
	case draining:
		e.Health = registrypb.ServiceEndpoint_DRAINING
	case closing:
		e.Health = registrypb.ServiceEndpoint_UNHEALTHY
	default:
		e.Health = p.health()
	}
	return e
}

// holderLocked is the pod whose row stands under key: the latest, where a pod's
// container has been made anew and the old one is not gone yet. nil: nobody.
func (l *Pods) holderLocked(k rowKey) (best *pod) {
	for _, p := range l.pods {
		if p.fault == nil && p.key() == k && (best == nil || p.rec.Order > best.rec.Order) {
			best = p
		}
	}
	return best
}

// settleLocked has the row under k written as its holder wants it, if that is not what
// was wanted last, or force.
func (l *Pods) settleLocked(k rowKey, force bool) {
	r := l.rows[k]
	if r == nil {
		r = &row{key: k, changed: make(chan struct{})}
		l.rows[k] = r
	}
	var want *registrypb.ServiceEndpoint
	if p := l.holderLocked(k); p != nil {
		want = l.rowOf(p)
	}
	if r.gen > 0 && !force && !r.failed && proto.Equal(want, r.want) {
		return
	}
	if r.want != nil && want != nil && !sameClasses(r.want, want) {
		r.anew = true
	}
	r.want, r.failed = want, false
	r.gen++
	r.signal()
	l.writeLocked(r)
}

func sameClasses(a, b *registrypb.ServiceEndpoint) bool {
	x, y := registry.Protocols(a), registry.Protocols(b)
	if len(x) != len(y) {
		return false
	}
	for i := range x {
		if x[i] != y[i] {
			return false
		}
	}
	return true
}

func (r *row) signal() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// writeLocked sees that somebody writes r, while Run runs.
func (l *Pods) writeLocked(r *row) {
	if l.ctx == nil || r.busy || r.tried == r.gen && !r.failed {
		return
	}
	r.busy = true
	ctx := l.ctx
	l.wg.Go(func() { l.write(ctx, r) })
}

// write brings r to the registry: until it is written, given up, or ctx ends.
func (l *Pods) write(ctx context.Context, r *row) {
	backoff := minBackoff
	for tries := 1; ; tries++ {
		select {
		case l.writes <- struct{}{}:
		case <-ctx.Done():
			l.mu.Lock()
			r.busy = false
			l.mu.Unlock()
			return
		}
		l.mu.Lock()
		want, anew, gen := r.want, r.anew, r.gen
		l.mu.Unlock()
		err := l.put(ctx, r.key, want, anew)
		<-l.writes

		l.mu.Lock()
		r.tried = gen
		r.signal()
		if err == nil && anew && r.gen == gen {
			r.anew = false
		}
		switch {
		case ctx.Err() != nil:
			r.busy = false
			l.mu.Unlock()
			return
		case r.gen != gen: // something newer is wanted
			tries, backoff = 0, minBackoff
			l.mu.Unlock()
			continue
		case err == nil:
			r.busy = false
			if want == nil {
				delete(l.rows, r.key)
			}
			l.mu.Unlock()
			return
		}
		l.Counts.WriteErrors.Inc()
		l.quiet.Warn("write "+r.key.service.String()+" "+r.key.ip, "the registry does not take a row; it is tried again",
			"service", r.key.service, "ip", r.key.ip, "health", want.GetHealth(), "try", tries, "err", err)
		if p := l.holderLocked(r.key); want.GetHealth() == registrypb.ServiceEndpoint_DRAINING && p != nil && p.rec.Phase == draining {
			l.enterLocked(p, withdrawn, time.Time{}) // contract 13.3: rather no row than one that is thought healthy
			tries, backoff = 0, minBackoff
			l.mu.Unlock()
			continue
		}
		if tries >= maxTries {
			r.busy, r.failed = false, true
			if want == nil {
				delete(l.rows, r.key) // a ghost, which the sweep finds
			}
			l.mu.Unlock()
			l.log.Warn("a row is not written: the sweep will see to it", "service", r.key.service, "ip", r.key.ip, "err", err)
			return
		}
		changed := r.changed
		l.mu.Unlock()
		again := time.NewTimer(backoff/2 + rand.N(backoff/2+1))
		select { // the time to try again; or something newer; or the end
		case <-again.C:
		case <-changed:
		case <-ctx.Done():
		}
		again.Stop()
		backoff = min(2*backoff, maxBackoff)
	}
}

// put writes one state of a row, under every class (contract 9.4).
func (l *Pods) put(ctx context.Context, k rowKey, want *registrypb.ServiceEndpoint, anew bool) error {
	call := func(f func(ctx context.Context) error) error {
		ctx, cancel := context.WithTimeout(ctx, writeTimeout)
		defer cancel()
		return f(ctx)
	}
	if want == nil || anew {
		by := l.statement()
		if err := call(func(ctx context.Context) error { return l.cfg.Registry.Unregister(ctx, k.service, k.ip, by) }); err != nil {
			return fmt.Errorf("take %s of %s out: %w", k.ip, k.service, err)
		}
	}
	if want == nil {
		return nil
	}
	want = proto.CloneOf(want)
	want.Stated = l.statement().Stated // under all classes the same
	for _, class := range registry.Protocols(want) {
		if err := call(func(ctx context.Context) error { return l.cfg.Registry.Register(ctx, k.service, class, want) }); err != nil {
			return fmt.Errorf("write %s of %s under %s: %w", k.ip, k.service, class, err)
		}
	}
	return nil
}

// statement is one of this node's, later than all that it has made: also after a restart
// with a clock that was set back, once the sweep has seen them.
func (l *Pods) statement() registry.Statement {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.said = max(l.said+1, uint64(time.Now().UnixNano()))
	return registry.Statement{Node: l.cfg.Place.Node, Stated: l.said}
}

// awaitRow waits until what is wanted under k now has been tried, whatever came of it.
func (l *Pods) awaitRow(ctx context.Context, k rowKey) {
	l.mu.Lock()
	r := l.rows[k]
	if r == nil {
		l.mu.Unlock()
		return
	}
	gen := r.gen
	for r.tried < gen {
		changed, running := r.changed, l.ctx
		l.mu.Unlock()
		if running == nil {
			return // nobody writes before Run
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		case <-running.Done():
			return
		}
		l.mu.Lock()
	}
	l.mu.Unlock()
}
