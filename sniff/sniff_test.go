package sniff

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"aether/e2e/testseed"
)

// show is a Result in one line: what the tables compare.
func show(r Result) string {
	s := r.Proto.String()
	if r.More {
		s += " more"
	}
	if r.SNI != nil {
		s += " sni=" + string(r.SNI)
	}
	if names := slices.Collect(r.ALPN.All()); len(names) > 0 {
		s += " alpn=" + string(bytes.Join(names, []byte{','}))
	}
	return s
}

var textCases = []struct{ in, want string }{
	{"", "none more"},
	{"GET / HTTP/1.1\r\n", "http/1.1"},
	{"GET / HTTP/1.0\r\n", "http/1.0"},
	{"GET / HTTP/1.1\n", "http/1.1"},
	{"GET / HTTP/1.0\nHost: x\n", "http/1.0"},
	{"get http://cart:8080/a?b#c HTTP/1.1\r\n", "http/1.1"},
	{"CONNECT cart:8080 HTTP/1.1\r\n", "http/1.1"},
	{"OPTIONS * HTTP/1.1\r\n", "http/1.1"},
	{"M-SEARCH * HTTP/1.1\r\n", "http/1.1"},
	{"X!#$%&'*+-.^_`|~9 /\xc3\xa4 HTTP/1.1\r\n", "http/1.1"}, // every kind of token character, raw UTF-8
	{"GET / HTTP/1.1\r", "none more"},
	{"GET / HTTP/1.1", "none more"},
	{"GET / HTTP/1.", "none more"},
	{"G", "none more"},
	{"SSH-2.0-OpenSSH_9.6", "none more"}, // may still be a method
	{"SSH-2.0-OpenSSH_9.6\r\n", "opaque"},
	{"SSH-2.0-x Debian\r", "opaque"},

	{"GET mykey\r\n", "opaque"}, // contract 4.2: no version
	{"GET /\n", "opaque"},
	{"GET / \r", "opaque"},
	{"GET / HTTP/1.2", "opaque"},
	{"GET / HTTP/2.0", "opaque"},
	{"GET / HTTP/1.11", "opaque"},
	{"GET / http/1.1", "opaque"},
	{"GET / HTTP/1.1 ", "opaque"},
	{"GET / HTTP/1.1\r\r", "opaque"},
	{"GET HTTP/1.1\r\n", "opaque"},
	{"GET  / HTTP/1.1\r\n", "opaque"},
	{"GET /  HTTP/1.1\r\n", "opaque"},
	{"GET /a b HTTP/1.1\r\n", "opaque"},
	{"GET /a\tb", "opaque"},
	{"GET /a\x00", "opaque"},
	{"GET /a\x7f", "opaque"},
	{"GET\t/", "opaque"},
	{" GET", "opaque"},
	{"\r\nGET / HTTP/1.1\r\n", "http/1.1"}, // RFC 9112 section 2.2
	{"\r\nGET / HTTP/1.0\n", "http/1.0"},
	{"\r", "none more"},
	{"\r\n", "none more"},
	{"\r\nG", "none more"},
	{"\r\n\r\nGET / HTTP/1.1\r\n", "http/1.1"},
	{strings.Repeat("\r\n", 9) + "GET / HTTP/1.1\r\n", "opaque"},
	{"\r\rGET / HTTP/1.1\r\n", "opaque"},
	{"\nGET / HTTP/1.1\r\n", "opaque"},
	{"\r\n GET / HTTP/1.1\r\n", "opaque"},
	{"\r\n\x00", "opaque"},
	{"\r\n" + Preface, "opaque"},
	{"HTTP/1.1 200 OK\r\n", "opaque"},
	{"G\xc3\x84T / HTTP/1.1\r\n", "opaque"},
	{"PRIVMSG bob :hi", "opaque"},
	{"INVITE sip:b@x SIP/2.0\r\n", "opaque"},
	{"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n", "opaque"},
	{"\x00", "opaque"},
	{"\x80", "opaque"},
	{"(", "opaque"},
	{strings.Repeat("A", MaxMethod), "none more"},
	{strings.Repeat("A", MaxMethod) + " / HTTP/1.1\r\n", "http/1.1"},
	{"\r\n" + strings.Repeat("A", MaxMethod) + " / HTTP/1.1\r\n", "http/1.1"},
	{strings.Repeat("A", MaxMethod+1), "opaque"}, // longer than any that is served: nothing to wait for
	{"\r\n" + strings.Repeat("A", MaxMethod+1), "opaque"},
	{"GET /" + strings.Repeat("a", MaxPeek-6), "none more"},
	{"GET /" + strings.Repeat("a", MaxPeek-5), "opaque"},
	{"GET /" + strings.Repeat("a", MaxPeek-15) + " HTTP/1.1\n", "http/1.1"},
	{"GET /" + strings.Repeat("a", MaxPeek-14) + " HTTP/1.1\n", "opaque"},

	{Preface, "h2c"},
	{Preface + "\x00\x00\x00", "h2c"},
	{Preface[:23], "none more"},
	{Preface[:15], "none more"},
	{Preface[:22] + "\r\r", "opaque"},
	{"PRI * HTTP/2.0\r\n\r\nsM", "opaque"},
	{"PRI * HTTP/2.0\n", "opaque"},
	{"PRI * HTTP/1.1\r\n", "http/1.1"}, // a request whose method is PRI
	{"PRI / HTTP/1.0\r\n", "http/1.0"},
	{"PRI * HTTP/2.1", "opaque"},
}

// full is show with all that a hello offers.
func full(r Result) string { return fmt.Sprint(show(r), columns(r.Hello)) }

func TestDetectText(t *testing.T) {
	for _, tt := range textCases {
		if got := show(Detect([]byte(tt.in))); got != tt.want {
			t.Errorf("%.60q: got %s, want %s", tt.in, got, tt.want)
		}
		everyPrefix(t, []byte(tt.in))
	}
}

// TestEarliest pins how many bytes the answer takes.
func TestEarliest(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want int
	}{
		{"\x00\x01\x02", 1},
		{"\x16\x02", 2},
		{"\x16\x03\x01\x40\x01", 5},
		{"\x16\x03\x01\x41", 4},
		{"\x16\x03\x01\x00\x00\x01", 5},
		{"\x16\x03\x01\x00\x05\x02", 6},
		{"GET / HTTP/1.1\r\nHost: x\r\n", 16},
		{"GET / HTTP/1.1\nHost: x\r\n", 15},
		{"PRIVMSG bob :hi\r\n", 13},
		{"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00", 24},
		{"HTTP/1.1 200 OK\r\n", 5},
		{"* OK IMAP\r\n", 6},
	} {
		if got := finalAt([]byte(tt.in)); got != tt.want {
			t.Errorf("%q: final after %d bytes, want %d", tt.in, got, tt.want)
		}
	}
}

// finalAt is the number of bytes at which the answer is final, -1 for never.
func finalAt(b []byte) int {
	for i := range len(b) + 1 {
		if !Detect(b[:i]).More {
			return i
		}
	}
	return -1
}

// everyPrefix checks the promises of the package on b fed byte by byte: a
// State agrees with a fresh look at the same bytes, an answer
// once final stays, TLS once seen stays, and Last agrees with Detect where that is final.
func everyPrefix(t *testing.T, b []byte) {
	t.Helper()
	if len(b) > 2048 { // the interesting places are at both ends
		everyCut(t, b, append(ints(0, 256), ints(len(b)-256, len(b)+1)...))
		return
	}
	everyCut(t, b, ints(0, len(b)+1))
}

func ints(from, to int) (l []int) {
	for i := from; i < to; i++ {
		l = append(l, i)
	}
	return l
}

func everyCut(t *testing.T, b []byte, cuts []int) {
	t.Helper()
	before := bytes.Clone(b)
	var s State
	final, tls := "", false
	for _, i := range cuts {
		r := s.Detect(b[:i])
		got := full(r)
		if fresh := full(Detect(bytes.Clone(b[:i])[:i:i])); got != fresh {
			t.Fatalf("%.40q: %s after %d bytes step by step, %s at once", b, got, i, fresh)
		}
		if final != "" && got != final {
			t.Fatalf("%.40q: %s was final, %s after %d bytes", b, final, got, i)
		}
		if tls && r.Proto != TLS {
			t.Fatalf("%.40q: no longer TLS after %d bytes", b, i)
		}
		tls = r.Proto == TLS
		last := s.Last(b[:i])
		if last.More || (last.Proto == None) != (i == 0) {
			t.Fatalf("%.40q: Last says %s after %d bytes", b, show(last), i)
		}
		if r.More {
			if r.Proto != None && r.Proto != TLS || r.SNI != nil || r.ALPN.list != nil {
				t.Fatalf("%.40q: %s after %d bytes", b, got, i)
			}
		} else if final = got; full(last) != final {
			t.Fatalf("%.40q: Detect %s, Last %s", b, final, full(last))
		}
		if cap(r.SNI) != len(r.SNI) || cap(r.KeyShares) != len(r.KeyShares) || cap(r.Versions) != len(r.Versions) {
			t.Fatalf("%.40q: appending to a Result would write beyond it", b)
		}
	}
	if !bytes.Equal(b, before) {
		t.Fatal("Detect wrote to its input")
	}
}

func TestStateStartsAnew(t *testing.T) {
	for _, first := range []string{"GET / HTTP/1.1\r\n", Preface, string(clientHello13(t, "cart", nil))} {
		var s State
		s.Detect([]byte(first))
		if got := show(s.Detect([]byte("SSH-2.0\r\n"))); got != "opaque" {
			t.Errorf("after a shorter buffer: %s", got)
		}
	}
}

func TestProtoNames(t *testing.T) {
	seen := map[string]bool{}
	for p := None; p <= Unknown; p++ {
		if n := p.String(); n == "invalid" || seen[n] {
			t.Errorf("%d: name %q", p, n)
		} else {
			seen[n] = true
		}
	}
	if (Unknown + 1).String() != "invalid" {
		t.Error("a Proto out of the set has a name")
	}
}

func TestRequestHost(t *testing.T) {
	const yes, more, no = "yes ", "more", "no"
	for _, tt := range []struct{ in, want string }{
		{"GET / HTTP/1.1\r\nHost: cart:8080\r\n", yes + "cart:8080"},
		{"GET / HTTP/1.1\nhOsT:\tcart \n", yes + "cart"},
		{"GET / HTTP/1.1\r\nA: b\r\nHost:cart\r\n\r\n", yes + "cart"},
		{"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", yes + "a"},
		{"GET / HTTP/1.1\r\nxost: a\r\nhxst: a\r\nhoxt: a\r\nhosx: a\r\nhost; a\r\nhost: cart\r\n", yes + "cart"},
		{"GET http://cart:8080/x HTTP/1.1\r\n", yes + "cart:8080"},
		{"GET http://cart:8080/x HTTP/1.1\r\nHost: other\r\n\r\n", yes + "cart:8080"},
		{"GET HTTPS://cart?q HTTP/1.0\r\n", yes + "cart"},
		{"GET http://u@cart#f HTTP/1.1\r\n", yes + "u@cart"},
		{"GET coap+tcp://cart HTTP/1.1\r\n", yes + "cart"},
		{"GET /a://b HTTP/1.1\r\nHost: cart\r\n", yes + "cart"},
		{"GET 1a://b HTTP/1.1\r\nHost: cart\r\n", yes + "cart"},
		{"OPTIONS * HTTP/1.1\r\nHost: cart\r\n", yes + "cart"},

		{"GET / HTTP/1.1\r\nHost: cart\r", more},
		{"GET / HTTP/1.1\r\nHost: ca", more},
		{"GET http://cart/ HTTP/1.1\r", more},
		{"GET / HTTP/1.1\r\n", more},
		{"", more},

		{"GET http:///x HTTP/1.1\r\nHost: cart\r\n", no},
		{"CONNECT cart:8080 HTTP/1.1\r\nHost: cart:8080\r\n\r\n", no},
		{"GET / HTTP/1.0\r\n\r\nHost: body\r\n", no},
		{"GET / HTTP/1.1\r\nHost:\r\n\r\n", no},
		{"GET / HTTP/1.1\r\nHost : cart\r\n\r\n", no},
		{"GET / HTTP/1.1\r\nHosts: cart\r\n\r\n", no},
		{"GET /\r\nHost: cart\r\n", no},
		{"\r\nHost: cart\r\n", no},
		{Preface, no},
		{"GET / HTTP/1.1\r\nA: " + strings.Repeat("a", MaxPeek) + "\r\nHost: late\r\n\r\n", no},
	} {
		show := func(host []byte, m, ok bool) string {
			switch {
			case m && !ok:
				return more
			case ok && !m:
				return yes + string(host)
			case !ok && host == nil || len(host) == 0:
				return no
			}
			return "impossible"
		}
		if got := show(RequestHost([]byte(tt.in))); got != tt.want {
			t.Errorf("%.70q: got %q, want %q", tt.in, got, tt.want)
		}
		var s State
		final := ""
		for i := range len(tt.in) + 1 {
			got := show(s.RequestHost([]byte(tt.in[:i])))
			if final != "" && got != final {
				t.Fatalf("%.70q: %q was final, %q after %d bytes", tt.in, final, got, i)
			}
			if got != more {
				final = got
			}
		}
		if cmp := final; cmp == "" && tt.want != more || cmp != "" && cmp != tt.want {
			t.Errorf("%.70q: byte by byte %q, want %q", tt.in, final, tt.want)
		}
	}
}

// TestVisibles holds the count of eight at a time against one at a time.
func TestVisibles(t *testing.T) {
	random := testseed.Rand(t)
	for range 20000 {
		b := bytes.Repeat([]byte{'a'}, random.IntN(40))
		for range random.IntN(3) {
			if len(b) > 0 {
				b[random.IntN(len(b))] = "\x00\t\n\x1f !\x7e\x7f\x80\xa0\xff"[random.IntN(11)]
			}
		}
		want := slices.IndexFunc(b, func(c byte) bool { return c <= ' ' || c == 0x7f })
		if want < 0 {
			want = len(b)
		}
		if got := visibles(b); got != want {
			t.Fatalf("%q: %d visible bytes, want %d", b, got, want)
		}
	}
}

var (
	sinkResult Result
	sinkHost   []byte
)

func TestAllocations(t *testing.T) {
	hello := clientHello13(t, "cart.shop.example", []string{"h2", "http/1.1"})
	split := records(hello[recordHeader:], 64)
	request := []byte("GET / HTTP/1.1\r\nAccept: */*\r\nHost: cart:8080\r\n\r\n")
	for _, tt := range []struct {
		name string
		in   []byte
	}{{"http", request}, {"head", head300}, {"http/1.0", []byte("GET / HTTP/1.0\n")}, {"h2c", []byte(Preface)}, {"tls", hello}, {"tls split", split}, {"tls in records of 1", records(hello[recordHeader:], 1)}, {"opaque", []byte("SSH-2.0\r\n")}} {
		var s State
		if n := testing.AllocsPerRun(200, func() {
			s = State{}
			for i := 0; i < len(tt.in); i += 100 {
				s.Detect(tt.in[:i])
			}
			sinkResult = s.Detect(tt.in)
			sinkResult = s.Last(tt.in)
			for n := range sinkResult.ALPN.All() {
				sinkHost = n
			}
			sinkResult.ALPN.Has("h2")
			sinkHost, _, _ = s.RequestHost(tt.in)
		}); n != 0 {
			t.Errorf("%s: %v allocations, want 0", tt.name, n)
		}
	}
}

// FuzzDetect: an answer does not depend on how the bytes were cut or where they lie, and once
// given it stays.
func FuzzDetect(f *testing.F) {
	f.Add([]byte(Preface), uint16(0))
	f.Add([]byte("GET / HTTP/1.1\r\n"), uint16(3))
	f.Add([]byte("PRI * HTTP/1.0\r\n"), uint16(5))
	f.Add(head300, uint16(40))
	hello := clientHello13(f, "cart.shop.example", []string{"h2", "http/1.1"})
	f.Add(hello, uint16(517))
	f.Add(records(hello[recordHeader:], 100), uint16(90))
	f.Add(records(hello[recordHeader:], 1), uint16(9))
	f.Fuzz(func(t *testing.T, b []byte, cut uint16) {
		b = b[:min(len(b), MaxPeek+64)]
		cuts := []int{0, 1, 2, 3, 4, 5, 6, 7, int(cut), len(b) / 2, len(b) - 1, len(b)}
		for i := range cuts {
			cuts[i] = max(0, min(cuts[i], len(b)))
		}
		slices.Sort(cuts)
		everyCut(t, b, cuts)
		at := cuts[slices.Index(cuts, max(0, min(int(cut), len(b))))]
		var one, two State
		one.Detect(b)
		two.Detect(b[:at])
		two.Detect(b)
		if one != two {
			t.Fatalf("the cut at %d can be seen in the State:\n%+v\n%+v", at, one, two)
		}
		host, more, ok := RequestHost(b[:at])
		if more && ok {
			t.Fatal("RequestHost: both more and ok")
		}
		if !more {
			if h, m, o := RequestHost(b); m || o != ok || !bytes.Equal(h, host) {
				t.Fatalf("RequestHost: %q %v became %q %v", host, ok, h, o)
			}
		}
	})
}

// FuzzText holds the quick way through a request line against the definition in contract 4.2
// and RFC 9112, spelled as an expression.
func FuzzText(f *testing.F) {
	for _, tt := range textCases {
		if len(tt.in) < 100 {
			f.Add([]byte(tt.in))
		}
	}
	f.Add(head300)
	line := regexp.MustCompile("^(?:\r\n){0,8}[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32} [^\x00-\x20\x7f]+ HTTP/1\\.([01])\r?\n")
	f.Fuzz(func(t *testing.T, b []byte) {
		b = b[:min(len(b), MaxPeek)]
		if len(b) > 0 && b[0] == recordHandshake {
			return
		}
		latin := make([]rune, len(b)) // a byte is a character
		for i, c := range b {
			latin[i] = rune(c)
		}
		want := Unknown
		switch m := line.FindStringSubmatch(string(latin)); {
		case len(b) == 0:
			want = None
		case bytes.HasPrefix(b, []byte(Preface)):
			want = H2C
		case m != nil:
			want = HTTP10 + Proto(m[1][0]-'0')
		}
		var s State
		if got := s.Last(b).Proto; got != want {
			t.Fatalf("%q: %s, want %s", b, got, want)
		}
		// Where more could come, something must be able to: a line can be completed.
		if r := s.Detect(b); r.More && len(b) > 0 && len(b) < MaxPeek-32 {
			possible := false
			for _, rest := range []string{"/ / HTTP/1.1\r\n", "\nG / HTTP/1.1\r\n"} {
				for i := range rest {
					p := Detect(append(bytes.Clone(b), rest[i:]...)).Proto
					possible = possible || p == HTTP10 || p == HTTP11
				}
			}
			possible = possible || len(b) < len(Preface) && Detect(append(bytes.Clone(b), Preface[len(b):]...)).Proto == H2C
			if !possible {
				t.Fatalf("%q: more, but nothing can come of it", b)
			}
		}
	})
}

// head300 is a request head of 300 bytes, as curl and browsers send them.
var head300 = func() []byte {
	const start = "GET /api/v1/items?category=books&page=2&sort=price HTTP/1.1\r\nHost: cart.shop.aether.internal:8080\r\n" +
		"User-Agent: curl/8.5.0\r\nAccept: application/json\r\nX-Request-Id: "
	return []byte(start + strings.Repeat("7", 300-len(start)-4) + "\r\n\r\n")
}()

func BenchmarkDetect(b *testing.B) {
	hello := clientHello13(b, "cart.shop.example", []string{"h2", "http/1.1"})
	for _, bb := range []struct {
		name string
		in   []byte
	}{
		{"http", head300},
		{"http url 2k", []byte("GET /" + strings.Repeat("a/b?c=d&", 256) + " HTTP/1.1\r\nHost: cart\r\n\r\n")},
		{"h2c", []byte(Preface)},
		{"tls", hello},
		{"tls split", records(hello[recordHeader:], 100)},
		{"opaque", []byte("SSH-2.0-OpenSSH_9.6p1 Debian-4\r\n")},
	} {
		b.Run(bb.name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(bb.in)))
			var s State
			for b.Loop() {
				s = State{}
				sinkResult = s.Detect(bb.in)
			}
		})
	}
}

// BenchmarkHTTP is all that a captured HTTP connection costs: what it is, and for whom.
func BenchmarkHTTP(b *testing.B) {
	b.ReportAllocs()
	b.SetBytes(int64(len(head300)))
	var s State
	for b.Loop() {
		s = State{}
		sinkResult = s.Detect(head300)
		sinkHost, _, _ = s.RequestHost(head300)
	}
}
