package engine

import (
	"bytes"
	"crypto/rand"
	"crypto/sha1"
	"encoding/base64"
	"errors"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/http1"
	"aether/dataplane/http2"
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

// startTunnel turns both directions of an HTTP/1 connection into bytes. Its timer
// rests until both have ended.
func (c *h1conn) startTunnel() {
	c.tunnel, c.stalled, c.starved = true, false, false
	c.outF = http1.None
	c.body.Start(http1.ToClose, 0)
	c.l.Disarm(&c.timer)
}

// inEnded notes that a tunnel's peer has ended its side: there is nothing to read any more.
func (c *h1conn) inEnded() {
	c.ready, c.fin, c.more = false, false, false
	c.inEnd = true
	c.rest()
}

// endOut ends our side of a tunnel once all of it has been sent.
func (c *h1conn) endOut() error {
	if !c.outEnd || c.outSaid || c.wblk || len(c.out) > 0 {
		return nil
	}
	c.outSaid = true
	return c.halfClose()
}

// halfClose ends our side of the connection; the peer's goes on.
func (t *transport) halfClose() error {
	if t.rec == nil {
		return unix.Shutdown(t.fd, unix.SHUT_WR)
	}
	t.sealed = t.rec.CloseNotify(t.l.room(t.sealed, 64))
	_, err := t.write(nil)
	return err
}

// granted: the answer 101 goes to the client.
func (c *h1server) granted() {
	c.startTunnel()
	c.state, c.reqDone, c.last = stBody, false, true
}

// clientEnded: the client has ended its side of the tunnel.
func (c *h1server) clientEnded() {
	c.inEnded()
	c.state, c.reqDone = stWait, true
	c.x.RequestData(nil, true)
	c.tunnelEnded()
}

// tunnelEnded closes once both sides have ended.
func (c *h1server) tunnelEnded() {
	if c.closed || !c.inEnd || !c.outEnd {
		return
	}
	if x := c.x; x != nil {
		c.x = nil
		c.l.release(c.info.Pool, x)
	}
	c.closing = true
	c.l.Arm(&c.timer, c, idleDown) // should what is left not get out
	c.mark()
}

// ask makes the head of a request for an upgrade as the application gets it.
// WebSocket over HTTP/2 has no key (RFC 8441 5); one is made here, and its answer judged here.
func (c *h1client) ask(h *httpmsg.Head) *httpmsg.Head {
	c.asks, c.accept = true, nil
	if !isWebSocket(h.Upgrade) {
		return h
	}
	if _, ok := h.Get(string(fieldWSKey)); ok {
		return h
	}
	var nonce [16]byte
	_, _ = rand.Read(nonce[:]) // never fails
	key := base64.StdEncoding.AppendEncode(nil, nonce[:])
	c.accept = wsAccept(key)
	own := *h
	own.Fields = append(slices.Clone(h.Fields), httpmsg.Field{Name: fieldWSKey, Value: key})
	if _, ok := h.Get(string(fieldWSVersion)); !ok {
		own.Fields = append(own.Fields, httpmsg.Field{Name: fieldWSVersion, Value: wsVersion})
	}
	return &own
}

// switched judges a 101, and opens the tunnel; or gives what is wrong with it.
func (c *h1client) switched(h *httpmsg.Head) error {
	if !c.asks || !bytes.EqualFold(h.Upgrade, c.x.Req.Upgrade) {
		return strangeSwitch
	}
	if c.accept != nil {
		if v, _ := h.Get(string(fieldWSAccept)); !bytes.Equal(v, c.accept) {
			return badAccept
		}
		h.Del(string(fieldWSAccept))
	}
	h.Upgrade = c.x.Req.Upgrade
	c.startTunnel()
	c.inBody, c.resF, c.noReuse = true, http1.ToClose, true
	return nil
}

// appEnded: the application has ended its side of the tunnel.
func (c *h1client) appEnded() {
	c.inEnded()
	c.x.ResponseData(nil, true)
	c.tunnelEnded()
}

// tunnelEnded closes once both sides have ended and all has been sent.
func (c *h1client) tunnelEnded() {
	if c.closed || !c.inEnd || !c.outEnd {
		return
	}
	c.x = nil
	c.active = c.l.Now()
	c.arm() // should what is left not get out
	c.mark()
}

// connectHead makes the head of a request for a tunnel as it is sent over
// HTTP/2: the method stands in no field of it, for it is always GET. An application that speaks
// HTTP/2 gets no key (RFC 8441 5); between proxies it passes.
func (st *h2stream) connectHead(h *httpmsg.Head) *httpmsg.Head {
	st.asks = true
	own := *h
	own.Method = methodCONNECT
	if !st.c.hop {
		own.Fields = slices.Clone(h.Fields)
		own.Del(string(fieldWSKey))
	}
	return &own
}

// connectAnswer reads the answer to connectHead: 2xx grants the tunnel, which is 101 to the exchange.
func (st *h2stream) connectAnswer(h *httpmsg.Head, end bool) {
	req := &st.x.Req
	switch {
	case h.Status >= 200 && h.Status < 300:
		h.Status, h.Upgrade = 101, req.Upgrade
		h.Del("content-length") // means nothing (RFC 9110 9.3.6)
		if key, ok := req.Get(string(fieldWSKey)); ok && !st.c.hop && isWebSocket(req.Upgrade) {
			h.Set(fieldWSAccept, wsAccept(key))
		}
		st.open()
	case h.Status >= 300:
		st.asks = false
		v, ok := h.Get(declined)
		if !ok || !st.c.hop || h.Status != 502 {
			return
		}
		if n, err := strconv.Atoi(string(v)); err == nil && n >= 200 && n < 300 && (n != 204 || end) {
			h.Status = n // a 204 with a body would break the client's framing
		}
		h.Del(declined)
	}
}

// grantHead makes the head of an answer to an extended CONNECT.
func (st *h2stream) grantHead(h *httpmsg.Head) *httpmsg.Head {
	if h.Status < 200 && h.Status != 101 {
		return h
	}
	own := *h
	own.Upgrade = nil
	switch {
	case h.Status == 101:
		own.Status = 200
		st.open()
	case h.Status < 300:
		own.Fields = slices.Clone(h.Fields)
		own.Set(fieldDeclined, strconv.AppendInt(nil, int64(h.Status), 10))
		own.Status = 502
	default:
		own.Fields = slices.Clone(h.Fields)
		own.Del(declined) // the application's own means nothing
	}
	st.asks = false
	return &own
}

// open: the stream is a tunnel from here on.
func (st *h2stream) open() {
	st.asks, st.tunnel = false, true
	st.c.tunnels++
}

// extended takes the head of an extended CONNECT for what it asks; false: it was answered here.
func (c *h2conn) extended(s *http2.Stream, h *httpmsg.Head, end bool) bool {
	if h.Upgrade = exchange.TunnelProtocol(h.Upgrade); h.Upgrade == nil {
		answer := httpmsg.Head{Status: 501}
		c.l.dated(&answer)
		s.WriteHead(&answer, true) // further HTTP, or TLS: there is no ordinary request to fall back to
		if !end {
			s.Reset(http2.NoError)
		}
		if c.info.OnRefused != nil {
			c.info.OnRefused(c.info, 501, strangeTunnel)
		}
		return false
	}
	h.Method = methodGET
	if !end {
		h.Length = httpmsg.Unknown
	}
	return true
}
