package engine

import (
	"slices"

	"aether/dataplane/exchange"
)

// HopGroup bounds the sessions of hops to one endpoint, on one loop. Its methods run there.
type HopGroup struct {
	Max  int // sessions of all hops together; a hop's first one is always made
	hops []*Hop
}

// Join makes h, which has no session yet, one of g's hops until h is closed or empty.
func (h *Hop) Join(g *HopGroup) {
	h.group = g
	g.hops = append(g.hops, h)
}

// Open counts the hop's sessions, those that take no new requests too, and not one
// that is being made.
func (h *Hop) Open() int { return len(h.conns) + len(h.old) }

// Empty reports whether no hop is left.
func (g *HopGroup) Empty() bool { return len(g.hops) == 0 }

// mayDial reports whether h may have one more session.
func (h *Hop) mayDial() bool {
	if len(h.conns) >= maxSessions {
		return false
	}
	if h.group == nil || len(h.conns) == 0 {
		return true
	}
	n := 0
	for _, o := range h.group.hops {
		if n += o.Open(); o.dialing {
			n++
		}
	}
	return n < h.group.Max
}

func (h *Hop) leaveGroup() {
	if g := h.group; g != nil {
		h.group = nil
		g.hops = slices.DeleteFunc(g.hops, func(o *Hop) bool { return o == h })
	}
}

// shut ends all sessions at once; waiting is what requests are told that wait for one.
func (h *Hop) shut(cause error, waiting exchange.Code) {
	if h.closed {
		return
	}
	delete(h.l.hops, h)
	h.l.Disarm(&h.again)
	h.leaveGroup()
	if h.cancel != nil {
		h.cancel()
	}
	h.closed = true
	h.fail(cause, waiting)
	h.close(cause, exchange.Closed)
	if h.empty != nil {
		h.empty()
	}
}
