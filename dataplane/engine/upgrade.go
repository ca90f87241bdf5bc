package engine

import (
	"crypto/sha1"
	"encoding/base64"
	"errors"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// Tunnels: HTTP/1.1 Upgrade (RFC 9110 7.8) and extended CONNECT (RFC 8441) are
// the same to exchanges and services, a GET with Upgrade that 101 grants
// (exchange/upgrade.go). The codecs' drivers translate here.
//
// An open tunnel has no limit of time: TCP keepalive, and PING on the hop, find
// peers that are gone.

// ErrNoTunnel: the peer did not announce extended CONNECT (SETTINGS_ENABLE_CONNECT_PROTOCOL,
// RFC 8441 3), without which no Upgrade goes over HTTP/2. Nothing was sent.
var ErrNoTunnel = errors.New("engine: the HTTP/2 peer takes no extended CONNECT (RFC 8441), which an Upgrade needs")

var (
	methodGET      = []byte("GET")
	methodCONNECT  = []byte("CONNECT")
	fieldWSKey     = []byte("sec-websocket-key")
	fieldWSAccept  = []byte("sec-websocket-accept")
	fieldWSVersion = []byte("sec-websocket-version")
	wsVersion      = []byte("13")
	fieldDeclined  = []byte(declined)
)

// declined tells, of an answer to extended CONNECT on a hop, the status of 2xx
// with which the application declined the Upgrade: as it stands it would grant it. The answer
// itself is a 502, so that a peer that does not know the field is told no success.
const declined = "x-aether-declined"

// upgradeOf returns the protocol that an HTTP/1.1 request's head asks to be
// upgraded to, where it may be asked for; nil: the request is an ordinary one, and its
// Upgrade ends here (RFC 9110 7.8 lets a server ignore it). bare: it has no body.
func upgradeOf(h *httpmsg.Head, bare bool) []byte {
	if !bare || string(h.Method) != "GET" || len(h.Authority) == 0 {
		return nil
	}
	p := exchange.TunnelProtocol(h.Upgrade)
	if isWebSocket(p) {
		// Without a key it is no handshake: the application says so better than we do.
		if _, ok := h.Get(string(fieldWSKey)); !ok {
			return nil
		}
	}
	return p
}

func isWebSocket(p []byte) bool { return string(p) == "websocket" }

// wsAccept is the answer to a key (RFC 6455 4.2.2).
func wsAccept(key []byte) []byte {
	h := sha1.New()
	h.Write(key)
	h.Write([]byte("258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	return base64.StdEncoding.AppendEncode(nil, h.Sum(nil))
}
