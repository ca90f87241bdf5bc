package authz

import (
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

type number = protowire.Number

// Field numbers, by message. Numbers of a published message never change.
const (
	// envoy.service.auth.v3.CheckRequest
	checkRequestAttributes number = 1

	// envoy.service.auth.v3.AttributeContext
	attributesSource            number = 1
	attributesDestination       number = 2
	attributesRequest           number = 4
	attributesContextExtensions number = 10 // map<string, string>
	attributesMetadataContext   number = 11

	// envoy.service.auth.v3.AttributeContext.Peer
	peerAddress   number = 1
	peerPrincipal number = 4

	// envoy.service.auth.v3.AttributeContext.Request
	requestTime number = 1
	requestHTTP number = 2

	// envoy.service.auth.v3.AttributeContext.HttpRequest
	httpID       number = 1
	httpMethod   number = 2
	httpHeaders  number = 3 // map<string, string>
	httpPath     number = 4
	httpHost     number = 5
	httpScheme   number = 6
	httpSize     number = 9 // int64
	httpProtocol number = 10
	httpBody     number = 11

	// envoy.config.core.v3.Address, oneof address
	addressSocketAddress number = 1

	// envoy.config.core.v3.SocketAddress; its protocol is TCP where none is said
	socketAddressAddress   number = 2
	socketAddressPortValue number = 3 // uint32, oneof port_specifier

	// envoy.config.core.v3.Metadata
	metadataFilterMetadata number = 1 // map<string, google.protobuf.Struct>

	// google.protobuf.Struct
	structFields number = 1 // map<string, google.protobuf.Value>

	// google.protobuf.Value, oneof kind
	valueStringValue number = 3

	// google.protobuf.Timestamp
	timestampSeconds number = 1 // int64
	timestampNanos   number = 2 // int32

	// an entry of any map
	entryKey   number = 1
	entryValue number = 2
)

// writer appends fields of messages to b.
type writer struct{ b []byte }

// open begins a field that has a length, a message or text: what follows is its
// content, from the place it returns up to the shut of that place.
func (w *writer) open(num number) int {
	w.b = protowire.AppendTag(w.b, num, protowire.BytesType)
	w.b = append(w.b, 0) // the length, which mostly is one byte
	return len(w.b)
}

// shut ends the field whose content began at the place, and moves the content
// where its length takes more than a byte. So b is never longer than it will be in
// the end, and capacity for the message is enough to write it.
func (w *writer) shut(at int) {
	n := len(w.b) - at
	more := protowire.SizeVarint(uint64(n)) - 1
	if more > 0 {
		var pad [9]byte
		w.b = append(w.b, pad[:more]...)
		copy(w.b[at+more:], w.b[at:at+n])
	}
	protowire.AppendVarint(w.b[:at-1], uint64(n)) // in place: it fits
}

// varint is a number of a oneof, which is written though it be 0.
func (w *writer) varint(num number, v uint64) {
	w.b = protowire.AppendTag(w.b, num, protowire.VarintType)
	w.b = protowire.AppendVarint(w.b, v)
}

// integer is an int32 or int64, which is left out where it is 0, as proto3 has it.
func (w *writer) integer(num number, v int64) {
	if v != 0 {
		w.varint(num, uint64(v))
	}
}

// text is a string, which is left out where it is empty, as proto3 has it.
func text[T string | []byte](w *writer, num number, s T) {
	if len(s) > 0 {
		put(w, num, s)
	}
}

// put is a string of a oneof or of an entry of a map, which is written though it be empty.
func put[T string | []byte](w *writer, num number, s T) {
	w.b = protowire.AppendTag(w.b, num, protowire.BytesType)
	w.b = protowire.AppendVarint(w.b, uint64(len(s)))
	w.b = appendText(w.b, s)
}

// appendText appends s, which stays as long as it is, with a "!" for each byte that is not of UTF-8.
func appendText[T string | []byte](b []byte, s T) []byte {
	at := len(b)
	b = append(b, s...)
	clean(b[at:])
	return b
}

// clean puts a "!" in the place of each byte of b that is not of UTF-8.
func clean(b []byte) {
	if utf8.Valid(b) {
		return
	}
	for len(b) > 0 {
		c, n := next(b)
		if c == '!' {
			b[0] = '!'
		}
		b = b[n:]
	}
}

// next is the first character of b and its length in bytes; '!' for a byte that is not of UTF-8.
func next(b []byte) (c rune, n int) {
	c, n = utf8.DecodeRune(b)
	if c == utf8.RuneError && n == 1 {
		return '!', 1
	}
	return c, n
}

// compareText orders a and b as they are once appended by appendText; where both
// are of UTF-8, as bytes.Compare does.
func compareText(a, b []byte) int {
	for len(a) > 0 && len(b) > 0 {
		c, n := next(a)
		d, m := next(b)
		if c != d {
			return int(c - d)
		}
		a, b = a[n:], b[m:]
	}
	return len(a) - len(b)
}
