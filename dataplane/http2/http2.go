// Package http2 is an HTTP/2 endpoint, client or server, without a transport
// (RFC 9113, with RFC 8441): bytes in and events out by Conn.Feed, commands in
// and bytes out by Conn.Out.
//
//   - Strict: what the RFC calls malformed reaches no Handler. It costs the
//     stream where the RFC allows that, else the connection.
//   - Bounded: streams, header blocks, queued output, and every kind of frame
//     that makes work without moving a request forward.
//   - Events call commands re-entrantly, on any stream; a stream's object is
//     used for another only after Reap.
//   - Nothing is allocated once warm.
//   - How the input is cut into Feed calls changes no event, except into how
//     many OnData a DATA frame comes.
//
// A Conn and its streams belong to one goroutine. The package knows no socket,
// clock, TLS or routing; what an idle or silent peer deserves is its driver's
// decision.
package http2

import (
	"cmp"
	"errors"
	"fmt"

	"aether/dataplane/httpmsg"
)

// Code is an error code (RFC 9113 7).
type Code uint32

// The error codes of RFC 9113 7.
const (
	NoError            Code = 0x0
	ProtocolError      Code = 0x1
	InternalError      Code = 0x2
	FlowControlError   Code = 0x3
	SettingsTimeout    Code = 0x4
	StreamClosed       Code = 0x5
	FrameSizeError     Code = 0x6
	RefusedStream      Code = 0x7 // never processed: safe to retry
	Cancel             Code = 0x8
	CompressionError   Code = 0x9
	ConnectError       Code = 0xa
	EnhanceYourCalm    Code = 0xb
	InadequateSecurity Code = 0xc
	HTTP11Required     Code = 0xd
)

var codeNames = [...]string{
	"NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT", "STREAM_CLOSED",
	"FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR", "CONNECT_ERROR", "ENHANCE_YOUR_CALM",
	"INADEQUATE_SECURITY", "HTTP_1_1_REQUIRED",
}

// String is the name the RFC gives the code.
func (c Code) String() string {
	if int64(c) < int64(len(codeNames)) {
		return codeNames[c]
	}
	return fmt.Sprintf("error code %#x", uint32(c))
}

// ConnError ends a connection: the peer broke the protocol or a bound, or the
// connection was aborted. GOAWAY has been queued and every stream told; what
// is left is to flush Out and close.
type ConnError struct {
	Code   Code
	Reason string // what the peer did, with the section that forbids it
}

func (e *ConnError) Error() string { return "http2: " + e.Code.String() + ": " + e.Reason }

// Fault is what the peer did, for logs.
func (e *ConnError) Fault() string { return e.Reason }

// StreamError is why a stream was reset, or a request refused: the peer broke the protocol on it, or a bound.
// Two errors of one cause are the same to errors.Is, wherever in the message the cause was.
type StreamError struct {
	Code   Code
	Reason string // what is wrong; a closed set
	Where  string // the field, the byte or the limit, as Reason does not name it; printable, at most httpmsg.MaxWhere bytes
}

func (e *StreamError) Error() string { return "http2: " + e.Code.String() + ": " + e.Fault() }

// Fault is what is wrong, and where: for the peer that sent the message, and for logs.
func (e *StreamError) Fault() string {
	if e.Where == "" {
		return e.Reason
	}
	return e.Reason + "; " + e.Where
}

// Is reports whether target has the same cause.
func (e *StreamError) Is(target error) bool {
	o, ok := target.(*StreamError)
	return ok && o.Code == e.Code && o.Reason == e.Reason
}

// Why Open gave no stream. All three mean: use another connection.
var (
	ErrTooManyStreams = errors.New("http2: no stream free on this connection: the limit of concurrent streams is reached")
	ErrGoAway         = errors.New("http2: the connection takes no new streams: it is shutting down")
	ErrStreamIDs      = errors.New("http2: the connection has used up its stream identifiers")
)

// Bounds and defaults. A frame is never larger than the protocol's default, in
// either direction, so that a buffer of frameHeader+maxFrame bytes holds one.
const (
	frameHeader = 9
	maxFrame    = 16384
	maxWindow   = 1<<31 - 1
	initWindow  = 65535 // both windows before any SETTINGS (RFC 9113 6.9.2)

	maxQueued        = 256 << 10 // DATA is not queued beyond this much unsent output
	maxAcks          = 4096      // frames queued in answer to the peer's, not sent yet
	maxHeads         = 8 << 20   // unsent output, heads and trailers included, which wait for no window
	maxContinuations = 128       // frames of one header block
	maxTrailers      = 8 << 10   // decoded bytes of a request's trailers, 32 added for each: they wait where heads do not
	maxInterim       = 64        // 1xx heads of a response
	maxEnded         = 4096      // streams that wait for Reap
	peerStreams      = 100       // streams the peer is taken to allow before its SETTINGS came
	maxStreamID      = 1<<31 - 1

	// What a peer may do that costs work and moves no request forward (RFC 9113
	// 10.5). Each Tick forgives the first wholly, and of the others the parts named.
	maxUseless  = 1000             // frames, less usefulWorth for each that is useful
	usefulWorth = 10               // useless frames that a useful one makes up for
	maxBanked   = 10 * maxUseless  // useless frames that useful ones made up for beforehand
	smallData   = 5                // bytes of DATA that make a frame useful: what a gRPC message has at least
	smallWrite  = 8                // bytes of ours that a window lets through and that make a frame useful
	maxProvoked = 100              // streams the peer made us reset, less those that ended well
	maxRapid    = 100              // streams the peer reset before their answer, less those that ended well; or Config.MaxStreams, if larger
	forgiven    = maxProvoked / 10 // of maxProvoked, a Tick
	forgotten   = maxRapid         // of maxRapid, a Tick
	knownRapid  = 10               // times maxRapid and forgotten that a Config.Known client has

	// How much of other work counts as a useless frame.
	settingsWork = 64 // bytes of SETTINGS
	streamsWork  = 16 // streams that one SETTINGS or GOAWAY looks at
)

// Config of a Conn. The zero value is a client with the defaults.
type Config struct {
	Server       bool
	StreamWindow int    // receive window of a stream, bytes; 0: 256 KiB
	ConnWindow   int    // receive window of the connection, bytes, at least 65535; 0: 2 MiB
	MaxStreams   uint32 // server: concurrent streams allowed to the peer; client: own bound; 0: 1000
	MaxHeader    int    // decoded bytes of a head, 32 added for each field; 0: 61440
	MaxFields    int    // fields of a head, cookies counted as one; 0: 100

	// Known: the client's identity is verified, and it may send the requests of many:
	// it may reset knownRapid times as many of them early (a server's).
	Known bool

	// Date is the Date of the answers that the Conn itself makes (server); nil: they have none.
	Date func() []byte

	// EnableConnect announces extended CONNECT (RFC 8441) to clients. A request
	// with :protocol then has Method CONNECT and the protocol in Head.Upgrade.
	EnableConnect bool
}

func (c Config) withDefaults() Config {
	c.StreamWindow = min(cmp.Or(c.StreamWindow, 256<<10), maxWindow)
	c.ConnWindow = min(max(cmp.Or(c.ConnWindow, 2<<20), initWindow), maxWindow)
	c.MaxStreams = cmp.Or(c.MaxStreams, 1000)
	c.MaxHeader = cmp.Or(c.MaxHeader, 61440)
	c.MaxFields = cmp.Or(c.MaxFields, 100)
	return c
}

// Handler receives the events of a Conn, during Feed, and OnWritable also
// during Sent, OnReset also during Abort. It may call the commands of any
// stream, and Open, Shutdown and Out, but not Feed, Sent, Abort, Reap or Idle
// of the same Conn.
type Handler interface {
	// OnHead: a request head (server), a response or interim head (client).
	// h is valid until return and must not be kept. end: no body follows.
	OnHead(s *Stream, h *httpmsg.Head, end bool)

	// OnData: p is a piece of the body, valid until return, empty only with
	// end. The peer's window reopens only by s.Credit(len(p)).
	OnData(s *Stream, p []byte, end bool)

	// OnTrailers ends the receive side. f is valid until return.
	OnTrailers(s *Stream, f []httpmsg.Field)

	// OnReset: the stream ended early, and s is gone after return. The peer
	// reset it (NoError after a whole response is legal, RFC 9113 8.1), it broke
	// the protocol on this stream, the connection failed, or the peer's GOAWAY
	// excluded it (RefusedStream: never processed). What was received and not
	// credited is credited to the connection. s.Err tells what the peer did wrong.
	OnReset(s *Stream, code Code)

	// OnRefused: a request of which no stream was made (server). It was malformed, and reset (status 400), or
	// beyond MaxHeader or MaxFields, and answered 431.
	OnRefused(status int, why *StreamError)

	// OnWritable: WriteData took less than it was given, and there is room again.
	OnWritable(s *Stream)

	// OnGoAway: the peer takes no streams above last and will close. The streams
	// it excludes get OnReset after this.
	OnGoAway(last uint32, code Code)
}

// Stats counts what no event tells of. All grow only.
type Stats struct {
	Malformed  uint64 // streams reset because the peer broke the protocol on them
	TooLarge   uint64 // heads and trailers beyond MaxHeader or MaxFields; requests were answered 431
	Refused    uint64 // requests refused: MaxStreams reached, or after Shutdown
	PeerResets uint64 // streams the peer reset
}
