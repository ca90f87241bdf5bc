package main

import (
	"bytes"
	"encoding/binary"
	"net/netip"
)

// capture makes a pcap file of raw IP packets.
type capture struct {
	b     bytes.Buffer
	ports uint16
}

func newCapture() *capture {
	c := &capture{ports: 40000}
	head := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
	head = append(head, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	head = binary.LittleEndian.AppendUint32(head, 65535)
	c.b.Write(binary.LittleEndian.AppendUint32(head, 101)) // LINKTYPE_RAW
	return c
}

// flow adds a connection from a new port of client: the handshake, and what each side says.
func (c *capture) flow(client, server, says, answer string) *capture {
	c.ports++
	from, to := netip.AddrPortFrom(netip.MustParseAddr(client), c.ports), netip.MustParseAddrPort(server)
	const syn, ack = 0x02, 0x10
	c.tcp(from, to, 100, 0, syn, "")
	c.tcp(to, from, 500, 101, syn|ack, "")
	c.tcp(from, to, 101, 501, ack, "")
	if says != "" {
		c.tcp(from, to, 101, 501, ack, says)
	}
	if answer != "" {
		c.tcp(to, from, 501, 101+uint32(len(says)), ack, answer)
	}
	return c
}

func (c *capture) tcp(src, dst netip.AddrPort, seq, ack uint32, flags byte, payload string) {
	h := binary.BigEndian.AppendUint16(nil, src.Port())
	h = binary.BigEndian.AppendUint16(h, dst.Port())
	h = binary.BigEndian.AppendUint32(h, seq)
	h = binary.BigEndian.AppendUint32(h, ack)
	h = append(h, 5<<4, flags, 0, 0, 0, 0, 0, 0)
	c.ip(6, src.Addr(), dst.Addr(), append(h, payload...))
}

// udp adds a datagram.
func (c *capture) udp(src, dst, payload string) *capture {
	from, to := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	h := binary.BigEndian.AppendUint16(nil, from.Port())
	h = binary.BigEndian.AppendUint16(h, to.Port())
	h = binary.BigEndian.AppendUint16(h, uint16(8+len(payload)))
	c.ip(17, from.Addr(), to.Addr(), append(append(h, 0, 0), payload...))
	return c
}

func (c *capture) ip(protocol byte, src, dst netip.Addr, payload []byte) {
	p := make([]byte, 20, 20+len(payload))
	p[0], p[9] = 0x45, protocol
	binary.BigEndian.PutUint16(p[2:], uint16(20+len(payload)))
	copy(p[12:], src.AsSlice())
	copy(p[16:], dst.AsSlice())
	p = append(p, payload...)
	var head [16]byte
	binary.LittleEndian.PutUint32(head[:], 1_700_000_000)
	binary.LittleEndian.PutUint32(head[8:], uint32(len(p)))
	binary.LittleEndian.PutUint32(head[12:], uint32(len(p)))
	c.b.Write(head[:])
	c.b.Write(p)
}
