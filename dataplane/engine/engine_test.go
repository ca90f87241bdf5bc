package engine

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// plainSockets makes sockets in this process's own namespace.
type plainSockets struct{}

func (plainSockets) Get(v6 bool) (int, bool) {
	fam := unix.AF_INET
	if v6 {
		fam = unix.AF_INET6
	}
	fd, err := unix.Socket(fam, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1), // as tproxy/socket does
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1))
	}
	return fd, err == nil
}

func (s plainSockets) Request(v6 bool, on func(int, error)) {
	fd, _ := s.Get(v6)
	go on(fd, nil)
}

// proxy is an exchange.Service that sends every request to one address.
type proxy struct {
	pod  *Pod
	to   netip.AddrPort
	h2   bool
	done atomic.Int64
	fail atomic.Int64
}

func (p *proxy) Request(x *exchange.Exchange) {
	info := x.Conn.(*ConnInfo)
	if string(x.Req.Path) == "/local" {
		x.Reply(&httpmsg.Head{Status: 421}, []byte("local\n"))
		return
	}
	info.Loop.Send(x, p.pod, plainSockets{}, p.to, p.h2, nil)
}
func (p *proxy) Response(x *exchange.Exchange, h *httpmsg.Head) {
	h.Add([]byte("x-proxied"), []byte("yes"))
}
func (p *proxy) Failed(x *exchange.Exchange, c exchange.Code) {
	p.fail.Add(1)
	if c == exchange.Stale && x.Replayable() && x.Attempts < 3 {
		x.Conn.(*ConnInfo).Loop.Send(x, p.pod, plainSockets{}, p.to, p.h2, nil)
	}
}
func (p *proxy) Done(*exchange.Exchange) { p.done.Add(1) }

type rig struct {
	e    *Engine
	p    *proxy
	addr string
	h2c  string
}

// newRig runs an engine in front of app.
func newRig(t testing.TB, app http.Handler, h2 bool) *rig {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: app, Protocols: new(http.Protocols)}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	e, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	wg.Go(func() { e.Run(ctx) })
	pod := e.AddPod("test")
	p := &proxy{pod: pod, to: netip.MustParseAddrPort(ln.Addr().String()), h2: h2}
	pool := &exchange.Pool{Service: p}
	listen := func(serve func(l *Loop, fd int, info *ConnInfo) error) string {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			t.Fatal(err)
		}
		if err := unix.Listen(fd, 1024); err != nil {
			t.Fatal(err)
		}
		sa, _ := unix.Getsockname(fd)
		if err := pod.Listen(fd, func(l *Loop, c int) {
			if err := serve(l, c, &ConnInfo{Pod: pod, Loop: l, Pool: pool}); err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fmt.Sprintf("127.0.0.1:%d", sa.(*unix.SockaddrInet4).Port)
	}
	r := &rig{e: e, p: p}
	r.addr = listen(func(l *Loop, fd int, info *ConnInfo) error { return l.ServeHTTP1(fd, nil, info, nil) })
	r.h2c = listen(func(l *Loop, fd int, info *ConnInfo) error { return l.ServeHTTP2(fd, nil, info, nil) })
	t.Cleanup(func() {
		cancel()
		srv.Close()
		wg.Wait()
		for _, l := range e.Loops() {
			if n := l.Stats().Panics; n != 0 {
				t.Errorf("%d panics on loop %d", n, l.ID())
			}
		}
	})
	return r
}

func echo() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s %s", r.Method, r.Host, r.URL.RequestURI())
	})
	mux.HandleFunc("/echo", func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/1; HTTP/2 is
		w.Header().Set("Trailer", "X-Sum")
		h := sha256.New()
		_, err := io.Copy(io.MultiWriter(w, h), r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("X-Sum", fmt.Sprintf("%x", h.Sum(nil)))
	})
	mux.HandleFunc("/sum", func(w http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		n, err := io.Copy(h, r.Body)
		fmt.Fprintf(w, "%d %x %v %v", n, h.Sum(nil), err, r.Trailer.Get("X-T"))
	})
	mux.HandleFunc("/big", func(w http.ResponseWriter, r *http.Request) {
		b := bytes.Repeat([]byte("0123456789abcdef"), 4096)
		for range 64 {
			w.Write(b)
		}
	})
	return mux
}

func clients(r *rig) map[string]*http.Client {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	return map[string]*http.Client{
		"http1": {Transport: &http.Transport{DialContext: to(r.addr)}},
		"h2c":   {Transport: &http.Transport{DialContext: to(r.h2c), Protocols: p}},
	}
}

func to(addr string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}
}

func TestCodecPairs(t *testing.T) {
	for _, app2 := range []bool{false, true} {
		r := newRig(t, echo(), app2)
		for name, c := range clients(r) {
			t.Run(fmt.Sprintf("%s app h2=%v", name, app2), func(t *testing.T) {
				get := func(method, path string, body io.Reader) (*http.Response, []byte) {
					t.Helper()
					req, _ := http.NewRequest(method, "http://svc:8080"+path, body)
					res, err := c.Do(req)
					if err != nil {
						t.Fatal(err)
					}
					defer res.Body.Close()
					b, err := io.ReadAll(res.Body)
					if err != nil {
						t.Fatal(err)
					}
					return res, b
				}
				for range 3 {
					res, b := get("GET", "/a?b=c", nil)
					if res.StatusCode != 200 || string(b) != "GET svc:8080 /a?b=c" || res.Header.Get("X-Proxied") != "yes" {
						t.Fatalf("%v %q", res, b)
					}
				}
				if res, b := get("HEAD", "/a", nil); res.StatusCode != 200 || len(b) != 0 {
					t.Fatalf("HEAD: %v %q", res, b)
				}
				if res, b := get("GET", "/local", nil); res.StatusCode != 421 || string(b) != "local\n" {
					t.Fatalf("local: %v %q", res, b)
				}
				if res, b := get("POST", "/sum", strings.NewReader("")); res.StatusCode != 200 || !strings.HasPrefix(string(b), "0 ") {
					t.Fatalf("empty: %v %q", res, b)
				}
				data := make([]byte, 3<<20)
				rand.New(rand.NewSource(1)).Read(data)
				want := fmt.Sprintf("%x", sha256.Sum256(data))
				if _, b := get("POST", "/sum", bytes.NewReader(data)); !strings.Contains(string(b), want) {
					t.Fatalf("upload: %q want %s", b, want)
				}
				// Unknown length, both ways, trailers down.
				res, b := get("POST", "/echo", struct{ io.Reader }{bytes.NewReader(data)})
				if !bytes.Equal(b, data) {
					t.Fatalf("echo differs: %d bytes", len(b))
				}
				if got := res.Trailer.Get("X-Sum"); got != want {
					t.Errorf("trailer %q want %q", got, want)
				}
				if _, b := get("GET", "/big", nil); len(b) != 64*65536 {
					t.Errorf("big: %d", len(b))
				}
			})
		}
	}
}

func TestConcurrentMix(t *testing.T) {
	r := newRig(t, echo(), false)
	var wg sync.WaitGroup
	for name, c := range clients(r) {
		for i := range 8 {
			wg.Go(func() {
				rnd := rand.New(rand.NewSource(int64(i)))
				for range 30 {
					data := make([]byte, rnd.Intn(200_000))
					rnd.Read(data)
					res, err := c.Post("http://svc:8080/echo", "x/y", bytes.NewReader(data))
					if err != nil {
						t.Errorf("%s: %v", name, err)
						return
					}
					b, err := io.ReadAll(res.Body)
					res.Body.Close()
					if err != nil || !bytes.Equal(b, data) {
						t.Errorf("%s: %d of %d bytes, %v", name, len(b), len(data), err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
}

func TestPipeline(t *testing.T) {
	r := newRig(t, echo(), false)
	c, err := net.Dial("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const n = 200
	go func() {
		var b bytes.Buffer
		for i := range n {
			fmt.Fprintf(&b, "GET /%d HTTP/1.1\r\nHost: svc\r\n\r\n", i)
		}
		c.Write(b.Bytes())
	}()
	br := bufio.NewReader(c)
	for i := range n {
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(i, err)
		}
		b, _ := io.ReadAll(res.Body)
		if want := fmt.Sprintf("GET svc /%d", i); string(b) != want {
			t.Fatalf("%q want %q", b, want)
		}
	}
}

func TestRefusals(t *testing.T) {
	r := newRig(t, echo(), false)
	for _, tt := range []struct{ in, want string }{
		{"GET / HTTP/1.1\r\n\r\n", "400"},
		{"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "400"},
		{"GET /" + strings.Repeat("a", 20000) + " HTTP/1.1\r\nHost: a\r\n\r\n", "414"},
		{"GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("a", 70000) + "\r\n\r\n", "431"},
	} {
		c, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, tt.in)
		b, err := io.ReadAll(c) // closed by the proxy
		if err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 "+tt.want) || !strings.Contains(string(b), "connection: close") {
			t.Errorf("%.40q: %q %v", tt.in, b, err)
		}
		c.Close()
	}
	if r.p.done.Load() != 0 {
		t.Error("a malformed request became an exchange")
	}
}
