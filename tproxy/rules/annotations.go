package rules

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// The pod annotations that choose capture (contract 1.5).
const (
	AnnotationRedirectAll   = "capture.aether.io/redirect-all"
	AnnotationExcludePorts  = "capture.aether.io/exclude-outbound-ports"
	AnnotationExcludeRanges = "capture.aether.io/exclude-outbound-ip-ranges"
)

// MaxExclusions bounds the ports, and the ranges, that a pod can exclude. Each is
// a rule that every packet of the pod is compared with.
const MaxExclusions = 1024

// maxProblems bounds what is said about one annotation: a value may be 256 KiB long.
const maxProblems = 16

// maxEntry bounds what a problem repeats of an entry, in bytes.
const maxEntry = 64

// Problem is a part of an annotation that is not in force, and why.
type Problem struct {
	Annotation string // its name
	Entry      string // the part of the value that is meant, shortened if long
	Reason     string // what is wrong and how to mend it
}

// String is one line: annotation, entry, reason.
func (p Problem) String() string { return fmt.Sprintf("%s: %q: %s", p.Annotation, p.Entry, p.Reason) }

// Error makes a Problem usable as an error.
func (p Problem) Error() string { return p.String() }

// ParseAnnotations reads a pod's capture annotations. What cannot be read is
// left out, as the contract (1.5) says, and reported; blank entries are no
// problem. defaultRedirectAll is the node's default, for a pod that does not say.
// Both lists come out ascending and without repeats, so equal wishes give equal
// rules. IPv6 ranges are taken too, which upstream leaves out.
func ParseAnnotations(a map[string]string, defaultRedirectAll bool) (Config, []Problem) {
	c := Config{RedirectAll: defaultRedirectAll}
	var ps []Problem
	switch v, ok := a[AnnotationRedirectAll]; {
	case v == "true" || v == "false":
		c.RedirectAll = v == "true"
	case ok:
		ps = append(ps, problem(AnnotationRedirectAll, v, `write "true" or "false"; the node's default holds`))
	}
	c.ExcludePorts, ps = list(a, AnnotationExcludePorts, ps, parsePort, func(a, b uint16) int { return int(a) - int(b) })
	c.ExcludeRanges, ps = list(a, AnnotationExcludeRanges, ps, parseRange, comparePrefixes)
	return c, ps
}

// list reads the comma-separated annotation called name with parse, which returns
// a reason when it cannot.
func list[T comparable](a map[string]string, name string, ps []Problem,
	parse func(string) (T, string), order func(a, b T) int) ([]T, []Problem) {
	var out []T
	seen := map[T]bool{}
	bad, over := 0, 0
	for entry := range strings.SplitSeq(a[name], ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		v, reason := parse(entry)
		switch {
		case reason != "":
			if bad++; bad <= maxProblems {
				ps = append(ps, problem(name, entry, reason))
			}
		case seen[v]:
		case len(out) == MaxExclusions:
			if over++; over == 1 {
				ps = append(ps, problem(name, entry,
					fmt.Sprintf("this and later entries are left out: at most %d exclusions; use wider ranges or fewer ports", MaxExclusions)))
			}
		default:
			seen[v] = true
			out = append(out, v)
		}
	}
	if bad > maxProblems {
		ps = append(ps, problem(name, "", fmt.Sprintf("%d more entries cannot be read", bad-maxProblems)))
	}
	slices.SortFunc(out, order)
	return out, ps
}

func problem(name, entry, reason string) Problem {
	if len(entry) > maxEntry {
		entry = strings.ToValidUTF8(entry[:maxEntry], "") + "..."
	}
	return Problem{name, entry, reason}
}

func parsePort(s string) (uint16, string) {
	p, err := strconv.ParseUint(s, 10, 16)
	if err != nil || p == 0 {
		return 0, "not a port; write a decimal number from 1 to 65535"
	}
	return uint16(p), ""
}

func parseRange(s string) (netip.Prefix, string) {
	const want = "not an address range; write a CIDR like 10.0.0.0/8 or fd00::/8, or one address"
	var p netip.Prefix
	if strings.Contains(s, "/") {
		var err error
		if p, err = netip.ParsePrefix(s); err != nil {
			return p, want
		}
	} else {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return p, want
		}
		if a.Zone() != "" {
			return p, "an address with a zone; leave the zone out"
		}
		p = netip.PrefixFrom(a, a.BitLen())
	}
	if p.Addr().Is4In6() {
		// On the wire these are IPv4 packets.
		if p.Bits() < 96 {
			return netip.Prefix{}, "an IPv4-mapped range shorter than /96; write it as IPv4"
		}
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked(), ""
}

// comparePrefixes orders by family, address and length.
func comparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}
