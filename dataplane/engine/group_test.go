package engine

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"

	"aether/dataplane/exchange"
	"aether/mtls/record"
	"aether/tproxy/socket"
)

// TestHopGroup: hops to one endpoint share a bound on their sessions, which keeps
// none of them from its first one. Close tells what was under way apart from what
// had not been sent.
func TestHopGroup(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	hang := make(chan struct{})
	peer := s.app(func(c *net.TCPConn) { // one request a session, for ever
		p := newPeer2(t, c, false, oracle.Setting{ID: oracle.SettingMaxConcurrentStreams, Val: 1})
		if p.flush() == nil {
			<-hang
		}
	})
	t.Cleanup(func() { close(hang) })
	group := &HopGroup{Max: 3}
	var hops [2]*Hop
	gone := [2]int{}
	dials := atomic.Int64{}
	var fronts [2]string
	var svcs [2]*svc
	for i := range hops {
		svcs[i] = &svc{pod: pod, hop: func(l *Loop) *Hop {
			if hops[i] == nil {
				hops[i] = l.NewHop(pod, func(ctx context.Context) (int, record.Conn, Bond, error) {
					dials.Add(1)
					c, err := new(net.Dialer).DialContext(ctx, "tcp", peer.String())
					if err != nil {
						return -1, nil, nil, err
					}
					fd, err := socket.TakeFD(c.(*net.TCPConn))
					return fd, nil, lasts(time.Hour), err
				}, func() { gone[i]++ })
				hops[i].Join(group)
			}
			return hops[i]
		}}
		fronts[i] = s.front(pod, svcs[i], true)
	}
	ask := func(i, n int) {
		p := newPeer2(t, dial(t, fronts[i]), true)
		for k := range uint32(n) {
			p.get(2*k+1, "/")
		}
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
	}
	sessions := func(i int) (n, waiting int) {
		s.onLoop(func(*Loop) {
			if h := hops[i]; h != nil {
				n, waiting = h.Open(), len(h.waiters)
			}
		})
		return n, waiting
	}
	is := func(what string, i, want, wantWaiting int) {
		t.Helper()
		eventually(t, what, func() bool { n, w := sessions(i); return n == want && w == wantWaiting })
	}
	ask(0, 6)
	is("three of the four that a hop may have", 0, 3, 3)
	ask(1, 2)
	is("the first session of another hop", 1, 1, 1)
	if n := dials.Load(); n != 4 {
		t.Errorf("%d dials, want 4", n)
	}

	cause := errors.New("gone")
	s.onLoop(func(*Loop) { hops[0].Close(cause); hops[0].Close(cause) })
	eventually(t, "all of them are answered", func() bool { return svcs[0].done.Load() == 6 })
	if c, w := svcs[0].codes[exchange.Closed].Load(), svcs[0].codes[exchange.Connect].Load(); c != 3 || w != 3 {
		t.Errorf("%d were told that their session closed, %d that there was none; want 3 and 3", c, w)
	}
	s.onLoop(func(*Loop) {
		if gone[0] != 1 || len(group.hops) != 1 {
			t.Errorf("empty was called %d times, %d hops are in the group", gone[0], len(group.hops))
		}
	})
	ask(1, 1)
	is("there is room again", 1, 3, 0)
}
