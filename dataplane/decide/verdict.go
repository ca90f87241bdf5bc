// Package decide answers the two questions of the data plane: what is to be
// done with a connection, and where does one HTTP request go.
//
//   - Decide, Route and Explain are pure functions of a snapshot and their
//     arguments: no clock, no I/O, nothing remembered.
//   - Every input gets a verdict with an action, and a reason out of a closed set.
//   - Decide and Route do not allocate unless a Trace is given.
//   - A service's rules and filters are in force on every verdict that delivers
//     to it; what has no such verdict is refused or handed off outside the mesh
//     (contract 4.12).
//
// It knows no socket, no codec and no Kubernetes. The rules are those of
// contract 4; each step names its section.
package decide

import (
	"strconv"
	"time"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Action says what to do. The zero value is no verdict.
type Action uint8

// The actions.
const (
	// Sniff: look at the first bytes, then ask Decide again on the same
	// snapshot with the result. Verdict.Sniff and the comment on Decide say how.
	Sniff Action = iota + 1
	// Serve: it is HTTP for the mesh; ask Route for every request.
	Serve
	// Forward to Backend over the hop: raw bytes from Decide, one HTTP request from Route.
	Forward
	// Deliver to the application of this pod, 127.0.0.1:Port (or its Unix
	// socket). From Decide with class HTTP: ask Route for every request.
	Deliver
	// Passthrough: to the address that was dialled, untouched by the mesh.
	// From Decide the connection for life, from Route one HTTP request.
	Passthrough
	// Refuse: from Decide close the connection; from Route answer Status with Text.
	Refuse
	// Reply: the proxy itself answers Status with Text; a redirection also with
	// Location, a preflight with AppendPreflight. Pipe.Authz is asked before.
	Reply
	// Await: the rows of the service Awaits are not here yet: ask for them, and
	// decide again when they are. Whoever cannot wait answers Status with Text,
	// or closes the connection (contract 4.6).
	Await
	actions
)

var actionNames = [actions]string{"invalid", "sniff", "serve", "forward", "deliver", "passthrough", "refuse", "reply", "await"}

// String is the action's name, lower case; "invalid" for the zero value and unknown ones.
func (a Action) String() string {
	if a >= actions {
		a = 0
	}
	return actionNames[a]
}

// Reason says how a verdict came about. The zero value is no reason. The
// strings are stable: they are metric labels and what tests compare.
type Reason uint8

// The reasons, by the step that gives them.
const (
	// Captured connections, before the first byte (contract 4.2).

	Loop            Reason = iota + 1 // dialled the capture port of its own pod
	DeclaredTCP                       // the address and port are a service's raw-TCP port
	RawSpelling                       // :18082 on a service: its default TCP port
	DeclaredHTTP                      // the port is an HTTP port of the service
	ProxyPort                         // the connection is to the proxy port, or was dialled to 18081
	MeshAddress                       // the address is a service's, the port is none of its own
	EndpointAddress                   // the address is a mesh pod's, and the port one that it declares HTTP
	ForeignAddress                    // the address is no service's; the bytes may still name one

	TLSRoute // the server name is a TLSRoute's (4.2 step 1)
	TCPRoute // a TCPRoute chose the destination (10.6)

	// After the sniff (4.2 step 4 and 5, 4.7).

	MeshName    // the first authority names a service for this caller
	NotMesh     // neither address nor authority is the mesh's
	TLS         // a ClientHello that no service claims
	Opaque      // not HTTP and not TLS
	ServerFirst // the client said nothing in time, or the server spoke first
	Idle        // nothing was ever said to a port that must be HTTP
	Blackhole   // scoped capture: 18082 and no raw-TCP port there
	NoNames     // the mesh has no service at all

	// Requests (4.3, 4.4, 4.8, 4.11).

	HTTPRoute              // a rule of an HTTPRoute chose the destination
	GRPCRoute              // a rule of a GRPCRoute did
	NoRule                 // routeSemantics GatewayAPI: no rule of the routes matches (decision 010)
	RBACDenied             // an RBAC filter does not allow it (10.7)
	PathSpelling           // policy, or which policy, depends on how the path is spelled (decision 009)
	TooLarge               // a value is too long for an expression, or the query has too many parameters to be looked at
	Redirect               // a rule answers with a redirection (10.2)
	CORSPreflight          // a rule's CORS filter answers a preflight
	AwaitRows              // the service is known and its rows are on their way (4.6)
	PortMismatch           // dialled one HTTP port, Host names another
	PortNotDeclared        // the service does not declare the port
	PortNotHTTP            // proxy port: the port is raw TCP or UDP
	PortRequired           // proxy port: no port in Host and 80 is not an HTTP port
	CallerNamespaceUnknown // short name on a flow without a caller namespace
	NoSuchName             // proxy port: not a mesh name
	NoEndpoint             // nothing healthy behind the destination
	InvalidBackend         // the rule or the backend reference cannot be honoured (10.4)
	BrokenService          // the service's own objects contradict each other
	Connect                // CONNECT is never tunnelled
	BadAuthority           // the authority is none: the codec answers 400, or resets an HTTP/2 stream; of Explain only
	Readyz                 // the readiness path
	Live                   // the mesh's own liveness path
	Ready                  // the mesh's own readiness path, inbound

	// Inbound (6.2).

	ServedPort // the SNI's port is one the pod declares
	UnknownSNI // it is not, or the pod is unknown
	NoVerdict  // the flow has no direction: a bug of the caller's
	reasons
)

var reasonNames = [reasons]string{
	"invalid",
	"loop", "declared-tcp", "raw-spelling", "declared-http", "proxy-port", "mesh-address", "endpoint-address", "foreign-address",
	"tls-route", "tcp-route",
	"mesh-name", "not-mesh", "tls", "opaque", "server-first", "idle", "blackhole", "no-names",
	"http-route", "grpc-route", "no-rule", "rbac-denied", "path-spelling", "too-large", "redirect", "cors-preflight", "await-rows",
	"port-mismatch", "port-not-declared", "port-not-http", "port-required",
	"caller-namespace-unknown", "no-such-name", "no-endpoint", "invalid-backend", "broken-service",
	"connect", "bad-authority", "readyz", "live", "ready",
	"served-port", "unknown-sni", "no-verdict",
}

// String is the reason's stable name; "invalid" for the zero value and unknown ones.
func (r Reason) String() string {
	if r >= reasons {
		r = 0
	}
	return reasonNames[r]
}

// Reasons are all reasons there are, for whoever makes a counter of each.
func Reasons() []Reason {
	all := make([]Reason, 0, reasons-1)
	for r := Reason(1); r < reasons; r++ {
		all = append(all, r)
	}
	return all
}

// Header is the value of the x-aether-error field of a refusal with this
// reason; "": it has none (contract 4.4).
func (r Reason) Header() string {
	switch r {
	case PortMismatch, PortNotDeclared, PortNotHTTP, PortRequired, CallerNamespaceUnknown:
		return reasonNames[r]
	}
	return ""
}

// Verdict is the answer to a question, with what is needed to act on it. The
// zero value is invalid. What it points to is of the snapshot: read only, alive
// as long as it is pointed to.
type Verdict struct {
	Action Action
	Reason Reason
	// Respelled: Pipe.Authz is to be asked about AuthzPath too, and both must be allowed.
	Respelled bool // it stands here for the size of a Verdict
	// Rule is the object that said so: "Service shop/cart", "HTTPRoute
	// shop/cart rule 1", "Pod shop/cart-1"; "" when no object did.
	Rule string

	// Sniff of a Sniff.
	Sniff Listening
	// Deliver of a Deliver.
	Deliver Application

	// Status and Text (a body, plain text) of a Refuse, Reply or Await to an HTTP
	// request. Status 0: a connection; close it. A 204 has no Text.
	Status int
	Text   string

	// Backend of a Forward, and of an Await where it is known.
	Backend *snapshot.Backend
	// Set, of a Forward, is what to pick an endpoint from: the backend's, or what
	// selection fields leave of it (contract 5.10). One can be picked unless Pinned says which.
	Set *snapshot.EndpointSet
	// Pinned, of a Forward, is the one endpoint that may be used, whatever its
	// weight: it was asked for by address or name. nil: any usable one of Set.
	Pinned *snapshot.Endpoint
	// Awaits, of an Await, is the service whose rows are missing.
	Awaits *snapshot.Service

	// Matched is the rule that a request of a Forward or Reply was taken by: its
	// timeouts, retry and persistence; also of a Refuse or Await for the backend that was
	// drawn, where another may have been chosen before. nil: none, or a Self, which has none of these.
	Matched *snapshot.Rule
	// Pipe is what is done to a request and its answer: of a Forward the chosen
	// level's; of a redirection or preflight the rule's, whose Authz is asked first; of a
	// Deliver the pod's inbound filters. nil: nothing. Its RBAC has been judged.
	Pipe *snapshot.FilterChain
	// CORS is the filter of the rule that the request was taken by, of a refusal by that rule, too:
	// it says who may read the answer. nil: none, or the rule cannot be honoured at all.
	CORS *snapshot.CORS
	// Audited is what filters that only count make of the request.
	Audited Audited
	// Prefix is the length in bytes of what the rule's prefix match matched of the path.
	Prefix int
}

// Listening says how the first bytes of a connection are read.
type Listening struct {
	// Wait is how long the client may be silent before the result is SniffSilent.
	// 0: as long as any downstream connection may be idle.
	Wait time.Duration
	// Race: the dialled address is none of the mesh's. Dial it meanwhile; if it
	// speaks first, the result is SniffSilent.
	Race bool
	// HelloOnly: a raw-TCP port with TLSRoutes. Nothing but a ClientHello
	// matters: a first byte that begins none is SniffOpaque at once
	// (contract 4.2 steps 1 and 2).
	HelloOnly bool
}

// Application is where the application of this pod is.
type Application struct {
	Port  uint16
	Class model.Class    // what it speaks
	App   model.AppCodec // the codec to speak to it, of Class HTTP
	// Socket is where the application takes the port; nil: at 127.0.0.1:Port.
	Socket *model.Socket
}

// set is a verdict on a connection; v is the zero value. Verdicts are filled in place: they are
// large, and copies of them would be a third of what a decision costs.
func (v *Verdict) set(a Action, why Reason, rule string) {
	v.Action, v.Reason, v.Rule = a, why, rule
}

// answer is a verdict on a request that the proxy answers itself.
func (v *Verdict) answer(a Action, why Reason, rule string, status int, text string) {
	v.Action, v.Reason, v.Rule, v.Status, v.Text = a, why, rule, status, text
}

// refuse is a verdict on a request that is refused.
func (v *Verdict) refuse(why Reason, rule string, status int, text string) {
	v.answer(Refuse, why, rule, status, text)
}

// String is a stable text: the action with its details, then the reason and
// the rule in brackets.
//
//	sniff race 1s (foreign-address)
//	sniff hello 1s (declared-tcp Service shop/db)
//	forward shop/cart:8080 (declared-http Service shop/cart)
//	refuse 421 (port-not-declared Service shop/cart)
//	deliver 8080 http h2c (served-port Pod shop/cart-1)
//	deliver 8080 http http1 unix:app.sock (served-port Pod shop/cart-1)
func (v Verdict) String() string {
	b := make([]byte, 0, 96)
	b = append(b, v.Action.String()...)
	switch v.Action {
	case Sniff:
		if v.Sniff.Race {
			b = append(b, " race"...)
		}
		if v.Sniff.HelloOnly {
			b = append(b, " hello"...)
		}
		if v.Sniff.Wait != 0 {
			b = append(append(b, ' '), v.Sniff.Wait.String()...)
		}
	case Forward:
		if v.Backend != nil {
			b = append(append(b, ' '), v.Backend.Name...)
		}
	case Deliver:
		b = strconv.AppendUint(append(b, ' '), uint64(v.Deliver.Port), 10)
		b = append(append(b, ' '), v.Deliver.Class.String()...)
		if v.Deliver.Class == model.HTTP {
			b = append(append(b, ' '), v.Deliver.App.String()...)
		}
		if v.Deliver.Socket != nil {
			b = append(append(b, ' '), v.Deliver.Socket.Name...)
		}
	case Refuse, Reply, Await:
		if v.Status != 0 {
			b = strconv.AppendInt(append(b, ' '), int64(v.Status), 10)
		}
	}
	b = append(append(b, " ("...), v.Reason.String()...)
	if v.Rule != "" {
		b = append(append(b, ' '), v.Rule...)
	}
	return string(append(b, ')'))
}
