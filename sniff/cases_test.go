package sniff

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"strings"
	"testing"

	"aether/e2e/testseed"
)

// TestCases are the public bug reports that first bytes decide, by their numbers in
// docs/cases.md. What a proxy then does is tested where it does it.
func TestCases(t *testing.T) {
	whole := func(b []byte) string { return full(Detect(b)) }
	hs := func(exts ...[]byte) []byte { return records(build(exts...), maxFragment) }

	t.Run("74 HTTP/1 and h2c on one port", func(t *testing.T) {
		var s State
		for _, tt := range []struct {
			in   string
			want Proto
		}{{Preface, H2C}, {"GET /chat HTTP/1.1\r\nUpgrade: websocket\r\n\r\n", HTTP11}, {"GET / HTTP/1.1\r\nUpgrade: h2c\r\n\r\n", HTTP11}} {
			s = State{}
			if got := s.Detect([]byte(tt.in)); got.Proto != tt.want || got.More {
				t.Errorf("%q: %s", tt.in, show(got))
			}
		}
	})
	t.Run("93 more than 16 KiB that are not TLS", func(t *testing.T) {
		b := make([]byte, 20<<10)
		if got := show(Detect(b)); got != "opaque" || finalAt(b) != 1 {
			t.Errorf("%s after %d bytes", got, finalAt(b))
		}
	})
	t.Run("94 a post-quantum hello cut inside the name", func(t *testing.T) {
		b := clientHelloOf(t, &tls.Config{ServerName: "cart.shop.example", CurvePreferences: []tls.CurveID{tls.X25519MLKEM768}})
		at := bytes.Index(b, []byte("cart.shop")) + 4
		var s State
		if got := show(s.Detect(b[:at])); got != "tls more" {
			t.Errorf("the first segment: %s", got)
		}
		if got := s.Detect(b); got.More || string(got.SNI) != "cart.shop.example" || fmt.Sprint(got.KeyShares) != "[4588]" {
			t.Errorf("both: %s %v", show(got), got.KeyShares)
		}
	})
	for _, n := range []int{1, 2, 500} {
		t.Run(fmt.Sprintf("95 records of %d", n), func(t *testing.T) {
			b := clientHello13(t, "cart.shop.example", []string{"h2"})
			if got, want := whole(records(b[recordHeader:], n)), whole(b); got != want || !strings.Contains(want, "sni=cart.shop.example alpn=h2") {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
	t.Run("96 the handshake header over records", func(t *testing.T) {
		b := clientHello13(t, "cart", nil)
		for i := 1; i <= helloHeader; i++ {
			if got, want := whole(recordsAt(b[recordHeader:], i)), whole(b); got != want {
				t.Errorf("cut after %d bytes: %s", i, got)
			}
		}
	})
	for _, in := range []string{"GET / HTTP/1.1\r\n", Preface} {
		for _, cut := range []int{2, 8} {
			t.Run(fmt.Sprintf("100 %.*s, a pause, the rest", cut, in), func(t *testing.T) {
				var s State
				if r := s.Detect([]byte(in[:cut])); !r.More || r.Proto != None {
					t.Errorf("the first segment: %s", show(r))
				}
				if r := s.Detect([]byte(in)); r.More || r.Proto != HTTP11 && r.Proto != H2C {
					t.Errorf("both: %s", show(r))
				}
			})
		}
	}
	t.Run("103 an IP literal, and no name", func(t *testing.T) {
		if got := show(Detect(hs(nameExt("10.0.0.1")))); got != "tls sni=10.0.0.1" {
			t.Error(got) // as sent: that it is no host name is for who looks it up
		}
		if got := show(Detect(hs())); got != "tls" {
			t.Error(got)
		}
	})
	t.Run("105 the application's own TLS", func(t *testing.T) {
		if got := show(Detect(clientHello13(t, "db.example", []string{"h2"}))); got != "tls sni=db.example alpn=h2" {
			t.Error(got)
		}
	})
	t.Run("106 and 107 the name as it was sent", func(t *testing.T) {
		for _, name := range []string{"Web.Ns.SVC", "svc.ns.svc.cluster.local."} {
			if got := string(Detect(hs(nameExt(name))).SNI); got != name {
				t.Errorf("%q of %q", got, name)
			}
		}
	})
	t.Run("108 a list longer than its extension", func(t *testing.T) {
		b := hs(ext(extServerName, 0xff, 0xff, 0, 0, 4, 'c', 'a', 'r', 't'), alpnExt("h2"))
		if got := whole(b); got != "tls[- - - - -]" {
			t.Error(got)
		}
		if at := finalAt(b); at >= len(b)-10 {
			t.Errorf("told only after %d of %d bytes", at, len(b))
		}
	})
	t.Run("110 GREASE and ECH of random bytes", func(t *testing.T) {
		b := hs(ext(0x1a1a), nameExt("public.example"), ext(extECH, randomBytes(testseed.Rand(t), 180)...),
			ext(extKeyShare, 0, 10, 0x2a, 0x2a, 0, 1, 0, 0, 29, 0, 1, 9), ext(extVersions, 4, 0x3a, 0x3a, 3, 4), ext(0xfafa, 0))
		if got := whole(b); got != "tls sni=public.example[public.example - ech 001d 0304]" {
			t.Error(got)
		}
	})
}
