package inbound

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"aether/dataplane/engine"
	"aether/meshhop"
	"aether/mtls"
)

// bonds are what the sessions of callers were opened with: none lives longer (mtls.Bond).
type bonds struct {
	mu  sync.Mutex
	all map[*Pod]map[*bond]struct{} // guarded by mu
}

type bond struct {
	*mtls.Bond
	end func(cause error) // takes the session's end; must not block
}

// keep holds a session of p to b until over is called. end is called, perhaps before keep returns, when b holds no more.
func (s *bonds) keep(p *Pod, b *mtls.Bond, end func(cause error)) (over func()) {
	k := &bond{b, end}
	s.mu.Lock()
	if s.all == nil {
		s.all = map[*Pod]map[*bond]struct{}{}
	}
	if s.all[p] == nil {
		s.all[p] = map[*bond]struct{}{}
	}
	s.all[p][k] = struct{}{}
	s.mu.Unlock()
	if p.Local.SVID != nil { // it may have changed since the handshake, and whoever told of it did not see this one
		if err := b.Judge(p.Local.SVID(), time.Now()); err != nil {
			end(err)
		}
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if delete(s.all[p], k); len(s.all[p]) == 0 {
			delete(s.all, p)
		}
	}
}

// of lists what is held of the pod with that container.
func (s *bonds) of(container string) (list []*bond) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p, held := range s.all {
		if p.Container == container {
			for k := range held {
				list = append(list, k)
			}
		}
	}
	return list
}

// Rotated takes in that a pod has another certificate, or bundle: sessions of callers that were opened with
// what is trusted no more end. It verifies them in the calling goroutine. Safe for concurrent use.
func (in *Inbound) Rotated(container string, now *mtls.SVID) {
	at := time.Now()
	for _, k := range in.bonds.of(container) {
		if err := k.Judge(now, at); err != nil {
			k.end(fmt.Errorf("inbound: %w", err))
		}
	}
}

// holdSession holds an HTTP session to its identity, until it is over.
func (c *conn) holdSession(h *meshhop.Inbound) (over func()) {
	c.info.Life = max(time.Until(h.NotAfter), 1)
	over = c.in.bonds.keep(c.pod, h.Bond, c.info.Sever)
	c.info.OnClose = func(*engine.ConnInfo) { over() }
	return over
}

// revokedCause is why a session was ended for its identity, for the journal.
func revokedCause(err error) string {
	if errors.Is(err, engine.ErrExpired) {
		return "identity-expired"
	}
	return "identity-revoked"
}

// holdRelay gives the context that a raw relay lives in.
func (c *conn) holdRelay(h *meshhop.Inbound) (context.Context, func()) {
	ctx, cancel := context.WithDeadlineCause(c.pod.Context, h.NotAfter, engine.ErrExpired)
	ctx, cut := context.WithCancelCause(ctx)
	over := c.in.bonds.keep(c.pod, h.Bond, func(cause error) { cut(cause) })
	return ctx, func() { over(); cut(nil); cancel() }
}
