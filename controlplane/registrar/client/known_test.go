package client

import (
	"net/netip"
	"reflect"
	"testing"

	"aether/dataplane/model"
)

// TestSame: rows that differ in anything are not the same, whatever fields there are, and sharing of what is equal
// gives no row what is another's.
func TestSame(t *testing.T) {
	var zero model.Endpoint
	v := reflect.TypeFor[model.Endpoint]()
	for i := range v.NumField() {
		var e model.Endpoint
		f := reflect.ValueOf(&e).Elem().Field(i)
		switch x := f.Addr().Interface().(type) {
		case *model.ServiceName: // what is compared is of one service
			continue
		case *netip.Addr:
			*x = netip.MustParseAddr("10.0.0.1")
		case *[]model.Port:
			*x = []model.Port{{Number: 1}}
		case *map[string]string:
			*x = map[string]string{"a": "b"}
		case *string:
			*x = "x"
		default:
			f.SetUint(1)
		}
		if same(&zero, &e) {
			t.Errorf("%s does not count", v.Field(i).Name)
		}
	}

	var in interner
	p := reflect.TypeFor[model.Port]()
	for i := range p.NumField() {
		first := model.Endpoint{Ports: []model.Port{{}}, Metadata: map[string]string{"a": "b c"}}
		other := model.Endpoint{Ports: []model.Port{{}}, Metadata: map[string]string{"a b": "c"}}
		switch f := reflect.ValueOf(&other.Ports[0]).Elem().Field(i); f.Kind() {
		case reflect.Bool:
			f.SetBool(true)
		default:
			f.SetUint(1)
		}
		in.endpoint(&first)
		in.endpoint(&other)
		if first.Ports[0] == other.Ports[0] || len(other.Metadata) != 1 || other.Metadata["a b"] != "c" || first.Metadata["a"] != "b c" {
			t.Errorf("%s: %+v and %+v", p.Field(i).Name, first, other)
		}
		again := model.Endpoint{Ports: []model.Port{{}}, Metadata: map[string]string{"a": "b c"}}
		if in.endpoint(&again); &again.Ports[0] != &first.Ports[0] {
			t.Error("nothing is shared")
		}
	}
}
