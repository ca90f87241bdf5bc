package http2

import (
	"strconv"

	"aether/dataplane/hpack"
	"aether/dataplane/httpmsg"
)

// Stream is one request and its response. Its methods do nothing once the
// stream is over (both sides ended, or reset), except that Credit still gives
// back what was received before.
type Stream struct {
	User any // the driver's; nil for a new stream

	c          *Conn
	next, prev *Stream // in Conn.starved, or among those about to get OnReset
	id         uint32
	sendWin    int64 // what the peer lets us send; negative after a smaller SETTINGS
	recvWin    int64 // what we let the peer send
	held       int   // received and not credited yet
	kept       int   // received, credited to the connection and not to the stream yet
	credit     int   // credited, no WINDOW_UPDATE sent yet
	left       int64 // bytes the received content-length still promises; -1: none did
	interim    uint8 // 1xx heads received

	send, recv half // together RFC 9113's state of the stream
	req        requestKind
	life       life
	want       bool // WriteData took less than it was given
	listed     bool // in Conn.starved
}

// half is one direction of a stream. The states of RFC 9113 5.1 are those of its two halves; none is reserved, for nothing
// is pushed:
//
//	idle                  both are halfIdle
//	open                  neither is halfClosed
//	half-closed (local)   send is halfClosed
//	half-closed (remote)  recv is halfClosed
//	closed                both are, or life is not alive
//
//	┌──────────┐ HEADERS ┌──────────┐ END_STREAM ┌────────────┐
//	│ halfIdle ├────────►│ halfOpen ├───────────►│ halfClosed │
//	└──────────┘         └──────────┘            └────────────┘
//	  1xx: no change                   RST_STREAM ends both: life
type half uint8

const (
	halfIdle   half = iota // its final head is to come
	halfOpen               // its final head has come or gone
	halfClosed             // its end, too
)

// requestKind is what of a request's method decides what its answer may be.
type requestKind uint8

const (
	otherMethod     requestKind = iota
	methodHead                  // HEAD: its answer has no body
	methodConnect               // CONNECT: a tunnel, unless it is declined
	connectDeclined             // client: its answer was 300 or more
)

// life is where a stream is between its first frame and its last event.
type life uint8

const (
	alive  life = iota
	over        // both sides have ended, or it was reset
	doomed      // over, and OnReset is due
)

// ID is the stream identifier; that of a client's stream is final once
// WriteHead has been called.
func (s *Stream) ID() uint32 { return s.id }

// Err is, during OnReset, what the peer did wrong on the stream or on its connection: a *StreamError or a
// *ConnError. nil: nothing of which we know; the peer reset the stream, or the driver ended the connection.
func (s *Stream) Err() error {
	if s.c.faulty == s {
		return s.c.fault
	}
	if e := s.c.err; e != nil && e.Reason != aborted {
		return e
	}
	return nil
}

// Window returns how many bytes WriteData would take now.
func (s *Stream) Window() int {
	if s.life != alive || s.send != halfOpen {
		return 0
	}
	return int(max(0, min(s.sendWin, s.c.room())))
}

// WriteHead queues a request (client), or a response or interim 1xx head
// (server); end: no body and no trailers follow (not with 1xx). Connection-specific
// fields are left out (RFC 9113 8.2.2), whatever h says; an empty Scheme is
// "http", an empty Path "/" (no path for a plain CONNECT). A client's CONNECT
// with Upgrade is an extended one, which needs PeerAllowsConnect. A second
// final head is ignored. Heads and trailers do not wait for windows or the bound on queued
// output, but a server's of which the client lets 8 MiB wait end the connection: this
// one is dropped, and the next Feed says so. A response whose Status is not
// 100-999 resets the stream with InternalError.
func (s *Stream) WriteHead(h *httpmsg.Head, end bool) {
	c := s.c
	if s.life != alive || s.send != halfIdle || c.err != nil {
		return
	}
	interim := false
	if c.cfg.Server {
		if h.Status < 100 || h.Status > 999 {
			s.Reset(InternalError)
			return
		}
		interim = h.Status < 200
		end = end && !interim
		if c.full() {
			return
		}
	} else if s.id < c.lastSent { // a stream opened later went first
		if c.nextID > maxStreamID {
			c.drop(s, true)
			c.h.OnReset(s, RefusedStream)
			return
		}
		c.table.del(s.id)
		s.id = c.nextID
		c.nextID += 2
		c.table.put(s)
	}
	o := c.beginHead(s.id)
	if c.cfg.Server {
		c.out = appendStatus(c.out, c.enc, h.Status)
	} else {
		c.lastSent = s.id
		c.out = appendRequest(c.out, c.enc, h)
		s.req = kindOf(h.Method)
	}
	c.out = appendFields(c.out, c.enc, h.Fields)
	c.endHead(o, end)
	if !interim {
		s.send = halfOpen
	}
	if end {
		s.endSend()
	}
}

// WriteData queues as much of p as the flow-control windows and the bound on
// queued output (256 KiB a connection) allow and returns how much that was. If
// it is less than len(p), OnWritable follows when there is room. end, the end
// of the stream, takes effect only when all of p was taken. It needs WriteHead first.
func (s *Stream) WriteData(p []byte, end bool) (n int) {
	c := s.c
	if s.life != alive || s.send != halfOpen || c.err != nil {
		return 0
	}
	n = int(max(0, min(int64(len(p)), s.sendWin, c.room())))
	if n < len(p) {
		end = false
		s.want = true
		if s.sendWin > int64(n) { // the connection is what it waits for
			c.list(s)
		}
	}
	s.sendWin -= int64(n)
	c.sendWin -= int64(n)
	for q := p[:n]; len(q) > 0 || end; {
		m := min(len(q), maxFrame)
		flags := byte(0)
		if end && m == len(q) {
			flags = flagEndStream
		}
		c.out = append(appendFrame(c.out, m, frameData, flags, s.id), q[:m]...)
		if n == len(p) || m >= smallWrite { // else a window lets crumbs through
			c.useful()
		}
		if q = q[m:]; flags != 0 {
			s.endSend()
			break
		}
	}
	return n
}

// WriteTrailers queues trailers, which end the send side. They need WriteHead first.
func (s *Stream) WriteTrailers(f []httpmsg.Field) {
	c := s.c
	if s.life != alive || s.send != halfOpen || c.err != nil || c.full() {
		return
	}
	o := c.beginHead(s.id)
	block := len(c.out)
	c.out = appendFields(c.out, c.enc, f)
	if len(c.out) == block && block == o+frameHeader { // nothing to say
		c.out = appendFrame(c.out[:o], 0, frameData, flagEndStream, s.id)
	} else {
		c.endHead(o, true)
	}
	s.endSend()
}

func (s *Stream) endSend() {
	s.send = halfClosed
	s.c.unlist(s)
	s.want = false
	if s.recv == halfClosed {
		s.c.finish(s)
	}
}

// Reset ends the stream with RST_STREAM; no event of it follows. A server that
// has answered a request whose body is still coming uses NoError (RFC 9113 8.1).
func (s *Stream) Reset(code Code) {
	c := s.c
	if s.life == doomed {
		s.life = over
	}
	if s.life != alive || c.err != nil {
		return
	}
	if c.cfg.Server || s.send != halfIdle { // else the peer has not heard of it
		c.out = appendReset(c.out, s.id, code)
		c.useful() // frames of it are under way, through no fault of the peer's
	}
	if !c.cfg.Server && s.send != halfIdle && s.recv == halfIdle {
		c.rapid++
	}
	c.drop(s, true)
}

// Credit says that n more bytes given to OnData are consumed, so that the peer
// may send as many. WINDOW_UPDATEs go out when half a window has come together.
// More than was received counts as what was received.
func (s *Stream) Credit(n int) {
	n = min(n, s.kept+s.held)
	if n <= 0 {
		return
	}
	k := min(n, s.kept) // what was kept came first
	s.kept -= k
	s.held -= n - k
	s.c.giveBack(n - k)
	if s.life == alive {
		s.giveBack(n)
	}
}

// Keep says that the driver keeps n of the bytes given to OnData until they can be
// consumed: the connection's window reopens, for the other streams, and the
// stream's own waits for Credit, which bounds what is kept.
func (s *Stream) Keep(n int) {
	if n = min(n, s.held); n > 0 {
		s.held -= n
		s.kept += n
		s.c.giveBack(n)
	}
}

// giveBack reopens the stream's window by n bytes.
func (s *Stream) giveBack(n int) {
	s.credit += n
	if s.recv == halfClosed || s.c.err != nil || 2*s.credit < s.c.cfg.StreamWindow {
		return
	}
	s.recvWin += int64(s.credit)
	s.c.out = appendUint32(appendFrame(s.c.out, 4, frameWindowUpdate, 0, s.id), uint32(s.credit))
	s.credit = 0
}

// tunnel reports whether the peer's side is a tunnel's, which has DATA and no trailers
// (RFC 9113 8.5): that of a CONNECT, and of the answer that grants it.
func (s *Stream) tunnel() bool { return s.req == methodConnect }

func kindOf(method []byte) requestKind {
	switch string(method) {
	case "HEAD":
		return methodHead
	case "CONNECT":
		return methodConnect
	}
	return otherMethod
}

// full reports whether heads and trailers have no place any more.
func (c *Conn) full() bool {
	c.overfull = c.overfull || c.cfg.Server && len(c.out)-c.off > maxHeads
	return c.overfull
}

// beginHead starts a HEADERS frame of unknown length and returns where.
func (c *Conn) beginHead(id uint32) int {
	o := len(c.out)
	c.out = c.enc.Begin(appendFrame(c.out, 0, frameHeaders, flagEndHeaders, id))
	return o
}

// endHead completes the HEADERS frame begun at o, and cuts it into
// CONTINUATION frames when it is too long for one.
func (c *Conn) endHead(o int, end bool) {
	n := len(c.out) - o - frameHeader
	id := c.out[o+5 : o+9]
	if end {
		c.out[o+4] |= flagEndStream
	}
	if n <= maxFrame {
		putLength(c.out[o:], n)
		return
	}
	more := (n - 1) / maxFrame // CONTINUATION frames
	for range more {
		c.out = append(c.out, "123456789"...) // room for their headers
	}
	for i := more; i > 0; i-- { // from the back, so that nothing is overwritten
		from := o + frameHeader + i*maxFrame
		size := min(maxFrame, n-i*maxFrame)
		to := from + i*frameHeader
		copy(c.out[to:], c.out[from:from+size])
		hd := c.out[to-frameHeader : to]
		putLength(hd, size)
		hd[3], hd[4] = frameContinuation, 0
		copy(hd[5:], id)
		if i == more {
			hd[4] = flagEndHeaders
		}
	}
	putLength(c.out[o:], maxFrame)
	c.out[o+4] &^= flagEndHeaders
}

func appendRequest(dst []byte, e *hpack.Encoder, h *httpmsg.Head) []byte {
	switch string(h.Method) {
	case "GET":
		dst = hpack.AppendIndexed(dst, hpack.MethodGET)
	case "POST":
		dst = hpack.AppendIndexed(dst, hpack.MethodPOST)
	default:
		dst = e.Named(dst, hpack.MethodGET, h.Method)
	}
	connect := string(h.Method) == "CONNECT"
	if !connect || h.Upgrade != nil {
		switch string(h.Scheme) {
		case "", "http":
			dst = hpack.AppendIndexed(dst, hpack.SchemeHTTP)
		case "https":
			dst = hpack.AppendIndexed(dst, hpack.SchemeHTTPS)
		default:
			dst = e.Named(dst, hpack.SchemeHTTP, h.Scheme)
		}
	}
	if len(h.Authority) > 0 {
		dst = e.Named(dst, hpack.Authority, h.Authority)
	}
	if !connect || h.Upgrade != nil {
		if len(h.Path) == 0 || len(h.Path) == 1 && h.Path[0] == '/' {
			dst = hpack.AppendIndexed(dst, hpack.PathRoot)
		} else {
			dst = e.Named(dst, hpack.PathRoot, h.Path)
		}
	}
	if connect && h.Upgrade != nil {
		dst = e.Field(dst, nameProtocol, h.Upgrade)
	}
	return dst
}

var nameProtocol = []byte(":protocol")

func appendStatus(dst []byte, e *hpack.Encoder, status int) []byte {
	i := 0
	switch status {
	case 200:
		i = hpack.Status200
	case 204:
		i = hpack.Status204
	case 206:
		i = hpack.Status206
	case 304:
		i = hpack.Status304
	case 400:
		i = hpack.Status400
	case 404:
		i = hpack.Status404
	case 500:
		i = hpack.Status500
	default:
		var b [4]byte
		return e.Named(dst, hpack.Status200, strconv.AppendInt(b[:0], int64(status), 10))
	}
	return hpack.AppendIndexed(dst, i)
}

func appendFields(dst []byte, e *hpack.Encoder, f []httpmsg.Field) []byte {
	for i := range f {
		if n := f[i].Name; len(n) == 0 || n[0] == ':' || hopByHop(n, f[i].Value) {
			continue
		}
		dst = e.Field(dst, f[i].Name, f[i].Value)
	}
	return dst
}

// hopByHop reports whether a field has no place in HTTP/2 (RFC 9113 8.2.2);
// host neither, since :authority stands for it.
func hopByHop(name, value []byte) bool {
	switch len(name) {
	case 2:
		return string(name) == "te" && string(value) != "trailers"
	case 4:
		return string(name) == "host"
	case 7:
		return string(name) == "upgrade"
	case 10:
		return string(name) == "connection" || string(name) == "keep-alive"
	case 16:
		return string(name) == "proxy-connection"
	case 17:
		return string(name) == "transfer-encoding"
	}
	return false
}
