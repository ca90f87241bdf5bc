package engine

import (
	"errors"
	"fmt"
	"io"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"aether/dataplane/reactor"
	"aether/mtls/record"
	"aether/tproxy/socket"
)

var (
	errAgain = errors.New("engine: would block")
	errYield = errors.New("engine: the pod's share of this iteration is spent")
)

// transport is the socket under a connection: plain, or TLS records over memory.
type transport struct {
	l      *Loop
	pod    *Pod
	sh     *share // the pod's part of l
	fd     int
	rec    record.Conn // nil: plain
	more   bool        // rec may hold plaintext that was not read yet
	ready  bool        // an edge said readable and no read has drained it since
	fin    bool        // an edge told of an end: it lies behind the bytes, and no further edge will tell of it
	urgent bool        // an edge told of urgent data, before which a read stops short: bytes lie behind it
	eof    bool
	end    bool // the peer's own end was read: FIN, or close_notify
	cut    bool // a read or a write failed otherwise than behind such an end
	wblk   bool // the socket took less than offered: wait for its edge
	dirty  bool // queued for the flush
	later  bool // queued for the next iteration
	waits  bool // it is among those that wait until the pod holds less
	queued bool // it is later because the pod's share of an iteration was spent
	closed bool
	sealed []byte // records waiting for the socket
	timer  reactor.Timer
	active int64  // time of the last byte either way
	born   int64  // time of its registration, or adoption
	rx, tx int64  // bytes of the socket
	turn   uint64 // the iteration that last read for this connection
	held   int    // bytes of buffers that the share was last told of
}

// Owner is Owned.
func (t *transport) Owner() *Pod { return t.pod }

// open registers the socket. Its source is src. A pod that was removed meanwhile gets none.
func (t *transport) open(l *Loop, pod *Pod, fd int, rec record.Conn, src reactor.Source) error {
	if pod.removed() {
		return errPodGone
	}
	if err := l.Register(fd, src, reactor.Stream); err != nil {
		return err
	}
	t.take(l, pod, fd)
	t.rec, t.more = rec, rec != nil
	return nil
}

// adopt is open for a socket that l has registered for another source.
func (t *transport) adopt(l *Loop, pod *Pod, fd int, src reactor.Source, readable bool) {
	t.take(l, pod, fd)
	l.Replace(fd, src)
	t.ready, t.fin, t.urgent = readable, readable, readable
}

func (t *transport) take(l *Loop, pod *Pod, fd int) {
	t.l, t.pod, t.sh, t.fd = l, pod, pod.share(l), fd
	t.active, t.born = l.Now(), l.Now()
	pod.joined()
}

// account tells the pod's share how many bytes of buffers the connection holds.
func (t *transport) account(n int) {
	if d := n - t.held; d != 0 {
		t.held = n
		t.sh.addHeldBytes(d)
	}
}

// records is how many bytes the record layer keeps, either way.
func (t *transport) records() int {
	n := cap(t.sealed)
	if t.rec != nil {
		n += t.rec.Held()
	}
	return n
}

// over is heldUp.
func (t *transport) over() bool { return t.closed }

// resumed is heldUp.
func (t *transport) resumed() { t.waits = false }

// edge notes what epoll saw of the reading side.
func (t *transport) edge(ev uint32) {
	t.ready = true
	if ev&(reactor.PeerEnd|reactor.Hangup|reactor.Error) != 0 {
		t.fin = true
	}
	if ev&reactor.Urgent != 0 {
		t.urgent = true
	}
}

// shut closes the socket. abort: with a reset instead of an orderly end.
func (t *transport) shut(abort bool) {
	if t.closed {
		return
	}
	t.closed = true
	t.l.Disarm(&t.timer)
	t.l.Unregister(t.fd)
	if abort {
		_ = unix.SetsockoptLinger(t.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	} else if t.rec != nil && !t.wblk {
		// The peer can tell an end from a cut; if the socket is full it cannot be told.
		if b := t.rec.CloseNotify(t.sealed[:0]); len(b) > 0 {
			_, _ = sysWrite(t.fd, b)
		}
	}
	_ = socket.Close(t.fd)
	t.l.putOut(t.sealed)
	t.sealed = nil
	t.account(0)
	t.pod.left()
}

// read gets plaintext into p. errAgain: nothing now. io.EOF: an orderly end.
func (t *transport) read(p []byte) (int, error) {
	for {
		if t.rec == nil {
			if !t.ready {
				return 0, errAgain
			}
			if t.sh.readSpent() {
				return 0, errYield
			}
			n, e := sysRead(t.fd, p)
			switch {
			case e == unix.EAGAIN:
				t.ready, t.fin, t.urgent = false, false, false
				return 0, errAgain
			case e == unix.EINTR:
				continue
			case e != 0:
				t.eof = true
				t.broke(e)
				t.sh.addWork()
				return 0, e
			case n == 0:
				t.eof, t.end = true, true
				t.sh.addWork()
				return 0, io.EOF
			}
			t.ready = n == len(p) || t.fin || t.urgent // a short read drained the socket (edge-triggered), but of its end
			t.took(n)
			return n, nil
		}
		if t.more {
			n, err := t.rec.Read(p)
			if err == nil {
				if n > 0 {
					return n, nil
				}
				continue
			}
			if !errors.Is(err, record.ErrMore) {
				t.eof = true
				t.end = err == io.EOF
				return 0, err
			}
			t.more = false
		}
		if !t.ready {
			return 0, errAgain
		}
		if t.sh.readSpent() {
			return 0, errYield
		}
		buf := t.l.Scratch2[:]
		n, e := sysRead(t.fd, buf)
		switch {
		case e == unix.EAGAIN:
			t.ready, t.fin, t.urgent = false, false, false
			return 0, errAgain
		case e == unix.EINTR:
			continue
		case e != 0:
			t.eof = true
			t.broke(e)
			t.sh.addWork()
			return 0, e
		case n == 0:
			t.eof, t.end = true, true
			t.sh.addWork()
			return 0, io.ErrUnexpectedEOF // no close_notify: a cut, never an orderly end
		}
		t.ready = n == len(buf) || t.fin || t.urgent
		t.took(n)
		t.rec.Feed(buf[:n]) // borrowed: read on until ErrMore, or hold
		t.more = true
	}
}

func (t *transport) took(n int) {
	t.active, t.turn = t.l.Now(), t.l.Iteration()
	t.rx += int64(n)
	t.sh.addRead(n)
}

// yield puts src, whose transport this is, off to the pod's next share of an
// iteration, behind those that wait for it already.
func (t *transport) yield(src reactor.Task) {
	if t.queued || t.closed { // one that awaits may have to be read all the same: its peer has ended
		return
	}
	if t.turn != t.l.Iteration() { // nothing was done for it
		t.l.CountDeferred()
	}
	t.later, t.queued = true, true
	t.sh.enqueue(src)
}

// await puts src off until the pod holds less.
func (t *transport) await(src heldUp) {
	if t.later || t.closed {
		return
	}
	if t.later = true; !t.waits { // once, however often it is read meanwhile
		t.waits = true
		t.sh.wait(src)
	}
}

// keepReadBuffer makes the records that were fed but not read survive the loop's scratch buffer.
func (t *transport) keepReadBuffer() {
	if t.more && t.rec != nil {
		t.rec.Feed(nil)
	}
}

// readable reports whether read may give something without a new edge.
func (t *transport) readable() bool { return t.ready || t.more }

// write sends what it can of p and returns how much of p needs no keeping
// any more: for TLS all that was sealed, sent or not. t.wblk tells that the socket is full.
func (t *transport) write(p []byte) (int, error) {
	if t.rec == nil {
		if len(p) == 0 {
			return 0, nil
		}
		n, e := sysWrite(t.fd, p)
		switch {
		case e == unix.EAGAIN:
			n = 0
		case e != 0:
			t.broke(e)
			return 0, e
		}
		if n > 0 {
			t.active = t.l.Now()
			t.tx += int64(n)
			t.sh.addWritten(n)
		}
		t.wblk = n < len(p)
		return n, nil
	}
	took := 0
	for {
		if len(t.sealed) == 0 {
			part := p[took:min(len(p), took+sealMax)]
			if len(part) == 0 && !t.rec.Pending() {
				break
			}
			t.sealed = t.l.room(t.sealed, len(part)+len(part)/64+256) // records add 22 bytes to each 16 KiB
			if len(part) == 0 {
				t.sealed = t.rec.Take(t.sealed)
			} else {
				b, err := t.rec.Seal(t.sealed, part)
				if err != nil {
					return took, fmt.Errorf("engine: seal: %w", err)
				}
				t.sealed = b
				took += len(part)
				t.sh.addWritten(len(part))
			}
		}
		n, e := sysWrite(t.fd, t.sealed)
		switch {
		case e == unix.EAGAIN:
			n = 0
		case e != 0:
			t.broke(e)
			return took, e
		}
		if n > 0 {
			t.active = t.l.Now()
			t.tx += int64(n)
		}
		if n < len(t.sealed) {
			t.sealed = t.sealed[:copy(t.sealed, t.sealed[n:])]
			t.wblk = true
			return took, nil
		}
		t.sealed = t.sealed[:0]
	}
	if t.sealed != nil {
		t.l.putOut(t.sealed)
		t.sealed = nil
	}
	return took, nil
}

// broke notes why the socket failed. EPIPE alone leaves open that the peer had ended its side in
// order before: behind any other failure a read finds an end that the peer never sent.
func (t *transport) broke(e syscall.Errno) { t.cut = t.cut || e != unix.EPIPE }

// taken is how many of the bytes that were written (tx) the peer may have had, once the
// connection has ended. A FIN acknowledges all that had arrived before it was sent (RFC 9293
// 3.10.4), and to what arrives behind it nobody can answer any more.
func (t *transport) taken() int64 {
	if !t.end || t.cut {
		return t.tx
	}
	if domain, err := unix.GetsockoptInt(t.fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err != nil || domain == unix.AF_UNIX {
		return t.tx // a Unix socket has no acknowledgements
	}
	unacked, err := unix.IoctlGetInt(t.fd, unix.SIOCOUTQ)
	if err != nil {
		return t.tx
	}
	return t.tx - int64(unacked)
}

// asleep reports whether the peer has neither ended the connection nor sent anything, by a look
// at the socket.
func (t *transport) asleep() bool {
	var b [1]byte
	for {
		_, _, e := syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(t.fd), uintptr(unsafe.Pointer(&b)), 1, unix.MSG_PEEK|unix.MSG_DONTWAIT, 0, 0)
		if e != unix.EINTR {
			return e == unix.EAGAIN
		}
	}
}

// connectError is what became of a non-blocking connect.
func (t *transport) connectError() error {
	v, err := unix.GetsockoptInt(t.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return err
	}
	if v != 0 {
		return syscall.Errno(v)
	}
	return nil
}

// Raw: neither call ever blocks, so the scheduler need not know of it.
func sysRead(fd int, p []byte) (int, syscall.Errno) {
	n, _, e := syscall.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	return int(n), e
}

func sysWrite(fd int, p []byte) (int, syscall.Errno) {
	for { // not EINTR, which no edge would follow
		n, _, e := syscall.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
		if e != unix.EINTR {
			return int(n), e
		}
	}
}

func (t *transport) show(s *ConnState) {
	now := t.l.Now()
	s.AgeMS, s.IdleMS = (now-t.born)/1e6, (now-t.active)/1e6
	s.BytesIn, s.BytesOut = t.rx, t.tx
}

// halfClose ends our side of the connection; the peer's goes on.
func (t *transport) halfClose() error {
	if t.rec == nil {
		return unix.Shutdown(t.fd, unix.SHUT_WR)
	}
	t.sealed = t.rec.CloseNotify(t.l.room(t.sealed, 64))
	_, err := t.write(nil)
	return err
}
