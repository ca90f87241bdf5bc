package engine

import (
	"aether/dataplane/exchange"
	"aether/tproxy/socket"
	"context"
	"math"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// appKey names a pool of connections to one port of one pod's application, to its Unix
// socket, or to a foreign address dialled from the pod (scope then names the connection it serves).
type appKey struct {
	pod   *Pod
	addr  netip.AddrPort
	h2    bool
	scope *ConnInfo
	unix  socket.Unix // in the place of addr
}

// SocketPool gives unconnected, non-blocking sockets made in a pod's namespace.
type SocketPool interface {
	// Get returns a socket at once, or ok == false.
	Get(v6 bool) (fd int, ok bool)
	// Request calls on, from any goroutine, with a socket or an error, soon.
	Request(v6 bool, on func(fd int, err error))
}

// Sockets makes sockets in a pod's network namespace, marked so that capture
// leaves what is dialled with them alone.
type Sockets interface {
	SocketPool
	// Connect connects from the pod's namespace until ctx ends.
	Connect(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error)
}

// appPool is owned by a loop.
type appPool struct {
	l       *Loop
	key     appKey
	socks   SocketPool // nil: of a Unix socket
	idle    []*h1client
	h2      sessions
	hasty   bool // the application closes connections right behind its answers, without a word
	waiting bool // h2: a socket is being made
	n       int
	dials   int // connections to a Unix socket that are being made
	dead    bool
}

// appPools are those of a loop.
type appPools map[appKey]*appPool

func (l *Loop) appPools() appPools {
	m, ok := l.kept[keptApps].(appPools)
	if !ok {
		m = appPools{}
		l.kept[keptApps] = m
	}
	return m
}

func (appPools) shrink() {}

// enter makes the pool one of its loop's, leave takes it away.
func (p *appPool) enter() {
	p.l.appPools()[p.key] = p
	p.key.pod.share(p.l).resources[p] = struct{}{}
}

func (p *appPool) leave() {
	delete(p.l.appPools(), p.key)
	delete(p.key.pod.share(p.l).resources, p)
}

// podGone is resource.
func (p *appPool) podGone() {
	p.close()
	p.leave()
}

// isHasty is h1Owner.
func (p *appPool) isHasty() bool { return p.hasty }

// setHasty is h1Owner.
func (p *appPool) setHasty(is bool) { p.hasty = is }

// Send sends x to addr from the pod's namespace: to an application, or, with a
// scope, to a foreign server for that downstream connection alone.
func (l *Loop) Send(x *exchange.Exchange, pod *Pod, socks SocketPool, addr netip.AddrPort, h2 bool, scope *ConnInfo) {
	k := appKey{pod: pod, addr: addr, h2: h2, scope: scope}
	p := l.appPools()[k]
	if p == nil {
		p = &appPool{l: l, key: k, socks: socks}
		p.h2 = sessions{l: l, more: p.dialMoreH2, check: func() {}}
		p.enter()
	}
	p.send(x)
}

// DropScope closes what Send opened for a downstream connection.
func (l *Loop) DropScope(scope *ConnInfo, addr netip.AddrPort, h2 bool) {
	k := appKey{pod: scope.Pod, addr: addr, h2: h2, scope: scope}
	if p := l.appPools()[k]; p != nil {
		p.close()
		p.leave()
	}
}

func (p *appPool) send(x *exchange.Exchange) {
	if p.key.h2 {
		p.h2.send(x)
		return
	}
	if c := p.reuse(x); c != nil {
		c.take(x)
		return
	}
	if p.local() {
		p.dialLocal(x)
		return
	}
	v6 := p.key.addr.Addr().Unmap().Is6()
	if fd, ok := p.socks.Get(v6); ok {
		p.dial(x, fd)
		return
	}
	x.Park()
	w := waiter{x, x.Gen}
	p.socks.Request(v6, func(fd int, err error) {
		if perr := p.l.Post(func() { p.made(w, fd, err) }); perr != nil && err == nil {
			unix.Close(fd)
		}
	})
}

// reuse takes a connection for x out of the idle ones; nil: there is none.
func (p *appPool) reuse(x *exchange.Exchange) *h1client {
	for n := len(p.idle); n > 0; n = len(p.idle) {
		i := n - 1 // the one used last: the likeliest to be alive
		if p.hasty && !x.Idempotent() {
			// Its end may be on the way, and only a request that may be done twice can be sent again
			// whatever the application had of it. Others get one that has been left open for a while.
			if i = 0; p.l.Now()-p.idle[0].active < hastyTime {
				return nil
			}
		}
		c := p.idle[i]
		p.idle = slices.Delete(p.idle, i, i+1)
		c.idle = false
		if c.fresh() {
			return c
		}
		c.hasty()
		c.gone(exchange.NoError)
	}
	return nil
}

// made takes the socket that was made for w, or why there is none.
func (p *appPool) made(w waiter, fd int, err error) {
	alive := w.alive()
	switch {
	case err != nil:
		if alive {
			w.x.Cause = err
			w.x.UpstreamClosed(exchange.Connect)
		}
	case !alive || p.dead:
		unix.Close(fd)
		if alive {
			w.x.UpstreamClosed(exchange.Connect)
		}
	default:
		p.dial(w.x, fd)
	}
}

func (p *appPool) dial(x *exchange.Exchange, fd int) {
	c, err := p.l.dialHTTP1(p.key.pod, fd, p.key.addr, p.h2.name, p)
	if err != nil {
		x.Cause = err
		x.UpstreamClosed(exchange.Connect)
		return
	}
	p.n++
	c.take(x)
}

// dialMoreH2 connects to an HTTP/2 application once more, if it may, and gives
// those that wait to the connection.
func (p *appPool) dialMoreH2() {
	if p.waiting || p.dead || len(p.h2.conns) >= maxAppH2 {
		return
	}
	p.waiting = true
	if p.local() {
		p.dialLocalH2()
		return
	}
	if fd, ok := p.socks.Get(p.key.addr.Addr().Unmap().Is6()); ok {
		p.dialH2(fd, nil)
		return
	}
	p.socks.Request(p.key.addr.Addr().Unmap().Is6(), func(fd int, err error) {
		if perr := p.l.Post(func() { p.dialH2(fd, err) }); perr != nil && err == nil {
			unix.Close(fd)
		}
	})
}

// dialH2 goes on with a socket, or without.
func (p *appPool) dialH2(fd int, err error) {
	p.waiting = false
	if p.dead {
		if err == nil {
			unix.Close(fd)
		}
		return
	}
	if err == nil {
		var c *h2conn
		if c, err = p.l.dialH2(p.key.pod, fd, p.key.addr, &p.h2, p.h2.name); err == nil {
			c.retireAt = math.MaxInt64
			p.h2.conns = append(p.h2.conns, c)
			p.h2.wake()
			return
		}
	}
	p.h2.fail(err, exchange.Connect)
	p.check()
}

func (p *appPool) put(c *h1client) {
	if p.dead || len(p.idle) >= maxIdleApp {
		c.gone(exchange.NoError)
		return
	}
	c.idle = true
	p.idle = append(p.idle, c)
}

// lost forgets a connection that ended.
func (p *appPool) lost(c *h1client) {
	p.n--
	defer p.check()
	if !c.idle {
		return
	}
	for i, o := range p.idle {
		if o == c {
			last := len(p.idle) - 1
			copy(p.idle[i:], p.idle[i+1:])
			p.idle[last] = nil
			p.idle = p.idle[:last]
			return
		}
	}
}

func (p *appPool) close() {
	p.dead = true
	idle := p.idle
	p.idle = nil
	for _, c := range idle {
		c.idle = false
		c.gone(exchange.NoError)
	}
	p.h2.close(errPodGone, exchange.Closed)
}

// SendUnix is Send to an application that takes its requests at a Unix socket (contract 6.5).
func (l *Loop) SendUnix(x *exchange.Exchange, pod *Pod, to socket.Unix, h2 bool) {
	k := appKey{pod: pod, unix: to, h2: h2}
	p := l.appPools()[k]
	if p == nil {
		p = &appPool{l: l, key: k, hasty: l.dialsOf(pod).hasty}
		p.h2 = sessions{l: l, more: p.dialMoreH2, check: p.check, name: "unix:" + to.File}
		p.enter()
	}
	p.dials++ // it is in use, whatever ends meanwhile
	p.send(x)
	p.dials--
	p.check()
}

// local: the pool is of a Unix socket.
func (p *appPool) local() bool { return p.socks == nil }

// dialLocal makes a connection for x.
func (p *appPool) dialLocal(x *exchange.Exchange) {
	d := p.l.dialsOf(p.key.pod)
	if len(d.sockq) >= maxWaiters { // some may wait no more
		var gone []localDial
		d.sockq = slices.DeleteFunc(d.sockq, func(d localDial) bool {
			if d.wanted() {
				return false
			}
			gone = append(gone, d)
			return true
		})
		for _, d := range gone {
			d.on(-1, context.Canceled)
		}
	}
	if len(d.sockq) >= maxWaiters {
		x.Cause = ErrHopFull
		x.UpstreamClosed(exchange.Refused)
		return
	}
	x.Park()
	w := waiter{x, x.Gen}
	p.dialUnix(d, localDial{
		wanted: w.alive,
		on: func(fd int, err error) {
			p.made(w, fd, err)
			p.check()
		},
	})
}

// dialLocalH2 makes one for those that wait.
func (p *appPool) dialLocalH2() {
	p.dialUnix(p.l.dialsOf(p.key.pod), localDial{wanted: func() bool { return !p.dead }, on: p.dialH2})
}

// dialUnix has d made, or wait for its turn. Whatever could block, the file system and a
// full backlog, does so in a goroutine.
func (p *appPool) dialUnix(ds *dialQueue, d localDial) {
	p.dials++
	on := d.on
	d.to, d.until = p.key.unix, p.l.Now()+connectTime
	d.on = func(fd int, err error) {
		p.dials--
		on(fd, err)
	}
	if ds.socks >= podSocks {
		ds.sockq = append(ds.sockq, d)
		return
	}
	ds.dialUnix(d)
}

// check forgets the pool of a Unix socket once nothing is left of it: which sockets there have
// been is not for the pod, or an EndpointPolicy, to have remembered.
func (p *appPool) check() {
	if !p.local() || p.dead || p.n+p.dials+len(p.h2.conns)+len(p.h2.old)+len(p.h2.waiters) > 0 {
		return
	}
	p.dead = true
	p.l.dialsOf(p.key.pod).hasty = p.hasty // the next pool begins with it
	p.leave()
}
