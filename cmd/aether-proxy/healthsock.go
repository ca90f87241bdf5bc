package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/net/netutil"
)

// Bounds of the health socket.
const (
	healthConns   = 64
	healthHead    = 5 * time.Second  // a request's head
	healthIdle    = 30 * time.Second // between two requests
	healthHeaders = 4 << 10          // bytes of a head
	// maxHealthDir is in bytes: the socket is made in a directory of its own below, and the kernel takes 107 (unix(7)).
	maxHealthDir = 80
)

// serveHealth answers at a Unix socket which pods' applications answer (contract 6.6),
// until ctx ends. A socket that is there is replaced in one step: in a hand-over it is the
// process before that has it, and callers find one of the two at any moment. Only root and
// the process' own user may ask.
func serveHealth(ctx context.Context, path string, h http.Handler) error {
	fail := func(err error) error { return fmt.Errorf("--health-sock: %w", err) }
	if at, err := os.Lstat(path); err == nil && at.Mode()&os.ModeSocket == 0 {
		return fail(fmt.Errorf("%s is there and is no socket: remove it, or give another path", path))
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fail(err)
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), ".health-") // 0700: nobody connects before the mode is set
	if err != nil {
		return fail(err)
	}
	defer os.RemoveAll(dir)
	fresh := filepath.Join(dir, "s")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: fresh, Net: "unix"})
	if err != nil {
		return fail(err)
	}
	defer ln.Close()
	ln.SetUnlinkOnClose(false)
	if err := os.Chmod(fresh, 0o600); err != nil {
		return fail(err)
	}
	own, err := os.Lstat(fresh)
	if err != nil {
		return fail(err)
	}
	if err := os.Rename(fresh, path); err != nil {
		return fail(err)
	}
	defer func() { // the next process may have put its own there
		if at, err := os.Lstat(path); err == nil && os.SameFile(at, own) {
			_ = os.Remove(path) // a socket that stays behind is replaced by the next process
		}
	}()
	srv := &http.Server{Handler: h, ReadHeaderTimeout: healthHead, ReadTimeout: healthHead, WriteTimeout: healthHead, IdleTimeout: healthIdle, MaxHeaderBytes: healthHeaders}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	if err := srv.Serve(netutil.LimitListener(ln, healthConns)); !errors.Is(err, http.ErrServerClosed) {
		return fail(err)
	}
	return nil
}
