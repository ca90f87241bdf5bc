package dataplane_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"aether/dataplane/inbound"
	"aether/dataplane/outbound"
	"aether/meshhop"
	"aether/mtls/record"
	"aether/mtls/spiffeid"
)

// clientHello is what a source sends first, as it stands on the wire.
func clientHello(t *testing.T) []byte {
	t.Helper()
	ours, theirs := net.Pipe()
	heard := make(chan []byte, 1)
	go func() {
		b := make([]byte, 16<<10)
		n, _ := io.ReadAtLeast(theirs, b, 5)
		for n < 5+int(b[3])<<8+int(b[4]) {
			k, err := theirs.Read(b[n:])
			if n += k; err != nil {
				break
			}
		}
		theirs.Close()
		heard <- b[:n]
	}()
	_ = tls.Client(ours, &tls.Config{InsecureSkipVerify: true, ServerName: "8080", NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13}).Handshake()
	ours.Close()
	b := <-heard
	if len(b) < 200 || b[0] != 22 {
		t.Fatalf("no ClientHello: %d bytes", len(b))
	}
	return b
}

// fresh shakes hands n times with the pod at addr, as container, one after the other, and returns how many did
// so. from is the address to dial from.
func (w *town) fresh(n int, container, from, at, pin string) (good int, last error) {
	id, err := spiffeid.Parse("spiffe://td/ns/shop/sa/" + pin)
	if err != nil {
		w.t.Fatal(err)
	}
	d := meshhop.Dialer{SVID: w.svid, Maker: record.Own, Sockets: func(ctx context.Context, _ string, a netip.AddrPort) (*net.TCPConn, error) {
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).DialContext(ctx, "tcp", a.String())
		if err != nil {
			return nil, err
		}
		return c.(*net.TCPConn), nil
	}}
	for range n {
		s, err := d.Dial(w.ctx, meshhop.Key{Pod: container, Source: w.svid(container).ID, Endpoint: netip.MustParseAddrPort(at), SNI: "8080", Proto: meshhop.H2, Pin: id})
		if err == nil {
			// The destination judges us after our end has shaken hands: its SETTINGS say that it took us.
			_ = s.Conn.SetReadDeadline(time.Now().Add(5 * time.Second))
			_, err = s.Conn.Read(make([]byte, 1))
			s.Conn.Close()
		}
		if err != nil {
			last = err
			continue
		}
		good++
	}
	return good, last
}

// TestSilentCallers: whoever reaches the mesh port, without a certificate, and never ends a handshake, keeps nobody
// else's from being made: neither at the pod that he connects to nor at another of the node.
func TestSilentCallers(t *testing.T) {
	hello := clientHello(t)
	for name, said := range map[string][]byte{
		"silence":             nil,
		"one byte":            hello[:1],
		"half a ClientHello":  hello[:len(hello)/2],
		"all but a byte":      hello[:len(hello)-1],
		"ClientHello no more": hello,
	} {
		for _, victims := range []int{1, 4} {
			t.Run(fmt.Sprintf("%s at %d", name, victims), func(t *testing.T) {
				t.Parallel()
				w := newTown(t, func(o *outbound.Config, i *inbound.Config) {
					i.Acceptor = &meshhop.Acceptor{Limit: meshhop.NewLimiter(meshhop.LimiterConfig{}), Maker: record.Own}
				})
				w.pod("web", "web", "web", "127.1.0.9")
				mesh := "local shop/web cid=web\n"
				var at []string
				for i := range victims + 1 {
					w.pod(fmt.Sprint("cart", i), "cart", "cart", fmt.Sprint("127.1.0.", i+1))
					at = append(at, w.hops[netip.MustParseAddr(fmt.Sprint("127.1.0.", i+1))])
					mesh += fmt.Sprintf("local shop/cart 8080 cid=cart%d\n", i)
				}
				w.apply(mesh)
				to := at[0]
				if victims > 1 {
					to = at[victims] // nobody floods it
				}
				ctx, stop := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				defer wg.Wait()
				defer stop()
				crowded := make(chan struct{})
				for i := range victims {
					wg.Go(func() {
						every := time.NewTicker(time.Second / 80)
						defer every.Stop()
						for n := 0; ctx.Err() == nil; n++ {
							c, err := net.Dial("tcp", at[i])
							if err != nil {
								t.Error(err)
								return
							}
							defer c.Close()
							if _, err := c.Write(said); err != nil {
								t.Error(err)
							}
							if i == 0 && n == 350 {
								close(crowded)
							}
							<-every.C
						}
					})
				}
				<-crowded
				// From the very address of the flood: what comes from elsewhere is better off.
				if good, err := w.fresh(20, "web", "127.0.0.1", to, "cart"); good != 20 {
					t.Errorf("%d of 20 fresh hops are made: %v", good, err)
				}
			})
		}
	}
}

// TestCrowdOfHellos: a crowd of callers at once, of one address, that say a ClientHello and nothing more, takes no turn of
// those who come from another.
func TestCrowdOfHellos(t *testing.T) {
	hello := clientHello(t)
	w := newTown(t, func(o *outbound.Config, i *inbound.Config) {
		i.Acceptor = &meshhop.Acceptor{Limit: meshhop.NewLimiter(meshhop.LimiterConfig{}), Maker: record.Own}
	})
	w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart", "cart", "cart", "127.1.0.1")
	w.apply("local shop/web cid=web\nlocal shop/cart 8080 cid=cart\n")
	at := w.hops[netip.MustParseAddr("127.1.0.1")]
	for range 400 {
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write(hello); err != nil {
			t.Fatal(err)
		}
	}
	if good, err := w.fresh(20, "web", "127.0.0.2", at, "cart"); good != 20 {
		t.Errorf("%d of 20 fresh hops are made: %v", good, err)
	}
}

// TestSilentConnectionsOfAnAddress: of one address so many connections to a pod may be silent; then the oldest of them makes
// room, and nobody else's.
func TestSilentConnectionsOfAnAddress(t *testing.T) {
	const most = 64 // of an address
	w := newTown(t, func(o *outbound.Config, i *inbound.Config) {
		i.Acceptor = &meshhop.Acceptor{Limit: meshhop.NewLimiter(meshhop.LimiterConfig{}), Maker: record.Own}
	})
	w.pod("cart", "cart", "cart", "127.1.0.1")
	w.apply("local shop/cart 8080 cid=cart\n")
	at := w.hops[netip.MustParseAddr("127.1.0.1")]
	const patience = 2 * time.Second // that each has
	type caller struct {
		net.Conn
		since time.Time
	}
	dial := func(from string) caller {
		since := time.Now()
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).DialContext(t.Context(), "tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return caller{c, since}
	}
	other := dial("127.0.0.3")
	var conns []caller
	for range most + 1 {
		conns = append(conns, dial("127.0.0.2"))
	}
	took := time.Since(conns[0].since)
	_ = conns[0].SetReadDeadline(time.Now().Add(10 * time.Second))
	_, err := conns[0].Read(make([]byte, 1))
	if !errors.Is(err, io.EOF) || time.Since(conns[0].since) >= patience && took < patience/2 { // else the machine is too busy to tell
		t.Fatalf("the oldest of %d: %v after %v", len(conns), err, time.Since(conns[0].since))
	}
	for i, c := range append(conns[1:], other) {
		_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) && time.Since(c.since) < patience {
			t.Errorf("connection %d: %v", i+1, err)
		}
	}
}

// TestHelloInPieces: a ClientHello is taken however it is cut, in one record or in several, and whoever ends it is
// told nothing more.
func TestHelloInPieces(t *testing.T) {
	w := newTown(t, func(o *outbound.Config, i *inbound.Config) {
		i.Acceptor = &meshhop.Acceptor{Limit: meshhop.NewLimiter(meshhop.LimiterConfig{})}
	})
	w.pod("cart", "cart", "cart", "127.1.0.1")
	w.apply("local shop/cart 8080 cid=cart\n")
	at := w.hops[netip.MustParseAddr("127.1.0.1")]
	hello := clientHello(t)
	var records []byte
	for body := hello[5:]; len(body) > 0; {
		n := min(len(body), 300)
		records = append(append(records, 22, 3, 1, byte(n>>8), byte(n)), body[:n]...)
		body = body[n:]
	}
	for name, tt := range map[string]struct {
		wire []byte
		cut  int
	}{
		"single bytes":                 {hello, 1},
		"segments":                     {hello, 500},
		"several records":              {records, len(records)},
		"several records, single byte": {records, 1},
		"with something behind":        {append(bytes.Clone(hello), 20, 3, 3, 0, 1, 1), 100},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := net.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			for b := tt.wire; len(b) > 0; b = b[min(tt.cut, len(b)):] {
				if _, err := c.Write(b[:min(tt.cut, len(b))]); err != nil {
					t.Fatal(err)
				}
			}
			_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
			got := make([]byte, 6)
			if _, err := io.ReadFull(c, got); err != nil || got[0] != 22 || got[5] != 2 {
				t.Errorf("%x, %v, want a ServerHello", got, err)
			}
		})
	}
	t.Run("an end in the middle", func(t *testing.T) {
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write(hello[:len(hello)-1]); err != nil {
			t.Fatal(err)
		}
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d bytes, %v, want the end", n, err)
		}
	})
}
