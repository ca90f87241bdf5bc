package http2

// What the parts of a Conn take, in bytes, as Held counts them.
const (
	fieldCost  = 32  // of a field beside its text (RFC 9113 6.5.2)
	fieldSize  = 56  // a decoded field and its mark
	headSize   = 48  // a field of a head
	slotSize   = 16  // of the stream table
	streamSize = 112 // a Stream
)

// Held is how many bytes of memory the connection holds at the moment: queued output, a header
// block that has not ended, the fields of the last one, the tables of both directions, its streams.
func (c *Conn) Held() int {
	return cap(c.out) + cap(c.cont) + cap(c.cookie) + cap(c.fields)*fieldSize + cap(c.head.Fields)*headSize +
		len(c.table.slots)*slotSize + (c.open+len(c.ended)+len(c.free))*streamSize + cap(c.ordered)*8 + c.dec.Held() + c.enc.Held()
}

// Block is the stream of a header block that has begun and not ended, else 0.
func (c *Conn) Block() uint32 { return c.contID }

// Slack is how many bytes of memory a moment's traffic has left behind: buffers that are empty now.
func (c *Conn) Slack() int {
	n := 0
	if len(c.Out()) == 0 {
		n = cap(c.out)
	}
	if c.contID == 0 {
		n += cap(c.cont)
	}
	return n
}

// Slim gives that memory back.
func (c *Conn) Slim() {
	if len(c.Out()) == 0 {
		c.out, c.off = nil, 0
	}
	if c.contID == 0 {
		c.cont = nil
	}
}
