package dataplane

import (
	"context"
	"fmt"
	"net"
	"net/netip"
)

// What the life of a pod (package controlplane/local) asks of the node that serves it.

// Dial connects to an address from the network namespace of a pod that is served, past capture.
func (n *Node) Dial(ctx context.Context, container string, to netip.AddrPort) (*net.TCPConn, error) {
	return n.connect(ctx, container, to)
}

// HasCertificate reports whether the pod's inbound listener can shake hands now.
func (n *Node) HasCertificate(container string) bool { return n.certs.Current(container) != nil }

// Await waits until the pod is served, or is so no longer. The error is ctx's, with what
// keeps the pod from being served where that is known.
func (n *Node) Await(ctx context.Context, container string, served bool) error {
	for {
		n.mu.Lock()
		if (n.pods[container] != nil && !n.held) == served {
			n.mu.Unlock()
			return nil
		}
		problem, synced := n.problems[container].Reason, n.synced
		n.mu.Unlock()
		select {
		case <-synced:
		case <-ctx.Done():
			if served && problem != "" {
				return fmt.Errorf("pod %s is not served: %s: %w", container, problem, ctx.Err())
			}
			return fmt.Errorf("pod %s: wait for served=%t: %w", container, served, ctx.Err())
		}
	}
}

// syncedLocked wakes Await.
func (n *Node) syncedLocked() {
	close(n.synced)
	n.synced = make(chan struct{})
}
