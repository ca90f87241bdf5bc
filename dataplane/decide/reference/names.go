package reference

import (
	"strconv"
	"strings"
)

// meaning of an authority for a caller (contract 4.5).
type meaning struct {
	service  *service
	port     uint16 // 0: port-less
	below    bool   // two labels before the mesh domain, whether there is such a service or not
	noCaller bool   // a short name, and nobody knows whose
}

// name is the table of 4.5. Case does not matter, one trailing dot is dropped
// (docs/architecture.md, "Rules of our own"), and what is not host or host:port names nothing.
func (w *world) name(authority, caller string) (n meaning) {
	host, number, hasPort := strings.Cut(authority, ":")
	if hasPort {
		v, err := strconv.ParseUint(number, 10, 16)
		if err != nil || v == 0 || strconv.FormatUint(v, 10) != number {
			return meaning{}
		}
		n.port = uint16(v)
	}
	if strings.ContainsAny(host, "@/[]") || strings.ContainsFunc(host, func(c rune) bool { return c <= ' ' || c >= 0x7f }) {
		return meaning{}
	}
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	if host == "" {
		return meaning{}
	}
	labels := strings.Split(host, ".")
	if len(labels) == 1 {
		return w.shortName(n, host, caller)
	}
	if labels[0] == "" || labels[1] == "" {
		return n
	}
	rest := strings.Join(labels[2:], ".")
	n.below = rest == w.domain()
	for _, s := range w.services {
		if s.name.Name != labels[0] || s.name.Namespace != labels[1] {
			continue
		}
		switch {
		case n.below: // always
			n.service = s
		case s.kubernetes() && (rest == "" || rest == "svc" || rest == "svc.cluster.local"):
			n.service = s
		}
	}
	return n
}

// shortName: <svc> means <svc>.<caller's namespace>, and nothing where that has no
// such service. Without a caller's namespace it is a fault where somebody answers to it.
func (w *world) shortName(n meaning, host, caller string) meaning {
	for _, s := range w.services {
		if s.name.Name != host || !s.kubernetes() {
			continue
		}
		if caller == "" {
			n.noCaller = true
		} else if s.name.Namespace == caller {
			n.service = s
		}
	}
	return n
}
