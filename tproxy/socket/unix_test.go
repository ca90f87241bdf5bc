package socket_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/tproxy/socket"
)

// unixAt listens at a path until the test ends.
func unixAt(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// TestConnectUnix: whatever stands at the place of a pod's socket, a stream socket of the
// directory is connected to and nothing else, and nothing blocks.
func TestConnectUnix(t *testing.T) {
	dir := t.TempDir()
	at := func(names ...string) string { return filepath.Join(append([]string{dir, "pod"}, names...)...) }
	if err := errors.Join(os.Mkdir(at(), 0o777), os.Mkdir(filepath.Join(dir, "secret"), 0o777)); err != nil {
		t.Fatal(err)
	}
	unixAt(t, at("app"))
	secret := unixAt(t, filepath.Join(dir, "secret", "s"))
	stale := unixAt(t, at("stale"))
	stale.SetUnlinkOnClose(false)
	stale.Close()
	gram, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: at("gram"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer gram.Close()
	if err := errors.Join(
		os.WriteFile(at("file"), []byte("x"), 0o666), os.Mkdir(at("dir"), 0o777), unix.Mkfifo(at("fifo"), 0o666),
		os.Symlink("app", at("link")), os.Symlink(secret.Addr().String(), at("out")), os.Symlink("nowhere", at("dangling")), os.Symlink("loop", at("loop")),
		os.Symlink("/proc/self/fd/0", at("magic")), os.Symlink("pod", filepath.Join(dir, "link")), os.Symlink("../secret", at("up")),
	); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		sub, file string
		want      error
	}{
		{"pod", "app", nil},
		{"pod", "none", unix.ENOENT},
		{"none", "app", unix.ENOENT},
		{"pod", "stale", unix.ECONNREFUSED},
		{"pod", "gram", unix.EPROTOTYPE},
		{"pod", "file", unix.ENOTSOCK},
		{"pod", "dir", unix.ENOTSOCK},
		{"pod", "fifo", unix.ENOTSOCK},
		{"pod", "link", unix.ELOOP}, // even to a socket of the directory
		{"pod", "out", unix.ELOOP},
		{"pod", "dangling", unix.ELOOP},
		{"pod", "loop", unix.ELOOP},
		{"pod", "magic", unix.ELOOP},
		{"link", "app", unix.ELOOP},
		{"pod", "up/s", unix.EINVAL},
		{"pod", "../secret/s", unix.EINVAL},
		{"pod", "..", unix.EINVAL},
		{"pod", "", unix.EINVAL},
		{"..", "app", unix.EINVAL},
		{"pod/dir", "app", unix.EINVAL},
	} {
		t.Run(tt.sub+" "+tt.file, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			c, err := socket.DialUnix(ctx, socket.Unix{Dir: dir, Sub: tt.sub, File: tt.file})
			if c != nil {
				c.Close()
			}
			// O_NOFOLLOW and O_DIRECTORY together tell a link from a directory by ENOTDIR.
			if !errors.Is(err, tt.want) && !(tt.sub == "link" && errors.Is(err, unix.ENOTDIR)) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
	secret.SetDeadline(time.Unix(1, 0))
	if c, err := secret.Accept(); err == nil {
		t.Errorf("a socket outside was reached by %v", c.RemoteAddr())
	}
}

// TestConnectUnixBacklog: a full backlog is waited for, until the context ends.
func TestConnectUnixBacklog(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "p"), 0o777); err != nil {
		t.Fatal(err)
	}
	ln, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ln)
	if err := errors.Join(unix.Bind(ln, &unix.SockaddrUnix{Name: filepath.Join(dir, "p", "s")}), unix.Listen(ln, 1)); err != nil {
		t.Fatal(err)
	}
	to := socket.Unix{Dir: dir, Sub: "p", File: "s"}
	var fds []int
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	full := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		fd, err := socket.ConnectUnix(ctx, to)
		if err == nil {
			fds = append(fds, fd)
		}
		return err
	}
	for err = nil; err == nil && len(fds) < 100; {
		err = full()
	}
	if !errors.Is(err, unix.EAGAIN) || !errors.Is(err, context.DeadlineExceeded) || len(fds) > 4 {
		t.Fatalf("after %d connections: %v", len(fds), err)
	}
	done := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() {
		fd, err := socket.ConnectUnix(ctx, to)
		if err == nil {
			unix.Close(fd)
		}
		done <- err
	}()
	nfd, _, err := unix.Accept(ln) // makes room
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(nfd)
	if err := <-done; err != nil {
		t.Errorf("with room: %v", err)
	}
}

// TestConnectUnixLeaks: no descriptor is left of what fails.
func TestConnectUnixLeaks(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "p"), 0o777), os.WriteFile(filepath.Join(dir, "p", "f"), nil, 0o666)); err != nil {
		t.Fatal(err)
	}
	stale := unixAt(t, filepath.Join(dir, "p", "stale"))
	stale.SetUnlinkOnClose(false)
	stale.Close()
	live := unixAt(t, filepath.Join(dir, "p", "live"))
	count := func() int {
		e, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(e)
	}
	before := count()
	for range 50 {
		if fd, err := socket.ConnectUnix(t.Context(), socket.Unix{Dir: dir, Sub: "p", File: "live"}); err != nil {
			t.Fatal(err)
		} else if c, err := live.Accept(); err != nil {
			t.Fatal(err)
		} else {
			unix.Close(fd)
			c.Close()
		}
		for _, f := range []string{"f", "none", "..", "stale"} {
			if fd, err := socket.ConnectUnix(t.Context(), socket.Unix{Dir: dir, Sub: "p", File: f}); err == nil {
				unix.Close(fd)
				t.Fatalf("%s was connected to", f)
			}
		}
	}
	if after := count(); after > before+5 {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}
