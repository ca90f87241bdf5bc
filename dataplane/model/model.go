// Package model holds the values that describe a mesh as one node sees it: its
// own pods, everybody's endpoints, Services and routes, and the two questions
// asked of them, Flow and (in httpmsg) a request head.
//
//   - Plain values: no behaviour but validation and text forms.
//   - Nothing here is shared mutable state; whoever compiles a Mesh may keep it.
//   - Kubernetes and registry types stop above this package.
package model

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"
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

	// DefaultUDSDir holds the directories in which pods' Unix sockets are, each named by its pod's UID (contract 1.7).
	DefaultUDSDir = "/run/aether/uds"
)

// MaxPorts bounds the ports of a pod: each is worked out on every node that needs its service.
const MaxPorts = 256

// ReservedPort reports whether p can never be an application port: the mesh spells its own by it (DialledPort),
// or its listener in each pod has it, and a destination that leads there comes back to the proxy (decision 043).
func ReservedPort(p uint16) bool { return DialledPort(p) || p == PortCapture || p == PortMesh }

// DialledPort reports whether p is one of the two that clients write for the mesh itself, and that no
// authority names a service's port by (contract 1.3, 4.3).
func DialledPort(p uint16) bool { return p == PortProxy || p == PortRaw }

// ServiceName is the key of a mesh service: namespace and ServiceAccount.
type ServiceName struct{ Namespace, Name string }

func (n ServiceName) String() string { return n.Namespace + "/" + n.Name }

// Compare orders names by namespace, then name, as cmp.Compare does.
func (n ServiceName) Compare(o ServiceName) int {
	return cmp.Or(cmp.Compare(n.Namespace, o.Namespace), cmp.Compare(n.Name, o.Name))
}

// Less reports whether n comes before o.
func (n ServiceName) Less(o ServiceName) bool { return n.Compare(o) < 0 }

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
	// AlsoUDP: the number is served over UDP as well, which is another port of the pod.
	// Never with Class UDP.
	AlsoUDP bool
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

	// UID of the pod, as whoever made it known to the node says it; empty: it is not known.
	UID string
	// Volumes of the pod's spec; nil: they are not known, which is not that there are none.
	Volumes []Volume
	// UDSSocket is endpoint.aether.io/uds-socket as written; empty: the pod does not say it (contract 1.7).
	UDSSocket string
}

// Volume is a volume that a pod declares.
type Volume struct {
	Name   string
	Driver string // of an inline csi volume; empty: it is of another kind
}

// EndpointPolicy has the pods of a service delivered to by a Unix socket (contract 10.8).
type EndpointPolicy struct {
	Namespace string // the service's, too
	Name      string
	Service   ServiceName
	UDSSocket string // "<volume>/<file>"
}

// Socket is the Unix socket at which an application takes what is for any port of its
// pod (contract 1.7): <Dir>/<Pod>/<File>.
type Socket struct {
	Dir  string // of all pods; nobody but the node's owner writes there
	Pod  string // the pod's UID: what its own directory is called
	File string // in that directory, which the pod may write to
	Name string // "unix:" and File: what it is called wherever it is shown
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

// RouteKind is which of the Gateway API's routes a Route is. The order is that of
// precedence on one port (GEP-1426): the first kind that is attached wins it.
type RouteKind uint8

// The kinds.
const (
	GRPCRoute RouteKind = iota + 1
	HTTPRoute
	TLSRoute
	TCPRoute
)

// Route is one route object whose parents are Services. A route in the
// namespace of a parent is that service's producer's and for every caller; in
// another namespace it is a consumer's, for callers of its own namespace only
// (GEP-1426).
type Route struct {
	Kind      RouteKind
	Namespace string
	Name      string
	Created   time.Time
	Parents   []ParentRef
	// ServerNames of a TLSRoute: exact, or "*." and a suffix, which stands for one
	// label or more; lower case. Other kinds have none. AnyServerName stands for one that cannot
	// be read, and its route refuses.
	ServerNames []string
	Rules       []Rule
}

// AnyServerName stands among the server names of a TLSRoute for what was written there and cannot be
// read: it may have been any name, so that all are refused (decision 063).
const AnyServerName = "*"

// ParentRef names a Service the route is attached to; Port 0: all its ports.
type ParentRef struct {
	Service ServiceName
	Port    uint16
}

// Rule of a route: if any match holds (none: always), the filters run and one
// backend is chosen by weight. Rules of a TCPRoute and TLSRoute have backends only.
type Rule struct {
	Name        string
	Matches     []Match
	Filters     []Filter
	Backends    []BackendRef
	Timeouts    Timeouts
	Retry       *Retry
	Persistence *Persistence
	Invalid     string // not empty: the rule cannot be honoured, and why; requests that pick it get 500
}

// Timeouts of a rule (Gateway API HTTPRouteTimeouts). 0: none is set.
type Timeouts struct {
	Request time.Duration // the whole, retries too
	Backend time.Duration // each attempt
}

// Retry of a rule (Gateway API HTTPRouteRetry).
type Retry struct {
	Codes    []uint16      // statuses that are tried again, ascending
	Attempts uint8         // more attempts after the first; 0: none
	Backoff  time.Duration // before the next attempt, at least; 0: not said
}

// Persistence keeps a client's requests on one endpoint (Gateway API SessionPersistence).
type Persistence struct {
	Name     string        // of the cookie or field
	Header   bool          // in a field of that name; else in a cookie
	Absolute time.Duration // longest life of a session; 0: none is set
	Idle     time.Duration // 0: none is set
	Lasting  bool          // the cookie outlives the browser (lifetimeType Permanent)
}

// PathKind is how a Match compares the path.
type PathKind uint8

// The kinds; PathAny matches everything.
const (
	PathAny PathKind = iota
	PathExact
	PathPrefix // by path element, as Gateway API says
	PathRegex  // RE2, the whole path
	PathUnread // what was written cannot be read: every path, and the rule refuses
)

// Match holds when all its parts hold.
type Match struct {
	PathKind PathKind
	Path     string
	GRPC     *GRPCMatch // of a GRPCRoute, which has no path; nil: every method
	Method   string     // empty: any
	Headers  []ValueMatch
	Query    []ValueMatch
	// Unread: the match was written with a condition, other than one on the path, that
	// cannot be read and is left out. The rule refuses, and of the matches with this path
	// this one is the first: nobody knows which of them it was meant to go before.
	Unread bool
}

// GRPCMatch compares the two elements of a gRPC request's path, "/service/method".
// An empty one matches any.
type GRPCMatch struct {
	Service, Method string
	Regex           bool // RE2, each the whole element
}

// ValueMatch compares one header field or query parameter. A field's Name is
// lower case; a parameter's is as it is.
type ValueMatch struct {
	Name, Value string
	Regex       bool // RE2, the whole value
}

// FilterKind says what a Filter does.
type FilterKind uint8

// The kinds.
const (
	RequestHeaders FilterKind = iota + 1
	ResponseHeaders
	Redirect
	Rewrite
	Mirror
	CORS
	Extension // an HTTPFilter of the route's namespace
)

// Filter of a rule or backend. What belongs to another kind than Kind is unset.
type Filter struct {
	Kind FilterKind

	Set    []HeaderValue // RequestHeaders, ResponseHeaders: removals first, then sets, then additions
	Add    []HeaderValue
	Remove []string

	Redirect  *RedirectFilter
	Rewrite   *RewriteFilter
	Mirror    *MirrorFilter
	CORS      *CORSFilter
	Extension string // the HTTPFilter's name
}

// HeaderValue is a field to set or add; Name is lower case.
type HeaderValue struct{ Name, Value string }

// PathEdit replaces the path, or of it what a prefix match matched.
type PathEdit struct {
	Kind  PathEditKind
	Value string
}

// PathEditKind of a PathEdit.
type PathEditKind uint8

// The kinds. The zero value leaves the path alone.
const (
	PathKept PathEditKind = iota
	PathFull
	PathPrefixPart
)

// RedirectFilter answers with a redirection (Gateway API HTTPRequestRedirectFilter).
type RedirectFilter struct {
	Scheme string // "http", "https"; empty: the request's
	Host   string // empty: the request's
	Port   uint16 // 0: the scheme's own where Scheme is set, else the request's
	Path   PathEdit
	Status int // 301, 302, 303, 307 or 308
}

// RewriteFilter changes authority and path before the request is forwarded.
type RewriteFilter struct {
	Host string // empty: kept
	Path PathEdit
}

// MirrorFilter sends a copy of a share of the requests to another backend, and
// throws the answers away.
type MirrorFilter struct {
	Backend     BackendRef
	Numerator   uint32
	Denominator uint32 // never 0; all: 1 of 1
}

// CORSFilter answers preflights and marks answers (Gateway API HTTPCORSFilter; Fetch, "CORS protocol").
type CORSFilter struct {
	Origins     []string // "https://a.example", "https://*.example:8443" or "*"
	Credentials bool
	Methods     []string // or "*"
	Headers     []string // or "*"
	Expose      []string
	MaxAge      time.Duration // whole seconds; 0: not said
}

// BackendRef is a weighted destination of a rule. Invalid (not empty): why its share is answered 500.
type BackendRef struct {
	Service ServiceName
	Port    uint16 // Service port
	Weight  uint32
	Filters []Filter // run after the rule's own
	Invalid string
	// Ungranted: it is in another namespace than the route, and no ReferenceGrant permits
	// it. It is in force only on a Service of that namespace (a consumer's route), and
	// only where no policy of its own would be gone around by it (decision 048).
	Ungranted bool
}

// Scope of an HTTPFilter (contract 10.7).
type Scope uint8

// The scopes.
const (
	ScopeRoute   Scope = iota + 1 // on the rules that refer to it, and all rules of its Targets' routes
	ScopeChain                    // on every request to its Targets, at the source
	ScopeInbound                  // on every request to the pods of its Targets, at the destination
)

// HTTPFilter is a filter of our own API (contract 10.7). Exactly one of the
// pointers and lists behind Targets is set, unless it is Invalid.
type HTTPFilter struct {
	Namespace string
	Name      string
	Scope     Scope
	Targets   []ServiceName // of its own namespace
	Invalid   string        // not empty: it cannot be honoured, and why; what it governs is refused

	RBAC             *RBAC
	ExtAuthz         *ExtAuthz
	HeaderToMetadata []HeaderToMetadata
	Mutation         *Mutation
}

// RBAC allows or denies by who calls and what is asked.
type RBAC struct {
	Audit    bool // counted only, never enforced
	Deny     bool // a policy that holds denies; else one must hold to allow
	Policies []Policy
}

// Policy holds when a principal and, if there are any, a permission does.
type Policy struct {
	Name        string
	Principals  []Principal // one at least
	Permissions []Permission
}

// Principal is a verified caller; exactly one field is set. On the source side
// nobody is verified and none holds (contract 10.7).
type Principal struct {
	SPIFFEID  string // exact
	Namespace string // of an identity spiffe://<any trust domain>/ns/<namespace>/sa/...
}

// Permission is something asked for; exactly one field is set.
type Permission struct {
	PathPrefix string // of the path without its query, byte by byte
	Method     string
}

// ExtAuthz asks the authorization service (contract 10.7).
type ExtAuthz struct {
	Disabled          bool // switches the service-wide one off here
	ContextExtensions map[string]string
	NoBody            bool // the request's body is not sent along
}

// HeaderToMetadata makes a field's value select a subset (contract 10.7, 5.10).
type HeaderToMetadata struct {
	Header    string // lower case
	Key       string
	Namespace string // "envoy.lb", the default, selects; others are kept and mean nothing here
}

// Mutation changes fields and query parameters (header_mutation of contract 10.7).
type Mutation struct {
	Request, Query, Response []MutationOp
}

// MutationOp is one change.
type MutationOp struct {
	Kind        MutationKind
	Name, Value string // a field's Name is lower case
}

// MutationKind of a MutationOp; the names are those of Envoy's append_action.
type MutationKind uint8

// The kinds.
const (
	AppendIfExistsOrAdd MutationKind = iota
	AddIfAbsent
	OverwriteIfExistsOrAdd
	OverwriteIfExists
	RemoveAll
)

// Semantics is how routes and names work together (routeSemantics, decision 010).
type Semantics uint8

// The semantics. The zero value is the record's.
const (
	// Aether: Host names the service; what no rule matches reaches the service itself.
	Aether Semantics = iota
	// GatewayAPI: a dialled ClusterIP names the service; with a route attached,
	// what no rule matches gets 404.
	GatewayAPI
)

// SameNode is how pods of one node reach each other (sameNode, decision 018).
type SameNode uint8

// The ways. The zero value is the record's.
const (
	// MTLS: over the hop, as pods of other nodes.
	MTLS SameNode = iota
	// InProcess: HTTP requests stay in the proxy's memory (decision 018).
	InProcess
)

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
	Filters     []HTTPFilter
	Policies    []EndpointPolicy // those in force: one a service
	Semantics   Semantics
	SameNode    SameNode

	// Catalog are names that exist in the mesh and whose rows are not on this node
	// yet: a request for one waits for them (contract 4.6). A name that has rows or
	// is not listed is judged at once.
	Catalog []ServiceName
	// Retained are services whose rows went and nothing yet says what became of them
	// (contract 4.12): until then they answer 503 on the ports they had, unless
	// rows or the generated Service say otherwise.
	Retained []Retained
}

// Retained is a service kept against its removal, with the HTTP ports it had.
type Retained struct {
	Service ServiceName
	Ports   []uint16
}

// Problem is an object that is not, or not wholly, in force, and why.
type Problem struct {
	Object string // "Pod shop/cart-1"
	Where  string // "shop.yaml:12", empty when unknown
	Reason string // says what, and how to mend it
	// Part is what of the object its own source refuses: "rules[0]", "rules[0].backendRefs[1]", or AllParts.
	// Compiling repeats such a refusal with the same Part, for a source that does not report it any more.
	// Empty: the problem is no such refusal.
	Part string `json:"-"`
	// Since when it is so. A source sets it where the object stays as it was; for all others controlplane.Loop does,
	// which sees them come.
	Since time.Time `json:",omitzero"`
}

// PortPart is the Part of a problem by which a port of a Service is refused.
func PortPart(p *ServicePort) string {
	return "ports[" + PortKey(p.Number, p.UDP) + "]"
}

// PortKey is how a port of a Service is written: "80", or "80/UDP".
func PortKey(number uint16, udp bool) string {
	if udp {
		return fmt.Sprintf("%d/UDP", number)
	}
	return strconv.Itoa(int(number))
}

// AllParts is the Part of a problem by which all of an object is refused.
const AllParts = "*"

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
	SniffOpaque    // something else
	SniffSilent    // the client said nothing in time, or the server spoke first
	SniffMalformed // begins like an HTTP/1 request and is none (sniff.BeginsRequest); told from SniffOpaque only where the port must be HTTP
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
	// Waited: the rows of the service that was dialled are not waited for any more, and what
	// else is known of it decides (contract 4.6); Captured only.
	Waited bool
}
