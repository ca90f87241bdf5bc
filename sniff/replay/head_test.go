package replay

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"aether/sniff"
)

// http2Frame is an HTTP/2 frame of stream 1.
func http2Frame(kind, flags byte, payload string) string {
	return string([]byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags, 0, 0, 0, 1}) + payload
}

// TestHeads: the client's first bytes are kept up to the end of the first head, however
// they were cut and reordered, and only where they are asked for and HTTP.
func TestHeads(t *testing.T) {
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	long := "GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("x", sniff.MaxPeek)
	body := strings.Repeat("b", 5000)
	for _, tt := range []struct{ name, head, rest string }{
		{"http/1.1", "GET /x HTTP/1.1\r\nHost: cart\r\nX: 1\r\n\r\n", body},
		{"host last", "POST /x HTTP/1.1\r\nX: 1\r\nHost: cart\r\n\r\n", "\r\n\r\n" + body},
		{"bare line feeds", "GET /x HTTP/1.0\nHost: cart\n\n", body},
		{"no fields", "GET /x HTTP/1.0\r\n\r\n", ""},
		{"no end", "GET /x HTTP/1.1\r\nHost: cart\r\nX: 1\r\n", ""},
		{"no end ever", long[:sniff.MaxPeek], long[sniff.MaxPeek:] + body},
		{"h2c", preface + http2Frame(4, 0, "") + http2Frame(8, 0, "\x00\x00\xff\xff") + http2Frame(1, 4, "\x82\x86\x84"), http2Frame(0, 1, body)},
		{"h2c, continued", preface + http2Frame(4, 0, "") + http2Frame(1, 0, "\x82") + http2Frame(9, 0, "\x86") + http2Frame(9, 4, "\x84"), http2Frame(0, 1, body)},
		{"h2c, cut", preface + http2Frame(4, 0, "") + http2Frame(1, 4, "\x82\x86\x84")[:10], ""},
		{"tls", "", "\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03" + body},
		{"opaque", "", "SSH-2.0-x\r\n\r\n" + body},
		{"nothing", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			stream := tt.head + tt.rest
			for seed := range uint64(50) {
				r := rand.New(rand.NewPCG(seed, 5))
				var segs [][]byte
				for at := 0; at < len(stream); {
					n := min(1+r.IntN(1+len(stream)/3), len(stream)-at)
					segs = append(segs, up(hasACK, at, 0, stream[at:at+n]))
					at += n
				}
				r.Shuffle(len(segs), func(i, j int) { segs[i], segs[j] = segs[j], segs[i] })
				file := pcap(t, layers.LinkTypeRaw, append(shake(), segs...)...)
				for _, heads := range []bool{true, false} {
					want := tt.head
					if !heads {
						want = ""
					}
					for f, err := range Read(bytes.NewReader(file), Options{Heads: heads}) {
						if err != nil || string(f.Head) != want || (f.Head == nil) != (want == "") {
							t.Fatalf("seed %d, asked for %v: %v, %d bytes, want %d: %.80q", seed, heads, err, len(f.Head), len(want), f.Head)
						}
						if f.Proto != sniff.None && !strings.HasPrefix(tt.name, "h2c") && f.Proto != sniff.Detect([]byte(stream)).Proto && f.Proto != sniff.TLS {
							t.Fatalf("seed %d: %s", seed, f.Proto)
						}
					}
				}
			}
		})
	}
}
