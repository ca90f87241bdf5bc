package http2

import (
	"testing"

	"aether/dataplane/httpmsg"

	oracle "golang.org/x/net/http2"
)

// TestSmallWindows: a client that takes an answer in small pieces, as of a memory that it has little of, is served to the
// end, and one that takes it in crumbs is an attacker (CVE-2019-9511).
func TestSmallWindows(t *testing.T) {
	for window, want := range map[uint32]string{8: "", 7: "ENHANCE_YOUR_CALM"} {
		w := newWire(t, Config{Server: true})
		body := make([]byte, 1<<20)
		write := func(s *Stream) { body = body[s.WriteData(body, true):] }
		w.h.onHead = func(s *Stream, _ *httpmsg.Head, _ bool) { s.WriteHead(respond(200), false); write(s) }
		w.h.onWrite = write
		w.WriteSettings(oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 0})
		w.WriteWindowUpdate(0, 1<<30)
		w.head(1, true, getRoot...)
		code := w.feed()
		for n := 0; n < 2*allUseless && code == ""; n++ {
			w.WriteWindowUpdate(1, window)
			_, err := w.c.Feed(w.in.Bytes())
			w.in.Reset()
			w.h.flush()
			if w.c.Sent(len(w.c.Out())); err != nil {
				code = err.(*ConnError).Code.String()
			}
		}
		if code != want {
			t.Errorf("windows of %d bytes: %q, want %q", window, code, want)
		}
	}
}
