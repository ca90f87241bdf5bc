// Package registrar tests the registrar's replicas over a real etcd.
//
//   - What etcd holds is read by etcd's own client, by the keys of contract 9.5
//     spelled out here.
//   - Watchers apply events as contract 9.7 says, and know no more.
package registrar

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/etcd"
	"aether/controlplane/registrar/server"
	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registrypb"
	"aether/e2e/etcdtest"
)

const patience = time.Minute

// replica runs a registrar over etcd, and gives a client of it and the server itself.
func replica(t *testing.T, endpoint string) (registrypb.RegistrarServiceClient, *server.Server, func()) {
	t.Helper()
	store, err := etcd.New(etcd.Config{Endpoints: []string{endpoint}})
	if err != nil {
		t.Fatal(err)
	}
	s := server.New(server.Config{Store: store, Drain: -1, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, ln) }()
	conn, err := grpc.NewClient(ln.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		conn.Close()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the registrar ended with %v", err)
		}
		if err := store.Close(); err != nil {
			t.Errorf("the store: %v", err)
		}
	}
	t.Cleanup(stop)
	return registrypb.NewRegistrarServiceClient(conn), s, stop
}

// watcher follows one replica and keeps what it is told.
type watcher struct {
	t       *testing.T
	stream  grpc.ServerStreamingClient[registrypb.WatchEndpointsResponse]
	cancel  func()
	rows    map[string]string // service, class and address: health
	full    int
	version string
}

func watch(t *testing.T, c registrypb.RegistrarServiceClient, last string) *watcher {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	stream, err := c.WatchEndpoints(ctx, &registrypb.WatchEndpointsRequest{LastVersion: last}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	return &watcher{t: t, stream: stream, cancel: cancel, rows: map[string]string{}}
}

// until reads until ok.
func (w *watcher) until(what string, ok func() bool) {
	w.t.Helper()
	late := time.AfterFunc(patience, w.cancel)
	defer late.Stop()
	for !ok() {
		e, err := w.stream.Recv()
		if err != nil {
			w.t.Fatalf("waiting for %s: %v; it knows\n%s", what, err, w)
		}
		w.version = e.GetVersion()
		key := fmt.Sprintf("%s %s %s", e.GetServiceName(), e.GetProtocol(), e.GetEndpoint().GetIp())
		switch e.GetType() {
		case registrypb.WatchEndpointsResponse_EVENT_TYPE_FULL_SNAPSHOT:
			w.full++
			w.rows[key] = e.GetEndpoint().GetHealth().String()
		case registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_ADDED, registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_UPDATED:
			w.rows[key] = e.GetEndpoint().GetHealth().String()
		case registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_REMOVED:
			delete(w.rows, key)
		case registrypb.WatchEndpointsResponse_EVENT_TYPE_SNAPSHOT_COMPLETE:
			w.rows["complete"] = ""
		}
	}
}

func (w *watcher) complete() *watcher {
	w.t.Helper()
	w.until("SNAPSHOT_COMPLETE", func() bool { _, ok := w.rows["complete"]; return ok })
	delete(w.rows, "complete")
	return w
}

func (w *watcher) String() string {
	var out []string
	for k, v := range w.rows {
		out = append(out, k+" "+v)
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// has reads until the watcher knows exactly that.
func (w *watcher) has(lines ...string) {
	w.t.Helper()
	slices.Sort(lines)
	want := strings.Join(lines, "\n")
	w.until(want, func() bool { return w.String() == want })
}

// prefix is contract 9.5's, for the partition that is used where none is said.
const prefix = "/aether/v1/regions/local/clusters/local/ns/"

// stored are etcd's rows as a watcher writes them.
func stored(t *testing.T, c *clientv3.Client) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	got, err := c.Get(ctx, prefix, clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, kv := range got.Kvs {
		p := strings.Split(strings.TrimPrefix(string(kv.Key), prefix), "/") // shop services cart protocols PROTOCOL_HTTP endpoints 10.0.0.1
		if len(p) != 7 || p[1] != "services" || p[3] != "protocols" || p[5] != "endpoints" {
			t.Fatalf("a key that is not contract 9.5's: %s", kv.Key)
		}
		e := &registrypb.ServiceEndpoint{}
		if err := proto.Unmarshal(kv.Value, e); err != nil {
			t.Fatal(err)
		}
		out = append(out, fmt.Sprintf("%s/%s %s %s %s", p[0], p[2], p[4], p[6], e.GetHealth()))
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

func storedSoon(t *testing.T, c *clientv3.Client, lines ...string) {
	t.Helper()
	slices.Sort(lines)
	want := strings.Join(lines, "\n")
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); ; <-tick.C {
		got := stored(t, c)
		if got == want {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("etcd has\n%s\nwant\n%s", got, want)
		}
	}
}

func register(t *testing.T, c registrypb.RegistrarServiceClient, ip string, h registrypb.ServiceEndpoint_Health) {
	t.Helper()
	e := storetest.Endpoint(ip, "node-a", map[uint32]registrypb.PortProtocol{
		8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP, 5432: registrypb.PortProtocol_PORT_PROTOCOL_TCP})
	e.Health = h
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := c.RegisterEndpoint(ctx, &registrypb.RegisterEndpointRequest{ServiceName: "shop/cart", Endpoint: e}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
}

func unregister(t *testing.T, c registrypb.RegistrarServiceClient, ip string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := c.UnregisterEndpoint(ctx, &registrypb.UnregisterEndpointRequest{ServiceName: "shop/cart", Ips: []string{ip}}); err != nil {
		t.Fatal(err)
	}
}

// pod are a pod's two rows as a watcher writes them.
func pod(ip, health string) []string {
	return []string{"shop/cart PROTOCOL_HTTP " + ip + " " + health, "shop/cart PROTOCOL_TCP " + ip + " " + health}
}

// TestActiveActive: both replicas serve; a write to one reaches the watchers of the
// other by etcd, and is stored under the keys of contract 9.5, once a class.
func TestActiveActive(t *testing.T) {
	store := etcdtest.Start(t)
	client := store.Client()
	a, _, stopA := replica(t, store.Endpoint())
	b, _, _ := replica(t, store.Endpoint())
	atA, atB := watch(t, a, "").complete(), watch(t, b, "").complete()

	register(t, a, "10.0.0.1", registrypb.ServiceEndpoint_UNHEALTHY)
	atA.has(pod("10.0.0.1", "UNHEALTHY")...)
	atB.has(pod("10.0.0.1", "UNHEALTHY")...)
	storedSoon(t, client, pod("10.0.0.1", "UNHEALTHY")...)

	register(t, b, "10.0.0.1", registrypb.ServiceEndpoint_HEALTHY) // by the other replica
	register(t, a, "10.0.0.2", registrypb.ServiceEndpoint_DRAINING)
	both := append(pod("10.0.0.1", "HEALTHY"), pod("10.0.0.2", "DRAINING")...)
	atA.has(both...)
	atB.has(both...)
	storedSoon(t, client, both...)
	unregister(t, b, "10.0.0.2")
	atA.has(pod("10.0.0.1", "HEALTHY")...)
	atB.has(pod("10.0.0.1", "HEALTHY")...)

	// A node whose replica goes is told nothing twice by the other one.
	last := atA.version
	stopA()
	again := watch(t, b, last).complete()
	if again.full != 0 || again.version != last {
		t.Errorf("%d rows, version %s after %s, though nothing has changed", again.full, again.version, last)
	}
	register(t, b, "10.0.0.3", registrypb.ServiceEndpoint_HEALTHY)
	again.has(pod("10.0.0.3", "HEALTHY")...) // all that is new
}

// TestEtcdKilled: while etcd is away both replicas serve what they know and take what
// nodes register; when it is back it gets that, and everybody knows the same.
func TestEtcdKilled(t *testing.T) {
	store := etcdtest.Start(t)
	a, sa, _ := replica(t, store.Endpoint())
	b, sb, _ := replica(t, store.Endpoint())
	register(t, a, "10.0.0.1", registrypb.ServiceEndpoint_HEALTHY)
	register(t, a, "10.0.0.2", registrypb.ServiceEndpoint_HEALTHY)
	atA, atB := watch(t, a, ""), watch(t, b, "")
	before := append(pod("10.0.0.1", "HEALTHY"), pod("10.0.0.2", "HEALTHY")...)
	atA.complete().has(before...)
	atB.complete().has(before...)
	storedSoon(t, store.Client(), before...)

	store.Kill()
	register(t, a, "10.0.0.1", registrypb.ServiceEndpoint_DRAINING)
	unregister(t, a, "10.0.0.2")
	register(t, b, "10.0.0.3", registrypb.ServiceEndpoint_HEALTHY)
	atA.has(pod("10.0.0.1", "DRAINING")...) // at once
	atB.has(append(before, pod("10.0.0.3", "HEALTHY")...)...)
	late := watch(t, a, "").complete()
	late.has(pod("10.0.0.1", "DRAINING")...)

	store.Restart()
	after := append(pod("10.0.0.1", "DRAINING"), pod("10.0.0.3", "HEALTHY")...)
	for _, w := range []*watcher{atA, atB, late} {
		w.has(after...)
	}
	storedSoon(t, store.Client(), after...)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); sa.Status().Pending+sb.Status().Pending > 0; <-tick.C {
		if time.Now().After(end) {
			t.Fatal("writes still wait")
		}
	}
	if x, y := sa.Status(), sb.Status(); x.Version != y.Version || x.Rows != 4 {
		t.Errorf("the replicas differ: %+v, %+v", x, y)
	}
}
