package exchange

import "aether/dataplane/httpmsg"

// A tunnel, in every version of HTTP, is one thing to an exchange (docs/decisions/012):
//
//   - The request is a GET whose head has Upgrade. It is begun with end false, for bytes
//     follow if it is granted; a Length of 0 says that the request itself has no more to come.
//   - 101 grants it. From there on the data events carry the tunnel's bytes either way,
//     each direction ends by itself, and the exchange is over when both have.
//   - Any other final head declines it, and is an ordinary response.
//
//	┌──────────┐ Upgrade ┌─────────────┐ 101 ┌────────────┐
//	│ noTunnel ├────────►│ tunnelAsked ├────►│ tunnelOpen │
//	└──────────┘         └──────┬──────┘     └────────────┘
//	     ▲  any other answer    │
//	     └──────────────────────┘
//
// What a client sends before the answer is refused until then, as a body is while a request is parked.

type tunnel uint8

const (
	noTunnel    tunnel = iota // not asked for, or declined
	tunnelAsked               // neither granted nor declined yet
	tunnelOpen                // granted
)

// TunnelProtocol returns the protocol that list, the value of an Upgrade field
// (RFC 9110 7.8), is carried as: the first that may be; nil: none may. It aliases list or
// a constant.
//
// Not carried are further HTTP and TLS: "h2c" (obsolete since RFC 9113 3.1), "HTTP/x"
// and "TLS/x" (RFC 2817) would put requests into the tunnel that no policy sees.
func TunnelProtocol(list []byte) []byte {
	for len(list) > 0 {
		p := list
		list = nil
		for i, c := range p {
			if c == ',' {
				p, list = p[:i:i], p[i+1:]
				break
			}
		}
		for len(p) > 0 && (p[0] == ' ' || p[0] == '\t') {
			p = p[1:]
		}
		for n := len(p); n > 0 && (p[n-1] == ' ' || p[n-1] == '\t'); n = len(p) {
			p = p[:n-1]
		}
		name, ok := protocolName(p)
		switch {
		case !ok || fold(name, "h2c") || fold(name, "h2") || fold(name, "http") || fold(name, "tls"):
		case fold(p, "websocket"):
			return websocket // HTTP/2 servers know it in this spelling alone (RFC 8441 5)
		default:
			return p
		}
	}
	return nil
}

var websocket = []byte("websocket")

// protocolName returns the name in protocol-name ["/" protocol-version], both tokens (RFC 9110 7.8).
func protocolName(p []byte) (name []byte, ok bool) {
	name = p
	slashes := 0
	for i, c := range p {
		switch {
		case c == '/' && slashes == 0 && i > 0 && i < len(p)-1:
			name = p[:i]
			slashes++
		case httpmsg.Lower[c] == 0:
			return nil, false
		}
	}
	return name, len(p) > 0
}

// fold compares with a lower-case text, ignoring the case of ASCII letters.
func fold(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// Tunnel reports whether the exchange is an open tunnel. It has no end that a
// timeout could wait for.
func (x *Exchange) Tunnel() bool { return x.tunnel == tunnelOpen }

// AsksTunnel reports whether a tunnel is asked for and neither granted nor declined yet.
func (x *Exchange) AsksTunnel() bool { return x.tunnel == tunnelAsked }

// decline: the request for a tunnel gets an ordinary response. What there was of
// the request is all there is.
func (x *Exchange) decline() {
	x.tunnel = noTunnel
	if x.Req.Length == 0 {
		x.req.from = reqDone
	}
	if x.up != nil && !x.req.sent {
		x.req.sent = true
		x.up.WriteData(nil, true)
	}
}

// open: the tunnel's bytes may go up.
func (x *Exchange) open() {
	switch {
	case x.over:
	case x.req.from != reqOpen:
		x.req.sent = true
		x.up.WriteData(nil, true)
	case x.req.stalled:
		x.req.stalled = false
		x.down.Resume()
	}
}
