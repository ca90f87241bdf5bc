package compile

import (
	"net/netip"

	"aether/controlplane/endpointmeta"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// localPods are the pods of this node that can be served.
func (x *Index) localPods() (out []*snapshot.Workload, problems []model.Problem) {
	x.udsRefused = map[string]endpointmeta.UDSReason{}
	uids := x.sharedUIDs()
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
		var mine []model.Problem
		p.Socket, mine = x.socketOf(w, object, uids)
		problems = append(problems, mine...)
		if p.Socket != nil && p.Inbound != nil {
			if raw := rawPorts(nil, ports); len(raw) > 0 {
				say("raw TCP (%s) goes to 127.0.0.1 and not to its Unix socket: an inbound filter judges the requests that come there", numbers(raw))
			}
		}
		out = append(out, p)
	}
	return out, problems
}

// socketOf is the Unix socket that a pod is delivered to by: what its annotation says, else
// what its service's EndpointPolicy does (contract 1.7, 10.8). nil: its ports on the
// loopback, also where what was asked for cannot be had.
func (x *Index) socketOf(w *model.Workload, object string, shared map[string]string) (*model.Socket, []model.Problem) {
	request, by := w.UDSSocket, "annotation "+endpointmeta.KeyUDSSocket
	if request == "" {
		p := x.endpointPolicy(w.Service())
		if p == nil {
			return nil, nil
		}
		request, by = p.UDSSocket, "EndpointPolicy "+p.Namespace+"/"+p.Name
	}
	to, err := endpointmeta.ResolveUDS(x.udsDir, w.UID, w.Volumes, request)
	if other := shared[w.UID]; err == nil && other != "" {
		to, err = nil, &endpointmeta.UDSError{Reason: endpointmeta.UDSNoUID, Text: other + " have one UID: whose directory it is cannot be told; correct the UIDs"}
	}
	if err == nil {
		return to, nil
	}
	x.udsRefused[w.ContainerID] = err.Reason
	if w.UDSSocket != "" && (err.Reason == endpointmeta.UDSBadRequest || err.Reason == endpointmeta.UDSBadFile) {
		return nil, nil // whoever read the annotation has said it, and where it stands
	}
	return nil, []model.Problem{problem(object, "%s: %.100q: %s; until then the pod's ports are delivered, and probed, over TCP to 127.0.0.1", by, request, err.Text)}
}

// endpointPolicy is the EndpointPolicy in force for a service's pods, or nil.
func (x *Index) endpointPolicy(n model.ServiceName) *model.EndpointPolicy {
	var first *model.EndpointPolicy
	for i := range x.policies[n] {
		if p := &x.policies[n][i]; first == nil || p.Name < first.Name {
			first = p
		}
	}
	return first
}

// sharedUIDs are the UIDs that two pods or more claim, with the first two names, whatever the order of
// the pods. A pod whose sandbox is made anew is one pod.
func (x *Index) sharedUIDs() map[string]string {
	type pair struct{ first, second string }
	claims, shared := map[string]pair{}, map[string]string{}
	for i := range x.workloads {
		w := &x.workloads[i]
		name, p := w.Namespace+"/"+w.Name, claims[w.UID]
		switch {
		case w.UID == "", name == p.first, name == p.second:
			continue
		case p.first == "":
			p.first = name
		case name < p.first:
			p.first, p.second = name, p.first
		case p.second == "" || name < p.second:
			p.second = name
		}
		if claims[w.UID] = p; p.second != "" {
			shared[w.UID] = "pods " + p.first + " and " + p.second
		}
	}
	return shared
}
