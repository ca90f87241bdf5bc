package sniff

// TLS numbers (RFC 8446 sections 4, 4.2 and 5.1; RFC 6066 section 3).
const (
	recordHandshake = 22
	recordHeader    = 5
	maxFragment     = 1 << 14
	clientHello     = 1
	helloHeader     = 4
	extServerName   = 0
	extALPN         = 16
	nameHost        = 0

	maxName    = 255 // longest DNS name (RFC 1035 section 2.3.4)
	scratchLen = 768 // a name, and 513 bytes of ALPN
)

// hello goes on with bytes whose first is a handshake record's. It decides
// between TLS and Unknown on the first six bytes, and then only counts records until the
// ClientHello is complete.
func (s *State) hello(b []byte) {
	if s.proto != TLS {
		if len(b) > 1 && b[1] != 3 ||
			len(b) > 3 && int(b[3])<<8 > maxFragment ||
			len(b) > 4 && !fragment(b) ||
			len(b) > 5 && b[5] != clientHello {
			s.end(Unknown)
			return
		}
		if len(b) <= recordHeader {
			return
		}
		s.proto = TLS
	}
	if s.need == 0 {
		c := cursor{b: b, limit: helloHeader}
		if n := c.uint(4); c.err == nil {
			s.need = helloHeader + n&0xffffff
		}
	}
	for len(b)-s.rec >= recordHeader {
		if !fragment(b[s.rec:]) {
			s.bad = true // something else stands between two parts of the hello (RFC 8446 section 5.1)
			s.end(TLS)
			return
		}
		n := int(b[s.rec+3])<<8 | int(b[s.rec+4])
		here := min(n, len(b)-s.rec-recordHeader)
		if s.need > 0 && s.got+here >= s.need {
			s.end(TLS)
			return
		}
		if here < n {
			return
		}
		s.rec, s.got = s.rec+recordHeader+n, s.got+n
	}
}

// fragment reports whether h starts with the header of a record that can carry
// part of a ClientHello. A handshake record is never empty.
func fragment(h []byte) bool {
	n := int(h[3])<<8 | int(h[4])
	return h[0] == recordHandshake && h[1] == 3 && n > 0 && n <= maxFragment
}

// names fills in what the hello offers, as far as b shows it. A malformed
// hello names nothing: whoever ends the TLS may read it differently, so
// nothing may be decided by it.
func (s *State) names(b []byte, r *Result) {
	c := cursor{b: b, limit: helloHeader, scratch: s.scratch[:0]}
	n := c.uint(4) & 0xffffff
	c.limit = helloHeader + n
	c.skip(2 + 32)    // legacy_version, random
	c.skip(c.uint(1)) // legacy_session_id
	c.skip(c.uint(2)) // cipher_suites
	c.skip(c.uint(1)) // legacy_compression_methods
	if c.err == nil && c.at == c.limit {
		return // no extensions: legal before TLS 1.3
	}
	n = c.uint(2)
	end := c.at + n
	if c.err == nil && end != c.limit {
		c.err = malformed
	}
	var sni, alpn bool
	for c.err == nil && c.at < end {
		kind, n := c.uint(2), c.uint(2)
		c.limit = c.at + n
		if c.err == nil && c.limit > end {
			c.err = malformed
			break
		}
		switch {
		case c.err != nil:
		case kind == extServerName && !sni:
			sni = true
			if name := c.serverName(); c.err == nil {
				r.SNI = name
			}
		case kind == extALPN && !alpn:
			alpn = true
			if list := c.protocols(); c.err == nil {
				r.ALPN = ALPN{list}
			}
		case kind == extServerName, kind == extALPN:
			c.err = malformed // twice (RFC 8446 section 4.2)
		default:
			c.skip(c.limit - c.at)
		}
		if c.err == nil && c.at != c.limit {
			c.err = malformed
		}
		c.limit = end
	}
	if c.err == malformed {
		r.SNI, r.ALPN = nil, ALPN{}
	}
}

// serverName reads the body of a server_name extension.
func (c *cursor) serverName() (name []byte) {
	if n := c.uint(2); c.err == nil && c.at+n != c.limit {
		c.err = malformed
	}
	seen := false
	for c.err == nil && c.at < c.limit {
		kind, n := c.uint(1), c.uint(2)
		switch {
		case c.err != nil:
		case kind != nameHost:
			c.skip(n)
		case n == 0 || seen:
			c.err = malformed
		default:
			seen = true
			if n > maxName {
				c.skip(n)
			} else {
				name = c.take(n)
			}
		}
	}
	return name
}

// protocols reads the body of an ALPN extension and returns the list in its
// wire form. Where it lies across records, names that the scratch space has
// no room for are validated and left out.
func (c *cursor) protocols() []byte {
	n := c.uint(2)
	if c.err == nil && (c.at+n != c.limit || n == 0) {
		c.err = malformed
	}
	if c.err != nil {
		return nil
	}
	whole, start := c.peek(n), len(c.scratch)
	for c.err == nil && c.at < c.limit {
		l := c.uint(1)
		switch {
		case c.err != nil:
		case l == 0:
			c.err = malformed
		case whole == nil && len(c.scratch)+1+l <= cap(c.scratch):
			at := len(c.scratch)
			c.scratch = append(c.scratch, byte(l))
			c.copy(l)
			if c.err != nil {
				c.scratch = c.scratch[:at]
			}
		default:
			c.skip(l)
		}
	}
	if whole != nil {
		return whole
	}
	return c.scratch[start:len(c.scratch):len(c.scratch)]
}

// cursor reads a handshake message out of the records that carry it. The
// first error sticks, and makes every read give zero.
type cursor struct {
	b       []byte // the bytes not read yet, record headers among them
	left    int    // bytes left of the current record
	at      int    // bytes of handshake read
	limit   int    // at may not go beyond this
	scratch []byte // for what does not lie in one piece; never grows
	err     error
}

// failure is why a cursor stopped.
type failure string

func (f failure) Error() string { return string(f) }

const (
	malformed failure = "malformed hello" // nothing may be taken from it
	short     failure = "hello not complete"
)

// room checks that n more bytes lie within the limit.
func (c *cursor) room(n int) bool {
	if c.err == nil && c.at+n > c.limit {
		c.err = malformed
	}
	return c.err == nil
}

// next makes c.left positive: it goes over the header of the next record.
func (c *cursor) next() bool {
	if c.left == 0 {
		if len(c.b) < recordHeader {
			c.err = short
			return false
		}
		if !fragment(c.b) {
			c.err = malformed
			return false
		}
		c.left = int(c.b[3])<<8 | int(c.b[4])
		c.b = c.b[recordHeader:]
	}
	return true
}

// some reads up to n bytes that lie in one piece; never none unless it fails.
func (c *cursor) some(n int) []byte {
	if !c.next() {
		return nil
	}
	n = min(n, c.left, len(c.b))
	if n == 0 {
		c.err = short
		return nil
	}
	p := c.b[:n:n]
	c.b, c.left, c.at = c.b[n:], c.left-n, c.at+n
	return p
}

// skip goes over n bytes.
func (c *cursor) skip(n int) {
	if !c.room(n) {
		return
	}
	for n > 0 && c.err == nil {
		n -= len(c.some(n))
	}
}

// uint reads a big-endian number of n bytes.
func (c *cursor) uint(n int) (v int) {
	if !c.room(n) {
		return 0
	}
	for ; n > 0; n-- {
		p := c.some(1)
		if c.err != nil {
			return 0
		}
		v = v<<8 | int(p[0])
	}
	return v
}

// peek returns the next n bytes without reading them, nil unless they lie in
// one piece.
func (c *cursor) peek(n int) []byte {
	if !c.room(n) || !c.next() || n > c.left || n > len(c.b) {
		return nil
	}
	return c.b[:n:n]
}

// take reads n bytes: in place where they lie in one piece, else by way of the scratch space.
func (c *cursor) take(n int) []byte {
	if p := c.peek(n); p != nil {
		c.skip(n)
		return p
	}
	at := len(c.scratch)
	c.copy(n)
	if c.err != nil {
		return nil
	}
	return c.scratch[at:len(c.scratch):len(c.scratch)]
}

// copy reads n bytes into the scratch space, which has the room.
func (c *cursor) copy(n int) {
	if !c.room(n) {
		return
	}
	for n > 0 && c.err == nil {
		p := c.some(n)
		c.scratch = append(c.scratch, p...)
		n -= len(p)
	}
}
