package httpmsg

// MaxWhere bounds what AppendName and AppendByte make, with the few words around them.
const MaxWhere = 128

// maxShown is how many bytes of a name are shown.
const maxShown = 64

// Flaw is what is wrong with a message that reads well by itself: an error whose text is one of a closed set.
type Flaw string

// Error is error.
func (f Flaw) Error() string { return "http: " + string(f) }

// Fault is the text alone: for the peer that sent the message, and for logs.
func (f Flaw) Fault() string { return string(f) }

// AppendName appends the name of a field in quotation marks, in lower case, for people who look for the
// one that is wrong: whatever bytes it has, what is appended is printable ASCII, and at most maxShown bytes
// and a few. A byte that is not printable is written as \x and two digits; what is left out as three dots.
func AppendName(dst, name []byte) []byte {
	dst = append(dst, '\'')
	end := len(dst) + maxShown
	for _, c := range name {
		switch {
		case c >= 'A' && c <= 'Z':
			c += 'a' - 'A'
		case c < ' ' || c > '~' || c == '\'' || c == '"' || c == '\\':
			if len(dst)+4 > end {
				return append(dst, "...'"...)
			}
			dst = appendHex(append(dst, '\\', 'x'), c)
			continue
		}
		if len(dst) == end {
			return append(dst, "...'"...)
		}
		dst = append(dst, c)
	}
	return append(dst, '\'')
}

// AppendByte appends the byte c in hexadecimal, as "byte 0x0a".
func AppendByte(dst []byte, c byte) []byte { return appendHex(append(dst, "byte 0x"...), c) }

func appendHex(dst []byte, c byte) []byte {
	const digits = "0123456789abcdef"
	return append(dst, digits[c>>4], digits[c&15])
}
