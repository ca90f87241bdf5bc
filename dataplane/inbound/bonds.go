package inbound

import (
	"context"
	"errors"

	"aether/dataplane/engine"
	"aether/meshhop"
)

// Rotated takes in that a pod has another certificate, or bundle: sessions of callers that were opened with
// what is trusted no more end. It verifies them in the calling goroutine. Safe for concurrent use.
func (in *Inbound) Rotated(container string) { in.bonds.Rotated(container) }

// hold holds a session to the identities of h, until it is released.
func (c *conn) hold(h *meshhop.Inbound, end func(cause error)) *meshhop.Held {
	return c.in.bonds.Hold(meshhop.Holding{Pod: c.pod.Container, Peer: h.From(), Bond: h.Bond, SVID: c.pod.Local.SVID, End: end})
}

// met takes in what the handshake of h has shown: its caller's other sessions go on as long as that certificate.
func (c *conn) met(h *meshhop.Inbound) {
	c.in.bonds.Verified(c.pod.Container, h.From(), h.Bond, c.pod.Local.SVID, true)
}

// revokedCause is why a session was ended for its identity, for the journal.
func revokedCause(err error) string {
	if errors.Is(err, meshhop.ErrExpired) {
		return "identity-expired"
	}
	return "identity-revoked"
}

// holdRelay gives the context that a raw relay lives in.
func (c *conn) holdRelay(h *meshhop.Inbound) (context.Context, func()) {
	ctx, cut := context.WithCancelCause(c.pod.Context)
	held := c.hold(h, cut)
	held.Watch()
	return ctx, func() { held.Release(); cut(nil) }
}

var _ engine.Bond = (*meshhop.Held)(nil)
