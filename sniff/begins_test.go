package sniff

import (
	"bufio"
	"bytes"
	"math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"aether/e2e/testseed"
)

// lenient is somebody who reads requests, each in a way of his own; an oracle of BeginsRequest.
type lenient struct {
	name string
	// takes reports whether what begins with b is read as a request for somebody's page.
	takes func(b []byte) bool
}

var (
	nginxLine = regexp.MustCompile(`^[\r\n]*[A-Z_-]+ +[^ \r\n]+(?: +HTTP/[0-9]+\.[0-9]+ *)?\r?\n`)
	anyBlank  = regexp.MustCompile(`(?i)^[\r\n\t\v\f ]*[!#-'*+.^-z|~0-9A-Z-]+[ \t\v\f\r]+[^ \t\v\f\r\n]+[ \t\v\f\r]+HTTP/[0-9.]+[ \t\v\f\r]*\n`)
	anyWord   = regexp.MustCompile(`(?s)^[\r\n]*[^\x00-\x20\x7f]+ +[^ \n]*/[^\n]*\n`)
)

// readers are those whose ways were looked at, and one of all that RFC 9112 lets a reader pass over.
var readers = []lenient{
	{"net/http", func(b []byte) bool {
		_, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(b)))
		return err == nil
	}},
	// Line ends before the line, a method of capitals, spaces, a version or none.
	{"nginx", func(b []byte) bool {
		return nginxLine.Match(b)
	}},
	// Words between blanks, as a Unicode string has them; without a version GET only; the end of the stream ends the line.
	// The method may be any word without control characters.
	{"http.server", func(b []byte) bool {
		line, _, _ := bytes.Cut(b, []byte("\n"))
		latin := make([]rune, 0, len(line))
		for _, c := range line {
			latin = append(latin, rune(c))
		}
		words := strings.FieldsFunc(string(latin), func(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f })
		if len(words) > 0 && strings.ContainsFunc(words[0], func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return false
		}
		return len(words) == 3 && strings.HasPrefix(words[2], "HTTP/") || len(words) == 2 && words[0] == "GET"
	}},
	// RFC 9112 sections 2.2 and 3: empty lines before; SP, HTAB, VT, FF and bare CR between; any method.
	{"RFC 9112, lenient", func(b []byte) bool {
		return anyBlank.Match(b)
	}},
	{"one that takes any word for a method", func(b []byte) bool {
		return anyWord.Match(b)
	}},
}

// someRequest is a request, mostly mutated: in its bytes, or in what stands between its words.
func someRequest(r *rand.Rand) []byte {
	one := func(all ...string) string { return all[r.IntN(len(all))] }
	blank := func() string {
		return one(" ", " ", " ", " ", " ", " ", " ", " ", "  ", "\t", "\v", "\f", "\r", " \t", "\x1c", "\xa0", "\x85", "\r\n ", "\n")
	}
	b := []byte(one("", "", "", "", "", "", "\r\n", "\n", "\r\n\r\n\r\n", " ", "\t", "\v", "\r", "\x85", "\xef\xbb\xbf", "\x00") +
		one("GET", "GET", "GET", "POST", "get", "A:B", "G\xc3\x84T", "G\x00T", "*", strings.Repeat("M", 30+r.IntN(6)), "", "PRI") + blank() +
		one("/", "/denied?x=1", "http://cart/", "*", "/"+strings.Repeat("x", r.IntN(300)), "", "cart:80") + one(blank(), blank(), "") +
		one("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/1.2", "HTTP/2.0", "HTTP/0.9", "http/1.1", "HTTP/1.10", "HTTP/1", "ICY/1.1", "") +
		one("\r\n", "\r\n", "\n", "\r\r\n", " \r\n", "") + one("Host: cart\r\n\r\n", "Host: cart\n\n", "\r\n"))
	for n := max(r.IntN(4)-1, 0); n > 0 && len(b) > 0; n-- {
		i := r.IntN(len(b))
		switch r.IntN(3) {
		case 0:
			b[i] = byte(r.IntN(256))
		case 1:
			b = slices.Delete(b, i, i+1)
		default:
			b = slices.Insert(b, i, byte(r.IntN(256)))
		}
	}
	return b
}

// TestNoReaderTakesIt: what no reader of requests may see passes neither as HTTP nor as the beginning of
// a request: nothing that some reader takes for one is called opaque, and the answer is the same, and
// stays, however the bytes were cut.
func TestNoReaderTakesIt(t *testing.T) {
	r := testseed.Rand(t)
	taken := map[string]int{}
	for range 50_000 {
		noReaderTakes(t, someRequest(r), taken)
	}
	for _, o := range readers {
		if taken[o.name] < 100 {
			t.Errorf("%s took %d requests only: the test shows nothing", o.name, taken[o.name])
		}
	}
}

func noReaderTakes(t *testing.T, b []byte, taken map[string]int) {
	if len(b) == 0 {
		return
	}
	yes, more := BeginsRequest(b)
	if yes && more {
		t.Fatalf("%q: both yes and more", b)
	}
	if more && len(b) > MaxMethod+1 {
		t.Fatalf("%q: more, after %d bytes", b, len(b))
	}
	for i := range min(len(b), MaxMethod+3) {
		if y, m := BeginsRequest(b[:i]); !m && (y != yes || more) {
			t.Fatalf("%q: %v after %d bytes, then %v, more %v", b, y, i, yes, more)
		}
	}
	if yes || more || Detect(b).Proto != Unknown {
		for _, o := range readers {
			if taken != nil && o.takes(b) {
				taken[o.name]++
			}
		}
		return
	}
	for _, o := range readers {
		if o.takes(b) {
			t.Fatalf("%q is opaque, and %s takes it for a request", b, o.name)
		}
	}
}

func FuzzNoReaderTakesIt(f *testing.F) {
	for _, tt := range textCases {
		if len(tt.in) < 100 {
			f.Add([]byte(tt.in))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) { noReaderTakes(t, b, nil) })
}

// TestBeginsRequest pins both answers and how many bytes they take.
func TestBeginsRequest(t *testing.T) {
	long := strings.Repeat("A", MaxMethod)
	for _, tt := range []struct {
		in    string
		yes   bool
		after int // bytes that it takes; 0: it stays open
	}{
		{"GET / HTTP/1.1\r\n", true, 4},
		{"GET  /", true, 4},
		{"GET\t/ HTTP/1.1", true, 4},
		{"GET\r/ HTTP/1.1", true, 5},
		{"GET\xa0/", true, 4},
		{" GET", true, 1},
		{"\nGET", true, 1},
		{"\r\n\r\nGET", true, 1},
		{"\r\n\r\n\x00\r\nQUIT\n", true, 1}, // the PROXY protocol, version 2
		{"\x85GET", true, 1},
		{"PROXY TCP4 192.0.2.1", true, 6},
		{"{\"jsonrpc\": 1}", true, 12},
		{"GET mykey\r\n", true, 4},
		{long + " ", true, MaxMethod + 1},
		{long + "A", true, MaxMethod + 1},
		{"GET", false, 0},
		{"GET\r", false, 0},
		{long, false, 0},
		{long + "\r", false, 0},
		{"PING\r\n", false, 6},
		{"PING\n / HTTP/1.1", false, 5},
		{"SSH-2.0-OpenSSH_9.6\r\n", false, 21},
		{"*1\r\n$4\r\nPING\r\n", false, 4},
		{"\x00", false, 1},
		{"\x16\x03", false, 1},
		{"\x7f", false, 1},
		{"GE\x00T /", false, 3},
		{"\x80\x2e\x01\x03\x01", false, 3},
		{long + "\x00", false, MaxMethod + 1},
	} {
		for i := range len(tt.in) + 1 {
			yes, more := BeginsRequest([]byte(tt.in[:i]))
			if open := tt.after == 0 || i < tt.after; more != open || yes != (tt.yes && !open) {
				t.Errorf("%q: %v, more %v", tt.in[:i], yes, more)
			}
		}
	}
}
