// Package plain writes anybody's text so that whoever reads it sees all of it, and a
// terminal acts upon none of it.
//
//   - What stays is what unicode.IsPrint has: no control of C0 or C1, no mark that
//     turns the direction of text, nothing invisible.
//   - All else becomes \u and four hexadecimal digits, two of these where the rune is
//     above U+FFFF (RFC 8259 7): what was JSON is JSON with the same meaning.
//   - Done twice it is as done once: nothing that it writes is escaped again.
//
// It knows nothing of what the text is about.
package plain

import (
	"io"
	"unicode"
	"unicode/utf8"
)

// Append appends s as a part of a line: line ends and tabs in it are escaped too. A byte that
// is not UTF-8 becomes \ufffd. A backslash stays as it is. Where s is plain already it is only copied.
func Append[T string | []byte](b []byte, s T) []byte { return escape(b, s, "") }

// AppendJSON appends s as the content of a JSON string: as Append does, and quotes and backslashes are escaped as well.
func AppendJSON(b []byte, s string) []byte {
	for {
		i := 0
		for i < len(s) && s[i] != '"' && s[i] != '\\' {
			i++
		}
		b = Append(b, s[:i])
		if i == len(s) {
			return b
		}
		b = append(b, '\\', s[i])
		s = s[i+1:]
	}
}

// String is s as Append writes it.
func String(s string) string {
	if isPlain(s) {
		return s
	}
	return string(Append(nil, s))
}

func isPlain(s string) bool {
	for _, r := range s {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return false
		}
	}
	return true
}

// escape appends s, and leaves as they are also the bytes of keep.
func escape[T string | []byte](b []byte, s T, keep string) []byte {
	for i := 0; i < len(s); {
		c := s[i]
		if c >= 0x20 && c < 0x7f || kept(c, keep) {
			b = append(b, c)
			i++
			continue
		}
		r, n := decode(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			b = append(b, `\ufffd`...) // not UTF-8
		case unicode.IsPrint(r):
			b = append(b, s[i:i+n]...)
		case r < 1<<16:
			b = unit(b, uint16(r))
		default: // a surrogate pair
			r -= 1 << 16
			b = unit(unit(b, 0xd800+uint16(r>>10)), 0xdc00+uint16(r&0x3ff))
		}
		i += n
	}
	return b
}

func kept(c byte, keep string) bool {
	for i := range len(keep) {
		if keep[i] == c {
			return true
		}
	}
	return false
}

// decode is utf8.DecodeRune of either type, without a copy.
func decode[T string | []byte](s T) (rune, int) {
	var head [utf8.UTFMax]byte
	return utf8.DecodeRune(head[:copy(head[:], s)])
}

func unit(b []byte, v uint16) []byte {
	const hex = "0123456789abcdef"
	return append(b, '\\', 'u', hex[v>>12], hex[v>>8&15], hex[v>>4&15], hex[v&15])
}

// Writer passes text of many lines on as Append writes it, but for line ends and
// tabs, which stay. A rune has to be in one Write. As safe for concurrent use as what it writes to.
type Writer struct{ to io.Writer }

// NewWriter makes a Writer to w.
func NewWriter(w io.Writer) Writer { return Writer{w} }

// Raw is what it writes to: for what a program is to read back as it was, such as a configuration.
func (w Writer) Raw() io.Writer { return w.to }

// Write is io.Writer. What is written at once is passed on at once.
func (w Writer) Write(p []byte) (int, error) {
	if n, err := w.to.Write(escape(make([]byte, 0, len(p)+len(p)/8), p, "\n\t")); err != nil {
		return min(n, len(p)), err
	}
	return len(p), nil
}
