package http1

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"
)

// Tests that come from a public bug report carry its number in docs/cases.md
// ("case 13").

func TestRequest(t *testing.T) {
	const host = "Host: a\r\n"
	for _, tt := range []struct{ name, in, want string }{
		{"plain", "GET /x?y=1 HTTP/1.1\r\nHost: cart:8080\r\nAccept: */*\r\n\r\n", "GET http cart:8080 /x?y=1 len=0 none | accept: */*"},
		{"no fields but host", "GET / HTTP/1.1\r\nHost:a\r\n\r\n", "GET http a / len=0 none"},
		{"white space around values", "GET / HTTP/1.1\r\nHost: \t a \t \r\nA:\r\nB: \r\nC: x\ty \r\n\r\n", "GET http a / len=0 none | a:  | b:  | c: x\ty"},
		{"one empty line before", "\r\nGET / HTTP/1.1\r\n" + host + "\r\n", "GET http a / len=0 none"},
		{"any token is a method", "get!#$%&'*+-.^_`|~9 / HTTP/1.1\r\n" + host + "\r\n", "get!#$%&'*+-.^_`|~9 http a / len=0 none"},
		{"raw bytes in the target", "GET /\x80\xff{|}\"%zz HTTP/1.1\r\n" + host + "\r\n", "GET http a /\x80\xff{|}\"%zz len=0 none"},
		{"obs-text in a value", "GET / HTTP/1.1\r\n" + host + "X: \xe4\xff\r\n\r\n", "GET http a / len=0 none | x: \xe4\xff"},
		{"name characters", "GET / HTTP/1.1\r\n" + host + "A_b.C~1: x\r\n\r\n", "GET http a / len=0 none | a_b.c~1: x"},
		{"repeated fields keep their order", "GET / HTTP/1.1\r\nCookie: 1\r\n" + host + "X: 2\r\nCookie: 3\r\n\r\n", "GET http a / len=0 none | cookie: 1 | x: 2 | cookie: 3"},

		{"length", "POST / HTTP/1.1\r\n" + host + "Content-Length: 5\r\n\r\n", "POST http a / len=5 length | content-length: 5"},
		{"length zero", "POST / HTTP/1.1\r\n" + host + "Content-Length: 0\r\n\r\n", "POST http a / len=0 length | content-length: 0"},
		{"largest length", "POST / HTTP/1.1\r\n" + host + "Content-Length: 9223372036854775807\r\n\r\n", "POST http a / len=9223372036854775807 length | content-length: 9223372036854775807"},
		{"chunked", "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: \tChunKed \r\n\r\n", "POST http a / len=-1 chunked"},
		{"case 24: trailer announced", "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nTrailer: X-Check\r\n\r\n", "POST http a / len=-1 chunked | trailer: X-Check"},

		{"1.0", "GET / HTTP/1.0\r\n\r\n", "GET http - / len=0 none !1.0 !close"},
		{"1.0 with host", "GET / HTTP/1.0\r\nHost: a\r\n\r\n", "GET http a / len=0 none !1.0 !close"},
		{"1.0 keep-alive", "GET / HTTP/1.0\r\nConnection: Keep-Alive\r\nKeep-Alive: timeout=5\r\n\r\n", "GET http - / len=0 none !1.0"},
		{"1.0 keep-alive and close", "GET / HTTP/1.0\r\nConnection: keep-alive, close\r\n\r\n", "GET http - / len=0 none !1.0 !close"},
		{"1.0 has no expectation", "POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n", "POST http - / len=1 length | content-length: 1 !1.0 !close"},
		{"1.0 has no upgrade", "GET / HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", "GET http - / len=0 none !1.0 !close"},
		{"1.1 close", "GET / HTTP/1.1\r\n" + host + "Connection: x,, CLOSE\r\nX: 1\r\n\r\n", "GET http a / len=0 none !close"},
		{"1.1 close wins", "GET / HTTP/1.1\r\n" + host + "Connection: keep-alive\r\nConnection: close\r\n\r\n", "GET http a / len=0 none !close"},

		{"case 26: expect", "POST / HTTP/1.1\r\n" + host + "Expect: 100-Continue\r\nContent-Length: 1\r\n\r\n", "POST http a / len=1 length | expect: 100-Continue | content-length: 1 !expect"},
		{"another expectation", "POST / HTTP/1.1\r\n" + host + "Expect: tea\r\n\r\n", "POST http a / len=0 none | expect: tea"},
		{"expect cannot be hidden", "POST / HTTP/1.1\r\n" + host + "Connection: expect, a\r\nExpect: 100-continue\r\n\r\n", "POST http a / len=0 none | expect: 100-continue !expect"},
		{"upgrade", "GET / HTTP/1.1\r\n" + host + "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n", "GET http a / len=0 none !upgrade=websocket"},
		{"upgrade without its option", "GET / HTTP/1.1\r\n" + host + "Upgrade: websocket\r\n\r\n", "GET http a / len=0 none"},
		{"upgrade twice", "GET / HTTP/1.1\r\n" + host + "Connection: upgrade\r\nUpgrade: a\r\nUpgrade: b\r\n\r\n", "GET http a / len=0 none"},
		{"case 47: upgrade with a body", "POST / HTTP/1.1\r\n" + host + "Connection: upgrade\r\nUpgrade: foo\r\nContent-Length: 9\r\n\r\n", "POST http a / len=9 length | content-length: 9 !upgrade=foo"},
		{"te", "GET / HTTP/1.1\r\n" + host + "TE: deflate;q=0.5 , Trailers\r\nConnection: TE\r\n\r\n", "GET http a / len=0 none | te: trailers"},
		{"te twice", "GET / HTTP/1.1\r\n" + host + "TE: trailers\r\nTE: trailers\r\n\r\n", "GET http a / len=0 none | te: trailers"},
		{"te without trailers", "GET / HTTP/1.1\r\n" + host + "TE: gzip\r\n\r\n", "GET http a / len=0 none"},
		{"hop-by-hop", "GET / HTTP/1.1\r\n" + host + "Proxy-Connection: close\r\nKeep-Alive: 5\r\nX: 1\r\n\r\n", "GET http a / len=0 none | x: 1"},
		{"named by connection", "GET / HTTP/1.1\r\nX-A: 1\r\n" + host + "Connection: x-A\r\nx-b: 2\r\nConnection: keep-alive ,x-c\r\nX-C: 3\r\nx-a: 4\r\nD: 5\r\n\r\n", "GET http a / len=0 none | x-b: 2 | d: 5"},
		{"the caller's name cannot be hidden", "GET / HTTP/1.1\r\n" + host + "X-Forwarded-Client-Cert: x\r\nConnection: x-forwarded-client-cert, trailer\r\nTrailer: t\r\n\r\n", "GET http a / len=0 none | x-forwarded-client-cert: x | trailer: t"},
		{"options that are no tokens", "GET / HTTP/1.1\r\n" + host + "Connection: @, x y, =\r\nX: 1\r\n\r\n", "GET http a / len=0 none | x: 1"},

		{"asterisk", "OPTIONS * HTTP/1.1\r\n" + host + "\r\n", "OPTIONS http a * len=0 none"},
		{"options with a path", "OPTIONS /x HTTP/1.1\r\n" + host + "\r\n", "OPTIONS http a /x len=0 none"},
		{"connect", "CONNECT h:443 HTTP/1.1\r\n" + host + "\r\n", "CONNECT http h:443 - len=0 none"},
		{"connect in 1.0", "CONNECT [::1]:443 HTTP/1.0\r\n\r\n", "CONNECT http [::1]:443 - len=0 none !1.0 !close"},
		{"absolute", "GET http://b:81/p?q HTTP/1.1\r\n" + host + "\r\n", "GET http b:81 /p?q len=0 none"},
		{"absolute https", "GET HTTPS://b HTTP/1.1\r\n" + host + "\r\n", "GET https b / len=0 none"},
		{"absolute without a path", "GET http://b:81?q=/ HTTP/1.1\r\n" + host + "\r\n", "GET http b:81 /?q=/ len=0 none"},
		{"absolute with an empty port and no path", "GET http://b:?q HTTP/1.1\r\n" + host + "\r\n", "GET http b /?q len=0 none"},
		{"absolute with an empty port", "GET http://b:/x HTTP/1.1\r\n" + host + "\r\n", "GET http b /x len=0 none"},
		{"absolute options", "OPTIONS http://b HTTP/1.1\r\n" + host + "\r\n", "OPTIONS http b * len=0 none"},
		{"absolute options with a path", "OPTIONS http://b/ HTTP/1.1\r\n" + host + "\r\n", "OPTIONS http b / len=0 none"},
		{"absolute with an empty host field", "GET http://b/ HTTP/1.1\r\nHost:\r\n\r\n", "GET http b / len=0 none"},
		{"absolute in 1.0 without host", "GET http://b/ HTTP/1.0\r\n\r\n", "GET http b / len=0 none !1.0 !close"},

		{"empty host", "GET / HTTP/1.1\r\nHost:  \r\n\r\n", "GET http - / len=0 none"},
		{"case 38: trailing dot", "GET / HTTP/1.1\r\nHost: svc.ns.svc.cluster.local.\r\n\r\n", "GET http svc.ns.svc.cluster.local. / len=0 none"},
		{"case 39: port in host", "GET / HTTP/1.1\r\nHost: svc:8080\r\n\r\n", "GET http svc:8080 / len=0 none"},
		{"host in upper case", "GET / HTTP/1.1\r\nHost: Cart_1:65535\r\n\r\n", "GET http Cart_1:65535 / len=0 none"},
		{"IPv6 host", "GET / HTTP/1.1\r\nHost: [fd00::a]:80\r\n\r\n", "GET http [fd00::a]:80 / len=0 none"},
		{"empty port", "GET / HTTP/1.1\r\nHost: a:\r\n\r\n", "GET http a / len=0 none"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var p Parser
			var h httpmsg.Head
			n, f, err := p.Request([]byte(tt.in+"rest"), &h)
			if err != nil || n != len(tt.in) {
				t.Fatalf("n %d of %d, %v", n, len(tt.in), err)
			}
			if got := text(&h, f); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func TestRequestRefused(t *testing.T) {
	const get, post = "GET / HTTP/1.1\r\nHost: a\r\n", "POST / HTTP/1.1\r\nHost: a\r\n"
	const end = "\r\n"
	te := func(v string) string { return post + "Transfer-Encoding: " + v + end + end }
	cl := func(v string) string { return post + "Content-Length: " + v + end + end }
	host := func(v string) string { return "GET / HTTP/1.1\r\nHost: " + v + end + end }
	line := func(l string) string { return l + "\r\nHost: a\r\n\r\n" }
	for _, tt := range []struct {
		name, in string
		want     *fault
	}{
		{"case 1: empty length", cl("") + "GET / HTTP/1.1\r\n", badLength},
		{"case 8: length before coding", post + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET", twoFramings},
		{"case 9: coding before length", post + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nGET", twoFramings},
		{"case 11: coding twice", post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", badCoding},
		{"case 12: length wraps", cl("18446744073709551617"), badLength},
		{"case 17: CR ends the head", get + "\r\rX" + "GET /evil HTTP/1.1\r\nHost: b\r\n\r\n", badCR},
		{"case 17: CR and a byte", get + "\rXGET", badCR},
		{"case 19: NUL", host("good.example\x00.evil"), badValue},
		{"case 20: empty member", post + "Transfer-Encoding: ,chunked\r\nContent-Length: 5\r\n\r\n", badCoding},
		{"case 34: no host", "GET / HTTP/1.1\r\nX: 1\r\n\r\n", noHost},
		{"case 34: two hosts", "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", manyHosts},
		{"the same host twice", "GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n", manyHosts},
		{"case 35: two spaces", line("GET  /a b HTTP/1.1"), badTarget},
		{"case 35: a space in the target", line("GET /a b HTTP/1.1"), badVersion},
		{"no host, absolute", "GET http://a/ HTTP/1.1\r\n\r\n", noHost},

		{"tab in the request line", line("GET\t/ HTTP/1.1"), badMethod},
		{"tab before the version", line("GET /\tHTTP/1.1"), badTarget},
		{"two spaces before the version", line("GET /  HTTP/1.1"), badVersion},
		{"space after the version", line("GET / HTTP/1.1 "), badVersion},
		{"space before the method", line(" GET / HTTP/1.1"), badMethod},
		{"no version", line("GET /"), badTarget},
		{"no target", line("GET HTTP/1.1"), badTarget},
		{"version in lower case", line("GET / http/1.1"), badVersion},
		{"HTTP/2", line("PRI * HTTP/2.0"), otherVersion},
		{"HTTP/1.2", line("GET / HTTP/1.2"), otherVersion},
		{"HTTP/0.9", line("GET / HTTP/0.9"), otherVersion},
		{"HTTP/1.10", line("GET / HTTP/1.10"), badVersion},
		{"HTTP/1", line("GET / HTTP/1"), badVersion},
		{"empty method", line("/ / HTTP/1.1"), badMethod},
		{"method with a colon", line("G:T / HTTP/1.1"), badMethod},
		{"long method", line(strings.Repeat("A", 33) + " / HTTP/1.1"), longMethod},
		{"nine empty lines", strings.Repeat("\r\n", 9) + "GET / HTTP/1.1\r\n", badMethod},
		{"CR before the method", "\rGET / HTTP/1.1\r\n", badCR},
		{"LF before the method", "\nGET / HTTP/1.1\r\n", badMethod},
		{"TLS", "\x16\x03\x01\x02\x00\x01", badMethod},
		{"fragment", line("GET /a#b HTTP/1.1"), badTarget},
		{"control in the target", line("GET /a\x01 HTTP/1.1"), badTarget},
		{"DEL in the target", line("GET /a\x7f HTTP/1.1"), badTarget},
		{"CR in the target", line("GET /a\rb HTTP/1.1"), badTarget},

		{"asterisk for GET", line("GET * HTTP/1.1"), badForm},
		{"two asterisks", line("OPTIONS ** HTTP/1.1"), badForm},
		{"a bare word", line("GET foo HTTP/1.1"), badForm},
		{"authority-form for GET", line("GET a:80 HTTP/1.1"), badForm},
		{"another scheme", line("GET ftp://a/ HTTP/1.1"), badForm},
		{"scheme alone", line("GET http:// HTTP/1.1"), badForm},
		{"one slash", line("GET http:/a/ HTTP/1.1"), badForm},
		{"no authority", line("GET http:///x HTTP/1.1"), badAuthority},
		{"no authority but a query", line("GET http://?x HTTP/1.1"), badAuthority},
		{"port without host", line("GET http://:80/ HTTP/1.1"), badAuthority},
		{"user", line("GET http://u@a/ HTTP/1.1"), badAuthority},
		{"user and password", line("GET http://u:p@a/ HTTP/1.1"), badAuthority},
		{"backslash", line("GET http://a\\b/ HTTP/1.1"), badAuthority},
		{"connect with a path", line("CONNECT /x HTTP/1.1"), badForm},
		{"connect without a port", line("CONNECT a HTTP/1.1"), badAuthority},
		{"connect with an empty port", line("CONNECT a: HTTP/1.1"), badAuthority},
		{"connect with a URL", line("CONNECT http://a:80/ HTTP/1.1"), badAuthority},
		{"absolute with a bad host field", "GET http://a/ HTTP/1.1\r\nHost: b@c\r\n\r\n", badHost},

		{"host with a space", host("a b"), badHost},
		{"host with a tab", host("a\tb"), badHost},
		{"host with a user", host("u@a"), badHost},
		{"host with a path", host("a/b"), badHost},
		{"host with a comma and space", host("a, b"), badHost},
		{"host with an escape", host("%61"), badHost},
		{"host beyond ASCII", host("\xc3\xa4"), badHost},
		{"two ports", host("a:8080:8080"), badHost},
		{"port too large", host("a:65536"), badHost},
		{"port too long", host("a:000080"), badHost},
		{"port of letters", host("a:http"), badHost},
		{"port with a sign", host("a:+80"), badHost},
		{"port alone", host(":80"), badHost},
		{"open bracket", host("[::1"), badHost},
		{"no IPv6 address", host("[a]"), badHost},
		{"zone", host("[fe80::1%25eth0]"), badHost},
		{"junk after the bracket", host("[::1]x"), badHost},
		{"bare IPv6", host("::1"), badHost},

		{"length with a sign", cl("+5"), badLength},
		{"negative length", cl("-5"), badLength},
		{"hexadecimal length", cl("0x5"), badLength},
		{"length with a space", cl("5 5"), badLength},
		{"length of 2^63", cl("9223372036854775808"), badLength},
		{"length list", cl("5, 5"), manyLengths},
		{"long length list", cl(strings.Repeat("5,", 20) + "5"), manyLengths},
		{"length twice, equal", post + "Content-Length: 5\r\nContent-Length: 5\r\n\r\n", manyLengths},
		{"length twice, different", post + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n", manyLengths},

		{"chunked twice in one", te("chunked, chunked"), badCoding},
		{"chunked not last", te("chunked, gzip"), badCoding},
		{"empty coding", te(""), badCoding},
		{"empty last member", te("chunked,"), badCoding},
		{"coding with a parameter", te("chunked;x=1"), badCoding},
		{"coding in quotes", te("\"chunked\""), badCoding},
		{"vertical tab", te("\x0bchunked"), badValue},
		{"gzip first", te("gzip, chunked"), otherCoding},
		{"gzip", te("gzip"), otherCoding},
		{"identity", te("identity"), otherCoding},
		{"nearly chunked", te("xchunked"), otherCoding},
		{"coding in 1.0", "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", oldCoding},

		{"folded", get + "X: a\r\n b\r\n\r\n", folded},
		{"folded with a tab", get + "X: a\r\n\tb\r\n\r\n", folded},
		{"space before the first field", "GET / HTTP/1.1\r\n Host: a\r\n\r\n", folded},
		{"space before the colon", get + "X : a\r\n\r\n", badName},
		{"tab before the colon", get + "X\t: a\r\n\r\n", badName},
		{"empty name", get + ": a\r\n\r\n", badName},
		{"pseudo field", get + ":authority: a\r\n\r\n", badName},
		{"no colon", get + "X\r\n\r\n", badName},
		{"name beyond ASCII", get + "\xc3\xa4: a\r\n\r\n", badName},
		{"name with a slash", get + "a/b: c\r\n\r\n", badName},
		{"NUL in a name", get + "a\x00b: c\r\n\r\n", badName},
		{"CR in a value", get + "X: a\rb\r\n\r\n", badCR},
		{"control in a value", get + "X: a\x1fb\r\n\r\n", badValue},
		{"DEL in a value", get + "X: 0123456789\x7f\r\n\r\n", badValue},
		{"LF ends the request line", "GET / HTTP/1.1\nHost: a\r\n\r\n", badVersion},
		{"LF ends a field", get + "X: a\nY: b\r\n\r\n", badLineEnd},
		{"LF ends the head", get + "\n", badLineEnd},
		{"two CR", get + "X: a\r\r\n\r\n", badCR},

		{"connection names host", get + "Connection: close, Host\r\n\r\n", badOption},
		{"connection names length", get + "Connection: content-length\r\n\r\n", badOption},
		{"connection names coding", get + "Connection: Transfer-Encoding\r\n\r\n", badOption},
		{"connection names too much", get + "Connection: a" + strings.Repeat(",b", 16) + "\r\nConnection: a" + strings.Repeat(",b", 16) + "\r\n\r\n", manyOptions},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var p Parser
			var h httpmsg.Head
			n, _, err := p.Request([]byte(tt.in), &h)
			if !errors.Is(err, &tt.want.request) || n != 0 {
				t.Errorf("n %d, %v\nwant %v", n, err, &tt.want.request)
			}
			if p != (Parser{}) {
				t.Errorf("the parser keeps %+v", p)
			}
		})
	}
}

// The statuses are what a client is told, so they are pinned apart from the causes.
func TestErrorStatus(t *testing.T) {
	want := map[*fault]int{longMethod: 501, otherCoding: 501, otherVersion: 505, longTarget: 414, longHead: 431, manyFields: 431}
	for _, f := range []*fault{badMethod, badTarget, badForm, badVersion, noHost, manyHosts, badHost, badLength, manyLengths,
		badCoding, twoFramings, badName, folded, badValue, badLineEnd, badCR, badOption} {
		want[f] = 400
	}
	for f, status := range want {
		if got := f.in(false, "").Status; got != status {
			t.Errorf("request, %q: %d, want %d", f.request.Reason, got, status)
		}
		if got := f.in(true, "").Status; got != 502 {
			t.Errorf("response, %q: %d, want 502", f.request.Reason, got)
		}
	}
	var p Parser
	var e *Error
	_, _, err := p.Request([]byte("GET / HTTP/1.1\r\n\r\n"), new(httpmsg.Head))
	if !errors.As(err, &e) || !strings.Contains(err.Error(), "Host") {
		t.Errorf("%v is no *Error that says what is missing", err)
	}
}

func TestResponse(t *testing.T) {
	for _, tt := range []struct {
		name, in, want string
		head           bool
	}{
		{name: "plain", in: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: 1\r\n\r\n", want: "200 len=2 length | content-length: 2 | x: 1"},
		{name: "chunked", in: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", want: "200 len=-1 chunked"},
		{name: "to the end", in: "HTTP/1.1 200 OK\r\n\r\n", want: "200 len=-1 to-close !close"},
		{name: "no reason", in: "HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n", want: "200 len=0 length | content-length: 0"},
		{name: "no space", in: "HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", want: "200 len=0 length | content-length: 0"},
		{name: "reason beyond ASCII", in: "HTTP/1.1 200 \tn\xc3\xa4 \r\nContent-Length: 0\r\n\r\n", want: "200 len=0 length | content-length: 0"},
		{name: "a status of its own", in: "HTTP/1.1 999 X\r\nContent-Length: 0\r\n\r\n", want: "999 len=0 length | content-length: 0"},
		{name: "close", in: "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n", want: "200 len=2 length | content-length: 2 !close"},
		{name: "1.0", in: "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n", want: "200 len=2 length | content-length: 2 !1.0 !close"},
		{name: "1.0 keep-alive", in: "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n", want: "200 len=2 length | content-length: 2 !1.0"},
		{name: "1.0 keep-alive to the end", in: "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n", want: "200 len=-1 to-close !1.0 !close"},
		{name: "case 28: head", in: "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", want: "200 len=0 none | content-length: 10", head: true},
		{name: "head, chunked", in: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", want: "200 len=0 none", head: true},
		{name: "head without framing", in: "HTTP/1.1 200 OK\r\n\r\n", want: "200 len=0 none", head: true},
		{name: "case 29: 204 with a coding", in: "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", want: "204 len=0 none"},
		{name: "204 with a length", in: "HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n", want: "204 len=0 none"},
		{name: "head, 204 with a length", in: "HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n", want: "204 len=0 none", head: true},
		{name: "case 29: 103 with framing", in: "HTTP/1.1 103 Early Hints\r\nContent-Length: 3\r\nLink: x\r\n\r\n", want: "103 len=0 none | link: x"},
		{name: "304", in: "HTTP/1.1 304 Not Modified\r\nContent-Length: 3\r\n\r\n", want: "304 len=0 none | content-length: 3"},
		{name: "100", in: "HTTP/1.1 100 Continue\r\n\r\n", want: "100 len=0 none"},
		{name: "case 31: 101", in: "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nTransfer-Encoding: chunked\r\nSec-WebSocket-Accept: x=\r\n\r\n",
			want: "101 len=0 none | sec-websocket-accept: x= !upgrade=websocket"},
		{name: "upgrade without 101", in: "HTTP/1.1 200 OK\r\nUpgrade: h2c\r\nConnection: upgrade\r\nContent-Length: 0\r\n\r\n", want: "200 len=0 length | content-length: 0"},
		{name: "hop-by-hop", in: "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nKeep-Alive: 5\r\nConnection: keep-alive, x\r\nX: 1\r\nTE: trailers\r\n\r\n", want: "200 len=0 length | content-length: 0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var p Parser
			var h httpmsg.Head
			n, f, err := p.Response([]byte(tt.in+"rest"), &h, tt.head)
			if err != nil || n != len(tt.in) {
				t.Fatalf("n %d of %d, %v", n, len(tt.in), err)
			}
			if got := text(&h, f); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func TestResponseRefused(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\n"
	for _, tt := range []struct {
		name, in string
		want     *fault
	}{
		{"both framings", ok + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", twoFramings},
		{"both framings on 204", "HTTP/1.1 204 X\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", twoFramings},
		{"two lengths", ok + "Content-Length: 5\r\nContent-Length: 5\r\n\r\n", manyLengths},
		{"gzip", ok + "Transfer-Encoding: gzip, chunked\r\n\r\n", otherCoding},
		{"coding in 1.0", "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", oldCoding},
		{"split by CR", ok + "X: a\rSet-Cookie: b\r\n\r\n", badCR},
		{"split by LF", ok + "X: a\nSet-Cookie: b\r\n\r\n", badLineEnd},
		{"NUL", ok + "X: \x00\r\n\r\n", badValue},
		{"folded", ok + "X: a\r\n b\r\n\r\n", folded},
		{"space before the colon", ok + "Content-Length : 5\r\n\r\n", badName},
		{"NUL in the reason", "HTTP/1.1 200 O\x00\r\n\r\n", badReason},
		{"CR in the reason", "HTTP/1.1 200 O\rX\r\n\r\n", badReason},
		{"CR after the code", "HTTP/1.1 200\rX\r\n\r\n", badReason},
		{"LF after the code", "HTTP/1.1 200\nX: a\r\n\r\n", badStatusLine},
		{"LF in the reason", "HTTP/1.1 200 OK\n\n", badLineEnd},
		{"status 099", "HTTP/1.1 099 X\r\n\r\n", badStatusLine},
		{"status 000", "HTTP/1.1 000 X\r\n\r\n", badStatusLine},
		{"status of four digits", "HTTP/1.1 1000 X\r\n\r\n", badStatusLine},
		{"status of two digits", "HTTP/1.1 20 X\r\n\r\n", badStatusLine},
		{"status with a sign", "HTTP/1.1 +20 X\r\n\r\n", badStatusLine},
		{"two spaces", "HTTP/1.1  200 X\r\n\r\n", badStatusLine},
		{"version in lower case", "http/1.1 200 X\r\n\r\n", badStatusLine},
		{"HTTP/2", "HTTP/2.0 200 X\r\n\r\n", badStatusLine},
		{"HTTP/1.2", "HTTP/1.2 200 X\r\n\r\n", badStatusLine},
		{"empty line first", "\r\nHTTP/1.1 200 OK\r\n\r\n", badStatusLine},
		{"SSH, at once", "SSH-", badStatusLine},
		{"connection names length", ok + "Connection: content-length\r\n\r\n", badOption},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var p Parser
			var h httpmsg.Head
			n, _, err := p.Response([]byte(tt.in), &h, false)
			if !errors.Is(err, &tt.want.response) || n != 0 {
				t.Errorf("n %d, %v\nwant %v", n, err, &tt.want.response)
			}
		})
	}
}

func TestLimits(t *testing.T) {
	const line, end = "GET / HTTP/1.1\r\n", "\r\n"
	pad := func(n int) string { // a whole head of n bytes
		s := line + "Host: a\r\nX: "
		return s + strings.Repeat("x", n-len(s)-4) + "\r\n\r\n"
	}
	many := func(n int) string { return line + "Host: a\r\n" + strings.Repeat("X: 1\r\n", n-1) + end }
	target := func(n int) string { return "GET /" + strings.Repeat("x", n-1) + " HTTP/1.1\r\nHost: a\r\n\r\n" }
	for _, tt := range []struct {
		name   string
		limits Limits
		in     string
		want   *fault // nil: accepted
	}{
		{"largest head", Limits{}, pad(61440), nil},
		{"head too large", Limits{}, pad(61441), longHead},
		{"head too large and not whole", Limits{}, pad(61441)[:61440], longHead},
		{"most fields", Limits{}, many(100), nil},
		{"too many fields", Limits{}, many(101), manyFields},
		{"too many fields, before the head is whole", Limits{}, strings.TrimSuffix(many(101), end), manyFields},
		{"longest target", Limits{}, target(16384), nil},
		{"target too long", Limits{}, target(16385), longTarget},
		{"target too long, before it ends", Limits{}, target(16385)[:4+16385], longTarget},
		{"own limits", Limits{MaxHead: 200, MaxFields: 3, MaxTarget: 20}, many(3), nil},
		{"own head limit", Limits{MaxHead: 200}, pad(201), longHead},
		{"own field limit", Limits{MaxFields: 3}, many(4), manyFields},
		{"own target limit", Limits{MaxTarget: 20}, target(21), longTarget},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := Parser{Limits: tt.limits}
			n, _, err := p.Request([]byte(tt.in), new(httpmsg.Head))
			if tt.want == nil {
				if err != nil || n != len(tt.in) {
					t.Fatalf("n %d of %d, %v", n, len(tt.in), err)
				}
			} else if !errors.Is(err, &tt.want.request) {
				t.Fatalf("n %d, %v; want %v", n, err, &tt.want.request)
			}
			if p.Limits != tt.limits {
				t.Error("the limits are gone")
			}
		})
	}
	t.Run("response", func(t *testing.T) {
		p := Parser{Limits: Limits{MaxFields: 2}}
		in := "HTTP/1.1 200 OK\r\nA: 1\r\nContent-Length: 0\r\n"
		if n, _, err := p.Response([]byte(in+end), new(httpmsg.Head), false); n == 0 || err != nil {
			t.Errorf("two fields: n %d, %v", n, err)
		}
		if _, _, err := p.Response([]byte(in+"C: 1\r\n"), new(httpmsg.Head), false); !errors.Is(err, &manyFields.response) {
			t.Errorf("three fields: %v", err)
		}
	})
}

// TestEmptyLinesTaken: empty lines that the driver took from the stream count as those that stand in it.
func TestEmptyLinesTaken(t *testing.T) {
	const get, most = "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n"
	for _, tt := range []struct {
		in   string
		want *fault // nil: accepted
	}{
		{get, nil},
		{"\r", badMethod},
		{"\r\n" + get, badMethod},
	} {
		var p Parser
		var h httpmsg.Head
		if got := p.EmptyLines([]byte(most[:6])) + p.EmptyLines([]byte(most[6:])); got != len(most) {
			t.Errorf("%d bytes are taken", got)
		}
		switch n, _, err := p.Request([]byte(tt.in), &h); {
		case tt.want == nil && (n != len(tt.in) || err != nil):
			t.Errorf("%q: n %d, %v", tt.in, n, err)
		case tt.want != nil && !errors.Is(err, &tt.want.request):
			t.Errorf("%q: %v, want %v", tt.in, err, tt.want.request.Reason)
		}
		if n, _, err := p.Request([]byte("\r\n"+get), &h); n != len(get)+2 || err != nil {
			t.Errorf("the next head: n %d, %v", n, err)
		}
	}
}

// A head that arrives a byte at a time is looked at once, not once a byte.
func TestResume(t *testing.T) {
	in := []byte("GET /" + strings.Repeat("t", 9000) + " HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("v", 40000) + "\r\n\r\n")
	var p Parser
	var h httpmsg.Head
	for i := range len(in) {
		if n, _, err := p.Request(in[:i], &h); n != 0 || err != nil {
			t.Fatalf("after %d bytes: n %d, %v", i, n, err)
		}
		seen := max(p.pos, p.sp2)
		if i > 9100 && int(seen) != i {
			t.Fatalf("after %d bytes the search stands at %d", i, seen)
		}
	}
	if n, _, err := p.Request(in, &h); n != len(in) || err != nil {
		t.Fatalf("n %d, %v", n, err)
	}
}

// Until the head is whole, not a byte of it changes.
func TestPartialHeadIsNotWritten(t *testing.T) {
	b := []byte("GET HTTP://A?q HTTP/1.1\r\nHOST: A\r\nConnection: X-A\r\n\r")
	before := string(b)
	var p Parser
	if n, _, err := p.Request(b, new(httpmsg.Head)); n != 0 || err != nil || string(b) != before {
		t.Fatalf("n %d, %v, now %q", n, err, b)
	}
}

// control is written to look at eight bytes at a time; this one looks at one.
func TestControl(t *testing.T) {
	slow := func(b []byte, i int) int {
		for !httpmsg.BadValue[b[i]] {
			i++
		}
		return i
	}
	for c := range 256 {
		for at := range 20 {
			for _, fill := range []byte{' ', '\t', 0x80, 0xff, '~', 0x20} {
				b := []byte(strings.Repeat(string([]byte{fill}), 24) + "\r\n")
				b[at] = byte(c)
				for from := range at + 1 {
					if got, want := control(b, from), slow(b, from); got != want {
						t.Fatalf("control(%q, %d) is %d, want %d", b, from, got, want)
					}
				}
			}
		}
	}
}

func TestFramingString(t *testing.T) {
	got := fmt.Sprint(None, Length, Chunked, ToClose, Framing(9))
	if got != "none length chunked to-close invalid" {
		t.Error(got)
	}
}
