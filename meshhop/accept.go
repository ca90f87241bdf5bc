package meshhop

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"aether/mtls"
	"aether/mtls/record"
	"aether/mtls/spiffeid"
)

// Local is a pod of this node as the destination of hops.
type Local struct {
	Pod    string      // container ID
	ID     spiffeid.ID // its identity
	TLS    *tls.Config // of mtls.ServerConfig
	Compat bool        // as given to mtls.ServerConfig
	// SVID is the pod's current certificate, nil: none, as given to mtls.ServerConfig. Required
	// where sessions are to end with it.
	SVID func() *mtls.SVID
}

func (l *Local) own() *mtls.SVID {
	if l.SVID == nil {
		return nil
	}
	return l.SVID()
}

// Acceptor shakes hands with the sources of hops. Its fields are not changed once it
// is used; safe for concurrent use. The zero value is usable, without bounds in number.
type Acceptor struct {
	Handshake time.Duration // 0: DefaultHandshake; the wait for a turn counts
	Limit     *Limiter      // nil: no bound on concurrent handshakes
	Maker     record.Maker  // zero: record.Std

	Now func() time.Time // as given to mtls.ServerConfig, for whoever holds sessions to their certificates; nil: time.Now
}

// Inbound is a hop that another node opened. Whoever holds it owns Conn.
type Inbound struct {
	Local    *Local
	Conn     *net.TCPConn
	SNI      string            // as sent
	Port     uint16            // that SNI names; 0: none was sent (Compat only): the pod's declared port
	ALPN     string            // "h2"; mtls.RenewALPN: nothing follows but Confirm; or empty: the client offered none
	Caller   spiffeid.ID       // verified
	Peer     *x509.Certificate // the caller's
	XFCC     string            // value of x-forwarded-client-cert for its requests
	NotAfter time.Time         // earlier end of validity of both chains: the session ends then
	Bond     *mtls.Bond        // what it was opened with
	stream   *record.Stream
}

// Record gives the connection's record layer: see Session.Record.
func (i *Inbound) Record() record.Conn { return i.stream.Flip() }

// Accept shakes hands on conn as l, in the calling goroutine, and verifies the
// caller. On an error conn has been closed. ReasonOf classes its errors.
func (a *Acceptor) Accept(ctx context.Context, l *Local, conn *net.TCPConn) (*Inbound, error) {
	in, err := a.accept(ctx, l, conn)
	if err != nil {
		closeAfterAlert(conn, ReasonOf(err))
		return nil, fmt.Errorf("meshhop: accept from %s as %s: %w", conn.RemoteAddr(), l.ID, err)
	}
	return in, nil
}

func (a *Acceptor) accept(ctx context.Context, l *Local, conn *net.TCPConn) (*Inbound, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(a.Handshake, DefaultHandshake))
	defer cancel()
	turn, err := a.Limit.Enter(ctx, l.Pod, peerOf(conn))
	if err != nil {
		return nil, err
	}
	defer turn.Leave()
	own := l.own() // the handshake may show a newer one: that ends later
	stream := record.Server(turn.wrap(conn), l.TLS, a.Maker)
	if err := stream.Handshake(ctx); err != nil {
		if turn.wasLost() {
			return nil, &Busy{Pod: l.Pod, Lost: true}
		}
		return nil, err
	}
	cs := stream.State()
	caller, err := mtls.PeerID(&cs)
	if err != nil {
		return nil, err
	}
	port, ok := mtls.ParseSNI(cs.ServerName, l.Compat)
	if cs.NegotiatedProtocol == mtls.RenewALPN {
		port, ok = 0, true // it is for no port
	}
	if !ok { // the configuration let it pass: it is not of mtls.ServerConfig, or Compat differs
		return nil, &mtls.UnknownSNI{SNI: cs.ServerName}
	}
	peer := cs.PeerCertificates[0]
	bond := &mtls.Bond{Own: own, Peer: cs.PeerCertificates, Use: x509.ExtKeyUsageClientAuth}
	return &Inbound{
		Local: l, Conn: conn, SNI: cs.ServerName, Port: port, ALPN: cs.NegotiatedProtocol,
		Caller: caller, Peer: peer, XFCC: mtls.XFCC(l.ID, peer), NotAfter: bond.NotAfter(), Bond: bond, stream: stream,
	}, nil
}

// Confirm ends a hop whose ALPN is mtls.RenewALPN: its close_notify is for the client the proof that its certificate
// has been verified, and what hangs on that is done. It closes Conn.
func (i *Inbound) Confirm() error {
	rec := i.Record()
	err := i.Conn.SetWriteDeadline(time.Now().Add(lingerTime))
	if err == nil {
		_, err = i.Conn.Write(rec.CloseNotify(nil))
	}
	return errors.Join(err, i.Conn.Close())
}

// From is who opened the hop. The port of its address is 0: each of its connections has another.
func (i *Inbound) From() Peer { return Peer{netip.AddrPortFrom(peerOf(i.Conn), 0), i.Caller} }

// peerOf is the address of who connected; invalid: he is gone.
func peerOf(conn *net.TCPConn) netip.Addr {
	a, ok := conn.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return a.AddrPort().Addr().Unmap()
}

// What a refused caller may still send before its connection is closed.
const (
	lingerTime  = 250 * time.Millisecond
	lingerBytes = 64 << 10
)

// halfCloser is what closeAfterAlert needs of a net.TCPConn.
type halfCloser interface {
	io.ReadCloser
	CloseWrite() error
	SetReadDeadline(time.Time) error
}

// closeAfterAlert closes conn so that the alert gets through. The caller may have
// sent more already, and closing over unread bytes resets the connection, which
// would overtake the alert and leave the other side without a reason.
func closeAfterAlert(conn halfCloser, why Reason) {
	defer conn.Close()
	switch why {
	case ReasonBusy, ReasonHandshakeWait, ReasonClosed, ReasonCancelled, ReasonRemote:
		return // no alert was sent, or nobody is there to read it
	}
	if conn.CloseWrite() == nil && conn.SetReadDeadline(time.Now().Add(lingerTime)) == nil {
		io.CopyN(io.Discard, conn, lingerBytes) // any end will do
	}
}
