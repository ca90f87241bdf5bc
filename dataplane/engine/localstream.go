package engine

import (
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// localStream is one request in process: out is the source's exchange, in the
// destination's, and localStream is the stream of both.
//
//   - What in says (the answer) goes to out at once: bodies are not copied, and out
//     taking less is in being told so.
//   - What out says is kept, bounded by pairHigh, and goes to in at the flush. So
//     neither exchange is ever called while it is calling.
//   - Heads reach the other side as they would over the hop: HTTP/2's, without a connection's fields.
type localStream struct {
	owner localStreamOwner
	from  *Pod // the source's
	l     *Loop
	info  *ConnInfo
	at    int                // among its owner's
	out   *exchange.Exchange // nil once it needs nothing any more
	in    *exchange.Exchange // nil before it has begun

	buf      []byte // of the request's body, not taken yet: buf[off:]
	off      int
	trailers []httpmsg.Field
	arena    []byte // of trailers
	held     int    // bytes of which the share of the source's pod knows

	headEnd bool // the request has no body
	end     bool // it ends behind buf, and
	trailed bool // with trailers
	begun   bool
	gone    bool // the source gave it up
	reqDone bool // in has had its end
	resDone bool // out has had the answer's end
	stalled bool // in refused data: wait for its Resume
	starved bool // out's data was refused: tell it once there is room
	room    bool // out can take more of the answer
	drained bool // nobody wants the rest of the answer
	tunnel  bool
	dirty   bool
	dead    bool
}

// localUpstream is a localStream as the source's upstream, localDownstream as the destination's downstream.
type (
	localUpstream   localStream
	localDownstream localStream
)

// localStreamOwner has made a localStream between two pods of this node.
type localStreamOwner interface {
	settled(p *localStream) // both exchanges have ended, and the stream is recycled next
	// mayDrain reports whether one more stream may throw an answer away while it comes.
	mayDrain() bool
	checkLeft() // a stream is gone: perhaps it was the last
}

// localStreamFree are a loop's free streams.
type localStreamFree struct{ free []*localStream }

func (l *Loop) localStreams() *localStreamFree {
	f, ok := l.kept[keptLocalStreams].(*localStreamFree)
	if !ok {
		f = &localStreamFree{}
		l.kept[keptLocalStreams] = f
	}
	return f
}

func (f *localStreamFree) shrink() {}

func (f *localStreamFree) get() *localStream {
	k := len(f.free)
	if k == 0 {
		return &localStream{}
	}
	p := f.free[k-1]
	f.free[k-1] = nil
	f.free = f.free[:k-1]
	return p
}

func (f *localStreamFree) put(p *localStream) {
	if len(f.free) < keepLocalStreams {
		*p = localStream{}
		f.free = append(f.free, p)
	}
}

func (p *localStream) mark() {
	if !p.dirty && !p.dead {
		p.dirty = true
		p.l.Dirty(p)
	}
}

// WriteHead is exchange.Stream. The head is out's own, and stays until the flush.
func (u *localUpstream) WriteHead(_ *httpmsg.Head, end bool) {
	p := (*localStream)(u)
	p.headEnd, p.end = end, end
	p.mark()
}

// WriteData is exchange.Stream.
func (u *localUpstream) WriteData(b []byte, end bool) int {
	p := (*localStream)(u)
	if p.dead || p.in != nil && p.in.Over() {
		return len(b)
	}
	if p.off > 0 && len(b) > 0 {
		p.buf = p.buf[:copy(p.buf, p.buf[p.off:])]
		p.off = 0
	}
	n := min(len(b), max(0, localHigh-len(p.buf)))
	if n > 0 {
		p.buf = append(p.l.room(p.buf, n), b[:n]...)
	}
	if n < len(b) {
		p.starved = true
	} else if end {
		p.ended()
	}
	p.mark()
	return n
}

// WriteTrailers is exchange.Stream.
func (u *localUpstream) WriteTrailers(f []httpmsg.Field) {
	p := (*localStream)(u)
	p.trailers, p.arena = copyFields(f)
	p.trailed = true
	p.ended()
	p.mark()
}

// ended: the request has been written whole.
func (p *localStream) ended() {
	p.end = true
	if p.resDone { // a tunnel's other direction was first
		p.out = nil
	}
}

// Resume is exchange.Stream.
func (u *localUpstream) Resume() {
	u.room = true
	(*localStream)(u).mark()
}

// Abort is exchange.Stream.
func (u *localUpstream) Abort(exchange.Code) {
	p := (*localStream)(u)
	p.out, p.gone = nil, true
	p.mark()
}

// Drain is exchange.Drainer.
func (u *localUpstream) Drain() {
	if !u.owner.mayDrain() {
		u.Abort(exchange.Cancel)
		return
	}
	p := (*localStream)(u)
	p.out, p.drained, p.room = nil, true, true
	p.mark()
}

// WriteHead is exchange.Stream. Whoever wrote h has done with it.
func (d *localDownstream) WriteHead(h *httpmsg.Head, end bool) {
	p := (*localStream)(d)
	x := p.out
	if x == nil {
		return
	}
	h.Minor, h.Close = 1, false
	if asked := x.Req.Upgrade; asked == nil || h.Status != 101 {
		h.Upgrade = nil
		if asked != nil && h.Status >= 200 {
			h.Del(declined) // it means something on hops alone
		}
	} else {
		h.Upgrade = asked
		h.Del("content-length") // means nothing (RFC 9110 9.3.6)
		p.tunnel = true
	}
	x.ResponseHead(h, end)
	p.answered(end)
}

// WriteData is exchange.Stream.
func (d *localDownstream) WriteData(b []byte, end bool) int {
	p := (*localStream)(d)
	n := len(b)
	if x := p.out; x != nil {
		n = x.ResponseData(b, end)
	}
	p.answered(end && n == len(b))
	return n
}

// WriteTrailers is exchange.Stream.
func (d *localDownstream) WriteTrailers(f []httpmsg.Field) {
	p := (*localStream)(d)
	if x := p.out; x != nil {
		x.ResponseTrailers(f)
	}
	p.answered(true)
}

// answered: end says that the answer is whole.
func (p *localStream) answered(end bool) {
	if !end {
		return
	}
	p.resDone = true
	if p.end || p.out != nil && p.out.Over() {
		p.out = nil
	}
	p.mark()
}

// Resume is exchange.Stream.
func (d *localDownstream) Resume() {
	d.stalled = false
	(*localStream)(d).mark()
}

// Abort is exchange.Stream: out is told what a reset on the hop would tell it.
func (d *localDownstream) Abort(c exchange.Code) {
	p := (*localStream)(d)
	p.mark()
	x := p.out
	if x == nil {
		return
	}
	p.out = nil
	code := exchange.Closed
	if !p.tunnel || c != exchange.Closed {
		code = fromH2(toH2(c, false), false)
	}
	x.UpstreamClosed(code)
}

// Flush is reactor.Flusher: what the source has said goes to the destination.
func (p *localStream) Flush() {
	p.dirty = false
	if p.dead {
		return
	}
	switch {
	case p.gone:
		if p.in != nil && !p.in.Over() {
			p.in.DownstreamClosed(exchange.Reset)
		}
	case !p.begun:
		p.begin()
	}
	if p.begun && !p.gone {
		p.feed()
		if p.room {
			p.room = false
			p.in.DownstreamWritable()
		}
	}
	p.account()
	p.settle()
}

// account counts what the stream and the destination's exchange hold, which is the source's doing.
func (p *localStream) account() {
	n := 0
	if !p.dead {
		n = streamHeld + cap(p.buf) + cap(p.arena) + cap(p.trailers)*fieldSize
		if p.in != nil && !p.in.Over() {
			n += requestHeld + p.in.Held()
		}
	}
	if n != p.held {
		p.from.share(p.l).addHeldBytes(n - p.held)
		p.held = n
	}
}

func (p *localStream) begin() {
	h := p.out.Req
	h.Minor, h.Close = 1, false
	if h.Upgrade != nil && !p.headEnd {
		h.Length = httpmsg.Unknown // as extended CONNECT has it
	}
	p.reqDone = p.headEnd
	p.in = p.info.Pool.Begin((*localDownstream)(p), &h, p.headEnd, p.info, p.l.Now())
	p.in.Share = p.info.Kept()
	p.begun = true
	p.in.Begin()
}

// feed offers what there is of the request's body, and its end.
func (p *localStream) feed() {
	for !p.stalled && !p.reqDone && !p.in.Over() {
		b, last := p.buf[p.off:], p.end && !p.trailed
		if len(b) == 0 && !p.end {
			break
		}
		if len(b) == 0 && p.trailed {
			if p.in.RequestTrailers(p.trailers) {
				p.reqDone = true
				p.trailers, p.arena = nil, nil // who needs them longer has a copy
			} else {
				p.stalled = true
			}
			break
		}
		n := p.in.RequestData(b, last)
		p.off += n
		if n < len(b) {
			p.stalled = true
			break
		}
		p.reqDone = last
	}
	if p.buf != nil && (p.off == len(p.buf) || p.in.Over()) {
		p.l.putOut(p.buf)
		p.buf, p.off = nil, 0
	}
	if p.starved && len(p.buf)-p.off <= localHigh/2 {
		p.starved = false
		if p.out != nil {
			p.out.UpstreamWritable()
		}
	}
}

// settle lets go of the stream once both exchanges have ended, and no queue holds it.
func (p *localStream) settle() {
	if p.dead || p.out != nil || p.begun && !p.in.Over() || p.dirty {
		return
	}
	p.dead = true
	p.account()
	owner := p.owner
	owner.settled(p)
	if p.begun {
		p.l.release(p.info.Pool, p.in)
	}
	if p.buf != nil {
		p.l.putOut(p.buf)
	}
	p.l.localStreams().put(p)
	owner.checkLeft()
}

// Fail is reactor.Flusher: one of the two services panicked.
func (p *localStream) Fail(cause error) { p.cut(cause, exchange.Internal) }

// cut ends both exchanges. Neither is being called.
func (p *localStream) cut(cause error, code exchange.Code) {
	if p.dead {
		return
	}
	if x := p.out; x != nil {
		p.out = nil
		x.Cause = cause
		x.UpstreamClosed(code)
	}
	p.gone = true
	if p.in != nil && !p.in.Over() {
		p.in.DownstreamClosed(exchange.Cancel)
	}
	p.settle()
}
