package gamma

import (
	"fmt"
	"math"

	"aether/controlplane/input"
	"aether/dataplane/model"
)

// The MeshConfig of the whole mesh, where there are several.
const (
	MeshNamespace = "aether-system"
	MeshName      = "default"
)

// The values of MeshConfig's hopSource.
const (
	hopFromPod  = "pod"
	hopFromNode = "node"
)

// Mesh is what a MeshConfig says.
type Mesh struct {
	Namespace, Name string
	Refused         bool // nothing of it is in force
	spec            MeshConfigSpec
}

// MeshConfig reads a MeshConfig (contract 10.9, design 9). A refused one says nothing.
func (r *Reader) MeshConfig(o Object) *Mesh {
	var m MeshConfig
	flaws := append(r.tolerate(o, r.Strict(o, &m)), r.OwnAnnotations(o, m.Annotations)...)
	bad := func(path []string, format string, args ...any) {
		flaws = append(flaws, Flaw{Line: o.At(path...), Reason: fmt.Sprintf(format, args...)})
	}
	one := func(field string, v *string, these ...string) {
		if v != nil && *v != these[0] && *v != these[1] {
			bad(spec(field), "spec.%s %.100q does not exist: write %s or %s", field, *v, these[0], these[1])
		}
	}
	one("routeSemantics", m.Spec.RouteSemantics, model.Aether.String(), model.GatewayAPI.String())
	one("sameNode", m.Spec.SameNode, model.MTLS.String(), model.InProcess.String())
	one("hopSource", m.Spec.HopSource, hopFromPod, hopFromNode)
	if p := m.Spec.Proxy; p != nil {
		rate := func(name string, v *float64, max float64) {
			if v != nil && !(*v >= 0 && *v <= max) {
				bad(spec("proxy", name), "spec.proxy.%s %v: write a number from 0 to %v", name, *v, max)
			}
		}
		rate("accessLogSuccessSampleRate", p.AccessLogSuccessSampleRate, 100)
		rate("traceSampleRate", p.TraceSampleRate, 1)
		for _, s := range []struct {
			name string
			set  bool
		}{{"accessLogsEnabled", p.AccessLogsEnabled != nil}, {"accessLogSuccessSampleRate", p.AccessLogSuccessSampleRate != nil},
			{"tracingEnabled", p.TracingEnabled != nil}, {"traceSampleRate", p.TraceSampleRate != nil}, {"emitStatsPod", p.EmitStatsPod != nil}} {
			if s.set && !r.API { // there they are settings, and whoever carries them out says which are not
				r.Report(o.String(), o.At(spec("proxy", s.name)...), "spec.proxy.%s is not built yet and changes nothing: it may stay", s.name)
			}
		}
	}
	f := &Mesh{Namespace: o.Namespace, Name: o.Name, spec: m.Spec}
	if f.Refused = r.Refuse(o, flaws, "the object is not in force, and where it would be routeSemantics is Aether and sameNode mTLS"); f.Refused {
		f.spec = MeshConfigSpec{}
	}
	return f
}

// Over gives base with what m says in its place, field by field (contract 10.9).
func (m *Mesh) Over(base input.Settings) input.Settings {
	s := &m.spec
	if s.RouteSemantics != nil {
		base.Semantics = model.Aether
		if *s.RouteSemantics == model.GatewayAPI.String() {
			base.Semantics = model.GatewayAPI
		}
	}
	if s.SameNode != nil {
		base.SameNode = model.MTLS
		if *s.SameNode == model.InProcess.String() {
			base.SameNode = model.InProcess
		}
	}
	if s.HopSource != nil {
		base.HopFromNode = *s.HopSource == hopFromNode
	}
	if p := s.Proxy; p != nil {
		base.AccessLogs = value(p.AccessLogsEnabled, base.AccessLogs)
		if v := p.AccessLogSuccessSampleRate; v != nil {
			base.AccessLogSuccess = uint8(math.Ceil(*v)) // a little is not nothing
		}
		base.Tracing = value(p.TracingEnabled, base.Tracing)
		base.TraceSample = value(p.TraceSampleRate, base.TraceSample)
		base.EmitStatsPod = value(p.EmitStatsPod, base.EmitStatsPod)
	}
	return base
}
