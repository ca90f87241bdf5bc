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
	if m.Semantics != model.Aether {
		line("semantics %d", m.Semantics)
	}
	if m.SameNode != model.MTLS {
		line("sameNode %d", m.SameNode)
	}
	ports := func(ps []model.Port) string {
		var s []string
		for _, p := range ps {
			s = append(s, fmt.Sprintf("%d=%s", p.Number, []string{"?", "http", "tcp", "udp"}[p.Class]+[]string{"", "/h2c"}[p.App]+map[bool]string{true: "+udp"}[p.AlsoUDP]))
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
	backend := func(b *model.BackendRef) string {
		return fmt.Sprintf("%s:%d weight=%d%s", b.Service, b.Port, b.Weight, opt("INVALID", b.Invalid))
	}
	edit := func(e model.PathEdit) string { return fmt.Sprintf("%d=%q", e.Kind, e.Value) }
	filters := func(indent string, fs []model.Filter) {
		for _, f := range fs {
			switch {
			case f.Redirect != nil:
				r := f.Redirect
				line("%sredirect %q %q %d path=%s %d", indent, r.Scheme, r.Host, r.Port, edit(r.Path), r.Status)
			case f.Rewrite != nil:
				line("%srewrite %q path=%s", indent, f.Rewrite.Host, edit(f.Rewrite.Path))
			case f.Mirror != nil:
				line("%smirror %d/%d %s", indent, f.Mirror.Numerator, f.Mirror.Denominator, backend(&f.Mirror.Backend))
			case f.CORS != nil:
				line("%scors %+v", indent, *f.CORS)
			case f.Extension != "":
				line("%sextension %s", indent, f.Extension)
			default:
				line("%sfilter %s set=%v add=%v remove=%v", indent, []string{"?", "request", "response"}[f.Kind], f.Set, f.Add, f.Remove)
			}
		}
	}
	values := func(vs []model.ValueMatch) string {
		var s []string
		for _, v := range vs {
			s = append(s, "{"+v.Name+map[bool]string{false: " ", true: " ~"}[v.Regex]+v.Value+"}")
		}
		return "[" + strings.Join(s, " ") + "]"
	}
	for _, r := range m.Routes {
		created := ""
		if !r.Created.IsZero() {
			created = r.Created.Format(time.RFC3339)
		}
		kind := []string{"?", "grpc", "", "tls", "tcp"}[r.Kind]
		line("%sroute %s/%s parents=%v%s%s", kind, r.Namespace, r.Name, r.Parents, opt("created", created), opt("names", strings.Join(r.ServerNames, ",")))
		for i := range r.Rules {
			rule := &r.Rules[i]
			line("  rule%s%s", opt("name", rule.Name), opt("INVALID", rule.Invalid))
			for _, mt := range rule.Matches {
				what := []string{"any", "exact ", "prefix ", "regex ", "unread"}[mt.PathKind] + mt.Path
				if mt.GRPC != nil {
					what = fmt.Sprintf("grpc %+v", *mt.GRPC)
				}
				if mt.Unread {
					what += " UNREAD"
				}
				query := ""
				if len(mt.Query) > 0 {
					query = " ?" + values(mt.Query)
				}
				line("    match %s%s %s%s", what, opt("method", mt.Method), values(mt.Headers), query)
			}
			filters("    ", rule.Filters)
			if rule.Timeouts != (model.Timeouts{}) {
				line("    timeouts %v", rule.Timeouts)
			}
			if rule.Retry != nil {
				line("    retry %+v", *rule.Retry)
			}
			if rule.Persistence != nil {
				line("    persistence %+v", *rule.Persistence)
			}
			for j := range rule.Backends {
				line("    backend %s", backend(&rule.Backends[j]))
				filters("      ", rule.Backends[j].Filters)
			}
		}
	}
	for _, f := range m.Filters {
		line("filter %s/%s scope=%s targets=%v%s", f.Namespace, f.Name, []string{"?", "route", "chain", "inbound"}[f.Scope], f.Targets, opt("INVALID", f.Invalid))
		if f.RBAC != nil {
			line("  rbac audit=%v deny=%v", f.RBAC.Audit, f.RBAC.Deny)
			for _, p := range f.RBAC.Policies {
				line("    policy %q who=%+v what=%+v", p.Name, p.Principals, p.Permissions)
			}
		}
		if f.ExtAuthz != nil {
			line("  authz %+v", *f.ExtAuthz)
		}
		for _, h := range f.HeaderToMetadata {
			line("  metadata %+v", h)
		}
		if f.Mutation != nil {
			line("  mutation request=%v query=%v response=%v", f.Mutation.Request, f.Mutation.Query, f.Mutation.Response)
		}
	}
	for _, n := range m.Catalog {
		line("catalog %s", n)
	}
	for _, r := range m.Retained {
		line("retained %s %v", r.Service, r.Ports)
	}
	return b.String()
}
