package http2

import (
	"bytes"

	"aether/dataplane/httpmsg"
)

// Marks of received fields. The first are those of pseudo-header fields and
// index Conn.pseudo.
const (
	markMethod = iota
	markScheme
	markAuthority
	markPath
	markProtocol
	markStatus
	numPseudo
	markPlain
	markHost
	markCookie
	markLength
	markExpect
	markGRPC // content-type of gRPC
	markBad  // makes its message malformed
)

const (
	requestPseudo  = 1<<markMethod | 1<<markScheme | 1<<markAuthority | 1<<markPath | 1<<markProtocol
	responsePseudo = 1 << markStatus
)

var (
	nameLength = []byte("content-length")
	nameType   = []byte("content-type")
	typeGRPC   = []byte(httpmsg.GRPC)

	nameGRPCStatus  = []byte("grpc-status")
	nameGRPCMessage = []byte("grpc-message")
	textTooLarge    = []byte("the request's metadata is too large for the proxy")
	zero            = []byte("0")
)

// markField judges a field by itself (RFC 9113 8.2 and 8.3, RFC 9110 5.5). The
// decoder remembers the mark with its table entry, so that a field the peer
// repeats is judged once.
func markField(name, value []byte) uint8 {
	if len(name) == 0 {
		return markBad
	}
	if name[0] == ':' {
		return markPseudo(name, value)
	}
	for _, c := range name {
		if c == 0 || httpmsg.Lower[c] != c { // no token character, or upper case
			return markBad
		}
	}
	if !httpmsg.ValidValue(value) {
		return markBad
	}
	value = trim(value)
	switch string(name) {
	case "host":
		if _, _, ok := httpmsg.Authority(value); !ok {
			return markBad
		}
		return markHost
	case "cookie":
		return markCookie
	case "content-length":
		if _, ok := parseLength(value); !ok {
			return markBad
		}
		return markLength
	case "content-type":
		if httpmsg.IsGRPC(value) {
			return markGRPC
		}
	case "expect":
		if equalFold(value, "100-continue") {
			return markExpect
		}
	case "te":
		if string(value) != "trailers" {
			return markBad
		}
	case "connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade":
		return markBad
	}
	return markPlain
}

func blank(c byte) bool { return c == ' ' || c == '\t' }

// trim removes the blanks around a value. RFC 9113 8.2.1 calls the message malformed; they are no part of
// the value by RFC 9110 5.5, and real clients and applications send them (decision 037). Nobody behind us sees them.
func trim(v []byte) []byte {
	for len(v) > 0 && blank(v[0]) {
		v = v[1:]
	}
	for len(v) > 0 && blank(v[len(v)-1]) {
		v = v[:len(v)-1]
	}
	return v
}

func markPseudo(name, value []byte) uint8 {
	var mark uint8
	valid := len(value) > 0
	switch string(name) {
	case ":method":
		mark = markMethod
		for _, c := range value {
			valid = valid && httpmsg.Lower[c] != 0
		}
	case ":scheme":
		mark = markScheme
		for _, c := range value {
			valid = valid && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' ||
				c == '+' || c == '-' || c == '.')
		}
	case ":authority":
		mark = markAuthority
		_, _, ok := httpmsg.Authority(value)
		valid = valid && ok
	case ":path":
		mark = markPath
		for _, c := range value {
			valid = valid && c > ' ' && c != 0x7f && c != '#' // a fragment is not sent, and readers differ on one (as http1)
		}
		valid = valid && (value[0] == '/' || string(value) == "*")
	case ":protocol": // as in Upgrade: a token, or two with a slash between (RFC 9110 7.8)
		mark = markProtocol
		slash := false
		for i, c := range value {
			if c == '/' && !slash && i > 0 && i < len(value)-1 {
				slash = true
				continue
			}
			valid = valid && httpmsg.Lower[c] != 0
		}
	case ":status":
		mark = markStatus
		valid = len(value) == 3 && value[0] >= '1' && value[0] <= '9' &&
			value[1] >= '0' && value[1] <= '9' && value[2] >= '0' && value[2] <= '9'
	default:
		return markBad
	}
	if !valid {
		return markBad
	}
	return mark
}

// parseLength reads a content-length: digits, no list, no sign.
func parseLength(v []byte) (n int64, ok bool) {
	if len(v) == 0 || len(v) > 18 {
		return 0, false
	}
	for _, c := range v {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}

// equalFold compares with a lower-case text, ignoring the case of ASCII letters.
func equalFold(b []byte, lower string) bool {
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

// noPort is an empty port, which an authority may have (RFC 3986 section 3.2.3).
var noPort = []byte{':'}

// sameHost compares two authorities, ignoring the case of ASCII letters.
func sameHost(a, b []byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		x, y := a[i], b[i]
		if x >= 'A' && x <= 'Z' {
			x += 'a' - 'A'
		}
		if y >= 'A' && y <= 'Z' {
			y += 'a' - 'A'
		}
		if x != y {
			return false
		}
	}
	return true
}

// message is what gather found beside Conn.head and Conn.pseudo.
type message struct {
	seen    uint // a bit for each pseudo-header field
	length  int64
	host    []byte
	hasHost bool
}

// gather sorts c.fields into c.head.Fields and c.pseudo and checks what does
// not depend on the kind of message: order and number of fields, and which
// pseudo-header fields are allowed.
func (c *Conn) gather(pseudo uint) (m message, ok bool) {
	h := &c.head
	h.Reset()
	h.Minor = 1
	m.length = -1
	regular, crumb := false, -1
	for i := range c.fields {
		f := &c.fields[i]
		if f.Mark < numPseudo {
			bit := uint(1) << f.Mark
			if regular || m.seen&bit != 0 || pseudo&bit == 0 {
				return m, false
			}
			m.seen |= bit
			c.pseudo[f.Mark] = f.Value
			continue
		}
		regular = true
		value := trim(f.Value)
		switch f.Mark {
		case markHost:
			if m.hasHost {
				return m, false
			}
			m.host, m.hasHost = value, true
			continue
		case markCookie: // RFC 9113 8.2.3
			if crumb >= 0 {
				if len(c.cookie) == 0 {
					c.cookie = append(c.cookie, h.Fields[crumb].Value...)
				}
				c.cookie = append(append(c.cookie, "; "...), value...)
				continue
			}
			crumb = len(h.Fields)
			c.cookie = c.cookie[:0]
		case markLength:
			if m.length >= 0 {
				return m, false
			}
			m.length, _ = parseLength(value)
		case markExpect:
			h.Expect = true
		case markBad:
			return m, false
		}
		h.Fields = append(h.Fields, httpmsg.Field{Name: f.Name, Value: value})
	}
	if crumb >= 0 && len(c.cookie) > 0 {
		h.Fields[crumb].Value = c.cookie
	}
	return m, true
}

// requestHead makes c.head of c.fields, and returns how many bytes of body
// content-length promises, -1: it says nothing; not ok: malformed.
func (c *Conn) requestHead(end bool) (left int64, ok bool) {
	m, ok := c.gather(requestPseudo)
	has := func(mark uint) bool { return m.seen>>mark&1 != 0 }
	if !ok || !has(markMethod) {
		return 0, false
	}
	h := &c.head
	h.Method = c.pseudo[markMethod]
	connect, options := string(h.Method) == "CONNECT", string(h.Method) == "OPTIONS"
	switch {
	case has(markProtocol): // RFC 8441 4
		if !connect || !c.cfg.EnableConnect || !has(markScheme) || !has(markPath) || !has(markAuthority) {
			return 0, false
		}
		h.Upgrade = c.pseudo[markProtocol]
	case connect: // RFC 9113 8.5
		if has(markScheme) || has(markPath) || !has(markAuthority) {
			return 0, false
		}
	case !has(markScheme) || !has(markPath):
		return 0, false
	}
	if has(markScheme) {
		h.Scheme = c.pseudo[markScheme]
	}
	if has(markPath) {
		if h.Path = c.pseudo[markPath]; h.Path[0] == '*' && !options {
			return 0, false
		}
	}
	switch {
	case !has(markAuthority):
		h.Authority = m.host
	case m.hasHost && !sameHost(m.host, c.pseudo[markAuthority]):
		return 0, false
	default:
		h.Authority = c.pseudo[markAuthority]
	}
	h.Authority = bytes.TrimSuffix(h.Authority, noPort)
	switch {
	case end && m.length > 0:
		return 0, false
	case end:
		h.Length = 0
	case connect:
		h.Length, m.length = httpmsg.Unknown, -1
	case m.length >= 0:
		h.Length = m.length
	default:
		h.Length = httpmsg.Unknown
	}
	return m.length, true
}

// responseHead is requestHead for a response to s.
func (c *Conn) responseHead(s *Stream, end bool) (left int64, ok bool) {
	m, ok := c.gather(responsePseudo)
	if !ok || m.seen == 0 {
		return 0, false
	}
	h := &c.head
	v := c.pseudo[markStatus]
	h.Status = int(v[0]-'0')*100 + int(v[1]-'0')*10 + int(v[2]-'0')
	h.Expect = false
	switch {
	case h.Status < 200: // 101 has no place in HTTP/2, RFC 9113 8.6
		return 0, !end && h.Status != 101
	case s.isHead || h.Status == 204 || h.Status == 304: // RFC 9110 6.4.1
		h.Length = 0
		return 0, true
	case s.isConnect && h.Status < 300:
		h.Length = httpmsg.Unknown
		if end {
			h.Length = 0
		}
		return -1, true
	case end:
		h.Length = 0
		return 0, m.length <= 0
	case m.length >= 0:
		h.Length = m.length
	default:
		h.Length = httpmsg.Unknown
	}
	return m.length, true
}

// trailerFields makes c.head.Fields of c.fields; fields that describe the head
// or its framing are dropped (RFC 9110 6.5.1), and those that only a proxy may set.
func (c *Conn) trailerFields() bool {
	c.head.Reset()
	for i := range c.fields {
		switch f := &c.fields[i]; {
		case f.Mark < numPseudo || f.Mark == markBad:
			return false
		case f.Mark == markHost || f.Mark == markLength || httpmsg.ProxyOnlyTrailer(f.Name):
		default:
			c.head.Fields = append(c.head.Fields, httpmsg.Field{Name: f.Name, Value: trim(f.Value)})
		}
	}
	return true
}
