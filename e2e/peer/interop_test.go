package peer

import (
	"context"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/interop"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"

	"aether/e2e/rig"
)

// The cases of grpc-go's interop client end the process when they fail, so each
// runs in a process of its own: this test binary again, told by its environment.
const (
	interopEnv          = "AETHER_PEER_INTEROP"
	interopAddrEnv      = "AETHER_PEER_INTEROP_ADDR"
	interopAuthorityEnv = "AETHER_PEER_INTEROP_AUTHORITY"
)

// interopLimit bounds a case.
const interopLimit = 30 * time.Second

type interopCall struct {
	ctx context.Context
	cc  *grpc.ClientConn
	tc  testgrpc.TestServiceClient
	new func() *grpc.ClientConn
}

// interopCases are those of the official client that need no account with a cloud. orca_oob is not among
// them: without grpc-go's internals its server reports every 30 s at most.
var interopCases = []struct {
	name string
	run  func(c interopCall)
	slow bool // left out where it can show nothing new
}{
	{name: "empty_unary", run: func(c interopCall) { interop.DoEmptyUnaryCall(c.ctx, c.tc) }},
	{name: "large_unary", run: func(c interopCall) { interop.DoLargeUnaryCall(c.ctx, c.tc) }},
	{name: "client_streaming", run: func(c interopCall) { interop.DoClientStreaming(c.ctx, c.tc) }},
	{name: "server_streaming", run: func(c interopCall) { interop.DoServerStreaming(c.ctx, c.tc) }},
	{name: "ping_pong", run: func(c interopCall) { interop.DoPingPong(c.ctx, c.tc) }},
	{name: "empty_stream", run: func(c interopCall) { interop.DoEmptyStream(c.ctx, c.tc) }},
	{name: "timeout_on_sleeping_server", run: func(c interopCall) { interop.DoTimeoutOnSleepingServer(c.ctx, c.tc) }},
	{name: "cancel_after_begin", run: func(c interopCall) { interop.DoCancelAfterBegin(c.ctx, c.tc) }},
	{name: "cancel_after_first_response", run: func(c interopCall) { interop.DoCancelAfterFirstResponse(c.ctx, c.tc) }},
	{name: "status_code_and_message", run: func(c interopCall) { interop.DoStatusCodeAndMessage(c.ctx, c.tc) }},
	{name: "special_status_message", run: func(c interopCall) { interop.DoSpecialStatusMessage(c.ctx, c.tc) }},
	{name: "custom_metadata", run: func(c interopCall) { interop.DoCustomMetadata(c.ctx, c.tc) }},
	{name: "unimplemented_method", run: func(c interopCall) { interop.DoUnimplementedMethod(c.ctx, c.cc) }},
	{name: "unimplemented_service", run: func(c interopCall) {
		interop.DoUnimplementedService(c.ctx, testgrpc.NewUnimplementedServiceClient(c.cc))
	}},
	{name: "orca_per_rpc", run: func(c interopCall) { interop.DoORCAPerRPCTest(c.ctx, c.tc) }},
	{name: "rpc_soak", slow: true, run: func(c interopCall) {
		interop.DoSoakTest(c.ctx, soak(20, func() (*grpc.ClientConn, func()) { return c.cc, func() {} }))
	}},
	{name: "channel_soak", slow: true, run: func(c interopCall) {
		interop.DoSoakTest(c.ctx, soak(10, func() (*grpc.ClientConn, func()) {
			cc := c.new()
			return cc, func() { cc.Close() }
		}))
	}},
}

// soak has the sizes of the official client.
func soak(n int, channel func() (*grpc.ClientConn, func())) interop.SoakTestConfig {
	return interop.SoakTestConfig{
		RequestSize: 271828, ResponseSize: 314159,
		PerIterationMaxAcceptableLatency: 10 * time.Second, OverallTimeout: interopLimit,
		NumWorkers: 2, Iterations: n, ServerAddr: os.Getenv(interopAddrEnv), ChannelForTest: channel,
	}
}

// interopClient is the client process: it runs one case and exits, with 0 if it was fulfilled.
func interopClient(name string) {
	connect := func() *grpc.ClientConn {
		// As the official client's, but that the name is not looked up.
		cc, err := grpc.NewClient("passthrough:///"+os.Getenv(interopAuthorityEnv), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "tcp", os.Getenv(interopAddrEnv))
			}),
			// The policy through which the ORCA cases see their reports.
			grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"test_backend_metrics_load_balancer":{}}]}`))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return cc
	}
	for _, c := range interopCases {
		if c.name == name {
			ctx, cancel := context.WithTimeout(context.Background(), interopLimit)
			defer cancel()
			cc := connect()
			c.run(interopCall{ctx: ctx, cc: cc, tc: testgrpc.NewTestServiceClient(cc), new: connect})
			cc.Close()
			os.Exit(0)
		}
	}
	fmt.Fprintf(os.Stderr, "no interop case %q\n", name)
	os.Exit(1)
}

// grpcInterop runs the cases from the pod.
func (w *world) grpcInterop(t *testing.T, from *rig.Pod, addr, authority string, all bool) {
	t.Run("interop", func(t *testing.T) {
		self, err := os.Executable()
		must(t, err)
		for _, c := range interopCases {
			if c.slow && !all {
				continue
			}
			t.Run(c.name, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(w.ctx, interopLimit)
				defer cancel()
				cmd := from.Command(ctx, self)
				cmd.Env = append(os.Environ(), interopEnv+"="+c.name, interopAddrEnv+"="+addr, interopAuthorityEnv+"="+authority)
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Errorf("%v: %s", err, out)
				}
			})
		}
	})
}

func TestGRPCInterop(t *testing.T) {
	w := newWorld(t)
	var apps app
	b := w.pod(1, "b", rig.PodManifest{Ports: "8080,8081=h2,9000=tcp"})
	w.service("b", service, 8080, 8081, 9000)
	apps.start(w, b)
	w.proxy(1)
	w.proxy(0)
	w.grpcInterop(t, w.a, "10.96.0.10:8081", host("b", 8081), true)
}
