package registry

import (
	"fmt"
	"maps"

	"aether/controlplane/endpointmeta"
	"aether/controlplane/registrypb"
)

// Place is where a row's pod runs.
type Place struct {
	Cluster      string // required; the cluster's name
	Region, Zone string // of the node
	Node, NodeIP string
}

// Described is what a pod is called, beside what its annotations say.
type Described struct {
	Namespace, Name    string
	IP                 string // the first of its addresses
	ContainerID, NetNS string // empty: not known
}

// Describe makes a pod's row (contract 9.2) of what its annotations say. Its health is
// unspecified. The error names what makes the row invalid (contract 9.3).
func Describe(p Described, m *endpointmeta.Meta, at Place) (*registrypb.ServiceEndpoint, error) {
	e := &registrypb.ServiceEndpoint{
		Ip: p.IP, ClusterName: at.Cluster, Port: uint32(m.DefaultPort), Weight: m.Weight, Metadata: maps.Clone(m.Metadata),
		KubernetesMetadata: &registrypb.ServiceEndpoint_KubernetesMetadata{
			Namespace: p.Namespace, PodName: p.Name, NodeName: at.Node, NodeIp: at.NodeIP,
		},
		HealthCheckMode: registrypb.ServiceEndpoint_EDS, SpiffeId: m.SPIFFEID,
		PortProtocols: make(map[uint32]registrypb.PortProtocol, len(m.Ports)),
	}
	if at.Region != "" || at.Zone != "" {
		e.Locality = &registrypb.ServiceEndpoint_Locality{Region: at.Region, Zone: at.Zone}
	}
	if p.ContainerID != "" || p.NetNS != "" {
		e.ContainerMetadata = &registrypb.ServiceEndpoint_ContainerMetadata{ContainerId: p.ContainerID, NetworkNamespace: p.NetNS}
	}
	if m.HealthCheck == endpointmeta.HealthActive {
		e.HealthCheckMode = registrypb.ServiceEndpoint_ACTIVE
	}
	for _, port := range m.Ports {
		e.Ports = append(e.Ports, uint32(port.Number))
		e.PortProtocols[uint32(port.Number)] = registrypb.PortProtocol(port.Class)
	}
	if _, why := RowFault(e); why != "" {
		return nil, fmt.Errorf("pod %s/%s has no valid row: %s", p.Namespace, p.Name, why)
	}
	return e, nil
}
