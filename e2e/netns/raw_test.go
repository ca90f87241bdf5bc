package netns

import (
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
)

// TestRaw: declared raw TCP over the hop, from captured clients and both address families.
func TestRaw(t *testing.T) {
	t.Parallel()
	v6 := func(port int) string { return netip.AddrPortFrom(w.ClusterIPs(appVIP)[1], uint16(port)).String() }
	for _, tt := range []struct{ name, from, addr, send, want string }{
		{"echo", "web", vip(appVIP, portEcho), "ping\n", "ping\n"},
		{"echo by IPv6", "web", v6(portEcho), "ping\n", "ping\n"},
		{"HTTP bytes are bytes", "web", vip(appVIP, portEcho), "GET / HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\n\r\n"},
		{"server first", "web", vip(appVIP, portBanner), "", "banner\n"},
		{"server first by IPv6", "web", v6(portBanner), "", "banner\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ctx := within(t, patience)
			c := dial(t, ctx, w.Pod(tt.from), tt.addr)
			say(t, c, tt.send)
			expect(t, c, tt.want)
			c.CloseWrite()
			expectEnd(t, c)
		})
	}
}

// TestRawBulk: 20 MB in both directions at the same time, to the last byte.
func TestRawBulk(t *testing.T) {
	t.Parallel()
	const size = 20 << 20
	want := sumOf(size)
	ctx := within(t, patience)
	c := dial(t, ctx, w.Pod("web"), vip(appVIP, portQueue+3))
	a := queues[3].accept(t, ctx)
	read := func(c *net.TCPConn) chan error {
		done := make(chan error, 1)
		go func() {
			h := sha256.New()
			n, err := io.Copy(h, c)
			if err != nil || sum(h) != want {
				done <- fmt.Errorf("%d bytes came, not the same: %w", n, err)
			}
			close(done)
		}()
		return done
	}
	write := func(c *net.TCPConn) {
		io.Copy(c, newPattern(size))
		c.CloseWrite()
	}
	ends := []chan error{read(c), read(a)}
	go write(c)
	go write(a)
	for i, e := range ends {
		if err := recv(t, ctx, e, "the end"); err != nil {
			t.Errorf("direction %d: %v", i, err)
		}
	}
}

// TestUnknownSNI: a peer of the mesh that asks for a port the pod does not serve, or
// for none, is refused in the handshake.
func TestUnknownSNI(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	svid, err := w.SVID("shop", "stranger")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := svid.TLS()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, sni string
		alpn      []string
		served    bool
	}{
		{"a served port", "8080", []string{"h2"}, true},
		{"a raw port", "9000", nil, true},
		{"another port", "7777", []string{"h2"}, false},
		{"another port, raw", "7777", nil, false},
		{"the proxy's own", "18081", []string{"h2"}, false},
		{"no port", "", []string{"h2"}, false},
		{"a name", "app.shop.aether.internal", []string{"h2"}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := tls.Client(dial(t, ctx, w.out, netip.AddrPortFrom(w.Pod("app").IP4, 18008).String()), &tls.Config{
				Certificates: []tls.Certificate{cert}, ServerName: tt.sni, InsecureSkipVerify: true, NextProtos: tt.alpn, MinVersion: tls.VersionTLS13,
			})
			err := c.HandshakeContext(ctx)
			if (err == nil) != tt.served {
				t.Errorf("handshake: %v, must succeed: %v", err, tt.served)
			}
			if err == nil && len(tt.alpn) > 0 && c.ConnectionState().NegotiatedProtocol != "h2" {
				t.Errorf("ALPN %q", c.ConnectionState().NegotiatedProtocol)
			}
		})
	}
}
