// Package compile makes the data plane's snapshot out of a model of the mesh.
//
//   - Compile is a pure function, and the order of the model's slices does not
//     matter to it. An Index gives what Compile gives, for the price of what changed.
//   - A bad object is refused alone and named in a Problem. Where leaving it
//     out could open something, it compiles to a refusal instead.
//   - The class of a port of a service is worked out once, from the rows, and
//     every table is built from that value (contract 1.3, 4.12).
//   - All levels of filters are folded here, so that a decision follows one
//     pointer; what is the same for many is one object.
//
// It keeps no history: what must be remembered over time is the caller's.
package compile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Compile makes a snapshot (version 0) of m, and lists what of m is not, or
// not wholly, in force. It keeps strings and maps of m, which therefore must not
// change afterwards. Problems are in a stable order.
func Compile(m *model.Mesh) (*snapshot.Snapshot, []model.Problem) {
	return NewIndex(m).Update()
}

// Endpoints makes the endpoint table for s out of m's rows, where the rows
// changed and nothing else of m did. ok is false when that is not enough, for a
// port or service came, went or changed its class, or a row is not valid: then
// Compile it is. Sets that did not change keep their pointers. Whoever is told
// which services' rows changed keeps an Index instead, which does not look at
// the others.
func Endpoints(s *snapshot.Snapshot, m *model.Mesh) (t *snapshot.EndpointTable, ok bool) {
	x := &Index{region: m.Region, zone: m.Zone, services: make(map[model.ServiceName]*service, len(s.Services()))}
	x.group(m.Endpoints)
	known := 0
	keys := map[string]struct{}{}
	for _, svc := range s.Services() {
		c := x.services[svc.Name]
		if c == nil {
			if len(svc.PodPorts) > 0 {
				return nil, false
			}
			continue
		}
		known++
		c.readRows()
		if len(c.rowProblems) > 0 || len(c.classes) != len(svc.PodPorts) || svc.Await {
			return nil, false
		}
		for i, p := range c.classes {
			if p.Disagree != "" || p.Number != svc.PodPorts[i].Number || p.Class != svc.PodPorts[i].Class {
				return nil, false
			}
		}
		if b := svc.Raw; b != nil && c.raw != b.Port {
			return nil, false
		}
		for _, k := range c.keys {
			keys[k] = struct{}{}
		}
	}
	if known != len(x.services) || !slices.Equal(sortedKeys(keys), s.SubsetKeys()) {
		return nil, false // rows of a service that s does not have, or other keys to select by
	}
	for _, b := range s.Backends() {
		if c := x.services[b.Service]; c != nil {
			c.backends = append(c.backends, b)
		}
	}
	var changed []snapshot.SetAt
	for _, c := range x.services {
		x.makeSets(c, s.EndpointTable(), func(at snapshot.SetAt) { changed = append(changed, at) })
	}
	return s.EndpointTable().Update(len(s.Backends()), changed), true
}

func problem(object, format string, args ...any) model.Problem {
	return model.Problem{Object: object, Reason: fmt.Sprintf(format, args...)}
}

// sortProblems puts them into a stable order, each once.
func sortProblems(p []model.Problem) []model.Problem {
	slices.SortFunc(p, func(a, b model.Problem) int {
		return cmp.Or(cmp.Compare(a.Object, b.Object), cmp.Compare(a.Where, b.Where), cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Part, b.Part))
	})
	return slices.Compact(p)
}

func sortedKeys(of map[string]struct{}) []string {
	out := make([]string, 0, len(of))
	for k := range of {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// readDomain is the mesh domain in lower case, or the default with a Problem.
func readDomain(domain string) (string, []model.Problem) {
	d := strings.ToLower(cmp.Or(domain, model.DefaultDomain))
	for label := range strings.SplitSeq(d, ".") {
		if !dnsLabel(label) {
			return model.DefaultDomain, []model.Problem{problem("mesh domain", "%q is no DNS name; %s is used: set a domain of dot-separated labels, as mesh.example", d, model.DefaultDomain)}
		}
	}
	return d, nil
}

// dnsLabel reports whether s can stand between the dots of a mesh name.
func dnsLabel(s string) bool {
	if len(s) == 0 || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

// nameProblem says why a service cannot have a mesh name, or "".
func nameProblem(n model.ServiceName) string {
	for _, part := range []string{n.Namespace, n.Name} {
		if !dnsLabel(part) {
			return fmt.Sprintf("%q cannot be a label of a mesh name: use lower-case letters, digits and -, 63 at most, no dots", part)
		}
	}
	return ""
}
