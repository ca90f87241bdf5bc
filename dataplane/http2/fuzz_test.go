package http2

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"aether/dataplane/httpmsg"

	oracle "golang.org/x/net/http2"
)

// script turns fuzz bytes into what a peer might send: mostly frames that make
// sense, some that do not.
type script struct{ b []byte }

func (s *script) byte() byte {
	if len(s.b) == 0 {
		return 0
	}
	c := s.b[0]
	s.b = s.b[1:]
	return c
}

func (s *script) n(max int) int { return int(s.byte()) % max }

// write writes frames until the bytes run out.
func (s *script) write(w *wire, client bool) {
	next := uint32(1)
	id := func() uint32 { // one that may be open, mostly
		if n := s.byte(); n != 0xff {
			return uint32(n)%(next+1) | 1
		}
		return uint32(s.byte())
	}
	head := func(trailers bool) []byte {
		kv := [][]string{getRoot, postRoot, {":method", "HEAD", ":scheme", "http", ":path", "/x", ":authority", "b"}}[s.n(3)]
		if client {
			kv = []string{":status", []string{"200", "103", "204", "304", "404"}[s.n(5)]}
		}
		if trailers {
			kv = nil
		}
		for range s.n(4) {
			kv = append(kv[:len(kv):len(kv)], []string{"x-a", "content-length", "cookie", "X-Bad", "te", "host"}[s.n(6)],
				[]string{"1", "5", "a", "trailers", " b", "100"}[s.n(6)])
		}
		return bytes.Clone(w.fields(kv...))
	}
	for len(s.b) > 0 {
		flags := s.byte()
		end := flags&1 != 0
		pad := []byte(nil)
		if flags&2 != 0 {
			pad = make([]byte, flags>>4)
		}
		switch s.n(12) {
		case 0, 1, 2: // a new request, or a response
			block, at := head(false), next
			if client {
				at = id()
			} else {
				next += 2
			}
			w.WriteHeaders(oracle.HeadersFrameParam{StreamID: at, BlockFragment: block, EndStream: end, EndHeaders: true, PadLength: uint8(len(pad))})
		case 3: // a block in pieces
			block, at := head(s.n(2) == 0), id()
			if s.n(2) == 0 && !client {
				at, next = next, next+2
			}
			k := min(len(block), s.n(20))
			w.WriteHeaders(oracle.HeadersFrameParam{StreamID: at, BlockFragment: block[:k], EndStream: end})
			w.WriteContinuation(at, false, nil)
			w.WriteContinuation(at, flags&4 == 0, block[k:])
		case 4, 5, 6:
			p := bytes.Repeat([]byte{flags}, s.n(256)*(1+s.n(2)*63))
			if pad != nil {
				w.WriteDataPadded(id(), end, p, pad)
			} else {
				w.WriteData(id(), end, p)
			}
		case 7:
			w.WriteHeaders(oracle.HeadersFrameParam{StreamID: id(), BlockFragment: head(true), EndStream: true, EndHeaders: true})
		case 8:
			w.WriteRSTStream(id(), oracle.ErrCode(s.n(14)))
		case 9:
			w.WriteWindowUpdate(id()&^uint32(flags&1), uint32(s.byte())<<(flags%24))
		case 10:
			switch s.n(3) {
			case 0:
				w.WriteSettings(oracle.Setting{ID: oracle.SettingID(s.n(9)), Val: uint32(s.byte()) << (flags % 24)})
			case 1:
				w.WritePing(end, [8]byte{flags})
			case 2:
				w.WriteGoAway(id(), oracle.ErrCode(s.n(14)), nil)
			}
		default:
			typ, at := oracle.FrameType(s.n(12)), id()
			n := min(s.n(64), len(s.b))
			w.WriteRawFrame(typ, oracle.Flags(flags), at, s.b[:n])
			s.b = s.b[n:]
		}
	}
}

// outcome of a connection: what it told and sent.
type outcome struct {
	events, err string
	out         []byte
}

// play gives in to a new Conn, cut into pieces of at most size bytes (0: not
// cut) by a driver that keeps what is not used.
func play(t *testing.T, client bool, in []byte, size int, rng *rand.Rand) outcome {
	r := new(recorder)
	body := make([]byte, 50000)
	r.onHead = func(s *Stream, h *httpmsg.Head, end bool) {
		if client {
			return
		}
		switch s.ID() % 32 {
		case 15: // which only an event can do at the same place however the input is cut
			s.c.Shutdown(NoError)
		case 23:
			s.c.Tick()
			if s.c.Warned() {
				s.c.Shutdown(NoError)
			}
		case 31:
			s.c.Ping()
		}
		switch s.ID() % 8 {
		case 1:
			s.WriteHead(respond(204), true)
		case 3:
			s.WriteHead(respond(200), false)
			s.WriteData(body, true)
		case 5:
			s.Reset(Cancel)
		}
	}
	r.onWrite = func(s *Stream) { s.WriteData(body, true) }
	cfg := Config{Server: !client, StreamWindow: 70000, ConnWindow: 100000, MaxStreams: 10, MaxHeader: 1000}
	c := New(cfg, r)
	if client {
		for i := range 4 {
			s, err := c.Open()
			if err != nil {
				t.Fatal(err)
			}
			s.WriteHead(get("/"), i%2 == 0)
			s.WriteData(body, i == 1)
		}
	}
	before := bytes.Clone(in)
	var res outcome
	for have, fed := 0, 0; ; { // in[fed:have] is in the driver's buffer
		if size == 0 {
			have = len(in)
		} else {
			have = min(len(in), have+1+rng.IntN(size))
		}
		n, err := c.Feed(in[fed:have])
		if n < 0 || n > have-fed {
			t.Fatalf("Feed used %d of %d bytes", n, have-fed)
		}
		fed += n
		balanced(t, c)
		if have-fed > frameHeader+maxFrame {
			t.Fatalf("%d bytes not used", have-fed)
		}
		if err != nil {
			var ce *ConnError
			if !errors.As(err, &ce) || c.Streams() != 0 {
				t.Fatalf("%v with %d streams", err, c.Streams())
			}
			res.err = err.Error()
			break
		}
		if have == len(in) {
			break
		}
	}
	if !bytes.Equal(before, in) {
		t.Fatal("Feed wrote to its input")
	}
	res.events, res.out = r.take(), bytes.Clone(c.Out())
	if n := cap(c.out); n > 2*(maxQueued+64*len(in)+(64<<10)) {
		t.Fatalf("%d bytes of output for %d of input", n, len(in))
	}
	if n := cap(c.cont) + cap(c.cookie) + 16*len(c.table.slots); n > 64<<10 {
		t.Fatalf("%d bytes held", n)
	}
	c.Reap()
	balanced(t, c)
	c.Abort(Cancel)
	c.Reap()
	if c.Streams() != 0 {
		t.Fatal("streams after Abort")
	}
	return res
}

func checkPlay(t *testing.T, client bool, in []byte, seed uint64) {
	whole := play(t, client, in, 0, nil)
	for _, size := range []int{1, 20, 2000} {
		part := play(t, client, in, size, rand.New(rand.NewPCG(seed, uint64(size))))
		if part.events != whole.events || part.err != whole.err {
			t.Fatalf("in pieces of %d\n%s\n%s\nat once\n%s\n%s", size, part.events, part.err, whole.events, whole.err)
		}
		if !bytes.Equal(part.out, whole.out) {
			t.Fatalf("in pieces of %d it sends %x, at once %x", size, part.out, whole.out)
		}
	}
	// Whatever the peer sent, our side is proper HTTP/2.
	w := rawWire(t, Config{Server: !client})
	w.c.out = append(w.c.out[:0], whole.out...)
	w.Framer.AllowIllegalReads = false
	w.frames()
}

// FuzzFrames: events and output do not depend on how the input is cut, no byte
// of window is lost, output is well-formed, memory is bounded.
func FuzzFrames(f *testing.F) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 1))
		b := make([]byte, 20+rng.IntN(300))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(seed%2 == 0, seed, b)
	}
	f.Fuzz(func(t *testing.T, client bool, seed uint64, b []byte) {
		w := rawWire(t, Config{})
		if !client {
			w.in.WriteString(clientPreface)
		}
		w.WriteSettings(oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: uint32(seed % 100000)})
		(&script{b}).write(w, client)
		checkPlay(t, client, w.in.Bytes(), seed)
	})
}

// FuzzFeed is FuzzFrames for input that nobody made sense of.
func FuzzFeed(f *testing.F) {
	w := rawWire(f, Config{})
	w.in.WriteString(clientPreface)
	w.WriteSettings()
	w.head(1, false, postRoot...)
	w.WriteDataPadded(1, true, []byte("body"), make([]byte, 5))
	f.Add(false, bytes.Clone(w.in.Bytes()))
	f.Add(true, bytes.Clone(w.in.Bytes()[len(clientPreface):]))
	f.Fuzz(func(t *testing.T, client bool, b []byte) { checkPlay(t, client, b, 1) })
}

// TestChopped replays many scripts, as FuzzFrames does.
func TestChopped(t *testing.T) {
	for seed := range uint64(400) {
		rng := rand.New(rand.NewPCG(seed, 2))
		b := make([]byte, rng.IntN(600))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		w := rawWire(t, Config{})
		if seed%2 == 0 {
			w.in.WriteString(clientPreface)
		}
		w.WriteSettings()
		(&script{b}).write(w, seed%2 == 1)
		checkPlay(t, seed%2 == 1, w.in.Bytes(), seed)
	}
}

// side is one end of TestSoak: it writes bodies whose bytes tell their place,
// and checks those it gets.
type side struct {
	t    *testing.T
	rng  *rand.Rand
	live map[uint32]*talk
	done int
}

type talk struct {
	s             *Stream
	id            uint32
	out, sent     int // bytes to send, and sent
	got, credited int
	sentAll, over bool
}

func place(id uint32, i int) byte { return byte(i*7 + int(id)) }

func (d *side) talk(s *Stream) *talk {
	k := s.User.(*talk)
	if k.over || k.s != s || k.id != s.ID() {
		d.t.Fatalf("an event of stream %d after its end", s.ID())
	}
	return k
}

func (d *side) push(k *talk) {
	for !k.sentAll && !k.over {
		n := min(k.out-k.sent, 1+d.rng.IntN(9000))
		p := make([]byte, n)
		for i := range p {
			p[i] = place(k.id, k.sent+i)
		}
		last := k.sent+n == k.out
		trailers := last && k.out%3 == 0
		m := k.s.WriteData(p, last && !trailers)
		k.sent += m
		if m < n {
			return
		}
		if last {
			k.sentAll = true
			if trailers {
				k.s.WriteTrailers(fields("x-end", "1"))
			}
		}
	}
}

func (d *side) begin(s *Stream) *talk {
	k := &talk{s: s, id: s.ID(), out: d.rng.IntN(1 << d.rng.IntN(18))}
	s.User = k
	d.live[k.id] = k
	return k
}

func (d *side) OnHead(s *Stream, h *httpmsg.Head, end bool) {
	if h.Status == 0 {
		k := d.begin(s)
		if d.rng.IntN(10) > 0 {
			s.WriteHead(respond(200, "x-id", fmt.Sprint(s.ID()%7)), false)
			d.push(k)
		} else {
			d.cancel(k)
		}
	}
}

func (d *side) OnData(s *Stream, p []byte, end bool) {
	k := d.talk(s)
	for i := range p {
		if p[i] != place(k.id, k.got+i) {
			d.t.Fatalf("stream %d: byte %d is wrong", k.id, k.got+i)
		}
	}
	k.got += len(p)
	if d.rng.IntN(2) == 0 {
		s.Credit(k.got - k.credited)
		k.credited = k.got
	}
	if end {
		d.done++
	}
	d.perturb()
}

func (d *side) perturb() {
	if d.rng.IntN(30) == 0 { // cancel any
		if all := d.all(); len(all) > 0 {
			d.cancel(all[d.rng.IntN(len(all))])
		}
	}
}

// all returns what is live, in an order that a seed repeats.
func (d *side) all() []*talk {
	return slices.SortedFunc(maps.Values(d.live), func(a, b *talk) int { return int(a.id) - int(b.id) })
}

func (d *side) cancel(k *talk) {
	k.s.Reset(Cancel)
	d.forget(k)
}

func (d *side) forget(k *talk) {
	k.over = true
	delete(d.live, k.id)
}

func (d *side) OnTrailers(s *Stream, f []httpmsg.Field) {
	d.talk(s)
	d.done++
	d.perturb()
}
func (d *side) OnReset(s *Stream, code Code) { d.forget(d.talk(s)); d.perturb() }
func (d *side) OnRefused(int, *StreamError)  { d.perturb() }
func (d *side) OnWritable(s *Stream)         { d.push(d.talk(s)) }
func (d *side) OnGoAway(uint32, Code)        {}

// TestSoak: two ends talk at random, with small windows, cancelling at
// random; bodies arrive whole, and in the end no window and no stream is lost.
func TestSoak(t *testing.T) {
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 3))
		mk := func() *side { return &side{t: t, rng: rng, live: map[uint32]*talk{}} }
		cs, ss := mk(), mk()
		cfg := Config{StreamWindow: 1 + rng.IntN(100000), ConnWindow: 65535 + rng.IntN(100000), MaxStreams: uint32(1 + rng.IntN(40))}
		c := New(cfg, cs)
		cfg.Server = true
		s := New(cfg, ss)
		step := func(from, to *Conn, all bool) {
			out := from.Out()
			if !all {
				out = out[:rng.IntN(len(out)+1)]
			}
			n, err := to.Feed(out)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			from.Sent(n)
			balanced(t, from)
			balanced(t, to)
		}
		for round := range 3000 {
			if round < 2500 && rng.IntN(4) == 0 {
				if st, err := c.Open(); err == nil {
					st.WriteHead(get("/"+fmt.Sprint(rng.IntN(9)), "x-r", fmt.Sprint(round)), false)
					cs.push(cs.begin(st))
				}
			}
			step(c, s, false)
			step(s, c, false)
			if rng.IntN(3) == 0 {
				for _, d := range []*side{cs, ss} {
					for _, k := range d.all() {
						k.s.Credit(k.got - k.credited)
						k.credited = k.got
						if k.s.life != alive {
							d.forget(k)
						}
					}
				}
				c.Reap()
				s.Reap()
			}
		}
		for range 10000 { // let it run dry
			step(c, s, true)
			step(s, c, true)
			for _, d := range []*side{cs, ss} {
				for _, k := range d.all() {
					k.s.Credit(k.got - k.credited)
					k.credited = k.got
				}
			}
			if c.Streams()+s.Streams()+len(c.Out())+len(s.Out()) == 0 {
				break
			}
		}
		c.Reap()
		s.Reap()
		if c.Streams()+s.Streams() != 0 || cs.done == 0 {
			t.Fatalf("seed %d: %d and %d streams hang, %d done", seed, c.Streams(), s.Streams(), cs.done)
		}
		for _, p := range [][2]*Conn{{c, s}, {s, c}} {
			balanced(t, p[0])
			if p[0].recvWin != p[1].sendWin {
				t.Errorf("seed %d: the ends differ on a window: %d and %d", seed, p[0].recvWin, p[1].sendWin)
			}
		}
	}
}
