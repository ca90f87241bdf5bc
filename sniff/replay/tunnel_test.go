package replay

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"aether/sniff"
)

// ipv4 is a packet of another protocol around inner; its checksum is nobody's.
func ipv4(protocol byte, inner []byte) []byte {
	b := append([]byte{0x45, 0, 0, 0, 0, 1, 0, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2}, inner...)
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	return b
}

// ethernet is a frame around inner.
func ethernet(kind uint16, inner []byte) []byte {
	return append(binary.BigEndian.AppendUint16(make([]byte, 12), kind), inner...)
}

func vxlan(port uint16, inner []byte) []byte {
	u := []byte{0x9c, 0x40, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 1, 0}
	binary.BigEndian.PutUint16(u[2:], port)
	u = append(u, inner...)
	binary.BigEndian.PutUint16(u[4:], uint16(len(u)))
	return ipv4(17, u)
}

// ipv6 makes an IPv6 packet of an IPv4 one, with a fragment header: offset in units of 8, more after it.
func ipv6(p []byte, offset uint16, more bool) []byte {
	tcp := p[20:]
	word := offset << 3
	if more {
		word |= 1
	}
	frag := binary.BigEndian.AppendUint16([]byte{6, 0}, word)
	frag = append(frag, 0, 0, 0, 7)
	b := []byte{0x60, 0, 0, 0, 0, 0, 44, 64}
	binary.BigEndian.PutUint16(b[4:], uint16(len(frag)+len(tcp)))
	for _, a := range [][]byte{p[12:16], p[16:20]} {
		b = append(append(b, 0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), a...)
	}
	return append(append(b, frag...), tcp...)
}

// TestEncapsulated: a conversation is the same however its packets were wrapped when they were captured, and one
// that cannot be read is counted for what it is.
func TestEncapsulated(t *testing.T) {
	reply := strings.Repeat("x", 40)
	plain := append(shake(), up(hasACK, 0, 0, get), down(hasACK, 0, len(get), reply))
	gre := func(flags byte, kind uint16, inner []byte) []byte {
		b := binary.BigEndian.AppendUint16([]byte{flags, 0}, kind)
		for _, f := range []byte{0x80, 0x20, 0x10} {
			if flags&f != 0 {
				b = append(b, 1, 2, 3, 4)
			}
		}
		return ipv4(47, append(b, inner...))
	}
	deep := func(n int) func([]byte) []byte {
		return func(p []byte) []byte {
			for range n {
				p = ipv4(4, p)
			}
			return p
		}
	}
	const n = 5 // frames
	for _, tt := range []struct {
		name string
		link layers.LinkType
		wrap func(p []byte) []byte
		want Tally
	}{
		{"as it is", layers.LinkTypeRaw, func(p []byte) []byte { return p }, Tally{TCP: n}},
		{"Cisco HDLC", layers.LinkTypeC_HDLC, func(p []byte) []byte { return append([]byte{0x0f, 0, 8, 0}, p...) }, Tally{TCP: n}},
		{"an atomic fragment", layers.LinkTypeRaw, func(p []byte) []byte { return ipv6(p, 0, false) }, Tally{TCP: n}},
		{"VXLAN", layers.LinkTypeRaw, func(p []byte) []byte { return vxlan(4789, ethernet(0x0800, p)) }, Tally{TCP: n, Tunnelled: n}},
		{"VXLAN of older Linux", layers.LinkTypeEthernet, func(p []byte) []byte { return ethernet(0x0800, vxlan(8472, ethernet(0x0800, p))) }, Tally{TCP: n, Tunnelled: n}},
		{"GRE", layers.LinkTypeRaw, func(p []byte) []byte { return gre(0, 0x0800, p) }, Tally{TCP: n, Tunnelled: n}},
		{"GRE with a key and all", layers.LinkTypeRaw, func(p []byte) []byte { return gre(0xb0, 0x0800, p) }, Tally{TCP: n, Tunnelled: n}},
		{"GRE with frames", layers.LinkTypeRaw, func(p []byte) []byte { return gre(0x20, 0x6558, ethernet(0x0800, p)) }, Tally{TCP: n, Tunnelled: n}},
		{"IP in IP", layers.LinkTypeRaw, deep(1), Tally{TCP: n, Tunnelled: n}},
		{"four tunnels", layers.LinkTypeRaw, deep(4), Tally{TCP: n, Tunnelled: n}},
		{"five tunnels", layers.LinkTypeRaw, deep(5), Tally{Other: n}},
		{"a thousand tunnels", layers.LinkTypeRaw, deep(1000), Tally{Other: n}},
		{"a first fragment", layers.LinkTypeRaw, func(p []byte) []byte { return ipv6(p, 0, true) }, Tally{Fragments: n}},
		{"a later fragment", layers.LinkTypeRaw, func(p []byte) []byte { return ipv6(p, 5, false) }, Tally{Fragments: n}},
		{"VXLAN of nothing", layers.LinkTypeRaw, func([]byte) []byte { return vxlan(4789, make([]byte, 60)) }, Tally{UDP: n}},
		{"GRE of something else", layers.LinkTypeRaw, func(p []byte) []byte { return gre(0, 0x88be, p) }, Tally{Other: n}},
		{"GRE with source routes", layers.LinkTypeRaw, func(p []byte) []byte { return gre(0x40, 0x0800, p) }, Tally{Other: n}},
		{"ICMP", layers.LinkTypeRaw, func(p []byte) []byte { return ipv4(1, p) }, Tally{Other: n}},
	} {
		var frames [][]byte
		for _, p := range plain {
			frames = append(frames, tt.wrap(bytes.Clone(p)))
		}
		var got Tally
		flows := 0
		for f, err := range Read(bytes.NewReader(pcap(t, tt.link, frames...)), Options{Tally: &got}) {
			switch {
			case err != nil:
				t.Errorf("%s: %v", tt.name, err)
			case f.Transport != TCP:
			case f.Proto != sniff.HTTP11 || f.Host != "cart:8080" || f.ClientBytes != int64(len(get)) || f.ServerBytes != int64(len(reply)) || f.Midstream || f.First != Client:
				t.Errorf("%s: %+v", tt.name, f)
			default:
				flows++
			}
		}
		if tt.want.Frames = len(plain); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
		if (flows == 1) != (tt.want.TCP > 0) {
			t.Errorf("%s: %d flows", tt.name, flows)
		}
	}
}

// TestBegins: of a flow that is no HTTP it is told whether somebody may read a request in it, however it was cut.
func TestBegins(t *testing.T) {
	for in, want := range map[string]bool{"GET  / HTTP/1.1\r\n\r\n": true, strings.Repeat("\r\n", sniff.MaxEmptyLines+1) + "GET / HTTP/1.1\r\n": true, "SSH-2.0-x\r\n": false, "\x00\x01 /": false, "A:B": true} {
		for cut := 1; cut <= len(in); cut++ {
			frames := append(shake(), up(hasACK, 0, 0, in[:cut]), up(hasACK, cut, 0, in[cut:]))
			for f, err := range Flows(bytes.NewReader(pcap(t, layers.LinkTypeRaw, frames...))) {
				if err != nil || f.Proto != sniff.Unknown || f.Begins != want {
					t.Errorf("%q cut at %d: %v, begins %v, %v", in, cut, f.Proto, f.Begins, err)
				}
			}
		}
	}
}
