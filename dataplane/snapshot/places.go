package snapshot

import (
	"maps"
	"net/netip"
	"slices"

	"aether/dataplane/model"
)

// places are the backends, by ID, that have an endpoint at an address. It is in parts that a change copies
// one by one: at 100,000 addresses a part holds some hundred.
type places [placeParts]map[netip.Addr][]int32

const placeParts = 1024

func placePart(a netip.Addr) int {
	b := a.As16()
	return (int(b[15]) ^ int(b[14])<<2 ^ int(b[13])<<4 ^ int(b[7])<<3) % placeParts
}

// placing is a change of places.
type placing struct {
	p   *places // the new ones; nil: nothing has changed yet
	was *places
	own [placeParts]bool
}

func (c *placing) part(a netip.Addr) map[netip.Addr][]int32 {
	if c.p == nil {
		c.p = new(places)
		if c.was != nil {
			*c.p = *c.was
		}
	}
	i := placePart(a)
	if !c.own[i] {
		c.own[i] = true
		if c.p[i] = maps.Clone(c.p[i]); c.p[i] == nil {
			c.p[i] = map[netip.Addr][]int32{}
		}
	}
	return c.p[i]
}

func (c *placing) add(a netip.Addr, id int) {
	part := c.part(a)
	if old := part[a]; !slices.Contains(old, int32(id)) {
		part[a] = append(slices.Clip(old), int32(id)) // whoever has the old part keeps the old list
	}
}

func (c *placing) remove(a netip.Addr, id int) {
	part := c.part(a)
	left := slices.DeleteFunc(slices.Clone(part[a]), func(i int32) bool { return i == int32(id) })
	if part[a] = left; len(left) == 0 {
		delete(part, a)
	}
}

// replace notes that backend id has the endpoints of set b in the place of a's. Both are in order of address.
func (c *placing) replace(id int, a, b *EndpointSet) {
	if a == b {
		return
	}
	i, j := 0, 0
	for i < len(a.all) || j < len(b.all) {
		switch {
		case i > 0 && i < len(a.all) && a.all[i].Addr.Addr() == a.all[i-1].Addr.Addr():
			i++
		case j > 0 && j < len(b.all) && b.all[j].Addr.Addr() == b.all[j-1].Addr.Addr():
			j++
		case j == len(b.all) || i < len(a.all) && a.all[i].Addr.Addr().Less(b.all[j].Addr.Addr()):
			c.remove(a.all[i].Addr.Addr(), id)
			i++
		case i == len(a.all) || b.all[j].Addr.Addr().Less(a.all[i].Addr.Addr()):
			c.add(b.all[j].Addr.Addr(), id)
			j++
		default:
			i, j = i+1, j+1
		}
	}
}

// HTTPEndpoint is a backend of the mesh that has a pod at address a which declares port as HTTP; nil: there is
// none that is known here. It does not allocate.
func (s *Snapshot) HTTPEndpoint(a netip.Addr, port uint16) *Backend {
	if s == nil || s.endpoints.places == nil {
		return nil
	}
	a = a.Unmap()
	for _, id := range s.endpoints.places[placePart(a)][a] {
		if int(id) < len(s.t.Backends) {
			if b := s.t.Backends[id]; b.Port == port && b.Class == model.HTTP {
				return b
			}
		}
	}
	return nil
}
