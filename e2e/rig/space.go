package rig

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// netnsDir is where ip(8) keeps named namespaces.
const netnsDir = "/run/netns"

// Space is one network namespace of a rig. Safe for concurrent use.
type Space struct {
	Name  string // "node1", or the pod's name
	NetNS string // path of the namespace

	ns string // name as ip(8) knows it
}

// NSName is the namespace's name as ip(8) and HAProxy spell it.
func (s *Space) NSName() string { return s.ns }

// Command is exec.CommandContext for a command that runs in the namespace. Its
// process id is the command's own: ip(8) steps aside with exec.
func (s *Space) Command(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "ip", append([]string{"netns", "exec", s.ns}, args...)...)
}

// Do calls f on a thread that stands in the namespace and returns its error.
// Sockets that f opens belong to the namespace for good; goroutines that f starts do not.
func (s *Space) Do(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			done <- fmt.Errorf("rig: open own namespace: %w", err)
			return
		}
		defer unix.Close(home)
		there, err := unix.Open(s.NetNS, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			done <- fmt.Errorf("rig: open namespace %s: %w", s.NetNS, err)
			return
		}
		err = unix.Setns(there, unix.CLONE_NEWNET)
		unix.Close(there)
		if err != nil {
			done <- fmt.Errorf("rig: enter namespace %s: %w", s.NetNS, err)
			return
		}
		err = f()
		// A thread that cannot go home stays locked and dies with this goroutine.
		if unix.Setns(home, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// Dial connects from inside the namespace. The address is a literal IP and port:
// names would be resolved outside.
func (s *Space) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if _, err := netip.ParseAddrPort(addr); err != nil {
		return nil, fmt.Errorf("rig: dial from %s: address must be a literal IP and port: %w", s.Name, err)
	}
	var c net.Conn
	err := s.Do(func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, addr)
		return err
	})
	return c, err
}

// Listen listens inside the namespace; the address is a literal IP and port, or ":port".
func (s *Space) Listen(ctx context.Context, network, addr string) (net.Listener, error) {
	var l net.Listener
	err := s.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, network, addr)
		return err
	})
	return l, err
}

// ListenPacket is Listen for datagrams.
func (s *Space) ListenPacket(ctx context.Context, network, addr string) (net.PacketConn, error) {
	var c net.PacketConn
	err := s.Do(func() (err error) {
		c, err = new(net.ListenConfig).ListenPacket(ctx, network, addr)
		return err
	})
	return c, err
}

// ip runs ip(8) command lines in the namespace, in one go.
func (s *Space) ip(ctx context.Context, lines ...string) error {
	return run(ctx, strings.Join(lines, "\n")+"\n", "ip", "-n", s.ns, "-batch", "-")
}

// run runs a command to its end; the error carries what it said.
func run(ctx context.Context, stdin string, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("rig: %s: %w: %s\n%s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(out.String()), stdin)
	}
	return nil
}
