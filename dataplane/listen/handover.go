package listen

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"aether/tproxy/socket"
)

// Times of a hand-over.
const (
	helloTime = 5 * time.Second  // for the first message of whoever connects
	sendTime  = 10 * time.Second // for all sockets to be taken
	readyTime = 2 * time.Minute  // from then until the successor accepts (contract 13.5)
	goneTime  = 10 * time.Second // for the predecessor to stop accepting
	tryAgain  = 100 * time.Millisecond

	maxCallers = 8 // connections at a time to the hand-over socket
	maxRounds  = 3 // hand-overs that are begun anew because the predecessor gave up waiting
)

// Offer hands an Owner's sockets to the process that takes this one's place.
// Make one with NewOffer, and run it with Serve.
type Offer struct {
	o    OfferConfig
	ln   *net.UnixListener
	path string
	file os.FileInfo // of the socket at path

	one sync.Mutex // held while a successor is served
}

// OfferConfig says what is offered, and who is told.
type OfferConfig struct {
	Owner *Owner // required
	// Begin is called when a successor has come. Sockets that are opened from here
	// on do not reach it.
	Begin func()
	// Failed is called when it has gone, for the reason given, without taking over:
	// everything is as before Begin.
	Failed func(error)
	// Taken is called when the successor accepts connections. Once it returns this
	// process accepts none any more.
	Taken func()
}

// NewOffer listens at path, a Unix socket that only this user may use. What was
// at path is replaced.
func NewOffer(path string, o OfferConfig) (*Offer, error) {
	fail := func(err error) (*Offer, error) {
		return nil, fmt.Errorf("listen: hand-over socket %s: %w", path, err)
	}
	// Another name first: what is at path has its mode, and takes connections, from its first moment on.
	tmp := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s.%d", filepath.Base(path), os.Getpid()))
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fail(err)
	}
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: tmp, Net: "unixpacket"})
	if err != nil {
		return fail(err)
	}
	ln.SetUnlinkOnClose(false) // by then the path may be the successor's
	f := &Offer{o: o, ln: ln, path: path}
	if err = os.Chmod(tmp, 0o600); err == nil {
		if f.file, err = os.Lstat(tmp); err == nil {
			err = os.Rename(tmp, path)
		}
	}
	if err != nil {
		ln.Close()
		os.Remove(tmp)
		return fail(err)
	}
	return f, nil
}

// Serve answers successors, one at a time, until one has taken over or ctx ends.
// Then the path is gone, unless it is a successor's. taken says which it was.
func (f *Offer) Serve(ctx context.Context) (taken bool, err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	context.AfterFunc(ctx, func() { f.ln.Close() })
	turns := make(chan struct{}, maxCallers)
	over := make(chan struct{}, maxCallers)
	var wg sync.WaitGroup
	for {
		var c *net.UnixConn
		if c, err = f.ln.AcceptUnix(); err != nil {
			if !short(err) {
				break
			}
			select { // whoever connects waits
			case <-time.After(tryAgain):
			case <-ctx.Done():
			}
			continue
		}
		select {
		case turns <- struct{}{}:
		default: // it finds the line closed, and tries again
			c.Close()
			continue
		}
		wg.Go(func() {
			defer func() { <-turns }()
			hangUp := context.AfterFunc(ctx, func() { c.Close() })
			defer c.Close()
			defer hangUp()
			if f.serve(&line{c: c}) {
				over <- struct{}{}
				stop()
			}
		})
	}
	ended := ctx.Err() != nil
	stop()
	f.ln.Close()
	wg.Wait()
	taken = len(over) > 0
	if !taken {
		if now, lerr := os.Lstat(f.path); lerr == nil && os.SameFile(now, f.file) {
			os.Remove(f.path)
		}
	}
	if ended || taken {
		return taken, nil
	}
	return false, fmt.Errorf("listen: hand-over socket %s: %w", f.path, err)
}

// serve hands over to the process at the other end; it reports whether that
// accepts now.
func (f *Offer) serve(l *line) bool {
	if sameUser(l.c) != nil {
		return false // not even told why
	}
	until := time.Now().Add(helloTime)
	if err := l.expect(hello, until); err != nil {
		_ = l.send(&message{kind: refused, reason: clip(err.Error())}, until)
		return false
	}
	if !f.one.TryLock() {
		_ = l.send(&message{kind: refused, reason: busy}, until)
		return false
	}
	defer f.one.Unlock()
	f.o.Begin()
	err := f.give(l)
	if err == nil {
		err = l.expect(ready, time.Now().Add(readyTime))
	}
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = errors.New("listen: it ended before it accepted connections")
		}
		f.o.Failed(err)
		return false
	}
	f.o.Taken()
	// Whether it hears of it or not: it accepts, and we do not.
	_ = l.send(&message{kind: gone}, time.Now().Add(helloTime))
	return true
}

// short: it is this process, or the machine, that lacks something for the moment, or the caller has gone.
func short(err error) bool {
	for _, e := range []error{unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.ECONNABORTED} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

const busy = "another process is taking the sockets over"

func clip(s string) string { return s[:min(len(s), maxReason)] }

// give sends all sockets there are.
func (f *Offer) give(l *line) error {
	until := time.Now().Add(sendTime)
	keys := f.o.Owner.Keys()
	total := 0
	for len(keys) > 0 && total < maxSockets {
		batch := keys[:min(len(keys), maxBatch, maxSockets-total)]
		keys = keys[len(batch):]
		m := message{kind: sockets}
		var fds []int
		for _, k := range batch {
			if len(k.Container) > maxContainer {
				continue
			}
			if fd, ok := f.o.Owner.dup(k); ok {
				m.names = append(m.names, named{k.Role.String(), k.Container})
				fds = append(fds, fd)
			}
		}
		if len(fds) == 0 {
			continue
		}
		err := l.send(&m, until, fds...)
		closeAll(fds)
		if err != nil {
			return err
		}
		total += len(fds)
	}
	return l.send(&message{kind: end, total: total}, until)
}

// dup returns a copy of the key's socket, which is the caller's; ok is false
// when there is none, or no descriptor is free.
func (o *Owner) dup(k Key) (fd int, ok bool) {
	e := o.entry(k, false)
	if e == nil {
		return -1, false
	}
	e.mu.Lock() // else the descriptor could be closed, and be another's, meanwhile
	defer e.mu.Unlock()
	if e.dead || e.fd < 0 {
		return -1, false
	}
	fd, err := unix.FcntlInt(uintptr(e.fd), unix.F_DUPFD_CLOEXEC, 0)
	return fd, err == nil
}

// ErrNoPredecessor: nobody listens at the path, so there is nobody to take over from.
var ErrNoPredecessor = errors.New("listen: no process hands sockets over there")

// Predecessor is the process whose sockets this one has, and which still accepts
// connections on them until Ready.
type Predecessor struct {
	path string
	l    line

	Sockets int     // inherited
	Left    []error // what became of those that were not: unknown roles, sockets of another kind
}

// TakeOver asks the process that listens at path for its sockets and gives them
// to owner, whose Get and OpenPod then find them. It tries until ctx ends while
// that process hands over to another one, or does not answer. On an error owner
// has none of them. The error is ErrNoPredecessor when there is nobody.
func TakeOver(ctx context.Context, path string, owner *Owner) (*Predecessor, error) {
	var last error // that says more than that the time is over
	for {
		p, err := takeOver(ctx, path, owner)
		var no *Refused
		var ne net.Error
		late := ctx.Err() != nil || errors.As(err, &ne) && ne.Timeout()
		if last == nil || !late {
			last = err
		}
		switch {
		case err == nil:
			return p, nil
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ECONNREFUSED):
			return nil, fmt.Errorf("%w: %s", ErrNoPredecessor, path)
		case errors.As(err, &no) && no.Reason == busy, errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE),
			errors.Is(err, unix.EAGAIN), late:
		default:
			return nil, err
		}
		t := time.NewTimer(tryAgain)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil, fmt.Errorf("listen: the process at %s hands over nothing (%w): end it, or wait for its end: until then its ports cannot be opened (EADDRINUSE)", path, last)
		case <-t.C:
		}
	}
}

func takeOver(ctx context.Context, path string, owner *Owner) (*Predecessor, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, fmt.Errorf("listen: take over from %s: %w", path, err)
	}
	return take(ctx, path, c.(*net.UnixConn), owner)
}

// take asks for the sockets over c, which is closed if they are not had.
func take(ctx context.Context, path string, c conn, owner *Owner) (_ *Predecessor, err error) {
	p := &Predecessor{path: path, l: line{c: c}}
	hangUp := context.AfterFunc(ctx, func() { c.Close() })
	defer hangUp()
	var mine []Key
	defer func() {
		if err != nil {
			c.Close()
			for _, k := range mine {
				err = errors.Join(err, owner.Release(k))
			}
		}
	}()
	if err := sameUser(p.l.c); err != nil {
		return nil, err
	}
	until := time.Now().Add(sendTime)
	if at, ok := ctx.Deadline(); ok && at.Before(until) {
		until = at
	}
	if err := p.l.send(&message{kind: hello}, until); err != nil {
		return nil, err
	}
	for seen := 0; ; {
		m, fds, err := p.l.receive(until)
		if err != nil {
			return nil, err
		}
		switch m.kind {
		case sockets:
			if seen += len(fds); seen > maxSockets {
				closeAll(fds)
				return nil, fmt.Errorf("listen: take over from %s: more than %d sockets: %w", path, maxSockets, errMalformed)
			}
			for i, n := range m.names {
				k, err := owner.adopt(n, fds[i])
				if err != nil {
					p.Left = append(p.Left, err)
					continue
				}
				mine = append(mine, k)
			}
		case end:
			if m.total != seen {
				return nil, fmt.Errorf("listen: take over from %s: %d sockets came of %d: %w", path, seen, m.total, errMalformed)
			}
			p.Sockets = len(mine)
			return p, nil
		default:
			return nil, fmt.Errorf("listen: take over from %s: %s came in place of sockets: %w", path, m.kind, errMalformed)
		}
	}
}

// adopt is Inherit for what came over the line.
func (o *Owner) adopt(n named, fd int) (Key, error) {
	role, err := ParseRole(n.role)
	k := Key{n.container, role}
	if err == nil {
		err = fits(role, fd)
	}
	if err == nil {
		return k, o.Inherit(k, fd)
	}
	unix.Close(fd)
	return k, fmt.Errorf("listen: inherit %s/%s: %w", n.container, n.role, err)
}

// fits is an error when fd is no socket as this process would make it for the role.
func fits(r Role, fd int) error {
	if r == Admin {
		return nil // any address: Owner.Admin looks
	}
	have, err := socket.OrigDst(fd)
	if err != nil {
		return err
	}
	if want := specs[r].Addr.Port(); have.Port() != want {
		return fmt.Errorf("it is bound to port %d, not to %d", have.Port(), want)
	}
	if on, err := unix.GetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT); err != nil || (on != 0) != specs[r].Transparent {
		return fmt.Errorf("transparent is %d (%v), want %v", on, err, specs[r].Transparent)
	}
	return nil
}

// Ready tells the predecessor that this process accepts connections, and returns when
// that one accepts none any more, or has ended. One that gave up waiting is asked
// anew. An error means that it may still accept; the sockets are shared until it ends.
// Ready ends the Predecessor.
func (p *Predecessor) Ready(ctx context.Context) error {
	for round := 1; ; round++ {
		err := p.ready(ctx)
		if err == nil || ctx.Err() != nil || round == maxRounds {
			return err
		}
		var again Owner // its sockets are ours already: only the word is wanted
		next, terr := TakeOver(ctx, p.path, &again)
		if errors.Is(terr, ErrNoPredecessor) {
			return nil
		}
		if terr != nil {
			return errors.Join(err, terr, again.Close())
		}
		if cerr := again.Close(); cerr != nil {
			next.Close()
			return cerr
		}
		p.l = next.l
	}
}

func (p *Predecessor) ready(ctx context.Context) error {
	defer p.l.c.Close()
	hangUp := context.AfterFunc(ctx, func() { p.l.c.Close() })
	defer hangUp()
	until := time.Now().Add(goneTime)
	err := p.l.send(&message{kind: ready}, until)
	if err == nil {
		err = p.l.expect(gone, until)
	}
	if err != nil {
		return fmt.Errorf("listen: the predecessor at %s does not confirm that it has stopped accepting: %w", p.path, err)
	}
	return nil
}

// Close gives the hand-over up: the predecessor goes on as before. The sockets that
// owner has stay its own.
func (p *Predecessor) Close() error { return p.l.c.Close() }

// Admin returns a listener on addr, by the owner's socket of that role: the
// inherited one, if its address is addr, or a new one. The owner keeps its own
// descriptor, for a hand-over.
func (o *Owner) Admin(addr string) (net.Listener, error) {
	want, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen: admin: %w", err)
	}
	k := Key{Role: Admin}
	if fd, ok := o.Export(k); ok {
		have, err := socket.OrigDst(fd)
		ip := have.Addr()
		if err != nil || int(have.Port()) != want.Port || !(want.IP == nil && ip.IsUnspecified() || want.IP.Equal(ip.AsSlice())) {
			if err := o.Release(k); err != nil {
				return nil, err
			}
		}
	}
	fd, _, err := o.Get(k, func() (int, error) { return listenTCP(addr) })
	if err != nil {
		return nil, fmt.Errorf("listen: admin: %w", err)
	}
	if fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("listen: admin: %w", err)
	}
	f := os.NewFile(uintptr(fd), "admin")
	defer f.Close()
	ln, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("listen: admin: %w", err)
	}
	return ln, nil
}

// listenTCP is net.Listen, as a descriptor.
func listenTCP(addr string) (fd int, err error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return -1, err
	}
	defer ln.Close()
	rc, err := ln.(*net.TCPListener).SyscallConn()
	if err != nil {
		return -1, err
	}
	var derr error
	// Not by File, whose descriptor blocks, and with it every copy of the socket.
	if err := rc.Control(func(old uintptr) { fd, derr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return -1, err
	}
	return fd, derr
}
