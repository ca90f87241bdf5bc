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

// Batch is what changed, or a whole state. Under each key stands all that the source knows of it: in a change an empty
// list says that there is nothing any more.
type Batch struct {
	Tables
	// Settings of the mesh; nil: as before.
	Settings *Settings
	// KeepSettings, of a whole state without Settings: they are there and cannot be read, so
	// that those of before the start stay as well.
	KeepSettings bool
	// Locality of this node; nil: as before.
	Locality *Locality
}

// Empty reports whether b says nothing.
func (b *Batch) Empty() bool { return b.Tables.Empty() && b.Settings == nil && b.Locality == nil }

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

// Apply is base with what o says in its place.
func (o Override) Apply(base Settings) Settings {
	override(&base.AccessLogs, o.AccessLogs)
	override(&base.AccessLogSuccess, o.AccessLogSuccess)
	override(&base.Tracing, o.Tracing)
	override(&base.TraceSample, o.TraceSample)
	override(&base.EmitStatsPod, o.EmitStatsPod)
	return base
}

func override[T any](to, from *T) {
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
