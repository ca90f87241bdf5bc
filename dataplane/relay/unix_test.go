package relay

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/mtls/record"
)

// unixPair are two ends of a Unix stream.
func unixPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var c [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "unix")
		n, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		c[i] = n.(*net.UnixConn)
		t.Cleanup(func() { n.Close() })
	}
	return c[0], c[1]
}

// TestUnix: what a relay does for an application behind a Unix socket.
func TestUnix(t *testing.T) {
	for name, m := range map[string]record.Maker{"own": record.Own, "std": record.Std} {
		// start gives the caller's TLS connection, the application's end, and the relay's.
		start := func(t *testing.T) (caller *tls.Conn, raw *net.TCPConn, app *net.UnixConn, ended chan Result, cancel func()) {
			x, y := tcpPair(t)
			cc, sc := configs(t)
			caller, ss := tls.Client(x, cc), record.Server(y, sc, m)
			done := make(chan error, 1)
			go func() { done <- ss.Handshake(t.Context()) }()
			if err := errors.Join(caller.HandshakeContext(t.Context()), <-done); err != nil {
				t.Fatal(err)
			}
			mine, app := unixPair(t)
			ctx, cancel := context.WithCancel(t.Context())
			ended = make(chan Result, 1)
			rec := ss.Flip()
			go func() { ended <- TLS(ctx, mine, y, rec, nil, Options{}) }()
			for _, c := range []net.Conn{caller, app} {
				c.SetDeadline(time.Now().Add(time.Minute))
			}
			return caller, x, app, ended, cancel
		}
		over := func(t *testing.T, ended chan Result) Result {
			t.Helper()
			select {
			case r := <-ended:
				return r
			case <-time.After(time.Minute):
				t.Fatal("the relay did not end")
				panic("unreachable")
			}
		}
		t.Run(name+", both directions, and their ends", func(t *testing.T) {
			caller, _, app, ended, cancel := start(t)
			defer cancel()
			const size = 3 << 20
			up := bytes.Repeat([]byte("up"), size/2)
			go func() {
				caller.Write(up)
				caller.CloseWrite()
			}()
			got, err := io.ReadAll(app) // to its end: the other direction goes on
			if err != nil || !bytes.Equal(got, up) {
				t.Fatalf("%d bytes came to the application: %v", len(got), err)
			}
			go func() {
				app.Write(got)
				app.CloseWrite()
			}()
			if got, err = io.ReadAll(caller); err != nil || !bytes.Equal(got, up) {
				t.Fatalf("%d bytes came back: %v", len(got), err)
			}
			if r := over(t, ended); r.End != Finished || r.AtoB != size || r.BtoA != size || r.First != B {
				t.Errorf("%+v", r)
			}
		})
		t.Run(name+", the application closes before it has read all", func(t *testing.T) {
			caller, _, app, ended, cancel := start(t)
			defer cancel()
			io.WriteString(caller, "unread")
			var one [1]byte
			if _, err := app.Read(one[:]); err != nil {
				t.Fatal(err)
			}
			app.Close()
			if r := over(t, ended); r.End != Reset || r.First != A {
				t.Errorf("%+v", r)
			}
			if _, err := caller.Read(one[:]); err == nil || errors.Is(err, io.EOF) {
				t.Errorf("the caller takes it for an orderly end: %v", err)
			}
		})
		t.Run(name+", the caller is cut", func(t *testing.T) {
			_, raw, app, ended, cancel := start(t)
			defer cancel()
			raw.SetLinger(0)
			raw.Close()
			if r := over(t, ended); r.End != Reset || r.First != B {
				t.Errorf("%+v", r)
			}
			var one [1]byte
			if n, err := app.Read(one[:]); n > 0 || err == nil {
				t.Errorf("the application reads on: %v", err)
			}
		})
		t.Run(name+", cancelled while the application reads nothing", func(t *testing.T) {
			caller, _, _, ended, cancel := start(t)
			wrote := make(chan int, 1)
			caller.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
			go func() {
				n := 0
				for chunk := make([]byte, 1<<20); n < 256<<20; {
					k, err := caller.Write(chunk)
					if n += k; err != nil {
						break
					}
				}
				wrote <- n
			}()
			if n := <-wrote; n >= 256<<20 {
				t.Errorf("%d bytes were taken though nothing is read", n)
			}
			cancel()
			if r := over(t, ended); r.End != Cancelled {
				t.Errorf("%+v", r)
			}
		})
	}
}
