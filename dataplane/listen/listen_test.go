package listen_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/listen"
	"aether/dataplane/model"
	"aether/tproxy/netns"
	"aether/tproxy/netns/netnstest"
	"aether/tproxy/rules"
	"aether/tproxy/socket"
)

// The lower layer has the numbers a second time, because it may not import model.
func TestPortsAgree(t *testing.T) {
	for name, p := range map[string][2]int{
		"capture": {model.PortCapture, rules.PortCapture}, "proxy": {model.PortProxy, rules.PortProxy},
		"raw": {model.PortRaw, rules.PortRaw}, "mesh": {model.PortMesh, rules.PortMesh},
	} {
		if p[0] != p[1] {
			t.Errorf("%s: model says %d, rules %d", name, p[0], p[1])
		}
	}
}

func TestRoleNames(t *testing.T) {
	for r := listen.Capture; r <= listen.Mesh; r++ {
		if got, err := listen.ParseRole(r.String()); got != r || err != nil {
			t.Errorf("%v reads as %v, %v", r, got, err)
		}
	}
	for _, s := range []string{"", "role(9)", "Capture"} {
		if r, err := listen.ParseRole(s); err == nil || !strings.Contains(err.Error(), "capture") {
			t.Errorf("%q reads as %v, %v", s, r, err)
		}
	}
}

// listening is what ss says listens in ns: "*:18001 127.0.0.1:18081 ...".
func listening(t *testing.T, ns *netns.NS) string {
	t.Helper()
	var out []string
	for line := range strings.Lines(netnstest.Run(t, ns, "ss", "-Hltn")) {
		out = append(out, strings.Fields(line)[3])
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

const all = "*:18001 *:18008 127.0.0.1:18081 [::1]:18081"

func open(t *testing.T, o *listen.Owner, ns *netns.NS, container string) listen.Set {
	t.Helper()
	s, err := o.OpenPod(ns, container)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// newOwner is an owner that is closed, without complaint, at the end.
func newOwner(t *testing.T) *listen.Owner {
	o := new(listen.Owner)
	t.Cleanup(func() {
		if err := o.Close(); err != nil {
			t.Error(err)
		}
		if k := o.Keys(); len(k) != 0 {
			t.Errorf("left after Close: %v", k)
		}
	})
	return o
}

func TestOpenPod(t *testing.T) {
	o := newOwner(t)
	a, b := netnstest.New(t), netnstest.New(t)
	sa := open(t, o, a, "a")
	sb := open(t, o, b, "b")
	for _, ns := range []*netns.NS{a, b} {
		if got := listening(t, ns); got != all {
			t.Errorf("%s: listening %s, want %s", ns, got, all)
		}
	}
	if again := open(t, o, a, "a"); again != sa {
		t.Errorf("opened again: %v, was %v", again, sa)
	}
	want := "[a/capture a/proxy a/proxy6 a/mesh b/capture b/proxy b/proxy6 b/mesh]"
	if got := fmt.Sprint(o.Keys()); got != want {
		t.Errorf("keys %s, want %s", got, want)
	}
	for fd, transparent := range map[int]int{sa.Capture: 1, sa.Proxy: 0, sa.Mesh: 0} {
		if got, err := unix.GetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT); got != transparent || err != nil {
			t.Errorf("descriptor %d: transparent %d (%v), want %d", fd, got, err, transparent)
		}
	}
	// One pod goes; the other's sockets are the same ones, and alive.
	if err := o.ReleasePod("a"); err != nil {
		t.Error(err)
	}
	if got := listening(t, a); got != "" {
		t.Errorf("still listening for a released pod: %s", got)
	}
	if got := listening(t, b); got != all {
		t.Errorf("the other pod: listening %s", got)
	}
	if got := open(t, o, b, "b"); got != sb {
		t.Errorf("the other pod's sockets changed: %v, were %v", got, sb)
	}
	for range 2 { // releasing what is not there is no error
		if err := o.ReleasePod("a"); err != nil {
			t.Error(err)
		}
	}
}

func TestOpenPodWithoutIPv6(t *testing.T) {
	o := newOwner(t)
	ns := netnstest.New(t)
	netnstest.Sysctl(t, ns, "net/ipv6/conf/all/disable_ipv6", "1")
	s := open(t, o, ns, "a")
	if s.Proxy6 != -1 {
		t.Errorf("a [::1] socket without IPv6: %d", s.Proxy6)
	}
	if got, want := listening(t, ns), "0.0.0.0:18001 0.0.0.0:18008 127.0.0.1:18081"; got != want {
		t.Errorf("listening %s, want %s", got, want)
	}
}

// What a call opened is closed when it cannot open the rest; what was there
// before stays.
func TestOpenPodFails(t *testing.T) {
	o := newOwner(t)
	ns := netnstest.New(t)
	app, err := socket.Listen(ns, socket.Spec{Addr: netip.MustParseAddrPort("0.0.0.0:18008")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := o.OpenPod(ns, "a"); !errors.Is(err, unix.EADDRINUSE) ||
		!strings.Contains(err.Error(), "pod a") || !strings.Contains(err.Error(), "port 18008") {
		t.Errorf("error %v", err)
	}
	if got := listening(t, ns); got != "0.0.0.0:18008" {
		t.Errorf("listening %s, want the application alone", got)
	}
	if k := o.Keys(); len(k) != 0 {
		t.Errorf("keys %v", k)
	}
	key := listen.Key{Container: "a", Role: listen.Proxy}
	fd, _, err := o.Get(key, func() (int, error) {
		return socket.Listen(ns, socket.Spec{Addr: netip.MustParseAddrPort("127.0.0.1:18081")})
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := o.OpenPod(ns, "a"); err == nil {
		t.Error("opened over an application's port")
	}
	if got, ok := o.Export(key); !ok || got != fd {
		t.Errorf("the socket of before: %d, %v; want %d", got, ok, fd)
	}
	unix.Close(app)
	if s := open(t, o, ns, "a"); s.Proxy != fd {
		t.Errorf("proxy socket %d, want the one of before, %d", s.Proxy, fd)
	}
	if got := listening(t, ns); got != all {
		t.Errorf("listening %s", got)
	}
}

func TestOpenPodOfAGoneNamespace(t *testing.T) {
	o := newOwner(t)
	ns := netnstest.New(t)
	pin := filepath.Join(t.TempDir(), "pin")
	if err := os.Symlink(ns.Path(), pin); err != nil {
		t.Fatal(err)
	}
	n, err := netns.Open(pin)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	os.Remove(pin)
	if _, err := o.OpenPod(n, "a"); !errors.Is(err, netns.ErrGone) || !strings.Contains(err.Error(), "pod a") {
		t.Errorf("error %v, want ErrGone", err)
	}
	if got := listening(t, ns); got != "" || len(o.Keys()) != 0 {
		t.Errorf("left open: %s, %v", got, o.Keys())
	}
}

// A namespace that vanishes when all but the last socket is open: what the call
// opened is closed again.
func TestNamespaceVanishesUnderOpenPod(t *testing.T) {
	o := newOwner(t)
	ns := netnstest.New(t)
	pin := filepath.Join(t.TempDir(), "pin")
	if err := os.Symlink(ns.Path(), pin); err != nil {
		t.Fatal(err)
	}
	n, err := netns.Open(pin)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	// Somebody else is busy opening the last one, which holds OpenPod up there.
	mesh := listen.Key{Container: "a", Role: listen.Mesh}
	inside, finish := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, _, err := o.Get(mesh, func() (int, error) {
			close(inside)
			<-finish
			return socket.Listen(ns, socket.Spec{Addr: netip.MustParseAddrPort("[::]:18008"), DualStack: true})
		}); err != nil {
			t.Error(err)
		}
	})
	<-inside
	result := make(chan error, 1)
	go func() {
		_, err := o.OpenPod(n, "a")
		result <- err
	}()
	for end := time.Now().Add(20 * time.Second); ; runtime.Gosched() {
		if _, ok := o.Export(listen.Key{Container: "a", Role: listen.Proxy6}); ok {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the first sockets were never opened")
		}
	}
	os.Remove(pin)
	close(finish)
	wg.Wait()
	if err := <-result; !errors.Is(err, netns.ErrGone) {
		t.Errorf("error %v, want ErrGone", err)
	}
	if got := listening(t, ns); got != "*:18008" {
		t.Errorf("listening %s, want only what another call opened", got)
	}
}

// A hand-over: the next process inherits each socket, the old one closes its
// own, and a connection that waited in between is accepted by the next.
func TestHandOver(t *testing.T) {
	ns := netnstest.New(t)
	old, next := new(listen.Owner), newOwner(t)
	open(t, old, ns, "a")
	conn := connect(t, ns, "127.0.0.1:18081")
	defer unix.Close(conn)
	for _, k := range old.Keys() {
		fd, ok := old.Export(k)
		if !ok {
			t.Fatalf("no socket %s", k)
		}
		dup, err := unix.Dup(fd) // not close-on-exec, as if it had come over a Unix socket
		if err != nil {
			t.Fatal(err)
		}
		if err := next.Inherit(k, dup); err != nil {
			t.Fatal(err)
		}
		got, inherited, err := next.Get(k, func() (int, error) { t.Errorf("%s opened", k); return -1, errors.New("opened") })
		if got != dup || !inherited || err != nil {
			t.Errorf("%s: %d, inherited %v, %v; want %d", k, got, inherited, err, dup)
		}
		if fl, err := unix.FcntlInt(uintptr(dup), unix.F_GETFD, 0); err != nil || fl&unix.FD_CLOEXEC == 0 {
			t.Errorf("%s: not close-on-exec", k)
		}
	}
	if err := old.Close(); err != nil {
		t.Error(err)
	}
	if got := listening(t, ns); got != all {
		t.Errorf("listening %s", got)
	}
	s := open(t, next, ns, "a")
	p := []unix.PollFd{{Fd: int32(s.Proxy), Events: unix.POLLIN}}
	if n, err := unix.Poll(p, 10_000); n != 1 || err != nil {
		t.Fatalf("no connection waits: %d, %v", n, err)
	}
	fd, _, err := unix.Accept(s.Proxy)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
}

// connect makes a blocking connection from ns.
func connect(t *testing.T, ns *netns.NS, addr string) int {
	t.Helper()
	ap := netip.MustParseAddrPort(addr)
	fd := -1
	netnstest.Do(t, ns, func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Connect(fd, &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()})
	})
	return fd
}

func TestInheritErrors(t *testing.T) {
	o := newOwner(t)
	ns := netnstest.New(t)
	fresh := func(listening bool) int {
		var fd int
		netnstest.Do(t, ns, func() (err error) { fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0); return err })
		if listening {
			if err := unix.Listen(fd, 1); err != nil {
				t.Fatal(err)
			}
		}
		return fd
	}
	key := listen.Key{Container: "a", Role: listen.Mesh}
	first := fresh(true)
	if err := o.Inherit(key, first); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		key  listen.Key
		fd   int
		want string
	}{
		{key, fresh(true), "one already"},
		{listen.Key{Container: "b", Role: listen.Mesh}, fresh(false), "not listening"},
		{listen.Key{Container: "b"}, fresh(true), "unknown role"},
	} {
		err := o.Inherit(tt.key, tt.fd)
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), tt.key.String()) {
			t.Errorf("%s: %v, want %q", tt.key, err, tt.want)
		}
		if _, err := unix.FcntlInt(uintptr(tt.fd), unix.F_GETFD, 0); !errors.Is(err, unix.EBADF) {
			t.Errorf("%s: the refused descriptor is still open", tt.key)
		}
	}
	if err := o.Inherit(listen.Key{Container: "c", Role: listen.Mesh}, -1); !errors.Is(err, unix.EBADF) {
		t.Errorf("descriptor -1: %v", err)
	}
	if got, ok := o.Export(key); !ok || got != first || len(o.Keys()) != 1 {
		t.Errorf("the first socket: %d, %v; keys %v", got, ok, o.Keys())
	}
}

// A container ID should never come back in another namespace; if it does, the
// old socket would take another pod's connections.
func TestInheritedSocketOfAnotherNamespaceIsReplaced(t *testing.T) {
	o := newOwner(t)
	before, now := netnstest.New(t), netnstest.New(t)
	fd, err := socket.Listen(before, socket.Spec{Addr: netip.MustParseAddrPort("127.0.0.1:18081")})
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Inherit(listen.Key{Container: "a", Role: listen.Proxy}, fd); err != nil {
		t.Fatal(err)
	}
	open(t, o, now, "a")
	if got := listening(t, before); got != "" {
		t.Errorf("still listening in the old namespace: %s", got)
	}
	if got := listening(t, now); got != all {
		t.Errorf("listening %s", got)
	}
}

func TestGetOpensOnce(t *testing.T) {
	o := newOwner(t)
	ns := netnstest.New(t)
	key := listen.Key{Container: "a", Role: listen.Capture}
	failed := errors.New("not now")
	if fd, _, err := o.Get(key, func() (int, error) { return -1, failed }); fd != -1 || err != failed {
		t.Errorf("%d, %v; want open's error", fd, err)
	}
	if _, ok := o.Export(key); ok || len(o.Keys()) != 0 {
		t.Error("a failed open left something")
	}
	var opens atomic.Int32
	var fds sync.Map
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			fd, inherited, err := o.Get(key, func() (int, error) {
				opens.Add(1)
				return socket.Listen(ns, socket.Spec{Addr: netip.MustParseAddrPort("[::]:18001"), DualStack: true})
			})
			if inherited || err != nil {
				t.Error(inherited, err)
			}
			fds.Store(fd, true)
		})
	}
	wg.Wait()
	n := 0
	fds.Range(func(any, any) bool { n++; return true })
	if opens.Load() != 1 || n != 1 {
		t.Errorf("opened %d times, %d different sockets; want one", opens.Load(), n)
	}
}

// While one key's socket is being opened, other keys are served; a release of
// the key waits and then closes.
func TestOneKeyHoldsUpNoOther(t *testing.T) {
	o := newOwner(t)
	ns := netnstest.New(t)
	slow := listen.Key{Container: "slow", Role: listen.Proxy}
	inside, finish := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, _, err := o.Get(slow, func() (int, error) {
			close(inside)
			<-finish
			return socket.Listen(ns, socket.Spec{Addr: netip.MustParseAddrPort("127.0.0.1:0")})
		}); err != nil {
			t.Error(err)
		}
	})
	<-inside
	open(t, o, ns, "quick")
	if err := o.ReleasePod("quick"); err != nil {
		t.Error(err)
	}
	released := make(chan error, 1)
	go func() { released <- o.Release(slow) }()
	close(finish)
	wg.Wait()
	select {
	case err := <-released:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Release never returned")
	}
	// Whether the release came before the open or waited for it, there is no half-open key.
	if err := o.Release(slow); err != nil {
		t.Error(err)
	}
	if k := o.Keys(); len(k) != 0 {
		t.Errorf("keys %v", k)
	}
}

// Opening and releasing from many sides keeps the map and the descriptors
// together: in the end nothing is open.
func TestChurn(t *testing.T) {
	o := newOwner(t)
	spaces := []*netns.NS{netnstest.New(t), netnstest.New(t)}
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			ns, id := spaces[i%2], fmt.Sprint("pod", i%2)
			for range 15 {
				if _, err := o.OpenPod(ns, id); err != nil && !errors.Is(err, unix.EADDRINUSE) {
					t.Error(err)
				}
				o.Keys()
				if err := o.ReleasePod(id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, ns := range spaces {
		if got := listening(t, ns); got != "" {
			t.Errorf("left: %s", got)
		}
	}
}
