package netns

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
	"os"
	"regexp"
	"strconv"
	"sync"
	"syscall"
	"testing"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// relayCount is how many relays TestOpenRelays opens: `make relays` asks for 6,000.
func relayCount(t *testing.T) int {
	t.Helper()
	const few = 1500
	s := os.Getenv("AETHER_RELAYS")
	if s == "" {
		return few
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("AETHER_RELAYS=%q is no number of relays", s)
	}
	return n
}

// proxyUse is what a proxy holds.
type proxyUse struct {
	descriptors, goroutines int
	memory                  int // bytes of the Go heap and stacks, garbage collected
	rss                     int64
}

var (
	goroutinesLine = regexp.MustCompile(`(?m)^go_goroutines (\S+)$`)
	memoryLine     = regexp.MustCompile(`(?m)^# (?:HeapInuse = (\d+)|Stack = (\d+) / \d+)$`)
)

func useOf(t *testing.T, ctx context.Context, node int) (u proxyUse) {
	t.Helper()
	get := func(path string) []byte {
		b, err := w.Admin(ctx, node, path)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, m := range memoryLine.FindAllSubmatch(get("/debug/pprof/heap?gc=1&debug=1"), -1) {
		n, _ := strconv.Atoi(string(m[1]) + string(m[2])) // one of them is empty
		u.memory += n
	}
	if m := goroutinesLine.FindSubmatch(get("/metrics")); m != nil {
		n, _ := strconv.ParseFloat(string(m[1]), 64)
		u.goroutines = int(n)
	}
	if u.memory == 0 || u.goroutines == 0 {
		t.Fatalf("the proxy of node%d does not say what it holds: %+v", node+1, u)
	}
	u.descriptors = descriptors(t, node)
	var err error
	if u.rss, err = w.Proxy(node).RSS(); err != nil {
		t.Fatal(err)
	}
	return u
}

// TestOpenRelays: thousands of open relays of the hop, each used in both directions and then idle, hold two descriptors and
// two goroutines each in either proxy, no buffer, and nothing once they have ended, however they end.
func TestOpenRelays(t *testing.T) {
	n := relayCount(t)
	ctx := within(t, 10*patience)
	const port = portQueue // nobody else's now: tests of back pressure run later
	const each = 1000      // relays of a pod
	from := []*rig.Pod{w.Pod("web")}
	for len(from)*each < n {
		from = append(from, addPod(t, ctx, mesh.Pod{Name: fmt.Sprint("relays", len(from)), Node: 0}))
	}
	var before, open [2]proxyUse
	for i := range before {
		before[i] = useOf(t, ctx, i)
	}
	type relay struct{ client, server *net.TCPConn }
	var mu sync.Mutex
	relays := map[uint32]*relay{}
	at := func(id uint32) *relay { // under mu
		if relays[id] == nil {
			relays[id] = &relay{}
		}
		return relays[id]
	}
	app := make(chan error, n)
	over := make(chan struct{}) // until then the application's connections are the test's
	defer close(over)
	go func() {
		for range n {
			select {
			case s := <-queues[0].c:
				go func() {
					deadline(ctx, s.TCPConn)
					var id [4]byte
					_, err := io.ReadFull(s, id[:])
					if err == nil {
						_, err = s.Write(bytes.Repeat(id[:], 5000)) // more than a small buffer
					}
					mu.Lock()
					at(binary.BigEndian.Uint32(id[:])).server = s.TCPConn
					mu.Unlock()
					app <- err
					<-over
					close(s.done)
				}()
			case <-ctx.Done():
				app <- ctx.Err()
			}
		}
	}()
	ids := make(chan uint32)
	var clients sync.WaitGroup
	for range 16 {
		clients.Go(func() {
			for i := range ids {
				// One pod may have so many to one destination (contract 5.6); here are more of them.
				c, err := from[int(i)*len(from)/n].Dial(ctx, "tcp", vip(appVIP, port))
				if err != nil {
					t.Errorf("relay %d: %v", i, err)
					continue
				}
				tcp := deadline(ctx, c.(*net.TCPConn))
				mu.Lock()
				at(i).client = tcp
				mu.Unlock()
				id := binary.BigEndian.AppendUint32(nil, i)
				tcp.Write(id)
				got := make([]byte, 20000)
				if _, err := io.ReadFull(tcp, got); err != nil || !bytes.Equal(got, bytes.Repeat(id, 5000)) {
					t.Errorf("relay %d: other bytes came back, %v", i, err)
				}
			}
		})
	}
	for i := range uint32(n) {
		ids <- i
	}
	close(ids)
	clients.Wait()
	defer func() {
		for _, r := range relays {
			for _, c := range []*net.TCPConn{r.client, r.server} {
				if c != nil {
					c.Close()
				}
			}
		}
	}()
	for range n {
		if err := <-app; err != nil {
			t.Fatal(err)
		}
	}

	const slack = 30 // what else a proxy opens and closes meanwhile
	for i := range open {
		open[i] = useOf(t, ctx, i)
		fds, gos := open[i].descriptors-before[i].descriptors, open[i].goroutines-before[i].goroutines
		if fds < 2*n-slack || fds > 2*n+slack {
			t.Errorf("node%d: %d relays hold %d descriptors, want two each", i+1, n, fds)
		}
		if gos < 2*n-slack || gos > 2*n+slack {
			t.Errorf("node%d: %d relays hold %d goroutines, want two each", i+1, n, gos)
		}
		held := (open[i].memory - before[i].memory) / n
		t.Logf("node%d: %d relays; each %d bytes of heap and stack, %d of resident memory", i+1, n, held, (open[i].rss-before[i].rss)/int64(n))
		most := 20 << 10
		if raceEnabled { // its stacks are larger
			most = 24 << 10
		}
		if held > most {
			t.Errorf("node%d: an idle relay holds %d bytes of heap and stack, at most %d are allowed", i+1, held, most)
		}
	}

	for i, r := range relays { // each in one of the ways in which a connection ends
		switch i % 4 {
		case 0:
			r.client.Close()
		case 1:
			r.server.CloseWrite()
			r.client.CloseWrite()
		case 2:
			r.client.SetLinger(0)
			r.client.Close()
		case 3:
			r.server.SetLinger(0)
			r.server.Close()
		}
	}
	for i, r := range relays {
		switch i % 4 {
		case 0:
			expectEnd(t, r.server)
			r.server.Close()
		case 1:
			expectEnd(t, r.client)
			expectEnd(t, r.server)
		case 2:
			expectReset(t, r.server)
		case 3:
			expectReset(t, r.client)
		}
	}
	for i := range before {
		err := rig.Until(ctx, func(context.Context) error {
			now := useOf(t, ctx, i)
			if now.descriptors > before[i].descriptors+slack || now.goroutines > before[i].goroutines+slack {
				return fmt.Errorf("node%d: %d descriptors and %d goroutines are left, %d and %d were before",
					i+1, now.descriptors, now.goroutines, before[i].descriptors, before[i].goroutines)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// TestNothingSaid: connections on which one side, or both, never say a byte.
func TestNothingSaid(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	l := listen(t, ctx, &w.out.Space, w.out.IP4.String()+":0")
	for _, by := range []struct {
		name, addr string
		accept     func() *net.TCPConn
	}{
		{"over the hop", vip(appVIP, portQueue+2), func() *net.TCPConn { return queues[2].accept(t, ctx) }},
		{"outside", l.Addr().String(), func() *net.TCPConn { return acceptOne(t, ctx, l) }},
	} {
		open := func(t *testing.T) (client, server *net.TCPConn) {
			oneByOne.Lock()
			defer oneByOne.Unlock()
			return dial(t, ctx, w.Pod("web"), by.addr), by.accept()
		}
		t.Run(by.name, func(t *testing.T) {
			c, s := open(t)
			c.CloseWrite()
			expectEnd(t, s)
			say(t, s, "heard nothing")
			s.CloseWrite()
			expectUntilEnd(t, c, "heard nothing")

			c, s = open(t)
			s.CloseWrite()
			expectEnd(t, c)
			say(t, c, "heard nothing")
			c.CloseWrite()
			expectUntilEnd(t, s, "heard nothing")

			c, s = open(t)
			c.CloseWrite()
			s.CloseWrite()
			expectEnd(t, c)
			expectEnd(t, s)

			c, s = open(t)
			c.SetLinger(0)
			c.Close()
			expectReset(t, s)

			for range 20 { // mostly before anybody has looked whether the server was reached
				c, s = open(t)
				s.SetLinger(0)
				s.Close()
				expectReset(t, c)
			}
		})
	}
}

// TestLinger: an application that closes while bytes for it lie unread resets its connection (RFC 2525 2.17), and the
// client is told so, after every byte of the answer that was read before.
func TestLinger(t *testing.T) {
	t.Parallel()
	for _, by := range relayed {
		t.Run(by.name, func(t *testing.T) {
			t.Parallel()
			f := by.make(t, within(t, patience))
			say(t, f.server, "the answer")
			expect(t, f.client, "the answer")
			say(t, f.client, "unread")
			raw, err := f.server.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			raw.Read(func(fd uintptr) bool { // until the bytes are there
				_, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK)
				return err != syscall.EAGAIN
			})
			f.server.Close()
			expectReset(t, f.client)
		})
	}
}

// hashed is a connection that sums what its user reads and writes.
type hashed struct {
	net.Conn
	in, out hash.Hash
}

func (h *hashed) Read(b []byte) (int, error) {
	n, err := h.Conn.Read(b)
	h.in.Write(b[:n])
	return n, err
}

func (h *hashed) Write(b []byte) (int, error) {
	n, err := h.Conn.Write(b)
	h.out.Write(b[:n])
	return n, err
}

// TestTLSInsideMTLS: an application's own TLS, sent by its SNI to a service by a TLSRoute, arrives byte for byte: the
// sockets of client and server have seen the same, to the last alert.
func TestTLSInsideMTLS(t *testing.T) {
	t.Parallel()
	ctx := within(t, 2*patience)
	tlsPort.Lock()
	t.Cleanup(tlsPort.Unlock)
	write(t, ctx, "tlsinside", `apiVersion: gateway.networking.k8s.io/v1
kind: TLSRoute
metadata: {namespace: shop, name: tlsinside}
spec:
  parentRefs: [{group: "", kind: Service, name: mp-tcpfirst}]
  hostnames: [inside.secure.example]
  rules: [{backendRefs: [{name: app, port: 9006}]}]
`)
	svid, err := w.SVID("elsewhere", "server")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := svid.TLS()
	if err != nil {
		t.Fatal(err)
	}
	first, l := legNamed("mp-tcpfirst")
	near := &hashed{dial(t, ctx, w.Pod("web"), vip(first, l.tcp[0])), sha256.New(), sha256.New()}
	c := tls.Client(near, &tls.Config{ServerName: "inside.secure.example", InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	shaken := make(chan error, 1)
	go func() { shaken <- c.HandshakeContext(ctx) }()
	far := &hashed{queues[4].accept(t, ctx), sha256.New(), sha256.New()}
	s := tls.Server(far, &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2"}})
	if err := errors.Join(s.HandshakeContext(ctx), recv(t, ctx, shaken, "the handshake")); err != nil {
		t.Fatal(err)
	}
	if got := c.ConnectionState(); !got.PeerCertificates[0].Equal(cert.Leaf) || got.NegotiatedProtocol != "h2" {
		t.Errorf("another server shook hands, with %q", got.NegotiatedProtocol)
	}
	const size = 8 << 20
	ends := make(chan error, 4)
	for _, e := range []*tls.Conn{c, s} {
		go func() {
			_, err := io.Copy(e, newPattern(size))
			ends <- errors.Join(err, e.CloseWrite())
		}()
		go func() {
			h := sha256.New()
			n, err := io.Copy(h, e)
			if n != size || sum(h) != sumOf(size) {
				err = fmt.Errorf("%d bytes came, not the same: %w", n, err)
			}
			ends <- err
		}()
	}
	for range cap(ends) {
		if err := recv(t, ctx, ends, "an end of the TLS stream"); err != nil {
			t.Error(err)
		}
	}
	near.Conn.(*net.TCPConn).CloseWrite()
	far.Conn.(*net.TCPConn).CloseWrite()
	for _, e := range []*hashed{near, far} {
		if n, err := io.Copy(io.Discard, e); n > 0 || err != nil {
			t.Errorf("%d bytes after the end, %v", n, err)
		}
	}
	if sum(near.out) != sum(far.in) || sum(far.out) != sum(near.in) {
		t.Error("the bytes on the two sockets are not the same")
	}
}
