package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// disk gives the last good states a small disk of their own.
func (w *world) disk() {
	dir := w.LastGoodDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=512k"); err != nil {
		w.t.Fatal("mount (the tests run as root): ", err)
	}
	w.OnClose(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil { // processes have it open
			w.t.Errorf("unmount: %v", err)
		}
	})
}

func (w *world) ballast() string { return filepath.Join(w.LastGoodDir(), "ballast") }

// diskFull: the last good state cannot be written from now on. What changes next is the
// next faults'.
func diskFull(w *world) {
	f, err := os.Create(w.ballast())
	w.must(err)
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if !errors.Is(err, unix.ENOSPC) {
		w.t.Fatal(err)
	}
}

// awaitFull returns once every node says that its last good state cannot be kept, or
// does not say so.
func (w *world) awaitFull(full bool) {
	w.t.Helper()
	for node := range w.Rig.Nodes {
		w.must(rig.Until(w.ctx, func(ctx context.Context) error {
			s, err := w.Status(ctx, node)
			if err != nil {
				return err
			}
			if told := slices.ContainsFunc(s.Problems, func(p mesh.Problem) bool {
				return p.Object == "last good state" && strings.Contains(p.Reason, "no space left")
			}); told != full {
				return fmt.Errorf("node %d: that its disk is full is told: %t", node+1, told)
			}
			return nil
		}))
	}
}

// diskFullTold: every node says so; it is requests that go on meanwhile.
func diskFullTold(w *world) {
	l := w.begin()
	w.awaitFull(true)
	l.more(rps)
	l.check("the disk is full")
	w.must(os.Remove(w.ballast()))
}

// diskMended: once there is room it is written, and nothing is said any more.
func diskMended(w *world) {
	l := w.begin()
	w.awaitFull(false)
	for _, n := range w.Rig.Nodes {
		if f, err := os.Stat(filepath.Join(w.LastGoodDir(), n.Name)); err != nil || f.Size() == 0 {
			w.t.Errorf("the last good state of %s: %v, %v", n.Name, f, err)
		}
	}
	l.more(rps)
	l.check("the disk has room again")
}
