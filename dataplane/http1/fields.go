package http1

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/bits"

	"aether/dataplane/httpmsg"
)

// notTarget marks the bytes that no request target may hold.
var notTarget [256]bool

func init() {
	for c := range 256 {
		notTarget[c] = c <= ' ' || c == 0x7f || c == '#'
	}
}

// section is what the field lines of one head say to the codec itself.
type section struct {
	response bool

	host    []byte
	upgrade []byte
	length  int64
	at      int // with a fault: the byte that it is about

	hosts, upgrades, options int

	hasLength, coded, chunked bool
	close, keepAlive          bool // connection options
	upgradeOption             bool
	expect, continues         bool
	te, named                 bool // named: h.Fields holds connection fields whose options name others
}

// parse reads the field lines of the head b from i on. Fields that end at this
// hop are taken into s, all others go to h.Fields; h.Minor must be set.
func (s *section) parse(b []byte, i int, h *httpmsg.Head) *fault {
	for i < len(b)-2 {
		name, value, next, bad := fieldLine(b, i)
		if bad != nil {
			s.at = next
			return bad
		}
		i = next
		keep := true
		switch string(name) {
		case "host":
			if s.response {
				break // means nothing there, and is no business of ours
			}
			s.host, keep = value, false
			s.hosts++
		case "content-length":
			if s.hasLength {
				return manyLengths
			}
			if s.coded {
				return twoFramings
			}
			if s.length, bad = contentLength(value); bad != nil {
				return bad
			}
			s.hasLength = true
		case "transfer-encoding":
			if bad := s.coding(value, h.Minor); bad != nil {
				return bad
			}
			keep = false
		case "connection":
			if keep, bad = s.connection(value); bad != nil {
				return bad
			}
		case "upgrade":
			s.upgrade, keep = value, false
			s.upgrades++
		case "te":
			keep = !s.te && !s.response && hasMember(value, "trailers")
			if keep {
				s.te, value = true, trailers
			}
		case "keep-alive", "proxy-connection":
			keep = false
		case "expect":
			s.expect = true
			s.continues = s.continues || equalFold(value, "100-continue")
		}
		if keep {
			h.Fields = append(h.Fields, httpmsg.Field{Name: name, Value: value})
		}
	}
	if s.named {
		dropNamed(h)
	}
	return nil
}

// fieldLine parses the field line at b[i], makes its name lower case, and
// returns where the next one starts, or with a fault the byte that it is about. b must end with CRLF.
func fieldLine(b []byte, i int) (name, value []byte, next int, bad *fault) {
	j := i
	for {
		l := httpmsg.Lower[b[j]]
		if l == 0 {
			break
		}
		b[j] = l
		j++
	}
	if b[j] != ':' || j == i {
		if j == i && (b[j] == ' ' || b[j] == '\t') {
			return nil, nil, j, folded
		}
		return nil, nil, j, badName
	}
	v := j + 1
	for b[v] == ' ' || b[v] == '\t' {
		v++
	}
	e := control(b, v)
	if b[e] != '\r' {
		return nil, nil, e, badValue
	}
	if b[e+1] != '\n' {
		return nil, nil, e + 1, badCR
	}
	next = e + 2
	for e > v && (b[e-1] == ' ' || b[e-1] == '\t') {
		e--
	}
	return b[i:j:j], b[v:e:e], next, nil
}

// control returns the index of the first byte from i on that no field value
// may hold (httpmsg.BadValue). There must be one.
func control(b []byte, i int) int {
	const ones, high = 0x0101010101010101, 0x8080808080808080
	for {
		if i+8 <= len(b) {
			// The lowest bit set in m marks the first of eight bytes that is below
			// 0x20 or equal to 0x7f; a borrow only ever spoils the bytes above it.
			x := binary.LittleEndian.Uint64(b[i:])
			d := x ^ 0x7f*ones
			m := ((x-0x20*ones)&^x | (d-ones)&^d) & high
			if m == 0 {
				i += 8
				continue
			}
			i += bits.TrailingZeros64(m) >> 3
		}
		if httpmsg.BadValue[b[i]] {
			return i
		}
		i++ // a tab, or one of the last few bytes
	}
}

// contentLength parses 1*DIGIT below 2^63 (RFC 9110 8.6).
func contentLength(v []byte) (int64, *fault) {
	if len(v) == 0 || len(v) > 19 {
		if bytes.IndexByte(v, ',') >= 0 {
			return 0, manyLengths
		}
		return 0, badLength
	}
	var n uint64 // 19 digits fit
	for _, c := range v {
		if !isDigit(c) {
			if c == ',' {
				return 0, manyLengths
			}
			return 0, badLength
		}
		n = n*10 + uint64(c-'0')
	}
	if n > math.MaxInt64 {
		return 0, badLength
	}
	return int64(n), nil
}

// coding takes a Transfer-Encoding field.
func (s *section) coding(v []byte, minor uint8) *fault {
	switch {
	case s.coded:
		return badCoding
	case minor == 0:
		return oldCoding
	case !equalFold(v, "chunked"):
		return codingFault(v)
	case s.hasLength:
		return twoFramings
	}
	s.coded, s.chunked = true, true
	return nil
}

// codingFault tells a list of codings that we lack from one that nobody should
// send: with empty members, or chunked anywhere but once and last.
func codingFault(v []byte) *fault {
	if len(v) == 0 {
		return badCoding
	}
	for more := true; more; {
		var m []byte
		m, v, more = member(v)
		if !isToken(m) || more && equalFold(m, "chunked") {
			return badCoding
		}
	}
	return otherCoding
}

// connection takes a Connection field and makes it lower case. keep: it names
// fields, and so must stay in the head until dropNamed has run.
func (s *section) connection(v []byte) (keep bool, bad *fault) {
	for i, c := range v {
		if l := httpmsg.Lower[c]; l != 0 {
			v[i] = l
		}
	}
	for more := true; more; {
		var m []byte
		m, v, more = member(v)
		switch string(m) {
		case "close":
			s.close = true
		case "keep-alive":
			s.keepAlive = true
		case "upgrade":
			s.upgradeOption = true
		case "", "te", "proxy-connection":
			// taken out of every head anyway
		case "host", "content-length", "transfer-encoding":
			return false, badOption
		case "x-forwarded-client-cert", "expect", "trailer":
			// What proxies act on does not vanish because a client says so.
		default:
			if s.options++; s.options > maxOptions {
				return false, manyOptions
			}
			s.named, keep = true, true
		}
	}
	return keep, nil
}

// dropNamed removes the connection fields and the fields that they name
// (RFC 9110 7.6.1). There are at most maxOptions names.
func dropNamed(h *httpmsg.Head) {
	for i := range h.Fields {
		if string(h.Fields[i].Name) != "connection" {
			continue
		}
		v := h.Fields[i].Value
		for more := true; more; {
			var m []byte
			m, v, more = member(v)
			switch string(m) {
			case "", "te", "x-forwarded-client-cert", "expect", "trailer", "connection":
				continue
			}
			for k := range h.Fields {
				if string(h.Fields[k].Name) == string(m) {
					h.Fields[k].Name = nil
				}
			}
		}
	}
	k := 0
	for _, f := range h.Fields {
		if f.Name != nil && string(f.Name) != "connection" {
			h.Fields[k] = f
			k++
		}
	}
	h.Fields = h.Fields[:k]
}

// member cuts the first member off the list v (RFC 9110 5.6.1), without the
// white space around it. more: there was a comma, so another member follows.
func member(v []byte) (m, rest []byte, more bool) {
	m = v
	if i := bytes.IndexByte(v, ','); i >= 0 {
		m, rest, more = v[:i], v[i+1:], true
	}
	for len(m) > 0 && (m[0] == ' ' || m[0] == '\t') {
		m = m[1:]
	}
	for len(m) > 0 && (m[len(m)-1] == ' ' || m[len(m)-1] == '\t') {
		m = m[:len(m)-1]
	}
	return m, rest, more
}

// hasMember reports whether the list v holds the member want (lower case).
func hasMember(v []byte, want string) bool {
	for more := true; more; {
		var m []byte
		if m, v, more = member(v); equalFold(m, want) {
			return true
		}
	}
	return false
}

func isToken(v []byte) bool {
	for _, c := range v {
		if httpmsg.Lower[c] == 0 {
			return false
		}
	}
	return len(v) > 0
}

// equalFold reports whether v equals want, which is lower case, in any case.
func equalFold(v []byte, want string) bool {
	if len(v) != len(want) {
		return false
	}
	for i := range len(want) {
		c := v[i]
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != want[i] {
			return false
		}
	}
	return true
}

func isHex(c byte) bool { return isDigit(c) || c|0x20 >= 'a' && c|0x20 <= 'f' }
