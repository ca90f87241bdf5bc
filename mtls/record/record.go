// Package record is the record layer of TLS without the connection: after the
// handshake, bytes go in and come out, and the caller does the reading and writing.
//
//   - The handshake and the verification are always crypto/tls's own, over the
//     socket. Only then is a Stream flipped into a Conn, which does no I/O, starts
//     no goroutine and never waits.
//   - No byte is lost at the flip: what arrived behind the handshake comes first
//     out of the Conn.
//   - What a Conn returns to be sent is sent in the order it was returned; it
//     holds back at most a few kilobytes of its own (Take).
//   - Two makers stand behind the one interface: Std drives crypto/tls over
//     memory, Own seals and opens TLS 1.3 records with the secrets of the
//     finished handshake. Where Own cannot be had, Flip gives Std.
//
// It knows no identity, no policy and no protocol above TLS.
package record

import (
	"context"
	"crypto/fips140"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"
)

// MaxPlain is the most plaintext one record carries, in bytes (RFC 8446 5.1).
const MaxPlain = 16384

// MaxRecord is the most bytes one record takes on the wire (RFC 8446 5.2),
// header included.
const MaxRecord = headerLen + MaxPlain + 256

const headerLen = 5

// ErrMore: a Conn needs more ciphertext before it can go on.
var ErrMore = errors.New("record: more ciphertext is needed")

// Conn is the record layer of a TLS connection whose handshake is done.
//
// Feed, Read (or Next), Held and Partial are for one goroutine, Seal (or SealRecord) and
// CloseNotify for one; they may be the same or two. Pending and Take may be
// called by either. Whoever sends must send the bytes in the order in which
// Seal, SealRecord, CloseNotify and Take returned them.
//
// A Conn does not see the socket's end. A socket that ends before Read has
// returned io.EOF was cut short, and what came may be incomplete (RFC 8446 6.1).
type Conn interface {
	// Feed gives received bytes. They are borrowed, and may be overwritten,
	// until Read returns ErrMore or another error; then they are the caller's
	// again. Feeding before Read asked for more is allowed and costs a copy.
	Feed(cipher []byte)

	// Read copies plaintext into p. ErrMore: nothing is left but perhaps part of
	// a record, which the Conn keeps. io.EOF: the peer sent close_notify. Any
	// other error is for good, and Take may have an alert for the peer.
	// Read never returns 0, nil for a p that is not empty. After each run of
	// Reads look at Pending.
	Read(p []byte) (int, error)

	// Seal appends to dst the records that carry p, as few as can be, preceded by
	// what Take would have returned, and returns the longer slice. p is not kept.
	// An error is for good, and the slice may still hold an alert to send.
	Seal(dst, p []byte) ([]byte, error)

	// CloseNotify appends the alert that ends this direction. Afterwards Seal fails;
	// Read goes on. Further calls append nothing.
	CloseNotify(dst []byte) []byte

	// Held is how many bytes of memory the Conn keeps of what came: part of a record or of a handshake message, and
	// copies of what was fed before Read asked for more. For the goroutine that reads.
	Held() int

	// Partial reports whether a record has begun to come that has not ended. For the goroutine that reads.
	Partial() bool

	// Pending reports whether the Conn itself has something to send: the answer
	// to a key update, or an alert.
	Pending() bool

	// Take appends what is pending to dst and returns the longer slice.
	Take(dst []byte) []byte
}

// InPlace is what a Conn may offer besides: the same work without copies.
type InPlace interface {
	Conn

	// Next returns the plaintext of the next record: Read without the copy, same
	// errors. The slice, which lies in the bytes fed where it can, is valid until
	// the next Feed; Feed(nil) after ErrMore lets go of it.
	Next() ([]byte, error)

	// SealRecord seals the n bytes (1 to MaxPlain) of plaintext at b[Head:Head+n]
	// where they lie and returns the record, b[:Head+n+Tail]. b must be that long
	// at least. Unlike Seal it puts nothing pending before it: call Take first.
	SealRecord(b []byte, n int) ([]byte, error)
}

// Rekeyer is what a Conn may offer besides: to change keys in the middle.
type Rekeyer interface {
	// Rekey appends a key update to dst, which also asks the peer for one, and
	// returns the longer slice; what is sealed from now on uses new keys.
	Rekey(dst []byte) []byte
}

// The room that SealRecord needs before and behind the plaintext, in bytes:
// the header, and the content type and tag of AES-GCM (RFC 8446 5.2).
const (
	Head = headerLen
	Tail = 1 + 16
)

// Maker says who seals and opens records after the handshake.
type Maker uint8

// The makers.
const (
	// Std is crypto/tls over memory. It can do every version and suite and is the only one under FIPS 140.
	Std Maker = iota
	// Own is this package's TLS 1.3 with AES-GCM; a connection that turns out to be anything else gets Std,
	// and so does a server whose configuration does not disable session tickets.
	Own
)

// Stream is a TLS connection over a socket up to the end of its handshake.
// Not safe for concurrent use.
type Stream struct {
	tc      *tls.Conn
	t       *transport
	client  bool
	keys    *keyLog // nil: Std
	tickets bool    // a server that may send session tickets, under the application keys: their sequence number is not known then
}

// Client returns the client's end of a handshake over c, which the caller
// keeps and closes.
func Client(c net.Conn, cfg *tls.Config, m Maker) *Stream {
	s := &Stream{client: true, t: newTransport(c)}
	s.tc = tls.Client(s.t, s.arm(cfg, m))
	return s
}

// Server returns the server's end of a handshake over c, which the caller keeps
// and closes.
func Server(c net.Conn, cfg *tls.Config, m Maker) *Stream {
	s := &Stream{t: newTransport(c)}
	s.tc = tls.Server(s.t, s.arm(cfg, m))
	return s
}

// arm makes the handshake of cfg leave its secrets in memory when m asks for them.
func (s *Stream) arm(cfg *tls.Config, m Maker) *tls.Config {
	if m != Own || fips140.Enabled() {
		return cfg
	}
	s.keys = &keyLog{next: cfg.KeyLogWriter}
	s.tickets = !s.client && !cfg.SessionTicketsDisabled
	cfg = cfg.Clone()
	cfg.KeyLogWriter = s.keys
	if choose := cfg.GetConfigForClient; choose != nil {
		cfg.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			c, err := choose(h)
			if c != nil {
				s.keys.next = c.KeyLogWriter
				s.tickets = !c.SessionTicketsDisabled
				c = c.Clone()
				c.KeyLogWriter = s.keys
			}
			return c, err
		}
	}
	return cfg
}

// past is a deadline that has passed.
var past = time.Unix(1, 0)

// Handshake shakes hands until it is done, fails, or ctx ends, whose deadline
// holds too. After an error the connection is good for nothing but closing; where
// the configuration said why a ClientHello was refused, that is the error.
func (s *Stream) Handshake(ctx context.Context) error {
	if d, ok := ctx.Deadline(); ok {
		if err := s.t.conn.SetDeadline(d); err != nil {
			return fmt.Errorf("record: handshake: %w", err)
		}
	}
	stop := context.AfterFunc(ctx, func() { s.t.conn.SetDeadline(past) })
	err := s.tc.HandshakeContext(context.WithoutCancel(ctx)) // no goroutine of crypto/tls's: the deadline ends it
	if !stop() && err == nil {
		err = ctx.Err() // the deadline may be set at any moment: the connection cannot be used
	}
	s.t.release()
	if err == nil {
		err = s.t.conn.SetDeadline(time.Time{})
	}
	switch {
	case err == nil:
		return nil
	case s.t.refused != nil:
		return s.t.refused
	case ctx.Err() != nil:
		return fmt.Errorf("record: handshake: %w", context.Cause(ctx))
	}
	if n, ok := errors.AsType[net.Error](err); ok && n.Timeout() { // the socket's clock was faster than the context's
		return fmt.Errorf("record: handshake: %w", context.DeadlineExceeded)
	}
	return fmt.Errorf("record: handshake: %w", err)
}

// State returns what the finished handshake agreed on.
func (s *Stream) State() tls.ConnectionState { return s.tc.ConnectionState() }

// Flip turns the connection, whose handshake must be done, into a Conn. The
// socket is the caller's alone from now on, and s is used up. It panics when the
// handshake is not done, and when s was flipped before.
func (s *Stream) Flip() Conn {
	cs := s.tc.ConnectionState()
	if !cs.HandshakeComplete {
		panic("record: flip before the end of the handshake")
	}
	if s.t.mem {
		panic("record: flipped twice")
	}
	s.t.mem = true
	rest := s.t.rest
	s.t.rest = nil
	s.t.conn = nil
	if s.keys != nil && cs.Version == tls.VersionTLS13 && !s.tickets {
		if e := newEngine(cs.CipherSuite, s.client, s.keys); e != nil {
			e.Feed(rest)
			return e
		}
	}
	s.keys.forget()
	c := &stdConn{tc: s.tc, t: s.t}
	c.Feed(rest)
	return c
}
