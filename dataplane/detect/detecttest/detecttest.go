// Package detecttest makes the first bytes of HTTP/2 clients, for tests.
package detecttest

import (
	"aether/dataplane/hpack"
	"aether/sniff"
)

// Frame is a frame of stream 1, or of the connection.
func Frame(kind, flags byte, stream byte, payload string) string {
	return string([]byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags, 0, 0, 0, stream}) + payload
}

// Block is a field block of name, value, name, value.
func Block(fields ...string) string {
	e := hpack.NewEncoder()
	b := e.Begin(nil)
	for i := 0; i < len(fields); i += 2 {
		b = e.Field(b, []byte(fields[i]), []byte(fields[i+1]))
	}
	return string(b)
}

// Get is what an HTTP/2 client sends that asks for / of authority.
func Get(authority string) string {
	return sniff.Preface + Frame(4, 0, 0, "") + Frame(1, 5, 1, Block(":method", "GET", ":scheme", "http", ":path", "/", ":authority", authority))
}
