package apply_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
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

// patience bounds every wait of these tests; nothing should take nearly as long.
const patience = 20 * time.Second

// Addresses that belong to the node, and stand for services and the world.
var (
	service  = netip.MustParseAddr("10.96.0.10")
	service6 = netip.MustParseAddr("fd00:96::10")
	world    = netip.MustParseAddr("192.0.2.7")
	world6   = netip.MustParseAddr("2001:db8::7")
)

// rig is a pod, a node that owns the addresses above, and what each connection
// of the pod met.
type rig struct {
	t    *testing.T
	node *netnstest.Node
	pod  *netnstest.Pod
	pool *socket.Pool
}

func newRig(t *testing.T) *rig {
	node := netnstest.NewNode(t, service, service6, world, world6)
	r := &rig{t: t, node: node, pod: node.Pod(t)}
	f := socket.NewFactory()
	t.Cleanup(func() { f.Close() })
	r.pool = f.Open(r.pod.NS)
	return r
}

func (r *rig) apply(rs rules.Ruleset) {
	r.t.Helper()
	if err := apply.Apply(r.pod.NS, rs); err != nil {
		r.t.Fatal(err)
	}
}

// serve answers every connection at addr with "who LOCAL", LOCAL being the
// address that the client dialled, and then echoes.
func (r *rig) serve(ns *netns.NS, who, addr string, transparent bool) {
	r.t.Helper()
	var ln net.Listener
	var err error
	if transparent {
		var fd int
		if fd, err = socket.Listen(ns, socket.Spec{Addr: netip.MustParseAddrPort(addr), DualStack: true, Transparent: true}); err == nil {
			f := os.NewFile(uintptr(fd), addr)
			ln, err = net.FileListener(f)
			f.Close()
		}
	} else { // an application: capture leaves alone what socket.Listen makes
		err = netns.Do(ns, func() (err error) {
			ln, err = net.Listen("tcp", addr)
			return err
		})
	}
	if err != nil {
		r.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(patience))
				a := c.LocalAddr().(*net.TCPAddr).AddrPort()
				fmt.Fprintf(c, "%s %s\n", who, netip.AddrPortFrom(a.Addr().Unmap(), a.Port()))
				s := bufio.NewScanner(c)
				for s.Scan() {
					fmt.Fprintln(c, s.Text())
				}
			})
		}
	})
	r.t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
}

// capture serves the pod's capture port.
func (r *rig) capture() { r.t.Helper(); r.serve(r.pod.NS, "captured", "[::]:18001", true) }

// world serves a port of every address of the node.
func (r *rig) world(port uint16) {
	r.t.Helper()
	r.serve(r.node.NS, "direct", fmt.Sprintf("[::]:%d", port), false)
}

// dial connects to addr from ns and returns the connection and the line it is
// greeted with. mark is set on the socket unless it is 0.
func dial(ns *netns.NS, addr netip.AddrPort, mark int) (net.Conn, string, error) {
	d := net.Dialer{Timeout: patience}
	if mark != 0 {
		d.Control = controlMark(mark)
	}
	var c net.Conn
	err := netns.Do(ns, func() (err error) {
		c, err = d.Dial("tcp", addr.String()) // a literal address: the socket is made on this thread
		return err
	})
	if err != nil {
		return nil, "", err
	}
	line, err := talk(c, "")
	if err != nil {
		c.Close()
		return nil, "", err
	}
	return c, line, nil
}

// talk sends a line, unless it is empty, and reads one.
func talk(c net.Conn, say string) (string, error) {
	c.SetDeadline(time.Now().Add(patience))
	if say != "" {
		if _, err := fmt.Fprintln(c, say); err != nil {
			return "", err
		}
	}
	line, err := bufio.NewReaderSize(c, 256).ReadString('\n')
	return strings.TrimSpace(line), err
}

// meets is what a connection from the pod to addr meets: "captured ADDR", "direct
// ADDR", or the error's name.
func (r *rig) meets(addr string) string { return r.meetsWith(addr, 0) }

func (r *rig) meetsWith(addr string, mark int) string {
	c, line, err := dial(r.pod.NS, netip.MustParseAddrPort(addr), mark)
	if err != nil {
		var errno unix.Errno
		if errors.As(err, &errno) {
			return unix.ErrnoName(errno)
		}
		return err.Error()
	}
	c.Close()
	return line
}

func (r *rig) expect(want map[string]string) {
	r.t.Helper()
	for addr, w := range want {
		if got := r.meets(addr); got != w {
			r.t.Errorf("%s met %q, want %q", addr, got, w)
		}
	}
}

func table(t testing.TB, ns *netns.NS) string {
	return netnstest.Run(t, ns, "nft", "list", "table", "inet", "aether_capture")
}

// state is everything about ns that Apply could change.
func state(t testing.TB, ns *netns.NS) string {
	var b strings.Builder
	for _, c := range [][]string{
		{"nft", "list", "ruleset"}, {"ip", "rule"}, {"ip", "-6", "rule"},
		{"ip", "route", "show", "table", "all"}, {"ip", "-6", "route", "show", "table", "all"},
	} {
		fmt.Fprintf(&b, "# %s\n%s", strings.Join(c, " "), netnstest.Run(t, ns, c[0], c[1:]...))
	}
	return b.String()
}

func parse(t testing.TB, ports, ranges string, all bool) rules.Config {
	c, ps := rules.ParseAnnotations(map[string]string{
		rules.AnnotationExcludePorts: ports, rules.AnnotationExcludeRanges: ranges}, all)
	if len(ps) > 0 {
		t.Fatal(ps)
	}
	return c
}

// What is in the kernel is what contract 3.5 says, in nft's own words; the words
// are the golden files of package rules.
func TestKernelHasTheGoldenRules(t *testing.T) {
	for name, c := range map[string]rules.Config{
		"redirect-all": {RedirectAll: true},
		"scoped":       {},
		"exclusions": parse(t, "443,5432",
			"10.96.0.0/12,192.0.2.0/24,192.0.2.7,2001:db8::/33,2001:db8:1::/48,2001:db8::7", true),
	} {
		t.Run(name, func(t *testing.T) {
			ns := netnstest.New(t)
			if err := apply.Apply(ns, c.Ruleset()); err != nil {
				t.Fatal(err)
			}
			want, err := os.ReadFile(filepath.Join("..", "rules", "testdata", name+".nft"))
			if err != nil {
				t.Fatal(err)
			}
			if got := table(t, ns); got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			for args, want := range map[string]string{
				"-details rule":           "from all fwmark 0xae71 lookup 100",
				"-details -6 rule":        "from all fwmark 0xae71 lookup 100",
				"route show table 100":    "local default dev lo scope host",
				"-6 route show table 100": "local default dev lo metric 1024 pref medium",
			} {
				got := netnstest.Run(t, ns, "ip", strings.Fields(args)...)
				if !strings.Contains(got, want) || strings.Contains(got, "suppress_prefixlength") {
					t.Errorf("ip %s: %q is not in\n%s", args, want, got)
				}
			}
		})
	}
}

// Each prefix length is a different load, mask and comparison in the kernel.
func TestEveryPrefixLengthPrintsAsItself(t *testing.T) {
	c := rules.Config{RedirectAll: true}
	for n := range 33 {
		c.ExcludeRanges = append(c.ExcludeRanges, netip.PrefixFrom(netip.MustParseAddr("203.0.113.219"), n))
	}
	for n := range 129 {
		c.ExcludeRanges = append(c.ExcludeRanges, netip.PrefixFrom(netip.MustParseAddr("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"), n))
	}
	ns := netnstest.New(t)
	if err := apply.Apply(ns, c.Ruleset()); err != nil {
		t.Fatal(err)
	}
	if got, want := table(t, ns), c.Ruleset().String(); got != want {
		t.Errorf("nft prints\n%s\nthe value prints\n%s", got, want)
	}
}

func TestTheMostExclusions(t *testing.T) {
	c := rules.Config{RedirectAll: true}
	for i := range rules.MaxExclusions {
		c.ExcludePorts = append(c.ExcludePorts, uint16(20000+i))
		c.ExcludeRanges = append(c.ExcludeRanges, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 32))
	}
	ns := netnstest.New(t)
	for range 2 {
		if err := apply.Apply(ns, c.Ruleset()); err != nil {
			t.Fatal(err)
		}
	}
	if got := table(t, ns); got != c.Ruleset().String() {
		t.Errorf("%d lines in the kernel, want %d", strings.Count(got, "\n"), strings.Count(c.Ruleset().String(), "\n"))
	}
}

func TestRedirectAll(t *testing.T) {
	r := newRig(t)
	r.capture()
	r.world(80)
	r.expect(map[string]string{"10.96.0.10:80": "direct 10.96.0.10:80", "[fd00:96::10]:80": "direct [fd00:96::10]:80"})
	r.apply(rules.Config{RedirectAll: true}.Ruleset())
	r.expect(map[string]string{
		"10.96.0.10:80":      "captured 10.96.0.10:80",
		"[fd00:96::10]:80":   "captured [fd00:96::10]:80",
		"192.0.2.7:80":       "captured 192.0.2.7:80",
		"203.0.113.1:9":      "captured 203.0.113.1:9", // nobody has it: the dial never leaves the pod
		"[2001:db8::99]:443": "captured [2001:db8::99]:443",
		"10.96.0.10:18081":   "captured 10.96.0.10:18081",
		"10.96.0.10:18082":   "captured 10.96.0.10:18082",
		// A pod that calls itself by its own address is captured, once.
		r.pod.IP.String() + ":80":           "captured " + r.pod.IP.String() + ":80",
		"[" + r.pod.IP6.String() + "]:8080": "captured [" + r.pod.IP6.String() + "]:8080",
	})
}

func TestScoped(t *testing.T) {
	r := newRig(t)
	r.capture()
	for _, p := range []uint16{80, 18081, 18082} {
		r.world(p)
	}
	r.apply(rules.Config{}.Ruleset())
	r.expect(map[string]string{
		"10.96.0.10:80":       "direct 10.96.0.10:80",
		"[fd00:96::10]:80":    "direct [fd00:96::10]:80",
		"10.96.0.10:18081":    "captured 10.96.0.10:18081",
		"[fd00:96::10]:18081": "captured [fd00:96::10]:18081",
		"10.96.0.10:18082":    "captured 10.96.0.10:18082",
		"[fd00:96::10]:18082": "captured [fd00:96::10]:18082",
	})
}

func TestExclusions(t *testing.T) {
	r := newRig(t)
	r.capture()
	for _, p := range []uint16{53, 80, 5432} {
		r.world(p)
	}
	r.apply(parse(t, "5432", "192.0.2.0/25,2001:db8::/33", true).Ruleset())
	r.expect(map[string]string{
		"10.96.0.10:80":      "captured 10.96.0.10:80",
		"[fd00:96::10]:80":   "captured [fd00:96::10]:80",
		"10.96.0.10:5432":    "direct 10.96.0.10:5432",
		"[fd00:96::10]:5432": "direct [fd00:96::10]:5432",
		"192.0.2.7:80":       "direct 192.0.2.7:80",
		"[2001:db8::7]:80":   "direct [2001:db8::7]:80",
		"192.0.2.128:80":     "captured 192.0.2.128:80", // the first address past the range
		"10.96.0.10:53":      "direct 10.96.0.10:53",    // DNS never is
		"[fd00:96::10]:53":   "direct [fd00:96::10]:53",
	})
}

// Fact (a): the reply rule keeps connections into the pod alive.
func TestReplyRuleKeepsInboundAlive(t *testing.T) {
	for _, tt := range []struct {
		name   string
		mutate func(rules.Ruleset) rules.Ruleset
		alive  bool
	}{
		{"as it is", func(rs rules.Ruleset) rules.Ruleset { return rs }, true},
		{"without the rule", func(rs rules.Ruleset) rules.Ruleset {
			out := rs.Chains[0]
			out.Rules = slices.DeleteFunc(slices.Clone(out.Rules), func(r rules.Rule) bool { return r.String() == "ct direction reply accept" })
			rs.Chains = []rules.Chain{out, rs.Chains[1]}
			return rs
		}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			r.capture()
			r.serve(r.pod.NS, "app", "[::]:8080", false)
			r.apply(tt.mutate(rules.Config{RedirectAll: true}.Ruleset()))
			for _, ip := range []netip.Addr{r.pod.IP, r.pod.IP6} {
				addr := netip.AddrPortFrom(ip, 8080)
				c, line, err := dialShort(r.node.NS, addr, tt.alive)
				switch {
				case tt.alive && (err != nil || line != "app "+addr.String()):
					t.Errorf("%s: %q, %v", addr, line, err)
				case !tt.alive && err == nil:
					t.Errorf("%s: an inbound connection lives without the reply rule: %q", addr, line)
				}
				if c != nil {
					if got, err := talk(c, "hello"); got != "hello" || err != nil {
						t.Errorf("%s: echo %q, %v", addr, got, err)
					}
					c.Close()
				}
			}
		})
	}
}

// dialShort is dial, but gives up soon where no answer is the answer wanted.
func dialShort(ns *netns.NS, addr netip.AddrPort, patient bool) (net.Conn, string, error) {
	if patient {
		return dial(ns, addr, 0)
	}
	d := net.Dialer{Timeout: 300 * time.Millisecond}
	var c net.Conn
	if err := netns.Do(ns, func() (err error) { c, err = d.Dial("tcp", addr.String()); return err }); err != nil {
		return nil, "", err
	}
	line, err := talk(c, "")
	if err != nil {
		c.Close()
		return nil, "", err
	}
	return c, line, nil
}

// Fact (b): loopback is never captured.
func TestLoopbackIsNeverCaptured(t *testing.T) {
	r := newRig(t)
	r.capture()
	r.serve(r.pod.NS, "app", "127.0.0.1:8080", false)
	r.serve(r.pod.NS, "app", "127.9.8.7:8080", false)
	r.serve(r.pod.NS, "app", "[::1]:8080", false)
	r.serve(r.pod.NS, "app", "127.0.0.1:18081", false)
	r.apply(rules.Config{RedirectAll: true}.Ruleset())
	r.expect(map[string]string{
		"127.0.0.1:8080":  "app 127.0.0.1:8080",
		"127.9.8.7:8080":  "app 127.9.8.7:8080",
		"[::1]:8080":      "app [::1]:8080",
		"127.0.0.1:18081": "app 127.0.0.1:18081",
		"127.0.0.1:81":    "ECONNREFUSED",
		"[::1]:81":        "ECONNREFUSED",
	})
}

// Fact (c): what the proxy dials is not captured again, and nothing else about
// the mark matters.
func TestBypassMark(t *testing.T) {
	r := newRig(t)
	r.capture()
	r.world(80)
	r.apply(rules.Config{RedirectAll: true}.Ruleset())
	for _, a := range []string{"10.96.0.10:80", "[fd00:96::10]:80"} {
		if got := r.meetsWith(a, rules.MarkBypass); got != "direct "+a {
			t.Errorf("%s with the bypass mark met %q", a, got)
		}
		if got := r.meetsWith(a, 0x4000); got != "captured "+a {
			t.Errorf("%s with a mark of somebody else's met %q", a, got)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		addr := netip.MustParseAddrPort(a)
		fd, err := r.pool.Wait(ctx, addr.Addr().Is6())
		if err != nil {
			t.Fatal(err)
		}
		c, err := socket.Connect(ctx, fd, addr)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := talk(c, ""); got != "direct "+a || err != nil {
			t.Errorf("%s by a socket of the factory met %q, %v", a, got, err)
		}
		if got, want := c.LocalAddr().(*net.TCPAddr).AddrPort().Addr(), r.pod.IP; addr.Addr().Is4() && got != want {
			t.Errorf("the dial came from %s, want the pod's %s", got, want)
		}
		c.Close()
	}
}

// While nobody listens on the capture port a captured dial waits: it reaches
// nothing, least of all what serves the same port in the pod itself, and its
// retried SYN meets the proxy once that listens.
func TestNobodyListens(t *testing.T) {
	for _, tt := range []struct {
		name   string
		mutate func(rules.Ruleset) rules.Ruleset
		leaks  bool // to the pod's own application
	}{
		{"as it is", func(rs rules.Ruleset) rules.Ruleset { return rs }, false},
		{"without the rule", func(rs rules.Ruleset) rules.Ruleset {
			divert := rs.Chains[1]
			divert.Rules = divert.Rules[:len(divert.Rules)-1]
			rs.Chains = []rules.Chain{rs.Chains[0], divert}
			return rs
		}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			app := r.listen("[::]:8080", false)
			r.apply(tt.mutate(rules.Config{RedirectAll: true}.Ruleset()))
			v4, v6 := r.start(netip.AddrPortFrom(service, 8080)), r.start(netip.AddrPortFrom(service6, 8080))
			fds := []unix.PollFd{{Fd: int32(app), Events: unix.POLLIN},
				{Fd: int32(v4), Events: unix.POLLOUT}, {Fd: int32(v6), Events: unix.POLLOUT}}
			// Two SYNs of each family have gone unanswered, or something happened before.
			happened := false
			for end := time.Now().Add(patience); !happened && (retried(t, v4) == 0 || retried(t, v6) == 0); {
				if time.Now().After(end) {
					t.Fatal("no SYN was sent again")
				}
				happened = poll(t, fds, 20*time.Millisecond)
			}
			if tt.leaks {
				if fds[0].Revents&unix.POLLIN == 0 {
					t.Error("the application was not reached: the rule that this test is about does nothing")
				}
				return
			}
			if happened {
				t.Fatalf("application, IPv4 dial, IPv6 dial: events %#x %#x %#x; want none",
					fds[0].Revents, fds[1].Revents, fds[2].Revents)
			}
			ln := r.listen("[::]:18001", true)
			want := map[string]bool{"10.96.0.10:8080": true, "[fd00:96::10]:8080": true}
			for range 2 {
				fds := []unix.PollFd{{Fd: int32(ln), Events: unix.POLLIN}, {Fd: int32(app), Events: unix.POLLIN}}
				if !poll(t, fds, patience) || fds[1].Revents != 0 {
					t.Fatalf("proxy, application: events %#x %#x; want one for the proxy", fds[0].Revents, fds[1].Revents)
				}
				fd, _, err := unix.Accept4(ln, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
				if err != nil {
					t.Fatal(err)
				}
				defer unix.Close(fd)
				dst, err := socket.OrigDst(fd)
				if err != nil || !want[dst.String()] {
					t.Errorf("the proxy was given a dial to %s (%v), want one each of %v", dst, err, want)
				}
				delete(want, dst.String())
			}
			for _, fd := range []int{v4, v6} {
				if !poll(t, []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, patience) {
					t.Error("a dial that the proxy accepted is not connected")
				}
				if n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); n != 0 || err != nil {
					t.Errorf("a dial ended with %v, %v", unix.Errno(n), err)
				}
			}
		})
	}
}

// listen makes a listener in the pod that the test accepts from itself.
func (r *rig) listen(addr string, transparent bool) int {
	r.t.Helper()
	fd, err := socket.Listen(r.pod.NS, socket.Spec{Addr: netip.MustParseAddrPort(addr), DualStack: true, Transparent: transparent})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// start begins to dial addr from the pod, as an application does, and does not wait.
func (r *rig) start(addr netip.AddrPort) int {
	r.t.Helper()
	family := unix.AF_INET
	if addr.Addr().Is6() {
		family = unix.AF_INET6
	}
	var fd int
	netnstest.Do(r.t, r.pod.NS, func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	})
	r.t.Cleanup(func() { unix.Close(fd) })
	if err := socket.StartConnect(fd, addr); err != nil {
		r.t.Fatal(err)
	}
	return fd
}

// poll waits for an event, at most for d, and reports whether there was one.
func poll(t *testing.T, fds []unix.PollFd, d time.Duration) bool {
	t.Helper()
	for {
		n, err := unix.Poll(fds, int(d/time.Millisecond))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		return n > 0
	}
}

// retried is how often the kernel has sent the SYN of fd again.
func retried(t *testing.T, fd int) uint32 {
	t.Helper()
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		t.Fatal(err)
	}
	return info.Total_retrans
}

func TestTwiceIsOnce(t *testing.T) {
	ns := netnstest.New(t)
	rs := rules.Config{RedirectAll: true}.Ruleset()
	var once string
	for i := range 3 {
		if err := apply.Apply(ns, rs); err != nil {
			t.Fatal(err)
		}
		if got := state(t, ns); i == 0 {
			once = got
		} else if got != once {
			t.Fatalf("after %d times\n%s\nafter one\n%s", i+1, got, once)
		}
	}
	// A second rule, as two writers at once leave behind, goes.
	netnstest.Run(t, ns, "ip", "rule", "add", "pref", "77", "fwmark", "0xae71", "lookup", "100")
	if err := apply.Apply(ns, rs); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(netnstest.Run(t, ns, "ip", "rule"), "0xae71"); n != 1 {
		t.Errorf("%d divert rules, want 1", n)
	}
}

// A table that an older version left, with other chains, is replaced whole.
func TestForeignChainsInOurTable(t *testing.T) {
	ns := netnstest.New(t)
	for _, text := range []string{
		"add table inet aether_capture; add chain inet aether_capture old { type filter hook input priority 0; policy drop; }",
		"add table inet aether_capture; add chain inet aether_capture output { type route hook output priority 10; }; add chain inet aether_capture divert { type filter hook prerouting priority mangle; }",
	} {
		netnstest.Run(t, ns, "nft", text)
		rs := rules.Config{}.Ruleset()
		if err := apply.Apply(ns, rs); err != nil {
			t.Fatal(err)
		}
		if got := table(t, ns); got != rs.String() {
			t.Errorf("got\n%s\nwant\n%s", got, rs)
		}
		if err := apply.Remove(ns); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRemoveRestores(t *testing.T) {
	r := newRig(t)
	ns := r.pod.NS
	// Things of others, near ours on purpose.
	netnstest.Run(t, ns, "nft", "add table inet other; add chain inet other c { type filter hook output priority 0; }; add rule inet other c tcp dport 9 accept; add table ip aether_capture")
	netnstest.Run(t, ns, "ip", "rule", "add", "fwmark", "0xae71", "lookup", "101")
	netnstest.Run(t, ns, "ip", "rule", "add", "fwmark", "0xae71/0xffff", "lookup", "100")
	netnstest.Run(t, ns, "ip", "route", "add", "198.51.100.0/24", "dev", "lo", "table", "100")
	netnstest.Run(t, ns, "ip", "-6", "route", "add", "2001:db8:5::/48", "dev", "lo", "table", "100")
	before := state(t, ns)
	for range 2 {
		r.apply(rules.Config{RedirectAll: true}.Ruleset())
		if state(t, ns) == before {
			t.Fatal("Apply changed nothing")
		}
		for range 2 { // the second time there is nothing to remove
			if err := apply.Remove(ns); err != nil {
				t.Fatal(err)
			}
			if got := state(t, ns); got != before {
				t.Fatalf("before\n%s\nafter\n%s", before, got)
			}
		}
	}
}

// A failed Apply leaves nothing of itself, and what was in force before it.
func TestFailureLeavesTheOldRules(t *testing.T) {
	ns := netnstest.New(t)
	bad := rules.Config{RedirectAll: true}.Ruleset()
	bad.Chains[0].Rules = append(bad.Chains[0].Rules, bad.Chains[1].Rules...) // tproxy works in prerouting only
	before := state(t, ns)
	if err := apply.Apply(ns, bad); err == nil || !strings.Contains(err.Error(), ns.Path()) {
		t.Fatalf("a bad set was applied, or the error does not say where: %v", err)
	}
	if got := state(t, ns); got != before {
		t.Errorf("before\n%s\nafter a failure\n%s", before, got)
	}
	if err := apply.Apply(ns, rules.Config{}.Ruleset()); err != nil {
		t.Fatal(err)
	}
	before = state(t, ns)
	if err := apply.Apply(ns, bad); err == nil {
		t.Fatal("a bad set was applied")
	}
	if got := state(t, ns); got != before {
		t.Errorf("before\n%s\nafter a failure\n%s", before, got)
	}
}

func TestLoopbackDown(t *testing.T) {
	ns := netnstest.New(t)
	netnstest.Run(t, ns, "ip", "link", "set", "lo", "down")
	err := apply.Apply(ns, rules.Config{}.Ruleset())
	if !errors.Is(err, unix.ENETDOWN) || !strings.Contains(err.Error(), "loopback CNI plugin") {
		t.Errorf("error %v", err)
	}
}

func TestWithoutIPv6(t *testing.T) {
	node := netnstest.NewNode(t, service)
	r := &rig{t: t, node: node, pod: node.PodWithoutIPv6(t)}
	r.capture() // falls back to 0.0.0.0
	before := state(t, r.pod.NS)
	err := apply.Apply(r.pod.NS, rules.Config{RedirectAll: true}.Ruleset())
	if !errors.Is(err, apply.ErrNoIPv6) {
		t.Fatalf("error %v, want ErrNoIPv6", err)
	}
	r.expect(map[string]string{"10.96.0.10:80": "captured 10.96.0.10:80"})
	if s := table(t, r.pod.NS); strings.Contains(s, "ip6") {
		t.Errorf("rules for IPv6:\n%s", s)
	}
	if err := apply.Remove(r.pod.NS); err != nil {
		t.Fatal(err)
	}
	if got := state(t, r.pod.NS); got != before {
		t.Errorf("before\n%s\nafter\n%s", before, got)
	}
}

// IPv6 that is taken away after Apply does not keep Remove from its work.
func TestRemoveAfterIPv6WasDisabled(t *testing.T) {
	ns := netnstest.New(t)
	if err := apply.Apply(ns, rules.Config{}.Ruleset()); err != nil {
		t.Fatal(err)
	}
	netnstest.Sysctl(t, ns, "net/ipv6/conf/all/disable_ipv6", "1")
	if err := apply.Remove(ns); err != nil {
		t.Fatal(err)
	}
	if s := state(t, ns); strings.Contains(s, "0xae71") || strings.Contains(s, "aether") || strings.Contains(s, "table 100") {
		t.Errorf("left:\n%s", s)
	}
}

func TestGone(t *testing.T) {
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
	if err := apply.Apply(n, rules.Config{}.Ruleset()); !errors.Is(err, netns.ErrGone) {
		t.Errorf("Apply: %v", err)
	}
	if err := apply.Remove(n); !errors.Is(err, netns.ErrGone) {
		t.Errorf("Remove: %v", err)
	}
}

// While the rules are replaced, over and over and by different ones, every new
// connection meets a set that captures it, and none of the open ones dies.
func TestReplaceUnderTraffic(t *testing.T) {
	r := newRig(t)
	r.capture()
	r.world(80)
	r.serve(r.pod.NS, "app", "[::]:8080", false)
	sets := []rules.Ruleset{
		rules.Config{RedirectAll: true}.Ruleset(),
		parse(t, "443,5432", "192.0.2.0/24,2001:db8::/32", true).Ruleset(),
	}
	r.apply(sets[0])
	var open []net.Conn
	for _, from := range []struct {
		ns   *netns.NS
		addr netip.AddrPort
	}{
		{r.pod.NS, netip.AddrPortFrom(service, 80)}, {r.pod.NS, netip.AddrPortFrom(service6, 80)},
		{r.node.NS, netip.AddrPortFrom(r.pod.IP, 8080)}, {r.node.NS, netip.AddrPortFrom(r.pod.IP6, 8080)},
	} {
		c, _, err := dial(from.ns, from.addr, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		open = append(open, c)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	n := 0
	wg.Go(func() {
		netns.Do(r.pod.NS, func() error { // one thread stays in the pod: dials are quick
			for {
				select {
				case <-stop:
					return nil
				default:
				}
				for _, a := range []string{"10.96.0.10:80", "[fd00:96::10]:80"} {
					c, err := net.DialTimeout("tcp", a, patience)
					if err != nil {
						t.Errorf("%s: %v", a, err)
						continue
					}
					if got, err := talk(c, ""); got != "captured "+a || err != nil {
						t.Errorf("%s met %q, %v", a, got, err)
					}
					c.Close()
					n++
				}
			}
		})
	})
	const times = 100
	for i := range times {
		r.apply(sets[i%2])
		for _, c := range open {
			if got, err := talk(c, "still here"); got != "still here" || err != nil {
				t.Errorf("an open connection to %s: %q, %v", c.RemoteAddr(), got, err)
			}
		}
	}
	close(stop)
	wg.Wait()
	if n < times {
		t.Errorf("only %d connections during %d replacements", n, times)
	}
}
