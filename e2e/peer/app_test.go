package peer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/interop"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/orca"

	"aether/e2e/rig"
)

// app is the application of pod b: HTTP/1.1 on 8080, grpc-go's interop server on
// 8081 (h2c), an echo of bytes on 9000. All listen on loopback only, as they may.
type app struct {
	calls atomic.Int64 // requests that reached it
}

// size of a large body.
const size = 20 << 20

// noise is n bytes that depend on n alone.
func noise(n int64) io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)}), n)
}

// sum of a stream: its SHA-256 and length.
func sum(r io.Reader) (string, error) {
	h := sha256.New()
	n, err := io.Copy(h, r)
	return fmt.Sprintf("%s %d", hex.EncodeToString(h.Sum(nil)), n), err
}

// noiseSum is the sum of noise(n).
func noiseSum(n int64) string {
	s, err := sum(noise(n))
	if err != nil {
		panic(err)
	}
	return s
}

var largeSum = sync.OnceValue(func() string { return noiseSum(size) })

func (a *app) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.calls.Add(1)
	switch r.URL.Path {
	case "/sum": // the body's checksum
		s, err := sum(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		io.WriteString(w, s)
	case "/bytes": // ?n= bytes of noise, ?chunked=1 without a length
		n, err := strconv.ParseInt(r.FormValue("n"), 10, 64)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if r.FormValue("chunked") == "" {
			w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
		} else {
			w.(http.Flusher).Flush()
		}
		io.Copy(w, noise(n))
	case "/echo": // the body while it comes
		http.NewResponseController(w).EnableFullDuplex()
		w.Header().Set("Content-Type", "application/octet-stream")
		io.Copy(w, r.Body)
	case "/headers": // what arrived, as JSON
		h := r.Header.Clone()
		h.Set(":method", r.Method)
		h.Set(":authority", r.Host)
		h.Set(":target", r.RequestURI)
		h.Set(":proto", r.Proto)
		json.NewEncoder(w).Encode(h)
	case "/status": // ?code=, and ?outcome= as only a proxy may say it
		code, err := strconv.Atoi(r.FormValue("code"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if o := r.FormValue("outcome"); o != "" {
			w.Header().Set("X-Aether-Outcome", o)
		}
		w.WriteHeader(code)
	case "/refuse": // answers before the body
		w.Header().Set("Connection", "close")
		w.WriteHeader(http.StatusForbidden)
		io.WriteString(w, "no\n")
	case "/trailers": // the request's trailers back as the response's
		w.Header().Set("Trailer", "X-Sum, X-Got")
		s, err := sum(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		io.WriteString(w, s)
		w.Header().Set("X-Sum", s)
		w.Header().Set("X-Got", r.Trailer.Get("X-Tail"))
	case "/", "/1k":
		io.WriteString(w, "ok\n")
	default:
		http.NotFound(w, r)
	}
}

// start starts the application in the pod until the test ends.
func (a *app) start(w *world, p *rig.Pod) {
	w.Helper()
	stop, err := p.ServeHTTP(w.ctx, "127.0.0.1:8080", a)
	must(w, err)
	w.Cleanup(stop)

	l, err := p.Listen(w.ctx, "tcp", "127.0.0.1:8081")
	must(w, err)
	// As grpc-go's own interop server is set up.
	metrics := orca.NewServerMetricsRecorder()
	g := grpc.NewServer(orca.CallMetricsServerOption(metrics))
	testgrpc.RegisterTestServiceServer(g, interop.NewTestServer(interop.NewTestServerOptions{MetricsRecorder: metrics}))
	done := make(chan struct{})
	go func() { defer close(done); g.Serve(l) }()
	w.Cleanup(func() { g.Stop(); <-done })

	serveTCP(w, &p.Space, "127.0.0.1:9000", func(c *net.TCPConn) { io.Copy(c, c) })
}

// serveTCP gives each connection to f; when f returns, the sending side is closed.
func serveTCP(w *world, s *rig.Space, addr string, f func(*net.TCPConn)) {
	w.Helper()
	l, err := s.Listen(w.ctx, "tcp", addr)
	must(w, err)
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				defer context.AfterFunc(ctx, func() { c.Close() })()
				f(c.(*net.TCPConn))
				c.(*net.TCPConn).CloseWrite()
			})
		}
	})
	w.Cleanup(func() {
		cancel()
		l.Close()
		all.Wait()
	})
}
