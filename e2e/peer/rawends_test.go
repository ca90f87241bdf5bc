package peer

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"aether/e2e/rig"
)

// rawEnds serves raw TCP in a pod and gives its connections to the test.
type rawEnds struct{ c chan *net.TCPConn }

func (r *rawEnds) start(w *world, p *rig.Pod) {
	r.c = make(chan *net.TCPConn)
	serveTCP(w, &p.Space, "127.0.0.1:9000", func(c *net.TCPConn) {
		select {
		case r.c <- c:
			<-w.ctx.Done() // the test closes it
		case <-w.ctx.Done():
		}
	})
}

// open connects from the pod; a byte has gone either way when it returns.
func (r *rawEnds) open(t *testing.T, w *world, from *rig.Pod, addr string) (client, server *net.TCPConn) {
	t.Helper()
	c, err := from.Dial(w.ctx, "tcp", addr)
	must(t, err)
	client = c.(*net.TCPConn)
	t.Cleanup(func() { client.Close() })
	client.SetDeadline(time.Now().Add(10 * time.Second))
	_, err = io.WriteString(client, "?")
	must(t, err)
	select {
	case server = <-r.c:
	case <-time.After(10 * time.Second):
		t.Fatal("no connection reached the application")
	}
	t.Cleanup(func() { server.Close() })
	server.SetDeadline(time.Now().Add(10 * time.Second))
	for _, d := range []struct {
		from, to *net.TCPConn
		say      string
	}{{nil, server, "?"}, {server, client, "!"}} {
		if d.from != nil {
			_, err = io.WriteString(d.from, d.say)
			must(t, err)
		}
		b := make([]byte, 1)
		if _, err := io.ReadFull(d.to, b); string(b) != d.say {
			t.Fatalf("got %q, %v, want %q", b, err, d.say)
		}
	}
	return client, server
}

// check ends connections in every way.
func (r *rawEnds) check(t *testing.T, w *world, from *rig.Pod, addr string) {
	whole := func(t *testing.T, c *net.TCPConn, want string) {
		t.Helper()
		if b, err := io.ReadAll(c); string(b) != want || err != nil {
			t.Errorf("got %q, %v, want %q and the end", b, err, want)
		}
	}
	for _, clientFirst := range []bool{true, false} {
		who := map[bool]string{true: "client", false: "server"}[clientFirst]
		t.Run(who+" ends first", func(t *testing.T) {
			near, far := r.open(t, w, from, addr)
			if !clientFirst {
				near, far = far, near
			}
			io.WriteString(near, "the question")
			near.CloseWrite()
			whole(t, far, "the question")
			for range 3 { // the other direction goes on
				io.WriteString(far, "answer")
				b := make([]byte, 6)
				if _, err := io.ReadFull(near, b); string(b) != "answer" {
					t.Fatalf("got %q, %v", b, err)
				}
			}
			far.CloseWrite()
			whole(t, near, "")
		})
		t.Run(who+" resets", func(t *testing.T) {
			near, far := r.open(t, w, from, addr)
			if !clientFirst {
				near, far = far, near
			}
			near.SetLinger(0)
			near.Close()
			if b, err := io.ReadAll(far); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the other side got %q, %v, want a reset", b, err)
			}
		})
	}
}

// Ends and resets of raw TCP over the hop, with Envoy as the destination and as the source: a reset is carried by a reset of
// the hop, an end by close_notify and FIN.
func TestEnvoyRawEnds(t *testing.T) {
	ports := rig.PodManifest{Ports: "9000=tcp"}
	t.Run("destination", func(t *testing.T) {
		w := newWorld(t)
		b := w.pod(1, "b", ports)
		w.service("b", service, 9000)
		var ends rawEnds
		ends.start(w, b)
		w.destinations(1, 9901, []destination{{Pod: b, Cert: w.svid("b"), Ports: []destinationPort{{9000, "tcp"}}}})
		w.proxy(0)
		ends.check(t, w, w.a, netip.AddrPortFrom(service, 9000).String())
	})
	t.Run("source", func(t *testing.T) {
		w := newWorld(t)
		b := w.pod(1, "b", ports)
		w.service("b", service, 9000)
		var ends rawEnds
		ends.start(w, b)
		w.source([]hop{{Name: "raw", Codec: "tcp", Dial: 9000, To: b.IP4, SNI: "9000", Pin: spiffe("b"), Cert: w.svid("a")}})
		w.proxy(1)
		ends.check(t, w, w.a, netip.AddrPortFrom(service, 9000).String())
	})
}
