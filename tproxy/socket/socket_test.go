package socket_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/tproxy/apply"
	"aether/tproxy/netns"
	"aether/tproxy/netns/netnstest"
	"aether/tproxy/rules"
	"aether/tproxy/socket"
)

// patience bounds every wait of these tests.
const patience = 20 * time.Second

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// noLeak fails the test if it ends with more descriptors open than now.
func noLeak(t *testing.T) {
	open := func() int {
		d, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(d)
	}
	before := open()
	t.Cleanup(func() {
		if after := open(); after > before {
			t.Errorf("%d descriptors open, %d before", after, before)
		}
	})
}

func warmUp(t *testing.T) { // Go's poller has descriptors of its own, from first use on
	c, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func listen(t testing.TB, ns *netns.NS, s socket.Spec) int {
	t.Helper()
	fd, err := socket.Listen(ns, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// accept waits for a connection on a non-blocking listening descriptor.
func accept(t testing.TB, fd int) int {
	t.Helper()
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(p, int(patience/time.Millisecond))
		if err == unix.EINTR {
			continue
		}
		if n != 1 || err != nil {
			t.Fatalf("nobody connected: %d, %v", n, err)
		}
		c, _, err := unix.Accept4(fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(c) })
		return c
	}
}

// dial connects from ns by a socket of a pool of its own.
func dial(t testing.TB, ns *netns.NS, addr netip.AddrPort) *net.TCPConn {
	t.Helper()
	var fd int
	netnstest.Do(t, ns, func() (err error) {
		family := unix.AF_INET
		if addr.Addr().Is6() {
			family = unix.AF_INET6
		}
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	})
	c, err := socket.Connect(within(t), fd, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func localPort(t testing.TB, fd int) netip.AddrPort {
	t.Helper()
	a, err := socket.OrigDst(fd)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// option is an integer option of a socket, or the flags of a descriptor.
func option(t testing.TB, fd, level, name int) int {
	t.Helper()
	v, err := unix.GetsockoptInt(fd, level, name)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func expectOptions(t *testing.T, what string, fd int, want map[string][3]int) {
	t.Helper()
	for name, w := range want {
		if got := option(t, fd, w[0], w[1]); got != w[2] {
			t.Errorf("%s: %s is %d, want %d", what, name, got, w[2])
		}
	}
	if fl, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); err != nil || fl&unix.O_NONBLOCK == 0 {
		t.Errorf("%s: blocking", what)
	}
	if fl, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || fl&unix.FD_CLOEXEC == 0 {
		t.Errorf("%s: not close-on-exec", what)
	}
}

func TestListenOptions(t *testing.T) {
	ns := netnstest.New(t)
	spec := socket.Spec{Addr: netip.MustParseAddrPort("[::]:0"), Transparent: true, DualStack: true}
	ln := listen(t, ns, spec)
	expectOptions(t, "listener", ln, map[string][3]int{
		"SO_ACCEPTCONN":    {unix.SOL_SOCKET, unix.SO_ACCEPTCONN, 1},
		"SO_REUSEADDR":     {unix.SOL_SOCKET, unix.SO_REUSEADDR, 1},
		"SO_REUSEPORT":     {unix.SOL_SOCKET, unix.SO_REUSEPORT, 0},
		"IP_TRANSPARENT":   {unix.SOL_IP, unix.IP_TRANSPARENT, 1},
		"IPV6_TRANSPARENT": {unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT, 1},
		"IPV6_V6ONLY":      {unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0},
	})
	if i, err := unix.GetsockoptTCPInfo(ln, unix.IPPROTO_TCP, unix.TCP_INFO); err != nil || i.Sacked != 4096 { // of a listener that is its backlog
		t.Errorf("a backlog of %d, %v", i.Sacked, err)
	}
	if id, err := socket.Namespace(ln); err != nil || id != ns.ID() {
		t.Errorf("the listener is in %v (%v), want %v", id, err, ns.ID())
	}
	dial(t, ns, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), localPort(t, ln).Port()))
	expectOptions(t, "accepted", accept(t, ln), map[string][3]int{
		"TCP_NODELAY":      {unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		"SO_OOBINLINE":     {unix.SOL_SOCKET, unix.SO_OOBINLINE, 1},
		"SO_KEEPALIVE":     {unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		"TCP_KEEPIDLE":     {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 30},
		"TCP_KEEPINTVL":    {unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 10},
		"TCP_KEEPCNT":      {unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 3},
		"TCP_USER_TIMEOUT": {unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 0},
	})
	plain := listen(t, ns, socket.Spec{Addr: netip.MustParseAddrPort("127.0.0.1:0"),
		KeepAlive: socket.KeepAlive{Idle: -1}})
	expectOptions(t, "plain", plain, map[string][3]int{
		"IP_TRANSPARENT":   {unix.SOL_IP, unix.IP_TRANSPARENT, 0},
		"SO_KEEPALIVE":     {unix.SOL_SOCKET, unix.SO_KEEPALIVE, 0},
		"TCP_USER_TIMEOUT": {unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 0},
	})
}

// Two loopback listeners on one port, one a family, as the proxy port has them.
func TestListenOnBothLoopbacks(t *testing.T) {
	ns := netnstest.New(t)
	for _, a := range []string{"127.0.0.1:18081", "[::1]:18081"} {
		ln := listen(t, ns, socket.Spec{Addr: netip.MustParseAddrPort(a)})
		dial(t, ns, netip.MustParseAddrPort(a))
		if got := localPort(t, accept(t, ln)); got.String() != a {
			t.Errorf("accepted on %s, want %s", got, a)
		}
	}
}

func TestListenErrors(t *testing.T) {
	warmUp(t)
	ns := netnstest.New(t)
	noLeak(t)
	spec := socket.Spec{Addr: netip.MustParseAddrPort("[::]:18001"), Transparent: true, DualStack: true}
	app := listenQuiet(t, ns, "0.0.0.0:18001")
	_, err := socket.Listen(ns, spec)
	if !errors.Is(err, unix.EADDRINUSE) || !strings.Contains(err.Error(), "an application in the pod holds port 18001") ||
		!strings.Contains(err.Error(), ns.Path()) {
		t.Errorf("a port that is taken: %v", err)
	}
	unix.Close(app)
	if _, err := socket.Listen(ns, socket.Spec{}); err == nil || !strings.Contains(err.Error(), "not set") {
		t.Errorf("no address: %v", err)
	}
	if _, err := socket.Listen(ns, socket.Spec{Addr: netip.MustParseAddrPort("192.0.2.1:80")}); !errors.Is(err, unix.EADDRNOTAVAIL) {
		t.Errorf("an address of nobody: %v", err)
	}
	if _, err := socket.Listen(gone(t, ns), spec); !errors.Is(err, netns.ErrGone) {
		t.Errorf("a namespace that is gone: %v", err)
	}
}

func listenQuiet(t *testing.T, ns *netns.NS, addr string) int {
	t.Helper()
	fd, err := socket.Listen(ns, socket.Spec{Addr: netip.MustParseAddrPort(addr)})
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// gone is a handle of ns whose path has vanished.
func gone(t *testing.T, ns *netns.NS) *netns.NS {
	t.Helper()
	pin := filepath.Join(t.TempDir(), "pin")
	if err := os.Symlink(ns.Path(), pin); err != nil {
		t.Fatal(err)
	}
	n, err := netns.Open(pin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	if err := os.Remove(pin); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestListenWithoutIPv6(t *testing.T) {
	ns := netnstest.New(t)
	netnstest.Sysctl(t, ns, "net/ipv6/conf/all/disable_ipv6", "1")
	ln := listen(t, ns, socket.Spec{Addr: netip.MustParseAddrPort("[::]:0"), DualStack: true, Transparent: true})
	if got := option(t, ln, unix.SOL_SOCKET, unix.SO_DOMAIN); got != unix.AF_INET {
		t.Errorf("family %d, want AF_INET", got)
	}
	dial(t, ns, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), localPort(t, ln).Port()))
	accept(t, ln)
	if _, err := socket.Listen(ns, socket.Spec{Addr: netip.MustParseAddrPort("[::1]:0")}); !errors.Is(err, unix.EADDRNOTAVAIL) {
		t.Errorf("::1: %v", err)
	}
}

// A connection that was diverted shows what was dialled as its local address,
// from outside the namespace, and who dialled as its peer.
func TestOrigDst(t *testing.T) {
	node := netnstest.NewNode(t)
	pod := node.Pod(t)
	ln := listen(t, pod.NS, socket.Spec{Addr: netip.MustParseAddrPort("[::]:18001"), Transparent: true, DualStack: true})
	if err := apply.Apply(pod.NS, rules.Config{RedirectAll: true}.Ruleset()); err != nil {
		t.Fatal(err)
	}
	for _, a := range []string{"10.96.0.10:8080", "[fd00:96::10]:8080", "203.0.113.255:1", "[2001:db8::1]:65535"} {
		addr := netip.MustParseAddrPort(a)
		c := dial(t, pod.NS, addr)
		fd := accept(t, ln)
		if got := localPort(t, fd); got != addr {
			t.Errorf("dialled %s, OrigDst %s", addr, got)
		}
		peer, err := socket.Peer(fd)
		if want := c.LocalAddr().(*net.TCPAddr).AddrPort(); err != nil || peer.Addr() != want.Addr().Unmap() || peer.Port() != want.Port() {
			t.Errorf("peer %s (%v), want %s", peer, err, want)
		}
		if n := testing.AllocsPerRun(100, func() { socket.OrigDst(fd); socket.Peer(fd) }); n != 0 {
			t.Errorf("%v allocations for the two addresses, want 0", n)
		}
	}
	if _, err := socket.OrigDst(-1); !errors.Is(err, unix.EBADF) {
		t.Errorf("a bad descriptor: %v", err)
	}
	if _, err := socket.Peer(ln); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("a listener's peer: %v", err)
	}
}

func TestLinkLocalZone(t *testing.T) {
	a, b := netnstest.New(t), netnstest.New(t)
	netnstest.Veth(t, netnstest.End{NS: a, Name: "x"}, netnstest.End{NS: b, Name: "x"})
	ln := listen(t, b, socket.Spec{Addr: netip.MustParseAddrPort("[::]:8080"), DualStack: true})
	zone := strings.TrimSpace(netnstest.Run(t, a, "cat", "/proc/sys/net/ipv6/conf/x/disable_ipv6"))
	if zone != "0" {
		t.Fatalf("IPv6 is off: %q", zone)
	}
	index := strings.Split(netnstest.Run(t, a, "ip", "-o", "link", "show", "x"), ":")[0]
	c := dial(t, a, netip.MustParseAddrPort("[fe80::2%"+index+"]:8080"))
	peer, err := socket.Peer(accept(t, ln))
	if err != nil || peer.Addr().WithZone("") != netip.MustParseAddr("fe80::1") || peer.Addr().Zone() == "" {
		t.Errorf("peer %s, %v", peer, err)
	}
	c.Close()
	var fd int
	netnstest.Do(t, a, func() (err error) {
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
		return err
	})
	if _, err := socket.Connect(within(t), fd, netip.MustParseAddrPort("[fe80::2%x]:8080")); !errors.Is(err, unix.EINVAL) {
		t.Errorf("an interface's name as zone: %v", err)
	}
}

func TestConnect(t *testing.T) {
	warmUp(t)
	node := netnstest.NewNode(t)
	pod := node.Pod(t)
	spec := socket.Spec{Addr: netip.MustParseAddrPort("[::]:8080"), DualStack: true}
	ln := listen(t, node.NS, spec)
	// Nobody answers for this neighbour: the packet goes nowhere.
	netnstest.Run(t, pod.NS, "ip", "route", "add", "blackhole", "198.51.100.0/24")
	netnstest.Run(t, pod.NS, "ip", "neigh", "add", "10.1.1.77", "lladdr", "02:00:00:00:00:77", "dev", "eth0")
	noLeak(t)
	f := socket.FactoryConfig{KeepAlive: socket.KeepAlive{Idle: 7 * time.Second, Interval: 3 * time.Second, Count: 2, UserTimeout: 5 * time.Second}}.New()
	defer f.Close()
	pool := f.Open(pod.NS)
	get := func(v6 bool) int {
		t.Helper()
		fd, err := pool.Wait(within(t), v6)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	for _, tt := range []struct {
		addr netip.Addr
		v6   bool
	}{{pod.GW, false}, {pod.GW6, true}, {pod.GW, true}} { // the last: IPv4 by an IPv6 socket
		c, err := socket.Connect(within(t), get(tt.v6), netip.AddrPortFrom(tt.addr, 8080))
		if err != nil {
			t.Fatal(err)
		}
		far, err := socket.MakeConn(acceptQuiet(t, ln))
		if err != nil {
			t.Fatal(err)
		}
		far.SetDeadline(time.Now().Add(patience))
		c.SetDeadline(time.Now().Add(patience))
		if _, err := c.Write([]byte("hello")); err != nil {
			t.Error(err)
		}
		b := make([]byte, 5)
		if _, err := io.ReadFull(far, b); err != nil || string(b) != "hello" {
			t.Errorf("%s: %q, %v", tt.addr, b, err)
		}
		rc, _ := c.SyscallConn()
		rc.Control(func(fd uintptr) {
			expectOptions(t, "connected", int(fd), map[string][3]int{
				"SO_MARK":          {unix.SOL_SOCKET, unix.SO_MARK, rules.MarkBypass},
				"TCP_NODELAY":      {unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
				"SO_OOBINLINE":     {unix.SOL_SOCKET, unix.SO_OOBINLINE, 1},
				"TCP_KEEPIDLE":     {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 7},
				"TCP_KEEPINTVL":    {unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 3},
				"TCP_KEEPCNT":      {unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 2},
				"TCP_USER_TIMEOUT": {unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 5000},
			})
		})
		c.Close()
		far.Close()
	}

	cancelled, cancel := context.WithCancelCause(t.Context())
	why := errors.New("no longer wanted")
	cancel(why)
	short, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	for _, tt := range []struct {
		name string
		ctx  context.Context
		addr string
		v6   bool
		want error
	}{
		{"refused", within(t), "10.1.1.1:9", false, unix.ECONNREFUSED},
		{"refused, IPv6", within(t), "[fd00:1:1::1]:9", true, unix.ECONNREFUSED},
		{"no route", within(t), "198.51.100.1:9", false, unix.EINVAL},
		{"silence", short, "10.1.1.77:9", false, context.DeadlineExceeded},
		{"ended before", cancelled, "10.1.1.1:8080", false, why},
		{"IPv6 by an IPv4 socket", within(t), "[fd00:1:1::1]:8080", false, unix.EAFNOSUPPORT},
	} {
		c, err := socket.Connect(tt.ctx, get(tt.v6), netip.MustParseAddrPort(tt.addr))
		if c != nil || !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
		if err != nil && (!strings.Contains(err.Error(), tt.addr) || !strings.Contains(err.Error(), pod.NS.ID().String())) {
			t.Errorf("%s: the error does not say from where to where: %v", tt.name, err)
		}
	}
	if _, err := socket.Connect(t.Context(), -1, netip.MustParseAddrPort("10.1.1.1:1")); err == nil {
		t.Error("connected descriptor -1")
	}
}

// What StartConnect begins ends in the caller's own poll, for each form of an
// address on each family of socket.
func TestStartConnect(t *testing.T) {
	ns := netnstest.New(t)
	ln := listen(t, ns, socket.Spec{Addr: netip.MustParseAddrPort("[::]:8080"), DualStack: true})
	const inet, inet6 = unix.AF_INET, unix.AF_INET6
	for _, tt := range []struct {
		family int
		addr   string
		began  error // what StartConnect returns
		ended  unix.Errno
		peer   string // as the socket then sees it
	}{
		{inet, "127.0.0.1:8080", nil, 0, "127.0.0.1:8080"},
		{inet, "[::ffff:127.0.0.1]:8080", nil, 0, "127.0.0.1:8080"},
		{inet6, "[::1]:8080", nil, 0, "[::1]:8080"},
		{inet6, "127.0.0.1:8080", nil, 0, "127.0.0.1:8080"},
		{inet6, "[::ffff:127.0.0.1]:8080", nil, 0, "127.0.0.1:8080"},
		{inet, "127.0.0.1:9", nil, unix.ECONNREFUSED, ""},
		{inet6, "[::1]:9", nil, unix.ECONNREFUSED, ""},
		{inet, "[::1]:8080", unix.EAFNOSUPPORT, 0, ""},
		{inet, "198.51.100.1:8080", unix.ENETUNREACH, 0, ""}, // the namespace has no route
		{inet6, "[fe80::1%eth0]:8080", unix.EINVAL, 0, ""},
	} {
		name := fmt.Sprintf("%s by family %d", tt.addr, tt.family)
		var fd int
		netnstest.Do(t, ns, func() (err error) {
			fd, err = unix.Socket(tt.family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			return err
		})
		t.Cleanup(func() { unix.Close(fd) })
		if err := socket.StartConnect(fd, netip.MustParseAddrPort(tt.addr)); !errors.Is(err, tt.began) || err != nil && tt.began == nil {
			t.Errorf("%s: %v, want %v", name, err, tt.began)
			continue
		}
		if tt.began != nil {
			continue
		}
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, err := unix.Poll(p, int(patience/time.Millisecond))
		for err == unix.EINTR {
			n, err = unix.Poll(p, int(patience/time.Millisecond))
		}
		if n != 1 || err != nil {
			t.Fatalf("%s: never ended: %v", name, err)
		}
		var want error
		if tt.ended != 0 {
			want = tt.ended
		}
		if ok, err := socket.Connected(fd); ok != (tt.ended == 0) || err != want {
			t.Errorf("%s ended with %v, %v, want %v", name, ok, err, want)
		}
		if tt.ended == 0 {
			accept(t, ln)
			if peer, err := socket.Peer(fd); err != nil || peer.String() != tt.peer {
				t.Errorf("%s: connected to %s (%v), want %s", name, peer, err, tt.peer)
			}
		}
	}
	if err := socket.StartConnect(-1, netip.MustParseAddrPort("127.0.0.1:1")); !errors.Is(err, unix.EBADF) {
		t.Errorf("a bad descriptor: %v", err)
	}
}

// TestConnectedAndReset: a peer that accepts and resets at once was connected: what it sent first is read, then the end.
func TestConnectedAndReset(t *testing.T) {
	ns := netnstest.New(t)
	ln := listen(t, ns, socket.Spec{Addr: netip.MustParseAddrPort("127.0.0.1:8080")})
	for _, sent := range []string{"", "busy"} {
		var fd int
		netnstest.Do(t, ns, func() (err error) {
			fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			return err
		})
		t.Cleanup(func() { unix.Close(fd) })
		if ok, err := socket.Connected(fd); ok || err != nil {
			t.Fatalf("before the connect: %v, %v", ok, err)
		}
		if err := socket.StartConnect(fd, netip.MustParseAddrPort("127.0.0.1:8080")); err != nil {
			t.Fatal(err)
		}
		peer := acceptQuiet(t, ln)
		if sent != "" {
			if _, err := unix.Write(peer, []byte(sent)); err != nil {
				t.Fatal(err)
			}
		}
		if err := socket.Abort(peer); err != nil {
			t.Fatal(err)
		}
		p := []unix.PollFd{{Fd: int32(fd)}} // POLLERR and POLLHUP are always asked for
		n, err := unix.Poll(p, int(patience/time.Millisecond))
		for err == unix.EINTR {
			n, err = unix.Poll(p, int(patience/time.Millisecond))
		}
		if n != 1 || err != nil || p[0].Revents&unix.POLLERR == 0 {
			t.Fatalf("no reset arrived: %d, %v, %#x", n, err, p[0].Revents)
		}
		if ok, err := socket.Connected(fd); !ok || err != nil {
			t.Errorf("after a reset: %v, %v, want connected", ok, err)
		}
		b := make([]byte, 16)
		if n, err := unix.Read(fd, b); err != nil || string(b[:n]) != sent {
			t.Errorf("read %q, %v, want %q", b[:max(n, 0)], err, sent)
		}
		if n, err := unix.Read(fd, b); n != 0 || err != nil {
			t.Errorf("behind it: %d, %v, want the end", n, err)
		}
	}
}

func acceptQuiet(t *testing.T, ln int) int {
	t.Helper()
	p := []unix.PollFd{{Fd: int32(ln), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(p, int(patience/time.Millisecond))
		if err != unix.EINTR {
			break
		}
	}
	fd, _, err := unix.Accept4(ln, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// pair is a connection on loopback, in two forms.
func pair(t *testing.T) (near *net.TCPConn, far *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{c, a} {
		c.SetDeadline(time.Now().Add(patience))
	}
	return c.(*net.TCPConn), a.(*net.TCPConn)
}

// A socket goes from net to an epoll of our own and back, with what it has
// received and not read, and is not watched by Go meanwhile.
func TestTakeFDAndBack(t *testing.T) {
	warmUp(t)
	noLeak(t)
	near, far := pair(t)
	defer far.Close()
	readErr := make(chan error, 1)
	started := make(chan struct{})
	go func() {
		close(started)
		_, err := near.Read(make([]byte, 1))
		readErr <- err
	}()
	<-started
	fd, err := socket.TakeFD(near)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-readErr; !errors.Is(err, net.ErrClosed) {
		t.Errorf("the read under way ended with %v", err)
	}
	if _, err := socket.TakeFD(near); !errors.Is(err, net.ErrClosed) {
		t.Errorf("taken twice: %v", err)
	}
	expectOptions(t, "taken", fd, nil)
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ep)
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}); err != nil {
		t.Fatal(err)
	}
	far.Write([]byte("abc"))
	ev := make([]unix.EpollEvent, 1)
	for {
		n, err := unix.EpollWait(ep, ev, int(patience/time.Millisecond))
		if err == unix.EINTR {
			continue
		}
		if n != 1 || err != nil {
			t.Fatalf("epoll: %d, %v", n, err)
		}
		break
	}
	b := make([]byte, 2)
	if n, err := unix.Read(fd, b[:1]); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	unix.EpollCtl(ep, unix.EPOLL_CTL_DEL, fd, nil)
	back, err := socket.MakeConn(fd)
	if err != nil {
		t.Fatal(err)
	}
	back.SetDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(back, b); err != nil || string(b) != "bc" {
		t.Errorf("read %q, %v", b, err)
	}
	back.Close()
	if n, err := far.Read(b); n != 0 || err != io.EOF {
		t.Errorf("the far end read %d, %v after the close", n, err)
	}
}

func TestMakeConnErrors(t *testing.T) {
	warmUp(t)
	noLeak(t)
	if _, err := socket.MakeConn(-1); err == nil {
		t.Error("made a connection of descriptor -1")
	}
	udp, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := socket.MakeConn(udp); err == nil {
		t.Error("made a TCP connection of a UDP socket")
	}
}

func TestAbort(t *testing.T) {
	near, far := pair(t)
	defer far.Close()
	near.Write([]byte("x"))
	fd, err := socket.TakeFD(near)
	if err != nil {
		t.Fatal(err)
	}
	if err := socket.Abort(fd); err != nil {
		t.Fatal(err)
	}
	var lastErr error
	for b := make([]byte, 8); lastErr == nil; { // what had arrived may be read first
		_, lastErr = far.Read(b)
	}
	if !errors.Is(lastErr, unix.ECONNRESET) {
		t.Errorf("the peer saw %v, want a reset", lastErr)
	}
	if err := socket.Abort(-1); !errors.Is(err, unix.EBADF) {
		t.Errorf("a bad descriptor: %v", err)
	}
}

func TestPoolSockets(t *testing.T) {
	ns := netnstest.New(t)
	f := socket.NewFactory()
	defer f.Close()
	p := f.Open(ns)
	for _, v6 := range []bool{false, true} {
		fd, err := p.Wait(within(t), v6)
		if err != nil {
			t.Fatal(err)
		}
		domain := unix.AF_INET
		if v6 {
			domain = unix.AF_INET6
		}
		expectOptions(t, "pool", fd, map[string][3]int{
			"SO_DOMAIN":        {unix.SOL_SOCKET, unix.SO_DOMAIN, domain},
			"SO_TYPE":          {unix.SOL_SOCKET, unix.SO_TYPE, unix.SOCK_STREAM},
			"SO_MARK":          {unix.SOL_SOCKET, unix.SO_MARK, 0xae7e},
			"TCP_NODELAY":      {unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
			"SO_OOBINLINE":     {unix.SOL_SOCKET, unix.SO_OOBINLINE, 1},
			"SO_KEEPALIVE":     {unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
			"TCP_KEEPIDLE":     {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 30},
			"TCP_USER_TIMEOUT": {unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 0},
		})
		if id, err := socket.Namespace(fd); err != nil || id != ns.ID() {
			t.Errorf("the socket is in %v (%v), want %v", id, err, ns.ID())
		}
		unix.Close(fd)
	}
	if err := p.Err(); err != nil {
		t.Error(err)
	}
}

// sockets counts the process's TCP sockets that were made in ns, by family.
func sockets(t *testing.T, ns *netns.NS) (v4, v6 int) {
	t.Helper()
	links, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		path := filepath.Join("/proc/self/fd", l.Name())
		if s, err := os.Readlink(path); err != nil || !strings.HasPrefix(s, "socket:") {
			continue
		}
		var fd int
		for _, c := range l.Name() {
			fd = fd*10 + int(c-'0')
		}
		if id, err := socket.Namespace(fd); err != nil || id != ns.ID() {
			continue
		}
		switch d, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); d {
		case unix.AF_INET:
			v4++
		case unix.AF_INET6:
			v6++
		}
	}
	return v4, v6
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestPoolIsBoundedAndIPv6IsMadeOnDemand(t *testing.T) {
	ns := netnstest.New(t)
	f := socket.NewFactory()
	p := f.Open(ns)
	settled := func(w4, w6 int) func() bool {
		return func() bool {
			n4, n6 := sockets(t, ns)
			if n4 > 8 || n6 > 8 {
				t.Errorf("%d and %d sockets ready, want at most 8 a family", n4, n6)
			}
			return n4 == w4 && n6 == w6
		}
	}
	eventually(t, "8 IPv4 sockets", settled(8, 0))
	for range 100 { // taking and closing: never more than 8
		if fd, ok := p.Get(false); ok {
			unix.Close(fd)
		}
	}
	// The last refill may have been asked for at half-full and no more: ask again.
	eventually(t, "at least 5 again", func() bool { n4, n6 := sockets(t, ns); return n4 > 4 && n6 == 0 })
	if fd, ok := p.Get(true); ok || fd != -1 {
		t.Errorf("an IPv6 socket was there before it was asked for: %d, %v", fd, ok)
	}
	eventually(t, "8 IPv6 sockets", func() bool { _, n6 := sockets(t, ns); return n6 == 8 })
	p.Close()
	if n4, n6 := sockets(t, ns); n4 != 0 || n6 != 0 {
		t.Errorf("%d and %d sockets left after Close", n4, n6)
	}
	if fd, ok := p.Get(false); ok || fd != -1 {
		t.Errorf("Get after Close: %d, %v", fd, ok)
	}
	if _, err := p.Wait(within(t), false); !errors.Is(err, socket.ErrClosed) || !errors.Is(err, net.ErrClosed) {
		t.Errorf("Wait after Close: %v", err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	f.Close()
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	late := f.Open(ns)
	if _, err := late.Wait(within(t), false); !errors.Is(err, socket.ErrClosed) {
		t.Errorf("Wait on a pool of a closed factory: %v", err)
	}
	late.Close()
}

// Many take from many pools at once; each gets a socket of its own pod, nobody
// is forgotten, and the worker is in no namespace in the end.
func TestManyPools(t *testing.T) {
	warmUp(t)
	spaces := []*netns.NS{netnstest.New(t), netnstest.New(t), netnstest.New(t), netnstest.New(t)}
	noLeak(t)
	f := socket.NewFactory()
	var wg sync.WaitGroup
	ctx := within(t)
	for _, ns := range spaces {
		p := f.Open(ns)
		for i := range 30 { // more than a pool holds
			wg.Go(func() {
				for range 20 {
					fd, err := p.Wait(ctx, i%3 == 0)
					if err != nil {
						t.Error(err)
						return
					}
					if id, err := socket.Namespace(fd); err != nil || id != ns.ID() {
						t.Errorf("a socket of %v (%v), want %v", id, err, ns.ID())
					}
					unix.Close(fd)
				}
			})
		}
	}
	wg.Wait()
	f.Close()
	tasks, _ := filepath.Glob("/proc/self/task/*/ns/net")
	for _, task := range tasks {
		s, _ := os.Readlink(task)
		for _, ns := range spaces {
			if s == ns.ID().String() {
				t.Errorf("thread %s stayed in %s", task, s)
			}
		}
	}
}

// Closing while others take: every socket is closed once, by its owner.
func TestCloseWhileInUse(t *testing.T) {
	warmUp(t)
	ns := netnstest.New(t)
	noLeak(t)
	f := socket.NewFactory()
	for range 50 {
		p := f.Open(ns)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				for {
					fd, err := p.Wait(t.Context(), true)
					if err != nil {
						if !errors.Is(err, socket.ErrClosed) {
							t.Error(err)
						}
						return
					}
					if err := unix.Close(fd); err != nil {
						t.Error(err)
					}
				}
			})
		}
		if fd, err := p.Wait(within(t), false); err == nil {
			unix.Close(fd)
		}
		p.Close()
		wg.Wait()
	}
	f.Close()
}

// A pod whose namespace is gone fails at once and holds nobody up.
func TestPoolOfAGoneNamespace(t *testing.T) {
	ns := netnstest.New(t)
	f := socket.NewFactory()
	defer f.Close()
	bad, good := f.Open(gone(t, ns)), f.Open(ns)
	for range 20 {
		if _, err := bad.Wait(within(t), false); !errors.Is(err, netns.ErrGone) {
			t.Fatalf("error %v, want ErrGone", err)
		}
		fd, err := good.Wait(within(t), false)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
	}
	if err := bad.Err(); !errors.Is(err, netns.ErrGone) {
		t.Errorf("Err %v, want ErrGone", err)
	}
	if err := good.Err(); err != nil {
		t.Error(err)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	ns := netnstest.New(t)
	f := socket.NewFactory()
	defer f.Close()
	p := f.Open(ns)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("no longer wanted")
	cancel(why)
	// A ready socket may still be handed out; once there is none, the context counts.
	for n := 0; ; n++ {
		fd, err := p.Wait(ctx, false)
		if err != nil {
			if !errors.Is(err, why) || !strings.Contains(err.Error(), ns.Path()) {
				t.Errorf("error %v", err)
			}
			return
		}
		unix.Close(fd)
		if n > 1_000_000 {
			t.Fatal("the context never counted")
		}
	}
}

// Running out of descriptors is an error to those who wait, and passes.
func TestOutOfDescriptors(t *testing.T) {
	ns := netnstest.New(t)
	f := socket.NewFactory()
	defer f.Close()
	p := f.Open(ns)
	fd, err := p.Wait(within(t), false) // the worker has been through once
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	var waitErr error
	var taken []int
	for waitErr == nil && len(taken) < 100 {
		var fd int
		if fd, waitErr = p.Wait(within(t), false); waitErr == nil {
			taken = append(taken, fd)
		}
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	for _, fd := range taken {
		unix.Close(fd)
	}
	if !errors.Is(waitErr, unix.EMFILE) || !strings.Contains(waitErr.Error(), "open files") {
		t.Errorf("error %v, want EMFILE and what to do", waitErr)
	}
	// A failure of before may still be on its way to the first Wait.
	eventually(t, "sockets again", func() bool {
		fd, err := p.Wait(within(t), false)
		if err != nil {
			return false
		}
		unix.Close(fd)
		return p.Err() == nil
	})
}

func TestGetDoesNotAllocate(t *testing.T) {
	ns := netnstest.New(t)
	f := socket.NewFactory()
	defer f.Close()
	p := f.Open(ns)
	p.Close()
	if n := testing.AllocsPerRun(100, func() { p.Get(false) }); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

// A busy pool gives a few thousand sockets a second; the limit here leaves room
// for the race detector and a busy machine. BenchmarkPool has the figure.
func TestPoolRate(t *testing.T) {
	ns := netnstest.New(t)
	f := socket.NewFactory()
	defer f.Close()
	p := f.Open(ns)
	const n = 5000
	ctx := within(t)
	begin := time.Now()
	for range n {
		fd, err := p.Wait(ctx, false)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
	}
	took := time.Since(begin)
	t.Logf("%.0f sockets a second", n/took.Seconds())
	if took > 5*time.Second {
		t.Errorf("%d sockets took %v, want at least 1000 a second", n, took)
	}
}

// BenchmarkPool takes a socket, waiting when there is none, and closes it.
func BenchmarkPool(b *testing.B) {
	ns := netnstest.New(b)
	f := socket.NewFactory()
	defer f.Close()
	p := f.Open(ns)
	for b.Loop() {
		fd, err := p.Wait(b.Context(), false)
		if err != nil {
			b.Fatal(err)
		}
		unix.Close(fd)
	}
}

// TestIsLocal: what is the namespace's own address is told, whatever the spelling and whether or not anybody listens.
func TestIsLocal(t *testing.T) {
	own := map[string]bool{"127.0.0.1": true, "127.9.8.7": true, "::ffff:127.0.0.1": true, "::1": true, "203.0.113.7": false, "2001:db8::7": false}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if p := netip.MustParsePrefix(a.String()); !p.Addr().IsLinkLocalUnicast() { // those need a zone
			own[p.Addr().String()] = true
		}
	}
	for text, want := range own {
		a := netip.MustParseAddr(text)
		family := unix.AF_INET
		if a.Unmap().Is6() {
			family = unix.AF_INET6
		}
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := socket.IsLocal(fd, a); err != nil || got != want {
			t.Errorf("%s: %v, %v, want %v", a, got, err, want)
		}
		unix.Close(fd)
	}
	if _, err := socket.IsLocal(-1, netip.MustParseAddr("127.0.0.1")); err == nil {
		t.Error("no socket, and no error")
	}
}
