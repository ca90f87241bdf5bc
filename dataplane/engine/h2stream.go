package engine

import (
	"slices"
	"strconv"

	"aether/dataplane/exchange"
	"aether/dataplane/http2"
	"aether/dataplane/httpmsg"
)

// expire ends the stream's exchange as a timeout.
func (st *h2stream) expire() {
	x := st.x
	switch {
	case st.dead:
	case st.c.client:
		st.Abort(exchange.Timeout)
		if x != nil {
			x.UpstreamClosed(exchange.Timeout)
		}
	default:
		x.Abort(exchange.Timeout)
	}
}

// keep accounts what the stream holds.
func (st *h2stream) keep() {
	n := streamHeld
	if !st.c.client && st.x != nil {
		n = requestHeld + st.x.Held()
	}
	if st.used = st.used || len(st.pend) > 0; st.used {
		n += cap(st.pend)
	}
	n += cap(st.arena) + cap(st.trailers)*fieldSize
	st.c.holds(n - st.kept)
	st.kept = n
}

// held is keep where the exchange may hold more than it did, or less.
func (st *h2stream) held() {
	if !st.dead && !st.c.client {
		st.keep()
	}
}

// offer gives data to the exchange and credits what was taken.
func (st *h2stream) offer(p []byte, end bool) int {
	var n int
	if st.drained {
		n = len(p)
	} else if st.c.client {
		n = st.x.ResponseData(p, end)
	} else {
		n = st.x.RequestData(p, end)
	}
	if !st.dead && n > 0 {
		st.moved = st.c.l.Now()
		if st.s != nil {
			st.s.Credit(n)
			st.c.mark()
		}
	}
	return n
}

func (st *h2stream) offerTrailers(f []httpmsg.Field) bool {
	if st.drained {
		return true
	}
	if st.c.client {
		st.x.ResponseTrailers(f)
		return true
	}
	return st.x.RequestTrailers(f)
}

// outlive: the stream was reset behind the end of its answer, of which something still
// waits in pend. That a client must not discard (RFC 9113 8.1), whatever the reset says: the
// stream goes on without the wire, and what still comes of the request is read and dropped.
func (st *h2stream) outlive(code exchange.Code) {
	st.lost, st.code, st.local = true, code, true
	st.over()
	st.x.UpstreamWritable() // a client that reads only once it has written everything
}

// taken: what waited has been taken, with its end.
func (st *h2stream) taken() {
	st.remote = true
	if x := st.x; st.lost && st.tunnel && !st.dead { // its other direction was cut
		st.release()
		x.UpstreamClosed(st.code)
		return
	}
	st.settle()
}

// settle ends the adapter once both directions have ended.
func (st *h2stream) settle() {
	if st.dead || !st.remote || !st.local {
		return
	}
	st.finish()
}

// finish ends the adapter; a server's exchange is over by now.
func (st *h2stream) finish() {
	x := st.x
	c := st.c
	st.release()
	if !c.client && x != nil {
		c.l.release(c.info.Pool, x)
	}
	c.freed()
}

// over lets go of the stream once both directions have ended on the wire. What
// was received and waits in pend does not need it: the connection's window is open again.
func (st *h2stream) over() {
	if st.local && (st.remote || st.pendEnd || st.pendTr) {
		st.leave()
		if st.at == 0 && !st.remote {
			st.c.waits = append(st.c.waits, st)
			st.at = len(st.c.waits)
		}
	}
}

func (st *h2stream) leave() {
	if st.s != nil {
		st.s.User = nil
		st.s = nil
	}
}

// release detaches the adapter from its stream.
func (st *h2stream) release() {
	if st.drained {
		st.c.drains--
	}
	st.dead = true
	if st.tunnel {
		st.c.tunnels--
	}
	st.x = nil
	st.c.holds(-st.kept)
	st.kept = 0
	if st.at > 0 {
		ws := st.c.waits
		last := len(ws) - 1
		ws[st.at-1] = ws[last]
		ws[st.at-1].at = st.at
		ws[last] = nil
		st.c.waits, st.at = ws[:last], 0
	}
	st.leave()
	st.c.free.dead = append(st.c.free.dead, st)
	st.c.free.queue()
}

// WriteHead is exchange.Stream.
func (st *h2stream) WriteHead(h *httpmsg.Head, end bool) {
	if st.s == nil {
		return
	}
	if !st.c.client {
		st.c.l.dated(h)
	}
	switch {
	case st.c.client && h.Upgrade != nil:
		h = st.connectHead(h)
	case st.wantsTunnel && !st.c.client:
		h = st.grantHead(h)
	}
	st.s.WriteHead(h, end)
	st.ended(end)
}

// WriteData is exchange.Stream.
func (st *h2stream) WriteData(p []byte, end bool) int {
	if st.s == nil {
		return len(p)
	}
	n := st.s.WriteData(p, end)
	if n > 0 || len(p) == 0 {
		st.ended(end && n == len(p))
	}
	return n
}

// WriteTrailers is exchange.Stream.
func (st *h2stream) WriteTrailers(f []httpmsg.Field) {
	if st.s == nil {
		return
	}
	st.s.WriteTrailers(f)
	st.ended(true)
}

func (st *h2stream) ended(end bool) {
	st.c.mark()
	st.moved = st.c.l.Now()
	st.c.active = st.moved
	if !end {
		return
	}
	st.local = true
	if !st.c.client && st.remote {
		st.finish()
		return
	}
	st.over()
}

// Resume is exchange.Stream.
func (st *h2stream) Resume() {
	if st.dead {
		return
	}
	if len(st.pend) > 0 {
		n := st.offer(st.pend[st.off:], st.pendEnd)
		if st.dead {
			return
		}
		if st.off += n; st.off < len(st.pend) {
			if 2*st.off >= len(st.pend) { // moving what is left costs less than what has gone
				st.pend = st.pend[:copy(st.pend, st.pend[st.off:])]
				st.off = 0
			}
			return
		}
		if st.pend, st.off = st.pend[:0], 0; cap(st.pend) > keepPend {
			st.pend = nil
		}
		st.keep()
		if st.pendEnd {
			st.taken()
			return
		}
	}
	if st.pendTr {
		if !st.offerTrailers(st.trailers) || st.dead {
			return
		}
		st.pendTr = false
		st.trailers, st.arena = nil, nil // who needs them longer has a copy
		st.keep()
		st.taken()
	}
}

// Abort is exchange.Stream.
func (st *h2stream) Abort(code exchange.Code) {
	if st.dead {
		return
	}
	if st.s != nil {
		why := toH2(code, st.c.client)
		if st.tunnel && code == exchange.Closed { // what the tunnel led to was reset (RFC 9113 8.5)
			why = http2.ConnectError
		}
		st.s.Reset(why)
	}
	c := st.c
	c.mark()
	c.wantReap()
	st.finish()
	if c.owner != nil && !c.goaway && c.h2.Tired() { // the peer might take us for an attack, and cut the others
		c.goaway = true
		c.owner.retired(c)
	}
}

// Drain is exchange.Drainer: what is left of the answer is read and thrown
// away. A stream that its client resets costs the peer as much as one that is
// answered, and may count as an attack there (CVE-2023-44487).
func (st *h2stream) Drain() {
	switch {
	case st.dead:
	case st.c.drains >= maxDrains && !st.remote:
		st.Abort(exchange.Cancel)
	default:
		st.x = nil
		st.drained = true
		st.c.drains++
	}
}

// connectHead makes the head of a request for a tunnel as it is sent over
// HTTP/2: the method stands in no field of it, for it is always GET. An application that speaks
// HTTP/2 gets no key (RFC 8441 5); between proxies it passes.
func (st *h2stream) connectHead(h *httpmsg.Head) *httpmsg.Head {
	st.wantsTunnel = true
	own := *h
	own.Method = methodCONNECT
	if !st.c.hop {
		own.Fields = slices.Clone(h.Fields)
		own.Del(string(fieldWSKey))
	}
	return &own
}

// connectAnswer reads the answer to connectHead: 2xx grants the tunnel, which is 101 to the exchange.
func (st *h2stream) connectAnswer(h *httpmsg.Head, end bool) {
	req := &st.x.Req
	switch {
	case h.Status >= 200 && h.Status < 300:
		h.Status, h.Upgrade = 101, req.Upgrade
		h.Del("content-length") // means nothing (RFC 9110 9.3.6)
		if key, ok := req.Get(string(fieldWSKey)); ok && !st.c.hop && isWebSocket(req.Upgrade) {
			h.Set(fieldWSAccept, wsAccept(key))
		}
		st.open()
	case h.Status >= 300:
		st.wantsTunnel = false
		v, ok := h.Get(declined)
		if !ok || !st.c.hop || h.Status != 502 {
			return
		}
		if n, err := strconv.Atoi(string(v)); err == nil && n >= 200 && n < 300 && (n != 204 || end) {
			h.Status = n // a 204 with a body would break the client's framing
		}
		h.Del(declined)
	}
}

// grantHead makes the head of an answer to an extended CONNECT.
func (st *h2stream) grantHead(h *httpmsg.Head) *httpmsg.Head {
	if h.Status < 200 && h.Status != 101 {
		return h
	}
	own := *h
	own.Upgrade = nil
	switch {
	case h.Status == 101:
		own.Status = 200
		st.open()
	case h.Status < 300:
		own.Fields = slices.Clone(h.Fields)
		own.Set(fieldDeclined, strconv.AppendInt(nil, int64(h.Status), 10))
		own.Status = 502
	default:
		own.Fields = slices.Clone(h.Fields)
		own.Del(declined) // the application's own means nothing
	}
	st.wantsTunnel = false
	return &own
}

// open: the stream is a tunnel from here on.
func (st *h2stream) open() {
	st.wantsTunnel, st.tunnel = false, true
	st.c.tunnels++
}
