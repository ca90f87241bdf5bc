package http1

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"
)

// TestFaultsAreNamed: each refusal of a message names the field, the byte or the limit, in either direction and
// however the message was cut; no refusal is left out.
func TestFaultsAreNamed(t *testing.T) {
	const ok, get, post = "HTTP/1.1 200 OK\r\n", "GET / HTTP/1.1\r\nHost: a\r\n", "POST / HTTP/1.1\r\nHost: a\r\n"
	const chunks = "Transfer-Encoding: chunked\r\n\r\n"
	met := map[string]bool{}
	for _, tt := range []struct {
		response bool
		in       string
		want     string // of the text
	}{
		// The first line.
		{false, "GE(T / HTTP/1.1\r\n", "method.*first line, byte 0x28"},
		{false, "\r\nGE(T / HTTP/1.1\r\n", "method.*first line, byte 0x28"},
		{false, "\rGET / HTTP/1.1\r\n", "carriage return.*first line, byte 0x47"},
		{false, strings.Repeat("A", 33) + " / HTTP/1.1\r\n", "method.*32 bytes"},
		{false, "GET /a\x01b HTTP/1.1\r\n", "target.*first line, byte 0x01"},
		{false, "GET /" + strings.Repeat("a", 16384) + " HTTP/1.1\r\n", "target.*at most 16384 bytes"},
		{false, "GET foo HTTP/1.1\r\nHost: a\r\n\r\n", "target.*host:port"},
		{false, "GET / HTTP/1.1\n", "request line.*first line, byte 0x0a"},
		{false, "GET / HTTP/1.7\r\n", "request line|version.*first line, byte 0x37"},
		{false, "GET / HTTP/1x1\r\n", "request line.*first line, byte 0x78"},
		{false, "GET http://u@a/ HTTP/1.1\r\nHost: a\r\n\r\n", "authority in the request target"},
		{true, "HTTP/1.1 2x0 OK\r\n", "status line.*first line, byte 0x78"},
		{true, "SSH-2.0\r\n", "status line.*first line, byte 0x53"},
		{true, "HTTP/1.1 200 O\x07K\r\n\r\n", "reason phrase.*first line, byte 0x07"},
		{true, "HTTP/1.1 200 OK\nContent-Length: 2\n\n", "line feed.*in the first line"},
		// Fields.
		{true, ok + "X A: 1\r\n\r\n", "field name.*field 'x a', byte 0x20"},
		{true, ok + "Y: 1\r\nX(A): 1\r\n\r\n", `field name.*field 'x\(a\)', byte 0x28`},
		{true, ok + "X\x1b[31m\": 1\r\n\r\n", `field name.*field 'x\\x1b\[31m\\x22', byte 0x1b`},
		{true, ok + "Secured by Excellent Serv :\r\n\r\n", "field name.*field 'secured by excellent serv ', byte 0x20"}, // nghttp2 698
		{true, ok + "nothing\r\n\r\n", "field name.*field 'nothing', byte 0x0d"},
		{true, ok + strings.Repeat("y", 100) + " z: 1\r\n\r\n", "field name.*field 'yyy.*[.][.][.]', byte 0x20"},
		{true, ok + "X-A: 1\r\n 2\r\n\r\n", "folded.*after field 'x-a', byte 0x20"},
		{true, ok + "\tX: 1\r\n\r\n", "folded.*after the first line, byte 0x09"},
		{true, ok + "X-A: 1\r\nX-B: a\x00b\r\n\r\n", "value.*field 'x-b', byte 0x00"},
		{true, ok + "X-A: a\rb\r\n\r\n", "carriage return.*field 'x-a', byte 0x62"},
		{true, ok + "X-A: a\r\n\rb\r\n\r\n", "carriage return.*empty line, byte 0x62"},
		{true, ok + "X-A: 1\r\nX-B: 2\n\r\n", "line feed.*field 'x-b'"},
		{true, ok + strings.Repeat("x-a: b\r\n", 101), "too many field lines.*at most 100"},
		{true, ok + "x: " + strings.Repeat("b", 61440), "head is too large.*at most 61440 bytes"},
		{false, "GET / HTTP/1.1\r\n\r\n", "Host"},
		{false, get + "Host: b\r\n\r\n", "several Host"},
		{false, "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", "malformed Host"},
		{true, ok + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n", "several Content-Length"},
		{true, ok + "Content-Length: +2\r\n\r\n", "malformed Content-Length"},
		{true, ok + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", "Content-Length together with Transfer-Encoding"},
		{true, ok + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", "malformed Transfer-Encoding"},
		{true, ok + "Transfer-Encoding: gzip\r\n\r\n", "unsupported Transfer-Encoding"},
		{true, "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "Transfer-Encoding in an HTTP/1.0"},
		{true, ok + "Connection: content-length\r\n\r\n", "Connection names"},
		{true, ok + "Connection: a" + strings.Repeat(",b", 32) + "\r\n\r\n", "Connection names too many.*32"},
		// Bodies.
		{true, ok + chunks + "2  \r\n", "chunk size.*byte 0x20"},
		{true, ok + chunks + "1234567890abcdef\r\n", "chunk size.*15 digits"},
		{true, ok + chunks + "2\rok", "carriage return.*chunk size, byte 0x6f"},
		{true, ok + chunks + "2\r\nokay\r\n", "chunk data.*byte 0x61"},
		{true, ok + chunks + "2;a\x02\r\n", "chunk extension.*byte 0x02"},
		{true, ok + chunks + "2;" + strings.Repeat("a", 16385), "chunk extensions.*16384 bytes"},
		{true, ok + chunks + "0\r\nX A: 1\r\n\r\n", "field name.*trailers, field 'x a', byte 0x20"},
		{true, ok + chunks + "0\r\n x: 1\r\n\r\n", "folded.*trailers, before the first field, byte 0x20"},
		{true, ok + chunks + "0\r\na: 1\r\n x: 1\r\n\r\n", "folded.*trailers, after field 'a', byte 0x20"},
		{true, ok + chunks + "0\r\nX-A: 1\x00\r\n\r\n", "value.*trailers, field 'x-a', byte 0x00"},
		{true, ok + chunks + "0\r\nX-A: 1\n", "line feed.*trailers, field 'x-a'"},
		{true, ok + chunks + "0\r\n" + strings.Repeat("x: 1\r\n", 33), "trailer fields.*32"},
		{true, ok + chunks + "0\r\nx: " + strings.Repeat("y", 8192), "trailer section.*8192 bytes"},
		{false, post + chunks + "z", "chunk size.*byte 0x7a"},
	} {
		s := side{response: tt.response}
		whole := s.events([]byte(tt.in))
		err := whole[strings.LastIndex(whole, "error ")+1:]
		if !strings.Contains(whole, "error ") || !match(tt.want, err) {
			t.Errorf("%.60q: %swant %s", tt.in, whole, tt.want)
		}
		for _, c := range []byte(strings.TrimSuffix(err, "\n")) {
			if c < ' ' || c > '~' {
				t.Errorf("%.60q: byte %#x in %q", tt.in, c, err)
			}
		}
		if reason, where, _ := strings.Cut(err, "; "); len(where) > httpmsg.MaxWhere || len(reason) > 200 {
			t.Errorf("%.60q: %d and %d bytes: %s", tt.in, len(reason), len(where), err)
		}
		for i := 1; i < len(tt.in); i += 1 + len(tt.in)/50 {
			if got := s.events([]byte(tt.in), i); got != whole {
				t.Errorf("%.60q cut at %d: %swant %s", tt.in, i, got, whole)
			}
		}
		for _, f := range everyFault() {
			if strings.Contains(err, f.request.Reason) {
				met[f.request.Reason] = true
			}
		}
	}
	for _, f := range everyFault() {
		if !met[f.request.Reason] {
			t.Errorf("no message here is refused with %q", f.request.Reason)
		}
	}
}

// TestErrorIsItsCause: errors of one cause are one to errors.Is, wherever it was, and of two causes, or in two directions, two.
func TestErrorIsItsCause(t *testing.T) {
	all := everyFault()
	for i, f := range all {
		for k, g := range all {
			if got := errors.Is(f.in(true, "here"), g.in(true, "")); got != (i == k) {
				t.Errorf("%q is %q: %v", f.request.Reason, g.request.Reason, got)
			}
		}
		if errors.Is(f.in(false, ""), f.in(true, "")) != (f.request.Status == 502) {
			t.Errorf("%q: the two directions are not told apart", f.request.Reason)
		}
	}
	if errors.Is(badCR.in(true, ""), fmt.Errorf("http1: %s", badCR.request.Reason)) {
		t.Error("another error with the same text is taken for it")
	}
}

func match(pattern, s string) bool { return regexp.MustCompile(pattern).MatchString(s) }

// everyFault are the causes. TestEveryFault holds the list against the source.
func everyFault() []*fault {
	return []*fault{
		badLineEnd, badCR, badMethod, longMethod, badTarget, longTarget, badForm, badVersion, otherVersion, badStatusLine,
		badReason, longHead, manyFields, badName, folded, badValue, noHost, manyHosts, badHost, badAuthority, badLength,
		manyLengths, badCoding, otherCoding, oldCoding, twoFramings, badOption, manyOptions, badChunkSize, longChunkSize,
		badChunkEnd, badExtension, longExtensions, longTrailers, manyTrailers,
	}
}

// TestEveryFault: a cause that is added is in the list above, and so in the tables that go by it.
func TestEveryFault(t *testing.T) {
	src, err := os.ReadFile("http1.go")
	if err != nil {
		t.Fatal(err)
	}
	if n := len(regexp.MustCompile(`(?m)^\t\w+ += newFault\(`).FindAll(src, -1)); n != len(everyFault()) {
		t.Errorf("%d causes in http1.go, %d in the list", n, len(everyFault()))
	}
}
