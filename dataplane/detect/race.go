package detect

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/engine"
	"aether/dataplane/reactor"
	"aether/tproxy/socket"
)

// DialLimit bounds a connect to an address outside the mesh (contract 4.7).
const DialLimit = 2 * time.Second

// Race is a connection to the dialled address, made while the client has not spoken.
type Race struct {
	d         racing // nil once somebody waits for the connection instead
	l         *engine.Loop
	pod       *engine.Pod
	dst       netip.AddrPort
	fd        int // -1 until there is a socket
	connected bool
	over      bool
	cause     string // why it failed
	timer     reactor.Timer
	then      func(ok bool) // called when the connect is over
}

// racing is a Detector, whatever it has aside.
type racing interface {
	serverFirst()
	lostRace()
}

// startRace dials dst from the pod's namespace; where no socket is at hand one is asked for. nil: it could not.
func startRace(l *engine.Loop, pod *engine.Pod, sockets engine.Sockets, dst netip.AddrPort, d racing) *Race {
	r := &Race{d: d, l: l, pod: pod, dst: dst, fd: -1, cause: engine.ConnectCause(nil)}
	pod.CountFDs(1)
	l.Arm(&r.timer, r, int64(DialLimit))
	v6 := dst.Addr().Unmap().Is6()
	if fd, ok := sockets.Get(v6); ok {
		if !r.connect(fd) {
			r.close()
			return nil
		}
		return r
	}
	sockets.Request(v6, func(fd int, err error) {
		perr := l.Post(func() {
			switch {
			case err != nil:
				r.cause = engine.ConnectCause(err)
				r.lost()
			case r.over:
				unix.Close(fd)
			case !r.connect(fd):
				r.lost()
			}
		})
		if perr != nil && err == nil {
			unix.Close(fd)
		}
	})
	return r
}

// connect starts the connect on fd, which is the race's, or closed, from now on.
func (r *Race) connect(fd int) bool {
	err := socket.StartConnect(fd, r.dst)
	if err == nil {
		err = r.l.Register(fd, r, reactor.Stream)
	}
	if err != nil {
		r.cause = engine.ConnectCause(err)
		unix.Close(fd)
		return false
	}
	r.fd = fd
	return true
}

// Event is reactor.Source.
func (r *Race) Event(ev uint32) {
	if r.over {
		return
	}
	if !r.connected && ev&(reactor.Writable|reactor.Error|reactor.Hangup) != 0 {
		done, err := socket.Connected(r.fd)
		if err != nil {
			r.lost()
			return
		}
		if !done {
			return
		}
		r.connected = true
		r.l.Disarm(&r.timer)
		if r.then != nil {
			r.then(true)
			return
		}
	}
	if r.connected && ev&^reactor.Writable != 0 && r.d != nil { // bytes, or its end: either way the server was first
		r.d.serverFirst()
	}
}

// Run is reactor.Task: the connect took too long.
func (r *Race) Run() { r.lost() }

// Fail is reactor.Source and Task.
func (r *Race) Fail(error) {
	r.connected = false
	r.lost()
}

// Owner is engine.Owned.
func (r *Race) Owner() *engine.Pod { return r.pod }

func (r *Race) lost() {
	if r.over || r.connected {
		return
	}
	r.close()
	if r.d != nil {
		r.d.lostRace()
	}
	if r.then != nil {
		r.then(false)
	}
}

// abortLater makes the close of the connection a reset: who was dialled sees the client's.
func (r *Race) abortLater() {
	if r.fd >= 0 {
		_ = socket.SetLinger0(r.fd)
	}
}

func (r *Race) close() {
	if r.over {
		return
	}
	r.over = true
	r.pod.CountFDs(-1)
	r.l.Disarm(&r.timer)
	if r.fd >= 0 {
		r.l.Unregister(r.fd)
		unix.Close(r.fd)
	}
}

// Connected reports whether the connection is made.
func (r *Race) Connected() bool { return r.connected }

// Wait has f called when the connection is made, or is not. Call it once, where it is not Connected.
func (r *Race) Wait(f func(ok bool)) { r.then = f }

// Cause is why the connection was not made: a cause of the journal's.
func (r *Race) Cause() string { return r.cause }

// Take takes a connection that is made from the loop; the race is used up. false: it could not be, and is closed.
func (r *Race) Take() (fd int, ok bool) {
	r.over = true
	r.pod.CountFDs(-1)
	if err := r.l.Detach(r.fd); err != nil {
		unix.Close(r.fd)
		return -1, false
	}
	return r.fd, true
}
