package http2

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"

	oracle "golang.org/x/net/http2"
)

// An attack is one of the published ones, as frames on a connection that was
// warm before: the peer has banked all the forgiveness that there is.
type attack struct {
	name   string
	client bool // we are the client, the server attacks
	// begin brings the connection to where the attack starts.
	begin func(w *wire)
	// round writes the frames of one round, each of which makes work.
	round func(w *wire, i int)
	// rounds at most until GOAWAY ENHANCE_YOUR_CALM, in one Tick's time.
	rounds int
	// work is how many events of the Handler those rounds may raise: what the layers
	// above are made to do.
	work int
	// read: the attacker reads what we send, so that no bound on output helps.
	read bool
}

// streamOf is the identifier of the i-th request after those of bank.
func streamOf(i int) uint32 { return uint32(2*(i+bankedRequests) + 1) }

const bankedRequests = maxBanked/usefulWorth/2 + 1

// bank has a server answer so many requests that nothing more can be banked.
func bank(w *wire) {
	for i := range bankedRequests {
		id := uint32(2*i + 1)
		w.head(id, true, getRoot...)
		if code := w.feed(); code != "" {
			w.t.Fatal(code)
		}
		s := w.h.streams[id]
		s.WriteHead(respond(200), false)
		s.WriteData([]byte("some text"), true)
		w.c.Sent(len(w.c.Out()))
		w.c.Reap()
		delete(w.h.streams, id)
	}
	w.WriteWindowUpdate(0, 1<<30) // what was used of the connection's window
	w.feed()
	w.h.take()
}

const allUseless = maxUseless + maxBanked + 1

var attacks = []attack{
	{name: "rapid reset, CVE-2023-44487 (case 58)", read: true, rounds: 1001, work: 2 * 1001, round: func(w *wire, i int) {
		w.head(streamOf(i), true, getRoot...)
		w.WriteRSTStream(streamOf(i), oracle.ErrCodeCancel)
	}},
	{name: "made you reset by WINDOW_UPDATE 0, CVE-2025-8671 (case 59)", read: true, rounds: maxProvoked + 1, work: 2*maxProvoked + 2, round: func(w *wire, i int) {
		w.head(streamOf(i), true, getRoot...)
		w.WriteWindowUpdate(streamOf(i), 0)
	}},
	{name: "made you reset by overflow", read: true, rounds: maxProvoked + 1, work: 2*maxProvoked + 2, round: func(w *wire, i int) {
		w.head(streamOf(i), true, getRoot...)
		w.WriteWindowUpdate(streamOf(i), 1<<31-1)
	}},
	{name: "made you reset by DATA after the end (case 59)", read: true, rounds: maxProvoked + 1, work: 2*maxProvoked + 2, round: func(w *wire, i int) {
		w.head(streamOf(i), true, getRoot...)
		w.WriteData(streamOf(i), true, []byte("x"))
	}},
	{name: "made you reset by HEADERS after the end", read: true, rounds: maxProvoked + 1, work: 2*maxProvoked + 2, round: func(w *wire, i int) {
		w.head(streamOf(i), true, getRoot...)
		w.head(streamOf(i), true, "x", "y")
	}},
	{name: "made you reset by content-length", read: true, rounds: maxProvoked + 1, work: 2*maxProvoked + 2, round: func(w *wire, i int) {
		w.head(streamOf(i), false, append(slices.Clone(postRoot), "content-length", "1")...)
		w.WriteData(streamOf(i), false, []byte("longer"))
	}},
	{name: "malformed requests", read: true, rounds: maxProvoked + 1, round: func(w *wire, i int) {
		w.head(streamOf(i), true, ":method", "GET")
	}},
	{name: "requests beyond MAX_CONCURRENT_STREAMS", read: true, rounds: allUseless, begin: func(w *wire) {
		for i := range 1000 {
			w.head(streamOf(i), true, getRoot...)
		}
	}, round: func(w *wire, i int) {
		w.head(streamOf(1000+i), true, getRoot...)
	}},
	{name: "CONTINUATION flood, VU#421644 (case 57)", rounds: maxContinuations + 1, begin: func(w *wire) {
		w.WriteRawFrame(oracle.FrameHeaders, 0, streamOf(0), []byte{0x82})
	}, round: func(w *wire, i int) {
		w.WriteContinuation(streamOf(0), false, []byte{0x82})
	}},
	{name: "CONTINUATION flood, empty frames", rounds: maxContinuations + 1, begin: func(w *wire) {
		w.WriteRawFrame(oracle.FrameHeaders, 0, streamOf(0), nil)
	}, round: func(w *wire, i int) {
		w.WriteContinuation(streamOf(0), false, nil)
	}},
	{name: "CONTINUATION flood, full frames", rounds: 2*61440/maxFrame + 2, begin: func(w *wire) {
		w.WriteRawFrame(oracle.FrameHeaders, 0, streamOf(0), make([]byte, maxFrame))
	}, round: func(w *wire, i int) {
		w.WriteContinuation(streamOf(0), false, make([]byte, maxFrame))
	}},
	{name: "HPACK bomb", rounds: 1, round: func(w *wire, i int) {
		b := w.fields("n", strings.Repeat("v", 4000)) // and then a byte each
		w.WriteHeaders(oracle.HeadersFrameParam{StreamID: streamOf(i), EndHeaders: true, EndStream: true,
			BlockFragment: append(b, strings.Repeat("\xbe", 12000)...)})
	}},
	{name: "SETTINGS flood, CVE-2019-9515", read: true, rounds: allUseless, round: func(w *wire, i int) { w.WriteSettings() }},
	{name: "SETTINGS flood, unread", rounds: 2*maxAcks + 1, round: func(w *wire, i int) { w.WriteSettings() }},
	{name: "SETTINGS that move 1000 windows each", read: true, rounds: allUseless / (1000 / streamsWork), begin: func(w *wire) {
		w.WriteSettings(oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 0})
		w.h.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) {
			s.WriteHead(respond(200), false)
			s.WriteData(make([]byte, 1000), true)
		}
		w.h.onWrite = func(s *Stream) { s.WriteData(make([]byte, 1000), true) }
		for i := range 1000 {
			w.head(streamOf(i), true, getRoot...)
		}
	}, round: func(w *wire, i int) {
		w.WriteSettings(oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: uint32(1 + i)})
	}, work: 1000 * (allUseless/(1000/streamsWork) + 2)},
	{name: "SETTINGS of many entries", read: true, rounds: allUseless/(6*2000/settingsWork) + 1, round: func(w *wire, i int) {
		w.WriteSettings(make([]oracle.Setting, 2000)...)
	}},
	{name: "PING flood, CVE-2019-9512", read: true, rounds: allUseless, round: func(w *wire, i int) { w.WritePing(false, [8]byte{}) }},
	{name: "PING flood, unread", rounds: 2*maxAcks + 1, round: func(w *wire, i int) { w.WritePing(false, [8]byte{}) }},
	{name: "answers to no PING", read: true, rounds: allUseless, round: func(w *wire, i int) { w.WritePing(true, [8]byte{}) }},
	{name: "empty DATA, CVE-2019-9518 (case 56)", read: true, rounds: allUseless, begin: func(w *wire) {
		w.head(streamOf(0), false, postRoot...)
	}, round: func(w *wire, i int) { w.WriteData(streamOf(0), false, nil) }, work: 1},
	{name: "DATA of padding alone", read: true, rounds: allUseless, begin: func(w *wire) {
		w.head(streamOf(0), false, postRoot...)
	}, round: func(w *wire, i int) { w.WriteDataPadded(streamOf(0), false, nil, make([]byte, 200)) }, work: 1},
	{name: "empty DATA and single bytes in turn (case 56)", read: true, rounds: allUseless, begin: func(w *wire) {
		w.head(streamOf(0), false, postRoot...)
	}, round: func(w *wire, i int) {
		w.WriteData(streamOf(0), false, nil)
		w.WriteData(streamOf(0), false, []byte{1})
	}, work: allUseless + 1},
	{name: "empty DATA on a stream that was reset", read: true, rounds: allUseless, begin: func(w *wire) {
		w.h.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) { s.Reset(Cancel) }
		w.head(streamOf(0), false, postRoot...)
	}, round: func(w *wire, i int) { w.WriteData(streamOf(0), true, nil) }, work: 1},
	{name: "HEADERS on a stream that was reset", read: true, rounds: allUseless, begin: func(w *wire) {
		w.h.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) { s.Reset(Cancel) }
		w.head(streamOf(0), false, postRoot...)
	}, round: func(w *wire, i int) { w.head(streamOf(0), true, "x", "y") }, work: 1},
	{name: "RST_STREAM of a stream that is over, CVE-2019-9514", read: true, rounds: allUseless, round: func(w *wire, i int) {
		w.WriteRSTStream(1, oracle.ErrCodeCancel)
	}},
	{name: "PRIORITY flood, CVE-2019-9513", read: true, rounds: allUseless, round: func(w *wire, i int) {
		w.WritePriority(streamOf(i%100), oracle.PriorityParam{StreamDep: 1})
	}},
	{name: "WINDOW_UPDATE flood on the connection", read: true, rounds: allUseless, round: func(w *wire, i int) { w.WriteWindowUpdate(0, 1) }},
	{name: "WINDOW_UPDATE flood on a stream", read: true, rounds: allUseless, begin: func(w *wire) {
		w.head(streamOf(0), true, getRoot...)
	}, round: func(w *wire, i int) { w.WriteWindowUpdate(streamOf(0), 1) }, work: 1},
	{name: "WINDOW_UPDATE flood on a stream that is over", read: true, rounds: allUseless, round: func(w *wire, i int) { w.WriteWindowUpdate(1, 1) }},
	{name: "data dribble, CVE-2019-9511", read: true, rounds: allUseless, begin: func(w *wire) {
		w.WriteSettings(oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 0})
		w.h.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) {
			s.WriteHead(respond(200), false)
			s.WriteData(make([]byte, 1<<20), true)
		}
		w.h.onWrite = func(s *Stream) { s.WriteData(make([]byte, 1<<20), true) }
		w.head(streamOf(0), true, getRoot...)
	}, round: func(w *wire, i int) { w.WriteWindowUpdate(streamOf(0), 1) }, work: allUseless + 1},
	{name: "frames of an unknown type", read: true, rounds: allUseless, round: func(w *wire, i int) {
		w.WriteRawFrame(0xbe, 0, 0, nil)
	}},
	{name: "GOAWAY flood", read: true, rounds: allUseless, round: func(w *wire, i int) { w.WriteGoAway(0, oracle.ErrCodeNo, nil) }, work: allUseless},
	{name: "interim heads of a stream that was reset for them", client: true, read: true, rounds: allUseless + maxInterim, round: func(w *wire, i int) {
		w.head(1, false, ":status", "103")
	}, work: maxInterim + 1},
	{name: "SETTINGS flood of a server", client: true, read: true, rounds: allUseless, round: func(w *wire, i int) { w.WriteSettings() }},
	{name: "PING flood of a server", client: true, read: true, rounds: allUseless, round: func(w *wire, i int) { w.WritePing(false, [8]byte{}) }},
}

// TestAttacks: each ends the connection after a bounded number of frames (our
// CPU) and of events (that of the layers above), and holds bounded memory.
func TestAttacks(t *testing.T) {
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			w := newWire(t, Config{Server: !a.client})
			if a.client {
				s, err := w.c.Open()
				if err != nil {
					t.Fatal(err)
				}
				s.WriteHead(get("/"), true)
			} else {
				bank(w)
			}
			if a.begin != nil {
				a.begin(w)
				if code := w.feed(); code != "" {
					t.Fatalf("before the attack: %s", code)
				}
			}
			w.c.Sent(len(w.c.Out()))
			w.h.take()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			n, most, events := 0, 0, 0
			count := func() { // not what fail tells the streams
				for _, l := range w.h.log {
					if !strings.HasSuffix(l, " reset ENHANCE_YOUR_CALM") {
						events++
					}
				}
				w.h.take()
			}
			code := ""
			for ; code == "" && n <= 10*a.rounds; n++ {
				a.round(w, n)
				_, err := w.c.Feed(w.in.Bytes())
				w.in.Reset()
				w.h.flush()
				count()
				most = max(most, len(w.c.Out()))
				if err != nil {
					code = err.(*ConnError).Code.String()
				} else if a.read {
					w.c.Sent(len(w.c.Out()))
				}
				w.c.Reap()
				clear(w.h.streams)
			}
			if code != "ENHANCE_YOUR_CALM" || n > a.rounds {
				t.Errorf("%q after %d rounds, want ENHANCE_YOUR_CALM after at most %d", code, n, a.rounds)
			}
			if out := w.frames(); !strings.HasSuffix(out, "ENHANCE_YOUR_CALM") || !strings.Contains(out, "GOAWAY") {
				t.Errorf("sends %.300q, want GOAWAY last", out)
			}
			if events > a.work {
				t.Errorf("%d events for the layers above, want at most %d", events, a.work)
			}
			if limit := 2 * maxAcks * 17; most > limit+(64<<10) {
				t.Errorf("%d bytes of output queued", most)
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 2<<20 {
				t.Errorf("%d bytes more are held", grown)
			}
			runtime.KeepAlive(w)
		})
	}
}

// TestTick: what a correct peer does in the long run is no attack, as long as time passes.
func TestTick(t *testing.T) {
	w := server(t)
	id := uint32(1)
	for range 500 { // seconds
		w.c.Tick()
		for range 900 { // keepalive, and more
			w.WritePing(false, [8]byte{})
		}
		for range maxRapid { // requests that are given up before their answer
			w.head(id, true, getRoot...)
			w.WriteRSTStream(id, oracle.ErrCodeCancel)
			id += 2
		}
		for range forgiven { // and a client with a fault
			w.head(id, true, getRoot...)
			w.WriteWindowUpdate(id, 0)
			id += 2
		}
		if code := w.feed(); code != "" {
			t.Fatal(code)
		}
		w.c.Sent(len(w.c.Out()))
		w.c.Reap()
		w.h.take()
		clear(w.h.streams)
	}
}

// TestUnreadHeads: a client that has a thousand big heads made, and reads none, loses
// the connection before they take more than a bounded part of memory.
func TestUnreadHeads(t *testing.T) {
	w := server(t)
	for i := range 1000 {
		w.head(uint32(2*i+1), true, getRoot...)
	}
	w.feed()
	w.h.take()
	h := respond(200)
	for i := range 6 {
		h.Add([]byte(fmt.Sprint("x-", i)), []byte(strings.Repeat(string(rune('a'+i)), 10000)))
	}
	wrote := 0
	for _, s := range w.h.streams {
		s.WriteHead(h, false)
		wrote++
		s.WriteTrailers(fields("x", "y"))
	}
	if n := len(w.c.Out()); n > maxHeads+70000 || n < maxHeads {
		t.Errorf("%d bytes of %d heads are queued, want %d at most", n, wrote, maxHeads)
	}
	w.want(w.doomed("ENHANCE_YOUR_CALM"), "ENHANCE_YOUR_CALM")

	// A client of ours opens no stream on a connection that does not drain.
	w = newWire(t, Config{}, oracle.Setting{ID: oracle.SettingMaxConcurrentStreams, Val: 1000})
	ask := get("/")
	ask.Fields = h.Fields
	n := 0
	for ; w.c.Available() > 0; n++ {
		s, err := w.c.Open()
		if err != nil {
			t.Fatal(err)
		}
		s.WriteHead(ask, true)
	}
	if _, err := w.c.Open(); err != ErrTooManyStreams || n >= 1000 || len(w.c.Out()) > maxHeads {
		t.Errorf("%d streams, %d bytes, then %v", n, len(w.c.Out()), err)
	}
	w.c.Sent(len(w.c.Out()))
	if w.c.Available() == 0 {
		t.Error("no stream though all was sent")
	}
}
