package http2

import (
	"cmp"
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"slices"

	"aether/dataplane/hpack"
	"aether/dataplane/httpmsg"
)

// Conn is one end of an HTTP/2 connection. Make one with New. Not safe for
// concurrent use.
type Conn struct {
	cfg   Config
	h     Handler
	err   *ConnError // not nil: the connection is over
	stats Stats

	// Output. What was sent is out[:off]; sent and mark count bytes since New.
	out  []byte
	off  int
	sent int64

	// Frames queued in answer to the peer's: acks[1] since out's end was at
	// mark, acks[0] before that.
	acks [2]int
	mark int64

	// Streams.
	table      table
	open       int       // begun and not over
	ended      []*Stream // over, not reaped
	free       []*Stream
	ordered    []*Stream // of inOrder
	starved    list      // want to write, have stream window, wait for the connection
	nextID     uint32    // client: of the next Open
	lastSent   uint32    // client: highest identifier used in a HEADERS frame
	lastPeer   uint32    // server: highest identifier the peer used
	goneLast   uint32    // what our GOAWAY said
	peerLast   uint32    // what the peer's GOAWAY said
	goingAway  bool      // our GOAWAY that names the last stream is queued
	draining   bool      // the one before it is, which only warns
	drainPong  uint64    // the PONG that says that the peer knows
	peerGoAway bool
	closed     ring // streams that are over

	// Flow control of the connection, and the windows of new streams.
	sendWin  int64
	recvWin  int64
	credit   int // consumed, no WINDOW_UPDATE sent yet
	peerInit int64
	recvInit int64

	// Peer's SETTINGS.
	gotSettings bool
	acked       bool // it acknowledged ours
	peerMax     uint32
	peerConnect bool

	// Input.
	preface  int // bytes of the client preface to come
	dataID   uint32
	dataLeft int // bytes of the DATA frame being received, and of its padding
	padLeft  int
	dataEnd  bool
	contID   uint32 // stream whose header block is not complete; 0: none
	contEnd  bool
	contN    int // CONTINUATION frames of it so far
	cont     []byte

	// Fields.
	enc    *hpack.Encoder
	dec    *hpack.Decoder
	fields []hpack.Field
	head   httpmsg.Head
	pseudo [numPseudo][]byte
	cookie []byte // crumbs joined

	// What the peer may not do for ever; see the bounds in http2.go.
	useless  int // frames; negative: useful ones made up for as many beforehand
	provoked int
	rapid    int  // streams reset before their answer: by the peer (server), by us (client)
	overfull bool // more than maxHeads is queued: Feed ends the connection

	faulty *Stream // during its OnReset: the peer broke the protocol on it, as fault tells
	fault  *StreamError

	pings, pongs uint64

	paused bool
}

// New makes a Conn that tells h its events, and queues the preface (client)
// and SETTINGS.
func New(cfg Config, h Handler) *Conn {
	cfg = cfg.withDefaults()
	c := &Conn{
		cfg: cfg, h: h,
		sendWin: initWindow, peerInit: initWindow, peerMax: peerStreams,
		recvWin:  int64(cfg.ConnWindow),
		recvInit: int64(max(cfg.StreamWindow, initWindow)), // the larger of what the peer may assume until it acknowledges
		enc:      hpack.NewEncoder(),
		dec:      hpack.NewDecoder(cfg.MaxHeader, markField),
	}
	if cfg.Server {
		c.preface, c.nextID = len(clientPreface), maxStreamID+1
	} else {
		c.nextID = 1
		c.out = append(c.out, clientPreface...)
	}
	o := len(c.out)
	c.out = appendFrame(c.out, 0, frameSettings, 0, 0)
	c.out = appendSetting(c.out, settingInitialWindow, uint32(cfg.StreamWindow))
	c.out = appendSetting(c.out, settingMaxHeaderList, uint32(cfg.MaxHeader))
	if cfg.Server {
		c.out = appendSetting(c.out, settingMaxStreams, cfg.MaxStreams)
		if cfg.EnableConnect {
			c.out = appendSetting(c.out, settingEnableConnect, 1)
		}
	} else {
		c.out = appendSetting(c.out, settingEnablePush, 0)
	}
	putLength(c.out[o:], len(c.out)-o-frameHeader)
	if n := cfg.ConnWindow - initWindow; n > 0 {
		c.out = appendUint32(appendFrame(c.out, 4, frameWindowUpdate, 0, 0), uint32(n))
	}
	return c
}

// Out returns what is to be sent; valid until the next call on c or a stream of it.
func (c *Conn) Out() []byte { return c.out[c.off:] }

// Sent says that the first n bytes of Out are sent. It may raise OnWritable,
// when half of the bound on queued output has become free.
func (c *Conn) Sent(n int) {
	c.off += n
	c.sent += int64(n)
	left := len(c.out) - c.off
	if c.off >= left { // moving what is left costs less than what was sent
		c.out = c.out[:copy(c.out, c.out[c.off:])]
		c.off = 0
	}
	if c.sent >= c.mark {
		c.acks[0], c.acks[1] = c.acks[1], 0
		c.mark = c.sent + int64(left)
	}
	if left <= maxQueued/2 {
		c.wake()
	}
}

// Open begins a client's request: WriteHead follows. The errors are
// ErrTooManyStreams (the peer's SETTINGS_MAX_CONCURRENT_STREAMS, taken as 100
// until they arrive, or MaxStreams, or 4 MiB wait to be sent), ErrGoAway and ErrStreamIDs.
func (c *Conn) Open() (*Stream, error) {
	switch {
	case c.err != nil || c.goingAway || c.peerGoAway:
		return nil, ErrGoAway
	case c.nextID > maxStreamID:
		return nil, ErrStreamIDs
	case c.open >= c.maxOpen() || len(c.out)-c.off > maxHeads/2:
		return nil, ErrTooManyStreams
	}
	s := c.newStream(c.nextID)
	c.nextID += 2
	return s, nil
}

func (c *Conn) maxOpen() int { return int(min(c.peerMax, c.cfg.MaxStreams)) }

// Available returns how many streams Open would give now.
func (c *Conn) Available() int {
	if c.err != nil || c.goingAway || c.peerGoAway || c.nextID > maxStreamID || len(c.out)-c.off > maxHeads/2 {
		return 0
	}
	return max(0, min(c.maxOpen()-c.open, int(maxStreamID-c.nextID)/2+1))
}

// Settled reports whether the peer's first SETTINGS have come, and with them its
// limits.
func (c *Conn) Settled() bool { return c.gotSettings }

// Streams returns how many streams are not over.
func (c *Conn) Streams() int { return c.open }

// Stats returns the counters.
func (c *Conn) Stats() Stats { return c.stats }

// PeerAllowsConnect reports whether the server takes extended CONNECT (RFC 8441).
func (c *Conn) PeerAllowsConnect() bool { return c.peerConnect }

// Ping queues a PING; Pongs tells when the peer has answered.
func (c *Conn) Ping() {
	if c.err != nil {
		return
	}
	c.pings++
	c.out = binary.BigEndian.AppendUint64(appendFrame(c.out, 8, framePing, 0, 0), c.pings)
}

// Pongs returns how many of the PINGs sent are answered: a driver that sees
// this and its input stand still after Ping has a dead peer.
func (c *Conn) Pongs() uint64 { return c.pongs }

// Shutdown begins an end that loses no request. Open streams go on; a client's
// Open fails. A server with NoError warns the client first (GOAWAY with the
// highest identifier there is, and PING; RFC 9113 6.8) and goes on taking
// requests: what was sent before the client knew is served. At the second call,
// or at once with another code, GOAWAY names the last stream taken and later
// ones get REFUSED_STREAM. The driver makes that call some time after Warned: a
// client answers a PING before what it has begun to send is out. Close when
// Done. Further calls do nothing.
func (c *Conn) Shutdown(code Code) {
	switch {
	case c.goingAway || c.err != nil:
	case c.cfg.Server && code == NoError && !c.draining:
		c.draining = true
		c.out = appendUint32(appendFrame(c.out, 8, frameGoAway, 0, 0), maxStreamID)
		c.out = appendUint32(c.out, uint32(NoError))
		c.Ping()
		c.drainPong = c.pings
	default:
		c.goAway(code, "")
	}
}

// Warned reports whether the client has answered the PING behind the warning of
// Shutdown, and the last stream is still to be named.
func (c *Conn) Warned() bool { return c.draining && !c.goingAway && c.pongs >= c.drainPong }

// Done reports whether Shutdown has come to its end: the last stream is named, and
// none is open. What is left is to flush Out and close.
func (c *Conn) Done() bool { return c.goingAway && c.open == 0 }

// Tick says that a second or more has passed since the last one: what the peer
// did before that moved no request forward is forgiven, if not all of it at once. A
// driver without a clock need not call it.
func (c *Conn) Tick() {
	c.useless = min(c.useless, 0)
	c.provoked = max(0, c.provoked-forgiven)
	c.rapid = max(0, c.rapid-c.forgets())
}

// Tired reports whether a client has reset so many streams before their answer
// that it takes half of what a server of ours bears from anybody: the driver does
// well to open further ones on another connection.
func (c *Conn) Tired() bool { return !c.cfg.Server && c.rapid > max(maxRapid, int(c.cfg.MaxStreams))/2 }

// mostRapid is how many streams the client may reset before their answer.
func (c *Conn) mostRapid() int {
	n := max(maxRapid, int(c.cfg.MaxStreams))
	if c.cfg.Known {
		n *= knownRapid
	}
	return n
}

// forgets is how many of them a Tick forgives.
func (c *Conn) forgets() int {
	if c.cfg.Known {
		return forgotten * knownRapid
	}
	return forgotten
}

// Each calls f for every stream that is not over, in no order. f must call no
// command of any stream.
func (c *Conn) Each(f func(s *Stream)) {
	for i := range c.table.slots {
		if s := c.table.slots[i].s; s != nil {
			f(s)
		}
	}
}

// goAway queues GOAWAY; debug is for whoever reads the peer's log.
func (c *Conn) goAway(code Code, debug string) {
	if !c.goingAway {
		c.goingAway, c.goneLast = true, c.lastPeer
	}
	c.out = appendUint32(appendFrame(c.out, 8+len(debug), frameGoAway, 0, 0), c.goneLast)
	c.out = append(appendUint32(c.out, uint32(code)), debug...)
}

const aborted = "aborted by its driver"

// Abort ends the connection without a word to the peer, for when the transport
// is gone: every open stream gets OnReset(code), Out is empty, Feed fails.
func (c *Conn) Abort(code Code) {
	if c.err == nil {
		c.err = &ConnError{code, aborted}
	}
	c.out, c.off = nil, 0
	c.doom(func(*Stream) bool { return true }, code)
}

// Reap lets the objects of streams that are over be used again, and credits
// what was received on them and never credited. Call it when nothing can hold
// them any more, and not from an event.
func (c *Conn) Reap() {
	for i, s := range c.ended {
		c.giveBack(s.held)
		*s = Stream{c: c, life: over} // a command that comes too late does nothing
		c.free = append(c.free, s)
		c.ended[i] = nil
	}
	c.ended = c.ended[:0]
}

// Idle gives back the memory that only traffic needs, if no stream is open.
// The next traffic takes it again.
func (c *Conn) Idle() {
	if c.open > 0 {
		return
	}
	c.Slim()
	if len(c.ended) == 0 {
		c.ended = nil
	}
	c.free, c.fields, c.cookie, c.ordered = nil, nil, nil, nil
	c.head, c.pseudo = httpmsg.Head{}, [numPseudo][]byte{}
	c.table = table{}
	c.dec.Trim()
	c.enc.Trim()
}

// fail ends the connection because of the peer: GOAWAY, and OnReset for all.
func (c *Conn) fail(code Code, reason string) {
	if c.err != nil {
		return
	}
	c.goAway(code, reason)
	c.err = &ConnError{code, reason}
	c.doom(func(*Stream) bool { return true }, code)
}

// inOrder returns the open streams, the oldest first; valid until the next call.
func (c *Conn) inOrder() []*Stream {
	c.ordered = c.ordered[:0]
	for i := range c.table.slots {
		if s := c.table.slots[i].s; s != nil {
			c.ordered = append(c.ordered, s)
		}
	}
	slices.SortFunc(c.ordered, func(a, b *Stream) int { return cmp.Compare(a.id, b.id) })
	return c.ordered
}

// doom ends the streams that which picks, without a word to the peer, and
// tells the Handler. All are over before the first event.
func (c *Conn) doom(which func(*Stream) bool, code Code) {
	var l list
	for _, s := range c.inOrder() {
		if which(s) {
			c.drop(s, true)
			s.life = doomed
			l.push(s)
		}
	}
	for s := l.head; s != nil; s = l.head {
		l.remove(s)
		if s.life == doomed {
			s.life = over
			c.h.OnReset(s, code)
		}
	}
}

// newStream makes a stream that counts as open.
func (c *Conn) newStream(id uint32) *Stream {
	var s *Stream
	if n := len(c.free); n > 0 {
		s, c.free = c.free[n-1], c.free[:n-1]
	} else {
		s = new(Stream)
	}
	s.c, s.id, s.left, s.life = c, id, -1, alive
	s.sendWin, s.recvWin = c.peerInit, c.recvInit
	c.table.put(s)
	c.open++
	return s
}

// finish forgets a stream whose both sides have ended. What is still held may
// be credited until Reap.
func (c *Conn) finish(s *Stream) {
	c.remove(s)
	c.closed.add(s.id, false)
	c.rapid, c.provoked = max(0, c.rapid-1), max(0, c.provoked-1)
}

// drop forgets a stream that ended early, by our doing or not. What it holds
// is nobody's any more.
func (c *Conn) drop(s *Stream, byUs bool) {
	c.giveBack(s.held)
	s.held = 0
	c.remove(s)
	c.closed.add(s.id, byUs)
}

func (c *Conn) remove(s *Stream) {
	c.table.del(s.id)
	c.unlist(s)
	s.life, s.want = over, false
	c.open--
	if len(c.ended) < maxEnded {
		c.ended = append(c.ended, s)
		return
	}
	c.giveBack(s.held) // a driver that never reaps: the collector takes the object
	s.held = 0
}

// giveBack reopens the connection's window by n bytes.
func (c *Conn) giveBack(n int) {
	c.credit += n
	if c.err != nil || 2*c.credit < c.cfg.ConnWindow {
		return
	}
	c.recvWin += int64(c.credit)
	c.out = appendUint32(appendFrame(c.out, 4, frameWindowUpdate, 0, 0), uint32(c.credit))
	c.credit = 0
}

// room returns how many bytes of DATA the connection takes now; may be negative.
func (c *Conn) room() int64 { return min(c.sendWin, int64(maxQueued-len(c.out)+c.off)) }

func (c *Conn) list(s *Stream) {
	if !s.listed {
		s.listed = true
		c.starved.push(s)
	}
}

func (c *Conn) unlist(s *Stream) {
	if s.listed {
		s.listed = false
		c.starved.remove(s)
	}
}

// wake tells starved streams, the longest waiting first, while there is room.
func (c *Conn) wake() {
	for s := c.starved.head; s != nil && c.err == nil && c.room() > 0; s = c.starved.head {
		c.unlist(s)
		if s.sendWin > 0 { // else its own window shut meanwhile, and wakes it later
			s.want = false
			c.h.OnWritable(s)
		}
	}
}

// list of streams, in order.
type list struct{ head, tail *Stream }

func (l *list) push(s *Stream) {
	s.prev, s.next = l.tail, nil
	if l.tail != nil {
		l.tail.next = s
	} else {
		l.head = s
	}
	l.tail = s
}

func (l *list) remove(s *Stream) {
	if s.prev != nil {
		s.prev.next = s.next
	} else {
		l.head = s.next
	}
	if s.next != nil {
		s.next.prev = s.prev
	} else {
		l.tail = s.prev
	}
	s.prev, s.next = nil, nil
}

// table finds open streams by identifier: open addressing, at most half full.
// The peer chooses identifiers, but not which of them meet: where one belongs depends
// on numbers that nobody outside the process knows.
type table struct {
	slots []slot
	n     int
	shift uint8 // 32 less the bits of a slot's number
}

var tableKeys = [2]uint32{rand.Uint32() | 1, rand.Uint32() | 1}

type slot struct {
	id uint32 // 0: empty
	s  *Stream
}

func (t *table) home(id uint32) int {
	h := id * tableKeys[0]
	h = (h ^ h>>15) * tableKeys[1]
	return int((h ^ h>>13) * 0x9e3779b1 >> t.shift)
}

func (t *table) get(id uint32) *Stream {
	if t.n == 0 {
		return nil
	}
	for i := t.home(id); ; i = (i + 1) & (len(t.slots) - 1) {
		switch t.slots[i].id {
		case id:
			return t.slots[i].s
		case 0:
			return nil
		}
	}
}

func (t *table) put(s *Stream) {
	if 2*t.n >= len(t.slots) {
		old := t.slots
		t.slots = make([]slot, max(16, 2*len(old)))
		t.shift = uint8(32 - bits.TrailingZeros(uint(len(t.slots))))
		for _, e := range old {
			if e.id != 0 {
				t.insert(e)
			}
		}
	}
	t.insert(slot{s.id, s})
	t.n++
}

func (t *table) insert(e slot) {
	i := t.home(e.id)
	for t.slots[i].id != 0 {
		i = (i + 1) & (len(t.slots) - 1)
	}
	t.slots[i] = e
}

func (t *table) del(id uint32) {
	mask := len(t.slots) - 1
	i := t.home(id)
	for t.slots[i].id != id {
		i = (i + 1) & mask
	}
	t.n--
	for j := (i + 1) & mask; t.slots[j].id != 0; j = (j + 1) & mask {
		// What would be found from i as well moves there.
		if (j-t.home(t.slots[j].id))&mask >= (j-i)&mask {
			t.slots[i] = t.slots[j]
			i = j
		}
	}
	t.slots[i] = slot{}
}

// ring remembers how the last streams ended, to tell frames that were under
// way when we reset a stream (to be ignored) from frames on a stream that the
// peer itself had ended (an error), RFC 9113 5.1.
type ring struct {
	id     [64]uint32 // byUs in the top bit, which identifiers have not
	next   uint8
	forgot bool // a stream that we reset has fallen out
}

const byUsBit = 1 << 31

func (r *ring) add(id uint32, byUs bool) {
	i := r.next % uint8(len(r.id))
	r.forgot = r.forgot || r.id[i]&byUsBit != 0
	r.id[i] = id
	if byUs {
		r.id[i] |= byUsBit
	}
	r.next++
}

// ending of a stream that is over.
type ending uint8

const (
	unknown   ending = iota
	endedWell        // or reset by the peer
	resetByUs
)

func (r *ring) get(id uint32) ending {
	for _, e := range r.id {
		switch e {
		case id:
			return endedWell
		case id | byUsBit:
			return resetByUs
		}
	}
	return unknown
}
