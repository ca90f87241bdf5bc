package outbound

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"strconv"
	"time"

	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// maxTokens is how many tokens of one name a request may have that are looked at:
// cookies of several paths (RFC 6265 5.4).
const maxTokens = 4

// A token tells, to whoever may choose, where a client's session is (Gateway API
// sessionPersistence, GEP-1619; decision 017). It selects among the endpoints that the
// request may go to anyway, so that nothing is gained by making one up.
//
//	key      8 bytes  snapshot.Endpoint.Key
//	backend  4        of its name, for an endpoint may stand behind several
//	issued   4        Unix seconds, of the session's first answer
//	used     4        and of the one that the token came with
type token struct {
	key                   uint64
	backend, issued, used uint32
}

const (
	tokenLen  = 20
	tokenText = (tokenLen*8 + 5) / 6 // in base64url without padding
)

// session is where a request's session is.
type session struct {
	at    *snapshot.Endpoint // nil: there is none, or it cannot go on there
	token token              // what the client sent; of use where at is not nil
}

// resumeSession looks for the session that the request is of. Where it goes on at another backend
// than was drawn, the verdict becomes what it had been with that one.
func (o *Outbound) resumeSession(c *conn, rq *reqState, h *httpmsg.Head) {
	if rq.v.Pinned != nil || rq.v.Action == decide.Reply {
		return
	}
	m := rq.v.Matched
	p := m.Persistence
	now := uint32(o.now().Unix())
	var room [64]byte
	name := sessionName(room[:0], m)
	n := 0
	each(h, p.Header, name, func(text []byte) (more bool) {
		n++
		if t, ok := parseToken(text); ok && t.lives(p, now) {
			o.bindSession(c, rq, h, t)
		}
		return rq.session.at == nil && n < maxTokens
	})
}

// bindSession makes the request go where t says, if it may.
func (o *Outbound) bindSession(c *conn, rq *reqState, h *httpmsg.Head, t token) {
	v := rq.v
	if v.Backend == nil || v.Action != decide.Forward || nameHash(v.Backend.Name) != t.backend {
		i := backendByHash(rq.v.Matched, t.backend)
		if i < 0 {
			return
		}
		pick, ok := decide.PickOf(rq.v.Matched, i)
		if !ok {
			return
		}
		v = decide.Route(rq.snap, &c.flow, h, pick, nil)
		if v.Action != decide.Forward || v.Matched != rq.v.Matched || nameHash(v.Backend.Name) != t.backend {
			return
		}
	}
	for _, e := range v.Set.All() {
		if e.Key == t.key {
			if e.Usable() {
				rq.v = v
				rq.session = session{at: e, token: t}
			}
			return
		}
	}
}

// backendByHash is the index of the backend whose name has that hash; -1: the rule has none.
func backendByHash(m *snapshot.Rule, hash uint32) int {
	for i := range m.Backends {
		if b := m.Backends[i].Backend; b != nil && m.Backends[i].Invalid == "" && nameHash(b.Name) == hash {
			return i
		}
	}
	return -1
}

// setSessionToken tells the client where its session is, if it does not know. An answer that says
// that the endpoint failed binds nobody to it.
func (o *Outbound) setSessionToken(rq *reqState, h *httpmsg.Head) {
	e := rq.endpoint
	if e == nil || rq.v.Pinned != nil || h.Status >= 500 {
		return
	}
	m := rq.v.Matched
	p := m.Persistence
	now := uint32(o.now().Unix())
	t := token{key: e.Key, backend: nameHash(rq.v.Backend.Name), issued: now, used: now}
	if rq.session.at == e {
		if p.Idle == 0 || rq.session.token.used == now {
			return
		}
		t.issued = rq.session.token.issued
	}
	start := len(rq.scratch)
	rq.scratch = sessionName(rq.scratch, m)
	middle := len(rq.scratch)
	if p.Header {
		rq.scratch = t.append(rq.scratch)
		h.Set(rq.scratch[start:middle:middle], rq.scratch[middle:len(rq.scratch):len(rq.scratch)])
		return
	}
	b := t.append(append(rq.scratch, '='))
	b = append(append(b, "; Path="...), cookiePath(rq)...)
	if p.Lasting {
		left := int64(p.Absolute/time.Second) - int64(now-t.issued)
		b = strconv.AppendInt(append(b, "; Max-Age="...), max(0, left), 10)
	}
	b = append(b, "; HttpOnly"...)
	rq.scratch = b
	h.Add(hdrSetCookie, b[start:len(b):len(b)])
}

var (
	hdrSetCookie = []byte("set-cookie")
	rootPath     = []byte("/")
)

// cookiePath is the path that the cookie is for: the prefix that the rule matched, so that
// rules of other paths have sessions of their own (GEP-1619); else all.
func cookiePath(rq *reqState) []byte {
	p := rq.path[:min(rq.v.Prefix, len(rq.path))]
	if len(p) == 0 {
		return rootPath
	}
	for _, c := range p { // what would end the attribute, or is none of its bytes (RFC 6265 4.1.1)
		if c <= ' ' || c >= 0x7f || c == ';' || c == ',' {
			return rootPath
		}
	}
	return p
}

// sessionName appends the name of the rule's cookie or field. One of its own is made for a
// rule that gives none, so that sessions of several rules do not displace each other.
func sessionName(b []byte, m *snapshot.Rule) []byte {
	if name := m.Persistence.Name; name != "" {
		return append(b, name...)
	}
	b = append(b, "aether-session-"...)
	n := nameHash(m.Name)
	for shift := 28; shift >= 0; shift -= 4 {
		b = append(b, hexDigits[n>>shift&15])
	}
	return b
}

// nameHash is FNV-1a, 32 bits.
func nameHash(s string) uint32 {
	n := uint32(2166136261)
	for i := range len(s) {
		n = (n ^ uint32(s[i])) * 16777619
	}
	return n
}

// each calls f with the values of a field, or of the cookies, called name, until it says no.
func each(h *httpmsg.Head, field bool, name []byte, f func(text []byte) (more bool)) {
	for i := range h.Fields {
		v := h.Fields[i].Value
		if field {
			if bytes.Equal(h.Fields[i].Name, name) && !f(v) {
				return
			}
			continue
		}
		if string(h.Fields[i].Name) != "cookie" {
			continue
		}
		for len(v) > 0 {
			var pair []byte
			pair, v, _ = bytes.Cut(v, semicolon)
			k, text, ok := bytes.Cut(bytes.Trim(pair, " \t"), equals)
			if ok && bytes.Equal(k, name) && !f(bytes.Trim(text, `"`)) {
				return
			}
		}
	}
}

var equals = []byte("=")

// lives reports whether the session is within the rule's limits. A clock that is behind
// that of the node which wrote the token makes it no older than new.
func (t token) lives(p *model.Persistence, now uint32) bool {
	over := func(since uint32, limit time.Duration) bool {
		return limit > 0 && now > since && time.Duration(now-since)*time.Second > limit
	}
	return !over(t.issued, p.Absolute) && !over(t.used, p.Idle)
}

func (t token) append(dst []byte) []byte {
	var b [tokenLen]byte
	binary.BigEndian.PutUint64(b[0:], t.key)
	binary.BigEndian.PutUint32(b[8:], t.backend)
	binary.BigEndian.PutUint32(b[12:], t.issued)
	binary.BigEndian.PutUint32(b[16:], t.used)
	return base64.RawURLEncoding.AppendEncode(dst, b[:])
}

func parseToken(text []byte) (token, bool) {
	var b [tokenLen + 3]byte
	if len(text) != tokenText {
		return token{}, false
	}
	if n, err := base64.RawURLEncoding.Strict().Decode(b[:], text); err != nil || n != tokenLen {
		return token{}, false
	}
	return token{binary.BigEndian.Uint64(b[0:]), binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:]), binary.BigEndian.Uint32(b[16:])}, true
}
