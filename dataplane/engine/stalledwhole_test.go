package engine

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"sync"
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
	return s.h2App(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/small" {
			_, _ = io.WriteString(w, "yes")
			return
		}
		_, _ = w.Write(make([]byte, 200_000))
	})
}

// h2App is an application of HTTP/2 by net/http. Its requests know their connection by netConn.
func (s *stage) h2App(serve http.HandlerFunc) netip.AddrPort {
	s.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	srv := &http.Server{
		Handler: serve, Protocols: new(http.Protocols), HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 1000}, ErrorLog: log.New(io.Discard, "", 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, netConn{}, c) },
	}
	srv.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) }) // until Close
	s.t.Cleanup(func() { _ = srv.Close(); wg.Wait() })
	return netip.MustParseAddrPort(ln.Addr().String())
}

type netConn struct{}
