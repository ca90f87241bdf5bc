package input

import (
	"reflect"

	"aether/dataplane/model"
)

// FullBatch is a mesh, and what of it is not in force, by key. Locality is the mesh's;
// Settings are base with what a mesh says of them, and nil if that is nothing.
func FullBatch(m *model.Mesh, problems []model.Problem, base Settings) Batch {
	b := Batch{Tables: Split(m), Locality: &Locality{m.Region, m.Zone}}
	for _, p := range problems {
		b.Problems[p.Object] = append(b.Problems[p.Object], p)
	}
	if m.Semantics != model.Aether || m.SameNode != model.MTLS {
		base.Semantics, base.SameNode = m.Semantics, m.SameNode
		b.Settings = &base
	}
	return b
}

// Diff is what a source that said b says when its state has become next, both of them
// whole. Where b has Settings and next has none, they are base again.
func (b *Batch) Diff(next *Batch, base Settings) Batch {
	out := Batch{Tables: b.Tables.Diff(&next.Tables)}
	if !reflect.DeepEqual(b.Settings, next.Settings) {
		if out.Settings = next.Settings; out.Settings == nil {
			out.Settings = &base
		}
	}
	if next.Locality != nil && !reflect.DeepEqual(b.Locality, next.Locality) {
		out.Locality = next.Locality
	}
	return out
}

// Add makes b say what b says and then o says.
func (b *Batch) Add(o *Batch) {
	b.Tables.Add(&o.Tables)
	if o.Settings != nil {
		b.Settings = o.Settings
	}
	if o.Locality != nil {
		b.Locality = o.Locality
	}
}

// Problems are those that sources reported and then those of compiling what they said, without those that
// repeat a refusal which its source reports itself, with its place.
func Problems(reported, compiled []model.Problem) []model.Problem {
	type part struct{ object, part string }
	have := map[part]struct{}{}
	for i := range reported {
		if p := &reported[i]; p.Part != "" {
			have[part{p.Object, p.Part}] = struct{}{}
		}
	}
	for i := range compiled {
		p := &compiled[i]
		_, one := have[part{p.Object, p.Part}]
		_, all := have[part{p.Object, model.AllParts}]
		if p.Part == "" || !one && !all {
			reported = append(reported, *p)
		}
	}
	return reported
}
