package exchange_test

import (
	"bytes"
	"fmt"
	"math/rand"
	"strings"
	"testing"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// Events of both sides at one exchange, in any order that drivers may tell them in, without
// a codec: the pump sees only those orders that HTTP's versions make. What stands on either
// side is written down here once more, plainly, and held against what comes out.

// played is one exchange with both its sides, and its service.
type played struct {
	t     *testing.T
	rnd   *rand.Rand
	x     *exchange.Exchange
	trace strings.Builder

	body    []byte // of the request, or what the client says in a tunnel
	trailer bool
	tunnel  bool // it asks for one
	granted bool
	off     int  // taken of body
	stalled bool // refused, and not resumed yet
	sent    bool // and its end
	down    *playedStream

	ups    []*playedUp
	answer *playedUp // the one whose answer went down
	parked func()
	reply  string
	hold   int
	held   int
	cut    bool
	done   int
}

// playedStream is a stream that takes as much as it has room for, and knows what may follow what.
type playedStream struct {
	w        *played
	name     string
	room     int
	short    bool // it took less than there was: it owes a word when there is room
	interims int
	head     bool
	got      []byte
	end      bool
	trailers string
	gone     bool
	resume   func()
}

func (s *playedStream) fail(what string) {
	s.w.t.Fatalf("%s: %s\n%s", s.name, what, s.w.trace.String())
}

func (s *playedStream) say(format string, a ...any) {
	if s.w.done > 0 {
		s.fail("a command after Done: " + fmt.Sprintf(format, a...))
	}
	if s.gone {
		s.fail("a command to a stream that is gone: " + fmt.Sprintf(format, a...))
	}
	s.w.logf("  %s "+format, append([]any{s.name}, a...)...)
}

func (s *playedStream) WriteHead(h *httpmsg.Head, end bool) {
	s.say("head %d end=%v", h.Status, end)
	if s.head || s.end {
		s.fail("a second head")
	}
	if h.Status >= 100 && h.Status < 200 && h.Status != 101 {
		s.interims++
		return
	}
	s.head, s.end = true, end
}

func (s *playedStream) WriteData(p []byte, end bool) int {
	s.say("data %d end=%v", len(p), end)
	if !s.head || s.end {
		s.fail("data out of order")
	}
	n := min(len(p), s.room)
	s.room -= n
	s.got = append(s.got, p[:n]...)
	s.short = s.short || n < len(p)
	s.end = end && n == len(p)
	return n
}

func (s *playedStream) WriteTrailers(f []httpmsg.Field) {
	s.say("trailers %s", f[0].Value)
	if !s.head || s.end {
		s.fail("trailers out of order")
	}
	s.end, s.trailers = true, string(f[0].Value)
}

func (s *playedStream) Resume() {
	s.say("resume")
	s.resume()
}

func (s *playedStream) Abort(c exchange.Code) {
	s.say("abort %v", c)
	s.gone = true
}

// playedUp is an upstream with the answer that it gives.
type playedUp struct {
	playedStream
	status  int
	body    []byte
	trailer bool
	length  int64
	asked   int // interim heads that it sends
	headed  bool
	off     int
	stalled bool
	over    bool // the answer is whole
}

// Drain is exchange.Drainer.
func (u *playedUp) Drain() {
	u.say("drain")
	if !u.end {
		u.fail("drained, and the request is not whole")
	}
	u.gone = true
}

func (w *played) logf(format string, a ...any) { fmt.Fprintf(&w.trace, format+"\n", a...) }

func (w *played) one(in int) bool { return w.rnd.Intn(in) == 0 }

func (w *played) up() *playedUp {
	if len(w.ups) == 0 || w.ups[len(w.ups)-1].gone {
		return nil
	}
	return w.ups[len(w.ups)-1]
}

// later calls f now, or when the loop gets to it if the request still waits then.
func (w *played) later(x *exchange.Exchange, f func()) {
	if w.one(2) {
		f()
		return
	}
	gen := x.Gen
	x.Park()
	w.parked = func() {
		if x.Gen == gen && !x.Over() {
			f()
		}
	}
}

func (w *played) forward() {
	u := &playedUp{status: 200, length: httpmsg.Unknown, asked: w.rnd.Intn(3), trailer: w.one(3)}
	u.playedStream = playedStream{w: w, name: fmt.Sprint("up", len(w.ups)+1), room: w.rnd.Intn(60), resume: func() { u.stalled = false }}
	u.body = fill(w.rnd, w.rnd.Intn(120), byte(len(w.ups)*16+2))
	if w.tunnel && w.one(2) {
		u.status, u.trailer, u.asked = 101, false, 0
	} else if w.one(3) {
		u.length, u.trailer = int64(len(u.body)), false
	}
	w.ups = append(w.ups, u)
	w.x.Forward(u)
}

func (w *played) local(status int) {
	w.reply = strings.Repeat("local ", w.rnd.Intn(9))
	w.x.Reply(&httpmsg.Head{Status: status}, []byte(w.reply))
}

// Request is exchange.Service.
func (w *played) Request(x *exchange.Exchange) {
	w.x = x
	if w.one(2) {
		x.KeepForReplay()
	}
	switch w.rnd.Intn(6) {
	case 0:
		w.later(x, func() { w.local(421) })
	case 1:
		w.hold = 1 + w.rnd.Intn(150)
		w.later(x, func() { x.HoldBody(w.hold, w) })
	default:
		w.later(x, w.forward)
	}
}

// Held is exchange.Holder.
func (w *played) Held(x *exchange.Exchange, why exchange.Held) {
	w.logf("  held %d, %d", x.HeldBytes(), why)
	if w.held++; w.held > 1 || x.HeldBytes() > w.hold || !bytes.HasPrefix(w.body, x.AppendHeld(nil)) ||
		why == exchange.HeldWhole && !w.tunnel && x.HeldBytes() != len(w.body) || why == exchange.HeldNoRoom {
		w.t.Fatalf("held %d of %d, told %d the %d. time\n%s", x.HeldBytes(), w.hold, why, w.held, w.trace.String())
	}
	if w.one(4) {
		w.later(x, func() { w.local(413) })
		return
	}
	w.later(x, w.forward)
}

// Response is exchange.Service.
func (w *played) Response(x *exchange.Exchange, h *httpmsg.Head) {
	u := w.up()
	switch {
	case x.Replayable() && len(w.ups) < 4 && w.one(4):
		x.DiscardResponse()
		w.later(x, w.forward)
		return
	case h.Status != 101 && w.one(8):
		w.local(403)
		return
	case h.Status != 101 && w.one(3):
		w.cut = true
		x.AbortTrailers = []httpmsg.Field{field("grpc-status", "cut")}
	}
	w.answer = u
	w.granted = h.Status == 101
}

// Failed is exchange.Service.
func (w *played) Failed(x *exchange.Exchange, c exchange.Code) {
	switch {
	case x.Replayable() && len(w.ups) < 4 && w.one(2):
		w.later(x, w.forward)
	case w.one(2):
		w.later(x, func() { w.local(502) })
	} // else 503
}

// Done is exchange.Service.
func (w *played) Done(x *exchange.Exchange) {
	w.logf("  done %v %v local=%v", x.Ended, x.Code, x.Local())
	if w.done++; w.done > 1 {
		w.t.Fatalf("Done twice\n%s", w.trace.String())
	}
}

// step plays one event, if one of that kind can happen, and reports whether something moved.
func (w *played) step(kind int) bool {
	x, u := w.x, w.up()
	switch kind {
	case 0: // the client sends
		if w.stalled || w.sent || w.tunnel && x.Answered() && !w.granted {
			return false
		}
		n := min(len(w.body)-w.off, 1+w.rnd.Intn(40))
		last := w.off+n == len(w.body)
		if n == 0 && w.trailer {
			w.logf("request trailers")
			w.sent = x.RequestTrailers([]httpmsg.Field{field("tr", "end")})
			w.stalled = !w.sent && !x.Over()
			return true
		}
		end := last && !w.trailer
		w.logf("request data %d end=%v", n, end)
		// Resume may come before the answer to this call: it counts.
		w.stalled = true
		took := x.RequestData(w.body[w.off:w.off+n], end)
		if x.Over() {
			took = min(took, int(x.ReqBytes)-w.off) // the rest is thrown away
		}
		w.off += took
		w.stalled = w.stalled && took < n
		w.sent = end && took == n
		return took > 0 || w.sent
	case 1: // the upstream goes on
		switch {
		case u == nil || u.over || u.stalled:
			return false
		case u.asked > 0:
			u.asked--
			w.logf("%s: interim", u.name)
			x.ResponseHead(&httpmsg.Head{Status: 103}, false)
		case !u.headed:
			u.headed = true
			end := len(u.body) == 0 && !u.trailer && u.status != 101
			w.logf("%s: head %d of %d bytes, end=%v", u.name, u.status, len(u.body), end)
			u.over = end
			x.ResponseHead(&httpmsg.Head{Status: u.status, Length: u.length}, end)
		default:
			n := min(len(u.body)-u.off, 1+w.rnd.Intn(40))
			if n == 0 && u.trailer {
				w.logf("%s: trailers", u.name)
				u.over = true
				x.ResponseTrailers([]httpmsg.Field{field("tr", "end")})
				return true
			}
			end := u.off+n == len(u.body) && !u.trailer
			w.logf("%s: data %d end=%v", u.name, n, end)
			u.stalled = true
			took := x.ResponseData(u.body[u.off:u.off+n], end)
			u.off += took
			u.stalled = u.stalled && took < n
			u.over = end && took == n
			return took > 0 || u.over
		}
		return true
	case 2: // room for the client
		w.down.room += w.rnd.Intn(60)
		if w.down.short && !w.down.end && !w.down.gone {
			w.down.short = false
			w.logf("room below")
			x.DownstreamWritable()
			return true
		}
	case 3: // room for the upstream
		if u == nil || u.end {
			return false
		}
		u.room += w.rnd.Intn(60)
		if u.short {
			u.short = false
			w.logf("room above")
			x.UpstreamWritable()
			return true
		}
	case 4: // what waited
		if f := w.parked; f != nil {
			w.parked = nil
			w.logf("later")
			f()
			return true
		}
	case 5: // the upstream breaks
		if u == nil || u.over && u.end {
			return false
		}
		w.logf("%s: gone", u.name)
		u.gone = true
		x.UpstreamClosed([]exchange.Code{exchange.Closed, exchange.Refused, exchange.Timeout}[w.rnd.Intn(3)])
		return true
	case 6: // the client goes
		w.logf("client gone")
		w.down.gone = true
		x.DownstreamClosed(exchange.Closed)
		return true
	case 7: // a limit of time
		w.logf("abort")
		x.Abort(exchange.Timeout)
		return true
	}
	return false
}

// judge holds what came out of an exchange that is over against what went in.
func (w *played) judge() {
	x := w.x
	bad := func(format string, a ...any) {
		w.t.Helper()
		w.t.Fatalf(format+"\n%s", append(a, w.trace.String())...)
	}
	if w.done != 1 {
		bad("over, and done %d times", w.done)
	}
	if x.ReqBytes != int64(w.off) || x.ResBytes != int64(len(w.down.got)) {
		bad("%d and %d bytes are counted, %d were taken and %d went down", x.ReqBytes, x.ResBytes, w.off, len(w.down.got))
	}
	for _, u := range w.ups {
		inTunnel := !w.tunnel || w.granted && u == w.answer
		if !bytes.HasPrefix(w.body, u.got) || u.end && inTunnel && (len(u.got) != len(w.body) || w.trailer != (u.trailers != "")) {
			bad("%s got %d of %d bytes, end %v, trailers %q", u.name, len(u.got), len(w.body), u.end, u.trailers)
		}
		if !u.gone && !(u.end && u.over) {
			bad("%s is left behind", u.name)
		}
	}
	byCut := w.down.trailers == "cut"
	switch {
	case x.Local():
		if w.reply != "" && (!strings.HasPrefix(w.reply, string(w.down.got)) || w.down.end && len(w.down.got) != len(w.reply)) {
			bad("the client got %q, end %v, of our own %q", w.down.got, w.down.end, w.reply)
		}
	case w.answer != nil:
		if !bytes.HasPrefix(w.answer.body, w.down.got) ||
			w.down.end && !byCut && (len(w.down.got) != len(w.answer.body) || w.answer.trailer != (w.down.trailers != "")) {
			bad("the client got %d bytes of %d, end %v, trailers %q", len(w.down.got), len(w.answer.body), w.down.end, w.down.trailers)
		}
	case len(w.down.got) > 0:
		bad("the client got %d bytes of nobody's", len(w.down.got))
	}
	switch x.Ended {
	case exchange.Nobody:
		if !w.down.end {
			bad("complete, and the response has no end")
		}
	case exchange.Server, exchange.Proxy:
		if !w.down.gone && !w.down.end {
			bad("the client waits for ever")
		}
		if w.cut && !x.Local() && x.Answered() && !byCut {
			bad("cut off, and the response has no status")
		}
	}
}

// play is one case, drawn from src.
func play(t *testing.T, src rand.Source) (ended string) {
	w := &played{t: t, rnd: rand.New(src)}
	w.tunnel = w.one(4)
	w.body = fill(w.rnd, w.rnd.Intn(200), 1)
	h := httpmsg.Head{Method: []byte("POST"), Path: []byte("/"), Length: httpmsg.Unknown, Minor: 1}
	if w.tunnel {
		h.Method, h.Upgrade, h.Length = []byte("GET"), []byte("websocket"), 0
	} else if w.trailer = w.one(3); !w.trailer && w.one(2) {
		h.Length = int64(len(w.body))
	}
	w.sent = h.Length == 0 && !w.tunnel
	w.down = &playedStream{w: w, name: "down", room: w.rnd.Intn(60)}
	w.down.resume = func() { w.stalled = false }
	pool := exchange.Pool{Service: w}
	w.x = pool.Begin(w.down, &h, w.sent, nil, 0)
	w.x.Begin()
	for range w.rnd.Intn(60) {
		if w.x.Over() {
			break
		}
		kind := w.rnd.Intn(5)
		if w.one(30) {
			kind = 5 + w.rnd.Intn(3)
		}
		w.step(kind)
	}
	// From here on nobody goes: everything that waits has to move on until it is over.
	for still := 0; !w.x.Over(); still++ {
		if still > 50 {
			t.Fatalf("nothing moves any more, and it is not over\n%s", w.trace.String())
		}
		for kind := range 5 {
			if !w.x.Over() && w.step(kind) {
				still = 0
			}
		}
	}
	w.judge()
	return fmt.Sprintf("%v local=%v tunnel=%v", w.x.Ended, w.x.Local(), w.granted)
}

// TestEvents: and every end there is, is met.
func TestEvents(t *testing.T) {
	ends := map[string]int{}
	for seed := range int64(10_000) {
		ends[play(t, rand.NewSource(seed))]++
	}
	for _, end := range []string{
		"complete local=false tunnel=false", "complete local=true tunnel=false", "complete local=false tunnel=true",
		"client local=false tunnel=false", "server local=false tunnel=false", "proxy local=false tunnel=false", "proxy local=false tunnel=true",
	} {
		if ends[end] < 20 {
			t.Errorf("%q was met %d times", end, ends[end])
		}
	}
	t.Log(ends)
}

// FuzzEvents: no order of both sides' events loses or doubles a byte, an event or an end, and none is never over.
func FuzzEvents(f *testing.F) {
	for i := range byte(8) {
		rnd := rand.New(rand.NewSource(int64(i)))
		b := make([]byte, 20+rnd.Intn(200))
		rnd.Read(b)
		f.Add(b, i)
	}
	f.Fuzz(func(t *testing.T, b []byte, rest byte) { play(t, &reel{b, rand.NewSource(int64(rest))}) })
}
