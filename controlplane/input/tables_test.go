package input

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
	"aether/e2e/testseed"
)

// TestEveryTableIsAKind: each field of Tables has its line in kinds, once.
func TestEveryTableIsAKind(t *testing.T) {
	var all Tables
	v := reflect.ValueOf(&all).Elem()
	for i := range v.NumField() {
		f := v.Field(i)
		f.Set(reflect.MakeMap(f.Type()))
		f.SetMapIndex(reflect.Zero(f.Type().Key()), reflect.MakeSlice(f.Type().Elem(), 1, 1))
		n := 0
		for _, x := range kinds {
			n += x.len(&all)
		}
		if n != i+1 {
			t.Errorf("%s: %d lines of kinds know it, want one", v.Type().Field(i).Name, n-i)
		}
	}
	if len(kinds) != v.NumField() {
		t.Errorf("%d kinds, %d tables", len(kinds), v.NumField())
	}
}

// TestTables: of random meshes the lists that Split has taken apart are what Join puts together again; Diff, added or merged to
// the one state, gives the other, and Merge notes exactly the keys of which the objects are others.
func TestTables(t *testing.T) {
	r := testseed.Rand(t)
	for range 100 {
		a, b := mesh(r), mesh(r)
		was, is := Split(a), Split(b)
		var back model.Mesh
		is.Join(&back)
		if again := Split(&back); !reflect.DeepEqual(again, is) {
			t.Fatalf("%+v\nwant %+v", again, is)
		}
		d := was.Diff(&is)
		state, changed := Split(a), Tables{}
		state.Merge(&d, false, &changed)
		if !equal(&state, &is) {
			t.Fatalf("merged: %+v\nwant %+v", state, is)
		}
		whole, noted := Split(a), Tables{}
		whole.Merge(&is, true, &noted)
		if !equal(&whole, &is) {
			t.Fatalf("merged whole: %+v\nwant %+v", whole, is)
		}
		var again Tables
		if whole.Merge(&d, false, &again); len(again.Routes)+len(again.Services)+len(again.Filters) > 0 {
			t.Fatalf("merged twice, and something changed: %+v", again)
		}
		for _, keys := range []*Tables{&changed, &noted} {
			if !reflect.DeepEqual(keysOf(keys.Services), keysOf(d.Services)) || !reflect.DeepEqual(keysOf(keys.Routes), keysOf(d.Routes)) || !reflect.DeepEqual(keysOf(keys.Filters), keysOf(d.Filters)) {
				t.Fatalf("noted %+v\nwant the keys of %+v", keys, d)
			}
		}
		sum := Tables{}
		sum.Add(&was)
		sum.Add(&d)
		for k, list := range sum.Services {
			if len(list) > 0 && !reflect.DeepEqual(list, is.Services[k]) || len(list) == 0 && len(is.Services[k]) > 0 {
				t.Fatalf("added: %s is %v, want %v", k, list, is.Services[k])
			}
		}
	}
}

func mesh(r *rand.Rand) *model.Mesh {
	if r.IntN(2) == 0 {
		return modeltest.LivelyMesh(r)
	}
	return modeltest.RandomMesh(r)
}

// equal compares by what the tables print, of which nil and empty are one.
func equal(a, b *Tables) bool {
	for _, x := range kinds {
		if x.len(a) != x.len(b) {
			return false
		}
	}
	var ma, mb model.Mesh
	a.Join(&ma)
	b.Join(&mb)
	return fmt.Sprintf("%+v", ma) == fmt.Sprintf("%+v", mb)
}

func keysOf[K comparable, V any](t Table[K, V]) map[K]bool {
	out := map[K]bool{}
	for k := range t {
		out[k] = true
	}
	return out
}
