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

// TestRegistry: the demo over a registrar and a real etcd: its 13 answers, and a pod that
// goes.
func TestRegistry(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("needs root")
	}
	dir := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-o", dir+string(filepath.Separator), "aether/cmd/aether-proxy", "aether/cmd/aether-registrar")
	if b, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
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
