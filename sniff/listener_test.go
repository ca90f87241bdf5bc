package sniff

import (
	"strings"
	"testing"
)

// TestListenerTables compares with what upstream's capture listener answered when it was
// measured (design record 043, "Why the dialled port decides" and "The inspectors and server-first
// protocols"; contract 4.2). There the listener's two inspectors play the part of this package:
// "HTTP" means that a chain for sniffed HTTP took the connection, "raw" that none did
// and it went by the address or through. An upstream of "" was not measured.
func TestListenerTables(t *testing.T) {
	hello := string(clientHello13(t, "b", []string{"h2", "http/1.1"}))
	const settings = "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	for _, tt := range []struct {
		row      string
		bytes    string // what the client sends first
		upstream string
		want     Proto
		after    int // bytes that it takes to tell; -1: they do not tell, Last answers
		note     string
	}{
		{"L1 HTTP to B:8080", "GET / HTTP/1.1\r\nHost: b\r\n\r\n", "HTTP 1 ms", HTTP11, 16, ""},
		{"L1 HTTP to B:9000", "GET / HTTP/1.1\r\nHost: b:9000\r\n\r\n", "raw 2 ms", HTTP11, 16,
			"the inspector found HTTP; the chain match lost it, which decide does not"},
		{"L1 raw bytes to A:9000", "\x10\x2a\x00\x04MQTT", "raw 2 ms", Unknown, 1, "A's port: decide asks for no bytes at all"},
		{"L1 HTTP bytes to A:9000", "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "raw 2 ms", HTTP11, 16, "likewise"},
		{"L2 HTTP to B:8080, port-less Host", "GET / HTTP/1.1\r\nHost: b\r\n\r\n", "HTTP 1 ms", HTTP11, 16, ""},
		{"L2 HTTP to B:8080, Host b:8080", "POST /x HTTP/1.1\r\nHost: b:8080\r\n\r\n", "HTTP 1 ms", HTTP11, 18, ""},
		{"L2 HTTP to B:8080, Host b:9000", "GET / HTTP/1.1\r\nHost: b:9000\r\n\r\n", "HTTP 1 ms", HTTP11, 16, "the 421 is decide's"},
		{"L2 non-HTTP bytes to B:9000", "\x00\x00\x00\x08ping", "raw 2 ms", Unknown, 1, ""},
		{"L2 HTTP to B:7777", "GET / HTTP/1.1\r\nHost: b\r\n\r\n", "HTTP 1 ms", HTTP11, 16, ""},
		{"L2 h2c with prior knowledge to B:8080", Preface + settings, "HTTP 1 ms", H2C, 24, ""},
		{"L2 TLS ClientHello to B:8080", hello, "raw", TLS, finalAt([]byte(hello)), "its ALPN names http/1.1 and does not matter"},
		{"L2 GET mykey to B:8080", "GET mykey\r\n", "raw 1 ms", Unknown, 10, "no version: not HTTP"},

		{"L3 server-first to A:3306, inspectors off", "", "raw 1 ms", None, -1, "decide asks for no bytes"},
		{"server-first to A:3306", "", "raw 1.00 s", None, -1, "likewise"},
		{"server-first to C:5432", "", "raw 1.00 s", None, -1, "the race for the first byte ends it"},
		{"a 4-byte first write to A:9000", "ping", "raw 1.00 s", Unknown, -1, "decide asks for no bytes; they may be a method"},
		{"a 4-byte first write, no letters", "\x01\x02\x03\x04", "", Unknown, 1, "upstream's needs some 6 bytes for any answer"},
		{"a silent client on B:8080", "", "raw 1.00 s", None, -1, ""},
		{"a 5-byte first write", "GET /", "", Unknown, -1, "the rest may come: wait"},

		{"HTTP/1.0", "GET / HTTP/1.0\r\n\r\n", "", HTTP10, 16, "contract 4.2: HTTP, on any port"},
		{"HTTP/0.9", "GET /\r\n", "", Unknown, 6, ""},
		{"no version, spaces", "GET / \r\n", "", Unknown, 7, ""},
		{"HTTP/2.0 without the preface", "GET / HTTP/2.0\r\n", "", Unknown, 12, ""},
		{"HTTP/1.2", "GET / HTTP/1.2\r\n", "", Unknown, 14, ""},
		{"absolute-form", "GET http://b/ HTTP/1.1\r\n", "", HTTP11, 24, ""},
		{"CONNECT", "CONNECT b:443 HTTP/1.1\r\n", "", HTTP11, 24, ""},
		{"OPTIONS *", "OPTIONS * HTTP/1.1\r\n", "", HTTP11, 20, ""},
		{"a method of its own", "PURGE /x HTTP/1.1\r\n", "", HTTP11, 19, ""},
		{"a method in lower case", "get / HTTP/1.1\r\n", "", HTTP11, 16, "methods are case-sensitive tokens; which exist is for the server"},
		{"LF alone", "GET / HTTP/1.1\nHost: b\n\n", "", HTTP11, 15, "RFC 9112 section 2.2"},
		{"an empty line before", "\r\nGET / HTTP/1.1\r\n", "", HTTP11, 18, "RFC 9112 section 2.2"},
		{"eight empty lines before", strings.Repeat("\r\n", 8) + "GET / HTTP/1.1\r\n", "", HTTP11, 32, "RFC 9112 section 2.2: at least one; decision 062"},
		{"nine empty lines before", strings.Repeat("\r\n", 9) + "GET / HTTP/1.1\r\n", "", Unknown, 17, "as the proxy port's codec has it; decision 062"},
		{"an empty line of LF before", "\nGET / HTTP/1.1\r\n", "", Unknown, 1, "the same"},
		{"two spaces", "GET  / HTTP/1.1\r\n", "", Unknown, 5, ""},
		{"a response", "HTTP/1.1 200 OK\r\n", "", Unknown, 5, ""},
		{"redis", "*1\r\n$4\r\nPING\r\n", "", Unknown, 3, ""},
		{"SSH", "SSH-2.0-OpenSSH_9.6\r\n", "", Unknown, 20, ""},
		{"PROXY protocol", "PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n", "", Unknown, 12, ""},
	} {
		t.Run(tt.row, func(t *testing.T) {
			b := []byte(tt.bytes)
			var s State
			if got := s.Last(b).Proto; got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
			if at := finalAt(b); at != tt.after {
				t.Errorf("told after %d bytes, want %d", at, tt.after)
			}
			http := tt.want == HTTP10 || tt.want == HTTP11 || tt.want == H2C
			if tt.upstream != "" && http != (tt.upstream[0] == 'H') && tt.note == "" {
				t.Errorf("upstream: %s, ours: %s, and no note why", tt.upstream, tt.want)
			}
		})
	}
}
