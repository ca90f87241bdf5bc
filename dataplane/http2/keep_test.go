package http2

import (
	"strings"
	"testing"

	"aether/dataplane/httpmsg"

	oracle "golang.org/x/net/http2"
)

// TestKeep: bytes that the driver keeps cost the other streams nothing, and their own stream
// its window until they are credited.
func TestKeep(t *testing.T) {
	const window = initWindow
	w := newWire(t, Config{Server: true, StreamWindow: window, ConnWindow: window})
	streams := map[uint32]*Stream{}
	w.h.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) { streams[s.ID()] = s }
	updates := func() string {
		w.t.Helper()
		if code := w.feed(); code != "" {
			t.Fatal(code)
		}
		balanced(t, w.c)
		return w.frames()
	}
	data := func(id uint32) {
		for n := window; n > 0; n -= min(n, maxFrame) {
			w.WriteData(id, false, make([]byte, min(n, maxFrame)))
		}
	}
	w.head(1, false, postRoot...)
	w.head(3, false, postRoot...)
	data(1)
	if got := updates(); strings.Contains(got, "WINDOW_UPDATE") {
		t.Errorf("nothing was taken: %s", got)
	}
	streams[1].Keep(window)
	streams[1].Keep(1) // there is no more
	if w.c.recvWin != window || streams[1].recvWin != 0 {
		t.Errorf("kept: windows %d and %d", w.c.recvWin, streams[1].recvWin)
	}
	data(3)
	updates()
	if streams[3].held != window {
		t.Errorf("the other stream got %d bytes", streams[3].held)
	}
	before := w.c.recvWin + int64(w.c.credit)
	streams[1].Credit(window + 1)
	if now := w.c.recvWin + int64(w.c.credit); now != before || streams[1].recvWin != window {
		t.Errorf("credited: %d more for the connection, window %d", now-before, streams[1].recvWin)
	}
	balanced(t, w.c)
	streams[3].Keep(window)
	w.WriteRSTStream(3, oracle.ErrCodeCancel) // what it kept has been given back
	updates()
	w.c.Reap()
	balanced(t, w.c)
}

// TestKnownClient: one whose identity is verified, and who sends the requests of many, may give up
// ten times as many, and no more.
func TestKnownClient(t *testing.T) {
	for known, may := range map[bool]struct{ most, again int }{false: {1000, 100}, true: {10_000, 1000}} {
		w := newWire(t, Config{Server: true, Known: known})
		id := uint32(1)
		giveUp := func(n int) string {
			for range n {
				w.head(id, true, getRoot...)
				w.WriteRSTStream(id, oracle.ErrCodeCancel)
				id += 2
			}
			code := w.feed()
			w.c.Sent(len(w.c.Out()))
			w.c.Reap()
			w.h.take()
			return code
		}
		if code := giveUp(may.most); code != "" {
			t.Errorf("known %v: %s after what it may", known, code)
		}
		w.c.Tick()
		if code := giveUp(may.again); code != "" {
			t.Errorf("known %v: %s after a Tick", known, code)
		}
		if code := giveUp(1); code != "ENHANCE_YOUR_CALM" {
			t.Errorf("known %v: %q after one more", known, code)
		}
	}
}

// TestTired: a client notices when it has given up half of what a server bears; answers
// and time make up for it.
func TestTired(t *testing.T) {
	w := newWire(t, Config{})
	open := func() *Stream {
		s, err := w.c.Open()
		if err != nil {
			t.Fatal(err)
		}
		s.WriteHead(&httpmsg.Head{Method: []byte("GET"), Path: []byte("/"), Authority: []byte("a")}, true)
		w.c.Sent(len(w.c.Out()))
		return s
	}
	for range 500 {
		open().Reset(Cancel)
		w.c.Reap()
	}
	if w.c.Tired() {
		t.Error("too early")
	}
	s := open()
	w.head(s.ID(), true, ":status", "200")
	if code := w.feed(); code != "" {
		t.Fatal(code)
	}
	open().Reset(Cancel)
	if w.c.Tired() {
		t.Error("an answer does not make up for one")
	}
	open().Reset(Cancel)
	if !w.c.Tired() {
		t.Error("it does not notice")
	}
	w.c.Tick()
	if w.c.Tired() {
		t.Error("time does not make up for any")
	}
}
