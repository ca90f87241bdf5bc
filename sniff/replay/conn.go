package replay

import (
	"cmp"
	"container/list"
	"net/netip"
	"slices"
	"time"

	"aether/sniff"
)

// Bounds of a table. Whoever has been idle for longest makes room.
const (
	maxOpen = 1 << 16  // flows followed at a time
	maxHeld = 64 << 20 // bytes of memory that all of them hold, about

	// How long a flow may be idle, in seconds of the capture's clock, before it is taken for over.
	idleEnded = 2 * 60 // a connection that was closed: what comes late (RFC 9293 section 3.3.2: 2 MSL)
	idleUDP   = 3 * 60 // RFC 4787 section 4.3: at least 2 minutes
	idleTCP   = 2 * 60 * 60
)

// pair is the two ends of a flow, the lower one first: it is the same in both directions.
type pair [2]netip.AddrPort

type key struct {
	udp  bool
	ends pair
}

// class says how soon a flow is given up.
type class uint8

const (
	ended class = iota // closed, or replaced by a newer connection of the same ends
	datagrams
	alive
	classes
)

var idleLimit = [classes]int64{ended: idleEnded, datagrams: idleUDP, alive: idleTCP}

// table holds the flows that have not been yielded.
type table struct {
	open    map[key]*list.Element
	idle    [classes]*list.List // of *conn, the idlest first
	max     int
	maxHeld int
	heads   bool

	held int
	now  int64   // Unix seconds; the capture's clock, which never goes back here
	over []*conn // given up, and not yielded yet
}

func newTable(heads bool) *table {
	t := &table{open: map[key]*list.Element{}, max: maxOpen, maxHeld: maxHeld, heads: heads}
	for i := range t.idle {
		t.idle[i] = list.New()
	}
	return t
}

// add gives a segment to its flow. at is when it was captured, the zero time where
// that is not known: flows then end by nothing but the lack of room.
func (t *table) add(frame int, at time.Time, s *segment) {
	if !at.IsZero() {
		t.now = max(t.now, at.Unix())
	}
	t.expire()
	k, dir := key{s.udp, pair{s.src, s.dst}}, 0
	if s.src.Compare(s.dst) > 0 {
		k.ends, dir = pair{s.dst, s.src}, 1
	}
	e := t.open[k]
	if e != nil {
		if c := e.Value.(*conn); !s.udp && c.renewedBy(dir, s) {
			t.move(e, ended)
			e = nil
		}
	}
	if e == nil {
		c := &conn{key: k, frame: frame, start: at, client: -1, class: alive, heads: t.heads}
		if s.udp {
			c.class = datagrams
		}
		e = t.idle[c.class].PushBack(c)
		t.open[k] = e
	}
	c := e.Value.(*conn)
	if s.udp {
		c.datagram(frame, dir, s)
	} else {
		c.segment(frame, dir, s)
	}
	c.last, c.lastFrame = t.now, frame
	cost := c.cost()
	t.held += cost - c.held
	c.held = cost
	if c.closed() {
		e = t.move(e, ended)
		t.open[k] = e
	} else {
		t.idle[c.class].MoveToBack(e)
	}
	for t.len() > t.max || t.held > t.maxHeld {
		t.giveUp(t.idlest(frame))
	}
}

func (t *table) len() (n int) {
	for _, l := range t.idle {
		n += l.Len()
	}
	return n
}

// move puts a flow at the end of a class's list.
func (t *table) move(e *list.Element, to class) *list.Element {
	c := e.Value.(*conn)
	t.idle[c.class].Remove(e)
	c.class = to
	return t.idle[to].PushBack(c)
}

// idlest is the flow that is missed least. There is one.
func (t *table) idlest(frame int) *list.Element {
	const late = 1000 // frames by which what comes after the end has come
	var least *list.Element
	for i, l := range t.idle {
		e := l.Front()
		if e == nil {
			continue
		}
		last := e.Value.(*conn).lastFrame
		if class(i) == ended && frame-last > late {
			return e
		}
		if least == nil || last < least.Value.(*conn).lastFrame {
			least = e
		}
	}
	return least
}

func (t *table) expire() {
	for i, l := range t.idle {
		for e := l.Front(); e != nil && t.now-e.Value.(*conn).last > idleLimit[i]; e = l.Front() {
			t.giveUp(e)
		}
	}
}

func (t *table) giveUp(e *list.Element) {
	c := e.Value.(*conn)
	t.idle[c.class].Remove(e)
	if o := t.open[c.key]; o != nil && o.Value.(*conn) == c {
		delete(t.open, c.key)
	}
	t.held -= c.held
	t.over = append(t.over, c)
}

// ready gives the flows that were given up since it was last called, by their first frames.
func (t *table) ready() []*conn {
	all := t.over
	t.over = nil
	slices.SortFunc(all, func(a, b *conn) int { return cmp.Compare(a.frame, b.frame) })
	return all
}

// rest gives up all that is left.
func (t *table) rest() []*conn {
	for _, l := range t.idle {
		for l.Len() > 0 {
			t.giveUp(l.Front())
		}
	}
	return t.ready()
}

// conn is a flow as far as the capture has shown it.
type conn struct {
	key
	half   [2]half // what ends[0] and ends[1] have sent
	client int     // index of the client, -1 while unknown
	frame  int
	start  time.Time
	heads  bool // keep the client's first bytes for Flow.Head
	reset  bool

	quic    *sniff.QUICState // of a UDP flow, until it has told
	shown   bool             // it is known who is the client
	told    bool
	partial bool // see quicAnswer

	class     class
	last      int64 // when something was added
	lastFrame int
	held      int // its cost as the table has it
}

// closed reports whether both sides have ended.
func (c *conn) closed() bool { return c.reset || c.half[0].fin && c.half[1].fin }

// cost is about how much memory c holds, in bytes.
func (c *conn) cost() int {
	const flow, state, quicState, spanSize = 1024, 1024, 24 << 10, 16
	n := flow
	for i := range c.half {
		h := &c.half[i]
		n += cap(h.buf) + len(h.head) + spanSize*(cap(h.wire)+cap(h.seen))
		if h.state != nil {
			n += state
		}
	}
	if c.quic != nil {
		n += quicState
	}
	return n
}

// half is one direction.
type half struct {
	base   uint32 // sequence number of the first payload byte
	based  bool   // base is known, by a handshake packet or by the first payload
	shaken bool   // by a handshake packet
	fin    bool

	wire spans // of the stream, what went by
	top  int64 // end of the highest byte that went by

	seen     spans  // of the first sniff.MaxPeek bytes, what the file holds
	buf      []byte // those bytes
	state    *sniff.State
	answer   answer // final once answered
	answered bool
	hosted   bool   // the authority is found, or there is none
	head     []byte // see Flow.Head
	settled  bool   // nothing more to learn: buf and state are gone
	bytes    int    // what the answer took
	segments int

	firstFrame int    // first payload, 0: none
	firstAck   uint32 // what its sender had heard by then
	heard      bool   // firstAck is one
	startAck   uint32 // first acknowledgement at all
	maxAck     uint32
	acked      bool
}

// renewedBy reports whether s, from end dir, begins another connection between the same ends.
func (c *conn) renewedBy(dir int, s *segment) bool {
	me, peer := &c.half[dir], &c.half[1-dir]
	switch s.flags & (syn | hasACK | rst) {
	case syn:
		// The same SYN again, or one captured late, fits what is there.
		return me.based && s.seq+1 != me.base
	case syn | hasACK:
		// One that answers another SYN than ours is forged or stale, not a new connection;
		// without our SYN in the file it can only be told by what it acknowledges.
		return me.based && s.seq+1 != me.base && !peer.shaken && peer.based && s.ack != peer.base
	}
	return false
}

// segment adds a TCP segment that end dir sent.
func (c *conn) segment(frame, dir int, s *segment) {
	me, peer := &c.half[dir], &c.half[1-dir]
	switch s.flags & (syn | hasACK | rst) {
	case syn:
		me.shake(s.seq + 1)
		c.client = dir
	case syn | hasACK:
		if peer.based && peer.offset(s.ack) < 0 || peer.based && peer.offset(s.ack) > peer.top ||
			me.shaken && me.base != s.seq+1 {
			return // forged or stale
		}
		me.shake(s.seq + 1)
		if !peer.based {
			peer.shake(s.ack)
		}
		c.client = 1 - dir
	}
	if s.flags&hasACK != 0 && s.flags&rst == 0 {
		if !me.acked {
			me.acked, me.startAck, me.maxAck = true, s.ack, s.ack
		} else if int32(s.ack-me.maxAck) > 0 {
			me.maxAck = s.ack
		}
	}
	if s.flags&fin != 0 {
		me.fin = true
	}
	if s.flags&rst != 0 {
		c.reset = true
	}
	if s.wire == 0 || s.flags&rst != 0 { // what a RST carries is a diagnostic (RFC 9293 section 3.5.3)
		return
	}
	if me.firstFrame == 0 {
		me.firstFrame, me.firstAck, me.heard = frame, s.ack, s.flags&hasACK != 0
	}
	me.data(s, c.client != 1-dir, c.heads)
}

func (h *half) shake(base uint32) {
	if !h.based || !h.shaken && h.offset(base) != 0 && h.firstFrame == 0 {
		h.base = base
	}
	h.based, h.shaken = true, true
}

// offset is where in the stream a sequence number is: the place next to
// what went by last, so that streams may be longer than 4 GiB.
func (h *half) offset(seq uint32) int64 {
	return h.top + int64(int32(seq-h.base-uint32(h.top)))
}

// data takes in the payload of s; keep: this direction may be the client's.
func (h *half) data(s *segment, keep, heads bool) {
	seq := s.seq
	if s.flags&syn != 0 {
		seq++ // a SYN takes a number (Fast Open, RFC 7413)
	}
	if !h.based {
		h.base, h.based = seq, true
	}
	from := h.offset(seq)
	end := from + int64(s.wire)
	if end <= 0 {
		return // before the first byte: a keepalive, or a repeat of what was not captured
	}
	h.wire.add(max(from, 0), end, true, nil)
	h.top = max(h.top, end)
	if !keep {
		h.settle()
	}
	if h.settled {
		return
	}
	fresh := false
	h.seen.add(max(from, 0), min(from+int64(len(s.payload)), sniff.MaxPeek), false, func(a, b int64) {
		fresh = true
		if n := int(b) - len(h.buf); n > 0 {
			h.buf = append(h.buf, make([]byte, n)...)
		}
		copy(h.buf[a:b], s.payload[a-from:])
	})
	if !fresh {
		return
	}
	if !h.answered {
		h.segments++
	}
	h.look(heads)
}

// settle lets go of all that is only there to learn more.
func (h *half) settle() {
	h.settled = true
	h.buf, h.state, h.seen = nil, nil, nil
}

// prefix is the stream from its first byte up to the first hole.
func (h *half) prefix() []byte { return h.buf[:min(h.seen.prefix(), int64(len(h.buf)))] }

// look shows the prefix to the sniffer.
func (h *half) look(heads bool) {
	b := h.prefix()
	if h.state == nil {
		h.state = new(sniff.State)
	}
	if !h.answered {
		r := h.state.Detect(b)
		if r.More {
			return
		}
		h.answered, h.bytes = true, len(b)
		h.answer = answerOf(r.Proto, &r.Hello)
	}
	if h.answer.Proto == sniff.Unknown {
		begins, more := sniff.BeginsRequest(b)
		if more {
			return
		}
		h.answer.Begins = begins
	}
	if !h.hosted && (h.answer.Proto == sniff.HTTP10 || h.answer.Proto == sniff.HTTP11) {
		host, more, _ := h.state.RequestHost(b)
		if more {
			return
		}
		h.hosted, h.answer.Host = true, string(host)
	}
	if heads {
		n, more := headLen(h.answer.Proto, b)
		if more {
			return
		}
		if n > 0 {
			h.head = slices.Clone(b[:n])
		}
	}
	h.settle()
}

// headLen is how many of the first bytes b are the head of the first request, with what
// stands before it; more: it has not ended, and may yet.
func headLen(p sniff.Proto, b []byte) (n int, more bool) {
	more = len(b) < sniff.MaxPeek
	switch p {
	case sniff.HTTP10, sniff.HTTP11:
		for i, c := range b { // an empty line, whoever ends lines how
			if c == '\n' && i > 0 && (b[i-1] == '\n' || i > 1 && b[i-1] == '\r' && b[i-2] == '\n') {
				return i + 1, false
			}
		}
		return len(b), more
	case sniff.H2C:
		const preface, frameHeader, headers, continuation, endHeaders = 24, 9, 1, 9, 4
		for at := preface; ; { // frame by frame (RFC 9113 section 4.1)
			if len(b)-at < frameHeader {
				return len(b), more
			}
			f := b[at:]
			at += frameHeader + int(f[0])<<16 + int(f[1])<<8 + int(f[2])
			if at > len(b) {
				return len(b), more
			}
			if (f[3] == headers || f[3] == continuation) && f[4]&endHeaders != 0 {
				return at, false
			}
		}
	}
	return 0, false
}

// answer is what was learnt of a client's first bytes. It holds no part of a buffer.
type answer struct {
	Proto   sniff.Proto
	Version uint32
	Host    string
	SNI     string
	ALPN    []string
	ECH     bool
	Begins  bool
}

func answerOf(p sniff.Proto, h *sniff.Hello) answer {
	a := answer{Proto: p, SNI: string(h.SNI), ECH: h.ECH}
	for n := range h.ALPN.All() {
		a.ALPN = append(a.ALPN, string(n))
	}
	return a
}

// lacks reports whether the sender sent more right after the prefix than the file holds;
// maxAck is the highest acknowledgement of it.
func (h *half) lacks(peer *half) bool {
	have := h.seen.prefix()
	if h.top > have || len(h.seen) > 1 {
		return true
	}
	if !peer.acked || !h.shaken {
		return false
	}
	more := h.offset(peer.maxAck) - have
	if h.fin {
		more-- // a FIN takes a number
	}
	return more > 0
}

// flow sums c up.
func (c *conn) flow() Flow {
	f := Flow{Frame: c.frame, Start: c.start, Transport: TCP, Midstream: c.client < 0}
	if c.udp {
		f.Transport = UDP
	}
	if c.client < 0 {
		c.client = c.guess()
	}
	cl, sv := &c.half[c.client], &c.half[1-c.client]
	f.Client, f.Server = c.ends[c.client], c.ends[1-c.client]
	f.ClientBytes, f.ServerBytes = cl.wire.total(), sv.wire.total()
	if !f.Midstream {
		f.First = firstSpeaker(cl, sv)
	}
	a := cl.answer
	switch {
	case cl.answered:
		f.AnswerBytes, f.AnswerSegments = cl.bytes, cl.segments
	case c.udp:
		if f.Incomplete = c.partial; c.quic != nil { // the hello has not ended
			a, f.Incomplete = quicAnswer(c.quic.Last())
			f.Incomplete = f.Incomplete || a.Proto == sniff.QUIC
		}
	default:
		f.Incomplete = cl.lacks(sv)
		state := cmp.Or(cl.state, new(sniff.State))
		r := state.Detect(cl.prefix())
		if !f.Incomplete || r.Proto == sniff.TLS {
			r = state.Last(cl.prefix())
		}
		a = answerOf(r.Proto, &r.Hello)
	}
	if a.Proto == sniff.Unknown && !c.udp && !cl.settled {
		begins, more := sniff.BeginsRequest(cl.prefix())
		a.Begins = begins || more
	}
	f.Begins = a.Begins
	f.Proto, f.Version, f.Host, f.SNI, f.ALPN, f.ECH = a.Proto, a.Version, a.Host, a.SNI, a.ALPN, a.ECH
	if f.Head = cl.head; f.Head == nil && c.heads && !cl.settled && (f.Proto == sniff.HTTP10 || f.Proto == sniff.HTTP11 || f.Proto == sniff.H2C) {
		f.Head = cl.prefix()
	}
	return f
}

// guess finds the client of a connection without a handshake.
func (c *conn) guess() int {
	for i := range c.half {
		h := &c.half[i]
		p := h.answer.Proto
		if !h.answered && h.state != nil {
			p = h.state.Detect(h.prefix()).Proto // TLS shows before the end of the hello
		}
		if p != sniff.None && p != sniff.Unknown {
			return i
		}
	}
	if c.ends[0].Port() > c.ends[1].Port() {
		return 0
	}
	return 1
}

// firstSpeaker tells who sent payload first. An end whose first payload acknowledges
// payload had heard the other one speak; the order of capture decides where that does not.
func firstSpeaker(cl, sv *half) Side {
	clientHeard, serverHeard := cl.hadHeard(sv), sv.hadHeard(cl)
	switch {
	case clientHeard && !serverHeard:
		return Server
	case serverHeard && !clientHeard:
		return Client
	case cl.firstFrame > 0 && (sv.firstFrame == 0 || cl.firstFrame < sv.firstFrame):
		return Client
	case sv.firstFrame > 0:
		return Server
	}
	return Neither
}

// hadHeard reports whether h had received payload of peer when it sent its
// first own.
func (h *half) hadHeard(peer *half) bool {
	if h.firstFrame == 0 || !h.heard {
		return false
	}
	start := h.startAck // the handshake's, if that is there
	if peer.shaken {
		start = peer.base
	}
	return int32(h.firstAck-start) > 0
}
