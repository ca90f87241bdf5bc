package peer

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"aether/e2e/counts"
	"aether/e2e/rig"
)

// interopLimit bounds a case.
const interopLimit = 30 * time.Second

// interopCases are those of grpc-go's official client that need no account with a
// cloud: all that `-test_case` offers but the seven that name credentials, and pick_first_unary,
// which wants to know the server's id: grpc-go's own server does not say one.
var interopCases = []struct {
	name string
	slow bool // left out where it can show nothing new
	own  bool // asks the official server for what only that has
	args []string
}{
	{name: "empty_unary"},
	{name: "large_unary"},
	{name: "client_streaming"},
	{name: "server_streaming"},
	{name: "ping_pong"},
	{name: "empty_stream"},
	{name: "timeout_on_sleeping_server"},
	{name: "cancel_after_begin"},
	{name: "cancel_after_first_response"},
	{name: "status_code_and_message"},
	{name: "special_status_message"},
	{name: "custom_metadata"},
	{name: "unimplemented_method"},
	{name: "unimplemented_service"},
	{name: "orca_per_rpc", args: orcaPolicy},
	{name: "orca_oob", own: true, args: orcaPolicy}, // grpc-go's internals let it report more often than every 30 s
	{name: "rpc_soak", slow: true, args: soakArgs},
	{name: "channel_soak", slow: true, args: soakArgs},
}

var (
	// orcaPolicy is the balancer through which the ORCA cases see their reports.
	orcaPolicy = []string{`--service_config_json={"loadBalancingConfig":[{"test_backend_metrics_load_balancer":{}}]}`}
	// soakArgs leave a busy machine its time; the sizes are the client's own.
	soakArgs = []string{"--soak_iterations=20", "--soak_num_threads=2", "--soak_per_iteration_max_acceptable_latency_ms=10000", "--soak_overall_timeout_seconds=30"}
)

// interopTools builds the official client and server once a run, from the module in
// testdata/interop, which pins them and what they need, so that none of it is in the
// proxy's own go.mod.
var interopTools = sync.OnceValues(func() (dir string, err error) {
	dir = filepath.Join(built, "interop")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-o", dir, "google.golang.org/grpc/interop/client", "google.golang.org/grpc/interop/server")
	cmd.Dir = "testdata/interop"
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=readonly", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the interop client and server of grpc-go: %w\n%s", err, out)
	}
	return dir, nil
})

// grpcInterop runs the official client's cases from the pod: it dials the port of addr by
// a name, which is the authority of its requests. all: against the official server, the slow ones too.
func (w *world) grpcInterop(t *testing.T, from *rig.Pod, addr, name string, all bool) {
	t.Run("interop", func(t *testing.T) {
		tools, err := interopTools()
		must(t, err)
		ip, port, err := net.SplitHostPort(addr)
		must(t, err)
		etc := t.TempDir()
		must(t, os.WriteFile(filepath.Join(etc, "hosts"), fmt.Appendf(nil, "127.0.0.1 localhost\n%s %s\n", ip, name), 0o644))
		// The client asks for a service's configuration, too: by nobody, and so at once, it is told that there is none.
		must(t, os.WriteFile(filepath.Join(etc, "resolv.conf"), []byte("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"), 0o644))
		ran := 0
		for _, c := range interopCases {
			if (c.slow || c.own) && !all {
				continue
			}
			t.Run(c.name, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(w.ctx, interopLimit)
				defer cancel()
				// In ip(8)'s own mount namespace.
				const mount = `mount --bind "$0"/hosts /etc/hosts && mount --bind "$0"/resolv.conf /etc/resolv.conf && exec "$@"`
				args := append([]string{"sh", "-c", mount, etc, filepath.Join(tools, "client"),
					"--server_host=" + name, "--server_port=" + port, "--test_case=" + c.name}, c.args...)
				if out, err := from.Command(ctx, args...).CombinedOutput(); err != nil {
					t.Errorf("%v: %s", err, out)
				}
				ran++
			})
		}
		counts.Say(t, "gRPC interop: %d of %d cases ran", ran, len(interopCases))
	})
}

// TestGRPCInterop: the official client and the official server, captured and delivered by ours.
func TestGRPCInterop(t *testing.T) {
	tools, err := interopTools() // before the clock of the test runs
	must(t, err)
	w := newWorld(t)
	b := w.pod(1, "b", rig.PodManifest{Ports: "8081=h2"})
	w.service("b", service, 8081)
	server, err := w.rig.StartProcess(&b.Space, "interop-server", filepath.Join(tools, "server"), "--port=8081")
	must(t, err)
	w.Cleanup(server.Kill)
	must(t, server.Ready(w.ctx, func(ctx context.Context) error {
		c, err := b.Dial(ctx, "tcp", "127.0.0.1:8081")
		if err != nil {
			return err
		}
		return c.Close()
	}))
	w.proxy(1)
	w.proxy(0)
	w.grpcInterop(t, w.a, "10.96.0.10:8081", fmt.Sprintf("b.%s.%s", namespace, domain), true)
}
