package engine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
)

// TestRetiredAnswers: answers that are given up for another attempt. Short ones are read to their end: the
// peer of the hop sees no reset, and its session carries on. Long ones are cut, as
// many as may be, without the session ending either. No stream is left behind.
func TestRetiredAnswers(t *testing.T) {
	for _, tt := range []struct {
		name, answer string
		resets       bool
	}{
		{"short", "HTTP/1.1 503 x\r\nContent-Length: 5\r\n\r\nagain", false},
		{"empty", "HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n", false},
		{"of unknown length", "HTTP/1.1 503 x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nagain\r\n0\r\n\r\n", true},
		{"long", "HTTP/1.1 503 x\r\nContent-Length: 40000\r\n\r\n" + strings.Repeat("x", 40000), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newMesh(t, Config{}, netip.AddrPort{})
			app := retiredApp(m, tt.answer)
			m.onLoop(func(*Loop) {
				m.in.to = app
				m.out.request = func(x *exchange.Exchange) bool { x.KeepForReplay(); return false }
				m.out.response = func(x *exchange.Exchange, h *httpmsg.Head) {
					if h.Status == 503 && x.Replayable() {
						x.DiscardResponse()
						m.out.send(x)
					}
				}
			})
			const n = 400 // beyond what a peer forgives of streams that are reset
			c := dial(t, m.h1)
			br := bufio.NewReader(c)
			for i := range n {
				body := fmt.Sprint("body ", i)
				fmt.Fprintf(c, "POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", i, len(body), body)
				res, err := http.ReadResponse(br, nil)
				if err != nil {
					t.Fatalf("request %d: %v", i, err)
				}
				if b, err := io.ReadAll(res.Body); err != nil || res.StatusCode != 200 || string(b) != body {
					t.Fatalf("request %d: %d %q %v", i, res.StatusCode, b, err)
				}
			}
			if got := m.hops.Load(); got != 1 {
				t.Errorf("%d sessions were made", got)
			}
			eventually(t, "nothing is left of what was given up", func() bool {
				left := 0
				m.onLoop(func(l *Loop) {
					l.Each(func(s reactor.Source) {
						if c, ok := s.(*h2conn); ok {
							left += c.h2.Streams() + c.drains
						}
					})
				})
				return left == 0
			})
			m.onLoop(func(l *Loop) {
				l.Each(func(s reactor.Source) {
					c, ok := s.(*h2conn)
					if !ok || c.client {
						return
					}
					if got := c.h2.Stats().PeerResets; (got > 0) != tt.resets {
						t.Errorf("the destination saw %d resets", got)
					}
				})
			})
		})
	}
}

// retiredApp is an HTTP/1 application that answers each request for the first time
// with first, its body only when it sees the request again, and echoes the request's body then.
func retiredApp(m *mesh, first string) netip.AddrPort {
	var mu sync.Mutex
	seen := map[string]chan struct{}{} // closed by the second sight; guarded by mu
	return m.app(func(c *net.TCPConn) {
		br := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(br)
			if err != nil {
				return
			}
			b, err := io.ReadAll(req.Body)
			if err != nil {
				return
			}
			mu.Lock()
			second := seen[req.URL.Path]
			if second == nil {
				second = make(chan struct{})
				seen[req.URL.Path] = second
				mu.Unlock()
				head, body, _ := strings.Cut(first, "\r\n\r\n")
				if _, err = io.WriteString(c, head+"\r\n\r\n"); err == nil && body != "" {
					<-second
					_, err = io.WriteString(c, body)
				}
			} else {
				close(second)
				mu.Unlock()
				_, err = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(b), b)
			}
			if err != nil {
				return
			}
		}
	})
}
