package exchange

import "aether/dataplane/httpmsg"

// Tap is shown a request's body, and what ends it, as they are taken from the client:
// each byte once, however often the request is sent. It must not call back into the exchange.
type Tap interface {
	TapData(p []byte, end bool)
	TapTrailers(f []httpmsg.Field)
}

// Tap shows t the request's body: what is kept of it already, before Tap returns, and
// then what comes. Called by the service, before Forward.
func (x *Exchange) Tap(t Tap) {
	for o := 0; o < x.kept; o += chunkSize {
		n := min(chunkSize, x.kept-o)
		t.TapData(x.chunks[o/chunkSize][:n], x.req.from == reqDone && o+n == x.kept)
	}
	if x.req.from == reqTrailed {
		t.TapTrailers(x.trailers)
	}
	if x.req.from == reqOpen {
		x.tap = t
	}
}

// Bodyless reports whether the request is here whole, and nothing but its head.
func (x *Exchange) Bodyless() bool { return x.req.from == reqDone && x.kept == 0 }

// tapped shows the tap n bytes of p that were taken; end: of the whole of p.
func (x *Exchange) tapped(p []byte, n int, end bool) {
	if end = end && n == len(p); n > 0 || end {
		x.tap.TapData(p[:n], end)
	}
}

func (x *Exchange) tapTrailers(f []httpmsg.Field) {
	if x.tap != nil {
		x.tap.TapTrailers(f)
	}
}

// Push and PushTrailers are RequestData and RequestTrailers for who cannot hold the
// client back: what the upstream, or the lack of one, leaves is kept and goes up when
// there is room. false: more than limit bytes would be kept, and what was pushed is lost;
// the caller aborts the exchange. Such a request is never Replayable.
func (x *Exchange) Push(p []byte, end bool, limit int) bool {
	if x.over {
		return false
	}
	if x.up != nil && !x.unfed() {
		n := x.up.WriteData(p, end)
		x.ReqBytes += int64(n)
		if x.over {
			return false
		}
		if n == len(p) {
			if end {
				x.req.from, x.req.sent = reqDone, true
				x.maybeDone()
			}
			return true
		}
		p = p[n:]
	}
	x.forget()
	if x.kept-x.fed+len(p) > limit || x.store(p, true) < len(p) {
		return false
	}
	x.ReqBytes += int64(len(p))
	if end {
		x.req.from = reqDone
	}
	return true
}

// PushTrailers is Push for the trailers that end a body. They are bounded where they are read.
func (x *Exchange) PushTrailers(f []httpmsg.Field) {
	if x.over {
		return
	}
	now := x.up != nil && !x.unfed()
	x.keepTrailers(f)
	x.req.from = reqTrailed
	if now {
		x.req.sent = true
		x.up.WriteTrailers(x.trailers)
		x.maybeDone()
	}
}

// forget gives back what is kept and has gone up, in whole chunks.
func (x *Exchange) forget() {
	n := x.fed / chunkSize
	if n == 0 {
		return
	}
	x.giveBack(n)
	x.kept -= n * chunkSize
	x.fed -= n * chunkSize
	x.req.again = bodyLost
}
