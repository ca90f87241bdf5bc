package apply_test

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// controlMark is a net.Dialer's Control that sets a socket's mark.
func controlMark(mark int) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark)
		}); cerr != nil {
			return cerr
		}
		return err
	}
}
