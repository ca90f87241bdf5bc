package registrypb

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// What is committed is what the .proto files say.
func TestGenerated(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command("./generate.sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("generate.sh: %v\n%s", err, out)
	}
	made, err := filepath.Glob(filepath.Join(dir, "controlplane/registrypb/*.pb.go"))
	if err != nil || len(made) != 3 {
		t.Fatalf("made %v, %v; want three files", made, err)
	}
	for _, name := range made {
		want, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		have, err := os.ReadFile(filepath.Base(name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(have, want) {
			t.Errorf("%s is not what the .proto files give: run go generate ./controlplane/registrypb", filepath.Base(name))
		}
	}
}
