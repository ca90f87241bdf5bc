// Package listen owns the listening sockets of the pods of a node, and hands
// them to the process that takes this one's place.
//
//   - A socket is known by pod and role, and is opened or, after a hand-over,
//     inherited: whoever asks for it cannot tell the difference.
//   - Adding or removing a pod touches no other pod's sockets.
//   - The owner alone closes a listening socket. Who serves one takes it out of
//     its event loop before it is released.
//
// It knows nothing of connections, and accepts none.
package listen

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"aether/dataplane/model"
	"aether/tproxy/netns"
	"aether/tproxy/socket"
)

// Role is what a listening socket of a pod is for (contract 2). Closed set.
type Role uint8

// The roles.
const (
	Capture Role = iota + 1 // [::]:18001, transparent, both families: diverted connections
	Proxy                   // 127.0.0.1:18081: the HTTP proxy port
	Proxy6                  // [::1]:18081: the same; not there without IPv6
	Mesh                    // [::]:18008, both families: mTLS from other pods
	Admin                   // of no pod (its container is empty): the node's admin
)

var roleNames = [...]string{Capture: "capture", Proxy: "proxy", Proxy6: "proxy6", Mesh: "mesh", Admin: "admin"}

// String is the role's name, as it stands in a hand-over and in messages.
func (r Role) String() string {
	if r.valid() {
		return roleNames[r]
	}
	return fmt.Sprintf("role(%d)", uint8(r))
}

func (r Role) valid() bool { return r >= Capture && r <= Admin }

// ParseRole is the reverse of String.
func ParseRole(s string) (Role, error) {
	for r := Capture; r <= Admin; r++ {
		if roleNames[r] == s {
			return r, nil
		}
	}
	return 0, fmt.Errorf("listen: %q is no role; the roles are %q", s, roleNames[Capture:])
}

// specs is how each role's socket is made.
var specs = [...]socket.Spec{
	Capture: {Addr: netip.AddrPortFrom(netip.IPv6Unspecified(), model.PortCapture), Transparent: true, DualStack: true},
	Proxy:   {Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), model.PortProxy)},
	Proxy6:  {Addr: netip.AddrPortFrom(netip.IPv6Loopback(), model.PortProxy)},
	Mesh:    {Addr: netip.AddrPortFrom(netip.IPv6Unspecified(), model.PortMesh), DualStack: true},
}

// Key names a listening socket: the pod's container ID and the role.
type Key struct {
	Container string
	Role      Role
}

// String is container/role.
func (k Key) String() string { return k.Container + "/" + k.Role.String() }

// Owner holds the sockets. The zero value is ready to use. Safe for concurrent
// use: what goes on for one key holds up no other key.
type Owner struct {
	mu      sync.Mutex
	sockets map[Key]*entry
}

// entry is one socket. mu is held while it is being opened or closed, and is
// taken without Owner.mu.
type entry struct {
	mu        sync.Mutex
	fd        int // -1: not open yet
	inherited bool
	dead      bool // out of the map: look the key up again
}

// entry returns the key's entry, making it if make is set; nil: there is none.
func (o *Owner) entry(k Key, make bool) *entry {
	o.mu.Lock()
	defer o.mu.Unlock()
	e := o.sockets[k]
	if e == nil && make {
		if o.sockets == nil {
			o.sockets = map[Key]*entry{}
		}
		e = &entry{fd: -1}
		o.sockets[k] = e
	}
	return e
}

// locked returns the key's entry, making it if need be, with its lock held.
func (o *Owner) locked(k Key) *entry {
	for {
		e := o.entry(k, true)
		e.mu.Lock()
		if !e.dead {
			return e
		}
		e.mu.Unlock() // released while we waited for it
	}
}

// drop takes e, which is locked, out of the map.
func (o *Owner) drop(k Key, e *entry) {
	e.dead = true
	o.mu.Lock()
	if o.sockets[k] == e {
		delete(o.sockets, k)
	}
	o.mu.Unlock()
}

// Inherit gives the owner a listening socket that an earlier process handed
// over. The owner closes fd from now on, even when Inherit fails: a descriptor
// that is no listening socket, an unknown role, or a key that has a socket.
func (o *Owner) Inherit(k Key, fd int) error {
	err := inheritable(k, fd)
	if err == nil {
		e := o.locked(k)
		defer e.mu.Unlock()
		if e.fd < 0 {
			e.fd, e.inherited = fd, true
			return nil
		}
		err = errors.New("there is one already")
	}
	unix.Close(fd)
	return fmt.Errorf("listen: inherit %s: %w", k, err)
}

func inheritable(k Key, fd int) error {
	if !k.Role.valid() {
		return errors.New("unknown role")
	}
	on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil {
		return fmt.Errorf("descriptor %d: %w", fd, err)
	}
	if on == 0 {
		return fmt.Errorf("descriptor %d is not listening", fd)
	}
	// Descriptors that come over a Unix socket may carry neither.
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		return fmt.Errorf("descriptor %d: set non-blocking: %w", fd, err)
	}
	return nil
}

// Get returns the key's socket: the one it has, and whether that was inherited,
// or else what open makes, whose owner becomes the Owner. Of several calls at
// once for a key one opens and the others wait for it. open's error leaves the
// key without a socket.
func (o *Owner) Get(k Key, open func() (fd int, err error)) (fd int, inherited bool, err error) {
	fd, inherited, _, err = o.get(k, open)
	return fd, inherited, err
}

// get is Get; opened says whether open was what made the socket.
func (o *Owner) get(k Key, open func() (int, error)) (fd int, inherited, opened bool, err error) {
	e := o.locked(k)
	defer e.mu.Unlock()
	if e.fd >= 0 {
		return e.fd, e.inherited, false, nil
	}
	if fd, err = open(); err != nil {
		o.drop(k, e)
		return -1, false, false, err
	}
	e.fd = fd
	return fd, false, true, nil
}

// Release closes the key's socket. Connections that wait to be accepted are
// reset. It is no error when there is none.
func (o *Owner) Release(k Key) error {
	e := o.entry(k, false)
	if e == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dead {
		return nil
	}
	o.drop(k, e)
	if e.fd < 0 {
		return nil
	}
	if err := unix.Close(e.fd); err != nil {
		return fmt.Errorf("listen: close %s: %w", k, err)
	}
	return nil
}

// ReleasePod releases every socket of a pod.
func (o *Owner) ReleasePod(container string) error {
	var errs error
	for r := Capture; r <= Mesh; r++ {
		errs = errors.Join(errs, o.Release(Key{container, r}))
	}
	return errs
}

// Close releases every socket.
func (o *Owner) Close() error {
	var errs error
	for _, k := range o.Keys() {
		errs = errors.Join(errs, o.Release(k))
	}
	return errs
}

// Keys lists the sockets there are, by container and role. After a hand-over
// these may be of pods that have since ended: release what has no pod.
func (o *Owner) Keys() []Key {
	o.mu.Lock()
	keys := make([]Key, 0, len(o.sockets))
	for k := range o.sockets {
		keys = append(keys, k)
	}
	o.mu.Unlock()
	// One that is only being opened has no socket yet, and may never have.
	keys = slices.DeleteFunc(keys, func(k Key) bool {
		_, ok := o.Export(k)
		return !ok
	})
	slices.SortFunc(keys, func(a, b Key) int {
		return cmp.Or(cmp.Compare(a.Container, b.Container), cmp.Compare(a.Role, b.Role))
	})
	return keys
}

// Export returns the key's socket for a hand-over. It stays the owner's: send a
// copy. ok is false when there is none.
func (o *Owner) Export(k Key) (fd int, ok bool) {
	e := o.entry(k, false)
	if e == nil {
		return -1, false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dead || e.fd < 0 {
		return -1, false
	}
	return e.fd, true
}

// Set is a pod's listening sockets. They are the Owner's. Proxy6 is -1 where the
// pod's namespace has no IPv6.
type Set struct{ Capture, Proxy, Proxy6, Mesh int }

// OpenPod returns all sockets of the pod with that container ID, whose network
// namespace is ns, opening those it does not have. When one cannot be opened,
// those that this call opened are closed again. The error is netns.ErrGone when
// the namespace has vanished, and EADDRINUSE when an application in the pod holds
// one of the ports. An inherited socket of another namespace is replaced.
func (o *Owner) OpenPod(ns *netns.NS, container string) (Set, error) {
	fail := func(err error) (Set, error) {
		return Set{}, fmt.Errorf("listen: pod %s: %w", container, err)
	}
	hasIPv6 := false
	if err := netns.Do(ns, func() error { hasIPv6 = netns.HasIPv6(); return nil }); err != nil {
		return fail(err)
	}
	set := Set{Capture: -1, Proxy: -1, Proxy6: -1, Mesh: -1}
	place := [...]*int{Capture: &set.Capture, Proxy: &set.Proxy, Proxy6: &set.Proxy6, Mesh: &set.Mesh}
	var opened []Key
	var err error
	for r := Capture; r <= Mesh && err == nil; r++ {
		if r == Proxy6 && !hasIPv6 {
			continue
		}
		k := Key{container, r}
		var isNew bool
		*place[r], isNew, err = o.openOne(ns, k)
		if isNew {
			opened = append(opened, k)
		}
	}
	if err == nil {
		// A namespace may vanish while we are in it: then the sockets would be its last.
		err = ns.Check()
	}
	if err != nil {
		for _, k := range opened {
			err = errors.Join(err, o.Release(k))
		}
		return fail(err)
	}
	return set, nil
}

// openOne returns the key's socket, and whether it was opened just now.
func (o *Owner) openOne(ns *netns.NS, k Key) (fd int, opened bool, err error) {
	open := func() (int, error) { return socket.Listen(ns, specs[k.Role]) }
	fd, inherited, opened, err := o.get(k, open)
	if err != nil || !inherited {
		return fd, opened, err
	}
	id, err := socket.Namespace(fd)
	if err != nil || id == ns.ID() {
		return fd, false, err
	}
	if err := o.Release(k); err != nil {
		return -1, false, err
	}
	fd, _, opened, err = o.get(k, open)
	return fd, opened, err
}
