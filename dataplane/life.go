package dataplane

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"aether/dataplane/model"
	"aether/tproxy/socket"
)

// What the life of a pod (package controlplane/local) asks of the node that serves it.

// Dial connects to a port of a pod's application as its requests are delivered: to its Unix
// socket, or to 127.0.0.1 from the network namespace of the pod, which is served, past capture.
func (n *Node) Dial(ctx context.Context, container string, port uint16) (net.Conn, error) {
	if w := n.store.Load().Workload(container); w != nil && w.Socket != nil {
		c, err := socket.DialUnix(ctx, socket.Unix{Dir: w.Socket.Dir, Sub: w.Socket.Pod, File: w.Socket.File})
		if err != nil {
			return nil, err
		}
		return c, nil
	}
	if model.ReservedPort(port) { // no application's: it would be a listener of ours
		return nil, fmt.Errorf("dataplane: port %d of pod %s is the mesh's own and no application's: declare another in endpoint.aether.io/port", port, container)
	}
	c, err := n.connect(ctx, container, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port))
	if err != nil {
		return nil, err
	}
	return c, nil
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
