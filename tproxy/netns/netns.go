// Package netns opens network namespaces and runs code inside them.
//
//   - A namespace is opened once, by path, and is known by its device and inode
//     from then on: a path that is later reused never leads to another pod.
//   - No thread of the Go scheduler ever runs ordinary goroutines in a foreign
//     namespace: a thread that cannot be brought back is thrown away.
//   - A namespace that went away is an ordinary event (pods end), so it has an
//     error of its own, ErrGone.
//
// It knows nothing of pods, sockets or rules.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// ErrGone: the path no longer leads to the network namespace (the pod ended, or
// its pin was taken away). It is also fs.ErrNotExist. Retrying does not help:
// wait for the pod's removal.
var ErrGone = fmt.Errorf("the network namespace is gone: %w", fs.ErrNotExist)

// ID is the identity of a namespace on this machine: the device and inode of its
// nsfs file (namespaces(7)). No two living namespaces share it; one that has
// ended may bequeath it. Comparable.
type ID struct{ Dev, Inode uint64 }

// String is the form of `readlink /proc/PID/ns/net`: net:[4026531840].
func (id ID) String() string { return fmt.Sprintf("net:[%d]", id.Inode) }

// NS is an open network namespace. While it is open the kernel keeps the
// namespace alive, even after its pod has ended: close it with the pod.
// Safe for concurrent use; a method called during or after Close fails.
type NS struct {
	f    *os.File
	path string
	id   ID
}

// Open opens the namespace at path (a pin, or /proc/PID/ns/net). It returns
// ErrGone when nothing is there, or only the plain file that a pin leaves behind
// once it has been unmounted.
func Open(path string) (*NS, error) {
	f, err := os.Open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("netns: open %s: %w", path, ErrGone)
	case err != nil:
		return nil, fmt.Errorf("netns: open: %w", err)
	}
	n := &NS{f: f, path: path}
	var st unix.Stat_t
	var kind int
	err = n.control(func(fd int) (err error) {
		var sfs unix.Statfs_t
		if err = unix.Fstatfs(fd, &sfs); err != nil {
			return err
		}
		if sfs.Type != unix.NSFS_MAGIC {
			return fmt.Errorf("it is no namespace file any more: %w", ErrGone)
		}
		// The ioctl's answer is its return value, which is what IoctlRetInt gives.
		if kind, err = unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE); err != nil {
			return err
		}
		return unix.Fstat(fd, &st)
	})
	if err == nil && kind != unix.CLONE_NEWNET {
		err = errors.New("it is a namespace of another kind; give a network namespace")
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("netns: open %s: %w", path, err)
	}
	n.id = idOf(&st)
	return n, nil
}

func idOf(st *unix.Stat_t) ID { return ID{uint64(st.Dev), uint64(st.Ino)} }

// IDOf returns the identity of the namespace that the open nsfs file fd stands
// for. fd stays the caller's.
func IDOf(fd int) (ID, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return ID{}, fmt.Errorf("netns: identity of descriptor %d: %w", fd, err)
	}
	return idOf(&st), nil
}

// control runs fn with n's descriptor, which cannot be closed meanwhile.
func (n *NS) control(fn func(fd int) error) error {
	rc, err := n.f.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if rc.Control(func(fd uintptr) { ferr = fn(int(fd)) }) != nil {
		return fs.ErrClosed // all that Control can fail of, in an error of its own
	}
	return ferr
}

// Path is what Open was given.
func (n *NS) Path() string { return n.path }

// ID is the namespace's identity.
func (n *NS) ID() ID { return n.id }

// String names the namespace in messages.
func (n *NS) String() string { return n.path + " " + n.id.String() }

// Close lets go of the namespace. What was opened in it stays open.
func (n *NS) Close() error { return n.f.Close() }

// Check returns ErrGone when n's path does not lead to n's namespace any more,
// nil when it does.
func (n *NS) Check() error {
	var st unix.Stat_t
	switch err := unix.Stat(n.path, &st); {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("netns: %s: %w", n, ErrGone)
	case err != nil:
		return fmt.Errorf("netns: %s: stat: %w", n, err)
	case idOf(&st) != n.id:
		return fmt.Errorf("netns: %s: the path now leads elsewhere: %w", n, ErrGone)
	}
	return nil
}

// Enter moves the calling thread into n. The caller has locked its goroutine to
// the thread, and either brings the thread home with Home.Restore or lets the
// goroutine end without unlocking, which ends the thread. Most callers want Do.
func (n *NS) Enter() error {
	err := n.control(func(fd int) error { return unix.Setns(fd, unix.CLONE_NEWNET) })
	if err != nil {
		return fmt.Errorf("netns: enter %s: %w%s", n, err, capHint(err))
	}
	return nil
}

// capHint names the missing privilege where err is for want of one.
func capHint(err error) string {
	if errors.Is(err, fs.ErrPermission) {
		return " (needs CAP_SYS_ADMIN)"
	}
	return ""
}

// Home is the namespace a thread is in when it is taken.
type Home struct{ f *os.File }

// Here opens the calling thread's namespace, to come back to.
func Here() (*Home, error) {
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("netns: open the thread's own namespace: %w", err)
	}
	return &Home{f}, nil
}

// Restore moves the calling thread back to h. After an error the thread must not
// be given back to the scheduler: the goroutine ends without unlocking it.
func (h *Home) Restore() error {
	if err := unix.Setns(int(h.f.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("netns: return to the thread's own namespace: %w", err)
	}
	return nil
}

// Close closes the handle.
func (h *Home) Close() error { return h.f.Close() }

// Do runs fn on a thread that is in ns, waits for it and returns its error. Only
// system calls made by fn's own goroutine are made in ns: a goroutine that fn
// starts, and so a dial that races addresses, is not. Sockets made by fn stay in
// ns for good; processes that fn starts live there too. A panic of fn goes on in
// the caller. Do returns ErrGone without running fn when ns's path has vanished.
// Safe for concurrent use.
func Do(ns *NS, fn func() error) error {
	if err := ns.Check(); err != nil {
		return err
	}
	type outcome struct {
		err   error
		panic string // value and stack of fn's panic; empty: none
	}
	done := make(chan outcome, 1)
	go func() {
		// Locked and, unless everything went well, never unlocked: the runtime then
		// ends the thread with the goroutine, rather than reuse it in the wrong place.
		runtime.LockOSThread()
		out := outcome{err: fmt.Errorf("netns: in %s: the function ended its goroutine instead of returning", ns)}
		defer func() {
			if p := recover(); p != nil {
				out.panic = fmt.Sprintf("netns: in %s: %v\n%s", ns, p, debug.Stack())
			}
			done <- out
		}()
		home, err := Here()
		if err == nil {
			defer home.Close()
			err = ns.Enter()
		}
		if err != nil {
			runtime.UnlockOSThread() // it has not moved
			out.err = err
			return
		}
		err = fn()
		back := home.Restore()
		if back == nil {
			runtime.UnlockOSThread()
		}
		// fn's work is done and a lost thread harms nobody: not an error of fn's caller.
		out.err = err
	}()
	out := <-done
	if out.panic != "" {
		panic(out.panic)
	}
	return out.err
}

// Addresses are those that n's interfaces have at the moment, loopback's among them; IPv4 ones are plain, and
// zones are left out. One that is still looked for twice on its link (RFC 4862 5.4) is there.
func (n *NS) Addresses() (out []netip.Addr, err error) {
	err = Do(n, func() error {
		list, err := net.InterfaceAddrs() // by netlink, in the calling thread
		if err != nil {
			return fmt.Errorf("netns: addresses of %s: %w", n, err)
		}
		for _, a := range list {
			if p, ok := a.(*net.IPNet); ok {
				if ip, ok := netip.AddrFromSlice(p.IP); ok {
					out = append(out, ip.Unmap())
				}
			}
		}
		return nil
	})
	return out, err
}

// HasIPv6 reports whether the calling thread's namespace has IPv6: the kernel
// knows it and it is not disabled on the loopback interface, which is where ::1
// and the diverting route live.
func HasIPv6() bool {
	b, err := os.ReadFile("/proc/sys/net/ipv6/conf/lo/disable_ipv6")
	return err == nil && len(b) > 0 && b[0] == '0'
}
