package http2

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"
	"aether/e2e/testseed"

	oracle "golang.org/x/net/http2"
)

// allowance is what the peer of a test lets us send, kept by the words of RFC 9113
// 6.9 and by nothing of ours.
type allowance struct {
	conn    int64
	initial int64 // as the last SETTINGS sent say
	changes []change
	stream  map[uint32]int64
	got     map[uint32]*bytes.Buffer
	ended   map[uint32]bool
}

// change is one of the initial window (or header table) that we have not acknowledged yet: until
// then what was allowed before may be on its way.
type change struct {
	delta int64
	below uint32  // of streams before this one
	table *uint32 // instead: the header table's size
}

// take reads what the Conn sends, DATA against the allowance and heads with
// x/net's decoder, whose table has the size that the peer announced.
func (a *allowance) take(w *wire) {
	w.t.Helper()
	w.out.Write(w.c.Out())
	w.c.Sent(len(w.c.Out()))
	for w.out.Len() > 0 {
		f, err := w.ReadFrame()
		if err != nil {
			w.t.Fatal(err)
		}
		id := f.Header().StreamID
		switch f := f.(type) {
		case *oracle.DataFrame:
			n := int64(f.Length)
			a.conn -= n
			a.stream[id] -= n
			if n > 0 && (a.conn < 0 || a.stream[id] < 0) {
				w.t.Fatalf("DATA of %d bytes on stream %d leaves windows of %d and %d", n, id, a.stream[id], a.conn)
			}
			a.got[id].Write(f.Data())
			if f.StreamEnded() {
				a.ended[id] = true
			}
		case *oracle.HeadersFrame:
			if !f.HeadersEnded() {
				w.t.Fatal("a head in several frames")
			}
			h, err := w.dec.DecodeFull(f.HeaderBlockFragment())
			if err != nil {
				w.t.Fatalf("stream %d: %v", id, err)
			}
			want := map[string]string{":status": "200", "x-id": fmt.Sprint(id), "x-same": "as ever", "content-type": "text/plain"}
			for _, f := range h {
				if want[f.Name] != f.Value {
					w.t.Fatalf("stream %d: %s is %q, want %q", id, f.Name, f.Value, want[f.Name])
				}
				delete(want, f.Name)
			}
			if len(want) > 0 {
				w.t.Fatalf("stream %d lacks %v", id, want)
			}
		case *oracle.SettingsFrame:
			c := a.changes[0]
			a.changes = a.changes[1:]
			if c.table != nil {
				w.dec.SetAllowedMaxDynamicTableSize(*c.table)
			}
			for id := range a.stream {
				if id < c.below {
					a.stream[id] += c.delta
				}
			}
		default:
			w.t.Fatalf("we sent %v", f)
		}
	}
}

// TestAnyWindow: whatever the peer does with its windows and its header table,
// from an initial window of 0 on and in mid-stream, no byte is sent that it did
// not allow, and all are sent once it does.
func TestAnyWindow(t *testing.T) {
	rounds := testseed.Count(60, 400)
	for seed := range uint64(rounds) {
		anyWindow(t, seed)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func anyWindow(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	initial := []uint32{0, 1, 5, 100, 16384, 65535, 1 << 20, 1 << 30}[rng.IntN(8)]
	a := &allowance{conn: initWindow, initial: int64(initial), stream: map[uint32]int64{}, got: map[uint32]*bytes.Buffer{}, ended: map[uint32]bool{}}
	w := newWire(t, Config{Server: true}, oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: initial})
	rest := map[*Stream][]byte{}
	push := func(s *Stream) { rest[s] = rest[s][s.WriteData(rest[s], true):] }
	bodies := map[uint32][]byte{}
	w.h.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) {
		rest[s] = bodies[s.ID()]
		s.WriteHead(respond(200, "x-id", fmt.Sprint(s.ID()), "x-same", "as ever", "content-type", "text/plain"), false)
		push(s)
	}
	w.h.onWrite = push
	next := uint32(1)
	for range 60 {
		for range 1 + rng.IntN(3) { // frames of the peer that arrive together
			switch rng.IntN(7) {
			case 0, 1:
				if len(bodies) == 20 {
					break
				}
				body := noise(1 + rng.IntN(200_000))
				bodies[next], a.stream[next], a.got[next] = body, a.initial, new(bytes.Buffer)
				w.head(next, true, getRoot...)
				next += 2
			case 2:
				n := int64(1 + rng.IntN(50_000))
				w.WriteWindowUpdate(0, uint32(n))
				a.conn += n
			case 3, 4:
				if len(bodies) == 0 {
					break
				}
				id := uint32(2*rng.IntN(len(bodies)) + 1)
				n := int64(1 + rng.IntN(50_000))
				w.WriteWindowUpdate(id, uint32(n))
				a.stream[id] += n
			case 5:
				v := []int64{0, 1, 1000, 70_000, 1 << 20}[rng.IntN(5)]
				a.changes = append(a.changes, change{delta: v - a.initial, below: next})
				w.WriteSettings(oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: uint32(v)})
				a.initial = v
			case 6:
				size := []uint32{0, 1, 100, 4096, 1 << 20}[rng.IntN(5)]
				w.WriteSettings(oracle.Setting{ID: oracle.SettingHeaderTableSize, Val: size})
				a.changes = append(a.changes, change{table: &size})
			}
		}
		if code := w.feed(); code != "" {
			t.Fatalf("seed %d: %s, %v", seed, code, w.c.err)
		}
		a.take(w)
		w.c.Tick()
	}
	// And now the peer reads on.
	for range 200 {
		if w.c.Streams() == 0 {
			break
		}
		if n := int64(1 << 20); a.conn < n {
			w.WriteWindowUpdate(0, uint32(n))
			a.conn += n
		}
		for id := range a.stream {
			if !a.ended[id] && a.stream[id] < 10_000 {
				w.WriteWindowUpdate(id, 60_000)
				a.stream[id] += 60_000
			}
		}
		if code := w.feed(); code != "" {
			t.Fatalf("seed %d: %s", seed, code)
		}
		for len(w.c.Out()) > 0 {
			a.take(w)
		}
	}
	for id, body := range bodies {
		if !a.ended[id] || !bytes.Equal(a.got[id].Bytes(), body) {
			t.Fatalf("seed %d: stream %d: %d of %d bytes, ended %v", seed, id, a.got[id].Len(), len(body), a.ended[id])
		}
	}
	w.h.take()
	balanced(t, w.c)
}

// TestUpload is the other direction: what the peer may send is what it is told, to
// the byte, padding included, and a body passes however small the window is.
func TestUpload(t *testing.T) {
	for _, window := range []int{1, 2, 100, 65535, 300_000} {
		t.Run(fmt.Sprint(window), func(t *testing.T) {
			w := newWire(t, Config{Server: true, StreamWindow: window, ConnWindow: 65535})
			var got bytes.Buffer
			held := 0
			w.h.onData = func(s *Stream, p []byte, end bool) {
				got.Write(p)
				held += len(p)
			}
			w.head(1, false, postRoot...)
			body := noise(min(50*window, 500_000))
			conn, stream := initWindow, window
			for sent := 0; sent < len(body); {
				n := min(conn, stream, len(body)-sent, maxFrame)
				if n <= 0 {
					t.Fatalf("no window after %d bytes", sent)
				}
				w.WriteData(1, sent+n == len(body), body[sent:sent+n])
				sent, conn, stream = sent+n, conn-n, stream-n
				if code := w.feed(); code != "" {
					t.Fatalf("after %d bytes: %s", sent, code)
				}
				if sent < len(body) {
					w.h.streams[1].Credit(held)
				}
				held = 0
				for _, line := range strings.Split(w.frames(), "\n") {
					var id uint32
					var n int
					if _, err := fmt.Sscanf(line, "WINDOW_UPDATE %d %d", &id, &n); err != nil {
						continue
					}
					if id == 0 {
						conn += n
					} else {
						stream += n
					}
				}
				w.h.log = nil
			}
			if !bytes.Equal(got.Bytes(), body) {
				t.Errorf("%d of %d bytes", got.Len(), len(body))
			}
			if window < 60_000 { // a byte more than was allowed
				w.head(3, false, postRoot...)
				w.WriteData(3, false, make([]byte, window+1))
				w.feed()
				if out := w.frames(); !strings.HasSuffix(out, "RST_STREAM 3 FLOW_CONTROL_ERROR") {
					t.Errorf("sends %s", out)
				}
			}
		})
	}
}
