package dataplane

import (
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"
)

func TestMemoryLimit(t *testing.T) {
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  int64
	}{
		{"nothing is known", nil, 0},
		{"v2, none", map[string]string{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 0},
		{"v2, its own", map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "1000\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 1000},
		{"v2, of one above", map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "1000\n", "sys/fs/cgroup/a/memory.max": "700\n"}, 700},
		{"v2, a container's root", map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "500\n"}, 500},
		{"v1", map[string]string{"proc/self/cgroup": "4:memory:/docker/x\n0::/\n", "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "900\n"}, 900},
		{"v1 in a container", map[string]string{"proc/self/cgroup": "4:memory:/docker/x\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "800\n"}, 800},
		{"v1, none", map[string]string{"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 0},
		{"not a number", map[string]string{"proc/self/cgroup": "0::/\nx\n", "sys/fs/cgroup/memory.max": "a lot\n"}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := t.TempDir()
			for name, text := range tt.files {
				p := filepath.Join(root, name)
				if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if got := cgroupLimit(root); got != tt.want {
				t.Errorf("%d, want %d", got, tt.want)
			}
		})
	}
}

func TestWhoseMemoryLimitCounts(t *testing.T) {
	was := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(was)
	root := t.TempDir()
	for name, text := range map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "10000000000\n"} {
		p := filepath.Join(root, name)
		os.MkdirAll(filepath.Dir(p), 0o755)
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	debug.SetMemoryLimit(math.MaxInt64)
	if n, from := MemoryLimit(0, t.TempDir()); n != 0 || from != "none" || debug.SetMemoryLimit(-1) != math.MaxInt64 {
		t.Errorf("%d from %s", n, from)
	}
	if n, from := MemoryLimit(0, root); n != 9_000_000_000 || from != "cgroup" || debug.SetMemoryLimit(-1) != n {
		t.Errorf("%d from %s", n, from)
	}
	if n, from := MemoryLimit(5_000_000_000, root); n != 5_000_000_000 || from != "flag" || debug.SetMemoryLimit(-1) != n {
		t.Errorf("%d from %s", n, from)
	}
	debug.SetMemoryLimit(7_000_000_000) // as GOMEMLIMIT does
	if n, from := MemoryLimit(0, root); n != 7_000_000_000 || from != "GOMEMLIMIT" {
		t.Errorf("%d from %s", n, from)
	}
}

func TestParseBytes(t *testing.T) {
	for in, want := range map[string]int64{"": 0, "0": 0, "12345": 12345, "384MiB": 384 << 20, "2GiB": 2 << 30, "1KiB": 1024} {
		if got, err := ParseBytes(in); err != nil || got != want {
			t.Errorf("%q: %d, %v", in, got, err)
		}
	}
	for _, in := range []string{"MiB", "-1", "384M", "1.5GiB", "9223372036854775807KiB", "x"} {
		if got, err := ParseBytes(in); err == nil {
			t.Errorf("%q: %d", in, got)
		}
	}
}
