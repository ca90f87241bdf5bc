package outbound

import (
	"aether/dataplane/http2"
	"aether/dataplane/httpmsg"
)

// h2Authority reads the authority of the first request in b, which begins with
// the HTTP/2 preface. more: the first HEADERS frame is not there yet. It is
// needed only for h2c to an address that is not the mesh's.
func h2Authority(b []byte) (host string, more bool) {
	f := &firstHead{}
	c := http2.New(http2.Config{Server: true, EnableConnect: true}, f)
	if _, err := c.Feed(b); err != nil {
		return "", false
	}
	return f.host, !f.seen
}

// firstHead is an http2.Handler that remembers one authority.
type firstHead struct {
	host string
	seen bool
}

func (f *firstHead) OnHead(_ *http2.Stream, h *httpmsg.Head, _ bool) {
	if !f.seen {
		f.seen, f.host = true, string(h.Authority)
	}
}
func (f *firstHead) OnData(*http2.Stream, []byte, bool)        {}
func (f *firstHead) OnTrailers(*http2.Stream, []httpmsg.Field) {}
func (f *firstHead) OnReset(*http2.Stream, http2.Code)         {}
func (f *firstHead) OnWritable(*http2.Stream)                  {}
func (f *firstHead) OnGoAway(uint32, http2.Code)               {}
