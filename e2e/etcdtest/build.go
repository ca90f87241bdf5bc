package etcdtest

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
	"sync"

	"golang.org/x/sys/unix"

	"aether/e2e/rig"
)

// pkg is the server's main package.
const pkg = "go.etcd.io/etcd/server/v3"

var bin struct {
	mu   sync.Mutex
	path string // empty: not found or built yet
}

// binary is the path of etcd: AETHER_ETCD of the environment, or the one kept in the
// user's cache directory, which is built the first time. Safe to call from several
// goroutines and processes at once.
func binary(ctx context.Context) (string, error) {
	bin.mu.Lock()
	defer bin.mu.Unlock()
	if bin.path != "" {
		return bin.path, nil
	}
	if p := os.Getenv("AETHER_ETCD"); p != "" {
		bin.path = p
		return p, nil
	}
	p, err := keep(ctx)
	if err != nil {
		return "", fmt.Errorf("etcdtest: build etcd: %w; set AETHER_ETCD to a binary of the version in e2e/etcdtest/testdata/etcd/go.mod", err)
	}
	bin.path = p
	return p, nil
}

// keep builds the binary unless it is there, in a directory that is named by all it is made from.
func keep(ctx context.Context) (string, error) {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "aether").Output()
	if err != nil {
		return "", fmt.Errorf("where this module is: %w", err)
	}
	dir := filepath.Join(strings.TrimSpace(string(root)), "e2e", "etcdtest", "testdata", "etcd")
	sum := sha256.New()
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
	home := filepath.Join(cache, "aether", fmt.Sprintf("etcd-%.8x-%s", sum.Sum(nil), runtime.Version()))
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
	out := filepath.Join(home, "etcd")
	if _, err := os.Stat(out); !errors.Is(err, fs.ErrNotExist) {
		return out, err
	}
	tmp := out + ".new" // it appears whole or not at all
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", tmp, pkg)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=readonly -buildvcs=false", "GOWORK=off", "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, b)
	}
	return out, os.Rename(tmp, out)
}
