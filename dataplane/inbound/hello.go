package inbound

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/engine"
	"aether/dataplane/model"
	"aether/dataplane/reactor"
	"aether/meshhop"
	"aether/tproxy/socket"
)

// Whoever reaches the mesh port may connect and be silent. Until a whole ClientHello is
// there a connection costs a descriptor and an entry here; no goroutine, no
// buffer, and no turn of a handshake's.
const (
	helloTime  = 2 * time.Second // from accept to a whole ClientHello
	podHellos  = 512             // connections to one pod, on a loop, whose ClientHello is not there
	peerHellos = 64              // of these from one address
	maxHello   = 16 << 10        // bytes of a ClientHello that is waited for; a longer one is the handshake's to refuse
)

// hello is a connection whose ClientHello is waited for, on a loop.
type hello struct {
	st    *loopState
	in    *Inbound
	pod   *Pod
	peer  netip.Addr
	fd    int
	start int64
	timer reactor.Timer
	fin   bool // nothing follows what is there
	done  bool
}

// lobby is those of a pod on a loop.
type lobby struct {
	all   []*hello // in the order of their coming
	peers map[netip.Addr]int
}

// await waits for the ClientHello of fd, which it owns from now on.
func (in *Inbound) await(l *engine.Loop, p *Pod, fd int) {
	st := in.loops.Get(l)
	h := &hello{st: st, in: in, pod: p, fd: fd, start: l.Now()}
	if a, err := socket.Peer(fd); err == nil {
		h.peer = a.Addr()
	}
	if err := l.Register(fd, h, reactor.Stream); err != nil {
		in.log.Error("cannot take an inbound connection", "pod", p.Container, "err", err)
		unix.Close(fd)
		return
	}
	p.Engine.CountFDs(1)
	h.enter()
	l.Arm(&h.timer, h, int64(helloTime))
}

// enter puts h into its pod's lobby. Where there is no room the one that has waited longest goes, of the
// same address if that has its share already, else of the one that has most.
func (h *hello) enter() {
	b := h.st.lobbies[h.pod]
	if b == nil {
		b = &lobby{peers: map[netip.Addr]int{}}
		h.st.lobbies[h.pod] = b
	}
	b.all = append(b.all, h)
	b.peers[h.peer]++
	from := h.peer
	switch {
	case b.peers[from] > peerHellos:
	case len(b.all) > podHellos:
		for a, n := range b.peers {
			if n > b.peers[from] {
				from = a
			}
		}
	default:
		return
	}
	i := slices.IndexFunc(b.all, func(o *hello) bool { return o.peer == from })
	b.all[i].refuse(&meshhop.Busy{Pod: h.pod.Container, Lost: true})
}

// leave takes h off the loop; its descriptor is the caller's.
func (h *hello) leave() {
	h.done = true
	l := h.st.l
	l.Disarm(&h.timer)
	h.pod.Engine.CountFDs(-1)
	b := h.st.lobbies[h.pod]
	i := slices.Index(b.all, h)
	b.all = slices.Delete(b.all, i, i+1)
	if b.peers[h.peer]--; b.peers[h.peer] == 0 {
		delete(b.peers, h.peer)
	}
	if len(b.all) == 0 {
		delete(h.st.lobbies, h.pod)
	}
}

// Owner is engine.Owned.
func (h *hello) Owner() *engine.Pod { return h.pod.Engine }

// Event is reactor.Source.
func (h *hello) Event(ev uint32) {
	if ev&^reactor.Writable == 0 || h.done {
		return
	}
	h.fin = h.fin || ev&(reactor.PeerEnd|reactor.Hangup|reactor.Error) != 0
	if !h.pod.Engine.Defer(h.st.l, (*helloLater)(h)) {
		h.look()
	}
}

// look takes what has come for a ClientHello, without taking it from the socket: that is the handshake's.
func (h *hello) look() {
	if h.done {
		return
	}
	for {
		n, _, err := unix.Recvfrom(h.fd, h.st.l.Scratch[:maxHello], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return
		case err != nil:
			h.refuse(err)
			return
		case n == 0:
			h.refuse(io.ErrUnexpectedEOF)
			return
		}
		need := meshhop.HelloNeeds(h.st.l.Scratch[:n])
		switch {
		case need == 0 || need > maxHello:
			h.serve()
		case h.fin:
			h.refuse(io.ErrUnexpectedEOF)
		default: // the kernel counts from here: a ClientHello in single bytes is not looked at as often
			if err := unix.SetsockoptInt(h.fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, need); err != nil {
				h.refuse(err)
			}
		}
		return
	}
}

// serve gives the connection to its handshake.
func (h *hello) serve() {
	l := h.st.l
	if err := unix.SetsockoptInt(h.fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, 1); err != nil {
		h.refuse(err)
		return
	}
	h.leave()
	if err := l.Detach(h.fd); err != nil {
		unix.Close(h.fd)
		return
	}
	h.in.shake(l, h.pod, h.fd, h.start)
}

// refuse closes the connection.
func (h *hello) refuse(err error) {
	if h.done {
		return
	}
	h.leave()
	h.st.l.Unregister(h.fd)
	_ = socket.Close(h.fd)
	from := "unknown"
	if h.peer.IsValid() {
		from = h.peer.String()
	}
	h.st.l.Go(func() { // it writes to the log
		h.in.newConn(h.pod, h.start).declined(from, fmt.Errorf("inbound: no ClientHello from %s: %w", from, err))
	})
}

// Run is reactor.Task: the time is over.
func (h *hello) Run() { h.refuse(context.DeadlineExceeded) }

// Fail is reactor.Source and Task: the pod goes, or the loop ends.
func (h *hello) Fail(error) {
	if !h.done {
		h.leave()
		h.st.l.Unregister(h.fd)
		_ = socket.Close(h.fd)
	}
}

// Show is engine.Shown.
func (h *hello) Show(s *engine.ConnState) bool {
	if h.done {
		return false
	}
	s.Role, s.State, s.Client = model.Inbound.String(), "sniff", engine.PeerAddr(h.fd)
	s.AgeMS = (h.st.l.Now() - h.start) / 1e6
	s.IdleMS = s.AgeMS
	return true
}

// helloLater is a hello that its pod's share of an iteration did not suffice for.
type helloLater hello

// Run is reactor.Task.
func (h *helloLater) Run() { (*hello)(h).look() }

// Fail is reactor.Task.
func (h *helloLater) Fail(err error) { (*hello)(h).Fail(err) }
