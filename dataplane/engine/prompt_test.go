package engine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"
)

// apart is an application that writes head and body of an answer apart, with Nagle's algorithm.
func apart(c *net.TCPConn, body ...string) {
	n := 0
	for _, b := range body {
		n += len(b)
	}
	fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n", n)
	io.WriteString(c, "\r\n")
	for _, b := range body {
		io.WriteString(c, b)
	}
}

// median asks n times over one connection and returns how long half of the answers took at most.
func median(t testing.TB, c *net.TCPConn, n int, pieces ...string) time.Duration {
	t.Helper()
	br := bufio.NewReader(c)
	took := make([]time.Duration, n)
	for i := range took {
		start := time.Now()
		for _, p := range pieces {
			if _, err := io.WriteString(c, p); err != nil {
				t.Fatal(err)
			}
		}
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != 200 {
			t.Fatal(res.StatusCode, err)
		}
		took[i] = time.Since(start)
	}
	slices.Sort(took)
	return took[n/2]
}

// TestWritesApart: who writes the parts of a message apart, with Nagle's algorithm, does not wait
// for the kernel's delayed acknowledgement, 40 ms at least, on a connection that is used again.
func TestWritesApart(t *testing.T) {
	for _, tt := range []struct {
		name   string
		answer []string
		pieces []string
	}{
		{"an application's head and body", []string{"ok"}, []string{"GET / HTTP/1.1\r\nHost: a\r\n\r\n"}},
		{"an application's body in pieces", []string{"a", "bc", "def"}, []string{"GET / HTTP/1.1\r\nHost: a\r\n\r\n"}},
		{"a client's head and body", []string{"ok"}, []string{"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n", "body"}},
		{"a client's head in pieces", []string{"ok"}, []string{"POST / HTTP/1.1\r\n", "Host: a\r\nContent-Length: 4\r\n", "\r\n", "bo", "dy"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStage(t, Config{})
			pod := s.e.AddPod("p")
			v := &svc{pod: pod, to: s.app(func(c *net.TCPConn) {
				_ = c.SetNoDelay(false)
				br := bufio.NewReader(c)
				for {
					if _, err := posted(br); err != nil {
						return
					}
					apart(c, tt.answer...)
				}
			})}
			c := dial(t, s.front(pod, v, false))
			_ = c.SetNoDelay(false)
			if p50 := median(t, c, 61, tt.pieces...); p50 > 20*time.Millisecond {
				t.Errorf("half of the answers took %v and more", p50)
			}
		})
	}
}

// BenchmarkWritesApart is an application that writes head and body apart, with Nagle's
// algorithm: over the proxy's kept connection, and directly over a new one for each request.
func BenchmarkWritesApart(b *testing.B) {
	s := newStage(b, Config{})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, silent: true, to: s.app(func(c *net.TCPConn) {
		_ = c.SetNoDelay(false)
		br := bufio.NewReader(c)
		for {
			if _, err := posted(br); err != nil {
				return
			}
			apart(c, "ok")
		}
	})}
	addr := s.front(pod, v, false)
	const get = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"
	b.Run("proxied", func(b *testing.B) {
		p50 := median(b, dial(b, addr), b.N, get)
		b.ReportMetric(float64(p50.Microseconds()), "p50-µs")
	})
	b.Run("direct", func(b *testing.B) {
		took := make([]time.Duration, b.N)
		for i := range took {
			start := time.Now()
			c, err := net.Dial("tcp", v.to.String())
			if err != nil {
				b.Fatal(err)
			}
			median(b, c.(*net.TCPConn), 1, get)
			took[i] = time.Since(start)
			c.Close()
		}
		slices.Sort(took)
		b.ReportMetric(float64(took[b.N/2].Microseconds()), "p50-µs")
	})
}
