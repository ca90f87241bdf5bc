package dataplane

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"aether/dataplane/journal"
	"aether/mtls"
	"aether/tproxy/netns/netnstest"
)

type nobody struct{}

func (nobody) Watch(ctx context.Context, _ mtls.Ref, _ func(*mtls.SVID, error)) error {
	<-ctx.Done()
	return nil
}

// TestHopSource (hopSource, contract 10.9): a hop leaves from the pod's network namespace, or the
// node's, as said last. That of this test's pod has nobody on its loopback.
func TestHopSource(t *testing.T) {
	n, err := New(Config{Identities: nobody{}, Journal: journal.NewRing(1)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	done := make(chan error)
	go func() { done <- n.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	ns := netnstest.New(t)
	pool := n.factory.Open(ns)
	defer pool.Close()
	n.socks.Store("c", &sockets{ctx: ctx, pool: pool, pod: "shop/web-1"})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for i, node := range []bool{false, true, false, true} {
		if err := n.HopFromNode(node); err != nil {
			t.Fatal(err)
		}
		c, err := n.hop(ctx, "c", netip.MustParseAddrPort(ln.Addr().String()))
		if (err == nil) != node {
			t.Errorf("%d, from the node %v: %v", i, node, err)
		}
		if err == nil {
			c.Close()
		}
	}
	n.socks.Delete("c")
	if _, err := n.hop(ctx, "c", netip.MustParseAddrPort(ln.Addr().String())); err == nil {
		t.Error("a pod that is not served dials from the node")
	}
}
