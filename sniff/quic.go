package sniff

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
)

// MaxDatagrams is how many datagrams, at most, an answer about a QUIC connection
// depends on. A hello takes two or three; the rest is for 0-RTT packets before
// it, repeats, and version negotiation.
const MaxDatagrams = 64

// maxCrypto is how much of the CRYPTO stream is put together, in bytes: as
// much of a hello as over TCP.
const maxCrypto = MaxPeek

// QUICPackets is a set of the kinds of packets seen.
type QUICPackets uint8

// The kinds of packets (RFC 9000 section 17). Only Initial packets are ever decrypted: their
// keys are no secret (RFC 9001 section 5.2). A QUICShort is a packet with a short header.
const (
	QUICInitial QUICPackets = 1 << iota // the first four in the order of their type bits
	QUICZeroRTT
	QUICHandshake
	QUICRetry
	QUICVersionNegotiation
	QUICShort
	// QUICUnknownVersion: a long header of a version whose packets cannot be told apart.
	QUICUnknownVersion
)

// QUICResult is what is known of a QUIC connection so far.
type QUICResult struct {
	// Proto is QUIC once an Initial packet of the client has been authenticated, Unknown for
	// what is none or did not show itself, and None before.
	Proto Proto

	// More: datagrams to come can still change the answer.
	More bool

	// Version is the version of the authenticated Initial, 0 while there is none.
	Version uint32

	// DCID is the Destination Connection ID that the keys of the Initial come from: the
	// client's random first one, or after a Retry the server's. Up to 20 bytes, may be
	// empty; nil while there is no authenticated Initial. It aliases the QUICState.
	DCID []byte

	// Packets are the kinds of packets seen until the answer was final, decrypted or not, in
	// either direction.
	Packets QUICPackets

	// Hello is the client's, zero while More is set.
	Hello
}

// QUICState tells from the client's first datagrams whether a UDP flow is QUIC and what its
// ClientHello offers: versions 1 (RFC 9001) and 2 (RFC 9369), and drafts 23 to 34.
//
//   - An answer without More is final.
//   - Datagrams may be lost, repeated and reordered; packets in them coalesced; the hello
//     may lie in any pieces, over any of them.
//   - Packets that do not authenticate, or that no client may send, change nothing. Only a first
//     datagram that begins no connection of any version is Unknown at once.
//   - It holds at most 16 KiB of the hello, and while it needs more, a copy
//     of the largest packet. For one datagram it derives keys once at most.
//   - It never writes to the caller's buffer.
//
// It takes the datagrams of one flow; those of the server may be among them and do no
// harm. After a version negotiation, or a Retry, the client's new attempt counts if
// the hello was not complete before. The zero value is ready. Not safe for concurrent use.
type QUICState struct {
	proto     Proto
	done      bool
	packets   QUICPackets
	datagrams int

	keys    *initialKeys // of the attempt that counts; nil before its first Initial
	version uint32
	dcid    [maxCID]byte
	dcidLen int
	largest int64 // packet number authenticated with keys, -1 for none

	stream []byte                 // the CRYPTO stream from its start; only what have says is there means something
	have   [maxCrypto / 64]uint64 // a bit for each byte of it that is there
	whole  int                    // how many bytes are there without a gap
	offer  offer

	scratch []byte          // the packet that is opened
	mask    [sampleLen]byte // and what protects its header
	nonce   [nonceLen]byte
}

// Datagram goes on with the payload of one UDP datagram.
func (s *QUICState) Datagram(b []byte) QUICResult {
	if !s.done {
		s.datagrams++
		s.datagram(b[:min(len(b), maxDatagram)])
		if s.datagrams == MaxDatagrams {
			s.end()
		}
	}
	return s.result(s.done)
}

// Last is the answer when no more datagrams are to be waited for. It never says
// More: a hello that is not complete offers what it has shown, a flow that has shown no Initial
// is Unknown, one without a datagram is None. The QUICState stays as good as it was.
func (s *QUICState) Last() QUICResult { return s.result(true) }

func (s *QUICState) result(last bool) QUICResult {
	r := QUICResult{Proto: s.proto, More: !last, Packets: s.packets}
	switch {
	case s.proto == QUIC:
		r.Version, r.DCID = s.version, s.dcid[:s.dcidLen:s.dcidLen]
		if last {
			r.Hello = s.offer.hello(s.stream)
		}
	case last && s.datagrams > 0:
		r.Proto = Unknown
	}
	return r
}

func (s *QUICState) end() {
	s.done, s.keys, s.scratch = true, nil, nil
	if s.proto != QUIC {
		s.proto = Unknown
	}
}

// QUIC numbers (RFC 9000 sections 12.4, 14.1, 17.2 and 19; RFC 9001 section 5).
const (
	maxDatagram    = 1<<16 - 1
	minInitial     = 1200 // bytes of a datagram that a server answers
	longForm       = 0x80
	fixedBit       = 0x40
	reservedBits   = 0x0c
	maxCID         = 20
	sampleAt       = 4 // after the start of the packet number
	sampleLen      = 16
	nonceLen       = 12
	framePadding   = 0x00
	framePing      = 0x01
	frameAck       = 0x02
	frameAckECN    = 0x03
	frameCrypto    = 0x06
	frameConnClose = 0x1c
)

// quicVersion is how the versions differ in what matters here.
type quicVersion struct {
	salt   string
	labels string // what the labels of the keys begin with
	first  byte   // type bits of an Initial; the other types follow it
}

var (
	quicV2      = &quicVersion{"\x0d\xed\xe3\xde\xf7\x00\xa6\xdb\x81\x93\x81\xbe\x6e\x26\x9d\xcb\xf9\xbd\x2e\xd9", "quicv2 ", 1}
	quicV1      = &quicVersion{"\x38\x76\x2c\xf7\xf5\x59\x34\xb3\x4d\x17\x9a\xe6\xa4\xc8\x0c\xad\xcc\xbb\x7f\x0a", "quic ", 0}
	quicDraft29 = &quicVersion{"\xaf\xbf\xec\x28\x99\x93\xd2\x4c\x9e\x97\x86\xf1\x9c\x61\x11\xe0\x43\x90\xa8\x99", "quic ", 0}
	quicDraft23 = &quicVersion{"\xc3\xee\xf7\x12\xc7\x2e\xbb\x5a\x11\xa7\xd2\x43\x2b\xb4\x63\x65\xbe\xf9\xf5\x02", "quic ", 0}
)

// versionOf is nil for a version that is not known.
func versionOf(v uint32) *quicVersion {
	const draft = 0xff000000
	switch {
	case v == 1, v >= draft+33 && v <= draft+34:
		return quicV1
	case v == 0x6b3343cf:
		return quicV2
	case v >= draft+29 && v <= draft+32:
		return quicDraft29
	case v >= draft+23 && v <= draft+28:
		return quicDraft23
	}
	return nil
}

// datagram goes through the packets of a datagram.
func (s *QUICState) datagram(b []byte) {
	var head longHeader // of the first packet
	first := true
	var fresh *initialKeys
	for in := (reader{b: b}); len(in.b) > 0 && !s.done; {
		if in.b[0]&longForm == 0 {
			if s.packets == 0 {
				s.end() // no connection starts like this
			} else if in.b[0]&fixedBit != 0 {
				s.packets |= QUICShort
			}
			return
		}
		packet := in.b
		h := in.header()
		v := versionOf(h.version)
		switch {
		case in.bad && s.packets == 0:
			s.end()
			return
		case in.bad:
			return
		case h.version == 0:
			s.packets |= QUICVersionNegotiation
			return
		case v == nil && s.packets == 0 && len(b) < minInitial:
			// No server answers it with a version negotiation (RFC 9000 section 6.1),
			// so it is no beginning of a connection.
			s.end()
			return
		case v == nil:
			s.packets |= QUICUnknownVersion
			return
		}
		kind := QUICInitial << ((h.first>>4 - v.first) & 3)
		s.packets |= kind
		if kind == QUICRetry {
			return // it has no length, and nothing follows it
		}
		if kind == QUICInitial {
			in.take(in.varint()) // token
		}
		n := in.varint()
		number := len(packet) - len(in.b)
		in.take(n)
		// Only packets of one connection are coalesced (RFC 9000 section 12.2).
		if in.bad || len(h.dcid) > maxCID || !first && (h.version != head.version || !bytes.Equal(h.dcid, head.dcid)) {
			return
		}
		head, first = h, false
		if kind == QUICInitial {
			fresh = s.initial(v, h, packet[:len(packet)-len(in.b)], number, fresh)
		}
	}
}

// initial tries to open an Initial packet whose packet number is at number. It returns the
// keys of this DCID, which the next packet of the datagram has too, if it had to derive them.
func (s *QUICState) initial(v *quicVersion, h longHeader, packet []byte, number int, fresh *initialKeys) *initialKeys {
	if len(packet) < number+sampleAt+sampleLen {
		return fresh
	}
	if s.keys != nil && s.version == h.version {
		// The client keeps its keys when it takes up the server's connection ID.
		if payload, n, ok := s.open(s.keys, packet, number, s.largest); ok {
			s.opened(payload, n)
			return fresh
		}
	}
	if s.keys != nil && s.version == h.version && bytes.Equal(h.dcid, s.dcid[:s.dcidLen]) {
		return fresh
	}
	if fresh == nil {
		if fresh = deriveInitial(v, h.dcid); fresh == nil {
			return nil
		}
	}
	if payload, n, ok := s.open(fresh, packet, number, -1); ok {
		// The first attempt, or a new one: after a Retry, in another version, or of another
		// connection. Pieces of two hellos are never put together.
		s.keys, s.version, s.dcidLen, s.largest = fresh, h.version, copy(s.dcid[:], h.dcid), -1
		s.stream, s.whole, s.offer, s.proto = s.stream[:0], 0, offer{}, QUIC
		clear(s.have[:])
		s.opened(payload, n)
	}
	return fresh
}

// open takes header and packet protection off a copy of packet (RFC 9001 sections 5.3 and
// 5.4). payload is good until the next call.
func (s *QUICState) open(k *initialKeys, packet []byte, number int, largest int64) (payload []byte, n int64, ok bool) {
	s.scratch = append(s.scratch[:0], packet...)
	p := s.scratch
	k.header.Encrypt(s.mask[:], p[number+sampleAt:][:sampleLen])
	p[0] ^= s.mask[0] & 0x0f
	size := int(p[0]&3) + 1
	var low uint32
	for i := range size {
		p[number+i] ^= s.mask[1+i]
		low = low<<8 | uint32(p[number+i])
	}
	n = packetNumber(low, size, largest)
	s.nonce = k.iv
	for i := range 8 {
		s.nonce[nonceLen-8+i] ^= byte(n >> (56 - 8*i))
	}
	body := number + size
	payload, err := k.aead.Open(p[body:body], s.nonce[:], p[body:], p[:body])
	return payload, n, err == nil && p[0]&reservedBits == 0
}

// packetNumber completes the low bytes of a packet number, size of them (RFC 9000 appendix A.3).
func packetNumber(low uint32, size int, largest int64) int64 {
	window := int64(1) << (8 * size)
	want := largest + 1
	n := want&^(window-1) | int64(low)
	switch {
	case n <= want-window/2 && n < 1<<62-window:
		return n + window
	case n > want+window/2 && n >= window:
		return n - window
	}
	return n
}

// opened takes the CRYPTO frames out of an authenticated payload. One that breaks a
// rule ends the connection at the server, so nothing of it counts.
func (s *QUICState) opened(payload []byte, n int64) {
	s.largest = max(s.largest, n)
	if len(payload) == 0 || !s.frames(payload, false) {
		return
	}
	from := s.whole
	s.frames(payload, true)
	s.offer.read(s.stream, from, s.whole, maxCrypto-from)
	if s.offer.done() || s.whole == maxCrypto {
		s.end()
	}
}

// frames goes through the frames of an Initial packet (RFC 9000 section 12.4), and
// reports whether all of them are well-formed and may be there. It takes their CRYPTO if take is set.
func (s *QUICState) frames(payload []byte, take bool) bool {
	for in := (reader{b: payload}); len(in.b) > 0; {
		switch kind := in.varint(); kind {
		case framePadding, framePing:
		case frameAck, frameAckECN:
			in.varint() // largest acknowledged
			in.varint() // delay
			more := in.varint()
			in.varint() // first range
			for ; more > 0 && !in.bad; more-- {
				in.varint()
				in.varint()
			}
			if kind == frameAckECN {
				in.varint()
				in.varint()
				in.varint()
			}
		case frameCrypto:
			offset := in.varint()
			data := in.take(in.varint())
			if offset+uint64(len(data)) > maxVarint {
				return false
			}
			if take {
				s.crypto(offset, data)
			}
		case frameConnClose:
			in.varint() // code
			in.varint() // frame
			in.take(in.varint())
		default:
			return false
		}
		if in.bad {
			return false
		}
	}
	return true
}

// crypto puts a piece of the CRYPTO stream in its place. Of bytes that come twice
// the first copy counts; those beyond the bound are dropped.
func (s *QUICState) crypto(offset uint64, data []byte) {
	if offset >= maxCrypto {
		return
	}
	at := int(offset)
	data = data[:min(len(data), maxCrypto-at)]
	if end := at + len(data); end > len(s.stream) {
		if end > cap(s.stream) {
			grown := make([]byte, len(s.stream), min(maxCrypto, max(end, 2*cap(s.stream), 2048)))
			copy(grown, s.stream)
			s.stream = grown
		}
		s.stream = s.stream[:end]
	}
	for i, c := range data {
		if word, bit := &s.have[(at+i)/64], uint64(1)<<((at+i)%64); *word&bit == 0 {
			*word |= bit
			s.stream[at+i] = c
		}
	}
	for s.whole < maxCrypto { // a word at a time
		n := bits.TrailingZeros64(^(s.have[s.whole/64] >> (s.whole % 64)))
		if n == 0 {
			return
		}
		s.whole += n
	}
}

// initialKeys protect what a client sends in Initial packets (RFC 9001 section 5.2).
type initialKeys struct {
	aead   cipher.AEAD
	header cipher.Block
	iv     [nonceLen]byte
}

// deriveInitial is nil where the cryptography of the process refuses to (FIPS 140 alone
// allows no secret as short as a connection ID).
func deriveInitial(v *quicVersion, dcid []byte) *initialKeys {
	secret, err := hkdf.Extract(sha256.New, dcid, []byte(v.salt))
	if err != nil {
		return nil
	}
	expand := func(secret []byte, label string, n int) []byte {
		if err != nil {
			return nil
		}
		label = "tls13 " + label
		var out []byte
		out, err = hkdf.Expand(sha256.New, secret, string([]byte{0, byte(n), byte(len(label))})+label+"\x00", n)
		return out
	}
	client := expand(secret, "client in", sha256.Size)
	key, iv, header := expand(client, v.labels+"key", 16), expand(client, v.labels+"iv", nonceLen), expand(client, v.labels+"hp", 16)
	if err != nil {
		return nil
	}
	k := &initialKeys{iv: [nonceLen]byte(iv)}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil
	}
	if k.aead, err = cipher.NewGCM(block); err != nil {
		return nil
	}
	if k.header, err = aes.NewCipher(header); err != nil {
		return nil
	}
	return k
}

// longHeader is what every version has in a long header (RFC 8999 section 5.1).
type longHeader struct {
	first   byte
	version uint32
	dcid    []byte
}

const maxVarint = 1<<62 - 1

// reader reads a packet. Once bad it gives nothing.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) take(n uint64) []byte {
	if r.bad || n > uint64(len(r.b)) {
		r.b, r.bad = nil, true
		return nil
	}
	p := r.b[:n:n]
	r.b = r.b[n:]
	return p
}

// varint reads a number of 1 to 8 bytes (RFC 9000 section 16).
func (r *reader) varint() uint64 {
	if len(r.b) == 0 {
		r.bad = true
		return 0
	}
	var v [8]byte
	n := 1 << (r.b[0] >> 6)
	copy(v[8-n:], r.take(uint64(n)))
	v[8-n] &= 0x3f
	return binary.BigEndian.Uint64(v[:])
}

func (r *reader) header() (h longHeader) {
	if p := r.take(5); p != nil {
		h.first, h.version = p[0], binary.BigEndian.Uint32(p[1:])
	}
	if p := r.take(1); p != nil {
		h.dcid = r.take(uint64(p[0]))
	}
	if p := r.take(1); p != nil {
		r.take(uint64(p[0])) // the client's own
	}
	return h
}
