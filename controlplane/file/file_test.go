package file

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"aether/dataplane/model"
)

var update = flag.Bool("update", false, "rewrite testdata/*/want.txt")

var testOptions = Options{Node: "n1", TrustDomain: "td.test"}

// TestGolden loads each directory of testdata and compares problems and mesh
// with its want.txt, a name that Load does not read. Whatever loads must also
// survive a dump.
func TestGolden(t *testing.T) {
	wants, err := filepath.Glob("testdata/*/want.txt")
	if err != nil || len(wants) == 0 {
		t.Fatal("no cases", err)
	}
	for _, want := range wants {
		dir := filepath.Dir(want)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			m, problems := Load(dir, testOptions)
			var b strings.Builder
			for _, p := range problems {
				fmt.Fprintf(&b, "%s: %s: %s\n", p.Where, p.Object, p.Reason)
			}
			got := b.String() + "\n" + render(m)
			if *update {
				if err := os.WriteFile(want, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			b0, err := os.ReadFile(want)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(b0) {
				t.Errorf("%s differs (-update rewrites it):\n%s", want, firstDifference(got, string(b0)))
			}
			again, _ := reload(t, Dump(m), testOptions)
			if g, w := render(again), render(m); g != w {
				t.Errorf("the dump loads as something else:\n%s", firstDifference(g, w))
			}
		})
	}
}

func firstDifference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := 0; ; i++ {
		if i == len(g) || i == len(w) || g[i] != w[i] {
			return fmt.Sprintf("line %d\ngot  %q\nwant %q", i+1, g[i:min(i+1, len(g))], w[i:min(i+1, len(w))])
		}
	}
}

// reload loads a directory that holds text.
func reload(t testing.TB, text []byte, o Options) (*model.Mesh, []model.Problem) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "mesh.yaml"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	return Load(dir, o)
}

func TestLoadDirectoryThatCannotBeRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{filepath.Join(t.TempDir(), "absent"), file} {
		m, problems := Load(dir, testOptions)
		if m == nil || m.Domain != model.DefaultDomain || m.Node != "n1" || len(m.Endpoints) != 0 {
			t.Errorf("mesh %+v", m)
		}
		if len(problems) != 1 || problems[0].Object != "directory "+dir || !strings.Contains(problems[0].Reason, "cannot be read") {
			t.Errorf("problems %+v", problems)
		}
	}
}

// TestLoadOddFiles: what is no regular file is told and never waited for.
func TestLoadOddFiles(t *testing.T) {
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.WriteFile(filepath.Join(dir, "good.YML"), []byte(goodPod), 0o600))
	must(os.WriteFile(filepath.Join(dir, "service.Json"), []byte(`{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"port": 80}]}}`), 0o600))
	must(unix.Mkfifo(filepath.Join(dir, "fifo.yaml"), 0o600))
	must(os.Symlink("nowhere", filepath.Join(dir, "dangling.yaml")))
	must(os.Symlink(dir, filepath.Join(dir, "ring")))
	must(os.Symlink("good.YML", filepath.Join(dir, "z-ignored.txt")))
	big, err := os.Create(filepath.Join(dir, "big.yaml"))
	must(err)
	must(big.Truncate(maxFileSize + 1))
	must(big.Close())

	m, problems := Load(dir, testOptions)
	var got []string
	for _, p := range problems {
		got = append(got, p.Where+" "+p.Reason)
	}
	want := []string{
		"big.yaml cannot be read: larger than 16 MiB: what it last said is kept; mend it",
		"dangling.yaml a link that leads nowhere: what was last read there is kept; correct or remove it",
		"fifo.yaml is no regular file and is not read: replace or rename it",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got %q\nwant %q", got, want)
	}
	if len(m.Endpoints) != 1 || len(m.Services) != 1 {
		t.Errorf("%d endpoints, %d Services", len(m.Endpoints), len(m.Services))
	}
}

func TestProblemsAreBounded(t *testing.T) {
	var b strings.Builder
	for i := range maxProblems + 7 {
		fmt.Fprintf(&b, "kind: Nothing%d\n---\n", i)
	}
	_, problems := reload(t, []byte(b.String()), testOptions)
	if len(problems) != maxProblems+1 || !strings.HasPrefix(problems[maxProblems].Reason, "7 more problems") {
		t.Errorf("%d problems, last %+v", len(problems), problems[len(problems)-1])
	}
}
