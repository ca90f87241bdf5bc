package dataplane_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestDeadlineThatNobodyKeeps: a gRPC call whose application does not keep the caller's grpc-timeout, of a client that does not,
// either, ends as DEADLINE_EXCEEDED at both sides, before an answer has begun and behind its head, also where a rule would give it longer; a call
// without one goes on.
func TestDeadlineThatNobodyKeeps(t *testing.T) {
	w := newTown(t)
	ended := make(chan struct{}, 8)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	proceed := make(chan struct{})
	srv := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "application/grpc")
		switch r.URL.Path {
		case "/late":
			_ = http.NewResponseController(rw).Flush()
		case "/none":
			<-proceed
			rw.Header().Set(http.TrailerPrefix+"grpc-status", "0")
			return
		}
		<-r.Context().Done() // it knows nothing of grpc-timeout: the stream is reset
		ended <- struct{}{}
	})}
	srv.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	t.Cleanup(func() { srv.Close(); wg.Wait() })
	port := ln.Addr().(*net.TCPAddr).Port
	at := w.grpcMesh(fmt.Sprintf("%d=h2", port), "route shop/cart cart\nrule match=prefix:/ruled timeout=1h\nrule match=prefix:/short timeout=400ms\n")
	tr := &http.Transport{Protocols: srv.Protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", at)
	}}
	defer tr.CloseIdleConnections()
	call := func(path, timeout string) (status string, took time.Duration) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, "POST", "http://"+cart(port)+path, strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/grpc")
		r.Header.Set("TE", "trailers")
		if timeout != "" {
			r.Header.Set("grpc-timeout", timeout)
		}
		start := time.Now()
		res, err := tr.RoundTrip(r)
		if err != nil {
			t.Fatal(path, err)
		}
		defer res.Body.Close()
		if _, err := io.Copy(io.Discard, res.Body); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		if status = res.Header.Get("grpc-status"); status == "" {
			status = res.Trailer.Get("grpc-status")
		}
		return status, time.Since(start)
	}
	for path, timeout := range map[string]string{"/never": "300m", "/late": "300m", "/ruled": "300m", "/short": "1H"} { // or the rule's, if that is shorter
		status, took := call(path, timeout)
		if status != "4" || took < 300*time.Millisecond {
			t.Errorf("%s: grpc-status %q after %v, want 4, and not before 300 ms", path, status, took)
		}
		<-ended
	}
	close(proceed)
	if status, _ := call("/none", "soon"); status != "0" {
		t.Errorf("a grpc-timeout that is none: grpc-status %q", status)
	}
}
