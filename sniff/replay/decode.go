package replay

import (
	"encoding/binary"
	"net/netip"

	"github.com/gopacket/gopacket/layers"
)

// Links names the link types that can be read.
func Links() string {
	return "Ethernet (VLAN, MPLS, PPPoE, LLC/SNAP), Linux cooked v1 and v2, BSD loopback, PPP, Cisco HDLC, NFLOG, raw IP"
}

const linkNFLOG = 239 // unknown to gopacket

// segment is a TCP segment, or a UDP datagram (udp; seq, ack and flags are then 0).
// payload is what the file holds of it and aliases the frame; wire is how long it was.
type segment struct {
	udp      bool
	src, dst netip.AddrPort
	seq, ack uint32
	flags    uint8
	payload  []byte
	wire     int
}

const (
	fin    = 0x01
	syn    = 0x02
	rst    = 0x04
	hasACK = 0x10
)

// maxTunnels is how many tunnels one frame may have around its segment: what is deeper is not looked at.
const maxTunnels = 4

// decoder finds what a frame holds, in one use of it.
type decoder struct {
	tunnels   int  // that were opened on the way to the segment
	fragments bool // a fragment was met: its segment cannot be read
}

// decode finds the TCP segment or UDP datagram in a frame: nil when there is none that
// could be read. known says whether the link type is. A segment in a tunnel (VXLAN, GRE, IP in IP) is that
// of the packet inside, if that can be read.
func (d *decoder) decode(link layers.LinkType, b []byte) (seg *segment, known bool) {
	switch link {
	case layers.LinkTypeEthernet:
		if len(b) < 14 {
			return nil, true
		}
		return d.ether(be16(b[12:]), b[14:]), true
	case layers.LinkTypeLinuxSLL:
		if len(b) < 16 {
			return nil, true
		}
		return d.ether(be16(b[14:]), b[16:]), true
	case layers.LinkTypeLinuxSLL2:
		if len(b) < 20 {
			return nil, true
		}
		return d.ether(be16(b), b[20:]), true
	case layers.LinkTypeNull, layers.LinkTypeLoop:
		// The address family, in the byte order of the machine that captured (NULL). Its
		// numbers differ between systems; the packet itself says as much.
		if len(b) < 4 {
			return nil, true
		}
		return d.ip(b[4:]), true
	case layers.LinkTypePPP:
		return d.ppp(b), true
	case layers.LinkTypeC_HDLC: // address, control, EtherType
		if len(b) < 4 {
			return nil, true
		}
		return d.ether(be16(b[2:]), b[4:]), true
	case linkNFLOG:
		return d.nflog(b), true
	case layers.LinkTypeRaw, 12, 14, layers.LinkTypeIPv4, layers.LinkTypeIPv6: // 12 and 14: raw IP as BSDs number it
		return d.ip(b), true
	}
	return nil, false
}

func be16(b []byte) int { return int(binary.BigEndian.Uint16(b)) }

// ether goes from an EtherType down to IP.
func (d *decoder) ether(kind int, b []byte) *segment {
	for range 16 { // tags in a frame
		switch {
		case kind == 0x0800 || kind == 0x86dd:
			return d.ip(b)
		case kind == 0x8100 || kind == 0x88a8 || kind == 0x9100 || kind == 0x9200: // VLAN tags (IEEE 802.1Q, 802.1ad, older QinQ)
			if len(b) < 4 {
				return nil
			}
			kind, b = be16(b[2:]), b[4:]
		case kind == 0x8847 || kind == 0x8848: // MPLS (RFC 3032): labels down to the bottom of the stack
			for {
				if len(b) < 4 {
					return nil
				}
				bottom := b[2]&1 != 0
				b = b[4:]
				if bottom {
					return d.ip(b)
				}
			}
		case kind == 0x8864: // PPPoE session (RFC 2516)
			if len(b) < 6 {
				return nil
			}
			return d.ppp(b[6:])
		case kind <= 1500: // a length: IEEE 802.2 LLC; IP comes in SNAP (RFC 1042)
			if len(b) < 8 || b[0] != 0xaa || b[1] != 0xaa {
				return nil
			}
			kind, b = be16(b[6:]), b[8:]
		default:
			return nil
		}
	}
	return nil
}

// ppp skips PPP's own header (RFC 1661 section 2, RFC 1662 section 3.1).
func (d *decoder) ppp(b []byte) *segment {
	if len(b) >= 2 && b[0] == 0xff && b[1] == 0x03 {
		b = b[2:]
	}
	switch {
	case len(b) >= 1 && (b[0] == 0x21 || b[0] == 0x57): // compressed to one byte
		return d.ip(b[1:])
	case len(b) >= 2 && (be16(b) == 0x0021 || be16(b) == 0x0057):
		return d.ip(b[2:])
	}
	return nil
}

// nflog looks for the packet among the attributes of a netfilter log message.
func (d *decoder) nflog(b []byte) *segment {
	if len(b) < 4 {
		return nil
	}
	// family, version, resource id; then attributes in the byte order of the machine that
	// captured, which a file of another order does not tell: little endian is what there is.
	for b = b[4:]; len(b) >= 4; {
		n, kind := int(binary.LittleEndian.Uint16(b)), binary.LittleEndian.Uint16(b[2:])
		if n < 4 {
			return nil
		}
		if kind == 9 { // NFULA_PAYLOAD
			return d.ip(b[4:min(n, len(b))])
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return nil
}

const (
	protoIPv4 = 4
	protoTCP  = 6
	protoUDP  = 17
	protoIPv6 = 41
	protoGRE  = 47
)

// transport reads what an IP packet carries: b of wire bytes.
func (d *decoder) transport(kind byte, src, dst netip.Addr, b []byte, wire int) *segment {
	switch kind {
	case protoTCP:
		return tcp(src, dst, b, wire)
	case protoUDP:
		s := udp(src, dst, b, wire)
		if s != nil && (s.dst.Port() == 4789 || s.dst.Port() == 8472) && len(s.payload) >= 8+14 && s.payload[0]&0x08 != 0 { // VXLAN (RFC 7348), and Linux's older number
			inner := s.payload[8:]
			if t := d.inner(func() *segment { return d.ether(be16(inner[12:]), inner[14:]) }); t != nil {
				return t
			}
		}
		return s
	case protoIPv4, protoIPv6:
		return d.inner(func() *segment { return d.ip(b) })
	case protoGRE: // RFC 2784, RFC 2890
		if len(b) < 4 || b[1]&7 != 0 {
			return nil
		}
		n := 4
		for _, optional := range []byte{0x80, 0x20, 0x10} { // checksum, key, sequence number
			if b[0]&optional != 0 {
				n += 4
			}
		}
		if b[0]&0x40 != 0 || n > len(b) { // RFC 1701's routing is of the past
			return nil
		}
		kind, b := be16(b[2:]), b[n:]
		return d.inner(func() *segment {
			if kind == 0x6558 { // a whole Ethernet frame
				if len(b) < 14 {
					return nil
				}
				return d.ether(be16(b[12:]), b[14:])
			}
			return d.ether(kind, b)
		})
	}
	return nil
}

// inner reads what is in a tunnel.
func (d *decoder) inner(read func() *segment) *segment {
	if d.tunnels == maxTunnels {
		return nil
	}
	d.tunnels++
	s := read()
	if s == nil {
		d.tunnels--
	}
	return s
}

// ip reads an IPv4 (RFC 791) or IPv6 (RFC 8200) packet. Fragments hold no
// readable segment and are passed over, but for those that are the whole packet.
func (d *decoder) ip(b []byte) *segment {
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		head, total := int(b[0]&15)*4, be16(b[2:])
		if head < 20 || head > len(b) {
			return nil
		}
		if be16(b[6:])&0x3fff != 0 {
			d.fragments = true
			return nil
		}
		if total == 0 { // segmentation offload: the length was to be filled in by the card
			total = len(b)
		}
		src, dst := netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		return d.transport(b[9], src, dst, b[head:], total-head)
	case len(b) >= 40 && b[0]>>4 == 6:
		src, dst := netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
		kind, wire := b[6], be16(b[4:])
		b = b[40:]
		if wire == 0 {
			wire = len(b)
		}
		for range 16 { // extension headers
			switch kind {
			case 44: // a fragment, or the whole packet in one: an atomic fragment (RFC 6946)
				if len(b) < 8 {
					return nil
				}
				if be16(b[2:])&0xfff9 != 0 {
					d.fragments = true
					return nil
				}
				kind, b, wire = b[0], b[8:], wire-8
			case 0, 43, 60: // hop-by-hop, routing, destination options
				if len(b) < 8 {
					return nil
				}
				n := 8 + int(b[1])*8
				if n > len(b) {
					return nil
				}
				kind, b, wire = b[0], b[n:], wire-n
			default:
				return d.transport(kind, src, dst, b, wire)
			}
		}
	}
	return nil
}

// tcp reads a segment (RFC 9293 section 3.1) of wire bytes, of which b is
// captured; b may also be longer (padding of the link).
func tcp(src, dst netip.Addr, b []byte, wire int) *segment {
	if wire < 20 || len(b) < 20 {
		return nil
	}
	b = b[:min(len(b), wire)]
	head := int(b[12]>>4) * 4
	if head < 20 || head > wire {
		return nil
	}
	s := &segment{
		src:   netip.AddrPortFrom(src.Unmap(), uint16(be16(b))),
		dst:   netip.AddrPortFrom(dst.Unmap(), uint16(be16(b[2:]))),
		seq:   binary.BigEndian.Uint32(b[4:]),
		ack:   binary.BigEndian.Uint32(b[8:]),
		flags: b[13],
		wire:  wire - head,
	}
	if head <= len(b) {
		s.payload = b[head:]
	}
	return s
}

// udp reads a datagram (RFC 768) of wire bytes, of which b is captured.
func udp(src, dst netip.Addr, b []byte, wire int) *segment {
	const head = 8
	if wire < head || len(b) < head {
		return nil
	}
	if n := be16(b[4:]); n >= head && n < wire { // 0: a jumbogram (RFC 2675), or offload
		wire = n
	}
	b = b[:min(len(b), wire)]
	return &segment{
		udp:     true,
		src:     netip.AddrPortFrom(src.Unmap(), uint16(be16(b))),
		dst:     netip.AddrPortFrom(dst.Unmap(), uint16(be16(b[2:]))),
		payload: b[head:],
		wire:    wire - head,
	}
}
