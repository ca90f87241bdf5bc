package dataplane

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
	"aether/tproxy/netns/netnstest"
)

// TestNamespaceIsThePods: nobody is listened for in a network namespace that is the node's, another pod's, or has
// not the pod's addresses; those may come late; new addresses that are not the pod's leave it as it is.
func TestNamespaceIsThePods(t *testing.T) {
	n, err := New(Config{Identities: nobody{}, Journal: journal.NewRing(1)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	done := make(chan error)
	go func() { done <- n.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	one, two, late := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	netnstest.Address(t, one, "10.1.0.1/32")
	netnstest.Address(t, one, "fd00::1/128")
	netnstest.Address(t, two, "10.1.0.2/32")
	again := fmt.Sprintf("%s/pin", t.TempDir()) // another path to one's namespace
	if err := os.Symlink(one.Path(), again); err != nil {
		t.Fatal(err)
	}
	pod := func(name, ns string, ips ...string) model.Workload {
		w := model.Workload{Namespace: "shop", Name: name, Account: name, ContainerID: name, NetNS: ns, SPIFFEID: "spiffe://td/ns/shop/sa/" + name}
		for _, ip := range ips {
			w.IPs = append(w.IPs, netip.MustParseAddr(ip))
		}
		return w
	}
	served := func() string {
		var out []string
		for _, p := range n.Pods() {
			out = append(out, p.Pod)
		}
		return strings.Join(out, " ")
	}
	why := func(name string) string {
		for _, p := range n.Problems() {
			if p.Object == "Pod shop/"+name {
				return p.Reason
			}
		}
		return ""
	}
	good := pod("one", one.Path(), "10.1.0.1", "fd00::1")
	snap := snapshot.New(snapshot.Tables{Endpoints: snapshot.NewEndpointTable(nil)})
	n.Apply(snap, []model.Workload{good, pod("mapped", two.Path(), "::ffff:10.1.0.2")})
	for _, c := range []string{"one", "mapped"} { // once Run has begun
		if err := n.Await(ctx, c, true); err != nil {
			t.Fatal(err)
		}
	}
	if served() != "shop/mapped shop/one" || len(n.Problems()) > 0 {
		t.Fatalf("served %q, problems %v", served(), n.Problems())
	}
	for _, tt := range []struct {
		name, ns string
		ips      []string
		why      string
	}{
		{"node", "/proc/thread-self/ns/net", []string{"10.1.0.9"}, "is the node's"},
		{"node-by-process", fmt.Sprintf("/proc/%d/ns/net", os.Getpid()), []string{"127.0.0.1"}, "is the node's"},
		{"other", one.Path(), []string{"10.1.0.1"}, "is that of pod shop/one"},
		{"pinned", again, []string{"10.1.0.1"}, "is that of pod shop/one"},
		{"elsewhere", late.Path(), []string{"10.1.0.3"}, "has not the pod's address 10.1.0.3"},
		{"in-part", late.Path(), []string{"127.0.0.1", "fd00::3"}, "has not the pod's address fd00::3"},
	} {
		n.Apply(snap, []model.Workload{good, pod(tt.name, tt.ns, tt.ips...)})
		if got := why(tt.name); served() != "shop/one" || !strings.Contains(got, tt.why) || !strings.Contains(got, "file.aether.io/netns") {
			t.Errorf("%s: served %q, problem %q", tt.name, served(), got)
		}
	}

	// The first process's, which not everybody may open.
	n.Apply(snap, []model.Workload{good, pod("init", "/proc/1/ns/net", "127.0.0.1")})
	if got := why("init"); served() != "shop/one" || got == "" {
		t.Errorf("init: served %q, problem %q", served(), got)
	}

	// The addresses come: no new state is needed.
	n.Apply(snap, []model.Workload{good, pod("late", late.Path(), "10.1.0.3", "fd00::3")})
	if served() != "shop/one" {
		t.Fatalf("served %q", served())
	}
	netnstest.Address(t, late, "10.1.0.3/32")
	netnstest.Address(t, late, "fd00::3/128")
	if err := n.Await(ctx, "late", true); err != nil {
		t.Errorf("its addresses are there: %v", err)
	}

	// Other addresses, which are not its own.
	moved := slices.Clone(n.want)
	moved[0] = pod("one", one.Path(), "10.1.0.3")
	n.Apply(snap, moved)
	if got := why("one"); served() != "shop/late shop/one" || !strings.Contains(got, "served as before") {
		t.Errorf("served %q, problem %q", served(), got)
	}
	n.mu.Lock()
	if ips := n.pods["one"].w.IPs; !slices.Equal(ips, good.IPs) {
		t.Errorf("it has %v", ips)
	}
	n.mu.Unlock()
}
