package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"aether/e2e/rig"
)

// chat is a gRPC service written by hand; its messages are those of the health
// service, which carry a string. Say answers one message, Talk answers each as it
// comes. "fail" ends a call with NotFound. Both send a header and a trailer.
var chat = grpc.ServiceDesc{
	ServiceName: "aether.test.Chat",
	HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{
		MethodName: "Say",
		Handler: func(_ any, ctx context.Context, dec func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			var m healthpb.HealthCheckRequest
			if err := dec(&m); err != nil {
				return nil, err
			}
			grpc.SetHeader(ctx, metadata.Pairs("x-head", "h"))
			grpc.SetTrailer(ctx, metadata.Pairs("x-tail", "t", "x-tail-bin", "\x00\xff"))
			if m.Service == "fail" {
				return nil, status.Error(codes.NotFound, "nothing there: 100% sûr")
			}
			return &m, nil
		},
	}},
	Streams: []grpc.StreamDesc{{
		StreamName: "Talk", ServerStreams: true, ClientStreams: true,
		Handler: func(_ any, s grpc.ServerStream) error {
			s.SetTrailer(metadata.Pairs("x-tail", "t"))
			for {
				var m healthpb.HealthCheckRequest
				switch err := s.RecvMsg(&m); {
				case errors.Is(err, io.EOF):
					return nil
				case err != nil:
					return err
				case m.Service == "fail":
					return status.Error(codes.NotFound, "nothing there")
				}
				if err := s.SendMsg(&m); err != nil {
					return err
				}
			}
		},
	}},
}

// grpcHealth is what the server of chat says of itself.
var grpcHealth = health.NewServer()

// serveGRPC serves chat; its connections are young, so that the proxy meets GOAWAY often.
func serveGRPC(ctx context.Context, s *rig.Space) error {
	l, err := s.Listen(ctx, "tcp", local(portGRPC))
	if err != nil {
		return err
	}
	g := grpc.NewServer(grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: 20 * time.Millisecond}))
	g.RegisterService(&chat, nil)
	healthpb.RegisterHealthServer(g, grpcHealth)
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.Serve(l)
	}()
	w.OnClose(func() {
		g.Stop()
		<-done
	})
	return nil
}

func grpcClient(t *testing.T, from *rig.Pod, addr, authority string) *grpc.ClientConn {
	t.Helper()
	cc, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority(authority), grpc.WithContextDialer(dialer(from)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	return cc
}

func TestGRPC(t *testing.T) {
	for _, by := range []struct{ name, from, addr string }{
		{"captured", "web", vip(appVIP, portGRPC)},
		{"proxy port", "job", proxyPort},
	} {
		t.Run(by.name, func(t *testing.T) {
			t.Parallel()
			ctx := within(t, patience)
			cc := grpcClient(t, w.Pod(by.from), by.addr, fmt.Sprintf("%s:%d", appName, portGRPC))
			say := func(in string) (string, metadata.MD, metadata.MD, error) {
				var out healthpb.HealthCheckRequest
				var head, tail metadata.MD
				err := cc.Invoke(ctx, "/aether.test.Chat/Say", &healthpb.HealthCheckRequest{Service: in}, &out, grpc.Header(&head), grpc.Trailer(&tail))
				return out.Service, head, tail, err
			}
			for _, in := range []string{"hello", "", strings.Repeat("x", 200<<10)} {
				out, head, tail, err := say(in)
				if err != nil || out != in || fmt.Sprint(head["x-head"], tail["x-tail"], tail["x-tail-bin"]) != "[h] [t] [\x00\xff]" {
					t.Errorf("unary of %d bytes: %d bytes, header %v, trailer %v, %v", len(in), len(out), head, tail, err)
				}
			}
			_, _, tail, err := say("fail")
			if s := status.Convert(err); s.Code() != codes.NotFound || s.Message() != "nothing there: 100% sûr" || len(tail["x-tail"]) != 1 {
				t.Errorf("status of a failed call: %v, trailer %v", err, tail)
			}
			// Each message is answered before the next is sent: nothing may wait for an end.
			s, err := cc.NewStream(ctx, &chat.Streams[0], "/aether.test.Chat/Talk")
			if err != nil {
				t.Fatal(err)
			}
			for i := range 100 {
				in := healthpb.HealthCheckRequest{Service: fmt.Sprint("message ", i)}
				var out healthpb.HealthCheckRequest
				if err := s.SendMsg(&in); err != nil {
					t.Fatal(err)
				}
				if err := s.RecvMsg(&out); err != nil || out.Service != in.Service {
					t.Fatalf("message %d: %q, %v", i, out.Service, err)
				}
			}
			if err := s.CloseSend(); err != nil {
				t.Fatal(err)
			}
			var end healthpb.HealthCheckRequest
			if err := s.RecvMsg(&end); !errors.Is(err, io.EOF) || len(s.Trailer()["x-tail"]) != 1 {
				t.Errorf("end of the stream: %v, trailer %v", err, s.Trailer())
			}
			// A failure in the middle of a stream.
			if s, err = cc.NewStream(ctx, &chat.Streams[0], "/aether.test.Chat/Talk"); err != nil {
				t.Fatal(err)
			}
			if err := s.SendMsg(&healthpb.HealthCheckRequest{Service: "fail"}); err != nil {
				t.Fatal(err)
			}
			if err := s.RecvMsg(&end); status.Code(err) != codes.NotFound {
				t.Errorf("failed stream: %v", err)
			}
		})
	}
}

// TestGRPCConnectionAge: a server that ends its connections in order (GOAWAY) costs no call.
func TestGRPCConnectionAge(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	cc := grpcClient(t, w.Pod("web"), vip(appVIP, portGRPC), fmt.Sprintf("%s:%d", appName, portGRPC))
	s, err := cc.NewStream(ctx, &chat.Streams[0], "/aether.test.Chat/Talk")
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	calls := 0
	for ; time.Since(start) < time.Second; calls++ {
		m := healthpb.HealthCheckRequest{Service: fmt.Sprint(calls)}
		var out healthpb.HealthCheckRequest
		if err := cc.Invoke(ctx, "/aether.test.Chat/Say", &m, &out); err != nil || out.Service != m.Service {
			t.Fatalf("call %d after %v: %q, %v", calls, time.Since(start), out.Service, err)
		}
		if err := s.SendMsg(&m); err != nil {
			t.Fatal(err)
		}
		if err := s.RecvMsg(&out); err != nil || out.Service != m.Service {
			t.Fatalf("message %d of a stream that is %v old: %q, %v", calls, time.Since(start), out.Service, err)
		}
	}
	t.Logf("%d calls and messages in a second", calls)
}

// TestGRPCRefused: a refusal of a gRPC request, by the proxy of either node, is one that gRPC clients
// can show and act upon (docs/engine.md, "gRPC"; contract 5.7).
func TestGRPCRefused(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, authority, method string
		code                    codes.Code
		message                 string
	}{
		{"at the source", appName + ":7777", "/aether.test.Chat/Say", codes.Unknown, "port-not-declared"},
		{"no such name", "nobody.shop.aether.internal:80", "/aether.test.Chat/Say", codes.Unimplemented, "no mesh service"},
		{"at the destination", fmt.Sprintf("%s:%d", appName, portNobody), "/aether.test.Chat/Say", codes.Unavailable, "does not listen"},
		{"the application's own", fmt.Sprintf("%s:%d", appName, portGRPC), "/aether.test.Chat/None", codes.Unimplemented, "unknown method None"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cc := grpcClient(t, w.Pod("job"), proxyPort, tt.authority)
			err := cc.Invoke(within(t, patience), tt.method, &healthpb.HealthCheckRequest{}, &healthpb.HealthCheckRequest{})
			if s := status.Convert(err); s.Code() != tt.code || !strings.Contains(s.Message(), tt.message) {
				t.Errorf("got %v, want %v with %q", err, tt.code, tt.message)
			}
		})
	}
}

// TestGRPCHealth: what a health probe asks, through capture, the hop and back, and a watch that is told of a change.
func TestGRPCHealth(t *testing.T) {
	t.Parallel()
	ctx := within(t, patience)
	c := healthpb.NewHealthClient(grpcClient(t, w.Pod("web"), vip(appVIP, portGRPC), fmt.Sprintf("%s:%d", appName, portGRPC)))
	if r, err := c.Check(ctx, &healthpb.HealthCheckRequest{}); err != nil || r.Status != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("the server: %v, %v", r, err)
	}
	s, err := c.Watch(ctx, &healthpb.HealthCheckRequest{Service: "netns"})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []healthpb.HealthCheckResponse_ServingStatus{healthpb.HealthCheckResponse_SERVICE_UNKNOWN, healthpb.HealthCheckResponse_NOT_SERVING} {
		if i > 0 {
			grpcHealth.SetServingStatus("netns", want)
		}
		if r, err := s.Recv(); err != nil || r.Status != want {
			t.Fatalf("watched: %v, %v, want %v", r, err, want)
		}
	}
}
