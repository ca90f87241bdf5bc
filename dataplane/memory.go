package dataplane

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
)

// cgroupShare is the part of a control group's limit that the node works with, in hundredths: the
// rest is for what the Go runtime does not count, and for the moment between a measurement and
// the next.
const cgroupShare = 90

// MemoryLimit decides how many bytes of memory the node may use, and tells the
// runtime, whose collector works harder as they are neared. want > 0 is what the
// user says; else it is GOMEMLIMIT, else nine tenths of the control group's limit.
// 0: there is no limit. from says in a word where it comes from. root is "/", but in tests.
func MemoryLimit(want int64, root string) (limit int64, from string) {
	switch soft := debug.SetMemoryLimit(-1); {
	case want > 0:
		limit, from = want, "flag"
	case soft < math.MaxInt64:
		return soft, "GOMEMLIMIT"
	default:
		if limit = cgroupLimit(root) / 100 * cgroupShare; limit <= 0 {
			return 0, "none"
		}
		from = "cgroup"
	}
	debug.SetMemoryLimit(limit)
	return limit, from
}

// cgroupLimit is the least memory.max of the process's control group and those above it
// (cgroup v2), or its memory.limit_in_bytes (v1); 0: none.
func cgroupLimit(root string) int64 {
	self, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return 0
	}
	least := int64(math.MaxInt64)
	take := func(file string) {
		b, err := os.ReadFile(file)
		if err != nil {
			return
		}
		// "max", and v1's largest page count, say that there is none.
		if n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64); err == nil && n > 0 && n < 1<<62 {
			least = min(least, n)
		}
	}
	for line := range strings.Lines(string(self)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) != 3 {
			continue
		}
		switch {
		case part[0] == "0" && part[1] == "":
			top := filepath.Join(root, "sys/fs/cgroup")
			for dir := filepath.Join(top, part[2]); strings.HasPrefix(dir, top); dir = filepath.Dir(dir) {
				take(filepath.Join(dir, "memory.max"))
			}
		case part[1] == "memory":
			top := filepath.Join(root, "sys/fs/cgroup/memory")
			take(filepath.Join(top, part[2], "memory.limit_in_bytes"))
			take(filepath.Join(top, "memory.limit_in_bytes")) // in a container the path is the host's
		}
	}
	if least == math.MaxInt64 {
		return 0
	}
	return least
}

// ParseBytes reads a size: a number of bytes, or with a unit of KiB, MiB or GiB. Empty is 0.
func ParseBytes(s string) (int64, error) {
	number, unit := s, int64(1)
	for suffix, u := range map[string]int64{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30} {
		if n, ok := strings.CutSuffix(s, suffix); ok {
			number, unit = n, u
		}
	}
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64/unit {
		return 0, fmt.Errorf("%q is no size: write it as 402653184 or 384MiB", s)
	}
	return n * unit, nil
}
