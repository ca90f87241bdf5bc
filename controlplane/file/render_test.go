package file

import (
	"fmt"
	"strings"
	"time"

	"aether/dataplane/model"
)

// render prints a mesh for people: one object a line, rules below their route.
// It shares nothing with Dump.
func render(m *model.Mesh) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	opt := func(name, v string) string {
		if v == "" {
			return ""
		}
		return " " + name + "=" + v
	}
	line("mesh %s trust=%s node=%q region=%q zone=%q", m.Domain, m.TrustDomain, m.Node, m.Region, m.Zone)
	ports := func(ps []model.Port) string {
		var s []string
		for _, p := range ps {
			s = append(s, fmt.Sprintf("%d=%s", p.Number, []string{"?", "http", "tcp", "udp"}[p.Class]+[]string{"", "/h2c"}[p.App]))
		}
		return strings.Join(s, ",")
	}
	for _, w := range m.Workloads {
		line("workload %s/%s account=%s ips=%v id=%s netns=%s container=%s port=%d ports=%s all=%v%s%s%s",
			w.Namespace, w.Name, w.Account, w.IPs, w.SPIFFEID, w.NetNS, w.ContainerID, w.DefaultPort, ports(w.Ports), w.Capture.RedirectAll,
			opt("not", strings.Trim(fmt.Sprint(w.Capture.ExcludePorts), "[]")), opt("not", strings.Trim(fmt.Sprint(w.Capture.ExcludeRanges), "[]")),
			opt("up", strings.Trim(fmt.Sprint(w.Upstreams), "[]")))
	}
	for _, e := range m.Endpoints {
		meta := ""
		if e.Metadata != nil {
			meta = fmt.Sprint(e.Metadata)
		}
		line("endpoint %s ip=%s pod=%s%s%s%s%s port=%d ports=%s weight=%d health=%s id=%s%s", e.Service, e.IP, e.Pod,
			opt("node", e.Node), opt("cluster", e.Cluster), opt("region", e.Region), opt("zone", e.Zone), e.DefaultPort, ports(e.Ports), e.Weight,
			[]string{"unknown", "healthy", "unhealthy", "draining"}[e.Health], e.SPIFFEID, opt("meta", meta))
	}
	for _, s := range m.Services {
		line("service %s ips=%v generated=%v", s.Name, s.ClusterIPs, s.Generated)
		for _, p := range s.Ports {
			line("  %s %d/%s -> %d%s%s", p.Name, p.Number, map[bool]string{false: "tcp", true: "udp"}[p.UDP], p.Target, opt("name", p.TargetName),
				opt("class", []string{"", "http", "tcp", "udp"}[p.Class]))
		}
	}
	filters := func(indent string, fs []model.Filter) {
		for _, f := range fs {
			line("%sfilter %s set=%v add=%v remove=%v", indent, []string{"?", "request", "response"}[f.Kind], f.Set, f.Add, f.Remove)
		}
	}
	for _, r := range m.Routes {
		created := ""
		if !r.Created.IsZero() {
			created = r.Created.Format(time.RFC3339)
		}
		line("route %s/%s parents=%v%s", r.Namespace, r.Name, r.Parents, opt("created", created))
		for i := range r.Rules {
			rule := &r.Rules[i]
			line("  rule%s%s", opt("name", rule.Name), opt("INVALID", rule.Invalid))
			for _, mt := range rule.Matches {
				line("    match %s%s%s %v", []string{"any", "exact ", "prefix "}[mt.PathKind], mt.Path, opt("method", mt.Method), mt.Headers)
			}
			filters("    ", rule.Filters)
			for _, bk := range rule.Backends {
				line("    backend %s:%d weight=%d%s", bk.Service, bk.Port, bk.Weight, opt("INVALID", bk.Invalid))
				filters("      ", bk.Filters)
			}
		}
	}
	return b.String()
}
