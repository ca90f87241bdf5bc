package ambiguity

import (
	"fmt"
	"strings"
)

// service is the authority that requests ask for. Of the digits of its port the last
// says which back end answers: withPort changes it, and nothing else of a request.
const (
	name    = "app.shop.aether.internal"
	service = name + ":8083"
)

// next ends every request of the table: whoever reads the same bytes as the same
// requests sees it as the last of them, and closes.
const next = "GET /next HTTP/1.1\r\nHost: " + service + "\r\nConnection: close\r\n\r\n"

// A request of the table: what it is about, where the rule stands, and its bytes,
// without next. A path with /smuggled in it is part of something else; nobody may take
// it for a request.
type request struct{ name, rule, bytes string }

type group struct {
	title    string
	requests []request
}

const (
	host      = "Host: " + service + "\r\n"
	get       = "GET / HTTP/1.1\r\n" + host
	post      = "POST / HTTP/1.1\r\n" + host
	chunked   = post + "Transfer-Encoding: chunked\r\n\r\n"
	smuggled  = "GET /smuggled HTTP/1.1\r\n" + host + "\r\n"
	end       = "\r\n"
	lastChunk = "0\r\n\r\n"
)

// line is a request with that request line.
func line(l string) string { return l + "\r\n" + host + end }

// fields is a GET with those field lines.
func fields(f string) string { return get + f + end }

// sized is a POST whose Content-Length is written as v, with the body.
func sized(v, body string) string { return post + "Content-Length:" + v + "\r\n\r\n" + body }

// coded is a POST whose Transfer-Encoding is written as v, with one chunk.
func coded(v string) string { return post + "Transfer-Encoding:" + v + "\r\n\r\n" + one }

const one = "5\r\nhello\r\n" + lastChunk

// hidden is a request that a reader of the Content-Length sees as a body, and a reader
// of the chunks as a request of its own.
var hidden = lastChunk + smuggled

// groups is the table.
var groups = []group{
	{"Ordinary requests, to compare with", []request{
		{"GET", "9112 3", line("GET / HTTP/1.1")},
		{"a body by length", "9112 6.2", sized(" 5", "hello")},
		{"a body in chunks", "9112 7.1", coded(" chunked")},
		{"two in one write", "9112 9.3.2", line("GET /1 HTTP/1.1") + line("GET /2 HTTP/1.1")},
		{"a body, then another request", "9112 9.3.2", sized(" 5", "hello") + line("GET /2 HTTP/1.1")},
		{"a GET with a body", "9110 9.3.1", "GET / HTTP/1.1\r\n" + host + "Content-Length: 5\r\n\r\nhello"},
		{"a HEAD with a body", "9110 9.3.2", "HEAD / HTTP/1.1\r\n" + host + "Content-Length: 5\r\n\r\nhello"},
		{"a DELETE with chunks", "9110 9.3.5", "DELETE / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n" + one},
	}},

	{"Request line", []request{
		{"two spaces after the method", "9112 3", line("GET  / HTTP/1.1")},
		{"two spaces before the version", "9112 3", line("GET /  HTTP/1.1")},
		{"a tab for the first space", "9112 3", line("GET\t/ HTTP/1.1")},
		{"a tab for the second space", "9112 3", line("GET /\tHTTP/1.1")},
		{"a space in the target", "9112 3.2", line("GET /a b HTTP/1.1")},
		{"a version in the target", "9112 3", line("GET / HTTP/1.1 HTTP/1.1")},
		{"a space after the version", "9112 3", line("GET / HTTP/1.1 ")},
		{"a space before the method", "9112 3", line(" GET / HTTP/1.1")},
		{"a vertical tab for a space", "9112 3", line("GET\v/ HTTP/1.1")},
		{"a CR in the target", "9112 2.2", line("GET /a\rb HTTP/1.1")},
		{"a NUL in the target", "9112 3.2", line("GET /a\x00b HTTP/1.1")},
		{"a NUL in the method", "9112 3.1", line("GE\x00T / HTTP/1.1")},
		{"a control character in the target", "9112 3.2", line("GET /a\x01b HTTP/1.1")},
		{"DEL in the target", "9112 3.2", line("GET /a\x7fb HTTP/1.1")},
		{"a method in lower case", "9110 9.1", line("get / HTTP/1.1")},
		{"a method that nobody knows", "9110 9.1", line("SMUGGLE / HTTP/1.1")},
		{"a method of every token character", "9110 5.6.2", line("A!#$%&'*+-.^_`|~ / HTTP/1.1")},
		{"a method with a colon", "9110 9.1", line("GE:T / HTTP/1.1")},
		{"a method of 40 letters", "9110 9.1", line(strings.Repeat("M", 40) + " / HTTP/1.1")},
		{"no version", "9112 3", "GET /\r\n"},
		{"no version, with fields", "9112 3", line("GET /")},
		{"an empty line before", "9112 2.2", "\r\n" + line("GET / HTTP/1.1")},
		{"three empty lines before", "9112 2.2", "\r\n\r\n\r\n" + line("GET / HTTP/1.1")},
		{"a lone LF before", "9112 2.2", "\n" + line("GET / HTTP/1.1")},
		{"a lone CR before", "9112 2.2", "\r" + line("GET / HTTP/1.1")},
		{"the line ends with LF", "9112 2.2", "GET / HTTP/1.1\n" + host + end},
		{"the line ends with CR CR LF", "9112 2.2", "GET / HTTP/1.1\r\r\n" + host + end},
	}},

	{"Version", []request{
		{"HTTP/1.0", "9112 2.3", line("GET / HTTP/1.0")},
		{"HTTP/1.0 with keep-alive", "9112 9.3", "GET / HTTP/1.0\r\n" + host + "Connection: keep-alive\r\n\r\n"},
		{"HTTP/1.2", "9110 2.5", line("GET / HTTP/1.2")},
		{"HTTP/1.10", "9112 2.3", line("GET / HTTP/1.10")},
		{"HTTP/01.1", "9112 2.3", line("GET / HTTP/01.1")},
		{"HTTP/1", "9112 2.3", line("GET / HTTP/1")},
		{"HTTP/0.9", "9112 2.3", line("GET / HTTP/0.9")},
		{"HTTP/2.0", "9112 2.3", line("GET / HTTP/2.0")},
		{"HTTP/9.9", "9112 2.3", line("GET / HTTP/9.9")},
		{"in lower case", "9112 2.3", line("GET / http/1.1")},
		{"another protocol", "9112 2.3", line("GET / ICY/1.1")},
		{"the preface of HTTP/2 after a request", "9113 3.4", line("GET / HTTP/1.1") + "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"},
	}},

	{"Target", []request{
		{"absolute-form", "9112 3.2.2", line("GET http://" + service + "/a HTTP/1.1")},
		{"absolute-form in capitals", "9112 3.2.2", line("GET HTTP://" + service + "/a HTTP/1.1")},
		{"absolute-form against Host", "9112 3.2.2", "GET http://" + service + "/a HTTP/1.1\r\nHost: other.example\r\n\r\n"},
		{"absolute-form against a bad Host", "9112 3.2", "GET http://" + service + "/a HTTP/1.1\r\nHost: a b\r\n\r\n"},
		{"absolute-form without Host", "9112 3.2", "GET http://" + service + "/a HTTP/1.1\r\n\r\n"},
		{"absolute-form without a path", "9112 3.2.1", line("GET http://" + service + " HTTP/1.1")},
		{"absolute-form with a query and no path", "9112 3.2.1", line("GET http://" + service + "?q=/x HTTP/1.1")},
		{"absolute-form with a user", "9110 4.2.4", line("GET http://u:p@" + service + "/ HTTP/1.1")},
		{"absolute-form without an authority", "9110 4.2.1", line("GET http:///a HTTP/1.1")},
		{"absolute-form with a backslash", "3986 3.2", line("GET http://" + service + "\\@other.example/ HTTP/1.1")},
		{"absolute-form of another scheme", "9112 3.2.2", line("GET ftp://" + service + "/ HTTP/1.1")},
		{"one slash after the scheme", "9112 3.2.2", line("GET http:/" + service + "/ HTTP/1.1")},
		{"authority-form for GET", "9112 3.2.3", line("GET " + service + " HTTP/1.1")},
		{"a target without a slash", "9112 3.2", line("GET a HTTP/1.1")},
		{"an asterisk for GET", "9112 3.2.4", line("GET * HTTP/1.1")},
		{"an asterisk for OPTIONS", "9112 3.2.4", line("OPTIONS * HTTP/1.1")},
		{"OPTIONS with an authority and no path", "9112 3.2.4", line("OPTIONS http://" + service + " HTTP/1.1")},
		{"CONNECT", "9110 9.3.6", line("CONNECT " + service + " HTTP/1.1")},
		{"CONNECT with a path", "9112 3.2.3", line("CONNECT / HTTP/1.1")},
		{"CONNECT with a body", "9110 9.3.6", "CONNECT " + service + " HTTP/1.1\r\n" + host + "Content-Length: 5\r\n\r\nhello"},
		{"two slashes", "3986 3.3", line("GET //a HTTP/1.1")},
		{"dot segments", "3986 5.2.4", line("GET /a/../b HTTP/1.1")},
		{"escaped dot segments", "3986 6.2.2", line("GET /a/%2e%2e/b HTTP/1.1")},
		{"a broken escape", "3986 2.1", line("GET /%zz HTTP/1.1")},
		{"an escaped NUL", "3986 2.1", line("GET /a%00b HTTP/1.1")},
		{"an escaped CR LF", "3986 2.1", line("GET /a%0d%0aX:%20y HTTP/1.1")},
		{"a fragment", "9112 3.2", line("GET /a#b HTTP/1.1")},
		{"a backslash", "3986 3.3", line("GET /a\\b HTTP/1.1")},
		{"quotes and braces", "3986 2", line("GET /\"<{|}>^` HTTP/1.1")},
		{"a byte beyond ASCII", "3986 2", line("GET /\xe4 HTTP/1.1")},
		{"UTF-8", "3986 2", line("GET /\u00e4 HTTP/1.1")},
		{"20,000 bytes", "9110 15.5.15", line("GET /" + strings.Repeat("a", 20000) + " HTTP/1.1")},
		{"70,000 bytes", "9110 15.5.15", line("GET /" + strings.Repeat("a", 70000) + " HTTP/1.1")},
	}},

	{"Host", []request{
		{"none", "9112 3.2", "GET / HTTP/1.1\r\n\r\n"},
		{"none, in HTTP/1.0", "9112 3.2", "GET / HTTP/1.0\r\n\r\n"},
		{"empty", "9112 3.2", "GET / HTTP/1.1\r\nHost:\r\n\r\n"},
		{"twice, equal", "9112 3.2", "GET / HTTP/1.1\r\n" + host + host + end},
		{"twice, different", "9112 3.2", "GET / HTTP/1.1\r\n" + host + "Host: other.example\r\n\r\n"},
		{"twice, in HTTP/1.0", "9112 3.2", "GET / HTTP/1.0\r\n" + host + "Host: other.example\r\n\r\n"},
		{"a list", "9110 7.2", "GET / HTTP/1.1\r\nHost: " + service + ", other.example\r\n\r\n"},
		{"with a user", "9110 7.2", "GET / HTTP/1.1\r\nHost: u@" + service + "\r\n\r\n"},
		{"with a path", "9110 7.2", "GET / HTTP/1.1\r\nHost: " + service + "/x\r\n\r\n"},
		{"with a NUL", "9110 5.5", "GET / HTTP/1.1\r\nHost: " + service + "\x00.example\r\n\r\n"},
		{"with a space inside", "9110 7.2", "GET / HTTP/1.1\r\nHost: " + service + " x\r\n\r\n"},
		{"with a port of letters", "9110 7.2", "GET / HTTP/1.1\r\nHost: " + name + ":http\r\n\r\n"},
		{"with two ports", "9110 7.2", "GET / HTTP/1.1\r\nHost: " + service + ":80\r\n\r\n"},
		{"with a port beyond 65535", "9110 7.2", "GET / HTTP/1.1\r\nHost: " + name + ":73619\r\n\r\n"},
		{"in capitals", "9110 4.2.3", "GET / HTTP/1.1\r\nHost: " + strings.ToUpper(service) + "\r\n\r\n"},
		{"with a dot at the end of the name", "9110 7.2", "GET / HTTP/1.1\r\nHost: " + name + ".:8083\r\n\r\n"},
		{"folded", "9112 5.2", "GET / HTTP/1.1\r\nHost:\r\n " + service + "\r\n\r\n"},
		{"after a space at the line's start", "9112 5.2", "GET / HTTP/1.1\r\n " + host + end},
		{"after a space, with another one", "9112 2.2", "GET / HTTP/1.1\r\n Host: other.example\r\n" + host + end},
		{"named by Connection", "9110 7.6.1", fields("Connection: host\r\n")},
	}},

	{"Content-Length", []request{
		{"empty", "9110 8.6", sized("", "hello")},
		{"empty, on a GET", "9110 8.6", fields("Content-Length:\r\n")},
		{"with a plus", "9110 8.6", sized(" +5", "hello")},
		{"negative", "9110 8.6", sized(" -5", "hello")},
		{"hexadecimal", "9110 8.6", sized(" 0x5", "hello")},
		{"with an underscore", "9110 8.6", sized(" 0_5", "hello")},
		{"with a point", "9110 8.6", sized(" 5.0", "hello")},
		{"with a space inside", "9110 8.6", sized(" 5 5", "hello")},
		{"with a vertical tab before", "9110 5.5", sized(" \v5", "hello")},
		{"with letters behind", "9110 8.6", sized(" 5abc", "hello")},
		{"in quotes", "9110 8.6", sized(` "5"`, "hello")},
		{"with zeros before", "9110 8.6", sized(" 005", "hello")},
		{"with white space around", "9110 5.5", sized(" \t5 \t", "hello")},
		{"2^64 and 5", "9110 8.6", sized(" 18446744073709551621", "hello")},
		{"2^63", "9110 8.6", sized(" 9223372036854775808", "hello")},
		{"twice, equal", "9112 6.3", post + "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello"},
		{"twice, different", "9112 6.3", post + "Content-Length: 5\r\nContent-Length: 0\r\n\r\nhello"},
		{"a list, equal", "9112 6.3", sized(" 5, 5", "hello")},
		{"a list, different", "9112 6.3", sized(" 5, 0", "hello")},
		{"folded", "9112 5.2", sized("\r\n 5", "hello")},
		{"with a space before the colon", "9112 5.1", post + "Content-Length : 5\r\n\r\nhello"},
		{"with a tab before the colon", "9112 5.1", post + "Content-Length\t: 5\r\n\r\nhello"},
		{"with an underscore for the hyphen", "9110 5.1", post + "Content_Length: 0\r\nContent-Length: 5\r\n\r\nhello"},
		{"named by Connection", "9110 7.6.1", post + "Connection: content-length\r\nContent-Length: 5\r\n\r\nhello"},
		{"shorter than the body", "9112 9.3.2", sized(" 3", "hello")},
	}},

	{"Transfer-Encoding", []request{
		{"in capitals", "9112 7", coded(" CHUNKED")},
		{"with a tab before", "9110 5.5", coded("\tchunked")},
		{"with a tab behind", "9110 5.5", coded(" chunked\t")},
		{"twice", "9112 6.1", post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + one},
		{"twice in a list", "9112 6.1", coded(" chunked, chunked")},
		{"chunked, then identity", "9112 6.1", post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + one},
		{"identity, then chunked", "9112 6.1", post + "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n" + one},
		{"identity in a list", "9112 7", coded(" identity, chunked")},
		{"gzip first", "9112 6.1", coded(" gzip, chunked")},
		{"chunked is not last", "9112 6.1", coded(" chunked, gzip")},
		{"gzip alone", "9112 6.1", post + "Transfer-Encoding: gzip\r\n\r\n"},
		{"identity alone", "9112 7", post + "Transfer-Encoding: identity\r\n\r\n"},
		{"empty", "9112 6.1", post + "Transfer-Encoding:\r\n\r\n"},
		{"an empty member before", "9110 5.6.1", coded(" ,chunked")},
		{"an empty member behind", "9110 5.6.1", coded(" chunked,")},
		{"in quotes", "9112 7", coded(` "chunked"`)},
		{"with a parameter", "9112 7", coded(" chunked;q=1")},
		{"nearly chunked", "9112 7", coded(" xchunked")},
		{"with a vertical tab before", "9110 5.5", coded(" \vchunked")},
		{"with a NUL behind", "9110 5.5", coded(" chunked\x00")},
		{"with a lone CR before", "9112 2.2", coded(" \rchunked")},
		{"folded", "9112 5.2", coded("\r\n chunked")},
		{"with a space before the colon", "9112 5.1", post + "Transfer-Encoding : chunked\r\n\r\n" + one},
		{"with a space before the name", "9112 5.2", post + " Transfer-Encoding: chunked\r\n\r\n" + one},
		{"behind a lone LF", "9112 2.2", post + "X: y\nTransfer-Encoding: chunked\r\n\r\n" + one},
		{"behind a lone CR", "9112 2.2", post + "X: y\rTransfer-Encoding: chunked\r\n\r\n" + one},
		{"in HTTP/1.0", "9112 6.1", "POST / HTTP/1.0\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n" + one},
		{"in HTTP/1.0 with keep-alive", "9112 6.1", "POST / HTTP/1.0\r\n" + host + "Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n" + one},
		{"named by Connection", "9110 7.6.1", post + "Connection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n\r\n" + one},
	}},

	{"Content-Length against Transfer-Encoding", []request{
		{"length first", "9112 6.1", post + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n", len(hidden)) + hidden},
		{"coding first", "9112 6.1", post + fmt.Sprintf("Transfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n", len(hidden)) + hidden},
		{"a short length", "9112 6.1", post + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + one},
		{"the length of the chunks", "9112 6.1", post + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n", len(one)) + one},
		{"length 0", "9112 6.1", post + "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n" + one},
		{"length and identity", "9112 6.1", post + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: identity\r\n\r\n", len(hidden)) + hidden},
		{"length and xchunked", "9112 6.1", post + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: xchunked\r\n\r\n", len(hidden)) + hidden},
		{"length and a spaced coding", "9112 5.1", post + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding : chunked\r\n\r\n", len(hidden)) + hidden},
		{"length and a coding with an underscore", "9110 5.1", post + fmt.Sprintf("Content-Length: %d\r\nTransfer_Encoding: chunked\r\n\r\n", len(hidden)) + hidden},
		{"length and a folded coding", "9112 5.2", post + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding:\r\n chunked\r\n\r\n", len(hidden)) + hidden},
		{"length and an empty coding", "9112 6.1", post + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding:\r\n\r\n", len(hidden)) + hidden},
		{"on a GET", "9112 6.1", "GET / HTTP/1.1\r\n" + host + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n", len(hidden)) + hidden},
		{"in HTTP/1.0", "9112 6.1", "POST / HTTP/1.0\r\n" + host + fmt.Sprintf("Connection: keep-alive\r\nContent-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n", len(hidden)) + hidden},
	}},

	{"Chunks", []request{
		{"with zeros before the size", "9112 7.1", chunked + "005\r\nhello\r\n000\r\n\r\n"},
		{"a size in capitals", "9112 7.1", chunked + "A\r\n0123456789\r\n" + lastChunk},
		{"a size of 0x", "9112 7.1", chunked + "0x5\r\nhello\r\n" + lastChunk},
		{"a size with a plus", "9112 7.1", chunked + "+5\r\nhello\r\n" + lastChunk},
		{"a size with a minus", "9112 7.1", chunked + "-5\r\nhello\r\n" + lastChunk},
		{"a size with an underscore", "9112 7.1", chunked + "0_5\r\nhello\r\n" + lastChunk},
		{"a size with letters behind", "9112 7.1", chunked + "5zzz\r\nhello\r\n" + lastChunk},
		{"a size with a space before", "9112 7.1", chunked + " 5\r\nhello\r\n" + lastChunk},
		{"a size with a space behind", "9112 7.1", chunked + "5 \r\nhello\r\n" + lastChunk},
		{"a size with a tab behind", "9112 7.1", chunked + "5\t\r\nhello\r\n" + lastChunk},
		{"an empty size", "9112 7.1", chunked + "\r\nhello\r\n" + lastChunk},
		{"a size of 2^64 and 5", "9112 7.1", chunked + "10000000000000005\r\nhello\r\n" + lastChunk},
		{"a size of 2^32 and 5", "9112 7.1", chunked + "100000005\r\nhello\r\n" + lastChunk},
		{"an extension", "9112 7.1.1", chunked + "5;a=b\r\nhello\r\n0;c\r\n\r\n"},
		{"an extension in quotes", "9112 7.1.1", chunked + "5;a=\"b;c\"\r\nhello\r\n" + lastChunk},
		{"a space before an extension", "9112 7.1.1", chunked + "5 ;a=b\r\nhello\r\n" + lastChunk},
		{"an LF in an extension", "9112 7.1.1", chunked + "5;a\nhello\r\n" + lastChunk},
		{"a CR in an extension", "9112 7.1.1", chunked + "5;a\rb\r\nhello\r\n" + lastChunk},
		{"a NUL in an extension", "9112 7.1.1", chunked + "5;a\x00b\r\nhello\r\n" + lastChunk},
		{"an LF in a quoted extension hides a chunk", "9112 7.1.1", chunked + "2;a=\"\nxx\r\n3\r\nabc\r\n" + lastChunk},
		{"17 KiB of extensions", "9112 7.1.1", chunked + strings.Repeat("1;"+strings.Repeat("x", 4094)+"\r\na\r\n", 5) + lastChunk},
		{"the size ends with LF", "9112 2.2", chunked + "5\nhello\r\n" + lastChunk},
		{"the size ends with CR", "9112 2.2", chunked + "5\rhello\r\n" + lastChunk},
		{"the data ends with LF", "9112 7.1", chunked + "5\r\nhello\n" + lastChunk},
		{"nothing ends the data", "9112 7.1", chunked + "5\r\nhello" + lastChunk},
		{"two bytes other than CR LF end the data", "9112 7.1", chunked + "5\r\nhelloXX" + lastChunk},
		{"more data than the size", "9112 7.1", chunked + "3\r\nhello\r\n" + lastChunk},
		{"the last chunk ends with LF", "9112 2.2", chunked + "5\r\nhello\r\n0\n\n"},
		{"an LF ends the trailers", "9112 2.2", chunked + "5\r\nhello\r\n0\r\n\n"},
		{"no empty line at the end", "9112 7.1", chunked + "5\r\nhello\r\n0\r\n"},
	}},

	{"Trailers", []request{
		{"one", "9112 7.1.2", chunked + "5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n"},
		{"Content-Length", "9110 6.5.1", chunked + "5\r\nhello\r\n0\r\nContent-Length: 50\r\n\r\n"},
		{"Transfer-Encoding", "9110 6.5.1", chunked + "5\r\nhello\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n"},
		{"Host", "9110 6.5.1", chunked + "5\r\nhello\r\n0\r\nHost: other.example\r\n\r\n"},
		{"a CR in the value", "9110 5.5", chunked + "5\r\nhello\r\n0\r\nX: a\rb\r\n\r\n"},
		{"a NUL in the value", "9110 5.5", chunked + "5\r\nhello\r\n0\r\nX: a\x00b\r\n\r\n"},
		{"folded", "9112 5.2", chunked + "5\r\nhello\r\n0\r\nX: a\r\n b\r\n\r\n"},
		{"no colon", "9112 5", chunked + "5\r\nhello\r\n0\r\nX\r\n\r\n"},
		{"a space before the colon", "9112 5.1", chunked + "5\r\nhello\r\n0\r\nX : a\r\n\r\n"},
		{"a line ends with LF", "9112 2.2", chunked + "5\r\nhello\r\n0\r\nX: a\n\r\n"},
		{"a request as trailers", "9112 7.1.2", chunked + "5\r\nhello\r\n0\r\n" + smuggled},
	}},

	{"Fields", []request{
		{"folded by a space", "9112 5.2", fields("X: a\r\n b\r\n")},
		{"folded by a tab", "9112 5.2", fields("X: a\r\n\tb\r\n")},
		{"a line of white space", "9112 5.2", fields("X: a\r\n \r\n")},
		{"a space before the colon", "9112 5.1", fields("X : a\r\n")},
		{"no colon", "9112 5", fields("X\r\n")},
		{"no name", "9110 5.1", fields(": a\r\n")},
		{"a name that begins with a colon", "9113 8.3", fields(":path: /smuggled\r\n")},
		{"a NUL in a name", "9110 5.1", fields("X\x00Y: a\r\n")},
		{"a space in a name", "9110 5.1", fields("X Y: a\r\n")},
		{"a name beyond ASCII", "9110 5.1", fields("X\xe4: a\r\n")},
		{"a name with a slash", "9110 5.1", fields("X/Y: a\r\n")},
		{"a NUL in a value", "9110 5.5", fields("X: a\x00b\r\n")},
		{"a CR in a value", "9110 5.5", fields("X: a\rb\r\n")},
		{"a control character in a value", "9110 5.5", fields("X: a\x01b\r\n")},
		{"DEL in a value", "9110 5.5", fields("X: a\x7fb\r\n")},
		{"bytes beyond ASCII in a value", "9110 5.5", fields("X: \xe4\xff\r\n")},
		{"an LF hides a field", "9112 2.2", fields("X: a\nY: b\r\n")},
		{"an LF hides a length", "9112 2.2", post + "X: a\nContent-Length: 5\r\n\r\nhello"},
		{"a line ends with CR CR LF", "9112 2.2", fields("X: a\r\r\n")},
		{"the head ends with LF LF", "9112 2.2", get + "X: a\n\n"},
		{"the head ends with CR LF LF", "9112 2.2", get + "X: a\r\n\n"},
		{"the head ends with CR", "9112 2.2", get + "\r" + smuggled},
		{"a CR and a byte where the head ends", "9112 2.2", get + "\rX" + smuggled},
		{"101 of them", "6585 5", fields(strings.Repeat("X: a\r\n", 101))},
		{"61 KiB of them", "6585 5", fields("X: " + strings.Repeat("a", 61<<10) + "\r\n")},
	}},

	{"Connection, Expect, Upgrade", []request{
		{"Connection names a field", "9110 7.6.1", fields("Connection: x-a\r\nX-A: 1\r\n")},
		{"Connection: close, then a request", "9112 9.6", fields("Connection: close\r\n") + smuggled},
		{"Connection: close and keep-alive", "9112 9.3", fields("Connection: keep-alive, close\r\n") + smuggled},
		{"Proxy-Connection: close", "9112 C.2.2", fields("Proxy-Connection: close\r\n")},
		{"an unknown expectation", "9110 10.1.1", fields("Expect: tea\r\n")},
		{"Expect and a body at once", "9110 10.1.1", post + "Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello"},
		{"upgrade to h2c", "9113 3.1", fields("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n")},
		{"upgrade to h2c with a body", "9113 3.1", post + "Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\nhello"},
	}},

	{"Pipelines with a bad member", []request{
		{"a good one, then a bad length", "9112 9.3.2", line("GET /1 HTTP/1.1") + sized(" +5", "hello")},
		{"a good one, then no Host", "9112 9.3.2", line("GET /1 HTTP/1.1") + "GET /2 HTTP/1.1\r\n\r\n"},
		{"a body, then garbage", "9112 9.3.2", sized(" 5", "hello") + "\x16\x03\x01\x00\x05hello"},
		{"chunks, then an extra CR LF", "9112 2.2", coded(" chunked") + "\r\n"},
		{"chunks, then two extra CR LF", "9112 2.2", coded(" chunked") + "\r\n\r\n"},
		{"a body, then surplus bytes", "9112 9.3.2", sized(" 5", "hello") + "surplus"},
		{"garbage alone", "9112 3", "\x00\x01\x02\x03\r\n\r\n"},
		{"TLS", "9112 3", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"},
	}},
}
