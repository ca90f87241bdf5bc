// Package tool builds programs that tests run, from modules that pin them: a module of
// each keeps what it needs out of the proxy's own go.mod. A binary is built once and
// kept in the user's cache directory.
//
//   - A binary is there whole or not at all, and its directory is named by all that it is made from.
//   - Of several processes that want it one builds, the others wait for it.
//
// It knows nothing of what the programs do.
package tool

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"aether/e2e/rig"
)

// Tool is a program and the module that pins it.
type Tool struct {
	Name    string // of the binary
	Env     string // variable of the environment that names another binary to use; empty: there is none
	Module  string // directory of its go.mod and go.sum, below the root of this module
	Package string // main package
	LDFlags string // beside -s -w
}

// Build is the path of the tool's binary: that of the environment, or the one in the
// cache directory, which is built unless it is there. Safe for concurrent use, by
// several processes too.
func (t Tool) Build(ctx context.Context) (string, error) {
	if t.Env != "" {
		if p := os.Getenv(t.Env); p != "" {
			return p, nil
		}
	}
	path, err := t.keep(ctx)
	switch {
	case err != nil && t.Env != "":
		return "", fmt.Errorf("build %s: %w; or set %s to a binary of the version in %s/go.mod", t.Name, err, t.Env, t.Module)
	case err != nil:
		return "", fmt.Errorf("build %s: %w", t.Name, err)
	}
	return path, nil
}

func (t Tool) keep(ctx context.Context) (string, error) {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "aether").Output()
	if err != nil {
		return "", fmt.Errorf("where this module is: %w", err)
	}
	dir := filepath.Join(strings.TrimSpace(string(root)), filepath.FromSlash(t.Module))
	sum := sha256.New()
	fmt.Fprintf(sum, "%q %q\n", t.Package, t.LDFlags)
	for _, name := range []string{"go.mod", "go.sum"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "", err
		}
		sum.Write(b)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	home := filepath.Join(cache, "aether", fmt.Sprintf("%s-%.8x-%s", t.Name, sum.Sum(nil), runtime.Version()))
	if err := os.MkdirAll(home, 0o755); err != nil {
		return "", err
	}
	lock, err := os.Open(home)
	if err != nil {
		return "", err
	}
	defer lock.Close() // and with it the lock
	if err := rig.Until(ctx, func(context.Context) error {
		return unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}); err != nil {
		return "", fmt.Errorf("another process builds it too: %w", err)
	}
	out := filepath.Join(home, t.Name)
	if _, err := os.Stat(out); !errors.Is(err, fs.ErrNotExist) {
		return out, err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w "+t.LDFlags, "-o", out+".new", t.Package)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=readonly -buildvcs=false", "GOWORK=off", "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build in %s: %w\n%s", t.Module, err, b)
	}
	return out, os.Rename(out+".new", out)
}
