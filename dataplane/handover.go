package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	identityTime = 5 * time.Second       // that Open waits for the pods' certificates
	drainLook    = 50 * time.Millisecond // between two looks whether a drain is over
	stopTime     = 5 * time.Second       // a loop that does not run is waited for when the sockets are handed over
	farewellTime = time.Second           // a loop that does not run is waited for at the end of a drain
	lastTime     = 2 * time.Second       // or a quarter of the drain's limit: before it nothing new is taken any more
)

// changed wakes Open.
func (n *Node) changed() {
	select {
	case n.news <- struct{}{}:
	default:
	}
}

// Open ends Config.Hold once a first state has been applied and its pods have their
// certificates, of which late ones are waited for boundedly: until then the
// process that has the same sockets serves better. When it returns, pods are
// listened for, and captured; sockets that no pod of the state wants are closed. The
// error is ctx's. Call it once, while Run runs.
func (n *Node) Open(ctx context.Context) error {
	var late <-chan time.Time
	for over := false; ; {
		n.mu.Lock()
		if n.applied && n.ctx != nil {
			if missing := n.withoutIdentityLocked(); len(missing) == 0 || over {
				if over {
					n.log.Warn("pods without a certificate; they are served, and refuse hops until they have one", "pods", missing)
				}
				n.releaseLocked()
				n.mu.Unlock()
				return nil
			}
			if late == nil {
				late = time.After(identityTime)
			}
		}
		n.mu.Unlock()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-n.news:
		case <-late:
			over = true
		}
	}
}

func (n *Node) withoutIdentityLocked() (pods []string) {
	for c, p := range n.pods {
		if n.certs.Current(c) == nil {
			pods = append(pods, p.w.Namespace+"/"+p.w.Name)
		}
	}
	slices.Sort(pods)
	return pods
}

// releaseLocked ends the hold.
func (n *Node) releaseLocked() {
	defer n.syncedLocked()
	n.held = false
	want := map[string]bool{"": true} // what is of no pod is not ours
	for i := range n.want {
		want[n.want[i].ContainerID] = true
	}
	for _, k := range n.cfg.Owner.Keys() {
		if want[k.Container] {
			continue
		}
		if err := n.cfg.Owner.Release(k); err != nil {
			n.log.Warn("listeners", "socket", k.String(), "err", err)
		}
	}
	for _, p := range n.pods {
		if err := n.openLocked(p); err != nil {
			n.problemLocked(&p.w, err)
		}
	}
}

// Alone ends what Config.Hold has left to a predecessor: it has let go of the sockets, and the
// capture rules are this process's, to be taken out when Run ends.
func (n *Node) Alone() {
	n.mu.Lock()
	n.guest = false
	n.mu.Unlock()
}

// Freeze says whether a process that may take over has a copy of the Owner's
// sockets: then none is opened or closed, whatever is applied. Capture rules stay
// should Run end meanwhile. What a successor that did not take over has done to them is
// undone.
func (n *Node) Freeze(on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.frozen = on
	if on || n.ctx == nil {
		return
	}
	n.syncLocked()
	if n.cfg.Capture && !n.held && !n.gone {
		for _, p := range n.pods {
			n.captureLocked(p, &p.w)
		}
	}
}

// HandOver ends accepting, because a successor accepts on the same sockets: when it returns
// this process has closed its own of them, all of the Owner's, and has no part
// in the pods' capture any more. Connections go on; Drain comes next. A loop that does not run is waited for
// stopTime at most: the error names the pods whose sockets this process has still, which it does not accept on before that loop
// runs, nor after; they are closed with it.
func (n *Node) HandOver() error {
	n.mu.Lock()
	n.gone = true // nothing is opened from here on
	pods := maps.Clone(n.pods)
	n.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), stopTime)
	defer cancel()
	var mu sync.Mutex
	late := map[string]bool{}
	var names []string
	var asked sync.WaitGroup
	for c, p := range pods { // at once: each waits for every loop
		asked.Go(func() {
			if p.engine.StopListening(ctx, false) != nil {
				mu.Lock()
				late[c], names = true, append(names, p.w.Namespace+"/"+p.w.Name)
				mu.Unlock()
			}
		})
	}
	asked.Wait()
	if len(late) == 0 {
		return n.cfg.Owner.Close()
	}
	var errs []error
	for _, k := range n.cfg.Owner.Keys() {
		if !late[k.Container] {
			errs = append(errs, n.cfg.Owner.Release(k))
		}
	}
	slices.Sort(names)
	return errors.Join(append(errs, fmt.Errorf("a loop has not answered within %v: sockets of %d pods stay open until this process ends (%s); the successor accepts on them: if the process does not end by itself, end it", stopTime, len(names), strings.Join(names, ", ")))...)
}

// Drain ends what clients have under way without losing any of it: readiness
// answers 503, HTTP/2 connections get GOAWAY, HTTP/1 answers "Connection: close",
// and requests, relays and new connections go on. Where none is left, or the limit is near
// (lastTime), the node takes nothing new any more: what has been taken is answered in what is left of
// the limit. Drain returns when none is left then, or limit has passed, or ctx ends; what is left is cut
// by the end of Run. A node that drains stays so.
func (n *Node) Drain(ctx context.Context, limit time.Duration) {
	n.mu.Lock()
	n.draining = true
	if s := n.store.Load(); s != nil {
		n.store.Swap(s.WithDraining(true))
	}
	n.mu.Unlock()
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	n.engine.Drain(ctx)
	look := time.NewTicker(drainLook)
	defer look.Stop()
	last := time.NewTimer(limit - min(limit/4, lastTime))
	defer last.Stop()
	left, said := 0, false
	var shut, shutting chan struct{} // shut is closed when nothing new is taken any more; nil: that has not begun
	stop := func() {                 // it takes out kernel rules, which may take long: what is under way does not wait for it
		if shut == nil {
			shut = make(chan struct{})
			shutting = shut
			go func() {
				defer close(shut)
				n.shut(ctx)
			}()
		}
	}
	for {
		if left = n.engine.Serving(ctx); ctx.Err() != nil || left == 0 && shut != nil && shutting == nil {
			break
		}
		if left == 0 { // but one may have been accepted since the loops were asked
			stop()
		}
		select {
		case <-ctx.Done():
		case <-look.C:
		case <-shutting:
			shutting = nil
		case <-last.C:
			stop()
			select { // first, so that nothing comes behind what is named as the last; but there has to be time to answer that
			case <-shut:
			case <-time.After(min(limit/4, lastTime) / 2):
			}
			n.engine.Farewell(ctx)
			said = true
		}
	}
	if !said {
		bye, end := context.WithTimeout(context.WithoutCancel(ctx), farewellTime)
		defer end()
		n.engine.Farewell(bye)
	}
	if shut != nil {
		<-shut
	}
	n.log.Info("drained", "took", time.Since(start).Round(time.Millisecond), "cut", left)
}

// shut ends accepting for good: capture that leads to this process is taken out, what waits in the
// sockets is accepted, and they are closed. Where a successor accepts, or may, all of that is its own.
func (n *Node) shut(ctx context.Context) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gone {
		return
	}
	for _, p := range n.pods {
		n.uncaptureLocked(p)
	}
	for c, p := range n.pods {
		if err := p.engine.StopListening(ctx, !n.frozen); err != nil {
			continue // its loop has the descriptors still: they are closed with Run's end
		}
		if err := n.cfg.Owner.ReleasePod(c); err != nil {
			n.log.Warn("listeners", "pod", p.w.Namespace+"/"+p.w.Name, "err", err)
		}
	}
	n.gone = true
}
