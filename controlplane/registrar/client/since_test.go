package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"aether/controlplane/registrar/client"
	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registrypb"
)

// cutting is a registrar's client whose watches break off after some events; -1: they do not.
type cutting struct {
	registrypb.RegistrarServiceClient
	after  int
	cut    <-chan struct{} // breaks them off, whatever came
	rows   *atomic.Int64   // told
	sinces *atomic.Int64   // SNAPSHOT_COMPLETE that built upon a version
}

type cutStream struct {
	grpc.ServerStreamingClient[registrypb.WatchEndpointsResponse]
	c *cutting
	n int
}

func (c *cutting) WatchEndpoints(ctx context.Context, q *registrypb.WatchEndpointsRequest, o ...grpc.CallOption) (grpc.ServerStreamingClient[registrypb.WatchEndpointsResponse], error) {
	ctx, stop := context.WithCancel(ctx)
	go func() {
		select {
		case <-c.cut:
			stop()
		case <-ctx.Done():
		}
	}()
	s, err := c.RegistrarServiceClient.WatchEndpoints(ctx, q, o...)
	return &cutStream{s, c, 0}, err
}

func (s *cutStream) Recv() (*registrypb.WatchEndpointsResponse, error) {
	if s.n == s.c.after {
		return nil, errors.New("cut")
	}
	s.n++
	e, err := s.ServerStreamingClient.Recv()
	if err == nil && e.GetEndpoint() != nil {
		s.c.rows.Add(1)
	}
	if e.GetSince() != "" {
		s.c.sinces.Add(1)
	}
	return e, err
}

// TestComesBackWithAVersion: a node that loses its registrar is told by the next one of what has
// changed meanwhile, and wherever that breaks off it ends with what the registry has.
func TestComesBackWithAVersion(t *testing.T) {
	for _, after := range []int{-1, 0, 1, 2, 3, 4, 5} { // -1: it does not break off
		t.Run(fmt.Sprint(after), func(t *testing.T) {
			t.Parallel()
			store := storetest.New("local", "c1")
			http := map[uint32]registrypb.PortProtocol{8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP}
			row := func(service, ip string, h registrypb.ServiceEndpoint_Health) {
				e := storetest.Endpoint(ip, "n1", http)
				e.Health = h
				store.Set(storetest.Rows("local", "c1", name(service), e)...)
			}
			const services, pods = 4, 50
			for i := range services {
				for j := range pods {
					row(fmt.Sprintf("shop/s%d", i), fmt.Sprintf("10.0.%d.%d", i, j), registrypb.ServiceEndpoint_HEALTHY)
				}
			}
			one, endOne := serve(t, store, "127.0.0.1:0")
			two, _ := serve(t, store, "127.0.0.1:0")
			var dials atomic.Int64
			var rows [3]atomic.Int64
			var sinces atomic.Int64
			cut := make(chan struct{})
			dial := func(_ context.Context, addr string) (registrypb.RegistrarServiceClient, io.Closer, error) {
				conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
				if err != nil {
					return nil, nil, err
				}
				n := int(dials.Add(1))
				c := &cutting{RegistrarServiceClient: registrypb.NewRegistrarServiceClient(conn), after: -1, rows: &rows[min(n, len(rows))-1], sinces: &sinces}
				switch n {
				case 1:
					c.cut = cut
				case 2:
					c.after = after
				}
				return c, conn, nil
			}
			n := startNode(t, client.Config{Targets: []string{one, two}, Whole: true, Dial: dial})
			defer n.end()
			until(t, "everything", func() bool { return len(n.heard.of(name("shop/s3"))) == pods })
			until(t, "its names", func() bool {
				return n.heard.status().Connected && n.heard.status().Version != "-" && n.heard.status().Version != ""
			})
			close(cut)
			until(t, "the loss", func() bool { return !n.heard.status().Connected })
			row("shop/s0", "10.0.0.1", registrypb.ServiceEndpoint_DRAINING)
			row("shop/s1", "10.0.1.99", registrypb.ServiceEndpoint_HEALTHY)
			for _, r := range storetest.Rows("local", "c1", name("shop/s2"), storetest.Endpoint("10.0.2.7", "n1", http)) {
				r.Endpoint = nil
				store.Set(r)
			}
			endOne()
			drains := func() bool {
				for _, r := range n.heard.of(name("shop/s0")) {
					if strings.Contains(r, "10.0.0.1 ") && strings.Contains(r, "health=3 ") {
						return true
					}
				}
				return false
			}
			until(t, "what has changed", func() bool {
				return n.heard.status().Connected && drains() && len(n.heard.of(name("shop/s1"))) == pods+1 && len(n.heard.of(name("shop/s2"))) == pods-1 && len(n.heard.of(name("shop/s3"))) == pods
			})
			if n.heard.replaces != 1 {
				t.Errorf("the sink was told %d whole states, want 1", n.heard.replaces)
			}
			if told := rows[1].Load(); after < 0 && dials.Load() == 2 && (told != 3 || sinces.Load() != 1) {
				t.Errorf("%d rows were told, %d times upon a version, want the 3 that changed, once", told, sinces.Load())
			}
		})
	}
}

// TestLastServiceGoesMeanwhile: the names that are told upon a version are all there are, also where there are none.
func TestLastServiceGoesMeanwhile(t *testing.T) {
	t.Parallel()
	store := storetest.New("local", "c1")
	http := map[uint32]registrypb.PortProtocol{8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP}
	rows := storetest.Rows("local", "c1", name("shop/other"), storetest.Endpoint("10.0.0.1", "n1", http))
	store.Set(rows...)
	addr, _ := serve(t, store, "127.0.0.1:0")
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	registrar := registrypb.NewRegistrarServiceClient(conn)
	var dials, told, sinces atomic.Int64
	cut, changed := make(chan struct{}), make(chan struct{})
	dial := func(ctx context.Context, _ string) (registrypb.RegistrarServiceClient, io.Closer, error) {
		c := &cutting{RegistrarServiceClient: registrar, after: -1, rows: &told, sinces: &sinces}
		if dials.Add(1) == 1 {
			c.cut = cut
		} else {
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
		return c, io.NopCloser(nil), nil
	}
	n := startNode(t, client.Config{Targets: []string{addr}, Dial: dial})
	defer n.end()
	names := func() int {
		n.heard.mu.Lock()
		defer n.heard.mu.Unlock()
		return len(n.heard.catalog)
	}
	until(t, "its name", func() bool {
		return names() == 1 && n.heard.status().Connected && n.heard.status().Version != "-" && n.heard.status().Version != ""
	})
	close(cut)
	until(t, "the loss", func() bool { return !n.heard.status().Connected })
	rows[0].Endpoint = nil
	store.Set(rows...)
	until(t, "a registrar without rows", func() bool {
		all, err := registrar.ListAllEndpoints(t.Context(), &registrypb.ListAllEndpointsRequest{})
		return err == nil && len(all.GetServices()) == 0
	})
	close(changed)
	until(t, "no name", func() bool { return names() == 0 })
	if sinces.Load() != 1 {
		t.Errorf("it was told %d times upon a version, want once", sinces.Load())
	}
}

// TestBreaksOffAndChangesBack: what was put in place of changes that broke off is not kept, although the registry has by
// then again the version that the node had before them.
func TestBreaksOffAndChangesBack(t *testing.T) {
	t.Parallel()
	store := storetest.New("local", "c1")
	http := map[uint32]registrypb.PortProtocol{8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP}
	row := func(ip string, h registrypb.ServiceEndpoint_Health) {
		e := storetest.Endpoint(ip, "n1", http)
		e.Health = h
		store.Set(storetest.Rows("local", "c1", name("shop/cart"), e)...)
	}
	for _, ip := range []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"} {
		row(ip, registrypb.ServiceEndpoint_HEALTHY)
	}
	addr, _ := serve(t, store, "127.0.0.1:0")
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	registrar := registrypb.NewRegistrarServiceClient(conn)
	version := func() string {
		all, err := registrar.ListAllEndpoints(t.Context(), &registrypb.ListAllEndpointsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return all.GetVersion()
	}
	var dials, told, sinces atomic.Int64
	cut, there, back := make(chan struct{}), make(chan struct{}), make(chan struct{})
	dial := func(ctx context.Context, _ string) (registrypb.RegistrarServiceClient, io.Closer, error) {
		c := &cutting{RegistrarServiceClient: registrar, after: -1, rows: &told, sinces: &sinces}
		wait := back
		switch dials.Add(1) {
		case 1:
			c.cut = cut
			return c, io.NopCloser(nil), nil
		case 2:
			c.after, wait = 1, there
		}
		select {
		case <-wait:
		case <-ctx.Done():
		}
		return c, io.NopCloser(nil), nil
	}
	n := startNode(t, client.Config{Targets: []string{addr}, Whole: true, Dial: dial})
	defer n.end()
	healthy := func() bool {
		rows := n.heard.of(name("shop/cart"))
		return len(rows) == 3 && !strings.Contains(strings.Join(rows, "\n"), "health=3 ")
	}
	until(t, "everything", func() bool {
		return healthy() && n.heard.status().Connected && n.heard.status().Version != "-" && n.heard.status().Version != ""
	})
	was := version()
	close(cut)
	until(t, "the loss", func() bool { return !n.heard.status().Connected })
	row("10.0.0.1", registrypb.ServiceEndpoint_DRAINING)
	until(t, "a change", func() bool { return version() != was })
	before := told.Load()
	close(there)
	until(t, "one row and the end", func() bool { return dials.Load() == 3 })
	if told.Load() != before+1 {
		t.Errorf("%d rows were told before it broke off, want 1", told.Load()-before)
	}
	row("10.0.0.1", registrypb.ServiceEndpoint_HEALTHY)
	until(t, "the version of before", func() bool { return version() == was })
	close(back)
	until(t, "a registrar", func() bool { return n.heard.status().Connected })
	until(t, "what the registry has", healthy)
}
