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

// StartConnect begins to connect fd, an unconnected non-blocking TCP socket, to
// addr, and does not wait: for the caller who has fd in an epoll of its own. nil
// says that the attempt is under way, or has succeeded already; its end is the
// socket becoming writable, and Connected its result. An error is the kernel's:
// no attempt is under way. IPv4 and its IPv4-mapped form mean the same, on a
// socket of either family; the zone of an IPv6 address must be a number. fd stays
// the caller's.
func StartConnect(fd int, addr netip.AddrPort) error {
	family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return err
	}
	sa, err := sockaddr(family, addr)
	if err != nil {
		return err
	}
	// EINTR: the attempt goes on by itself (connect(2)), as with EINPROGRESS.
	if err := unix.Connect(fd, sa); err != nil && err != unix.EINPROGRESS && err != unix.EINTR {
		return err
	}
	return nil
}

// Connected reports whether the connect that was started on fd has succeeded; false without an error: it is under
// way still. A peer that has accepted the connection and reset it before this look counts as connected: what it sent
// before the reset can be read, and the connection's own end follows, as the peer meant it. An error is the kernel's;
// it reports each once, so a reset is read as an end (0 bytes) from then on.
func Connected(fd int) (bool, error) {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return false, err
	}
	switch e := unix.Errno(n); e {
	case 0: // writable and without an error may still be a wake-up for nothing
		if _, err = unix.Getpeername(fd); err == unix.ENOTCONN {
			return false, nil
		}
		return err == nil, err
	case unix.ECONNRESET, unix.EPIPE: // a reset that answers the SYN is ECONNREFUSED
		return true, nil
	default:
		return false, e
	}
}

// IsLocal reports whether a is an address of the network namespace that fd, an unbound TCP socket, is
// of: the kernel binds a socket to those alone. fd is of no use for connecting after it. Where the namespace has
// ip_nonlocal_bind set, every address counts as its own.
func IsLocal(fd int, a netip.Addr) (bool, error) {
	family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return false, err
	}
	sa, err := sockaddr(family, netip.AddrPortFrom(a, 0))
	if err != nil {
		return false, err
	}
	switch err := unix.Bind(fd, sa); err {
	case nil:
		return true, nil
	case unix.EADDRNOTAVAIL:
		return false, nil
	default:
		return false, err
	}
}

// connect waits in Go's poller, not in a thread. fd is f's.
func connect(ctx context.Context, f *os.File, fd int, addr netip.AddrPort) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
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
			if result = StartConnect(fd, addr); result != nil {
				return true
			}
		}
		done, result = Connected(fd)
		return done || result != nil
	})
	if waitErr != nil {
		if cause := context.Cause(ctx); cause != nil && errors.Is(waitErr, os.ErrDeadlineExceeded) {
			return cause
		}
		return waitErr
	}
	return result
}
