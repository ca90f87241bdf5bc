// Package exchange joins one HTTP request to its response: a state machine
// between the stream the request came on (down) and the stream that answers it
// (up), whatever HTTP versions the two speak.
//
//   - Pure: events in as method calls, commands out through Stream; no I/O,
//     goroutine or clock.
//   - What the other side cannot take stays where it came from: a data event
//     returns how much was taken, and Resume asks for the rest. A body is kept only
//     where the service asks for it: to send it again, or to see it first
//     (replay.go); that is bounded, an exchange and a pool.
//   - The request's head is copied once and kept until the end, so a request may
//     wait (park), or be sent again while no answer has begun and nothing of its
//     body has gone that is not kept.
//   - Done is called exactly once, last, on every path.
//
// It knows no socket, no route and no policy: the Service decides.
package exchange

import (
	"cmp"
	"strconv"

	"aether/dataplane/httpmsg"
)

// Code says why a stream ends early.
type Code uint8

// The codes; a codec maps them to its own (RFC 9113 7).
const (
	NoError  Code = iota // all that was wanted has been had
	Cancel               // nobody waits for it any more
	Refused              // the peer processed nothing of it (REFUSED_STREAM, GOAWAY)
	Connect              // no connection could be made
	Closed               // the connection ended
	Protocol             // the peer broke the protocol
	Internal             // our own fault
	Timeout              // a limit of time was met
	TooLarge             // a limit of size was met
	Stale                // a reused connection ended before any byte of the answer
	Reset                // the client reset its stream; its connection goes on
	Unsent               // a kept connection had ended before the peer took anything of the request
	codeCount
)

var codeNames = [codeCount]string{"no-error", "cancel", "refused", "connect", "closed", "protocol", "internal", "timeout", "too-large", "stale", "reset", "unsent"}

func (c Code) String() string {
	if c < codeCount {
		return codeNames[c]
	}
	return "code-" + strconv.Itoa(int(c))
}

// Stream is one end of an exchange as the exchange commands it; a codec's
// connection stands behind it. No method calls back into the exchange before
// it returns, but Abort and the ends of messages may end the stream's life: the
// exchange forgets a stream once both directions have ended or it was aborted.
type Stream interface {
	// WriteHead queues a head; end: no body follows. An interim (1xx) head never ends.
	WriteHead(h *httpmsg.Head, end bool)
	// WriteData queues as much of p as there is room for, and says how much that
	// was; end counts only once all of p was taken. After a short count the
	// stream calls the exchange's room event later.
	WriteData(p []byte, end bool) int
	// WriteTrailers ends the message with trailers (which may be dropped where
	// the client's protocol has none).
	WriteTrailers(f []httpmsg.Field)
	// Resume: data that was refused can be offered again now.
	Resume()
	// Abort ends what is left of the stream in both directions.
	Abort(c Code)
}

// Service decides what becomes of requests. All methods run where the
// exchange runs.
type Service interface {
	// Request is called with each request, its head in x.Req. Now or later
	// (until then the request is parked) it calls exactly one of x.Forward,
	// x.Reply or x.Abort.
	Request(x *Exchange)
	// Response may change the final response's head before it goes down. It may
	// call x.Reply to answer in its place, or x.DiscardResponse and then what it may from Failed.
	Response(x *Exchange, h *httpmsg.Head)
	// Failed: the upstream ended before a final response head. The service may
	// call x.Forward again where x.Replayable, or x.Reply; if it calls neither,
	// the exchange answers 503.
	Failed(x *Exchange, c Code)
	// Done: the exchange is over; x is reused after return.
	Done(x *Exchange)
}

// Side tells who ended an exchange first.
type Side uint8

// The sides.
const (
	Nobody Side = iota // ended by both messages being complete
	Client
	Server
	Proxy
)

func (s Side) String() string { return [...]string{"complete", "client", "server", "proxy"}[s] }

// requestHalf is the request on its way from down to up.
//
//	 from down              to up, each attempt anew          to be sent again
//
//	┌─────────┐             ┌─────────┐                      ┌─────────────┐ KeepForReplay ┌────────────┐
//	│ reqOpen │             │         │                      │ notKept     ├──────────────►│ keptToSend │
//	└─┬─────┬─┘             │ !sent   │◄─ Forward            └──────┬──────┘               └─────┬──────┘
//	  │end  │trailers       │         │                             │ body goes up               │ too long, no room,
//	  ▼     ▼               └────┬────┘                             ▼                            │ or the answer begins
//	┌────┐ ┌───────────┐         │ the end goes up           ┌─────────────┐                     │
//	│req │ │reqTrailed │         ▼                           │ bodyLost    │◄────────────────────┘
//	│Done│ └───────────┘       sent                          └─────────────┘  (notKept, if none of it has gone up)
//	└────┘
type requestHalf struct {
	from    received
	again   keeping
	sent    bool // it has gone up whole
	stalled bool // data of it was refused: Resume is due
	reached bool // the attempt that failed had been given its head
}

// received is how much of a request has been received.
type received uint8

const (
	reqOpen    received = iota // its end is to come
	reqDone                    // it has ended with its head or body
	reqTrailed                 // it has ended with trailers, which have been taken
)

// keeping says what is done for the request to be sent again.
type keeping uint8

const (
	notKept    keeping = iota // nothing more is kept; what has gone up of a body, if anything, is
	keptToSend                // what goes up is kept
	bodyLost                  // something of the body has gone up and is not kept: it cannot be sent again
)

// responseHalf is the response on its way from up, or from the service, to down.
//
//	                 ResponseHead             the service says nothing
//	┌─────────┐ ─────────────────► ┌───────────┐ ─────────────────► ┌──────────┐    end    ┌─────────┐
//	│ resNone │                    │ resJudged │                    │ resBegun ├──────────►│ resDone │
//	└─────────┘ ◄───────────────── └─────┬─────┘                    └──────────┘           └─────────┘
//	     │         resRetired ◄──────────┘ DiscardResponse                ▲
//	     └────────────────────────────── Reply ───────────────────────────┘
type responseHalf struct {
	state   responseState
	local   bool  // it is the service's own
	stalled bool  // data of it was refused: Resume is due
	len     int64 // of the one that is being judged; Unknown
}

// responseState is how far a final response has come; 1xx heads count for nothing.
type responseState uint8

const (
	resNone    responseState = iota
	resJudged                // within Service.Response
	resRetired               // within Service.Response, which does not want it
	resBegun                 // its head has gone down
	resDone                  // it has gone down whole
)

// Exchange is one request with its response. Fields in the first group are
// for the Service to read.
type Exchange struct {
	Req          httpmsg.Head // own copy of the request's head; the service may change it before Forward
	Status       int          // final status, 0 until known; the service may set it in Response, for the record
	LoggedStatus int          // set by the service before Reply: the Status for the record, where another stands on the wire
	Attempts     int          // upstreams tried
	ReqBytes     int64        // body bytes of the request that were taken from the client
	ResBytes     int64        // body bytes of the response that went down
	Ended        Side         // who ended it early
	Code         Code         // why, when Ended is not Nobody
	Cause        error        // what went wrong with the last upstream, for the record; may be nil
	Start        int64        // set by the driver, in its clock

	// Gen changes whenever the exchange is begun anew: who keeps a pointer across
	// iterations (a dial in flight) compares it.
	Gen uint32

	// Cut, set by the service in Response, ends the response as trailers if it
	// ends without any: cut off by the upstream or by Abort, or complete. It is for protocols
	// whose status stands in the trailers, and for clients that understand them.
	AbortTrailers []httpmsg.Field

	// User belongs to the service and survives reuse, so that it can keep a
	// pooled object there.
	User any
	// Conn belongs to the driver: what is known of the connection.
	Conn any
	// Share is set by the driver before Ask, and not changed: whose part of the pool's memory is
	// taken by what is kept of the body. nil: nobody's.
	Share *Share

	svc   Service
	pool  *Pool
	down  Stream
	up    Stream
	arena []byte

	outgrown int // bytes of the arrays that arena had before, which things kept still lie in

	rest     []byte // of a local body: what down had no room for yet
	interims int    // 1xx heads that went down

	tap Tap // is shown the body (copy.go); nil: nobody

	// What is kept of the request's body (replay.go).
	chunks    []*chunk
	must      int             // of chunks, the first: those of a Hold. The others are kept to be sent again alone
	kept, fed int             // bytes that are kept, and of these gone to the upstream
	trailers  []httpmsg.Field // kept too; in the arena
	holder    Holder          // of a Hold that has not ended
	holdMax   int

	req     requestHalf
	res     responseHalf
	tunnel  tunnel // upgrade.go
	over    bool   // Done has been called
	handled bool   // the service answered within Failed, or after DiscardResponse
	busy    bool   // within an event of down's
}

// Pool hands out exchanges of one service on one loop. Not safe for concurrent use.
type Pool struct {
	Service Service
	free    []*Exchange
	chunks  []*chunk // free
	held    Share    // chunks in use, of all pods
}

const (
	poolMax    = 1024
	maxInterim = 64 // 1xx heads of one response: more is no progress (as http2 bounds them)
)

// errInterims is Cause of an answer with too many 1xx heads.
const errInterims = httpmsg.Flaw("too many interim responses; at most 64")

// Begin starts an exchange for the request head h that arrived on down; end:
// it has no body, and asks for no tunnel. conn is kept in Conn, now in Start. Ask comes next.
func (p *Pool) Begin(down Stream, h *httpmsg.Head, end bool, conn any, now int64) *Exchange {
	var x *Exchange
	if n := len(p.free); n > 0 {
		x = p.free[n-1]
		p.free = p.free[:n-1]
	} else {
		x = &Exchange{}
	}
	x.Gen++
	x.svc, x.pool, x.down, x.Conn, x.Start = p.Service, p, down, conn, now
	x.arena = h.CloneInto(&x.Req, x.arena[:0])
	if end {
		x.req.from = reqDone
	}
	if h.Upgrade != nil {
		x.tunnel = tunnelAsked
	}
	return x
}

// Begin calls the service's Request. The driver calls it once, after it has
// stored the exchange where the answer's commands find it.
func (x *Exchange) Begin() {
	x.svc.Request(x)
}

// Release gives an exchange back. The driver calls it once no queue can hold it.
func (p *Pool) Release(x *Exchange) {
	if len(p.free) >= poolMax {
		return
	}
	req, arena, user, gen := x.Req, x.arena, x.User, x.Gen
	if cap(arena) > 16<<10 {
		arena = nil
	}
	chunks, trailers := x.chunks[:0], x.trailers[:0]
	if cap(chunks) > keepRefs {
		chunks = nil
	}
	*x = Exchange{arena: arena, User: user, Gen: gen + 1, chunks: chunks, trailers: trailers}
	req.Reset()
	x.Req = req
	p.free = append(p.free, x)
}

// Over reports whether Done has been called.
func (x *Exchange) Over() bool { return x.over }

// Local reports whether the response is the service's own.
func (x *Exchange) Local() bool { return x.res.local }

// Head reports whether the request is HEAD.
func (x *Exchange) Head() bool { return string(x.Req.Method) == "HEAD" }

// Answered reports whether the final response's head has gone down.
func (x *Exchange) Answered() bool { return x.res.state >= resBegun }

// Forwarded reports whether an upstream is attached.
func (x *Exchange) Forwarded() bool { return x.up != nil }

// Replayable reports whether the request can be sent once more: no answer has
// begun, and what has gone up of a body or its trailers is kept.
func (x *Exchange) Replayable() bool {
	return x.res.state < resBegun && !x.over && x.req.again != bodyLost
}

// Reached reports, from Failed, whether the attempt that failed had been given
// the request; otherwise it failed while one was being waited for.
func (x *Exchange) Reached() bool { return x.req.reached }

// Idempotent reports whether the request's method may be sent twice without
// being done twice (contract 5.7).
func (x *Exchange) Idempotent() bool {
	switch string(x.Req.Method) {
	case "GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE":
		return true
	}
	return false
}

// Resendable reports, from Failed, whether a request whose kept connection had ended may be sent
// on another: whatever its method where nothing of it was taken, else if its method may be done twice.
func (x *Exchange) Resendable(c Code) bool {
	return x.Replayable() && (c == Unsent || c == Stale && x.Idempotent())
}

// Keep copies b into memory that lives as long as the exchange.
func (x *Exchange) Keep(b []byte) []byte {
	if cap(x.arena)-len(x.arena) < len(b) {
		x.outgrown += cap(x.arena)
		x.arena = make([]byte, 0, max(1024, len(b))) // what was kept before stays in the old array
	}
	o := len(x.arena)
	x.arena = append(x.arena, b...)
	return x.arena[o:len(x.arena):len(x.arena)]
}

// Forward sends the request to up: its head, what is kept of its body, and
// then the rest as it comes. Called by the service, again only where Replayable. What has
// an answer goes nowhere any more.
func (x *Exchange) Forward(up Stream) {
	if x.over || x.Answered() {
		up.Abort(Cancel)
		return
	}
	if x.req.again == bodyLost { // never a request with a hole in it
		up.Abort(Cancel)
		x.finish(Proxy, Internal, true)
		return
	}
	x.handled, x.holder = true, nil
	x.up = up
	x.Attempts++
	x.fed = 0
	x.req.sent = x.req.from == reqDone && x.tunnel != tunnelAsked && x.kept == 0 // no body, or one that turned out to be empty while the request waited
	up.WriteHead(&x.Req, x.req.sent)
	if x.up != up || x.unfed() && !x.feed() {
		return
	}
	if !x.req.sent && !x.busy {
		x.req.stalled = false
		x.down.Resume() // the body waited, if there is one
	}
}

// Park says, from Failed or after DiscardResponse, that Forward or Reply will be called later.
func (x *Exchange) Park() { x.handled = true }

// Reply answers the request without an upstream. fields and body may alias
// anything: they are encoded before Reply returns, except that body beyond the
// stream's room is kept by a copy. With a status that has no body (204, 304)
// body is left out. Called by the service.
func (x *Exchange) Reply(h *httpmsg.Head, body []byte) {
	x.handled = true
	if x.over || x.Answered() {
		return
	}
	if up := x.up; up != nil {
		x.up = nil
		up.Abort(Cancel)
	}
	if x.tunnel == tunnelAsked {
		x.decline()
	}
	x.res.local = true
	x.Status = cmp.Or(x.LoggedStatus, h.Status)
	x.res.state, x.holder = resBegun, nil
	x.begun()
	h.Length = int64(len(body))
	if h.Status == 204 || h.Status == 304 { // RFC 9110 8.6
		h.Length, body = 0, nil
		h.Del(string(contentLength))
	} else {
		var t [20]byte
		h.Set(contentLength, strconv.AppendInt(t[:0], h.Length, 10))
	}
	if x.Head() {
		h.Length, body = 0, nil
	}
	x.down.WriteHead(h, len(body) == 0)
	if x.over {
		return
	}
	if len(body) > 0 {
		n := x.down.WriteData(body, true)
		x.ResBytes += int64(n)
		if n < len(body) { // a client whose windows are shut: DownstreamWritable goes on
			x.rest = x.Keep(body[n:])
			return
		}
	}
	x.res.state = resDone
	x.maybeDone()
}

var contentLength = []byte("content-length")

// Abort ends the exchange in both directions. Called by the service or the driver.
func (x *Exchange) Abort(c Code) {
	if !x.over {
		x.handled = true
		x.broken(Proxy, c)
	}
}

// finish ends the exchange; cut: the down stream is not at a clean end.
func (x *Exchange) finish(who Side, c Code, cut bool) {
	if x.over {
		return
	}
	x.over = true
	x.Ended, x.Code = who, c
	up, down := x.up, x.down
	x.up, x.down, x.holder, x.tap = nil, nil, nil, nil
	x.unkeep()
	if up != nil && !(x.req.sent && x.res.state == resDone) {
		if c == NoError {
			up.Abort(NoError)
		} else {
			up.Abort(Cancel)
		}
	}
	if cut && down != nil && who != Client {
		if x.Answered() && c == Refused { // its answer has begun: nobody is to take it for untouched, and send it again (RFC 9113 8.7)
			c = Closed
		}
		down.Abort(c)
	}
	x.svc.Done(x)
}

// RequestData is an event: body bytes arrived from down. It returns how many
// were taken; the rest is offered again after Resume. end: p is the last.
func (x *Exchange) RequestData(p []byte, end bool) int {
	if x.over {
		return len(p)
	}
	if x.holder != nil {
		n := x.hold(p, end)
		switch {
		case x.over:
			return len(p)
		case x.up == nil || n == len(p):
			return n
		}
		return n + x.RequestData(p[n:], end) // forwarded meanwhile
	}
	if x.up == nil || x.tunnel == tunnelAsked || x.fed < x.kept {
		if len(p) > 0 {
			x.req.stalled = true
		} else if end { // nothing to offer again: Forward, or feed, sees it
			x.req.from = reqDone
			if x.tap != nil {
				x.tap.TapData(nil, true)
			}
		}
		return 0
	}
	n := x.up.WriteData(p, end)
	x.ReqBytes += int64(n)
	x.went(p[:n])
	if x.tap != nil {
		x.tapped(p, n, end)
	}
	if n < len(p) {
		x.req.stalled = true
		return n
	}
	if end {
		x.req.from, x.req.sent = reqDone, true
		x.maybeDone()
	}
	return n
}

// RequestTrailers is an event: the request's body ended with trailers. It
// reports whether they were taken; if not they are offered again after Resume.
func (x *Exchange) RequestTrailers(f []httpmsg.Field) bool {
	if x.over {
		return true
	}
	switch {
	case x.holder != nil:
		x.tapTrailers(f)
		x.keepTrailers(f)
		x.req.from = reqTrailed
		x.told(HeldWhole)
		return true
	case x.up == nil || x.tunnel == tunnelAsked || x.fed < x.kept:
		x.req.stalled = true
		return false
	}
	x.tapTrailers(f)
	x.wentTrailers(f)
	x.req.from, x.req.sent = reqTrailed, true
	x.up.WriteTrailers(f)
	x.maybeDone()
	return true
}

// DownstreamClosed is an event: down ended before its request or response was
// complete. The stream behind down is gone already.
func (x *Exchange) DownstreamClosed(c Code) {
	x.down = nil
	x.finish(Client, c, false)
}

// ResponseHead is an event: a head arrived from up. end: it has no body.
func (x *Exchange) ResponseHead(h *httpmsg.Head, end bool) {
	if x.over || x.res.local { // what comes late is nobody's
		return
	}
	grant := x.tunnel == tunnelAsked && h.Status == 101
	if h.Status < 200 && !grant {
		if x.interims++; x.interims > maxInterim { // queued without bound for a client that does not read
			x.Cause = errInterims
			x.up.Abort(Protocol)
			x.UpstreamClosed(Protocol)
			return
		}
		if x.Req.Minor > 0 && h.Status != 101 {
			x.down.WriteHead(h, false)
		}
		return
	}
	x.Status = h.Status
	x.handled, x.res.state = false, resJudged
	if x.res.len = h.Length; end {
		x.res.len = 0
	}
	x.svc.Response(x, h)
	switch {
	case x.over || x.res.state != resJudged && x.res.state != resRetired: // the service has answered in place of this one, or sent the request again
		return
	case x.res.state == resRetired:
		x.res.state = resNone
		if !x.handled {
			x.unanswered()
		}
		return
	}
	x.res.state = resBegun
	x.begun()
	switch {
	case grant:
		x.tunnel = tunnelOpen
		x.down.WriteHead(h, false)
		x.open()
		return
	case x.tunnel == tunnelAsked:
		x.decline()
	}
	x.down.WriteHead(h, end)
	if end && !x.over {
		x.res.state = resDone
		x.maybeDone()
	}
}

// ResponseData is the counterpart of RequestData.
func (x *Exchange) ResponseData(p []byte, end bool) int {
	if x.over || x.res.local {
		return len(p)
	}
	n := x.down.WriteData(p, end && x.AbortTrailers == nil)
	x.ResBytes += int64(n)
	if n < len(p) {
		x.res.stalled = true
		return n
	}
	if end && x.AbortTrailers != nil {
		x.ResponseTrailers(x.AbortTrailers)
	} else if end {
		x.res.state = resDone
		x.maybeDone()
	}
	return n
}

// ResponseTrailers ends the response with trailers.
func (x *Exchange) ResponseTrailers(f []httpmsg.Field) {
	if x.over || x.res.local {
		return
	}
	x.res.state = resDone
	x.down.WriteTrailers(f)
	x.maybeDone()
}

// maybeDone: once the response is whole nothing more is wanted of the request,
// unless the two are the directions of a tunnel.
func (x *Exchange) maybeDone() {
	if x.res.state == resDone && (x.tunnel != tunnelOpen || x.req.sent) {
		x.finish(Nobody, NoError, x.req.from == reqOpen)
	}
}

// UpstreamClosed is an event: up ended before its response was complete. The
// stream behind up is gone already. fresh says nothing of the request can have
// been processed.
func (x *Exchange) UpstreamClosed(c Code) {
	if x.over || x.res.local {
		return
	}
	x.req.reached = x.up != nil
	x.up = nil
	if x.Answered() {
		x.broken(Server, c)
		return
	}
	x.handled = false
	x.Code = c
	told := false
	defer func() {
		if !told { // the service panicked: nobody else ends what the client waits for
			x.finish(Proxy, Internal, true)
		}
	}()
	x.svc.Failed(x, c)
	told = true
	if !x.handled && !x.over {
		x.unanswered()
	}
}

// unanswered answers where the service did not say what is to become of the request.
func (x *Exchange) unanswered() {
	var h httpmsg.Head
	h.Status = 503
	x.Reply(&h, nil)
}

// broken ends a response that the upstream will not end, or shall not.
func (x *Exchange) broken(who Side, c Code) {
	if x.AbortTrailers == nil || !x.Answered() || x.res.local {
		x.finish(who, c, true)
		return
	}
	x.down.WriteTrailers(x.AbortTrailers)
	if x.req.from == reqOpen {
		x.down.Abort(NoError) // the response is whole: nothing more is wanted of the request
	}
	x.finish(who, c, false)
}

// DownstreamWritable is an event: down has room again after it took less than offered.
func (x *Exchange) DownstreamWritable() {
	if !x.over && len(x.rest) > 0 {
		n := x.down.WriteData(x.rest, true)
		x.ResBytes += int64(n)
		if x.rest = x.rest[n:]; len(x.rest) == 0 {
			x.res.state = resDone
			x.maybeDone()
		}
		return
	}
	if !x.over && x.res.stalled && x.up != nil {
		x.res.stalled = false
		x.up.Resume()
	}
}

// UpstreamWritable is the counterpart for up.
func (x *Exchange) UpstreamWritable() {
	if x.over || x.up == nil || x.unfed() && !x.feed() {
		return
	}
	if x.req.stalled {
		x.req.stalled = false
		x.down.Resume()
	}
}
