//go:build race

package reactor

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"unsafe"
)

// Of the process that is to die of it.
var (
	owned []byte
	wide  *[1 << 17]uint64
)

// TestCheckptr: a build with the race detector checks what is done with unsafe pointers too
// (cmd/compile turns -d=checkptr on with -race), so the tests of every package that holds
// unsafe code run checked. A pointer that reaches beyond its allocation ends the process.
func TestCheckptr(t *testing.T) {
	const env = "AETHER_REACTOR_BEYOND"
	if os.Getenv(env) != "" {
		owned = make([]byte, 64) // on the heap
		wide = (*[1 << 17]uint64)(unsafe.Pointer(&owned[0]))
		return
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "-test.run=^TestCheckptr$")
	cmd.Env = append(os.Environ(), env+"=1")
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "checkptr") {
		t.Errorf("a pointer beyond its allocation: %v; the process said:\n%s", err, out)
	}
}
