// Package rig builds a small mesh network on one machine: nodes and pods as
// network namespaces, joined by veth pairs, with processes and certificates in
// them. End-to-end tests, the benchmark and the demo stand on it.
//
//   - Everything that New and its followers make carries the rig's prefix, lives in
//     the rig's namespaces or its directory, and is gone after Close.
//   - Two rigs never meet: addresses repeat from rig to rig, names do not.
//   - Service addresses belong to nobody; nothing answers on them unless a proxy
//     captures the connection.
//   - Waiting is always for a condition, with a deadline (Until), never for a time.
//
// It needs root and the commands ip and nft. It knows nothing of the proxy: no
// package of the data plane or the control plane is imported here.
package rig

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Bounds of a rig; addresses are 10.0.0.<node> and 10.1.<node>.<9+pod>.
const (
	MaxNodes = 16
	MaxPods  = 200 // on one node
)

// Options of New.
type Options struct {
	// Prefix of every namespace: lower-case letters, digits and '.', at most 32.
	// Empty: one that no other rig of this machine has.
	Prefix string
	// Nodes: 0 means 2; at most MaxNodes.
	Nodes int
	// IPv6 gives every node and pod an address of fd00::/8 beside the IPv4 one.
	IPv6 bool
	// KeepDir leaves the directory (logs, configuration) behind at Close.
	KeepDir bool
}

// Rig is a set of nodes and pods. Safe for concurrent use.
type Rig struct {
	// Prefix of the rig's namespaces.
	Prefix string
	// Dir is the rig's own directory: logs, configuration, certificates.
	// Anyone may read it, so that servers that drop root can.
	Dir string
	// Nodes of the rig, node1 first.
	Nodes []*Node

	ipv6 bool
	keep bool

	mu     sync.Mutex
	pods   []*Pod
	spaces []string // namespaces made, in order
	procs  []*Proc
	closed bool
}

// Node is a namespace that routes: it stands for a machine of the cluster.
type Node struct {
	Space
	IP4, IP6 netip.Addr // IP6 is the zero Addr without Options.IPv6

	index int // 1 for node1
	pods  int
}

// Pod is a namespace with one interface, eth0, and a default route to its node.
type Pod struct {
	Space
	Node     *Node
	IP4, IP6 netip.Addr // IP6 is the zero Addr without Options.IPv6
}

// dirPrefix begins the name of every rig's directory.
const dirPrefix = "aether-rig-"

var (
	prefixForm = regexp.MustCompile(`^[a-z][a-z0-9.]{0,31}$`)
	nameForm   = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{0,62}$`)
	autoForm   = regexp.MustCompile(`^rig([0-9]+)x[0-9]+-`)
	serial     atomic.Uint32
)

// Need reports which of the commands are not installed, in one error.
func Need(commands ...string) error {
	var missing []string
	for _, c := range commands {
		if _, err := exec.LookPath(c); err != nil {
			missing = append(missing, c)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("rig: commands not found: %s (Debian packages: iproute2 for ip, nftables for nft, nginx-light for nginx, haproxy, wrk)",
			strings.Join(missing, ", "))
	}
	return nil
}

// New builds the nodes and the links between them; pods come with AddPod.
// An error leaves nothing behind. ctx bounds the set-up only.
func New(ctx context.Context, o Options) (*Rig, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("rig: needs root to make network namespaces; run it with sudo, or in a privileged container")
	}
	if err := Need("ip", "nft"); err != nil {
		return nil, err
	}
	if o.Nodes == 0 {
		o.Nodes = 2
	}
	if o.Nodes < 0 || o.Nodes > MaxNodes {
		return nil, fmt.Errorf("rig: %d nodes asked for, 1 to %d are possible", o.Nodes, MaxNodes)
	}
	if o.Prefix == "" {
		if err := sweepDead(ctx); err != nil {
			return nil, err
		}
		o.Prefix = fmt.Sprintf("rig%dx%d", os.Getpid(), serial.Add(1))
	}
	if !prefixForm.MatchString(o.Prefix) {
		return nil, fmt.Errorf("rig: prefix %q does not match %s", o.Prefix, prefixForm)
	}
	if old, err := spacesOf(o.Prefix); err != nil {
		return nil, err
	} else if len(old) > 0 {
		return nil, fmt.Errorf("rig: prefix %q is in use (namespace %s): another rig runs, or one crashed; rig.Sweep(%q) removes it", o.Prefix, old[0], o.Prefix)
	}
	dir, err := os.MkdirTemp("", dirPrefix+o.Prefix+"-")
	if err != nil {
		return nil, fmt.Errorf("rig: make a directory: %w", err)
	}
	r := &Rig{Prefix: o.Prefix, Dir: dir, ipv6: o.IPv6, keep: o.KeepDir}
	if err := r.build(ctx, o.Nodes); err != nil {
		r.keep = false
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func (r *Rig) build(ctx context.Context, nodes int) error {
	if err := os.Chmod(r.Dir, 0o755); err != nil {
		return fmt.Errorf("rig: %w", err)
	}
	for i := 1; i <= nodes; i++ {
		n := &Node{index: i, IP4: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})}
		if r.ipv6 {
			n.IP6 = netip.MustParseAddr(fmt.Sprintf("fd00:a::%x", i))
		}
		var err error
		if n.Space, err = r.addSpace(ctx, "node"+strconv.Itoa(i)); err != nil {
			return err
		}
		r.Nodes = append(r.Nodes, n)
	}
	// Every pair of nodes has a wire of its own: between two nodes nothing but a
	// veth stands, so that what is measured is the proxy and not a bridge.
	for i, a := range r.Nodes {
		for _, b := range r.Nodes[i+1:] {
			toB, toA := "to"+strconv.Itoa(b.index), "to"+strconv.Itoa(a.index)
			if err := run(ctx, "", "ip", "link", "add", toB, "netns", a.ns, "type", "veth", "peer", "name", toA, "netns", b.ns); err != nil {
				return err
			}
			if err := a.route(ctx, toB, b); err != nil {
				return err
			}
			if err := b.route(ctx, toA, a); err != nil {
				return err
			}
		}
	}
	return nil
}

// route makes dev the way from n to the node far and the pods on it.
func (n *Node) route(ctx context.Context, dev string, far *Node) error {
	lines := []string{
		fmt.Sprintf("addr add %s/32 dev %s", n.IP4, dev),
		fmt.Sprintf("link set %s up", dev),
		fmt.Sprintf("route add %s/32 dev %s", far.IP4, dev),
		fmt.Sprintf("route add 10.1.%d.0/24 via %s", far.index, far.IP4),
	}
	if n.IP6.IsValid() {
		lines = append(lines,
			fmt.Sprintf("addr add %s/128 dev %s nodad", n.IP6, dev),
			fmt.Sprintf("route add %s/128 dev %s", far.IP6, dev),
			fmt.Sprintf("route add fd00:1:%x::/64 via %s dev %s", far.index, far.IP6, dev))
	}
	return n.ip(ctx, lines...)
}

// AddPod makes a pod on Nodes[node]. The name is a DNS label, unlike that of any
// node or pod of the rig; the namespace is <prefix>-<name>.
func (r *Rig) AddPod(ctx context.Context, node int, name string) (*Pod, error) {
	if node < 0 || node >= len(r.Nodes) {
		return nil, fmt.Errorf("rig: add pod %s: node %d asked for, there are 0 to %d", name, node, len(r.Nodes)-1)
	}
	n := r.Nodes[node]
	r.mu.Lock()
	if n.pods == MaxPods {
		r.mu.Unlock()
		return nil, fmt.Errorf("rig: add pod %s: %s already has %d pods", name, n.Name, MaxPods)
	}
	n.pods++
	k := n.pods
	r.mu.Unlock()

	p := &Pod{Node: n, IP4: netip.AddrFrom4([4]byte{10, 1, byte(n.index), byte(9 + k)})}
	if r.ipv6 {
		p.IP6 = netip.MustParseAddr(fmt.Sprintf("fd00:1:%x::%x", n.index, 9+k))
	}
	var err error
	if p.Space, err = r.addSpace(ctx, name); err != nil {
		return nil, err
	}
	wire := "pod" + strconv.Itoa(k)
	if err := run(ctx, "", "ip", "link", "add", wire, "netns", n.ns, "type", "veth", "peer", "name", "eth0", "netns", p.ns); err != nil {
		return nil, err
	}
	gw4 := fmt.Sprintf("10.1.%d.1", n.index)
	gw6 := fmt.Sprintf("fd00:1:%x::1", n.index)
	host := []string{
		fmt.Sprintf("addr add %s/32 dev %s", gw4, wire),
		fmt.Sprintf("link set %s up", wire),
		fmt.Sprintf("route add %s/32 dev %s src %s", p.IP4, wire, gw4),
	}
	pod := []string{
		fmt.Sprintf("addr add %s/32 dev eth0", p.IP4),
		"link set eth0 up",
		fmt.Sprintf("route add %s/32 dev eth0", gw4),
		fmt.Sprintf("route add default via %s dev eth0", gw4),
	}
	if r.ipv6 {
		host = append(host,
			fmt.Sprintf("addr add %s/128 dev %s nodad", gw6, wire),
			fmt.Sprintf("route add %s/128 dev %s", p.IP6, wire))
		pod = append(pod,
			fmt.Sprintf("addr add %s/128 dev eth0 nodad", p.IP6),
			fmt.Sprintf("route add %s/128 dev eth0", gw6),
			fmt.Sprintf("route add default via %s dev eth0", gw6))
	}
	if err := n.ip(ctx, host...); err != nil {
		return nil, err
	}
	if err := p.ip(ctx, pod...); err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.pods = append(r.pods, p)
	r.mu.Unlock()
	return p, nil
}

// Pods of the rig, oldest first.
func (r *Rig) Pods() []*Pod {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.pods)
}

// IPs of the pod, IPv4 first.
func (p *Pod) IPs() []netip.Addr {
	if p.IP6.IsValid() {
		return []netip.Addr{p.IP4, p.IP6}
	}
	return []netip.Addr{p.IP4}
}

// settings of every namespace. Reverse-path filters would drop what TPROXY turns
// around; the wide port range and tw_reuse let one client open a connection a
// request; the reserved ports are those that servers of the rig listen on.
var settings = [][2]string{
	{"ipv4/ip_forward", "1"},
	{"ipv4/conf/all/rp_filter", "0"},
	{"ipv4/conf/default/rp_filter", "0"},
	{"ipv4/ip_local_port_range", "2000 65000"},
	{"ipv4/ip_local_reserved_ports", "8080-8089,9000-9009,9901,18000-18100"},
	{"ipv4/tcp_tw_reuse", "1"},
}

// settings6 apply where Options.IPv6 is set; without it the namespaces have IPv6
// on loopback and link-local addresses only.
var settings6 = [][2]string{
	{"ipv6/conf/all/forwarding", "1"},
	{"ipv6/conf/all/accept_dad", "0"},
	{"ipv6/conf/default/accept_dad", "0"},
}

func (r *Rig) addSpace(ctx context.Context, name string) (Space, error) {
	if !nameForm.MatchString(name) {
		return Space{}, fmt.Errorf("rig: name %q does not match %s", name, nameForm)
	}
	s := Space{Name: name, NetNS: filepath.Join(netnsDir, r.Prefix+"-"+name), ns: r.Prefix + "-" + name}
	r.mu.Lock()
	closed, taken := r.closed, slices.Contains(r.spaces, s.ns)
	if !closed && !taken {
		r.spaces = append(r.spaces, s.ns)
	}
	r.mu.Unlock()
	switch {
	case closed:
		return Space{}, fmt.Errorf("rig: add %s: the rig is closed", name)
	case taken:
		return Space{}, fmt.Errorf("rig: add %s: the name is taken", name)
	}
	if err := run(ctx, "", "ip", "netns", "add", s.ns); err != nil {
		return Space{}, err
	}
	if err := s.ip(ctx, "link set lo up"); err != nil {
		return Space{}, err
	}
	set := settings
	if r.ipv6 {
		set = slices.Concat(settings, settings6)
	}
	err := s.Do(func() error {
		for _, kv := range set {
			// Opened by the thread that stands in the namespace: /proc/sys/net shows its own.
			if err := os.WriteFile("/proc/sys/net/"+kv[0], []byte(kv[1]), 0); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return Space{}, fmt.Errorf("rig: settings of %s: %w", s.ns, err)
	}
	return s, nil
}

// Close ends the rig's processes and removes its namespaces and its directory. It
// tries everything and reports all that failed. A second call does nothing.
func (r *Rig) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	procs, spaces := r.procs, r.spaces
	r.mu.Unlock()

	var errs []error
	for _, p := range procs {
		p.terminate()
	}
	for _, p := range slices.Backward(procs) {
		if err := p.Stop(); err != nil {
			errs = append(errs, err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for _, ns := range slices.Backward(spaces) {
		if err := removeSpace(ctx, ns); err != nil {
			errs = append(errs, err)
		}
	}
	if !r.keep {
		if err := os.RemoveAll(r.Dir); err != nil {
			errs = append(errs, fmt.Errorf("rig: %w", err))
		}
	}
	return errors.Join(errs...)
}

// Sweep removes the namespaces of the rig called prefix, the processes in them, and its
// directory: for a rig whose owner crashed. With none there it does nothing.
func Sweep(ctx context.Context, prefix string) error {
	old, err := spacesOf(prefix)
	if err != nil {
		return err
	}
	var errs []error
	for _, ns := range old {
		errs = append(errs, removeSpace(ctx, ns))
	}
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+prefix+"-*"))
	errs = append(errs, err)
	for _, d := range dirs {
		errs = append(errs, os.RemoveAll(d))
	}
	return errors.Join(errs...)
}

// sweepDead removes the rigs with a name of our making whose owner is no more.
func sweepDead(ctx context.Context) error {
	names, err := spaces()
	if err != nil {
		return err
	}
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+"rig*"))
	if err != nil {
		return err
	}
	for _, d := range dirs {
		names = append(names, strings.TrimPrefix(filepath.Base(d), dirPrefix))
	}
	dead := map[string]bool{}
	for _, name := range names {
		m := autoForm.FindStringSubmatch(name)
		if m == nil {
			continue
		}
		if _, err := os.Stat("/proc/" + m[1]); errors.Is(err, os.ErrNotExist) {
			dead[strings.TrimSuffix(m[0], "-")] = true
		}
	}
	for prefix := range dead {
		if err := Sweep(ctx, prefix); err != nil {
			// Another process may be sweeping the same remains: what is gone is done.
			if left, e := spacesOf(prefix); e != nil || len(left) > 0 {
				return err
			}
		}
	}
	return nil
}

// spacesOf lists the namespaces of the rig called prefix.
func spacesOf(prefix string) ([]string, error) {
	all, err := spaces()
	return slices.DeleteFunc(all, func(ns string) bool { return !strings.HasPrefix(ns, prefix+"-") }), err
}

func spaces() ([]string, error) {
	entries, err := os.ReadDir(netnsDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("rig: list namespaces: %w", err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all, nil
}

// removeSpace kills what runs in ns and deletes it; one that is not there is not an error.
func removeSpace(ctx context.Context, ns string) error {
	if _, err := os.Stat(filepath.Join(netnsDir, ns)); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	out, err := exec.CommandContext(ctx, "ip", "netns", "pids", ns).Output()
	if err == nil {
		for _, f := range strings.Fields(string(out)) {
			// Our own first thread may be visiting the namespace in Do.
			if pid, err := strconv.Atoi(f); err == nil && pid != os.Getpid() {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
	return run(ctx, "", "ip", "netns", "del", ns)
}
