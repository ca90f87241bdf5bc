package sniff

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// tap is a net.Conn that keeps what is written and never answers.
type tap struct{ bytes.Buffer }

func (*tap) Read([]byte) (int, error)         { return 0, io.EOF }
func (*tap) Close() error                     { return nil }
func (*tap) LocalAddr() net.Addr              { return nil }
func (*tap) RemoteAddr() net.Addr             { return nil }
func (*tap) SetDeadline(time.Time) error      { return nil }
func (*tap) SetReadDeadline(time.Time) error  { return nil }
func (*tap) SetWriteDeadline(time.Time) error { return nil }

// clientHelloOf is the record that crypto/tls opens a connection with.
func clientHelloOf(t testing.TB, c *tls.Config) []byte {
	t.Helper()
	var w tap
	if err := tls.Client(&w, c).Handshake(); err == nil {
		t.Fatal("handshake without a server")
	}
	return w.Bytes()
}

func clientHello13(t testing.TB, name string, alpn []string) []byte {
	return clientHelloOf(t, &tls.Config{ServerName: name, InsecureSkipVerify: name == "", NextProtos: alpn})
}

// records lays a handshake message out in records of n bytes.
func records(hs []byte, n int) (out []byte) {
	for len(hs) > 0 {
		p := hs[:min(n, len(hs))]
		hs = hs[len(p):]
		out = append(out, recordHandshake, 3, 1, byte(len(p)>>8), byte(len(p)))
		out = append(out, p...)
	}
	return out
}

// recordsAt lays it out in two records, cut at i.
func recordsAt(hs []byte, i int) []byte {
	return append(records(hs[:i], maxFragment), records(hs[i:], maxFragment)...)
}

var errStop = errors.New("seen enough")

// byServer is what crypto/tls, as a server, reads in the same bytes: the oracle.
func byServer(t testing.TB, b []byte) string {
	t.Helper()
	want := "no hello"
	in := &scripted{r: bytes.NewReader(b)}
	err := tls.Server(in, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		want = "tls"
		if h.ServerName != "" {
			want += " sni=" + h.ServerName
		}
		if len(h.SupportedProtos) > 0 {
			want += " alpn=" + strings.Join(h.SupportedProtos, ",")
		}
		return nil, errStop
	}}).Handshake()
	if err == nil {
		t.Fatal("the handshake went through")
	}
	return want
}

type scripted struct {
	tap
	r io.Reader
}

func (s *scripted) Read(p []byte) (int, error) { return s.r.Read(p) }

func configs() map[string]*tls.Config {
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprintf("proto-%d", i))
	}
	long := strings.Repeat(strings.Repeat("a", 62)+".", 4)[:251] + "zz"
	return map[string]*tls.Config{
		"plain":         {ServerName: "cart.shop.example"},
		"no name":       {InsecureSkipVerify: true},
		"alpn":          {ServerName: "cart", NextProtos: []string{"h2", "http/1.1"}},
		"alpn, no name": {InsecureSkipVerify: true, NextProtos: []string{"h2"}},
		"long name":     {ServerName: long, NextProtos: []string{"h2"}},
		"many alpn":     {ServerName: "cart", NextProtos: many},
		"long alpn":     {ServerName: "cart", NextProtos: []string{strings.Repeat("x", 255), "h2"}},
		"tls 1.2":       {ServerName: "cart", MaxVersion: tls.VersionTLS12, NextProtos: []string{"h2"}},
		"classic":       {ServerName: "cart", CurvePreferences: []tls.CurveID{tls.X25519}},
		"post-quantum":  {ServerName: "cart", CurvePreferences: []tls.CurveID{tls.X25519MLKEM768}, NextProtos: []string{"h2"}},
	}
}

func TestHelloAgainstCryptoTLS(t *testing.T) {
	for name, c := range configs() {
		t.Run(name, func(t *testing.T) {
			b := clientHelloOf(t, c)
			want := byServer(t, b)
			if name == "post-quantum" && len(b) < 1300 {
				t.Errorf("the hello has only %d bytes: no post-quantum share", len(b))
			}
			if got := show(Detect(b)); got != want {
				t.Fatalf("got  %s\nwant %s", got, want)
			}
			onlyWhileItMatters(t, b)
			everyPrefix(t, b)
			if name == "many alpn" {
				return // more names than the scratch space holds: TestSplitALPN
			}
			for i := 1; i < len(b)-recordHeader; i++ {
				if got := show(Detect(recordsAt(b[recordHeader:], i))); got != want {
					t.Fatalf("cut into records at %d:\ngot  %s\nwant %s", i, got, want)
				}
			}
			for _, n := range []int{1, 2, 3, 5, 64, 512} {
				split := records(b[recordHeader:], n)
				if len(split) > MaxPeek {
					continue
				}
				if got := show(Detect(split)); got != want {
					t.Fatalf("in records of %d:\ngot  %s\nwant %s", n, got, want)
				}
				if n >= 64 {
					everyPrefix(t, split)
				}
			}
		})
	}
}

// onlyWhileItMatters checks that b is waited for as long as what comes can change the
// answer, and not longer: while More is set there is another way to go on that ends in
// another answer.
func onlyWhileItMatters(t *testing.T, b []byte) {
	t.Helper()
	want := fmt.Sprint(columns(Detect(b).Hello))
	random := rand.New(rand.NewPCG(1, 2))
	for i := range len(b) + 1 {
		if i > 600 && i < len(b)-40 {
			continue // inside of the key shares
		}
		if !Detect(b[:i]).More {
			break
		}
		matters := i < len(b)-1 && fmt.Sprint(columns(Detect(append(bytes.Clone(b[:i]), bytes.Repeat([]byte{255}, len(b)-i)...)).Hello)) != want
		for try := 0; try < 50 && !matters; try++ {
			end := append(bytes.Clone(b[:i]), randomBytes(random, len(b)-i)...)
			matters = fmt.Sprint(columns(Detect(end).Hello)) != want
		}
		if !matters {
			t.Fatalf("more after %d of %d bytes, and it changes nothing", i, len(b))
		}
	}
}

// TestHelloMoot: the end of a hello that cannot change anything is not waited for, unless
// it is to come in another record, which may be none.
func TestHelloMoot(t *testing.T) {
	shares := func(n int) []byte {
		return ext(extKeyShare, append([]byte{byte((n + 4) >> 8), byte(n + 4), 0x11, 0xec, byte(n >> 8), byte(n)}, make([]byte, n)...)...)
	}
	for _, tt := range []struct {
		name  string
		msg   []byte
		early int
		want  string
	}{
		{"padding", build(nameExt("cart"), ext(21, make([]byte, 700)...)), 700, "cart - - - -"},
		{"post-quantum share", build(nameExt("cart"), shares(1216)), 1216, "cart - - 11ec -"},
		{"ECH", build(nameExt("cart"), ext(extECH, make([]byte, 200)...)), 200, "cart - ech - -"},
		{"another name", build(alpnExt("h2"), ext(extServerName, 0, 13, 0, 0, 4, 'c', 'a', 'r', 't', 7, 0, 3, 'x', 'y', 'z')), 3, "cart h2 - - -"},
		{"nothing of it", build(ext(21, make([]byte, 90)...), nameExt("cart")), 0, "cart - - - -"},
	} {
		b := records(tt.msg, maxFragment)
		at := finalAt(b)
		if got := strings.Join(columns(Detect(b[:at]).Hello), " "); at != len(b)-tt.early || got != tt.want {
			t.Errorf("%s: %s after %d of %d bytes, want %s %d earlier", tt.name, got, at, len(b), tt.want, tt.early)
		}
		onlyWhileItMatters(t, b)
		if tt.early > 1 {
			split := recordsAt(tt.msg, len(tt.msg)-1)
			if at := finalAt(split); at != len(split)-1 {
				t.Errorf("%s in two records: final after %d of %d bytes", tt.name, at, len(split))
			}
			everyPrefix(t, split)
		}
	}
}

// TestSplitALPN: where a list lies across records, what the scratch space has no
// room for is left out.
func TestSplitALPN(t *testing.T) {
	b := clientHelloOf(t, configs()["many alpn"])
	r := Detect(records(b[recordHeader:], 64))
	n, size := 0, 0
	for p := range r.ALPN.All() {
		if want := fmt.Sprintf("proto-%d", n); string(p) != want {
			t.Fatalf("name %d is %q", n, p)
		}
		n, size = n+1, size+1+len(p)
	}
	if size > keptALPN || size < keptALPN-10 || n == 100 {
		t.Errorf("%d names of %d bytes kept", n, size)
	}
	if string(r.SNI) != "cart" {
		t.Errorf("sni %q", r.SNI)
	}
}

// build makes a ClientHello message with these extensions and nothing special else.
func build(exts ...[]byte) []byte {
	body := append([]byte{3, 3}, make([]byte, 32)...)
	body = append(body, 0, 0, 2, 0x13, 0x01, 1, 0)
	all := bytes.Join(exts, nil)
	body = append(body, byte(len(all)>>8), byte(len(all)))
	body = append(body, all...)
	return append([]byte{clientHello, 0, byte(len(body) >> 8), byte(len(body))}, body...)
}

func ext(kind int, body ...byte) []byte {
	return append([]byte{byte(kind >> 8), byte(kind), byte(len(body) >> 8), byte(len(body))}, body...)
}

func nameExt(names ...string) []byte {
	var l []byte
	for _, n := range names {
		l = append(append(l, nameHost, byte(len(n)>>8), byte(len(n))), n...)
	}
	return ext(extServerName, append([]byte{byte(len(l) >> 8), byte(len(l))}, l...)...)
}

func alpnExt(names ...string) []byte {
	var l []byte
	for _, n := range names {
		l = append(append(l, byte(len(n))), n...)
	}
	return ext(extALPN, append([]byte{byte(len(l) >> 8), byte(len(l))}, l...)...)
}

// none is what a malformed hello says.
const none = "tls"

type helloCase struct {
	name string
	in   []byte
	want string
}

func helloCases() []helloCase {
	grease := ext(0x0a0a)
	hs := func(exts ...[]byte) []byte { return records(build(exts...), maxFragment) }
	bad := func(b []byte, at int, v byte) []byte { b[at] = v; return b }
	return []helloCase{
		{"names", hs(nameExt("cart"), alpnExt("h2", "http/1.1")), "tls sni=cart alpn=h2,http/1.1"},
		{"grease", hs(grease, nameExt("cart"), alpnExt("\x0a\x0a", "h2"), ext(0xfafa, 0)), "tls sni=cart alpn=\n\n,h2"},
		{"ech outer", hs(ext(0xfe0d, 0, 0, 1, 0, 1, 9), nameExt("public.example")), "tls sni=public.example"},
		{"ip literal", hs(nameExt("192.0.2.7")), "tls sni=192.0.2.7"},
		{"dot kept", hs(nameExt("cart.")), "tls sni=cart."},
		{"no extensions", hs(), none},
		{"empty block left out", records(append([]byte{1, 0, 0, 41, 3, 3}, append(make([]byte, 32), 0, 0, 2, 0x13, 0x01, 1, 0)...), maxFragment), none},
		{"ssl3 record", bad(hs(nameExt("cart")), 2, 0), "tls sni=cart"},
		{"other name type", hs(ext(extServerName, 0, 9, 7, 0, 1, 'x', 0, 0, 2, 'm', 'e')), "tls sni=me"},
		{"name over 255", hs(nameExt(strings.Repeat("a", 256)), alpnExt("h2")), "tls alpn=h2"},
		{"name of 255", hs(nameExt(strings.Repeat("a", 255))), "tls sni=" + strings.Repeat("a", 255)},

		{"two names", hs(nameExt("a", "b"), alpnExt("h2")), none},
		{"two name extensions", hs(nameExt("a"), nameExt("a"), alpnExt("h2")), none},
		{"two alpn extensions", hs(nameExt("a"), alpnExt("h2"), alpnExt("h2")), none},
		{"empty name", hs(nameExt("")), none},
		{"empty name extension", hs(alpnExt("h2"), ext(extServerName)), none},
		{"empty alpn", hs(nameExt("a"), ext(extALPN, 0, 0)), none},
		{"empty alpn name", hs(nameExt("a"), ext(extALPN, 0, 1, 0)), none},
		{"alpn name too long", hs(nameExt("a"), ext(extALPN, 0, 3, 3, 'h', '2')), none},
		{"alpn list too short", hs(nameExt("a"), ext(extALPN, 0, 2, 2, 'h', '2')), none},
		{"bytes after names", hs(ext(extServerName, 0, 4, 0, 0, 1, 'a', 9)), none},
		{"name list too long", hs(ext(extServerName, 0, 6, 0, 0, 1, 'a')), none},
		{"extension too long", hs(nameExt("a"), []byte{0, 5, 0, 9, 1}), none},
		{"extension cut", hs(nameExt("a"), []byte{0, 5, 0}), none},
		{"block too short", bad(hs(nameExt("a")), 5+4+2+32+7+1, 1), none},
		{"session id too long", bad(hs(nameExt("a")), 5+4+2+32, 255), none},
		{"hello of nothing", records([]byte{1, 0, 0, 0}, 9), none},
		{"alert inside", append(records([]byte{1, 0, 1, 0, 3, 3}, 99), 21, 3, 1, 0, 2, 1, 0), none},
		{"empty record inside", append(records([]byte{1, 0, 1, 0, 3, 3}, 99), 22, 3, 1, 0, 0), none},
	}
}

func TestHello(t *testing.T) {
	for _, tt := range helloCases() {
		t.Run(tt.name, func(t *testing.T) {
			if got := show(Detect(tt.in)); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
			everyPrefix(t, tt.in)
			if tt.want != none || len(tt.in) < 20 || strings.Contains(tt.name, "inside") {
				return
			}
			if got := show(Detect(records(tt.in[recordHeader:], 7))); got != tt.want {
				t.Errorf("in records of 7: got %s, want %s", got, tt.want)
			}
		})
	}
}

func TestHelloNotComplete(t *testing.T) {
	b := records(build(nameExt("cart"), alpnExt("h2"), ext(0xff00, make([]byte, 300)...), ext(extVersions, 2, 3, 4)), maxFragment)
	var s State
	for _, tt := range []struct {
		n          int
		want, last string
	}{
		{3, "none more", "opaque"},
		{5, "none more", "opaque"},
		{6, "tls more", "tls"},
		{60, "tls more", "tls"},
		{70, "tls more", "tls sni=cart"},
		{100, "tls more", "tls sni=cart alpn=h2"},
		{len(b), "tls sni=cart alpn=h2", "tls sni=cart alpn=h2"},
	} {
		last, got := show(s.Last(b[:tt.n])), show(s.Detect(b[:tt.n]))
		if got != tt.want || last != tt.last {
			t.Errorf("%d bytes: %s and last %s, want %s and %s", tt.n, got, last, tt.want, tt.last)
		}
	}
}

// TestHelloCutAnywhere: a part of a name is no name.
func TestHelloCutAnywhere(t *testing.T) {
	b := records(build(nameExt("cart"), alpnExt("h2", "http/1.1"), ext(extKeyShare, 0, 10, 0, 23, 0, 1, 0, 0, 29, 0, 1, 9), ext(extVersions, 4, 3, 4, 3, 3)), maxFragment)
	whole := columns(Detect(b).Hello)
	was := 0
	for i := range len(b) + 1 {
		var s State
		shown := 0
		for k, c := range columns(s.Last(b[:i]).Hello) {
			if c != "-" {
				shown++
				if c != whole[k] {
					t.Errorf("%d bytes: %q of %q", i, c, whole[k])
				}
			}
		}
		if shown < was {
			t.Errorf("%d bytes show less than %d", i, i-1)
		}
		was = shown
	}
	if was != 4 {
		t.Errorf("the whole hello shows %d things: %q", was, whole)
	}
}

// TestNumbers: what looks like GREASE and is none is kept, and no more than there is room for.
func TestNumbers(t *testing.T) {
	var many []byte
	for i := range 40 {
		many = append(many, 3, byte(i))
	}
	for _, tt := range []struct {
		list []byte
		want int
	}{{[]byte{0x0a, 0x1a, 0x1a, 0x0a, 0x0a, 0x0b}, 3}, {[]byte{0x0a, 0x0a, 0xfa, 0xfa, 3, 4}, 1}, {many, maxNumbers}} {
		r := Detect(records(build(ext(extVersions, append([]byte{byte(len(tt.list))}, tt.list...)...)), maxFragment))
		if len(r.Versions) != tt.want {
			t.Errorf("%x: %s", tt.list, numbersOf(r.Versions))
		}
	}
}

func TestHelloOverMaxPeek(t *testing.T) {
	b := records(build(nameExt("cart"), ext(0xff00, make([]byte, 20000)...)), 4096)
	if got := show(Detect(b[:MaxPeek-1])); got != "tls more" {
		t.Errorf("before the end: %s", got)
	}
	if got := show(Detect(b[:MaxPeek])); got != "tls sni=cart" {
		t.Errorf("at the end: %s", got)
	}
	everyPrefix(t, b)
}

// FuzzHello holds whole hellos against crypto/tls: what it reads as a server, we read
// the same; whatever makes us name something is no surprise to it.
func FuzzHello(f *testing.F) {
	for _, c := range configs() {
		f.Add(clientHelloOf(f, c))
	}
	f.Add(records(build(nameExt("cart"), alpnExt("h2"), ext(extVersions, 2, 3, 4)), maxFragment))
	f.Add(records(build(nameExt("cart"), ext(extECH, 1), ext(0x0a0a), ext(extVersions, 6, 0x1a, 0x1a, 3, 4, 3, 3)), 50))
	f.Fuzz(againstCryptoTLS)
}

// FuzzExtensions is FuzzHello for hellos whose outer lengths are right: the input is a list of
// extensions, each a byte for its kind, a byte of length, and its body; and the size of records.
func FuzzExtensions(f *testing.F) {
	kinds := []int{extServerName, extALPN, extVersions, extKeyShare, extECH, 0x0a0a, 21}
	input := func(exts ...[]byte) (b []byte) {
		for _, e := range exts {
			kind := slices.Index(kinds, int(e[0])<<8|int(e[1]))
			b = append(append(b, byte(kind), e[3]), e[4:]...)
		}
		return b
	}
	f.Add(input(nameExt("cart"), alpnExt("h2", "http/1.1"), ext(extVersions, 6, 0x1a, 0x1a, 3, 4, 3, 3)), uint16(0))
	f.Add(input(ext(extKeyShare, 0, 10, 0x2a, 0x2a, 0, 1, 0, 0, 29, 0, 1, 9), ext(extECH, 1, 2), ext(21, 0)), uint16(7))
	f.Add(input(ext(extServerName, 0, 9, 7, 0, 1, 'x', 0, 0, 2, 'm', 'e'), ext(0x0a0a)), uint16(1))
	f.Fuzz(func(t *testing.T, b []byte, size uint16) {
		var exts [][]byte
		for len(b) >= 2 {
			n := min(int(b[1]), len(b)-2)
			exts = append(exts, ext(kinds[int(b[0])%len(kinds)], b[2:2+n]...))
			b = b[2+n:]
		}
		msg := build(exts...)
		whole := records(msg, maxFragment)
		split := records(msg, 1+int(size)%maxFragment)
		if len(split) > MaxPeek || len(msg) > maxFragment {
			return
		}
		againstCryptoTLS(t, whole)
		againstCryptoTLS(t, split)
		one, two := Detect(whole), Detect(split)
		if n := len(one.ALPN.list); n > keptALPN { // of pieces not all is kept
			two.ALPN = one.ALPN
		}
		if full(one) != full(two) {
			t.Errorf("whole %s\nsplit %s", full(one), full(two))
		}
		// What is not kept, and a hello that says nothing, looks the same in the end whatever comes.
		if h := one.Hello; fmt.Sprint(columns(h)) != "[- - - - -]" && len(h.Versions) < maxNumbers && len(h.KeyShares) < maxNumbers {
			onlyWhileItMatters(t, whole)
		}
	})
}

func againstCryptoTLS(t *testing.T, b []byte) {
	t.Helper()
	r := Detect(b)
	if r.More || r.Proto != TLS || len(b) > MaxPeek {
		return
	}
	var want *tls.ClientHelloInfo
	in := &scripted{r: bytes.NewReader(b)}
	tls.Server(in, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		want = h
		return nil, errStop
	}}).Handshake()
	if want == nil { // it is stricter in what it does not tell us
		return
	}
	if got := string(bytes.TrimSuffix(r.SNI, []byte{'.'})); got != want.ServerName {
		t.Errorf("sni %q, crypto/tls %q", got, want.ServerName)
	}
	var alpn []string
	size := 0
	for n := range r.ALPN.All() {
		alpn = append(alpn, string(n))
		size += 1 + len(n)
	}
	if len(alpn) < len(want.SupportedProtos) && size > keptALPN-1-maxName {
		want.SupportedProtos = want.SupportedProtos[:len(alpn)] // in pieces, and not all kept
	}
	if !slices.Equal(alpn, want.SupportedProtos) {
		t.Errorf("alpn %q, crypto/tls %q", alpn, want.SupportedProtos)
	}
	if got, want := r.ECH, slices.Contains(want.Extensions, extECH); got != want {
		t.Errorf("ech %v, crypto/tls %v", got, want)
	}
	var versions []uint16
	if slices.Contains(want.Extensions, extVersions) {
		for _, v := range want.SupportedVersions {
			if v&0x0f0f != 0x0a0a || v>>8 != v&255 {
				versions = append(versions, v)
			}
		}
	}
	if got, want := numbersOf(r.Versions), numbersOf(versions[:min(len(versions), maxNumbers)]); got != want {
		t.Errorf("versions %s, crypto/tls %s", got, want)
	}
	if (r.KeyShares != nil) && !slices.Contains(want.Extensions, extKeyShare) {
		t.Errorf("shares %s of no extension", numbersOf(r.KeyShares))
	}
}
