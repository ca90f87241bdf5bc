package register

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// registrar is one on the loopback that keeps what it is told.
type registrar struct {
	registrypb.UnimplementedRegistrarServiceServer
	addr string
	stop func()

	mu    sync.Mutex
	rows  map[string]*registrypb.ServiceEndpoint
	calls int
	fails codes.Code // OK: it does not
	hangs bool
	old   bool // it does not know node_name
	makes bool // its rows itself
	by    registry.Statement
}

func serve(t *testing.T) *registrar {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &registrar{addr: l.Addr().String(), rows: map[string]*registrypb.ServiceEndpoint{}}
	s := grpc.NewServer()
	registrypb.RegisterRegistrarServiceServer(s, r)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // ends with Stop
	}()
	r.stop = func() {
		s.Stop()
		<-done
	}
	t.Cleanup(r.stop)
	return r
}

func (r *registrar) begin(ctx context.Context) error {
	r.mu.Lock()
	r.calls++
	fails, hangs := r.fails, r.hangs
	r.mu.Unlock()
	if hangs {
		<-ctx.Done()
	}
	if fails != codes.OK {
		return status.Error(fails, "as told")
	}
	return ctx.Err()
}

func (r *registrar) RegisterEndpoint(ctx context.Context, q *registrypb.RegisterEndpointRequest) (*registrypb.RegisterEndpointResponse, error) {
	if err := r.begin(ctx); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rows[fmt.Sprintf("%s %s %s", q.GetServiceName(), q.GetProtocol(), q.GetEndpoint().GetIp())] = q.GetEndpoint()
	return &registrypb.RegisterEndpointResponse{}, nil
}

func (r *registrar) UnregisterEndpoint(ctx context.Context, q *registrypb.UnregisterEndpointRequest) (*registrypb.UnregisterEndpointResponse, error) {
	if err := r.begin(ctx); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.by = registry.Statement{Node: q.GetNodeName(), Stated: q.GetStated()}
	for _, ip := range q.GetIps() {
		maps.DeleteFunc(r.rows, func(k string, _ *registrypb.ServiceEndpoint) bool {
			return strings.HasPrefix(k, q.GetServiceName()+" ") && strings.HasSuffix(k, " "+ip)
		})
	}
	return &registrypb.UnregisterEndpointResponse{}, nil
}

func (r *registrar) ListAllEndpoints(ctx context.Context, q *registrypb.ListAllEndpointsRequest) (*registrypb.ListAllEndpointsResponse, error) {
	if err := r.begin(ctx); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	out := &registrypb.ListAllEndpointsResponse{Services: map[string]*registrypb.ServiceEndpoints{}, Derived: r.makes}
	for k, e := range r.rows {
		f := strings.Fields(k)
		if f[1] != q.GetProtocol().String() || !r.old && q.GetNodeName() != e.GetKubernetesMetadata().GetNodeName() {
			continue
		}
		s := out.Services[f[0]]
		if s == nil {
			s = &registrypb.ServiceEndpoints{}
			out.Services[f[0]] = s
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return out, nil
}

func (r *registrar) set(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

func (r *registrar) asked() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.calls
	r.calls = 0
	return n
}

func caller(t *testing.T, all ...*registrar) *Caller {
	t.Helper()
	var targets []string
	for _, r := range all {
		targets = append(targets, r.addr)
	}
	c, err := New(Config{Targets: targets})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func row(ip, node string) *registrypb.ServiceEndpoint {
	return &registrypb.ServiceEndpoint{
		Ip: ip, ClusterName: "east", Port: 8080, Ports: []uint32{8080}, KubernetesMetadata: &registrypb.ServiceEndpoint_KubernetesMetadata{NodeName: node},
		PortProtocols: map[uint32]registrypb.PortProtocol{8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP},
	}
}

var cart = model.ServiceName{Namespace: "shop", Name: "cart"}

const http = registrypb.Service_PROTOCOL_HTTP

func TestCalls(t *testing.T) {
	r := serve(t)
	c := caller(t, r)
	ctx := t.Context()
	for _, e := range []*registrypb.ServiceEndpoint{row("10.1.0.1", "n1"), row("10.1.0.2", "n1"), row("10.1.0.3", "n2")} {
		for _, class := range []registrypb.Service_Protocol{http, registrypb.Service_PROTOCOL_TCP} {
			if err := c.Register(ctx, cart, class, e); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := c.Unregister(ctx, cart, "10.1.0.2", registry.Statement{Node: "n1", Stated: 7}); err != nil {
		t.Fatal(err)
	}
	if r.by != (registry.Statement{Node: "n1", Stated: 7}) {
		t.Errorf("it is said by %v", r.by)
	}
	if !proto.Equal(r.rows["shop/cart PROTOCOL_HTTP 10.1.0.1"], row("10.1.0.1", "n1")) || len(r.rows) != 4 {
		t.Errorf("%v", r.rows)
	}
	for _, old := range []bool{false, true} {
		r.set(func() { r.old = old; r.rows["no-service PROTOCOL_HTTP 10.1.0.9"] = row("10.1.0.9", "n1") })
		rows, err := c.OfNode(ctx, "n1")
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, x := range rows {
			got = append(got, fmt.Sprint(x.Service, x.Protocol, x.IP, x.Cluster, x.Endpoint.GetPort()))
		}
		slices.Sort(got)
		if len(got) != 2 || !strings.Contains(got[0], "10.1.0.1") || !strings.Contains(got[1], "PROTOCOL_TCP") {
			t.Errorf("node_name known %t: %q, want two rows of 10.1.0.1", !old, got)
		}
	}
	r.set(func() { r.makes = true })
	if rows, err := c.OfNode(ctx, "n1"); !errors.Is(err, registry.ErrDerived) || rows != nil {
		t.Errorf("of a registrar that makes its rows itself: %v, %v", rows, err)
	}
}

// TestSeveral: one that answers is stayed with, one that does not is left.
func TestSeveral(t *testing.T) {
	a, b := serve(t), serve(t)
	c := caller(t, a, b)
	put := func() error { return c.Register(t.Context(), cart, http, row("10.1.0.1", "n1")) }
	for range 20 {
		if err := put(); err != nil {
			t.Fatal(err)
		}
	}
	first, second := a, b
	na, nb := a.asked(), b.asked()
	if na == 0 {
		first, second = b, a
	}
	if na+nb != 20 || na*nb != 0 {
		t.Fatalf("%d and %d calls: it is to stay with one", na, nb)
	}
	t.Run("unavailable", func(t *testing.T) {
		first.set(func() { first.fails = codes.Unavailable })
		for range 5 {
			if err := put(); err != nil {
				t.Fatal(err)
			}
		}
		if x, y := first.asked(), second.asked(); x != 1 || y != 5 {
			t.Errorf("%d and %d calls", x, y)
		}
		first.set(func() { first.fails = codes.OK })
	})
	t.Run("hangs", func(t *testing.T) {
		second.set(func() { second.hangs = true })
		start := time.Now()
		if err := put(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > callTime {
			t.Errorf("took %s", took)
		}
		if first.asked() != 1 {
			t.Error("not the other one")
		}
		second.set(func() { second.hangs = false })
		second.asked()
	})
	t.Run("what is wrong with the call is said once", func(t *testing.T) {
		first.set(func() { first.fails = codes.InvalidArgument })
		if err := put(); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%v", err)
		}
		if x, y := first.asked(), second.asked(); x != 1 || y != 0 {
			t.Errorf("%d and %d calls", x, y)
		}
		first.set(func() { first.fails = codes.OK })
	})
	t.Run("gone", func(t *testing.T) {
		first.stop()
		if err := put(); err != nil {
			t.Error(err)
		}
		second.stop()
		if err := put(); err == nil || !strings.Contains(err.Error(), a.addr) || !strings.Contains(err.Error(), b.addr) {
			t.Errorf("%v", err)
		}
	})
}

// TestTime: a call ends in its time, whatever the registrars do.
func TestTime(t *testing.T) {
	a, b := serve(t), serve(t)
	a.hangs, b.hangs = true, true
	c := caller(t, a, b)
	start := time.Now()
	if err := c.Unregister(t.Context(), cart, "10.1.0.1", registry.Statement{Node: "n1", Stated: 7}); err == nil {
		t.Error("no error")
	}
	if took := time.Since(start); took > callTime+2*time.Second {
		t.Errorf("took %s", took)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := c.Unregister(t.Context(), cart, "10.1.0.1", registry.Statement{Node: "n1", Stated: 7}); err == nil {
		t.Error("a closed one calls")
	}
}

func TestNew(t *testing.T) {
	for _, targets := range [][]string{nil, {"registrar"}, {":8443"}} {
		if _, err := New(Config{Targets: targets}); err == nil {
			t.Errorf("%q is taken", targets)
		}
	}
	c, err := New(Config{Targets: []string{"registrar.invalid:1"}, Resolve: func(context.Context, string) ([]string, error) { return nil, nil }})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Unregister(t.Context(), cart, "10.1.0.1", registry.Statement{Node: "n1", Stated: 7}); err == nil || !strings.Contains(err.Error(), "no address") {
		t.Errorf("%v", err)
	}
}
