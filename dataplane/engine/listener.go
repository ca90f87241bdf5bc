package engine

import (
	"context"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"

	"aether/dataplane/reactor"
	"aether/tproxy/socket"
)

// Listen accepts connections of fd, a non-blocking listening socket, on the
// pod's home loop until RemovePod or StopListening. fd stays the caller's to
// close, after that.
func (p *Pod) Listen(fd int, accept Accept) error { return p.listen(fd, accept, false) }

// ListenVital is Listen for a socket over which the node is asked whether it lives: where others
// leave their backlog alone, for want of memory or descriptors, it still accepts
// a connection now and then.
func (p *Pod) ListenVital(fd int, accept Accept) error { return p.listen(fd, accept, true) }

func (p *Pod) listen(fd int, accept Accept, vital bool) error {
	ln := &listener{l: p.home.Load(), pod: p, fd: fd, accept: accept, vital: vital}
	p.mu.Lock()
	if p.gone || p.closedToNew {
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
				case p.gone || p.closedToNew:
					delete(p.listeners, fd) // the descriptor may be another's by now
				default:
					_ = to.Register(fd, ln, reactor.Accept)
				}
			})
		}
	})
}

// fewAccepts are accepted in any iteration, however much the pod's connections have
// done in it: else they would keep new ones out for ever.
const fewAccepts = 8

// restRounds bounds acceptRest: a socket's backlog is emptied by fewer.
const restRounds = 1024

// Event is reactor.Source.
func (ln *listener) Event(uint32) { ln.take() }

// take accepts what may be accepted in this iteration, and reports whether more may wait.
func (ln *listener) take() bool {
	l, e, sh := ln.l, ln.l.proc, ln.pod.share(ln.l)
	most := podAccepts
	if why, may := ln.may(); !may {
		if !ln.vital || why == ShedFiles {
			ln.pause(why)
			return false
		}
		most = vitalAccepts
		defer ln.pause(why)
	}
	for i := range most {
		if i >= fewAccepts && (sh.readSpent() || ln.pod.full()) {
			return true // level-triggered: the rest is told of again
		}
		if i > 0 && !ln.room() {
			ln.pause(ShedFiles)
			return false
		}
		n, _, errno := syscall.RawSyscall6(unix.SYS_ACCEPT4, uintptr(ln.fd), 0, 0, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
		switch errno {
		case 0:
			if fd := int(n); e.budget.near(fd) {
				e.scarce.Store(true)
				if e.budget.reserved(fd, ln.vital) { // another was faster
					_ = socket.Abort(fd)
					e.shed(ShedDescriptor)
					ln.pause(ShedFiles)
					return false
				}
			}
			sh.addWork()
			ln.accept(l, int(n))
		case unix.EAGAIN:
			return false
		case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM:
			// Out of descriptors: the backlog waits instead of the loop spinning.
			e.scarce.Store(true)
			ln.pause(ShedFiles)
			return false
		default: // the client gave up (ECONNABORTED) and the like
		}
	}
	return true
}

// room reports whether the next connection's descriptor lies outside of the reserve.
func (ln *listener) room() bool {
	e := ln.l.proc
	if !e.scarce.Load() {
		return true
	}
	fd := e.budget.next(ln.fd)
	if !e.budget.near(fd) {
		e.scarce.Store(false)
	}
	return !e.budget.reserved(fd, ln.vital)
}

// may reports whether connections may be accepted now, and if not why.
func (ln *listener) may() (why Shed, may bool) {
	if !ln.room() {
		return ShedFiles, false
	}
	switch {
	case ln.l.level >= StopAccepting:
		return ShedAccept, false
	case ln.pod.full():
		return ShedPodFiles, false
	}
	return 0, true
}

// pause leaves the backlog alone for acceptPause.
func (ln *listener) pause(why Shed) {
	l, e := ln.l, ln.l.proc
	e.shed(why)
	if last, now := ln.pod.warned.Load(), l.Now(); (last == 0 || now-last >= warnEvery) && ln.pod.warned.CompareAndSwap(last, now) {
		e.log.Warn("new connections wait", "pod", ln.pod.Name, "why", why.String(), "descriptors", ln.pod.Files(),
			"of", e.budget.limit, "of all pods", e.files.Load(), "memory", Level(l.level).String())
	}
	if l.Detach(ln.fd) == nil {
		ln.paused = true
		l.Arm(&ln.timer, ln, acceptPause)
	}
}

// Run is reactor.Task: accepting goes on after a pause.
func (ln *listener) Run() {
	ln.paused = false
	if err := ln.l.Register(ln.fd, ln, reactor.Accept); err != nil {
		ln.l.proc.log.Error("cannot accept any more", "pod", ln.pod.Name, "err", err)
	}
}

// Fail is reactor.Source. The descriptor is its owner's.
func (ln *listener) Fail(error) { ln.l.Unregister(ln.fd) }

// StopListening takes the pod's listening sockets off their loops; the pod's
// connections stay. What waits to be accepted is accepted first if nobody else has the sockets
// (last), else it stays in them for whoever has. When it returns nil the loops have let go
// of the descriptors, which are the caller's to close; a loop that does not run is waited for
// until ctx ends. There is no way back.
func (p *Pod) StopListening(ctx context.Context, last bool) error {
	p.mu.Lock()
	p.closedToNew = true
	p.mu.Unlock()
	return everywhere(ctx, p.loops(), func(l *Loop) {
		if last {
			p.acceptRest(l)
		}
		p.unlisten(l)
	})
}

// acceptRest accepts what waits in the pod's listening sockets on l, which nobody would answer
// once they are closed.
func (p *Pod) acceptRest(l *Loop) {
	p.mu.Lock()
	var here []*listener
	for _, ln := range p.listeners {
		if ln.l == l {
			here = append(here, ln)
		}
	}
	p.mu.Unlock()
	for _, ln := range here {
		for n := 0; n < restRounds && !ln.paused && ln.take(); n++ {
		}
	}
}

// unlisten takes the pod's listeners off l.
func (p *Pod) unlisten(l *Loop) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for fd, ln := range p.listeners {
		if ln.l == l {
			l.Disarm(&ln.timer) // else a pause ends with a descriptor that may be another's by then
			_ = l.Detach(fd)
			delete(p.listeners, fd)
		}
	}
}
