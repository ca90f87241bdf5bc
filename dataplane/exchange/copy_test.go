package exchange_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// sink is a stream that keeps what it takes, as much at a time as it has room for.
type sink struct {
	body           []byte
	room           int
	ended, trailed bool
	heads, aborted int
}

func (s *sink) WriteHead(_ *httpmsg.Head, end bool) { s.heads++; s.ended = end }
func (s *sink) WriteData(p []byte, end bool) int {
	n := min(len(p), s.room)
	s.room -= n
	s.body = append(s.body, p[:n]...)
	if s.ended {
		panic("data beyond the end")
	}
	s.ended = end && n == len(p)
	return n
}
func (s *sink) WriteTrailers([]httpmsg.Field) { s.trailed, s.ended = true, true }
func (s *sink) Resume()                       {}
func (s *sink) Abort(exchange.Code)           { s.aborted++ }

// copier pushes what an exchange's tap shows to another exchange, as a mirror does.
type copier struct {
	to   *exchange.Exchange
	lost bool
	n    int // bytes shown
}

func (c *copier) TapData(p []byte, end bool) {
	c.n += len(p)
	if !c.lost && !c.to.Push(p, end, 64<<10) {
		c.lost = true
	}
}
func (c *copier) TapTrailers(f []httpmsg.Field) { c.to.PushTrailers(f) }

// TestCopies: whatever comes when and whoever has room for how much, the copy of a request is its body to the byte and
// its end, once; and the original is never held back by its copy.
func TestCopies(t *testing.T) {
	kinds := map[string]int{}
	for seed := range uint64(4000) {
		r := rand.New(rand.NewPCG(seed, 7))
		body := make([]byte, []int{0, 1, 3000, 9000, 150_000}[r.IntN(5)])
		for i := range body {
			body[i] = byte(i*13 + i>>9)
		}
		trailers := r.IntN(3) == 0
		holds, kept := r.IntN(3) == 0, r.IntN(2) == 0
		svc := &script{}
		up, down := &sink{room: 1 << 30}, &sink{room: 1 << 30}
		copyUp := &sink{}
		c := &copier{}
		copies := &exchange.Pool{Service: &script{}}
		attached := false
		attach := func() {
			if !attached {
				attached = true
				c.to.Forward(copyUp)
			}
		}
		forward := func(x *exchange.Exchange) {
			c.to = copies.Begin(&sink{room: 1 << 30}, &x.Req, x.Bodyless(), nil, 0)
			if r.IntN(2) == 0 {
				attach()
			}
			x.Tap(c)
			if kept {
				x.KeepForReplay()
			}
			x.Forward(up)
		}
		svc.request = func(x *exchange.Exchange) {
			if holds {
				x.HoldBody(64<<10, &holder{f: forward})
				return
			}
			forward(x)
		}
		bodyless := len(body) == 0 && !trailers && r.IntN(2) == 0
		x := (&exchange.Pool{Service: svc}).Begin(down, post(httpmsg.Unknown), bodyless, nil, 0)
		x.Begin()
		resend := kept && len(body) < 60_000 && r.IntN(2) == 0
		behind := 0
		for rest, ended := body, bodyless; ; {
			if c.to != nil {
				copyUp.room += r.IntN(1 + []int{2000, 20_000, 1 << 20}[seed%3])
				if r.IntN(3) == 0 {
					attach()
				}
				c.to.UpstreamWritable()
				behind = max(behind, c.to.HeldBytes())
			}
			if resend && r.IntN(4) == 0 && c.to != nil { // the original is sent once more
				resend = false
				x.DiscardResponse()
				up = &sink{room: 1 << 30}
				x.Forward(up)
			}
			if ended {
				break
			}
			n := min(len(rest), r.IntN(5000))
			end := n == len(rest) && !trailers
			if took := x.RequestData(rest[:n], end); took != n {
				t.Fatalf("seed %d: the original is held back: %d of %d bytes", seed, took, n)
			}
			if rest = rest[n:]; len(rest) == 0 && trailers {
				x.RequestTrailers([]httpmsg.Field{{Name: []byte("a"), Value: []byte("b")}})
				end = true
			}
			ended = end
		}
		if !up.ended || !bytes.Equal(up.body, body) || up.trailed != trailers {
			t.Fatalf("seed %d: the original: %d of %d bytes, ended %v", seed, len(up.body), len(body), up.ended)
		}
		if c.n != len(body) {
			t.Fatalf("seed %d: %d of %d bytes shown", seed, c.n, len(body))
		}
		if behind > 64<<10+4096 { // and what is left of a piece that has gone up
			t.Fatalf("seed %d: %d bytes kept", seed, behind)
		}
		if c.lost {
			kinds["lost"]++
			c.to.Abort(exchange.Cancel)
			continue
		}
		attach()
		copyUp.room = 1 << 30
		c.to.UpstreamWritable()
		kinds[fmt.Sprint("whole, trailers ", trailers)]++
		if !copyUp.ended || !bytes.Equal(copyUp.body, body) || copyUp.trailed != trailers || copyUp.heads != 1 {
			t.Fatalf("seed %d: the copy: %d of %d bytes, ended %v, trailers %v", seed, len(copyUp.body), len(body), copyUp.ended, copyUp.trailed)
		}
		if c.to.HeldBytes() != 0 {
			t.Fatalf("seed %d: %d bytes are still kept", seed, c.to.HeldBytes())
		}
	}
	if len(kinds) != 3 || kinds["lost"] < 100 {
		t.Error("not of all kinds:", kinds)
	}
}

// TestPushForgets: what has gone up to a slow upstream is given back, and such a request is not sent again.
func TestPushForgets(t *testing.T) {
	p := &exchange.Pool{Service: &script{}}
	x := p.Begin(&sink{}, post(httpmsg.Unknown), false, nil, 0)
	up := &sink{}
	x.Forward(up)
	for range 100 {
		if !x.Push(make([]byte, 6000), false, 64<<10) {
			t.Fatal("too far behind")
		}
		up.room = 5990
		x.UpstreamWritable()
		if x.HeldBytes() == 0 {
			t.Fatal("not behind") // else nothing is tried
		}
	}
	if x.HeldBytes() > 2*6000 || x.Replayable() {
		t.Errorf("%d bytes kept, replayable %v", x.HeldBytes(), x.Replayable())
	}
	if x.Push(make([]byte, 64<<10), false, 64<<10) {
		t.Error("more is kept than may be")
	}
}

// TestPushAllocs: what goes on to an upstream with room costs no allocation.
func TestPushAllocs(t *testing.T) {
	p := &exchange.Pool{Service: &script{}}
	x := p.Begin(&sink{}, post(httpmsg.Unknown), false, nil, 0)
	x.Forward(blackHole{})
	b := make([]byte, 4000)
	if n := testing.AllocsPerRun(100, func() {
		if !x.Push(b, false, 64<<10) {
			t.Fatal("not taken")
		}
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

type blackHole struct{}

func (blackHole) WriteHead(*httpmsg.Head, bool)  {}
func (blackHole) WriteData(p []byte, _ bool) int { return len(p) }
func (blackHole) WriteTrailers([]httpmsg.Field)  {}
func (blackHole) Resume()                        {}
func (blackHole) Abort(exchange.Code)            {}
