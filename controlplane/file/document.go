package file

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"aether/dataplane/model"
)

// document is one YAML document of a file, by its text.
type document struct {
	base int // lines of the file before it
	text []byte
}

// split cuts a file at its document markers (YAML 1.2, 9.1.2 and 9.2). A marker
// at the start of a line is one wherever it stands, so a document that
// cannot be parsed cannot swallow its neighbours. Directives before a marker
// are dropped: %YAML changes nothing here, and tags of one's own mean nothing.
func split(b []byte) []document {
	b = bytes.TrimPrefix(b, []byte("\xef\xbb\xbf"))
	var docs []document
	cur, content := document{}, false
	start, line := 0, 0
	flush := func(end, next, nextLine int) {
		if content {
			cur.text = b[start:end]
			docs = append(docs, cur)
		}
		start, cur, content = next, document{base: nextLine}, false
	}
	for at := 0; at < len(b); line++ {
		end := len(b)
		if i := bytes.IndexByte(b[at:], '\n'); i >= 0 {
			end = at + i + 1
		}
		switch l := b[at:end]; {
		case marker(l, "---"):
			flush(at, at, line)
			content = !blank(l[3:])
		case marker(l, "..."):
			flush(at, end, line+1)
		case !content && l[0] == '%':
		default:
			content = content || !blank(l)
		}
		at = end
	}
	flush(len(b), len(b), line)
	return docs
}

func marker(line []byte, m string) bool {
	return bytes.HasPrefix(line, []byte(m)) && (len(line) == 3 || strings.IndexByte(" \t\r\n", line[3]) >= 0)
}

// blank: nothing but white space, or a comment.
func blank(line []byte) bool {
	line = bytes.TrimSpace(line)
	return len(line) == 0 || line[0] == '#'
}

// parsed is what one file says; it is never changed once made.
type parsed struct {
	sum      [32]byte
	items    []item
	problems []problem
}

// item is one object, cut down to what the mesh needs of it. Exactly one of the
// pointers is set.
type item struct {
	object string // "Service shop/cart"
	key    string // no two items of a mesh share it
	file   string
	line   int

	node    *nodeFacts
	pod     *podFacts
	service *serviceFacts
	account *accountFacts
	route   *routeFacts
	filter  *model.HTTPFilter
	mesh    *meshFacts
	grant   *grantFacts
}

// reader turns the text of one file into items and problems.
type reader struct {
	o       Options
	file    string
	out     *parsed
	retried int // bytes parsed again, see wrongLine
}

func parse(name string, b []byte, o Options) *parsed {
	r := reader{o: o, file: name, out: &parsed{}}
	for _, doc := range split(b) {
		r.document(doc)
	}
	return r.out
}

func (r *reader) report(object string, line int, format string, args ...any) {
	r.out.problems = append(r.out.problems, problem{object, r.file, line, fmt.Sprintf(format, args...)})
}

// yamlLine finds the line, counted within the document, in the YAML package's errors.
var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

func (r *reader) document(doc document) {
	dec := yaml.NewDecoder(bytes.NewReader(doc.text))
	var n yaml.Node
	if err := dec.Decode(&n); err != nil {
		if errors.Is(err, io.EOF) {
			return
		}
		r.syntax(doc, err)
		return
	}
	if err := dec.Decode(new(yaml.Node)); err == nil {
		r.report("document", doc.base+1, "a second document begins inside this one: put --- alone on a line between them")
		return
	} else if !errors.Is(err, io.EOF) {
		r.syntax(doc, err)
		return
	}
	r.object(n.Content[0], doc.base)
}

func (r *reader) syntax(doc document, err error) {
	msg, line := err.Error(), 1
	if m := yamlLine.FindStringSubmatch(msg); m != nil {
		msg = msg[len(m[0]):]
		line, _ = strconv.Atoi(cmp.Or(m[1], "1"))
	}
	r.report("document", doc.base+r.wrongLine(doc.text, line), "not YAML: %s: correct it; nothing of this document is in force (it begins on line %d)", msg, doc.base+1)
}

// maxRetries bounds the bytes of a file that are parsed again to find its errors.
const maxRetries = 4 << 20

// wrongLine finds the line, from 1, after which b makes no sense: all that
// precedes it parses, and nothing longer does. The package itself tells
// where the innermost construct began, which may be far above; that is guess.
func (r *reader) wrongLine(b []byte, guess int) int {
	if i := bytes.IndexFunc(b, unprintable); i >= 0 {
		return 1 + bytes.Count(b[:i], []byte("\n"))
	}
	end := len(b)
	for end > 0 && r.retried+end <= maxRetries {
		end = bytes.LastIndexByte(b[:end-1], '\n') + 1
		r.retried += end
		if err := yaml.Unmarshal(b[:end], new(yaml.Node)); err == nil {
			return 1 + bytes.Count(b[:end], []byte("\n"))
		}
	}
	return guess
}

// unprintable: what may not stand in YAML (YAML 1.2, 5.1), bytes that are not UTF-8 included.
func unprintable(c rune) bool {
	return c < ' ' && c != '\t' && c != '\n' && c != '\r' || c >= 0x7f && c < 0xa0 && c != 0x85 || c == utf8.RuneError
}

// known lists what this source reads.
var known = map[string]struct {
	versions []string
	cluster  bool // not in a namespace
	decode   func(*reader, object)
}{
	"Pod":            {[]string{"v1"}, false, (*reader).pod},
	"Service":        {[]string{"v1"}, false, (*reader).service},
	"ServiceAccount": {[]string{"v1"}, false, (*reader).account},
	"Node":           {[]string{"v1"}, true, (*reader).node},
	"HTTPRoute":      {[]string{gatewayGroup + "/v1", gatewayGroup + "/v1beta1"}, false, (*reader).httpRoute},
	"GRPCRoute":      {[]string{gatewayGroup + "/v1"}, false, (*reader).grpcRoute},
	"TCPRoute":       {[]string{gatewayGroup + "/v1", gatewayGroup + "/v1alpha2"}, false, (*reader).tcpRoute},
	"TLSRoute":       {[]string{gatewayGroup + "/v1", gatewayGroup + "/v1alpha3", gatewayGroup + "/v1alpha2"}, false, (*reader).tlsRoute},
	"ReferenceGrant": {[]string{gatewayGroup + "/v1", gatewayGroup + "/v1beta1"}, false, (*reader).grant},
	"HTTPFilter":     {[]string{configGroup + "/v1"}, false, (*reader).httpFilter},
	"MeshConfig":     {[]string{configGroup + "/v1"}, false, (*reader).meshConfig},
}

const (
	gatewayGroup = "gateway.networking.k8s.io"
	configGroup  = "config.aether.io"
	kindsRead    = "Pod, Service, ServiceAccount, Node, List (v1), HTTPRoute, GRPCRoute, TCPRoute, TLSRoute and ReferenceGrant (" +
		gatewayGroup + "/v1), HTTPFilter and MeshConfig (" + configGroup + "/v1)"
)

// object is a YAML mapping that says it is of a kind we read, and has a usable name.
type object struct {
	root            *yaml.Node
	base            int
	kind            string
	namespace, name string
}

func (o object) String() string { return label(o.kind, o.namespace, o.name) }

func label(kind, namespace, name string) string {
	if namespace == "" {
		return kind + " " + name
	}
	return kind + " " + namespace + "/" + name
}

// an puts the article before a kind.
func an(kind string) string {
	if strings.HasPrefix(kind, "HTTP") {
		return "an " + kind
	}
	return "a " + kind
}

func (o object) line() int { return o.base + o.root.Line }

// at is the line of the field at path, or of the nearest field above it that is there.
func (o object) at(path ...string) int {
	n, line := o.root, o.root.Line
	for _, p := range path {
		if n.Kind == yaml.AliasNode {
			n = n.Alias
		}
		var next *yaml.Node
		switch n.Kind {
		case yaml.MappingNode:
			for i := 0; i+1 < len(n.Content); i += 2 {
				// A typedConfig may spell its names with underscores (see decoder.proto).
				if key := n.Content[i].Value; key == p || camel(key) == p {
					next, line = n.Content[i+1], n.Content[i].Line
					break
				}
			}
		case yaml.SequenceNode:
			if i, err := strconv.Atoi(p); err == nil && i < len(n.Content) {
				next, line = n.Content[i], n.Content[i].Line
			}
		}
		if next == nil {
			break
		}
		n = next
	}
	return o.base + line
}

// object reads one object, or the objects of a List.
func (r *reader) object(n *yaml.Node, base int) {
	var head struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Metadata   struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
		} `json:"metadata"`
	}
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
		return // "--- # nothing here"
	}
	if n.Kind != yaml.MappingNode {
		r.report("document", base+n.Line, "%s where a Kubernetes object is expected: begin it with apiVersion and kind", describe(n))
		return
	}
	peek(n, reflect.ValueOf(&head).Elem())
	o := object{n, base, head.Kind, head.Metadata.Namespace, head.Metadata.Name}
	k, ok := known[head.Kind]
	switch {
	case head.Kind == "":
		r.report("document", o.line(), "no kind: begin the object with apiVersion and kind")
		return
	case head.Kind == "List" && head.APIVersion == "v1":
		r.list(o)
		return
	case !ok:
		r.report(o.String(), o.at("kind"), "kind %s (%s) is not read by this source and is ignored: it reads %s", head.Kind, head.APIVersion, kindsRead)
		return
	}
	if !slices.Contains(k.versions, head.APIVersion) {
		r.report(o.String(), o.at("apiVersion"), "apiVersion %q of %s is not read: write %s", head.APIVersion, an(head.Kind), k.versions[0])
		return
	}
	switch {
	case k.cluster:
		o.namespace = ""
	case o.namespace == "":
		o.namespace = metav1.NamespaceDefault // as kubectl does
	}
	if why := validation.IsDNS1123Subdomain(o.name); len(why) > 0 {
		r.report(o.String(), o.at("metadata", "name"), "metadata.name %q cannot be a name: %s", o.name, strings.Join(why, "; "))
		return
	}
	if why := validation.IsDNS1123Label(o.namespace); !k.cluster && len(why) > 0 {
		r.report(o.String(), o.at("metadata", "namespace"), "metadata.namespace %q cannot be a name: %s", o.namespace, strings.Join(why, "; "))
		return
	}
	k.decode(r, o)
}

// peek fills what it can of the strings in v and complains of nothing: the real decoding does.
func peek(n *yaml.Node, v reflect.Value) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
		index, ok := fieldsOf(v.Type())[n.Content[i].Value]
		if !ok {
			continue
		}
		f, value := v.FieldByIndex(index), n.Content[i+1]
		switch {
		case f.Kind() == reflect.Struct:
			peek(value, f)
		case value.Kind == yaml.ScalarNode && value.ShortTag() == "!!str" && f.String() == "":
			f.SetString(value.Value)
		}
	}
}

// list reads what `kubectl get -o yaml` prints of several objects.
func (r *reader) list(o object) {
	for i := 0; i+1 < len(o.root.Content); i += 2 {
		key, value := o.root.Content[i], o.root.Content[i+1]
		switch {
		case key.Value == "apiVersion", key.Value == "kind", key.Value == "metadata":
		case key.Value != "items":
			r.report("List", o.base+key.Line, "unknown field %q: remove it", key.Value)
		case value.Kind == yaml.SequenceNode:
			for _, e := range value.Content {
				r.object(e, o.base)
			}
		case value.ShortTag() != "!!null":
			r.report("List", o.base+key.Line, "field \"items\" is %s where a list is expected: write a list", describe(value))
		}
	}
}

// strict decodes o into into, a pointer to a Kubernetes type.
func (r *reader) strict(o object, into any) []flaw {
	d := decoder{base: o.base}
	d.into(o.root, into, "")
	return d.flaws
}

// refuse reports flaws and whether there are any.
func (r *reader) refuse(o object, flaws []flaw, consequence string) bool {
	for _, f := range flaws {
		r.report(o.String(), f.line, "%s; %s", f.reason, consequence)
	}
	return len(flaws) > 0
}

const refused = "the object is not in force"

// ownAnnotations refuses misspelt annotations of this source.
func (r *reader) ownAnnotations(o object, have map[string]string, allowed ...string) []flaw {
	var flaws []flaw
	for _, k := range slices.Sorted(maps.Keys(have)) {
		if strings.HasPrefix(k, annotationPrefix) && !slices.Contains(allowed, k) {
			what := an(o.kind) + " has none of this prefix"
			if len(allowed) > 0 {
				what = an(o.kind) + " has " + strings.Join(allowed, ", ")
			}
			flaws = append(flaws, flaw{"", o.at("metadata", "annotations", k),
				fmt.Sprintf("annotation %s does not exist: %s", k, what)})
		}
	}
	return flaws
}

func (r *reader) add(o object, it item) {
	it.object, it.file, it.line = o.String(), r.file, o.line()
	if it.key == "" {
		it.key = it.object
	}
	r.out.items = append(r.out.items, it)
}

type nodeFacts struct{ name, region, zone string }

func (r *reader) node(o object) {
	var n corev1.Node
	flaws := append(r.strict(o, &n), r.ownAnnotations(o, n.Annotations)...)
	if r.refuse(o, flaws, refused) {
		return
	}
	r.add(o, item{node: &nodeFacts{n.Name, n.Labels[LabelRegion], n.Labels[LabelZone]}})
}

// maxGrant bounds the entries of a ReferenceGrant's from, and of its to; the
// Gateway API allows 16.
const maxGrant = 64

// grantFacts: the routes in from may name the Services in to, which are in
// namespace (contract 10.5).
type grantFacts struct {
	namespace string
	from      []routesOf
	to        []string // "": every Service
}

// routesOf are the routes of a kind in a namespace.
type routesOf struct{ kind, namespace string }

func (r *reader) grant(o object) {
	var g gatewayv1.ReferenceGrant
	flaws := append(r.strict(o, &g), r.ownAnnotations(o, g.Annotations)...)
	for _, l := range []struct {
		name string
		n    int
	}{{"from", len(g.Spec.From)}, {"to", len(g.Spec.To)}} {
		if l.n > maxGrant {
			flaws = append(flaws, flaw{"", o.at("spec", l.name), fmt.Sprintf("spec.%s has %d entries, the limit is %d: write several grants", l.name, l.n, maxGrant)})
		}
	}
	if r.refuse(o, flaws, "the grant is not in force") {
		return
	}
	f := &grantFacts{namespace: o.namespace}
	for _, from := range g.Spec.From {
		if from.Group == gatewayGroup {
			f.from = append(f.from, routesOf{string(from.Kind), string(from.Namespace)})
		}
	}
	for _, to := range g.Spec.To {
		switch {
		case to.Group != "" && to.Group != "core" || to.Kind != "Service":
		case to.Name == nil:
			f.to = append(f.to, "")
		default:
			f.to = append(f.to, string(*to.Name))
		}
	}
	r.add(o, item{grant: f})
}

// accountFacts are what a ServiceAccount's annotations say of its service.
type accountFacts struct {
	service  model.ServiceName
	catalog  bool
	retained *model.Retained
}

// account reads AnnotationCatalog and AnnotationRetained. A ServiceAccount is
// what a mesh service is (contract 1.1), with or without a Service object.
func (r *reader) account(o object) {
	var a corev1.ServiceAccount
	flaws := append(r.strict(o, &a), r.ownAnnotations(o, a.Annotations, AnnotationCatalog, AnnotationRetained)...)
	bad := func(key, format string, args ...any) {
		flaws = append(flaws, flaw{"", o.at("metadata", "annotations", key), "annotation " + key + ": " + fmt.Sprintf(format, args...)})
	}
	service := model.ServiceName{Namespace: o.namespace, Name: o.name}
	f := &accountFacts{service: service}
	catalog, cataloged := a.Annotations[AnnotationCatalog]
	ports, retained := a.Annotations[AnnotationRetained]
	if why := badService(service); why != "" && (cataloged || retained) {
		flaws = append(flaws, flaw{"", o.at("metadata", "name"), why})
	}
	if f.catalog = catalog == "true"; cataloged && !f.catalog && catalog != "false" {
		bad(AnnotationCatalog, "%.100q: write \"true\" or \"false\"", catalog)
	}
	if retained {
		f.retained = &model.Retained{Service: service}
		for entry := range strings.SplitSeq(ports, ",") {
			if entry = strings.TrimSpace(entry); entry == "" {
				continue
			}
			n, err := strconv.ParseUint(entry, 10, 16)
			if err != nil || n == 0 {
				bad(AnnotationRetained, "entry %.100q: write the HTTP ports the service had, from 1 to 65535, joined by commas", entry)
				break
			}
			f.retained.Ports = append(f.retained.Ports, uint16(n))
		}
		slices.Sort(f.retained.Ports)
		f.retained.Ports = slices.Compact(f.retained.Ports)
	}
	if r.refuse(o, flaws, refused) || !f.catalog && f.retained == nil {
		return
	}
	r.add(o, item{account: f})
}
