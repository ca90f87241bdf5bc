package file

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"aether/controlplane/endpointmeta"
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
	for _, s := range slices.SortedFunc(slices.Values(m.Services), func(a, b model.Service) int { return compareNames(a.Name, b.Name) }) {
		d.service(&s)
	}
	grants := map[[2]string][]string{}
	for _, r := range slices.SortedFunc(slices.Values(m.Routes), func(a, b model.Route) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	}) {
		d.route(&r, grants)
	}
	d.grants(grants)
	return d.b.Bytes()
}

type dumper struct {
	b     bytes.Buffer
	place map[string][2]string // region and zone of the nodes written
}

func (d *dumper) printf(format string, args ...any) { fmt.Fprintf(&d.b, format, args...) }

// fields is a YAML mapping in order; list a sequence. Other values are string,
// uint32 and bool. A nil or empty value leaves its field out, but for empty, which is {}.
type (
	field struct {
		name  string
		value any
	}
	fields []field
	list   []any
	empty  struct{}
)

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
			field{endpointmeta.KeyUpstreams, unless(commas(w.Upstreams))})
	}
	addresses := list{}
	for _, ip := range ips {
		addresses = append(addresses, fields{{"ip", ip.String()}})
	}
	head := meta(service.Namespace, name, fields{{LabelManaged, "true"}}, a)
	head.value = append(head.value.(fields), field{"deletionTimestamp", deleted})
	d.object(fields{
		{"apiVersion", "v1"}, {"kind", "Pod"}, head,
		{"spec", fields{{"serviceAccountName", service.Name}, {"nodeName", unless(node)}}},
		{"status", append(status, field{"podIPs", addresses})},
	})
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
		labels = fields{{LabelMeshService, "true"}}
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
				targets = append(targets, fmt.Sprintf("%s=%d", portKey(p.Number, p.UDP), p.Target))
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

func (d *dumper) route(r *model.Route, grants map[[2]string][]string) {
	marks := map[string]string{}
	parents, ruleList := list{}, list{}
	for _, p := range r.Parents {
		parents = append(parents, fields{
			{"group", ""}, {"kind", "Service"}, {"namespace", p.Service.Namespace}, {"name", p.Service.Name}, {"port", unless(p.Port)},
		})
	}
	for i := range r.Rules {
		rule := &r.Rules[i]
		mark := func(key, why string) {
			if why != "" {
				marks[key] = why
			}
		}
		mark(strconv.Itoa(i), rule.Invalid)
		matches, backends := list{}, list{}
		for j := range rule.Matches {
			matches = append(matches, matchFields(&rule.Matches[j]))
		}
		for j := range rule.Backends {
			b := &rule.Backends[j]
			mark(fmt.Sprintf("%d/%d", i, j), b.Invalid)
			if to := b.Service; b.Invalid == "" && to.Namespace != r.Namespace {
				key := [2]string{r.Namespace, to.Namespace}
				if !slices.Contains(grants[key], to.Name) {
					grants[key] = append(grants[key], to.Name)
				}
			}
			backends = append(backends, fields{
				{"namespace", b.Service.Namespace}, {"name", b.Service.Name}, {"port", unless(b.Port)}, {"weight", b.Weight},
				{"filters", filterList(b.Filters)},
			})
		}
		ruleList = append(ruleList, fields{
			{"name", unless(rule.Name)}, {"matches", matches}, {"filters", filterList(rule.Filters)}, {"backendRefs", backends},
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
	d.object(fields{
		{"apiVersion", gatewayGroup + "/v1"}, {"kind", "HTTPRoute"}, head,
		{"spec", fields{{"parentRefs", parents}, {"rules", ruleList}}},
	})
}

func matchFields(m *model.Match) fields {
	var f fields
	switch m.PathKind {
	case model.PathExact:
		f = append(f, field{"path", fields{{"type", "Exact"}, {"value", m.Path}}})
	case model.PathPrefix:
		f = append(f, field{"path", fields{{"type", "PathPrefix"}, {"value", m.Path}}})
	}
	headers := list{}
	for _, h := range m.Headers {
		headers = append(headers, fields{{"name", h.Name}, {"value", h.Value}})
	}
	return append(f, field{"method", unless(m.Method)}, field{"headers", headers})
}

func filterList(in []model.Filter) list {
	out := list{}
	for i := range in {
		f := &in[i]
		kind, key := "RequestHeaderModifier", "requestHeaderModifier"
		if f.Kind == model.ResponseHeaders {
			kind, key = "ResponseHeaderModifier", "responseHeaderModifier"
		}
		values := func(in []model.HeaderValue) list {
			out := list{}
			for _, h := range in {
				out = append(out, fields{{"name", h.Name}, {"value", h.Value}})
			}
			return out
		}
		remove := list{}
		for _, n := range f.Remove {
			remove = append(remove, n)
		}
		body := fields{{"set", values(f.Set)}, {"add", values(f.Add)}, {"remove", remove}}
		var value any = body
		if body.void() {
			value = empty{}
		}
		out = append(out, fields{{"type", kind}, {key, value}})
	}
	return out
}

// grants permits what the mesh says is permitted: from a namespace, into
// another, by the names of the Services.
func (d *dumper) grants(grants map[[2]string][]string) {
	keys := slices.SortedFunc(maps.Keys(grants), func(a, b [2]string) int {
		return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1]))
	})
	for _, k := range keys {
		to := list{}
		for _, name := range slices.Sorted(slices.Values(grants[k])) {
			to = append(to, fields{{"group", ""}, {"kind", "Service"}, {"name", name}})
		}
		d.object(fields{
			{"apiVersion", gatewayGroup + "/v1"}, {"kind", "ReferenceGrant"}, meta(k[1], "from-"+k[0], nil, nil),
			{"spec", fields{
				{"from", list{fields{{"group", gatewayGroup}, {"kind", "HTTPRoute"}, {"namespace", k[0]}}}},
				{"to", to},
			}},
		})
	}
}
