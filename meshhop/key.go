// Package meshhop makes the mTLS connections between nodes: one hop
// from a source pod to the mesh port of a destination pod.
//
//   - A session belongs to one Key. What one identity opened never carries
//     another's bytes: pod, identity, endpoint, server name, protocol and pin are
//     all in the key, and all are compared.
//   - No SVID of the key's own source identity: no dial (contract 5.4).
//   - Handshakes are bounded in time, in number, and in how many wait.
//   - Dial and Accept run in the caller's goroutine.
//
// It knows TCP, TLS and identities, and nothing of requests, policy or routing.
package meshhop

import (
	"fmt"
	"net/netip"

	"aether/mtls/spiffeid"
)

// Proto is what a session carries.
type Proto uint8

// The protocols (contract 5.1).
const (
	H2    Proto = iota + 1 // HTTP/2; ALPN "h2" is offered
	Raw                    // one client's bytes; no ALPN; never pooled
	Renew                  // nothing: see Dialer.Renew
)

func (p Proto) String() string {
	switch p {
	case H2:
		return "h2"
	case Raw:
		return "raw"
	case Renew:
		return "renew"
	}
	return fmt.Sprintf("proto(%d)", uint8(p))
}

// Key is everything that two users of one session must have in common. Comparable.
type Key struct {
	Pod      string         // container ID of the source pod: its sockets are made in its namespace
	Source   spiffeid.ID    // identity that dials
	Endpoint netip.AddrPort // pod address and mesh port of the destination
	SNI      string         // decimal port on a direct hop
	Proto    Proto
	Pin      spiffeid.ID // identity that must answer
}

func (k Key) String() string {
	return fmt.Sprintf("%s > %s sni=%s %s pin=%s", k.Source, k.Endpoint, k.SNI, k.Proto, k.Pin)
}
