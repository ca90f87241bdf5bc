package engine

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/reactor"
)

// say answers with text and reports false: close; true: go on.
func say(text string, again bool) func(c *net.TCPConn, br *bufio.Reader, line string) bool {
	return func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
		io.WriteString(c, text)
		return again
	}
}

func reset(c *net.TCPConn) { _ = c.SetLinger(0) }

// TestApplications: what each kind of application does is what both kinds of client see.
func TestApplications(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 20000)
	faults := map[string]string{ // what is told of those that are at fault
		"garbage":                   "in the first line, byte 0x53",
		"101 that nobody asked for": "status 101 with an Upgrade field",
		"1xx without end":           "too many interim responses; at most 64",
		"half a head":               "in the middle of the head",
		"half a body":               "before the body had the length of its Content-Length",
		"half a chunk":              "before the last chunk of the body",
	}
	for _, tt := range []struct {
		name   string
		serve  func(c *net.TCPConn, br *bufio.Reader, line string) bool
		method string
		body   string
		want   string // status and body, or "cut"
	}{
		{"plain", say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", true), "GET", "", "200 ok"},
		{"content-length: 0 and nothing else", say("HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n", true), "POST", "x", "201 "},
		{"304 with a length", say("HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", true), "GET", "", "304 "},
		{"204 with a coding", say("HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", true), "GET", "", "204 "},
		{"HEAD with a length", say("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", true), "HEAD", "", "200 "},
		{"ends with the connection, at once", say("HTTP/1.1 200 OK\r\n\r\nbytes until the end", false), "GET", "", "200 bytes until the end"},
		{"ends with the connection, much", say("HTTP/1.0 200 OK\r\n\r\n"+big, false), "GET", "", "200 " + big},
		{"close with a length", say("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", false), "GET", "", "200 ok"},
		{"103 first", say("HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", true), "GET", "", "200 ok"},
		{"surplus bytes", say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", true), "GET", "", "200 ok"},
		{"nothing", func(*net.TCPConn, *bufio.Reader, string) bool { return false }, "GET", "", "503 closed"},
		{"a reset", func(c *net.TCPConn, _ *bufio.Reader, _ string) bool { reset(c); return false }, "GET", "", "503 closed"},
		{"garbage", say("SSH-2.0-OpenSSH\r\n", true), "GET", "", "503 protocol"},
		{"101 that nobody asked for", say("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", true), "GET", "", "503 protocol"},
		{"1xx without end", func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
			for range 1 << 20 {
				if _, err := io.WriteString(c, "HTTP/1.1 102 Processing\r\n\r\n"); err != nil {
					break
				}
			}
			return false
		}, "GET", "", "503 protocol"},
		{"half a head", say("HTTP/1.1 200 OK\r\nContent-", false), "GET", "", "503 closed"},
		{"half a body", say("HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhalf", false), "GET", "", "cut"},
		{"half a chunk", say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf", false), "GET", "", "cut"},
		{"a reset in a body that ends with the connection", func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
			io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\nhalf")
			reset(c)
			return false
		}, "GET", "", "cut"},
		{"413 before the body, and closes", say("HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbig", false), "POST", big + big + big, "413 big"},
		{"200 before the body, and stays", say("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nearly", true), "POST", big + big + big, "200 early"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			v := &svc{pod: pod, to: s.app(heads(func(c *net.TCPConn, br *bufio.Reader, line string) bool {
				if tt.body == "x" {
					br.ReadByte()
				}
				return tt.serve(c, br, line)
			}))}
			p := new(http.Protocols)
			p.SetUnencryptedHTTP2(true)
			for name, c := range map[string]*http.Client{
				"http1": {Transport: &http.Transport{DialContext: to(s.front(pod, v, false))}},
				"h2c":   {Transport: &http.Transport{DialContext: to(s.front(pod, v, true)), Protocols: p}},
			} {
				c.Timeout = 20 * time.Second
				for range 3 { // and the connection's state is right afterwards
					var body io.Reader
					if tt.body != "" {
						body = strings.NewReader(tt.body)
					}
					req, _ := http.NewRequest(tt.method, "http://a/", body)
					res, err := c.Do(req)
					if err != nil {
						if tt.want == "cut" || len(tt.body) > 1000 && name == "http1" {
							continue // a reset may overtake the head, or the client's own write fail first
						}
						t.Fatalf("%s: %v", name, err)
					}
					b, err := io.ReadAll(res.Body)
					res.Body.Close()
					got := fmt.Sprintf("%d %s", res.StatusCode, b)
					if err != nil {
						got = "cut"
					}
					if tt.want == "cut" && got == "503 closed" {
						continue // the reset overtook the head
					}
					if tt.name == "304 with a length" && name == "h2c" {
						continue // the client takes a length for the promise of a body
					}
					if got != tt.want {
						t.Errorf("%s: %.60q (%v), want %.60q", name, got, err, tt.want)
					}
				}
				c.CloseIdleConnections()
			}
			eventually(t, "every exchange is done", func() bool { return v.begun.Load() == v.done.Load() })
			v.faults.Range(func(k, _ any) bool {
				if f := k.(string); !strings.Contains(f, faults[tt.name]) || (f == "") != (faults[tt.name] == "") {
					t.Errorf("its fault is told as %q, want %q", f, faults[tt.name])
				}
				return true
			})
		})
	}
}

// TestStale (case 139): a kept connection that the application closed costs a safe
// request nothing; an unsafe one is not run twice.
func TestStale(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	seen := make(chan string, 1000)
	v := &svc{pod: pod, to: s.app(func(c *net.TCPConn) {
		n := 0
		heads(func(c *net.TCPConn, br *bufio.Reader, line string) bool {
			seen <- line
			if n++; n == 2 { // the second request on a connection finds it closed, after it was read
				reset(c)
				return false
			}
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
			return true
		})(c)
	})}
	c := dial(t, s.front(pod, v, false))
	br := bufio.NewReader(c)
	ask := func(method string) int {
		t.Helper()
		fmt.Fprintf(c, "%s / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", method)
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, res.Body)
		return res.StatusCode
	}
	for range 20 {
		if got := ask("GET"); got != 200 {
			t.Fatalf("GET: %d", got)
		}
	}
	for len(seen) > 0 {
		<-seen
	}
	const posts = 20
	for range posts {
		ask("POST")
	}
	if n := len(seen); n != posts {
		t.Errorf("%d POSTs, the application saw %d", posts, n)
	}
}

// TestSurplus: a connection on which bytes came unasked carries no other
// request. (Bytes that come after the next request was sent look like its
// answer; HTTP/1 has no cure for that.)
func TestSurplus(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, to: s.app(heads(func(c *net.TCPConn, _ *bufio.Reader, line string) bool {
		_, path, _ := strings.Cut(line, " ")
		path, _, _ = strings.Cut(path, " ")
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(path), path)
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
		return true
	}))}
	c := dial(t, s.front(pod, v, false))
	br := bufio.NewReader(c)
	for i := range 300 {
		fmt.Fprintf(c, "GET /%d HTTP/1.1\r\nHost: a\r\n\r\n", i)
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(res.Body)
		if got := string(b); got != fmt.Sprintf("/%d", i) {
			t.Fatalf("request %d got %q", i, got)
		}
		eventually(t, "the connection is not kept", func() bool { return pod.Conns() == 1 })
	}
}

// TestFullDuplex: an application that answers as it reads, and a client that
// first sends everything, move as far as the buffers between them go, and
// neither direction blocks the other.
func TestFullDuplex(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	const size = 8 << 20
	v := &svc{pod: pod, to: s.app(heads(func(c *net.TCPConn, br *bufio.Reader, _ string) bool {
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", size)
		done := make(chan struct{})
		go func() { // answers without regard to what it reads
			defer close(done)
			io.CopyN(c, zeros{}, size)
		}()
		io.CopyN(io.Discard, br, size)
		<-done
		return true
	}))}
	c := dial(t, s.front(pod, v, false))
	fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", size)
	if n, err := io.CopyN(c, zeros{}, size); err != nil { // reads nothing before it has sent all
		t.Fatalf("%d bytes sent: %v", n, err)
	}
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, res.Body); err != nil || n != size {
		t.Fatalf("%d bytes, %v", n, err)
	}
}

// TestAnswerFirst: an application that reads nothing before its answer is out,
// behind full buffers in both directions: whoever waits for it to read on
// before reading its answer waits for ever.
func TestAnswerFirst(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	const size = 32 << 20
	v := &svc{pod: pod, to: s.app(heads(func(c *net.TCPConn, br *bufio.Reader, _ string) bool {
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", size)
		io.CopyN(c, zeros{}, size-1)
		io.CopyN(io.Discard, br, size)
		c.Write([]byte{0}) // the last byte, once it has the whole request
		return true
	}))}
	c := dial(t, s.front(pod, v, false))
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", size)
		io.CopyN(c, zeros{}, size)
	})
	s.seen(t, func(c *h1client) bool { return c.stalled && c.wblk })
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, res.Body); err != nil || n != size {
		t.Fatalf("%d bytes, %v", n, err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestSlowReader: who reads nothing makes the application wait, not us grow.
func TestSlowReader(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		s := newStage(t, Config{})
		pod := s.e.AddPod("p")
		wrote := make(chan int64, 1)
		v := &svc{pod: pod, to: s.app(heads(func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
			io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
			_ = c.SetWriteBuffer(64 << 10)
			n := int64(0)
			for {
				_ = c.SetWriteDeadline(time.Now().Add(500 * time.Millisecond)) // no progress for so long: it is stopped
				m, err := io.CopyN(c, zeros{}, 256<<10)
				if n += m; err != nil && m == 0 {
					break
				}
			}
			wrote <- n
			return false
		}))}
		ctx, cancel := context.WithCancel(context.Background())
		p := new(http.Protocols)
		p.SetUnencryptedHTTP2(h2)
		p.SetHTTP1(!h2)
		tr := &http.Transport{DialContext: to(s.front(pod, v, h2)), Protocols: p}
		req, _ := http.NewRequestWithContext(ctx, "GET", "http://a/", nil)
		res, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		if n := <-wrote; n > 24<<20 { // kernel buffers on both sides, and our 256 KiB
			t.Errorf("h2=%v: the application could send %d bytes that nobody reads", h2, n)
		}
		cancel()
		res.Body.Close()
		tr.CloseIdleConnections()
	}
}

// TestAskingWithoutReading: a client that pipelines requests and reads no
// answer is stopped.
func TestAskingWithoutReading(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprint(h2), func(t *testing.T) {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			v := &svc{pod: pod, request: local}
			c := dial(t, s.front(pod, v, h2))
			var ask []byte
			id := uint32(1)
			next := func() []byte {
				ask = ask[:0]
				for range 500 {
					if !h2 {
						ask = append(ask, "HEAD / HTTP/1.1\r\nHost: a\r\n\r\n"...)
						continue
					}
					// HEADERS: HEAD (literal), http, /, authority "a"; RFC 7541.
					block := "\x02\x04HEAD\x86\x84\x01\x01a"
					ask = append(ask, 0, 0, byte(len(block)), 1, 5, byte(id>>24), byte(id>>16), byte(id>>8), byte(id))
					ask = append(ask, block...)
					id += 2
				}
				return ask
			}
			if h2 {
				io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
			}
			n := 0
			for {
				_ = c.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
				m, err := c.Write(next())
				n += m
				if err != nil {
					if !errors.Is(err, context.DeadlineExceeded) && !isTimeout(err) {
						t.Logf("ended by the proxy: %v", err)
					}
					break
				}
				if n > 256<<20 {
					t.Fatal("it takes requests without end")
				}
			}
			t.Logf("%d bytes of requests, %d exchanges", n, v.done.Load())
			var most int
			s.onLoop(func(l *Loop) {
				l.Each(func(src reactor.Source) {
					switch c := src.(type) {
					case *h1server:
						most = max(most, len(c.out))
					case *h2conn:
						most = max(most, len(c.h2.Out()))
					}
				})
			})
			if most > 2<<20 {
				t.Errorf("%d bytes wait for a client that does not read", most)
			}
			if !h2 { // and goes on where it was stopped
				_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
				br := bufio.NewReader(c)
				for range 1000 {
					res, err := http.ReadResponse(br, &http.Request{Method: "HEAD"})
					if err != nil || res.StatusCode != 421 {
						t.Fatal(res, err)
					}
				}
			}
		})
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// TestOutOfDescriptors: with none left the backlog waits, the loop does not
// spin, and accepting goes on by itself.
func TestOutOfDescriptors(t *testing.T) {
	complaints := counter{of: "new connections wait"}
	s := newStage(t, Config{Log: slog.New(&complaints)})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, request: local}
	addr := s.front(pod, v, false)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &was)
	// A limit below what is open already lets nothing more be opened; the client's socket comes first.
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	var port int
	fmt.Sscanf(addr, "127.0.0.1:%d", &port)
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "accepting pauses", func() bool { return s.e.Shed(ShedFiles) >= 1 })
	l := s.e.Loops()[0]
	before := l.Stats().Iterations
	eventually(t, "it is tried again", func() bool { return s.e.Shed(ShedFiles) >= 4 })
	if n := complaints.Load(); n != 1 {
		t.Errorf("%d lines in the log about it, want 1", n)
	}
	if n := l.Stats().Iterations - before; n > 100 {
		t.Errorf("%d iterations in three pauses: the loop spins", n)
	}
	unix.Setrlimit(unix.RLIMIT_NOFILE, &was)
	unix.Write(fd, []byte("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"))
	var got bytes.Buffer
	buf := make([]byte, 4096)
	for {
		n, err := unix.Read(fd, buf)
		if n <= 0 || err != nil {
			break
		}
		got.Write(buf[:n])
	}
	if !strings.HasPrefix(got.String(), "HTTP/1.1 421") {
		t.Errorf("%q", got.String())
	}
}

// counter is a slog.Handler that counts the lines with one message: on a busy machine there may be others.
type counter struct {
	atomic.Int64
	of string
}

func (c *counter) Enabled(context.Context, slog.Level) bool { return true }
func (c *counter) Handle(_ context.Context, r slog.Record) error {
	if r.Message == c.of {
		c.Add(1)
	}
	return nil
}
func (c *counter) WithAttrs([]slog.Attr) slog.Handler { return c }
func (c *counter) WithGroup(string) slog.Handler      { return c }
