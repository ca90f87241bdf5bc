package snapshot

import (
	"net/netip"
	"regexp"
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
	Routed                    // a user's Service that a route of its namespace names: every name, ports are the Service's
	MeshOnly                  // a user's Service that no such route names: the mesh name only, its address is not the mesh's
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
	// rows declares them; empty while there is no row, but for the ports that a
	// MeshOnly service retains. A captured dial of a MeshOnly service's mesh name
	// is judged by them (contract 4.9).
	PodPorts []Port
	// Cold: there is no row, and nothing else says which ports the service has.
	Cold bool
	// Await: the name is in the mesh's catalog and its rows are not on this node
	// yet. What would be forwarded waits for them (contract 4.6).
	Await bool
	// TLS are the TLSRoutes' server names, most specific first (contract 4.2 step 1).
	TLS []SNIMatch
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
	// Self is what happens to a request that no rule takes: to Backend, through the
	// service's own filters. Never nil for HTTP, nil for the rest.
	Self *Rule
	// Program are the producer's routes of this port, nil: none. HTTP only.
	Program *Program
	// Consumers are the consumers' routes, by the caller's namespace: for such a
	// caller they stand in the place of Program (GEP-1426). HTTP only.
	Consumers map[string]*Program
	// Split is the producer's TCPRoutes, nil: none, the port itself; Splits the
	// consumers', by the caller's namespace. TCP only.
	Split  *Split
	Splits map[string]*Split
}

// ProgramFor is the program for callers of a namespace; nil: there is none.
func (p *Port) ProgramFor(caller string) *Program {
	if c := p.Consumers[caller]; c != nil {
		return c
	}
	return p.Program
}

// SplitFor is the split for callers of a namespace; nil: the port itself.
func (p *Port) SplitFor(caller string) *Split {
	if c := p.Splits[caller]; c != nil {
		return c
	}
	return p.Split
}

// Split is weighted destinations of raw TCP.
type Split struct {
	Name      string // "TCPRoute shop/db"
	Invalid   string // not empty: nothing is forwarded, and why
	Backends  []Weighted
	WeightSum uint64
}

// SNIMatch is one server name of a TLSRoute rule. It is in force on the ports that
// the service does not serve as HTTP, and not on 18081 if it serves any. For a
// caller in whose namespace any arm of the port is, the producer's (no Caller)
// are not in force (GEP-1426).
type SNIMatch struct {
	Port   uint16 // 0: every such port
	Caller string // not empty: a consumer's, for callers of this namespace only
	Name   string // lower case; where Below, the part behind "*", as ".example.com"; empty: every name
	Below  bool
	Split  *Split
}

// Backend is one destination: a port of the pods of a service. Immutable;
// equal within one compiled snapshot only as the same pointer.
type Backend struct {
	Service model.ServiceName
	Port    uint16 // pod port
	Class   model.Class
	ID      int    // dense; its place in Backends and in the endpoint table. -1: in neither, for nobody knows yet whether there is such a port; without endpoints
	SNI     string // Port in decimal: what the hop's ClientHello says (contract 5.1)
	Name    string // "shop/cart:8080"
	Texts   *Texts // of its service
}

// Program is the rules of the routes attached to one port, one Match each, in
// the order of Gateway API precedence (contract 10.3). The first arm that
// matches decides; if none does it is the port's Self, or 404 where Strict.
type Program struct {
	Arms    []Match
	Strict  bool   // routeSemantics GatewayAPI
	Policy  bool   // a rule of it carries policy, or cannot be honoured and may have been meant to
	Invalid string // not empty: the body of the 500 that every request gets
	// MaxText is the most bytes that an expression of it is run on: less, the more
	// all of them cost, so that the work of one request has a bound.
	MaxText int
}

// Match is one match of one rule.
type Match struct {
	PathKind model.PathKind
	Path     string         // without a trailing slash where PathKind is a prefix; "" matches everything then
	Regex    *regexp.Regexp // anchored; of PathRegex
	GRPC     *GRPCArm       // nil: none
	Method   string         // "": any
	Headers  []ValueMatch
	Query    []ValueMatch
	Index    int // of the match in its rule, from 1; 0: the rule has no match and takes everything
	Rule     *Rule
}

// GRPCArm compares the elements of "/service/method". Where a regex is nil the
// text decides, and an empty text matches every element that is not empty.
type GRPCArm struct {
	Service, Method           string
	ServiceRegex, MethodRegex *regexp.Regexp // anchored
}

// ValueMatch compares a field or parameter. Regex, where not nil, is anchored.
type ValueMatch struct {
	Name, Value string
	Regex       *regexp.Regexp
}

// Rule is what a matching request gets. Immutable.
type Rule struct {
	Name        string       // "HTTPRoute shop/cart rule 1", with the rule's own name in brackets; "" of a port's Self
	GRPC        bool         // it is a GRPCRoute's
	Invalid     string       // not empty: the body of the 500 that every request gets
	Pipe        *FilterChain // never nil; what backends add is in their own
	Backends    []Weighted   // empty: the port the request asked for, or FilterChain.Redirect answers
	WeightSum   uint64       // over Backends; 0 with Backends: every request gets 503
	Timeouts    model.Timeouts
	Retry       *model.Retry
	Persistence *model.Persistence
}

// Weighted is a backend's share of a rule.
type Weighted struct {
	Upto    uint64 // end of its share: sum of the weights up to and with its own
	Backend *Backend
	Invalid string       // not empty: the body of the 500 that its share gets
	Pipe    *FilterChain // the rule's with the backend's own filters; nil in a Split
}

// FilterChain is all that is done to a request and its answer, levels in order: the
// rule's filters, the backend's, then the service's own (contract 10.7). What
// is decided comes first: RBAC, Authz, CORS preflight, Redirect; then the edits.
// A nil *FilterChain does nothing. Immutable.
type FilterChain struct {
	RBAC      []RBAC     // all must allow
	Authz     *Authz     // nil: nobody is asked
	Selectors []Selector // fields that select a subset, beside x-aether-subset-*
	CORS      *CORS
	Redirect  *Redirect
	Rewrite   *Rewrite
	Request   []Op // fields of the request
	Query     []Op // parameters of its query
	Response  []Op // fields of the answer
	Mirrors   []MirrorTo
}

// Policy reports whether access is decided in p: what spellings of a path must
// not be able to walk around.
func (p *FilterChain) Policy() bool {
	if p == nil {
		return false
	}
	if p.Authz != nil {
		return true
	}
	for i := range p.RBAC {
		if !p.RBAC[i].Audit {
			return true
		}
	}
	return false
}

// RBAC is one filter's policies (contract 10.7).
type RBAC struct {
	Name     string // "HTTPFilter shop/admins"
	Audit    bool
	Deny     bool
	Policies []model.Policy
}

// Authz says that the authorization service is asked.
type Authz struct {
	Name              string // "HTTPFilter shop/ask"
	ContextExtensions map[string]string
	NoBody            bool
	Next              *Authz // asked too, with its own extensions, after this one said yes; nil: none
}

// Selector makes the value of a field select the endpoints whose metadata Key has it.
type Selector struct{ Header, Key string }

// Redirect answers with a Location.
type Redirect struct {
	Scheme, Host string
	Port         uint16
	Path         model.PathEdit
	Status       int
}

// Rewrite changes authority and path before the request goes out.
type Rewrite struct {
	Host []byte // nil: kept
	Path model.PathEdit
}

// CORS answers preflights and marks answers, ready to be written.
type CORS struct {
	AnyOrigin   bool
	Origins     []Origin
	Credentials bool
	Methods     []byte // joined by commas; "*" where AnyMethod
	AnyMethod   bool
	Headers     []byte // joined by commas; "*" where AnyHeader
	AnyHeader   bool
	Expose      []byte // joined by commas; nil: none
	MaxAge      []byte // decimal seconds; nil: none
}

// Origin is an allowed origin, lower case: its text is Prefix, then, where Wild,
// anything, then Suffix. Default ports are left off.
type Origin struct {
	Prefix, Suffix string
	Wild           bool
}

// MirrorTo is a backend that gets a copy of a share of the requests.
type MirrorTo struct {
	Backend                *Backend
	Numerator, Denominator uint32
}

// Op is one change of a list of fields (or parameters). Names of fields are
// lower case.
type Op struct {
	Kind        model.MutationKind
	Name, Value []byte
}

// Apply runs ops over the fields of h, in order. The head keeps slices of ops,
// which live as long as the snapshot does. It allocates only when h.Fields has
// no room.
func Apply(ops []Op, h *httpmsg.Head) {
	for i := range ops {
		o := &ops[i]
		switch o.Kind {
		case model.RemoveAll:
			h.Del(string(o.Name))
		case model.OverwriteIfExistsOrAdd:
			h.Set(o.Name, o.Value)
		case model.AppendIfExistsOrAdd:
			h.Add(o.Name, o.Value)
		case model.AddIfAbsent:
			if _, ok := h.Get(string(o.Name)); !ok {
				h.Add(o.Name, o.Value)
			}
		case model.OverwriteIfExists:
			if _, ok := h.Get(string(o.Name)); ok {
				h.Set(o.Name, o.Value)
			}
		}
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
	Inbound     *FilterChain  // what inbound filters of its service do: RBAC and Authz only; nil: nothing
	Socket      *model.Socket // where it is delivered to, but for what SocketOf says; nil: 127.0.0.1, by the port's number
	Rule        string        // "Pod shop/cart-1"
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

// SocketOf is the Unix socket that a port of class c is delivered to; nil: 127.0.0.1. All ports
// lead to the one socket, so where inbound filters judge what comes there as HTTP, raw
// TCP does not go there: its bytes may be a request that nobody has judged (decision 035).
func (w *Workload) SocketOf(c model.Class) *model.Socket {
	if c == model.TCP && w.Inbound != nil {
		return nil
	}
	return w.Socket
}

// Address is the pod's first address, with port 0; invalid: it has none.
func (w *Workload) Address() netip.AddrPort {
	if len(w.IPs) == 0 {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(w.IPs[0], 0)
}

// Owns reports whether a is an address of the pod.
func (w *Workload) Owns(a netip.Addr) bool { return slices.Contains(w.IPs, a.Unmap()) }
