package dataplane_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"aether/e2e/testseed"
	"aether/meshhop"
)

// TestSessionOutlivesCertificates: a raw connection, an upgrade and a stream of gRPC outlive several lives of the certificates
// of both ends, if both renew them, and no byte of theirs is lost; if one end does not, they end with what it has.
func TestSessionOutlivesCertificates(t *testing.T) {
	const life = 6 * time.Second
	lives := time.Duration(testseed.Count(3, 5))
	for name, tt := range map[string]struct {
		renew func(w *town, pod string) // one half of a life later
		lasts bool
	}{
		"both renew": {func(w *town, pod string) { w.rotate(pod, issue(w.t.(*testing.T), w.ca, pod, life)) }, true},
		"the caller renews": {renew: func(w *town, pod string) {
			if pod == "web" {
				w.rotate(pod, issue(w.t.(*testing.T), w.ca, pod, life))
			}
		}},
		"the destination renews": {renew: func(w *town, pod string) {
			if pod == "cart" {
				w.rotate(pod, issue(w.t.(*testing.T), w.ca, pod, life))
			}
		}},
	} {
		for _, near := range []bool{false, true} {
			for _, carrier := range []string{"raw", "upgrade", "grpc"} {
				if near && carrier == "raw" {
					continue // over the hop, whatever is said
				}
				t.Run(fmt.Sprintf("%s, %s, in process %v", name, carrier, near), func(t *testing.T) {
					t.Parallel()
					w := newTown(t)
					w.near, w.life = near, life
					begun := time.Now()
					web := w.pod("web", "web", "web", "127.1.0.9")
					w.pod("cart", "cart", "cart", "127.1.0.1")
					port, class := 0, "http"
					switch carrier {
					case "grpc":
						port, class = w.caller().port, "h2"
					case "raw":
						port, class = w.parrot(), "tcp"
					default:
						port = w.parrot()
					}
					w.apply(fmt.Sprintf("service shop/cart 127.0.0.2\npods shop/cart %[1]d=%[2]s ip=127.1.0.1 id=spiffe://td/ns/shop/sa/cart\nlocal shop/web cid=web\nlocal shop/cart %[1]d=%[2]s cid=cart\n", port, class))
					var say func(n uint64) error // and hear it
					if carrier == "grpc" {
						s, err := w.client(w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web)), cart(port)).NewStream(t.Context(), talking, talkMethod)
						if err != nil {
							t.Fatal(err)
						}
						say = talk(s)
					} else {
						say = w.converse(w.listen(web.Engine, fmt.Sprintf("127.0.0.2:%d", port), w.out.AcceptCaptured(web)), carrier == "upgrade", port)
					}
					stop := make(chan struct{})
					var rotating sync.WaitGroup
					rotating.Go(func() {
						// The two renew at different times, each at half of a life.
						for tick := time.NewTicker(life / 4); ; {
							for _, pod := range []string{"web", "cart"} {
								select {
								case <-stop:
									return
								case <-tick.C:
									tt.renew(w, pod)
								}
							}
						}
					})
					defer rotating.Wait()
					defer close(stop)
					for n := uint64(0); time.Since(begun) < lives*life; n++ {
						err := say(n)
						switch d := time.Since(begun); {
						case err == nil && !tt.lasts && d > 2*life:
							t.Fatalf("it goes on after %v", d)
						case err != nil && !tt.lasts:
							if d < life-2*time.Second {
								t.Errorf("it ended after %v: %v", d, err)
							}
							return
						case err != nil:
							t.Fatalf("it ended after %v and %d messages: %v", d, n, err)
						}
					}
				})
			}
		}
	}
}

// talk says and hears numbers on a stream of gRPC.
func talk(s grpc.ClientStream) func(n uint64) error {
	return func(n uint64) error {
		m := healthpb.HealthCheckRequest{Service: fmt.Sprint(n)}
		if err := s.SendMsg(&m); err != nil {
			return err
		}
		if err := s.RecvMsg(&m); err != nil || m.Service != fmt.Sprint(n) {
			return fmt.Errorf("%q for %d: %v", m.Service, n, err)
		}
		return nil
	}
}

// converse says numbers to a parrot at at, and hears them.
func (w *town) converse(at string, upgrade bool, port int) func(n uint64) error {
	w.t.Helper()
	c, err := net.Dial("tcp", at)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	r := bufio.NewReader(c)
	if upgrade {
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: cart.shop:%d\r\nConnection: upgrade\r\nUpgrade: parrot\r\n\r\n", port)
		res, err := http.ReadResponse(r, nil)
		if err != nil || res.StatusCode != 101 {
			w.t.Fatal(res, err)
		}
	}
	return func(n uint64) error {
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := c.Write(binary.BigEndian.AppendUint64(nil, n)); err != nil {
			return err
		}
		var b [8]byte
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return err
		}
		if got := binary.BigEndian.Uint64(b[:]); got != n {
			return fmt.Errorf("%d for %d", got, n)
		}
		return nil
	}
}

// TestRenewalReachesNobody: a renewal handshake at a raw-TCP port's pod is confirmed by the destination's proxy, opens nothing at
// the application, and is refused to whom the pod does not trust.
func TestRenewalReachesNobody(t *testing.T) {
	w := newTown(t)
	w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart", "cart", "cart", "127.1.0.1")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	port := ln.Addr().(*net.TCPAddr).Port
	w.apply(fmt.Sprintf("local shop/web cid=web\nlocal shop/cart %d=tcp cid=cart\n", port))
	d := meshhop.Dialer{SVID: w.svid, Sockets: func(ctx context.Context, _ string, a netip.AddrPort) (*net.TCPConn, error) {
		return here{}.Connect(ctx, a)
	}}
	k := meshhop.Key{Pod: "web", Source: w.svid("web").ID, Endpoint: netip.MustParseAddrPort(w.hops[netip.MustParseAddr("127.1.0.1")]), Pin: w.svid("cart").ID}
	b, told, err := d.Renew(w.ctx, k)
	if err != nil || !told || !strings.Contains(b.Peer[0].URIs[0].String(), "/sa/cart") {
		t.Fatalf("%v, %v, %v", b, told, err)
	}
	w.rotate("cart", trusts(t, w.svid("cart"))) // trusts nobody
	if _, told, err := d.Renew(w.ctx, k); err == nil || told {
		t.Errorf("a caller that is not trusted: told %v, %v", told, err)
	}
	_ = ln.(*net.TCPListener).SetDeadline(time.Now().Add(200 * time.Millisecond))
	if c, err := ln.Accept(); err == nil {
		c.Close()
		t.Error("the application saw a connection")
	}
}
