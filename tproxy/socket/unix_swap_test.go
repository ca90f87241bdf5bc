package socket

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestUnixSwapped: a link that takes the socket's place between the look and the connect leads nowhere: what
// was looked at is connected to.
func TestUnixSwapped(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "p"), 0o777); err != nil {
		t.Fatal(err)
	}
	listen := func(path string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		l.SetDeadline(time.Now().Add(time.Minute))
		t.Cleanup(func() { l.Close() })
		return l
	}
	own, secret := listen(filepath.Join(dir, "p", "s")), listen(filepath.Join(dir, "secret"))
	at, err := openSocket(Unix{Dir: dir, Sub: "p", File: "s"})
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(at)
	if err := os.Remove(filepath.Join(dir, "p", "s")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(secret.Addr().String(), filepath.Join(dir, "p", "s")); err != nil {
		t.Fatal(err)
	}
	fd, err := connectTo(t.Context(), at)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	c, err := own.Accept()
	if err != nil {
		t.Fatalf("its own socket was not reached: %v", err)
	}
	c.Close()
	secret.SetDeadline(time.Unix(1, 0))
	if c, err := secret.Accept(); err == nil {
		c.Close()
		t.Error("the link was followed")
	}
}
