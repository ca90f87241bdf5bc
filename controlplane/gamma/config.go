package gamma

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The objects of config.aether.io/v1 as people write them (contract 10.7 to 10.9).
// The decoder reads them by their json names and refuses every other; the markers
// are what an API server asks of them, and the YAML below controlplane/kube/crd is
// made from both (controlplane/kube/crd/generate.sh).

// HTTPFilter is a policy on the requests to Services of its namespace, or on the rules
// of routes that name it (contract 10.7).
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=httpfilters,singular=httpfilter,shortName=htf,scope=Namespaced
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Scope",type=string,JSONPath=`.spec.scope`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type HTTPFilter struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	// +required
	Spec HTTPFilterSpec `json:"spec"`
	// Status is not read.
	//
	// +optional
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=object
	// +kubebuilder:pruning:PreserveUnknownFields
	Status verbatim `json:"status,omitempty"`
}

// HTTPFilterSpec has exactly one authoring form: rbac, extAuthz, headerToMetadata, or
// filter with typedConfig.
//
// +kubebuilder:validation:XValidation:rule="[has(self.filter) || has(self.typedConfig), has(self.headerToMetadata), has(self.extAuthz), has(self.rbac)].exists_one(x, x)",message="write exactly one of rbac, extAuthz, headerToMetadata, and filter with typedConfig; another policy is another HTTPFilter"
// +kubebuilder:validation:XValidation:rule="has(self.filter) == has(self.typedConfig)",message="filter and typedConfig go together: write both, or one of rbac, extAuthz and headerToMetadata in their place"
// +kubebuilder:validation:XValidation:rule="!has(self.scope) || self.scope != 'SCOPE_INBOUND' || has(self.rbac) || has(self.extAuthz)",message="SCOPE_INBOUND is for rbac and extAuthz: write SCOPE_ROUTE or SCOPE_CHAIN"
// +kubebuilder:validation:XValidation:rule="!has(self.scope) || self.scope in ['SCOPE_UNSPECIFIED', 'SCOPE_ROUTE'] || (has(self.targetRefs) && size(self.targetRefs) > 0)",message="SCOPE_CHAIN and SCOPE_INBOUND are in force at the Services that targetRefs names: name one at least"
type HTTPFilterSpec struct {
	// Filter names the filter that typedConfig is for: envoy.filters.http.header_mutation.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self == 'envoy.filters.http.header_mutation'",message="there is no Envoy here: write rbac, extAuthz or headerToMetadata in place of filter and typedConfig; the one filter that is read in Envoy's form is envoy.filters.http.header_mutation"
	Filter string `json:"filter,omitempty"`
	// TypedConfig is the filter's configuration: HeaderMutation or HeaderMutationPerRoute
	// of envoy.extensions.filters.http.header_mutation.v3, with its @type.
	//
	// +optional
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=object
	// +kubebuilder:pruning:PreserveUnknownFields
	TypedConfig *verbatim `json:"typedConfig,omitempty"`
	// Scope is where the filter is in force: at the rules that name it, and all rules
	// of its targets' routes (SCOPE_ROUTE, the default); on every request to its
	// targets, at the source (SCOPE_CHAIN) or at the destination (SCOPE_INBOUND).
	//
	// +optional
	// +kubebuilder:validation:Enum=SCOPE_UNSPECIFIED;SCOPE_ROUTE;SCOPE_CHAIN;SCOPE_INBOUND
	Scope string `json:"scope,omitempty"`
	// TargetRefs are Services of the filter's own namespace.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	TargetRefs []TargetRef `json:"targetRefs,omitempty"`
	// HeaderToMetadata makes a request's header select a subset of endpoints.
	//
	// +optional
	HeaderToMetadata *HeaderToMetadata `json:"headerToMetadata,omitempty"`
	// ExtAuthz asks the node's authorization service.
	//
	// +optional
	ExtAuthz *ExtAuthz `json:"extAuthz,omitempty"`
	// RBAC allows or denies by who calls and what is asked.
	//
	// +optional
	RBAC *RBAC `json:"rbac,omitempty"`
}

// TargetRef names a Service of the same namespace.
//
// +kubebuilder:validation:XValidation:rule="self.kind == 'Service' && (!has(self.group) || size(self.group) == 0 || self.group == 'core')",message="the target must be a Service: write kind Service and leave group out"
type TargetRef struct {
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Group string `json:"group,omitempty"`
	// +required
	// +kubebuilder:validation:MaxLength=63
	Kind string `json:"kind"`
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`
}

// HeaderToMetadata is a list of headers that select.
type HeaderToMetadata struct {
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Rules []HeaderToMetadataRule `json:"rules"`
}

// HeaderToMetadataRule says which header gives which key of endpoints' metadata.
type HeaderToMetadataRule struct {
	// +required
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9!#$%&'*+\-.^_\x60|~]+$`
	Header string `json:"header"`
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	MetadataKey string `json:"metadataKey"`
	// MetadataNamespace is envoy.lb unless it is said; others are kept and select nothing.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	MetadataNamespace string `json:"metadataNamespace,omitempty"`
}

// ExtAuthz is a question to the authorization service, or the end of one.
//
// +kubebuilder:validation:XValidation:rule="!has(self.disabled) || !self.disabled || !has(self.contextExtensions)",message="disabled excludes contextExtensions: keep one of the two"
type ExtAuthz struct {
	// ContextExtensions are sent along with the question.
	//
	// +optional
	// +kubebuilder:validation:MaxProperties=64
	ContextExtensions map[string]string `json:"contextExtensions,omitempty"`
	// DisableRequestBodyBuffering leaves the request's body out of the question.
	//
	// +optional
	DisableRequestBodyBuffering bool `json:"disableRequestBodyBuffering,omitempty"`
	// Disabled switches the service-wide question off for the rules that name this filter.
	//
	// +optional
	Disabled bool `json:"disabled,omitempty"`
}

// RBAC is a list of policies and what it means that one holds.
type RBAC struct {
	// Mode is ENFORCE, the default, or AUDIT: count only.
	//
	// +optional
	// +kubebuilder:validation:Enum=ENFORCE;AUDIT;MODE_UNSPECIFIED;MODE_ENFORCE;MODE_AUDIT
	Mode string `json:"mode,omitempty"`
	// Action is ALLOW, the default: a policy must hold; or DENY: none may.
	//
	// +optional
	// +kubebuilder:validation:Enum=ALLOW;DENY;ACTION_UNSPECIFIED;ACTION_ALLOW;ACTION_DENY
	Action string `json:"action,omitempty"`
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Policies []Policy `json:"policies,omitempty"`
}

// Policy holds when a principal and, if there are any, a permission does.
type Policy struct {
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Principals []Principal `json:"principals"`
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Permissions []Permission `json:"permissions,omitempty"`
}

// Principal is a caller: exactly one of its fields is set.
//
// +kubebuilder:validation:XValidation:rule="has(self.spiffeId) != has(self.namespace)",message="a principal is one thing: write exactly one of spiffeId and namespace"
type Principal struct {
	// SPIFFEID is the caller's whole identity, spiffe://example.org/ns/shop/sa/web.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	// +kubebuilder:validation:XValidation:rule="self.startsWith('spiffe://')",message="write a whole SPIFFE ID, like spiffe://example.org/ns/shop/sa/web"
	SPIFFEID string `json:"spiffeId,omitempty"`
	// Namespace is that of the caller.
	//
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
}

// Permission is something asked for: exactly one of its fields is set.
//
// +kubebuilder:validation:XValidation:rule="has(self.pathPrefix) != has(self.method)",message="a permission is one thing: write exactly one of pathPrefix and method"
type Permission struct {
	// PathPrefix is compared with the path as it came and decoded, so that it is written decoded.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=2048
	// +kubebuilder:validation:XValidation:rule="self.startsWith('/')",message="write an absolute path, which begins with /"
	PathPrefix string `json:"pathPrefix,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self == self.upperAscii()",message="methods are written in capitals, like GET"
	Method string `json:"method,omitempty"`
}

// headerMutation is the typedConfig of envoy.filters.http.header_mutation: its
// HeaderMutation and HeaderMutationPerRoute, which has only mutations, in
// protobuf's JSON form.
type headerMutation struct {
	Type         string    `json:"@type"`
	Mutations    mutations `json:"mutations"`
	MostSpecific *bool     `json:"mostSpecificHeaderMutationsWins"`
}

type mutations struct {
	Request          []fieldMutation `json:"requestMutations"`
	Query            []paramMutation `json:"queryParameterMutations"`
	Response         []fieldMutation `json:"responseMutations"`
	RequestTrailers  []verbatim      `json:"requestTrailersMutations"`
	ResponseTrailers []verbatim      `json:"responseTrailersMutations"`
}

// fieldMutation has exactly one action.
type fieldMutation struct {
	Remove        *string   `json:"remove"`
	RemoveOnMatch *verbatim `json:"removeOnMatch"`
	Append        *struct {
		Header struct {
			Key      string `json:"key"`
			Value    string `json:"value"`
			RawValue []byte `json:"rawValue"`
		} `json:"header"`
		Append         *bool  `json:"append"` // deprecated there
		AppendAction   string `json:"appendAction"`
		KeepEmptyValue bool   `json:"keepEmptyValue"`
	} `json:"append"`
}

// paramMutation has exactly one action.
type paramMutation struct {
	Remove *string `json:"remove"`
	Append *struct {
		Record *struct {
			Key   string `json:"key"`
			Value string `json:"value"`
		} `json:"record"`
		Entry *struct { // deprecated there
			Key   string `json:"key"`
			Value []byte `json:"value"`
		} `json:"entry"`
		Action string `json:"action"`
	} `json:"append"`
}

// EndpointPolicy says how requests are delivered to the pods of a Service (contract 10.8).
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=endpointpolicies,singular=endpointpolicy,scope=Namespaced
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Service",type=string,JSONPath=`.spec.targetRef.name`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type EndpointPolicy struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	// +required
	Spec EndpointPolicySpec `json:"spec"`
	// Status is not read.
	//
	// +optional
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=object
	// +kubebuilder:pruning:PreserveUnknownFields
	Status verbatim `json:"status,omitempty"`
}

// EndpointPolicySpec is a Service and its pods' socket.
type EndpointPolicySpec struct {
	// +required
	TargetRef TargetRef `json:"targetRef"`
	// UDSSocket is the Unix socket that the application listens on: <volume>/<file>, in the
	// pod's one inline csi volume of driver csi.aether.io.
	//
	// +required
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self.matches('^[^/]+/[^/]+$')",message="write <volume>/<file>, with one slash"
	// +kubebuilder:validation:XValidation:rule="!self.matches('(^|/)[.]{1,2}(/|$)')",message="volume and file are plain names, not . or .."
	// +kubebuilder:validation:XValidation:rule="!self.matches('/[^/]{55}')",message="the file's name has 54 bytes at most: /run/aether/uds/<pod UID>/<file> is a Unix socket's path, which has 107"
	UDSSocket string `json:"udsSocket"`
}

// MeshConfig are the switches of the mesh (contract 10.9, decision 034). What the object
// named default of the control plane's namespace does not say is as the proxies'
// flags have it. That of another namespace is for the pods of that namespace: of it spec.proxy
// is in force, field by field over the control plane's.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=meshconfigs,singular=meshconfig,shortName=mc,scope=Namespaced
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="Semantics",type=string,JSONPath=`.spec.routeSemantics`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name == 'default'",message="a namespace has one MeshConfig, and its name is default"
type MeshConfig struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	// +optional
	Spec MeshConfigSpec `json:"spec,omitempty"`
	// Status is not read.
	//
	// +optional
	// +kubebuilder:validation:Schemaless
	// +kubebuilder:validation:Type=object
	// +kubebuilder:pruning:PreserveUnknownFields
	Status verbatim `json:"status,omitempty"`
}

// MeshConfigSpec: a field that is absent says nothing.
type MeshConfigSpec struct {
	// RouteSemantics is how routes and names work together: Aether (Host names the
	// service, and what no rule takes reaches the service itself) or GatewayAPI (the
	// dialled address names the service, and what no rule takes gets 404).
	//
	// +optional
	// +kubebuilder:validation:Enum=Aether;GatewayAPI
	RouteSemantics *string `json:"routeSemantics,omitempty"`
	// HopSource is whose network namespace hops are dialled from: pod or node.
	//
	// +optional
	// +kubebuilder:validation:Enum=pod;node
	HopSource *string `json:"hopSource,omitempty"`
	// SameNode is how pods of one node reach each other: mTLS, or inProcess.
	//
	// +optional
	// +kubebuilder:validation:Enum=mTLS;inProcess
	SameNode *string `json:"sameNode,omitempty"`
	// +optional
	Proxy *MeshProxy `json:"proxy,omitempty"`
}

// MeshProxy is what the proxies tell.
type MeshProxy struct {
	// AccessLogsEnabled logs requests.
	//
	// +optional
	AccessLogsEnabled *bool `json:"accessLogsEnabled,omitempty"`
	// AccessLogSuccessSampleRate is the percentage of successful requests that are logged; failures all are.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	AccessLogSuccessSampleRate *float64 `json:"accessLogSuccessSampleRate,omitempty"`
	// TracingEnabled makes spans. This version makes none, and says so.
	//
	// +optional
	TracingEnabled *bool `json:"tracingEnabled,omitempty"`
	// TraceSampleRate is the share of requests that begin a trace, from 0 to 1.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1
	TraceSampleRate *float64 `json:"traceSampleRate,omitempty"`
	// EmitStatsPod labels the request metrics with the pod.
	//
	// +optional
	EmitStatsPod *bool `json:"emitStatsPod,omitempty"`
}
