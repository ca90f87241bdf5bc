package gamma

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"
)

// Bounds of one document.
const (
	maxNesting = 64
	maxAliased = 100_000 // nodes reached through aliases: stops an alias bomb
	MaxFlaws   = 20      // a document; one that is that wrong says nothing more
)

// beyond is the path of what comes after MaxFlaws: anything in the document may be wrong.
const beyond = "*"

// Flaw is something in an object that its type has no place for.
type Flaw struct {
	Path    string // "spec.rules[0].matches"; beyond: anywhere; empty: not told
	Line    int    // of the file; 0: not told
	Reason  string
	Unknown bool // a field that the type does not have
}

// decoder fills Kubernetes types from YAML nodes as strictly as the API server
// does with fieldValidation=Strict, and says the line of whatever it refuses.
// What is refused is left out, so that the rest can still be looked at.
type decoder struct {
	base    int // lines of the file before this document
	flaws   []Flaw
	alias   int // depth of aliases being followed
	aliased int
	// proto takes names as protobuf's JSON form does: as they stand in the
	// .proto file, with underscores, too.
	proto bool
}

// verbatim is a part of a document that is read later, if at all.
type verbatim struct{ node *yaml.Node }

func (d *decoder) flaw(n *yaml.Node, path, format string, args ...any) {
	switch line := d.base + n.Line; {
	case len(d.flaws) < MaxFlaws:
		d.flaws = append(d.flaws, Flaw{Path: path, Line: line, Reason: fmt.Sprintf(format, args...)})
	case len(d.flaws) == MaxFlaws:
		d.flaws = append(d.flaws, Flaw{Path: beyond, Line: line, Reason: fmt.Sprintf("more than %d mistakes: mend the ones above first", MaxFlaws)})
	}
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// into decodes n, the field at path, into a pointer.
func (d *decoder) into(n *yaml.Node, to any, path string) {
	d.decode(n, reflect.ValueOf(to).Elem(), path, 0)
}

// decode fills v, which is settable and zero, from n.
func (d *decoder) decode(n *yaml.Node, v reflect.Value, path string, depth int) {
	n, leave := d.enter(n, path, depth)
	if n == nil {
		return
	}
	defer leave()
	if n.ShortTag() == "!!null" {
		return // as in the API: null is absent
	}
	if keep, ok := v.Addr().Interface().(*verbatim); ok {
		keep.node = n
		return
	}
	if v.Kind() == reflect.Pointer {
		p := reflect.New(v.Type().Elem())
		before := len(d.flaws)
		d.decode(n, p.Elem(), path, depth+1)
		if len(d.flaws) == before || p.Elem().Kind() == reflect.Struct {
			v.Set(p) // a scalar that could not be read stays absent
		}
		return
	}
	if v.Addr().Type().Implements(unmarshaler) {
		d.decodeJSON(n, v, path, depth)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		d.decodeStruct(n, v, path, depth)
	case reflect.Map:
		d.decodeMap(n, v, path, depth)
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			d.decodeBytes(n, v, path)
			return
		}
		if n.Kind != yaml.SequenceNode {
			d.wrongKind(n, path, "a list")
			return
		}
		s := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
		for i, e := range n.Content {
			// A bad element stays, zero: its neighbours keep their places.
			d.decode(e, s.Index(i), fmt.Sprintf("%s[%d]", path, i), depth+1)
		}
		v.Set(s)
	case reflect.String:
		if tag := n.ShortTag(); n.Kind != yaml.ScalarNode || tag != "!!str" && tag != "!!timestamp" {
			d.wrongKind(n, path, "text")
			return
		}
		v.SetString(n.Value)
	case reflect.Bool:
		var b bool
		if n.ShortTag() != "!!bool" || n.Decode(&b) != nil {
			d.wrongKind(n, path, "true or false")
			return
		}
		v.SetBool(b)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		var i int64
		if n.ShortTag() != "!!int" || n.Decode(&i) != nil || v.OverflowInt(i) {
			d.wrongKind(n, path, "a whole number")
			return
		}
		v.SetInt(i)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		var u uint64
		if n.ShortTag() != "!!int" || n.Decode(&u) != nil || v.OverflowUint(u) {
			d.wrongKind(n, path, "a whole number")
			return
		}
		v.SetUint(u)
	case reflect.Float32, reflect.Float64:
		var f float64
		if tag := n.ShortTag(); tag != "!!int" && tag != "!!float" || n.Decode(&f) != nil {
			d.wrongKind(n, path, "a number")
			return
		}
		v.SetFloat(f)
	default:
		d.flaw(n, path, "field %q is not read by this source: remove it", path)
	}
}

// enter follows aliases within bounds. A nil node: a flaw was noted.
func (d *decoder) enter(n *yaml.Node, path string, depth int) (*yaml.Node, func()) {
	if depth > maxNesting {
		d.flaw(n, path, "nested deeper than %d levels: flatten it", maxNesting)
		return nil, nil
	}
	leave := func() {}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
		d.alias++
		leave = func() { d.alias-- }
	}
	if d.alias > 0 {
		if d.aliased++; d.aliased > maxAliased {
			d.flaw(n, path, "aliases expand to more than %d values: write them out", maxAliased)
			leave()
			return nil, nil
		}
	}
	return n, leave
}

func (d *decoder) decodeStruct(n *yaml.Node, v reflect.Value, path string, depth int) {
	fields := fieldsOf(v.Type())
	var spelt map[string]bool
	if d.proto {
		spelt = map[string]bool{}
	}
	d.pairs(n, path, func(key, value *yaml.Node) {
		at, name := join(path, key.Value), key.Value
		if d.proto {
			if name = camel(name); spelt[name] {
				d.flaw(key, at, "field %q stands twice, in two spellings: keep one", at)
				return
			}
			spelt[name] = true
		}
		i, ok := fields[name]
		if !ok {
			before := len(d.flaws)
			d.flaw(key, at, "unknown field %q%s: correct or remove it", at, suggest(key.Value, fields))
			if before < MaxFlaws {
				d.flaws[before].Unknown = true
			}
			return
		}
		d.decode(value, v.FieldByIndex(i), at, depth+1)
	})
}

func (d *decoder) decodeMap(n *yaml.Node, v reflect.Value, path string, depth int) {
	m := reflect.MakeMap(v.Type())
	d.pairs(n, path, func(key, value *yaml.Node) {
		if key.ShortTag() != "!!str" {
			d.flaw(key, path, "key %s in field %q is %s where text is expected: put it in quotes", key.Value, path, Describe(key))
			return
		}
		e, before := reflect.New(v.Type().Elem()).Elem(), len(d.flaws)
		if d.decode(value, e, join(path, key.Value), depth+1); len(d.flaws) > before {
			return // what could not be read is not there, and is not empty
		}
		m.SetMapIndex(reflect.ValueOf(key.Value).Convert(v.Type().Key()), e)
	})
	v.Set(m)
}

// pairs calls f for each pair of a mapping; keys are scalars and differ.
func (d *decoder) pairs(n *yaml.Node, path string, f func(key, value *yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		d.wrongKind(n, path, "a map of fields")
		return
	}
	seen := make(map[string]int, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		if key.Kind == yaml.AliasNode {
			key = key.Alias
		}
		switch first, twice := seen[key.Value]; {
		case key.Kind != yaml.ScalarNode:
			d.flaw(n.Content[i], path, "a key in field %q is %s: write plain text", path, Describe(key))
		case key.ShortTag() == "!!merge":
			d.flaw(key, path, "merge key <<: not read by this source: write the fields out")
		case twice:
			d.flaw(key, path, "field %q stands twice, first on line %d: keep one", join(path, key.Value), first)
		default:
			seen[key.Value] = d.base + key.Line
			f(key, n.Content[i+1])
		}
	}
}

func (d *decoder) decodeBytes(n *yaml.Node, v reflect.Value, path string) {
	b, err := base64.StdEncoding.DecodeString(n.Value)
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!str" || err != nil {
		d.wrongKind(n, path, "base64 text")
		return
	}
	v.SetBytes(b)
}

// decodeJSON serves types with a form of their own: times, quantities, IntOrString.
func (d *decoder) decodeJSON(n *yaml.Node, v reflect.Value, path string, depth int) {
	before := len(d.flaws)
	a := d.plain(n, path, depth)
	if len(d.flaws) != before {
		return
	}
	b, err := json.Marshal(a)
	if err == nil {
		err = v.Addr().Interface().(json.Unmarshaler).UnmarshalJSON(b)
	}
	if err != nil {
		v.SetZero()
		d.flaw(n, path, "field %q cannot be read: %s: correct it", path, strings.TrimPrefix(err.Error(), "json: "))
	}
}

// plain gives n as encoding/json would have it.
func (d *decoder) plain(n *yaml.Node, path string, depth int) any {
	n, leave := d.enter(n, path, depth)
	if n == nil {
		return nil
	}
	defer leave()
	switch n.Kind {
	case yaml.MappingNode:
		m := make(map[string]any, len(n.Content)/2)
		d.pairs(n, path, func(key, value *yaml.Node) {
			m[key.Value] = d.plain(value, join(path, key.Value), depth+1)
		})
		return m
	case yaml.SequenceNode:
		s := make([]any, len(n.Content))
		for i, e := range n.Content {
			s[i] = d.plain(e, fmt.Sprintf("%s[%d]", path, i), depth+1)
		}
		return s
	}
	switch n.ShortTag() {
	case "!!null":
		return nil
	case "!!bool":
		var b bool
		if n.Decode(&b) == nil {
			return b
		}
	case "!!int":
		var i int64
		if n.Decode(&i) == nil {
			return i
		}
	case "!!float":
		var f float64
		if n.Decode(&f) == nil && !math.IsInf(f, 0) && !math.IsNaN(f) {
			return f
		}
	}
	return n.Value
}

func (d *decoder) wrongKind(n *yaml.Node, path, want string) {
	mend := "write " + want
	switch tag := n.ShortTag(); {
	case want == "text" && n.Kind == yaml.ScalarNode:
		mend = fmt.Sprintf("put it in quotes: %q", n.Value)
	case tag == "!!str" && want != "base64 text" && n.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle) != 0:
		mend += ", without quotes"
	}
	is := Describe(n)
	if n.ShortTag() == "!!int" && want == "a whole number" {
		is = fmt.Sprintf("%s, which does not fit,", n.Value)
	}
	at := path
	if at == "" {
		at = "the document"
	} else {
		at = fmt.Sprintf("field %q", at)
	}
	d.flaw(n, path, "%s is %s where %s is expected: %s", at, is, want, mend)
}

// camel is the JSON name of a field of a .proto file: append_action is appendAction.
func camel(s string) string {
	if strings.IndexByte(s, '_') < 0 {
		return s
	}
	b, up := make([]byte, 0, len(s)), false
	for i := range len(s) {
		switch c := s[i]; {
		case c == '_':
			up = true
		case up && 'a' <= c && c <= 'z':
			b, up = append(b, c-'a'+'A'), false
		default:
			b, up = append(b, c), false
		}
	}
	return string(b)
}

// Describe says what n is, for people.
func Describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a map"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	}
	switch n.ShortTag() {
	case "!!bool":
		return "true or false"
	case "!!int", "!!float":
		return "a number"
	case "!!null":
		return "nothing"
	}
	return "text"
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

var fieldCache sync.Map // reflect.Type → map[string][]int

// fieldsOf maps the JSON names of a struct's fields, inlined ones too, to their indexes.
func fieldsOf(t reflect.Type) map[string][]int {
	if m, ok := fieldCache.Load(t); ok {
		return m.(map[string][]int)
	}
	m := map[string][]int{}
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && name == "" && f.Type.Kind() == reflect.Struct:
			for inner, index := range fieldsOf(f.Type) {
				m[inner] = append([]int{i}, index...)
			}
		case f.IsExported() && name != "" && name != "-":
			m[name] = []int{i}
		}
	}
	fieldCache.Store(t, m)
	return m
}

// suggest: `, did you mean "x"?` when a field's name is close to s.
func suggest(s string, fields map[string][]int) string {
	best, bestDist := "", 3
	for f := range fields {
		if d := Distance(strings.ToLower(s), strings.ToLower(f)); d < bestDist || d == bestDist && f < best {
			best, bestDist = f, d
		}
	}
	if best == "" || bestDist*2 > len(s) {
		return ""
	}
	return fmt.Sprintf(" (did you mean %q?)", best)
}

// Distance is the number of single-byte edits between a and b, up to a bound
// that says "far" for long strings.
func Distance(a, b string) int {
	const far = 99
	if len(a) > 64 || len(b) > 64 {
		return far
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diag
			if a[i] != b[j] {
				cost++
			}
			diag = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// Peek fills what it can of the strings in v and complains of nothing: the real decoding does.
func Peek(n *yaml.Node, v reflect.Value) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
		index, ok := fieldsOf(v.Type())[n.Content[i].Value]
		if !ok {
			continue
		}
		f, value := v.FieldByIndex(index), n.Content[i+1]
		switch {
		case f.Kind() == reflect.Struct:
			Peek(value, f)
		case value.Kind == yaml.ScalarNode && value.ShortTag() == "!!str" && f.String() == "":
			f.SetString(value.Value)
		}
	}
}
