package file

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"aether/controlplane/endpointmeta"
	"aether/controlplane/gamma"
	"aether/dataplane/model"
	"aether/mtls/spiffeid"
	"aether/tproxy/rules"
)

// Dump writes m as a configuration that Load reads back into an equal mesh,
// given the Options that the header names. It is for meshes that are valid:
// names that Kubernetes allows, ports as endpointmeta gives them. What has no
// Kubernetes form is carried by the file.aether.io annotations. Equal meshes
// give equal bytes.
func Dump(m *model.Mesh) []byte {
	var d dumper
	d.printf("# The mesh as node %q has it (mesh domain %q, trust domain %q).\n", m.Node, m.Domain, m.TrustDomain)
	d.printf("# A configuration in itself: put it into a directory, and load that with those three names.\n")
	d.nodes(m)
	d.pods(m)
	for _, s := range slices.SortedFunc(slices.Values(m.Services), func(a, b model.Service) int { return model.ServiceName.Compare(a.Name, b.Name) }) {
		d.service(&s)
	}
	d.accounts(m)
	grants := grantSet{}
	for _, r := range slices.SortedStableFunc(slices.Values(m.Routes), compareRoutes) {
		d.route(&r, grants)
	}
	d.grants(grants)
	for _, f := range slices.SortedStableFunc(slices.Values(m.Filters), compareFilters) {
		d.filter(&f)
	}
	for _, p := range slices.SortedFunc(slices.Values(m.Policies), func(a, b model.EndpointPolicy) int { return model.ServiceName.Compare(a.Service, b.Service) }) {
		d.object(fields{
			{"apiVersion", configGroup + "/v1"}, {"kind", "EndpointPolicy"}, meta(p.Namespace, p.Name, nil, nil),
			{"spec", fields{{"targetRef", fields{{"kind", "Service"}, {"name", p.Service.Name}}}, {"udsSocket", p.UDSSocket}}},
		})
	}
	var mesh fields
	if m.Semantics != model.Aether {
		mesh = append(mesh, field{"routeSemantics", m.Semantics.String()})
	}
	if m.SameNode != model.MTLS {
		mesh = append(mesh, field{"sameNode", m.SameNode.String()})
	}
	if mesh != nil {
		d.object(fields{
			{"apiVersion", configGroup + "/v1"}, {"kind", "MeshConfig"}, meta(gamma.MeshNamespace, gamma.MeshName, nil, nil),
			{"spec", mesh},
		})
	}
	return d.b.Bytes()
}

type dumper struct {
	b     bytes.Buffer
	place map[string][2]string // region and zone of the nodes written
}

func (d *dumper) printf(format string, args ...any) { fmt.Fprintf(&d.b, format, args...) }

// fields is a YAML mapping in order; list a sequence. Other values are text,
// numbers and bool. A nil or empty value leaves its field out, but for empty,
// which is {}, and none, which is [].
type (
	field struct {
		name  string
		value any
	}
	fields []field
	list   []any
	empty  struct{}
	none   struct{}
)

// full gives f, or {} when nothing of it would be written.
func (f fields) full() any {
	if f.void() {
		return empty{}
	}
	return f
}

// listOf makes a list of in, each by f.
func listOf[T any](in []T, f func(*T) any) list {
	out := list{}
	for i := range in {
		out = append(out, f(&in[i]))
	}
	return out
}

// same is for listOf.
func same[T any](v *T) any { return *v }

func (d *dumper) object(f fields) {
	d.printf("---\n")
	d.fields(f, "")
}

func (d *dumper) fields(f fields, indent string) {
	for _, e := range f {
		switch v := e.value.(type) {
		case nil:
		case fields:
			if !v.void() {
				d.printf("%s%s:\n", indent, scalar(e.name))
				d.fields(v, indent+"  ")
			}
		case list:
			if len(v) > 0 {
				d.printf("%s%s:\n", indent, scalar(e.name))
				d.list(v, indent)
			}
		case empty:
			d.printf("%s%s: {}\n", indent, scalar(e.name))
		case none:
			d.printf("%s%s: []\n", indent, scalar(e.name))
		default:
			d.printf("%s%s: %s\n", indent, scalar(e.name), scalar(v))
		}
	}
}

// void: nothing in f would be written.
func (f fields) void() bool {
	for _, e := range f {
		switch v := e.value.(type) {
		case nil:
		case fields:
			if !v.void() {
				return false
			}
		case list:
			if len(v) > 0 {
				return false
			}
		default:
			return false
		}
	}
	return true
}

func (d *dumper) list(l list, indent string) {
	for _, e := range l {
		f, ok := e.(fields)
		switch {
		case !ok:
			d.printf("%s- %s\n", indent, scalar(e))
		case f.void():
			d.printf("%s- {}\n", indent)
		default:
			// A mapping in a sequence begins on the dash's line.
			at := d.b.Len()
			d.fields(f, indent+"  ")
			d.b.Bytes()[at+len(indent)] = '-'
		}
	}
}

// plain is text that every YAML reader takes for text without quotes.
var plain = regexp.MustCompile(`^[a-zA-Z/][a-zA-Z0-9/._-]*$`)

// words that some YAML reader takes for something else.
var words = []string{"y", "n", "yes", "no", "on", "off", "true", "false", "null"}

func scalar(v any) string {
	s, ok := v.(string)
	if !ok {
		return fmt.Sprint(v)
	}
	if plain.MatchString(s) && !slices.Contains(words, strings.ToLower(s)) {
		return s
	}
	return strconv.Quote(s) // YAML's double-quoted form knows every escape of Go's
}

// unless gives v, or nothing when v is the zero value.
func unless[T comparable](v T) any {
	var zero T
	if v == zero {
		return nil
	}
	return v
}

func meta(namespace, name string, labels, annotations fields) field {
	return field{"metadata", fields{
		{"name", name}, {"namespace", unless(namespace)}, {"labels", labels}, {"annotations", annotations},
	}}
}

// nodes writes a Node for each node with a locality: its own, or its first endpoint's.
func (d *dumper) nodes(m *model.Mesh) {
	d.place = map[string][2]string{}
	if m.Node != "" {
		d.place[m.Node] = [2]string{m.Region, m.Zone}
	}
	for _, e := range sortedEndpoints(m) {
		if _, ok := d.place[e.Node]; !ok && e.Node != "" {
			d.place[e.Node] = [2]string{e.Region, e.Zone}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.place)) {
		if p := d.place[name]; p != [2]string{} {
			d.object(fields{
				{"apiVersion", "v1"}, {"kind", "Node"},
				meta("", name, fields{{LabelRegion, unless(p[0])}, {LabelZone, unless(p[1])}}, nil),
			})
		}
	}
}

func sortedEndpoints(m *model.Mesh) []model.Endpoint {
	b := builder{mesh: &model.Mesh{Endpoints: slices.Clone(m.Endpoints)}}
	b.sort()
	return b.mesh.Endpoints
}

// pods writes a Pod for each endpoint and workload: one for both where the two
// agree, else one for each (AnnotationPart).
func (d *dumper) pods(m *model.Mesh) {
	b := builder{mesh: &model.Mesh{Workloads: slices.Clone(m.Workloads)}}
	b.sort()
	local := map[string]*model.Workload{}
	for i := range b.mesh.Workloads {
		w := &b.mesh.Workloads[i]
		local[w.Namespace+"/"+w.Name] = w
	}
	written, addresses := map[string]bool{}, map[string]bool{}
	for _, e := range sortedEndpoints(m) {
		pod, addr := e.Service.Namespace+"/"+e.Pod, e.Cluster+" "+e.IP.String()
		w := local[pod]
		if w != nil && !agree(m, &e, w) {
			w = nil
		}
		part := ""
		key := e.Cluster + " " + pod
		if w == nil && e.Node != "" && e.Node == m.Node || written[key] || addresses[addr] {
			part, w = partEndpoint, nil
		}
		if part == "" {
			written[key], addresses[addr] = true, true
		}
		if w != nil {
			delete(local, pod)
		}
		d.pod(m, &e, w, part)
	}
	for i := range b.mesh.Workloads {
		if w := &b.mesh.Workloads[i]; local[w.Namespace+"/"+w.Name] != nil {
			d.pod(m, nil, w, partWorkload)
		}
	}
}

// agree: e and w are two sides of one ordinary pod.
func agree(m *model.Mesh, e *model.Endpoint, w *model.Workload) bool {
	return e.Node == m.Node && m.Node != "" && e.Service == w.Service() && len(w.IPs) > 0 && e.IP == w.IPs[0] &&
		e.DefaultPort == w.DefaultPort && slices.Equal(e.Ports, w.Ports) && e.SPIFFEID == w.SPIFFEID
}

// pod writes e, w or both; at least one is given.
func (d *dumper) pod(m *model.Mesh, e *model.Endpoint, w *model.Workload, part string) {
	var service model.ServiceName
	var name, node, id string
	var defaultPort uint16
	var ports []model.Port
	var ips []netip.Addr
	var pod podOnly
	if w != nil {
		service, name, node, id = w.Service(), w.Name, m.Node, w.SPIFFEID
		defaultPort, ports, ips = w.DefaultPort, w.Ports, w.IPs
	} else {
		service, name, node, id = e.Service, e.Pod, e.Node, e.SPIFFEID
		defaultPort, ports, ips = e.DefaultPort, e.Ports, []netip.Addr{e.IP}
	}
	a := fields{
		{endpointmeta.KeyPort, strconv.Itoa(int(defaultPort))},
		{endpointmeta.KeyPorts, portList(ports)},
		{AnnotationPart, unless(part)},
	}
	if def, err := spiffeid.ForServiceAccount(m.TrustDomain, service.Namespace, service.Name); err != nil || def.String() != id {
		a = append(a, field{endpointmeta.KeySPIFFEID, id})
	}
	status := fields{}
	var deleted any
	if e != nil {
		a = append(a, field{endpointmeta.KeyWeight, strconv.FormatUint(uint64(e.Weight), 10)}, field{AnnotationCluster, unless(e.Cluster)})
		if d.place[e.Node] != [2]string{e.Region, e.Zone} {
			a = append(a, field{AnnotationRegion, e.Region}, field{AnnotationZone, e.Zone})
		}
		for _, k := range slices.Sorted(maps.Keys(e.Metadata)) {
			a = append(a, field{endpointmeta.MetadataPrefix + k, e.Metadata[k]})
		}
		switch e.Health {
		case model.Healthy, model.Unhealthy:
			ready := "True"
			if e.Health == model.Unhealthy {
				ready = "False"
			}
			status = append(status, field{"conditions", list{fields{{"type", "Ready"}, {"status", ready}}}})
		case model.Draining:
			deleted = time.Unix(0, 0).UTC().Format(time.RFC3339) // some time: a Mesh does not say when
		}
	}
	if w != nil {
		a = append(a, field{AnnotationNetNS, w.NetNS}, field{AnnotationContainerID, w.ContainerID},
			field{rules.AnnotationRedirectAll, strconv.FormatBool(w.Capture.RedirectAll)},
			field{rules.AnnotationExcludePorts, unless(commas(w.Capture.ExcludePorts))},
			field{rules.AnnotationExcludeRanges, unless(commas(w.Capture.ExcludeRanges))},
			field{endpointmeta.KeyUpstreams, unless(commas(w.Upstreams))}, field{endpointmeta.KeyUDSSocket, unless(w.UDSSocket)})
		pod.uid = w.UID
		if pod.volumes = listOf(w.Volumes, volumeFields); w.Volumes != nil && len(w.Volumes) == 0 {
			pod.volumes = none{}
		}
	}
	addresses := list{}
	for _, ip := range ips {
		addresses = append(addresses, fields{{"ip", ip.String()}})
	}
	head := meta(service.Namespace, name, fields{{LabelManaged, "true"}}, a)
	head.value = append(head.value.(fields), field{"uid", unless(pod.uid)}, field{"deletionTimestamp", deleted})
	d.object(fields{
		{"apiVersion", "v1"}, {"kind", "Pod"}, head,
		{"spec", fields{{"serviceAccountName", service.Name}, {"nodeName", unless(node)}, {"volumes", pod.volumes}}},
		{"status", append(status, field{"podIPs", addresses})},
	})
}

// podOnly is what a pod's own node alone knows of it.
type podOnly struct {
	uid     string
	volumes any
}

func volumeFields(v *model.Volume) any {
	if v.Driver == "" {
		return fields{{"name", v.Name}, {"emptyDir", empty{}}} // of whatever kind it is, it is no csi volume
	}
	return fields{{"name", v.Name}, {"csi", fields{{"driver", v.Driver}}}}
}

func portList(ports []model.Port) string {
	var s []string
	for _, p := range ports {
		suffix := "udp"
		switch {
		case p.Class == model.TCP:
			suffix = "tcp"
		case p.Class == model.HTTP && p.App == model.AppH2C:
			suffix = "h2"
		case p.Class == model.HTTP:
			suffix = "h1"
		}
		s = append(s, fmt.Sprintf("%d=%s", p.Number, suffix))
		if p.AlsoUDP {
			s = append(s, fmt.Sprintf("%d=udp", p.Number))
		}
	}
	return strings.Join(s, ",")
}

func commas[T any](in []T) string {
	s := make([]string, len(in))
	for i, v := range in {
		s[i] = fmt.Sprint(v)
	}
	return strings.Join(s, ",")
}

func (d *dumper) service(s *model.Service) {
	var labels, annotations fields
	if s.Generated {
		labels = fields{{gamma.LabelMeshService, "true"}}
	}
	ips, ports, targets := list{}, list{}, []string{}
	for _, ip := range s.ClusterIPs {
		ips = append(ips, ip.String())
	}
	for i := range s.Ports {
		p := &s.Ports[i]
		f := fields{{"name", unless(p.Name)}, {"port", p.Number}, {"targetPort", p.Target}}
		if p.TargetName != "" {
			f[2].value = p.TargetName
			if p.Target != 0 {
				targets = append(targets, fmt.Sprintf("%s=%d", model.PortKey(p.Number, p.UDP), p.Target))
			}
		}
		if p.UDP {
			f = append(f, field{"protocol", "UDP"})
		}
		if s.Generated { // elsewhere it is not read
			f = append(f, field{"appProtocol", appProtocol(p.Class)})
		}
		ports = append(ports, f)
	}
	annotations = fields{{AnnotationTargetPorts, unless(strings.Join(targets, ","))}}
	spec := fields{{"clusterIPs", ips}, {"ports", ports}}
	if len(ips) == 0 {
		spec[0] = field{"clusterIP", "None"}
	}
	d.object(fields{
		{"apiVersion", "v1"}, {"kind", "Service"},
		meta(s.Name.Namespace, s.Name.Name, labels, annotations),
		{"spec", spec},
	})
}

// appProtocol is the reverse of classOf; nil: not said.
func appProtocol(c model.Class) any {
	switch c {
	case model.HTTP:
		return "http"
	case model.TCP:
		return "tcp"
	case model.UDP:
		return "udp"
	}
	return nil
}

// accounts writes a ServiceAccount for each name of the catalog, and each service that is retained.
func (d *dumper) accounts(m *model.Mesh) {
	all := map[model.ServiceName]fields{}
	for _, n := range m.Catalog {
		all[n] = fields{{AnnotationCatalog, "true"}}
	}
	for _, r := range m.Retained {
		all[r.Service] = append(all[r.Service], field{AnnotationRetained, commas(r.Ports)})
	}
	for _, n := range slices.SortedFunc(maps.Keys(all), model.ServiceName.Compare) {
		d.object(fields{{"apiVersion", "v1"}, {"kind", "ServiceAccount"}, meta(n.Namespace, n.Name, nil, all[n])})
	}
}

func (d *dumper) route(r *model.Route, grants grantSet) {
	marks := map[string]string{}
	mark := func(key, why string) {
		if why != "" {
			marks[key] = why
		}
	}
	// names notes where a reference leads, and what is wrong with it.
	names := func(key string, b *model.BackendRef) {
		if mark(key, b.Invalid); b.Invalid == "" && !b.Ungranted && b.Service.Namespace != r.Namespace {
			grants.add(gamma.RoutesOf{Kind: r.Kind.String(), Namespace: r.Namespace}, b.Service)
		}
	}
	filters := func(key string, in []model.Filter) list {
		for i := range in {
			if in[i].Mirror != nil {
				names(fmt.Sprintf("%s/filters/%d", key, i), &in[i].Mirror.Backend)
			}
		}
		return listOf(in, filterFields)
	}
	parents, rules := list{}, list{}
	for _, p := range r.Parents {
		parents = append(parents, fields{
			{"group", ""}, {"kind", "Service"}, {"namespace", p.Service.Namespace}, {"name", p.Service.Name}, {"port", unless(p.Port)},
		})
	}
	for i := range r.Rules {
		rule := &r.Rules[i]
		key := strconv.Itoa(i)
		mark(key, rule.Invalid)
		backends := list{}
		for j := range rule.Backends {
			b := &rule.Backends[j]
			key := fmt.Sprintf("%d/%d", i, j)
			names(key, b)
			backends = append(backends, fields{
				{"namespace", b.Service.Namespace}, {"name", b.Service.Name}, {"port", unless(b.Port)}, {"weight", b.Weight},
				{"filters", filters(key, b.Filters)},
			})
		}
		rules = append(rules, fields{
			{"name", unless(rule.Name)}, {"matches", listOf(rule.Matches, matchFields)}, {"filters", filters(key, rule.Filters)}, {"backendRefs", backends},
			{"timeouts", fields{{"request", duration(rule.Timeouts.Request)}, {"backendRequest", duration(rule.Timeouts.Backend)}}},
			{"retry", retryFields(rule.Retry)}, {"sessionPersistence", persistenceFields(rule.Persistence)},
		})
	}
	var annotations fields
	if len(marks) > 0 {
		text, _ := json.Marshal(marks) // a map of strings always has a form
		annotations = fields{{AnnotationInvalid, string(text)}}
	}
	head := meta(r.Namespace, r.Name, nil, annotations)
	if !r.Created.IsZero() {
		head.value = append(head.value.(fields), field{"creationTimestamp", r.Created.UTC().Format(time.RFC3339Nano)})
	}
	var ruleList any = rules
	if len(rules) == 0 && r.Kind == model.HTTPRoute {
		ruleList = none{} // without the field there is one
	}
	d.object(fields{
		{"apiVersion", gatewayGroup + "/v1"}, {"kind", r.Kind.String()}, head,
		{"spec", fields{{"parentRefs", parents}, {"hostnames", listOf(r.ServerNames, same)}, {"rules", ruleList}}},
	})
}

// duration: nil where there is none.
func duration(d time.Duration) any {
	if d <= 0 {
		return nil
	}
	return gamma.FormatDuration(d)
}

func retryFields(r *model.Retry) any {
	if r == nil {
		return nil
	}
	return fields{{"codes", listOf(r.Codes, same)}, {"attempts", r.Attempts}, {"backoff", duration(r.Backoff)}}
}

func persistenceFields(p *model.Persistence) any {
	if p == nil {
		return nil
	}
	f := fields{{"sessionName", unless(p.Name)}, {"absoluteTimeout", duration(p.Absolute)}}
	if p.Header {
		f = append(f, field{"type", "Header"})
	}
	if p.Lasting {
		f = append(f, field{"cookieConfig", fields{{"lifetimeType", "Permanent"}}})
	}
	return f.full()
}

func matchFields(m *model.Match) any {
	var f fields
	switch m.PathKind {
	case model.PathExact:
		f = append(f, field{"path", fields{{"type", "Exact"}, {"value", m.Path}}})
	case model.PathPrefix:
		f = append(f, field{"path", fields{{"type", "PathPrefix"}, {"value", m.Path}}})
	case model.PathRegex:
		f = append(f, field{"path", fields{{"type", "RegularExpression"}, {"value", m.Path}}})
	case model.PathUnread:
		f = append(f, field{"path", fields{{"type", unread}, {"value", "/"}}})
	}
	if g := m.GRPC; g != nil {
		f = append(f, field{"method", fields{{"type", regular(g.Regex)}, {"service", unless(g.Service)}, {"method", unless(g.Method)}}.full()})
	} else {
		f = append(f, field{"method", unless(m.Method)})
	}
	values := func(in []model.ValueMatch) list {
		return listOf(in, func(v *model.ValueMatch) any {
			return fields{{"type", regular(v.Regex)}, {"name", v.Name}, {"value", v.Value}}
		})
	}
	headers := values(m.Headers)
	if m.Unread {
		headers = append(headers, fields{{"type", unread}, {"name", "unread"}, {"value", "-"}})
	}
	return append(f, field{"headers", headers}, field{"queryParams", values(m.Query)})
}

// unread is a type of match that does not exist: it is read as what it stands for, a
// condition that cannot be read.
const unread = "Unread"

// regular is the type of a match; exact is the default.
func regular(regex bool) any {
	if regex {
		return "RegularExpression"
	}
	return nil
}

func filterFields(f *model.Filter) any {
	switch {
	case f.Kind == model.Redirect && f.Redirect != nil:
		r := f.Redirect
		return fields{{"type", "RequestRedirect"}, {"requestRedirect", fields{
			{"scheme", unless(r.Scheme)}, {"hostname", unless(r.Host)}, {"path", pathFields(r.Path)}, {"port", unless(r.Port)}, {"statusCode", r.Status},
		}}}
	case f.Kind == model.Rewrite && f.Rewrite != nil:
		return fields{{"type", "URLRewrite"}, {"urlRewrite", fields{{"hostname", unless(f.Rewrite.Host)}, {"path", pathFields(f.Rewrite.Path)}}.full()}}
	case f.Kind == model.Mirror && f.Mirror != nil:
		m, b := f.Mirror, &f.Mirror.Backend
		body := fields{{"backendRef", fields{{"namespace", b.Service.Namespace}, {"name", b.Service.Name}, {"port", unless(b.Port)}}}}
		switch {
		case m.Numerator == 1 && m.Denominator == 1:
		case m.Denominator == 100:
			body = append(body, field{"percent", m.Numerator})
		default:
			body = append(body, field{"fraction", fields{{"numerator", m.Numerator}, {"denominator", m.Denominator}}})
		}
		return fields{{"type", "RequestMirror"}, {"requestMirror", body}}
	case f.Kind == model.CORS && f.CORS != nil:
		c := f.CORS
		return fields{{"type", "CORS"}, {"cors", fields{
			{"allowOrigins", listOf(c.Origins, same)}, {"allowCredentials", unless(c.Credentials)}, {"allowMethods", listOf(c.Methods, same)},
			{"allowHeaders", listOf(c.Headers, same)}, {"exposeHeaders", listOf(c.Expose, same)}, {"maxAge", unless(int64(c.MaxAge / time.Second))},
		}.full()}}
	case f.Kind == model.Extension:
		return fields{{"type", "ExtensionRef"}, {"extensionRef", fields{{"group", configGroup}, {"kind", "HTTPFilter"}, {"name", f.Extension}}}}
	}
	kind, key := "RequestHeaderModifier", "requestHeaderModifier"
	if f.Kind == model.ResponseHeaders {
		kind, key = "ResponseHeaderModifier", "responseHeaderModifier"
	}
	value := func(h *model.HeaderValue) any { return fields{{"name", h.Name}, {"value", h.Value}} }
	return fields{{"type", kind}, {key, fields{{"set", listOf(f.Set, value)}, {"add", listOf(f.Add, value)}, {"remove", listOf(f.Remove, same)}}.full()}}
}

func pathFields(p model.PathEdit) any {
	switch p.Kind {
	case model.PathFull:
		return fields{{"type", "ReplaceFullPath"}, {"replaceFullPath", p.Value}}
	case model.PathPrefixPart:
		return fields{{"type", "ReplacePrefixMatch"}, {"replacePrefixMatch", p.Value}}
	}
	return nil
}

// filter writes an HTTPFilter (contract 10.7).
func (d *dumper) filter(f *model.HTTPFilter) {
	spec := fields{{"scope", []string{"", "SCOPE_ROUTE", "SCOPE_CHAIN", "SCOPE_INBOUND"}[f.Scope&3]}, {"targetRefs", listOf(f.Targets, func(t *model.ServiceName) any {
		return fields{{"group", ""}, {"kind", "Service"}, {"name", t.Name}}
	})}}
	switch {
	case f.RBAC != nil:
		r := f.RBAC
		body := fields{{"policies", listOf(r.Policies, policyFields)}}
		if r.Audit {
			body = append(body, field{"mode", "AUDIT"})
		}
		if r.Deny {
			body = append(body, field{"action", "DENY"})
		}
		spec = append(spec, field{"rbac", body.full()})
	case f.ExtAuthz != nil:
		a, ext := f.ExtAuthz, fields{}
		for _, k := range slices.Sorted(maps.Keys(a.ContextExtensions)) {
			ext = append(ext, field{k, a.ContextExtensions[k]})
		}
		spec = append(spec, field{"extAuthz", fields{
			{"contextExtensions", ext}, {"disableRequestBodyBuffering", unless(a.NoBody)}, {"disabled", unless(a.Disabled)},
		}.full()})
	case f.HeaderToMetadata != nil:
		spec = append(spec, field{"headerToMetadata", fields{{"rules", listOf(f.HeaderToMetadata, func(h *model.HeaderToMetadata) any {
			rule := fields{{"header", h.Header}, {"metadataKey", h.Key}}
			if h.Namespace != gamma.MetadataNamespace {
				rule = append(rule, field{"metadataNamespace", h.Namespace})
			}
			return rule
		})}}})
	case f.Mutation != nil:
		m := f.Mutation
		spec = append(spec, field{"filter", gamma.MutationFilter}, field{"typedConfig", fields{
			{"@type", "type.googleapis.com/" + gamma.MutationType},
			{"mutations", fields{
				{"requestMutations", listOf(m.Request, fieldMutationFields)}, {"queryParameterMutations", listOf(m.Query, paramMutationFields)},
				{"responseMutations", listOf(m.Response, fieldMutationFields)},
			}},
		}})
	}
	d.object(fields{
		{"apiVersion", configGroup + "/v1"}, {"kind", "HTTPFilter"},
		meta(f.Namespace, f.Name, nil, fields{{AnnotationInvalid, unless(f.Invalid)}}),
		{"spec", spec},
	})
}

func policyFields(p *model.Policy) any {
	return fields{
		{"name", p.Name},
		{"principals", listOf(p.Principals, func(w *model.Principal) any {
			return fields{{"spiffeId", unless(w.SPIFFEID)}, {"namespace", unless(w.Namespace)}}
		})},
		{"permissions", listOf(p.Permissions, func(w *model.Permission) any {
			return fields{{"pathPrefix", unless(w.PathPrefix)}, {"method", unless(w.Method)}}
		})},
	}
}

// percent is the reverse of filterReader.literal.
func percent(s string) string { return strings.ReplaceAll(s, "%", "%%") }

func appendAction(k model.MutationKind) any {
	if int(k) < len(gamma.AppendActions) {
		return gamma.AppendActions[k]
	}
	return nil
}

// raw is text that YAML cannot hold, as bytes.
func raw(s string) any { return base64.StdEncoding.EncodeToString([]byte(s)) }

func fieldMutationFields(m *model.MutationOp) any {
	if m.Kind == model.RemoveAll {
		return fields{{"remove", m.Name}}
	}
	header := fields{{"key", m.Name}, {"value", percent(m.Value)}}
	if !utf8.ValidString(m.Value) {
		header[1] = field{"rawValue", raw(percent(m.Value))}
	}
	return fields{{"append", fields{{"header", header}, {"appendAction", appendAction(m.Kind)}, {"keepEmptyValue", unless(m.Value == "")}}}}
}

func paramMutationFields(m *model.MutationOp) any {
	if m.Kind == model.RemoveAll {
		return fields{{"remove", m.Name}}
	}
	name, value := "record", any(percent(m.Value))
	if !utf8.ValidString(m.Value) {
		name, value = "entry", raw(percent(m.Value))
	}
	return fields{{"append", fields{{name, fields{{"key", m.Name}, {"value", value}}}, {"action", appendAction(m.Kind)}}}}
}

// grantSet is what routes name in other namespaces: from, to, names.
type grantSet map[grantKey][]string

// grantKey: routes of a kind and namespace may name Services of the namespace to.
type grantKey struct {
	gamma.RoutesOf
	to string
}

func (g grantSet) add(from gamma.RoutesOf, to model.ServiceName) {
	key := grantKey{from, to.Namespace}
	g[key] = append(g[key], to.Name)
}

// grants permits what the mesh says is permitted: from a kind of routes of a namespace,
// into another, by the names of the Services.
func (d *dumper) grants(grants grantSet) {
	keys := slices.SortedFunc(maps.Keys(grants), func(a, b grantKey) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.to, b.to), cmp.Compare(a.Kind, b.Kind))
	})
	for _, k := range keys {
		names := slices.Sorted(slices.Values(grants[k]))
		n := 0
		for part := range slices.Chunk(slices.Compact(names), gamma.MaxGrant) {
			// A dot is in no namespace's name, so these are names of nothing else.
			name := "from-" + k.Namespace
			if k.Kind != model.HTTPRoute.String() {
				name += "." + strings.ToLower(k.Kind)
			}
			if n++; n > 1 {
				name += "." + strconv.Itoa(n)
			}
			d.object(fields{
				{"apiVersion", gatewayGroup + "/v1"}, {"kind", "ReferenceGrant"}, meta(k.to, name, nil, nil),
				{"spec", fields{
					{"from", list{fields{{"group", gatewayGroup}, {"kind", k.Kind}, {"namespace", k.Namespace}}}},
					{"to", listOf(part, func(name *string) any { return fields{{"group", ""}, {"kind", "Service"}, {"name", *name}} })},
				}},
			})
		}
	}
}
