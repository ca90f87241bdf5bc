package etcd

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/e2e/etcdtest"
)

// A store of the size of the fleet of docs/scale.md.
const (
	benchServices = 3000
	benchRows     = 100_000
)

func benchRow(i int) (model.ServiceName, *registrypb.ServiceEndpoint) {
	n := model.ServiceName{Namespace: fmt.Sprintf("team-%d", i%benchServices%50), Name: fmt.Sprintf("service-%d", i%benchServices)}
	e := row(fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255), "1")
	e.KubernetesMetadata = &registrypb.ServiceEndpoint_KubernetesMetadata{Namespace: n.Namespace, PodName: n.Name + "-5d4f8c7b9-x2x4z", NodeName: fmt.Sprintf("node-%d", i%1000), NodeIp: "192.0.2.1"}
	e.ContainerMetadata = &registrypb.ServiceEndpoint_ContainerMetadata{ContainerId: "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", NetworkNamespace: "/run/netns/cni-01234567-89ab-cdef-0123-456789abcdef"}
	e.Locality = &registrypb.ServiceEndpoint_Locality{Region: "eu", Zone: "eu-1"}
	return n, e
}

// BenchmarkWhole is the list of 100,000 rows of 3,000 services, as a registrar that
// starts reads it, and what a change costs after it.
func BenchmarkWhole(b *testing.B) {
	server := etcdtest.Start(b)
	c := server.Client()
	var ops []clientv3.Op
	for i := range benchRows {
		n, e := benchRow(i)
		value, err := proto.Marshal(e)
		if err != nil {
			b.Fatal(err)
		}
		k, err := registry.Key{Kind: registry.EndpointKey, Region: "local", Cluster: "local", Service: n, Protocol: registrypb.Service_PROTOCOL_HTTP, IP: e.Ip}.Text()
		if err != nil {
			b.Fatal(err)
		}
		if ops = append(ops, clientv3.OpPut(k, string(value))); len(ops) == 100 || i == benchRows-1 {
			if _, err := c.Txn(b.Context()).Then(ops...).Commit(); err != nil {
				b.Fatal(err)
			}
			ops = ops[:0]
		}
	}
	s, err := New(Config{Endpoints: []string{server.Endpoint()}})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	b.Run("list", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			ctx, cancel := context.WithCancel(b.Context())
			_ = s.Watch(ctx, func(c registry.Change) {
				if len(c.Rows) != benchRows {
					b.Errorf("%d rows", len(c.Rows))
				}
				cancel()
			}, func(error) {})
		}
	})
	b.Run("change", func(b *testing.B) {
		ctx, cancel := context.WithCancel(b.Context())
		heard, well, ended := make(chan time.Time), make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			_ = s.Watch(ctx, func(c registry.Change) {
				if !c.Whole {
					heard <- time.Now()
				}
			}, func(error) { close(well) })
		}()
		<-well
		runtime.GC()
		var mem runtime.MemStats
		runtime.ReadMemStats(&mem)
		n, e := benchRow(0)
		for b.Loop() {
			if err := s.Put(b.Context(), n, e); err != nil {
				b.Fatal(err)
			}
			<-heard
		}
		b.ReportMetric(float64(mem.HeapAlloc)/(1<<20), "MB-kept")
		cancel()
		<-ended
	})
}
