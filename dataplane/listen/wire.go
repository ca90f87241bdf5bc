package listen

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// What the two processes of a hand-over say to each other over a Unix socket of
// type SOCK_SEQPACKET, a message a packet:
//
//	successor    predecessor
//	hello     →
//	          ←  sockets, sockets, ... (with descriptors, one an entry, in order)
//	          ←  end (how many there were)
//	ready     →                         the successor accepts
//	          ←  gone                   the predecessor accepts no more
//
// or, in place of the sockets, refused with the reason.
type kind uint8

const (
	hello kind = iota + 1
	sockets
	end
	ready
	gone
	refused
)

var kindNames = [...]string{hello: "hello", sockets: "sockets", end: "end", ready: "ready", gone: "gone", refused: "refused"}

func (k kind) String() string {
	if k >= hello && k <= refused {
		return kindNames[k]
	}
	return fmt.Sprintf("message(%d)", uint8(k))
}

// protocol is the version of what is above. The magic and the place of the version never change.
const (
	protocol = 1
	magic    = "aeth"
)

// Bounds of a hand-over.
const (
	maxBatch     = 64       // sockets a message: the kernel passes at most 253 descriptors at once (SCM_MAX_FD)
	maxRole      = 16       // bytes of a role's name
	maxContainer = 128      // bytes of a container ID
	maxReason    = 255      // bytes of why it was refused
	maxMessage   = 16 << 10 // bytes of a message
	maxSockets   = 16 << 10 // sockets of a hand-over
)

// entry of a sockets message. The role is a name: a later version may have roles that
// an earlier one, which takes over from it, does not know.
type named struct{ role, container string }

// message is one packet, without its descriptors.
type message struct {
	kind   kind
	total  int     // end
	names  []named // sockets
	reason string  // refused
}

// append writes m, which keeps the bounds, behind b.
func (m *message) append(b []byte) []byte {
	b = append(append(b, magic...), protocol, byte(m.kind))
	switch m.kind {
	case sockets:
		b = append(b, byte(len(m.names)))
		for _, n := range m.names {
			b = append(append(b, byte(len(n.role))), n.role...)
			b = append(append(b, byte(len(n.container))), n.container...)
		}
	case end:
		b = binary.BigEndian.AppendUint16(b, uint16(m.total))
	case refused:
		b = append(append(b, byte(len(m.reason))), m.reason...)
	}
	return b
}

var errMalformed = errors.New("listen: the message is malformed")

// parse reads what append wrote, and nothing else. What it returns does not alias b.
func parse(b []byte) (m message, err error) {
	const head = len(magic) + 2
	if len(b) < head || string(b[:len(magic)]) != magic {
		return m, errMalformed
	}
	if v := b[len(magic)]; v != protocol {
		return m, fmt.Errorf("listen: the other process speaks version %d of the hand-over, this one version %d: end it with SIGTERM and start this one then", v, protocol)
	}
	m.kind = kind(b[head-1])
	b = b[head:]
	ok := true
	text := func(longest int) string {
		if !ok || len(b) == 0 || int(b[0]) > longest || len(b) < 1+int(b[0]) {
			ok = false
			return ""
		}
		n := 1 + int(b[0])
		s := string(b[1:n])
		b = b[n:]
		return s
	}
	switch m.kind {
	case hello, ready, gone:
	case sockets:
		if len(b) == 0 || b[0] == 0 || b[0] > maxBatch {
			return m, errMalformed
		}
		n := int(b[0])
		b = b[1:]
		for range n {
			m.names = append(m.names, named{text(maxRole), text(maxContainer)})
			if !ok {
				return m, errMalformed
			}
		}
	case end:
		if len(b) < 2 {
			return m, errMalformed
		}
		if m.total = int(binary.BigEndian.Uint16(b)); m.total > maxSockets {
			return m, errMalformed
		}
		b = b[2:]
	case refused:
		m.reason = text(maxReason)
	default:
		return m, errMalformed
	}
	if !ok || len(b) > 0 {
		return m, errMalformed
	}
	return m, nil
}

// line is one end of the connection between the two. Not safe for concurrent use.
type line struct {
	c   conn
	buf []byte
}

// conn is what a line needs of its net.UnixConn.
type conn interface {
	syscall.Conn
	io.Closer
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
	ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error)
	WriteMsgUnix(b, oob []byte, addr *net.UnixAddr) (n, oobn int, err error)
}

// send sends m with copies of fds, until the deadline; fds stay the caller's.
func (l *line) send(m *message, until time.Time, fds ...int) error {
	if err := l.c.SetWriteDeadline(until); err != nil {
		return fmt.Errorf("listen: send %s: %w", m.kind, err)
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if _, _, err := l.c.WriteMsgUnix(m.append(nil), oob, nil); err != nil {
		return fmt.Errorf("listen: send %s: %w", m.kind, err)
	}
	return nil
}

// receive returns the next message, until the deadline, and its descriptors, which are
// the caller's; with an error there are none. The error of an orderly end is io.EOF.
func (l *line) receive(until time.Time) (m message, fds []int, err error) {
	if err := l.c.SetReadDeadline(until); err != nil {
		return m, nil, fmt.Errorf("listen: receive: %w", err)
	}
	if l.buf == nil {
		l.buf = make([]byte, maxMessage+1)
	}
	oob := make([]byte, unix.CmsgSpace(4*(maxBatch+1)))
	n, oobn, flags, _, err := l.c.ReadMsgUnix(l.buf, oob) // descriptors come close-on-exec
	fds, ferr := rights(oob[:oobn])
	defer func() {
		if err != nil {
			closeAll(fds)
			fds = nil
		}
	}()
	switch {
	case errors.Is(err, io.EOF):
		return m, fds, io.EOF
	case err != nil:
		return m, fds, fmt.Errorf("listen: receive: %w", err)
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0, n > maxMessage:
		return m, fds, fmt.Errorf("listen: receive: a message of more than %d bytes or %d descriptors, or no descriptor is free here: %w", maxMessage, maxBatch, errMalformed)
	case ferr != nil:
		return m, fds, ferr
	}
	if m, err = parse(l.buf[:n]); err != nil {
		return m, fds, err
	}
	if m.kind == refused {
		return m, fds, &Refused{m.reason}
	}
	if len(fds) != len(m.names) {
		return m, fds, fmt.Errorf("listen: receive: %s has %d descriptors for %d names: %w", m.kind, len(fds), len(m.names), errMalformed)
	}
	return m, fds, nil
}

// expect is receive for a message of one kind, which has no descriptors.
func (l *line) expect(k kind, until time.Time) error {
	m, fds, err := l.receive(until)
	if err == nil && m.kind != k {
		closeAll(fds)
		err = fmt.Errorf("listen: %s came in place of %s: %w", m.kind, k, errMalformed)
	}
	return err
}

// Refused is the answer of a predecessor that does not hand over.
type Refused struct{ Reason string }

func (e *Refused) Error() string {
	return "listen: the process that has the sockets refuses the hand-over: " + e.Reason
}

// rights are the descriptors in control messages; with an error too.
func rights(oob []byte) (fds []int, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	for i := range msgs {
		got, e := unix.ParseUnixRights(&msgs[i])
		if e != nil {
			err = errors.Join(err, e)
		}
		fds = append(fds, got...)
	}
	if err != nil {
		err = fmt.Errorf("listen: receive: control message: %w", err)
	}
	return fds, err
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// sameUser is an error unless the process at the other end has our user: whoever
// may hand sockets over, or take them, may be this process.
func sameUser(c syscall.Conn) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("listen: who is at the other end: %w", err)
	}
	var cred *unix.Ucred
	var cerr error
	if err := rc.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || cerr != nil {
		return fmt.Errorf("listen: who is at the other end: %w", errors.Join(err, cerr))
	}
	return allowed(cred, os.Geteuid())
}

func allowed(peer *unix.Ucred, user int) error {
	if int(peer.Uid) != user {
		return fmt.Errorf("listen: process %d at the other end is of user %d, and this process of user %d: sockets are handed over within one user only", peer.Pid, peer.Uid, user)
	}
	return nil
}
