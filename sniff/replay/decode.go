package replay

import (
	"encoding/binary"
	"net/netip"

	"github.com/gopacket/gopacket/layers"
)

// Links names the link types that can be read.
func Links() string {
	return "Ethernet (VLAN, MPLS, PPPoE, LLC/SNAP), Linux cooked v1 and v2, BSD loopback, PPP, NFLOG, raw IP"
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

// decode finds the TCP segment or UDP datagram in a frame: nil when there is none that
// could be read. known says whether the link type is.
func decode(link layers.LinkType, b []byte) (seg *segment, known bool) {
	switch link {
	case layers.LinkTypeEthernet:
		if len(b) < 14 {
			return nil, true
		}
		return ether(be16(b[12:]), b[14:]), true
	case layers.LinkTypeLinuxSLL:
		if len(b) < 16 {
			return nil, true
		}
		return ether(be16(b[14:]), b[16:]), true
	case layers.LinkTypeLinuxSLL2:
		if len(b) < 20 {
			return nil, true
		}
		return ether(be16(b), b[20:]), true
	case layers.LinkTypeNull, layers.LinkTypeLoop:
		// The address family, in the byte order of the machine that captured (NULL). Its
		// numbers differ between systems; the packet itself says as much.
		if len(b) < 4 {
			return nil, true
		}
		return ip(b[4:]), true
	case layers.LinkTypePPP:
		return ppp(b), true
	case linkNFLOG:
		return nflog(b), true
	case layers.LinkTypeRaw, 12, 14, layers.LinkTypeIPv4, layers.LinkTypeIPv6: // 12 and 14: raw IP as BSDs number it
		return ip(b), true
	}
	return nil, false
}

func be16(b []byte) int { return int(binary.BigEndian.Uint16(b)) }

// ether goes from an EtherType down to IP.
func ether(kind int, b []byte) *segment {
	for range 16 { // tags in a frame
		switch {
		case kind == 0x0800 || kind == 0x86dd:
			return ip(b)
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
					return ip(b)
				}
			}
		case kind == 0x8864: // PPPoE session (RFC 2516)
			if len(b) < 6 {
				return nil
			}
			return ppp(b[6:])
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
func ppp(b []byte) *segment {
	if len(b) >= 2 && b[0] == 0xff && b[1] == 0x03 {
		b = b[2:]
	}
	switch {
	case len(b) >= 1 && (b[0] == 0x21 || b[0] == 0x57): // compressed to one byte
		return ip(b[1:])
	case len(b) >= 2 && (be16(b) == 0x0021 || be16(b) == 0x0057):
		return ip(b[2:])
	}
	return nil
}

// nflog looks for the packet among the attributes of a netfilter log message.
func nflog(b []byte) *segment {
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
			return ip(b[4:min(n, len(b))])
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return nil
}

const (
	protoTCP = 6
	protoUDP = 17
)

// ip reads an IPv4 (RFC 791) or IPv6 (RFC 8200) packet. Fragments hold no
// readable segment and are passed over.
func ip(b []byte) *segment {
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		head, total := int(b[0]&15)*4, be16(b[2:])
		if head < 20 || head > len(b) || be16(b[6:])&0x3fff != 0 {
			return nil
		}
		if total == 0 { // segmentation offload: the length was to be filled in by the card
			total = len(b)
		}
		src, dst := netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		switch b[9] {
		case protoTCP:
			return tcp(src, dst, b[head:], total-head)
		case protoUDP:
			return udp(src, dst, b[head:], total-head)
		}
	case len(b) >= 40 && b[0]>>4 == 6:
		src, dst := netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
		kind, wire := b[6], be16(b[4:])
		b = b[40:]
		if wire == 0 {
			wire = len(b)
		}
		for range 16 { // extension headers
			switch kind {
			case protoTCP:
				return tcp(src, dst, b, wire)
			case protoUDP:
				return udp(src, dst, b, wire)
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
				return nil
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
