// Package httpmsg holds the values that HTTP codecs and the proxy hand each
// other: a field, a message head, and the character tables of RFC 9110.
//
//   - Names in a Head are lower case; a codec lower-cases what it receives.
//   - Slices alias the buffer of whoever made the Head, and are valid until
//     that owner says otherwise; Clone copies.
//   - Hop-by-hop fields and message framing never stand in Fields: a codec
//     consumes them on the way in and makes its own on the way out.
//
// It knows no wire format, no connection and no policy.
package httpmsg

// Field is one header or trailer field. Name is a lower-case token.
type Field struct{ Name, Value []byte }

// Length of a message body when it is not a plain number of bytes.
const (
	// Unknown: the body ends with the stream, chunk or connection (RFC 9112 6.3).
	Unknown int64 = -1
)

// Head is the head of one request or response, free of any HTTP version.
// The zero value is an empty head. Not safe for concurrent use.
type Head struct {
	// Request: Method, Scheme ("http"), Authority (host[:port], may be empty) and
	// Path (origin-form with query, "*" for OPTIONS *, empty for CONNECT).
	Method, Scheme, Authority, Path []byte

	// Status of a response, 100-999; 0 for a request.
	Status int

	// Fields in order of arrival, without pseudo-headers, Host, framing and
	// hop-by-hop fields. content-length stands here too (as received, a single
	// valid value equal to Length), and te only as "trailers".
	Fields []Field

	// Length of the body in bytes: 0 none, >0 that many, Unknown.
	// A response to HEAD, a 204 and a 304 have 0 here whatever content-length says.
	Length int64

	// Minor is the HTTP/1 minor version (0 or 1) of the message received;
	// 1 for HTTP/2.
	Minor uint8

	// Close: the sender asked for, or the framing demands, the end of the
	// connection after this message (HTTP/1 only).
	Close bool

	// Expect: the request carries "Expect: 100-continue". The field stays in Fields.
	Expect bool

	// Upgrade holds the Upgrade field of an HTTP/1.1 request with
	// "Connection: upgrade", or of a 101; nil otherwise.
	Upgrade []byte
}

// Reset empties h for reuse, keeping the capacity of Fields.
func (h *Head) Reset() { *h = Head{Fields: h.Fields[:0]} }

// Get returns the first value of the field called name (lower case), and
// whether there is one.
func (h *Head) Get(name string) ([]byte, bool) {
	for i := range h.Fields {
		if string(h.Fields[i].Name) == name {
			return h.Fields[i].Value, true
		}
	}
	return nil, false
}

// Del removes every field called name (lower case), keeping the order.
func (h *Head) Del(name string) {
	k := 0
	for i := range h.Fields {
		if string(h.Fields[i].Name) != name {
			h.Fields[k] = h.Fields[i]
			k++
		}
	}
	h.Fields = h.Fields[:k]
}

// Set replaces every field called name by one with that value. The slices are kept, not copied.
func (h *Head) Set(name, value []byte) {
	for i := range h.Fields {
		if string(h.Fields[i].Name) == string(name) {
			h.Fields[i].Value = value
			k := i + 1
			for j := i + 1; j < len(h.Fields); j++ {
				if string(h.Fields[j].Name) != string(name) {
					h.Fields[k] = h.Fields[j]
					k++
				}
			}
			h.Fields = h.Fields[:k]
			return
		}
	}
	h.Fields = append(h.Fields, Field{name, value})
}

// Add appends a field. The slices are kept, not copied.
func (h *Head) Add(name, value []byte) { h.Fields = append(h.Fields, Field{name, value}) }

// CloneInto copies h into dst, all bytes into arena (which may grow), and
// returns the arena. dst then aliases only the arena.
func (h *Head) CloneInto(dst *Head, arena []byte) []byte {
	need := len(h.Method) + len(h.Scheme) + len(h.Authority) + len(h.Path) + len(h.Upgrade)
	for i := range h.Fields {
		need += len(h.Fields[i].Name) + len(h.Fields[i].Value)
	}
	if cap(arena)-len(arena) < need {
		arena = make([]byte, 0, max(need, 1024)) // older heads keep the old array
	}
	keep := func(b []byte) []byte {
		if b == nil {
			return nil
		}
		o := len(arena)
		arena = append(arena, b...)
		return arena[o:len(arena):len(arena)]
	}
	f := dst.Fields[:0]
	*dst = *h
	dst.Method, dst.Scheme, dst.Authority = keep(h.Method), keep(h.Scheme), keep(h.Authority)
	dst.Path, dst.Upgrade = keep(h.Path), keep(h.Upgrade)
	for i := range h.Fields {
		f = append(f, Field{keep(h.Fields[i].Name), keep(h.Fields[i].Value)})
	}
	dst.Fields = f
	return arena
}

// Lower maps a token character (RFC 9110 5.6.2) to its lower case; 0: not a token character.
var Lower [256]byte

// BadValue marks the bytes that a field value may not hold (RFC 9110 5.5): controls but HTAB, and DEL.
var BadValue [256]bool

func init() {
	for c := range 256 {
		b := byte(c)
		switch {
		case b >= 'A' && b <= 'Z':
			Lower[c] = b + 32
		case b >= 'a' && b <= 'z', b >= '0' && b <= '9':
			Lower[c] = b
		}
		BadValue[c] = b < 0x20 && b != '\t' || b == 0x7f
	}
	for _, b := range []byte("!#$%&'*+-.^_`|~") {
		Lower[b] = b
	}
}

// ValidValue reports whether v holds only bytes a field value may hold.
func ValidValue(v []byte) bool {
	for _, c := range v {
		if BadValue[c] {
			return false
		}
	}
	return true
}
