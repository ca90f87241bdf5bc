package lastgood

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"time"
)

// The body is a schema, a table of strings, and a State by that schema. The schema
// names the fields of every struct: a reader of another version takes what it knows by
// name, leaves zero what the writer did not know, and refuses what it does not know
// itself, for that may be a condition without which a policy allows more.

// wire is how a value is written.
type wire uint8

const (
	wireBool wire = iota + 1
	wireUint
	wireInt
	wireFloat
	wireString // a place in the table of strings
	wireAddr
	wirePrefix
	wireTime
	wireSlice // 0: nil; else one more than its length
	wireMap   // likewise; ascending by key
	wirePtr   // 0: nil
	wireStruct
)

const (
	maxDepth   = 32      // of values in values: routes have filters that have backends that have filters
	maxStructs = 256     // of a schema
	maxFields  = 256     // of a struct
	maxStrings = 1 << 24 // of a file
	maxShared  = 256     // bytes of a slice or map that is shared where it is the same again
)

var (
	addrType   = reflect.TypeFor[netip.Addr]()
	prefixType = reflect.TypeFor[netip.Prefix]()
	timeType   = reflect.TypeFor[time.Time]()
)

// shape is how a Go type is written or read.
type shape struct {
	wire   wire
	typ    reflect.Type
	elem   *shape // of a slice, pointer or map
	key    *shape // of a map
	id     int    // of a struct: its place in the schema
	fields []field

	// Of a slice or map, the last one that was read and the bytes that it was. Rows
	// have the same ports and metadata by the hundred: they share them.
	last    []byte
	lastVal reflect.Value
}

type field struct {
	name  string
	index int
	shape *shape
}

// least is the number of bytes a value takes at least.
func (s *shape) least() int {
	switch s.wire {
	case wireFloat:
		return 8
	case wirePrefix:
		return 2
	case wireStruct:
		n := 0
		for _, f := range s.fields {
			if f.shape.wire == wireStruct {
				n += f.shape.least() // a struct in a struct ends: Go has no other
			} else {
				n++
			}
		}
		return max(n, 1)
	}
	return 1
}

// shapes makes the shapes of types, structs each once.
type shapes struct {
	structs map[reflect.Type]*shape
	order   []*shape
}

// of panics on a type that has no form here: that is a bug, which every test meets.
func (x *shapes) of(t reflect.Type) *shape {
	switch t {
	case addrType:
		return &shape{wire: wireAddr, typ: t}
	case prefixType:
		return &shape{wire: wirePrefix, typ: t}
	case timeType:
		return &shape{wire: wireTime, typ: t}
	}
	switch t.Kind() {
	case reflect.Bool:
		return &shape{wire: wireBool, typ: t}
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uint:
		return &shape{wire: wireUint, typ: t}
	case reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Int:
		return &shape{wire: wireInt, typ: t}
	case reflect.Float64:
		return &shape{wire: wireFloat, typ: t}
	case reflect.String:
		return &shape{wire: wireString, typ: t}
	case reflect.Slice:
		return &shape{wire: wireSlice, typ: t, elem: x.of(t.Elem())}
	case reflect.Pointer:
		return &shape{wire: wirePtr, typ: t, elem: x.of(t.Elem())}
	case reflect.Map:
		if t.Key().Kind() == reflect.String {
			return &shape{wire: wireMap, typ: t, key: x.of(t.Key()), elem: x.of(t.Elem())}
		}
	case reflect.Struct:
		if s := x.structs[t]; s != nil {
			return s
		}
		s := &shape{wire: wireStruct, typ: t, id: len(x.order)}
		x.structs[t] = s
		x.order = append(x.order, s)
		for i := range t.NumField() {
			f := t.Field(i)
			if !f.IsExported() {
				panic("lastgood: " + t.String() + " has a field that is not exported")
			}
			s.fields = append(s.fields, field{f.Name, i, x.of(f.Type)})
		}
		return s
	}
	panic("lastgood: " + t.String() + " cannot be written")
}

// encoder writes values.
type encoder struct {
	out     []byte
	strings map[string]uint64
	table   []string
}

// encode is the body of v.
func encode(v any) []byte {
	x := shapes{structs: map[reflect.Type]*shape{}}
	root := x.of(reflect.TypeOf(v).Elem())
	e := encoder{strings: map[string]uint64{"": 0}, table: []string{""}}
	e.value(reflect.ValueOf(v).Elem(), root)
	values := e.out
	e.out = binary.AppendUvarint(nil, uint64(len(x.order)))
	for _, s := range x.order {
		e.out = binary.AppendUvarint(e.out, uint64(len(s.fields)))
		for _, f := range s.fields {
			e.text(f.name)
			e.schema(f.shape)
		}
	}
	e.out = binary.AppendUvarint(e.out, uint64(len(e.table)))
	total := 0
	for _, s := range e.table {
		e.out = binary.AppendUvarint(e.out, uint64(len(s)))
		total += len(s)
	}
	e.out = slices.Grow(e.out, total+len(values))
	for _, s := range e.table {
		e.out = append(e.out, s...)
	}
	return append(e.out, values...)
}

func (e *encoder) text(s string) {
	e.out = append(binary.AppendUvarint(e.out, uint64(len(s))), s...)
}

func (e *encoder) schema(s *shape) {
	e.out = append(e.out, byte(s.wire))
	switch s.wire {
	case wireStruct:
		e.out = binary.AppendUvarint(e.out, uint64(s.id))
	case wireMap:
		e.schema(s.key)
		e.schema(s.elem)
	case wireSlice, wirePtr:
		e.schema(s.elem)
	}
}

func (e *encoder) string(s string) {
	n, ok := e.strings[s]
	if !ok {
		n = uint64(len(e.table))
		e.strings[s] = n
		e.table = append(e.table, s)
	}
	e.out = binary.AppendUvarint(e.out, n)
}

func (e *encoder) value(v reflect.Value, s *shape) {
	switch s.wire {
	case wireBool:
		b := byte(0)
		if v.Bool() {
			b = 1
		}
		e.out = append(e.out, b)
	case wireUint:
		e.out = binary.AppendUvarint(e.out, v.Uint())
	case wireInt:
		e.out = binary.AppendVarint(e.out, v.Int())
	case wireFloat:
		e.out = binary.BigEndian.AppendUint64(e.out, math.Float64bits(v.Float()))
	case wireString:
		e.string(v.String())
	case wireAddr:
		e.addr(v.Interface().(netip.Addr))
	case wirePrefix:
		p := v.Interface().(netip.Prefix)
		e.addr(p.Addr())
		e.out = binary.AppendUvarint(e.out, uint64(p.Bits()+1))
	case wireTime:
		t := v.Interface().(time.Time)
		if t.IsZero() {
			e.out = append(e.out, 0)
			return
		}
		e.out = append(e.out, 1)
		e.out = binary.AppendVarint(e.out, t.Unix())
		e.out = binary.AppendUvarint(e.out, uint64(t.Nanosecond()))
	case wireSlice:
		if v.IsNil() {
			e.out = append(e.out, 0)
			return
		}
		n := v.Len()
		e.out = binary.AppendUvarint(e.out, uint64(n)+1)
		for i := range n {
			e.value(v.Index(i), s.elem)
		}
	case wireMap:
		if v.IsNil() {
			e.out = append(e.out, 0)
			return
		}
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return cmp.Compare(a.String(), b.String()) })
		e.out = binary.AppendUvarint(e.out, uint64(len(keys))+1)
		for _, k := range keys {
			e.value(k, s.key)
			e.value(v.MapIndex(k), s.elem)
		}
	case wirePtr:
		if v.IsNil() {
			e.out = append(e.out, 0)
			return
		}
		e.out = append(e.out, 1)
		e.value(v.Elem(), s.elem)
	case wireStruct:
		for i := range s.fields {
			e.value(v.Field(s.fields[i].index), s.fields[i].shape)
		}
	}
}

func (e *encoder) addr(a netip.Addr) {
	e.out = append(e.out, byte(a.BitLen()/8))
	e.out = append(e.out, a.AsSlice()...)
	if a.Is6() {
		e.string(a.Zone())
	}
}

// errNewer says that a body has something that this version does not know.
type errNewer struct{ what string }

func (e *errNewer) Error() string {
	return "it has " + e.what + ", which this version does not know: a newer version wrote it"
}

var errEnds = errors.New("it ends too early, or a length in it is wrong")

// decoder reads values. It panics with an error, which decode returns.
type decoder struct {
	in     []byte
	table  []string
	schema [][]wireField
	made   map[made]*shape
	depth  int
}

// wireField is a field as the writer knew it.
type wireField struct {
	name string
	form form
}

// form is a wire and what is behind it.
type form struct {
	wire      wire
	id        int
	key, elem *form
}

// made is a struct of the schema read into a Go type.
type made struct {
	id  int
	typ reflect.Type
}

// decode reads a body into v, a pointer. What it allocates is bounded by a small
// multiple of the body.
func decode(body []byte, v any) (err error) {
	d := decoder{in: body, made: map[made]*shape{}}
	defer func() {
		switch p := recover().(type) {
		case nil:
		case runtime.Error:
			panic(p) // a bug
		case error:
			err = p
		default:
			panic(p)
		}
	}()
	d.schema = make([][]wireField, d.count(maxStructs, 1))
	for i := range d.schema {
		fields := make([]wireField, d.count(maxFields, 3))
		for k := range fields {
			fields[k] = wireField{d.text(), d.form()}
		}
		d.schema[i] = fields
	}
	lengths := make([]int, d.count(maxStrings, 1))
	total := 0
	for i := range lengths {
		lengths[i] = d.count(math.MaxInt, 0)
		total += lengths[i]
		if total < 0 || total > len(d.in) {
			panic(errEnds)
		}
	}
	all := string(d.bytes(total))
	d.table = make([]string, len(lengths))
	for i, n := range lengths {
		d.table[i], all = all[:n], all[n:]
	}
	root := d.shape(reflect.TypeOf(v).Elem(), &form{wire: wireStruct}, "")
	d.value(reflect.ValueOf(v).Elem(), root)
	if len(d.in) > 0 {
		return fmt.Errorf("%d bytes behind its end", len(d.in))
	}
	return nil
}

func (d *decoder) bytes(n int) []byte {
	if n < 0 || n > len(d.in) {
		panic(errEnds)
	}
	b := d.in[:n]
	d.in = d.in[n:]
	return b
}

func (d *decoder) byte() byte { return d.bytes(1)[0] }

func (d *decoder) uint() uint64 {
	v, n := binary.Uvarint(d.in)
	if n <= 0 {
		panic(errEnds)
	}
	d.in = d.in[n:]
	return v
}

func (d *decoder) int() int64 {
	v, n := binary.Varint(d.in)
	if n <= 0 {
		panic(errEnds)
	}
	d.in = d.in[n:]
	return v
}

// count is a number of things, each of least bytes, that are still to come.
func (d *decoder) count(most, least int) int {
	n := d.uint()
	if n > uint64(most) || least > 0 && n > uint64(len(d.in)/least) {
		panic(errEnds)
	}
	return int(n)
}

func (d *decoder) text() string { return string(d.bytes(d.count(math.MaxInt, 1))) }

func (d *decoder) form() form {
	if d.depth++; d.depth > maxDepth {
		panic(errors.New("its schema is nested too deep"))
	}
	defer func() { d.depth-- }()
	f := form{wire: wire(d.byte())}
	switch f.wire {
	case wireStruct:
		f.id = d.count(maxStructs, 0)
	case wireMap:
		k, e := d.form(), d.form()
		f.key, f.elem = &k, &e
	case wireSlice, wirePtr:
		e := d.form()
		f.elem = &e
	}
	return f
}

// shape is how what has the form f is read into t.
func (d *decoder) shape(t reflect.Type, f *form, where string) *shape {
	want := (&shapes{structs: map[reflect.Type]*shape{}}).flat(t)
	if f.wire == 0 || f.wire > wireStruct {
		panic(&errNewer{fmt.Sprintf("%s in a form (%d)", where, f.wire)})
	}
	if f.wire != want {
		panic(&errNewer{fmt.Sprintf("%s in another form (%d) than this version's (%d)", where, f.wire, want)})
	}
	s := &shape{wire: f.wire, typ: t}
	switch f.wire {
	case wireMap:
		s.key, s.elem = d.shape(t.Key(), f.key, where), d.shape(t.Elem(), f.elem, where)
	case wireSlice, wirePtr:
		s.elem = d.shape(t.Elem(), f.elem, where)
	case wireStruct:
		k := made{f.id, t}
		if old := d.made[k]; old != nil {
			return old
		}
		if f.id >= len(d.schema) {
			panic(errEnds)
		}
		d.made[k] = s
		for _, wf := range d.schema[f.id] {
			path := t.Name() + "." + wf.name
			gf, ok := t.FieldByName(wf.name)
			if !ok || len(gf.Index) != 1 {
				panic(&errNewer{"the field " + path})
			}
			s.fields = append(s.fields, field{wf.name, gf.Index[0], d.shape(gf.Type, &wf.form, path)})
		}
	}
	return s
}

// flat is the wire of a type alone.
func (x *shapes) flat(t reflect.Type) wire {
	switch {
	case t == addrType || t == prefixType || t == timeType:
		return x.of(t).wire
	case t.Kind() == reflect.Struct:
		return wireStruct
	case t.Kind() == reflect.Slice:
		return wireSlice
	case t.Kind() == reflect.Pointer:
		return wirePtr
	case t.Kind() == reflect.Map:
		return wireMap
	}
	return x.of(t).wire
}

func (d *decoder) string() string {
	n := d.uint()
	if n >= uint64(len(d.table)) {
		panic(errEnds)
	}
	return d.table[n]
}

func (d *decoder) value(v reflect.Value, s *shape) {
	switch s.wire {
	case wireBool:
		v.SetBool(d.byte() != 0)
	case wireUint:
		n := d.uint()
		if v.OverflowUint(n) {
			panic(errEnds)
		}
		v.SetUint(n)
	case wireInt:
		n := d.int()
		if v.OverflowInt(n) {
			panic(errEnds)
		}
		v.SetInt(n)
	case wireFloat:
		v.SetFloat(math.Float64frombits(binary.BigEndian.Uint64(d.bytes(8))))
	case wireString:
		v.SetString(d.string())
	case wireAddr:
		*v.Addr().Interface().(*netip.Addr) = d.addr()
	case wirePrefix:
		a := d.addr()
		bits := int(d.uint()) - 1
		if bits > a.BitLen() || bits < -1 {
			panic(errEnds)
		}
		*v.Addr().Interface().(*netip.Prefix) = netip.PrefixFrom(a, bits)
	case wireTime:
		if d.byte() != 0 {
			sec, nsec := d.int(), d.uint()
			if nsec >= uint64(time.Second) {
				panic(errEnds)
			}
			*v.Addr().Interface().(*time.Time) = time.Unix(sec, int64(nsec)).UTC()
		}
	case wireSlice, wireMap, wirePtr:
		d.deep(v, s)
	case wireStruct:
		for i := range s.fields {
			d.value(v.Field(s.fields[i].index), s.fields[i].shape)
		}
	}
}

// deep reads what is behind a pointer of one kind or another.
func (d *decoder) deep(v reflect.Value, s *shape) {
	if d.depth++; d.depth > maxDepth {
		panic(errors.New("its values are nested too deep"))
	}
	defer func() { d.depth-- }()
	if s.wire == wirePtr {
		if d.byte() != 0 {
			p := reflect.New(s.typ.Elem())
			d.value(p.Elem(), s.elem)
			v.Set(p)
		}
		return
	}
	if len(s.last) > 0 && bytes.HasPrefix(d.in, s.last) { // no value's bytes begin another's
		d.in = d.in[len(s.last):]
		v.Set(s.lastVal)
		return
	}
	start := d.in
	n := d.uint()
	if n == 0 {
		return
	}
	n--
	least := s.elem.least()
	if s.wire == wireMap {
		least++
	}
	if n > uint64(len(d.in)/least) {
		panic(errEnds)
	}
	if s.wire == wireSlice {
		list := reflect.MakeSlice(s.typ, int(n), int(n))
		for i := range int(n) {
			d.value(list.Index(i), s.elem)
		}
		v.Set(list)
	} else {
		d.entries(v, s, int(n))
	}
	if size := len(start) - len(d.in); size <= maxShared {
		s.last, s.lastVal = start[:size], v
	}
}

// entries are those of a map.
func (d *decoder) entries(v reflect.Value, s *shape, n int) {
	m := reflect.MakeMapWithSize(s.typ, n)
	for range n {
		k, e := reflect.New(s.typ.Key()).Elem(), reflect.New(s.typ.Elem()).Elem()
		d.value(k, s.key)
		d.value(e, s.elem)
		m.SetMapIndex(k, e)
	}
	v.Set(m)
}

func (d *decoder) addr() netip.Addr {
	switch n := int(d.byte()); n {
	case 0:
		return netip.Addr{}
	case 4, 16:
		a, _ := netip.AddrFromSlice(d.bytes(n))
		if n == 16 {
			if zone := d.string(); zone != "" {
				a = a.WithZone(zone)
			}
		}
		return a
	}
	panic(errEnds)
}
