// Package sniff tells from a client's first bytes what a TCP connection or a UDP flow speaks,
// and what a ClientHello in them offers.
//
//   - An answer without More is final: bytes that follow never change it. With More, some could.
//   - It comes as early as the bytes allow, and at the latest after MaxPeek of them (of a
//     UDP flow, after MaxDatagrams).
//   - It is the same however the bytes were cut into segments.
//   - A State allocates nothing, never writes to the caller's buffer, and goes
//     through each byte once (the HTTP/2 preface's, twice).
//   - Slices in a result alias the caller's buffer or the state: they are good
//     until either of them changes.
//
// It looks only at what the client sends. It knows no socket, clock, port or
// policy: who speaks first, how long to wait and what to do with the answer are
// the caller's.
package sniff

import (
	"encoding/binary"
	"iter"
	"math/bits"
)

// MaxPeek is how many of the first bytes, at most, an answer depends on, in
// bytes. A connection that has not shown what it is by then is Unknown; a
// ClientHello that has not ended by then is TLS with what it has shown so far.
const MaxPeek = 16 << 10

// MaxMethod is the longest method of a request line, in bytes: no server of ours
// takes a longer one, and IANA's longest is 18.
const MaxMethod = 32

// MaxEmptyLines is how many empty lines may stand before a request line. RFC 9112 section 2.2 asks a server
// to pass over at least one; a client that sends more than these sends no request.
const MaxEmptyLines = 8

// Proto is what a connection or flow speaks. The set is closed.
type Proto uint8

// The protocols, and the rules for them (contract 4.2).
const (
	// None: no answer yet, or the client has sent nothing.
	None Proto = iota
	// HTTP10 and HTTP11: a request line (RFC 9112 section 3) of a method token of at most MaxMethod
	// bytes, one space, a target of visible octets, one space, the version, and CRLF or a lone LF. Up to
	// MaxEmptyLines of CRLF may stand before it (RFC 9112 section 2.2).
	HTTP10
	HTTP11
	// H2C: the connection preface of HTTP/2 with prior knowledge (RFC 9113 section 3.4).
	H2C
	// TLS: a handshake record of SSL 3.0 or later that starts a ClientHello (RFC 8446 section 5.1).
	TLS
	// QUIC: an Initial packet that authenticates (RFC 9001 section 5.2). Only a
	// QUICState finds it: it is never on TCP.
	QUIC
	// Unknown: anything else, a request line without a version among it (BeginsRequest tells these apart).
	Unknown
)

// String gives the name that logs, labels and aetherctl use.
func (p Proto) String() string {
	switch p {
	case None:
		return "none"
	case HTTP10:
		return "http/1.0"
	case HTTP11:
		return "http/1.1"
	case H2C:
		return "h2c"
	case TLS:
		return "tls"
	case QUIC:
		return "quic"
	case Unknown:
		return "opaque"
	}
	return "invalid"
}

// Result is what is known so far.
type Result struct {
	// Proto is final unless More is set. With More it is None, or TLS when
	// only the names of the ClientHello are still to come.
	Proto Proto

	// More: bytes to come can still change the answer.
	More bool

	// Hello is what a ClientHello offers; zero while More is set and for what is not TLS.
	Hello
}

// Hello is what a ClientHello offers (RFC 8446 section 4.1.2). Of a malformed one
// it holds nothing; of one that cannot be seen whole, what the whole extensions
// before the cut say.
type Hello struct {
	// SNI is the host name (RFC 6066 section 3) as it was sent: not folded, not
	// validated, perhaps an IP literal; with ECH the outer one. Nil when
	// there is none or when it is longer than any DNS name.
	SNI []byte

	// ALPN is the protocol names (RFC 7301 section 3.1) as they were sent, GREASE among
	// them. Of a list that lies across TLS records the first 513 bytes are kept.
	ALPN ALPN

	// ECH: there is an encrypted_client_hello extension, a real one or GREASE: from
	// outside they look alike (draft-ietf-tls-esni section 6.2).
	ECH bool

	// KeyShares are the named groups (RFC 8446 section 4.2.7) that key shares are
	// there for, in the order sent, GREASE (RFC 8701) left out, at most 16.
	KeyShares []uint16

	// Versions is the supported_versions extension (RFC 8446 section 4.2.1), like
	// KeyShares. A hello without it offers what its legacy_version says.
	Versions []uint16
}

// ALPN is a list of protocol names in the order they were sent. The zero
// value is empty.
type ALPN struct{ list []byte } // length-prefixed names, already validated

// All yields the names. They alias what the Result aliases.
func (a ALPN) All() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for l := a.list; len(l) > 0; {
			n := 1 + int(l[0])
			if !yield(l[1:n:n]) {
				return
			}
			l = l[n:]
		}
	}
}

// Has reports whether name is offered.
func (a ALPN) Has(name string) bool {
	for n := range a.All() {
		if string(n) == name {
			return true
		}
	}
	return false
}

// State carries the work done between two calls, so that a growing buffer is
// gone through once. The zero value is ready for a new connection. It holds
// offsets, never slices: the buffer may move as it grows. Not safe for
// concurrent use.
type State struct {
	pos   int   // bytes gone through
	phase uint8 // of the request line
	blank uint8 // empty lines before it

	left int // bytes left of the TLS record

	line   int // offset of the header line that RequestHost looks at next
	before int // empty lines that it has found before the request line

	proto Proto
	done  bool // proto is final

	offer offer // the ClientHello
}

// Detect says what b, all bytes seen from the first one on, is. Between calls
// with one State b may only grow; a shorter b starts anew.
func (s *State) Detect(b []byte) Result { return s.detect(b, false) }

// Last is Detect for when no more bytes are to be waited for: the client ended
// its side, or time is up. It never answers More: a line or preface that
// is not complete is Unknown, a ClientHello that is not complete is TLS with what it has
// shown, no bytes at all are None. The State stays as good as it was.
func (s *State) Last(b []byte) Result { return s.detect(b, true) }

// Detect is State.Detect for one buffer that will not grow. It allocates the
// State; where connections are many, keep one each.
func Detect(b []byte) Result { return new(State).Detect(b) }

func (s *State) detect(b []byte, last bool) Result {
	b = b[:min(len(b), MaxPeek)]
	if len(b) < s.pos {
		*s = State{}
	}
	if !s.done && len(b) > 0 {
		if b[0] == recordHandshake {
			s.hello(b)
		} else {
			s.text(b)
		}
	}
	r := Result{Proto: s.proto}
	if !s.done {
		switch {
		case len(b) == MaxPeek, last && len(b) > 0:
			if r.Proto == None {
				r.Proto = Unknown
			}
		case !last:
			r.More = true
		}
	}
	if r.Proto == TLS && !r.More {
		r.Hello = s.offer.hello(b)
	}
	return r
}

func (s *State) end(p Proto) { s.proto, s.done = p, true }

// Preface is what an HTTP/2 client with prior knowledge begins with (RFC 9113 section 3.4).
const Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// The places of a request line where a byte can stand.
const (
	inMethod0 uint8 = iota // first byte of the method, or of an empty line
	inLF0                  // LF of the empty line
	inMethod
	inTarget0
	inTarget
	inVersion                          // at byte phase-inVersion of version
	inMinor   = inVersion + lenVersion // its minor digit
	inEnd10   = inMinor + 1            // CR or LF
	inEnd11   = inEnd10 + 1
	inLF10    = inEnd11 + 1 // LF after CR
	inLF11    = inLF10 + 1
	isHTTP10  = inLF11 + 1
	isHTTP11  = isHTTP10 + 1
	isNeither = isHTTP11 + 1

	version    = "HTTP/1."
	lenVersion = uint8(len(version))
	usual      = version + "1\r\n"
)

// text goes on with bytes that do not start like TLS: a request line, the
// preface, or neither.
func (s *State) text(b []byte) {
	if s.pos == 0 && b[0] == Preface[0] {
		n := 1
		for n < min(len(b), len(Preface)) && b[n] == Preface[n] {
			n++
		}
		switch n {
		case len(Preface):
			s.pos = n
			s.end(H2C)
			return
		case len(b):
			return // at most len(Preface) bytes are gone through again
		}
	}
	pos, phase := s.pos, s.phase
	for pos < len(b) {
		// The two fields that may be long, and the end that nearly all lines have, in larger steps.
		switch phase {
		case inMethod:
			most := MaxMethod + 2*int(s.blank)
			for pos < min(len(b), most) && class[b[pos]]&token != 0 {
				pos++
			}
			if pos == most && pos < len(b) && b[pos] != ' ' {
				phase = isNeither
			}
		case inTarget:
			pos += visibles(b[pos:])
		case inVersion:
			if len(b)-pos >= len(usual) && string(b[pos:pos+len(usual)]) == usual {
				pos, phase = pos+len(usual), isHTTP11
			}
		}
		if pos < len(b) && phase < isHTTP10 {
			if phase = step(phase, b[pos]); phase == inLF0 {
				if s.blank++; s.blank > MaxEmptyLines {
					phase = isNeither
				}
			}
			pos++
		}
		switch phase {
		case isHTTP10:
			s.end(HTTP10)
		case isHTTP11:
			s.end(HTTP11)
		case isNeither:
			s.end(Unknown)
		default:
			continue
		}
		break
	}
	s.pos, s.phase = pos, phase
}

// visibles is the number of visible bytes that b begins with.
func visibles(b []byte) int {
	const ones, tops = ^uint64(0) / 255, ^uint64(0) / 255 * 0x80
	n := 0
	for ; len(b)-n >= 8; n += 8 {
		// Eight at a time: the lowest top bit that is left marks the first byte under 0x21 or, in
		// the second term, equal to 0x7f. (Higher ones may be there by a borrow.)
		x := binary.LittleEndian.Uint64(b[n:])
		y := x ^ ones*0x7f
		if m := ((x-ones*0x21)&^x | (y-ones)&^y) & tops; m != 0 {
			return n + bits.TrailingZeros64(m)/8
		}
	}
	for n < len(b) && class[b[n]]&visible != 0 {
		n++
	}
	return n
}

// step is the request line's automaton: the place after c.
func step(phase, c uint8) uint8 {
	switch phase {
	case inMethod0:
		if class[c]&token != 0 {
			return inMethod
		}
		if c == '\r' {
			return inLF0
		}
	case inLF0:
		if c == '\n' {
			return inMethod0
		}
	case inMethod:
		if class[c]&token != 0 {
			return inMethod
		}
		if c == ' ' {
			return inTarget0
		}
	case inTarget0:
		if class[c]&visible != 0 {
			return inTarget
		}
	case inTarget:
		if class[c]&visible != 0 {
			return inTarget
		}
		if c == ' ' {
			return inVersion
		}
	case inMinor:
		if c == '0' || c == '1' {
			return inEnd10 + c - '0'
		}
	case inEnd10, inEnd11:
		if c == '\r' {
			return phase + inLF10 - inEnd10
		}
		if c == '\n' {
			return phase + isHTTP10 - inEnd10
		}
	case inLF10, inLF11:
		if c == '\n' {
			return phase + isHTTP10 - inLF10
		}
	default:
		if i := phase - inVersion; i < lenVersion && c == version[i] {
			return phase + 1
		}
	}
	return isNeither
}

// What a byte may be part of.
const (
	token   = 1 << iota // RFC 9110 section 5.6.2
	visible             // a target: no control, no space; octets over 0x7f are sent by real clients
)

var class = func() (t [256]uint8) {
	for c := range t {
		if c > ' ' && c != 0x7f {
			t[c] |= visible
		}
		if c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' {
			t[c] |= token
		}
	}
	for _, c := range []byte("!#$%&'*+-.^_`|~") {
		t[c] |= token
	}
	return t
}()
