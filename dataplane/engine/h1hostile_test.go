package engine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"
)

// pathApp is an application that answers each request with its path, and tells how many
// connections and requests it has had. answer, if not nil, answers in its place.
type pathApp struct {
	conns, requests atomic.Int64
	answer          func(c *net.TCPConn, path string) (again bool)
}

func (a *pathApp) serve(c *net.TCPConn) {
	a.conns.Add(1)
	br := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		a.requests.Add(1)
		if _, err := io.Copy(io.Discard, req.Body); err != nil {
			return
		}
		if a.answer != nil {
			if !a.answer(c, req.URL.Path) {
				return
			}
			continue
		}
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX-Sum: %s\r\n\r\n%s", len(req.URL.Path), req.Trailer.Get("X-Sum"), req.URL.Path)
	}
}

// answers reads the responses on c until its end: status and body of each.
func answers(t *testing.T, c net.Conn) (got []string) {
	t.Helper()
	br := bufio.NewReader(c)
	for {
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			if isTimeout(err) {
				t.Fatalf("the connection stays open after %q", got)
			}
			return got
		}
		b, _ := io.ReadAll(res.Body)
		got = append(got, fmt.Sprintf("%d %s", res.StatusCode, b))
		if res.Close != (res.StatusCode != 200) {
			t.Errorf("%q: close is %v", got[len(got)-1], res.Close)
		}
	}
}

const okHost = "Host: a\r\n"

// malformed are requests that end their connection, and what the answer says.
var malformed = []struct {
	name, in string
	want     string // begins the answer
}{
	{"no host (case 34)", "GET / HTTP/1.1\r\n\r\n", "400 no Host field"},
	{"two hosts (case 34)", "GET / HTTP/1.1\r\n" + okHost + "Host: b\r\n\r\n", "400 several Host"},
	{"two spaces (case 35)", "GET  /a b HTTP/1.1\r\n" + okHost + "\r\n", "400 malformed request target"},
	{"an empty length (case 1)", "POST / HTTP/1.1\r\n" + okHost + "Content-Length:\r\n\r\n", "400 malformed Content-Length"},
	{"a huge length (case 12)", "POST / HTTP/1.1\r\n" + okHost + "Content-Length: 18446744073709551617\r\n\r\nx", "400 malformed Content-Length"},
	{"length and coding (case 8)", "POST / HTTP/1.1\r\n" + okHost + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET", "400 Content-Length together"},
	{"coding and length (case 9)", "POST / HTTP/1.1\r\n" + okHost + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nGET", "400 Content-Length together"},
	{"chunked twice (case 11)", "POST / HTTP/1.1\r\n" + okHost + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", "400 malformed Transfer-Encoding"},
	{"an empty member (case 20)", "POST / HTTP/1.1\r\n" + okHost + "Transfer-Encoding: ,chunked\r\n\r\n", "400 malformed Transfer-Encoding"},
	{"another coding", "POST / HTTP/1.1\r\n" + okHost + "Transfer-Encoding: gzip, chunked\r\n\r\n", "501 unsupported Transfer-Encoding"},
	{"a coding in HTTP/1.0", "POST / HTTP/1.0\r\n" + okHost + "Transfer-Encoding: chunked\r\n\r\n", "400 Transfer-Encoding in an HTTP/1.0"},
	{"CR ends the head (case 17)", "GET / HTTP/1.1\r\n" + okHost + "\r\rX", "400 carriage return"},
	{"NUL (case 19)", "GET / HTTP/1.1\r\nHost: good.example\x00.evil\r\n\r\n", "400 control character"},
	{"folded", "GET / HTTP/1.1\r\n" + okHost + "X: a\r\n b\r\n\r\n", "400 folded"},
	{"a space before the colon", "GET / HTTP/1.1\r\n" + okHost + "X : a\r\n\r\n", "400 malformed field name"},
	{"nine empty lines", strings.Repeat("\r\n", 9) + "GET / HTTP/1.1\r\n" + okHost + "\r\n", "400 malformed method"},
	{"absolute-form against a bad Host", "GET http://a/ HTTP/1.1\r\nHost: b@c\r\n\r\n", "400 malformed Host"},
	{"HTTP/2.0", "GET / HTTP/2.0\r\n" + okHost + "\r\n", "505 unsupported version"},
	{"garbage", "\x16\x03\x01\x02\x00", "400 malformed method"},
}

// TestMalformedHeads: whatever the application has, it does not get; the client reads
// what is wrong and the end, also when the bytes come one by one, and when good requests
// came before on the connection.
func TestMalformedHeads(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	app := &pathApp{}
	v := &svc{pod: pod, to: s.app(app.serve)}
	addr := s.front(pod, v, false)
	const good = "GET /1 HTTP/1.1\r\n" + okHost + "\r\nPOST /2 HTTP/1.1\r\n" + okHost + "Content-Length: 2\r\n\r\nab"
	for _, tt := range malformed {
		t.Run(tt.name, func(t *testing.T) {
			for _, before := range []string{"", good} {
				for _, step := range []int{1 << 20, 1} {
					asked := app.requests.Load()
					c := dial(t, addr)
					for b := before + tt.in + "GET /smuggled HTTP/1.1\r\n" + okHost + "\r\n"; len(b) > 0; {
						n, err := io.WriteString(c, b[:min(step, len(b))])
						if err != nil {
							break // it was refused already
						}
						b = b[n:]
					}
					got := answers(t, c)
					want := []string{tt.want}
					if before != "" {
						want = []string{"200 /1", "200 /2", tt.want}
					}
					ok := len(got) == len(want)
					for i := range want {
						ok = ok && strings.HasPrefix(got[i], want[i])
					}
					if !ok {
						t.Errorf("%d bytes at once: %q, want %q", step, got, want)
					}
					if n := app.requests.Load() - asked; n != int64(len(want)-1) {
						t.Errorf("the application was asked %d times, want %d", n, len(want)-1)
					}
				}
			}
		})
	}
	eventually(t, "every exchange is done", func() bool { return v.begun.Load() == v.done.Load() })
}

// TestRefusalOfHEAD: who asks with HEAD reads no body behind a refusal, whatever stands before the request; who does not reads it.
func TestRefusalOfHEAD(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	addr := s.front(pod, &svc{pod: pod, request: local}, false)
	for _, before := range []string{"", "\r\n", strings.Repeat("\r\n", 8), "HEAD / HTTP/1.1\r\n" + okHost + "\r\n", "HEAD / HTTP/1.1\r\n" + okHost + "\r\n\r\n"} {
		for _, method := range []string{"HEAD", "GET"} {
			c := dial(t, addr)
			io.WriteString(c, before+method+" / HTTP/1.1\r\n\r\n")
			_, got, ok := strings.Cut(rest(t, c), "HTTP/1.1 400 ")
			if !ok || method == "HEAD" != strings.HasSuffix(got, "\r\n\r\n") {
				t.Errorf("%s behind %q: %q, want a head, and a body unless it is HEAD", method, before, got)
			}
		}
	}
}

// TestSlowHEAD: likewise where the head does not come in time, and whatever was asked for before.
func TestSlowHEAD(t *testing.T) {
	for _, method := range []string{"HEAD", "GET"} {
		ck := newClock()
		s := newStage(t, Config{Now: ck.Now})
		pod := s.e.AddPod("p")
		c := dial(t, s.front(pod, &svc{pod: pod, request: local}, false))
		in := "HEAD / HTTP/1.1\r\n" + okHost + "\r\n\r\n" + method + " / HTTP/1.1\r\n"
		io.WriteString(c, in)
		s.seen(t, func(c *h1server) bool { return c.x == nil && c.requests == 1 && c.w > c.r })
		ck.move(t, s.e, time.Duration(headTime)+time.Second)
		_, got, ok := strings.Cut(rest(t, c), "HTTP/1.1 408 ")
		if !ok || method == "HEAD" != strings.HasSuffix(got, "\r\n\r\n") {
			t.Errorf("%s: %q, want a head, and a body unless it is HEAD", method, got)
		}
	}
}

// TestSizeOfHeads: the largest head, the most fields and the longest target arrive whole
// (contract 17), in whatever pieces; one more is refused with its own status.
func TestSizeOfHeads(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	got := make(chan string, 1)
	v := &svc{pod: pod, to: s.app(func(c *net.TCPConn) {
		br := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(br)
			if err != nil {
				return
			}
			got <- fmt.Sprintf("%d %d %d", len(req.RequestURI), len(req.Header), len(req.Header.Get("X")))
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		}
	})}
	addr := s.front(pod, v, false)
	head := func(target, fields string) string {
		return "GET " + target + " HTTP/1.1\r\n" + okHost + fields + "\r\n"
	}
	many := func(n int) string {
		var b strings.Builder
		for i := range n - 1 {
			fmt.Fprintf(&b, "X%d: y\r\n", i)
		}
		return b.String()
	}
	big := func(n int) string {
		return head("/", "X: "+strings.Repeat("v", n-len(head("/", "X: \r\n")))+"\r\n")
	}
	for _, tt := range []struct{ name, in, app, want string }{
		{"60 KiB", big(60 << 10), fmt.Sprintf("1 1 %d", 60<<10-len(head("/", "X: \r\n"))), ""},
		{"60 KiB and a byte", big(60<<10 + 1), "", "431"},
		{"60 KiB that do not end", big(70 << 10)[:61<<10], "", "431"},
		{"100 fields", head("/", many(100)), "1 99 0", ""},
		{"101 fields", head("/", many(101)), "", "431"},
		{"a target of 16 KiB", head("/"+strings.Repeat("t", 16<<10-1), ""), "16384 0 0", ""},
		{"a target of 16 KiB and a byte", head("/"+strings.Repeat("t", 16<<10), ""), "", "414"},
		{"a target that does not end", "GET /" + strings.Repeat("t", 40<<10), "", "414"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, step := range []int{1 << 20, 7001} {
				c := dial(t, addr)
				br := bufio.NewReader(c)
				for b := tt.in; len(b) > 0; {
					n, err := io.WriteString(c, b[:min(step, len(b))])
					if err != nil {
						break
					}
					b = b[n:]
				}
				res, err := http.ReadResponse(br, nil)
				if err != nil {
					t.Fatal(err)
				}
				if tt.want != "" {
					if _, err := io.Copy(io.Discard, res.Body); err != nil || res.Status[:3] != tt.want {
						t.Errorf("%s (%v), want %s", res.Status, err, tt.want)
					}
					continue
				}
				if res.StatusCode != 200 {
					t.Fatal(res.Status)
				}
				if seen := <-got; seen != tt.app {
					t.Errorf("the application saw %s, want %s", seen, tt.app)
				}
			}
		})
	}
}

// TestLineEndsBehindTheLast: what a client sends behind its last request and means nothing by is answered by nothing, when
// it ends the connection (aspnetcore 42697).
func TestLineEndsBehindTheLast(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	app := &pathApp{}
	front := s.front(pod, &svc{pod: pod, to: s.app(app.serve)}, false)
	for _, behind := range []string{"", "\r", "\r\n", "\r\n\r", "\r\n\r\n", strings.Repeat("\r\n", 8)} {
		for _, apart := range []bool{false, true} {
			c := dial(t, front)
			br := bufio.NewReader(c)
			const get = "GET / HTTP/1.1\r\n" + okHost + "\r\n"
			if apart {
				io.WriteString(c, get)
			} else {
				io.WriteString(c, get+behind)
			}
			res, err := http.ReadResponse(br, nil)
			if err != nil || res.StatusCode != 200 {
				t.Fatalf("%q: %v %v", behind, res, err)
			}
			_, _ = io.Copy(io.Discard, res.Body)
			if apart {
				io.WriteString(c, behind)
			}
			if err := c.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if rest, err := io.ReadAll(br); len(rest) > 0 || err != nil {
				t.Errorf("%q, apart %v: answered with %q, %v", behind, apart, rest, err)
			}
		}
	}
}

// TestEmptyLineAfterABody: the empty line that some clients put behind a body (RFC 9112
// 2.2) begins no head: the deadline of heads does not run, no buffer is held, and the next
// request is served. A ninth one is refused.
func TestEmptyLineAfterABody(t *testing.T) {
	ck := newClock()
	s := newStage(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	app := &pathApp{}
	c := dial(t, s.front(pod, &svc{pod: pod, to: s.app(app.serve)}, false))
	br := bufio.NewReader(c)
	ask := func(text string) {
		t.Helper()
		io.WriteString(c, text)
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != 200 {
			t.Fatal(res.Status, err)
		}
	}
	const post = "POST / HTTP/1.1\r\n" + okHost + "Content-Length: 1\r\n\r\nx"
	ask(post)
	for _, b := range []string{"\r", "\n"} {
		io.WriteString(c, b)
		s.seen(t, func(c *h1server) bool { return b == "\r" && c.w > c.r || b == "\n" && c.w == c.r && c.in == nil })
	}
	ck.move(t, s.e, 2*time.Duration(headTime))
	ask(post)
	io.WriteString(c, "\r\n")
	s.seen(t, func(c *h1server) bool { return c.in == nil })
	ask("GET / HTTP/1.1\r\n" + okHost + "\r\n\r\n")
	for i := range 8 { // the one behind the GET is the first
		s.seen(t, func(c *h1server) bool { return c.in == nil })
		if i < 7 {
			io.WriteString(c, "\r\n")
		}
	}
	io.WriteString(c, "\r\n")
	res, err := http.ReadResponse(br, nil)
	if err != nil || res.StatusCode != 400 {
		t.Errorf("a ninth empty line: %v, %v, want 400", res, err)
	}
}

// TestSlowHead (cases 45, 46): the deadline counts from the first byte of a head,
// whatever dribbles in after it, and not while a connection is kept.
func TestSlowHead(t *testing.T) {
	ck := newClock()
	s := newStage(t, Config{Now: ck.Now})
	pod := s.e.AddPod("p")
	c := dial(t, s.front(pod, &svc{pod: pod, request: local}, false))
	br := bufio.NewReader(c)
	const head = "GET / HTTP/1.1\r\n" + okHost
	for range 3 {
		io.WriteString(c, head+"\r\n")
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != 421 {
			t.Fatal(res.Status, err)
		}
		ck.move(t, s.e, 40*time.Second) // kept, without a byte
	}
	step := time.Duration(headTime) / 5
	for i := range 4 {
		io.WriteString(c, head[i:i+1])
		s.seen(t, func(c *h1server) bool { return c.w-c.r == i+1 })
		ck.move(t, s.e, step)
	}
	s.seen(t, func(c *h1server) bool { return !c.closing })
	io.WriteString(c, head[4:5])
	s.seen(t, func(c *h1server) bool { return c.w-c.r == 5 })
	ck.move(t, s.e, step+200*time.Millisecond)
	res, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(res.Body); err != nil || res.StatusCode != 408 || !res.Close || !strings.Contains(string(b), "15 s") {
		t.Errorf("%s %q (%v), want a 408 that says why, and the end", res.Status, b, err)
	}
}

// TestBadBodies (cases 4, 5, 13, 14, 15, 22, 43): where a body's framing breaks the
// application never sees its end, the client is told, and the connection carries nothing else.
func TestBadBodies(t *testing.T) {
	const head = "POST / HTTP/1.1\r\n" + okHost + "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
	for _, tt := range []struct{ name, in, want string }{
		{"underscore (case 4)", "0_2e\r\n", "400 malformed chunk size"},
		{"0x (case 4)", "0x\r\n", "400 malformed chunk size"},
		{"valid prefix (case 5)", "1zzz\r\na", "400 malformed chunk size"},
		{"LF in an extension (case 13)", "5;x\nabcde\r\n0\r\n\r\n", "400 control character in a chunk extension"},
		{"white space before an extension (case 14)", "5 \t;a=b\r\nabcde\r\n0\r\n\r\n", "400 malformed chunk size"},
		{"extensions without end (case 15)", strings.Repeat("1;"+strings.Repeat("x", 4000)+"\r\na\r\n", 40), "400 chunk extensions are too long"},
		{"CR in a trailer (case 22)", "0\r\nx: a\rb\r\n\r\n", "400 carriage return"},
		{"too many trailers", "0\r\n" + strings.Repeat("x: a\r\n", 33) + "\r\n", "431 too many trailer fields"},
		{"the data does not end", "3\r\nabcX\r\n", "400 chunk data is not followed"},
		{"the client's end (case 43)", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			ended := make(chan error, 1)
			v := &svc{pod: pod, to: s.app(func(c *net.TCPConn) {
				req, err := http.ReadRequest(bufio.NewReader(c))
				if err == nil {
					_, err = io.Copy(io.Discard, req.Body)
				}
				ended <- err
			})}
			c := dial(t, s.front(pod, v, false))
			io.WriteString(c, head)
			s.seen(t, func(c *h1client) bool { return c.x != nil && c.x.ReqBytes == 3 && len(c.out) == 0 })
			if tt.want == "" {
				_ = c.CloseWrite()
			} else {
				io.WriteString(c, tt.in+"GET /smuggled HTTP/1.1\r\n"+okHost+"\r\n")
				if got := answers(t, c); len(got) != 1 || !strings.HasPrefix(got[0], tt.want) {
					t.Errorf("%q, want %q", got, tt.want)
				}
			}
			if err := <-ended; err == nil {
				t.Error("the application saw the body's end")
			}
			eventually(t, "the exchange is done", func() bool { return v.done.Load() == 1 && pod.Conns() == 0 })
			l := s.e.Loops()[0]
			before := l.Stats().Iterations
			for range 10 {
				s.onLoop(func(*Loop) {})
			}
			if n := l.Stats().Iterations - before; n > 50 {
				t.Errorf("%d iterations for ten posts: the loop spins", n)
			}
		})
	}
}

// TestKeptAfterTrailers (cases 23, 24, 28): trailers in any case, and heads that promise
// a body that is not there, leave both connections in use.
func TestKeptAfterTrailers(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	app := &pathApp{}
	v := &svc{pod: pod, to: s.app(app.serve)}
	c := dial(t, s.front(pod, v, false))
	br := bufio.NewReader(c)
	for i := range 10 {
		fmt.Fprintf(c, "POST /%d HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n1\r\na\r\n0\r\nx-SUM: %d\r\n\r\n", i, okHost, i)
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(res.Body)
		if want := fmt.Sprint(i); err != nil || string(b) != "/"+want || res.Header.Get("X-Sum") != want {
			t.Fatalf("%q, trailer %q, %v", b, res.Header.Get("X-Sum"), err)
		}
	}
	app.answer = func(c *net.TCPConn, _ string) bool {
		_, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
		return err == nil
	}
	for range 10 {
		io.WriteString(c, "HEAD / HTTP/1.1\r\n"+okHost+"\r\n")
		res, err := http.ReadResponse(br, &http.Request{Method: "HEAD"})
		if err != nil || res.ContentLength != 10 {
			t.Fatal(res, err)
		}
	}
	if n := app.conns.Load(); n != 1 {
		t.Errorf("the application had %d connections, want 1", n)
	}
}

// TestSplittingApplication (case 42): an application that lets its own users write into
// its answers, and one that answers with more than it may: what is not the answer to a
// request reaches nobody, and no later request of anyone.
func TestSplittingApplication(t *testing.T) {
	const evil = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\nSet-Cookie: evil=1\r\n\r\nevil"
	for _, tt := range []struct {
		name, method, answer string
		want                 string
	}{
		{"a whole answer in a field", "GET", "HTTP/1.1 200 OK\r\nX: user\r\nContent-Length: 0\r\n\r\n" + evil, "200 "},
		{"a bare CR in a field", "GET", "HTTP/1.1 200 OK\r\nX: user\rSet-Cookie: evil=1\r\nContent-Length: 0\r\n\r\n", "503 protocol"},
		{"a bare LF in a field", "GET", "HTTP/1.1 200 OK\r\nX: user\nSet-Cookie: evil=1\r\nContent-Length: 0\r\n\r\n", "503 protocol"},
		{"NUL in a field", "GET", "HTTP/1.1 200 OK\r\nX: us\x00er\r\nContent-Length: 0\r\n\r\n", "503 protocol"},
		{"folded", "GET", "HTTP/1.1 200 OK\r\nX: user\r\n Set-Cookie: evil=1\r\nContent-Length: 0\r\n\r\n", "503 protocol"},
		{"a CR in the reason", "GET", "HTTP/1.1 200 OK\rSet-Cookie: evil=1\r\nContent-Length: 0\r\n\r\n", "503 protocol"},
		{"two lengths", "GET", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length: 99\r\n\r\n" + evil, "503 protocol"},
		{"a length and a coding", "GET", "HTTP/1.1 200 OK\r\nContent-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + evil, "503 protocol"},
		{"a coding in HTTP/1.0", "GET", "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + evil, "503 protocol"},
		{"a CR in a trailer", "GET", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: a\rb\r\n\r\n", "cut"},
		{"a bad chunk", "GET", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x4\r\nevil\r\n0\r\n\r\n", "cut"},
		{"a body on HEAD", "HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 94\r\n\r\n" + evil, "200 "},
		{"a body on 204", "GET", "HTTP/1.1 204 No Content\r\nContent-Length: 94\r\n\r\n" + evil, "204 "},
		{"chunks on 204 (case 29)", "GET", "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nevil\r\n0\r\n\r\n", "204 "},
		{"a body on 304", "GET", "HTTP/1.1 304 Not Modified\r\nContent-Length: 94\r\n\r\n" + evil, "304 "},
		{"a body on 103", "GET", "HTTP/1.1 103 Early Hints\r\nContent-Length: 4\r\n\r\nevilHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "503 protocol"},
		{"more than the length", "GET", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + evil, "200 ok"},
		{"more than the chunks", "GET", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" + evil, "200 ok"},
		{"a head of 70 KiB", "GET", "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 70<<10) + "\r\n\r\n", "503 protocol"},
		{"101 fields", "GET", "HTTP/1.1 200 OK\r\n" + strings.Repeat("X: x\r\n", 101) + "\r\n", "503 protocol"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			app := &pathApp{}
			app.answer = func(c *net.TCPConn, path string) bool {
				text := tt.answer
				if path == "/good" {
					text = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood"
				}
				_, err := io.WriteString(c, text)
				return err == nil
			}
			v := &svc{pod: pod, to: s.app(app.serve)}
			addr := s.front(pod, v, false)
			ask := func(method, path string) string {
				c := dial(t, addr)
				defer c.Close()
				fmt.Fprintf(c, "%s %s HTTP/1.1\r\n%s\r\n", method, path, okHost)
				br := bufio.NewReader(c)
				res, err := http.ReadResponse(br, &http.Request{Method: method})
				if err == nil && res.StatusCode == 103 {
					res, err = http.ReadResponse(br, &http.Request{Method: method})
				}
				if err != nil {
					return "cut"
				}
				b, err := io.ReadAll(res.Body)
				if res.Header.Get("Set-Cookie") != "" {
					t.Errorf("the client got the cookie of the answer within the answer")
				}
				if err != nil {
					return "cut"
				}
				if n := br.Buffered(); n > 0 {
					t.Errorf("%d bytes follow the answer", n)
				}
				return fmt.Sprintf("%d %s", res.StatusCode, b)
			}
			for range 5 {
				if got := ask(tt.method, "/"); got != tt.want {
					t.Errorf("%q, want %q", got, tt.want)
				}
				if got := ask("GET", "/good"); got != "200 good" {
					t.Errorf("the next request got %q", got)
				}
			}
			eventually(t, "every exchange is done", func() bool { return v.begun.Load() == v.done.Load() })
		})
	}
}

// TestSplittingOverHTTP2: what an HTTP/2 application puts into a field does not become
// lines of an HTTP/1 client's answer.
func TestSplittingOverHTTP2(t *testing.T) {
	for _, tt := range []struct {
		name string
		kv   []string
	}{
		{"CR LF in a value", []string{":status", "200", "x", "user\r\nset-cookie: evil=1"}},
		{"LF in a value", []string{":status", "200", "x", "user\nset-cookie: evil=1"}},
		{"NUL in a value", []string{":status", "200", "x", "us\x00er"}},
		{"CR LF in a name", []string{":status", "200", "x\r\nset-cookie", "evil=1"}},
		{"a colon in a name", []string{":status", "200", "set-cookie: evil=1; x", "y"}},
		{"CR LF in the status", []string{":status", "200\r\nset-cookie: evil=1"}},
		{"a coding", []string{":status", "200", "transfer-encoding", "chunked"}},
		{"two lengths", []string{":status", "200", "content-length", "0", "content-length", "0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			v := &svc{pod: pod, h2: true, to: s.app(func(c *net.TCPConn) {
				p := newPeer2(t, c, false)
				_ = p.flush()
				for {
					f, err := p.ReadFrame()
					if err != nil {
						return
					}
					switch f := f.(type) {
					case *oracle.SettingsFrame:
						if !f.IsAck() {
							p.WriteSettingsAck()
						}
					case *oracle.MetaHeadersFrame:
						p.head(f.StreamID, true, tt.kv...)
					}
					_ = p.flush()
				}
			})}
			addr := s.front(pod, v, false)
			for range 3 {
				c := dial(t, addr)
				io.WriteString(c, "GET / HTTP/1.1\r\n"+okHost+"Connection: close\r\n\r\n")
				if got := rest(t, c); !strings.HasPrefix(got, "HTTP/1.1 503 ") || strings.Contains(strings.ToLower(got), "evil") {
					t.Errorf("%q, want a 503", got)
				}
			}
		})
	}
}

// TestHalfClosedClient (docs/decisions/040): a client that ends its side with its request, as
// printf | nc does, gets the answer, and those of what it pipelined, and then the connection ends.
// One that ends its side later has given up: its request is cancelled, and what it pipelined is not begun.
func TestHalfClosedClient(t *testing.T) {
	const get1, get2 = "GET /1 HTTP/1.1\r\n" + okHost + "\r\n", "GET /2 HTTP/1.1\r\n" + okHost + "\r\n"
	post := "POST /1 HTTP/1.1\r\n" + okHost + "Content-Length: 70000\r\n\r\n" + strings.Repeat("x", 70000)
	for _, tt := range []struct {
		name, sent string
		later      time.Duration
		answers    int
	}{
		{"with a request", get1, 0, 1},
		{"with a request of HTTP/1.0", "GET /1 HTTP/1.0\r\n" + okHost + "\r\n", 0, 1},
		{"with two", get1 + get2, 0, 2},
		{"with a request and half of one", get1 + "GET /2 HT", 0, 1},
		{"with a body", post, 0, 1},
		{"in a body", post[:len(post)-1], 0, 0},
		{"in a head", get1[:20], 0, 0},
		{"later", get1 + get2, time.Second, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			clock := newClock()
			s := newStage(t, Config{Now: clock.Now})
			pod := s.e.AddPod("p")
			begun, answer, left := make(chan struct{}, 2), make(chan struct{}), make(chan struct{}, 1)
			v := &svc{pod: pod, to: s.app(func(c *net.TCPConn) {
				br := bufio.NewReader(c)
				for {
					if _, err := posted(br); err != nil {
						return
					}
					begun <- struct{}{}
					if tt.later > 0 {
						io.Copy(io.Discard, c)
						left <- struct{}{}
						return
					}
					<-answer
					io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
				}
			})}
			c := dial(t, s.front(pod, v, false))
			io.WriteString(c, tt.sent)
			if tt.later > 0 {
				<-begun
				clock.move(t, s.e, tt.later)
			}
			c.CloseWrite()
			if tt.later > 0 {
				<-left
			} else if tt.answers > 0 { // it has seen the end by then
				<-begun
				ask(t, s, func(*Loop) bool { return true })
			}
			close(answer)
			got := rest(t, c)
			if n := strings.Count(got, "HTTP/1.1 200 "); n != tt.answers {
				t.Errorf("%q, want %d answers", got, tt.answers)
			}
			if n := strings.Count(got, "connection: close"); tt.answers > 0 && !strings.HasSuffix(tt.sent, "HT") && n != 1 {
				t.Errorf("%q: %d answers are the last", got, n)
			}
			eventually(t, "over", func() bool { return v.done.Load() == v.begun.Load() })
			if tt.later > 0 && v.begun.Load() != 1 {
				t.Errorf("%d requests were begun", v.begun.Load())
			}
		})
	}
}

// TestResetInAnUpload (case 196): an application that resets during an upload ends it at once.
func TestResetInAnUpload(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, to: s.app(func(c *net.TCPConn) {
		io.CopyN(io.Discard, c, 1<<20)
		reset(c)
	})}
	c := dial(t, s.front(pod, v, false))
	fmt.Fprintf(c, "POST / HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n", okHost, 100<<20)
	sent, err := io.CopyN(c, zeros{}, 100<<20)
	if err == nil { // what was sent went somewhere: into the proxy's drain, which is bounded
		t.Logf("all of it was sent")
	}
	if sent < 1<<20 {
		t.Errorf("only %d bytes were taken", sent)
	}
	eventually(t, "the exchange is done", func() bool { return v.done.Load() == 1 })
	if n := v.codes[0].Load(); n != 0 || v.begun.Load() != 1 {
		t.Errorf("begun %d, failed without a cause %d", v.begun.Load(), n)
	}
}

// TestBigAnswerHead (case 194): an answer of 9 KB of fields arrives with nothing added, but the date that it lacks.
func TestBigAnswerHead(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	app := &pathApp{}
	fields := "Date: Tue, 15 Nov 1994 08:12:31 GMT\r\nX: " + strings.Repeat("x", 9000) + "\r\nContent-Length: 0\r\n\r\n"
	app.answer = func(c *net.TCPConn, _ string) bool {
		_, err := io.WriteString(c, "HTTP/1.1 200 OK\r\n"+fields)
		return err == nil
	}
	c := dial(t, s.front(pod, &svc{pod: pod, to: s.app(app.serve)}, false))
	io.WriteString(c, "GET / HTTP/1.1\r\n"+okHost+"Connection: close\r\n\r\n")
	got := rest(t, c)
	if want := len("HTTP/1.1 200 OK\r\nconnection: close\r\n" + fields); len(got) != want || !strings.Contains(got, strings.Repeat("x", 9000)) {
		t.Errorf("%d bytes, want %d", len(got), want)
	}
}

// TestHalfClosedInAnAnswer: a client whose end comes with its request, and is seen once the answer has begun, gets
// the rest of it, and then the connection ends although the answer did not say so.
func TestHalfClosedInAnAnswer(t *testing.T) {
	clock := newClock()
	s := newStage(t, Config{Now: clock.Now})
	pod := s.e.AddPod("p")
	end := make(chan struct{})
	v := &svc{pod: pod, to: s.app(heads(func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nq")
		<-end
		_, err := io.WriteString(c, "k")
		return err == nil
	}))}
	c := dial(t, s.front(pod, v, false))
	io.WriteString(c, "GET / HTTP/1.1\r\n"+okHost+"\r\n")
	br := bufio.NewReader(c)
	if _, err := br.ReadString('q'); err != nil { // of the body
		t.Fatal(err)
	}
	c.CloseWrite()
	ask(t, s, func(*Loop) bool { return true })
	close(end)
	if b, err := io.ReadAll(br); err != nil || !strings.HasSuffix(string(b), "k") {
		t.Errorf("%q, %v", b, err)
	}
}
