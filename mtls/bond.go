package mtls

import (
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Bond is the certificates of both ends of a session, as they were verified. A session lives no longer than they
// do: its holder ends it at NotAfter, and when Judge finds that they hold no more. A certificate that was
// renewed takes the place of the older one by RenewOwn and RenewPeer, which give another Bond (decision 060).
// Immutable; safe for concurrent use.
type Bond struct {
	Own  *SVID               // that was shown, or was in force when the handshake began, or is the newest; nil: not known
	Peer []*x509.Certificate // the chain, leaf first
	Use  x509.ExtKeyUsage    // of the peer's leaf

	by    *x509.CertPool // the bundle by which both chains were found good last; nil: Own's
	mixed bool           // there is no such bundle: one chain has come since
}

// Same reports whether b and o are of the same certificates and were found good by the same bundle: one may stand for the
// other. A chain that was parsed takes some 5 KiB.
func (b *Bond) Same(o *Bond) bool {
	return b.Own == o.Own && b.Use == o.Use && b.by == o.by && b.mixed == o.mixed && slices.EqualFunc(b.Peer, o.Peer, (*x509.Certificate).Equal)
}

// NotAfter is the earliest of PeerEnd and the end of the own certificate.
func (b *Bond) NotAfter() time.Time {
	end := b.PeerEnd()
	if b.Own != nil && b.Own.NotAfter.Before(end) {
		end = b.Own.NotAfter
	}
	return end
}

// PeerEnd is the earliest end of validity of the certificates that the peer has shown. Where its authority ends earlier, the
// pod's bundle changes then, and Judge ends the session.
func (b *Bond) PeerEnd() time.Time { return earliestEnd(b.Peer) }

// Renews reports whether now, a certificate of the pod, may take the place of b's own one: it is of the same
// identity and ends later.
func (b *Bond) Renews(now *SVID) bool {
	return now != nil && b.Own != nil && now.ID == b.Own.ID && now.NotAfter.After(b.Own.NotAfter)
}

// Judged is b after Judge has found it good by now; own: with now, which Renews it and is Sound, in the place
// of its own certificate.
func (b *Bond) Judged(now *SVID, own bool) *Bond {
	if now == nil || now == b.Own || !own && !b.mixed && now.Roots.Equal(b.bundle()) {
		return b
	}
	next := &Bond{Own: b.Own, Peer: b.Peer, Use: b.Use, by: now.Roots}
	if own {
		next.Own = now
	}
	return next
}

// bundle is that by which both chains were found good last; nil: there is none.
func (b *Bond) bundle() *x509.CertPool {
	switch {
	case b.mixed:
		return nil
	case b.by == nil && b.Own != nil:
		return b.Own.Roots
	}
	return b.by
}

// RenewPeer is b with the peer's chain of newer, a later session with the same peer, which Judge has found good by now;
// nil: the pod has no certificate. It is b itself unless that chain is of the same identity, for the same use, and ends later.
func (b *Bond) RenewPeer(newer *Bond, now *SVID) *Bond {
	if b.Use != newer.Use || !newer.PeerEnd().After(b.PeerEnd()) {
		return b
	}
	id, err := peerID(b.Peer)
	if err != nil {
		return b
	}
	if is, err := peerID(newer.Peer); err != nil || is != id {
		return b
	}
	was, mixed := b.bundle(), true
	if now != nil && was != nil {
		mixed = !now.Roots.Equal(was)
	}
	return &Bond{Own: b.Own, Peer: newer.Peer, Use: b.Use, by: was, mixed: mixed}
}

// Judge verifies both chains again, by the bundle that the pod has now; at is the time of day. nil: the session may
// go on. A rotation that leaves the bundle as it was needs no second look.
func (b *Bond) Judge(now *SVID, at time.Time) error {
	if now == nil {
		return nil // there is no certificate: what ends by itself ends at NotAfter
	}
	if was := b.bundle(); was != nil && now.Roots.Equal(was) {
		return nil // no news: what ends by itself ends at NotAfter
	}
	id, err := peerID(b.Peer)
	if err == nil {
		_, err = verifyChain(id, b.Peer, now.Roots, b.Use, at)
	}
	if err != nil {
		return fmt.Errorf("mtls: the session's peer is trusted no more: %w", err)
	}
	if b.Own == nil {
		return nil
	}
	if err := b.Own.verify(now.Roots, at); err != nil {
		return fmt.Errorf("mtls: the session's own certificate is trusted no more: %w", err)
	}
	return nil
}

// Sound verifies s by its own bundle; at is the time of day.
func (s *SVID) Sound(at time.Time) error {
	if err := s.verify(s.Roots, at); err != nil {
		return fmt.Errorf("mtls: the certificate of %s is not of its own bundle: %w", s.ID, err)
	}
	return nil
}

// verify checks the chain of s against roots, whatever it is used for.
func (s *SVID) verify(roots *x509.CertPool, at time.Time) error {
	chain := make([]*x509.Certificate, len(s.Cert.Certificate))
	for i, der := range s.Cert.Certificate {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return fmt.Errorf("certificate %d of the chain: %w", i+1, err)
		}
		chain[i] = c
	}
	if len(chain) == 0 {
		return &NotSVID{errors.New("it has no certificate")}
	}
	_, err := verifyChain(s.ID, chain, roots, x509.ExtKeyUsageAny, at)
	return err
}
