package exchange_test

import (
	"bytes"
	"fmt"
	"math/rand"
	"strconv"
	"strings"
	"testing"

	"aether/dataplane/exchange"
	"aether/dataplane/http1"
	"aether/dataplane/http2"
	"aether/dataplane/httpmsg"
)

// The pump joins the production codecs to exchanges without a socket: wires of
// a few bytes to a few kilobytes, moved in random pieces by a seeded hand.

// node is one end of a wire.
type node interface {
	pending() []byte   // what waits to be sent
	sent(n int)        // that much of it was
	feed(b []byte) int // received bytes; returns how many there was room for
	gone(reset bool)   // the other end closed, after its last byte or at once
	state() closing
}

type closing uint8

const (
	open   closing = iota
	atEnd          // closes once pending is sent
	broken         // closed with a reset
)

// wire carries bytes one way.
type wire struct {
	b        []byte
	limit    int
	fin, rst bool
	told     bool
}

// link is a connection between two nodes.
type link struct {
	end  [2]node
	wire [2]wire // wire[i] carries from end[i]
}

// move carries at most n bytes one half step of the way and reports whether anything moved.
func (l *link) move(way int, pull bool, n int) bool {
	w, from, to := &l.wire[way], l.end[way], l.end[1-way]
	if !pull {
		if w.fin || w.rst {
			return false
		}
		if from.state() == broken {
			w.b, w.rst = nil, true
			return true
		}
		p := from.pending()
		n = min(n, len(p), w.limit-len(w.b))
		if n <= 0 {
			if len(p) == 0 && from.state() == atEnd {
				w.fin = true
				return true
			}
			return false
		}
		w.b = append(w.b, p[:n]...)
		from.sent(n)
		return true
	}
	switch {
	case w.told:
		return false
	case w.rst:
		w.told = true
		if to.state() != broken {
			to.gone(true)
		}
		return true
	case to.state() == broken: // the kernel throws it away
		moved := len(w.b) > 0
		w.b = nil
		return moved
	case len(w.b) == 0:
		if w.fin {
			w.told = true
			to.gone(false)
			return true
		}
		return false
	}
	n = to.feed(w.b[:min(n, len(w.b))])
	w.b = w.b[n:]
	return n > 0
}

// world is one case: a client's connection, and those to servers.
type world struct {
	t     *testing.T
	rnd   *rand.Rand
	pool  exchange.Pool
	links []*link
	reqs  []*plan
	byID  map[string]*plan
	now   int64

	up2     *h2side // the shared upstream connection, when upstreams speak HTTP/2
	h2up    bool
	faults  bool
	parked  []func()
	dead    []*exchange.Exchange
	begun   int
	done    map[*exchange.Exchange]uint32 // generation that is done
	nDone   int
	reapers []*h2side
	room    int // an HTTP/1 driver's output bound
	window  int
	trace   strings.Builder
}

func (w *world) dump() string {
	for i, l := range w.links {
		for k := range 2 {
			e := l.end[k]
			w.logf("link %d.%d: %T state %d pending %d wire %d fin %v rst %v told %v", i, k, e, e.state(), len(e.pending()), len(l.wire[k].b), l.wire[k].fin, l.wire[k].rst, l.wire[k].told)
			switch d := e.(type) {
			case *down1:
				w.logf("  in %d x %v inBody %v stalled %v starved %v", len(d.in), d.x != nil, d.inBody, d.stalled, d.starved)
			case *up1:
				w.logf("  in %d x %v got %v stalled %v starved %v", len(d.in), d.x != nil, d.gotHead, d.stalled, d.starved)
			case *server1:
				w.logf("  raw %d %.200q said %v whole %v", len(d.raw), d.raw, d.said, d.whole)
			}
		}
	}
	return w.trace.String()
}

func (w *world) logf(format string, a ...any) { fmt.Fprintf(&w.trace, format+"\n", a...) }

func (w *world) link(a, b node) {
	w.links = append(w.links, &link{end: [2]node{a, b}, wire: [2]wire{{limit: 20 + w.rnd.Intn(3000)}, {limit: 20 + w.rnd.Intn(3000)}}})
}

// run moves bytes at random until nothing moves any more.
func (w *world) run() {
	for still, steps := 0, 0; still < 40; steps++ {
		if steps > 5_000_000 {
			w.t.Fatalf("bytes move for ever\n%s", w.dump())
		}
		moved := false
		if len(w.parked) > 0 && w.rnd.Intn(4) == 0 {
			i := w.rnd.Intn(len(w.parked))
			f := w.parked[i]
			w.parked = append(w.parked[:i], w.parked[i+1:]...)
			f()
			moved = true
		} else {
			l := w.links[w.rnd.Intn(len(w.links))]
			moved = l.move(w.rnd.Intn(2), w.rnd.Intn(2) == 0, 1+w.rnd.Intn(1+w.rnd.Intn(4000)))
		}
		if len(w.reapers) > 0 && w.rnd.Intn(500) == 0 { // a graceful end, of either server's, loses nothing
			if s := w.reapers[w.rnd.Intn(len(w.reapers))]; s.server && s.st == open && !s.going {
				s.going = true // a second call would not wait for the client to know
				s.c.Shutdown(http2.NoError)
			}
		}
		if len(w.reapers) > 0 && w.rnd.Intn(20) == 0 { // and is over some time after the client knows
			if s := w.reapers[w.rnd.Intn(len(w.reapers))]; s.server && s.c.Warned() {
				s.c.Shutdown(http2.NoError)
			}
		}
		w.recycle()
		if moved {
			still = 0
			continue
		}
		if still++; still == 40 { // sure of it?
			for _, l := range w.links {
				for k := range 4 {
					if l.move(k&1, k&2 != 0, 1<<20) {
						still = 0
					}
					w.recycle()
				}
			}
			if len(w.parked) > 0 {
				still = 0
			}
		}
	}
}

// recycle is the end of an iteration.
func (w *world) recycle() {
	for _, x := range w.dead {
		if w.done[x] != x.Gen {
			w.t.Fatalf("an exchange was given back before Done\n%s", w.dump())
		}
		w.pool.Release(x)
	}
	w.dead = w.dead[:0]
	for _, s := range w.reapers {
		s.c.Reap()
	}
}

func (w *world) release(x *exchange.Exchange) { w.dead = append(w.dead, x) }

// plan is one request with its response: what is sent, and what was seen.
type plan struct {
	id       int
	method   string
	body     []byte
	framing  http1.Framing // None, Length or Chunked
	trailers bool
	park     bool
	local    bool // the service answers itself
	keep     bool // the service keeps the body for replay
	hold     int  // and holds so much of it first; 0: none
	told     int  // of it
	retire   int  // answers that the service does not want
	retired  int
	refused  bool // what was held was too much

	interims  int
	status    int
	rbody     []byte
	rframing  http1.Framing // Length, Chunked or ToClose
	rtrailers bool
	when      int // answer after that many bytes of the request's body; beyond its length: after all of it
	cut       int // the first server breaks after that many bytes of its answer; -1: never
	cutRst    bool

	// At the servers, an attempt each.
	attempts int
	seen     []*seen
	// At the client.
	resInterims int
	resStatus   int
	resBody     []byte
	resEnd      bool
	resTr       string
	resBroken   bool
}

// seen is what the server got of one attempt.
type seen struct {
	body []byte
	end  bool
	tr   string
}

func fill(rnd *rand.Rand, n int, tag byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = tag ^ byte(i) ^ byte(i>>8)
	}
	return b
}

func size(rnd *rand.Rand) int {
	switch rnd.Intn(4) {
	case 0:
		if rnd.Intn(80) == 0 { // around what is kept
			return exchange.ReplayMax - 3000 + rnd.Intn(6000)
		}
		return 0
	case 1:
		return rnd.Intn(20)
	case 2:
		return rnd.Intn(500)
	}
	return rnd.Intn(6000)
}

func (w *world) plan(id int) *plan {
	r := w.rnd
	p := &plan{id: id, method: "POST", cut: -1, status: 200, park: r.Intn(3) == 0, local: r.Intn(8) == 0}
	switch r.Intn(5) {
	case 0:
		p.method = "GET"
	case 1:
		p.method = "HEAD"
	default:
		p.body = fill(r, size(r), byte(id*16+1))
		p.framing = http1.Length
		if r.Intn(2) == 0 {
			p.framing = http1.Chunked
			p.trailers = r.Intn(3) == 0
		}
	}
	if r.Intn(4) == 0 {
		p.interims = r.Intn(4)
	}
	switch r.Intn(6) {
	case 0:
		p.status = 204
	case 1:
		p.status = 304
	default:
		p.rbody = fill(r, size(r), byte(id*16+2))
		p.rframing = []http1.Framing{http1.Length, http1.Chunked, http1.ToClose}[r.Intn(3)]
		p.rtrailers = p.rframing == http1.Chunked && r.Intn(3) == 0
	}
	if p.method == "HEAD" {
		p.rtrailers = false
	}
	p.when = len(p.body) + 1
	if r.Intn(3) == 0 {
		p.when = r.Intn(len(p.body) + 1) // an early answer
	}
	p.keep = r.Intn(2) == 0
	if r.Intn(3) == 0 {
		p.hold = 1 + size(r)
	}
	if r.Intn(3) == 0 {
		p.retire = 1 + r.Intn(2)
	}
	if w.faults && r.Intn(2) == 0 {
		p.cut, p.cutRst = r.Intn(1+r.Intn(1+len(p.rbody)+200)), r.Intn(2) == 0
	}
	return p
}

// early: the answer may come before the end of the request, and cancel the rest of it.
func (p *plan) early() bool { return p.when <= len(p.body) || p.local || p.refused }

// Request is exchange.Service.
func (w *world) Request(x *exchange.Exchange) {
	id := string(x.Req.Path[1:])
	p := w.byID[id]
	if p == nil {
		w.t.Fatalf("a request for %q", x.Req.Path)
	}
	w.logf("%s: request reqlen=%d", id, x.Req.Length)
	x.User = p
	p.resInterims = 0
	if p.local {
		w.later(x, p, func() { x.Reply(&httpmsg.Head{Status: 421}, []byte("local "+id)) })
		return
	}
	if p.keep {
		x.KeepForReplay()
	}
	if p.hold > 0 {
		w.later(x, p, func() { x.HoldBody(p.hold, w) })
		return
	}
	w.later(x, p, func() { w.forward(x, p) })
}

// Held is exchange.Holder.
func (w *world) Held(x *exchange.Exchange, why exchange.Held) {
	p := x.User.(*plan)
	w.logf("%d: held %d of %d, told %d", p.id, x.HeldBytes(), len(p.body), why)
	if p.told++; p.told > 1 {
		w.t.Fatalf("told twice\n%s", w.dump())
	}
	held := x.AppendHeld(nil)
	if !bytes.HasPrefix(p.body, held) || len(held) > p.hold || x.Attempts > 0 {
		w.t.Fatalf("request %d: %d bytes are held, of %d\n%s", p.id, len(held), p.hold, w.dump())
	}
	switch why {
	case exchange.HeldWhole:
		if len(held) != len(p.body) {
			w.t.Fatalf("request %d: %d bytes for the whole body\n%s", p.id, len(held), w.dump())
		}
	case exchange.HeldFull:
		if len(held) != p.hold || len(p.body) <= p.hold {
			w.t.Fatalf("request %d: full with %d bytes\n%s", p.id, len(held), w.dump())
		}
		if p.refused = w.rnd.Intn(3) == 0; p.refused {
			w.later(x, p, func() { x.Reply(&httpmsg.Head{Status: 413}, []byte("too large")) })
			return
		}
	default:
		w.t.Fatalf("there is room\n%s", w.dump())
	}
	if w.rnd.Intn(2) == 0 { // whether or not the client's bytes waited for the Hold
		w.forward(x, p)
		return
	}
	w.later(x, p, func() { w.forward(x, p) })
}

// later calls f now, or after a while if the request still waits then.
func (w *world) later(x *exchange.Exchange, p *plan, f func()) {
	if !p.park {
		f()
		return
	}
	gen := x.Gen
	w.parked = append(w.parked, func() {
		if x.Gen == gen && !x.Over() {
			f()
		}
	})
}

func (w *world) forward(x *exchange.Exchange, p *plan) {
	p.attempts++
	p.seen = append(p.seen, &seen{})
	x.Req.Set([]byte("x-attempt"), x.Keep(strconv.AppendInt(nil, int64(p.attempts), 10)))
	if !w.h2up {
		u := &up1{w: w, x: x}
		w.link(u, &server1{w: w, first: p.attempts == 1, seen: p.seen[p.attempts-1]})
		x.Forward(&guard{Stream: u, w: w, up: true, name: fmt.Sprint(p.id, " up")})
		return
	}
	if w.up2 == nil || w.up2.st != open || w.up2.c.Available() == 0 {
		w.newUp2(p.attempts == 1)
	}
	s, err := w.up2.c.Open()
	if err != nil {
		x.UpstreamClosed(exchange.Refused)
		return
	}
	a := &adapter{side: w.up2, up: true, s: s, x: x}
	s.User = a
	x.Forward(&drainGuard{guard{Stream: a, w: w, up: true, name: fmt.Sprint(p.id, " up")}})
}

func (w *world) Response(x *exchange.Exchange, h *httpmsg.Head) {
	p := x.User.(*plan)
	if n := x.HeldBytes(); n > max(exchange.ReplayMax, p.hold) {
		w.t.Fatalf("%d bytes are kept\n%s", n, w.dump())
	}
	if p.retire > 0 && x.Replayable() {
		p.retire--
		p.retired++
		w.logf("%d: retired", p.id)
		x.DiscardResponse()
		if p.park {
			x.Park()
		}
		w.later(x, p, func() { w.forward(x, p) })
		return
	}
	h.Add([]byte("x-seen"), []byte("1"))
}

func (w *world) Failed(x *exchange.Exchange, c exchange.Code) {
	p := x.User.(*plan)
	w.logf("%d: failed %s replayable=%v", p.id, c, x.Replayable())
	if x.Replayable() && p.attempts < 3 && w.rnd.Intn(2) == 0 {
		if p.park {
			x.Park()
		}
		w.later(x, p, func() { w.forward(x, p) })
		return
	}
	if w.rnd.Intn(2) == 0 {
		x.Reply(&httpmsg.Head{Status: 502}, []byte("failed"))
	}
}

func (w *world) Done(x *exchange.Exchange) {
	p := x.User.(*plan)
	w.logf("%d: done ended=%s code=%s status=%d req=%d res=%d", p.id, x.Ended, x.Code, x.Status, x.ReqBytes, x.ResBytes)
	if w.done[x] == x.Gen {
		w.t.Fatalf("Done twice for request %d\n%s", p.id, w.dump())
	}
	w.done[x] = x.Gen
	w.nDone++
}

// guard checks the order of commands on a stream.
type guard struct {
	exchange.Stream
	w     *world
	up    bool
	name  string
	head  bool
	ended bool
	gone  bool
}

func (g *guard) fail(what string) {
	g.w.t.Fatalf("stream %s: %s\n%s", g.name, what, g.w.dump())
}

func (g *guard) WriteHead(h *httpmsg.Head, end bool) {
	if g.gone || g.ended || g.head {
		g.fail("a head after its end or twice")
	}
	if g.up || h.Status >= 200 {
		g.head, g.ended = true, end
	} else if end {
		g.fail("an interim head that ends")
	}
	g.Stream.WriteHead(h, end)
}

func (g *guard) WriteData(p []byte, end bool) int {
	if g.gone || g.ended || !g.head {
		g.fail("data out of order")
	}
	n := g.Stream.WriteData(p, end)
	if n < 0 || n > len(p) {
		g.fail("took more than there was")
	}
	g.ended = end && n == len(p)
	return n
}

func (g *guard) WriteTrailers(f []httpmsg.Field) {
	if g.gone || g.ended || !g.head {
		g.fail("trailers out of order")
	}
	g.ended = true
	g.Stream.WriteTrailers(f)
}

func (g *guard) Resume() {
	if g.gone {
		g.fail("resumed after its abort")
	}
	g.Stream.Resume()
}

func (g *guard) Abort(c exchange.Code) {
	if g.gone {
		g.fail("aborted twice")
	}
	g.gone = true
	g.w.logf("%s: abort %s", g.name, c)
	g.Stream.Abort(c)
}

// drainGuard is a guard of a stream that can be drained.
type drainGuard struct{ guard }

// Drain is exchange.Drainer.
func (g *drainGuard) Drain() {
	if g.gone || !g.ended {
		g.fail("drained, and the request is not whole")
	}
	g.gone = true
	g.Stream.(*adapter).drain()
}

// half1 is what the two HTTP/1 drivers share.
type half1 struct {
	in, out []byte
	st      closing
	parser  http1.Parser
	body    http1.BodyReader
	inBody  bool
	stalled bool
	trail   bool
	starved bool
}

func (h *half1) pending() []byte { return h.out }
func (h *half1) state() closing  { return h.st }

func (h *half1) write(p []byte, f http1.Framing, most int) int {
	n := min(len(p), max(0, most-len(h.out)))
	if n > 0 {
		if f == http1.Chunked {
			h.out = http1.AppendChunk(h.out, p[:n])
		} else {
			h.out = append(h.out, p[:n]...)
		}
	}
	h.starved = h.starved || n < len(p)
	return n
}

// pump offers what is in to take, which returns how much it took, and reports
// whether the body has ended.
func (h *half1) pump(take func([]byte, bool) int, trailers func([]httpmsg.Field) bool) (done bool, err error) {
	for !h.stalled && h.st == open {
		if h.trail {
			if !trailers(h.body.Trailers()) {
				h.stalled = true
				return false, nil
			}
			h.trail = false
			return true, nil
		}
		if len(h.in) == 0 {
			return false, nil
		}
		data, used, end, err := h.body.Next(h.in)
		if err != nil {
			return false, err
		}
		tr := end && len(h.body.Trailers()) > 0
		if len(data) > 0 || end && !tr {
			n := take(data, end && !tr)
			if h.st != open {
				return false, nil
			}
			if n < len(data) {
				h.body.Unread(len(data) - n)
				h.in = h.in[used-(len(data)-n):]
				h.stalled = true
				return false, nil
			}
		}
		h.in = h.in[used:]
		if tr {
			h.trail = true
			continue
		}
		if end {
			return true, nil
		}
	}
	return false, nil
}

// down1 is the proxy's end of an HTTP/1 client's connection.
type down1 struct {
	half1
	w       *world
	x       *exchange.Exchange
	respF   http1.Framing
	isHead  bool
	reqDone bool
	last    bool
	busy    bool
}

func (d *down1) feed(b []byte) int {
	n := min(len(b), 4096-len(d.in))
	if d.st == atEnd {
		return len(b) // lingering
	}
	d.in = append(d.in, b[:n]...)
	d.step()
	return n
}

func (d *down1) step() {
	if d.busy {
		return
	}
	d.busy = true
	defer func() { d.busy = false }()
	for d.st == open {
		switch {
		case d.x == nil && !d.inBody:
			if len(d.in) == 0 {
				return
			}
			var h httpmsg.Head
			n, f, err := d.parser.Request(d.in, &h)
			if err != nil {
				d.w.t.Fatal(err)
			}
			if n == 0 {
				return
			}
			d.isHead, d.last = string(h.Method) == "HEAD", h.Close
			d.reqDone = f == http1.None || f == http1.Length && h.Length == 0
			d.stalled, d.trail, d.starved = false, false, false
			d.inBody = !d.reqDone
			if d.inBody {
				d.body.Start(f, h.Length)
			}
			d.w.begun++
			d.x = d.w.pool.Begin(&guard{Stream: d, w: d.w, name: string(h.Path) + " down"}, &h, d.reqDone, nil, d.w.now)
			for i := range d.in[:n] {
				d.in[i] = '!' // the head is the exchange's own copy
			}
			d.in = d.in[n:]
			d.x.Begin()
		case d.inBody:
			done, err := d.pump(func(p []byte, end bool) int {
				if d.x == nil {
					return len(p)
				}
				return d.x.RequestData(p, end)
			}, func(f []httpmsg.Field) bool { return d.x == nil || d.x.RequestTrailers(f) })
			if err != nil {
				d.w.t.Fatal(err)
			}
			if !done {
				return
			}
			d.inBody, d.reqDone = false, true
			if d.x == nil {
				d.next()
			}
		default:
			return
		}
	}
}

func (d *down1) next() {
	if d.last {
		d.st = atEnd
		return
	}
	d.step()
}

func (d *down1) sent(n int) {
	d.out = d.out[n:]
	if d.starved && len(d.out) <= d.w.room/2 {
		d.starved = false
		if d.x != nil {
			d.x.DownstreamWritable()
		}
	}
}

func (d *down1) gone(bool) {
	if x := d.x; x != nil {
		d.x = nil
		x.DownstreamClosed(exchange.Cancel)
		d.w.release(x)
	}
	d.st = broken
}

func (d *down1) responseDone() {
	if d.x != nil {
		d.w.release(d.x)
		d.x = nil
	}
	d.last = d.last || d.respF == http1.ToClose
	if d.reqDone {
		d.next()
	}
}

func (d *down1) WriteHead(h *httpmsg.Head, end bool) {
	if h.Status < 200 {
		d.out = http1.AppendResponse(d.out, h, http1.None, http1.ResponseOptions{Minor: 1})
		return
	}
	d.respF = http1.None
	if !end {
		d.respF = http1.ResponseFraming(h, d.isHead, 1)
	}
	d.out = http1.AppendResponse(d.out, h, d.respF, http1.ResponseOptions{Close: d.last, Head: d.isHead, Minor: 1})
	if end {
		d.responseDone()
	}
}

func (d *down1) WriteData(p []byte, end bool) int {
	n := d.write(p, d.respF, d.w.room)
	if end && n == len(p) {
		if d.respF == http1.Chunked {
			d.out = http1.AppendLast(d.out, nil)
		}
		d.responseDone()
	}
	return n
}

func (d *down1) WriteTrailers(f []httpmsg.Field) {
	if d.respF == http1.Chunked {
		d.out = http1.AppendLast(d.out, f)
	}
	d.responseDone()
}

func (d *down1) Resume() {
	if d.stalled {
		d.stalled = false
		d.w.parked = append(d.w.parked, d.step) // the flush comes later
	}
}

func (d *down1) Abort(c exchange.Code) {
	if d.x != nil {
		d.w.release(d.x)
		d.x = nil
	}
	if c == exchange.NoError {
		d.st = atEnd
		return
	}
	d.st = broken
}

// up1 is the proxy's end of an HTTP/1 server's connection; it carries one request.
type up1 struct {
	half1
	w       *world
	x       *exchange.Exchange
	reqF    http1.Framing
	resF    http1.Framing
	isHead  bool
	gotHead bool
}

func (u *up1) feed(b []byte) int {
	n := min(len(b), 4096-len(u.in))
	u.in = append(u.in, b[:n]...)
	u.step()
	return n
}

func (u *up1) step() {
	for u.st == open && u.x != nil {
		if !u.gotHead {
			var h httpmsg.Head
			n, f, err := u.parser.Response(u.in, &h, u.isHead)
			if err != nil {
				u.fail(exchange.Protocol)
				return
			}
			if n == 0 {
				return
			}
			if h.Status < 200 {
				u.x.ResponseHead(&h, false)
				u.in = u.in[n:]
				continue
			}
			u.resF = f
			u.gotHead = true
			end := f == http1.None || f == http1.Length && h.Length == 0
			if !end {
				u.body.Start(f, h.Length)
			}
			x := u.x
			x.ResponseHead(&h, end)
			for i := range u.in[:n] {
				u.in[i] = '!'
			}
			u.in = u.in[n:]
			if end {
				u.finish()
			}
			continue
		}
		done, err := u.pump(func(p []byte, end bool) int { return u.x.ResponseData(p, end) },
			func(f []httpmsg.Field) bool { u.x.ResponseTrailers(f); return true })
		if err != nil {
			u.fail(exchange.Protocol)
		}
		if done {
			u.finish()
		}
		return
	}
}

func (u *up1) finish() {
	u.x = nil
	if u.st == open {
		u.st = atEnd
	}
}

func (u *up1) fail(c exchange.Code) {
	if u.st == broken {
		return
	}
	u.st = broken
	if x := u.x; x != nil {
		u.x = nil
		x.UpstreamClosed(c)
	}
}

func (u *up1) gone(reset bool) {
	u.step()
	if u.x != nil && u.gotHead && u.resF == http1.ToClose && !reset && len(u.in) == 0 {
		u.x.ResponseData(nil, true)
		u.finish()
		return
	}
	if u.x != nil && !reset && u.stalled { // the socket would tell again once drained
		u.w.parked = append(u.w.parked, func() { u.gone(false) })
		return
	}
	u.fail(exchange.Closed)
}

func (u *up1) sent(n int) {
	u.out = u.out[n:]
	if u.starved && len(u.out) <= u.w.room/2 {
		u.starved = false
		if u.x != nil {
			u.x.UpstreamWritable()
		}
	}
}

func (u *up1) WriteHead(h *httpmsg.Head, end bool) {
	u.reqF = http1.RequestFraming(h)
	if end && u.reqF == http1.Chunked {
		u.reqF = http1.None
	}
	u.isHead = string(h.Method) == "HEAD"
	u.out = http1.AppendRequest(u.out, h, u.reqF)
}

func (u *up1) WriteData(p []byte, end bool) int {
	n := u.write(p, u.reqF, u.w.room)
	if end && n == len(p) && u.reqF == http1.Chunked {
		u.out = http1.AppendLast(u.out, nil)
	}
	return n
}

func (u *up1) WriteTrailers(f []httpmsg.Field) {
	if u.reqF == http1.Chunked {
		u.out = http1.AppendLast(u.out, f)
	}
}

func (u *up1) Resume() {
	if u.stalled {
		u.stalled = false
		u.w.parked = append(u.w.parked, u.step)
	}
}

func (u *up1) Abort(exchange.Code) { u.x, u.st = nil, broken }

// h2side is one end of an HTTP/2 connection with what sits on it.
type h2side struct {
	w      *world
	c      *http2.Conn
	server bool
	going  bool
	left   []byte
	st     closing
}

func (s *h2side) pending() []byte { return s.c.Out() }
func (s *h2side) state() closing  { return s.st }
func (s *h2side) sent(n int)      { s.c.Sent(n) }
func (s *h2side) feed(b []byte) int {
	s.left = append(s.left, b...)
	n, err := s.c.Feed(s.left)
	if err != nil {
		s.w.t.Fatalf("%v\n%s", err, s.w.dump())
	}
	s.left = append([]byte(nil), s.left[n:]...) // nothing may live on in the old bytes
	return len(b)
}
func (s *h2side) gone(bool) {
	if s.st != broken {
		s.st = broken
		s.c.Abort(http2.Cancel)
	}
}

// driver2 is the proxy's end of an HTTP/2 connection, down or up.
type driver2 struct {
	h2side
	up bool
}

// adapter joins a stream to an exchange.
type adapter struct {
	side     *h2side
	up       bool
	s        *http2.Stream
	x        *exchange.Exchange
	pend     []byte
	pendEnd  bool
	trailers []httpmsg.Field
	pendTr   bool
	remote   bool
	local    bool
	dead     bool
	drained  bool
}

func (a *adapter) drain() {
	if !a.dead {
		a.x, a.drained = nil, true
	}
}

func (w *world) newUp2(first bool) {
	d := &driver2{up: true}
	d.w = w
	d.c = http2.New(http2.Config{StreamWindow: w.window, ConnWindow: 65535}, d)
	p := &peer2{first: first}
	p.w, p.server = w, true
	p.c = http2.New(http2.Config{Server: true, StreamWindow: w.window, ConnWindow: 65535}, p)
	w.up2 = &d.h2side
	w.reapers = append(w.reapers, &d.h2side, &p.h2side)
	w.link(d, p)
}

func (d *driver2) OnHead(s *http2.Stream, h *httpmsg.Head, end bool) {
	if d.up {
		a, _ := s.User.(*adapter)
		if a == nil || a.dead {
			return
		}
		a.remote = end
		a.x.ResponseHead(h, end)
		a.settle()
		return
	}
	a := &adapter{side: &d.h2side, s: s, remote: end}
	s.User = a
	d.w.begun++
	a.x = d.w.pool.Begin(&guard{Stream: a, w: d.w, name: string(h.Path) + " down"}, h, end, nil, d.w.now)
	a.x.Begin()
}

func (d *driver2) OnData(s *http2.Stream, p []byte, end bool) {
	a, _ := s.User.(*adapter)
	if a == nil || a.dead {
		s.Credit(len(p))
		return
	}
	if len(a.pend) > 0 {
		a.pend = append(a.pend, p...)
		a.pendEnd = end
		if len(a.pend) > max(d.w.window, 65535) { // which a peer may use until it has our SETTINGS
			d.w.t.Fatalf("%d bytes wait for one stream\n%s", len(a.pend), d.w.dump())
		}
		a.leave()
		return
	}
	n := a.offer(p, end)
	if a.dead {
		return
	}
	if n < len(p) {
		a.pend, a.pendEnd = append(a.pend[:0], p[n:]...), end
		a.leave()
		return
	}
	if end {
		a.remote = true
		a.settle()
	}
}

func (a *adapter) offer(p []byte, end bool) int {
	var n int
	if a.drained {
		n = len(p)
	} else if a.up {
		n = a.x.ResponseData(p, end)
	} else {
		n = a.x.RequestData(p, end)
	}
	if !a.dead && a.s != nil {
		a.s.Credit(n)
	}
	return n
}

func (d *driver2) OnTrailers(s *http2.Stream, f []httpmsg.Field) {
	a, _ := s.User.(*adapter)
	if a == nil || a.dead {
		return
	}
	if len(a.pend) > 0 || !a.offerTrailers(f) {
		a.pendTr = true
		for _, t := range f {
			a.trailers = append(a.trailers, httpmsg.Field{Name: bytes.Clone(t.Name), Value: bytes.Clone(t.Value)})
		}
		a.leave()
		return
	}
	if !a.dead {
		a.remote = true
		a.settle()
	}
}

func (a *adapter) offerTrailers(f []httpmsg.Field) bool {
	if a.drained {
		return true
	}
	if a.up {
		a.x.ResponseTrailers(f)
		return true
	}
	return a.x.RequestTrailers(f)
}

func (d *driver2) OnRefused(int, *http2.StreamError) {}

func (d *driver2) OnReset(s *http2.Stream, code http2.Code) {
	a, _ := s.User.(*adapter)
	if a == nil || a.dead {
		return
	}
	x := a.x
	a.dead, a.x = true, nil
	d.w.logf("reset %s up=%v", code, d.up)
	if a.drained {
		return
	}
	if d.up {
		c := exchange.Closed
		if code == http2.RefusedStream {
			c = exchange.Refused
		}
		x.UpstreamClosed(c)
		return
	}
	x.DownstreamClosed(exchange.Cancel)
	d.w.release(x)
}

func (d *driver2) OnWritable(s *http2.Stream) {
	if a, _ := s.User.(*adapter); a != nil && !a.dead && !a.drained {
		if d.up {
			a.x.UpstreamWritable()
		} else {
			a.x.DownstreamWritable()
		}
	}
}

func (d *driver2) OnGoAway(uint32, http2.Code) {}

func (a *adapter) settle() {
	if !a.dead && a.remote && a.local {
		a.finish()
	}
}

func (a *adapter) finish() {
	x := a.x
	a.dead, a.x = true, nil
	if !a.up {
		a.side.w.release(x)
	}
}

func (a *adapter) ended() {
	a.local = true
	if !a.up && a.remote {
		a.finish()
		return
	}
	a.leave()
}

// leave lets go of a stream that is over on the wire: Reap gives it to another request.
func (a *adapter) leave() {
	if a.s != nil && a.local && (a.remote || a.pendEnd || a.pendTr) {
		a.s.User = nil
		a.s = nil
	}
}

func (a *adapter) WriteHead(h *httpmsg.Head, end bool) {
	if a.dead {
		return
	}
	a.s.WriteHead(h, end)
	if end {
		a.ended()
	}
}

func (a *adapter) WriteData(p []byte, end bool) int {
	if a.dead {
		return len(p)
	}
	n := a.s.WriteData(p, end)
	if end && n == len(p) {
		a.ended()
	}
	return n
}

func (a *adapter) WriteTrailers(f []httpmsg.Field) {
	if !a.dead {
		a.s.WriteTrailers(f)
		a.ended()
	}
}

func (a *adapter) Resume() {
	if a.dead {
		return
	}
	if len(a.pend) > 0 {
		n := a.offer(a.pend, a.pendEnd)
		if a.dead {
			return
		}
		if a.pend = a.pend[n:]; len(a.pend) > 0 {
			return
		}
		if a.pendEnd {
			a.remote = true
			a.settle()
			return
		}
	}
	if a.pendTr {
		if !a.offerTrailers(a.trailers) || a.dead {
			return
		}
		a.pendTr = false
		a.remote = true
		a.settle()
	}
}

func (a *adapter) Abort(c exchange.Code) {
	if a.dead {
		return
	}
	code := http2.Cancel
	if c == exchange.NoError && !a.up {
		code = http2.NoError
	}
	if a.s != nil {
		a.s.Reset(code)
	}
	a.finish()
}

// The peers: what the client and the servers do.

func (p *plan) requestFields() []httpmsg.Field {
	f := []httpmsg.Field{{Name: []byte("x-id"), Value: []byte(strconv.Itoa(p.id))}}
	if p.framing == http1.Length {
		f = append(f, httpmsg.Field{Name: []byte("content-length"), Value: []byte(strconv.Itoa(len(p.body)))})
	}
	return f
}

func trailer(v string) []httpmsg.Field {
	return []httpmsg.Field{{Name: []byte("x-tr"), Value: []byte(v)}}
}

func trailerOf(f []httpmsg.Field) string {
	for _, t := range f {
		if string(t.Name) == "x-tr" {
			return string(t.Value)
		}
	}
	return ""
}

// client1 sends its requests one behind the other, whatever comes back.
type client1 struct {
	w      *world
	out    []byte
	got    []byte // everything that came back
	fin    bool
	st     closing
	sentN  int
	breaks int // breaks after that many bytes; -1: never
	rst    bool
}

func newClient1(w *world) *client1 {
	c := &client1{w: w, breaks: -1}
	for _, p := range w.reqs {
		b := &c.out
		*b = fmt.Appendf(*b, "%s /%d HTTP/1.1\r\nHost: a\r\nx-id: %d\r\n", p.method, p.id, p.id)
		switch p.framing {
		case http1.Length:
			*b = fmt.Appendf(*b, "Content-Length: %d\r\n\r\n%s", len(p.body), p.body)
		case http1.Chunked:
			*b = append(*b, "Transfer-Encoding: chunked\r\n\r\n"...)
			for q := p.body; len(q) > 0; {
				n := 1 + w.rnd.Intn(len(q))
				*b = fmt.Appendf(*b, "%X;e=1\r\n%s\r\n", n, q[:n])
				q = q[n:]
			}
			*b = append(*b, "0\r\n"...)
			if p.trailers {
				*b = fmt.Appendf(*b, "X-Tr: %d\r\n", p.id)
			}
			*b = append(*b, "\r\n"...)
		default:
			*b = append(*b, "\r\n"...)
		}
	}
	if w.faults && w.rnd.Intn(3) == 0 {
		c.breaks, c.rst = w.rnd.Intn(len(c.out)+1), w.rnd.Intn(2) == 0
	}
	return c
}

func (c *client1) pending() []byte {
	if c.breaks >= 0 {
		return c.out[:min(len(c.out), max(0, c.breaks-c.sentN))]
	}
	return c.out
}
func (c *client1) sent(n int) { c.out = c.out[n:]; c.sentN += n }
func (c *client1) state() closing {
	if c.breaks >= 0 && c.sentN >= c.breaks && c.st == open {
		if c.rst {
			return broken
		}
		return atEnd
	}
	return c.st
}
func (c *client1) feed(b []byte) int { c.got = append(c.got, b...); return len(b) }
func (c *client1) gone(reset bool) {
	c.fin = !reset
	c.st = broken
}

// server1 answers one request on its connection.
type server1 struct {
	w       *world
	first   bool
	in      []byte
	raw     []byte // everything that came
	out     []byte
	sentN   int
	st      closing
	parser  http1.Parser
	body    http1.BodyReader
	p       *plan
	seen    *seen
	reading bool
	said    bool
	whole   bool
}

func (s *server1) pending() []byte {
	if c := s.cut(); c >= 0 {
		return s.out[:min(len(s.out), max(0, c-s.sentN))]
	}
	return s.out
}

func (s *server1) cut() int {
	if s.p == nil || !s.first {
		return -1
	}
	return s.p.cut
}

func (s *server1) sent(n int) { s.out = s.out[n:]; s.sentN += n }

func (s *server1) state() closing {
	if c := s.cut(); c >= 0 && s.sentN >= c && s.st == open {
		if s.p.cutRst {
			return broken
		}
		return atEnd
	}
	if s.said && len(s.out) == 0 && s.p.rframing == http1.ToClose && s.st == open {
		return atEnd
	}
	return s.st
}

func (s *server1) gone(bool) { s.st = broken }

func (s *server1) feed(b []byte) int {
	s.raw = append(s.raw, b...)
	s.in = append(s.in, b...)
	if s.p == nil {
		var h httpmsg.Head
		n, f, err := s.parser.Request(s.in, &h)
		if err != nil {
			s.w.t.Fatalf("a server got %v\n%q", err, s.raw)
		}
		if n == 0 {
			return len(b)
		}
		s.p = s.w.byID[string(h.Path[1:])]
		s.in = s.in[n:]
		if s.whole = f == http1.None || f == http1.Length && h.Length == 0; !s.whole {
			s.body.Start(f, h.Length)
			s.reading = true
		}
	}
	for s.reading && len(s.in) > 0 {
		d, n, done, err := s.body.Next(s.in)
		if err != nil {
			s.w.t.Fatalf("a server got %v", err)
		}
		s.seen.body = append(s.seen.body, d...)
		s.in = s.in[n:]
		if done {
			s.reading, s.whole = false, true
			s.seen.tr = trailerOf(s.body.Trailers())
		}
	}
	if s.whole {
		s.seen.end = true
		if len(s.in) > 0 {
			s.w.t.Fatalf("bytes behind the request: %q", s.in)
		}
	}
	if !s.said && (s.whole || len(s.seen.body) >= s.p.when) {
		s.said = true
		s.out = s.p.response1(s.w.rnd)
	}
	return len(b)
}

func (p *plan) response1(rnd *rand.Rand) (b []byte) {
	for i := range p.interims {
		b = fmt.Appendf(b, "HTTP/1.1 103 Early Hints\r\nLink: %d\r\n\r\n", i)
	}
	b = fmt.Appendf(b, "HTTP/1.1 %d Whatever\r\nX-Id: %d\r\n", p.status, p.id)
	if p.status == 204 || p.status == 304 {
		return append(b, "\r\n"...)
	}
	switch p.rframing {
	case http1.Length:
		b = fmt.Appendf(b, "Content-Length: %d\r\n\r\n", len(p.rbody))
	case http1.Chunked:
		b = append(b, "Transfer-Encoding: chunked\r\n\r\n"...)
	default:
		b = append(b, "Connection: close\r\n\r\n"...)
	}
	if p.method == "HEAD" {
		return b
	}
	if p.rframing != http1.Chunked {
		return append(b, p.rbody...)
	}
	for q := p.rbody; len(q) > 0; {
		n := 1 + rnd.Intn(len(q))
		b = fmt.Appendf(b, "%x\r\n%s\r\n", n, q[:n])
		q = q[n:]
	}
	b = append(b, "0\r\n"...)
	if p.rtrailers {
		b = fmt.Appendf(b, "X-Tr: %d\r\n", p.id)
	}
	return append(b, "\r\n"...)
}

// peer2 is the client, or all servers behind one connection.
type peer2 struct {
	h2side
	first bool
}

// talk is a stream of peer2.
type talk struct {
	p     *plan
	seen  *seen
	n     int // the attempt
	queue []byte
	end   bool   // data ends the stream, else trailers do
	tr    string // trailers to come
	said  bool
	cut   int
}

func (p *peer2) start(reqs []*plan) {
	for _, q := range reqs {
		s, err := p.c.Open()
		if err != nil {
			p.w.t.Fatal(err)
		}
		t := &talk{p: q, queue: q.body, end: !q.trailers, cut: -1}
		if p.w.faults && p.w.rnd.Intn(4) == 0 {
			t.cut = p.w.rnd.Intn(len(q.body) + 1)
		}
		if q.trailers {
			t.tr = strconv.Itoa(q.id)
		}
		s.User = t
		h := &httpmsg.Head{Method: []byte(q.method), Scheme: []byte("http"), Authority: []byte("a"), Path: []byte("/" + strconv.Itoa(q.id)), Fields: q.requestFields()}
		none := q.framing == http1.None
		s.WriteHead(h, none)
		if !none {
			p.more(s, t)
		}
	}
}

// more sends what the windows allow.
func (p *peer2) more(s *http2.Stream, t *talk) {
	if t.cut >= 0 {
		left := len(t.p.body) - len(t.queue)
		n := s.WriteData(t.queue[:max(0, min(len(t.queue), t.cut-left))], false)
		t.queue = t.queue[n:]
		if left+n >= t.cut {
			t.cut = -1
			t.p.resBroken = true
			s.Reset(http2.Cancel)
			s.User = nil
		}
		return
	}
	if len(t.queue) > 0 || t.end {
		n := s.WriteData(t.queue, t.end)
		if t.queue = t.queue[n:]; len(t.queue) > 0 || t.end {
			return
		}
	}
	if t.tr != "" {
		s.WriteTrailers(trailer(t.tr))
	}
}

func (p *peer2) OnHead(s *http2.Stream, h *httpmsg.Head, end bool) {
	if !p.server {
		t, _ := s.User.(*talk)
		if t == nil {
			return
		}
		if h.Status < 200 {
			t.p.resInterims++
			return
		}
		t.p.resStatus, t.p.resEnd = h.Status, end
		return
	}
	q := p.w.byID[string(h.Path[1:])]
	if q == nil {
		p.w.t.Fatalf("a server got %q", h.Path)
	}
	a, _ := h.Get("x-attempt")
	n, err := strconv.Atoi(string(a))
	if err != nil {
		p.w.t.Fatal(err)
	}
	t := &talk{p: q, cut: -1, n: n, seen: q.seen[n-1]}
	t.seen.end = end
	s.User = t
	p.answer(s, t)
}

func (p *peer2) OnData(s *http2.Stream, b []byte, end bool) {
	t, _ := s.User.(*talk)
	s.Credit(len(b))
	if t == nil {
		return
	}
	if !p.server {
		t.p.resBody = append(t.p.resBody, b...)
		t.p.resEnd = end
		return
	}
	t.seen.body = append(t.seen.body, b...)
	t.seen.end = end
	p.answer(s, t)
}

func (p *peer2) OnTrailers(s *http2.Stream, f []httpmsg.Field) {
	t, _ := s.User.(*talk)
	if t == nil {
		return
	}
	if !p.server {
		t.p.resEnd, t.p.resTr = true, trailerOf(f)
		return
	}
	t.seen.end, t.seen.tr = true, trailerOf(f)
	p.answer(s, t)
}

func (p *peer2) answer(s *http2.Stream, t *talk) {
	q := t.p
	if t.said || !t.seen.end && len(t.seen.body) < q.when {
		return
	}
	t.said = true
	if p.first && q.cut >= 0 && t.n == 1 {
		if q.cut == 0 {
			s.User = nil
			s.Reset(http2.RefusedStream)
			return
		}
	}
	for i := range q.interims {
		s.WriteHead(&httpmsg.Head{Status: 103, Fields: []httpmsg.Field{{Name: []byte("link"), Value: []byte(strconv.Itoa(i))}}}, false)
	}
	none := q.status != 200 || q.method == "HEAD" || len(q.rbody) == 0 && !q.rtrailers && p.w.rnd.Intn(2) == 0
	s.WriteHead(&httpmsg.Head{Status: q.status, Fields: []httpmsg.Field{{Name: []byte("x-id"), Value: []byte(strconv.Itoa(q.id))}}}, none)
	if none {
		return
	}
	t.queue, t.end = q.rbody, !q.rtrailers
	if q.rtrailers {
		t.tr = strconv.Itoa(q.id)
	}
	if p.first && q.cut > 0 && t.n == 1 {
		s.WriteData(t.queue[:min(len(t.queue), q.cut)], false)
		s.User = nil
		s.Reset(http2.InternalError)
		return
	}
	p.more(s, t)
}

func (p *peer2) OnRefused(int, *http2.StreamError) {}

func (p *peer2) OnReset(s *http2.Stream, code http2.Code) {
	t, _ := s.User.(*talk)
	if t == nil || p.server {
		return
	}
	if !t.p.resEnd {
		t.p.resBroken = true
	}
}

func (p *peer2) OnWritable(s *http2.Stream) {
	if t, _ := s.User.(*talk); t != nil && (!p.server || t.said) {
		p.more(s, t)
	}
}

func (p *peer2) OnGoAway(uint32, http2.Code) {}
