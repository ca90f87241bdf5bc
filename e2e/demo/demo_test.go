package demo

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"aether/e2e/tool"
)

// build makes the named binaries of the repository in a directory of the test's, and returns it.
func build(t *testing.T, names ...string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("needs root")
	}
	dir := t.TempDir()
	args := []string{"build", "-o", dir + string(filepath.Separator)}
	for _, name := range names {
		args = append(args, "aether/cmd/"+name)
	}
	if b, err := exec.CommandContext(t.Context(), "go", args...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	return dir
}

// TestFiles is the demo as `make demo` runs it: every node reads files, and its 13 answers are right.
func TestFiles(t *testing.T) {
	dir := build(t, "aether-proxy")
	var out bytes.Buffer
	err := Run(t.Context(), Options{Proxy: filepath.Join(dir, "aether-proxy"), Out: &out})
	if err != nil || !strings.Contains(out.String(), "13 calls, all as they must be") {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// TestRegistry: the demo over a registrar and a real etcd: its 13 answers, and a pod that
// goes.
func TestRegistry(t *testing.T) {
	dir := build(t, "aether-proxy", "aether-registrar")
	etcd, err := tool.Etcd.Build(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	err = Run(t.Context(), Options{
		Proxy: filepath.Join(dir, "aether-proxy"), Registry: &Registry{Registrar: filepath.Join(dir, "aether-registrar"), Etcd: etcd}, Out: &out,
	})
	if err != nil || !strings.Contains(out.String(), "14 calls, all as they must be") {
		t.Errorf("%v\n%s", err, out.String())
	}
}
