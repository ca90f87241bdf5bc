package rig

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
)

// Marks and ports of capture (contract 1.5): what peers of the comparison need to
// be captured as the proxy captures itself.
const (
	capturePort = 18001
	markDivert  = "0xae71"
	markHop     = "0xae7e"
)

// Capture diverts the pod's outbound TCP to a transparent listener on port 18001 of
// the pod, as the product's own rules do: for proxies that bring none.
// Connections to exempt addresses and ports are left alone.
func (p *Pod) Capture(ctx context.Context, exempt ...netip.AddrPort) error {
	rules := []string{
		"rule add fwmark " + markDivert + " lookup 100",
		"route add local 0.0.0.0/0 dev lo table 100",
	}
	if err := p.ip(ctx, rules...); err != nil {
		return err
	}
	if p.IP6.IsValid() {
		err := run(ctx, "rule add fwmark "+markDivert+" lookup 100\nroute add local ::/0 dev lo table 100\n",
			"ip", "-6", "-n", p.ns, "-batch", "-")
		if err != nil {
			return err
		}
	}
	cmd := p.Command(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(captureRules(p.IP6.IsValid(), exempt))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("rig: capture in %s: nft: %w: %s", p.Name, err, out)
	}
	return nil
}

// captureRules is the nft script; the family is ip or, with IPv6, inet.
func captureRules(ipv6 bool, exempt []netip.AddrPort) string {
	family, divert := "ip", fmt.Sprintf("    iif lo meta mark %s meta l4proto tcp tproxy to :%d accept\n", markDivert, capturePort)
	if ipv6 {
		family = "inet"
		divert = ""
		for _, f := range []struct{ nfproto, to string }{{"ipv4", "ip"}, {"ipv6", "ip6"}} {
			divert += fmt.Sprintf("    iif lo meta mark %s meta nfproto %s meta l4proto tcp tproxy %s to :%d accept\n", markDivert, f.nfproto, f.to, capturePort)
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "table %s rig_capture {\n  chain output {\n    type route hook output priority mangle;\n", family)
	fmt.Fprintf(&b, "    meta mark %s accept\n    ct direction reply accept\n    ip daddr 127.0.0.0/8 accept\n", markHop)
	if ipv6 {
		b.WriteString("    ip6 daddr { ::1, fe80::/10, ff00::/8 } accept\n")
	}
	for _, a := range exempt {
		proto := "ip"
		if a.Addr().Is6() {
			proto = "ip6"
		}
		fmt.Fprintf(&b, "    %s daddr %s tcp dport %d accept\n", proto, a.Addr(), a.Port())
	}
	fmt.Fprintf(&b, "    meta l4proto tcp meta mark set %s\n  }\n", markDivert)
	b.WriteString("  chain divert {\n    type filter hook prerouting priority mangle;\n" + divert + "  }\n}\n")
	return b.String()
}
