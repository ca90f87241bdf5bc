package file

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"aether/controlplane/gamma"
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

// parsed is what one file says, and what it said before and cannot be told from it any more; it is never
// changed once made.
type parsed struct {
	sum      [32]byte
	items    []item
	problems []problem
	form
	slips
}

// item is one object, cut down to what the mesh needs of it. Exactly one of the
// pointers is set.
type item struct {
	object string // "Service shop/cart"
	key    string // no two items of a mesh share it
	file   string
	line   int
	since  time.Time // it is kept, since then; zero: it is what the file says
	good   *item     // of a refused one: as it was last without doubt; nil: it never was

	node    *nodeFacts
	pod     *podFacts
	service *gamma.Service
	account *accountFacts
	route   *gamma.Route
	filter  *model.HTTPFilter
	policy  *model.EndpointPolicy
	mesh    *gamma.Mesh
	grant   *gamma.Grant
}

// reader turns the text of one file into items and problems.
type reader struct {
	gamma.Reader
	o       Options
	items   []item
	slips   slips
	retried int // bytes parsed again, see wrongLine
}

// parse reads a file; old is what it was before, nil: it is new.
func parse(name string, b []byte, o Options, old *parsed) *parsed {
	r := reader{Reader: gamma.Reader{File: name}, o: o, slips: slips{refused: map[string]int{}, empty: len(bytes.TrimSpace(b)) == 0}}
	docs := split(b)
	f := formOf(b, docs)
	cut := f.cut(old)
	for i, doc := range docs {
		if cut != "" && i == len(docs)-1 {
			r.Report("document", doc.base+1, "the file ends within %s, and is shorter than before: it seems to be cut off here, and nothing of this document is in force; write it whole, or, if it is, add a line break at its end", cut)
			r.untold(doc.text, doc.base+1)
			break
		}
		r.document(doc)
	}
	return &parsed{items: r.items, problems: r.Problems, form: f, slips: r.slips}
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
		r.Report("document", doc.base+1, "a second document begins inside this one: put --- alone on a line between them")
		r.untold(doc.text, doc.base+1)
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
	line = doc.base + r.wrongLine(doc.text, line)
	r.Report("document", line, "not YAML: %s: correct it; nothing of this document is in force (it begins on line %d)", msg, doc.base+1)
	r.untold(doc.text, line)
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
	decode   func(*reader, gamma.Object)
}{
	"Pod":            {[]string{"v1"}, false, (*reader).pod},
	"Service":        {[]string{"v1"}, false, (*reader).service},
	"ServiceAccount": {[]string{"v1"}, false, (*reader).account},
	"Node":           {[]string{"v1"}, true, (*reader).node},
	"HTTPRoute":      {[]string{gatewayGroup + "/v1", gatewayGroup + "/v1beta1"}, false, (*reader).route},
	"GRPCRoute":      {[]string{gatewayGroup + "/v1"}, false, (*reader).route},
	"TCPRoute":       {[]string{gatewayGroup + "/v1", gatewayGroup + "/v1alpha2"}, false, (*reader).route},
	"TLSRoute":       {[]string{gatewayGroup + "/v1", gatewayGroup + "/v1alpha3", gatewayGroup + "/v1alpha2"}, false, (*reader).route},
	"ReferenceGrant": {[]string{gatewayGroup + "/v1", gatewayGroup + "/v1beta1"}, false, (*reader).grant},
	"HTTPFilter":     {[]string{configGroup + "/v1"}, false, (*reader).httpFilter},
	"EndpointPolicy": {[]string{configGroup + "/v1"}, false, (*reader).endpointPolicy},
	"MeshConfig":     {[]string{configGroup + "/v1"}, false, (*reader).meshConfig},
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
	r.slips.some = true
	if n.Kind != yaml.MappingNode {
		r.untoldNode(n, base)
		r.Report("document", base+n.Line, "%s where a Kubernetes object is expected: begin it with apiVersion and kind", gamma.Describe(n))
		return
	}
	gamma.Peek(n, reflect.ValueOf(&head).Elem())
	o := gamma.Object{Root: n, Base: base, Kind: head.Kind, Namespace: head.Metadata.Namespace, Name: head.Metadata.Name}
	k, ok := known[head.Kind]
	switch {
	case head.Kind == "":
		r.Report("document", o.Line(), "no kind: begin the object with apiVersion and kind")
		r.untoldNode(n, base)
		return
	case head.Kind == "List" && head.APIVersion == "v1":
		r.list(o)
		return
	case foreign(head.APIVersion, head.Kind):
		r.Report(o.String(), o.At("kind"), "kind %s (%s) is not of the mesh and is ignored", head.Kind, head.APIVersion)
		return
	case !ok:
		mend := "correct it, or leave the object out"
		if near := nearKind(head.Kind); near != "" {
			mend = "write " + near + " (" + known[near].versions[0] + ")"
		}
		r.Report(o.String(), o.At("kind"), "kind %s (%s) is not read: %s", head.Kind, head.APIVersion, mend)
		r.untoldNode(n, base)
		return
	}
	if !slices.Contains(k.versions, head.APIVersion) {
		r.Report(o.String(), o.At("apiVersion"), "apiVersion %q of %s is not read: write %s", head.APIVersion, gamma.An(head.Kind), k.versions[0])
		r.untoldNode(n, base)
		return
	}
	switch {
	case k.cluster:
		o.Namespace = ""
	case o.Namespace == "":
		o.Namespace = metav1.NamespaceDefault // as kubectl does
	}
	if why := validation.IsDNS1123Subdomain(o.Name); len(why) > 0 {
		r.Report(o.String(), o.At("metadata", "name"), "metadata.name %q cannot be a name: %s", o.Name, strings.Join(why, "; "))
		r.untoldNode(n, base)
		return
	}
	if why := validation.IsDNS1123Label(o.Namespace); !k.cluster && len(why) > 0 {
		r.Report(o.String(), o.At("metadata", "namespace"), "metadata.namespace %q cannot be a name: %s", o.Namespace, strings.Join(why, "; "))
		r.untoldNode(n, base)
		return
	}
	r.Doubt, r.Unaimed = false, false
	k.decode(r, o)
	r.judge(o)
}

func (r *reader) service(o gamma.Object) {
	var s corev1.Service
	if r.Refuse(o, r.Strict(o, &s), gamma.Refused) {
		return
	}
	if f := r.Service(o, &s); f != nil {
		r.add(o, item{service: f})
	}
}

func (r *reader) route(o gamma.Object) {
	if f := r.Route(o); f != nil {
		r.add(o, item{route: f})
	}
}

func (r *reader) grant(o gamma.Object) {
	if f := r.Grant(o); f != nil {
		r.add(o, item{grant: f})
	}
}

func (r *reader) httpFilter(o gamma.Object) { r.add(o, item{filter: r.Filter(o)}) }

func (r *reader) endpointPolicy(o gamma.Object) {
	if p := r.EndpointPolicy(o); p != nil {
		r.add(o, item{policy: p})
	}
}

func (r *reader) meshConfig(o gamma.Object) { r.add(o, item{mesh: r.MeshConfig(o)}) }

// list reads what `kubectl get -o yaml` prints of several objects.
func (r *reader) list(o gamma.Object) {
	whole, line := false, o.Line()
	for i := 0; i+1 < len(o.Root.Content); i += 2 {
		key, value := o.Root.Content[i], o.Root.Content[i+1]
		switch {
		case key.Value == "apiVersion", key.Value == "kind", key.Value == "metadata":
		case key.Value != "items":
			r.Report("List", o.Base+key.Line, "unknown field %q: remove it", key.Value)
			whole, line = false, o.Base+key.Line
		case value.Kind == yaml.SequenceNode:
			whole = true
			for _, e := range value.Content {
				r.object(e, o.Base)
			}
		case value.ShortTag() != "!!null":
			r.Report("List", o.Base+key.Line, "field \"items\" is %s where a list is expected: write a list", gamma.Describe(value))
			line = o.Base + key.Line
		}
	}
	if !whole { // cut, or spelt another way
		r.untoldNode(o.Root, line-o.Root.Line)
	}
}

func (r *reader) add(o gamma.Object, it item) {
	it.object, it.file, it.line = o.String(), r.File, o.Line()
	if it.key == "" {
		it.key = it.object
	}
	r.items = append(r.items, it)
}

type nodeFacts struct{ name, region, zone string }

func (r *reader) node(o gamma.Object) {
	var n corev1.Node
	flaws := append(r.Strict(o, &n), r.OwnAnnotations(o, n.Annotations)...)
	if r.Refuse(o, flaws, gamma.Refused) {
		return
	}
	r.add(o, item{node: &nodeFacts{n.Name, n.Labels[LabelRegion], n.Labels[LabelZone]}})
}

// accountFacts are what a ServiceAccount's annotations say of its service.
type accountFacts struct {
	service  model.ServiceName
	catalog  bool
	retained *model.Retained
}

// account reads AnnotationCatalog and AnnotationRetained. A ServiceAccount is
// what a mesh service is (contract 1.1), with or without a Service object.
func (r *reader) account(o gamma.Object) {
	var a corev1.ServiceAccount
	flaws := append(r.Strict(o, &a), r.OwnAnnotations(o, a.Annotations, AnnotationCatalog, AnnotationRetained)...)
	bad := func(key, format string, args ...any) {
		flaws = append(flaws, gamma.Flaw{Line: o.At("metadata", "annotations", key), Reason: "annotation " + key + ": " + fmt.Sprintf(format, args...)})
	}
	service := model.ServiceName{Namespace: o.Namespace, Name: o.Name}
	f := &accountFacts{service: service}
	catalog, cataloged := a.Annotations[AnnotationCatalog]
	ports, retained := a.Annotations[AnnotationRetained]
	if why := gamma.BadService(service); why != "" && (cataloged || retained) {
		flaws = append(flaws, gamma.Flaw{Line: o.At("metadata", "name"), Reason: why})
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
	if r.Refuse(o, flaws, gamma.Refused) || !f.catalog && f.retained == nil {
		return
	}
	r.add(o, item{account: f})
}
