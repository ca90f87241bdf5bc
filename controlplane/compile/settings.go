package compile

import (
	"aether/dataplane/model"
)

// SetSettings says how routes and names work together, and how pods of this node reach each other.
func (x *Index) SetSettings(semantics model.Semantics, sameNode model.SameNode) {
	if x.semantics != semantics {
		for _, s := range x.services {
			if len(s.parentOf) > 0 { // what no rule takes is in their programs
				x.mark(s, dirtyOut)
			}
		}
	}
	x.whole = x.whole || x.semantics != semantics || x.sameNode != sameNode
	x.semantics, x.sameNode = semantics, sameNode
}

// SetLocality says where this node is: which endpoints are near (contract 5.5).
func (x *Index) SetLocality(region, zone string) {
	if x.region == region && x.zone == zone {
		return
	}
	x.region, x.zone = region, zone
	for _, s := range x.services {
		x.mark(s, dirtySets)
	}
}

// Served is what the valid rows of a service said at the last Update: whether there
// were any, and their HTTP ports, ascending.
func (x *Index) Served(n model.ServiceName) (http []uint16, rows bool) {
	s := x.services[n]
	if s == nil {
		return nil, false
	}
	for _, p := range s.classes {
		if p.Class == model.HTTP {
			http = append(http, p.Number)
		}
	}
	return http, len(s.valid) > 0
}
