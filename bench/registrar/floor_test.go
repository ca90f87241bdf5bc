package registrar

import (
	"context"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrypb"
	"aether/mtls"
	"aether/mtls/devca"
)

// bare is a gRPC server with streams and nothing behind them: messages are encoded before
// they are sent, and those of one change are the same bytes.
type bare struct {
	registrypb.UnimplementedRegistrarServiceServer
	streams chan chan raw // of each watch that comes
}

// WatchEndpoints sends what it is given.
func (s *bare) WatchEndpoints(_ *registrypb.WatchEndpointsRequest, stream grpc.ServerStreamingServer[registrypb.WatchEndpointsResponse]) error {
	ch := make(chan raw, 64)
	complete := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), uint64(registrypb.WatchEndpointsResponse_EVENT_TYPE_SNAPSHOT_COMPLETE))
	if err := stream.SendMsg(raw(complete)); err != nil {
		return err
	}
	s.streams <- ch
	for {
		select {
		case m := <-ch:
			if err := stream.SendMsg(m); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

// bareCodec sends raw messages as they are.
type bareCodec struct{ rawCodec }

func (c bareCodec) Marshal(v any) (mem.BufferSlice, error) {
	if r, ok := v.(raw); ok {
		return mem.BufferSlice{mem.SliceBuffer(r)}, nil
	}
	return c.rawCodec.Marshal(v)
}

func (bareCodec) Unmarshal(data mem.BufferSlice, v any) error {
	return proto.Unmarshal(data.Materialize(), v.(proto.Message))
}

// BenchmarkFloor tells what the registrar's gRPC costs by itself: a server without any
// state sends the messages of BenchmarkRegistrar's steady phase, to as many nodes over as many
// connections.
func BenchmarkFloor(b *testing.B) {
	sz := sizes()
	ca, err := devca.Open(b.TempDir(), "mesh.test", nil)
	if err != nil {
		b.Fatal(err)
	}
	self, err := ca.Issue(identity("aether-registrar"), time.Hour)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		s := &bare{streams: make(chan chan raw, sz.Streams)}
		tls := mtls.ServerConfig(mtls.Server{SVID: func() *mtls.SVID { return self }, Named: true})
		g := grpc.NewServer(grpc.Creds(credentials.NewTLS(tls)), grpc.ForceServerCodecV2(bareCodec{}), grpc.ReadBufferSize(4<<10), grpc.WriteBufferSize(16<<10))
		registrypb.RegisterRegistrarServiceServer(g, s)
		ln, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- g.Serve(ln) }()
		f := startFleet(b, job{Addr: ln.Addr().String(), size: sz, CA: b.TempDir()}, ca)
		f.say("connect", nil)
		streams := make([]chan raw, sz.Streams)
		for i := range streams {
			streams[i] = <-s.streams
		}

		each := max(1, sz.Streams*sz.Scope/sz.Services) // nodes that a change concerns
		st := &store{size: sz}
		changes := st.steadily(b, func() {
			row := st.change(rand.IntN(sz.Endpoints), registrypb.ServiceEndpoint_HEALTHY, "steady").Rows[0]
			m, err := proto.Marshal(&registrypb.WatchEndpointsResponse{
				Type: registrypb.WatchEndpointsResponse_EVENT_TYPE_ENDPOINT_UPDATED, ServiceName: row.Service.String(), Protocol: row.Protocol,
				Endpoint: row.Endpoint, Version: "00112233445566778899aabbccddeeff",
			})
			if err != nil {
				b.Fatal(err)
			}
			for _, i := range rand.Perm(sz.Streams)[:each] {
				streams[i] <- m
			}
		})
		var seen struct {
			Events int
			P99    float64
		}
		f.say("seen steady", &seen)
		b.ReportMetric(float64(seen.Events)/float64(changes), "nodes/change")
		b.ReportMetric(seen.P99, "ms/steady-p99")
		f.end()
		g.Stop()
		if err := <-done; err != nil {
			b.Fatal(err)
		}
	}
}
