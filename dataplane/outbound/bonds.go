package outbound

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"aether/dataplane/engine"
	"aether/meshhop"
	"aether/mtls"
)

// errRevoked: a session was opened with certificates that are trusted no more.
var errRevoked = errors.New("an identity of the session is trusted no more")

// maxBonds bounds what is known of the sessions of one hop. Most show the same certificates, and are one.
const maxBonds = 32

// bonds are what the sessions of one hop were opened with (mtls.Bond).
type bonds struct {
	mu  sync.Mutex
	all []*mtls.Bond // guarded by mu; the newest last
}

func (s *bonds) add(b *mtls.Bond) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.all = slices.DeleteFunc(s.all, func(o *mtls.Bond) bool {
		return !now.Before(o.NotAfter()) || o.Own == b.Own && bytes.Equal(o.Peer[0].Raw, b.Peer[0].Raw)
	})
	if len(s.all) >= maxBonds {
		s.all = slices.Delete(s.all, 0, 1)
	}
	s.all = append(s.all, b)
}

// judge finds one that holds no more.
func (s *bonds) judge(now *mtls.SVID, at time.Time) error {
	s.mu.Lock()
	all := slices.Clone(s.all)
	s.mu.Unlock()
	for _, b := range all {
		if err := b.Judge(now, at); err != nil {
			return fmt.Errorf("%w: %w", errRevoked, err)
		}
	}
	return nil
}

// Rotated takes in that a pod has another certificate, or bundle: hops and raw-TCP connections of which a
// session was opened with what is trusted no more end, and requests take new ones. now may be nil: the pod's
// certificate has gone. It does not wait. Safe for concurrent use.
func (o *Outbound) Rotated(container string, now *mtls.SVID) {
	at := time.Now()
	o.loops.Each(func(st *loopState) {
		type held struct {
			key hopKey
			hop *hopState
		}
		var hops []held
		var raws []*rawConn
		for k, h := range st.hops {
			switch {
			case h.held == nil: // in process either side may have changed
				if n, ok := h.hop.(*engine.Near); ok && (k.pod.Container == container || k.near == container) {
					n.Judge()
				}
			case k.pod.Container == container:
				hops = append(hops, held{k, h})
			}
		}
		for p, u := range st.pods {
			if p.Container == container {
				for r := range u.raw {
					raws = append(raws, r)
				}
			}
		}
		if len(hops)+len(raws) == 0 {
			return
		}
		st.l.Go(func() { // it verifies
			for _, r := range raws {
				if err := r.held.judge(now, at); err != nil {
					r.cut(err)
				}
			}
			for _, d := range hops {
				if err := d.hop.held.judge(now, at); err != nil {
					_ = st.l.Post(func() {
						if !d.hop.gone {
							d.hop.gone = true
							delete(st.hops, d.key)
							d.hop.hop.Leave(err)
						}
					})
				}
			}
		})
	})
}

// holdRaw gives the context that the relay over s lives in; over ends it.
func (r *rawConn) holdRaw(ctx context.Context, s *meshhop.Session, svid *mtls.SVID) (_ context.Context, over func()) {
	r.held.add(s.Bond)
	if err := r.held.judge(svid, time.Now()); err != nil { // it has changed since
		r.cut(err)
	}
	return context.WithDeadlineCause(ctx, s.NotAfter, engine.ErrExpired)
}

// revoked makes an error of Meet that says who one of the two is not one that ends what is under way.
func revoked(err error) error {
	switch meshhop.ReasonOf(err) {
	case meshhop.ReasonNoCertificate, meshhop.ReasonWrongPeer, meshhop.ReasonNotSVID, meshhop.ReasonUntrusted, meshhop.ReasonExpired, meshhop.ReasonRemote:
		return &engine.Revoked{Err: err}
	}
	return err
}
