package snapshot

import (
	"net/netip"
	"slices"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
)

// Kind says where a mesh service's ports and names come from.
type Kind uint8

// The kinds (contract 4.5, 4.9, 4.10). The zero value is no kind.
const (
	Bare      Kind = iota + 1 // pods without a Service object: the mesh name only, ports are the pods'
	Generated                 // the registrar's Service: every name, ports are the pods'
	Routed                    // a user's Service that a route names: every name, ports are the Service's
	MeshOnly                  // a user's Service that no route names: the mesh name only, its address is not the mesh's
)

// String is "bare", "generated", "routed" or "meshOnly".
func (k Kind) String() string {
	switch k {
	case Bare:
		return "bare"
	case Generated:
		return "generated"
	case Routed:
		return "routed"
	case MeshOnly:
		return "meshOnly"
	}
	return "invalid"
}

// Service is one mesh service as callers see it. Immutable.
type Service struct {
	Name model.ServiceName
	Kind Kind
	// Kubernetes: it answers to its Kubernetes names and the short name too
	// (contract 4.5).
	Kubernetes bool
	// Rule is the object behind it, for verdicts: "Service shop/cart", or
	// "ServiceAccount shop/cart" where there is no Service.
	Rule string
	// Broken, when not empty, is the answer (a body) to everything that would
	// reach the service: its objects contradict each other (a Problem says how).
	Broken string
	// Ports are what a dial or an authority may name, ascending by number, each
	// number once. For a user's Service these are the Service's numbers.
	Ports []Port
	// PodPorts are the same by the pods' own numbers, as the majority of the
	// rows declares them; empty while there is no row. A captured dial of a
	// MeshOnly service's mesh name is judged by them (contract 4.9).
	PodPorts []Port
	// Cold: there is no row, and nothing else says which ports the service has.
	Cold bool
	// Raw is the service's default TCP port, which :18082 spells (contract
	// 4.2); nil: it has no TCP port.
	Raw *Backend
	// Texts are the bodies of its refusals.
	Texts *Texts
}

// Texts are bodies of refusals, each one line with its newline. They name the
// service's ports and never a dialled one (contract 4.4).
type Texts struct {
	PortMismatch, PortNotDeclared, PortNotHTTP, PortRequired, NoEndpoint string
}

// Mesh reports whether the service's ClusterIPs are the mesh's: a dial to one
// is never handed to the cluster's own routing as if it were foreign (contract 4.9).
func (s *Service) Mesh() bool { return s.Kind == Generated || s.Kind == Routed }

// Port is the entry of Ports with that number, or nil.
func (s *Service) Port(n uint16) *Port { return find(s.Ports, n) }

// PodPort is the entry of PodPorts with that number, or nil.
func (s *Service) PodPort(n uint16) *Port { return find(s.PodPorts, n) }

func find(ports []Port, n uint16) *Port {
	for i := range ports { // a service has a handful
		if ports[i].Number == n {
			return &ports[i]
		}
	}
	return nil
}

// Port of a service: what it speaks and where it leads.
type Port struct {
	Number  uint16
	Class   model.Class
	Backend *Backend // nil for UDP, which has no hop yet
	Program *Program // routes attached to this port; nil: none. HTTP only
}

// Backend is one destination: a port of the pods of a service. Immutable;
// equal within one compiled snapshot only as the same pointer.
type Backend struct {
	Service model.ServiceName
	Port    uint16 // pod port
	Class   model.Class
	ID      int    // dense; its place in Backends and in the endpoint table
	SNI     string // Port in decimal: what the hop's ClientHello says (contract 5.1)
	Name    string // "shop/cart:8080"
	Texts   *Texts // of its service
}

// Program is the rules of the routes attached to one port, one arm a match, in
// the order of Gateway API precedence (contract 10.3). The first arm that
// matches decides; if none does, the port itself is the destination.
type Program struct{ Arms []Arm }

// Arm is one match of one rule.
type Arm struct {
	PathKind model.PathKind
	Path     string // without a trailing slash where PathKind is a prefix; "" matches everything then
	Method   string // "": any
	Headers  []model.HeaderMatch
	Index    int // of the match in its rule, from 1; 0: the rule has no match and takes everything
	Rule     *Rule
}

// Rule is what a matching request gets.
type Rule struct {
	Name      string // "HTTPRoute shop/cart rule 1", with the rule's own name in brackets
	Invalid   string // not empty: the body of the 500 that every request gets
	Request   *HeaderOps
	Response  *HeaderOps
	Backends  []Weighted // empty: the port the request asked for
	WeightSum uint64     // over Backends; 0 with Backends: every request gets 500
}

// Weighted is a backend's share of a rule.
type Weighted struct {
	Upto     uint64 // end of its share: sum of the weights up to and with its own
	Backend  *Backend
	Invalid  string // not empty: the body of the 500 that its share gets
	Request  *HeaderOps
	Response *HeaderOps
}

// HeaderOps are changes to a message's fields, ready to be applied. Names are
// lower case. Immutable: the slices are shared by all requests.
type HeaderOps struct {
	Set, Add []httpmsg.Field
	Remove   [][]byte
}

// Apply removes, then sets, then adds (Gateway API HTTPHeaderFilter). The head
// keeps slices of o, which live as long as the snapshot does. It allocates only
// when h.Fields has no room. A nil o changes nothing.
func (o *HeaderOps) Apply(h *httpmsg.Head) {
	if o == nil {
		return
	}
	for _, n := range o.Remove {
		h.Del(string(n))
	}
	for i := range o.Set {
		h.Set(o.Set[i].Name, o.Set[i].Value)
	}
	for i := range o.Add {
		h.Add(o.Add[i].Name, o.Add[i].Value)
	}
}

// Workload is a local pod as the data plane needs it. Immutable.
type Workload struct {
	Service     model.ServiceName // the service it serves: its identity's namespace and account
	Pod         string
	ContainerID string
	NetNS       string // path of its network namespace
	SPIFFEID    string
	IPs         []netip.Addr
	DefaultPort uint16       // endpoint.aether.io/port: where its liveness is asked
	Ports       []model.Port // ascending; the pod's own declaration, not the service's majority
	Capture     model.Capture
	Upstreams   []model.ServiceName
	Rule        string // "Pod shop/cart-1"
}

// Port is the pod's declared port of that number.
func (w *Workload) Port(n uint16) (model.Port, bool) {
	for _, p := range w.Ports {
		if p.Number == n {
			return p, true
		}
	}
	return model.Port{}, false
}

// Owns reports whether a is an address of the pod.
func (w *Workload) Owns(a netip.Addr) bool { return slices.Contains(w.IPs, a.Unmap()) }
