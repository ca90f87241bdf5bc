package socket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"aether/tproxy/netns"
	"aether/tproxy/rules"
)

// defaultReady is what the zero FactoryConfig.Ready stands for.
const defaultReady = 8

// FactoryConfig: every field says what its zero value means.
type FactoryConfig struct {
	Ready     int       // sockets kept ready, a pool and family. 0: 8
	KeepAlive KeepAlive // of the sockets made
}

// Factory makes unconnected TCP sockets in many namespaces, ahead of need, so
// that neither an event loop nor a goroutine ever waits for a change of
// namespace. One thread serves the whole node: it enters a namespace, fills its
// pool and comes home before the next. Safe for concurrent use.
//
// A pool waits in its queue at most once, so the queue is no longer than the
// number of open pools, and a pool that keeps failing (its namespace is gone)
// costs one attempt a request and holds nobody up.
type Factory struct {
	cfg  FactoryConfig
	kick chan struct{} // capacity 1: there is something in queue, or closed
	done chan struct{} // closed when the worker has ended

	mu     sync.Mutex
	closed bool
	queue  []*Pool
	pools  map[*Pool]struct{}
}

// NewFactory starts a factory with the defaults. Close ends it.
func NewFactory() *Factory { return FactoryConfig{}.New() }

// New starts a factory. Close ends it.
func (c FactoryConfig) New() *Factory {
	if c.Ready <= 0 {
		c.Ready = defaultReady
	}
	f := &Factory{cfg: c, kick: make(chan struct{}, 1), done: make(chan struct{}), pools: map[*Pool]struct{}{}}
	go f.work()
	return f
}

// Close closes every pool and ends the worker, which has left every namespace
// when Close returns.
func (f *Factory) Close() error {
	f.mu.Lock()
	again := f.closed
	f.closed = true
	pools := make([]*Pool, 0, len(f.pools))
	for p := range f.pools {
		pools = append(pools, p)
	}
	f.mu.Unlock()
	if !again {
		for _, p := range pools {
			p.Close()
		}
		f.wake()
	}
	<-f.done
	return nil
}

func (f *Factory) wake() {
	select {
	case f.kick <- struct{}{}:
	default:
	}
}

// Open returns a pool of sockets made in ns, and asks for the first IPv4 ones;
// IPv6 ones are made once one has been asked for. ns has to stay open until the
// pool is closed. On a closed factory the pool is closed too.
func (f *Factory) Open(ns *netns.NS) *Pool {
	p := &Pool{f: f, ns: ns, closed: make(chan struct{})}
	for i := range p.ready {
		p.ready[i] = make(chan int, f.cfg.Ready)
	}
	p.wanted[v4].Store(true)
	p.failure.Store(&failure{done: make(chan struct{})})
	f.mu.Lock()
	closed := f.closed
	if !closed {
		f.pools[p] = struct{}{}
	}
	f.mu.Unlock()
	if closed {
		close(p.closed)
		return p
	}
	p.refill()
	return p
}

// next waits for a pool that wants sockets; nil: the factory is closed.
func (f *Factory) next() *Pool {
	for {
		f.mu.Lock()
		closed := f.closed
		var p *Pool
		if len(f.queue) > 0 {
			p = f.queue[0]
			f.queue[0] = nil // the array must not keep a closed pool alive
			f.queue = f.queue[1:]
		}
		f.mu.Unlock()
		switch {
		case closed:
			return nil
		case p != nil:
			return p
		}
		<-f.kick
	}
}

// work is the worker. When a thread cannot come home the thread is given up: the
// goroutine ends without unlocking it, and a new one goes on.
func (f *Factory) work() {
	runtime.LockOSThread()
	home, err := netns.Here()
	for {
		p := f.next()
		if p == nil {
			break
		}
		if err != nil { // for want of descriptors, most likely: try again each time
			if home, err = netns.Here(); err != nil {
				p.queued.Store(false)
				p.fail(err)
				continue
			}
		}
		if !p.fill(home) {
			home.Close()
			go f.work()
			return
		}
	}
	if err == nil {
		home.Close()
	}
	runtime.UnlockOSThread()
	close(f.done)
}

// ErrClosed is what a pool's Wait returns once the pool, or its factory, is
// closed. It is also net.ErrClosed.
var ErrClosed = fmt.Errorf("socket: the pool is closed: %w", net.ErrClosed)

// family indexes what a Pool keeps twice.
type family int

const (
	v4 family = iota
	v6
	families
)

func familyOf(isV6 bool) family {
	if isV6 {
		return v6
	}
	return v4
}

// Pool is a stock of unconnected sockets of one namespace: non-blocking,
// close-on-exec, TCP_NODELAY, SO_OOBINLINE, keepalive, and marked rules.MarkBypass, so that
// they are never captured. Safe for concurrent use.
type Pool struct {
	f      *Factory
	ns     *netns.NS
	ready  [families]chan int // only the worker sends, and only as much as fits
	wanted [families]atomic.Bool
	queued atomic.Bool // in the factory's queue

	failure atomic.Pointer[failure] // what the next failed attempt will be told to
	lastErr atomic.Pointer[error]   // of the last attempt; nil: it went well

	// filling is held while the worker is in the namespace, so that Close can wait
	// for it to leave. It guards the closing of closed.
	filling sync.Mutex
	closed  chan struct{}
}

// failure tells all who wait at the time of a failed attempt. err is set before
// done is closed.
type failure struct {
	done chan struct{}
	err  error
}

// Get returns a ready socket of the family, whose owner the caller becomes. It
// never blocks: ok is false when none is ready, and more are then on their way.
// An event loop that gets none calls Wait in a goroutine.
func (p *Pool) Get(isV6 bool) (fd int, ok bool) {
	fam := familyOf(isV6)
	if !p.wanted[fam].Load() {
		p.wanted[fam].Store(true)
	}
	select {
	case fd, ok = <-p.ready[fam]:
	default:
		fd = -1
	}
	if len(p.ready[fam]) <= cap(p.ready[fam])/2 {
		p.refill()
	}
	return fd, ok
}

// Wait returns a socket of the family, waiting for one if it must. It returns
// the error of an attempt to make one (netns.ErrGone when the namespace has
// vanished), ctx's cause, or ErrClosed.
func (p *Pool) Wait(ctx context.Context, isV6 bool) (fd int, err error) {
	fail := p.failure.Load() // before the request, so that its failure is not missed
	fd, ok := p.Get(isV6)
	if ok {
		return fd, nil
	}
	fam := familyOf(isV6)
	select {
	case fd := <-p.ready[fam]:
		if len(p.ready[fam]) <= cap(p.ready[fam])/2 {
			p.refill() // for those who wait beside us
		}
		return fd, nil
	case <-fail.done:
		return -1, fail.err
	case <-p.closed:
		return -1, ErrClosed
	case <-ctx.Done():
		return -1, fmt.Errorf("socket: wait for a socket in %s: %w", p.ns, context.Cause(ctx))
	}
}

// Err returns why the last attempt to make sockets failed; nil if it did not.
func (p *Pool) Err() error {
	if e := p.lastErr.Load(); e != nil {
		return *e
	}
	return nil
}

// Close closes the sockets that are still in the pool. The worker has left the
// namespace when Close returns. Closing twice is no error.
func (p *Pool) Close() error {
	p.filling.Lock()
	defer p.filling.Unlock()
	if p.isClosed() {
		return nil
	}
	close(p.closed)
	p.f.mu.Lock()
	delete(p.f.pools, p)
	p.f.mu.Unlock()
	for _, r := range p.ready {
		drain(r)
	}
	return nil
}

func drain(r chan int) {
	for {
		select {
		case fd := <-r:
			unix.Close(fd)
		default:
			return
		}
	}
}

func (p *Pool) isClosed() bool {
	select {
	case <-p.closed:
		return true
	default:
		return false
	}
}

// refill puts p into the factory's queue, unless it is there already.
func (p *Pool) refill() {
	if p.isClosed() || !p.queued.CompareAndSwap(false, true) {
		return
	}
	p.f.mu.Lock()
	p.f.queue = append(p.f.queue, p)
	p.f.mu.Unlock()
	p.f.wake()
}

// fill makes what is missing. It is false when the thread could not return home.
func (p *Pool) fill(home *netns.Home) (backHome bool) {
	// First, so that whoever takes a socket from now on asks for another round.
	p.queued.Store(false)
	p.filling.Lock()
	defer p.filling.Unlock()
	if p.isClosed() {
		return true
	}
	err := p.ns.Check()
	if err == nil {
		err = p.ns.Enter()
	}
	if err != nil {
		p.fail(err)
		return true
	}
	for fam := range families {
		r := p.ready[fam]
		for err == nil && p.wanted[fam].Load() && len(r) < cap(r) {
			var fd int
			if fd, err = p.f.cfg.dialer(fam); err == nil {
				r <- fd
			}
		}
	}
	if err != nil {
		p.fail(fmt.Errorf("socket: make a socket in %s: %w", p.ns, err))
	} else {
		p.lastErr.Store(nil)
	}
	return home.Restore() == nil
}

// fail tells those who wait, and Err.
func (p *Pool) fail(err error) {
	p.lastErr.Store(&err)
	f := p.failure.Swap(&failure{done: make(chan struct{})})
	f.err = err
	close(f.done)
}

// dialer makes one socket in the calling thread's namespace.
func (c FactoryConfig) dialer(fam family) (int, error) {
	domain := unix.AF_INET
	if fam == v6 {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
			err = fmt.Errorf("%w: raise the proxy's limit of open files", err)
		}
		return -1, err
	}
	err = setAll(fd, []opt{
		{unix.SOL_SOCKET, unix.SO_MARK, rules.MarkBypass, "SO_MARK"},
		{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1, "TCP_NODELAY"},
		{unix.SOL_SOCKET, unix.SO_OOBINLINE, 1, "SO_OOBINLINE"},
	})
	if err == nil {
		err = c.KeepAlive.set(fd)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}
