// Package netnstest makes network namespaces for tests, and wires them.
//
//   - A namespace has no name and no mount: an open descriptor is all that holds
//     it, so it is gone with the test, and with the process even after a crash.
//   - Addresses work at once: no duplicate address detection, no waiting.
//   - Whatever fails, fails the test.
//
// It needs root. It knows nothing of proxies or rules.
package netnstest

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"aether/tproxy/netns"
)

// New makes a namespace with its loopback interface up. Its path is valid in
// every process of the machine's root until the test ends.
func New(t testing.TB) *netns.NS {
	t.Helper()
	var f *os.File
	var unshare func() error
	unshare = func() error {
		done := make(chan error, 1)
		go func() {
			runtime.LockOSThread()
			if unix.Gettid() == os.Getpid() { // the first thread cannot end: while it is held here, another is taken
				defer runtime.UnlockOSThread()
				done <- unshare()
				return
			}
			err := unix.Unshare(unix.CLONE_NEWNET) // never unlocked: the thread ends with the goroutine
			if err == nil {
				f, err = os.Open("/proc/thread-self/ns/net")
			}
			done <- err
		}()
		return <-done
	}
	if err := unshare(); err != nil {
		t.Fatalf("netnstest: make a namespace (this test needs root): %v", err)
	}
	ns, err := netns.Open(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd()))
	if err != nil {
		f.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ns.Close()
		f.Close()
	})
	Do(t, ns, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	return ns
}

// Address gives ns's loopback interface one more address, which others need not reach: "10.1.0.1/32".
func Address(t testing.TB, ns *netns.NS, prefix string) {
	t.Helper()
	Do(t, ns, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(prefix)
		if err != nil {
			return err
		}
		if a.IP.To4() == nil {
			a.Flags = unix.IFA_F_NODAD
		}
		return netlink.AddrAdd(lo, a)
	})
}

// Do runs fn in ns as netns.Do does. fn must not call t.Fatal.
func Do(t testing.TB, ns *netns.NS, fn func() error) {
	t.Helper()
	if err := netns.Do(ns, fn); err != nil {
		t.Fatalf("in %s: %v", ns, err)
	}
}

// Run runs a command in ns and returns what it printed on standard output.
func Run(t testing.TB, ns *netns.NS, name string, args ...string) string {
	t.Helper()
	var out, errOut strings.Builder
	err := netns.Do(ns, func() error {
		// The child is forked by this thread and so starts in its namespace.
		c := exec.Command(name, args...)
		c.Stdout, c.Stderr = &out, &errOut
		return c.Run()
	})
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, errOut.String())
	}
	return out.String()
}

// Sysctl writes a setting of ns: Sysctl(t, ns, "net/ipv4/ip_forward", "1").
func Sysctl(t testing.TB, ns *netns.NS, name, value string) {
	t.Helper()
	Do(t, ns, func() error { return os.WriteFile("/proc/sys/"+name, []byte(value), 0o644) })
}

// End is one end of a Veth.
type End struct {
	NS    *netns.NS
	Name  string         // of the interface: "eth0"
	Addrs []netip.Prefix // its addresses, both families
}

// Veth joins two namespaces with a pair of interfaces that are up, addressed and
// settled: nothing about them changes later by itself.
func Veth(t testing.TB, a, b End) {
	t.Helper()
	Do(t, a.NS, func() error {
		// The peer is made straight in its own namespace, so that names never clash.
		peer, err := os.Open(b.NS.Path())
		if err != nil {
			return err
		}
		defer peer.Close()
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs:     netlink.LinkAttrs{Name: a.Name},
			PeerName:      b.Name,
			PeerNamespace: netlink.NsFd(peer.Fd()),
		})
	})
	for _, e := range []End{a, b} {
		Do(t, e.NS, func() error {
			// No link-local address by itself, some time after the link is up.
			err := os.WriteFile("/proc/sys/net/ipv6/conf/"+e.Name+"/addr_gen_mode", []byte("1"), 0o644)
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			return err
		})
	}
	for i, e := range []End{a, b} {
		linkLocal := netip.AddrFrom16([16]byte{0xfe, 0x80, 15: byte(i + 1)})
		Addrs(t, e.NS, e.Name, append([]netip.Prefix{netip.PrefixFrom(linkLocal, 64)}, e.Addrs...)...)
	}
	for _, e := range []End{a, b} {
		Do(t, e.NS, func() error {
			for end := time.Now().Add(10 * time.Second); time.Now().Before(end); runtime.Gosched() {
				l, err := netlink.LinkByName(e.Name)
				if err != nil {
					return err
				}
				if l.Attrs().OperState == netlink.OperUp {
					return nil
				}
			}
			return fmt.Errorf("%s is not up", e.Name)
		})
	}
}

// Addrs brings an interface up and adds addresses to it. IPv6 ones are left out
// where the namespace has no IPv6.
func Addrs(t testing.TB, ns *netns.NS, name string, addrs ...netip.Prefix) {
	t.Helper()
	Do(t, ns, func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(l); err != nil {
			return err
		}
		for _, p := range addrs {
			a := &netlink.Addr{IPNet: ipNet(p)}
			if p.Addr().Is6() {
				if !netns.HasIPv6() {
					continue
				}
				a.Flags = unix.IFA_F_NODAD
			}
			if err := netlink.AddrAdd(l, a); err != nil {
				return fmt.Errorf("address %s on %s: %w", p, name, err)
			}
		}
		return nil
	})
}

// Route adds a route by way of a gateway.
func Route(t testing.TB, ns *netns.NS, dst netip.Prefix, via netip.Addr) {
	t.Helper()
	Do(t, ns, func() error {
		if dst.Addr().Is6() && !netns.HasIPv6() {
			return nil
		}
		err := netlink.RouteAdd(&netlink.Route{Dst: ipNet(dst), Gw: net.IP(via.AsSlice())})
		if err != nil {
			return fmt.Errorf("route %s via %s: %w", dst, via, err)
		}
		return nil
	})
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// Node is a stand-in for everything outside the pods: each pod has a link to it,
// and default routes by it.
type Node struct {
	NS   *netns.NS
	pods int
}

// Pod is a namespace with eth0, an address of each family, and default routes.
type Pod struct {
	NS *netns.NS
	IP netip.Addr // 10.1.N.10
	// IP6 is fd00:1:N::10. It is not there when the pod was made without IPv6.
	IP6 netip.Addr
	// GW and GW6 are the node's end of the link: 10.1.N.1, fd00:1:N::1.
	GW, GW6 netip.Addr
}

// NewNode makes a node that forwards, and owns the addresses given (of services,
// of the outside world) on its loopback interface.
func NewNode(t testing.TB, owns ...netip.Addr) *Node {
	t.Helper()
	n := &Node{NS: New(t)}
	Sysctl(t, n.NS, "net/ipv4/ip_forward", "1")
	Sysctl(t, n.NS, "net/ipv6/conf/all/forwarding", "1")
	for _, a := range owns {
		Addrs(t, n.NS, "lo", netip.PrefixFrom(a, a.BitLen()))
	}
	return n
}

// Pod adds a pod to the node. At most 250 to a node.
func (n *Node) Pod(t testing.TB) *Pod {
	t.Helper()
	return n.add(t, New(t))
}

// PodWithoutIPv6 adds a pod in whose namespace IPv6 is disabled by sysctl.
func (n *Node) PodWithoutIPv6(t testing.TB) *Pod {
	t.Helper()
	ns := New(t)
	Sysctl(t, ns, "net/ipv6/conf/all/disable_ipv6", "1")
	Sysctl(t, ns, "net/ipv6/conf/default/disable_ipv6", "1")
	return n.add(t, ns)
}

func (n *Node) add(t testing.TB, ns *netns.NS) *Pod {
	t.Helper()
	n.pods++
	if n.pods > 250 {
		t.Fatal("netnstest: more than 250 pods on a node")
	}
	k := byte(n.pods)
	v6 := func(last byte) netip.Addr {
		return netip.AddrFrom16([16]byte{0xfd, 0, 0, 1, 0, k, 15: last})
	}
	p := &Pod{
		NS: ns, IP: netip.AddrFrom4([4]byte{10, 1, k, 10}), IP6: v6(0x10),
		GW: netip.AddrFrom4([4]byte{10, 1, k, 1}), GW6: v6(1),
	}
	Veth(t,
		End{n.NS, fmt.Sprintf("pod%d", n.pods), []netip.Prefix{netip.PrefixFrom(p.GW, 24), netip.PrefixFrom(p.GW6, 64)}},
		End{ns, "eth0", []netip.Prefix{netip.PrefixFrom(p.IP, 24), netip.PrefixFrom(p.IP6, 64)}})
	Route(t, ns, netip.MustParsePrefix("0.0.0.0/0"), p.GW)
	Route(t, ns, netip.MustParsePrefix("::/0"), p.GW6)
	if err := netns.Do(ns, func() error {
		if !netns.HasIPv6() {
			return errNoIPv6
		}
		return nil
	}); errors.Is(err, errNoIPv6) {
		p.IP6 = netip.Addr{}
	} else if err != nil {
		t.Fatal(err)
	}
	return p
}

var errNoIPv6 = errors.New("no IPv6")
