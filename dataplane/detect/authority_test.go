package detect

import (
	"strings"
	"testing"

	"aether/dataplane/detect/detecttest"
	"aether/sniff"
)

// TestAuthority: the authority is found in whatever frames, however they are cut, and each byte is gone through once.
func TestAuthority(t *testing.T) {
	block := detecttest.Block(":method", "GET", ":scheme", "http", ":path", "/", ":authority", "cart:8080", "x", strings.Repeat("y", 100))
	settings, pings := detecttest.Frame(4, 0, 0, "\x00\x03\x00\x00\x00\x64"), strings.Repeat(detecttest.Frame(6, 0, 0, "12345678"), 50)
	for _, tt := range []struct{ name, frames, want string }{
		{"plain", settings + detecttest.Frame(1, 5, 1, block), "cart:8080"},
		{"no settings, pings", pings + detecttest.Frame(1, 4, 1, block), "cart:8080"},
		{"padded, with a priority", settings + detecttest.Frame(1, 4|8|32, 1, "\x03\x00\x00\x00\x00\x10"+block+"\x00\x00\x00"), "cart:8080"},
		{"continued", settings + detecttest.Frame(1, 1, 1, block[:10]) + detecttest.Frame(9, 0, 1, "") + detecttest.Frame(9, 4, 1, block[10:]), "cart:8080"},
		{"host alone", settings + detecttest.Frame(1, 5, 1, detecttest.Block(":method", "GET", ":path", "/", "host", "cart")), "cart"},
		{"both", settings + detecttest.Frame(1, 5, 1, detecttest.Block("host", "b", ":authority", "a")), "a"},
		{"an authority that is none", settings + detecttest.Frame(1, 5, 1, detecttest.Block(":authority", "u@cart:0")), "u@cart:0"},
		{"none", settings + detecttest.Frame(1, 5, 1, detecttest.Block(":method", "GET")), ""},
		{"padding without an end", settings + detecttest.Frame(1, 4|8, 1, "\x7f\x82"), ""},
		{"a block that is none", settings + detecttest.Frame(1, 4, 1, "\xff\xff\xff\xff\xff\xff"), ""},
		{"continued by nothing", settings + detecttest.Frame(1, 0, 1, block) + settings, ""},
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
	b := []byte(sniff.Preface + strings.Repeat(detecttest.Frame(6, 0, 0, "12345678"), 900))
	var f authority
	f.find(b[:len(b)-1])
	was := f.at
	if n := testing.AllocsPerRun(100, func() { f.find(b) }); n != 0 || was != len(b)-17 || f.at != len(b) {
		t.Errorf("%v allocations, at %d and then %d of %d", n, was, f.at, len(b))
	}
}
