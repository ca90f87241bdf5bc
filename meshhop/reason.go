package meshhop

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"

	"aether/mtls"
)

// Connect: the TCP connection to an endpoint was not made.
type Connect struct{ Err error }

func (e *Connect) Error() string {
	if timedOut(e.Err) {
		return fmt.Sprintf("connect: %v: a NetworkPolicy may drop the mesh port", e.Err)
	}
	return fmt.Sprintf("connect: %v", e.Err)
}
func (e *Connect) Unwrap() error { return e.Err }

// Reason is why a hop was not made: a closed set, fit for a metric's label.
type Reason string

// The reasons.
const (
	ReasonNone          Reason = ""
	ReasonNoCertificate Reason = "no-certificate"    // the pod has no valid SVID
	ReasonWrongPeer     Reason = "wrong-peer"        // another identity, or another trust domain
	ReasonNotSVID       Reason = "peer-without-id"   // no certificate, or none with a SPIFFE ID
	ReasonUntrusted     Reason = "untrusted"         // no chain to the bundle
	ReasonExpired       Reason = "expired"           // the peer's certificate does not hold now
	ReasonUnknownSNI    Reason = "unknown-sni"       // a port that the pod does not serve
	ReasonBusy          Reason = "handshake-limit"   // no turn
	ReasonConnect       Reason = "connect"           // refused, unreachable, reset
	ReasonFiles         Reason = "descriptors"       // this process has none left
	ReasonPorts         Reason = "local-ports"       // the pod has none left towards this endpoint
	ReasonConnectWait   Reason = "connect-timeout"   // no answer in time
	ReasonHandshakeWait Reason = "handshake-timeout" // the peer was silent
	ReasonRemote        Reason = "refused-by-peer"   // the peer sent an alert
	ReasonClosed        Reason = "closed-by-peer"    // it closed or reset the connection in the handshake
	ReasonCancelled     Reason = "cancelled"         // the caller gave up
	ReasonTLS           Reason = "tls"               // anything else of the handshake: not TLS, no common version
)

// ReasonOf classes an error of Dial, Accept or of the record layer of a session.
func ReasonOf(err error) Reason {
	is := func(target any) bool { return errors.As(err, target) }
	var (
		none    *mtls.NoCertificate
		wrong   *mtls.WrongPeer
		foreign *mtls.ForeignTrustDomain
		notSVID *mtls.NotSVID
		untrust *mtls.Untrusted
		expired *mtls.Expired
		sni     *mtls.UnknownSNI
		busy    *Busy
		connect *Connect
	)
	if no, ok := errors.AsType[*RefusedByPeer](err); ok {
		if errors.As(no.Err, &sni) {
			return ReasonUnknownSNI
		}
		return ReasonRemote
	}
	switch {
	case err == nil:
		return ReasonNone
	case is(&none):
		return ReasonNoCertificate
	case is(&wrong), is(&foreign):
		return ReasonWrongPeer
	case is(&notSVID):
		return ReasonNotSVID
	case is(&untrust):
		return ReasonUntrusted
	case is(&expired):
		return ReasonExpired
	case is(&sni):
		return ReasonUnknownSNI
	case is(&busy):
		return ReasonBusy
	case errors.Is(err, context.Canceled):
		return ReasonCancelled
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return ReasonFiles
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return ReasonPorts
	case is(&connect):
		if timedOut(err) {
			return ReasonConnectWait
		}
		return ReasonConnect
	case timedOut(err):
		return ReasonHandshakeWait
	case remoteAlert(err):
		if strings.HasSuffix(err.Error(), tls.AlertError(alertUnrecognizedName).Error()) {
			return ReasonUnknownSNI
		}
		return ReasonRemote
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return ReasonClosed
	}
	return ReasonTLS
}

const alertUnrecognizedName = 112 // RFC 6066 3

// remoteAlert: crypto/tls says so in an OpError whose inner type is its own.
func remoteAlert(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "remote error" || strings.Contains(err.Error(), "record: remote error: ")
}

func timedOut(err error) bool {
	n, ok := errors.AsType[net.Error](err)
	return errors.Is(err, context.DeadlineExceeded) || ok && n.Timeout()
}
