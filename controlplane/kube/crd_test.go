package kube_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// What is committed is what the Go types say.
func TestGenerated(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command("crd/generate.sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("generate.sh: %v\n%s", err, out)
	}
	made, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(made) != len(ownCRDs(t)) {
		t.Fatalf("made %v, %v", made, err)
	}
	for _, name := range made {
		want, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		have, err := os.ReadFile(filepath.Join("crd", filepath.Base(name)))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(have, want) {
			t.Errorf("crd/%s is not what controlplane/gamma/config.go gives: run controlplane/kube/crd/generate.sh", filepath.Base(name))
		}
	}
}
