package engine

import (
	"aether/dataplane/exchange"
	"aether/dataplane/http2"
	"aether/dataplane/httpmsg"
)

// OnHead is http2.Handler.
func (c *h2conn) OnHead(s *http2.Stream, h *httpmsg.Head, end bool) {
	if c.sh.addWork(); c.sh.readSpent() {
		c.h2.Pause() // a buffer may hold a thousand of them
	}
	if c.client {
		st, _ := s.User.(*h2stream)
		if st == nil || st.dead {
			return
		}
		st.remote = end
		x := st.x
		if st.wantsTunnel {
			st.connectAnswer(h, end)
		}
		x.ResponseHead(h, end && !st.tunnel)
		if st.tunnel && end && !st.dead {
			x.ResponseData(nil, true)
		}
		st.settle()
		return
	}
	if h.Upgrade != nil && !c.extended(s, h, end) {
		return
	}
	c.requests++
	st := c.free.getStream()
	st.c, st.s, st.remote, st.moved = c, s, end, c.l.Now()
	st.wantsTunnel = h.Upgrade != nil
	s.User = st
	if c.l.level >= NoKeepAlive && !c.closing {
		c.retire()
	}
	st.x = c.info.Pool.Begin(st, h, end, c.info, c.l.Now())
	st.x.Share = c.info.Kept()
	st.keep()
	st.x.Begin()
	st.held()
}

// OnData is http2.Handler.
func (c *h2conn) OnData(s *http2.Stream, p []byte, end bool) {
	st, _ := s.User.(*h2stream)
	if st == nil || st.dead {
		s.Credit(len(p))
		return
	}
	st.moved = c.l.Now()
	if len(st.pend) > 0 { // bounded by the stream's window
		st.pend = append(st.pend, p...)
		s.Keep(len(p))
		st.pendEnd = end
		st.keep()
		st.over()
		return
	}
	n := st.offer(p, end)
	if st.dead {
		return
	}
	st.held()
	if n < len(p) {
		st.pend = append(st.pend[:0], p[n:]...)
		s.Keep(len(p) - n)
		st.pendEnd = end
		st.keep()
		st.over()
		return
	}
	if end {
		st.remote = true
		st.settle()
	}
}

// OnTrailers is http2.Handler.
func (c *h2conn) OnTrailers(s *http2.Stream, f []httpmsg.Field) {
	st, _ := s.User.(*h2stream)
	if st == nil || st.dead {
		return
	}
	if len(st.pend) > 0 || !st.offerTrailers(f) {
		st.pendTr = true // f dies with this call
		st.trailers, st.arena = copyFields(f)
		st.keep()
		st.over()
		return
	}
	st.held()
	if !st.dead {
		st.remote = true
		st.settle()
	}
}

// OnReset is http2.Handler.
func (c *h2conn) OnReset(s *http2.Stream, code http2.Code) {
	resets := c.h2.Stats().PeerResets
	byPeer := resets != c.resets
	c.resets = resets
	st, _ := s.User.(*h2stream)
	if st == nil || st.dead {
		return
	}
	x := st.x
	from := st.from
	if c.client {
		gone, why := fromH2(code, c.connecting), s.Err()
		if _, ours := why.(*http2.StreamError); ours { // whatever the code that we sent
			gone = exchange.Protocol
		}
		if x != nil && !st.remote && (st.pendEnd || st.pendTr) {
			st.outlive(gone)
		} else {
			if c.ending && gone == exchange.Closed && from >= c.had {
				gone = exchange.Unsent
			}
			st.release()
			if x != nil {
				if x.Cause = c.cause; why != nil {
					x.Cause = why
				}
				x.UpstreamClosed(gone)
			}
		}
		c.freed()
		return
	}
	st.release()
	x.Cause = s.Err()
	gone := exchange.Protocol // the codec found fault with the stream, or with the connection
	switch {
	case byPeer:
		gone = exchange.Reset
	case c.ending && c.endCode != exchange.Protocol:
		gone = exchange.Cancel
	}
	x.DownstreamClosed(gone)
	c.l.release(c.info.Pool, x)
}

// OnRefused is http2.Handler.
func (c *h2conn) OnRefused(status int, why *http2.StreamError) {
	if c.info != nil && c.info.OnRefused != nil {
		c.info.OnRefused(c.info, status, why)
	}
}

// OnWritable is http2.Handler.
func (c *h2conn) OnWritable(s *http2.Stream) {
	st, _ := s.User.(*h2stream)
	if st == nil || st.dead || st.drained {
		return
	}
	if c.client {
		st.x.UpstreamWritable()
	} else {
		st.x.DownstreamWritable()
	}
}

// OnGoAway is http2.Handler.
func (c *h2conn) OnGoAway(uint32, http2.Code) {
	c.goaway = true
	if c.owner != nil {
		c.owner.retired(c)
	}
	c.mark()
}

// extended takes the head of an extended CONNECT for what it asks; false: it was answered here.
func (c *h2conn) extended(s *http2.Stream, h *httpmsg.Head, end bool) bool {
	if h.Upgrade = exchange.TunnelProtocol(h.Upgrade); h.Upgrade == nil {
		answer := httpmsg.Head{Status: 501}
		c.l.dated(&answer)
		s.WriteHead(&answer, true) // further HTTP, or TLS: there is no ordinary request to fall back to
		if !end {
			s.Reset(http2.NoError)
		}
		if c.info.OnRefused != nil {
			c.info.OnRefused(c.info, 501, strangeTunnel)
		}
		return false
	}
	h.Method = methodGET
	if !end {
		h.Length = httpmsg.Unknown
	}
	return true
}
