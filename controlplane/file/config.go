package file

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The objects of config.aether.io/v1 as people write them (contract 10.7, 10.9).
// The decoder reads them by their json names and refuses every other.

type httpFilter struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              httpFilterSpec `json:"spec"`
	Status            verbatim       `json:"status"` // not read
}

// httpFilterSpec has exactly one authoring form: filter with typedConfig,
// headerToMetadata, extAuthz or rbac.
type httpFilterSpec struct {
	Filter           string            `json:"filter"`
	TypedConfig      *verbatim         `json:"typedConfig"`
	Scope            string            `json:"scope"`
	TargetRefs       []targetRef       `json:"targetRefs"`
	HeaderToMetadata *headerToMetadata `json:"headerToMetadata"`
	ExtAuthz         *extAuthz         `json:"extAuthz"`
	RBAC             *rbac             `json:"rbac"`
}

type targetRef struct {
	Group string `json:"group"`
	Kind  string `json:"kind"`
	Name  string `json:"name"`
}

type headerToMetadata struct {
	Rules []struct {
		Header            string `json:"header"`
		MetadataKey       string `json:"metadataKey"`
		MetadataNamespace string `json:"metadataNamespace"`
	} `json:"rules"`
}

type extAuthz struct {
	ContextExtensions           map[string]string `json:"contextExtensions"`
	DisableRequestBodyBuffering bool              `json:"disableRequestBodyBuffering"`
	Disabled                    bool              `json:"disabled"`
}

type rbac struct {
	Mode     string   `json:"mode"`
	Action   string   `json:"action"`
	Policies []policy `json:"policies"`
}

type policy struct {
	Name       string `json:"name"`
	Principals []struct {
		SPIFFEID  string `json:"spiffeId"`
		Namespace string `json:"namespace"`
	} `json:"principals"`
	Permissions []struct {
		PathPrefix string `json:"pathPrefix"`
		Method     string `json:"method"`
	} `json:"permissions"`
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

type meshConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              meshConfigSpec `json:"spec"`
	Status            verbatim       `json:"status"` // not read
}

type meshConfigSpec struct {
	RouteSemantics *string    `json:"routeSemantics"`
	SameNode       *string    `json:"sameNode"`
	Proxy          *meshProxy `json:"proxy"`
}

type meshProxy struct {
	AccessLogsEnabled          *bool    `json:"accessLogsEnabled"`
	AccessLogSuccessSampleRate *float64 `json:"accessLogSuccessSampleRate"`
	TracingEnabled             *bool    `json:"tracingEnabled"`
	TraceSampleRate            *float64 `json:"traceSampleRate"`
	EmitStatsPod               *bool    `json:"emitStatsPod"`
}
