package engine

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	oracle "golang.org/x/net/http2"
)

// TestStalledWholeAnswers: answers that came whole and that nobody takes do not keep a pod from being served, be they
// of a hop or of an application: they end as those do of which more is to come.
func TestStalledWholeAnswers(t *testing.T) {
	for _, of := range []string{"hop", "application"} {
		t.Run(of, func(t *testing.T) {
			ck := newClock()
			m := newMesh(t, Config{Now: ck.Now, Memory: 16 << 20, Used: func() uint64 { return 0 }}, netip.AddrPort{})
			m.in.to, m.in.h2 = wholeApp(m.stage), true
			pod, at := m.src, m.h2
			if of == "application" {
				pod, at = m.dst, m.front(m.dst, m.in, true)
			}
			m.small(t)
			p := newPeer2(t, dial(t, at), true, oracle.Setting{ID: oracle.SettingInitialWindowSize, Val: 1})
			for i := range 28 {
				p.get(uint32(2*i+1), "/much")
			}
			if err := p.flush(); err != nil {
				t.Fatal(err)
			}
			tight := func() (yes bool) {
				m.onLoop(func(l *Loop) { yes = pod.share(l).tight })
				return
			}
			eventually(t, "it holds what it may", tight)
			passed := time.Duration(0)
			got := m.ask(t)
			eventually(t, "it is served, while those who stall stay", func() bool {
				select {
				case answer := <-got:
					yes(t, answer)
					return true
				default:
				}
				if passed < time.Minute && tight() {
					ck.move(t, m.e, time.Second)
					passed += time.Second
				}
				return false
			})
			t.Log("after", passed)
		})
	}
}

// wholeApp is an application of HTTP/2 that answers within our windows.
func wholeApp(s *stage) netip.AddrPort {
	return s.app(func(c *net.TCPConn) {
		srv := &oracle.Server{MaxConcurrentStreams: 1000}
		srv.ServeConn(c, &oracle.ServeConnOpts{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/small" {
				io.WriteString(w, "yes")
				return
			}
			w.Write(make([]byte, 200_000))
		})})
	})
}
