package netns

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// TestMalformed: on a connection that is the mesh's, a request that two parsers could read
// differently is refused, the connection ends, and the application sees nothing of it
// or of what was smuggled behind it.
func TestMalformed(t *testing.T) {
	t.Parallel()
	const host, rest = "Host: app\r\n", "\r\nGET /smuggled HTTP/1.1\r\nHost: app\r\n\r\n"
	const goodHead = host + "Transfer-Encoding: chunked\r\n\r\n"
	for _, tt := range []struct{ name, head string }{
		{"empty Content-Length", host + "Content-Length:\r\n" + rest},
		{"two lengths", host + "Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"},
		{"a length with a sign", host + "Content-Length: +1\r\n\r\na"},
		{"a huge length", host + "Content-Length: 18446744073709551617\r\n\r\na"},
		{"a lenient chunk size", goodHead + "0_2e\r\n"},
		{"a chunk size with a tail", goodHead + "1zzz\r\na\r\n0\r\n\r\n"},
		{"chunked twice", host + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{"another coding", host + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"},
		{"chunked is not last", host + "Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n"},
		{"a bare CR in an extension", goodHead + "1;x\ry\r\na\r\n0\r\n\r\n"},
		{"a bare LF in an extension", goodHead + "1;x\ny\r\na\r\n0\r\n\r\n"},
		{"a bad trailer", goodHead + "0\r\nx: a\rb\r\n\r\n"},
		{"CR CR LF", host + "X: 1\r\r\n" + rest},
		{"NUL in a field", "Host: app\x00.evil\r\n" + rest},
		{"a folded field", host + "X: a\r\n b\r\n" + rest},
		{"a space before the colon", host + "Content-Length : 1\r\n\r\na"},
		{"no Host", "X: 1\r\n" + rest},
		{"two Hosts", host + "Host: other\r\n" + rest},
		{"a Host with a user", "Host: user@app\r\n" + rest},
		{"a Host with a space", "Host: app other\r\n" + rest},
		{"a Host with two ports", "Host: app:8080:8080\r\n" + rest},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ctx := within(t, patience)
			begun, seen := make(chan struct{}, 1), make(chan string, 1)
			path := w.raw.at(t, func(q rawRequest) {
				begun <- struct{}{}
				b, _ := io.ReadAll(q.r)
				seen <- string(b)
			})
			c := dial(t, ctx, w.Pod("web"), vip(appVIP, portRaw))
			fields, body, good := strings.Cut(tt.head, goodHead)
			if good { // what is wrong comes when the application has the head
				say(t, c, "POST "+path+" HTTP/1.1\r\n"+fields+goodHead)
				recv(t, ctx, begun, "the request")
				say(t, c, body)
			} else {
				say(t, c, "POST "+path+" HTTP/1.1\r\n"+tt.head)
			}
			r := bufio.NewReader(c)
			res, err := http.ReadResponse(r, nil)
			if err != nil {
				t.Fatalf("no answer: %v", err)
			}
			if _, err := io.Copy(io.Discard, res.Body); err != nil {
				t.Error(err)
			}
			if res.StatusCode != 400 && res.StatusCode != 501 {
				t.Errorf("got %d, want 400 (or 501 for a coding)", res.StatusCode)
			}
			if b, err := r.ReadByte(); err == nil || err != io.EOF && !strings.Contains(err.Error(), "reset") {
				t.Errorf("after the refusal: byte %q, %v, want the end of the connection", b, err)
			}
			if good { // the body must not look whole
				if b := recv(t, ctx, seen, "the end of the request at the application"); strings.HasSuffix(b, "0\r\n\r\n") {
					t.Errorf("the application got a whole body: %q", b)
				}
				return
			}
			select {
			case b := <-seen:
				t.Errorf("the application got the request, with the body %q", b)
			default:
			}
		})
	}
}

// TestLengthAndChunks: chunks win over a length, in either order, the length is not passed on,
// and the connection ends (RFC 9112 6.1); or it is refused.
func TestLengthAndChunks(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	heads := make(chan string, 4)
	path := w.raw.at(t, func(q rawRequest) {
		heads <- q.head
		io.WriteString(q.c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
	})
	for _, fields := range []string{"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n"} {
		c := dialH1(t, ctx, portRaw)
		c.send("POST %s HTTP/1.1\r\nHost: app\r\n%s\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: app\r\n\r\n", path, fields)
		a := c.response("POST")
		c.ended()
		if a.StatusCode == 400 {
			continue
		}
		if h := recv(t, ctx, heads, "the request"); a.StatusCode != 200 || strings.Contains(strings.ToLower(h), "content-length") {
			t.Errorf("got %d; the application was sent:\n%s", a.StatusCode, h)
		}
	}
}

// TestBadAnswers: what an application may not answer becomes a 502 or is mended, and the
// client's connection goes on.
func TestBadAnswers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, answer string
		want         string // status and body
	}{
		{"204 with chunks", "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "204 "},
		{"more than its length", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nsurplus", "200 ok"},
		{"two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokk", "502 "},
		{"no HTTP", "hello\r\n\r\n", "502 "},
		{"no length, then the end", "HTTP/1.1 200 OK\r\n\r\nto the end", "200 to the end"},
		{"HTTP/1.0", "HTTP/1.0 200 OK\r\n\r\nold", "200 old"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ctx := within(t, patience)
			path := w.raw.at(t, func(q rawRequest) {
				io.WriteString(q.c, tt.answer)
				q.c.Close()
			})
			fine := w.app.at(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "fine") })
			for _, h2 := range []bool{false, true} {
				rt := transport(t, h2, w.Pod("job"), proxyPort)
				a, err := send(ctx, rt, "GET", appName+":8083", path, nil)
				if err != nil {
					t.Errorf("h2 %v: %v", h2, err)
					continue
				}
				if got := fmt.Sprintf("%d %s", a.StatusCode, a.body); !strings.HasPrefix(got, tt.want) {
					t.Errorf("h2 %v: got %q, want %q", h2, got, tt.want)
				}
				if a := mustSend(t, ctx, rt, "GET", appName+":8080", fine, nil); a.body != "fine" {
					t.Errorf("h2 %v: the next request: %d %q", h2, a.StatusCode, a.body)
				}
			}
		})
	}
}

// TestClosingApp: an application that closes its connection after each answer, without saying
// so, costs no idempotent request (RFC 9110 9.2.2).
func TestClosingApp(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	path := w.raw.at(t, func(q rawRequest) {
		io.WriteString(q.c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		q.c.Close()
	})
	rt := transport(t, false, w.Pod("web"), vip(appVIP, portRaw))
	for i := range 200 {
		if a := mustSend(t, ctx, rt, "GET", "app", path, nil); a.StatusCode != 200 {
			t.Fatalf("request %d: %d %q", i+1, a.StatusCode, a.body)
		}
	}
}
