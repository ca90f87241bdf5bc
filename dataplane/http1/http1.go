// Package http1 reads and writes HTTP/1.0 and HTTP/1.1 messages (RFC 9112) as
// bytes: bytes in, heads and body runs out, and the reverse.
//
//   - Strict: what two parsers could read in two ways is refused, never mended.
//     Only CRLF ends a line; framing is one Content-Length or one "chunked".
//   - Framing and hop-by-hop fields end here: what is written is made anew from
//     the parsed values, never copied from the wire.
//   - An answer does not depend on how the bytes were cut into reads.
//   - Every head, line, trailer section and chunk extension is bounded.
//   - No allocation once the caller's Head and buffers are warm.
//
// It knows no socket, goroutine, clock, route or policy. No type here is safe
// for concurrent use.
//
// Where RFC 9112 or 9110 leave room, the choices are:
//
//   - Content-Length twice is refused even when both agree, and so is a list.
//   - Up to eight empty lines before a request line are skipped (RFC 9112 2.2); a ninth is not.
//   - A target may hold any byte above 0x20 but DEL and "#"; bytes from 0x80 on
//     and odd "%" escapes pass raw, for the path is never decoded here.
//   - An authority is a registered name without "%" escapes, an IPv4 address or
//     a bracketed IPv6 address, with a port of 1 to 65535 without leading zeros; an empty
//     port ("a:") is dropped (RFC 3986 6.2.3), a trailing dot is kept.
//   - A status line may lack the space after the code, as many servers send it.
//   - Connection options that are no tokens are ignored; more than 32 that name
//     fields are refused.
//   - "Expect" of an HTTP/1.0 request is dropped (RFC 9110 10.1.1).
//   - Field names are written in lower case, but for those that make an upgrade.
package http1

import (
	"bytes"

	"aether/dataplane/httpmsg"
)

// Framing says how the end of a message's body is found (RFC 9112 6.3).
type Framing uint8

const (
	None    Framing = iota // no body, and no field that says so
	Length                 // content-length, which may be 0
	Chunked                // transfer-encoding: chunked, with trailers
	ToClose                // a response that ends with its connection
)

// String returns the name of f in lower case, as logs show it.
func (f Framing) String() string {
	switch f {
	case None:
		return "none"
	case Length:
		return "length"
	case Chunked:
		return "chunked"
	case ToClose:
		return "to-close"
	}
	return "invalid"
}

// Limits bound one head. They are read at each call, so set them before the
// first byte of a head is parsed.
type Limits struct {
	MaxHead   int // bytes of a head with its last CRLF; 0: 61440 (contract 17)
	MaxFields int // field lines of a head, consumed ones included; 0: 100 (contract 17)
	MaxTarget int // bytes of a request target; 0: 16384
}

// What Limits hold when they say 0, and the bounds that are not settable.
const (
	defaultMaxHead   = 60 << 10
	defaultMaxFields = 100
	defaultMaxTarget = 16 << 10

	maxEmptyLines   = 8        // before a request line, as sniff.MaxEmptyLines has it
	maxMethod       = 32       // bytes; IANA's longest is 18
	maxOptions      = 32       // connection options that name fields, a head
	maxExtensions   = 16 << 10 // bytes of chunk extensions, a body
	maxTrailerBytes = 8 << 10  // of a trailer section with its last CRLF
	maxTrailers     = 32       // field lines of a trailer section
	maxChunkDigits  = 15       // so a chunk size is below 2^60
	keepArena       = 1 << 10  // trailer bytes that a BodyReader keeps for its next body
)

// Error is why bytes are not an acceptable message. The connection they came
// from cannot be read any further and must be closed. Two errors of one cause
// are the same to errors.Is, wherever in the message the cause was.
type Error struct {
	// Status that answers the fault: 400, 414, 431, 501 or 505 for a request,
	// 502 for a response. A BodyReader does not know its direction and always
	// says 400 or 431; for the body of a response read 502.
	Status int
	Reason string // what is wrong and what is expected instead; a closed set
	Where  string // the field, the byte or the limit, as Reason does not name it; printable, at most httpmsg.MaxWhere bytes
}

// Error tells what is wrong, and where.
func (e *Error) Error() string { return "http1: " + e.Fault() }

// Fault is Error without the name of the package: for the peer that sent the message, and for logs.
func (e *Error) Fault() string {
	if e.Where == "" {
		return e.Reason
	}
	return e.Reason + "; " + e.Where
}

// Is reports whether target has the same cause.
func (e *Error) Is(target error) bool {
	o, ok := target.(*Error)
	return ok && o.Status == e.Status && o.Reason == e.Reason
}

// fault is one cause in its two directions.
type fault struct{ request, response Error }

func newFault(status int, reason string) *fault {
	return &fault{Error{Status: status, Reason: reason}, Error{Status: 502, Reason: reason}}
}

// in is f in one direction. where is what the reason leaves open; most reasons leave nothing open.
func (f *fault) in(response bool, where string) *Error {
	e := &f.request
	if response {
		e = &f.response
	}
	if where == "" {
		return e
	}
	return &Error{e.Status, e.Reason, where}
}

// place describes the byte at b[at], in a section whose lines are fields but for the first where first says so.
func (f *fault) place(b []byte, at int, first bool) string {
	line, start := 0, 0
	for i, c := range b[:at] {
		if c == '\n' {
			line, start = line+1, i+1
		}
	}
	w := make([]byte, 0, httpmsg.MaxWhere)
	switch {
	case first && line == 0:
		w = append(w, "in the first line"...)
	case b[start] == '\r':
		w = append(w, "in an empty line"...)
	case f == folded && start == 0:
		w = append(w, "before the first field"...)
	case f == folded:
		w = append(w, "after "...)
		if first && line == 1 {
			w = append(w, "the first line"...)
			break
		}
		w = append(w, "field "...)
		w = httpmsg.AppendName(w, fieldName(b[bytes.LastIndexByte(b[:start-1], '\n')+1:]))
	default:
		w = append(w, "field "...)
		w = httpmsg.AppendName(w, fieldName(b[start:]))
	}
	if f != badLineEnd { // whose byte the reason names
		w = httpmsg.AppendByte(append(w, ", "...), b[at])
	}
	return string(w)
}

// fieldName is what stands before the colon of the field line that b begins with, or all of the line.
func fieldName(b []byte) []byte {
	if i := bytes.IndexAny(b, ":\r\n"); i >= 0 {
		return b[:i]
	}
	return b
}

// The causes. The text is for whoever runs the sender.
var (
	badLineEnd    = newFault(400, "line feed without carriage return: end every line with CRLF (RFC 9112 2.2)")
	badCR         = newFault(400, "carriage return without line feed: end every line with CRLF (RFC 9112 2.2)")
	badMethod     = newFault(400, "malformed method: want a token and one space (RFC 9112 3.1)")
	longMethod    = newFault(501, "method is longer than 32 bytes")
	badTarget     = newFault(400, "malformed request target: want no space, control or fragment (RFC 9112 3.2)")
	longTarget    = newFault(414, "request target is too long: shorten the URL")
	badForm       = newFault(400, "request target is in no form that its method allows: want /path, http://host/path, * for OPTIONS, or host:port for CONNECT (RFC 9112 3.2)")
	badVersion    = newFault(400, "malformed request line: want one space, HTTP/1.1 or HTTP/1.0, and CRLF (RFC 9112 3)")
	otherVersion  = newFault(505, "unsupported version: want HTTP/1.1 or HTTP/1.0")
	badStatusLine = newFault(502, "malformed status line: want HTTP/1.1 or HTTP/1.0, a space and a status from 100 to 999 (RFC 9112 4)")
	badReason     = newFault(502, "control character in the reason phrase (RFC 9112 4)")
	longHead      = newFault(431, "message head is too large: send fewer or shorter fields")
	manyFields    = newFault(431, "too many field lines: send fewer")
	badName       = newFault(400, "malformed field name: want a token right before the colon (RFC 9112 5.1)")
	folded        = newFault(400, "folded field or white space before a field: one line a field (RFC 9112 5.2)")
	badValue      = newFault(400, "control character in a field value (RFC 9110 5.5)")
	noHost        = newFault(400, "no Host field: HTTP/1.1 requires one (RFC 9112 3.2)")
	manyHosts     = newFault(400, "several Host fields: send one (RFC 9112 3.2)")
	badHost       = newFault(400, "malformed Host field: want host or host:port (RFC 9110 7.2)")
	badAuthority  = newFault(400, "malformed authority in the request target: want host or host:port without user (RFC 9110 4.2)")
	badLength     = newFault(400, "malformed Content-Length: want decimal digits below 2^63 (RFC 9110 8.6)")
	manyLengths   = newFault(400, "several Content-Length values: send one (RFC 9112 6.3)")
	badCoding     = newFault(400, "malformed Transfer-Encoding: want \"chunked\", once (RFC 9112 6.1)")
	otherCoding   = newFault(501, "unsupported Transfer-Encoding: want \"chunked\" alone (RFC 9112 6.1)")
	oldCoding     = newFault(400, "Transfer-Encoding in an HTTP/1.0 message (RFC 9112 6.1)")
	twoFramings   = newFault(400, "Content-Length together with Transfer-Encoding: send one (RFC 9112 6.1)")
	badOption     = newFault(400, "Connection names Host, Content-Length or Transfer-Encoding (RFC 9110 7.6.1)")
	manyOptions   = newFault(400, "Connection names too many fields: at most 32")

	badChunkSize   = newFault(400, "malformed chunk size: want 1 to 15 hexadecimal digits, then CRLF or an extension (RFC 9112 7.1)")
	longChunkSize  = newFault(400, "chunk size has more than 15 digits (RFC 9112 7.1)")
	badChunkEnd    = newFault(400, "chunk data is not followed by CRLF (RFC 9112 7.1)")
	badExtension   = newFault(400, "control character in a chunk extension (RFC 9112 7.1.1)")
	longExtensions = newFault(400, "chunk extensions are too long: at most 16384 bytes a body")
	longTrailers   = newFault(431, "trailer section is too large: at most 8192 bytes")
	manyTrailers   = newFault(431, "too many trailer fields: at most 32")
)

// bodiless reports whether a response with that status never has a body
// (RFC 9112 6.3, items 1 and 2).
func bodiless(status int) bool { return status < 200 || status == 204 || status == 304 }

// RequestFraming returns how a request is to be framed towards an HTTP/1.1
// server: by Length where it is known, else chunked. A request without a body
// gets Length, and so "content-length: 0", where it came with one or its method
// makes the server expect one (RFC 9110 8.6), and None otherwise.
func RequestFraming(h *httpmsg.Head) Framing {
	switch {
	case h.Length < 0:
		return Chunked
	case h.Length > 0:
		return Length
	}
	switch string(h.Method) {
	case "POST", "PUT", "PATCH":
		return Length
	}
	if _, ok := h.Get("content-length"); ok {
		return Length
	}
	return None
}

// ResponseFraming returns how a response is to be framed towards a client that
// asked in HTTP/1.minor, headReq: with HEAD. ToClose means that the connection
// must be closed after the body.
func ResponseFraming(h *httpmsg.Head, headReq bool, minor uint8) Framing {
	switch {
	case headReq || bodiless(h.Status):
		return None
	case h.Length >= 0:
		return Length
	case minor == 0:
		return ToClose
	}
	return Chunked
}
