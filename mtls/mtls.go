// Package mtls is the identity of pods on the wire: the certificate each pod
// has now, and the TLS configurations that present it and verify the other side.
//
//   - No certificate of the right identity: no connection. There is no
//     fallback identity and no cleartext.
//   - Verification is complete and happens in VerifyConnection: chain against
//     the pod's own trust bundle, validity by the injected clock, extended key
//     usage, exactly one SPIFFE ID, and for a client the exact ID it pins.
//     Host names are never checked; the server name only routes.
//   - Nothing is resumed: session tickets are off on both sides.
//   - A rotated certificate serves the next handshake; connections that stand
//     keep theirs (contract 12).
//
// It opens no socket, and where identities come from is a Source's business.
package mtls

import (
	"context"
	"crypto"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"aether/mtls/spiffeid"
)

// SVID is one X.509-SVID with the bundle to judge peers by. Immutable once made:
// it is shared by every connection that uses it.
type SVID struct {
	ID          spiffeid.ID
	Cert        tls.Certificate // chain, leaf first, and key; Leaf is set
	Roots       *x509.CertPool  // trust bundle of the pod's own trust domain; never nil
	TrustDomain string          // of ID
	NotAfter    time.Time       // earliest end of validity in the chain, its authority's included

	// Authorities are the certificates that Roots was made of.
	Authorities []*x509.Certificate
}

// NewSVID checks that cert is a usable X.509-SVID and returns it with the bundle
// of authorities. The key must fit the leaf, every certificate of the chain must parse,
// the leaf must carry a workload's SPIFFE ID, and the chain must lead to one of
// the authorities at now.
func NewSVID(cert tls.Certificate, authorities []*x509.Certificate, now time.Time) (*SVID, error) {
	if len(cert.Certificate) == 0 {
		return nil, errors.New("mtls: the certificate chain is empty")
	}
	if cert.PrivateKey == nil {
		return nil, errors.New("mtls: the certificate has no private key")
	}
	if len(authorities) == 0 {
		return nil, errors.New("mtls: the trust bundle is empty: no peer could be verified")
	}
	roots := pool(authorities)
	chain := make([]*x509.Certificate, len(cert.Certificate))
	for i, der := range cert.Certificate {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("mtls: certificate %d of the chain: %w", i+1, err)
		}
		chain[i] = c
	}
	cert.Leaf = chain[0]
	signer, ok := cert.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("mtls: a private key of type %T cannot sign", cert.PrivateKey)
	}
	if pub, ok := signer.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !pub.Equal(chain[0].PublicKey) {
		return nil, errors.New("mtls: the private key is not the certificate's: the two files were not written together")
	}
	id, err := spiffeid.FromCert(chain[0])
	if err != nil {
		return nil, fmt.Errorf("mtls: own certificate: %w", err)
	}
	end, err := verifyChain(id, chain, roots, x509.ExtKeyUsageAny, now)
	if err != nil {
		return nil, fmt.Errorf("mtls: own certificate: %w", err)
	}
	return &SVID{ID: id, Cert: cert, Roots: roots, TrustDomain: id.TrustDomain(), NotAfter: end, Authorities: authorities}, nil
}

func pool(authorities []*x509.Certificate) *x509.CertPool {
	p := x509.NewCertPool()
	for _, c := range authorities {
		p.AddCert(c)
	}
	return p
}

// at is v without the authorities that have ended at now, and when the next one ends; zero: none does. It is v itself
// where none has ended. What was verified before by an authority that has ended is then judged again.
func (v *SVID) at(now time.Time) (_ *SVID, next time.Time) {
	var rest []*x509.Certificate
	for _, c := range v.Authorities {
		if !now.Before(c.NotAfter) {
			continue
		}
		rest = append(rest, c)
		if next.IsZero() || c.NotAfter.Before(next) {
			next = c.NotAfter
		}
	}
	if len(rest) == len(v.Authorities) {
		return v, next
	}
	w := *v
	w.Authorities, w.Roots = rest, pool(rest)
	return &w, next
}

// Ref names a pod whose identity is wanted.
type Ref struct {
	Container string      // ID of its sandbox: the key of a Store
	Namespace string      // of the pod
	Account   string      // its ServiceAccount
	Pod, UID  string      // name and UID; a Source that does not attest by them ignores them
	ID        spiffeid.ID // the identity it must have; anything else is refused
}

// Source is where identities come from: one stream a pod of certificate and bundle.
type Source interface {
	// Watch calls on with the pod's SVID, again at each rotation of certificate
	// or bundle, and with an error (and a nil SVID) for what went wrong meanwhile,
	// after which the last SVID stays in force. Calls to on are not concurrent.
	// Watch reconnects by itself and returns only when ctx has ended, or for good.
	// Safe for concurrent use.
	Watch(ctx context.Context, r Ref, on func(*SVID, error)) error
}

// XFCC returns the value of x-forwarded-client-cert for requests of peer that
// were received as own (contract 6.3):
//
//	By=<own>;Hash=<sha256 of the peer's certificate>;Subject="<RFC 2253>";URI=<peer's ID>
//
// peer must have been verified. The value holds no byte that a field value may not hold.
func XFCC(own spiffeid.ID, peer *x509.Certificate) string {
	id, err := spiffeid.FromCert(peer)
	if err != nil {
		id = spiffeid.ID{} // never after verification; an empty URI names nobody
	}
	sum := sha256.Sum256(peer.Raw)
	return "By=" + own.String() + ";Hash=" + hex.EncodeToString(sum[:]) +
		";Subject=\"" + printable(peer.Subject.String()) + "\";URI=" + id.String()
}

// printable writes controls and non-ASCII bytes as RFC 2253 2.4 writes any byte,
// a backslash and two hex digits. Quotes are escaped already: a subject can end
// neither the quoted string nor the header it stands in.
func printable(s string) string {
	const digits = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; c < 0x20 || c >= 0x7f {
			b.Write([]byte{'\\', digits[c>>4], digits[c&15]})
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}
