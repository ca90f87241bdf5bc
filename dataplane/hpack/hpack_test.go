package hpack

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	oracle "golang.org/x/net/http2/hpack"
)

// text shows fields one a line, as the tests compare them.
func text(f []Field) string {
	var b strings.Builder
	for _, f := range f {
		fmt.Fprintf(&b, "%s: %s\n", f.Name, f.Value)
	}
	return b.String()
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestRFC decodes the examples of RFC 7541 appendix C.
func TestRFC(t *testing.T) {
	request := []string{
		":method: GET\n:scheme: http\n:path: /\n:authority: www.example.com\n",
		":method: GET\n:scheme: http\n:path: /\n:authority: www.example.com\ncache-control: no-cache\n",
		":method: GET\n:scheme: https\n:path: /index.html\n:authority: www.example.com\ncustom-key: custom-value\n",
	}
	response := []string{
		":status: 302\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:21 GMT\nlocation: https://www.example.com\n",
		":status: 307\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:21 GMT\nlocation: https://www.example.com\n",
		":status: 200\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:22 GMT\nlocation: https://www.example.com\n" +
			"content-encoding: gzip\nset-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1\n",
	}
	for _, tt := range []struct {
		name   string
		max    int
		blocks []string
		want   []string
		size   int // of the table in the end
	}{
		{"C.3", MaxTable, []string{
			"8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d",
			"8286 84be 5808 6e6f 2d63 6163 6865",
			"8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65",
		}, request, 164},
		{"C.4", MaxTable, []string{
			"8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff",
			"8286 84be 5886 a8eb 1064 9cbf",
			"8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf",
		}, request, 164},
		{"C.6", 256, []string{
			"4882 6402 5885 aec3 771a 4b61 96d0 7abe 9410 54d4 44a8 2005 9504 0b81 66e0 82a6 2d1b ff6e 919d 29ad 1718 63c7 8f0b 97c8 e9ae 82ae 43d3",
			"4883 640e ffc1 c0bf",
			"88c1 6196 d07a be94 1054 d444 a820 0595 040b 8166 e084 a62d 1bff c05a 839b d9ab 77ad 94e7 821d d7f2 e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed 4ee5 b106 3d50 07",
		}, response, 215},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := NewDecoder(0, nil)
			d.t.setMax(tt.max)
			for i, b := range tt.blocks {
				f, err := d.Decode(unhex(t, b), nil)
				if err != nil {
					t.Fatal(err)
				}
				if got := text(f); got != tt.want[i] {
					t.Errorf("block %d\ngot\n%swant\n%s", i, got, tt.want[i])
				}
			}
			if d.t.size != tt.size {
				t.Errorf("table of %d octets, want %d", d.t.size, tt.size)
			}
		})
	}
}

func TestStaticTable(t *testing.T) {
	for i := 1; i <= staticLen; i++ {
		want, err := oracle.NewDecoder(MaxTable, nil).DecodeFull([]byte{0x80 | byte(i)})
		if err != nil {
			t.Fatal(err)
		}
		got, err := NewDecoder(0, nil).Decode(AppendIndexed(nil, i), nil)
		if err != nil || text(got) != fmt.Sprintf("%s: %s\n", want[0].Name, want[0].Value) {
			t.Errorf("index %d: %q %v, want %v", i, text(got), err, want[0])
		}
		if n := staticName(got[0].Name, hash(got[0].Name, 0)); staticText[n][0] != want[0].Name || n > i {
			t.Errorf("staticName(%s) = %d", got[0].Name, n)
		}
	}
}

func TestHuffman(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 2000 {
		b := make([]byte, rng.IntN(40))
		for k := range b {
			if b[k] = byte(rng.Uint32()); i%2 == 0 { // every other string is text
				b[k] = ' ' + b[k]%95
			}
		}
		got, ok := appendHuffman(nil, oracle.AppendHuffmanString(nil, string(b)))
		if !ok || string(got) != string(b) {
			t.Fatalf("%q came back as %q, %v", b, got, ok)
		}
	}
	for _, tt := range []struct{ hex, why string }{
		{"ffffffff", "EOS"},
		{"1fffffffff", "EOS after a symbol"},
		{"ff", "padding of a whole octet"},
		{"1fff", "padding of more than seven bits"},
		{"18", "padding that is not ones"},
		{"07ff", "as before, behind a symbol"},
	} {
		if got, ok := appendHuffman(nil, unhex(t, tt.hex)); ok {
			t.Errorf("%s (%s) read as %q", tt.hex, tt.why, got)
		}
	}
}

func FuzzHuffman(f *testing.F) {
	f.Add([]byte("\xf1\xe3\xc2\xe5\xf2:k\xa0\xab\x90\xf4\xff"))
	f.Add([]byte("\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		want, err := oracle.HuffmanDecodeToString(b)
		got, ok := appendHuffman(nil, b)
		if ok != (err == nil) || ok && string(got) != want {
			t.Fatalf("%x: %q %v, want %q %v", b, got, ok, want, err)
		}
	})
}

func TestMalformed(t *testing.T) {
	for _, tt := range []struct{ hex, why string }{
		{"80", "index 0"},
		{"be", "index beyond both tables"},
		{"ff", "integer cut short"},
		{"ffffffffff7f", "integer too large"},
		{"7fffffff7f00", "index too large"},
		{"40", "literal without a name"},
		{"4003", "name cut short"},
		{"400161", "literal without a value"},
		{"40016105", "value cut short"},
		{"7e00", "name index beyond both tables"},
		{"3fe21f", "table size 4097"},
		{"8220", "size update behind a field"},
		{"0081ff0161", "Huffman string of padding only"},
	} {
		if f, err := NewDecoder(0, nil).Decode(unhex(t, tt.hex), nil); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s (%s): %q %v", tt.hex, tt.why, text(f), err)
		}
	}
}

// TestLimit: past the limit the table stays right, and the connection lives.
func TestLimit(t *testing.T) {
	var buf bytes.Buffer
	enc := oracle.NewEncoder(&buf)
	d := NewDecoder(1000, nil)
	for i := range 50 {
		enc.WriteField(oracle.HeaderField{Name: "x-a", Value: fmt.Sprint(i, strings.Repeat("v", 200))})
	}
	if f, err := d.Decode(buf.Bytes(), nil); !errors.Is(err, ErrTooLarge) || len(f) != 0 {
		t.Fatalf("%d fields, %v", len(f), err)
	}
	if n := cap(d.t.buf); n > 4*MaxTable {
		t.Errorf("the table's buffer grew to %d", n)
	}
	buf.Reset()
	enc.WriteField(oracle.HeaderField{Name: "x-a", Value: "49" + strings.Repeat("v", 200)}) // by index
	enc.WriteField(oracle.HeaderField{Name: "x-b", Value: "w"})
	f, err := d.Decode(buf.Bytes(), nil)
	if want := "x-a: 49" + strings.Repeat("v", 200) + "\nx-b: w\n"; err != nil || text(f) != want {
		t.Errorf("got %q, %v", text(f), err)
	}

	exact := func(n int) []byte { // a field that counts n
		return appendLiteral(nil, 0, 4, 0, []byte("x"), make([]byte, n-overhead-1))
	}
	if _, err := d.Decode(exact(1000), nil); err != nil {
		t.Errorf("exactly the limit: %v", err)
	}
	if _, err := d.Decode(exact(1001), nil); !errors.Is(err, ErrTooLarge) {
		t.Errorf("one more: %v", err)
	}
}

// TestBomb: few bytes that refer to a large entry again and again, and few that
// copy a long name into the table again and again.
func TestBomb(t *testing.T) {
	name := bytes.Repeat([]byte("n"), 3900)
	for _, again := range []string{"be", "7e00"} {
		d := NewDecoder(8000, nil)
		block := appendLiteral(nil, 0x40, 6, 0, name, nil)
		block = append(block, bytes.Repeat(unhex(t, again), 10000)...)
		if _, err := d.Decode(block, nil); !errors.Is(err, ErrBomb) {
			t.Errorf("%s: %v", again, err)
		}
		if n := cap(d.t.buf) + cap(d.arena); n > 64<<10 {
			t.Errorf("%s: %d bytes held", again, n)
		}
	}
}

// TestAlias: fields stay true to the end of their block although the entries
// they came from are evicted by it, and although Huffman strings follow.
func TestAlias(t *testing.T) {
	d := NewDecoder(0, nil)
	var block []byte
	var want strings.Builder
	for i := range 60 {
		v := strings.Repeat(fmt.Sprint(i%10), 600)
		block = appendLiteral(block, 0x40, 6, 0, []byte("x-a"), []byte(v))
		block = append(block, 0xbe) // and once more by index
		h := oracle.AppendHuffmanString(nil, v[:5])
		block = append(append(appendInt(append(block, 0x00, 1, 'h'), 0x80, 7, len(h)), h...), 0xbe)
		want.WriteString(strings.Repeat("x-a: "+v+"\n", 2) + "h: " + v[:5] + "\nx-a: " + v + "\n")
	}
	d.limit = 1 << 20
	f, err := d.Decode(block, nil)
	if err != nil || text(f) != want.String() {
		t.Fatalf("%v; fields differ", err)
	}
	if _, err := d.Decode(nil, nil); err != nil || cap(d.t.buf) > 4*MaxTable {
		t.Errorf("%v; %d bytes kept", err, cap(d.t.buf))
	}
}

func TestMarker(t *testing.T) {
	var asked []string
	d := NewDecoder(0, func(name, value []byte) uint8 {
		asked = append(asked, string(name)+"="+string(value))
		return uint8(len(value))
	})
	asked = nil
	block := appendLiteral(nil, 0x40, 6, 0, []byte("a"), []byte("xyz"))
	f, err := d.Decode(append(block, 0xbe, 0x82), nil)
	if err != nil || len(f) != 3 || f[0].Mark != 3 || f[1].Mark != 3 || f[2].Mark != 3 {
		t.Fatalf("%+v, %v", f, err)
	}
	if got := strings.Join(asked, " "); got != "a=xyz" {
		t.Errorf("marked %q", got)
	}
}

// pool of fields the random tests draw from: hot, rare, static, secret, huge.
func drawField(rng *rand.Rand) (name, value string) {
	switch rng.IntN(10) {
	case 0:
		return "x-request-id", fmt.Sprint(rng.Uint64())
	case 1:
		return []string{"authorization", "cookie", "set-cookie", "proxy-authorization"}[rng.IntN(4)], fmt.Sprint("secret", rng.IntN(3))
	case 2:
		return "accept-encoding", []string{"gzip, deflate", "gzip"}[rng.IntN(2)]
	case 3:
		return fmt.Sprint("x-", rng.IntN(200)), strings.Repeat("v", rng.IntN(300))
	case 4:
		return "x-huge", strings.Repeat("h", rng.IntN(6000))
	case 5:
		return fmt.Sprint("x-", rng.IntN(5)), ""
	default:
		return []string{"user-agent", "accept", ":path", ":method", "content-type", "x-forwarded-for"}[rng.IntN(6)], fmt.Sprint("v", rng.IntN(4))
	}
}

// TestEncoderOracle: what we write, x/net reads; table sizes change meanwhile.
func TestEncoderOracle(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 7))
		e, dec := NewEncoder(), oracle.NewDecoder(MaxTable, nil)
		ours := NewDecoder(1<<20, nil)
		for block := range 200 {
			for rng.IntN(20) == 0 {
				e.SetMaxTable(uint32(rng.IntN(6000)))
			}
			var want strings.Builder
			b := e.Begin(nil)
			for range rng.IntN(20) {
				n, v := drawField(rng)
				b = e.Field(b, []byte(n), []byte(v))
				fmt.Fprintf(&want, "%s: %s\n", n, v)
			}
			f, err := dec.DecodeFull(b)
			if err != nil {
				t.Fatalf("seed %d, block %d: %v", seed, block, err)
			}
			var got strings.Builder
			for _, f := range f {
				fmt.Fprintf(&got, "%s: %s\n", f.Name, f.Value)
				if secret := strings.HasPrefix(f.Value, "secret"); f.Sensitive != secret {
					t.Fatalf("%v: sensitive %v", f, f.Sensitive)
				}
			}
			if got.String() != want.String() {
				t.Fatalf("seed %d, block %d:\n%s\nwant\n%s", seed, block, got.String(), want.String())
			}
			if f, err := ours.Decode(b, nil); err != nil || text(f) != want.String() {
				t.Fatalf("seed %d, block %d, own decoder: %v\n%s", seed, block, err, text(f))
			}
			if n := cap(e.t.buf); n > 4*MaxTable {
				t.Fatalf("the encoder's table holds %d bytes", n)
			}
		}
	}
}

// TestDecoderOracle: what x/net writes, with Huffman and eager indexing, we read.
func TestDecoderOracle(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 8))
		var buf bytes.Buffer
		enc, d := oracle.NewEncoder(&buf), NewDecoder(1<<20, nil)
		for block := range 200 {
			buf.Reset()
			for rng.IntN(20) == 0 {
				enc.SetMaxDynamicTableSize(uint32(rng.IntN(4097)))
			}
			var want strings.Builder
			for range rng.IntN(20) {
				n, v := drawField(rng)
				enc.WriteField(oracle.HeaderField{Name: n, Value: v, Sensitive: rng.IntN(5) == 0})
				fmt.Fprintf(&want, "%s: %s\n", n, v)
			}
			before := bytes.Clone(buf.Bytes())
			f, err := d.Decode(buf.Bytes(), nil)
			if err != nil || text(f) != want.String() {
				t.Fatalf("seed %d, block %d: %v\n%s\nwant\n%s", seed, block, err, text(f), want.String())
			}
			if !bytes.Equal(before, buf.Bytes()) {
				t.Fatal("the block was written to")
			}
		}
	}
}

// oneSizeUpdateEach divides a block so that x/net accepts every table size update before the first field. It refuses a
// second one in a block if its table is not empty, although RFC 7541 4.2 has an encoder send two: the smallest size
// since the last block, then the final one.
func oneSizeUpdateEach(block []byte) [][]byte {
	var parts [][]byte
	for len(block) > 0 && block[0]&0xe0 == 0x20 {
		n := 1
		if block[0]&0x1f == 0x1f { // the size goes on in the next octets (5.1)
			for n++; n < len(block) && block[n-1]&0x80 != 0; n++ {
			}
		}
		n = min(n, len(block))
		parts, block = append(parts, block[:n]), block[n:]
	}
	return append(parts, block)
}

// TestSizeUpdates: the two size updates of RFC 7541 4.2 are accepted with fields in the table; one behind a field is not.
func TestSizeUpdates(t *testing.T) {
	for _, c := range []struct {
		block string
		want  string
		ok    bool
	}{
		{"\x3f\x11\x3f\xe1\x1f\x82", ":method: GET\n", true},             // 48, then 4,096
		{"\x20\x3f\xe1\x1f\x82", ":method: GET\n", true},                 // 0, then 4,096
		{"\x3f\xe1\x1f\xbe", "a: b\n", true},                             // no smaller one: the table's field stays
		{"\x3f\x11\x3f\xe1\x1f\xbe", "a: b\n", true},                     // 34 octets fit into 48
		{"\x20\x3f\xe1\x1f\xbe", "", false},                              // 0 has dropped it
		{"\x82\x20", "", false}, {"\x82\x3f\x11\x3f\xe1\x1f", "", false}, // behind a field
		{"\x3f\xe2\x1f", "", false}, // 4,097: more than we have allowed
	} {
		d := NewDecoder(4096, nil)
		if _, err := d.Decode([]byte("\x40\x01a\x01b"), nil); err != nil {
			t.Fatal(err)
		}
		f, err := d.Decode([]byte(c.block), nil)
		if (err == nil) != c.ok || c.ok && text(f) != c.want {
			t.Errorf("% x: %q, %v, want %q", c.block, text(f), err, c.want)
		}
	}
}

// FuzzDecode: whatever we accept, x/net accepts as the same fields, over
// several blocks of one connection, and nothing grows beyond its bound.
func FuzzDecode(f *testing.F) {
	f.Add([]byte("\x82\x86\x84A\x0fwww.example.com"), []byte("\xbe\x58\x08no-cache"))
	f.Add([]byte("\x20\x3f\xe1\x1f\x40\x01a\x01b"), []byte("\xbe\x7e\x01c"))
	f.Fuzz(func(t *testing.T, one, two []byte) {
		d, dec := NewDecoder(4096, nil), oracle.NewDecoder(MaxTable, nil)
		for _, b := range [][]byte{one, two, one} {
			got, err := d.Decode(b, nil)
			if n := cap(d.t.buf) + cap(d.arena); n > 8*MaxTable+4*len(b) {
				t.Fatalf("%d bytes held", n)
			}
			if err != nil && !errors.Is(err, ErrTooLarge) {
				return
			}
			var want []oracle.HeaderField
			for _, part := range oneSizeUpdateEach(b) {
				f, oerr := dec.DecodeFull(part)
				if oerr != nil {
					t.Fatalf("accepted as %q; x/net: %v", text(got), oerr)
				}
				want = append(want, f...)
			}
			if err != nil {
				continue
			}
			var s strings.Builder
			for _, f := range want {
				fmt.Fprintf(&s, "%s: %s\n", f.Name, f.Value)
			}
			if text(got) != s.String() {
				t.Fatalf("got %q, want %q", text(got), s.String())
			}
		}
	})
}

// FuzzRoundTrip: fields through our Encoder come out of x/net's Decoder and
// of ours.
func FuzzRoundTrip(f *testing.F) {
	f.Add("content-type\x00text/plain\x00cookie\x00a=b", uint32(4096))
	f.Add("\x00\x00x\x00y", uint32(0))
	f.Fuzz(func(t *testing.T, fields string, size uint32) {
		part := strings.Split(fields, "\x00")
		e, d, dec := NewEncoder(), NewDecoder(1<<20, nil), oracle.NewDecoder(MaxTable, nil)
		for round := range 3 {
			if round == 1 {
				e.SetMaxTable(size)
			}
			b, want := e.Begin(nil), ""
			for i := 0; i+1 < len(part); i += 2 {
				b = e.Field(b, []byte(part[i]), []byte(part[i+1]))
				want += part[i] + ": " + part[i+1] + "\n"
			}
			got, err := d.Decode(b, nil)
			if err != nil || text(got) != want {
				t.Fatalf("%v: %q, want %q", err, text(got), want)
			}
			f, err := dec.DecodeFull(b)
			if err != nil || len(f) != len(got) {
				t.Fatalf("x/net: %v, %d fields", err, len(f))
			}
			for i := range f {
				if f[i].Name != string(got[i].Name) || f[i].Value != string(got[i].Value) {
					t.Fatalf("x/net: %v", f[i])
				}
			}
		}
	})
}

// TestIndexing: a field costs its bytes twice, then an index; one that comes
// once never pushes out another.
func TestIndexing(t *testing.T) {
	e := NewEncoder()
	hot := func() int { return len(e.Field(nil, []byte("x-hot"), []byte("value"))) }
	if a, b, c := hot(), hot(), hot(); a < 10 || b < 10 || c != 1 {
		t.Fatalf("%d, %d, %d bytes", a, b, c)
	}
	for i := range 10000 {
		e.Field(nil, []byte("x-request-id"), fmt.Append(nil, i))
	}
	if n := hot(); n != 1 {
		t.Errorf("%d bytes after many others", n)
	}
	if e.t.n != 1 {
		t.Errorf("%d entries in the table", e.t.n)
	}
	for range 3 {
		for _, secret := range []string{"authorization", "cookie", "set-cookie", "proxy-authorization"} {
			if b := e.Field(nil, []byte(secret), []byte("s")); b[0]&0xf0 != 0x10 {
				t.Errorf("%s: %x, want a literal never indexed", secret, b)
			}
		}
	}
	if e.t.n != 1 {
		t.Errorf("%d entries in the table", e.t.n)
	}
}

// TestNamed: a name by its static index is the same field, and Trim on both
// sides forgets nothing that the other relies on.
func TestNamed(t *testing.T) {
	e, d := NewEncoder(), NewDecoder(0, nil)
	want := ":path: /items\n:path: /items\n:path: /items\n:path: /items\ncookie: c\n"
	for round := range 3 {
		b := e.Begin(nil)
		for range 3 {
			b = e.Named(b, PathRoot, []byte("/items"))
		}
		b = e.Field(b, []byte(":path"), []byte("/items"))
		b = e.Named(b, cookie, []byte("c"))
		f, err := d.Decode(b, nil)
		if err != nil || text(f) != want {
			t.Fatalf("%v: %q", err, text(f))
		}
		if len(b) > 30 || round == 1 && len(b) < 15 {
			t.Errorf("round %d: %d bytes", round, len(b))
		}
		e.Trim()
		d.Trim()
	}
}

// TestTableSize: a change of size is told once, the lowest in between too.
func TestTableSize(t *testing.T) {
	for _, tt := range []struct {
		sizes []uint32
		want  string
	}{
		{nil, ""},
		{[]uint32{4096}, ""},
		{[]uint32{1 << 31}, ""},
		{[]uint32{0}, "20"},
		{[]uint32{100}, "3f45"},
		{[]uint32{100, 4096}, "203fe11f"},
		{[]uint32{100, 0, 50, 200}, "203fa901"},
	} {
		e := NewEncoder()
		for _, n := range tt.sizes {
			e.SetMaxTable(n)
		}
		if got := hex.EncodeToString(e.Begin(nil)); got != tt.want {
			t.Errorf("%v: %s, want %s", tt.sizes, got, tt.want)
		}
		if got := e.Begin(nil); len(got) != 0 {
			t.Errorf("%v: told twice: %x", tt.sizes, got)
		}
	}
}

// warm is the head of a common request, and its encoder and decoder.
func warm(t testing.TB) (encode func(), decode func()) {
	e, d := NewEncoder(), NewDecoder(0, nil)
	var names, values [][]byte
	for _, kv := range [][2]string{{":authority", "cart.shop"}, {"user-agent", "fortio.org/fortio-1.60"}, {"accept", "*/*"},
		{"x-forwarded-for", "10.0.0.1"}, {"content-type", "application/grpc"}, {"te", "trailers"}, {"authorization", "Bearer abc"}} {
		names, values = append(names, []byte(kv[0])), append(values, []byte(kv[1]))
	}
	var block []byte
	var f []Field
	id := []byte("00000000")
	encode = func() {
		block = e.Begin(block[:0])
		for i := range names {
			block = e.Field(block, names[i], values[i])
		}
		for i := 7; i >= 0; i-- { // and one that differs each time
			if id[i]++; id[i] <= '9' {
				break
			}
			id[i] = '0'
		}
		block = e.Field(block, []byte("x-request-id"), id)
	}
	decode = func() {
		var err error
		if f, err = d.Decode(block, f[:0]); err != nil || len(f) != len(names)+1 {
			t.Fatalf("%d fields, %v", len(f), err)
		}
	}
	for range 500 {
		encode()
		decode()
	}
	return encode, decode
}

func TestAllocs(t *testing.T) {
	encode, decode := warm(t)
	if n := testing.AllocsPerRun(1000, func() { encode(); decode() }); n != 0 {
		t.Errorf("%v allocations a block, want 0", n)
	}
}

func BenchmarkEncode(b *testing.B) {
	encode, _ := warm(b)
	b.ReportAllocs()
	for b.Loop() {
		encode()
	}
}

func BenchmarkDecode(b *testing.B) {
	encode, decode := warm(b)
	encode()
	b.ReportAllocs()
	for b.Loop() {
		decode()
	}
}

func BenchmarkHuffman(b *testing.B) {
	const s = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko)"
	src, dst := oracle.AppendHuffmanString(nil, s), make([]byte, 0, 256)
	b.SetBytes(int64(len(s)))
	for b.Loop() {
		dst, _ = appendHuffman(dst[:0], src)
	}
}
