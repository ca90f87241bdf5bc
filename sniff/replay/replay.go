// Package replay puts the flows of a packet capture, TCP connections and QUIC
// over UDP, through package sniff, the way the proxy would meet them.
//
//   - It reads pcap and pcapng, also gzipped, of the link types that Links names.
//   - Packets may be lost, cut, repeated, reordered, forged or start in mid-connection:
//     every capture gives flows, and what cannot be told from it is said to be so.
//   - The bytes of a connection that come first in its sequence space are seen once and in order,
//     whatever order they were captured in. Where two copies differ, the first one counts.
//   - Memory is bounded whatever the capture holds, by maxOpen flows and maxHeld bytes: the
//     idlest flow makes room.
//
// Streams are put together here and not by gopacket's reassembly, which is an oracle of the tests: it
// hands on nothing of a connection whose SYN was not captured, and does not tell what each
// end had acknowledged, which is what shows who spoke first and what is missing.
//
// Of protocols above TCP and UDP it knows no more than where the head of a request ends. It makes no
// network traffic.
package replay

import (
	"errors"
	"fmt"
	"io"
	"iter"
	"net/netip"
	"time"

	"aether/sniff"
)

// Transport is what carries a flow.
type Transport uint8

// The transports. The zero value is none.
const (
	TCP Transport = iota + 1
	UDP
)

// String gives "tcp" or "udp".
func (t Transport) String() string {
	switch t {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	}
	return "invalid"
}

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

// Flow is one TCP connection, or one exchange of UDP datagrams, of a capture. It
// holds no part of the capture's buffers.
type Flow struct {
	Transport Transport

	// Client sent the SYN. Without a handshake it is who spoke a protocol that package
	// sniff knows, else the end with the higher port. Of UDP it is who sent the
	// ClientHello, else who spoke first.
	Client, Server netip.AddrPort

	// Frame is the number of the flow's first frame in the file, from 1, and Start
	// when that was captured; the zero time where the file does not say.
	Frame int
	Start time.Time

	// Proto is what the client's bytes are; sniff.None where it sent none. Without
	// a handshake in the file (Midstream) it is what the first bytes in the file look like.
	Proto sniff.Proto

	// Begins: of a TCP flow that is sniff.Unknown, it begins as a request does to a reader that is
	// not strict (sniff.BeginsRequest).
	Begins bool

	// Version of QUIC (RFC 9000 section 15) that the ClientHello came in; 0 for all else.
	Version uint32

	// Host is the authority of the first HTTP/1 request, SNI and ALPN the
	// names of a ClientHello, which with ECH is perhaps but an outer one (see sniff.Hello);
	// empty where there is none.
	Host string
	SNI  string
	ALPN []string
	ECH  bool

	// Head is the client's first bytes, up to the end of the first request's head:
	// of HTTP/1 the empty line, of HTTP/2 the frame with END_HEADERS. It ends
	// earlier where the file holds no more of it, or after sniff.MaxPeek bytes. Nil
	// unless Options.Heads is set and Proto is an HTTP.
	Head []byte

	// First is who sent payload first: as far as that shows, in the order the
	// ends saw it (by acknowledgements), else in the order of capture.
	First Side

	// ClientBytes and ServerBytes count the payload that went by, repeats of TCP not counted.
	ClientBytes, ServerBytes int64

	// AnswerBytes and AnswerSegments are how much of the client's stream it took until Proto
	// (with its names) was final: bytes from the first on, and the segments or datagrams that
	// brought them. Both 0 when it never became final.
	AnswerBytes, AnswerSegments int

	// Midstream: neither SYN nor SYN-ACK is in the file. False for UDP.
	Midstream bool

	// Incomplete: the client sent bytes that would tell more but they are not in the
	// file. Proto is then sniff.None, or TLS or QUIC with the names that its first part shows.
	Incomplete bool
}

// Options of Read. The zero value is usable.
type Options struct {
	// Heads keeps the first bytes of HTTP connections for Flow.Head.
	Heads bool

	// Tally counts the frames as they are read; nil: nobody asks.
	Tally *Tally
}

// Tally is what a capture's frames were, whether or not a flow came of them.
type Tally struct {
	Frames    int // all
	TCP, UDP  int // segments and datagrams, those in tunnels too
	Tunnelled int // of these, those in a tunnel: VXLAN, GRE, IP in IP
	Fragments int // of IP, whose segments cannot be read
	Other     int // everything else: other protocols, and what could not be read
}

// count adds a frame, in which d found seg.
func (t *Tally) count(d *decoder, seg *segment) {
	t.Frames++
	switch {
	case seg != nil && seg.udp:
		t.UDP++
	case seg != nil:
		t.TCP++
	case d.fragments:
		t.Fragments++
	default:
		t.Other++
	}
	if seg != nil && d.tunnels > 0 {
		t.Tunnelled++
	}
}

// Error is what is wrong with a capture, and where.
type Error struct {
	Frame  int   // number of the frame that could not be read, from 1
	Offset int64 // where it begins in the file, in bytes; of a gzipped file, in what it unpacks to
	Err    error
}

// Error says all of it.
func (e *Error) Error() string {
	return fmt.Sprintf("frame %d, at byte %d: %v", e.Frame, e.Offset, e.Err)
}

// Unwrap is what is wrong.
func (e *Error) Unwrap() error { return e.Err }

// Flows is Read with the zero Options.
func Flows(r io.Reader) iter.Seq2[Flow, error] { return Read(r, Options{}) }

// Read yields the flows of the capture that r holds. Those that are there until its
// end come in the order of their first frames. Those that end before, and are quiet for
// minutes then, and those that had to make room, come earlier: what follows
// of such a flow is another one. Flows without a payload byte are among
// them. An error is yielded last, after the flows of what could be read before it: an
// *Error, or one that tells why r is no capture at all.
func Read(r io.Reader, o Options) iter.Seq2[Flow, error] {
	return func(yield func(Flow, error) bool) {
		c, err := open(r)
		if err != nil {
			yield(Flow{}, err)
			return
		}
		t := newTable(o.Heads)
		hand := func(over []*conn) bool {
			for _, c := range over {
				if !yield(c.flow(), nil) {
					return false
				}
			}
			return true
		}
		var unknown, broken error
		for n := 1; ; n++ {
			at := c.offset()
			f, err := c.next()
			if err == io.EOF {
				break
			}
			if err != nil {
				broken = &Error{n, at, err}
				break
			}
			var d decoder
			seg, known := d.decode(f.link, f.data)
			if o.Tally != nil {
				o.Tally.count(&d, seg)
			}
			if !known && unknown == nil { // frames of other interfaces may be known
				unknown = &Error{n, at, fmt.Errorf("link type %d is not supported; supported are %s", f.link, Links())}
			}
			if seg == nil {
				continue
			}
			t.add(n, f.at, seg)
			if !hand(t.ready()) {
				return
			}
		}
		if err := errors.Join(unknown, broken); hand(t.rest()) && err != nil {
			yield(Flow{}, err)
		}
	}
}
