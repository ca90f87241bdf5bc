package sniff

// BeginsRequest reports whether b, the first bytes of a connection, begin as an HTTP/1
// request does to a reader that is not strict: with a word, longer than MaxMethod or
// followed by a blank on its line, or with a blank, which such readers pass over. Blanks are those of
// RFC 9112 section 3 (SP, HTAB, VT, FF, a CR that no LF follows), line ends before the word (section 2.2), and
// what readers that split lines by Unicode take for one: 0x1c to 0x1f, 0x85, 0xa0. The octets of
// a word are all others but controls.
//
// It is for a place where a request that Detect calls Unknown must not be handed on, because
// somebody may read it although no two readers need to agree on it. More: it takes more bytes to tell, at
// most MaxMethod+2 in all; where none are waited for it is to be taken for yes, for what is handed
// on may go on behind. A preface of HTTP/2 begins so, too: ask Detect first.
func BeginsRequest(b []byte) (yes, more bool) {
	for i, c := range b {
		switch {
		case c == '\r' && i > 0:
			if i+1 == len(b) {
				return false, true
			}
			return b[i+1] != '\n', false
		case c == '\n' && i > 0:
			return false, false // one word on its line
		case isBlank(c), i == MaxMethod && c > ' ' && c != 0x7f:
			return true, false
		case c < ' ' || c == 0x7f:
			return false, false
		}
	}
	return false, len(b) <= MaxMethod
}

// isBlank reports whether some reader takes c for a blank or a line's end.
func isBlank(c byte) bool {
	return c >= '\t' && c <= '\r' || c >= 0x1c && c <= ' ' || c == 0x85 || c == 0xa0
}
