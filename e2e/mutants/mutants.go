// Package mutants proves that the properties of the decision core are tested: for
// each there is a deliberate break of one line, and a test that must then fail.
//
//   - A break is a piece of text of one file and what stands there instead. The
//     text must occur once, so that a list gone stale is an error, not a pass.
//   - Nothing in the tree is changed: the compiler is given the broken file by
//     -overlay.
//   - A break that does not compile proves nothing and is an error, and so is one
//     whose tests cannot be run.
package mutants

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Mutant is one break.
type Mutant struct {
	Property string // the sentence it breaks
	File     string // below the module's root
	Old, New string
	Package  string // whose tests must notice: "./dataplane/decide"
	Run      string // which of them, as go test -run
}

// Outcome of a mutant.
type Outcome uint8

// The outcomes.
const (
	Killed   Outcome = iota + 1 // a test failed, as it must
	Survived                    // every test passed: the property is not tested
)

// Apply is the file's text with the break in it.
func (m *Mutant) Apply(text string) (string, error) {
	switch n := strings.Count(text, m.Old); {
	case m.Old == m.New:
		return "", fmt.Errorf("%s: the break changes nothing", m.File)
	case n != 1:
		return "", fmt.Errorf("%s: the text to break stands there %d times, it must be once: bring the list up to date:\n%s", m.File, n, m.Old)
	}
	return strings.Replace(text, m.Old, m.New, 1), nil
}

// Try runs the tests of m against the broken file. root is the module's
// directory, tmp one of the caller's. output is what the tests printed.
func (m *Mutant) Try(ctx context.Context, root, tmp string) (o Outcome, output string, err error) {
	path := filepath.Join(root, m.File)
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, "", err
	}
	broken, err := m.Apply(string(text))
	if err != nil {
		return 0, "", err
	}
	file := filepath.Join(tmp, "broken.go")
	if err := os.WriteFile(file, []byte(broken), 0o644); err != nil {
		return 0, "", err
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {path: file}})
	if err != nil {
		return 0, "", err
	}
	list := filepath.Join(tmp, "overlay.json")
	if err := os.WriteFile(list, overlay, 0o644); err != nil {
		return 0, "", err
	}
	run := func(args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = root
		b, err := cmd.CombinedOutput()
		return string(b), err
	}
	bin := filepath.Join(tmp, "tests")
	if out, err := run("test", "-c", "-vet=off", "-overlay", list, "-o", bin, m.Package); err != nil {
		return 0, out, fmt.Errorf("the break does not compile: %w", err)
	}
	cmd := exec.CommandContext(ctx, bin, "-test.failfast", "-test.timeout=5m", "-test.run", m.Run)
	cmd.Dir = filepath.Join(root, m.Package)
	b, err := cmd.CombinedOutput()
	output = string(b)
	switch {
	case ctx.Err() != nil:
		return 0, output, context.Cause(ctx)
	case err == nil && strings.Contains(output, "no tests to run"):
		return 0, output, fmt.Errorf("no test of %s is named %s", m.Package, m.Run)
	case err == nil:
		return Survived, output, nil
	case cmd.ProcessState == nil || cmd.ProcessState.ExitCode() < 0:
		return 0, output, err // it did not run, or was killed from outside
	}
	return Killed, output, nil
}
