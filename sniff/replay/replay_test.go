package replay

import (
	"bytes"
	"compress/gzip"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"aether/sniff"
)

var (
	web  = netip.MustParseAddrPort("10.1.1.7:40001")
	cart = netip.MustParseAddrPort("10.96.0.10:8080")
	web6 = netip.MustParseAddrPort("[fd00::7]:40001")
	db6  = netip.MustParseAddrPort("[fd00::10]:5432")
)

// packet is an IP packet with a TCP segment.
func packet(src, dst netip.AddrPort, seq, ack uint32, flags uint8, payload string) []byte {
	h := make([]byte, 20, 60+len(payload))
	binary.BigEndian.PutUint16(h, src.Port())
	binary.BigEndian.PutUint16(h[2:], dst.Port())
	binary.BigEndian.PutUint32(h[4:], seq)
	binary.BigEndian.PutUint32(h[8:], ack)
	h[12], h[13] = 5<<4, flags
	h = append(h, payload...)
	if src.Addr().Is4() {
		ip := make([]byte, 20)
		ip[0], ip[9] = 0x45, 6
		binary.BigEndian.PutUint16(ip[2:], uint16(20+len(h)))
		copy(ip[12:], src.Addr().AsSlice())
		copy(ip[16:], dst.Addr().AsSlice())
		return append(ip, h...)
	}
	ip := make([]byte, 40)
	ip[0], ip[6] = 0x60, 6
	binary.BigEndian.PutUint16(ip[4:], uint16(len(h)))
	copy(ip[8:], src.Addr().AsSlice())
	copy(ip[24:], dst.Addr().AsSlice())
	return append(ip, h...)
}

// pcap is a capture of these frames.
func pcap(t testing.TB, link layers.LinkType, frames ...[]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := pcapgo.NewWriter(&b)
	if err := w.WriteFileHeader(65535, link); err != nil {
		t.Fatal(err)
	}
	for _, f := range frames {
		if err := w.WritePacket(gopacket.CaptureInfo{CaptureLength: len(f), Length: len(f)}, f); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

func pcapng(t testing.TB, link layers.LinkType, frames ...[]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := pcapgo.NewNgWriter(&b, link)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range frames {
		if err := w.WritePacket(gopacket.CaptureInfo{CaptureLength: len(f), Length: len(f)}, f); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func zipped(b []byte) []byte {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	w.Write(b)
	w.Close()
	return z.Bytes()
}

// line is a flow as the tables write it.
func line(f Flow) string {
	s := fmt.Sprintf("%s > %s %s first=%s %d/%d", f.Client, f.Server, f.Proto, f.First, f.ClientBytes, f.ServerBytes)
	for _, p := range []struct {
		on   bool
		text string
	}{
		{f.Host != "", " host=" + f.Host}, {f.SNI != "", " sni=" + f.SNI},
		{f.AnswerBytes > 0, fmt.Sprintf(" after=%d/%d", f.AnswerBytes, f.AnswerSegments)},
		{f.Midstream, " midstream"}, {f.Incomplete, " incomplete"},
	} {
		if p.on {
			s += p.text
		}
	}
	return s
}

func read(t testing.TB, b []byte) (lines []string, err error) {
	t.Helper()
	for f, e := range Flows(bytes.NewReader(b)) {
		if err != nil {
			t.Fatal("something after an error")
		}
		if err = e; e == nil {
			lines = append(lines, line(f))
		}
	}
	return lines, err
}

const get = "GET / HTTP/1.1\r\nHost: cart:8080\r\n\r\n"

// A script writes segments between web and cart: sequence and acknowledgement numbers count
// from each side's first byte, whose numbers are close to the wrap.
const (
	isnC = uint32(0xfffffff0)
	isnS = uint32(0x7ffffff0)
)

func up(flags uint8, seq, ack int, payload string) []byte {
	return packet(web, cart, isnC+1+uint32(seq), isnS+1+uint32(ack), flags, payload)
}

func down(flags uint8, seq, ack int, payload string) []byte {
	return packet(cart, web, isnS+1+uint32(seq), isnC+1+uint32(ack), flags, payload)
}

func shake() [][]byte {
	return [][]byte{up(syn, -1, -1, ""), down(syn|hasACK, -1, 0, ""), up(hasACK, 0, 0, "")}
}

func TestConversations(t *testing.T) {
	const both = "10.1.1.7:40001 > 10.96.0.10:8080 "
	reply := strings.Repeat("x", 40)
	for _, tt := range []struct {
		name   string
		frames [][]byte
		want   []string
	}{
		{"plain", append(shake(), up(hasACK, 0, 0, get), down(hasACK, 0, len(get), reply)),
			[]string{both + "http/1.1 first=client 35/40 host=cart:8080 after=35/1"}},
		{"nobody speaks", shake(), []string{both + "none first=- 0/0"}},
		{"server first", append(shake(), down(hasACK, 0, 0, reply), up(hasACK, 0, 40, get)),
			[]string{both + "http/1.1 first=server 35/40 host=cart:8080 after=35/1"}},
		{"server first, by acknowledgement", append(shake(), up(hasACK, 0, 40, get), down(hasACK, 0, 0, reply)),
			[]string{both + "http/1.1 first=server 35/40 host=cart:8080 after=35/1"}},
		{"client first, captured late", append(shake(), down(hasACK, 0, len(get), reply), up(hasACK, 0, 0, get)),
			[]string{both + "http/1.1 first=client 35/40 host=cart:8080 after=35/1"}},
		{"client says nothing", append(shake(), down(hasACK, 0, 0, reply), up(hasACK, 0, 40, "")),
			[]string{both + "none first=server 0/40"}},
		{"pieces, out of order and twice", append(shake(), up(hasACK, 10, 0, get[10:20]), up(hasACK, 0, 0, get[:12]), up(hasACK, 5, 0, get[5:15]), up(hasACK, 20, 0, get[20:])),
			[]string{both + "http/1.1 first=client 35/0 host=cart:8080 after=20/2"}},
		{"the first copy counts", append(shake(), up(hasACK, 0, 0, get[:8]), up(hasACK, 0, 0, "SSH-2.0-"), up(hasACK, 8, 0, get[8:])),
			[]string{both + "http/1.1 first=client 35/0 host=cart:8080 after=35/2"}},
		{"a hole", append(shake(), up(hasACK, 0, 0, get[:8]), up(hasACK, 20, 0, get[20:])),
			[]string{both + "none first=client 23/0 incomplete"}},
		{"the end is missing", append(shake(), up(hasACK, 0, 0, get[:8]), down(hasACK, 0, 20, "")),
			[]string{both + "none first=client 8/0 incomplete"}},
		{"half a line and no more", append(shake(), up(hasACK, 0, 0, get[:8]), up(hasACK|fin, 8, 0, ""), down(hasACK, 0, 9, "")),
			[]string{both + "opaque first=client 8/0"}},
		{"unseen client", append(shake(), down(hasACK, 0, 35, reply)),
			[]string{both + "none first=client 0/40 incomplete"}},
		{"no SYN", append(shake()[1:], up(hasACK, 0, 0, get)),
			[]string{both + "http/1.1 first=client 35/0 host=cart:8080 after=35/1"}},
		{"no SYN-ACK", [][]byte{up(syn, -1, -1, ""), up(hasACK, 0, 0, ""), up(hasACK, 0, 0, get)},
			[]string{both + "http/1.1 first=client 35/0 host=cart:8080 after=35/1"}},
		{"Fast Open", [][]byte{up(syn, -1, -1, get), down(syn|hasACK, -1, len(get), "")},
			[]string{both + "http/1.1 first=client 35/0 host=cart:8080 after=35/1"}},
		{"Fast Open turned down", [][]byte{up(syn, -1, -1, get), down(syn|hasACK, -1, 0, ""), up(hasACK, 0, 0, get)},
			[]string{both + "http/1.1 first=client 35/0 host=cart:8080 after=35/1"}},
		{"data before the SYN", [][]byte{up(hasACK, 0, 0, get), up(syn, -1, -1, ""), down(syn|hasACK, -1, 0, "")},
			[]string{both + "http/1.1 first=client 35/0 host=cart:8080 after=35/1"}},
		{"forged SYN-ACK", append(shake(), down(syn|hasACK, 5000, 0, ""), down(syn|hasACK, -1, 9999, ""), up(hasACK, 0, 0, get)),
			[]string{both + "http/1.1 first=client 35/0 host=cart:8080 after=35/1"}},
		{"data in a RST", append(shake(), up(rst|hasACK, 0, 0, "SSH-2.0\r\n"), up(hasACK, 0, 0, get)),
			[]string{both + "http/1.1 first=client 35/0 host=cart:8080 after=35/1"}},
		{"keepalive", append(shake(), up(hasACK, -1, 0, "\x00"), up(hasACK, 0, 0, get), up(hasACK, 34, 0, "\x00")),
			[]string{both + "http/1.1 first=client 35/0 host=cart:8080 after=35/1"}},
		{"ports used again", slices.Concat(shake(), [][]byte{up(hasACK, 0, 0, get), up(syn, 70000, -1, ""), up(hasACK, 70001, 0, "SSH-2.0\r\n")}),
			[]string{both + "http/1.1 first=client 35/0 host=cart:8080 after=35/1", both + "opaque first=client 9/0 after=9/1"}},
		{"midstream request", [][]byte{down(hasACK, 50, 70, reply), up(hasACK, 70, 90, get)},
			[]string{both + "http/1.1 first=- 35/40 host=cart:8080 after=35/1 midstream"}},
		{"midstream, something", [][]byte{down(hasACK, 50, 70, "\x00\x01")},
			[]string{both + "none first=- 0/2 midstream"}},
		{"IPv6", [][]byte{packet(web6, db6, 9, 0, syn, ""), packet(web6, db6, 10, 1, hasACK, "\x00\x00\x00\x08\x04\xd2\x16\x2f")},
			[]string{"[fd00::7]:40001 > [fd00::10]:5432 opaque first=client 8/0 after=8/1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := read(t, pcap(t, layers.LinkTypeRaw, tt.frames...))
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tt.want, "\n"))
			}
		})
	}
}

// TestAnyOrder: whatever way a stream is cut up, repeated and shuffled, the
// answer is that of the whole stream.
func TestAnyOrder(t *testing.T) {
	ours, theirs := net.Pipe()
	var client sync.WaitGroup
	client.Go(func() {
		tls.Client(ours, &tls.Config{ServerName: "cart.example", NextProtos: []string{"h2"}}).Handshake()
	})
	hello := make([]byte, 4096)
	n, err := theirs.Read(hello)
	theirs.Close()
	client.Wait()
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 7))
		stream := []string{get + strings.Repeat("b", 500), "SSH-2.0-x\r\n" + strings.Repeat("c", 30),
			"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("d", 99), "PUT /" + strings.Repeat("e", 20000) + " HTTP/1.0\r\n\r\n", string(hello[:n])}[r.IntN(5)]
		var segs [][]byte
		for at := 0; at < len(stream); {
			n := min(1+r.IntN(1+len(stream)/4), len(stream)-at)
			segs = append(segs, up(hasACK, at, 0, stream[at:at+n]))
			if r.IntN(3) == 0 { // again, cut differently
				from := r.IntN(at + 1)
				segs = append(segs, up(hasACK, from, 0, stream[from:at+n]))
			}
			at += n
		}
		r.Shuffle(len(segs), func(i, j int) { segs[i], segs[j] = segs[j], segs[i] })
		var flows []Flow
		for f, err := range Flows(bytes.NewReader(pcap(t, layers.LinkTypeRaw, append(shake(), segs...)...))) {
			if err != nil {
				t.Fatal(err)
			}
			flows = append(flows, f)
		}
		want := sniff.Detect([]byte(stream))
		if len(flows) != 1 || flows[0].Proto != want.Proto || flows[0].SNI != string(want.SNI) || flows[0].ClientBytes != int64(len(stream)) || flows[0].Incomplete {
			t.Fatalf("seed %d: %+v, want %s of %d bytes", seed, flows, want.Proto, len(stream))
		}
	}
}

func TestContainersAndLinks(t *testing.T) {
	frames := append(shake(), up(hasACK, 0, 0, get))
	wrap := func(head string) (out [][]byte) {
		for _, f := range frames {
			out = append(out, append([]byte(head), f...))
		}
		return out
	}
	const macs = "\x02\x00\x00\x00\x00\x01\x02\x00\x00\x00\x00\x02"
	padded := wrap(macs + "\x08\x00")
	for i := range padded {
		padded[i] = append(padded[i], "\x00\x00\x00\x00\x00\x00"...)
	}
	want := []string{"10.1.1.7:40001 > 10.96.0.10:8080 http/1.1 first=client 35/0 host=cart:8080 after=35/1"}
	for name, b := range map[string][]byte{
		"raw":                 pcap(t, layers.LinkTypeRaw, frames...),
		"ipv4":                pcap(t, layers.LinkTypeIPv4, frames...),
		"gzip":                zipped(pcap(t, layers.LinkTypeRaw, frames...)),
		"pcapng":              pcapng(t, layers.LinkTypeRaw, frames...),
		"pcapng gzip":         zipped(pcapng(t, layers.LinkTypeRaw, frames...)),
		"ethernet":            pcap(t, layers.LinkTypeEthernet, wrap(macs+"\x08\x00")...),
		"padding":             pcap(t, layers.LinkTypeEthernet, padded...),
		"vlan":                pcap(t, layers.LinkTypeEthernet, wrap(macs+"\x81\x00\x00\x05\x08\x00")...),
		"qinq":                pcap(t, layers.LinkTypeEthernet, wrap(macs+"\x88\xa8\x00\x05\x81\x00\x00\x06\x08\x00")...),
		"mpls":                pcap(t, layers.LinkTypeEthernet, wrap(macs+"\x88\x47\x00\x01\x00\x40\x00\x01\x01\x40")...),
		"pppoe":               pcap(t, layers.LinkTypeEthernet, wrap(macs+"\x88\x64\x11\x00\x00\x01\x00\x00\x00\x21")...),
		"snap":                pcap(t, layers.LinkTypeEthernet, wrap(macs+"\x00\x40\xaa\xaa\x03\x00\x00\x00\x08\x00")...),
		"sll":                 pcap(t, layers.LinkTypeLinuxSLL, wrap(strings.Repeat("\x00", 14)+"\x08\x00")...),
		"sll2":                pcap(t, layers.LinkTypeLinuxSLL2, wrap("\x08\x00"+strings.Repeat("\x00", 18))...),
		"null, little endian": pcap(t, layers.LinkTypeNull, wrap("\x02\x00\x00\x00")...),
		"loop":                pcap(t, layers.LinkTypeLoop, wrap("\x00\x00\x00\x02")...),
		"ppp":                 pcap(t, layers.LinkTypePPP, wrap("\xff\x03\x00\x21")...),
		"ppp, compressed":     pcap(t, layers.LinkTypePPP, wrap("\x21")...),
	} {
		t.Run(name, func(t *testing.T) {
			got, err := read(t, b)
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

func TestBadFiles(t *testing.T) {
	good := pcap(t, layers.LinkTypeRaw, append(shake(), up(hasACK, 0, 0, get))...)
	ng := pcapng(t, layers.LinkTypeRaw, append(shake(), up(hasACK, 0, 0, get))...)
	for _, tt := range []struct {
		name, want string
		in         []byte
		flows      int
	}{
		{"empty", "fewer than 4 bytes", nil, 0},
		{"text", "neither pcap nor pcapng", []byte("hello, world"), 0},
		{"not gzip", "gzip: ", []byte{0x1f, 0x8b, 0, 0, 0, 0, 0, 0, 0, 0}, 0},
		{"head cut", "pcap: ", good[:10], 0},
		{"pcapng head cut", "pcapng: ", pcapng(t, layers.LinkTypeRaw)[:20], 0},
		{"frame cut", "frame 4, at byte 192: the file ends in the middle of this frame", good[:len(good)-5], 1},
		{"gzip cut", "frame ", zipped(good)[:len(zipped(good))-20], 1},
		{"link type", "frame 1, at byte 24: link type 147 is not supported; supported are Ethernet", pcap(t, 147, []byte("x")), 0},
		{"pcapng frame cut", "frame 4, at byte ", ng[:len(ng)-5], 1},
		{"both wrong", "in the middle", pcap(t, 147, []byte("xyz"))[:41], 0},
		{"frame too long", "frame 1, at byte 24: ", append(pcap(t, layers.LinkTypeRaw), 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff, 0x7f), 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			flows, err := read(t, tt.in)
			if err == nil || !strings.Contains(err.Error(), tt.want) || len(flows) != tt.flows {
				t.Errorf("%d flows, %v; want %d and %q", len(flows), err, tt.flows, tt.want)
			}
		})
	}
}

// TestBounds: many flows, and many holes, cost no more than the bounds.
func TestBounds(t *testing.T) {
	tab := newTable(false)
	tab.max = 10
	givenUp := 0
	for i := range 100 {
		src := netip.AddrPortFrom(web.Addr(), uint16(1000+i/2))
		tab.add(i+1, time.Time{}, &segment{src: src, dst: cart, seq: uint32(i), flags: syn})
		givenUp += len(tab.ready())
		if n := tab.len(); n > 10 || len(tab.open) > n {
			t.Fatalf("%d connections kept, %d found by address", n, len(tab.open))
		}
	}
	if left := len(tab.rest()); givenUp != 90 || left != 10 || tab.held != 0 || len(tab.open) != 0 {
		t.Errorf("%d given up, %d left, %d bytes held, %d found by address", givenUp, left, tab.held, len(tab.open))
	}

	frames := shake()
	for i := range 2000 {
		frames = append(frames, up(hasACK, 2*(2000-i), 0, "x"))
	}
	flows := tableOf(t, frames).rest()
	cl := &flows[0].half[flows[0].client]
	if len(cl.wire) > maxSpans || len(cl.seen) > maxSpans || len(cl.buf) > sniff.MaxPeek {
		t.Errorf("%d and %d spans, %d bytes", len(cl.wire), len(cl.seen), len(cl.buf))
	}

	// Bytes that wait for what is missing are held up to the bound, and no flow is lost for it.
	tab, givenUp = newTable(false), 0
	tab.maxHeld = 1 << 20
	for i := range 500 {
		src := netip.AddrPortFrom(web.Addr(), uint16(1000+i))
		tab.add(i+1, time.Time{}, &segment{src: src, dst: cart, flags: syn})
		b := bytes.Repeat([]byte("GET"), 4000)
		tab.add(i+1, time.Time{}, &segment{src: src, dst: cart, seq: 2, flags: hasACK, payload: b, wire: len(b)})
		givenUp += len(tab.ready())
		if tab.held > tab.maxHeld {
			t.Fatalf("%d bytes held", tab.held)
		}
	}
	if n := givenUp + len(tab.rest()); n != 500 {
		t.Errorf("%d flows, want 500", n)
	}
}

// TestHostileFiles: what a file only claims costs no memory.
func TestHostileFiles(t *testing.T) {
	le := binary.LittleEndian.AppendUint32
	huge := le(le(le(le(pcap(t, layers.LinkTypeRaw)[:16], 0xffffffff), 101), 0), 0) // its snap length; then a record
	huge = append(le(le(huge, 0x7fffffff), 0x7fffffff), make([]byte, 20<<20)...)
	many := pcapng(t, layers.LinkTypeRaw)
	block := le(le(le(le(le(nil, 1), 20), 101), 65535), 20) // an interface description block
	for range maxKept + 1 {
		many = append(many, block...)
	}
	many = le(le(le(le(le(many, 3), 20), 4), 0), 20) // a simple packet block
	filler := append(le(le(nil, 0x0bad), 1<<20), make([]byte, 1<<20-12)...)
	filler = le(filler, 1<<20)
	long := append(pcapng(t, layers.LinkTypeRaw), bytes.Repeat(filler, 20)...)
	for _, tt := range []struct {
		name, want string
		in         []byte
	}{
		{"a frame without end", "frame 1, at byte 24: no end of it in 16 MiB", huge},
		{"interfaces", "the file defines more than 65536 interfaces or names", many},
		{"no packet", "no end of it in 16 MiB", long},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := read(t, tt.in); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %s", err, tt.want)
			}
		})
	}
}

// TestIdle: a flow that is quiet for long is given up, a closed one sooner; what comes
// then is another one. The clock is the capture's, and never goes back.
func TestIdle(t *testing.T) {
	start := time.Unix(1700000000, 0)
	closed := func(n uint16) *segment {
		return &segment{src: netip.AddrPortFrom(web.Addr(), n), dst: cart, flags: rst}
	}
	for _, tt := range []struct {
		name  string
		s     *segment
		after time.Duration
		over  bool
	}{
		{"open, an hour", &segment{src: web, dst: cart, flags: syn}, time.Hour, false},
		{"open, three hours", &segment{src: web, dst: cart, flags: syn}, 3 * time.Hour, true},
		{"closed, a minute", closed(40001), time.Minute, false},
		{"closed, three minutes", closed(40001), 3 * time.Minute, true},
		{"UDP, a minute", &segment{udp: true, src: web, dst: cart}, time.Minute, false},
		{"UDP, four minutes", &segment{udp: true, src: web, dst: cart}, 4 * time.Minute, true},
		{"the clock goes back", &segment{src: web, dst: cart, flags: syn}, -24 * time.Hour, false},
	} {
		tab := newTable(false)
		tab.add(1, start, tt.s)
		tab.add(2, start.Add(tt.after), &segment{src: web6, dst: db6, flags: syn})
		if over := len(tab.ready()) == 1; over != tt.over {
			t.Errorf("%s: given up %v, want %v", tt.name, over, tt.over)
		}
	}
}

func tableOf(t *testing.T, frames [][]byte) *table {
	t.Helper()
	tab := newTable(false)
	for i, f := range frames {
		s, known := new(decoder).decode(layers.LinkTypeRaw, f)
		if s == nil || !known {
			t.Fatalf("frame %d does not decode", i)
		}
		tab.add(i+1, time.Time{}, s)
	}
	return tab
}

// TestSpans holds the set against a bitmap.
func TestSpans(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var s spans
		var have [400]bool
		for range 60 {
			from := r.IntN(390)
			end := from + r.IntN(12)
			s.add(int64(from), int64(end), true, func(a, b int64) {
				for ; a < b; a++ {
					if have[a] || a < int64(from) || a >= int64(end) {
						t.Fatalf("byte %d of %d..%d is called new", a, from, end)
					}
					have[a] = true
				}
			})
			for i := from; i < end; i++ {
				if !have[i] {
					t.Fatalf("byte %d of %d..%d was left out", i, from, end)
				}
			}
		}
		var total int64
		for _, h := range have {
			if h {
				total++
			}
		}
		if s.total() != total {
			t.Fatalf("%d bytes, want %d", s.total(), total)
		}
		for i := 1; i < len(s); i++ {
			if s[i-1].end >= s[i].from {
				t.Fatalf("spans touch: %v", s)
			}
		}
	}
}

// FuzzFlows: any file gives flows and at most one error, last; what a flow
// says is consistent.
func FuzzFlows(f *testing.F) {
	frames := append(shake(), up(hasACK, 0, 0, get), down(hasACK, 0, 35, "HTTP/1.1 200 OK\r\n"))
	f.Add(pcap(f, layers.LinkTypeRaw, frames...))
	f.Add(pcapng(f, layers.LinkTypeRaw, frames...))
	for _, name := range []string{"zeek/vlan-qinqinq.pcap", "zeek/nflog-http.pcap", "arkime/pppoe.pcap", "gopacket/test_ethernet.pcap", "zeek/tls_irc-starttls.pcap", "zeek/quic_quicv2-http3-443.pcap", "zeek/quic_interop_quic-go_quic-go_retry.pcap"} {
		b, err := os.ReadFile("testdata/" + name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[:min(len(b), 2000)])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		failed := false
		for f, err := range Flows(bytes.NewReader(b)) {
			if failed {
				t.Fatal("something after an error")
			}
			if failed = err != nil; failed {
				continue
			}
			switch {
			case f.Proto > sniff.Unknown, f.Frame < 1, f.ClientBytes < 0, f.ServerBytes < 0,
				f.Transport == TCP && f.AnswerBytes > sniff.MaxPeek, int64(f.AnswerBytes) > f.ClientBytes,
				f.SNI != "" && f.Proto != sniff.TLS && f.Proto != sniff.QUIC,
				f.Transport == UDP && f.Proto != sniff.QUIC && f.Proto != sniff.None && f.Proto != sniff.Unknown,
				f.Transport == TCP && f.Proto == sniff.QUIC, f.Head != nil,
				(f.Proto == sniff.QUIC) != (f.Version != 0),
				f.Host != "" && f.Proto != sniff.HTTP10 && f.Proto != sniff.HTTP11,
				f.Incomplete && f.Proto != sniff.None && f.Proto != sniff.TLS && f.Proto != sniff.QUIC,
				f.AnswerBytes == 0 && f.AnswerSegments != 0:
				t.Fatalf("%+v", f)
			}
		}
	})
}
