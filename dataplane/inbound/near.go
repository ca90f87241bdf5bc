package inbound

import (
	"net/netip"

	"aether/dataplane/engine"
	"aether/dataplane/model"
	"aether/dataplane/reactor"
	"aether/dataplane/snapshot"
	"aether/meshhop"
)

// LocalDestination is a pod as the destination of pods of the same process (decision 018).
// Their requests are taken as those of a hop are: by the same verdicts, fields and records.
type LocalDestination struct {
	in  *Inbound
	pod *Pod
}

// LocalDestination is p for the other pods of this process.
func (in *Inbound) LocalDestination(p *Pod) *LocalDestination { return &LocalDestination{in, p} }

// Engine is the pod's.
func (n *LocalDestination) Engine() *engine.Pod { return n.pod.Engine }

// Local is what the pod shakes hands as.
func (n *LocalDestination) Local() *meshhop.Local { return n.pod.Local }

// Admit takes a caller that has been verified, for requests on l. nil: he asks for a
// port that carries none. Safe for concurrent use.
func (n *LocalDestination) Admit(l *engine.Loop, m *meshhop.LocalPeer) *engine.ConnInfo {
	c := n.in.newConn(n.pod, reactor.Monotonic())
	if !c.admit(m.Port, m.Caller, m.XFCC) {
		c.record(0, 0, "proxy", "")
		return nil
	}
	if c.v.Deliver.Class != model.HTTP {
		return nil // declared raw TCP meanwhile: the next snapshot sends it elsewhere
	}
	c.from, c.to = addressNear(c.snap.Workload(m.Key.Pod), m.Key.Endpoint.Addr()), m.Key.Endpoint
	c.serves(l, true)
	return &c.info
}

// addressNear is the address that w, a caller of this node, would have connected from; without a
// port, for there is no connection. Invalid: none is known.
func addressNear(w *snapshot.Workload, to netip.Addr) netip.AddrPort {
	if w == nil {
		return netip.AddrPort{}
	}
	for _, a := range w.IPs {
		if a = a.Unmap(); a.Is4() == to.Unmap().Is4() {
			return netip.AddrPortFrom(a, 0)
		}
	}
	return netip.AddrPort{}
}

// Declined tells of a caller who was not verified. Safe for concurrent use.
func (n *LocalDestination) Declined(err error) {
	n.in.newConn(n.pod, reactor.Monotonic()).declined("this node", err)
}
