package replay

import "aether/sniff"

// datagram adds a UDP datagram that end dir sent.
func (c *conn) datagram(frame, dir int, s *segment) {
	me, peer := &c.half[dir], &c.half[1-dir]
	if me.firstFrame == 0 {
		me.firstFrame = frame
		if peer.firstFrame == 0 {
			c.client = dir // unless the ClientHello turns out to be the other's
		}
	}
	me.wire.add(me.top, me.top+int64(s.wire), true, nil)
	me.top += int64(s.wire)
	if c.told {
		return
	}
	me.segments++
	me.bytes += len(s.payload)
	if c.quic == nil {
		c.quic = new(sniff.QUICState)
	}
	r := c.quic.Datagram(s.payload)
	if r.Version != 0 && !c.shown {
		c.shown, c.client = true, dir // only a client's packet is authenticated
	}
	if !r.More {
		h := &c.half[c.client]
		h.answer, c.partial = quicAnswer(r)
		h.answered = r.Proto == sniff.QUIC
		c.told, c.quic = true, nil
	}
}

// quicAnswer takes a final answer. partial: it is QUIC, and what would tell more is not there.
func quicAnswer(r sniff.QUICResult) (a answer, partial bool) {
	const ofKnown = sniff.QUICInitial | sniff.QUICZeroRTT | sniff.QUICHandshake | sniff.QUICRetry | sniff.QUICVersionNegotiation
	if r.Proto != sniff.QUIC && r.Packets&ofKnown != 0 {
		return answer{}, true
	}
	a = answerOf(r.Proto, &r.Hello)
	a.Version = r.Version
	return a, false
}
