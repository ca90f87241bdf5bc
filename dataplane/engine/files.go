package engine

import (
	"cmp"
	"errors"
	"math"
	"time"

	"golang.org/x/sys/unix"
)

// How descriptors are shared out.
//
// A new descriptor gets the lowest free number, so that the number which accept
// returns says, for nothing, that all below it are taken: a connection whose number lies in
// the reserve is one too many. The reserve is for what keeps the node going: hops,
// connections to applications, the admin, configuration.
//
// A pod may have filesShare times as many connections as descriptors are still
// free: alone with others that need few it has four fifths of them, two that take what they
// can have four ninths each, and there is always a rest for one that comes.
const (
	filesReserve = 8                             // the reserve is this part of the limit
	leastReserve = 64                            // and at least so many
	mostReserve  = 4096                          // and at most
	filesShare   = 4                             // see above
	filesNear    = 64                            // in front of the reserve each accept is asked for
	leastFiles   = 64                            // a pod may always have so many
	acceptPause  = int64(100 * time.Millisecond) // a listener that may not accept is left alone so long
	vitalAccepts = 1                             // connections that a vital listener accepts each acceptPause all the same
	warnEvery    = int64(time.Minute)            // between two lines of the log about one pod
)

// files is the process's budget of descriptors.
type files struct{ limit, reserve int }

// newFiles makes a budget of limit descriptors; 0: as the process is allowed now.
func newFiles(limit int) files {
	if limit <= 0 {
		var r unix.Rlimit
		limit = math.MaxInt32
		if unix.Getrlimit(unix.RLIMIT_NOFILE, &r) == nil {
			limit = int(min(r.Cur, math.MaxInt32))
		}
	}
	return files{limit: limit, reserve: min(limit/2, min(max(limit/filesReserve, leastReserve), mostReserve))}
}

// reserved reports whether descriptor fd is one of the reserve; vital: of that half of it
// which is not for those who ask whether the node lives either.
func (f files) reserved(fd int, vital bool) bool {
	if vital {
		return fd >= f.limit-f.reserve/2
	}
	return fd >= f.limit-f.reserve
}

// share is how many a pod may have while it has own and all pods have all; alone: there is no other pod.
func (f files) share(own, all int64, alone bool) int64 {
	usable := int64(f.limit - f.reserve)
	if alone {
		return usable
	}
	return max(leastFiles, filesShare*(usable-all))
}

// near reports whether fd is so close to the reserve that it is asked for before each accept.
func (f files) near(fd int) bool { return fd >= f.limit-f.reserve-min(f.reserve, filesNear) }

// next is the number that the next descriptor would have; any is an open one.
func (f files) next(any int) int {
	fd, err := unix.FcntlInt(uintptr(any), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return math.MaxInt
	}
	unix.Close(fd)
	return fd
}

// Shortage names what was used up when a connection could not be made, out of a
// closed set: "descriptors", of the process or the machine; "local-ports", of the pod towards
// this destination. Empty: err is about something else, or nil.
func Shortage(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return "descriptors"
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return "local-ports"
	}
	return ""
}

// ConnectCause is the cause, for the journal, of a connection that was not made: its Shortage, or "connect".
func ConnectCause(err error) string { return cmp.Or(Shortage(err), "connect") }
