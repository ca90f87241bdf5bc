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
		return model.ServiceName{}, fmt.Errorf("service %.128q: write <namespace>/<service account>", key)
	}
	return model.ServiceName{Namespace: ns, Name: name}, nil
}

// NameFault says why no mesh service can have the name n; empty: one can. Namespaces of Kubernetes are DNS labels (RFC 1123),
// and so is the part of a mesh name that a ServiceAccount is: one with dots in it has none (contract 1.1).
func NameFault(n model.ServiceName) string {
	switch {
	case !dnsLabel(n.Namespace):
		return fmt.Sprintf("namespace %.128q cannot be one: write lower-case letters, digits and -, a letter or digit at both ends, 63 at most", n.Namespace)
	case !dnsLabel(n.Name):
		return fmt.Sprintf("service account %.128q cannot be a part of a mesh name: give the pods one of lower-case letters, digits and -, a letter or digit at both ends, 63 at most", n.Name)
	}
	return ""
}

func dnsLabel(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	return !strings.ContainsFunc(s, func(c rune) bool { return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' })
}

// Fault is a kind of what cannot be used in a store, for counters: a closed set.
type Fault string

// The faults of a row; RowFault says which is found first.
const (
	NoFault     Fault = ""
	BadAddress  Fault = "bad_address"
	NoCluster   Fault = "no_cluster"
	NoPorts     Fault = "no_ports"
	BadPort     Fault = "bad_port"
	Unclassed   Fault = "unclassed_port"   // a port without a class
	Undeclared  Fault = "undeclared_class" // a class for a port that is not declared
	BadIdentity Fault = "bad_identity"
	ManyPorts   Fault = "many_ports"
	// OwnPorts: all that it declares are the mesh's own.
	OwnPorts Fault = "reserved_port"
	// ForeignIdentity: its service's rows may not name it (IdentityFault).
	ForeignIdentity Fault = "foreign_identity"
)

// The faults of what holds rows: a key and its value.
const (
	BadKey    Fault = "bad_key"   // it is none of the layout's (ParseKey)
	BadValue  Fault = "bad_value" // its bytes are no ServiceEndpoint
	Misplaced Fault = "misplaced" // the row is not that of its key
)

// Faults are all of them.
func Faults() []Fault {
	return []Fault{BadAddress, NoCluster, NoPorts, BadPort, Unclassed, Undeclared, BadIdentity, ManyPorts, OwnPorts, ForeignIdentity, BadKey, BadValue, Misplaced}
}

// RowFault says why a row cannot be used, for people, and of which kind that is
// (contract 9.3); "" and NoFault if it can. A fault takes the whole row: it gives no
// endpoint, port or class anywhere.
//
// A class that this version does not know is none: the port is not served, and the
// rest of the row is, so that pods of a newer version do not vanish. Port 0, which
// annotations may say and nobody can dial, and the mesh's own ports beside others are no
// fault either: such a port goes and the pod stays (contract 1.3). A row that declares
// none but them is one. What the row says of others is IdentityFault's.
func RowFault(e *registrypb.ServiceEndpoint) (Fault, string) {
	if why := noPods(e.GetIp()); why != "" {
		return BadAddress, fmt.Sprintf("ip %.64q %s", e.GetIp(), why)
	}
	switch {
	case max(len(e.GetPorts()), len(e.GetPortProtocols()), len(e.GetUdpPorts())) > model.MaxPorts:
		return ManyPorts, fmt.Sprintf("it declares %d ports, more than %d: declare those that are called", max(len(e.GetPorts()), len(e.GetPortProtocols()), len(e.GetUdpPorts())), model.MaxPorts)
	case e.GetClusterName() == "":
		return NoCluster, "cluster_name is empty"
	case len(e.GetPorts()) == 0:
		return NoPorts, "it declares no port: whoever wrote it is older than per-port classes"
	case e.GetPort() > 65535:
		return BadPort, fmt.Sprintf("port %d is no port", e.GetPort())
	}
	declared := make(map[uint32]bool, len(e.GetPorts()))
	own := 0 // of them, the mesh's
	for _, p := range e.GetPorts() {
		if p > 65535 {
			return BadPort, fmt.Sprintf("port %d is no port", p)
		}
		if e.GetPortProtocols()[p] == registrypb.PortProtocol_PORT_PROTOCOL_UNSPECIFIED {
			return Unclassed, fmt.Sprintf("port %d has no class in port_protocols", p)
		}
		if model.ReservedPort(uint16(p)) && !declared[p] {
			own++
		}
		declared[p] = true
	}
	if own == len(declared) {
		return OwnPorts, fmt.Sprintf("port %d is the mesh's own, and no other is declared", e.GetPorts()[0])
	}
	lowest, found := uint32(0), false // of those that are not declared, so that the answer hangs on no order
	for p := range e.GetPortProtocols() {
		if !declared[p] && (!found || p < lowest) {
			lowest, found = p, true
		}
	}
	if found {
		return Undeclared, fmt.Sprintf("port_protocols speaks of port %d, which is not among ports", lowest)
	}
	for _, p := range e.GetUdpPorts() {
		if !declared[p] {
			return Undeclared, fmt.Sprintf("udp_ports speaks of port %d, which is not among ports", p)
		}
	}
	if id := e.GetSpiffeId(); id != "" {
		if x, err := spiffeid.Parse(id); err != nil || x.Path() == "" {
			return BadIdentity, fmt.Sprintf("spiffe_id %.128q is no workload's SPIFFE ID", id)
		}
	}
	return NoFault, ""
}

// known reports whether this version knows the class.
func known(c registrypb.PortProtocol) bool {
	return c >= registrypb.PortProtocol_PORT_PROTOCOL_HTTP && c <= registrypb.PortProtocol_PORT_PROTOCOL_UDP
}

// Protocols are the classes under which a valid row is registered, ascending, each
// once (contract 9.4). None: it serves only what this version does not know.
func Protocols(e *registrypb.ServiceEndpoint) []registrypb.Service_Protocol {
	var out []registrypb.Service_Protocol
	for _, c := range e.GetPortProtocols() {
		if known(c) {
			out = append(out, registrypb.Service_Protocol(c))
		}
	}
	if len(e.GetUdpPorts()) > 0 {
		out = append(out, registrypb.Service_PROTOCOL_UDP)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Ports are those of a valid row, ascending, no number twice, without port 0 and
// those of classes that this version does not know. endpointmeta.Classes says from
// all of a service's rows what class a port is of.
func Ports(e *registrypb.ServiceEndpoint) []model.Port {
	out := make([]model.Port, 0, len(e.GetPorts()))
	for _, p := range e.GetPorts() {
		c := e.GetPortProtocols()[p]
		if p == 0 || !known(c) {
			continue
		}
		out = append(out, model.Port{
			Number: uint16(p), Class: model.Class(c),
			AlsoUDP: c != registrypb.PortProtocol_PORT_PROTOCOL_UDP && slices.Contains(e.GetUdpPorts(), p),
		})
	}
	slices.SortFunc(out, func(a, b model.Port) int { return int(a.Number) - int(b.Number) })
	return slices.CompactFunc(out, func(a, b model.Port) bool { return a.Number == b.Number })
}

// Weight of a row. Presence is implicit: 0 on the wire is what a writer leaves who
// says nothing, and is the default (contract 9.2), unless weightless says that it is meant.
func Weight(e *registrypb.ServiceEndpoint) uint32 {
	if e.GetWeight() == 0 && !e.GetWeightless() {
		return model.DefaultWeight
	}
	return e.GetWeight()
}

// Endpoint is what a valid row says to the data plane. The identity is the row's
// own, or the default one in trustDomain (contract 1.1); also are the forms of those that
// rows may name beside their namespace's (IdentityFault). region and zone are the row's.
// The endpoint shares the row's metadata, which must not change afterwards.
func Endpoint(service model.ServiceName, trustDomain string, e *registrypb.ServiceEndpoint, also ...string) (model.Endpoint, error) {
	if _, why := RowFault(e); why != "" {
		return model.Endpoint{}, fmt.Errorf("row %s of service %s: %s", e.GetIp(), service, why)
	}
	if _, why := IdentityFault(service, trustDomain, e, also...); why != "" {
		return model.Endpoint{}, fmt.Errorf("row %s of service %s: %s", e.GetIp(), service, why)
	}
	ip, _ := netip.ParseAddr(e.GetIp())
	k := e.GetKubernetesMetadata()
	out := model.Endpoint{
		Service: service, IP: ip.Unmap(), Pod: k.GetPodName(), Node: k.GetNodeName(), Cluster: e.GetClusterName(),
		Region: e.GetLocality().GetRegion(), Zone: e.GetLocality().GetZone(), DefaultPort: uint16(e.GetPort()),
		Ports: Ports(e), Weight: Weight(e), Health: model.Health(e.GetHealth()), SPIFFEID: e.GetSpiffeId(), Metadata: e.GetMetadata(),
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
	return out, nil
}

// Local is what a row says of its pod beside its model.Endpoint: what only its own
// node has a use for. Every field may be left out.
type Local struct {
	ContainerID string
	NetNS       string // path
	NodeIP      netip.Addr
	Check       registrypb.ServiceEndpoint_HealthCheckMode
}

// Encode is the row of an endpoint: Endpoint gives back what it was made of, but for
// Port.App, which never stands in a row (contract 1.3). An identity that is the
// default one in trustDomain is left out. e's ports and metadata are as model.Endpoint
// says; the row shares the metadata.
func Encode(trustDomain string, e *model.Endpoint, l Local) *registrypb.ServiceEndpoint {
	out := &registrypb.ServiceEndpoint{
		Ip: e.IP.Unmap().String(), ClusterName: e.Cluster, Port: uint32(e.DefaultPort), Weight: e.Weight, Weightless: e.Weight == 0,
		Health: registrypb.ServiceEndpoint_Health(e.Health), HealthCheckMode: l.Check, Metadata: e.Metadata,
		KubernetesMetadata: &registrypb.ServiceEndpoint_KubernetesMetadata{Namespace: e.Service.Namespace, PodName: e.Pod, NodeName: e.Node},
		Ports:              make([]uint32, 0, len(e.Ports)), PortProtocols: make(map[uint32]registrypb.PortProtocol, len(e.Ports)),
	}
	if e.Region != "" || e.Zone != "" {
		out.Locality = &registrypb.ServiceEndpoint_Locality{Region: e.Region, Zone: e.Zone}
	}
	if l.ContainerID != "" || l.NetNS != "" {
		out.ContainerMetadata = &registrypb.ServiceEndpoint_ContainerMetadata{ContainerId: l.ContainerID, NetworkNamespace: l.NetNS}
	}
	if l.NodeIP.IsValid() {
		out.KubernetesMetadata.NodeIp = l.NodeIP.Unmap().String()
	}
	for _, p := range e.Ports {
		out.Ports = append(out.Ports, uint32(p.Number))
		out.PortProtocols[uint32(p.Number)] = registrypb.PortProtocol(p.Class)
		if p.AlsoUDP {
			out.UdpPorts = append(out.UdpPorts, uint32(p.Number))
		}
	}
	if id, err := spiffeid.ForServiceAccount(trustDomain, e.Service.Namespace, e.Service.Name); err != nil || id.String() != e.SPIFFEID {
		out.SpiffeId = e.SPIFFEID
	}
	return out
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
	// then what changes, in order. There is no gap: after an interruption it says what
	// changed meanwhile, or the whole again. It connects again by itself and tells
	// report how it fares (nil: all is well). Rows that are not valid are left out,
	// counted, and logged once. Calls come one after the other, from one goroutine.
	Watch(ctx context.Context, on func(Change), report func(error)) error
	// Put writes a row under every class that it serves, and takes it from those that
	// it no longer does; all of it, or, where a row that is there was said later
	// (Statement.Outdates), nothing: ErrOutdated. A row that the store can never hold:
	// ErrUnfit. A store that derives its rows does nothing.
	Put(ctx context.Context, service model.ServiceName, e *registrypb.ServiceEndpoint) error
	// Delete takes a pod's row from every class, unless a row that is there stays whoever
	// by is (Statement.Keeps): ErrOutdated. What is not there is no error.
	Delete(ctx context.Context, service model.ServiceName, ip string, by Statement) error
}

// Positioned is a Store that tells how far its watch is behind its writes. Both
// methods are safe for concurrent use, and return at once.
type Positioned interface {
	// Position is that of the last Put or Delete that has returned, or, where that wrote
	// nothing, of what was there instead.
	Position() Position
	// Shown reports whether Watch has said all that was written until then. After an
	// interruption it has.
	Shown(Position) bool
}

// NamesContents reports whether the version of a watch names what is watched (decision
// 021): then it means the same at every registrar, and after any restart. Else it may be a
// number that one registrar counts, as upstream's.
func NamesContents(version string) bool {
	const digits = 32 // of 128 bits
	return len(version) == digits && strings.Trim(version, "0123456789abcdef") == ""
}

// Position is a place in a store's history, since its watch began or was last interrupted.
type Position struct{ Watch, Revision int64 }
