package socket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Connect connects fd, an unconnected non-blocking TCP socket of a Pool, to addr
// and returns it as a net connection (so io.Copy splices). It takes ownership of
// fd. ctx ends the attempt; the error is then ctx's, otherwise the kernel's
// (errors.Is with unix.ECONNREFUSED and so on), and names address and namespace.
func Connect(ctx context.Context, fd int, addr netip.AddrPort) (*net.TCPConn, error) {
	f := os.NewFile(uintptr(fd), "tcp")
	if f == nil {
		return nil, fmt.Errorf("socket: connect to %s: %d is no descriptor", addr, fd)
	}
	if err := connect(ctx, f, fd, addr); err != nil {
		where := "unknown namespace"
		if id, nerr := Namespace(fd); nerr == nil {
			where = id.String()
		}
		f.Close()
		return nil, fmt.Errorf("socket: connect to %s from %s: %w", addr, where, err)
	}
	return fileConn(f, fd)
}

// connect waits in Go's poller, not in a thread. fd is f's.
func connect(ctx context.Context, f *os.File, fd int, addr netip.AddrPort) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return err
	}
	sa, err := sockaddr(family, addr)
	if err != nil {
		return err
	}
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	// The end of ctx is a deadline in the past: that wakes the wait below.
	stop := context.AfterFunc(ctx, func() { f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	var result error
	begun := false
	waitErr := rc.Write(func(uintptr) (done bool) {
		if !begun {
			begun = true
			result = unix.Connect(fd, sa)
			// EINTR: the attempt goes on by itself (connect(2)), as with EINPROGRESS.
			return result != unix.EINPROGRESS && result != unix.EINTR
		}
		n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			result = err
		case n != 0:
			result = unix.Errno(n)
		default:
			// Writable and without an error may still be a wake-up for nothing.
			_, result = unix.Getpeername(fd)
			return result != unix.ENOTCONN
		}
		return true
	})
	if waitErr != nil {
		if cause := context.Cause(ctx); cause != nil && errors.Is(waitErr, os.ErrDeadlineExceeded) {
			return cause
		}
		return waitErr
	}
	return result
}
