package detect

import (
	"strings"
	"testing"

	"aether/dataplane/hpack"
	"aether/sniff"
)

// h2Frame is a frame of stream 1, or of the connection.
func h2Frame(kind, flags byte, stream byte, payload string) string {
	return string([]byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags, 0, 0, 0, stream}) + payload
}

// h2Block is a field block of name, value, name, value.
func h2Block(fields ...string) string {
	e := hpack.NewEncoder()
	b := e.Begin(nil)
	for i := 0; i < len(fields); i += 2 {
		b = e.Field(b, []byte(fields[i]), []byte(fields[i+1]))
	}
	return string(b)
}

// h2Get is what an HTTP/2 client says that asks for / of authority.
func h2Get(authority string) string {
	return sniff.Preface + h2Frame(4, 0, 0, "") + h2Frame(1, 5, 1, h2Block(":method", "GET", ":scheme", "http", ":path", "/", ":authority", authority))
}

// TestH2First: the authority is found in whatever frames, however they are cut, and each byte is gone through once.
func TestH2First(t *testing.T) {
	block := h2Block(":method", "GET", ":scheme", "http", ":path", "/", ":authority", "cart:8080", "x", strings.Repeat("y", 100))
	settings, pings := h2Frame(4, 0, 0, "\x00\x03\x00\x00\x00\x64"), strings.Repeat(h2Frame(6, 0, 0, "12345678"), 50)
	for _, tt := range []struct{ name, frames, want string }{
		{"plain", settings + h2Frame(1, 5, 1, block), "cart:8080"},
		{"no settings, pings", pings + h2Frame(1, 4, 1, block), "cart:8080"},
		{"padded, with a priority", settings + h2Frame(1, 4|8|32, 1, "\x03\x00\x00\x00\x00\x10"+block+"\x00\x00\x00"), "cart:8080"},
		{"continued", settings + h2Frame(1, 1, 1, block[:10]) + h2Frame(9, 0, 1, "") + h2Frame(9, 4, 1, block[10:]), "cart:8080"},
		{"host alone", settings + h2Frame(1, 5, 1, h2Block(":method", "GET", ":path", "/", "host", "cart")), "cart"},
		{"both", settings + h2Frame(1, 5, 1, h2Block("host", "b", ":authority", "a")), "a"},
		{"an authority that is none", settings + h2Frame(1, 5, 1, h2Block(":authority", "u@cart:0")), "u@cart:0"},
		{"none", settings + h2Frame(1, 5, 1, h2Block(":method", "GET")), ""},
		{"padding without an end", settings + h2Frame(1, 4|8, 1, "\x7f\x82"), ""},
		{"a block that is none", settings + h2Frame(1, 4, 1, "\xff\xff\xff\xff\xff\xff"), ""},
		{"continued by nothing", settings + h2Frame(1, 0, 1, block) + settings, ""},
		{"a frame that is too long", "\x01\x00\x00\x00\x00\x00\x00\x00\x00", ""},
	} {
		b := []byte(sniff.Preface + tt.frames)
		var whole authority
		if host, more := whole.find(b); more || host != tt.want {
			t.Errorf("%s: %q, more %v", tt.name, host, more)
		}
		var f authority
		for i := len(sniff.Preface); ; i++ {
			host, more := f.find(b[:i])
			if !more {
				if host != tt.want {
					t.Errorf("%s: byte by byte %q", tt.name, host)
				}
				break
			}
			if i == len(b) {
				t.Errorf("%s: more", tt.name)
				break
			}
		}
	}
	// A client that trickles frames costs nothing for what it has sent before.
	b := []byte(sniff.Preface + strings.Repeat(h2Frame(6, 0, 0, "12345678"), 900))
	var f authority
	f.find(b[:len(b)-1])
	was := f.at
	if n := testing.AllocsPerRun(100, func() { f.find(b) }); n != 0 || was != len(b)-17 || f.at != len(b) {
		t.Errorf("%v allocations, at %d and then %d of %d", n, was, f.at, len(b))
	}
}
