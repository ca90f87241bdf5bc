package http2

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"
)

// recorder is a Handler that writes down its events, one line each, and lets a
// test act in them. Pieces of a body that follow each other are one line.
type recorder struct {
	log       []string
	onHead    func(s *Stream, h *httpmsg.Head, end bool)
	onData    func(s *Stream, p []byte, end bool)
	onTrail   func(s *Stream, f []httpmsg.Field)
	onReset   func(s *Stream, code Code)
	onRefused func(status int, why *StreamError)
	onWrite   func(s *Stream)
	streams   map[uint32]*Stream
	body      *bytes.Buffer // of the last line, when that is data
	bodyID    uint32
}

func (r *recorder) add(s *Stream, format string, args ...any) {
	r.flush()
	id := uint32(0)
	if s != nil {
		id = s.ID()
		if r.streams == nil {
			r.streams = map[uint32]*Stream{}
		}
		r.streams[id] = s
	}
	r.log = append(r.log, fmt.Sprintf("%d ", id)+fmt.Sprintf(format, args...))
}

func (r *recorder) flush() {
	if r.body != nil {
		b := r.body.Bytes()
		text := fmt.Sprintf("%q", b)
		if len(b) > 64 {
			text = fmt.Sprintf("%d bytes %08x", len(b), sum(b))
		}
		r.log = append(r.log, fmt.Sprintf("%d data %s", r.bodyID, text))
		r.body = nil
	}
}

func sum(b []byte) (h uint32) {
	for _, c := range b {
		h = h*16777619 ^ uint32(c)
	}
	return h
}

func (r *recorder) OnHead(s *Stream, h *httpmsg.Head, end bool) {
	r.add(s, "head %s", headText(h, end))
	if r.onHead != nil {
		r.onHead(s, h, end)
	}
}

func headText(h *httpmsg.Head, end bool) string {
	var b strings.Builder
	if h.Status != 0 {
		fmt.Fprintf(&b, "%d", h.Status)
	} else {
		fmt.Fprintf(&b, "%s %s://%s%s", h.Method, h.Scheme, h.Authority, h.Path)
	}
	if h.Upgrade != nil {
		fmt.Fprintf(&b, " upgrade=%s", h.Upgrade)
	}
	fmt.Fprintf(&b, " len=%d", h.Length)
	if h.Expect {
		b.WriteString(" expect")
	}
	b.WriteString(fieldText(h.Fields))
	if end {
		b.WriteString(" end")
	}
	return b.String()
}

func fieldText(f []httpmsg.Field) string {
	var b strings.Builder
	for i := range f {
		fmt.Fprintf(&b, " %s=%q", f[i].Name, f[i].Value)
	}
	return b.String()
}

func (r *recorder) OnData(s *Stream, p []byte, end bool) {
	if r.body == nil || r.bodyID != s.ID() {
		r.flush()
		r.body, r.bodyID = new(bytes.Buffer), s.ID()
	}
	r.body.Write(p)
	if end {
		r.add(s, "end")
	}
	if r.onData != nil {
		r.onData(s, p, end)
	}
}

func (r *recorder) OnTrailers(s *Stream, f []httpmsg.Field) {
	r.add(s, "trailers%s", fieldText(f))
	if r.onTrail != nil {
		r.onTrail(s, f)
	}
}

func (r *recorder) OnReset(s *Stream, code Code) {
	r.add(s, "reset %s", code)
	if r.onReset != nil {
		r.onReset(s, code)
	}
}

func (r *recorder) OnRefused(status int, why *StreamError) {
	if r.onRefused != nil {
		r.onRefused(status, why)
	}
}

func (r *recorder) OnWritable(s *Stream) {
	r.add(s, "writable")
	if r.onWrite != nil {
		r.onWrite(s)
	}
}

func (r *recorder) OnGoAway(last uint32, code Code) { r.add(nil, "goaway %d %s", last, code) }

// take returns the lines since the last take.
func (r *recorder) take() string {
	r.flush()
	s := strings.Join(r.log, "\n")
	r.log = nil
	return s
}

func fields(kv ...string) []httpmsg.Field {
	var f []httpmsg.Field
	for i := 0; i < len(kv); i += 2 {
		f = append(f, httpmsg.Field{Name: []byte(kv[i]), Value: []byte(kv[i+1])})
	}
	return f
}

func get(path string, kv ...string) *httpmsg.Head {
	return &httpmsg.Head{Method: []byte("GET"), Scheme: []byte("http"), Authority: []byte("cart.shop"),
		Path: []byte(path), Fields: fields(kv...)}
}

func respond(status int, kv ...string) *httpmsg.Head {
	return &httpmsg.Head{Status: status, Fields: fields(kv...)}
}

// move gives all that a has to send to b.
func move(t testing.TB, a, b *Conn) { // no t.Helper: it costs as much as a request
	out := a.Out()
	n, err := b.Feed(out)
	if err != nil {
		t.Fatalf("Feed: %v", err)
	}
	if n != len(out) {
		t.Fatalf("Feed took %d of %d bytes", n, len(out))
	}
	a.Sent(n)
}

// settle moves bytes both ways until both are quiet.
func settle(t testing.TB, a, b *Conn) {
	t.Helper()
	for len(a.Out())+len(b.Out()) > 0 {
		move(t, a, b)
		move(t, b, a)
	}
}

// pair makes a client and a server that have exchanged their SETTINGS.
func pair(t testing.TB, client, server Config) (c, s *Conn, ch, sh *recorder) {
	t.Helper()
	ch, sh = new(recorder), new(recorder)
	server.Server = true
	c, s = New(client, ch), New(server, sh)
	settle(t, c, s)
	return c, s, ch, sh
}

// echo answers every request the way a busy service does, without a word on paper.
type echo struct {
	head httpmsg.Head
	body []byte
	got  int
}

func (e *echo) OnHead(s *Stream, h *httpmsg.Head, end bool) {
	if h.Status != 0 {
		return
	}
	s.WriteHead(&e.head, false)
	s.WriteData(e.body, true)
}
func (e *echo) OnData(s *Stream, p []byte, end bool) {
	s.Credit(len(p))
	if end {
		e.got++
	}
}
func (e *echo) OnTrailers(*Stream, []httpmsg.Field) {}
func (e *echo) OnReset(*Stream, Code)               {}
func (e *echo) OnRefused(int, *StreamError)         {}
func (e *echo) OnWritable(*Stream)                  {}
func (e *echo) OnGoAway(uint32, Code)               {}

// warmPair is a client and a server that have talked, and one request between them.
func warmPair(t testing.TB) (request func(), h *echo) {
	h = &echo{head: *respond(200, "content-length", "12", "content-type", "text/plain", "server", "app/1.2",
		"date", "Sat, 29 Nov 2025 10:00:00 GMT", "x-aether-outcome", "ok"), body: []byte("hello world\n")}
	c, s := New(Config{}, h), New(Config{Server: true}, h)
	settle(t, c, s)
	head := get("/items?x=1", "user-agent", "fortio.org/fortio-1.60", "accept", "*/*", "accept-encoding", "gzip",
		"x-forwarded-proto", "http", "x-forwarded-client-cert", "By=spiffe://td/ns/shop/sa/cart;URI=spiffe://td/ns/shop/sa/web",
		"traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "x-envoy-attempt-count", "1")
	request = func() {
		st, err := c.Open()
		if err != nil {
			t.Fatal(err)
		}
		st.WriteHead(head, true)
		move(t, c, s)
		move(t, s, c)
		c.Reap()
		s.Reap()
	}
	for range 50 {
		request()
	}
	return request, h
}

func TestRoundTripAllocs(t *testing.T) {
	request, _ := warmPair(t)
	if n := testing.AllocsPerRun(1000, request); n != 0 {
		t.Errorf("%v allocations a request, want 0", n)
	}
}

// BenchmarkRoundTrip is a request of ten fields and its 12-byte response,
// encoding and decoding at both ends.
func BenchmarkRoundTrip(b *testing.B) {
	request, h := warmPair(b)
	h.got = 0
	b.ReportAllocs()
	for b.Loop() {
		request()
	}
	if h.got != b.N {
		b.Fatalf("%d responses to %d requests", h.got, b.N)
	}
}
