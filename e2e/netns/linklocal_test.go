package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"aether/dataplane/model"
	"aether/e2e/rig"
)

// TestLinkLocalNeighbour: two pods on one bridge reach each other by their link-local addresses, past the proxy, whoever of
// them is captured; the neighbour's own ports of the mesh take nothing that comes by such an address (decision 043).
func TestLinkLocalNeighbour(t *testing.T) {
	ctx := within(t, patience)
	node, web, other := w.Pod("web").Node, w.Pod("web"), w.Pod("web2")
	ip := func(s *rig.Space, args ...string) {
		t.Helper()
		if out, err := s.Command(ctx, append([]string{"ip"}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	ip(&node.Space, "link", "add", "llbr", "type", "bridge")
	t.Cleanup(func() { _ = node.Command(context.WithoutCancel(ctx), "ip", "link", "del", "llbr").Run() })
	ip(&node.Space, "link", "set", "llbr", "up")
	const index = 4242 // of each pod's end: a name would be looked up in the wrong namespace
	for i, p := range []*rig.Pod{web, other} {
		wire := fmt.Sprint("llwire", i)
		ip(&p.Space, "link", "add", "ll0", "index", fmt.Sprint(index), "type", "veth", "peer", "name", wire)
		t.Cleanup(func() { _ = p.Command(context.WithoutCancel(ctx), "ip", "link", "del", "ll0").Run() })
		ip(&p.Space, "link", "set", wire, "netns", node.NSName())
		ip(&node.Space, "link", "set", wire, "master", "llbr", "up")
		ip(&p.Space, "addr", "add", fmt.Sprintf("fe80::%d/64", i+1), "dev", "ll0", "nodad")
		ip(&p.Space, "link", "set", "ll0", "up")
	}
	to := netip.MustParseAddr(fmt.Sprintf("fe80::2%%%d", index))

	l := listen(t, ctx, &other.Space, netip.AddrPortFrom(to, 0).String())
	at := netip.AddrPortFrom(to, uint16(l.Addr().(*net.TCPAddr).Port))
	c := dial(t, ctx, web, at.String())
	s := acceptOne(t, ctx, l)
	seen, own := s.RemoteAddr().(*net.TCPAddr).AddrPort(), c.LocalAddr().(*net.TCPAddr).AddrPort()
	if seen.Addr().WithZone("") != own.Addr().WithZone("") || seen.Port() != own.Port() {
		t.Errorf("the neighbour sees %v, want the client's own connection from %v", seen, own)
	}
	say(t, c, "ping\n")
	expect(t, s, "ping\n")
	say(t, s, "pong\n")
	expect(t, c, "pong\n")

	for _, port := range []uint16{model.PortCapture, model.PortMesh, 18081, 18082} {
		c, err := web.Dial(ctx, "tcp", netip.AddrPortFrom(to, port).String())
		if err != nil {
			if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("port %d: %v", port, err)
			}
			continue
		}
		deadline(ctx, c.(*net.TCPConn))
		_, _ = c.Write([]byte("GET / HTTP/1.1\r\nHost: app\r\n\r\n")) // it may have been reset already
		b := make([]byte, 100)
		n, err := c.Read(b)
		if late, ok := errors.AsType[net.Error](err); n > 0 || ok && late.Timeout() {
			t.Errorf("port %d: %q, %v", port, b[:n], err)
		}
		c.Close()
	}
}
