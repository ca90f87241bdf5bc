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
	extVersions     = 43
	extKeyShare     = 51
	extECH          = 0xfe0d // draft-ietf-tls-esni section 5
	nameHost        = 0

	maxName    = 255 // longest DNS name (RFC 1035 section 2.3.4)
	keptALPN   = 513 // bytes of an ALPN list in pieces that are kept: two of the longest names, and one more byte
	maxNumbers = 16  // key shares or versions that are kept; no client is known to send as many
)

// hello goes on with bytes whose first is a handshake record's. It decides
// between TLS and Unknown on the first six bytes, and from then on takes the
// records off what they carry.
func (s *State) hello(b []byte) {
	if s.proto != TLS {
		if !fragment(b) || len(b) > recordHeader && b[recordHeader] != clientHello {
			s.end(Unknown)
			return
		}
		if len(b) <= recordHeader {
			return
		}
		s.proto = TLS
	}
	for {
		if s.left == 0 {
			h := b[s.pos:]
			if !fragment(h) {
				// Something else stands between two parts of the hello (RFC 8446 section 5.1).
				s.offer.step = isMalformed
				s.end(TLS)
				return
			}
			if len(h) < recordHeader {
				return
			}
			s.left = int(h[3])<<8 | int(h[4])
			s.pos += recordHeader
		}
		n := s.offer.read(b, s.pos, s.pos+min(s.left, len(b)-s.pos), s.left)
		s.pos, s.left = s.pos+n, s.left-n
		if s.offer.done() {
			s.end(TLS)
			return
		}
		if n == 0 {
			return
		}
	}
}

// fragment reports whether h, as far as it goes, is the header of a record that can
// carry part of a ClientHello. A handshake record is never empty.
func fragment(h []byte) bool {
	return (len(h) < 1 || h[0] == recordHandshake) &&
		(len(h) < 2 || h[1] == 3) &&
		(len(h) < 4 || h[3] <= maxFragment>>8) &&
		(len(h) < 5 || h[3]|h[4] != 0 && (h[3] < maxFragment>>8 || h[4] == 0))
}

// offer reads a ClientHello message, the records around it taken off, as it arrives:
// each byte once. It ends at the last byte that matters, or at the first field that shows
// the message to be malformed. Then it has nothing to say: whoever ends the TLS may read
// such a hello differently, so nothing may be decided by it.
//
// Of what it finds it keeps offsets, never slices: the buffer may move. What does
// not lie in one piece it copies.
type offer struct {
	step  place
	num   uint32 // the number that the field is, so far
	left  int    // bytes left of the field
	at    int    // bytes of the message read
	limit int    // no field may reach beyond it: the end of the extension, else of the message
	size  int    // length of the message with its header; 0: not known yet

	kind  kind // of the extension that is read
	met   kind // those that began
	whole kind // those that have been read to their end
	named bool // a host name was there, perhaps too long a one

	sni, alpn        piece
	versions, shares numbers
	name             [maxName]byte
	list             [keptALPN]byte
}

// kind is a set of the extensions that matter.
type kind uint8

const (
	hasName kind = 1 << iota
	hasALPN
	hasVersions
	hasShares
	hasECH
)

// place is a field of the message.
type place uint8

const (
	inHeader   place = iota // type and length
	inFixed                 // legacy_version and random
	inSession0              // the length of legacy_session_id; and so on
	inSession
	inSuites0
	inSuites
	inCompression0
	inCompression
	inBlock0
	inExtension0 // type and length
	inExtension  // one whose body does not matter
	inNames0
	inName0 // type and length
	inName
	inOtherName
	inProtocols0
	inProtocol0
	inProtocol
	inShares0
	inShare0 // group and length
	inShare
	inVersions0
	inVersionOf
	isComplete
	isMalformed
)

// width is the number of bytes of a field that is a number, 0 for the others.
var width = [...]uint8{
	inHeader: helloHeader, inSession0: 1, inSuites0: 2, inCompression0: 1, inBlock0: 2,
	inExtension0: 4, inNames0: 2, inName0: 3, inProtocols0: 2, inProtocol0: 1,
	inShares0: 2, inShare0: 4, inVersions0: 1, inVersionOf: 2, isMalformed: 0,
}

// moot are the fields whose bytes are of no interest: where nothing follows one,
// it need not be waited for.
var moot = [...]bool{inExtension: true, inOtherName: true, inShare: true, isMalformed: false}

func (o *offer) done() bool { return o.step >= isComplete }

// read goes on with b[from:to], of a piece of the message that has certain bytes (of those
// some may be yet to come). It returns how many bytes it read: not all where the message
// ends. Earlier calls were given the same b, perhaps shorter then or elsewhere.
func (o *offer) read(b []byte, from, to, certain int) (n int) {
	was := o.at
	if o.at == 0 {
		o.left, o.limit = helloHeader, helloHeader
	}
	for !o.done() {
		if o.size > 0 && o.at+o.left == o.size && o.size <= was+certain && moot[o.step] {
			o.whole |= o.kind
			o.step = isComplete
			break
		}
		if from == to {
			break
		}
		n := min(o.left, to-from)
		if width[o.step] > 0 {
			for _, c := range b[from : from+n] {
				o.num = o.num<<8 | uint32(c)
			}
		}
		switch o.step {
		case inName:
			o.sni.add(o.name[:], b, from, n)
		case inProtocol0, inProtocol:
			o.alpn.add(o.list[:], b, from, n)
		}
		from, o.at, o.left = from+n, o.at+n, o.left-n
		if o.left == 0 {
			num := o.num
			o.num = 0
			o.next(num)
		}
	}
	return o.at - was
}

// next goes to the field after the one that has been read; num is its value if it is a number.
func (o *offer) next(num uint32) {
	n := int(num & 0xffff)
	switch o.step {
	case inHeader:
		if num>>24 != clientHello {
			o.step = isMalformed
			return
		}
		o.size = helloHeader + int(num&0xffffff)
		o.limit = o.size
		o.bytes(inFixed, 2+32)
	case inFixed:
		o.number(inSession0)
	case inSession0:
		o.bytes(inSession, n)
	case inSession:
		o.number(inSuites0)
	case inSuites0:
		o.bytes(inSuites, n)
	case inSuites:
		o.number(inCompression0)
	case inCompression0:
		o.bytes(inCompression, n)
	case inCompression:
		if o.at == o.size {
			o.step = isComplete // no extensions: legal before TLS 1.3
			return
		}
		o.number(inBlock0)
	case inBlock0:
		if o.at+n != o.size {
			o.step = isMalformed
			return
		}
		o.extension()
	case inExtension0:
		o.open(int(num>>16), n)
	case inExtension:
		o.extension()

	case inNames0:
		o.fill(inName0, n)
	case inName0:
		switch {
		case num>>16 != nameHost:
			o.bytes(inOtherName, n)
		case n == 0 || o.named:
			o.step = isMalformed
		default:
			o.named = true
			if n > maxName {
				o.bytes(inOtherName, n)
			} else {
				o.bytes(inName, n)
			}
		}
	case inName, inOtherName:
		o.item(inName0)

	case inProtocols0:
		o.fill(inProtocol0, n)
	case inProtocol0:
		o.value(inProtocol, n)
	case inProtocol:
		o.item(inProtocol0)

	case inShares0:
		if n == 0 && o.at == o.limit {
			o.extension() // the client wants to be told a group (RFC 8446 section 4.2.8)
			return
		}
		o.fill(inShare0, n)
	case inShare0:
		o.shares.add(uint16(num >> 16))
		o.value(inShare, n)
	case inShare:
		o.item(inShare0)

	case inVersions0:
		o.fill(inVersionOf, n)
	case inVersionOf:
		o.versions.add(uint16(num))
		o.item(inVersionOf)
	}
}

// bytes goes to a field of n bytes, or on to the next one if it has none.
func (o *offer) bytes(s place, n int) {
	o.step, o.left = s, n
	if o.at+n > o.limit {
		o.step = isMalformed
	} else if n == 0 {
		o.next(0)
	}
}

// value is bytes for a field that may not be empty.
func (o *offer) value(s place, n int) {
	if n == 0 {
		o.step = isMalformed
		return
	}
	o.bytes(s, n)
}

// number goes to a field that is a number.
func (o *offer) number(s place) { o.bytes(s, int(width[s])) }

// fill goes to the first item of a list of n bytes, which is all that its extension holds.
// An empty one has no room for that item.
func (o *offer) fill(first place, n int) {
	if o.at+n != o.limit {
		o.step = isMalformed
		return
	}
	o.number(first)
}

// item goes to the list's next item, or out of the extension.
func (o *offer) item(s place) {
	if o.at < o.limit {
		o.number(s)
	} else {
		o.extension()
	}
}

// open goes into an extension of n bytes. One that matters may not be there twice
// (RFC 8446 section 4.2).
func (o *offer) open(extension, n int) {
	first := inExtension
	switch extension {
	case extServerName:
		o.kind, first = hasName, inNames0
	case extALPN:
		o.kind, first = hasALPN, inProtocols0
	case extVersions:
		o.kind, first = hasVersions, inVersions0
	case extKeyShare:
		o.kind, first = hasShares, inShares0
	case extECH:
		o.kind = hasECH
	}
	if o.at+n > o.limit || o.met&o.kind != 0 {
		o.step = isMalformed
		return
	}
	o.met |= o.kind
	o.limit = o.at + n
	if first == inExtension {
		o.bytes(first, n)
	} else {
		o.number(first)
	}
}

// extension goes out of an extension and to the next one.
func (o *offer) extension() {
	o.whole |= o.kind
	o.kind, o.limit = 0, o.size
	if o.at == o.size {
		o.step = isComplete
		return
	}
	o.number(inExtension0)
}

// hello says what was offered, as far as it has been read; b is what read was given.
func (o *offer) hello(b []byte) (h Hello) {
	if o.step == isMalformed {
		return Hello{}
	}
	if o.whole&hasName != 0 && o.sni.n > 0 {
		h.SNI = o.sni.in(o.name[:], b)
	}
	if o.whole&hasALPN != 0 {
		l := o.alpn.in(o.list[:], b)
		whole := 0
		for whole < len(l) && whole+1+int(l[whole]) <= len(l) {
			whole += 1 + int(l[whole])
		}
		h.ALPN = ALPN{l[:whole:whole]}
	}
	if o.whole&hasVersions != 0 {
		h.Versions = o.versions.list()
	}
	if o.whole&hasShares != 0 {
		h.KeyShares = o.shares.list()
	}
	h.ECH = o.whole&hasECH != 0
	return h
}

// piece is a run of bytes of a message: in the buffer while it lies there in
// one piece, else a copy.
type piece struct {
	off, n int
	copied bool
}

// add goes on with b[from:from+n]. A copy that fills its store takes no more.
func (p *piece) add(store, b []byte, from, n int) {
	switch {
	case p.copied:
	case p.n == 0:
		p.off, p.n = from, n
		return
	case p.off+p.n == from:
		p.n += n
		return
	default:
		p.copied, p.n = true, copy(store, b[p.off:p.off+p.n])
	}
	p.n += copy(store[p.n:], b[from:from+n])
}

func (p *piece) in(store, b []byte) []byte {
	if p.copied {
		return store[:p.n:p.n]
	}
	return b[p.off : p.off+p.n : p.off+p.n]
}

// numbers are the first values of a list, GREASE left out (RFC 8701).
type numbers struct {
	n int
	v [maxNumbers]uint16
}

func (l *numbers) add(v uint16) {
	if grease := v&0x0f0f == 0x0a0a && v>>8 == v&0xff; !grease && l.n < maxNumbers {
		l.v[l.n] = v
		l.n++
	}
}

func (l *numbers) list() []uint16 { return l.v[:l.n:l.n] }
