package dataplane

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/tproxy/netns/netnstest"
)

// TestNobodyProbesOwnPorts: the prober of a pod's application connects to no port of the mesh's own, at which somebody
// listens always: the pod would be ready without its application (decision 043).
func TestNobodyProbesOwnPorts(t *testing.T) {
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
	for _, port := range []uint16{model.PortCapture, model.PortMesh, 18081, 18082, 8080} {
		at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)
		var ln net.Listener
		netnstest.Do(t, ns, func() (err error) {
			ln, err = net.Listen("tcp", at.String())
			return err
		})
		defer ln.Close()
		c, err := n.Dial(ctx, "c", port)
		if err == nil {
			c.Close()
		}
		if own := model.ReservedPort(port); own != (port != 8080) {
			t.Fatalf("port %d is reserved: %v", port, own)
		}
		switch {
		case port == 8080 && err != nil:
			t.Errorf("the application's port: %v", err)
		case port != 8080 && (err == nil || !strings.Contains(err.Error(), "the mesh's own")):
			t.Errorf("port %d: %v", port, err)
		}
	}
}
