package outbound

import (
	"bytes"
	"strconv"
	"time"

	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/snapshot"
)

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
