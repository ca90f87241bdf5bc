package engine

import (
	"aether/tproxy/socket"
	"context"
	"time"

	"golang.org/x/sys/unix"
)

// dialQueue are the connections that are being made for a pod on a loop, each kind bounded.
type dialQueue struct {
	l     *Loop
	dials int // hop sessions
	dialq []dialWaiter
	socks int         // connections to the pod's Unix socket
	sockq []localDial // wait for theirs
	hasty bool        // appPool's, of the last Unix socket of which no connection is left
}

// dialWaiter waits for its turn to dial a hop session.
type dialWaiter interface {
	nextDial(d *dialQueue) // it is its turn: it dials, or wants to no more
}

// dialled gives the place of a dial that is over to the one that waits longest.
func (d *dialQueue) dialled() {
	d.dials--
	for len(d.dialq) > 0 && d.dials < podDials {
		w := d.dialq[0]
		d.dialq[0] = nil
		d.dialq = d.dialq[1:]
		w.nextDial(d)
	}
}

func (l *Loop) dialsOf(p *Pod) *dialQueue {
	s := p.share(l)
	d, ok := s.dials.(*dialQueue)
	if !ok {
		d = &dialQueue{l: l}
		s.dials = d
	}
	return d
}

// localDial is a connection to a Unix socket that is wanted.
type localDial struct {
	to     socket.Unix
	until  int64                   // in the loop's clock
	wanted func() bool             // asked when its turn comes
	on     func(fd int, err error) // called on the loop, once
}

func (ds *dialQueue) dialUnix(d localDial) {
	l := ds.l
	ds.socks++
	left := time.Duration(d.until - l.Now())
	l.Go(func() {
		ctx, cancel := context.WithTimeout(l.proc.ctx, left)
		defer cancel()
		fd, err := socket.ConnectUnix(ctx, d.to)
		perr := l.Post(func() {
			ds.socks--
			d.on(fd, err)
			ds.nextUnix()
		})
		if perr != nil && err == nil {
			unix.Close(fd)
		}
	})
}

// nextUnix gives those that wait their turn; one whose time has passed meanwhile fails.
func (ds *dialQueue) nextUnix() {
	for len(ds.sockq) > 0 && ds.socks < podSocks {
		d := ds.sockq[0]
		ds.sockq[0] = localDial{}
		if ds.sockq = ds.sockq[1:]; len(ds.sockq) == 0 {
			ds.sockq = nil
		}
		if !d.wanted() || d.until <= ds.l.Now() {
			d.on(-1, context.DeadlineExceeded)
			continue
		}
		ds.dialUnix(d)
	}
}
