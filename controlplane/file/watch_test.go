package file

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"aether/dataplane/model"
)

// world is a directory being watched for real, and what was published of it.
type world struct {
	t    *testing.T
	dir  string
	said chan said
	done chan error
	stop context.CancelFunc
}

type said struct {
	names    string // of the Services in force
	problems []model.Problem
}

// watch starts a Watch of dir, which ends with the test, and waits for its first word.
func watch(t *testing.T, dir string) (*world, said) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	w := &world{t: t, dir: dir, said: make(chan said, 64), done: make(chan error, 1), stop: stop}
	go func() {
		w.done <- Watch(ctx, dir, testOptions, func(m *model.Mesh, p []model.Problem) { w.said <- said{services(m), p} })
	}()
	t.Cleanup(func() {
		stop()
		if err := <-w.done; err != nil {
			t.Errorf("Watch: %v", err)
		}
	})
	return w, w.next()
}

func services(m *model.Mesh) string {
	var s []string
	for i := range m.Services {
		s = append(s, m.Services[i].Name.Name)
	}
	return strings.Join(s, " ")
}

// next waits for what is published next. A test that waits in vain ends by go test's own timeout.
func (w *world) next() said { return <-w.said }

// until waits until the Services in force are names; an atomic change must show nothing else before.
func (w *world) until(names string) said {
	w.t.Helper()
	s := w.next()
	if s.names != names {
		w.t.Fatalf("published %q, want %q (problems %v)", s.names, names, s.problems)
	}
	return s
}

// write puts text into place at once, so that no half of it is ever seen.
func (w *world) write(name, text string) {
	w.t.Helper()
	path := filepath.Join(w.dir, name)
	dir := filepath.Dir(path)
	check(w.t, os.MkdirAll(dir, 0o700))
	check(w.t, os.WriteFile(filepath.Join(dir, ".next"), []byte(text), 0o600))
	check(w.t, os.Rename(filepath.Join(dir, ".next"), path))
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// svc is the YAML of Services of the shop.
func svc(names ...string) string {
	var b strings.Builder
	for _, n := range names {
		fmt.Fprintf(&b, "---\napiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: shop}\nspec: {ports: [{port: 80}]}\n", n)
	}
	return b.String()
}

func TestWatch(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "conf")
	check(t, os.MkdirAll(dir, 0o700))
	check(t, os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(svc("a")), 0o600))
	w, first := watch(t, dir)
	if first.names != "a" || len(first.problems) != 0 {
		t.Fatalf("first: %+v", first)
	}

	w.write("b.yaml", svc("b"))
	w.until("a b")

	// A new directory, and one in it.
	w.write("sub/deeper/c.yml", svc("c"))
	w.until("a b c")
	w.write("sub/deeper/c.yml", svc("c", "d"))
	w.until("a b c d")

	// An editor's atomic rename.
	w.write(".a.yaml.tmp", svc("a2"))
	check(t, os.Rename(filepath.Join(dir, ".a.yaml.tmp"), filepath.Join(dir, "a.yaml")))
	w.until("a2 b c d")

	// One bad document isolates: its file's other documents, and all others, stay.
	w.write("b.yaml", svc("b", "b2")+"---\nkind: [\n")
	s := w.until("a2 b b2 c d")
	if len(s.problems) != 1 || s.problems[0].Where != "b.yaml:12" {
		t.Fatalf("problems %+v", s.problems)
	}
	w.write("b.yaml", svc("b"))
	if s := w.until("a2 b c d"); len(s.problems) != 0 {
		t.Fatalf("problems %+v", s.problems)
	}

	// Nothing is published for a change that makes no difference: the next word is of the change after it.
	w.write("b.yaml", "# a comment\n"+svc("b"))
	w.write("notes.txt", "x")
	check(t, os.RemoveAll(filepath.Join(dir, "sub")))
	w.until("a2 b")

	// The directory goes: the last state stays. It comes back: so does its content.
	away := dir + ".away"
	check(t, os.Rename(dir, away))
	s = w.until("a2 b")
	if len(s.problems) != 1 || s.problems[0].Object != "directory "+dir || !strings.Contains(s.problems[0].Reason, "what it last said is in force") {
		t.Fatalf("problems %+v", s.problems)
	}
	check(t, os.Rename(away, dir))
	if s := w.until("a2 b"); len(s.problems) != 0 {
		t.Fatalf("problems %+v", s.problems)
	}

	// Another directory in its place is watched as the old one was.
	check(t, os.Mkdir(away, 0o700))
	check(t, os.WriteFile(filepath.Join(away, "n.yaml"), []byte(svc("n")), 0o600))
	check(t, os.Rename(dir, dir+".old"))
	check(t, os.Rename(away, dir))
	for w.next().names != "n" { // it may have been seen between the two renames
	}
	w.write("n.yaml", svc("n", "o"))
	w.until("n o")
}

// TestWatchConfigMap swaps ..data as the kubelet does.
func TestWatchConfigMap(t *testing.T) {
	dir := t.TempDir()
	w := &world{t: t, dir: dir}
	version := func(n int, names ...string) {
		data := fmt.Sprintf("..2026_%d", n)
		w.write(filepath.Join(data, "shop.yaml"), svc(names...))
		check(t, os.Symlink(data, filepath.Join(dir, "..data_tmp")))
		check(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	version(1, "a")
	check(t, os.Symlink("..data/shop.yaml", filepath.Join(dir, "shop.yaml")))
	w, first := watch(t, dir)
	if first.names != "a" {
		t.Fatalf("first: %+v", first)
	}
	version(2, "a", "b")
	w.t, w.dir = t, dir
	w.until("a b")
	check(t, os.RemoveAll(filepath.Join(dir, "..2026_1")))
	version(3, "c")
	w.until("c")
}

// TestWatchLinks: the directory itself is a link that is swapped, and a file's
// target lies elsewhere, next to the directory too.
func TestWatchLinks(t *testing.T) {
	base := t.TempDir()
	one, two := &world{t: t, dir: filepath.Join(base, "1")}, &world{t: t, dir: filepath.Join(base, "2")}
	one.write("a.yaml", svc("a"))
	two.write("b.yaml", svc("b"))
	current := filepath.Join(base, "current")
	check(t, os.Symlink("1", current))
	w, first := watch(t, current)
	if first.names != "a" {
		t.Fatalf("first: %+v", first)
	}
	check(t, os.Symlink("2", filepath.Join(base, "next")))
	check(t, os.Rename(filepath.Join(base, "next"), current))
	w.until("b")
	two.write("b.yaml", svc("b", "c"))
	w.until("b c")

	beside := filepath.Join(base, "beside.yaml")
	check(t, os.WriteFile(beside, []byte(svc("s")), 0o600))
	check(t, os.Symlink(beside, filepath.Join(base, "2", "link.yaml")))
	w.until("b c s")
	check(t, os.WriteFile(beside, []byte(svc("s", "t")), 0o600))
	for w.next().names != "b c s t" { // a plain write may be seen truncated
	}
}

func TestWatchNeedsTheDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "absent")
	err := Watch(t.Context(), dir, testOptions, func(*model.Mesh, []model.Problem) { t.Error("published") })
	if err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("got %v", err)
	}
}

// TestUnreadableFileKeepsWhatItSaid: a file that cannot be read for the moment is not an empty file.
func TestUnreadableFileKeepsWhatItSaid(t *testing.T) {
	w := &world{t: t, dir: t.TempDir()}
	w.write("a.yaml", svc("a"))
	w.write("b.yaml", svc("b"))
	l := newLoader(w.dir, testOptions)
	read := func(changed bool, names string, problems int) {
		t.Helper()
		got, err := l.read(t.Context(), nil)
		check(t, err)
		m, p := l.build()
		if got != changed || services(m) != names || len(p) != problems {
			t.Errorf("changed %v, services %q, problems %v; want %v, %q, %d", got, services(m), p, changed, names, problems)
		}
	}
	read(true, "a b", 0)
	read(false, "a b", 0)
	// Too large stands for any read that fails; tests run as root, whom no mode stops.
	check(t, os.Truncate(filepath.Join(w.dir, "a.yaml"), maxFileSize+1))
	read(true, "a b", 1)
	read(false, "a b", 1)
	check(t, os.Remove(filepath.Join(w.dir, "a.yaml")))
	read(true, "b", 0)
}

// TestHoldOff runs follow in virtual time over a directory that the test changes at will.
func TestHoldOff(t *testing.T) {
	for _, tt := range []struct {
		name    string
		changes []int // when a change is told, in ms from the start
		want    []int // when something is published
	}{
		{"one", []int{0}, []int{100}},
		{"a burst", []int{0, 50, 90, 180}, []int{280}},
		{"two apart", []int{0, 300}, []int{100, 400}},
		{"never quiet", every(70, 3000), []int{1000, 2050, 3040}},
		{"none", nil, []int{30100}}, // the look that nobody asked for
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
				defer cancel()
				var got []int
				start := time.Now()
				s := source{
					loader: newLoader(dir, testOptions),
					visit:  func(string) error { return nil }, sweep: func() {},
					on: func(*source, []model.Problem) {
						got = append(got, int(time.Since(start).Milliseconds()))
					},
				}
				check(t, s.read(ctx))
				s.publish()
				got = nil
				n := 0
				change := func() {
					n++
					check(t, os.WriteFile(filepath.Join(dir, "next"), []byte(svc(fmt.Sprintf("s%d", n))), 0o600))
					check(t, os.Rename(filepath.Join(dir, "next"), filepath.Join(dir, "s.yaml")))
				}
				changed := make(chan struct{}, 1)
				go func() {
					for _, at := range tt.changes {
						<-time.After(time.Duration(at)*time.Millisecond - time.Since(start))
						change()
						select {
						case changed <- struct{}{}:
						default:
						}
					}
				}()
				if tt.changes == nil {
					change()
				}
				s.follow(ctx, changed)
				if !slices.Equal(got, tt.want) {
					t.Errorf("published at %v ms, want %v", got, tt.want)
				}
			})
		})
	}
}

func every(step, end int) (out []int) {
	for at := 0; at <= end; at += step {
		out = append(out, at)
	}
	return out
}

// TestChangedWhileRead: a state that changed under the reader is not published;
// the one after it is.
func TestChangedWhileRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, dir: t.TempDir()}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		changed := make(chan struct{}, 1)
		reads := 0
		var got []string
		s := source{loader: newLoader(w.dir, testOptions), sweep: func() {}}
		s.visit = func(string) error {
			if reads++; reads == 2 { // a writer is at work: the first of its two files is there
				w.write("a.yaml", svc("a"))
				changed <- struct{}{}
			} else if reads == 3 {
				w.write("b.yaml", svc("b"))
			}
			return nil
		}
		s.on = func(s *source, _ []model.Problem) { got = append(got, services(s.mesh)) }
		check(t, s.read(ctx))
		s.publish()
		changed <- struct{}{}
		s.follow(ctx, changed)
		if !slices.Equal(got, []string{"", "a b"}) {
			t.Errorf("published %q", got)
		}
	})
}
