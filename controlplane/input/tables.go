package input

import (
	"cmp"
	"maps"
	"reflect"
	"slices"

	"aether/dataplane/model"
)

// Table holds the objects of one kind. Under a key stand all objects that a source has of it: one as a rule, several
// where a source has several that contradict each other, or where the key names a group (a service's endpoints). In a
// change an empty list says that nothing is there any more.
type Table[K comparable, V any] map[K][]V

// Tables hold the objects of all kinds. A new kind is a field here and a line in kinds; batches, their differences,
// the loop's merging, the last good state and the dump walk that list.
type Tables struct {
	// Endpoints are a service's rows.
	Endpoints Table[model.ServiceName, model.Endpoint]
	// Services are the Service objects of a name.
	Services Table[model.ServiceName, model.Service]
	Routes   Table[RouteKey, model.Route]
	// Filters are the HTTPFilter objects of a namespace and name.
	Filters Table[model.ServiceName, model.HTTPFilter]
	// Policies are the EndpointPolicies in force for a service's pods: one, or none.
	Policies Table[model.ServiceName, model.EndpointPolicy]
	// Catalog are the names that exist in the mesh, whether or not their rows are here, each under itself.
	Catalog Table[model.ServiceName, model.ServiceName]
	// Workloads are pods of this node by ContainerID: one each, or none.
	Workloads Table[string, model.Workload]
	// Retained are services that the source itself wants kept against their removal (contract 4.12): a configuration of
	// files, which may be another node's dump. What goes from any source is kept by the loop.
	Retained Table[model.ServiceName, model.Retained]
	// Namespaces are what the pods of a namespace have instead of the mesh's settings (contract 10.9): one, or none.
	Namespaces Table[string, Override]
	// Problems are what is not, or not wholly, in force, by whatever key the source finds them by again: the object's
	// name, most often.
	Problems Table[string, model.Problem]
}

// kinds are all kinds, each once.
var kinds = []kind{
	kindOf[model.ServiceName, model.Endpoint]{
		table:   func(t *Tables) *Table[model.ServiceName, model.Endpoint] { return &t.Endpoints },
		mesh:    func(m *model.Mesh) *[]model.Endpoint { return &m.Endpoints },
		key:     func(e *model.Endpoint) model.ServiceName { return e.Service },
		compare: model.ServiceName.Compare,
		// Equal rows that are others take the place of the old ones, or both would be kept.
		same: func(a, b []model.Endpoint) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) },
	},
	kindOf[model.ServiceName, model.Service]{
		table:   func(t *Tables) *Table[model.ServiceName, model.Service] { return &t.Services },
		mesh:    func(m *model.Mesh) *[]model.Service { return &m.Services },
		key:     func(s *model.Service) model.ServiceName { return s.Name },
		compare: model.ServiceName.Compare,
	},
	kindOf[RouteKey, model.Route]{
		table:   func(t *Tables) *Table[RouteKey, model.Route] { return &t.Routes },
		mesh:    func(m *model.Mesh) *[]model.Route { return &m.Routes },
		key:     func(r *model.Route) RouteKey { return RouteKey{r.Kind, r.Namespace, r.Name} },
		compare: compareRoutes,
	},
	kindOf[model.ServiceName, model.HTTPFilter]{
		table: func(t *Tables) *Table[model.ServiceName, model.HTTPFilter] { return &t.Filters },
		mesh:  func(m *model.Mesh) *[]model.HTTPFilter { return &m.Filters },
		key: func(f *model.HTTPFilter) model.ServiceName {
			return model.ServiceName{Namespace: f.Namespace, Name: f.Name}
		},
		compare: model.ServiceName.Compare,
	},
	kindOf[model.ServiceName, model.EndpointPolicy]{
		table:   func(t *Tables) *Table[model.ServiceName, model.EndpointPolicy] { return &t.Policies },
		mesh:    func(m *model.Mesh) *[]model.EndpointPolicy { return &m.Policies },
		key:     func(p *model.EndpointPolicy) model.ServiceName { return p.Service },
		compare: model.ServiceName.Compare,
	},
	kindOf[model.ServiceName, model.ServiceName]{
		table:   func(t *Tables) *Table[model.ServiceName, model.ServiceName] { return &t.Catalog },
		mesh:    func(m *model.Mesh) *[]model.ServiceName { return &m.Catalog },
		key:     func(n *model.ServiceName) model.ServiceName { return *n },
		compare: model.ServiceName.Compare,
	},
	kindOf[string, model.Workload]{
		table:   func(t *Tables) *Table[string, model.Workload] { return &t.Workloads },
		mesh:    func(m *model.Mesh) *[]model.Workload { return &m.Workloads },
		key:     func(w *model.Workload) string { return w.ContainerID },
		compare: cmp.Compare[string],
	},
	kindOf[model.ServiceName, model.Retained]{
		table:   func(t *Tables) *Table[model.ServiceName, model.Retained] { return &t.Retained },
		mesh:    func(m *model.Mesh) *[]model.Retained { return &m.Retained },
		key:     func(r *model.Retained) model.ServiceName { return r.Service },
		compare: model.ServiceName.Compare,
	},
	kindOf[string, Override]{
		table: func(t *Tables) *Table[string, Override] { return &t.Namespaces },
	},
	kindOf[string, model.Problem]{
		table: func(t *Tables) *Table[string, model.Problem] { return &t.Problems },
	},
}

// kind is what is done with a kind's table, whatever its objects are.
type kind interface {
	len(t *Tables) int
	add(to, from *Tables)
	diff(out, old, next *Tables)
	merge(t, from, changed *Tables, whole bool)
	split(t *Tables, m *model.Mesh)
	join(m *model.Mesh, t *Tables)
}

// kindOf describes a kind. A kind that a mesh has no list of has a table alone.
type kindOf[K comparable, V any] struct {
	table   func(*Tables) *Table[K, V]
	mesh    func(*model.Mesh) *[]V
	key     func(*V) K
	compare func(a, b K) int
	// same reports whether a list in the place of another is no change; nil: equal lists are none.
	same func(a, b []V) bool
}

func (x kindOf[K, V]) len(t *Tables) int { return len(*x.table(t)) }

func (x kindOf[K, V]) add(to, from *Tables) {
	table, more := x.table(to), *x.table(from)
	if *table == nil && len(more) > 0 {
		*table = make(Table[K, V], len(more))
	}
	maps.Copy(*table, more)
}

func (x kindOf[K, V]) diff(out, old, next *Tables) {
	was, is := *x.table(old), *x.table(next)
	d := Table[K, V]{}
	for k := range was {
		if _, ok := is[k]; !ok {
			d[k] = nil
		}
	}
	for k, list := range is {
		if before, ok := was[k]; !ok || !reflect.DeepEqual(before, list) {
			d[k] = list
		}
	}
	*x.table(out) = d
}

func (x kindOf[K, V]) merge(t, from, changed *Tables, whole bool) {
	table, more, keys := x.table(t), *x.table(from), x.table(changed)
	if whole {
		for k := range *table {
			if _, ok := more[k]; !ok {
				delete(*table, k)
				keys.Note(k)
			}
		}
	}
	for k, list := range more {
		was, there := (*table)[k]
		switch {
		case len(list) == 0:
			if there {
				delete(*table, k)
				keys.Note(k)
			}
		default:
			if !there || !x.isSame(was, list) {
				keys.Note(k)
			}
			table.Put(k, list)
		}
	}
}

func (x kindOf[K, V]) isSame(a, b []V) bool {
	if x.same != nil {
		return x.same(a, b)
	}
	return reflect.DeepEqual(a, b)
}

func (x kindOf[K, V]) split(t *Tables, m *model.Mesh) {
	table := Table[K, V]{}
	*x.table(t) = table
	if x.mesh == nil {
		return
	}
	for _, v := range *x.mesh(m) {
		k := x.key(&v)
		table[k] = append(table[k], v)
	}
}

func (x kindOf[K, V]) join(m *model.Mesh, t *Tables) {
	if x.mesh == nil {
		return
	}
	table, list := *x.table(t), x.mesh(m)
	n := 0
	for _, of := range table {
		n += len(of)
	}
	if n == 0 {
		return
	}
	*list = make([]V, 0, n)
	for _, k := range slices.SortedFunc(maps.Keys(table), x.compare) {
		*list = append(*list, table[k]...)
	}
}

// Put replaces what is under a key; an empty list removes the key.
func (t *Table[K, V]) Put(k K, list []V) {
	if len(list) == 0 {
		delete(*t, k)
		return
	}
	t.Change(k, list)
}

// Change enters what is now under a key into a change: an empty list says that nothing is there any more.
func (t *Table[K, V]) Change(k K, list []V) {
	if *t == nil {
		*t = Table[K, V]{}
	}
	(*t)[k] = list
}

// Note enters a key where only keys matter.
func (t *Table[K, V]) Note(k K) { t.Change(k, nil) }

// Empty reports whether no table has a key.
func (t *Tables) Empty() bool {
	return !slices.ContainsFunc(kinds, func(x kind) bool { return x.len(t) > 0 })
}

// Add changes t by a change: what it has under a key replaces what t has.
func (t *Tables) Add(o *Tables) {
	for _, x := range kinds {
		x.add(t, o)
	}
}

// Merge changes t, which has no empty lists, by a change, or if whole to a whole state, and notes the keys whose
// objects are others in changed.
func (t *Tables) Merge(from *Tables, whole bool, changed *Tables) {
	for _, x := range kinds {
		x.merge(t, from, changed, whole)
	}
}

// Diff is the change from one whole state to another.
func (t *Tables) Diff(next *Tables) Tables {
	var out Tables
	for _, x := range kinds {
		x.diff(&out, t, next)
	}
	return out
}

// Split are the lists of a mesh by key.
func Split(m *model.Mesh) Tables {
	var t Tables
	for _, x := range kinds {
		x.split(&t, m)
	}
	return t
}

// Join puts the objects into the lists of a mesh, in ascending order of their keys, without copies of what they refer to.
func (t *Tables) Join(m *model.Mesh) {
	for _, x := range kinds {
		x.join(m, t)
	}
}

func compareRoutes(a, b RouteKey) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Kind, b.Kind))
}
