package engine

import (
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"aether/dataplane/reactor"
	"aether/tproxy/socket"
)

// Accept gets a connected, non-blocking socket, which is its own from now on.
type Accept func(l *Loop, fd int)

// listener is one listening socket of a pod on a loop.
type listener struct {
	l      *Loop
	pod    *Pod
	fd     int
	accept Accept
	timer  reactor.Timer
	paused bool
}

// Listen accepts connections of fd, a non-blocking listening socket, on the
// pod's home loop until RemovePod or StopListening. fd stays the caller's to
// close, after that.
func (p *Pod) Listen(fd int, accept Accept) error {
	ln := &listener{l: p.home.Load(), pod: p, fd: fd, accept: accept}
	p.mu.Lock()
	if p.gone || p.deaf {
		p.mu.Unlock()
		return errPodGone
	}
	p.listeners[fd] = ln
	p.mu.Unlock()
	res := make(chan error, 1)
	if err := ln.l.Post(func() { res <- ln.l.Register(fd, ln, reactor.Accept) }); err != nil {
		return err
	}
	if err := <-res; err != nil {
		p.mu.Lock()
		delete(p.listeners, fd)
		p.mu.Unlock()
		return fmt.Errorf("engine: listen for pod %s: %w", p.Name, err)
	}
	return nil
}

// moveTo takes the pod's new connections to another loop; those there are stay.
func (p *Pod) moveTo(from, to *Loop) {
	p.home.Store(to)
	_ = from.Post(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		for fd, ln := range p.listeners {
			if ln.l != from {
				continue
			}
			from.Disarm(&ln.timer)
			if !ln.paused {
				if err := from.Detach(fd); err != nil {
					continue
				}
			}
			ln.paused = false
			ln.l = to
			_ = to.Post(func() {
				p.mu.Lock()
				defer p.mu.Unlock()
				switch {
				case p.listeners[fd] != ln:
				case p.gone || p.deaf:
					delete(p.listeners, fd) // the descriptor may be another's by now
				default:
					_ = to.Register(fd, ln, reactor.Accept)
				}
			})
		}
	})
}

// Event is reactor.Source.
func (ln *listener) Event(uint32) {
	for range podAccepts {
		n, _, e := syscall.RawSyscall6(unix.SYS_ACCEPT4, uintptr(ln.fd), 0, 0, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
		switch e {
		case 0:
			ln.accept(ln.l, int(n))
		case unix.EAGAIN:
			return
		case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM:
			// Out of descriptors: the backlog waits instead of the loop spinning.
			ln.l.eng.log.Warn("cannot accept: out of descriptors or memory", "pod", ln.pod.Name, "err", e)
			if ln.l.Detach(ln.fd) == nil {
				ln.paused = true
				ln.l.Arm(&ln.timer, ln, 100e6)
			}
			return
		default: // the client gave up (ECONNABORTED) and the like
		}
	}
}

// Run is reactor.Task: accepting goes on after a pause.
func (ln *listener) Run() {
	ln.paused = false
	if err := ln.l.Register(ln.fd, ln, reactor.Accept); err != nil {
		ln.l.eng.log.Error("cannot accept any more", "pod", ln.pod.Name, "err", err)
	}
}

// Fail is reactor.Source. The descriptor is its owner's.
func (ln *listener) Fail(error) { ln.l.Forget(ln.fd) }

// HandOff takes a registered socket off the loop for a goroutine to use.
func (l *Loop) HandOff(fd int) (*net.TCPConn, error) {
	if err := l.Detach(fd); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return socket.MakeConn(fd)
}

// Go runs f in a goroutine that Run waits for. It is for what a client has under
// way: Serving counts it.
func (l *Loop) Go(f func()) {
	l.eng.going.Add(1)
	l.eng.wg.Go(func() {
		defer l.eng.going.Add(-1)
		f()
	})
}
