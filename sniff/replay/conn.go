package replay

import (
	"cmp"
	"container/list"
	"net/netip"
	"slices"

	"aether/sniff"
)

// maxOpen is how many connections are followed at a time. The one that has
// been idle for longest makes room.
const maxOpen = 1 << 14

// pair is the two ends of a connection, the lower one first: it is the same in both directions.
type pair [2]netip.AddrPort

// table holds the connections that have not been yielded.
type table struct {
	open map[pair]*list.Element
	idle *list.List // of *conn, the idlest first
	max  int
	old  []*conn // replaced by a newer one of the same ends, and not yielded yet
}

func newTable() *table {
	return &table{open: map[pair]*list.Element{}, idle: list.New(), max: maxOpen}
}

// add gives a segment to its connection. A connection that had to make room for
// another is returned: nothing more will be added to it.
func (t *table) add(frame int, s *segment) (evicted *conn) {
	key, dir := pair{s.src, s.dst}, 0
	if s.src.Compare(s.dst) > 0 {
		key, dir = pair{s.dst, s.src}, 1
	}
	if e := t.open[key]; e != nil {
		c := e.Value.(*conn)
		if !c.renewedBy(dir, s) {
			c.add(frame, dir, s)
			t.idle.MoveToBack(e)
			return nil
		}
		t.idle.Remove(e)
		t.old = append(t.old, c)
	}
	c := &conn{ends: key, frame: frame, client: -1}
	c.add(frame, dir, s)
	t.open[key] = t.idle.PushBack(c)
	if t.idle.Len()+len(t.old) <= t.max {
		return nil
	}
	if len(t.old) > 0 {
		evicted, t.old = t.old[0], t.old[1:]
		return evicted
	}
	evicted = t.idle.Remove(t.idle.Front()).(*conn)
	delete(t.open, evicted.ends)
	return evicted
}

// rest gives the connections that are left, by their first frames.
func (t *table) rest() []*conn {
	all := t.old
	for e := t.idle.Front(); e != nil; e = e.Next() {
		all = append(all, e.Value.(*conn))
	}
	slices.SortFunc(all, func(a, b *conn) int { return cmp.Compare(a.frame, b.frame) })
	return all
}

// conn is a connection as far as the capture has shown it.
type conn struct {
	ends   pair
	half   [2]half // what ends[0] and ends[1] have sent
	client int     // index of the client, -1 while unknown
	frame  int
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
	state    sniff.State
	answer   sniff.Result // final once answered
	answered bool
	host     string
	sni      string
	alpn     []string
	settled  bool // nothing more to learn: buf is gone
	bytes    int  // what the answer took
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

func (c *conn) add(frame, dir int, s *segment) {
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
	if s.wire == 0 || s.flags&rst != 0 { // what a RST carries is a diagnostic (RFC 9293 section 3.5.3)
		return
	}
	if me.firstFrame == 0 {
		me.firstFrame, me.firstAck, me.heard = frame, s.ack, s.flags&hasACK != 0
	}
	me.data(s, c.client != 1-dir)
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
func (h *half) data(s *segment, keep bool) {
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
	if !keep || h.settled {
		if !keep {
			h.buf, h.settled = nil, true
		}
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
	h.look()
}

// prefix is the stream from its first byte up to the first hole.
func (h *half) prefix() []byte { return h.buf[:min(h.seen.prefix(), int64(len(h.buf)))] }

// look shows the prefix to the sniffer.
func (h *half) look() {
	b := h.prefix()
	if !h.answered {
		r := h.state.Detect(b)
		if r.More {
			return
		}
		h.answered, h.bytes = true, len(b)
		h.take(r)
	}
	if h.answer.Proto == sniff.HTTP10 || h.answer.Proto == sniff.HTTP11 {
		host, more, _ := h.state.RequestHost(b)
		if more {
			return
		}
		h.host = string(host)
	}
	h.buf, h.settled = nil, true
}

// take copies an answer out of the buffer.
func (h *half) take(r sniff.Result) {
	h.answer = sniff.Result{Proto: r.Proto}
	h.sni = string(r.SNI)
	for n := range r.ALPN.All() {
		h.alpn = append(h.alpn, string(n))
	}
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

// flow sums the connection up.
func (c *conn) flow() Flow {
	f := Flow{Frame: c.frame, Midstream: c.client < 0}
	if c.client < 0 {
		c.client = c.guess()
	}
	cl, sv := &c.half[c.client], &c.half[1-c.client]
	f.Client, f.Server = c.ends[c.client], c.ends[1-c.client]
	f.ClientBytes, f.ServerBytes = cl.wire.total(), sv.wire.total()
	if !f.Midstream {
		f.First = firstSpeaker(cl, sv)
	}
	if !cl.answered {
		f.Incomplete = cl.lacks(sv)
		r := cl.state.Detect(cl.prefix())
		if !f.Incomplete || r.Proto == sniff.TLS {
			r = cl.state.Last(cl.prefix())
		}
		cl.take(r)
	}
	f.Proto, f.Host, f.SNI, f.ALPN = cl.answer.Proto, cl.host, cl.sni, cl.alpn
	if cl.answered {
		f.AnswerBytes, f.AnswerSegments = cl.bytes, cl.segments
	}
	return f
}

// guess finds the client of a connection without a handshake.
func (c *conn) guess() int {
	for i := range c.half {
		h := &c.half[i]
		p := h.answer.Proto
		if !h.answered {
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
