package mtls

import (
	"fmt"
	"time"

	"aether/mtls/spiffeid"
)

// The errors of a handshake that a caller must tell apart; each is returned by
// value behind a pointer and found with errors.As.

// NoCertificate: a pod has no valid SVID, so it neither dials nor accepts
// (contract 5.4).
type NoCertificate struct {
	Pod string // container ID
}

func (e *NoCertificate) Error() string {
	return fmt.Sprintf("mtls: pod %s has no valid certificate: see that its identity is registered and its source (SPIRE, files) answers", e.Pod)
}

// NotSVID: the peer's certificate carries no workload's SPIFFE ID.
type NotSVID struct{ Err error }

func (e *NotSVID) Error() string { return "mtls: the peer presents no X.509-SVID: " + e.Err.Error() }
func (e *NotSVID) Unwrap() error { return e.Err }

// WrongPeer: the chain is good and the identity is somebody else's: the address
// has a new owner, or the registry is wrong.
type WrongPeer struct{ Want, Got spiffeid.ID }

func (e *WrongPeer) Error() string {
	return fmt.Sprintf("mtls: the peer is %s, wanted %s: its address may belong to another pod now", e.Got, e.Want)
}

// ForeignTrustDomain: the peer's identity is of another trust domain.
type ForeignTrustDomain struct {
	Want string // our trust domain
	Got  spiffeid.ID
}

func (e *ForeignTrustDomain) Error() string {
	return fmt.Sprintf("mtls: the peer is %s, wanted the trust domain %s", e.Got, e.Want)
}

// Untrusted: no chain leads from the peer's certificate to the pod's bundle.
type Untrusted struct {
	Peer spiffeid.ID // as the certificate claims: unproven
	Err  error
}

func (e *Untrusted) Error() string {
	return fmt.Sprintf("mtls: the certificate of %s is not trusted by the bundle: %v", e.Peer, e.Err)
}
func (e *Untrusted) Unwrap() error { return e.Err }

// Expired: a certificate of the peer's chain is not valid now, too old or not yet valid.
type Expired struct {
	Peer                     spiffeid.ID
	Now, NotBefore, NotAfter time.Time // of the leaf
	Err                      error
}

func (e *Expired) Error() string {
	return fmt.Sprintf("mtls: the certificate of %s (valid %s to %s) does not hold at %s: %v; compare the clocks of the nodes",
		e.Peer, e.NotBefore.UTC().Format(time.RFC3339), e.NotAfter.UTC().Format(time.RFC3339), e.Now.UTC().Format(time.RFC3339), e.Err)
}
func (e *Expired) Unwrap() error { return e.Err }

// UnknownSNI: the server name of a ClientHello names no port the pod serves.
type UnknownSNI struct{ SNI string }

func (e *UnknownSNI) Error() string {
	return fmt.Sprintf("mtls: server name %q names no port that this pod serves", e.SNI)
}
