package socket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Between two tries to connect to a Unix socket whose backlog is full: the kernel tells
// nobody when there is room again.
const (
	firstAgain = time.Millisecond
	lastAgain  = 50 * time.Millisecond
)

// Unix is where a Unix socket is: Dir/Sub/File. Dir is the caller's own; Sub, a directory, and
// File are one name each, and what File is somebody else says, who may change it at any moment.
type Unix struct{ Dir, Sub, File string }

// String is the path.
func (u Unix) String() string { return filepath.Join(u.Dir, u.Sub, u.File) }

// ConnectUnix connects to a stream socket, in the mount namespace of the process, and
// returns it: non-blocking and close-on-exec, the caller's.
//
// No symbolic link is followed below Dir and no file system entered below Sub, and only
// what is a socket is connected to: it is opened first as what it is, without being used (O_PATH),
// and what has been opened is connected to. So nobody who may write to Sub has the caller
// reach anything else. It never waits for a peer: while the socket's backlog is full it
// tries again until ctx ends, and then the error is ctx's cause and EAGAIN; else it is the kernel's
// (ENOENT, ECONNREFUSED: nobody listens; ELOOP: a link; ENOTSOCK: no socket).
// It needs Linux 5.6 (openat2) and /proc.
func ConnectUnix(ctx context.Context, u Unix) (fd int, err error) {
	fail := func(err error) (int, error) { return -1, fmt.Errorf("socket: connect to %s: %w", u, err) }
	if !oneName(u.Sub) || !oneName(u.File) {
		return fail(fmt.Errorf("%w: a name with a slash in it, or none", unix.EINVAL))
	}
	at, err := openSocket(u)
	if err != nil {
		return fail(err)
	}
	defer unix.Close(at)
	if fd, err = connectTo(ctx, at); err != nil {
		return fail(err)
	}
	return fd, nil
}

// connectTo connects to the socket that at is a place of, whatever its name leads to by now.
func connectTo(ctx context.Context, at int) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
			err = fmt.Errorf("%w: raise the proxy's limit of open files", err)
		}
		return -1, err
	}
	to := &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d", at)}
	if err := connectAgain(ctx, func() error { return unix.Connect(fd, to) }); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func oneName(s string) bool {
	return s != "" && s != "." && s != ".." && !strings.ContainsAny(s, "/\x00")
}

// openSocket opens the socket as a place in the file system.
func openSocket(u Unix) (int, error) {
	const how = unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC
	dir, err := unix.Open(u.Dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(dir)
	const beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS
	sub, err := unix.Openat2(dir, u.Sub, &unix.OpenHow{Flags: how | unix.O_DIRECTORY, Resolve: beneath}) // a mount of its own
	if err != nil {
		return -1, openHint(err)
	}
	defer unix.Close(sub)
	at, err := unix.Openat2(sub, u.File, &unix.OpenHow{Flags: how, Resolve: beneath | unix.RESOLVE_NO_XDEV})
	if err != nil {
		return -1, openHint(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		unix.Close(at)
		return -1, err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFSOCK:
		return at, nil
	case unix.S_IFLNK: // O_PATH and O_NOFOLLOW open a link as such
		err = unix.ELOOP
	default:
		err = unix.ENOTSOCK
	}
	unix.Close(at)
	return -1, err
}

func openHint(err error) error {
	if errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("%w: openat2 is needed: Linux 5.6, and a seccomp profile that allows it", err)
	}
	return err
}

// connectAgain calls connect until it says anything but that the backlog is full.
func connectAgain(ctx context.Context, connect func() error) error {
	var again *time.Timer
	for wait := firstAgain; ; wait = min(2*wait, lastAgain) {
		if ctx.Err() != nil {
			return fmt.Errorf("%w: %w", context.Cause(ctx), unix.EAGAIN)
		}
		err := connect()
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EAGAIN):
			return err
		}
		if again == nil {
			again = time.NewTimer(wait)
			defer again.Stop()
		} else {
			again.Reset(wait)
		}
		select {
		case <-again.C:
		case <-ctx.Done():
		}
	}
}

// DialUnix is ConnectUnix for whoever wants a net connection.
func DialUnix(ctx context.Context, u Unix) (*net.UnixConn, error) {
	fd, err := ConnectUnix(ctx, u)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "unix")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("socket: connect to %s: %w", u, err)
	}
	return c.(*net.UnixConn), nil
}
