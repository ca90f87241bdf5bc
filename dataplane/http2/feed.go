package http2

import (
	"encoding/binary"
	"errors"
	"strconv"

	"aether/dataplane/hpack"
	"aether/dataplane/httpmsg"
)

const clientPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" // RFC 9113 3.4

// Frame types (RFC 9113 6).
const (
	frameData         = 0x0
	frameHeaders      = 0x1
	framePriority     = 0x2
	frameRSTStream    = 0x3
	frameSettings     = 0x4
	framePushPromise  = 0x5
	framePing         = 0x6
	frameGoAway       = 0x7
	frameWindowUpdate = 0x8
	frameContinuation = 0x9
)

// Flags.
const (
	flagAck        = 0x1
	flagEndStream  = 0x1
	flagEndHeaders = 0x4
	flagPadded     = 0x8
	flagPriority   = 0x20
)

// Settings (RFC 9113 6.5.2, RFC 8441 3).
const (
	settingTableSize     = 0x1
	settingEnablePush    = 0x2
	settingMaxStreams    = 0x3
	settingInitialWindow = 0x4
	settingMaxFrame      = 0x5
	settingMaxHeaderList = 0x6
	settingEnableConnect = 0x8
)

func appendFrame(dst []byte, length int, typ, flags byte, id uint32) []byte {
	return append(dst, byte(length>>16), byte(length>>8), byte(length), typ, flags,
		byte(id>>24), byte(id>>16), byte(id>>8), byte(id))
}

func putLength(hd []byte, n int) { hd[0], hd[1], hd[2] = byte(n>>16), byte(n>>8), byte(n) }

func appendUint32(dst []byte, v uint32) []byte { return binary.BigEndian.AppendUint32(dst, v) }

func appendSetting(dst []byte, id uint16, v uint32) []byte {
	return appendUint32(binary.BigEndian.AppendUint16(dst, id), v)
}

func appendReset(dst []byte, id uint32, code Code) []byte {
	return appendUint32(appendFrame(dst, 4, frameRSTStream, 0, id), uint32(code))
}

// Feed takes received bytes and raises their events. It returns how many it
// used: the caller keeps the rest and gives it again with more behind it. DATA
// is passed on as it arrives, any other frame once it is whole, so that a
// buffer of 9+16384 bytes always lets Feed go on. b is not kept and not written to.
//
// An error is a *ConnError: every stream has had OnReset with its code, and
// GOAWAY is in Out. A driver that has given commands and has no input calls Feed
// without any before it waits: heads that the peer does not read end the connection too.
func (c *Conn) Feed(b []byte) (n int, err error) {
	if c.overfull {
		c.fail(EnhanceYourCalm, "too many heads queued for a peer that does not read them")
	}
	c.paused = false
	for c.err == nil && !c.paused {
		p := b[n:]
		if c.preface > 0 {
			m := min(len(p), c.preface)
			if string(p[:m]) != clientPreface[len(clientPreface)-c.preface:][:m] {
				c.fail(ProtocolError, "the connection does not begin with the HTTP/2 preface (3.4)")
				break
			}
			n += m
			if c.preface -= m; c.preface > 0 {
				break
			}
			continue
		}
		if c.dataLeft+c.padLeft > 0 {
			if len(p) == 0 {
				break
			}
			n += c.data(p)
			continue
		}
		if len(p) < frameHeader {
			break
		}
		length := int(p[0])<<16 | int(p[1])<<8 | int(p[2])
		typ, flags, id := p[3], p[4], binary.BigEndian.Uint32(p[5:])&maxStreamID
		switch {
		case length > maxFrame:
			c.fail(FrameSizeError, "frame longer than 16384 bytes (4.2)")
		case !c.gotSettings && (typ != frameSettings || flags&flagAck != 0):
			c.fail(ProtocolError, "the first frame is not SETTINGS (3.4)")
		case c.contID != 0 && (typ != frameContinuation || id != c.contID):
			c.fail(ProtocolError, "a header block is interrupted by another frame (6.10)")
		case typ == frameData:
			size := frameHeader
			if flags&flagPadded != 0 && length > 0 {
				size++
				if len(p) < size {
					return n, nil
				}
			}
			n += size
			c.beginData(flags, id, length, p[:size])
		case len(p) < frameHeader+length:
			return n, nil
		default:
			n += frameHeader + length
			c.frame(typ, flags, id, p[frameHeader:frameHeader+length])
		}
	}
	if c.err != nil {
		return len(b), c.err
	}
	return n, nil
}

// frame handles a whole frame that is not DATA.
func (c *Conn) frame(typ, flags byte, id uint32, p []byte) {
	switch typ {
	case frameHeaders:
		c.headers(flags, id, p)
	case framePriority: // deprecated, RFC 9113 5.3.2
		switch {
		case id == 0:
			c.fail(ProtocolError, "PRIORITY on stream 0 (6.3)")
		case len(p) != 5:
			c.fail(FrameSizeError, "PRIORITY is not 5 bytes (6.3)")
		default:
			c.wasted(1)
		}
	case frameRSTStream:
		c.rstStream(id, p)
	case frameSettings:
		c.peerSettings(flags, id, p)
	case framePushPromise:
		c.fail(ProtocolError, "PUSH_PROMISE, which is disabled (6.6)")
	case framePing:
		switch {
		case id != 0:
			c.fail(ProtocolError, "PING on a stream (6.7)")
		case len(p) != 8:
			c.fail(FrameSizeError, "PING is not 8 bytes (6.7)")
		case flags&flagAck == 0:
			c.out = append(appendFrame(c.out, 8, framePing, flagAck, 0), p...)
			c.answered()
			c.wasted(1)
		case c.pongs < c.pings && binary.BigEndian.Uint64(p) == c.pongs+1:
			c.pongs++
		default: // an answer to nothing
			c.wasted(1)
		}
	case frameGoAway:
		c.peerGoesAway(id, p)
	case frameWindowUpdate:
		c.windowUpdate(id, p)
	case frameContinuation:
		c.continuation(flags, p)
	default: // ignored (5.5)
		c.wasted(1)
	}
}

// answered counts a frame queued because of one of the peer's: a peer that
// makes us queue and does not read is not let go on (RFC 9113 10.5).
func (c *Conn) answered() {
	c.acks[1]++
	if c.acks[0]+c.acks[1] > maxAcks {
		c.fail(EnhanceYourCalm, "too many frames that need an answer, while answers are not read")
	}
}

// useful says that a request moved forward.
func (c *Conn) useful() { c.useless = max(-maxBanked, c.useless-usefulWorth) }

// wasted counts work, in frames, that moved no request forward (RFC 9113 10.5).
func (c *Conn) wasted(n int) {
	if c.useless += n; c.useless > maxUseless {
		c.fail(EnhanceYourCalm, "too many frames that move no request forward")
	}
}

// stream returns the open stream that the peer can know by id, or nil.
func (c *Conn) stream(id uint32) *Stream {
	s := c.table.get(id)
	if s != nil && !c.cfg.Server && s.send == halfIdle {
		return nil
	}
	return s
}

// idle reports whether id was never used (RFC 9113 5.1): hardly any frame may name it.
func (c *Conn) idle(id uint32) bool {
	return id&1 == 0 || id > max(c.lastPeer, c.lastSent)
}

// streamError resets a stream on which the peer broke the protocol (5.4.2).
func (c *Conn) streamError(s *Stream, why *StreamError) {
	c.out = appendReset(c.out, s.id, why.Code)
	c.drop(s, true)
	c.faulty, c.fault = s, why
	c.h.OnReset(s, why.Code)
	c.faulty, c.fault = nil, nil
	c.provoke()
}

// provoke counts a stream that the peer made us reset: streams that end so are
// not held back by MAX_CONCURRENT_STREAMS (CVE-2025-8671).
func (c *Conn) provoke() {
	c.stats.Malformed++
	if c.provoked++; c.provoked > maxProvoked {
		c.fail(EnhanceYourCalm, "too many protocol errors on streams")
	}
	c.answered()
}

// beginData handles the header of a DATA frame, with its pad length if it has one.
func (c *Conn) beginData(flags byte, id uint32, length int, hd []byte) {
	pad, over := 0, 0
	if flags&flagPadded != 0 {
		if length == 0 {
			c.fail(FrameSizeError, "padded DATA without a pad length (6.1)")
			return
		}
		pad, over = int(hd[frameHeader]), int(hd[frameHeader])+1
	}
	data, end := length-over, flags&flagEndStream != 0
	switch {
	case id == 0 || c.idle(id):
		c.fail(ProtocolError, "DATA on stream 0 or an idle stream (6.1)")
		return
	case data < 0:
		c.fail(ProtocolError, "padding longer than its frame (6.1)")
		return
	case int64(length) > c.recvWin:
		c.fail(FlowControlError, "DATA beyond the connection's window (6.9)")
		return
	}
	s := c.stream(id)
	switch {
	case data == 0 && (!end || s == nil):
		if c.wasted(1); c.err != nil {
			return
		}
	case s != nil && (end || data >= smallData):
		c.useful()
	}
	c.recvWin -= int64(length)
	code, reason := NoError, ""
	switch {
	case s == nil && c.closed.get(id) == endedWell || s != nil && s.recv == halfClosed:
		code, reason = StreamClosed, afterEnd
	case s == nil:
	case s.recv == halfIdle:
		code, reason = ProtocolError, beforeHead
	case int64(length) > s.recvWin:
		code, reason = FlowControlError, overWindow
	case s.left >= 0 && int64(data) > s.left:
		code, reason = ProtocolError, longBody
	case s.left >= 0 && end && int64(data) != s.left:
		code, reason = ProtocolError, shortBody
	}
	if s == nil || code != NoError {
		c.dataID, c.dataLeft, c.padLeft = 0, 0, data+pad // skip, but it counts
		c.giveBack(length)
		switch {
		case code == NoError:
		case s != nil:
			c.streamError(s, &StreamError{Code: code, Reason: reason})
		default:
			c.out = appendReset(c.out, id, code)
			c.closed.add(id, true)
			c.provoke()
		}
		return
	}
	if s.left >= 0 {
		s.left -= int64(data)
	}
	s.recvWin -= int64(length)
	if over > 0 {
		c.giveBack(over)
		s.giveBack(over)
	}
	c.dataID, c.dataLeft, c.padLeft, c.dataEnd = id, data, pad, end
	if data == 0 && end {
		c.received(s, nil, true)
	}
}

// data takes more of a DATA frame and returns how much it took.
func (c *Conn) data(p []byte) int {
	if c.dataLeft == 0 {
		n := min(len(p), c.padLeft)
		c.padLeft -= n
		return n
	}
	n := min(len(p), c.dataLeft)
	c.dataLeft -= n
	if s := c.stream(c.dataID); s != nil {
		s.held += n
		c.received(s, p[:n], c.dataEnd && c.dataLeft == 0)
	} else { // reset since the frame began
		c.giveBack(n)
	}
	return n
}

func (c *Conn) received(s *Stream, p []byte, end bool) {
	if end {
		c.endReceive(s)
	}
	c.h.OnData(s, p, end)
}

func (c *Conn) endReceive(s *Stream) {
	s.recv = halfClosed
	if s.send == halfClosed {
		c.finish(s)
	}
}

func (c *Conn) headers(flags byte, id uint32, p []byte) {
	if id == 0 {
		c.fail(ProtocolError, "HEADERS on stream 0 (6.2)")
		return
	}
	pad := 0
	if flags&flagPadded != 0 {
		if len(p) == 0 {
			c.fail(FrameSizeError, "padded HEADERS without a pad length (6.2)")
			return
		}
		pad, p = int(p[0]), p[1:]
	}
	if flags&flagPriority != 0 {
		if len(p) < 5 {
			c.fail(FrameSizeError, "HEADERS too short for its priority (6.2)")
			return
		}
		p = p[5:]
	}
	if pad > len(p) {
		c.fail(ProtocolError, "padding longer than its frame (6.2)")
		return
	}
	p = p[:len(p)-pad]
	end := flags&flagEndStream != 0
	if flags&flagEndHeaders != 0 {
		c.block(id, p, end)
		return
	}
	c.contID, c.contEnd, c.contN = id, end, 0
	c.cont = append(c.cont[:0], p...)
}

func (c *Conn) continuation(flags byte, p []byte) {
	if c.contID == 0 {
		c.fail(ProtocolError, "CONTINUATION without HEADERS before it (6.10)")
		return
	}
	if c.contN++; c.contN > maxContinuations || len(c.cont)+len(p) > 2*c.cfg.MaxHeader+maxFrame {
		c.fail(EnhanceYourCalm, "header block too long")
		return
	}
	c.cont = append(c.cont, p...)
	if flags&flagEndHeaders != 0 {
		id := c.contID
		c.contID = 0
		c.block(id, c.cont, c.contEnd)
	}
}

// block handles a whole header block. Whatever becomes of its stream, it has
// to be decoded (RFC 9113 4.3).
func (c *Conn) block(id uint32, p []byte, end bool) {
	fields, err := c.dec.Decode(p, c.fields[:0])
	tooLarge := errors.Is(err, hpack.ErrTooLarge)
	switch {
	case errors.Is(err, hpack.ErrBomb):
		c.fail(EnhanceYourCalm, err.Error())
		return
	case err != nil && !tooLarge:
		c.fail(CompressionError, err.Error())
		return
	}
	c.fields = fields
	s := c.stream(id)
	switch {
	case s != nil && s.recv == halfClosed:
		c.streamError(s, &StreamError{Code: StreamClosed, Reason: afterEnd})
	case s != nil && s.recv != halfIdle:
		c.trailers(s, tooLarge, end)
	case s != nil:
		c.response(s, tooLarge, end)
	case !c.cfg.Server:
		if c.idle(id) {
			c.fail(ProtocolError, "HEADERS on an idle stream (5.1)")
		} else { // under way when we reset the stream
			c.wasted(1)
		}
	case id&1 == 0:
		c.fail(ProtocolError, "a client's stream has an even identifier (5.1.1)")
	case id > c.lastPeer:
		c.lastPeer = id
		c.request(id, tooLarge, end)
	default:
		switch how := c.closed.get(id); {
		case how == endedWell:
			c.fail(StreamClosed, "HEADERS on a stream that the client had ended (5.1)")
		case how == unknown && !c.closed.forgot:
			c.fail(ProtocolError, "a stream identifier is smaller than one before it (5.1.1)")
		default: // under way when we reset the stream
			c.wasted(1)
		}
	}
}

// request handles the head of a new request.
func (c *Conn) request(id uint32, tooLarge, end bool) {
	var why *StreamError
	switch {
	case c.goingAway || c.open >= int(c.cfg.MaxStreams):
		c.stats.Refused++
		c.out = appendReset(c.out, id, RefusedStream)
		c.closed.add(id, true)
		c.answered()
		if c.acked { // else it may not know of the limit yet
			c.wasted(1)
		}
		return
	case !tooLarge:
		left, bad := c.requestHead(end)
		if bad != nil {
			c.out = appendReset(c.out, id, bad.Code)
			c.closed.add(id, true)
			c.h.OnRefused(400, bad)
			c.provoke()
			return
		}
		if len(c.head.Fields) > c.cfg.MaxFields {
			why = tooMany(manyFields, c.cfg.MaxFields, "")
			break
		}
		c.useful()
		s := c.newStream(id)
		s.left, s.recv, s.req = left, halfOpen, kindOf(c.head.Method)
		if end {
			s.recv = halfClosed
		}
		c.h.OnHead(s, &c.head, end)
		return
	}
	// 431 (RFC 6585 5): the Handler never sees the request.
	if why == nil {
		why = tooMany(largeHead, c.cfg.MaxHeader, " bytes")
	}
	c.stats.TooLarge++
	grpc := tooLarge && c.dec.Marked(markGRPC)
	if !tooLarge {
		for i := range c.fields {
			grpc = grpc || c.fields[i].Mark == markGRPC
		}
	}
	o := c.beginHead(id)
	if grpc { // trailers only, as gRPC clients understand it
		c.out = appendStatus(c.out, c.enc, 200)
		c.out = c.enc.Field(c.out, nameType, typeGRPC)
		c.out = c.enc.Field(c.out, nameGRPCStatus, strconv.AppendInt(nil, int64(httpmsg.GRPCStatus(431)), 10))
		c.out = c.enc.Field(c.out, nameGRPCMessage, textTooLarge)
	} else {
		c.out = appendStatus(c.out, c.enc, 431)
	}
	if c.cfg.Date != nil {
		c.out = c.enc.Field(c.out, nameDate, c.cfg.Date())
	}
	c.out = c.enc.Field(c.out, nameLength, zero)
	c.endHead(o, true)
	if !end {
		c.out = appendReset(c.out, id, NoError)
	}
	c.closed.add(id, true)
	c.h.OnRefused(431, why)
	c.answered()
}

// response handles a response head, interim or final.
func (c *Conn) response(s *Stream, tooLarge, end bool) {
	if tooLarge {
		c.stats.TooLarge++
		c.streamError(s, tooMany(largeHead, c.cfg.MaxHeader, " bytes"))
		return
	}
	left, bad := c.responseHead(s, end)
	if bad == nil && len(c.head.Fields) > c.cfg.MaxFields {
		c.stats.TooLarge++
		bad = tooMany(manyFields, c.cfg.MaxFields, "")
	}
	if bad != nil {
		c.streamError(s, bad)
		return
	}
	if c.head.Status < 200 {
		if s.interim++; s.interim > maxInterim {
			why := tooMany(manyInterim, maxInterim, "")
			why.Code = EnhanceYourCalm
			c.streamError(s, why)
			return
		}
	} else {
		s.recv, s.left = halfOpen, left
		if s.req == methodConnect && c.head.Status >= 300 {
			s.req = connectDeclined
		}
	}
	c.useful()
	if end {
		c.endReceive(s)
	}
	c.h.OnHead(s, &c.head, end)
}

func (c *Conn) trailers(s *Stream, tooLarge, end bool) {
	most := c.cfg.MaxHeader
	if c.cfg.Server && !tooLarge {
		size := 0
		most = maxTrailers
		for i := range c.fields {
			size += len(c.fields[i].Name) + len(c.fields[i].Value) + fieldCost
		}
		tooLarge = size > maxTrailers
	}
	var bad *StreamError
	switch {
	case tooLarge:
		c.stats.TooLarge++
		bad = tooMany(largeTrailers, most, " bytes")
	case !end:
		bad = malformed(openTrailers, nil)
	case s.left > 0:
		bad = malformed(shortBody, nil)
	case s.tunnel():
		bad = malformed(tunnelTrailers, nil)
	default:
		if bad = c.trailerFields(); bad == nil && len(c.head.Fields) > c.cfg.MaxFields {
			c.stats.TooLarge++
			bad = tooMany(manyFields, c.cfg.MaxFields, "")
		}
	}
	if bad != nil {
		c.streamError(s, bad)
		return
	}
	c.endReceive(s)
	c.h.OnTrailers(s, c.head.Fields)
}

func (c *Conn) rstStream(id uint32, p []byte) {
	switch {
	case id == 0 || c.idle(id):
		c.fail(ProtocolError, "RST_STREAM on stream 0 or an idle stream (6.4)")
		return
	case len(p) != 4:
		c.fail(FrameSizeError, "RST_STREAM is not 4 bytes (6.4)")
		return
	}
	s := c.stream(id)
	if s == nil {
		c.wasted(1)
		return
	}
	c.stats.PeerResets++
	rapid := c.cfg.Server && s.send == halfIdle
	c.drop(s, false)
	c.h.OnReset(s, Code(binary.BigEndian.Uint32(p)))
	// A stream reset before it was answered has cost work and freed its place at
	// once (CVE-2023-44487).
	if rapid {
		if c.rapid++; c.rapid > c.mostRapid() {
			c.fail(EnhanceYourCalm, "too many streams reset before their answer")
		}
	} else {
		c.rapid = max(0, c.rapid-1)
	}
}

func (c *Conn) peerSettings(flags byte, id uint32, p []byte) {
	switch {
	case id != 0:
		c.fail(ProtocolError, "SETTINGS on a stream (6.5)")
		return
	case len(p)%6 != 0 || flags&flagAck != 0 && len(p) != 0:
		c.fail(FrameSizeError, "SETTINGS of a wrong length (6.5)")
		return
	case flags&flagAck != 0:
		c.settingsAcked()
		return
	}
	if c.wasted(1 + len(p)/settingsWork); c.err != nil {
		return
	}
	if !c.gotSettings { // nothing said is no limit (6.5.2)
		c.gotSettings, c.peerMax = true, maxStreamID
	}
	window := c.peerInit
	for ; len(p) > 0; p = p[6:] {
		v := binary.BigEndian.Uint32(p[2:])
		switch binary.BigEndian.Uint16(p) {
		case settingTableSize:
			c.enc.SetMaxTable(v)
		case settingEnablePush:
			if v > 1 || v == 1 && !c.cfg.Server {
				c.fail(ProtocolError, "SETTINGS_ENABLE_PUSH is not 0, or not 0 or 1 (6.5.2)")
				return
			}
		case settingMaxStreams:
			c.peerMax = min(v, maxStreamID)
		case settingInitialWindow:
			if v > maxWindow {
				c.fail(FlowControlError, "SETTINGS_INITIAL_WINDOW_SIZE above 2^31-1 (6.5.2)")
				return
			}
			window = int64(v)
		case settingMaxFrame: // we never send more than the least allowed
			if v < maxFrame || v > 1<<24-1 {
				c.fail(ProtocolError, "SETTINGS_MAX_FRAME_SIZE out of range (6.5.2)")
				return
			}
		case settingEnableConnect:
			if v > 1 || v == 0 && c.peerConnect {
				c.fail(ProtocolError, "SETTINGS_ENABLE_CONNECT_PROTOCOL is not 0 or 1, or was withdrawn (RFC 8441 3)")
				return
			}
			c.peerConnect = v == 1 && !c.cfg.Server
		}
	}
	c.out = appendFrame(c.out, 0, frameSettings, flagAck, 0)
	if window != c.peerInit {
		if c.wasted(c.open / streamsWork); c.err != nil {
			return
		}
		c.moveWindows(window - c.peerInit)
		c.peerInit = window
	}
	c.answered()
	c.wake()
}

// moveWindows applies a change of the peer's SETTINGS_INITIAL_WINDOW_SIZE to
// the open streams (6.9.2).
func (c *Conn) moveWindows(delta int64) {
	for _, s := range c.inOrder() {
		if s.sendWin += delta; s.sendWin > maxWindow {
			c.fail(FlowControlError, "SETTINGS_INITIAL_WINDOW_SIZE overflows a stream's window (6.9.2)")
			return
		}
		if s.want && s.sendWin > 0 {
			c.list(s)
		}
	}
}

// settingsAcked: from here on the peer keeps to our SETTINGS.
func (c *Conn) settingsAcked() {
	if c.acked {
		c.fail(ProtocolError, "SETTINGS acknowledged twice (6.5.3)")
		return
	}
	c.acked = true
	if delta := int64(c.cfg.StreamWindow) - c.recvInit; delta != 0 {
		c.recvInit += delta
		for i := range c.table.slots {
			if s := c.table.slots[i].s; s != nil {
				s.recvWin += delta
			}
		}
	}
}

func (c *Conn) peerGoesAway(id uint32, p []byte) {
	switch {
	case id != 0:
		c.fail(ProtocolError, "GOAWAY on a stream (6.8)")
		return
	case len(p) < 8:
		c.fail(FrameSizeError, "GOAWAY shorter than 8 bytes (6.8)")
		return
	}
	last, code := binary.BigEndian.Uint32(p)&maxStreamID, Code(binary.BigEndian.Uint32(p[4:]))
	if c.peerGoAway {
		last = min(last, c.peerLast) // it must not rise (6.8)
	}
	c.peerGoAway, c.peerLast = true, last
	if c.wasted(1 + len(c.table.slots)/streamsWork); c.err != nil {
		return
	}
	c.h.OnGoAway(last, code)
	if !c.cfg.Server {
		c.doom(func(s *Stream) bool { return s.id > last || s.send == halfIdle }, RefusedStream)
	}
}

func (c *Conn) windowUpdate(id uint32, p []byte) {
	if len(p) != 4 {
		c.fail(FrameSizeError, "WINDOW_UPDATE is not 4 bytes (6.9)")
		return
	}
	if c.wasted(1); c.err != nil {
		return
	}
	n := int64(binary.BigEndian.Uint32(p) & maxWindow)
	if id == 0 {
		switch {
		case n == 0:
			c.fail(ProtocolError, "WINDOW_UPDATE of 0 (6.9)")
		case c.sendWin+n > maxWindow:
			c.fail(FlowControlError, "WINDOW_UPDATE overflows the connection's window (6.9.1)")
		default:
			c.sendWin += n
			c.wake()
		}
		return
	}
	if c.idle(id) {
		c.fail(ProtocolError, "WINDOW_UPDATE on an idle stream (5.1)")
		return
	}
	s := c.stream(id)
	switch {
	case s == nil: // over: it was under way
	case n == 0:
		c.streamError(s, malformed(zeroWindow, nil))
	case s.sendWin+n > maxWindow:
		c.streamError(s, &StreamError{Code: FlowControlError, Reason: wideWindow})
	default:
		s.sendWin += n
		if !s.want || s.sendWin <= 0 {
			return
		}
		c.list(s)
		c.wake()
	}
}
