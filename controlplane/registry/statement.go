package registry

import (
	"errors"
	"net/netip"

	"aether/controlplane/registrypb"
)

// Statement is who said something of a row, and when: what tells the later of two that
// reach a store in any order (decision 032). The zero one says nothing, and is neither
// earlier nor later than any.
type Statement struct {
	Node string // the node's name
	// Stated is when, in nanoseconds by that node's clock, growing with each statement.
	Stated uint64
}

// maxStated bounds what is believed of a clock (the year 2116): beyond, nothing is said,
// so that no row can be one that nothing is later than.
const maxStated = 1 << 62

// StatementOf is what a row says of itself.
func StatementOf(e *registrypb.ServiceEndpoint) Statement {
	s := Statement{e.GetKubernetesMetadata().GetNodeName(), e.GetStated()}
	if s.Node == "" || s.Stated >= maxStated {
		s.Stated = 0
	}
	return s
}

// Outdates reports whether s, of a row that is there, is later than the statement by
// which that row would be replaced. Only one node's are compared: two nodes have two clocks.
func (s Statement) Outdates(by Statement) bool {
	return s.Node != "" && s.Node == by.Node && by.Stated > 0 && s.Stated > by.Stated
}

// Keeps reports whether a row that s stands in stays although by takes it away: its node
// has said it later, or it is another node's, which has got the address since. The latter
// holds whether or not by has a time.
func (s Statement) Keeps(by Statement) bool {
	return s.Outdates(by) || by.Node != "" && s.Node != "" && s.Node != by.Node
}

// ErrOutdated is a Store's: nothing was written, because what is there was said later.
var ErrOutdated = errors.New("what is there was said later")

// ErrUnfit is a Store's: it will not take this write, whatever becomes of others, because
// of what the write itself is, as one that is larger than the store's requests may be. A
// store that has no room, or does not allow the writer, is no reason for it.
var ErrUnfit = errors.New("the store cannot hold it")

// ErrDerived: the rows are made of what else is known of pods, so that those which a
// node has registered are nowhere to be found (contract 9.1).
var ErrDerived = errors.New("the registry derives its rows, and keeps none that are registered")

// Address is the one text of a pod's address: two that mean the same have the same.
// What is no address stays as it is.
func Address(ip string) string {
	a, err := netip.ParseAddr(ip)
	if err != nil {
		return ip
	}
	return a.Unmap().String()
}
