package meshhop

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"time"

	"aether/mtls"
	"aether/mtls/record"
)

// Time that a hop's connect and handshake may take unless a configuration says otherwise.
const (
	DefaultConnect   = 2 * time.Second // contract 5.1
	DefaultHandshake = 5 * time.Second
)

// Dialer makes sessions. Its fields are not changed once it is used; safe for
// concurrent use.
type Dialer struct {
	// Sockets connects to addr from the pod's network namespace, until ctx ends. Required.
	Sockets func(ctx context.Context, pod string, addr netip.AddrPort) (*net.TCPConn, error)
	// SVID returns the pod's current certificate, nil: none. Required.
	SVID func(pod string) *mtls.SVID

	Connect   time.Duration    // 0: DefaultConnect
	Handshake time.Duration    // 0: DefaultHandshake; the wait for a turn counts
	Limit     *Limiter         // nil: no bound on concurrent dials
	Maker     record.Maker     // zero: record.Std
	Now       func() time.Time // nil: time.Now
}

// Session is a hop that this node opened. Whoever holds it owns Conn.
type Session struct {
	Key      Key
	Conn     *net.TCPConn
	ALPN     string            // selected; empty: none, as Envoy-based destinations do (contract 6.1), and to be taken as what was offered
	Peer     *x509.Certificate // verified, of identity Key.Pin
	NotAfter time.Time         // the earlier end of validity of both chains: the session ends then; reopen before
	Bond     *mtls.Bond        // what it was opened with
	stream   *record.Stream
}

// Record gives the session's record layer, with what arrived behind the
// handshake in it. Conn then carries ciphertext only, and no goroutine or deadline of
// TLS is left on it. To be called once.
func (s *Session) Record() record.Conn { return s.stream.Flip() }

// Dial opens a session for k: connection, handshake and verification, all in the
// calling goroutine. Nothing is dialled without a certificate of k.Source.
// ReasonOf classes its errors. The destination judges our certificate only after
// Dial has returned: its refusal is an error of the first Read.
func (d *Dialer) Dial(ctx context.Context, k Key) (*Session, error) {
	fail := func(err error) (*Session, error) { return nil, fmt.Errorf("meshhop: dial %s: %w", k, err) }
	svid, err := d.own(k)
	if err != nil {
		return fail(err)
	}
	c := mtls.Client{SVID: svid, SNI: k.SNI, Pin: k.Pin, Now: d.Now}
	switch k.Proto {
	case H2:
		c.ALPN = []string{"h2"}
	case Raw:
	case Renew:
		c.ALPN = []string{mtls.RenewALPN, "h2"}
	default:
		return fail(fmt.Errorf("the key has no protocol: %s", k.Proto))
	}

	conn, err := d.connect(ctx, k)
	if err != nil {
		return fail(&Connect{Err: err})
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(d.Handshake, DefaultHandshake))
	defer cancel()
	turn, err := d.Limit.Enter(ctx, k.Pod, k.Endpoint.Addr())
	if err != nil {
		conn.Close()
		return fail(err)
	}
	defer turn.Leave()
	stream := record.Client(turn.wrap(conn), mtls.ClientConfig(c), d.Maker)
	if err := stream.Handshake(ctx); err != nil {
		conn.Close()
		if turn.wasLost() {
			err = &Busy{Pod: k.Pod, Lost: true}
		}
		return fail(err)
	}
	cs := stream.State()
	bond := &mtls.Bond{Own: svid, Peer: cs.PeerCertificates, Use: x509.ExtKeyUsageServerAuth}
	return &Session{
		Key: k, Conn: conn, ALPN: cs.NegotiatedProtocol, Peer: cs.PeerCertificates[0],
		NotAfter: bond.NotAfter(), Bond: bond, stream: stream,
	}, nil
}

// own is the certificate to dial with.
func (d *Dialer) own(k Key) (*mtls.SVID, error) {
	svid := d.SVID(k.Pod)
	if svid == nil {
		return nil, &mtls.NoCertificate{Pod: k.Pod}
	}
	if svid.ID != k.Source {
		return nil, &mtls.WrongPeer{Want: k.Source, Got: svid.ID}
	}
	return svid, nil
}

func (d *Dialer) connect(ctx context.Context, k Key) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(d.Connect, DefaultConnect))
	defer cancel()
	return d.Sockets(ctx, k.Pod, k.Endpoint)
}

// chainEnd returns the earliest end of validity in the peer's chain.
func chainEnd(cs *tls.ConnectionState) time.Time {
	end := cs.PeerCertificates[0].NotAfter
	for _, c := range cs.PeerCertificates[1:] {
		end = earlier(end, c.NotAfter)
	}
	return end
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
