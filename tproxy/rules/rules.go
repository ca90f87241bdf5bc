// Package rules says, as plain values, which packets of a pod are diverted to
// the proxy: the nftables rules of contract 3.5 for both address families.
//
//   - A Ruleset is built from a Config alone; equal Configs give equal Rulesets.
//   - The expressions are the few that capture needs, and print as nft prints them.
//   - Nothing of a Config can weaken the rules that keep the pod alive: the
//     proxy's mark, replies and loopback are accepted first.
//
// It knows nothing of netlink, namespaces or how rules get into the kernel.
package rules

import (
	"fmt"
	"net/netip"
	"strings"
)

// The ports of a managed pod (contract 2).
const (
	PortCapture = 18001 // TCP, transparent: where diverted connections arrive
	PortProxy   = 18081 // TCP on loopback: the HTTP proxy port; a dialled port too, captured even when capture is scoped
	PortRaw     = 18082 // dialled port: raw-TCP spelling, captured even when capture is scoped; UDP capture
	PortMesh    = 18008 // TCP and UDP: the mTLS inbound listener
)

// Marks and the routing table of the divert (contract 2). Neither mark is a bit
// mask of the other, and both keep clear of kube-proxy's 0x4000 and 0x8000.
const (
	// MarkBypass is on the proxy's own sockets in a pod's namespace: never captured.
	MarkBypass = 0xae7e
	// MarkDivert is set on captured packets: a rule routes them to the loopback
	// interface by table DivertTable, where the divert chain meets them.
	MarkDivert = 0xae71
	// DivertTable holds one route a family, "local default dev lo".
	DivertTable = 100
)

// TableName is the name of the one nftables table, family inet. Nobody else
// may keep anything in it.
const TableName = "aether_capture"

// Config is what a pod chooses about its capture (contract 1.5). The zero value
// is scoped capture without exclusions. ParseAnnotations makes one.
type Config struct {
	RedirectAll   bool           // all outbound TCP, not only ports 18081 and 18082
	ExcludePorts  []uint16       // destination ports never captured, both transports
	ExcludeRanges []netip.Prefix // destinations never captured, both transports
}

// Ruleset is what stands in the table TableName. It is a value: whoever changes
// one clones the slices first.
type Ruleset struct{ Chains []Chain }

// Chain is a base chain; its policy is accept.
type Chain struct {
	Name  string
	Type  ChainType
	Hook  Hook
	Rules []Rule
}

// Priority of every chain: mangle, before any NAT, so the addresses seen are
// those the application dialled.
const Priority = -150

// ChainType is nft's chain type.
type ChainType uint8

// The types used.
const (
	// TypeRoute looks the route of a packet up again once its mark has changed.
	TypeRoute ChainType = iota + 1
	TypeFilter
)

// Hook is where a chain meets packets.
type Hook uint8

// The hooks used.
const (
	HookOutput Hook = iota + 1
	HookPrerouting
)

// Rule is a list of expressions: as long as they match, the next one is looked
// at; the last ones act.
type Rule []Expr

// Expr is one expression of a rule: one of the types below, and no other.
type Expr interface {
	String() string // as `nft list ruleset` prints it
	expr()
}

// Family of addresses.
type Family uint8

// The families.
const (
	IPv4 Family = iota + 1
	IPv6
)

// Transport is an IP protocol number.
type Transport uint8

// The transports.
const (
	TCP Transport = 6
	UDP Transport = 17
)

// The expressions. Mark, CTReply, Dst, Proto, DstPort and Loopback match;
// SetMark, TProxy, Accept and Drop act.
type (
	// Mark matches packets with exactly this mark.
	Mark uint32
	// SetMark gives the packet this mark.
	SetMark uint32
	// CTReply matches packets of a connection's answering direction, as conntrack has it.
	CTReply struct{}
	// Dst matches packets of the prefix's family sent to an address in it.
	Dst netip.Prefix
	// Proto matches packets of the transport.
	Proto Transport
	// DstPort matches packets of the transport sent to the port.
	DstPort struct {
		Proto Transport
		Port  uint16
	}
	// Loopback matches packets that arrive on the interface lo.
	Loopback struct{}
	// TProxy gives the packet, when it is of the family, to the transparent socket
	// that listens on the port, leaving its addresses alone; the rule goes no
	// further when there is no such socket.
	TProxy struct {
		Family Family
		Port   uint16
	}
	// Accept ends the chain: the packet goes its way.
	Accept struct{}
	// Drop discards the packet, and tells nobody.
	Drop struct{}
)

func (Mark) expr()     {}
func (SetMark) expr()  {}
func (CTReply) expr()  {}
func (Dst) expr()      {}
func (Proto) expr()    {}
func (DstPort) expr()  {}
func (Loopback) expr() {}
func (TProxy) expr()   {}
func (Accept) expr()   {}
func (Drop) expr()     {}

func (e Mark) String() string    { return fmt.Sprintf("meta mark 0x%08x", uint32(e)) }
func (e SetMark) String() string { return fmt.Sprintf("meta mark set 0x%08x", uint32(e)) }
func (CTReply) String() string   { return "ct direction reply" }
func (Loopback) String() string  { return `iif "lo"` }
func (Accept) String() string    { return "accept" }
func (Drop) String() string      { return "drop" }
func (e Proto) String() string   { return "meta l4proto " + Transport(e).String() }

func (e Dst) String() string {
	p := netip.Prefix(e)
	proto, kind := "ip", "ipv4"
	if p.Addr().Is6() {
		proto, kind = "ip6", "ipv6"
	}
	switch {
	case p.Bits() == 0:
		return "meta nfproto " + kind
	case p.IsSingleIP():
		return proto + " daddr " + p.Addr().String()
	}
	return proto + " daddr " + p.String()
}

func (e DstPort) String() string { return fmt.Sprintf("%s dport %d", e.Proto, e.Port) }

func (e TProxy) String() string { return fmt.Sprintf("tproxy %s to :%d", e.Family, e.Port) }

func (f Family) String() string {
	if f == IPv6 {
		return "ip6"
	}
	return "ip"
}

func (t Transport) String() string {
	if t == UDP {
		return "udp"
	}
	return "tcp"
}

func (t ChainType) String() string {
	if t == TypeRoute {
		return "route"
	}
	return "filter"
}

func (h Hook) String() string {
	if h == HookOutput {
		return "output"
	}
	return "prerouting"
}

// String is the rule on one line, as nft prints it.
func (r Rule) String() string {
	parts := make([]string, len(r))
	for i, e := range r {
		parts[i] = e.String()
	}
	return strings.Join(parts, " ")
}

// String is what `nft list table inet aether_capture` prints.
func (rs Ruleset) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "table inet %s {\n", TableName)
	for i, c := range rs.Chains {
		if i > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "\tchain %s {\n\t\ttype %s hook %s priority mangle; policy accept;\n", c.Name, c.Type, c.Hook)
		for _, r := range c.Rules {
			fmt.Fprintf(&b, "\t\t%s\n", r)
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// neverCaptured are the destinations that mean this machine or this link only.
var neverCaptured = []netip.Prefix{
	netip.MustParsePrefix("127.0.0.0/8"),    // RFC 1122 3.2.1.3
	netip.MustParsePrefix("169.254.0.0/16"), // RFC 3927; cloud metadata too
	netip.MustParsePrefix("224.0.0.0/4"),    // RFC 5771
	netip.MustParsePrefix("::1/128"),        // RFC 4291 2.5.3
	netip.MustParsePrefix("fe80::/10"),      // RFC 4291 2.5.6
	netip.MustParsePrefix("ff00::/8"),       // RFC 4291 2.7
}

// Ruleset returns the rules for c, in the order of contract 3.5. Invalid prefixes
// are left out.
func (c Config) Ruleset() Ruleset {
	out := []Rule{
		// The proxy dials in the pod's namespace: capturing that would be a loop.
		{Mark(MarkBypass), Accept{}},
		// A route chain sees every packet sent here, the answers of the pod's own
		// servers included. Without this rule their SYN-ACKs would be looped back and
		// every inbound connection would die. "ct state established" will not do: it
		// would let the second packet of a captured connection out of the pod.
		{CTReply{}, Accept{}},
	}
	for _, p := range neverCaptured {
		out = append(out, Rule{Dst(p), Accept{}})
	}
	// DNS is redirected later, at NAT priority, and must not be marked before.
	out = append(out, bothTransports(53)...)
	for _, p := range c.ExcludePorts {
		out = append(out, bothTransports(p)...)
	}
	for _, p := range c.ExcludeRanges {
		if p.IsValid() {
			out = append(out, Rule{Dst(p.Masked()), Accept{}})
		}
	}
	out = append(out,
		Rule{DstPort{UDP, PortRaw}, SetMark(MarkDivert)},
		Rule{DstPort{TCP, PortProxy}, SetMark(MarkDivert)},
		Rule{DstPort{TCP, PortRaw}, SetMark(MarkDivert)},
	)
	if c.RedirectAll {
		out = append(out, Rule{Proto(TCP), SetMark(MarkDivert)})
	}
	return Ruleset{Chains: []Chain{
		{Name: "output", Type: TypeRoute, Hook: HookOutput, Rules: out},
		{Name: "divert", Type: TypeFilter, Hook: HookPrerouting, Rules: []Rule{
			{Loopback{}, Mark(MarkDivert), Proto(TCP), TProxy{IPv4, PortCapture}, Accept{}},
			{Loopback{}, Mark(MarkDivert), Proto(TCP), TProxy{IPv6, PortCapture}, Accept{}},
			{Loopback{}, Mark(MarkDivert), Proto(UDP), Accept{}},
			// Nobody listens on the capture port: the proxy starts, or is being replaced.
			// The divert route calls every address local, so without this rule a dial to
			// service:8080 would reach whatever serves 8080 in the pod itself. Dropped, not
			// rejected: the SYN that TCP sends again meets the proxy once it is there.
			{Loopback{}, Mark(MarkDivert), Proto(TCP), Drop{}},
		}},
	}}
}

func bothTransports(port uint16) []Rule {
	return []Rule{{DstPort{TCP, port}, Accept{}}, {DstPort{UDP, port}, Accept{}}}
}

// IPv4Only returns rs without the rules that name IPv6: for a namespace that has
// none, where a kernel may not even know the expressions.
func (rs Ruleset) IPv4Only() Ruleset {
	out := Ruleset{Chains: make([]Chain, len(rs.Chains))}
	for i, c := range rs.Chains {
		kept := make([]Rule, 0, len(c.Rules))
		for _, r := range c.Rules {
			if !r.ipv6() {
				kept = append(kept, r)
			}
		}
		c.Rules = kept
		out.Chains[i] = c
	}
	return out
}

func (r Rule) ipv6() bool {
	for _, e := range r {
		switch e := e.(type) {
		case Dst:
			if netip.Prefix(e).Addr().Is6() {
				return true
			}
		case TProxy:
			if e.Family == IPv6 {
				return true
			}
		}
	}
	return false
}
