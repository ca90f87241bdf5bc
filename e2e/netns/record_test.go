package netns

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"
)

// inspection is how long upstream's listener looks at a connection before it goes on with what it has (contract 4.2),
// and ours where a silent client is nobody's in particular.
const inspection = time.Second

// standIn listens at addresses that pod out has: each connection is told where it came to, at once or
// after its first bytes, and echoed.
func standIn(t *testing.T, ctx context.Context, first bool, addrs ...string) {
	t.Helper()
	for _, addr := range addrs {
		l := listen(t, ctx, &w.out.Space, addr)
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					deadline(ctx, c.(*net.TCPConn))
					b := make([]byte, 4<<10)
					n := 0
					if !first {
						if n, err = c.Read(b); err != nil {
							return
						}
					}
					fmt.Fprintf(c, "passed to %s\n", addr)
					c.Write(b[:n])
					io.Copy(c, c)
				}()
			}
		}()
	}
}

// TestRecordTables are the tables L1 to L3 of the design record, and its table of server-first protocols: what was
// measured of upstream stands beside what ours answers and how soon. e2e/peer runs the same through Envoy.
func TestRecordTables(t *testing.T) {
	ctx := within(t, 3*patience)
	multi, _ := legNamed("mp-multi")
	nine, _ := legNamed("mp-nine")
	mixed, _ := legNamed("mp-mixed")
	only, _ := legNamed("mp-httponly")
	standIn(t, ctx, false, vip(multi, 8080), vip(multi, 7777), vip(nine, 9000))
	standIn(t, ctx, true, vip(only, 7777))
	outside := bannerServer(t, ctx, w.out.IP4)
	const (
		soon    = inspection / 2
		another = "another service declares it raw"
	)
	get := func(host string) string { return "GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n" }
	for _, tt := range []struct {
		name     string
		to, says string
		upstream string // measured by the record, by layout, with the time to the first byte
		want     string // the first line that comes back
		after    time.Duration
		within   time.Duration
	}{
		{"HTTP to an HTTP port", vip(multi, 8080), get("mp-multi"),
			"L1 the HCM, L2 table 8080; 1 ms", "HTTP/1.1 200 OK", 0, soon},
		{"HTTP to an HTTP port, its number in Host", vip(multi, 8080), get("mp-multi:8080"),
			"L2 table 8080; 1 ms", "HTTP/1.1 200 OK", 0, soon},
		{"HTTP to an HTTP port, " + another, vip(nine, 9000), get("mp-nine"),
			"L1 the passthrough: outside the mesh; L2 table 9000; 1 ms", "HTTP/1.1 200 OK", 0, soon},
		{"HTTP to an HTTP port, another number in Host", vip(multi, 8080), get("mp-multi:9000"),
			"L2 table 8080's 421; 1 ms", "HTTP/1.1 421 Misdirected Request", 0, soon},
		{"bytes to a raw port", vip(mixed, 9000), "\x00bytes",
			"L1, L2 the TCP chain; 2 ms", "mp-mixed:9000 tcp", 0, soon},
		{"HTTP to a raw port", vip(mixed, 9000), get("mp-mixed:9000"),
			"L1, L2 the TCP chain; 2 ms", "mp-mixed:9000 tcp", 0, soon},
		{"bytes to an HTTP port", vip(nine, 9000), "\x00bytes",
			"L2 the passthrough; 2 ms", "passed to " + vip(nine, 9000), 0, soon},
		{"HTTP to an undeclared port", vip(multi, 7777), get("mp-multi"),
			"L2 the port-less HCM; 1 ms", "HTTP/1.1 421 Misdirected Request", 0, soon},
		{"h2c to an HTTP port", vip(multi, 8080), h2preface,
			"L2 table 8080 with SETTINGS; 1 ms", "SETTINGS", 0, soon},
		{"a ClientHello to an HTTP port", vip(multi, 8080), string(clientHello(sni("mp-multi.shop.aether.internal"))),
			"L2 the passthrough", "passed to " + vip(multi, 8080), 0, soon},
		{"GET mykey to an HTTP port", vip(multi, 8080), "GET mykey\r\n",
			"L2 the passthrough, not detected as HTTP; 1 ms", "HTTP/1.1 400 Bad Request", 0, soon}, // decision 042
		{"server first on a raw port", vip(appVIP, portBanner), "",
			"1.00 s; with the inspectors off for the number 1 ms", "banner", 0, 200 * time.Millisecond},
		{"server first on a raw port, HTTP elsewhere", vip(mixed, 9000), "",
			"1.00 s", "mp-mixed:9000 tcp", 0, 200 * time.Millisecond},
		{"server first outside the mesh", outside, "",
			"1.00 s, in every layout", "220 ready", 0, soon},
		{"4 bytes to a raw port", vip(mixed, 9000), "QUIT",
			"1.00 s", "mp-mixed:9000 tcp", 0, soon},
		{"4 bytes outside the mesh", outside, "QUIT", // they may become a request line, but its server would not speak first
			"not measured", "220 ready", 0, soon},
		{"silence on a mesh address, no HTTP port", vip(only, 7777), "",
			"not measured", "passed to " + vip(only, 7777), inspection, 3 * inspection},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx := within(t, tt.within)
			start := time.Now()
			c := dial(t, ctx, w.Pod("web"), tt.to)
			say(t, c, tt.says)
			got, err := firstLine(bufio.NewReader(c))
			if got != tt.want {
				t.Errorf("got %q (%v) after %v, want %q within %v; upstream: %s", got, err, time.Since(start), tt.want, tt.within, tt.upstream)
			}
			if took := time.Since(start); took < tt.after {
				t.Errorf("took %v, must wait for the client at least %v", took, tt.after)
			}
		})
	}

	// Upstream: 1.00 s, then the passthrough. Ours keeps the connection: the request that comes late has
	// policy and identity like any other (docs/decisions/002).
	t.Run("silence on an HTTP port", func(t *testing.T) {
		l := listen(t, ctx, &w.out.Space, vip(only, 8080))
		passed := make(chan struct{})
		go func() {
			if c, err := l.Accept(); err == nil {
				c.Close()
				close(passed)
			}
		}()
		c := dial(t, ctx, w.Pod("web"), vip(only, 8080))
		c.SetReadDeadline(time.Now().Add(3 * inspection / 2))
		if b, err := io.ReadAll(c); len(b) > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("a silent client got %q, %v; want the connection to stay", b, err)
		}
		select {
		case <-passed:
			t.Error("the silent connection was passed through")
		default:
		}
		deadline(within(t, soon), c)
		say(t, c, get("mp-httponly"))
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || res.StatusCode != 200 {
			t.Errorf("the late request: %v, %v, want 200", res, err)
		}
	})
}

// firstLine reads the first line that a server says, "SETTINGS" for that frame of HTTP/2.
func firstLine(r *bufio.Reader) (string, error) {
	if b, err := r.Peek(1); err == nil && b[0] == 0 { // no line: the length of a frame
		if b, err = r.Peek(9); err == nil && b[3] == 4 && b[4] == 0 {
			return "SETTINGS", nil
		}
	}
	line, err := r.ReadString('\n')
	return strings.TrimRight(line, "\r\n"), err
}

// deadlineNow is one that has passed.
var deadlineNow = time.Unix(1, 0)

// mapped is an address as a socket of both families tells it.
func mapped(a net.Addr) netip.AddrPort {
	p := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
}
