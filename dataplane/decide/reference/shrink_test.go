package reference_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"aether/controlplane/file"
	"aether/dataplane/model"
)

// difference is the kind of a disagreement: the two first lines, and which
// facts differ. While a question is shrunk it stays the same.
func difference(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	facts := map[string]bool{}
	collect := func(a, b []string) {
		for _, l := range a[1:] {
			if !strings.Contains("\n"+strings.Join(b, "\n")+"\n", "\n"+l+"\n") {
				name, _, _ := strings.Cut(strings.TrimSpace(l), ":")
				facts[name] = true
			}
		}
	}
	if w[0] == g[0] {
		collect(w, g)
		collect(g, w)
	}
	var names []string
	for _, n := range []string{"race", "wait", "hello only", "status", "x-aether-error", "deliver", "backend", "endpoints", "authority", "path", "request", "response", "timeouts", "retry", "persistence", "mirror", "authz", "authz path", "location", "reply"} {
		if facts[n] {
			names = append(names, n)
		}
	}
	return w[0] + " / " + g[0] + " " + strings.Join(names, " ")
}

// maxTries bounds the reductions that are tried of one question.
const maxTries = 5000

// shrink removes objects, fields and words from a question as long as its
// answers differ in the same way.
func shrink(q *question, answers func(*question) (want, got string)) *question {
	best := cloneQuestion(q)
	kind := difference(answers(best))
	tries := 0
	for changed := true; changed; {
		changed = false
		for k := 0; tries < maxTries; tries++ {
			c := cloneQuestion(best)
			left := k
			if !reduce(reflect.ValueOf(c).Elem(), &left) {
				break
			}
			if same(c, kind, answers) {
				best, changed = c, true
			} else {
				k++
			}
		}
	}
	return best
}

// same: the question still divides them so. One that is not whole any more may
// make either side panic, and then it is another question.
func same(q *question, kind string, answers func(*question) (want, got string)) (ok bool) {
	defer func() {
		if recover() != nil {
			ok = false
		}
	}()
	w, g := answers(q)
	return w != g && difference(w, g) == kind
}

// essential fields are never emptied: an object without them is no object, and what
// is found then is another matter.
var essential = map[string]bool{
	"Kind": true, "PathKind": true, "Scope": true, "Dir": true, "Domain": true, "Namespace": true, "Name": true, "Service": true, "Account": true, "Number": true, "Target": true,
	"Class": true, "SPIFFEID": true, "Pod": true, "IP": true, "ContainerID": true, "Dst": true, "Method": true, "Authority": true, "Denominator": true,
	"RBAC": true, "ExtAuthz": true, "Mutation": true, "Redirect": true, "Rewrite": true, "Mirror": true, "CORS": true, "Principals": true, "Status": true, "Origins": true, "Path": true,
}

// TestShrink: what does not matter to a disagreement goes, what does stays.
func TestShrink(t *testing.T) {
	differ := func(q *question) (want, got string) {
		for _, r := range q.Mesh.Routes {
			if len(r.Rules) > 0 && len(q.Mesh.Endpoints) > 1 && q.Request != nil && len(q.Request.Fields) > 0 {
				return "forward (http-route)", "refuse (invalid-backend)"
			}
		}
		return "", ""
	}
	found := 0
	for i := range uint64(60) {
		g := gen{rand.New(rand.NewPCG(1, i))}
		m := g.mesh()
		f := g.flow(m)
		q := &question{Mesh: m, Flow: f, Request: g.request(m, &f)}
		if w, _ := differ(q); w == "" {
			continue
		}
		found++
		before := q.String()
		small := shrink(q, differ)
		n := small.Mesh
		if len(n.Routes) != 1 || len(n.Routes[0].Rules) != 1 || len(n.Endpoints) != 2 || len(n.Services)+len(n.Filters)+len(n.Workloads)+len(n.Catalog)+len(n.Retained) != 0 || len(small.Request.Fields) != 1 {
			t.Errorf("mesh %d was shrunk to\n%s", i, small)
		}
		if q.String() != before {
			t.Errorf("mesh %d was changed while its copy was shrunk", i)
		}
	}
	if found < 5 {
		t.Errorf("only %d meshes to shrink", found)
	}
}

// reduce does the k-th of all reductions of v, counting down; false: there are
// fewer.
func reduce(v reflect.Value, k *int) bool {
	switch v.Kind() {
	case reflect.Pointer:
		return !v.IsNil() && reduce(v.Elem(), k)
	case reflect.Struct:
		if leaf(v.Type()) {
			return zero(v, k)
		}
		for i := range v.NumField() {
			if !essential[v.Type().Field(i).Name] && reduce(v.Field(i), k) {
				return true
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return zero(v, k)
		}
		for size := v.Len() / 2; size > 1; size /= 2 { // much at once first
			for i := 0; i+size <= v.Len(); i += size {
				if *k == 0 {
					v.Set(reflect.AppendSlice(v.Slice3(0, i, i), v.Slice(i+size, v.Len())))
					return true
				}
				*k--
			}
		}
		for i := range v.Len() {
			if *k == 0 {
				v.Set(reflect.AppendSlice(v.Slice3(0, i, i), v.Slice(i+1, v.Len())))
				return true
			}
			*k--
		}
		for i := range v.Len() {
			if reduce(v.Index(i), k) {
				return true
			}
		}
	case reflect.Map:
		return zero(v, k)
	case reflect.String, reflect.Bool, reflect.Uint16, reflect.Uint32, reflect.Int64, reflect.Int, reflect.Uint8:
		return zero(v, k)
	}
	return false
}

func zero(v reflect.Value, k *int) bool {
	if v.IsZero() {
		return false
	}
	if *k == 0 {
		v.SetZero()
		return true
	}
	*k--
	return false
}

// leaf structs are values of other packages.
func leaf(t reflect.Type) bool {
	switch t {
	case reflect.TypeFor[time.Time](), reflect.TypeFor[netip.Addr](), reflect.TypeFor[netip.AddrPort](), reflect.TypeFor[netip.Prefix]():
		return true
	}
	return false
}

func cloneQuestion(q *question) *question {
	return clone(reflect.ValueOf(q)).Interface().(*question)
}

func clone(v reflect.Value) reflect.Value {
	out := reflect.New(v.Type()).Elem()
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			out.Set(reflect.New(v.Type().Elem()))
			out.Elem().Set(clone(v.Elem()))
		}
	case reflect.Struct:
		if leaf(v.Type()) {
			return v
		}
		for i := range v.NumField() {
			out.Field(i).Set(clone(v.Field(i)))
		}
	case reflect.Slice:
		if !v.IsNil() {
			out.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
			for i := range v.Len() {
				out.Index(i).Set(clone(v.Index(i)))
			}
		}
	case reflect.Map:
		if !v.IsNil() {
			out.Set(reflect.MakeMap(v.Type()))
			for _, k := range v.MapKeys() {
				out.SetMapIndex(k, v.MapIndex(k))
			}
		}
	default:
		return v
	}
	return out
}

// String is the question for whoever has to judge it: the mesh as YAML and, since
// that leaves out what Kubernetes would not have, as Go.
func (q *question) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "--- mesh\n%s--- the same in Go\n", file.Dump(q.Mesh))
	goText(&b, reflect.ValueOf(q.Mesh).Elem(), "")
	fmt.Fprintf(&b, "--- question, pick %d of 2^32\n%s", q.Pick, q.Flow)
	if q.Request != nil {
		fmt.Fprintf(&b, " | %s", model.RequestString(q.Request))
	}
	return b.String()
}

// goText writes what is not zero.
func goText(b *strings.Builder, v reflect.Value, indent string) {
	for i := range v.NumField() {
		f := v.Field(i)
		if f.IsZero() {
			continue
		}
		name := indent + v.Type().Field(i).Name
		if f.Kind() == reflect.Slice && f.Type().Elem().Kind() == reflect.Struct && !leaf(f.Type().Elem()) {
			for j := range f.Len() {
				fmt.Fprintf(b, "%s:\n", name)
				goText(b, f.Index(j), indent+"  ")
			}
			continue
		}
		if f.Kind() == reflect.Pointer {
			fmt.Fprintf(b, "%s:\n", name)
			goText(b, f.Elem(), indent+"  ")
			continue
		}
		fmt.Fprintf(b, "%s: %v\n", name, f.Interface())
	}
}
