package exchange

import (
	"slices"
	"testing"

	"aether/dataplane/httpmsg"
)

// sink is a stream that takes everything; what an answer that is given up ends with is written down.
type sink struct{ end string }

func (*sink) WriteHead(*httpmsg.Head, bool)     {}
func (*sink) WriteData(p []byte, _ bool) int    { return len(p) }
func (*sink) WriteTrailers(f []httpmsg.Field)   {}
func (*sink) Resume()                           {}
func (s *sink) Abort(Code)                      { s.end = "cut" }
func (s *sink) Drain()                          { s.end = "read to its end" }
func (*sink) Held(*Exchange, Held)              {}
func (s *sink) Request(x *Exchange)             { x.HoldBody(HoldMax, s) }
func (*sink) Failed(*Exchange, Code)            {}
func (*sink) Done(*Exchange)                    {}
func (*sink) Response(*Exchange, *httpmsg.Head) {}
func (s *sink) begin(p *Pool, n int) *Exchange {
	x := p.Begin(s, &httpmsg.Head{Method: []byte("POST"), Path: []byte("/"), Length: httpmsg.Unknown, Minor: 1}, false, nil, 0)
	x.Begin()
	x.RequestData(make([]byte, n), false)
	return x
}

// TestFreeIsBounded: after a rush a loop keeps so many exchanges and pieces of bodies, and not what they had grown to.
func TestFreeIsBounded(t *testing.T) {
	s := &sink{}
	p := &Pool{Service: s}
	var open []*Exchange
	for range 1100 {
		open = append(open, s.begin(p, 2*chunkSize))
	}
	if len(p.free)+len(p.chunks) != 0 || p.held.held != 2200 {
		t.Fatalf("%d free, %d pieces free, %d held", len(p.free), len(p.chunks), p.held.held)
	}
	for _, x := range open {
		x.Abort(Cancel)
		p.Release(x)
	}
	if len(p.free) != 1024 || len(p.chunks) != 256 || p.held.held != 0 {
		t.Errorf("of 1100 exchanges that held 2200 pieces %d and %d are kept, %d held", len(p.free), len(p.chunks), p.held.held)
	}
}

// TestListsAreBounded: an exchange's list of pieces is kept with it, unless a great body made it long.
func TestListsAreBounded(t *testing.T) {
	for n, want := range map[int]bool{ReplayMax: true, HoldMax: false} {
		s := &sink{}
		p := &Pool{Service: s}
		x := s.begin(p, n)
		if x.kept != n {
			t.Fatalf("%d of %d bytes are held", x.kept, n)
		}
		x.Abort(Cancel)
		p.Release(x)
		if got := cap(x.chunks) > 0; got != want || cap(x.chunks) > 64 {
			t.Errorf("after %d bytes there is room for %d pieces", n, cap(x.chunks))
		}
	}
}

// givesUp is a service that wants no answer.
type givesUp struct {
	sink
	up *sink
}

func (s *givesUp) Request(x *Exchange) { x.Forward(s.up) }
func (s *givesUp) Response(x *Exchange, _ *httpmsg.Head) {
	x.DiscardResponse()
	x.Reply(&httpmsg.Head{Status: 503}, nil)
}

// TestDrainIsBounded: the rest of an answer that is not wanted is read, which keeps the connection, only if it is
// known to be short.
func TestDrainIsBounded(t *testing.T) {
	var got []string
	lengths := []int64{0, 16 << 10, 16<<10 + 1, 1 << 40, httpmsg.Unknown}
	for _, n := range lengths {
		up := &sink{}
		p := &Pool{Service: &givesUp{up: up}}
		x := p.Begin(&sink{}, &httpmsg.Head{Method: []byte("GET"), Path: []byte("/"), Minor: 1}, true, nil, 0)
		x.Begin()
		x.ResponseHead(&httpmsg.Head{Status: 503, Length: n}, false)
		got = append(got, up.end)
	}
	if want := []string{"read to its end", "read to its end", "cut", "cut", "cut"}; !slices.Equal(got, want) {
		t.Errorf("answers of %d bytes: %q, want %q", lengths, got, want)
	}
}

// TestAPodHasItsShareOfWhatIsKept: a pod whose uploads never end leaves others' requests memory, for what must be
// seen first as for what is sent again; and whatever way an exchange ends, all counts come to nothing.
func TestAPodHasItsShareOfWhatIsKept(t *testing.T) {
	held, again := &sink{}, &replaying{}
	p := &Pool{}
	greedy, other := &Share{}, &Share{}
	var open []*Exchange
	begin := func(svc Service, of *Share, n int) *Exchange {
		p.Service = svc
		x := p.Begin(held, &httpmsg.Head{Method: []byte("POST"), Path: []byte("/"), Length: httpmsg.Unknown, Minor: 1}, false, nil, 0)
		x.Share = of
		x.Begin()
		for n > 0 {
			k := min(n, 16<<10)
			if x.RequestData(make([]byte, k), false) < k {
				break
			}
			n -= k
		}
		open = append(open, x)
		return x
	}
	for range 300 {
		begin(held, greedy, HoldMax-1)
		begin(again, greedy, ReplayMax)
	}
	const all = keptMax / chunkSize
	if greedy.held > all/2+1 || p.held != *greedy {
		t.Fatalf("a pod keeps %+v of %d pieces, %+v in all", *greedy, all, p.held)
	}
	if x := begin(held, other, HoldMax-1); x.HeldBytes() != HoldMax-1 {
		t.Errorf("of another's body that must be seen first %d of %d bytes are kept", x.HeldBytes(), HoldMax-1)
	}
	for range 16 {
		if x := begin(again, other, ReplayMax); x.HeldBytes() != ReplayMax || !x.Replayable() {
			t.Fatalf("of another's body %d of %d bytes are kept to be sent again", x.HeldBytes(), ReplayMax)
		}
	}
	for i, x := range open {
		switch i % 3 {
		case 0:
			x.Abort(Cancel)
		case 1:
			x.DownstreamClosed(Cancel)
		case 2:
			x.Reply(&httpmsg.Head{Status: 503, Length: 3}, []byte("no\n"))
		}
		if !x.Over() {
			x.Abort(Cancel)
		}
		p.Release(x)
	}
	if p.held != (Share{}) || *greedy != (Share{}) || *other != (Share{}) {
		t.Errorf("all have ended, and %+v is held, %+v and %+v by pods", p.held, *greedy, *other)
	}
}

// replaying is a sink, as the service of requests that are sent again, and as what takes them.
type replaying struct{ sink }

func (r *replaying) Request(x *Exchange) { x.KeepForReplay(); x.Forward(r) }
