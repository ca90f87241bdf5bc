package main

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestHealthSocket: who has the path answers; the next process takes it over without a moment
// in which nobody does, and the one before does not take it away.
func TestHealthSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "health.sock")
	ask := func() int {
		c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}}}
		r, err := c.Get("http://node/healthz/health_cart-1")
		if err != nil {
			return 0
		}
		defer r.Body.Close()
		return r.StatusCode
	}
	serve := func(code int) (end func()) {
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- serveHealth(ctx, path, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }))
		}()
		return func() {
			stop()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	until := func(want int) {
		t.Helper()
		for late := time.Now().Add(20 * time.Second); ask() != want; {
			if time.Now().After(late) {
				t.Fatalf("no %d at the socket", want)
			}
		}
	}
	endOne := serve(200)
	until(200)
	if at, err := os.Lstat(path); err != nil || at.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v: others may ask", at.Mode(), err)
	}
	endTwo := serve(503)
	for got := ask(); got != 503; got = ask() {
		if got != 200 {
			t.Fatal("for a moment nobody answers")
		}
	}
	endOne()
	if ask() != 503 {
		t.Error("the one before has taken the path away")
	}
	endTwo()
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) > 0 {
		t.Errorf("%v, %v is left", left, err)
	}
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := serveHealth(t.Context(), path, http.NotFoundHandler()); err == nil {
		t.Error("a file was replaced")
	}

	// The longest directory that is taken.
	base, err := os.MkdirTemp("/tmp", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(base) })
	path = filepath.Join(base, strings.Repeat("d", maxHealthDir-len(base)-1), "health.sock")
	end := serve(204)
	until(204)
	end()
}
