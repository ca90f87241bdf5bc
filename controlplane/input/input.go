// Package input is what a source of the mesh says to the control loop: changes by
// key, whole states, and how the source fares. Registry, Kubernetes, files and the
// node's own pods all say it in these words, and the loop (package controlplane)
// makes one mesh of them.
//
//   - Values and an interface: no goroutine, no socket, no rule about traffic.
//   - What is said of a key replaces what the same source said of it before.
//   - What is handed over must not change afterwards.
package input

import (
	"time"

	"aether/dataplane/model"
)

// RouteKey names a route object.
type RouteKey struct {
	Kind            model.RouteKind
	Namespace, Name string
}

// Batch is what changed, or a whole state. Under each key stands all that the
// source knows of it: an empty list, or false in Catalog, says that there is nothing
// any more.
type Batch struct {
	// Endpoints are a service's rows.
	Endpoints map[model.ServiceName][]model.Endpoint
	// Services are the Service objects of a name: one, or several that contradict each other.
	Services map[model.ServiceName][]model.Service
	Routes   map[RouteKey][]model.Route
	// Filters are the HTTPFilter objects of a namespace and name.
	Filters map[model.ServiceName][]model.HTTPFilter
	// Policies are the EndpointPolicies in force for a service's pods: one, or none.
	Policies map[model.ServiceName][]model.EndpointPolicy
	// Catalog are the names that exist in the mesh, whether or not their rows are here.
	Catalog map[model.ServiceName]bool
	// Workloads are pods of this node by ContainerID: one each, or none.
	Workloads map[string][]model.Workload
	// Retained are services that the source itself wants kept against their removal
	// (contract 4.12): a configuration of files, which may be another node's dump. What
	// goes from any source is kept by the loop.
	Retained map[model.ServiceName][]model.Retained
	// Settings of the mesh; nil: as before.
	Settings *Settings
	// KeepSettings, of a whole state without Settings: they are there and cannot be read, so
	// that those of before the start stay as well.
	KeepSettings bool
	// Namespaces are what the pods of a namespace have instead of the mesh's (contract 10.9): one, or none.
	Namespaces map[string][]Override
	// Locality of this node; nil: as before.
	Locality *Locality
	// Problems are what is not, or not wholly, in force, by whatever key the source
	// finds them by again: the object's name, most often.
	Problems map[string][]model.Problem
}

// Empty reports whether b says nothing.
func (b *Batch) Empty() bool {
	return len(b.Endpoints) == 0 && len(b.Services) == 0 && len(b.Routes) == 0 && len(b.Filters) == 0 && len(b.Policies) == 0 && len(b.Catalog) == 0 &&
		len(b.Workloads) == 0 && len(b.Retained) == 0 && len(b.Problems) == 0 && len(b.Namespaces) == 0 && b.Settings == nil && b.Locality == nil
}

// Locality is where a node is: the labels topology.kubernetes.io/region and /zone.
type Locality struct{ Region, Zone string }

// Settings are the mesh's switches (MeshConfig, contract 10.9, decision 034). The
// zero value is what holds where nobody says anything.
type Settings struct {
	Semantics model.Semantics
	SameNode  model.SameNode
	// HopFromNode makes hop sockets in the node's network namespace, not the pod's (hopSource: node).
	HopFromNode bool

	AccessLogs       bool
	AccessLogSuccess uint8 // percent of the successes that are logged; failures all are
	Tracing          bool
	TraceSample      float64 // 0 to 1
	EmitStatsPod     bool
}

// Override is what of Settings is other for some pods; nil: it is not.
type Override struct {
	AccessLogs       *bool
	AccessLogSuccess *uint8
	Tracing          *bool
	TraceSample      *float64
	EmitStatsPod     *bool
}

// Over is base with what o says in its place.
func (o Override) Over(base Settings) Settings {
	take(&base.AccessLogs, o.AccessLogs)
	take(&base.AccessLogSuccess, o.AccessLogSuccess)
	take(&base.Tracing, o.Tracing)
	take(&base.TraceSample, o.TraceSample)
	take(&base.EmitStatsPod, o.EmitStatsPod)
	return base
}

func take[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

// Status is how a source fares.
type Status struct {
	// Connected: it hears of changes as they happen.
	Connected bool
	// Err says why it does not, and what to do about it; empty while Connected.
	Err string
	// Version is where in its own history the source stands, in its own words: a
	// revision, a resourceVersion. Empty: it has none.
	Version string
	// Since when it is so.
	Since time.Time
}

// Sink takes what one source says; each source has its own. Its methods are safe for
// concurrent use, return soon, and take what they are told in the order in which
// they are called.
type Sink interface {
	// Apply says what changed. All of a Batch comes into force together.
	Apply(Batch)
	// Replace says the whole state: what it does not name is not there (but Settings and
	// Locality, whose nil is as before). The first one is what the loop waits for before it
	// publishes anything.
	Replace(Batch)
	// Report says how the source fares, when that changes.
	Report(Status)
}
