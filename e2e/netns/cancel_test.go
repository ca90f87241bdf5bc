package netns

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
)

// TestClientGoes: the application learns that nobody waits for its answer any more.
func TestClientGoes(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"waiting", "reading", "sending"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, ctx context.Context, rt *http.Transport, host string) {
				begun, gone := make(chan struct{}), make(chan error, 1)
				path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
					switch when {
					case "reading":
						io.WriteString(w, "first")
						w.(http.Flusher).Flush()
					case "sending":
						io.ReadFull(r.Body, make([]byte, 5))
					}
					close(begun)
					if when == "sending" {
						_, err := io.Copy(io.Discard, r.Body)
						gone <- err
						return
					}
					select {
					case <-r.Context().Done():
						gone <- r.Context().Err()
					case <-ctx.Done():
						gone <- nil
					}
				})
				dial := rt.DialContext
				rt.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
					c, err := dial(ctx, network, addr)
					if err == nil { // an end that comes so soon would be that of a client that waits (decision 040)
						err = c.(*net.TCPConn).SetLinger(0)
					}
					return c, err
				}
				call, cancel := context.WithCancel(ctx)
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					var body io.Reader
					method := "GET"
					if when == "sending" {
						r, feed := io.Pipe()
						go func() { // a byte stream without an end
							feed.Write([]byte("first"))
							<-call.Done()
							feed.CloseWithError(call.Err())
						}()
						body, method = r, "POST"
					}
					if a, err := send(call, rt, method, host, path, body); err == nil {
						t.Errorf("the call went through: %d %q", a.StatusCode, a.body)
					}
				}()
				recv(t, ctx, begun, "the request")
				cancel()
				if err := recv(t, ctx, gone, "the end of the request at the application"); err == nil {
					t.Error("the application was not told that the client has gone")
				}
				recv(t, ctx, ended, "the end of the call")
			})
		})
	}
}

// TestAppDies: an answer that is cut is never shown as a whole one.
func TestAppDies(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		clientH2 bool
		port     int
		how      string
	}{
		{"length, h1 to h1", false, portRaw, "length"},
		{"chunked, h1 to h1", false, portRaw, "chunked"},
		{"chunked with a reset, h1 to h1", false, portRaw, "reset"},
		{"length, h2 to h1", true, portRaw, "length"},
		{"chunked, h2 to h1", true, portRaw, "chunked"},
		{"chunked with a reset, h2 to h1", true, portRaw, "reset"},
		{"stream reset, h1 to h2", false, portH2, ""},
		{"stream reset, h2 to h2", true, portH2, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx := within(t, patience)
			read := make(chan struct{}) // the client has the first bytes
			var path string
			if c.how == "" {
				path = w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
					io.WriteString(w, "half")
					w.(http.Flusher).Flush()
					select {
					case <-read:
					case <-ctx.Done():
					}
					panic(http.ErrAbortHandler)
				})
			} else {
				path = w.raw.at(t, func(q rawRequest) {
					head := "Content-Length: 100\r\n\r\nhalf"
					if c.how != "length" {
						head = "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"
					}
					io.WriteString(q.c, "HTTP/1.1 200 OK\r\n"+head)
					select {
					case <-read:
					case <-ctx.Done():
					}
					if c.how == "reset" {
						q.c.SetLinger(0)
					}
					q.c.Close()
				})
			}
			req, err := http.NewRequestWithContext(ctx, "GET", "http://app"+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			res, err := transport(t, c.clientH2, w.Pod("web"), vip(appVIP, c.port)).RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			b := make([]byte, 4)
			if _, err := io.ReadFull(res.Body, b); err != nil || string(b) != "half" {
				t.Fatalf("first bytes %q, %v", b, err)
			}
			close(read)
			rest, err := io.ReadAll(res.Body)
			if err == nil || errors.Is(err, context.DeadlineExceeded) || len(rest) > 0 {
				t.Errorf("after the cut: %q, %v; want an error at once", rest, err)
			}
		})
	}
}

// TestAppDiesSilent: the application goes without a byte of an answer.
func TestAppDiesSilent(t *testing.T) {
	t.Parallel()
	for _, h2 := range []bool{false, true} {
		t.Run(map[bool]string{false: "h1", true: "h2"}[h2], func(t *testing.T) {
			t.Parallel()
			ctx := within(t, patience)
			var asked atomic.Int32
			path := w.raw.at(t, func(q rawRequest) {
				asked.Add(1)
				q.c.Close()
			})
			a := mustSend(t, ctx, transport(t, h2, w.Pod("web"), vip(appVIP, portRaw)), "POST", "app", path, strings.NewReader("x"))
			if a.StatusCode != 503 || !strings.Contains(a.body, "without an answer") {
				t.Errorf("got %d %q, want a 503 that says so", a.StatusCode, a.body)
			}
			if n := asked.Load(); n != 1 {
				t.Errorf("a POST that the application had was sent %d times", n)
			}
		})
	}
}
