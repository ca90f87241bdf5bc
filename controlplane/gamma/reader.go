package gamma

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"aether/dataplane/model"
)

// Groups and kinds that are read.
const (
	GatewayGroup = "gateway.networking.k8s.io"
	ConfigGroup  = "config.aether.io"
)

// LabelMeshService marks a Service that the registrar made (contract 1.2).
const LabelMeshService = "aether.io/mesh-service"

// Annotations that only files carry: what a cluster knows of an object beside the
// object itself. Of an API server's objects they are not read.
const (
	// AnnotationTargetPorts on a Service resolves named target ports, as
	// EndpointSlices do in a cluster: "80=8080,53/UDP=5353", Service port to pod port.
	AnnotationTargetPorts = "file.aether.io/target-ports"
	// AnnotationInvalid on a route is a JSON object that marks rules ("0"),
	// backends ("0/1": the second of the first rule) and the backends of mirrors
	// ("0/filters/2", "0/1/filters/0") as refused, and says why. On an HTTPFilter it
	// is the reason alone.
	AnnotationInvalid = "file.aether.io/invalid"
	// AnnotationPrefix is what all of them begin with.
	AnnotationPrefix = "file.aether.io/"
)

// Object is a Kubernetes object as it was written, with a kind and names that can be names.
type Object struct {
	Root            *yaml.Node // nil: there is no text that lines could be told of
	Base            int        // lines of the file before it
	Kind            string
	Namespace, Name string
}

func (o Object) String() string { return Label(o.Kind, o.Namespace, o.Name) }

// Label is how problems name an object: "Service shop/cart", "Node n1".
func Label(kind, namespace, name string) string {
	if namespace == "" {
		return kind + " " + name
	}
	return kind + " " + namespace + "/" + name
}

// An puts the article before a kind.
func An(kind string) string {
	if strings.HasPrefix(kind, "HTTP") || strings.HasPrefix(kind, "Endpoint") {
		return "an " + kind
	}
	return "a " + kind
}

// Line is where the object begins; 0: in no file.
func (o Object) Line() int {
	if o.Root == nil {
		return 0
	}
	return o.Base + o.Root.Line
}

// At is the line of the field at path, or of the nearest field above it that is there.
func (o Object) At(path ...string) int {
	_, line := o.find(path)
	return line
}

// find gives the node at path, or nil, and the line of the nearest that is there.
func (o Object) find(path []string) (*yaml.Node, int) {
	if o.Root == nil {
		return nil, 0
	}
	n, line := o.Root, o.Root.Line
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
			return nil, o.Base + line
		}
		n = next
	}
	return n, o.Base + line
}

// Problem is a model.Problem that still sorts by place.
type Problem struct {
	Object, File string
	Line         int // 0: the whole file, or none
	Reason       string
	Part         string    // see model.Problem
	Since        time.Time // see model.Problem
}

// Place says where in a file; empty: in none.
func Place(file string, line int) string {
	if line == 0 {
		return file
	}
	return fmt.Sprintf("%s:%d", file, line)
}

// Reader turns objects into what the mesh needs of them, and lists what of them is
// not, or not wholly, in force. Its zero value reads a file without a name. It is
// not safe for concurrent use.
type Reader struct {
	File     string
	Problems []Problem

	// API: the objects are an API server's, which has checked and completed them, and
	// may be newer than this program: what it does not know beside the rules of a route
	// is said and changes nothing (decision 025).
	API bool

	// Doubt is set where an object, or all that a route says, was refused for what it is written like: what
	// it was before says better what was meant. Unaimed is set where such an object is a policy, or a route
	// that may have one, and whom it is for could not be read. Whoever reads several objects resets both.
	Doubt, Unaimed bool
}

// Report adds a problem.
func (r *Reader) Report(object string, line int, format string, args ...any) {
	r.refuse("", object, line, format, args...)
}

// refuse adds a problem by which part of the object is refused.
func (r *Reader) refuse(part, object string, line int, format string, args ...any) {
	r.Problems = append(r.Problems, Problem{Object: object, File: r.File, Line: line, Reason: fmt.Sprintf(format, args...), Part: part})
}

// Strict decodes o into into, a pointer to a Kubernetes type.
func (r *Reader) Strict(o Object, into any) []Flaw {
	d := decoder{base: o.Base}
	d.into(o.Root, into, "")
	return d.flaws
}

// Refuse reports flaws and whether there are any.
func (r *Reader) Refuse(o Object, flaws []Flaw, consequence string) bool {
	for _, f := range flaws {
		r.Report(o.String(), f.Line, "%s; %s", f.Reason, consequence)
	}
	r.Doubt = r.Doubt || len(flaws) > 0
	return len(flaws) > 0
}

// Refused is the consequence of most flaws.
const Refused = "the object is not in force"

// because is a flaw as the reason of something that is refused.
func (r *Reader) because(f Flaw) string {
	if at := Place(r.File, f.Line); at != "" {
		return at + ": " + f.Reason
	}
	return f.Reason
}

// tolerate takes out of the flaws of an API server's object the fields directly below
// spec that this program does not know, and says them: they belong to a newer version, and
// what they would change is not known to narrow anything (decision 025).
func (r *Reader) tolerate(o Object, flaws []Flaw) []Flaw {
	if !r.API {
		return flaws
	}
	return slices.DeleteFunc(flaws, func(f Flaw) bool {
		field, ok := strings.CutPrefix(f.Path, "spec.")
		if ok = ok && f.Unknown && !strings.ContainsAny(field, ".["); ok {
			r.Report(o.String(), f.Line, "field %q is of a newer version than this program and changes nothing: the rest is in force", f.Path)
		}
		return ok
	})
}

// OwnAnnotations refuses misspelt annotations of files.
func (r *Reader) OwnAnnotations(o Object, have map[string]string, allowed ...string) []Flaw {
	if r.API {
		return nil
	}
	var flaws []Flaw
	for _, k := range slices.Sorted(maps.Keys(have)) {
		if strings.HasPrefix(k, AnnotationPrefix) && !slices.Contains(allowed, k) {
			what := An(o.Kind) + " has none of this prefix"
			if len(allowed) > 0 {
				what = An(o.Kind) + " has " + strings.Join(allowed, ", ")
			}
			flaws = append(flaws, Flaw{Line: o.At("metadata", "annotations", k),
				Reason: fmt.Sprintf("annotation %s does not exist: %s", k, what)})
		}
	}
	return flaws
}

// own gives an annotation that only files carry.
func (r *Reader) own(have map[string]string, key string) (string, bool) {
	if r.API {
		return "", false
	}
	v, ok := have[key]
	return v, ok
}

// BadService says why n cannot be a Service's name; empty: it can.
func BadService(n model.ServiceName) string { return badService(n) }
