package dataplane_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"aether/dataplane/engine"
	"aether/dataplane/model"
	"aether/meshhop"
)

// TestServerNamesOfOwnPorts: for a peer that names one of the mesh's own ports, at which each pod has a listener of ours, nothing is
// connected to, whatever protocol it asks for: its handshake is refused, and where it were not, its connection. The declared port
// beside them is served (decision 043).
func TestServerNamesOfOwnPorts(t *testing.T) {
	for _, strict := range []bool{true, false} {
		t.Run(fmt.Sprint("known in the handshake ", strict), func(t *testing.T) {
			t.Parallel()
			w := newTown(t)
			app := &connects{}
			w.sockets = func(string) engine.Sockets { return app }
			if strict {
				w.serves = func(container string, port uint16) bool {
					pod := w.store.Load().Workload(container)
					_, ok := pod.Port(port)
					return ok
				}
			}
			w.pod("web", "web", "web", "127.1.0.9")
			w.pod("cart", "cart", "cart", "127.1.0.1")
			declared := w.parrot()
			w.apply(fmt.Sprintf("local shop/web cid=web\nlocal shop/cart %d=tcp cid=cart\n", declared))
			d := meshhop.Dialer{SVID: w.svid, Sockets: func(ctx context.Context, _ string, a netip.AddrPort) (*net.TCPConn, error) {
				return here{}.Connect(ctx, a)
			}}
			for _, proto := range []meshhop.Proto{meshhop.H2, meshhop.Raw} {
				for _, port := range []int{model.PortCapture, model.PortMesh, 18081, 18082, declared} {
					if own := model.ReservedPort(uint16(port)); own == (port == declared) {
						t.Fatalf("port %d is reserved: %v", port, own)
					}
					before := app.n.Load()
					s, err := d.Dial(w.ctx, meshhop.Key{
						Pod: "web", Source: w.svid("web").ID, Endpoint: netip.MustParseAddrPort(w.hops[netip.MustParseAddr("127.1.0.1")]),
						SNI: fmt.Sprint(port), Proto: proto, Pin: w.svid("cart").ID,
					})
					if (err == nil) != (port == declared || !strict) {
						t.Fatalf("%v, server name %d: %v", proto, port, err)
					}
					if err != nil {
						continue
					}
					defer s.Conn.Close()
					b, err := s.Record().Seal(nil, []byte("hello"))
					if err != nil {
						t.Fatal(err)
					}
					_ = s.Conn.SetDeadline(time.Now().Add(30 * time.Second))
					_, werr := s.Conn.Write(b)
					n, rerr := s.Conn.Read(make([]byte, 1000)) // what the parrot repeats
					var late net.Error
					if served := werr == nil && n > 0; served != (port == declared) || errors.As(rerr, &late) && late.Timeout() {
						t.Errorf("%v, server name %d: %v, %d bytes, %v", proto, port, werr, n, rerr)
					}
					if made := app.n.Load() - before; (made > 0) != (port == declared) {
						t.Errorf("%v, server name %d: %d connections to the pod", proto, port, made)
					}
				}
			}
		})
	}
}

// connects counts the connections that are made.
type connects struct {
	here
	n atomic.Int64
}

func (c *connects) Connect(ctx context.Context, a netip.AddrPort) (*net.TCPConn, error) {
	c.n.Add(1)
	return c.here.Connect(ctx, a)
}
