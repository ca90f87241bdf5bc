package mtls

import (
	"crypto/x509"
	"fmt"
	"time"
)

// Bond is what a session was opened with: both ends' certificates, as they were verified. A session lives
// no longer than they do: its holder ends it at NotAfter, and when Judge finds that they hold
// no more. Immutable; safe for concurrent use.
type Bond struct {
	Own  *SVID               // that was shown, or was in force when the handshake began; nil: not known
	Peer []*x509.Certificate // the chain, leaf first
	Use  x509.ExtKeyUsage    // of the peer's leaf
}

// NotAfter is the earliest end of validity of both chains.
func (b *Bond) NotAfter() time.Time {
	end := b.Peer[0].NotAfter
	for _, c := range b.Peer[1:] {
		if c.NotAfter.Before(end) {
			end = c.NotAfter
		}
	}
	if b.Own != nil && b.Own.NotAfter.Before(end) {
		end = b.Own.NotAfter
	}
	return end
}

// Judge verifies both chains again, by the bundle that the pod has now; at is the time of day. nil: the session may
// go on. A rotation that leaves the bundle as it was needs no second look.
func (b *Bond) Judge(now *SVID, at time.Time) error {
	if now == nil || now == b.Own || b.Own != nil && now.Roots.Equal(b.Own.Roots) {
		return nil // no news: what ends by itself ends at NotAfter
	}
	id, err := peerID(b.Peer)
	if err == nil {
		err = verifyChain(id, b.Peer, now.Roots, b.Use, at)
	}
	if err != nil {
		return fmt.Errorf("mtls: the session's peer is trusted no more: %w", err)
	}
	if b.Own == nil {
		return nil
	}
	chain := make([]*x509.Certificate, len(b.Own.Cert.Certificate))
	for i, der := range b.Own.Cert.Certificate {
		if chain[i], err = x509.ParseCertificate(der); err != nil {
			return fmt.Errorf("mtls: certificate %d of the session's own chain: %w", i+1, err)
		}
	}
	if err := verifyChain(b.Own.ID, chain, now.Roots, x509.ExtKeyUsageAny, at); err != nil {
		return fmt.Errorf("mtls: the session's own certificate is trusted no more: %w", err)
	}
	return nil
}
