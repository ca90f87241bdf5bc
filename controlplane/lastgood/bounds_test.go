package lastgood

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"unsafe"
)

// TestFileIsBounded: a file that is too large is set aside unread.
func TestFileIsBounded(t *testing.T) {
	f := New(filepath.Join(t.TempDir(), "last-good"))
	if err := os.WriteFile(f.Path(), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(f.Path(), 512<<20+1); err != nil { // a hole
		t.Fatal(err)
	}
	_, _, err := f.Load("n1", "", "")
	if a, ok := errors.AsType[*Aside](err); !ok || a.Kind != "damaged" || !strings.Contains(a.Why.Error(), "larger than 512 MiB") {
		t.Error(err)
	}
}

// TestSchemaIsBounded: a file says how what is in it is built, and is not believed without bounds.
func TestSchemaIsBounded(t *testing.T) {
	type nothing struct{}
	many := func(n uint64, rest ...byte) []byte { return append(binary.AppendUvarint(nil, n), rest...) }
	empty := func(structs int) []byte { return append(many(uint64(structs)), make([]byte, structs+1)...) } // of no fields; and no string
	fields := func(n int) []byte {
		b := append([]byte{1}, many(uint64(n))...)
		for range n {
			b = append(b, 1, 'x', byte(wireString))
		}
		return append(b, 0)
	}
	newer := func(err error) bool { _, ok := errors.AsType[*errNewer](err); return ok }
	for name, tt := range map[string]struct {
		body []byte
		ok   func(error) bool
	}{
		"kinds of objects":   {empty(256), func(err error) bool { return err == nil }},
		"and one more":       {empty(257), func(err error) bool { return errors.Is(err, errEnds) }},
		"fields":             {fields(256), newer}, // read: this one does not know them
		"and one more field": {fields(257), func(err error) bool { return errors.Is(err, errEnds) }},
		"strings":            {append([]byte{1, 0}, many(1<<24+1, make([]byte, 1<<24+1)...)...), func(err error) bool { return errors.Is(err, errEnds) }},
	} {
		if err := decode(tt.body, new(nothing)); !tt.ok(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestNestingIsBounded: values in values, and forms in forms, are read to a depth that no state has.
func TestNestingIsBounded(t *testing.T) {
	type node struct{ Next *node }
	for n, want := range map[int]string{32: "", 33: "values are nested too deep"} {
		var list node
		for range n - 1 { // the last pointer is nil, and counts
			list = node{&node{list.Next}}
		}
		err := decode(encode(&list), new(node))
		if err == nil != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%d pointers: %v", n, err)
		}
		form := reflect.TypeFor[string]()
		for range n - 1 {
			form = reflect.SliceOf(form)
		}
		v := reflect.New(reflect.StructOf([]reflect.StructField{{Name: "A", Type: form}})).Interface()
		err = decode(encode(v), v)
		if err == nil != (want == "") || err != nil && !strings.Contains(err.Error(), "schema is nested too deep") {
			t.Errorf("a form of %d: %v", n, err)
		}
	}
}

// TestSharedListsAreBounded: equal lists one after the other are one in memory, if they are short.
func TestSharedListsAreBounded(t *testing.T) {
	type lists struct{ L [][]uint8 }
	for n, want := range map[int]bool{254: true, 255: false} { // and two bytes of its length
		l := make([]uint8, n)
		var got lists
		if err := decode(encode(&lists{[][]uint8{l, l}}), &got); err != nil {
			t.Fatal(err)
		}
		if shared := unsafe.SliceData(got.L[0]) == unsafe.SliceData(got.L[1]); shared != want {
			t.Errorf("two lists of %d bytes: one in memory %v", n, shared)
		}
	}
}
