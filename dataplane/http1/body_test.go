package http1

import (
	"fmt"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"
)

const chunkedPost = "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"

func TestChunked(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"empty", "0\r\n\r\n", "end\nleft \"\"\n"},
		{"two chunks", "3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\nGE", "body \"abc0123456789\"\nend\nleft \"GE\"\n"},
		{"leading zeros", "0003\r\nabc\r\n000\r\n\r\n", "body \"abc\"\nend\nleft \"\"\n"},
		{"CRLF as data", "4\r\n\r\n\r\n\r\n0\r\n\r\n", "body \"\\r\\n\\r\\n\"\nend\nleft \"\"\n"},
		{"extensions are dropped", "3;a=b;c=\"\t d\"\r\nabc\r\n0;x\r\n\r\n", "body \"abc\"\nend\nleft \"\"\n"},
		{"case 23: trailer, then more", "1\r\nx\r\n0\r\nX-Sum: 1\r\n\r\nGE", "body \"x\"\ntrailer x-sum: 1\nend\nleft \"GE\"\n"},
		{"case 24: name in any case", "0\r\nX-Check:  1 \r\nb:\r\n\r\n", "trailer x-check: 1\ntrailer b: \nend\nleft \"\"\n"},
		{"barred trailers", "0\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\nHost: b\r\nAuthorization: x\r\nContent-Type: a\r\n" +
			"X-Forwarded-Client-Cert: x\r\nX_Forwarded-Client_Cert: x\r\nX-Aether-IP: 1\r\nx_aether-error: 1\r\nX-Envoy-Auth_Partial-Body: 1\r\nSet-Cookie: a\r\nTrailer: a\r\nContent-Digest: d\r\nGRPC-Status: 0\r\n\r\n",
			"trailer content-digest: d\ntrailer grpc-status: 0\nend\nleft \"\"\n"},

		{"case 4: underscore", "0_2e\r\n", "error " + badChunkSize.request.Error() + "\n"},
		{"case 4: 0x", "0x5\r\n", "error " + badChunkSize.request.Error() + "\n"},
		{"case 4: sign", "+5\r\n", "error " + badChunkSize.request.Error() + "\n"},
		{"case 5: valid prefix", "1zzz\r\na", "error " + badChunkSize.request.Error() + "\n"},
		{"case 13: LF in an extension", "5;x\nabcde\r\n", "error " + badExtension.request.Error() + "\n"},
		{"case 13: CR in an extension", "5;x\ry\r\nabcde\r\n", "error " + badCR.request.Error() + "\n"},
		{"case 14: white space before an extension", "5 \t;a=b\r\nabcde\r\n", "error " + badChunkSize.request.Error() + "\n"},
		{"case 15: 16 KiB of extensions", strings.Repeat("1;"+strings.Repeat("x", 4095)+"\r\na\r\n", 4) + "1;xxxxx\r\n", "body \"aaaa\"\nerror " + longExtensions.request.Error() + "\n"},
		{"case 22: CR in a trailer", "0\r\nx: a\rb\r\n\r\n", "error " + badCR.request.Error() + "\n"},
		{"empty size", "\r\n", "error " + badChunkSize.request.Error() + "\n"},
		{"extension without size", ";x\r\n", "error " + badChunkSize.request.Error() + "\n"},
		{"negative size", "-1\r\n", "error " + badChunkSize.request.Error() + "\n"},
		{"sixteen digits", "0000000000000001\r\n", "error " + longChunkSize.request.Error() + "\n"},
		{"LF after the size", "1\na\r\n", "error " + badChunkSize.request.Error() + "\n"},
		{"CR after the size", "1\ra\r\n", "error " + badCR.request.Error() + "\n"},
		{"data too long", "1\r\nab\r\n", "body \"a\"\nerror " + badChunkEnd.request.Error() + "\n"},
		{"LF after the data", "1\r\na\n0\r\n\r\n", "body \"a\"\nerror " + badChunkEnd.request.Error() + "\n"},
		{"CR after the data", "1\r\na\r0\r\n\r\n", "body \"a\"\nerror " + badChunkEnd.request.Error() + "\n"},
		{"NUL in an extension", "1;\x00\r\n", "error " + badExtension.request.Error() + "\n"},
		{"LF ends the trailers", "0\r\n\n", "error " + badLineEnd.request.Error() + "\n"},
		{"LF ends a trailer", "0\r\nx: a\n\r\n", "error " + badLineEnd.request.Error() + "\n"},
		{"folded trailer", "0\r\nx: a\r\n b\r\n\r\n", "error " + folded.request.Error() + "\n"},
		{"space in a trailer name", "0\r\nx : a\r\n\r\n", "error " + badName.request.Error() + "\n"},
		{"control in a trailer", "0\r\nx: a\x01\r\n\r\n", "error " + badValue.request.Error() + "\n"},
		{"32 trailers and one", "0\r\n" + strings.Repeat("x: 1\r\n", 33), "error " + manyTrailers.request.Error() + "\n"},
		{"8 KiB of trailers", "0\r\nx: " + strings.Repeat("y", 8192-7+1) + "\r\n\r\n", "error " + longTrailers.request.Error() + "\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := strings.TrimPrefix(side{}.events([]byte(chunkedPost+tt.in)), "POST http a / len=-1 chunked\n")
			if i := strings.Index(got, "; "); i >= 0 { // where: TestFaultsAreNamed
				got = got[:i] + "\n"
			}
			if got != tt.want {
				t.Errorf("got\n%s\nwant\n%s", got, tt.want)
			}
		})
	}
}

// The bounds themselves are allowed.
func TestBodyBounds(t *testing.T) {
	for _, in := range []string{
		"1;" + strings.Repeat("x", maxExtensions) + "\r\na\r\n0\r\n\r\n",
		"0\r\n" + strings.Repeat("x: 1\r\n", maxTrailers) + "\r\n",
		"0\r\nx: " + strings.Repeat("y", maxTrailerBytes-len("x: \r\n\r\n")) + "\r\n\r\n",
		"fffffffffffffff\r\n",
	} {
		if got := (side{}).events([]byte(chunkedPost + in)); strings.Contains(got, "error") {
			t.Errorf("%.60q: %s", in, got)
		}
	}
}

func TestBodyOtherFramings(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		s        side
		want     string
	}{
		{"none", "GET / HTTP/1.1\r\nhost: a\r\n\r\nX", side{}, "GET http a / len=0 none\nend\nleft \"X\"\n"},
		{"length 0", "GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\nX", side{}, "GET http a / len=0 length | content-length: 0\nend\nleft \"X\"\n"},
		{"case 42: more than announced", "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabcHTT", side{response: true}, "200 len=3 length | content-length: 3\nbody \"abc\"\nend\nleft \"HTT\"\n"},
		{"case 43: cut short", chunkedPost + "5\r\nabc", side{}, "POST http a / len=-1 chunked\nbody \"abc\"\nleft \"\"\n"},
		{"to close", "HTTP/1.1 200 OK\r\n\r\nabc", side{response: true}, "200 len=-1 to-close !close\nbody \"abc\"\nleft \"\"\n"},
		{"case 28: answers to HEAD", "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", side{response: true, head: true},
			"200 len=0 none | content-length: 10\nend\n200 len=0 none | content-length: 10\nend\nleft \"\"\n"},
		{"interim, then final", "HTTP/1.1 103 E\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na", side{response: true}, "103 len=0 none\nend\n200 len=1 length | content-length: 1\nbody \"a\"\nend\nleft \"\"\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.s.events([]byte(tt.in)); got != tt.want {
				t.Errorf("got\n%s\nwant\n%s", got, tt.want)
			}
		})
	}
}

// A caller that takes less than it is given, by any amounts, gets the same body.
func TestUnread(t *testing.T) {
	for _, tt := range []struct {
		f      Framing
		length int64
		in     string
	}{
		{Length, 10, "0123456789"},
		{Chunked, 0, "4\r\n0123\r\n6\r\n456789\r\n0\r\nx: y\r\n\r\n"},
		{ToClose, 0, "0123456789"},
	} {
		for take := 1; take <= 4; take++ {
			for window := 1; window <= len(tt.in); window++ {
				var r BodyReader
				r.Start(tt.f, tt.length)
				got, done, rest := "", false, []byte(tt.in)
				for !done && len(rest) > 0 {
					data, used, d, err := r.Next(rest[:min(window, len(rest))])
					if err != nil {
						t.Fatal(err)
					}
					done = d
					if back := len(data) - take; back >= 0 {
						r.Unread(back)
						data, used, done = data[:take], used-back, d && back == 0
					}
					got += string(data)
					rest = rest[used:]
				}
				if got != "0123456789" || done == (tt.f == ToClose) || len(rest) > 0 {
					t.Fatalf("%v, take %d of %d: %q, done %v, left %q", tt.f, take, window, got, done, rest)
				}
			}
		}
	}
	t.Run("too much", func(t *testing.T) {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		var r BodyReader
		r.Start(Length, 5)
		r.Next([]byte("abc"))
		r.Unread(4)
	})
}

func TestBodyAfterTheEnd(t *testing.T) {
	var r BodyReader
	if _, used, done, err := r.Next([]byte("x")); used != 0 || !done || err != nil {
		t.Errorf("zero value: used %d, done %v, %v", used, done, err)
	}
	r.Start(Chunked, 0)
	_, _, _, err := r.Next([]byte("zz"))
	if _, _, done, again := r.Next([]byte("0\r\n\r\n")); done || again != err || err == nil {
		t.Errorf("the error %v does not stay: done %v, %v", err, done, again)
	}
	r.Start(Chunked, 0)
	if _, _, done, err := r.Next([]byte("0\r\nx: " + strings.Repeat("y", 4000) + "\r\n\r\n")); !done || err != nil || len(r.Trailers()) != 1 {
		t.Errorf("started again: done %v, %v, %v", done, err, r.Trailers())
	}
	r.Start(Length, 5)
	if len(r.Trailers()) != 0 || cap(r.arena) > keepArena {
		t.Errorf("Start keeps %d trailers and %d bytes", len(r.Trailers()), cap(r.arena))
	}
}

// streams are messages and near-messages whose every split must read alike.
var streams = []struct {
	s  side
	in string
}{
	{side{}, typicalRequest + typicalRequest},
	{side{}, "\r\nPOST http://b?x HTTP/1.1\r\nHost: a\r\nConnection: x\r\nX: 1\r\nTransfer-Encoding: chunked\r\n\r\n3;e=f\r\nabc\r\n0\r\nT: 1\r\nU: 2\r\n\r\nGET / HTTP/1.0\r\n\r\n"},
	{side{}, "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\n\r\nabcdefgGET / HTTP/1.1\nHost: b\r\n\r\n"},
	{side{}, chunkedPost + "2\r\nab\r\n3\r\nabcX\r\n"},
	{side{}, chunkedPost + "1\r\na\r\n0\r\nx: y\n\r\n"},
	{side{}, "GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n\rX\r\n\r\n"},
	{side{}, "GET / HTTP/3.0\r\n\r\n"},
	{side{}, "GET / HTTP\n/1.1\r\n\r\n"},
	{side{limits: Limits{MaxTarget: 8}}, "GET /23456789 HTTP/1.1\r\nHost: a\r\n\r\n"},
	{side{limits: Limits{MaxHead: 40}}, "GET / HTTP/1.1\r\nHost: a\r\nLong: 0123456789\r\n\r\n"},
	{side{limits: Limits{MaxFields: 1}}, "GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n\r\n"},
	{side{response: true}, typicalResponse + strings.Repeat("x", 512) + "HTTP/1.0 200\r\n\r\nrest"},
	{side{response: true}, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\nHTTP/1.1 2x0"},
	{side{response: true, head: true}, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nHTTP/1.1 204 X\r\nContent-Length: 9\r\n\r\n"},
}

func TestEverySplit(t *testing.T) {
	for i, tt := range streams {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			in := []byte(tt.in)
			want := tt.s.events(in)
			step := max(1, len(in)/60) // three pieces of a long stream: a grid
			for a := range len(in) + 1 {
				if got := tt.s.events(in, a); got != want {
					t.Fatalf("cut at %d:\n%s\nwhole:\n%s", a, got, want)
				}
				for b := a; a%step == 0 && b <= len(in); b += step {
					if got := tt.s.events(in, a, b); got != want {
						t.Fatalf("cut at %d and %d:\n%s\nwhole:\n%s", a, b, got, want)
					}
				}
			}
			every := make([]int, len(in))
			for k := range every {
				every[k] = k
			}
			if got := tt.s.events(in, every...); got != want {
				t.Fatalf("byte by byte:\n%s\nwhole:\n%s", got, want)
			}
		})
	}
}

func FuzzSplit(f *testing.F) {
	for i, tt := range streams {
		f.Add([]byte(tt.in), uint16(i*7), uint16(i*13), tt.s.response, tt.s.head)
	}
	f.Fuzz(func(t *testing.T, in []byte, a, b uint16, response, head bool) {
		in = in[:min(len(in), 4096)]
		x, y := int(a)%(len(in)+1), int(b)%(len(in)+1)
		s := side{response: response, head: head, limits: Limits{MaxHead: 1 << 10, MaxFields: 10, MaxTarget: 100}}
		want := s.events(in)
		if got := s.events(in, min(x, y), max(x, y)); got != want {
			t.Fatalf("cut at %d and %d:\n%s\nwhole:\n%s", x, y, got, want)
		}
	})
}

func TestAllocs(t *testing.T) {
	req, resp := []byte(typicalRequest), []byte(typicalResponse)
	hop := []byte("POST http://b?q HTTP/1.1\r\nHost: a\r\nConnection: x, close\r\nX: 1\r\nTE: trailers\r\nContent-Length: 3\r\n\r\n")
	chunks := []byte("3\r\nabc\r\n0\r\nX: 1\r\nY: 2\r\n\r\n")
	bad := []byte("GET / HTTP/1.1\r\n\r\n")
	buf, dst := make([]byte, 1024), make([]byte, 0, 4096)
	var p Parser
	var h httpmsg.Head
	var r BodyReader
	parse := func(b []byte) {
		n, f, err := p.Request(buf[:copy(buf, b)], &h)
		if n != len(b) || err != nil {
			t.Fatal(n, err)
		}
		dst = AppendRequest(dst[:0], &h, f)
	}
	for name, run := range map[string]func(){
		"request":    func() { parse(req) },
		"hop-by-hop": func() { parse(hop) },
		"in pieces":  func() { p.Request(buf[:copy(buf, req[:100])], &h); parse(req) },
		"refused":    func() { p.Request(buf[:copy(buf, bad)], &h) },
		"response": func() {
			p.Response(buf[:copy(buf, resp)], &h, false)
			dst = AppendResponse(dst[:0], &h, Length, ResponseOptions{Minor: 1})
		},
		"chunked":     func() { drain(t, &r, chunks) },
		"write chunk": func() { dst = AppendLast(AppendChunk(dst[:0], chunks), r.Trailers()) },
	} {
		t.Run(name, func(t *testing.T) {
			if n := testing.AllocsPerRun(200, run); n != 0 {
				t.Errorf("%v allocations, want 0", n)
			}
		})
	}
}

func drain(t testing.TB, r *BodyReader, b []byte) {
	t.Helper()
	r.Start(Chunked, 0)
	for done := false; !done; {
		_, used, d, err := r.Next(b)
		if err != nil {
			t.Fatal(err)
		}
		b, done = b[used:], d
	}
}
