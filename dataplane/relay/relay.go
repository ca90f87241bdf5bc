// Package relay carries raw bytes between two connections until both directions
// have ended: spliced by the kernel when both are plain, sealed and opened when
// one of them is a mesh hop.
//
//   - A relay owns both connections from call to return, and closes both.
//   - The end of one direction is passed on as such: FIN as FIN, over a hop as
//     close_notify and FIN. The other direction goes on.
//   - What is no orderly end is passed on as a reset: a reset, a lost peer, a hop that
//     ends without close_notify.
//   - There is no idle cut unless one is asked for. Keepalive finds peers that are gone, and the patrol
//     those that owe an acknowledgement; a peer that is well and reads nothing stays.
//   - Buffers and pipes are held while bytes move, and not while a relay waits.
//   - Every goroutine that a relay starts has ended when it returns.
//
// It knows nothing of policy, identity or protocol.
package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Options of a relay. The zero value is what the data plane uses.
type Options struct {
	// KeepAlive is how long a connection is silent before it is probed; four
	// unanswered probes, a quarter of that apart, end it. 0: 60 s, so a peer that
	// is gone is found after two minutes.
	KeepAlive time.Duration

	// UserTimeout is TCP_USER_TIMEOUT. 0: none is set, because Linux ends with it
	// a peer that is well but reads nothing for so long (zero window), which is no
	// fault; it also takes the place of KeepAlive's count.
	UserTimeout time.Duration

	// Patrol is how often both connections are looked at for a reset that no
	// read or write meets (a direction that is stuck writing does not read), for a peer
	// that acknowledges nothing, and for Idle. 0: 15 s, or a quarter of Idle if that is less.
	Patrol time.Duration

	// Dead is how long a peer may owe the acknowledgement of what was sent to it, or the
	// answer to a probe of its closed window, before it is taken for dead; Patrol comes on top. A peer whose window is
	// closed and that answers probes owes nothing (RFC 9293 3.8.6.1). 0: 45 s.
	Dead time.Duration

	// Idle ends a relay on which no byte has moved either way for so long. 0: never.
	Idle time.Duration

	// Memory is the account of what the relay holds; nil: none.
	Memory Memory
}

// Memory is an account of the bytes that somebody's relays hold. Safe for concurrent use.
type Memory interface {
	// HoldBytes adds n, which is negative when they are given back.
	HoldBytes(n int)
	// Roomy reports whether there is room for large buffers.
	Roomy() bool
}

// Side is one of a relay's two connections.
type Side uint8

// The sides, as the arguments are called.
const (
	Nobody Side = iota // the relay was cancelled
	A                  // Plain's a; TLS's plain
	B                  // Plain's b; TLS's hop
)

func (s Side) String() string {
	switch s {
	case Nobody:
		return "nobody"
	case A:
		return "a"
	case B:
		return "b"
	}
	return fmt.Sprintf("side(%d)", uint8(s))
}

// End is how a relay ended: a closed set, fit for a metric's label.
type End string

// The ends.
const (
	Finished  End = "finished"  // both directions in order
	Reset     End = "reset"     // one side reset its connection
	Idle      End = "idle"      // Options.Idle
	Lost      End = "lost"      // one side stopped answering, or its network did
	Truncated End = "truncated" // the hop ended without close_notify: bytes may be missing
	Broken    End = "broken"    // the hop's TLS failed, or the peer sent an alert: it may have refused our certificate
	Cancelled End = "cancelled" // the context ended
	Failed    End = "failed"    // this machine: no descriptors, no memory
)

// Result says what a relay did.
type Result struct {
	AtoB, BtoA int64 // payload bytes delivered
	First      Side  // whose end, orderly or not, came first
	End        End
	Err        error // nil when Finished
}

// Cause is how the relay ended if it did not end in order; else empty.
func (r Result) Cause() string {
	if r.End == Finished {
		return ""
	}
	return string(r.End)
}

// The causes of Truncated and Broken.
var (
	errTruncated = errors.New("relay: the hop ended without close_notify")
	errBroken    = errors.New("relay: TLS of the hop")
)

// Conn is what a relay can carry: a *net.TCPConn or a *net.UnixConn. A Unix socket has no
// reset: its peer learns only that the connection has ended.
type Conn interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

// Plain relays between a and b. first, which may be nil, was read from a already
// and goes to b before anything else. It returns when both directions have ended,
// or, after resetting both connections, when ctx has.
func Plain(ctx context.Context, a, b *net.TCPConn, first []byte, o Options) Result {
	r, err := newRun(a, b, o)
	if err != nil {
		return r.result(err)
	}
	return r.run(ctx,
		func() error { return r.copy(&r.a, &r.b, first, &r.res.AtoB) },
		func() error { return r.copy(&r.b, &r.a, nil, &r.res.BtoA) })
}

// end is one connection of a run, with what waiting on it needs.
type end struct {
	Conn
	side Side
	raw  syscall.RawConn
	tcp  bool

	wrote atomic.Uint32 // counts what has been sent to it

	owes time.Time // since when the patrol has seen an acknowledgement missing; zero: none is. The patrol's own

	mu     sync.Mutex
	shut   bool  // we have ended our direction: TCP_CLOSE may be the end of both
	failed error // what the patrol was told
}

// run is one relay under way.
type run struct {
	a, b  end
	every time.Duration // between two looks of the patrol
	dead  time.Duration // Options.Dead
	idle  time.Duration // Options.Idle
	began time.Time
	mem   Memory // nil: no account
	res   Result // byte counts: each written by one direction; the rest under mu

	mu      sync.Mutex
	settled bool    // First, End and Err are final
	first   Side    // whose orderly end came first
	done    [3]bool // by source side: its direction has ended in order
}

func newRun(a, b Conn, o Options) (*run, error) {
	r := &run{
		every: cmp.Or(o.Patrol, 15*time.Second), dead: cmp.Or(o.Dead, 45*time.Second), idle: o.Idle, began: time.Now(), mem: o.Memory,
		a: end{Conn: a, side: A}, b: end{Conn: b, side: B},
	}
	if o.Patrol == 0 && o.Idle > 0 {
		r.every = min(r.every, max(o.Idle/4, 10*time.Millisecond))
	}
	for _, e := range []*end{&r.a, &r.b} {
		var err error
		if e.raw, err = e.SyscallConn(); err == nil {
			err = tune(e, o)
		}
		if err != nil {
			return r, &sideError{e.side, fmt.Errorf("relay: set up: %w", err)}
		}
	}
	return r, nil
}

func tune(e *end, o Options) error {
	tcp, ok := e.Conn.(*net.TCPConn)
	if e.tcp = ok; !ok {
		return nil // the peer is a process of this machine: the kernel tells of its end
	}
	idle := cmp.Or(o.KeepAlive, time.Minute)
	err := tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: idle, Interval: max(idle/4, time.Second), Count: 4})
	if err == nil {
		err = tcp.SetNoDelay(true)
	}
	if err != nil || o.UserTimeout == 0 {
		return err
	}
	var serr error
	err = e.raw.Control(func(fd uintptr) {
		serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(o.UserTimeout.Milliseconds()))
	})
	return cmp.Or(err, serr)
}

// sideError is a failure that one side is to blame for.
type sideError struct {
	side Side
	err  error
}

func (e *sideError) Error() string { return e.err.Error() }
func (e *sideError) Unwrap() error { return e.err }

// run runs both directions to their ends and closes both connections.
func (r *run) run(ctx context.Context, ab, ba func() error) Result {
	stop := context.AfterFunc(ctx, func() { r.abort(&sideError{Nobody, context.Cause(ctx)}) })
	defer r.patrol()()
	var back sync.WaitGroup
	back.Go(func() { r.direction(&r.b, &r.a, ba) })
	r.direction(&r.a, &r.b, ab)
	back.Wait()
	stop()
	return r.result(nil)
}

// direction runs one direction from src; after its orderly end it stays to see a
// reset of src until the other direction has ended too.
func (r *run) direction(src, other *end, copy func() error) {
	if err := copy(); err != nil {
		r.abort(err)
		return
	}
	r.mu.Lock()
	r.done[src.side] = true
	both := r.done[other.side]
	r.mu.Unlock()
	if both {
		other.SetReadDeadline(past) // its copy is over: this ends its watch
		return
	}
	if err := watch(src); err != nil {
		r.abort(&sideError{src.side, err})
	}
}

// patrol looks at both connections now and then; the function it returns ends it.
func (r *run) patrol() (stop func()) {
	var mu sync.Mutex
	var ended bool
	var t *time.Timer
	mu.Lock()
	defer mu.Unlock()
	t = time.AfterFunc(r.every, func() {
		mu.Lock()
		defer mu.Unlock()
		if ended {
			return
		}
		if err := r.check(time.Now()); err != nil {
			r.abort(err)
			return
		}
		t.Reset(r.every)
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		ended = true
		t.Stop()
	}
}

var (
	errDead = fmt.Errorf("the peer acknowledges nothing any more: %w", syscall.ETIMEDOUT)
	errIdle = errors.New("relay: no byte has moved for as long as one may be idle")
)

// check is a patrol's: the error of an end that the relay is not to outlive.
func (r *run) check(now time.Time) error {
	idle := r.idle > 0
	for _, e := range []*end{&r.a, &r.b} {
		if err := e.wasReset(); err != nil {
			return &sideError{e.side, fmt.Errorf("relay: %w", err)}
		}
		info := e.info()
		if info == nil { // no TCP: the kernel tells of the peer's end
			continue
		}
		if e.silent(info, now) >= r.dead {
			return &sideError{e.side, fmt.Errorf("relay: %w", errDead)}
		}
		moved := time.Duration(min(info.Last_data_recv, info.Last_data_sent)) * time.Millisecond
		idle = idle && moved >= r.idle
	}
	if idle && now.Sub(r.began) >= r.idle {
		return &sideError{Nobody, errIdle}
	}
	return nil
}

// info is the kernel's account of the connection; nil: it is no TCP connection, or is closed.
func (e *end) info() (info *unix.TCPInfo) {
	if _, ok := e.Conn.(*net.TCPConn); ok {
		_ = e.raw.Control(func(fd uintptr) { info, _ = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	}
	return info
}

// silent is how long the peer is known to owe an answer: to bytes or a FIN that it has not acknowledged, or to a probe of
// its closed window. Any acknowledgement since, that of a probe too, is an answer.
func (e *end) silent(info *unix.TCPInfo, now time.Time) time.Duration {
	heard := now.Add(-time.Duration(info.Last_ack_recv) * time.Millisecond)
	switch {
	case info.Unacked == 0 && info.Probes == 0:
		e.owes = time.Time{}
		return 0
	case e.owes.IsZero() || heard.After(e.owes):
		e.owes = now // it owes at this moment, which need not mean much
	}
	return now.Sub(e.owes)
}

// wasReset is the error of a connection that was reset, or given up by the
// kernel. A connection whose two directions have ended in order has none, though
// bytes may still wait in it to be read.
func (e *end) wasReset() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.raw.Control(func(fd uintptr) { // an error: closed by us, the run is over
		if !closed(fd) {
			return
		}
		if n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err == nil && n != 0 {
			e.failed = syscall.Errno(n)
		}
	})
	return e.failed
}

// closed: the connection is in no state any more.
func closed(fd uintptr) bool {
	const tcpClose = 7
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	return err == nil && info.State == tcpClose
}

// ended is asked when a read has met the connection's end: nil if it is one. The kernel tells of a
// reset once, to whoever comes first, and that may have been a write or the patrol; all that a read is told then
// is 0, as behind a FIN.
func (e *end) ended() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.failed == nil && !e.shut {
		err := e.raw.Control(func(fd uintptr) {
			if closed(fd) { // and not by both FINs: ours was never sent
				e.failed = syscall.ECONNRESET
			}
		})
		if err != nil {
			e.failed = err // the run was aborted meanwhile
		}
	}
	if e.failed != nil {
		return &sideError{e.side, fmt.Errorf("relay: read: %w", e.failed)}
	}
	return nil
}

// over notes that src has ended in order, before the other side can learn of it.
func (r *run) over(src *end) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.first == Nobody {
		r.first = src.side
	}
}

var past = time.Unix(1, 0)

// watch waits on a connection that has nothing more to say until it fails, or
// its read deadline ends the watch.
func watch(e *end) error {
	var failed error
	err := e.raw.Read(func(fd uintptr) bool {
		// Not a read: behind a FIN it answers 0 even after a reset.
		if n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err == nil && n != 0 {
			failed = fmt.Errorf("relay: after its end: %w", syscall.Errno(n))
			return true
		}
		return false
	})
	if failed == nil && err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		failed = fmt.Errorf("relay: after its end: %w", err)
	}
	return failed
}

// abort settles the result and resets both connections, which ends both
// directions wherever they are. Only the first call counts.
func (r *run) abort(err error) {
	r.settle(err)
	for _, e := range []*end{&r.a, &r.b} {
		if tcp, ok := e.Conn.(*net.TCPConn); ok {
			tcp.SetLinger(0) // close sends a reset
		}
		e.Close()
	}
}

func (r *run) settle(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.settled {
		return
	}
	r.settled = true
	if s, ok := errors.AsType[*sideError](err); ok && r.first == Nobody {
		r.first = s.side
	}
	r.res.First, r.res.End, r.res.Err = r.first, classify(err), err
}

// result closes what is still open. err is a failure from before the run.
func (r *run) result(err error) Result {
	if err != nil {
		r.abort(err)
	}
	r.settle(nil)
	r.a.Close()
	r.b.Close()
	return r.res
}

// classify sorts the error that ended a relay.
func classify(err error) End {
	switch {
	case err == nil:
		return Finished
	case errors.Is(err, errTruncated):
		return Truncated
	case errors.Is(err, errBroken):
		return Broken
	case errors.Is(err, errIdle):
		return Idle
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return Cancelled
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.ENOTCONN):
		return Reset
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.ENOBUFS):
		return Failed
	}
	if s, ok := errors.AsType[*sideError](err); ok && s.side == Nobody {
		return Cancelled // with a cause of the caller's own
	}
	if errors.Is(err, net.ErrClosed) {
		return Cancelled // somebody closed a connection that was the relay's
	}
	return Lost
}

// copy moves plain bytes from src to dst until src ends, then ends dst's
// direction. Small reads go through a buffer, which is cheaper for them; when they
// fill it, the kernel splices.
func (r *run) copy(src, dst *end, first []byte, total *int64) error {
	r.hold(len(first))
	err := send(dst, first, total)
	r.hold(-len(first))
	if err != nil {
		return err
	}
	in := newIntake(src, plainFill{}, r.mem)
	defer in.release()
	pipe := newSplicer(src, dst)
	bulk := false
	for {
		var n int
		var err error
		if bulk {
			n, err = pipe.move(total)
			bulk = n >= spliceWorth
			if errors.Is(err, errNoPipe) {
				pipe, err = nil, nil // this machine is short of descriptors: go on without
				continue
			}
			if err == errUrgent {
				continue // a read does
			}
		} else {
			var b []byte
			if b, err = in.read(); err == nil {
				n, err = len(b), in.send(dst, b, total)
				bulk = n == len(in.buf.b) && pipe != nil
			}
			in.release()
		}
		if err != nil {
			return err
		}
		if n == 0 {
			if err := src.ended(); err != nil {
				return err
			}
			r.over(src)
			return closeWrite(dst)
		}
	}
}

// hold accounts n bytes.
func (r *run) hold(n int) {
	if n != 0 && r.mem != nil {
		r.mem.HoldBytes(n)
	}
}

// send writes b to e and counts it.
func send(e *end, b []byte, total *int64) error {
	if len(b) == 0 {
		return nil
	}
	n, err := e.Write(b)
	e.wrote.Add(1)
	*total += int64(n)
	if err != nil {
		return &sideError{e.side, fmt.Errorf("relay: write: %w", err)}
	}
	return nil
}

func closeWrite(e *end) error {
	e.mu.Lock()
	e.shut = true
	e.mu.Unlock()
	if err := e.CloseWrite(); err != nil {
		return &sideError{e.side, fmt.Errorf("relay: close: %w", err)}
	}
	return nil
}
