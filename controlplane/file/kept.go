package file

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"fmt"
	"hash/fnv"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"aether/controlplane/gamma"
	"aether/controlplane/input"
	"aether/dataplane/model"
)

// slips are what of a file does not say what it is to say (decision 045).
type slips struct {
	empty   bool           // the file has nothing but white space
	some    bool           // it has a document with content; what is no YAML is one
	untolds []untold       // documents whose object cannot be told
	refused map[string]int // by label, the line: objects that were refused for what they are written like, or lack all that they are
	unaimed []int          // lines of refused ones of which it cannot be told whom they are for
}

// form is what of a file's text is remembered.
type form struct {
	size  int
	text  [32]byte // of all but the white space at its end
	ended bool     // its last line has its end
	lines []uint64 // hashes
	docs  []int    // the lines that documents begin after
}

func formOf(b []byte, docs []document) form {
	f := form{size: len(b), text: sha256.Sum256(bytes.TrimRight(b, " \t\r\n")), ended: len(b) > 0 && b[len(b)-1] == '\n'}
	for line := range bytes.Lines(b) {
		h := fnv.New64a()
		h.Write(line)
		f.lines = append(f.lines, h.Sum64())
	}
	for _, d := range docs {
		f.docs = append(f.docs, d.base)
	}
	return f
}

// cut is within what a file seems to be cut off, as it was before: a line, or a document that others
// followed; empty: it does not.
func (f *form) cut(old *parsed) string {
	if old == nil || !old.ended || len(f.docs) == 0 || f.size >= old.size || f.text == old.text {
		return ""
	}
	n := len(f.lines)
	if !f.ended {
		n--
	}
	switch {
	case n >= len(old.lines) || !slices.Equal(f.lines[:n], old.lines[:n]):
		return ""
	case !f.ended:
		return "a line"
	case !slices.Contains(old.docs, n) && old.docs[len(old.docs)-1] > n:
		return "a document that others followed"
	}
	return ""
}

// untold is a document whose object cannot be told.
type untold struct {
	sum    [32]byte // of its text
	line   int
	guards bool // it may be a policy, or a route that has one
}

// doubtful: something that was in the file may still be meant to be.
func (s *slips) doubtful() bool { return s.empty || len(s.untolds)+len(s.refused) > 0 }

// first is the line of the first of them.
func (s *slips) first() int {
	line := 0
	least := func(l int) {
		if line == 0 || l < line {
			line = l
		}
	}
	for _, u := range s.untolds {
		least(u.line)
	}
	for _, l := range s.refused {
		least(l)
	}
	return line
}

// untold takes down a document whose object cannot be told.
func (r *reader) untold(text []byte, line int) {
	r.slips.some = true
	r.slips.untolds = append(r.slips.untolds, untold{sha256.Sum256(text), line, mayGuard(text)})
}

// untoldNode is untold of what is YAML.
func (r *reader) untoldNode(n *yaml.Node, base int) {
	text, err := yaml.Marshal(n)
	if err != nil { // an alias to nowhere, say: any change is one
		text = []byte(fmt.Sprint(base, n.Line, n.Value))
	}
	r.untold(text, base+n.Line)
}

// twice reports whether a mapping has a key twice: two objects without a marker between them have.
func twice(n *yaml.Node) bool {
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k := n.Content[i].Value
		if seen[k] {
			return true
		}
		seen[k] = true
		if k == "metadata" && n.Content[i+1].Kind == yaml.MappingNode && twice(n.Content[i+1]) {
			return true
		}
	}
	return false
}

// judge takes down what is doubtful of an object that was read.
func (r *reader) judge(o gamma.Object) {
	label := o.String()
	if twice(o.Root) {
		r.untoldNode(o.Root, o.Base)
	}
	if r.Doubt {
		r.slips.refused[label] = o.Line()
	}
	if r.Unaimed {
		r.slips.unaimed = append(r.slips.unaimed, o.Line())
	}
	if o.Kind == "Node" || o.Kind == "ServiceAccount" {
		return
	}
	for i := 0; i+1 < len(o.Root.Content); i += 2 {
		if o.Root.Content[i].Value == "spec" {
			return
		}
	}
	r.slips.refused[label] = o.Line()
}

// guarding are the kinds without which access may be wider.
var guarding = []string{gamma.KindHTTPFilter, gamma.KindHTTPRoute, gamma.KindGRPCRoute, gamma.KindTCPRoute, gamma.KindTLSRoute}

var kindField = regexp.MustCompile(`\bkind["']?[ \t]*:[ \t]*["']?([A-Za-z]+)`)

// mayGuard reports whether a text that cannot be read may have been a policy or a route.
func mayGuard(text []byte) bool {
	kinds := kindField.FindAllSubmatch(text, -1)
	harmless := false // what of our own group is no policy
	for _, k := range kinds {
		near := nearKind(string(k[1]))
		if slices.Contains(guarding, near) {
			return true
		}
		harmless = harmless || near == gamma.KindEndpointPolicy || near == gamma.KindMeshConfig
	}
	return bytes.Contains(text, []byte(configGroup)) && !harmless || bytes.Contains(text, []byte(gatewayGroup)) && len(kinds) == 0
}

// nearKind is the kind that is read and was likely meant by s; empty: none.
func nearKind(s string) string {
	best, least := "", len(s)+1
	for k := range known {
		if d := gamma.Distance(strings.ToLower(s), strings.ToLower(k)); 3*d <= len(k) && (d < least || d == least && k < best) {
			best, least = k, d
		}
	}
	return best
}

// gatewayKinds are the other kinds of the Gateway API's group.
var gatewayKinds = []string{"Gateway", "GatewayClass", "UDPRoute", "BackendTLSPolicy", "BackendLBPolicy", "ListenerSet"}

// experimentalGroup has the kinds that the Gateway API tries out. Its name is near to that of gatewayGroup.
const experimentalGroup = "gateway.networking.x-k8s.io"

// foreign reports whether an object is surely none that this source reads: a directory may have anything.
func foreign(apiVersion, kind string) bool {
	group, _, grouped := strings.Cut(apiVersion, "/")
	if !grouped {
		group = ""
	}
	k, ours := known[kind]
	switch {
	case apiVersion == "" || group == configGroup:
		return false
	case group == gatewayGroup && slices.Contains(gatewayKinds, kind):
		return true
	case ours: // other groups have a Service, Node or Pod of their own, and routes (Linkerd, SMI)
		if !strings.Contains(group, ".") || strings.HasSuffix(group, ".k8s.io") || group == experimentalGroup {
			return false
		}
		own, _, _ := strings.Cut(k.versions[0], "/")
		return k.versions[0] == "v1" || own == gatewayGroup && 3*gamma.Distance(group, own) > len(own)
	case group == experimentalGroup:
		return true
	case grouped && min(gamma.Distance(group, configGroup), gamma.Distance(group, gatewayGroup)) <= 2 && group != gatewayGroup:
		return false
	}
	near := nearKind(kind)
	return near == "" || grouped && group != gatewayGroup && !strings.EqualFold(kind, near)
}

// after keeps what old, the same file before, had and f does not say any more, as far as f may still mean
// it: an object is removed by its absence from a file of which all can be told, or with the file.
func (f *parsed) after(old *parsed, now time.Time) {
	if old == nil || len(old.items) == 0 {
		return
	}
	labels := make(map[string]bool, len(old.items))
	for _, it := range old.items {
		labels[it.object] = true
	}
	seen := map[[32]byte]bool{}
	for _, u := range old.untolds {
		seen[u.sum] = true
	}
	// What is new and cannot be told may be anything that is missing. What could not be told before was
	// none of it, unless that is kept already.
	news, line := !f.some, 0
	slip := func(l int) {
		if news = true; line == 0 || l < line {
			line = l
		}
	}
	for _, u := range f.untolds {
		if !seen[u.sum] {
			slip(u.line)
		}
	}
	for label, l := range f.refused {
		if !labels[label] && old.refused[label] == 0 {
			slip(l)
		}
	}
	have := make(map[string]int, len(f.items))
	for i, it := range f.items {
		have[it.key] = i
	}
	still := !f.some || f.doubtful()
	for _, it := range old.items {
		i, said := have[it.key]
		at, refused := f.refused[it.object]
		switch {
		case said && refused:
			good := it.good
			if good == nil && (!it.since.IsZero() || old.refused[it.object] == 0) {
				good = &it
			}
			if good == nil {
				break // it never was
			}
			f.items[i].good = good
			if is, instead := f.items[i].instead(*good); instead {
				f.items[i] = f.keep(is, now, at)
			} else {
				f.items[i] = is
			}
		case said:
		case refused:
			f.items = append(f.items, f.keep(it, now, at))
		case news || !it.since.IsZero() && still:
			f.items = append(f.items, f.keep(it, now, cmp.Or(line, f.first())))
		}
	}
}

// instead is what stands for an object that is said and refused; kept: it is was, as it was.
func (it item) instead(was item) (_ item, kept bool) {
	switch {
	case it.filter != nil && was.filter != nil:
		it.filter = gamma.Instead(it.filter, was.filter)
	case it.route != nil && was.route != nil:
		it.route = it.route.Instead(was.route)
	case it.pod != nil && was.pod != nil:
		return was, true
	}
	return it, false
}

// keep is it, kept since now or longer, for what stands at line; 0: the whole file.
func (f *parsed) keep(it item, now time.Time, line int) item {
	if it.since.IsZero() {
		it.since = now
	}
	why := "the file says nothing any more"
	if line > 0 {
		why = "this document cannot be read, or not as the object"
		if f.refused[it.object] == 0 {
			why = "the object is missing, and this document, which cannot be read, may be it"
		}
	}
	f.problems = append(f.problems, problem{Object: it.object, File: it.file, Line: line, Since: it.since, Reason: fmt.Sprintf(
		"kept as of %s, as it was before: %s; correct the file, or, to remove the object, remove the file or what cannot be read in it",
		it.since.Format(time.RFC3339), why)})
	return it
}

// settle takes down whether all files can be told, and then forgets what was before the start. A file of
// nothing but comments is not taken for one that was emptied before that.
func (l *loader) settle() {
	if l.whole {
		return
	}
	doubt := len(l.unread) > 0
	for _, f := range l.files {
		doubt = doubt || f.doubtful()
		for _, it := range f.items {
			l.told[it.object] = true
		}
	}
	if !doubt {
		l.before, l.told, l.whole = nil, nil, true
	}
}

// restore puts what was in force before the start, has not been told since, and is missing into b, where it
// may be in what cannot be read.
func (l *loader) restore(b *builder) {
	if l.before == nil {
		return
	}
	where, line := "", 0
	for name, f := range l.files {
		if f.doubtful() && (where == "" || name < where) {
			where, line = name, f.first()
		}
	}
	for _, name := range l.unread {
		if where == "" || name < where {
			where, line = name, 0
		}
	}
	at := l.before.At.UTC().Truncate(time.Second)
	before := &l.before.Batch
	keep := func(object string) bool {
		if l.told[object] {
			return false // it has left a file that could be read
		}
		since := at
		if stayed := before.Problems[object]; len(stayed) > 0 {
			since = stayed[0].Since
		}
		b.problems = append(b.problems, problem{Object: object, File: where, Line: line, Since: since, Reason: fmt.Sprintf(
			"kept as of %s, as it was before this process started: it is missing, and this file, of which not all can be read, may have it; correct the file, or remove what cannot be read in it",
			since.Format(time.RFC3339))})
		return true
	}
	missing(&b.mesh.Services, before.Services, func(s *model.Service) model.ServiceName { return s.Name }, func(s *model.Service) bool {
		object := gamma.Label(gamma.KindService, s.Name.Namespace, s.Name.Name)
		if l.told[object] {
			return false
		}
		for _, ip := range s.ClusterIPs {
			if !b.claim(item{object: object, since: at}, "address of a Service "+ip.String(), "") {
				return false
			}
		}
		return keep(object)
	})
	routeKey := func(r *model.Route) input.RouteKey {
		return input.RouteKey{Kind: r.Kind, Namespace: r.Namespace, Name: r.Name}
	}
	missing(&b.mesh.Routes, before.Routes, routeKey, func(r *model.Route) bool {
		return keep(gamma.Label(r.Kind.String(), r.Namespace, r.Name))
	})
	missing(&b.mesh.Filters, before.Filters, func(f *model.HTTPFilter) model.ServiceName {
		return model.ServiceName{Namespace: f.Namespace, Name: f.Name}
	}, func(f *model.HTTPFilter) bool {
		return keep(gamma.Label(gamma.KindHTTPFilter, f.Namespace, f.Name))
	})
	for i := range b.mesh.Filters { // those that are said and refused
		f := &b.mesh.Filters[i]
		if was := before.Filters[model.ServiceName{Namespace: f.Namespace, Name: f.Name}]; f.Invalid != "" && len(was) > 0 {
			*f = *gamma.Instead(f, &was[0])
		}
	}
	for i := range b.mesh.Routes {
		r := &b.mesh.Routes[i]
		if was := before.Routes[routeKey(r)]; len(was) > 0 && !slices.ContainsFunc(r.Rules, func(r model.Rule) bool { return r.Invalid == "" }) {
			*r = (&gamma.Route{Route: *r}).Instead(&gamma.Route{Route: was[0]}).Route
		}
	}
	missing(&b.mesh.Policies, before.Policies, func(p *model.EndpointPolicy) model.ServiceName { return p.Service }, func(p *model.EndpointPolicy) bool {
		return keep(gamma.Label(gamma.KindEndpointPolicy, p.Namespace, p.Name))
	})
	account := func(n model.ServiceName) string { return gamma.Label("ServiceAccount", n.Namespace, n.Name) }
	missing(&b.mesh.Retained, before.Retained, func(r *model.Retained) model.ServiceName { return r.Service }, func(r *model.Retained) bool {
		return !l.told[account(r.Service)]
	})
	for n := range before.Catalog {
		if !slices.Contains(b.mesh.Catalog, n) && !l.told[account(n)] {
			b.mesh.Catalog = append(b.mesh.Catalog, n)
		}
	}
	pods := map[string]bool{} // that are said
	for _, it := range b.local {
		pods[it.object] = true
	}
	for i := range b.mesh.Endpoints {
		e := &b.mesh.Endpoints[i]
		pods["row of "+e.Cluster+" "+e.Service.Namespace+"/"+e.Pod] = true
	}
	for _, rows := range before.Endpoints {
		for _, e := range rows {
			object := gamma.Label("Pod", e.Service.Namespace, e.Pod)
			if !l.told[object] && !pods["row of "+e.Cluster+" "+e.Service.Namespace+"/"+e.Pod] &&
				b.claim(item{object: object, since: at}, "address "+e.Cluster+" "+e.IP.String(), "") {
				keep(object)
				b.mesh.Endpoints = append(b.mesh.Endpoints, e)
			}
		}
	}
	for _, list := range before.Workloads {
		for _, w := range list {
			if object := gamma.Label("Pod", w.Namespace, w.Name); !pods[object] && keep(object) {
				b.local = append(b.local, item{object: object, since: at, file: where, pod: &podFacts{namespace: w.Namespace, part: partWorkload, node: l.o.Node, workload: &w}})
			}
		}
	}
}

// missing appends to list what was there under keys that it has not, as far as take takes it.
func missing[K comparable, T any](list *[]T, was map[K][]T, key func(*T) K, take func(*T) bool) {
	have := map[K]bool{}
	for i := range *list {
		have[key(&(*list)[i])] = true
	}
	for k, of := range was {
		for i := range of {
			if !have[k] && take(&of[i]) {
				*list = append(*list, of[i])
			}
		}
	}
}

// unsure says what cannot be read and may guard something, where nobody knows what was in force before;
// empty: there is nothing of the kind.
func (l *loader) unsure() string {
	where, line, n := "", 0, 0
	add := func(file string, at int) {
		if n++; where == "" || file < where || file == where && at < line {
			where, line = file, at
		}
	}
	for name, f := range l.files {
		for _, u := range f.untolds {
			if u.guards {
				add(name, u.line)
			}
		}
		for _, at := range f.unaimed {
			add(name, at)
		}
	}
	for _, name := range l.unread {
		add(name, 0)
	}
	switch n {
	case 0:
		return ""
	case 1:
		return fmt.Sprintf("%s cannot be read and may be a policy, and what was in force before is not known: nothing is published before it can be read; correct it, or remove it", place(where, line))
	}
	return fmt.Sprintf("%s and %d more documents or files cannot be read and may be policies, and what was in force before is not known: nothing is published before they can be read; correct them, or remove them", place(where, line), n-1)
}
