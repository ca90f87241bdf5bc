package engine

import (
	"errors"

	"aether/dataplane/exchange"
	"aether/dataplane/http2"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
)

// h2conn drives an HTTP/2 connection: a client's (captured h2c, the hop at
// the destination) or one of our own (the hop at the source, an h2c application).
type h2conn struct {
	transport
	h2    *http2.Conn
	left  []byte // a frame's first part, nil when none
	unfed bool   // left came with the connection and was never fed
	info  *ConnInfo
	free  *h2Free // of its loop

	owner  h2Owner // of a client; nil: a server
	socket string  // of a client: the Unix socket that it is to; empty: an address
	hop    bool    // the source's hop session, which is asked whether it lives
	mesh   bool    // server: the peer is a proxy, and verified

	client     bool
	connecting bool
	cause      error // what ended the connection, for the exchanges on it
	goaway     bool  // takes no new requests
	ending     bool  // the connection ends, and its streams with it
	endCode    exchange.Code
	had        int64  // ending, client: how many of the bytes written the peer may have taken
	requests   uint64 // streams opened on it
	bond       Bond   // nil: it has no end
	until      int64  // when bond ends, as was known last
	severed    bool   // it ends before
	resets     uint64 // http2.Stats.PeerResets at the last OnReset
	retireAt   int64  // hop: when that becomes so by age
	closing    bool   // close once out is empty and no stream is left
	reaping    bool
	pumping    bool
	owed       int64         // hop: since when the peer owes an answer and is silent; 0: it owes none
	life       reactor.Timer // hop: pingTimer; server: drainTimer
	stuff      reactor.Timer // stallTimer
	cut        reactor.Timer // its identity ends
	slow       reactor.Timer // frameTimer
	begun      int64         // time of the first byte of a frame, or header block, that has not ended; 0: none
	block      uint32        // the stream of that block; 0: it is a frame
	inRecord   bool          // what begun is about is a TLS record, in which a frame may begin
	slack      bool          // timer looks for what a burst has left behind
	pinged     int64         // hop: time of a PING that nothing has followed; 0: none
	tunnels    int           // streams that are tunnels
	full       bool          // server: not read from because the client does not read
	ticked     int64         // time of the codec's last Tick
	warned     int64         // server: since when the client is known to have read the first of its two GOAWAYs; 0: it is not
	drains     int           // streams that are drained
	behind     bool          // left has whole frames: the pod's share of an iteration did not suffice for them
	unsent     bool          // a write failed: nothing is sent any more, and what the peer sent before is read to its end
	kept       int           // bytes that the streams hold, those of waits too
	waits      []*h2stream   // those that are over on the wire, of which something waits
}

// h2stream is one stream's adapter between http2 and exchange.
type h2stream struct {
	c           *h2conn
	s           *http2.Stream // nil once it is over on the wire: it is another request's by then
	x           *exchange.Exchange
	moved       int64  // time of the last byte of a message either way
	from        int64  // client: its first byte on the wire is behind so many
	kept        int    // bytes that the connection's kept has of it
	pend        []byte // received data that the exchange refused: pend[off:]
	off         int
	trailers    []httpmsg.Field
	arena       []byte // of trailers
	used        bool   // pend is the stream's own, no leftover of another
	pendEnd     bool
	pendTr      bool // trailers follow pend
	wantsTunnel bool // for a tunnel (upgrade.go)
	tunnel      bool // it was granted
	remote      bool // the peer's side has ended
	local       bool // ours has
	dead        bool
	drained     bool          // nobody wants the rest of the answer: x is nil
	lost        bool          // client: reset behind the end of an answer that is not taken whole yet, and
	code        exchange.Code // why
	at          int           // in c.waits, from 1; 0: it is not there
}

// h2Owner has opened a client's connection. Its methods are called on the connection's loop.
type h2Owner interface {
	lost(c *h2conn, code exchange.Code) // it ends; its streams' exchanges are told next
	retired(c *h2conn)                  // it takes no new requests; its streams go on
	freed()                             // a stream of it has ended: another may be opened
}

// h2Free is what the HTTP/2 connections of a loop recycle.
type h2Free struct {
	l       *Loop
	streams []*h2stream // free
	late    []*h2stream // scratch of h2conn.expire
	dead    []*h2stream // to be recycled after the flush
	reap    []*h2conn   // whose codecs recycle theirs then
	queued  bool
}

func (l *Loop) h2Free() *h2Free {
	f, ok := l.kept[keptH2].(*h2Free)
	if !ok {
		f = &h2Free{l: l}
		l.kept[keptH2] = f
	}
	return f
}

func (f *h2Free) shrink() { f.streams = nil }

func (f *h2Free) getStream() *h2stream {
	if n := len(f.streams); n > 0 {
		s := f.streams[n-1]
		f.streams = f.streams[:n-1]
		return s
	}
	return &h2stream{}
}

func (f *h2Free) queue() {
	if !f.queued {
		f.queued = true
		f.l.After(f)
	}
}

// Run recycles what ended in this iteration: nothing holds it any more.
func (f *h2Free) Run() {
	f.queued = false
	for i, s := range f.dead {
		f.dead[i] = nil
		if len(f.streams) < f.l.keep(keepStreams) {
			*s = h2stream{pend: s.pend[:0]}
			if cap(s.pend) > keepPend {
				s.pend = nil
			}
			f.streams = append(f.streams, s)
		}
	}
	f.dead = f.dead[:0]
	for i, c := range f.reap {
		f.reap[i] = nil
		c.reaping = false
		c.h2.Reap()
		if c.closed {
			c.h2.Idle() // a stream of it may wait for long
		}
		if !c.closed && !c.wblk && len(c.h2.Out()) > 0 {
			c.mark() // window that nobody had given back
		}
	}
	f.reap = f.reap[:0]
}

// Fail: there is nothing to close; what was not recycled is garbage.
func (f *h2Free) Fail(error) {
	f.queued = false
	clear(f.dead)
	clear(f.reap)
	f.dead, f.reap = f.dead[:0], f.reap[:0]
}

func (c *h2conn) mark() {
	if !c.dirty && !c.closed {
		c.dirty = true
		c.l.Dirty(c)
	}
}

func (c *h2conn) wantReap() {
	if !c.reaping {
		c.reaping = true
		c.free.reap = append(c.free.reap, c)
		c.free.queue()
	}
}

// holds accounts d bytes more, or less, that streams hold; what waits may outlive its connection.
func (c *h2conn) holds(d int) {
	if c.kept += d; d == 0 {
		return
	}
	if c.closed {
		c.recount()
	} else {
		c.mark()
	}
}

// recount accounts the buffers as they are now.
func (c *h2conn) recount() {
	n := c.kept
	if !c.closed {
		n += cap(c.left) + c.records() + c.h2.Held()
	}
	c.account(n)
}

// freed: a stream has ended, and its place may be another's.
func (c *h2conn) freed() {
	if c.owner != nil {
		c.owner.freed()
	}
}

func fromH2(code http2.Code, connecting bool) exchange.Code {
	switch {
	case connecting:
		return exchange.Connect
	case code == http2.RefusedStream:
		return exchange.Refused
	case code == http2.NoError:
		return exchange.Closed
	case code == http2.Cancel, code == http2.ConnectError:
		return exchange.Closed
	case code == http2.EnhanceYourCalm:
		return exchange.TooLarge
	default:
		return exchange.Protocol
	}
}

func toH2(code exchange.Code, client bool) http2.Code {
	switch code {
	case exchange.NoError:
		if client {
			return http2.Cancel
		}
		return http2.NoError
	case exchange.Cancel, exchange.Timeout:
		return http2.Cancel
	case exchange.Refused:
		return http2.RefusedStream
	case exchange.Protocol:
		return http2.ProtocolError
	default:
		return http2.InternalError
	}
}

// copyFields copies fields that die into one array.
func copyFields(f []httpmsg.Field) (to []httpmsg.Field, arena []byte) {
	need := 0
	for i := range f {
		need += len(f[i].Name) + len(f[i].Value)
	}
	to, arena = make([]httpmsg.Field, 0, len(f)), make([]byte, 0, need)
	keep := func(b []byte) []byte {
		o := len(arena)
		arena = append(arena, b...)
		return arena[o:len(arena):len(arena)]
	}
	for i := range f {
		to = append(to, httpmsg.Field{Name: keep(f[i].Name), Value: keep(f[i].Value)})
	}
	return to, arena
}

// serves is drainable.
func (c *h2conn) serves() bool { return !c.client }

// ended reports whether the peer has ended the session, of which the loop will be told.
func (c *h2conn) ended() bool {
	const ends = reactor.PeerEnd | reactor.Hangup | reactor.Error
	return c.fin || c.l.Pending(c.fd)&ends != 0
}

// ErrSilent: the peer of a session answers nothing any more, not even PING.
var ErrSilent = errors.New("engine: the peer of the session answers nothing any more, not even PING")

// ErrTardy: the peer began a frame, or a header block, of HTTP/2, or a TLS record under it, and did not end it in time.
var ErrTardy = errors.New("engine: the peer began an HTTP/2 frame, header block or TLS record and did not end it in time")

// ErrExpired: the certificate of one of a session's ends has ended, and the session with it.
var ErrExpired = errors.New("engine: the certificates that the session was opened with have expired")

// stuffed reports whether the connection is not to be read from because its pod
// holds too much. A hop carries the requests of many: it is read from up to twice
// podHeld, and what has stalled on it ends before (stallTimer).
//
// One that is known to end is read to its end: what it holds goes with it.
func (c *h2conn) stuffed() bool {
	return c.sh.tight && !c.fin && c.held >= fairHeld && (!c.hop && !c.mesh || c.sh.held >= hopHeld*c.l.proc.podHeld())
}
