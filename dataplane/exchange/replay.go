package exchange

import (
	"slices"

	"aether/dataplane/httpmsg"
	"aether/dataplane/share"
)

// Bounds of what is kept of requests' bodies (docs/limits.md is about these).
const (
	// ReplayMax is how much of a request's body is kept so that it can be sent
	// again (decision 013): once more has gone up the request is not replayable.
	ReplayMax = 64 << 10
	// HoldMax is the most that Hold keeps, whatever it is asked for.
	HoldMax = 1 << 20

	chunkSize  = 4 << 10  // unit of what is kept
	keptMax    = 16 << 20 // kept bodies of a Pool; those kept for replay alone get half of it
	keepChunks = 256      // free chunks a Pool keeps
	keepRefs   = 64       // an exchange's list of chunks that grew longer is not kept
	drainMax   = 16 << 10 // a retired answer longer than this is cut short instead of read
)

type chunk [chunkSize]byte

// Share counts what is kept of the bodies of one pod's requests on one loop; its zero
// value is ready. A pod may keep its part of a pool (package share).
type Share struct{ held, again int } // chunks, and of these those kept to be sent again alone

// Held says why a Hold has ended.
type Held uint8

// The ends of a Hold.
const (
	HeldWhole  Held = iota + 1 // the request is here whole
	HeldFull                   // its body is longer than the limit; what is beyond waits at the client
	HeldNoRoom                 // no memory is left for it; what is not held waits at the client
)

// Holder is told once when a Hold has ended. It may call Forward, Reply or
// Abort, or do so later.
type Holder interface {
	Held(x *Exchange, why Held)
}

// Drainer is what a Stream of an upstream may be besides. Drain is called in
// the place of Abort when the request has gone up whole and what is left of
// its answer is short: the stream forgets the exchange, reads the rest and throws it
// away, so that the peer does not see a reset.
type Drainer interface{ Drain() }

// KeepForReplay asks that what goes up of the body is kept, up to ReplayMax, so
// that the request stays Replayable. Called by the service before the first
// Forward. Nothing is kept of a body that is known to be longer.
func (x *Exchange) KeepForReplay() {
	if x.keepNoMore(); x.req.again == notKept && x.Req.Length <= ReplayMax {
		x.req.again = keptToSend
	}
}

// HoldBody asks that up to limit bytes of the body (HoldMax at most), and what ends
// it, are taken from the client before Forward. to is told once when the
// request is whole or no more is taken, perhaps before Hold returns; it is not
// told if the exchange ends, or is forwarded, first. What is held goes up
// first, whoever asked for it. A client that waits for 100 (Continue) gets it, and
// the request's Expect is gone. Called by the service while no upstream is attached.
func (x *Exchange) HoldBody(limit int, to Holder) {
	if x.over || x.up != nil {
		return
	}
	x.holder, x.holdMax = to, min(limit, HoldMax)
	if x.req.from != reqOpen || x.tunnel == tunnelAsked { // what asks for a tunnel has no body
		x.told(HeldWhole)
		return
	}
	if x.Req.Expect { // it is us who want the body; nobody is asked for it a second time (RFC 9110 10.1.1)
		x.Req.Expect = false
		x.Req.Del("expect")
		if x.Req.Minor > 0 {
			x.down.WriteHead(&httpmsg.Head{Status: 100}, false)
			if x.over {
				return
			}
		}
	}
	x.req.stalled = false
	x.down.Resume() // it may have been refused before
}

// HeldBytes is how many bytes of the body are kept.
func (x *Exchange) HeldBytes() int { return x.kept }

// AppendHeld appends the bytes of the body that are kept to dst.
func (x *Exchange) AppendHeld(dst []byte) []byte {
	for o := 0; o < x.kept; o += chunkSize {
		dst = append(dst, x.chunks[o/chunkSize][:min(chunkSize, x.kept-o)]...)
	}
	return dst
}

// DiscardResponse gives up the attempt under way: an upstream that is attached, or one
// that is being waited for. From Response it means that this answer is not
// wanted. The service then calls Forward, Park or Reply, as from Failed.
func (x *Exchange) DiscardResponse() {
	if x.over || x.Answered() {
		return
	}
	x.Gen++ // who waits to forward it compares this
	x.Status = 0
	judged := x.res.state == resJudged
	if judged {
		x.res.state = resRetired
	}
	up := x.up
	x.up = nil
	if up == nil {
		return
	}
	if d, ok := up.(Drainer); ok && judged && x.req.sent && x.res.len >= 0 && x.res.len <= drainMax {
		d.Drain()
		return
	}
	up.Abort(Cancel)
}

// told ends a Hold.
func (x *Exchange) told(why Held) {
	to := x.holder
	x.holder = nil
	busy := x.busy
	x.busy = true // the event goes on by itself: down is not to be resumed within it
	to.Held(x, why)
	x.busy = busy
}

// hold takes body bytes while no upstream is attached.
func (x *Exchange) hold(p []byte, end bool) int {
	n := x.store(p[:max(0, min(len(p), x.holdMax-x.kept))], false)
	x.ReqBytes += int64(n)
	if x.tap != nil {
		x.tapped(p, n, end)
	}
	switch {
	case n == len(p):
		if end {
			x.req.from = reqDone
			x.told(HeldWhole)
		}
	case x.kept >= x.holdMax:
		x.req.stalled = true
		x.told(HeldFull)
	default:
		x.req.stalled = true
		x.told(HeldNoRoom)
	}
	return n
}

// store appends to what is kept and returns how much there was room for; again: it is
// kept to be sent again alone.
func (x *Exchange) store(p []byte, again bool) (n int) {
	for n < len(p) {
		o := x.kept % chunkSize
		if x.kept == len(x.chunks)*chunkSize {
			c := x.pool.chunk(x.Share, again)
			if c == nil {
				return n
			}
			x.chunks = append(x.chunks, c)
			if !again {
				x.must = len(x.chunks)
			}
		}
		m := copy(x.chunks[len(x.chunks)-1][o:], p[n:])
		n += m
		x.kept += m
	}
	return n
}

// went accounts body bytes that have gone up past what is kept.
func (x *Exchange) went(p []byte) {
	if len(p) == 0 || x.req.again == bodyLost {
		return
	}
	if x.req.again == keptToSend && x.kept+len(p) <= ReplayMax && x.store(p, true) == len(p) {
		x.fed = x.kept
		return
	}
	x.unkeep()
	x.req.again = bodyLost
}

// wentTrailers is went for the trailers.
func (x *Exchange) wentTrailers(f []httpmsg.Field) {
	if x.req.again == keptToSend {
		x.keepTrailers(f)
		return
	}
	x.unkeep()
	x.req.again = bodyLost
}

func (x *Exchange) keepTrailers(f []httpmsg.Field) {
	x.trailers = slices.Grow(x.trailers, len(f))
	for i := range f {
		x.trailers = append(x.trailers, httpmsg.Field{Name: x.Keep(f[i].Name), Value: x.Keep(f[i].Value)})
	}
}

// feed sends what is kept, and the end if it is known, to an upstream that has
// not had it all; false: not yet.
func (x *Exchange) feed() bool {
	up := x.up
	for x.fed < x.kept {
		o := x.fed % chunkSize
		p := x.chunks[x.fed/chunkSize][o:min(chunkSize, o+x.kept-x.fed)]
		end := x.req.from == reqDone && x.fed+len(p) == x.kept
		n := up.WriteData(p, end)
		if x.up != up {
			return false
		}
		if x.fed += n; n < len(p) {
			x.req.stalled = true
			return false
		}
		x.req.sent = end
	}
	if x.req.from == reqTrailed && !x.req.sent {
		x.req.sent = true
		up.WriteTrailers(x.trailers)
	}
	if x.req.again != keptToSend || x.kept > ReplayMax {
		gone := x.kept > 0 || x.req.from == reqTrailed
		if x.unkeep(); gone {
			x.req.again = bodyLost
		}
	}
	return x.up == up
}

// unfed reports whether the upstream has still to get something that is kept.
func (x *Exchange) unfed() bool { return x.fed < x.kept || x.req.from == reqTrailed && !x.req.sent }

// begun: the answer goes down, and nothing is sent again any more.
func (x *Exchange) begun() {
	x.keepNoMore()
	if x.up == nil || !x.unfed() {
		x.unkeep()
	}
}

// unkeep gives back what is kept of the body.
func (x *Exchange) unkeep() {
	x.giveBack(len(x.chunks))
	x.kept, x.fed = 0, 0
	x.keepNoMore()
}

// keepNoMore keeps nothing of what goes up from here on.
func (x *Exchange) keepNoMore() {
	if x.req.again == keptToSend {
		x.req.again = notKept
	}
}

// giveBack gives back the first n chunks.
func (x *Exchange) giveBack(n int) {
	for i, c := range x.chunks[:n] {
		x.pool.giveBack(c, x.Share, i >= x.must)
	}
	k := copy(x.chunks, x.chunks[n:])
	clear(x.chunks[k:])
	x.chunks = x.chunks[:k]
	x.must = max(0, x.must-n)
}

// count counts n chunks of s, which may be nil: nobody's.
func (p *Pool) count(s *Share, again bool, n int) {
	p.held.held += n
	if again {
		p.held.again += n
	}
	if s != nil {
		s.held += n
		if again {
			s.again += n
		}
	}
}

// giveBack takes a chunk of s back.
func (p *Pool) giveBack(c *chunk, s *Share, again bool) {
	p.count(s, again, -1)
	if len(p.chunks) < keepChunks {
		p.chunks = append(p.chunks, c)
	}
}

// chunk is a free chunk, or nil if s may not have another. What is kept to be sent
// again alone has half of the pool, whatever else is kept, and leaves the other half.
func (p *Pool) chunk(s *Share, again bool) *chunk {
	var own Share
	if s != nil {
		own = *s
	}
	if !share.Room(own.held, p.held.held, keptMax/chunkSize) || again && !share.Room(own.again, p.held.again, keptMax/chunkSize/2) {
		return nil
	}
	p.count(s, again, 1)
	if n := len(p.chunks); n > 0 {
		c := p.chunks[n-1]
		p.chunks[n-1] = nil
		p.chunks = p.chunks[:n-1]
		return c
	}
	return new(chunk)
}
