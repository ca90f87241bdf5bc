package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aether/e2e/rig"
)

// load is clients that ask without pause until told to stop. Each answer must be right.
type load struct {
	stop  chan struct{}
	all   sync.WaitGroup
	done  atomic.Int64
	mu    sync.Mutex
	wrong []string
}

// load starts four HTTP/1.1 and four h2c clients, each of which alternates GET and POST.
func (w *world) load(addr, name string) *load {
	l := &load{stop: make(chan struct{})}
	body := strings.Repeat("x", 10_000)
	want := noiseSum(30_000)
	wantUp, err := sum(strings.NewReader(body))
	must(w, err)
	for i := range 8 {
		c := w.client(w.a, addr, i%2 == 1)
		l.all.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-l.stop:
					return
				default:
				}
				var err error
				if n%2 == 0 {
					var got string
					if _, got, err = c.get(name, "/bytes?n=30000"); err == nil {
						if got, err = sum(strings.NewReader(got)); err == nil && got != want {
							err = fmt.Errorf("got %s, want %s", got, want)
						}
					}
				} else {
					res, got, e := c.do("POST", name, "/sum", strings.NewReader(body))
					if err = e; e == nil && (res.StatusCode != 200 || got != wantUp) {
						err = fmt.Errorf("POST: %s %q", res.Status, got)
					}
				}
				l.done.Add(1)
				if err != nil && w.ctx.Err() != nil {
					return // the test has run out of time, and says so
				}
				if err != nil {
					l.mu.Lock()
					l.wrong = append(l.wrong, fmt.Sprintf("client %d request %d: %v", i, n, err))
					enough := len(l.wrong) > 20
					l.mu.Unlock()
					if enough {
						return
					}
				}
			}
		})
	}
	return l
}

// more waits until n more requests are through.
func (l *load) more(ctx context.Context, n int64) error {
	until := l.done.Load() + n
	return rig.Until(ctx, func(context.Context) error {
		if l.done.Load() < until {
			return errors.New("not so many requests yet")
		}
		return nil
	})
}

func (l *load) end(t *testing.T) {
	t.Helper()
	close(l.stop)
	l.all.Wait()
	for _, s := range l.wrong {
		t.Error(s)
	}
	if len(l.wrong) > 0 {
		t.Errorf("%d of %d requests lost", len(l.wrong), l.done.Load())
	}
}

// Clients that read little and go away must not harm others whose requests share their hop.
func TestCancelledNeighbours(t *testing.T) {
	w := meshed(t)
	l := w.load("10.96.0.10:8080", host("b", 8080))
	client := w.client(w.a, "10.96.0.10:8080", true)
	// Less than the hop's window and more than the client's: the answer waits at the source, whole.
	client.t.HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: 16 << 10}
	for i := range 300 {
		if i%2 == 0 { // HTTP/1.1: the connection ends
			c, err := w.a.Dial(w.ctx, "tcp", "10.96.0.10:8080")
			must(t, err)
			c.(*net.TCPConn).SetReadBuffer(4096)
			c.SetDeadline(time.Now().Add(20 * time.Second))
			_, err = io.WriteString(c, "GET /bytes?n=200000 HTTP/1.1\r\nHost: "+host("b", 8080)+"\r\n\r\n")
			must(t, err)
			_, err = io.ReadFull(c, make([]byte, 1000))
			must(t, err)
			c.Close()
			continue
		}
		// HTTP/2: the stream is reset
		ctx, cancel := context.WithCancel(w.ctx)
		req, err := http.NewRequestWithContext(ctx, "GET", "http://"+host("b", 8080)+"/bytes?n=200000", nil)
		must(t, err)
		res, err := client.Do(req)
		must(t, err)
		_, err = io.ReadFull(res.Body, make([]byte, 1000))
		must(t, err)
		cancel()
		res.Body.Close()
	}
	err := l.more(w.ctx, 100)
	l.end(t)
	must(t, err)
}
