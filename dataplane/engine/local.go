package engine

import (
	"context"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/exchange"
	"aether/tproxy/socket"
)

// localDial is a connection to a Unix socket that is wanted.
type localDial struct {
	to     socket.Unix
	until  int64                   // in the loop's clock
	wanted func() bool             // asked when its turn comes
	on     func(fd int, err error) // called on the loop, once
}

// SendUnix is Send to an application that takes its requests at a Unix socket (contract 6.5).
func (l *Loop) SendUnix(x *exchange.Exchange, pod *Pod, to socket.Unix, h2 bool) {
	k := appKey{pod: pod, unix: to, h2: h2}
	p := l.apps[k]
	if p == nil {
		p = &appPool{l: l, key: k, hasty: pod.share(l).hasty}
		p.h2 = sessions{l: l, more: p.dialMoreH2, check: p.check, name: "unix:" + to.File}
		l.apps[k] = p
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
	sh := p.key.pod.share(p.l)
	if len(sh.sockq) >= maxWaiters { // some may wait no more
		var gone []localDial
		sh.sockq = slices.DeleteFunc(sh.sockq, func(d localDial) bool {
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
	if len(sh.sockq) >= maxWaiters {
		x.Cause = ErrHopFull
		x.ResponseGone(exchange.Refused)
		return
	}
	x.Park()
	w := waiter{x, x.Gen}
	p.dialUnix(sh, localDial{
		wanted: w.alive,
		on: func(fd int, err error) {
			p.made(w, fd, err)
			p.check()
		},
	})
}

// dialLocalH2 makes one for those that wait.
func (p *appPool) dialLocalH2() {
	p.dialUnix(p.key.pod.share(p.l), localDial{wanted: func() bool { return !p.dead }, on: p.dialH2})
}

// dialUnix has d made, or wait for its turn. Whatever could block, the file system and a
// full backlog, does so in a goroutine.
func (p *appPool) dialUnix(sh *share, d localDial) {
	p.dials++
	on := d.on
	d.to, d.until = p.key.unix, p.l.Now()+connectTime
	d.on = func(fd int, err error) {
		p.dials--
		on(fd, err)
	}
	if sh.socks >= podSocks {
		sh.sockq = append(sh.sockq, d)
		return
	}
	sh.dialUnix(d)
}

func (sh *share) dialUnix(d localDial) {
	l := sh.l
	sh.socks++
	left := time.Duration(d.until - l.Now())
	l.Go(func() {
		ctx, cancel := context.WithTimeout(l.eng.ctx, left)
		defer cancel()
		fd, err := socket.ConnectUnix(ctx, d.to)
		perr := l.Post(func() {
			sh.socks--
			d.on(fd, err)
			sh.nextUnix()
		})
		if perr != nil && err == nil {
			unix.Close(fd)
		}
	})
}

// nextUnix gives those that wait their turn; one whose time has passed meanwhile fails.
func (sh *share) nextUnix() {
	for len(sh.sockq) > 0 && sh.socks < podSocks {
		d := sh.sockq[0]
		sh.sockq[0] = localDial{}
		if sh.sockq = sh.sockq[1:]; len(sh.sockq) == 0 {
			sh.sockq = nil
		}
		if !d.wanted() || d.until <= sh.l.Now() {
			d.on(-1, context.DeadlineExceeded)
			continue
		}
		sh.dialUnix(d)
	}
}

// check forgets the pool of a Unix socket once nothing is left of it: which sockets there have
// been is not for the pod, or an EndpointPolicy, to have remembered.
func (p *appPool) check() {
	if !p.local() || p.dead || p.n+p.dials+len(p.h2.conns)+len(p.h2.old)+len(p.h2.waiters) > 0 {
		return
	}
	p.dead = true
	p.key.pod.share(p.l).hasty = p.hasty // the next pool begins with it
	delete(p.l.apps, p.key)
}
