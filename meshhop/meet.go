package meshhop

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"aether/mtls"
	"aether/mtls/spiffeid"
)

// LocalPeer is what a handshake between two pods of this process would have shown: both
// certificates have been verified as over TLS, each against the other pod's bundle.
// That each side has the key to its certificate was checked when it came (mtls.NewSVID).
type LocalPeer struct {
	Key      Key               // of the meeting
	Port     uint16            // that the server name says
	Caller   spiffeid.ID       // verified
	Peer     *x509.Certificate // the caller's
	XFCC     string            // value of x-forwarded-client-cert for its requests
	NotAfter time.Time         // earliest end of validity of both chains

	dialer *Dialer
	local  *Local
	svid   *mtls.SVID
	hello  *tls.ClientHelloInfo
	served *tls.Config
}

// RefusedByPeer: the destination of a VerifyLocal would have refused the handshake. ReasonOf
// says of it what the alert would have said to the source; Err is what the destination knows.
type RefusedByPeer struct{ Err error }

func (e *RefusedByPeer) Error() string {
	return "refused by the destination, of this node: " + e.Err.Error()
}

// VerifyLocal verifies k's source and l, both pods of this process, for each other, and
// opens nothing. The checks are those of Dial and Accept, by the same configurations of
// TLS: the source's certificate, its trust bundle and pin; the destination's, its
// bundle, trust domain and ports. It takes a turn of the Dialer's Limiter, and the
// processor for some verifications. ReasonOf classes its errors.
func (d *Dialer) VerifyLocal(ctx context.Context, k Key, l *Local) (*LocalPeer, error) {
	m, err := d.meet(ctx, k, l)
	if err != nil {
		return nil, fmt.Errorf("meshhop: meet %s: %w", k, err)
	}
	return m, nil
}

func (d *Dialer) meet(ctx context.Context, k Key, l *Local) (*LocalPeer, error) {
	svid, err := d.own(k)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(d.Handshake, DefaultHandshake))
	defer cancel()
	turn, err := d.Limit.Enter(ctx, k.Pod, k.Endpoint.Addr())
	if err != nil {
		return nil, err
	}
	defer turn.Leave()
	m := &LocalPeer{Key: k, dialer: d, local: l, svid: svid, hello: &tls.ClientHelloInfo{ServerName: k.SNI}}
	if m.served, err = l.TLS.GetConfigForClient(m.hello); err != nil {
		return nil, &RefusedByPeer{err}
	}
	if len(m.served.Certificates) == 0 { // how mtls.ServerConfig refuses a name
		return nil, &RefusedByPeer{&mtls.UnknownSNI{SNI: k.SNI}}
	}
	theirs, err := shown(k.SNI, m.served.Certificates[0])
	if err != nil {
		return nil, err
	}
	if err := mtls.ClientConfig(mtls.Client{SVID: svid, SNI: k.SNI, Pin: k.Pin, Now: d.Now}).VerifyConnection(theirs); err != nil {
		return nil, err
	}
	ours, err := shown(k.SNI, svid.Cert)
	if err != nil {
		return nil, err
	}
	if err := m.served.VerifyConnection(ours); err != nil {
		return nil, &RefusedByPeer{err}
	}
	if m.Caller, err = mtls.PeerID(&ours); err != nil {
		return nil, &RefusedByPeer{err}
	}
	port, ok := mtls.ParseSNI(k.SNI, l.Compat)
	if !ok {
		return nil, &RefusedByPeer{&mtls.UnknownSNI{SNI: k.SNI}}
	}
	m.Port, m.Peer = port, ours.PeerCertificates[0]
	m.XFCC = mtls.XFCC(l.ID, m.Peer)
	m.NotAfter = earlier(chainEnd(&ours), chainEnd(&theirs))
	return m, nil
}

// Left is how long the certificates of both hold.
func (m *LocalPeer) Left() time.Duration {
	if m.dialer.Now != nil {
		return m.NotAfter.Sub(m.dialer.Now())
	}
	return time.Until(m.NotAfter)
}

// Fresh reports whether nothing has changed that VerifyLocal judged by: both pods have the
// certificates and bundles that they had, and the port is served. It does not allocate.
func (m *LocalPeer) Fresh() bool {
	if m.dialer.SVID(m.Key.Pod) != m.svid {
		return false
	}
	now, err := m.local.TLS.GetConfigForClient(m.hello)
	return err == nil && now == m.served
}

// shown is what a peer sees of a handshake in which cert is presented.
func shown(sni string, cert tls.Certificate) (tls.ConnectionState, error) {
	cs := tls.ConnectionState{ServerName: sni, HandshakeComplete: true}
	for _, der := range cert.Certificate {
		c, err := x509.ParseCertificate(der)
		if err != nil {
			return cs, &mtls.NotSVID{Err: err}
		}
		cs.PeerCertificates = append(cs.PeerCertificates, c)
	}
	if len(cs.PeerCertificates) == 0 {
		return cs, &mtls.NotSVID{Err: errors.New("it sent no certificate")}
	}
	return cs, nil
}
