// Package model holds the values that describe a mesh as one node sees it: its
// own pods, everybody's endpoints, Services and routes, and the two questions
// asked of them, Flow and (in httpmsg) a request head.
//
//   - Plain values: no behaviour but validation and text forms.
//   - Nothing here is shared mutable state; whoever compiles a Mesh may keep it.
//   - Kubernetes and registry types stop above this package.
package model

import (
	"net/netip"
	"time"
)

// Well-known numbers and names (contract 2 and 3.5).
const (
	PortCapture   = 18001 // transparent TCP listener in each pod
	PortProxy     = 18081 // HTTP proxy port, 127.0.0.1 of each pod; also a dialled port
	PortRaw       = 18082 // raw-TCP spelling of a service's TCP port; UDP capture
	PortMesh      = 18008 // mTLS inbound
	PortAdmin     = 9901
	DefaultDomain = "aether.internal"
	DefaultPort   = 8080 // endpoint.aether.io/port
	DefaultWeight = 1024 // endpoint.aether.io/weight
)

// ReservedPort reports whether p can never be an application port (contract 1.3).
func ReservedPort(p uint16) bool { return p == PortProxy || p == PortRaw }

// ServiceName is the key of a mesh service: namespace and ServiceAccount.
type ServiceName struct{ Namespace, Name string }

func (n ServiceName) String() string { return n.Namespace + "/" + n.Name }

// Less orders names by namespace, then name.
func (n ServiceName) Less(o ServiceName) bool {
	if n.Namespace != o.Namespace {
		return n.Namespace < o.Namespace
	}
	return n.Name < o.Name
}

// Class is what a port of a service speaks.
type Class uint8

// The classes; the numbers are those of the registry (contract 9.2).
const (
	ClassNone Class = iota
	HTTP
	TCP
	UDP
)

// AppCodec is how the proxy speaks HTTP to the application on a port.
type AppCodec uint8

// The codecs (contract 1.3): agent-local, never in the registry.
const (
	AppHTTP1 AppCodec = iota
	AppH2C
)

// Port is one declared port of a pod.
type Port struct {
	Number uint16
	Class  Class
	App    AppCodec // meaningful for HTTP
}

// Health of an endpoint as the registry has it (contract 9.2).
type Health uint8

// Unspecified counts as healthy.
const (
	HealthUnspecified Health = iota
	Healthy
	Unhealthy
	Draining
)

// Endpoint is one registry row: a pod that serves a mesh service.
type Endpoint struct {
	Service     ServiceName
	IP          netip.Addr
	Pod         string // pod name
	Node        string
	Cluster     string
	Region      string
	Zone        string
	DefaultPort uint16 // endpoint.aether.io/port: liveness and the :18082 spelling
	Ports       []Port // ascending by number, no number twice
	Weight      uint32
	Health      Health
	SPIFFEID    string // exact identity of the pod; never empty once valid
	Metadata    map[string]string
}

// Workload is a managed pod of this node: what the proxy listens for.
type Workload struct {
	Namespace   string
	Name        string // pod name
	Account     string // ServiceAccount: with Namespace the service it serves, and its identity
	ContainerID string // key of its sockets
	NetNS       string // path of its network namespace
	IPs         []netip.Addr
	SPIFFEID    string
	DefaultPort uint16
	Ports       []Port
	Capture     Capture
	Upstreams   []ServiceName // config.aether.io/upstreams
}

// Service is the mesh service the workload belongs to.
func (w *Workload) Service() ServiceName { return ServiceName{w.Namespace, w.Account} }

// Capture is what of a pod's egress is diverted to the proxy (contract 1.5).
type Capture struct {
	RedirectAll   bool
	ExcludePorts  []uint16
	ExcludeRanges []netip.Prefix
}

// Service is a Kubernetes Service object that carries a mesh service's name.
type Service struct {
	Name       ServiceName
	ClusterIPs []netip.Addr
	Generated  bool // made by the registrar (label aether.io/mesh-service); else user-owned
	Ports      []ServicePort
}

// ServicePort maps a Service's port to the pods' port (contract 4.10).
type ServicePort struct {
	Name       string
	Number     uint16
	Target     uint16 // 0: a named target port that is not resolved: names nothing
	TargetName string // the name, when targetPort is one
	UDP        bool
	Class      Class // of a generated Service, by its appProtocol; ClassNone: not said. Read only while the service has no endpoint (contract 4.6)
}

// Route is one HTTPRoute whose parents are Services.
type Route struct {
	Namespace string
	Name      string
	Created   time.Time
	Parents   []ParentRef
	Rules     []Rule
}

// ParentRef names a Service the route is attached to; Port 0: all its ports.
type ParentRef struct {
	Service ServiceName
	Port    uint16
}

// Rule of a route: if any match holds (none: always), the filters run and one backend is chosen by weight.
type Rule struct {
	Name     string
	Matches  []Match
	Filters  []Filter
	Backends []BackendRef
	Invalid  string // not empty: the rule cannot be honoured, and why; requests that pick it get 500
}

// PathKind is how a Match compares the path.
type PathKind uint8

// The kinds; PathAny matches everything.
const (
	PathAny PathKind = iota
	PathExact
	PathPrefix // by path element, as Gateway API says
)

// Match holds when all its parts hold.
type Match struct {
	PathKind PathKind
	Path     string
	Method   string        // empty: any
	Headers  []HeaderMatch // all, exact
}

// HeaderMatch is an exact match of the field Name (lower case).
type HeaderMatch struct{ Name, Value string }

// FilterKind says what a Filter does.
type FilterKind uint8

// The kinds built so far.
const (
	RequestHeaders FilterKind = iota + 1
	ResponseHeaders
)

// Filter modifies fields: removals first, then sets, then additions.
type Filter struct {
	Kind   FilterKind
	Set    []HeaderValue
	Add    []HeaderValue
	Remove []string
}

// HeaderValue is a field to set or add; Name is lower case.
type HeaderValue struct{ Name, Value string }

// BackendRef is a weighted destination of a rule. Invalid (not empty): why its share is answered 500.
type BackendRef struct {
	Service ServiceName
	Port    uint16 // Service port
	Weight  uint32
	Filters []Filter // run after the rule's own
	Invalid string
}

// Mesh is everything a snapshot is compiled from. Order of the slices means nothing.
type Mesh struct {
	Domain      string // mesh domain: aether.internal
	TrustDomain string
	Node        string // this node's name
	Region      string
	Zone        string
	Workloads   []Workload
	Endpoints   []Endpoint
	Services    []Service
	Routes      []Route
}

// Problem is an object that is not, or not wholly, in force, and why.
type Problem struct {
	Object string // "Pod shop/cart-1"
	Where  string // "shop.yaml:12", empty when unknown
	Reason string // says what, and how to mend it
}

// Direction of a flow, seen from the workload's pod.
type Direction uint8

// The directions.
const (
	Captured Direction = iota + 1 // diverted by capture; Dst is what the client dialled
	Proxy                         // came to 127.0.0.1:18081 itself
	Inbound                       // arrived on 18008; Dst's port is the SNI's
)

// Sniff is what a connection's first bytes are. The zero value: not looked at yet.
type Sniff uint8

// The results.
const (
	SniffNone Sniff = iota
	SniffHTTP10
	SniffHTTP11
	SniffH2C
	SniffTLS
	SniffOpaque // something else
	SniffSilent // the client said nothing in time, or the server spoke first
)

// OrigDst is the address a client dialled, before capture turned the connection to us.
type OrigDst struct{ netip.AddrPort }

// Flow is one connection as the decision sees it. Comparable; String and
// ParseFlow are its text form:
//
//	shop/web > 10.96.0.10:8080 http1 host=cart:8080
//	shop/web > proxy http1 host=cart:8080
//	shop/cart < 8080 h2c peer=spiffe://td/ns/shop/sa/web
type Flow struct {
	Namespace string // of the pod: "shop"; empty only in a fault state
	Workload  string // its ServiceAccount: "web"
	Container string // Workload.ContainerID of the pod; empty: any local pod of that ServiceAccount
	Dir       Direction
	Dst       OrigDst
	Sniff     Sniff
	Host      string // authority of the first request, or the server name of a ClientHello
	Peer      string // verified SPIFFE ID of the caller; Inbound only
}
