// Package socket makes the TCP sockets of a pod's network namespace: listening
// ones, transparent where captured connections arrive, and unconnected ones for
// the proxy to dial with; and it connects to Unix sockets that a pod has made.
//
//   - Sockets are plain descriptors, non-blocking and close-on-exec, so that an
//     event loop can use them; MakeConn and TakeFD change between that and net.
//   - A descriptor has one owner. A function that takes ownership says so, and
//     then closes it on every path that does not hand it on.
//   - Every socket made to dial with carries the mark that keeps it from being
//     captured, from before it is connected.
//
// It knows nothing of what is said on the sockets, nor whose they are.
package socket

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"aether/tproxy/netns"
	"aether/tproxy/rules"
)

// KeepAlive is how a dead peer is found on a connection that nobody cuts for
// being idle (RFC 9293 3.8.4; RFC 5482 for the user timeout). The zero value
// finds one that is silent within a minute.
type KeepAlive struct {
	Idle     time.Duration // silence before the first probe. 0: 30 s; negative: no probes
	Interval time.Duration // between probes. 0: 10 s
	Count    int           // lost probes that end the connection. 0: 3

	// UserTimeout: bytes unacknowledged this long end it too. 0: only the kernel's
	// own bound does, after some 15 minutes, because Linux ends with this option a
	// peer that is well but reads nothing for so long (docs/decisions/006).
	UserTimeout time.Duration
}

// What the zero fields of KeepAlive and Spec stand for.
const (
	defaultIdle     = 30 * time.Second
	defaultInterval = 10 * time.Second
	defaultCount    = 3
	defaultBacklog  = 4096
)

// set applies k to a socket. Durations count in whole seconds, the user timeout
// in milliseconds.
func (k KeepAlive) set(fd int) error {
	secs := func(d, def time.Duration) int {
		if d == 0 {
			d = def
		}
		return int(min(max((d+time.Second-1)/time.Second, 1), math.MaxInt16))
	}
	var opts []opt
	if k.Idle >= 0 {
		count := k.Count
		if count <= 0 {
			count = defaultCount
		}
		opts = append(opts,
			opt{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1, "SO_KEEPALIVE"},
			opt{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, secs(k.Idle, defaultIdle), "TCP_KEEPIDLE"},
			opt{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, secs(k.Interval, defaultInterval), "TCP_KEEPINTVL"},
			opt{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, min(count, 127), "TCP_KEEPCNT"})
	}
	if k.UserTimeout > 0 {
		opts = append(opts, opt{unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT,
			int(min(max(k.UserTimeout/time.Millisecond, 1), math.MaxInt32)), "TCP_USER_TIMEOUT"})
	}
	return setAll(fd, opts)
}

// opt is one integer socket option, with its name for messages.
type opt struct {
	level, name, value int
	text               string
}

func setAll(fd int, opts []opt) error {
	for _, o := range opts {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return fmt.Errorf("set %s to %d: %w%s", o.text, o.value, err, capHint(err))
		}
	}
	return nil
}

func capHint(err error) string {
	if errors.Is(err, fs.ErrPermission) {
		return " (needs CAP_NET_ADMIN)"
	}
	return ""
}

// Spec is a listening socket to make. One that is not transparent carries the
// mark that capture leaves alone, and so do the connections it accepts: those
// accepted before the rules came into force are unknown to connection tracking,
// which would take their packets for the pod's own dials.
type Spec struct {
	Addr        netip.AddrPort // required; port 0: the kernel chooses
	Transparent bool           // IP_TRANSPARENT: takes connections to any address, as diverted ones are
	// DualStack with the address [::]: both families, IPv4 as IPv4-mapped addresses.
	// Where the namespace has no IPv6 the socket is on 0.0.0.0 instead.
	DualStack bool
	Backlog   int       // connections waiting to be accepted. 0: 4096; the kernel caps it at somaxconn
	KeepAlive KeepAlive // of the accepted connections, which inherit it, and TCP_NODELAY and SO_OOBINLINE too
}

// Listen makes the socket in ns; the caller owns the descriptor. The error of a
// port that is taken is EADDRINUSE and says what to do; that of a namespace that
// has vanished is netns.ErrGone. Needs CAP_SYS_ADMIN, and CAP_NET_ADMIN for a
// transparent socket.
func Listen(ns *netns.NS, s Spec) (fd int, err error) {
	fd = -1
	err = netns.Do(ns, func() (err error) {
		fd, err = listen(s)
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("socket: listen on %s in %s: %w", s.Addr, ns, err)
	}
	return fd, nil
}

// listen is Listen in the calling thread's namespace.
func listen(s Spec) (int, error) {
	if !s.Addr.IsValid() {
		return -1, errors.New("the address is not set")
	}
	addr := netip.AddrPortFrom(s.Addr.Addr().Unmap(), s.Addr.Port())
	if s.DualStack && addr.Addr() == netip.IPv6Unspecified() && !netns.HasIPv6() {
		addr = netip.AddrPortFrom(netip.IPv4Unspecified(), addr.Port())
	}
	family := unix.AF_INET
	// REUSEADDR, so that connections still closing do not keep the port from us.
	// Never REUSEPORT: two listeners would split the connections between them.
	opts := []opt{{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1, "SO_REUSEADDR"},
		{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1, "TCP_NODELAY"},
		{unix.SOL_SOCKET, unix.SO_OOBINLINE, 1, "SO_OOBINLINE"}} // else a byte of urgent data is no part of what is read (RFC 6093 6)
	if s.Transparent {
		opts = append(opts, opt{unix.SOL_IP, unix.IP_TRANSPARENT, 1, "IP_TRANSPARENT"})
	} else {
		opts = append(opts, opt{unix.SOL_SOCKET, unix.SO_MARK, rules.MarkBypass, "SO_MARK"})
	}
	if addr.Addr().Is6() {
		family = unix.AF_INET6
		only := 1
		if s.DualStack {
			only = 0
		}
		opts = append(opts, opt{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only, "IPV6_V6ONLY"})
		if s.Transparent {
			opts = append(opts, opt{unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT, 1, "IPV6_TRANSPARENT"})
		}
	}
	backlog := s.Backlog
	if backlog <= 0 {
		backlog = defaultBacklog
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("make a socket: %w", err)
	}
	err = setAll(fd, opts)
	if err == nil {
		err = s.KeepAlive.set(fd)
	}
	if err == nil {
		var sa unix.Sockaddr
		if sa, err = sockaddr(family, addr); err == nil {
			if err = unix.Bind(fd, sa); err == nil {
				err = unix.Listen(fd, backlog)
			}
		}
	}
	if err != nil {
		unix.Close(fd)
		if errors.Is(err, unix.EADDRINUSE) {
			err = fmt.Errorf("%w: an application in the pod holds port %d, which is the mesh's (give the application another port), or an earlier proxy still runs",
				err, addr.Port())
		}
		return -1, err
	}
	return fd, nil
}

// sockaddr is ap for a socket of family; IPv4 on an IPv6 socket becomes
// IPv4-mapped. A zone has to be a number: names of interfaces mean nothing
// outside their namespace.
func sockaddr(family int, ap netip.AddrPort) (unix.Sockaddr, error) {
	a := ap.Addr()
	if family == unix.AF_INET {
		if !a.Unmap().Is4() {
			return nil, fmt.Errorf("an IPv4 socket cannot use the address %s: %w", a, unix.EAFNOSUPPORT)
		}
		return &unix.SockaddrInet4{Port: int(ap.Port()), Addr: a.Unmap().As4()}, nil
	}
	sa := &unix.SockaddrInet6{Port: int(ap.Port()), Addr: a.As16()}
	if z := a.Zone(); z != "" {
		n, err := strconv.ParseUint(z, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("the zone of %s must be an interface's number: %w", a, unix.EINVAL)
		}
		sa.ZoneId = uint32(n)
	}
	return sa, nil
}

// OrigDst returns the local address of a connected socket. On a connection that
// a transparent listener accepted that is what the client dialled. IPv4-mapped
// addresses come back as IPv4; a link-local one carries its zone as a number.
// It does not allocate, but for a zone. fd stays the caller's.
func OrigDst(fd int) (netip.AddrPort, error) { return name(fd, unix.SYS_GETSOCKNAME, "local") }

// Peer returns the remote address of a connected socket, in the form of OrigDst.
func Peer(fd int) (netip.AddrPort, error) { return name(fd, unix.SYS_GETPEERNAME, "remote") }

func name(fd int, call uintptr, which string) (netip.AddrPort, error) {
	// The wrappers of x/sys allocate an address a call; this runs once for every
	// connection accepted. Neither call ever blocks, hence raw.
	var sa unix.RawSockaddrInet6
	size := uint32(unsafe.Sizeof(sa))
	_, _, errno := unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(&sa)), uintptr(unsafe.Pointer(&size)))
	if errno != 0 {
		return netip.AddrPort{}, fmt.Errorf("socket: %s address of descriptor %d: %w", which, fd, errno)
	}
	switch sa.Family {
	case unix.AF_INET:
		v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(&sa))
		return netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), hostOrder(v4.Port)), nil
	case unix.AF_INET6:
		a := netip.AddrFrom16(sa.Addr).Unmap()
		if sa.Scope_id != 0 && a.Is6() {
			a = a.WithZone(strconv.FormatUint(uint64(sa.Scope_id), 10))
		}
		return netip.AddrPortFrom(a, hostOrder(sa.Port)), nil
	}
	return netip.AddrPort{}, fmt.Errorf("socket: %s address of descriptor %d: address family %d: %w", which, fd, sa.Family, unix.EAFNOSUPPORT)
}

// hostOrder reads a port as it stands in a raw address: in network order.
func hostOrder(p uint16) uint16 {
	b := (*[2]byte)(unsafe.Pointer(&p))
	return uint16(b[0])<<8 | uint16(b[1])
}

// Namespace returns the network namespace that the socket fd was made in
// (SIOCGSKNS). Needs CAP_NET_ADMIN in it. fd stays the caller's.
func Namespace(fd int) (netns.ID, error) {
	nsfd, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
	if err != nil {
		return netns.ID{}, fmt.Errorf("socket: namespace of descriptor %d: %w%s", fd, err, capHint(err))
	}
	defer unix.Close(nsfd)
	return netns.IDOf(nsfd)
}

// MakeConn turns a connected TCP socket into a net connection, with the socket's
// options as they are. It takes ownership of fd.
func MakeConn(fd int) (*net.TCPConn, error) {
	f := os.NewFile(uintptr(fd), "tcp")
	if f == nil {
		return nil, fmt.Errorf("socket: %d is no descriptor", fd)
	}
	return fileConn(f, fd)
}

// fileConn makes the connection out of f, whose descriptor is fd, and closes f.
func fileConn(f *os.File, fd int) (*net.TCPConn, error) {
	defer f.Close()
	// net sets keepalive to its own taste on whatever it is given; f is the same
	// socket by another descriptor, so what was there can be put back by it.
	keep, err := keepAliveOf(fd)
	if err != nil {
		return nil, fmt.Errorf("socket: make a connection of a descriptor: %w", err)
	}
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("socket: make a connection of a descriptor: %w", err)
	}
	tc, ok := c.(*net.TCPConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("socket: make a connection of a descriptor: a %s socket is no TCP socket", c.LocalAddr().Network())
	}
	if err := setAll(fd, keep[:]); err != nil {
		c.Close()
		return nil, fmt.Errorf("socket: make a connection of a descriptor: %w", err)
	}
	return tc, nil
}

// keepAliveOf reads the options that set would write, the user timeout aside,
// which net leaves alone.
func keepAliveOf(fd int) ([4]opt, error) {
	opts := [4]opt{
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 0, "SO_KEEPALIVE"},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 0, "TCP_KEEPIDLE"},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 0, "TCP_KEEPINTVL"},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 0, "TCP_KEEPCNT"},
	}
	for i := range opts {
		v, err := unix.GetsockoptInt(fd, opts[i].level, opts[i].name)
		if err != nil {
			return opts, fmt.Errorf("read %s: %w", opts[i].text, err)
		}
		opts[i].value = v
	}
	return opts, nil
}

// TakeFD takes the socket out of a net connection: out of Go's poller, ready for
// another. It closes c in any case, and ends reads and writes that are under way;
// what the socket has received and nobody has read is not lost. The caller owns
// the descriptor.
func TakeFD(c *net.TCPConn) (int, error) {
	defer c.Close()
	rc, err := c.SyscallConn()
	if err != nil {
		return -1, fmt.Errorf("socket: take the descriptor of a connection: %w", err)
	}
	fd := -1
	var dupErr error
	if err := rc.Control(func(old uintptr) {
		fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil {
		return -1, fmt.Errorf("socket: take the descriptor of a connection: %w", err)
	}
	if dupErr != nil {
		return -1, fmt.Errorf("socket: take the descriptor of a connection: %w", dupErr)
	}
	return fd, nil // non-blocking already: that belongs to the socket, not to the descriptor
}

// SetLinger0 makes the coming close of fd a reset (RST) in place of an orderly
// end; bytes not yet sent are thrown away.
func SetLinger0(fd int) error {
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return fmt.Errorf("socket: set SO_LINGER of descriptor %d: %w", fd, err)
	}
	return nil
}

// Abort closes fd so that the peer sees a reset. It takes ownership of fd.
func Abort(fd int) error {
	return errors.Join(SetLinger0(fd), os.NewSyscallError("close", Close(fd)))
}

// QuickAck has the kernel acknowledge at once what fd, a TCP connection, has received, where it would
// wait for an answer to go with. It never waits, and holds for this moment only.
func QuickAck(fd int) {
	one := int32(1)
	_, _, _ = unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_QUICKACK, uintptr(unsafe.Pointer(&one)), unsafe.Sizeof(one), 0)
}

// Close closes fd from an event loop's thread. The scheduler is not told of it: a
// socket that does not linger is closed at once, but what its end sets off
// in the kernel (its peer's part, where that is on the same machine) takes so long that the
// thread would be taken its processor from.
func Close(fd int) error {
	if _, _, errno := unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0); errno != 0 {
		return errno
	}
	return nil
}
