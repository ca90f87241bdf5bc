package client_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"aether/controlplane/registrar/client"
	"aether/controlplane/registrar/server"
	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// serve runs a registrar over store; addr may have port 0.
func serve(t *testing.T, store *storetest.Store, addr string) (string, func()) {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	s := server.New(server.Config{Store: store, Region: "local", Cluster: "c1", Drain: -1})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.Run(ctx, ln); err != nil {
			t.Error(err)
		}
	})
	end := sync.OnceFunc(func() { stop(); wg.Wait() })
	t.Cleanup(end)
	return ln.Addr().String(), end
}

// TestTwoClusters: two clusters' pods of one address are two rows: each comes and goes by itself. Of what a node
// can reach there one is told, its own cluster's or else the first by name, whether it heard of the others one by
// one or found them all.
func TestTwoClusters(t *testing.T) {
	store := storetest.New("local", "c1")
	of := func(cluster string, h registrypb.ServiceEndpoint_Health) []registry.Row {
		e := storetest.Endpoint("10.0.0.1", "n1", map[uint32]registrypb.PortProtocol{
			8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP, 9000: registrypb.PortProtocol_PORT_PROTOCOL_TCP})
		e.ClusterName, e.Health = cluster, h
		return storetest.Rows("local", cluster, name("shop/cart"), e)
	}
	gone := func(cluster string) (out []registry.Row) {
		for _, r := range of(cluster, healthy) {
			r.Endpoint = nil
			out = append(out, r)
		}
		return out
	}
	addr, _ := serve(t, store, "127.0.0.1:0")
	all := startNode(t, client.Config{Targets: []string{addr}, Whole: true})
	defer all.end()
	for i, step := range []struct {
		set     []registry.Row
		cluster string // whose row is told; empty: none
		health  registrypb.ServiceEndpoint_Health
		problem bool
	}{
		{of("west", healthy), "west", healthy, false},
		{of("c1", draining), "c1", draining, true},
		{of("a1", healthy), "c1", draining, true},
		{of("west", draining), "c1", draining, true},
		{gone("c1"), "a1", healthy, true},
		{of("a1", draining), "a1", draining, true},
		{gone("a1"), "west", draining, false},
		{gone("west"), "", 0, false},
	} {
		store.Set(step.set...)
		fresh := startNode(t, client.Config{Targets: []string{addr}, Whole: true})
		for who, n := range map[string]*node{"one that heard of all": all, "one that comes now": fresh} {
			until(t, fmt.Sprintf("step %d, %s", i, who), func() bool {
				rows := n.heard.of(name("shop/cart"))
				n.heard.mu.Lock()
				problems := len(n.heard.problems)
				n.heard.mu.Unlock()
				if step.cluster == "" {
					return len(rows) == 0 && problems == 0 && n.heard.status().Connected
				}
				return len(rows) == 1 && strings.Contains(rows[0], "cluster="+step.cluster+" ") && strings.Contains(rows[0], fmt.Sprintf("health=%d ", step.health)) &&
					(problems == 1) == step.problem
			})
		}
		fresh.end()
	}
}

// TestRealRegistrar: against the registrar itself, two replicas over one store: scope, cold names, a replica that
// leaves, one that comes back at the same address.
func TestRealRegistrar(t *testing.T) {
	store := storetest.New("local", "c1")
	http := map[uint32]registrypb.PortProtocol{8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP, 9000: registrypb.PortProtocol_PORT_PROTOCOL_TCP}
	set := func(service, ip string) {
		store.Set(storetest.Rows("local", "c1", name(service), storetest.Endpoint(ip, "n1", http))...)
	}
	for i := range 20 {
		for j := range 5 {
			set(fmt.Sprintf("shop/s%d", i), fmt.Sprintf("10.0.%d.%d", i, j+1))
		}
	}
	one, endOne := serve(t, store, "127.0.0.1:0")
	two, endTwo := serve(t, store, "127.0.0.1:0")
	n := startNode(t, client.Config{Targets: []string{one, two}})
	defer n.end()
	whole := startNode(t, client.Config{Targets: []string{one, two}, Whole: true})
	defer whole.end()
	n.SetDeclared([]model.ServiceName{name("shop/s1"), name("shop/s2")})
	rows := func(n *node, service string, want int) func() bool {
		return func() bool { return len(n.heard.of(name(service))) == want }
	}
	until(t, "the scope", rows(n, "shop/s2", 5))
	until(t, "everything", rows(whole, "shop/s19", 5))
	if !n.heard.cold(name("shop/s7")) || len(n.heard.of(name("shop/s7"))) != 0 {
		t.Error("s7 is here")
	}
	if n.Want(name("shop/s7")) != client.Coming || n.Want(name("shop/none")) != client.NoSuchName {
		t.Error("what is known of names is wrong")
	}
	until(t, "a cold service", rows(n, "shop/s7", 5))
	for _, turn := range []struct {
		addr string
		end  func()
	}{{one, endOne}, {two, endTwo}} {
		turn.end()
		set("shop/s7", "10.9.9."+turn.addr[len(turn.addr)-1:])
		before := len(n.heard.of(name("shop/s7")))
		until(t, "a change over whoever is left", func() bool { return len(n.heard.of(name("shop/s7"))) >= min(before, 6) && n.heard.status().Connected })
		_, end := serve(t, store, turn.addr)
		defer end()
	}
	set("shop/new", "10.8.8.8")
	until(t, "a new service", rows(whole, "shop/new", 1))
	until(t, "its name", func() bool { return n.heard.cold(name("shop/new")) })
	if n.heard.replaces != 1 || whole.heard.replaces != 1 {
		t.Error("more than one whole state")
	}
}
