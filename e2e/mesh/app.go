package mesh

import (
	"context"
	"net"
	"net/http"
	"sync"

	"aether/e2e/rig"
)

// ServeHTTP serves h at the address in the namespace, HTTP/1.1 and h2c alike, in this process.
func (m *Mesh) ServeHTTP(ctx context.Context, s *rig.Space, addr string, h http.Handler) error {
	l, err := s.Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		srv.Serve(l) // always an error: the one of Close
	}()
	m.OnClose(func() {
		srv.Close()
		<-done
	})
	return nil
}

// ServeTCP calls serve, in a goroutine of its own, with every connection to the
// address in the namespace. serve closes it or not: it is closed when serve
// returns, and at Close.
func (m *Mesh) ServeTCP(ctx context.Context, s *rig.Space, addr string, serve func(*net.TCPConn)) error {
	l, err := s.Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	var (
		mu     sync.Mutex
		conns  = map[net.Conn]bool{}
		closed bool
		all    sync.WaitGroup
	)
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			if closed {
				c.Close()
			} else {
				conns[c] = true
			}
			mu.Unlock()
			all.Go(func() {
				serve(c.(*net.TCPConn))
				c.Close()
				mu.Lock()
				delete(conns, c)
				mu.Unlock()
			})
		}
	})
	m.OnClose(func() {
		l.Close()
		mu.Lock()
		closed = true
		for c := range conns {
			c.Close()
		}
		mu.Unlock()
		all.Wait()
	})
	return nil
}

// To dials addr, a literal address and port, from the pod, whatever it is asked for.
func To(p *rig.Pod, addr string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) { return p.Dial(ctx, "tcp", addr) }
}

// HTTP1 is an HTTP/1.1 client whose connections all go from the pod to addr. It
// adds nothing to requests that it is not told to add.
func HTTP1(p *rig.Pod, addr string) *http.Transport {
	return &http.Transport{DialContext: To(p, addr), DisableCompression: true}
}

// H2C is HTTP1 for HTTP/2 with prior knowledge.
func H2C(p *rig.Pod, addr string) *http.Transport {
	t := HTTP1(p, addr)
	t.Protocols = new(http.Protocols)
	t.Protocols.SetUnencryptedHTTP2(true)
	return t
}
