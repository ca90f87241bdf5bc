package exchange_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math"
	"math/rand"
	"net/http"
	"strconv"
	"testing"

	"aether/dataplane/exchange"
	"aether/dataplane/http1"
	"aether/dataplane/http2"
	"aether/e2e/testseed"
)

// pump runs one case, drawn from src, to its end and judges it.
func pump(t *testing.T, src rand.Source, down2, up2, faults bool) {
	w := &world{t: t, rnd: rand.New(src), byID: map[string]*plan{}, done: map[*exchange.Exchange]uint32{}, h2up: up2, faults: faults}
	w.pool.Service = w
	w.room = 1 + w.rnd.Intn(4000)
	w.window = 30 + w.rnd.Intn(30000)
	for i := range 1 + w.rnd.Intn(4) {
		p := w.plan(i + 1)
		if up2 && p.rframing == http1.ToClose {
			p.rframing = http1.Chunked
		}
		w.reqs = append(w.reqs, p)
		w.byID[strconv.Itoa(p.id)] = p
	}
	var c1 *client1
	if down2 {
		d := &driver2{}
		d.w, d.server = w, true
		d.c = http2.New(http2.Config{Server: true, StreamWindow: w.window, ConnWindow: 65535}, d)
		c := &peer2{}
		c.w = w
		c.c = http2.New(http2.Config{StreamWindow: w.window, ConnWindow: 65535}, c)
		w.reapers = append(w.reapers, &d.h2side, &c.h2side)
		w.link(c, d)
		c.start(w.reqs)
	} else {
		c1 = newClient1(w)
		w.link(c1, &down1{w: w})
	}
	w.run()
	if c1 != nil {
		w.read1(c1)
	}
	if !faults {
		w.whole()
	}
	w.sane()
	for _, l := range w.links { // the end of the world
		for i := range l.end {
			if l.end[i].state() != broken {
				l.end[i].gone(true)
			}
		}
	}
	w.recycle()
	if w.nDone != w.begun {
		t.Fatalf("%d exchanges began, %d are done\n%s", w.begun, w.nDone, w.dump())
	}
}

// read1 judges what an HTTP/1 client got by net/http.
func (w *world) read1(c *client1) {
	br := bufio.NewReader(bytes.NewReader(c.got))
	for _, p := range w.reqs {
		for p.resStatus < 200 {
			res, err := http.ReadResponse(br, &http.Request{Method: p.method})
			if err != nil {
				p.resBroken = true
				return
			}
			if res.StatusCode < 200 {
				p.resInterims++
				continue
			}
			p.resStatus = res.StatusCode
			b, err := io.ReadAll(res.Body)
			p.resBody = b
			p.resTr = res.Trailer.Get("X-Tr")
			if p.resEnd = err == nil && (res.ContentLength >= 0 || len(res.TransferEncoding) > 0 || p.method == "HEAD" || c.fin); !p.resEnd {
				p.resBroken = true
				return
			}
		}
	}
}

func (w *world) bad(p *plan, format string, a ...any) {
	w.t.Helper()
	w.t.Fatalf("request %d (%s, %v body %d, answers after %d, %d with %v %d): %s\n%s", p.id, p.method, p.framing, len(p.body), p.when, p.status, p.rframing, len(p.rbody),
		fmt.Sprintf(format, a...), w.dump())
}

// whole: nothing went wrong, so everything has to be there.
func (w *world) whole() {
	for i, p := range w.reqs {
		if p.resStatus == 0 {
			// An HTTP/1 connection ends after an answer that came before the end of its request.
			for _, q := range w.reqs[:i] {
				if q.early() {
					return
				}
			}
			w.bad(p, "no answer")
		}
		if !p.resEnd {
			w.bad(p, "the answer (%d, %d bytes) is not whole", p.resStatus, len(p.resBody))
		}
		if p.local {
			if p.resStatus != 421 {
				w.bad(p, "status %d", p.resStatus)
			}
			continue
		}
		if p.refused {
			if p.resStatus != 413 || p.attempts > 0 {
				w.bad(p, "status %d, sent %d times", p.resStatus, p.attempts)
			}
			continue
		}
		if want := p.interims * (1 + p.retired); p.resStatus != p.status || p.resInterims != want {
			w.bad(p, "status %d after %d interim heads, want %d", p.resStatus, p.resInterims, want)
		}
		if p.method != "HEAD" && !bytes.Equal(p.resBody, p.rbody) {
			w.bad(p, "the answer's body differs: %d bytes", len(p.resBody))
		}
		if p.rtrailers && p.resTr != strconv.Itoa(p.id) {
			w.bad(p, "answer's trailers %q", p.resTr)
		}
		if p.hold > 0 && p.told != 1 {
			w.bad(p, "told %d times of what is held", p.told)
		}
		if p.retire > 0 && (p.keep && len(p.body) <= exchange.ReplayMax || len(p.body) == 0 && !p.trailers) {
			w.bad(p, "was not replayable")
		}
		if p.attempts != 1+p.retired {
			w.bad(p, "sent %d times", p.attempts)
		}
		if p.early() {
			continue
		}
		for i, s := range p.seen { // the answers come after it
			if !s.end || !bytes.Equal(s.body, p.body) {
				w.bad(p, "server %d got %d bytes, end %v", i, len(s.body), s.end)
			}
			if p.trailers && s.tr != strconv.Itoa(p.id) {
				w.bad(p, "request's trailers %q", s.tr)
			}
		}
	}
}

// sane holds whatever was broken on the way.
func (w *world) sane() {
	for _, p := range w.reqs {
		for _, s := range p.seen {
			if !bytes.HasPrefix(p.body, s.body) {
				w.bad(p, "the server got other bytes than were sent")
			}
			if s.end && len(s.body) != len(p.body) {
				w.bad(p, "the server took %d bytes for the whole request", len(s.body))
			}
			if s.end && p.trailers && s.tr != strconv.Itoa(p.id) {
				w.bad(p, "the request's trailers were lost: %q", s.tr)
			}
		}
		if p.resStatus != p.status || p.local {
			continue
		}
		if p.method != "HEAD" {
			if !bytes.HasPrefix(p.rbody, p.resBody) {
				w.bad(p, "the client got other bytes than were sent")
			}
			cutAsEnd := p.rframing == http1.ToClose && p.cut >= 0 && !p.cutRst // nobody can tell
			if p.resEnd && len(p.resBody) != len(p.rbody) && !cutAsEnd {
				w.bad(p, "the client took %d bytes for the whole answer", len(p.resBody))
			}
		}
	}
}

func TestPump(t *testing.T) {
	n := int64(testseed.Count(200, 1500))
	for _, faults := range []bool{false, true} {
		for pair := range 4 {
			down2, up2 := pair&1 != 0, pair&2 != 0
			t.Run(fmt.Sprintf("down h2=%v up h2=%v faults=%v", down2, up2, faults), func(t *testing.T) {
				t.Parallel()
				for seed := range n {
					pump(t, rand.NewSource(seed*8+int64(pair)), down2, up2, faults)
					if t.Failed() {
						t.Fatalf("seed %d", seed)
					}
				}
			})
		}
	}
}

// reel is a source of what a fuzzer wrote, two bytes a draw, and then of rest.
type reel struct {
	b    []byte
	rest rand.Source
}

// Int63 is rand.Source.
func (t *reel) Int63() int64 {
	if len(t.b) < 2 {
		return t.rest.Int63()
	}
	v := uint32(t.b[0]) | uint32(t.b[1])<<8
	t.b = t.b[2:]
	return int64(v*0x9e3779b1) << 31 >> 1 & math.MaxInt64 // bits high and low depend on both bytes
}

// Seed is rand.Source.
func (t *reel) Seed(seed int64) { t.rest.Seed(seed) }

// FuzzPump: whatever order the events of the two sides come in, however they are
// cut, whoever gives up or goes away: no byte of a message is lost, doubled or
// another's, what is buffered is bounded, and every exchange ends once.
func FuzzPump(f *testing.F) {
	for i := range byte(8) {
		rnd := rand.New(rand.NewSource(int64(i)))
		b := make([]byte, 64+rnd.Intn(200))
		rnd.Read(b)
		f.Add(b, i)
	}
	f.Fuzz(func(t *testing.T, b []byte, how byte) {
		pump(t, &reel{b, rand.NewSource(int64(how))}, how&1 != 0, how&2 != 0, how&4 != 0)
	})
}
