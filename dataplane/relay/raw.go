package relay

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The calls below move at most a buffer's or a pipe's worth between memory and a
// non-blocking socket: they never wait, so the scheduler is not told of them. Told of
// each, it takes this one's place on its processor away whenever a copy lasts longer than 20
// microseconds, and keeps its monitor awake: an eighth of the CPU time of a bulk relay, measured.

func read(fd uintptr, p []byte) (int, error) {
	n, _, e := syscall.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	return result(n, e)
}

func readv(fd uintptr, v []unix.Iovec) (int, error) {
	n, _, e := syscall.RawSyscall(unix.SYS_READV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(v))), uintptr(len(v)))
	return result(n, e)
}

func writev(fd uintptr, v []unix.Iovec) (int, error) {
	n, _, e := syscall.RawSyscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(v))), uintptr(len(v)))
	return result(n, e)
}

func splice(from, to uintptr, n int) (int64, error) {
	m, _, e := syscall.RawSyscall6(unix.SYS_SPLICE, from, 0, to, 0, uintptr(n), unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
	k, err := result(m, e)
	return int64(k), err
}

// atMark reports whether the next byte of a TCP connection is urgent data.
func atMark(fd uintptr) bool {
	var at int32
	_, _, e := syscall.RawSyscall(unix.SYS_IOCTL, fd, unix.SIOCATMARK, uintptr(unsafe.Pointer(&at)))
	return e == 0 && at != 0
}

func result(n uintptr, e syscall.Errno) (int, error) {
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}
