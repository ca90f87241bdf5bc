package http2

import (
	"bytes"
	"strconv"

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
	nameDate   = []byte("date")

	nameMethod    = []byte(":method")
	nameScheme    = []byte(":scheme")
	nameAuthority = []byte(":authority")
	namePath      = []byte(":path")
	nameStatus    = []byte(":status")

	typeGRPC = []byte(httpmsg.GRPC)

	nameGRPCStatus  = []byte("grpc-status")
	nameGRPCMessage = []byte("grpc-message")
	textTooLarge    = []byte("the request's metadata is too large for the proxy")
	zero            = []byte("0")
)

// markField judges a field by itself. The decoder remembers the mark with its table entry, so that a
// field the peer repeats is judged once.
func markField(name, value []byte) uint8 {
	mark, _, _ := judge(name, value)
	return mark
}

// judge judges a field by itself (RFC 9113 8.2 and 8.3, RFC 9110 5.5). With markBad it gives what is wrong,
// and the byte that makes it so, or -1.
func judge(name, value []byte) (mark uint8, reason string, c int) {
	if len(name) == 0 {
		return markBad, "empty field name (RFC 9113 8.2.1)", -1
	}
	if name[0] == ':' {
		switch mark, known := markPseudo(name, value); {
		case !known:
			return markBad, "unknown pseudo-header field (RFC 9113 8.3)", -1
		case mark == markBad:
			return markBad, "malformed pseudo-header field (RFC 9113 8.3)", -1
		default:
			return mark, "", -1
		}
	}
	for _, c := range name {
		if c == 0 || httpmsg.Lower[c] != c {
			return markBad, "malformed field name: want a token in lower case (RFC 9113 8.2.1)", int(c)
		}
	}
	if !httpmsg.ValidValue(value) {
		for _, c := range value {
			if httpmsg.BadValue[c] {
				return markBad, "control character in a field value (RFC 9110 5.5)", int(c)
			}
		}
	}
	value = trim(value)
	switch string(name) {
	case "host":
		if _, _, ok := httpmsg.Authority(value); !ok {
			return markBad, "malformed host field: want host or host:port (RFC 9110 7.2)", -1
		}
		return markHost, "", -1
	case "cookie":
		return markCookie, "", -1
	case "content-length":
		if _, ok := parseLength(value); !ok {
			return markBad, "malformed content-length: want at most 18 decimal digits (RFC 9110 8.6)", -1
		}
		return markLength, "", -1
	case "content-type":
		if httpmsg.IsGRPC(value) {
			return markGRPC, "", -1
		}
	case "expect":
		if equalFold(value, "100-continue") {
			return markExpect, "", -1
		}
	case "te":
		if string(value) != "trailers" {
			return markBad, "te field that is not \"trailers\" (RFC 9113 8.2.2)", -1
		}
	case "connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade":
		return markBad, "field of a connection, which HTTP/2 does not have (RFC 9113 8.2.2)", -1
	}
	return markPlain, "", -1
}

// malformed is the error of a message whose field of that name, nil for none, is at fault.
func malformed(reason string, name []byte) *StreamError {
	e := &StreamError{Code: ProtocolError, Reason: reason}
	if name != nil {
		e.Where = string(httpmsg.AppendName([]byte("field "), name))
	}
	return e
}

// badField is the error of a message with a field that has markBad.
func badField(name, value []byte) *StreamError {
	_, reason, c := judge(name, value)
	e := malformed(reason, name)
	if c >= 0 {
		e.Where = string(httpmsg.AppendByte([]byte(e.Where+", "), byte(c)))
	}
	return e
}

// tooMany is the error of a message beyond a limit; unit: of what, with a space before it.
func tooMany(reason string, limit int, unit string) *StreamError {
	return &StreamError{Code: ProtocolError, Reason: reason, Where: "at most " + strconv.Itoa(limit) + unit}
}

// What is wrong with a message, beside what judge finds in a field.
const (
	lateField    = "pseudo-header field behind another field (RFC 9113 8.3)"
	twiceField   = "field that may stand once, twice"
	strangeField = "pseudo-header field that has no place in such a message (RFC 9113 8.3)"
	noField      = "a pseudo-header field is missing (RFC 9113 8.3)"

	badConnect     = "extended CONNECT that was not offered, or is not whole (RFC 8441 4)"
	badPath        = "path * of a method that is not OPTIONS (RFC 9113 8.3.1)"
	twoHosts       = "host field that is not the :authority (RFC 9113 8.3.1)"
	shortBody      = "the message ends short of its content-length (RFC 9113 8.1.1)"
	longBody       = "more DATA than content-length (RFC 9113 8.1.1)"
	endingInterim  = "an interim response ends the stream (RFC 9113 8.1)"
	no101          = "status 101, which HTTP/2 does not have (RFC 9113 8.6)"
	manyInterim    = "too many interim responses"
	largeHead      = "message head is too large: send fewer or shorter fields"
	largeTrailers  = "trailer section is too large: send fewer or shorter fields"
	manyFields     = "too many fields: send fewer"
	openTrailers   = "trailers that do not end the stream (RFC 9113 8.1)"
	tunnelTrailers = "trailers in a tunnel (RFC 9113 8.5)"
	afterEnd       = "a frame behind the end of the stream (RFC 9113 5.1)"
	beforeHead     = "DATA before the head (RFC 9113 8.1)"
	overWindow     = "DATA beyond the stream's window (RFC 9113 6.9)"
	zeroWindow     = "WINDOW_UPDATE of 0 (RFC 9113 6.9)"
	wideWindow     = "WINDOW_UPDATE overflows the stream's window (RFC 9113 6.9.1)"
)

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

// markPseudo judges a pseudo-header field; known: there is one of that name.
func markPseudo(name, value []byte) (mark uint8, known bool) {
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
		return markBad, false
	}
	if !valid {
		return markBad, true
	}
	return mark, true
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
func (c *Conn) gather(pseudo uint) (m message, bad *StreamError) {
	h := &c.head
	h.Reset()
	h.Minor = 1
	m.length = -1
	regular, crumb := false, -1
	for i := range c.fields {
		f := &c.fields[i]
		if f.Mark < numPseudo {
			bit := uint(1) << f.Mark
			switch {
			case regular:
				return m, malformed(lateField, f.Name)
			case m.seen&bit != 0:
				return m, malformed(twiceField, f.Name)
			case pseudo&bit == 0:
				return m, malformed(strangeField, f.Name)
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
				return m, malformed(twiceField, f.Name)
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
				return m, malformed(twiceField, f.Name)
			}
			m.length, _ = parseLength(value)
		case markExpect:
			h.Expect = true
		case markBad:
			return m, badField(f.Name, f.Value)
		}
		h.Fields = append(h.Fields, httpmsg.Field{Name: f.Name, Value: value})
	}
	if crumb >= 0 && len(c.cookie) > 0 {
		h.Fields[crumb].Value = c.cookie
	}
	return m, nil
}

// requestHead makes c.head of c.fields, and returns how many bytes of body
// content-length promises, -1: it says nothing; or what is malformed.
func (c *Conn) requestHead(end bool) (left int64, bad *StreamError) {
	m, bad := c.gather(requestPseudo)
	has := func(mark uint) bool { return m.seen>>mark&1 != 0 }
	switch {
	case bad != nil:
		return 0, bad
	case !has(markMethod):
		return 0, malformed(noField, nameMethod)
	}
	h := &c.head
	h.Method = c.pseudo[markMethod]
	connect, options := string(h.Method) == "CONNECT", string(h.Method) == "OPTIONS"
	switch {
	case has(markProtocol): // RFC 8441 4
		if !connect || !c.cfg.EnableConnect || !has(markScheme) || !has(markPath) || !has(markAuthority) {
			return 0, malformed(badConnect, nameProtocol)
		}
		h.Upgrade = c.pseudo[markProtocol]
	case connect: // RFC 9113 8.5
		switch {
		case has(markScheme):
			return 0, malformed(strangeField, nameScheme)
		case has(markPath):
			return 0, malformed(strangeField, namePath)
		case !has(markAuthority):
			return 0, malformed(noField, nameAuthority)
		}
	case !has(markScheme):
		return 0, malformed(noField, nameScheme)
	case !has(markPath):
		return 0, malformed(noField, namePath)
	}
	if has(markScheme) {
		h.Scheme = c.pseudo[markScheme]
	}
	if has(markPath) {
		if h.Path = c.pseudo[markPath]; h.Path[0] == '*' && !options {
			return 0, malformed(badPath, namePath)
		}
	}
	switch {
	case !has(markAuthority):
		h.Authority = m.host
	case m.hasHost && !sameHost(m.host, c.pseudo[markAuthority]):
		return 0, malformed(twoHosts, nil)
	default:
		h.Authority = c.pseudo[markAuthority]
	}
	h.Authority = bytes.TrimSuffix(h.Authority, noPort)
	switch {
	case end && m.length > 0:
		return 0, malformed(shortBody, nil)
	case end:
		h.Length = 0
	case connect:
		h.Length, m.length = httpmsg.Unknown, -1
	case m.length >= 0:
		h.Length = m.length
	default:
		h.Length = httpmsg.Unknown
	}
	return m.length, nil
}

// responseHead is requestHead for a response to s.
func (c *Conn) responseHead(s *Stream, end bool) (left int64, bad *StreamError) {
	m, bad := c.gather(responsePseudo)
	switch {
	case bad != nil:
		return 0, bad
	case m.seen == 0:
		return 0, malformed(noField, nameStatus)
	}
	h := &c.head
	v := c.pseudo[markStatus]
	h.Status = int(v[0]-'0')*100 + int(v[1]-'0')*10 + int(v[2]-'0')
	h.Expect = false
	switch {
	case h.Status == 101:
		return 0, malformed(no101, nil)
	case h.Status < 200 && end:
		return 0, malformed(endingInterim, nil)
	case h.Status < 200:
		return 0, nil
	case s.req == methodHead || h.Status == 204 || h.Status == 304: // RFC 9110 6.4.1
		h.Length = 0
		return 0, nil
	case s.req == methodConnect && h.Status < 300:
		h.Length = httpmsg.Unknown
		if end {
			h.Length = 0
		}
		return -1, nil
	case end && m.length > 0:
		return 0, malformed(shortBody, nil)
	case end:
		h.Length = 0
		return 0, nil
	case m.length >= 0:
		h.Length = m.length
	default:
		h.Length = httpmsg.Unknown
	}
	return m.length, nil
}

// trailerFields makes c.head.Fields of c.fields; fields that describe the head
// or its framing are dropped (RFC 9110 6.5.1), and those that only a proxy may set.
func (c *Conn) trailerFields() *StreamError {
	c.head.Reset()
	for i := range c.fields {
		switch f := &c.fields[i]; {
		case f.Mark < numPseudo:
			return malformed(strangeField, f.Name)
		case f.Mark == markBad:
			return badField(f.Name, f.Value)
		case f.Mark == markHost || f.Mark == markLength || httpmsg.ProxyOnlyTrailer(f.Name):
		default:
			c.head.Fields = append(c.head.Fields, httpmsg.Field{Name: f.Name, Value: trim(f.Value)})
		}
	}
	return nil
}
