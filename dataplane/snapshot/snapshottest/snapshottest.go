// Package snapshottest compares snapshots in tests.
package snapshottest

import (
	"fmt"
	"reflect"
	"regexp"
	"sort"
	"strings"

	"aether/dataplane/snapshot"
)

// Text is all that a snapshot holds, but for the IDs of backends, with
// pointers followed: what two snapshots have in common reads alike.
func Text(s *snapshot.Snapshot) string {
	d := dumper{s: s}
	fmt.Fprintf(&d.b, "%s %s %v\n", s.Domain(), s.Semantics(), s.SubsetKeys())
	for _, svc := range s.Services() {
		fmt.Fprintf(&d.b, "service %s named %v: ", svc.Name, snapshot.Name(s, svc.Name.Name, svc.Name.Namespace).Service == svc)
		d.value(reflect.ValueOf(svc))
		d.b.WriteByte('\n')
	}
	for _, w := range s.Workloads() {
		d.value(reflect.ValueOf(w))
		d.b.WriteByte('\n')
	}
	return d.b.String()
}

type dumper struct {
	s *snapshot.Snapshot
	b strings.Builder
}

func (d *dumper) value(v reflect.Value) {
	switch x := v.Interface().(type) {
	case *snapshot.Backend:
		if x == nil {
			d.b.WriteString("nil")
			return
		}
		fmt.Fprintf(&d.b, "%s %s %s %+v %v [", x.Name, x.Class, x.SNI, *x.Texts, d.s.Endpoints(x).Keys())
		for _, e := range d.s.Endpoints(x).All() {
			fmt.Fprintf(&d.b, "%+v ", *e)
		}
		d.b.WriteString("]")
		return
	case *regexp.Regexp:
		fmt.Fprint(&d.b, x)
		return
	case fmt.Stringer:
		if v.Kind() != reflect.Pointer {
			fmt.Fprint(&d.b, x)
			return
		}
	case []byte:
		fmt.Fprintf(&d.b, "%q", x)
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			d.b.WriteString("nil")
			return
		}
		d.value(v.Elem())
	case reflect.Struct:
		d.b.WriteByte('{')
		for i := range v.NumField() {
			d.b.WriteString(v.Type().Field(i).Name + ":")
			d.value(v.Field(i))
			d.b.WriteByte(' ')
		}
		d.b.WriteByte('}')
	case reflect.Slice:
		d.b.WriteByte('[')
		for i := range v.Len() {
			d.value(v.Index(i))
			d.b.WriteByte(' ')
		}
		d.b.WriteByte(']')
	case reflect.Map:
		keys := v.MapKeys()
		sort.Slice(keys, func(i, j int) bool { return keys[i].String() < keys[j].String() })
		d.b.WriteByte('{')
		for _, k := range keys {
			d.b.WriteString(k.String() + ":")
			d.value(v.MapIndex(k))
			d.b.WriteByte(' ')
		}
		d.b.WriteByte('}')
	default:
		fmt.Fprintf(&d.b, "%#v", v.Interface())
	}
}
