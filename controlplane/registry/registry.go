// Package registry says what the registry's rows mean: which are valid, what they
// are to the data plane, and where they stand in a store. It is the one definition
// for registrar, stores and nodes.
//
//   - Pure: values in, values out.
//   - An invalid row serves nothing anywhere, and is named once with its reason (contract 9.3).
//
// Store is what the registrar needs of whatever keeps the rows.
package registry

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/mtls/spiffeid"
)

// ParseService reads "<namespace>/<service account>" (contract 1.1).
func ParseService(key string) (model.ServiceName, error) {
	ns, name, ok := strings.Cut(key, "/")
	if !ok || ns == "" || name == "" || strings.Contains(name, "/") {
		return model.ServiceName{}, fmt.Errorf("service %q: write <namespace>/<service account>", key)
	}
	return model.ServiceName{Namespace: ns, Name: name}, nil
}

// Fault is a kind of invalid row, for counters: a closed set.
type Fault string

// The faults; RowFault says which is found first.
const (
	NoFault      Fault = ""
	BadAddress   Fault = "bad_address"
	NoCluster    Fault = "no_cluster"
	NoPorts      Fault = "no_ports"
	BadPort      Fault = "bad_port"
	Unclassed    Fault = "unclassed_port"   // a port without a class
	Undeclared   Fault = "undeclared_class" // a class for a port that is not declared
	UnknownClass Fault = "unknown_class"
	BadIdentity  Fault = "bad_identity"
)

// RowFault says why a row cannot be used, for people, and of which kind that is
// (contract 9.3); "" and NoFault if it can. A fault takes the whole row: it gives no
// endpoint, port or class anywhere.
func RowFault(e *registrypb.ServiceEndpoint) (Fault, string) {
	ip, err := netip.ParseAddr(e.GetIp())
	switch {
	case err != nil || ip.IsUnspecified() || ip.Zone() != "":
		return BadAddress, fmt.Sprintf("ip %q is no address of a pod", e.GetIp())
	case e.GetClusterName() == "":
		return NoCluster, "cluster_name is empty"
	case len(e.GetPorts()) == 0:
		return NoPorts, "it declares no port: whoever wrote it is older than per-port classes"
	case e.GetPort() > 65535:
		return BadPort, fmt.Sprintf("port %d is no port", e.GetPort())
	}
	for _, p := range e.GetPorts() {
		if p == 0 || p > 65535 {
			return BadPort, fmt.Sprintf("port %d is no port", p)
		}
		switch c, ok := e.GetPortProtocols()[p]; {
		case !ok || c == registrypb.PortProtocol_PORT_PROTOCOL_UNSPECIFIED:
			return Unclassed, fmt.Sprintf("port %d has no class in port_protocols", p)
		case c > registrypb.PortProtocol_PORT_PROTOCOL_UDP || c < 0:
			return UnknownClass, fmt.Sprintf("port %d has the class %d, which this version does not know", p, c)
		}
	}
	for p := range e.GetPortProtocols() {
		if !slices.Contains(e.GetPorts(), p) {
			return Undeclared, fmt.Sprintf("port_protocols speaks of port %d, which is not among ports", p)
		}
	}
	for _, p := range e.GetUdpPorts() {
		if !slices.Contains(e.GetPorts(), p) {
			return Undeclared, fmt.Sprintf("udp_ports speaks of port %d, which is not among ports", p)
		}
	}
	if id := e.GetSpiffeId(); id != "" {
		if x, err := spiffeid.Parse(id); err != nil || x.Path() == "" {
			return BadIdentity, fmt.Sprintf("spiffe_id %q is no workload's SPIFFE ID", id)
		}
	}
	return NoFault, ""
}

// Protocols are the classes under which a valid row is registered, ascending, each
// once (contract 9.4).
func Protocols(e *registrypb.ServiceEndpoint) []registrypb.Service_Protocol {
	var out []registrypb.Service_Protocol
	for _, c := range e.GetPortProtocols() {
		out = append(out, registrypb.Service_Protocol(c))
	}
	if len(e.GetUdpPorts()) > 0 {
		out = append(out, registrypb.Service_PROTOCOL_UDP)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Endpoint is what a valid row says to the data plane. The identity is the row's
// own, or the default one in trustDomain (contract 1.1). region and zone are the row's.
func Endpoint(service model.ServiceName, trustDomain string, e *registrypb.ServiceEndpoint) (model.Endpoint, error) {
	if _, why := RowFault(e); why != "" {
		return model.Endpoint{}, fmt.Errorf("row %s of service %s: %s", e.GetIp(), service, why)
	}
	ip, _ := netip.ParseAddr(e.GetIp())
	k := e.GetKubernetesMetadata()
	out := model.Endpoint{
		Service: service, IP: ip.Unmap(), Pod: k.GetPodName(), Node: k.GetNodeName(), Cluster: e.GetClusterName(),
		Region: e.GetLocality().GetRegion(), Zone: e.GetLocality().GetZone(), DefaultPort: uint16(e.GetPort()),
		Weight: e.GetWeight(), Health: model.Health(e.GetHealth()), SPIFFEID: e.GetSpiffeId(), Metadata: e.GetMetadata(),
	}
	if e.GetHealth() > registrypb.ServiceEndpoint_DRAINING || e.GetHealth() < 0 {
		out.Health = model.Unhealthy // a state that this version does not know never gets traffic
	}
	if out.SPIFFEID == "" {
		id, err := spiffeid.ForServiceAccount(trustDomain, service.Namespace, service.Name)
		if err != nil {
			return model.Endpoint{}, fmt.Errorf("row %s of service %s: %w", e.GetIp(), service, err)
		}
		out.SPIFFEID = id.String()
	}
	out.Ports = make([]model.Port, 0, len(e.GetPorts()))
	for _, p := range e.GetPorts() {
		out.Ports = append(out.Ports, model.Port{Number: uint16(p), Class: model.Class(e.GetPortProtocols()[p])})
	}
	slices.SortFunc(out.Ports, func(a, b model.Port) int { return int(a.Number) - int(b.Number) })
	out.Ports = slices.CompactFunc(out.Ports, func(a, b model.Port) bool { return a.Number == b.Number })
	return out, nil
}

// Row is one row where it stands.
type Row struct {
	Region, Cluster string // the partition of the mesh it belongs to (contract 9.5)
	Service         model.ServiceName
	Protocol        registrypb.Service_Protocol // one of the classes that it is registered under
	IP              string
	Endpoint        *registrypb.ServiceEndpoint // nil: there is none any more
}

// Change is what a Store hears.
type Change struct {
	// Whole: Rows are all there are; what was known and is not among them has gone.
	Whole bool
	Rows  []Row
	// Version is where in its history the store stands after it.
	Version string
}

// Store keeps the rows of the mesh: etcd, or what Kubernetes knows of pods.
type Store interface {
	// Watch lists and then follows the store until ctx ends: first a whole Change,
	// then what changes, in order, with no gap; after an interruption whole again. It
	// connects again by itself and tells report how it fares (nil: all is well). Rows
	// that are not valid are left out, counted, and logged once.
	Watch(ctx context.Context, on func(Change), report func(error)) error
	// Put writes a row under every class that it serves, and takes it from those that
	// it no longer does. A store that derives its rows does nothing.
	Put(ctx context.Context, service model.ServiceName, e *registrypb.ServiceEndpoint) error
	// Delete takes a pod's row from every class. What is not there is no error.
	Delete(ctx context.Context, service model.ServiceName, ip string) error
}
