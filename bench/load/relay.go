package main

import (
	"fmt"
	"net/netip"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// relay moves bytes between every connection to listen and one of its own to dial, and
// knows nothing of them: no TLS, no HTTP, no decision, nothing counted. It is the least
// that any proxy in this place pays the kernel: one wake-up, one read and one write a
// message. One thread, which never gives up its processor to the runtime. Answers are
// small: what a socket does not take at once is an error.
func relay(listen, dial netip.AddrPort) error {
	runtime.LockOSThread()
	ep, err := unix.EpollCreate1(0)
	if err != nil {
		return err
	}
	ln, err := stream()
	if err != nil {
		return err
	}
	err = unix.SetsockoptInt(ln, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
	if err == nil {
		err = unix.SetsockoptInt(ln, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if err == nil {
		err = unix.Bind(ln, sockaddr(listen))
	}
	if err == nil {
		err = unix.Listen(ln, 1024)
	}
	if err != nil {
		return fmt.Errorf("listen on %s: %w", listen, err)
	}
	add := func(fd int) error {
		return unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
	}
	if err := add(ln); err != nil {
		return err
	}
	peer := map[int]int{}
	var events [256]unix.EpollEvent
	buf := make([]byte, 64<<10)
	for {
		// Raw, so that the thread keeps its P while it waits, as ours does. The bound lets
		// the runtime stop the world.
		n, _, errno := syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(ep), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 5, 0, 8)
		if errno != 0 && errno != unix.EINTR {
			return errno
		}
		if errno != 0 {
			continue
		}
		for _, e := range events[:n] {
			fd := int(e.Fd)
			if fd == ln {
				if err := join(ln, dial, add, peer); err != nil {
					return err
				}
				continue
			}
			other, ok := peer[fd]
			if !ok {
				continue // closed by an event before this one
			}
			n, err := unix.Read(fd, buf)
			if err == unix.EAGAIN {
				continue
			}
			if err != nil || n == 0 {
				unix.Close(fd)
				unix.Close(other)
				delete(peer, fd)
				delete(peer, other)
				continue
			}
			if m, err := unix.Write(other, buf[:n]); err != nil || m != n {
				return fmt.Errorf("wrote %d of %d bytes: %w", m, n, err)
			}
		}
	}
}

// join accepts a connection and gives it its other half.
func join(ln int, dial netip.AddrPort, add func(int) error, peer map[int]int) error {
	in, _, err := unix.Accept4(ln, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	if err != nil {
		return fmt.Errorf("accept: %w", err)
	}
	out, err := stream()
	if err == nil {
		err = unix.SetsockoptInt(out, unix.SOL_SOCKET, unix.SO_MARK, 0xae7e) // not to be captured again
	}
	if err == nil {
		err = unix.Connect(out, sockaddr(dial))
	}
	for _, fd := range []int{in, out} {
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		}
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
		if err == nil {
			err = add(fd)
		}
	}
	if err != nil {
		return fmt.Errorf("dial %s: %w", dial, err)
	}
	peer[in], peer[out] = out, in
	return nil
}

func stream() (int, error) { return unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) }

func sockaddr(ap netip.AddrPort) unix.Sockaddr {
	return &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}
}
