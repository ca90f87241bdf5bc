package netns

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestMix: many clients of all codecs with bodies of all sizes, a part of which go away in the
// middle, never get anything of each other's, and nothing that was whole fails.
func TestMix(t *testing.T) {
	ctx := within(t, time.Minute)
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		w.Header().Set("X-Id", r.Header.Get("X-Id"))
		if r.ContentLength == 0 {
			w.WriteHeader(204)
			return
		}
		io.Copy(w, r.Body) // echoes while it comes
	})
	all := blob(300 << 10)
	var clients sync.WaitGroup
	var whole, cut atomic.Int32
	for i := range 16 {
		p := pairs[i%len(pairs)]
		from, addr := "web", vip(appVIP, p.port)
		if i >= 8 {
			from, addr = "job", proxyPort
		}
		rt := transport(t, p.clientH2, w.Pod(from), addr)
		host := fmt.Sprintf("%s:%d", appName, p.port)
		clients.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(i)))
			for k := range 150 {
				at := rnd.IntN(len(all))
				body := all[at:min(len(all), at+1<<rnd.IntN(19))]
				if rnd.IntN(8) == 0 {
					body = nil
				}
				var in io.Reader = bytes.NewReader(body)
				if rnd.IntN(2) == 0 && len(body) > 0 {
					in = unknown{in}
				}
				id := fmt.Sprint(i, "/", k)
				if rnd.IntN(6) == 0 && len(body) > 0 {
					call, cancel := context.WithCancel(ctx)
					r := &stops{Reader: in, left: rnd.IntN(len(body) + 1), stop: cancel}
					if a, err := send(call, rt, "POST", host, path, r, "X-Id", id); err == nil && a.body != string(body) {
						t.Errorf("%s %s: a call that was given up got %d bytes of %d as a whole answer", p.name, id, len(a.body), len(body))
					}
					cancel()
					cut.Add(1)
					continue
				}
				call, cancel := context.WithTimeout(ctx, patience)
				a, err := send(call, rt, "POST", host, path, in, "X-Id", id)
				cancel()
				switch {
				case err != nil:
					t.Errorf("%s %s of %d bytes: %v", p.name, id, len(body), err)
					return
				case a.body != string(body) || a.Header.Get("X-Id") != id:
					t.Errorf("%s %s: got %d, id %s and %d bytes, want %d", p.name, id, a.StatusCode, a.Header.Get("X-Id"), len(a.body), len(body))
				}
				whole.Add(1)
			}
		})
	}
	clients.Wait()
	t.Logf("%d calls, %d given up", whole.Load(), cut.Load())
}

// stops calls stop when so much has been read, and then waits no more.
type stops struct {
	io.Reader
	left int
	stop func()
}

func (s *stops) Read(b []byte) (int, error) {
	n, err := s.Reader.Read(b[:max(1, min(len(b), s.left))])
	if s.left -= n; s.left <= 0 {
		s.stop()
	}
	return n, err
}

// TestCrowd: more requests at a time than a session carries streams, and than all sessions
// of a pod to a port do, are all answered.
func TestCrowd(t *testing.T) {
	ctx := within(t, time.Minute)
	const n, atOnce = 600, 350 // a session carries 100, a key has 4 of them
	var begun atomic.Int32
	full, gate := make(chan struct{}), make(chan struct{})
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		if begun.Add(1) == atOnce {
			close(full)
		}
		select {
		case <-gate:
		case <-ctx.Done():
		}
		io.WriteString(w, r.Header.Get("X-Id"))
	})
	var clients sync.WaitGroup
	for i := range n {
		rt := transport(t, false, w.Pod("web2"), vip(appVIP, portH2))
		clients.Go(func() {
			id := fmt.Sprint(i)
			if a, err := send(ctx, rt, "GET", "app", path, nil, "X-Id", id); err != nil || a.body != id {
				t.Errorf("request %s: %v, %v", id, a, err)
			}
		})
	}
	select {
	case <-full:
	case <-ctx.Done():
		t.Errorf("only %d requests reached the application at a time, want %d", begun.Load(), atOnce)
	}
	close(gate)
	clients.Wait()
}
