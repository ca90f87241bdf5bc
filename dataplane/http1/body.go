package http1

import (
	"bytes"

	"aether/dataplane/httpmsg"
)

// BodyReader cuts a body out of a stream of bytes. Its zero value is a body
// that has ended; Start begins one. It keeps trailers in memory of its own, at
// most 8 KiB, so it must not be copied once started.
type BodyReader struct {
	state  bodyState
	chunks bool  // Chunked, else Length
	digits uint8 // of the chunk size so far
	ext    int32 // bytes of chunk extensions so far
	lines  int32 // of the trailer section so far
	n      int64 // bytes left of the body, or of the chunk
	run    int   // size of the last data, for Unread
	err    *Error
	arena  []byte // the trailer section as received
	fields []httpmsg.Field
}

type bodyState uint8

const (
	ended bodyState = iota
	data
	dataToClose
	chunkSize
	chunkExt
	chunkSizeLF
	chunkCR
	chunkLF
	trailerLines
	failed
)

// Start begins a body with the framing f, and ends the trailers of the one
// before. length counts only with Length and must not be negative there.
func (r *BodyReader) Start(f Framing, length int64) {
	arena, fields := r.arena[:0], r.fields[:0]
	if cap(arena) > keepArena { // an idle connection keeps little
		arena, fields = nil, nil
	}
	*r = BodyReader{arena: arena, fields: fields}
	switch f {
	case Length:
		if r.n = length; length > 0 {
			r.state = data
		}
	case Chunked:
		r.state, r.chunks = chunkSize, true
	case ToClose:
		r.state = dataToClose
	}
}

// Next reads on at the start of b. It returns the next run of body bytes,
// which aliases b and may be empty; how many bytes of b are used, data being
// the last of them; and whether the body, trailers included, ends there. Call
// it again with what follows until done, or until it uses nothing of b: it
// then needs more bytes. A body by ToClose is never done: the end of the
// connection is its end. An error is an *Error and stays.
func (r *BodyReader) Next(b []byte) (run []byte, used int, done bool, err error) {
	r.run = 0
	switch r.state {
	case ended:
		return nil, 0, true, nil
	case dataToClose:
		r.run = len(b)
		return b, len(b), false, nil
	case failed:
		return nil, 0, false, r.err
	}
	for used < len(b) {
		c := b[used]
		switch r.state {
		case data:
			m := int(min(int64(len(b)-used), r.n))
			run = b[used : used+m : used+m]
			r.run, used = m, used+m
			if r.n -= int64(m); r.n == 0 {
				if !r.chunks {
					r.state = ended
					return run, used, true, nil
				}
				r.state = chunkCR
			}
			return run, used, false, nil

		case chunkSize:
			switch d := unhex[c]; {
			case d < 16 && r.digits < maxChunkDigits:
				r.n = r.n<<4 | int64(d)
				r.digits++
			case c == '\r' && r.digits > 0:
				r.state = chunkSizeLF
			case c == ';' && r.digits > 0:
				r.state = chunkExt
			case d < 16:
				return r.fail(longChunkSize, "")
			default:
				return r.fail(badChunkSize, byteAt(c))
			}
			used++

		case chunkExt: // dropped
			if c == '\r' {
				r.state = chunkSizeLF
			} else if httpmsg.BadValue[c] {
				return r.fail(badExtension, byteAt(c))
			} else if r.ext++; r.ext > maxExtensions {
				return r.fail(longExtensions, "")
			}
			used++

		case chunkSizeLF:
			if c != '\n' {
				return r.fail(badCR, "in the line of a chunk size, "+byteAt(c))
			}
			used++
			r.digits = 0
			if r.state = data; r.n == 0 {
				r.state = trailerLines
			}

		case chunkCR:
			if c != '\r' {
				return r.fail(badChunkEnd, byteAt(c))
			}
			r.state = chunkLF
			used++

		case chunkLF:
			if c != '\n' {
				return r.fail(badChunkEnd, byteAt(c))
			}
			r.state = chunkSize
			used++

		case trailerLines:
			k, end, bad := r.trailerLine(b[used:])
			if bad != nil {
				where := ""
				switch bad {
				case badLineEnd, badCR, badName, folded, badValue:
					where = "in the trailers, " + bad.place(r.arena, k, false)
				}
				return r.fail(bad, where)
			}
			used += k
			if end {
				r.state = ended
				return nil, used, true, nil
			}
		}
	}
	return nil, used, false, nil
}

// fail makes bad the answer from now on.
func (r *BodyReader) fail(bad *fault, where string) ([]byte, int, bool, error) {
	r.state, r.err = failed, bad.in(false, where)
	return nil, 0, false, r.err
}

func byteAt(c byte) string { return string(httpmsg.AppendByte(nil, c)) }

// Unread says that the last n bytes of the data that Next just returned were
// not taken: they will be presented again, so count them off what it used. A
// done that came with that data is taken back. It panics when Next returned
// fewer than n bytes.
func (r *BodyReader) Unread(n int) {
	if n < 0 || n > r.run {
		panic("http1: Unread of more than Next returned")
	}
	if n == 0 {
		return
	}
	r.run -= n
	if r.state != dataToClose {
		r.n += int64(n)
		r.state = data
	}
}

// Trailers returns the trailer fields of the body, once it is done, with names
// in lower case. Fields that RFC 9110 6.5.1 bars from trailers (framing,
// routing, authentication, content) are left out. Valid until Start.
func (r *BodyReader) Trailers() []httpmsg.Field { return r.fields }

// Held is how many bytes of memory the trailers take, beyond what is kept for the next ones.
func (r *BodyReader) Held() int {
	if cap(r.arena) <= keepArena {
		return 0
	}
	return cap(r.arena) + cap(r.fields)*fieldSize
}

const fieldSize = 48 // bytes of a field beside its text

// trailerLine takes the next line of the trailer section, or what there is of
// it, into the arena. end: it was the empty one. With a fault used is the byte of the arena that it is about.
func (r *BodyReader) trailerLine(b []byte) (used int, end bool, bad *fault) {
	used = len(b)
	i := bytes.IndexByte(b, '\n')
	if i >= 0 {
		used = i + 1
	}
	if len(r.arena)+used > maxTrailerBytes {
		return 0, false, longTrailers
	}
	r.arena = append(r.arena, b[:used]...)
	if i < 0 {
		return used, false, nil
	}
	a := r.arena
	if len(a) < 2 || a[len(a)-2] != '\r' {
		return len(a) - 1, false, badLineEnd
	}
	if len(a) > 2 && a[len(a)-3] != '\n' {
		if r.lines++; r.lines > maxTrailers {
			return 0, false, manyTrailers
		}
		return used, false, nil
	}
	for i := 0; i < len(a)-2; {
		name, value, next, bad := fieldLine(a, i)
		if bad != nil {
			return next, false, bad
		}
		i = next
		if !barred(name) {
			r.fields = append(r.fields, httpmsg.Field{Name: name, Value: value})
		}
	}
	return used, true, nil
}

// barred reports whether a field may not be a trailer (RFC 9110 6.5.1): a
// receiver that merged it into the head would act on it.
func barred(name []byte) bool {
	switch string(name) {
	case "content-digest": // made for trailers (RFC 9530 6.4)
		return false
	case "age", "authorization", "cache-control", "connection", "cookie", "date", "expect", "expires",
		"forwarded", "host", "if-match", "if-modified-since", "if-none-match", "if-range", "if-unmodified-since",
		"keep-alive", "location", "max-forwards", "pragma", "proxy-authenticate", "proxy-authorization",
		"proxy-connection", "range", "retry-after", "set-cookie", "te", "trailer", "transfer-encoding",
		"upgrade", "vary", "warning", "www-authenticate", "x-request-id":
		return true
	}
	return hasPrefix(name, "content-") || hasPrefix(name, "x-forwarded-") || httpmsg.ProxyOnlyTrailer(name)
}

func hasPrefix(v []byte, p string) bool { return len(v) >= len(p) && string(v[:len(p)]) == p }

// unhex maps a hexadecimal digit to its value, all else to 255.
var unhex [256]uint8

func init() {
	for c := range unhex {
		switch b := byte(c); {
		case isDigit(b):
			unhex[c] = b - '0'
		case isHex(b):
			unhex[c] = b | 0x20 - 'a' + 10
		default:
			unhex[c] = 255
		}
	}
}
