package endpointmeta

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"aether/dataplane/model"
)

// PortClass is what the pods of a service say of one port. Comparable.
type PortClass struct {
	Number uint16
	Class  model.Class // of most
	// AlsoUDP: a pod serves the number over UDP as well; never with Class UDP.
	AlsoUDP  bool
	Disagree string // what each side says of the class, when they do: "2 as http, 1 as tcp"
}

// Classes is the one place where the class of a port is worked out: what most rows
// of a service say, HTTP before TCP before UDP in a tie, whatever their order
// (contract 1.3). ports gives those of a row, ascending, no number twice. The answer
// is ascending by number. uniform: every row declares all of them, with that class.
func Classes[R any](rows []R, ports func(R) []model.Port) (out []PortClass, uniform bool) {
	if len(rows) == 0 {
		return nil, true
	}
	first := ports(rows[0])
	uniform = true
	for _, r := range rows[1:] {
		if !slices.EqualFunc(ports(r), first, samePort) {
			uniform = false
			break
		}
	}
	if uniform {
		out = make([]PortClass, len(first))
		for i, p := range first {
			out[i] = PortClass{Number: p.Number, Class: p.Class, AlsoUDP: p.AlsoUDP}
		}
		return out, true
	}
	type votes struct {
		of      [model.UDP + 1]int
		alsoUDP bool
	}
	all := map[uint16]*votes{}
	for _, r := range rows {
		for _, p := range ports(r) {
			v := all[p.Number]
			if v == nil {
				v = new(votes)
				all[p.Number] = v
			}
			v.of[p.Class]++
			v.alsoUDP = v.alsoUDP || p.AlsoUDP
		}
	}
	out = make([]PortClass, 0, len(all))
	for n, v := range all {
		p := PortClass{Number: n}
		var said []string
		for class := model.HTTP; class <= model.UDP; class++ {
			if v.of[class] > 0 {
				said = append(said, fmt.Sprintf("%d as %s", v.of[class], class))
			}
			if v.of[class] > v.of[p.Class] {
				p.Class = class
			}
		}
		if len(said) > 1 {
			p.Disagree = strings.Join(said, ", ")
		}
		p.AlsoUDP = v.alsoUDP && p.Class != model.UDP
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b PortClass) int { return cmp.Compare(a.Number, b.Number) })
	return out, false
}

// samePort leaves App out: how an application is spoken to is its node's affair.
func samePort(a, b model.Port) bool {
	return a.Number == b.Number && a.Class == b.Class && a.AlsoUDP == b.AlsoUDP
}
