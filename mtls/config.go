package mtls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"aether/mtls/spiffeid"
)

// groups are the key exchanges offered and taken, best first.
func groups() []tls.CurveID { return []tls.CurveID{tls.X25519MLKEM768, tls.X25519, tls.CurveP256} }

// RenewALPN is the protocol (RFC 7301) of a handshake that is made for its certificates only: whoever accepts it ends the connection
// with close_notify as soon as it has verified the client (decision 060).
const RenewALPN = "aether-renew/1"

// Client says how to dial one peer.
type Client struct {
	SVID *SVID            // who dials; required
	SNI  string           // server name, sent as it is: decimal port on a direct hop (contract 5.1); empty: none sent
	ALPN []string         // offered; nil: none, as for raw TCP
	Pin  spiffeid.ID      // the one identity that is accepted; required
	Now  func() time.Time // nil: time.Now
}

// ClientConfig returns the configuration of one dial. Whoever answers must prove
// Pin, by a chain to the SVID's bundle; a zero Pin or an SVID without bundle
// refuses everybody. TLS 1.3 only. The negotiated protocol may be empty although
// one was offered: an Envoy-based destination selects none (contract 6.1).
//
// In TLS 1.3 a client's handshake ends before the server has judged the client:
// its refusal arrives as an error of the first read.
func ClientConfig(c Client) *tls.Config {
	now := clock(c.Now)
	return &tls.Config{
		// The chain and the pin are checked below; the name in SNI is a port.
		InsecureSkipVerify: true,
		ServerName:         c.SNI,
		NextProtos:         c.ALPN,
		// GetClientCertificate and not Certificates: the latter sends nothing when
		// the server's hint of CAs does not name our issuer.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &c.SVID.Cert, nil
		},
		VerifyConnection: func(cs tls.ConnectionState) error {
			id, err := verifyPeer(&cs, c.SVID.Roots, x509.ExtKeyUsageServerAuth, now())
			if err != nil {
				return err
			}
			if c.Pin.IsZero() || id != c.Pin {
				return &WrongPeer{Want: c.Pin, Got: id}
			}
			return nil
		},
		MinVersion:                  tls.VersionTLS13,
		CurvePreferences:            groups(),
		SessionTicketsDisabled:      true,
		DynamicRecordSizingDisabled: true,
		Time:                        now,
	}
}

// Server says how a pod accepts hops.
type Server struct {
	Pod    string                 // container ID, for errors
	SVID   func() *SVID           // the pod's current SVID, nil: none; asked at each handshake; required
	Serves func(port uint16) bool // whether the pod serves the port; asked at each handshake; required unless Named. 0: no server name, only asked with Compat
	Compat bool                   // tolerate Envoy-based sources: see ServerConfig
	Named  bool                   // it is called by a name, as servers beside the traffic are: the server name is not looked at, nor Serves asked
	Now    func() time.Time       // nil: time.Now
}

// Refuser is a net.Conn that wants to know why its ClientHello was refused. The
// alert that crypto/tls can be made to send (unrecognized_name) comes with an
// error that says nothing; the reason goes this way.
type Refuser interface{ Refuse(error) }

// ServerConfig returns the configuration of a pod's mesh listener (contract 6.1).
// A client certificate is required, must chain to the pod's bundle, carry exactly
// one SPIFFE ID and be of the pod's trust domain. "h2" is selected when offered;
// a client that offers nothing gets nothing. Where RenewALPN is offered it is selected, and
// the server name is not looked at. Else that must be one that
// ParseSNI reads and Serves admits; otherwise the handshake fails with the alert
// unrecognized_name, and with *UnknownSNI where the connection is a Refuser.
//
// Compat accepts what Envoy-based sources send: TLS 1.2, no server name, and
// "<port>.<service>.<namespace>.<domain>".
//
// The configuration may be shared by any number of connections at once.
func ServerConfig(s Server) *tls.Config {
	now := clock(s.Now)
	// One configuration serves all handshakes between two rotations.
	type made struct {
		svid  *SVID
		cfg   *tls.Config
		renew *tls.Config // for RenewALPN
	}
	var last atomic.Pointer[made]
	base := &tls.Config{
		MinVersion:                  tls.VersionTLS13,
		CurvePreferences:            groups(),
		SessionTicketsDisabled:      true,
		DynamicRecordSizingDisabled: true,
		Time:                        now,
	}
	if s.Compat {
		base.MinVersion = tls.VersionTLS12
	}
	// unserved has no certificate, which makes crypto/tls answer unrecognized_name.
	unserved := base.Clone()
	configFor := func(svid *SVID) *made {
		if m := last.Load(); m != nil && m.svid == svid {
			return m
		}
		cfg := base.Clone()
		cfg.Certificates = []tls.Certificate{svid.Cert}
		cfg.NextProtos = []string{"h2"}
		cfg.ClientAuth = tls.RequireAnyClientCert
		cfg.VerifyConnection = func(cs tls.ConnectionState) error {
			id, err := verifyPeer(&cs, svid.Roots, x509.ExtKeyUsageClientAuth, now())
			if err != nil {
				return err
			}
			if id.TrustDomain() != svid.TrustDomain {
				return &ForeignTrustDomain{Want: svid.TrustDomain, Got: id}
			}
			return nil
		}
		m := &made{svid, cfg, cfg.Clone()}
		m.renew.NextProtos = []string{RenewALPN}
		last.Store(m)
		return m
	}
	cfg := base.Clone()
	cfg.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		svid := s.SVID()
		if svid == nil {
			return nil, &NoCertificate{Pod: s.Pod}
		}
		if s.Named {
			return configFor(svid).cfg, nil
		}
		if slices.Contains(h.SupportedProtos, RenewALPN) {
			return configFor(svid).renew, nil
		}
		port, ok := ParseSNI(h.ServerName, s.Compat)
		if !ok || !s.Serves(port) {
			if r, ok := h.Conn.(Refuser); ok {
				r.Refuse(&UnknownSNI{SNI: h.ServerName})
			}
			return unserved, nil
		}
		return configFor(svid).cfg, nil
	}
	return cfg
}

// ParseSNI reads the port out of a server name (contract 6.2): the decimal
// number, 1 to 65535, without sign or leading zero. With compat also
// "<port>.<service>.<namespace>.<domain>", and the empty name, which gives 0:
// the pod's declared port.
func ParseSNI(sni string, compat bool) (port uint16, ok bool) {
	if sni == "" {
		return 0, compat
	}
	num, rest, dotted := strings.Cut(sni, ".")
	if dotted && (!compat || rest == "") {
		return 0, false
	}
	n, err := strconv.ParseUint(num, 10, 16)
	if err != nil || n == 0 || num[0] == '0' || num[0] == '+' {
		return 0, false
	}
	return uint16(n), true
}

// PeerID returns the identity of the other side of a finished handshake that one
// of this package's configurations verified.
func PeerID(cs *tls.ConnectionState) (spiffeid.ID, error) { return peerID(cs.PeerCertificates) }

func peerID(chain []*x509.Certificate) (spiffeid.ID, error) {
	if len(chain) == 0 {
		return spiffeid.ID{}, &NotSVID{errors.New("it sent no certificate")}
	}
	id, err := spiffeid.FromCert(chain[0])
	if err != nil {
		return spiffeid.ID{}, &NotSVID{err}
	}
	return id, nil
}

// verifyPeer checks everything about the peer but which identity it is.
func verifyPeer(cs *tls.ConnectionState, roots *x509.CertPool, use x509.ExtKeyUsage, now time.Time) (spiffeid.ID, error) {
	id, err := PeerID(cs)
	if err != nil {
		return spiffeid.ID{}, err
	}
	_, err = verifyChain(id, cs.PeerCertificates, roots, use, now)
	return id, err
}

// verifyChain also returns how long the chain holds: until its first certificate ends, its authority's included.
func verifyChain(id spiffeid.ID, chain []*x509.Certificate, roots *x509.CertPool, use x509.ExtKeyUsage, now time.Time) (end time.Time, err error) {
	if roots == nil { // x509 would take the system's
		return end, &Untrusted{Peer: id, Err: errors.New("the trust bundle is missing")}
	}
	mid := x509.NewCertPool()
	for _, c := range chain[1:] {
		mid.AddCert(c)
	}
	verified, err := chain[0].Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: mid, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{use},
	})
	if err == nil {
		for _, c := range verified { // over another authority it may hold longer
			if e := earliestEnd(c); e.After(end) {
				end = e
			}
		}
		return end, nil
	}
	if bad, ok := errors.AsType[x509.CertificateInvalidError](err); ok && bad.Reason == x509.Expired {
		return end, &Expired{Peer: id, Now: now, NotBefore: chain[0].NotBefore, NotAfter: chain[0].NotAfter, Err: err}
	}
	return end, &Untrusted{Peer: id, Err: err}
}

// earliestEnd is when the first certificate of a chain ends.
func earliestEnd(chain []*x509.Certificate) time.Time {
	end := chain[0].NotAfter
	for _, c := range chain[1:] {
		if c.NotAfter.Before(end) {
			end = c.NotAfter
		}
	}
	return end
}

func clock(now func() time.Time) func() time.Time {
	if now == nil {
		return time.Now
	}
	return now
}
