// Package replay puts the TCP connections of a packet capture through package
// sniff, the way the proxy would meet them.
//
//   - It reads pcap and pcapng, also gzipped, of the link types that Links names.
//   - Packets may be lost, cut, repeated, reordered, forged or start in mid-connection:
//     every capture gives flows, and what cannot be told from it is said to be so.
//   - The bytes of a connection that come first in its sequence space are seen once and in order,
//     whatever order they were captured in. Where two copies differ, the first one counts.
//   - Memory is bounded whatever the capture holds: by maxOpen connections, and
//     sniff.MaxPeek bytes of a direction.
//
// It knows nothing of protocols beyond TCP, and makes no network traffic.
package replay

import (
	"fmt"
	"io"
	"iter"
	"net/netip"

	"aether/sniff"
)

// Side is an end of a connection.
type Side uint8

// The sides. Neither: it cannot be told.
const (
	Neither Side = iota
	Client
	Server
)

// String gives "-", "client" or "server".
func (s Side) String() string {
	switch s {
	case Client:
		return "client"
	case Server:
		return "server"
	}
	return "-"
}

// Flow is one TCP connection of a capture. It holds no part of the capture's buffers.
type Flow struct {
	// Client sent the SYN. Without a handshake it is who spoke a protocol that package
	// sniff knows, else the end with the higher port.
	Client, Server netip.AddrPort

	// Frame is the number of the connection's first frame in the file, from 1.
	Frame int

	// Proto is what the client's bytes are; sniff.None where it sent none. Without
	// a handshake in the file (Midstream) it is what the first bytes in the file look like.
	Proto sniff.Proto

	// Host is the authority of the first HTTP/1 request, SNI and ALPN the
	// names of a ClientHello; empty where there is none.
	Host string
	SNI  string
	ALPN []string

	// First is who sent payload first: as far as that shows, in the order the
	// ends saw it (by acknowledgements), else in the order of capture.
	First Side

	// ClientBytes and ServerBytes count the payload that went by, repeats not counted.
	ClientBytes, ServerBytes int64

	// AnswerBytes and AnswerSegments are how much of the client's stream it took until Proto
	// (with its names) was final: bytes from the first on, and the segments that brought
	// them. Both 0 when it never became final.
	AnswerBytes, AnswerSegments int

	// Midstream: neither SYN nor SYN-ACK is in the file.
	Midstream bool

	// Incomplete: the client sent bytes that would tell more but they are not in the
	// file. Proto is then sniff.None, or TLS with the names that its first part shows.
	Incomplete bool
}

// Flows yields the connections of the capture that r holds, in the order of
// their first frames (a capture of more than maxOpen connections at a time yields
// the idlest early). Connections without a payload byte are among them. An error is yielded
// last, after the flows of what could be read before it; it says at which frame.
func Flows(r io.Reader) iter.Seq2[Flow, error] {
	return func(yield func(Flow, error) bool) {
		c, err := open(r)
		if err != nil {
			yield(Flow{}, err)
			return
		}
		t := newTable()
		var bad error // a link type that cannot be read; other interfaces go on
		frame := 0
		for {
			link, data, err := c.next()
			if err == io.EOF {
				break
			}
			frame++
			if err != nil {
				bad = fmt.Errorf("frame %d: %w", frame, err)
				break
			}
			seg, known := decode(link, data)
			if !known && bad == nil {
				bad = fmt.Errorf("frame %d: link type %d is not supported; supported are %s", frame, link, Links())
			}
			if seg == nil {
				continue
			}
			if old := t.add(frame, seg); old != nil && !yield(old.flow(), nil) {
				return
			}
		}
		for _, c := range t.rest() {
			if !yield(c.flow(), nil) {
				return
			}
		}
		if bad != nil {
			yield(Flow{}, bad)
		}
	}
}
