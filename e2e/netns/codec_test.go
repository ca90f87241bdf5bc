package netns

import (
	"bufio"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

func dialer(from *rig.Pod) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, addr string) (net.Conn, error) {
		return mesh.To(from, addr)(ctx, "", "")
	}
}

// h1conn is an HTTP/1 client by hand.
type h1conn struct {
	*net.TCPConn
	r *bufio.Reader
	t testing.TB
}

func dialH1(t testing.TB, ctx context.Context, port int) *h1conn {
	t.Helper()
	c := dial(t, ctx, w.Pod("web"), vip(appVIP, port))
	return &h1conn{c, bufio.NewReader(c), t}
}

func (c *h1conn) send(format string, args ...any) {
	c.t.Helper()
	if _, err := fmt.Fprintf(c, format, args...); err != nil {
		c.t.Fatalf("send: %v", err)
	}
}

// response reads one whole response to a request of that method.
func (c *h1conn) response(method string) *answer {
	c.t.Helper()
	res, err := http.ReadResponse(c.r, &http.Request{Method: method})
	if err != nil {
		c.t.Fatalf("no response: %v", err)
	}
	b, err := io.ReadAll(res.Body)
	if err != nil {
		c.t.Fatalf("body after %q: %v", b, err)
	}
	return &answer{res, string(b)}
}

// ended fails unless the proxy has closed the connection in order.
func (c *h1conn) ended() {
	c.t.Helper()
	if b, err := c.r.ReadByte(); err != io.EOF {
		c.t.Errorf("after the last response: byte %q, %v, want EOF", b, err)
	}
}

// TestEndsWithItsRequest: a captured client that ends its side with its request, as printf | nc does, is
// answered (decision 040).
func TestEndsWithItsRequest(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "served") })
	c := dial(t, ctx, w.Pod("web"), vip(appVIP, portH1))
	say(t, c, "GET "+path+" HTTP/1.1\r\nHost: app\r\n\r\n")
	c.CloseWrite()
	b, err := io.ReadAll(c)
	if err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 200 ") || !strings.HasSuffix(string(b), "served") {
		t.Errorf("%q, %v", b, err)
	}
}

func TestHTTP10(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "one ")
		w.(http.Flusher).Flush() // no length: chunked
		io.WriteString(w, "two")
	})
	fixed := w.raw.at(t, func(q rawRequest) { io.WriteString(q.c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfixed") })

	c := dialH1(t, ctx, portH1)
	c.send("GET %s HTTP/1.0\r\nHost: app\r\n\r\n", path)
	a := c.response("GET")
	if a.body != "one two" || len(a.TransferEncoding) > 0 {
		t.Errorf("%d %q, coding %v: an HTTP/1.0 client knows no chunks", a.StatusCode, a.body, a.TransferEncoding)
	}
	c.ended()

	c = dialH1(t, ctx, portRaw)
	c.send("GET %s HTTP/1.0\r\nHost: app\r\n\r\n", fixed)
	if a := c.response("GET"); a.body != "fixed" {
		t.Errorf("got %q", a.body)
	}
	c.ended()

	c = dialH1(t, ctx, portRaw)
	for range 2 {
		c.send("GET %s HTTP/1.0\r\nHost: app\r\nConnection: keep-alive\r\n\r\n", fixed)
		if a := c.response("GET"); a.body != "fixed" || !strings.EqualFold(a.Header.Get("Connection"), "keep-alive") {
			t.Errorf("keep-alive: %q, connection %q", a.body, a.Header.Get("Connection"))
		}
	}
}

func TestPipelining(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	var mu sync.Mutex
	var seen []string
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		mu.Lock()
		seen = append(seen, r.Method+" "+r.URL.RawQuery+" "+string(b))
		mu.Unlock()
		fmt.Fprintf(w, "answer %s", r.URL.RawQuery)
	})
	c := dialH1(t, ctx, portH1)
	c.send("GET %[1]s?1 HTTP/1.1\r\nHost: app\r\n\r\nPOST %[1]s?2 HTTP/1.1\r\nHost: app\r\nContent-Length: 3\r\n\r\nabcPOST %[1]s?3 HTTP/1.1\r\nHost: app\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nde\r\n0\r\n\r\nGET %[1]s?4 HTTP/1.1\r\nHost: app\r\nConnection: close\r\n\r\n", path)
	for i := 1; i <= 4; i++ {
		if a := c.response("GET"); a.body != fmt.Sprint("answer ", i) {
			t.Errorf("answer %d is %q", i, a.body)
		}
	}
	c.ended()
	mu.Lock()
	defer mu.Unlock()
	if want := []string{"GET 1 ", "POST 2 abc", "POST 3 de", "GET 4 "}; !slices.Equal(seen, want) {
		t.Errorf("the application saw %q, want %q", seen, want)
	}
}

// TestStreams: many requests on one h2c connection are answered out of order.
func TestStreams(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	gate := make(chan struct{})
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery == "open" {
			close(gate)
		}
		select {
		case <-gate:
		case <-r.Context().Done():
		}
		io.WriteString(w, r.URL.RawQuery)
	})
	rt := transport(t, true, w.Pod("web"), vip(appVIP, portH1))
	var all sync.WaitGroup
	ask := func(q string) {
		a, err := send(ctx, rt, "GET", "app", path+"?"+q, nil)
		if err != nil || a.body != q {
			t.Errorf("%s: %v", q, err)
		}
	}
	for i := range 50 {
		all.Go(func() { ask(fmt.Sprint(i)) })
	}
	ask("open")
	all.Wait()
}

// blob is n bytes that do not repeat, the same in every run.
func blob(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{7})
	r.Read(b)
	return b
}

// unknown hides the length of a reader, so that it is sent in chunks.
type unknown struct{ io.Reader }

func TestBodies(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, ctx context.Context, rt *http.Transport, host string) {
		path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
			b, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			w.Header().Set("X-Length", fmt.Sprint(r.ContentLength))
			if r.URL.RawQuery == "fixed" {
				w.Header().Set("Content-Length", fmt.Sprint(len(b)))
			}
			for ; len(b) > 0; b = b[min(len(b), 30_000):] {
				w.Write(b[:min(len(b), 30_000)])
				if r.URL.RawQuery != "fixed" {
					w.(http.Flusher).Flush()
				}
			}
		})
		for _, n := range []int{0, 1, 16 << 10, 1<<20 + 7} {
			in := blob(n)
			for _, how := range []string{"chunked", "fixed"} {
				var body io.Reader = strings.NewReader(string(in))
				want := fmt.Sprint(n)
				if how == "chunked" {
					body = unknown{body}
					want = "-1"
				}
				a, err := send(ctx, rt, "POST", host, path+"?"+how, body)
				if err != nil {
					t.Fatalf("%s, %d bytes: %v", how, n, err)
				}
				if sha256.Sum256([]byte(a.body)) != sha256.Sum256(in) {
					t.Errorf("%s, %d bytes: %d came back, not the same", how, n, len(a.body))
				}
				if got := a.Header.Get("X-Length"); n > 0 && got != want {
					t.Errorf("%s, %d bytes: the application saw length %s", how, n, got)
				}
				if how == "fixed" && a.ContentLength != int64(n) {
					t.Errorf("%s, %d bytes: the client saw length %d", how, n, a.ContentLength)
				}
			}
		}
	})
}

// TestEmptyAnswer: an answer of length 0 is over with its head, and the connections go on.
func TestEmptyAnswer(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, ctx context.Context, rt *http.Transport, host string) {
		path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) { w.Header().Set("Content-Length", "0") })
		for i := range 3 {
			if a, err := send(ctx, rt, "GET", host, path, nil); err != nil || a.StatusCode != 200 || a.ContentLength != 0 {
				t.Fatalf("request %d: %v, %v", i+1, a, err)
			}
		}
	})
}

// TestEmptyBodyWaits: a chunked body without a byte ends, although its end comes
// while the first hop of the pod is still being dialled.
func TestEmptyBodyWaits(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		_, err := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, "read to the end: ", err)
	})
	c := &h1conn{dial(t, ctx, addPod(t, ctx, mesh.Pod{Name: "cold"}), vip(appVIP, portH1)), nil, t}
	c.r = bufio.NewReader(c)
	c.send("POST %s HTTP/1.1\r\nHost: app\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", path)
	if a := c.response("POST"); a.body != "read to the end: <nil>" {
		t.Errorf("got %d %q", a.StatusCode, a.body)
	}
}

func TestBodiless(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, ctx context.Context, rt *http.Transport, host string) {
		path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.RawQuery {
			case "204":
				w.WriteHeader(204)
			case "304":
				w.Header().Set("Etag", `"x"`)
				w.WriteHeader(304)
			default:
				w.Header().Set("Content-Length", "10")
				io.WriteString(w, "0123456789")
			}
		})
		for range 2 { // the connections must be usable after each
			if a := mustSend(t, ctx, rt, "HEAD", host, path, nil); a.ContentLength != 10 || a.body != "" || a.StatusCode != 200 {
				t.Errorf("HEAD: %d, length %d, body %q", a.StatusCode, a.ContentLength, a.body)
			}
			if a := mustSend(t, ctx, rt, "GET", host, path+"?204", nil); a.StatusCode != 204 || a.body != "" {
				t.Errorf("204: %d %q", a.StatusCode, a.body)
			}
			if a := mustSend(t, ctx, rt, "GET", host, path+"?304", nil); a.StatusCode != 304 || a.body != "" || a.Header.Get("Etag") != `"x"` {
				t.Errorf("304: %d %q %v", a.StatusCode, a.body, a.Header)
			}
			if a := mustSend(t, ctx, rt, "GET", host, path, nil); a.body != "0123456789" {
				t.Errorf("GET: %q", a.body)
			}
		}
	})
}

// TestExpect: interim and early final answers are relayed while the client holds its body back.
func TestExpect(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	got := make(chan string, 1)
	path := w.raw.at(t, func(q rawRequest) {
		if !strings.Contains(strings.ToLower(q.head), "\r\nexpect: 100-continue\r\n") {
			io.WriteString(q.c, "HTTP/1.1 400 No Expect\r\nContent-Length: 0\r\n\r\n")
			return
		}
		if strings.Contains(q.head, "?early") {
			io.WriteString(q.c, "HTTP/1.1 417 Expectation Failed\r\nContent-Length: 2\r\n\r\nno")
			io.Copy(io.Discard, q.r)
			return
		}
		io.WriteString(q.c, "HTTP/1.1 100 Continue\r\n\r\n")
		b := make([]byte, 4)
		n, _ := io.ReadFull(q.r, b)
		got <- string(b[:n])
		io.WriteString(q.c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")
	})
	c := dialH1(t, ctx, portRaw)
	c.send("POST %s HTTP/1.1\r\nHost: app\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n", path)
	if a := c.response("POST"); a.StatusCode != 100 {
		t.Fatalf("got %d before the body was sent, want 100", a.StatusCode)
	}
	c.send("body")
	if b := recv(t, ctx, got, "the body"); b != "body" {
		t.Errorf("the application got %q", b)
	}
	if a := c.response("POST"); a.body != "done" {
		t.Errorf("got %d %q", a.StatusCode, a.body)
	}
	c = dialH1(t, ctx, portRaw)
	c.send("POST %s?early HTTP/1.1\r\nHost: app\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n", path)
	if a := c.response("POST"); a.StatusCode != 417 || a.body != "no" {
		t.Errorf("early final answer: %d %q", a.StatusCode, a.body)
	}
	each(t, func(t *testing.T, ctx context.Context, rt *http.Transport, host string) {
		path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
			io.Copy(w, r.Body) // the first read sends 100
		})
		continued := false
		rt.ExpectContinueTimeout = patience
		ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got100Continue: func() { continued = true }})
		a := mustSend(t, ctx, rt, "POST", host, path, strings.NewReader("body"), "Expect", "100-continue")
		if a.body != "body" || !continued {
			t.Errorf("got %q, 100 seen: %v", a.body, continued)
		}
	})
}

func TestEarlyHints(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, ctx context.Context, rt *http.Transport, host string) {
		hinted := make(chan struct{})
		path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Link", "</x>; rel=preload")
			w.WriteHeader(103)
			select { // the hint must be there before the answer is made
			case <-hinted:
			case <-r.Context().Done():
			}
			w.WriteHeader(200)
			io.WriteString(w, "final")
		})
		var once sync.Once
		ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			if code == 103 && h.Get("Link") != "" {
				once.Do(func() { close(hinted) })
			}
			return nil
		}})
		if a := mustSend(t, ctx, rt, "GET", host, path, nil); a.StatusCode != 200 || a.body != "final" {
			t.Errorf("got %d %q", a.StatusCode, a.body)
		}
	})
}

// TestEarlyAnswer: the application answers while the client is still sending, and
// the client gets all of the answer.
func TestEarlyAnswer(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, ctx context.Context, rt *http.Transport, host string) {
		path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
			http.NewResponseController(w).EnableFullDuplex() // else net/http/1 reads on before it answers
			io.CopyN(io.Discard, r.Body, 1000)
			w.WriteHeader(413)
			io.WriteString(w, "enough")
		})
		more, feed := io.Pipe()
		defer feed.Close()
		go feed.Write(blob(2000)) // and no end
		a := mustSend(t, ctx, rt, "POST", host, path, more)
		if a.StatusCode != 413 || a.body != "enough" {
			t.Errorf("got %d %q", a.StatusCode, a.body)
		}
	})
}

func TestTrailers(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, ctx context.Context, rt *http.Transport, host string) {
		seen := make(chan string, 1)
		path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Trailer", "X-Sum")
			b, _ := io.ReadAll(r.Body)
			seen <- string(b) + " " + r.Trailer.Get("X-Check")
			io.WriteString(w, "body")
			w.(http.Flusher).Flush()
			w.Header().Set("X-Sum", "42")
		})
		req, err := http.NewRequestWithContext(ctx, "POST", "http://service"+path, unknown{strings.NewReader("sent")})
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		req.Header.Set("Te", "trailers")
		req.Trailer = http.Header{"X-Check": {"7"}}
		res, err := rt.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err != nil || string(b) != "body" || res.Trailer.Get("X-Sum") != "42" {
			t.Errorf("body %q, trailer %v, %v", b, res.Trailer, err)
		}
		if got := recv(t, ctx, seen, "the request"); got != "sent 7" {
			t.Errorf("the application got %q, want body and trailer", got)
		}
	})
}

// TestFields: what may pass passes unchanged, what is a hop's own does not.
func TestFields(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	heads := make(chan string, 1)
	path := w.raw.at(t, func(q rawRequest) {
		heads <- q.head
		io.WriteString(q.c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: x-mine\r\nX-Mine: 1\r\nKeep-Alive: timeout=5\r\nProxy-Connection: x\r\n"+
			"X-Aether-Outcome: 200;-;GET;forged\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Kept: yes\r\n\r\nok")
	})
	c := dialH1(t, ctx, portRaw)
	c.send("GET %s?q=%%2f HTTP/1.1\r\nHost: app.shop:8083\r\nConnection: x-secret, keep-alive\r\nX-Secret: 1\r\nKeep-Alive: 5\r\nProxy-Connection: x\r\nTE: gzip\r\n"+
		"X-Aether-Outcome: forged\r\nX-Forwarded-Client-Cert: By=forged\r\nX-Forwarded-Client-Cert: URI=forged\r\nX-Two: a\r\nX-Two: b\r\n"+
		"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nX-Request-Id: mine\r\n\r\n", path)
	a := c.response("GET")
	head := recv(t, ctx, heads, "the request")
	lower := strings.ToLower(head)
	for _, gone := range []string{"x-secret", "keep-alive", "proxy-connection", "gzip", "forged", "x-aether-outcome"} {
		if strings.Contains(lower, gone) {
			t.Errorf("the application was sent %s:\n%s", gone, head)
		}
	}
	for _, kept := range []string{"GET " + path + "?q=%2f HTTP/1.1\r\n", "app.shop:8083\r\n", ": a\r\n", ": b\r\n", ": mine\r\n", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"} {
		if !strings.Contains(head, kept) {
			t.Errorf("the application was not sent %q:\n%s", kept, head)
		}
	}
	xfcc := regexp.MustCompile(`(?mi)^x-forwarded-client-cert: By=spiffe://rig\.test/ns/shop/sa/app;Hash=[0-9a-f]{64};Subject="[^"\r]*";URI=spiffe://rig\.test/ns/shop/sa/web\r$`)
	if len(xfcc.FindAllString(head, -1)) != 1 || strings.Count(lower, "x-forwarded-client-cert:") != 1 {
		t.Errorf("the application must see one x-forwarded-client-cert, of the caller:\n%s", head)
	}
	for _, gone := range []string{"X-Mine", "Keep-Alive", "Proxy-Connection", "X-Aether-Outcome"} {
		if v := a.Header.Values(gone); v != nil {
			t.Errorf("the client was sent %s: %q", gone, v)
		}
	}
	if !slices.Equal(a.Header.Values("Set-Cookie"), []string{"a=1", "b=2"}) || a.Header.Get("X-Kept") != "yes" {
		t.Errorf("the client was not sent all fields: %v", a.Header)
	}
}

func TestRequestID(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, ctx context.Context, rt *http.Transport, host string) {
		path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, r.Header["X-Request-Id"], r.Host, r.Header.Get("X-Forwarded-Proto"), r.Header["X-Aether-Outcome"])
		})
		form := regexp.MustCompile(`^\[([0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})\]` + regexp.QuoteMeta(host) + `http\[\]$`)
		one, two := mustSend(t, ctx, rt, "GET", host, path, nil).body, mustSend(t, ctx, rt, "GET", host, path, nil).body
		if !form.MatchString(one) || one == two {
			t.Errorf("made: %q, then %q", one, two)
		}
		if got := mustSend(t, ctx, rt, "GET", host, path, nil, "X-Request-Id", "mine", "X-Aether-Outcome", "forged").body; got != "[mine]"+host+"http[]" {
			t.Errorf("kept: %q", got)
		}
		if a := mustSend(t, ctx, rt, "GET", host, path, nil); a.Header.Get("X-Aether-Outcome") != "" {
			t.Errorf("the client was sent the outcome %q", a.Header.Get("X-Aether-Outcome"))
		}
	})
}

// TestBigFields: fields of 20 kB, and many of them, pass in both directions.
func TestBigFields(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, ctx context.Context, rt *http.Transport, host string) {
		big := strings.Repeat("0123456789abcdef", 20<<10/16)
		path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Back", r.Header.Get("X-Big"))
			for i := range 60 {
				w.Header().Add("X-Many", r.Header.Get(fmt.Sprint("X-Many-", i)))
			}
		})
		header := []string{"X-Big", big}
		for i := range 60 {
			header = append(header, fmt.Sprint("X-Many-", i), fmt.Sprint("value ", i))
		}
		for range 2 {
			a := mustSend(t, ctx, rt, "GET", host, path, nil, header...)
			many := a.Header["X-Many"]
			if a.StatusCode != 200 || a.Header.Get("X-Back") != big || len(many) != 60 || many[59] != "value 59" {
				t.Errorf("got %d, %d bytes and %d fields back", a.StatusCode, len(a.Header.Get("X-Back")), len(many))
			}
		}
	})
}
