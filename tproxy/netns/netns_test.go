package netns_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/tproxy/netns"
	"aether/tproxy/netns/netnstest"
)

// here is the calling thread's namespace, as the kernel prints it.
func here(t testing.TB) string {
	s, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Error(err)
	}
	return s
}

// strays lists the threads of the process that are in ns.
func strays(ns *netns.NS) (tids []string) {
	tasks, _ := filepath.Glob("/proc/self/task/*/ns/net")
	for _, p := range tasks {
		if s, err := os.Readlink(p); err == nil && s == ns.ID().String() {
			tids = append(tids, strings.Split(p, "/")[4])
		}
	}
	return tids
}

// eventually waits, without a clock of its own, for what the kernel does in its
// own time.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestOpen(t *testing.T) {
	ns := netnstest.New(t)
	plain := filepath.Join(t.TempDir(), "pin")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		path string
		gone bool
		want string
	}{
		{filepath.Join(t.TempDir(), "nothing"), true, "the network namespace is gone"},
		{plain, true, "the network namespace is gone"}, // what is left when a pin is unmounted
		{"/proc/self/ns/mnt", false, "another kind"},
		{filepath.Join(plain, "x"), false, "not a directory"},
	} {
		n, err := netns.Open(tt.path)
		if err == nil {
			n.Close()
			t.Errorf("%s: opened", tt.path)
			continue
		}
		if errors.Is(err, netns.ErrGone) != tt.gone || errors.Is(err, fs.ErrNotExist) != tt.gone ||
			!strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), tt.path) {
			t.Errorf("%s: %v", tt.path, err)
		}
	}

	again, err := netns.Open(ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	if again.ID() != ns.ID() {
		t.Errorf("opened twice: %v and %v", again.ID(), ns.ID())
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
	if err := again.Enter(); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("Enter after Close: %v", err)
	}
	if other := netnstest.New(t); other.ID() == ns.ID() {
		t.Error("two namespaces have one identity")
	}
}

func TestDo(t *testing.T) {
	ns, home := netnstest.New(t), here(t)
	wrong := errors.New("wrong")
	err := netns.Do(ns, func() error {
		if got := here(t); got != ns.ID().String() {
			t.Errorf("in %s, want %s", got, ns.ID())
		}
		return wrong
	})
	if err != wrong {
		t.Errorf("error %v, want the function's own", err)
	}
	if got := here(t); got != home {
		t.Errorf("the caller is now in %s, was in %s", got, home)
	}
}

func TestDoBringsEveryThreadHome(t *testing.T) {
	spaces := []*netns.NS{netnstest.New(t), netnstest.New(t), netnstest.New(t)}
	var wg sync.WaitGroup
	for i := range 300 {
		wg.Go(func() {
			ns := spaces[i%len(spaces)]
			if err := netns.Do(ns, func() error {
				runtime.Gosched()
				if got := here(t); got != ns.ID().String() {
					return fmt.Errorf("in %s, want %s", got, ns.ID())
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, ns := range spaces {
		if s := strays(ns); len(s) != 0 {
			t.Errorf("threads %v stayed in %s", s, ns)
		}
	}
}

func TestDoOfAVanishedPath(t *testing.T) {
	ns, other := netnstest.New(t), netnstest.New(t)
	pin := filepath.Join(t.TempDir(), "pin") // a link does what a bind mount does here
	if err := os.Symlink(ns.Path(), pin); err != nil {
		t.Fatal(err)
	}
	n, err := netns.Open(pin)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if err := n.Check(); err != nil {
		t.Fatal(err)
	}
	never := func() error { t.Error("the function ran"); return nil }
	os.Remove(pin)
	if err := netns.Do(n, never); !errors.Is(err, netns.ErrGone) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no path: %v", err)
	}
	if err := os.Symlink(other.Path(), pin); err != nil {
		t.Fatal(err)
	}
	if err := netns.Do(n, never); !errors.Is(err, netns.ErrGone) || !strings.Contains(err.Error(), pin) {
		t.Errorf("the path of another namespace: %v", err)
	}
}

func TestDoWhenTheFunctionDoesNotReturn(t *testing.T) {
	ns := netnstest.New(t)
	err := netns.Do(ns, func() error { runtime.Goexit(); return nil })
	if err == nil || !strings.Contains(err.Error(), "ended its goroutine") {
		t.Errorf("Goexit: %v", err)
	}
	func() {
		defer func() {
			if p, _ := recover().(string); !strings.Contains(p, "boom") || !strings.Contains(p, "netns_test.go") {
				t.Errorf("panic: %v", p)
			}
		}()
		netns.Do(ns, func() error { panic("boom") })
	}()
	eventually(t, "both threads end", func() bool {
		s := strays(ns)
		return len(s) == 0 || len(s) == 1 && s[0] == fmt.Sprint(os.Getpid()) // the first thread cannot end
	})
}

// A thread that cannot come home is thrown away, and the caller is none the wiser.
func TestDoWhenTheThreadCannotReturn(t *testing.T) {
	ns := netnstest.New(t)
	for tid := 0; tid == 0; {
		if err := netns.Do(ns, func() error {
			if unix.Gettid() == os.Getpid() {
				return nil // the process's first thread never ends: take another
			}
			tid = unix.Gettid()
			// Capabilities are a thread's own. Without this one setns fails.
			h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var d [2]unix.CapUserData
			if err := unix.Capget(&h, &d[0]); err != nil {
				return err
			}
			d[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
			return unix.Capset(&h, &d[0])
		}); err != nil {
			t.Fatal(err)
		}
		if tid == 0 {
			continue
		}
		eventually(t, "the thread ends", func() bool {
			return errors.Is(unix.Tgkill(os.Getpid(), tid, 0), unix.ESRCH)
		})
	}
	if err := netns.Do(ns, func() error { return nil }); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

func TestHasIPv6(t *testing.T) {
	ns := netnstest.New(t)
	for _, want := range []bool{true, false, true} {
		off := "1"
		if want {
			off = "0"
		}
		netnstest.Sysctl(t, ns, "net/ipv6/conf/all/disable_ipv6", off)
		netnstest.Do(t, ns, func() error {
			if got := netns.HasIPv6(); got != want {
				t.Errorf("all.disable_ipv6 = %s: HasIPv6 is %v", off, got)
			}
			return nil
		})
	}
}
