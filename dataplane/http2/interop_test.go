package http2

//lint:file-ignore SA1019 x/net/http2 is the other implementation that these tests hold ours against: net/http shows no frames.

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"aether/dataplane/httpmsg"

	oracle "golang.org/x/net/http2"
)

// pump drives a Conn over a net.Conn: the driver of these tests.
type pump struct {
	mu   sync.Mutex
	cond sync.Cond // something to send, or done
	c    *Conn
	nc   net.Conn
	done bool
	wg   sync.WaitGroup
}

func startPump(t *testing.T, cfg Config, h Handler, nc net.Conn) *pump {
	p := &pump{c: New(cfg, h), nc: nc}
	p.cond.L = &p.mu
	p.wg.Go(p.read)
	p.wg.Go(p.write)
	t.Cleanup(func() { nc.Close(); p.wg.Wait() })
	return p
}

// do runs f with the Conn, as an event of the driver's own.
func (p *pump) do(f func(c *Conn)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(p.c)
	p.cond.Signal()
}

func (p *pump) read() {
	buf, have := make([]byte, frameHeader+maxFrame), 0
	for {
		n, err := p.nc.Read(buf[have:])
		p.mu.Lock()
		have += n
		used, ferr := p.c.Feed(buf[:have])
		have = copy(buf, buf[used:have])
		if err != nil || ferr != nil {
			p.c.Abort(Cancel)
			p.done = true
		}
		p.c.Reap()
		p.cond.Signal()
		p.mu.Unlock()
		if err != nil || ferr != nil {
			return
		}
	}
}

func (p *pump) write() {
	var buf []byte
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		for len(p.c.Out()) == 0 && !p.done {
			p.cond.Wait()
		}
		if p.done {
			return
		}
		buf = append(buf[:0], p.c.Out()...)
		p.mu.Unlock()
		_, err := p.nc.Write(buf)
		p.mu.Lock()
		if err != nil || p.done {
			return
		}
		p.c.Sent(len(buf))
	}
}

// app is a server that sends back each body it gets, with its trailers, and
// keeps nothing but what the windows hold it to.
type app struct {
	resets []Code
}

type echoed struct {
	buf []byte
	end bool
	tr  []httpmsg.Field
}

func (a *app) OnHead(s *Stream, h *httpmsg.Head, end bool) {
	r := respond(200, "x-path", string(h.Path), "x-method", string(h.Method), "x-host", string(h.Authority))
	for _, f := range h.Fields {
		if string(f.Name) == "cookie" || strings.HasPrefix(string(f.Name), "x-") {
			r.Add(bytes.Clone(f.Name), bytes.Clone(f.Value))
		}
	}
	switch string(h.Path) {
	case "/early":
		r.Status = 413
		s.WriteHead(r, false)
		s.WriteData([]byte("too much"), true)
		s.Reset(NoError)
		return
	case "/interim":
		s.WriteHead(respond(103, "link", "x"), false)
	case "/reset":
		s.Reset(RefusedStream)
		return
	}
	s.User = &echoed{}
	s.WriteHead(r, end)
}

func (a *app) OnData(s *Stream, p []byte, end bool) {
	e := s.User.(*echoed)
	e.buf, e.end = append(e.buf, p...), e.end || end
	a.OnWritable(s)
}

func (a *app) OnTrailers(s *Stream, f []httpmsg.Field) {
	e := s.User.(*echoed)
	for _, f := range f {
		e.tr = append(e.tr, httpmsg.Field{Name: bytes.Clone(f.Name), Value: bytes.Clone(f.Value)})
	}
	e.end = true
	a.OnWritable(s)
}

func (a *app) OnWritable(s *Stream) {
	e := s.User.(*echoed)
	n := s.WriteData(e.buf, e.end && e.tr == nil)
	s.Credit(n)
	if e.buf = e.buf[n:]; len(e.buf) == 0 && e.end && e.tr != nil {
		s.WriteTrailers(e.tr)
	}
}

func (a *app) OnReset(_ *Stream, code Code) { a.resets = append(a.resets, code) }
func (a *app) OnRefused(int, *StreamError)  {}

func (c *caller) OnRefused(int, *StreamError) {}
func (a *app) OnGoAway(uint32, Code)          {}

// viaTransport is x/net's client in front of our server.
func viaTransport(t *testing.T, cfg Config) (*http.Client, *pump, *app) {
	near, far := net.Pipe()
	a := &app{}
	cfg.Server = true
	p := startPump(t, cfg, a, far)
	dialled := false
	tr := &oracle.Transport{AllowHTTP: true, DialTLSContext: func(context.Context, string, string, *tls.Config) (net.Conn, error) {
		if dialled {
			return nil, errors.New("there is one connection only")
		}
		dialled = true
		return near, nil
	}}
	t.Cleanup(func() { near.Close() })
	return &http.Client{Transport: tr}, p, a
}

func noise(n int) []byte {
	b, x := make([]byte, n), uint32(n)
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return b
}

func TestServerOracle(t *testing.T) {
	client, p, a := viaTransport(t, Config{})
	t.Run("get", func(t *testing.T) {
		for i := range 50 {
			req, _ := http.NewRequest("GET", fmt.Sprintf("http://cart.shop/items?n=%d", i), nil)
			req.Header.Set("X-One", strings.Repeat("v", i*100))
			req.Header["Cookie"] = []string{"a=1; b=2"}
			res, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			h := res.Header
			if res.StatusCode != 200 || h.Get("X-Path") != req.URL.RequestURI() || h.Get("X-Host") != "cart.shop" ||
				len(h.Get("X-One")) != i*100 || h.Get("Cookie") != "a=1; b=2" {
				t.Fatalf("%v", res)
			}
		}
	})
	t.Run("head", func(t *testing.T) {
		res, err := client.Head("http://cart.shop/")
		if err != nil || res.Header.Get("X-Method") != "HEAD" {
			t.Fatalf("%v %v", res, err)
		}
	})
	t.Run("upload and download with trailers", func(t *testing.T) {
		body := noise(5 << 20)
		req, _ := http.NewRequest("POST", "http://cart.shop/echo", bytes.NewReader(body))
		req.Trailer = http.Header{"X-Sum": {"abc"}}
		req.ContentLength = -1
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(res.Body)
		if err != nil || sha256.Sum256(got) != sha256.Sum256(body) {
			t.Fatalf("%d bytes of %d, %v", len(got), len(body), err)
		}
		if res.Trailer.Get("X-Sum") != "abc" {
			t.Errorf("trailers %v", res.Trailer)
		}
	})
	t.Run("many at once", func(t *testing.T) {
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				body := noise(i * 3000)
				res, err := client.Post("http://cart.shop/echo", "x/y", bytes.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				got, err := io.ReadAll(res.Body)
				if err != nil || !bytes.Equal(got, body) {
					t.Errorf("%d bytes of %d, %v", len(got), len(body), err)
				}
				res.Body.Close()
			})
		}
		wg.Wait()
	})
	t.Run("early answer", func(t *testing.T) {
		res, err := client.Post("http://cart.shop/early", "x/y", bytes.NewReader(noise(3<<20)))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(res.Body)
		if res.StatusCode != 413 || err != nil || string(got) != "too much" {
			t.Fatalf("%v %q %v", res.StatusCode, got, err)
		}
	})
	t.Run("interim", func(t *testing.T) {
		res, err := client.Get("http://cart.shop/interim")
		if err != nil || res.StatusCode != 200 {
			t.Fatal(res, err)
		}
		res.Body.Close()
	})
	t.Run("cancel", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		pr, pw := io.Pipe()
		req, _ := http.NewRequestWithContext(ctx, "POST", "http://cart.shop/echo", pr)
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		pw.Write([]byte("hello"))
		if _, err := io.ReadFull(res.Body, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		cancel()
		pw.CloseWithError(context.Canceled) // the body's reader does not watch ctx
		if _, err := io.ReadAll(res.Body); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		// A later request goes through the same connection, behind the reset.
		res, err = client.Get("http://cart.shop/")
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		p.do(func(*Conn) {
			if n := len(a.resets); n == 0 || a.resets[n-1] != Cancel {
				t.Errorf("resets %v", a.resets)
			}
		})
	})
	t.Run("header too large", func(t *testing.T) {
		req, _ := http.NewRequest("GET", "http://cart.shop/", nil)
		for i := range 150 {
			req.Header.Set(fmt.Sprint("X-", i), "v")
		}
		res, err := client.Do(req)
		if err != nil || res.StatusCode != 431 {
			t.Fatal(res, err)
		}
		res.Body.Close()
	})
	p.do(func(c *Conn) {
		c.Reap()
		balanced(t, c)
		if c.Streams() != 0 {
			t.Errorf("%d streams left", c.Streams())
		}
		c.Shutdown(NoError)
	})
	// What the client sends before it knows is served; then it wants another connection.
	for n := 0; ; n++ {
		res, err := client.Get("http://cart.shop/")
		if err != nil {
			break
		}
		res.Body.Close()
		p.do(func(c *Conn) {
			if c.Warned() {
				c.Shutdown(NoError)
			}
		})
		if n > 1000 {
			t.Fatal("requests after Shutdown go through without end")
		}
	}
	p.do(func(c *Conn) {
		if s := c.Stats(); s.Refused != 0 {
			t.Errorf("%d requests refused by a graceful end", s.Refused)
		}
	})
}

// caller is the client side of a test: it waits for whole responses.
type caller struct {
	p *pump
}

type answer struct {
	c        *caller
	body     []byte // to send
	trailers []httpmsg.Field
	status   int
	fields   string
	got      bytes.Buffer
	reset    *Code
	interim  int
	done     chan struct{}
	over     bool
}

func (a *answer) end() {
	if !a.over {
		a.over = true
		close(a.done)
	}
}

func (c *caller) OnHead(s *Stream, h *httpmsg.Head, end bool) {
	a := s.User.(*answer)
	if h.Status < 200 {
		a.interim++
		return
	}
	a.status, a.fields = h.Status, fieldText(h.Fields)
	if end {
		a.end()
	}
}
func (c *caller) OnData(s *Stream, p []byte, end bool) {
	a := s.User.(*answer)
	a.got.Write(p)
	s.Credit(len(p))
	if end {
		a.end()
	}
}
func (c *caller) OnTrailers(s *Stream, f []httpmsg.Field) {
	a := s.User.(*answer)
	a.fields += " |" + fieldText(f)
	a.end()
}
func (c *caller) OnReset(s *Stream, code Code) {
	a := s.User.(*answer)
	a.reset = &code
	a.end()
}
func (c *caller) OnWritable(s *Stream) {
	a := s.User.(*answer)
	n := s.WriteData(a.body, a.trailers == nil)
	if a.body = a.body[n:]; len(a.body) == 0 && a.trailers != nil {
		s.WriteTrailers(a.trailers)
	}
}
func (c *caller) OnGoAway(uint32, Code) {}

func (c *caller) start(t *testing.T, h *httpmsg.Head, body []byte, trailers ...httpmsg.Field) (a *answer, s *Stream) {
	a = &answer{c: c, body: body, trailers: trailers, done: make(chan struct{})}
	c.p.do(func(conn *Conn) {
		var err error
		if s, err = conn.Open(); err != nil {
			t.Error(err)
			a.end()
			return
		}
		s.User = a
		s.WriteHead(h, body == nil && trailers == nil)
		if body != nil || trailers != nil {
			c.OnWritable(s)
		}
	})
	return a, s
}

// TestClientOracle is our client in front of x/net's server.
func TestClientOracle(t *testing.T) {
	near, far := net.Pipe()
	release := make(chan struct{})
	cancelled := make(chan struct{}, 1)
	mux := http.NewServeMux()
	mux.HandleFunc("/echo", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Len", fmt.Sprint(r.ContentLength))
		w.Header().Set("Trailer", "Grpc-Status")
		io.Copy(w, r.Body)
		w.Header().Set("Grpc-Status", r.Trailer.Get("X-Sum"))
	})
	mux.HandleFunc("/plain", func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Date"] = nil
		w.Header().Set("X-Host", r.Host)
		w.Header().Set("X-Cookie", r.Header.Get("Cookie"))
		w.Header().Set("Content-Length", "5")
		if r.Method != "HEAD" {
			io.WriteString(w, "hello")
		}
	})
	mux.HandleFunc("/early", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(413)
	})
	mux.HandleFunc("/interim", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Link", "x")
		w.WriteHeader(103)
		w.WriteHeader(204)
	})
	mux.HandleFunc("/hang", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			cancelled <- struct{}{}
		case <-release:
		}
	})
	mux.HandleFunc("/panic", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	var wg sync.WaitGroup
	wg.Go(func() { new(oracle.Server).ServeConn(far, &oracle.ServeConnOpts{Handler: mux}) })
	t.Cleanup(func() { near.Close(); wg.Wait() })
	c := &caller{}
	c.p = startPump(t, Config{}, c, near)
	defer close(release)
	post := func(path string) *httpmsg.Head {
		return &httpmsg.Head{Method: []byte("POST"), Authority: []byte("cart.shop"), Path: []byte(path)}
	}
	t.Run("get", func(t *testing.T) {
		for range 20 {
			a, _ := c.start(t, get("/plain", "cookie", "a=1", "x-request-id", "7"), nil)
			<-a.done
			if a.status != 200 || a.got.String() != "hello" || !strings.Contains(a.fields, `x-host="cart.shop" `) && !strings.Contains(a.fields, `x-cookie="a=1"`) {
				t.Fatalf("%d %s %q", a.status, a.fields, a.got.String())
			}
		}
	})
	t.Run("head", func(t *testing.T) {
		h := get("/plain")
		h.Method = []byte("HEAD")
		a, _ := c.start(t, h, nil)
		<-a.done
		if a.status != 200 || a.got.Len() != 0 || !strings.Contains(a.fields, `content-length="5"`) {
			t.Fatalf("%d %s", a.status, a.fields)
		}
	})
	t.Run("upload and download with trailers", func(t *testing.T) {
		body := noise(5 << 20)
		a, _ := c.start(t, post("/echo"), body, fields("x-sum", "abc")...)
		<-a.done
		if a.status != 200 || !bytes.Equal(a.got.Bytes(), body) || !strings.HasSuffix(a.fields, `| grpc-status=""`) && !strings.HasSuffix(a.fields, `| grpc-status="abc"`) {
			t.Fatalf("%d %s, %d bytes, reset %v", a.status, a.fields, a.got.Len(), a.reset)
		}
	})
	t.Run("many at once", func(t *testing.T) {
		var all []*answer
		for i := range 90 {
			a, _ := c.start(t, post("/echo"), noise(i*3000))
			all = append(all, a)
		}
		for i, a := range all {
			<-a.done
			if a.status != 200 || !bytes.Equal(a.got.Bytes(), noise(i*3000)) {
				t.Errorf("%d: %d, %d bytes, reset %v", i, a.status, a.got.Len(), a.reset)
			}
		}
	})
	t.Run("early answer", func(t *testing.T) {
		a, s := c.start(t, post("/early"), noise(4<<20))
		<-a.done
		if a.status != 413 {
			t.Errorf("%d", a.status)
		}
		c.p.do(func(*Conn) { s.Reset(Cancel) })
	})
	t.Run("interim", func(t *testing.T) {
		a, _ := c.start(t, get("/interim"), nil)
		<-a.done
		if a.status != 204 || a.interim != 1 {
			t.Errorf("%d after %d", a.status, a.interim)
		}
	})
	t.Run("cancel", func(t *testing.T) {
		_, s := c.start(t, get("/hang"), nil)
		a, _ := c.start(t, get("/plain"), nil)
		<-a.done
		c.p.do(func(*Conn) { s.Reset(Cancel) })
		<-cancelled
	})
	t.Run("reset", func(t *testing.T) {
		a, _ := c.start(t, get("/panic"), nil)
		<-a.done
		if a.reset == nil || *a.reset != InternalError {
			t.Errorf("%v", a.reset)
		}
	})
	c.p.do(func(conn *Conn) {
		conn.Reap()
		balanced(t, conn)
		if conn.Streams() != 0 {
			t.Errorf("%d streams left", conn.Streams())
		}
	})
}
