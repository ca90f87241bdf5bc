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
	wide            []Flaw // where it speaks of the whole mesh; Reason is the field
}

// MeshConfig reads a MeshConfig (contract 10.9, decision 034). A refused one says nothing.
func (r *Reader) MeshConfig(o Object) *Mesh {
	var m MeshConfig
	flaws := append(r.tolerate(o, r.Strict(o, &m)), r.OwnAnnotations(o, m.Annotations)...)
	bad := func(path []string, format string, args ...any) {
		flaws = append(flaws, Flaw{Line: o.At(path...), Reason: fmt.Sprintf(format, args...)})
	}
	var wide []Flaw
	one := func(field string, v *string, these ...string) {
		if v != nil {
			wide = append(wide, Flaw{Line: o.At(spec(field)...), Reason: "spec." + field})
		}
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
	}
	f := &Mesh{Namespace: o.Namespace, Name: o.Name, spec: m.Spec, wide: wide}
	if f.Refused = r.Refuse(o, flaws, "the object is not in force: what it said before stays, and if that is not known it is as if it were not there"); f.Refused {
		f.spec, f.wide = MeshConfigSpec{}, nil
	}
	return f
}

// Good is m, or what there was before where m is refused: a slip of the pen switches nothing
// (decision 034). nil: there is nothing to go by.
func (m *Mesh) Good(before *Mesh) *Mesh {
	if m.Refused {
		return before
	}
	return m
}

// Stray is what m, of a namespace that is not the control plane's, says and what is of the
// whole mesh; of is who has that.
func (m *Mesh) Stray(of string) (out []Flaw) {
	for _, f := range m.wide {
		f.Reason += " is of the whole mesh: " + of + " has it, and here it changes nothing; remove it"
		out = append(out, f)
	}
	return out
}

// Override is what m says of pods.
func (m *Mesh) Override() input.Override {
	p := m.spec.Proxy
	if p == nil {
		return input.Override{}
	}
	out := input.Override{AccessLogs: p.AccessLogsEnabled, Tracing: p.TracingEnabled, TraceSample: p.TraceSampleRate, EmitStatsPod: p.EmitStatsPod}
	if v := p.AccessLogSuccessSampleRate; v != nil {
		rate := uint8(math.Ceil(*v)) // a little is not nothing
		out.AccessLogSuccess = &rate
	}
	return out
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
	return m.Override().Apply(base)
}
