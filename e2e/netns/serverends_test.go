package netns

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// TestStreamsThatTheServerEndsFirst: a gRPC stream both ways whose server sends its messages and its status while the client has not closed
// its side, as most servers of such streams do, arrives whole, however late the client takes it. grpc-go at both ends.
func TestStreamsThatTheServerEndsFirst(t *testing.T) {
	ctx := within(t, time.Minute)
	const messages, size = 40, 60 << 10
	desc := grpc.ServiceDesc{ServiceName: "early.Both", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{{StreamName: "Talk", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, s grpc.ServerStream) error {
			var m healthpb.HealthCheckRequest
			if err := s.RecvMsg(&m); err != nil {
				return err
			}
			for range messages {
				if err := s.SendMsg(&healthpb.HealthCheckRequest{Service: strings.Repeat("x", size)}); err != nil {
					return err
				}
			}
			return status.Error(codes.NotFound, "that was all")
		}}}}
	_, err := w.AddPod(ctx, mesh.Pod{Name: "servesfirst", Node: 1, Ports: "8095=h2", Prepare: func(p *rig.Pod) error {
		l, err := p.Space.Listen(context.Background(), "tcp", local(8095))
		if err != nil {
			return err
		}
		g := grpc.NewServer()
		g.RegisterService(&desc, nil)
		go g.Serve(l)
		w.OnClose(g.Stop)
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Service(rig.ServiceManifest{Name: "servesfirst", ClusterIPs: w.ClusterIPs(200), Ports: []uint16{8095}}); err != nil {
		t.Fatal(err)
	}
	settle(t, ctx)
	for _, pace := range []time.Duration{time.Microsecond, time.Millisecond, 20 * time.Millisecond} {
		take := time.NewTicker(pace)
		defer take.Stop()
		bad, last := 0, ""
		for range 10 {
			cc, err := grpc.NewClient("passthrough:///"+vip(200, 8095), grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithAuthority("servesfirst.shop.aether.internal:8095"), grpc.WithContextDialer(dialer(w.Pod("web"))))
			if err != nil {
				t.Fatal(err)
			}
			s, err := cc.NewStream(ctx, &desc.Streams[0], "/early.Both/Talk")
			if err != nil {
				t.Fatal(err)
			}
			if err := s.SendMsg(&healthpb.HealthCheckRequest{}); err != nil {
				t.Fatal(err)
			}
			got := 0
			for {
				var m healthpb.HealthCheckRequest
				if err = s.RecvMsg(&m); err != nil {
					break
				}
				got++
				<-take.C
			}
			if got != messages || status.Code(err) != codes.NotFound {
				bad, last = bad+1, fmt.Sprintf("%d of %d messages, then %v", got, messages, err)
			}
			cc.Close()
		}
		if bad > 0 {
			t.Errorf("a client that takes a message each %v: %d of 10 streams lost something, the last: %s", pace, bad, last)
		}
	}
}
