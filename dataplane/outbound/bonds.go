package outbound

import (
	"errors"
	"fmt"

	"aether/dataplane/engine"
	"aether/meshhop"
	"aether/mtls"
)

// Rotated takes in that a pod has another certificate, or bundle: hops and raw-TCP connections of which a
// session was opened with what is trusted no more end, and requests take new ones. It verifies them in the
// calling goroutine. Safe for concurrent use.
func (o *Outbound) Rotated(container string) {
	o.loops.Each(func(st *loopState) {
		for k, h := range st.hops { // in process either side may have changed
			if n, ok := h.hop.(*engine.InProcess); ok && (k.pod.Container == container || k.near == container) {
				n.Judge()
			}
		}
	})
	o.bonds.Rotated(container)
}

// hold holds a session of p that st's loop carries to the identities of both its ends, until it is released.
// What it has shown is also good for other sessions.
func (st *loopState) hold(p *Pod, k meshhop.Key, b *mtls.Bond, end func(cause error)) *meshhop.Held {
	d := st.o.cfg.Dialer
	svid := func() *mtls.SVID { return d.SVID(k.Pod) }
	st.o.bonds.Verified(k.Pod, k.Peer(), b, svid, false)
	return st.o.bonds.Hold(meshhop.Holding{
		Pod: k.Pod, Peer: k.Peer(), Bond: b, SVID: svid,
		End: func(err error) {
			if !errors.Is(err, meshhop.ErrExpired) {
				err = fmt.Errorf("%w: %w", errRevoked, err)
			}
			end(err)
		},
		Renew: func(done func(*mtls.Bond, bool, error)) {
			st.l.Go(func() {
				b, told, err := d.Renew(p.Context, k)
				if err != nil {
					st.o.notRenewed(k, err)
				}
				done(b, told, err)
			})
		},
	})
}

// notRenewed logs once a cause.
func (o *Outbound) notRenewed(k meshhop.Key, err error) {
	why := string(meshhop.ReasonOf(err))
	o.quiet.Warn("renew "+why+" "+k.String(), "certificates not renewed with an endpoint; connections to it that last end with those they have", "reason", why, "err", err)
}

// holdRaw cuts the relay of r over s when its time has come, until over is called.
func (st *loopState) holdRaw(r *rawConn, s *meshhop.Session) (over func()) {
	held := st.hold(r.key.pod, s.Key, s.Bond, r.cut)
	held.Watch()
	return held.Release
}

// revoked makes an error of VerifyLocal that says who one of the two is not one that ends what is under way.
func revoked(err error) error {
	switch meshhop.ReasonOf(err) {
	case meshhop.ReasonNoCertificate, meshhop.ReasonWrongPeer, meshhop.ReasonNotSVID, meshhop.ReasonUntrusted, meshhop.ReasonExpired, meshhop.ReasonRemote:
		return &engine.Revoked{Err: err}
	}
	return err
}

// notOpened logs once a cause.
func (o *Outbound) notOpened(k meshhop.Key, err error) {
	why := string(meshhop.ReasonOf(err))
	o.quiet.Warn(why+" "+k.String(), "hop not opened", "reason", why, "err", err)
}
