package exchange_test

import (
	"bytes"
	"testing"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// TestReplayEnds: a body that outgrows what is kept is not replayable from then
// on, one that is known to be longer from its first byte, and one that just fits always.
func TestReplayEnds(t *testing.T) {
	for _, tt := range []struct {
		length int64
		sent   int
		want   bool
	}{
		{httpmsg.Unknown, exchange.ReplayMax, true},
		{httpmsg.Unknown, exchange.ReplayMax + 1, false},
		{exchange.ReplayMax, exchange.ReplayMax, true},
		{exchange.ReplayMax + 1, 0, true},
		{exchange.ReplayMax + 1, 1, false},
	} {
		s := &script{request: func(x *exchange.Exchange) { x.KeepForReplay(); x.Forward(&tape{room: 1 << 20}) }}
		p := &exchange.Pool{Service: s}
		x := p.Begin(&tape{}, post(tt.length), false, nil, 0)
		x.Begin()
		for body := make([]byte, tt.sent); len(body) > 0; {
			n := min(len(body), 1000)
			x.RequestData(body[:n], false)
			body = body[n:]
		}
		if x.Replayable() != tt.want {
			t.Errorf("length %d, %d sent: replayable %v", tt.length, tt.sent, !tt.want)
		}
	}
}

// TestKeptIsBounded: bodies that are kept on a loop are bounded in all. Those
// kept for replay give way first, so that a body that must be seen still can be.
func TestKeptIsBounded(t *testing.T) {
	hold := false
	h := &holder{}
	s := &script{request: func(x *exchange.Exchange) {
		if hold {
			x.HoldBody(exchange.HoldMax, h)
			return
		}
		x.KeepForReplay()
		x.Forward(&tape{room: 1 << 30})
	}}
	p := &exchange.Pool{Service: s}
	body := make([]byte, exchange.ReplayMax)
	var open []*exchange.Exchange
	begin := func() *exchange.Exchange {
		x := p.Begin(&tape{}, post(httpmsg.Unknown), false, nil, 0)
		open = append(open, x)
		x.Begin()
		return x
	}
	kept := 0
	for range 1000 {
		x := begin()
		x.RequestData(body, false)
		if x.Replayable() {
			kept += x.HeldBytes()
		} else if x.HeldBytes() != 0 {
			t.Fatal("bytes are kept for nothing")
		}
	}
	if kept != 8<<20 {
		t.Errorf("%d bytes are kept for replay", kept)
	}
	hold = true
	for h.n == 0 && kept < 100<<20 {
		x := begin()
		for i := 0; i < exchange.HoldMax && h.n == 0; i += len(body) {
			x.RequestData(body, false)
		}
		kept += x.HeldBytes()
	}
	if kept != 16<<20 || h.why != exchange.HeldNoRoom {
		t.Errorf("%d bytes are kept in all, told %d", kept, h.why)
	}
	for _, x := range open {
		x.Abort(exchange.Cancel)
		p.Release(x)
	}
	hold = false
	if x := begin(); x.RequestData(body, false) != len(body) || !x.Replayable() || !bytes.Equal(x.AppendHeld(nil), body) {
		t.Error("what was kept is not free again")
	}
}

// TestNoAllocationsReplaying: nor does a request whose body is kept and sent twice.
func TestNoAllocationsReplaying(t *testing.T) {
	p := &exchange.Pool{Service: keeping{}}
	req := post(9000)
	res := &httpmsg.Head{Status: 200, Length: 3}
	body := make([]byte, 9000)
	if n := testing.AllocsPerRun(1000, func() {
		x := p.Begin(quiet{}, req, false, nil, 1)
		x.Begin()
		x.RequestData(body, true)
		x.UpstreamClosed(exchange.Closed)
		x.ResponseHead(res, false)
		x.ResponseData(body[:3], true)
		if !x.Over() || x.Attempts != 2 {
			t.Fatal("not over")
		}
		p.Release(x)
	}); n != 0 {
		t.Errorf("%v allocations an exchange, want 0", n)
	}
}

// keeping is quiet, and sends again.
type keeping struct{ quiet }

func (keeping) Request(x *exchange.Exchange)                 { x.KeepForReplay(); x.Forward(quiet{}) }
func (keeping) Failed(x *exchange.Exchange, _ exchange.Code) { x.Forward(quiet{}) }
