package lastgood

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"aether/controlplane/input"
	"aether/dataplane/model"
	"aether/dataplane/model/modeltest"
)

// state is what a random mesh would leave.
func state(r *rand.Rand) *State {
	s := &State{Node: "n1", Domain: "aether.internal", TrustDomain: "td"}
	for i := range 1 + r.IntN(3) {
		m := modeltest.RandomMesh(r)
		if r.IntN(2) == 0 {
			m = modeltest.LivelyMesh(r)
		}
		src := Source{Name: fmt.Sprint("source", i), At: time.Unix(r.Int64N(1<<40), r.Int64N(1e9)).UTC()}
		for i := range m.Routes {
			m.Routes[i].Created = m.Routes[i].Created.UTC()
		}
		b := input.FullBatch(m, nil, input.Settings{AccessLogs: true, TraceSample: 0.5})
		src.Settings, src.Locality = b.Settings, b.Locality
		b.Join(&src.Mesh)
		s.Sources = append(s.Sources, src)
	}
	return s
}

// TestRoundTrip: what is saved is what is loaded, to the last field of every object.
func TestRoundTrip(t *testing.T) {
	f := New(filepath.Join(t.TempDir(), "last-good"))
	if _, _, err := f.Load("n1", "aether.internal", "td"); !errors.Is(err, ErrNone) {
		t.Fatal(err)
	}
	for seed := range uint64(60) {
		want := state(rand.New(rand.NewPCG(seed, 1)))
		size, err := f.Save(want)
		if err != nil {
			t.Fatal(err)
		}
		got, n, err := f.Load("n1", "aether.internal", "td")
		if err != nil || n != size {
			t.Fatal(err, n, size)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("seed %d:\ngot  %+v\nwant %+v", seed, got, want)
		}
	}
	st, err := os.Stat(f.Path())
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", st, err)
	}
	if left, _ := filepath.Glob(f.Path() + "?*"); len(left) > 0 {
		t.Errorf("files beside it: %v", left)
	}
}

// TestEveryField: a field of the model that is set to something is there after a
// round trip, fields that are added to the model later included.
func TestEveryField(t *testing.T) {
	var s State
	fill(reflect.ValueOf(&s).Elem(), 0)
	got, _, err := parse(format(&s))
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, &s) {
		t.Errorf("got  %+v\nwant %+v", got, &s)
	}
}

// fill sets every field to something that is not zero, three levels of recursion deep.
func fill(v reflect.Value, depth int) {
	switch v.Interface().(type) {
	case netip.Addr:
		v.Set(reflect.ValueOf(netip.MustParseAddr("fe80::1%eth0")))
		return
	case netip.Prefix:
		v.Set(reflect.ValueOf(netip.MustParsePrefix("10.0.0.0/8")))
		return
	case time.Time:
		v.Set(reflect.ValueOf(time.Unix(1, 2).UTC()))
		return
	}
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString("s" + fmt.Sprint(depth))
	case reflect.Float64:
		v.SetFloat(0.25)
	case reflect.Slice:
		if depth < 12 {
			v.Set(reflect.MakeSlice(v.Type(), 2, 2))
			fill(v.Index(0), depth+1)
			fill(v.Index(1), depth+1)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		e := reflect.New(v.Type().Elem()).Elem()
		fill(e, depth+1)
		v.SetMapIndex(reflect.ValueOf("k"), e)
	case reflect.Pointer:
		if depth < 12 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(v.Elem(), depth+1)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), depth+1)
		}
	default:
		if v.CanUint() {
			v.SetUint(7)
		} else {
			v.SetInt(-7)
		}
	}
}

// write puts b where the state is, and loads it.
func write(t *testing.T, b []byte) (*State, error) {
	t.Helper()
	f := New(filepath.Join(t.TempDir(), "last-good"))
	if err := os.WriteFile(f.Path(), b, 0o600); err != nil {
		t.Fatal(err)
	}
	s, _, err := f.Load("n1", "aether.internal", "td")
	return s, err
}

// TestDamage: one byte that is another, at any place, or an end at any place, and the
// file is set aside, with its reason, and not used.
func TestDamage(t *testing.T) {
	good := format(state(rand.New(rand.NewPCG(3, 1))))
	if _, err := write(t, good); err != nil {
		t.Fatal(err)
	}
	checked := 0
	check := func(name string, b []byte) {
		t.Helper()
		if s, kind, err := parse(b); s != nil || kind == "" || err == nil {
			t.Fatalf("%s: %v %q", name, err, kind)
		}
		if checked++; checked%16 != 1 { // files are slow
			return
		}
		s, err := write(t, b)
		a, ok := errors.AsType[*Aside](err)
		if s != nil || !ok {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := os.Stat(a.Path); err != nil || !strings.Contains(a.Path, "last-good."+a.Kind+"-") || !strings.Contains(a.Error(), a.Path) {
			t.Fatalf("%s: %v, %v", name, a, err)
		}
		if _, err := os.Stat(filepath.Join(filepath.Dir(a.Path), "last-good")); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("%s: it is still there", name)
		}
	}
	step := max(1, len(good)/400)
	for i := 0; i < len(good); i++ {
		if i > headerSize && i%step != 0 {
			continue
		}
		bad := append([]byte(nil), good...)
		bad[i] ^= 1 << (i % 8)
		check(fmt.Sprint("byte ", i), bad)
		check(fmt.Sprint("end at ", i), good[:i])
	}
	check("one byte more", append(append([]byte(nil), good...), 0))
}

// TestForeign: the state of another node or mesh, or of a newer version, is set aside as such.
func TestForeign(t *testing.T) {
	other := state(rand.New(rand.NewPCG(3, 1)))
	other.Node = "n2"
	newer := format(state(rand.New(rand.NewPCG(3, 1))))
	binary.BigEndian.PutUint32(newer[len(magic):], version+1)
	for kind, b := range map[string][]byte{"foreign": format(other), "newer": newer} {
		s, err := write(t, b)
		if a, ok := errors.AsType[*Aside](err); !ok || a.Kind != kind || s != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if _, err := write(t, []byte(strings.Repeat("apiVersion: v1\n", 20))); !strings.Contains(fmt.Sprint(err), "foreign") {
		t.Error(err)
	}
}

// Versions: what an older version wrote is read, with zero for what it did not know; a field
// that only a newer one knows refuses the file.
func TestVersions(t *testing.T) {
	type inner struct{ A, B string }
	type older struct {
		Name string
		In   []struct{ A string }
	}
	type newer struct {
		Name string
		In   []struct{ A, B, C string }
	}
	type mine struct {
		Extra map[string]string
		In    []inner
		Name  string
	}
	var got mine
	if err := decode(encode(&older{"x", []struct{ A string }{{"1"}, {"2"}}}), &got); err != nil || !reflect.DeepEqual(got, mine{Name: "x", In: []inner{{A: "1"}, {A: "2"}}}) {
		t.Errorf("%+v %v", got, err)
	}
	err := decode(encode(&newer{"x", []struct{ A, B, C string }{{"1", "2", "3"}}}), new(mine))
	if _, ok := errors.AsType[*errNewer](err); !ok || !strings.Contains(err.Error(), "inner.C") {
		t.Errorf("%v", err)
	}
	type wide struct{ N uint32 }
	type narrow struct{ N uint8 }
	if err := decode(encode(&wide{300}), new(narrow)); err == nil {
		t.Error("300 in eight bits")
	}
	type text struct{ N string }
	if _, ok := errors.AsType[*errNewer](decode(encode(&wide{3}), new(text))); !ok {
		t.Error("a number as a string")
	}
}

// TestFull: where there is no room the file stays as it was, and nothing half is left.
func TestFull(t *testing.T) {
	dir := tmpfs(t, 256<<10)
	f := New(filepath.Join(dir, "last-good"))
	small := state(rand.New(rand.NewPCG(3, 1)))
	if _, err := f.Save(small); err != nil {
		t.Fatal(err)
	}
	large := &State{Node: "n1", Domain: "aether.internal", TrustDomain: "td", Sources: []Source{{Name: "x"}}}
	for i := range 20000 {
		large.Sources[0].Mesh.Catalog = append(large.Sources[0].Mesh.Catalog, model.ServiceName{Namespace: "ns", Name: fmt.Sprintf("service-with-a-name-%d", i)})
	}
	if n, err := f.Save(large); err == nil || n != 0 || !strings.Contains(err.Error(), "no space left") || !strings.Contains(err.Error(), "the one before stays") {
		t.Fatal(err)
	}
	got, _, err := f.Load("n1", "aether.internal", "td")
	if err != nil || !reflect.DeepEqual(got, small) {
		t.Fatalf("%v", err)
	}
	if left, _ := filepath.Glob(f.Path() + "?*"); len(left) > 0 {
		t.Errorf("files beside it: %v", left)
	}
	if _, err := New(filepath.Join(dir, "not", "there")).Save(small); err == nil {
		t.Error("a directory that is not there")
	}
}

// TestAsideIsBounded: damaged files do not fill a disk, and what a crash left in the
// middle of a write goes after a while.
func TestAsideIsBounded(t *testing.T) {
	f := New(filepath.Join(t.TempDir(), "last-good"))
	for range 12 {
		if err := os.WriteFile(f.Path(), []byte("no such thing"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, _, err := f.Load("n1", "", "")
		if a, ok := errors.AsType[*Aside](err); !ok || a.Path == "" {
			t.Fatal(err)
		} else if _, err := os.Stat(a.Path); err != nil {
			t.Fatal(err)
		}
	}
	stale, fresh := f.Path()+tempInfix+"1", f.Path()+tempInfix+"2"
	for _, p := range []string{stale, fresh} {
		if err := os.WriteFile(p, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	long := time.Now().Add(-2 * oldTemp)
	if err := os.Chtimes(stale, long, long); err != nil {
		t.Fatal(err)
	}
	_, _, _ = f.Load("n1", "", "")
	left, _ := filepath.Glob(f.Path() + "?*")
	if len(left) > 4+2 {
		t.Errorf("%d files: %v", len(left), left)
	}
	if _, err := os.Stat(stale); !errors.Is(err, os.ErrNotExist) {
		t.Error("the crash's file is still there")
	}
	if _, err := os.Stat(fresh); err != nil {
		t.Error("a file that is being written was removed")
	}
}

// TestCannotRead: what cannot be read is not moved.
func TestCannotRead(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "last-good"), 0o700); err != nil {
		t.Fatal(err)
	}
	_, _, err := New(filepath.Join(dir, "last-good")).Load("n1", "", "")
	if _, aside := errors.AsType[*Aside](err); aside || err == nil || !strings.Contains(err.Error(), "no regular file") {
		t.Error(err)
	}
}

// sealed is a body under a header that is right: what the checksum lets through.
func sealed(body []byte) []byte {
	sum := sha256.Sum256(body)
	b := append([]byte(magic), 0, 0, 0, version)
	b = binary.BigEndian.AppendUint64(b, uint64(len(body)))
	return append(append(b, sum[:]...), body...)
}

// FuzzParse: whatever the bytes behind a checksum that is right, they are a state or an error; and
// what is a state is written and read as the same.
func FuzzParse(f *testing.F) {
	for seed := range uint64(4) {
		f.Add(format(state(rand.New(rand.NewPCG(seed, 1))))[headerSize:])
	}
	f.Add([]byte{1, 1, 1, 'A', byte(wireStruct), 0, 1, 0})
	f.Fuzz(func(t *testing.T, body []byte) {
		s, kind, err := parse(sealed(body))
		if err != nil {
			if s != nil || kind == "" {
				t.Fatalf("%v %q %v", s, kind, err)
			}
			return
		}
		once := format(s)
		again, _, err := parse(once)
		if err != nil {
			t.Fatal(err)
		}
		if twice := format(again); string(twice) != string(once) {
			t.Fatalf("%x\n%x", once, twice)
		}
	})
}

// tmpfs mounts a file system of that many bytes.
func tmpfs(t *testing.T, size int) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", size)); err != nil {
		t.Fatal("mount (the tests run as root): ", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}
