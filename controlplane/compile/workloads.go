package compile

import (
	"net/netip"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// localPods are the pods of this node that can be served.
func (x *Index) localPods() (out []*snapshot.Workload, problems []model.Problem) {
	count := map[string]int{}
	for i := range x.workloads {
		count[x.workloads[i].ContainerID]++
	}
	for i := range x.workloads {
		w := &x.workloads[i]
		object := "Pod " + w.Namespace + "/" + w.Name
		say := func(format string, args ...any) { problems = append(problems, problem(object, format, args...)) }
		switch {
		case w.ContainerID == "":
			say("has no container ID: its sockets could not be told from another pod's, so it is not served")
			continue
		case count[w.ContainerID] > 1:
			say("shares container ID %s with another pod: neither is served; remove the stale one", w.ContainerID)
			continue
		case w.SPIFFEID == "":
			say("has no SPIFFE ID: it is not served; set one, or leave aether.io/spiffe-id out for the default")
			continue
		}
		ports, why := cleanPorts(w.Ports)
		if why != "" {
			say("%s", why)
		}
		ips := make([]netip.Addr, 0, len(w.IPs))
		for _, ip := range w.IPs {
			ips = append(ips, ip.Unmap())
		}
		p := &snapshot.Workload{
			Service: w.Service(), Pod: w.Name, ContainerID: w.ContainerID, NetNS: w.NetNS, SPIFFEID: w.SPIFFEID,
			IPs: ips, DefaultPort: w.DefaultPort, Ports: ports, Capture: w.Capture, Upstreams: w.Upstreams, Rule: object,
		}
		if s := x.services[p.Service]; s != nil {
			p.Inbound = inbound(s.targetOf)
		}
		out = append(out, p)
	}
	return out, problems
}
