// Package apply puts a rules.Ruleset into a network namespace, and takes it out.
//
//   - The rules of a running pod are replaced in one nftables transaction: a
//     packet meets the old ones or the new ones, never none.
//   - Applying twice leaves exactly what applying once does.
//   - What belongs to others (tables, rules, routes) is never touched: Remove
//     leaves the namespace as it was before Apply.
//
// It decides nothing: which packets are captured is for package rules.
package apply

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"aether/tproxy/netns"
	"aether/tproxy/rules"
)

// ErrNoIPv6 is a note more than an error: the namespace has no IPv6, and capture
// is in force for IPv4. Apply returns it so that the caller can say so; Apply
// again once the namespace has IPv6.
var ErrNoIPv6 = errors.New("the namespace has no IPv6 (net.ipv6.conf.lo.disable_ipv6): capture is in force for IPv4 alone")

// Apply makes rs and its policy routing (contract 3.5) the ones in force in ns,
// in place of an earlier set. After an error other than ErrNoIPv6 the rules in
// force are the earlier ones, or none. It needs CAP_SYS_ADMIN and CAP_NET_ADMIN.
// Callers do not Apply and Remove in one namespace at the same time.
func Apply(ns *netns.NS, rs rules.Ruleset) error {
	var noIPv6 bool
	err := netns.Do(ns, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("find lo: %w", err)
		}
		families := []int{unix.AF_INET, unix.AF_INET6}
		if noIPv6 = !netns.HasIPv6(); noIPv6 {
			families = families[:1]
			rs = rs.IPv4Only()
		}
		// Routing first: it does nothing until packets carry the mark, while a mark
		// without the route would send captured packets out of the pod.
		var undo []func() error
		for _, f := range families {
			u, err := addRouting(f, lo.Attrs().Index)
			undo = append(undo, u...)
			if err != nil {
				return errors.Join(err, runAll(undo))
			}
		}
		if err := writeTable(rs, lo.Attrs().Index); err != nil {
			return errors.Join(err, runAll(undo))
		}
		return nil
	})
	switch {
	case err != nil:
		return fmt.Errorf("apply: capture rules in %s: %w", ns, err)
	case noIPv6:
		return fmt.Errorf("apply: %s: %w", ns, ErrNoIPv6)
	}
	return nil
}

// Remove takes the rules and the routing out of ns. It is no error when they, or
// some of them, are not there.
func Remove(ns *netns.NS) error {
	err := netns.Do(ns, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("find lo: %w", err)
		}
		// In the reverse order of Apply, for the reason given there.
		c, err := nftables.New(nftables.WithSockOptions(bigBuffers))
		if err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
		t := &nftables.Table{Name: rules.TableName, Family: nftables.TableFamilyINet}
		c.AddTable(t) // deleting what is not there is an error; in one batch this leaves no trace
		c.DelTable(t)
		if err := c.Flush(); err != nil {
			return fmt.Errorf("delete table inet %s: %w%s", t.Name, err, hint(err))
		}
		for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
			if err := removeRouting(f, lo.Attrs().Index); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("apply: remove capture rules from %s: %w", ns, err)
	}
	return nil
}

func runAll(fs []func() error) error {
	var errs error
	for _, f := range fs {
		errs = errors.Join(errs, f())
	}
	return errs
}

// divertRule selects the packets that carry the divert mark.
func divertRule(family int) *netlink.Rule {
	// NewRule, not a literal: a zero suppress-prefixlength would disable the rule.
	r := netlink.NewRule()
	r.Family, r.Mark, r.Table = family, rules.MarkDivert, rules.DivertTable
	return r
}

// divertRoute makes every destination a local one, which is what brings a marked
// packet to the loopback interface.
func divertRoute(family, lo int) *netlink.Route {
	dst := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	if family == unix.AF_INET6 {
		dst = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	return &netlink.Route{Family: family, LinkIndex: lo, Dst: dst, Table: rules.DivertTable,
		Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST}
}

// ours lists the rules of family that select the divert mark for our table.
func ours(family int) ([]netlink.Rule, error) {
	all, err := netlink.RuleListFiltered(family, divertRule(family), netlink.RT_FILTER_MARK|netlink.RT_FILTER_TABLE)
	if family == unix.AF_INET6 && (errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)) {
		return nil, nil // a kernel without IPv6 has no rules for it
	}
	if err != nil {
		return nil, fmt.Errorf("list %s rules: %w", ip(family), err)
	}
	var out []netlink.Rule
	for _, r := range all {
		if r.Mask == nil || *r.Mask == 0xffffffff {
			out = append(out, r)
		}
	}
	return out, nil
}

// addRouting sees to exactly one divert rule and the divert route. undo takes
// back what it added.
func addRouting(family, lo int) (undo []func() error, err error) {
	have, err := routes(family, lo)
	if err != nil {
		return nil, err
	}
	route := divertRoute(family, lo)
	if err := netlink.RouteReplace(route); err != nil {
		return nil, fmt.Errorf("%s route replace local default dev lo table %d: %w%s", ip(family), rules.DivertTable, err, hint(err))
	}
	if have == 0 {
		undo = append(undo, func() error { return netlink.RouteDel(route) })
	}
	there, err := ours(family)
	if err != nil {
		return undo, err
	}
	if len(there) == 0 {
		r := divertRule(family)
		if err := netlink.RuleAdd(r); err != nil {
			return undo, fmt.Errorf("%s rule add fwmark %#x lookup %d: %w%s", ip(family), rules.MarkDivert, rules.DivertTable, err, hint(err))
		}
		return append(undo, func() error { return netlink.RuleDel(r) }), nil
	}
	for i := range there[1:] { // left by two writers at once
		if err := netlink.RuleDel(&there[1+i]); err != nil {
			return undo, fmt.Errorf("%s rule del, a second one: %w", ip(family), err)
		}
	}
	return undo, nil
}

func removeRouting(family, lo int) error {
	there, err := ours(family)
	if err != nil {
		return err
	}
	for i := range there {
		if err := netlink.RuleDel(&there[i]); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("%s rule del: %w%s", ip(family), err, hint(err))
		}
	}
	n, err := routes(family, lo)
	if err != nil {
		return err
	}
	for range n {
		if err := netlink.RouteDel(divertRoute(family, lo)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("%s route del local default dev lo table %d: %w%s", ip(family), rules.DivertTable, err, hint(err))
		}
	}
	return nil
}

// routes counts the divert routes of family.
func routes(family, lo int) (int, error) {
	filter := &netlink.Route{Table: rules.DivertTable, Type: unix.RTN_LOCAL, LinkIndex: lo}
	list, err := netlink.RouteListFiltered(family, filter,
		netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE|netlink.RT_FILTER_OIF)
	if family == unix.AF_INET6 && (errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("list %s routes of table %d: %w", ip(family), rules.DivertTable, err)
	}
	n := 0
	for _, r := range list {
		if r.Dst == nil {
			n++
		} else if ones, _ := r.Dst.Mask.Size(); ones == 0 {
			n++
		}
	}
	return n, nil
}

// writeTable puts rs into the calling thread's namespace, in one transaction.
func writeTable(rs rules.Ruleset, lo int) error {
	c, err := nftables.New(nftables.WithSockOptions(bigBuffers))
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	t := &nftables.Table{Name: rules.TableName, Family: nftables.TableFamilyINet}
	chains := make([]*nftables.Chain, len(rs.Chains))
	for i, ch := range rs.Chains {
		accept := nftables.ChainPolicyAccept
		chains[i] = &nftables.Chain{Name: ch.Name, Table: t, Type: nftables.ChainTypeFilter,
			Hooknum:  nftables.ChainHookPrerouting,
			Priority: nftables.ChainPriorityRef(rules.Priority), Policy: &accept}
		if ch.Type == rules.TypeRoute {
			chains[i].Type = nftables.ChainTypeRoute
		}
		if ch.Hook == rules.HookOutput {
			chains[i].Hooknum = nftables.ChainHookOutput
		}
	}
	inPlace, err := onlyThese(c, chains)
	if err != nil {
		return fmt.Errorf("list nftables chains: %w%s", err, hint(err))
	}
	c.AddTable(t)
	if inPlace {
		// The rules of a chain change as one. With the table deleted and made anew, the
		// old chain and the new one would stand side by side in the hook for a moment, and
		// a packet between the two just as the change takes effect could meet neither.
		c.FlushTable(t)
	} else {
		c.DelTable(t)
		c.AddTable(t)
	}
	for i, ch := range rs.Chains {
		c.AddChain(chains[i])
		for _, r := range ch.Rules {
			c.AddRule(&nftables.Rule{Table: t, Chain: chains[i], Exprs: lower(r, lo)})
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("write table inet %s: %w%s", t.Name, err, hint(err))
	}
	return nil
}

// onlyThese reports whether the table, if it is there, holds no chain but these,
// at these hooks.
func onlyThese(c *nftables.Conn, want []*nftables.Chain) (bool, error) {
	all, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return false, err
	}
	for _, have := range all {
		if have.Table.Name == rules.TableName && !slices.ContainsFunc(want, func(w *nftables.Chain) bool {
			return have.Name == w.Name && have.Type == w.Type &&
				have.Hooknum != nil && *have.Hooknum == *w.Hooknum &&
				have.Priority != nil && *have.Priority == *w.Priority
		}) {
			return false, nil
		}
	}
	return true, nil
}

// bigBuffers makes room for a transaction of the most rules a pod can have, and
// for the kernel's answers: an answer a rule, read only once all are sent. They
// are limits; the memory is taken as it is needed.
func bigBuffers(c *mdl.Conn) error {
	if err := c.SetReadBuffer(maxBuffer); err != nil {
		return err
	}
	return c.SetWriteBuffer(maxBuffer)
}

// maxBuffer is the size of a netlink socket's buffers, in bytes.
const maxBuffer = 16 << 20

// reg is the register that every expression loads into and compares.
const reg = unix.NFT_REG_1

func eq(data ...byte) *expr.Cmp { return &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data} }

func load(k expr.MetaKey) *expr.Meta { return &expr.Meta{Key: k, Register: reg} }

// lower turns a rule into the kernel's expressions, the same ones that nft makes
// of its text, so that nft prints it as the rule does.
func lower(r rules.Rule, lo int) []expr.Any {
	var out []expr.Any
	for _, e := range r {
		switch e := e.(type) {
		case rules.Mark:
			out = append(out, load(expr.MetaKeyMARK), eq(binaryutil.NativeEndian.PutUint32(uint32(e))...))
		case rules.SetMark:
			out = append(out,
				&expr.Immediate{Register: reg, Data: binaryutil.NativeEndian.PutUint32(uint32(e))},
				&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg})
		case rules.CTReply:
			const reply = 1 // IP_CT_DIR_REPLY
			out = append(out, &expr.Ct{Register: reg, Key: expr.CtKeyDIRECTION}, eq(reply))
		case rules.Dst:
			out = append(out, lowerDst(netip.Prefix(e))...)
		case rules.Proto:
			out = append(out, load(expr.MetaKeyL4PROTO), eq(byte(e)))
		case rules.DstPort:
			out = append(out, load(expr.MetaKeyL4PROTO), eq(byte(e.Proto)),
				&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
				eq(binary.BigEndian.AppendUint16(nil, e.Port)...))
		case rules.Loopback:
			out = append(out, load(expr.MetaKeyIIF), eq(binaryutil.NativeEndian.PutUint32(uint32(lo))...))
		case rules.TProxy:
			family := byte(unix.NFPROTO_IPV4)
			if e.Family == rules.IPv6 {
				family = unix.NFPROTO_IPV6
			}
			out = append(out,
				&expr.Immediate{Register: reg, Data: binary.BigEndian.AppendUint16(nil, e.Port)},
				&expr.TProxy{Family: family, TableFamily: unix.NFPROTO_INET, RegPort: reg})
		case rules.Accept:
			out = append(out, &expr.Verdict{Kind: expr.VerdictAccept})
		case rules.Drop:
			out = append(out, &expr.Verdict{Kind: expr.VerdictDrop})
		}
	}
	return out
}

func lowerDst(p netip.Prefix) []expr.Any {
	family, offset := byte(unix.NFPROTO_IPV4), uint32(16)
	if p.Addr().Is6() {
		family, offset = unix.NFPROTO_IPV6, 24
	}
	out := []expr.Any{load(expr.MetaKeyNFPROTO), eq(family)}
	addr := p.Addr().AsSlice()
	whole := p.Bits() / 8
	switch {
	case p.Bits() == 0:
		return out
	case p.Bits()%8 == 0:
		// A prefix of whole bytes is a shorter load, as in nft.
		return append(out,
			&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(whole)},
			eq(addr[:whole]...))
	}
	size := uint32(len(addr))
	return append(out,
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: size,
			Mask: net.CIDRMask(p.Bits(), len(addr)*8), Xor: make([]byte, size)},
		eq(addr...))
}

func ip(family int) string {
	if family == unix.AF_INET6 {
		return "ip -6"
	}
	return "ip"
}

// hint says how to mend the errors that a strange node gives.
func hint(err error) string {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return " (needs CAP_NET_ADMIN)"
	case errors.Is(err, unix.ENETDOWN):
		return " (lo is down: the loopback CNI plugin has to run first)"
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT):
		return " (the kernel may lack nf_tables, nft_tproxy or nf_conntrack: modprobe them on the node)"
	}
	return ""
}
