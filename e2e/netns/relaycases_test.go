package netns

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// Public bug reports about relays and capture that need real sockets, by their numbers in docs/cases.md.

// TestCase76 (ztunnel 1483): a reset in the middle of an answer never looks like its end.
func TestCase76(t *testing.T) {
	t.Parallel()
	for _, by := range relayed {
		t.Run(by.name, func(t *testing.T) {
			t.Parallel()
			f := by.make(t, within(t, patience))
			say(t, f.server, "half an ans")
			expect(t, f.client, "half an ans")
			f.server.SetLinger(0)
			f.server.Close()
			expectReset(t, f.client)
		})
	}
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("HTTP, h2c %v", h2), func(t *testing.T) {
			t.Parallel()
			ctx := within(t, patience)
			path := w.raw.at(t, func(q rawRequest) {
				io.WriteString(q.c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\nhalf an ans\r\n")
				io.ReadFull(q.r, make([]byte, 1)) // until the client has it
				q.c.SetLinger(0)
				q.c.Close()
			})
			body, more := io.Pipe()
			defer more.Close()
			req, err := http.NewRequestWithContext(ctx, "POST", "http://app"+path, body)
			if err != nil {
				t.Fatal(err)
			}
			res, err := transport(t, h2, w.Pod("web"), vip(appVIP, portRaw)).RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			if _, err := io.ReadFull(res.Body, make([]byte, 11)); err != nil {
				t.Fatal(err)
			}
			go more.Write([]byte("x"))
			if b, err := io.ReadAll(res.Body); err == nil || len(b) > 0 {
				t.Errorf("after a reset by the application: %q, %v; want an error", b, err)
			}
		})
	}
}

// TestCase77 (ztunnel 1887): an end stays one, though bytes of the client's are read by nobody.
func TestCase77(t *testing.T) {
	t.Parallel()
	for _, by := range relayed {
		t.Run(by.name, func(t *testing.T) {
			t.Parallel()
			f := by.make(t, within(t, patience))
			say(t, f.client, strings.Repeat("unread", 1000))
			say(t, f.server, "good bye")
			f.server.CloseWrite()
			expectUntilEnd(t, f.client, "good bye")
		})
	}
}

// drop makes packets to that port vanish on their way into the space, until the test's end.
func drop(t *testing.T, ctx context.Context, s *rig.Space, port int) {
	t.Helper()
	table := unique("drop")
	nft := func(ctx context.Context, script string) {
		c := s.Command(ctx, "nft", "-f", "-")
		c.Stdin = strings.NewReader(script)
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("nft: %v: %s", err, out)
		}
	}
	nft(ctx, fmt.Sprintf("table inet %s { chain in { type filter hook input priority 0; tcp dport %d drop; }; }", table, port))
	t.Cleanup(func() { nft(context.Background(), "delete table inet "+table) })
}

// descriptors of the proxy of a node.
func descriptors(t *testing.T, node int) int {
	t.Helper()
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", w.Proxy(node).PID()))
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestCase81 (ztunnel 1629): connections to a peer that answers nothing leave no descriptor behind, outside
// the mesh and over the hop.
func TestCase81(t *testing.T) {
	ctx := within(t, 2*patience)
	drop(t, ctx, &w.out.Space, 18066)
	drop(t, ctx, &w.out.Space, 18008)
	addRow(t, ctx, "hole", "hole", "9000=tcp", w.out)
	write(t, ctx, "hole-service", rig.ServiceYAML(rig.ServiceManifest{Namespace: "shop", Name: "hole", ClusterIPs: w.ClusterIPs(94), Ports: []uint16{9000}}))
	for _, tt := range []struct{ name, addr string }{
		{"outside", netip.AddrPortFrom(w.out.IP4, 18066).String()},
		{"over the hop", vip(94, 9000)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			const n = 200
			before := descriptors(t, 0)
			var clients sync.WaitGroup
			var hung atomic.Int32
			for range n {
				clients.Go(func() {
					c, err := w.Pod("web").Dial(ctx, "tcp", tt.addr)
					if err != nil {
						return // as good a refusal as a reset
					}
					defer c.Close()
					deadline(ctx, c.(*net.TCPConn))
					io.WriteString(c, "\x00anybody there?\n")
					if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
						hung.Add(1)
					}
				})
			}
			most := before
			until := func(what func(now int) bool) {
				t.Helper()
				err := rig.Until(ctx, func(context.Context) error {
					now := descriptors(t, 0)
					most = max(most, now)
					if !what(now) {
						return fmt.Errorf("%d descriptors are open, %d were before", now, before)
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
			until(func(now int) bool { return now > before+n }) // a client's, and the proxy's own
			clients.Wait()
			if hung.Load() > 0 {
				t.Errorf("%d of %d clients were never told", hung.Load(), n)
			}
			until(func(now int) bool { return now <= before+5 })
			t.Logf("%d descriptors before, %d seen, %d after", before, most, descriptors(t, 0))
		})
	}
}

// TestCase85 (istio 12245): what changes elsewhere in the configuration ends no running connection.
func TestCase85(t *testing.T) {
	t.Parallel()
	ctx := within(t, 2*patience)
	var streams []foreign
	for _, by := range relayed {
		streams = append(streams, by.make(t, ctx))
	}
	begun, gate := make(chan struct{}), make(chan struct{})
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "first half, ")
		w.(http.Flusher).Flush()
		close(begun)
		<-gate
		io.WriteString(w, "second half")
	})
	got := make(chan *answer, 1)
	go func() {
		a, err := send(ctx, transport(t, true, w.Pod("web"), vip(appVIP, portH2)), "GET", "app", path, nil)
		if err != nil {
			t.Error(err)
		}
		got <- a
	}()
	recv(t, ctx, begun, "the request")
	route := func(parent, value string) string {
		return "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {namespace: shop, name: case85-" + parent + "}\n" +
			"spec:\n  parentRefs: [{group: \"\", kind: Service, name: " + parent + "}]\n" +
			"  rules: [{matches: [{path: {type: Exact, value: /case85}}], filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {set: [{name: x-case, value: " + value + "}]}}]}]\n"
	}
	for i, doc := range []string{route("mp-eighty", "one"), route("mp-eighty", "two"), route("app", "three"), "", rig.ServiceYAML(rig.ServiceManifest{Namespace: "shop", Name: "case85", Ports: []uint16{80}})} {
		if doc == "" {
			if err := w.Remove("case85"); err != nil {
				t.Fatal(err)
			}
			settle(t, ctx)
		} else {
			write(t, ctx, "case85", doc)
		}
		for _, f := range streams {
			say(t, f.client, fmt.Sprint("change ", i))
			expect(t, f.server, fmt.Sprint("change ", i))
			say(t, f.server, "seen")
			expect(t, f.client, "seen")
		}
	}
	close(gate)
	if a := recv(t, ctx, got, "the answer"); a != nil && a.body != "first half, second half" {
		t.Errorf("the request under way: %d %q", a.StatusCode, a.body)
	}
}

// ports leaves a pod so many ports of its own for connections that name none.
func ports(t *testing.T, ctx context.Context, p *rig.Pod, n int) {
	t.Helper()
	out, err := p.Command(ctx, "sysctl", "-w", fmt.Sprintf("net.ipv4.ip_local_port_range=20001 %d", 20000+n)).CombinedOutput()
	if err != nil {
		t.Fatalf("sysctl: %v: %s", err, out)
	}
}

// TestCase86 (istio 44008): a port of the pod serves for as many connections as there are destinations: the proxy's own
// take none from the client. When there is none left the client is told, and what runs goes on.
func TestCase86(t *testing.T) {
	t.Parallel()
	ctx := within(t, 2*patience)
	narrow := addPod(t, ctx, mesh.Pod{Name: "narrow"})
	const have = 64
	ports(t, ctx, narrow, have)
	open := func(addr string) (*net.TCPConn, error) {
		c, err := narrow.Dial(ctx, "tcp", addr)
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() { c.Close() })
		tcp := deadline(ctx, c.(*net.TCPConn))
		if _, err := io.WriteString(tcp, "\x00ask"); err != nil { // no letters: it cannot become a request line
			return nil, err
		}
		_, err = io.ReadFull(tcp, make([]byte, 4))
		return tcp, err
	}
	var hop []*net.TCPConn
	for i := range have - 4 {
		c, err := open(vip(appVIP, portEcho))
		if err != nil {
			t.Fatalf("connection %d over the hop, with %d ports: %v", i+1, have, err)
		}
		hop = append(hop, c)
	}
	// Outside, client and proxy dial the same address: half as many.
	l := listen(t, ctx, &w.out.Space, netip.AddrPortFrom(w.out.IP4, 0).String())
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { echo(c.(*net.TCPConn)); c.Close() }()
		}
	}()
	var out []*net.TCPConn
	var err error
	for len(out) <= have {
		var c *net.TCPConn
		if c, err = open(l.Addr().String()); err != nil {
			break
		}
		out = append(out, c)
	}
	if len(out) < have/2-4 || len(out) > have {
		t.Errorf("%d connections outside the mesh with %d ports", len(out), have)
	}
	if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EADDRNOTAVAIL) && !errors.Is(err, syscall.EPIPE) && err != io.EOF {
		t.Errorf("with no port left: %v; want the connection refused", err)
	}
	t.Logf("%d over the hop, %d outside, then: %v", len(hop), len(out), err)
	for _, c := range slices.Concat(hop, out) {
		say(t, c, "still there?")
		expect(t, c, "still there?")
	}
}

// TestCase87 (cilium 36427): one port of the client's towards several services, which are one pod, and towards others.
func TestCase87(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	web := w.Pod("web")
	outside := bannerServer(t, ctx, w.out.IP4)
	const port = 1987 // below those that are given out
	from := func(addr string) net.Conn {
		var c net.Conn
		err := web.Do(func() (err error) {
			d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(web.IP4, port)), Control: func(_, _ string, c syscall.RawConn) error {
				return c.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
			}}
			c, err = d.DialContext(ctx, "tcp", addr)
			return err
		})
		if err != nil {
			t.Fatalf("from port %d to %s: %v", port, addr, err)
		}
		t.Cleanup(func() { c.(*net.TCPConn).SetLinger(0); c.Close() })
		return deadline(ctx, c.(*net.TCPConn))
	}
	app, banner, other, far := from(vip(appVIP, portEcho)), from(vip(appVIP, portBanner)), from(vip(firstVIP+3, 9000)), from(outside)
	expect(t, banner, "banner\n")
	expect(t, other, "mp-mixed:9000 tcp\n")
	expect(t, far, "220 ready\r\n")
	for i, c := range []net.Conn{app, banner, other, far} {
		say(t, c, fmt.Sprint("connection ", i))
		expect(t, c, fmt.Sprint("connection ", i))
	}
}

// TestCase88 (istio 52622): under TPROXY a pod is reached by itself, its node's probe, a client with a node's network and other
// pods, once each; and its capture port is no address.
func TestCase88(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	web, app := w.Pod("web"), w.Pod("app")
	for _, ip := range web.IPs() {
		l := listen(t, ctx, &web.Space, netip.AddrPortFrom(ip, 0).String())
		at := l.Addr().String()
		for _, from := range []struct {
			name string
			at   *rig.Space
			ip   netip.Addr
		}{
			{"the node, as the kubelet", &w.Rig.Nodes[0].Space, netip.Addr{}},
			{"another node, as a pod with its network", &w.Rig.Nodes[1].Space, netip.Addr{}},
			{"a pod outside the mesh", &w.out.Space, netip.Addr{}},
			{"a captured pod", &app.Space, app.IP4},
			{"the pod itself", &web.Space, ip},
		} {
			t.Run(fmt.Sprintf("%s to %v", from.name, ip), func(t *testing.T) {
				c, err := from.at.Dial(ctx, "tcp", at)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				deadline(ctx, c.(*net.TCPConn))
				say(t, c, "\x00probe")
				s := acceptOne(t, ctx, l)
				expect(t, s, "\x00probe")
				say(t, s, "alive")
				expect(t, c, "alive")
				if seen := mapped(s.RemoteAddr()).Addr(); from.ip == ip && seen != ip {
					t.Errorf("the pod's own call comes from %v", seen)
				}
				s.Close()
				expectEnd(t, c)
			})
		}
		// Nothing more came than what was sent.
		l.(*net.TCPListener).SetDeadline(deadlineNow)
		if c, err := l.Accept(); err == nil {
			t.Errorf("%v connected once more", c.RemoteAddr())
		}
	}
	expectRefused(t, ctx, web, netip.AddrPortFrom(web.IP4, 18001).String(), "GET / HTTP/1.1\r\nHost: app\r\n\r\n")
}

// TestCase90 (istio 31095): a pod that calls itself is answered once, by its address without the mesh, by its Service over it.
func TestCase90(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	app := w.Pod("app")
	const port = 8086 // of those that the rig keeps for servers
	var calls atomic.Int32
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		fmt.Fprint(w, r.Header.Get("X-Forwarded-Client-Cert"))
	})
	own := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "own, %d", calls.Add(1)) })
	if err := w.ServeHTTP(ctx, &app.Space, netip.AddrPortFrom(app.IP4, port).String(), own); err != nil {
		t.Fatal(err)
	}
	// By its own address: no mesh name, no hop, one call.
	a := mustSend(t, ctx, transport(t, false, app, netip.AddrPortFrom(app.IP4, port).String()), "GET", fmt.Sprintf("%v:%d", app.IP4, port), "/", nil)
	if a.body != "own, 1" {
		t.Errorf("by its address: %d %q after %d calls", a.StatusCode, a.body, calls.Load())
	}
	// By its own Service: over the hop, as itself, one call.
	for i, h2 := range []bool{false, true} {
		a = mustSend(t, ctx, transport(t, h2, app, vip(appVIP, portH1)), "GET", appName+":8080", path, nil)
		if a.StatusCode != 200 || strings.Count(a.body, "URI=spiffe://rig.test/ns/shop/sa/app") != 1 || int(calls.Load()) != i+2 {
			t.Errorf("by its Service: %d %q after %d calls", a.StatusCode, a.body, calls.Load())
		}
	}
}

// TestCase91 (istio 36566): packets outside the window, and a reset that guesses, end neither half of a captured connection.
func TestCase91(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	for _, by := range relayed {
		t.Run(by.name, func(t *testing.T) {
			f := by.make(t, ctx)
			client := mapped(f.client.LocalAddr())
			dialled := mapped(f.client.RemoteAddr())
			at := []struct{ src, dst netip.AddrPort }{{dialled, client}} // to the client's own socket
			if by.name == "outside" {
				at = append(at, struct{ src, dst netip.AddrPort }{mapped(f.server.LocalAddr()), mapped(f.server.RemoteAddr())}) // to the proxy's
			}
			for _, a := range at {
				for _, rst := range []bool{false, true} {
					for range 20 {
						inject(t, &w.out.Space, a.src, a.dst, rst)
					}
				}
			}
			say(t, f.client, "still there?")
			expect(t, f.server, "still there?")
			say(t, f.server, "yes")
			expect(t, f.client, "yes")
			f.client.Close()
			expectEnd(t, f.server)
		})
	}
}

// inject sends a segment of a connection with a random sequence number, from a space that is neither end's.
func inject(t *testing.T, s *rig.Space, src, dst netip.AddrPort, rst bool) {
	t.Helper()
	const psh, flagRST, ack = 0x08, 0x04, 0x10
	flags, data := byte(ack|psh), bytes.Repeat([]byte("late"), 25)
	if rst {
		flags, data = flagRST, nil
	}
	be := binary.BigEndian
	tcp := be.AppendUint16(be.AppendUint16(nil, src.Port()), dst.Port())
	tcp = be.AppendUint32(be.AppendUint32(tcp, rand.Uint32()), rand.Uint32()) // sequence, acknowledgement
	tcp = append(tcp, 5<<4, flags, 2, 0, 0, 0, 0, 0)                          // header of 20 bytes, a window, no checksum yet
	tcp = append(tcp, data...)
	be.PutUint16(tcp[16:], checksum(src.Addr(), dst.Addr(), tcp))
	ip := append([]byte{4<<4 | 5, 0, 0, 0, 0, 0, 0, 0, 64, unix.IPPROTO_TCP, 0, 0}, src.Addr().AsSlice()...) // the kernel fills in the rest
	packet := slices.Concat(ip, dst.Addr().AsSlice(), tcp)
	err := s.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: dst.Addr().As4()})
	})
	if err != nil {
		t.Fatal(err)
	}
}

// checksum of a segment with its pseudo-header (RFC 9293 section 3.1).
func checksum(src, dst netip.Addr, segment []byte) uint16 {
	b := slices.Concat(src.AsSlice(), dst.AsSlice(), []byte{0, unix.IPPROTO_TCP, byte(len(segment) >> 8), byte(len(segment))}, segment)
	if len(b)%2 == 1 {
		b = append(b, 0)
	}
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
