package http1

import (
	"bytes"
	"net/http"
	"strings"
	"testing"

	"aether/dataplane/httpmsg"
)

func fields(s ...string) (f []httpmsg.Field) {
	for i := 0; i < len(s); i += 2 {
		f = append(f, httpmsg.Field{Name: []byte(s[i]), Value: []byte(s[i+1])})
	}
	return f
}

func TestAppendRequest(t *testing.T) {
	for _, tt := range []struct {
		name string
		h    httpmsg.Head
		want string
	}{
		{"plain", httpmsg.Head{Method: []byte("GET"), Authority: []byte("a:80"), Path: []byte("/x?y"), Fields: fields("accept", "*/*", "x", "")},
			"GET /x?y HTTP/1.1\r\nhost: a:80\r\naccept: */*\r\nx: \r\n\r\n"},
		{"empty path and authority", httpmsg.Head{Method: []byte("GET")}, "GET / HTTP/1.1\r\nhost: \r\n\r\n"},
		{"options", httpmsg.Head{Method: []byte("OPTIONS"), Path: []byte("*")}, "OPTIONS * HTTP/1.1\r\nhost: \r\n\r\n"},
		{"length is made anew", httpmsg.Head{Method: []byte("PUT"), Path: []byte("/"), Length: 7, Fields: fields("content-length", "5", "x", "1", "content-length", "6")},
			"PUT / HTTP/1.1\r\nhost: \r\nx: 1\r\ncontent-length: 7\r\n\r\n"},
		{"post without a body", httpmsg.Head{Method: []byte("POST"), Path: []byte("/")}, "POST / HTTP/1.1\r\nhost: \r\ncontent-length: 0\r\n\r\n"},
		{"get that said zero", httpmsg.Head{Method: []byte("GET"), Path: []byte("/"), Fields: fields("content-length", "0")}, "GET / HTTP/1.1\r\nhost: \r\ncontent-length: 0\r\n\r\n"},
		{"chunked", httpmsg.Head{Method: []byte("GET"), Path: []byte("/"), Length: httpmsg.Unknown, Fields: fields("transfer-encoding", "gzip", "content-length", "9")},
			"GET / HTTP/1.1\r\nhost: \r\ntransfer-encoding: chunked\r\n\r\n"},
		{"te", httpmsg.Head{Method: []byte("GET"), Path: []byte("/"), Fields: fields("te", "trailers", "x", "1")}, "GET / HTTP/1.1\r\nhost: \r\nx: 1\r\nte: trailers\r\nconnection: te\r\n\r\n"},
		{"upgrade", httpmsg.Head{Method: []byte("GET"), Path: []byte("/"), Upgrade: []byte("websocket")}, "GET / HTTP/1.1\r\nHost: \r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"},
		{"te and upgrade", httpmsg.Head{Method: []byte("GET"), Path: []byte("/"), Upgrade: []byte("foo"), Fields: fields("te", "trailers")},
			"GET / HTTP/1.1\r\nHost: \r\nte: trailers\r\nConnection: te, Upgrade\r\nUpgrade: foo\r\n\r\n"},
		{"fields that are not the caller's to set", httpmsg.Head{Method: []byte("GET"), Path: []byte("/"), Authority: []byte("a"),
			Fields: fields("host", "b", "connection", "x", "keep-alive", "5", "proxy-connection", "x", "upgrade", "h2c")}, "GET / HTTP/1.1\r\nhost: a\r\n\r\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := string(AppendRequest([]byte("before "), &tt.h, RequestFraming(&tt.h))); got != "before "+tt.want {
				t.Errorf("got  %q\nwant %q", got, "before "+tt.want)
			}
		})
	}
}

func TestAppendResponse(t *testing.T) {
	o11 := ResponseOptions{Minor: 1}
	for _, tt := range []struct {
		name string
		h    httpmsg.Head
		f    Framing
		o    ResponseOptions
		want string
	}{
		{"plain", httpmsg.Head{Status: 200, Length: 2, Fields: fields("x", "1", "content-length", "9")}, Length, o11, "HTTP/1.1 200 OK\r\nx: 1\r\ncontent-length: 2\r\n\r\n"},
		{"chunked", httpmsg.Head{Status: 200}, Chunked, o11, "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"},
		{"unknown status", httpmsg.Head{Status: 799}, Length, o11, "HTTP/1.1 799 \r\ncontent-length: 0\r\n\r\n"},
		{"none says zero", httpmsg.Head{Status: 421, Length: 5}, None, o11, "HTTP/1.1 421 Misdirected Request\r\ncontent-length: 0\r\n\r\n"},
		{"close", httpmsg.Head{Status: 200}, Length, ResponseOptions{Minor: 1, Close: true}, "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"},
		{"to close", httpmsg.Head{Status: 200}, ToClose, ResponseOptions{}, "HTTP/1.0 200 OK\r\nconnection: close\r\n\r\n"},
		{"1.0", httpmsg.Head{Status: 200, Length: 1}, Length, ResponseOptions{}, "HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\n"},
		{"1.0 keep-alive", httpmsg.Head{Status: 200, Length: 1}, Length, ResponseOptions{KeepAlive10: true}, "HTTP/1.0 200 OK\r\ncontent-length: 1\r\nconnection: keep-alive\r\n\r\n"},
		{"1.0 keep-alive, but it ends", httpmsg.Head{Status: 200}, ToClose, ResponseOptions{KeepAlive10: true}, "HTTP/1.0 200 OK\r\nconnection: close\r\n\r\n"},
		{"head", httpmsg.Head{Status: 200, Fields: fields("content-length", "9")}, None, ResponseOptions{Minor: 1, Head: true}, "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"},
		{"head, whatever framing", httpmsg.Head{Status: 200}, ToClose, ResponseOptions{Minor: 1, Head: true}, "HTTP/1.1 200 OK\r\n\r\n"},
		{"304", httpmsg.Head{Status: 304, Fields: fields("content-length", "9", "content-length", "9")}, Length, o11, "HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n"},
		{"case 29: 204", httpmsg.Head{Status: 204, Length: 4, Fields: fields("content-length", "4")}, Chunked, ResponseOptions{Minor: 1, Close: true}, "HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n"},
		{"head, 204", httpmsg.Head{Status: 204, Fields: fields("content-length", "4")}, None, ResponseOptions{Minor: 1, Head: true}, "HTTP/1.1 204 No Content\r\n\r\n"},
		{"case 29: 100", httpmsg.Head{Status: 100, Fields: fields("content-length", "4")}, Length, ResponseOptions{Minor: 1, Close: true}, "HTTP/1.1 100 Continue\r\n\r\n"},
		{"case 31: 101", httpmsg.Head{Status: 101, Upgrade: []byte("websocket"), Length: httpmsg.Unknown}, Chunked, ResponseOptions{Minor: 1, Close: true}, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"},
		{"fields that are not the caller's to set", httpmsg.Head{Status: 200, Upgrade: []byte("x"), Fields: fields("connection", "x", "transfer-encoding", "gzip", "te", "trailers", "upgrade", "h2c")}, Length, o11, "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := string(AppendResponse(nil, &tt.h, tt.f, tt.o)); got != tt.want {
				t.Errorf("got  %q\nwant %q", got, tt.want)
			}
		})
	}
}

func TestAppendBody(t *testing.T) {
	got := AppendChunk(nil, []byte("abc"))
	got = AppendChunk(got, nil) // not an end
	got = AppendChunk(got, bytes.Repeat([]byte("x"), 26))
	got = AppendLast(got, fields("grpc-status", "0", "content-length", "5", "x", "y"))
	if want := "3\r\nabc\r\n1a\r\n" + strings.Repeat("x", 26) + "\r\n0\r\ngrpc-status: 0\r\nx: y\r\n\r\n"; string(got) != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if got := string(AppendLast(nil, nil)); got != "0\r\n\r\n" {
		t.Errorf("got %q", got)
	}
}

func TestResponseFraming(t *testing.T) {
	for _, tt := range []struct {
		status int
		length int64
		head   bool
		minor  uint8
		want   Framing
	}{
		{200, 5, false, 1, Length},
		{200, 0, false, 1, Length},
		{200, 5, false, 0, Length},
		{200, httpmsg.Unknown, false, 1, Chunked},
		{200, httpmsg.Unknown, false, 0, ToClose},
		{200, 5, true, 1, None},
		{200, httpmsg.Unknown, true, 0, None},
		{100, 0, false, 1, None},
		{101, httpmsg.Unknown, false, 1, None},
		{204, 5, false, 1, None},
		{304, 5, false, 1, None},
	} {
		if got := ResponseFraming(&httpmsg.Head{Status: tt.status, Length: tt.length}, tt.head, tt.minor); got != tt.want {
			t.Errorf("%+v: got %v", tt, got)
		}
	}
}

// The phrases are those of net/http, but where RFC 9110 renamed one.
func TestReason(t *testing.T) {
	renamed := map[int]string{413: "Content Too Large", 414: "URI Too Long", 416: "Range Not Satisfiable", 422: "Unprocessable Content"}
	for status := range 1000 {
		want := http.StatusText(status)
		if s, ok := renamed[status]; ok {
			want = s
		}
		if got := reason(status); got != want {
			t.Errorf("%d: %q, want %q", status, got, want)
		}
	}
}

// A request that was parsed and written reads as the same request, written
// twice as the same bytes.
func roundTripRequest(t *testing.T, h *httpmsg.Head) {
	t.Helper()
	if string(h.Method) == "CONNECT" { // never written
		return
	}
	f := RequestFraming(h)
	wire := AppendRequest(nil, h, f)
	var p Parser
	var back httpmsg.Head
	n, f2, err := p.Request(bytes.Clone(wire), &back)
	if err != nil || n != len(wire) || f2 != f {
		t.Fatalf("%q: n %d, %v, want %v: %v", wire, n, f2, f, err)
	}
	// What is about this hop, not about the request, does not come back.
	want := *h
	want.Minor, want.Close, want.Scheme = 1, false, schemeHTTP
	normal := func(h *httpmsg.Head) string {
		c := *h
		c.Fields = nil
		te := false
		for _, fd := range h.Fields { // te and content-length move to the end
			if string(fd.Name) == "te" {
				te = true
			} else if string(fd.Name) != "content-length" {
				c.Fields = append(c.Fields, fd)
			}
		}
		if te {
			c.Fields = append(c.Fields, fields("te", "trailers")...)
		}
		return text(&c, f)
	}
	if got, want := normal(&back), normal(&want); got != want {
		t.Fatalf("%q:\ngot  %s\nwant %s", wire, got, want)
	}
	if again := AppendRequest(nil, &back, f2); !bytes.Equal(again, wire) {
		t.Fatalf("written again\n%q\nfirst\n%q", again, wire)
	}
}

func roundTripResponse(t *testing.T, h *httpmsg.Head, headReq bool) {
	t.Helper()
	f := ResponseFraming(h, headReq, 1)
	o := ResponseOptions{Minor: 1, Head: headReq, Close: h.Close}
	wire := AppendResponse(nil, h, f, o)
	var p Parser
	var back httpmsg.Head
	n, f2, err := p.Response(bytes.Clone(wire), &back, headReq)
	if err != nil || n != len(wire) || f2 != f {
		t.Fatalf("%q: n %d, %v, want %v: %v", wire, n, f2, f, err)
	}
	want := *h
	want.Minor = 1
	if h.Status < 200 {
		want.Close = false
	}
	normal := func(h *httpmsg.Head) string {
		c := *h
		c.Fields = nil
		for _, fd := range h.Fields {
			if f == None && string(fd.Name) == "content-length" || string(fd.Name) != "content-length" {
				c.Fields = append(c.Fields, fd)
			}
		}
		return text(&c, f)
	}
	if got, want := normal(&back), normal(&want); got != want {
		t.Fatalf("%q:\ngot  %s\nwant %s", wire, got, want)
	}
	if again := AppendResponse(nil, &back, f2, o); !bytes.Equal(again, wire) {
		t.Fatalf("written again\n%q\nfirst\n%q", again, wire)
	}
}

func TestRoundTrip(t *testing.T) {
	for _, tt := range streams {
		var p Parser
		var h httpmsg.Head
		if tt.s.response {
			if n, _, _ := p.Response([]byte(tt.in), &h, tt.s.head); n > 0 {
				roundTripResponse(t, &h, tt.s.head)
			}
		} else if n, _, _ := p.Request([]byte(tt.in), &h); n > 0 {
			roundTripRequest(t, &h)
		}
	}
}
